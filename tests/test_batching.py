"""The laws of batching.py, over every strategy, fixed and dynamic, in order and randomised."""

import math
import shutil
import subprocess
import sys
from itertools import chain, islice, product
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import batching
import data_utils
from batching import STRATEGIES, EpochBatchSampler, batch_statistics, deal_batches, plan_batches
from hparams import HParams

law = hypothesis.settings(max_examples=300)


@st.composite
def cases(draw: st.DrawFn, **fixed: object) -> tuple[list[int], dict]:
    """Lengths, a share of which are longer than 1, and arguments of plan_batches() that suit."""
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
@given(cases(batch_randomization=False))
def test_batches_have_every_clip_in_order_and_take_all_they_can_inside_a_bucket(case):
    lengths, settings = np.array(case[0]), case[1]
    plan = plan_batches(lengths, **settings)
    order = np.concatenate(plan)
    assert sorted(order.tolist()) == list(range(len(lengths)))

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
def test_another_epoch_has_other_batches_in_another_order(strategy, dbs, br):
    kind = {"strategy": strategy, "dynamic_batch_size": dbs, "batch_randomization": br}
    lengths = corpus(500) // 10  # many ties, which are all that SB shuffles
    plans = [plan_batches(lengths, **kind, bucket_size=50, epoch=e) for e in (3, 4)]
    first, second = ({frozenset(batch) for batch in batches(plan)} for plan in plans)
    assert len(first & second) < len(first) / 2
    if br:
        lengths = np.arange(1, 401)  # no ties: SB's batches are the same in every epoch
        plans = [plan_batches(lengths, **kind, lrf=0, epoch=e) for e in (0, 1)]
        first, second = ([lengths[batch].max() for batch in plan] for plan in plans)
        assert first != second and sorted(first) not in (first, first[::-1])


def test_statistics_are_those_of_the_batches():
    """Of 4 and 2, which are padded to 8, and 3 alone."""
    statistics = batch_statistics([4, 3, 2], [np.array([0, 2]), np.array([1])])
    assert statistics == pytest.approx((2, 2 * (2 / 8) / 3, 2 / 9, (4 + 4 + 3) / 3, 7, 2, 8))


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("lrf", [0.05, 0.3, 1.0])
def test_ssb_noise_is_uniform_and_as_wide_as_the_paper_says(lrf, share):
    """Two noises swap lengths that differ by a share of that width with this probability."""
    n, span = 4000, 200_000
    lengths = 7 + np.concatenate([np.repeat([0, int(share * lrf * span)], n), [0, span]])
    plan = plan_batches(lengths, batch_randomization=False, lrf=lrf, longest_first=False)
    order = np.concatenate(plan)
    is_longer = order[order < 2 * n] >= n
    swapped = np.cumsum(is_longer)[~is_longer].sum() / n**2
    assert swapped == pytest.approx((1 - share) ** 2 / 2, abs=0.02)


# For callers


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        ([4, 0, -3], {}, "clip 2 has length -3: leave it out"),
        ([4, 30, 9], {"capacity": 10}, "capacity=10: clip 1 has length 30; use at least that"),
        ([4], {"strategy": "ssb"}, f"strategy='ssb': use one of {', '.join(STRATEGIES)}"),
        ([4], {"lfr": 0.2}, "lfr: no strategy has such"),
    ],
)
def test_impossible_arguments_are_refused_with_value_and_fix(lengths, settings, message):
    for function in (plan_batches, EpochBatchSampler):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            function(lengths, **settings)


def test_the_file_works_alone_with_numpy(tmp_path):
    shutil.copy(batching.__file__, tmp_path)
    (tmp_path / "torch.py").write_text("raise ImportError")
    code = "import batching; print(len(batching.EpochBatchSampler([3, 4, 5] * 16)))"
    python = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.check_output(python, cwd=tmp_path, text=True) == "3\n"


# The sampler


@law
@given(cases(), st.floats(0, 1))
def test_an_epoch_that_stops_goes_on_with_its_next_batch_in_another_sampler(case, share):
    (lengths, settings), epoch = case, case[1].pop("epoch")
    whole, following = (
        batches(plan_batches(lengths, epoch=e, **settings)) for e in (epoch, epoch + 1)
    )
    stop = math.ceil(share * len(whole))
    sampler, resumed = (EpochBatchSampler(lengths, **settings) for _ in range(2))
    sampler.set_epoch(epoch)
    assert list(islice(sampler, stop + 1)) == whole[: stop + 1]  # drawn ahead, as loaders do
    state = sampler.state_dict(stop)
    sampler.set_epoch(epoch)
    assert list(sampler) == whole, "an epoch that is set starts again"

    resumed.load_state_dict(state)
    resumed.set_epoch(resumed.epoch)  # as a loop may that begins there
    left = whole[stop:] or following  # after the last batch, the next epoch
    assert len(resumed) == len(left) and list(resumed) == left
    if stop < len(whole):
        assert resumed.state_dict() == {**state, "batch": len(whole)}
        assert list(resumed) == following
    resumed.load_state_dict(state)
    resumed.set_epoch(epoch + 1)
    assert len(resumed) == len(following) and list(resumed) == following
    other = EpochBatchSampler([*lengths, max(lengths)], **settings)
    with pytest.raises(ValueError, match=f"^the state after batch {stop} of .* of other lengths"):
        other.load_state_dict(state)
    first = batches(plan_batches(other.lengths, **settings))
    assert list(other) == first, "a refused state changes nothing"


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
    if 2 * (steps.size - len(plan)) <= n:  # groups of neighbours in length do not overlap
        longest = np.array([max(lengths[i] for i in batch) for batch in plan])[steps]
        lowest, highest = np.sort(longest.min(1)), np.sort(longest.max(1))
        assert (highest[:-1] <= lowest[1:]).all()
    epoch = settings.pop("epoch")
    for rank in range(n):
        sampler = EpochBatchSampler(lengths, num_replicas=n, rank=rank, **settings)
        sampler.set_epoch(epoch)
        assert len(sampler) == len(steps) and sampler.n_repeated == steps.size - len(plan)
        assert list(sampler) == [plan[j].tolist() for j in steps[:, rank]]


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


def test_hparams_pass_to_the_sampler_by_name():
    values = {"seed": 3, "batch_size": 5, "batch_randomization": False, "longest_first": False}
    values |= {"lrf": 0.7, "bucket_size": 6, "bucket_edges": "uniform", "n_buckets": 3, "n_bins": 2}
    clips = [SimpleNamespace(n_frames=n) for n in corpus(100).tolist()]
    for strategy, capacity, changes in product(STRATEGIES, (0, 6000), (values, {})):
        hparams = HParams(batching_strategy=strategy, batch_capacity=capacity, **changes)
        wanted = plan_batches(corpus(100), strategy, capacity=capacity or None, **changes)
        assert batches(data_utils.training_sampler(clips, hparams).plan) == batches(wanted)
