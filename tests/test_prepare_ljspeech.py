"""scripts/prepare_ljspeech.py on tiny corpora of noise, served on the loopback."""

import hashlib
import io
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
from collections import namedtuple
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import soundfile

from cli import UserError
from clips import load_clips
from hparams import HParams, create_hparams
from layers import MelSpectrogram
from scripts import prepare_ljspeech as prepare

ROOT = Path(__file__).resolve().parent.parent
N_CLIPS = 10


def write_clip(path, rate=22050, channels=1, samples=2205):
    noise = np.random.default_rng(samples).uniform(-0.5, 0.5, (samples, channels))
    soundfile.write(path, noise, rate, subtype="PCM_16")


def make_corpus(folder, n_clips=N_CLIPS):
    (folder / "wavs").mkdir(parents=True)
    lines = []
    for i in range(n_clips):
        write_clip(folder / "wavs" / f"C-{i}.wav", samples=2205 + i)
        lines.append(f'C-{i}|No. {i} "as printed.|number {i} "as read.')
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def make_archive(path, corpus, *extra):
    with tarfile.open(path, "w:bz2") as tar:
        tar.add(corpus, "LJSpeech-1.1")
        for member in extra:
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return path


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus") / "c")


@pytest.fixture(scope="module")
def archive(tmp_path_factory, corpus):
    return make_archive(tmp_path_factory.mktemp("archive") / "a.tar.bz2", corpus)


class Server:
    """Serves ``payload``; each reply ends after ``cut`` bytes, and resumes ``off`` by some."""

    def __init__(self, payload, ranges=True, cut=None, status=None, off=0):
        self.payload, self.ranges, self.cut, self.status = payload, ranges, cut, status
        self.off = off
        self.asked = []  # the Range header of each request

    def __enter__(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.reply(self)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=partial(self.http.serve_forever, 0.01), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/a.tar.bz2"
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def reply(self, handler):
        asked = handler.headers.get("Range")
        self.asked.append(asked)
        if self.status:
            return handler.send_error(self.status)
        size, start = len(self.payload), 0
        if asked and self.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-")) + self.off
            if start >= size:
                return handler.send_error(416)
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(size - start))
        handler.end_headers()
        end = size if self.cut is None else start + self.cut
        handler.wfile.write(self.payload[start:end])


@pytest.fixture(autouse=True)
def quick_and_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "RETRY_SECONDS", 0)
    monkeypatch.setenv("no_proxy", "*")


def fetch(server, tmp_path, digest):
    folders = ["--data_dir", str(tmp_path / "data"), "--filelists_dir", str(tmp_path / "lists")]
    prepare.main([*folders, "--url", server.url, "--sha256", digest])


def program(*args):
    return subprocess.run(
        [sys.executable, "scripts/prepare_ljspeech.py", *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines()


# ---- Downloading


def test_download_extracts_checks_and_writes_the_lists(tmp_path, archive, corpus, capsys):
    with Server(archive.read_bytes()) as server:
        fetch(server, tmp_path, sha256(archive).upper())
        assert sorted(p.name for p in tmp_path.glob("data/*")) == [
            "LJSpeech-1.1",
            "LJSpeech-1.1.tar.bz2",
        ]
        for path in corpus.rglob("*.*"):
            copy = tmp_path / "data" / "LJSpeech-1.1" / path.relative_to(corpus)
            assert copy.read_bytes() == path.read_bytes()
        train, val = (lines_of(tmp_path / "lists" / f"ljspeech_{p}.txt") for p in ("train", "val"))
        assert (len(train), len(val)) == (8, 2)
        assert sorted(train + val) == [f'wavs/C-{i}.wav|number {i} "as read.' for i in range(10)]
        # The second run finds the corpus and asks for nothing.
        (tmp_path / "data" / "LJSpeech-1.1.tar.bz2").unlink()
        fetch(server, tmp_path, sha256(archive))
        assert server.asked == [None]
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    hparams = create_hparams(command[command.index("--hparams") + 1])
    assert hparams.data_dir == str(tmp_path / "data" / "LJSpeech-1.1")
    assert hparams.training_files == str(tmp_path / "lists" / "ljspeech_train.txt")
    assert hparams.validation_files == str(tmp_path / "lists" / "ljspeech_val.txt")


def test_a_cut_download_resumes_on_the_next_run(tmp_path, archive, monkeypatch):
    monkeypatch.setattr(prepare, "ATTEMPTS", 1)
    payload = archive.read_bytes()
    half = len(payload) // 2
    with Server(payload, cut=half) as server:
        with pytest.raises(UserError, match=r"\.part keeps .* run again to resume") as error:
            fetch(server, tmp_path, sha256(archive))
        assert "\n" not in str(error.value)
        part = tmp_path / "data" / "LJSpeech-1.1.tar.bz2.part"
        assert part.read_bytes() == payload[:half]
        assert not (tmp_path / "data" / "LJSpeech-1.1").exists()
        server.cut = None
        fetch(server, tmp_path, sha256(archive))
        assert server.asked == [None, f"bytes={half}-"]
    assert not part.exists()
    assert (tmp_path / "data" / "LJSpeech-1.1.tar.bz2").read_bytes() == payload


def test_a_cut_download_resumes_within_a_run(tmp_path, archive):
    payload = archive.read_bytes()
    third = len(payload) // 3 + 1
    with Server(payload, cut=third) as server:
        fetch(server, tmp_path, sha256(archive))
        assert server.asked == [None, f"bytes={third}-", f"bytes={2 * third}-"]


def test_a_server_without_range_restarts_cleanly(tmp_path, archive):
    part = tmp_path / "data" / "LJSpeech-1.1.tar.bz2.part"
    part.parent.mkdir()
    part.write_bytes(b"junk that must not stay")
    with Server(archive.read_bytes(), ranges=False) as server:
        fetch(server, tmp_path, sha256(archive))
        assert server.asked == ["bytes=23-"]
    assert (tmp_path / "data" / "LJSpeech-1.1").is_dir()


def test_a_server_that_resumes_elsewhere_restarts_cleanly(tmp_path, archive):
    part = tmp_path / "data" / "LJSpeech-1.1.tar.bz2.part"
    part.parent.mkdir()
    part.write_bytes(archive.read_bytes()[:100])
    with Server(archive.read_bytes(), off=-10) as server:
        fetch(server, tmp_path, sha256(archive))
        assert server.asked == ["bytes=100-", None]


def test_an_interrupted_download_keeps_what_came(tmp_path, archive, monkeypatch):
    chunks = iter([archive.read_bytes()[:1000]])

    def read1(*_):
        if chunk := next(chunks, None):
            return chunk
        raise KeyboardInterrupt

    part = tmp_path / "data" / "LJSpeech-1.1.tar.bz2.part"
    with Server(archive.read_bytes()) as server:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("http.client.HTTPResponse.read1", read1)
            fetch(server, tmp_path, sha256(archive))
        assert part.read_bytes() == archive.read_bytes()[:1000]
        fetch(server, tmp_path, sha256(archive))
        assert server.asked == [None, "bytes=1000-"]


def test_a_part_that_is_already_whole_is_used(tmp_path, archive):
    part = tmp_path / "data" / "LJSpeech-1.1.tar.bz2.part"
    part.parent.mkdir()
    shutil.copy(archive, part)
    with Server(archive.read_bytes()) as server:  # answers 416
        fetch(server, tmp_path, sha256(archive))
    assert (tmp_path / "data" / "LJSpeech-1.1").is_dir()


def test_a_wrong_checksum_is_moved_aside_so_that_the_next_run_starts_afresh(tmp_path, archive):
    with Server(b"x" + archive.read_bytes()) as server:
        args = ["--data_dir", tmp_path / "data", "--filelists_dir", tmp_path / "lists"]
        args += ["--url", server.url, "--sha256", sha256(archive)]
        result = program(*args)
        got = hashlib.sha256(server.payload).hexdigest()
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
        for part in ("LJSpeech-1.1.tar.bz2:", got, f"expected SHA-256 {sha256(archive)}", ".bad"):
            assert part in result.stderr
        assert [p.name for p in tmp_path.glob("data/*")] == ["LJSpeech-1.1.tar.bz2.bad"]
        server.payload = archive.read_bytes()
        prepare.main([str(arg) for arg in args])
        assert server.asked == [None, None]


@pytest.mark.parametrize(
    ("status", "requests", "message"),
    [(404, 1, "HTTP Error 404.*another --url"), (503, 5, "HTTP Error 503.*run again to resume")],
)
def test_a_refusal_is_final_and_a_failure_is_tried_again(tmp_path, status, requests, message):
    with Server(b"", status=status) as server:
        with pytest.raises(UserError, match=message):
            fetch(server, tmp_path, "0" * 64)
        assert len(server.asked) == requests


def test_a_page_in_place_of_the_archive_does_not_overwrite_the_part(tmp_path):
    part = tmp_path / "a.part"
    part.write_bytes(b"kept")
    with (
        Server(b"please log in", ranges=False) as server,
        pytest.raises(UserError, match="13 bytes offered, expected 1,000"),
    ):
        prepare.download(server.url, tmp_path / "a", size=1000)
    assert part.read_bytes() == b"kept"


def test_too_little_disk_space_is_said_before_anything_is_written(tmp_path, archive, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(1000))
    with (
        Server(archive.read_bytes()) as server,
        pytest.raises(UserError, match=r"data: 0\.0 GB free, .* GB needed; free some space"),
    ):
        fetch(server, tmp_path, sha256(archive))
    assert list(tmp_path.glob("data/*")) == []


# ---- Extracting


def test_a_given_archive_is_extracted_beside_it_and_kept(tmp_path, archive):
    copy = Path(shutil.copy(archive, tmp_path))
    prepare.main(
        ["--archive", str(copy), "--sha256", sha256(copy), "--filelists_dir", str(tmp_path / "l")]
    )
    assert (tmp_path / "LJSpeech-1.1" / "wavs" / "C-9.wav").is_file()
    assert copy.is_file()


def test_a_given_archive_that_is_not_ljspeech_is_refused_and_kept(tmp_path, archive):
    copy = Path(shutil.copy(archive, tmp_path))
    with pytest.raises(UserError, match=f"{sha256(copy)}, expected SHA-256 be1a3045.*download"):
        prepare.main(["--archive", str(copy)])
    assert [p.name for p in tmp_path.iterdir()] == [copy.name]


def member(name, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, 4 if kind == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize("has_filter", [True, False])
@pytest.mark.parametrize(
    "bad",
    [
        member("../evil"),
        member("LJSpeech-1.1/../../evil"),
        member("/tmp/prepare_ljspeech_evil"),
        member("LJSpeech-1.1/link", tarfile.SYMTYPE, "metadata.csv"),
        member("LJSpeech-1.1/hard", tarfile.LNKTYPE, "LJSpeech-1.1/metadata.csv"),
        member("LJSpeech-1.1/pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda info: info.name,
)
def test_an_archive_that_reaches_out_is_refused(tmp_path, corpus, bad, has_filter, monkeypatch):
    if not has_filter:  # as in Python 3.10.0 to 3.10.11
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    archive = make_archive(tmp_path / "a.tar.bz2", corpus, bad)
    data_dir = tmp_path / "deep" / "data"
    with pytest.raises(UserError) as error:
        prepare.main(
            ["--archive", str(archive), "--sha256", sha256(archive), "--data_dir", str(data_dir)]
        )
    assert f"member {bad.name} " in str(error.value) and "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == [archive, data_dir.parent, data_dir]
    assert not Path("/tmp/prepare_ljspeech_evil").exists()


@pytest.mark.parametrize("broken", ["truncated", "not an archive", "without metadata.csv"])
def test_a_broken_archive_leaves_no_corpus(tmp_path, archive, broken):
    path = tmp_path / "a.tar.bz2"
    if broken == "without metadata.csv":
        make_archive(path, make_corpus(tmp_path / "c") / "wavs")
    else:
        path.write_bytes(archive.read_bytes()[:9000] if broken == "truncated" else b"no")
    data_dir = tmp_path / "data"
    (data_dir / "LJSpeech-1.1.extracting").mkdir(parents=True)  # of a run that was killed
    with pytest.raises(UserError, match=r"a\.tar\.bz2: "):
        prepare.main(
            ["--archive", str(path), "--sha256", sha256(path), "--data_dir", str(data_dir)]
        )
    assert list(data_dir.iterdir()) == []


# ---- Checking


def test_every_problem_of_a_corpus_is_in_one_list_and_nothing_is_written(tmp_path):
    corpus = make_corpus(tmp_path / "c")
    wavs = corpus / "wavs"
    write_clip(wavs / "C-0.wav", channels=2)
    write_clip(wavs / "C-1.wav", rate=16000)
    (wavs / "C-2.wav").unlink()
    write_clip(wavs / "C-3.wav", samples=0)
    (wavs / "C-4.wav").write_bytes(b"not a wav")
    soundfile.write(wavs / "C-5.wav", np.zeros(9000), 22050)
    with open(corpus / "metadata.csv", "ab") as file:
        file.write(b"C-6|again|again\n|no id|no id\n../C-7|up|up\nC-8/x|in|in\n")
        file.write(b"one column\nx|a|b|c\n\nD-0|silent|  \nD-1|caf\xe9|caf\xe9\n")
    for name in ("D-0", "D-1"):
        write_clip(wavs / f"{name}.wav")

    result = program("--corpus", corpus, "--filelists_dir", tmp_path / "lists")

    head, *problems = result.stderr.splitlines()
    meta = f"{corpus}/metadata.csv"
    assert result.returncode == 2
    assert head == f"error: {corpus}: no filelist was written because of 14 problem(s)"
    expected = [
        f"{meta}:11: ID C-6 is on line 7 too; keep one",
        f"{meta}:12: ID ''; use the name",
        f"{meta}:13: ID '../C-7'; use the name",
        f"{meta}:14: ID 'C-8/x'; use the name",
        f"{meta}:15: 1 column(s); use ID|text",
        f"{meta}:16: 4 column(s); use ID|text",
        f"{meta}:18: text '' has nothing to speak once cleaned",
        f"{meta}:19: byte 0xe9 is not UTF-8; save as UTF-8",
        f"{wavs}/C-0.wav: 2 channels; mix it down to mono",
        f"{wavs}/C-1.wav: sampling rate 16000 Hz; resample it to 22050 Hz",
        f"{wavs}/C-2.wav: missing; extract the corpus again",
        f"{wavs}/C-3.wav: 0 samples, too short for a mel",
        f"{wavs}/C-4.wav: not a readable sound file",
        f"{wavs}/C-5.wav: is silent (peak 0); remove its line",
    ]
    for got, want in zip(problems, expected, strict=True):
        assert got.startswith(f"  {want}")
    assert not (tmp_path / "lists").exists()


def test_columns_byte_order_mark_and_line_ends(tmp_path):
    corpus = make_corpus(tmp_path / "c", 3)
    (corpus / "metadata.csv").write_bytes(
        b"\xef\xbb\xbfC-0|one \xe2\x80\x9cquoted\xe2\x80\x9d|two\r\n\r\nC-1|only  one\r\nC-2|a|c"
    )
    clips = prepare.read_corpus(corpus, HParams())
    assert clips == {"C-0": "two", "C-1": "only one", "C-2": "c"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nothing to prepare; give --data_dir"),
        (["--corpus", "c", "--data_dir", "d"], "--corpus c: used as it is"),
        (["--archive", "a", "--url", "https://x"], "--url https://x: not used"),
        (["--data_dir", "d", "--url", "ftp://x"], "--url ftp://x: not a web address"),
        (["--data_dir", "d", "--sha256", "12"], "--sha256 12: not a SHA-256"),
        (["--corpus", "c", "--name", "a+b"], r"--name a\+b: use letters"),
        (["--corpus", "c", "--filelists_dir", "a+b"], r"--filelists_dir a\+b: \+ joins"),
        (["--corpus", "c", "--train_fraction", "1"], "--train_fraction 1.0: use a value"),
        (["--corpus", "c", "--sampling_rate", "0"], "--sampling_rate 0: use 4000 to 192000"),
        (["--corpus", "c", "--sampling_rate", "9" * 400], "--sampling_rate 9+: use 4000 to"),
        (["--corpus", "nowhere"], "nowhere/metadata.csv: no such file"),
        (["--archive", "nowhere.tar.bz2"], "--archive nowhere.tar.bz2: no such file"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(args, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        prepare.main(args)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path, corpus):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.*; check its permissions and disk space"):
        prepare.main(["--corpus", str(corpus), "--filelists_dir", str(tmp_path / "file")])


def test_one_clip_cannot_be_split(tmp_path):
    corpus = make_corpus(tmp_path / "c", 1)
    with pytest.raises(UserError, match=r"metadata\.csv: 1 clips; a split needs at least 2"):
        prepare.main(["--corpus", str(corpus), "--filelists_dir", str(tmp_path)])


def test_a_header_line_is_guessed(tmp_path, corpus):
    copy = Path(shutil.copytree(corpus, tmp_path / "c"))
    for header in ("ID|text", "file|transcript|normalised transcript"):
        text = (corpus / "metadata.csv").read_text(encoding="utf-8")
        (copy / "metadata.csv").write_text(f"{header}\n{text}", encoding="utf-8")
        with pytest.raises(UserError) as error:
            prepare.read_corpus(copy, HParams())
        _, *problems = str(error.value).splitlines()
        name = header.split("|")[0]
        assert problems == [
            f"  {copy}/metadata.csv:1: looks like a header, since wavs/{name}.wav is missing; "
            "remove the line, or add the clip"
        ]


def test_ids_that_end_in_wav_are_guessed(tmp_path, corpus):
    copy = Path(shutil.copytree(corpus, tmp_path / "c"))
    (copy / "metadata.csv").write_text("C-0.wav|zero\nC-1|one\nC-2.wav|two\nC-99.wav|missing\n")
    with pytest.raises(UserError) as error:
        prepare.read_corpus(copy, HParams())
    _, *problems = str(error.value).splitlines()
    assert problems == [
        f"  {copy}/metadata.csv:1: ID C-0.wav; leave out .wav",
        f"  {copy}/metadata.csv:3: ID C-2.wav; leave out .wav",
        f"  {copy}/wavs/C-99.wav.wav: missing; extract the corpus again, or drop its line of "
        "metadata.csv",
    ]


def test_a_brace_that_is_never_closed_is_named_with_its_line(tmp_path, corpus):
    copy = Path(shutil.copytree(corpus, tmp_path / "c"))
    (copy / "metadata.csv").write_text("C-0|zero\nC-1|say {HH AY1\n")
    with pytest.raises(UserError) as error:
        prepare.read_corpus(copy, HParams())
    what = (
        "'{HH AY1' at character 5 of the text: this brace is never closed; add }, or leave it out"
    )
    assert str(error.value).splitlines()[1:] == [f"  {copy}/metadata.csv:2: {what}"]
    (copy / "list.txt").write_text("wavs/C-0.wav|zero\nwavs/C-1.wav|say {HH AY1\n")
    with pytest.raises(UserError) as error:
        load_clips(str(copy / "list.txt"), HParams(data_dir=str(copy)))
    assert str(error.value) == f"{copy}/list.txt:2: {what}"


# ---- Another rate


@pytest.mark.parametrize(
    ("rate", "hop", "window", "fft", "highest"),
    [
        (22050, 276, 1102, 2048, 8000),
        (16000, 200, 800, 1024, 8000),
        (8000, 100, 400, 512, 4000),
        (44100, 551, 2205, 4096, 8000),
        (48000, 600, 2400, 4096, 8000),
    ],
)
def test_the_command_names_all_that_follows_from_the_rate(
    rate, hop, window, fft, highest, tmp_path, capsys
):
    (tmp_path / "c" / "wavs").mkdir(parents=True)
    for i in range(2):
        write_clip(tmp_path / "c" / "wavs" / f"{i}.wav", rate=rate, samples=rate)
    (tmp_path / "c" / "metadata.csv").write_text("0|zero\n1|one\n")
    prepare.main(["--corpus", "c", "--sampling_rate", str(rate), "--name", "mine"])
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])[-1]
    hparams = create_hparams(command)
    assert hparams.sampling_rate == rate
    assert (hparams.hop_length, hparams.win_length, hparams.filter_length) == (hop, window, fft)
    assert hparams.mel_fmax == highest
    assert ("hop_length" in command) == (rate != 22050)
    clips = load_clips(hparams.training_files, hparams)
    assert clips[0].n_frames == rate // hop + 1


@pytest.mark.parametrize("rate", [4000, 5120, 11025, 24000, 96000])
def test_at_every_rate_no_mel_band_is_empty(rate):
    hparams = HParams(**prepare.audio_settings(rate))
    assert (MelSpectrogram(hparams).mel_basis.sum(1) > 0).all()


def test_a_clip_is_checked_against_the_window_of_its_rate(tmp_path):
    corpus = make_corpus(tmp_path / "c", 3)
    for i, samples in enumerate((800, 799, 8000)):
        write_clip(corpus / "wavs" / f"C-{i}.wav", rate=16000, samples=samples)
    with pytest.raises(UserError) as error:
        prepare.main(["--corpus", str(corpus), "--sampling_rate", "16000"])
    (problem,) = str(error.value).splitlines()[1:]
    assert "C-1.wav: 799 samples, too short for a mel" in problem


# ---- Splitting


def test_ljspeech_splits_into_the_papers_sizes():
    ids = [f"LJ{i:05d}" for i in range(13100)]
    train, val = prepare.split(ids, 0.8, seed=0)
    assert (len(train), len(val)) == (10480, 2620)
    assert sorted(train + val) == ids
    # Random, and not by position: each quarter of the corpus gives its share.
    for quarter in np.split(np.isin(ids, val), 4):
        assert 0.17 < quarter.mean() < 0.23


def test_the_split_depends_on_the_seed_and_not_on_the_order():
    ids = [f"C-{i}" for i in range(100)]
    assert prepare.split(ids, 0.8, 0) == prepare.split(ids, 0.8, 0)
    assert prepare.split(ids, 0.8, 0) != prepare.split(ids, 0.8, 1)
    assert set(prepare.split(ids[::-1], 0.8, 0)[1]) == set(prepare.split(ids, 0.8, 0)[1])


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_small_corpora_have_a_clip_on_either_side(n, fraction):
    train, val = prepare.split([str(i) for i in range(n)], fraction, 0)
    assert train and val and len(train) + len(val) == n


def test_the_lists_are_the_same_every_time(tmp_path, corpus):
    args = ["--corpus", str(corpus), "--name", "mine", "--filelists_dir"]
    for folder in ("a", "b"):
        prepare.main([*args, str(tmp_path / folder)])
    assert [p.name for p in sorted(tmp_path.glob("a/*"))] == ["mine_train.txt", "mine_val.txt"]
    for path in tmp_path.glob("a/*"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_another_split_does_not_replace_lists(tmp_path, corpus, capsys, monkeypatch):
    args = ["--corpus", str(corpus), "--filelists_dir", str(tmp_path)]
    prepare.main(args)
    train, val = tmp_path / "ljspeech_train.txt", tmp_path / "ljspeech_val.txt"
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (train, val)}

    capsys.readouterr()
    prepare.main(args)
    assert capsys.readouterr().out.startswith(
        f"{train}: 8 clips, already there\n{val}: 2 clips, already there\n"
    )
    with monkeypatch.context() as patch, pytest.raises(UserError) as error:
        patch.setattr(prepare, "clip_problem", None)  # refused before clips are checked
        prepare.main([*args, "--train_fraction", "0.6"])
    assert str(error.value) == (
        f"{train}: exists and lists 8 clips, this call 6 (6 lines are in both); give another "
        "--name, or delete the file"
    )
    with pytest.raises(UserError, match=rf"^{train}: exists and lists 8 clips, this call 8 \("):
        prepare.main([*args, "--seed", "1"])
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (train, val)}

    train.unlink()  # as a run leaves it that was killed between the two, or by hand
    with pytest.raises(UserError, match=rf"^{val}: exists and lists 2 clips, this call 4 "):
        prepare.main([*args, "--train_fraction", "0.6"])
    assert not train.exists()
    prepare.main(args)
    assert train.read_bytes() == before[train][0]
    prepare.main([*args, "--train_fraction", "0.6", "--name", "other"])
    assert len(lines_of(tmp_path / "other_train.txt")) == 6


def test_the_train_command_names_only_what_is_not_the_default():
    assert (
        prepare.train_command("ljspeech", data_dir="data/LJSpeech-1.1", sampling_rate=22050)
        == "python train.py -o runs/ljspeech --hparams data_dir=data/LJSpeech-1.1"
    )
    odd = "/my data, 'all' [of] it/c"
    command = shlex.split(prepare.train_command("x", data_dir=odd, sampling_rate=16000))
    hparams = create_hparams(command[-1])
    assert (hparams.data_dir, hparams.sampling_rate) == (odd, 16000)
