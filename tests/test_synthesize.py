"""synthesize.py, and loading a trained model by Tacotron2.from_checkpoint."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from conftest import TINY

from checkpoint import load_checkpoint, save_checkpoint
from cli import UserError
from hparams import HParams, create_hparams
from model import Tacotron2
from scripts import synthesize

TRAINED = Path(__file__).parent / "old_run" / "checkpoint_00000003.pt"  # by train.py


@pytest.fixture
def speak(tmp_path, capsys):
    """Call synthesize.py, which writes to tmp_path/speech; returns what it prints."""

    def call(*arguments: str | Path) -> str:
        synthesize.main(["-o", f"{tmp_path}/speech", "-c", *map(str, arguments)])
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


def test_a_checkpoints_own_alphabet_is_spoken(speak, tmp_path):
    settings = "max_decoder_steps=5,text_cleaners=basic_cleaners,symbols=' !äfü'"
    hparams, path = create_hparams(TINY + settings), tmp_path / "german.pt"
    state = {"state_dict": Tacotron2(hparams).state_dict(), "hparams": asdict(hparams)}
    save_checkpoint(path, state)
    notes = [line for line in speak(path, "Fu\u0308xf!").splitlines() if "note: " in line]
    (note,) = notes  # u with a combining diaeresis is ü
    assert "'x' (U+0078) has no symbol and is left out" in note
    assert Tacotron2.from_checkpoint(path, symbols=" !äfü").hparams.symbols == " !äfü"
    other = r"^setting symbols: .*german\.pt was trained with other ones; leave it out$"
    for changes in ("symbols=' !äfö'", "symbols=", "symbols=abc"):  # as many, or other numbers
        with pytest.raises(UserError, match=other):
            speak(path, "Äff!", "--hparams", changes)
    with pytest.raises(UserError, match="'zoo' has nothing to speak"):
        speak(path, "zoo")


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


def test_what_cannot_be_spoken_is_refused(speak, tmp_path):
    newer, code, text = (tmp_path / name for name in ("newer.pt", "code.pt", "text.pt"))
    torch.save({"state_dict": {}, "hparams": {"gone": 1}}, newer)
    torch.save({"state_dict": {}, "hparams": Path}, code)
    text.write_text("text")
    for checkpoint, words, settings, message in (
        (TRAINED, "...", "", r"argument text '\.\.\.' has nothing to speak"),
        (TRAINED, "fine", "prenet_dim=9", "another model"),
        (TRAINED, "fine", "symbols=abc", r"03\.pt was trained with other ones; leave it out"),
        (TRAINED, "fine", "prenet=9", "unknown setting 'prenet'"),
        (TRAINED, "fine", "gate_threshold=2", "gate_threshold"),
        (newer, "fine", "", r"newer\.pt: has settings .* not know \(gone\)"),
        (code, "fine", "", r"code\.pt: holds Python code"),
        (text, "fine", "", r"text\.pt: not a checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            speak(checkpoint, "fine", words, "--hparams", settings)
    assert not (tmp_path / "speech").exists()
