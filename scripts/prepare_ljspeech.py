"""Download LJSpeech 1.1, check every clip, and write the filelists that train.py reads.

The split is the same for everybody: 10,480 clips for training and 2,620 for validation, whose IDs
are in filelists/ljspeech_train_ids.txt and ljspeech_val_ids.txt.

    python scripts/prepare_ljspeech.py --data_dir data
"""

import shlex
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pooch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, make_folder, progress_bar
from corpus.clips import check_samples, load_clips, raise_problems, read_lines, write_lines
from hparams import HParams, format_overrides

CORPUS = "LJSpeech-1.1"  # the one folder at the top of the archive
ARCHIVE = f"{CORPUS}.tar.bz2"
URL = f"https://data.keithito.com/data/speech/{ARCHIVE}"
SHA256 = "be1a30453f28eb8dd26af4101ae40cbf2c50413b1bb21936cbcdc6fae3de8aa5"
SIZE, EXTRACTED_SIZE = 2_748_572_632, 3_850_000_000  # bytes
FILELISTS = Path(__file__).resolve().parent.parent / "filelists"
ID_LISTS = FILELISTS / "ljspeech_train_ids.txt", FILELISTS / "ljspeech_val_ids.txt"


def obtain(data_dir: Path) -> Path:
    """Returns LJSpeech's folder in ``data_dir``. If it is missing, extracts it from the archive
    there, which is downloaded unless it is there with the right SHA-256."""
    corpus, archive = data_dir / CORPUS, data_dir / ARCHIVE
    if (corpus / "metadata.csv").is_file():
        print(f"{corpus}: already there")
        return corpus
    if corpus.exists():
        raise UserError(f"{corpus}: has no metadata.csv; remove it and run again")
    make_folder(data_dir, "give another --data_dir")
    needed = EXTRACTED_SIZE + (0 if archive.exists() else SIZE)
    free = shutil.disk_usage(data_dir).free
    if free < needed:
        sizes = f"{needed / 1e9:.1f} GB needed and {free / 1e9:.1f} GB free"
        raise UserError(f"{data_dir}: {sizes}; free some, or give another --data_dir")
    try:  # the archive appears only once its SHA-256 is right
        pooch.retrieve(URL, SHA256, ARCHIVE, data_dir, progressbar=sys.stderr.isatty())
    except (OSError, ValueError) as error:  # of requests, and of pooch for another SHA-256
        fix = f"run again, or put {ARCHIVE} into {data_dir} yourself"
        raise UserError(f"{URL}: {error}; {fix}") from None
    unfinished = data_dir / f"{CORPUS}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a run that was stopped
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # new in Python 3.10.12
        for member in progress_bar(tar, desc="extract", unit=" files"):
            tar.extract(member, unfinished)
    (unfinished / CORPUS).rename(corpus)
    unfinished.rmdir()
    print(f"{corpus}: extracted; {archive} is no longer needed")
    return corpus


def write_filelists(corpus: Path, files: Sequence[str]) -> None:
    """Writes a filelist for each of ``ID_LISTS``, in its order."""
    rows = [line.split("|") for _, line in read_lines(corpus / "metadata.csv")]
    texts = {row[0]: row[-1] for row in rows}
    for file, id_list in zip(files, ID_LISTS, strict=True):
        ids = id_list.read_text().split()
        if missing := [name for name in ids if name not in texts]:
            lacks = f"lacks {missing[0]} and {len(missing) - 1:,} more IDs of {id_list.name}"
            raise UserError(f"{corpus}/metadata.csv: {lacks}; remove {corpus} and run again")
        write_lines(Path(file), [f"wavs/{name}.wav|{texts[name]}" for name in ids])
        print(f"{file}: {len(ids):,} clips")


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    extract = f"extract LJSpeech into DIR, from DIR/{ARCHIVE} or a download (needs 6.6 GB)"
    parser.add_argument("--data_dir", type=Path, required=True, metavar="DIR", help=extract)
    corpus = obtain(parser.parse_args(argv).data_dir)
    hparams = HParams(data_dir=str(corpus))
    files = [hparams.training_files, hparams.validation_files]
    write_filelists(corpus, files)
    clips = load_clips("+".join(files), hparams)
    raise_problems(check_samples(clips))
    overrides = shlex.quote(format_overrides({"data_dir": corpus, "hours": 24}))
    print("Next (for a day):")
    print(f"  python train.py -o runs/ljspeech --preset voice --hparams {overrides}")


if __name__ == "__main__":
    exit_on_user_error(main)
