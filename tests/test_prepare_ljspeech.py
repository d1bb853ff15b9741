"""scripts/prepare_ljspeech.py on tiny corpora of tones, served on the loopback."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pooch
import pytest
import soundfile

from cli import UserError
from clips import Clip, load_clips
from hparams import HParams, create_hparams
from layers import MelSpectrogram
from scripts import prepare_ljspeech as prepare

CORPUS, ARCHIVE = "LJSpeech-1.1", "LJSpeech-1.1.tar.bz2"


def write_clip(path, samples=2205, rate=22050, channels=1):
    soundfile.write(path, np.sin(np.arange(samples * channels)).reshape(-1, channels), rate)


def make_corpus(folder, n_clips=8, **clip):  # of so few, samples are checked in this process
    (folder / "wavs").mkdir(parents=True)
    lines = [f'C-{i}|No. {i} "as printed.|number {i}  "as read.\n' for i in range(n_clips)]
    (folder / "metadata.csv").write_text("".join(lines))
    for i in range(n_clips):
        write_clip(folder / f"wavs/C-{i}.wav", **clip)
    return folder


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """``c`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "SIZE", 1)  # bytes, which there is space for
    monkeypatch.setattr(prepare, "EXTRACTED_SIZE", 1)
    return make_corpus(Path("c"))


def make_archive(path, monkeypatch, *members):
    """An archive of the corpus, which is to be LJSpeech's."""
    with tarfile.open(path, "w:bz2") as tar:
        tar.add("c", CORPUS)
        for member in members:
            tar.addfile(member)
    monkeypatch.setattr(prepare, "SHA256", sha256(path.read_bytes()).hexdigest())
    return path.read_bytes()


@pytest.fixture
def server(corpus, tmp_path_factory, monkeypatch):
    """Replies with ``status`` and ``payload``, cut after ``end`` bytes, and counts requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.requests += 1
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(server.payload)))
            self.end_headers()
            self.wfile.write(server.payload[: server.end])

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.payload = make_archive(tmp_path_factory.mktemp("archive") / "a", monkeypatch)
        server.status, server.end, server.requests = 200, None, 0
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
    assert python == "python" and Path(program).resolve() == prepare.ROOT / "train.py"
    return settings


def test_download_extracts_checks_and_writes_the_lists(server, corpus, capsys):
    Path("data", f"{CORPUS}.unfinished", "left").mkdir(parents=True)  # by a killed run
    call("--data_dir data")
    assert sorted(os.listdir("data")) == [CORPUS, ARCHIVE]
    for path in corpus.rglob("*.*"):
        assert Path("data", CORPUS, *path.parts[1:]).read_bytes() == path.read_bytes()
    assert printed_settings(capsys) == f"data_dir=data/{CORPUS}"  # the others are the defaults
    names = HParams.training_files, HParams.validation_files
    train, val = (Path(name).read_text().splitlines() for name in names)
    assert (len(train), len(val)) == (6, 2)
    assert sorted(train + val) == [f'wavs/C-{i}.wav|number {i} "as read.' for i in range(8)]
    # The next run finds the corpus, and asks for no archive.
    Path("data", ARCHIVE).unlink()
    call("--data_dir data --archive removed")
    assert server.requests == 1
    Path("data", CORPUS, "metadata.csv").unlink()
    assert "has no metadata.csv; remove or rename it" in refusal("--data_dir data")[0]


@pytest.mark.parametrize(
    ("reply", "messages"),
    [
        ({"end": 99}, ["run again"]),
        ({"payload": b"log in"}, [sha256(b"log in").hexdigest(), "--archive"]),
        ({"status": 404}, ["404", "--archive"]),
        ({"status": 503}, ["503", "run again"]),
    ],
)
def test_a_failed_download_leaves_nothing_and_the_next_run_starts_afresh(server, reply, messages):
    good = {"payload": server.payload, "status": 200, "end": None}
    vars(server).update(reply)
    (line,) = refusal("--data_dir data")
    assert all(message in line for message in [prepare.URL, *messages])
    assert os.listdir() == ["c"] and server.requests == 1
    vars(server).update(good)
    call("--data_dir data")
    assert Path("data", ARCHIVE).read_bytes() == server.payload


def test_an_interrupted_download_leaves_nothing(server, monkeypatch):
    monkeypatch.setattr(pooch.hashes, "file_hash", lambda *_, **__: signal.raise_signal(2))
    with pytest.raises(KeyboardInterrupt):
        call("--data_dir data")
    assert server.requests == 1 and os.listdir() == ["c"]


@pytest.mark.parametrize(("archive", "free"), [("", 1), ("--archive a", 0)])
def test_too_little_disk_space_is_said_first(server, monkeypatch, archive, free):
    Path("a").write_bytes(server.payload)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    (line,) = refusal(f"--data_dir data {archive}")
    assert line.startswith("data: ") and "GB needed" in line and "--data_dir" in line
    assert server.requests == 0 and sorted(os.listdir()) == ["a", "c"]


def test_a_given_archive_is_compared_extracted_and_kept(server):
    archive, command = Path("a"), "--data_dir data --archive a"
    for content in (b"no archive", server.payload[:-9]):
        archive.write_bytes(content)
        (line,) = refusal(command)
        assert line.startswith(f"a: SHA-256 is {sha256(content).hexdigest()}, not {prepare.SHA256}")
        assert sorted(os.listdir()) == ["a", "c"]
    archive.write_bytes(server.payload)
    call(command)
    assert len(os.listdir(f"data/{CORPUS}/wavs")) == 8
    assert archive.read_bytes() == server.payload and server.requests == 0


@pytest.mark.parametrize(
    "name",
    ["../evil", f"{CORPUS}/../../evil", "/tmp/prepare_evil", "a link", "a hard link", "a pipe"],
)
def test_an_archive_that_reaches_out_is_refused(corpus, monkeypatch, name):
    kinds = {"a link": tarfile.SYMTYPE, "a hard link": tarfile.LNKTYPE, "a pipe": tarfile.FIFOTYPE}
    monkeypatch.delattr(tarfile, "data_filter", raising=False)  # as in Python 3.10.0 to 3.10.11
    bad = tarfile.TarInfo(name)
    bad.type, bad.linkname = kinds.get(name, tarfile.REGTYPE), f"{CORPUS}/metadata.csv"
    make_archive(Path("a"), monkeypatch, bad)
    (line,) = refusal("--archive a --data_dir deep/data")
    assert line.startswith(f"a: has {name}, ") and sorted(os.listdir()) == ["a", "c"]
    assert not Path("/tmp/prepare_evil").exists()


def test_all_problems_of_a_corpus_are_in_one_list_and_nothing_is_written(corpus):
    """Those of the table's form, beside one each of a header, of samples and of a text."""
    rows = {
        "ID|text|normalised text": "wavs/ID.wav: no such file; fix the ID (it has no .wav), or",
        "C-0|one|one": "c/wavs/C-0.wav: 2 channels",
        "C-1|silent|silent": "c/wavs/C-1.wav: is silent",
        "C-2||  ": "text '' has nothing to speak",
        "C-3|caf\udce9|caf": "byte 0xe9 is not UTF-8",
        "|no id|no id": "wavs/.wav: no such file",
        "../C-7|up|up": "wavs/../C-7.wav: no such file",
        "C-8/x|in|in": "wavs/C-8/x.wav: no such file",
        "one column": "1 column(s); use ID|text",
        "x|a|b|c": "4 column(s); use ID|text",
        "C-4.wav|a|b": "wavs/C-4.wav.wav: no such file",
    }
    metadata = corpus / "metadata.csv"
    good = "\ufeffC-7|two columns, " + "however long " * 200
    metadata.write_text("\n".join([good, "", *rows]), errors="surrogateescape")
    write_clip("c/wavs/C-0.wav", channels=2)
    soundfile.write("c/wavs/C-1.wav", np.zeros(9000), 22050)
    head, *problems = refusal("--corpus c")
    assert head == "c: no filelist was written because of 11 problem(s)"
    for n, (problem, start) in enumerate(zip(problems, rows.values(), strict=True), 3):
        assert problem.startswith(f"  c/metadata.csv:{n}: {start}")
    assert os.listdir() == ["c"]
    metadata.write_text("bad\n" * 1030)  # of which the report has twenty, and the number
    head, *problems, more = refusal("--corpus c")
    assert (head[-16:], len(problems), more) == ("1,030 problem(s)", 20, "  and 1,010 more")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--corpus c --archive a", "--archive a: is not used with --corpus"),
        ("--corpus c --name a+b", "--name a+b: use letters"),
        ("--corpus c --filelists_dir a+b", "--filelists_dir a+b: + joins"),
        ("--corpus c --train_fraction 1", "--train_fraction 1.0: use a value"),
        ("--corpus c --sampling_rate 0", "--sampling_rate 0: use 4000 to 192000"),
        (f"--corpus c --sampling_rate {'9' * 400}", "--sampling_rate 999"),
        ("--corpus nowhere", "nowhere/metadata.csv: no such file"),
        ("--corpus one", "one/metadata.csv: 1 clips; a split needs at least 2"),
        ("--data_dir d --archive nowhere", "--archive nowhere: no such file"),
        (f"--corpus c --filelists_dir {__file__}", f"{__file__}: cannot be written"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(command, message, corpus):
    make_corpus(Path("one"), 1)
    (line,) = refusal(command)
    assert line.startswith(message) and sorted(os.listdir()) == ["c", "one"]


def test_ctrl_c_during_imports_prints_nothing(tmp_path):
    (tmp_path / "pooch.py").write_text("import os\nos.kill(os.getpid(), 2)\n")
    program = [sys.executable, prepare.__file__, "--help"]
    result = subprocess.run(program, env={"PYTHONPATH": tmp_path}, capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize("rate", [4000, 5120, 11025, 24000, 96000])
def test_at_every_rate_no_mel_band_is_empty(rate):
    spectrogram = MelSpectrogram(HParams(**prepare.audio_settings(rate)))
    assert (spectrogram.mel_basis.sum(1) > 0).all()


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
def test_what_follows_from_the_rate(rate, hop, window, fft, highest, corpus, capsys):
    folder = "my data, 'all' [of] it"
    make_corpus(Path(folder), 2, samples=window, rate=rate)
    call(f'--corpus "{folder}" --sampling_rate {rate} --name mine')
    hparams = create_hparams(printed_settings(capsys))
    assert (hparams.data_dir, hparams.sampling_rate, hparams.mel_fmax) == (folder, rate, highest)
    assert (hparams.hop_length, hparams.win_length, hparams.filter_length) == (hop, window, fft)
    assert load_clips(hparams.training_files, hparams)[0].n_frames == window // hop + 1
    (line,) = refusal(f'--corpus "{folder}" --sampling_rate 24000')
    assert f"C-0.wav: sampling rate {rate} Hz; resample it to 24000 Hz" in line
    assert line.endswith("(the same for all 2 clips)")


def split(ids, train_fraction=0.8, seed=0):
    clips = [Clip(clip_id, "text", [], 1, "", None) for clip_id in ids]
    parts = prepare.split(clips, train_fraction, seed)
    return [[line.removeprefix("wavs/").removesuffix("|text") for line in part] for part in parts]


def test_the_split_is_random_and_the_same_for_everybody():
    ids = [f"LJ{i:05d}" for i in range(13100)]
    train, val = split(ids)
    assert (len(train), len(val)) == (10480, 2620)  # the paper's
    assert sorted(train + val) == ids
    for quarter in np.split(np.isin(ids, val), 4):  # and not by position
        assert 0.17 < quarter.mean() < 0.23
    for fraction in (0.01, 0.5, 0.99):  # at least one clip on either side
        assert all(all(split(few, fraction)) for few in ("ab", "abc", "abcd"))
    train, val = split(ids := [f"C-{i}" for i in range(100)])
    assert val[:5] == ["C-2", "C-3", "C-11", "C-12", "C-13"]  # as in every version
    assert split(ids) == [train, val] != split(ids, seed=1)
    assert split(ids[::-1]) == [train[::-1], val[::-1]]


def test_another_split_does_not_replace_lists(corpus, capsys, monkeypatch):
    command = "--corpus c --filelists_dir ."
    train, val = Path("ljspeech_train.txt"), Path("ljspeech_val.txt")
    call(command)
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in (train, val)]
    call(command)
    assert f"{val}: 2 clips, already there\n" in capsys.readouterr().out
    call(f"{command} --train_fraction 0.6 --name other")
    assert len(Path("other_train.txt").read_text().splitlines()) == 5
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "check_samples", None)  # refused before samples are read
        for option, n in (("--train_fraction 0.6", "5 (5 in both)"), ("--seed 1", "6 (")):
            (line,) = refusal(f"{command} {option}")
            assert line.startswith(f"{train}: already has 6 clips, this run would write {n}")
    assert before == [(path.read_bytes(), path.stat().st_mtime_ns) for path in (train, val)]
    train.unlink()  # as a run leaves it that was killed between the two
    (line,) = refusal(f"{command} --train_fraction 0.6")
    assert (
        line.startswith(f"{val}: already has 2 clips, this run would write 3 ")
        and not train.exists()
    )
    call(command)
    assert train.read_bytes() == before[0][0]
