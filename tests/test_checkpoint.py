"""Checkpoints as files, and the folder that holds them."""

import os
import pickle
import threading
from pathlib import Path

import pytest
import torch

from cli import UserError
from training import checkpoint
from training.checkpoint import (
    find_checkpoint,
    find_checkpoints,
    load_checkpoint,
    load_newest,
    save_checkpoint,
)


def save(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint_{step:08d}.pt"
    weight = torch.full((3000,), float(step))
    save_checkpoint(path, {"state_dict": {"weight": weight}, "step": step})
    return path


@pytest.mark.parametrize("format", ["zip", "legacy", "pickle"])
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch, format):
    class Evil:
        def __reduce__(self):  # called when it is unpickled
            return os.system, ("touch ran",)

    monkeypatch.chdir(tmp_path)
    path = Path("evil.pt")
    words = r"holds more than weights \(posix\.system\), which is never run"
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


def test_the_newest_undamaged_checkpoint_is_used_or_the_best(tmp_path, capsys):
    assert load_newest(tmp_path) == (None, {})
    best = save(tmp_path, 3).rename(tmp_path / "checkpoint_best.pt")
    paths = [save(tmp_path, step) for step in (100_000_001, 99_999_999, 88_888_888, 100, 9)]
    assert find_checkpoints(tmp_path) == paths
    whole = best.read_bytes()
    changed = bytes(8).join([whole[:6000], whole[6008:]])
    older = [*paths[1:], best]
    for k, content in enumerate((b"abc", b"PK", b"", whole[:-500], changed)):
        paths[k].write_bytes(content)
        assert load_newest(tmp_path)[0] == older[k]
        for line, path in zip(capsys.readouterr().err.splitlines(), paths[: k + 1], strict=True):
            assert line.startswith(f"warning: {path}: not a checkpoint, or damaged (")
            assert line.endswith("; trying the one before it")
    best.unlink()
    assert load_newest(tmp_path) == (None, {})


def test_a_runs_folder_means_its_newest_checkpoint_or_the_best(tmp_path):
    assert find_checkpoint(tmp_path) == tmp_path
    for name in ("checkpoint_best.pt", "checkpoint_00000009.pt", "checkpoint_00000010.pt"):
        (tmp_path / name).touch()
        assert find_checkpoint(str(tmp_path)) == tmp_path / name
    assert find_checkpoint("none/checkpoint_00000009.pt") == Path("none/checkpoint_00000009.pt")


def test_the_newest_k_and_the_best_are_kept_and_damaged_ones_count_for_none(tmp_path):
    (tmp_path / "checkpoint_00000006.pt").touch()  # --resume went on from an earlier one
    for step in range(1, 6):
        state = {"state_dict": {}, "step": step}
        checkpoint.save(tmp_path, step, state, is_best=step in (1, 3), n_kept=2)
    names = [f"checkpoint_0000000{step}.pt" for step in (4, 5)] + ["checkpoint_best.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert load_checkpoint(tmp_path / "checkpoint_best.pt")["step"] == 3
    assert load_newest(tmp_path)[1]["step"] == 5
