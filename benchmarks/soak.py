"""Kill trainings at random moments, mid-save too, resume them, and check that nothing is lost.

    bash benchmarks/soak.sh              # 100 kills
    bash benchmarks/soak.sh --kills 500 --seed 1

For every strategy a small model is trained twice on synthetic tones: once without a break, and once
killed (SIGKILL) and resumed again and again. Both must end with the same weights and the same
optimizer state, bit for bit, and the same metrics, with no line missing or repeated.
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
from pathlib import Path

import numpy as np
import soundfile
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import STRATEGIES
from checkpoint import checkpoints, load_checkpoint, load_newest
from cli import ArgumentParser, UserError, exit_on_user_error, positive
from scripts.runs import read_metrics

ROOT = Path(__file__).resolve().parent.parent
# What differs between two equal runs.
TIMED = {"duration", "minutes", "frames_per_second", "data_wait", "peak_memory_gib"}
MODEL = (
    "symbols_embedding_dim=8,encoder_embedding_dim=8,prenet_dim=8,attention_rnn_dim=12,"
    "attention_dim=6,attention_location_n_filters=4,attention_location_kernel_size=5,"
    "decoder_rnn_dim=10,postnet_embedding_dim=8,n_mel_channels=10"
)


def make_tones(folder: Path, n: int = 24) -> str:
    """Write ``n`` tones of 0.1 to 0.5 s, the last quarter for validation; returns the settings."""
    lines = []
    for i in range(n):
        t = np.arange(int(22050 * (0.1 + 0.4 * (i * 7 % n) / n))) / 22050
        soundfile.write(folder / f"{i}.wav", 0.3 * np.sin(2 * np.pi * (200 + 10 * i) * t), 22050)
        lines.append(f"{i}.wav|{'tone ' * (1 + i % 5)}\n")
    (folder / "train.txt").write_text("".join(lines[: 3 * n // 4]))
    (folder / "val.txt").write_text("".join(lines[3 * n // 4 :]))
    return (
        f"{MODEL},data_dir={folder},training_files={folder}/train.txt,"
        f"validation_files={folder}/val.txt,mel_cache_dir={folder}/cache,batch_size=3,"
        "bucket_size=6,n_bins=2,epochs_per_validation=3,epochs_per_checkpoint=2,"
        "checkpoint_minutes=1e-9"  # after every batch, so that many kills hit a save
    )


def start(output: Path, settings: str) -> subprocess.Popen:
    """Start a training; if it has a checkpoint, resume it by --resume alone."""
    command = [sys.executable, "train.py", "-o", output]
    command += ["--resume"] if any(output.glob("*.pt")) else ["--hparams", settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(f"{output}.log", "ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)


def wait(process: subprocess.Popen, output: Path, expected: tuple[int, ...] = (0,)) -> int:
    """Wait until the training ends; its status, which must be one of those expected."""
    status = process.wait()
    if status not in expected:
        log = Path(f"{output}.log").read_text()
        raise UserError(f"train.py ended with status {status}:\n{log[-2000:]}")
    return status


def kill_once(output: Path, settings: str, rng: random.Random, startup: float) -> str | None:
    """Start the training and kill it; returns in which phase, or None if it had finished."""
    metrics, target = output / "metrics.jsonl", rng.choice(("the start", "training", "a save"))
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0

    def is_training() -> bool:
        return metrics.exists() and metrics.stat().st_mtime_ns != before

    process = start(output, settings)
    if target == "the start":
        time.sleep(rng.uniform(0, startup))
    else:
        while process.poll() is None and not is_training():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 1))
    while target == "a save" and process.poll() is None and not any(output.glob("*.part")):
        pass  # sleeping would miss the moment
    time.sleep(rng.uniform(0, 0.002))
    process.kill()
    if wait(process, output, (0, -signal.SIGKILL)) == 0:
        return None
    if any(output.glob("*.part")):
        return "a save"
    return "training" if is_training() else "the start"


def assert_same_run(unbroken: Path, other: Path) -> None:
    """Raise :class:`UserError` unless two finished runs have equal weights, optimizer state and
    metrics, bit for bit."""
    states, metrics = [], []
    for folder in (unbroken, other):
        _, state = load_newest(folder)
        states.append({"weights": state["state_dict"], "moments": state["optimizer"]["state"]})
        lines = read_metrics(folder / "metrics.jsonl")
        lines = [line for line in lines if line["event"] != "start"]  # one more after each break
        metrics.append([{k: v for k, v in line.items() if k not in TIMED} for line in lines])
    try:
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    except AssertionError as error:
        raise UserError(f"{other}: differs from the unbroken run: {error}") from None
    if metrics[0] != metrics[1]:
        pairs = zip(*metrics, strict=False)
        same = next((k for k, (a, b) in enumerate(pairs) if a != b), min(map(len, metrics)))
        raise UserError(
            f"{other}/metrics.jsonl: differs from the unbroken run's after {same} equal lines; "
            f"{len(metrics[0])} and {len(metrics[1])} lines"
        )


def soak(
    folder: Path, strategy: str, kills: int, rng: random.Random, epochs: int
) -> tuple[Counter[str], int]:
    """Kill the training of a strategy ``kills`` times. Returns how often in which phase, and the
    run's steps.

    Raises:
        UserError: anything was lost, or differs.
    """
    folder.mkdir()
    settings = (
        f"{make_tones(folder)},batching_strategy={strategy},epochs={epochs},"
        f"dynamic_batch_size={rng.random() < 0.5},num_workers={rng.randrange(2)}"
    )
    unbroken, broken = folder / "unbroken", folder / "broken"
    started = time.monotonic()
    process = start(unbroken, settings)
    while process.poll() is None and not checkpoints(unbroken):
        time.sleep(0.01)
    startup = time.monotonic() - started
    wait(process, unbroken)
    phases = Counter()
    while phases.total() < kills:
        phase = kill_once(broken, settings, rng, startup)
        if phase is None:  # it had finished: compare it, and break another one
            assert_same_run(unbroken, broken)
            broken = folder / f"broken{phases.total()}"
            continue
        phases[phase] += 1
        for path in checkpoints(broken):
            load_checkpoint(path)  # each must be whole
    wait(start(broken, settings), broken)
    assert_same_run(unbroken, broken)
    return phases, load_newest(unbroken)[1]["progress"]["step"]


def main() -> None:
    parser = ArgumentParser(
        prog="soak.sh", description="Kill trainings at random moments and resume them."
    )
    add = parser.add_argument
    add("--kills", type=positive, default=100, help="in all (default %(default)s)")
    add("--seed", type=int, default=0, help="of the moments (default %(default)s)")
    add("--epochs", type=positive, default=120, help="of each run (default %(default)s)")
    add("--only", default=" ".join(STRATEGIES), help="strategies (default '%(default)s')")
    args = parser.parse_args()
    rng, strategies = random.Random(args.seed), args.only.split()
    if not strategies or not set(strategies) <= set(STRATEGIES):
        raise UserError(f"--only '{args.only}': name some of {' '.join(STRATEGIES)}")
    total, started = Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for k, strategy in enumerate(strategies):
            kills = (args.kills + k) // len(strategies)
            phases, steps = soak(Path(name, strategy), strategy, kills, rng, args.epochs)
            total += phases
            print(f"{strategy}: {json.dumps(phases)}; {steps} steps, weights and metrics equal")
    minutes = (time.monotonic() - started) / 60
    print(f"{total.total()} kills ({json.dumps(total)}) in {minutes:.1f} minutes: nothing lost")


if __name__ == "__main__":
    exit_on_user_error(main)
