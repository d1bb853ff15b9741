"""Time the planning of an epoch, beside a plain Python version of it; and how evenly batches are
dealt to the replicas of a model, beside dealing them in turn.

python benchmarks/bench_batching.py
python benchmarks/bench_batching.py --sizes 10480 --repeats 101
"""

import platform
import random
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
from numpy import ndarray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import STRATEGIES, BatchPlan, deal_batches, plan_batches
from cli import ArgumentParser, exit_on_user_error, positive
from scripts.lengths import LJSPEECH_LENGTHS, ljspeech_lengths, read_lengths, subset

SIZES = (10_480, 1_000_000, 10_000_000)
BATCH_SIZE, LRF = 16, 0.1


def fill(order: ndarray, lengths: ndarray, most: int, capacity: int = 0) -> list[list[int]]:
    """Batches of ``most`` clips or, with DBS, of as many up to that as ``capacity`` holds."""
    batches, batch, longest = [], [], 0
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        longest = max(longest, length)
        if len(batch) == most or 0 < capacity < (len(batch) + 1) * longest:
            batches.append(batch)
            batch, longest = [], length
        batch.append(i)
    return [*batches, batch]


def plain(lengths: ndarray, dynamic: bool, seed: int) -> list[list[int]]:
    """SSB-BR or SSB-DBS-BR as one would write it down: sort with noise, fill batches, shuffle."""
    noise = np.random.default_rng(seed).uniform(-0.5, 0.5, len(lengths)) * LRF * np.ptp(lengths)
    most, capacity = BATCH_SIZE, 0
    if dynamic:
        most, capacity = len(lengths), BATCH_SIZE * int(lengths.max())
    batches = fill(np.argsort(lengths + noise), lengths, most, capacity)
    random.Random(seed).shuffle(batches)
    return batches


def measure(lengths: ndarray, repeats: int) -> dict[tuple[str, bool], float]:
    """Median milliseconds of each (strategy or "plain", DBS), with batch randomisation. They take
    turns, so that a busy moment of the machine slows all alike."""
    seconds = {kind: [] for kind in product((*STRATEGIES, "plain"), (False, True))}
    for epoch in range(repeats + 1):
        for (strategy, dynamic), times in seconds.items():
            start = time.perf_counter()
            if strategy == "plain":
                plain(lengths, dynamic, epoch)
            else:
                plan_batches(lengths, strategy, BATCH_SIZE, dynamic, lrf=LRF, epoch=epoch)
            times.append(time.perf_counter() - start)
    return {kind: 1e3 * float(np.median(times[1:])) for kind, times in seconds.items()}


def imbalance(lengths: ndarray, plan: BatchPlan, steps: ndarray) -> tuple[float, float]:
    """The largest batch of a step over the mean of its batches, by padded size and by length: how
    long a step takes, if replicas wait for the slowest, over how long it could take."""
    longest = np.maximum.reduceat(lengths[plan.order], plan.ends - plan.sizes)
    costs = (plan.sizes * longest)[steps], longest[steps]
    by_size, by_length = (float(np.mean(cost.max(1) / cost.mean(1))) for cost in costs)
    return by_size, by_length


def print_imbalance(lengths: ndarray) -> None:
    replicas = (2, 4, 8)
    print(f"\nLargest batch of a step / mean of the step, by padded size and by length, for "
          f"{len(lengths):,} clips:\n")  # fmt: skip
    print(f"| Batching | Dealt | {' | '.join(f'{n} replicas' for n in replicas)} |")
    print("|---|---|---:|---:|---:|")
    for strategy, dynamic in (("RAND", False), ("SSB", False), ("SSB", True)):
        plan = plan_batches(lengths, strategy, BATCH_SIZE, dynamic, lrf=LRF)
        cells = {"in turn": [], "by length": []}
        for n in replicas:
            in_turn = np.arange(len(plan) - len(plan) % n).reshape(-1, n)
            for how, steps in zip(cells, (in_turn, deal_batches(lengths, plan, n)), strict=True):
                cells[how].append("{:.3f}, {:.3f}".format(*imbalance(lengths, plan, steps)))
        for how, ratios in cells.items():
            name = strategy + "-DBS" * dynamic + "-BR" * (strategy != "RAND")
            print(f"| {name} | {how} | {' | '.join(ratios)} |")


def main() -> None:
    parser = ArgumentParser(description="Time the planning of an epoch, beside a plain version.")
    sizes = f"numbers of lengths, drawn from LJSpeech's (default: {' '.join(map(str, SIZES))})"
    parser.add_argument("--sizes", type=positive, nargs="+", default=SIZES, metavar="N", help=sizes)
    repeats = "timings per median; 10 N below 100,000 lengths (default: %(default)s)"
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help=repeats)
    args = parser.parse_args()
    given = read_lengths(LJSPEECH_LENGTHS)
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}\n")
    print("| Lengths | Batching | Plan (ms) | Plain SSB (ms) | Times faster |")
    print("|---:|---|---:|---:|---:|")
    for size in args.sizes:
        lengths = np.random.default_rng([0, 1]).choice(given, size)
        medians = measure(lengths, args.repeats * (10 if size < 100_000 else 1))
        for strategy, dynamic in product(STRATEGIES, (False, True)):
            plan, reference = medians[strategy, dynamic], medians["plain", dynamic]
            cells = f"{size:,} | {strategy + '-DBS' * dynamic}-BR | {plan:,.2f} | {reference:,.2f}"
            print(f"| {cells} | {reference / plan:.1f} |", flush=True)
    print_imbalance(subset(ljspeech_lengths(276), 10_480, seed=0))


if __name__ == "__main__":
    exit_on_user_error(main)
