"""Check every clip of a corpus with one speaker, and write the filelists that train.py reads.

    python scripts/prepare_corpus.py DIR --name mine
    python scripts/prepare_corpus.py VCTK --speaker p225 --name p225 --convert_to data/p225

DIR has metadata.csv, with lines ID|text or ID|text|normalised text, and ID.wav or ID.flac in wavs/,
in wav/ or beside it. Or it has a text file for each wav or flac, in any folder: ID.txt or
ID.normalized.txt beside it, or, as in VCTK, txt/p225/ID.txt for wav48/p225/ID.wav.

Clips whose cleaned texts are equal are in the same list. With --text_cleaners basic_cleaners, for
a language other than English, the characters of all texts become its alphabet,
filelists/NAME_symbols.txt.
"""

import argparse
import dataclasses
import hashlib
import io
import os
import re
import shlex
import sys
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
import soxr

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, counted, exit_on_user_error, replacing
from corpus.clips import (
    Clip,
    Line,
    Problem,
    Stamp,
    check_clips,
    check_header,
    check_samples,
    check_wav,
    in_threads,
    read_lines,
    refuse,
    report_unknown_characters,
    write_lines,
)
from hparams import HParams, audio_settings, format_overrides
from text import alphabet, check_alphabet, clean_text
from text.cleaners import CLEANERS

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
TRAIN_SHARE = 0.8  # of the clips, as the paper's
FOLDERS = "wavs/", "wav/", ""  # where the audio of metadata.csv is
AUDIO = ".wav", ".flac"
SMALL_MINUTES = 30  # of speech: with fewer, another voice was the better start
MARGIN = 0.05  # seconds that trimming leaves around the speech


# What a corpus lists


def read_corpus(corpus: Path, speaker: str = "") -> tuple[list[Line], list[Problem]]:
    """Returns the clips that ``corpus`` lists, or those in folders named ``speaker``, and the
    problems of others."""
    if not corpus.is_dir():
        raise UserError(f"{corpus}: no such folder; give the corpus's")
    if (corpus / "metadata.csv").is_file():
        if speaker:
            raise UserError(f"--speaker {speaker}: {corpus}/metadata.csv names none; leave it out")
        return read_table(corpus)
    if inside := sorted(corpus.glob("*/metadata.csv")):
        raise UserError(f"{corpus}: has no metadata.csv; give a corpus, as {inside[0].parent}")
    return read_pairs(corpus, speaker)


def read_table(corpus: Path) -> tuple[list[Line], list[Problem]]:
    """Returns the clips of metadata.csv, and the problems of its other lines."""
    lines, problems = [], []
    for location, line in read_lines(corpus / "metadata.csv"):
        name, *texts = line.split("|")
        paths = [corpus / f"{folder}{name}{suffix}" for folder in FOLDERS for suffix in AUDIO]
        inside = name and not name.startswith("/") and ".." not in name.split("/")
        path = next((path for path in paths if inside and path.is_file()), None)
        if len(texts) not in (1, 2):
            fix = "use ID|text or ID|text|normalised text"
            problems.append(Problem(location, f"{1 + len(texts)} column(s); {fix}"))
        elif path is None:
            fix = "add it, fix the ID (without .wav), or remove the line (a header?)"
            missing = "no such wav or flac in wavs/, wav/ or beside this list"
            problems.append(Problem(location, f"{name}: {missing}; {fix}"))
        else:
            lines.append(Line(location, str(path), " ".join(texts[-1].split())))
    return lines, problems


def read_pairs(corpus: Path, speaker: str) -> tuple[list[Line], list[Problem]]:
    """Returns the clips whose texts are in files of their own, and the problems of others."""
    files = {path.relative_to(corpus) for path in corpus.rglob("[!.]*")}
    audio = [path for path in sorted(files) if path.suffix.lower() in AUDIO]
    audio = [path for path in audio if not path.stem.endswith("_mic2")]  # VCTK's other microphone
    folders = sorted({path.parent for path in audio})
    if speaker:
        audio = [path for path in audio if speaker in path.parent.parts]
    elif len(folders) > 1:
        fix = "if that is a speaker each, name one by --speaker"
        print(f"note: {corpus}: has audio in {len(folders):,} folders, as {folders[0]}; {fix}")
    lines, problems = [], []
    for path in audio:
        name = path.stem.removesuffix("_mic1")
        beside, mirrored = path.with_name(f"{name}.txt"), Path("txt", *path.parts[1:-1])
        candidates = path.with_name(f"{name}.normalized.txt"), beside, mirrored / f"{name}.txt"
        text = next((file for file in candidates if file in files), None)
        if text is None:
            fix = "write its text, this file, or remove the audio"
            problems.append(Problem(f"{corpus / beside}:1", f"{path}: has no text; {fix}"))
            continue
        content = " ".join(line for _, line in read_lines(corpus / text))
        if "|" in content:
            problems.append(Problem(f"{corpus / text}:1", f"{content!r} has a |; leave it out"))
        else:
            content = " ".join(content.split())
            lines.append(Line(f"{corpus / text}:1", str(corpus / path), content))
    if not lines:
        of_speaker = f"--speaker {speaker}: " if speaker else ""
        missing = "has no metadata.csv, and no wav or flac with a text"
        raise UserError(f"{of_speaker}{corpus}: {missing}; --help says where to put them")
    return lines, problems


def find_symbols(lines: Sequence[Line], cleaners: Sequence[str]) -> str:
    """Returns all characters of the cleaned texts that can be symbols, sorted. Prints the rarest,
    among which misprints would be."""
    uses = Counter()
    for line in lines:
        with suppress(ValueError):  # check_clips reports it
            uses.update(unicodedata.normalize("NFC", clean_text(line.text, cleaners)))
    symbols = []
    for character in sorted(uses, key=lambda c: (c == "@", c)):  # a first @ would name a file
        with suppress(ValueError):  # report_unknown_characters prints those that have no symbol
            check_alphabet(character)
            symbols.append(character)
    rarest = [f"{c!r} {uses[c]}" for c in sorted(symbols, key=lambda c: uses[c])[:5]]
    print(f"{len(symbols)} symbols; the rarest and their uses are {', '.join(rarest)}")
    if with_digits := [line for line in lines if any(map(str.isdecimal, line.text))]:
        locations = ", ".join(line.location for line in with_digits[:5])
        n_texts = counted(len(with_digits), "text")
        print(f"note: {locations}: digits are not read (in {n_texts}); spell numbers out")
    return "".join(symbols)


# Conversion


def convert(clips: Sequence[Clip], folder: Path, corpus: Path, rate: int, trim_db: float) -> None:
    """Makes the new ``folder`` a corpus of metadata.csv and wavs/ID.wav, from the clips of
    ``corpus``."""
    names = [Path(os.path.relpath(clip.path, corpus)).with_suffix("") for clip in clips]
    names = [re.sub("^wavs?/", "", name.as_posix()) for name in names]
    if twice := [name for name, uses in Counter(names).items() if uses > 1]:
        raise UserError(f"{corpus}: has several clips named {twice[0]}; rename them, or keep one")
    for path in {(folder / "wavs" / name).parent for name in names}:
        path.mkdir(parents=True, exist_ok=True)
    work = [(clip, folder / f"wavs/{name}.wav") for clip, name in zip(clips, names, strict=True)]
    cut = in_threads(partial(convert_clip, rate=rate, trim_db=trim_db), work, "converting")
    refuse([problem for problem in cut if isinstance(problem, Problem)])
    with replacing(folder / "metadata.csv") as file:  # last: without it, this is no corpus
        rows = [f"{name}|{clip.text}\n" for clip, name in zip(clips, names, strict=True)]
        file.write("".join(rows).encode())
    trimmed = f", {sum(cut):,.1f} s of silence cut off" if trim_db else ""
    print(f"{folder}: {len(clips):,} clips converted{trimmed}")


def convert_clip(work: tuple[Clip, Path], rate: int, trim_db: float) -> float | Problem:
    """Writes a clip's wav, mono with 16 bits, and returns the seconds that trimming cut off, or
    what is wrong with the clip."""
    clip, wav = work
    try:
        samples, old_rate = soundfile.read(clip.path, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError) as error:
        return Problem(clip.location, f"{clip.path}: not readable ({error}); replace it")
    if len(samples) != soundfile.info(clip.path).frames:
        return Problem(clip.location, f"{clip.path}: not as long as its header says; replace it")
    samples = samples.mean(axis=1)
    if old_rate != rate:
        samples = soxr.resample(samples, old_rate, rate)
    n_samples = len(samples)
    if trim_db:
        import librosa  # takes seconds

        frames = {"frame_length": rate // 40, "hop_length": rate // 160}
        _, (start, end) = librosa.effects.trim(samples, top_db=trim_db, **frames)
        margin = round(MARGIN * rate)
        samples = samples[max(start - margin, 0) : end + margin]
    peak = np.abs(samples).max(initial=0)
    if not peak <= 2:  # resampling and lossy formats may exceed 1
        return Problem(clip.location, f"{clip.path}: has a sample of {peak:g}; scale it down")
    steps = np.rint(samples * (32768 / max(peak, 1))).clip(-32768, 32767).astype(np.int16)
    content = io.BytesIO()  # soundfile ignores that a disk is full
    soundfile.write(content, steps, rate, "PCM_16", format="WAV")
    with replacing(wav) as file:
        file.write(content.getbuffer())
    return (n_samples - len(samples)) / rate


def check_source(path: str, hparams: HParams) -> tuple[int, Stamp]:
    """Checks audio to convert: returns how many samples it will have, and its stamp."""
    header, stamp = check_header(path)
    return round(header.frames * hparams.sampling_rate / header.samplerate), stamp


# The program


def split(clips: Sequence[Clip]) -> tuple[list[Clip], list[Clip]]:
    """Returns the clips for training and for validation, one at least, in the order given. Takes of
    one sentence, whose cleaned texts are equal, are on the same side.

    Texts are ranked by a hash, so the split is the same on every machine, whatever the order of the
    clips.
    """
    ranks = [hashlib.sha256(repr(clip.ids).encode()).digest() for clip in clips]
    if len(distinct := sorted(set(ranks))) < 2:
        n_clips = counted(len(clips), "clip")
        raise UserError(f"{n_clips}, all of one text; add clips of another, to validate on")
    ordered, n_train = sorted(ranks), TRAIN_SHARE * len(clips)
    limit = min(distinct[1:], key=lambda rank: abs(bisect_left(ordered, rank) - n_train))
    sides = list(zip(clips, ranks, strict=True))
    return [c for c, rank in sides if rank < limit], [c for c, rank in sides if rank >= limit]


def check_corpus(
    lines: Sequence[Line], problems: Sequence[Problem], hparams: HParams, converting: bool = False
) -> list[Clip]:
    """Returns the clips of ``lines``. Raises all problems, with those of the samples unless the
    clips are yet to be converted."""
    any_length = dataclasses.replace(hparams, max_text_length=2**31 - 1)  # training checks it
    check_audio = check_source if converting else check_wav
    clips, of_lines = check_clips(lines, any_length, {}, check_audio)
    of_samples = [] if converting else check_samples(clips, hparams)
    refuse(sorted([*problems, *of_lines, *of_samples], key=Problem.line))
    return clips


def prepare(args: argparse.Namespace) -> None:
    """Checks the corpus, converts it if asked, writes its filelists, and prints how to train on
    it."""
    corpus, files = args.corpus, [f"filelists/{args.name}_{part}.txt" for part in ("train", "val")]
    hparams = HParams(
        **audio_settings(args.sampling_rate),
        data_dir=str(args.convert_to or corpus),
        training_files=files[0],
        validation_files=files[1],
        text_cleaners=(args.text_cleaners,),
    )
    lines, problems = read_corpus(corpus, args.speaker)
    print(f"{corpus}: {counted(len(lines), 'clip')}")
    changes = {key: value for key, value in vars(hparams).items() if value != getattr(HParams, key)}
    if args.text_cleaners == "basic_cleaners":
        symbols = find_symbols(lines, hparams.text_cleaners)
        hparams = dataclasses.replace(hparams, symbols=symbols, n_symbols=len(alphabet(symbols)))
        changes["symbols"] = f"@filelists/{args.name}_symbols.txt"
    clips = check_corpus(lines, problems, hparams, converting=args.convert_to is not None)
    report_unknown_characters(((clip.location, clip.text) for clip in clips), hparams)
    if args.convert_to:
        convert(clips, args.convert_to, corpus, args.sampling_rate, args.trim_db)
        corpus = args.convert_to
        clips = check_corpus(*read_table(corpus), hparams)
    takes = Counter(tuple(clip.ids) for clip in clips).values()
    if repeated := [n for n in takes if n > 1]:
        texts = counted(len(repeated), "text")
        print(f"note: {sum(repeated):,} clips are takes of {texts}; all of a text are in one list")
    for file, part in zip(files, split(clips), strict=True):
        rows = [f"{os.path.relpath(clip.path, corpus)}|{clip.text}" for clip in part]
        write_lines(Path(file), rows)
        print(f"{file}: {counted(len(rows), 'clip')}")
    if hparams.symbols:
        write_lines(Path(changes["symbols"][1:]), [hparams.symbols])
    minutes = sum(clip.n_frames for clip in clips) * hparams.hop_length / hparams.sampling_rate / 60
    if minutes < SMALL_MINUTES and hparams.sampling_rate == HParams.sampling_rate:
        amount = counted(round(minutes), "minute")
        print(f"note: {amount} of speech: start from another voice (docs/speech.md, A small voice)")
    command = ["python", os.path.relpath(TRAIN), "-o", f"runs/{args.name}"]
    if hparams.sampling_rate == HParams.sampling_rate:
        command += ["--preset", "nvidia"]  # mels that HiFi-GAN's published weights can speak
    changes |= {"hours": 8, "learning_rate_decay": 0.3}
    changes |= {"n_frames_per_step": 2, "guided_attention_weight": 1}
    settings = format_overrides(changes)
    print("Next (for a night; the newest checkpoint will speak best):")
    print(f"  {shlex.join([*command, '--hparams', settings])}")


def main(argv: Sequence[str] | None = None) -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(description=__doc__, formatter_class=as_written)
    add = parser.add_argument
    add("corpus", type=Path, metavar="DIR", help="folder of the corpus")
    add("--name", required=True, help="for filelists/NAME_*.txt")
    add("--speaker", default="", help="use only the audio in folders of this name")
    rate = "sampling rate (default: %(default)s)"
    add("--sampling_rate", type=int, default=HParams.sampling_rate, metavar="HZ", help=rate)
    wanted = "make a corpus of mono wavs of that rate in this new folder, and use it"
    add("--convert_to", type=Path, metavar="DIR", help=wanted)
    quiet = "then cut off both ends where they stay this far below the loudest 25 ms, as 40"
    add("--trim_db", type=float, default=0.0, metavar="DB", help=quiet)
    cleaners = "of the language (default: %(default)s)"
    add("--text_cleaners", choices=CLEANERS, default="english_cleaners", help=cleaners)
    args = parser.parse_args(argv)
    if not re.fullmatch(r"\w[\w.-]*", args.name):
        raise UserError(f"--name {args.name}: use letters, digits and . _ - only")
    if not 0 <= args.trim_db <= 120:
        raise UserError(f"--trim_db {args.trim_db}: use 0 to 120")
    filelist = Path(f"filelists/{args.name}_train.txt")
    if (folder := args.convert_to) is None:
        if args.trim_db:
            raise UserError(f"--trim_db {args.trim_db}: needs --convert_to, for the cut clips")
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: already has files; give another --convert_to, or prepare it")
    elif folder.resolve().is_relative_to(args.corpus.resolve()):
        raise UserError(f"--convert_to {folder}: is in the corpus; use another folder")
    elif filelist.exists():
        raise UserError(f"{filelist}: exists already; give another --name, or delete it")
    prepare(args)


if __name__ == "__main__":
    exit_on_user_error(main)
