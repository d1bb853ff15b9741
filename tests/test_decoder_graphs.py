"""Loops in CUDA graphs compute what they do without, and never end a training.

On a CPU a stand-in is captured, which runs the loop when it is replayed."""

import weakref
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from conftest import NO_DROPOUT, build
from test_decoder_scan import F32, PADDED, assert_equal, batch_of, run
from torch.testing import assert_close

from decoder import graphs
from decoder.graphs import STEPS
from training.device import use_full_precision

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


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


def results(n_clips: int, **settings) -> tuple[dict, dict, dict]:
    """Returns outputs and gradients of STEPS steps, always with the same weights."""
    batch = batch_of(([6] * n_clips, [STEPS] * n_clips), F32).to(DEVICE)
    return run(build(**NO_DROPOUT, **settings).to(DEVICE), batch, "scan")


@pytest.mark.parametrize("changes", [{}, NO_DROPOUT, {"n_frames_per_step": 3}])
def test_graphs_are_captured_once_and_the_model_equals_the_reference(captured, changes):
    """All batches have the shapes of the first, but other weights, lengths and texts."""
    for lengths in (PADDED, ([30, 23, 8, 2], [70, 4, 66, 28]), ([9], [24])):
        model = build(**changes)
        for weight in model.parameters():
            weight.data += 0.2 * torch.randn_like(weight)
        batch = batch_of(lengths, F32, model.hparams.n_frames_per_step)
        assert_equal(model.to(DEVICE), batch.to(DEVICE), 1e-4)
    assert captured.call_count == (4 if changes is NO_DROPOUT else 6)  # forward without dropout


@use_full_precision()  # which restores it
def test_graphs_of_one_precision_are_not_used_in_another(captured):
    for allowed, n_captured in ((False, 4), (True, 8), (False, 8)):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        results(3)
        assert captured.call_count == n_captured


def test_graphs_of_all_shapes_share_the_memory_of_the_largest(captured):
    memory = []
    for B in (20, 12, 4):
        results(B)
        buffers = [x for graph in graphs._graphs.values() for x in (*graph.written, *graph.read)]
        memory.append({x.untyped_storage().data_ptr() for x in buffers if x is not None})
    assert captured.call_count == 3 * 4 and memory[0] == memory[1] == memory[2]


# Failures


@pytest.mark.parametrize(("precision", "n_captured"), [("fp32", 4), ("bf16", 6)])
def test_a_shape_that_cannot_be_captured_runs_without(captured, capsys, precision, n_captured):
    """Validation is in fp32."""
    expected = results(3, precision=precision)
    graphs._graphs.clear()
    captured.reset_mock()
    captured.side_effect = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nMore")
    for _ in range(2):
        assert_close(results(3, precision=precision), expected, rtol=0.01, atol=1e-3)
    notes = capsys.readouterr().out.splitlines()
    assert captured.call_count == len(notes) == n_captured
    assert "AttendForward for 8 clips (OutOfMemoryError: " in notes[0]


@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_a_capture_that_fails_does_not_break_the_next():
    """Neither when it is alone in the memory pool, nor when other graphs share it."""
    waits = Mock(run=lambda x: x.sum().item())  # which a capture forbids
    for B in (3, 20):
        with pytest.raises(RuntimeError):
            graphs._capture(waits, [torch.zeros(3, device=DEVICE)])
        results(B)
        assert all(graphs._graphs.values())


def test_graphs_that_are_turned_off_give_back_their_memory(captured):
    expected = results(3)
    memory = [weakref.ref(buffer) for buffer in graphs._buffers.values()]
    captured.reset_mock()  # which holds them too
    assert graphs.turn_off() and not graphs.turn_off()
    assert memory and all(buffer() is None for buffer in memory)
    assert_close(results(3), expected, rtol=0.01, atol=1e-3)
    assert not captured.called
