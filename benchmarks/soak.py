"""Kill runs at random moments, also during saves, resume them, and check that nothing is lost.

    python benchmarks/soak.py              # 100 kills
    python benchmarks/soak.py --kills 500

For every strategy a small model is trained twice on noise: once without a break, and once killed
(SIGKILL) and resumed again and again. Both must end with the same weights and the same optimizer
state, bit for bit, and the same metrics, with no line missing or repeated.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

import numpy as np
import soundfile
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from batching import STRATEGIES
from cli import ArgumentParser, UserError, exit_on_user_error, positive
from training.checkpoint import checkpoints, load_checkpoint, load_newest

ROOT = Path(__file__).resolve().parent.parent
TIMED = {"duration", "minutes", "frames_per_second", "data_wait", "peak_memory_gib"}
MODEL = (
    "symbols_embedding_dim=8,encoder_embedding_dim=8,prenet_dim=8,attention_rnn_dim=12,"
    "attention_dim=6,attention_location_n_filters=4,attention_location_kernel_size=5,"
    "decoder_rnn_dim=10,postnet_embedding_dim=8,n_mel_channels=10"
)
DATA = (
    "data_dir={0},training_files={0}/train.txt,validation_files={0}/val.txt,"
    "mel_cache_dir={0}/cache,batch_size=3,bucket_size=6,n_bins=2,epochs_per_validation=3,"
    "epochs_per_checkpoint=2,checkpoint_minutes=1e-9"  # after every batch: many kills hit a save
)


def write_noise(corpus: Path, n_samples: Iterable[int]) -> None:
    """Write clips of noise, in LJSpeech's layout."""
    rng, rows = np.random.default_rng(0), []
    (corpus / "wavs").mkdir()
    for i, n in enumerate(n_samples):
        soundfile.write(corpus / f"wavs/{i}.wav", rng.uniform(-0.3, 0.3, n), 22050)
        rows.append(f"{i}|{'noise ' * (n // 9384 + 1)}\n")
    (corpus / "metadata.csv").write_text("".join(rows))


def start(output: Path, settings: str) -> subprocess.Popen:
    """Start a run, or if it has a checkpoint resume it by --resume alone."""
    command = [sys.executable, "train.py", "-o", output]
    command += ["--resume"] if any(output.glob("*.pt")) else ["--hparams", settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(f"{output}.log", "ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)


def finished(process: subprocess.Popen, output: Path) -> bool:
    """Whether the training ended by itself, and not by a kill."""
    if process.wait() not in (0, -signal.SIGKILL):
        log = Path(f"{output}.log").read_text()
        raise UserError(f"train.py ended with status {process.returncode}:\n{log[-2000:]}")
    return process.returncode == 0


def kill_once(output: Path, settings: str) -> str | None:
    """Start the run and kill it; returns the phase it was in, or None if it had finished."""

    def written() -> float:
        metrics = output / "metrics.jsonl"
        return metrics.stat().st_mtime_ns if metrics.exists() else 0

    target, before = random.choice(("the start", "training", "a save")), written()
    process = start(output, settings)
    while target != "the start" and process.poll() is None and written() == before:
        time.sleep(0.001)
    time.sleep(random.uniform(0, 5 if target == "the start" else 1))  # imports take seconds
    while target == "a save" and process.poll() is None and not any(output.glob("*.part")):
        pass  # sleeping would miss the moment
    time.sleep(random.uniform(0, 0.002))
    process.kill()
    if finished(process, output):
        return None
    if any(output.glob("*.part")):
        return "a save"
    return "the start" if written() == before else "training"


def outcome(run: Path) -> tuple[list[dict], list[dict]]:
    """Weights and optimizer state, and the metrics that equal runs have in common."""
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


def soak(folder: Path, strategy: str, kills: int, epochs: int) -> Counter[str]:
    """Kill the training of a strategy ``kills`` times; returns how often in which phase."""
    folder.mkdir()
    write_noise(folder, range(2205, 11013, 367))  # 0.1 to 0.5 s
    lines = [f"wavs/{i}.wav|{'noise ' * (1 + i % 5)}\n" for i in range(24)]
    (folder / "train.txt").write_text("".join(lines[::2] + lines[1::4]))
    (folder / "val.txt").write_text("".join(lines[3::4]))
    settings = (
        f"{MODEL},{DATA.format(folder)},batching_strategy={strategy},epochs={epochs},"
        f"dynamic_batch_size={random.random() < 0.5}"
    )
    unbroken, broken = folder / "unbroken", folder / "broken"
    finished(start(unbroken, settings), unbroken)
    phases = Counter()
    while phases.total() < kills:
        phase = kill_once(broken, settings)
        if phase is None:  # it had finished: compare it, and break another one
            assert_same_run(unbroken, broken)
            broken = folder / f"broken{phases.total()}"
        else:
            phases[phase] += 1
        for path in checkpoints(broken):
            load_checkpoint(path)  # each must be whole
    finished(start(broken, settings), broken)
    assert_same_run(unbroken, broken)
    steps = load_newest(unbroken)[1]["progress"]["step"]
    print(f"{strategy}: {dict(phases)}; {steps} steps, weights and metrics equal")
    return phases


def main() -> None:
    parser = ArgumentParser(description="Kill runs at random moments and resume them.")
    parser.add_argument("--kills", type=positive, default=100, help="total (%(default)s)")
    kills, phases, started = parser.parse_args().kills, Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for k, strategy in enumerate(STRATEGIES):
            share = (kills + k) // len(STRATEGIES)
            if share:
                phases += soak(Path(name, strategy), strategy, share, epochs=120)
    minutes = (time.monotonic() - started) / 60
    print(f"{phases.total()} kills ({dict(phases)}) in {minutes:.1f} minutes: nothing lost")


if __name__ == "__main__":
    exit_on_user_error(main)
