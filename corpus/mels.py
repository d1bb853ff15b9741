"""Mel-spectrograms, computed once and kept on disk."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from cli import UserError, make_folder, replace_file
from corpus.audio import MelSpectrogram
from corpus.clips import Clip, map_in_threads, read_samples
from hparams import AUDIO, HParams

MEL_VERSION = 1  # raise it when MelSpectrogram changes its values: old files are then ignored
NPY_HEADER = 128  # bytes that np.save writes before the numbers

Mels = Callable[[Clip], np.ndarray]  # a clip's log-mel, (T_out, n_mels) float32


def open_mels(clips: Sequence[Clip], hparams: HParams) -> Mels:
    """Computes the mels that the cache lacks, and returns a function that reads the mel of a clip
    from the cache. With ``cache_mels=False`` the function computes the mel at every call.

    Raises:
        UserError: the cache cannot be written, or samples cannot be used. The function raises it
            too, if a file has changed in the meantime.
    """
    cache = MelCache(hparams)
    missing = cache.missing(clips) if hparams.cache_mels else []
    if hparams.cache_mels and not missing:
        return cache
    spectrogram = MelSpectrogram(hparams)

    def compute(clip: Clip) -> np.ndarray:
        samples = torch.from_numpy(read_samples(clip, hparams))
        return spectrogram(samples).T.contiguous().numpy()

    if not hparams.cache_mels:
        return compute
    make_folder(cache.folder, "set mel_cache_dir to another folder")
    map_in_threads(lambda clip: cache.save(clip, compute(clip)), missing, "mels")
    return cache


class MelCache:
    """Keeps mels in ``mel_cache_dir``, one file a clip, named by a hash of all that it depends on:
    the audio settings, and the sound file's path, size and time of last change.

    Files are never changed, so several runs may fill the folder together. Anyone may delete it.
    """

    def __init__(self, hparams: HParams) -> None:
        self.folder, self.n_mels = Path(hparams.mel_cache_dir), hparams.n_mel_channels
        self.audio = [MEL_VERSION, *(getattr(hparams, name) for name in AUDIO)]

    def path(self, clip: Clip) -> Path:
        key = f"{self.audio} {clip.stamp.size} {clip.stamp.mtime} {os.path.abspath(clip.path)}"
        return self.folder / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:16]}.npy"

    def missing(self, clips: Sequence[Clip]) -> list[Clip]:
        """Returns the clips that are not cached. The samples of all others have been checked."""
        return [clip for clip in clips if not self._has(clip)]

    def _has(self, clip: Clip) -> bool:
        try:
            return os.stat(self.path(clip)).st_size == NPY_HEADER + 4 * self.n_mels * clip.n_frames
        except OSError:
            return False

    def save(self, clip: Clip, mel: np.ndarray) -> None:
        with replace_file(self.path(clip), durable=False) as file:  # a mel that is lost is made again
            np.save(file, mel)

    def __call__(self, clip: Clip) -> np.ndarray:
        path = self.path(clip)
        if not self._has(clip):
            raise UserError(f"{path}: changed or removed while in use; run again to rebuild it")
        return np.load(path)
