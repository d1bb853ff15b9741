"""Lengths of clips: LJSpeech's, or those of a file, a corpus or filelists."""

import csv
import re
from pathlib import Path

import numpy as np
import soundfile

from cli import UserError
from hparams import HParams

LJSPEECH_LENGTHS = Path(__file__).resolve().parents[1] / "filelists" / "ljspeech_lengths.csv"
LJSPEECH_HOP = 256  # samples: the hop of the frames in that file
COLUMN = re.compile("(?<![a-z])(frames|lengths?|samples|tokens)(?![a-z])", re.IGNORECASE)
LENGTH = re.compile("[+]?0*[1-9][0-9]{0,11}")  # 12 digits: longer than any clip, in any unit


def read_lengths(path: Path, column: str | None = None, option: str = "--column") -> np.ndarray:
    """Lengths from text, one a line, or from a column of a CSV file; prints which column.

    The first line is a header if none of its cells starts with a number. The default column is
    the one whose name matches COLUMN, or else the only one with whole numbers.

    Args:
        column: its name in the header.
        option: the command-line option that sets ``column``, for messages.

    Returns:
        int64, (n,), all above 0.

    Raises:
        UserError: there is no such file or column, several columns may be meant, or lines are
            wrong: a line of the message for each, up to 20.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", error)
        raise UserError(f"{path}: cannot be read as text or CSV ({reason})") from None
    header = []
    if rows and not any(re.match("[+-]?[.]?[0-9]", cell) for cell in rows[0][1]):
        header = rows.pop(0)[1]
    if not rows:
        raise UserError(f"{path}: has no lengths; give one whole number a line")

    names = header or [f"{c + 1}" for c in range(len(rows[0][1]))]
    if column is not None:
        columns = [c for c, name in enumerate(header) if name == column]
        if not columns:
            raise UserError(f"{path}: has no column '{column}'; its header is '{','.join(header)}'")
    else:
        columns = [c for c, name in enumerate(names) if COLUMN.search(name)] or range(len(names))
        if len(columns) > 1:
            cells = {c: [row[c] for _, row in rows if c < len(row)] for c in columns}
            columns = [c for c in columns if any(map(LENGTH.fullmatch, cells[c]))]
        if not columns:
            raise UserError(f"{path}: has no column of whole numbers; give one length a line")
    if len(columns) > 1:
        fix = f"give {option}" if header else f"put a line of names above, and give {option}"
        candidates = ", ".join(names[c] for c in columns)
        raise UserError(f"{path}: lengths may be in any of the columns {candidates}; {fix}")

    column, problems = columns[0], []
    for line, row in rows:
        if len(row) != len(names):
            problem = f"has {len(row)} columns, the first line {len(names)}; fix or quote it"
            problems.append(f"{path}:{line}: {problem}")
        elif not LENGTH.fullmatch(row[column]):
            problem = f"{row[column]!r} is not a length; use a whole number from 1 to 10^12 - 1"
            problems.append(f"{path}:{line}: {problem}")
    if len(problems) > 20:
        problems[20:] = [f"{path}: {len(problems):,} of {len(rows):,} lines are wrong"]
    if problems:
        raise UserError("\n".join(problems))
    print(f"{path}: {len(rows):,} lengths, from column {names[column]}")
    return np.array([int(row[column]) for _, row in rows])


def rescale(lengths: np.ndarray, hop_from: int | None, hop_to: int | None) -> np.ndarray:
    """Frames of one hop length, in samples, as frames of another; unchanged if both are None.

    A clip is taken to have ``(frames - 0.5) * hop_from`` samples, so the result is right to one
    frame.

    Raises:
        UserError: only one is given, or one is below 1.
    """
    if hop_from is None and hop_to is None:
        return lengths
    if hop_from is None or hop_to is None:
        raise UserError("--hop_from and --hop_to: give both or neither")
    if hop_from < 1 or hop_to < 1:
        raise UserError(f"--hop_from {hop_from} --hop_to {hop_to}: use 1 sample or more")
    print(f"frames of {hop_from} samples become frames of {hop_to}: right to one frame")
    return (2 * lengths - 1) * hop_from // (2 * hop_to) + 1  # in whole half samples


def ljspeech_lengths(hop_length: int) -> np.ndarray:
    """The 13,100 lengths of LJSpeech in frames of ``hop_length`` samples, right to one frame."""
    return rescale(read_lengths(LJSPEECH_LENGTHS), LJSPEECH_HOP, hop_length)


def corpus_lengths(corpus: Path, hop_length: int) -> np.ndarray:
    """Frames of every clip of a corpus in LJSpeech's layout, from the headers of wavs/*.wav."""
    paths = sorted((corpus / "wavs").glob("*.wav"))
    if not paths:
        raise UserError(f"{corpus}: has no wavs/*.wav; give the folder that holds wavs/")
    lengths = []
    for path in paths:
        try:
            lengths.append(soundfile.info(path).frames // hop_length + 1)
        except soundfile.SoundFileError:
            raise UserError(f"{path}: not a readable sound file; replace or remove it") from None
    return np.array(lengths)


def filelist_lengths(filelists: str, data_dir: str, hop_length: int) -> np.ndarray:
    """Frames of every clip of ``filelists``, joined with ``+``, checked as for training."""
    from clips import load_clips  # imports torch, which takes seconds

    clips = load_clips(filelists, HParams(data_dir=data_dir, hop_length=hop_length))
    return np.array([clip.n_frames for clip in clips])


def subset(lengths: np.ndarray, size: int | None, seed: int) -> np.ndarray:
    """``size`` of the lengths, drawn at random from ``seed``; all of them if ``size`` is None."""
    if size is None:
        return lengths
    return np.random.default_rng([seed, 1]).choice(lengths, size, replace=False)
