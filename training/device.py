"""The GPU or CPU to train on: its name, precision and memory."""

import ctypes
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
    if not chosen and not is_wsl():
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
        one = torch.empty(1, device=device)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        fix = "if it is virtual, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        raise UserError(f"GPU {device.index}: gives no memory ({reason}); {fix}") from None
    try:
        one.fill_(1).item()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise UserError(_why_no_kernel_runs(device, error)) from None


def _why_no_kernel_runs(device: torch.device, error: RuntimeError) -> str:
    """Says why the first kernel failed: most often because PyTorch was not built for this GPU."""
    name = torch.cuda.get_device_name(device)
    major, minor = torch.cuda.get_device_capability(device)
    problem = f"GPU {device.index}, {name}: cannot run PyTorch's kernels"
    if "no kernel image" not in str(error):
        reason = str(error).partition("\n")[0]
        return f"{problem} ({reason}); update the driver, or restart the computer"
    built_for = ", ".join(torch.cuda.get_arch_list())
    problem += (
        f": it has compute capability {major}.{minor}, and torch {torch.__version__} is built for "
        f"{built_for}"
    )
    if major < 5:
        return f"{problem}; no current PyTorch supports it: hide it with CUDA_VISIBLE_DEVICES=''"
    if (major, minor) < (7, 5):
        return f"{problem}; install PyTorch 2.14 or older, built with CUDA 12.6 (pytorch.org)"
    return f"{problem}; install the newest PyTorch, built with the newest CUDA (pytorch.org)"


def is_wsl() -> bool:
    """Returns whether this is Linux within Windows."""
    return "microsoft" in platform.release().lower()


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
    """Returns the model name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return f"CPU: {line.partition(':')[2].strip()}"
    return f"CPU: {platform.processor() or platform.machine()}"


def training_conditions(
    device: torch.device, hparams: HParams, decoder: str
) -> dict[str, str | int]:
    """Returns what must be the same in runs whose times are compared."""
    name = device_name(device)
    return {
        "device": f"{WORLD_SIZE} x {name}" if SEVERAL else name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "decoder": decoder,
        "precision": hparams.precision,
    }


def why_no_gpu() -> str:
    """Says why PyTorch finds no GPU although there is an NVIDIA driver; "" if there is none, or a
    GPU is found."""
    if torch.cuda.is_available() or not (
        shutil.which("nvidia-smi") or os.path.exists("/proc/driver/nvidia/version")
    ):
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA; install a build with CUDA, see pytorch.org"
    try:
        torch.cuda.init()
        reason = "torch.cuda.is_available() is False"
    except (RuntimeError, AssertionError) as error:  # e.g. a driver that is too old
        reason = " ".join(str(error).split())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is '{visible}')"
    return f"torch {torch.__version__}: {reason}{hidden}"


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


def may_be_out_of_memory(error: BaseException) -> bool:
    """Returns whether ``error`` means that memory has run out, or may mean it: cuDNN and cuBLAS do
    not always say. If it means something else, the smallest batch fails too."""
    signs = (
        "unable to find an engine",  # cuDNN, in which the allocator failed
        "CUBLAS_STATUS_NOT_INITIALIZED",  # cuBLAS, without memory for its handle
        "captures_underway",  # the allocator, after a CUDA graph capture failed (PyTorch < 2.12)
    )
    unclear = isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    return unclear or is_out_of_memory(error)


def free_cached_memory(device: torch.device) -> None:
    """Gives a GPU's unused memory back to it."""
    if device.type == "cuda":
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            # PyTorch before 2.12 cannot do it after the capture of a CUDA graph has failed.
            if "captures_underway" not in str(error):
                raise


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory(device: torch.device) -> float:
    """Returns the peak memory in GiB: this epoch's on a GPU, the whole process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
