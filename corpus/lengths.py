"""Lengths of clips: LJSpeech's, those in a file, or those of a folder of audio."""

import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cli import UserError, progress_bar

LJSPEECH_LENGTHS = Path(__file__).resolve().parents[1] / "filelists" / "ljspeech_lengths.csv"
LJSPEECH_HOP = 256  # samples: the hop of the frames in that file
AUDIO = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".sph"}


def read_lengths(path: Path, column: str | None = None) -> np.ndarray:
    """Reads lengths, int64, (n,), all above 0: of a folder of audio; in a file of numbers, one a
    line, with or without a header; or in a column of a CSV file, which its first line names.

    If any number has decimals, all are seconds; they become frames of 10 ms.

    Raises:
        UserError: the file cannot be read, has no such column, or a line without a length.
    """
    if path.is_dir():
        return audio_lengths(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file of lengths or a folder") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is no text ({error.reason}); give text or CSV in UTF-8") from None
    first, _, _ = text.partition("\n")
    reader = csv.reader(text.splitlines(), delimiter="\t" if "\t" in first else ",")
    rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    names = rows[0][1] if rows else []
    if len(names) > 1 or column is not None:
        if column not in names:
            problem = f"has no column {column}" if column else "has several columns"
            raise UserError(f"{path}: {problem}; give --column one of {', '.join(names)}")
        i, rows = names.index(column), rows[1:]
    else:
        i, rows = 0, rows if names and _number(names[0]) is not None else rows[1:]
    if not rows:
        raise UserError(f"{path}: has no lengths; give one a line")

    values = [_number(row[i]) if len(row) == len(names) else None for _, row in rows]
    wrong = [n for n, value in enumerate(values) if value is None]
    if wrong:
        line, row = rows[wrong[0]]
        raise UserError(
            f"{path}:{line}: {','.join(row)!r}: give a number above 0, like the others; "
            f"{len(wrong):,} of {len(rows):,} lines are wrong"
        )
    if all(value.is_integer() for value in values):
        print(f"{path}: {len(values):,} lengths")
        return np.array(values).astype(np.int64)
    print(f"{path}: {len(values):,} lengths in seconds, as frames of 10 ms")
    return _frames(values)


def _number(cell: str) -> float | None:
    """Returns a length: above 0, and so small that sums of many are exact; None if it is none."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if 0 < value < 1e12 else None


def audio_lengths(folder: Path) -> np.ndarray:
    """Reads the lengths of all audio files in ``folder``, and in those within it, in frames of 10
    ms."""
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


def _frames(seconds: Iterable[float]) -> np.ndarray:
    return np.array([max(round(100 * value), 1) for value in seconds])


def ljspeech_lengths(hop_length: int) -> np.ndarray:
    """Returns the 13,100 lengths of LJSpeech in frames of ``hop_length`` samples, accurate to one
    frame: clips are taken to have ``(frames - 0.5) * LJSPEECH_HOP`` samples."""
    lengths = read_lengths(LJSPEECH_LENGTHS, "frames_hop256")
    return (2 * lengths - 1) * LJSPEECH_HOP // (2 * hop_length) + 1  # in whole half samples


def subset(lengths: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Draws ``size`` of the lengths at random from ``seed``."""
    return np.random.default_rng([seed, 1]).choice(lengths, size, replace=False)
