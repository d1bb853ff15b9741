"""Matrix products as fast as a CPU makes them: by oneDNN, whose kernels use all of a processor's
vector instructions. MKL, PyTorch's default, uses AVX2 at most on AMD's processors.

Without oneDNN's operators (decoder/private.py), with ``torch.backends.mkldnn`` off, and on a GPU,
these are plain products.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder import private


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x (..., K) @ weight.T + bias in the weight's dtype, (..., N), for a weight (N, K)."""
    x = x.to(weight.dtype)
    bias = bias if bias is None else bias.to(x.dtype)
    if not uses_onednn(weight):
        return F.linear(x, weight, bias)
    # For a weight whose transpose is contiguous, oneDNN has its fastest kernel; for one that is not
    # dense, only its reference implementation, a thousand times as slow. PyTorch copies such an x.
    return _onednn(x, weight.t().contiguous().t(), bias)


class Product:
    """Multiplies by one weight (N, K) many times, in its dtype, with about ``rows`` rows each time.

    oneDNN packs the weight once for all calls, which makes products of few rows two to three times
    as fast. On a GPU the weight is not copied: its values may change between calls.
    """

    def __init__(self, weight: Tensor, rows: int) -> None:
        self.weight, self.packed = weight, None
        if uses_onednn(weight):
            self.packed = private.ONEDNN_PACK(weight, rows)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x (..., K) @ weight.T: (..., N)."""
        x = x.to(self.weight.dtype)
        return F.linear(x, self.weight) if self.packed is None else _onednn(x, self.packed)

    def plus(self, x: Tensor, term: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns x (B, K) @ weight.T + term (B, N), in the term's dtype; writes it to ``out``,
        which may be the term itself."""
        if term.is_cuda and self.weight.dtype == term.dtype:
            return torch.addmm(term, x, self.weight.t(), out=out)  # in one kernel
        return torch.add(term, self(x), out=out)


def weight_gradient(d_output: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient (N, K) of a weight that multiplied x (..., K), given that of the
    product, d_output (..., N). The result has the dtype of x, the product that of d_output."""
    d_output, rows = d_output.flatten(0, -2), x.flatten(0, -2).to(d_output.dtype)
    if uses_onednn(d_output):
        # PyTorch copies what comes first, mostly the smaller one.
        return multiply(rows.t(), d_output.t()).t().to(x.dtype)
    return (d_output.t() @ rows).to(x.dtype)


def uses_onednn(tensor: Tensor) -> bool:
    """Returns whether oneDNN multiplies by ``tensor``: on a CPU, in fp32, or bf16 with AVX-512."""
    is_on = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if (
        tensor.device.type != "cpu"
        or not is_on
        or not (private.ONEDNN_LINEAR and private.ONEDNN_PACK)
    ):
        return False
    if tensor.dtype is torch.bfloat16:
        return bool(private.ONEDNN_HAS_BF16 and private.ONEDNN_HAS_BF16())
    return tensor.dtype is torch.float32


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return private.ONEDNN_LINEAR(x, weight, bias, "none", [], "")
