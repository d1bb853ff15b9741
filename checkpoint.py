"""Checkpoints: saved atomically, loaded without running code, verified against the model."""

import os
import tempfile
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hparams import HParams, UserError

# What a checkpoint of ours has, so that training can go on from it.
STATE = ("state_dict", "optimizer", "sampler", "step", "best_loss", "random_state", "hparams")

# What may change when a run is resumed; anything else would make it another run.
MAY_CHANGE = {
    "epochs", "epochs_per_validation", "epochs_per_checkpoint", "decoder", "learning_rate",
    "data_dir", "cache_mels", "mel_cache_dir", "num_workers", "gate_threshold",
    "max_decoder_steps", "ignore_layers",
}  # fmt: skip


def make_folder(path: Path) -> None:
    """Make ``path`` a folder that can be written.

    Raises:
        UserError: it cannot be.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); give another folder"
        ) from None


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` under ``path``, which holds the old file or the new one, never a part.

    Raises:
        UserError: there is no room, or no permission.
    """
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be saved ({error.strerror}), what was there is intact; make room, "
            "then --resume"
        ) from None
    finally:
        part.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state saved under ``path``, on the CPU; ours, or one of NVIDIA's code.

    Raises:
        UserError: there is no such file, or it is not a checkpoint.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; name one that train.py saved")
    try:
        if zipfile.is_zipfile(path):  # its checksums, which torch does not compare
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged:
                raise ValueError(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a file's bytes make torch raise, it is no checkpoint
        raise UserError(
            f"{path}: not a checkpoint, or damaged ({type(error).__name__}); use another file"
        ) from None
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict):
        raise UserError(f"{path}: has no 'state_dict'; name a checkpoint that train.py saved")
    return state


def saved_hparams(state: dict[str, Any], path: Path) -> HParams:
    """The settings that a checkpoint of ours was trained with.

    Raises:
        UserError: it has none, or those of another version of this recipe.
    """
    try:
        return HParams(**state["hparams"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: no settings of this version in it ({error})") from None


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


def refuse_changes(state: dict[str, Any], settings: dict[str, Any], source: Path) -> None:
    """Raise :class:`UserError` if the settings would make a resumed run another run."""
    missing = [name for name in STATE if name not in state]
    if missing:
        raise UserError(f"{source}: has no {', '.join(missing)}; start from its weights by -c")
    changed = [
        f"{name}={state['hparams'].get(name)} there and {value} here"
        for name, value in settings.items()
        if name not in MAY_CHANGE and state["hparams"].get(name) != value
    ]
    if changed:
        raise UserError(f"{source}: {'; '.join(changed)}; leave them out, or give another -o")
