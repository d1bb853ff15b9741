"""How a run begins: anew, resumed, or from another run's checkpoint."""

import dataclasses
import fcntl
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from cli import UserError, make_folder, pluralize
from data_utils import Data
from hparams import MAY_CHANGE, HParams, create_hparams, quote
from model import Tacotron2
from training import distributed
from training.checkpoint import load_checkpoint, load_newest, rebuild
from training.schedule import Progress, plan_epochs

STATE = ("state_dict", "optimizer", "progress", "random_states", "hparams", "data")


def state_to_save(
    model: Tacotron2, optimizer: Optimizer, progress: Progress, data: Data
) -> dict[str, Any]:
    """Returns STATE, all that a run needs to continue exactly. Processes call this together."""
    return {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": dataclasses.asdict(progress),
        "random_states": distributed.gather(random_state()),
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
        If not, each of several processes draws other numbers, so that each drops other units."""
        if "optimizer" in self.state:
            settings = optimizer.state_dict()["param_groups"]  # of this call
            optimizer.load_state_dict(self.state["optimizer"] | {"param_groups": settings})
        random_states = self.state.get("random_states", [])
        if len(random_states) > distributed.RANK:
            set_random_state(random_states[distributed.RANK])
        elif distributed.SEVERAL:
            torch.manual_seed(self.hparams.seed + distributed.RANK)
        self.state.clear()  # it is three times as large as the model


# A run's folder


@contextmanager
def lock(folder: Path, log_dir: Path | None) -> Iterator[None]:
    """Makes a run's folder and ``log_dir``, and locks the first until the context or the process
    ends, even if killed. Raises :class:`UserError` if another process holds the lock, or a folder
    cannot be written or locked."""
    make_folder(folder, "give another -o")
    if log_dir:
        make_folder(log_dir, "give another -l")
    with open(folder / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            problem = f"{folder}: in use by process {file.read() or '(just started)'}"
            raise UserError(f"{problem}; wait for its end, or give another -o") from None
        except OSError as error:
            problem = f"{folder}: cannot be locked ({error.strerror})"
            raise UserError(f"{problem}; use a folder on another disk") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        for part in folder.glob("*.part"):  # of a killed process
            part.unlink()
        yield


def holds_run(folder: Path) -> bool:
    """Returns whether a run has begun in ``folder``."""
    metrics = folder / "metrics.jsonl"
    return any(folder.glob("checkpoint_*.pt")) or (metrics.exists() and metrics.stat().st_size > 0)


# Ways to begin


def start_anew(overrides: str, preset: str | None) -> Origin:
    """Starts a run from random weights."""
    hparams = create_hparams(overrides, preset)
    progress = Progress()
    progress.plan_fall(plan_epochs(hparams))
    return Origin(hparams, progress, None, {})


def start_from(source: Path, warm: bool, overrides: str, preset: str | None) -> Origin:
    """Starts another run from a checkpoint, with its settings, at the start of the epoch that it
    was saved in: other settings may change the rest of its batches. If ``warm``, or if train.py did
    not save it, it gives its weights alone. With another seed, random states are not taken.
    """
    state = load_checkpoint(source)
    saved = rebuild(HParams, state["hparams"], source) if "hparams" in state else None
    if saved and preset:
        raise UserError(f"--preset {preset}: {source} has settings of its own; use --hparams")
    if not (saved or preset):
        fix = "--preset nvidia for NVIDIA's checkpoints, or --preset paper"
        raise UserError(f"{source}: has no settings in it; name those of its mels: {fix}")
    hparams = create_hparams(overrides, preset, saved)
    if saved:
        changes = [f"{name}={now} (was {was})" for name, was, now in find_changes(saved, hparams)]
        print(f"settings of {source}" + (f", but {', '.join(changes)}" if changes else ""))

    progress, restored = Progress(), {"state_dict": state["state_dict"]}
    if not warm and all(name in state for name in STATE):
        before, restored = rebuild(Progress, state["progress"], source), state
        progress = Progress(epoch=before.epoch, first_epoch=before.epoch, step=before.step)
        if hparams.seed != saved.seed:
            del state["random_states"]
    if not hparams.hours and hparams.epochs <= progress.epoch:
        fix = f"set epochs={progress.epoch + 1} or more, or take its weights by --warm_start"
        raise UserError(f"{source}: has {pluralize(progress.epoch, 'epoch')}; {fix}")
    progress.plan_fall(plan_epochs(hparams))

    ignored = hparams.ignore_layers if warm else ()
    has_symbols = {"embedding", "embedding.weight"}.isdisjoint(ignored)
    if saved and has_symbols and saved.symbols != hparams.symbols:
        fix = "leave the setting out, or use --warm_start with embedding.weight in ignore_layers"
        raise UserError(f"setting symbols: {source} has an embedding for other ones; {fix}")
    if ignored:
        print(f"note: --warm_start does not load {', '.join(ignored)} (ignore_layers)")
    return Origin(hparams, progress, source, restored, ignored)


def resume(folder: Path, overrides: str, preset: str | None) -> Origin:
    """Continues the run in ``folder`` exactly where its newest undamaged checkpoint was saved.

    Raises:
        UserError: there is none, or ``overrides`` or the number of processes would make another
            run.
    """
    source, state = load_newest(folder)
    if not source:
        raise UserError(f"{folder}: has no whole checkpoint left; restore one, or give another -o")
    if missing := [name for name in STATE if name not in state]:
        raise UserError(f"{source}: has no {', '.join(missing)}; start from its weights by -c")
    saved = rebuild(HParams, state["hparams"], source)
    progress = rebuild(Progress, state["progress"], source)
    hparams = create_hparams(overrides, preset, saved)
    changes = [
        f"{name} is {was} in the run, {now} in this call"
        for name, was, now in find_changes(saved, hparams)
        if name not in MAY_CHANGE
    ]
    another_run = "start another run by -c and another -o"
    if changes:
        raise UserError(f"{source}: {'; '.join(changes)}; leave that out, or {another_run}")
    n_processes = len(state["random_states"])
    if progress.batch and n_processes != distributed.WORLD_SIZE:
        raise UserError(
            f"{source}: was saved by {pluralize(n_processes, 'process', 'es')} within epoch "
            f"{progress.epoch + 1}, now there are {distributed.WORLD_SIZE}; use torchrun "
            f"--nproc_per_node={n_processes}, or {another_run}"
        )
    metrics = folder / "metrics.jsonl"
    if (size := metrics.stat().st_size if metrics.exists() else 0) < progress.metrics_size:
        raise UserError(
            f"{metrics}: has {size:,} bytes, but had {progress.metrics_size:,} when the checkpoint "
            f"was saved; restore the missing lines, or {another_run}"
        )
    if (hparams.epochs, hparams.hours) != (saved.epochs, saved.hours):
        check_end(hparams, progress, source)
        progress.plan_fall(plan_epochs(hparams))
    return Origin(hparams, progress, source, state)


def find_changes(before: HParams, now: HParams) -> list[tuple[str, str, str]]:
    """Returns the settings that differ: their names, and both values."""
    old, new = dataclasses.asdict(before), dataclasses.asdict(now)
    return [(name, quote(old[name]), quote(new[name])) for name in old if old[name] != new[name]]


def check_end(hparams: HParams, progress: Progress, path: Path) -> None:
    """Raises :class:`UserError` if the end that ``hparams`` set comes too late: the learning rate
    has begun to fall, or would have had to begin by now."""
    name = "hours" if hparams.hours else "epochs"
    falls_from = min(progress.falls_from, plan_epochs(hparams).start)
    has_begun = progress.epoch + bool(progress.batch) > falls_from
    if hparams.learning_rate_decay and has_begun:
        raise UserError(
            f"{path}: {name}={getattr(hparams, name):g}: comes too late, since by now the learning "
            f"rate has begun to fall, or would have; leave {name} out, or start another run by -c"
        )


# Random generators


def random_state() -> dict[str, Any]:
    """Returns the state of every random generator: Python's, NumPy's and torch's."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restores a state saved by :func:`random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
