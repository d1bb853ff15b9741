"""The Triton kernels equal decoder_scan and the loop, in Triton's interpreter or on a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import test_decoder_scan
import torch
from conftest import NO_DROPOUT, build
from test_decoder_scan import F32, arguments, assert_equal, batch_of, decode
from torch.autograd import grad
from torch.testing import assert_close

import decoder_scan
import model as models

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
decoder_triton = pytest.importorskip("decoder_triton", reason="Triton is not installed")
DEVICE = torch.device("cuda" if GPU else "cpu")
SHORT = [7, 5, 3], [9, 6, 1]  # text and mel lengths


@pytest.fixture(autouse=True)
def fresh_graphs(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(decoder_triton, "_cannot_capture", False)
    if not GPU:  # the interpreter is slow
        monkeypatch.setattr(decoder_triton, "B_MULTIPLE", 2)
        monkeypatch.setattr(decoder_triton, "T_IN_MULTIPLE", 4)
    decoder_triton._graph.cache_clear()


@pytest.mark.parametrize(
    ("T", "B", "H", "T_in", "masked", "peak"),
    [
        (1, 1, 3, 1, False, 1),
        (11, 3, 20, 6, True, 1),
        (3, 17, 9, 6, False, 1),
        (2, 2, 17, 70, True, 1),
        (9, 3, 5, 6, True, 300),  # attention looks at one character at a time
    ],
)
def test_the_kernels_equal_the_scan(T, B, H, T_in, masked, peak, monkeypatch):
    monkeypatch.setattr(test_decoder_scan, "T_IN", T_in)
    inputs = arguments(T, B, H, dtype=F32)
    inputs[8].data *= peak
    inputs = [x.detach().to(DEVICE).requires_grad_() for x in inputs]
    mask = (torch.rand(T, B, H) > 0.3).to(DEVICE) if masked else None
    results = []
    for recurrences in (decoder_scan, decoder_triton):
        outputs = decode(inputs, recurrences, mask=mask, scale=1.4)
        loss = sum((output * (1 + output.detach()).cos()).sum() for output in outputs)
        results.append((*outputs, *grad(loss, inputs)))
    assert outputs[2].amax(2).mean() > 0.75 or peak == 1
    for expected, ours in zip(*results, strict=True):
        assert (ours - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("changes", [{}, NO_DROPOUT])
def test_the_model_equals_the_reference_and_replays_its_graphs(changes):
    model = build(**changes).to(DEVICE)
    for lengths in (SHORT, ([40, 33], [70, 4]), SHORT)[: 3 if GPU else 1]:
        assert_equal(model, batch_of(*lengths, F32).to(DEVICE), 2e-4, "triton")


@pytest.mark.skipif(not GPU, reason="Triton's interpreter cannot multiply bfloat16")
def test_bf16_rounds_the_products_with_lstm_weights_alone():
    inputs = [x.detach().to(DEVICE).requires_grad_() for x in arguments(9, dtype=F32)]
    results = []
    for recurrences in (decoder_scan, decoder_triton):
        outputs = decode(inputs, recurrences, dtype=torch.bfloat16)
        loss = sum(output.square().sum() for output in outputs)
        results.append((*outputs, *grad(loss, inputs)))
    for expected, ours in zip(*results, strict=True):
        assert (ours - expected).norm() <= 0.02 * expected.norm()


def test_similar_shapes_share_graphs_but_precisions_do_not():
    for T, B in ((5, 3), (9, 4), (3, 3)):
        inputs = arguments(T, B, dtype=F32)
        with torch.inference_mode():
            expected = decode(inputs, decoder_triton)
        outputs = decode(inputs, decoder_triton)
        assert_close(outputs, expected)
        outputs[0].sum().backward()
    info = decoder_triton._graph.cache_info()
    assert info == (14, 4, decoder_triton.MAX_GRAPHS, 4)  # hits, misses, most, now
    for allowed, counts in ((False, (14, 6)), (True, (14, 8)), (False, (16, 8))):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        decode(arguments(5, 5, dtype=F32), decoder_triton)
        assert decoder_triton._graph.cache_info()[:2] == counts


def test_graphs_of_all_shapes_share_the_memory_of_the_largest(monkeypatch):
    decoder_triton._flat.clear()
    graphs, memory = [], []
    plain = decoder_triton._Graph.__init__

    def noted(graph, *arguments):
        plain(graph, *arguments)
        graphs.append(graph)

    monkeypatch.setattr(decoder_triton._Graph, "__init__", noted)
    for B in (6, 4, 2):
        inputs = arguments(2, B, dtype=F32)
        sum(output.sum() for output in decode(inputs, decoder_triton)).backward()
        buffers = [buffer for graph in graphs for buffer in (*graph.constants, *graph.tensors)]
        memory.append({b.untyped_storage().data_ptr() for b in buffers if b is not None})
    assert len(graphs) == 3 * 4  # two loops, forward and backward
    assert memory[0] == memory[1] == memory[2]


def test_a_failed_capture_is_reported_once_and_the_kernels_go_on(monkeypatch, capsys):
    failure = Mock(side_effect=torch.cuda.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(decoder_triton, "_graph", failure)
    inputs = arguments(5, dtype=F32)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        decode(inputs, decoder_triton)
    assert not decoder_triton._cannot_capture

    failure.side_effect = RuntimeError("operation not permitted when capturing\nCompile with ...")
    assert_close(decode(inputs, decoder_triton), decode(inputs), rtol=1e-4, atol=1e-5)
    (warning,) = capsys.readouterr().out.splitlines()
    assert "(operation not permitted when capturing); continuing without graphs" in warning


# The choice


def test_the_kernels_are_chosen_on_a_gpu_that_can_and_never_end_a_run(monkeypatch):
    gpu, batch = torch.device("cuda"), batch_of(*SHORT, F32)
    for capability, expected in (((7, 0), "scan"), ((7, 5), "triton"), ((9, 0), "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        decoder, reason = models.fastest_decoder(gpu)
        assert decoder == expected and bool(reason) == (expected == "scan")
    assert models.fastest_decoder(torch.device("cpu")) == ("scan", "")

    model = build(decoder="auto")
    monkeypatch.setattr(models, "fastest_decoder", lambda _: ("triton", ""))
    assert model.check_fast_path(batch) == [] and model.decoder.implementation == "triton"
    monkeypatch.setattr(decoder_triton, "attend", Mock(side_effect=RuntimeError("no kernel image")))
    (note,) = build(decoder="auto").check_fast_path(batch)
    assert "decoder=triton fails (RuntimeError: no kernel image); training uses decoder" in note
    monkeypatch.setattr(models, "fastest_decoder", lambda _: ("scan", "Triton cannot be used"))
    model = build(decoder="auto")
    assert model.check_fast_path(batch) == ["Triton cannot be used; training uses decoder=scan"]
    assert model.decoder.implementation == "scan"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_the_kernels_compile_for_every_gpu_and_spill_nothing(precision):
    script = Path(decoder_triton.__file__).parent / "benchmarks/gpu_kernels.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, script, "--precision", precision]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    assert printed.count("\n| ") == 1 + 10 and "\n10 kernels a frame, " in printed
    assert printed.endswith("nothing spills\n")
