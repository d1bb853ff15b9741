"""Start runs in a row, end half of them by signals at random moments, resume them, and check that
nothing hangs and nothing is lost. Makes the table of "Stops and kills" in docs/reliability.md.

    python benchmarks/soak.py              # 50 runs
    python benchmarks/soak.py --runs 500

For every strategy a small model is trained on noise, first without a break. Further runs get no
signal, or SIGINT, SIGTERM or SIGKILL, once or twice, at random moments, also during saves, and are
resumed. Each must end in time and with the right status. A training that is done must have the
same weights and the same optimizer state as the unbroken one, bit for bit, and the same metrics,
with no line missing or repeated.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from signal import SIGABRT, SIGINT, SIGKILL, SIGTERM, default_int_handler, signal

import numpy as np
import soundfile
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from batching import STRATEGIES
from cli import ArgumentParser, UserError, exit_on_user_error, positive
from training.checkpoint import checkpoints, load_checkpoint, load_newest

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 120  # for a run, and for its end after the last signal
N_EPOCHS = 6
TIMED = {"duration", "minutes", "processor_minutes", "frames_per_second", "data_wait"}
TIMED |= {"peak_memory_gib", "peak_reserved_gib"}
SETTINGS = (
    "symbols_embedding_dim=8,encoder_embedding_dim=8,prenet_dim=8,attention_rnn_dim=12,"
    "attention_dim=6,attention_location_n_filters=4,attention_location_kernel_size=5,"
    "decoder_rnn_dim=10,postnet_embedding_dim=8,n_mel_channels=10,"
    "data_dir={0},training_files={0}/train.txt,validation_files={0}/val.txt,"
    "mel_cache_dir={0}/cache,batch_size=3,bucket_size=6,n_bins=2,deterministic=True,"
    f"epochs={N_EPOCHS},epochs_per_validation=3,epochs_per_checkpoint=2,"
    "checkpoint_minutes=1e-9"  # after every batch: many signals hit a save
)


def write_corpus(folder: Path) -> None:
    """Writes 24 clips of noise, of 0.1 to 0.5 s, and their filelists."""
    rng, lines = np.random.default_rng(0), []
    folder.mkdir()
    for i in range(24):
        samples = rng.uniform(-0.3, 0.3, 2205 + 367 * i)
        soundfile.write(folder / f"{i}.wav", samples, 22050)
        lines.append(f"{i}.wav|{'noise ' * (1 + i % 5)}\n")
    (folder / "train.txt").write_text("".join(lines[::2] + lines[1::4]))
    (folder / "val.txt").write_text("".join(lines[3::4]))


def start(output: Path, settings: str) -> subprocess.Popen:
    """Starts a run, or if it has a checkpoint resumes it by --resume alone."""
    command = [sys.executable, "train.py", "-o", output]
    command += ["--resume"] if any(output.glob("*.pt")) else ["--hparams", settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    with open(f"{output}.log", "wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)


def ended(process: subprocess.Popen, output: Path, statuses: set[int]) -> int:
    """Returns the status that a run ends with.

    Raises:
        UserError: it hangs, and then its threads are shown; or its status is none of ``statuses``.
    """
    problem = ""
    try:
        process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        problem = "hangs"
        process.send_signal(SIGABRT)  # faulthandler prints where each thread is
        process.wait()
    if not problem and process.returncode not in statuses:
        problem = f"ended with status {process.returncode}, not {sorted(statuses)}"
    if problem:
        raise UserError(f"{output}: train.py {problem}:\n{Path(f'{output}.log').read_text()}")
    return process.returncode


def run_once(output: Path, settings: str, seconds: float) -> tuple[str, str, int]:
    """Starts the run, and lets it be or signals it at a random moment of ``seconds``; returns the
    signals, the phase that they found it in, and its exit status."""

    def written() -> int:
        metrics = output / "metrics.jsonl"
        return metrics.stat().st_size if metrics.exists() else 0

    signals = random.choice(
        [[], [], [], [], [], [SIGINT], [SIGTERM], [SIGKILL], [SIGINT] * 2, [SIGTERM] * 2]
    )
    before, process = written(), start(output, settings)
    time.sleep(random.uniform(0, seconds) if signals else 0)
    phase = "in training" if written() > before else "at the start"
    for number in signals:
        process.send_signal(number)
        time.sleep(random.uniform(0, 0.2))
    # 0: it was done before the signal came. Before the first batch and after the last, SIGTERM ends
    # it at once, as the second signal does.
    status = ended(process, output, {0} | {s for n in signals for s in (-n, 128 + n)})
    alone = len(signals) == 1 and SIGKILL not in signals
    done = load_newest(output)[1].get("progress", {}).get("epoch") == N_EPOCHS
    if alone and status < 0 and phase == "in training" and not done:
        raise UserError(f"{output}: {signals[0].name} ended the training without saving")
    if status == -SIGKILL and any(output.glob("*.part")):
        phase = "while saving"
    return " + ".join(n.name for n in signals) or "no signal", phase, status


def outcome(run: Path) -> tuple[list[dict], list[dict]]:
    """Returns weights and optimizer state, and the metrics that equal runs have in common."""
    _, state = load_newest(run)
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    records = [record for record in records if record["event"] != "start"]  # one a resume
    records = [{k: v for k, v in record.items() if k not in TIMED} for record in records]
    return [state["state_dict"], state["optimizer"]["state"]], records


def assert_same_run(unbroken: Path, other: Path) -> None:
    (expected, expected_records), (state, records) = outcome(unbroken), outcome(other)
    torch.testing.assert_close(state, expected, rtol=0, atol=0, msg=f"{other}: {{}}".format)
    for a, b in zip_longest(records, expected_records):
        assert a == b, f"{other}: metrics.jsonl has {a}, the unbroken run {b}"


def soak(folder: Path, strategy: str, n_runs: int) -> Counter[tuple[str, str, int]]:
    """Starts ``n_runs`` runs of a strategy; returns how often each signal came in which phase, and
    with which exit status."""
    write_corpus(folder)
    settings = (
        f"{SETTINGS.format(folder)},batching_strategy={strategy},"
        f"dynamic_batch_size={random.random() < 0.5}"
    )
    unbroken, broken, n_compared = folder / "unbroken", folder / "broken0", 0
    began = time.monotonic()
    ended(start(unbroken, settings), unbroken, {0})
    seconds, ends = time.monotonic() - began, Counter()
    for i in range(n_runs):
        end = run_once(broken, settings, seconds)
        ends[end] += 1
        for path in checkpoints(broken):
            load_checkpoint(path)  # each must be whole
        last = i == n_runs - 1
        if last and end[2] != 0:
            ended(start(broken, settings), broken, {0})
        if last or end[2] == 0:  # compare it, and begin another one
            assert_same_run(unbroken, broken)
            broken, n_compared = folder / f"broken{i + 1}", n_compared + 1
    print(f"{strategy}: {n_runs} runs; weights and metrics of {n_compared} trainings are equal")
    return ends


def main() -> None:
    parser = ArgumentParser(description="Signal runs at random moments and resume them.")
    parser.add_argument("--runs", type=positive, default=50, help="total (%(default)s)")
    n_runs, ends, began = parser.parse_args().runs, Counter(), time.monotonic()
    signal(SIGINT, default_int_handler)  # a shell's background jobs, and their children, ignore it
    with tempfile.TemporaryDirectory() as name:
        for k, strategy in enumerate(STRATEGIES):
            if share := (n_runs + k) // len(STRATEGIES):
                ends += soak(Path(name, strategy), strategy, share)
    print("\n| signal | it came | exit status | runs |\n|---|---|--:|--:|")
    for (signals, phase, status), n in sorted(ends.items()):
        print(f"| {signals} | {phase if signals != 'no signal' else ''} | {status} | {n} |")
    minutes = (time.monotonic() - began) / 60
    print(f"\n{n_runs} runs in {minutes:.1f} minutes: none hung, nothing lost")


if __name__ == "__main__":
    exit_on_user_error(main)
