"""The demo corpus: LJSpeech's layout and durations, the same bytes in every run, refusals."""

import json
import os
import random
import re
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

SHORT = "--clips 70 --duration_scale 0.4"  # two chunks


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def call(command: str) -> None:
    demo.main(command.split())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus by a single worker; not to be changed."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "corpus"
    call(f"{folder} {SHORT} --workers 1")
    return folder


def test_layout_is_ljspeechs_and_every_clip_is_speech_of_its_length(corpus):
    wavs = [f"wavs/DM001-{i:04d}.wav" for i in range(1, 71)]
    assert list(contents(corpus)) == ["corpus.json", "metadata.csv", *wavs]
    lengths = demo.draw_durations(70, seed=0, scale=0.4)
    lines = (corpus / "metadata.csv").read_text().splitlines()
    for wav, n_samples, line in zip(wavs, lengths, lines, strict=True):
        text = line.split("|")[1]
        assert line == f"{Path(wav).stem}|{text}|{text}"
        assert 6 < len(text) / (n_samples / 22050) < 20  # characters a second
        with soundfile.SoundFile(corpus / wav) as file:
            kind = (file.format, file.subtype, file.channels, file.samplerate, file.frames)
            assert kind == ("WAV", "PCM_16", 1, 22050, n_samples)
            samples = file.read(dtype="int16").astype(int)
        assert np.sqrt(np.mean(samples**2)) > 2000 and np.abs(samples).max() < 32767
        loud = np.flatnonzero(np.abs(samples) > demo.SILENCE)
        assert n_samples - (loud[-1] - loud[0]) <= demo.PADDING[2] * 22050 + 1
        assert np.diff(loud).max() < 0.8 * 22050  # no longer pause
        assert np.diff(np.flatnonzero(samples)).max() < 50  # no digital silence: it has no log


def test_bytes_are_the_same_with_any_workers_and_after_an_interruption(corpus, tmp_path, capsys):
    folder = tmp_path / "b"
    program = [sys.executable, demo.__file__, folder, *SHORT.split(), "--workers", "1"]
    pipe = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(program, **pipe) as first:
        while not list(folder.glob("wavs/*")) and first.poll() is None:
            time.sleep(0.01)
        os.killpg(first.pid, signal.SIGINT)  # to all its processes, as Ctrl-C
        assert first.communicate(timeout=60)[1] == "interrupted\n"
    assert first.returncode == 130 and not (folder / "metadata.csv").exists()
    command = f"{folder} {SHORT}"
    call(f"{command} --workers 3")
    assert "made, 70 clips" in capsys.readouterr().out and contents(folder) == contents(corpus)
    (folder / "wavs" / "DM001-0070.wav").unlink()
    call(command)
    assert contents(folder) == contents(corpus)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    call(command)
    assert "already there, 70 clips" in capsys.readouterr().out
    with pytest.raises(UserError, match=r'holds .*"clips": 70,.* not .*"clips": 71,.* delete'):
        call(f"{command} --clips 71")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_given_transcripts_are_spoken(tmp_path):
    texts = {"a_1": "The café -- it was 9 o'clock -- had closed.", "3-B.c": "Some more words."}
    lines = "".join(f"{clip_id}|{text}\r\n" for clip_id, text in texts.items())
    Path(tmp_path, "texts").write_text(lines, "utf-8-sig", newline="")  # as Windows saves it
    call(f"{tmp_path}/out --transcripts {tmp_path}/texts")
    metadata = Path(tmp_path, "out/metadata.csv").read_text("utf-8").splitlines()
    assert metadata == [f"{clip_id}|{text}|{text}" for clip_id, text in texts.items()]
    for clip_id, text in texts.items():
        seconds = soundfile.info(tmp_path / f"out/wavs/{clip_id}.wav").duration
        assert seconds == pytest.approx(demo.reading_seconds(text), rel=0.25)


def test_another_voice_speaks_clips_of_the_same_lengths(corpus, tmp_path):
    """Also a British one, whose file has another name, and a variant, which is slow."""
    sounds = []
    for voice in ("en-us", "en-gb", "en-us+Marco"):
        call(f"{tmp_path}/{voice} --clips 4 --duration_scale 0.5 --voice {voice}")
        paths = sorted(Path(tmp_path, voice).glob("wavs/*"))
        lengths = [soundfile.info(path).frames for path in paths]
        assert lengths == demo.draw_durations(4, seed=0, scale=0.5)
        record = json.loads(Path(tmp_path, voice, "corpus.json").read_text())
        assert record.get("voice", "en-us") == voice
        sounds.append(paths[0].read_bytes())
    assert len({*sounds}) == 3
    assert "voice" not in json.loads((corpus / "corpus.json").read_text())
    with pytest.raises(UserError, match=r"en-gb: holds .*, not .*; use another folder"):
        call(f"{tmp_path}/en-gb --clips 4 --duration_scale 0.5")


def test_other_languages_are_spoken(tmp_path, monkeypatch):
    """One that reads letter by letter in another language takes longer."""
    Path(tmp_path, "texts").write_text("a|Größere Straßen führen über die Brücke.\n")
    seconds = {}
    for voice in ("de", "es", "ja"):
        call(f"{tmp_path}/{voice} --transcripts {tmp_path}/texts --voice {voice}")
        seconds[voice] = soundfile.info(tmp_path / voice / "wavs/a.wav").duration
    assert 2 < seconds["de"] < 4 and seconds["ja"] > 1.5 * seconds["de"] != seconds["es"]
    monkeypatch.setattr(demo, "write", lambda *_: "Go.")
    with pytest.raises(UserError, match=r"no text of 0\.2 s; give --transcripts, or another --voi"):
        demo.speak_to_length(demo.Engine("ja"), 5000, random.Random(0), pace=1.0)


def test_batches_pad_as_ljspeechs_do_at_any_scale():
    """12.5 ms frames, base batch size 16: RAND pads 32.0 %, SB next to nothing."""
    rng = np.random.default_rng(0)
    samples = np.array(demo.draw_durations(13100, seed=0, scale=1.0))
    train = rng.permutation(samples // 276 + 1)[: 655 * 16]  # 80 %
    longest = [rng.permutation(train).reshape(655, 16).max(axis=1) for _ in range(10)]
    assert np.mean(longest) == pytest.approx(773, abs=3)
    assert train.mean() / np.mean(longest) == pytest.approx(1 - 0.320, abs=0.005)
    assert train.mean() / np.sort(train)[15::16].mean() > 1 - 0.002
    assert np.median(samples) / 256 == pytest.approx(585, abs=5)
    assert np.abs(demo.draw_durations(13100, seed=0, scale=0.35) - 0.35 * samples).max() <= 1
    assert (samples != demo.draw_durations(13100, seed=1, scale=1.0)).any()


def test_texts_use_all_letters_and_many_words():
    rng = random.Random(0)
    texts = [demo.write(rng.uniform(0.4, 10), rng) for _ in range(600)]
    assert set("".join(texts)) == set(string.ascii_letters + " .,;!?'-")
    assert len({word for text in texts for word in re.findall(r"[a-z']+", text)}) > 700
    assert not any(re.search(r"\b[Aa] [AEIOUaeiou]|[.!?] [a-z]", text) for text in texts)


@pytest.mark.parametrize(
    ("command", "line", "message"),
    [
        ("x --clips 0", "", "--clips: 0: use .* 1 or more"),
        ("x --duration_scale 0.2", "", "--duration_scale 0.2: use 0.35 to 3"),
        ("x --duration_scale nan", "", "--duration_scale nan: use 0.35 to 3"),
        ("x --transcripts bad --clips 3", "", "--transcripts: .*not.* with --clips"),
        ("x --transcripts bad --duration_scale 2", "", "--transcripts: .*not.*--duration_scale"),
        ("x --voice nosuch", "", "--voice nosuch: has no 'nosuch'; use one like .*, en-.*"),
        ("x --voice en-us+f33", "", r"--voice en-us\+f33: has no 'f33'; use one like f3, "),
        ("x --voice en-us+", "", r"--voice en-us\+: has no ''"),
        ("x --voice ../en", "", "--voice ../en: has no '../en'; use one like .*en"),
        ("x --transcripts t", "", "--transcripts t: No such file .* give"),
        ("bad/x", "", "bad/x: .*Not a directory.*another folder"),
        (".", "", "holds bad, .*another folder"),
        ("x --transcripts bad", "no bar", "bad:2: 'no bar': write ID.text"),
        ("x --transcripts bad", "b|one|two", "bad:2: 'b.one.two': write ID.text"),
        ("x --transcripts bad", "../b|one", "bad:2: '../b.one': .*the ID with A-Z"),
        ("x --transcripts bad", ".b|one", "bad:2: '.b.one': .*the ID with A-Z"),
        ("x --transcripts bad", "A|one", "bad:2: 'A.one': use each ID once"),
        ("x --transcripts bad", "b|...", "bad:2: 'b.[.]{3}': .*write words"),
        ("x --transcripts bad", "b|one\ttwo", "bad:2: 'b.one.ttwo': .*plain spaces"),
        ("x --transcripts bad", "b|\xff", "bad:2: 'b..udcff': .*UTF-8"),
    ],
)
def test_refused(command, line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad").write_text(f"a|Good.\n{line}\n", "latin-1")
    with pytest.raises(UserError, match=message):
        call(command)
    assert os.listdir() == ["bad"]


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("espeakng_loader.get_library_path", lambda: "no.so", r"no\.so.*pip install .*==0\.2\.4"),
        ("scripts.make_demo_corpus.draw_durations", lambda *_: [10**18], "GB needed .* --clips"),
        ("scripts.make_demo_corpus.follow_parent", os.abort, "x: .*killed; run again"),
    ],
)
def test_failures_end_the_run_in_one_line(name, replacement, message, tmp_path, monkeypatch):
    monkeypatch.setattr(name, replacement)
    with pytest.raises(UserError, match=message):
        call(f"{tmp_path}/x --clips 3")
    assert "killed" in message or not os.listdir(tmp_path)


def test_a_missing_engine_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(UserError, match=r"espeakng_loader.*pip install .*==0\.2\.4"):
        call(f"{tmp_path}/x")


def test_a_full_disk_ends_the_run_in_one_line(tmp_path):
    # A write beyond the limit fails as on a full disk.
    command = f"ulimit -f 5; {sys.executable} {demo.__file__} {tmp_path} --clips 3"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert re.fullmatch(rf"error: {tmp_path}: .*File too large; make room.*\n", done.stderr)
