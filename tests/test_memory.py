"""Out of memory: seen before a run starts, and said in one line."""

import os
import re
import signal
import sys
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from conftest import Forked, assert_same_run, build, contents

import train
from cli import UserError
from corpus.clips import Clip
from data_utils import Item, training_sampler
from hparams import create_hparams
from loss_function import Tacotron2Loss
from training import memory
from training.checkpoint import load_newest


@pytest.fixture
def settings(settings: str) -> str:
    return settings.replace("check_memory=False,", "")


ITEMS = [Item(0, torch.zeros(5, dtype=torch.int64), torch.zeros(6, 10))] * 4


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


def test_stopped_while_the_largest_batches_are_tried_it_is_the_same_run(tmp_path, settings, run):
    def stop_and_try(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return memory_error(*args)

    memory_error, settings = memory.memory_error, settings + "epochs=1,"
    run("whole", settings + "check_memory=False")
    before = contents(tmp_path)
    with patch.object(memory, "memory_error", stop_and_try), pytest.raises(KeyboardInterrupt):
        run("broken", settings, "--resume")
    assert contents(tmp_path) == before
    assert run("broken", settings, "--resume") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize(
    "change", ["", "batch_capacity=125,", "batching_strategy=RAND,dynamic_batch_size=False,"]
)
def test_out_of_memory_shows_at_once_and_the_suggestion_is_accepted(
    settings, run, monkeypatch, change
):
    class Full(Tacotron2Loss):
        def forward(self, output, batch, *share):
            if batch.gate.numel() > 110:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            return super().forward(output, batch, *share)

    monkeypatch.setattr(train, "Tacotron2Loss", Full)
    settings += "epochs=1," + change
    with pytest.raises(UserError, match=r"^epoch 1, batch \d: a batch of .*; free memory on"):
        run("unchecked", settings + "check_memory=False")
    with pytest.raises(UserError, match=r"^a batch of \d clips, up to \d+ frames and ") as error:
        run("run", settings)
    fix = re.search(r"set (\w+=[\d.]+) \(now \d+\)$", str(error.value))[1]
    assert run("run", settings + fix) == 0


FULL = torch.OutOfMemoryError("CUDA out of memory")
NOTE = "note: memory ran out: training goes on without CUDA graphs, more slowly\n"


@pytest.fixture
def graphs_that_fill(monkeypatch) -> Mock:
    """As if CUDA graphs held memory: turn_off, which frees some the first time."""
    freed = Mock(side_effect=[True, False, False, False])
    monkeypatch.setattr(memory.graphs, "turn_off", freed)
    return freed


@pytest.mark.parametrize("message", [str(FULL), "captures_underway.empty() INTERNAL ASSERT FAILED"])
@pytest.mark.parametrize("where", ["forward", "validate"])
def test_a_run_goes_on_without_graphs_when_memory_runs_out(
    tmp_path, settings, run, monkeypatch, capsys, graphs_that_fill, where, message
):
    """A step that is taken again moves batch norm once."""
    owner = {"forward": train.Tacotron2, "validate": train}[where]
    settings += "epochs=1,check_memory=False,p_prenet_dropout=0,"
    run("whole", settings)
    monkeypatch.setattr(train, "check_fast_path", lambda *_: None)
    capsys.readouterr()
    works = getattr(owner, where)
    failures = [RuntimeError(message)]

    def fails_once(*arguments):
        result = works(*arguments)
        if failures:
            raise failures.pop()
        return result

    failing = Mock(side_effect=fails_once)
    monkeypatch.setattr(owner, where, lambda *arguments: failing(*arguments))
    assert run("broken", settings) == 0 and failing.call_count > 1
    assert capsys.readouterr().out.count(NOTE) == 1 and graphs_that_fill.call_count == 1
    states = [load_newest(tmp_path / name)[1]["state_dict"] for name in ("whole", "broken")]
    name = "postnet.convolutions.0.1.num_batches_tracked"
    assert states[0][name] == states[1][name]


def test_several_processes_do_not_take_a_step_again(monkeypatch, graphs_that_fill):
    """The others are in the middle of it."""
    monkeypatch.setattr(memory.distributed, "SEVERAL", True)
    fails = Mock(side_effect=FULL)
    with pytest.raises(torch.OutOfMemoryError):
        memory.without_graphs_if_full(fails, build())
    assert fails.call_count == 1 and not graphs_that_fill.called


def test_a_batch_that_fits_without_graphs_is_not_too_large(monkeypatch, capsys, graphs_that_fill):
    for errors, n_fitting, printed in (([FULL, None], 4, NOTE), ([FULL, FULL, None], 3, "")):
        graphs_that_fill.side_effect = [True, False, False]
        monkeypatch.setattr(memory, "memory_error", lambda *_, errors=errors: errors.pop(0))
        assert memory.largest_fitting(build(), None, None, ITEMS) == n_fitting and not errors
        assert capsys.readouterr().out == printed


UNCLEAR = [
    "GET was unable to find an engine to execute this computation",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "captures_underway.empty() INTERNAL ASSERT FAILED",
]


@pytest.mark.parametrize("message", UNCLEAR)
def test_an_error_that_may_be_memory_is_so_if_a_smaller_batch_passes(monkeypatch, message):
    model, loss = build(), Mock(side_effect=lambda output, _: Mock(objective=output))
    for n_fitting in (4, 3, 1, 0):

        def forward(batch, n_fitting=n_fitting):
            if len(batch.indices) > n_fitting:
                raise RuntimeError(message)
            return next(model.parameters()).sum()

        monkeypatch.setattr(model, "forward", forward)
        if n_fitting:
            assert memory.largest_fitting(model, loss, Mock(), ITEMS) == n_fitting
    with pytest.raises(RuntimeError, match=re.escape(message)):
        memory.largest_fitting(model, loss, Mock(), ITEMS)


@pytest.mark.parametrize("message", UNCLEAR)
def test_an_error_that_may_be_memory_is_so_once_batches_have_passed(
    settings, run, monkeypatch, message
):
    settings += "epochs=1,"
    failing = Mock(side_effect=RuntimeError(message))
    for owner, where, error in (
        (train.Run, "step", "batch 1: a batch of"),
        (train, "validate", "validation: out of"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, where, failing)
            with pytest.raises(UserError, match=f"^epoch 1, {error} .*; free memory on"):
                run(where, settings)
    monkeypatch.setattr(train.Tacotron2Loss, "forward", failing)
    monkeypatch.setattr(train, "check_fast_path", lambda *_: None)
    for check_memory in (True, False):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            run("run", f"{settings}check_memory={check_memory}")


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
    message = r"error: a batch of \d clips, up to \d+ .*; not even one clip fits: remove .*\n"
    assert process.returncode == 2 and re.match(message, errors), errors
