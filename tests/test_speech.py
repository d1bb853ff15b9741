"""Free-running speech and its measures, and scripts/evaluate.py, which prints them."""

import csv
import errno
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import build

from cli import UserError
from scripts import evaluate
from speech import Spoken, attention_errors, mel_cepstral_distortion, speak
from training.checkpoint import load_checkpoint, save_checkpoint
from training.logger import draw_alignment, render
from training.validation import stop_errors

TRAINED = Path(__file__).parent / "old_run" / "checkpoint_00000003.pt"
TEXT, FRAMES = "we saw the harbor at noon", 4  # frames per symbol
HOP = 0.0125  # seconds


def align(*path, weight=0.9):
    """An alignment whose frames attend to the symbols of ``path``, 4 frames to each."""
    alignment = torch.full((len(path) * FRAMES, len(TEXT)), (1 - weight) / (len(TEXT) - 1))
    for i, j in enumerate(path):
        alignment[i * FRAMES : (i + 1) * FRAMES, j] = weight
    return alignment


def mels(n_frames, seed=0):
    """Smooth random mels (80, n_frames)."""
    noise = torch.randn(80, n_frames, generator=torch.Generator().manual_seed(seed))
    return torch.cumsum(noise, 0) / 3 - 5


def test_a_copy_has_no_distortion_whatever_its_loudness_and_pace():
    mel = mels(40)
    assert mel_cepstral_distortion(mel, mel) == 0
    assert mel_cepstral_distortion(mel + 2, mel) == pytest.approx(0, abs=1e-5)
    assert mel_cepstral_distortion(mel.repeat_interleave(2, 1), mel) == 0


def test_distortion_grows_with_the_shift():
    mel = mels(40)
    shifted = [mel_cepstral_distortion(mel.roll(n, 0), mel) for n in (1, 2, 4)]
    assert 0 < shifted[0] < shifted[1] < shifted[2]
    assert mel_cepstral_distortion(mel.roll(4, 0), mel) == pytest.approx(
        mel_cepstral_distortion(mel, mel.roll(4, 0))
    )


def test_distortion_is_the_difference_of_spectra_in_db():
    # A cosine of a dB over the channels: the root of its mean square is 1 / sqrt(2) dB.
    channel = (torch.arange(80) + 0.5) / 80
    cosine = torch.cos(3 * math.pi * channel)[:, None] * math.log(10) / 20
    mel = mels(30)
    assert mel_cepstral_distortion(mel + cosine, mel) == pytest.approx(1 / math.sqrt(2), rel=1e-3)


def test_a_perfect_alignment_has_no_errors():
    errors = attention_errors(align(*range(len(TEXT))), TEXT, HOP)
    assert errors == ([], 0, 0)


@pytest.mark.parametrize("word", TEXT.split())
def test_a_removed_word_is_skipped(word):
    start = TEXT.index(word)
    rest = [j for j in range(len(TEXT)) if not start <= j < start + len(word)]
    assert attention_errors(align(*rest), TEXT, HOP) == ([word], 0, 0)


def test_words_after_an_early_end_are_skipped():
    assert attention_errors(align(*range(11)), TEXT, HOP).skipped == ["harbor", "at", "noon"]


def test_going_back_is_a_repeat_and_a_glance_is_not():
    n = len(TEXT)
    twice = align(*range(17), *range(11, n))
    assert attention_errors(twice, TEXT, HOP) == ([], 1, 0)
    glance = align(*range(n))
    glance[60] = glance[8]
    assert attention_errors(glance, TEXT, HOP) == ([], 0, 0)


def test_dispersed_attention_is_a_break():
    n = len(TEXT)
    lost = torch.full((20, n), 1 / n)
    broken = torch.cat((align(*range(n)), lost))
    found = attention_errors(broken, TEXT, HOP)
    assert found.breaks == 1 and not found.skipped


def test_stop_errors_count_frames_from_the_true_end():
    gate = torch.full((4, 9), -5.0)
    gate[0, 4:] = 5  # right: the clip has 5 frames
    gate[1, 2:] = 5  # 2 early
    gate[2, 6:] = 5  # after the end, where the padding stops it: 1 late
    lengths = torch.tensor([5, 5, 5, 9])  # the last never stops
    assert stop_errors(gate, lengths, 0.5).tolist() == [0, 2, 1, 1]


# Speaking


def test_speech_depends_on_the_seed_alone():
    model = build(max_decoder_steps=12, gate_threshold=0.99)
    model.train()
    texts = [[5, 6, 7], [8] * 9, [9, 10]]
    state = torch.get_rng_state()
    first, second = (dict(speak(model, texts, batch_size=2)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert [*first] == [1, 0, 2]  # the longest first
    for i, spoken in first.items():
        assert torch.equal(spoken.mel, second[i].mel)
        assert spoken.mel.shape == (10, 12) and not spoken.stopped
        assert spoken.alignment.shape == (12, len(texts[i]))
    other = dict(speak(model, texts, seed=1, batch_size=2))
    assert not torch.equal(first[0].mel, other[0].mel)


def test_speech_keeps_no_more_than_itself_in_memory():
    for _, spoken in speak(build(max_decoder_steps=9).eval(), [[5] * 4, [6] * 8]):
        for kept in spoken[:2]:
            assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()


def test_a_text_with_dollars_is_a_title_as_it_is():
    figure = draw_alignment(torch.ones(4, 3), r"for $\frac$", HOP)
    assert render(figure).shape[2] == 4  # as a formula, it would be refused
    assert figure.axes[0].get_title(loc="left") == r"for $\frac$"


# evaluate.py


@pytest.fixture
def evaluated(settings, corpus, tmp_path, capsys):
    """Evaluate checkpoints on the corpus's validation set: the printed lines and the results."""

    def call(*options, checkpoints=(TRAINED,), changes=""):
        output = ["-o", f"{tmp_path}/out/result", "--hparams"]
        data = ",".join(s for s in settings.split(",") if "data_dir" in s or "cache_dir" in s)
        lists = ["--filelist", f"{corpus}/val.txt"]
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        evaluate.main(
            ["-c", *map(str, checkpoints), *lists, *output, f"{data},{changes}", *options]
        )
        return capsys.readouterr().out, json.loads((tmp_path / "out/result.json").read_text())

    return call


def test_the_same_seed_gives_the_same_numbers(evaluated, tmp_path):
    printed, [first] = evaluated()
    with open(tmp_path / "out/result.csv") as file:
        [row] = csv.DictReader(file)
    _, [second] = evaluated()
    for result in (first, second):  # the only one that is a time
        assert result.pop("real_time_factor") > 0
    assert first == second
    assert all(
        float(row[name]) == value for name, value in first.items() if name in evaluate.COLUMNS
    )
    assert f"{first['loss']:.4f}" in printed and len(first["clips"]) == 4
    assert first["epoch"] and first["never stops"] == 4  # hardly trained


def speak_targets(monkeypatch, change):
    """Let the model speak the clips themselves, each changed by ``change(mel, alignment, ids)``."""

    def speak(model, texts, seed):
        for i, ids in enumerate(texts):
            n = targets[i].size(1)
            steps = torch.arange(n) * len(ids) // n
            alignment = torch.nn.functional.one_hot(steps, len(ids)).float()
            stopped = n < model.max_decoder_steps
            yield i, Spoken(*change(targets[i], alignment, ids), stopped)

    targets = []
    original = evaluate.open_mels

    def open_mels(clips, hparams):
        mels = original(clips, hparams)
        targets[:] = [torch.from_numpy(mels(clip)).T for clip in clips]
        return mels

    monkeypatch.setattr(evaluate, "open_mels", open_mels)
    monkeypatch.setattr(evaluate, "speak", speak)


def test_targets_are_judged_perfect_and_changed_ones_not(evaluated, corpus, monkeypatch):
    wavs = [line.partition("|")[0] for line in (corpus / "val.txt").read_text().splitlines()]
    (corpus / "val.txt").write_text("".join(f"{wav}|these are tones\n" for wav in wavs))
    speak_targets(monkeypatch, lambda mel, alignment, ids: (mel, alignment))
    for changes in ("", "max_decoder_steps=9"):  # which all of the clips exceed
        printed, [copied] = evaluated(changes=changes)
        assert copied["distortion"] == copied["duration_error"] == copied["failed"] == 0
        assert ("note: clips are longer than max_decoder_steps=9" in printed) == bool(changes)

    def late(mel, alignment, ids):
        return mel.repeat_interleave(2, 1), alignment.repeat_interleave(2, 0)

    speak_targets(monkeypatch, late)
    _, [delayed] = evaluated()
    assert delayed["duration_error"] == pytest.approx(100) and delayed["failed"] == 0

    def without_a_word(mel, alignment, ids):
        space = max(i for i, symbol in enumerate(ids) if symbol == 11)
        kept = alignment.argmax(1) <= space
        return mel[:, kept], alignment[kept]

    speak_targets(monkeypatch, without_a_word)
    _, [shortened] = evaluated()
    assert shortened["skips"] == 4 and shortened["failed"] == 100
    assert all(row["skipped"] == ["tones"] for row in shortened["clips"])


def test_it_says_which_checkpoint_speaks_best():
    def result(name, loss, failed, *distortions):
        clips = [{"distortion": distortion} for distortion in distortions]
        mean = sum(distortions) / len(distortions)
        return {
            "checkpoint": name, "loss": loss, "failed": failed, "distortion": mean, "clips": clips,
        }  # fmt: skip

    a, b = result("a", 1, 10.0, 4, 5), result("b", 2, 0.0, 3, 3)
    assert evaluate.compare([a, b]) == (
        "a has the lowest loss, but b speaks better: 0.0 % of the clips fail instead of 10.0 %, "
        "and the distortion is lower by 1.50 +- 0.50 dB (standard error)"
    )
    a["clips"], b["clips"] = a["clips"][:1], b["clips"][:1]  # one clip has no standard error
    assert evaluate.compare([a, b]).endswith("the distortion is lower by 1.00 dB")
    assert (
        evaluate.compare([a, result("c", 2, 20.0, 1, 1)])
        == "a has the lowest loss, and speaks best"
    )
    failing = [result(name, 1, 100.0, 4) for name in "ab"]
    assert evaluate.compare(failing).startswith("a has the lowest loss; none of them speaks")


def test_numbers_are_printed_before_they_are_written(evaluated, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evaluate, "write", full)
    with pytest.raises(OSError, match="No space left"):
        evaluated()
    assert TRAINED.name in capsys.readouterr().out


def test_what_cannot_be_evaluated_is_refused(evaluated, corpus, tmp_path):
    lines = (corpus / "val.txt").read_text().splitlines()
    state, other = load_checkpoint(TRAINED), tmp_path / "other.pt"
    for name, filelist in (("training_files", "train.txt"), ("validation_files", "val.txt")):
        state["hparams"][name] = f"{corpus}/{filelist}"
    save_checkpoint(tmp_path / "own.pt", state)
    state["hparams"]["validation_files"] = f"{corpus}/train.txt"
    save_checkpoint(other, state)
    with pytest.raises(UserError, match=r"other\.pt: has another validation set than .*own\.pt"):
        evaluated("--filelist", "", checkpoints=(tmp_path / "own.pt", other))
    changes = ("batch_size", 8, "give --hparams batch_size="), ("hop_length", 256, "evaluate them")
    for name, value, fix in changes:
        state = load_checkpoint(TRAINED)
        state["hparams"][name] = value
        save_checkpoint(other, state)
        with pytest.raises(UserError, match=rf"other\.pt: has {name}={value}, .*{fix}"):
            evaluated(checkpoints=(TRAINED, other))
    (tmp_path / "kept.csv").write_text("kept")
    (tmp_path / "bad.txt").write_text("\n".join([lines[0], "gone.wav|tone"]))
    blocked = tmp_path / "file"
    blocked.write_text("")
    for options, message in (
        (["--filelist", f"{tmp_path}/bad.txt"], r"bad\.txt:2: .*gone\.wav"),
        (["--filelist", f"{tmp_path}/none.txt"], r"none\.txt"),
        (["--hparams", "gate_threshold=2"], "gate_threshold"),
        (["-o", f"{blocked}/result"], "cannot be written"),
        (["-o", f"{tmp_path}/kept"], r"kept\.csv: exists already; give another -o, or remove it"),
    ):
        with pytest.raises(UserError, match=message):
            evaluated(*options)
    with pytest.raises(UserError, match="no such checkpoint"):
        evaluated(checkpoints=(TRAINED, tmp_path / "none.pt"))
    with pytest.raises(UserError, match="--seed: -1: use a whole number"):
        evaluated("--seed=-1")
    assert not (tmp_path / "out").exists()
