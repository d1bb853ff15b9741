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
from pathlib import Path, PurePosixPath

import pooch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, progress_bar
from clips import Clip, Problem, check_lines, check_samples, numbered_lines, read_lines
from files import make_folder, making, replacing, require_space
from hparams import HParams, format_overrides

ROOT = Path(__file__).resolve().parent.parent
CORPUS = "LJSpeech-1.1"  # the one folder at the top of the archive
URL = "https://data.keithito.com/data/speech/LJSpeech-1.1.tar.bz2"
SHA256 = "be1a30453f28eb8dd26af4101ae40cbf2c50413b1bb21936cbcdc6fae3de8aa5"
SIZE = 2_748_572_632  # bytes
EXPANSION = 1.4  # bytes extracted per byte of archive: LJSpeech grows to 3.8 GB
OTHER_DISK = "give another --data_dir"

MIN_RATE, MAX_RATE = 4000, 192_000  # Hz; much below, some of the 80 mel bands would be empty
MAX_LINES = 20  # of a report of problems


# Download


def obtain(data_dir: Path, archive: Path | None, url: str, sha256: str) -> Path:
    """The corpus in ``data_dir``. If it is missing, extract ``archive``, or download it first.

    Raises:
        UserError: no archive, another SHA-256, too little disk space, or see below.
    """
    corpus = data_dir / CORPUS
    if os.path.isfile(corpus / "metadata.csv"):
        print(f"{corpus}: already extracted")
        return corpus
    if os.path.exists(corpus):
        raise UserError(f"{corpus}: has no metadata.csv; remove or rename it and run again")
    if archive and not archive.is_file():
        raise UserError(f"--archive {archive}: no such file; give a downloaded {CORPUS}.tar.bz2")
    archive = archive or data_dir / f"{CORPUS}.tar.bz2"
    unfinished = data_dir / f"{CORPUS}.unfinished"
    with making(data_dir, OTHER_DISK):
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a run that was killed
        unfinished.mkdir()
        try:
            if not archive.exists():
                download(url, sha256, unfinished / archive.name)
                (unfinished / archive.name).replace(archive)
            elif (actual := pooch.file_hash(archive)) != sha256:
                raise UserError(
                    f"{archive}: SHA-256 is {actual}, expected SHA-256 {sha256}; remove it and "
                    "download it again"
                )
            require_space(data_dir, archive.stat().st_size * EXPANSION, OTHER_DISK)
            extract(archive, unfinished)
            (unfinished / CORPUS).rename(corpus)
        finally:
            shutil.rmtree(unfinished)
    print(f"{corpus}: extracted; {archive} is no longer needed")
    return corpus


def download(url: str, sha256: str, path: Path) -> None:
    """Download ``url`` to ``path``, which appears only if it has this SHA-256.

    Raises:
        UserError: no connection, a server's refusal, another SHA-256, or too little disk space.
    """
    if sha256 == SHA256:
        require_space(path, SIZE * (1 + EXPANSION), OTHER_DISK)
    pooch.get_logger().setLevel("WARNING")
    downloader = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(),
        chunk_size=1 << 18,
        timeout=60,  # seconds without a byte
        headers={"User-Agent": "prepare_ljspeech"},  # some servers refuse Python's own
    )
    try:
        pooch.retrieve(url, sha256, path.name, path.parent, downloader=downloader)
    except (OSError, ValueError) as error:  # of requests, and of pooch for another SHA-256
        raise UserError(f"{url}: {error}; run again, or give another --url or --archive") from None


def extract(archive: Path, folder: Path) -> None:
    """Extract ``archive`` into ``folder``, which must be empty.

    Raises:
        UserError: it is broken, or has a link, a device, or a path that leads outside.
    """
    # pooch.Untar would follow paths that lead outside, before Python 3.12.
    try:
        with tarfile.open(archive, "r:bz2") as tar:
            # Members are checked here on any Python, and again by the filter where there is one.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            for member in progress_bar(tar, desc="extract", unit=" files"):
                path = PurePosixPath(member.name)
                outside = path.is_absolute() or ".." in path.parts
                if outside or not (member.isfile() or member.isdir()):
                    raise UserError(
                        f"{archive}: member {member.name} is a link or a device, or leads out of "
                        "the folder; do not use it"
                    )
                tar.extract(member, folder, set_attrs=False)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{archive}: {error}; check it, and the space in {folder}") from error
    if not (folder / CORPUS / "metadata.csv").is_file():
        raise UserError(f"{archive}: has no {CORPUS}/metadata.csv; use the LJSpeech archive")


# Checks


def read_corpus(corpus: Path, hparams: HParams) -> dict[str, str]:
    """ID → text of every clip in ``metadata.csv``, in its order, with all clips checked.

    Raises:
        UserError: the problems of the corpus, a line each.
    """
    clips, problems = read_metadata(corpus, hparams)
    check_corpus(corpus, clips, problems, hparams)
    return texts(clips)


def read_metadata(corpus: Path, hparams: HParams) -> tuple[list[Clip], list[Problem]]:
    """The clips of ``metadata.csv``, and the problems of the lines that give none.

    Texts and the headers of wav files are checked as for training. The text is the third column,
    or the second of two.

    Raises:
        UserError: there is no such file, or fewer than 2 clips.
    """
    metadata = corpus / "metadata.csv"
    if not os.path.isfile(metadata):
        raise UserError(f"{metadata}: no such file; give the folder that holds it and wavs/")
    # How long a text may be is for training to say.
    hparams = dataclasses.replace(hparams, data_dir=str(corpus), max_text_length=2**31 - 1)
    lines = numbered_lines(str(metadata))
    clips, problems = check_lines(lines, partial(_split_line, corpus), hparams)
    if not problems and len(clips) < 2:
        raise UserError(f"{metadata}: {len(clips)} clips; a split needs at least 2")
    return clips, problems


def _split_line(corpus: Path, line: str) -> tuple[str, str]:
    """Path in ``corpus`` and text of a line of ``metadata.csv``."""
    columns = line.split("|")
    if len(columns) not in (2, 3):
        raise UserError(f"{len(columns)} column(s); use ID|text or ID|text|normalised text")
    clip_id = columns[0]
    if not clip_id or not clip_id.isprintable() or re.search(r"[/\\]|^\.\.?$", clip_id):
        raise UserError(f"ID {clip_id!r}; use the name of a file in wavs/ without .wav")
    path = f"wavs/{clip_id}.wav"
    if not os.path.isfile(corpus / path):
        raise UserError(
            f"{corpus / path}: missing; extract the corpus again, leave .wav out of the ID, or "
            "remove the line (a header?)"
        )
    return path, " ".join(columns[-1].split())


def check_corpus(
    corpus: Path, clips: Sequence[Clip], problems: Sequence[Problem], hparams: HParams
) -> None:
    """Check the samples of ``clips``, and report their and the other ``problems``.

    Raises:
        UserError: there are problems. It lists the first ``MAX_LINES``, a line each; if no clip
            has the sampling rate, one line says so.
    """
    problems = sorted([*problems, *check_samples(clips, hparams)], key=Problem.line)
    n = len(problems)
    if not problems:
        return
    if not clips and all("sampling rate" in problem.message for problem in problems):
        raise UserError(f"{problems[0]} (and so for all {n:,} clips)")
    head = f"{corpus}: no filelist was written because of {n:,} problem(s)"
    more = [f"and {n - MAX_LINES:,} more"] if n > MAX_LINES else []
    raise UserError("\n  ".join(map(str, [head, *problems[:MAX_LINES], *more])))


def texts(clips: Sequence[Clip]) -> dict[str, str]:
    """ID → text."""
    return {Path(clip.path).stem: clip.text for clip in clips}


# Filelists


def split(ids: Sequence[str], train_fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Random training and validation IDs, at least one each, both in the order given.

    IDs are ranked by a hash of seed and ID, so the split is the same on every machine and in
    every version, whatever the order of ``ids``.
    """
    ranked = sorted(ids, key=lambda clip_id: hashlib.sha256(f"{seed} {clip_id}".encode()).digest())
    n_train = min(max(round(len(ids) * train_fraction), 1), len(ids) - 1)
    train = set(ranked[:n_train])
    return [i for i in ids if i in train], [i for i in ids if i not in train]


def refuse_other_lists(lists: Mapping[Path, list[str]]) -> None:
    """Raise :class:`UserError` if a filelist exists and does not have these lines."""
    for path, lines in lists.items():
        if path.exists() and (existing := read_lines(str(path))) != [*lines, ""]:
            existing = [line for line in existing if line.strip()]
            raise UserError(
                f"{path}: exists and lists {len(existing):,} clips, this run {len(lines):,} "
                f"({len({*existing} & {*lines}):,} lines are in both); give another --name, or "
                "delete the file"
            )


def write_filelist(path: Path, lines: Sequence[str]) -> None:
    """Write ``path`` whole or not at all."""
    make_folder(path.parent)
    with replacing(path) as file:  # bytes that are not UTF-8 stay, for load_data to name
        file.write("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))


# The next command


def audio_settings(sampling_rate: int) -> dict[str, int | float]:
    """What follows from the rate (Hz): windows of 50 ms every 12.5 ms (Sec. 6), in samples."""
    win_length = sampling_rate // 20
    return {
        "sampling_rate": sampling_rate,
        "hop_length": round(sampling_rate / 80),
        "win_length": win_length,
        "filter_length": 1 << (win_length - 1).bit_length(),
        "mel_fmax": min(HParams.mel_fmax, sampling_rate / 2),
    }


def train_command(name: str, **settings: str | float) -> str:
    """The train.py command, as called from the current folder, with all settings but defaults."""
    changed = {key: value for key, value in settings.items() if value != getattr(HParams, key)}
    options = ["-o", f"runs/{name}", "--hparams", format_overrides(changed)]
    return shlex.join(["python", os.path.relpath(ROOT / "train.py"), *options])


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; combinations and values that make no sense raise :class:`UserError`."""
    parser = ArgumentParser(
        description="Download LJSpeech 1.1 (--data_dir), or take it from --archive or --corpus; "
        "check every clip and transcript; write the training and validation filelists.",
        epilog=f"Needs {SIZE / 1e9:.1f} GB of disk space for the download and "
        f"{SIZE * EXPANSION / 1e9:.1f} GB more to extract it.",
    )
    arg = parser.add_argument
    # fmt: off
    arg("--data_dir", type=Path, metavar="DIR",
        help=f"download into DIR and extract as DIR/{CORPUS}")
    arg("--archive", type=Path, metavar="FILE",
        help=f"a downloaded {CORPUS}.tar.bz2; extracted into --data_dir, or beside it")
    arg("--corpus", type=Path, metavar="DIR",
        help="an extracted corpus, LJSpeech or your own in its layout: DIR/wavs/ID.wav, "
        "and DIR/metadata.csv with lines ID|text|normalised text or ID|text")
    arg("--name", default="ljspeech",
        help="write NAME_train.txt and NAME_val.txt (default: %(default)s)")
    arg("--filelists_dir", type=Path, default="filelists", metavar="DIR",
        help="where to write them (default: %(default)s)")
    arg("--train_fraction", type=float, default=0.8, metavar="F",
        help="share of the clips for training; the others validate (default: %(default)s)")
    arg("--seed", type=int, default=0, help="of the random split (default: %(default)s)")
    arg("--sampling_rate", type=int, default=HParams.sampling_rate, metavar="HZ",
        help="that every clip must have (default: %(default)s)")
    arg("--url", help="a mirror to download from")
    arg("--sha256", help="of the archive, if it is not the original LJSpeech 1.1")
    args = parser.parse_args(argv)
    download = args.data_dir or args.archive
    for wrong, message in (
        (not (args.corpus or download), "nothing to prepare; give --data_dir, or see --help"),
        (args.corpus and (download or args.url or args.sha256),
         f"--corpus {args.corpus}: used as it is; leave out the options of the download"),
        (args.archive and args.url, f"--url {args.url}: not used with --archive; leave one out"),
        (args.sha256 and not re.fullmatch("[0-9a-fA-F]{64}", args.sha256),
         f"--sha256 {args.sha256}: not a SHA-256; give its 64 hexadecimal digits"),
        (not re.fullmatch(r"\w[\w.-]*", args.name),
         f"--name {args.name}: use letters, digits and . _ - only"),
        ("+" in str(args.filelists_dir),
         f"--filelists_dir {args.filelists_dir}: + joins filelists; give a path without"),
        (not 0 < args.train_fraction < 1,
         f"--train_fraction {args.train_fraction}: use a value between 0 and 1"),
        (not MIN_RATE <= args.sampling_rate <= MAX_RATE,
         f"--sampling_rate {args.sampling_rate}: use {MIN_RATE} to {MAX_RATE}"),
    ):
        if wrong:
            raise UserError(message)
    # fmt: on
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Obtain the corpus, check it, write the split, and print the next command."""
    args = parse_args(argv)
    with making(args.filelists_dir, "give another --filelists_dir"):
        corpus = args.corpus
        if corpus is None:
            data_dir = args.data_dir or args.archive.parent
            sha256 = (args.sha256 or SHA256).lower()
            corpus = obtain(data_dir, args.archive, args.url or URL, sha256)
        audio = audio_settings(args.sampling_rate)
        hparams = HParams(**audio)
        clips, problems = read_metadata(corpus, hparams)
        text = texts(clips)
        parts = split(list(text), args.train_fraction, args.seed)
        train, val = (args.filelists_dir / f"{args.name}_{part}.txt" for part in ("train", "val"))
        lists = {
            path: [f"wavs/{clip_id}.wav|{text[clip_id]}" for clip_id in ids]
            for path, ids in zip((train, val), parts, strict=True)
        }
        if not problems:
            refuse_other_lists(lists)
        check_corpus(corpus, clips, problems, hparams)
        for path, lines in lists.items():
            exists = path.exists()
            if not exists:
                write_filelist(path, lines)
            print(f"{path}: {len(lines):,} clips{', already there' if exists else ''}")
    files = {"training_files": str(train), "validation_files": str(val)}
    print(f"Next:\n  {train_command(args.name, data_dir=str(corpus), **files, **audio)}")


if __name__ == "__main__":
    exit_on_user_error(main)
