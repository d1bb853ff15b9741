"""Checkpoints, and the folder that holds them."""

import errno
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from cli import UserError
from files import locked, make_folder
from training import checkpoint
from training.checkpoint import Progress, checkpoints, load_checkpoint, load_newest, save_checkpoint


def save(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint_{step:08d}.pt"
    weight = torch.full((3000,), float(step))
    save_checkpoint(path, {"state_dict": {"weight": weight}, "step": step})
    return path


@pytest.mark.parametrize("format", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize(
    ("name", "call", "arguments"),
    [
        ("posix.system", os.system, ("touch ran",)),
        ("eval", eval, ("open('ran', 'w')",)),
        ("exec", exec, ("open('ran', 'w')",)),
        ("io.open", open, ("ran", "w")),
    ],
)
def test_a_checkpoint_that_would_run_code_is_refused(
    tmp_path, monkeypatch, name, call, arguments, format
):
    class Evil:
        def __reduce__(self):  # called when it is unpickled
            return call, arguments

    monkeypatch.chdir(tmp_path)
    path = Path("evil.pt")
    # Older versions of torch print the name with "builtins.".
    words = rf"holds Python code \((builtins\.)?{name}\), not only weights; it was not run"
    if format == "pickle":
        path.write_bytes(pickle.dumps(Evil()))
        words = "not a checkpoint, or damaged"
    else:
        torch.save({"state_dict": Evil()}, path, _use_new_zipfile_serialization=format == "zip")
    with pytest.raises(UserError, match=rf"evil\.pt: {words}"):
        load_checkpoint(path)
    assert not Path("ran").exists()


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path):
    path = save(tmp_path, 1)
    with pytest.raises((TypeError, AttributeError, RuntimeError)):
        save_checkpoint(path, {"state_dict": {}, "lock": threading.Lock()})
    assert load_checkpoint(path)["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.EROFS, "allow writing, or use another"), (errno.ENOSPC, "use another")],
)
def test_a_folder_that_cannot_be_written_is_said_with_what_helps(
    tmp_path, monkeypatch, number, fix
):
    error = OSError(number, "so it is")
    monkeypatch.setattr(tempfile, "TemporaryFile", Mock(side_effect=error))
    with pytest.raises(UserError, match=rf"{tmp_path}: cannot be written \(so it is\); {fix}$"):
        make_folder(tmp_path, "use another")


def test_the_newest_undamaged_checkpoint_is_used_or_the_best(tmp_path, capsys):
    assert load_newest(tmp_path) == (None, {})
    best = save(tmp_path, 3).rename(tmp_path / "checkpoint_best.pt")
    paths = [save(tmp_path, step) for step in (100_000_001, 99_999_999, 88_888_888, 100, 9)]
    assert checkpoints(tmp_path) == paths
    whole = best.read_bytes()
    changed = bytes(8).join([whole[:6000], whole[6008:]])
    older = [*paths[1:], best]
    for k, content in enumerate((b"abc", b"PK", b"", whole[:-500], changed)):
        paths[k].write_bytes(content)
        assert load_newest(tmp_path)[0] == older[k]
        for line, path in zip(capsys.readouterr().err.splitlines(), paths[: k + 1], strict=True):
            assert line.startswith(f"warning: {path}: not a checkpoint, or damaged (")
            assert line.endswith(f"; continuing from {older[k].name}")
    best.unlink()
    with pytest.raises(UserError, match=r"every checkpoint is damaged; give another -o$") as error:
        load_newest(tmp_path)
    assert str(error.value).count("\n") == 5  # a line for each, and the fix


def test_a_lock_ends_with_its_process(tmp_path):
    """Not when the process opens and closes the file once more, and not later, when a child of a
    killed process is still there."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def lock():
        with locked(tmp_path, "use another"):
            pass

    def lock_and_leave_a_child():
        with locked(tmp_path):
            child = fork.Process(target=time.sleep, args=[100])
            child.start()
            theirs.send(child.pid)
            os.kill(os.getpid(), signal.SIGKILL)

    with locked(tmp_path):
        (tmp_path / "lock").read_bytes()
        other = fork.Process(target=lock)
        other.start()
        other.join()
        assert other.exitcode == 1
    killed = fork.Process(target=lock_and_leave_a_child)
    killed.start()
    child = ours.recv()
    killed.join()
    lock()
    os.kill(child, signal.SIGKILL)  # it was there


@pytest.mark.parametrize("link", [os.link, Mock(side_effect=PermissionError)])
def test_the_newest_k_and_the_best_are_kept(tmp_path, monkeypatch, link):
    """Also on a file system without links."""
    monkeypatch.setattr(os, "link", link)
    for step in range(1, 6):
        state = {"state_dict": {}, "step": step}
        checkpoint.save(tmp_path, step, state, is_best=step in (1, 3), n_kept=2)
    names = ["checkpoint_00000004.pt", "checkpoint_00000005.pt", "checkpoint_best.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert load_checkpoint(tmp_path / "checkpoint_best.pt")["step"] == 3


def test_the_progress_of_an_older_version_is_read():
    """It had a field for each sum of the epoch."""
    saved = {"epoch": 3, "batch": 7, "step": 40, "best_loss": 0.5}
    sums = {"seconds": 9.0, "waited": 1.0, "skipped": 2}
    progress = Progress.of({"progress": {**saved, **sums, "loss_sum": 5.0}}, Path("old.pt"))
    assert progress == Progress(**saved, sums={**sums, "loss": 5.0})
