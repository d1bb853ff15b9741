"""The GPU or CPU to train on: its name, precision and memory."""

import ctypes
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from cli import UserError
from hparams import HParams
from training.distributed import LOCAL_RANK, LOCAL_WORLD_SIZE, SEVERAL, WORLD_SIZE


def choose_device(hparams: HParams) -> torch.device:
    """Returns the GPU if there is one, else the CPU, and sets the precision and determinism that
    the settings ask for. Of several processes, each has its own GPU.

    Raises:
        UserError: a setting needs a GPU, and there is none, or there are more processes than GPUs.
    """
    if hparams.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
    # use_deterministic_algorithms(..., warn_only=True) does the same, but takes a second to import
    # Inductor.
    torch.set_deterministic_debug_mode("warn" if hparams.deterministic else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads it
    torch.backends.cudnn.deterministic = hparams.deterministic
    # TF32 rounds inputs to 10 bits; cuDNN uses it by default.
    torch.backends.cuda.matmul.allow_tf32 = hparams.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = hparams.precision == "tf32"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums stay in fp32
    if torch.cuda.is_available():
        if SEVERAL and (n := torch.cuda.device_count()) < LOCAL_WORLD_SIZE:
            problem = f"--nproc_per_node={LOCAL_WORLD_SIZE}: there are {n} GPUs"
            raise UserError(f"{problem}; use {n} or fewer processes")
        device = torch.device("cuda", LOCAL_RANK)
        _start_cuda(device, hparams.precision)
        return device
    if hparams.precision == "tf32":
        raise UserError("setting precision=tf32: needs an NVIDIA GPU, but there is none; use fp32")
    return torch.device("cpu")


def _start_cuda(device: torch.device, precision: str) -> None:
    # Every batch has another shape, which would fragment memory in blocks of fixed sizes. Blocks
    # that grow fail in WSL (PyTorch's issue 192330). PyTorch 2.8 to 2.11 warn that this name is
    # deprecated, but the new one does nothing in 2.9 (issue 183387).
    chosen = os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    if not chosen and "microsoft" not in platform.release().lower():  # WSL's kernel
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    # For each shape of a convolution, cuDNN makes a plan, which takes about 200 KiB of the CPU's
    # memory. By default each thread keeps the last 10,000. LJSpeech's batches are estimated to need
    # 8,000 in two threads; if each keeps 3,000, most are found again.
    os.environ.setdefault("TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT", "3000")
    torch.cuda.set_device(device)
    major, minor = torch.cuda.get_device_capability(device)
    if precision != "fp32" and major < 8:
        raise UserError(
            f"setting precision={precision}: needs compute capability 8.0 or more, and this GPU "
            f"has {major}.{minor}; use fp32"
        )
    try:
        torch.ones(1, device=device).item()  # the first kernel
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason, name = str(error).partition("\n")[0], torch.cuda.get_device_name(device)
        raise UserError(
            f"GPU {device.index}, {name}: runs no kernels ({reason}). It has compute capability "
            f"{major}.{minor}, and torch {torch.__version__} is built for "
            f"{', '.join(torch.cuda.get_arch_list())}: if that lacks it, install a build that has "
            "it (pytorch.org); else update the driver; if the GPU is virtual, set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        ) from None


@contextmanager
def use_full_precision() -> Iterator[None]:
    """Turns TF32 off, so that validation losses compare across precisions."""
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
    """Returns the model name of the GPU or CPU; what is fast on one may be slow on another."""
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    with suppress(OSError, KeyError):
        info = Path("/proc/cpuinfo").read_text()
        found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", info, re.MULTILINE))
        return f"CPU: {found['model name']}, family {found['cpu family']}, model {found['model']}"
    return f"CPU: {platform.processor() or platform.machine()}"


def training_conditions(model: torch.nn.Module) -> dict[str, str | int]:
    """Returns what must be the same in runs whose times are compared."""
    name = device_name(next(model.parameters()).device)
    return {
        "device": f"{WORLD_SIZE} x {name}" if SEVERAL else name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "decoder": model.decoder.implementation,
        "precision": model.hparams.precision,
    }


def why_no_gpu() -> str:
    """Says what PyTorch lacks if it finds no GPU although there is an NVIDIA driver; else ""."""
    has_driver = shutil.which("nvidia-smi") or os.path.exists("/proc/driver/nvidia/version")
    if torch.cuda.is_available() or not has_driver:
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA; install a build with CUDA, see pytorch.org"
    return f"torch {torch.__version__} finds none; update the driver, or see CUDA_VISIBLE_DEVICES"


def keep_memory() -> None:
    """Makes it cheap to get memory on a CPU: a step asks for gigabytes, and each new page is
    cleared first. Call this before creating any tensor.

    Pages of tensors have 2 MB where Linux allows it. With glibc, and without a GPU, what a step
    frees stays in the heap for the next one; by default large blocks go back to the system.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read at the first tensor; Linux only
    if platform.libc_ver()[0] == "glibc" and not torch.cuda.is_available():
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
        libc.mallopt(M_MMAP_MAX, 0)  # no block has a mapping of its own


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether ``error`` means that the GPU or CPU is out of memory."""
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError, or the CPU allocator's
        signs = (
            "out of memory",
            "can't allocate memory",
            "ALLOC_FAILED",  # cuBLAS and cuDNN
            "could not create a primitive",  # oneDNN
        )
        return any(sign in str(error) for sign in signs)
    return isinstance(error, MemoryError)


def free_cached_memory(device: torch.device) -> None:
    """Gives a GPU's unused memory back to it."""
    if device.type == "cuda":
        with suppress(RuntimeError):  # before PyTorch 2.12, after a CUDA graph was not captured
            torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory(device: torch.device) -> float:
    """Returns the peak memory in GiB: this epoch's on a GPU, the whole process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
