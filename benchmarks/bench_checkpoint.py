"""What checkpoints cost: a safe save beside a plain one, and its share of the training time.

python benchmarks/bench_checkpoint.py --folder runs
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoint import load_checkpoint, random_state, save_checkpoint
from cli import ArgumentParser, exit_on_user_error
from device import choose_device, synchronize
from hparams import create_hparams
from model import Tacotron2


def main() -> None:
    parser = ArgumentParser(description="What checkpoints of the full model cost.")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--repeats", type=int, default=7, help="(default %(default)s)")
    args = parser.parse_args()
    hparams = create_hparams()
    device = choose_device(hparams)
    model = Tacotron2(hparams).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # Adam's moments are there from the first step on

    def state() -> dict:
        return {
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random_state": random_state(),
        }

    times: dict[str, list[float]] = {"plain torch.save": [], "save_checkpoint": [], "load": []}

    def timed(name: str, do: Callable[[], object]) -> None:
        synchronize(device)
        started = time.perf_counter()
        do()
        times[name].append(time.perf_counter() - started)

    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        path = Path(name, "checkpoint.pt")
        for _ in range(args.repeats):
            timed("plain torch.save", lambda: torch.save(state(), Path(name, "plain.pt")))
            timed("save_checkpoint", lambda: save_checkpoint(path, state()))
            timed("load", lambda: load_checkpoint(path))
        size = path.stat().st_size / 1e6
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in median.items():
        print(f"{name:<17} {seconds:6.2f} s  ({size:.0f} MB, median of {args.repeats})")
    ratio = median["save_checkpoint"] / median["plain torch.save"]
    share = median["save_checkpoint"] / (60 * hparams.checkpoint_minutes)
    print(
        f"a safe save takes {ratio:.2f} times as long as a plain one; one every "
        f"{hparams.checkpoint_minutes:g} minutes is {share:.2%} of the time"
    )


if __name__ == "__main__":
    exit_on_user_error(main)
