"""Nothing is lost and nothing is wrong in silence: train.py stopped, killed, starved and misled."""

import json
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
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import checkpoint
import data_utils
import logger
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
from scripts import find_batch_capacity

ROOT = Path(__file__).resolve().parent.parent
EVERY_BATCH = "checkpoint_minutes=1e-9,"


def run(monkeypatch, output: Path, settings: str, *options: str) -> int:
    """Train in this process; the exit status."""
    arguments = ["train.py", "-o", str(output), "--hparams", settings, *options]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(logger, "render", lambda _: np.zeros((1, 1, 4), np.uint8))  # takes longest
    try:
        train.main()
    except SystemExit as end:
        return end.code
    return 0


def start(
    output: Path, settings: str, *options: str, program=("train.py",), **process_options
) -> subprocess.Popen:
    command = [sys.executable, *program, "-o", output, "--resume", "--hparams", settings]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *options], cwd=ROOT, **pipes, **process_options)


def finish(process: subprocess.Popen, status: int) -> tuple[str, str]:
    """The output and the errors of a process, which ends with ``status`` and no traceback."""
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


def records(output: Path, event: str = "") -> list[dict]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if event in ("", line["event"])]


# Exact resume


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("strategy", ["RAND", "SB", "SSB", "BKT", "ATS"])
def test_stopped_after_every_batch_it_is_the_same_run(
    tmp_path, settings, monkeypatch, strategy, dynamic
):
    """And amid every validation. Weights, moments and metrics equal the unbroken run's."""
    settings += (
        f"batching_strategy={strategy},dynamic_batch_size={dynamic},bucket_size=6,n_bins=2,"
        "epochs=2,epochs_per_validation=1,largest_first=False"
    )
    assert run(monkeypatch, tmp_path / "whole", settings) == 0
    log, scores, validated = RunLogger.log, validation.alignment_scores, []

    def log_and_stop(self, event, *values):
        log(self, event, *values)
        if event == "step":
            random.random(), np.random.random()  # what a user's code may draw
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_once_an_epoch(*args):
        validated.append(len(checkpoints(tmp_path / "broken")))
        if len(validated) in (1, 4):  # the first of two batches, of both epochs
            os.kill(os.getpid(), signal.SIGINT)
        return scores(*args)

    with monkeypatch.context() as patch:
        patch.setattr(RunLogger, "log", log_and_stop)
        patch.setattr(validation, "alignment_scores", stop_once_an_epoch)
        statuses = [run(patch, tmp_path / "broken", settings, "--resume") for _ in range(20)]
    n_batches = sum(line["n_batches"] for line in records(tmp_path / "whole", "epoch"))
    stops = statuses[: statuses.index(0)]
    assert stops.count(143) == n_batches and stops.count(130) == 2
    soak.assert_same_run(tmp_path / "whole", tmp_path / "broken")
    whole, broken = (load_newest(tmp_path / name)[1] for name in ("whole", "broken"))
    for name in ("epoch", "batch", "step", "best_loss", "best_alignment"):
        assert whole["progress"][name] == broken["progress"][name]
    curves = EventAccumulator(str(tmp_path / "broken")).Reload()
    shown = [scalar.step for scalar in curves.Scalars("training/loss")]
    assert shown == [line["step"] for line in records(tmp_path / "broken", "step")]


def test_all_generators_go_on_where_they_were(tmp_path, settings, monkeypatch):
    def draw() -> list[float]:
        return [random.random(), np.random.random(), float(torch.rand(()))]

    drawn = []
    log = RunLogger.log

    def log_and_draw(self, event, *values):
        log(self, event, *values)
        if event == "step":
            drawn.append(draw())
            if stopping:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunLogger, "log", log_and_draw)
    random.seed(1), np.random.seed(1)
    stopping = False
    run(monkeypatch, tmp_path / "whole", settings + "epochs=1")
    whole, drawn[:] = list(drawn), []
    random.seed(1), np.random.seed(1)
    stopping = True
    while run(monkeypatch, tmp_path / "broken", settings + "epochs=1", "--resume"):
        random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert drawn == whole and len(drawn) > 1


def test_the_time_of_an_epoch_is_added_up(tmp_path, settings, monkeypatch):
    log = RunLogger.log

    def log_slowly(self, event, *values):
        if event == "step":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)
        log(self, event, *values)

    monkeypatch.setattr(RunLogger, "log", log_slowly)
    settings += "epochs=1,dynamic_batch_size=False,largest_first=False"
    seconds = []
    while run(monkeypatch, tmp_path / "run", settings, "--resume"):
        seconds.append(load_newest(tmp_path / "run")[1]["progress"]["sums"]["seconds"])
    assert [second > 0.3 * (k + 1) for k, second in enumerate(seconds)] == [True] * 3
    (epoch,) = records(tmp_path / "run", "epoch")
    assert epoch["minutes"] * 60 == pytest.approx(seconds[-1]) and epoch["data_wait"] < 1
    assert sum(line["n_batches"] for line in [epoch]) == len(records(tmp_path / "run", "step"))


def test_two_runs_of_one_seed_are_equal(tmp_path, settings, monkeypatch):
    """In processes of their own; and with deterministic=True, which changes nothing on a CPU."""
    runs = [start(tmp_path / name, f"{settings}epochs=2") for name in ("one", "other")]
    run(monkeypatch, tmp_path / "third", f"{settings}epochs=2,deterministic=True")
    for process in runs:
        finish(process, 0)
    soak.assert_same_run(tmp_path / "one", tmp_path / "other")
    soak.assert_same_run(tmp_path / "one", tmp_path / "third")


def test_deterministic_asks_torch_for_it(tmp_path, settings, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    run(monkeypatch, tmp_path / "one", settings + "epochs=1,deterministic=True")
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    run(monkeypatch, tmp_path / "two", settings + "epochs=1")
    assert not torch.are_deterministic_algorithms_enabled()


def test_checkpoints_by_minutes_and_epochs_and_the_last_k(tmp_path, settings, monkeypatch):
    settings += "epochs=4,epochs_per_validation=9,dynamic_batch_size=False,"
    saved = []
    save = checkpoint.save_checkpoint
    monkeypatch.setattr(
        checkpoint, "save_checkpoint", lambda p, s: saved.append(p.name) or save(p, s)
    )
    run(monkeypatch, tmp_path / "epochs", settings + "epochs_per_checkpoint=2")
    first = "checkpoint_00000000.pt"
    assert saved == [first, "checkpoint_00000006.pt", "checkpoint_best.pt"]
    saved.clear()
    minutes = "epochs_per_checkpoint=9,checkpoint_minutes="
    run(monkeypatch, tmp_path / "minutes", settings + f"keep_checkpoints=3,{minutes}1e-9")
    names = [f"checkpoint_{step:08d}.pt" for step in (1, 2, 4, 5, 7, 8, 10, 11, 12)]
    assert saved == [first, *names[:-1], "checkpoint_best.pt"]
    assert [path.name for path in checkpoints(tmp_path / "minutes")] == names[:-4:-1]
    saved.clear()
    run(monkeypatch, tmp_path / "never", settings + minutes + "0")
    assert saved == [first, "checkpoint_best.pt"]


def test_killed_between_the_best_checkpoint_and_the_newest_the_best_stays(
    tmp_path, settings, monkeypatch
):
    settings += "epochs=3,epochs_per_validation=1,checkpoint_minutes=0,epochs_per_checkpoint=1,"
    settings += "learning_rate=1e-2"  # so that every validation is the best
    run(monkeypatch, tmp_path / "whole", settings)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "link", die)
        with pytest.raises(KeyboardInterrupt):
            run(patch, tmp_path / "broken", settings)
    assert checkpoints(tmp_path / "broken") == [tmp_path / "broken" / "checkpoint_00000000.pt"]
    run(monkeypatch, tmp_path / "broken", settings, "--resume")
    soak.assert_same_run(tmp_path / "whole", tmp_path / "broken")
    best = [load_checkpoint(tmp_path / n / "checkpoint_best.pt") for n in ("whole", "broken")]
    assert best[0]["progress"]["epoch"] == best[1]["progress"]["epoch"] == 3


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_it_used(
    tmp_path, settings, monkeypatch, capsys
):
    settings += EVERY_BATCH + "epochs=2"
    run(monkeypatch, tmp_path / "whole", settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    newest, _ = checkpoints(tmp_path / "broken")
    newest.write_bytes(newest.read_bytes()[:1000])
    capsys.readouterr()
    assert run(monkeypatch, tmp_path / "broken", settings, "--resume") == 0
    assert f"warning: {newest}: not a checkpoint, or damaged" in capsys.readouterr().err
    soak.assert_same_run(tmp_path / "whole", tmp_path / "broken")
    assert Path(f"{newest}.damaged").stat().st_size == 1000


def test_other_clips_are_another_run(tmp_path, corpus, settings, monkeypatch):
    run(monkeypatch, tmp_path / "run", settings + "epochs=1")
    lines = (corpus / "train.txt").read_text().splitlines(keepends=True)
    moved = corpus / "moved.txt"
    moved.write_text("".join(lines))  # another name is no other data
    elsewhere = f"epochs=2,training_files={moved}"
    assert run(monkeypatch, tmp_path / "run", elsewhere, "--resume") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    moved.write_text("".join(lines[1:]))
    with pytest.raises(UserError, match=r"was trained on clips of other texts, lengths or order"):
        run(monkeypatch, tmp_path / "run", "epochs=3", "--resume")
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")} == before
    with pytest.raises(UserError, match=r"learning_rate=0.001 there and 0.0001 here; leave them"):
        run(monkeypatch, tmp_path / "run", "epochs=3,learning_rate=1e-4", "--resume")


@pytest.mark.parametrize("content", [None, b'{"event": "step"'])
def test_metrics_that_were_shortened_are_said(tmp_path, settings, monkeypatch, content):
    run(monkeypatch, tmp_path / "run", settings + "epochs=1")
    metrics = tmp_path / "run" / "metrics.jsonl"
    size, there = metrics.stat().st_size, len(content or b"")
    metrics.unlink()
    if content:
        metrics.write_bytes(content)
    message = (
        f"metrics.jsonl: {there} bytes, and {size:,} when the checkpoint was saved: put the lines "
        "back, or go on by -c with another -o"
    )
    with pytest.raises(UserError, match=message):
        run(monkeypatch, tmp_path / "run", settings + "epochs=2", "--resume")


def test_the_best_checkpoint_alone_is_a_run_too(tmp_path, settings, monkeypatch):
    settings += "epochs_per_validation=1,"
    run(monkeypatch, tmp_path / "whole", settings + "epochs=2")
    run(monkeypatch, tmp_path / "run", settings + "epochs=1")
    for path in checkpoints(tmp_path / "run"):
        path.unlink()
    with pytest.raises(UserError, match="run: holds a run; --resume it, or give another -o"):
        run(monkeypatch, tmp_path / "run", settings + "epochs=2")
    run(monkeypatch, tmp_path / "run", settings + "epochs=2", "--resume")
    soak.assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_another_preset_is_another_run(tmp_path, settings, monkeypatch):
    run(monkeypatch, tmp_path / "run", settings + "epochs=1")
    with pytest.raises(UserError, match="hop_length=276 there and 256 here"):
        run(monkeypatch, tmp_path / "run", "epochs=2", "--resume", "--preset", "nvidia")
    assert run(monkeypatch, tmp_path / "run", "epochs=2", "--resume", "--preset", "paper") == 0


def kill(*_: object) -> None:
    raise KeyboardInterrupt  # which nothing here handles


@pytest.mark.parametrize("moment", [(memory, "try_batches"), (RunLogger, "log")])
@pytest.mark.parametrize("by_checkpoint", [False, True])
def test_killed_before_its_first_checkpoint_it_is_resumed_with_its_settings(
    tmp_path, settings, monkeypatch, capsys, moment, by_checkpoint
):
    """By --resume alone; begun by -c, with the weights of that too."""
    options = ()
    if by_checkpoint:
        run(monkeypatch, tmp_path / "first", settings + "epochs=1,seed=7")
        options = "-c", str(checkpoints(tmp_path / "first")[0])
    settings += "epochs=2,lrf=0.5,seed=7"
    run(monkeypatch, tmp_path / "whole", settings, *options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*moment, kill)
        run(patch, tmp_path / "broken", settings, *options)
    run(monkeypatch, tmp_path / "broken", "", "--resume")
    soak.assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_a_run_that_was_killed_before_its_first_step_may_be_started_anew(
    tmp_path, settings, monkeypatch
):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(memory, "try_batches", kill)
        run(patch, tmp_path / "run", settings + "epochs=2")
    run(monkeypatch, tmp_path / "run", settings + "epochs=1,lrf=0.5")  # killed for its settings
    run(monkeypatch, tmp_path / "other", settings + "epochs=1,lrf=0.5")
    soak.assert_same_run(tmp_path / "run", tmp_path / "other")
    with pytest.raises(UserError, match="run: holds a run; --resume it, or give another -o"):
        run(monkeypatch, tmp_path / "run", settings + "epochs=1")


def test_killed_before_it_began_there_is_nothing_to_resume(tmp_path, settings, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "open_mels", kill)
        run(patch, tmp_path / "run", settings)
    with pytest.raises(UserError, match="run: holds no run to resume, or one that was stopped bef"):
        run(monkeypatch, tmp_path / "run", "", "--resume")
    run(monkeypatch, tmp_path / "run", settings + "epochs=1", "--resume")  # as a script calls it
    assert f"{tmp_path}/run: holds no run yet; starting one\n" in capsys.readouterr().out


def test_a_run_of_an_older_version_is_resumed(tmp_path, corpus, settings, monkeypatch, capsys):
    """tests/old_run was trained by the version before settings were added; and settings that are
    missing in a checkpoint are those of the defaults."""
    run(monkeypatch, tmp_path / "now", settings + "epochs=2")
    shutil.copytree(ROOT / "tests" / "old_run", tmp_path / "old")
    (path,) = checkpoints(tmp_path / "old")
    state = load_checkpoint(path)
    for name in ("lrf", "precision", "checkpoint_minutes"):
        del state["hparams"][name]
    torch.save(state, path)
    change = re.search(rf"data_dir={corpus},.*cache,", settings)[0] + "epochs=2"
    assert run(monkeypatch, tmp_path / "old", change, "--resume") == 0
    soaked = [load_newest(tmp_path / name)[1] for name in ("now", "old")]
    assert soaked[0]["progress"]["step"] == soaked[1]["progress"]["step"]
    losses = [[line["loss"] for line in records(tmp_path / n, "step")] for n in ("now", "old")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # other machines round otherwise
    state["hparams"]["of_the_future"] = 1
    torch.save(state, tmp_path / "future.pt")
    options = "-c", str(tmp_path / "future.pt")
    (tmp_path / "newer").mkdir()
    shutil.copy(tmp_path / "future.pt", tmp_path / "newer" / path.name)
    with pytest.raises(UserError, match=r"settings that this version does not know \(of_the_fut"):
        run(monkeypatch, tmp_path / "newer", "epochs=2", "--resume")
    run(monkeypatch, tmp_path / "future", change, *options)
    assert "this version does not know: of_the_future\n" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["progress", "optimizer"])
def test_a_checkpoint_of_another_version_is_refused_or_said(
    tmp_path, settings, monkeypatch, capsys, missing
):
    run(monkeypatch, tmp_path / "run", settings + "epochs=1")
    path = checkpoints(tmp_path / "run")[0]
    state = load_checkpoint(path)
    state["progress"]["of_the_future"] = 1
    torch.save(state, tmp_path / "future.pt")
    options = "-c", str(tmp_path / "future.pt")
    with pytest.raises(UserError, match=r"future\.pt: of another version .*'of_the_future'"):
        run(monkeypatch, tmp_path / "two", settings + "epochs=2", *options)
    del state[missing]
    torch.save(state, path)
    with pytest.raises(UserError, match=f"has no {missing}; start from its weights by -c"):
        run(monkeypatch, tmp_path / "run", "epochs=2", "--resume")
    assert run(monkeypatch, tmp_path / "three", settings + "epochs=1", "-c", str(path)) == 0
    note = f"note: {path}: has weights but no training state; starting at epoch 0"
    assert note in capsys.readouterr().out


def test_a_validation_that_is_not_finite_is_said(tmp_path, settings, monkeypatch, capsys):
    class Broken(Tacotron2Loss):
        def forward(self, output, batch):
            loss = super().forward(output, batch)
            return loss if self.training else loss._replace(total=loss.total * float("nan"))

    monkeypatch.setattr(train, "Tacotron2Loss", Broken)
    validate = train.validate

    def validate_with(model, loader, loss_function, *args):
        return validate(model, loader, loss_function.eval(), *args)

    monkeypatch.setattr(train, "validate", validate_with)
    run(monkeypatch, tmp_path / "run", settings + "epochs=1")
    assert re.search(r"warning: validation loss nan in \S+val\.txt:\d, ", capsys.readouterr().out)


# Ends

SCRIPT = """
import os, signal, sys, threading, time
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

class Clips(data_utils.MelDataset):
    def __getitems__(self, indices):
        if "slow" in sys.argv[1]:
            os.kill(os.getppid(), signal.SIGUSR1)
            time.sleep(100)
        return super().__getitems__(indices)

train.MelDataset = Clips
signal.signal(signal.SIGUSR1, lambda *_: print("waiting", flush=True))
what = sys.argv.pop(1)
if what == "end":
    train.RunLogger.log_samples = keep
if what == "sample":
    train.RunLogger.log_samples = fail
if what == "step":
    train.RunLogger.log = fail
exit_on_user_error(train.main)
"""


@pytest.mark.parametrize(
    ("what", "status"),
    [("end", 0), ("sample", 1), ("step", 1), ("slow", 143), ("slow, told alone", 143)],
)
def test_the_process_ends_with_its_last_line(tmp_path, settings, what, status):
    """After the last validation, an error, or SIGTERM to all, or to it alone, while it waits for
    data, whatever keeps the frames that refer to the loaders."""
    settings = settings.replace("num_workers=0", "num_workers=4") + "epochs=1,largest_first=False"
    script = SCRIPT.replace('"slow" in sys.argv[1]', repr("slow" in what))
    command = [sys.executable, "-c", script, what, "-o", tmp_path / "run", "--hparams", settings]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "waiting\n":
            (os.kill if "alone" in what else os.killpg)(process.pid, signal.SIGTERM)
            break
    started = time.monotonic()
    lines.append(process.communicate(timeout=100)[0])
    assert process.returncode == status, "".join(lines)
    assert time.monotonic() - started < 15  # torch would give each of the four five seconds
    if "slow" in what:
        assert "SIGTERM: saved" in lines[-1] and "Traceback" not in lines[-1]
    with pytest.raises(ProcessLookupError):  # no loader process is left
        os.killpg(process.pid, 0)


def test_a_signal_after_the_validation_leaves_out_its_sample(tmp_path, settings, monkeypatch):
    save = checkpoint.save

    def save_and_stop(folder, step, state, is_best, n_kept):
        if is_best:
            os.kill(os.getpid(), signal.SIGINT)
        return save(folder, step, state, is_best, n_kept)

    monkeypatch.setattr(checkpoint, "save", save_and_stop)
    assert run(monkeypatch, tmp_path / "run", settings + "epochs=1") == 130
    assert not list((tmp_path / "run" / "sample").iterdir())
    assert load_newest(tmp_path / "run")[1]["progress"]["epoch"] == 1


def test_an_interrupt_while_modules_are_imported_shows_no_traceback(tmp_path):
    command = [sys.executable, "train.py", "-o", tmp_path / "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, **pipes)
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and "torch" not in maps.read_text():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "") and process.returncode == -signal.SIGINT
    assert not (tmp_path / "run").exists()


def test_errors_in_threads_are_shown_but_for_tensorboards(tmp_path, settings, monkeypatch):
    shown = []
    monkeypatch.setattr(threading, "excepthook", lambda found: shown.append(found.exc_value))
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
    process = start(
        output, settings.replace("num_workers=0", "num_workers=2") + "epochs=5000",
        start_new_session=True,
    )  # fmt: skip
    wait_for(process, output, b'"step": 9,')
    os.killpg(process.pid, number)
    printed, errors = finish(process, 128 + number)
    assert errors == f"{number.name}: saving, then stopping\n"
    path, state = load_newest(output)
    at = state["progress"]
    assert printed.endswith(
        f"{number.name}: saved {path} in epoch {at['epoch']}, after {at['batch']} batches; "
        "--resume continues from there\n"
    )
    assert at["step"] == records(output, "step")[-1]["step"] >= 9
    assert (output / "metrics.jsonl").stat().st_size == at["metrics_size"]


def test_a_loader_process_that_is_killed_is_said(tmp_path, settings):
    output = tmp_path / "run"
    workers = settings.replace("num_workers=0", "num_workers=1")
    process = start(output, workers + "epochs=5000")
    wait_for(process, output, b'"step": 3,')
    workers = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()
    assert len(workers) == 2  # of training and of validation
    for worker in workers:
        os.kill(int(worker), signal.SIGKILL)
    _, errors = finish(process, 2)
    assert errors == (
        "error: a loader process was killed, perhaps for want of memory; --resume, with a smaller "
        "num_workers\n"
    )


def test_a_second_process_is_refused_and_a_second_signal_ends_it_at_once(tmp_path, settings):
    process = start(tmp_path / "run", settings + "epochs=5000")
    wait_for(process, tmp_path / "run", b'"step": 3,')
    _, errors = finish(start(tmp_path / "run", settings + "epochs=5000"), 2)
    message = f"in use by process {process.pid}; wait for its end, or give another -o"
    assert errors == f"error: {tmp_path}/run: {message}\n"
    process.send_signal(signal.SIGSTOP)  # so that both come between two batches
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    process.communicate()
    assert process.returncode in (130, 143)


def test_killed_at_random_moments_and_resumed_it_is_the_same_run(tmp_path):
    found, steps = soak.soak(tmp_path / "soak", "SSB", 3, random.Random(), epochs=12)
    assert found.total() == 3 and steps >= 12


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
    check_full(process, tmp_path / "disk.kept", disk / "run")


def test_a_file_that_cannot_grow_is_reported_and_what_is_there_stays(tmp_path, settings):
    """As on a full disk: a limit on the size of files, which the metrics meet first."""
    output = tmp_path / "run"
    process = start(
        output,
        settings + EVERY_BATCH + "epochs=3000",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    process.stdout, process.stderr = process.communicate(timeout=200)
    check_full(process, output, output)


def check_full(process, kept: Path, output: Path) -> None:
    """One line, status 2, and a checkpoint that is whole."""
    assert process.returncode == 2, process.stderr
    full = r"\((No space left on device|File too large)\)"
    assert re.fullmatch(
        rf"error: {output}\S*( or \S+)?: cannot be (saved|written) {full}, .* intact; make room, "
        r"then --resume\n",
        process.stderr,
    ), process.stderr
    assert not list(kept.glob("*.part"))
    path, state = load_newest(kept)
    assert path and (kept / "metrics.jsonl").stat().st_size >= state["progress"]["metrics_size"]


def test_bad_data_ends_it_before_it_begins(tmp_path, corpus, settings):
    (corpus / "2.wav").unlink()
    with open(corpus / "val.txt", "a") as file:
        file.write("3.wav|\n")
    _, errors = finish(start(tmp_path / "run", settings), 2)
    assert errors == (
        f"error: {corpus}/train.txt:3: {corpus}/2.wav: no such file; mend its line, or set "
        f"data_dir\n{corpus}/val.txt:5: text '' has nothing to speak once cleaned; mend or remove "
        "it\n"
    )
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
    tmp_path, corpus, settings, monkeypatch, capsys
):
    settings += "dynamic_batch_size=False,epochs=4,epochs_per_validation=9,largest_first=False,"
    settings += "epochs_per_checkpoint=1,max_bad_steps=3"
    monkeypatch.setattr(train, "Tacotron2Loss", Broken)
    with pytest.raises(UserError) as error:
        run(monkeypatch, tmp_path / "run", settings)
    bad, steps = records(tmp_path / "run", "bad_step"), records(tmp_path / "run", "step")
    assert [(line["epoch"], line["batch"]) for line in bad] == [
        (0, 2),
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
    ]
    assert [line["loss"] for line in bad] == ["nan", "inf", "nan", "inf", "nan"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    hparams = create_hparams(settings)
    clips = load_clips(hparams.training_files, hparams)
    sampler = data_utils.training_sampler(clips, hparams)
    for line in bad:
        sampler.set_epoch(line["epoch"])
        expected = {clips[i].location for i in sampler.plan[line["batch"]]}
        assert set(line["clips"]) == expected and len(line["clips"]) == len(expected)
    printed = capsys.readouterr().out
    assert (
        f"warning: epoch 0, batch 2: loss nan, gradient nan, in {', '.join(bad[0]['clips'])}: step "
        "skipped"
    ) in printed
    assert str(error.value) == (
        f"epoch 2, batch 2: loss nan, gradient nan, in {', '.join(bad[4]['clips'])}; that is 3 "
        "steps in a row, and the checkpoints are as they were; mend these clips, or go on by -c "
        "from one with a smaller learning_rate"
    )
    assert [line["skipped_steps"] for line in records(tmp_path / "run", "epoch")] == [1, 1]
    path, state = load_newest(tmp_path / "run")
    assert path.name == "checkpoint_00000004.pt"
    assert all(weight.isfinite().all() for weight in state["state_dict"].values())
    curves = EventAccumulator(str(tmp_path / "run")).Reload()
    assert "training/bad_step/text_summary" in curves.Tags()["tensors"]


def test_a_clip_that_poisons_batch_norm_leaves_no_trace(tmp_path, settings, monkeypatch):
    """A mel that is not finite, from a cache say, spoils the forward pass too."""
    settings += "epochs=1,dynamic_batch_size=False,largest_first=False,"
    collate = data_utils.collate
    batches = []

    def poisoned(clips):
        batch = collate(clips)
        batches.append(batch)
        if len(batches) == 2:
            batch.mel[0, 0, 0] = float("inf")
        return batch

    monkeypatch.setattr(data_utils, "collate", poisoned)
    assert run(monkeypatch, tmp_path / "run", settings) == 0
    state = load_newest(tmp_path / "run")[1]["state_dict"]
    assert all(weight.isfinite().all() for weight in state.values())
    assert len(records(tmp_path / "run", "bad_step")) == 1
    (validation,) = records(tmp_path / "run", "validation")
    assert np.isfinite(validation["loss"])
    assert state["postnet.convolutions.0.1.num_batches_tracked"] == 2  # of three batches


def test_attention_that_collapses_is_said(tmp_path, settings, monkeypatch, capsys):
    scores = iter([0.4, 0.2, 0.9, 0.8, 0.3])

    def score(alignment, *_):
        return torch.full((len(alignment),), now), torch.zeros(len(alignment))

    validate = train.validate

    def validate_next(*args):
        nonlocal now
        now = next(scores)
        return validate(*args)

    now = 0.0
    monkeypatch.setattr(validation, "alignment_scores", score)
    monkeypatch.setattr(train, "validate", validate_next)
    for epochs in (4, 5):  # the best is remembered by a checkpoint
        change = f"epochs={epochs},epochs_per_validation=1"
        run(monkeypatch, tmp_path / "run", settings + change, "--resume")
    warnings = [line for line in capsys.readouterr().out.splitlines() if "collapsed" in line]
    assert warnings == [
        "warning: alignment 0.30 was 0.90: attention collapsed; if it does not come back, go on by "
        "-c from checkpoint_best.pt with a smaller learning_rate"
    ]
    found = [line["diagonality"] for line in records(tmp_path / "run", "validation")]
    assert found == pytest.approx([0.4, 0.2, 0.9, 0.8, 0.3])


# Memory


@pytest.mark.parametrize("strategy", ["RAND", "SSB", "BKT"])
def test_the_largest_batches_of_a_run_are_found(corpus, settings, strategy):
    hparams = create_hparams(settings + f"batching_strategy={strategy},bucket_size=6")
    clips = load_clips(hparams.training_files, hparams)
    sampler = data_utils.training_sampler(clips, hparams)
    found = memory.largest_batches(clips, sampler, range(3, 9))
    assert 1 <= len(found) <= 3

    def sizes(batch: list[int]) -> np.ndarray:
        T_in = max(len(clips[i].ids) for i in batch)
        T_out = max(clips[i].n_frames for i in batch)
        return len(batch) * np.array([T_out, T_in, T_in * T_out])

    largest = np.zeros(3, dtype=int)
    for epoch in range(3, 9):
        sampler.set_epoch(epoch)
        for batch in sampler.plan:
            largest = np.maximum(largest, sizes(batch.tolist()))
    assert np.max([sizes(batch) for batch in found], axis=0).tolist() == largest.tolist()


def test_stopped_while_the_largest_batches_are_tried_it_is_the_same_run(
    tmp_path, settings, monkeypatch
):
    fits = memory.fits

    def fits_and_stop(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return fits(*args)

    run(monkeypatch, tmp_path / "whole", settings + "epochs=1,largest_first=False")
    with monkeypatch.context() as patch:
        patch.setattr(memory, "fits", fits_and_stop)
        assert run(patch, tmp_path / "broken", settings + "epochs=1", "--resume") == 143
    assert load_newest(tmp_path / "broken")[1]["progress"]["step"] == 0
    assert run(monkeypatch, tmp_path / "broken", settings + "epochs=1", "--resume") == 0
    soak.assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_trying_the_largest_batches_changes_nothing(tmp_path, settings, monkeypatch):
    for name in ("True", "False"):
        run(monkeypatch, tmp_path / name, settings + f"epochs=2,largest_first={name}")
    soak.assert_same_run(tmp_path / "True", tmp_path / "False")


@pytest.mark.parametrize(
    ("change", "most", "fix"),
    [
        ("", 110, r"set batch_capacity_seconds=1 \(now 2\)"),
        ("batching_strategy=RAND,dynamic_batch_size=False", 110, r"set batch_size=2 \(now 3\)"),
        ("", 5, "not even one clip fits: remove the longest, or reduce the model"),
    ],
)
def test_out_of_memory_shows_at_once_and_says_what_to_set(
    tmp_path, settings, monkeypatch, change, most, fix
):
    class Full(Tacotron2Loss):
        def forward(self, output, batch):
            if batch.gate.numel() > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            return super().forward(output, batch)

    monkeypatch.setattr(train, "Tacotron2Loss", Full)
    message = rf"^a batch of \d clips, up to \d+ frames and \d+ symbols long, needs more .*; {fix}"
    with pytest.raises(UserError, match=message):
        run(monkeypatch, tmp_path / "run", settings + "epochs=1," + change)
    with pytest.raises(UserError, match=r"^epoch 0, batch \d: a batch of .*; --resume with less"):
        run(monkeypatch, tmp_path / "run", settings + "epochs=1,largest_first=False," + change)


@pytest.mark.parametrize("where", ["Tacotron2", "validate"])
def test_out_of_memory_anywhere_is_one_line(tmp_path, settings, monkeypatch, where):
    def full(*_):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")

    monkeypatch.setattr(train, where, full)
    with pytest.raises(UserError, match=r"^out of memory; let less else run there, then --resume"):
        run(monkeypatch, tmp_path / "run", settings + "epochs=1")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_the_memory_of_a_cpu_ends_as_a_gpus_does(tmp_path, settings):
    """800 MiB more than the imports take, which 60 M parameters with moments do not fit."""
    limited = (
        "import resource, train; from cli import exit_on_user_error\n"
        "pages = int(open('/proc/self/statm').read().split()[5])  # a CUDA build has more\n"
        "limit = pages * resource.getpagesize() + 800 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "exit_on_user_error(train.main)"
    )
    process = start(
        tmp_path / "run",
        settings.replace("postnet_embedding_dim=8", "postnet_embedding_dim=2000") + "epochs=1",
        program=("-c", limited),
    )
    _, errors = finish(process, 2)
    assert re.fullmatch(r"error: a batch of \d clips, up to \d+ .*; not even one clip .*\n", errors)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_find_batch_capacity_tries_until_all_fits_or_nothing_does(settings):
    command = [sys.executable, "scripts/find_batch_capacity.py", "--hparams", settings + "epochs=3"]
    for gib, status, end in (
        ("16", 0, "all clips fit one batch: memory sets no limit here, so leave the default, "
                  "batch_size x the longest clip\n"),
        ("0.1", 2, "error: not even the longest clip, of 40 frames, fits the memory; remove it, or "
                   "reduce the model\n"),
    ):  # fmt: skip
        result = subprocess.run(
            [*command, "--memory_gib", gib], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert result.returncode == status, result.stderr
        assert (result.stdout + result.stderr).endswith(end)
        assert ("GiB" in result.stdout) == (status == 0)


@pytest.mark.parametrize("most", [40, 79, 80, 133, 190])
def test_find_batch_capacity_finds_the_most(settings, monkeypatch, capsys, most):
    tried = []

    def capacity_fits(capacity, *_):
        tried.append(capacity)
        return capacity <= most

    monkeypatch.setattr(memory, "_capacity_fits", capacity_fits)
    settings += "hop_length=220"  # of 50 frames at most
    monkeypatch.setattr(sys, "argv", ["find_batch_capacity.py", "--hparams", settings])
    if most < 50:
        with pytest.raises(UserError, match="not even the longest clip, of 51 frames, fits"):
            find_batch_capacity.main()
        return
    find_batch_capacity.main()
    fits = max(capacity for capacity in tried if capacity <= most)
    assert most - fits <= 0.04 * most and len(tried) <= 9
    seconds = int(fits * 220 / 22050)
    assert capsys.readouterr().out.endswith(f"batch_capacity_seconds={seconds}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory_gib", "0"], "--memory_gib 0.0: use a number above 0"),
        (["--tolerance", "2"], "--tolerance 2.0: use a number between 0 and 1"),
        (["--hparams", "dynamic_batch_size=False"], "batches have no capacity; leave it out"),
    ],
)
def test_find_batch_capacity_refuses_what_makes_no_sense(monkeypatch, options, message):
    monkeypatch.setattr(sys, "argv", ["find_batch_capacity.py", *options])
    with pytest.raises(UserError, match=re.escape(message)):
        find_batch_capacity.main()
