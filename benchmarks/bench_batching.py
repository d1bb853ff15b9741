"""Time the planning of an epoch, beside a plain Python version of it.

    python benchmarks/bench_batching.py
    python benchmarks/bench_batching.py --sizes 10480 --repeats 101 --json bench.json

A plan is a call of :func:`batching.plan_batches` with batch randomisation. The plain version is
SSB as one would write it down: sort the lengths with noise added, fill batches in a Python loop,
and shuffle them. The README's "times as fast" are from here.
"""

import itertools
import json
import platform
import random
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import STRATEGIES, plan_batches
from cli import ArgumentParser, UserError, exit_on_user_error
from files import make_folder
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


def measure(lengths: np.ndarray, repeats: int) -> list[dict]:
    """A row for each strategy, without and with DBS; all take turns, so that a busy moment of the
    machine slows all alike."""
    kinds = list(itertools.product((*STRATEGIES, "plain"), (False, True)))
    seconds = {kind: [] for kind in kinds}
    for epoch in range(repeats + 1):
        for strategy, dynamic in kinds:
            start = time.perf_counter()
            if strategy == "plain":
                plain(lengths, dynamic, epoch)
            else:
                plan_batches(lengths, strategy, BATCH_SIZE, dynamic, lrf=LRF, epoch=epoch)
            seconds[strategy, dynamic].append(time.perf_counter() - start)
    rows = []
    for strategy, dynamic in kinds[:-2]:
        times, plain_times = seconds[strategy, dynamic][1:], seconds["plain", dynamic][1:]
        median, plain_median = float(np.median(times)), float(np.median(plain_times))
        rows.append(
            {
                "n_lengths": len(lengths),
                "batching": strategy + "-DBS" * dynamic + "-BR",
                "median_seconds": median,
                "reference_median_seconds": plain_median,
                "ratio": plain_median / median,
                "seconds": times,
                "reference_seconds": plain_times,
            }
        )
    return rows


def main() -> None:
    parser = ArgumentParser(
        description="Time the planning of an epoch for every strategy, with fixed and dynamic "
        "batches of 16, beside a plain version: sort, Python loop, shuffle."
    )
    add = parser.add_argument
    sizes = f"numbers of lengths (default: {' '.join(map(str, SIZES))})"
    add("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help=sizes)
    repeats = "timings per median; 10 N below 100,000 lengths (default: %(default)s)"
    add("--repeats", type=int, default=5, metavar="N", help=repeats)
    source = "draw from these lengths, text or CSV (default: LJSpeech's)"
    add("--lengths", type=Path, metavar="FILE", help=source)
    add("--column", metavar="NAME", help="column of a CSV file of lengths")
    add("--json", type=Path, metavar="FILE", help="write every timing")
    args = parser.parse_args()
    for name, values in (("sizes", args.sizes), ("repeats", [args.repeats])):
        if min(values) < 1:
            raise UserError(f"--{name} {min(values)}: use 1 or more")
    if args.column is not None and args.lengths is None:
        raise UserError(f"--column {args.column}: goes with --lengths only; leave it out")
    if args.json is not None:
        make_folder(args.json.parent)
    given = read_lengths(args.lengths or LJSPEECH_LENGTHS, args.column)

    python, processor = platform.python_version(), platform.machine()
    print(f"Python {python}, NumPy {np.__version__}, {processor}; medians\n")
    print("| Lengths | Batching | Plan (ms) | Plain SSB (ms) | Times faster |")
    print("|---:|---|---:|---:|---:|")
    rows = []
    for size in args.sizes:
        lengths = np.random.default_rng([0, 1]).choice(given, size)
        for row in measure(lengths, args.repeats * (10 if size < 100_000 else 1)):
            plan, reference = 1e3 * row["median_seconds"], 1e3 * row["reference_median_seconds"]
            cells = f"| {size:,} | {row['batching']} | {plan:,.2f} | {reference:,.2f} "
            print(f"{cells}| {row['ratio']:.1f} |", flush=True)
            rows.append(row)
    if args.json:
        numbers = {"python": python, "numpy": np.__version__, "machine": processor, "rows": rows}
        args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    exit_on_user_error(main)
