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
    return settings.replace("check_memory=False,", "epochs=1,")


@pytest.mark.parametrize("strategy", ["RAND", "SSB", "BKT"])
def test_the_largest_batches_of_a_run_are_found(strategy):
    hparams = create_hparams(f"batching_strategy={strategy},batch_size=3,bucket_size=6")
    lengths = np.random.default_rng(0).integers(1, 100, (30, 2))  # texts and mels: unrelated
    clips = [Clip("", "", [0] * T_in, T_out, "", ()) for T_in, T_out in lengths.tolist()]
    sampler, every = training_sampler(clips, hparams), []
    for epoch in range(3, 9):
        sampler.set_epoch(epoch)
        every += sampler.plan

    def largest_sizes(batches: list) -> list[int]:
        shapes = [(len(batch), *lengths[batch].max(axis=0)) for batch in batches]
        sizes = [(B, B * T_in, B * T_out, B * T_in * T_out) for B, T_in, T_out in shapes]
        return np.max(sizes, axis=0).tolist()

    largest = memory.largest_batches(clips, sampler, range(3, 9))
    assert 1 <= len(largest) <= 4 and largest_sizes(largest) == largest_sizes(every)


def test_out_of_memory_shows_before_a_run_or_ends_it_with_the_reason(
    tmp_path, settings, run, monkeypatch, capsys
):
    """Here a loss of more than 110 decoder steps does not fit while CUDA graphs hold memory."""

    class Full(Tacotron2Loss):
        def forward(self, output, batch, *share):
            if batch.gate.numel() > 110 and not (turn_off.called and turn_off.return_value):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
            return super().forward(output, batch, *share)

    turn_off = Mock(return_value=False)  # whether there were graphs
    monkeypatch.setattr(train, "Tacotron2Loss", Full)
    monkeypatch.setattr(memory.graphs, "turn_off", turn_off)
    with pytest.raises(UserError, match=r"^out of memory with a batch of .*; use a smaller batch"):
        run("run", settings)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    with pytest.raises(UserError, match=r"^out of memory \(CUDA out of memory\. Tried .* 9 GiB\);"):
        run("unchecked", settings + "check_memory=False")
    assert run("run", settings + "batch_capacity=110") == 0

    turn_off.reset_mock()
    turn_off.return_value = True
    assert run("graphs", settings) == 0 and turn_off.call_count == 1
    assert capsys.readouterr().out.count("note: memory runs out with CUDA graphs; ") == 1


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
    large = settings.replace("postnet_embedding_dim=8", "postnet_embedding_dim=2000")
    options = "-o", tmp_path / "run", "--hparams", large
    process = Forked("-c", code, *options, CUDA_VISIBLE_DEVICES="")
    _, errors = process.communicate()
    message = r"error: out of memory with a batch of \d clips, up to \d+ .*batch_size or model\n"
    assert process.returncode == 2 and re.match(message, errors), errors
