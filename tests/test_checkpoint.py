"""Checkpoints and the folder that holds them."""

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from checkpoint import (
    checkpoints,
    keep_newest,
    link,
    load_checkpoint,
    load_newest,
    save_checkpoint,
    set_aside,
)
from cli import UserError
from files import locked

ROOT = Path(__file__).resolve().parent.parent


class Evil:
    """Calls what it was given when it is unpickled."""

    def __init__(self, *call) -> None:
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("call", "name"),
    [((os.system, ("touch ran",)), "posix.system"), ((eval, ("open('ran', 'w')",)), "eval"),
     ((exec, ("open('ran', 'w')",)), "exec"), ((open, ("ran", "w")), "io.open")],
)  # fmt: skip
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch, call, name, zipped):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Evil(*call)}, "evil.pt", _use_new_zipfile_serialization=zipped)
    name = rf"(builtins\.)?{name}"  # with it in older torches
    message = rf"evil\.pt: holds Python code \({name}\), not weights alone; it was not run; use"
    with pytest.raises(UserError, match=message):
        load_checkpoint(Path("evil.pt"))
    assert not Path("ran").exists()


def test_a_plain_pickle_is_no_checkpoint(tmp_path):
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Evil(os.system, (f"touch {tmp_path}/ran",))))
    with pytest.raises(UserError, match=r"evil\.pt: not a checkpoint, or damaged"):
        load_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", ["cut", "zeroed", "text"])
def test_a_damaged_checkpoint_is_named_in_one_line(tmp_path, damage):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"state_dict": {"weight": torch.randn(5000)}})
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(
        {
            "cut": content[:-100],
            "zeroed": content[:middle] + bytes(8) + content[middle + 8 :],
            "text": b"abc",
        }[damage]
    )
    with pytest.raises(
        UserError, match=r"^.*checkpoint\.pt: not a checkpoint, or damaged \(\w+\);"
    ):
        load_checkpoint(path)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"state_dict": {}, "step": 1})
    with pytest.raises((TypeError, AttributeError, RuntimeError)):
        save_checkpoint(path, {"state_dict": {}, "lock": threading.Lock()})
    assert load_checkpoint(path)["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def state(step: int) -> dict:
    return {"state_dict": {"weight": torch.full((3000,), float(step))}, "step": step}


def test_the_newest_whole_checkpoint_is_used_and_damaged_ones_set_aside(tmp_path, capsys):
    paths = [tmp_path / f"checkpoint_{step:08d}.pt" for step in (9, 100, 99_999_999, 100_000_001)]
    for step, path in enumerate(paths):
        save_checkpoint(path, state(step))
    assert checkpoints(tmp_path) == paths[::-1]
    for path in paths[2:]:
        path.write_bytes(path.read_bytes()[:-500])
    path, found = load_newest(tmp_path)
    assert path == paths[1] and found["step"] == 1
    printed = capsys.readouterr().err.splitlines()
    for line, damaged in zip(printed, paths[:1:-1], strict=True):
        assert line.startswith(f"warning: {damaged}: not a checkpoint, or damaged (")
        assert line.endswith("; use another file; going on from checkpoint_00000100.pt")
    set_aside(tmp_path, path)
    assert checkpoints(tmp_path) == paths[1::-1]
    assert Path(f"{paths[3]}.damaged").exists() and Path(f"{paths[2]}.damaged").exists()


def test_if_no_checkpoint_is_whole_nothing_is_begun(tmp_path):
    for step in (1, 2):
        (tmp_path / f"checkpoint_{step:08d}.pt").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"no checkpoint is whole; give another -o$") as error:
        load_newest(tmp_path)
    assert str(error.value).count("\n") == 2
    save_checkpoint(tmp_path / "checkpoint_best.pt", state(1))
    assert load_newest(tmp_path)[0] == tmp_path / "checkpoint_best.pt"  # where no other is whole
    assert len(checkpoints(tmp_path)) == 2
    assert load_newest(tmp_path / "none") == (None, {})


def test_the_newest_k_and_the_best_are_kept(tmp_path):
    for step in range(1, 6):
        path = tmp_path / f"checkpoint_{step:08d}.pt"
        save_checkpoint(path, state(step))
        keep_newest(tmp_path, 2)
        if step in (1, 3):
            link(path, tmp_path / "checkpoint_best.pt")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint_00000004.pt", "checkpoint_00000005.pt", "checkpoint_best.pt"
    ]  # fmt: skip
    assert load_checkpoint(tmp_path / "checkpoint_best.pt")["step"] == 3


def test_the_best_is_copied_where_there_are_no_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    save_checkpoint(tmp_path / "checkpoint_00000001.pt", state(1))
    link(tmp_path / "checkpoint_00000001.pt", tmp_path / "checkpoint_best.pt")
    assert load_checkpoint(tmp_path / "checkpoint_best.pt")["step"] == 1


def test_a_folder_is_held_by_one_process(tmp_path):
    (tmp_path / "checkpoint_00000001.pt.part").write_bytes(b"of a killed process")
    code = (
        "import sys\nfrom pathlib import Path\nfrom files import locked\n"
        "from cli import exit_on_user_error\n"
        "def main():\n    with locked(Path(sys.argv[1]), unfinished='*.part'):\n"
        "        print('held', flush=True)\n        input()\n"
        "exit_on_user_error(main)"
    )
    command = [sys.executable, "-c", code, tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        assert not list(tmp_path.glob("*.part"))
        with pytest.raises(UserError) as error, locked(tmp_path):
            pass
        assert str(error.value) == (
            f"{tmp_path}: in use by process {holder.pid}; wait for its end, or give another folder"
        )
        holder.kill()
    with locked(tmp_path):  # a killed process holds nothing
        second = subprocess.run(
            command, cwd=ROOT, text=True, capture_output=True, input="", check=False
        )
    assert second.returncode == 2
    assert second.stderr.startswith(f"error: {tmp_path}: in use by process {os.getpid()}; wait")
