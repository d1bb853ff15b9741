"""The log-mel spectrogram."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class MelSpectrogram(nn.Module):
    """Computes natural-log mel magnitudes; frames are centred on every ``hop_length``-th sample.

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
        """Returns the log-mels of samples in [-1, 1].

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
    """Returns the mel filters for magnitudes: (n_mels, n_fft / 2 + 1) float64."""
    import librosa  # here: it takes seconds, and is not needed if all mels are cached

    return librosa.filters.mel(
        sr=hparams.sampling_rate,
        n_fft=hparams.filter_length,
        n_mels=hparams.n_mel_channels,
        fmin=hparams.mel_fmin,
        fmax=hparams.mel_fmax,
        dtype=np.float64,
    )
