"""Train Tacotron 2 with efficient batching.

    python train.py -o runs/first --hparams "data_dir=data/LJSpeech-1.1,batching_strategy=SSB"

``train`` reads from top to bottom: settings, data, model, checkpoint, and the loop. The output
folder gets the settings, metrics.jsonl, the newest and best checkpoints, and a validation sample.
Started by torchrun, several processes train one model, one on each GPU; rank 0 logs and saves.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until main() runs, Ctrl-C ends the program with no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import json
import math
import os
import sys
import textwrap
import time
from collections import defaultdict
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

# OpenMP's threads wait for each other after every operation. When another process takes a core,
# they should soon sleep instead of spinning. libgomp reads this when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

import cli
import data_utils
from batching import batch_statistics
from cli import Stopped, StopSignals, UserError
from corpus.mels import open_mels
from data_utils import MelDataset
from decoder import check_fast_path
from files import locked, making, replacing
from hparams import MAY_CHANGE, PRESETS, parse_overrides, settings_table
from loaders import loaded, open_loader
from loss_function import Tacotron2Loss
from model import Tacotron2
from speech import speak
from training import checkpoint, distributed, memory
from training.device import (
    choose_device,
    device_name,
    full_precision,
    n_cores,
    peak_memory,
    synchronize,
    use_large_pages,
    why_no_gpu,
)
from training.logger import NoLogger, RunLogger
from training.validation import precise_batch_norm, validate, warn_of_collapse


def parse_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(
        description="Train Tacotron 2 with efficient batching.",
        epilog=f"Settings for --hparams, and their defaults:\n\n{settings_table()}\n\n"
        + textwrap.fill(
            f"With --resume, --hparams may change {', '.join(sorted(MAY_CHANGE))}. Any other "
            "change makes another run: start it with -c and a new -o."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "-o", "--output_dir", "--output_directory", required=True, type=Path, metavar="DIR",
        help="folder for the run",
    )  # fmt: skip
    add(
        "-l", "--log_dir", "--log_directory", type=Path, metavar="DIR",
        help="folder for TensorBoard's files (default: -o)",
    )  # fmt: skip
    add(
        "-c", "--checkpoint", "--checkpoint_path", type=Path, metavar="FILE",
        help="start another run from this checkpoint, with its settings, at the start of the epoch "
        "that it was saved in",
    )  # fmt: skip
    add(
        "--warm_start",
        action="store_true",
        help="take only the settings and weights of -c, except ignore_layers; start at epoch 1",
    )
    add(
        "--resume",
        action="store_true",
        help="continue the run in -o, with its settings, from the batch after its newest "
        "checkpoint; without one, start a run if --hparams or --preset is given",
    )
    add("--preset", help=f"{' or '.join(PRESETS)} (default paper)")
    add(
        "--hparams", action="append", default=[], metavar="NAME=VALUE,...",
        help="settings to change; a later value wins",
    )  # fmt: skip
    args = parser.parse_args()
    args.hparams = ",".join(args.hparams)
    if args.warm_start and not args.checkpoint:
        parser.error("--warm_start takes the weights of a checkpoint; name it with -c")
    if args.resume and args.checkpoint:
        parser.error("--resume continues from the newest checkpoint in -o; leave out -c")
    parse_overrides(args.hparams)  # refuses a mistake before any file is written
    return args


def main() -> None:
    use_large_pages()
    distributed.start()
    args = parse_args()
    with ExitStack() as resources, memory.explained("out of memory"), distributed.explained():
        if distributed.RANK == 0:
            folder = locked(args.output_dir, "give another -o", unfinished="checkpoint_*.pt.part")
            resources.enter_context(folder)
            resources.enter_context(making(args.log_dir or args.output_dir))
        try:
            train(args, resources)
        except OSError as error:
            if error.errno not in cli.DISK_FULL:
                raise
            folders = f"{args.output_dir} or {args.log_dir or args.output_dir}"
            raise UserError(
                f"{error.filename or folders}: cannot be written ({error.strerror}), the "
                "checkpoints are intact; make room, then --resume"
            ) from None


def train(args: argparse.Namespace, resources: ExitStack) -> None:
    """A whole run. ``resources`` ends the loader processes and the signal handlers after it."""
    distributed.wait_for_rank_0()

    # Settings
    folder = args.output_dir
    source, state, hparams, progress = checkpoint.find_start(
        folder, args.checkpoint, args.hparams, args.preset, args.resume, args.warm_start
    )
    resuming = args.resume and source is not None
    if resuming and progress.epoch >= hparams.epochs:
        gone = "" if state else "; its checkpoints are gone"
        print(f"{source}: all {progress.epoch} epochs are done{gone}")
        distributed.meet()
        return
    ignore_layers = hparams.ignore_layers if args.warm_start else None
    if source:  # refuses another model's weights before any work
        checkpoint.load_weights(Tacotron2(hparams), state, source, ignore_layers)
    if ignore_layers:
        print(f"note: --warm_start does not load {', '.join(ignore_layers)} (ignore_layers)")
    device = choose_device(hparams)
    if reason := why_no_gpu():
        print(f"note: no GPU is used: {reason}")
    if hparams.num_workers * distributed.LOCAL_WORLD_SIZE > n_cores():
        print(f"note: num_workers={hparams.num_workers} on {n_cores()} cores: more are no faster")

    # Data
    train_clips, val_clips = data_utils.load_data(hparams)
    data = data_utils.data_fingerprint(train_clips, val_clips)
    if resuming:
        data_utils.refuse_other_data(state["data"], (train_clips, val_clips), source)
        checkpoint.refuse_other_processes(state, progress, source)
    texts = data_utils.texts_to_speak(hparams)
    sampler = data_utils.training_sampler(train_clips, hparams)
    for note in (data_utils.batching_note, data_utils.capacity_note):
        if problem := note(sampler, hparams):
            print(f"note: {problem}")
    if "iteration" in state:  # NVIDIA's training state
        progress.epoch = progress.step // len(sampler)
    if progress.epoch >= hparams.epochs:
        raise UserError(
            f"{source}: has {progress.epoch} epochs; set epochs={progress.epoch + 1} or more, "
            "or take its weights by --warm_start"
        )
    mels = open_mels([*train_clips, *val_clips], hparams)
    distributed.meet()
    train_set, val_set = MelDataset(train_clips, mels), MelDataset(val_clips, mels)
    val_batches = data_utils.validation_batches(val_clips, hparams)
    stop = StopSignals(distributed.largest if distributed.SEVERAL else None)
    resources.enter_context(stop)
    options = data_utils.collate, hparams.num_workers
    val_share = val_batches[distributed.RANK :: distributed.WORLD_SIZE]
    val_loader = resources.enter_context(open_loader(val_set, val_share, *options))
    # Pinning memory starts CUDA, so the loader that does it starts last.
    if distributed.SEVERAL and device.type == "cuda":
        torch.cuda.set_device(distributed.LOCAL_RANK)
    train_loader = resources.enter_context(
        open_loader(train_set, sampler, *options, pin_memory=torch.cuda.is_available())
    )

    # Processes are connected after those of the loaders have started, which would inherit that.
    distributed.connect()

    # Model
    torch.manual_seed(hparams.seed)
    model = Tacotron2(hparams).to(device)
    loss_function = Tacotron2Loss(
        hparams.guided_attention_weight, hparams.guided_attention_sigma, hparams.loss
    )
    optimizer = torch.optim.Adam(
        model.parameters(), lr=hparams.learning_rate, weight_decay=hparams.weight_decay
    )

    # Checkpoint
    if source:
        checkpoint.load_weights(model, state, source, ignore_layers)
    if "optimizer" in state:
        checkpoint.load_optimizer(optimizer, state, source, model)
    # On a GPU, enough clips and symbols for several programs of each kernel.
    n_copies, n_symbols = (10, 45) if device.type == "cuda" else (1, 20)
    short = [
        item._replace(ids=item.ids[:n], mel=item.mel[:10])
        for item, n in ((train_set[0], n_symbols), (train_set[-1], 3 * n_symbols // 4))
    ]
    with full_precision():
        batch = data_utils.collate(short * n_copies).to(device)
        for note in check_fast_path(model, batch):
            print(f"note: {note}")
        replicated = distributed.replicated(
            model, lambda model: loss_function(model(batch), batch).objective
        )
    name, threads = device_name(device), torch.get_num_threads()
    name = f"{distributed.WORLD_SIZE} x {name}" if distributed.SEVERAL else name
    used = f"{name}, {threads} threads" if device.type == "cpu" else name
    print(f"training on {used}, {hparams.precision}, decoder={model.decoder.implementation}")
    if n := sampler.n_repeated:
        print(
            f"note: {n} batch{'es' * (n > 1)} of the first epoch {'are' if n > 1 else 'is'} "
            "repeated, so that all processes have equally many"
        )
    logger = NoLogger()
    if distributed.RANK == 0:
        if resuming:
            checkpoint.set_aside(folder, source)
        with replacing(folder / "hparams.json") as file:
            file.write((json.dumps(dataclasses.asdict(hparams), indent=2) + "\n").encode())
        logger = RunLogger(folder, args.log_dir or folder, progress.step, progress.metrics_size)
        logger.log_settings(hparams, state.get("hparams", {}))
    random_states = checkpoint.random_states(state)
    if len(random_states) > distributed.RANK:
        checkpoint.set_random_state(random_states[distributed.RANK])
    elif distributed.SEVERAL:  # each drops other units
        torch.manual_seed(hparams.seed + distributed.RANK)
    del state  # three times as large as the model
    saved_at = time.monotonic()

    def save(is_best: bool = False) -> Path:
        """Save all that is needed to continue exactly from here."""
        nonlocal saved_at
        progress.metrics_size = logger.sync()
        random_states = distributed.gathered(checkpoint.random_state())
        state = {
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "progress": dataclasses.asdict(progress),
            "random_state": random_states[0],
            "other_random_states": random_states[1:],
            "hparams": dataclasses.asdict(hparams),
            "data": data,
        }
        saved_at = time.monotonic()
        return checkpoint.save(folder, progress.step, state, is_best, hparams.keep_checkpoints)

    n_parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{n_parameters:,} parameters; {len(train_clips):,} training and {len(val_clips):,} "
        f"validation clips; {progress.epoch} of {hparams.epochs} epochs"
        f"{f' and {progress.batch} batches' * (progress.batch > 0)} done"
        f"{f', from {source}' if source else ''}"
    )

    # Loop
    try:
        # A run that is killed before its first step can be resumed too.
        first = None if resuming else save()
        if hparams.check_memory:
            epochs = range(progress.epoch, hparams.epochs)
            trial = memory.largest_batches(train_clips, sampler, epochs)
            try:
                memory.try_batches(
                    model, loss_function, optimizer, train_set, *trial, hparams, stop
                )
            except UserError:
                if first:  # free the folder for the settings that the error suggests
                    first.unlink(missing_ok=True)
                raise

        trained_by = {  # times compare only where these are the same
            "device": name,
            "threads": threads,
            "torch": torch.__version__,
            "decoder": model.decoder.implementation,
            "precision": hparams.precision,
            # Validation losses compare only where this is the same.
            "validation_frames": sum(clip.n_frames for clip in val_clips),
        }
        logger.write("start", progress.epoch, progress.step, trained_by)
        sampler.start_at(progress.epoch, progress.batch)
        while progress.epoch < hparams.epochs:
            epoch = progress.epoch  # counted from 0, and from 1 in what a person reads
            title = f"epoch {epoch + 1}"
            sampler.set_epoch(epoch)
            frames = data_utils.frames_of_steps(sampler)
            n_batches = len(frames)
            shares = frames[:, distributed.RANK] / frames.mean(1)  # of this process

            # Train
            model.train()
            synchronize(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            asked = time.perf_counter()
            batches = loaded(train_loader, stop.while_waiting)
            bar = cli.progress_bar(batches, title, n_batches, initial=progress.batch)
            for batch in bar:
                began = time.perf_counter()
                buffers = [buffer.clone() for buffer in model.buffers()]
                too_large = memory.too_large(batch)
                with memory.explained(f"{title}, batch {progress.batch + 1}: {too_large}"):
                    batch = batch.to(device)
                    optimizer.zero_grad()
                    # The mean over the processes, of gradients too, is the mean over all frames.
                    loss = loss_function(replicated(batch), batch, shares[progress.batch])
                    loss.objective.backward()
                    grad_norm = clip_grad_norm_(model.parameters(), hparams.grad_clip_thresh)
                    values = {
                        "loss": loss.total.item(),  # waits for the GPU
                        "masked_loss": loss.masked.item(),
                        "grad_norm": grad_norm.item(),
                    }
                    if hparams.guided_attention_weight:
                        values["guided_attention_loss"] = loss.guided_attention.item()
                    values = distributed.mean(values)
                    finite = math.isfinite(values["loss"] + values["grad_norm"])
                    if finite:
                        optimizer.step()
                values["learning_rate"] = hparams.learning_rate
                values["duration"] = time.perf_counter() - began  # seconds

                # Log
                if finite:
                    progress.step, progress.bad_steps = progress.step + 1, 0
                    logger.log("step", epoch, progress.step, values)
                    progress.add(loss=values["loss"])
                else:
                    for buffer, before in zip(model.buffers(), buffers, strict=True):
                        buffer.copy_(before)
                    progress.add(skipped=1)
                    progress.bad_steps += 1
                    locations = [train_clips[i].location for i in batch.indices]
                    own = distributed.gathered((bool(loss.total.isfinite()), locations))
                    bad = [clips for is_finite, clips in own if not is_finite]
                    clips = list(chain(*(bad or [clips for _, clips in own])))
                    logger.log_bad_step(epoch, progress.step, progress.batch, values, clips)
                    problem = (
                        f"{title}, batch {progress.batch + 1}: loss {values['loss']}, gradient "
                        f"{values['grad_norm']}, in {', '.join(clips)}"
                    )
                    if progress.bad_steps >= hparams.max_bad_steps:
                        raise UserError(
                            f"{problem}; that is {progress.bad_steps} steps in a row; fix these "
                            "clips, or start another run from a checkpoint by -c with a smaller "
                            "learning_rate"
                        )
                    tqdm.write(f"warning: {problem}: step skipped")
                progress.add(waited=began - asked, seconds=time.perf_counter() - asked)
                progress.add(frames=int(frames[progress.batch, :, 1].sum()))
                progress.batch += 1
                progress.peak_memory_gib = max(progress.peak_memory_gib, peak_memory(device))
                speed = progress.sums["frames"] / progress.sums["seconds"]
                bar.set_postfix_str(f"loss {values['loss']:.3f}, {speed:,.0f} frames/s", False)

                # Save
                stop.check()
                minutes = (time.monotonic() - saved_at) / 60
                due = 0 < hparams.checkpoint_minutes <= minutes and progress.batch < n_batches
                if distributed.largest(due):
                    save()
                asked = time.perf_counter()

            sums = defaultdict(float, progress.sums)
            n_trained = n_batches - sums["skipped"]
            statistics = batch_statistics(sampler.lengths, sampler.plan)
            scalars = {
                "minutes": sums["seconds"] / 60,
                "training_loss": sums["loss"] / n_trained if n_trained else math.nan,
                "zpr": statistics.zpr,
                "abl": statistics.abl,
                "n_batches": statistics.n_batches,
                "total_length": statistics.total_length,
                "frames_per_second": int(sampler.lengths.sum()) / sums["seconds"],
                "data_wait": sums["waited"] / sums["seconds"],
                "peak_memory_gib": progress.peak_memory_gib,
                "skipped_steps": int(sums["skipped"]),
            }
            if distributed.SEVERAL:
                scalars["repeated_batches"] = sampler.n_repeated
            tqdm.write(
                f"{title}: training loss {scalars['training_loss']:.4f}, "
                f"{scalars['minutes']:.2f} minutes"
            )

            # Validate
            is_last, is_best = epoch == hparams.epochs - 1, False
            validated = is_last or (epoch + 1) % hparams.epochs_per_validation == 0
            if validated:
                other = epoch // hparams.epochs_per_validation % len(val_set)  # another clip to log
                options = val_loader, val_batches, loss_function, stop
                validation, samples = validate(model, *options, other)
                if n := hparams.precise_batch_norm:
                    with precise_batch_norm(model, train_set, sampler.plan, n, stop):
                        precise, _ = validate(model, *options)
                    validation |= {f"precise_{name}": precise[name] for name in precise}
                tqdm.write(
                    f"{title}: validation loss {validation['loss']:.4f}, masked "
                    f"{validation['masked_loss']:.4f}, alignment {validation['diagonality']:.2f}"
                )
                warn_of_collapse(validation["diagonality"], progress.best_alignment)
                is_best = validation["loss"] < progress.best_loss
                progress.best_loss = min(progress.best_loss, validation["loss"])
                progress.best_alignment = max(progress.best_alignment, validation["diagonality"])
            logger.log("epoch", epoch, progress.step, scalars)
            longest = [int(sampler.lengths[batch].max()) for batch in sampler.plan]
            logger.log_batching(epoch, longest, sampler.plan.sizes)
            if validated:
                logger.log("validation", epoch, progress.step, validation)
            progress = progress.next_epoch()
            if is_best or is_last or progress.epoch % hparams.epochs_per_checkpoint == 0:
                save(is_best)
            if validated:
                stop.check()
                n_validations = progress.epoch // hparams.epochs_per_validation
                # TensorBoard shows ten pictures of a kind: after 1, 2, 4, ... validations.
                shown = is_last or n_validations.bit_count() == 1
                logger.log_samples(samples, progress.step, hparams, shown)
                if texts and (is_last or n_validations % hparams.speak_every == 0):
                    for i, spoken in speak(model, texts if distributed.RANK == 0 else []):
                        logger.log_speech(i, spoken, progress.step, hparams)
    except Stopped as stopped:
        path = save()
        print(
            f"{stopped}: saved {path} after {progress.epoch} epochs and {progress.batch} batches; "
            "--resume continues from there"
        )
        sys.exit(stopped.status)
    logger.close()


if __name__ == "__main__":
    cli.exit_on_user_error(main, distributed.first_to_fail, distributed.end)
