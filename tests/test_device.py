"""What is set on a device before training, and why a GPU is not used."""

import os
import platform
from unittest.mock import Mock

import pytest
import torch

from cli import UserError
from hparams import create_hparams
from training.device import choose_device


@pytest.fixture
def gpu(monkeypatch):
    """A machine that claims to have a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GTX 1650")
    monkeypatch.setattr(torch, "ones", lambda *_, device: Mock())
    monkeypatch.setattr(os, "environ", {})
    yield monkeypatch
    monkeypatch.undo()
    choose_device(create_hparams())


def test_a_gpu_that_runs_no_kernels_or_lacks_the_precision_is_refused(gpu):
    with pytest.raises(UserError, match=r"setting precision=bf16: .* has 7\.5; use fp32"):
        choose_device(create_hparams("precision=bf16"))
    error = RuntimeError("CUDA error: no kernel image is available\nCUDA kernel errors might")
    gpu.setattr(torch, "ones", Mock(side_effect=error))
    with pytest.raises(UserError, match=r"^GPU 0, GTX 1650: runs no kernels \(CUDA error: .*$"):
        choose_device(create_hparams())


def test_precision_and_determinism_are_those_of_the_settings(gpu):
    gpu.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    for precision, allowed in (("tf32", True), ("bf16", False)):
        choose_device(create_hparams(f"precision={precision},deterministic={not allowed}"))
        assert torch.are_deterministic_algorithms_enabled() == cudnn.deterministic != allowed
        assert cuda.allow_tf32 == cudnn.allow_tf32 == allowed


def test_memory_expands_unless_the_user_chose_otherwise_or_the_system_is_wsl(gpu):
    choices = {}, {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    for system in ("6.8.0-generic", "6.6.87.2-microsoft-standard-WSL2"):
        gpu.setattr(platform, "release", lambda system=system: system)
        for chosen in choices:
            gpu.setattr(os, "environ", dict(chosen))
            choose_device(create_hparams())
            expands = "PYTORCH_CUDA_ALLOC_CONF" in os.environ
            assert expands == (system == "6.8.0-generic" and not chosen)
