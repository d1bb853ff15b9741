"""Check every clip of a corpus with one speaker, and write the filelists that train.py reads.

    python scripts/prepare_corpus.py DIR --name mine
    python scripts/prepare_corpus.py VCTK --speaker p225 --name p225 --convert_to data/p225

DIR has a list of sound files and texts, such as metadata.csv with lines ID|text or
ID|text|normalised text: with |, tabs, commas or semicolons, or JSON lines. The texts are in the
field that its header or keys call text, sentence or transcript, or else in that with the most
words. Or DIR has a text file for each sound file: ID.txt or ID.normalized.txt beside it, or, as in
VCTK, txt/p225/ID.txt for wav48/p225/ID.wav. --convert_to takes other formats than wav and flac.

English words are read as the phones that CMUdict has for them. With --text_cleaners basic_cleaners,
for another language, the characters of all texts become its alphabet, filelists/NAME_symbols.txt.
"""

import argparse
import csv
import dataclasses
import glob
import hashlib
import json
import os
import re
import shlex
import sys
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mode
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, pluralize
from corpus.audio import (
    SUFFIXES,
    Sounds,
    check_source,
    check_wav,
    convert_sound,
    find_sound,
    index_sounds,
    simplify,
)
from corpus.clips import (
    Clip,
    Line,
    Problem,
    check_clips,
    check_samples,
    map_in_threads,
    raise_problems,
    read_lines,
    report_unknown_characters,
    report_unknown_words,
    write_lines,
)
from hparams import HParams, audio_settings, create_hparams, format_overrides
from text import clean_text
from text.cleaners import CLEANERS
from text.symbols import alphabet, check_alphabet

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
TRAIN_SHARE = 0.8  # of the clips, as the paper's
LISTS = ".csv", ".tsv", ".txt", ".json", ".jsonl"
SEPARATORS = "|\t,;"
TEXTS = "(norm\\w*[ _-]?)?(text|sentence|transcript|transcription)s?([ _-]?norm\\w*)?"
HEADER = re.compile(f"((audio|clip|file|id|name|path|utt|wav)[ _-]?)+|{TEXTS}", re.IGNORECASE)
SMALL_MINUTES = 60  # with less speech, training starts from another voice
ONE_SPEAKER = "if each is a speaker, choose one by --speaker"
Listed = tuple[list[Line], list[Problem], list[str]]  # clips, problems of others, and notes


# What a corpus lists


def read_corpus(
    corpus: Path, speaker: str = "", table: str = "", text_column: str = ""
) -> tuple[list[Line], list[Problem]]:
    """Returns the clips that ``corpus`` lists, or those of ``speaker``, and the problems of the
    others: of the list ``table``, of metadata.csv, of the list with the most text, or of a text
    file for each."""
    if not corpus.is_dir():
        raise UserError(f"{corpus}: no such folder; give the corpus's folder")
    # glob leaves out what is hidden, and follows links.
    files = sorted(map(Path, glob.glob("**", root_dir=corpus, recursive=True)))
    audio = [path for path in files if path.suffix.lower() in SUFFIXES]
    audio = [path for path in audio if not (corpus / path).is_dir()]
    audio = [path for path in audio if not path.stem.endswith("_mic2")]  # VCTK's other microphone
    sounds = index_sounds(audio)
    tables = [path for path in files if path.suffix.lower() in LISTS and path.parent == Path()]
    tables = [str(path) for path in tables if simplify(path.stem) not in sounds]
    if named := table or ("metadata.csv" if "metadata.csv" in tables else ""):
        tables = [named]
    read = [read_table(corpus, name, sounds, speaker, text_column) for name in tables]
    found = [each for each in read if named or len(each[0]) > len(each[1])]
    if not found and text_column:
        raise UserError(f"--text_column {text_column}: {corpus} has no list of clips; leave it out")
    listings = found or [read_pairs(corpus, files, audio, speaker), *read]
    lines, problems, notes = max(listings, key=lambda each: len(str(each[0])))
    if len(found) > 1:
        notes.append(f"note: {corpus}: has {len(found)} lists; to read another, give its path")
    for note in notes:
        print(note)
    raise_problems(problem for problem in problems if problem.kind == "choice")
    if not lines and not problems:
        of_speaker = f"--speaker {speaker}: " if speaker else ""
        texts = [str(path) for path in files if path.suffix.lower() in LISTS or path.name == "text"]
        seen = f" (not read: {', '.join(texts[:3])})" if texts else ""
        fix = "name the list or its folder, or write metadata.csv with lines of ID|text"
        raise UserError(f"{of_speaker}{corpus}: no sound file has a text{seen}; {fix}")
    listed = {simplify(os.path.relpath(line.path, corpus)) for line in lines}
    unlisted = [path for path in audio if simplify(str(path)) not in listed]
    if unlisted and not speaker and not problems:
        n_files = pluralize(len(unlisted), "sound file")
        print(f"note: {corpus}: {n_files} without a text, such as {unlisted[0]}, left out")
    for line in lines:
        for value in (os.path.relpath(line.path, corpus), line.text):
            if re.search(r"^\s|[|\r\n\ufeff\0]", value):
                problem = f"{value!r} has a |, starts with a space or has a line break; change that"
                problems.append(Problem(line.location, "bar", problem))
    starts = [re.match(r"(\d[\d.]* )*", line.text)[0] for line in lines]
    if 2 * starts.count("") < len(lines):
        begin = f"{len(lines) - starts.count(''):,} texts begin with numbers, such as {max(starts)}"
        print(f"note: {corpus}: {begin}that are read aloud; if they are times, take them out")
    return lines, problems


def read_rows(file: Path, sounds: Sounds) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Returns the names of a list's columns, and a row for each line but the header. Columns are
    named by the keys of JSON, by the header, or by numbers from 1."""
    lines = read_lines(file)
    if 2 * sum(line.startswith("{") for _, line in lines) >= len(lines):
        items = [(location, read_json(line)) for location, line in lines]
        keys = [*dict.fromkeys(key for _, item in items for key in item)]
        rows = [(location, [item.get(key, "") for key in keys if item]) for location, item in items]
        return keys, rows

    def names_sound(row: Sequence[str]) -> bool:
        return any(find_sound(field, sounds) for field in row)

    def count_uses(separator: str) -> tuple[int, int]:
        rows = [split_line(line, separator) for _, line in lines]
        return sum(map(names_sound, rows)), sum(len(row) > 1 for row in rows)

    separator = max(SEPARATORS, key=count_uses)
    rows = [(location, split_line(line, separator)) for location, line in lines]
    width = max(2, mode(len(row) for _, row in rows))
    columns = [*map(str, range(1, width + 1))]
    header = [*map(str.strip, rows[0][1])]
    if any(map(HEADER.fullmatch, header)) and not names_sound(header):
        return header[:width], rows[1:]
    return columns, rows


def read_json(line: str) -> dict[str, str]:
    """Returns the texts and numbers of a line of JSON by their keys; other values are empty. A line
    that is not a JSON object has none."""
    with suppress(ValueError, AttributeError, RecursionError):
        item = json.loads(line, parse_constant=lambda _: None)  # NaN is no number
        return {key: str(v) if type(v) in (str, int, float) else "" for key, v in item.items()}
    return {}


def split_line(line: str, separator: str) -> list[str]:
    """Returns a line's fields. Quotes are CSV's if the line is well-formed; else they are text, as
    where a speech goes on in the next line."""
    with suppress(csv.Error):
        return next(csv.reader([line], delimiter=separator, strict=True))
    return line.split(separator)


def read_table(corpus: Path, table: str, sounds: Sounds, speaker: str, text_column: str) -> Listed:
    """Returns a list's clips, or those of ``speaker``, the problems of others, and notes."""
    columns, rows = read_rows(corpus / table, sounds)
    lines, problems, notes, width = [], [], [], len(columns)
    if not rows or width < 2:
        return [], [Problem(where, "columns", "has no text; write one") for where, _ in rows], []
    fields = [[row[i] for _, row in rows if len(row) == width] for i in range(width)]
    n_found = [sum(find_sound(name, sounds) is not None for name in field) for field in fields]
    names = n_found.index(max(n_found))
    others = {i: field for i, field in enumerate(fields) if i != names}
    texts = find_texts(columns, others, text_column)
    *versions, best = texts
    is_clear = all(are_versions(fields[i], fields[best]) for i in versions)
    if is_clear and text_column in ("", columns[best]):
        taken = f"field {columns[names]} names the clips; field {columns[best]} has their texts"
        notes.append(f"{corpus / table}: {taken}")
    else:
        choice = " or ".join(columns[i] for i in texts)
        problem = f"the texts may be in field {choice}; choose it by --text_column"
        problems.append(Problem(f"{corpus / table}:1", "choice", problem))
    if not speaker:
        notes += note_speakers({columns[i]: others[i] for i in others if i not in texts})
    for location, row in rows:
        lacking = {*range(len(row), width)}
        if len(row) > width or not lacking <= {*texts[1:]}:  # a text may have one version
            problem = f"{pluralize(len(row), 'field')}, not {width}; write as many"
            problem += "; put quotes around a text with commas" if len(row) > width else ""
            problem = problem if row else "is not a JSON object; write one"
            problems.append(Problem(location, "columns", problem))
        elif speaker and speaker not in map(str.strip, row):
            continue
        elif path := find_sound(row[names], sounds):
            text = [row[i] for i in texts if i < len(row)][-1].strip()
            text = re.sub("[ \t\r\n]+", " ", text)  # a no-break space may be in a number
            lines.append(Line(location, str(corpus / path), text))
        else:
            fix = "add it, fix the name, or remove the line (a header?)"
            problem = f"{row[names]}: no such sound here, or several of that name; {fix}"
            problems.append(Problem(location, "missing", problem))
    return lines, problems, notes


def note_speakers(columns: dict[str, list[str]]) -> list[str]:
    """Returns a note on each column that may have the names of speakers."""
    notes = []
    for name, field in columns.items():
        values = {*field}
        if 1 < len(values) <= len(field) / 2 and "." not in "".join(values):  # seconds have one
            examples = f"{len(values):,} values, such as {max(values)!r}"
            notes.append(f"note: field {name} has {examples}; {ONE_SPEAKER}")
    return notes


def find_texts(columns: Sequence[str], fields: dict[int, list[str]], text_column: str) -> list[int]:
    """Returns which of ``fields`` may have the texts: the one that was chosen, those that the
    header calls texts, or those with about the most words."""
    if text_column:
        return [i for i in fields if columns[i] == text_column] or [*fields]
    if called := [i for i in fields if re.fullmatch(TEXTS, columns[i].lower())]:
        return [i for i in called if "norm" in columns[i].lower()] or called
    n_words = {i: sum(len(find_words(text)) for text in fields[i]) for i in fields}
    # More than half of the most is about as many. Three in each line are a text, in any case.
    enough = min(max(n_words.values()) / 2, 3 * len(fields[min(fields)]) - 1)
    return [i for i in fields if n_words[i] > enough] or [*fields]


def find_words(text: str) -> list[str]:
    """Returns a text's words. Each character of Chinese and Japanese is one."""
    plain = re.sub(r"[^\w\s]", "", text.casefold())
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+", plain)


def are_versions(texts: Sequence[str], others: Sequence[str]) -> bool:
    """Returns whether two columns have the same texts, one of them perhaps normalised: whether half
    of their words are in both."""
    pairs = [({*find_words(a)}, {*find_words(b)}) for a, b in zip(texts, others, strict=True)]
    n_shared = sum(len(a & b) for a, b in pairs)
    return 2 * n_shared >= sum(min(len(a), len(b)) for a, b in pairs)


def read_pairs(corpus: Path, files: list[Path], audio: list[Path], speaker: str) -> Listed:
    """Returns the clips whose texts are in files of their own, the problems of the others, and
    notes."""
    lines, problems, notes = [], [], []
    audio = [path for path in audio if path.suffix.lower() in SUFFIXES[:2]] or audio
    folders = sorted({path.parent for path in audio})
    if speaker:
        audio = [path for path in audio if speaker in path.parent.parts]
    elif len(folders) > 1:
        notes = [f"note: audio is in {len(folders):,} folders, such as {folders[0]}; {ONE_SPEAKER}"]
    texts = [path for path in files if path.suffix.lower() == ".txt"]
    texts = {simplify(str(path)): path for path in texts} | {str(path): path for path in texts}
    for path in audio:
        name = path.stem.removesuffix("_mic1")
        beside = path.with_name(f"{name}.txt")
        mirrored = Path("txt", *path.parts[1:-1], f"{name}.txt")
        places = path.with_name(f"{name}.normalized.txt"), beside, mirrored
        keys = (key for place in places for key in (str(place), simplify(str(place))))
        text = next((texts[key] for key in keys if key in texts), None)
        if text is None:
            message = f"{path}: has no text; write its text, this file, or remove the audio"
            problems.append(Problem(f"{corpus / beside}:1", "no text", message))
        else:
            content = " ".join(" ".join(line for _, line in read_lines(corpus / text)).split())
            lines.append(Line(f"{corpus / text}:1", str(corpus / path), content))
    return lines, problems if lines else [], notes


def find_symbols(lines: Sequence[Line], cleaners: Sequence[str]) -> str:
    """Returns all characters of the cleaned texts that can be symbols, sorted. Prints the rarest,
    among which misprints would be, and the texts with digits."""
    uses = Counter()
    dotless = "ı" if any("ı" in line.text for line in lines) else ""  # as in Turkish
    for line in lines:
        with suppress(ValueError):  # check_clips reports it
            uses.update(unicodedata.normalize("NFC", clean_text(line.text, cleaners, dotless)))
    symbols = []
    # @ is last: as the first, it would name a file.
    for character in sorted(uses, key=lambda symbol: (symbol == "@", symbol)):
        with suppress(ValueError):  # report_unknown_characters prints those that have no symbol
            check_alphabet(character)
            symbols.append(character)
    rarest = "".join(sorted(symbols, key=uses.get)[:10])
    print(f"{len(symbols)} symbols; the rarest are {rarest!r}")
    if with_digits := [line.location for line in lines if any(map(str.isdecimal, line.text))]:
        texts = pluralize(len(with_digits), "text")
        print(f"note: {with_digits[0]}: digits stay as written (in {texts}); spell numbers out")
    if {"'", "’"} <= {*symbols}:
        print("note: ' and ’ become two symbols; if they mean the same, write one of them")
    return "".join(symbols)


# Conversion


def convert(clips: Sequence[Clip], folder: Path, corpus: Path, rate: int, trim_db: float) -> None:
    """Makes the new ``folder`` a corpus: wavs/ID.wav of all ``clips``, and then metadata.csv."""

    def name_of(clip: Clip) -> str:
        path = Path(os.path.relpath(clip.path, corpus)).with_suffix("")
        return re.sub("^wavs?/", "", path.as_posix())

    uses = Counter(map(name_of, clips))
    if repeated := [name for name in uses if uses[name] > 1]:
        raise UserError(f"{corpus}: has several clips named {repeated[0]}; rename them or keep one")

    def convert_to_folder(clip: Clip) -> None:
        convert_sound(clip.path, folder / f"wavs/{name_of(clip)}.wav", rate, trim_db)

    map_in_threads(convert_to_folder, clips, "converting")
    write_lines(folder / "metadata.csv", [f"{name_of(clip)}|{clip.text}" for clip in clips])
    print(f"{folder}: {len(clips):,} clips converted")


# Filelists


def check_corpus(
    lines: Sequence[Line], problems: Sequence[Problem], hparams: HParams, converting: bool = False
) -> list[Clip]:
    """Returns the clips of ``lines``, or raises all problems."""
    any_length = dataclasses.replace(hparams, max_text_length=2**31 - 1)  # training checks it
    check_audio = check_source if converting else check_wav
    clips, of_lines = check_clips(lines, any_length, {}, check_audio)
    of_samples = check_samples(clips, max_peak=2 if converting else 1)
    raise_problems([*problems, *of_lines, *of_samples])
    return clips


def split(clips: Sequence[Clip]) -> tuple[list[Clip], list[Clip]]:
    """Returns the clips for training and for validation, one at least, in the order given. Takes of
    one sentence, whose cleaned texts are equal, are on the same side.

    Texts are ranked by a hash, so the split is the same on every machine, whatever the order of the
    clips.
    """
    ranks = [hashlib.sha256(repr(clip.ids).encode()).digest() for clip in clips]
    distinct, ordered = sorted(set(ranks)), sorted(ranks)
    if len(distinct) < 2:
        n_clips = pluralize(len(clips), "clip")
        raise UserError(f"{n_clips}, all of one text; add clips of another text, to validate on")
    n_train = TRAIN_SHARE * len(clips)
    limit = min(distinct[1:], key=lambda rank: abs(bisect_left(ordered, rank) - n_train))
    train = [clip for clip, rank in zip(clips, ranks, strict=True) if rank < limit]
    val = [clip for clip, rank in zip(clips, ranks, strict=True) if rank >= limit]
    return train, val


def write_filelists(clips: Sequence[Clip], hparams: HParams) -> int:
    """Writes the clips' paths and texts into the two filelists that ``hparams`` name. Returns how
    many clips train."""
    files, parts = (hparams.training_files, hparams.validation_files), split(clips)
    for file, part in zip(files, parts, strict=True):
        rows = [f"{os.path.relpath(clip.path, hparams.data_dir)}|{clip.text}" for clip in part]
        write_lines(Path(file), rows)
        print(f"{file}: {pluralize(len(rows), 'clip')}")
    return len(parts[0])


# The program


def prepare(args: argparse.Namespace) -> None:
    """Checks the corpus, converts it if asked, writes its filelists, and prints how to train."""
    lines, problems = read_corpus(args.corpus, args.speaker, args.table, args.text_column)
    print(f"{args.corpus}: {pluralize(len(lines), 'clip')}")
    preset = create_hparams(preset="voice")
    audio = audio_settings(args.sampling_rate) if args.sampling_rate != preset.sampling_rate else {}
    settings = audio | {
        "data_dir": str(args.convert_to or args.corpus),
        "training_files": f"filelists/{args.name}_train.txt",
        "validation_files": f"filelists/{args.name}_val.txt",
        "text_cleaners": (args.text_cleaners,),
    }
    hparams = dataclasses.replace(preset, **settings)
    symbols_file = Path(f"filelists/{args.name}_symbols.txt")
    if args.text_cleaners == "basic_cleaners":
        symbols = find_symbols(lines, hparams.text_cleaners)
        hparams = dataclasses.replace(hparams, symbols=symbols, n_symbols=len(alphabet(symbols)))
        settings["symbols"] = f"@{symbols_file}"
    clips = check_corpus(lines, problems, hparams, converting=args.convert_to is not None)
    report_unknown_characters(((clip.location, clip.text) for clip in clips), hparams)
    if args.text_cleaners == "english_phones":
        report_unknown_words(clips)
    if args.convert_to:
        convert(clips, args.convert_to, args.corpus, args.sampling_rate, args.trim_db)
        lines, problems = read_corpus(args.convert_to)
        clips = check_corpus(lines, problems, hparams)
    n_clips = write_filelists(clips, hparams)
    if hparams.symbols:
        write_lines(symbols_file, [hparams.symbols])
    minutes = sum(clip.n_frames for clip in clips) * hparams.hop_length / hparams.sampling_rate / 60
    print_training_command(args.name, settings, minutes, n_clips)


def print_training_command(
    name: str, changes: dict[str, Any], minutes: float, n_clips: int
) -> None:
    """Prints how to train on ``n_clips`` of a corpus whose settings are ``changes``."""
    command = ["python", os.path.relpath(TRAIN), "-o", f"runs/{name}"]
    if "sampling_rate" not in changes and minutes < SMALL_MINUTES:
        voice = os.path.relpath(TRAIN.parent / "voices" / "kathleen.pt")
        speech = pluralize(round(minutes), "minute")
        print(f"note: {speech} of speech: training starts from {voice}")
        command += ["-c", voice, "--warm_start"]
        if "symbols" not in changes:
            changes["ignore_layers"] = ()  # the voice has the same symbols
        changes |= {"hours": 3, "learning_rate": 1e-3, "learning_rate_decay": 0.5}
        changes |= {"batch_size": min(8, n_clips), "precision": "fp32"}  # not the voice's
        changes |= {"keep_checkpoints": 2, "checkpoint_minutes": 10}
    else:
        command += ["--preset", "voice"]
        changes |= {"hours": 8}
        changes |= {"batch_size": n_clips} if n_clips < HParams.batch_size else {}
    print("Next (the newest checkpoint will speak best):")
    print(f"  {shlex.join([*command, '--hparams', format_overrides(changes)])}")


def check_arguments(args: argparse.Namespace) -> None:
    """Raises :class:`UserError` for a wrong argument, before anything is read or written."""
    if not re.fullmatch(r"\w[\w.-]*", args.name):
        raise UserError(f"--name {args.name}: use letters, digits and . _ - only")
    if not 0 <= args.trim_db <= 120:
        raise UserError(f"--trim_db {args.trim_db}: use 0 to 120")
    folder = args.convert_to
    lists = [Path(f"filelists/{args.name}_{part}.txt") for part in ("train", "val", "symbols")]
    if not folder:
        if args.trim_db:
            raise UserError(f"--trim_db {args.trim_db}: needs --convert_to, for the trimmed clips")
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: already has files; give another --convert_to")
    elif folder.resolve().is_relative_to(args.corpus.resolve()):
        raise UserError(f"--convert_to {folder}: is in the corpus; use another folder")
    elif existing := [file for file in lists if file.exists()]:
        raise UserError(f"{existing[0]}: exists already; give another --name, or delete it")


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("corpus", type=Path, metavar="DIR", help="folder of the corpus, or one of its lists")
    add("--name", required=True, help="write filelists/NAME_*.txt")
    add("--speaker", default="", help="use only lines with this field, or audio in this folder")
    column = "the column of the texts: its name, or, without a header, its number"
    add("--text_column", default="", metavar="COLUMN", help=column)
    rate = "sampling rate (default: %(default)s)"
    add("--sampling_rate", type=int, default=HParams.sampling_rate, metavar="HZ", help=rate)
    converted = "make a corpus of mono wavs of that rate in this new folder, and use it"
    add("--convert_to", type=Path, metavar="DIR", help=converted)
    quiet = "also cut off both ends, where they stay so far below the loudest 25 ms (try 40)"
    add("--trim_db", type=float, default=0.0, metavar="DB", help=quiet)
    cleaners = "cleaners of the language (default: %(default)s)"
    names = sorted(name for name in CLEANERS if "letters" not in name)  # those are for programs
    add("--text_cleaners", choices=names, default="english_phones", help=cleaners)
    args, args.table = parser.parse_args(argv), ""
    if args.corpus.is_file():
        args.corpus, args.table = args.corpus.parent, args.corpus.name
    check_arguments(args)
    prepare(args)


if __name__ == "__main__":
    exit_on_user_error(main)
