"""Time what a checkpoint of the full model costs: a safe save, a plain one, and loading.

python benchmarks/bench_checkpoint.py --folder runs
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoint import load_checkpoint, random_state, save_checkpoint
from cli import ArgumentParser, exit_on_user_error, positive
from device import choose_device, synchronize
from files import make_folder
from hparams import HParams
from model import Tacotron2


def main() -> None:
    parser = ArgumentParser(description="Time what a checkpoint of the full model costs.")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--repeats", type=positive, default=7, help="(default %(default)s)")
    args = parser.parse_args()
    make_folder(args.folder)
    device = choose_device(HParams())
    model = Tacotron2(HParams()).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes Adam's moments
    state = {"optimizer": optimizer.state_dict(), "random_state": random_state()}
    state["state_dict"] = model.state_dict()

    times = {"plain torch.save": [], "save_checkpoint": [], "load": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        plain, safe = Path(name, "plain.pt"), Path(name, "safe.pt")
        for _ in range(args.repeats):
            functions = (
                lambda: torch.save(state, plain),
                lambda: save_checkpoint(safe, state),
                lambda: load_checkpoint(safe),
            )
            for taken, function in zip(times.values(), functions, strict=True):
                synchronize(device)
                started = time.perf_counter()
                function()
                taken.append(time.perf_counter() - started)
        megabytes = safe.stat().st_size / 1e6
    medians = {name: median(taken) for name, taken in times.items()}
    for name, seconds in medians.items():
        print(f"{name:<17} {seconds:6.2f} s  ({megabytes:.0f} MB, median of {args.repeats})")
    save, minutes = medians["save_checkpoint"], HParams.checkpoint_minutes
    print(
        f"a safe save takes {save / medians['plain torch.save']:.2f} times as long as a plain one; "
        f"one every {minutes:g} minutes is {save / (60 * minutes):.2%} of the time"
    )


if __name__ == "__main__":
    exit_on_user_error(main)
