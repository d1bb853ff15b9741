"""The GPU or the CPU that trains: which it is, its precision, its memory."""

import ctypes
import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hparams import HParams, UserError


def choose_device(hparams: HParams) -> torch.device:
    """The GPU if there is one, set to ``precision`` and, if asked, to repeat exactly."""
    if hparams.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
    torch.use_deterministic_algorithms(hparams.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which nothing here reads
    torch.backends.cudnn.deterministic = hparams.deterministic
    # TF32 rounds inputs to 10 bits; cuDNN's would be on by default.
    torch.backends.cuda.matmul.allow_tf32 = hparams.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = hparams.precision == "tf32"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums stay in fp32
    if torch.cuda.is_available():
        # Shapes differ in every batch: memory in fixed blocks would fall to pieces.
        if "PYTORCH_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        return torch.device("cuda")
    for name, value, instead in (("decoder", "graph", "scan"), ("precision", "tf32", "fp32")):
        if getattr(hparams, name) == value:
            raise UserError(
                f"setting {name}={value}: needs an NVIDIA GPU, and none is here; use {instead}"
            )
    return torch.device("cpu")


@contextmanager
def full_precision() -> Iterator[None]:
    """Products in fp32 even if ``precision`` is tf32: validation's losses compare."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def keep_memory() -> None:
    """Let a CPU's freed memory serve the next step, as PyTorch's allocator does on a GPU.

    Otherwise glibc returns large blocks, and every step gets them anew page by page. To be
    called before there is any tensor.
    """
    if torch.cuda.is_available():
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # larger pages: read at the first tensor
    if platform.libc_ver()[0] == "glibc":
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never trim
        libc.mallopt(M_MMAP_MAX, 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that the GPU or the CPU has no memory left."""
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError, and the CPU's
        signs = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # cuBLAS's and cuDNN's
        return any(sign in str(error) for sign in signs)
    return isinstance(error, MemoryError)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory(device: torch.device) -> float:
    """GiB: on a GPU since the epoch began, on a CPU of the process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
