"""Checkpoints, and the folder that holds them."""

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import checkpoint
from checkpoint import Progress, checkpoints, load_checkpoint, load_newest, save_checkpoint
from cli import UserError
from files import locked

ROOT = Path(__file__).resolve().parent.parent


def save(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint_{step:08d}.pt"
    weight = torch.full((3000,), float(step))
    save_checkpoint(path, {"state_dict": {"weight": weight}, "step": step})
    return path


class Evil:
    """Makes a call when it is unpickled."""

    def __init__(self, *call) -> None:
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("format", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize(
    ("call", "name"),
    [((os.system, ("touch ran",)), "posix.system"), ((eval, ("open('ran', 'w')",)), "eval"),
     ((exec, ("open('ran', 'w')",)), "exec"), ((open, ("ran", "w")), "io.open")],
)  # fmt: skip
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch, call, name, format):
    monkeypatch.chdir(tmp_path)
    # Older versions of torch print the name with "builtins.".
    message = rf"evil\.pt: holds Python code \((builtins\.)?{name}\), not only weights; it was not"
    if format == "pickle":
        Path("evil.pt").write_bytes(pickle.dumps(Evil(*call)))
        message = r"evil\.pt: not a checkpoint, or damaged"
    else:
        zipped = format == "zip"
        torch.save({"state_dict": Evil(*call)}, "evil.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=message):
        load_checkpoint(Path("evil.pt"))
    assert not Path("ran").exists()


@pytest.mark.parametrize("damage", ["cut", "zeroed", "text"])
def test_a_damaged_checkpoint_is_named_in_one_line(tmp_path, damage):
    path = save(tmp_path, 1)
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = {
        "cut": content[:-100],
        "zeroed": content[:middle] + bytes(8) + content[middle + 8 :],
        "text": b"abc",
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(UserError, match=r"^\S+1\.pt: not a checkpoint, or damaged \(\w+\);.*$"):
        load_checkpoint(path)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path):
    path = save(tmp_path, 1)
    with pytest.raises((TypeError, AttributeError, RuntimeError)):
        save_checkpoint(path, {"state_dict": {}, "lock": threading.Lock()})
    assert load_checkpoint(path)["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_the_newest_undamaged_checkpoint_is_used_and_damaged_ones_are_set_aside(tmp_path, capsys):
    steps = (9, 100, 99_999_999, 100_000_001)
    oldest, newest, *damaged = paths = [save(tmp_path, step) for step in steps]
    assert checkpoints(tmp_path) == paths[::-1]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-500])
    path, state = load_newest(tmp_path)
    assert path == newest and state["step"] == 100
    for line, path in zip(capsys.readouterr().err.splitlines(), damaged[::-1], strict=True):
        assert line.startswith(f"warning: {path}: not a checkpoint, or damaged (")
        assert line.endswith("; use another file; continuing from checkpoint_00000100.pt")
    checkpoint.set_aside(tmp_path, newest)
    assert checkpoints(tmp_path) == [newest, oldest]
    assert all(Path(f"{path}.damaged").exists() for path in damaged)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(tmp_path):
    assert load_newest(tmp_path) == (None, {})
    damaged = [save(tmp_path, step) for step in (1, 2)]
    for path in damaged:
        path.write_bytes(b"PK")
    with pytest.raises(UserError, match=r"every checkpoint is damaged; give another -o$") as error:
        load_newest(tmp_path)
    assert str(error.value).count("\n") == 2
    best = save(tmp_path, 3).rename(tmp_path / "checkpoint_best.pt")
    assert load_newest(tmp_path)[0] == best  # used if no other is undamaged
    assert checkpoints(tmp_path) == damaged[::-1]


@pytest.mark.parametrize("links", [True, False])
def test_the_newest_k_and_the_best_are_kept(tmp_path, monkeypatch, links):
    def refuse(*_):
        raise PermissionError

    if not links:  # as on some file systems: then the best is a copy
        monkeypatch.setattr(os, "link", refuse)
    best = tmp_path / "checkpoint_best.pt"
    for step in range(1, 6):
        path = save(tmp_path, step)
        checkpoint.keep_newest(tmp_path, 2)
        if step in (1, 3):
            checkpoint.link(path, best)
    names = ["checkpoint_00000004.pt", "checkpoint_00000005.pt", "checkpoint_best.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert load_checkpoint(best)["step"] == 3


def test_the_progress_of_an_older_version_is_read():
    """It had a field for each sum of the epoch."""
    sums = {"loss": 5.0, "seconds": 9.0, "waited": 1.0, "skipped": 2}
    saved = {"epoch": 3, "batch": 7, "step": 40, "best_loss": 0.5}
    old = {"loss_sum": 5.0, "seconds": 9.0, "waited": 1.0, "skipped": 2}
    progress = Progress(**saved, sums=sums)
    for state in ({**saved, **old}, {**saved, "sums": sums}):
        assert Progress.of({"progress": state}, Path("old.pt")) == progress
    assert Progress.of({"progress": saved}, Path("old.pt")).sums == {}


def test_a_folder_is_held_by_one_process(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom files import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError) as error, locked(tmp_path):
            pass
        holder.kill()
    assert str(error.value) == (
        f"{tmp_path}: in use by process {holder.pid}; wait for its end, or give another folder"
    )
    part = tmp_path / "checkpoint_00000001.pt.part"
    part.write_bytes(b"of a killed process")
    with locked(tmp_path, unfinished="*.part"):  # a killed process holds nothing
        assert not part.exists()
