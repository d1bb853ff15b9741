"""Checkpoints: saved atomically, loaded without running code, verified against the model."""

import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hparams import UserError


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` under ``path``, which holds the old file or the new one, never a part."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state saved under ``path``, on the CPU; ours, or one of NVIDIA's code.

    Raises:
        UserError: there is no such file, or it is not a checkpoint.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint; name one that train.py saved") from None
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path}: not a checkpoint, or damaged ({reason}); use another file"
        ) from None
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict):
        raise UserError(f"{path}: has no 'state_dict'; name a checkpoint that train.py saved")
    return state


def load_weights(
    model: nn.Module, state: dict[str, Any], path: Path, ignore_layers: Iterable[str] = ()
) -> None:
    """Put a checkpoint's weights into ``model``; ``ignore_layers`` keep the model's own.

    Raises:
        UserError: a name is missing or unknown, or a shape differs: another model's weights.
    """
    ours, theirs = model.state_dict(), dict(state["state_dict"])
    for name in ignore_layers:
        if name not in ours:
            raise UserError(f"setting ignore_layers: the model has no '{name}'; name its weights")
        theirs[name] = ours[name]
    for name in [*ours, *theirs]:
        here, there = (
            tuple(weights[name].shape) if name in weights else "absent"
            for weights in (ours, theirs)
        )
        if here != there:
            raise UserError(
                f"{path}: the checkpoint of another model: {name} is {there} there and {here} "
                "here; use the settings it was trained with (hparams.json beside it)"
            )
    model.load_state_dict(theirs)
