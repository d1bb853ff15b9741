"""The examples: other people's trainers, and the speech enhancement of the second paper."""

import argparse
import importlib.util
import json
import math
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, write_tone

from batching import EpochBatchSampler

LAUNCHERS = {"python": "", "torchrun": "-m torch.distributed.run"}
EXAMPLE = ROOT / "examples" / "speech_enhancement"
enhancement = SimpleNamespace(**runpy.run_path(str(EXAMPLE / "train.py")))


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_an_example_runs_as_its_header_says(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    text = (ROOT / "examples" / f"with_{library}.py").read_text()
    path, launcher, command = re.search("^ *(PYTHONPATH=.*?) (\\w+) (.*)", text, re.M).groups()
    command = f"{path} {sys.executable} {LAUNCHERS[launcher]} {command}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torchdatas_loader_resumes_where_it_stopped():
    name = "torchdata.stateful_dataloader"
    stateful = pytest.importorskip(name, reason="torchdata is not installed")
    make_sampler = partial(EpochBatchSampler, range(10, 160), batch_size=8, seed=3)
    sampler = make_sampler()
    epochs = [list(sampler) for _ in range(3)]
    options = {"collate_fn": list, "num_workers": 2}
    loader, resumed = (
        stateful.StatefulDataLoader(range(150), batch_sampler=make_sampler(), **options)
        for _ in range(2)
    )
    assert list(loader) == epochs[0]
    drawn = list(islice(loader, 5))
    resumed.load_state_dict(loader.state_dict())
    assert drawn + list(resumed) == epochs[1]
    assert list(resumed) == epochs[2]


# Speech enhancement


def snr(estimate: np.ndarray | torch.Tensor, speech: np.ndarray | torch.Tensor) -> float:
    return 10 * math.log10((speech**2).sum() / ((estimate - speech) ** 2).sum())


@pytest.fixture
def wavs(tmp_path: Path) -> Path:
    """16 tones of 0.1 to 0.6 s, with several sampling rates; one, a flac, is in a folder below."""
    folder = tmp_path / "wavs"
    (folder / "more").mkdir(parents=True)
    (folder / ".ipynb_checkpoints").mkdir()
    write_tone(folder / ".ipynb_checkpoints/00-checkpoint.wav", 0.1)
    (folder / "more/._05.FLAC").write_bytes(b"what a Mac leaves")
    for i in range(16):
        path = folder / ("more/05.FLAC" if i == 5 else f"{i:02d}.wav")
        write_tone(path, 0.1 + 0.5 * (i * 5 % 16) / 15, rate=(8000, 16000, 22050)[i % 3])
    return folder


@pytest.mark.parametrize("mismatched", [False, True])
def test_mixtures_are_random_in_epochs_and_the_same_for_every_batching(wavs, mismatched):
    """Split, they are pieces that have every sample once."""
    clips = enhancement.read_clips(wavs)
    assert len(clips) == 16
    whole = enhancement.Mixtures(clips, 3, mismatched=mismatched)
    split = enhancement.Mixtures(clips, 3, longest=2500, mismatched=mismatched)
    first = whole.mixtures
    for data in (whole, split):
        data.set_epoch(7)
    for mixture, same, other, speech in zip(
        whole.mixtures, split.mixtures, first, whole.clips, strict=True
    ):
        assert np.array_equal(mixture, same) and not np.array_equal(mixture, other)
        assert -5.01 < snr(mixture, speech) < 10.01
        assert np.square(speech).mean() == pytest.approx(0.01, 1e-3)
    assert max(map(len, clips)) > 2500 and split.lengths.max() <= 2500
    mixtures, speech = (torch.cat(pieces).numpy() for pieces in zip(*split, strict=True))
    assert np.array_equal(speech, np.concatenate(split.clips))
    assert mismatched or np.array_equal(speech, np.concatenate(clips))
    assert np.array_equal(mixtures, np.concatenate(split.mixtures))


def test_padding_changes_neither_output_nor_loss():
    torch.manual_seed(0)
    model, pairs = enhancement.ConvTasNet(), [torch.randn(2, n) for n in (700, 1000, 64)]
    mixtures, speech, lengths = enhancement.collate([tuple(pair) for pair in pairs])
    together = enhancement.masked_snr(model(mixtures), speech, lengths)
    for i, (mixture, clean) in enumerate(pairs):
        estimate = model(mixture[None])
        alone = enhancement.masked_snr(estimate, clean[None], lengths[i : i + 1])
        assert together[i].item() == pytest.approx(alone.item(), abs=1e-4)
        assert alone.item() == pytest.approx(snr(estimate[0].detach(), clean), abs=1e-3)
    mixtures[2, 64:] = 100.0  # padding that is not zero
    model(mixtures)[2, :64].sum().backward()
    garbage = enhancement.masked_snr(mixtures, speech, lengths)
    assert garbage[2].item() == pytest.approx(snr(pairs[2][0], pairs[2][1]), abs=1e-3)


def test_training_lowers_the_loss(tmp_path, wavs):
    arguments = {"strategy": "BKT", "batch_size": None, "batch_seconds": 0.5, "seed": 0}
    arguments |= {"wavs": wavs, "output": tmp_path / "x"}
    result = enhancement.train(argparse.Namespace(**arguments, epochs=3))
    assert result["losses"][-1] < result["losses"][0] - 0.3
    assert result["clips"] == 14 and result["largest_batch_seconds"] <= 0.5  # 0.6 s was split


def test_run_sh_makes_the_table_and_skips_what_is_finished(tmp_path, wavs):
    def run_sh(status: int, **settings: str) -> str:
        settings |= {"DATA": "wavs", "OUTPUT": "out", "STRATEGIES": "RAND", "FIXED": "2"}
        environment = os.environ | settings | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        environment.pop("CI", None)  # where venv.sh would take another Python
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        done = subprocess.run(["bash", EXAMPLE / "run.sh"], **options)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr

    out = tmp_path / "out"
    run_sh(0, DYNAMIC="", EPOCHS="1", SEEDS="0")
    ((finished, modified),) = ((path, path.stat().st_mtime_ns) for path in (out / "runs").iterdir())
    run_sh(0, DYNAMIC="1", EPOCHS="1", SEEDS="0 1")
    assert finished.stat().st_mtime_ns == modified
    table = (out / "table1.md").read_text().split("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["Random", "2 seq.", "2"], ["Random", "1 s", "2"]]
    results = json.loads((out / "results.json").read_text())
    mean = (results[0]["matched"] + results[1]["matched"]) / 2
    assert len(results) == 4 and rows[0][-2].startswith(f"{mean:.2f} ± ")
    assert (out / "figure4.png").exists()
    assert "use another OUTPUT" in run_sh(2, EPOCHS="2")
