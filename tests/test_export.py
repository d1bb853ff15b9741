"""export.py, and checkpoints of other code."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from conftest import MODEL, build, save_model, set_gate
from torch import nn
from torch.testing import assert_close

from hparams import HParams
from model import Tacotron2
from scripts import export, synthesize
from speech import load_model
from training.checkpoint import find_checkpoints


def nvidias_layers() -> dict[str, nn.Module]:
    """Returns layers with the names and shapes of NVIDIA's published model, in its order."""

    def convolutions(part: str, *dims: int) -> dict[str, nn.Module]:
        layers = {}
        for i, (n_in, n_out) in enumerate(pairwise(dims)):
            layers[f"{part}.convolutions.{i}.0.conv"] = nn.Conv1d(n_in, n_out, 5)
            layers[f"{part}.convolutions.{i}.1"] = nn.BatchNorm1d(n_out)
        return layers

    linear = partial(nn.Linear, bias=False)
    attention = "decoder.attention_layer"
    return {
        "embedding": nn.Embedding(148, 512),
        **convolutions("encoder", 512, 512, 512, 512),
        "encoder.lstm": nn.LSTM(512, 256, bidirectional=True),
        "decoder.prenet.layers.0.linear_layer": linear(80, 256),
        "decoder.prenet.layers.1.linear_layer": linear(256, 256),
        "decoder.attention_rnn": nn.LSTMCell(256 + 512, 1024),
        f"{attention}.query_layer.linear_layer": linear(1024, 128),
        f"{attention}.memory_layer.linear_layer": linear(512, 128),
        f"{attention}.v.linear_layer": linear(128, 1),
        f"{attention}.location_layer.location_conv.conv": nn.Conv1d(2, 32, 31, bias=False),
        f"{attention}.location_layer.location_dense.linear_layer": linear(32, 128),
        "decoder.decoder_rnn": nn.LSTMCell(1024 + 512, 1024),
        "decoder.linear_projection.linear_layer": nn.Linear(1024 + 512, 80),
        "decoder.gate_layer.linear_layer": nn.Linear(1024 + 512, 1),
        **convolutions("postnet", 80, 512, 512, 512, 512, 80),
    }


def test_names_shapes_and_size_are_nvidias():
    with torch.device("meta"):
        ours, theirs = Tacotron2(HParams()), nvidias_layers()
    expected = {}
    for path, layer in theirs.items():
        expected |= {f"{path}.{name}": x.shape for name, x in layer.state_dict().items()}
    expected["variance_gain"] = (80,)  # which is ours alone
    assert {name: x.shape for name, x in ours.state_dict().items()} == expected
    assert sum(parameter.numel() for parameter in ours.parameters()) == 28_193_153


@pytest.mark.parametrize("prefix", ["", "module._orig_mod.", "_orig_mod.module.", "model."])
def test_nvidias_weights_load_and_speak(tmp_path, prefix):
    path, ours = tmp_path / "theirs.pt", set_gate(build(), 100).state_dict()
    theirs = {prefix + name: x for name, x in ours.items() if name != "variance_gain"}
    if not prefix:
        build().load_state_dict(theirs, strict=True)
    torch.save({"state_dict": theirs, "iteration": 5, "learning_rate": 1e-3}, path)
    assert_close(dict(load_model(path, MODEL).state_dict()), dict(ours), rtol=0, atol=0)
    synthesize.main(["-c", str(path), "-o", f"{tmp_path}/speech", "--hparams", MODEL, "Hm."])
    assert (tmp_path / "speech" / "1.wav").exists()


def test_a_published_model_of_other_symbols_is_loaded_with_them(tmp_path):
    theirs = build(symbols="abc -", n_symbols=6).state_dict()  # padding and these
    torch.save({"state_dict": theirs}, tmp_path / "published.pt")
    loaded = load_model(tmp_path / "published.pt", f"{MODEL},symbols='abc -'")
    assert_close(dict(loaded.state_dict()), dict(theirs), rtol=0, atol=0)


def test_weights_alone_are_the_model_and_start_another_run(tmp_path, settings, run):
    run("first", settings + "epochs=1")
    checkpoint, path = find_checkpoints(tmp_path / "first")[0], tmp_path / "new" / "weights.pt"
    export.main(["-c", str(tmp_path / "first"), "-o", str(path)])
    old, new = load_model(checkpoint), load_model(path)
    assert new.hparams == old.hparams
    assert_close(dict(new.state_dict()), dict(old.state_dict()), rtol=0, atol=0)
    assert path.stat().st_size < 0.5 * checkpoint.stat().st_size  # a third, of a larger model
    assert run("second", settings + "epochs=1", "-c", str(path)) == 0


def test_weights_in_16_bits_are_half_as_large_and_are_read_as_fp32(tmp_path):
    """Values that 16 bits cannot hold stay as they are."""
    model, half = build(), tmp_path / "half.pt"
    model.postnet.convolutions[0][1].running_var[0] = 1e5
    whole = save_model(tmp_path / "whole.pt", model)
    export.main(["-c", str(whole), "-o", str(half), "--half"])
    rounded = load_model(half)
    assert rounded.postnet.convolutions[0][1].running_var[0] == 1e5
    assert_close(dict(rounded.state_dict()), dict(model.state_dict()), rtol=1e-3, atol=1e-6)
    n_bytes = sum(2 * weight.numel() for weight in model.parameters())
    assert whole.stat().st_size - half.stat().st_size > 0.95 * n_bytes
