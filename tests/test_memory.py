"""Out of memory shows before a run starts, in one line."""

import re
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import Forked

import train
from cli import UserError
from corpus.clips import Clip
from data_utils import training_sampler
from hparams import create_hparams
from loss_function import Tacotron2Loss
from training import memory


@pytest.fixture
def settings(settings: str) -> str:
    return settings.replace("check_memory=False,", "")


@pytest.mark.parametrize("strategy", ["RAND", "SSB", "BKT"])
def test_the_largest_batches_of_a_run_are_found(strategy):
    hparams = create_hparams(f"batching_strategy={strategy},batch_size=3,bucket_size=6")
    lengths = np.random.default_rng(0).integers(1, 100, (30, 2))  # texts and mels: unrelated
    clips = [Clip("", "", [0] * T_in, T_out, "", ()) for T_in, T_out in lengths.tolist()]
    sampler, every = training_sampler(clips, hparams), []
    for epoch in range(3, 9):
        sampler.set_epoch(epoch)
        every += sampler.plan

    def shapes(batches: list) -> list[tuple[int, int, int]]:
        return [(len(batch), *lengths[batch].max(axis=0)) for batch in batches]

    def most(batches: list) -> list[int]:
        sizes = [(B, B * T_in, B * T_out, B * T_in * T_out) for B, T_in, T_out in shapes(batches)]
        return np.max(sizes, axis=0).tolist()

    largest = memory.largest_batches(clips, sampler, range(3, 9))
    assert 1 <= len(largest) <= 4 and most(largest) == most(every)


@pytest.fixture
def full(monkeypatch) -> Mock:
    """As if a loss of more than 110 decoder steps did not fit in memory, as long as CUDA graphs
    hold some: turn_off, which says whether it freed any."""

    class Full(Tacotron2Loss):
        def forward(self, output, batch, *share):
            if batch.gate.numel() > 110 and not (turn_off.called and turn_off.side_effect is None):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
            return super().forward(output, batch, *share)

    turn_off = Mock(return_value=True)
    monkeypatch.setattr(train, "Tacotron2Loss", Full)
    monkeypatch.setattr(memory.graphs, "turn_off", turn_off)
    return turn_off


def test_out_of_memory_shows_before_a_run_and_says_what_to_change(tmp_path, settings, run, full):
    """A run that is not tried first ends with the reason when it meets the batch."""
    full.side_effect = [False]
    size = r"a batch of \d clips, up to \d+ frames and \d+ symbols long"
    with pytest.raises(UserError, match=rf"^out of memory with {size}; use a smaller batch_capa"):
        run("run", settings + "epochs=1")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    reason = r"^out of memory \(CUDA out of memory\. Tried to allocate 9 GiB\); free memory on the "
    with pytest.raises(UserError, match=reason):
        run("unchecked", settings + "epochs=1,check_memory=False")
    assert run("run", settings + "epochs=1,batch_capacity=110") == 0


def test_what_fits_without_cuda_graphs_is_trained_without(settings, run, full, capsys):
    assert run("run", settings + "epochs=1") == 0 and full.call_count == 1
    note = "note: memory runs out with CUDA graphs; training goes without, more slowly\n"
    assert capsys.readouterr().out.count(note) == 1


def test_other_errors_are_not_taken_for_memory(settings, run, monkeypatch):
    failing = Mock(side_effect=RuntimeError("CUDA error: unspecified launch failure"))
    monkeypatch.setattr(train, "check_fast_path", lambda *_: None)
    monkeypatch.setattr(train.Tacotron2Loss, "forward", failing)
    for check_memory in (True, False):
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            run("run", f"{settings}epochs=1,check_memory={check_memory}")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory")
def test_the_memory_of_a_cpu_ends_as_a_gpus_does(tmp_path, settings):
    """800 MiB more than the imports take, which 60 M parameters with moments do not fit."""
    code = (
        "import resource, torch, train; from cli import exit_on_user_error\n"
        "torch.set_num_threads(2)  # their stacks count\n"
        "pages = int(open('/proc/self/statm').read().split()[5])  # a CUDA build has more\n"
        "limit = pages * resource.getpagesize() + 800 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "exit_on_user_error(train.main)"
    )
    large = settings.replace("postnet_embedding_dim=8", "postnet_embedding_dim=2000") + "epochs=1"
    options = "-o", tmp_path / "run", "--hparams", large
    process = Forked("-c", code, *options, CUDA_VISIBLE_DEVICES="")
    _, errors = process.communicate()
    message = r"error: out of memory with a batch of \d clips, up to \d+ .*batch_size or model\n"
    assert process.returncode == 2 and re.match(message, errors), errors
