"""Small modules with parameters, named as NVIDIA names them, and the log-mel spectrogram."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
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
    """Length-preserving 1-D convolution, initialised in the same way."""

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


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers, such as batch norm's running statistics, at the end."""
    before = [buffer.clone() for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)


def length_mask(lengths: Tensor, n: int) -> Tensor:
    """Booleans (B, n) from lengths (B,): True before each length."""
    return torch.arange(n, device=lengths.device) < lengths[:, None]


def draw_mask(p: float, shape: Sequence[int], device: torch.device) -> Tensor:
    """Dropout mask: False (drop) with probability ``p``, exact to 2e-10."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=torch.uint8, device=device).bernoulli_(1 - p).bool()
    # Each draw gives two 32-bit numbers: ten times as fast as bernoulli_ on most CPUs.
    n = math.prod(shape)
    bits = torch.empty((n + 1) // 2, dtype=torch.int64).random_(-(2**63), None)
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    return (bits.view(torch.int32)[:n] >= threshold).view(shape)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """As ``F.dropout``, but several times faster on a CPU, and with a boolean mask."""
    if not training or p == 0 or x.is_cuda:
        return F.dropout(x, p, training)
    return x * draw_mask(p, x.shape, x.device) * (1 / (1 - p))


class MelSpectrogram(nn.Module):
    """Natural-log mel magnitudes; frames are centred on every ``hop_length``-th sample.

    With preset ``nvidia``, this is the spectrogram of NVIDIA's Tacotron 2, WaveGlow and HiFi-GAN:
    Slaney's mel scale and norm, reflect padding, floor 1e-5.
    """

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        self.n_fft, self.hop_length = hparams.filter_length, hparams.hop_length
        # In float64: a float32 FFT is off by up to 0.002 in the log of near-silent bands.
        window = torch.hann_window(hparams.win_length, dtype=torch.float64)
        self.register_buffer("window", window)
        self.register_buffer("mel_basis", torch.from_numpy(mel_basis(hparams)))

    def forward(self, waveform: Tensor) -> Tensor:
        """Log-mels of samples in [-1, 1].

        Args:
            waveform: (n_samples,) or (B, n_samples) floats, longer than ``filter_length / 2``.

        Returns:
            (..., n_mels, n_samples // hop_length + 1) float32
        """
        spectrum = torch.stft(
            waveform.double(),
            self.n_fft,
            self.hop_length,
            self.window.numel(),
            self.window,
            center=True,
            pad_mode="reflect",
            return_complex=True,
        )  # (..., n_fft / 2 + 1, T_out)
        return torch.log(torch.clamp(self.mel_basis @ spectrum.abs(), min=1e-5)).float()


def mel_basis(hparams: Any) -> np.ndarray:
    """Mel filters (n_mels, n_fft / 2 + 1) float64 for magnitudes."""
    import librosa  # here: it takes seconds, and is not needed if all mels are cached

    return librosa.filters.mel(
        sr=hparams.sampling_rate,
        n_fft=hparams.filter_length,
        n_mels=hparams.n_mel_channels,
        fmin=hparams.mel_fmin,
        fmax=hparams.mel_fmax,
        dtype=np.float64,
    )


def magnitudes(mel: Tensor, hparams: Any) -> np.ndarray:
    """Magnitudes whose log-mel is nearly the given one: (n_mels, T_out) -> (n_fft / 2 + 1, T_out)
    float64.

    By ten multiplicative updates (Lee and Seung 1999), which keep them from becoming negative.
    Those from the pseudo-inverse are further from speech (benchmarks/bench_griffin_lim.py).
    """
    log_mel = torch.nan_to_num(mel.double()).clamp(-12, 8)  # an untrained model may predict any
    mel, basis = log_mel.exp().cpu().numpy(), mel_basis(hparams)
    sums = np.maximum(basis.sum(0)[:, None], 1e-10)  # 0 outside mel_fmin to mel_fmax
    estimate = basis.T @ mel
    for _ in range(10):
        estimate *= basis.T @ (mel / np.maximum(basis @ estimate, 1e-10)) / sums
    return estimate


def griffin_lim(mel: Tensor, hparams: Any) -> np.ndarray:
    """Audio of a log-mel: intelligible, not natural. The same mel always sounds the same.

    Phases come from 60 iterations of the fast Griffin-Lim algorithm (Perraudin et al. 2013) on
    :func:`magnitudes`.

    Args:
        mel: (n_mels, T_out)

    Returns:
        ((T_out - 1) * hop_length,) float32 samples in [-1, 1]
    """
    import librosa

    if mel.size(1) < 2:  # one frame has no duration
        return np.zeros(0, np.float32)
    with warnings.catch_warnings():  # about sounds shorter than a window
        warnings.filterwarnings("ignore", message="n_fft=")
        samples = librosa.griffinlim(
            magnitudes(mel, hparams).astype(np.float32),
            n_iter=60,
            momentum=0.99,
            hop_length=hparams.hop_length,
            win_length=hparams.win_length,
            n_fft=hparams.filter_length,
            random_state=0,
        )
    return (samples / max(1.0, np.abs(samples).max())).astype(np.float32)
