"""Small modules with parameters, named as NVIDIA names them; dropout and masks."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearNorm(nn.Module):
    """Linear layer, initialised Xavier-uniform for the nonlinearity ``gain`` that follows."""

    def __init__(self, in_dim: int, out_dim: int, bias: bool = True, gain: str = "linear") -> None:
        super().__init__()
        self.linear_layer = nn.Linear(in_dim, out_dim, bias=bias)
        nn.init.xavier_uniform_(self.linear_layer.weight, nn.init.calculate_gain(gain))

    def forward(self, x: Tensor) -> Tensor:  # (..., in_dim) -> (..., out_dim)
        return self.linear_layer(x)


class ConvNorm(nn.Module):
    """Length-preserving 1-D convolution, with the same initialisation."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        bias: bool = True,
        gain: str = "linear",
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, padding="same", bias=bias)
        nn.init.xavier_uniform_(self.conv.weight, nn.init.calculate_gain(gain))

    def forward(self, x: Tensor) -> Tensor:  # (B, in_channels, T) -> (B, out_channels, T)
        return self.conv(x)


def restore_buffers(module: nn.Module, values: Sequence[Tensor]) -> None:
    """Sets a module's buffers, such as batch norm's running statistics, to ``values``."""
    for buffer, value in zip(module.buffers(), values, strict=True):
        buffer.copy_(value)


@contextmanager
def preserved_buffers(module: nn.Module) -> Iterator[None]:
    """Restores a module's buffers at the end."""
    before = [buffer.clone() for buffer in module.buffers()]
    try:
        yield
    finally:
        restore_buffers(module, before)


def length_mask(lengths: Tensor, n: int) -> Tensor:
    """Returns booleans (B, n) of lengths (B,): True before each length."""
    return torch.arange(n, device=lengths.device) < lengths[:, None]


def repeat_steps(x: Tensor, n_frames_per_step: int) -> Tensor:
    """Returns values of decoder steps (B, n_steps, ...) for each frame: (B, T_out, ...)."""
    x = x.unsqueeze(2)
    return x.expand(-1, -1, n_frames_per_step, *x.shape[3:]).flatten(1, 2)


def draw_mask(p: float, shape: Sequence[int], device: torch.device) -> Tensor:
    """Draws a dropout mask: False (drop) with probability ``p``, exact to 2e-10."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=torch.uint8, device=device).bernoulli_(1 - p).bool()
    # Each draw gives two 32-bit numbers: ten times as fast as bernoulli_ on most CPUs.
    n = math.prod(shape)
    bits = torch.empty((n + 1) // 2, dtype=torch.int64).random_(-(2**63), None)
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    return (bits.view(torch.int32)[:n] >= threshold).view(shape)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Does what ``F.dropout`` does, several times faster on a CPU, with a boolean mask."""
    if not training or p == 0 or x.is_cuda:
        return F.dropout(x, p, training)
    return x * draw_mask(p, x.shape, x.device) * (1 / (1 - p))
