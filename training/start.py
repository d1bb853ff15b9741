"""How a run begins: anew, resumed, continued from another run's checkpoint, or warm-started."""

import dataclasses
import fcntl
import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from cli import UserError, pluralize, make_folder
from data_utils import Data
from hparams import MAY_CHANGE, HParams, create_hparams, quote
from model import Tacotron2
from training import distributed
from training.checkpoint import load_checkpoint, load_newest, saved_hparams
from training.schedule import Fall, Progress, last_share

STATE = ("state_dict", "optimizer", "progress", "random_states", "hparams", "data")


def state_to_save(
    model: Tacotron2, optimizer: Optimizer, progress: Progress, data: Data
) -> dict[str, Any]:
    """Returns STATE, all that a run needs to continue exactly where it is. Several processes call
    this together."""
    return {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": dataclasses.asdict(progress),
        "random_states": distributed.gathered(random_state()),
        "hparams": dataclasses.asdict(model.hparams),
        "data": data.fingerprint,
    }


class Origin(NamedTuple):
    """What a run starts with."""

    hparams: HParams
    progress: Progress
    source: Path | None  # the checkpoint that it starts from
    state: dict[str, Any]  # what is restored from that checkpoint
    ignore_layers: tuple[str, ...] = ()  # layers whose weights are not loaded

    def restore(self, optimizer: Optimizer) -> None:
        """Restores the optimizer's moments and the random generators, if the checkpoint has them.

        If it does not, each of several processes gets other random numbers, so that each drops
        other units. The state is dropped: it is three times as large as the model.
        """
        if "optimizer" in self.state:
            settings = optimizer.state_dict()["param_groups"]  # of this call
            optimizer.load_state_dict(self.state["optimizer"] | {"param_groups": settings})
        random_states = self.state.get("random_states", [])
        if len(random_states) > distributed.RANK:
            set_random_state(random_states[distributed.RANK])
        elif distributed.SEVERAL:
            torch.manual_seed(self.hparams.seed + distributed.RANK)
        self.state.clear()


# A run's folder


@contextmanager
def locked(folder: Path, log_dir: Path | None = None) -> Iterator[IO[str]]:
    """Makes a run's folder and ``log_dir``, and locks the first until the context or the process
    ends, even if killed. Folders that stay empty are removed. Yields the file that is locked: a
    process that inherits it holds the lock too.

    Raises:
        UserError: another process holds the lock, or a folder cannot be written or locked.
    """
    paths = [folder, *folder.parents]
    if log_dir:
        paths += [log_dir, *log_dir.parents]
    missing = [path for path in paths if not path.exists()]
    make_folder(folder, "give another -o")
    with open(folder / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            process = f"process {file.read() or '(just started)'}, or a training that it started"
            raise UserError(
                f"{folder}: in use by {process}; wait for its end, or give another folder"
            ) from None
        except OSError as error:
            _remove_what_is_empty(folder, missing)
            raise UserError(
                f"{folder}: cannot be locked ({error.strerror}); use a folder on another disk"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        for part in folder.glob("checkpoint_*.part"):  # of a killed process
            part.unlink()
        try:
            if log_dir:
                make_folder(log_dir, "give another -l")
            yield file
        finally:
            _remove_what_is_empty(folder, missing)


def _remove_what_is_empty(folder: Path, new: Sequence[Path]) -> None:
    """Removes the lock of a run's folder in which no run began, and ``new`` folders without
    files."""
    if [path.name for path in folder.iterdir()] == ["lock"]:
        (folder / "lock").unlink()
    for path in new:
        with suppress(OSError):  # it has files
            path.rmdir()


# Ways to begin


def is_resumed(folder: Path, resume: bool, has_settings: bool) -> bool:
    """Returns whether a run in ``folder`` is resumed. Changes nothing there.

    Args:
        resume: whether the user asked for that. Without a run in the folder, one begins.
        has_settings: whether the user gave settings, which a run needs to begin.

    Raises:
        UserError: the folder holds a run that is not to be resumed; or a run is to be resumed, and
            there is neither one nor settings for a new one.
    """
    metrics = folder / "metrics.jsonl"
    has_records = metrics.exists() and metrics.stat().st_size > 0
    if has_records or any(folder.glob("checkpoint_*.pt")):
        if not resume:
            raise UserError(f"{folder}: holds a run; --resume it, or give another -o")
        return True
    if resume and not has_settings:
        raise UserError(
            f"{folder}: holds no run to resume, or one stopped before its first checkpoint; give "
            "the command that starts it"
        )
    if resume:
        print(f"{folder}: holds no run yet; starting one")
    return False


def anew(overrides: str, preset: str | None) -> Origin:
    """Starts a run from random weights."""
    hparams = create_hparams(overrides, preset)
    return Origin(hparams, _first_epoch(hparams), None, {})


def resumed(folder: Path, overrides: str, preset: str | None) -> Origin:
    """Continues the run in ``folder`` exactly where its newest undamaged checkpoint was saved.

    Raises:
        UserError: there is no such checkpoint, it is incomplete, or was saved within an epoch by
            another number of processes; or the overrides would make another run.
    """
    source, state = load_newest(folder)
    if not source:
        raise UserError(
            f"{folder}: has the records of a run, but no checkpoint to go on from; restore one, or "
            "give another -o"
        )
    hparams = hparams_to_resume(state, source, overrides, preset)
    progress = Progress(**state["progress"])
    refuse_other_processes(len(state["random_states"]), progress, source)
    refuse_lost_records(folder / "metrics.jsonl", progress.metrics_size)
    if not hparams.hours:
        progress.plan_fall(last_share(hparams.epochs, hparams.learning_rate_decay))
    elif hparams.hours != state["hparams"].get("hours"):
        progress.plan_fall(Fall())  # to be decided again
    return Origin(hparams, progress, source, state)


def continued(source: Path, overrides: str, preset: str | None) -> Origin:
    """Starts another run from a checkpoint, at the start of the epoch that it was saved in. From a
    checkpoint that train.py did not save, it takes the weights, and starts at the first epoch.

    With another seed, the states of the random generators are not taken.

    Raises:
        UserError: see :func:`hparams_from`; or the run already has as many epochs as are set.
    """
    state = load_checkpoint(source)
    hparams = hparams_from(state, source, overrides, preset)
    refuse_other_symbols(state, source, hparams)
    if not all(name in state for name in STATE):
        print(f"note: {source}: has weights but no training state; starting at epoch 1")
        return Origin(hparams, _first_epoch(hparams), source, {"state_dict": state["state_dict"]})
    saved = Progress(**state["progress"])
    if saved.epoch >= hparams.epochs and not hparams.hours:
        raise UserError(
            f"{source}: has {pluralize(saved.epoch, 'epoch')}; set epochs={saved.epoch + 1} or more, "
            "or take its weights by --warm_start"
        )
    if hparams.seed != state["hparams"]["seed"]:
        del state["random_states"]
    # The rest of the epoch is not taken: the settings may change its batches.
    progress = dataclasses.replace(_first_epoch(hparams), epoch=saved.epoch, step=saved.step)
    return Origin(hparams, progress, source, state)


def warm_started(source: Path, overrides: str, preset: str | None) -> Origin:
    """Starts another run at the first epoch with a checkpoint's settings and its weights, except
    ``ignore_layers``.

    Raises:
        UserError: see :func:`hparams_from`.
    """
    state = load_checkpoint(source)
    hparams = hparams_from(state, source, overrides, preset)
    ignored = hparams.ignore_layers
    if {"embedding", "embedding.weight"}.isdisjoint(ignored):
        refuse_other_symbols(state, source, hparams)
    if ignored:
        print(f"note: --warm_start does not load {', '.join(ignored)} (ignore_layers)")
    weights = {"state_dict": state["state_dict"]}
    return Origin(hparams, _first_epoch(hparams), source, weights, ignored)


def _first_epoch(hparams: HParams) -> Progress:
    """Returns the progress of a run that begins. The end of a run of so many epochs is known; that
    of a run of so many hours is decided while it trains."""
    progress = Progress()
    if not hparams.hours:
        progress.plan_fall(last_share(hparams.epochs, hparams.learning_rate_decay))
    return progress


# The settings of a run that starts from a checkpoint


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
    """Raises :class:`UserError` if ``hparams`` change the end of a run too late: its learning rate
    has begun to fall, or would have had to begin, or the hours are over."""
    progress, share = Progress(**state["progress"]), hparams.learning_rate_decay
    name = "hours" if hparams.hours else "epochs"
    problem = f"{path}: {name}={getattr(hparams, name):g}"
    done = progress.epoch + bool(progress.batch)
    if share and done > progress.falls_from:
        raise UserError(
            f"{problem}: comes too late, since the learning rate has begun to fall, to 0 after "
            f"{pluralize(int(progress.end), 'epoch')}; leave {name} out, or start another run by -c "
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


def refuse_other_processes(n_processes: int, progress: Progress, path: Path) -> None:
    """Raises :class:`UserError` if ``n_processes`` began the epoch that goes on, and another number
    would end it."""
    if progress.batch and n_processes != distributed.WORLD_SIZE:
        raise UserError(
            f"{path}: was saved by {pluralize(n_processes, 'process', 'es')} within epoch "
            f"{progress.epoch + 1}, now there are {distributed.WORLD_SIZE}; use torchrun "
            f"--nproc_per_node={n_processes}, or start another run by -c, at the start of that "
            "epoch, with another -o"
        )


def refuse_lost_records(metrics: Path, size: int) -> None:
    """Raises :class:`UserError` if ``metrics`` is shorter than the ``size`` in bytes that it had
    when the checkpoint was saved."""
    if (now := metrics.stat().st_size if metrics.exists() else 0) < size:
        raise UserError(
            f"{metrics}: has {now:,} bytes, but had {size:,} when the checkpoint was saved; "
            "restore the missing lines, or start another run from it by -c, with another -o"
        )


def hparams_from(state: dict[str, Any], path: Path, overrides: str, preset: str | None) -> HParams:
    """Returns the settings of another run that starts from a checkpoint: those of the checkpoint,
    or of ``preset`` if it has none, with ``overrides``. Prints what they change.

    Raises:
        UserError: there are neither settings nor a preset, or both.
    """
    if "hparams" not in state:  # as in NVIDIA's checkpoints
        if preset is None:
            raise UserError(
                f"{path}: has no settings in it; name those of its mels: --preset nvidia for "
                "NVIDIA's checkpoints, or --preset paper"
            )
        return create_hparams(overrides, preset)
    if preset:
        raise UserError(
            f"--preset {preset}: {path} has settings of its own; leave it out, or name what to "
            "change in --hparams"
        )
    saved = saved_hparams(state, path)
    hparams = create_hparams(overrides, base=saved)
    changes = [
        f"{name}={quote(now)} (was {quote(before)})"
        for name, (before, now) in _changes(saved, hparams).items()
    ]
    print(f"settings of {path}" + (f", but {', '.join(changes)}" if changes else ""))
    return hparams


def refuse_other_symbols(state: dict[str, Any], path: Path, hparams: HParams) -> None:
    """Raises :class:`UserError` if the checkpoint's embedding is for other symbols."""
    if "hparams" in state and saved_hparams(state, path).symbols != hparams.symbols:
        raise UserError(
            f"setting symbols: {path} has an embedding for other ones; leave the setting out, or "
            "take the other weights: --warm_start with embedding.weight in ignore_layers"
        )


def _changes(before: HParams, now: HParams) -> dict[str, tuple[Any, Any]]:
    """Returns the settings that differ, with both values."""
    old, new = dataclasses.asdict(before), dataclasses.asdict(now)
    return {name: (old[name], new[name]) for name in old if old[name] != new[name]}


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


def set_random_state(state: dict[str, Any]) -> None:
    """Restores a state saved by :func:`random_state`."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["cpu"])
    if state.get("cuda") is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
