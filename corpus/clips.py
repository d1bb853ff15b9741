"""Clips: reading filelists, and every check of a text or a wav file, for preparation and training.
Each problem is one line: location, value, fix."""

import dataclasses
import os
import re
import stat
import struct
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

from cli import UserError, progress_bar
from hparams import HParams, audio_settings, format_overrides
from text import alphabet, clean_text, text_to_sequence, unknown_characters

SHARED = 5  # lines; what is wrong with more of them is reported once
CONVERT = "scripts/prepare_corpus.py --convert_to DIR"
SILENCE = 1e-3  # peak, -60 dB of full scale: a clip that stays below it has no speech


class Stamp(NamedTuple):
    """Identifies a file's version."""

    size: int  # bytes
    mtime: int  # last change, ns
    device: int
    inode: int  # device and inode are the same for all names (links) of a file


class Clip(NamedTuple):
    """One line of a filelist."""

    path: str  # of the wav file
    text: str  # as in the filelist
    ids: list[int]  # of the cleaned text's symbols
    n_frames: int  # of its mel: n_samples // hop_length + 1
    location: str  # "filelist:line", for messages
    stamp: Stamp  # of the wav file, when it was checked


class Problem(NamedTuple):
    """What is wrong with a line of a filelist; ``str()`` makes it a line of a report."""

    location: str
    message: str

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"

    def line(self) -> tuple[str, int]:
        filelist, _, number = self.location.rpartition(":")
        return filelist, int(number)


def refuse(problems: Sequence[Problem | str]) -> None:
    """Raise one :class:`UserError` that lists the problems, one per line, if there are any. What is
    the same in more than ``SHARED`` lines, but for the file's name, is listed once."""
    kinds = [_without_file(problem) for problem in problems]
    counts, lines, listed = Counter(kinds), [], set()
    for problem, kind in zip(problems, kinds, strict=True):
        if counts[kind] <= SHARED:
            lines.append(str(problem))
        elif kind not in listed:
            listed.add(kind)
            lines.append(f"{problem} (as in {counts[kind] - 1:,} more lines)")
    if len(lines) > 20:
        lines.append(f"{len(problems):,} problems")
    if lines:
        raise UserError("\n".join(lines))


def _without_file(problem: Problem | str) -> str:
    """A problem's message without the name of the file that it starts with, if it does."""
    if isinstance(problem, str):
        return problem
    return problem.message.partition(": ")[2] or problem.message


# Filelists


def load_clips(filelists: str, hparams: HParams) -> list[Clip]:
    """The clips of ``filelists``. Samples are not read, only headers. Raises all problems, one per
    line, as a :class:`UserError`."""
    clips, problems = read_clips(filelists, hparams, {})
    refuse(problems)
    return clips


def read_clips(
    filelists: str, hparams: HParams, locations: dict[Any, str]
) -> tuple[list[Clip], list[Problem]]:
    """The good clips of ``filelists`` (paths joined by ``+``), and the problems of other lines.

    A line is ``path|text`` or ``path|text|speaker``; the third field is not used. Relative paths
    start from the list's :func:`data_folders`. ``locations`` is as in :func:`check_lines`.

    Raises:
        UserError: a setting is wrong, or a filelist cannot be read or is empty.
    """
    folders = data_folders(filelists, hparams)
    try:
        text_to_sequence("", hparams.text_cleaners)
    except ValueError as error:
        raise UserError(f"setting text_cleaners: {error}") from None
    lists = []
    for name in filelists.split("+"):
        numbered = numbered_lines(name.strip())
        thirds = [(where, line.split("|")[2]) for where, line in numbered if line.count("|") == 2]
        if thirds:
            print(
                f"note: {thirds[0][0]}: the third field, {thirds[0][1].strip()!r}, is not used "
                f"(as in {len(thirds):,} of {len(numbered):,} lines)"
            )
        lists.append(numbered)
    if not any(lists):
        raise UserError(f"{filelists}: has no clips; write lines of path|text")
    clips, problems = [], []
    for folder, lines in zip(folders, lists, strict=True):
        own = dataclasses.replace(hparams, data_dir=folder)
        some, wrong = check_lines(lines, _split_line, own, locations)
        clips += some
        problems += wrong
    return clips, problems


def data_folders(filelists: str, hparams: HParams) -> list[str]:
    """The folder from which relative paths start in each of ``filelists`` (joined by ``+``), from
    ``hparams.data_dir``: one folder for all, or as many, joined by ``+``, in the same order.

    Raises:
        UserError: there is no such folder, or their number fits neither.
    """
    setting, names = f"setting data_dir={hparams.data_dir}", filelists.split("+")
    folders = [name.strip() for name in hparams.data_dir.split("+")]
    if os.path.isdir(hparams.data_dir):  # even if its name has a +
        folders = [hparams.data_dir]
    if missing := [folder for folder in folders if not os.path.isdir(folder or ".")]:
        named = f" {missing[0]}" if len(folders) > 1 else ""
        fix = "use the corpus's folder (scripts/prepare_ljspeech.py downloads LJSpeech)"
        raise UserError(f"{setting}: no such folder{named}; {fix}")
    if len(folders) not in (1, len(names)):
        fix = "give one for all, or as many as training_files and validation_files each have lists"
        raise UserError(f"{setting}: {len(folders)} folders; {fix}")
    return folders * (len(names) // len(folders))


def _split_line(line: str) -> tuple[str, str]:
    path, *texts = map(str.strip, line.split("|"))
    if not path or len(texts) not in (1, 2) or "\0" in line:
        raise UserError(f"{line.strip()!r} is not path|text; write a path, one |, and the text")
    return path, texts[0]


def read_lines(filelist: str) -> list[str]:
    """All lines of a filelist, empty ones included; bytes that are not UTF-8 become surrogates.
    Raises :class:`UserError` if it cannot be read."""
    try:
        content = Path(filelist).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except (OSError, ValueError) as error:
        reason = f"{getattr(error, 'strerror', error)}; scripts/prepare_corpus.py and "
        reason += "scripts/prepare_ljspeech.py write them"
        raise UserError(f"filelist '{filelist}': {reason}") from None
    return content.decode("utf-8", "surrogateescape").split("\n")


def numbered_lines(filelist: str) -> list[tuple[str, str]]:
    """Pairs of (location, line) of all lines of a filelist but the empty ones."""
    lines = enumerate(read_lines(filelist), start=1)
    return [(f"{filelist}:{number}", line) for number, line in lines if line.strip()]


def check_lines(
    lines: Sequence[tuple[str, str]],
    split: Callable[[str], tuple[str, str]],
    hparams: HParams,
    locations: dict[Any, str] | None = None,
    check_audio: Callable[[str, HParams], tuple[int, Stamp]] | None = None,
) -> tuple[list[Clip], list[Problem]]:
    """The clips of ``lines``, and the problems of the lines that give none.

    Args:
        lines: pairs of (location, line).
        split: path and text of a line; the path is relative to ``hparams.data_dir``. Raises
            UserError.
        locations: of each wav file so far, which no other line may name; those of ``lines`` are
            added.
        check_audio: instead of :func:`check_wav`.
    """
    clips, problems, locations = [], [], {} if locations is None else locations
    for location, line in progress_bar(lines, "checking lines", unit="clip", leave=False):
        try:
            if wrong := re.search("[\udc80-\udcff]", line):
                raise UserError(f"byte {ord(wrong[0]) - 0xDC00:#04x} is not UTF-8; save as UTF-8")
            clip = _check_clip(*split(line), location, hparams, check_audio or check_wav)
            wav = clip.stamp.device, clip.stamp.inode
            if wav in locations:
                raise UserError(f"{clip.path} is on {locations[wav]} too; keep one")
            locations[wav] = location
            clips.append(clip)
        except UserError as error:
            problems.append(Problem(location, str(error)))
    return clips, problems


def _check_clip(
    path: str, text: str, location: str, hparams: HParams, check_audio: Callable
) -> Clip:
    path = os.path.normpath(os.path.join(hparams.data_dir, path))
    problems = []
    try:
        n_samples, stamp = check_audio(path, hparams)
    except UserError as error:
        problems.append(str(error))
    try:
        ids = check_text(text, hparams)
        if len(ids) < 2:  # batch norm needs two values for a variance
            raise UserError(f"text '{text}' is one symbol; training needs two or more")
        if len(ids) > (most := hparams.max_text_length):
            fix = "split the clip, remove its line, or raise the setting"
            raise UserError(f"text of {len(ids)} symbols, above max_text_length={most}; {fix}")
    except UserError as error:
        problems.append(str(error))
    if problems:
        raise UserError("; and: ".join(problems))
    return Clip(path, text, ids, n_samples // hparams.hop_length + 1, location, stamp)


# Texts


def check_text(text: str, hparams: HParams) -> list[int]:
    """Symbols of ``text`` once cleaned. Raises :class:`UserError` if it has no letter, digit or
    phone, or an unknown phone."""
    try:
        ids = text_to_sequence(text, hparams.text_cleaners, hparams.symbols)
    except ValueError as error:
        raise UserError(str(error)) from None
    symbols = alphabet(hparams.symbols)
    if not any(symbols[i].lstrip("@").isalnum() for i in ids):  # @ marks a phone
        raise UserError(f"text {text[:60]!r} has nothing to speak once cleaned; fix or remove it")
    return ids


def report_unknown_characters(texts: Iterable[tuple[str, str]], hparams: HParams) -> None:
    """Print each character that has no symbol, or all digits that have none, and the first letter
    that the cleaners write in ASCII, with the first location and the number of texts.

    Args:
        texts: pairs of (location, text).
    """
    uses, cleaners = defaultdict(list), ", ".join(hparams.text_cleaners)
    listed = "the setting symbols" if hparams.symbols else "text/symbols.py"
    fix = f"change the text, or, before training, add it to {listed}"
    for location, text in texts:
        unknown = unknown_characters(text, hparams.text_cleaners, hparams.symbols)
        digits = "".join(sorted(filter(str.isdecimal, unknown)))
        for character in unknown - set(digits):
            named = f"{character!r} (U+{ord(character):04X}) has no symbol and is left out"
            uses[character].append((location, named, fix))
        if digits:
            named = f"digits {digits!r} have no symbol and are left out"
            uses["digits"].append((location, named, "spell numbers out"))
        if letter := _in_ascii(text, hparams):
            other = "for a language other than English use text_cleaners=basic_cleaners, and spell"
            uses["ascii"].append((location, f"{cleaners} write {letter}", f"{other} numbers out"))
    for _, [(location, problem, advice), *others] in sorted(uses.items()):
        total = f" (in {len(others) + 1:,} texts)" if others else ""
        print(f"note: {location}: {problem}{total}; {advice}")


def _in_ascii(text: str, hparams: HParams) -> str:
    """The first letter of ``text`` that the cleaners write in ASCII, and how; "" if none."""
    for letter in "" if text.isascii() else unicodedata.normalize("NFC", text):
        if letter.isalpha() and not letter.isascii():
            written = clean_text(letter, hparams.text_cleaners, hparams.symbols)
            if written and written.isascii():
                return f"{letter!r} as {written!r}"
    return ""


def report_unused_symbols(clips: Sequence[Clip], hparams: HParams) -> None:
    """Print the characters of the setting ``symbols`` that are in none of ``clips``."""
    used = {i for clip in clips for i in clip.ids}
    unused = [c for i, c in enumerate(hparams.symbols, start=1) if i not in used]
    if unused and clips:
        more = f" and {len(unused) - 10:,} more" if len(unused) > 10 else ""
        print(
            f"note: setting symbols: {' '.join(map(repr, unused[:10]))}{more}: in no training text "
            f"after {', '.join(hparams.text_cleaners)}, so this run does not train "
            f"{'them' if len(unused) > 1 else 'it'}"
        )


# Wav files


def check_wav(path: str, hparams: HParams) -> tuple[int, Stamp]:
    """Number of samples of a wav file, from its header, and its stamp.

    Raises:
        UserError: the file is missing, unreadable or cut off, of another sampling rate, not mono,
            or shorter than one window of the mel.
    """
    header, stamp = check_header(path)
    # Reflection at both ends needs more than half an FFT.
    least = max(hparams.win_length, hparams.filter_length // 2 + 1)
    if header.samplerate != hparams.sampling_rate:
        changes = audio_settings(header.samplerate).items()
        settings = format_overrides({k: v for k, v in changes if v != getattr(hparams, k)})
        wanted = f"resample it to {hparams.sampling_rate} Hz ({CONVERT}), or set {settings}"
        problem = f"sampling rate {header.samplerate} Hz; {wanted}"
    elif header.channels != 1:
        problem = f"{header.channels} channels; mix it down to mono ({CONVERT})"
    elif header.format not in ("WAV", "WAVEX", "FLAC"):  # in others a cut may go unnoticed
        problem = f"is {header.format}; convert it to wav or flac ({CONVERT})"
    elif header.frames < least:
        fix = f"remove the line, or use a clip of {least} samples or more"
        problem = f"{header.frames} samples, too short for a mel; {fix}"
    else:
        return header.frames, stamp
    raise UserError(f"{path}: {problem}")


def check_header(path: str) -> tuple[Any, Stamp]:
    """What soundfile knows of a sound file of any kind, and its stamp. Raises :class:`UserError`
    if it is missing, unreadable or cut off."""
    try:
        stamp = get_stamp(path)
        header = soundfile.info(path)
        promised, present = _data_bytes(path)
    except OSError:
        raise UserError(f"{path}: no such file; fix its line, or set data_dir") from None
    except (soundfile.LibsndfileError, TypeError) as error:  # TypeError: a .raw file
        raise UserError(f"{path}: not a readable sound file ({error}); replace it") from None
    if promised > present:  # libsndfile reads what is there
        counts = f"its header says {promised:,} bytes of samples, but it has {present:,}"
        fix = "copy or convert it again, or remove the line"
        raise UserError(f"{path}: cut off: {counts}; {fix}")
    return header, stamp


def _data_bytes(path: str) -> tuple[int, int]:
    """Bytes of samples that a wav file's header names, and those that are there."""
    with open(path, "rb") as file:
        order = {b"RIFF": "<", b"RIFX": ">"}.get(file.read(12)[:4])
        while order and len(head := file.read(8)) == 8:
            name, size = struct.unpack(f"{order}4sI", head)
            if name == b"data":
                return size, os.fstat(file.fileno()).st_size - file.tell()
            file.seek(size + size % 2, os.SEEK_CUR)
    return 0, 0  # not a wav


def get_stamp(path: str | Path) -> Stamp:
    """A file's stamp; OSError if there is no such file."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(path)
    return Stamp(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)


def read_samples(clip: Clip, hparams: HParams) -> np.ndarray:
    """Samples (n_samples,) float32 in [-1, 1] of a clip, whatever its sample format.

    Raises:
        UserError: they are not finite, beyond [-1, 1], or all but silent, or the file has changed
            since its header was checked.
    """
    samples, unreadable, stamp = np.zeros(0, np.float32), None, None
    try:
        samples, _ = soundfile.read(clip.path, dtype="float32")
    except (soundfile.LibsndfileError, OSError) as error:
        unreadable = error
    with suppress(OSError):
        stamp = get_stamp(clip.path)
    peak = float(np.abs(samples).max(initial=0))
    if stamp != clip.stamp:
        problem = "changed or removed since it was checked; run again"
    elif unreadable:
        problem = f"not a readable sound file ({unreadable}); replace it"
    elif len(samples) // hparams.hop_length + 1 != clip.n_frames:
        problem = "not as long as its header says; replace it"
    elif not np.isfinite(peak):
        problem = "has samples that are not finite; replace it"
    elif peak > 1:
        problem = f"has a sample of {peak:g}, beyond [-1, 1]; scale it down"
    elif peak - abs(float(samples.mean())) < SILENCE:  # a constant is silent too
        problem = f"is silent (peak {peak:g}); remove its line"
    else:
        return samples
    raise UserError(f"{clip.path}: {problem}")


def check_samples(clips: Sequence[Clip], hparams: HParams) -> list[Problem]:
    """Read all samples of ``clips`` and return their problems."""
    from loaders import run_parallel  # imports torch, which takes seconds

    messages = run_parallel(partial(_check_samples, hparams=hparams), clips, "checking clips")
    pairs = zip(clips, messages, strict=True)
    return [Problem(clip.location, message) for clip, message in pairs if message]


def _check_samples(clip: Clip, hparams: HParams) -> str:
    try:
        read_samples(clip, hparams)
    except UserError as error:
        return str(error)
    return ""
