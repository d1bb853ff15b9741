"""CUDA graphs of the loops of decoder.triton, so that kernels are not launched one by one.

On a GPU, the kernels of a few frames are captured in a graph, once per shape. The second LSTM runs
a SEGMENT of frames behind attention, and attention's backward one behind the LSTM's: beside each
other, in two branches of a graph that share no memory that one of them writes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_GRAPHS = 512  # LJSpeech with dynamic batch sizes needs about 110, with batch_size=64 180


class Captured:
    """The ``run`` that ``prepare(*constants, scale)`` makes, on a GPU in a CUDA graph. It takes
    ``n_tensors``, and writes to those with the indices ``written``."""

    def __init__(
        self,
        prepare: Callable[..., Callable[..., None]],
        constants: Sequence[Tensor],
        scale: Any,
        n_tensors: int,
        written: Iterable[int],
    ) -> None:
        self.prepare, self.constants, self.scale = prepare, constants, scale
        self.n_tensors, self.written = n_tensors, tuple(written)
        self.graph = None

    def __call__(self, *tensors: Tensor | None) -> None:
        if self.graph is None:
            specs = [
                x if x is None else (x.shape, x.dtype, x.device)
                for x in (*self.constants, *tensors)
            ]
            n_constants = len(self.constants)
            self.graph = _graph(
                precision(), self.prepare, self.scale, n_constants, self.written, *specs
            )
            self.graph.load(self.constants)
        self.graph(*tensors)


def beside(first: Captured, second: Captured) -> Callable[..., None]:
    """Makes one ``run`` of two that share no tensor; it takes the arguments of both."""
    n = len(first.constants)
    together = _Beside(first.prepare, second.prepare, n, first.n_tensors)
    written = *first.written, *(first.n_tensors + i for i in second.written)
    constants, scales = (*first.constants, *second.constants), (first.scale, second.scale)
    return Captured(together, constants, scales, first.n_tensors + second.n_tensors, written)


class _Beside(NamedTuple):
    """Prepares two runs in two branches."""

    first: Callable[..., Callable[..., None]]
    second: Callable[..., Callable[..., None]]
    n_constants: int  # of the first
    n_tensors: int

    def __call__(self, *arguments: Any) -> Callable[..., None]:
        *constants, scales = arguments
        first = self.first(*constants[: self.n_constants], scales[0])
        second = self.second(*constants[self.n_constants :], scales[1])

        def run(*tensors: Tensor | None) -> None:
            branches = (
                partial(first, *tensors[: self.n_tensors]),
                partial(second, *tensors[self.n_tensors :]),
            )
            if constants[0].is_cuda:
                _in_two_streams(*branches)
            else:
                for branch in branches:
                    branch()

        return run


class _Graph:
    """Runs a loop on buffers that all graphs share: copies in, runs, copies out."""

    def __init__(
        self,
        precision: str,  # which captured products keep
        prepare: Callable[..., Callable[..., None]],
        scale: Any,
        n_constants: int,
        written: tuple[int, ...],
        *specs: tuple | None,
    ) -> None:
        buffers = [spec and _buffer(i, *spec) for i, spec in enumerate(specs)]
        self.constants, self.tensors = buffers[:n_constants], buffers[n_constants:]
        self.prepare, self.scale, self.written = prepare, scale, written
        self.run = prepare(*self.constants, scale)  # it may own buffers, too
        self.graph = self._capture() if self.constants[0].is_cuda else None

    def load(self, constants: Sequence[Tensor]) -> None:
        _copy(self.constants, constants)
        if self.graph is None:  # on a CPU, products keep copies of their weights
            self.run = self.prepare(*self.constants, self.scale)

    def __call__(self, *tensors: Tensor | None) -> None:
        _copy(self.tensors, tensors)
        if self.graph is None:
            self.run(*self.tensors)
        else:
            self.graph.replay()
        _copy(*([source[i] for i in self.written] for source in (tensors, self.tensors)))

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Captures a graph of ``run``. Raises :class:`CaptureError` if that fails."""
        current, stream, graph = torch.cuda.current_stream(), _stream(0), torch.cuda.CUDAGraph()
        stream.wait_stream(current)
        # Not by torch.cuda.graph(), which synchronises and empties the caches for each of them.
        try:
            with torch.cuda.stream(stream):
                self.run(*self.tensors)  # kernels compile, and libraries allocate
                try:
                    # The loader's thread may pin memory meanwhile: stricter modes forbid it.
                    graph.capture_begin(_pool(), capture_error_mode="thread_local")
                    try:
                        self.run(*self.tensors)
                    finally:
                        graph.capture_end()
                except Exception as error:  # of memory too, by a class that depends on PyTorch
                    # The random generator may still be capturing (PyTorch's issue 171263); then
                    # scan could not drop units.
                    generator = torch.cuda.default_generators[self.constants[0].get_device()]
                    generator.graphsafe_set_state(generator.clone_state())
                    first = error
                    while first.__context__:
                        first = first.__context__
                    reason = str(first).partition("\n")[0]
                    raise CaptureError(f"CUDA graph capture failed: {reason}") from error
        finally:
            current.wait_stream(stream)  # the buffers may be freed, but the kernels still write
        return graph


class CaptureError(Exception):
    """A CUDA graph could not be captured. It is no RuntimeError, so that a capture without memory
    is not taken for a batch that is too large: scan may have room for it."""


_graph = lru_cache(maxsize=MAX_GRAPHS)(_Graph)
_flat: dict[tuple, Tensor] = {}


def release_memory() -> None:
    """Frees the graphs and their buffers."""
    _graph.cache_clear()
    _flat.clear()
    _pool.cache_clear()  # PyTorch forgets a pool with its last graph


def _buffer(i: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the ``i``-th buffer of a graph. All graphs share its memory, which grows with the
    largest shape: no two run at the same time, and each copies in what it reads."""
    flat, n = _flat.get((i, dtype, device)), shape.numel()
    if flat is None or len(flat) < n:
        with torch.inference_mode(False):  # else training could not write to it
            flat = _flat[i, dtype, device] = torch.zeros(n, dtype=dtype, device=device)
    return flat[:n].view(shape)


def _copy(to: Sequence[Tensor | None], of: Sequence[Tensor | None]) -> None:
    """Copies tensors, all of one type by one launch."""
    pairs = defaultdict(list)
    for pair in zip(to, of, strict=True):
        if pair[1] is not None:
            pairs[pair[0].dtype].append(pair)
    for same_dtype in pairs.values():
        torch._foreach_copy_(*map(list, zip(*same_dtype, strict=True)))


@lru_cache(maxsize=1)
def _pool() -> Any:
    """Returns the memory pool of all graphs' temporaries, since no two run at the same time."""
    return torch.cuda.graph_pool_handle()


@lru_cache(maxsize=2)
def _stream(branch: int) -> torch.cuda.Stream:
    """Returns the stream in which all graphs' first or second branches are captured: libraries keep
    memory for each one."""
    return torch.cuda.Stream()


def _in_two_streams(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Runs both beside each other; what follows waits for both."""
    current, side = torch.cuda.current_stream(), _stream(1)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            second()
        first()
    finally:
        current.wait_stream(side)  # else a capture could not end


def precision() -> str:
    """Returns that of products, which captured ones keep."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
