"""Products with a weight that many calls share, as fast as the device can."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 256  # up to this many, a plain product on a CPU is faster transposed


def multiplier(weight: Tensor, rows: int) -> Callable[..., Tensor]:
    """Makes ``multiply(x, bias=None)``: x (..., K) @ weight.T + bias, in the weight's dtype, for
    about ``rows`` rows per call.

    On a CPU, oneDNN packs the weight (N, K) once for all calls, which makes products of few rows
    two to three times as fast. PyTorch has these operators for its compiler, so they are not
    public: without them, or with ``torch.backends.mkldnn`` off, it is a plain product.
    """
    dtype, product = weight.dtype, F.linear
    if weight.device.type == "cpu" and _has_onednn(dtype):
        ops = torch.ops.mkldnn
        weight = ops._reorder_linear_weight(weight.contiguous(), rows)

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return ops._linear_pointwise(x, weight, bias, "none", [], "")

    elif not weight.is_cuda and rows <= FEW_ROWS:
        weight = weight.contiguous()

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if bias is None and x.dim() == 2:
                return (weight @ x.t()).t()  # faster for few rows
            return F.linear(x, weight, bias)

    def multiply(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(x.to(dtype), weight, bias if bias is None else bias.to(dtype))

    return multiply


def adder(weight: Tensor, rows: int) -> Callable[..., Tensor]:
    """Makes ``add(out, x, in_place=True)``: out (B, N) + x (B, K) @ weight.T, on a GPU in one
    kernel."""
    multiply = multiplier(weight, rows)

    def add(out: Tensor, x: Tensor, in_place: bool = True) -> Tensor:
        if out.is_cuda and weight.dtype == out.dtype:
            return torch.addmm(out, x, weight.t(), out=out if in_place else None)
        product = multiply(x)
        return out.add_(product) if in_place else product.add_(out)

    return add


def _has_onednn(dtype: torch.dtype) -> bool:
    ops = torch.ops.mkldnn
    names = ["_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"]
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if not all(hasattr(ops, name) for name in names):
        return False
    # A CPU without AVX-512 cannot pack bfloat16.
    return dtype is torch.float32 or (dtype is torch.bfloat16 and ops._is_mkldnn_bf16_supported())
