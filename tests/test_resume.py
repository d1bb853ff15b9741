"""Nothing is lost: train.py stopped, killed, starved and misled."""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import checkpoint
import data_utils
import memory
import train
import validation
from benchmarks import soak
from checkpoint import checkpoints, load_checkpoint, load_newest
from cli import UserError
from clips import load_clips
from hparams import create_hparams
from logger import RunLogger
from loss_function import Tacotron2Loss

ROOT = Path(__file__).resolve().parent.parent
EVERY_BATCH = "checkpoint_minutes=1e-9,"


def start(output: Path, settings: str, program=("train.py",), **options) -> subprocess.Popen:
    command = [sys.executable, *program, "-o", output, "--resume", "--hparams", settings]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes, **options)


def finish(process: subprocess.Popen, status: int) -> tuple[str, str]:
    """The output and the errors of a process that ends with ``status`` and no traceback."""
    output, errors = process.communicate(timeout=200)
    assert process.returncode == status, output + errors
    assert "Traceback" not in errors
    return output, errors


def wait_for(process: subprocess.Popen, output: Path, text: bytes) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (output / "metrics.jsonl").exists() and text in (output / "metrics.jsonl").read_bytes():
            return
        time.sleep(0.01)
    pytest.fail("".join(process.communicate()))


def kill(*_: object) -> None:
    raise KeyboardInterrupt  # which nothing here handles


def after_each_step(monkeypatch, action) -> None:
    """Call ``action`` once a step has been logged."""
    log = RunLogger.log

    def log_and_act(self, event, *values):
        log(self, event, *values)
        if event == "step":
            action()

    monkeypatch.setattr(RunLogger, "log", log_and_act)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# Exact resume


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("strategy", ["RAND", "SB", "SSB", "BKT", "ATS"])
def test_stopped_after_every_batch_and_amid_validations_it_is_the_same_run(
    tmp_path, settings, run, monkeypatch, strategy, dynamic
):
    """Weights, moments, metrics, curves and every random generator equal the unbroken run's."""
    settings += (
        f"batching_strategy={strategy},dynamic_batch_size={dynamic},bucket_size=6,n_bins=2,"
        "epochs=2,epochs_per_validation=1,check_memory=False"
    )
    drawn, scores, validated = [], validation.alignment_scores, []

    def draw():  # as a user's code may
        drawn.append((random.random(), np.random.random(), float(torch.rand(()))))

    def stop_once_an_epoch(*args):
        validated.append(len(checkpoints(tmp_path / "broken")))
        if len(validated) in (1, 4):  # the first of two batches, of both epochs
            os.kill(os.getpid(), signal.SIGINT)
        return scores(*args)

    after_each_step(monkeypatch, draw)
    random.seed(1), np.random.seed(1)
    assert run("whole", settings) == 0
    whole, drawn[:] = list(drawn), []
    after_each_step(monkeypatch, stop)
    monkeypatch.setattr(validation, "alignment_scores", stop_once_an_epoch)
    random.seed(1), np.random.seed(1)
    statuses = []
    while statuses[-1:] != [0]:
        statuses.append(run("broken", settings, "--resume"))
        random.seed(9), np.random.seed(9), torch.manual_seed(9)
    n_batches = sum(line["n_batches"] for line in records(tmp_path / "whole", "epoch"))
    assert statuses.count(143) == n_batches and statuses.count(130) == 2
    assert drawn == whole and len(drawn) > 1
    soak.assert_same_run(tmp_path / "whole", tmp_path / "broken")
    before, after = (load_newest(tmp_path / name)[1] for name in ("whole", "broken"))
    for name in ("epoch", "batch", "step", "best_loss", "best_alignment"):
        assert before["progress"][name] == after["progress"][name]
    curves = EventAccumulator(str(tmp_path / "broken")).Reload()
    shown = [scalar.step for scalar in curves.Scalars("training/loss")]
    assert shown == [line["step"] for line in records(tmp_path / "broken", "step")]


def test_the_time_of_an_epoch_is_added_up(tmp_path, settings, run, monkeypatch):
    after_each_step(monkeypatch, lambda: (time.sleep(0.3), stop()))
    settings += "epochs=1,dynamic_batch_size=False,check_memory=False"
    seconds = []
    while run("run", settings, "--resume"):
        seconds.append(load_newest(tmp_path / "run")[1]["progress"]["sums"]["seconds"])
    assert [second > 0.3 * (k + 1) for k, second in enumerate(seconds)] == [True] * 3
    (epoch,) = records(tmp_path / "run", "epoch")
    assert epoch["minutes"] * 60 == pytest.approx(seconds[-1]) and epoch["data_wait"] < 1
    assert epoch["n_batches"] == len(records(tmp_path / "run", "step"))


def test_two_runs_of_one_seed_are_equal(tmp_path, settings, run, monkeypatch):
    """In processes of their own; and with deterministic=True, which changes nothing on a CPU."""
    process = start(tmp_path / "one", f"{settings}epochs=2")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    run("other", f"{settings}epochs=2,deterministic=True")
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    run("third", f"{settings}epochs=2,check_memory=False")  # which changes nothing either
    assert not torch.are_deterministic_algorithms_enabled()
    finish(process, 0)
    for name in ("other", "third"):
        soak.assert_same_run(tmp_path / "one", tmp_path / name)


def test_checkpoints_by_minutes_and_epochs_and_the_last_k(tmp_path, settings, run, monkeypatch):
    settings += "epochs=4,epochs_per_validation=9,dynamic_batch_size=False,"
    saved, save = [], checkpoint.save_checkpoint
    monkeypatch.setattr(
        checkpoint, "save_checkpoint", lambda path, state: saved.append(path) or save(path, state)
    )

    def names(change: str) -> list[str]:
        saved.clear()
        run(f"run{change}", settings + change)
        return [path.name for path in saved]

    def numbered(*steps: int) -> list[str]:
        return [f"checkpoint_{step:08d}.pt" for step in steps]

    best = ["checkpoint_best.pt"]  # and the last
    assert names("epochs_per_checkpoint=2") == numbered(0, 6) + best
    assert names("epochs_per_checkpoint=9,checkpoint_minutes=0") == numbered(0) + best
    often = "epochs_per_checkpoint=9,checkpoint_minutes=1e-9,keep_checkpoints=3"
    assert names(often) == numbered(0, 1, 2, 4, 5, 7, 8, 10, 11) + best
    assert [path.name for path in checkpoints(tmp_path / f"run{often}")] == numbered(12, 11, 10)


def test_killed_between_the_best_checkpoint_and_the_newest_the_best_stays(
    tmp_path, settings, run, monkeypatch
):
    settings += "epochs=3,epochs_per_validation=1,checkpoint_minutes=0,epochs_per_checkpoint=1,"
    settings += "learning_rate=1e-2"  # so that every validation is the best
    run("whole", settings)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "link", kill)
        run("broken", settings)
    assert checkpoints(tmp_path / "broken") == [tmp_path / "broken" / "checkpoint_00000000.pt"]
    run("broken", settings, "--resume")
    soak.assert_same_run(tmp_path / "whole", tmp_path / "broken")
    best = [load_checkpoint(tmp_path / n / "checkpoint_best.pt") for n in ("whole", "broken")]
    assert best[0]["progress"]["epoch"] == best[1]["progress"]["epoch"] == 3


def test_a_run_goes_on_from_the_newest_whole_checkpoint_or_the_best(
    tmp_path, settings, run, capsys
):
    settings += EVERY_BATCH + "epochs=2,epochs_per_validation=1"
    run("whole", settings)
    for name in ("damaged", "best"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
    newest, _ = checkpoints(tmp_path / "damaged")
    newest.write_bytes(newest.read_bytes()[:1000])
    capsys.readouterr()
    assert run("damaged", settings, "--resume") == 0
    assert f"warning: {newest}: not a checkpoint, or damaged" in capsys.readouterr().err
    assert Path(f"{newest}.damaged").stat().st_size == 1000
    shutil.rmtree(tmp_path / "best")
    run("best", settings.replace("epochs=2", "epochs=1", 1))
    for path in checkpoints(tmp_path / "best"):
        path.unlink()
    with pytest.raises(UserError, match="best: holds a run; --resume it, or give another -o"):
        run("best", settings)
    run("best", settings, "--resume")
    for name in ("damaged", "best"):
        soak.assert_same_run(tmp_path / "whole", tmp_path / name)


def test_what_makes_another_run_is_refused_and_changes_nothing(tmp_path, corpus, settings, run):
    run("run", settings + "epochs=1")
    lines = (corpus / "train.txt").read_text().splitlines(keepends=True)
    moved = corpus / "moved.txt"
    moved.write_text("".join(lines))  # another name is no other data
    assert run("run", f"epochs=2,training_files={moved},checkpoint_minutes=3", "--resume") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    assert b'"batch_size": 3' in before[tmp_path / "run" / "hparams.json"]  # as it was
    for change, options, message in (
        ("learning_rate=1e-4", (), "learning_rate=0.001 there and 0.0001 here; leave them out"),
        ("lrf=0.5,batching_strategy=SB", (), "SSB there and SB here; lrf=0.1 there and 0.5 here"),
        ("", ("--preset", "nvidia"), "hop_length=276 there and 256 here"),
    ):
        with pytest.raises(UserError, match=message):
            run("run", f"{change},epochs=3", "--resume", *options)
    moved.write_text("".join(lines[1:]))
    with pytest.raises(UserError, match="was trained on clips of other texts, lengths or order"):
        run("run", "epochs=3", "--resume")
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")} == before
    moved.write_text("".join(lines))
    assert run("run", "epochs=2", "--resume", "--preset", "paper") == 0  # nothing left to do
    metrics = tmp_path / "run" / "metrics.jsonl"
    for content in (b'{"event": "step"', b""):
        metrics.write_bytes(content)
        size = len(before[metrics])
        with pytest.raises(UserError, match=f"has {len(content)} bytes, but had {size:,} when"):
            run("run", "epochs=3", "--resume")


@pytest.mark.parametrize("moment", [(memory, "try_batches"), (RunLogger, "log")])
@pytest.mark.parametrize("by_checkpoint", [False, True])
def test_killed_before_its_first_checkpoint_it_is_resumed_with_its_settings(
    tmp_path, settings, run, monkeypatch, moment, by_checkpoint
):
    """By --resume alone; begun by -c, with the weights of that too."""
    options = ()
    if by_checkpoint:
        run("first", settings + "epochs=1,seed=7")
        options = "-c", str(checkpoints(tmp_path / "first")[0])
    settings += "epochs=2,lrf=0.5,seed=7"
    run("whole", settings, *options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*moment, kill)
        run("broken", settings, *options)
    run("broken", "", "--resume")
    soak.assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_killed_before_its_first_step_it_may_be_started_anew(
    tmp_path, settings, run, monkeypatch, capsys
):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "open_mels", kill)
        run("run", settings)
    with pytest.raises(UserError, match="run: holds no run to resume, or one that was stopped bef"):
        run("run", "", "--resume")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(memory, "try_batches", kill)
        run("run", settings + "epochs=2", "--resume")  # as a script calls it
    assert f"{tmp_path}/run: holds no run yet; starting one\n" in capsys.readouterr().out
    for name in ("run", "other"):
        run(name, settings + "epochs=1,lrf=0.5")
    soak.assert_same_run(tmp_path / "run", tmp_path / "other")
    with pytest.raises(UserError, match="run: holds a run; --resume it, or give another -o"):
        run("run", settings + "epochs=1")


def test_a_run_of_an_older_version_is_resumed(tmp_path, corpus, settings, run, capsys):
    """tests/old_run was trained by the version before settings were added. Settings that a
    checkpoint lacks are the defaults."""
    run("now", settings + "epochs=2")
    shutil.copytree(ROOT / "tests" / "old_run", tmp_path / "old")
    (path,) = checkpoints(tmp_path / "old")
    state = load_checkpoint(path)
    for name in ("lrf", "precision", "checkpoint_minutes"):
        del state["hparams"][name]
    torch.save(state, path)
    change = re.search(rf"data_dir={corpus},.*cache,", settings)[0] + "epochs=2"
    assert run("old", change, "--resume") == 0
    steps = [load_newest(tmp_path / name)[1]["progress"]["step"] for name in ("now", "old")]
    assert steps[0] == steps[1]
    losses = [[line["loss"] for line in records(tmp_path / n, "step")] for n in ("now", "old")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # other machines round otherwise
    state["hparams"]["of_the_future"] = 1
    (tmp_path / "newer").mkdir()
    newer = tmp_path / "newer" / path.name
    torch.save(state, newer)
    with pytest.raises(UserError, match=r"settings that this version does not know \(of_the_fut"):
        run("newer", "epochs=2", "--resume")
    run("future", change, "-c", str(newer))
    assert "this version does not know: of_the_future\n" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["progress", "optimizer"])
def test_a_checkpoint_of_another_version_is_refused_or_named(
    tmp_path, settings, run, capsys, missing
):
    run("run", settings + "epochs=1")
    path = checkpoints(tmp_path / "run")[0]
    state = load_checkpoint(path)
    state["progress"]["of_the_future"] = 1
    torch.save(state, tmp_path / "future.pt")
    with pytest.raises(UserError, match=r"future\.pt: of another version .*'of_the_future'"):
        run("two", settings + "epochs=2", "-c", str(tmp_path / "future.pt"))
    del state[missing]
    torch.save(state, path)
    with pytest.raises(UserError, match=f"has no {missing}; start from its weights by -c"):
        run("run", "epochs=2", "--resume")
    assert run("three", settings + "epochs=1", "-c", str(path)) == 0
    note = f"note: {path}: has weights but no training state; starting at epoch 0"
    assert note in capsys.readouterr().out


# Ends

SCRIPT = """
import os, signal, sys, time
import data_utils, train
from cli import exit_on_user_error

kept = []  # exceptions, as some libraries keep them

def keep(*_):
    try:
        raise RuntimeError("of a library")
    except RuntimeError as error:
        kept.append(error)

def fail(*_):
    keep()
    raise kept[0]

class SlowClips(data_utils.MelDataset):
    def __getitems__(self, indices):
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(100)

signal.signal(signal.SIGUSR1, lambda *_: print("waiting", flush=True))
moment = sys.argv.pop(1)
if moment.startswith("slow"):
    train.MelDataset = SlowClips
if moment == "end":
    train.RunLogger.log_samples = keep
if moment == "sample":
    train.RunLogger.log_samples = fail
if moment == "step":
    train.RunLogger.log = fail
exit_on_user_error(train.main)
"""


@pytest.mark.parametrize(
    ("moment", "status"),
    [("end", 0), ("sample", 1), ("step", 1), ("slow", 143), ("slow, told alone", 143)],
)
def test_the_process_ends_with_its_last_line(tmp_path, settings, moment, status):
    """After the last validation, an error, or SIGTERM to all, or to it alone, while it waits for
    data, whatever keeps the frames that refer to the loaders."""
    settings = settings.replace("num_workers=0", "num_workers=4") + "epochs=1,check_memory=False"
    command = [sys.executable, "-c", SCRIPT, moment, "-o", tmp_path / "run", "--hparams", settings]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "waiting\n":
            (os.kill if "alone" in moment else os.killpg)(process.pid, signal.SIGTERM)
            break
    started = time.monotonic()
    lines.append(process.communicate(timeout=100)[0])
    assert process.returncode == status, "".join(lines)
    assert time.monotonic() - started < 15  # torch would give each of the eight five seconds
    if status == 143:
        assert "SIGTERM: saved" in lines[-1] and "Traceback" not in lines[-1]
    with pytest.raises(ProcessLookupError):  # no loader process is left
        os.killpg(process.pid, 0)


def test_a_signal_after_the_validation_leaves_out_its_sample(tmp_path, settings, run, monkeypatch):
    save = checkpoint.save

    def save_and_stop(folder, step, state, is_best, n_kept):
        if is_best:
            os.kill(os.getpid(), signal.SIGINT)
        return save(folder, step, state, is_best, n_kept)

    monkeypatch.setattr(checkpoint, "save", save_and_stop)
    assert run("run", settings + "epochs=1") == 130
    assert not list((tmp_path / "run" / "sample").iterdir())
    assert load_newest(tmp_path / "run")[1]["progress"]["epoch"] == 1


def test_an_interrupt_while_modules_are_imported_shows_no_traceback(tmp_path):
    process = start(tmp_path / "run", "")
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and "torch" not in maps.read_text():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "") and process.returncode == -signal.SIGINT
    assert not (tmp_path / "run").exists()


def test_errors_in_threads_are_shown_but_for_tensorboards(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(threading, "excepthook", lambda report: shown.append(report.exc_value))
    hook = threading.excepthook
    run_logger = RunLogger(tmp_path, tmp_path / "logs")
    writer = run_logger.tensorboard._get_file_writer().event_writer._async_writer._worker
    for thread in (threading.Thread(), writer):
        error = OSError(28, "No space left on device")
        threading.excepthook(threading.ExceptHookArgs((OSError, error, None, thread)))
    assert len(shown) == 1
    run_logger.close()
    assert threading.excepthook is hook


# Kills


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_finishes_the_batch_and_saves(tmp_path, settings, number):
    """As Ctrl-C in a terminal, or a scheduler: the loader processes get it too."""
    output = tmp_path / "run"
    workers = settings.replace("num_workers=0", "num_workers=2")
    process = start(output, workers + "epochs=5000", start_new_session=True)
    wait_for(process, output, b'"step": 9,')
    os.killpg(process.pid, number)
    printed, errors = finish(process, 128 + number)
    assert errors == f"{number.name}: saving, then stopping\n"
    path, state = load_newest(output)
    progress = state["progress"]
    assert printed.endswith(
        f"{number.name}: saved {path} in epoch {progress['epoch']}, after {progress['batch']} "
        "batches; --resume continues from there\n"
    )
    assert progress["step"] == records(output, "step")[-1]["step"] >= 9
    assert (output / "metrics.jsonl").stat().st_size == progress["metrics_size"]


def test_a_killed_loader_process_a_second_process_and_a_second_signal(tmp_path, settings):
    """One line for the first two; the last ends training at once."""
    workers = settings.replace("num_workers=0", "num_workers=1") + "epochs=5000"
    first, second = (start(tmp_path / name, workers) for name in ("first", "second"))
    wait_for(first, tmp_path / "first", b'"step": 3,')
    children = subprocess.check_output(["pgrep", "-P", str(first.pid)], text=True).split()
    assert len(children) == 2  # for training and for validation
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    assert finish(first, 2)[1] == (
        "error: a loader process was killed, perhaps for want of memory; --resume, with a smaller "
        "num_workers\n"
    )
    wait_for(second, tmp_path / "second", b'"step": 3,')
    assert finish(start(tmp_path / "second", workers), 2)[1] == (
        f"error: {tmp_path}/second: in use by process {second.pid}; wait for its end, or give "
        "another -o\n"
    )
    second.send_signal(signal.SIGSTOP)  # so that both come between two batches
    second.send_signal(signal.SIGTERM)
    second.send_signal(signal.SIGINT)
    second.send_signal(signal.SIGCONT)
    second.communicate()
    assert second.returncode in (130, 143)


def test_killed_at_random_moments_and_resumed_it_is_the_same_run(tmp_path):
    kills = soak.soak(tmp_path / "soak", "SSB", 3, random.Random(), epochs=12)
    assert kills.total() == 3


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_full_disk_is_reported_and_what_is_there_stays(tmp_path, settings):
    """On a file system of its own, of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = settings.replace("prenet_dim=8", "prenet_dim=128")
    command = [sys.executable, "train.py", "-o", disk / "run", "--resume", "--hparams"]
    command += [settings + EVERY_BATCH + "epochs=300,keep_checkpoints=1"]
    script = (
        'mount -t tmpfs -o size=2m none "$0" || exit 77; "$@"; status=$?; '
        'cp -r "$0/run" "$0.kept"; exit $status'
    )
    process = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script, disk, *command],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if process.returncode in (1, 77) and "train" not in process.stderr + process.stdout:
        pytest.skip("no file system of one's own here")
    check_full(process.returncode, process.stderr, tmp_path / "disk.kept", disk / "run")


def test_a_file_that_cannot_grow_is_reported_and_what_is_there_stays(tmp_path, settings):
    """As on a full disk: a limit on the size of files, which the metrics meet first."""
    process = start(
        tmp_path / "run",
        settings + EVERY_BATCH + "epochs=3000",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    _, errors = process.communicate(timeout=200)
    check_full(process.returncode, errors, tmp_path / "run", tmp_path / "run")


def check_full(status: int, errors: str, kept: Path, output: Path) -> None:
    """One line, status 2, and a checkpoint that is whole."""
    assert status == 2, errors
    full = r"\((No space left on device|File too large)\)"
    assert re.fullmatch(
        rf"error: {output}\S*( or \S+)?: cannot be (saved|written) {full}, .* intact; make room, "
        r"then --resume\n",
        errors,
    ), errors
    assert not list(kept.glob("*.part"))
    path, state = load_newest(kept)
    assert path and (kept / "metrics.jsonl").stat().st_size >= state["progress"]["metrics_size"]


def test_bad_data_ends_it_before_it_begins(tmp_path, corpus, settings):
    (corpus / "2.wav").unlink()
    with open(corpus / "val.txt", "a") as file:
        file.write("3.wav|\n")
    _, errors = finish(start(tmp_path / "run", settings), 2)
    first, second = errors.splitlines()
    assert first.startswith(f"error: {corpus}/train.txt:3: {corpus}/2.wav: no such file; ")
    assert second.startswith(f"{corpus}/val.txt:5: text '' has nothing to speak once cleaned; ")
    assert not (tmp_path / "run").exists() and not (corpus / "cache").exists()


# Numbers


class Broken(Tacotron2Loss):
    """Not finite at its third and fourth call, and from the seventh on."""

    calls = 0

    def forward(self, output, batch):
        loss = super().forward(output, batch)
        Broken.calls += 1
        if Broken.calls in (3, 4) or Broken.calls > 6:
            factor = float("nan") if Broken.calls % 2 else float("inf")
            return loss._replace(objective=loss.objective * factor, total=loss.total * factor)
        return loss


def test_a_step_that_is_not_finite_is_skipped_and_its_clips_are_named(
    tmp_path, settings, run, monkeypatch, capsys
):
    settings += "dynamic_batch_size=False,epochs=4,epochs_per_validation=9,check_memory=False,"
    settings += "epochs_per_checkpoint=1,max_bad_steps=3"
    monkeypatch.setattr(train, "Tacotron2Loss", Broken)
    with pytest.raises(UserError) as error:
        run("run", settings)
    bad, steps = records(tmp_path / "run", "bad_step"), records(tmp_path / "run", "step")
    batches = [(line["epoch"], line["batch"]) for line in bad]
    assert batches == [(0, 2), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert [line["loss"] for line in bad] == ["nan", "inf", "nan", "inf", "nan"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    hparams = create_hparams(settings)
    clips = load_clips(hparams.training_files, hparams)
    sampler = data_utils.training_sampler(clips, hparams)
    for line in bad:
        sampler.set_epoch(line["epoch"])
        indices = sampler.plan[line["batch"]]
        assert sorted(line["clips"]) == sorted(clips[i].location for i in indices)
    problem = "epoch {}, batch 2: loss nan, gradient nan, in {}"
    warning = f"warning: {problem.format(0, ', '.join(bad[0]['clips']))}: step skipped"
    assert warning in capsys.readouterr().out
    assert str(error.value).startswith(
        f"{problem.format(2, ', '.join(bad[4]['clips']))}; that is 3 steps in a row"
    )
    assert [line["skipped_steps"] for line in records(tmp_path / "run", "epoch")] == [1, 1]
    path, state = load_newest(tmp_path / "run")
    assert path.name == "checkpoint_00000004.pt"
    assert all(weight.isfinite().all() for weight in state["state_dict"].values())
    curves = EventAccumulator(str(tmp_path / "run")).Reload()
    assert "training/bad_step/text_summary" in curves.Tags()["tensors"]


def test_a_clip_that_poisons_batch_norm_leaves_no_trace(tmp_path, settings, run, monkeypatch):
    """A mel that is not finite, from a cache say, spoils the forward pass too."""
    collate, batches = data_utils.collate, []

    def poisoned(items):
        batch = collate(items)
        batches.append(batch)
        if len(batches) == 3:  # the first checks the fast path
            batch.mel[0, 0, 0] = float("inf")
        return batch

    monkeypatch.setattr(data_utils, "collate", poisoned)
    assert run("run", settings + "epochs=1,dynamic_batch_size=False,check_memory=False") == 0
    state = load_newest(tmp_path / "run")[1]["state_dict"]
    assert all(weight.isfinite().all() for weight in state.values())
    assert len(records(tmp_path / "run", "bad_step")) == 1
    assert np.isfinite(records(tmp_path / "run", "validation")[0]["loss"])
    assert state["postnet.convolutions.0.1.num_batches_tracked"] == 2  # of three batches


def test_a_validation_that_is_not_finite_or_a_collapse_is_said(
    tmp_path, settings, run, monkeypatch, capsys
):
    class BrokenInValidation(Tacotron2Loss):
        def forward(self, output, batch):
            loss = super().forward(output, batch)
            return loss if torch.is_grad_enabled() else loss._replace(total=loss.total * np.nan)

    scores, validate = iter([0.4, 0.2, 0.9, 0.8, 0.3]), train.validate

    def score(alignment, *_):
        return torch.full((len(alignment),), now), torch.zeros(len(alignment))

    def validate_next(*args):
        nonlocal now
        now = next(scores)
        return validate(*args)

    now = 0.0
    monkeypatch.setattr(validation, "alignment_scores", score)
    monkeypatch.setattr(train, "validate", validate_next)
    for epochs in (4, 5):  # a checkpoint remembers the best
        run("run", settings + f"epochs={epochs},epochs_per_validation=1", "--resume")
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: alignment 0.30 was 0.90: attention collapsed; ")
    logged = [line["diagonality"] for line in records(tmp_path / "run", "validation")]
    assert logged == pytest.approx([0.4, 0.2, 0.9, 0.8, 0.3])

    monkeypatch.setattr(train, "validate", validate)
    monkeypatch.setattr(train, "Tacotron2Loss", BrokenInValidation)
    run("broken", settings + "epochs=1")
    assert re.search(r"warning: validation loss nan in \S+val\.txt:\d, ", capsys.readouterr().out)
