"""Lengths of clips: LJSpeech's, or those in a file."""

import csv
import re
from pathlib import Path

import numpy as np

from cli import UserError

LJSPEECH_LENGTHS = Path(__file__).resolve().parents[1] / "filelists" / "ljspeech_lengths.csv"
LJSPEECH_HOP = 256  # samples: the hop of the frames in that file
EXAMPLE_CLIPS = 48  # in the pictures that plot_batching.py draws of batches
COLUMN = re.compile("(?<![a-z])(frames|lengths?|samples|tokens)(?![a-z])", re.IGNORECASE)
LENGTH = re.compile("[+]?0*[1-9][0-9]{0,11}")  # 12 digits: longer than any clip, in any unit


def read_lengths(path: Path, column: str | None = None) -> np.ndarray:
    """Lengths from text, one a line, or from a column of a CSV file, int64, (n,), all above 0.

    The first line is a header if none of its cells starts with a number; without one, the columns
    are called 1, 2, ... The default column is the one whose name matches COLUMN, or else the only
    one with whole numbers; its name is printed.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as text or CSV ({error})") from None
    names = rows[0][1] if rows else []
    if any(re.match("[+-]?[.]?[0-9]", cell) for cell in names):
        names = [f"{number}" for number in range(1, len(names) + 1)]
    else:
        rows = rows[1:]
    if not rows:
        raise UserError(f"{path}: has no lengths; give one whole number a line")

    wanted, columns = repr(column), [i for i, name in enumerate(names) if name == column]
    if column is None:
        named = [i for i, name in enumerate(names) if COLUMN.search(name)] or range(len(names))
        filled = [i for _, row in rows for i, cell in enumerate(row) if LENGTH.fullmatch(cell)]
        wanted, columns = "of whole numbers", sorted(set(named).intersection(filled))
    if not columns:
        fix = f"give one of {', '.join(names)}, or one length a line"
        raise UserError(f"{path}: has no column {wanted}; {fix}")
    if len(columns) > 1:
        several = ", ".join(names[i] for i in columns)
        raise UserError(f"{path}: lengths may be in any of the columns {several}; give --column")

    i, n = columns[0], len(names)
    problems = [
        f"{path}:{line}: {','.join(row)!r}: give {n} columns, with a whole number from 1 to "
        f"10^12 - 1 in {names[i]}"
        for line, row in rows
        if len(row) != n or not LENGTH.fullmatch(row[i])
    ]
    if len(problems) > 20:
        problems[20:] = [f"{path}: {len(problems):,} of {len(rows):,} lines are wrong"]
    if problems:
        raise UserError("\n".join(problems))
    print(f"{path}: {len(rows):,} lengths, from column {names[i]}")
    return np.array([int(row[i]) for _, row in rows])


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
