"""What is set on a device before training, and why a GPU is not used."""

import os
import platform
from unittest.mock import Mock

import pytest
import torch

from cli import UserError
from hparams import create_hparams
from training.device import choose_device, use_full_precision, why_no_gpu


@pytest.fixture
def gpu(monkeypatch):
    """A machine that claims to have a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GTX 1080")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    monkeypatch.setattr(torch, "ones", lambda *_, device: Mock())
    monkeypatch.setattr(os, "environ", {})
    yield
    monkeypatch.undo()
    choose_device(create_hparams())


def test_a_gpu_that_runs_no_kernels_is_refused_with_what_torch_is_built_for(gpu, monkeypatch):
    error = RuntimeError("CUDA error: no kernel image is available\nCUDA kernel errors might")
    monkeypatch.setattr(torch, "ones", Mock(side_effect=error))
    message = (
        r"^GPU 0, GTX 1080: runs no kernels \(CUDA error: no kernel image is available\). It has "
        r"compute capability 8\.0, and torch \S+ is built for sm_75, sm_80: .*$"
    )
    with pytest.raises(UserError, match=message):
        choose_device(create_hparams())


def test_full_precision_turns_tf32_off_and_restores_it(gpu):
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    for precision, allowed in (("tf32", True), ("bf16", False)):
        choose_device(create_hparams(f"precision={precision}"))
        assert cuda.allow_tf32 == cudnn.allow_tf32 == allowed
        with pytest.raises(ZeroDivisionError), use_full_precision():
            assert not cuda.allow_tf32 and not cudnn.allow_tf32
            raise ZeroDivisionError
        assert cuda.allow_tf32 == cudnn.allow_tf32 == allowed


def test_a_precision_that_the_gpu_does_not_have_is_refused(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    choose_device(create_hparams())
    with pytest.raises(UserError, match=r"setting precision=bf16: .* has 7\.5; use fp32"):
        choose_device(create_hparams("precision=bf16"))


@pytest.mark.parametrize(
    ("system", "before", "expands"),
    [
        ("6.8.0-generic", {}, True),
        ("6.8.0-generic", {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, False),
        ("6.8.0-generic", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, False),
        ("6.6.87.2-microsoft-standard-WSL2", {}, False),
    ],
)
def test_segments_expand_where_they_can_unless_the_user_chose(
    gpu, monkeypatch, system, before, expands
):
    monkeypatch.setattr(os, "environ", dict(before))
    monkeypatch.setattr(platform, "release", lambda: system)
    choose_device(create_hparams())
    added = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if expands else {}
    assert {k: v for k, v in os.environ.items() if "ALLOC" in k} == before | added
    assert 0 < int(os.environ["TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT"]) < 10_000


def test_a_driver_that_is_not_used_says_why(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install a build with CUDA" in why_no_gpu()
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    error = RuntimeError("The driver is too old.\nPlease")
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
    assert why_no_gpu().endswith(": The driver is too old. Please (CUDA_VISIBLE_DEVICES is '')")
