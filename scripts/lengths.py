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
    """Lengths from text, one a line, or from a column of a CSV file; prints which column.

    The first line is a header if none of its cells starts with a number; without one, the columns
    are called 1, 2, ... The default is the one whose name matches COLUMN, or else the only one
    with whole numbers.

    Returns:
        int64, (n,), all above 0.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as text or CSV ({error})") from None
    names = [f"{number}" for number in range(1, len(rows[0][1]) + 1)] if rows else []
    if rows and not any(re.match("[+-]?[.]?[0-9]", cell) for cell in rows[0][1]):
        names = rows.pop(0)[1]
    if not rows:
        raise UserError(f"{path}: has no lengths; give one whole number a line")

    candidates = [i for i, name in enumerate(names) if name == column]
    if column is None:
        named = [i for i, name in enumerate(names) if COLUMN.search(name)]
        candidates = [
            i
            for i in named or range(len(names))
            if any(LENGTH.fullmatch(row[i]) for _, row in rows if i < len(row))
        ]
    if not candidates:
        wanted = "of whole numbers" if column is None else repr(column)
        fix = f"give one of {', '.join(names)}, or one length a line"
        raise UserError(f"{path}: has no column {wanted}; {fix}")
    if len(candidates) > 1:
        several = ", ".join(names[i] for i in candidates)
        raise UserError(f"{path}: lengths may be in any of the columns {several}; give --column")

    i = candidates[0]
    problems = [
        f"{path}:{line}: {','.join(row)!r}: give {len(names)} columns, with a whole number from 1 "
        f"to 10^12 - 1 in {names[i]}"
        for line, row in rows
        if len(row) != len(names) or not LENGTH.fullmatch(row[i])
    ]
    if len(problems) > 20:
        problems[20:] = [f"{path}: {len(problems):,} of {len(rows):,} lines are wrong"]
    if problems:
        raise UserError("\n".join(problems))
    print(f"{path}: {len(rows):,} lengths, from column {names[i]}")
    return np.array([int(row[i]) for _, row in rows])


def ljspeech_lengths(hop_length: int) -> np.ndarray:
    """The 13,100 lengths of LJSpeech in frames of ``hop_length`` samples.

    They are accurate to one frame: clips are taken to have ``(frames - 0.5) * LJSPEECH_HOP``
    samples.
    """
    lengths = read_lengths(LJSPEECH_LENGTHS)
    print(f"frames of {LJSPEECH_HOP} samples become frames of {hop_length}: accurate to one frame")
    return (2 * lengths - 1) * LJSPEECH_HOP // (2 * hop_length) + 1  # in whole half samples


def subset(lengths: np.ndarray, size: int | None, seed: int) -> np.ndarray:
    """``size`` of the lengths, drawn at random from ``seed``; all of them if ``size`` is None."""
    if size is None:
        return lengths
    return np.random.default_rng([seed, 1]).choice(lengths, size, replace=False)
