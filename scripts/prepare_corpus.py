"""Check every clip of a corpus with one speaker, and write the filelists that train.py reads.

    python scripts/prepare_corpus.py DIR --name mine
    python scripts/prepare_corpus.py VCTK --speaker p225 --name p225 --convert_to data/p225

DIR has metadata.csv, with lines ID|text or ID|text|normalised text, and ID.wav or ID.flac in wavs/,
in wav/ or beside it. Or it has a text file for each wav or flac, in any folder: ID.txt or
ID.normalized.txt beside it, or ID.txt in txt/ (as wav/ID.wav and txt/ID.txt, or wav48/p225/ID.wav
and txt/p225/ID.txt).

Clips whose cleaned texts are equal are in the same list. With --text_cleaners basic_cleaners, for
a language other than English, the characters of all texts become its alphabet,
filelists/NAME_symbols.txt.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until main() runs, Ctrl-C ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import hashlib
import io
import math
import os
import re
import shlex
import statistics
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import soxr

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from corpus.clips import (
    Clip,
    Problem,
    Stamp,
    check_header,
    check_lines,
    check_samples,
    check_wav,
    numbered_lines,
    read_lines,
    refuse,
    report_unknown_characters,
)
from files import make_folder, make_new_folder, making, replacing, require_space
from hparams import HParams, audio_settings, format_overrides
from text import alphabet, check_alphabet, clean_text
from text.cleaners import CLEANERS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = "wavs/", "wav/", ""  # where the audio of metadata.csv is
AUDIO = ".wav", ".flac"
RATES = range(4000, 192_001)  # Hz; much below, some of the 80 mel bands would be empty
ASCII_CLEANERS = ("english_cleaners", "transliteration_cleaners")  # they need no alphabet
RARE, MAX_RARE = 5, 20  # fewer uses may be misprints; so many are reported one by one
MARGIN = 0.05  # seconds that trimming leaves around the speech


class Lines(NamedTuple):
    """What a corpus lists."""

    lines: list[tuple[str, str]]  # location and content
    split: Callable[[str], tuple[str, str]]  # from a line's content to path and text


def find_lines(corpus: Path, speaker: str = "") -> Lines:
    """A line for each clip of ``corpus``, or of the ``speaker`` that its folders name."""
    if not corpus.is_dir():
        raise UserError(f"{corpus}: no such folder; give the corpus's")
    table = corpus / "metadata.csv"
    if not table.is_file():
        if inside := sorted(corpus.glob("*/metadata.csv")):
            others = f" (or one of {len(inside) - 1} others)" if inside[1:] else ""
            raise UserError(f"{corpus}: has no metadata.csv; give {inside[0].parent}{others}")
        return Lines(find_pairs(corpus, speaker), split_pair)
    if speaker:
        raise UserError(f"--speaker {speaker}: {table} names no speakers; leave it out")
    return Lines(numbered_lines(str(table)), partial(split_row, corpus))


def split_row(corpus: Path, line: str) -> tuple[str, str]:
    """Path and text of a row of metadata.csv."""
    name, *texts = line.split("|")
    if len(texts) not in (1, 2):
        raise UserError(f"{1 + len(texts)} column(s); use ID|text or ID|text|normalised text")
    paths = [f"{folder}{name}{suffix}" for folder in FOLDERS for suffix in AUDIO]
    inside = name and not name.startswith("/") and ".." not in name.split("/")
    path = next((path for path in paths if inside and (corpus / path).is_file()), "")
    if not path:
        fix = "fix the ID (it has no .wav), or remove the line (a header?)"
        raise UserError(f"{name}: no such wav or flac in wavs/, wav/ or beside this list; {fix}")
    return path, " ".join(texts[-1].split())


def find_pairs(corpus: Path, speaker: str) -> list[tuple[str, str]]:
    """A line ``path|text`` of each clip whose text is in a file of its own, which is its location;
    of a clip without that file, the path alone."""
    files = {path.relative_to(corpus) for path in corpus.rglob("[!.]*")}
    audio = sorted(path for path in files if path.suffix.lower() in AUDIO)
    audio = [path for path in audio if not path.stem.endswith("_mic2")]  # VCTK's other microphone
    folders = sorted({path.parent for path in audio})
    if speaker:
        audio = [path for path in audio if speaker in path.parent.parts]
    elif len(folders) > 1:
        fix = "if that is a speaker each, name one by --speaker"
        print(f"note: {corpus}: has audio in {len(folders):,} folders, as {folders[0]}; {fix}")
    lines = []
    for path in audio:
        name = path.stem.removesuffix("_mic1")
        texts = [path.parent / f"{name}{ending}" for ending in (".normalized.txt", ".txt")]
        texts.append(Path("txt", *path.parts[1:-1], f"{name}.txt"))
        text, line = next((text for text in texts if text in files), texts[1]), str(path)
        if text in files:
            line += "|" + " ".join(" ".join(read_lines(f"{corpus / text}")).split())
        lines.append((f"{corpus / text}:1", line))
    if not any("|" in line for _, line in lines):
        named = f"--speaker {speaker}: " if speaker else ""
        raise UserError(
            f"{named}{corpus}: has no wav or flac with a text; --help says where to put them"
        )
    return lines


def split_pair(line: str) -> tuple[str, str]:
    path, bar, text = line.partition("|")
    if not bar:
        raise UserError(f"{path}: its text, this file, is missing; write it, or remove the audio")
    if "|" in text or path != path.strip() or "\n" in path:
        fix = "leave out |, and line breaks and outer spaces of the name"
        raise UserError(f"{line!r} cannot be a line of a filelist; {fix}")
    return path, text


# Clips and their split


def read_corpus(corpus: Path, hparams: HParams) -> list[Clip]:
    """The clips of a corpus, checked as for training, with every sample."""
    clips, problems = check_corpus(corpus, find_lines(corpus), hparams)
    refuse(sorted([*problems, *check_samples(clips, hparams)], key=Problem.line))
    return clips


def check_corpus(
    corpus: Path, lines: Lines, hparams: HParams, check_audio: Callable = check_wav
) -> tuple[list[Clip], list[Problem]]:
    """The good clips of ``lines``, checked as for training but for their samples, and the problems
    of other lines. Raises them as :class:`UserError` if there are fewer than two clips."""
    # Training checks the length of texts.
    hparams = dataclasses.replace(hparams, data_dir=str(corpus), max_text_length=2**31 - 1)
    clips, problems = check_lines(*lines, hparams, check_audio=check_audio)
    others = {}
    for clip in clips:
        if (other := others.setdefault(clip_id(clip, corpus), clip)) is not clip:
            problem = f"{clip.path} and {other.path} have the same name; keep one"
            problems.append(Problem(clip.location, problem))
    if len(clips) < 2:
        refuse(problems)
        raise UserError(f"{corpus}: {len(clips)} clips; a split needs at least 2")
    return clips, problems


def clip_id(clip: Clip, corpus: str | Path) -> str:
    """A clip's path in the corpus without its suffix, nor wavs/ or wav/; its ID in metadata.csv."""
    path = Path(os.path.relpath(clip.path, corpus)).with_suffix("").as_posix()
    return re.sub("^wavs?/", "", path)


def split(
    clips: Sequence[Clip], corpus: str | Path, train_fraction: float, seed: int
) -> tuple[list[str], list[str]]:
    """Lines ``path|text`` for training and validation, in the order given, one at least. Takes of
    one sentence, whose cleaned texts are equal, are on the same side.

    IDs are ranked by a hash of seed and ID, so the split is the same on every machine, whatever the
    order of the clips.
    """
    named = {clip_id(clip, corpus): clip for clip in clips}
    takes = defaultdict(list)
    for name in sorted(named, key=lambda n: hashlib.sha256(f"{seed} {n}".encode()).digest()):
        takes[tuple(named[name].ids)].append(name)
    if len(takes) < 2:
        raise UserError(f"{corpus}: all clips have the same text; a split needs at least 2")
    n_train = min(max(round(len(clips) * train_fraction), 1), len(clips) - 1)
    train = set()
    for names in takes.values():
        if not train or len(train) + len(names) <= n_train:
            train.update(names)
    lines = {i: f"{os.path.relpath(c.path, corpus)}|{c.text}" for i, c in named.items()}
    return [lines[i] for i in lines if i in train], [lines[i] for i in lines if i not in train]


# The alphabet


def find_symbols(lines: Lines, cleaners: Sequence[str]) -> str:
    """All characters of the cleaned texts that can be symbols, sorted. Prints the rare ones, and
    where there are digits."""
    uses, first, symbols, digits = Counter(), {}, [], []
    for location, line in lines.lines:
        with suppress(ValueError):  # check_corpus reports it
            text = clean_text(lines.split(line)[1], cleaners)
            uses.update(unicodedata.normalize("NFC", text))
            digits += [location] * any(map(str.isdecimal, text))
        for character in uses.keys() - first.keys():
            first[character] = location
    for character in sorted(uses, key=lambda c: (c == "@", c)):  # a first @ would name a file
        with suppress(ValueError):  # report_unknown_characters prints those that have no symbol
            check_alphabet(character)
            symbols.append(character)
    if digits:
        total = f" (and {len(digits) - 1:,} more)" if len(digits) > 1 else ""
        print(f"note: {digits[0]}: the text has digits{total}; spell numbers out")
    rare = [c for c in symbols if uses[c] < RARE and not c.isdecimal()]
    rare.sort(key=lambda c: uses[c])
    for c in rare[:MAX_RARE]:
        times = "time" + "s" * (uses[c] > 1)
        problem = f"is used {uses[c]} {times} in all texts; is it a misprint?"
        print(f"note: {first[c]}: {c!r} (U+{ord(c):04X}) {problem}")
    if len(rare) > MAX_RARE:
        print(f"note: {len(rare) - MAX_RARE:,} more characters are used less than {RARE} times")
    return "".join(symbols)


# Conversion


class Converted(NamedTuple):
    """What :func:`convert_clip` did."""

    peak: float  # before it was scaled down to 1, if it was above
    seconds: float
    cut: float  # seconds, by trimming
    quietest: float  # dB, of its quietest 25 ms below its loudest


def convert(
    clips: Sequence[Clip], corpus: Path, folder: Path, hparams: HParams, trim_db: float
) -> None:
    """Make ``folder``, which must be new or empty, a corpus of metadata.csv and wavs/ID.wav, from
    the clips of ``corpus``.

    Raises:
        UserError: the folder has files, or no space; a clip cannot be converted.
    """
    fix = "give another --convert_to"
    if (folder / "metadata.csv").exists():
        fix += f", or prepare {folder} itself, which is a corpus"
    make_new_folder(folder, fix)
    require_space(folder, sum(2 * c.n_frames * hparams.hop_length + 4096 for c in clips), fix)
    from loaders import run_parallel  # imports torch, which takes seconds

    names = [clip_id(clip, corpus) for clip in clips]
    wavs = [folder / "wavs" / f"{name}.wav" for name in names]
    for parent in {wav.parent for wav in wavs}:
        parent.mkdir(parents=True, exist_ok=True)
    one = partial(convert_clip, rate=hparams.sampling_rate, trim_db=trim_db)
    results = list(run_parallel(one, list(zip(clips, wavs, strict=True)), "converting"))
    pairs = zip(clips, results, strict=True)
    refuse([Problem(clip.location, result) for clip, result in pairs if isinstance(result, str)])
    rows = "".join(f"{n}|{clip.text}\n" for n, clip in zip(names, clips, strict=True))
    with replacing(folder / "metadata.csv") as file:  # last: without it, this is no corpus
        file.write(rows.encode())
    print(f"{folder}: {len(clips):,} clips converted")
    peak, loudest = max((result.peak, wav) for result, wav in zip(results, wavs, strict=True))
    if peak > 1:
        n = sum(result.peak > 1 for result in results)
        print(
            f"note: {n:,} clip(s) exceeded full scale once converted, and are scaled down: "
            f"{loudest} most, by {20 * math.log10(peak):.2f} dB"
        )
    if trim_db:
        cut, seconds = (sum(getattr(r, name) for r in results) for name in ("cut", "seconds"))
        quietest = statistics.median(result.quietest for result in results)
        print(
            f"trimmed {cut:,.1f} of {seconds:,.1f} s, {cut / len(clips):.2f} s a clip; background "
            f"noise is {quietest:.0f} dB below the loudest 25 ms (median)"
        )


def convert_clip(pair: tuple[Clip, Path], rate: int, trim_db: float) -> Converted | str:
    """Write a clip's wav, mono with 16 bits; or return what is wrong with the clip. Raises
    :class:`UserError` if the wav cannot be written."""
    clip, wav = pair
    try:
        samples, before = soundfile.read(clip.path, dtype="float32", always_2d=True)
        promised = soundfile.info(clip.path).frames
    except (soundfile.LibsndfileError, OSError) as error:
        return f"{clip.path}: not a readable sound file ({error}); replace it"
    if len(samples) != promised:
        return f"{clip.path}: not as long as its header says; replace it"
    if not (largest := np.abs(samples).max(initial=0)) <= 2:  # a lossy format may exceed 1
        return f"{clip.path}: has a sample of {largest:g}, beyond [-1, 1]; scale it down"
    samples = samples.mean(axis=1)
    if before != rate:
        samples = soxr.resample(samples, before, rate)
    whole, quietest = len(samples), 0.0
    if trim_db:
        samples, quietest = trim(samples, rate, trim_db)
    peak = float(np.abs(samples).max(initial=0))
    steps = np.rint(samples * (32768 / max(peak, 1))).clip(-32768, 32767).astype(np.int16)
    content = io.BytesIO()  # soundfile ignores errors of a Python file
    soundfile.write(content, steps, rate, "PCM_16", format="WAV")
    try:
        wav.write_bytes(content.getbuffer())
    except OSError as error:
        fix = "make room, remove its folder, and run again"
        raise UserError(f"{wav}: cannot be written ({error.strerror}); {fix}") from None
    return Converted(peak, whole / rate, (whole - len(samples)) / rate, quietest)


def trim(samples: np.ndarray, rate: int, trim_db: float) -> tuple[np.ndarray, float]:
    """``samples`` without both ends that stay ``trim_db`` below the loudest 25 ms, but for a
    margin; and how many dB the quietest 25 ms are below them."""
    import librosa  # takes seconds

    frames = {"frame_length": rate // 40, "hop_length": rate // 160}
    _, (start, end) = librosa.effects.trim(samples, top_db=trim_db, **frames)
    margin = round(MARGIN * rate)
    power = librosa.feature.rms(y=samples, **frames, center=False)
    quietest = -20 * math.log10(max(power.min() / max(power.max(), 1e-9), 1e-6))
    return samples[max(start - margin, 0) : end + margin], quietest


# The program


def write_filelist(path: Path, lines: Sequence[str]) -> None:
    """Write ``path`` whole or not at all."""
    make_folder(path.parent)
    with replacing(path) as file:  # bytes that are not UTF-8 stay, for load_data to name
        file.write("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))


def refuse_other(path: Path, content: Sequence[str]) -> None:
    """Raise :class:`UserError` if the file exists with other lines, or if ``content`` is a string,
    with other characters."""
    if not path.exists():
        return
    lines = [line for line in read_lines(str(path)) if line]
    existing, unit = ("".join(lines), "symbols") if isinstance(content, str) else (lines, "clips")
    if existing != content:
        raise UserError(
            f"{path}: already has {len(existing):,} {unit}, this run would write {len(content):,} "
            f"({len({*existing} & {*content}):,} in both); rename it or delete it"
        )


def prepare(
    corpus: Path,
    name: str,
    split: Callable[[Sequence[Clip], Path], Sequence[list[str]]],
    speaker: str = "",
    sampling_rate: int = HParams.sampling_rate,
    convert_to: Path | None = None,
    trim_db: float = 0.0,
    text_cleaners: str = HParams.text_cleaners[0],
) -> None:
    """Check the corpus, convert it if asked, write its filelists, and print how to train on it.

    ``split`` makes the lines of the training and of the validation list from clips and folder.
    """
    train, val, symbol_file = (
        Path(f"filelists/{name}_{part}.txt") for part in ("train", "val", "symbols")
    )
    hparams = HParams(
        **audio_settings(sampling_rate),
        data_dir=str(convert_to or corpus),
        training_files=str(train),
        validation_files=str(val),
        text_cleaners=(text_cleaners,),
    )
    lines, files = find_lines(corpus, speaker), {}
    print(f"{corpus}: {len(lines.lines):,} clips")
    if text_cleaners not in ASCII_CLEANERS:
        symbols = find_symbols(lines, hparams.text_cleaners)
        refuse_other(symbol_file, symbols)
        n_symbols = len(alphabet(symbols))
        hparams = dataclasses.replace(hparams, symbols=symbols, n_symbols=n_symbols)
        files[symbol_file] = symbols
    check_audio = check_source if convert_to else check_wav
    clips, problems = check_corpus(corpus, lines, hparams, check_audio)
    if not convert_to and problems:  # one report has all of them
        problems += check_samples(clips, hparams)
    refuse(sorted(problems, key=Problem.line))
    report_unknown_characters(((clip.location, clip.text) for clip in clips), hparams)
    if convert_to:
        for path in (train, val):
            if path.exists():
                raise UserError(f"{path}: exists already; give another --name, or delete it")
        convert(clips, corpus, convert_to, hparams, trim_db)
        corpus = convert_to
        clips, problems = check_corpus(corpus, find_lines(corpus), hparams)
        refuse(problems)
    files[train], files[val] = split(clips, corpus)
    for path, content in files.items():  # before samples are read, which takes longest
        refuse_other(path, content)
    refuse(check_samples(clips, hparams))
    for path, content in files.items():
        exists = path.exists()
        if not exists:
            write_filelist(path, [content] if path == symbol_file else content)
        unit = "symbols" if path == symbol_file else "clips"
        print(f"{path}: {len(content):,} {unit}{', already there' if exists else ''}")
    changed = {key: value for key, value in vars(hparams).items() if value != getattr(HParams, key)}
    if hparams.symbols:
        changed["symbols"] = f"@{symbol_file}"
        changed.pop("n_symbols", None)  # follows
    command = ["python", os.path.relpath(ROOT / "train.py"), "-o", f"runs/{name}"]
    print(f"Next:\n  {shlex.join([*command, '--hparams', format_overrides(changed)])}")


def check_source(path: str, hparams: HParams) -> tuple[int, Stamp]:
    """As :func:`check_wav`, of audio to convert: its samples once it has ``sampling_rate``."""
    header, stamp = check_header(path)
    return round(header.frames * hparams.sampling_rate / header.samplerate), stamp


def making_filelists() -> AbstractContextManager:
    """The folder for filelists, which is left as it was if preparation fails."""
    return making(Path("filelists"), "run this in another folder")


def main(argv: Sequence[str] | None = None) -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(description=__doc__, formatter_class=as_written)
    add = parser.add_argument
    add("corpus", type=Path, metavar="DIR", help="folder of the corpus")
    add("--name", required=True, help="for filelists/NAME_*.txt")
    add("--train_fraction", type=float, default=0.8, help="share of clips (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the split (default: %(default)s)")
    add("--speaker", default="", help="use only the audio in folders of this name")
    rate = "sampling rate (default: %(default)s)"
    add("--sampling_rate", type=int, default=HParams.sampling_rate, metavar="HZ", help=rate)
    wanted = "make a corpus of mono wavs of that rate in this new folder, and use it"
    add("--convert_to", type=Path, metavar="DIR", help=wanted)
    quiet = (
        "then cut off both ends where they stay this far below the loudest 25 ms. Try 40, and "
        "choose a value some 5 below the background noise that it prints; 60 cuts only digital "
        "silence, 25 cuts soft sounds too (default: off)"
    )
    add("--trim_db", type=float, default=0.0, metavar="DB", help=quiet)
    add("--text_cleaners", choices=CLEANERS, default=HParams.text_cleaners[0],
        help="of the language (default: %(default)s)")  # fmt: skip
    args = parser.parse_args(argv)
    if not re.fullmatch(r"\w[\w.-]*", args.name):
        raise UserError(f"--name {args.name}: use letters, digits and . _ - only")
    if not 0 < args.train_fraction < 1:
        raise UserError(f"--train_fraction {args.train_fraction}: use a value between 0 and 1")
    if args.sampling_rate not in RATES:
        raise UserError(f"--sampling_rate {args.sampling_rate}: use {RATES[0]} to {RATES[-1]}")
    if not 0 <= args.trim_db <= 120:
        raise UserError(f"--trim_db {args.trim_db}: use 0 to 120")
    if args.convert_to is None:
        if args.trim_db:
            raise UserError(f"--trim_db {args.trim_db}: needs --convert_to, for the cut clips")
    elif args.convert_to.resolve().is_relative_to(args.corpus.resolve()):
        raise UserError(f"--convert_to {args.convert_to}: is in the corpus; use another folder")
    options = vars(args)
    of_split = {name: options.pop(name) for name in ("train_fraction", "seed")}
    with making_filelists():
        prepare(**options, split=partial(split, **of_split))


if __name__ == "__main__":
    exit_on_user_error(main)
