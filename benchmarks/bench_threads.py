"""Time training steps beside a process that keeps one core busy.

    python benchmarks/bench_threads.py

For models of three sizes, alone and beside a busy loop: with OpenMP's threads waiting as they do by
default, and as train.py has them wait. All take turns; times are medians. OMP_NUM_THREADS sets the
number of threads. On Linux.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train  # noqa: F401  sets GOMP_SPINCOUNT before PyTorch is loaded, here and in the workers

# isort: split
import torch

from benchmarks.bench_step import Shape, open_pool, take_step
from cli import ArgumentParser, exit_on_user_error, positive

RULES = {"by default": "300000", "as in train.py": os.environ["GOMP_SPINCOUNT"]}


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


def milliseconds(
    pools: dict[str, ProcessPoolExecutor], shape: Shape, rounds: int
) -> dict[str, float]:
    """Median time of a step in each pool."""
    times = {rule: [] for rule in pools}
    for _ in range(rounds):
        for rule, pool in pools.items():
            times[rule].append(1000 * take_step(pool, shape).seconds)
    return {rule: median(taken) for rule, taken in times.items()}


def main() -> None:
    parser = ArgumentParser(description="Time training steps beside a busy process.")
    parser.add_argument("--rounds", type=positive, default=9, help="steps of each (%(default)s)")
    rounds = parser.parse_args().rounds
    threads = torch.get_num_threads()
    print(f"CPU, {threads} threads; PyTorch {torch.__version__}\n")
    print("| parameters | threads wait | alone, ms | beside a busy process, ms | ratio |")
    print("|--:|---|--:|--:|--:|")
    for name, (overrides, B, T) in MODELS.items():
        options = argparse.Namespace(
            threads=threads, no_onednn=False, hparams=overrides, epoch=True
        )
        pools, shape = {}, Shape([T] * B, [T // 4] * B)
        with ExitStack() as stack:
            for rule, spins in RULES.items():
                os.environ["GOMP_SPINCOUNT"] = spins  # read by the worker's PyTorch
                pools[rule] = stack.enter_context(open_pool("scan", options))
                take_step(pools[rule], shape)  # starts it, and warms up
            alone = milliseconds(pools, shape, rounds)
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
            beside = milliseconds(pools, shape, rounds)
        for rule in RULES:
            ratio = beside[rule] / alone[rule]
            print(f"| {name} | {rule} | {alone[rule]:.0f} | {beside[rule]:.0f} | {ratio:.1f}x |")


if __name__ == "__main__":
    exit_on_user_error(main)
