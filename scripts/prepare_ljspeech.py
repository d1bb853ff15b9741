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
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pooch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, progress_bar
from clips import Clip, Problem, check_lines, check_samples, numbered_lines, read_lines
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
MAX_PROBLEMS = 20  # in a report


def obtain(data_dir: Path, archive: Path | None) -> Path:
    """The corpus in ``data_dir``; if missing, extracted from ``archive`` or from a download."""
    corpus = data_dir / CORPUS
    if os.path.isfile(corpus / "metadata.csv"):
        print(f"{corpus}: already extracted")
        return corpus
    if corpus.exists():
        raise UserError(f"{corpus}: has no metadata.csv; remove or rename it and run again")
    if archive and not archive.is_file():
        raise UserError(f"--archive {archive}: no such file; give a downloaded {ARCHIVE}")
    archive = archive or data_dir / ARCHIVE
    unfinished = data_dir / f"{CORPUS}.unfinished"
    with making(data_dir, OTHER_DISK):
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a run that was killed
        n_bytes = EXTRACTED_SIZE if archive.exists() else SIZE + EXTRACTED_SIZE
        require_space(data_dir, n_bytes, OTHER_DISK)
        unfinished.mkdir()
        try:
            if not archive.exists():
                download(unfinished / ARCHIVE)
                (unfinished / ARCHIVE).replace(archive)
            elif (actual := pooch.file_hash(archive)) != SHA256:
                raise UserError(f"{archive}: SHA-256 is {actual}, not {SHA256}; download it again")
            extract(archive, unfinished)
            (unfinished / CORPUS).rename(corpus)
        finally:
            shutil.rmtree(unfinished)
    print(f"{corpus}: extracted; {archive} is no longer needed")
    return corpus


def download(path: Path) -> None:
    """Download the archive to ``path``, which appears only if it has the right SHA-256."""
    http = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), chunk_size=1 << 18, timeout=60)
    try:
        pooch.retrieve(URL, SHA256, path.name, path.parent, downloader=http)
    except (OSError, ValueError) as error:  # of requests, and of pooch for another SHA-256
        raise UserError(f"{URL}: {error}; run again, or use --archive") from None


def extract(archive: Path, folder: Path) -> None:
    """Extract ``archive`` into ``folder``, which must be empty."""
    with tarfile.open(archive, "r:bz2") as tar:
        # Members are checked here on any Python, and again by the filter where there is one.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        for member in progress_bar(tar, desc="extract", unit=" files"):
            outside = member.name.startswith("/") or ".." in member.name.split("/")
            if outside or not (member.isfile() or member.isdir()):
                raise UserError(f"{archive}: has {member.name}, a link or outside; do not use it")
            tar.extract(member, folder, set_attrs=False)


def read_corpus(corpus: Path, hparams: HParams, every_sample: bool = True) -> list[Clip]:
    """The clips of ``metadata.csv``, checked as for training; samples too, if ``every_sample``."""
    metadata = corpus / "metadata.csv"
    if not os.path.isfile(metadata):
        raise UserError(f"{metadata}: no such file; give the folder that holds it and wavs/")
    # Training checks the length of texts.
    hparams = dataclasses.replace(hparams, data_dir=str(corpus), max_text_length=2**31 - 1)
    rows = numbered_lines(str(metadata))
    clips, problems = check_lines(rows, partial(_split_row, corpus), hparams)
    if problems and not clips and all("sampling rate" in problem.message for problem in problems):
        raise UserError(f"{problems[0]} (the same for all {len(problems):,} clips)")
    if problems or every_sample:  # one report has all problems
        refuse([*problems, *check_samples(clips, hparams)], corpus)
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


def refuse(problems: Sequence[Problem], corpus: Path) -> None:
    """Raise the problems, if there are any, as one :class:`UserError`, a line each."""
    if problems:
        head = f"{corpus}: no filelist was written because of {len(problems):,} problem(s)"
        report = [head, *sorted(problems, key=Problem.line)[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            report.append(f"and {len(problems) - MAX_PROBLEMS:,} more")
        raise UserError("\n  ".join(map(str, report)))


def split(clips: Sequence[Clip], train_fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Lines ``wavs/ID.wav|text`` for training and validation, in the order given, one at least.

    IDs are ranked by a hash of seed and ID, so the split is the same on every machine and in
    every version, whatever the order of the clips.
    """

    def rank(i: int) -> bytes:
        return hashlib.sha256(f"{seed} {Path(clips[i].path).stem}".encode()).digest()

    def lines(indices: list[int]) -> list[str]:
        return [f"wavs/{Path(clips[i].path).name}|{clips[i].text}" for i in sorted(indices)]

    ranked = sorted(range(len(clips)), key=rank)
    n_train = min(max(round(len(clips) * train_fraction), 1), len(clips) - 1)
    return lines(ranked[:n_train]), lines(ranked[n_train:])


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


def train_command(name: str, settings: Mapping[str, str | float]) -> str:
    """The train.py command, as called from the current folder, with all settings but defaults."""
    changed = {key: value for key, value in settings.items() if value != getattr(HParams, key)}
    options = ["-o", f"runs/{name}", "--hparams", format_overrides(changed)]
    return shlex.join(["python", os.path.relpath(ROOT / "train.py"), *options])


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    arg = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    # fmt: off
    source.add_argument("--data_dir", type=Path, metavar="DIR",
        help=f"download into DIR and extract as DIR/{CORPUS}; needs 6.6 GB of disk space")
    source.add_argument("--corpus", type=Path, metavar="DIR",
        help="use DIR/wavs/ID.wav and DIR/metadata.csv (lines ID|text|normalised text or ID|text)")
    arg("--archive", type=Path, metavar="FILE", help=f"extract this {ARCHIVE} into --data_dir")
    arg("--name", default="ljspeech",
        help="write NAME_train.txt and NAME_val.txt (default: %(default)s)")
    arg("--filelists_dir", type=Path, default="filelists", metavar="DIR",
        help="where to write them (default: %(default)s)")
    arg("--train_fraction", type=float, default=0.8, metavar="F",
        help="share of the clips for training; the others validate (default: %(default)s)")
    arg("--seed", type=int, default=0, help="of the random split (default: %(default)s)")
    arg("--sampling_rate", type=int, default=HParams.sampling_rate, metavar="HZ",
        help="of all clips (default: %(default)s)")
    # fmt: on
    args = parser.parse_args(argv)
    if args.archive and args.corpus:
        raise UserError(f"--archive {args.archive}: is not used with --corpus; leave one out")
    if not re.fullmatch(r"\w[\w.-]*", args.name):
        raise UserError(f"--name {args.name}: use letters, digits and . _ - only")
    if "+" in str(args.filelists_dir):
        raise UserError(f"--filelists_dir {args.filelists_dir}: + joins filelists; leave it out")
    if not 0 < args.train_fraction < 1:
        raise UserError(f"--train_fraction {args.train_fraction}: use a value between 0 and 1")
    if args.sampling_rate not in RATES:
        raise UserError(f"--sampling_rate {args.sampling_rate}: use {RATES[0]} to {RATES[-1]}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    audio = audio_settings(args.sampling_rate)
    hparams = HParams(**audio)
    train, val = (args.filelists_dir / f"{args.name}_{part}.txt" for part in ("train", "val"))
    with making(args.filelists_dir, "give another --filelists_dir"):
        corpus = args.corpus or obtain(args.data_dir, args.archive)
        clips = read_corpus(corpus, hparams, every_sample=False)
        lists = dict(zip((train, val), split(clips, args.train_fraction, args.seed), strict=True))
        for path, lines in lists.items():  # before samples are read, which takes longest
            refuse_other_list(path, lines)
        refuse(check_samples(clips, hparams), corpus)
        for path, lines in lists.items():
            exists = path.exists()
            if not exists:
                write_filelist(path, lines)
            print(f"{path}: {len(lines):,} clips{', already there' if exists else ''}")
    files = {"training_files": str(train), "validation_files": str(val)}
    print(f"Next:\n  {train_command(args.name, {'data_dir': str(corpus), **files, **audio})}")


if __name__ == "__main__":
    exit_on_user_error(main)
