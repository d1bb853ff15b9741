"""Filelists, clips, the mel cache, and batches.

    filelist --load_clips--> clips --open_mels--> mels --MelDataset, collate--> Batch

Whatever is wrong with a filelist or a clip raises :class:`UserError` before training starts,
with one line per problem: place, value and fix.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from batching import EpochBatchSampler, plan_batches
from hparams import HParams, UserError
from layers import MelSpectrogram
from text import symbols, text_to_sequence, unknown_characters

VALIDATION_SEED = 1234  # the same validation batches for every run, whatever its settings
MEL_VERSION = 1  # raise it when MelSpectrogram gives other values: caches are made again
progress = partial(tqdm, disable=None, dynamic_ncols=True)  # None: on a terminal, not in a log
SILENCE = 1e-3  # -60 dB of full scale: a clip that stays below it holds no speech


class Clip(NamedTuple):
    """One line of a filelist."""

    path: str  # of the wav file
    text: str  # as it stands in the filelist
    ids: list[int]  # symbols of the cleaned text
    n_frames: int  # of its mel: n_samples // hop_length + 1
    place: str  # "filelist:line", for messages


class Batch(NamedTuple):
    """Clips side by side, the longest text first; zeros beyond each clip's end."""

    text: Tensor  # (B, T_in) int64
    text_lengths: Tensor  # (B,) int64, descending
    mel: Tensor  # (B, n_mels, T_out) float32 log-mels
    mel_lengths: Tensor  # (B,) int64
    gate: Tensor  # (B, T_out) float32: 1 at the last frame and beyond it

    def to(self, device: torch.device) -> "Batch":
        """The batch on ``device``; from pinned memory without waiting for the copy."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))


# Clips


def load_clips(filelists: str, hparams: HParams) -> list[Clip]:
    """The clips of one or more filelists, joined with ``+``, from headers alone.

    A line is ``path|text``; a relative path starts from ``hparams.data_dir``.

    Raises:
        UserError: what is wrong, one line per problem: a missing or malformed filelist, a clip
            whose wav file or text cannot be used, no clips at all.
    """
    if hparams.n_symbols < len(symbols):
        raise UserError(f"setting n_symbols={hparams.n_symbols}: use {len(symbols)} or more")
    if not os.path.isdir(hparams.data_dir or "."):
        raise UserError(
            f"setting data_dir={hparams.data_dir}: no such folder; name the corpus's, "
            "which scripts/prepare_ljspeech.py downloads"
        )
    try:
        text_to_sequence("", hparams.text_cleaners)
    except ValueError as error:
        raise UserError(f"setting text_cleaners: {error}") from None
    clips, problems = [], []
    for filelist in filelists.split("+"):
        lines = read_list(filelist.strip())
        for number, line in enumerate(progress(lines, filelist, unit="clip", leave=False), 1):
            if line.strip():
                place = f"{filelist.strip()}:{number}"
                try:
                    clips.append(_parse_line(line, place, hparams))
                except UserError as error:
                    problems.append(f"{place}: {error}")
    refuse(problems)
    if not clips:
        raise UserError(f"{filelists}: has no clips; write lines of path|text")
    return clips


def refuse(problems: Sequence[str], most: int = 20) -> None:
    """Raise the problems, if there are any, as one :class:`UserError`, a line each."""
    if len(problems) > most:
        problems = [*problems[:most], f"and {len(problems) - most:,} more problems like these"]
    if problems:
        raise UserError("\n".join(problems))


def report_left_out(texts: Iterable[tuple[str, str]], hparams: HParams) -> None:
    """Print the characters that no symbol stands for, once each.

    Args:
        texts: pairs of (place, text); the first place is named.
    """
    places = {}
    for place, text in texts:
        for character in unknown_characters(text, hparams.text_cleaners):
            places.setdefault(character, place)
    for character, place in sorted(places.items()):
        print(f"note: {place}: {character!r} (U+{ord(character):04X}) is no symbol: left out")


def read_list(filelist: str) -> list[str]:
    """The lines of a filelist, empty ones too.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        lines = Path(filelist).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(
            f"filelist '{filelist}': {error.strerror}; scripts/prepare_ljspeech.py writes "
            "filelists, and training_files and validation_files name them"
        ) from None
    for number, line in enumerate(lines, 1):
        try:
            lines[number - 1] = line.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = f"{line[error.start]:#04x}"
            raise UserError(
                f"{filelist}:{number}: byte {byte} is not UTF-8; save as UTF-8"
            ) from None
    return lines


def _parse_line(line: str, place: str, hparams: HParams) -> Clip:
    path, bar, text = line.partition("|")
    path, text = path.strip(), text.strip()
    if not bar or not path or "|" in text:
        raise UserError(f"'{line}' is not path|text; write a path, one |, and the text")
    path = os.path.join(hparams.data_dir, path)
    n_samples = check_wav(path, hparams)
    ids = speakable_ids(text, hparams)
    return Clip(path, text, ids, n_samples // hparams.hop_length + 1, place)


def speakable_ids(text: str, hparams: HParams) -> list[int]:
    """Symbols of ``text`` once cleaned.

    Raises:
        UserError: it has no letter and no phone, a phone is unknown, or a cleaner is.
    """
    try:
        ids = text_to_sequence(text, hparams.text_cleaners)
    except ValueError as error:
        raise UserError(str(error)) from None
    if not any(symbols[i].isalpha() or symbols[i].startswith("@") for i in ids):
        raise UserError(f"text '{text}' has nothing to speak once cleaned; mend or remove it")
    return ids


def check_wav(path: str, hparams: HParams) -> int:
    """Number of samples of a wav file, from its header.

    Raises:
        UserError: the file is missing or unreadable, of another rate, not mono, or shorter
            than the half FFT window that the mel's reflect padding needs.
    """
    try:
        header = soundfile.info(path)
    except (soundfile.LibsndfileError, OSError, TypeError) as error:  # TypeError: a .raw file
        if not os.path.exists(path):
            raise UserError(f"{path}: no such file; mend its line, or set data_dir") from None
        raise UserError(f"{path}: not a readable sound file ({error}); replace it") from None
    if header.samplerate != hparams.sampling_rate:
        raise UserError(
            f"{path}: sampling rate {header.samplerate} Hz; resample it to "
            f"{hparams.sampling_rate} Hz, or set sampling_rate"
        )
    if header.channels != 1:
        raise UserError(f"{path}: {header.channels} channels; mix it down to mono")
    if header.frames <= hparams.filter_length // 2:
        raise UserError(
            f"{path}: {header.frames} samples, too short for a mel; remove the line, or use a "
            f"clip of more than {hparams.filter_length // 2} samples"
        )
    return header.frames


def read_wav(path: str) -> np.ndarray:
    """Samples (n_samples,) float32 in [-1, 1] of a mono wav file of any sample format.

    Raises:
        UserError: samples are not finite, beyond [-1, 1], or all but silent.
    """
    try:
        samples, _ = soundfile.read(path, dtype="float32")
    except (soundfile.LibsndfileError, OSError) as error:
        raise UserError(f"{path}: not a readable sound file ({error}); replace it") from None
    peak = float(np.abs(samples).max()) if len(samples) else 0.0
    if not np.isfinite(peak):
        raise UserError(f"{path}: has samples that are not finite; replace it")
    if peak > 1:
        raise UserError(f"{path}: has a sample of {peak:g}, beyond [-1, 1]; scale it down")
    if peak - abs(float(samples.mean())) < SILENCE:  # a constant is no sound either
        raise UserError(f"{path}: is silent (peak {peak:g}); remove its line")
    return samples


# Mels

Mels = Callable[[Clip], np.ndarray]  # a clip's log-mel, (T_out, n_mels) float32


class _Compute(Dataset):
    """A clip's mel, or a message of what is wrong with its samples; runs in loader workers."""

    def __init__(self, clips: Sequence[Clip], hparams: HParams, check_only: bool = False) -> None:
        self.clips, self.check_only = clips, check_only
        self.spectrogram = MelSpectrogram(hparams)

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, i: int) -> np.ndarray | str:
        try:
            return self.mel(self.clips[i])
        except UserError as error:
            return f"{self.clips[i].place}: {error}"

    def mel(self, clip: Clip) -> np.ndarray:
        samples = read_wav(clip.path)
        if self.check_only:
            return samples[:0]
        return self.spectrogram(torch.from_numpy(samples)).T.contiguous().numpy()


class _MelCache:
    """Mels packed one after the other in one file, mapped into memory when first used."""

    def __init__(self, path: Path, clips: Sequence[Clip], n_mels: int) -> None:
        ends = np.cumsum([clip.n_frames for clip in clips]).tolist()
        self.path, self.shape, self.mels = path, (ends[-1], n_mels), None
        self.rows = {
            clip.path: slice(end - clip.n_frames, end)
            for clip, end in zip(clips, ends, strict=True)
        }

    def __call__(self, clip: Clip) -> np.ndarray:
        if self.mels is None:  # opened by the process that reads it: maps do not pickle
            self.mels = np.load(self.path, mmap_mode="r")
        return np.array(self.mels[self.rows[clip.path]])

    def is_complete(self) -> bool:
        try:
            mels = np.load(self.path, mmap_mode="r")
            return mels.shape == self.shape and mels.dtype == np.float32
        except (OSError, ValueError, EOFError):
            return False

    def write(self, clips: Sequence[Clip], hparams: HParams) -> None:
        """Compute every mel, in parallel; the file appears under its name when complete."""
        size = self.shape[0] * self.shape[1] * 4
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"setting mel_cache_dir={hparams.mel_cache_dir}: {error.strerror}; name a folder"
            ) from None
        free = shutil.disk_usage(self.path.parent).free
        if size > free:
            raise UserError(
                f"{self.path}: the mel cache needs {size / 1e9:.1f} GB and {free / 1e9:.1f} GB are "
                "free; set mel_cache_dir to a larger disk, or cache_mels=False"
            )
        part = self.path.with_name(f"{self.path.name}.part-{os.getpid()}")
        try:
            mels = np.lib.format.open_memmap(part, "w+", np.float32, self.shape)
            for clip, mel in zip(clips, _run(_Compute(clips, hparams), "mels"), strict=True):
                mels[self.rows[clip.path]] = mel
            mels.flush()
            os.replace(part, self.path)
        finally:
            part.unlink(missing_ok=True)


def open_mels(clips: Iterable[Clip], hparams: HParams) -> Mels:
    """What gives each of ``clips`` its mel: from the cache, which is made if it is not there,
    or computed at every call with ``cache_mels=False``. Either way every clip's samples have
    been checked.

    The cache is one file in ``mel_cache_dir``, named after all that its content depends on:
    the audio settings and each wav file's path, size and time of change.

    Raises:
        UserError: clips whose samples cannot be used, one line each; no room for the cache.
    """
    by_path = {clip.path: clip for clip in clips}
    clips = [by_path[path] for path in sorted(by_path)]
    if not hparams.cache_mels:
        for _ in _run(_Compute(clips, hparams, check_only=True), "checking clips"):
            pass
        return _Compute(clips, hparams).mel
    audio = ("sampling_rate", "filter_length", "hop_length", "win_length")
    audio += ("n_mel_channels", "mel_fmin", "mel_fmax")
    status = [os.stat(clip.path) for clip in clips]
    key = {
        "version": MEL_VERSION,
        "audio": {name: getattr(hparams, name) for name in audio},
        "files": [
            (os.path.abspath(clip.path), s.st_size, s.st_mtime_ns)
            for clip, s in zip(clips, status, strict=True)
        ],
    }
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    cache = _MelCache(Path(hparams.mel_cache_dir, f"{name}.npy"), clips, hparams.n_mel_channels)
    if not cache.is_complete():
        cache.write(clips, hparams)
    return cache


def _run(jobs: _Compute, what: str) -> Iterable[np.ndarray]:
    """Results of all jobs in order, by one process per core.

    Raises:
        UserError: at the end, the messages of the jobs that failed.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = cores if len(jobs) > 8 else 0
    generator = torch.Generator()  # so that the loader does not draw from the training's
    loader = DataLoader(
        jobs, batch_size=None, num_workers=workers, collate_fn=_as_is, generator=generator
    )
    problems = []
    for result in progress(loader, desc=what, unit="clip"):
        if isinstance(result, str):
            problems.append(result)
        if not problems:
            yield result
    refuse(problems)


def _as_is(item: object) -> object:
    return item


# Batches


class MelDataset(Dataset):
    """``dataset[i]`` is the ids (T_in,) int64 and the mel (T_out, n_mels) of clip ``i``."""

    def __init__(self, clips: Sequence[Clip], mels: Mels) -> None:
        self.clips, self.mels = clips, mels

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.clips[i].ids), torch.from_numpy(self.mels(self.clips[i]))


def collate(clips: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    """A batch of (ids (T_in,), mel (T_out, n_mels)), padded to the longest of each."""
    clips = sorted(clips, key=lambda clip: -len(clip[0]))
    B, n_mels = len(clips), clips[0][1].size(1)
    text_lengths = torch.tensor([len(ids) for ids, _ in clips])
    mel_lengths = torch.tensor([len(mel) for _, mel in clips])
    text = torch.zeros(B, int(text_lengths.max()), dtype=torch.int64)
    mels = torch.zeros(B, n_mels, int(mel_lengths.max()))
    for i, (ids, mel) in enumerate(clips):
        text[i, : len(ids)] = ids
        mels[i, :, : len(mel)] = mel.T
    gate = (torch.arange(mels.size(2)) >= mel_lengths[:, None] - 1).float()
    return Batch(text, text_lengths, mels, mel_lengths, gate)


def training_sampler(clips: Sequence[Clip], hparams: HParams) -> EpochBatchSampler:
    """The batches of every epoch, by the batching settings.

    Raises:
        UserError: a base batch size larger than the set, or a clip longer than the capacity.
    """
    if hparams.batch_size > len(clips):
        raise UserError(
            f"setting batch_size={hparams.batch_size}: {hparams.training_files} has {len(clips)} "
            f"clips; use at most {len(clips)}"
        )
    capacity = None
    frame = hparams.hop_length / hparams.sampling_rate  # seconds
    if hparams.batch_capacity_seconds:
        capacity = int(hparams.batch_capacity_seconds / frame)
    elif hparams.batch_capacity:
        capacity = hparams.batch_capacity
    longest = max(clips, key=lambda clip: clip.n_frames)
    if capacity is not None and capacity < longest.n_frames:
        fix = f"batch_capacity={longest.n_frames}"
        if hparams.batch_capacity_seconds:
            fix = f"batch_capacity_seconds={math.ceil(longest.n_frames * frame * 100) / 100}"
        raise UserError(
            f"{longest.place}: {longest.path} has {longest.n_frames} frames, above the batch "
            f"capacity of {capacity}; set {fix} or more"
        )
    return EpochBatchSampler(
        [clip.n_frames for clip in clips],
        seed=hparams.seed,
        strategy=hparams.batching_strategy,
        batch_size=hparams.batch_size,
        dynamic_batch_size=hparams.dynamic_batch_size,
        batch_randomization=hparams.batch_randomization,
        lrf=hparams.lrf,
        bucket_size=hparams.bucket_size,
        bucket_edges=hparams.bucket_edges,
        n_buckets=hparams.n_buckets,
        n_bins=hparams.n_bins,
        capacity=capacity,
    )


def validation_batches(clips: Sequence[Clip], hparams: HParams) -> list[list[int]]:
    """RAND with the base batch size (Sec. 6): one list of batches for every strategy."""
    plan = plan_batches(
        [clip.n_frames for clip in clips],
        strategy="RAND",
        batch_size=hparams.batch_size,
        dynamic_batch_size=False,
        batch_randomization=False,
        seed=VALIDATION_SEED,
    )
    return [indices.tolist() for indices in plan]


def make_loader(dataset: MelDataset, batches: Iterable[list[int]], hparams: HParams) -> DataLoader:
    """Batches of ``dataset`` in the order of ``batches``; its workers live on across epochs."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=hparams.num_workers,
        persistent_workers=hparams.num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its own, so that loading draws nothing from the training's
    )
