"""Download LJSpeech 1.1, check every clip, and write the 80:20 filelists that train.py reads.

python scripts/prepare_ljspeech.py --data_dir data
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
import shutil
import sys
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pooch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, progress_bar
from clips import Clip, Problem, check_lines, check_samples, numbered_lines, read_lines, refuse
from files import make_folder, making, replacing, require_space
from hparams import HParams, format_overrides

ROOT = Path(__file__).resolve().parent.parent
CORPUS = "LJSpeech-1.1"  # the one folder at the top of the archive
ARCHIVE = f"{CORPUS}.tar.bz2"
URL = f"https://data.keithito.com/data/speech/{ARCHIVE}"
SHA256 = "be1a30453f28eb8dd26af4101ae40cbf2c50413b1bb21936cbcdc6fae3de8aa5"
SIZE, EXTRACTED_SIZE = 2_748_572_632, 3_850_000_000  # bytes
OTHER_DISK = "give another --data_dir"
RATES = range(4000, 192_001)  # Hz; much below, some of the 80 mel bands would be empty


def obtain(data_dir: Path) -> None:
    """Extract LJSpeech into ``data_dir`` from the archive there or a download, if it is missing."""
    corpus, archive = data_dir / CORPUS, data_dir / ARCHIVE
    if os.path.isfile(corpus / "metadata.csv"):
        print(f"{corpus}: already extracted")
        return
    if corpus.exists():
        raise UserError(f"{corpus}: has no metadata.csv; remove or rename it and run again")
    unfinished = data_dir / f"{CORPUS}.unfinished"
    with making(data_dir, OTHER_DISK):
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a run that was killed
        n_bytes = EXTRACTED_SIZE if archive.exists() else SIZE + EXTRACTED_SIZE
        require_space(data_dir, n_bytes, OTHER_DISK)
        unfinished.mkdir()
        try:
            if not archive.exists():
                download(unfinished).replace(archive)
            elif (actual := pooch.file_hash(archive)) != SHA256:
                raise UserError(f"{archive}: SHA-256 is {actual}, not {SHA256}; download it again")
            extract(archive, unfinished)
            (unfinished / CORPUS).rename(corpus)
        finally:
            shutil.rmtree(unfinished)
    print(f"{corpus}: extracted; {archive} is no longer needed")


def download(folder: Path) -> Path:
    """The archive, downloaded into ``folder``; it appears there only if its SHA-256 is right."""
    try:
        return Path(pooch.retrieve(URL, SHA256, ARCHIVE, folder, progressbar=sys.stderr.isatty()))
    except (OSError, ValueError) as error:  # of requests, and of pooch for another SHA-256
        fix = f"run again, or put {ARCHIVE} into --data_dir yourself"
        raise UserError(f"{URL}: {error}; {fix}") from None


def extract(archive: Path, folder: Path) -> None:
    """Extract ``archive`` into the empty ``folder``; refuses links and paths that lead outside."""
    with tarfile.open(archive, "r:bz2") as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # new in Python 3.10.12
        for member in progress_bar(tar, desc="extract", unit=" files"):
            outside = member.name.startswith("/") or ".." in member.name.split("/")
            if outside or not (member.isfile() or member.isdir()):
                raise UserError(f"{archive}: has {member.name}, a link or outside; do not use it")
            tar.extract(member, folder, set_attrs=False)


def read_corpus(corpus: Path, hparams: HParams, every_sample: bool = True) -> list[Clip]:
    """The clips of ``metadata.csv``, checked as for training; samples too, if ``every_sample``."""
    metadata = f"{corpus}/metadata.csv"
    if not os.path.isfile(metadata):
        raise UserError(f"{metadata}: no such file; give the folder that holds it and wavs/")
    # Training checks the length of texts.
    hparams = dataclasses.replace(hparams, data_dir=str(corpus), max_text_length=2**31 - 1)
    clips, problems = check_lines(numbered_lines(metadata), partial(_split_row, corpus), hparams)
    if problems and not clips and all("sampling rate" in problem.message for problem in problems):
        raise UserError(f"{problems[0]} (the same for all {len(problems):,} clips)")
    if problems or every_sample:  # one report has all problems
        refuse(sorted([*problems, *check_samples(clips, hparams)], key=Problem.line))
    if len(clips) < 2:
        raise UserError(f"{metadata}: {len(clips)} clips; a split needs at least 2")
    return clips


def _split_row(corpus: Path, line: str) -> tuple[str, str]:
    """Path and text (the last column) of a row of ``metadata.csv``."""
    columns = line.split("|")
    if len(columns) not in (2, 3):
        raise UserError(f"{len(columns)} column(s); use ID|text or ID|text|normalised text")
    path = f"wavs/{columns[0]}.wav"
    if "/" in columns[0] or not os.path.isfile(corpus / path):
        fix = "fix the ID (it has no .wav), or remove the line (a header?)"
        raise UserError(f"{path}: no such file; {fix}")
    return path, " ".join(columns[-1].split())


def split(clips: Sequence[Clip], train_fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Lines ``wavs/ID.wav|text`` for training and validation, in the order given, one at least.

    IDs are ranked by a hash of seed and ID, so the split is the same on every machine and in
    every version, whatever the order of the clips.
    """
    lines = {Path(clip.path).stem: f"wavs/{Path(clip.path).name}|{clip.text}" for clip in clips}
    ranked = sorted(lines, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    n_train = min(max(round(len(clips) * train_fraction), 1), len(clips) - 1)
    train = {*ranked[:n_train]}
    return [lines[i] for i in lines if i in train], [lines[i] for i in lines if i not in train]


def refuse_other_list(path: Path, lines: list[str]) -> None:
    """Raise :class:`UserError` if the filelist exists with other lines."""
    existing = [line for line in read_lines(str(path)) if line] if path.exists() else lines
    if existing != lines:
        raise UserError(
            f"{path}: already has {len(existing):,} clips, this run would write {len(lines):,} "
            f"({len({*existing} & {*lines}):,} in both); give another --name, or delete it"
        )


def write_filelist(path: Path, lines: Sequence[str]) -> None:
    """Write ``path`` whole or not at all."""
    make_folder(path.parent)
    with replacing(path) as file:  # bytes that are not UTF-8 stay, for load_data to name
        file.write("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))


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


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True).add_argument
    download = f"extract LJSpeech into DIR, from DIR/{ARCHIVE} or a download; needs 6.6 GB"
    source("--data_dir", type=Path, metavar="DIR", help=download)
    own = "use DIR/wavs/ID.wav and DIR/metadata.csv (lines ID|text|normalised text or ID|text)"
    source("--corpus", type=Path, metavar="DIR", help=own)
    add = parser.add_argument
    add("--name", default="ljspeech", help="for filelists/NAME_*.txt (default: %(default)s)")
    add("--train_fraction", type=float, default=0.8, help="share of clips (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the split (default: %(default)s)")
    rate = "sampling rate (default: %(default)s)"
    add("--sampling_rate", type=int, default=HParams.sampling_rate, metavar="HZ", help=rate)
    args = parser.parse_args(argv)
    if not re.fullmatch(r"\w[\w.-]*", args.name):
        raise UserError(f"--name {args.name}: use letters, digits and . _ - only")
    if not 0 < args.train_fraction < 1:
        raise UserError(f"--train_fraction {args.train_fraction}: use a value between 0 and 1")
    if args.sampling_rate not in RATES:
        raise UserError(f"--sampling_rate {args.sampling_rate}: use {RATES[0]} to {RATES[-1]}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    corpus = args.corpus or args.data_dir / CORPUS
    train, val = (f"filelists/{args.name}_{part}.txt" for part in ("train", "val"))
    files = {"data_dir": str(corpus), "training_files": train, "validation_files": val}
    hparams = HParams(**files, **audio_settings(args.sampling_rate))
    with making(Path("filelists"), "run this in another folder"):
        if args.data_dir:
            obtain(args.data_dir)
        clips = read_corpus(corpus, hparams, every_sample=False)
        parts = split(clips, args.train_fraction, args.seed)
        lists = {Path(path): lines for path, lines in zip((train, val), parts, strict=True)}
        for path, lines in lists.items():  # before samples are read, which takes longest
            refuse_other_list(path, lines)
        refuse(check_samples(clips, hparams))
        for path, lines in lists.items():
            exists = path.exists()
            if not exists:
                write_filelist(path, lines)
            print(f"{path}: {len(lines):,} clips{', already there' if exists else ''}")
    changed = {key: value for key, value in vars(hparams).items() if value != getattr(HParams, key)}
    command = ["python", os.path.relpath(ROOT / "train.py"), "-o", f"runs/{args.name}"]
    print(f"Next:\n  {shlex.join([*command, '--hparams', format_overrides(changed)])}")


if __name__ == "__main__":
    exit_on_user_error(main)
