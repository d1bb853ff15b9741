"""Small modules with parameters, named as NVIDIA names them; dropout, masks, the end of speech."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LINGER_SECONDS = 0.5  # that attention may stay on the last symbol before speech is ended


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


def conv_batch_norm(in_dim: int, out_dim: int, kernel_size: int, gain: str) -> nn.Sequential:
    """Makes a convolution that is followed by batch norm."""
    return nn.Sequential(ConvNorm(in_dim, out_dim, kernel_size, gain=gain), nn.BatchNorm1d(out_dim))


class Prenet(nn.Module):
    """Bottleneck for the frames of the last step. Its dropout stays on, in inference too."""

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        step_dim = hparams.n_mel_channels * hparams.n_frames_per_step
        dims = [step_dim, hparams.prenet_dim, hparams.prenet_dim]
        self.p_dropout = hparams.p_prenet_dropout
        self.layers = nn.ModuleList(LinearNorm(dims[i], dims[i + 1], bias=False) for i in range(2))

    def forward(self, frames: Tensor) -> Tensor:  # (..., D_step) -> (..., D_prenet)
        for linear in self.layers:
            frames = dropout(F.relu(linear(frames)), self.p_dropout, training=True)
        return frames


class LocationLayer(nn.Module):
    """Turns the last and the summed attention weights into features of each symbol."""

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        n_filters = hparams.attention_location_n_filters
        self.location_conv = ConvNorm(
            2, n_filters, hparams.attention_location_kernel_size, bias=False
        )
        self.location_dense = LinearNorm(n_filters, hparams.attention_dim, bias=False, gain="tanh")

    def forward(self, weights: Tensor) -> Tensor:  # (B, 2, T_in) -> (B, T_in, D_attention)
        return self.location_dense(self.location_conv(weights).transpose(1, 2))


def restore_buffers(module: nn.Module, values: Sequence[Tensor]) -> None:
    """Sets a module's buffers, such as batch norm's running statistics, to ``values``."""
    for buffer, value in zip(module.buffers(), values, strict=True):
        buffer.copy_(value)


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Restores a module's buffers when the context ends."""
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
    """Draws a dropout mask, which is False (drop) with probability ``p``, exact to 2e-10."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=torch.uint8, device=device).bernoulli_(1 - p).bool()
    # Each draw gives two 32-bit numbers: several times as fast as bernoulli_.
    n = math.prod(shape)
    bits = torch.empty((n + 1) // 2, dtype=torch.int64).random_(-(2**63), None)
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    return (bits.view(torch.int32)[:n] >= threshold).view(shape)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Does what ``F.dropout`` does, several times faster on a CPU."""
    if not training or p == 0 or x.is_cuda:
        return F.dropout(x, p, training)
    return drop(x, draw_mask(p, x.shape, x.device), p)


def drop(x: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """Keeps the units that the ``mask`` of :func:`draw_mask` keeps; None: all of them."""
    return x if mask is None else torch.where(mask, x, 0) * (1 / (1 - p))


# Where speech ends


def end_probability(gate: Tensor, end_steps: int) -> Tensor:
    """Returns the probability (B, n_steps) that a clip has ended in the last ``end_steps`` steps,
    at each step, of gate logits (B, n_steps).

    Trained with ``mask_padding``, the gate sees each clip end once. So its probability p at a step
    is that of ending there if the clip has not ended before, and it has ended in some steps with
    1 - prod(1 - p). A clip whose end is uncertain may never have a p above a half, but it ends.
    Only the last steps count, since a little p in every step of a long clip would add up.
    """
    total = F.softplus(gate).cumsum(1)  # -log of the probability that it has not ended
    before = F.pad(total, (end_steps, 0))[:, : gate.size(1)]
    return -torch.expm1(before - total)


def has_ended(gate: Tensor, hparams: Any) -> Tensor:
    """Returns whether each clip has ended by each step: (B, n_steps), as the gate logits."""
    ends = end_probability(gate, hparams.end_steps) > hparams.end_threshold
    return ends.cumsum(1) > 0


def has_lingered(weights: Tensor, last_symbol: Tensor, hparams: Any) -> Tensor:
    """Returns whether attention has stayed on each clip's last symbol for ``LINGER_SECONDS``, by
    each step: (B, n_steps), of attention weights (B, n_steps, T_in) and symbols' indices (B,).

    A gate that was trained on sentences may know no end of a text as short as "Oh.".
    """
    index = last_symbol[:, None, None].expand(-1, weights.size(1), 1)
    on_last = weights.gather(2, index).squeeze(2) > 0.5  # (B, n_steps)
    step_seconds = hparams.hop_length * hparams.n_frames_per_step / hparams.sampling_rate
    n = math.ceil(LINGER_SECONDS / step_seconds)
    counts = F.pad(on_last.cumsum(1), (n, 0))  # of such steps so far
    lingered = counts[:, n:] - counts[:, :-n] == n
    return lingered.cumsum(1) > 0
