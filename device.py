"""The GPU or the CPU that trains: which it is, its precision, its memory."""

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from cli import UserError
from hparams import HParams


def choose_device(hparams: HParams) -> torch.device:
    """The GPU if there is one, set to ``precision`` and, if asked, to repeat exactly."""
    if hparams.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
    # use_deterministic_algorithms(..., warn_only=True), but that takes a second to import Inductor.
    torch.set_deterministic_debug_mode("warn" if hparams.deterministic else "default")
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


def device_name(device: torch.device) -> str:
    """The model of the GPU or the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return f"CPU: {line.partition(':')[2].strip()}"
    return f"CPU: {platform.processor() or platform.machine()}"


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def why_no_gpu() -> str:
    """Why PyTorch uses no GPU though there is an NVIDIA driver; "" if it does, or there is none."""
    if torch.cuda.is_available() or not (
        shutil.which("nvidia-smi") or os.path.exists("/proc/driver/nvidia/version")
    ):
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA; install one that has, see pytorch.org"
    try:
        torch.cuda.init()
        reason = "torch.cuda.is_available() says no"
    except (RuntimeError, AssertionError) as error:  # such as a driver that is too old
        reason = " ".join(str(error).split())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is '{visible}')"
    return f"torch {torch.__version__}: {reason}{hidden}"


def use_large_pages() -> None:
    """Let a CPU's tensors have pages of 2 MB, so that a step does not get its memory in pieces of
    4 KB, each cleared. To be called before there is any tensor.

    What is freed goes back to the system, so that a process holds what it needs and no more. A
    heap that keeps it all (glibc's ``M_MMAP_MAX=0``, no trimming) gains a few percent at most, and
    grows to gigabytes where blocks of many sizes come and go.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read at the first tensor; Linux alone


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that the GPU or the CPU has no memory left."""
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError, and the CPU's
        signs = ["out of memory", "can't allocate memory", "ALLOC_FAILED"]  # cuBLAS's and cuDNN's
        signs.append("could not create a primitive")  # oneDNN's
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
