"""Sound files and their headers; the log-mel spectrogram."""

import os
import stat
import struct
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from torch import Tensor, nn

from cli import UserError
from hparams import HParams, audio_settings, format_overrides

CONVERT = "scripts/prepare_corpus.py --convert_to DIR"
NO_LENGTH = 2**63 - 1  # samples that libsndfile reports of a FLAC whose header has no length
STREAMED = 0x7FFFF000  # bytes, or more, in the header of a wav that sox or ffmpeg wrote to a pipe


# Sound files


class Stamp(NamedTuple):
    """Identifies a file's version."""

    size: int  # bytes
    mtime: int  # last change, ns
    device: int
    inode: int  # device and inode are the same for all names (links) of a file


class ClipError(UserError):
    """Says what is wrong with a clip. A report groups the errors that have the same ``kind``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def check_wav(path: str, hparams: HParams) -> tuple[int, Stamp]:
    """Returns the number of samples of a wav or flac, from its header, and its stamp.

    Raises:
        ClipError: the file is missing, unreadable or cut off, has another sampling rate, is not
            mono, or is shorter than one window of the mel.
    """
    header, stamp = check_header(path)
    # Reflection at both ends needs more than half an FFT.
    shortest = max(hparams.win_length, hparams.filter_length // 2 + 1)
    if header.samplerate != hparams.sampling_rate:
        changes = audio_settings(header.samplerate).items()
        changes = {name: value for name, value in changes if value != getattr(hparams, name)}
        fix = f"resample it to {hparams.sampling_rate} Hz ({CONVERT})"
        fix += f", or set {format_overrides(changes)}"
        raise ClipError("rate", f"{path}: sampling rate {header.samplerate} Hz; {fix}")
    if header.channels != 1:
        fix = f"mix it down to mono ({CONVERT})"
        raise ClipError("channels", f"{path}: {header.channels} channels; {fix}")
    if header.format not in ("WAV", "WAVEX", "FLAC"):  # in others a cut may go unnoticed
        problem = f"is {header.format}; convert it to wav or flac ({CONVERT})"
        raise ClipError("format", f"{path}: {problem}")
    if header.frames < shortest:
        fix = f"remove the line, or use a clip of {shortest} samples or more"
        raise ClipError("short", f"{path}: {header.frames} samples, too short for a mel; {fix}")
    return header.frames, stamp


def check_header(path: str) -> tuple[Any, Stamp]:
    """Returns soundfile's description of a sound file of any kind, and the file's stamp. Raises
    :class:`ClipError` if the file is missing, unreadable or cut off."""
    try:
        stamp = get_stamp(path)
        header = soundfile.info(path)
        promised, present = _data_bytes(path)
    except FileNotFoundError:
        message = f"{path}: no such file; fix its line, or set data_dir"
        raise ClipError("missing", message) from None
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror}); mend that"
        raise ClipError("unreadable", message) from None
    except (soundfile.LibsndfileError, TypeError) as error:  # TypeError: a .raw file
        message = f"{path}: not a readable sound file ({error}); replace it"
        raise ClipError("unreadable", message) from None
    if header.frames == NO_LENGTH or promised == 0 < present:
        message = f"{path}: its header has no length; make it again as a file, not through a pipe"
        raise ClipError("length", message)
    if present < promised < STREAMED:  # libsndfile reads what is there
        counts = f"its header says {promised:,} bytes of samples, but it has {present:,}"
        fix = "copy or convert it again, or remove the line"
        raise ClipError("cut", f"{path}: cut off: {counts}; {fix}")
    return header, stamp


def _data_bytes(path: str) -> tuple[int, int]:
    """Returns how many bytes of samples a wav file's header promises, and how many are there."""
    with open(path, "rb") as file:
        order = {b"RIFF": "<", b"RIFX": ">"}.get(file.read(12)[:4])
        while order and len(head := file.read(8)) == 8:
            name, size = struct.unpack(f"{order}4sI", head)
            if name == b"data":
                return size, os.fstat(file.fileno()).st_size - file.tell()
            file.seek(size + size % 2, os.SEEK_CUR)
    return 0, 0  # not a wav


def get_stamp(path: str) -> Stamp:
    """Returns a file's stamp. Raises OSError if it cannot be found."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(path)
    return Stamp(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)


# Mels


class MelSpectrogram(nn.Module):
    """Computes natural-log mel magnitudes; frames are centred on every ``hop_length``-th sample.

    With preset ``nvidia``, this is the spectrogram of NVIDIA's Tacotron 2, WaveGlow and HiFi-GAN:
    Slaney's mel scale and norm, reflect padding, floor 1e-5.
    """

    def __init__(self, hparams: HParams) -> None:
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


def mel_basis(hparams: HParams) -> np.ndarray:
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
