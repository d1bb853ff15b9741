"""Nothing is lost: train.py stopped, killed, starved and misled."""

import multiprocessing
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
from logger import RunLogger
from loss_function import Tacotron2Loss

ROOT = Path(__file__).resolve().parent.parent
EVERY_BATCH = "checkpoint_minutes=1e-9,"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}


def kill(*_: object) -> None:
    raise KeyboardInterrupt  # which nothing here handles


def stop(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def after_each_step(monkeypatch, action) -> None:
    """Call ``action`` once a step has been logged."""
    log = RunLogger.log

    def log_and_act(self, event, *values):
        log(self, event, *values)
        if event == "step":
            action()

    monkeypatch.setattr(RunLogger, "log", log_and_act)


def progress(output: Path) -> dict:
    return load_newest(output)[1]["progress"]


def contents(output: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in output.glob("*.*")}


# Exact resume


# The ten rows of Table 2, and what is not in it.
ROWS = (
    "RAND RAND-DBS SB SB-DBS SB-BR SB-DBS-BR SSB SSB-DBS SSB-BR SSB-DBS-BR BKT-BR BKT-DBS-BR "
    "ATS-BR ATS-DBS-BR"
)


@pytest.mark.parametrize("row", ROWS.split())
def test_stopped_after_every_batch_and_amid_validations_it_is_the_same_run(
    tmp_path, settings, run, monkeypatch, row
):
    """Weights, moments, metrics, curves and every random generator equal the unbroken run's."""
    strategy, *options = row.split("-")
    settings += (
        f"batching_strategy={strategy},dynamic_batch_size={'DBS' in options},bucket_size=6,"
        f"batch_randomization={'BR' in options},n_bins=2,epochs=2,epochs_per_validation=1,"
        "check_memory=False"
    )
    drawn, scores, validated = [], validation.alignment_scores, []

    def draw():  # as a user's code may
        drawn.append((random.random(), np.random.random(), float(torch.rand(()))))

    def stop_once_an_epoch(*args):
        validated.append(args)
        if len(validated) in (1, 4):  # the first of two batches, of both epochs
            stop(signal.SIGINT)
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
    before, after = progress(tmp_path / "whole"), progress(tmp_path / "broken")
    for name in ("epoch", "batch", "step", "best_loss", "best_alignment"):
        assert before[name] == after[name]
    curves = EventAccumulator(str(tmp_path / "broken")).Reload()
    shown = [scalar.step for scalar in curves.Scalars("training/loss")]
    assert shown == [line["step"] for line in records(tmp_path / "broken", "step")]


def test_the_time_of_an_epoch_is_added_up(tmp_path, settings, run, monkeypatch):
    after_each_step(monkeypatch, lambda: (time.sleep(0.3), stop()))
    settings += "epochs=1,dynamic_batch_size=False,check_memory=False"
    seconds = []
    while run("run", settings, "--resume"):
        seconds.append(progress(tmp_path / "run")["sums"]["seconds"])
    assert [second > 0.3 * (k + 1) for k, second in enumerate(seconds)] == [True] * 3
    (epoch,) = records(tmp_path / "run", "epoch")
    assert epoch["minutes"] * 60 == pytest.approx(seconds[-1]) and epoch["data_wait"] < 1
    assert epoch["n_batches"] == len(records(tmp_path / "run", "step"))


def test_settings_that_change_no_run(tmp_path, settings, run, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for name in ("deterministic=True", "check_memory=False", ""):
        run(f"run {name}", f"{settings}epochs=2,{name}")
        deterministic = torch.are_deterministic_algorithms_enabled()
        assert deterministic == torch.backends.cudnn.deterministic == (name[:3] == "det")
        soak.assert_same_run(tmp_path / "run deterministic=True", tmp_path / f"run {name}")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_checkpoints_by_minutes_and_epochs_and_the_last_k(tmp_path, settings, run, monkeypatch):
    settings += "epochs=4,epochs_per_validation=9,dynamic_batch_size=False,"
    saved, save = [], checkpoint.save_checkpoint
    monkeypatch.setattr(
        checkpoint, "save_checkpoint", lambda path, state: saved.append(path) or save(path, state)
    )
    for change, *steps in (
        ("epochs_per_checkpoint=2", 0, 6),
        ("epochs_per_checkpoint=9,checkpoint_minutes=0", 0),
        (f"epochs_per_checkpoint=9,{EVERY_BATCH}keep_checkpoints=3", 0, 1, 2, 4, 5, 7, 8, 10, 11),
    ):
        saved.clear()
        run(change, settings + change)
        names = [f"checkpoint_{step:08d}.pt" for step in steps]
        assert [path.name for path in saved] == [*names, "checkpoint_best.pt"]  # and the last
    newest = [f"checkpoint_{step:08d}.pt" for step in (12, 11, 10)]
    assert [path.name for path in checkpoints(tmp_path / change)] == newest


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
    for name in ("whole", "broken"):
        assert load_checkpoint(tmp_path / name / "checkpoint_best.pt")["progress"]["epoch"] == 3


def test_a_run_goes_on_from_the_newest_whole_checkpoint_or_the_best(
    tmp_path, settings, run, capsys
):
    settings += EVERY_BATCH + "epochs_per_validation=1,"
    for name, epochs in (("whole", 2), ("damaged", 2), ("best", 1)):
        run(name, settings + f"epochs={epochs}")
    newest, _ = checkpoints(tmp_path / "damaged")
    newest.write_bytes(newest.read_bytes()[:1000])
    for path in checkpoints(tmp_path / "best"):
        path.unlink()
    with pytest.raises(UserError, match="best: holds a run; --resume it, or give another -o"):
        run("best", settings)
    for name in ("damaged", "best"):
        run(name, "epochs=2", "--resume")
        soak.assert_same_run(tmp_path / "whole", tmp_path / name)
    assert f"warning: {newest}: not a checkpoint, or damaged" in capsys.readouterr().err
    assert Path(f"{newest}.damaged").stat().st_size == 1000


def test_what_makes_another_run_is_refused_and_changes_nothing(
    tmp_path, corpus, settings, run, capsys
):
    def assert_refused(words: str, change: str = "", *options: str) -> None:
        before = contents(output)
        with pytest.raises(UserError, match=words):
            run("run", f"{change},epochs=3", "--resume", *options)
        assert contents(output) == before

    output, moved = tmp_path / "run", corpus / "moved.txt"
    run("run", settings + "epochs=1")
    lines = (corpus / "train.txt").read_text().splitlines(keepends=True)
    moved.write_text("".join(lines))  # another name is no other data
    assert run("run", f"epochs=2,training_files={moved},checkpoint_minutes=3", "--resume") == 0
    assert '"batch_size": 3' in (output / "hparams.json").read_text()  # as it was
    assert run("run", "epochs=2", "--resume", "--preset", "paper") == 0  # nothing left to do

    assert_refused("learning_rate is 0.001 in the run, 0.0001 in", "learning_rate=1e-4")
    changes = "lrf=0.5,batching_strategy=SB"
    assert_refused("SSB in the run, SB in this call; lrf is 0.1 in the run", changes)
    assert_refused("hop_length is 276 in the run, 256 in this call", "", "--preset", "nvidia")
    moved.write_text("".join(lines[1:]))
    assert_refused("was trained on clips of other texts, lengths or order")
    moved.write_text("".join(lines))

    path = checkpoints(output)[0]
    whole = path.read_bytes()
    for change, words in (
        (lambda state: state["progress"].update(new=1), "of another version .*'new'"),
        (lambda state: state.pop("progress"), "has no progress; start from its weights by -c"),
        (lambda state: state.pop("optimizer"), "has no optimizer; start from its weights by -c"),
        (lambda state: state["hparams"].update(new=1), r"this version does not know \(new\)"),
    ):
        path.write_bytes(whole)
        state = load_checkpoint(path)
        change(state)
        torch.save(state, path)
        assert_refused(words)
    del state["progress"]
    torch.save(state, path)
    capsys.readouterr()
    assert run("by -c", "epochs=1", "-c", str(path)) == 0
    printed = capsys.readouterr().out
    assert f"note: {path}: settings that this version does not know: new\n" in printed
    assert f"note: {path}: has weights but no training state; starting at epoch 0\n" in printed

    path.write_bytes(whole)
    metrics = output / "metrics.jsonl"
    size = metrics.stat().st_size
    for content in (b'{"event": "step"', b""):
        metrics.write_bytes(content)
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
    with pytest.raises(UserError, match="run: holds no run to resume, or one stopped"):
        run("run", "", "--resume")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(memory, "try_batches", kill)
        run("run", settings + "epochs=2", "--resume")  # as a script calls it
    assert f"{tmp_path}/run: holds no run yet; starting one\n" in capsys.readouterr().out
    for name in ("run", "other"):
        run(name, settings + "epochs=1,lrf=0.5")
    soak.assert_same_run(tmp_path / "run", tmp_path / "other")


def test_a_run_of_an_older_version_is_resumed(tmp_path, corpus, settings, run):
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
    losses = [[line["loss"] for line in records(tmp_path / n, "step")] for n in ("now", "old")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # other machines round otherwise


# Ends

SCRIPT = """
import os, signal, sys, time
import data_utils, train
from cli import exit_on_user_error

kept = []  # exceptions, as some libraries keep them

def fail(*_):
    kept.append(RuntimeError("of a library"))
    raise kept[0]

def keep(*_):
    try:
        fail()
    except RuntimeError:
        pass

class SlowClips(data_utils.MelDataset):
    def __getitems__(self, indices):
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(100)

signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"waiting\\n"))
moment = sys.argv.pop(1)
if moment == "step":
    train.RunLogger.log = fail
elif moment.startswith("slow"):
    train.MelDataset = SlowClips
else:
    train.RunLogger.log_samples = fail if moment == "sample" else keep
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **PIPES)
    printed = ""
    for line in process.stdout:
        printed += line
        if line == "waiting\n":
            (os.kill if "alone" in moment else os.killpg)(process.pid, signal.SIGTERM)
            break
    started = time.monotonic()
    rest, errors = process.communicate(timeout=100)
    assert process.returncode == status, printed + rest + errors
    assert time.monotonic() - started < 15  # torch would give each of the eight five seconds
    if status == 143:
        assert "SIGTERM: saved" in rest and "Traceback" not in errors
    with pytest.raises(ProcessLookupError):  # no loader process is left
        os.killpg(process.pid, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_finishes_the_batch_and_saves(tmp_path, settings, run, number):
    """As Ctrl-C in a terminal, or a scheduler: the loader processes get it too. Until then no
    other process trains in its folder."""
    output, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    workers = settings.replace("num_workers=0", "num_workers=2") + "epochs=5000"
    command = [sys.executable, "train.py", "-o", output, "--hparams", workers]
    process = subprocess.Popen(command, start_new_session=True, **PIPES)
    while process.poll() is None and not (metrics.exists() and '"step": 9,' in metrics.read_text()):
        time.sleep(0.01)
    held = f"{output}: in use by process {process.pid}; wait for its end, or give another -o"
    with pytest.raises(UserError, match=held):
        run("run", "", "--resume")
    os.killpg(process.pid, number)
    printed, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + number
    assert errors == f"{number.name}: saving, then stopping\n"
    saved = progress(output)
    assert f"{number.name}: saved {checkpoints(output)[0]} in epoch {saved['epoch']}" in printed
    assert saved["step"] == records(output, "step")[-1]["step"] >= 9
    assert metrics.stat().st_size == saved["metrics_size"]

    part = output / "checkpoint_00000001.pt.part"
    part.write_bytes(b"of a killed process")
    run("run", "epochs=1", "--resume")  # nothing left to do
    assert not part.exists()


def test_a_second_signal_ends_training_at_once(settings, run, monkeypatch):
    after_each_step(monkeypatch, lambda: (stop(), stop(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        run("run", settings + "epochs=1")


@pytest.mark.parametrize("loader", [0, 1])  # of validation, and of training
def test_a_killed_loader_process_is_one_line(settings, run, monkeypatch, capfd, loader):
    def kill_loader():
        workers = sorted(multiprocessing.active_children(), key=lambda process: process.pid)
        killed.append(workers)
        workers[min(loader, len(workers) - 1)].kill()

    killed = []
    after_each_step(monkeypatch, kill_loader)
    with pytest.raises(UserError, match=r"^a loader process was killed, .* smaller num_workers$"):
        run("run", settings.replace("num_workers=0", "num_workers=1") + "epochs=5000")
    assert len(killed[0]) == 2 and "Traceback" not in capfd.readouterr().err


def test_a_signal_after_the_validation_leaves_out_its_sample(tmp_path, settings, run, monkeypatch):
    save = checkpoint.save

    def save_and_stop(folder, step, state, is_best, n_kept):
        if is_best:
            stop(signal.SIGINT)
        return save(folder, step, state, is_best, n_kept)

    monkeypatch.setattr(checkpoint, "save", save_and_stop)
    assert run("run", settings + "epochs=1") == 130
    assert not list((tmp_path / "run" / "sample").iterdir())
    assert progress(tmp_path / "run")["epoch"] == 1


def test_an_interrupt_while_modules_are_imported_shows_no_traceback(tmp_path):
    process = subprocess.Popen([sys.executable, "train.py", "-o", tmp_path / "run"], **PIPES)
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


def test_killed_at_random_moments_and_resumed_it_is_the_same_run(tmp_path):
    assert soak.soak(tmp_path / "soak", "SSB", 3, epochs=4).total() == 3


# Full disks


@pytest.mark.parametrize(("limit", "first"), [(80_000, "saved"), (200_000, "written")])
def test_on_a_full_disk_what_is_there_stays(tmp_path, settings, run, limit, first):
    """Or as on one: a limit on the size of files, which a checkpoint or a log meets first."""
    output, limits = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(UserError) as error:
            run("run", settings + EVERY_BATCH + "epochs=3000")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = (
        rf"{output}\S*( or \S+)?: cannot be {first} \(File too large\), .* intact; make room, .*"
    )
    assert re.fullmatch(message, str(error.value))
    assert not list(output.glob("*.part"))
    size = (output / "metrics.jsonl").stat().st_size
    assert size >= progress(output)["metrics_size"]  # of a checkpoint that is whole


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_on_a_disk_of_2_mb_what_is_there_stays(tmp_path, settings):
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = settings.replace("prenet_dim=8", "prenet_dim=128") + EVERY_BATCH + "epochs=300"
    command = [sys.executable, "train.py", "-o", disk / "run", "--hparams", settings]
    script = (
        'mount -t tmpfs -o size=2m none "$0" || exit 77; "$@"; status=$?; '
        'cp -r "$0/run" "$0.kept"; exit $status'
    )
    result = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script, disk, *command],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode in (1, 77) and "train" not in result.stderr + result.stdout:
        pytest.skip("no file system of one's own here")
    message = (
        rf"error: {disk}\S*( or \S+)?: cannot be .* \(No space left on device\), .* intact; .*\n"
    )
    assert result.returncode == 2 and re.fullmatch(message, result.stderr), result.stderr
    assert load_newest(tmp_path / "disk.kept")[0]


# Numbers


def test_a_step_that_is_not_finite_is_skipped_and_its_clips_are_named(
    tmp_path, settings, run, monkeypatch, capsys
):
    """As after a bad mel, which spoils batch norm in the forward pass too."""
    settings += "dynamic_batch_size=False,epochs=4,epochs_per_validation=9,check_memory=False,"
    settings += "epochs_per_checkpoint=1,max_bad_steps=3"
    collate, batches = data_utils.collate, []
    bad_mels = {3: np.nan, 4: 1e30, 7: np.inf, 8: 1e30, 9: np.nan}

    def spoil(items):
        batch = collate(items)
        batch.mel[0, 0, 0] *= bad_mels.get(len(batches), 1)
        batches.append(batch)  # the first checks the fast path
        return batch

    monkeypatch.setattr(data_utils, "collate", spoil)
    with pytest.raises(UserError) as error:
        run("run", settings)
    output, printed = tmp_path / "run", capsys.readouterr().out
    bad = records(output, "bad_step")
    lines = [(line["epoch"], line["batch"], line["loss"]) for line in bad]
    assert lines == [(0, 2, "nan"), (1, 0, "inf"), (2, 0, "nan"), (2, 1, "inf"), (2, 2, "nan")]
    assert [line["step"] for line in records(output, "step")] == [1, 2, 3, 4]
    for line, number in zip(bad, bad_mels, strict=True):
        indices = batches[number].indices
        assert line["clips"] == [f"{tmp_path}/train.txt:{i + 1}" for i in indices]
    assert f"warning: epoch 0, batch 2: loss nan, gradient nan, in {bad[0]['clips'][0]}" in printed
    last = f"epoch 2, batch 2: loss nan, gradient nan, in {', '.join(bad[4]['clips'])}"
    assert str(error.value).startswith(f"{last}; that is 3 steps in a row")
    assert [line["skipped_steps"] for line in records(output, "epoch")] == [1, 1]
    path, state = load_newest(output)
    assert path.name == "checkpoint_00000004.pt"
    assert all(weight.isfinite().all() for weight in state["state_dict"].values())
    assert state["state_dict"]["postnet.convolutions.0.1.num_batches_tracked"] == 4  # of 6
    curves = EventAccumulator(str(output)).Reload()
    assert "training/bad_step/text_summary" in curves.Tags()["tensors"]


def test_a_validation_that_is_not_finite_or_a_collapse_is_said(
    tmp_path, settings, run, monkeypatch, capsys
):
    class BrokenInValidation(Tacotron2Loss):
        def forward(self, output, batch):
            loss = super().forward(output, batch)
            return loss if torch.is_grad_enabled() else loss._replace(total=loss.total * np.nan)

    def validate_next(*args):
        values, samples = validate(*args)
        return {**values, "diagonality": next(scores)}, samples

    scores, validate = iter([0.4, 0.2, 0.9, 0.8, 0.3]), train.validate
    monkeypatch.setattr(train, "validate", validate_next)
    monkeypatch.setattr(train, "Tacotron2Loss", BrokenInValidation)
    for epochs in (4, 5):  # a checkpoint remembers the best
        run("run", settings + f"epochs={epochs},epochs_per_validation=1", "--resume")
    printed = capsys.readouterr().out
    assert re.search(r"warning: validation loss nan in \S+val\.txt:\d, ", printed)
    (warning,) = [line for line in printed.splitlines() if "attention collapsed" in line]
    assert warning.startswith("warning: alignment 0.30 was 0.90: ")
