"""The examples train with other people's trainers, and assert that every epoch has new batches."""

import importlib.util
import re
import subprocess
import sys
from functools import partial
from itertools import islice

import pytest
from conftest import ROOT

from batching import EpochBatchSampler

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
    name = "torchdata.stateful_dataloader"
    stateful = pytest.importorskip(name, reason="torchdata is not installed")
    make_sampler = partial(EpochBatchSampler, range(10, 160), batch_size=8, seed=3)
    sampler = make_sampler()
    epochs = [list(sampler) for _ in range(3)]
    for workers in (0, 2):
        options = {"collate_fn": list, "num_workers": workers}
        loader, resumed = (
            stateful.StatefulDataLoader(range(150), batch_sampler=make_sampler(), **options)
            for _ in range(2)
        )
        assert list(loader) == epochs[0]
        drawn = list(islice(loader, 5))
        resumed.load_state_dict(loader.state_dict())
        assert drawn + list(resumed) == epochs[1]
        assert list(resumed) == epochs[2]
