"""A run's folder and its checkpoints: held by one process, saved atomically, loaded without running
code, verified against the model.
"""

import dataclasses
import math
import os
import pickle
import random
import re
import shutil
import sys
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cli import UserError
from files import replacing, sync_names
from hparams import MAY_CHANGE, HParams

BEST = "checkpoint_best.pt"

# What a checkpoint of ours has, so that training can go on from it.
STATE = ("state_dict", "optimizer", "progress", "random_state", "hparams", "data")


@dataclasses.dataclass
class Progress:
    """How far a run is, between two of its batches."""

    epoch: int = 0
    batch: int = 0  # of the epoch, done
    step: int = 0  # of the optimiser
    bad_steps: int = 0  # skipped in a row, until now
    best_loss: float = math.inf  # of all validations, like best_alignment
    best_alignment: float = 0.0
    metrics_size: int = 0  # bytes of metrics.jsonl
    peak_memory_gib: float = 0.0  # of the epoch, like sums
    sums: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, **values: float) -> None:
        """Add to the sums of the epoch."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def next_epoch(self) -> "Progress":
        """As it is before the first batch of the next epoch."""
        return dataclasses.replace(
            self, epoch=self.epoch + 1, batch=0, peak_memory_gib=0.0, sums={}
        )

    @classmethod
    def of(cls, state: dict[str, Any], path: Path) -> "Progress":
        """That of a checkpoint.

        Raises:
            UserError: another version saved it.
        """
        saved = dict(state["progress"])
        if "sums" not in saved:  # versions before the sums had names of their own
            old = {"loss": "loss_sum", "seconds": "seconds", "waited": "waited"}
            old["skipped"] = "skipped"
            saved["sums"] = {name: saved.pop(key) for name, key in old.items() if key in saved}
        try:
            return cls(**saved)
        except TypeError as error:
            raise UserError(
                f"{path}: of another version ({error}); start from its weights by -c and "
                "--warm_start, with another -o"
            ) from None


# A run's folder


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints but for the best, the newest first."""
    numbered = (
        (int(match[1]), path)
        for path in folder.glob("checkpoint_*.pt")
        if (match := re.fullmatch(r"checkpoint_(\d+)\.pt", path.name))
    )
    return [path for _, path in sorted(numbered, reverse=True)]


def save(folder: Path, step: int, state: dict[str, Any], is_best: bool, n_kept: int) -> Path:
    """Save the checkpoint of ``step``, which may be the best too; delete all but the newest
    ``n_kept`` and the best."""
    path = folder / f"checkpoint_{step:08d}.pt"
    if is_best:  # this name first: after a kill in between, it is validated and saved again
        save_checkpoint(folder / BEST, state)
        link(folder / BEST, path)
    else:
        save_checkpoint(path, state)
    keep_newest(folder, n_kept)
    return path


def keep_newest(folder: Path, n: int) -> None:
    """Delete all checkpoints but the newest ``n`` and the best."""
    for path in checkpoints(folder)[n:]:
        path.unlink()


def link(path: Path, name: Path) -> None:
    """Give a checkpoint a second name, in place of what had it; takes no room."""
    part = name.with_name(f"{name.name}.part")
    try:
        os.link(path, part)
        os.replace(part, name)
        sync_names(name.parent)
    except OSError:  # a file system without links
        with open(path, "rb") as source, replacing(name) as file:
            shutil.copyfileobj(source, file)


def load_newest(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """A run's newest checkpoint that is whole, and its state; (None, {}) if the run has none.

    Damaged ones are reported, and left as they are. The best one serves where no other does.

    Raises:
        UserError: there are checkpoints, and none is whole.
    """
    problems = []
    numbered = checkpoints(folder)
    for path in [*numbered, *sorted(set(folder.glob("checkpoint_*.pt")) - set(numbered))]:
        try:
            state = load_checkpoint(path)
        except UserError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            print(f"warning: {problem}; going on from {path.name}", file=sys.stderr)
        return path, state
    if problems:
        problems.append(f"{folder}: no checkpoint is whole; give another -o")
        raise UserError("\n".join(problems))
    return None, {}


def set_aside(folder: Path, newest: Path) -> None:
    """Rename the damaged checkpoints that :func:`load_newest` passed over to find ``newest``."""
    for path in checkpoints(folder):
        if path == newest:
            break
        path.rename(f"{path}.damaged")


# A checkpoint


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` under ``path``, which holds the old file or the new one, never a part.

    PyTorch writes a CRC-32 with every tensor, which :func:`load_checkpoint` compares.

    Raises:
        UserError: there is no room, or no permission.
    """
    try:
        with replacing(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # of torch's writer
        if not isinstance(cause, OSError):
            raise
        raise UserError(
            f"{path}: cannot be saved ({cause.strerror}), what was there is intact; make room, "
            "then --resume"
        ) from None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state saved under ``path``, on the CPU; ours, or one of NVIDIA's code.

    Raises:
        UserError: there is no such file, it is not a checkpoint, or it holds code: what would
            run at loading is refused unread.
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
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            code = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise UserError(
                f"{path}: holds Python code ({code[1] if code else 'unknown'}), not weights alone; "
                "it was not run; use a checkpoint from a source that you trust"
            ) from None
        raise UserError(
            f"{path}: not a checkpoint, or damaged ({type(error).__name__}); use another file"
        ) from None
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict):
        raise UserError(f"{path}: has no 'state_dict'; name a checkpoint that train.py saved")
    return state


def saved_hparams(state: dict[str, Any], path: Path) -> HParams:
    """The settings that a checkpoint of ours was trained with; those that this version has and
    the checkpoint has not are at their defaults.

    Raises:
        UserError: it has none, or some that this version does not know.
    """
    if "hparams" not in state:
        raise UserError(f"{path}: has no settings in it; start from its weights by -c")
    if unknown := unknown_settings(state):
        raise UserError(
            f"{path}: has settings that this version does not know ({', '.join(unknown)}); use the "
            "version that it is of, or start another run by -c, which leaves them out"
        )
    return HParams(**state["hparams"])


def unknown_settings(state: dict[str, Any]) -> list[str]:
    """Those of a checkpoint that this version does not have."""
    return sorted(set(state["hparams"]) - {field.name for field in dataclasses.fields(HParams)})


def load_weights(
    model: nn.Module,
    state: dict[str, Any],
    path: Path,
    ignore_layers: Iterable[str] = (),
    warm_start: bool = False,
) -> None:
    """Put a checkpoint's weights into ``model``; those that ``ignore_layers`` names, or of which
    it names the beginning ("decoder" for all of the decoder's), stay as the model has them.

    Raises:
        UserError: a name is missing or unknown, or a shape differs: another model's weights.
    """
    ours, theirs = model.state_dict(), state["state_dict"]
    ignored = set()
    for layer in ignore_layers:
        matches = {name for name in {*ours, *theirs} if f"{name}.".startswith(f"{layer}.")}
        if not matches:
            raise UserError(f"setting ignore_layers: the model has no '{layer}'; name its weights")
        ignored |= matches
    theirs = {name: weight for name, weight in theirs.items() if name not in ignored}
    theirs |= {name: weight for name, weight in ours.items() if name in ignored}
    differences = []
    for name in dict.fromkeys([*ours, *theirs]):
        here, there = (
            tuple(weights[name].shape) if name in weights else "absent"
            for weights in (ours, theirs)
        )
        if here != there:
            differences.append(f"{name} is {there} there and {here} here")
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        fix = "use the settings it was trained with (hparams.json beside it)"
        if warm_start:
            fix = "leave these out with ignore_layers, as in ignore_layers=[embedding,decoder]"
        raise UserError(
            f"{path}: the checkpoint of another model: {'; '.join(differences[:3])}{more}; {fix}"
        )
    model.load_state_dict(theirs)


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], path: Path, model: nn.Module
) -> None:
    """Put a checkpoint's moments into ``optimizer``: ours, or Adam's of NVIDIA's code.

    Raises:
        UserError: they are not those of its weights.
    """
    parameters = dict(model.named_parameters())
    theirs = [name for name in state["state_dict"] if name in parameters]
    try:
        # Old versions of PyTorch number the weights by their address.
        numbers = state["optimizer"]["param_groups"][0]["params"]
        moments = {
            name: state["optimizer"]["state"][number]
            for name, number in zip(theirs, numbers, strict=True)
            if number in state["optimizer"]["state"]  # before the first step there are none
        }
        for name, of_weight in moments.items():
            if of_weight["exp_avg"].shape != parameters[name].shape:
                raise ValueError(name)
        merged = optimizer.state_dict()  # with the learning rate of now
        merged["state"] = {i: moments[name] for i, name in enumerate(parameters) if name in moments}
        optimizer.load_state_dict(merged)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: its optimizer's state is not that of its weights ({error}); take the "
            "weights alone by --warm_start"
        ) from None


def refuse_changes(state: dict[str, Any], hparams: HParams, source: Path) -> None:
    """Raise :class:`UserError` if the settings would make a resumed run another run."""
    missing = [name for name in STATE if name not in state]
    if missing:
        raise UserError(f"{source}: has no {', '.join(missing)}; start from its weights by -c")
    changed = [
        f"{name}={there} there and {here} here"
        for name, (there, here) in changes(saved_hparams(state, source), hparams).items()
        if name not in MAY_CHANGE
    ]
    if changed:
        raise UserError(
            f"{source}: {'; '.join(changed)}; leave them out, or start another run with them: "
            f"-c {source} with another -o"
        )


def changes(before: HParams, after: HParams) -> dict[str, tuple[Any, Any]]:
    """The settings that differ: their values before and after."""
    old, new = dataclasses.asdict(before), dataclasses.asdict(after)
    return {name: (old[name], new[name]) for name in old if old[name] != new[name]}


def refuse_other_data(state: dict[str, Any], data: str, source: Path) -> None:
    """Raise :class:`UserError` if the clips are not those that the checkpoint was trained on."""
    if state["data"] != data:
        raise UserError(
            f"{source}: was trained on clips of other texts, lengths or order than the filelists "
            "name now; give those back, or go on by -c with another -o"
        )


# Random generators


def random_state() -> dict[str, Any]:
    """All that training may draw from: the generators of Python, NumPy and torch."""
    name, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators where :func:`random_state` found them."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
