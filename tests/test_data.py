import dataclasses
import multiprocessing
import os
import time

import librosa
import numpy as np
import pytest
import soundfile
import torch
from conftest import write_tone

import data_utils
from data_utils import MelDataset, collate, load_clips, make_loader, open_mels
from hparams import UserError, create_hparams
from layers import MelSpectrogram, griffin_lim


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


# Filelists and clips


def clips_of(corpus, settings: str, line: str | bytes) -> list[data_utils.Clip]:
    (corpus / "list.txt").write_bytes(line if isinstance(line, bytes) else line.encode())
    return load_clips(f"{corpus}/list.txt", create_hparams(settings))


def test_clips_from_several_lists_with_absolute_and_relative_paths(corpus, settings, tmp_path):
    (corpus / "other.txt").write_text(f"{corpus}/3.wav|Dr. Tone\n")
    hparams = create_hparams(settings)
    clips = load_clips(f"{corpus}/train.txt+{corpus}/other.txt", hparams)
    assert len(clips) == 9 and clips[0].path == f"{corpus}/0.wav"
    assert clips[8].place == f"{corpus}/other.txt:1"
    assert clips[8].ids == data_utils.text_to_sequence("doctor tone", ["basic_cleaners"])
    for clip in clips:
        mel = MelSpectrogram(hparams)(torch.from_numpy(data_utils.read_wav(clip.path)))
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
        ("0.wav|a|b", "list.txt:1: '0.wav|a|b' is not path|text"),
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
    assert not list(corpus.glob("cache/*"))


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
        ({"mel_cache_dir": "LICENSE"}, "setting mel_cache_dir=LICENSE: File exists; name a folder"),
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
    assert len(str(error.value).splitlines()) == 21
    assert str(error.value).endswith("and 30 more problems like these")


def test_windows_line_ends_and_a_byte_order_mark_are_no_problem(corpus, settings):
    line = "\ufeff0.wav|one\r\n\r\n1.wav|two\u2028lines\r\n"
    assert [(clip.place[-1], clip.text) for clip in clips_of(corpus, settings, line)] == [
        ("1", "one"),
        ("3", "two\u2028lines"),
    ]


def test_characters_that_vanish_are_reported_once(settings, capsys):
    texts = [("list:1", "a [bracket]"), ("list:2", "another [one]"), ("list:3", "fine")]
    data_utils.report_left_out(texts, create_hparams(settings))
    assert capsys.readouterr().out.splitlines() == [
        "note: list:1: '[' (U+005B) is no symbol: left out",
        "note: list:1: ']' (U+005D) is no symbol: left out",
    ]


# The cache


def cache_files(corpus) -> list[str]:
    return sorted(os.listdir(corpus / "cache"))


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
        patch.setattr(data_utils, "_run", lambda *_: pytest.fail("computed again"))
        open_mels(reversed(clips), hparams)
        open_mels(clips, create_hparams(settings + "batching_strategy=RAND"))
    open_mels(clips, create_hparams(settings + "mel_fmax=7000"))
    assert len(cache_files(corpus)) == 2
    time.sleep(0.01)
    write_tone(corpus / "0.wav", 0.1)
    clips = load_clips(hparams.training_files, hparams)
    open_mels(clips, hparams)
    assert len(cache_files(corpus)) == 3 and first in cache_files(corpus)


@pytest.mark.parametrize("content", [b"", b"damaged", "cut", "other type"])
def test_a_damaged_cache_is_rebuilt(corpus, settings, content):
    hparams = create_hparams(settings)
    clips = load_clips(hparams.training_files, hparams)
    expected = open_mels(clips, hparams)(clips[0])
    path = corpus / "cache" / cache_files(corpus)[0]
    whole = path.read_bytes()
    if content == "other type":
        np.save(path, np.load(path).astype(np.float64))
    else:
        path.write_bytes(whole[:-100] if content == "cut" else content)
    np.testing.assert_array_equal(open_mels(clips, hparams)(clips[0]), expected)
    assert path.read_bytes() == whole


# Batches


def test_collate_pads_and_sorts_by_text_length():
    lengths = [(2, 4), (5, 3), (3, 6)]
    clips = [(torch.full((n,), n), torch.full((m, 10), float(m))) for n, m in lengths]
    batch = collate(clips)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 9}, "train.txt has 8 clips; use at most 8"),
        (
            {"batch_capacity": 20},
            "has 40 frames, above the batch capacity of 20; set batch_capacity=40",
        ),
        (
            {"batch_capacity_seconds": 0.2},
            "capacity of 15; set batch_capacity_seconds=0.51 or more",
        ),
    ],
)
def test_impossible_batches_are_refused(corpus, settings, change, message):
    hparams = dataclasses.replace(create_hparams(settings), **change)
    with pytest.raises(UserError) as error:
        data_utils.training_sampler(load_clips(hparams.training_files, hparams), hparams)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_capacity_in_seconds_is_frames(corpus, settings):
    hparams = create_hparams(settings + "batch_capacity_seconds=1.0")
    clips = load_clips(hparams.training_files, hparams)
    for indices in data_utils.training_sampler(clips, hparams).plan:
        assert len(indices) * max(clips[i].n_frames for i in indices) <= 22050 / 276
