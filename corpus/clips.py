"""Clips: filelists, and every check of a text or a sound file, for preparation and training.
Each problem is one line: location, value, fix."""

import os
import re
import stat
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

from cli import UserError, counted, make_folder, progress_bar, replacing
from hparams import HParams, audio_settings, format_overrides
from text import alphabet, clean_text, text_to_sequence, unknown_characters

CONVERT = "scripts/prepare_corpus.py --convert_to DIR"
SILENCE = 1e-3  # peak, -60 dB of full scale: a clip that stays below it has no speech


class Line(NamedTuple):
    """A clip as a filelist or a corpus names it."""

    location: str  # "filelist:line", for messages
    path: str  # of the sound file
    text: str


class Stamp(NamedTuple):
    """Identifies a file's version."""

    size: int  # bytes
    mtime: int  # last change, ns
    device: int
    inode: int  # device and inode are the same for all names (links) of a file


class Clip(NamedTuple):
    """A line whose text and sound file are good."""

    path: str
    text: str  # as in the filelist
    ids: list[int]  # of the cleaned text's symbols
    n_frames: int  # of its mel: n_samples // hop_length + 1
    location: str
    stamp: Stamp  # of the sound file, when it was checked


class Problem(NamedTuple):
    """Says what is wrong with a line; ``str()`` makes it a line of a report."""

    location: str
    message: str

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"

    def line(self) -> tuple[str, int]:
        """Returns the file and the line number, to sort by."""
        filelist, _, number = self.location.rpartition(":")
        return filelist, int(number)


def refuse(problems: Sequence[Problem | str]) -> None:
    """Raises one :class:`UserError` that lists the problems, one per line, if there are any. A
    problem that more than five sound files have is listed once, and of those that differ in names
    and numbers alone the first ten are."""
    kinds, shown = defaultdict(list), {}
    for i, problem in enumerate(problems):
        message = problem if isinstance(problem, str) else problem.message
        message = re.sub(r"^.*?\.\w+: ", "", message)  # without the sound file
        kinds[re.sub(r"^\S+: |(['\"]).*?\1|\d[\w.,-]*", "", message)].append((i, message))
    for alike in kinds.values():
        same = len(alike) > 5 and len({message for _, message in alike}) == 1
        first = [i for i, _ in alike[: 1 if same else 10]]
        shown |= {i: str(problems[i]) for i in first}
        if n_more := len(alike) - len(first):
            shown[first[-1]] += f" ({counted(n_more, 'more line')} like it)"
    lines = [shown[i] for i in sorted(shown)]
    if len(lines) > 20:
        lines.append(f"{len(problems):,} problems")
    if lines:
        raise UserError("\n".join(lines))


def in_threads(function: Callable, items: Sequence, name: str) -> list:
    """Returns ``[function(item) for item in items]``, computed by a thread for each core;
    soundfile, numpy and torch release the interpreter."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        return list(progress_bar(pool.map(function, items), name, len(items), unit="clip"))
    finally:  # after an error or Ctrl-C, items that have not begun are left
        pool.shutdown(cancel_futures=True)


# Filelists


def load_clips(filelists: str, hparams: HParams) -> list[Clip]:
    """Returns the clips of ``filelists``. Reads headers, not samples. Raises all problems, one per
    line, as a :class:`UserError`."""
    clips, problems = read_clips(filelists, hparams, {})
    refuse(problems)
    return clips


def read_clips(
    filelists: str, hparams: HParams, locations: dict[Any, str]
) -> tuple[list[Clip], list[Problem]]:
    """Returns the good clips of ``filelists`` (paths joined by ``+``), and the problems of others.

    A line is ``path|text`` or ``path|text|speaker``; the third field is not used. Relative paths
    start from the list's :func:`data_folders`. ``locations`` is as in :func:`check_clips`.

    Raises:
        UserError: a setting is wrong, or a filelist cannot be read or is empty.
    """
    folders = data_folders(filelists, hparams)
    lines, problems = [], []
    for name, folder in zip(filelists.split("+"), folders, strict=True):
        for location, line in read_lines(name.strip()):
            path, *texts = map(str.strip, line.split("|"))
            if path and len(texts) in (1, 2) and "\0" not in line:
                lines.append(Line(location, os.path.join(folder, path), texts[0]))
            else:
                fix = "write a path, one |, and the text"
                problems.append(Problem(location, f"{line.strip()!r} is not path|text; {fix}"))
    if not lines and not problems:
        raise UserError(f"{filelists}: has no clips; write lines of path|text")
    clips, of_clips = check_clips(lines, hparams, locations, check_wav)
    return clips, sorted(problems + of_clips, key=Problem.line)


def data_folders(filelists: str, hparams: HParams) -> list[str]:
    """Returns the folder from which relative paths start in each of ``filelists``. The setting
    ``data_dir`` has one folder for all, or as many as lists, joined by ``+``, in the same order.

    Raises:
        UserError: there is no such folder, or their number fits neither.
    """
    setting, n_lists = f"setting data_dir={hparams.data_dir}", len(filelists.split("+"))
    folders = [name.strip() for name in hparams.data_dir.split("+")]
    if os.path.isdir(hparams.data_dir):  # even if its name has a +
        folders = [hparams.data_dir]
    for folder in folders:
        if not os.path.isdir(folder or "."):
            fix = "use the corpus's folder (scripts/prepare_ljspeech.py downloads LJSpeech)"
            raise UserError(f"{setting}: no such folder{f' {folder}' * (len(folders) > 1)}; {fix}")
    if len(folders) not in (1, n_lists):
        fix = "give one for all, or as many as training_files and validation_files each have lists"
        raise UserError(f"{setting}: {len(folders)} folders; {fix}")
    return folders * (n_lists // len(folders))


def read_lines(file: str | Path) -> list[tuple[str, str]]:
    """Returns pairs of (location, line) of a text file, without the empty lines; bytes that are
    not UTF-8 become surrogates. Raises :class:`UserError` if it cannot be read."""
    try:
        content = Path(file).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        fix = "scripts/prepare_corpus.py and scripts/prepare_ljspeech.py write them"
        raise UserError(f"filelist '{file}': {reason}; {fix}") from None
    lines = enumerate(content.decode("utf-8", "surrogateescape").split("\n"), start=1)
    return [(f"{file}:{number}", line) for number, line in lines if line.strip()]


def write_lines(file: Path, lines: Sequence[str]) -> None:
    """Writes a filelist, whole or not at all. Raises :class:`UserError` if it exists with other
    lines."""
    if not file.exists():
        make_folder(file.parent)
        with replacing(file) as stream:
            stream.write("".join(f"{line}\n" for line in lines).encode())
    elif (existing := [line for _, line in read_lines(file)]) != list(lines):
        counts = (
            f"already has {len(existing):,} lines, which are not the {len(lines):,} of this run"
        )
        raise UserError(f"{file}: {counts}; rename it or delete it")


# Clips


def check_clips(
    lines: Iterable[Line],
    hparams: HParams,
    locations: dict[Any, str],
    check_audio: Callable[[str, HParams], tuple[int, Stamp]],
) -> tuple[list[Clip], list[Problem]]:
    """Returns the clips of ``lines``, and the problems of the lines that give none. Reads headers,
    not samples.

    Args:
        locations: of each sound file so far, which no other line may name; those of ``lines`` are
            added.
        check_audio: number of samples and stamp of a sound file, as :func:`check_wav`.
    """
    clips, problems = [], []
    for line in progress_bar(lines, "checking lines", unit="clip", leave=False):
        try:
            clip = _check_clip(line, hparams, check_audio)
            first = locations.setdefault((clip.stamp.device, clip.stamp.inode), line.location)
            if first != line.location:
                raise UserError(f"{clip.path} is on {first} too; keep one")
            clips.append(clip)
        except UserError as error:
            problems.append(Problem(line.location, str(error)))
    return clips, problems


def _check_clip(line: Line, hparams: HParams, check_audio: Callable) -> Clip:
    if wrong := re.search("[\udc80-\udcff]", line.path + line.text):
        raise UserError(f"byte {ord(wrong[0]) - 0xDC00:#04x} is not UTF-8; save as UTF-8")
    path, problems = os.path.normpath(line.path), []
    try:
        n_samples, stamp = check_audio(path, hparams)
    except UserError as error:
        problems.append(str(error))
    try:
        ids = check_text(line.text, hparams)
        if len(ids) < 2:  # batch norm needs two values for a variance
            raise UserError(f"text '{line.text}' is one symbol; training needs two or more")
        if len(ids) > (longest := hparams.max_text_length):
            fix = "split the clip, remove its line, or raise the setting"
            raise UserError(f"text of {len(ids)} symbols, above max_text_length={longest}; {fix}")
    except UserError as error:
        problems.append(str(error))
    if problems:
        raise UserError("; and: ".join(problems))
    return Clip(path, line.text, ids, n_samples // hparams.hop_length + 1, line.location, stamp)


# Texts


def check_text(text: str, hparams: HParams) -> list[int]:
    """Returns the symbols of the cleaned ``text``. Raises :class:`UserError` if it has no letter,
    digit or phone, or an unknown phone."""
    try:
        ids = text_to_sequence(text, hparams.text_cleaners, hparams.symbols)
    except ValueError as error:
        raise UserError(str(error)) from None
    symbols = alphabet(hparams.symbols)
    if not any(symbols[i].lstrip("@").isalnum() for i in ids):  # @ marks a phone
        raise UserError(f"text {text[:60]!r} has nothing to speak once cleaned; fix or remove it")
    return ids


def report_unknown_characters(texts: Iterable[tuple[str, str]], hparams: HParams) -> None:
    """Prints each character that has no symbol, and the letters that the cleaners write in ASCII,
    with the first location and the number of texts.

    Args:
        texts: pairs of (location, text).
    """
    uses, written, in_ascii_at = defaultdict(list), {}, []
    for location, text in texts:
        for character in unknown_characters(text, hparams.text_cleaners, hparams.symbols):
            uses[character].append(location)
        letters = [c for c in text if c.isalpha() and not c.isascii()]
        for letter in letters:
            if letter not in written:
                written[letter] = clean_text(letter, hparams.text_cleaners, hparams.symbols)
        if any(written[letter] and written[letter].isascii() for letter in letters):
            in_ascii_at.append(location)
    listed = "the setting symbols" if hparams.symbols else "text/symbols.py"
    fix = f"change the text, or, before training, add it to {listed}"
    for character, (location, *later) in sorted(uses.items()):
        advice = "spell numbers out" if character.isdecimal() else fix
        problem = f"{character!r} (U+{ord(character):04X}) has no symbol and is left out"
        print(f"note: {location}: {problem} (in {counted(1 + len(later), 'text')}); {advice}")
    if in_ascii_at:
        changed = [
            f"{c!r} is read as {new!r}" for c, new in written.items() if new and new.isascii()
        ]
        more = f" and {len(changed) - 5:,} more letters so" if len(changed) > 5 else ""
        read = f"{', '.join(changed[:5])}{more} (in {counted(len(in_ascii_at), 'text')})"
        fix = "for another language, prepare the corpus with --text_cleaners basic_cleaners"
        print(f"note: {in_ascii_at[0]}: {read}, and numbers as in English; {fix}")


# Sound files


def check_wav(path: str, hparams: HParams) -> tuple[int, Stamp]:
    """Returns the number of samples of a wav or flac, from its header, and its stamp.

    Raises:
        UserError: the file is missing, unreadable or cut off, of another sampling rate, not mono,
            or shorter than one window of the mel.
    """
    header, stamp = check_header(path)
    # Reflection at both ends needs more than half an FFT.
    shortest = max(hparams.win_length, hparams.filter_length // 2 + 1)
    if header.samplerate != hparams.sampling_rate:
        changes = audio_settings(header.samplerate).items()
        settings = format_overrides({k: v for k, v in changes if v != getattr(hparams, k)})
        wanted = f"resample it to {hparams.sampling_rate} Hz ({CONVERT}), or set {settings}"
        problem = f"sampling rate {header.samplerate} Hz; {wanted}"
    elif header.channels != 1:
        problem = f"{header.channels} channels; mix it down to mono ({CONVERT})"
    elif header.format not in ("WAV", "WAVEX", "FLAC"):  # in others a cut may go unnoticed
        problem = f"is {header.format}; convert it to wav or flac ({CONVERT})"
    elif header.frames < shortest:
        fix = f"remove the line, or use a clip of {shortest} samples or more"
        problem = f"{header.frames} samples, too short for a mel; {fix}"
    else:
        return header.frames, stamp
    raise UserError(f"{path}: {problem}")


def check_header(path: str) -> tuple[Any, Stamp]:
    """Returns what soundfile knows of a sound file of any kind, and its stamp. Raises
    :class:`UserError` if the file is missing, unreadable or cut off."""
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
    """Returns a file's stamp. Raises OSError if there is no such file."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(path)
    return Stamp(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)


def read_samples(clip: Clip, hparams: HParams) -> np.ndarray:
    """Returns a clip's samples, (n_samples,) float32 in [-1, 1], whatever its sample format.

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
    """Reads all samples of ``clips`` and returns their problems."""
    problems = in_threads(partial(_check_samples, hparams=hparams), clips, "checking clips")
    return [problem for problem in problems if problem]


def _check_samples(clip: Clip, hparams: HParams) -> Problem | None:
    try:
        read_samples(clip, hparams)
    except UserError as error:
        return Problem(clip.location, str(error))
    return None
