"""Download LJSpeech 1.1, check every clip, and write the filelists that train.py reads.

The split is the same for everybody: 10,480 clips for training and 2,620 for validation, whose IDs
are in filelists/ljspeech_train_ids.txt and ljspeech_val_ids.txt.

python scripts/prepare_ljspeech.py --data_dir data
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until main() runs, Ctrl-C ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import os
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pooch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, progress_bar
from corpus.clips import Clip
from files import making, require_space
from scripts.prepare_corpus import clip_id, making_filelists, prepare

CORPUS = "LJSpeech-1.1"  # the one folder at the top of the archive
ARCHIVE = f"{CORPUS}.tar.bz2"
URL = f"https://data.keithito.com/data/speech/{ARCHIVE}"
SHA256 = "be1a30453f28eb8dd26af4101ae40cbf2c50413b1bb21936cbcdc6fae3de8aa5"
ID_LISTS = [  # the IDs for training and for validation
    Path(__file__).resolve().parents[1] / f"filelists/ljspeech_{part}_ids.txt"
    for part in ("train", "val")
]
SIZE, EXTRACTED_SIZE = 2_748_572_632, 3_850_000_000  # bytes
OTHER_DISK = "give another --data_dir"


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


def split(clips: Sequence[Clip], corpus: Path) -> list[list[str]]:
    """Lines ``path|text`` of the clips that each of ID_LISTS names, in its order."""
    texts, parts = {clip_id(clip, corpus): clip.text for clip in clips}, []
    for id_list in ID_LISTS:
        ids = id_list.read_text().split()
        if missing := [name for name in ids if name not in texts]:
            more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
            what = f"lacks {missing[0]}{more} of {id_list.name}"
            raise UserError(f"{corpus}: {what}; rename or remove it and run again")
        parts.append([f"wavs/{name}.wav|{texts[name]}" for name in ids])
    return parts


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    needs = f"extract LJSpeech into DIR, from DIR/{ARCHIVE} or a download; needs 6.6 GB"
    parser.add_argument("--data_dir", type=Path, required=True, metavar="DIR", help=needs)
    data_dir = parser.parse_args(argv).data_dir
    with making_filelists():
        obtain(data_dir)
        prepare(data_dir / CORPUS, "ljspeech", split)


if __name__ == "__main__":
    exit_on_user_error(main)
