"""Fetch LJSpeech 1.1, check every clip, and write the 80:20 filelists that train.py reads.

python scripts/prepare_ljspeech.py --data_dir data
"""

import argparse
import hashlib
import http.client
import re
import shlex
import shutil
import ssl
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, progress_bar
from clips import check_text, check_wav, read_lines, read_wav
from files import replacing
from hparams import HParams

CORPUS = "LJSpeech-1.1"  # the one folder at the top of the archive
URL = "https://data.keithito.com/data/speech/LJSpeech-1.1.tar.bz2"
SHA256 = "be1a30453f28eb8dd26af4101ae40cbf2c50413b1bb21936cbcdc6fae3de8aa5"
SIZE = 2_748_572_632  # bytes
EXPANSION = 1.4  # bytes extracted per byte of archive: LJSpeech grows to 3.8 GB

ATTEMPTS = 5  # connections before giving up; each goes on where the last one was cut
RETRY_SECONDS = 1.0  # before the second attempt; doubled for each one after
TIMEOUT_SECONDS = 60
CHUNK = 1 << 18  # bytes
NETWORK_ERRORS = (
    urllib.error.URLError, http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError,
)  # fmt: skip

MIN_RATE, MAX_RATE = 4000, 192_000  # Hz; much below, some of the 80 mel bands would be empty

progress_bytes = partial(progress_bar, unit="B", unit_scale=True)


def obtain(data_dir: Path, archive: Path | None, url: str, sha256: str) -> Path:
    """The corpus in ``data_dir``: there already, or out of ``archive``, or downloaded."""
    corpus = data_dir / CORPUS
    if (corpus / "metadata.csv").is_file():
        print(f"{corpus}: already extracted")
        return corpus
    if corpus.exists():
        raise UserError(f"{corpus}: has no metadata.csv; remove or rename it and run again")
    data_dir.mkdir(parents=True, exist_ok=True)
    ours = archive is None
    if ours:
        archive = data_dir / f"{CORPUS}.tar.bz2"
        if not archive.exists():
            download(url, archive, SIZE if sha256 == SHA256 else None)
    elif not archive.is_file():
        raise UserError(f"--archive {archive}: no such file; give a downloaded {CORPUS}.tar.bz2")

    size, got = archive.stat().st_size, checksum(archive)
    if got != sha256:
        fix = "download it again"
        if ours:
            archive.replace(f"{archive}.bad")
            fix = f"moved to {archive.name}.bad, run again to download afresh"
        raise UserError(
            f"{archive}: {size:,} bytes of SHA-256 {got}, expected SHA-256 {sha256}; {fix}"
        )
    require_space(data_dir, size * EXPANSION)
    extract(archive, data_dir)
    print(f"{corpus}: extracted; {archive} is no longer needed")
    return corpus


def download(url: str, path: Path, size: int | None = None) -> None:
    """Fetch ``url`` to ``path`` by way of ``path.part``, which the next call goes on from.

    Args:
        size: bytes of the whole, where known before asking.

    Raises:
        UserError: refused by the server, cut ``ATTEMPTS`` times, or too little disk space.
    """
    part = path.with_name(f"{path.name}.part")
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            print(f"{url}: {reason}; trying again", file=sys.stderr)
            time.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
        try:
            _download_rest(url, part, size)
            part.replace(path)
            return
        except NETWORK_ERRORS as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise UserError(f"{url}: {error}; give another --url, or --archive") from None
    kept = part.stat().st_size if part.exists() else 0
    raise UserError(f"{url}: {reason}; {part} keeps {kept:,} bytes, run again to resume")


def _download_rest(url: str, part: Path, size: int | None) -> None:
    """One connection: append to ``part`` what it lacks. A cut one raises ConnectionError."""
    done = part.stat().st_size if part.exists() else 0
    if size is not None and done >= size:
        return  # the checksum will tell whether they are the right bytes
    headers = {"User-Agent": "prepare_ljspeech"}  # some servers refuse urllib's own
    if done:
        headers["Range"] = f"bytes={done}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:
            return  # there is nothing after `done`: again for the checksum to tell
        raise
    with response:
        if response.status != 206:
            done = 0  # the whole comes, whatever was asked for
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            part.unlink()
            raise ConnectionError("resumed elsewhere than asked, so starting afresh")
        total = size if response.length is None else done + response.length
        if size is not None and total != size:
            raise UserError(f"{url}: {total:,} bytes offered, expected {size:,}; try another --url")
        if total is not None:
            require_space(part.parent, total - done + total * EXPANSION)
        with (
            open(part, "ab" if done else "wb") as file,
            progress_bytes(desc="download", total=total, initial=done) as bar,
        ):
            while chunk := response.read1(CHUNK):
                file.write(chunk)
                done += len(chunk)
                bar.update(len(chunk))
    if total is not None and done < total:
        raise ConnectionError(f"connection cut at {done:,} of {total:,} bytes")


def require_space(folder: Path, needed: float) -> None:
    """Raise :class:`UserError` unless ``needed`` more bytes fit on the disk of ``folder``."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed; "
            "free some space or give another --data_dir"
        )


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file, progress_bytes(desc="verify", total=path.stat().st_size) as bar:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def extract(archive: Path, data_dir: Path) -> None:
    """Unpack ``archive`` into ``data_dir / CORPUS``, which appears complete or not at all.

    Raises:
        UserError: a broken archive, or a member that is a link, a device, or leads outside.
    """
    scratch = data_dir / f"{CORPUS}.extracting"
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
    scratch.mkdir()
    # Members are vetted below on any Python; those that have the filter do it once more.
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    try:
        with tarfile.open(archive, "r:bz2") as tar:
            for member in progress_bar(tar, desc="extract", unit=" files"):
                path = PurePosixPath(member.name.replace("\\", "/"))
                outside = path.is_absolute() or ".." in path.parts
                if outside or not (member.isfile() or member.isdir()):
                    what = "leads out of the folder" if outside else "is a link or a device"
                    raise UserError(f"{archive}: member {member.name} {what}; do not use it")
                tar.extract(member, scratch, set_attrs=False, **options)
        if not (scratch / CORPUS / "metadata.csv").is_file():
            raise UserError(f"{archive}: has no {CORPUS}/metadata.csv; use the LJSpeech archive")
        (scratch / CORPUS).rename(data_dir / CORPUS)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{archive}: {error}; check it, and the space in {data_dir}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_corpus(corpus: Path, hparams: HParams) -> dict[str, str]:
    """ID → transcript of every clip in ``metadata.csv``, in its order, all checked.

    Raises:
        UserError: listing, a line each, everything that is wrong with the corpus.
    """
    clips, problems = read_metadata(corpus, hparams)
    check_clips(corpus, clips, problems, hparams)
    return clips


def read_metadata(corpus: Path, hparams: HParams) -> tuple[dict[str, str], list[str]]:
    """ID → transcript of every clip in ``metadata.csv``, in its order, and what is wrong with it.

    The transcript is the third column, or the second where there are two.

    Raises:
        UserError: there is no such file.
    """
    metadata = corpus / "metadata.csv"
    if not metadata.is_file():
        raise UserError(f"{metadata}: no such file; give the folder that holds it and wavs/")
    clips, line_of, problems = {}, {}, []
    lines = metadata.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            clip_id, text = _parse(line)
            _look_for(clip_id, number, corpus / "wavs")
            if clip_id in clips:
                raise ValueError(f"ID {clip_id} is on line {line_of[clip_id]} too; keep one")
            clips[clip_id], line_of[clip_id] = text, number
            check_text(text, hparams)
        except ValueError as error:
            problems.append(f"{metadata}:{number}: {error}")
    if not problems and len(clips) < 2:
        problems = [f"{metadata}: {len(clips)} clips; a split needs at least 2"]
    return clips, problems


def check_clips(corpus: Path, clips: Iterable[str], problems: list[str], hparams: HParams) -> None:
    """Check the clips with these IDs.

    Raises:
        UserError: listing, a line each, ``problems`` and what is wrong with the clips.
    """
    paths = [corpus / "wavs" / f"{clip_id}.wav" for clip_id in clips]
    with ThreadPoolExecutor() as pool:
        found = pool.map(partial(clip_problem, hparams=hparams), paths)
        problems = [*problems, *filter(None, progress_bar(found, "check", len(paths)))]
    if problems:
        head = f"{corpus}: no filelist was written because of {len(problems)} problem(s)"
        raise UserError("\n  ".join([head, *problems]))


def _parse(line: bytes) -> tuple[str, str]:
    """ID and transcript; the ValueError of a bad line says what is wrong and the fix."""
    try:
        fields = line.decode("utf-8").split("|")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {line[error.start]:#04x} is not UTF-8; save as UTF-8") from None
    if len(fields) not in (2, 3):
        raise ValueError(f"{len(fields)} column(s); use ID|text or ID|text|normalised text")
    clip_id, text = fields[0], " ".join(fields[-1].split())
    if not clip_id or not clip_id.isprintable() or re.search(r"[/\\]|^\.\.?$", clip_id):
        raise ValueError(f"ID {clip_id!r}; use the name of a file in wavs/ without .wav")
    return clip_id, text


def _look_for(clip_id: str, line: int, wavs: Path) -> None:
    """Raise ValueError if a clip is not in ``wavs`` and its line of metadata.csv tells why."""
    if (wavs / f"{clip_id}.wav").is_file():
        return
    if clip_id.endswith(".wav") and (wavs / clip_id).is_file():
        raise ValueError(f"ID {clip_id}; leave out .wav")
    if line == 1 and not re.search("[0-9]", clip_id):
        raise ValueError(
            f"looks like a header, since wavs/{clip_id}.wav is missing; remove the line, or add "
            "the clip"
        )


def clip_problem(path: Path, hparams: HParams) -> str | None:
    """What would keep a clip out of training, with its path and the fix, or None."""
    if not path.is_file():
        return f"{path}: missing; extract the corpus again, or drop its line of metadata.csv"
    try:
        check_wav(str(path), hparams)
        read_wav(str(path))
    except UserError as error:
        return str(error)
    return None


def split(ids: Sequence[str], train_fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Random training and validation IDs, at least one each, both in the order given.

    IDs are ranked by a hash of seed and ID: the same on every machine and version, and
    whatever the order of ``ids``.
    """
    ranked = sorted(ids, key=lambda clip_id: hashlib.sha256(f"{seed} {clip_id}".encode()).digest())
    n_train = min(max(round(len(ids) * train_fraction), 1), len(ids) - 1)
    train = set(ranked[:n_train])
    return [i for i in ids if i in train], [i for i in ids if i not in train]


def refuse_other_lists(lists: Mapping[Path, list[str]]) -> None:
    """Raise :class:`UserError` if a filelist exists and does not have these lines."""
    for path, lines in lists.items():
        if path.exists() and (there := read_lines(str(path))) != [*lines, ""]:
            there = [line for line in there if line.strip()]
            raise UserError(
                f"{path}: exists and lists {len(there):,} clips, this call {len(lines):,} "
                f"({len({*there} & {*lines}):,} lines are in both); give another --name, or delete "
                "the file"
            )


def write_filelist(path: Path, lines: Sequence[str]) -> None:
    """Write ``path`` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:  # bytes that are not UTF-8 stay, for load_data to name
        file.write("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))


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
    """The train.py line with ``settings``, less those that are the defaults."""
    pairs = []
    for key, value in settings.items():
        if value != getattr(HParams, key):
            plain = re.fullmatch(r"[\w@%+=:./~-]+", str(value))
            pairs.append(f"{key}={value if plain else repr(value)}")
    return f"python train.py -o runs/{name} --hparams {shlex.quote(','.join(pairs))}"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; combinations and values that make no sense raise UserError."""
    parser = ArgumentParser(
        description="Fetch LJSpeech 1.1 (--data_dir), or take it from --archive or --corpus; check "
        "every clip and transcript; write the training and validation filelists.",
        epilog=f"Takes {SIZE / 1e9:.1f} GB to download and {SIZE * EXPANSION / 1e9:.1f} GB more "
        "to extract. Run the same command again to resume an interrupted download.",
    )
    arg = parser.add_argument
    # fmt: off
    arg("--data_dir", type=Path, metavar="DIR",
        help=f"download into DIR and extract as DIR/{CORPUS}")
    arg("--archive", type=Path, metavar="FILE",
        help=f"a {CORPUS}.tar.bz2 downloaded already; extracted into --data_dir, or beside it")
    arg("--corpus", type=Path, metavar="DIR",
        help="a corpus extracted already, LJSpeech or your own in its layout: DIR/wavs/ID.wav, "
        "and DIR/metadata.csv with lines ID|text|normalised text or ID|text")
    arg("--name", default="ljspeech",
        help="write NAME_train.txt and NAME_val.txt (default: %(default)s)")
    arg("--filelists_dir", type=Path, default="filelists", metavar="DIR",
        help="where to write them (default: %(default)s)")
    arg("--train_fraction", type=float, default=0.8, metavar="F",
        help="part of the clips for training, the others validate (default: %(default)s)")
    arg("--seed", type=int, default=0, help="of the random split (default: %(default)s)")
    arg("--sampling_rate", type=int, default=HParams.sampling_rate, metavar="HZ",
        help="that every clip must have (default: %(default)s)")
    arg("--url", help="a mirror to download from")
    arg("--sha256", help="expected of the archive, where it is not the original LJSpeech 1.1")
    args = parser.parse_args(argv)
    sources = args.data_dir or args.archive
    for wrong, message in (
        (not (args.corpus or sources), "nothing to prepare; give --data_dir, or see --help"),
        (args.corpus and (sources or args.url or args.sha256),
         f"--corpus {args.corpus}: used as it is; leave out the options of the download"),
        (args.archive and args.url, f"--url {args.url}: not used with --archive; leave one out"),
        (args.url and not re.match("https?://", args.url),
         f"--url {args.url}: not a web address; begin with https://"),
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
    """Obtain the corpus, check it, write the split, and say what comes next."""
    args = parse_args(argv)
    sha256 = (args.sha256 or SHA256).lower()
    train_path, val_path = (args.filelists_dir / f"{args.name}_{p}.txt" for p in ("train", "val"))
    try:
        corpus = args.corpus
        if corpus is None:
            data_dir = args.data_dir or args.archive.parent
            corpus = obtain(data_dir, args.archive, args.url or URL, sha256)
        audio = audio_settings(args.sampling_rate)
        hparams = HParams(**audio)
        clips, problems = read_metadata(corpus, hparams)
        parts = split(list(clips), args.train_fraction, args.seed)
        lists = {
            path: [f"wavs/{clip_id}.wav|{clips[clip_id]}" for clip_id in ids]
            for path, ids in zip((train_path, val_path), parts, strict=True)
        }
        if not problems:
            refuse_other_lists(lists)
        check_clips(corpus, clips, problems, hparams)
        for path, lines in lists.items():
            there = path.exists()
            if not there:
                write_filelist(path, lines)
            print(f"{path}: {len(lines):,} clips{', already there' if there else ''}")
    except OSError as error:
        place = error.filename or args.corpus or args.data_dir or args.archive
        reason = error.strerror or error
        raise UserError(f"{place}: {reason}; check its permissions and disk space") from error
    command = train_command(
        args.name,
        data_dir=str(corpus),
        training_files=str(train_path),
        validation_files=str(val_path),
        **audio,
    )
    print(f"Next:\n  {command}")


if __name__ == "__main__":
    exit_on_user_error(main)
