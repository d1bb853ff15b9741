"""Train Tacotron 2 with efficient batching.

    python train.py -o runs/first --hparams "data_dir=data/LJSpeech-1.1,batching_strategy=SSB"

Reads top to bottom: settings, data, model, resume, epochs. The output folder gets the settings,
metrics.jsonl, the last and the best checkpoint, and a validation sample to look at and hear.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C while modules are imported ends it without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

# OpenMP's threads wait for each other after every operation. Where another process has one's core
# they must sleep soon, and not spin as long as libgomp has them: it reads this when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

import data_utils
from checkpoint import (
    MAY_CHANGE,
    STATE,
    Stopped,
    StopSignals,
    changes,
    load_checkpoint,
    load_newest,
    load_optimizer,
    load_weights,
    locked,
    making,
    refuse_changes,
    refuse_other_data,
    replacing,
    saved_hparams,
    set_aside,
    set_random_state,
    unknown_settings,
)
from data_utils import MelDataset, collate, load_data, make_loader, open_mels
from device import (
    choose_device,
    device_name,
    full_precision,
    is_out_of_memory,
    n_cores,
    use_large_pages,
    why_no_gpu,
)
from hparams import (
    AUDIO,
    DISK_FULL,
    PRESETS,
    ArgumentParser,
    HParams,
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
        epilog="The settings and what they mean: hparams.py, or the table in README.md. With "
        f"--resume, --hparams may change {', '.join(sorted(MAY_CHANGE))}. Any other change makes "
        "another run: start it from this one's checkpoint by -c, with an -o of its own.",
    )
    add = parser.add_argument
    add(
        "-o", "--output_dir", "--output_directory", required=True, type=Path, metavar="DIR",
        help="what the run writes",
    )  # fmt: skip
    add(
        "-l", "--log_dir", "--log_directory", type=Path, metavar="DIR",
        help="TensorBoard's files, from the current folder (default: -o)",
    )  # fmt: skip
    add(
        "-c", "--checkpoint", "--checkpoint_path", type=Path, metavar="FILE",
        help="start another run from this checkpoint: with its settings, at the start of its epoch",
    )  # fmt: skip
    add(
        "--warm_start",
        action="store_true",
        help="take only the weights and settings of -c, without ignore_layers; start at epoch 0",
    )
    add(
        "--resume",
        action="store_true",
        help="continue the run in -o, with its settings, from the batch after its newest "
        "checkpoint; with --hparams or --preset start it if there is none",
    )
    add("--preset", help=f"{' or '.join(PRESETS)} (default paper)")
    add("--hparams", default="", metavar="NAME=VALUE,...", help="settings to change")
    args = parser.parse_args()
    if args.warm_start and not args.checkpoint:
        parser.error("--warm_start takes the weights of -c CHECKPOINT; name one")
    if args.resume and args.checkpoint:
        parser.error("--resume continues from OUTPUT_DIR's own checkpoint; leave out -c")
    parse_overrides(args.hparams)  # so that a slip leaves nothing behind
    return args


def main() -> None:
    use_large_pages()
    args = parse_args()
    with locked(args.output_dir), making(args.log_dir or args.output_dir):
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
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        place = error.filename or f"{args.output_dir} or {args.log_dir or args.output_dir}"
        return (
            f"{place}: cannot be written ({error.strerror}), the checkpoints are intact; make "
            "room, then --resume"
        )
    return ""


def choose_settings(
    args: argparse.Namespace, state: dict[str, Any], source: Path | None
) -> HParams:
    """The settings of the run: those saved in ``source``, or the preset's, with --hparams' over
    them. Prints what differs from those of a checkpoint given by -c.

    Raises:
        UserError: another run's settings, or mels or symbols that -c's weights do not know.
    """
    if source is None:
        return create_hparams(args.hparams, args.preset)
    if args.checkpoint and "hparams" not in state:  # NVIDIA's have none
        if args.preset is None:
            raise UserError(
                f"{source}: has no settings in it; name those of its mels: --preset nvidia for "
                "NVIDIA's checkpoints, or --preset paper"
            )
        return create_hparams(args.hparams, args.preset)
    if args.checkpoint and (unknown := unknown_settings(state)):
        print(f"note: {source}: settings that this version does not know: {', '.join(unknown)}")
        for name in unknown:
            del state["hparams"][name]
    saved = saved_hparams(state, source)
    hparams = create_hparams(args.hparams, args.preset, saved)
    if not args.checkpoint:
        refuse_changes(state, hparams, source)
        return hparams
    changed, named = changes(saved, hparams), parse_overrides(args.hparams)
    unnamed = [name for name in (*AUDIO, "n_symbols") if name in changed and name not in named]
    if unnamed:
        raise UserError(
            f"--preset {args.preset}: {source} was trained with other mels ("
            + ", ".join(f"{name}={changed[name][0]}" for name in unnamed)
            + "); leave out --preset, or name what to change in --hparams"
        )
    changed = [f"{name}={new} (was {old})" for name, (old, new) in changed.items()]
    print(f"settings of {source}" + (f", but {', '.join(changed)}" if changed else ""))
    return hparams


def train(args: argparse.Namespace) -> None:
    folder = args.output_dir
    unbegun = folder / "checkpoint_00000000.pt"  # of a run without a step, of which nothing is lost
    if not args.resume and set(folder.glob("checkpoint_*.pt")) - {unbegun}:
        raise UserError(f"{folder}: holds a run; --resume it, or give another -o")
    source, state = load_newest(folder) if args.resume else (None, {})
    resuming = source is not None
    if args.resume and not resuming:
        if not args.hparams and not args.preset:
            raise UserError(
                f"{folder}: holds no run to resume, or one that was stopped before it began; "
                "give the command that starts it"
            )
        print(f"{folder}: holds no run yet; starting one")
    if args.checkpoint:
        source, state = args.checkpoint, load_checkpoint(args.checkpoint)
    hparams = choose_settings(args, state, source)
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
        ignored = hparams.ignore_layers if args.warm_start else ()
        load_weights(model, state, source, ignored, args.warm_start)
    by_nvidia = "optimizer" in state and "iteration" in state
    if source and not args.warm_start:
        if all(name in state for name in STATE):
            load_optimizer(optimizer, state, source, model)
            try:
                at = Progress(**state["progress"])
            except TypeError as error:
                raise UserError(
                    f"{source}: of another version ({error}); start from its weights by -c and "
                    "--warm_start, with another -o"
                ) from None
            if not resuming:  # another run: its settings may give the epoch other batches
                at = Progress(epoch=at.epoch, step=at.step)
        elif by_nvidia:
            load_optimizer(optimizer, state, source, model)
        else:
            print(f"note: {source}: has weights but no training state; starting at epoch 0")
    if resuming and at.epoch >= hparams.epochs:
        print(f"{source}: has {at.epoch} epochs: nothing left to do")
        return

    if reason := why_no_gpu():
        print(f"note: no GPU is used: {reason}")
    name = device_name(device)
    threads = f", {torch.get_num_threads()} threads" * (device.type == "cpu")
    print(f"training on {name}{threads}, {hparams.precision}", flush=True)
    if hparams.num_workers > n_cores():
        print(f"note: num_workers={hparams.num_workers} on {n_cores()} cores: more load no faster")

    # Data
    train_clips, val_clips = load_data(hparams)
    data = data_utils.data_fingerprint(train_clips, val_clips)
    if resuming:
        refuse_other_data(state, data, source)
    sampler = data_utils.training_sampler(train_clips, hparams)
    if note := data_utils.batching_note(sampler, hparams):
        print(f"note: {note}", flush=True)
    if by_nvidia and not args.warm_start:
        at.step = int(state["iteration"])
        at.epoch = at.step // len(sampler)
    if at.epoch >= hparams.epochs:
        raise UserError(
            f"{source}: has {at.epoch} epochs; set epochs={at.epoch + 1} or more, or take its "
            "weights by --warm_start"
        )
    mels = open_mels([*train_clips, *val_clips], hparams)
    if hparams.cache_mels:
        print(mels.report([*train_clips, *val_clips]), flush=True)
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
    logger = RunLogger(folder, args.log_dir or folder, at.step, at.metrics_size)
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
            trained_by = {"threads": torch.get_num_threads(), "torch": torch.__version__}
            trained_by |= {"decoder": model.decoder.implementation, "precision": hparams.precision}
            logger.log_start(at.epoch, at.step, {"device": name, **trained_by})
            # So that a kill before the first step leaves a run to resume.
            first = None if resuming else run.save()
            if hparams.largest_first:
                epochs = range(at.epoch, hparams.epochs)
                batches = data_utils.largest_batches(train_clips, sampler, epochs)
                try:
                    run.try_batches(batches, train_set, stop)
                except UserError:
                    if first:  # so that the folder can be used with what the error advises
                        first.unlink()
                    raise
            sampler.load_state_dict({"epoch": at.epoch, "batch": at.batch})
            while run.at.epoch < hparams.epochs:
                run.epoch(train_loader, val_loader, stop)
        except Stopped as stopped:
            path = run.save()
            print(
                f"{stopped}: saved {path} in epoch {run.at.epoch}, after {run.at.batch} batches; "
                "--resume continues from there"
            )
            sys.exit(stopped.status)
        finally:
            data_utils.close(train_loader, val_loader)
    logger.close()


if __name__ == "__main__":
    exit_on_user_error(main)
