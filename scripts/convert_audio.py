"""Converting the audio of a corpus to mono wavs of one sampling rate."""

import io
import json
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
import soxr

from cli import UserError
from clips import Clip, Problem, check_wav, refuse
from files import locked, make_folder, replacing, require_space
from hparams import HParams

RECORD = "conversion.json"  # marks a folder of converted clips
OTHER_FOLDER = "give another --convert_to"
MARGIN = 0.05  # seconds that trimming leaves around the speech
SAME_TIME = 2e9  # ns; some disks keep times to two seconds


def convert(
    sources: Sequence[Clip], clips: Sequence[Clip], hparams: HParams, trim_db: float
) -> list[Clip]:
    """Make the files of ``clips``, in ``hparams.data_dir``, from those of ``sources``, unless an
    earlier run has made them. A new file has its source's time of last change.

    Returns:
        ``clips`` with the lengths and stamps of the new files.

    Raises:
        UserError: the folder holds anything else, or has no space; a source cannot be used.
    """
    folder, rate = Path(hparams.data_dir), hparams.sampling_rate
    record = json.dumps({"version": 1, "sampling_rate": rate, "trim_db": trim_db})
    todo = unconverted(sources, clips, folder, record)
    n_bytes = sum(2 * source.n_frames * hparams.hop_length + 4096 for source, _ in todo)
    require_space(folder, n_bytes, OTHER_FOLDER)
    results = []
    if todo:
        from loaders import run_parallel  # imports torch, which takes seconds

        with locked(folder, OTHER_FOLDER, unfinished="**/*.part"):
            if not (folder / RECORD).exists():
                with replacing(folder / RECORD) as file:
                    file.write(f"{record}\n".encode())
            for parent in {Path(clip.path).parent for _, clip in todo}:
                make_folder(parent, OTHER_FOLDER)
            one = partial(convert_clip, rate=rate, trim_db=trim_db)
            results = list(run_parallel(one, todo, "converting"))
            (folder / "lock").unlink()
    checked, problems, peaks = [], [], {}
    for (_, clip), result in zip(todo, results, strict=True):
        if isinstance(result, str):
            problems.append(Problem(clip.location, result))
        elif result > 1:
            peaks[clip.path] = result
    refuse(problems)
    print(f"{folder}: {len(todo):,} clips converted, {len(clips) - len(todo):,} already there")
    if peaks:
        loudest = max(peaks, key=peaks.get)
        decibels = 20 * math.log10(peaks[loudest])
        print(
            f"note: {len(peaks):,} clip(s) exceeded full scale once converted, and are scaled "
            f"down: {loudest} most, by {decibels:.2f} dB"
        )
    for clip in clips:
        try:
            n_samples, stamp = check_wav(clip.path, hparams)
        except UserError as error:
            problems.append(Problem(clip.location, str(error)))
        else:
            n_frames = n_samples // hparams.hop_length + 1
            checked.append(clip._replace(n_frames=n_frames, stamp=stamp))
    refuse(problems)
    if trim_db:
        before, after = (
            sum(soundfile.info(clip.path).duration for clip in some) for some in (sources, clips)
        )
        cut = max(before - after, 0)  # lengths are rounded
        print(f"trimmed {cut:,.1f} of {before:,.1f} s, {cut / len(clips):.2f} s a clip")
    return checked


def unconverted(
    sources: Sequence[Clip], clips: Sequence[Clip], folder: Path, record: str
) -> list[tuple[Clip, Clip]]:
    """The pairs of source and clip whose file is missing in ``folder``. Raises :class:`UserError`
    if anything there was not made by conversions with this ``record``."""
    names = {path.name for path in folder.glob("*")} - {"lock", f"{RECORD}.part"}
    held = min(names, default=record)
    if RECORD in names:
        held = (folder / RECORD).read_text(errors="replace").strip()
    if held != record:
        raise UserError(f"{folder}: holds {held[:300]}, not {record}; {OTHER_FOLDER}")
    todo, problems = [], []
    for source, clip in zip(sources, clips, strict=True):
        if not os.path.lexists(clip.path):
            todo.append((source, clip))
        elif abs(os.lstat(clip.path).st_mtime_ns - source.stamp.mtime) > SAME_TIME:
            problem = f"{clip.path}: is not made from {source.path} as it is now; remove it"
            problems.append(Problem(clip.location, problem))
    refuse(problems)
    return todo


def convert_clip(pair: tuple[Clip, Clip], rate: int, trim_db: float) -> float | str:
    """Write a clip's file, mono with 16 bits. Returns the peak before it was scaled down to 1, if
    it was above; or what is wrong with the source. Raises :class:`UserError` if the new file cannot
    be written."""
    source, clip = pair
    try:
        with soundfile.SoundFile(source.path) as file:
            samples = file.read(dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError) as error:
        return f"{source.path}: not a readable sound file ({error}); replace it"
    if len(samples) != file.frames:
        return f"{source.path}: not as long as its header says; replace it"
    if not (largest := np.abs(samples).max(initial=0)) <= 2:  # a lossy format may exceed 1
        return f"{source.path}: has a sample of {largest:g}, beyond [-1, 1]; scale it down"
    samples = samples.mean(axis=1)
    if file.samplerate != rate:
        samples = soxr.resample(samples, file.samplerate, rate)
    if trim_db:
        samples = trim(samples, rate, trim_db)
    peak = float(np.abs(samples).max(initial=0))
    steps = np.rint(samples * (32768 / max(peak, 1))).clip(-32768, 32767).astype(np.int16)
    content = io.BytesIO()  # soundfile ignores errors of a Python file
    soundfile.write(content, steps, rate, "PCM_16", format="WAV")
    try:
        with replacing(Path(clip.path)) as file:
            file.write(content.getbuffer())
            file.flush()
            os.utime(file.fileno(), ns=(source.stamp.mtime, source.stamp.mtime))
    except OSError as error:
        fix = f"make room there and run again, or {OTHER_FOLDER}"
        raise UserError(f"{clip.path}: cannot be written ({error.strerror}); {fix}") from None
    return peak


def trim(samples: np.ndarray, rate: int, trim_db: float) -> np.ndarray:
    """``samples`` without both ends that stay ``trim_db`` below the loudest 25 ms, but for a
    margin."""
    import librosa  # takes seconds

    frames = {"frame_length": rate // 40, "hop_length": rate // 160}
    _, (start, end) = librosa.effects.trim(samples, top_db=trim_db, **frames)
    margin = round(MARGIN * rate)
    return samples[max(start - margin, 0) : end + margin]
