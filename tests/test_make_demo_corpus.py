"""The demo corpus: LJSpeech's layout and durations, the same bytes in every run, and its errors."""

import importlib.util
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

SCRIPT = Path(__file__).parent.parent / "scripts" / "make_demo_corpus.py"
SPEC = importlib.util.spec_from_file_location("make_demo_corpus", SCRIPT)
demo = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(demo)


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def refused(*arguments: object, **options: object) -> str:
    """The one line that ends a run with status 2."""
    done = run(*arguments, **options)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .+\n", done.stderr)
    return done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def rows(folder: Path) -> list[list[str]]:
    lines = (folder / "metadata.csv").read_text(encoding="utf-8").splitlines()
    return [line.split("|") for line in lines]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chunks of short clips, made by one worker; not to be changed."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "corpus"
    done = run(folder, "--clips", 70, "--duration_scale", 0.4, "--workers", 1)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


# --- What is made


def test_layout_is_ljspeechs(corpus: Path) -> None:
    ids = [f"DM001-{i:04d}" for i in range(1, 71)]
    wavs = [f"wavs/{clip_id}.wav" for clip_id in ids]
    assert list(contents(corpus)) == ["corpus.json", "metadata.csv", *wavs]
    assert [row[0] for row in rows(corpus)] == ids
    assert all(len(row) == 3 and all(row) for row in rows(corpus))
    for wav in wavs:
        info = soundfile.info(corpus / wav)
        kind = (info.format, info.subtype, info.channels, info.samplerate)
        assert kind == ("WAV", "PCM_16", 1, 22050)
    assert json.loads((corpus / "corpus.json").read_text())["clips"] == 70


def test_every_clip_has_its_length_and_the_lengths_their_shares(corpus: Path) -> None:
    lengths = [soundfile.info(corpus / "wavs" / f"{row[0]}.wav").frames for row in rows(corpus)]
    assert lengths == demo.durations(70, seed=0, scale=0.4)
    edges = np.interp(np.arange(71) / 70, demo.DURATION_SHARES, demo.DURATION_FRAMES)
    edges = 256 * 0.4 * edges
    assert (np.sort(lengths) >= edges[:-1] - 0.5).all()
    assert (np.sort(lengths) <= edges[1:] + 0.5).all()


def test_clips_are_speech_at_a_readers_pace(corpus: Path) -> None:
    for clip_id, _, spoken in rows(corpus):
        samples, rate = soundfile.read(corpus / "wavs" / f"{clip_id}.wav", dtype="int16")
        samples = samples.astype(int)
        loud = np.flatnonzero(np.abs(samples) > demo.SILENCE)
        assert np.sqrt(np.mean(samples**2)) > 2000
        assert np.abs(samples).max() < 32767
        assert len(samples) - (loud[-1] - loud[0]) <= demo.PADDING[2] * rate + 1
        assert np.diff(loud).max() < 0.8 * rate  # no pause longer
        assert np.diff(np.flatnonzero(samples)).max() < 50  # nor digital silence, which has no log
        assert 6 < len(spoken) / (len(samples) / rate) < 20, spoken


def test_same_bytes_whatever_the_workers_and_after_an_interruption(
    corpus: Path, tmp_path: Path
) -> None:
    arguments = (tmp_path / "b", "--clips", 70, "--duration_scale", 0.4)
    assert run(*arguments, "--workers", 3).returncode == 0
    assert contents(tmp_path / "b") == contents(corpus)

    # As a run leaves it that was stopped in its second chunk.
    lines = (corpus / "metadata.csv").read_bytes().splitlines(keepends=True)
    (tmp_path / "b" / "metadata.csv").unlink()
    (tmp_path / "b" / "parts").mkdir()
    (tmp_path / "b" / "parts" / "00000.csv").write_bytes(b"".join(lines[:64]))
    (tmp_path / "b" / "wavs" / "DM001-0070.wav").rename(
        tmp_path / "b" / "wavs" / "DM001-0070.wav.part"
    )
    first = tmp_path / "b" / "wavs" / "DM001-0001.wav"
    made_at = first.stat().st_mtime_ns
    assert run(*arguments).returncode == 0
    assert contents(tmp_path / "b") == contents(corpus)
    assert first.stat().st_mtime_ns == made_at  # the finished chunk was left alone


def test_second_run_changes_nothing(corpus: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    done = run(corpus, "--clips", 70, "--duration_scale", 0.4)
    assert done.returncode == 0 and "already there, 70 clips" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*")} == before


def test_two_at_once_do_not_break_each_other(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    arguments = [folder, "--clips", 70, "--duration_scale", 0.4]
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        deadline = time.monotonic() + 60
        while not (folder / "corpus.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)  # so that it cannot end meanwhile
        try:
            line = refused(*arguments)
            assert line.startswith(f"error: {folder}: being made by process {first.pid}; wait for")
        finally:
            first.send_signal(signal.SIGCONT)
        assert "made, 70 clips" in first.communicate(timeout=60)[0]
    assert contents(folder) == contents(corpus)


def test_what_a_killed_run_leaves_does_not_hold_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with pytest.raises(KeyboardInterrupt), demo.held(folder):
        assert (folder / "lock").read_text() == str(os.getpid())
        raise KeyboardInterrupt
    assert contents(folder) == {}
    (folder / "lock").write_text("12345")
    with demo.held(folder):
        assert (folder / "lock").read_text() == str(os.getpid())


def test_given_transcripts_are_spoken(tmp_path: Path) -> None:
    texts = {
        "a_1": "The café -- it was 9 o'clock -- had closed.",
        "B.2": "Short.",
        "3-c": "A sentence of some more words takes more time to say.",
    }
    lines = "".join(f"{clip_id}|{text}\r\n" for clip_id, text in texts.items())
    (tmp_path / "texts.txt").write_bytes(b"\xef\xbb\xbf" + lines.encode())  # as Windows saves it
    done = run(tmp_path / "out", "--transcripts", tmp_path / "texts.txt")
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(tmp_path / "out") == [[clip_id, text, text] for clip_id, text in texts.items()]
    for clip_id, text in texts.items():
        seconds = soundfile.info(tmp_path / "out" / "wavs" / f"{clip_id}.wav").duration
        assert seconds == pytest.approx(demo.reading_seconds(text), rel=0.25)


# --- The law of the durations


def test_batches_pad_as_ljspeechs_do() -> None:
    """12.5 ms frames, 80:20, base batch size 16: RAND pads 32.0 %, SB next to nothing."""
    frames = np.array(demo.durations(13100, seed=0, scale=1.0)) // 276 + 1

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


def test_scale_keeps_the_shape_and_seed_the_stock() -> None:
    whole, scaled = demo.durations(500, 1, 1.0), demo.durations(500, 1, 0.35)
    assert np.abs(np.array(scaled) - 0.35 * np.array(whole)).max() <= 1
    assert whole != demo.durations(500, 2, 1.0)
    assert np.quantile(whole, 0.5) / 256 == pytest.approx(585, abs=5)


# --- The grammar


def test_grammar_has_every_rule_it_names_and_uses_every_rule() -> None:
    named = {
        part.removeprefix("^")
        for alternatives in demo.RULES.values()
        for alternative in alternatives
        for part in alternative
        if isinstance(part, str)
    }
    assert named <= {*demo.RULES, *demo.NUMBERS}
    assert {*demo.RULES, *demo.NUMBERS} == named | {"word", "phrase", "sentence"}


def test_grammar_writes_all_letters_many_words_and_no_digit_that_is_spoken() -> None:
    rng = random.Random(0)
    texts = [demo.write(rng.uniform(0.4, 10), rng) for _ in range(600)]
    allowed = set(string.ascii_letters + " .,;:!?'\"-")
    assert all(set(spoken) <= allowed for _, spoken in texts)
    assert set(string.ascii_letters) <= set("".join(written for written, _ in texts))
    assert not any("|" in written or "\n" in written for written, _ in texts)
    assert len({word for _, spoken in texts for word in re.findall(r"[a-z']+", spoken)}) > 700
    assert not any(re.search(r"\b[Aa] [AEIOUaeiou]", spoken) for _, spoken in texts)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (72, "seventy-two"),
        (305, "three hundred five"),
        (52_600, "fifty-two thousand six hundred"),
    ],
)
def test_numbers_in_words(number: int, words: str) -> None:
    assert demo.in_words(number) == words


@pytest.mark.parametrize(
    ("year", "words"),
    [
        (1600, "sixteen hundred"),
        (1905, "nineteen oh five"),
        (1815, "eighteen fifteen"),
        (1964, "nineteen sixty-four"),
    ],
)
def test_years_in_words(year: int, words: str) -> None:
    assert demo.year_in_words(year) == words


@pytest.mark.parametrize(
    ("number", "written", "spoken"),
    [
        (1, "1st", "first"),
        (12, "12th", "twelfth"),
        (20, "20th", "twentieth"),
        (22, "22nd", "twenty-second"),
        (83, "83rd", "eighty-third"),
        (99, "99th", "ninety-ninth"),
    ],
)
def test_ordinals(number: int, written: str, spoken: str) -> None:
    assert demo.ordinal(number) == (written, spoken)


# --- Errors: one line, with what to do, and status 2


def test_other_arguments_do_not_touch_a_corpus(corpus: Path) -> None:
    before = contents(corpus)
    line = refused(corpus, "--clips", 71, "--duration_scale", 0.4)
    assert f"{corpus}: holds a corpus with clips=70, not 71;" in line
    assert contents(corpus) == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "metadata.csv").write_text("precious")
    assert f"{tmp_path}: holds metadata.csv that this program did not make" in refused(tmp_path)
    (tmp_path / "corpus.json").write_text("{")
    assert "corpus.json: not a JSON object" in refused(tmp_path)
    assert (tmp_path / "metadata.csv").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--clips", "0"], "--clips 0: give 1 to 249750"),
        (["x", "--clips", "ten"], "--clips: invalid int value: 'ten'; --help"),
        (["x", "--workers", "0"], "--workers 0: give 1 or more"),
        (["x", "--duration_scale", "0.2"], "--duration_scale 0.2: give 0.35 ("),
        (["x", "--duration_scale", "nan"], "--duration_scale nan: give 0.35 ("),
        (["x", "--seeds", "1"], "unrecognized arguments: --seeds 1; --help"),
        ([], "the following arguments are required: DIR; --help shows the arguments"),
        (["x", "--transcripts", "t", "--clips", "3"], "--clips: --transcripts decides it;"),
        (["x", "--transcripts", "t"], "--transcripts t: No such file or directory; give a text"),
        (["a_file/x"], "Not a directory; give a folder that you can write to"),
        (["a_file"], "Not a directory; give a folder that you can write to"),
    ],
)
def test_arguments_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    assert message in refused(*arguments, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"no bar", "'no bar' has not one bar; write it as ID|text"),
        (b"", "'' has not one bar"),
        (b"b|one|two", "'b|one|two' has not one bar"),
        (b"../b|one", "ID '../b' cannot name a file"),
        (b".b|one", "ID '.b' cannot name a file"),
        (b"A|one", "ID 'A' is on line 1 too; use each ID once"),
        (b"b|...", "text '...' cannot be spoken; write words"),
        (b"b|one\ttwo", r"text 'one\ttwo' cannot be spoken; write words and plain spaces"),
        (b"b|\xff", r"b'b|\xff' is not UTF-8; save the file as UTF-8"),
    ],
)
def test_transcripts_refused(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes(b"a|Good.\n" + line + b"\n")
    with pytest.raises(demo.UserError, match=re.escape(f"{path}:2: {message}")):
        demo.read_transcripts(path)


def test_bad_transcripts_are_named_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a Good.\n")
    line = refused(tmp_path / "out", "--transcripts", tmp_path / "texts.txt")
    assert f"{tmp_path}/texts.txt:1: 'a Good.' has not one bar; write it as ID|text" in line
    assert not (tmp_path / "out").exists()


def test_missing_engine_says_what_to_install(tmp_path: Path) -> None:
    program = (
        f"import runpy, sys; sys.modules['espeakng_loader'] = None; sys.argv[1:] = ['x']; "
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (
        2,
        "error: Python package espeakng_loader is missing; "
        "pip install espeakng-loader==0.2.4 numpy tqdm\n",
    )


def test_broken_engine_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(demo.UserError, match="pip install --force-reinstall espeakng-loader"):
        demo.Engine(str(tmp_path / "libespeak-ng.so"), str(tmp_path))


def test_too_little_room_is_said_beforehand(tmp_path: Path) -> None:
    with pytest.raises(demo.UserError, match=r"1000000000\.00 GB are needed and .* fewer --clips"):
        demo.check_free_space(tmp_path / "not" / "yet", 1e18)


def test_full_disk_is_reported_and_leaves_nothing_half_made(tmp_path: Path) -> None:
    def limit_file_size() -> None:  # a write beyond it fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    line = refused(tmp_path / "out", "--clips", 3, preexec_fn=limit_file_size)
    assert re.search(r"out/wavs/DM001-0001\.wav: File too large; free some room and run", line)
    assert list(contents(tmp_path / "out")) == ["corpus.json"]
    assert run(tmp_path / "out", "--clips", 3).returncode == 0  # with room it goes on
    assert len(rows(tmp_path / "out")) == 3


def test_help_tells_a_stranger_what_it_makes() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "metadata.csv" in done.stdout and "espeakng-loader==0.2.4" in done.stdout
