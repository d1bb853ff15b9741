"""Time what a checkpoint of the full model costs: a safe save, a plain one, and loading.

python benchmarks/bench_checkpoint.py --folder runs
"""

import sys
import tempfile
from functools import partial
from pathlib import Path
from timeit import timeit

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoint import load_checkpoint, random_state, save_checkpoint
from cli import ArgumentParser, exit_on_user_error, positive
from device import choose_device
from files import make_folder
from hparams import HParams
from model import Tacotron2


def main() -> None:
    parser = ArgumentParser(description="Time what a checkpoint of the full model costs.")
    parser.add_argument("--folder", type=Path, default=Path(), help="folder on the disk to test")
    parser.add_argument("--repeats", type=positive, default=7, help="(default %(default)s)")
    args = parser.parse_args()
    make_folder(args.folder)
    model = Tacotron2(HParams()).to(choose_device(HParams()))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes Adam's moments
    states = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    state = {**states, "random_state": random_state()}

    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        plain, safe = Path(name, "plain.pt"), Path(name, "safe.pt")
        save, load = partial(save_checkpoint, safe, state), partial(load_checkpoint, safe)
        calls = partial(torch.save, state, plain), save, load
        rounds = [[timeit(call, number=1) for call in calls] for _ in range(args.repeats)]
        size = f"{safe.stat().st_size / 1e6:.0f} MB"
    unsafe, save, load = np.median(rounds, axis=0)
    minutes = HParams.checkpoint_minutes
    print(f"{size}, medians of {args.repeats}: saved in {save:.2f} s, loaded in {load:.2f} s")
    print(f"{save / unsafe:.2f} times as long as a plain torch.save, which takes {unsafe:.2f} s")
    print(f"one every {minutes:g} minutes is {save / (60 * minutes):.2%} of the time")


if __name__ == "__main__":
    exit_on_user_error(main)
