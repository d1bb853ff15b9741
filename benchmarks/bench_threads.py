"""Time training steps beside a process that keeps one core busy.

    python benchmarks/bench_threads.py

OpenMP's threads wait as they do by default, or as train.py has them wait. The two take turns; times
are medians of 9. OMP_NUM_THREADS sets the number of threads. On Linux.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train  # noqa: F401  sets GOMP_SPINCOUNT
from benchmarks.bench_step import open_pool, take_step
from cli import ArgumentParser, exit_on_user_error

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


def main() -> None:
    ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    print(f"CPU, {torch.get_num_threads()} threads; PyTorch {torch.__version__}\n")
    print("| parameters | threads wait | alone, ms | beside it, ms | ratio |")
    print("|--:|---|--:|--:|--:|")
    for name, (overrides, B, T) in MODELS.items():
        pools, times, shape = [], [], ([T // 4] * B, [T] * B)
        with ExitStack() as stack:
            for spins in RULES.values():
                os.environ["GOMP_SPINCOUNT"] = spins  # read by the worker's PyTorch
                pools.append(stack.enter_context(open_pool("scan", overrides, True)))
                take_step(pools[-1], shape)  # starts it, and warms up
            for busy in (False, True):
                if busy:
                    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                    stack.enter_context(process)
                    stack.callback(process.kill)
                turns = [[take_step(pool, shape)[2] for pool in pools] for _ in range(9)]
                times.append([1000 * median(seconds) for seconds in zip(*turns, strict=True)])
        for rule, alone, beside in zip(RULES, *times, strict=True):
            print(f"| {name} | {rule} | {alone:.0f} | {beside:.0f} | {beside / alone:.1f}x |")


if __name__ == "__main__":
    exit_on_user_error(main)
