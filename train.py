"""Train Tacotron 2 with efficient batching.

    python train.py -o runs/first --hparams "data_dir=data/LJSpeech-1.1,batching_strategy=SSB"

Reads top to bottom: settings, data, model, resume, epochs. The output folder gets the settings,
metrics.jsonl, the last and the best checkpoint, and a validation sample to look at and hear.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

# OpenMP's threads wait for each other after every operation. Where another process has one's core
# they must sleep soon, and not spin as long as libgomp has them: it reads this when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

import data_utils
from checkpoint import (
    STATE,
    Stopped,
    StopSignals,
    load_checkpoint,
    load_newest,
    load_weights,
    locked,
    make_folder,
    refuse_changes,
    refuse_other_data,
    replacing,
    saved_hparams,
    set_aside,
    set_random_state,
)
from data_utils import MelDataset, collate, load_data, make_loader, open_mels
from device import choose_device, full_precision, is_out_of_memory, keep_memory
from hparams import (
    DISK_FULL,
    PRESETS,
    ArgumentParser,
    UserError,
    create_hparams,
    exit_on_user_error,
    parse_overrides,
)
from logger import RunLogger
from loss_function import Tacotron2Loss
from model import Tacotron2
from trainer import Progress, Run


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(
        description="Train Tacotron 2 with efficient batching.",
        epilog="The settings and what they mean: hparams.py, or the table in README.md.",
    )
    parser.add_argument("-o", "--output_dir", required=True, type=Path, help="what the run writes")
    parser.add_argument(
        "-l", "--log_dir", type=Path, help="TensorBoard's files (default: OUTPUT_DIR)"
    )
    parser.add_argument(
        "-c",
        "--checkpoint",
        type=Path,
        help="start from this checkpoint, at the start of its epoch",
    )
    parser.add_argument(
        "--warm_start",
        action="store_true",
        help="take only the weights of -c, without ignore_layers, and start at epoch 0",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from OUTPUT_DIR's newest checkpoint, at its batch, with its settings but for "
        "what --hparams changes; start anew if there is none",
    )
    parser.add_argument("--preset", help=f"{' or '.join(PRESETS)} (default paper)")
    parser.add_argument(
        "--hparams", default="", metavar="NAME=VALUE,...", help="settings to change"
    )
    args = parser.parse_args()
    if args.warm_start and not args.checkpoint:
        parser.error("--warm_start takes the weights of -c CHECKPOINT; name one")
    if args.resume and args.checkpoint:
        parser.error("--resume goes on from OUTPUT_DIR's own checkpoint; leave out -c")
    parse_overrides(args.hparams)  # so that a slip leaves nothing behind
    return args


def main() -> None:
    keep_memory()
    args = parse_args()
    with locked(args.output_dir):
        try:
            train(args)
        except (RuntimeError, MemoryError, OSError) as error:
            if explanation := explain(error, args):
                raise UserError(explanation) from None
            raise


def explain(error: Exception, args: argparse.Namespace) -> str:
    """What the user can do about an error that comes from outside; nothing for any other."""
    if is_out_of_memory(error):
        return (
            "out of memory; let less else run there, then --resume; or start anew with a smaller "
            "batch_capacity_seconds, batch_size or model"
        )
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return (
            "a loader process was killed, perhaps for want of memory; --resume, with a smaller "
            "num_workers"
        )
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        place = error.filename or f"{args.output_dir} or {args.log_dir or args.output_dir}"
        return (
            f"{place}: cannot be written ({error.strerror}), the checkpoints are intact; make "
            "room, then --resume"
        )
    return ""


def train(args: argparse.Namespace) -> None:
    folder = args.output_dir
    if any(folder.glob("checkpoint_*.pt")) and not args.resume:
        raise UserError(f"{folder}: holds a run; --resume it, or give another -o")
    source, state = load_newest(folder)
    resuming = source is not None
    if args.checkpoint:
        source, state = args.checkpoint, load_checkpoint(args.checkpoint)
    base = saved_hparams(state, source) if resuming else None
    hparams = create_hparams(args.hparams, args.preset, base)
    device = choose_device(hparams)

    # Model
    torch.manual_seed(hparams.seed)
    model = Tacotron2(hparams).to(device)
    loss_function = Tacotron2Loss(hparams.guided_attention_weight, hparams.guided_attention_sigma)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=hparams.learning_rate, weight_decay=hparams.weight_decay
    )

    # Resume
    settings, at = dataclasses.asdict(hparams), Progress()
    if source:
        if resuming:
            refuse_changes(state, settings, source)
        load_weights(model, state, source, hparams.ignore_layers if args.warm_start else ())
        if all(name in state for name in STATE) and not args.warm_start:
            try:
                at = Progress(**state["progress"])
            except TypeError as error:
                raise UserError(
                    f"{source}: of another version ({error}); start from its weights by -c and "
                    "--warm_start, with another -o"
                ) from None
            if not resuming:  # another run: its settings may give the epoch other batches
                at = Progress(epoch=at.epoch, step=at.step)
            optimizer.load_state_dict(state["optimizer"])
            optimizer.param_groups[0].update(
                lr=hparams.learning_rate, weight_decay=hparams.weight_decay
            )
        elif not args.warm_start:
            print(f"note: {source}: has weights alone that this version can use; epoch 0 is next")
    if at.epoch >= hparams.epochs:
        done = f"{source}: has {at.epoch} epochs"
        if not resuming:
            raise UserError(f"{done}; set epochs above that, or take its weights by --warm_start")
        print(f"{done}: nothing left to do")
        return

    name = f"CPU, threads: {torch.get_num_threads()}"
    name = torch.cuda.get_device_name() if device.type == "cuda" else name
    print(f"training on {name}, {hparams.precision}", flush=True)

    # Data
    train_clips, val_clips = load_data(hparams)
    data = data_utils.data_fingerprint(train_clips, val_clips)
    if resuming:
        refuse_other_data(state, data, source)
    sampler = data_utils.training_sampler(train_clips, hparams)
    log_dir = args.log_dir or folder
    make_folder(log_dir)
    mels = open_mels([*train_clips, *val_clips], hparams)
    train_set = MelDataset(train_clips, mels)
    train_loader = make_loader(train_set, sampler, hparams)
    val_batches = data_utils.validation_batches(val_clips, hparams)
    val_loader = make_loader(MelDataset(val_clips, mels), val_batches, hparams)

    few = [(ids[:n], mel[:10]) for n, (ids, mel) in ((20, train_set[0]), (15, train_set[-1]))]
    with full_precision():
        for note in model.check_fast_path(collate(few).to(device)):
            print(f"note: {note}", flush=True)

    if resuming:
        set_aside(folder, source)
    with replacing(folder / "hparams.json") as file:
        file.write((json.dumps(settings, indent=2) + "\n").encode())
    logger = RunLogger(folder, log_dir, at.step, at.metrics_size)
    run = Run(folder, hparams, data, model, optimizer, loss_function, logger, at)
    if "random_state" in state and not args.warm_start:
        set_random_state(state["random_state"])
    del state  # as large as the model and its moments
    where = f"{at.epoch} of {hparams.epochs} epochs" + f" and {at.batch} batches" * (at.batch > 0)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters; "
        f"{len(train_clips):,} training and {len(val_clips):,} validation clips; "
        f"{where} done{f', from {source}' if source else ''}",
        flush=True,
    )

    # Epochs
    with StopSignals() as stop:
        try:
            if hparams.largest_first:
                epochs = range(at.epoch, hparams.epochs)
                batches = data_utils.largest_batches(train_clips, sampler, epochs)
                run.try_batches(batches, train_set, stop)
            sampler.load_state_dict({"epoch": at.epoch, "batch": at.batch})
            while run.at.epoch < hparams.epochs:
                run.epoch(train_loader, val_loader, stop)
        except Stopped as stopped:
            path = run.save()
            print(
                f"{stopped}: saved {path} in epoch {run.at.epoch}, after {run.at.batch} batches; "
                "--resume goes on from there"
            )
            sys.exit(stopped.status)
    logger.close()


if __name__ == "__main__":
    exit_on_user_error(main)
