"""What is set on a device before training, and why a GPU is not used."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import train
from cli import UserError
from hparams import create_hparams
from training.device import choose_device, full_precision, why_no_gpu

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def gpu(monkeypatch):
    """A machine that claims to have a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(os, "environ", {})
    yield
    monkeypatch.undo()
    choose_device(create_hparams())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "setting, instead", [("decoder=triton", "scan"), ("precision=tf32", "fp32")]
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


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_expand_unless_the_user_chose_an_allocator(gpu, monkeypatch, name):
    chosen = {name: "backend:cudaMallocAsync"} if name else {}
    monkeypatch.setattr(os, "environ", dict(chosen))
    choose_device(create_hparams())
    assert os.environ == (chosen or {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.parametrize(
    ("cuda", "visible", "error", "reason"),
    [
        (None, {}, "", " has no CUDA; install a build with CUDA, see pytorch.org"),
        ("12.1", {}, "The driver is too old.\nPlease", ": The driver is too old. Please"),
        ("12.1", HIDDEN, "No CUDA GPUs are", ": No CUDA GPUs are (CUDA_VISIBLE_DEVICES is '')"),
    ],
)
def test_training_says_before_it_starts_why_a_driver_is_not_used(
    cuda, visible, error, reason, monkeypatch, tmp_path, run, capsys
):
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path)} | visible)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(error)))
    is_available = Mock(return_value=False)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(train.data_utils, "load_data", Mock(side_effect=RuntimeError("so far")))
    with pytest.raises(RuntimeError, match="so far"):
        run("run")
    note = f"note: no GPU is used: torch {torch.__version__}{reason}\n"
    assert note in capsys.readouterr().out
    is_available.return_value = True
    assert why_no_gpu() == ""
    is_available.return_value = False
    os.environ["PATH"] = "/nowhere"
    assert why_no_gpu() == "" or Path("/proc/driver/nvidia/version").exists()
