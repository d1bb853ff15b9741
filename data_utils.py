"""Filelists, clips, the mel cache, and batches.

    filelists --load_data--> clips --open_mels--> mels --MelDataset, collate--> Batch

Whatever is wrong with a filelist or a clip raises :class:`UserError` before training starts,
with one line per problem: place, value and fix.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import stat
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import soundfile
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from batching import EpochBatchSampler, batch_statistics, plan_batches, solve_randomness
from checkpoint import making
from device import n_cores
from hparams import AUDIO, HParams, UserError
from layers import MelSpectrogram
from text import symbols, text_to_sequence, unknown_characters

VALIDATION_SEED = 1234  # the same validation batches for every run, whatever its settings
MEL_VERSION = 1  # raise it when MelSpectrogram gives other values: caches are made again
progress = partial(tqdm, disable=None, dynamic_ncols=True)  # None: on a terminal, not in a log
SILENCE = 1e-3  # -60 dB of full scale: a clip that stays below it holds no speech
MAX_SKIPPED = 0.01  # of a set's clips, with on_bad_clip=skip


class Clip(NamedTuple):
    """One line of a filelist."""

    path: str  # of the wav file
    text: str  # as it stands in the filelist
    ids: list[int]  # symbols of the cleaned text
    n_frames: int  # of its mel: n_samples // hop_length + 1
    place: str  # "filelist:line", for messages
    stamp: "Stamp"  # of the wav file as it was checked


class Stamp(NamedTuple):
    """What tells that a file is another than it was."""

    size: int  # bytes
    mtime: int  # ns, of its last change
    device: int
    inode: int  # with the device, the same for all names of one file


class Batch(NamedTuple):
    """Clips side by side, the longest text first; zeros beyond each clip's end."""

    text: Tensor  # (B, T_in) int64
    text_lengths: Tensor  # (B,) int64, descending
    mel: Tensor  # (B, n_mels, T_out) float32 log-mels
    mel_lengths: Tensor  # (B,) int64
    gate: Tensor  # (B, T_out) float32: 1 at the last frame and beyond it
    cpu_text_lengths: Tensor  # stays on the CPU: packing by it need not wait for the GPU

    def to(self, device: torch.device) -> "Batch":
        """The batch on ``device``; from pinned memory without waiting for the copy."""
        moved = (tensor.to(device, non_blocking=True) for tensor in self[:-1])
        return Batch(*moved, self.cpu_text_lengths)


# Clips


class Problem(NamedTuple):
    """What is wrong with one line of a filelist; as a string, a line of a report."""

    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"

    def line(self) -> tuple[str, int]:
        filelist, _, number = self.place.rpartition(":")
        return filelist, int(number)


def load_data(hparams: HParams) -> tuple[list[Clip], list[Clip]]:
    """The training and the validation clips: lines of ``path|text`` in filelists joined with
    ``+``; a relative path starts from ``hparams.data_dir``. A third field is not used.

    Lists, texts and headers are read. Samples are too if that tells more: if something else is
    wrong, or if bad clips shall be skipped; otherwise :func:`open_mels` reads them anyway.
    Characters that no symbol stands for are printed.

    Raises:
        UserError: everything that is wrong, a line each. With ``on_bad_clip=skip`` clips that
            cannot be used are printed and left out, unless they are more than 1 % of a set.
    """
    names = hparams.training_files, hparams.validation_files
    sets, unread = [], {}
    for name in names:
        try:
            sets.append(_read_clips(name, hparams))
        except UserError as error:  # a setting, or a list that cannot be read
            unread[str(error)] = sets.append(([], []))
    clips, problems = zip(*sets, strict=True)
    found = [one.message for of_set in problems for one in of_set]
    if (
        found
        and not unread
        and not any(clips)
        and all("no such file" in message for message in found)
    ):
        raise UserError(
            f"setting data_dir={hparams.data_dir}: has none of the clips that "
            f"{' and '.join(names)} list; name the folder that their paths start from"
        )
    report_left_out(((clip.place, clip.text) for of_set in clips for clip in of_set), hparams)
    places = {clip.stamp[2:]: clip.place for clip in clips[1]}

    def leak(clip: Clip) -> str | None:
        place = places.get(clip.stamp[2:])
        return f"{clip.path} is in validation too ({place}); keep one of the lines" * bool(place)

    training = _sift(clips[0], problems[0], leak)
    clips = _sift_longest(training, problems[0], hparams), clips[1]
    if any(problems) or (hparams.on_bad_clip == "skip" and any(clips)):
        unchecked = [*clips[0], *clips[1]]
        if hparams.cache_mels:
            unchecked = MelCache(hparams).missing(unchecked)
        bad = _check_samples(unchecked, hparams)
        clips = [
            _sift(of_set, found, lambda clip: bad.get(clip.place))
            for of_set, found in zip(clips, problems, strict=True)
        ]
    for found in problems:
        found.sort(key=Problem.line)
    if unread or hparams.on_bad_clip == "error":
        refuse([*unread, *problems[0], *problems[1]])
    for files, left, found in zip(names, clips, problems, strict=True):
        n_lines = len(left) + len(found)
        if len(found) > MAX_SKIPPED * n_lines:
            why = f"{files}: {len(found)} of {n_lines} clips cannot be used, and on_bad_clip=skip "
            refuse([*found, why + f"leaves out at most {MAX_SKIPPED:.0%}; mend them"])
        for one in found:
            print(f"skipped: {one}")
        if found:
            print(f"skipped {len(found)} of the {n_lines:,} clips of {files}")
        if not left:
            raise UserError(f"{files}: has no clips; write lines of path|text")
    return tuple(clips)


def load_clips(filelists: str, hparams: HParams) -> list[Clip]:
    """The clips of one set, from lists, texts and headers alone.

    Raises:
        UserError: what is wrong, one line per problem.
    """
    clips, problems = _read_clips(filelists, hparams)
    refuse(problems)
    if not clips:
        raise UserError(f"{filelists}: has no clips; write lines of path|text")
    return clips


def _read_clips(filelists: str, hparams: HParams) -> tuple[list[Clip], list[Problem]]:
    """The clips of one set and the lines that give none."""
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
    names = [name.strip() for name in filelists.split("+")]
    files = [os.path.realpath(name) for name in names]
    if len(set(files)) < len(names):
        twice = next(name for name, file in zip(names, files, strict=True) if files.count(file) > 1)
        raise UserError(f"filelist '{twice}': is named twice in {filelists}; keep one")
    clips, problems, places = [], [], {}
    for filelist in names:
        lines, unused = read_list(filelist), []
        for number, line in enumerate(progress(lines, filelist, unit="clip", leave=False), 1):
            if line.strip():
                place = f"{filelist}:{number}"
                if line.count("|") == 2:  # path|text|speaker
                    line, _, field = line.rpartition("|")
                    unused.append((place, field.strip()))
                try:
                    clip = _parse_line(line, place, hparams)
                    if (other := places.setdefault(clip.stamp[2:], place)) != place:
                        raise UserError(f"{clip.path} is on {other} too; keep one")
                    clips.append(clip)
                except UserError as error:
                    problems.append(Problem(place, str(error)))
        if unused:
            n_lines = sum(bool(line.strip()) for line in lines)
            print(
                f"note: {unused[0][0]}: the third field, {unused[0][1]!r}, is not used (as in "
                f"{len(unused):,} of {n_lines:,} lines)"
            )
    return clips, problems


def _sift(
    clips: Iterable[Clip], problems: list[Problem], problem: Callable[[Clip], str | None]
) -> list[Clip]:
    """The clips that have no ``problem``; those of the others join ``problems``."""
    good = []
    for clip in clips:
        if message := problem(clip):
            problems.append(Problem(clip.place, message))
        else:
            good.append(clip)
    return good


def _sift_longest(clips: Sequence[Clip], problems: list[Problem], hparams: HParams) -> list[Clip]:
    """The clips that the batch capacity holds. The longest of the others joins ``problems``; with
    ``on_bad_clip=skip`` each of them does, since each is left out.
    """
    capacity, skip = batch_capacity(hparams) or math.inf, hparams.on_bad_clip == "skip"
    too_long = [clip for clip in clips if clip.n_frames > capacity]
    longest = max(too_long, key=lambda clip: clip.n_frames, default=None)
    for clip in too_long if skip else filter(None, [longest]):
        fix = f"batch_capacity={longest.n_frames}"
        if hparams.batch_capacity_seconds:
            seconds = longest.n_frames * hparams.hop_length / hparams.sampling_rate
            fix = f"batch_capacity_seconds={math.ceil(seconds * 100) / 100}"
        n = len(too_long) - 1
        others = "" if skip or not n else f", and {n:,} more clip{'s are' if n > 1 else ' is'}"
        message = f"{clip.path} has {clip.n_frames} frames, above the batch capacity of {capacity}"
        message += f"{others}; set {fix} or more, or remove the line{'s' * bool(others)}"
        problems.append(Problem(clip.place, message))
    return [clip for clip in clips if clip.n_frames <= capacity]


def refuse(problems: Sequence[Problem | str]) -> None:
    """Raise the problems, if there are any, as one :class:`UserError`, a line each."""
    if problems:
        total = [f"{len(problems):,} problems"] if len(problems) > 20 else []
        raise UserError("\n".join(map(str, [*problems, *total])))


def report_left_out(texts: Iterable[tuple[str, str]], hparams: HParams) -> None:
    """Print the characters that no symbol stands for, once each.

    Args:
        texts: pairs of (place, text); the first place is named.
    """
    places = {}
    for place, text in texts:
        for character in unknown_characters(text, hparams.text_cleaners):
            places.setdefault(character, []).append(place)
    for character, found in sorted(places.items()):
        more = f", in {len(found):,} texts" if len(found) > 1 else ""
        print(
            f"note: {found[0]}: {character!r} (U+{ord(character):04X}) is no symbol: the character "
            f"is left out{more}; mend the text, or add it to text/symbols.py"
        )


def read_list(filelist: str) -> list[str]:
    """The lines of a filelist, empty ones too. Bytes that are not UTF-8 become surrogates.

    Raises:
        UserError: it cannot be read.
    """
    try:
        content = Path(filelist).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"filelist '{filelist}': {reason}; scripts/prepare_ljspeech.py writes "
            "filelists, and training_files and validation_files name them"
        ) from None
    return content.decode("utf-8", "surrogateescape").split("\n")


def _parse_line(line: str, place: str, hparams: HParams) -> Clip:
    if wrong := re.search("[\udc80-\udcff]", line):
        raise UserError(f"byte {ord(wrong[0]) - 0xDC00:#04x} is not UTF-8; save as UTF-8")
    path, bar, text = line.partition("|")
    path, text = path.strip(), text.strip()
    if not bar or not path or "|" in text or "\0" in line:
        raise UserError(f"{line.strip()!r} is not path|text; write a path, one |, and the text")
    path = os.path.normpath(os.path.join(hparams.data_dir, path))
    problems = []
    try:
        n_samples, stamp = check_wav(path, hparams)
    except UserError as error:
        problems.append(str(error))
    try:
        ids = speakable_ids(text, hparams)
        if len(ids) < 2:  # batch norm has no variance of one character alone
            raise UserError(f"text '{text}' is one symbol; training needs two or more")
        if len(ids) > hparams.max_text_length:
            raise UserError(
                f"text of {len(ids)} symbols, above max_text_length={hparams.max_text_length}; "
                "split the clip, remove its line, or raise the setting"
            )
    except UserError as error:
        problems.append(str(error))
    if problems:
        raise UserError("; and: ".join(problems))
    return Clip(path, text, ids, n_samples // hparams.hop_length + 1, place, stamp)


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


def check_wav(path: str, hparams: HParams) -> tuple[int, Stamp]:
    """Number of samples of a wav file, from its header, and its stamp.

    Raises:
        UserError: the file is missing, unreadable or cut off, of another rate, not mono, or
            shorter than one window of the mel.
    """
    try:
        stamp = _stamp(path)
        header = soundfile.info(path)
        promised, there = _data_chunk(path)
    except OSError:
        raise UserError(f"{path}: no such file; mend its line, or set data_dir") from None
    except (soundfile.LibsndfileError, TypeError) as error:  # TypeError: a .raw file
        raise UserError(f"{path}: not a readable sound file ({error}); replace it") from None
    if header.samplerate != hparams.sampling_rate:
        raise UserError(
            f"{path}: sampling rate {header.samplerate} Hz; resample it to "
            f"{hparams.sampling_rate} Hz, or set sampling_rate"
        )
    if header.channels != 1:
        raise UserError(f"{path}: {header.channels} channels; mix it down to mono")
    if header.format not in ("WAV", "WAVEX", "FLAC"):  # in others a cut may go unnoticed
        raise UserError(f"{path}: is {header.format}; convert it to wav or flac")
    if promised > there:  # libsndfile reads what there is
        raise UserError(
            f"{path}: cut off: has {there:,} of the {promised:,} bytes of samples that its "
            "header names; copy or convert it again, or remove the line"
        )
    # Reflection at both ends needs more than half an FFT.
    least = max(hparams.win_length, hparams.filter_length // 2 + 1)
    if header.frames < least:
        raise UserError(
            f"{path}: {header.frames} samples, too short for a mel; remove the line, or use a "
            f"clip of {least} samples or more"
        )
    return header.frames, stamp


def _data_chunk(path: str) -> tuple[int, int]:
    """Bytes of samples that a wav file's header names, and those that are there."""
    with open(path, "rb") as file:
        order = {b"RIFF": "<", b"RIFX": ">"}.get(file.read(12)[:4])
        while order and len(head := file.read(8)) == 8:
            name, size = struct.unpack(f"{order}4sI", head)
            if name == b"data":
                return size, os.fstat(file.fileno()).st_size - file.tell()
            file.seek(size + size % 2, os.SEEK_CUR)
    return 0, 0  # no wav


def _stamp(path: str) -> Stamp:
    """A file's stamp; OSError if there is none."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(path)
    return Stamp(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)


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
        self.clips, self.check_only, self.hop_length = clips, check_only, hparams.hop_length
        with uninterrupted():  # the import of librosa may swallow a KeyboardInterrupt
            self.spectrogram = MelSpectrogram(hparams)

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, i: int) -> np.ndarray | str:
        try:
            return self.mel(self.clips[i])
        except UserError as error:
            return str(error)

    def mel(self, clip: Clip) -> np.ndarray:
        try:
            samples = read_wav(clip.path)
            changed = _stamp(clip.path) != clip.stamp
        except (UserError, OSError):
            if os.path.exists(clip.path) and _stamp(clip.path) == clip.stamp:
                raise
            changed = True
        if changed:
            raise UserError(f"{clip.path}: changed or removed since it was checked; start again")
        if len(samples) // self.hop_length + 1 != clip.n_frames:
            raise UserError(f"{clip.path}: not as long as its header says; replace it")
        if self.check_only:
            return samples[:0]
        return self.spectrogram(torch.from_numpy(samples)).T.contiguous().numpy()


class MelCache:
    """Computed mels, in files of ``mel_cache_dir`` that never change.

    A file is a line of JSON, which says what audio settings and which wav files (path, size, time
    of change) it is of, and their mels, float32, one after the other. Its name is the hash of that
    line. A run that needs mels which no file has computes them into one more file.
    """

    def __init__(self, hparams: HParams) -> None:
        self.folder, self.n_mels = Path(hparams.mel_cache_dir), hparams.n_mel_channels
        self.audio = {name: getattr(hparams, name) for name in AUDIO}
        self.find()

    def find(self) -> None:
        """Look for the mels that the files have."""
        self.stamps = {}  # by file
        self.rows = {}  # file, offset in bytes and number of frames, by wav file
        for path in sorted(self.folder.glob("*.mels")):
            try:
                stamp = _stamp(path)
                with open(path, "rb") as file:
                    header = file.readline()
                if path.stem != _name(header):
                    continue  # damaged
            except OSError:
                continue
            content, rows, offset = json.loads(header), {}, len(header)
            if content["version"] != MEL_VERSION or content["audio"] != self.audio:
                continue
            for *key, n_frames in content["clips"]:
                rows[tuple(key)] = path, offset, n_frames
                offset += 4 * self.n_mels * n_frames
            if offset == stamp.size:
                self.stamps[path] = stamp
                self.rows |= rows

    def missing(self, clips: Iterable[Clip]) -> list[Clip]:
        """Those of ``clips`` that no file has the mel of; samples of the others were checked."""
        return [clip for clip in clips if self.rows.get(_key(clip), (0,))[-1] != clip.n_frames]

    def __call__(self, clip: Clip) -> np.ndarray:
        path, offset, n_frames = self.rows[_key(clip)]
        try:
            # Read, not mapped: reading from a map of a file that was cut kills the process.
            mel = np.fromfile(path, np.float32, n_frames * self.n_mels, offset=offset)
            changed = _stamp(path) != self.stamps[path]
        except OSError:
            changed = True
        if changed:
            raise UserError(f"{path}: changed or removed in use; start again, to remake it")
        return mel.reshape(n_frames, self.n_mels)

    def write(self, clips: Sequence[Clip], hparams: HParams) -> None:
        """Compute the mels that are missing, in parallel, into a file that appears when complete.

        Raises:
            UserError: see :func:`open_mels`.
        """
        part = self.folder / "unfinished.part"
        with making(self.folder, "name a folder by mel_cache_dir"), _held(part) as file:
            self.find()  # another run may have held the file before
            if not (clips := self.missing(clips)):
                return
            files = [(*_key(clip), clip.n_frames) for clip in clips]
            content = {"version": MEL_VERSION, "audio": self.audio, "clips": files}
            header = json.dumps(content).encode() + b"\n"
            path = self.folder / f"{_name(header)}.mels"
            size = len(header) + 4 * self.n_mels * sum(clip.n_frames for clip in clips)
            free = shutil.disk_usage(self.folder).free
            if size > free:
                raise UserError(
                    f"{path}: the mel cache needs {size / 1e9:.1f} GB and {free / 1e9:.1f} GB are "
                    "free; set mel_cache_dir to a larger disk, or cache_mels=False"
                )
            file.write(header)
            problems = []
            results = _run(_Compute(clips, hparams), "mels")
            for clip, mel in zip(clips, results, strict=True):
                if isinstance(mel, str):
                    problems.append(Problem(clip.place, mel))
                elif not problems:
                    file.write(mel.tobytes())
            refuse(problems)
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        self.find()

    def report(self, clips: Iterable[Clip]) -> str:
        """One line: what the mels of ``clips`` take of the disk, and which files have none."""
        used = {self.rows[_key(clip)][0] for clip in clips}
        pattern = re.compile(r"[0-9a-f]{16}\.(mels|f32|f32\.part)")  # .f32: of earlier versions
        found = sorted(path for path in self.folder.iterdir() if pattern.fullmatch(path.name))
        stale = [path for path in found if path not in used]

        def size(paths: Iterable[Path]) -> str:
            return f"{sum(path.stat().st_size for path in paths) / 1e6:,.1f} MB"

        own = 4 * self.n_mels * sum(clip.n_frames for clip in clips)
        line = f"mel cache {self.folder}: {size(used)}, {own / 1e6:,.1f} MB of it for this run"
        if stale:
            line += f"; this run does not read {size(stale)} more, stale unless another run does: "
        return line + ", ".join(path.name for path in stale)


def _name(header: bytes) -> str:
    return hashlib.sha256(header).hexdigest()[:16]


def _key(clip: Clip) -> tuple[str, int, int]:
    return os.path.abspath(clip.path), clip.stamp.size, clip.stamp.mtime


@contextmanager
def _held(part: Path) -> Iterator[IO[bytes]]:
    """An empty file to write under ``part``, once no other process does; removed in the end."""
    while True:
        with open(part, "ab") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                print(f"{part}: another run is making it; waiting", flush=True)
                fcntl.lockf(file, fcntl.LOCK_EX)
            if not _is_at(part, file):
                continue  # the other run has finished, or given up
            try:
                file.truncate(0)
                yield file
            finally:
                if _is_at(part, file):  # and neither renamed nor, since then, another run's
                    part.unlink()
            return


def _is_at(path: Path, file: IO[bytes]) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def open_mels(clips: Iterable[Clip], hparams: HParams) -> Mels:
    """What gives each of ``clips`` its mel: from the cache, which computes those that it has not,
    or computed at every call with ``cache_mels=False``. Either way every clip's samples have
    been checked. It raises :class:`UserError` if a file that it reads was changed meanwhile.

    Raises:
        UserError: clips whose samples cannot be used, one line each; no room for the cache.
    """
    by_path = {clip.path: clip for clip in clips}
    clips = [by_path[path] for path in sorted(by_path)]
    if not hparams.cache_mels:
        problems = []
        found = _check_samples(clips, hparams)
        _sift(clips, problems, lambda clip: found.get(clip.place))
        refuse(problems)
        return _Compute(clips, hparams).mel
    cache = MelCache(hparams)
    if cache.missing(clips):
        cache.write(clips, hparams)
    return cache


def _check_samples(clips: Sequence[Clip], hparams: HParams) -> dict[str, str]:
    """What is wrong with the samples of clips, by place."""
    results = _run(_Compute(clips, hparams, check_only=True), "checking clips")
    found = zip(clips, results, strict=True)
    return {clip.place: result for clip, result in found if isinstance(result, str)}


def _run(jobs: _Compute, what: str) -> Iterator[np.ndarray | str]:
    """Results of all jobs in order, by one process per core."""
    workers = n_cores() if len(jobs) > 8 else 0
    generator = torch.Generator()  # so that the loader does not draw from the training's
    loader = DataLoader(
        jobs, batch_size=None, num_workers=workers, collate_fn=_as_is, generator=generator
    )
    with uninterrupted():  # processes inherit it: Ctrl-C, which goes to all, is for this one alone
        results = iter(loader)
    yield from progress(results, desc=what, unit="clip", total=len(jobs))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """In this Ctrl-C waits until the end."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]] | UserError:
        """The clips of a batch, or what is wrong with one of them: see :func:`loaded`."""
        try:
            return [self[i] for i in indices]
        except UserError as error:
            return error


def collate(clips: Sequence[tuple[Tensor, Tensor]] | UserError) -> Batch | UserError:
    """A batch of (ids (T_in,), mel (T_out, n_mels)), padded to the longest of each."""
    if isinstance(clips, UserError):
        return clips
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
    return Batch(text, text_lengths, mels, mel_lengths, gate, text_lengths)


def training_sampler(clips: Sequence[Clip], hparams: HParams) -> EpochBatchSampler:
    """The batches of every epoch, by the batching settings.

    Raises:
        UserError: a base batch size larger than the set.
    """
    if hparams.batch_size > len(clips):
        raise UserError(
            f"setting batch_size={hparams.batch_size}: {hparams.training_files} has {len(clips)} "
            f"clips; use at most {len(clips)}"
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
        capacity=batch_capacity(hparams),
    )


def batching_note(sampler: EpochBatchSampler, hparams: HParams) -> str:
    """What BKT's or ATS's parameter leaves undone with these clips, and a better value; "" where
    it does its work.
    """
    n, batch_size, dynamic = len(sampler.lengths), hparams.batch_size, hparams.dynamic_batch_size
    if len(sampler) == 1:  # whatever the strategy
        return ""
    if hparams.batching_strategy == "BKT" and hparams.bucket_edges == "size":
        name = "bucket_size"
        if hparams.bucket_size < batch_size + dynamic:
            what = f"no batch has more than {hparams.bucket_size} clips"
            what += "; dynamic_batch_size makes none larger" * dynamic
        elif hparams.bucket_size >= n:
            what = f"all {n:,} clips are in one bucket, which is RAND"
        else:
            return ""
    elif hparams.batching_strategy == "ATS" and hparams.n_bins >= len(sampler):
        name = "n_bins"
        what = f"an epoch has only {len(sampler):,} batches, which makes it RAND, or nearly so"
    else:
        return ""
    try:
        value = like_ssb(sampler.lengths, hparams, hparams.batching_strategy)
        fix = f"{name}={value} pads about as much as"
    except ValueError:
        fix = "with so few clips no value pads as little as"
    strategy = f"{hparams.batching_strategy} with {name}={getattr(hparams, name)}"
    return f"{strategy}: {what}; {fix} SSB with lrf={hparams.lrf:g}"


def like_ssb(lengths: Sequence[int] | np.ndarray, hparams: HParams, strategy: str) -> int:
    """BKT's or ATS's parameter: the largest whose padding does not exceed SSB's by ``lrf``
    (Sec. 3), in fixed batches.

    Raises:
        ValueError: there is none.
    """
    fixed = {"batch_size": hparams.batch_size, "seed": hparams.seed, "dynamic_batch_size": False}
    plans = [plan_batches(lengths, "SSB", lrf=hparams.lrf, epoch=e, **fixed) for e in range(8)]
    zpr = sum(batch_statistics(lengths, plan).zpr for plan in plans) / len(plans)
    return int(solve_randomness(lengths, strategy, zpr, **fixed))


def batch_capacity(hparams: HParams) -> int | None:
    """Frames, padding included, that a batch may have; None where no setting names it."""
    if hparams.batch_capacity_seconds:
        return int(hparams.batch_capacity_seconds * hparams.sampling_rate / hparams.hop_length)
    return hparams.batch_capacity or None


def largest_batches(
    clips: Sequence[Clip], sampler: EpochBatchSampler, epochs: Iterable[int]
) -> list[list[int]]:
    """The batches of ``epochs`` that need most memory: the largest padded mels, the largest
    padded texts, and the largest alignments, once each. Leaves ``sampler`` at the last epoch.
    """
    texts = np.array([len(clip.ids) for clip in clips])
    found = [(0, [])] * 3
    for epoch in epochs:
        sampler.set_epoch(epoch)
        plan = sampler.plan
        starts = plan.ends - plan.sizes
        T_in, T_out = (
            np.maximum.reduceat(np.asarray(lengths, np.int64)[plan.order], starts)
            for lengths in (texts, sampler.lengths)
        )
        for k, sizes in enumerate(
            (plan.sizes * T_out, plan.sizes * T_in, plan.sizes * T_in * T_out)
        ):
            j = int(sizes.argmax())
            if sizes[j] > found[k][0]:
                found[k] = int(sizes[j]), plan[j].tolist()
    return [list(batch) for batch in dict.fromkeys(tuple(batch) for _, batch in found)]


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
    """Batches of ``dataset`` in the order of ``batches``; its workers live on across epochs, until
    :func:`close`."""
    # train.py says so of more workers than cores.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=hparams.num_workers,
        persistent_workers=hparams.num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its own, so that loading draws nothing from the training's
        worker_init_fn=_ignore_interrupt,
    )


def _ignore_interrupt(worker: int) -> None:
    """Leave Ctrl-C to the training process, which still needs a batch to end well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def loaded(
    loader: DataLoader, waiting: Callable[[], AbstractContextManager] = nullcontext
) -> Iterator[Batch]:
    """The batches of a loader; each is waited for in a context of ``waiting()``.

    Raises:
        UserError: of a clip that cannot be read, or for a loader process that was killed.
    """
    batches = None
    while True:
        try:
            if batches is None:
                batches = iter(loader)  # waits too, for processes that live on
                # Torch would raise the death of one amid a step; waiting shows it as well.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with waiting():
                batch = next(batches, None)
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            if isinstance(error, RuntimeError) and "DataLoader worker (pid" not in str(error):
                raise
            with waiting():  # it may have been a signal to all
                raise UserError(
                    "a loader process was killed, perhaps for want of memory; --resume, with a "
                    "smaller num_workers"
                ) from None
        if batch is None:
            return
        if isinstance(batch, UserError):
            raise batch
        yield batch


def close(*loaders: DataLoader) -> None:
    """End the processes of loaders. Left to the garbage collector, a loader lives on for as long
    as anything refers to it: a frame of the traceback of an exception that a library keeps.
    """
    for loader in loaders:
        if loader._iterator is not None:
            for worker in loader._iterator._workers:  # each of which would be given five seconds
                worker.terminate()
            loader._iterator._shutdown_workers()


def data_fingerprint(*sets: Sequence[Clip]) -> str:
    """What the sets hold, wherever they lie: texts and lengths, in their order."""
    content = [[(clip.ids, clip.n_frames) for clip in clips] for clips in sets]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
