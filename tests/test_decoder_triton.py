"""The Triton kernels equal the loop, in Triton's interpreter or on a GPU."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import test_decoder_scan
import torch
import torch.nn.functional as F
from conftest import NO_DROPOUT, TINY, build
from test_decoder_scan import F32, assert_equal, batch_of, decode
from torch import Tensor
from torch.autograd import grad

import decoder
from corpus.clips import Clip
from data_utils import collate, training_sampler
from decoder import graphs as cuda_graphs
from decoder import scan
from hparams import create_hparams
from loss_function import Tacotron2Loss
from model import Decoder
from training import trial
from training.device import may_be_out_of_memory

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
kernels = pytest.importorskip("decoder.triton", reason="Triton is not installed")
DEVICE = torch.device("cuda" if GPU else "cpu")
OLD = tuple(map(int, kernels.triton.__version__.split(".")[:2])) < (3, 3)
SHORT = [7, 5, 3], [9, 6, 1]  # text and mel lengths


@pytest.fixture(autouse=True)
def fresh_graphs(monkeypatch):
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    monkeypatch.setattr(kernels, "B_MULTIPLE", 2)  # the interpreter is slow
    monkeypatch.setattr(kernels, "T_IN_MULTIPLE", 4)
    monkeypatch.setattr(kernels, "DEPTH", 16)  # so that sums have several parts
    if not GPU:
        set_steps(monkeypatch, 4)
    for cache in (cuda_graphs._graph, cuda_graphs._pool, cuda_graphs._stream):
        cache.cache_clear()


def set_steps(monkeypatch, n: int) -> None:
    for name in ("STEPS", "SEGMENT"):
        monkeypatch.setattr(scan, name, n)
    monkeypatch.setattr(kernels, "STEPS", n)


@pytest.fixture
def graphs(monkeypatch) -> list:
    """All graphs that are made."""
    made, plain = [], cuda_graphs._Graph.__init__

    def noted(graph, *arguments):
        plain(graph, *arguments)
        made.append(graph)

    monkeypatch.setattr(cuda_graphs._Graph, "__init__", noted)
    return made


def arguments(*sizes: int) -> list[Tensor]:
    inputs = test_decoder_scan.arguments(*sizes, dtype=F32)
    return [x.detach().to(DEVICE).requires_grad_() for x in inputs]


def outcome(
    of: Decoder, inputs: Sequence[Tensor | None], implementation: str, dtype: torch.dtype
) -> list[Tensor]:
    """A recurrence's outputs, and the gradients that they give to its inputs and weights."""
    module = copy.deepcopy(of).to(dtype)
    module.implementation = implementation
    sequences = [x.detach().to(dtype).requires_grad_() for x in inputs[:3]]
    decode = module._loop if implementation == "reference" else partial(module._scan, dtype=None)
    outputs = decode(*sequences, *inputs[3:])
    loss = sum((output * (1 + output.detach()).cos()).sum() for output in outputs)
    gradients = grad(loss, [*sequences, *module.parameters()], allow_unused=True)
    return [*outputs, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize(
    ("T", "B", "H", "T_in", "masked", "peak"),
    [
        (1, 1, 3, 1, False, 1),
        (11, 3, 20, 6, True, 1),
        (3, 17, 9, 6, False, 1),
        (2, 2, 17, 400, True, 1),  # needs no padding
        (9, 3, 5, 6, True, 8),  # attention looks at one character at a time
    ],
)
def test_the_kernels_equal_the_loop(T, B, H, T_in, masked, peak):
    module = build(attention_rnn_dim=H, decoder_rnn_dim=H + 2).decoder.to(DEVICE)
    module.attention_layer.v.linear_layer.weight.data *= peak
    sizes = (B, T, 8), (T_in, B, 8), (T_in, B, 6)  # frames, memory, keys: all transposed
    inputs = [torch.randn(size, device=DEVICE).transpose(0, 1) for size in sizes]
    padding = torch.arange(T_in) >= T_in - torch.arange(B)[:, None] % min(T_in, 3)
    masks = [torch.rand(T, B, n) > 0.3 if masked else None for n in (H, H + 2)]
    inputs += [x if x is None else x.to(DEVICE) for x in (padding, *masks)]
    ours = outcome(module, inputs, "triton", torch.float32)
    assert ours[2].amax(2).mean() > 0.9 or peak == 1
    assert len(ours) == 3 + 3 + 12  # outputs; gradients of inputs; of weights
    for dtype in (torch.float64, torch.float32):
        expected = outcome(module, inputs, "reference", dtype)
        for of_loop, of_kernels in zip(expected, ours, strict=True):
            assert (of_kernels - of_loop).norm() <= 1e-5 * of_loop.norm()


@pytest.mark.parametrize("changes", [{}, NO_DROPOUT, {"n_frames_per_step": 3}])
def test_the_model_equals_the_reference_and_replays_its_graphs(changes):
    model = build(**changes).to(DEVICE)
    for lengths in (SHORT, ([40, 33], [70, 4]), SHORT)[: 3 if GPU else 1]:
        batch = batch_of(*lengths, F32, model.hparams.n_frames_per_step)
        assert_equal(model, batch.to(DEVICE), 2e-4, "triton")


@pytest.mark.skipif(not GPU, reason="Triton's interpreter cannot multiply bfloat16")
def test_bf16_rounds_the_products_with_lstm_weights_alone():
    inputs = arguments(9)
    results = []
    for recurrences in (scan, kernels):
        outputs = decode(inputs, recurrences, dtype=torch.bfloat16)
        loss = sum(output.square().sum() for output in outputs)
        results.append((*outputs, *grad(loss, inputs)))
    for expected, ours in zip(*results, strict=True):
        assert (ours - expected).norm() <= 0.02 * expected.norm()


def test_graphs_of_one_precision_are_not_used_in_another():
    for allowed, n_made in ((False, 3), (True, 6), (False, 6)):  # one has both recurrences
        torch.backends.cuda.matmul.allow_tf32 = allowed
        decode(arguments(scan.SEGMENT + 1), kernels)
        assert cuda_graphs._graph.cache_info().misses == n_made


def test_graphs_of_all_shapes_share_the_memory_of_the_largest(graphs):
    cuda_graphs._flat.clear()
    memory = []
    for B in (6, 4, 2):
        sum(output.sum() for output in decode(arguments(2, B), kernels)).backward()
        buffers = [buffer for graph in graphs for buffer in (*graph.constants, *graph.tensors)]
        memory.append({b.untyped_storage().data_ptr() for b in buffers if b is not None})
    assert len(graphs) == 3 * 4  # attention and the LSTM, forward and backward
    assert memory[0] == memory[1] == memory[2]


def test_a_clip_attends_as_it_would_without_the_longer_texts_of_its_batch():
    x, memory, keys, *parameters = arguments(5)
    padding = torch.zeros(memory.shape[:2], dtype=torch.bool, device=DEVICE)
    alone = kernels.decode(x, memory, keys, padding, *parameters)
    longer = [F.pad(tensor, (0, 0, 0, 60), value=7.0) for tensor in (memory, keys)]
    padding = F.pad(padding, (0, 60), value=True)
    beside = kernels.decode(x, *longer, padding, *parameters)
    for here, there in zip(alone, beside, strict=True):
        assert torch.equal(here, there[..., : here.size(2)])


def test_the_trial_captures_the_graphs_of_a_whole_run():
    hparams = create_hparams(f"{TINY}batching_strategy=SSB,dynamic_batch_size=True,batch_size=2")
    sizes = [(3 + 5 * i % 7, 2 + 3 * i % 6) for i in range(5)]
    items = [trial.blank(*size, hparams.n_mel_channels) for size in sizes]
    clips = [Clip("", "", [0] * T_in, T_out, "", ()) for T_in, T_out in sizes]
    sampler, model = training_sampler(clips, hparams), build()
    model.decoder.implementation = "triton"
    parts = model, Tacotron2Loss(), torch.optim.Adam(model.to(DEVICE).parameters())
    validation = [[0, 1, 2, 3], [4]]  # more clips than any training batch has
    _, shapes = trial.largest_batches(clips, sampler, range(2))
    trial.try_shapes(*parts, shapes, trial.text_shapes(clips, validation))
    before = cuda_graphs._graph.cache_info()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for indices in sampler:
            trial.memory_error(*parts, [items[i] for i in indices])
    with torch.no_grad():
        for indices in validation:
            model.eval()(collate([items[i] for i in indices]).to(DEVICE))
    after = cuda_graphs._graph.cache_info()
    assert after.misses == before.misses and after.hits > before.hits
    assert model.decoder.implementation == "triton"


def test_a_capture_without_memory_is_no_batch_that_is_too_large(graphs, monkeypatch):
    decode(arguments(5), kernels)  # makes graphs
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    run = Mock(side_effect=[None, full])  # the first time, kernels compile
    monkeypatch.setattr(torch, "cuda", cuda := MagicMock())
    monkeypatch.setattr(graphs[0], "run", run)
    cuda.CUDAGraph().capture_end.side_effect = RuntimeError("the capture is invalid")
    with pytest.raises(cuda_graphs.CaptureError, match="CUDA out of memory") as error:
        graphs[0]._capture()
    assert not may_be_out_of_memory(error.value)
    run.side_effect = RuntimeError("no kernel image")  # while it compiles
    with pytest.raises(RuntimeError, match="no kernel image"):
        graphs[0]._capture()
    # What runs next waits for the kernels that were started: their buffers may be freed.
    assert cuda.current_stream().wait_stream.call_count == 2


# Races


class Accesses:
    """Records what the programs of each launch load and store, and what could race."""

    def __init__(self, monkeypatch) -> None:
        from triton.runtime import interpreter

        self.races, self.loaded, self.stored = [], set(), set()  # addresses
        builder = interpreter.InterpreterBuilder
        for owner, name, note in (
            (interpreter.GridExecutor, "__call__", self.launch),
            (builder, "set_grid_idx", self.program),
            (builder, "create_masked_load", self.load),
            (builder, "create_masked_store", self.store),
            (builder, "create_barrier", self.barrier),
        ):
            original = getattr(owner, name)

            def noted(this, *args, note=note, original=original, **options):
                note(this, *args)
                return original(this, *args, **options)

            monkeypatch.setattr(owner, name, noted)

    def launch(self, executor, *_) -> None:
        self.kernel = executor.fn.__name__
        self.readers, self.writers = {}, {}  # of each address: a program

    def program(self, _, *index: int) -> None:
        self.index, self.unsafe, self.written = index, set(), set()

    def barrier(self, _) -> None:
        self.unsafe = set()  # addresses that another thread may still have to load

    def load(self, _, pointers, mask, *__) -> None:
        addresses = set(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].tolist())
        self.unsafe |= addresses
        self.loaded |= addresses
        self.note("loads what it stored", addresses & self.written)
        others = {a for a in addresses if self.writers.get(a, self.index) != self.index}
        self.note("loads what another stores", others)
        for address in addresses:  # of several readers, any other one
            self.readers.setdefault(address, set()).add(self.index)

    def store(self, _, pointers, value, mask, *__) -> None:
        addresses = set(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].tolist())
        self.stored |= addresses
        self.note("stores before a barrier", addresses & self.unsafe)
        for address in addresses:
            programs = self.readers.get(address, set()) | {self.writers.get(address, self.index)}
            self.note("stores what another uses", programs - {self.index})
            self.writers[address] = self.index
        self.written |= addresses

    def note(self, problem: str, found: set) -> None:
        if found:
            self.races.append(f"{self.kernel}{self.index} {problem}")


@pytest.mark.skipif(GPU, reason="the interpreter records")
@pytest.mark.skipif(OLD, reason="this Triton multiplies no fewer than 16 rows")
def test_no_program_touches_what_another_writes_nor_loads_what_it_has_stored(monkeypatch):
    monkeypatch.setattr(kernels, "MAX_ROWS", 16)  # so that each launch has several programs
    monkeypatch.setattr(kernels, "CHARACTERS", 4)
    monkeypatch.setattr(kernels, "WIDE", 16)
    set_steps(monkeypatch, 2)
    inputs = arguments(2, 20, 20)
    accesses = Accesses(monkeypatch)
    outputs = decode(inputs, kernels)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    assert len(accesses.stored) > 10_000 and accesses.races == []
    monkeypatch.setattr(kernels.tl, "debug_barrier", lambda *_, **__: None)
    outputs = decode(inputs, kernels)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    raced = {re.match(r"\w+", race)[0] for race in accesses.races}
    assert raced == {"lstm_step", "cell_backward", "score_gradient"}


@pytest.mark.skipif(GPU, reason="the interpreter records")
def test_the_branches_of_a_graph_share_no_memory_that_one_writes(graphs, monkeypatch):
    """The operators between attention's kernels get the same tensors as these."""
    outputs = decode(arguments(scan.SEGMENT + 1), kernels)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    branching = [graph for graph in graphs if isinstance(graph.prepare, cuda_graphs._Beside)]
    assert len(branching) == 2  # forward and backward
    for graph in branching:
        (first, second, n, n_tensors), branches = graph.prepare, []
        for prepare, scale, constants, tensors in (
            (first, graph.scale[0], graph.constants[:n], graph.tensors[:n_tensors]),
            (second, graph.scale[1], graph.constants[n:], graph.tensors[n_tensors:]),
        ):
            with monkeypatch.context() as patch:
                accesses = Accesses(patch)
                prepare(*constants, scale)(*tensors)
            given = [
                x.untyped_storage().data_ptr() for x in (*constants, *tensors) if x is not None
            ]
            branches.append((set(given), accesses.stored, accesses.stored | accesses.loaded))
        (given, stored, used), (also_given, also_stored, also_used) = branches
        assert stored and also_stored and given.isdisjoint(also_given)
        assert stored.isdisjoint(also_used) and also_stored.isdisjoint(used)


# The choice


def test_the_kernels_are_chosen_on_a_gpu_that_can_and_never_end_a_run(monkeypatch):
    gpu, batch = torch.device("cuda"), batch_of(*SHORT, F32).to(DEVICE)
    for capability, expected in (((7, 0), "scan"), ((7, 5), "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        name, reason = decoder.fastest_decoder(gpu)
        assert name == expected and bool(reason) == (expected == "scan")
    assert decoder.fastest_decoder(torch.device("cpu")) == ("scan", "")

    model = build(decoder="auto").to(DEVICE)
    monkeypatch.setattr(decoder, "fastest_decoder", lambda *_: ("triton", ""))
    assert decoder.check_fast_path(model, batch) == [] and model.decoder.implementation == "triton"
    monkeypatch.setattr(decoder, "fastest_decoder", lambda *_: ("scan", "Triton cannot be used"))
    model = build(decoder="auto").to(DEVICE)
    assert decoder.check_fast_path(model, batch) == [
        "Triton cannot be used; training uses decoder=scan"
    ]
    assert model.decoder.implementation == "scan"


def test_triton_agrees_with_scan_on_real_batches(monkeypatch):
    """So that only its speed decides; in the interpreter it has none."""
    monkeypatch.setattr(trial, "N_STEPS", 2)
    model = build().to(DEVICE)
    items = [trial.blank(T_in, 9, model.hparams.n_mel_channels) for T_in in (5, 3, 4)]
    note = trial.faster_decoder(model, Tacotron2Loss(), (items[:1], items))
    assert re.fullmatch(r"decoder=\w+ is the fastest: steps take .* s with triton", note)


@pytest.mark.skipif(OLD, reason="with this Triton, one kernel spills about 100 bytes")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_the_kernels_compile_for_every_gpu_and_spill_nothing(precision):
    script = Path(kernels.__file__).parents[1] / "benchmarks/gpu_kernels.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, script, "--precision", precision]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    assert "kernels a frame" in printed and printed.endswith("nothing spills\n")
