"""Efficient batching of clips of different lengths: one file, numpy only, copy it as it is.

    plan = plan_batches(lengths, strategy="SSB", dynamic_batch_size=True, epoch=3)
    for indices in plan:                          # int64 arrays: the clips of one batch
        ...
    print(batch_statistics(lengths, plan))        # zero padding, average batch length, ...

In PyTorch, where ``lengths[i]`` is the length of ``dataset[i]`` in any whole unit::

    sampler = EpochBatchSampler(lengths, strategy="SSB", dynamic_batch_size=True)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=...)
    for epoch in range(n_epochs):
        sampler.set_epoch(epoch)                  # a new plan, from seed + epoch
        for batch in loader:
            ...

Section numbers are those of Ge et al., "Speed up training with variable length inputs by
efficient batching strategies", Interspeech 2021. Their words: RAND, random; SB, sorted; SSB,
semi-sorted; BKT, bucket; ATS, alternated sorting; DBS, dynamic batch size; BR, batch
randomisation; LRF, local randomisation factor; ZPR, zero-padding rate; ABL, average batch
length; batch capacity, base batch size x longest length.
"""

import difflib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

STRATEGIES = ("RAND", "SB", "SSB", "BKT", "ATS")


class BatchPlan(Sequence):
    """The batches of one epoch, in the order they are trained on.

    Attributes:
        order: int64, (n,): the index of every clip, batch after batch.
        ends: int64, (n_batches,): batch ``j`` is ``order[ends[j - 1]:ends[j]]``.
        oversize: int64: clips longer than the capacity, which stand alone or were dropped.
    """

    def __init__(self, order: np.ndarray, ends: np.ndarray, oversize: Sequence[int] = ()) -> None:
        self.order = np.asarray(order, np.int64)
        self.ends = np.asarray(ends, np.int64)
        self.oversize = np.asarray(oversize, np.int64)

    @property
    def sizes(self) -> np.ndarray:
        """Number of clips of every batch, int64, (n_batches,)."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, j: int | slice) -> Any:
        if isinstance(j, slice):
            return [self[k] for k in range(*j.indices(len(self)))]
        if not -len(self) <= j < len(self):
            raise IndexError(f"batch {j} of a plan of {len(self)} batches")
        j %= len(self)
        return self.order[self.ends[j - 1] if j else 0 : self.ends[j]]


def plan_batches(
    lengths: Sequence[int] | np.ndarray,
    strategy: str = "SSB",
    batch_size: int = 16,
    dynamic_batch_size: bool = True,
    batch_randomization: bool = True,
    lrf: float = 0.1,
    bucket_size: int = 1024,
    n_bins: int = 58,
    capacity: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    bucket_edges: str = "size",
    n_buckets: int = 10,
    oversize: str = "error",
    drop_last: bool = False,
) -> BatchPlan:
    """Batch one epoch: a pure function of its arguments, random by ``seed + epoch`` alone.

    Args:
        lengths: (n,) whole numbers above 0, in any unit (frames, samples, tokens).
        strategy: RAND, SB, SSB (Sec. 2), BKT or ATS (Sec. 3).
        batch_size: clips per batch; with DBS the base batch size.
        dynamic_batch_size: DBS (Sec. 4): extend every batch while size x longest length
            stays within ``capacity``.
        batch_randomization: BR (Sec. 5): shuffle the order of the batches.
        lrf: SSB: the noise added to the lengths before sorting is uniform and
            ``(max - min) * lrf`` wide. 0 is SB; a large value tends to RAND.
        bucket_size: BKT: clips per bucket, counted from the longest clip down.
        n_bins: ATS: number of equal bins. 1 is SB; one batch per bin is RAND.
        capacity: DBS: bound on size x longest length, in the unit of ``lengths``;
            None: ``batch_size`` x the longest length.
        seed, epoch: a new epoch is a new plan, in contents and order.
        bucket_edges: BKT: "size", or ``n_buckets`` with edges "uniform" in length or at
            every "quantile" (Gonzalez et al. 2023, Sec. 2).
        n_buckets: BKT with uniform or quantile edges.
        oversize: what to do with a clip longer than the capacity: "error", "alone" (in a
            batch of its own) or "drop". Both warn, and name the clips in ``plan.oversize``.
        drop_last: without DBS, leave out batches smaller than ``batch_size``.

    Raises:
        ValueError: an argument is impossible, or a clip is longer than the capacity; one
            line that names the argument or the clip, and the fix.
    """
    lengths = _check_lengths(lengths)
    _check(strategy in STRATEGIES, f"strategy={strategy!r}: use one of {', '.join(STRATEGIES)}")
    counts = {"batch_size": batch_size, "bucket_size": bucket_size, "n_bins": n_bins}
    counts |= {"n_buckets": n_buckets, "capacity": 1 if capacity is None else capacity}
    for name, value in counts.items():
        whole = isinstance(value, (int, np.integer)) and value >= 1
        _check(whole, f"{name}={value}: use a whole number, 1 or more")
    _check(0 <= lrf <= 1e6, f"lrf={lrf}: use 0 to 1e6; 1000 is as good as RAND")
    _check(seed + epoch >= 0, f"seed + epoch={seed + epoch}: use 0 or more")
    _check(
        bucket_edges in ("size", "uniform", "quantile"),
        f"bucket_edges={bucket_edges!r}: use 'size', 'uniform' or 'quantile'",
    )
    _check(
        oversize in ("error", "alone", "drop"), f"oversize={oversize!r}: use error, alone or drop"
    )
    _check(
        capacity is None or dynamic_batch_size,
        f"capacity={capacity}: set dynamic_batch_size=True, which reads it",
    )
    _check(
        not (drop_last and dynamic_batch_size),
        "drop_last=True: set dynamic_batch_size=False; dynamic batches have no full size",
    )

    clips, too_long = None, ()  # clips: those to batch, None being all of them
    if capacity is not None and capacity < lengths.max():
        too_long = np.flatnonzero(lengths > capacity)
        clips = _set_aside(lengths, too_long, capacity, oversize)
        if clips is not None:
            lengths = lengths[clips]

    # A stream of its own: lengths drawn from default_rng(seed) are not sorted by their own noise.
    rng = np.random.default_rng((seed + epoch, len(STRATEGIES)))
    segments = np.array([len(lengths)])  # no batch crosses the end of a segment
    if strategy == "RAND":
        order = rng.permutation(len(lengths))
    elif strategy == "SB":
        order = _semi_sort(lengths, 0, rng)
    elif strategy == "SSB":
        order = _semi_sort(lengths, lrf, rng)
    elif strategy == "BKT":
        order, segments = _buckets(lengths, bucket_edges, bucket_size, n_buckets, rng)
    else:
        order = _alternate(lengths, n_bins, rng)

    if dynamic_batch_size:
        capacity = batch_size * int(lengths.max()) if capacity is None else int(capacity)
        starts = [0, *segments[:-1].tolist()]
        in_order = lengths.take(order)
        ends = [
            start + _extend(in_order[start:end], capacity)
            for start, end in zip(starts, segments.tolist(), strict=True)
        ]
        ends = np.concatenate(ends)
    else:
        order, ends = _cut(order, segments, batch_size, drop_last)
    if batch_randomization:
        order, ends = _shuffle_batches(order, ends, rng)
    return BatchPlan(order if clips is None else clips[order], ends, too_long)


# The strategies: (lengths, parameter, generator) -> the order of the clips


def _semi_sort(lengths: np.ndarray, lrf: float, rng: np.random.Generator) -> np.ndarray:
    """SSB (Sec. 2, eq. 2-3): sort by length + noise; SB is LRF 0; ties fall at random.

    Lengths are whole numbers, so noise up to one unit wide reorders nothing but ties: it
    does there what shuffling the samples first does (Sec. 5), for SB too.
    """
    shortest, span = int(lengths.min()), int(np.ptp(lengths))
    width = max(span * lrf, 1.0)
    levels = int(2**16 // (span + 1 + np.ceil(width)))  # noise levels in one unit of length
    if levels < 64:  # too coarse to order ties at random
        return np.argsort(lengths + width * rng.random(len(lengths)))
    # 16-bit keys: numpy's stable sort is then a radix sort, several times as fast.
    keys = (lengths - shortest).astype(np.uint16) * np.uint16(levels)
    keys += rng.integers(0, int(width * levels), len(lengths), np.uint16)
    return np.argsort(keys, kind="stable")


def _buckets(
    lengths: np.ndarray, edges: str, bucket_size: int, n_buckets: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """BKT (Sec. 3): sort, divide from the longest down, shuffle inside. One bucket is RAND."""
    n = len(lengths)
    order = _semi_sort(lengths, 0, rng)[::-1].copy()
    # More buckets than clips, or than units of length, are no finer.
    n_buckets = min(n_buckets, n if edges == "quantile" else int(np.ptp(lengths)) + 1)
    if edges == "size":
        ends = np.append(np.arange(bucket_size, n, bucket_size), n)
    elif edges == "quantile":
        ends = np.arange(1, n_buckets + 1) * n // n_buckets
    else:
        limits = np.linspace(lengths.max(), lengths.min(), n_buckets + 1)[1:-1]
        ends = np.append(n - np.searchsorted(lengths[order[::-1]], limits), n)
    ends = np.unique(ends[ends > 0])  # buckets without clips go
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        rng.shuffle(order[start:end])
    return order, ends


def _alternate(lengths: np.ndarray, n_bins: int, rng: np.random.Generator) -> np.ndarray:
    """ATS (Sec. 3): shuffle, divide into equal bins, sort up and down by turns. One bin is SB."""
    bins = np.array_split(rng.permutation(len(lengths)), min(n_bins, len(lengths)))
    for b, members in enumerate(bins):
        members[:] = members[np.argsort(lengths[members], kind="stable")]
        if b % 2:
            members[:] = members[::-1].copy()
    return np.concatenate(bins)


# From an order to batches


def _cut(
    order: np.ndarray, segments: np.ndarray, batch_size: int, drop_last: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Batches of ``batch_size``; the last of a segment is smaller, or dropped."""
    starts = [0, *segments[:-1].tolist()]
    ends = np.concatenate(
        [
            np.append(np.arange(start + batch_size, end, batch_size), end)
            for start, end in zip(starts, segments.tolist(), strict=True)
        ]
    )
    if drop_last:
        sizes = np.diff(ends, prepend=0)
        full = sizes == batch_size
        _check(
            full.any(), f"drop_last=True: no batch has batch_size={batch_size} clips; use a smaller"
        )
        order, ends = order[np.repeat(full, sizes)], np.cumsum(sizes[full])
    return order, ends


def _extend(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """DBS (Sec. 4): where each batch ends when it is extended while size x longest <= capacity.

    The greedy cut needs, at the clip where a batch starts, the largest size that fits. That
    is found for all clips of a block at once: a size w fits where the running maximum over w
    clips is at most capacity // w, and sizes that fit are 1, 2, ... without a gap, so
    counting them gives the largest. Then only the batches are walked through one by one.
    """
    n, longest = len(lengths), int(lengths.max())
    block, most = 16384, 255  # most: sizes are counted in bytes; larger batches go on below
    always = max(1, min(capacity // longest, most))  # every such batch fits
    padded = np.full(n + most, longest, lengths.dtype)
    padded[:n] = lengths
    ends, end = [], 0
    for start in range(0, n, block):
        stop = min(start + block, n)
        if end >= stop:
            continue
        running, w = padded[start : stop + always - 1], 1  # maxima over w clips
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
                while end < n:
                    tallest = max(tallest, int(lengths[end]))
                    if (end + 1 - first) * tallest > capacity:
                        break
                    end += 1
            ends.append(end)
    ends[-1] = n  # the last batch may have counted clips beyond the end
    return np.array(ends)


def _shuffle_batches(
    order: np.ndarray, ends: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """BR (Sec. 5): the same batches in a random order."""
    sizes = np.diff(ends, prepend=0)
    shuffled = rng.permutation(len(ends))
    starts, sizes = (ends - sizes)[shuffled], sizes[shuffled]
    ends = np.cumsum(sizes)
    # Where each clip was: one further than the clip before it, but for a jump at every start.
    position = np.ones(len(order), np.int64)
    position[0] = starts[0]
    position[ends[:-1]] = starts[1:] - starts[:-1] - sizes[:-1] + 1
    np.cumsum(position, out=position)
    return order.take(position), ends


def _set_aside(
    lengths: np.ndarray, too_long: np.ndarray, capacity: int, oversize: str
) -> np.ndarray | None:
    """What ``oversize`` says of clips longer than the capacity; returns the clips to batch."""
    clip = int(too_long[np.argmax(lengths[too_long])])
    what = f"clip {clip} has length {lengths[clip]}, above capacity={capacity}"
    if oversize == "error":
        raise ValueError(
            f"{what} ({len(too_long)} such clips); use a capacity of at least {lengths[clip]}, "
            "or oversize='alone' or 'drop'"
        )
    if oversize == "alone":
        warnings.warn(f"{len(too_long)} clips batched alone: {what}", stacklevel=3)
        return None
    _check(len(too_long) < len(lengths), f"{what}, and so is every other; use a larger capacity")
    warnings.warn(f"{len(too_long)} clips dropped: {what}", stacklevel=3)
    return np.flatnonzero(lengths <= capacity)


def _check_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    lengths = np.asarray(lengths)
    _check(lengths.ndim == 1, f"lengths has shape {lengths.shape}: use one length per clip")
    _check(len(lengths) > 0, "lengths is empty: there is nothing to batch")
    _check(
        np.issubdtype(lengths.dtype, np.integer),
        f"lengths has dtype {lengths.dtype}: use whole numbers, such as frames or samples",
    )
    shortest = int(lengths.argmin())
    _check(lengths[shortest] > 0, f"clip {shortest} has length {lengths[shortest]}: leave it out")
    # In the smallest type that holds them, several times as fast to gather and compare.
    return lengths.astype(np.min_scalar_type(int(lengths.max())), copy=False)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


class BatchStatistics(NamedTuple):
    """What a plan costs. Lengths are in the unit of ``lengths``; rates are fractions."""

    n_batches: int
    zpr: float  # padding / padded length, each batch weighted by its size (Sec. 4)
    zpr_of_data: float  # padding / data (Gonzalez et al. 2023, eq. 1)
    abl: float  # mean longest length of a batch, weighted by its size (Sec. 4)
    total_length: int  # sum of the longest lengths: steps of a recurrent decoder in an epoch
    max_batch_size: int
    max_padded_length: int  # largest size x longest length: what memory must hold


def batch_statistics(lengths: Sequence[int] | np.ndarray, plan: BatchPlan) -> BatchStatistics:
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
    lengths: Sequence[int] | np.ndarray, strategy: str, target_zpr: float, **settings: Any
) -> float | int:
    """The parameter of SSB (``lrf``), BKT (``bucket_size``) or ATS (``n_bins``) for a ZPR.

    As in the paper's Table 1, where it makes strategies comparable: the largest value whose
    ZPR, the mean over eight epochs, does not exceed ``target_zpr`` (a fraction). Bucket sizes
    are multiples of the batch size. ``settings`` go to :func:`plan_batches`, where the
    defaults are fixed batches of 16.

    Raises:
        ValueError: another strategy, or a target that no parameter reaches.
    """
    lengths = _check_lengths(lengths)
    settings = {"dynamic_batch_size": False, "batch_size": 16, **settings}
    batch_size, n = settings["batch_size"], len(lengths)
    # One step of the search: 1/1024 of LRF, one batch more per bucket, one bin more.
    name, unit, most = {
        "SSB": ("lrf", 1 / 1024, 2**15),
        "BKT": ("bucket_size", batch_size, -(-n // batch_size)),
        "ATS": ("n_bins", 1, max(n // batch_size, 1)),
    }.get(strategy, ("", 0, 0))
    _check(name != "", f"strategy={strategy!r} has no parameter to solve for; use SSB, BKT or ATS")

    def zpr(steps: int) -> float:
        plans = (
            plan_batches(lengths, strategy, epoch=epoch, **{name: steps * unit}, **settings)
            for epoch in range(8)
        )
        return sum(batch_statistics(lengths, plan).zpr for plan in plans) / 8

    low, high = 0 if strategy == "SSB" else 1, most
    least, largest = zpr(low), zpr(high)
    _check(
        least <= target_zpr <= largest,
        f"target_zpr={target_zpr}: {strategy} gives {least:.4f} to {largest:.4f} here",
    )
    if largest == target_zpr:
        return high * unit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if zpr(middle) <= target_zpr else (low, middle)
    return low * unit


SETTINGS = {  # of EpochBatchSampler
    name: parameter.replace(kind=parameter.KEYWORD_ONLY)
    for name, parameter in inspect.signature(plan_batches).parameters.items()
    if name not in ("lengths", "seed", "epoch")
}


class EpochBatchSampler:
    """Batches of indices for ``DataLoader(batch_sampler=...)``: a new plan every epoch.

    Args:
        lengths: (n,) whole numbers; ``lengths[i]`` is the length of ``dataset[i]``.
        seed: epoch ``e`` is planned from ``seed + e``.
        settings: the other arguments of :func:`plan_batches`, which says what they mean.

    Raises:
        TypeError: another name; it suggests the nearest.
        ValueError: as :func:`plan_batches`, at once.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, seed: int = 0, **settings: Any) -> None:
        for name in settings:
            if name not in SETTINGS:
                near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.5)
                hint = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(SETTINGS)}"
                raise TypeError(f"EpochBatchSampler: unknown argument '{name}'; {hint}")
        self.lengths, self.seed, self.settings = _check_lengths(lengths), seed, settings
        self.epoch, self._start = -1, 0
        self.set_epoch(0)

    # What help() and notebooks show in place of **settings.
    __init__.__signature__ = inspect.Signature(
        [*list(inspect.signature(__init__).parameters.values())[:-1], *SETTINGS.values()]
    )

    def set_epoch(self, epoch: int) -> None:
        """Plan ``epoch``, from its first batch; the epoch that was loaded, from where it was."""
        if epoch != self.epoch:
            self.plan = plan_batches(self.lengths, seed=self.seed, epoch=epoch, **self.settings)
            self.epoch, self._start = epoch, 0

    def __len__(self) -> int:
        """Number of batches of the whole epoch."""
        return len(self.plan)

    def __iter__(self) -> Iterator[list[int]]:
        # At the first batch, not at iter(), which DataLoader calls twice an epoch.
        plan, start, self._start = self.plan, self._start, 0
        for j in range(start, len(plan)):
            yield plan[j].tolist()

    def state_dict(self, batch: int) -> dict[str, int]:
        """Where to go on when ``batch`` batches of the epoch are done.

        The training loop counts them: a DataLoader with workers draws batches ahead of it.
        """
        return {"epoch": self.epoch, "batch": batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with the batches that were left; no batch is drawn to get there."""
        self.set_epoch(state["epoch"])
        _check(
            0 <= state["batch"] <= len(self.plan),
            f"batch {state['batch']} of epoch {state['epoch']}: its plan has {len(self.plan)} "
            "batches, so the state is of other lengths or settings",
        )
        self._start = state["batch"]
