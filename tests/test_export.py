"""export.py, and checkpoints of other code."""

import dataclasses
import errno
import os
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import MODEL, NO_DROPOUT, TINY, build, records
from torch import Tensor, nn
from torch.testing import assert_close

from cli import UserError
from hparams import HParams, create_hparams
from model import Tacotron2
from scripts import export, synthesize
from training.checkpoint import checkpoints, load_checkpoint, load_newest, save_checkpoint

TRAINED = Path(__file__).parent / "old_run" / "checkpoint_00000003.pt"  # by train.py

pytestmark = pytest.mark.filterwarnings("ignore:.* did not stop")  # untrained models seldom do


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same tensors in the same order, by any names."""
    for one, other in zip(ours.values(), theirs.values(), strict=True):
        assert_close(one, other, rtol=0, atol=0)


def module_tree(hparams: HParams, plain: bool) -> nn.Module:
    """Layers with the names and shapes of NVIDIA's model, in its order, or, ``plain``, of
    torchaudio's, whose linear layers and convolutions have no level of their own."""

    def tree(**children: nn.Module) -> nn.Module:
        module = nn.Module()
        for name, child in children.items():
            module.add_module(name, child)
        return module

    def linear(*sizes, **options) -> nn.Module:
        layer = nn.Linear(*sizes, **options)
        return layer if plain else tree(linear_layer=layer)

    def conv(*sizes, **options) -> nn.Module:
        layer = nn.Conv1d(*sizes, **options)
        return layer if plain else tree(conv=layer)

    def convolutions(*dims: int) -> nn.ModuleList:
        pairs = pairwise(dims)
        return nn.ModuleList(nn.Sequential(conv(*d, 5), nn.BatchNorm1d(d[1])) for d in pairs)

    h, n = hparams, hparams.encoder_embedding_dim
    location = conv(2, h.attention_location_n_filters, h.attention_location_kernel_size, bias=False)
    both, mels = h.decoder_rnn_dim + n, h.n_mel_channels
    prenet = [linear(i, h.prenet_dim, bias=False) for i in (mels, h.prenet_dim)]
    return tree(
        embedding=nn.Embedding(h.n_symbols, n),
        encoder=tree(
            convolutions=convolutions(n, n, n, n),
            lstm=nn.LSTM(n, n // 2, batch_first=True, bidirectional=True),
        ),
        decoder=tree(
            prenet=tree(layers=nn.ModuleList(prenet)),
            attention_rnn=nn.LSTMCell(h.prenet_dim + n, h.attention_rnn_dim),
            attention_layer=tree(
                query_layer=linear(h.attention_rnn_dim, h.attention_dim, bias=False),
                memory_layer=linear(n, h.attention_dim, bias=False),
                v=linear(h.attention_dim, 1, bias=False),
                location_layer=tree(
                    location_conv=location,
                    location_dense=linear(
                        h.attention_location_n_filters, h.attention_dim, bias=False
                    ),
                ),
            ),
            decoder_rnn=nn.LSTMCell(h.attention_rnn_dim + n, h.decoder_rnn_dim),
            linear_projection=linear(both, mels),
            gate_layer=linear(both, 1),
        ),
        postnet=tree(convolutions=convolutions(mels, *[h.postnet_embedding_dim] * 4, mels)),
    )


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
    model, path = build(), tmp_path / "theirs.pt"
    weights = renamed(model.state_dict(), names)
    for content in (weights, {"state_dict": weights}):
        torch.save(content, path)
        loaded = Tacotron2.from_checkpoint(path, hparams=model.hparams).state_dict()
        assert list(loaded) == list(model.state_dict())
        assert_equal(loaded, model.state_dict())
    settings = f"{MODEL},max_decoder_steps=3"
    arguments = ["-c", str(path), "-o", str(tmp_path / "speech"), "--hparams", settings, "Hm."]
    with pytest.raises(SystemExit, match="1"):  # the text never stopped
        synthesize.main(arguments)
    assert (tmp_path / "speech" / "1.wav").exists()


def test_a_changed_model_keeps_its_names(tmp_path):
    """Someone may have put a plain layer into the model here."""
    state = {"state_dict": {"decoder.gate_layer.weight": torch.zeros(1)}}
    torch.save(state | {"hparams": dataclasses.asdict(HParams())}, tmp_path / "ours.pt")
    assert load_checkpoint(tmp_path / "ours.pt")["state_dict"] == state["state_dict"]


def test_a_training_of_other_code_is_continued(tmp_path, settings, run):
    """NVIDIA's DeepLearningExamples and torchaudio's example save no iteration, but Adam's."""
    settings += "".join(f"{name}=0," for name in NO_DROPOUT) + "dynamic_batch_size=False,"
    run("first", settings + "epochs=1")
    first, path = checkpoints(tmp_path / "first")[0], tmp_path / "theirs.pt"
    state = load_checkpoint(first)
    weights = renamed(state["state_dict"], "torchaudio, parallel")
    torch.save({"epoch": 0, "state_dict": weights, "optimizer": state["optimizer"]}, path)
    for name, options in (("ours", [str(first)]), ("theirs", [str(path), "--preset", "paper"])):
        run(name, settings + "epochs=2", "-c", *options)
    ours, theirs = (records(tmp_path / name, "step") for name in ("ours", "theirs"))
    assert [step["step"] for step in theirs] == [4, 5, 6]
    assert [step["loss"] for step in theirs] == [step["loss"] for step in ours]


def test_a_model_of_other_symbols_needs_them_or_is_trained_on(tmp_path, settings, run):
    """As torchaudio's, which read 38 characters: padding and these."""
    symbols, path = "-!'(),.:;? abcdefghijklmnopqrstuvwxyz", tmp_path / "published.pt"
    theirs = build(symbols=symbols, n_symbols=38).state_dict()
    torch.save(renamed(theirs, "torchaudio"), path)
    start = "-c", str(path), "--preset", "paper"
    message = (
        r"published\.pt: the checkpoint of another model: embedding\.weight is \(38, 8\) in the "
        r"checkpoint, \(148, 8\) in this model; it reads other symbols: .* by -c and --warm_start$"
    )
    with pytest.raises(UserError, match=message):
        Tacotron2.from_checkpoint(path, hparams=create_hparams(TINY))
    with pytest.raises(UserError, match=message):
        run("run", settings, *start)
    assert not (tmp_path / "run").exists()

    (tmp_path / "symbols.txt").write_text(symbols)
    hparams = create_hparams(f"{TINY}symbols=@{tmp_path}/symbols.txt")
    assert_equal(Tacotron2.from_checkpoint(path, hparams=hparams).state_dict(), theirs)
    run("run", settings + "epochs=1,learning_rate=1e-12,weight_decay=0", *start, "--warm_start")
    ours, name = load_newest(tmp_path / "run")[1]["state_dict"], "decoder.attention_rnn.weight_hh"
    assert_close(ours[name], theirs[name])


@pytest.mark.parametrize(
    "content",
    [
        {},
        [torch.zeros(1)],
        {"model": {"weight": torch.zeros(1)}},
        {"weight": torch.zeros(1), "epoch": 3},
        {"state_dict": {"weight": 1.0}},
        {"state_dict": {0: torch.zeros(1)}},
    ],
)
def test_what_has_no_weights_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"other\.pt: has no 'state_dict' of weights; name a"):
        load_checkpoint(tmp_path / "other.pt")


@pytest.mark.parametrize("optimizer", [None, {}, {"state": 1}, {"state": {0: {"step": "x"}}}])
def test_a_damaged_optimizer_tells_no_iteration(tmp_path, optimizer):
    state = {"state_dict": {}, "epoch": 2, "optimizer": optimizer}
    torch.save(state, tmp_path / "other.pt")
    assert load_checkpoint(tmp_path / "other.pt") == state


# export.py


@pytest.fixture
def exported(tmp_path, capsys):
    """Call export.py; returns the new file and what it prints."""

    def call(format: str, checkpoint: Path = TRAINED) -> tuple[Path, str]:
        path = tmp_path / "new" / f"{format}.pt"
        export.main(["-c", str(checkpoint), "-o", str(path), "--format", format])
        assert [path for path in path.parent.iterdir() if path.suffix != ".pt"] == []
        return path, capsys.readouterr().out

    return call


def test_weights_alone_speak_and_start_another_run(tmp_path, settings, run, exported, capsys):
    path, printed = exported("weights")
    old, new = (Tacotron2.from_checkpoint(each) for each in (TRAINED, path))
    assert new.hparams == old.hparams
    assert_equal(new.state_dict(), old.state_dict())
    size = path.stat().st_size
    share = size / TRAINED.stat().st_size
    assert share < 0.5  # a third, of a larger model
    assert printed == f"{path}: {size / 1e6:.1f} MB, {share:.0%} of the checkpoint\n"
    for name, options in (("c", []), ("warm", ["--warm_start"])):
        assert run(name, settings + "epochs=1", "-c", str(path), *options) == 0
        note = f"note: {path}: has weights but no training state; starting at epoch 1\n"
        assert (note in capsys.readouterr().out) == (name == "c")
    (tmp_path / "resumed").mkdir()
    path.rename(tmp_path / "resumed" / "checkpoint_00000003.pt")
    with pytest.raises(UserError, match=r"3\.pt: has no optimizer, .*; start from its weights by"):
        run("resumed", "", "--resume")


@pytest.mark.parametrize("source", ["run", "weights"])
def test_nvidias_code_loads_it_and_trains_on(tmp_path, settings, run, exported, source):
    """In the steps of its load_checkpoint and of its training. And so do we."""
    checkpoint = TRAINED if source == "run" else exported("weights")[0]
    path, printed = exported("nvidia", checkpoint)
    state, ours = torch.load(path, map_location="cpu"), load_checkpoint(TRAINED)
    model = module_tree(Tacotron2.from_checkpoint(TRAINED).hparams, plain=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    model.load_state_dict(state["state_dict"], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    assert (state["learning_rate"], state["iteration"]) == (1e-3, 3 if source == "run" else 0)
    assert_equal(model.state_dict(), ours["state_dict"])
    moments = ours["optimizer"]["state"] if source == "run" else {}
    assert optimizer.state_dict()["state"].keys() == moments.keys()
    for i, saved in optimizer.state_dict()["state"].items():
        assert_equal(saved, moments[i])
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    # Mels and model are others than NVIDIA's; the rest is no matter of the model.
    assert "not the defaults there: filter_length=2048,hop_length=276,win_length=1102," in printed
    assert "prenet_dim=8" in printed and "n_symbols" not in printed and "batch" not in printed
    assert Tacotron2.from_checkpoint(path).hparams.prenet_dim == 8
    run("run", settings + "epochs=4", "-c", str(path))
    assert records(tmp_path / "run", "step")[0]["step"] == state["iteration"] + 1


def test_torchaudio_loads_it_strictly_and_so_do_we(tmp_path, exported):
    state = load_checkpoint(TRAINED)
    state["hparams"] |= {"text_cleaners": ("basic_cleaners",), "symbols": " ä"}
    save_checkpoint(tmp_path / "german.pt", state)
    path, printed = exported("torchaudio", tmp_path / "german.pt")
    model = Tacotron2.from_checkpoint(TRAINED)
    tree = module_tree(model.hparams, plain=True)
    tree.load_state_dict(torch.load(path), strict=True)
    assert_equal(tree.state_dict(), model.state_dict())
    again = Tacotron2.from_checkpoint(path, hparams=model.hparams).state_dict()
    assert_equal(again, model.state_dict())
    assert "prenet_dim=8" in printed
    assert "defaults there: text_cleaners=basic_cleaners,symbols=' ä',filter_length" in printed


def test_what_cannot_be_exported_is_refused(tmp_path, exported, monkeypatch, capsys):
    bare, narrow, file = (tmp_path / name for name in ("bare.pt", "narrow.pt", "file"))
    torch.save(build().state_dict(), bare)
    model = build(symbols_embedding_dim=6)
    settings = dataclasses.asdict(model.hparams)
    torch.save({"state_dict": model.state_dict(), "hparams": settings}, narrow)
    file.write_text("kept")
    new = tmp_path / "new.pt"
    for checkpoint, output, format, message in (
        (TRAINED, file, "weights", "file: exists already; give another -o, or remove it"),
        (TRAINED, tmp_path, "weights", ": exists already"),
        (TRAINED, file / "new.pt", "nvidia", r"file: cannot be written \(.*\); give another -o"),
        (TRAINED, new, "onnx", "invalid choice: 'onnx'"),
        (tmp_path / "none.pt", new, "weights", r"none\.pt: no such checkpoint"),
        (bare, new, "weights", r"bare\.pt: the checkpoint of another model: .*settings it was"),
        (narrow, new, "nvidia", "symbols_embedding_dim=6 is not encoder_embedding_dim=8: NVIDIA"),
        (narrow, new, "torchaudio", "use another --format"),
    ):
        with pytest.raises(UserError, match=message):
            export.main(["-c", str(checkpoint), "-o", str(output), "--format", format])
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    message = r"weights\.pt: cannot be written \(No space left\); make room, or give another -o$"
    with pytest.raises(UserError, match=message):
        exported("weights")
    assert sorted(tmp_path.iterdir()) == [bare, file, narrow]
    assert file.read_text() == "kept"
    assert "note: " in capsys.readouterr().out  # bare.pt has no settings
