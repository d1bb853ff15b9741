"""Kill trainings at random moments, amid saves too, resume them, and see that nothing is lost.

    bash scripts/soak.sh              # 100 kills
    bash scripts/soak.sh --kills 500 --seed 1

For every strategy a small model is trained twice on made-up tones: once without a break, and once
killed (SIGKILL) and resumed again and again. Both must end with equal weights, bit for bit, and
equal metrics, no line twice and none missing.
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

from checkpoint import checkpoints, load_checkpoint, load_newest
from cli import ArgumentParser, UserError, exit_on_user_error
from scripts.runs import read_metrics

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = ("SSB", "RAND", "SB", "BKT", "ATS")
# What differs between two equal runs.
TIMED = {"duration", "minutes", "frames_per_second", "data_wait", "peak_memory_gib"}
MODEL = (
    "symbols_embedding_dim=8,encoder_embedding_dim=8,prenet_dim=8,attention_rnn_dim=12,"
    "attention_dim=6,attention_location_n_filters=4,attention_location_kernel_size=5,"
    "decoder_rnn_dim=10,postnet_embedding_dim=8,n_mel_channels=10"
)


def make_tones(folder: Path, n: int = 24) -> str:
    """``n`` tones of 0.1 to 0.5 s, the last quarter to validate on; returns their settings."""
    lines = []
    for i in range(n):
        t = np.arange(int(22050 * (0.1 + 0.4 * (i * 7 % n) / n))) / 22050
        soundfile.write(folder / f"{i}.wav", 0.3 * np.sin(2 * np.pi * (200 + 10 * i) * t), 22050)
        lines.append(f"{i}.wav|{'tone ' * (1 + i % 5)}\n")
    for name, part in (("train", lines[: 3 * n // 4]), ("val", lines[3 * n // 4 :])):
        (folder / f"{name}.txt").write_text("".join(part))
    return (
        f"{MODEL},data_dir={folder},training_files={folder}/train.txt,"
        f"validation_files={folder}/val.txt,mel_cache_dir={folder}/cache,batch_size=3,"
        "bucket_size=6,n_bins=2,epochs_per_validation=3,epochs_per_checkpoint=2,"
        "checkpoint_minutes=1e-9"  # after every batch: many moments to be killed amid a save
    )


def start(output: Path, settings: str, log: Path) -> subprocess.Popen:
    """Start a training, or resume it once it has a checkpoint: by --resume alone."""
    command = [sys.executable, "train.py", "-o", output]
    command += ["--resume"] if any(output.glob("*.pt")) else ["--hparams", settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(log, "ab") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=environment)


def finish(output: Path, settings: str, log: Path) -> None:
    if status := start(output, settings, log).wait():
        raise UserError(f"train.py ended with status {status}:\n{log.read_text()[-2000:]}")


def kill_once(
    output: Path, settings: str, log: Path, rng: random.Random, startup: float
) -> str | None:
    """Start the training, kill it; returns what it was at, or None if it was done before."""
    metrics, aim = output / "metrics.jsonl", rng.choice(("the start", "training", "a save"))
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0

    def trains() -> bool:
        return metrics.exists() and metrics.stat().st_mtime_ns != before

    process = start(output, settings, log)
    if aim == "the start":
        time.sleep(rng.uniform(0, startup))
    else:
        while process.poll() is None and not trains():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 1))
    while aim == "a save" and process.poll() is None and not any(output.glob("*.part")):
        pass  # as near as can be told from outside
    time.sleep(rng.uniform(0, 0.002))
    process.kill()
    status = process.wait()
    if status == 0:
        return None
    if status != -signal.SIGKILL:
        raise UserError(f"train.py ended with status {status}:\n{log.read_text()[-2000:]}")
    if any(output.glob("*.part")):
        return "a save"
    return "training" if trains() else "the start"


def assert_same_run(one: Path, other: Path) -> None:
    """Raise :class:`UserError` unless two finished runs are equal."""
    first, second = (load_newest(folder)[1] for folder in (one, other))
    for name, weight in first["state_dict"].items():
        if not torch.equal(weight, second["state_dict"][name]):
            raise UserError(f"{other}: weight {name} differs from that of the unbroken run")
    for k, moments in first["optimizer"]["state"].items():
        for name, moment in moments.items():
            if not torch.equal(moment, second["optimizer"]["state"][k][name]):
                raise UserError(f"{other}: {name} of weight {k} differs from the unbroken run's")
    records = []
    for folder in (one, other):
        lines = read_metrics(folder / "metrics.jsonl")
        lines = [line for line in lines if line["event"] != "start"]  # one more after each break
        records.append([{k: v for k, v in line.items() if k not in TIMED} for line in lines])
    if records[0] != records[1]:
        k = next((k for k, (a, b) in enumerate(zip(*records)) if a != b), min(map(len, records)))  # noqa: B905
        raise UserError(
            f"{other}/metrics.jsonl:{k + 1}: differs from the unbroken run's; "
            f"{len(records[0])} and {len(records[1])} lines"
        )


def soak(
    folder: Path, strategy: str, kills: int, rng: random.Random, epochs: int
) -> tuple[Counter[str], int]:
    """Kill the training of a strategy ``kills`` times; what it was at, and its batches.

    Raises:
        UserError: anything was lost, or differs.
    """
    folder.mkdir()
    dynamic = rng.random() < 0.5
    settings = (
        f"{make_tones(folder)},batching_strategy={strategy},epochs={epochs},"
        f"dynamic_batch_size={dynamic},num_workers={rng.randrange(2)}"
    )
    log, whole, broken = folder / "log", folder / "whole", folder / "broken"
    started = time.monotonic()
    process = start(whole, settings, log)
    while process.poll() is None and not checkpoints(whole):
        time.sleep(0.01)
    startup = time.monotonic() - started
    if status := process.wait():
        raise UserError(f"train.py ended with status {status}:\n{log.read_text()[-2000:]}")
    found, n = Counter(), 0
    while n < kills:
        at = kill_once(broken, settings, log, rng, startup)
        if at is None:  # done: it counts, and another is broken
            assert_same_run(whole, broken)
            broken = folder / f"broken{n}"
            continue
        n += 1
        found[at] += 1
        for path in checkpoints(broken):
            load_checkpoint(path)  # whole, all of them
    finish(broken, settings, log)
    assert_same_run(whole, broken)
    return found, load_newest(whole)[1]["progress"]["step"]


def main() -> None:
    parser = ArgumentParser(
        prog="soak.sh", description="Kill trainings at random moments and resume them."
    )
    parser.add_argument("--kills", type=int, default=100, help="in all (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--epochs", type=int, default=120, help="of each run (default %(default)s)")
    parser.add_argument("--only", default=" ".join(STRATEGIES), help="(default %(default)s)")
    args = parser.parse_args()
    rng, strategies = random.Random(args.seed), args.only.split()
    if args.kills < 1 or not strategies or not set(strategies) <= set(STRATEGIES):
        raise UserError(f"--kills {args.kills} --only '{args.only}': give 1 or more, and of "
                        f"{' '.join(STRATEGIES)}")  # fmt: skip
    total, started = Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for k, strategy in enumerate(strategies):
            kills = (args.kills + k) // len(strategies)
            found, steps = soak(Path(name, strategy), strategy, kills, rng, args.epochs)
            total += found
            print(f"{strategy}: {json.dumps(found)}; {steps} steps, weights and metrics equal")
    minutes = (time.monotonic() - started) / 60
    print(f"{total.total()} kills ({json.dumps(total)}) in {minutes:.1f} minutes: nothing lost")


if __name__ == "__main__":
    exit_on_user_error(main)
