"""scripts/prepare_corpus.py on tiny corpora of tones, in every layout."""

import os
import re
import resource
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from test_prepare_ljspeech import make_corpus, printed_settings

from cli import UserError
from corpus.audio import MelSpectrogram
from corpus.clips import Clip, load_clips
from hparams import create_hparams
from scripts import prepare_corpus as prepare

ROOT = Path(__file__).resolve().parent.parent
RATE = 22050


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def c():
    """A corpus in LJSpeech's layout in the current folder."""
    make_corpus("c")


def call(command):
    prepare.main(shlex.split(command))


def refusal(command):
    """The lines in which main refuses these arguments."""
    with pytest.raises(UserError) as error:
        call(command)
    return str(error.value).splitlines()


def tone(seconds=0.1, rate=RATE, hertz=220, peak=0.3):
    return peak * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def write(path, content=None, rate=RATE, **options):
    """Write a text, or a sound (a tone unless it is given)."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        Path(path).write_text(content)
    else:
        samples = tone(rate=rate) if content is None else content
        soundfile.write(path, samples, rate, **options)


def listed(name):
    """The lines of both lists, sorted."""
    paths = (Path(f"filelists/{name}_{part}.txt") for part in ("train", "val"))
    return sorted(line for path in paths for line in path.read_text().splitlines())


# Layouts


def make_vctk(audio, speakers=("p225", "p226", "s5")):
    """``audio``: format of an audio file's path."""
    for speaker in speakers:
        for i in range(3):
            write(audio.format(f"{speaker}/{speaker}_{i:03d}"))
            write(f"c/txt/{speaker}/{speaker}_{i:03d}.txt", f"Text {i}\n of {speaker}. ")


def make_libritts(top, speakers=("84", "1089")):
    for speaker in speakers:
        for i in range(3):
            clip = f"{top}/{speaker}/7/{speaker}_7_{i}"
            write(f"{clip}.wav")
            write(f"{clip}.normalized.txt", f"Text {i} of {speaker}.")
            write(f"{clip}.original.txt", f"TEXT {i} OF {speaker}.")


def test_vctk(capsys):
    make_vctk("c/wav48/{}.wav")
    write("c/README.txt", "Read me.")
    call("c --name x --speaker p226")
    assert listed("x") == [f"wav48/p226/p226_00{i}.wav|Text {i} of p226." for i in range(3)]
    assert capsys.readouterr().out.startswith("c: 3 clips\n")
    call("c --name y")  # the folders may be chapters of one speaker's book
    assert len(listed("y")) == 9
    note = "note: c: has audio in 3 folders, as wav48/p225; if that is a speaker each, name one by"
    assert capsys.readouterr().out.startswith(note)
    (line,) = refusal("c --name x --speaker p1")
    assert line == "--speaker p1: c: has no wav or flac with a text; --help says where to put them"


def test_vctk_of_2019():
    """Version 0.92: flac, from two microphones."""
    make_vctk("c/wav48_silence_trimmed/{}_mic1.flac")
    make_vctk("c/wav48_silence_trimmed/{}_mic2.flac")
    call("c --name x --speaker s5")
    expected = [f"wav48_silence_trimmed/s5/s5_00{i}_mic1.flac|Text {i} of s5." for i in range(3)]
    assert listed("x") == expected


@pytest.mark.parametrize("top", ["c", "c/LibriTTS/dev-clean"])
def test_libritts(top):
    make_libritts(top)
    call("c --name x --speaker 1089")
    prefix = f"{top}/1089/7/1089_7"[2:]
    assert listed("x") == [f"{prefix}_{i}.wav|Text {i} of 1089." for i in range(3)]


@pytest.mark.parametrize("wav", ["{}.wav", "deep/er/{}.flac", "wav/{}.wav"])
def test_a_text_beside_each_clip(wav):
    for i in range(3):
        write(f"c/{wav}".format(i))
        text = wav.replace("wav/", "txt/")
        write(Path(f"c/{text}".format(i)).with_suffix(".txt"), f"\ufeffText\n{i}")
    write("c/._0.wav", "what a Mac leaves")
    call("c --name x")
    assert listed("x") == [f"{wav.format(i)}|Text {i}" for i in range(3)]


@pytest.mark.parametrize("wav", ["wavs/{}.wav", "wavs/{}.flac", "wav/{}.flac", "{}.flac"])
def test_a_table_of_texts(wav):
    for i in range(3):
        write(f"c/{wav}".format(i))
    write("c/metadata.csv", "0|Text 0\n1|No. 1|Text  1\n2|Text 2\n")
    call("c --name x")
    assert listed("x") == [f"{wav.format(i)}|Text {i}" for i in range(3)]


def test_what_is_wrong_with_pairs_is_in_one_list():
    for name in ("a", "b", "c", "d", "e"):
        write(f"c/{name}.wav")
        write(f"c/{name}.txt", "A text")
    write("c/b.txt", "This | that")
    Path("c/c.txt").unlink()
    write("c/d.flac")
    Path("c/e.txt").write_bytes(b"caf\xe9")
    for line, start in zip(
        refusal("c --name x"),
        (
            "c/b.txt:1: 'b.wav|This | that' cannot be a line of a filelist; leave out |",
            "c/c.txt:1: c.wav: its text, this file, is missing; write it, or remove the audio",
            "c/d.txt:1: c/d.wav and c/d.flac have the same name; keep one",
            "c/e.txt:1: byte 0xe9 is not UTF-8",
        ),
        strict=True,
    ):
        assert line.startswith(start)
    assert os.listdir() == ["c"]


# LJSpeech's layout, checks, lists


def test_all_problems_of_a_corpus_are_in_one_list_and_nothing_is_written(c):
    """Those of the table's form, beside one each of a header, of samples and of a text."""
    rows = {
        "ID|text|normalised text": "ID: no such wav or flac in wavs/, wav/ or beside this list",
        "C-0|one|one": "c/wavs/C-0.wav: 2 channels",
        "C-1|silent|silent": "c/wavs/C-1.wav: is silent",
        "C-2||  ": "text '' has nothing to speak",
        "C-3|caf\udce9|caf": "byte 0xe9 is not UTF-8",
        "|no id|no id": ": no such wav or flac",
        "../C-7|up|up": "../C-7: no such wav or flac",
        "C-8/x|in|in": "C-8/x: no such wav or flac",
        "one column": "1 column(s); use ID|text",
        "x|a|b|c": "4 column(s); use ID|text",
        "C-4.wav|a|b": "C-4.wav: no such wav or flac",
    }
    good = "\ufeffC-7|two columns, " + "however long " * 200
    Path("c/metadata.csv").write_text("\n".join([good, "", *rows]), errors="surrogateescape")
    soundfile.write("c/wavs/C-0.wav", np.ones((9000, 2)), 22050)
    soundfile.write("c/wavs/C-1.wav", np.zeros(9000), 22050)
    shutil.copy("c/wavs/C-7.wav", "c/C-7.wav")  # which the ID ../C-7 would find
    for n, (line, start) in enumerate(zip(refusal("c --name x"), rows.values(), strict=True), 3):
        assert line.startswith(f"c/metadata.csv:{n}: {start}")
    assert os.listdir() == ["c"]
    Path("filelists").touch()  # said before the corpus is read
    assert refusal("c --name x")[0].startswith("filelists: cannot be written")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("c --name a+b", "--name a+b: use letters"),
        ("c --name x --train_fraction 1", "--train_fraction 1.0: use a value"),
        ("c --name x --sampling_rate 0", "--sampling_rate 0: use 4000 to 192000"),
        (f"c --name x --sampling_rate {'9' * 400}", "--sampling_rate 999"),
        ("nowhere --name x", "nowhere: no such folder; give the corpus's"),
        ("one --name x", "one: 1 clips; a split needs at least 2"),
        ("c", "the following arguments are required: --name"),
        ("c --name x --speaker p225", "--speaker p225: c/metadata.csv names no speakers"),
        ("c/wavs --name x", "c/wavs: has no wav or flac with a text; --help says where"),
        ("c --name x --trim_db 60", "--trim_db 60.0: needs --convert_to"),
        ("c --name x --convert_to d --trim_db nan", "--trim_db nan: use 0 to 120"),
        ("c --name x --convert_to c/d", "--convert_to c/d: is in the corpus; use another folder"),
        ("c --name x --convert_to c/../c", "--convert_to c/../c: is in the corpus"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(c, command, message):
    make_corpus("one", 1)
    (line,) = refusal(command)
    assert line.startswith(message) and sorted(os.listdir()) == ["c", "one"]


RATES = [4000, 5120, 8000, 11025, 16000, 22050, 24000, 44100, 48000, 96000]


@pytest.mark.parametrize("rate", RATES)
def test_settings_follow_from_the_rate_and_no_mel_band_is_empty(rate, capsys):
    folder = "my data, 'all' [of] it"
    make_corpus(folder, 2, samples=rate // 10, rate=rate)
    call(f'"{folder}" --sampling_rate {rate} --name mine')
    hparams = create_hparams(printed_settings(capsys))
    assert (hparams.data_dir, hparams.sampling_rate) == (folder, rate)
    assert hparams.mel_fmax == min(8000, rate / 2)
    hop, window, fft = hparams.hop_length, hparams.win_length, hparams.filter_length
    assert 0 <= hop - 0.0125 * rate < 1 and 0 <= window - 0.05 * rate < 1
    assert window <= fft < 2 * window and fft.bit_count() == 1  # the next power of two
    assert (MelSpectrogram(hparams).mel_basis.sum(1) > 0).all()
    assert load_clips(hparams.training_files, hparams)[0].n_frames == rate // 10 // hop + 1
    other = 32000 if rate != 22050 else 48000
    line, _ = refusal(f'"{folder}" --name x --sampling_rate {other}')
    problem, settings = re.fullmatch(
        r"(.*) \(scripts/.*--convert_to DIR\), or set (.*)", line
    ).groups()
    assert problem.endswith(f"C-0.wav: sampling rate {rate} Hz; resample it to {other} Hz")
    given = prepare.format_overrides(prepare.audio_settings(other))
    expected = prepare.audio_settings(rate).values()
    changed = create_hparams(settings, base=create_hparams(given))
    assert tuple(getattr(changed, name) for name in prepare.audio_settings(rate)) == tuple(expected)


def test_a_problem_that_many_lines_share_is_reported_once():
    make_corpus("c", 12)
    write("c/wavs/C-7.wav", np.zeros(9000))
    write("c/wavs/C-9.wav", rate=16000)
    lines = refusal("c --name x --sampling_rate 48000")
    assert [line.partition(" ")[0] for line in lines] == ["c/metadata.csv:1:", "c/metadata.csv:10:"]
    assert lines[0].endswith("(as in 10 more lines)") and "C-0.wav: sampling rate" in lines[0]


def split(ids, train_fraction=0.8, seed=0):
    clips = [Clip(f"c/wavs/{n}.wav", "text", [i], 1, "", None) for i, n in enumerate(ids)]
    parts = prepare.split(clips, "c", train_fraction, seed)
    return [[line[5:].removesuffix(".wav|text") for line in part] for part in parts]


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


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.floats(0.1, 0.9))
def test_takes_of_a_sentence_are_on_one_side(sentences, fraction):
    clips = [Clip(f"{i}.wav", str(n), [n], 1, "", None) for i, n in enumerate(sentences)]
    if len({*sentences}) == 1:
        with pytest.raises(UserError, match=r"^c: all clips have the same text"):
            prepare.split(clips, "c", fraction, seed=0)
        return
    train, val = (
        [line.split("|") for line in part] for part in prepare.split(clips, ".", fraction, seed=0)
    )
    assert {text for _, text in train}.isdisjoint(text for _, text in val) and train and val
    assert sorted(int(path[:-4]) for path, _ in train + val) == [*range(len(sentences))]
    largest = max(map(sentences.count, sentences))
    assert abs(len(train) - fraction * len(sentences)) <= largest


def test_another_split_does_not_replace_lists(c, capsys, monkeypatch):
    train, val = Path("filelists/x_train.txt"), Path("filelists/x_val.txt")
    call("c --name x")
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in (train, val)]
    call("c --name x")
    assert f"{val}: 2 clips, already there\n" in capsys.readouterr().out
    call("c --train_fraction 0.6 --name other")
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "check_samples", None)  # refused before samples are read
        for option, n in (("--train_fraction 0.6", "5 (5 in both)"), ("--seed 1", "6 (")):
            (line,) = refusal(f"c --name x {option}")
            assert line.startswith(f"{train}: already has 6 clips, this run would write {n}")
    assert before == [(path.read_bytes(), path.stat().st_mtime_ns) for path in (train, val)]
    train.unlink()  # as a run leaves it that was killed between the two
    (line,) = refusal("c --name x --train_fraction 0.6")
    assert line.startswith(f"{val}: already has 2 clips, this run would write 3 ")
    assert not train.exists()
    call("c --name x")
    assert train.read_bytes() == before[0][0]


def test_samples_are_read_before_lists_are_written(c):
    soundfile.write("c/wavs/C-1.wav", np.zeros(9000), 22050)
    (line,) = refusal("c --name x")
    assert "C-1.wav: is silent" in line and os.listdir() == ["c"]


# Conversion


def convert(samples, rate=RATE, options="", **written):
    """The samples of a clip that was converted, in a corpus of two."""
    for name in ("a", "b"):
        write(f"s/{name}.wav", samples, rate, **written)
        write(f"s/{name}.txt", f"Text {name}.")
    call(f"s --name x --convert_to d {options}")
    with soundfile.SoundFile("d/wavs/a.wav") as file:
        assert (file.channels, file.subtype) == (1, "PCM_16")
        return file.read()


@pytest.mark.parametrize(("before", "after"), [(48000, 22050), (16000, 22050), (44100, 16000)])
def test_resampling_keeps_frequency_level_and_length(before, after):
    samples = convert(tone(0.5, before, hertz=441), before, f"--sampling_rate {after}")
    expected = tone(0.5, after, hertz=441)
    assert abs(len(samples) - len(expected)) <= 1
    middle = slice(len(expected) // 10, -len(expected) // 10)
    np.testing.assert_allclose(samples[: len(expected)][middle], expected[middle], atol=2e-4)


def test_nothing_above_the_new_band_is_folded_into_it():
    samples = convert(tone(0.5, 48000, hertz=441) + tone(0.5, 48000, hertz=14_000), 48000)
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    assert spectrum[len(spectrum) // 4 :].max() < 1e-4 * spectrum.max()


@pytest.mark.parametrize(
    "written",
    [{"subtype": "PCM_16"}, {"subtype": "PCM_24"}, {"subtype": "DOUBLE"}, {"format": "AIFF"}],
)
def test_samples_of_the_right_rate_stay_as_they_are(written):
    steps = np.random.default_rng(0).integers(-(2**15), 2**15, 3000)
    assert (convert(steps / 2**15, **written) * 2**15 == steps).all()


def test_channels_are_averaged():
    left, right = tone(hertz=200), tone(hertz=900, peak=0.1)
    samples = convert(np.stack([left, right], 1), subtype="FLOAT")
    np.testing.assert_allclose(samples, (left + right) / 2, atol=2**-15)


@pytest.mark.parametrize("hiss", [0, 1e-4])
def test_trimming_leaves_a_margin_and_says_how_much_it_cut(capsys, hiss):
    samples = hiss * np.random.default_rng(0).uniform(-1, 1, RATE)
    start, end = RATE // 2, 3 * RATE // 4
    samples[start:end] += tone(1)[: end - start]
    trimmed = convert(samples, options="--trim_db 40", subtype="FLOAT")
    n = len(trimmed)
    matches = [i for i in range(RATE - n + 1) if np.allclose(samples[i : i + n], trimmed, 0, 1e-4)]
    (first,) = matches
    for margin in (start - first, first + n - end):
        assert 0.05 <= margin / RATE < 0.075
    seconds = 1 - n / RATE
    noise = 120 if not hiss else pytest.approx(20 * np.log10(0.3 / 1e-4 * 1.5**0.5), abs=1)
    printed = capsys.readouterr().out
    line = (
        f"trimmed {2 * seconds:.1f} of 2.0 s, {seconds:.2f} s a clip; background noise is (.*) dB "
    )
    assert float(re.search(line, printed)[1]) == noise


def test_what_exceeds_full_scale_is_scaled_down_and_said(capsys):
    """A square wave does once its overtones are cut off; its neighbour keeps its loudness."""
    square = 0.99 * np.sign(tone(rate=48000, hertz=300) + 1e-9)
    write("s/b.wav", square, 48000)
    write("s/b.txt", "Loud.")
    write("s/a.wav", tone(rate=48000), 48000)
    write("s/a.txt", "As loud as it was.")
    call("s --name x --convert_to d")
    (note,) = re.findall("note: .*", capsys.readouterr().out)
    assert re.fullmatch(r"note: 1 clip\(s\) .*: d/wavs/b.wav most, by (0\.[1-9]|1\.\d)\d dB", note)
    assert soundfile.read("d/wavs/b.wav")[0].max() > 0.999
    assert soundfile.read("d/wavs/a.wav")[0].max() == pytest.approx(0.3, abs=0.005)


def make_pairs(n=3):
    for i in range(n):
        write(f"s/x/{i}.wav", rate=16000)
        write(f"s/x/{i}.txt", f"Text {i}.")


def files(folder):
    """Content and time of every file."""
    paths = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_what_was_converted_is_a_corpus_with_the_same_split(capsys):
    make_pairs(10)  # so many are converted by several processes
    before = files("s")
    call("s --name here --sampling_rate 16000")
    call("s --name there --convert_to d+e")
    hparams = create_hparams(printed_settings(capsys))
    assert hparams.data_dir == "d+e" and files("s") == before
    assert len(load_clips(hparams.training_files, hparams)) == 8
    call("d+e --name again")
    here, there, again = (
        Path(f"filelists/{name}_train.txt").read_text() for name in ("here", "there", "again")
    )
    assert there == again == here.replace("x/", "wavs/x/")
    wavs = [f"d+e/wavs/x/{i}.wav" for i in range(10)]
    assert sorted(files("d+e")) == ["d+e/metadata.csv", *wavs]


def test_other_files_are_never_replaced():
    make_pairs()
    write("d/mine", "mine")
    before = files("d")
    (line,) = refusal("s --name x --convert_to d")
    assert line == "d: already has files, such as mine; give another --convert_to"
    assert files("d") == before and not Path("filelists").exists()
    call("s --name x --convert_to e")
    before = files("e")
    (line,) = refusal("s --name y --convert_to e")
    assert line.endswith("give another --convert_to, or prepare e itself, which is a corpus")
    (line,) = refusal("s --name x --convert_to f")
    assert line.startswith("filelists/x_train.txt: exists already; give another --name")
    assert files("e") == before and not Path("f").exists()
    write("f", "a file")
    assert refusal("s --name y --convert_to f")[0].startswith("f: cannot be written (")


@pytest.mark.parametrize("n", [3, 10])
def test_a_full_disk_ends_in_one_line_and_the_rest_is_kept(monkeypatch, n):
    make_pairs(n)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        (line,) = refusal("s --name x --convert_to d")
        assert re.fullmatch(r"d: 0\.00 GB needed .*, or give another --convert_to", line)
    shutil.rmtree("d")
    assert os.listdir() == ["s"]
    write("s/x/1.wav", tone(1, 16000), 16000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))  # fails as a full disk does
    try:
        (line,) = refusal("s --name x --convert_to d")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.fullmatch(r"d/wavs/x/1.wav: cannot be written \(.*\); make room, remove .*", line)
    assert not Path("d/metadata.csv").exists()  # it is no corpus


def test_audio_that_cannot_be_converted_is_in_one_list():
    write("s/0.wav", tone(0.5), format="FLAC")
    cut = Path("s/0.wav").read_bytes()
    bad = {
        "1.flac": ("not a readable sound file|not as long as", cut[: len(cut) // 2]),
        "2.wav": ("has a sample of nan, beyond", tone() * np.nan),
        "3.wav": ("has a sample of 30000, beyond", 1e5 * tone()),
    }
    for name, (_, content) in bad.items():
        if isinstance(content, bytes):
            Path("s", name).write_bytes(content)
        else:
            write(f"s/{name}", content, subtype="FLOAT")
    for i in range(4):
        write(f"s/{i}.txt", f"Text {i}.")
    lines = refusal("s --name x --convert_to d")
    for (name, (problem, _)), line in zip(bad.items(), lines, strict=True):
        assert re.match(rf"s/{name[0]}\.txt:1: s/{name}: ({problem})", line)
    assert not Path("d/metadata.csv").exists() and not Path("filelists").exists()
