"""export.py, and checkpoints of other code."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import MODEL, TINY, build, records, save_model, set_gate
from torch import Tensor, nn
from torch.testing import assert_close

from cli import UserError
from hparams import HParams, create_hparams
from model import Tacotron2
from scripts import export, synthesize
from speech import load_model
from training.checkpoint import checkpoints, load_checkpoint, load_newest


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same tensors in the same order, by any names."""
    for one, other in zip(ours.values(), theirs.values(), strict=True):
        assert_close(one, other, rtol=0, atol=0)


def module_tree(h: HParams, plain: bool) -> nn.Module:
    """Layers with the names and shapes of NVIDIA's model, in its order, or, ``plain``, of
    torchaudio's, whose linear layers and convolutions have no level of their own."""
    n, mels, attention = h.encoder_embedding_dim, h.n_mel_channels, "decoder.attention_layer"
    both = h.decoder_rnn_dim + n
    n_filters, width = h.attention_location_n_filters, h.attention_location_kernel_size

    def convolutions(part: str, *dims: int) -> dict[str, nn.Module]:
        layers = {}
        for i, pair in enumerate(pairwise(dims)):
            layers[f"{part}.convolutions.{i}.0.conv"] = nn.Conv1d(*pair, 5)
            layers[f"{part}.convolutions.{i}.1"] = nn.BatchNorm1d(pair[1])
        return layers

    def linear(*sizes: int) -> nn.Module:
        return nn.Linear(*sizes, bias=False)

    layers = {
        "embedding": nn.Embedding(h.n_symbols, n),
        **convolutions("encoder", n, n, n, n),
        "encoder.lstm": nn.LSTM(n, n // 2, bidirectional=True),
        "decoder.prenet.layers.0.linear_layer": linear(mels, h.prenet_dim),
        "decoder.prenet.layers.1.linear_layer": linear(h.prenet_dim, h.prenet_dim),
        "decoder.attention_rnn": nn.LSTMCell(h.prenet_dim + n, h.attention_rnn_dim),
        f"{attention}.query_layer.linear_layer": linear(h.attention_rnn_dim, h.attention_dim),
        f"{attention}.memory_layer.linear_layer": linear(n, h.attention_dim),
        f"{attention}.v.linear_layer": linear(h.attention_dim, 1),
        f"{attention}.location_layer.location_conv.conv": nn.Conv1d(
            2, n_filters, width, bias=False
        ),
        f"{attention}.location_layer.location_dense.linear_layer": linear(
            n_filters, h.attention_dim
        ),
        "decoder.decoder_rnn": nn.LSTMCell(h.attention_rnn_dim + n, h.decoder_rnn_dim),
        "decoder.linear_projection.linear_layer": nn.Linear(both, mels),
        "decoder.gate_layer.linear_layer": nn.Linear(both, 1),
        **convolutions("postnet", mels, *[h.postnet_embedding_dim] * 4, mels),
    }
    tree = nn.Module()
    for path, layer in layers.items():
        if plain:
            path = path.removesuffix(".linear_layer").removesuffix(".conv")
        *parents, name = path.split(".")
        module = tree
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        module.add_module(name, layer)
    return tree


def test_names_shapes_and_size_are_nvidias():
    """Those of NVIDIA's published checkpoint."""
    with torch.device("meta"):
        ours, theirs = Tacotron2(HParams()), module_tree(HParams(), plain=False)
    shapes = [{name: x.shape for name, x in m.state_dict().items()} for m in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert sum(parameter.numel() for parameter in ours.parameters()) == 28_193_153


# Checkpoints of other code


def renamed(weights: dict[str, Tensor], names: str) -> dict[str, Tensor]:
    """Weights of a tiny model, by the names of torchaudio, DistributedDataParallel, or both."""
    if "torchaudio" in names:
        tree = module_tree(create_hparams(TINY), plain=True).state_dict()
        weights = dict(zip(tree, weights.values(), strict=True))
    prefix = "module." if "parallel" in names else ""
    return {prefix + name: weight for name, weight in weights.items()}


@pytest.mark.parametrize("names", ["parallel", "torchaudio", "torchaudio, parallel"])
def test_weights_by_other_names_load_and_speak(tmp_path, names):
    path, ours = tmp_path / "theirs.pt", set_gate(build(), 100).state_dict()
    weights = renamed(ours, names)
    for content in (weights, {"state_dict": weights}):
        torch.save(content, path)
        loaded = load_model(path, MODEL).state_dict()
        assert list(loaded) == list(ours)
        assert_equal(loaded, ours)
    synthesize.main(["-c", str(path), "-o", f"{tmp_path}/speech", "--hparams", MODEL, "Hm."])
    assert (tmp_path / "speech" / "1.wav").exists()


def test_a_model_of_other_symbols_needs_them_or_is_trained_on(tmp_path, settings, run):
    """As torchaudio's, which read 38 characters: padding and these."""
    symbols, path = "-!'(),.:;? abcdefghijklmnopqrstuvwxyz", tmp_path / "published.pt"
    theirs = build(symbols=symbols, n_symbols=38).state_dict()
    torch.save(renamed(theirs, "torchaudio"), path)
    start = "-c", str(path), "--preset", "paper"
    message = r"published\.pt: .* it reads other symbols: .* -c, --warm_start and .*=embedding'$"
    with pytest.raises(UserError, match=message):
        load_model(path, MODEL)
    with pytest.raises(UserError, match=message):
        run("run", settings, *start)

    (tmp_path / "symbols.txt").write_text(symbols)
    loaded = load_model(path, f"{MODEL},symbols=@{tmp_path}/symbols.txt")
    assert_equal(loaded.state_dict(), theirs)
    run("run", settings + "epochs=1,learning_rate=1e-12,weight_decay=0", *start, "--warm_start")
    ours, name = load_newest(tmp_path / "run")[1]["state_dict"], "decoder.attention_rnn.weight_hh"
    assert_close(ours[name], theirs[name])


@pytest.mark.parametrize("content", [{}, [torch.zeros(1)], {"state_dict": {"weight": 1.0}}])
def test_what_has_no_weights_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"other\.pt: has no 'state_dict' of weights; name a"):
        load_checkpoint(tmp_path / "other.pt")


# export.py


@pytest.fixture
def exported(tmp_path, capsys):
    """Call export.py; returns the new file and what it prints."""

    def call(format: str, checkpoint: Path) -> tuple[Path, str]:
        path = tmp_path / "new" / f"{format}.pt"
        export.main(["-c", str(checkpoint), "-o", str(path), "--format", format])
        assert all(path.suffix == ".pt" for path in path.parent.iterdir())
        return path, capsys.readouterr().out

    return call


def test_weights_alone_are_the_model_and_start_another_run(tmp_path, settings, run, exported):
    run("first", settings + "epochs=1")
    checkpoint = checkpoints(tmp_path / "first")[0]
    path, _ = exported("weights", checkpoint)
    old, new = load_model(checkpoint), load_model(path)
    assert new.hparams == old.hparams
    assert_equal(new.state_dict(), old.state_dict())
    assert path.stat().st_size < 0.5 * checkpoint.stat().st_size  # a third, of a larger model
    assert run("second", settings + "epochs=1", "-c", str(path)) == 0


def test_half_precision_is_half_as_large_and_is_read_as_fp32(trained, exported):
    """Values that 16 bits cannot hold stay as they are."""
    state = load_checkpoint(trained)
    state["state_dict"]["postnet.convolutions.0.1.running_var"][0] = 1e5
    torch.save(state, trained := trained.with_name("large.pt"))
    (path, _), (whole, _) = exported("half", trained), exported("weights", trained)
    assert load_model(path).postnet.convolutions[0][1].running_var[0] == 1e5
    weights = list(load_model(trained).parameters())
    rounded = list(load_model(path).parameters())
    assert {weight.dtype for weight in rounded} == {torch.float32}
    assert_close(rounded, weights, rtol=1e-3, atol=1e-6)
    n_bytes = sum(2 * weight.numel() for weight in weights)
    assert whole.stat().st_size - path.stat().st_size > 0.95 * n_bytes


def test_nvidias_code_loads_it_and_trains_on(tmp_path, settings, run, trained, exported):
    """In the steps of its load_checkpoint and of its training. And so do we."""
    path, printed = exported("nvidia", trained)
    state = torch.load(path, map_location="cpu")
    model = module_tree(load_model(trained).hparams, plain=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    model.load_state_dict(state["state_dict"], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    assert (state["learning_rate"], state["iteration"]) == (1e-3, 0)
    assert_equal(model.state_dict(), load_checkpoint(trained)["state_dict"])
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    # Mels and model are others than NVIDIA's; the rest is no matter of the model.
    assert "not the defaults there: filter_length=2048,hop_length=276,win_length=1103," in printed
    assert "note: that code has its own rule to stop" in printed
    assert "prenet_dim=8" in printed and "n_symbols" not in printed and "batch" not in printed
    assert load_model(path).hparams.prenet_dim == 8
    run("run", settings + "epochs=1", "-c", str(path))
    assert records(tmp_path / "run", "step")[0]["step"] == 1


def test_torchaudio_loads_it_strictly_and_so_do_we(tmp_path, exported):
    other = {"text_cleaners": ("basic_cleaners",), "symbols": " ä"}
    model = build()
    path, printed = exported("torchaudio", save_model(tmp_path / "german.pt", model, **other))
    tree = module_tree(model.hparams, plain=True)
    tree.load_state_dict(torch.load(path), strict=True)
    assert_equal(tree.state_dict(), model.state_dict())
    assert_equal(load_model(path, MODEL).state_dict(), model.state_dict())
    assert "defaults there: text_cleaners=basic_cleaners,symbols=' ä',filter_length" in printed


def test_what_cannot_be_exported_is_refused(tmp_path, trained):
    file, new = tmp_path / "file", tmp_path / "new.pt"
    narrow = save_model(tmp_path / "narrow.pt", build(symbols_embedding_dim=6))
    several = save_model(tmp_path / "several.pt", build(n_frames_per_step=2))
    file.write_text("kept")
    for checkpoint, output, format, message in (
        (trained, file, "weights", "file: exists already; give another -o, or remove it"),
        (narrow, new, "nvidia", "symbols_embedding_dim=6 is not encoder_embedding_dim=8: NVIDIA"),
        (several, new, "nvidia", "n_frames_per_step=2: NVIDIA's and .* make one frame a step"),
    ):
        with pytest.raises(UserError, match=message):
            export.main(["-c", str(checkpoint), "-o", str(output), "--format", format])
    assert sorted(tmp_path.iterdir()) == [file, narrow, several]
    assert file.read_text() == "kept"
