"""What is set on a device before training: precision, threads, the allocator."""

import os

import pytest
import torch

from cli import UserError
from device import choose_device, full_precision
from hparams import create_hparams


def allowed() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says that it has a GPU, with nothing set."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield
    monkeypatch.undo()
    choose_device(create_hparams())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("setting", "instead"), [("decoder=graph", "scan"), ("precision=tf32", "fp32")]
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(setting, instead):
    message = f"setting {setting}: needs an NVIDIA GPU, and none is here; use {instead}"
    with pytest.raises(UserError, match=message):
        choose_device(create_hparams(setting))


def test_in_full_precision_tf32_is_off_and_then_as_it_was(gpu):
    choose_device(create_hparams("precision=tf32"))
    assert allowed() == (True, True)
    with pytest.raises(ZeroDivisionError), full_precision():
        assert allowed() == (False, False)
        raise ZeroDivisionError
    assert allowed() == (True, True)
    choose_device(create_hparams("precision=bf16"))
    with full_precision():
        assert allowed() == (False, False)
    assert allowed() == (False, False)


def test_memory_for_shapes_that_differ_comes_in_segments_that_grow(gpu):
    choose_device(create_hparams())
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_users_allocator_wins(gpu, monkeypatch, name):
    monkeypatch.setenv(name, "backend:cudaMallocAsync")
    choose_device(create_hparams())
    names = {key: value for key, value in os.environ.items() if "ALLOC_CONF" in key}
    assert names == {name: "backend:cudaMallocAsync"}
