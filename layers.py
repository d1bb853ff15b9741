"""Small modules with parameters, named as NVIDIA names them, and the log-mel spectrogram."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearNorm(nn.Module):
    """Linear layer with Xavier-uniform weights for the nonlinearity ``gain`` that follows it."""

    def __init__(self, in_dim: int, out_dim: int, bias: bool = True, gain: str = "linear") -> None:
        super().__init__()
        self.linear_layer = nn.Linear(in_dim, out_dim, bias=bias)
        nn.init.xavier_uniform_(self.linear_layer.weight, nn.init.calculate_gain(gain))

    def forward(self, x: Tensor) -> Tensor:  # (..., in_dim) -> (..., out_dim)
        return self.linear_layer(x)


class ConvNorm(nn.Module):
    """Length-preserving 1-D convolution with Xavier-uniform weights, initialised likewise."""

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


def length_mask(lengths: Tensor, n: int) -> Tensor:
    """(B,) lengths to (B, n) booleans, True within each length."""
    return torch.arange(n, device=lengths.device) < lengths[:, None]


def draw_mask(p: float, shape: Sequence[int], device: torch.device) -> Tensor:
    """Booleans for dropout: False, to drop, with probability ``p`` (to 2e-10)."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=torch.uint8, device=device).bernoulli_(1 - p).bool()
    # Two 32-bit numbers of each draw: bernoulli_ takes ten times as long on most CPUs.
    n = math.prod(shape)
    bits = torch.empty((n + 1) // 2, dtype=torch.int64).random_(-(2**63), None)
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    return (bits.view(torch.int32)[:n] >= threshold).view(shape)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """``F.dropout``, which on a CPU is several times slower and keeps a float mask."""
    if not training or p == 0 or x.is_cuda:
        return F.dropout(x, p, training)
    return x * draw_mask(p, x.shape, x.device) * (1 / (1 - p))


class MelSpectrogram(nn.Module):
    """Natural-log mel magnitudes, the frames centred on every ``hop_length``-th sample.

    With ``hparams`` of preset ``nvidia`` this is the spectrogram that NVIDIA's Tacotron 2,
    WaveGlow and HiFi-GAN share: Slaney's mel scale and norm, reflect padding, floor 1e-5.
    """

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        self.n_fft, self.hop_length = hparams.filter_length, hparams.hop_length
        # In float64: a float32 FFT is off by up to 0.002 in the log of near-silent bands.
        window = torch.hann_window(hparams.win_length, dtype=torch.float64)
        self.register_buffer("window", window)
        self.register_buffer("mel_basis", torch.from_numpy(mel_basis(hparams)))

    def forward(self, waveform: Tensor) -> Tensor:
        """Log-mels of float samples in [-1, 1].

        Args:
            waveform: (n_samples,) or (B, n_samples), more than ``filter_length / 2`` samples.

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
    """Weights (n_mels, n_fft / 2 + 1) float64 that make a mel of magnitudes."""
    import librosa  # here, since it takes seconds, and where all mels are cached it can wait

    return librosa.filters.mel(
        sr=hparams.sampling_rate,
        n_fft=hparams.filter_length,
        n_mels=hparams.n_mel_channels,
        fmin=hparams.mel_fmin,
        fmax=hparams.mel_fmax,
        dtype=np.float64,
    )


def griffin_lim(mel: Tensor, hparams: Any) -> np.ndarray:
    """Samples float32 in [-1, 1], ``(T_out - 1) * hop_length`` of them, for a log-mel.

    Magnitudes come from the mel by the pseudo-inverse, clamped, and phases from 32 iterations of
    Griffin and Lim (1984): intelligible, not natural.

    Args:
        mel: (n_mels, T_out)
    """
    import librosa

    if mel.size(1) < 2:  # one frame is a moment, not a sound
        return np.zeros(0, np.float32)
    mel = torch.nan_to_num(mel.double()).clamp(-12, 8)  # an untrained model may give anything
    # Non-negative least squares finds the same magnitudes, in gigabytes.
    inverse = np.linalg.pinv(mel_basis(hparams))  # (n_fft / 2 + 1, n_mels)
    with warnings.catch_warnings():  # of sounds shorter than a window
        warnings.filterwarnings("ignore", message="n_fft=")
        samples = librosa.griffinlim(
            np.maximum(inverse @ mel.exp().cpu().numpy(), 0).astype(np.float32),
            hop_length=hparams.hop_length,
            win_length=hparams.win_length,
            n_fft=hparams.filter_length,
            random_state=0,
        )
    return (samples / max(1.0, np.abs(samples).max())).astype(np.float32)
