"""Check every clip of a corpus with one speaker, and write the filelists that train.py reads.

    python scripts/prepare_corpus.py DIR --name mine
    python scripts/prepare_corpus.py VCTK --speaker p225 --name p225 --convert_to data/p225

DIR has a list of IDs or paths of sound files and their texts, such as metadata.csv with lines
ID|text or ID|text|normalised text: with |, tabs, commas or semicolons, or JSON lines, with a header
or not. What it holds tells which field is which. Or DIR has a text file for each sound file, in any
folder: ID.txt or ID.normalized.txt beside it, or, as in VCTK, txt/p225/ID.txt for
wav48/p225/ID.wav. Other formats than wav and flac need --convert_to.

Clips whose cleaned texts are equal are in the same list. English words are read as the phones that
CMUdict has for them. With --text_cleaners basic_cleaners, for another language, the characters of
all texts become its alphabet, filelists/NAME_symbols.txt.
"""

import argparse
import csv
import dataclasses
import glob
import hashlib
import io
import json
import os
import re
import shlex
import sys
import unicodedata
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np
import soundfile
import soxr

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, pluralize, replace_file
from corpus.audio import ClipError, Stamp, check_header, check_wav
from corpus.clips import (
    Clip,
    Line,
    Problem,
    check_clips,
    check_samples,
    collect_problem,
    map_in_threads,
    raise_problems,
    read_lines,
    report_unknown_characters,
    write_lines,
)
from hparams import HParams, audio_settings, format_overrides
from text import clean_text
from text.cleaners import CLEANERS, TRAINING, unknown_words
from text.symbols import alphabet, check_alphabet

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
VOICE = TRAIN.parent / "voices" / "kathleen.pt"
TRAIN_SHARE = 0.8  # of the clips, as the paper's
FOLDERS = "wavs/", "wav/", ""  # where the audio of metadata.csv is
SUFFIXES = ".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif"  # in order of preference
LISTS = ".csv", ".tsv", ".txt", ".json", ".jsonl"
SEPARATORS = "|\t,;"
HEADER = re.compile("((audio|clip|file|id|name|path|utt|wav)_?)+$", re.IGNORECASE)  # of the names
SMALL_MINUTES = 60  # with less speech, training starts from another voice
MARGIN = 0.05  # seconds that trimming leaves around the speech
ONE_SPEAKER = "if each is a speaker, choose one by --speaker"
Listed = tuple[list[Line], list[Problem], list[str]]  # clips, problems of others, and notes


# What a corpus lists


def read_corpus(
    corpus: Path, speaker: str = "", table: str = ""
) -> tuple[list[Line], list[Problem]]:
    """Returns the clips that ``corpus`` lists, or those of ``speaker``, and the problems of the
    others: of the list ``table``, of metadata.csv, of the list with the most text, or of a text
    file for each."""
    if not corpus.is_dir():
        raise UserError(f"{corpus}: no such folder; give the corpus's folder")
    # glob leaves out what is hidden, and follows links.
    files = sorted(map(Path, glob.glob("**", root_dir=corpus, recursive=True)))
    audio = [path for path in files if path.suffix.lower() in SUFFIXES]
    audio = [path for path in audio if not path.stem.endswith("_mic2")]  # VCTK's other microphone
    sounds = defaultdict(list)
    for path in audio:
        sounds[simplify(str(path)).rpartition("/")[2]].append(path)
    tables = [path for path in files if path.suffix.lower() in LISTS and path.parent == Path()]
    tables = [str(path) for path in tables if simplify(path.stem) not in sounds]
    if named := table or ("metadata.csv" if "metadata.csv" in tables else ""):
        tables = [named]
    found = [read_table(corpus, name, sounds, speaker) for name in tables]
    found = [each for each in found if named or len(each[0]) > len(each[1])]
    if not found and (inside := [path for path in files if path.name == "metadata.csv"]):
        fix = f"give a corpus, such as {corpus / inside[0].parent}"
        raise UserError(f"{corpus}: has no list of clips; {fix}")
    found = found or [read_pairs(corpus, files, audio, speaker)]
    lines, problems, notes = max(found, key=lambda each: len(str(each[0])))
    print(*notes, sep="\n", end="\n" * bool(notes))
    if len(found) > 1:
        print(f"note: {corpus}: has {len(found)} lists; to read another, give its path")
    if not lines and (speaker or not problems):
        of_speaker = f"--speaker {speaker}: " if speaker else ""
        missing = "has no list of clips, and no sound file with a text"
        raise UserError(f"{of_speaker}{corpus}: {missing}; --help says where to put them")
    for line in lines:
        for value in (os.path.relpath(line.path, corpus), line.text):
            if re.search(r"^\s|[|\r\n\ufeff]", value):
                problem = f"{value!r} has a |, starts with a space or has a line break; change that"
                problems.append(Problem(line.location, "bar", problem))
    return lines, problems


def simplify(name: str) -> str:
    """Returns a path in small letters, composed, with / and without spaces or a sound's suffix."""
    name = unicodedata.normalize("NFC", "".join(name.split()).replace("\\", "/")).casefold()
    return re.sub(rf"^\./|({'|'.join(map(re.escape, SUFFIXES))})$", "", name)


def find_sound(name: str, sounds: dict[str, list[Path]]) -> Path | None:
    """Returns the sound file whose path ends as ``name`` does, or the other way round, once both
    are :func:`simplify`. None if there is none, or none that fits best."""
    key, fits = simplify(name), defaultdict(list)
    for path in sounds.get(key.rpartition("/")[2], ()):
        whole, elsewhere = simplify(str(path)), ".." not in name
        if f"/{whole}".endswith(f"/{key}") or (elsewhere and f"/{key}".endswith(f"/{whole}")):
            exact = f"/{path.with_suffix('')}".endswith(f"/{name.removesuffix(path.suffix)}")
            folder, suffix = whole.removesuffix(key), SUFFIXES.index(path.suffix.lower())
            fits[not exact, (*FOLDERS, folder).index(folder), suffix].append(path)
    best = fits[min(fits)] if fits else []
    return best[0] if len(best) == 1 else None


def read_rows(table: Path) -> list[tuple[str, list[str]]]:
    """Returns a table's rows as pairs of (location, fields): JSON, or what is separated by the
    separator that most lines have. A table that cannot be read so has none."""
    lines = read_lines(table)
    separator = max(SEPARATORS, key=lambda each: sum(each in line for _, line in lines))
    quoting = csv.QUOTE_MINIMAL if separator in ",;" else csv.QUOTE_NONE
    with suppress(csv.Error, json.JSONDecodeError, AttributeError):
        if lines and lines[0][1].startswith("{"):
            items = [(location, sorted(json.loads(line).items())) for location, line in lines]
            return [(location, [str(value) for _, value in row]) for location, row in items]
        rows = csv.reader([f"{line}\n" for _, line in lines], delimiter=separator, quoting=quoting)
        return [(lines[rows.line_num - 1][0], row) for row in rows]
    return []


def read_table(corpus: Path, table: str, sounds: dict[str, list[Path]], speaker: str) -> Listed:
    """Returns a table's clips, or those of ``speaker``, the problems of its other rows, and notes.
    Names are in the field that names the most sounds, texts in the last that has many words."""
    lines, problems = [], []
    rows = [row for row in read_rows(corpus / table) if not speaker or speaker in row[1]]
    if not rows:
        return [], [], []
    width = max(2, mode(len(row) for _, row in rows))
    fields = [[row[i] for _, row in rows if len(row) == width] for i in range(width)]
    n_found = [sum(find_sound(name, sounds) is not None for name in field) for field in fields]
    names = n_found.index(max(n_found))
    n_words = [len(re.findall(r"(?<!\S)[^\s\d]+(?!\S)", " ".join({*field}))) for field in fields]
    n_words[names] = -1
    texts = max(i for i in range(width) if 2 * n_words[i] >= max(n_words))
    first = "".join(rows[0][1][names : names + 1])
    header = HEADER.match(first) if not find_sound(first, sounds) else None
    below = f", below the header {header[0]!r}" if header else ""
    taken = f"field {names + 1} names the clips{below}; field {texts + 1} has their texts"
    notes = [f"{corpus / table}: {taken}"]
    for i, field in enumerate(fields):
        few = 1 < len({*field}) <= len(field) / 2 and "." not in "".join(field)  # seconds have one
        if few and not speaker and -1 < 2 * n_words[i] < max(n_words):
            values = f"{len({*field}):,} values, such as {field[-1]!r}"
            notes.append(f"note: field {i + 1} has {values}; {ONE_SPEAKER}")
    for location, row in rows[bool(header) :]:
        if len(row) != width and (len(row), width, texts) != (2, 3, 2):
            problem = f"{len(row)} field(s), where most lines have {width}; write as many"
            problems.append(Problem(location, "columns", problem))
        elif path := find_sound(row[names], sounds):
            text = " ".join(row[min(texts, len(row) - 1)].split())
            lines.append(Line(location, str(corpus / path), text))
        else:
            fix = "add it, fix the name, or remove the line (a header?)"
            problem = f"{row[names]}: no such sound here, or several of that name; {fix}"
            problems.append(Problem(location, "missing", problem))
    return lines, problems, notes


def read_pairs(corpus: Path, files: list[Path], audio: list[Path], speaker: str) -> Listed:
    """Returns the clips whose texts are in files of their own, the problems of the others, and
    notes."""
    lines, problems, notes = [], [], []
    audio = [path for path in audio if path.suffix.lower() in SUFFIXES[:2]] or audio
    folders = sorted({path.parent for path in audio})
    if speaker:
        audio = [path for path in audio if speaker in path.parent.parts]
    elif len(folders) > 1:
        values = f"{len(folders):,} folders, such as {folders[0]}"
        notes = [f"note: audio is in {values}; {ONE_SPEAKER}"]
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
    if problems and not lines:
        fix = "name the folder that has the list of clips, or write a text file for each"
        raise UserError(f"{corpus}: no sound file has a text; {fix}")
    return lines, problems, notes


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
    rarest = [f"{symbol!r} {uses[symbol]}" for symbol in sorted(symbols, key=uses.get)[:5]]
    print(f"{len(symbols)} symbols; the rarest and their uses are {', '.join(rarest)}")
    if with_digits := [line.location for line in lines if any(map(str.isdecimal, line.text))]:
        texts = pluralize(len(with_digits), "text")
        locations = ", ".join(with_digits[:5])
        print(f"note: {locations}: digits stay as written (in {texts}); spell numbers out")
    return "".join(symbols)


def print_unknown_words(clips: Sequence[Clip]) -> None:
    """Prints how many words have no phones in CMUdict, and the most frequent ones."""
    uses = Counter(word for clip in clips for word in unknown_words(clip.text))
    frequent = ", ".join(f"{word} {n}" for word, n in uses.most_common(10))
    if uses:
        words = pluralize(len(uses), "word")
        print(f"{words} without phones in CMUdict, read as spelled; the most frequent: {frequent}")


# Conversion


def convert(clips: Sequence[Clip], folder: Path, corpus: Path, rate: int, trim_db: float) -> None:
    """Makes the new ``folder`` a corpus of metadata.csv and wavs/ID.wav, from the clips of
    ``corpus``."""

    def name_of(clip: Clip) -> str:
        path = Path(os.path.relpath(clip.path, corpus)).with_suffix("")
        return re.sub("^wavs?/", "", path.as_posix())

    uses = Counter(map(name_of, clips))
    if repeated := [name for name in uses if uses[name] > 1]:
        raise UserError(f"{corpus}: has several clips named {repeated[0]}; rename them or keep one")
    problems = []

    def convert_to_folder(clip: Clip) -> float:
        with collect_problem(problems, clip.location):
            return convert_clip(clip, folder / f"wavs/{name_of(clip)}.wav", rate, trim_db)
        return 0.0

    cut = map_in_threads(convert_to_folder, clips, "converting")
    raise_problems(problems)
    rows = [f"{name_of(clip)}|{clip.text}" for clip in clips]
    write_lines(folder / "metadata.csv", rows)  # last: without it, this is no corpus
    trimmed = f", {sum(cut):,.1f} s of silence cut off" if trim_db else ""
    print(f"{folder}: {len(clips):,} clips converted{trimmed}")


def convert_clip(clip: Clip, wav: Path, rate: int, trim_db: float) -> float:
    """Writes a clip as a wav, mono with 16 bits, and returns the seconds that trimming cut off.

    Raises:
        ClipError: the samples cannot be read, or are too large.
    """
    try:
        samples, old_rate = soundfile.read(clip.path, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError) as error:
        message = f"{clip.path}: not readable ({error}); replace it"
        raise ClipError("unreadable", message) from None
    if len(samples) != soundfile.info(clip.path).frames:
        raise ClipError("cut", f"{clip.path}: not as long as its header says; replace it")
    samples = samples.mean(axis=1)
    if old_rate != rate:
        samples = soxr.resample(samples, old_rate, rate)
    whole = len(samples)
    if trim_db:
        samples = trim(samples, rate, trim_db)
    peak = np.abs(samples).max(initial=0)
    if not peak <= 2:  # resampling and lossy formats may exceed 1
        raise ClipError("loud", f"{clip.path}: has a sample of {peak:g}; scale it down")
    steps = np.rint(samples * (32768 / max(peak, 1))).clip(-32768, 32767).astype(np.int16)
    content = io.BytesIO()  # soundfile ignores that a disk is full
    soundfile.write(content, steps, rate, "PCM_16", format="WAV")
    wav.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(wav) as file:
        file.write(content.getbuffer())
    return (whole - len(samples)) / rate


def trim(samples: np.ndarray, rate: int, trim_db: float) -> np.ndarray:
    """Cuts off both ends, where they stay ``trim_db`` below the loudest 25 ms, but for a margin."""
    import librosa  # here: it takes seconds

    _, (start, end) = librosa.effects.trim(
        samples, top_db=trim_db, frame_length=rate // 40, hop_length=rate // 160
    )
    margin = round(MARGIN * rate)
    return samples[max(start - margin, 0) : end + margin]


def check_source(path: str, hparams: HParams) -> tuple[int, Stamp]:
    """Checks audio to convert. Returns how many samples it will have, and its stamp."""
    header, stamp = check_header(path)
    return round(header.frames * hparams.sampling_rate / header.samplerate), stamp


# Filelists


def check_corpus(
    lines: Sequence[Line], problems: Sequence[Problem], hparams: HParams, converting: bool = False
) -> list[Clip]:
    """Returns the clips of ``lines``. Raises all problems, with those of the samples unless the
    clips are yet to be converted."""
    any_length = dataclasses.replace(hparams, max_text_length=2**31 - 1)  # training checks it
    check_audio = check_source if converting else check_wav
    clips, of_lines = check_clips(lines, any_length, {}, check_audio)
    of_samples = [] if converting else check_samples(clips, hparams)
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


def write_filelists(clips: Sequence[Clip], hparams: HParams) -> None:
    """Writes the clips' paths and texts into the two filelists that ``hparams`` name."""
    files = hparams.training_files, hparams.validation_files
    takes = Counter(tuple(clip.ids) for clip in clips)
    if repeated := [n_takes for n_takes in takes.values() if n_takes > 1]:
        texts = pluralize(len(repeated), "text")
        print(f"note: {sum(repeated):,} clips are takes of {texts}; all of a text are in one list")
    for file, part in zip(files, split(clips), strict=True):
        rows = [f"{os.path.relpath(clip.path, hparams.data_dir)}|{clip.text}" for clip in part]
        write_lines(Path(file), rows)
        print(f"{file}: {pluralize(len(rows), 'clip')}")


# The program


def prepare(args: argparse.Namespace) -> None:
    """Checks the corpus, converts it if asked, writes its filelists, and prints how to train on
    it."""
    lines, problems = read_corpus(args.corpus, args.speaker, args.table)
    print(f"{args.corpus}: {pluralize(len(lines), 'clip')}")
    settings = audio_settings(args.sampling_rate) | {
        "data_dir": str(args.convert_to or args.corpus),
        "training_files": f"filelists/{args.name}_train.txt",
        "validation_files": f"filelists/{args.name}_val.txt",
        "text_cleaners": (args.text_cleaners,),
    }
    hparams = HParams(**settings)
    symbols_file = Path(f"filelists/{args.name}_symbols.txt")
    if args.text_cleaners == "basic_cleaners":
        symbols = find_symbols(lines, hparams.text_cleaners)
        hparams = dataclasses.replace(hparams, symbols=symbols, n_symbols=len(alphabet(symbols)))
        settings["symbols"] = f"@{symbols_file}"
    clips = check_corpus(lines, problems, hparams, converting=args.convert_to is not None)
    report_unknown_characters(((clip.location, clip.text) for clip in clips), hparams)
    if args.text_cleaners == "english_phones":
        print_unknown_words(clips)
    if args.convert_to:
        convert(clips, args.convert_to, args.corpus, args.sampling_rate, args.trim_db)
        lines, problems = read_corpus(args.convert_to)
        clips = check_corpus(lines, problems, hparams)
    write_filelists(clips, hparams)
    if hparams.symbols:
        write_lines(symbols_file, [hparams.symbols])
    minutes = sum(clip.n_frames for clip in clips) * hparams.hop_length / hparams.sampling_rate / 60
    changes = {name: value for name, value in settings.items() if value != getattr(HParams, name)}
    print_training_command(args.name, changes, args.sampling_rate, minutes)


def print_training_command(
    name: str, changes: dict[str, Any], sampling_rate: int, minutes: float
) -> None:
    """Prints how to train on a corpus of that many minutes, whose settings are ``changes``."""
    command = ["python", os.path.relpath(TRAIN), "-o", f"runs/{name}"]
    if sampling_rate == HParams.sampling_rate and minutes < SMALL_MINUTES:
        voice = os.path.relpath(VOICE)
        print(
            f"note: {pluralize(round(minutes), 'minute')} of speech: training starts from {voice}"
        )
        command += ["-c", voice, "--warm_start"]
        if "symbols" not in changes:
            changes["ignore_layers"] = ()  # the voice has the same symbols
        changes.setdefault("text_cleaners", HParams.text_cleaners)  # not the voice's
        changes |= {"hours": 3, "learning_rate": 1e-3, "learning_rate_decay": 0.5}
        changes |= {"batch_size": 8, "precision": "fp32"}  # not the voice's
        changes |= {"keep_checkpoints": 2, "checkpoint_minutes": 10}
        when = "an evening"
    else:
        if sampling_rate == HParams.sampling_rate:
            command += ["--preset", "nvidia"]  # mels that HiFi-GAN's published weights can speak
        changes |= {"hours": 8, "learning_rate_decay": 0.3}
        changes |= {"n_frames_per_step": 2, "guided_attention_weight": 1}
        when = "a night"
    print(f"Next (for {when}; the newest checkpoint will speak best):")
    print(f"  {shlex.join([*command, '--hparams', format_overrides(changes)])}")


def check_arguments(args: argparse.Namespace) -> None:
    """Raises :class:`UserError` for a wrong argument, before anything is read or written."""
    if not re.fullmatch(r"\w[\w.-]*", args.name):
        raise UserError(f"--name {args.name}: use letters, digits and . _ - only")
    if not 0 <= args.trim_db <= 120:
        raise UserError(f"--trim_db {args.trim_db}: use 0 to 120")
    folder, filelist = args.convert_to, Path(f"filelists/{args.name}_train.txt")
    if not folder:
        if args.trim_db:
            fix = "needs --convert_to, a folder for the trimmed clips"
            raise UserError(f"--trim_db {args.trim_db}: {fix}")
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: already has files; give another --convert_to")
    elif folder.resolve().is_relative_to(args.corpus.resolve()):
        raise UserError(f"--convert_to {folder}: is in the corpus; use another folder")
    elif filelist.exists():
        raise UserError(f"{filelist}: exists already; give another --name, or delete it")


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("corpus", type=Path, metavar="DIR", help="folder of the corpus, or one of its lists")
    add("--name", required=True, help="write filelists/NAME_*.txt")
    add("--speaker", default="", help="use only lines with this field, or audio in this folder")
    rate = "sampling rate (default: %(default)s)"
    add("--sampling_rate", type=int, default=HParams.sampling_rate, metavar="HZ", help=rate)
    converted = "make a corpus of mono wavs of that rate in this new folder, and use it"
    add("--convert_to", type=Path, metavar="DIR", help=converted)
    quiet = "also cut off both ends, where they stay so far below the loudest 25 ms (try 40)"
    add("--trim_db", type=float, default=0.0, metavar="DB", help=quiet)
    cleaners = "cleaners of the language (default: %(default)s)"
    names = sorted({*CLEANERS} - {*TRAINING.values()})
    add("--text_cleaners", choices=names, default="english_phones", help=cleaners)
    args, args.table = parser.parse_args(argv), ""
    if args.corpus.is_file():
        args.corpus, args.table = args.corpus.parent, args.corpus.name
    check_arguments(args)
    prepare(args)


if __name__ == "__main__":
    exit_on_user_error(main)
