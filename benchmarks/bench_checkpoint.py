"""Time what a checkpoint of the full model costs: a safe save, a plain one, and loading."""

import sys
import tempfile
from functools import partial
from pathlib import Path
from timeit import timeit

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_step import Trainer
from checkpoint import load_checkpoint, random_state, save_checkpoint
from cli import ArgumentParser, exit_on_user_error
from files import make_folder
from hparams import HParams


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(), help="folder on the disk to test")
    folder = parser.parse_args().folder
    make_folder(folder)
    trainer = Trainer("scan", update=True)
    trainer.step(([2], [8]))  # makes Adam's moments
    state = {"state_dict": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    state["random_state"] = random_state()

    with tempfile.TemporaryDirectory(dir=folder) as name:
        plain, safe = Path(name, "plain.pt"), Path(name, "safe.pt")
        save, load = partial(save_checkpoint, safe, state), partial(load_checkpoint, safe)
        calls = partial(torch.save, state, plain), save, load
        rounds = [[timeit(call, number=1) for call in calls] for _ in range(7)]
        size = safe.stat().st_size / 1e6
    unsafe, save, load = np.median(rounds, axis=0)
    minutes = HParams.checkpoint_minutes
    print(f"{size:.0f} MB, medians of 7: saved in {save:.2f} s, loaded in {load:.2f} s")
    print(f"{save / unsafe:.2f} times as long as a plain torch.save, which takes {unsafe:.2f} s")
    print(f"one every {minutes:g} minutes is {save / (60 * minutes):.2%} of the time")


if __name__ == "__main__":
    exit_on_user_error(main)
