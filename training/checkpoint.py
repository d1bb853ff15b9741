"""A checkpoint as a file: its name in a run's folder, written whole, and read without running code.

NVIDIA's checkpoints are read too.
"""

import dataclasses
import io
import json
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cli import DISK_FULL, UserError, pluralize, replace_file
from hparams import HParams, format_overrides
from training import distributed
from training.device import is_out_of_memory

BEST = "checkpoint_best.pt"

# Settings that this code no longer has, and that never changed what a checkpoint holds.
REMOVED_SETTINGS = {"precise_batch_norm", "gate_threshold"}


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
    path = Path(path)
    return next(iter([*find_checkpoints(path), *path.glob(BEST), path]))


def save(folder: Path, step: int, state: dict[str, Any], is_best: bool, n_kept: int) -> Path:
    """Saves the checkpoint of ``step``, and again as the best if it is, and deletes all but the
    newest ``n_kept`` and the best. Returns its path. With several processes, rank 0 saves and the
    others wait.
    """
    path = folder / f"checkpoint_{step:08d}.pt"
    if distributed.RANK == 0:
        if is_best:  # first: if killed in between, the run validates and saves both again
            save_checkpoint(folder / BEST, state)
        save_checkpoint(path, state)
        for old in find_checkpoints(folder)[n_kept:]:
            old.unlink()
    distributed.barrier()
    return path


def load_newest(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Returns a run's newest undamaged checkpoint and its state, or (None, {}) if it has none.

    Damaged ones are reported and left alone. The best one is used if all others are damaged.

    Raises:
        UserError: every checkpoint is damaged, or one cannot be read for another reason.
    """
    problems = []
    numbered = find_checkpoints(folder)
    for path in [*numbered, *sorted(set(folder.glob("checkpoint_*.pt")) - set(numbered))]:
        try:
            state = load_checkpoint(path)
        except DamagedCheckpoint as error:
            problems.append(str(error))
            continue
        for problem in problems if distributed.RANK == 0 else ():
            print(f"warning: {problem}; continuing from {path.name}", file=sys.stderr)
        return path, state
    if problems:
        problems.append(f"{folder}: every checkpoint is damaged; give another -o")
        raise UserError("\n".join(problems))
    return None, {}


def set_aside(folder: Path, newest: Path) -> None:
    """Renames the damaged checkpoints that :func:`load_newest` skipped to reach ``newest``."""
    for path in takewhile(lambda path: path != newest, find_checkpoints(folder)):
        path.rename(f"{path}.damaged")


def save_hparams(folder: Path, hparams: HParams) -> None:
    """Writes a run's settings to hparams.json."""
    with replace_file(folder / "hparams.json") as file:
        file.write((json.dumps(dataclasses.asdict(hparams), indent=2) + "\n").encode())


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
        UserError: the file does not exist, is no checkpoint, is damaged, or holds Python code,
            which is never run.
    """
    if path.is_dir():
        raise UserError(f"{path}: a folder without checkpoints; name that of a run, or a file")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint; name one, or the folder of a run") from None
    except (OSError, MemoryError) as error:
        raise UserError(
            f"{path}: cannot be read now ({error or 'out of memory'}); mend that, then run again"
        ) from None
    state = _unpickled(content, path)
    if not isinstance(state, dict) or not _are_weights(state.get("state_dict")):
        raise UserError(
            f"{path}: has no 'state_dict' of weights; name a checkpoint that train.py or NVIDIA's "
            "code saved"
        )
    return state | {"state_dict": _without_prefix(state["state_dict"])}


def _without_prefix(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights without what all their names begin with because the model was wrapped."""
    # By DDP, torch.compile and Lightning, in any order.
    for prefix in ("module.", "_orig_mod.", "model.") * 2:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): weight for name, weight in weights.items()}
    return weights


def _unpickled(content: bytes, path: Path) -> Any:
    """Returns what ``torch.save`` wrote into a file, whose bytes are ``content``."""
    if content[8:9] == b"{":  # after the size of the header
        raise UserError(
            f"{path}: a safetensors file; load it, and save its weights by "
            "torch.save({'state_dict': weights}, FILE)"
        )
    is_whole = False
    try:
        if zipfile.is_zipfile(io.BytesIO(content)):  # torch does not check the checksums
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                damaged = archive.testzip()
            if damaged:
                raise ValueError(damaged)
            is_whole = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises all kinds of errors on what is no checkpoint
        code = re.search(r"GLOBAL (\S*)", str(error))
        if code and code[1].startswith("numpy."):
            raise UserError(
                f"{path}: has a NumPy value beside its weights, which is not read; save it again "
                "with the state_dict alone"
            ) from None
        if code and isinstance(error, pickle.UnpicklingError):
            raise UserError(
                f"{path}: holds Python code ({code[1]}), not only weights; it was not run; use a "
                "checkpoint from a source that you trust"
            ) from None
        reason = type(error).__name__
        if is_out_of_memory(error):
            raise UserError(f"{path}: cannot be loaded (out of memory); free some memory") from None
        if is_whole:
            reason += f": {error}".partition("\n")[0]
            raise UserError(f"{path}: cannot be loaded ({reason}); use another file") from None
        raise DamagedCheckpoint(
            f"{path}: not a checkpoint, or damaged ({reason}); use another file"
        ) from None


def _are_weights(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(weight, Tensor) for name, weight in value.items()
    )


# What a checkpoint has


def saved_hparams(state: dict[str, Any], path: Path) -> HParams:
    """Returns the settings saved in a checkpoint, with defaults for those it lacks.

    Raises:
        UserError: it has settings that are unknown here.
    """
    settings = {n: value for n, value in state["hparams"].items() if n not in REMOVED_SETTINGS}
    if unknown := settings.keys() - {field.name for field in dataclasses.fields(HParams)}:
        raise UserError(
            f"{path}: has unknown settings ({', '.join(sorted(unknown))}); use the code that "
            "saved it"
        )
    return HParams(**settings)


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
    if expected.keys().isdisjoint(saved):
        name = next(iter(saved), "none")
        raise UserError(f"{path}: no weight has the name of one here ({name}); is it Tacotron 2's?")
    saved = {"variance_gain": expected["variance_gain"], **saved}  # which other code lacks
    ignored = _weights_of(ignore_layers, expected, saved)
    loaded = {name: weight for name, weight in saved.items() if name not in ignored}
    loaded |= {name: weight for name, weight in expected.items() if name in ignored}
    shapes = {name: tuple(weight.shape) for name, weight in expected.items()}
    loaded_shapes = {name: tuple(weight.shape) for name, weight in loaded.items()}
    differing = [
        name for name in {**shapes, **loaded_shapes} if shapes.get(name) != loaded_shapes.get(name)
    ]
    if differing:
        name, n_more = differing[0], len(differing) - 1
        problem = f"{name} is {loaded_shapes.get(name, 'absent')} in the checkpoint, "
        problem += f"{shapes.get(name, 'absent')} in this model"
        if n_more:
            problem += f" (and {pluralize(n_more, 'more weight')})"
        fix = "use the settings that it was trained with"
        if differing == ["embedding.weight"] and "embedding.weight" in loaded:
            fix = "it reads other symbols: set them (symbols)"
        layers = dict.fromkeys(name.rpartition(".")[0] for name in differing)
        without = format_overrides({"ignore_layers": (*ignore_layers, *layers)})
        raise UserError(
            f"{path}: the checkpoint of another model: {problem}; {fix}, or train from its other "
            f"weights by -c, --warm_start and --hparams '{without}'"
        )
    for name, weight in loaded.items():
        if not weight.isfinite().all():
            raise UserError(f"{path}: {name} has values that are not finite; use another file")
    model.load_state_dict(loaded)


def _weights_of(
    layers: Sequence[str], expected: dict[str, Tensor], saved: dict[str, Tensor]
) -> set[str]:
    """Returns the names of the weights that belong to ``layers``, in the model or the checkpoint.

    Raises:
        UserError: a layer has no weight.
    """
    found = set()
    for layer in layers:
        matches = {name for name in {*expected, *saved} if f"{name}.".startswith(f"{layer}.")}
        if not matches:
            known = dict.fromkeys(".".join(name.split(".")[:2]) for name in expected)
            raise UserError(
                f"setting ignore_layers: the model has no '{layer}'; use some of "
                f"{', '.join(known)}, or the beginnings or whole names of their weights"
            )
        found |= matches
    return found
