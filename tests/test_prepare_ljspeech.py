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
from clips import Clip, load_clips
from hparams import HParams, create_hparams
from layers import MelSpectrogram
from scripts import prepare_ljspeech as prepare

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
    assert python == "python" and Path(program).resolve() == prepare.ROOT / "train.py"
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
    assert (len(train), len(val)) == (6, 2)
    assert sorted(train + val) == [f'wavs/C-{i}.wav|number {i} "as read.' for i in range(8)]
    ARCHIVE.unlink()  # the next run finds the corpus
    call("--data_dir data")
    assert server.requests == 1
    (CORPUS / "metadata.csv").unlink()
    assert "has no metadata.csv; remove or rename it" in refusal("--data_dir data")[0]


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


def test_all_problems_of_a_corpus_are_in_one_list_and_nothing_is_written():
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
    good = "\ufeffC-7|two columns, " + "however long " * 200
    Path("c/metadata.csv").write_text("\n".join([good, "", *rows]), errors="surrogateescape")
    soundfile.write("c/wavs/C-0.wav", np.ones((9000, 2)), 22050)
    soundfile.write("c/wavs/C-1.wav", np.zeros(9000), 22050)
    shutil.copy("c/wavs/C-7.wav", "c/C-7.wav")  # which the ID ../C-7 would find
    for n, (line, start) in enumerate(zip(refusal("--corpus c"), rows.values(), strict=True), 3):
        assert line.startswith(f"c/metadata.csv:{n}: {start}")
    assert os.listdir() == ["c"]
    Path("filelists").touch()  # said before the corpus is read
    assert refusal("--corpus c")[0].startswith("filelists: cannot be written")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--corpus c --name a+b", "--name a+b: use letters"),
        ("--corpus c --train_fraction 1", "--train_fraction 1.0: use a value"),
        ("--corpus c --sampling_rate 0", "--sampling_rate 0: use 4000 to 192000"),
        (f"--corpus c --sampling_rate {'9' * 400}", "--sampling_rate 999"),
        ("--corpus nowhere", "nowhere/metadata.csv: no such file"),
        ("--corpus one", "one/metadata.csv: 1 clips; a split needs at least 2"),
        ("--data_dir one/metadata.csv", "one/metadata.csv: cannot be written"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(command, message):
    make_corpus("one", 1)
    (line,) = refusal(command)
    assert line.startswith(message) and sorted(os.listdir()) == ["c", "one"]


def test_ctrl_c_during_imports_prints_nothing(tmp_path):
    (tmp_path / "pooch.py").write_text("import os\nos.kill(os.getpid(), 2)\n")
    program = [sys.executable, prepare.__file__, "--help"]
    result = subprocess.run(program, env={"PYTHONPATH": tmp_path}, capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, b"", b"")


RATES = [4000, 5120, 8000, 11025, 16000, 22050, 24000, 44100, 48000, 96000]


@pytest.mark.parametrize("rate", RATES)
def test_settings_follow_from_the_rate_and_no_mel_band_is_empty(rate, capsys):
    folder = "my data, 'all' [of] it"
    make_corpus(folder, 2, samples=rate // 20, rate=rate)
    call(f'--corpus "{folder}" --sampling_rate {rate} --name mine')
    hparams = create_hparams(printed_settings(capsys))
    assert (hparams.data_dir, hparams.sampling_rate) == (folder, rate)
    assert hparams.mel_fmax == min(8000, rate / 2)
    hop, window, fft = hparams.hop_length, hparams.win_length, hparams.filter_length
    assert abs(hop - 0.0125 * rate) <= 0.5 and 0 <= 0.05 * rate - window < 1
    assert window <= fft < 2 * window and fft.bit_count() == 1  # the next power of two
    assert (MelSpectrogram(hparams).mel_basis.sum(1) > 0).all()
    assert load_clips(hparams.training_files, hparams)[0].n_frames == window // hop + 1
    (line,) = refusal(f'--corpus "{folder}" --sampling_rate 32000')
    assert f"C-0.wav: sampling rate {rate} Hz; resample it to 32000 Hz" in line
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


def test_another_split_does_not_replace_lists(capsys, monkeypatch):
    train, val = Path("filelists/ljspeech_train.txt"), Path("filelists/ljspeech_val.txt")
    call("--corpus c")
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in (train, val)]
    call("--corpus c")
    assert f"{val}: 2 clips, already there\n" in capsys.readouterr().out
    call("--corpus c --train_fraction 0.6 --name other")
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "check_samples", None)  # refused before samples are read
        for option, n in (("--train_fraction 0.6", "5 (5 in both)"), ("--seed 1", "6 (")):
            (line,) = refusal(f"--corpus c {option}")
            assert line.startswith(f"{train}: already has 6 clips, this run would write {n}")
    assert before == [(path.read_bytes(), path.stat().st_mtime_ns) for path in (train, val)]
    train.unlink()  # as a run leaves it that was killed between the two
    (line,) = refusal("--corpus c --train_fraction 0.6")
    assert line.startswith(f"{val}: already has 2 clips, this run would write 3 ")
    assert not train.exists()
    call("--corpus c")
    assert train.read_bytes() == before[0][0]


def test_samples_are_read_before_lists_are_written():
    soundfile.write("c/wavs/C-1.wav", np.zeros(9000), 22050)
    (line,) = refusal("--corpus c")
    assert "C-1.wav: is silent" in line and os.listdir() == ["c"]
