"""scripts/prepare_ljspeech.py on tiny corpora of noise, served on the loopback."""

import hashlib
import io
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pooch
import pytest
import soundfile

from cli import UserError
from clips import load_clips
from hparams import HParams, create_hparams
from layers import MelSpectrogram
from scripts import prepare_ljspeech as prepare

ROOT = Path(__file__).resolve().parent.parent
CORPUS = "LJSpeech-1.1"
ARCHIVE = f"{CORPUS}.tar.bz2"
N_CLIPS = 8  # so few are checked without more processes


def write_clip(path, rate=22050, channels=1, samples=2205):
    noise = np.random.default_rng(samples).uniform(-0.5, 0.5, (samples, channels))
    soundfile.write(path, noise, rate, subtype="PCM_16")


def make_corpus(folder, n_clips=N_CLIPS, rate=22050):
    (folder / "wavs").mkdir(parents=True)
    lines = []
    for i in range(n_clips):
        write_clip(folder / "wavs" / f"C-{i}.wav", rate, samples=rate // 10 + i)
        lines.append(f'C-{i}|No. {i} "as printed.|number {i} "as read.\n')
    (folder / "metadata.csv").write_text("".join(lines), encoding="utf-8")
    return folder


def make_archive(path, corpus, *members):
    with tarfile.open(path, "w:bz2") as tar:
        tar.add(corpus, CORPUS)
        for member in members:
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return path


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """For tests that leave it as it is."""
    return make_corpus(tmp_path_factory.mktemp("corpus") / "c")


@pytest.fixture(scope="module")
def payload(tmp_path_factory, corpus):
    """An archive of the corpus."""
    return make_archive(tmp_path_factory.mktemp("archive") / "a", corpus).read_bytes()


@pytest.fixture
def own_corpus(tmp_path):
    """For tests that change it."""
    return make_corpus(tmp_path / "c")


@pytest.fixture(scope="module")
def server():
    """Replies with ``status`` and ``payload``, cut after ``end`` bytes, and counts requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.requests += 1
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(server.payload)))
            self.end_headers()
            self.wfile.write(server.payload[: server.end])

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "*")


def fetch(server, payload, digest, status=200, end=None):
    server.payload, server.status, server.end, server.requests = payload, status, end, 0
    url = f"http://127.0.0.1:{server.server_port}/a"
    prepare.main(["--data_dir", "data", "--url", url, "--sha256", digest])


def lines_of(path):
    return Path(path).read_text(encoding="utf-8").splitlines()


def refusal(*args):
    """The lines in which main refuses these arguments."""
    with pytest.raises(UserError) as error:
        prepare.main([str(arg) for arg in args])
    return str(error.value).splitlines()


def printed_settings(capsys):
    """The settings of the last command printed."""
    python, program, *_, settings = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert python == "python" and Path(program).resolve() == ROOT / "train.py"
    return settings


# Download


def test_download_extracts_checks_and_writes_the_lists(server, payload, corpus, capsys):
    fetch(server, payload, sha256(payload).upper())
    assert sorted(path.name for path in Path("data").iterdir()) == [CORPUS, ARCHIVE]
    for path in corpus.rglob("*.*"):
        copy = Path("data", CORPUS, path.relative_to(corpus))
        assert copy.read_bytes() == path.read_bytes()
    train, val = (lines_of(f"filelists/ljspeech_{part}.txt") for part in ("train", "val"))
    assert (len(train), len(val)) == (6, 2)
    assert sorted(train + val) == [f'wavs/C-{i}.wav|number {i} "as read.' for i in range(N_CLIPS)]
    hparams = create_hparams(printed_settings(capsys))
    assert (hparams.data_dir, hparams.training_files, hparams.validation_files) == (
        f"data/{CORPUS}", "filelists/ljspeech_train.txt", "filelists/ljspeech_val.txt",
    )  # fmt: skip
    # The next run finds the corpus and asks for nothing.
    Path("data", ARCHIVE).unlink()
    fetch(server, payload, sha256(payload))
    assert server.requests == 0


@pytest.mark.parametrize(
    ("reply", "messages"),
    [
        ({"end": 999}, ["run again"]),
        ({"payload": b"please log in"}, [sha256(b"please log in"), "expected {sha256}", "--url"]),
        ({"status": 404}, ["404", "another --url or --archive"]),
        ({"status": 503}, ["503", "run again"]),
    ],
)
def test_a_failed_download_leaves_nothing_and_the_next_run_starts_afresh(
    server, payload, tmp_path, reply, messages
):
    digest = sha256(payload)
    with pytest.raises(UserError, match=r"^http://127") as error:
        fetch(server, **{"payload": payload, "digest": digest, **reply})
    assert "\n" not in str(error.value)
    for message in messages:
        assert message.format(sha256=digest) in str(error.value)
    assert list(tmp_path.iterdir()) == [] and server.requests == 1
    fetch(server, payload, digest)
    assert Path("data", ARCHIVE).read_bytes() == payload


def test_an_interrupted_or_killed_download_leaves_nothing(server, payload, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "data" / f"{CORPUS}.unfinished" / "left").mkdir(parents=True)  # by a killed run
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pooch.hashes, "file_hash", interrupt)
        fetch(server, payload, sha256(payload))
    assert server.requests == 1 and list(tmp_path.rglob("*")) == [tmp_path / "data"]


def test_too_little_disk_space_is_said_before_anything_is_downloaded_or_extracted(
    server, payload, tmp_path, monkeypatch
):
    given = tmp_path / "a"
    given.write_bytes(payload)
    monkeypatch.setattr(prepare, "SHA256", sha256(payload))
    monkeypatch.setattr(prepare, "SIZE", len(payload))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(1000))
    with pytest.raises(UserError, match=r"data.*: .* GB needed and 0\.00 GB free; .*--data_dir"):
        fetch(server, payload, sha256(payload))
    assert server.requests == 0
    (message,) = refusal("--archive", given, "--data_dir", "data")
    assert message.startswith("data: ") and "GB needed" in message
    assert list(tmp_path.iterdir()) == [given]


# Extraction


def test_a_given_archive_is_extracted_beside_it_and_kept(tmp_path, payload):
    archive = tmp_path / "a"
    archive.write_bytes(payload)
    # Not LJSpeech's SHA-256
    (message,) = refusal("--archive", archive)
    for part in (f"{archive}: ", sha256(payload), "expected SHA-256 be1a3045", "download it again"):
        assert part in message
    assert list(tmp_path.iterdir()) == [archive]
    prepare.main(["--archive", str(archive), "--sha256", sha256(payload)])
    assert (tmp_path / CORPUS / "wavs" / f"C-{N_CLIPS - 1}.wav").is_file()
    assert archive.read_bytes() == payload


def member(name, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, 4 if kind == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize("has_filter", [True, False])
@pytest.mark.parametrize(
    "bad",
    [
        member("../evil"),
        member(f"{CORPUS}/../../evil"),
        member("/tmp/prepare_ljspeech_evil"),
        member(f"{CORPUS}/link", tarfile.SYMTYPE, "metadata.csv"),
        member(f"{CORPUS}/hard", tarfile.LNKTYPE, f"{CORPUS}/metadata.csv"),
        member(f"{CORPUS}/pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda info: info.name,
)
def test_an_archive_that_reaches_out_is_refused(tmp_path, corpus, bad, has_filter, monkeypatch):
    if not has_filter:  # as in Python 3.10.0 to 3.10.11
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    archive = make_archive(tmp_path / "a", corpus, bad)
    digest = sha256(archive.read_bytes())
    (message,) = refusal("--archive", archive, "--sha256", digest, "--data_dir", "deep/data")
    assert f"member {bad.name} " in message
    assert list(tmp_path.iterdir()) == [archive]
    assert not Path("/tmp/prepare_ljspeech_evil").exists()


@pytest.mark.parametrize("broken", ["truncated", "not an archive", "without metadata.csv"])
def test_a_broken_archive_leaves_no_corpus(tmp_path, corpus, payload, broken):
    archive = tmp_path / "a"
    if broken == "without metadata.csv":
        make_archive(archive, corpus / "wavs")
    else:
        archive.write_bytes(payload[:9000] if broken == "truncated" else b"no")
    digest = sha256(archive.read_bytes())
    (message,) = refusal("--archive", archive, "--sha256", digest, "--data_dir", "data")
    assert message.startswith(f"{archive}: ")
    assert list(tmp_path.iterdir()) == [archive]


# Checks


def test_all_problems_of_a_corpus_are_in_one_list_and_nothing_is_written(tmp_path, own_corpus):
    wavs, metadata = own_corpus / "wavs", own_corpus / "metadata.csv"
    write_clip(wavs / "C-0.wav", channels=2)
    write_clip(wavs / "C-1.wav", rate=16000)
    (wavs / "C-2.wav").unlink()
    write_clip(wavs / "C-3.wav", samples=0)
    (wavs / "C-4.wav").write_bytes(b"not a wav")
    soundfile.write(wavs / "C-5.wav", np.zeros(9000), 22050)
    metadata.write_text(f"ID|text|normalised text\n{metadata.read_text()}")
    with open(metadata, "ab") as file:
        file.write(b"C-6|again|again\n|no id|no id\n../C-7|up|up\nC-8/x|in|in\n")
        file.write(b"one column\nx|a|b|c\n\nD-0|silent|  \nD-1|caf\xe9|caf\xe9\nD-2|{HH AY1\n")
        file.write(b"D-2.wav|with .wav\n")
    for i in range(3):
        write_clip(wavs / f"D-{i}.wav")
    expected = [
        f"1: {wavs}/ID.wav: missing; extract the corpus again, leave .wav out of the ID, or "
        "remove the line (a header?)",
        f"2: {wavs}/C-0.wav: 2 channels; mix it down to mono",
        f"3: {wavs}/C-1.wav: sampling rate 16000 Hz; resample it to 22050 Hz",
        f"4: {wavs}/C-2.wav: missing; extract the corpus again",
        f"5: {wavs}/C-3.wav: 0 samples, too short for a mel",
        f"6: {wavs}/C-4.wav: not a readable sound file",
        f"7: {wavs}/C-5.wav: is silent (peak 0); remove its line",
        f"10: {wavs}/C-6.wav is on {metadata}:8 too; keep one",
        "11: ID ''; use the name",
        "12: ID '../C-7'; use the name",
        "13: ID 'C-8/x'; use the name",
        "14: 1 column(s); use ID|text",
        "15: 4 column(s); use ID|text",
        "17: text '' has nothing to speak once cleaned",
        "18: byte 0xe9 is not UTF-8; save as UTF-8",
        "19: '{HH AY1' at character 1 of the text: this brace is never closed",
        f"20: {wavs}/D-2.wav.wav: missing; extract the corpus again",
    ]
    head, *problems = refusal("--corpus", own_corpus)
    assert head == f"{own_corpus}: no filelist was written because of 17 problem(s)"
    for problem, start in zip(problems, expected, strict=True):
        assert problem.startswith(f"  {metadata}:{start}")
    assert list(tmp_path.iterdir()) == [own_corpus]


def test_a_report_has_twenty_problems_and_the_number_of_the_others(own_corpus):
    with open(own_corpus / "metadata.csv", "a") as file:
        file.write("bad\n" * 1030)
    head, *problems, more = refusal("--corpus", own_corpus)
    assert head.endswith("1,030 problem(s)") and len(problems) == 20
    assert more == "  and 1,010 more"


def test_another_sampling_rate_of_all_clips_is_one_line(own_corpus):
    (line,) = refusal("--corpus", own_corpus, "--sampling_rate", 16000)
    assert "C-0.wav: sampling rate 22050 Hz; resample it to 16000 Hz, or set" in line
    assert line.endswith("(and so for all 8 clips)")
    write_clip(own_corpus / "wavs" / "C-5.wav", rate=16000)
    assert len(refusal("--corpus", own_corpus, "--sampling_rate", 16000)) == 1 + 7


def test_columns_byte_order_mark_line_ends_and_long_texts(own_corpus):
    long = "long " * 200 + "text"
    metadata = f"\ufeffC-0|one “quoted”|two\r\n\r\nC-1|only  one\r\nC-2|a|{long}"
    (own_corpus / "metadata.csv").write_bytes(metadata.encode())
    texts = prepare.read_corpus(own_corpus, HParams())
    assert texts == {"C-0": "two", "C-1": "only one", "C-2": long}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "nothing to prepare; give --data_dir"),
        ("--corpus c --data_dir d", "--corpus c: used as it is"),
        ("--archive a --url https://x", "--url https://x: not used"),
        ("--data_dir d --url ftp://x", "ftp://x: "),
        ("--data_dir d --sha256 12", "--sha256 12: not a SHA-256"),
        ("--corpus c --name a+b", "--name a+b: use letters"),
        ("--corpus c --filelists_dir a+b", "--filelists_dir a+b: + joins"),
        ("--corpus c --train_fraction 1", "--train_fraction 1.0: use a value"),
        ("--corpus c --sampling_rate 0", "--sampling_rate 0: use 4000 to 192000"),
        (f"--corpus c --sampling_rate {'9' * 400}", "--sampling_rate 999"),
        ("--corpus nowhere", "nowhere/metadata.csv: no such file"),
        ("--archive nowhere.tar.bz2", "--archive nowhere.tar.bz2: no such file"),
        (f"--corpus c --filelists_dir {__file__}", f"{__file__}: cannot be written"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(args, message, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "SIZE", 1)  # which there is space for
    (line,) = refusal(*args.split())
    assert line.startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_one_clip_cannot_be_split(tmp_path):
    corpus = make_corpus(tmp_path / "c", 1)
    (line,) = refusal("--corpus", corpus)
    assert line == f"{corpus}/metadata.csv: 1 clips; a split needs at least 2"


def test_ctrl_c_during_imports_prints_nothing(tmp_path):
    (tmp_path / "pooch.py").write_text("import os\nos.kill(os.getpid(), 2)\n")
    program = [sys.executable, ROOT / "scripts/prepare_ljspeech.py", "--help"]
    result = subprocess.run(program, env={"PYTHONPATH": tmp_path}, capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, b"", b"")


# Another rate


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
    make_corpus(tmp_path / "c", 2, rate)
    prepare.main(["--corpus", "c", "--sampling_rate", str(rate), "--name", "mine"])
    settings = printed_settings(capsys)
    hparams = create_hparams(settings)
    assert hparams.sampling_rate == rate
    assert (hparams.hop_length, hparams.win_length, hparams.filter_length) == (hop, window, fft)
    assert hparams.mel_fmax == highest
    assert ("hop_length" in settings) == (rate != 22050)
    clips = load_clips(hparams.training_files, hparams)
    assert clips[0].n_frames == rate // 10 // hop + 1


@pytest.mark.parametrize("rate", [4000, 5120, 11025, 24000, 96000])
def test_at_every_rate_no_mel_band_is_empty(rate):
    hparams = HParams(**prepare.audio_settings(rate))
    assert (MelSpectrogram(hparams).mel_basis.sum(1) > 0).all()


def test_a_clip_is_checked_against_the_window_of_its_rate(tmp_path):
    corpus = make_corpus(tmp_path / "c", 3)
    for i, samples in enumerate((800, 799, 8000)):
        write_clip(corpus / "wavs" / f"C-{i}.wav", rate=16000, samples=samples)
    _, problem = refusal("--corpus", corpus, "--sampling_rate", 16000)
    assert "C-1.wav: 799 samples, too short for a mel" in problem


# The split


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
    train, val = prepare.split(ids, 0.8, 0)
    assert prepare.split(ids, 0.8, 0) == (train, val) == prepare.split(ids, 0.8, 0)
    assert val[:5] == ["C-2", "C-3", "C-11", "C-12", "C-13"]  # as in every version
    assert prepare.split(ids, 0.8, 1) != (train, val)
    assert prepare.split(ids[::-1], 0.8, 0) == (train[::-1], val[::-1])


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_small_corpora_have_a_clip_on_either_side(n, fraction):
    train, val = prepare.split([str(i) for i in range(n)], fraction, 0)
    assert train and val and len(train) + len(val) == n


def test_another_split_does_not_replace_lists(corpus, capsys, monkeypatch):
    args = ["--corpus", str(corpus), "--filelists_dir", "."]
    prepare.main(args)
    train, val = Path("ljspeech_train.txt"), Path("ljspeech_val.txt")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (train, val)}
    prepare.main([*args, "--name", "same"])
    assert Path("same_train.txt").read_bytes() == train.read_bytes()

    capsys.readouterr()
    prepare.main(args)
    assert capsys.readouterr().out.startswith(
        f"{train}: 6 clips, already there\n{val}: 2 clips, already there\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "check_samples", None)  # refused before samples are read
        (message,) = refusal(*args, "--train_fraction", "0.6")
    assert message == (
        f"{train}: exists and lists 6 clips, this run 5 (5 lines are in both); give another "
        "--name, or delete the file"
    )
    (message,) = refusal(*args, "--seed", "1")
    assert message.startswith(f"{train}: exists and lists 6 clips, this run 6 (")
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (train, val)}

    train.unlink()  # as a run leaves it that was killed between the two
    (message,) = refusal(*args, "--train_fraction", "0.6")
    assert message.startswith(f"{val}: exists and lists 2 clips, this run 3 ")
    assert not train.exists()
    prepare.main(args)
    assert train.read_bytes() == before[train][0]
    prepare.main([*args, "--train_fraction", "0.6", "--name", "other"])
    assert len(lines_of("other_train.txt")) == 5


def test_the_train_command_names_only_what_is_not_the_default(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert (
        prepare.train_command("ljspeech", data_dir="data/LJSpeech-1.1", sampling_rate=22050)
        == "python train.py -o runs/ljspeech --hparams data_dir=data/LJSpeech-1.1"
    )
    odd = "/my data, 'all' [of] it/c"
    command = shlex.split(prepare.train_command("x", data_dir=odd, sampling_rate=16000))
    hparams = create_hparams(command[-1])
    assert (hparams.data_dir, hparams.sampling_rate) == (odd, 16000)
