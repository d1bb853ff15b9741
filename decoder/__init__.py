"""The teacher-forced decoder: checks before training which implementation it may use.

    scan        the recurrences of decoder.scan, fast; on a GPU in CUDA graphs
    reference   the model's own modules, step by step: slow

scan computes what the modules of model.py do, from their weights. You need not know it to change a
module: :func:`check_fast_path` notices, and training calls the modules.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from decoder import graphs
from layers import preserve_buffers


def check_fast_path(model: nn.Module, batch: Any) -> str | None:
    """Checks that scan computes what the decoder's modules do, on a batch of a few frames.

    It compares outputs, and the gradient of each parameter, in training and in evaluation mode. If
    they differ, someone has changed a module, and the decoder is set to use its modules. Nothing
    else in the model changes.

    Returns:
        a note that says how they differ, or of the error that the modules raise; None if they are
        equal, or the modules are used anyway

    Raises:
        RuntimeError: the modules or scan fail, perhaps for want of memory.
    """
    decoder = model.decoder
    for training in (True, False):
        if decoder.implementation == "reference":
            return None
        decoder.implementation = "reference"
        expected = _results(model, batch, training)
        if isinstance(expected, Exception):
            return f"the model's modules raise {_in_one_line(expected)}"
        decoder.implementation = "scan"
        problem = _difference(expected, _results(model, batch, training))
        if problem and graphs.turn_off():  # the loops themselves may be right
            print("note: CUDA graphs give other results: training goes on without, more slowly")
            problem = _difference(expected, _results(model, batch, training))
        if problem:
            decoder.implementation = "reference"
            return f"scan differs from the decoder's modules ({_in_one_line(problem)})"
    return None


def _results(model: nn.Module, batch: Any, training: bool) -> dict[str, Tensor] | Exception:
    """Returns outputs and gradients, always with the same dropout; or the error that the model
    raises. If that may be for want of memory, it is raised here too."""
    devices = [batch.mel.device] if batch.mel.is_cuda else []
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        with torch.random.fork_rng(devices), preserve_buffers(model), _fp32(model, training):
            torch.manual_seed(0)
            output = model(batch)
            results = {name: getattr(output, name) for name in ("mel", "gate", "alignment")}
            total = sum((x * x.detach().cos()).sum() for x in results.values())
            # Here, where buffers are preserved, since backward reads them too.
            gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
    except Exception as error:  # a changed module may raise anything
        if _may_be_memory(error):
            raise
        return error.with_traceback(None)  # which holds tensors
    for name, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            results[f"gradient of {name}"] = gradient
    return {name: value.detach() for name, value in results.items()}


def _may_be_memory(error: Exception) -> bool:
    """Returns whether ``error`` may only mean that memory has run out."""
    signs = "CUBLAS_STATUS_NOT_INITIALIZED|ALLOC_FAILED|unable to find an engine|memory|primitive"
    return isinstance(error, MemoryError | RuntimeError) and bool(re.search(signs, str(error)))


@contextmanager
def _fp32(model: nn.Module, training: bool) -> Iterator[None]:
    """Puts the model in training or evaluation mode, and in fp32, in which errors stand out from
    rounding."""
    before = model.training, model.training_dtype
    model.train(training)
    model.training_dtype = None
    try:
        # cuDNN has no backward of an LSTM in evaluation mode.
        with torch.backends.cudnn.flags(enabled=training, allow_tf32=False):
            yield
    finally:
        was_training, model.training_dtype = before
        model.train(was_training)


def _difference(
    expected: dict[str, Tensor], results: dict[str, Tensor] | Exception
) -> str | Exception | None:
    """Returns in words the first difference that is not rounding, or the error that was raised
    instead of results; None if all is equal."""
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
