"""What is set on a device before training: precision, the allocator."""

import os

import pytest
import torch

from cli import UserError
from device import choose_device, full_precision
from hparams import create_hparams

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def tf32_allowed() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture
def gpu(monkeypatch):
    """A machine that claims to have a GPU, with no allocator settings."""
    for name in ALLOCATOR:
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
    with pytest.raises(UserError, match=f"setting {setting}: .* GPU.*; use {instead}"):
        choose_device(create_hparams(setting))


def test_full_precision_turns_tf32_off_and_restores_it(gpu):
    for precision, allowed in (("tf32", (True, True)), ("bf16", (False, False))):
        choose_device(create_hparams(f"precision={precision}"))
        assert tf32_allowed() == allowed
        with pytest.raises(ZeroDivisionError), full_precision():
            assert tf32_allowed() == (False, False)
            raise ZeroDivisionError
        assert tf32_allowed() == allowed


@pytest.mark.parametrize("chosen", [{}, *({name: "backend:cudaMallocAsync"} for name in ALLOCATOR)])
def test_segments_expand_unless_the_user_chose_an_allocator(gpu, monkeypatch, chosen):
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    choose_device(create_hparams())
    expected = chosen or {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert {name: os.environ[name] for name in ALLOCATOR if name in os.environ} == expected
