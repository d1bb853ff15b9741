"""Scripts that work on what train.py left behind."""

import sys

import numpy as np
import pytest
import soundfile
import torch

import train
from checkpoint import load_checkpoint, save_checkpoint
from hparams import HParams, UserError
from model import Tacotron2
from scripts import compare_runs, synthesize


@pytest.fixture
def run(tmp_path, settings, monkeypatch):
    """A trained run of two epochs, its decoder cut off after 20 frames."""
    options = ["-o", str(tmp_path / "run"), "--hparams", settings + "epochs=2,max_decoder_steps=20"]
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    train.main()
    return tmp_path / "run"


def call(main, monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    main()


def test_compare_runs_prints_a_row_a_run(run, monkeypatch, capsys):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"event": "st')  # a run that goes on
    capsys.readouterr()
    call(compare_runs.main, monkeypatch, run, run)
    head, _, one, other = capsys.readouterr().out.splitlines()
    assert one == other
    cells = dict(zip(*([c.strip() for c in line.split("|")] for line in (head, one)), strict=True))
    assert cells["run"] == "run" and cells["epochs"] == "2" and cells["time"] == "+0.0 %"
    assert 0 < float(cells["ZPR %"]) < 100 and float(cells["batches"]) <= 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "metrics.jsonl: cannot be read"),
        ("not json\n", "metrics.jsonl: cannot be read"),
        ("{}\n[]\n", "metrics.jsonl: not what train.py writes"),
        ('{"event": "step", "epoch": 0}\n', "metrics.jsonl: no epoch has been validated yet"),
    ],
)
def test_compare_runs_names_what_it_cannot_read(tmp_path, monkeypatch, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        call(compare_runs.main, monkeypatch, tmp_path)


def test_synthesize_speaks_each_text(run, tmp_path, monkeypatch, capsys):
    checkpoint, speech = run / "checkpoint_last.pt", tmp_path / "speech"
    call(synthesize.main, monkeypatch, "One tone.", "2 tones!", "-c", checkpoint, "-o", speech)
    assert capsys.readouterr().out.count("cut off: it never stopped") == 2
    names = {f"{i}.{end}" for i in (1, 2) for end in ("wav", "png", "npy")}
    assert {path.name for path in speech.iterdir()} == names
    assert np.load(speech / "1.npy").shape == (10, 20)
    samples, rate = soundfile.read(speech / "1.wav")
    assert rate == 22050 and len(samples) == 19 * 276
    change = ("--hparams", "max_decoder_steps=10")
    call(synthesize.main, monkeypatch, "Tone.", "-c", checkpoint, "-o", speech, *change)
    assert np.load(speech / "1.npy").shape == (10, 10)


def test_synthesize_refuses_text_without_words(run, monkeypatch):
    with pytest.raises(UserError, match=r"text '\.\.\.' has nothing to speak"):
        call(synthesize.main, monkeypatch, "fine", "...", "-c", run / "checkpoint_last.pt")


def test_synthesize_takes_nvidias_checkpoint(tmp_path, monkeypatch):
    """It has weights of the full size, and no settings of ours."""
    model = Tacotron2(HParams())
    torch.nn.init.constant_(model.decoder.gate_layer.linear_layer.bias, 100)  # stops at once
    save_checkpoint(tmp_path / "theirs.pt", {"iteration": 1, "state_dict": model.state_dict()})
    call(synthesize.main, monkeypatch, "Hm.", "-c", tmp_path / "theirs.pt", "-o", tmp_path / "out")
    assert np.load(tmp_path / "out" / "1.npy").shape == (80, 1)


def test_settings_of_another_version_are_named(run, monkeypatch):
    state = load_checkpoint(run / "checkpoint_last.pt")
    save_checkpoint(run / "old.pt", {**state, "hparams": {"gone": 1}})
    with pytest.raises(UserError, match=r"old\.pt: no settings of this version in it .*'gone'"):
        call(synthesize.main, monkeypatch, "fine", "-c", run / "old.pt")
