"""The examples train with other people's trainers, and assert that every epoch has new batches."""

import importlib.util
import re
import subprocess
import sys

import pytest
from conftest import ROOT

LAUNCHERS = {"python": "", "torchrun": "-m torch.distributed.run"}


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_an_example_runs_as_its_header_says(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    text = (ROOT / "examples" / f"with_{library}.py").read_text()
    path, launcher, command = re.search("^ *(PYTHONPATH=.*?) (\\w+) (.*)", text, re.M).groups()
    done = subprocess.run(
        f"{path} {sys.executable} {LAUNCHERS[launcher]} {command}",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_torchdatas_loader_resumes_where_it_stopped():
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    )
    from batching import EpochBatchSampler

    def make(workers: int) -> list:
        sampler = EpochBatchSampler(range(10, 160), batch_size=8, seed=3)
        options = {"batch_sampler": sampler, "collate_fn": list, "num_workers": workers}
        return stateful.StatefulDataLoader(range(150), **options)

    plain = EpochBatchSampler(range(10, 160), batch_size=8, seed=3)
    epochs = [list(plain) for _ in range(3)]
    for workers in (0, 2):
        loader = make(workers)
        assert list(loader) == epochs[0]
        batches = iter(loader)
        drawn = [next(batches) for _ in range(5)]
        resumed = make(workers)
        resumed.load_state_dict(loader.state_dict())
        assert drawn + list(resumed) == epochs[1]
        assert list(resumed) == epochs[2]
