"""Free-running speech and its measures, and scripts/evaluate.py, which prints them."""

import math
from collections.abc import Callable

import pandas as pd
import pytest
import torch
from conftest import build, save_model, set_gate
from torch.testing import assert_close

import speech
from corpus.clips import load_clips
from data_utils import Item, MelDataset, open_mels
from scripts import evaluate
from speech import (
    Spoken,
    attention_errors,
    detail,
    measure_variance_gain,
    mel_cepstral_distortion,
    restore_variance,
    speak,
)

TEXT, FRAMES = "we saw the harbor at noon", 4  # frames per symbol
HOP = 0.0125  # seconds


def align(*path: int) -> torch.Tensor:
    """An alignment whose frames attend to the symbols of ``path``, 4 frames to each."""
    alignment = torch.full((len(path) * FRAMES, len(TEXT)), 0.1 / (len(TEXT) - 1))
    for i, j in enumerate(path):
        alignment[i * FRAMES : (i + 1) * FRAMES, j] = 0.9
    return alignment


def test_distortion_is_the_difference_of_spectra_in_db_whatever_the_loudness_and_pace():
    noise = torch.randn(80, 40, generator=torch.Generator().manual_seed(0))
    mel = torch.cumsum(noise, 0) / 3 - 5  # smooth
    assert mel_cepstral_distortion(mel, mel) == 0
    assert mel_cepstral_distortion(mel + 2, mel) == pytest.approx(0, abs=1e-5)
    assert mel_cepstral_distortion(mel.repeat_interleave(2, 1), mel) == 0
    # A cosine of a dB over the channels: the root of its mean square is 1 / sqrt(2) dB.
    channel = (torch.arange(80) + 0.5) / 80
    cosine = torch.cos(3 * math.pi * channel)[:, None] * math.log(10) / 20
    assert mel_cepstral_distortion(mel + cosine, mel) == pytest.approx(1 / math.sqrt(2), rel=1e-3)


def test_a_removed_word_is_skipped():
    for number, word in enumerate(TEXT.split()):
        start = TEXT.index(word)
        rest = [j for j in range(len(TEXT)) if not start <= j < start + len(word)]
        assert attention_errors(align(*rest), TEXT, HOP) == ([number], 0, 0)


def test_going_back_is_a_repeat_and_dispersed_attention_a_break():
    """Neither reading on nor a glance is one."""
    n = len(TEXT)
    whole = align(*range(n))
    assert attention_errors(whole, TEXT, HOP) == ([], 0, 0)
    twice = align(*range(17), *range(11, n))
    assert attention_errors(twice, TEXT, HOP) == ([], 1, 0)
    glance = whole.clone()
    glance[60] = glance[8]
    assert attention_errors(glance, TEXT, HOP) == ([], 0, 0)
    found = attention_errors(torch.cat((whole, torch.full((20, n), 1 / n))), TEXT, HOP)
    assert found.breaks == 1 and not found.skipped


def test_speech_depends_on_the_seed_alone_and_has_the_variance_that_is_restored():
    model = build(max_decoder_steps=12, end_threshold=0.9999)
    model.variance_gain.fill_(0.5)
    model.train()
    texts = [[5, 6, 7], [8] * 9, [9, 10]]
    state = torch.get_rng_state()
    first, again, other = (dict(speak(model, texts, seed, batch_size=2)) for seed in (0, 0, 1))
    predicted = dict(speak(model, texts, batch_size=2, as_predicted=True))
    assert torch.equal(torch.get_rng_state(), state) and model.training
    for i, spoken in first.items():
        assert torch.equal(spoken.mel, again[i].mel)
        assert not torch.equal(spoken.mel, other[i].mel)
        assert_close(spoken.mel, predicted[i].mel + 0.5 * detail(predicted[i].mel))
        assert spoken.mel.shape == (10, 12) and not spoken.stopped
        assert spoken.alignment.shape == (12, len(texts[i]))


def test_restoring_variance_gives_mels_the_detail_that_the_clips_have(monkeypatch):
    """Here the model says all clips, but with some bands too smooth."""
    noise = torch.randn(5, 200, 10, generator=torch.Generator().manual_seed(0)).cumsum(1)
    items = [Item(i, torch.tensor([5, 6]), mel) for i, mel in enumerate(noise)]
    smoothing = torch.linspace(0, 0.8, 10)[:, None]
    smooth = [mel - smoothing * detail(mel) for mel in noise.mT]
    spoken = [(i, Spoken(mel, None, True, [])) for i, mel in enumerate(smooth)]
    monkeypatch.setattr(speech, "speak", lambda *_, as_predicted: spoken)
    gain = measure_variance_gain(build(), items)
    restored = [restore_variance(mel, gain) for mel in smooth]
    deviations = [torch.cat([detail(x) for x in mels], 1).std(1) for mels in (noise.mT, restored)]
    assert_close(deviations[1], deviations[0], rtol=0.15, atol=0)
    assert gain[0].abs() < 0.1 and gain[-1] > 1


# evaluate.py


def test_the_same_seed_gives_the_same_numbers(data, corpus, tmp_path, capsys):
    # The clips have 35 frames at most: 25 steps of two frames make more.
    models = [set_gate(build(n_frames_per_step=2, max_decoder_steps=25), x) for x in (-100, 100)]
    paths = [str(save_model(tmp_path / f"{i}.pt", model)) for i, model in enumerate(models)]
    options = ["--filelist", f"{corpus}/val.txt", "--hparams", data]
    for name in ("first", "again"):
        evaluate.main(["-c", *paths, *options, "-o", f"{tmp_path}/new/{name}"])
    for ending in (".csv", "_clips.csv"):
        first, again = (tmp_path / f"new/{name}{ending}" for name in ("first", "again"))
        assert first.read_bytes() == again.read_bytes()
    table, clips = (pd.read_csv(tmp_path / f"new/first{ending}.csv") for ending in ("", "_clips"))
    assert f"{table['loss'][0]:.3f}" in capsys.readouterr().out
    assert table["never stops"].tolist() == [4, 0] and table["stops early"].tolist() == [0, 4]
    assert table["any of these %"].tolist() == [100, 100]
    frames = clips["seconds"] * models[0].hparams.sampling_rate / models[0].hparams.hop_length
    assert frames.round(6).tolist() == [50] * 4 + [2] * 4


def test_targets_are_judged_perfect_and_changed_ones_not(corpus, hparams, monkeypatch):
    """The model speaks the clips themselves: as they are, at half the pace, without a word."""
    wavs = [line.partition("|")[0] for line in (corpus / "val.txt").read_text().splitlines()]
    (corpus / "val.txt").write_text("".join(f"{wav}|these are tones\n" for wav in wavs))
    clips = load_clips(f"{corpus}/val.txt", hparams)
    dataset = MelDataset(clips, open_mels(clips, hparams), 1)

    def judge(change: Callable) -> tuple[dict, pd.DataFrame]:
        """The row and the clips of a model that speaks frames ``change(range(n_frames))``."""
        spoken = []
        for item in dataset:
            frames = change(torch.arange(len(item.mel)))
            alignment = torch.eye(len(item.ids))[frames * len(item.ids) // len(item.mel)]
            spoken.append(Spoken(item.mel[frames].T, alignment, stopped=True, symbols=[]))
        monkeypatch.setattr(evaluate, "speak", lambda *_, **__: enumerate(spoken))
        return evaluate.evaluate(build(), dataset, seed=0)

    row, _ = judge(lambda frames: frames)
    assert row["MCD (dB)"] == row["duration off by %"] == row["any of these %"] == 0
    row, _ = judge(lambda frames: frames.repeat_interleave(2))
    assert row["duration off by %"] == pytest.approx(100) and row["any of these %"] == 0
    row, _ = judge(lambda frames: frames[: len(frames) * len("these are") // 15])
    assert row["skips"] == 4 and row["any of these %"] == 100
