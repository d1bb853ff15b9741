import math
import multiprocessing
import os
import re
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import hypothesis
import librosa
import numpy as np
import pytest
import soundfile
import torch
from conftest import Forked, write_tone
from hypothesis import strategies as st

import corpus.mels
import data_utils
from cli import UserError
from corpus.audio import MelSpectrogram, griffin_lim
from corpus.clips import Clip, load_clips, read_samples
from corpus.mels import open_mels
from data_utils import Item, MelDataset, collate, load_data
from hparams import create_hparams
from loaders import loaded, open_loader
from text import text_to_sequence


@pytest.fixture
def hparams(settings):
    return create_hparams(settings)


@pytest.fixture
def clips(hparams):
    return load_clips(hparams.training_files, hparams)


def load_all(hparams):
    """The training clips, once all that can be wrong with the data has been checked."""
    train, val = load_data(hparams)
    open_mels([*train, *val], hparams)
    data_utils.training_sampler(train, hparams)
    return train


def load_list(hparams, content):
    """The clips of a filelist with this content, with which the settings train."""
    path = Path(hparams.data_dir, "list.txt")
    path.write_text(content, newline="", errors="surrogateescape")
    return load_all(replace(hparams, training_files=str(path), batch_size=1))


def assert_refused(hparams, patterns):
    """The data is refused in lines that start like this, but for the folder's name."""
    with pytest.raises(UserError) as error:
        load_all(hparams)
    lines = str(error.value).replace(f"{hparams.data_dir}/", "").split("\n")
    for line, pattern in zip(lines, patterns, strict=True):
        assert fnmatchcase(line, f"{pattern}*")


# Mels


@pytest.mark.parametrize("preset", ["nvidia", "paper"])
def test_mels_are_librosas_and_griffin_lim_inverts_them(preset):
    """Of a hum, loud and low, then noise that fades away: every level and frequency occurs, and
    nothing above the hum, where rounding errors would show."""
    time = np.arange(15_000) / 22050
    hum = 0.9 * np.sin(2 * np.pi * (100 + 20 * time) * time)
    noise = np.random.default_rng(0).standard_normal(15_000) * np.geomspace(0.1, 1e-5, 15_000)
    samples = np.concatenate([hum, noise]).astype(np.float32)
    hparams = create_hparams(preset=preset)
    spectrogram = MelSpectrogram(hparams)
    ours = spectrogram(torch.from_numpy(samples))
    theirs = librosa.feature.melspectrogram(
        y=samples,
        sr=hparams.sampling_rate,
        n_fft=hparams.filter_length,
        hop_length=hparams.hop_length,
        win_length=hparams.win_length,
        power=1.0,
        pad_mode="reflect",
        n_mels=hparams.n_mel_channels,
        fmin=hparams.mel_fmin,
        fmax=hparams.mel_fmax,
    )
    assert ours.shape == (80, len(samples) // hparams.hop_length + 1)
    np.testing.assert_allclose(ours, np.log(np.clip(theirs, 1e-5, None)), atol=1e-4)
    waves = torch.from_numpy(samples).reshape(3, 10_000)
    torch.testing.assert_close(spectrogram(waves)[1], spectrogram(waves[1]))
    samples = griffin_lim(ours, hparams)
    again = spectrogram(torch.from_numpy(samples))
    assert np.abs(samples).max() <= 1
    assert (again - ours[:, : again.size(1)]).abs().mean() < 0.3


@pytest.mark.parametrize("preset", ["nvidia", "paper"])
def test_griffin_lim_takes_what_an_untrained_model_says(preset):
    """Any numbers, of any number of frames. It is always the same sound."""
    hparams, nan = create_hparams(preset=preset), math.nan
    for n_frames in (0, 1, 2, 3, 9):
        for level in (0.0, -1e9, 1e9, math.inf, nan):
            mel = torch.randn(80, n_frames)
            mel[1::2] += level
            samples = griffin_lim(mel, hparams)
            assert len(samples) == max(n_frames - 1, 0) * hparams.hop_length
            assert (np.abs(samples) <= 1).all() and (griffin_lim(mel, hparams) == samples).all()


def test_griffin_lim_takes_little_memory_with_large_pages():
    """10 seconds of sound, in a process like the one that trains: less than 300 MB."""
    program = """
import hparams, torch
from corpus.audio import griffin_lim
from training import device
device.use_large_pages()
hparams, cpu = hparams.create_hparams(), torch.device("cpu")
griffin_lim(torch.zeros(80, 10), hparams)  # imports what it needs
before = device.peak_memory(cpu)
griffin_lim(torch.randn(80, 800) - 4, hparams)
print(1024 * (device.peak_memory(cpu) - before))
"""
    printed, errors = Forked("-c", program).communicate()
    assert float(printed) < 300, errors


# Filelists and clips


def test_what_a_filelist_may_have(corpus, hparams, capsys):
    """Absolute paths, Windows' line ends, a byte order mark, and what is noted and not used."""
    (corpus / "other.txt").write_text(f"{corpus}/9.wav|Dr. Tone\n")
    clips = load_clips(f"{corpus}/train.txt+{corpus}/other.txt", hparams)
    assert len(clips) == 9 and clips[0].path == f"{corpus}/0.wav"
    assert clips[8].location == f"{corpus}/other.txt:1"
    assert clips[8].ids == text_to_sequence("doctor tone", ["basic_cleaners"])
    lines = "\ufeff0.wav|a [bracket]|LJ\r\n\r\n1.wav|another\u2028[one]\r\n2.wav|three | LJ \n"
    (corpus / "train.txt").write_text(lines, newline="")
    clips, _ = load_data(hparams)
    assert [clip.text for clip in clips] == ["a [bracket]", "another\u2028[one]", "three"]
    assert [clip.location[-2:] for clip in clips] == [":1", ":3", ":4"]
    third, *characters = capsys.readouterr().out.splitlines()
    assert f"{corpus}/train.txt:1: the third field, 'LJ'," in third and "in 2 of 3 lines" in third
    for line, character in zip(characters, ("'[' (U+005B)", "']' (U+005D)"), strict=True):
        assert f"{corpus}/train.txt:1: {character} has no symbol" in line and "in 2 texts" in line


def test_another_alphabet_is_checked_and_what_it_lacks_or_never_uses_is_noted(
    corpus, hparams, capsys
):
    hparams = replace(hparams, text_cleaners=("basic_cleaners",), symbols=" !5БЖабиой\u0301")
    (corpus / "val.txt").write_text("8.wav|й б\n9.wav|и\u0306 5\n", encoding="utf-8")
    train = "0.wav|БОЙ!\n1.wav|55\n2.wav|иа ґ\n"
    clips = load_list(hparams, train)
    assert [clip.ids for clip in clips] == [[7, 9, 10, 2], [3, 3], [8, 6, 1]]
    unknown, unused = capsys.readouterr().out.splitlines()
    assert f"{corpus}/list.txt:3: 'ґ' (U+0491) has no symbol and is left out; change " in unknown
    assert unknown.endswith("or, before training, add it to the setting symbols")
    assert unused == (
        "note: setting symbols: 'Б' 'Ж' '\u0301': in no training text after basic_cleaners, so "
        "this run does not train them"
    )
    for text, problem in (
        ("!! ґ", "text '!! ґ' has nothing to speak once cleaned; fix or remove it"),
        ("бой {B}", "'{B}' at character 5 of the text: braces hold ARPAbet, which this alphabet "),
    ):
        with pytest.raises(UserError) as error:
            load_list(hparams, f"{train}3.wav|{text}\n")
        assert str(error.value).startswith(f"{corpus}/list.txt:4: {problem}")


def test_each_list_may_have_a_folder_of_its_own(corpus, hparams, monkeypatch):
    """Clips with the same path in both folders are told apart, also in the mel cache; the
    fingerprint does not depend on where they are."""
    monkeypatch.chdir(corpus)
    lists = {"a": ("0", "1", "2"), "b": ("0", "1", "2"), "va": ("3",), "vb": ("3",)}
    for name, stems in lists.items():
        Path(f"{name}.txt").write_text("".join(f"{stem}.wav|tone {stem}\n" for stem in stems))
    for folder, shift in (("one", 0), ("other", 4)):
        Path(folder).mkdir()
        for i in range(4):
            shutil.move(f"{i + shift}.wav", f"{folder}/{i}.wav")
    names = {"training_files": "a.txt+ b.txt", "validation_files": "va.txt+vb.txt"}
    several = replace(hparams, data_dir="one + other", **names)
    train, val = load_data(several)
    paths = [f"{folder}/{i}.wav" for folder in ("one", "other") for i in range(3)]
    assert [clip.path for clip in train] == paths
    assert [clip.path for clip in val] == ["one/3.wav", "other/3.wav"]
    assert [clip.location for clip in train[2:4]] == ["a.txt:3", "b.txt:1"]
    mels = open_mels([*train, *val], several)
    lengths = [soundfile.info(clip.path).frames // several.hop_length + 1 for clip in train]
    assert [len(mels(clip)) for clip in train] == lengths and lengths[:3] != lengths[3:]
    assert not corpus.mels.MelCache(several).missing([*train, *val])

    Path("all.txt").write_text("".join(f"{path}|tone {path[-5]}\n" for path in paths))
    merged = replace(several, data_dir="", training_files="all.txt")
    Path("va.txt").write_text("one/3.wav|tone 3\n")
    Path("vb.txt").write_text("other/3.wav|tone 3\n")
    assert data_utils.data_fingerprint(*load_data(merged)) == data_utils.data_fingerprint(
        train, val
    )
    os.rename("one", "one + other")  # then that is the name of one folder
    with pytest.raises(UserError, match=r"va\.txt:1: one \+ other/one/3.wav: no such file"):
        load_data(several)
    Path("va.txt").write_text("3.wav|tone 3\n")
    one = replace(several, training_files="a.txt", validation_files="va.txt")
    assert [clip.path for clip in load_data(one)[0]] == [f"one + other/{i}.wav" for i in range(3)]


@pytest.fixture
def bad_wavs(corpus):
    tone, _ = soundfile.read(corpus / "0.wav")
    sounds = {
        "stereo": np.stack([tone, tone], 1),
        "empty": tone[:0],
        "short": tone[:1101],
        "silent": np.zeros(9000),
        "constant": np.full(9000, 0.5),
        "loud": np.sign(tone) * 3,
        "nan": tone * np.nan,
    }
    for name, samples in sounds.items():
        soundfile.write(corpus / f"{name}.wav", samples, 22050, subtype="FLOAT")
    for name in ("AIFF", "RF64", "AU"):
        soundfile.write(corpus / f"{name}.wav", tone, 22050, format=name)
    soundfile.write(corpus / "rate.wav", tone, 16000)
    (corpus / "noise.wav").write_bytes(b"this is not sound")
    for name, other in (("again", 0), ("leak", 10)):
        (corpus / f"{name}1.wav").symlink_to(corpus / f"{other}.wav")
        (corpus / f"{name}2.wav").hardlink_to(corpus / f"{other + 1}.wav")


# Lines of a filelist, and patterns of what is wrong with them
BAD_LINES = {
    "0.wav": "'0.wav' is not path|text; write a path, one |, and the text",
    "0.wav|a|b|c": "'0.wav|a|b|c' is not path|text",
    "0.wav|caf\udce9": "byte 0xe9 is not UTF-8; save as UTF-8",
    "99.wav|ok": "99.wav: no such file; fix its line, or set data_dir",
    "stereo.wav|ok": "stereo.wav: 2 channels; mix it down to mono",
    "rate.wav|ok": "rate.wav: sampling rate 16000 Hz; resample it to 22050 Hz (*), or set "
    "sampling_rate=16000,hop_length=200,win_length=800,filter_length=1024",
    "short.wav|ok": "short.wav: 1101 samples, too short for a mel; remove * 1103 samples or more",
    "empty.wav|ok": "empty.wav: 0 samples, too short for a mel; remove * 1103 samples or more",
    "noise.wav|ok": "noise.wav: not a readable sound file (*); replace it",
    "AIFF.wav|ok": "AIFF.wav: is AIFF; convert it to wav or flac",
    "RF64.wav|ok": "RF64.wav: is RF64; convert it to wav or flac",
    "AU.wav|ok": "AU.wav: is AU; convert it to wav or flac",
    "2.wav|": "text '' has nothing to speak once cleaned; fix or remove it",
    "2.wav|...!": "text '...!' has nothing to speak",
    "2.wav|say {QQ}": "'QQ' in braces is not an ARPAbet phone; use ",
    "2.wav|a": "text 'a' is one symbol; training needs two or more",
    "2.wav|" + "a " * 300: "text of 599 symbols, above max_text_length=500; split * raise",
    "rate.wav|": "rate.wav: sampling rate 16000 Hz; *; and: text '' has nothing to speak",
}
BAD_SAMPLES = {
    "constant.wav|ok": "constant.wav: is silent (peak 0.5); remove its line",
    "loud.wav|ok": "loud.wav: has a sample of 3, beyond *; scale it down",
    "nan.wav|ok": "nan.wav: has samples that are not finite; replace it",
    "silent.wav|ok": "silent.wav: is silent (peak 0); remove its line",
}
BAD_IN_TRAINING = {
    "./0.wav|ok": "0.wav is on train.txt:1 too; keep one",
    "again1.wav|ok": "again1.wav is on train.txt:1 too; keep one",
    "again2.wav|ok": "again2.wav is on train.txt:3 too; keep one",
    "9.wav|ok": "9.wav is on val.txt:1 too; keep one",
    "leak1.wav|ok": "leak1.wav is on val.txt:2 too; keep one",
    "leak2.wav|ok": "leak2.wav is on val.txt:3 too; keep one",
    "7.wav|ok": "7.wav has 40 frames, above the batch capacity of 39; set batch_capacity=40 or ",
}


def write_list(path, good, bad):
    """Write a filelist of good and bad lines; the patterns of its problems."""
    path.write_text("\n".join([*good, *bad]), errors="surrogateescape")
    return [f"{path.name}:{n}: {pattern}" for n, pattern in enumerate(bad.values(), len(good) + 1)]


@pytest.mark.parametrize("cache", [True, False])
def test_everything_that_is_wrong_is_in_one_report(corpus, bad_wavs, hparams, cache):
    """Lists, texts, headers and samples, of both sets."""
    hparams = replace(hparams, cache_mels=cache, batch_capacity=39)
    train, val, good = corpus / "train.txt", corpus / "val.txt", ["0.wav|ok", "", "1.wav|ok"]
    assert_refused(hparams, write_list(train, good, BAD_SAMPLES))
    expected = write_list(train, good, BAD_LINES | BAD_IN_TRAINING)
    good = ["9.wav|ok", "10.wav|ok", "11.wav|ok"]
    expected += write_list(val, good, BAD_SAMPLES | BAD_LINES)
    assert_refused(hparams, [*expected, f"{len(expected)} problems"])
    assert not list(corpus.glob("cache/*.*"))
    val.unlink()
    expected = write_list(train, ["0.wav|ok"], {"99.wav|ok": BAD_LINES["99.wav|ok"]})
    assert_refused(hparams, ["filelist 'val.txt': No such file *prepare_", *expected])


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("data_dir", "/none", "setting data_dir=/none: no such folder; use the corpus's"),
        ("data_dir", "cache", "setting data_dir=cache: has none of the clips that "),
        ("data_dir", "cache+none", "setting data_dir=cache+none: no such folder none; use the cor"),
        ("data_dir", "+cache", "setting data_dir=+cache: 2 folders; give one for all, or"),
        ("text_cleaners", ("none",), "setting text_cleaners: "),
        ("mel_cache_dir", "0.wav", "0.wav: cannot be written (File exists); set mel_cache_dir to"),
        ("training_files", "no.txt", "filelist 'no.txt': No such file or directory; scripts/prep"),
        ("training_files", "", "filelist '': Is a directory; scripts/prepare_corpus"),
        ("training_files", "empty.txt", "empty.txt: has no clips; write lines of path|text"),
        ("validation_files", "empty.txt", "empty.txt: has no clips; write lines of path|text"),
        (
            "training_files",
            "train.txt+a/../train.txt",
            "filelist 'a/../train.txt': is named twice ",
        ),
        (
            "training_files",
            "val.txt",
            "filelist 'val.txt': is named twice in val.txt and val.txt; ",
        ),
        ("batch_capacity_seconds", 0.48, "train.txt:8: 7.wav has 40 frames, * 38; set *s=0.51 or"),
        ("batch_capacity_seconds", 0.47, "train.txt:8: * 37 (and 1 more clip); set *s=0.51"),
        ("batch_capacity_seconds", 0.2, "train.txt:8: * 15 (and 5 more clips); set *s=0.51"),
        ("batch_size", 9, "setting batch_size=9: train.txt has 8 clips; use at most 8"),
    ],
)
def test_a_wrong_setting_is_one_line(corpus, hparams, monkeypatch, setting, value, problem):
    monkeypatch.chdir(corpus)
    (corpus / "cache").mkdir()
    (corpus / "empty.txt").write_text("\n\n")
    assert_refused(replace(hparams, **{setting: value}), [problem])


def test_the_capacity_that_a_refusal_names_is_enough_and_is_of_frames(hparams):
    hparams = replace(hparams, batch_capacity_seconds=0.51)
    clips = load_all(hparams)
    for indices in data_utils.training_sampler(clips, hparams).plan:
        assert len(indices) * max(clips[i].n_frames for i in indices) <= 0.51 * 22050 / 276


COMMENTS = b"INFO" + 300 * (b"ICMT" + (40).to_bytes(4, "little") + b"once more " * 4)
COMMENTS = b"LIST" + len(COMMENTS).to_bytes(4, "little") + COMMENTS
CUT = "cut off: its header says 4,410 bytes of samples, but it has 3,410; copy or convert it again"


@pytest.mark.parametrize(
    ("name", "endian", "metadata", "problem"),
    [
        ("WAV", "FILE", b"", CUT),
        ("WAV", "FILE", COMMENTS, CUT),
        ("WAV", "BIG", b"", CUT),
        ("WAVEX", "FILE", b"", CUT),
        ("FLAC", "FILE", b"", "not a readable|not as long as"),
    ],
)
def test_a_cut_is_noticed(corpus, hparams, name, endian, metadata, problem):
    path = corpus / "x.wav"
    write_tone(path, 0.1, subtype="PCM_16", format=name, endian=endian)
    whole = path.read_bytes()
    whole = whole[:36] + metadata + whole[36:]
    path.write_bytes(whole)
    assert len(load_list(hparams, "x.wav|tone")) == 1
    path.write_bytes(whole[:-1000])
    with pytest.raises(UserError, match=rf"list\.txt:1: .*/x\.wav: ({problem})"):
        load_list(hparams, "x.wav|tone")


def spy(monkeypatch, room, name):
    """A mock that calls what it replaces."""
    monkeypatch.setattr(room, name, Mock(wraps=getattr(room, name)))
    return getattr(room, name)


@pytest.mark.parametrize("cache", [True, False])
def test_up_to_one_percent_of_bad_clips_can_be_skipped(
    corpus, bad_wavs, hparams, capsys, monkeypatch, cache
):
    hparams = replace(hparams, on_bad_clip="skip", cache_mels=cache)
    names = [f"many{i}.wav" for i in range(200)]
    for name in names:
        shutil.copy(corpus / "0.wav", corpus / name)
    names[7], names[9] = "silent.wav", "gone.wav"
    (corpus / "train.txt").write_text("".join(f"{name}|tone\n" for name in names))
    check = spy(monkeypatch, data_utils, "check_samples")
    for again in (False, True):
        check.reset_mock()
        train, val = load_data(hparams)
        assert [Path(clip.path).name for clip in train] == [*names[:7], names[8], *names[10:]]
        out = capsys.readouterr().out.replace(f"{corpus}/", "")
        assert fnmatchcase(
            out, "*train.txt:8: silent.wav: *\n*train.txt:10: gone.wav: *\n*2 of the 200 *"
        )
        # Samples that are cached were checked when their mels were computed.
        checked = [len(call.args[0]) for call in check.call_args_list]
        assert checked == ([0, 1] if cache and again else [4, 199])
        open_mels([*train, *val], hparams)
    with open(corpus / "train.txt", "a") as file:
        file.write("stereo.wav|tone")
    lines = ["*"] * 3 + ["train.txt: 3 of 201 clips * at most 1%; fix"]
    assert_refused(hparams, lines)


@pytest.mark.parametrize(
    ("subtype", "bits"),
    [("PCM_U8", 7), ("PCM_16", 15), ("PCM_24", 23), ("PCM_32", 31), ("FLOAT", 24), ("DOUBLE", 24)],
)
def test_every_sample_format_is_scaled_to_one(corpus, hparams, subtype, bits):
    """In clips of one window, the shortest there are."""
    samples = 0.9 * np.sin(np.arange(1103) / 20)
    soundfile.write(corpus / "x.wav", samples, 22050, subtype=subtype)
    (clip,) = load_list(hparams, "x.wav|ok")
    read = read_samples(clip, hparams)
    assert read.dtype == np.float32 and open_mels([clip], hparams)(clip).shape == (4, 10)
    np.testing.assert_allclose(read, samples, atol=2**-bits + 2**-24)
    with pytest.raises(UserError, match=r"x\.wav: not as long as its header says; replace it"):
        read_samples(clip._replace(n_frames=5), hparams)


PARTS = ["0.wav", "1.wav", "|", "\n", "\r\n", "\0", "tone", "..", "/", "{", "}"]
LISTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)
LISTS |= st.binary(max_size=200).map(lambda content: content.decode("utf-8", "surrogateescape"))


@pytest.mark.parametrize("lists", [LISTS, st.just("broken.wav|tone")])
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_any_list_and_wav_is_read_or_refused(corpus, hparams, lists, data):
    """The wav is cut anywhere, with bytes of it changed: never an error that is not ours."""
    content = bytearray((corpus / "3.wav").read_bytes())
    for offset in data.draw(st.lists(st.integers(0, 60), max_size=4)):
        content[offset] = data.draw(st.integers(0, 255))
    (corpus / "broken.wav").write_bytes(content[: data.draw(st.integers(0, len(content)))])
    hparams = replace(hparams, cache_mels=False)
    try:
        clips = load_list(hparams, data.draw(lists))
    except UserError as error:
        assert all(f"{corpus}/list.txt" in line for line in str(error).split("\n"))
    else:
        mels = open_mels(clips, hparams)
        for clip in clips:
            assert clip.ids and mels(clip).shape == (clip.n_frames, 10)
            assert np.isfinite(mels(clip)).all()


# The mel cache


def test_only_what_the_cache_lacks_is_computed(corpus, hparams, clips, monkeypatch):
    computed = spy(monkeypatch, corpus.mels, "run_parallel")
    for settings, some, missing in (
        (hparams, clips[1:5], clips[1:5]),
        (hparams, clips[2:4], []),
        (hparams, clips[:4], clips[:1]),
        (hparams, clips, clips[5:]),
        (hparams, clips[::-1], []),
        (replace(hparams, batching_strategy="RAND"), clips[4:], []),
        (replace(hparams, mel_fmax=7000.0), clips, clips),
    ):
        computed.reset_mock()
        mels, fresh = (open_mels(some, replace(settings, cache_mels=c)) for c in (True, False))
        assert [call.args[1] for call in computed.call_args_list] == [missing] * bool(missing)
        for clip in some:
            np.testing.assert_array_equal(mels(clip), fresh(clip))
    before = set(corpus.glob("cache/*"))
    write_tone(corpus / "0.wav", 0.1)
    os.utime(corpus / "0.wav", (0, 0))
    changed = load_clips(hparams.training_files, hparams)
    open_mels(changed, hparams)
    assert computed.call_args.args[1] == changed[:1]
    assert len(set(corpus.glob("cache/*")) - before) == 1 and before < set(corpus.glob("cache/*"))


def test_a_damaged_mel_is_computed_again(corpus, hparams, clips):
    expected = open_mels(clips, hparams)(clips[0])
    path = corpus.mels.MelCache(hparams).path(clips[0])
    content = path.read_bytes()
    np.testing.assert_array_equal(np.load(path), expected)
    for damaged in (b"", b"damaged", content[:-100], content + content):
        path.write_bytes(damaged)
        np.testing.assert_array_equal(open_mels(clips, hparams)(clips[0]), expected)
        assert path.read_bytes() == content


def test_runs_may_fill_the_cache_at_once(corpus, hparams):
    clips = load_clips(f"{corpus}/train.txt+{corpus}/val.txt", hparams)
    fork = multiprocessing.get_context("fork")
    runs = [fork.Process(target=open_mels, args=(clips, hparams)) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
        assert run.exitcode == 0
    assert not corpus.mels.MelCache(hparams).missing(clips)
    assert len(list(corpus.glob("cache/*"))) == len(clips)


def test_too_little_space_is_said_before_any_mel_is_computed(corpus, hparams, clips, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"0\.00 GB needed .*, or set mel_cache_dir to a larger "):
        open_mels(clips, hparams)
    assert not (corpus / "cache").exists()


def test_ctrl_c_while_mels_are_computed_ends_in_one_line(corpus, settings):
    """It reaches every process of the group, as from a terminal; none is left, and no half mel."""
    for i in range(4000):
        shutil.copy(corpus / "7.wav", corpus / f"many{i}.wav")
    (corpus / "train.txt").write_text("".join(f"many{i}.wav|tone\n" for i in range(4000)))
    process = Forked("train.py", "-o", corpus / "run", "--hparams", settings)
    while not any(corpus.glob("cache/*.npy")):
        assert not process.ended()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate()[1] == "interrupted\n" and process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not list(corpus.glob("cache/*.part"))


# Batches and loaders


def test_collate_pads_and_sorts_by_text_length():
    lengths = enumerate([(2, 4), (5, 3), (3, 6)])
    batch = collate(
        [Item(i, torch.full((n,), n), torch.full((m, 10), float(m))) for i, (n, m) in lengths]
    )
    assert batch.indices == [1, 2, 0]
    assert batch.text.tolist() == [[5, 5, 5, 5, 5], [3, 3, 3, 0, 0], [2, 2, 0, 0, 0]]
    assert batch.text_lengths.tolist() == [5, 3, 2] and batch.mel_lengths.tolist() == [3, 6, 4]
    assert batch.mel.shape == (3, 10, 6) and batch.text.dtype == torch.int64
    assert batch.mel[0, 0].tolist() == [3, 3, 3, 0, 0, 0]
    assert batch.gate.tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1]]


def noted_zeros(clip):
    """A mel, and beside the clip's file a note that it was asked for."""
    Path(f"{clip.path}.read").touch()
    return np.zeros((clip.n_frames, 10), np.float32)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("end", [UserError, KeyboardInterrupt, None])
def test_a_loader_follows_the_plan_and_ends_with_its_context(corpus, hparams, clips, workers, end):
    sampler = data_utils.training_sampler(clips, hparams)
    data, state = MelDataset(clips, noted_zeros), torch.get_rng_state()
    others = set(multiprocessing.active_children())
    with (
        pytest.raises(end) if end else nullcontext(),
        open_loader(data, sampler, collate, workers) as loader,
    ):
        processes = set(multiprocessing.active_children()) - others
        assert len(processes) == workers and not list(corpus.glob("*.read"))
        for epoch in range(3):
            sampler.set_epoch(epoch)
            batches = list(loaded(loader))
            assert sorted(i for batch in batches for i in batch.indices) == list(range(8))
            for batch, indices in zip(batches, sampler.plan, strict=True):
                assert sorted(batch.indices) == sorted(indices)
                for row, i in enumerate(batch.indices):
                    assert batch.text[row, : batch.text_lengths[row]].tolist() == clips[i].ids
                    assert batch.mel_lengths[row] == clips[i].n_frames
        next(loaded(loader))
        assert set(multiprocessing.active_children()) - others == processes
        if end:
            raise end
    assert not any(process.is_alive() for process in processes)
    assert torch.equal(state, torch.get_rng_state()), "loading draws nothing from training's noise"


@pytest.mark.parametrize(
    ("cache", "change"),
    [(False, "removed"), (False, "replaced"), (False, "cut"), (True, "removed"), (True, "cut")],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_changes_while_training_is_named(hparams, clips, cache, change, workers):
    hparams = replace(hparams, cache_mels=cache)
    data = MelDataset(clips, open_mels(clips, hparams))
    path = corpus.mels.MelCache(hparams).path(clips[3]) if cache else Path(clips[3].path)
    with open_loader(data, [[0, 1], [2, 3]], collate, workers) as loader:
        assert len(list(loaded(loader))) == 2
        content = path.read_bytes()
        path.unlink()
        if change != "removed":
            path.write_bytes(content if change == "replaced" else content[: len(content) // 2])
        with pytest.raises(UserError, match=f"^{path}: changed or removed .*; run again[^\n]*$"):
            list(loaded(loader))


def test_a_lock_that_a_killed_process_held_does_not_keep_a_loader_from_ending(hparams, clips):
    with open_loader(MelDataset(clips, open_mels(clips, hparams)), [[0]], collate, 1) as loader:
        loader._iterator._workers_done_event._cond.acquire()
    assert not multiprocessing.active_children()


def test_validation_batches_depend_on_no_batching_setting(settings, clips):
    batches = data_utils.validation_batches(clips, create_hparams(settings))
    assert sorted(i for batch in batches for i in batch) == list(range(8))
    assert [len(batch) for batch in batches] == [3, 3, 2]
    for change in ("batching_strategy=SB", "dynamic_batch_size=False", "seed=7", "lrf=0.9"):
        assert batches == data_utils.validation_batches(clips, create_hparams(settings + change))


def test_a_long_clip_that_makes_few_batches_is_noted_with_a_capacity_that_makes_more():
    rng = np.random.default_rng(0)

    def noted(lengths, settings=""):
        hparams = create_hparams(settings)
        clips = [Clip("", "", [], n, "", ()) for n in lengths.tolist()]
        sampler = data_utils.training_sampler(clips, hparams)
        return data_utils.capacity_note(sampler, hparams), len(sampler.plan)

    short = rng.integers(100, 400, 1100)
    for longest in (900, 3000, 9000):
        lengths = np.append(short, longest)
        note, few = noted(lengths)
        assert note.startswith(
            f"an epoch has {few} batches, with dynamic_batch_size=False 69: the "
        )
        setting, more = re.search(r"(batch_capacity_seconds=\S+) makes (\d+)$", note).groups()
        assert few < 35 < int(more) and noted(lengths, setting) == ("", int(more))
        assert noted(lengths, "dynamic_batch_size=False")[0] == ""
    assert noted(short)[0] == ""
