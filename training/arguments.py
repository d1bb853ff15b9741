"""The command line of train.py."""

import argparse
import textwrap
from pathlib import Path

from cli import ArgumentParser
from hparams import MAY_CHANGE, NVIDIA_ONLY, PRESETS, parse_overrides, settings_table
from training.checkpoint import find_checkpoint


def parse_args() -> argparse.Namespace:
    """Returns the command line, of which a mistake ends the program with status 2."""
    resume = (
        f"With --resume, --hparams may change {', '.join(sorted(MAY_CHANGE))}. Any other change "
        "makes another run: start it with -c and a new -o. After a training with "
        "learning_rate_decay, use the newest checkpoint, not checkpoint_best.pt."
    )
    settings = f"Settings for --hparams, and their defaults:\n\n{settings_table()}\n\n"
    parser = ArgumentParser(
        description="Train Tacotron 2 with efficient batching.",
        epilog=settings + textwrap.fill(resume),
    )
    # fmt: off
    add = parser.add_argument
    add("-o", "--output_dir", "--output_directory", required=True, type=Path, metavar="DIR",
        help="for the run")
    add("-l", "--log_dir", "--log_directory", type=Path, metavar="DIR",
        help="for this run's TensorBoard files; a path from the current folder (default: -o)")
    add("-c", "--checkpoint", "--checkpoint_path", type=find_checkpoint, metavar="FILE",
        help="start another run from this checkpoint, or from the newest of a run's folder, with "
        "its settings, at the start of the epoch that it was saved in")
    add("--warm_start", action="store_true", help="take only the settings and weights of -c, "
        "except ignore_layers; start at epoch 1")
    add("--resume", action="store_true", help="continue the run in -o, with its settings, from the "
        "batch after its newest checkpoint; if there is none, start a run, which needs --hparams "
        "or --preset")
    add("--preset", help=f"{', '.join(PRESETS)} (default paper): mels, and with voice also what "
        "gives the clearest speech soonest")
    add("--hparams", action="append", default=[], metavar="NAME=VALUE,...",
        help="settings to change; a later value wins")
    add("--n_gpus", "--rank", "--group_name", dest="distributed", help=argparse.SUPPRESS)
    # fmt: on
    args = parser.parse_args()
    args.hparams = ",".join(args.hparams)
    if args.distributed:
        parser.error(f"--n_gpus, --rank, --group_name: {NVIDIA_ONLY['n_gpus']}")
    if args.warm_start and not args.checkpoint:
        parser.error("--warm_start takes the weights of a checkpoint; name it with -c")
    if args.resume and args.checkpoint:
        parser.error("--resume continues from the newest checkpoint in -o; leave out -c")
    parse_overrides(args.hparams)  # refuses a mistake before any file is written
    return args
