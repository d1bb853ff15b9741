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
efficient batching strategies", Interspeech 2021. Their terms: RAND, random; SB, sorted; SSB,
semi-sorted; BKT, bucket; ATS, alternated sorting; DBS, dynamic batch size; BR, batch
randomisation; LRF, local randomisation factor; ZPR, zero-padding rate; ABL, average batch
length; batch capacity, base batch size x longest length.
"""

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray
from numpy.random import Generator

# Strategies. Each returns the clips in an order, in one array or in several; no batch has clips of
# two arrays. To add a strategy, write a function and give it a row in STRATEGIES.


def random_order(lengths: ndarray, rng: Generator) -> list[ndarray]:
    """RAND (Sec. 2): puts all clips in random order."""
    return [rng.permutation(len(lengths))]


def sorted_order(lengths: ndarray, rng: Generator, longest_first: bool = True) -> list[ndarray]:
    """SB (Sec. 2): sorts by length, from the longest down as the paper's code does, or from the
    shortest up. Clips of equal length are in random order (Sec. 5)."""
    return semi_sorted(lengths, rng, 0, longest_first)


def semi_sorted(
    lengths: ndarray, rng: Generator, lrf: float = 0.1, longest_first: bool = True
) -> list[ndarray]:
    """SSB (Sec. 2, eq. 2-3): sorts by length + uniform noise, ``lrf * (max - min length)`` wide.
    ``lrf=0`` is SB; with 1000 it is practically RAND."""
    if not 0 <= lrf <= 1e6:
        raise ValueError(f"lrf={lrf}: use 0 to 1e6")
    noise = rng.random(len(lengths))
    noisy_lengths = lengths + lrf * np.ptp(lengths) * noise
    order = np.lexsort((noise, noisy_lengths))  # by noisy length, and ties by the noise alone
    return [order[::-1].copy() if longest_first else order]


def buckets(
    lengths: ndarray,
    rng: Generator,
    bucket_size: int = 1024,
    bucket_edges: str = "size",
    n_buckets: int = 10,
    longest_first: bool = True,
) -> list[ndarray]:
    """BKT (Sec. 3): sorts as SB does, divides into buckets in that order, shuffles each bucket.

    Buckets have ``bucket_size`` clips; or there are ``n_buckets``, of "uniform" width or of
    equally many clips ("quantile"; Gonzalez et al. 2023, Sec. 2). One bucket is RAND.
    """
    _check_count("bucket_size", bucket_size)
    _check_count("n_buckets", n_buckets)
    (order,), rank = sorted_order(lengths, rng, longest_first), np.arange(len(lengths))
    if bucket_edges == "size":
        bucket = rank // bucket_size
    elif bucket_edges == "quantile":
        bucket = rank * n_buckets // len(lengths)
    elif bucket_edges == "uniform":
        bucket = (lengths[order] - lengths.min()) * n_buckets // (np.ptp(lengths) + 1)
    else:
        raise ValueError(f"bucket_edges={bucket_edges!r}: use size, uniform or quantile")
    ends = np.flatnonzero(np.diff(bucket)) + 1
    return [rng.permutation(clips) for clips in np.split(order, ends)]


def alternated(lengths: ndarray, rng: Generator, n_bins: int = 58) -> list[ndarray]:
    """ATS (Sec. 3): shuffles, divides into ``n_bins`` equal bins, sorts them up and down in turn.
    One bin is SB; one batch per bin is RAND."""
    _check_count("n_bins", n_bins)
    bins = np.array_split(rng.permutation(len(lengths)), min(n_bins, len(lengths)))
    for b, clips in enumerate(bins):
        by_length = np.argsort(lengths[clips], kind="stable")
        bins[b] = clips[by_length[::-1] if b % 2 else by_length]
    return [np.concatenate(bins)]


class Strategy(NamedTuple):
    order: Callable[..., list[ndarray]]  # from lengths (n,), a random generator and the settings
    settings: tuple[str, ...] = ()  # names of the settings that it reads


STRATEGIES = {
    "RAND": Strategy(random_order),
    "SB": Strategy(sorted_order, ("longest_first",)),
    "SSB": Strategy(semi_sorted, ("lrf", "longest_first")),
    "BKT": Strategy(buckets, ("bucket_size", "bucket_edges", "n_buckets", "longest_first")),
    "ATS": Strategy(alternated, ("n_bins",)),
}


class Batching(NamedTuple):
    """A strategy, with or without DBS and BR; str() writes its name, such as SSB-DBS-BR."""

    batching_strategy: str
    dynamic_batch_size: bool = False
    batch_randomization: bool = False

    def __str__(self) -> str:
        strategy, dynamic, shuffled = self
        shuffled = shuffled and strategy != "RAND"  # which is random already
        return strategy + "-DBS" * dynamic + "-BR" * shuffled


def read_batching(name: str) -> Batching:
    """Returns the batching of this name: that of a strategy, which may have hyphens, or with -DBS,
    -BR or -DBS-BR after it. Raises ValueError if there is none."""
    for strategy, dynamic, shuffled in product(STRATEGIES, (False, True), (False, True)):
        batching = Batching(strategy, dynamic, shuffled)
        if str(batching) == name:
            return batching
    strategies = ", ".join(STRATEGIES)
    raise ValueError(
        f"batching={name}: use one of {strategies}; all but RAND may have -BR, -DBS or -DBS-BR "
        "after it, and RAND -DBS"
    )


# From an order to batches


def fixed_batches(order: ndarray, batch_size: int) -> list[ndarray]:
    """Cuts batches of ``batch_size`` clips; the last one may have fewer."""
    return np.split(order, range(batch_size, len(order), batch_size))


def dynamic_batches(order: ndarray, lengths: ndarray, capacity: int) -> list[ndarray]:
    """DBS (Sec. 4): extends each batch while its size x longest length <= ``capacity``."""
    starts, size, longest = [], 0, 0
    for i, length in enumerate(lengths[order].tolist()):
        size, longest = size + 1, max(longest, length)
        if size * longest > capacity:
            starts.append(i)
            size, longest = 1, length
    return np.split(order, starts)


def plan_batches(
    lengths: Sequence[int] | ndarray,
    strategy: str = "SSB",
    batch_size: int = 16,
    dynamic_batch_size: bool = True,
    batch_randomization: bool = True,
    *,
    capacity: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    **settings: Any,
) -> list[ndarray]:
    """Plans the batches of one epoch. The same arguments always give the same plan.

    Args:
        lengths: (n,) whole numbers above 0, in any unit (frames, samples, tokens).
        strategy: a name in ``STRATEGIES``: RAND, SB, SSB (Sec. 2), BKT or ATS (Sec. 3).
        batch_size: clips per batch; with DBS the base batch size.
        dynamic_batch_size: DBS (Sec. 4): extend each batch while size x longest length
            stays within ``capacity``.
        batch_randomization: BR (Sec. 5): shuffle the order of the batches.
        capacity: DBS: limit of size x longest length, in the unit of ``lengths``;
            None: ``batch_size`` x the longest length.
        seed, epoch: the random numbers depend on ``seed + epoch``.
        settings: arguments of the strategies' functions, which explain them: ``lrf`` of SSB, say.
            Those that the strategy does not read are ignored.

    Returns:
        Batches in training order, each int64, (size,): indices of clips.

    Raises:
        TypeError: a setting that no strategy has.
        ValueError: an impossible argument, or a clip longer than the capacity.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: use one of {', '.join(STRATEGIES)}")
    for name in settings:
        if not any(name in known.settings for known in STRATEGIES.values()):
            raise TypeError(f"{name}: no strategy has such a setting")
    _check_count("batch_size", batch_size)
    lengths = _as_lengths(lengths)
    longest = int(lengths.max())
    if capacity is None:
        capacity = batch_size * longest
    elif not dynamic_batch_size:
        raise ValueError(f"capacity={capacity}: set dynamic_batch_size=True, which reads it")
    elif not capacity >= longest:  # also nan
        raise ValueError(
            f"capacity={capacity}: clip {lengths.argmax()} has length {longest}; use at least that "
            "capacity, or leave out longer clips"
        )
    if seed + epoch < 0:
        raise ValueError(f"seed + epoch={seed + epoch}: use 0 or more")

    # Not default_rng(seed + epoch): lengths drawn from that would be sorted by their own noise.
    # Any number would do in place of 5, but would give other plans.
    rng = np.random.default_rng((seed + epoch, 5))
    order, names = STRATEGIES[strategy]
    read = {name: settings[name] for name in names if name in settings}
    plan = []
    for clips in order(lengths, rng, **read):
        if dynamic_batch_size:
            plan += dynamic_batches(clips, lengths, capacity)
        else:
            plan += fixed_batches(clips, batch_size)
    if batch_randomization:
        plan = [plan[j] for j in rng.permutation(len(plan))]
    return plan


def _as_lengths(lengths: Sequence[int] | ndarray) -> ndarray:
    """Returns ``lengths`` as int64, checked."""
    lengths = np.asarray(lengths)
    if lengths.ndim != 1:
        raise ValueError(f"lengths has shape {lengths.shape}: use one length per clip")
    if len(lengths) == 0:
        raise ValueError("lengths is empty: there is nothing to batch")
    if not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"lengths has dtype {lengths.dtype}: use whole numbers, such as frames")
    shortest = int(lengths.argmin())
    if lengths[shortest] < 1:
        raise ValueError(f"clip {shortest} has length {lengths[shortest]}: leave it out")
    return lengths.astype(np.int64, copy=False)


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value}: use a whole number, 1 or more")


# What a plan is like


class BatchStatistics(NamedTuple):
    """Padding and sizes of a plan, in the unit of ``lengths``; rates are fractions."""

    n_batches: int
    zpr: float  # padding / padded length, each batch weighted by its size (Sec. 4)
    zpr_of_data: float  # padding / data (Gonzalez et al. 2023, eq. 1)
    abl: float  # mean longest length of a batch, weighted by its size (Sec. 4)
    total_length: int  # sum of the longest lengths: steps of a recurrent decoder in an epoch
    max_batch_size: int
    max_padded_length: int  # largest size x longest length: what must fit in memory


def batch_statistics(lengths: Sequence[int] | ndarray, plan: Sequence[ndarray]) -> BatchStatistics:
    """Measures padding, lengths and sizes of a plan; ``lengths`` are those it was made from."""
    lengths = _as_lengths(lengths)
    sizes = np.array([len(batch) for batch in plan])
    longest = np.array([lengths[batch].max() for batch in plan])
    real = np.array([lengths[batch].sum() for batch in plan])
    padded = sizes * longest
    return BatchStatistics(
        n_batches=len(plan),
        zpr=float(np.average(1 - real / padded, weights=sizes)),
        zpr_of_data=float(padded.sum() / real.sum() - 1),
        abl=float(np.average(longest, weights=sizes)),
        total_length=int(longest.sum()),
        max_batch_size=int(sizes.max()),
        max_padded_length=int(padded.max()),
    )


# The sampler


def deal_batches(
    lengths: Sequence[int] | ndarray, plan: Sequence[ndarray], num_replicas: int
) -> ndarray:
    """Deals the batches of an epoch to the replicas of a model, such as one on each GPU.

    At each step all replicas get batches of nearly the same length, so that none waits long for the
    others. The steps are in the order of the plan. If batches are left over, the shortest ones are
    repeated to make a step of them.

    Args:
        lengths: those that ``plan`` was made from.

    Returns:
        Indices of batches in ``plan``, int64, (n_steps, num_replicas).
    """
    lengths = _as_lengths(lengths)
    sizes = [len(batch) for batch in plan]
    longest = [lengths[batch].max() for batch in plan]
    shortest_first = np.lexsort((sizes, longest))
    repeated = np.resize(shortest_first, -len(plan) % num_replicas)
    dealt = np.append(shortest_first[::-1], repeated).reshape(-1, num_replicas)
    steps = np.sort(dealt, axis=1)
    return steps[np.argsort(steps[:, 0], kind="stable")]


class _Position(NamedTuple):
    """Where a sampler is."""

    epoch: int
    first: int = 0  # batch of the epoch that the iteration begins with
    n_drawn: int = 0  # batches of the epoch up to the last one drawn
    begun: bool = False  # whether an iteration has begun


class EpochBatchSampler:
    """Batches of indices for ``DataLoader(batch_sampler=...)``; a new plan every epoch.

    Without :meth:`set_epoch`, every new iteration is the next epoch. A state that was saved after
    the last batch of an epoch continues with the next one: after :meth:`load_state_dict`, a loop
    with or without :meth:`set_epoch` begins at ``epoch``.

    With several replicas of a model, each process makes the same plan and takes its own share; see
    :func:`deal_batches`. So a trainer must not deal the batches a second time.

    Args:
        lengths: (n,) whole numbers; ``lengths[i]`` is the length of ``dataset[i]``.
        seed: the plan of epoch ``e`` depends on ``seed + e``.
        num_replicas, rank: how many processes share the batches, and which of them this one is,
            from 0; None: those of PyTorch's process group if it is initialised, else one process.
        settings: the other arguments of :func:`plan_batches`, which explains them.

    Attributes:
        plan: the batches of the epoch, of all replicas, as from :func:`plan_batches`.
        batch_size: clips per batch; None if it varies. Trainers ask for it.

    Raises:
        TypeError: an unknown setting.
        ValueError: as :func:`plan_batches`, or a rank that is not one of ``num_replicas``.
    """

    def __init__(
        self,
        lengths: Sequence[int] | ndarray,
        *,
        batch_size: int = 16,
        dynamic_batch_size: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        **settings: Any,
    ) -> None:
        if (num_replicas is None) != (rank is None):
            raise ValueError(f"num_replicas={num_replicas}, rank={rank}: give both, or neither")
        self.num_replicas, self.rank = num_replicas, rank
        self.lengths, self.seed = _as_lengths(lengths), seed
        self.settings = {
            "batch_size": batch_size,
            "dynamic_batch_size": dynamic_batch_size,
            **settings,
        }
        self.batch_size = None if dynamic_batch_size else batch_size
        self._position = _Position(-1)
        self.set_epoch(0)

    @property
    def epoch(self) -> int:
        """Returns the number of the epoch, from 0."""
        return self._position.epoch

    @property
    def sampler(self) -> "EpochBatchSampler":
        """Is the sampler itself: where trainers look for ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Plans ``epoch``. It starts at its first batch, or at the batch that was loaded."""
        if epoch != self.epoch:
            self.plan, self._checksums = self._plan(epoch), {}
        if epoch != self.epoch or self._position.begun:
            self._position = _Position(epoch)

    def _plan(self, epoch: int) -> list[ndarray]:
        return plan_batches(self.lengths, seed=self.seed, epoch=epoch, **self.settings)

    @property
    def steps(self) -> ndarray:
        """Returns the epoch's batches of all replicas, as :func:`deal_batches` deals them."""
        return deal_batches(self.lengths, self.plan, self._replica()[0])

    @property
    def n_repeated(self) -> int:
        """Counts the batches repeated, so that all replicas have equally many."""
        return -len(self.plan) % self._replica()[0]

    def _replica(self) -> tuple[int, int]:
        """Returns how many processes share the batches, and which this one is. Asked late, because
        many programs make their loaders before they start the process group."""
        num_replicas, rank = self.num_replicas, self.rank
        if num_replicas is None:
            group = sys.modules.get("torch.distributed")  # not imported: no group
            if not (group and group.is_available() and group.is_initialized()):
                return 1, 0
            num_replicas, rank = group.get_world_size(), group.get_rank()
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank={rank}: use 0 to {num_replicas - 1}")
        return num_replicas, rank

    def __len__(self) -> int:
        """Returns the number of batches of the iteration, from :meth:`set_epoch` or the draw of its
        first batch until the next one begins. So ``i == len(loader) - 1`` holds at its last batch.
        """
        num_replicas, _ = self._replica()
        return -(-len(self.plan) // num_replicas) - self._position.first

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, which runs at the first batch: DataLoader calls iter() twice an epoch.
        if self._position.begun:
            self.set_epoch(self.epoch + 1)
        self._position = self._position._replace(begun=True)
        plan, steps, (_, rank) = self.plan, self.steps, self._replica()
        for step in range(self._position.first, len(steps)):
            self._position = self._position._replace(n_drawn=step + 1)
            yield plan[steps[step, rank]].tolist()

    def start_at(self, epoch: int, batch: int) -> None:
        """Plans ``epoch`` and begins after ``batch`` of its batches, none of which is drawn.

        Raises:
            ValueError: the epoch has fewer batches.
        """
        self.set_epoch(epoch)
        n_batches = len(self.steps)
        if not 0 <= batch <= n_batches:
            raise ValueError(f"batch={batch}: epoch {epoch} has {n_batches} batches")
        self._position = _Position(epoch, first=batch, n_drawn=batch)

    def state_dict(self, batch: int | None = None) -> dict[str, int]:
        """Returns the state after ``batch`` batches of the epoch; None: after those handed out.

        With DataLoader workers, which draw batches ahead of training, the training loop must count
        them (as torchdata's StatefulDataLoader does).
        """
        batch = self._position.n_drawn if batch is None else batch
        return {"epoch": self.epoch, "batch": batch, "checksum": self._checksum()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resumes after the batches that were done, at the next epoch if those were all.

        Raises:
            ValueError: the state is of other lengths, settings or replicas. Nothing has changed.
        """
        loaded = copy(self)
        loaded.set_epoch(state["epoch"])
        if state["checksum"] != loaded._checksum():
            raise ValueError(
                f"the state after batch {state['batch']} of epoch {state['epoch']} is of other "
                "lengths, settings or replicas: use the same, or start anew"
            )
        if state["batch"] == len(loaded.steps):
            loaded.set_epoch(state["epoch"] + 1)
        else:
            loaded.start_at(state["epoch"], state["batch"])
        vars(self).update(vars(loaded))

    def _checksum(self) -> int:
        """Tells the batches of this epoch from others. It is computed once, since a loader may save
        the state after each batch."""
        num_replicas, _ = self._replica()
        if num_replicas not in self._checksums:
            sizes = np.array([len(batch) for batch in self.plan])
            parts = np.concatenate(self.plan), sizes, self.steps
            checksum = zlib.crc32(b"".join(part.tobytes() for part in parts))
            self._checksums[num_replicas] = checksum
        return self._checksums[num_replicas]
