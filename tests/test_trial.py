"""Out of memory: seen before a run starts, said in one line, and the search for what fits."""

import dataclasses
import math
import os
import re
import signal
import sys
from subprocess import CalledProcessError
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from conftest import Forked, assert_same_run, build

import model as model_module
import train
from cli import UserError
from corpus.clips import Clip
from data_utils import MelDataset, collate, training_sampler
from decoder import check_fast_path, scan
from decoder.graphs import CaptureError
from hparams import create_hparams
from loss_function import Tacotron2Loss
from scripts import find_batch_capacity
from training import trial
from training.checkpoint import load_newest
from training.stop import Stopped


@pytest.fixture
def settings(settings: str) -> str:
    return settings.replace("check_memory=False,", "")


linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory")


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

    largest, of_all = trial.largest_batches(clips, sampler, range(3, 9))
    assert 1 <= len(largest) <= 4 and most(largest) == most(every)
    assert of_all == {(B, T_in) for B, T_in, _ in shapes(every)}


def test_stopped_while_the_largest_batches_are_tried_it_is_the_same_run(tmp_path, settings, run):
    def stop_and_try(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return memory_error(*args)

    memory_error, settings = trial.memory_error, settings + "epochs=1,"
    run("whole", settings + "check_memory=False")
    with patch.object(trial, "memory_error", stop_and_try):
        assert run("broken", settings, "--resume") == 143
    assert load_newest(tmp_path / "broken")[1]["progress"]["step"] == 0
    assert run("broken", settings, "--resume") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize(
    ("change", "most", "fix"),
    [
        ("", 110, r"set batch_capacity_seconds=1 \(now 2\)"),
        ("batching_strategy=RAND,dynamic_batch_size=False", 110, r"set batch_size=2 \(now 3\)"),
        ("", 5, "not even one clip fits: remove the longest, or reduce the model"),
    ],
)
def test_out_of_memory_shows_at_once_and_says_what_to_set(
    settings, run, monkeypatch, change, most, fix
):
    class Full(Tacotron2Loss):
        def forward(self, output, batch, *share):
            if batch.gate.numel() > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            return super().forward(output, batch, *share)

    monkeypatch.setattr(train, "Tacotron2Loss", Full)
    message = rf"^a batch of \d clips, up to \d+ frames and \d+ symbols long, needs more .*; {fix}"
    with pytest.raises(UserError, match=message):
        run("run", settings + "epochs=1," + change)
    with pytest.raises(UserError, match=r"^epoch 1, batch \d: a batch of .*; free memory on"):
        run("run", settings + "epochs=1,check_memory=False," + change)


@pytest.mark.parametrize(
    ("triton", "chosen", "note"),
    [
        ({}, "triton", "is the fastest: steps take 4.000 s with scan and 3.000 s with"),
        ({"seconds": 2.5}, "scan", "is the fastest: steps take 4.000 s with scan and 5.000 s with"),
        ({"gradient": torch.tensor([3.0, 4.1])}, "scan", "gradient differs .* 0.02"),
        ({"loss": torch.tensor(math.nan)}, "scan", "its loss differs"),
        (RuntimeError("no resource\nMore"), "scan", r"\(RuntimeError: no resource\); train"),
    ],
)
def test_triton_is_used_if_it_is_right_and_faster(monkeypatch, triton, chosen, note):
    """A step takes 2 s with scan, and 1.5 s with triton unless ``triton`` says otherwise."""
    model, steps = build(), trial.Steps(torch.tensor(1.0), torch.tensor([3.0, 4.0]), 2.0)

    def take_steps(*_) -> trial.Steps:
        if model.decoder.implementation == "scan":
            return steps
        if isinstance(triton, Exception):
            raise triton
        return steps._replace(**{"seconds": 1.5} | triton)

    monkeypatch.setattr(trial, "take_steps", take_steps)
    line = trial.faster_decoder(model, None, [[trial.blank(5, 6, 10)]] * 2)
    assert model.decoder.implementation == chosen and re.search(note, line)


FULL = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("kind", ["training", "validation"])
def test_graphs_that_do_not_fit_are_a_reason_against_triton(monkeypatch, capsys, kind):
    model, fails = build(decoder="auto"), Mock(side_effect=FULL)
    monkeypatch.setattr(trial, "memory_error", Mock(return_value=FULL))
    monkeypatch.setattr(model, "forward", fails)
    monkeypatch.setattr(model.decoder, "graph_shapes", lambda shapes: shapes)
    shapes = {"training": [], "validation": [], kind: [(2, 5)]}
    model.decoder.implementation = "triton"
    trial.try_shapes(model, None, None, **shapes)
    assert model.decoder.implementation == "scan" and model.training
    assert "graphs of all batches need more memory" in capsys.readouterr().out
    model.hparams = dataclasses.replace(model.hparams, decoder="triton")
    model.decoder.implementation = "triton"
    with pytest.raises(UserError, match="need more memory than there is; use decoder=scan"):
        trial.try_shapes(model, None, None, **shapes)


def test_a_validation_step_that_fails_is_a_reason_against_triton(monkeypatch):
    model = build(decoder="triton")
    model.decoder.implementation = "triton"
    forward = model.decoder.forward

    def fails(*inputs):
        if model.decoder.implementation == "triton" and not model.training:
            raise RuntimeError("no kernel image")
        with patch.object(model.decoder, "implementation", "scan"):
            return forward(*inputs)

    monkeypatch.setattr(model.decoder, "forward", fails)
    items = [trial.blank(5, 9, model.hparams.n_mel_channels)] * 2
    note = trial.faster_decoder(model, Tacotron2Loss(), [items])
    assert "no kernel image" in note and model.decoder.implementation == "scan" and model.training


def test_all_processes_choose_scan_if_one_of_them_cannot_use_triton(monkeypatch, capsys):
    model, steps = build(), Mock()
    dataset = MelDataset([Clip("", "", [0], 7, "", ())], lambda _: np.zeros((7, 10), np.float32))
    monkeypatch.setattr(trial.distributed, "largest", lambda _: 1)
    monkeypatch.setattr(trial, "take_steps", steps)
    model.decoder.implementation = "triton"
    trial.choose_decoder(model, None, dataset, [np.array([0])])
    assert model.decoder.implementation == "scan" and not steps.called
    assert capsys.readouterr().out == "note: decoder=scan, as other processes choose\n"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CalledProcessError(1, ["gcc"]), "install gcc and python3-dev"),
        (FULL, "OutOfMemoryError: CUDA out of"),
        (RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED"), "RuntimeError: CUBLAS_STATUS"),
    ],
)
def test_whatever_fails_with_triton_alone_the_check_goes_on_with_scan(monkeypatch, error, reason):
    fail_with_triton(monkeypatch, error)
    model, items = build(), [trial.blank(5, 6, 10)] * 2
    model.decoder.implementation = "triton"
    (note,) = check_fast_path(model, collate(items))
    assert reason in note and model.decoder.implementation == "scan"


def fail_with_triton(monkeypatch, error: Exception) -> None:
    kernels = Mock(decode=Mock(side_effect=error))
    recurrences = {"triton": kernels, "scan": scan, "auto": scan}.__getitem__
    monkeypatch.setattr(model_module, "recurrences", recurrences)


def test_what_the_fallbacks_do_not_cover_never_uses_triton(settings, run, monkeypatch):
    """The first pass of several replicas, and a model that train.py has not checked."""
    fail_with_triton(monkeypatch, RuntimeError("no kernel image"))
    passes = []

    def replicated(model, loss):
        passes.append(loss(model))
        return model

    def check_fast_path(model, _):
        model.decoder.implementation = "triton"
        return []

    def choose_decoder(model, *_):
        assert model.decoder.implementation == "triton"
        model.decoder.implementation = "scan"

    monkeypatch.setattr(trial.distributed, "replicated", replicated)
    monkeypatch.setattr(trial, "check_fast_path", check_fast_path)
    monkeypatch.setattr(trial, "choose_decoder", choose_decoder)
    assert run("run", settings + "decoder=auto,epochs=1") == 0 and len(passes) == 1
    build(decoder="auto").eval()(collate([trial.blank(5, 6, 10)]))


def test_a_step_that_is_repeated_moves_batch_norm_once(monkeypatch):
    fail_with_triton(monkeypatch, RuntimeError("no kernel image"))
    model, batch = build(), collate([trial.blank(5, 6, 10)] * 2)
    model.decoder.implementation = "triton"
    trial.with_fallback(model, model, batch)
    moved = {n: int(b) for n, b in model.named_buffers() if n.endswith("num_batches_tracked")}
    assert set(moved.values()) == {1} and any("encoder" in name for name in moved)


@pytest.mark.parametrize("where", ["memory_error", "step", "validate_run"])
@pytest.mark.parametrize("kind", [RuntimeError, CaptureError])
def test_a_run_goes_on_with_scan_after_a_failure_of_triton_and_keeps_it(
    tmp_path, settings, run, monkeypatch, capsys, where, kind
):
    """Here, triton is scan by another name."""
    chosen, failures = [], [kind("no kernel image\nCompile with")]
    owner = {"memory_error": trial, "step": train.Run, "validate_run": train}[where]
    works = getattr(owner, where)

    def check_fast_path(model, _):
        model.decoder.implementation = model.decoder.implementation.replace("auto", "triton")
        return []

    def choose_decoder(model, *_):
        chosen.append(model.decoder.implementation)

    def fails_once(*arguments):
        if failures:
            raise failures.pop()
        return works(*arguments)

    monkeypatch.setattr(model_module, "recurrences", lambda _: scan)
    monkeypatch.setattr(model_module.Decoder, "graph_shapes", lambda *_: [])
    monkeypatch.setattr(trial, "check_fast_path", check_fast_path)
    monkeypatch.setattr(trial, "choose_decoder", choose_decoder)
    monkeypatch.setattr(owner, where, fails_once)
    settings += f"decoder=auto,check_memory={owner is trial},epochs_per_validation=1,"
    assert run("run", settings + "epochs=1") == 0 and chosen == ["triton"]
    note = f"decoder=triton fails ({kind.__name__}: no kernel image); training uses decoder=scan"
    assert f"note: {note}" in capsys.readouterr().out
    assert load_newest(tmp_path / "run")[1]["decoder"] == "scan"
    assert run("run", settings + "epochs=2", "--resume") == 0 and chosen == ["triton"]


def test_several_processes_do_not_try_again_what_they_do_together(monkeypatch):
    """The others are in the middle of it."""
    model, fails = build(), Mock(side_effect=CaptureError("no memory\nHint"))
    monkeypatch.setattr(trial.distributed, "SEVERAL", True)
    fix = (
        r"^decoder=triton fails \(CaptureError: no memory\); --resume with --hparams decoder=scan$"
    )
    model.decoder.implementation = "triton"
    with pytest.raises(UserError, match=fix):
        trial.with_fallback(model, fails, together=True)
    assert fails.call_count == 1
    fails.side_effect = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(UserError, match="one of the processes has ended"):
        trial.with_fallback(model, fails, together=True)
    fails.side_effect = [CaptureError("no memory"), "done"]
    assert trial.with_fallback(model, fails) == "done"  # in one of them alone


def test_a_signal_is_no_failure_of_triton():
    model, stops = build(), Mock(side_effect=Stopped(signal.SIGTERM))
    model.decoder.implementation = "triton"
    with pytest.raises(Stopped):
        trial.with_fallback(model, stops)
    assert stops.call_count == 1 and model.decoder.implementation == "triton"


UNCLEAR = [
    "GET was unable to find an engine to execute this computation",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "captures_underway.empty() INTERNAL ASSERT FAILED",
]


@pytest.mark.parametrize("message", UNCLEAR)
def test_an_error_that_may_be_memory_is_so_if_a_smaller_batch_passes(monkeypatch, message):
    model, items = build(), [trial.blank(5, 6, 10)] * 4

    def fails_above(n: int):
        def forward(batch):
            if len(batch.indices) > n:
                raise RuntimeError(message)
            return next(model.parameters()).sum()

        return forward

    loss = Mock(side_effect=lambda output, _: Mock(objective=output))
    for n in (4, 3, 1):
        monkeypatch.setattr(model, "forward", fails_above(n))
        assert trial.largest_fitting(model, loss, Mock(), items) == n
    monkeypatch.setattr(model, "forward", fails_above(0))
    with pytest.raises(RuntimeError, match=re.escape(message)):
        trial.largest_fitting(model, loss, Mock(), items)


@pytest.mark.parametrize("message", UNCLEAR)
def test_an_error_on_the_smallest_batch_too_is_shown_as_it_is(settings, run, monkeypatch, message):
    monkeypatch.setattr(train.Tacotron2Loss, "forward", Mock(side_effect=RuntimeError(message)))
    monkeypatch.setattr(trial, "check_fast_path", lambda *_: [])
    for check_memory in (True, False):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            run("run", f"{settings}epochs=1,check_memory={check_memory}")
    monkeypatch.setattr(find_batch_capacity.resource, "setrlimit", Mock())
    clips = [Clip("", "", [0] * 9, 20, "", ())] * 3
    with pytest.raises(RuntimeError, match=re.escape(message)):
        find_batch_capacity.measure(clips, clips, create_hparams(settings), None)


def test_an_error_that_may_be_memory_is_so_once_batches_have_passed(settings, run, monkeypatch):
    full = RuntimeError(UNCLEAR[0])
    for where, message in (("step", "batch 1: a batch of"), ("validate_run", "validation: out of")):
        owner = train.Run if where == "step" else train
        with monkeypatch.context() as patched:
            patched.setattr(owner, where, Mock(side_effect=full))
            with pytest.raises(UserError, match=f"^epoch 1, {message} .*; free memory on"):
                run(where, settings + "epochs=1")


def test_what_does_not_fit_with_triton_is_tried_with_scan(monkeypatch, capsys):
    model, items = build(decoder="auto"), [trial.blank(5, 6, 10)] * 4

    def try_step(error: Exception, chosen: str) -> int:
        def memory_error(*_):
            return error if model.decoder.implementation == "triton" else None

        monkeypatch.setattr(trial, "memory_error", memory_error)
        model.hparams = dataclasses.replace(model.hparams, decoder=chosen)
        model.decoder.implementation = "triton"
        return trial.largest_fitting(model, Mock(), Mock(), items)

    assert try_step(FULL, "auto") == 4 and model.decoder.implementation == "scan"
    assert "fails (OutOfMemoryError: CUDA out of memory)" in capsys.readouterr().out
    assert try_step(FULL, "triton") == 0 and model.decoder.implementation == "triton"
    assert try_step(RuntimeError(UNCLEAR[0]), "triton") == 4
    assert model.decoder.implementation == "scan"


@pytest.mark.parametrize("where", ["Tacotron2", "validate_run"])
def test_out_of_memory_anywhere_is_one_line(settings, run, monkeypatch, where):
    full = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    monkeypatch.setattr(train, where, Mock(side_effect=full))
    with pytest.raises(UserError, match=r"\bout of memory; .*, then --resume"):
        run("run", settings + "epochs=1")


@linux
def test_the_memory_of_a_cpu_ends_as_a_gpus_does(tmp_path, settings):
    """800 MiB more than the imports take, which 60 M parameters with moments do not fit."""
    code = (
        "import resource, train; from cli import exit_on_user_error\n"
        "pages = int(open('/proc/self/statm').read().split()[5])  # a CUDA build has more\n"
        "limit = pages * resource.getpagesize() + 800 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "exit_on_user_error(train.main)"
    )
    large = settings.replace("postnet_embedding_dim=8", "postnet_embedding_dim=2000") + "epochs=1"
    process = Forked("-c", code, "-o", tmp_path / "run", "--hparams", large)
    _, errors = process.communicate()
    message = r"error: a batch of \d clips, up to \d+ .*; not even one clip .*\n"
    # With Triton installed, its bindings may write of leaks after that.
    assert process.returncode == 2 and re.match(message, errors), errors


@linux
def test_the_search_tries_until_all_fits_or_nothing_does(corpus, settings, monkeypatch, capfd):
    (corpus / "train.txt").write_text("1.wav|one\n")  # so that one trial is enough
    settings = settings.replace("batch_size=3", "batch_size=1") + "epochs=3,n_frames_per_step=3"
    options = "--hparams", settings
    find_batch_capacity.main([*options, "--memory_gib=16"])
    printed = capfd.readouterr().out
    assert "GiB" in printed and "all clips fit in one batch" in printed
    too_much = r"not even the longest clip, of \d+ frames, fits the memory"
    monkeypatch.setattr(find_batch_capacity, "capacity_fits", lambda *_: False)
    with pytest.raises(UserError, match=too_much):
        find_batch_capacity.main(options)
    assert "GiB" not in capfd.readouterr().out


@pytest.mark.parametrize("most", [79, 80, 133, 190, 300])
def test_the_search_finds_the_most(settings, monkeypatch, capsys, most):
    fits = Mock(side_effect=lambda capacity, *_: capacity <= most)
    monkeypatch.setattr(find_batch_capacity, "capacity_fits", fits)
    find_batch_capacity.main(["--hparams", settings + "hop_length=220"])
    tried = [call.args[0] for call in fits.call_args_list]
    largest = max(capacity for capacity in tried if capacity <= most)
    assert most - largest <= 0.04 * most and len(tried) <= 9
    seconds = int(largest * 220 / 22050)
    assert capsys.readouterr().out.endswith(f"batch_capacity_seconds={seconds}\n")


def test_the_search_refuses_what_makes_no_sense(monkeypatch):
    for option, message in (
        ("--memory_gib=0", "--memory_gib 0.0: use a number above 0"),
        ("--hparams=dynamic_batch_size=False", "batches have no capacity; leave it out"),
    ):
        with pytest.raises(UserError, match=message):
            find_batch_capacity.main([option])
