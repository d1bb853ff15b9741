"""scripts/prepare_corpus.py and prepare_ljspeech.py on tiny corpora of tones."""

import os
import shlex
import shutil
import tarfile
from collections import defaultdict
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from cli import UserError
from corpus.audio import MelSpectrogram
from corpus.clips import load_clips
from hparams import HParams, create_hparams
from scripts import prepare_corpus, prepare_ljspeech
from training.checkpoint import load_checkpoint

RATE = 22050


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def tone(seconds=0.1, rate=RATE, hertz=220):
    return 0.3 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def write(path, content=None, rate=RATE, **options):
    """Writes a text, or a sound (a tone unless it is given)."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        Path(path).write_text(content, encoding="utf-8", errors="surrogateescape")
    else:
        soundfile.write(path, tone(rate=rate) if content is None else content, rate, **options)


def call(command):
    prepare_corpus.main(shlex.split(command))


def lists(name):
    """The lines of both filelists."""
    paths = (Path(f"filelists/{name}_{part}.txt") for part in ("train", "val"))
    return [path.read_text().splitlines() for path in paths]


def printed_settings(printed):
    """The settings of the train.py command that was printed last."""
    command = shlex.split(printed.splitlines()[-1])
    *_, start, _, overrides = command
    if start == "voice":
        return create_hparams(overrides, "voice")
    assert start == "--warm_start"
    saved = HParams(**load_checkpoint(Path(command[command.index("-c") + 1]))["hparams"])
    return create_hparams(overrides, None, saved)


def make_pairs(*samples, rate=RATE, **options):
    for i, sound in enumerate(samples):
        write(f"s/x/{i}.wav", sound, rate, **options)
        write(f"s/x/{i}.txt", f"Text {i}.")


# Layouts


LAYOUTS = [  # a sound, where its text is, the header and the lines there, the speaker
    ("wavs/{}.wav", "metadata.csv", "", "{0}|No. {0}|Text,  {0}", ""),
    ("wav/{}.flac", "metadata.csv", "file_name,transcription", 'wav/{0}.flac,"Text, {0}"', ""),
    ("{}.flac", "metadata.txt", "ID|text|normalised text", "{0}.wav|Text|Text, {0}", ""),
    ("a/U\u0308{}.wav", "t.tsv", "client_id\tpath\tsentence", 'a1\tÜ{0}.mp3\t"Text, {0}"', ""),
    ("wavs/{}.WAV", "t.txt", "0.wav|Of bob.|bob", "D:\\c\\wavs\\{0}.WAV|Text, {0}|ann", "ann"),
    ("c/{}.wav", "a.jsonl", "", '{{"a": "/x/c/{0}.mp3", "s": 1.{0}, "text": "Text, {0}"}}', ""),
    ("deep/er/{}.flac", "deep/er/{}.txt", "", "Text,\n{}", ""),
    ("dev/p1/7/{}.wav", "dev/p1/7/{}.normalized.txt", "", "Text, {}", "p1"),  # LibriTTS
    ("wav48/p1/{}.wav", "txt/p1/{}.txt", "", "Text, {}", "p1"),  # VCTK, and its version of 2019
    ("wav48_silence_trimmed/p1/{}_mic1.flac", "txt/p1/{}.txt", "", "Text, {}", "p1"),
]


@pytest.mark.parametrize(("sound", "file", "header", "line", "speaker"), LAYOUTS)
def test_all_layouts_are_read(sound, file, header, line, speaker):
    """In folders that are links, too. Hidden files are no data."""
    Path("elsewhere").mkdir()
    Path("c").mkdir()
    Path("c/wavs").symlink_to("../elsewhere")
    lines = defaultdict(lambda: [f"\ufeff{header}"])
    for i in range(3):
        write(f"c/{sound.format(i)}")
        write(f"c/{sound.replace('mic1', 'mic2').format(i)}")
        write(f"c/.hidden/{sound.format(i)}")
        lines[file.format(i)].append(line.format(i))
    for name, content in lines.items():
        write(f"c/{name}", "\n".join(content))
    write("c/._0.wav", "what a Mac leaves")
    write("c/txt/p1/README.txt", "Read me.")
    if speaker:
        write("c/p2/3.wav")  # without a text
    call(f"c --name x --speaker '{speaker}'")
    train, val = lists("x")
    assert sorted(train + val) == [f"{sound.format(i)}|Text, {i}" for i in range(3)]


NAMES = st.text("a |\n\r\\+.é\u0301\ufeff\u2028,'", min_size=1, max_size=5)
NAMES = st.sets(NAMES.filter(lambda name: name[0] != "."), min_size=2, max_size=3)


@hypothesis.example({"a", 82 * "長"}, True)  # as long as file systems allow
@given(NAMES, st.booleans())
def test_training_reads_the_list_of_any_names(names, converting):
    """Or a name is refused, and nothing is written."""
    n, texts = len(os.listdir()), {name: f"Text {i}" for i, name in enumerate(names)}
    for name, text in texts.items():
        write(f"a{n}/{name}.wav")
        write(f"a{n}/{name}.txt", text)
    try:
        call(f"a{n} --name {n}" + f" --convert_to b{n}" * converting)
    except UserError as error:
        assert "has a |" in str(error) and len(os.listdir()) == n + 1
    else:
        hparams = HParams(data_dir=f"{'ab'[converting]}{n}")
        clips = load_clips(f"filelists/{n}_train.txt+filelists/{n}_val.txt", hparams)
        assert {Path(clip.path).stem: clip.text for clip in clips} == texts


@pytest.mark.parametrize("rate", [5120, 11025, 22050, 96000])
def test_the_printed_command_has_settings_that_fit_the_clips(rate, capsys):
    folder = "my data, 'all' [of] it"
    for i in range(2):
        write(f"{folder}/{i}.wav", rate=rate)
        write(f"{folder}/{i}.txt", f"Text {i}")
    call(f'"{folder}" --sampling_rate {rate} --name mine --text_cleaners english_cleaners')
    hparams = printed_settings(capsys.readouterr().out)
    (clip,) = load_clips(hparams.training_files, hparams)
    assert hparams.batch_size == 1 and hparams.text_cleaners == ("english_cleaners",)
    hop, window, fft = hparams.hop_length, hparams.win_length, hparams.filter_length
    if rate == 22050:  # those of the voice that the training starts from
        assert (hop, window, fft) == (256, 1024, 1024)
    else:
        assert 0 <= hop - 0.0125 * rate < 1 and 0 <= window - 0.05 * rate < 1
        assert window <= fft < 2 * window and fft.bit_count() == 1  # the next power of two
    assert (MelSpectrogram(hparams).mel_basis.sum(1) > 0).all()
    assert clip.n_frames == rate // 10 // hop + 1


def test_the_alphabet_of_a_corpus_has_all_characters_that_can_be_symbols(capsys):
    texts = "Ёж @ дом_", "ежа 12", "Е\u0308ж ежа дом", "дом_ ж", "ежа, «ё» @ е, жж"
    for i in range(len(texts)):
        write(f"c/wavs/{i}.wav")
    write("c/metadata.csv", "".join(f"{i}|{text}\n" for i, text in enumerate(texts)))
    call("c --name x --text_cleaners basic_cleaners")
    printed = capsys.readouterr().out
    assert "note: c/metadata.csv:1: '_' (U+005F) has no symbol" in printed
    assert printed_settings(printed).symbols == " ,12«»адежмоё@"


# The split


WORDS = ["one", "ONE", "two", "three", "four", "five"]
SENTENCES = st.lists(st.sampled_from(WORDS), min_size=2, max_size=20)


@hypothesis.settings(max_examples=20)
@given(SENTENCES, st.randoms())
def test_takes_of_a_sentence_are_on_one_side_in_any_order(sentences, random):
    texts = [text.lower() for text in sentences]
    hypothesis.assume(len({*texts}) > 1)
    rows, splits = [f"{i}.wav|{text}" for i, text in enumerate(sentences)], []
    for i in range(len(rows)):
        write(f"c/{i}.wav")
    for _ in range(2):
        shutil.rmtree("filelists", ignore_errors=True)
        random.shuffle(rows)
        write("c/metadata.csv", "\n".join(rows))
        call("c --name x --text_cleaners basic_cleaners")
        splits.append([{*part} for part in lists("x")])
    assert splits[0] == splits[1] and set.union(*splits[0]) == {*rows}
    train, val = ([row.lower().partition("|")[2] for row in part] for part in splits[0])
    assert train and val and {*train}.isdisjoint(val)
    assert abs(len(train) - 0.8 * len(rows)) <= max(map(texts.count, texts))


# Conversion


@pytest.mark.parametrize(("before", "after"), [(48000, 22050), (16000, 22050), (44100, 16000)])
def test_conversion_averages_channels_and_folds_nothing(before, after):
    """The second has a tone above the new band, or one within it."""
    high = 882 if before < after else 14_000
    left, right = tone(0.5, before, hertz=441), tone(0.5, before, high)
    make_pairs(np.stack([left, right], 1), tone(rate=before), rate=before, subtype="FLOAT")
    call(f"s --name x --convert_to d --sampling_rate {after}")
    with soundfile.SoundFile("d/wavs/x/0.wav") as file:
        assert (file.channels, file.subtype, file.samplerate) == (1, "PCM_16", after)
        samples = file.read()
    expected = (tone(0.5, after, 441) + tone(0.5, after, high) * (high < after / 2)) / 2
    assert abs(len(samples) - len(expected)) <= 1
    middle = slice(len(expected) // 10, -len(expected) // 10)
    np.testing.assert_allclose(samples[: len(expected)][middle], expected[middle], atol=2e-4)


def test_samples_of_the_right_rate_stay_as_they_are_and_trimming_leaves_a_margin():
    steps = np.random.default_rng(0).integers(-(2**15), 2**15, 3000)
    samples, speech = np.zeros(RATE), slice(RATE // 2, 3 * RATE // 4)
    samples[speech] = tone(1)[speech]
    make_pairs(steps / 2**15, samples, subtype="PCM_24")
    call("s --name x --convert_to d --trim_db 40")
    assert (soundfile.read("d/wavs/x/0.wav", dtype="int16")[0] == steps).all()
    loud = np.flatnonzero(trimmed := soundfile.read("d/wavs/x/1.wav")[0])
    assert loud[-1] - loud[0] == pytest.approx(RATE // 4, abs=5)
    for margin in (loud[0], len(trimmed) - loud[-1]):
        assert 0.05 <= margin / RATE < 0.075


def test_what_was_converted_is_a_corpus_with_the_same_split(capsys):
    make_pairs(*[tone(rate=16000)] * 10, rate=16000)
    call("s --name here --sampling_rate 16000")
    call("s --name there --convert_to d+e")
    hparams = printed_settings(capsys.readouterr().out)
    assert hparams.data_dir == "d+e" and len(load_clips(hparams.training_files, hparams)) == 8
    call("d+e --name again")
    same = [[f"wavs/{line}" for line in part] for part in lists("here")]
    assert lists("there") == lists("again") == same


@pytest.mark.parametrize(
    ("channels", "problem"),
    [
        ((0, 0), "is silent"),
        ((1, -0.95), "its 2 channels cancel each other out; keep one"),
        ((0.5, -0.6, 0.1), "its 3 channels cancel each other out; keep one"),
        ((0.6, -0.2), None),
        ((1, 0, 0, 0, 0, 0), None),
    ],
)
def test_channels_that_cancel_each_other_out_are_refused(channels, problem):
    make_pairs(*[np.outer(tone(), channels)] * 2)
    with pytest.raises(UserError, match=problem) if problem else nullcontext():
        call("s --name x --convert_to d")
    assert Path("d").exists() == (not problem)


# LJSpeech


def test_ljspeech_is_extracted_checked_and_listed(monkeypatch, capsys):
    """From an archive that was downloaded. A damaged archive is refused."""
    corpus, archive = Path("my data/LJSpeech-1.1"), Path("my data/LJSpeech-1.1.tar.bz2")
    write("train_ids.txt", "C-0\nC-2\n")
    write("val_ids.txt", "C-1\n")
    write("c/metadata.csv", "".join(f'C-{i}|No. {i}|number {i} "as read.\n' for i in range(3)))
    for i in range(3):
        write(f"c/wavs/C-{i}.wav")
    archive.parent.mkdir()
    with tarfile.open(archive, "w:bz2") as tar:
        tar.add("c", corpus.name)
    whole = archive.read_bytes()
    monkeypatch.setattr(prepare_ljspeech, "ID_LISTS", [Path("train_ids.txt"), Path("val_ids.txt")])
    monkeypatch.setattr(prepare_ljspeech, "SHA256", sha256(whole).hexdigest())
    monkeypatch.setattr(prepare_ljspeech, "EXTRACTED_SIZE", 1)
    monkeypatch.setattr(prepare_ljspeech, "URL", "http://127.0.0.1:1/")  # where nothing is
    monkeypatch.setenv("no_proxy", "*")

    write(archive, "damaged")
    with pytest.raises(UserError, match=r"^http://.*; run again, or put LJ"):
        prepare_ljspeech.main(["--data_dir", "my data"])
    assert not corpus.exists()
    archive.write_bytes(whole)
    Path(f"{corpus}.unfinished", "left").mkdir(parents=True)  # by a run that was killed
    prepare_ljspeech.main(["--data_dir", "my data"])
    archive.unlink()
    prepare_ljspeech.main(["--data_dir", "my data"])  # finds the corpus
    assert os.listdir("my data") == [corpus.name]
    expected = f"data_dir='{corpus}',hours=24"
    assert printed_settings(capsys.readouterr().out) == create_hparams(expected, "voice")
    train, val = lists("ljspeech")
    assert train == [f'wavs/C-{i}.wav|number {i} "as read.' for i in (0, 2)]
    assert val == ['wavs/C-1.wav|number 1 "as read.']


def test_the_split_has_every_clip_of_ljspeech_once():
    train, val = (path.read_text().splitlines() for path in prepare_ljspeech.ID_LISTS)
    assert (len(train), len(val), len({*train, *val})) == (10_480, 2_620, 13_100)
