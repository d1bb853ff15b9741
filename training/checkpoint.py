"""A run's checkpoints: saved atomically, loaded without running code, checked against the model and
the settings of the run that continues from them.
"""

import dataclasses
import fcntl
import math
import os
import pickle
import random
import re
import sys
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cli import DISK_FULL, UserError, counted, make_folder, replacing
from hparams import MAY_CHANGE, HParams, create_hparams, format_overrides, quote
from training import distributed
from training.schedule import Fall, last_share

BEST = "checkpoint_best.pt"
VERSION = 1  # of a checkpoint's format: raise it with any change, and name the commit below
READERS = {None: "a6af20b"}  # the last commit that reads checkpoints of another version

# What train.py saves, and needs to continue exactly where it stopped.
STATE = ("version", "state_dict", "optimizer", "progress", "random_states", "hparams", "data")

# Layers that torchaudio names without the level that NVIDIA's ConvNorm and LinearNorm add.
PLAIN_LAYERS = {
    ".conv": r"convolutions\.\d+\.0|location_conv",
    ".linear_layer": r"prenet\.layers\.\d+|query_layer|memory_layer|attention_layer\.v|"
    "location_dense|linear_projection|gate_layer",
}


class OtherVersion(UserError):
    """A checkpoint of another version of this recipe."""


@dataclasses.dataclass
class Progress:
    """How far a run has come, counted between two of its batches."""

    epoch: int = 0  # epochs done
    batch: int = 0  # batches done in this epoch
    step: int = 0  # optimizer steps done
    bad_steps: int = 0  # the latest steps in a row that were skipped
    best_loss: float = math.inf  # lowest validation loss so far
    best_alignment: float = 0.0  # highest validation diagonality so far
    metrics_size: int = 0  # size of metrics.jsonl in bytes
    seconds: float = 0.0  # of training, with validating and saving, without breaks
    epoch_seconds: list[float] = dataclasses.field(default_factory=list)  # training each epoch
    falls_from: float = math.inf  # position where the learning rate begins to fall, once known
    end: float = math.inf  # epochs of the whole run, once known
    peak_memory_gib: float = 0.0  # of this epoch
    sums: dict[str, float] = dataclasses.field(default_factory=dict)  # of this epoch

    def add(self, **values: float) -> None:
        """Adds to the sums of this epoch."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def next_epoch(self) -> "Progress":
        """Returns the progress at the start of the next epoch."""
        times = [*self.epoch_seconds, self.sums["seconds"]]
        return dataclasses.replace(
            self, epoch=self.epoch + 1, batch=0, epoch_seconds=times, peak_memory_gib=0.0, sums={}
        )

    @property
    def fall(self) -> Fall:
        """The last part of the run, in which the learning rate falls."""
        return Fall(self.falls_from, self.end)

    def plan_fall(self, fall: Fall) -> None:
        self.falls_from, self.end = fall


# A run's folder


def checkpoints(folder: Path) -> list[Path]:
    """Returns a run's checkpoints without the best, newest first."""
    numbered = [path for path in folder.glob("*.pt") if re.fullmatch(r"checkpoint_\d+", path.stem)]
    return sorted(numbered, key=lambda path: int(path.stem.split("_")[1]), reverse=True)


def checkpoint_file(path: str | Path) -> Path:
    """Returns the newest checkpoint of a run if ``path`` is its folder, or the best if it has no
    other; else ``path``."""
    path = Path(path)
    return next(iter([*checkpoints(path), *path.glob(BEST), path]))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes a run's folder and locks it until the context or the process ends, even if killed.

    Raises:
        UserError: another process holds the lock, or the folder cannot be written or locked.
    """
    is_new = not folder.exists()
    make_folder(folder, "give another -o")
    with open(folder / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            process = f"process {file.read() or '(just started)'}"
            raise UserError(
                f"{folder}: in use by {process}; wait for its end, or give another -o"
            ) from None
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be locked ({error.strerror}); use a folder on another disk"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        for part in folder.glob("checkpoint_*.part"):  # of a killed process
            part.unlink()
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == ["lock"]:  # no run began
                (folder / "lock").unlink()
                if is_new:
                    folder.rmdir()


def save(folder: Path, step: int, state: dict[str, Any], is_best: bool, n_kept: int) -> Path:
    """Saves the checkpoint of ``step``, also as the best if it is, and deletes all but the newest
    ``n_kept`` and the best. Returns its path. Of several processes, rank 0 saves, and the others
    wait.
    """
    path = folder / f"checkpoint_{step:08d}.pt"
    if distributed.RANK == 0:
        if is_best:  # first: if killed in between, the run validates and saves both again
            save_checkpoint(folder / BEST, state)
        save_checkpoint(path, state)
        for old in checkpoints(folder)[n_kept:]:
            old.unlink()
    distributed.barrier()
    return path


def load_newest(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Returns a run's newest undamaged checkpoint and its state, or (None, {}) if it has none.

    Damaged ones are reported and left alone. The best one is used if all others are damaged.

    Raises:
        UserError: every checkpoint is damaged.
    """
    problems = []
    numbered = checkpoints(folder)
    for path in [*numbered, *sorted(set(folder.glob("checkpoint_*.pt")) - set(numbered))]:
        try:
            state = load_checkpoint(path)
        except OtherVersion:
            raise
        except UserError as error:
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
    for path in takewhile(lambda path: path != newest, checkpoints(folder)):
        path.rename(f"{path}.damaged")


# A checkpoint


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes ``state`` to ``path``, which is the old file or the complete new one at any time.

    PyTorch stores a CRC-32 of every tensor, and :func:`load_checkpoint` checks it.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    try:
        with replacing(path) as file:
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
    """Returns the state that train.py, NVIDIA's code (both repositories) or torchaudio's saved in
    ``path``, with the weights by our names and tensors on the CPU.

    Raises:
        UserError: the file does not exist, is no checkpoint, is damaged, or holds Python code,
            which is never run.
    """
    if path.is_dir():
        raise UserError(f"{path}: a folder without checkpoints; name that of a run, or a file")
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; name one that train.py saved")
    try:
        if zipfile.is_zipfile(path):  # torch does not check the checksums
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged:
                raise ValueError(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises all kinds of errors on what is no checkpoint
        code = re.search(r"GLOBAL (\S*)", str(error))
        if code and isinstance(error, pickle.UnpicklingError):
            raise UserError(
                f"{path}: holds Python code ({code[1]}), not only weights; it was not run; use a "
                "checkpoint from a source that you trust"
            ) from None
        raise UserError(
            f"{path}: not a checkpoint, or damaged ({type(error).__name__}); use another file"
        ) from None
    if _are_weights(state) and state:  # alone, as torchaudio publishes them
        state = {"state_dict": state}
    if not isinstance(state, dict) or not _are_weights(state.get("state_dict")):
        raise UserError(
            f"{path}: has no 'state_dict' of weights; name a checkpoint that train.py, NVIDIA's "
            "code or torchaudio's saved"
        )
    if "hparams" in state and (version := state.get("version")) != VERSION:
        reader = READERS.get(version)
        fix = f"git checkout {reader} reads it" if reader else "use a newer copy of this code"
        raise OtherVersion(f"{path}: its version is {version}, not {VERSION}; {fix}")
    return _by_our_names(state)


def _are_weights(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(weight, torch.Tensor) for name, weight in value.items()
    )


def _by_our_names(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint with NVIDIA's names, whether its names start with
    DistributedDataParallel's "module." or are torchaudio's."""
    weights = state["state_dict"]
    if all(name.startswith("module.") for name in weights):
        weights = {name.removeprefix("module."): weight for name, weight in weights.items()}
    if "hparams" not in state:  # not of a model here, which someone may have changed
        for level, layers in PLAIN_LAYERS.items():
            pattern = re.compile(rf"(?:{layers})(?=\.(?:weight|bias)$)")
            weights = {pattern.sub(rf"\g<0>{level}", name): w for name, w in weights.items()}
    return state | {"state_dict": weights}


def load_weights(
    model: nn.Module, state: dict[str, Any], path: Path, ignore_layers: Iterable[str] | None = None
) -> None:
    """Loads a checkpoint's weights into ``model``.

    Args:
        ignore_layers: weights to leave as they are in ``model`` (warm start), by name or by the
            beginning of their names: "decoder" is all of the decoder.

    Raises:
        UserError: a weight is missing, unknown or of another shape, or ``ignore_layers`` names
            no weight.
    """
    expected, saved = model.state_dict(), state["state_dict"]
    ignored = set()
    for layer in ignore_layers or ():
        matches = {name for name in {*expected, *saved} if f"{name}.".startswith(f"{layer}.")}
        if not matches:
            layers = dict.fromkeys(".".join(name.split(".")[:2]) for name in expected)
            raise UserError(
                f"setting ignore_layers: the model has no '{layer}'; use some of "
                f"{', '.join(layers)}, or the beginnings or whole names of their weights"
            )
        ignored |= matches
    loaded = {name: weight for name, weight in saved.items() if name not in ignored}
    loaded |= {name: weight for name, weight in expected.items() if name in ignored}
    differences = {}
    for name in {**expected, **loaded}:
        shape, old_shape = (
            tuple(weights[name].shape) if name in weights else "absent"
            for weights in (expected, loaded)
        )
        if shape != old_shape:
            differences[name] = f"{name} is {old_shape} in the checkpoint, {shape} in this model"
    if differences:
        n_more = len(differences) - 1
        more = f" (and {counted(n_more, 'more weight')})" if n_more else ""
        layers = dict.fromkeys(name.rpartition(".")[0] for name in differences)
        without = format_overrides({"ignore_layers": (*(ignore_layers or ()), *layers)})
        others = f"train from its other weights by -c, --warm_start and --hparams '{without}'"
        if ignore_layers is not None:
            fix = f"leave them out by --hparams '{without}'"
        elif list(differences) == ["embedding.weight"] and "embedding.weight" in loaded:
            fix = f"it reads other symbols: set them (symbols), or {others}"
        else:
            fix = f"use the settings that it was trained with, or {others}"
        first, *_ = differences.values()
        raise UserError(f"{path}: the checkpoint of another model: {first}{more}; {fix}")
    model.load_state_dict(loaded)


# The settings and clips of a run that starts from a checkpoint


def saved_hparams(state: dict[str, Any], path: Path) -> HParams:
    """Returns the settings saved in a checkpoint, with defaults for those it lacks.

    Raises:
        UserError: it has settings that are unknown here.
    """
    if unknown := state["hparams"].keys() - {field.name for field in dataclasses.fields(HParams)}:
        raise UserError(
            f"{path}: has unknown settings ({', '.join(sorted(unknown))}); use the code that "
            "saved it"
        )
    return HParams(**state["hparams"])


def hparams_to_resume(
    state: dict[str, Any], path: Path, overrides: str, preset: str | None
) -> HParams:
    """Returns the settings of the run that saved the checkpoint, with ``overrides`` of those that
    may change.

    Raises:
        UserError: the checkpoint is incomplete, or the overrides would make another run.
    """
    if missing := [name for name in STATE if name not in state]:
        raise UserError(f"{path}: has no {', '.join(missing)}; start from its weights by -c")
    saved = saved_hparams(state, path)
    hparams = create_hparams(overrides, preset, saved)
    changed = [
        f"{name} is {quote(before)} in the run, {quote(now)} in this call"
        for name, (before, now) in _changes(saved, hparams).items()
        if name not in MAY_CHANGE
    ]
    if changed:
        raise UserError(
            f"{path}: {'; '.join(changed)}; leave {'it' if len(changed) == 1 else 'them'} out, "
            "or start another run, by -c and another -o"
        )
    if (hparams.epochs, hparams.hours) != (saved.epochs, saved.hours):
        refuse_another_fall(state, path, hparams)
    return hparams


def refuse_another_fall(state: dict[str, Any], path: Path, hparams: HParams) -> None:
    """Raises :class:`UserError` if the run cannot get the end that ``hparams`` give it: its
    learning rate falls already, or would have had to begin; or the hours are over."""
    progress, share = Progress(**state["progress"]), hparams.learning_rate_decay
    name = "hours" if hparams.hours else "epochs"
    problem = f"{path}: {name}={getattr(hparams, name):g}"
    done = progress.epoch + bool(progress.batch)
    if share and done > progress.falls_from:
        raise UserError(
            f"{problem}: comes too late, since the learning rate has begun to fall, to 0 after "
            f"{counted(int(progress.end), 'epoch')}; leave {name} out, or start another run by -c "
            "and another -o"
        )
    if hparams.hours:
        if 3600 * hparams.hours <= progress.seconds:
            used = math.ceil(progress.seconds / 36) / 100
            raise UserError(f"{problem}: {used:g} hours are over; use more, or leave {name} out")
    elif share and done > last_share(hparams.epochs, share).start:
        enough = next(n for n in count(done) if last_share(n, share).start >= done)
        raise UserError(
            f"{problem}: the learning rate would have begun to fall by now; use {enough} or more"
        )


def hparams_to_continue(
    state: dict[str, Any], path: Path, overrides: str, preset: str | None, warm_start: bool
) -> HParams:
    """Returns the settings of another run that starts from a checkpoint: those of the checkpoint,
    or of ``preset`` if it has none, with ``overrides``. Prints what they change.

    Raises:
        UserError: there are neither settings nor a preset, or both; or the symbols change, and it
            is no warm start that leaves out the embedding.
    """
    if "hparams" not in state:  # as in NVIDIA's checkpoints and torchaudio's
        if preset is None:
            raise UserError(
                f"{path}: has no settings in it; name those of its mels: --preset nvidia for "
                "NVIDIA's checkpoints and torchaudio's for Griffin-Lim, or --preset paper"
            )
        return create_hparams(overrides, preset)
    if preset:
        fix = "leave it out, or name what to change in --hparams"
        raise UserError(f"--preset {preset}: {path} has settings of its own; {fix}")
    saved = saved_hparams(state, path)
    hparams = create_hparams(overrides, base=saved)
    changes = _changes(saved, hparams)
    left_out = {*hparams.ignore_layers} if warm_start else set()
    if "symbols" in changes and left_out.isdisjoint({"embedding", "embedding.weight"}):
        raise UserError(
            f"setting symbols: {path} has an embedding for other ones; leave the setting out, or "
            "take the other weights: --warm_start with embedding.weight in ignore_layers"
        )
    changed = [f"{n}={quote(now)} (was {quote(before)})" for n, (before, now) in changes.items()]
    print(f"settings of {path}" + (f", but {', '.join(changed)}" if changed else ""))
    return hparams


def _changes(before: HParams, now: HParams) -> dict[str, tuple[Any, Any]]:
    """Returns the settings that differ, with both values."""
    old, new = dataclasses.asdict(before), dataclasses.asdict(now)
    return {name: (old[name], new[name]) for name in old if old[name] != new[name]}


def refuse_other_processes(state: dict[str, Any], progress: Progress, path: Path) -> None:
    """Raises :class:`UserError` if another number of processes began the epoch that goes on."""
    n = len(state["random_states"])
    if progress.batch and n != distributed.WORLD_SIZE:
        raise UserError(
            f"{path}: was saved by {n} process{'es' * (n > 1)} within epoch {progress.epoch + 1}, "
            f"now there are {distributed.WORLD_SIZE}; use torchrun --nproc_per_node={n}, or start "
            "another run by -c, at the start of that epoch, with another -o"
        )


# Random generators


def random_state() -> dict[str, Any]:
    """Returns the state of every random generator: Python's, NumPy's and torch's."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def start_random_state(checkpoint: dict[str, Any], seed: int) -> None:
    """Restores this process's random generators from a checkpoint that has them. Without, each of
    several processes gets other random numbers, so that each drops other units."""
    random_states = checkpoint.get("random_states", [])
    if len(random_states) > distributed.RANK:
        set_random_state(random_states[distributed.RANK])
    elif distributed.SEVERAL:
        torch.manual_seed(seed + distributed.RANK)


def set_random_state(state: dict[str, Any]) -> None:
    """Restores a state saved by :func:`random_state`."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["cpu"])
    if state.get("cuda") is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# What a run starts from


def find_start(
    folder: Path,
    source: Path | None,
    overrides: str,
    preset: str | None,
    resume: bool,
    warm_start: bool,
) -> tuple[Path | None, dict[str, Any], HParams, Progress]:
    """Returns where a run starts: its checkpoint, the state to restore from it, the settings and
    the progress. A new run has no checkpoint, None, and no state, {}.

    Only the weights are taken in a warm start, or from a checkpoint that train.py did not save.
    With another seed the random state stays behind.

    Raises:
        UserError: the folder already holds a run, or none to resume, or one without checkpoints;
            the checkpoint is damaged, or does not go with the settings.
    """
    newest, state = load_newest(folder) if resume else (None, {})
    if newest:
        hparams = hparams_to_resume(state, newest, overrides, preset)
        progress = Progress(**state["progress"])
        if hparams.hours != state["hparams"].get("hours"):
            progress.plan_fall(Fall())
        return newest, state, hparams, _with_end(progress, hparams)
    metrics = folder / "metrics.jsonl"
    if [*folder.glob("checkpoint_*.pt")] or (metrics.exists() and metrics.stat().st_size):
        if resume:
            raise UserError(
                f"{folder}: has the records of a run, but no checkpoint to go on from; restore "
                "one, or give another -o"
            )
        raise UserError(f"{folder}: holds a run; --resume it, or give another -o")
    if resume and not (overrides or preset):
        raise UserError(
            f"{folder}: holds no run to resume, or one stopped before its first checkpoint; give "
            "the command that starts it"
        )
    if resume:
        print(f"{folder}: holds no run yet; starting one")
    if not source:
        hparams = create_hparams(overrides, preset)
        return None, {}, hparams, _with_end(Progress(), hparams)

    state = load_checkpoint(source)
    hparams = hparams_to_continue(state, source, overrides, preset, warm_start)
    if not warm_start:
        if all(name in state for name in STATE):
            saved = Progress(**state["progress"])  # the settings may change the rest of its epoch
            if saved.epoch >= hparams.epochs and not hparams.hours:
                raise UserError(
                    f"{source}: has {counted(saved.epoch, 'epoch')}; set epochs={saved.epoch + 1} "
                    "or more, or take its weights by --warm_start"
                )
            if hparams.seed != state["hparams"]["seed"]:
                del state["random_states"]
            progress = Progress(epoch=saved.epoch, step=saved.step)
            return source, state, hparams, _with_end(progress, hparams)
        print(f"note: {source}: has weights but no training state; starting at epoch 1")
    return source, {"state_dict": state["state_dict"]}, hparams, _with_end(Progress(), hparams)


def _with_end(progress: Progress, hparams: HParams) -> Progress:
    """Plans the end of a run of so many epochs. That of a run of so many hours is decided in it."""
    if not hparams.hours:
        progress.plan_fall(last_share(hparams.epochs, hparams.learning_rate_decay))
    return progress
