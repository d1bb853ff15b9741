"""Efficient batches of clips of different lengths. One file that needs only numpy: copy it.

    plan = plan_batches(lengths, strategy="SSB", dynamic_batch_size=True, epoch=3)
    for indices in plan:                          # one batch: an int64 array of clip indices
        ...
    print(batch_statistics(lengths, plan))        # zero padding, average batch length, ...

With PyTorch, where ``lengths[i]`` is the length of ``dataset[i]`` in any whole unit::

    sampler = EpochBatchSampler(lengths, strategy="SSB", dynamic_batch_size=True)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=...)
    for epoch in range(n_epochs):
        for batch in loader:                      # a new plan in every epoch
            ...

Section numbers are those of Ge et al., "Speed up training with variable length inputs by
efficient batching strategies", Interspeech 2021. Their words: RAND, random; SB, sorted; SSB,
semi-sorted; BKT, bucket; ATS, alternated sorting; DBS, dynamic batch size; BR, batch
randomisation; LRF, local randomisation factor; ZPR, zero-padding rate; ABL, average batch
length; batch capacity, base batch size x longest length.
"""

import difflib
import inspect
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

import numpy as np
from numpy import ndarray
from numpy.random import Generator

# Strategies. Each takes the lengths (unsigned: convert them before you subtract), a random
# generator and its own settings, and returns the order of the clips; BKT also returns where its
# buckets end, since no batch may cross that. check_settings() enforces the settings' types.
# To add a strategy, write a function and list it in STRATEGIES.


def random_order(lengths: ndarray, rng: Generator) -> ndarray:
    """RAND (Sec. 2): all clips in random order."""
    return rng.permutation(len(lengths))


def sorted_order(lengths: ndarray, rng: Generator, *, longest_first: bool = True) -> ndarray:
    """SB (Sec. 2): sort by length, from the longest down as the paper's code does, or from the
    shortest up. Clips of equal length are in random order."""
    return semi_sorted(lengths, rng, lrf=0, longest_first=longest_first)


def semi_sorted(
    lengths: ndarray, rng: Generator, *, lrf: float = 0.1, longest_first: bool = True
) -> ndarray:
    """SSB (Sec. 2, eq. 2-3): sort by length + uniform noise, ``lrf * (max - min length)`` wide.
    ``lrf=0`` is SB; 1000 is as good as RAND."""
    # Lengths are whole numbers, so noise of one unit only shuffles ties, as the paper does before
    # it sorts (Sec. 5), for SB too.
    shortest, span = int(lengths.min()), int(np.ptp(lengths))
    width = max(span * lrf, 1.0)
    levels = int(2**16 // (span + 1 + np.ceil(width)))  # noise levels in one unit of length
    if levels < 64:  # too coarse to order ties at random
        order = np.argsort(lengths + width * rng.random(len(lengths)))
    else:
        # With 16-bit keys numpy's stable sort is a radix sort, several times as fast.
        keys = (lengths - shortest).astype(np.uint16) * np.uint16(levels)
        keys += rng.integers(0, int(width * levels), len(lengths), np.uint16)
        order = np.argsort(keys, kind="stable")
    return order[::-1].copy() if longest_first else order


def buckets(
    lengths: ndarray,
    rng: Generator,
    *,
    bucket_size: int = 1024,
    bucket_edges: Literal["size", "uniform", "quantile"] = "size",
    n_buckets: int = 10,
    longest_first: bool = True,
) -> tuple[ndarray, ndarray]:
    """BKT (Sec. 3): sort as SB does, divide in that order, shuffle inside each bucket.

    Buckets have ``bucket_size`` clips; or there are ``n_buckets``, of "uniform" width or of
    equally many clips ("quantile"; Gonzalez et al. 2023, Sec. 2). One bucket is RAND.
    """
    n = len(lengths)
    order = sorted_order(lengths, rng, longest_first=longest_first)
    # More buckets than clips, or than units of length, would be empty.
    n_buckets = min(n_buckets, n if bucket_edges == "quantile" else int(np.ptp(lengths)) + 1)
    if bucket_edges == "size":
        ends = np.append(np.arange(bucket_size, n, bucket_size), n)
    elif bucket_edges == "quantile":
        ends = np.arange(1, n_buckets + 1) * n // n_buckets
    else:
        limits = np.linspace(lengths.max(), lengths.min(), n_buckets + 1)[1:-1]
        n_shorter = np.searchsorted(np.sort(lengths), limits)
        ends = np.append(n - n_shorter if longest_first else n_shorter[::-1], n)
    ends = np.unique(ends[ends > 0])  # without empty buckets
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        rng.shuffle(order[start:end])
    return order, ends


def alternated(lengths: ndarray, rng: Generator, *, n_bins: int = 58) -> ndarray:
    """ATS (Sec. 3): shuffle, divide into ``n_bins`` equal bins, sort them up and down in turn.
    One bin is SB; one batch per bin is RAND."""
    order = rng.permutation(len(lengths))
    for b, members in enumerate(np.array_split(order, min(n_bins, len(order)))):
        by_length = np.argsort(lengths[members], kind="stable")
        members[:] = members[by_length[::-1] if b % 2 else by_length]
    return order


STRATEGIES = {
    "RAND": random_order,
    "SB": sorted_order,
    "SSB": semi_sorted,
    "BKT": buckets,
    "ATS": alternated,
}
STRATEGY_SETTINGS = {  # of all strategies: name -> inspect.Parameter
    name: parameter
    for strategy in STRATEGIES.values()
    for name, parameter in inspect.signature(strategy).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


# Plans


class BatchPlan(Sequence):
    """The batches of one epoch, in training order.

    Attributes:
        order: int64, (n,): the index of every clip, batch after batch.
        ends: int64, (n_batches,): batch ``j`` is ``order[ends[j - 1]:ends[j]]``.
        oversize: int64: clips longer than the capacity, batched alone or dropped.
    """

    def __init__(self, order: ndarray, ends: ndarray, oversize: Sequence[int] = ()) -> None:
        self.order = np.asarray(order, np.int64)
        self.ends = np.asarray(ends, np.int64)
        self.oversize = np.asarray(oversize, np.int64)

    @property
    def sizes(self) -> ndarray:
        """Number of clips in each batch, int64, (n_batches,)."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, j: int | slice) -> Any:
        j = range(len(self))[j]  # a number or a range, from 0 up; or an IndexError
        if isinstance(j, range):
            return [self[k] for k in j]
        return self.order[self.ends[j - 1] if j else 0 : self.ends[j]]


def plan_batches(
    lengths: Sequence[int] | ndarray,
    strategy: str = "SSB",
    batch_size: int = 16,
    dynamic_batch_size: bool = True,
    batch_randomization: bool = True,
    *,
    capacity: int | None = None,
    max_batch_clips: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    oversize: Literal["error", "alone", "drop"] = "error",
    drop_last: bool = False,
    **settings: Any,
) -> BatchPlan:
    """Plan the batches of one epoch. The same arguments always give the same plan.

    Args:
        lengths: (n,) whole numbers above 0, in any unit (frames, samples, tokens).
        strategy: a name in STRATEGIES: RAND, SB, SSB (Sec. 2), BKT, ATS (Sec. 3).
        batch_size: clips per batch; with DBS the base batch size.
        dynamic_batch_size: DBS (Sec. 4): extend each batch while size x longest length
            stays within ``capacity``.
        batch_randomization: BR (Sec. 5): shuffle the order of the batches.
        capacity: DBS: limit of size x longest length, in the unit of ``lengths``;
            None: ``batch_size`` x the longest length.
        max_batch_clips: DBS: most clips in a batch, whatever the capacity; None: no limit.
        seed, epoch: the random numbers depend on ``seed + epoch``.
        oversize: what to do with clips longer than the capacity: "error"; put each "alone" in
            a batch; or "drop" them. The last two warn, and list them in ``plan.oversize``.
        drop_last: without DBS: leave out batches smaller than ``batch_size``.
        settings: of any strategy; the functions in STRATEGIES explain theirs. Those of other
            strategies are checked and then ignored, so you can pass them all.

    Raises:
        TypeError: an unknown argument; the message suggests the nearest.
        ValueError: an impossible argument, or a clip longer than the capacity.
    """
    lengths = _check_lengths(lengths)
    _check_choice("strategy", strategy, STRATEGIES)
    _check_count("batch_size", batch_size)
    _check_choice("oversize", oversize, ("error", "alone", "drop"))
    _check(seed + epoch >= 0, f"seed + epoch={seed + epoch}: use 0 or more")
    for name, bound in (("capacity", capacity), ("max_batch_clips", max_batch_clips)):
        if bound is not None:
            _check_count(name, bound)
            _check(dynamic_batch_size, f"{name}={bound}: set dynamic_batch_size=True too")
    full_size = not (drop_last and dynamic_batch_size)
    _check(full_size, "drop_last=True: set dynamic_batch_size=False; dynamic ones vary in size")
    check_settings(settings)

    clips, too_long = None, ()  # clips: those to batch; None: all
    if capacity is not None and capacity < lengths.max():
        too_long = np.flatnonzero(lengths > capacity)
        _report_too_long(lengths, too_long, capacity, oversize)
        if oversize == "drop":
            clips = np.flatnonzero(lengths <= capacity)
            lengths = lengths[clips]

    # Not default_rng(seed + epoch): lengths drawn from that would be sorted by their own noise.
    # Any number would do in place of 5, but would give other plans.
    rng = np.random.default_rng((seed + epoch, 5))
    own = {k: v for k, v in settings.items() if k in (STRATEGIES[strategy].__kwdefaults__ or ())}
    order, bucket_ends = STRATEGIES[strategy](lengths, rng, **own), [len(lengths)]
    if isinstance(order, tuple):
        order, bucket_ends = order[0], order[1].tolist()

    bounds = zip([0, *bucket_ends[:-1]], bucket_ends, strict=True)
    if dynamic_batch_size:
        capacity = batch_size * int(lengths.max()) if capacity is None else int(capacity)
        in_order = lengths.take(order)
        most = len(lengths) if max_batch_clips is None else int(max_batch_clips)
        ends = [start + _extend(in_order[start:end], capacity, most) for start, end in bounds]
    else:
        ends = [
            np.append(np.arange(start + batch_size, end, batch_size), end) for start, end in bounds
        ]
    ends = np.concatenate(ends)
    if drop_last:
        sizes = np.diff(ends, prepend=0)
        full = sizes == batch_size
        _check(full.any(), f"drop_last=True: no batch has batch_size={batch_size} clips; lower it")
        order, ends = order[np.repeat(full, sizes)], np.cumsum(sizes[full])
    if batch_randomization:
        order, ends = _shuffle_batches(order, ends, rng)
    return BatchPlan(order if clips is None else clips[order], ends, too_long)


def _show_settings(function: Any, settings: Mapping[str, inspect.Parameter]) -> None:
    """Make help() show ``settings`` in place of ``**settings``."""
    own = dict(inspect.signature(function).parameters)
    del own["settings"]
    others = settings.keys() - own.keys() - {"epoch"}  # set_epoch() gives the sampler its epoch
    shown = [p.replace(kind=p.KEYWORD_ONLY) for name, p in settings.items() if name in others]
    function.__signature__ = inspect.Signature([*own.values(), *shown])


_show_settings(plan_batches, STRATEGY_SETTINGS)


def _extend(lengths: ndarray, capacity: int, max_clips: int) -> ndarray:
    """DBS (Sec. 4): the end of each batch, extended while size x longest <= capacity and the size
    <= max_clips.

    For a batch that starts at a given clip, a greedy loop would find the largest size that
    fits. Here it is found for all clips of a block together: size w fits if the maximum of the
    next w clips is at most capacity // w, and if w fits so does every smaller size, so counting
    the sizes that fit gives the largest. The loop at the end only jumps from batch to batch.
    """
    n, longest = len(lengths), int(lengths.max())
    # most: sizes are counted in bytes; larger batches go on below
    block, most = 16384, min(255, max_clips)
    always = max(1, min(capacity // longest, most))  # this size fits anywhere
    padded = np.full(n + most, longest, lengths.dtype)
    padded[:n] = lengths
    ends, end = [], 0
    for start in range(0, n, block):
        stop = min(start + block, n)
        if end >= stop:
            continue
        running, w = padded[start : stop + always - 1], 1  # maxima of w clips
        while w < always:
            step = min(w, always - w)
            running, w = np.maximum(running[:-step], running[step:]), w + step
        sizes = np.full(stop - start, always, np.uint8)
        for w in range(always + 1, most + 1):
            running = np.maximum(running, padded[start + w - 1 : stop + w - 1])
            fits = running <= min(capacity // w, longest)
            if not fits.any():
                break
            sizes += fits.view(np.uint8)
        sizes = sizes.tobytes()  # indexing bytes is Python's fastest array access
        while end < stop:
            first = end
            end += sizes[first - start]
            if end - first == most:
                tallest = int(lengths[first:end].max())
                while end < n and end - first < max_clips:
                    tallest = max(tallest, int(lengths[end]))
                    if (end + 1 - first) * tallest > capacity:
                        break
                    end += 1
            ends.append(end)
    ends[-1] = n  # the last batch may have counted clips beyond the end
    return np.array(ends)


def _shuffle_batches(order: ndarray, ends: ndarray, rng: Generator) -> tuple[ndarray, ndarray]:
    """BR (Sec. 5): the same batches in a random order."""
    sizes = np.diff(ends, prepend=0)
    shuffled = rng.permutation(len(ends))
    starts, sizes = (ends - sizes)[shuffled], sizes[shuffled]
    ends = np.cumsum(sizes)
    # A clip was one position after the clip before it, except at the start of a batch.
    position = np.ones(len(order), np.int64)
    position[0] = starts[0]
    position[ends[:-1]] = starts[1:] - starts[:-1] - sizes[:-1] + 1
    np.cumsum(position, out=position)
    return order.take(position), ends


def _report_too_long(lengths: ndarray, too_long: ndarray, capacity: int, oversize: str) -> None:
    """Refuse clips longer than the capacity, or warn about them."""
    n, clip = len(too_long), int(too_long[np.argmax(lengths[too_long])])
    what = f"clip {clip} has length {lengths[clip]}, above capacity={capacity}"
    fix = f"use a capacity of at least {lengths[clip]}, or oversize='alone' or 'drop'"
    _check(oversize != "error", f"{what} ({n} such clips); {fix}")
    some_left = oversize == "alone" or n < len(lengths)
    _check(some_left, f"{what}, and so is every other clip; use a larger capacity")
    done = {"alone": "batched alone", "drop": "dropped"}[oversize]
    warnings.warn(f"{n} clips {done}: {what}", stacklevel=3)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check settings of strategies by their types: an int is 1 or more, a float from 0 to 1e6, a
    bool True or False. Raises as :func:`plan_batches`."""
    for name, value in settings.items():
        if name not in STRATEGY_SETTINGS:
            known = list(inspect.signature(plan_batches).parameters)
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(known)}"
            raise TypeError(f"unknown argument '{name}'; {hint}")
        kind = STRATEGY_SETTINGS[name].annotation
        if kind is int:
            _check_count(name, value)
        elif kind is float:
            _check(0 <= value <= 1e6, f"{name}={value}: use 0 to 1e6")
        elif kind is bool:
            _check_choice(name, value, (True, False))
        elif get_origin(kind) is Literal:
            _check_choice(name, value, get_args(kind))


def _check_lengths(lengths: Sequence[int] | ndarray) -> ndarray:
    lengths = np.asarray(lengths)
    _check(lengths.ndim == 1, f"lengths has shape {lengths.shape}: use one length per clip")
    _check(len(lengths) > 0, "lengths is empty: there is nothing to batch")
    _check(
        np.issubdtype(lengths.dtype, np.integer),
        f"lengths has dtype {lengths.dtype}: use whole numbers, such as frames or samples",
    )
    shortest = int(lengths.argmin())
    _check(lengths[shortest] > 0, f"clip {shortest} has length {lengths[shortest]}: leave it out")
    # The smallest type that holds them is several times as fast to gather and compare.
    return lengths.astype(np.min_scalar_type(int(lengths.max())), copy=False)


def _check_count(name: str, value: Any) -> None:
    whole = isinstance(value, (int, np.integer)) and value >= 1
    _check(whole, f"{name}={value}: use a whole number, 1 or more")


def _check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    _check(value in choices, f"{name}={value!r}: use one of {', '.join(map(str, choices))}")


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


class BatchStatistics(NamedTuple):
    """Padding and sizes of a plan, in the unit of ``lengths``; rates are fractions."""

    n_batches: int
    zpr: float  # padding / padded length, each batch weighted by its size (Sec. 4)
    zpr_of_data: float  # padding / data (Gonzalez et al. 2023, eq. 1)
    abl: float  # mean longest length of a batch, weighted by its size (Sec. 4)
    total_length: int  # sum of the longest lengths: steps of a recurrent decoder in an epoch
    max_batch_size: int
    max_padded_length: int  # largest size x longest length: what must fit in memory


def batch_statistics(lengths: Sequence[int] | ndarray, plan: BatchPlan) -> BatchStatistics:
    """Padding, lengths and sizes of a plan; ``lengths`` are those it was made from."""
    in_order = _check_lengths(lengths)[plan.order]
    sizes = plan.sizes
    starts = plan.ends - sizes
    longest = np.maximum.reduceat(in_order, starts).astype(np.int64)
    padded = sizes * longest
    real = np.add.reduceat(in_order, starts, dtype=np.int64)
    return BatchStatistics(
        n_batches=len(plan),
        zpr=float(((1 - real / padded) * sizes).sum() / sizes.sum()),
        zpr_of_data=float(padded.sum() / real.sum() - 1),
        abl=float(padded.sum() / sizes.sum()),
        total_length=int(longest.sum()),
        max_batch_size=int(sizes.max()),
        max_padded_length=int(padded.max()),
    )


def solve_randomness(
    lengths: Sequence[int] | ndarray, strategy: str, target_zpr: float, **settings: Any
) -> float | int:
    """The ``lrf`` of SSB, ``bucket_size`` of BKT or ``n_bins`` of ATS that gives a wanted ZPR.

    This makes strategies comparable, as in the paper's Table 1. It is the largest value whose
    ZPR, averaged over eight epochs, is at most ``target_zpr`` (a fraction). Bucket sizes are
    multiples of the batch size. ``settings`` go to :func:`plan_batches`, but batches are fixed
    unless they say otherwise.

    Raises:
        ValueError: another strategy, or a target that no value reaches.
    """
    lengths = _check_lengths(lengths)
    settings = {"dynamic_batch_size": False, "batch_size": 16, **settings}
    batch_size, n = settings["batch_size"], len(lengths)
    solvable = {  # setting, step of the search, fewest and most steps
        "SSB": ("lrf", 1 / 1024, 0, 2**15),
        "BKT": ("bucket_size", batch_size, 1, -(-n // batch_size)),
        "ATS": ("n_bins", 1, 1, max(n // batch_size, 1)),
    }
    _check(
        strategy in solvable,
        f"strategy={strategy!r} has no setting to solve for; use one of {', '.join(solvable)}",
    )
    name, step, low, high = solvable[strategy]

    def zpr(steps: int) -> float:
        plans = (
            plan_batches(lengths, strategy, epoch=epoch, **{name: steps * step}, **settings)
            for epoch in range(8)
        )
        return sum(batch_statistics(lengths, plan).zpr for plan in plans) / 8

    least, largest = zpr(low), zpr(high)
    _check(
        least <= target_zpr <= largest,
        f"target_zpr={target_zpr}: {strategy} gives {least:.4f} to {largest:.4f} here; use a value "
        "in between",
    )
    if largest == target_zpr:
        return high * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if zpr(middle) <= target_zpr else (low, middle)
    return low * step


def split_long(lengths: Sequence[int] | ndarray, longest: int) -> ndarray:
    """Cut clips that are too long into equal pieces (Gonzalez et al. 2023, Sec. 4).

    Args:
        longest: most that a piece may have, such as the batch capacity.

    Returns:
        All pieces, whole clips too: int64, (n_pieces, 3), clip, start and end of each. Batch the
        pieces' lengths, ``pieces[:, 2] - pieces[:, 1]``.
    """
    lengths = _check_lengths(lengths).astype(np.int64)
    _check_count("longest", longest)
    n_pieces = -(-lengths // longest)
    clips = np.repeat(np.arange(len(lengths)), n_pieces)
    number = np.arange(len(clips)) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)
    starts, ends = (i * lengths[clips] // n_pieces[clips] for i in (number, number + 1))
    return np.stack([clips, starts, ends], 1)


def deal_batches(
    lengths: Sequence[int] | ndarray, plan: BatchPlan, num_replicas: int, drop_last: bool = False
) -> ndarray:
    """Deal the batches of an epoch to the replicas of a model, such as one on each GPU.

    At each step all replicas get batches of nearly the same length, so that none waits long for the
    others. The steps are in the order of the plan. If batches are left over, the shortest ones are
    repeated to make a step of them; with ``drop_last`` they are left out instead.

    Args:
        lengths: those that ``plan`` was made from.

    Returns:
        Numbers of batches, int64, (n_steps, num_replicas).

    Raises:
        ValueError: with ``drop_last``, a plan of fewer batches than replicas.
    """
    _check_count("num_replicas", num_replicas)
    n, starts = len(plan), plan.ends - plan.sizes
    longest = np.maximum.reduceat(_check_lengths(lengths)[plan.order], starts)
    by_length = np.lexsort((plan.sizes, longest))[::-1]
    if drop_last:
        _check(
            n >= num_replicas,
            f"num_replicas={num_replicas}: the plan has {n} batches; use smaller ones",
        )
        by_length = by_length[: n - n % num_replicas]
    else:
        by_length = np.append(by_length, np.resize(by_length[::-1], -n % num_replicas))
    steps = np.sort(by_length.reshape(-1, num_replicas), axis=1)
    return steps[np.argsort(steps[:, 0], kind="stable")]


class EpochBatchSampler:
    """Batches of indices for ``DataLoader(batch_sampler=...)``; a new plan every epoch.

    Without :meth:`set_epoch`, every new iteration is the next epoch. With several replicas of a
    model, each process makes the same plan and takes its own share; see :func:`deal_batches`. So a
    trainer must not deal the batches a second time.

    Args:
        lengths: (n,) whole numbers; ``lengths[i]`` is the length of ``dataset[i]``.
        seed: the plan of epoch ``e`` depends on ``seed + e``.
        num_replicas, rank: how many processes share the batches, and which of them this one is,
            from 0; None: those of PyTorch's process group if it is initialised, else one process.
        settings: the other arguments of :func:`plan_batches`, which explains them.

    Raises:
        TypeError: an unknown argument; the message suggests the nearest.
        ValueError: as :func:`plan_batches`, or a rank that is not one of ``num_replicas``.
    """

    def __init__(
        self,
        lengths: Sequence[int] | ndarray,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        **settings: Any,
    ) -> None:
        self.lengths, self.seed, self.settings = _check_lengths(lengths), seed, settings
        both = (num_replicas is None) == (rank is None)
        _check(both, f"num_replicas={num_replicas}, rank={rank}: give both, or neither")
        self.num_replicas, self.rank = num_replicas, rank
        self.epoch, self._first, self._done, self._begun = -1, 0, 0, False
        self.set_epoch(0)

    _show_settings(__init__, inspect.signature(plan_batches).parameters)

    @property
    def batch_size(self) -> int | None:
        """Clips per batch; None if it varies. Trainers ask for it."""
        plain = inspect.signature(plan_batches).parameters
        dynamic, size = (
            self.settings.get(name, plain[name].default)
            for name in ("dynamic_batch_size", "batch_size")
        )
        return None if dynamic else size

    @property
    def sampler(self) -> "EpochBatchSampler":
        """Itself: where trainers look for ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Plan ``epoch``. It starts at its first batch, or at the batch that was loaded."""
        if epoch != self.epoch:
            self.plan = plan_batches(self.lengths, seed=self.seed, epoch=epoch, **self.settings)
        if epoch != self.epoch or self._begun:
            self.epoch, self._first, self._done, self._begun = epoch, 0, 0, False

    @property
    def steps(self) -> ndarray:
        """The epoch's batches of all replicas, as :func:`deal_batches` deals them."""
        num_replicas, _ = self._replica()
        return deal_batches(self.lengths, self.plan, num_replicas, self.settings.get("drop_last"))

    @property
    def n_repeated(self) -> int:
        """Batches repeated, so that all replicas have equally many; below 0: left out."""
        return self.steps.size - len(self.plan)

    def _replica(self) -> tuple[int, int]:
        """How many processes share the batches, and which this one is. Asked late, because many
        programs make their loaders before they start the process group."""
        num_replicas, rank = self.num_replicas, self.rank
        if num_replicas is None:
            group = sys.modules.get("torch.distributed")  # not imported: no group
            if not (group and group.is_available() and group.is_initialized()):
                return 1, 0
            num_replicas, rank = group.get_world_size(), group.get_rank()
        _check(0 <= rank < num_replicas, f"rank={rank}: use 0 to {num_replicas - 1}")
        return num_replicas, rank

    def __len__(self) -> int:
        """Number of batches of the next iteration, or of the one that has begun; after
        :meth:`start_at`, of what is left of the epoch."""
        return len(self.steps) - self._first

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, which runs at the first batch: DataLoader calls iter() twice an epoch.
        if self._begun:
            self.set_epoch(self.epoch + 1)
        self._begun = True
        plan, mine, (_, rank) = self.plan, self.steps, self._replica()
        for step in range(self._done, len(mine)):
            self._done = step + 1
            yield plan[mine[step, rank]].tolist()

    def start_at(self, epoch: int, batch: int) -> None:
        """Plan ``epoch`` and begin after ``batch`` of its batches, none of which is drawn.

        Raises:
            ValueError: the epoch has fewer batches.
        """
        self.set_epoch(epoch)
        n_batches = len(self.steps)
        _check(0 <= batch <= n_batches, f"batch={batch}: epoch {epoch} has {n_batches} batches")
        self._first, self._done, self._begun = batch, batch, False

    def state_dict(self, batch: int | None = None) -> dict[str, int]:
        """The state after ``batch`` batches of the epoch; None: after those handed out.

        With DataLoader workers, which draw batches ahead of training, the training loop must count
        them (as torchdata's StatefulDataLoader does).
        """
        batch = self._done if batch is None else batch
        return {"epoch": self.epoch, "batch": batch, "checksum": self._checksum()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume after the batches that were done.

        Raises:
            ValueError: the state is of other lengths, settings or replicas.
        """
        self.set_epoch(state["epoch"])
        _check(
            state["checksum"] == self._checksum(),
            f"the state after batch {state['batch']} of epoch {state['epoch']} is of other "
            "lengths, settings or replicas: use the same, or start anew",
        )
        self.start_at(state["epoch"], state["batch"])

    def _checksum(self) -> int:
        """Tells the batches of this epoch from others."""
        parts = self.plan.order, self.plan.ends, self.steps
        return zlib.crc32(b"".join(part.tobytes() for part in parts))
