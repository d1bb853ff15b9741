"""Write a trained model as a file for speaking, for NVIDIA's code, or for torchaudio's.

    python scripts/export.py -c runs/first/checkpoint_best.pt -o voice.pt

--format weights (the default): the weights and settings without the training state, a third of
the size. synthesize.py, Tacotron2.from_checkpoint and train.py --warm_start read it.

--format nvidia: a checkpoint that NVIDIA's Tacotron 2 loads, to speak or to continue training.

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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from files import making, replacing
from hparams import AUDIO, HParams, create_hparams, format_overrides
from model import Tacotron2
from training.checkpoint import load_checkpoint, load_optimizer, load_weights, saved_hparams

FORMATS = "weights", "nvidia", "torchaudio"


def nvidias_state(model: Tacotron2, state: dict[str, Any], path: Path) -> dict[str, Any]:
    """What NVIDIA's code loads, and our settings. Adam starts anew if there is no training
    state."""
    hparams = model.hparams
    optimizer = torch.optim.Adam(
        model.parameters(), lr=hparams.learning_rate, weight_decay=hparams.weight_decay
    )
    if "optimizer" in state:
        load_optimizer(optimizer, state, path, model)
    return {
        "iteration": state.get("progress", {}).get("step", state.get("iteration", 0)),
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "learning_rate": hparams.learning_rate,
        "hparams": dataclasses.asdict(hparams),
    }


def other_settings(hparams: HParams) -> str:
    """The settings of texts, mels and model that differ from NVIDIA's and torchaudio's defaults.

    Raises:
        UserError: their models cannot have them.
    """
    sizes = hparams.symbols_embedding_dim, hparams.encoder_embedding_dim
    if sizes[0] != sizes[1]:
        raise UserError(
            "setting symbols_embedding_dim={} is not encoder_embedding_dim={}: NVIDIA's and "
            "torchaudio's models have one for both; use another --format".format(*sizes)
        )
    names = [field.name for field in dataclasses.fields(HParams)]
    names = [
        "text_cleaners",
        "symbols",
        *AUDIO,
        *names[names.index("n_symbols") : names.index("learning_rate")],
    ]
    default = create_hparams(preset="nvidia")
    values = {name: getattr(hparams, name) for name in names}
    return format_overrides({k: v for k, v in values.items() if v != getattr(default, k)})


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-c", "--checkpoint", required=True, type=Path, help="train.py's, NVIDIA's or torchaudio's")
    add("-o", "--output", required=True, type=Path, metavar="FILE", help="must not exist yet")
    add("--format", choices=FORMATS, default=FORMATS[0], help="(default %(default)s)")
    args = parser.parse_args(argv)
    path, output = args.checkpoint, args.output
    if output.exists():
        raise UserError(f"{output}: exists already; give another -o, or remove it")

    state = load_checkpoint(path)
    if "hparams" in state:
        hparams = saved_hparams(state, path)
    else:
        hparams = create_hparams(preset="nvidia")
        print(f"note: {path}: has no settings in it; they are taken to be those of preset nvidia")
    others = other_settings(hparams) if args.format in ("nvidia", "torchaudio") else ""
    model = Tacotron2(hparams).eval()
    load_weights(model, state, path)
    weights, buffer = model.state_dict(), io.BytesIO()
    if args.format == "nvidia":
        torch.save(nvidias_state(model, state, path), buffer)
    elif args.format == "torchaudio":
        names = [re.sub(r"\.(conv|linear_layer)\.", ".", name) for name in weights]
        torch.save(dict(zip(names, weights.values(), strict=True)), buffer)
    else:
        settings = dataclasses.asdict(hparams)
        torch.save({"state_dict": weights, "hparams": settings}, buffer)
    try:
        with making(output.parent, "give another -o"), replacing(output) as file:
            file.write(buffer.getbuffer())
    except OSError as error:
        raise UserError(
            f"{output}: cannot be written ({error.strerror}); make room, or give another -o"
        ) from None
    size, before = output.stat().st_size, path.stat().st_size
    print(f"{output}: {size / 1e6:.1f} MB, {size / before:.0%} of the checkpoint")
    if others:
        print(f"note: it needs these settings, which are not the defaults there: {others}")


if __name__ == "__main__":
    exit_on_user_error(main)
