"""A checkpoint as a file: its name in a run's folder, written whole, and read without running code.

NVIDIA's checkpoints are read too.
"""

import dataclasses
import io
import re
import sys
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from cli import DISK_FULL, UserError, expand_path, replace_file
from training import distributed
from training.device import is_out_of_memory

BEST = "checkpoint_best.pt"


class DamagedCheckpoint(UserError):
    """A file that has lost some of its content, or is no checkpoint."""


# The checkpoints in a run's folder


def find_checkpoints(folder: Path) -> list[Path]:
    """Returns a run's checkpoints without the best, newest first."""
    numbered = [path for path in folder.glob("*.pt") if re.fullmatch(r"checkpoint_\d+", path.stem)]
    return sorted(numbered, key=lambda path: int(path.stem.split("_")[1]), reverse=True)


def find_checkpoint(path: str | Path) -> Path:
    """Returns the newest checkpoint of a run if ``path`` is its folder, or the best if it has no
    other; else ``path``."""
    path = expand_path(path)
    return next(iter([*find_checkpoints(path), *path.glob(BEST), path]))


def save(folder: Path, step: int, state: dict[str, Any], is_best: bool, n_kept: int) -> Path:
    """Saves the checkpoint of ``step``, and again as the best if it is, and deletes all but the
    newest ``n_kept`` and the best, damaged ones too. Returns its path. Rank 0 saves, and other
    processes wait."""
    path = folder / f"checkpoint_{step:08d}.pt"
    if distributed.RANK == 0:
        if is_best:  # first: if killed in between, the run validates and saves both again
            save_checkpoint(folder / BEST, state)
        save_checkpoint(path, state)
        newest_first = find_checkpoints(folder)  # --resume passed over those before this one
        kept = newest_first[newest_first.index(path) :][:n_kept]
        for other in {*newest_first} - {*kept}:
            other.unlink()
    distributed.barrier()
    return path


def load_newest(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Returns a run's newest undamaged checkpoint and its state, or (None, {}) if it has none.

    Damaged ones are reported. The best one is used if all others are damaged.
    """
    for path in [*find_checkpoints(folder), *folder.glob(BEST)]:
        try:
            return path, load_checkpoint(path)
        except DamagedCheckpoint as error:
            if distributed.RANK == 0:
                print(f"warning: {error}; trying the one before it", file=sys.stderr)
    return None, {}


# Writing and reading a file


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes ``state`` to ``path``, which is the old file or the complete new one at any time.

    PyTorch stores a CRC-32 of every tensor, and :func:`load_checkpoint` checks it.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    try:
        with replace_file(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # of torch's writer
        if not isinstance(cause, OSError):
            raise
        fix = "make room" if cause.errno in DISK_FULL else "allow writing"
        raise UserError(
            f"{path}: cannot be saved ({cause.strerror}), older checkpoints are intact; {fix}, "
            "then --resume"
        ) from None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Returns the state that train.py or NVIDIA's code (of either repository) saved in ``path``,
    with its tensors on the CPU.

    Raises:
        DamagedCheckpoint: the file has lost some of its content.
        UserError: it does not exist, cannot be read now, is no checkpoint, or holds Python code,
            which is never run.
    """
    content, is_whole = None, False
    try:
        content = path.read_bytes()
        if zipfile.is_zipfile(io.BytesIO(content)):  # as torch.save writes
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                if damaged := archive.testzip():  # torch.load does not check the checksums
                    raise zipfile.BadZipFile(f"checksum of {damaged}")
            is_whole = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError):
        fix = "name one, or the folder of a run that has one"
        raise UserError(f"{path}: no such checkpoint; {fix}") from None
    except Exception as error:  # torch raises all kinds of errors on what is no checkpoint
        reason = shorten(f"{type(error).__name__}: {error}", 70, placeholder=" ...")
        if content is None or is_out_of_memory(error):
            problem = f"{path}: cannot be read now ({reason})"
            raise UserError(f"{problem}; mend that, then run again") from None
        code = re.search(r"GLOBAL (\S*)", str(error))
        if not is_whole and not code:
            problem = f"{path}: not a checkpoint, or damaged ({reason})"
            raise DamagedCheckpoint(f"{problem}; use another file") from None
        raise UserError(
            f"{path}: holds more than weights ({code[1] if code else reason}), which is never run; "
            "use a checkpoint that train.py or NVIDIA's code saved"
        ) from None
    weights = state.get("state_dict") if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(w, Tensor) for w in weights.values()):
        raise UserError(
            f"{path}: has no 'state_dict' of weights; name a checkpoint that train.py or NVIDIA's "
            "code saved"
        )
    # What all names begin with if DDP, torch.compile or Lightning wrapped the model, in any order.
    for prefix in ("module.", "_orig_mod.", "model.") * 2:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): weight for name, weight in weights.items()}
    return state | {"state_dict": weights}


# What a checkpoint has


def rebuild(kind: type, values: dict[str, Any], path: Path) -> Any:
    """Returns the dataclass ``kind`` with the ``values`` that a checkpoint has of it, and defaults
    for those that it lacks.

    Raises:
        UserError: it has values that are unknown here.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise UserError(f"{path}: has unknown {', '.join(unknown)}; use the code that saved it")
    return kind(**values)


def load_weights(
    model: nn.Module, state: dict[str, Any], path: Path, ignore_layers: Sequence[str] = ()
) -> None:
    """Loads a checkpoint's weights into ``model``.

    Args:
        ignore_layers: weights that stay as they are in ``model``, by name or by the beginning of
            their names: "decoder" is all of the decoder.

    Raises:
        UserError: a weight is missing, unknown, of another shape or not finite, or
            ``ignore_layers`` names no weight.
    """
    expected, saved = model.state_dict(), state["state_dict"]
    ignored = {"variance_gain"} - saved.keys()  # which other code lacks
    for layer in ignore_layers:
        inside = {name for name in {**expected, **saved} if f"{name}.".startswith(f"{layer}.")}
        if not inside:
            layers = ", ".join(dict.fromkeys(".".join(name.split(".")[:2]) for name in expected))
            problem = f"setting ignore_layers: the model has no '{layer}'"
            raise UserError(f"{problem}; use some of {layers}, or beginnings of weights' names")
        ignored |= inside
    weights = {name: weight for name, weight in saved.items() if name not in ignored}
    weights |= {name: weight for name, weight in expected.items() if name in ignored}
    for name in {**expected, **weights}:
        theirs, ours = (
            tuple(of[name].shape) if name in of else "absent" for of in (weights, expected)
        )
        if theirs != ours:
            fix = "use its settings (for embedding, symbols), or --warm_start with ignore_layers"
            raise UserError(f"{path}: from another model: {name} is {theirs}, here {ours}; {fix}")
        if not weights[name].isfinite().all():
            raise UserError(f"{path}: {name} has values that are not finite; use another file")
    model.load_state_dict(weights)
