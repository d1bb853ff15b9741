"""Compare an epoch's batches with those of other projects' samplers, as far as they are installed.
Makes the table of "Beside other samplers" in docs/performance.md.

    pip install lhotse speechbrain transformers && pip install --no-deps espnet typeguard
    python benchmarks/bench_batching.py
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy import ndarray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import batch_statistics, plan_batches
from cli import ArgumentParser, exit_on_user_error

N_REPEATS, BATCH_SIZE = 11, 16

Planner = Callable[[int], list[Sequence[int]]]  # from an epoch's number to its batches


# Samplers: ours and other projects'


def ours(lengths: ndarray, strategy: str, dynamic: bool) -> Planner:
    return lambda epoch: plan_batches(
        lengths, strategy, BATCH_SIZE, dynamic_batch_size=dynamic, epoch=epoch
    )


def lhotse(lengths: ndarray, capacity: int, num_buckets: int) -> Planner:
    from lhotse import CutSet, MonoCut
    from lhotse.dataset.sampling import DynamicBucketingSampler

    cuts = CutSet.from_cuts(  # a frame is a second here
        MonoCut(id=str(i), start=0, duration=float(n), channel=0) for i, n in enumerate(lengths)
    )
    sampler = DynamicBucketingSampler(
        cuts, max_duration=capacity, num_buckets=num_buckets, shuffle=True
    )

    def plan(epoch: int) -> list[list[int]]:
        sampler.set_epoch(epoch)
        return [[int(cut.id) for cut in batch] for batch in sampler]

    return plan


def speechbrain(lengths: ndarray, capacity: int, num_buckets: int) -> Planner:
    from speechbrain.dataio.sampler import DynamicBatchSampler

    clips, values = range(len(lengths)), lengths.tolist()
    return lambda epoch: list(
        DynamicBatchSampler(clips, capacity, num_buckets, lengths_list=values, epoch=epoch)
    )


def espnet(lengths: ndarray, capacity: int) -> Planner:
    from espnet2.samplers.num_elements_batch_sampler import NumElementsBatchSampler

    def plan(_: int) -> list[list[int]]:
        with tempfile.NamedTemporaryFile("w") as file:
            file.writelines(f"{i} {n}\n" for i, n in enumerate(lengths))
            file.flush()
            return [[*map(int, batch)] for batch in NumElementsBatchSampler(capacity, [file.name])]

    return plan


def transformers(lengths: ndarray) -> Planner:
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    def plan(epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(epoch)
        order = [*LengthGroupedSampler(BATCH_SIZE, lengths=lengths.tolist(), generator=generator)]
        return [order[i : i + BATCH_SIZE] for i in range(0, len(order), BATCH_SIZE)]

    return plan


def print_row(name: str, plan: Planner, lengths: ndarray, capacity: int) -> None:
    """Prints means over the epochs, and whether all epochs have the same batches."""
    statistics, partitions = [], set()
    for epoch in range(N_REPEATS):
        batches = plan(epoch)
        assert sorted(i for batch in batches for i in batch) == [*range(len(lengths))]
        statistics.append(batch_statistics(lengths, [*map(list, batches)]))
        partitions.add(frozenset(map(frozenset, batches)))
    statistics = pd.DataFrame(statistics)
    mean, largest = statistics.mean(), statistics.max_padded_length.max() / capacity
    row = f"{name} | {mean.n_batches:.0f} | {100 * mean.zpr:.2f} | {mean.total_length:,.0f}"
    print(f"| {row} | {largest:.3f} | {'yes' if len(partitions) == 1 else 'no'} |")


def main() -> None:
    ArgumentParser(description=__doc__).parse_args()
    clips = pd.read_csv(Path(__file__).parents[1] / "filelists" / "ljspeech_lengths.csv")
    lengths = np.random.default_rng([0, 1]).choice(clips.frames_hop276, 10_480, replace=False)
    capacity = BATCH_SIZE * int(lengths.max())  # DBS's bound
    samplers = [
        ("RAND", ours, "RAND", False),
        ("SSB-DBS-BR", ours, "SSB", True),
        ("Hugging Face, LengthGroupedSampler", transformers),
        ("lhotse, DynamicBucketingSampler, 30 buckets", lhotse, capacity, 30),
        ("SpeechBrain, DynamicBatchSampler, 100 buckets", speechbrain, capacity, 100),
        ("ESPnet, NumElementsBatchSampler", espnet, capacity),
    ]
    print("| sampler | batches | ZPR % | decoder steps | largest batch / bound | same neighbours |")
    print("|---|--:|--:|--:|--:|---|")
    for name, make_planner, *settings in samplers:
        try:
            plan = make_planner(lengths, *settings)
        except ImportError as error:
            print(f"| {name} | left out: {error} | | | | |")
            continue
        print_row(name, plan, lengths, capacity)


if __name__ == "__main__":
    exit_on_user_error(main)
