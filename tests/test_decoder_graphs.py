"""Loops in CUDA graphs compute what they do without, and never end a training.

On a CPU a stand-in is captured, which runs the loop when it is replayed."""

import weakref
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from conftest import NO_DROPOUT, build
from test_decoder_scan import F32, PADDED, arguments, assert_equal, batch_of, decode
from torch import Tensor
from torch.autograd import grad

from decoder import graphs
from decoder.graphs import STEPS
from training.device import use_full_precision

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nMore")


class StandIn:
    """What _capture returns, on a CPU."""

    def __init__(self, loop, written, read) -> None:
        self.loop, self.written, self.read = loop, written, read

    def replay(self) -> None:
        loop = replace(self.loop)  # packs the weights that are in the buffers now
        loop.run(self.written, *self.read)


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    """Graphs as on a GPU, none of them captured yet; the calls of _capture."""
    torch.manual_seed(0)
    monkeypatch.setattr(graphs, "_graphs", {})
    monkeypatch.setattr(graphs, "_buffers", {})
    monkeypatch.setattr(graphs, "_enabled", True)
    graphs._pool.cache_clear()  # PyTorch frees a pool with its last graph
    monkeypatch.setattr(graphs, "usable", lambda _: True)
    capture = Mock(side_effect=graphs._capture if GPU else StandIn)
    monkeypatch.setattr(graphs, "_capture", capture)
    return capture


def results(inputs: list[Tensor], masked: bool = False, **options) -> list[Tensor]:
    """Outputs, and the gradients of the inputs."""
    T, B, _ = inputs[0].shape
    generator = torch.Generator().manual_seed(T + B)
    masks = [torch.rand(T, B, 3, generator=generator).to(DEVICE) > 0.3 for _ in range(2)]
    masks = masks if masked else (None, None)
    outputs = decode(inputs, masks=masks, scales=(1.4, 1.6), **options)
    return [*outputs, *grad(sum(output.square().sum() for output in outputs), inputs)]


def inputs_of(T: int, B: int) -> list[Tensor]:
    return [x.detach().to(DEVICE).requires_grad_() for x in arguments(T, B, dtype=F32)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_the_same_numbers_and_are_captured_once(captured, monkeypatch, masked, dtype):
    """Both batches have the shapes of the first, but other weights, lengths and texts."""
    for B in (3, 5, 8):
        inputs = inputs_of(2 * STEPS + 3, B)
        with_graphs = results(inputs, masked, dtype=dtype)
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "_enabled", False)
            expected = results(inputs, masked, dtype=dtype)
        assert all(map(torch.equal, with_graphs, expected))
    results(inputs_of(STEPS - 1, 3))  # needs none
    kinds = [type(call.args[0]).__name__ for call in captured.call_args_list]
    assert kinds == ["AttendForward", "LSTMForward", "LSTMBackward", "AttendBackward"]


@pytest.mark.parametrize("changes", [{}, NO_DROPOUT, {"n_frames_per_step": 3}])
def test_the_model_in_graphs_equals_the_reference(captured, changes):
    model = build(**changes).to(DEVICE)
    for lengths in (PADDED, ([40, 33], [70, 4]), PADDED):
        batch = batch_of(*lengths, F32, model.hparams.n_frames_per_step)
        assert_equal(model, batch.to(DEVICE), 1e-4)
    assert captured.called


@use_full_precision()  # which restores it
def test_graphs_of_one_precision_are_not_used_in_another(captured):
    for allowed, n_captured in ((False, 4), (True, 8), (False, 8)):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        results(inputs_of(STEPS, 3))
        assert captured.call_count == n_captured


def test_graphs_of_all_shapes_share_the_memory_of_the_largest(captured):
    memory = []
    for B in (20, 12, 4):
        results(inputs_of(STEPS, B))
        buffers = [x for graph in graphs._graphs.values() for x in (*graph.written, *graph.read)]
        memory.append({x.untyped_storage().data_ptr() for x in buffers if x is not None})
    assert captured.call_count == 3 * 4 and memory[0] == memory[1] == memory[2]


# Failures


@pytest.mark.parametrize("error", [RuntimeError("not permitted\nCompile"), FULL, KeyError("what")])
def test_a_shape_that_cannot_be_captured_runs_without(captured, capsys, error):
    """The note says so once, and the error keeps no tensor."""
    inputs, tensors = inputs_of(STEPS + 2, 3), []
    expected = results(inputs)
    graphs._graphs.clear()
    captured.reset_mock()

    def capture(loop, written, read):
        held = torch.zeros(9)
        tensors.append(weakref.ref(held))
        raise error

    captured.side_effect = capture
    for _ in range(2):
        assert all(map(torch.equal, results(inputs), expected))
    notes = capsys.readouterr().out.splitlines()
    assert captured.call_count == len(notes) == 4
    assert f"AttendForward for 8 clips ({type(error).__name__}: " in notes[0]
    error.__traceback__ = None  # which the test itself would hold
    assert not any(tensor() is not None for tensor in tensors)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_a_capture_that_fails_does_not_break_the_next():
    """Neither when it is alone in the memory pool, nor when other graphs share it."""
    waits = Mock(run=lambda x: x.sum().item())  # which a capture forbids
    for B in (3, 20):
        with pytest.raises(RuntimeError):
            graphs._capture(waits, [torch.zeros(3, device=DEVICE)])
        results(inputs_of(STEPS, B))
        assert all(graphs._graphs.values())
    assert len(graphs._graphs) == 8


def test_graphs_that_are_turned_off_give_back_buffers_and_pool(captured, monkeypatch):
    if not GPU:
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", Mock(side_effect=[1, 2]))
    inputs, first = inputs_of(STEPS, 3), graphs._pool()
    expected = results(inputs)
    memory = [weakref.ref(buffer) for buffer in graphs._buffers.values()]
    captured.reset_mock()  # which holds them too
    assert graphs.turn_off() and not graphs.turn_off()
    assert all(buffer() is None for buffer in memory) and graphs._pool() != first
    assert all(map(torch.equal, results(inputs), expected)) and not captured.called
    graphs._pool.cache_clear()
