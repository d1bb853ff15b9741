"""Lengths of clips: LJSpeech's, or those in a file or of a folder of audio."""

import csv
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from cli import UserError, progress_bar

LJSPEECH_LENGTHS = Path(__file__).resolve().parents[1] / "filelists" / "ljspeech_lengths.csv"
LJSPEECH_HOP = 256  # samples: the hop of the frames in that file
EXAMPLE_CLIPS = 48  # in the pictures that plot_batching.py draws of batches
AUDIO = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".sph"}
SECONDS = re.compile("(?<![a-z])(dur|durations?|seconds|length_s)$", re.IGNORECASE)
COLUMN = re.compile("(?<![a-z])(frames|lengths?|samples|tokens)(?![a-z])", re.IGNORECASE)
LENGTH = re.compile("[+]?0*[1-9][0-9]{0,11}")  # 12 digits: longer than any clip, in any unit
DECIMAL = re.compile("[+]?[0-9]{0,7}[.][0-9]*")

Rows = list[tuple[int, list[str]]]  # number of the line, and its cells


def read_lengths(path: Path, column: str | None = None) -> np.ndarray:
    """Lengths, int64, (n,), all above 0, of a folder of audio, or in a file: one a line; a column
    of a CSV file; ``name length``, as Kaldi's utt2dur and utt2num_frames; or JSON objects, as the
    manifests of NeMo and Hugging Face. Seconds become frames of 10 ms, Kaldi's.

    The first line is a header if none of its cells starts with a number; without one, the columns
    are called 1, 2, ... The default column is the one whose name matches COLUMN or SECONDS, or else
    the only one with whole numbers, or with decimals: those are seconds. Its name is printed.
    """
    if path.is_dir():
        return audio_lengths(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
        rows = _json_rows(text) if text.lstrip()[:1] in ("{", "[") else _text_rows(text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file of lengths or a folder") from None
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as text, CSV or JSON ({error})") from None
    names = rows[0][1] if rows else []
    if any(re.match("[+-]?[.]?[0-9]", cell) for cell in names):
        names = [f"{number}" for number in range(1, len(names) + 1)]
    else:
        rows = rows[1:]
    if not rows:
        raise UserError(f"{path}: has no lengths; give one whole number a line")

    def share(i: int, matches: Callable[[str], object]) -> float:
        return sum(len(row) > i and bool(matches(row[i])) for _, row in rows) / len(rows)

    seconds = {
        i
        for i, name in enumerate(names)
        if SECONDS.search(name) or share(i, DECIMAL.fullmatch) > 0.5
    }
    wanted, columns = repr(column), [i for i, name in enumerate(names) if name == column]
    if column is None:
        named = {i for i, name in enumerate(names) if COLUMN.search(name) or SECONDS.search(name)}
        named = named or set(range(len(names)))
        whole = {i for i in named - seconds if share(i, LENGTH.fullmatch)}
        wanted, columns = "of whole numbers", sorted(whole or named & seconds)
    if not columns:
        fix = f"give one of {', '.join(names)}, or one length a line"
        if len(names) < 2:
            fix = "write one length a line, a whole number above 0, or seconds"
        raise UserError(f"{path}: has no column {wanted}; {fix}")
    if len(columns) > 1:
        several = ", ".join(names[i] for i in columns)
        raise UserError(f"{path}: lengths may be in any of the columns {several}; give --column")

    i, n = columns[0], len(names)
    what, is_length = "a whole number from 1 to 10^12 - 1", LENGTH.fullmatch
    if i in seconds:
        what, is_length = "seconds, above 0", _is_seconds
    problems = [
        f"{path}:{line}: {','.join(row)!r}: give {n} column{'s' * (n > 1)}, with {what}, in "
        f"{names[i]}"
        for line, row in rows
        if len(row) != n or not is_length(row[i])
    ]
    if len(problems) > 20:
        problems[20:] = [f"{path}: {len(problems):,} of {len(rows):,} lines are wrong"]
    if problems:
        raise UserError("\n".join(problems))
    unit = ", seconds, as frames of 10 ms" if i in seconds else ""
    print(f"{path}: {len(rows):,} lengths, from column {names[i]}{unit}")
    cells = [row[i] for _, row in rows]
    return _frames(map(float, cells)) if i in seconds else np.array(list(map(int, cells)))


def _text_rows(text: str) -> Rows:
    """Cells separated by commas, tabs, or a space between two words, with or without a header."""
    first = text.strip().partition("\n")[0]
    if "," not in first and "\t" not in first and len(first.split()) == 2:
        lines = enumerate(text.splitlines(), start=1)
        return [(number, line.split()) for number, line in lines if line.strip()]
    reader = csv.reader(text.splitlines(keepends=True), delimiter="\t" if "\t" in first else ",")
    return [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]


def _json_rows(text: str) -> Rows:
    """The numbers of JSON objects, one a line, or in a list, or in a list called "data"; and
    a header, their names."""
    try:
        objects = json.loads(text)
        objects = objects.get("data", [objects]) if isinstance(objects, dict) else objects
        numbered = list(enumerate(objects, start=1))
    except json.JSONDecodeError:
        numbered = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                numbered += [(number, json.loads(line))] if line.strip() else []
            except json.JSONDecodeError:
                raise ValueError(f"line {number} is no JSON object") from None
    wrong = [number for number, values in numbered if not isinstance(values, dict)]
    if wrong:
        raise ValueError(f"number {wrong[0]} is no JSON object")
    names = {
        name: None
        for _, values in numbered
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    rows = [(line, [str(values.get(name, "")) for name in names]) for line, values in numbered]
    return [(0, list(names)), *rows]


def audio_lengths(folder: Path) -> np.ndarray:
    """Lengths of all audio files in ``folder``, and in those within it, in frames of 10 ms."""
    import soundfile

    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in AUDIO)
    if not paths:
        raise UserError(f"{folder}: has no audio ({', '.join(sorted(AUDIO))}); use another folder")
    seconds = []
    for path in progress_bar(paths, "headers", unit="clip"):
        try:
            seconds.append(soundfile.info(path).duration)
        except RuntimeError as error:
            raise UserError(f"{path}: cannot be read as audio ({error}); remove it") from None
        if seconds[-1] == 0:
            raise UserError(f"{path}: is empty; remove it")
    print(f"{folder}: {len(paths):,} clips, {sum(seconds) / 3600:.2f} hours, as frames of 10 ms")
    return _frames(seconds)


def _is_seconds(cell: str) -> bool:
    number = DECIMAL.fullmatch(cell) or LENGTH.fullmatch(cell)
    return number is not None and 0 < float(cell) < 1e9


def _frames(seconds: Iterable[float]) -> np.ndarray:
    return np.array([max(round(100 * value), 1) for value in seconds])


def ljspeech_lengths(hop_length: int) -> np.ndarray:
    """The 13,100 lengths of LJSpeech in frames of ``hop_length`` samples, accurate to one frame:
    clips are taken to have ``(frames - 0.5) * LJSPEECH_HOP`` samples."""
    lengths = read_lengths(LJSPEECH_LENGTHS)
    print(f"frames of {LJSPEECH_HOP} samples become frames of {hop_length}: accurate to one frame")
    return (2 * lengths - 1) * LJSPEECH_HOP // (2 * hop_length) + 1  # in whole half samples


def subset(lengths: np.ndarray, size: int | None, seed: int) -> np.ndarray:
    """``size`` of the lengths, drawn at random from ``seed``; all of them if ``size`` is None."""
    rng = np.random.default_rng([seed, 1])
    return lengths if size is None else rng.choice(lengths, size, replace=False)
