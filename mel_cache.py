"""Mel-spectrograms, computed once and kept on disk."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cli import UserError, uninterrupted
from clips import Clip, get_stamp, read_samples
from files import locked, replacing, require_space
from hparams import AUDIO, HParams
from layers import MelSpectrogram
from loaders import run_parallel

MEL_VERSION = 1  # raise it when MelSpectrogram changes its values: old files are then ignored

Mels = Callable[[Clip], np.ndarray]  # a clip's log-mel, (T_out, n_mels) float32


def open_mels(clips: Sequence[Clip], hparams: HParams) -> Mels:
    """A function that returns the mel of each of ``clips`` from the cache, into which missing ones
    are computed first. With ``cache_mels=False`` it computes the mel at every call.

    Raises:
        UserError: no space for the cache, or samples that cannot be used. The function raises it
            too, if a file has changed in the meantime.
    """
    cache = MelCache(hparams)
    if hparams.cache_mels and not cache.missing(clips):
        return cache
    with uninterrupted():  # the import of librosa may swallow a KeyboardInterrupt
        compute = partial(_compute, spectrogram=MelSpectrogram(hparams), hparams=hparams)
    if not hparams.cache_mels:
        return compute
    cache.add(clips, compute)
    return cache


def _compute(clip: Clip, spectrogram: MelSpectrogram, hparams: HParams) -> np.ndarray:
    samples = torch.from_numpy(read_samples(clip, hparams))
    return spectrogram(samples).T.contiguous().numpy()


class MelCache:
    """Mels in ``mel_cache_dir``, in files that are never changed, only added.

    A file starts with a line of JSON: the audio settings, and each wav file's path, size, time of
    last change and number of frames. The mels follow in that order, float32. The file is named by
    the hash of its first line. A run whose mels are not all there adds one file with the rest.
    """

    def __init__(self, hparams: HParams) -> None:
        self.folder, self.n_mels = Path(hparams.mel_cache_dir), hparams.n_mel_channels
        self.audio = {name: getattr(hparams, name) for name in AUDIO}
        self.scan()

    def scan(self) -> None:
        """Find the mels that the folder has."""
        self.stamps = {}  # by file
        self.rows = {}  # by wav file: (file, offset in bytes, number of frames)
        for path in sorted(self.folder.glob("*.mels")):
            try:
                stamp = get_stamp(path)
                with open(path, "rb") as file:
                    header = file.readline()
            except OSError:
                continue
            if path.stem != _hash(header):  # damaged
                continue
            content, rows, offset = json.loads(header), {}, len(header)
            if (content["version"], content["audio"]) != (MEL_VERSION, self.audio):
                continue
            for *key, n_frames in content["clips"]:
                rows[tuple(key)] = path, offset, n_frames
                offset += 4 * self.n_mels * n_frames
            if offset == stamp.size:
                self.stamps[path] = stamp
                self.rows |= rows

    def missing(self, clips: Iterable[Clip]) -> list[Clip]:
        """The clips that are not cached. The samples of all others have been checked."""
        return [clip for clip in clips if self.rows.get(_key(clip), (0,))[-1] != clip.n_frames]

    def __call__(self, clip: Clip) -> np.ndarray:
        path, offset, n_frames = self.rows[_key(clip)]
        try:
            # Not a memory map: if the file is truncated, reading its map kills the process.
            mel = np.fromfile(path, np.float32, n_frames * self.n_mels, offset=offset)
            changed = get_stamp(path) != self.stamps[path]
        except OSError:
            changed = True
        if changed:
            raise UserError(f"{path}: changed or removed while in use; run again to rebuild it")
        return mel.reshape(n_frames, self.n_mels)

    def add(self, clips: Sequence[Clip], compute: Mels) -> None:
        """Compute the missing mels in parallel, into a file that appears once it is complete."""
        fix = "set mel_cache_dir to another folder"
        with locked(self.folder, fix, wait=True, unfinished="*.mels.part"):
            self.scan()  # another run may have computed some while this one waited
            if not (clips := self.missing(clips)):
                return
            rows = [(*_key(clip), clip.n_frames) for clip in clips]
            content = {"version": MEL_VERSION, "audio": self.audio, "clips": rows}
            header = json.dumps(content).encode() + b"\n"
            path = self.folder / f"{_hash(header)}.mels"
            n_bytes = len(header) + 4 * self.n_mels * sum(clip.n_frames for clip in clips)
            require_space(path, n_bytes, "set mel_cache_dir to a larger disk, or cache_mels=False")
            with replacing(path) as file:
                file.write(header)
                for mel in run_parallel(compute, clips, "mels"):
                    file.write(mel.tobytes())
        self.scan()

    def report(self, clips: Iterable[Clip]) -> str:
        """One line: the disk space that the mels of ``clips`` take, and the files not used."""
        pattern = re.compile(r"[0-9a-f]{16}\.(mels|f32|f32\.part)")  # .f32: of earlier versions
        files = {path for path in self.folder.iterdir() if pattern.fullmatch(path.name)}
        used = {self.rows[_key(clip)][0] for clip in clips}
        unused = sorted(files - used)
        size, unused_size = (
            sum(path.stat().st_size for path in paths) / 1e6 for paths in (used, unused)
        )
        own = 4 * self.n_mels * sum(clip.n_frames for clip in clips) / 1e6
        line = f"mel cache {self.folder}: {size:,.1f} MB, {own:,.1f} MB of it for this run"
        if unused:
            names = ", ".join(path.name for path in unused)
            line += f"; {unused_size:,.1f} MB more that this run does not use: {names}"
        return line


def _hash(header: bytes) -> str:
    return hashlib.sha256(header).hexdigest()[:16]


def _key(clip: Clip) -> tuple[str, int, int]:
    return os.path.abspath(clip.path), clip.stamp.size, clip.stamp.mtime
