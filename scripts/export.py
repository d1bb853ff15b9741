"""Write a trained model without its training state, which is a third of the size.

    python scripts/export.py -c runs/first -o voice.pt    # its newest checkpoint
    python scripts/export.py -c runs/first -o voice.pt --half

The file has the weights and the settings. synthesize.py, speech.load_model and train.py -c read it.
"""

import dataclasses
import io
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, make_folder, replace_file
from speech import load_model
from training.checkpoint import find_checkpoint


def halve(weight: Tensor) -> Tensor:
    """Returns a weight in 16 bits, or unchanged if 16 bits cannot hold its values."""
    half = weight.half()
    return half if weight.is_floating_point() and half.isfinite().all() else weight


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    checkpoint = (
        "a checkpoint of train.py or of NVIDIA's code, or the folder of a run, for its newest "
        "checkpoint (after learning_rate_decay it speaks better than checkpoint_best.pt)"
    )
    add("-c", "--checkpoint", required=True, type=find_checkpoint, metavar="FILE", help=checkpoint)
    add("-o", "--output", required=True, type=Path, metavar="FILE", help="must not exist yet")
    add("--half", action="store_true", help="save weights in 16 bits, in half as large a file")
    args = parser.parse_args(argv)
    if args.output.exists():
        raise UserError(f"{args.output}: exists already; give another -o, or remove it")
    model = load_model(args.checkpoint).cpu()
    weights = model.state_dict()
    if args.half:
        weights = {name: halve(weight) for name, weight in weights.items()}
    hparams = dataclasses.asdict(model.hparams)
    buffer = io.BytesIO()  # written by Python below, whose errors say more than torch.save's
    torch.save({"state_dict": weights, "hparams": hparams}, buffer)
    make_folder(args.output.parent, "give another -o")
    with replace_file(args.output) as file:
        file.write(buffer.getbuffer())
    size, whole = args.output.stat().st_size, args.checkpoint.stat().st_size
    print(f"{args.output}: {size / 1e6:.1f} MB, {size / whole:.0%} of the checkpoint")


if __name__ == "__main__":
    exit_on_user_error(main)
