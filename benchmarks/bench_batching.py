"""Time the planning of an epoch, beside a plain Python version of it; how evenly batches are dealt
to the replicas of a model, beside dealing them in turn; how much a frame counts in the loss; and
what a bound on text and mel together would gain.

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
# Floats that the full-size model keeps for its backward pass for each frame, each character, and
# each pair of them: the differences between what torch.autograd.graph.saved_tensors_hooks counts in
# batches of several sizes, with decoder=scan.
KEPT = 21_600, 10_250, 2
KINDS = (("RAND", False), ("SSB", False), ("SSB", True))


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
    for strategy, dynamic in KINDS:
        plan = plan_batches(lengths, strategy, BATCH_SIZE, dynamic, lrf=LRF)
        cells = {"in turn": [], "by length": []}
        for n in replicas:
            in_turn = np.arange(len(plan) - len(plan) % n).reshape(-1, n)
            for how, steps in zip(cells, (in_turn, deal_batches(lengths, plan, n)), strict=True):
                cells[how].append("{:.3f}, {:.3f}".format(*imbalance(lengths, plan, steps)))
        for how, ratios in cells.items():
            name = strategy + "-DBS" * dynamic + "-BR" * (strategy != "RAND")
            print(f"| {name} | {how} | {' | '.join(ratios)} |")


def print_weights(lengths: ndarray) -> None:
    """A frame counts in the mean over its batch by 1 / the frames there."""
    tenth = np.argsort(np.argsort(lengths)) * 10 // len(lengths)
    print("\nWeight of a frame in an epoch's loss over the mean, for the tenths of the clips by "
          "length, the shortest first:\n")  # fmt: skip
    print(f"| Batching | loss | {' | '.join(str(t + 1) for t in range(10))} |")
    print(f"|---|---|{'---:|' * 10}")
    for (strategy, dynamic), loss in product(KINDS, ("padded", "masked")):
        weights = np.zeros(len(lengths))  # of a frame of each clip
        for epoch in range(8):
            for batch in plan_batches(lengths, strategy, BATCH_SIZE, dynamic, epoch=epoch):
                padded, real = len(batch) * lengths[batch].max(), lengths[batch].sum()
                weights[batch] += 1 / (padded if loss == "padded" else real)
        weights *= lengths.sum() / (weights @ lengths)
        cells = [np.average(weights[tenth == t], weights=lengths[tenth == t]) for t in range(10)]
        cells = " | ".join(f"{cell:.2f}" for cell in cells)
        print(f"| {strategy + '-DBS' * dynamic} | {loss} | {cells} |")


def print_second_axis(frames: ndarray, characters: ndarray) -> None:
    """DBS with a bound on what a batch keeps in memory, which depends on its longest text too."""

    def kept(B: ndarray, T_out: ndarray, T_in: ndarray) -> ndarray:
        return B * (KEPT[0] * T_out + KEPT[1] * T_in + KEPT[2] * T_out * T_in)

    plan = plan_batches(frames, "SSB", BATCH_SIZE, True, False, lrf=LRF)
    starts = plan.ends - plan.sizes
    longest = [np.maximum.reduceat(n[plan.order], starts) for n in (frames, characters)]
    memory = kept(plan.sizes, *longest)
    ends, start, T_out, T_in, total = [], 0, 0, 0, 0
    for i, clip in enumerate(plan.order):
        grown = max(T_out, frames[clip]), max(T_in, characters[clip])
        if kept(i + 1 - start, *grown) > memory.max():
            ends.append(i)
            start, total, grown = i, total + T_out, (frames[clip], characters[clip])
        T_out, T_in = grown
    saved = 1 - (total + T_out) / longest[0].sum()
    print(f"\nSSB-DBS: the largest batch needs {memory.max() / memory.mean() - 1:.1%} more memory "
          f"than the mean. Bounded by that need instead of its frames, there would be "
          f"{len(ends) + 1} batches instead of {len(plan)}, and {saved:.1%} fewer decoder "
          "steps.")  # fmt: skip


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
    frames = subset(ljspeech_lengths(276), 10_480, seed=0)
    print_imbalance(frames)
    print_weights(frames)
    characters = read_lengths(LJSPEECH_LENGTHS, "characters")
    print_second_axis(frames, subset(characters, 10_480, seed=0))


if __name__ == "__main__":
    exit_on_user_error(main)
