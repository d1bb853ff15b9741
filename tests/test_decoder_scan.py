"""The fast recurrences equal the step-by-step loop, or say that they cannot."""

import copy
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import NO_DROPOUT, ROOT, build, noise_batch
from torch.autograd import grad
from torch.testing import assert_close

from data_utils import Batch
from decoder import private, products
from loss_function import Tacotron2Loss
from model import Tacotron2
from training.device import use_full_precision

PADDED = ([17, 9, 5], [23, 41, 1])  # text and mel lengths
F32, F64 = torch.float32, torch.float64


def batch_of(lengths: tuple, dtype: torch.dtype, n_frames_per_step: int = 1) -> Batch:
    batch = noise_batch(*lengths, n_frames_per_step)
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
        ({}, ([4, 3], [2, 1]), F64, 1e-11),
        ({"n_frames_per_step": 3}, ([17, 9], [202, 50]), F64, 1e-9),
        ({}, ([60, 33], [600, 471]), F64, 1e-9),
    ],
)
def test_model_equals_the_reference(changes, lengths, dtype, tolerance):
    """Also once attention looks at one character at a time, as after some training."""
    model = build(**changes).to(dtype)
    for sharpness in (1, 12):
        model.decoder.attention_layer.v.linear_layer.weight.data *= sharpness
        assert_equal(model, batch_of(lengths, dtype, model.hparams.n_frames_per_step), tolerance)


def test_without_pytorchs_private_operators_results_are_the_same(monkeypatch):
    model, batch = build(), batch_of(PADDED, F32)
    names = [name for name, operator in vars(private).items() if name.isupper() and operator]
    expected = run(model, batch, "scan")
    for missing in (*([name] for name in names), names):
        with monkeypatch.context() as patch:
            for name in missing:
                patch.setattr(private, name, None)
            assert_close(run(model, batch, "scan"), expected, rtol=1e-4, atol=1e-5)


def test_a_second_backward_is_right_or_refused(batch):
    """Gradients overwrite the saved gates, and must never be computed from overwritten ones."""
    model = build(decoder="scan")
    loss, weights = model(batch).mel.square().sum(), [*model.decoder.attention_rnn.parameters()]
    first = grad(loss, weights, retain_graph=True)
    assert_close(grad(loss, weights), first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        grad(loss, weights)


def test_bf16_gradients_are_as_close_as_its_8_bits():
    vectors = []
    for precision in ("fp32", "bf16"):
        outputs, gradients, _ = run(build(precision=precision), batch_of(PADDED, F32), "scan")
        gradient = torch.cat([gradient.flatten() for gradient in gradients.values()])
        vectors.append((outputs["mel"], outputs["mel_postnet"], gradient))
    for x, y, bound in zip(*vectors, (0.05, 0.05, 0.1), strict=True):
        assert 1e-4 < (x - y).norm() / x.norm() < bound


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
