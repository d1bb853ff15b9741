"""The laws of batching.py, over every strategy, fixed and dynamic, in order and randomised."""

import dataclasses
import inspect
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from itertools import chain, product
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
    STRATEGY_SETTINGS,
    BatchPlan,
    EpochBatchSampler,
    batch_statistics,
    plan_batches,
    solve_randomness,
)
from hparams import HParams
from scripts.plot_batching import ljspeech_lengths, subset

law = hypothesis.settings(max_examples=150, deadline=None)
law_of_both = hypothesis.settings(law, max_examples=300)  # fixed and dynamic batches in one test

IN_ORDER = {"batch_randomization": False}
FIXED = {"dynamic_batch_size": False, "batch_size": 16}

# On both sides of: the types that lengths are kept in, the span above which the sort uses no
# 16-bit keys, lengths in samples.
LONGEST = (1, 3, 40, 255, 256, 900, 4094, 4096, 65_535, 65_536, 220_000)


@st.composite
def cases(draw: st.DrawFn, **fixed: object) -> tuple[list[int], dict]:
    """Lengths, and arguments of plan_batches() that suit them; ``fixed`` ones are as given."""
    longest = draw(st.sampled_from(LONGEST))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=90))
    settings = {
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
    if settings["dynamic_batch_size"] and draw(st.booleans()):
        settings["capacity"] = draw(st.integers(max(lengths), 30 * max(lengths)))
    return lengths, settings


def corpus(n: int) -> np.ndarray:
    """Lengths in frames, more of them long than short, as in read speech."""
    return np.random.default_rng([0, 1]).triangular(96, 870, 870, n).astype(int)


def batches(plan: BatchPlan) -> list[list[int]]:
    return [batch.tolist() for batch in plan]


def of_lengths(lengths: np.ndarray, plan: BatchPlan) -> list[list[int]]:
    return [np.array(lengths)[batch].tolist() for batch in plan]


def correlation(values: np.ndarray) -> float:
    """With the values' positions: how much they rise or fall."""
    return float(np.corrcoef(values, np.arange(len(values)))[0, 1])


def greedy_sizes(lengths: list[int], capacity: int) -> list[int]:
    """The oracle of DBS: take the next clip as long as size x longest stays within capacity."""
    sizes, size, longest = [], 0, 0
    for length in lengths:
        if size and (size + 1) * max(longest, length) > capacity:
            sizes.append(size)
            size, longest = 0, 0
        size, longest = size + 1, max(longest, length)
    return [*sizes, size]


def check_greedy(lengths: np.ndarray, capacity: int | None = None, **settings: object) -> None:
    plan = plan_batches(lengths, capacity=capacity, **IN_ORDER, **settings)
    wanted = greedy_sizes(lengths[plan.order].tolist(), capacity or 16 * int(lengths.max()))
    assert plan.sizes.tolist() == wanted


def buckets_of(lengths: list[int], plan: BatchPlan, settings: dict) -> np.ndarray:
    """The number of the bucket of every clip of ``plan.order``; outside BKT all are in one."""
    position, n, n_buckets = np.arange(len(lengths)), len(lengths), settings["n_buckets"]
    if settings["strategy"] != "BKT":
        return 0 * position
    if settings["bucket_edges"] == "size":
        return position // settings["bucket_size"]
    if settings["bucket_edges"] == "quantile":
        return np.sum([position >= b * n // n_buckets for b in range(1, n_buckets + 1)], axis=0)
    limits = np.linspace(max(lengths), min(lengths), n_buckets + 1)[1:-1]
    return np.array([int((lengths[clip] < limits).sum()) for clip in plan.order])


def mean_zpr(lengths: np.ndarray, strategy: str, **settings: object) -> float:
    plans = [plan_batches(lengths, strategy, epoch=e, **settings) for e in range(8)]
    return float(np.mean([batch_statistics(lengths, plan).zpr for plan in plans]))


# Every plan


@pytest.mark.filterwarnings("error")
@law_of_both
@given(cases(), st.sampled_from(["error", "alone", "drop"]))
def test_every_clip_is_in_one_batch_and_the_statistics_are_right(case, oversize):
    lengths, settings = case
    plan = plan_batches(lengths, oversize=oversize, **settings)
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert plan.ends[-1] == len(lengths) and min(plan.sizes) >= 1
    assert plan.order.dtype == plan.ends.dtype == np.int64
    assert plan.oversize.tolist() == []

    parts, n, real = of_lengths(lengths, plan), len(lengths), sum(lengths)
    padded = [len(part) * max(part) for part in parts]
    if settings["dynamic_batch_size"]:
        assert max(padded) <= settings.get("capacity", settings["batch_size"] * max(lengths))
    else:
        assert max(plan.sizes) <= settings["batch_size"]

    zpr = sum(len(part) * (1 - Fraction(sum(part), len(part) * max(part))) for part in parts) / n
    wanted = {
        "n_batches": len(parts),
        "zpr": float(zpr),
        "zpr_of_data": (sum(padded) - real) / real,
        "abl": sum(padded) / n,
        "total_length": sum(max(part) for part in parts),
        "max_batch_size": max(len(part) for part in parts),
        "max_padded_length": max(padded),
    }
    assert batch_statistics(lengths, plan)._asdict() == pytest.approx(wanted)


@law_of_both
@given(cases(**IN_ORDER))
def test_batches_take_all_they_can_inside_a_bucket_as_a_greedy_loop_does(case):
    lengths, settings = case
    plan = plan_batches(lengths, **settings)
    bucket, wanted = buckets_of(lengths, plan, settings), []
    for b in np.unique(bucket):
        in_order = [lengths[i] for i in plan.order[bucket == b]]
        if settings["dynamic_batch_size"]:
            capacity = settings.get("capacity", settings["batch_size"] * max(lengths))
            wanted += greedy_sizes(in_order, capacity)
        else:
            wanted += greedy_sizes([1] * len(in_order), settings["batch_size"])
    assert plan.sizes.tolist() == wanted


@law
@given(cases())
def test_batch_randomisation_only_permutes_the_batches(case):
    lengths, settings = case
    randomised, ordered = (
        plan_batches(lengths, **{**settings, "batch_randomization": br}) for br in (True, False)
    )
    assert sorted(batches(randomised)) == sorted(batches(ordered))


@law
@given(cases())
def test_a_plan_depends_on_seed_plus_epoch_and_not_on_the_type_of_the_lengths(case):
    lengths, settings = case
    wanted = batches(plan_batches(lengths, **settings))
    shifted = {**settings, "seed": settings["seed"] + settings["epoch"], "epoch": 0}
    assert batches(plan_batches(lengths, **shifted)) == wanted
    for kind in (np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        if max(lengths) <= np.iinfo(kind).max:
            array = np.array(lengths, kind)
            assert batches(plan_batches(array, **settings)) == wanted, kind
            assert array.tolist() == lengths, "the lengths were changed"


@pytest.mark.parametrize("br", [False, True])
@pytest.mark.parametrize("dbs", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_seed_or_epoch_has_other_batches_in_another_order(strategy, dbs, br):
    kind = {"strategy": strategy, "dynamic_batch_size": dbs, "batch_randomization": br}
    lengths = corpus(500) // 10  # many ties, which are all that SB shuffles
    for step in ("seed", "epoch"):
        plans = [plan_batches(lengths, **kind, bucket_size=50, **{step: s}) for s in (3, 4)]
        first, second = ({frozenset(batch) for batch in batches(plan)} for plan in plans)
        assert len(first & second) < len(first) / 2
        assert plans[0].order.tolist() != plans[1].order.tolist()
    if br:
        lengths = np.arange(1, 401)  # no ties: SB's batches are the same in every epoch
        plans = [plan_batches(lengths, **kind, lrf=0, epoch=e) for e in (0, 1)]
        first, second = ([max(part) for part in of_lengths(lengths, plan)] for plan in plans)
        assert first != second and first != sorted(first)


# DBS over many clips: blocks of 16,384, sizes counted up to 255


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
def test_greedy_loop_at_the_ends_of_blocks(low, high, capacity):
    for n in (1, 255, 256, 16_383, 16_384, 16_385, 32_768, 33_000):
        lengths = np.random.default_rng(n).integers(low, high + 1, n)
        for strategy in ("RAND", "SB"):
            check_greedy(lengths, capacity, strategy=strategy, epoch=n)


@law
@given(
    n=st.integers(1, 3000),
    longest=st.integers(1, 30),
    share=st.sampled_from([0.001, 0.01, 0.5, 1.0]),
    capacity=st.integers(30, 20_000),
    strategy=st.sampled_from(list(STRATEGIES)),
    seed=st.integers(0, 99),
)
def test_greedy_loop_with_tiny_lengths(n, longest, share, capacity, strategy, seed):
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(n) < share, rng.integers(1, longest, n, endpoint=True), 1)
    check_greedy(lengths, capacity, strategy=strategy, bucket_size=n)


def test_greedy_loop_with_one_long_clip_that_bounds_a_batch_of_hundreds():
    lengths = np.append(30, np.ones(999, int))
    for seed in range(30):
        check_greedy(lengths, 9000, strategy="RAND", seed=seed)


# Each strategy, and where it turns into another


@law
@given(cases(**IN_ORDER, dynamic_batch_size=False))
def test_sb_is_sorted_and_lrf_0_and_one_bin_are_sb(case):
    lengths, settings = case
    for strategy, one in (("SB", {}), ("SSB", {"lrf": 0}), ("ATS", {"n_bins": 1})):
        plan = plan_batches(lengths, **{**settings, "strategy": strategy, **one})
        assert [lengths[i] for i in plan.order] == sorted(lengths)


@pytest.mark.parametrize("low, high", [(1, 4095), (1, 4096), (20_000, 220_000), (1, 10**9)])
def test_sb_is_sorted_over_wide_spans(low, high):
    lengths = np.random.default_rng(1).integers(low, high, 20_000, endpoint=True)
    plan = plan_batches(lengths, "SB", **IN_ORDER)
    assert (np.diff(lengths[plan.order]) >= 0).all()


@pytest.mark.parametrize("span", [0, 700, 4000, 5000, 30_000, 60_000, 220_000])
def test_ties_of_sb_fall_at_random(span):
    order = plan_batches(np.append(np.full(4000, 7), 7 + span), "SB", **IN_ORDER).order
    assert abs(correlation(order[:4000])) < 0.1


@pytest.mark.parametrize("low, high", [(96, 870), (20_000, 220_000)], ids=["frames", "samples"])
@pytest.mark.parametrize("lrf", [0.05, 0.3, 2.0])
def test_ssb_never_goes_back_by_more_than_its_noise_and_uses_all_of_it(low, high, lrf):
    lengths = np.random.default_rng(2).integers(low, high, 30_000, endpoint=True)
    in_order = lengths[plan_batches(lengths, "SSB", lrf=lrf, **IN_ORDER).order]
    goes_back = (np.maximum.accumulate(in_order) - in_order).max()
    span = np.ptp(lengths)
    assert 0.9 * min(lrf, 1) * span < goes_back <= lrf * span


@pytest.mark.parametrize("unit", [1, 250], ids=["frames", "samples"])
@pytest.mark.parametrize("difference", [0, 20, 40, 60, 79])
def test_ssb_noise_is_uniform_and_as_wide_as_the_paper_says(unit, difference):
    # Two uniform noises of width a swap lengths d apart with probability (1 - d / a)^2 / 2.
    n, a = 4000, 80
    lengths = np.array([100, 900] + [400] * n + [400 + difference] * n) * unit
    order = plan_batches(lengths, "SSB", lrf=a / 800, **IN_ORDER).order
    is_long = order[order > 1] >= 2 + n
    swapped = np.cumsum(is_long)[~is_long].sum() / n**2
    assert swapped == pytest.approx((1 - difference / a) ** 2 / 2, abs=0.02)


@law_of_both
@given(cases(strategy="BKT", **IN_ORDER))
def test_buckets_divide_the_sorted_clips_from_the_longest_down(case):
    lengths, settings = case
    n, n_buckets = len(lengths), settings["n_buckets"]
    plan = plan_batches(lengths, **settings)
    bucket, in_order = buckets_of(lengths, plan, settings), np.array(lengths)[plan.order]
    by_bucket = [sorted(in_order[bucket == b].tolist())[::-1] for b in np.unique(bucket)]
    assert list(chain(*by_bucket)) == sorted(lengths, reverse=True)
    starts = np.flatnonzero(np.diff(bucket)) + 1
    assert set(starts) <= set(plan.ends), "a batch crosses the end of a bucket"
    if settings["bucket_edges"] == "uniform":
        width = (max(lengths) - min(lengths)) / n_buckets
        assert max(np.ptp(part) for part in of_lengths(lengths, plan)) <= width * (1 + 1e-9)
    elif settings["bucket_edges"] == "quantile":
        sizes = [len(part) for part in by_bucket] + [0] * (n_buckets - n)
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("edges", ["size", "uniform", "quantile"])
def test_buckets_are_shuffled_inside(edges):
    lengths = corpus(2000)
    settings = {"strategy": "BKT", "bucket_edges": edges, "n_buckets": 4, "bucket_size": 500}
    plan = plan_batches(lengths, **IN_ORDER, **settings)
    bucket = buckets_of(lengths.tolist(), plan, settings)
    assert len(set(bucket)) == 4
    for b in set(bucket):
        assert abs(correlation(lengths[plan.order[bucket == b]])) < 0.15


@law
@given(cases(strategy="ATS", **IN_ORDER))
def test_ats_sorts_equal_bins_up_and_down_in_turn(case):
    lengths, settings = case
    in_order = np.array(lengths)[plan_batches(lengths, **settings).order]
    for b, in_bin in enumerate(np.array_split(in_order, settings["n_bins"])):
        assert in_bin.tolist() == sorted(in_bin.tolist(), reverse=b % 2 == 1)


def test_ats_bins_hold_clips_at_random():
    lengths = corpus(3000)
    plan = plan_batches(lengths, "ATS", n_bins=3, **IN_ORDER)
    means = [lengths[members].mean() for members in np.array_split(plan.order, 3)]
    assert np.ptp(means) < 0.03 * lengths.mean()


@pytest.mark.parametrize(
    ("strategy", "setting"),
    [
        pytest.param("SSB", {"lrf": 1000}, id="SSB, huge LRF"),
        pytest.param("BKT", {"bucket_size": 2000}, id="BKT, one bucket by size"),
        pytest.param("BKT", {"n_buckets": 1, "bucket_edges": "uniform"}, id="BKT, one uniform"),
        pytest.param("BKT", {"n_buckets": 1, "bucket_edges": "quantile"}, id="BKT, one quantile"),
        pytest.param("ATS", {"n_bins": 125}, id="ATS, one batch per bin"),
    ],
)
def test_the_far_end_of_every_setting_is_random_batching(strategy, setting):
    """Over 30 epochs: RAND's ZPR, and no trend of length along the epoch."""
    lengths = corpus(2000)
    ours, random = (
        [plan_batches(lengths, s, epoch=e, **IN_ORDER, **FIXED, **setting) for e in range(30)]
        for s in (strategy, "RAND")
    )
    zpr, zpr_random = (
        np.mean([batch_statistics(lengths, plan).zpr for plan in plans]) for plans in (ours, random)
    )
    assert zpr == pytest.approx(zpr_random, abs=0.003)
    trends = [correlation(lengths[plan.order]) for plan in ours]
    assert abs(np.mean(trends)) < 0.02 and np.abs(trends).max() < 0.1


def test_strategies_fall_between_sorted_and_random():
    lengths, settings = corpus(2000), {"bucket_size": 256, "n_bins": 10}
    zpr = {
        s: batch_statistics(lengths, plan_batches(lengths, s, **FIXED, **settings)).zpr
        for s in STRATEGIES
    }
    for strategy in ("SSB", "BKT", "ATS"):
        assert zpr["SB"] < zpr[strategy] < zpr["RAND"] / 2


# Clips that are left out, or do not fit


@law
@given(cases(dynamic_batch_size=False))
def test_drop_last_leaves_out_the_batches_that_are_not_full_and_nothing_else(case):
    lengths, settings = case
    whole = batches(plan_batches(lengths, **settings))
    full = [batch for batch in whole if len(batch) == settings["batch_size"]]
    if full:
        kept = batches(plan_batches(lengths, drop_last=True, **settings))
        assert sorted(kept) == sorted(full)
    else:
        with pytest.raises(ValueError, match="drop_last=True: no batch has batch_size="):
            plan_batches(lengths, drop_last=True, **settings)


@law
@given(cases(dynamic_batch_size=True), st.data())
def test_oversize_clips_stand_alone_or_are_dropped_and_the_others_keep_to_the_capacity(case, data):
    lengths, settings = case
    lengths += [1, max(lengths) + 1]
    capacity = settings["capacity"] = data.draw(st.integers(1, max(lengths) - 1))
    fitting = [i for i, length in enumerate(lengths) if length <= capacity]
    too_long = sorted(set(range(len(lengths))) - set(fitting))

    with pytest.warns(UserWarning, match="clips batched alone: clip "):
        plan = plan_batches(lengths, oversize="alone", **settings)
    assert plan.oversize.tolist() == too_long
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    for batch in batches(plan):
        fits = len(batch) * max(lengths[i] for i in batch) <= capacity
        assert fits or (len(batch) == 1 and batch[0] in too_long)

    with pytest.warns(UserWarning, match="clips dropped: clip "):
        plan = plan_batches(lengths, oversize="drop", **settings)
    assert plan.oversize.tolist() == too_long
    others = plan_batches([lengths[i] for i in fitting], **settings)
    assert batches(plan) == [[fitting[k] for k in batch] for batch in batches(others)]


@pytest.mark.parametrize("oversize, done", [("alone", "batched alone"), ("drop", "dropped")])
def test_oversize_warnings_name_the_longest_clip(oversize, done):
    with pytest.warns(UserWarning) as caught:
        plan_batches([5, 20, 9, 30], capacity=10, oversize=oversize)
    messages = [str(warning.message) for warning in caught]
    assert messages == [f"2 clips {done}: clip 3 has length 30, above capacity=10"]
    assert caught[0].filename == __file__


# Refusals


NOT_DYNAMIC = {"dynamic_batch_size": False}
REFUSED = [  # lengths, arguments, and what the message says
    ([], {}, "lengths is empty"),
    ([[1, 2]], {}, "lengths has shape (1, 2): use one length per clip"),
    ([1.0, 2.0], {}, "lengths has dtype float64: use whole numbers, such as frames or samples"),
    ([True], {}, "lengths has dtype bool: use whole numbers"),
    ([4, 0, 3], {}, "clip 1 has length 0: leave it out"),
    ([4, 5, -3], {}, "clip 2 has length -3: leave it out"),
    ([4], {"strategy": "ssb"}, "strategy='ssb': use one of RAND, SB, SSB, BKT, ATS"),
    *(
        ([4], {name: value}, f"{name}={value}: use a whole number, 1 or more")
        for name in ("batch_size", "bucket_size", "n_buckets", "n_bins", "capacity")
        for value in (0, 1.5)
    ),
    *(([4], {"lrf": lrf}, f"lrf={lrf}: use 0 to 1e6") for lrf in (-0.1, 1e7, np.nan, np.inf)),
    ([7] * 40, {"lrf": np.inf}, "lrf=inf: use "),
    (list(range(1, 41)), {"lrf": np.inf}, "lrf=inf: use "),
    ([4], {"bucket_edges": "log"}, "bucket_edges='log': use one of size, uniform, quantile"),
    ([4], {"oversize": "cut"}, "oversize='cut': use one of error, alone, drop"),
    ([4], {"capacity": 9, **NOT_DYNAMIC}, "capacity=9: set dynamic_batch_size=True"),
    ([4], {"drop_last": True}, "drop_last=True: set dynamic_batch_size=False"),
    ([4], {"seed": -1}, "seed + epoch=-1: use 0 or more"),
    (
        [4, 4],
        {"drop_last": True, "batch_size": 3, **NOT_DYNAMIC},
        "drop_last=True: no batch has batch_size=3 clips",
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
        "clip 1 has length 30, above capacity=10, .* use a larger capacity",
    ),
]


@pytest.mark.parametrize(("lengths", "settings", "words"), REFUSED)
def test_impossible_arguments_are_refused_in_one_line(lengths, settings, words):
    words = re.escape(words).replace(r"\.\*", ".*")
    for function in (plan_batches, EpochBatchSampler):
        # Whatever the strategy: settings of the others are checked too.
        for strategy in ("RAND", "SSB", "BKT"):
            with pytest.raises(ValueError, match=f"^{words}") as caught:
                function(lengths, **{"strategy": strategy, **settings})
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bucketsize", r"did you mean 'bucket_size'\?$"),
        ("dynamic", r"did you mean 'dynamic_batch_size'\?$"),
        ("batch_randomisation", r"did you mean 'batch_randomization'\?$"),
        ("xyz", "use one of .*strategy, batch_size, .*, drop_last, lrf, "),
    ],
)
def test_a_wrong_name_gets_the_nearest(name, hint):
    for function in (plan_batches, EpochBatchSampler):
        with pytest.raises(TypeError, match=f"^unknown argument '{name}'; {hint}"):
            function([4, 5], lrf=0.2, **{name: 1})
    with pytest.raises(TypeError, match="epoch"):
        EpochBatchSampler([4, 5], epoch=1)


def test_signatures_show_every_setting_with_its_default():
    of_plan, of_sampler = (
        inspect.signature(function).parameters for function in (plan_batches, EpochBatchSampler)
    )
    assert list(of_sampler)[:2] == ["lengths", "seed"]
    assert set(of_sampler) == set(of_plan) - {"epoch"} and "settings" not in of_plan
    for name, parameter in of_sampler.items():
        assert parameter.default == of_plan[name].default
        assert parameter.annotation == of_plan[name].annotation
    fields = {field.name: field for field in dataclasses.fields(HParams)}
    for name, parameter in STRATEGY_SETTINGS.items():
        assert of_plan[name] == parameter
        assert fields[name].default == parameter.default, "hparams.py and batching.py differ"


def test_hparams_pass_to_the_sampler_by_name():
    changes = {
        "seed": 3, "batch_size": 5, "batch_randomization": False, "lrf": 0.7, "bucket_size": 6,
        "bucket_edges": "uniform", "n_buckets": 3, "n_bins": 2,
    }  # fmt: skip
    clips = [SimpleNamespace(n_frames=int(length)) for length in corpus(100)]
    for strategy, capacity in product(STRATEGIES, (0, 6000)):
        hparams = HParams(batching_strategy=strategy, batch_capacity=capacity, **changes)
        wanted = plan_batches(corpus(100), strategy, capacity=capacity or None, **changes)
        assert batches(data_utils.training_sampler(clips, hparams).plan) == batches(wanted)


def test_the_file_works_alone_with_numpy(tmp_path):
    shutil.copy(batching.__file__, tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None; import batching; "
        "print(len(batching.EpochBatchSampler([3, 4, 5] * 16)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "3\n")


# Plans as sequences, and statistics


def test_a_plan_is_indexed_and_sliced_like_a_list_of_batches():
    plan = BatchPlan(order=[3, 1, 0, 4, 2], ends=[2, 3, 5])
    assert len(plan) == 3 and plan.sizes.tolist() == [2, 1, 2]
    assert batches(plan) == [[3, 1], [0], [4, 2]]
    assert plan[-1].tolist() == [4, 2] and plan[np.int64(0)].tolist() == [3, 1]
    assert batches(plan[1:]) == [[0], [4, 2]]
    assert batches(plan[::-1]) == [[4, 2], [0], [3, 1]]
    for j in (3, -4):
        with pytest.raises(IndexError):
            plan[j]


@pytest.mark.parametrize(
    ("order", "ends", "wanted"),
    [
        # Batches of lengths (2, 4) and (3, 9): 26 padded, 18 real.
        ([0, 1, 2, 3], [2, 4], (2, (1 / 4 + 1 / 3) / 2, 8 / 18, 6.5, 13, 2, 18)),
        # (2, 4, 3) and (9): 21 padded; the first weighs three times as much.
        ([0, 1, 2, 3], [3, 4], (2, 3 / 4 * 1 / 4, 3 / 18, 5.25, 13, 3, 12)),
        ([0, 1, 2, 3], [4], (1, 1 / 2, 1.0, 9.0, 9, 4, 36)),
        ([0, 1, 2, 3], [1, 2, 3, 4], (4, 0.0, 0.0, 4.5, 18, 1, 9)),
        ([3, 0], [2], (1, 7 / 18, 7 / 11, 9.0, 9, 2, 18)),  # two clips were left out
    ],
)
def test_statistics_by_hand(order, ends, wanted):
    assert batch_statistics([2, 4, 3, 9], BatchPlan(order, ends)) == pytest.approx(wanted)


# The setting that gives a ZPR


@pytest.mark.parametrize(
    ("strategy", "name", "step", "target", "settings"),
    [
        *(("SSB", "lrf", 1 / 1024, target, FIXED) for target in (0.04, 0.1)),
        *(("BKT", "bucket_size", 16, target, FIXED) for target in (0.04, 0.1)),
        *(("ATS", "n_bins", 1, target, FIXED) for target in (0.04, 0.1)),
        ("SSB", "lrf", 1 / 1024, 0.07, {"dynamic_batch_size": True, "batch_size": 8, "seed": 5}),
    ],
)
def test_the_solved_value_is_the_last_within_the_target(strategy, name, step, target, settings):
    lengths, given_settings = corpus(800), {} if settings is FIXED else settings
    value = solve_randomness(lengths, strategy, target, **given_settings)
    assert mean_zpr(lengths, strategy, **{name: value}, **settings) <= target
    assert mean_zpr(lengths, strategy, **{name: value + step}, **settings) > target


@pytest.mark.parametrize(
    ("strategy", "largest"), [("SSB", 32.0), ("BKT", 16 * 7), ("ATS", 6)], ids=["SSB", "BKT", "ATS"]
)
def test_the_solved_value_can_be_the_largest_but_not_beyond_what_it_reaches(strategy, largest):
    assert solve_randomness([50] * 100, strategy, 0.0) == largest
    for target in (0.0, 0.9):
        message = rf"^target_zpr={target}: {strategy} gives 0\.\d{{4}} to 0\.\d{{4}} here$"
        with pytest.raises(ValueError, match=message):
            solve_randomness(corpus(300), strategy, target)


@pytest.mark.parametrize("strategy", ["RAND", "SB", "none"])
def test_other_strategies_have_nothing_to_solve_for(strategy):
    with pytest.raises(ValueError, match=f"^strategy='{strategy}' has no .* use one of SSB, BKT"):
        solve_randomness(corpus(300), strategy, 0.1)


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
    state = sampler.state_dict(stop)
    assert state == {"epoch": epoch, "batch": stop}

    resumed = EpochBatchSampler(lengths, **settings)
    resumed.load_state_dict(state)
    resumed.set_epoch(epoch)  # as the training loop does; it stays where it was loaded
    assert len(resumed) == len(whole)
    assert drawn + list(resumed) == whole
    resumed.set_epoch(epoch + 1)
    following = batches(plan_batches(lengths, epoch=epoch + 1, **settings))
    assert len(resumed) == len(following) and list(resumed) == following


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
        done = [batch for _, batch in zip(range(stop), load(sampler, 150), strict=False)]
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


def test_a_state_of_other_lengths_is_refused():
    message = "^batch 20 of epoch 1: its plan has 1 batches, so the state is of other lengths"
    with pytest.raises(ValueError, match=message):
        EpochBatchSampler([5, 6, 7]).load_state_dict({"epoch": 1, "batch": 20})


# Settings that do nothing


def note(n: int, **settings: object) -> str:
    """The note about ``n`` clips of LJSpeech."""
    hparams = HParams(**settings)
    lengths = subset(ljspeech_lengths(hparams.hop_length), n, 0)
    clips = [SimpleNamespace(n_frames=int(length)) for length in lengths]
    return data_utils.batching_note(data_utils.training_sampler(clips, hparams), hparams)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("n", "settings", "problem"),
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
    n, settings, problem, dynamic
):
    said = note(n, dynamic_batch_size=dynamic, lrf=0.2, **settings)
    assert said.startswith(problem)
    assert said.endswith(" pads about as much as SSB with lrf=0.2")
    assert ("dynamic_batch_size makes" in said) == (dynamic and "bucket_size=2" in problem)

    name, value = re.search(r"(bucket_size|n_bins)=(\d+) pads", said).groups()
    assert note(n, **{**settings, name: int(value)}) == ""
    lengths, fixed = subset(ljspeech_lengths(276), n, 0), dict(FIXED)
    fixed["batch_size"] = settings.get("batch_size", 16)
    ours = mean_zpr(lengths, settings["batching_strategy"], **{name: int(value)}, **fixed)
    ssb, random = mean_zpr(lengths, "SSB", lrf=0.2, **fixed), mean_zpr(lengths, "RAND", **fixed)
    assert ours <= ssb < 0.7 * random and ours > 0.3 * ssb


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
