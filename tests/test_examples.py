"""The examples: other people's trainers, and the speech enhancement of the second paper."""

import importlib.util
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, write_tone

EXAMPLE = ROOT / "examples" / "speech_enhancement"
enhancement = SimpleNamespace(**runpy.run_path(str(EXAMPLE / "train.py")))


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_an_example_runs_as_its_header_says(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    text = (ROOT / "examples" / f"with_{library}.py").read_text()
    (command,) = re.findall("^ *PYTHONPATH=.*", text, re.M)
    command = command.replace("torchrun", "python -m torch.distributed.run")
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Speech enhancement


def snr(estimate: np.ndarray | torch.Tensor, speech: np.ndarray | torch.Tensor) -> float:
    return 10 * math.log10((speech**2).sum() / ((estimate - speech) ** 2).sum())


@pytest.fixture
def wavs(tmp_path: Path) -> Path:
    """16 tones of 0.1 to 0.6 s, with several sampling rates; one, a flac, is in a folder below. A
    hidden file is none of them."""
    folder = tmp_path / "wavs"
    (folder / "more").mkdir(parents=True)
    (folder / "more/.06.wav").touch()
    for i in range(16):
        path = folder / ("more/05.FLAC" if i == 5 else f"{i:02d}.wav")
        write_tone(path, 0.1 + 0.5 * (i * 5 % 16) / 15, rate=(8000, 16000, 22050)[i % 3])
    return folder


@pytest.mark.parametrize("mismatched", [False, True])
def test_mixtures_are_random_in_epochs_and_the_same_for_every_batching(wavs, mismatched):
    """Split, they are pieces that have every sample once."""
    clips = enhancement.read_clips(wavs)
    assert len(clips) == 16 and max(map(len, clips)) > 2500
    whole, split = (enhancement.Mixtures(clips, 3, n, mismatched) for n in (None, 2500))
    first = whole.mixtures
    for data in (whole, split):
        data.set_epoch(7)
    for mixture, other, speech in zip(whole.mixtures, first, whole.clips, strict=True):
        assert -5.01 < snr(mixture, speech) < 10.01 and not np.array_equal(mixture, other)
    assert split.lengths.max() <= 2500
    mixtures, speech = map(torch.cat, zip(*split, strict=True))
    assert np.array_equal(mixtures, np.concatenate(whole.mixtures))
    assert np.array_equal(speech, np.concatenate(whole.clips))


def test_padding_changes_neither_output_nor_loss():
    torch.manual_seed(0)
    model, pairs = enhancement.ConvTasNet(), [torch.randn(2, n) for n in (700, 1000, 64)]
    mixtures, speech, lengths = enhancement.collate([tuple(pair) for pair in pairs])
    together = enhancement.masked_snr(model(mixtures), speech, lengths)
    for i, (mixture, clean) in enumerate(pairs):
        alone = snr(model(mixture[None])[0].detach(), clean)
        assert together[i].item() == pytest.approx(alone, abs=1e-3)


def test_run_sh_trains_and_makes_the_table_and_skips_what_is_finished(tmp_path, wavs):
    env = os.environ | {"DATA": "wavs", "OUTPUT": "out", "STRATEGIES": "BKT", "FIXED": "2"}
    env |= {"EPOCHS": "3", "SEEDS": "0", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    env.pop("CI", None)  # where venv.sh would take another Python
    command, runs = ["bash", EXAMPLE / "run.sh"], tmp_path / "out/runs"
    for dynamic in ("", "0.5"):
        before = {path: path.stat().st_mtime_ns for path in runs.glob("*")}
        options = {"cwd": tmp_path, "env": env | {"DYNAMIC": dynamic}, "capture_output": True}
        done = subprocess.run(command, **options, text=True)
        assert done.returncode == 0, done.stderr
        assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    table = (tmp_path / "out/table1.md").read_text()
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:4]]
    results = json.loads((tmp_path / "out/results.json").read_text())
    for row, result, size in zip(rows, results, ("2 seq.", "0.5 s"), strict=True):
        assert row[:3] == ["Bucket", size, "1"] and row[-2] == f"{result['matched']:.2f}"
        assert result["losses"][-1] < result["losses"][0] - 0.3
    assert results[1]["largest_batch_seconds"] <= 0.5  # a clip of 0.6 s was split
