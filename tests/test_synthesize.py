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
    """Call synthesize.py; returns what it prints. The folder it writes to is tmp_path/speech."""

    def call(checkpoint: Path, *arguments: str) -> str:
        options = ["-c", str(checkpoint), "-o", str(tmp_path / "speech"), *arguments]
        monkeypatch.setattr(sys, "argv", ["synthesize.py", *options])
        synthesize.main()
        return capsys.readouterr().out

    return call


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory) -> Path:
    """A checkpoint like NVIDIA's: weights of the full size, and no settings."""
    model = Tacotron2(HParams())
    torch.nn.init.constant_(model.decoder.gate_layer.linear_layer.bias, 100)  # stops at once
    path = tmp_path_factory.mktemp("nvidia") / "theirs.pt"
    save_checkpoint(path, {"iteration": 1, "state_dict": model.state_dict()})
    return path


def test_each_text_is_spoken(speak, tmp_path):
    printed = speak(TRAINED, "One tone.", "2 tones!", "--hparams", "max_decoder_steps=20")
    assert printed.count("cut off: it never stopped") == 2
    names = {f"{i}.{suffix}" for i in (1, 2) for suffix in ("wav", "png", "npy")}
    assert {path.name for path in (tmp_path / "speech").iterdir()} == names
    assert np.load(tmp_path / "speech" / "1.npy").shape == (10, 20)
    samples, rate = soundfile.read(tmp_path / "speech" / "1.wav")
    assert rate == 22050 and len(samples) == 19 * 276


def test_nvidias_checkpoint_is_spoken_and_loads_with_its_settings_given(speak, tmp_path, nvidia):
    assert "1.wav: 0.0 s, nothing to hear: it stopped at once" in speak(nvidia, "Hm.")
    assert np.load(tmp_path / "speech" / "1.npy").shape == (80, 1)
    with pytest.raises(UserError, match=r"theirs\.pt: holds no settings; give them"):
        Tacotron2.from_checkpoint(nvidia)


def test_a_trained_model_loads_in_one_line():
    model, state = Tacotron2.from_checkpoint(str(TRAINED)), load_checkpoint(TRAINED)
    assert not model.training and model.hparams.prenet_dim == 8
    assert all(weight.device.type == "cpu" for weight in model.parameters())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, state["state_dict"][name])
    # Its own settings go before those given, and changes before both.
    changed = Tacotron2.from_checkpoint(TRAINED, hparams=HParams(), gate_threshold=0.3)
    assert (changed.hparams.prenet_dim, changed.gate_threshold) == (8, 0.3)
    assert Tacotron2.from_checkpoint(TRAINED, "meta").embedding.weight.device.type == "meta"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("...", (), r"argument text '\.\.\.' has nothing to speak"),
        ("fine", ("--hparams", "prenet_dim=9"), "another model"),
        ("fine", ("--hparams", "prenet=9"), "unknown setting 'prenet'"),
        ("fine", ("--hparams", "gate_threshold=2"), "gate_threshold"),
    ],
)
def test_texts_and_settings_that_cannot_be_used_are_refused(
    speak, tmp_path, text, options, message
):
    with pytest.raises(UserError, match=message):
        speak(TRAINED, "fine", text, *options)
    assert not (tmp_path / "speech").exists()


def test_files_that_hold_no_model_are_refused(tmp_path):
    other = tmp_path / "other.pt"
    state = load_checkpoint(TRAINED)
    save_checkpoint(other, {**state, "hparams": {"gone": 1}})
    with pytest.raises(UserError, match=r"other\.pt: has settings .* not know \(gone\)"):
        Tacotron2.from_checkpoint(other)
    torch.save({"state_dict": {}, "hparams": Path}, other)
    with pytest.raises(UserError, match=r"other\.pt: holds Python code"):
        Tacotron2.from_checkpoint(other)
    other.write_text("text")
    with pytest.raises(UserError, match=r"other\.pt: not a checkpoint"):
        Tacotron2.from_checkpoint(other)
