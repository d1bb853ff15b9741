"""Time the planning of an epoch, beside a plain Python version of it.

    python benchmarks/bench_batching.py
    python benchmarks/bench_batching.py --sizes 10480 --repeats 101

A plan is a call of :func:`batching.plan_batches` with batch randomisation; the plain version, SSB
as one would write it down: sort the lengths with noise added, fill batches in a loop, shuffle.
"""

import itertools
import platform
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import STRATEGIES, plan_batches
from cli import ArgumentParser, exit_on_user_error, positive
from scripts.lengths import LJSPEECH_LENGTHS, read_lengths

SIZES = (10_480, 1_000_000, 10_000_000)
BATCH_SIZE, LRF = 16, 0.1


def plain(lengths: np.ndarray, dynamic: bool, seed: int) -> list[list[int]]:
    """The plain version: SSB-BR or SSB-DBS-BR as batches of indices."""
    noise = np.random.default_rng(seed).uniform(-0.5, 0.5, len(lengths))
    width = (lengths.max() - lengths.min()) * LRF
    order = np.argsort(lengths + noise * width)
    capacity = BATCH_SIZE * int(lengths.max())
    batches, batch, longest = [], [], 0
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        longest = max(longest, length)
        if (len(batch) + 1) * longest > capacity if dynamic else len(batch) == BATCH_SIZE:
            batches.append(batch)
            batch, longest = [], length
        batch.append(i)
    batches.append(batch)
    random.Random(seed).shuffle(batches)
    return batches


def measure(lengths: np.ndarray, repeats: int) -> dict[tuple[str, bool], float]:
    """Median milliseconds of (strategy or "plain", DBS); all take turns, so that a busy moment of
    the machine slows all alike."""
    seconds = {kind: [] for kind in itertools.product((*STRATEGIES, "plain"), (False, True))}
    for epoch in range(repeats + 1):
        for (strategy, dynamic), times in seconds.items():
            start = time.perf_counter()
            if strategy == "plain":
                plain(lengths, dynamic, epoch)
            else:
                plan_batches(lengths, strategy, BATCH_SIZE, dynamic, lrf=LRF, epoch=epoch)
            times.append(time.perf_counter() - start)
    return {kind: 1e3 * statistics.median(times[1:]) for kind, times in seconds.items()}


def main() -> None:
    parser = ArgumentParser(description="Time the planning of an epoch, beside a plain version.")
    add = parser.add_argument
    sizes = f"numbers of lengths, drawn from LJSpeech's (default: {' '.join(map(str, SIZES))})"
    add("--sizes", type=positive, nargs="+", default=SIZES, metavar="N", help=sizes)
    repeats = "timings per median; 10 N below 100,000 lengths (default: %(default)s)"
    add("--repeats", type=positive, default=5, metavar="N", help=repeats)
    args = parser.parse_args()
    given = read_lengths(LJSPEECH_LENGTHS)
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}\n")
    print("| Lengths | Batching | Plan (ms) | Plain SSB (ms) | Times faster |")
    print("|---:|---|---:|---:|---:|")
    for size in args.sizes:
        lengths = np.random.default_rng([0, 1]).choice(given, size)
        medians = measure(lengths, args.repeats * (10 if size < 100_000 else 1))
        for strategy, dynamic in itertools.product(STRATEGIES, (False, True)):
            plan, reference = medians[strategy, dynamic], medians["plain", dynamic]
            cells = f"{size:,} | {strategy + '-DBS' * dynamic}-BR | {plan:,.2f} | {reference:,.2f}"
            print(f"| {cells} | {reference / plan:.1f} |", flush=True)


if __name__ == "__main__":
    exit_on_user_error(main)
