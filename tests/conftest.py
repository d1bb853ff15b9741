"""A tiny corpus of tones, a tiny model, and batches of noise."""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import soundfile
import torch
from forked import ROOT, Forked  # noqa: F401

import train
from corpus.clips import Clip, load_clips
from data_utils import Batch, Item, collate
from hparams import HParams, create_hparams
from model import Tacotron2
from training import checkpoint, logger
from training.checkpoint import load_newest

# A busy machine is no failure. (Hypothesis knows CI by itself, and is not random there.)
hypothesis.settings.register_profile("untimed", deadline=None)
if not os.environ.get("CI"):
    hypothesis.settings.load_profile("untimed")

# Programs that a shell starts in the background ignore Ctrl-C, and so would those tested here.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the longest files first, so that test.sh's processes end together."""
    longest = ["test_resume", "test_distributed", "test_examples", "test_run_all", "test_train"]
    items.sort(key=lambda item: (*longest, item.path.stem).index(item.path.stem))


MODEL = (
    "symbols_embedding_dim=8,encoder_embedding_dim=8,prenet_dim=8,attention_rnn_dim=12,"
    "attention_dim=6,attention_location_n_filters=4,attention_location_kernel_size=5,"
    "decoder_rnn_dim=10,postnet_embedding_dim=8,n_mel_channels=10"
)
# DECODER=reference bash scripts/test.sh runs every test with another decoder.
TINY = f"decoder={os.environ.get('DECODER', 'scan')},{MODEL},"
WORDS = ("one", "two tones", "three more tones", "a tone", "the longest of all these tones")


def write_tone(path: Path, seconds: float, rate: int = 22050, **options) -> None:
    time = np.arange(int(seconds * rate)) / rate
    soundfile.write(path, 0.3 * np.sin(2 * np.pi * 220 * time), rate, **options)


def make_tones(folder: Path) -> Path:
    """Makes 12 wavs of 0.1 to 0.5 s, and train.txt (8 clips) and val.txt (4)."""
    lines = []
    for i in range(12):
        write_tone(folder / f"{i}.wav", 0.1 + 0.4 * (i * 5 % 12) / 11)
        words = WORDS[i % len(WORDS)]
        if i < 8:  # other texts than those of the validation clips
            words = words.replace("tone", "note").replace("one", "eon")
        lines.append(f"{i}.wav|{words}\n")
    (folder / "train.txt").write_text("".join(lines[:8]))
    (folder / "val.txt").write_text("".join(lines[8:]))
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with the tones."""
    return make_tones(tmp_path)


@pytest.fixture
def settings(corpus: Path) -> str:
    """Overrides for a tiny model on the tones, which fits in memory."""
    return (
        f"{TINY}data_dir={corpus},training_files={corpus}/train.txt,"
        f"validation_files={corpus}/val.txt,mel_cache_dir={corpus}/cache,batch_size=3,"
        "check_memory=False,"
    )


@pytest.fixture
def hparams(settings: str) -> HParams:
    return create_hparams(settings)


@pytest.fixture
def clips(hparams: HParams) -> list[Clip]:
    return load_clips(hparams.training_files, hparams)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws nothing and makes no sound, which would take longest. A test of train.py has both."""
    for name in ("draw_alignment", "draw_mels", "draw_gate", "draw_speech"):
        monkeypatch.setattr(logger, name, lambda *_: None)
    monkeypatch.setattr(logger, "render", lambda _: np.zeros((1, 1, 4), np.uint8))
    vocoder = lambda mel: np.zeros(9 * (mel.size(1) - 1))  # noqa: E731
    monkeypatch.setattr(train, "open_vocoder", lambda *_, **__: vocoder)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> Callable[..., int]:
    """Returns ``run(name, settings, *options)``, which trains into tmp_path / name in this process
    and returns the exit status."""

    def run(name: str, settings: str = "", *options: str) -> int:
        arguments = ["train.py", "-o", str(tmp_path / name), "--hparams", settings, *options]
        monkeypatch.setattr(sys, "argv", arguments)
        try:
            train.main()
        except SystemExit as end:
            return end.code
        return 0

    return run


TIMED = {"duration", "minutes", "processor_minutes", "frames_per_second", "data_wait"}
TIMED |= {"peak_memory_gib", "peak_reserved_gib"}


def assert_same_run(unbroken: Path, other: Path) -> None:
    """Compares weights, moments, and the metrics that equal runs have in common."""
    states, logs = [], []
    for folder in (unbroken, other):
        _, state = load_newest(folder)
        states.append([state["state_dict"], state["optimizer"]["state"]])
        lines = [line for line in records(folder) if line["event"] != "start"]  # one a resume
        logs.append([{k: v for k, v in line.items() if k not in TIMED} for line in lines])
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert logs[1] == logs[0]


def contents(folder: Path) -> dict[Path, bytes]:
    """Returns the folders and the files in ``folder``, and what the files hold."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def records(output: Path, event: str = "") -> list[dict]:
    """Returns the lines of a run's metrics.jsonl, or those of one event. JSON has no NaN."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    return [line for line in lines if event in ("", line["event"])]


def noise_batch(
    text_lengths: list[int], mel_lengths: list[int], n_frames_per_step: int = 1
) -> Batch:
    """Returns clips of random ids and mels of these lengths, for the tiny model."""
    hparams = create_hparams(TINY)
    generator = torch.Generator().manual_seed(0)
    items = []
    for T_in, T_out in zip(text_lengths, mel_lengths, strict=True):
        ids = torch.randint(1, hparams.n_symbols, (T_in,), generator=generator)
        mel = torch.randn(T_out, hparams.n_mel_channels, generator=generator)
        items.append(Item(len(items), ids, mel))
    return collate(items, n_frames_per_step)


@pytest.fixture
def batch() -> Batch:
    return noise_batch([7, 5, 3], [9, 12, 4])


PARTS = ("encoder", "prenet", "attention", "decoder", "postnet")
NO_DROPOUT = {f"p_{part}_dropout": 0.0 for part in PARTS}


def build(**changes) -> Tacotron2:
    """Returns a tiny model, which always starts from the same weights."""
    torch.manual_seed(0)
    return Tacotron2(dataclasses.replace(create_hparams(TINY), **changes))


def save_model(path: Path, model: Tacotron2, **settings) -> Path:
    """Saves a model's weights and settings as train.py and export.py do."""
    hparams = {**dataclasses.asdict(model.hparams), **settings}
    state = {"state_dict": model.state_dict(), "hparams": hparams}
    checkpoint.save_checkpoint(path, state)
    return path


def set_gate(model: Tacotron2, logit: float) -> Tacotron2:
    """Makes a model stop at once (100) or never (-100)."""
    torch.nn.init.constant_(model.decoder.gate_layer.linear_layer.bias, logit)
    return model


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny model that speaks until it is cut off."""
    return save_model(tmp_path_factory.mktemp("trained") / "trained.pt", set_gate(build(), -100))


@pytest.fixture
def data(corpus: Path) -> str:
    """Overrides that say where the corpus and its mels are."""
    return f"data_dir={corpus},mel_cache_dir={corpus}/cache"
