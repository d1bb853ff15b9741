"""Time the planning of an epoch, and compare two ways to deal its batches to several GPUs: by
length, as deal_batches() does, and in turn. Makes the numbers on planning in the README and on
several GPUs in docs/results.md.

    python benchmarks/bench_batching.py
    python benchmarks/bench_batching.py --sizes 10480
"""

import platform
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
from numpy import ndarray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import STRATEGIES, deal_batches, plan_batches
from cli import ArgumentParser, exit_on_user_error, positive
from corpus.lengths import ljspeech_lengths

HOP_LENGTH = 276  # samples: 12.5 ms
SIZES = (10_480, 1_000_000)
REPLICAS = (2, 4, 8)
N_REPEATS = 11


def milliseconds(lengths: ndarray) -> dict[tuple[str, bool], float]:
    """Returns the median time to plan an epoch with BR, by strategy and DBS. They take turns, so
    that a busy moment of the machine slows all alike."""
    seconds = {kind: [] for kind in product(STRATEGIES, (False, True))}
    for epoch in range(N_REPEATS):
        for (strategy, dynamic), times in seconds.items():
            start = time.perf_counter()
            plan_batches(lengths, strategy, dynamic_batch_size=dynamic, epoch=epoch)
            times.append(time.perf_counter() - start)
    return {kind: 1e3 * float(np.median(times)) for kind, times in seconds.items()}


def imbalance(costs: ndarray, steps: ndarray) -> float:
    """Returns the largest cost of a step over the mean of its batches: how long a step takes, if
    replicas wait for the slowest, over how long it could take."""
    return float(np.mean(costs[steps].max(1) / costs[steps].mean(1)))


def print_imbalance(lengths: ndarray) -> None:
    print("\nLargest batch of a step / mean of the step, by padded size and by length:\n")
    print(f"| Batching | Dealt | {' | '.join(f'{n} replicas' for n in REPLICAS)} |")
    print("|---|---|" + "---:|" * len(REPLICAS))
    for strategy, dynamic in (("RAND", False), ("SSB", False), ("SSB", True)):
        plan = plan_batches(lengths, strategy, dynamic_batch_size=dynamic)
        longest = np.array([lengths[batch].max() for batch in plan])
        padded = longest * [len(batch) for batch in plan]
        for how in ("in turn", "by length"):
            cells = []
            for n in REPLICAS:
                steps = np.arange(len(plan) - len(plan) % n).reshape(-1, n)
                if how == "by length":
                    steps = deal_batches(lengths, plan, n)
                cells.append(f"{imbalance(padded, steps):.3f}, {imbalance(longest, steps):.3f}")
            name = strategy + "-DBS" * dynamic + "-BR" * (strategy != "RAND")
            print(f"| {name} | {how} | {' | '.join(cells)} |")


def main() -> None:
    parser = ArgumentParser(description="Time the planning of an epoch.")
    sizes = f"numbers of lengths, drawn from LJSpeech's (default: {' '.join(map(str, SIZES))})"
    parser.add_argument("--sizes", type=positive, nargs="+", default=SIZES, metavar="N", help=sizes)
    args = parser.parse_args()
    ljspeech, rng = ljspeech_lengths(HOP_LENGTH), np.random.default_rng([0, 1])
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}\n")
    print("| Lengths | Batching | Plan (ms) |\n|---:|---|---:|")
    for size in args.sizes:
        medians = milliseconds(rng.choice(ljspeech, size))
        for (strategy, dynamic), median in medians.items():
            print(f"| {size:,} | {strategy + '-DBS' * dynamic}-BR | {median:,.1f} |")
    print_imbalance(rng.choice(ljspeech, 10_480, replace=False))


if __name__ == "__main__":
    exit_on_user_error(main)
