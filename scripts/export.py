"""Write a trained model as a file for speaking, for NVIDIA's code, or for torchaudio's.

    python scripts/export.py -c runs/first -o voice.pt    # its newest checkpoint

--format weights (the default): the weights and settings without the training state, a third of
the size. synthesize.py, speech.load_model and train.py -c read it.

--format half: the same with weights of 16 bits, half of that (but for values that 16 bits cannot
hold).

--format nvidia: a checkpoint that NVIDIA's Tacotron 2 loads, to speak or to train on. Its Adam
starts anew.

--format torchaudio: weights that torchaudio.models.Tacotron2 loads, strictly.
"""

import argparse
import dataclasses
import io
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, make_folder, replacing
from hparams import AUDIO, HParams, create_hparams, format_overrides
from model import Tacotron2
from speech import load_model
from training.checkpoint import VERSION, checkpoint_file

FORMATS = "weights", "half", "nvidia", "torchaudio"


def content(model: Tacotron2, format: str) -> dict[str, Any]:
    """Returns what the file holds."""
    weights, hparams = model.state_dict(), model.hparams
    if format == "torchaudio":  # whose linear layers and convolutions have no level of their own
        return {re.sub(r"\.(conv|linear_layer)\.", ".", name): w for name, w in weights.items()}
    if format == "half":
        weights = {name: halved(weight) for name, weight in weights.items()}
    state = {"version": VERSION, "state_dict": weights, "hparams": dataclasses.asdict(hparams)}
    if format == "nvidia":
        adam = torch.optim.Adam(model.parameters(), hparams.learning_rate)
        state["optimizer"] = adam.state_dict()
        state |= {"iteration": 0, "learning_rate": hparams.learning_rate}
    return state


def halved(weight: Tensor) -> Tensor:
    """Returns a weight of 16 bits, or as it is if that would not hold its values."""
    half = weight.half()
    return half if weight.is_floating_point() and half.isfinite().all() else weight


def settings_to_give(hparams: HParams) -> str:
    """Returns the settings of texts, mels and model that differ from NVIDIA's and torchaudio's.

    Raises:
        UserError: their models cannot have them.
    """
    if hparams.n_frames_per_step > 1:
        raise UserError(
            f"setting n_frames_per_step={hparams.n_frames_per_step}: NVIDIA's and torchaudio's "
            "models make one frame a step; use another --format"
        )
    sizes = hparams.symbols_embedding_dim, hparams.encoder_embedding_dim
    if sizes[0] != sizes[1]:
        raise UserError(
            "setting symbols_embedding_dim={} is not encoder_embedding_dim={}: NVIDIA's and "
            "torchaudio's models have one for both; use another --format".format(*sizes)
        )
    names = [field.name for field in dataclasses.fields(HParams)]
    of_model = names[names.index("n_symbols") : names.index("learning_rate")]
    default = create_hparams(preset="nvidia")
    values = {n: getattr(hparams, n) for n in ("text_cleaners", "symbols", *AUDIO, *of_model)}
    return format_overrides({n: v for n, v in values.items() if v != getattr(default, n)})


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    checkpoint = (
        "train.py's, NVIDIA's or torchaudio's; or a run's folder, whose newest one is meant (after "
        "learning_rate_decay it speaks better than checkpoint_best.pt)"
    )
    add("-c", "--checkpoint", required=True, type=checkpoint_file, metavar="FILE", help=checkpoint)
    add("-o", "--output", required=True, type=Path, metavar="FILE", help="must not exist yet")
    add("--format", choices=FORMATS, default=FORMATS[0], help="(default %(default)s)")
    args = parser.parse_args(argv)
    if args.output.exists():
        raise UserError(f"{args.output}: exists already; give another -o, or remove it")
    model = load_model(args.checkpoint).cpu()
    for_this_code = args.format in ("weights", "half")
    settings = "" if for_this_code else settings_to_give(model.hparams)
    buffer = io.BytesIO()  # torch.save says less of a full disk
    torch.save(content(model, args.format), buffer)
    make_folder(args.output.parent, "give another -o")
    with replacing(args.output) as file:
        file.write(buffer.getbuffer())
    size, before = args.output.stat().st_size, args.checkpoint.stat().st_size
    print(f"{args.output}: {size / 1e6:.1f} MB, {size / before:.0%} of the checkpoint")
    if settings:
        print(f"note: it needs these settings, which are not the defaults there: {settings}")
    if not for_this_code:
        print("note: that code has its own rule to stop: at the first gate above its threshold")


if __name__ == "__main__":
    exit_on_user_error(main)
