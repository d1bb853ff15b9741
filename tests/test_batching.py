"""The laws of batching.py, over every strategy, fixed and dynamic, in order and randomised."""

import inspect
import re
import shutil
import subprocess
import sys
import warnings
from fractions import Fraction
from itertools import pairwise, product
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import batching
import data_utils
import train
from batching import (
    STRATEGIES,
    BatchPlan,
    EpochBatchSampler,
    batch_statistics,
    plan_batches,
    solve_randomness,
)
from hparams import HParams
from scripts.plot_batching import ljspeech_lengths, subset

law = hypothesis.settings(max_examples=150, deadline=None)

KINDS = [
    pytest.param(
        {"strategy": strategy, "dynamic_batch_size": dbs, "batch_randomization": br},
        id=strategy + "-DBS" * dbs + "-BR" * br,
    )
    for strategy, dbs, br in product(STRATEGIES, (False, True), (False, True))
]

# Around each: the bytes and 16-bit words that lengths are kept in, the span above which the
# sort goes without 16-bit keys, and lengths in samples.
LONGEST = (1, 3, 40, 255, 256, 900, 4094, 4096, 65_535, 65_536, 220_000)


@st.composite
def cases(draw: st.DrawFn, **fixed: object) -> tuple[list[int], dict]:
    """Lengths, and settings of :func:`plan_batches` that suit them; ``fixed`` go over them."""
    longest = draw(st.sampled_from(LONGEST))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=90))
    values = {
        "strategy": draw(st.sampled_from(list(STRATEGIES))),
        "batch_size": draw(st.integers(1, 12)),
        "dynamic_batch_size": draw(st.booleans()),
        "batch_randomization": draw(st.booleans()),
        "lrf": draw(st.sampled_from([0.0, 0.02, 0.15, 1.0, 50.0])),
        "bucket_size": draw(st.integers(1, 40)),
        "bucket_edges": draw(st.sampled_from(["size", "uniform", "quantile"])),
        "n_buckets": draw(st.integers(1, 8)),
        "n_bins": draw(st.integers(1, 12)),
        "seed": draw(st.integers(0, 1000)),
        "epoch": draw(st.integers(0, 1000)),
        **fixed,
    }
    if values["dynamic_batch_size"] and draw(st.booleans()):
        values["capacity"] = draw(st.integers(max(lengths), 30 * max(lengths)))
    return lengths, values


def corpus(n: int, seed: int = 0, low: int = 96, high: int = 870) -> np.ndarray:
    """Lengths in frames, more of them long than short, as in read speech.

    The generator is another than a plan's: sorting by the very noise that made the lengths
    would sort by length.
    """
    return np.random.default_rng([seed, 1]).triangular(low, high, high, n).astype(int)


def batches(plan: BatchPlan) -> list[list[int]]:
    return [batch.tolist() for batch in plan]


def capacity_of(lengths: list[int], settings: dict) -> int:
    return settings.get("capacity") or settings["batch_size"] * max(lengths)


def greedy_sizes(lengths: list[int], capacity: int) -> list[int]:
    """The oracle of DBS: take the next clip as long as size x longest stays within capacity."""
    sizes, size, longest = [], 0, 0
    for length in lengths:
        if size and (size + 1) * max(longest, length) > capacity:
            sizes.append(size)
            size, longest = 0, 0
        size, longest = size + 1, max(longest, length)
    return [*sizes, size]


def segments(lengths: list[int], plan: BatchPlan, settings: dict) -> list[int]:
    """The bucket of every clip of ``plan.order``, as a number; 0 for all outside BKT."""
    n = len(plan.order)
    edges, n_buckets = settings["bucket_edges"], settings["n_buckets"]
    if settings["strategy"] != "BKT":
        return [0] * n
    if edges == "size":
        return [k // settings["bucket_size"] for k in range(n)]
    if edges == "quantile":
        return [sum(k >= b * n // n_buckets for b in range(1, n_buckets)) for k in range(n)]
    limits = np.linspace(max(lengths), min(lengths), n_buckets + 1)[1:-1]
    return [int((lengths[clip] < limits).sum()) for clip in plan.order]


# What every plan is


@law
@given(cases())
def test_every_clip_is_in_exactly_one_batch(case):
    lengths, settings = case
    plan = plan_batches(lengths, **settings)
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert plan.ends[-1] == len(lengths) and min(plan.sizes) >= 1
    assert plan.order.dtype == plan.ends.dtype == np.int64
    assert plan.oversize.tolist() == []


@law
@given(cases(dynamic_batch_size=True))
def test_no_dynamic_batch_exceeds_the_capacity(case):
    lengths, settings = case
    for batch in plan_batches(lengths, **settings):
        assert len(batch) * max(lengths[i] for i in batch) <= capacity_of(lengths, settings)


@law
@given(cases(dynamic_batch_size=False))
def test_no_fixed_batch_exceeds_the_batch_size(case):
    lengths, settings = case
    assert max(plan_batches(lengths, **settings).sizes) <= settings["batch_size"]


@law
@given(cases(batch_randomization=False))
def test_fixed_batches_are_full_but_for_the_last_of_a_bucket(case):
    lengths, settings = case
    settings.update(dynamic_batch_size=False, capacity=None)
    plan = plan_batches(lengths, **settings)
    bucket = segments(lengths, plan, settings)
    for size, end in zip(plan.sizes, plan.ends, strict=True):
        last = end == len(lengths) or bucket[end] != bucket[end - 1]
        assert last or size == settings["batch_size"]


@law
@given(cases(dynamic_batch_size=True, batch_randomization=False))
def test_dynamic_batches_are_those_of_a_greedy_loop(case):
    lengths, settings = case
    plan = plan_batches(lengths, **settings)
    bucket = np.array(segments(lengths, plan, settings))
    wanted = []
    for b in np.unique(bucket):
        in_order = [lengths[i] for i in plan.order[bucket == b]]
        wanted += greedy_sizes(in_order, capacity_of(lengths, settings))
    assert plan.sizes.tolist() == wanted


@law
@given(cases(dynamic_batch_size=True, batch_randomization=False))
def test_no_dynamic_batch_could_take_the_next_clip(case):
    lengths, settings = case
    plan = plan_batches(lengths, **settings)
    bucket = segments(lengths, plan, settings)
    for batch, following, end in zip(plan[:-1], plan[1:], plan.ends, strict=False):
        longest = max(lengths[i] for i in [*batch, following[0]])
        fits = (len(batch) + 1) * longest <= capacity_of(lengths, settings)
        assert not fits or bucket[end] != bucket[end - 1]


@law
@given(cases())
def test_batch_randomisation_only_permutes_the_batches(case):
    lengths, settings = case
    settings.pop("batch_randomization")
    ordered, randomised = (
        batches(plan_batches(lengths, batch_randomization=br, **settings)) for br in (False, True)
    )
    assert sorted(ordered) == sorted(randomised)


@law
@given(cases())
def test_lengths_of_any_whole_type_give_the_same_plan(case):
    lengths, settings = case
    wanted = batches(plan_batches(lengths, **settings))
    for kind in (np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        if max(lengths) <= np.iinfo(kind).max:
            array = np.array(lengths, kind)
            assert batches(plan_batches(array, **settings)) == wanted, kind
            assert array.tolist() == lengths, "the lengths were changed"


# DBS over many clips: blocks of 16,384, sizes counted to 255


@pytest.mark.parametrize("n", [1, 255, 256, 16_383, 16_384, 16_385, 32_768, 33_000])
@pytest.mark.parametrize(
    ("low", "high", "capacity"),
    [
        pytest.param(96, 870, None, id="speech"),
        pytest.param(1, 1, 1, id="one clip a batch"),
        pytest.param(1, 1, 254, id="sizes of 254"),
        pytest.param(1, 1, 255, id="sizes of 255"),
        pytest.param(1, 1, 256, id="sizes of 256"),
        pytest.param(1, 3, 1000, id="sizes above 255"),
        pytest.param(1, 300, 3000, id="sizes from 10 to 3000"),
        pytest.param(1, 5, 10**6, id="one batch of all"),
        pytest.param(60_000, 70_000, 16 * 70_000, id="lengths around 65,535"),
        pytest.param(20_000, 220_000, 4_000_000, id="lengths in samples"),
    ],
)
def test_greedy_loop_at_the_ends_of_blocks(n, low, high, capacity):
    lengths = np.random.default_rng(n).integers(low, high + 1, n)
    for strategy in ("RAND", "SB"):
        plan = plan_batches(
            lengths, strategy, capacity=capacity, batch_randomization=False, epoch=n
        )
        wanted = greedy_sizes(lengths[plan.order].tolist(), capacity or 16 * int(lengths.max()))
        assert plan.sizes.tolist() == wanted


@law
@given(
    n=st.integers(1, 3000),
    longest=st.integers(1, 30),
    share=st.sampled_from([0.001, 0.01, 0.5, 1.0]),
    capacity=st.integers(30, 20_000),
    strategy=st.sampled_from(list(STRATEGIES)),
    seed=st.integers(0, 99),
)
def test_greedy_loop_with_tiny_lengths_and_a_share_of_longer_ones(
    n, longest, share, capacity, strategy, seed
):
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(n) < share, rng.integers(1, longest, n, endpoint=True), 1)
    plan = plan_batches(
        lengths, strategy, bucket_size=n, capacity=capacity, batch_randomization=False
    )
    assert plan.sizes.tolist() == greedy_sizes(lengths[plan.order].tolist(), capacity)


def test_greedy_loop_with_one_long_clip_that_bounds_a_batch_of_hundreds():
    lengths = np.ones(1000, int)
    lengths[0] = 30
    for seed in range(30):
        plan = plan_batches(lengths, "RAND", capacity=9000, batch_randomization=False, seed=seed)
        assert plan.sizes.tolist() == greedy_sizes(lengths[plan.order].tolist(), 9000)


# Seeds and epochs


@law
@given(cases())
def test_the_same_seed_and_epoch_give_the_same_plan(case):
    lengths, settings = case
    wanted = batches(plan_batches(lengths, **settings))
    assert batches(plan_batches(lengths, **settings)) == wanted
    shifted = {**settings, "seed": settings["seed"] + settings["epoch"], "epoch": 0}
    assert batches(plan_batches(lengths, **shifted)) == wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ["seed", "epoch"])
def test_another_epoch_has_other_batches_in_another_order(kind, step):
    lengths = corpus(500) // 10  # SB's batches differ through clips of equal length
    first, second = (plan_batches(lengths, **kind, bucket_size=50, **{step: s}) for s in (3, 4))
    contents = [{frozenset(batch) for batch in batches(plan)} for plan in (first, second)]
    assert len(contents[0] & contents[1]) < len(contents[0]) / 2
    assert first.order.tolist() != second.order.tolist()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_randomisation_differs_from_epoch_to_epoch(strategy):
    lengths = np.arange(1, 401)  # no ties: SB's batches are the same in every epoch
    first, second = (plan_batches(lengths, strategy, lrf=0, epoch=e) for e in (0, 1))
    profiles = [[int(lengths[batch].max()) for batch in plan] for plan in (first, second)]
    assert profiles[0] != profiles[1]
    assert sorted(profiles[0]) != profiles[0]


# Strategies, and where they turn into each other


@law
@given(cases(batch_randomization=False, dynamic_batch_size=False))
def test_sb_is_exactly_sorted_and_lrf_0_and_one_bin_are_sb(case):
    lengths, settings = case
    for strategy in (
        {"strategy": "SB"},
        {"strategy": "SSB", "lrf": 0},
        {"strategy": "ATS", "n_bins": 1},
    ):
        plan = plan_batches(lengths, **{**settings, **strategy})
        assert [lengths[i] for i in plan.order] == sorted(lengths)


@pytest.mark.parametrize("low, high", [(1, 4095), (1, 4096), (20_000, 220_000), (1, 10**9)])
def test_sb_is_exactly_sorted_over_wide_spans(low, high):
    lengths = np.random.default_rng(1).integers(low, high, 20_000, endpoint=True)
    plan = plan_batches(lengths, "SB", batch_randomization=False)
    assert (np.diff(lengths[plan.order]) >= 0).all()


@pytest.mark.parametrize("span", [0, 700, 4000, 5000, 30_000, 60_000, 220_000])
def test_ties_of_sb_fall_at_random(span):
    lengths = np.append(np.full(4000, 7), 7 + span)
    order = plan_batches(lengths, "SB", batch_randomization=False).order
    assert abs(np.corrcoef(order[:4000], np.arange(4000))[0, 1]) < 0.1


@pytest.mark.parametrize("low, high", [(96, 870), (20_000, 220_000)], ids=["frames", "samples"])
@pytest.mark.parametrize("lrf", [0.05, 0.3, 2.0])
def test_ssb_never_goes_back_by_more_than_its_noise_and_uses_all_of_it(low, high, lrf):
    lengths = np.random.default_rng(2).integers(low, high, 30_000, endpoint=True)
    plan = plan_batches(lengths, "SSB", lrf=lrf, batch_randomization=False)
    in_order = lengths[plan.order]
    goes_back = (np.maximum.accumulate(in_order) - in_order).max()
    span = np.ptp(lengths)
    assert 0.9 * min(lrf, 1) * span < goes_back <= lrf * span


@pytest.mark.parametrize("unit", [1, 250], ids=["frames", "samples"])
@pytest.mark.parametrize("difference", [0, 20, 40, 60, 79])
def test_ssb_noise_is_uniform_and_as_wide_as_the_paper_says(unit, difference):
    # Two uniform noises of width a swap lengths d apart with probability (1 - d / a)^2 / 2.
    n, a = 4000, 80
    short, long = 400, 400 + difference
    lengths = np.array([100, 900] + [short] * n + [long] * n) * unit
    plan = plan_batches(lengths, "SSB", lrf=a / 800, batch_randomization=False)
    is_long = plan.order[(plan.order > 1)] >= 2 + n
    swapped = np.cumsum(is_long)[~is_long].sum() / n**2
    assert swapped == pytest.approx((1 - difference / a) ** 2 / 2, abs=0.02)


@law
@given(cases(strategy="BKT", bucket_edges="size"))
def test_buckets_of_a_size_are_cut_from_the_longest_down(case):
    lengths, settings = case
    settings["batch_randomization"] = False
    plan = plan_batches(lengths, **settings)
    size = settings["bucket_size"]
    longest_first = sorted(lengths, reverse=True)
    in_order = [lengths[i] for i in plan.order]
    for start in range(0, len(lengths), size):
        bucket = in_order[start : start + size]
        assert sorted(bucket, reverse=True) == longest_first[start : start + size]
        assert start == 0 or start in plan.ends, "a batch crosses the end of a bucket"


@law
@given(cases(strategy="BKT", bucket_edges="uniform"))
def test_batches_of_uniform_buckets_span_no_more_than_one_bucket(case):
    lengths, settings = case
    width = (max(lengths) - min(lengths)) / settings["n_buckets"]
    for batch in plan_batches(lengths, **settings):
        assert np.ptp([lengths[i] for i in batch]) <= width * (1 + 1e-9)


@law
@given(cases(strategy="BKT", bucket_edges="quantile"))
def test_batches_of_quantile_buckets_come_from_one_bucket(case):
    lengths, settings = case
    n, n_buckets = len(lengths), settings["n_buckets"]
    ends = [b * n // n_buckets for b in range(n_buckets + 1)]
    longest_first = sorted(lengths, reverse=True)
    buckets = [longest_first[start:end] for start, end in pairwise(ends)]
    assert max(map(len, buckets)) - min(map(len, buckets)) <= 1
    for batch in plan_batches(lengths, **settings):
        of_batch = [lengths[i] for i in batch]
        assert any(
            bucket and min(bucket) <= min(of_batch) and max(of_batch) <= max(bucket)
            for bucket in buckets
        )


@pytest.mark.parametrize("edges", ["size", "uniform", "quantile"])
def test_buckets_are_shuffled_inside(edges):
    lengths = corpus(2000)
    settings = {"bucket_edges": edges, "n_buckets": 4, "bucket_size": 500}
    plan = plan_batches(lengths, "BKT", batch_randomization=False, **settings)
    bucket = np.array(segments(lengths.tolist(), plan, {"strategy": "BKT", **settings}))
    assert sorted(set(bucket)) == [0, 1, 2, 3]
    for b in range(4):
        in_order = lengths[plan.order[bucket == b]]
        assert abs(np.corrcoef(in_order, np.arange(len(in_order)))[0, 1]) < 0.15


@law
@given(cases(strategy="ATS", batch_randomization=False))
def test_ats_sorts_equal_bins_up_and_down_by_turns(case):
    lengths, settings = case
    plan = plan_batches(lengths, **settings)
    bins = np.array_split([lengths[i] for i in plan.order], settings["n_bins"])
    for b, in_bin in enumerate(bins):
        assert in_bin.tolist() == sorted(in_bin.tolist(), reverse=b % 2 == 1)


def test_ats_bins_hold_clips_at_random():
    lengths = corpus(3000)
    plan = plan_batches(lengths, "ATS", n_bins=3, batch_randomization=False)
    means = [lengths[members].mean() for members in np.array_split(plan.order, 3)]
    assert np.ptp(means) < 0.03 * lengths.mean()


def test_buckets_of_one_batch_are_the_batches_of_sb():
    lengths = corpus(16 * 40)
    settings = {"dynamic_batch_size": False, "batch_size": 16, "bucket_size": 16}
    of_batches = [
        sorted(sorted(lengths[batch].tolist()) for batch in plan_batches(lengths, s, **settings))
        for s in ("BKT", "SB")
    ]
    assert of_batches[0] == of_batches[1]


@pytest.mark.parametrize(
    ("strategy", "parameter"),
    [
        pytest.param("SSB", {"lrf": 1000}, id="SSB, huge LRF"),
        pytest.param("BKT", {"bucket_size": 2000}, id="BKT, one bucket by size"),
        pytest.param("BKT", {"n_buckets": 1, "bucket_edges": "uniform"}, id="BKT, one uniform"),
        pytest.param("BKT", {"n_buckets": 1, "bucket_edges": "quantile"}, id="BKT, one quantile"),
        pytest.param("ATS", {"n_bins": 125}, id="ATS, one batch per bin"),
    ],
)
def test_the_far_end_of_every_parameter_is_random_batching(strategy, parameter):
    """Over 30 epochs: RAND's ZPR, and no trend of length along the epoch."""
    lengths, settings = corpus(2000), {"dynamic_batch_size": False, "batch_size": 16}

    def plans(strategy: str, **parameter: object) -> list[BatchPlan]:
        return [
            plan_batches(
                lengths, strategy, batch_randomization=False, epoch=e, **settings, **parameter
            )
            for e in range(30)
        ]

    ours, random = plans(strategy, **parameter), plans("RAND")
    zpr, zpr_random = (
        np.mean([batch_statistics(lengths, plan).zpr for plan in some]) for some in (ours, random)
    )
    assert zpr == pytest.approx(zpr_random, abs=0.003)
    trends = [np.corrcoef(lengths[plan.order], np.arange(2000))[0, 1] for plan in ours]
    assert abs(np.mean(trends)) < 0.02 and np.abs(trends).max() < 0.1


def test_strategies_fall_between_sorted_and_random():
    lengths = corpus(2000)
    zpr = {
        strategy: batch_statistics(
            lengths,
            plan_batches(lengths, strategy, dynamic_batch_size=False, bucket_size=256, n_bins=10),
        ).zpr
        for strategy in STRATEGIES
    }
    for strategy in ("SSB", "BKT", "ATS"):
        assert zpr["SB"] < zpr[strategy] < zpr["RAND"] / 2


@pytest.mark.parametrize("kind", KINDS)
def test_one_clip_is_one_batch(kind):
    assert batches(plan_batches([123], **kind)) == [[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_size_above_the_number_of_clips_is_one_batch(kind):
    plan = plan_batches(corpus(10), batch_size=50, n_bins=60, **kind)
    assert [sorted(batch) for batch in batches(plan)] == [list(range(10))]


@pytest.mark.parametrize("kind", KINDS)
def test_clips_of_one_length_have_no_padding_and_full_batches(kind):
    lengths = [70] * 100
    plan = plan_batches(lengths, batch_size=8, bucket_size=48, n_bins=5, **kind)
    statistics = batch_statistics(lengths, plan)
    assert statistics.zpr == statistics.zpr_of_data == 0
    assert (statistics.abl, statistics.max_padded_length) == (70, 8 * 70)
    assert sorted(plan.sizes)[1:] == [8] * 12 and min(plan.sizes) == 4


# Clips that are left out, or do not fit


@law
@given(cases(dynamic_batch_size=False))
def test_drop_last_leaves_out_the_batches_that_are_not_full_and_nothing_else(case):
    lengths, settings = case
    full = [
        b for b in batches(plan_batches(lengths, **settings)) if len(b) == settings["batch_size"]
    ]
    if full:
        kept = batches(plan_batches(lengths, drop_last=True, **settings))
        assert sorted(kept) == sorted(full)
    else:
        with pytest.raises(ValueError, match="drop_last=True: no batch has batch_size="):
            plan_batches(lengths, drop_last=True, **settings)


@st.composite
def oversize_cases(draw: st.DrawFn) -> tuple[list[int], dict, int]:
    """Lengths of which some, not all, are above the capacity."""
    lengths, settings = draw(cases(dynamic_batch_size=True))
    lengths += [1, max(lengths) + 1]
    settings["capacity"] = draw(st.integers(1, max(lengths) - 1))
    return lengths, settings


@law
@given(oversize_cases())
def test_oversize_clips_stand_alone_and_the_others_keep_to_the_capacity(case):
    lengths, settings = case
    with pytest.warns(UserWarning, match="clips batched alone: clip "):
        plan = plan_batches(lengths, oversize="alone", **settings)
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    long = [i for i, length in enumerate(lengths) if length > settings["capacity"]]
    assert plan.oversize.tolist() == long
    for batch in batches(plan):
        assert len(batch) * max(lengths[i] for i in batch) <= settings["capacity"] or (
            len(batch) == 1 and batch[0] in long
        )


@law
@given(oversize_cases())
def test_dropped_oversize_clips_leave_the_plan_of_the_others(case):
    lengths, settings = case
    with pytest.warns(UserWarning, match="clips dropped: clip "):
        plan = plan_batches(lengths, oversize="drop", **settings)
    fitting = [i for i, length in enumerate(lengths) if length <= settings["capacity"]]
    assert plan.oversize.tolist() == sorted(set(range(len(lengths))) - set(fitting))
    others = plan_batches([lengths[i] for i in fitting], **settings)
    assert batches(plan) == [[fitting[k] for k in batch] for batch in batches(others)]


def test_oversize_warnings_name_the_longest_clip():
    for oversize, what in (("alone", "batched alone"), ("drop", "dropped")):
        with pytest.warns(UserWarning) as caught:
            plan_batches([5, 20, 9, 30], capacity=10, oversize=oversize)
        assert [str(w.message) for w in caught] == [
            f"2 clips {what}: clip 3 has length 30, above capacity=10"
        ]
        assert caught[0].filename == __file__


def test_no_warning_without_oversize_clips():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for oversize in ("error", "alone", "drop"):
            plan = plan_batches([5, 20, 9, 30], capacity=30, oversize=oversize)
            assert len(plan.oversize) == 0


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        ([], {}, "lengths is empty: there is nothing to batch"),
        ([[1, 2]], {}, "lengths has shape (1, 2): use one length per clip"),
        ([1.0, 2.0], {}, "lengths has dtype float64: use whole numbers, such as frames or samples"),
        ([True], {}, "lengths has dtype bool: use whole numbers"),
        ([4, 0, 3], {}, "clip 1 has length 0: leave it out"),
        ([4, 5, -3], {}, "clip 2 has length -3: leave it out"),
        ([4], {"strategy": "ssb"}, "strategy='ssb': use one of RAND, SB, SSB, BKT, ATS"),
        ([4], {"batch_size": 0}, "batch_size=0: use a whole number, 1 or more"),
        ([4], {"lrf": -0.1}, "lrf=-0.1: use 0 to 1e6"),
        ([4], {"lrf": float("nan")}, "lrf=nan: use 0 to 1e6"),
        ([4], {"bucket_size": 0}, "bucket_size=0: use a whole number, 1 or more"),
        ([4], {"n_bins": 0}, "n_bins=0: use a whole number, 1 or more"),
        ([4], {"n_buckets": 0}, "n_buckets=0: use a whole number, 1 or more"),
        (
            [4],
            {"bucket_edges": "log"},
            "bucket_edges='log': use 'size', 'uniform' or 'quantile'",
        ),
        ([4], {"oversize": "cut"}, "oversize='cut': use error, alone or drop"),
        (
            [4],
            {"capacity": 9, "dynamic_batch_size": False},
            "capacity=9: set dynamic_batch_size=True, which reads it",
        ),
        ([4], {"drop_last": True}, "drop_last=True: set dynamic_batch_size=False"),
        (
            [4, 4],
            {"drop_last": True, "dynamic_batch_size": False, "batch_size": 3},
            "drop_last=True: no batch has batch_size=3 clips; use a smaller",
        ),
        (
            [4, 20, 9, 30],
            {"capacity": 10},
            "clip 3 has length 30, above capacity=10 (2 such clips); use a capacity of at least "
            "30, or oversize='alone' or 'drop'",
        ),
        (
            [20, 30],
            {"capacity": 10, "oversize": "drop"},
            "clip 1 has length 30, above capacity=10, and so is every other; use a larger capacity",
        ),
    ],
)
def test_impossible_arguments_are_refused_in_one_line(lengths, settings, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)) as caught:
        plan_batches(lengths, **settings)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        EpochBatchSampler(lengths, **settings)


@pytest.mark.parametrize("lengths", [[7] * 40, list(range(1, 41))], ids=["one length", "many"])
def test_an_infinite_lrf_is_refused(lengths):
    with pytest.raises(ValueError, match=r"^lrf=inf: use "):
        plan_batches(lengths, "SSB", lrf=float("inf"))


# A plan as a sequence


def test_a_plan_is_indexed_and_sliced_like_a_list_of_batches():
    plan = BatchPlan(order=[3, 1, 0, 4, 2], ends=[2, 3, 5])
    assert len(plan) == 3 and plan.sizes.tolist() == [2, 1, 2]
    assert batches(plan) == [[3, 1], [0], [4, 2]]
    assert plan[-1].tolist() == [4, 2] and plan[np.int64(0)].tolist() == [3, 1]
    assert [batch.tolist() for batch in plan[1:]] == [[0], [4, 2]]
    assert [batch.tolist() for batch in plan[::-1]] == [[4, 2], [0], [3, 1]]
    for j in (3, -4):
        with pytest.raises(IndexError, match=f"batch {j} of a plan of 3 batches"):
            plan[j]


# Statistics


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        # Batches of lengths (2, 4) and (3, 9): 26 padded, 18 real.
        ([2, 4], (2, (1 / 4 + 1 / 3) / 2, 8 / 18, 6.5, 13, 2, 18)),
        # (2, 4, 3) and (9): 21 padded; the first weighs three times as much.
        ([3, 4], (2, 3 / 4 * 1 / 4, 3 / 18, 5.25, 13, 3, 12)),
        ([4], (1, 1 / 2, 1.0, 9.0, 9, 4, 36)),
        ([1, 2, 3, 4], (4, 0.0, 0.0, 4.5, 18, 1, 9)),
    ],
)
def test_statistics_by_hand(ends, wanted):
    assert batch_statistics([2, 4, 3, 9], BatchPlan([0, 1, 2, 3], ends)) == pytest.approx(wanted)


@law
@given(cases())
def test_statistics_by_brute_force(case):
    lengths, settings = case
    plan = plan_batches(lengths, **settings)
    of_batches = [[lengths[i] for i in batch] for batch in plan]
    n, real = len(lengths), sum(lengths)
    padded = [len(batch) * max(batch) for batch in of_batches]
    zpr = sum(len(b) * (1 - Fraction(sum(b), len(b) * max(b))) for b in of_batches) / n
    assert batch_statistics(lengths, plan) == pytest.approx(
        (
            len(of_batches),
            float(zpr),
            (sum(padded) - real) / real,
            sum(padded) / n,
            sum(max(batch) for batch in of_batches),
            max(len(batch) for batch in of_batches),
            max(padded),
        )
    )


def test_statistics_are_of_the_clips_in_the_plan_and_do_not_overflow():
    lengths = np.array([250, 200, 255, 255], np.uint8)
    statistics = batch_statistics(lengths, BatchPlan([2, 3, 0], [3]))
    assert (statistics.total_length, statistics.max_padded_length) == (255, 765)
    assert statistics.zpr_of_data == pytest.approx(5 / 760)


def test_batch_randomisation_changes_no_statistic():
    lengths = corpus(500)
    first, second = (
        batch_statistics(lengths, plan_batches(lengths, batch_randomization=br))
        for br in (False, True)
    )
    assert first == pytest.approx(second)


# The parameter for a ZPR


def mean_zpr(lengths: np.ndarray, strategy: str, **settings: object) -> float:
    plans = [plan_batches(lengths, strategy, epoch=e, **settings) for e in range(8)]
    return float(np.mean([batch_statistics(lengths, plan).zpr for plan in plans]))


@pytest.mark.parametrize("target", [0.04, 0.1])
@pytest.mark.parametrize(
    ("strategy", "name", "step"),
    [("SSB", "lrf", 1 / 1024), ("BKT", "bucket_size", 16), ("ATS", "n_bins", 1)],
)
def test_solved_parameter_is_the_last_within_the_target(strategy, name, step, target):
    lengths = corpus(800)
    value = solve_randomness(lengths, strategy, target)
    fixed = {"dynamic_batch_size": False, "batch_size": 16}
    assert mean_zpr(lengths, strategy, **{name: value}, **fixed) <= target
    assert mean_zpr(lengths, strategy, **{name: value + step}, **fixed) > target


def test_solved_parameter_is_for_the_settings_given():
    lengths, settings = corpus(800), {"dynamic_batch_size": True, "batch_size": 8, "seed": 5}
    value = solve_randomness(lengths, "SSB", 0.07, **settings)
    assert mean_zpr(lengths, "SSB", lrf=value, **settings) <= 0.07
    assert mean_zpr(lengths, "SSB", lrf=value + 1 / 1024, **settings) > 0.07


@pytest.mark.parametrize("strategy", ["SSB", "BKT", "ATS"])
@pytest.mark.parametrize("target", [0.0, 0.9])
def test_a_zpr_that_no_parameter_reaches_is_refused_with_the_range(strategy, target):
    message = rf"^target_zpr={target}: {strategy} gives 0\.\d{{4}} to 0\.\d{{4}} here$"
    with pytest.raises(ValueError, match=message):
        solve_randomness(corpus(300), strategy, target)


@pytest.mark.parametrize("strategy", ["RAND", "SB", "none"])
def test_strategies_without_a_parameter_have_none_to_solve_for(strategy):
    with pytest.raises(ValueError, match=f"^strategy='{strategy}' has no parameter to solve for"):
        solve_randomness(corpus(300), strategy, 0.1)


@pytest.mark.parametrize(
    ("strategy", "largest"), [("SSB", 32.0), ("BKT", 16 * 7), ("ATS", 6)], ids=["SSB", "BKT", "ATS"]
)
def test_solved_parameter_can_be_the_largest_of_all(strategy, largest):
    assert solve_randomness([50] * 100, strategy, 0.0) == largest


# The sampler


@law
@given(cases(), st.integers(0, 5), st.data())
def test_the_remainder_of_an_interrupted_epoch_is_identical(case, epoch, data):
    lengths, settings = case
    settings.pop("epoch")
    sampler = EpochBatchSampler(lengths, **settings)
    sampler.set_epoch(epoch)
    whole = batches(plan_batches(lengths, epoch=epoch, **settings))
    stop = data.draw(st.integers(0, len(whole)))
    drawn = [batch for batch, _ in zip(sampler, range(stop), strict=False)]

    resumed = EpochBatchSampler(lengths, **settings)
    resumed.load_state_dict(sampler.state_dict(stop))
    resumed.set_epoch(epoch)  # as the training loop does; the epoch goes on
    assert len(resumed) == len(whole)
    assert drawn + list(resumed) == whole
    resumed.set_epoch(epoch + 1)
    assert list(resumed) == batches(plan_batches(lengths, epoch=epoch + 1, **settings))


def load(sampler: EpochBatchSampler, n: int, **settings: object) -> torch.utils.data.DataLoader:
    """A loader whose batches are the lists of indices themselves."""
    return torch.utils.data.DataLoader(
        range(n), batch_sampler=sampler, collate_fn=list, num_workers=2, **settings
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resuming_behind_a_loader_with_workers(strategy):
    """Workers draw ahead of the training, which stops at its first, a middle or its last batch."""
    lengths, settings = corpus(150), {"strategy": strategy, "batch_size": 8, "seed": 3}
    settings |= {"bucket_size": 40, "n_bins": 4}
    whole = batches(plan_batches(lengths, epoch=2, **settings))
    for stop in (1, len(whole) // 2, len(whole)):
        sampler = EpochBatchSampler(lengths, **settings)
        sampler.set_epoch(2)
        done = []
        for batch in load(sampler, 150):
            done.append(batch)
            if len(done) == stop:
                break
        resumed = EpochBatchSampler(lengths, **settings)
        resumed.load_state_dict(sampler.state_dict(len(done)))
        loader = load(resumed, 150)
        assert len(loader) == len(whole)
        assert done + list(loader) == whole


def test_epochs_through_one_loader_with_persistent_workers():
    lengths = corpus(100)
    sampler = EpochBatchSampler(lengths, seed=4)
    loader = load(sampler, 100, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert list(loader) == batches(plan_batches(lengths, seed=4, epoch=epoch))


def test_an_epoch_left_early_starts_again_and_a_loaded_one_goes_on():
    lengths = corpus(100)
    sampler = EpochBatchSampler(lengths, batch_size=4)
    whole = batches(sampler.plan)
    next(iter(sampler))
    assert list(sampler) == whole
    sampler.set_epoch(1)
    assert list(sampler) == batches(plan_batches(lengths, batch_size=4, epoch=1))
    sampler.load_state_dict({"epoch": 0, "batch": 3})
    sampler.set_epoch(0)
    assert list(sampler) == whole[3:]
    assert list(sampler) == whole
    sampler.load_state_dict({"epoch": 0, "batch": 3})
    sampler.set_epoch(1)
    sampler.set_epoch(0)
    assert list(sampler) == whole


def test_the_state_is_the_epoch_and_the_number_of_batches_done():
    sampler = EpochBatchSampler(corpus(100), batch_size=4)
    sampler.set_epoch(6)
    assert sampler.state_dict(0) == {"epoch": 6, "batch": 0}
    assert sampler.state_dict(2) == {"epoch": 6, "batch": 2}


def test_a_state_of_other_lengths_is_refused():
    state = {"epoch": 1, "batch": 20}
    message = "^batch 20 of epoch 1: its plan has 1 batches, so the state is of other lengths"
    with pytest.raises(ValueError, match=message):
        EpochBatchSampler([5, 6, 7]).load_state_dict(state)


def test_the_length_of_the_sampler_is_that_of_the_epoch():
    lengths = corpus(500)
    sampler = EpochBatchSampler(lengths, strategy="SSB", lrf=0.5, batch_size=6)
    counts = set()
    for epoch in range(20):
        sampler.set_epoch(epoch)
        counts.add(len(sampler))
        assert len(sampler) == len(list(sampler))
    assert len(counts) > 1, "dynamic batches differ in number from epoch to epoch"


def test_the_sampler_shows_every_setting_of_a_plan_with_its_default():
    ours, of_plan = (inspect.signature(f).parameters for f in (EpochBatchSampler, plan_batches))
    assert list(ours)[:2] == ["lengths", "seed"] and set(ours) == set(of_plan) - {"epoch"}
    for name, parameter in ours.items():
        assert parameter.default == of_plan[name].default
        assert parameter.annotation == of_plan[name].annotation


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bucketsize", r"did you mean 'bucket_size'\?$"),
        ("dynamic", r"did you mean 'dynamic_batch_size'\?$"),
        ("batch_randomisation", r"did you mean 'batch_randomization'\?$"),
        ("epoch", "use one of strategy, batch_size, .*, drop_last$"),
    ],
)
def test_a_wrong_name_gets_the_nearest(name, hint):
    with pytest.raises(TypeError, match=f"^EpochBatchSampler: unknown argument '{name}'; {hint}"):
        EpochBatchSampler([4, 5], lrf=0.2, **{name: 1})


def test_the_file_works_alone_with_numpy(tmp_path):
    shutil.copy(batching.__file__, tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None; import batching; "
        "print(len(batching.EpochBatchSampler([3, 4, 5] * 16)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "") and int(done.stdout) == 3


# Settings that do nothing


def note(n: int, **settings: object) -> str:
    """What is said of ``n`` clips of LJSpeech."""
    hparams = HParams(**settings)
    lengths = subset(ljspeech_lengths(hparams.hop_length), n, 0)
    clips = [SimpleNamespace(n_frames=int(length)) for length in lengths]
    return data_utils.batching_note(data_utils.training_sampler(clips, hparams), hparams)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("n", "settings", "what"),
    [
        (10_480, {"batching_strategy": "BKT", "batch_size": 4, "bucket_size": 2},
         "BKT with bucket_size=2: no batch has more than 2 clips; "),
        (300, {"batching_strategy": "BKT"},
         "BKT with bucket_size=1024: all 300 clips are in one bucket, which is RAND; "),
        (300, {"batching_strategy": "ATS"},
         "ATS with n_bins=58: an epoch has only 19 batches, which makes it RAND, or nearly so; "),
    ],
)  # fmt: skip
def test_a_setting_that_does_nothing_is_noted_with_a_value_that_pads_like_ssb(
    n, settings, what, dynamic
):
    said = note(n, dynamic_batch_size=dynamic, lrf=0.2, **settings)
    assert said.startswith(what)
    assert said.endswith(" pads about as much as SSB with lrf=0.2")
    assert ("dynamic_batch_size makes none larger" in said) == (dynamic and "bucket_size=2" in what)

    name, value = re.search(r"(bucket_size|n_bins)=(\d+) pads", said).groups()
    assert note(n, **{**settings, name: int(value)}) == ""
    lengths, batch_size = subset(ljspeech_lengths(276), n, 0), settings.get("batch_size", 16)
    fixed = {"dynamic_batch_size": False, "batch_size": batch_size}
    strategy = settings["batching_strategy"]
    ours, ssb, random = (
        mean_zpr(lengths, *strategy, **fixed, **parameter)
        for *strategy, parameter in (
            (strategy, {name: int(value)}), ("SSB", {"lrf": 0.2}), ("RAND", {}),
        )
    )  # fmt: skip
    assert ours <= ssb < 0.7 * random and ours > 0.3 * ssb


def test_what_is_noted_is_so():
    """Buckets and bins as in the notes: batches of 2, and RAND's padding."""
    lengths = subset(ljspeech_lengths(276), 300, 0)
    plan = plan_batches(lengths, "BKT", batch_size=4, bucket_size=2)
    assert set(plan.sizes) == {2}
    random = mean_zpr(lengths, "RAND")
    for settings in ({"strategy": "BKT"}, {"strategy": "ATS"}):
        assert mean_zpr(lengths, **settings) == pytest.approx(random, rel=0.05)


@pytest.mark.parametrize(
    ("n", "settings"),
    [
        *((10_480, {"batching_strategy": strategy}) for strategy in STRATEGIES),
        (300, {"batching_strategy": "SSB", "bucket_size": 2}),
        (300, {"batching_strategy": "BKT", "bucket_edges": "uniform"}),
        (300, {"batching_strategy": "BKT", "bucket_size": 16, "dynamic_batch_size": False}),
        (16, {"batching_strategy": "ATS"}),
    ],
)
def test_nothing_is_noted_of_settings_that_work(n, settings, monkeypatch):
    monkeypatch.setattr(data_utils, "solve_randomness", None)  # nor searched for
    assert note(n, **settings) == ""


def test_so_few_clips_that_no_value_pads_like_ssb():
    said = note(20, batching_strategy="BKT", lrf=0.0)
    assert said.endswith("; with so few clips no value pads as little as SSB with lrf=0")


def test_training_says_the_note_once(settings, tmp_path, monkeypatch, capsys):
    settings += "batching_strategy=ATS,epochs=1"
    arguments = ["train.py", "-o", str(tmp_path / "run"), "--hparams", settings]
    monkeypatch.setattr(sys, "argv", arguments)
    train.main()
    assert capsys.readouterr().out.count("note: ATS with n_bins=58: an epoch has only ") == 1
