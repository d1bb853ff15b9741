"""CUDA graphs of the loops of decoder.scan, so that a GPU's kernels are not launched one by one.

A loop is a dataclass. Its fields are what all its steps read; ``run(written, *read)`` computes some
steps, reads all of these tensors, and writes to those of ``written``, a NamedTuple, of which the
first has a row for each step. On a GPU, the kernels of STEPS steps are captured once for each
shape, by the same ``run`` that is otherwise called, and replayed from then on.
"""

import gc
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from decoder import private

STEPS = 8  # of a call of run(), and of a graph


class Captured:
    """A loop on a GPU, which replays a graph if it can.

    A shape whose graph cannot be captured, for want of memory or for any other reason, runs without
    one from then on, and a line says so. The results are the same.
    """

    def __init__(self, loop: Any) -> None:
        self.loop, self.graph = loop, None

    def run(self, written: Any, *read: Tensor | None) -> None:
        """Does what the loop's ``run`` does."""
        if _enabled and len(written[0]) == STEPS:
            if self.graph is None:
                self.graph = _find_graph(self.loop, written, read) or False
                if self.graph:
                    self.graph.load(self.loop)
            if self.graph:
                return self.graph.run(written, read)
        return self.loop.run(written, *read)


class Graph:
    """A graph of a loop, on buffers that all graphs share: copies in, replays, copies out."""

    def __init__(self, loop: Any, written: Any, read: Sequence[Tensor | None]) -> None:
        self.constants = {name: _buffer(name, x) for name, x in _tensors(loop).items()}
        buffers = [_buffer(i, x) for i, x in enumerate((*written, *read))]
        self.written = type(written)(*buffers[: len(written)])
        self.read = buffers[len(written) :]
        self.cuda_graph = _capture(replace(loop, **self.constants), self.written, self.read)

    def load(self, loop: Any) -> None:
        _copy(self.constants.values(), _tensors(loop).values())

    def run(self, written: Any, read: Sequence[Tensor | None]) -> None:
        _copy((*self.written, *self.read), (*written, *read))
        self.cuda_graph.replay()
        _copy(written, self.written)


_graphs: dict[tuple, Graph | None] = {}  # by loop and shapes; None: it cannot be captured
_buffers: dict[tuple, Tensor] = {}  # the graphs' memory, by name or position, and type
_enabled = True


def on_device(loop: Any, device: torch.device) -> Any:
    """Returns ``loop`` as it should run on ``device``: on a GPU in graphs."""
    return Captured(loop) if usable(device) else loop


def usable(device: torch.device) -> bool:
    """Returns whether loops may run in graphs on ``device``."""
    return device.type == "cuda"


def turn_off() -> bool:
    """Frees all graphs, with their buffers and their memory pool, and makes every loop run without
    them from now on. Returns whether there was anything to free."""
    global _enabled
    had_buffers, _enabled = bool(_buffers), False
    _graphs.clear()
    _buffers.clear()
    _pool.cache_clear()  # PyTorch frees a pool with its last graph
    return had_buffers


def _find_graph(loop: Any, written: Any, read: Sequence[Tensor | None]) -> Graph | None:
    """Returns the graph of ``loop`` with tensors of these shapes; None if it cannot be captured."""
    values = *(getattr(loop, field.name) for field in fields(loop)), *written, *read
    # A captured product keeps its precision.
    key = type(loop), torch.backends.cuda.matmul.allow_tf32, *map(_spec, values)
    if key not in _graphs:
        try:
            _graphs[key] = Graph(loop, written, read)
        except Exception as error:  # PyTorch raises all kinds, and the loop may run without a graph
            _graphs[key] = None
            tqdm.write(
                f"note: no CUDA graph of {type(loop).__name__} for {written[0].size(1)} clips "
                f"({_first_line(error)}); it runs without, more slowly"
            )
    return _graphs[key]


def _first_line(error: BaseException) -> str:
    """Returns the beginning of the first of the errors that led to ``error``."""
    while error.__context__:
        error = error.__context__
    return shorten(f"{type(error).__name__}: {error}".partition("\n")[0], 100, placeholder=" ...")


def _capture(loop: Any, written: Any, read: Sequence[Tensor | None]) -> torch.cuda.CUDAGraph:
    """Captures the kernels of ``loop.run(written, *read)``; raises whatever PyTorch does."""
    current, stream, graph = torch.cuda.current_stream(), _stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(current)
    was_collecting = gc.isenabled()
    gc.disable()  # a tensor of a reference cycle that is freed meanwhile breaks a capture
    try:
        # Not by torch.cuda.graph(), which empties the caches before each of them.
        with torch.cuda.stream(stream):
            loop.run(written, *read)  # libraries allocate what they need
            try:
                # The loader's thread may pin memory meanwhile: stricter modes forbid it.
                graph.capture_begin(_pool(), capture_error_mode="thread_local")
                try:
                    loop.run(written, *read)
                finally:
                    graph.capture_end()
            except Exception:
                # The random generator may still be capturing (PyTorch's issue 171263); then nothing
                # could be drawn.
                generator = torch.cuda.default_generators[written[0].get_device()]
                generator.graphsafe_set_state(generator.clone_state())
                _pool.cache_clear()  # nothing else can be captured into this one
                raise
    finally:
        if was_collecting:
            gc.enable()
        current.wait_stream(stream)  # the buffers may be freed, but the kernels still write
    return graph


def _tensors(loop: Any) -> dict[str, Tensor]:
    """Returns the loop's fields that are tensors."""
    named = {field.name: getattr(loop, field.name) for field in fields(loop)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _spec(value: Any) -> Any:
    """Returns what must be equal for a graph to fit: shape, type and device, or another value."""
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value


def _buffer(name: str | int, like: Tensor | None) -> Tensor | None:
    """Returns a buffer of the shape of ``like``. All graphs share the buffers' memory, if the
    largest shape comes first: no two run at the same time, and each copies in what it reads."""
    if like is None:
        return None
    key, n = (name, like.dtype, like.device), like.numel()
    if key not in _buffers or len(_buffers[key]) < n:
        with torch.inference_mode(False):  # else training could not write to it
            _buffers[key] = torch.zeros(n, dtype=like.dtype, device=like.device)
    return _buffers[key][:n].view(like.shape)


def _copy(targets: Iterable[Tensor | None], sources: Iterable[Tensor | None]) -> None:
    """Copies tensors, in one launch for each type."""
    pairs = [pair for pair in zip(targets, sources, strict=True) if pair[1] is not None]
    for dtype in {source.dtype for _, source in pairs}:
        same = [pair for pair in pairs if pair[1].dtype is dtype]
        if private.COPY_ALL:
            private.COPY_ALL([target for target, _ in same], [source for _, source in same])
        else:
            for target, source in same:
                target.copy_(source)


@lru_cache(maxsize=1)
def _pool() -> Any:
    """Returns the memory pool of all graphs' temporaries, since no two run at the same time."""
    return torch.cuda.graph_pool_handle()


@lru_cache(maxsize=1)
def _stream() -> torch.cuda.Stream:
    """Returns the stream in which all graphs are captured: libraries keep memory for each one."""
    return torch.cuda.Stream()
