"""Matrix products as fast as a CPU can: by oneDNN where it is faster than PyTorch's default, MKL.

PyTorch has oneDNN's operators for its compiler, so they are not public. Without them, or with
``torch.backends.mkldnn`` off, and on a GPU, these are plain products.
"""

import re
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor


class Product:
    """Multiplies by a weight (N, K), in its dtype; ``rows`` is about how many rows a call has.

    On a CPU, oneDNN packs the weight once for all calls, which makes products of few rows two to
    three times as fast. On a GPU the weight is not copied: its values may change between calls.
    """

    def __init__(self, weight: Tensor, rows: int) -> None:
        self.weight, self.packed = weight, None
        if weight.device.type == "cpu" and has_onednn(weight.dtype):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x (..., K) @ weight.T + bias: (..., N)."""
        x = x.to(self.weight.dtype)
        bias = bias if bias is None else bias.to(x.dtype)
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return F.linear(x, self.weight, bias)

    def plus(self, x: Tensor, term: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns x (B, K) @ weight.T + term (B, N), in the term's dtype; writes it to ``out``,
        which may be the term itself."""
        if term.is_cuda and self.weight.dtype == term.dtype:
            return torch.addmm(term, x, self.weight.t(), out=out)  # in one kernel
        return torch.add(term, self(x), out=out)


def weight_gradient(d_output: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient (N, K) of a weight that multiplied x (T, B, K), given that of the
    product, d_output (T, B, N). The result has the dtype of x, the product that of d_output."""
    d_output, rows = d_output.flatten(0, 1), x.flatten(0, 1).to(d_output.dtype)
    if x.device.type == "cpu" and has_onednn(d_output.dtype) and onednn_is_faster():
        product = torch.ops.mkldnn._linear_pointwise(d_output.t(), rows.t(), None, "none", [], "")
    else:
        product = d_output.t() @ rows
    return product.to(x.dtype)


def has_onednn(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN can multiply in ``dtype`` here."""
    ops = torch.ops.mkldnn
    names = ["_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"]
    is_on = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if not is_on or not all(hasattr(ops, name) for name in names):
        return False
    # A CPU without AVX-512 cannot pack bfloat16.
    return dtype is torch.float32 or (dtype is torch.bfloat16 and ops._is_mkldnn_bf16_supported())


@cache
def onednn_is_faster() -> bool:
    """Returns whether oneDNN is faster than MKL in products of many rows too.

    On AMD's processors MKL uses AVX2. From Zen 5 on, which is family 26, AVX-512 is twice as fast;
    before, it is not, and Intel's processors get AVX-512 from either library.
    """
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    family = re.search(r"^cpu family\s*: (\d+)$", info, re.MULTILINE)
    return "AuthenticAMD" in info and family is not None and int(family[1]) >= 26
