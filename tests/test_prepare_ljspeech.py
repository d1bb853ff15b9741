"""scripts/prepare_ljspeech.py on tiny corpora of tones, served on the loopback."""

import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import soundfile

from cli import UserError
from hparams import HParams
from scripts import prepare_ljspeech as prepare

SPLIT, ID_LISTS = Path(prepare.__file__).resolve().parents[1] / "filelists", prepare.ID_LISTS
CORPUS, ARCHIVE = Path("data/LJSpeech-1.1"), Path("data/LJSpeech-1.1.tar.bz2")


def make_corpus(folder, n_clips=8, samples=2205, rate=22050):  # so few are read in this process
    Path(folder, "wavs").mkdir(parents=True)
    lines = [f'C-{i}|No. {i} "as printed.|number {i}  "as read.\n' for i in range(n_clips)]
    Path(folder, "metadata.csv").write_text("".join(lines))
    for i in range(n_clips):
        soundfile.write(f"{folder}/wavs/C-{i}.wav", np.sin(np.arange(samples)), rate)


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch):
    """``c`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    make_corpus("c")
    monkeypatch.setattr(prepare, "ID_LISTS", [Path("c/train_ids.txt"), Path("c/val_ids.txt")])
    for id_list, ids in zip(prepare.ID_LISTS, ("023457", "16"), strict=True):
        id_list.write_text("".join(f"C-{i}\n" for i in ids))


def make_archive(monkeypatch, *members):
    """An archive of the corpus and ``members``, with LJSpeech's SHA-256."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:bz2") as tar:
        tar.add("c", CORPUS.name)
        for member in members:
            tar.addfile(member)
    monkeypatch.setattr(prepare, "SHA256", sha256(file.getvalue()).hexdigest())
    return file.getvalue()


@pytest.fixture
def server(monkeypatch):
    """Replies with ``status`` and ``payload``, cut after ``end`` bytes, and counts requests.

    The disk has ``free`` bytes; the archive and the corpus need one each.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.requests += 1
            if server.interrupted:
                signal.raise_signal(signal.SIGINT)  # for the main thread, as Ctrl-C is
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(server.payload)))
            self.end_headers()
            self.wfile.write(server.payload[: server.end])

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.payload = make_archive(monkeypatch)
        server.status, server.end, server.interrupted = 200, None, False
        server.free, server.requests = 2, 0
        monkeypatch.setattr(shutil, "disk_usage", lambda _: server)
        monkeypatch.setattr(prepare, "SIZE", 1)
        monkeypatch.setattr(prepare, "EXTRACTED_SIZE", 1)
        monkeypatch.setattr(prepare, "URL", f"http://127.0.0.1:{server.server_port}/a")
        monkeypatch.setenv("no_proxy", "*")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def call(command):
    prepare.main(shlex.split(command))


def refusal(command):
    """The lines in which main refuses these arguments."""
    with pytest.raises(UserError) as error:
        call(command)
    return str(error.value).splitlines()


def printed_settings(capsys):
    """The settings of the last command printed."""
    python, program, *_, settings = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert (
        python == "python"
        and Path(program).resolve() == Path(prepare.__file__).parents[1] / "train.py"
    )
    return settings


def test_download_extracts_checks_and_writes_the_lists(server, capsys):
    Path(f"{CORPUS}.unfinished", "left").mkdir(parents=True)  # by a killed run
    call("--data_dir data")
    assert sorted(os.listdir("data")) == [CORPUS.name, ARCHIVE.name]
    for path in Path("c").rglob("*.*"):
        assert Path(CORPUS, *path.parts[1:]).read_bytes() == path.read_bytes()
    assert printed_settings(capsys) == f"data_dir={CORPUS}"  # the others are the defaults
    names = HParams.training_files, HParams.validation_files
    train, val = (Path(name).read_text().splitlines() for name in names)
    assert train == [f'wavs/C-{i}.wav|number {i} "as read.' for i in (0, 2, 3, 4, 5, 7)]
    assert val == [f'wavs/C-{i}.wav|number {i} "as read.' for i in (1, 6)]
    ARCHIVE.unlink()  # the next run finds the corpus
    call("--data_dir data")
    assert server.requests == 1
    (CORPUS / "metadata.csv").unlink()
    assert "has no metadata.csv; remove or rename it" in refusal("--data_dir data")[0]


def test_the_split_is_that_of_every_version():
    """80:20, by a hash of each ID: drawn once, and since then a list."""
    lists = [SPLIT / f"ljspeech_{part}_ids.txt" for part in ("train", "val")]
    assert lists == ID_LISTS
    train, val = (path.read_text().splitlines() for path in lists)
    ids = sorted(train + val)
    assert len(set(ids)) == 13_100 and train == sorted(train) and val == sorted(val)
    ranked = sorted(ids, key=lambda name: sha256(f"0 {name}".encode()).digest())
    assert sorted(ranked[:10_480]) == train


def test_a_corpus_without_some_of_the_clips_is_refused(capsys):
    shutil.copytree("c", CORPUS)
    metadata = CORPUS / "metadata.csv"
    metadata.write_text("".join(metadata.read_text().splitlines(keepends=True)[:3]))
    (line,) = refusal("--data_dir data")
    fix = "rename or remove it and run again"
    assert line == f"{CORPUS}: lacks C-3 and 3 more of train_ids.txt; {fix}"
    assert not Path("filelists").exists()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"end": 99}, "http://.*; run again, or put LJ.*bz2 into --data_dir yourself"),
        ({"payload": b"log in"}, f"http://.*{sha256(b'log in').hexdigest()}.*; run again, or .*"),
        ({"status": 404}, "http://.*404.*; run again, or .*"),
        ({"status": 503}, "http://.*503.*; run again, or .*"),
        ({"free": 1}, "data: .* GB needed .* another --data_dir"),
        ({"interrupted": True}, ""),
    ],
)
def test_a_failed_download_leaves_nothing_and_the_next_run_starts_afresh(server, reply, message):
    good = {name: getattr(server, name) for name in reply}
    vars(server).update(reply)
    with pytest.raises(UserError if message else KeyboardInterrupt, match=f"^{message}$"):
        call("--data_dir data")
    assert os.listdir() == ["c"]
    assert server.requests == ("free" not in reply)  # the space is checked first
    vars(server).update(good)
    call("--data_dir data")
    assert ARCHIVE.read_bytes() == server.payload


def test_an_archive_that_is_there_is_compared_extracted_and_kept(server):
    ARCHIVE.parent.mkdir()
    for content, free, message in (
        (b"no archive", 1, f"SHA-256 is {sha256(b'no archive').hexdigest()}, not {prepare.SHA256}"),
        (server.payload[:-9], 1, "SHA-256 is"),
        (server.payload, 0, "GB needed"),
    ):
        ARCHIVE.write_bytes(content)
        server.free = free
        assert message in refusal("--data_dir data")[0]
        assert os.listdir("data") == [ARCHIVE.name] and ARCHIVE.read_bytes() == content
    server.free = 1
    call("--data_dir data")
    assert len(os.listdir(CORPUS / "wavs")) == 8
    assert ARCHIVE.read_bytes() == server.payload and server.requests == 0


@pytest.mark.parametrize(
    "name",
    ["../evil", f"{CORPUS.name}/../../evil", "/tmp/evil", "a link", "a hard link", "a pipe"],
)
def test_an_archive_that_reaches_out_is_refused(server, monkeypatch, name):
    kinds = {"a link": tarfile.SYMTYPE, "a hard link": tarfile.LNKTYPE, "a pipe": tarfile.FIFOTYPE}
    monkeypatch.delattr(tarfile, "data_filter", raising=False)  # as in Python 3.10.0 to 3.10.11
    bad = tarfile.TarInfo(name)
    bad.type, bad.linkname = kinds.get(name, tarfile.REGTYPE), f"{CORPUS.name}/metadata.csv"
    server.payload = make_archive(monkeypatch, bad)
    (line,) = refusal("--data_dir data")
    assert line.startswith(f"{ARCHIVE}: has {name}, ")
    assert sorted(os.listdir()) == ["c", "data"] and os.listdir("data") == [ARCHIVE.name]
    assert not Path("/tmp/evil").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "the following arguments are required: --data_dir"),
        ("--data_dir data --seed 1", "unrecognized arguments: --seed 1"),
        ("--data_dir c/metadata.csv", "c/metadata.csv: cannot be written"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_download(server, command, message):
    (line,) = refusal(command)
    assert line.startswith(message) and os.listdir() == ["c"] and not server.requests


@pytest.mark.parametrize(("name", "imports"), [("ljspeech", "pooch"), ("corpus", "soxr")])
def test_ctrl_c_during_imports_prints_nothing(tmp_path, name, imports):
    (tmp_path / f"{imports}.py").write_text("import os\nos.kill(os.getpid(), 2)\n")
    program = [sys.executable, Path(prepare.__file__).with_name(f"prepare_{name}.py"), "--help"]
    result = subprocess.run(program, env={"PYTHONPATH": tmp_path}, capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, b"", b"")
