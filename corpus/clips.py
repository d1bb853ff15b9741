"""Clips: filelists, and every check of a clip, for preparation and training. Each problem is one
line: location, value, fix."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import mode
from typing import NamedTuple

import numpy as np
import torch

from cli import UserError, make_folder, pluralize, progress_bar, replace_file, why_not_utf8
from corpus.audio import ClipError, Stamp, check_wav, get_stamp, read_source
from hparams import HParams
from text import alphabet, clean_text, spelled, text_to_sequence, unknown_characters
from text.cleaners import unknown_words

MAX_LISTED = 10  # problems of a kind that a report lists


class Line(NamedTuple):
    """A clip as a filelist or a corpus names it."""

    location: str  # "filelist:line", for messages
    path: str  # of the sound file
    text: str


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
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"

    def line(self) -> tuple[str, int]:
        """Returns the file and the line number, to sort by."""
        file, _, number = self.location.rpartition(":")
        return file, int(number)


@contextmanager
def collect_problem(problems: list[Problem], location: str) -> Iterator[None]:
    """Adds a :class:`ClipError` that its block raises to ``problems``."""
    try:
        yield
    except ClipError as error:
        problems.append(Problem(location, error.kind, str(error)))


def raise_problems(problems: Iterable[Problem], conclusion: str = "") -> None:
    """Raises one :class:`UserError` that lists the problems, if there are any: ``MAX_LISTED`` of
    each kind, one per line, and then the ``conclusion``."""
    problems_of = defaultdict(list)
    for problem in sorted(problems, key=Problem.line):
        problems_of[problem.kind].append(problem)
    lines = []
    for alike in problems_of.values():
        lines += map(str, alike[:MAX_LISTED])
        if len(alike) > MAX_LISTED:
            lines[-1] += f" ({pluralize(len(alike) - MAX_LISTED, 'more line')} like it)"
    if lines:
        raise UserError("\n".join([*lines, conclusion] if conclusion else lines))


def map_in_threads(function: Callable, items: Sequence, name: str) -> list:
    """Returns ``[function(item) for item in items]``, computed by a thread for each core that this
    process may use; soundfile, numpy and torch release the interpreter. In each, torch has one."""
    has_affinity = hasattr(os, "sched_getaffinity")  # on Linux
    n_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    n_torch = torch.get_num_threads()
    pool = ThreadPoolExecutor(n_cores, initializer=partial(torch.set_num_threads, 1))
    try:
        return list(progress_bar(pool.map(function, items), name, len(items), unit="clip"))
    finally:  # after an error or Ctrl-C, no other item begins
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(n_torch)


# Filelists


def load_clips(filelists: str, hparams: HParams) -> list[Clip]:
    """Returns the clips of ``filelists``. Reads headers, not samples. Raises all problems, one per
    line, as a :class:`UserError`."""
    clips, problems = read_clips(filelists, hparams, {})
    raise_problems(problems)
    return clips


def read_clips(
    filelists: str, hparams: HParams, locations: dict[str, str]
) -> tuple[list[Clip], list[Problem]]:
    """Returns the good clips of ``filelists`` (paths joined by ``+``), and the problems of the
    other lines.

    Lines are ``path|text``. In a list where most are ``path|text|speaker``, these are read too, and
    all speakers become one. Relative paths start from the list's :func:`data_folders`.
    ``locations`` is as in :func:`check_clips`.

    Raises:
        UserError: a setting is wrong, or a filelist cannot be read or is empty.
    """
    folders = data_folders(filelists, hparams)
    lines, problems = [], []
    for name, folder in zip(split_names(filelists), folders, strict=True):
        rows = []
        for location, line in read_lines(name):
            fields = [field.strip() for field in line.split("|")]
            rows.append((location, fields))
        if not all(row[0].startswith(("/", "~")) for _, row in rows):
            check_folder(folder, hparams)
        has_speakers = bool(rows) and mode(len(row) for _, row in rows) == 3
        widths = (2, 3) if has_speakers else (2,)
        for location, row in rows:
            content = "|".join(row)
            if len(row) in widths and row[0] and "\0" not in content:
                path = os.path.join(folder, os.path.expanduser(row[0]))
                lines.append(Line(location, path, row[1]))
            else:
                fix = "write a path, one |, and the text"
                message = f"{content[:60]!r} is not path|text; {fix}"
                problems.append(Problem(location, "columns", message))
        speakers = {row[2] for _, row in rows if has_speakers and len(row) == 3}
        if len(speakers) > 1:
            fix = f"for one, list only the lines that end in its name, such as |{min(speakers)}"
            print(f"note: {name}: {len(speakers):,} speakers become one voice; {fix}")
    if not lines and not problems:
        raise UserError(f"{filelists}: has no clips; write lines of path|text")
    clips, of_clips = check_clips(lines, hparams, locations, check_wav)
    return clips, problems + of_clips


def data_folders(filelists: str, hparams: HParams) -> list[str]:
    """Returns, for each of ``filelists``, the folder from which its relative paths start. The
    setting ``data_dir`` has one folder for all lists, or one for each, joined by ``+``, in order.

    Raises:
        UserError: there are neither one nor as many as lists.
    """
    n_lists, folders = len(split_names(filelists)), split_names(hparams.data_dir)
    if len(folders) not in (1, n_lists):
        fix = "give one for all, or as many as training_files and validation_files each have lists"
        raise UserError(f"setting data_dir={hparams.data_dir}: {len(folders)} folders; {fix}")
    return folders * (n_lists // len(folders))


def check_folder(folder: str, hparams: HParams) -> None:
    """Raises :class:`UserError` unless ``folder``, of the setting ``data_dir``, exists."""
    if not os.path.isdir(folder or "."):
        setting = f"setting data_dir={hparams.data_dir}"
        name = f" {folder}" if folder != hparams.data_dir else ""
        fix = "use the corpus's folder (scripts/prepare_ljspeech.py downloads LJSpeech)"
        raise UserError(f"{setting}: no such folder{name}; {fix}")


def split_names(setting: str) -> list[str]:
    """Returns the paths that a setting joins by ``+``. If it exists as it is, it is one path."""
    names = [setting] if os.path.exists(os.path.expanduser(setting)) else setting.split("+")
    return [os.path.expanduser(name.strip()) for name in names]


def read_lines(file: str | Path) -> list[tuple[str, str]]:
    """Returns the lines of a text file that are not empty, as pairs of (location, line). Bytes that
    are not UTF-8 become surrogates, and byte order marks, also of files that were joined, are left
    out. Raises :class:`UserError` if the file cannot be read."""
    try:
        content = Path(file).read_text("utf-8", "surrogateescape").replace("\ufeff", "")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        fix = "name another (scripts/prepare_ljspeech.py and prepare_corpus.py write filelists)"
        raise UserError(f"{file}: {reason}; {fix}") from None
    if content.startswith(("\udcff\udcfe", "\udcfe\udcff")):  # its byte order marks
        raise UserError(f"{file}: is UTF-16; save it as UTF-8")
    lines = enumerate(content.split("\n"), start=1)
    return [(f"{file}:{number}", line) for number, line in lines if line.strip()]


def write_lines(file: Path, lines: Sequence[str]) -> None:
    """Writes a filelist, whole or not at all. Raises :class:`UserError` if it exists with other
    lines."""
    if not file.exists():
        make_folder(file.parent)
        with replace_file(file) as stream:
            stream.write("".join(f"{line}\n" for line in lines).encode())
    elif (existing := [line for _, line in read_lines(file)]) != list(lines):
        counts = f"{len(existing):,} lines, which are not the {len(lines):,} of this run"
        raise UserError(f"{file}: already has {counts}; rename it or delete it")


# Clips


def check_clips(
    lines: Iterable[Line],
    hparams: HParams,
    locations: dict[str, str],
    check_audio: Callable[[str, HParams], tuple[int, Stamp]],
) -> tuple[list[Clip], list[Problem]]:
    """Returns the clips of ``lines``, and the problems of the lines that give none. Reads headers,
    not samples.

    Args:
        locations: the line that lists each sound file so far, by its path without symbolic links,
            to find files that are listed twice. Those of ``lines`` are added.
        check_audio: returns the number of samples and the stamp of a sound file, as
            :func:`check_wav` does.
    """
    clips, problems = [], []
    for line in progress_bar(lines, "checking lines", unit="clip", leave=False):
        if message := why_not_utf8(line.path + line.text):
            problems.append(Problem(line.location, "encoding", message))
            continue
        path, sound, ids = os.path.normpath(line.path), None, None
        with collect_problem(problems, line.location):
            sound = check_audio(path, hparams)
        with collect_problem(problems, line.location):
            ids = check_training_text(line.text, hparams)
        if not (sound and ids):
            continue
        n_samples, stamp = sound
        if stamp.path in locations:
            message = f"{path} is on {locations[stamp.path]} too; keep one, and name each list once"
            problems.append(Problem(line.location, "duplicate", message))
            continue
        locations[stamp.path] = line.location
        n_frames = n_samples // hparams.hop_length + 1
        clips.append(Clip(path, line.text, ids, n_frames, line.location, stamp))
    return clips, problems


def padded_frames(clip: Clip, hparams: HParams) -> int:
    """Returns a clip's frames, rounded up to whole decoder steps, as batches have them."""
    return clip.n_frames + -clip.n_frames % hparams.n_frames_per_step


# Texts


def check_text(text: str, hparams: HParams) -> list[int]:
    """Returns the symbol ids of the cleaned ``text``. Raises :class:`ClipError` if it has no
    letter, digit or phone, has braces that hold no phones, or was not UTF-8."""
    if problem := why_not_utf8(text):
        raise ClipError("encoding", problem)
    try:
        ids = text_to_sequence(text, hparams.text_cleaners, hparams.symbols)
    except ValueError as error:
        raise ClipError("braces", str(error)) from None
    symbols = alphabet(hparams.symbols)
    if not any(symbols[i].lstrip("@").isalnum() for i in ids):  # @ marks a phone
        problem = "has nothing to speak once cleaned; fix or remove it"
        raise ClipError("no words", f"text {text[:60]!r} {problem}")
    return ids


def check_training_text(text: str, hparams: HParams) -> list[int]:
    """Returns the symbol ids of a clip's text. Raises :class:`ClipError` if there are too few or
    too many, or for what :func:`check_text` finds."""
    ids = check_text(text, hparams)
    if len(ids) < 2:  # batch norm needs two values for a variance
        raise ClipError("short text", f"text '{text}' is one symbol; training needs two or more")
    if len(ids) > hparams.max_text_length:
        problem = f"text of {len(ids)} symbols, above max_text_length={hparams.max_text_length}"
        fix = "split the clip, remove its line, or raise the setting"
        raise ClipError("long text", f"{problem}; {fix}")
    return ids


def read_speak_texts(hparams: HParams) -> list[list[int]]:
    """Returns the symbol ids of ``speak_texts``, or no texts if ``speak_every`` is 0.

    Raises:
        UserError: one of them has nothing to speak, or cannot be read.
    """
    if not hparams.speak_every:
        return []
    if hparams.symbols and hparams.speak_texts == HParams.speak_texts:
        print("note: speak_texts is the default, in English; set it to sentences of your language")
    try:
        ids = [check_text(text, hparams) for text in hparams.speak_texts]
    except UserError as error:
        raise UserError(f"setting speak_texts: {error}") from None
    report_unknown_characters((("setting speak_texts", t) for t in hparams.speak_texts), hparams)
    return ids


def report_unknown_characters(texts: Iterable[tuple[str, str]], hparams: HParams) -> None:
    """Prints each character that has no symbol, and the letters that the cleaners write in ASCII,
    with the first location and the number of texts.

    Args:
        texts: pairs of (location, text).
    """
    texts, locations_of = list(texts), defaultdict(list)
    for location, text in texts:
        unknown = unknown_characters(text, hparams.text_cleaners, hparams.symbols)
        names = {"a digit" if c.isdecimal() else f"{c!r} (U+{ord(c):04X})" for c in unknown}
        for name in names:
            locations_of[name].append(location)
    listed = "the setting symbols" if hparams.symbols else "text/symbols.py"
    for name, locations in sorted(locations_of.items()):
        fix = f"change the text, or, before training, add it to {listed}"
        fix = "spell numbers out" if name == "a digit" else fix
        count = pluralize(len(locations), "text")
        print(f"note: {locations[0]}: {name} has no symbol and is left out (in {count}); {fix}")
    _report_letters_in_ascii(texts, hparams)


def _report_letters_in_ascii(texts: Sequence[tuple[str, str]], hparams: HParams) -> None:
    """Prints how the cleaners write letters in ASCII, such as ß as ss."""
    characters = sorted({*"".join(text for _, text in texts)})
    letters = [character for character in characters if character.isalpha() and character > "\x7f"]
    cleaners = spelled(hparams.text_cleaners)
    readings = {letter: clean_text(letter, cleaners, hparams.symbols) for letter in letters}
    changed = [letter for letter in letters if readings[letter] and readings[letter].isascii()]
    locations = [location for location, text in texts if not {*changed}.isdisjoint(text)]
    if changed:
        examples = ", ".join(
            f"{letter!r} is read as {readings[letter]!r}" for letter in changed[:5]
        )
        more = f" and {len(changed) - 5:,} more letters so" if len(changed) > 5 else ""
        count = pluralize(len(locations), "text")
        fix = "for another language, prepare the corpus with --text_cleaners basic_cleaners"
        numbers = "and numbers as in English"
        print(f"note: {locations[0]}: {examples}{more} (in {count}), {numbers}; {fix}")


def report_unknown_words(clips: Sequence[Clip]) -> None:
    """Prints how many words have no phones in CMUdict, and the most frequent ones."""
    uses = Counter(word for clip in clips for word in unknown_words(clip.text))
    frequent = ", ".join(f"{word} {n}" for word, n in uses.most_common(10))
    if uses:
        words = pluralize(len(uses), "word")
        print(f"{words} without phones in CMUdict, read as spelled; the most frequent: {frequent}")


# Samples


def read_samples(clip: Clip, max_peak: float = 1) -> np.ndarray:
    """Returns a clip's samples, (n_samples,) float32, whatever its sample format.

    Raises:
        ClipError: as :func:`read_source`, or the file has changed since its header was checked.
    """
    with suppress(OSError):
        if get_stamp(clip.path) == clip.stamp:
            samples, _ = read_source(clip.path, max_peak)
            return samples
    message = f"{clip.path}: changed or removed since it was checked; run again"
    raise ClipError("changed", message)


def check_samples(clips: Sequence[Clip], max_peak: float = 1) -> list[Problem]:
    """Reads the samples of all ``clips`` and returns the problems that :func:`read_samples` has."""
    problems = []

    def check(clip: Clip) -> None:
        with collect_problem(problems, clip.location):
            read_samples(clip, max_peak)

    map_in_threads(check, clips, "checking clips")
    return problems
