"""Checkpoints as files, and the folder that holds them."""

import os
import pickle
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from cli import UserError
from training import checkpoint


def save(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint_{step:08d}.pt"
    weight = torch.full((3000,), float(step))
    checkpoint.save_checkpoint(path, {"state_dict": {"weight": weight}, "step": step})
    return path


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch):
    class Evil:
        def __reduce__(self):  # called when it is unpickled
            return os.system, ("touch ran",)

    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Evil()}, "zip.pt")
    torch.save({"state_dict": Evil()}, "legacy.pt", _use_new_zipfile_serialization=False)
    Path("pickle.pt").write_bytes(pickle.dumps(Evil()))
    for path in tmp_path.glob("*.pt"):
        with pytest.raises(UserError, match=r"\.pt: (holds more than weights|not a checkpoint)"):
            checkpoint.load_checkpoint(path)
    assert not Path("ran").exists()


def test_the_newest_undamaged_checkpoint_is_used_or_the_best(tmp_path, capsys):
    assert checkpoint.load_newest(tmp_path) == (None, {})
    assert checkpoint.find_checkpoint(tmp_path) == tmp_path
    best = save(tmp_path, 3).rename(tmp_path / "checkpoint_best.pt")
    assert checkpoint.find_checkpoint(tmp_path) == best
    paths = [save(tmp_path, step) for step in (100_000_001, 99_999_999, 88_888_888, 100, 9)]
    assert checkpoint.find_checkpoints(tmp_path) == paths
    assert checkpoint.find_checkpoint(tmp_path) == paths[0]
    whole = best.read_bytes()
    changed = bytes(8).join([whole[:6000], whole[6008:]])
    older = [*paths[1:], best]
    for k, content in enumerate((b"abc", b"PK", b"", whole[:-500], changed)):
        paths[k].write_bytes(content)
        assert checkpoint.load_newest(tmp_path)[0] == older[k]
        for line, path in zip(capsys.readouterr().err.splitlines(), paths[: k + 1], strict=True):
            assert line.startswith(f"warning: {path}: not a checkpoint, or damaged (")
    best.unlink()
    assert checkpoint.load_newest(tmp_path) == (None, {})


def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    for owner, name, error in (
        (Path, "read_bytes", PermissionError("Permission denied")),
        (torch, "load", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    ):
        with (
            patch.object(owner, name, side_effect=error),
            pytest.raises(UserError, match=r"2\.pt: cannot be read now"),
        ):
            checkpoint.load_newest(tmp_path)


def test_the_newest_k_and_the_best_are_kept_and_damaged_ones_count_for_none(tmp_path):
    (tmp_path / "checkpoint_00000006.pt").touch()  # --resume went on from an earlier one
    for step in range(1, 6):
        state = {"state_dict": {}, "step": step}
        checkpoint.save(tmp_path, step, state, is_best=step in (1, 3), n_kept=2)
    names = [f"checkpoint_0000000{step}.pt" for step in (4, 5)] + ["checkpoint_best.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert checkpoint.load_checkpoint(tmp_path / "checkpoint_best.pt")["step"] == 3
    assert checkpoint.load_newest(tmp_path)[1]["step"] == 5
