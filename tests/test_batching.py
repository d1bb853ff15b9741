"""The laws of batching.py, over every strategy, fixed and dynamic, in order and randomised."""

import inspect
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, product
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import batching
import data_utils
from batching import (
    STRATEGIES,
    BatchPlan,
    EpochBatchSampler,
    batch_statistics,
    deal_batches,
    plan_batches,
)
from benchmarks.bench_batching import fill
from hparams import HParams
from scripts.lengths import ljspeech_lengths, subset

law = hypothesis.settings(max_examples=300)

IN_ORDER = {"batch_randomization": False}
FIXED = {"dynamic_batch_size": False, "batch_size": 16}

# On both sides of: the types that lengths are kept in, the span above which the sort uses no
# 16-bit keys, lengths in samples.
LONGEST = (1, 3, 40, 255, 256, 900, 4094, 4096, 65_535, 65_536, 220_000)


@st.composite
def many_lengths(draw: st.DrawFn, longest: int) -> list[int]:
    """Enough for batches of hundreds: up to 3000, of which a share are longer than 1."""
    n, share = draw(st.integers(1, 3000)), draw(st.sampled_from([0.001, 0.01, 0.5, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return np.where(rng.random(n) < share, rng.integers(1, longest, n, endpoint=True), 1).tolist()


@st.composite
def cases(draw: st.DrawFn, **fixed: object) -> tuple[list[int], dict]:
    """Lengths, and arguments of plan_batches() that suit them; ``fixed`` ones are as given."""
    longest = draw(st.sampled_from(LONGEST))
    few_lengths = st.lists(st.integers(1, longest), min_size=1, max_size=90)
    lengths = draw(few_lengths | many_lengths(longest))
    settings = {
        "strategy": draw(st.sampled_from(list(STRATEGIES))),
        "batch_size": draw(st.integers(1, 12)),
        "dynamic_batch_size": draw(st.booleans()),
        "batch_randomization": draw(st.booleans()),
        "longest_first": draw(st.booleans()),
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
        most = draw(st.sampled_from([30 * max(lengths), 20_000 + max(lengths)]))
        settings["capacity"] = draw(st.integers(max(lengths), most))
    if settings["dynamic_batch_size"] and draw(st.booleans()):
        settings["max_batch_clips"] = draw(st.sampled_from([1, 2, 7, 30, 300]))
    return lengths, settings


def corpus(n: int) -> np.ndarray:
    """Lengths in frames, more of them long than short, as in read speech."""
    return np.random.default_rng([0, 1]).triangular(96, 870, 870, n).astype(int)


def batches(plan: BatchPlan) -> list[list[int]]:
    return [batch.tolist() for batch in plan]


def correlation(values: np.ndarray) -> float:
    """With the values' positions: how much they rise or fall."""
    return float(np.corrcoef(values, np.arange(len(values)))[0, 1])


def mean_zpr(lengths: np.ndarray, strategy: str, n_epochs: int = 8, **settings: object) -> float:
    plans = [plan_batches(lengths, strategy, epoch=e, **settings) for e in range(n_epochs)]
    return float(np.mean([batch_statistics(lengths, plan).zpr for plan in plans]))


def buckets_of(lengths: np.ndarray, plan: BatchPlan, settings: dict) -> list[np.ndarray]:
    """``plan.order`` in the parts that BKT shuffles; other strategies have one."""
    if settings["strategy"] != "BKT":
        return [plan.order]
    n, n_buckets, edges = len(lengths), settings["n_buckets"], settings["bucket_edges"]
    if edges == "size":
        ends = range(settings["bucket_size"], n, settings["bucket_size"])
    elif edges == "quantile":
        ends = [b * n // n_buckets for b in range(1, n_buckets)]
    else:
        limits = np.linspace(lengths.max(), lengths.min(), n_buckets + 1)[1:-1]
        ends = [(lengths >= limit).sum() for limit in limits]
        if not settings.get("longest_first", True):
            ends = [n - end for end in ends[::-1]]
    return [bucket for bucket in np.split(plan.order, ends) if len(bucket)]


def check_statistics(lengths: np.ndarray, plan: BatchPlan) -> None:
    parts = [lengths[batch] for batch in plan]
    sizes, longest, real = (np.array([f(part) for part in parts]) for f in (len, max, sum))
    padded = sizes * longest
    zpr, abl = (np.average(values, weights=sizes) for values in (1 - real / padded, longest))
    zpr_of_data, largest = sum(padded) / sum(real) - 1, (max(sizes), max(padded))
    wanted = len(plan), zpr, zpr_of_data, abl, sum(longest), *largest
    assert batch_statistics(lengths, plan) == pytest.approx(wanted)


# Every plan


@pytest.mark.filterwarnings("error")
@hypothesis.settings(max_examples=1000)  # of all strategies
@given(cases(**IN_ORDER), st.sampled_from(["error", "alone", "drop"]))
def test_batches_have_every_clip_in_order_and_take_all_they_can_inside_a_bucket(case, oversize):
    lengths, settings = np.array(case[0]), case[1]
    plan = plan_batches(lengths, oversize=oversize, **settings)
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert plan.order.dtype == plan.ends.dtype == np.int64 and plan.oversize.tolist() == []
    check_statistics(lengths, plan)

    strategy, in_order = settings["strategy"], lengths[plan.order]
    buckets = buckets_of(lengths, plan, settings)
    down = settings["longest_first"]
    if strategy == "SB" or (strategy == "SSB" and settings["lrf"] == 0):
        assert in_order.tolist() == sorted(lengths, reverse=down)
    elif strategy == "BKT":
        by_bucket = [sorted(lengths[bucket], reverse=down) for bucket in buckets]
        assert list(chain(*by_bucket)) == sorted(lengths, reverse=down)
    elif strategy == "ATS":  # up and down in turn
        for b, in_bin in enumerate(np.array_split(in_order, settings["n_bins"])):
            assert in_bin.tolist() == sorted(in_bin, reverse=b % 2 == 1)

    most, capacity = settings["batch_size"], 0
    if settings["dynamic_batch_size"]:
        capacity = settings.get("capacity", most * int(lengths.max()))
        most = settings.get("max_batch_clips", len(lengths))
    parts = (fill(bucket, lengths, most, capacity) for bucket in buckets)
    assert batches(plan) == [batch for part in parts for batch in part]
    if capacity:
        assert all(len(batch) * max(lengths[i] for i in batch) <= capacity for batch in plan)


@law
@given(cases())
def test_a_plan_depends_on_seed_plus_epoch_and_br_only_permutes_its_batches(case):
    lengths, settings = case
    wanted = batches(plan_batches(lengths, **settings))
    other = {**settings, "batch_randomization": not settings["batch_randomization"]}
    assert sorted(batches(plan_batches(lengths, **other))) == sorted(wanted)
    shifted = {**settings, "seed": settings["seed"] + settings["epoch"], "epoch": 0}
    assert batches(plan_batches(lengths, **shifted)) == wanted
    for kind in (np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        if max(lengths) <= np.iinfo(kind).max:
            array = np.array(lengths, kind)
            assert batches(plan_batches(array, **settings)) == wanted, kind
            assert array.tolist() == lengths, "the lengths were changed"


@law
@given(cases(dynamic_batch_size=False, **IN_ORDER))
def test_sorting_from_the_longest_down_turns_the_order_round_and_is_the_default(case):
    lengths, settings = case
    up, down = (
        plan_batches(lengths, **{**settings, "longest_first": down}).order for down in (False, True)
    )
    if settings["strategy"] in ("SB", "SSB"):
        assert down.tolist() == up[::-1].tolist()
    elif settings["strategy"] != "BKT":
        assert down.tolist() == up.tolist()
    del settings["longest_first"]
    assert plan_batches(lengths, **settings).order.tolist() == down.tolist()


@pytest.mark.parametrize("strategy, dbs, br", [*product(STRATEGIES, (False, True), (False, True))])
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
        first, second = ([lengths[batch].max() for batch in plan] for plan in plans)
        assert first != second and sorted(first) not in (first, first[::-1])


# DBS over many clips: blocks of 16,384, sizes counted up to 255


@pytest.mark.parametrize(
    ("low", "high", "capacity"),
    [
        (96, 870, None),  # speech
        *((1, 1, size) for size in (1, 254, 255, 256)),
        (1, 3, 1000),  # sizes above 255
        (1, 300, 3000),  # sizes from 10 to 3000
        (1, 5, 10**6),  # one batch of all
        (60_000, 70_000, 16 * 70_000),  # lengths around 65,535
        (20_000, 220_000, 4_000_000),  # lengths in samples
    ],
)
def test_dbs_takes_all_it_can_at_the_ends_of_blocks(low, high, capacity):
    for n in (1, 255, 256, 16_383, 16_384, 16_385, 32_768, 33_000):
        lengths = np.random.default_rng(n).integers(low, high + 1, n)
        for strategy in ("RAND", "SB"):
            plan = plan_batches(lengths, strategy, capacity=capacity, epoch=n, **IN_ORDER)
            wanted = fill(plan.order, lengths, n, capacity or 16 * int(lengths.max()))
            assert batches(plan) == wanted


def test_one_long_clip_bounds_a_batch_of_hundreds():
    lengths = np.append(30, np.ones(999, int))
    for seed in range(30):
        plan = plan_batches(lengths, "RAND", capacity=9000, seed=seed, **IN_ORDER)
        assert batches(plan) == fill(plan.order, lengths, 1000, 9000)
        for most in (1, 200, 255, 256, 400):
            options = {"capacity": 9000, "max_batch_clips": most, "seed": seed}
            plan = plan_batches(lengths, "RAND", **options, **IN_ORDER)
            assert batches(plan) == fill(plan.order, lengths, most, 9000)


# Each strategy, and where it turns into another


@pytest.mark.parametrize(
    ("span", "lrf"),
    [
        *((span, 0) for span in (0, 700, 4000, 4094, 4095, 5000, 30_000, 60_000, 220_000, 10**9)),
        *product((774, 200_000), (0.05, 0.1, 0.3, 2.0)),  # frames, samples
    ],
)
def test_ssb_noise_is_uniform_and_as_wide_as_the_paper_says_and_that_of_sb_shuffles_ties(span, lrf):
    n, width = 4000, max(lrf * span, 1)
    apart = [int(share * width) for share in (0, 0, 0.25, 0.5, 0.75, 0.99) if share * width <= span]
    others = np.random.default_rng(1).integers(0, span, 30_000, endpoint=True)
    lengths = 7 + np.concatenate([np.repeat(apart, n), others, [0, span]])
    order = plan_batches(
        lengths, "SSB" if lrf else "SB", lrf=lrf, longest_first=False, **IN_ORDER
    ).order
    goes_back = (np.maximum.accumulate(lengths[order]) - lengths[order]).max()
    assert 0.9 * min(lrf, 1) * span <= goes_back <= lrf * span
    for k, d in enumerate(apart[1:], 1):
        is_longer = order[np.isin(order // n, (0, k))] >= n
        swapped = np.cumsum(is_longer)[~is_longer].sum() / n**2
        # Two uniform noises of this width swap lengths d apart with this probability.
        assert swapped == pytest.approx((1 - d / width) ** 2 / 2, abs=0.02)


@pytest.mark.parametrize(
    ("strategy", "setting", "n_buckets"),
    [
        ("SSB", {"lrf": 1000}, 1),
        ("ATS", {"n_bins": 125}, 1),  # one batch per bin
        *(
            ("BKT", {"bucket_edges": edges, "bucket_size": 2000 // n, "n_buckets": n}, n)
            for edges, n in product(("size", "uniform", "quantile"), (1, 4))
        ),
    ],
)
def test_inside_a_bucket_and_at_the_far_end_of_every_setting_clips_are_at_random(
    strategy, setting, n_buckets
):
    """Over 30 epochs: no trend of length; and without more buckets, RAND's ZPR."""
    lengths, settings = corpus(2000), {**IN_ORDER, **FIXED, **setting}
    plans = [plan_batches(lengths, strategy, epoch=e, **settings) for e in range(30)]
    buckets = [buckets_of(lengths, plan, {"strategy": strategy, **settings}) for plan in plans]
    trends = np.array([[correlation(lengths[bucket]) for bucket in epoch] for epoch in buckets])
    assert trends.shape == (30, n_buckets) and np.abs(trends.mean(axis=0)).max() < 0.02
    assert np.abs(trends).max() < 0.1 * n_buckets**0.5
    if n_buckets == 1:
        zpr, zpr_random = (mean_zpr(lengths, s, 30, **settings) for s in (strategy, "RAND"))
        assert zpr == pytest.approx(zpr_random, abs=0.003)


# Clips that are left out, or do not fit


@law
@given(cases(dynamic_batch_size=False))
def test_drop_last_leaves_out_the_batches_that_are_not_full_and_nothing_else(case):
    lengths, settings = case
    whole = batches(plan_batches(lengths, **settings))
    full = [batch for batch in whole if len(batch) == settings["batch_size"]]
    hypothesis.assume(full)
    assert sorted(batches(plan_batches(lengths, drop_last=True, **settings))) == sorted(full)


@law
@given(cases(dynamic_batch_size=True), st.data())
def test_oversize_clips_stand_alone_or_are_dropped_and_the_others_keep_to_the_capacity(case, data):
    lengths, settings = np.array([*case[0], 1, max(case[0]) + 1]), case[1]
    capacity = settings["capacity"] = data.draw(st.integers(1, int(lengths.max()) - 1))
    fitting, too_long = np.flatnonzero(lengths <= capacity), np.flatnonzero(lengths > capacity)
    plans, longest = {}, lengths.argmax()
    for oversize, done in (("alone", "batched alone"), ("drop", "dropped")):
        with pytest.warns(UserWarning) as caught:
            plans[oversize] = plan_batches(lengths, oversize=oversize, **settings)
        message = f"{len(too_long)} clips {done}: clip {longest} has length {lengths[longest]}, "
        message += f"above capacity={capacity}"
        assert [(str(w.message), w.filename) for w in caught] == [(message, __file__)]
        assert plans[oversize].oversize.tolist() == too_long.tolist()

    assert sorted(plans["alone"].order) == list(range(len(lengths)))
    for batch in plans["alone"]:
        fits = len(batch) * lengths[batch].max() <= capacity
        assert fits or (len(batch) == 1 and batch[0] in too_long)
    others = plan_batches(lengths[fitting], **settings)
    assert batches(plans["drop"]) == [fitting[batch].tolist() for batch in others]
    check_statistics(lengths, plans["drop"])


# Refusals


KNOWN = inspect.signature(plan_batches).parameters.keys()
REFUSED = [  # lengths, arguments, and how the message starts
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
    ([4], {"bucket_edges": "log"}, "bucket_edges='log': use one of size, uniform, quantile"),
    ([4], {"oversize": "cut"}, "oversize='cut': use one of error, alone, drop"),
    ([4], {"capacity": 9, **FIXED}, "capacity=9: set dynamic_batch_size=True"),
    ([4], {"max_batch_clips": 2, **FIXED}, "max_batch_clips=2: set dynamic_batch_size=True"),
    ([4], {"max_batch_clips": 0}, "max_batch_clips=0: use a whole number, 1 or more"),
    ([4], {"drop_last": True}, "drop_last=True: set dynamic_batch_size=False"),
    ([4], {"seed": -1}, "seed + epoch=-1: use 0 or more"),
    ([4, 4], {"drop_last": True, **FIXED}, "drop_last=True: no batch has batch_size=16 clips"),
    ([4, 20, 9, 30], {"capacity": 10}, "clip 3 has length 30, above capacity=10 (2 such clips); "),
    ([4, 30], {"capacity": 10}, ".* use a capacity of at least 30, or oversize='alone' or 'drop'"),
    ([20, 30], {"capacity": 10, "oversize": "drop"}, "clip 1 .* use a larger capacity"),
    ([4], {"bucketsize": 1}, "unknown argument 'bucketsize'; did you mean 'bucket_size'?"),
    ([4], {"dynamic": 1}, "unknown argument 'dynamic'; did you mean 'dynamic_batch_size'?"),
    ([4], {"batch_randomisation": 1}, ".* did you mean 'batch_randomization'?"),
    ([4], {"xyz": 1}, "unknown argument 'xyz'; use one of .*strategy, .*, longest_first, lrf, "),
]


@pytest.mark.parametrize(("lengths", "settings", "words"), REFUSED)
def test_impossible_arguments_are_refused_in_one_line(lengths, settings, words):
    error = ValueError if settings.keys() <= KNOWN else TypeError
    words = re.escape(words).replace(r"\.\*", ".*")
    # Whatever the strategy: settings of the others are checked too.
    for function, strategy in product((plan_batches, EpochBatchSampler), ("RAND", "SSB", "BKT")):
        with pytest.raises(error, match=f"^{words}.*$"):
            function(lengths, **{"strategy": strategy, **settings})


# For callers


def test_signatures_show_every_setting_with_its_default():
    of_plan, of_sampler = (
        inspect.signature(function).parameters for function in (plan_batches, EpochBatchSampler)
    )
    assert list(of_sampler)[:2] == ["lengths", "seed"]
    own = {"num_replicas", "rank"}
    assert set(of_sampler) == set(of_plan) - {"epoch"} | own and "settings" not in of_plan
    with pytest.raises(TypeError, match="epoch"):
        EpochBatchSampler([4, 5], epoch=1)
    for name in of_sampler.keys() - own:
        parameter = of_sampler[name]
        assert parameter.replace(kind=of_plan[name].kind) == of_plan[name]
    for name, parameter in batching.STRATEGY_SETTINGS.items():
        assert of_plan[name] == parameter
        assert getattr(HParams(), name) == parameter.default, "hparams.py and batching.py differ"


def test_the_file_works_alone_with_numpy(tmp_path):
    shutil.copy(batching.__file__, tmp_path)
    (tmp_path / "torch.py").write_text("raise ImportError")
    code = "import batching; print(len(batching.EpochBatchSampler([3, 4, 5] * 16)))"
    python = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.check_output(python, cwd=tmp_path, text=True) == "3\n"


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
    ("strategy", "name", "step", "largest"),  # setting, step of the search, largest value
    [("SSB", "lrf", 1 / 1024, 32.0), ("BKT", "bucket_size", 16, 16 * 7), ("ATS", "n_bins", 1, 6)],
)
def test_the_solved_value_is_the_last_within_the_target(strategy, name, step, largest):
    lengths, solve = corpus(800), batching.solve_randomness
    dynamic = {"dynamic_batch_size": True, "batch_size": 8, "seed": 5}
    for target, options in [(0.04, {}), (0.1, {})] + [(0.07, dynamic)] * (strategy == "SSB"):
        value = solve(lengths, strategy, target, **options)
        settings = {**FIXED, **options}
        assert mean_zpr(lengths, strategy, **{name: value}, **settings) <= target
        assert mean_zpr(lengths, strategy, **{name: value + step}, **settings) > target
    assert solve([50] * 100, strategy, 0.0) == largest
    for target in (0.0, 0.9):
        message = rf"^target_zpr={target}: {strategy} gives 0\.\d{{4}} to 0\.\d{{4}} here; use"
        with pytest.raises(ValueError, match=message):
            solve(corpus(300), strategy, target)
    for other in ("RAND", "SB", "none"):
        with pytest.raises(ValueError, match=f"^strategy='{other}' has no .* use one of SSB, BKT"):
            solve(lengths, other, 0.1)


# The sampler


def check_resuming(
    lengths: list[int], settings: dict, share: float, load: Callable = lambda sampler: sampler
) -> None:
    """An epoch that stops after a share of its batches goes on with the next in a new sampler."""
    epoch, settings = settings["epoch"], {k: v for k, v in settings.items() if k != "epoch"}
    whole, following = (
        batches(plan_batches(lengths, epoch=e, **settings)) for e in (epoch, epoch + 1)
    )
    stop = math.ceil(share * len(whole))
    sampler = EpochBatchSampler(lengths, **settings)
    sampler.set_epoch(epoch)
    drawn = [batch for batch, _ in zip(load(sampler), range(stop), strict=False)]
    state = sampler.state_dict(stop)
    assert (state["epoch"], state["batch"]) == (epoch, stop)
    assert list(sampler) == following, "the next iteration is the next epoch"
    sampler.set_epoch(epoch)
    assert list(sampler) == whole, "an epoch that is set starts again"

    resumed = EpochBatchSampler(lengths, **settings)
    resumed.load_state_dict(state)
    resumed.set_epoch(epoch)  # as the training loop does; it stays where it was loaded
    loader = load(resumed)
    assert len(loader) == len(whole) - stop
    assert drawn + list(loader) == whole
    assert resumed.state_dict() == {**state, "batch": len(whole)}
    assert list(loader) == following
    resumed.load_state_dict(state)
    for e, wanted in ((epoch + 1, following), (epoch, whole)):
        resumed.set_epoch(e)
        assert len(loader) == len(wanted) and list(loader) == wanted
    with pytest.raises(ValueError, match=f"^batch=9999: epoch {epoch} has {len(whole)} batches"):
        resumed.start_at(epoch, 9999)
    other = EpochBatchSampler([*lengths, max(lengths)], **settings)
    with pytest.raises(ValueError, match=rf"^the state after batch {stop} of .* of other lengths"):
        other.load_state_dict(state)


@law
@given(cases(), st.floats(0, 1))
def test_the_remainder_of_an_interrupted_epoch_is_identical(case, share):
    check_resuming(*case, share)


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resuming_behind_a_loader_with_workers_which_draw_ahead(strategy, share):
    settings = {"strategy": strategy, "batch_size": 8, "seed": 3, "bucket_size": 40, "n_bins": 4}
    options = {"collate_fn": list, "num_workers": 2, "persistent_workers": True}

    def load(sampler: EpochBatchSampler) -> DataLoader:
        return DataLoader(range(150), batch_sampler=sampler, **options)  # of indices themselves

    check_resuming(corpus(150), {**settings, "epoch": 2}, share, load)


# Pieces of long clips


@law
@given(cases(), st.integers(1, 9), st.integers(0, 5))
def test_pieces_are_equal_and_make_up_the_clips(case, n, more):
    lengths, _ = case
    longest = max(lengths) // n + 1 + more
    pieces = batching.split_long(lengths, longest)
    assert pieces.dtype == np.int64 and (np.diff(pieces[:, 0]) >= 0).all()
    ends = np.flatnonzero(np.diff(pieces[:, 0], append=len(lengths))) + 1
    for clip, own in enumerate(np.split(pieces[:, 1:], ends[:-1])):
        length = lengths[clip]
        assert len(own) == math.ceil(length / longest) and own[0, 0] == 0 and own[-1, 1] == length
        assert (own[1:, 0] == own[:-1, 1]).all()
        sizes = own[:, 1] - own[:, 0]
        assert sizes.max() <= min(sizes.min() + 1, longest)


# Several replicas of a model


@law
@given(cases(), st.integers(1, 9))
def test_replicas_share_an_epoch_in_equally_many_steps(case, n):
    lengths, settings = case
    plan = plan_batches(lengths, **settings)
    steps = deal_batches(lengths, plan, n)
    assert len(steps) == math.ceil(len(plan) / n)
    assert steps.size - len(plan) < n and set(steps.flat) == set(range(len(plan)))
    assert (np.diff(steps[:, 0]) >= 0).all(), "not in the order of the plan"
    if n == 1:
        assert steps[:, 0].tolist() == list(range(len(plan)))
    if len(plan) % n == 0:  # groups of neighbours in length do not overlap
        longest = np.array([max(lengths[i] for i in batch) for batch in plan])[steps]
        lowest, highest = np.sort(longest.min(1)), np.sort(longest.max(1))
        assert (highest[:-1] <= lowest[1:]).all()
    epoch, settings = settings["epoch"], {k: v for k, v in settings.items() if k != "epoch"}
    for rank in range(n):
        sampler = EpochBatchSampler(lengths, num_replicas=n, rank=rank, **settings)
        sampler.set_epoch(epoch)
        assert len(sampler) == len(steps) and sampler.n_repeated == steps.size - len(plan)
        batches = [plan[j].tolist() for j in steps[:, rank]]
        assert list(sampler) == batches
        sampler.start_at(epoch, len(batches) // 2)
        left = batches[len(batches) // 2 :]
        assert len(sampler) == len(left) and list(sampler) == left and len(sampler) == len(left)


def test_with_drop_last_what_is_left_over_is_left_out():
    lengths = corpus(100)
    settings = {"batch_size": 8, "dynamic_batch_size": False, "drop_last": True}
    sampler = EpochBatchSampler(lengths, num_replicas=5, rank=0, **settings)
    assert len(sampler.plan) == 12 and sampler.steps.shape == (2, 5) and sampler.n_repeated == -2
    assert len(set(sampler.steps.flat)) == 10
    with pytest.raises(ValueError, match=r"^num_replicas=13: the plan has 12 batches"):
        len(EpochBatchSampler(lengths, num_replicas=13, rank=0, **settings))
    with pytest.raises(ValueError, match=r"^num_replicas=5, rank=None: give both, or neither"):
        EpochBatchSampler(lengths, num_replicas=5)
    with pytest.raises(ValueError, match=r"^rank=5: use 0 to 4"):
        len(EpochBatchSampler(lengths, num_replicas=5, rank=5))


def test_replicas_are_those_of_the_process_group(monkeypatch):
    sampler, group = EpochBatchSampler(corpus(100), batch_size=8), torch.distributed
    whole = len(sampler)
    for name, value in (("is_initialized", True), ("get_world_size", 4), ("get_rank", 3)):
        monkeypatch.setattr(group, name, lambda value=value: value)
    assert len(sampler) == math.ceil(whole / 4)
    assert list(sampler) == [sampler.plan[j].tolist() for j in sampler.steps[:, 3]]


# From a recipe's settings


def sampler_of(lengths: np.ndarray, hparams: HParams) -> EpochBatchSampler:
    clips = [SimpleNamespace(n_frames=int(length)) for length in lengths]
    return data_utils.training_sampler(clips, hparams)


def test_hparams_pass_to_the_sampler_by_name():
    changes = {
        "seed": 3, "batch_size": 5, "batch_randomization": False, "lrf": 0.7, "bucket_size": 6,
        "bucket_edges": "uniform", "n_buckets": 3, "n_bins": 2,
    }  # fmt: skip
    for strategy, capacity in product(STRATEGIES, (0, 6000)):
        hparams = HParams(batching_strategy=strategy, batch_capacity=capacity, **changes)
        wanted = plan_batches(corpus(100), strategy, capacity=capacity or None, **changes)
        assert batches(sampler_of(corpus(100), hparams).plan) == batches(wanted)


def note(strategy: str, n: int, **settings: object) -> str:
    """The note about ``n`` clips of LJSpeech."""
    hparams = HParams(batching_strategy=strategy, **settings)
    lengths = subset(ljspeech_lengths(hparams.hop_length), n, 0)
    return data_utils.batching_note(sampler_of(lengths, hparams), hparams)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("strategy", "n", "settings", "problem"),
    [
        ("BKT", 10_480, {"batch_size": 4, "bucket_size": 2}, "no batch has more than 2 clips"),
        ("BKT", 300, {}, "all 300 clips are in one bucket, which is RAND"),
        ("ATS", 300, {}, "an epoch has only 19 batches, which makes it RAND, or nearly so"),
    ],
)
def test_a_useless_setting_is_noted_with_a_value_that_pads_like_ssb(
    strategy, n, settings, problem, dynamic
):
    said = note(strategy, n, dynamic_batch_size=dynamic, lrf=0.2, **settings)
    parts = rf"{strategy} with (\w+)=\d+: {problem}.*; \1=(\d+) pads .* as SSB with lrf=0.2"
    name, value = re.fullmatch(parts, said).groups()
    assert ("even with dynamic_batch_size" in said) == (dynamic and "bucket_size" in settings)
    better = {**settings, name: int(value)}
    assert note(strategy, n, **better) == ""

    lengths, fixed = subset(ljspeech_lengths(276), n, 0), {**FIXED, **better}
    ours, ssb, random = (mean_zpr(lengths, s, **fixed, lrf=0.2) for s in (strategy, "SSB", "RAND"))
    assert ours <= ssb < 0.7 * random and ours > 0.3 * ssb


def test_nothing_is_noted_of_settings_that_work(monkeypatch):
    monkeypatch.setattr(data_utils, "solve_randomness", None)  # nor searched for
    assert [note(strategy, 10_480) for strategy in STRATEGIES] == [""] * len(STRATEGIES)
    assert note("SSB", 300, bucket_size=2) == ""
    assert note("BKT", 300, bucket_edges="uniform") == ""
    assert note("BKT", 300, bucket_size=16, dynamic_batch_size=False) == ""
    assert note("ATS", 16) == ""


def test_so_few_clips_that_no_value_pads_like_ssb():
    said = note("ATS", 20, lrf=0.0)
    assert said.endswith("; with so few clips no value pads as little as SSB with lrf=0")


def test_training_says_the_note_once(settings, run, capsys):
    run("run", settings + "batching_strategy=ATS,epochs=1")
    assert capsys.readouterr().out.count("note: ATS with n_bins=58: an epoch has only ") == 1
