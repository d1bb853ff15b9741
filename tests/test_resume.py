"""Nothing is lost: train.py stopped, killed, starved and misled."""

import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import Forked, assert_same_run, contents, records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.optimizer import register_optimizer_step_post_hook as after_each_step

import data_utils
import train
from cli import UserError
from training import validation
from training.checkpoint import find_checkpoints, load_checkpoint, load_newest
from training.logger import RunLogger

EVERY_BATCH = "checkpoint_minutes=1e-9,"


def stop(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def progress(output: Path) -> dict:
    return load_newest(output)[1]["progress"]


# Exact resume


# The ten rows of Table 2, and what is not in it; the last with three frames a step.
ROWS = (
    "RAND RAND-DBS SB SB-DBS SB-BR SB-DBS-BR SSB SSB-DBS SSB-BR SSB-DBS-BR BKT-BR BKT-DBS-BR "
    "ATS-BR ATS-DBS-BR SSB-DBS-BR-3"
)


@pytest.mark.parametrize("row", ROWS.split())
def test_stopped_after_every_batch_and_amid_validations_it_is_the_same_run(
    tmp_path, settings, run, monkeypatch, row
):
    """Weights, moments, metrics, curves and random numbers equal those of the unbroken run."""

    def seed(number):
        random.seed(number), np.random.seed(number), torch.manual_seed(number)

    def draw(*_):  # as a user's code may
        return random.random(), np.random.random(), torch.rand(()).item()

    def stop_once_an_epoch(*args):
        if next(calls) in (0, 3):  # the first of two batches, of both epochs
            stop(signal.SIGINT)
        return scores(*args)

    monkeypatch.setattr(train, "check_fast_path", lambda *_: None)  # it has tests below
    strategy, *options = row.split("-")
    settings += (
        f"batching_strategy={strategy},dynamic_batch_size={'DBS' in options},bucket_size=6,"
        f"batch_randomization={'BR' in options},n_bins=2,epochs=2,epochs_per_validation=1,"
        f"n_frames_per_step={3 if '3' in options else 1},learning_rate_decay=0.8,"
    )
    seed(0)
    with after_each_step(draw):
        assert run("whole", settings) == 0
    drawn = draw()
    scores, calls, statuses = validation.alignment_scores, itertools.count(), []
    monkeypatch.setattr(validation, "alignment_scores", stop_once_an_epoch)
    with after_each_step(draw), after_each_step(lambda *_: stop()):
        while 0 not in statuses:
            seed(len(statuses))
            statuses.append(run("broken", settings, "--resume"))
    assert draw() == drawn
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert_same_run(whole, broken)
    times = {"metrics_size": 0, "seconds": 0}
    assert progress(whole) | times == progress(broken) | times
    steps = records(broken, "step")
    assert Counter(statuses) == {143: len(steps), 130: 2, 0: 1}
    curve = EventAccumulator(str(broken)).Reload().Scalars("training/loss")
    assert [scalar.step for scalar in curve] == [line["step"] for line in steps]
    for epoch in records(broken, "epoch"):  # times and waits are added up
        seconds = [line["duration"] for line in steps if line["epoch"] == epoch["epoch"]]
        assert len(seconds) == epoch["n_batches"] and sum(seconds) < 60 * epoch["minutes"]
        assert epoch["data_wait"] < 1


@pytest.mark.parametrize(
    ("minutes", "epochs", "steps"),
    [(10, 2, [0, 6, 12]), (0, 9, [0, 12]), (1e-9, 9, [1, 2, 4, 5, 7, 8, 10, 11, 12])],
)
def test_checkpoints_by_minutes_and_epochs_and_the_last_nine(
    tmp_path, settings, run, minutes, epochs, steps
):
    settings += f"checkpoint_minutes={minutes},epochs_per_checkpoint={epochs},"
    settings += "keep_checkpoints=9,epochs=4,epochs_per_validation=9,"
    run("run", settings + "dynamic_batch_size=False")
    names = [f"checkpoint_{step:08d}.pt" for step in steps]
    assert [path.name for path in find_checkpoints(tmp_path / "run")] == names[::-1]


def test_a_run_goes_on_from_the_newest_whole_checkpoint_or_the_best(tmp_path, settings, run):
    settings += EVERY_BATCH + "epochs_per_validation=1,"
    for name, epochs in (("whole", 2), ("damaged", 2), ("best", 1)):
        run(name, settings + f"epochs={epochs}")
    newest, _ = find_checkpoints(tmp_path / "damaged")
    newest.write_bytes(newest.read_bytes()[:1000])
    for path in find_checkpoints(tmp_path / "best"):
        path.unlink()
    for name in ("damaged", "best"):
        run(name, "epochs=2", "--resume")
        assert_same_run(tmp_path / "whole", tmp_path / name)

    for path in (tmp_path / "best").glob("*.pt"):  # as a user does to make room
        path.unlink()
    before = contents(tmp_path / "best")
    for options, message in (
        (["--resume"], "best: has no whole checkpoint left"),
        ([], "best: holds a run; --resume it, or give another -o"),
    ):
        with pytest.raises(UserError, match=message):
            run("best", settings + "epochs=3", *options)
    assert contents(tmp_path / "best") == before


def test_what_makes_another_run_is_refused_and_changes_nothing(tmp_path, corpus, settings, run):
    output, same, fewer = tmp_path / "run", corpus / "same.txt", corpus / "fewer.txt"
    shutil.copy(corpus / "train.txt", same)  # another name is no other data
    fewer.write_text(same.read_text().partition("\n")[2])
    run("run", settings + "epochs=1")
    assert run("run", f"epochs=2,training_files={same},checkpoint_minutes=3", "--resume") == 0
    assert '"batch_size": 3' in (output / "hparams.json").read_text()  # as it was

    path, metrics = find_checkpoints(output)[0], output / "metrics.jsonl"
    state, logged = load_checkpoint(path), metrics.read_bytes()
    newer = state | {"hparams": state["hparams"] | {"new": 1}}
    lacking = {name: value for name, value in state.items() if name != "progress"}
    for words, edited, log, change in (
        ("learning_rate is 0.001 in the run, 0.0001 in", state, logged, "learning_rate=1e-4"),
        ("other texts, lengths or", state, logged, f"epochs=3,training_files={fewer}"),
        ("has unknown new; use the code that saved it", newer, logged, "epochs=3"),
        ("has no progress; start from its weights by -c", lacking, logged, "epochs=3"),
        ("has 9 bytes, but had", state, logged[:9], "epochs=3"),
    ):
        torch.save(edited, path)
        metrics.write_bytes(log)
        before = contents(tmp_path)
        with pytest.raises(UserError, match=words):
            run("run", change, "--resume")
        assert contents(tmp_path) == before


@pytest.mark.parametrize("begun", ["anew", "by -c"])
@pytest.mark.parametrize(
    ("owner", "name", "n_saved"),
    [(data_utils, "open_mels", 0), (RunLogger, "write", 1), (RunLogger, "log", 1)],
)
def test_killed_at_any_moment_of_its_beginning_it_is_the_same_run(
    tmp_path, settings, run, owner, name, n_saved, begun
):
    """Once a checkpoint is there, --resume is enough, also for a run that began by -c; until then
    its command starts it again."""
    run("first", settings + "epochs=1,epochs_per_validation=1")
    first = "-c", str(tmp_path / "first" / "checkpoint_best.pt"), "--warm_start"
    options = first if begun == "by -c" else ()
    settings += "epochs=3,lrf=0.5,seed=7,epochs_per_validation=1,epochs_per_checkpoint=1,"
    settings += "learning_rate=1e-2"  # so that every validation is the best
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run("whole", settings, *options)
    killed = patch.object(owner, name, side_effect=KeyboardInterrupt)  # which nothing here handles
    with killed, pytest.raises(KeyboardInterrupt):
        run("broken", settings, *options)
    assert len(find_checkpoints(broken)) == n_saved
    part = broken / "checkpoint_00000001.pt.123.part"
    part.touch()  # as a kill amid a save does
    if not n_saved:
        with pytest.raises(UserError, match="broken: holds no run to resume, or one stopped"):
            run("broken", "", "--resume")
    run("broken", *(["", "--resume"] if n_saved else [settings, *options]))
    assert_same_run(whole, broken)
    assert not part.exists()
    assert load_checkpoint(broken / "checkpoint_best.pt")["progress"]["epoch"] == 3


# Ends


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_batch_and_saves(tmp_path, settings, run, number):
    """Ctrl-C and schedulers send it. Until the end no other process trains in the folder."""
    output = tmp_path / "run"
    settings += "epochs=5000,epochs_per_validation=5000"
    process = Forked("train.py", "-o", output, "--hparams", settings)
    assert any(line.startswith("epoch 5: training loss") for line in process.stdout)
    with pytest.raises(UserError, match=f"{output}: in use by process {process.pid}; wait for"):
        run("run", "", "--resume")
    os.killpg(process.pid, number)
    printed, errors = process.communicate()
    assert process.returncode == 128 + number
    assert errors == f"{number.name}: saving, then stopping\n"
    saved = progress(output)
    last = f"{number.name}: saved {find_checkpoints(output)[0]} after {saved['epoch']} epochs"
    assert last in printed and saved["epoch"] > 4
    assert saved["step"] == records(output, "step")[-1]["step"]


SLOW = """
import time, train
train.Run.train_step = lambda *_: print("waiting") or time.sleep(100)
train.cli.exit_on_user_error(train.main)
"""


def test_a_second_signal_ends_the_process_at_once(tmp_path, settings):
    process = Forked("-c", SLOW, "-o", tmp_path / "run", "--hparams", settings)
    assert "waiting\n" in process.stdout
    for _ in range(2):
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGTERM)
    process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_signalled_at_random_moments_and_resumed_it_is_the_same_run(tmp_path, settings):
    """This holds on a GPU too, where the algorithms must be deterministic."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings += EVERY_BATCH + "deterministic=True,epochs=6"
    options = "--resume", "--hparams", settings
    process = Forked("train.py", "-o", whole, *options)
    started, statuses = time.monotonic(), []
    process.communicate()
    seconds = time.monotonic() - started
    while 0 not in statuses:
        process = Forked("train.py", "-o", broken, *options)
        if len(statuses) < 5:
            time.sleep(random.uniform(0, seconds))
            number = random.choice((signal.SIGINT, signal.SIGTERM, *[signal.SIGKILL] * 2))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        printed = process.communicate()
        # 0: it was done before; -number: before the first batch, or killed
        assert process.returncode in (0, -number, 128 + number), printed
        statuses.append(process.returncode)
        for path in find_checkpoints(broken):
            load_checkpoint(path)  # each is whole
    assert_same_run(whole, broken)


# Full disks


LONG_LOG = """
import resource, train
{}
train.logger.RunLogger.log_samples = lambda self, *_: self.tensorboard.add_text("long", 10**6 * "a")
train.cli.exit_on_user_error(train.main)
"""


@pytest.mark.parametrize(
    ("kib", "message"),
    [
        (78, "run/checkpoint_.*: cannot be saved .*, older checkpoints are intact; make room, .*"),
        (195, r"\S+: File too large; free some space, then run again"),
    ],
)
def test_on_a_full_disk_what_is_there_stays(tmp_path, settings, kib, message):
    """Here the size of files is limited, and a checkpoint or a log reaches the limit first."""
    output, size = tmp_path / "run", 1024 * kib
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    command = ["-o", output, "--hparams", settings + EVERY_BATCH + "epochs=3000"]
    process = Forked("-c", LONG_LOG.format(limit), *command)
    _, errors = process.communicate()
    assert process.returncode == 2 and re.search(f"error: .*{message}", errors), errors
    assert not list(output.glob("*.part"))
    for path in output.glob("*.pt"):
        state = load_checkpoint(path)  # each is whole
        assert (output / "metrics.jsonl").stat().st_size >= state["progress"]["metrics_size"]


# Numbers


def test_a_step_that_is_not_finite_is_skipped_and_its_clips_are_named(
    tmp_path, settings, run, monkeypatch, capsys
):
    """A bad mel spoils batch norm in the forward pass, too."""
    settings += "dynamic_batch_size=False,epochs=4,epochs_per_validation=9,"
    settings += "epochs_per_checkpoint=1,max_bad_steps=3"
    collate, batches = data_utils.collate, []
    bad_mels = {3: np.nan, 4: 1e30, 7: np.inf, 8: 1e30, 9: np.nan}

    def spoil(*items):
        batch = collate(*items)
        batch.mel[0, 0, 0] *= bad_mels.get(len(batches), 1)
        batches.append(batch)  # the first checks the fast path
        return batch

    monkeypatch.setattr(data_utils, "collate", spoil)
    with pytest.raises(UserError) as error:
        run("run", settings)
    output = tmp_path / "run"
    bad = records(output, "bad_step")
    lines = [(line["epoch"], line["batch"], line["loss"]) for line in bad]
    assert lines == [(0, 2, "nan"), (1, 0, "inf"), (2, 0, "nan"), (2, 1, "inf"), (2, 2, "nan")]
    indices = [batches[number].indices for number in bad_mels]
    clips = [[f"{tmp_path}/train.txt:{i + 1}" for i in batch] for batch in indices]
    assert [line["clips"] for line in bad] == clips
    warning = f"warning: epoch 1, batch 3: loss nan, gradient nan, in {clips[0][0]}"
    assert warning in capsys.readouterr().out
    assert f"{', '.join(clips[4])}; that is 3 steps in a row" in str(error.value)
    assert [line["skipped_steps"] for line in records(output, "epoch")] == [1, 1]
    path, state = load_newest(output)
    assert path.name == "checkpoint_00000004.pt"
    assert all(weight.isfinite().all() for weight in state["state_dict"].values())
    assert state["state_dict"]["postnet.convolutions.0.1.num_batches_tracked"] == 4  # of 6

    # An epoch without a step has no loss: JSON has no NaN, and the records have null.
    bad_mels.update(dict.fromkeys(range(len(batches), len(batches) + 9), np.nan))
    run("no loss", settings.replace("epochs=4", "epochs=1").replace("steps=3", "steps=9"))
    assert [record["training_loss"] for record in records(tmp_path / "no loss", "epoch")] == [None]
    assert not (tmp_path / "no loss" / "checkpoint_best.pt").exists()
