"""Check every clip of a corpus with one speaker, and write the filelists that train.py reads.

    python scripts/prepare_corpus.py DIR --name mine
    python scripts/prepare_corpus.py VCTK --speaker p225 --name p225 --convert_to data/p225

The layout of DIR is recognised from its files:

    LJSpeech    metadata.csv (ID|text|normalised text, or ID|text) and wavs/ID.wav
    CSS10       transcript.txt (path|text|normalised text|seconds)
    VCTK        txt/SPEAKER/ID.txt and wav48/SPEAKER/ID.wav, or
                wav48_silence_trimmed/SPEAKER/ID_mic1.flac
    LibriTTS    SPEAKER/CHAPTER/ID.wav and ID.normalized.txt, in any folder
    wav + txt   ID.wav or ID.flac with ID.txt beside it, in any folder; or wav/ID.wav and txt/ID.txt

With --text_cleaners basic_cleaners, for a language other than English, the characters of all texts
become its alphabet, filelists/NAME_symbols.txt.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until main() runs, Ctrl-C ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import hashlib
import os
import re
import shlex
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from clips import (
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
)
from files import make_folder, making, replacing
from hparams import HParams, format_overrides, read_symbols
from scripts.convert_audio import convert
from scripts.lengths import AUDIO
from text import alphabet, check_alphabet, clean_text
from text.cleaners import CLEANERS

ROOT = Path(__file__).resolve().parent.parent
RATES = range(4000, 192_001)  # Hz; much below, some of the 80 mel bands would be empty
CONVERTED = re.compile("resample it|mix it down|convert it")  # problems that --convert_to solves
ASCII_CLEANERS = ("english_cleaners", "transliteration_cleaners")  # they need no alphabet
RARE, MOST_RARE = 5, 20  # fewer uses may be misprints; report so many characters one by one
SPEAKER = {"VCTK": -2, "LibriTTS": -3}  # part of a file's path that names its speaker


class Layout(NamedTuple):
    """What was found in a corpus."""

    name: str
    lines: list[tuple[str, str]]  # location and content
    split_line: Callable[[str], tuple[str, str]]  # from a line's content to path and text


def find_layout(corpus: Path, speaker: str = "") -> Layout:
    """The layout of ``corpus``, recognised from its files, and the lines of ``speaker``."""
    if not corpus.is_dir():
        raise UserError(f"{corpus}: no such folder; give the corpus's")
    name, table = "wav + txt", ""
    if (corpus / "metadata.csv").is_file() and (corpus / "wavs").is_dir():
        name, table = "LJSpeech", "metadata.csv"
    elif (corpus / "transcript.txt").is_file():
        name, table = "CSS10", "transcript.txt"
    elif any(corpus.glob("txt/*/*.txt")) and any(corpus.glob("wav48*")):
        name = "VCTK"
    elif any(corpus.rglob("*.normalized.txt")):
        name = "LibriTTS"
    if speaker and name not in SPEAKER:
        raise UserError(f"--speaker {speaker}: the layout {name} names no speakers; leave it out")
    if table:
        lines = numbered_lines(f"{corpus}/{table}")
        return Layout(name, lines, partial(_split_row, corpus, name))
    return Layout(name, read_pairs(corpus, name, speaker), _split_pair)


def _split_row(corpus: Path, layout: str, line: str) -> tuple[str, str]:
    """Path and text of a row of LJSpeech's or CSS10's table."""
    columns = line.split("|")
    if layout == "LJSpeech":
        counts, form = (2, 3), "ID|text or ID|text|normalised text"
    else:
        counts, form = (4,), "path|text|normalised text|seconds"
    if len(columns) not in counts:
        raise UserError(f"{len(columns)} column(s); use {form}")
    if layout == "LJSpeech":
        path, text, fix = f"wavs/{columns[0]}.wav", columns[-1], "the ID (it has no .wav)"
        outside = "/" in columns[0]
    else:
        path, text, fix = columns[0].strip(), columns[2], "the path"
        outside = path.startswith("/") or ".." in path.split("/")
    if outside or not os.path.isfile(corpus / path):
        raise UserError(f"{path}: no such file; fix {fix}, or remove the line (a header?)")
    return path, " ".join(text.split())


def read_pairs(corpus: Path, layout: str, speaker: str) -> list[tuple[str, str]]:
    """A line ``path|text`` of each clip whose text is in a file of its own, which is its location;
    of a clip without that file, the path alone."""
    files = sorted(path.relative_to(corpus) for path in corpus.rglob("[!.]*"))
    ending = ".normalized.txt" if layout == "LibriTTS" else ".txt"
    texts = {path for path in files if path.name.endswith(ending)}
    audio = [path for path in files if path.suffix.lower() in AUDIO]
    if layout == "VCTK":
        folder = max(path.name for path in corpus.glob("wav48*"))  # the trimmed ones, if there
        texts = {path for path in texts if path.parts[0] == "txt"}
        audio = [p for p in audio if p.parts[0] == folder and not p.stem.endswith("_mic2")]
    if layout in SPEAKER:
        top = corpus.resolve()  # which may be a speaker's folder
        names = {path: (top / path).parts[SPEAKER[layout]] for path in [*texts, *audio]}
        speaker = choose_speaker(corpus, sorted({names[path] for path in texts}), speaker)
        texts = {path for path in texts if names[path] == speaker}
        audio = [path for path in audio if names[path] == speaker]
    lines, unused = [], set(texts)
    for path in audio:
        text, line = path.with_suffix(ending), str(path)
        if (corpus / "txt").is_dir() and layout != "LibriTTS":
            text = Path("txt", *path.parts[1:-1], path.stem.removesuffix("_mic1") + ending)
        if text in texts:
            line += "|" + " ".join(" ".join(read_lines(f"{corpus / text}")).split())
            unused.discard(text)
        lines.append((f"{corpus / text}:1", line))
    if not any("|" in line for _, line in lines):
        raise UserError(f"{corpus}: has no clips in a layout that is known; --help lists them")
    if unused:
        others = f" (and {len(unused) - 1:,} more)" if len(unused) > 1 else ""
        print(f"note: {corpus / min(unused)}: has no audio and is left out{others}")
    return lines


def choose_speaker(corpus: Path, speakers: list[str], wanted: str) -> str:
    """``wanted``, which must be one of ``speakers``, or the only one there is."""
    names = ", ".join(speakers[:10])
    if len(speakers) > 10:
        names += f" or one of {len(speakers) - 10:,} more"
    if wanted and wanted not in speakers:
        raise UserError(f"--speaker {wanted}: has no texts in {corpus}; use {names}")
    if len(speakers) > 1 and not wanted:
        raise UserError(f"{corpus}: has {len(speakers):,} speakers; give --speaker {names}")
    return wanted or speakers[0]


def _split_pair(line: str) -> tuple[str, str]:
    path, bar, text = line.partition("|")
    if not bar:
        raise UserError(f"no such file, for the text of {path}; write it, or remove {path}")
    if "|" in text or path != path.strip() or "\n" in path:
        fix = "leave out |, and line breaks and outer spaces of the name"
        raise UserError(f"{line!r} cannot be a line of a filelist; {fix}")
    return path, text


# Clips and their split


def read_corpus(corpus: Path, hparams: HParams) -> list[Clip]:
    """The clips of a corpus in any of the layouts, checked as for training."""
    return check_layout(corpus, find_layout(corpus), hparams)


def check_layout(
    corpus: Path,
    layout: Layout,
    hparams: HParams,
    *,
    every_sample: bool = True,
    to_convert: bool = False,
) -> list[Clip]:
    """The clips of ``layout``, checked as for training; samples too, if ``every_sample``. Audio
    ``to_convert`` may be of any kind."""
    # Training checks the length of texts.
    hparams = dataclasses.replace(hparams, data_dir=str(corpus), max_text_length=2**31 - 1)
    check_audio = check_source if to_convert else check_wav
    _, lines, split_line = layout
    clips, problems = check_lines(lines, split_line, hparams, check_audio=check_audio)
    if len(problems) > 1 and not clips and all(map(CONVERTED.search, map(str, problems))):
        fix = "scripts/prepare_corpus.py --convert_to DIR does it"
        raise UserError(f"{problems[0]} (all {len(problems):,} clips need the like; {fix})")
    others = {}
    for clip in clips:
        if (other := others.setdefault(clip_id(clip, corpus), clip)) is not clip:
            problem = f"{clip.path} and {other.path} have the same name; keep one"
            problems.append(Problem(clip.location, problem))
    if every_sample or (problems and not to_convert):  # one report has all problems
        problems += check_samples(clips, hparams)
    refuse(sorted(problems, key=Problem.line))
    if len(clips) < 2:
        raise UserError(f"{corpus}: {len(clips)} clips; a split needs at least 2")
    return clips


def check_source(path: str, hparams: HParams) -> tuple[int, Stamp]:
    """As :func:`check_wav`, of audio to convert: its samples once it has ``sampling_rate``."""
    header, stamp = check_header(path)
    return round(header.frames * hparams.sampling_rate / header.samplerate), stamp


def clip_id(clip: Clip, corpus: str | Path) -> str:
    """A clip's path in the corpus without its suffix; in LJSpeech's layout, its ID."""
    path = Path(os.path.relpath(clip.path, corpus))
    return path.with_suffix("").as_posix().removeprefix("wavs/")


def split(
    clips: Sequence[Clip], corpus: str | Path, train_fraction: float, seed: int
) -> tuple[list[str], list[str]]:
    """Lines ``path|text`` for training and validation, in the order given, one at least.

    IDs are ranked by a hash of seed and ID, so the split is the same on every machine and in
    every version, whatever the order of the clips.
    """
    lines = {clip_id(c, corpus): f"{os.path.relpath(c.path, corpus)}|{c.text}" for c in clips}
    ranked = sorted(lines, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    n_train = min(max(round(len(clips) * train_fraction), 1), len(clips) - 1)
    train = {*ranked[:n_train]}
    return [lines[i] for i in lines if i in train], [lines[i] for i in lines if i not in train]


# The alphabet


def find_symbols(layout: Layout, cleaners: Sequence[str]) -> str:
    """All characters of the cleaned texts that can be symbols, sorted. Prints the rare ones."""
    uses, first, symbols = Counter(), {}, []
    for location, line in layout.lines:
        with suppress(ValueError):  # check_layout reports it
            text = clean_text(layout.split_line(line)[1], cleaners)
            uses.update(unicodedata.normalize("NFC", text))
        for character in uses.keys() - first.keys():
            first[character] = location
    for character in sorted(uses, key=lambda c: (c == "@", c)):  # a first @ would name a file
        with suppress(ValueError):  # training prints those that have no symbol
            check_alphabet(character)
            symbols.append(character)
    rare = sorted((c for c in symbols if uses[c] < RARE), key=lambda c: uses[c])
    for c in rare[:MOST_RARE]:
        times = "time" + "s" * (uses[c] > 1)
        problem = f"is used {uses[c]} {times} in all texts; is it a misprint?"
        print(f"note: {first[c]}: {c!r} (U+{ord(c):04X}) {problem}")
    if len(rare) > MOST_RARE:
        print(f"note: {len(rare) - MOST_RARE:,} more characters are used less than {RARE} times")
    return "".join(symbols)


def refuse_other_symbols(path: Path, symbols: str) -> None:
    """Raise :class:`UserError` if the symbol file exists with other symbols."""
    existing = read_symbols(str(path)) if path.exists() else symbols
    if existing != symbols:
        raise UserError(
            f"{path}: already has {len(existing):,} symbols, this run would write {len(symbols):,} "
            f"({len({*existing} & {*symbols}):,} in both); give another --name, or delete it"
        )


# The program


def write_filelist(path: Path, lines: Sequence[str]) -> None:
    """Write ``path`` whole or not at all."""
    make_folder(path.parent)
    with replacing(path) as file:  # bytes that are not UTF-8 stay, for load_data to name
        file.write("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))


def refuse_other_list(path: Path, lines: list[str]) -> None:
    """Raise :class:`UserError` if the filelist exists with other lines."""
    existing = [line for line in read_lines(str(path)) if line] if path.exists() else lines
    if existing != lines:
        raise UserError(
            f"{path}: already has {len(existing):,} clips, this run would write {len(lines):,} "
            f"({len({*existing} & {*lines}):,} in both); rename it or delete it"
        )


def audio_settings(sampling_rate: int) -> dict[str, int | float]:
    """Audio settings for a sampling rate in Hz: windows of 50 ms every 12.5 ms (Sec. 6)."""
    win_length = sampling_rate // 20
    return {
        "sampling_rate": sampling_rate,
        "hop_length": round(sampling_rate / 80),
        "win_length": win_length,
        "filter_length": 1 << (win_length - 1).bit_length(),
        "mel_fmax": min(HParams.mel_fmax, sampling_rate / 2),
    }


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
    folder = convert_to or corpus
    train, val = (f"filelists/{name}_{part}.txt" for part in ("train", "val"))
    files = {"data_dir": str(folder), "training_files": train, "validation_files": val}
    changes = files | audio_settings(sampling_rate) | {"text_cleaners": (text_cleaners,)}
    hparams = HParams(**changes)
    layout, to_convert = find_layout(corpus, speaker), convert_to is not None
    named = f"layout {layout.name}" + (f", speaker {speaker}" if speaker else "")
    print(f"{corpus}: {named}, {len(layout.lines):,} clips")
    symbols, symbol_file = "", Path(f"filelists/{name}_symbols.txt")
    if text_cleaners not in ASCII_CLEANERS:
        symbols = find_symbols(layout, hparams.text_cleaners)
        refuse_other_symbols(symbol_file, symbols)
        n_symbols = len(alphabet(symbols))
        hparams = dataclasses.replace(hparams, symbols=symbols, n_symbols=n_symbols)
    sources = check_layout(corpus, layout, hparams, every_sample=False, to_convert=to_convert)
    clips = sources
    if convert_to:
        wavs = (os.path.relpath(os.path.splitext(c.path)[0], corpus) + ".wav" for c in sources)
        clips = [c._replace(path=str(folder / wav)) for c, wav in zip(sources, wavs, strict=True)]
    parts = split(clips, folder)
    lists = {Path(path): lines for path, lines in zip((train, val), parts, strict=True)}
    for path, lines in lists.items():  # before samples are read, which takes longest
        refuse_other_list(path, lines)
    if convert_to:
        clips = convert(sources, clips, hparams, trim_db)
    refuse(check_samples(clips, hparams))
    for path, lines in lists.items():
        exists = path.exists()
        if not exists:
            write_filelist(path, lines)
        print(f"{path}: {len(lines):,} clips{', already there' if exists else ''}")
    if symbols:
        exists = symbol_file.exists()
        if not exists:
            write_filelist(symbol_file, [symbols])
        print(f"{symbol_file}: {len(symbols):,} symbols{', already there' if exists else ''}")
    changed = {key: value for key, value in vars(hparams).items() if value != getattr(HParams, key)}
    if symbols:
        changed["symbols"] = f"@{symbol_file}"
        changed.pop("n_symbols", None)  # follows
    command = ["python", os.path.relpath(ROOT / "train.py"), "-o", f"runs/{name}"]
    print(f"Next:\n  {shlex.join([*command, '--hparams', format_overrides(changed)])}")


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
    add("--speaker", default="", help="the one to use, of VCTK or LibriTTS")
    rate = "sampling rate (default: %(default)s)"
    add("--sampling_rate", type=int, default=HParams.sampling_rate, metavar="HZ", help=rate)
    wanted = "convert all clips to mono wavs of that rate in this folder, and use these"
    add("--convert_to", type=Path, metavar="DIR", help=wanted)
    quiet = "then cut off both ends where they stay this far below the loudest 25 ms, as in 60"
    add("--trim_db", type=float, default=0.0, metavar="DB", help=f"{quiet} (default: off)")
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
