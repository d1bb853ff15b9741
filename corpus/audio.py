"""Sound files: their headers, names and conversion; the log-mel spectrogram."""

import io
import os
import stat
import struct
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import soxr
import torch
from torch import Tensor, nn

from cli import UserError, replace_file
from hparams import HParams, audio_settings, format_overrides

FOLDERS = "wavs/", "wav/", ""  # where the audio of metadata.csv is
SUFFIXES = ".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif"  # in order of preference
CONVERT = "scripts/prepare_corpus.py --convert_to DIR"
NO_LENGTH = 2**63 - 1  # samples that libsndfile reports of a FLAC whose header has no length
STREAMED = 0x7FFFF000  # bytes, or more, in the header of a wav that sox or ffmpeg wrote to a pipe
MAX_COUNTED = 512  # bytes of a header, at most, that a recorder may have counted as samples
SILENT_PEAK = 1e-3  # -60 dB of full scale: a clip that stays below it has no speech
MARGIN = 0.05  # seconds that trimming leaves around the speech
Sounds = dict[str, list[Path]]  # by the last parts of their simplified paths


# Sound files


class Stamp(NamedTuple):
    """Identifies a file's version. Inode numbers would not: some mounts change them."""

    path: str  # without symbolic links
    size: int  # bytes
    mtime: int  # last change, ns


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
    check_length(path, header.frames, hparams)
    return header.frames, stamp


def check_length(path: str, n_samples: int, hparams: HParams) -> None:
    """Raises :class:`ClipError` if a clip is too short for a mel."""
    # Reflection at both ends needs more than half an FFT.
    shortest = max(hparams.win_length, hparams.filter_length // 2 + 1)
    if n_samples < shortest:
        fix = f"remove the line, or use a clip of {shortest} samples or more"
        raise ClipError("short", f"{path}: {n_samples} samples, too short for a mel; {fix}")


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
    """Returns how many bytes of samples a wav file's header promises, and how many are there. Some
    recorders promise the header, or a part of it, as well: then nothing is missing."""
    with open(path, "rb") as file:
        order = {b"RIFF": "<", b"RIFX": ">"}.get(file.read(12)[:4])
        while order and len(head := file.read(8)) == 8:
            name, size = struct.unpack(f"{order}4sI", head)
            if name == b"data":
                start = file.tell()
                present = os.fstat(file.fileno()).st_size - start
                counts_header = 0 < size - present <= min(start, MAX_COUNTED)
                return present if counts_header else size, present
            file.seek(size + size % 2, os.SEEK_CUR)
    return 0, 0  # not a wav


def get_stamp(path: str) -> Stamp:
    """Returns a file's stamp. Raises OSError if it cannot be found."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(path)
    return Stamp(os.path.realpath(path), status.st_size, status.st_mtime_ns)


# Names


def simplify(name: str) -> str:
    """Returns a path in small letters, composed, with / and without spaces or a sound's suffix."""
    name = "".join(name.split()).replace("\\", "/")
    name = unicodedata.normalize("NFC", name).casefold().removeprefix("./")
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def index_sounds(paths: Iterable[Path]) -> Sounds:
    """Returns an index of sound files for :func:`find_sound`."""
    sounds = defaultdict(list)
    for path in paths:
        _, _, last = simplify(str(path)).rpartition("/")
        sounds[last].append(path)
    return sounds


def find_sound(name: str, sounds: Sounds) -> Path | None:
    """Returns the sound file that ``name``, an ID or a path, means: the file's path ends as the
    name does or, in a list from another machine, the name ends as the path does. None if there is
    none, or if several fit equally well."""
    key = simplify(name)
    _, _, last = key.rpartition("/")
    by_rank = defaultdict(list)
    for path in sounds.get(last, ()):
        whole = simplify(str(path))
        ends_alike = f"/{whole}".endswith(f"/{key}")
        from_elsewhere = f"/{key}".endswith(f"/{whole}") and ".." not in key
        if ends_alike or from_elsewhere:
            by_rank[rank_sound(path, name)].append(path)
    if not by_rank:
        return None
    best = by_rank[min(by_rank)]
    return best[0] if len(best) == 1 else None


def rank_sound(path: Path, name: str) -> tuple[bool, int, int]:
    """Ranks a sound file that ``name`` can mean; the lowest is best. The same spelling comes first,
    then the folder where a list's audio usually is, then the format."""
    written = name.removesuffix(path.suffix)
    spelled = path.with_suffix("")
    is_exact = f"/{spelled}".endswith(f"/{written}")
    folder = simplify(str(path)).removesuffix(simplify(name))
    place = FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
    return not is_exact, place, SUFFIXES.index(path.suffix.lower())


# Conversion


def check_source(path: str, hparams: HParams) -> tuple[int, Stamp]:
    """Returns the number of samples that a sound file of any kind will have once converted, and its
    stamp. Raises :class:`ClipError` as :func:`check_wav` does."""
    header, stamp = check_header(path)
    n_samples = round(header.frames * hparams.sampling_rate / header.samplerate)
    check_length(path, n_samples, hparams)
    return n_samples, stamp


def read_source(path: str, max_peak: float = 2) -> tuple[np.ndarray, int]:
    """Returns the samples of a sound file of any kind, (n_samples,) float32, with the mean of all
    channels, and the sampling rate. Lossy formats may exceed 1.

    Raises:
        ClipError: they cannot be read, are not finite, exceed ``max_peak``, or are all but silent.
    """
    try:
        with soundfile.SoundFile(path) as sound:
            rate, n_promised = sound.samplerate, sound.frames
            channels = sound.read(dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError) as error:
        message = f"{path}: not a readable sound file ({error}); replace it"
        raise ClipError("unreadable", message) from None
    if len(channels) != n_promised:
        message = f"{path}: not as long as its header says; replace it"
        raise ClipError("cut", message)
    peak = np.abs(channels).max(initial=0)
    if not np.isfinite(peak):
        raise ClipError("not finite", f"{path}: has samples that are not finite; replace it")
    if peak > max_peak:
        message = f"{path}: has a sample of {peak:g}, beyond {max_peak:g}; scale it down"
        raise ClipError("loud", message)
    samples = channels.mean(axis=1)
    loudest = channels.std(axis=0).max()
    n_channels = channels.shape[1]
    if samples.std() < 0.1 * loudest / n_channels:  # of one channel alone, 1 / n would remain
        problem = f"its {n_channels} channels cancel each other out"
        message = f"{path}: {problem}; keep one (sox IN.wav OUT.wav remix 1)"
        raise ClipError("phase", message)
    if np.abs(samples).max() - abs(samples.mean()) < SILENT_PEAK:  # a constant is silent too
        message = f"{path}: is silent (peak {peak:g}); remove its line"
        raise ClipError("silent", message)
    return samples, rate


def convert_sound(path: str, wav: Path, rate: int, trim_db: float) -> None:
    """Writes a sound file as a wav, mono with 16 bits, trimmed unless ``trim_db`` is 0."""
    samples, old_rate = read_source(path)
    if old_rate != rate:
        samples = soxr.resample(samples, old_rate, rate)
    if trim_db:
        samples = trim(samples, rate, trim_db)
    peak = np.abs(samples).max(initial=1)  # resampling may exceed 1, too
    steps = np.rint(samples * (32768 / peak))
    steps = steps.clip(-32768, 32767).astype(np.int16)
    wav.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(wav) as file:
        file.write(encode_wav(steps, rate))


def encode_wav(samples: np.ndarray, rate: int) -> bytes:
    """Returns samples (n,), of int16 or floats, as a wav file of 16 bits. Write it by Python:
    soundfile would not notice that a disk is full."""
    content = io.BytesIO()
    soundfile.write(content, samples, rate, "PCM_16", format="WAV")
    return content.getvalue()


def encode_npy(mel: np.ndarray) -> bytes:
    """Returns an array as an .npy file. Write it by Python: numpy would not say that a disk is
    full."""
    content = io.BytesIO()
    np.save(content, mel)
    return content.getvalue()


def trim(samples: np.ndarray, rate: int, trim_db: float) -> np.ndarray:
    """Cuts off both ends, where they stay ``trim_db`` below the loudest 25 ms, but for a margin."""
    import librosa  # here: it takes seconds

    _, (start, end) = librosa.effects.trim(
        samples, top_db=trim_db, frame_length=rate // 40, hop_length=rate // 160
    )
    margin = round(MARGIN * rate)
    return samples[max(start - margin, 0) : end + margin]


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
