"""Time training steps beside a process that keeps one core busy.

    python benchmarks/bench_threads.py

OpenMP's threads wait as they do by default, or as train.py has them wait. The two take turns; times
are medians. OMP_NUM_THREADS sets the number of threads. On Linux.
"""

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
REDUCED = (
    "symbols_embedding_dim={0},encoder_embedding_dim={0},prenet_dim={0},attention_rnn_dim={0},"
    "decoder_rnn_dim={0},postnet_embedding_dim={0},attention_dim={1},"
    "attention_location_n_filters=8"
)
MODELS = {  # parameters: settings, clips of a batch, frames of a clip
    "60 thousand": (REDUCED.format(24, 6), 8, 100),
    "1 million": (REDUCED.format(128, 32), 8, 100),  # as the demo's
    "28 million": ("", 16, 60),
}


def milliseconds(pools: list[ProcessPoolExecutor], shape: Shape, rounds: int) -> list[float]:
    """Median time of a step in each pool."""
    turns = [[take_step(pool, shape)[2] for pool in pools] for _ in range(rounds)]
    return [1000 * median(seconds) for seconds in zip(*turns, strict=True)]


def main() -> None:
    parser = ArgumentParser(description="Time training steps beside a busy process.")
    parser.add_argument("--rounds", type=positive, default=9, help="timed steps (%(default)s)")
    rounds = parser.parse_args().rounds
    print(f"CPU, {torch.get_num_threads()} threads; PyTorch {torch.__version__}\n")
    print(
        "| parameters | threads wait | alone, ms | beside it, ms | ratio |\n|--:|---|--:|--:|--:|"
    )
    for name, (overrides, B, T) in MODELS.items():
        pools, shape = [], ([T // 4] * B, [T] * B)
        with ExitStack() as stack:
            for spins in RULES.values():
                os.environ["GOMP_SPINCOUNT"] = spins  # read by the worker's PyTorch
                pools.append(stack.enter_context(open_pool("scan", overrides, True)))
                take_step(pools[-1], shape)  # starts it, and warms up
            alone = milliseconds(pools, shape, rounds)
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
            beside = milliseconds(pools, shape, rounds)
        for rule, a, b in zip(RULES, alone, beside, strict=True):
            print(f"| {name} | {rule} | {a:.0f} | {b:.0f} | {b / a:.1f}x |")


if __name__ == "__main__":
    exit_on_user_error(main)
