"""scripts/prepare_corpus.py and prepare_ljspeech.py on tiny corpora of tones."""

import os
import shlex
import tarfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from cli import UserError
from corpus.audio import MelSpectrogram
from corpus.clips import Clip, load_clips
from hparams import HParams, create_hparams
from scripts import prepare_corpus, prepare_ljspeech
from training.checkpoint import load_checkpoint, rebuild

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


def listed(name):
    """The lines of both lists, sorted."""
    paths = (Path(f"filelists/{name}_{part}.txt") for part in ("train", "val"))
    return sorted(line for path in paths for line in path.read_text().splitlines())


def printed_settings(printed):
    """The settings of the train.py command that was printed last."""
    command = shlex.split(printed.splitlines()[-1])
    preset = command[command.index("--preset") + 1] if "--preset" in command else None
    voice = Path(command[command.index("-c") + 1]) if "-c" in command else None
    saved = rebuild(HParams, load_checkpoint(voice)["hparams"], voice) if voice else None
    return create_hparams(command[-1], preset, saved)


def make_pairs(*samples, rate=RATE, **options):
    for i, sound in enumerate(samples):
        write(f"s/x/{i}.wav", sound, rate, **options)
        write(f"s/x/{i}.txt", f"Text {i}.")


# Layouts


@pytest.mark.parametrize(
    ("wav", "text"),
    [
        ("wavs/{}.wav", None),  # the texts are in one table
        ("wav/{}.flac", None),
        ("{}.flac", None),
        ("deep/er/{}.flac", "deep/er/{}.txt"),
        ("dev-clean/p1/7/{}.wav", "dev-clean/p1/7/{}.normalized.txt"),  # LibriTTS
        ("wav48/p1/{}.wav", "txt/p1/{}.txt"),  # VCTK, and its version of 2019
        ("wav48_silence_trimmed/p1/{}_mic1.flac", "txt/p1/{}.txt"),
    ],
)
def test_all_layouts_are_read(wav, text):
    for i in range(3):
        write(f"c/{wav}".format(i))
        if text:
            write(f"c/{text}".format(i), f"\ufeffText\n{i}")
    if not text:
        write("c/metadata.csv", "\ufeff0|No. 0|Text 0\n\n1|No. 1|Text  1\n2|Text 2")
    write("c/txt/p1/README.txt", "Read me.")
    write("c/._0.wav", "what a Mac leaves")
    write("c/wav48_silence_trimmed/p1/0_mic2.flac")
    call("c --name x")
    expected = [f"{wav.format(i)}|Text {i}" for i in range(3)]
    assert listed("x") == expected
    if "p1" in wav:
        write("c/p2/3.wav")  # without a text
        call("c --name y --speaker p1")
        assert listed("y") == expected


@pytest.mark.parametrize(
    ("table", "header", "row"),
    [
        ("metadata.csv", "file_name,transcription", 'wavs/ü{0}.wav,"Text, {0}"'),
        ("validated.tsv", "client_id\tpath\tsentence\tage", "a1\tÜ{0}.mp3\tText, {0}\t30"),
        ("metadata.txt", "ID|text|normalised text", "ü{0}.wav|Text|Text, {0}"),
        ("list.txt", "other.wav|Of bob.|bob", "D:\\c\\wavs\\ü{0}.WAV|Text, {0}|anna"),
        ("a.jsonl", "", '{{"a": "/old/wavs/ü{0}.wav", "seconds": 1.{0}, "text": "Text, {0}"}}'),
    ],
)
def test_a_list_and_its_columns_are_found_by_what_they_hold(table, header, row):
    """A suffix in capitals, decomposed names, hidden folders, and a link to a folder."""
    for i in range(4):
        write(f"elsewhere/U\u0308{i}.WAV", format="WAV")
        write(f"c/.ipynb_checkpoints/U\u0308{i}.WAV", format="WAV")
    Path("c/wavs").symlink_to("../elsewhere")
    write("c/other.wav")
    write(f"c/{table}", "\n".join([header, *map(row.format, range(4))]))
    call(f"c --name x {'--speaker anna' if 'anna' in row else ''}")
    assert listed("x") == [f"wavs/U\u0308{i}.WAV|Text, {i}" for i in range(4)]


NAMES = st.text("a |\n\r\\+.é\u0301\ufeff\u2028,'", min_size=1, max_size=5)
NAMES = st.sets(NAMES.filter(lambda name: name[0] != "."), min_size=2, max_size=3)


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


@pytest.mark.parametrize("rate", [5120, 22050, 96000])
def test_settings_follow_from_the_rate_and_no_mel_band_is_empty(rate, capsys):
    for i in range(2):
        write(f"my data, 'all' [of] it/{i}.wav", rate=rate)
        write(f"my data, 'all' [of] it/{i}.txt", f"Text {i}")
    options = f"--sampling_rate {rate} --name mine --text_cleaners english_cleaners"
    call(f"\"my data, 'all' [of] it\" {options}")
    printed = capsys.readouterr().out
    voice = prepare_corpus.TRAIN.parent / "voices/kathleen.pt"
    note = f"training starts from {os.path.relpath(voice)}"
    assert (note in printed) == (rate == 22050)
    hparams = printed_settings(printed)
    assert hparams.batch_size <= len(load_clips(hparams.training_files, hparams))
    assert hparams.text_cleaners == ("english_cleaners",)  # the voice's are others
    hop, window, fft = hparams.hop_length, hparams.win_length, hparams.filter_length
    if rate == 22050:  # as HiFi-GAN's
        assert (hop, window, fft) == (256, 1024, 1024)
    else:
        assert 0 <= hop - 0.0125 * rate < 1 and 0 <= window - 0.05 * rate < 1
        assert window <= fft < 2 * window and fft.bit_count() == 1  # the next power of two
    assert (MelSpectrogram(hparams).mel_basis.sum(1) > 0).all()
    assert load_clips(hparams.training_files, hparams)[0].n_frames == rate // 10 // hop + 1


# Languages


def test_the_alphabet_of_a_corpus_has_all_that_its_texts_have_and_is_in_the_settings(capsys):
    """What cannot be a symbol is named."""
    texts = "Ёж @ дом_", "ежа 12", "Е\u0308ж ежа дом", "дом_ ж", "ежа, «ё» @ е, жж"
    for i in range(len(texts)):
        write(f"c/wavs/{i}.wav")
    write("c/metadata.csv", "".join(f"{i}|{text}\n" for i, text in enumerate(texts)))
    call("c --name x --text_cleaners basic_cleaners")
    symbols = " ,12«»адежмоё@"
    assert Path("filelists/x_symbols.txt").read_text(encoding="utf-8") == f"{symbols}\n"
    printed = capsys.readouterr().out
    assert "note: c/metadata.csv:1: '_' (U+005F) has no symbol" in printed
    note = "note: c/metadata.csv:2: digits stay as written (in 1 text); spell numbers out"
    assert note in printed
    assert printed_settings(printed).symbols == symbols


# The split


SENTENCES = st.lists(st.integers(0, 9), min_size=2, max_size=40)


@given(SENTENCES.filter(lambda sentences: len({*sentences}) > 1), st.randoms())
def test_takes_of_a_sentence_are_on_one_side_in_any_order(sentences, random):
    clips = [Clip(f"{i}.wav", "", [n], 1, "", None) for i, n in enumerate(sentences)]
    train, val = prepare_corpus.split(clips)
    assert {clip.ids[0] for clip in train}.isdisjoint(clip.ids[0] for clip in val)
    assert train and val and sorted(train + val) == sorted(clips)
    largest = max(map(sentences.count, sentences))
    alone = 1 in (len({clip.ids[0] for clip in part}) for part in (train, val))  # one sentence
    assert abs(len(train) - 0.8 * len(sentences)) <= (largest if alone else largest / 2)
    again = prepare_corpus.split(random.sample(clips, len(clips)))
    assert [sorted(part) for part in again] == [sorted(train), sorted(val)]


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
    assert listed("there") == listed("again") == [f"wavs/{line}" for line in listed("here")]


def test_a_conversion_that_fails_leaves_no_corpus():
    make_pairs(tone(), tone() * np.nan, subtype="FLOAT")
    with pytest.raises(UserError, match=r"^s/x/1\.txt:1: "):
        call("s --name x --convert_to d")
    assert not Path("d/metadata.csv").exists() and not Path("filelists").exists()


# LJSpeech


def test_ljspeech_is_extracted_checked_and_listed(monkeypatch, capsys):
    """Eight clips, in an archive that was downloaded. A damaged archive is refused."""
    corpus, archive = Path("my data/LJSpeech-1.1"), Path("my data/LJSpeech-1.1.tar.bz2")
    lists = {"train_ids.txt": "023457", "val_ids.txt": "16"}
    texts = {f"C-{i}": f'number {i} "as read.' for i in range(8)}
    write("c/metadata.csv", "".join(f"{name}|No. {name}|{texts[name]}\n" for name in texts))
    for name in texts:
        write(f"c/wavs/{name}.wav")
    for id_list, ids in lists.items():
        write(id_list, "".join(f"C-{i}\n" for i in ids))
    archive.parent.mkdir()
    with tarfile.open(archive, "w:bz2") as tar:
        tar.add("c", corpus.name)
    whole = archive.read_bytes()
    monkeypatch.setattr(prepare_ljspeech, "SHA256", sha256(whole).hexdigest())
    monkeypatch.setattr(prepare_ljspeech, "EXTRACTED_SIZE", 1)
    monkeypatch.setattr(prepare_ljspeech, "URL", "http://127.0.0.1:1/")  # where nothing is
    monkeypatch.setattr(prepare_ljspeech, "ID_LISTS", [Path(name) for name in lists])
    monkeypatch.setenv("no_proxy", "*")

    write(archive, "damaged")
    with pytest.raises(UserError, match=r"^http://.*; run again, or put LJ"):
        prepare_ljspeech.main(["--data_dir", "my data"])
    assert not corpus.exists()
    archive.write_bytes(whole)
    Path(f"{corpus}.unfinished", "left").mkdir(parents=True)  # by a run that was killed
    prepare_ljspeech.main(["--data_dir", "my data"])
    assert sorted(os.listdir("my data")) == [corpus.name, archive.name]
    for path in Path("c").rglob("*.*"):
        assert Path(corpus, *path.parts[1:]).read_bytes() == path.read_bytes()
    expected = f"data_dir='{corpus}',hours=24"
    assert printed_settings(capsys.readouterr().out) == create_hparams(expected, "voice")
    for part, ids in zip(("train", "val"), lists.values(), strict=True):
        rows = Path(f"filelists/ljspeech_{part}.txt").read_text().splitlines()
        assert rows == [f"wavs/C-{i}.wav|{texts[f'C-{i}']}" for i in ids]
    archive.unlink()
    prepare_ljspeech.main(["--data_dir", "my data"])  # finds the corpus


def test_the_split_has_every_clip_of_ljspeech_once():
    train, val = (path.read_text().splitlines() for path in prepare_ljspeech.ID_LISTS)
    assert (len(train), len(val), len({*train, *val})) == (10_480, 2_620, 13_100)
