"""The teacher-forced decoder: which implementation training uses, checked before it starts.

    triton      fused kernels, for NVIDIA GPUs
    scan        the same recurrences in PyTorch, for any device
    reference   the model's own modules, step by step: slow

scan and triton compute what the modules of model.py do, from their weights. Someone who changes a
module need not know them: :func:`check_fast_path` notices, and training calls the modules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import CalledProcessError
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from decoder import graphs, scan
from layers import preserved_buffers

SMALL = 100_000  # elements of the weights whose gradients are compared


def recurrences(implementation: str) -> ModuleType:
    """Returns the module with ``decode``: decoder.triton, or scan for other names."""
    if implementation != "triton":
        return scan
    from decoder import triton  # here: it needs Triton, which only some machines have

    return triton


def fastest_decoder(device: torch.device) -> tuple[str, str]:
    """Returns the implementation that should be the fastest for training on ``device``.

    Returns:
        its name, and why it is not triton; "" on a CPU
    """
    if device.type != "cuda":
        return "scan", ""
    try:
        recurrences("triton")
    except Exception as error:  # missing, or not made for this PyTorch
        return "scan", f"Triton cannot be used ({_in_one_line(error)})"
    if torch.cuda.get_device_capability(device) < (7, 5):
        return "scan", "decoder=triton needs a GPU of compute capability 7.5 or more"
    return "triton", ""


def use_scan(decoder: nn.Module) -> None:
    """Makes ``decoder`` use scan from now on, and frees what triton kept."""
    decoder.implementation = "scan"
    graphs.release_memory()


def fall_back_to_scan(decoder: nn.Module, problem: str | Exception) -> str:
    """Makes ``decoder`` use scan from now on; returns a note that says so."""
    use_scan(decoder)
    return f"{triton_fails(problem)}; training uses decoder=scan"


def triton_fails(problem: str | Exception) -> str:
    """Says that triton fails, and why."""
    if isinstance(problem, CalledProcessError) or "C compiler" in str(problem):
        # Triton compiles its launchers when they are first used.
        problem = "it needs a C compiler and Python's headers; install gcc and python3-dev"
    return f"decoder=triton fails ({_in_one_line(problem)})"


def check_fast_path(model: nn.Module, batch: Any) -> list[str]:
    """Checks that the fast path computes what the modules do, on a batch of a few frames.

    If triton fails, the decoder uses scan from then on. If outputs or gradients still differ,
    someone has changed a module, and the encoder or the decoder uses its modules. Nothing else of
    the model changes.

    Returns:
        a note for each of the two that differs, or a single one on what the modules raise

    Raises:
        RuntimeError: the modules or scan fail, perhaps for want of memory.
    """
    notes = []
    chosen = {model.encoder: model.encoder.implementation}
    chosen[model.decoder] = model.decoder.implementation
    if chosen[model.decoder] == "auto":
        decoder, reason = fastest_decoder(batch.mel.device)
        chosen[model.decoder] = decoder
        notes += [f"{reason}; training uses decoder=scan"] if reason else []
    for part in chosen:
        part.implementation = "reference"
    expected = _results(model, batch)
    if isinstance(expected, Exception):
        if _may_be_memory(expected):
            raise expected
        reason = f"the model's modules raise {_in_one_line(expected)}"
        return [*notes, f"{reason}; training uses them"]
    for part, implementation in chosen.items():
        part.implementation = implementation
        problem = _difference(expected, _results(model, batch))
        if problem and implementation == "triton" and part is model.decoder:
            notes.append(fall_back_to_scan(part, problem))
            problem = _difference(expected, _results(model, batch))
        if isinstance(problem, Exception) and _may_be_memory(problem):
            raise problem
        if problem:
            part.implementation = "reference"
            notes.append(
                f"{type(part).__name__}: scan differs from its modules ({_in_one_line(problem)}); "
                "training uses the modules, which is slower"
            )
    return notes


def _results(model: nn.Module, batch: Any) -> dict[str, Tensor] | Exception:
    """Returns outputs and gradients of the small weights, always with the same dropout; or the
    error that the model raises."""
    device = batch.mel.device
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), preserved_buffers(model), _training_in_fp32(model):
            torch.manual_seed(0)
            output = model(batch)
            results = {name: getattr(output, name) for name in ("mel", "gate", "alignment")}
            total = sum((x * x.detach().cos()).sum() for x in results.values())
            weights = {name: p for name, p in model.named_parameters() if p.numel() < SMALL}
            # Within preserved_buffers: backward reads the buffers too.
            gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
    except Exception as error:  # a changed module may raise anything
        return error.with_traceback(None)  # which holds tensors
    for name, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            results[f"gradient of {name}"] = gradient
    return results


def _may_be_memory(error: Exception) -> bool:
    """Returns whether ``error`` says no more of the modules than that memory may have run out."""
    unclear = "CUBLAS_STATUS_NOT_INITIALIZED", "unable to find an engine"  # cuDNN's
    is_unclear = isinstance(error, RuntimeError) and any(text in str(error) for text in unclear)
    return is_unclear or isinstance(error, torch.OutOfMemoryError)


@contextmanager
def _training_in_fp32(model: nn.Module) -> Iterator[None]:
    """Puts the model in training mode and fp32, where more than rounding errors stand out."""
    before = model.training, model.training_dtype
    model.train()
    model.training_dtype = None
    try:
        yield
    finally:
        training, model.training_dtype = before
        model.train(training)


def _difference(
    expected: dict[str, Tensor], results: dict[str, Tensor] | Exception
) -> str | Exception | None:
    """Returns the first difference that is not rounding, in words, or the error that was raised
    instead of results; None if there is none."""
    if isinstance(results, Exception):
        return results
    if unmatched := expected.keys() ^ results.keys():
        return f"only one of them has the {min(unmatched)}"
    gradients = [value.norm() for name, value in expected.items() if name.startswith("gradient")]
    for name, value in expected.items():
        # The gradient of a bias before batch norm is nothing but rounding.
        least = 1e-3 * max(gradients) if name.startswith("gradient") else 0
        value = value.nan_to_num()
        error = (results[name].nan_to_num() - value).norm()
        if not error <= 1e-3 * max(value.norm(), least):
            return f"{name} differs by {error / value.norm():.1g} of its size"
    return None


def _in_one_line(problem: str | Exception) -> str:
    if isinstance(problem, Exception):
        problem = f"{type(problem).__name__}: {problem}"
    return problem.partition("\n")[0]
