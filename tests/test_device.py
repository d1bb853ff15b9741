"""What is set on a device before training, and why a GPU is not used."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import train
from cli import UserError
from device import choose_device, full_precision, why_no_gpu
from hparams import create_hparams

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
TORCH = f"torch {torch.__version__}"


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
    "setting, instead", [("decoder=graph", "scan"), ("precision=tf32", "fp32")]
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(setting, instead):
    with pytest.raises(UserError, match=f"setting {setting}: .* GPU.*; use {instead}"):
        choose_device(create_hparams(setting))


def test_full_precision_turns_tf32_off_and_restores_it(gpu):
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    for precision, allowed in (("tf32", True), ("bf16", False)):
        choose_device(create_hparams(f"precision={precision}"))
        assert cuda.allow_tf32 == cudnn.allow_tf32 == allowed
        with pytest.raises(ZeroDivisionError), full_precision():
            assert not cuda.allow_tf32 and not cudnn.allow_tf32
            raise ZeroDivisionError
        assert cuda.allow_tf32 == cudnn.allow_tf32 == allowed


@pytest.mark.parametrize("chosen", [{}, *({name: "backend:cudaMallocAsync"} for name in ALLOCATOR)])
def test_segments_expand_unless_the_user_chose_an_allocator(gpu, monkeypatch, chosen):
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    choose_device(create_hparams())
    expected = chosen or {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert {name: os.environ[name] for name in ALLOCATOR if name in os.environ} == expected


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine with an NVIDIA driver, and a PyTorch with CUDA that finds no GPU."""
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "error", "reason"),
    [
        (None, "The NVIDIA driver is too old.\nPlease", "The NVIDIA driver is too old. Please"),
        ("", "No CUDA GPUs are", "No CUDA GPUs are (CUDA_VISIBLE_DEVICES is '')"),
    ],
)
def test_why_cuda_does_not_start_is_said(driver, monkeypatch, visible, error, reason):
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(error)))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert why_no_gpu() == f"{TORCH}: {reason}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_no_gpu() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", "/nowhere")
    if not Path("/proc/driver/nvidia/version").exists():
        assert why_no_gpu() == ""


def test_training_says_that_torch_has_no_cuda_before_it_starts(driver, monkeypatch, run, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(train.data_utils, "load_data", Mock(side_effect=RuntimeError("so far")))
    with pytest.raises(RuntimeError, match="so far"):
        run("run")
    assert f"note: no GPU is used: {TORCH} has no CUDA; install a" in capsys.readouterr().out
