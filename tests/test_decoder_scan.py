"""The fast recurrences equal the step-by-step loop, or say that they cannot."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from conftest import NO_DROPOUT, ROOT, build, noise_batch
from torch import Tensor
from torch.autograd import grad, gradcheck
from torch.testing import assert_close

from data_utils import Batch
from decoder import private, products, scan
from decoder.scan import STEPS
from loss_function import Tacotron2Loss
from model import Tacotron2
from training.device import use_full_precision

PADDED = ([17, 9, 5], [23, 41, 1])  # text and mel lengths
F32, F64 = torch.float32, torch.float64
T_IN = 6


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def arguments(T: int, B: int = 3, H: int = 3, dtype: torch.dtype = F64) -> list[Tensor]:
    """The differentiable arguments of :func:`decode`, with location filters over 5 characters."""
    D, E, A = 2, 3, 2
    shapes = [(T, B, D), (B, T_IN, E), (B, T_IN, A)]  # inputs, memory, keys
    shapes += [(4 * H, D), (4 * H, H + E), (4 * H,), (A, H), (A, 2, 5), (A,)]  # attention
    shapes += [(4 * H, H + E), (4 * H, H), (4 * H,)]  # the second LSTM
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def decode(inputs: Sequence[Tensor], **options) -> tuple[Tensor, Tensor, Tensor]:
    """Decodes texts of 6, 4, 2, 6, 4, 2, ... characters."""
    x, memory, keys, *parameters = inputs
    lengths = T_IN - 2 * (torch.arange(x.size(1)) % 3)
    padding = (torch.arange(T_IN) >= lengths[:, None]).to(x.device)
    return scan.decode(x, memory, keys, padding, *parameters, **options)


# The recurrences alone


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("T", [1, STEPS + 3])
def test_gradients_are_finite_differences(T, masked):
    """So are those that arrive at the alignment alone."""
    masks = [torch.rand(T, 3, 3) > 0.3 if masked else None for _ in range(2)]
    options = {"masks": masks, "scales": (1.4, 1.6)}
    inputs = arguments(T)
    assert gradcheck(lambda *inputs: decode(inputs, **options), inputs, fast_mode=T > 1)
    assert gradcheck(lambda *inputs: decode(inputs)[2], inputs, fast_mode=T > 1)


def test_without_pytorchs_private_operators_results_are_the_same(monkeypatch):
    inputs = arguments(11, dtype=F32)
    names = [name for name, operator in vars(private).items() if name.isupper() and operator]
    results = []
    for missing in ([], *([name] for name in names), names):
        with monkeypatch.context() as patch:
            for name in missing:
                patch.setattr(private, name, None)
            outputs = decode(inputs)
            results.append([*outputs, *grad(sum(x.square().sum() for x in outputs), inputs)])
    for others in results[1:]:
        assert_close(others, results[0], rtol=1e-4, atol=1e-5)


def test_a_second_backward_is_right_or_refused():
    """Gradients overwrite the saved gates, and must never be computed from overwritten ones."""
    inputs = arguments(11)
    value = sum(output.square().sum() for output in decode(inputs))
    first = grad(value, inputs, retain_graph=True)
    assert_close(grad(value, inputs), first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        grad(value, inputs)
    value = decode(inputs)[0].square().sum()
    for gradient in grad(value, (inputs[0], inputs[-1]), create_graph=True):
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


# The model


def batch_of(
    text_lengths: list[int], mel_lengths: list[int], dtype: torch.dtype, n_frames_per_step: int = 1
) -> Batch:
    batch = noise_batch(text_lengths, mel_lengths, n_frames_per_step)
    return batch._replace(mel=batch.mel.to(dtype), gate=batch.gate.to(dtype))


def run(model: Tacotron2, batch: Batch, implementation: str) -> tuple[dict, dict, dict]:
    """Outputs and gradients of training, and outputs of validation, always with one dropout."""
    model = copy.deepcopy(model)
    model.decoder.implementation = implementation
    torch.manual_seed(1)
    output = model(batch)
    Tacotron2Loss(guided_attention_weight=1.0)(output, batch).objective.backward()
    torch.manual_seed(1)
    with torch.no_grad():
        validation = model.eval()(batch)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return output._asdict(), gradients, validation._asdict()


@use_full_precision()
def assert_equal(model: Tacotron2, batch: Batch, tolerance: float) -> None:
    """Relative error of each output and gradient against the loop's."""
    outputs, gradients, validation = run(model, batch, "reference")
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert total.isfinite()
    our_outputs, our_gradients, our_validation = run(model, batch, "scan")
    for name, ours in (our_outputs | our_gradients).items():
        expected = (outputs | gradients)[name]
        # A bias before batch norm has no gradient but rounding.
        least = total if name.endswith("conv.bias") else 0
        error = (ours - expected).norm() / max(expected.norm(), least)
        assert error < tolerance, f"{name}: {error}"
    rtol, atol = (1e-3, 1e-5) if batch.mel.dtype is F32 else (1e-7, 1e-7)
    assert_close(our_validation, validation, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("changes", "lengths", "dtype", "tolerance"),
    [
        ({}, PADDED, F64, 1e-11),
        ({}, PADDED, F32, 1e-4),
        (NO_DROPOUT, PADDED, F64, 1e-11),
        (NO_DROPOUT, PADDED, F32, 1e-4),
        (NO_DROPOUT, ([17, 9], [131, 50]), F64, 1e-9),
        ({"n_frames_per_step": 3}, ([17, 9], [202, 50]), F64, 1e-9),
        ({}, ([60, 33], [600, 471]), F64, 1e-9),
    ],
)
def test_model_equals_the_reference(changes, lengths, dtype, tolerance):
    model = build(**changes).to(dtype)
    assert_equal(model, batch_of(*lengths, dtype, model.hparams.n_frames_per_step), tolerance)


def test_model_equals_the_reference_with_peaked_attention():
    """As after some training, when attention looks at one character at a time."""
    model, batch = build().double(), batch_of([9, 7], [30, 24], F64)
    model.decoder.attention_layer.v.linear_layer.weight.data *= 12
    assert model(batch).alignment.amax(2).mean() > 0.75
    assert_equal(model, batch, 1e-9)


def test_bf16_gradients_are_as_close_as_its_8_bits():
    batch = batch_of([17, 9, 5], [23, 41, 30], F32)
    results = [run(build(), batch, "scan")]
    results += [run(build(precision="bf16"), batch, part) for part in ("reference", "scan")]
    vectors = [
        (outputs["mel"], outputs["mel_postnet"], torch.cat([g.flatten() for g in grads.values()]))
        for outputs, grads, _ in results
    ]
    for ours in vectors[1:]:
        errors = [(x - y).norm() / y.norm() for x, y in zip(ours, vectors[0], strict=True)]
        assert 1e-4 < errors[0] < 0.05 and 1e-4 < errors[1] < 0.05 and 1e-3 < errors[2] < 0.1
    product, x, term = products.Product(torch.randn(5, 3).bfloat16(), 2), *torch.randn(2, 2, 5)
    assert torch.equal(product.plus(x[:, :3], term), term + product(x[:, :3]).float())  # in fp32


def test_with_onednn_and_without_the_results_are_the_same(monkeypatch):
    assert products.uses_onednn(torch.ones(1)) == torch.backends.mkldnn.is_available()
    assert_equal(build(), batch_of(*PADDED, F32), 1e-4)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not products.uses_onednn(torch.ones(1))
    assert_equal(build(), batch_of(*PADDED, F32), 1e-4)


STEPS_OF_ALL_KINDS = """
import torch
from conftest import build, noise_batch
from loss_function import Tacotron2Loss

torch.manual_seed(0)
for n_frames in (1, 2):
    model = build(decoder="scan", precision={precision!r}, n_frames_per_step=n_frames)
    for lengths in (([17, 9, 5], [23, 41, 1]), ([9], [20])):
        batch = noise_batch(*lengths, n_frames)
        Tacotron2Loss()(model(batch), batch).objective.backward()
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN")
@pytest.mark.parametrize(("precision", "cpu"), [("fp32", ""), ("fp32", "AVX2"), ("bf16", "")])
def test_no_product_runs_onednns_reference_implementation(precision, cpu):
    """That is a thousand times as slow. ``cpu`` is what oneDNN takes this processor for. (It calls
    all its LSTMs "ref", but the encoder's has the speed of other products.)"""
    if precision == "bf16" and not products.uses_onednn(torch.ones(1).bfloat16()):
        pytest.skip("this processor has no bfloat16")
    env = os.environ | {"ONEDNN_VERBOSE": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    env |= {"ONEDNN_MAX_CPU_ISA": cpu} if cpu else {}
    code = STEPS_OF_ALL_KINDS.format(precision=precision)
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    # onednn_verbose,v1,primitive,exec,cpu,inner_product,brg_matmul:avx512_core,...
    calls = re.findall(
        r"exec,cpu,(inner_product|matmul|convolution),([^,]*),(.*)", str(output.stdout, "utf8")
    )
    assert len(calls) > 300 and {kind for kind, *_ in calls} >= {"inner_product", "convolution"}
    assert not [call for call in calls if "ref" in call[1]]
