"""Find the largest batch capacity (DBS) that fits a GPU's memory, or a CPU's.

    python scripts/find_batch_capacity.py --hparams data_dir=data/LJSpeech-1.1

takes train.py's settings. Each trial is a process of its own: forward and backward of the largest
batches that all epochs of a run would have.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from data_utils import load_data
from hparams import create_hparams
from training import memory


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--hparams", default="", metavar="NAME=VALUE,...", help="settings of the run")
    add("--preset", default="paper", help="settings preset (default %(default)s)")
    limit = "GiB to use (default: the GPU's, or the free memory; ignores a container's limit)"
    add("--memory_gib", type=float, help=limit)
    error = "relative error allowed (default %(default)s)"
    add("--tolerance", type=float, default=0.03, help=error)
    args = parser.parse_args()
    if args.memory_gib is not None and not 0 < args.memory_gib < 1e6:
        raise UserError(f"--memory_gib {args.memory_gib}: use a number above 0")
    if not 0 < args.tolerance < 1:
        raise UserError(f"--tolerance {args.tolerance}: use a number between 0 and 1")
    hparams = create_hparams(args.hparams, args.preset)
    if not hparams.dynamic_batch_size:
        raise UserError("setting dynamic_batch_size=False: batches have no capacity; leave it out")
    if not torch.cuda.is_available() and sys.platform != "linux":
        raise UserError("no GPU found, and without one this needs Linux; use a GPU")
    clips, _ = load_data(hparams)
    capacity = memory.find_capacity(clips, hparams, args.memory_gib, args.tolerance)
    if capacity is None:
        print("all clips fit in one batch: memory sets no limit here, so keep the default capacity")
    else:
        seconds = capacity * hparams.hop_length / hparams.sampling_rate
        print(f"the most that fits; leave some room: batch_capacity_seconds={int(seconds)}")


if __name__ == "__main__":
    exit_on_user_error(main)
