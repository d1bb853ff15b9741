import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import librosa
import numpy as np
import pytest
import soundfile
import torch
from conftest import write_tone
from hypothesis import strategies as st

import clips as clips_room
import data_utils
import mel_cache
import train
from cli import UserError
from clips import Clip, load_clips, read_wav, report_unknown_characters
from data_utils import Item, MelDataset, collate, make_loader
from hparams import create_hparams
from layers import MelSpectrogram, griffin_lim
from mel_cache import open_mels
from text import text_to_sequence

ROOT = Path(__file__).resolve().parent.parent


def speech_like(n_samples: int = 30_000) -> np.ndarray:
    """Pulses through a changing filter, with faint pauses: every level and frequency occurs."""
    rng = np.random.default_rng(0)
    pulses = (np.arange(n_samples) % 180 == 0) + 0.01 * rng.standard_normal(n_samples)
    voiced = np.convolve(pulses, np.exp(-np.arange(400) / 40) * np.cos(np.arange(400) / 4), "same")
    envelope = np.clip(np.sin(np.arange(n_samples) / 3000), 0, 1)
    faint = 1e-5 * rng.standard_normal(n_samples)
    return (0.5 * voiced * envelope / np.abs(voiced).max() + faint).astype(np.float32)


# Mels


def hum() -> np.ndarray:
    """Loud and low, and nothing above it: what rounding adds there would be seen."""
    time = np.arange(30_000) / 22050
    return (0.9 * np.sin(2 * np.pi * (100 + 20 * time) * time)).astype(np.float32)


@pytest.mark.parametrize("preset", ["nvidia", "paper"])
@pytest.mark.parametrize("sound", [speech_like, hum])
def test_mels_are_librosas(preset, sound):
    hparams, samples = create_hparams(preset=preset), sound()
    ours = MelSpectrogram(hparams)(torch.from_numpy(samples))
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


def test_mels_of_a_batch_are_those_of_each_clip():
    spectrogram = MelSpectrogram(create_hparams())
    waves = torch.from_numpy(speech_like()).reshape(3, 10_000)
    torch.testing.assert_close(spectrogram(waves)[1], spectrogram(waves[1]))


def test_griffin_lim_gives_the_mel_back():
    hparams = create_hparams()
    mel = MelSpectrogram(hparams)(torch.from_numpy(speech_like()))
    samples = griffin_lim(mel, hparams)
    again = MelSpectrogram(hparams)(torch.from_numpy(samples))
    assert np.abs(samples).max() <= 1
    assert (again - mel[:, : again.size(1)]).abs().mean() < 0.3


def test_griffin_lim_takes_little_memory_where_memory_is_kept():
    """10 seconds of sound, in a process that trains: less than 300 MB."""
    program = """
import torch
from device import use_large_pages, peak_memory
from hparams import create_hparams
from layers import griffin_lim

use_large_pages()
hparams = create_hparams()
mel = torch.randn(80, 10 * hparams.sampling_rate // hparams.hop_length) - 4
griffin_lim(mel[:, :10], hparams)  # imports what it needs
before = peak_memory(torch.device("cpu"))
griffin_lim(mel, hparams)
print(1024 * (peak_memory(torch.device("cpu")) - before))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(result.stdout) < 300


# Filelists and clips


def clips_of(corpus, settings: str, line: str | bytes) -> list[Clip]:
    (corpus / "list.txt").write_bytes(line if isinstance(line, bytes) else line.encode())
    return load_clips(f"{corpus}/list.txt", create_hparams(settings))


def test_clips_from_several_lists_with_absolute_and_relative_paths(corpus, settings, tmp_path):
    (corpus / "other.txt").write_text(f"{corpus}/9.wav|Dr. Tone\n")
    hparams = create_hparams(settings)
    clips = load_clips(f"{corpus}/train.txt+{corpus}/other.txt", hparams)
    assert len(clips) == 9 and clips[0].path == f"{corpus}/0.wav"
    assert clips[8].location == f"{corpus}/other.txt:1"
    assert clips[8].ids == text_to_sequence("doctor tone", ["basic_cleaners"])
    for clip in clips:
        mel = MelSpectrogram(hparams)(torch.from_numpy(read_wav(clip.path)))
        assert mel.shape == (10, clip.n_frames)


def write_bad_clips(corpus) -> None:
    write_tone(corpus / "stereo_is_bad.wav", 0.2)
    samples, _ = soundfile.read(corpus / "stereo_is_bad.wav")
    soundfile.write(corpus / "stereo.wav", np.stack([samples, samples], 1), 22050)
    write_tone(corpus / "rate.wav", 0.2, rate=16000)
    write_tone(corpus / "short.wav", 0.01)
    soundfile.write(corpus / "empty.wav", np.zeros(0), 22050)
    soundfile.write(corpus / "silent.wav", np.zeros(9000), 22050)
    soundfile.write(corpus / "constant.wav", np.full(9000, 0.5), 22050)
    soundfile.write(corpus / "loud.wav", np.sign(samples) * 3, 22050, subtype="FLOAT")
    soundfile.write(corpus / "nan.wav", samples * np.nan, 22050, subtype="FLOAT")
    (corpus / "noise.wav").write_bytes(b"this is not sound")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0.wav", "list.txt:1: '0.wav' is not path|text; write a path, one |, and the text"),
        ("0.wav|a|b|c", "list.txt:1: '0.wav|a|b|c' is not path|text"),
        ("0.wav|ok\n\nno\n", "list.txt:3: 'no' is not path|text"),
        (b"0.wav|ok\n1.wav|caf\xe9", "list.txt:2: byte 0xe9 is not UTF-8; save as UTF-8"),
        ("99.wav|ok", "99.wav: no such file; mend its line, or set data_dir"),
        ("stereo.wav|ok", "stereo.wav: 2 channels; mix it down to mono"),
        ("rate.wav|ok", "rate.wav: sampling rate 16000 Hz; resample it to 22050 Hz"),
        ("short.wav|ok", "short.wav: 220 samples, too short for a mel; remove the line"),
        ("empty.wav|ok", "empty.wav: 0 samples, too short for a mel; remove the line"),
        ("noise.wav|ok", "noise.wav: not a readable sound file"),
        ("0.wav|", "text '' has nothing to speak once cleaned; mend or remove it"),
        ("0.wav|...!", "text '...!' has nothing to speak once cleaned"),
        ("0.wav|say {QQ}", "list.txt:1: "),
        ("0.wav|a", "list.txt:1: text 'a' is one symbol; training needs two or more"),
        ("", "list.txt: has no clips; write lines of path|text"),
    ],
)
def test_bad_lines_are_named(corpus, settings, line, message):
    write_bad_clips(corpus)
    with pytest.raises(UserError) as error:
        clips_of(corpus, settings, line)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("cache", ["cache_mels=True", "cache_mels=False"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("silent", "silent.wav: is silent (peak 0); remove its line"),
        ("loud", "loud.wav: has a sample of 3, beyond [-1, 1]; scale it down"),
        ("constant", "constant.wav: is silent (peak 0.5); remove its line"),
        ("nan", "nan.wav: has samples that are not finite; replace it"),
    ],
)
def test_bad_samples_are_named(corpus, settings, name, message, cache):
    write_bad_clips(corpus)
    clips = clips_of(corpus, settings, f"0.wav|fine\n{name}.wav|text")
    with pytest.raises(UserError) as error:
        open_mels(clips, create_hparams(settings + cache))
    assert str(error.value) == f"{corpus}/list.txt:2: {corpus}/{message}"
    assert not list(corpus.glob("cache/*.*"))


def test_a_clip_of_one_window_is_long_enough(corpus, settings):
    for n in (1101, 1102):
        write_tone(corpus / f"n{n}.wav", n / 22050 + 1e-6)
    (clip,) = clips_of(corpus, settings, "n1102.wav|ok")
    assert open_mels([clip], create_hparams(settings))(clip).shape == (4, 10)
    with pytest.raises(UserError, match=r"1101 samples, too short .*; remove .* 1102 samples or"):
        clips_of(corpus, settings, "n1101.wav|ok")


def test_all_problems_are_listed_together(corpus, settings):
    with pytest.raises(UserError) as error:
        clips_of(corpus, settings, "nothing\n0.wav|fine\n98.wav|gone\n")
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == [
        f"{corpus}/list.txt:1",
        f"{corpus}/list.txt:3",
    ]


@pytest.mark.parametrize("name", ["nowhere.txt", "tests", ""])
def test_a_missing_filelist_says_what_writes_it(settings, name):
    with pytest.raises(UserError, match=f"^filelist '{name}': .*; scripts/prepare_ljspeech.py"):
        load_clips(name, create_hparams(settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_dir": "/none"}, "setting data_dir=/none: no such folder; name the corpus's"),
        ({"text_cleaners": ("none",)}, "setting text_cleaners: "),
        ({"n_symbols": 99}, "setting n_symbols=99: use 148 or more"),
        (
            {"mel_cache_dir": "LICENSE"},
            "LICENSE: cannot be written (File exists); name a folder by mel_cache_dir",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_not_one_a_clip(settings, change, message):
    hparams = dataclasses.replace(create_hparams(settings), **change)
    with pytest.raises(UserError) as error:
        open_mels(load_clips(hparams.training_files, hparams), hparams)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_long_list_of_problems_ends_in_their_number(corpus, settings):
    with pytest.raises(UserError) as error:
        clips_of(corpus, settings, "bad\n" * 50)
    assert len(str(error.value).splitlines()) == 51
    assert str(error.value).endswith("\n50 problems")


def test_windows_line_ends_and_a_byte_order_mark_are_no_problem(corpus, settings):
    line = "\ufeff0.wav|one\r\n\r\n1.wav|two\u2028lines\r\n"
    assert [(clip.location[-1], clip.text) for clip in clips_of(corpus, settings, line)] == [
        ("1", "one"),
        ("3", "two\u2028lines"),
    ]


def test_characters_that_vanish_are_reported_once(settings, capsys):
    texts = [("list:1", "a [bracket]"), ("list:2", "another [one]"), ("list:3", "fine")]
    report_unknown_characters(texts, create_hparams(settings))
    assert capsys.readouterr().out.splitlines() == [
        f"note: list:1: '{character}' (U+{ord(character):04X}) is no symbol: the character is "
        "left out, in 2 texts; mend the text, or add it to text/symbols.py"
        for character in "[]"
    ]


def test_a_third_field_is_noted_once_a_list(corpus, settings, capsys):
    lines = "0.wav|one|LJ\n\n1.wav|two\n2.wav|three | LJ \n"
    assert [clip.text for clip in clips_of(corpus, settings, lines)] == ["one", "two", "three"]
    assert capsys.readouterr().out == (
        f"note: {corpus}/list.txt:1: the third field, 'LJ', is not used (as in 2 of 3 lines)\n"
    )


def test_a_list_that_is_named_twice_is_refused(corpus, settings):
    for names in ("train.txt+{0}/train.txt", "train.txt+{0}/val.txt+{0}/../{1}/val.txt"):
        names = f"{corpus}/{names}".format(corpus, corpus.name)
        with pytest.raises(UserError, match=r"filelist '.*': is named twice in .*; keep one"):
            load_clips(names, create_hparams(settings))


def test_a_space_for_the_comma_is_named():
    message = "--hparams: 'data_dir=x training_files=y': put a comma before 'training_files='"
    with pytest.raises(UserError, match=message):
        create_hparams("seed=1,data_dir=x training_files=y,epochs=2")
    assert create_hparams("data_dir='x seed=y'").data_dir == "x seed=y"
    assert create_hparams("data_dir=x y=z").data_dir == "x y=z"


# The whole data in one report


def report(settings: str) -> list[str]:
    """What load_data and open_mels say, less the folder's name."""
    hparams = create_hparams(settings)
    with pytest.raises(UserError) as error:
        train, val = data_utils.load_data(hparams)
        open_mels([*train, *val], hparams)
    return str(error.value).replace(f"{hparams.data_dir}/", "").splitlines()


def test_everything_that_is_wrong_is_in_one_report(corpus, settings):
    """Lists, texts, headers and samples, of both sets."""
    write_bad_clips(corpus)
    whole = (corpus / "0.wav").read_bytes()
    (corpus / "cut.wav").write_bytes(whole[: len(whole) // 2])
    long = "a " * 300
    (corpus / "train.txt").write_bytes(
        b"0.wav|one\nnan.wav|two\ncut.wav|three\n./0.wav|again\n8.wav|caf\xe9\n9.wav|nine\n"
        b"1.wav|" + long.encode() + b"\n2.wav|{QQ}\n7.wav|the longest one\n"
    )
    (corpus / "val.txt").write_text("9.wav|nine\nrate.wav|rate\nsilent.wav|hush\n10.wav|\n")
    lines = report(settings + "batch_capacity=39")
    cut = len(whole) // 2 - 44
    expected = [
        "train.txt:2: nan.wav: has samples that are not finite; replace it",
        f"train.txt:3: cut.wav: cut off: has {cut:,} of the {len(whole) - 44:,} bytes of samples "
        "that its header names; copy or convert it again, or remove the line",
        "train.txt:4: 0.wav is on train.txt:1 too; keep one",
        "train.txt:5: byte 0xe9 is not UTF-8; save as UTF-8",
        "train.txt:6: 9.wav is in validation too (val.txt:1); keep one of the lines",
        "train.txt:7: text of 599 symbols, above max_text_length=500; split the clip, remove its "
        "line, or raise the setting",
        "train.txt:8: 'QQ' in braces is no ARPAbet phone; use ",
        "train.txt:9: 7.wav has 40 frames, above the batch capacity of 39; set batch_capacity=40 "
        "or more, or remove the line",
        "val.txt:2: rate.wav: sampling rate 16000 Hz; resample it to 22050 Hz",
        "val.txt:3: silent.wav: is silent (peak 0); remove its line",
        "val.txt:4: text '' has nothing to speak once cleaned; mend or remove it",
    ]
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


def test_a_capacity_in_seconds_that_is_too_small_names_one_in_seconds(corpus, settings):
    lines = report(settings + "batch_capacity_seconds=0.48")
    assert lines == [
        "train.txt:8: 7.wav has 40 frames, above the batch capacity of 38; "
        "set batch_capacity_seconds=0.51 or more, or remove the line"
    ]


@pytest.mark.parametrize(
    ("capacity", "more"), [(0.48, "1 more clip is"), (0.2, "6 more clips are")]
)
def test_a_capacity_that_is_too_small_for_many_is_one_line(corpus, settings, capacity, more):
    """With the value that serves all of them."""
    tone = (corpus / "7.wav").read_bytes()
    (corpus / "8th.wav").write_bytes(tone)
    with open(corpus / "train.txt", "a") as file:
        file.write("8th.wav|as long\n")
    assert report(settings + f"batch_capacity_seconds={capacity}") == [
        "train.txt:8: 7.wav has 40 frames, above the batch capacity of "
        f"{int(capacity * 22050 / 276)}, and {more}; "
        "set batch_capacity_seconds=0.51 or more, or remove the lines"
    ]
    data_utils.load_data(create_hparams(settings + "batch_capacity_seconds=0.51"))


def test_a_folder_that_has_none_of_the_clips_is_one_line(corpus, settings, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    settings = settings.replace(f"data_dir={corpus}", f"data_dir={tmp_path}/elsewhere")
    (line,) = report(settings)
    assert line.startswith(f"setting data_dir={tmp_path}/elsewhere: has none of the clips that ")


def test_both_problems_of_a_line_and_a_missing_list_are_in_the_report(corpus, settings):
    write_bad_clips(corpus)
    with open(corpus / "train.txt", "a") as file:
        file.write("rate.wav|\n")
    (corpus / "val.txt").unlink()
    lines = report(settings)
    assert lines[0].startswith("filelist 'val.txt': No such file or directory; scripts/prepare")
    assert lines[1:] == [
        "train.txt:9: rate.wav: sampling rate 16000 Hz; resample it to 22050 Hz, or set "
        "sampling_rate; and: text '' has nothing to speak once cleaned; mend or remove it"
    ]


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_one_clip_by_two_names_is_found(corpus, settings, link):
    for name, other in (("again", "0.wav"), ("leak", "9.wav")):
        getattr(corpus / f"{name}.wav", link)(corpus / other)
    with open(corpus / "train.txt", "a") as file:
        file.write("again.wav|one\nleak.wav|two\n")
    assert report(settings) == [
        "train.txt:9: again.wav is on train.txt:1 too; keep one",
        "train.txt:10: leak.wav is in validation too (val.txt:2); keep one of the lines",
    ]


@pytest.mark.parametrize("name", ["WAV", "WAVEX", "FLAC", "RIFX", "AIFF", "RF64", "AU"])
def test_a_cut_is_noticed_or_the_format_refused(corpus, settings, name):
    samples, _ = soundfile.read(corpus / "0.wav")
    options = {"format": "WAV", "endian": "BIG"} if name == "RIFX" else {"format": name}
    soundfile.write(corpus / "x.wav", samples, 22050, subtype="PCM_16", **options)
    hparams, whole = create_hparams(settings), (corpus / "x.wav").read_bytes()
    if name in ("AIFF", "RF64", "AU"):
        with pytest.raises(UserError, match=f"x.wav: is {name}; convert it to wav or flac"):
            clips_of(corpus, settings, "x.wav|tone")
        return
    (clip,) = clips_of(corpus, settings, "x.wav|tone")
    assert open_mels([clip], hparams)(clip).shape == (clip.n_frames, 10)
    (corpus / "x.wav").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(UserError, match=r"x\.wav: (cut off|not a readable|not as long as)"):
        open_mels(clips_of(corpus, settings, "x.wav|tone"), hparams)


def test_a_cut_after_long_metadata_is_noticed(corpus, settings):
    whole = (corpus / "0.wav").read_bytes()
    comments = b"INFO" + (b"ICMT" + (40).to_bytes(4, "little") + b"once more " * 4) * 300
    long = whole[:36] + b"LIST" + len(comments).to_bytes(4, "little") + comments + whole[36:]
    (corpus / "x.wav").write_bytes(long)
    clips_of(corpus, settings, "x.wav|tone")
    (corpus / "x.wav").write_bytes(long[:-1000])
    with pytest.raises(UserError, match=r"x\.wav: cut off: has .* of the .* bytes"):
        clips_of(corpus, settings, "x.wav|tone")


def test_lists_without_a_line_are_said(corpus, settings):
    for name in ("train.txt", "val.txt"):
        (corpus / name).write_text("\n\n")
    assert report(settings) == ["train.txt: has no clips; write lines of path|text"]


def many_clips(corpus, bad: dict[int, str]) -> None:
    """A training list of 200 clips, of which those in ``bad`` have another wav."""
    tone = (corpus / "0.wav").read_bytes()
    lines = []
    for i in range(200):
        (corpus / f"many{i}.wav").write_bytes(tone)
        lines.append(f"{bad.get(i, f'many{i}.wav')}|tone\n")
    (corpus / "train.txt").write_text("".join(lines))


@pytest.mark.parametrize("cache", ["cache_mels=True", "cache_mels=False"])
def test_up_to_one_percent_of_bad_clips_can_be_skipped(corpus, settings, capsys, cache):
    write_bad_clips(corpus)
    many_clips(corpus, {7: "silent.wav", 9: "gone.wav"})
    hparams = create_hparams(settings + "on_bad_clip=skip," + cache)
    for _ in range(2):  # the second time from the cache
        train, val = data_utils.load_data(hparams)
        open_mels([*train, *val], hparams)
        assert len(train) == 198 and len(val) == 4
        assert "many8.wav" in train[7].path
        assert capsys.readouterr().out.replace(f"{corpus}/", "").splitlines() == [
            "skipped: train.txt:8: silent.wav: is silent (peak 0); remove its line",
            "skipped: train.txt:10: gone.wav: no such file; mend its line, or set data_dir",
            "skipped 2 of the 200 clips of train.txt",
        ]
    many_clips(corpus, {7: "silent.wav", 9: "gone.wav", 11: "stereo.wav"})
    lines = report(settings + "on_bad_clip=skip," + cache)
    assert len(lines) == 4 and lines[-1] == (
        "train.txt: 3 of 200 clips cannot be used, and on_bad_clip=skip leaves out at most 1%; "
        "mend them"
    )


@pytest.mark.parametrize(
    ("subtype", "step"),
    [("PCM_U8", 2**-7), ("PCM_16", 2**-15), ("PCM_24", 2**-23), ("PCM_32", 2**-31),
     ("FLOAT", 2**-24), ("DOUBLE", 2**-24)],
)  # fmt: skip
def test_every_sample_format_is_scaled_to_one(tmp_path, subtype, step):
    samples = 0.9 * np.sin(np.arange(5000) / 20)
    soundfile.write(tmp_path / "x.wav", samples, 22050, subtype=subtype)
    read = read_wav(str(tmp_path / "x.wav"))
    assert read.dtype == np.float32
    np.testing.assert_allclose(read, samples, atol=step + 2**-24)


@pytest.mark.parametrize("mels", ["cache_mels=False", "cache_mels=True"])
@pytest.mark.parametrize("change", ["removed", "replaced", "cut"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_changes_while_training_is_named(corpus, settings, mels, change, workers):
    hparams = create_hparams(settings + mels, base=None)
    hparams = dataclasses.replace(hparams, num_workers=workers)
    train, val = data_utils.load_data(hparams)
    dataset = MelDataset(train, open_mels([*train, *val], hparams))
    loader = make_loader(dataset, [[0, 1], [2, 3]], hparams)
    batches = data_utils.loaded(loader)
    assert len(next(batches).text) == 2
    path = corpus / "3.wav"
    if hparams.cache_mels:
        (path,) = corpus.glob("cache/*.mels")
    content = path.read_bytes()
    path.unlink()
    if change != "removed":
        path.write_bytes(content if change == "replaced" else content[: len(content) // 2])
    with pytest.raises(UserError) as error:
        list(data_utils.loaded(loader))
    remedy = ", to remake it" if hparams.cache_mels else ""
    since = "in use" if hparams.cache_mels else "since it was checked"
    assert str(error.value) == f"{path}: changed or removed {since}; start again{remedy}"


# A corpus of broken wavs, and lists of anything


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_a_broken_wav_is_read_or_refused(corpus, settings, data):
    """Cut anywhere, with bytes of it changed: never an error that is not ours."""
    content = bytearray((corpus / "3.wav").read_bytes())
    for place in data.draw(st.lists(st.integers(0, 60), max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    (corpus / "broken.wav").write_bytes(content[: data.draw(st.integers(0, len(content)))])
    hparams = create_hparams(settings + "cache_mels=False")
    try:
        (clip,) = clips_of(corpus, settings, "broken.wav|tone")
        mel = open_mels([clip], hparams)(clip)
    except UserError as error:
        assert f"{corpus}/list.txt:1: {corpus}/broken.wav: " in str(error)
    else:
        assert mel.shape == (clip.n_frames, 10) and np.isfinite(mel).all()


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    content=st.binary(max_size=200)
    | st.lists(
        st.sampled_from(["0.wav", "1.wav", "|", "\n", "\r\n", "\0", "tone", "..", "/", "{", "}"]),
        max_size=12,
    ).map(lambda parts: "".join(parts).encode())
)
def test_any_filelist_is_read_or_refused(corpus, settings, content):
    try:
        clips = clips_of(corpus, settings, content)
    except UserError as error:
        assert all(f"{corpus}/list.txt" in line for line in str(error).split("\n"))
    else:
        assert all(clip.ids and clip.n_frames > 0 for clip in clips)


# The cache


def cache_files(corpus) -> list[str]:
    return sorted(path.name for path in corpus.glob("cache/*.mels"))


def test_cached_and_computed_mels_are_equal(corpus, settings):
    hparams = create_hparams(settings)
    clips = load_clips(hparams.training_files, hparams)
    cached = open_mels(clips, hparams)
    computed = open_mels(clips, create_hparams(settings + "cache_mels=False"))
    for clip in clips:
        assert cached(clip).shape == (clip.n_frames, 10)
        np.testing.assert_array_equal(cached(clip), computed(clip))


def test_the_cache_is_used_until_anything_it_depends_on_changes(corpus, settings, monkeypatch):
    hparams = create_hparams(settings)
    clips = load_clips(hparams.training_files, hparams)
    open_mels(clips, hparams)
    (first,) = cache_files(corpus)
    with monkeypatch.context() as patch:
        patch.setattr(mel_cache, "run_parallel", lambda *_: pytest.fail("computed again"))
        open_mels(reversed(clips), hparams)
        open_mels(clips, create_hparams(settings + "batching_strategy=RAND"))
    open_mels(clips, create_hparams(settings + "mel_fmax=7000"))
    assert len(cache_files(corpus)) == 2
    time.sleep(0.01)
    write_tone(corpus / "0.wav", 0.1)
    clips = load_clips(hparams.training_files, hparams)
    open_mels(clips, hparams)
    assert len(cache_files(corpus)) == 3 and first in cache_files(corpus)


def test_only_clips_that_are_missing_are_computed(corpus, settings, monkeypatch):
    hparams = create_hparams(settings)
    clips = load_clips(hparams.training_files, hparams)
    fresh = open_mels(clips, create_hparams(settings + "cache_mels=False"))
    expected = [fresh(clip) for clip in clips]
    computed = []

    def run(function, clips, name):
        computed.append([clip.path for clip in clips])
        return real_run(function, clips, name)

    real_run = mel_cache.run_parallel
    monkeypatch.setattr(mel_cache, "run_parallel", run)
    for some, missing in ((clips[1:5], clips[1:5]), (clips[2:4], []), (clips[:4], clips[:1]),
                          (clips, clips[5:]), (clips[4:], [])):  # fmt: skip
        computed.clear()
        mels = open_mels(some, hparams)
        assert computed == [sorted(clip.path for clip in missing)] * bool(missing)
        for clip, mel in zip(clips, expected, strict=True):
            if clip in some:
                np.testing.assert_array_equal(mels(clip), mel)
    frames = sum(clip.n_frames for clip in clips)
    assert sum(path.stat().st_size for path in corpus.glob("cache/*.*")) < 40 * frames + 3000


def test_clips_that_are_cached_were_checked(corpus, settings, monkeypatch):
    """With on_bad_clip=skip the samples of the others alone are read again."""
    write_bad_clips(corpus)
    many_clips(corpus, {7: "silent.wav"})
    hparams = create_hparams(settings + "on_bad_clip=skip")
    train, val = data_utils.load_data(hparams)
    open_mels([*train, *val], hparams)
    read = []
    monkeypatch.setattr(
        clips_room, "run_parallel", lambda _, some, __: read.extend(some) or ["silent"] * len(some)
    )
    assert data_utils.load_data(hparams) == (train, val)
    assert [clip.path for clip in read] == [f"{corpus}/silent.wav"]


def open_in_process(clips, hparams) -> None:
    for clip, mel in ((clip, open_mels(clips, hparams)(clip)) for clip in clips):
        assert mel.shape == (clip.n_frames, 10)


def test_two_runs_at_once_compute_each_clip_once(corpus, settings):
    hparams = create_hparams(settings)
    clips = [*load_clips(f"{corpus}/train.txt+{corpus}/val.txt", hparams)]
    processes = [
        multiprocessing.Process(target=open_in_process, args=(some, hparams))
        for some in (clips[:8], clips[4:], clips)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    frames = sum(clip.n_frames for clip in clips)
    assert sum(path.stat().st_size for path in corpus.glob("cache/*.*")) < 40 * frames + 3000


def test_what_a_cache_costs_and_which_files_are_stale(corpus, settings, monkeypatch, capsys):
    (corpus / "cache").mkdir()
    for name in ("0123456789abcdef.f32", "0123456789abcdef.f32.part", "mine.f32"):
        (corpus / "cache" / name).write_bytes(bytes(100_000))
    hparams = create_hparams(settings)
    clips = load_clips(f"{corpus}/train.txt+{corpus}/val.txt", hparams)
    for some, change in ((clips[3:8], ""), (clips[:2], "mel_fmax=7000")):
        open_mels(some, create_hparams(settings + change))
    stale = max(corpus.glob("cache/*.mels"), key=lambda path: path.stat().st_mtime_ns)
    arguments = ["train.py", "-o", str(corpus / "run"), "--hparams", settings + "epochs=1"]
    monkeypatch.setattr(sys, "argv", arguments)
    before = {path: path.read_bytes() for path in corpus.glob("cache/*.*")}
    train.main()
    (line,) = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("mel cache")
    )
    used = set(corpus.glob("cache/*.mels")) - {stale}
    frames = sum(clip.n_frames for clip in clips)
    assert len(used) == 2 and line == (
        f"mel cache {corpus}/cache: {sum(p.stat().st_size for p in used) / 1e6:.1f} MB, "
        f"{40 * frames / 1e6:.1f} MB of it for this run; this run does not read 0.2 MB more, "
        "stale unless another run does: 0123456789abcdef.f32, 0123456789abcdef.f32.part, "
        f"{stale.name}"
    )
    assert all(path.read_bytes() == content for path, content in before.items())


def test_ctrl_c_while_mels_are_computed_ends_in_one_line(corpus, settings):
    """It reaches every process of the group, as a terminal sends it; none is left."""
    tone = (corpus / "7.wav").read_bytes()
    lines = [f"many{i}.wav|tone\n" for i in range(4000)]
    for i in range(4000):
        (corpus / f"many{i}.wav").write_bytes(tone)
    (corpus / "train.txt").write_text("".join(lines))
    process = subprocess.Popen(
        [sys.executable, "train.py", "-o", corpus / "run", "--hparams", settings],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while not any(part.stat().st_size for part in corpus.glob("cache/*.part")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=100)[1] == "interrupted\n" and process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not list(corpus.glob("cache/*.*"))


@pytest.mark.parametrize("content", [b"", b"damaged", "cut", "other type", "header"])
def test_a_damaged_cache_is_rebuilt(corpus, settings, content):
    hparams = create_hparams(settings)
    clips = load_clips(hparams.training_files, hparams)
    expected = open_mels(clips, hparams)(clips[0])
    path = corpus / "cache" / cache_files(corpus)[0]
    whole = path.read_bytes()
    header, _, rows = whole.partition(b"\n")
    if content == "other type":
        rows = np.frombuffer(rows, np.float32).astype(np.float64).tobytes()
        path.write_bytes(header + b"\n" + rows)
    elif content == "header":
        path.write_bytes(whole.replace(b"/0.wav", b"/1.wav", 1))
    else:
        path.write_bytes(whole[:-100] if content == "cut" else content)
    np.testing.assert_array_equal(open_mels(clips, hparams)(clips[0]), expected)
    assert path.read_bytes() == whole


# Batches


def test_collate_pads_and_sorts_by_text_length():
    lengths = [(2, 4), (5, 3), (3, 6)]
    items = [
        Item(i, torch.full((n,), n), torch.full((m, 10), float(m)))
        for i, (n, m) in enumerate(lengths)
    ]
    batch = collate(items)
    assert batch.indices == [1, 2, 0]
    assert batch.text.tolist() == [[5, 5, 5, 5, 5], [3, 3, 3, 0, 0], [2, 2, 0, 0, 0]]
    assert batch.text_lengths.tolist() == [5, 3, 2] and batch.mel_lengths.tolist() == [3, 6, 4]
    assert batch.mel.shape == (3, 10, 6) and batch.text.dtype == torch.int64
    assert batch.mel[0, 0].tolist() == [3, 3, 3, 0, 0, 0]
    assert batch.gate.tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_epoch_has_every_clip_once_in_the_plan_of_the_sampler(corpus, settings, workers):
    hparams = dataclasses.replace(create_hparams(settings), num_workers=workers)
    clips = load_clips(hparams.training_files, hparams)
    sampler = data_utils.training_sampler(clips, hparams)
    loader = make_loader(MelDataset(clips, open_mels(clips, hparams)), sampler, hparams)
    processes = set()
    state = torch.get_rng_state()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(loader)
        assert [sorted(b.mel_lengths.tolist()) for b in batches] == [
            sorted(clips[i].n_frames for i in indices) for indices in sampler.plan
        ]
        assert sum(len(b.text) for b in batches) == len(clips)
        processes.add(tuple(sorted(p.pid for p in multiprocessing.active_children())))
    assert len(processes) == 1, "workers persist across epochs"
    assert torch.equal(state, torch.get_rng_state()), "loading draws nothing from training's noise"


def test_validation_batches_depend_on_no_batching_setting(corpus, settings):
    clips = load_clips(f"{corpus}/train.txt", create_hparams(settings))
    batches = data_utils.validation_batches(clips, create_hparams(settings))
    assert sorted(i for batch in batches for i in batch) == list(range(8))
    assert [len(batch) for batch in batches] == [3, 3, 2]
    for change in ("batching_strategy=SB", "dynamic_batch_size=False", "seed=7", "lrf=0.9"):
        assert batches == data_utils.validation_batches(clips, create_hparams(settings + change))


def test_a_batch_size_above_the_set_is_refused(corpus, settings):
    hparams = create_hparams(settings.replace("batch_size=3", "batch_size=9"))
    with pytest.raises(UserError, match=r"batch_size=9: .*train\.txt has 8 clips; use at most 8"):
        data_utils.training_sampler(load_clips(hparams.training_files, hparams), hparams)


def test_the_capacity_in_seconds_is_frames(corpus, settings):
    hparams = create_hparams(settings + "batch_capacity_seconds=1.0")
    clips = load_clips(hparams.training_files, hparams)
    for indices in data_utils.training_sampler(clips, hparams).plan:
        assert len(indices) * max(clips[i].n_frames for i in indices) <= 22050 / 276
