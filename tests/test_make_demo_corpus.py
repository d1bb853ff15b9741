"""The demo corpus: LJSpeech's layout and durations, the same bytes in every run, refusals."""

import json
import os
import random
import re
import resource
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from cli import UserError
from scripts import make_demo_corpus as demo

SHORT = ("--clips", "70", "--duration_scale", "0.4")  # two chunks
SCRIPT = [sys.executable, demo.__file__]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def rows(folder: Path) -> list[list[str]]:
    lines = (folder / "metadata.csv").read_text(encoding="utf-8").splitlines()
    return [line.split("|") for line in lines]


@pytest.fixture
def call(monkeypatch):
    """Runs the program in this process."""

    def call(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["make_demo_corpus.py", *map(str, arguments)])
        demo.main()

    return call


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus by a single worker; not to be changed."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "corpus"
    command = [*SCRIPT, folder, *SHORT, "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "" and "made, 70 clips" in done.stdout
    return folder


def test_layout_is_ljspeechs_and_every_clip_has_its_length(corpus):
    ids = [f"DM001-{i:04d}" for i in range(1, 71)]
    wavs = [f"wavs/{clip_id}.wav" for clip_id in ids]
    assert list(contents(corpus)) == ["corpus.json", "metadata.csv", *wavs]
    assert [row[0] for row in rows(corpus)] == ids
    assert all(len(row) == 3 and all(row) for row in rows(corpus))
    infos = [soundfile.info(corpus / wav) for wav in wavs]
    kinds = {(info.format, info.subtype, info.channels, info.samplerate) for info in infos}
    assert kinds == {("WAV", "PCM_16", 1, 22050)}
    lengths = [info.frames for info in infos]
    assert lengths == demo.draw_durations(70, seed=0, scale=0.4)
    edges = np.interp(np.arange(71) / 70, demo.DURATION_SHARES, demo.DURATION_FRAMES)
    edges = 256 * 0.4 * edges
    assert (np.sort(lengths) >= edges[:-1] - 0.5).all()
    assert (np.sort(lengths) <= edges[1:] + 0.5).all()
    assert json.loads((corpus / "corpus.json").read_text())["clips"] == 70


def test_clips_are_speech_at_a_readers_pace(corpus):
    for clip_id, _, spoken in rows(corpus):
        samples, rate = soundfile.read(corpus / "wavs" / f"{clip_id}.wav", dtype="int16")
        samples = samples.astype(int)
        loud = np.flatnonzero(np.abs(samples) > demo.SILENCE)
        assert np.sqrt(np.mean(samples**2)) > 2000
        assert np.abs(samples).max() < 32767
        assert len(samples) - (loud[-1] - loud[0]) <= demo.PADDING[2] * rate + 1
        assert np.diff(loud).max() < 0.8 * rate  # no longer pause
        assert np.diff(np.flatnonzero(samples)).max() < 50  # no digital silence: it has no log
        assert 6 < len(spoken) / (len(samples) / rate) < 20, spoken


def test_bytes_are_the_same_with_any_workers_and_after_an_interruption(
    corpus, tmp_path, call, capsys
):
    folder = tmp_path / "b"
    command = [*SCRIPT, folder, *SHORT, "--workers", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as first:
        deadline = time.monotonic() + 60
        while not list(folder.glob("wavs/*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile
        with pytest.raises(UserError, match=f"{folder}: in use by process {first.pid}; wait for"):
            call(folder, *SHORT)
        first.send_signal(signal.SIGINT)
        first.send_signal(signal.SIGCONT)
        assert first.communicate(timeout=60)[1] == "interrupted\n"
    assert first.returncode == 130 and not (folder / "metadata.csv").exists()

    call(folder, *SHORT, "--workers", 3)
    assert contents(folder) == contents(corpus)
    (folder / "wavs" / "DM001-0070.wav").unlink()
    call(folder, *SHORT)
    assert contents(folder) == contents(corpus)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    call(folder, *SHORT)
    assert "already there, 70 clips" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_killed_worker_ends_the_run_in_one_line(tmp_path, monkeypatch, call):
    monkeypatch.setattr(demo, "follow_parent", os.abort)
    with pytest.raises(UserError, match=r"x: a worker process was killed; run again"):
        call(tmp_path / "x", "--clips", 1)
    assert not (tmp_path / "x" / "metadata.csv").exists()


def test_given_transcripts_are_spoken(tmp_path, call):
    texts = {
        "a_1": "The café -- it was 9 o'clock -- had closed.",
        "B.2": "Short.",
        "3-c": "A sentence of some more words takes more time to say.",
    }
    lines = "".join(f"{clip_id}|{text}\r\n" for clip_id, text in texts.items())
    (tmp_path / "texts.txt").write_bytes(b"\xef\xbb\xbf" + lines.encode())  # as Windows saves it
    call(tmp_path / "out", "--transcripts", tmp_path / "texts.txt")
    assert rows(tmp_path / "out") == [[clip_id, text, text] for clip_id, text in texts.items()]
    for clip_id, text in texts.items():
        seconds = soundfile.info(tmp_path / "out" / "wavs" / f"{clip_id}.wav").duration
        assert seconds == pytest.approx(demo.reading_seconds(text), rel=0.25)


def test_batches_pad_as_ljspeechs_do():
    """12.5 ms frames, 80:20, base batch size 16: RAND pads 32.0 %, SB next to nothing."""
    frames = np.array(demo.draw_durations(13100, seed=0, scale=1.0)) // 276 + 1

    def padding_rate_and_batch_length(order: np.ndarray) -> tuple[float, float]:
        batches = order[: len(order) // 16 * 16].reshape(-1, 16)
        longest = batches.max(axis=1)
        return 1 - batches.sum() / (16 * longest).sum(), longest.mean()

    rng = np.random.default_rng(0)
    train = rng.permutation(frames)[: int(0.8 * 13100)]
    epochs = [padding_rate_and_batch_length(rng.permutation(train)) for _ in range(10)]
    zpr, abl = np.mean(epochs, axis=0)
    assert zpr == pytest.approx(0.320, abs=0.005)
    assert abl == pytest.approx(773, abs=3)
    assert padding_rate_and_batch_length(np.sort(train))[0] < 0.002


def test_the_scale_keeps_the_shape_and_the_seed_changes_the_durations():
    whole, scaled = demo.draw_durations(500, 1, 1.0), demo.draw_durations(500, 1, 0.35)
    assert np.abs(np.array(scaled) - 0.35 * np.array(whole)).max() <= 1
    assert whole != demo.draw_durations(500, 2, 1.0)
    assert np.quantile(whole, 0.5) / 256 == pytest.approx(585, abs=5)


def test_the_grammar_uses_every_rule_and_all_letters():
    named = set(re.findall(r"\{(\w+)\}", demo.TEMPLATES))
    assert set(demo.RULES) == named | {"word", "phrase", "sentence"}
    rng = random.Random(0)
    texts = [demo.write(rng.uniform(0.4, 10), rng) for _ in range(600)]
    letters = set(string.ascii_letters)
    assert letters <= set("".join(texts)) <= letters | set(" .,;:!?'-")
    assert len({word for text in texts for word in re.findall(r"[a-z']+", text)}) > 700
    assert not any(re.search(r"\b[Aa] [AEIOUaeiou]|[.!?] [a-z]", text) for text in texts)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--clips", "0"], "--clips 0: use 1 to 249750"),
        (["x", "--clips", "ten"], "--clips: invalid int value: 'ten'; --help"),
        (["x", "--workers", "0"], "--workers: 0: use a whole number, 1 or more"),
        (["x", "--duration_scale", "0.2"], "--duration_scale 0.2: use 0.35 to 3.0"),
        (["x", "--duration_scale", "nan"], "--duration_scale nan: use 0.35 to 3.0"),
        (["x", "--seeds", "1"], "unrecognized arguments: --seeds 1; --help"),
        ([], "the following arguments are required: DIR; --help shows the arguments"),
        (["x", "--transcripts", "t", "--clips", "3"], "--transcripts: does not go with --clips"),
        (["x", "--transcripts", "t", "--duration_scale", "2"], "--transcripts: does not go with"),
        (["x", "--transcripts", "t"], "--transcripts t: No such file or directory; give ID|text"),
        (["x", "--transcripts", "bad"], "bad:1: 'a Good.': write ID|text, with one bar"),
        (["bad/x"], "bad/x: cannot be written (Not a directory); give another folder"),
        (["bad"], "bad: cannot be written (File exists); give another folder"),
        (["."], ".: holds bad, which this program did not make; choose another folder, or delete"),
    ],
)
def test_arguments_refused(arguments, message, tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    Path("bad").write_text("a Good.\n")
    with pytest.raises(UserError, match=re.escape(message)):
        call(*arguments)
    assert contents(tmp_path) == {"bad": b"a Good.\n"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"no bar", "'no bar': write ID|text, with one bar"),
        (b"", "'': write ID|text, with one bar"),
        (b"b|one|two", "'b|one|two': write ID|text, with one bar"),
        (b"../b|one", "'../b|one': the ID names a file: use up to"),
        (b".b|one", "'.b|one': the ID names a file: use up to"),
        (b"A|one", "'A|one': use each ID once"),
        (b"b|...", "'b|...': the text cannot be spoken; write words"),
        (b"b|one\ttwo", r"'b|one\ttwo': the text cannot be spoken; write words and plain spaces"),
        (
            b"b|\xff",
            r"'b|\udcff': the text cannot be spoken; write words and plain spaces, in UTF-8",
        ),
    ],
)
def test_transcripts_refused(line, message, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes(b"a|Good.\n" + line + b"\n")
    with pytest.raises(UserError, match=re.escape(f"{path}:2: ") + ".*" + re.escape(message)):
        demo.read_transcripts(path)


def test_another_corpus_is_left_alone(corpus, call):
    before = contents(corpus)
    with pytest.raises(UserError, match=r'holds the corpus .*"clips": 70,.* not .*"clips": 71,'):
        call(corpus, "--clips", 71, "--duration_scale", 0.4)
    assert contents(corpus) == before


def test_a_missing_or_broken_engine_says_what_to_install(tmp_path, monkeypatch, call):
    with pytest.raises(UserError, match="pip install --force-reinstall espeakng-loader"):
        demo.Engine(str(tmp_path / "libespeak-ng.so"), str(tmp_path))
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(
        UserError, match=r"espeakng_loader.*; pip install .*espeakng-loader==0\.2\.4"
    ):
        call(tmp_path / "x")


def test_a_full_disk_is_named_before_and_during_the_work(tmp_path, monkeypatch, call):
    folder = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"GB needed .* --clips"):
        patch.setattr(demo, "SAMPLING_RATE", 10**18)
        patch.setattr(demo, "draw_durations", lambda *_: [10**18])
        call(folder, "--clips", 1)
    assert not folder.exists()

    def limit_file_size() -> None:  # a write beyond it fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    command = [*SCRIPT, folder, "--clips", "3"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, preexec_fn=limit_file_size)
    assert done.returncode == 2
    assert re.fullmatch(rf"error: {folder}\S*: File too large; make room.*\n", done.stderr)
    call(folder, "--clips", 3)  # with room, it is made anew
    assert len(rows(folder)) == 3
