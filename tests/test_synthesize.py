"""synthesize.py, and loading a trained model by Tacotron2.from_checkpoint."""

import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from checkpoint import load_checkpoint, save_checkpoint
from cli import UserError
from hparams import HParams
from model import Tacotron2
from scripts import synthesize

TRAINED = Path(__file__).parent / "old_run" / "checkpoint_00000003.pt"  # by train.py


@pytest.fixture
def speak(monkeypatch, tmp_path, capsys):
    """Call synthesize.py, which writes to tmp_path/speech; returns what it prints."""

    def call(*arguments: str | Path) -> str:
        argv = ["synthesize.py", "-o", tmp_path / "speech", "-c", *arguments]
        monkeypatch.setattr(sys, "argv", [str(argument) for argument in argv])
        synthesize.main()
        return capsys.readouterr().out

    return call


def test_each_text_is_spoken(speak, tmp_path):
    printed = speak(TRAINED, "One tone.", "2 tones!", "--hparams", "max_decoder_steps=20")
    assert printed.count("cut off: it never stopped") == 2
    names = sorted(path.name for path in (tmp_path / "speech").iterdir())
    assert names == ["1.npy", "1.png", "1.wav", "2.npy", "2.png", "2.wav"]
    assert np.load(tmp_path / "speech" / "1.npy").shape == (10, 20)
    samples, rate = soundfile.read(tmp_path / "speech" / "1.wav")
    assert rate == 22050 and len(samples) == 19 * 276


def test_nvidias_checkpoint_of_weights_alone_is_spoken(speak, tmp_path):
    model, theirs = Tacotron2(HParams()), tmp_path / "theirs.pt"
    torch.nn.init.constant_(model.decoder.gate_layer.linear_layer.bias, 100)  # stops at once
    save_checkpoint(theirs, {"iteration": 1, "state_dict": model.state_dict()})
    assert "1.wav: 0.0 s, nothing to hear: it stopped at once" in speak(theirs, "Hm.")
    assert np.load(tmp_path / "speech" / "1.npy").shape == (80, 1)
    with pytest.raises(UserError, match=r"theirs\.pt: holds no settings; give them"):
        Tacotron2.from_checkpoint(theirs)


def test_a_trained_model_loads_in_one_line():
    model, state = Tacotron2.from_checkpoint(str(TRAINED)), load_checkpoint(TRAINED)
    assert not model.training and model.hparams.prenet_dim == 8
    torch.testing.assert_close(model.state_dict(), state["state_dict"], rtol=0, atol=0)
    # Its own settings go before those given, and changes before both.
    changed = Tacotron2.from_checkpoint(TRAINED, hparams=HParams(), gate_threshold=0.3)
    assert (changed.hparams.prenet_dim, changed.gate_threshold) == (8, 0.3)
    assert Tacotron2.from_checkpoint(TRAINED, "meta").embedding.weight.device.type == "meta"


def test_texts_and_settings_that_cannot_be_used_are_refused(speak, tmp_path):
    for text, settings, message in (
        ("...", "", r"argument text '\.\.\.' has nothing to speak"),
        ("fine", "prenet_dim=9", "another model"),
        ("fine", "prenet=9", "unknown setting 'prenet'"),
        ("fine", "gate_threshold=2", "gate_threshold"),
    ):
        with pytest.raises(UserError, match=message):
            speak(TRAINED, "fine", text, "--hparams", settings)
    assert not (tmp_path / "speech").exists()


def test_files_that_hold_no_model_are_refused(tmp_path):
    path = tmp_path / "other.pt"
    for hparams, message in (
        ({"gone": 1}, r"other\.pt: has settings .* not know \(gone\)"),
        (Path, r"other\.pt: holds Python code"),
        (None, r"other\.pt: not a checkpoint"),
    ):
        torch.save({"state_dict": {}, "hparams": hparams}, path)
        if hparams is None:
            path.write_text("text")
        with pytest.raises(UserError, match=message):
            Tacotron2.from_checkpoint(path)
