"""Mel-spectrograms, computed once and kept on disk."""

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext as uninterrupted
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cli import UserError
from corpus.audio import MelSpectrogram
from corpus.clips import Clip, read_samples
from files import making, replacing, require_space
from hparams import AUDIO, HParams
from loaders import run_parallel

MEL_VERSION = 1  # raise it when MelSpectrogram changes its values: old files are then ignored
NPY_HEADER = 128  # bytes that np.save writes before the numbers

Mels = Callable[[Clip], np.ndarray]  # a clip's log-mel, (T_out, n_mels) float32


def open_mels(clips: Sequence[Clip], hparams: HParams) -> Mels:
    """A function that returns the mel of each of ``clips`` from the cache, into which missing ones
    are computed first. With ``cache_mels=False`` it computes the mel at every call.

    Raises:
        UserError: no space for the cache, or samples that cannot be used. The function raises it
            too, if a file has changed in the meantime.
    """
    cache = MelCache(hparams)
    missing = cache.missing(clips) if hparams.cache_mels else []
    if hparams.cache_mels and not missing:
        return cache
    with uninterrupted():  # the import of librosa may swallow a KeyboardInterrupt
        compute = partial(_compute, spectrogram=MelSpectrogram(hparams), hparams=hparams)
    if not hparams.cache_mels:
        return compute
    cache.add(missing, compute)
    return cache


def _compute(clip: Clip, spectrogram: MelSpectrogram, hparams: HParams) -> np.ndarray:
    samples = torch.from_numpy(read_samples(clip, hparams))
    return spectrogram(samples).T.contiguous().numpy()


class MelCache:
    """Mels in ``mel_cache_dir``, one file a clip, named by a hash of all that it depends on: the
    audio settings, and the sound file's path, size and time of last change.

    Files are never changed, so several runs may fill the folder together. Anyone may delete it.
    """

    def __init__(self, hparams: HParams) -> None:
        self.folder, self.n_mels = Path(hparams.mel_cache_dir), hparams.n_mel_channels
        self.audio = [MEL_VERSION, *(getattr(hparams, name) for name in AUDIO)]

    def path(self, clip: Clip) -> Path:
        key = f"{self.audio} {clip.stamp.size} {clip.stamp.mtime} {os.path.abspath(clip.path)}"
        return self.folder / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:16]}.npy"

    def missing(self, clips: Iterable[Clip]) -> list[Clip]:
        """The clips that are not cached. The samples of all others have been checked."""
        return [clip for clip in clips if not self._has(clip)]

    def _has(self, clip: Clip) -> bool:
        try:
            return os.stat(self.path(clip)).st_size == NPY_HEADER + 4 * self.n_mels * clip.n_frames
        except OSError:
            return False

    def __call__(self, clip: Clip) -> np.ndarray:
        path, mel = self.path(clip), np.zeros(0)
        with suppress(OSError):
            mel = np.fromfile(path, np.float32, offset=NPY_HEADER)
        if mel.size != clip.n_frames * self.n_mels:
            raise UserError(f"{path}: changed or removed while in use; run again to rebuild it")
        return mel.reshape(clip.n_frames, self.n_mels)

    def add(self, clips: Sequence[Clip], compute: Mels) -> None:
        """Compute the mels of ``clips`` in parallel. Those done stay, even if it is interrupted."""
        n_bytes = sum(NPY_HEADER + 4 * self.n_mels * clip.n_frames for clip in clips)
        fix = "set mel_cache_dir to a larger disk, or cache_mels=False"
        require_space(self.folder, n_bytes, fix)
        with making(self.folder, "set mel_cache_dir to another folder"):
            mels = run_parallel(compute, clips, "mels")
            for clip, mel in zip(clips, mels, strict=True):
                content = io.BytesIO()
                np.save(content, mel)
                with replacing(self.path(clip), shared=True) as file:
                    file.write(content.getbuffer())
