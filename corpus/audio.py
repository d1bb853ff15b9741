"""The log-mel spectrogram, and Griffin-Lim, which turns it back into audio."""

import warnings
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


def magnitudes(mel: Tensor, hparams: Any) -> np.ndarray:
    """Returns magnitudes whose log-mel is nearly the given one: (n_mels, T_out) ->
    (n_fft / 2 + 1, T_out) float64.

    Ten multiplicative updates (Lee and Seung 1999) find them and keep them from becoming negative.
    Those from the pseudo-inverse are further from speech.
    """
    log_mel = torch.nan_to_num(mel.double()).clamp(-12, 8)  # an untrained model may predict any
    mel, basis = log_mel.exp().cpu().numpy(), mel_basis(hparams)
    sums = np.maximum(basis.sum(0)[:, None], 1e-10)  # 0 outside mel_fmin to mel_fmax
    estimate = basis.T @ mel
    for _ in range(10):
        estimate *= basis.T @ (mel / np.maximum(basis @ estimate, 1e-10)) / sums
    return estimate


def griffin_lim(mel: Tensor, hparams: Any) -> np.ndarray:
    """Returns the audio of a log-mel: intelligible, not natural, and always the same.

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
