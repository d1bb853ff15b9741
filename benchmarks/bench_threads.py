"""Time training steps beside a process that keeps one core busy.

    python benchmarks/bench_threads.py

For three models, alone and beside a busy loop: OpenMP's threads as they come with PyTorch, and as
train.py lets them wait. All take turns; figures are medians. OMP_NUM_THREADS says how many
threads there are. On Linux.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train  # noqa: F401  its rule, before PyTorch is loaded here and in the workers

# isort: split
import torch

from benchmarks.bench_step import Shape, Worker
from cli import ArgumentParser, UserError, exit_on_user_error

RULES = {"as they come": "300000", "as train.py has them": os.environ["GOMP_SPINCOUNT"]}


def reduced(size: int) -> str:
    """Settings of a model whose layers have ``size`` units, as the demo's have 128."""
    layers = ("symbols_embedding", "encoder_embedding", "prenet", "attention_rnn", "decoder_rnn")
    names = [f"{name}_dim={size}" for name in (*layers, "postnet_embedding")]
    return f"{','.join(names)},attention_dim={size // 4},attention_location_n_filters=8"


# Settings, clips of a batch, frames of a clip.
MODELS = {
    "60 thousand": (reduced(24), 8, 100),
    "1 million": (reduced(128), 8, 100),
    "28 million": ("", 16, 60),
}


def median_step(workers: dict[str, Worker], shape: Shape, rounds: int) -> dict[str, float]:
    """Milliseconds of each."""
    times = {name: [] for name in workers}
    for _ in range(rounds):
        for name, worker in workers.items():
            times[name].append(worker.step(shape, with_optimizer=True)[0].step)
    return {name: 1000 * statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = ArgumentParser(description="Time training steps beside a busy process.")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each (%(default)s)")
    args = parser.parse_args()
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: use 1 or more")
    print(f"CPU, {torch.get_num_threads()} threads; PyTorch {torch.__version__}\n")
    print("| parameters | threads wait | alone, ms | beside a busy process, ms | ratio |")
    print("|--:|---|--:|--:|--:|")
    for name, (overrides, B, T) in MODELS.items():
        settings = argparse.Namespace(
            threads=torch.get_num_threads(), no_onednn=False, hparams=overrides
        )
        workers, shape = {}, Shape([T] * B, [T // 4] * B)
        for rule, spins in RULES.items():
            os.environ["GOMP_SPINCOUNT"] = spins  # the worker's PyTorch reads it when loaded
            workers[rule] = Worker("scan", settings)
        median_step(workers, shape, 1)  # what is done once
        alone = median_step(workers, shape, args.rounds)
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            beside = median_step(workers, shape, args.rounds)
        finally:
            busy.kill()
            busy.wait()
        for rule, worker in workers.items():
            ratio = beside[rule] / alone[rule]
            print(f"| {name} | {rule} | {alone[rule]:.0f} | {beside[rule]:.0f} | {ratio:.1f}x |")
            worker.close()


if __name__ == "__main__":
    exit_on_user_error(main)
