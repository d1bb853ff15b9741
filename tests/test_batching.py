"""The laws of batching.py, over every strategy, fixed and dynamic, in order and randomised."""

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, islice, product
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
from batching import STRATEGIES, EpochBatchSampler, batch_statistics, deal_batches, plan_batches
from hparams import HParams

law = hypothesis.settings(max_examples=300)

IN_ORDER = {"batch_randomization": False}


@st.composite
def cases(draw: st.DrawFn, **fixed: object) -> tuple[list[int], dict]:
    """Lengths, a share of which are longer than 1, and arguments of plan_batches() that suit them;
    ``fixed`` ones are as given."""
    n = draw(st.integers(1, 90) | st.integers(1, 3000))  # 3000: batches of hundreds
    longest = draw(st.sampled_from([1, 3, 40, 900, 220_000]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    is_long = rng.random(n) < draw(st.sampled_from([0.001, 0.01, 0.5, 1.0]))
    lengths = np.where(is_long, rng.integers(1, longest, n, endpoint=True), 1).tolist()
    settings = {
        "strategy": draw(st.sampled_from([*STRATEGIES, "BKT"])),  # of three kinds
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
        largest = draw(st.sampled_from([30 * max(lengths), 20_000 + max(lengths)]))
        settings["capacity"] = draw(st.integers(max(lengths), largest))
    return lengths, settings


def corpus(n: int) -> np.ndarray:
    """Lengths in frames, more of them long than short, as in read speech."""
    return np.random.default_rng([0, 1]).triangular(96, 870, 870, n).astype(int)


def batches(plan: list[np.ndarray]) -> list[list[int]]:
    return [batch.tolist() for batch in plan]


def bucket_of(lengths: np.ndarray, order: np.ndarray, settings: dict) -> np.ndarray:
    """The bucket in which BKT shuffles each clip of ``order``; other strategies have one."""
    rank, n_buckets = np.arange(len(order)), settings["n_buckets"]
    if settings["strategy"] != "BKT":
        return 0 * rank
    if settings["bucket_edges"] == "size":
        return rank // settings["bucket_size"]
    if settings["bucket_edges"] == "quantile":
        return rank * n_buckets // len(order)
    return (lengths[order] - lengths.min()) * n_buckets // (np.ptp(lengths) + 1)


# Every plan


@law
@given(cases(**IN_ORDER))
def test_batches_have_every_clip_in_order_and_take_all_they_can_inside_a_bucket(case):
    lengths, settings = np.array(case[0]), case[1]
    plan = plan_batches(lengths, **settings)
    order = np.concatenate(plan)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert all(torch.from_numpy(batch).dtype == torch.int64 for batch in plan)

    strategy, in_order = settings["strategy"], lengths[order]
    down, bucket = settings["longest_first"], bucket_of(lengths, order, settings)
    if strategy == "SB" or (strategy == "SSB" and settings["lrf"] == 0):
        assert in_order.tolist() == sorted(lengths, reverse=down)
    elif strategy == "BKT":
        starts = np.flatnonzero(np.diff(bucket)) + 1
        by_bucket = [sorted(clips, reverse=down) for clips in np.split(in_order, starts)]
        assert list(chain(*by_bucket)) == sorted(lengths, reverse=down)
    elif strategy == "ATS":  # up and down in turn
        for b, in_bin in enumerate(np.array_split(in_order, settings["n_bins"])):
            assert in_bin.tolist() == sorted(in_bin, reverse=b % 2 == 1)

    def fits(clips: np.ndarray) -> bool:
        if not settings["dynamic_batch_size"]:
            return len(clips) <= settings["batch_size"]
        capacity = settings.get("capacity", settings["batch_size"] * max(lengths))
        return len(clips) * max(lengths[clips]) <= capacity

    end = 0
    for batch in plan:
        start, end = end, end + len(batch)
        assert fits(batch) and len(set(bucket[start:end])) == 1
        ends_bucket = end == len(order) or bucket[end] != bucket[end - 1]
        assert ends_bucket or not fits(order[start : end + 1])


@law
@given(cases())
def test_a_plan_depends_on_seed_plus_epoch_and_br_only_permutes_its_batches(case):
    lengths, settings = case
    wanted = batches(plan_batches(lengths, **settings))
    other = {**settings, "batch_randomization": not settings["batch_randomization"]}
    assert sorted(batches(plan_batches(lengths, **other))) == sorted(wanted)
    shifted = {**settings, "seed": settings["seed"] + settings["epoch"], "epoch": 0}
    assert batches(plan_batches(lengths, **shifted)) == wanted
    for kind in (np.uint8, np.int16, np.uint32, np.uint64):
        if max(lengths) <= np.iinfo(kind).max:
            array = np.array(lengths, kind)
            assert batches(plan_batches(array, **settings)) == wanted, kind
            assert array.tolist() == lengths, "the lengths were changed"


@pytest.mark.parametrize("strategy, dbs, br", [*product(STRATEGIES, (False, True), (False, True))])
def test_another_seed_or_epoch_has_other_batches_in_another_order(strategy, dbs, br):
    kind = {"strategy": strategy, "dynamic_batch_size": dbs, "batch_randomization": br}
    lengths = corpus(500) // 10  # many ties, which are all that SB shuffles
    for step in ("seed", "epoch"):
        plans = [plan_batches(lengths, **kind, bucket_size=50, **{step: s}) for s in (3, 4)]
        first, second = ({frozenset(batch) for batch in batches(plan)} for plan in plans)
        assert len(first & second) < len(first) / 2
        assert batches(plans[0]) != batches(plans[1])
    if br:
        lengths = np.arange(1, 401)  # no ties: SB's batches are the same in every epoch
        plans = [plan_batches(lengths, **kind, lrf=0, epoch=e) for e in (0, 1)]
        first, second = ([lengths[batch].max() for batch in plan] for plan in plans)
        assert first != second and sorted(first) not in (first, first[::-1])


def test_statistics_are_those_of_the_batches():
    """Of 4 and 2, which are padded to 8, and 3 alone."""
    statistics = batch_statistics([4, 3, 2], [np.array([0, 2]), np.array([1])])
    assert statistics == pytest.approx((2, 2 * (2 / 8) / 3, 2 / 9, (4 + 4 + 3) / 3, 7, 2, 8))


# Each strategy, and where it turns into another


@pytest.mark.parametrize(
    ("span", "lrf"),
    [
        *((span, 0) for span in (0, 700, 220_000, 10**9)),
        *product((774, 200_000), (0.0005, 0.05, 0.1, 0.3, 2.0)),  # frames, samples
    ],
)
def test_ssb_noise_is_uniform_and_as_wide_as_the_paper_says_and_that_of_sb_shuffles_ties(span, lrf):
    n, width = 4000, max(lrf * span, 1)
    apart = [int(share * width) for share in (0, 0, 0.25, 0.5, 0.75, 0.99) if share * width <= span]
    others = np.random.default_rng(1).integers(0, span, 30_000, endpoint=True)
    lengths = 7 + np.concatenate([np.repeat(apart, n), others, [0, span]])
    settings = {"lrf": lrf, "longest_first": False, **IN_ORDER}
    order = np.concatenate(plan_batches(lengths, "SSB" if lrf else "SB", **settings))
    goes_back = (np.maximum.accumulate(lengths[order]) - lengths[order]).max()
    assert 0.9 * min(lrf, 1) * span - 1 <= goes_back <= lrf * span
    for k, d in enumerate(apart[1:], 1):
        is_longer = order[np.isin(order // n, (0, k))] >= n
        swapped = np.cumsum(is_longer)[~is_longer].sum() / n**2
        # Two uniform noises of this width swap lengths d apart with this probability.
        assert swapped == pytest.approx((1 - d / width) ** 2 / 2, abs=0.02)


def test_lengths_drawn_from_the_plans_seed_are_not_sorted_by_their_own_noise():
    lengths = (1 + 1000 * np.random.default_rng(0).random(1000)).astype(int)
    order = np.concatenate(plan_batches(lengths, "SSB", lrf=1000, seed=0, **IN_ORDER))
    trend = np.corrcoef(lengths[order], np.arange(1000))[0, 1]
    assert abs(trend) < 5 / 1000**0.5  # five standard errors


# For callers


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        ([4, 0, -3], {}, "clip 2 has length -3: leave it out"),
        ([4, 30, 9], {"capacity": 10}, "capacity=10: clip 1 has length 30; use at least that"),
        ([4], {"strategy": "ssb"}, f"strategy='ssb': use one of {', '.join(STRATEGIES)}"),
        ([4], {"lrf": np.nan}, "lrf=nan: use 0 to 1e6"),
        ([4], {"lfr": 0.2}, "lfr: no strategy has such"),
    ],
)
def test_impossible_arguments_are_refused_with_value_and_fix(lengths, settings, message):
    for function in (plan_batches, EpochBatchSampler):
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
            function(lengths, **settings)


def test_settings_of_other_strategies_are_ignored():
    lengths = corpus(100)
    impossible = {"lrf": -1, "bucket_size": 0, "n_buckets": 0, "n_bins": 0}
    for name, strategy in STRATEGIES.items():
        mine = {setting: getattr(HParams, setting) for setting in strategy.settings}
        plan = plan_batches(lengths, name, **(impossible | mine))
        assert batches(plan) == batches(plan_batches(lengths, name))


def test_the_file_works_alone_with_numpy(tmp_path):
    shutil.copy(batching.__file__, tmp_path)
    (tmp_path / "torch.py").write_text("raise ImportError")
    code = "import batching; print(len(batching.EpochBatchSampler([3, 4, 5] * 16)))"
    python = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.check_output(python, cwd=tmp_path, text=True) == "3\n"


# The sampler


def check_resuming(
    lengths: list[int], settings: dict, share: float, load: Callable = lambda sampler: sampler
) -> None:
    """An epoch that stops after a share of its batches goes on with the next in a new sampler."""
    epoch = settings.pop("epoch")
    whole, following = (
        batches(plan_batches(lengths, epoch=e, **settings)) for e in (epoch, epoch + 1)
    )
    stop = math.ceil(share * len(whole))
    sampler, resumed = (EpochBatchSampler(lengths, **settings) for _ in range(2))
    sampler.set_epoch(epoch)
    assert list(islice(load(sampler), stop)) == whole[:stop]
    state = sampler.state_dict(stop)
    assert (state["epoch"], state["batch"]) == (epoch, stop)
    if load(sampler) is sampler:  # else workers draw ahead
        assert len(sampler) == len(whole)
        assert list(sampler) == (following if stop else whole), "the next iteration"
    sampler.set_epoch(epoch)
    assert list(sampler) == whole, "an epoch that is set starts again"

    resumed.load_state_dict(state)
    loader, left = load(resumed), whole[stop:] or following  # after the last batch, the next epoch
    resumed.set_epoch(resumed.epoch)  # as a loop may that begins there
    assert resumed.epoch == (epoch + 1 if stop == len(whole) else epoch)
    assert len(loader) == len(left) and list(loader) == left
    if stop < len(whole):
        assert resumed.state_dict() == {**state, "batch": len(whole)}
        assert len(loader) == len(left) and list(loader) == following
        assert len(loader) == len(following)
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


def test_a_loader_whose_workers_draw_ahead_is_resumed_too():
    settings = {"strategy": "SSB", "batch_size": 8, "seed": 3, "epoch": 2}
    options = {"collate_fn": list, "num_workers": 2, "persistent_workers": True}

    def load(sampler: EpochBatchSampler) -> DataLoader:
        return DataLoader(range(150), batch_sampler=sampler, **options)  # of indices themselves

    check_resuming(corpus(150), settings, 0.5, load)


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
    assert n > 1 or steps[:, 0].tolist() == list(range(len(plan)))
    if 2 * (steps.size - len(plan)) <= n:  # groups of neighbours in length do not overlap
        longest = np.array([max(lengths[i] for i in batch) for batch in plan])[steps]
        lowest, highest = np.sort(longest.min(1)), np.sort(longest.max(1))
        assert (highest[:-1] <= lowest[1:]).all()
    epoch = settings.pop("epoch")
    for rank in range(n):
        sampler = EpochBatchSampler(lengths, num_replicas=n, rank=rank, **settings)
        sampler.set_epoch(epoch)
        assert len(sampler) == len(steps) and sampler.n_repeated == steps.size - len(plan)
        batches = [plan[j].tolist() for j in steps[:, rank]]
        assert list(sampler) == batches
        sampler.start_at(epoch, len(batches) // 2)
        left = batches[len(batches) // 2 :]
        assert len(sampler) == len(left) and list(sampler) == left
        assert len(list(sampler)) == len(sampler), "of the next epoch, once it has begun"


@pytest.mark.parametrize("workers", range(4))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_last_batch_of_every_epoch_is_that_of_the_loaders_length(strategy, workers):
    """This is how loops find it. Before the first batch after set_epoch, it is the coming one."""
    lengths, counts = corpus(90), set()
    for sets_epoch in (False, True):
        sampler = EpochBatchSampler(lengths, batch_size=4, strategy=strategy)
        loader = DataLoader(range(90), batch_sampler=sampler, num_workers=workers)
        for epoch in range(2):
            if sets_epoch:
                sampler.set_epoch(epoch)
            before = len(loader)
            last = [i for i, _ in enumerate(loader) if i == len(loader) - 1]
            assert len(last) == 1 and last[0] + 1 == len(loader) == len(sampler.plan)
            assert before == len(loader) or (epoch and not sets_epoch)
            counts.add(len(loader))
    assert len(counts) > 1 or strategy == "SB", "epochs of one length would hide another's"


def test_replicas_are_those_of_the_process_group(monkeypatch):
    sampler, group = EpochBatchSampler(corpus(100), batch_size=8), torch.distributed
    whole = len(sampler)
    for name, value in (("is_initialized", True), ("get_world_size", 4), ("get_rank", 3)):
        monkeypatch.setattr(group, name, lambda value=value: value)
    assert len(sampler) == math.ceil(whole / 4)
    assert list(sampler) == [sampler.plan[j].tolist() for j in sampler.steps[:, 3]]


# From a recipe's settings


def test_hparams_pass_to_the_sampler_by_name():
    values = {"seed": 3, "batch_size": 5, "batch_randomization": False, "longest_first": False}
    values |= {"lrf": 0.7, "bucket_size": 6, "bucket_edges": "uniform", "n_buckets": 3, "n_bins": 2}
    clips = [SimpleNamespace(n_frames=n) for n in corpus(100).tolist()]
    for strategy, capacity, changes in product(STRATEGIES, (0, 6000), (values, {})):
        hparams = HParams(batching_strategy=strategy, batch_capacity=capacity, **changes)
        wanted = plan_batches(corpus(100), strategy, capacity=capacity or None, **changes)
        assert batches(data_utils.training_sampler(clips, hparams).plan) == batches(wanted)
