"""Every tensor is on the GPU that should be, shown without one: by PyTorch's fake tensors, which
have a device and no data. Needs a CUDA build of PyTorch."""

from unittest.mock import Mock

import pytest
import torch
from conftest import TINY
from torch._subclasses.fake_tensor import FakeTensorMode

import model as model_file
from data_utils import Batch
from decoder import graphs, scan
from hparams import create_hparams
from loss_function import Tacotron2Loss
from model import Tacotron2

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="this build of PyTorch has no CUDA"),
    pytest.mark.skipif(
        torch.__version__ < "2.5", reason="fake tensors of this PyTorch ask the driver"
    ),
]


@pytest.fixture
def captured(monkeypatch):
    """Graphs that are captured and replayed without a GPU: the loops run, and nothing is kept."""

    def capture(loop, tensors):
        loop.run(*tensors)
        loops.append(loop)
        return Mock()

    loops = []
    for name, value in (("_capture", capture), ("_graphs", {}), ("_buffers", {})):
        monkeypatch.setattr(graphs, name, value)
    return loops


@pytest.fixture
def fused_cell(monkeypatch):
    """PyTorch's fused LSTM cell, which has no fake one."""

    def cell(gates, recurrent, before):
        return torch.empty_like(before), torch.empty_like(before), gates + recurrent

    monkeypatch.setattr(scan, "_fused_cell", cell)


def backward(*outputs):
    """The hand-written backward: autograd's own thread needs a real GPU."""
    node = outputs[0].grad_fn
    return type(node)._forward_cls.backward(node, *map(torch.ones_like, outputs))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("decoder", ["reference", "scan", "scan without graphs"])
def test_every_tensor_is_on_the_gpu(decoder, precision, monkeypatch, request, captured, fused_cell):
    monkeypatch.setattr(graphs, "_enabled", decoder == "scan")
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    request.addfinalizer(lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False))
    hparams = create_hparams(f"{TINY},precision={precision}")
    recurrences = []

    def note(function):
        real = function.apply

        def apply(*inputs):
            outputs = real(*inputs)
            recurrences.append(outputs if isinstance(outputs, tuple) else (outputs,))
            return outputs

        monkeypatch.setattr(function, "apply", apply)

    note(scan._Attend)
    note(scan._LSTM)
    # Their shapes depend on values, which fake tensors do not have.
    monkeypatch.setattr(model_file, "pack_padded_sequence", lambda x, *_, **__: x)
    monkeypatch.setattr(model_file, "pad_packed_sequence", lambda x, **_: (x, None))
    no_cudnn = torch.backends.cudnn.flags(enabled=False)  # which asks the driver
    with no_cudnn, FakeTensorMode(), torch.device("cuda"):
        model = Tacotron2(hparams)
        model.encoder.implementation = model.decoder.implementation = decoder.split()[0]
        batch = Batch(
            text=torch.ones(2, 9, dtype=torch.int64),
            text_lengths=torch.ones(2, dtype=torch.int64),
            mel=torch.zeros(2, hparams.n_mel_channels, 13),
            mel_lengths=torch.ones(2, dtype=torch.int64),
            gate=torch.zeros(2, 13),
            cpu_text_lengths=torch.tensor([9, 4], device="cpu"),
            indices=[0, 1],
        )
        output = model(batch)
        loss = Tacotron2Loss(1.0)(output, batch).objective
        assert loss.device.type == "cuda" and output.mel_postnet.shape == (2, 10, 13)
        for outputs in recurrences:
            assert {x.device.type for x in backward(*outputs) if x is not None} == {"cuda"}
        assert len(recurrences) == (0 if decoder == "reference" else 2)
        with torch.no_grad():
            assert model.eval()(batch).alignment.shape == (2, 13, 9)
            # A step of inference. The rest depends on values.
            memory = model.encoder(torch.zeros(2, 8, 9), batch.cpu_text_lengths)
            frame = model.decoder.prenet(torch.zeros(2, hparams.n_mel_channels))
            keys = model.decoder.attention_layer.memory_layer(memory)
            padding = torch.zeros(2, 9, dtype=torch.bool)
            state = model.decoder.initial_state(memory)
            texts = model_file.EncodedTexts(memory, keys, padding)
            state = model.decoder.step(frame, state, texts)
            frame, _ = model.decoder.project(state.decoder_hidden, state.context)
            assert frame.shape == (2, 10)
    if decoder == "scan":
        kinds = [type(loop).__name__ for loop in captured]
        assert len(kinds) == 6 and len(set(kinds)) == 4  # forward again without dropout
        values = [value for loop in captured for value in vars(loop).values()]
        assert {x.device.type for x in values if torch.is_tensor(x)} == {"cuda"}
    else:
        assert not captured
