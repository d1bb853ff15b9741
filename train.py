"""Train Tacotron 2 with efficient batching.

    python train.py -o runs/first --hparams "data_dir=data/LJSpeech-1.1,batching_strategy=SSB"

``train`` reads from top to bottom: settings, data, model, checkpoint, and the loop. The output
folder gets the settings, metrics.jsonl, the newest and best checkpoints, and a validation sample.
Started by torchrun, several processes train one model, one on each GPU; rank 0 logs and saves.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import textwrap
import time
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

# OpenMP's threads wait for each other after every operation. When another process takes a core,
# they should soon sleep instead of spinning. libgomp reads this when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

import cli
import data_utils
from cli import UserError, counted, make_folder, replacing
from data_utils import Batch, Data, load_ahead
from decoder import check_fast_path
from hparams import MAY_CHANGE, PRESETS, HParams, parse_overrides, settings_table
from layers import restore_buffers
from loss_function import Tacotron2Loss
from model import Tacotron2
from speech import speak
from training import checkpoint, distributed, memory
from training.checkpoint import Progress
from training.device import (
    choose_device,
    full_precision,
    peak_memory,
    synchronize,
    training_conditions,
    use_large_pages,
    why_no_gpu,
)
from training.logger import (
    NoLogger,
    RunLogger,
    Sample,
    epoch_scalars,
    print_end,
    print_summary,
)
from training.schedule import Clock, fall_in_time, learning_rate
from training.stop import Stopped, StopSignals
from training.validation import validate_run, warn_of_collapse
from vocoder import open_vocoder


def parse_args() -> argparse.Namespace:
    resume = (
        f"With --resume, --hparams may change {', '.join(sorted(MAY_CHANGE))}. Any other change "
    )
    resume += (
        "makes another run: start it with -c and a new -o. After a training with "
        "learning_rate_decay, use the newest checkpoint, not checkpoint_best.pt."
    )
    settings = f"Settings for --hparams, and their defaults:\n\n{settings_table()}\n\n"
    parser = cli.ArgumentParser(
        description="Train Tacotron 2 with efficient batching.",
        epilog=settings + textwrap.fill(resume),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # fmt: off
    add, folder = parser.add_argument, {"type": Path, "metavar": "DIR"}
    add("-o", "--output_dir", "--output_directory", required=True, **folder, help="for the run")
    add("-l", "--log_dir", "--log_directory", **folder, help="for TensorBoard (default: -o)")
    add("-c", "--checkpoint", "--checkpoint_path", type=checkpoint.checkpoint_file, metavar="FILE",
        help="start another run from this checkpoint, or a run's newest if it is a folder, with "
        "its settings, at the start of the epoch that it was saved in")
    add("--warm_start", action="store_true", help="take only the settings and weights of -c, "
        "except ignore_layers; start at epoch 1")
    add("--resume", action="store_true", help="continue the run in -o, with its settings, from the "
        "batch after its newest checkpoint; without one, start a run if --hparams or --preset is "
        "given")
    add("--preset", help=f"{' or '.join(PRESETS)} (default paper)")
    add("--hparams", action="append", default=[], metavar="NAME=VALUE,...",
        help="settings to change; a later value wins")
    # fmt: on
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
    lock = checkpoint.locked(args.output_dir) if distributed.RANK == 0 else nullcontext()
    with lock, memory.explained("out of memory"), distributed.explained():
        train(args)


def train(args: argparse.Namespace) -> None:
    """Trains a whole run, or what is left of it."""
    # Settings
    folder, log_dir = args.output_dir, args.log_dir or args.output_dir
    with distributed.rank_0_first():
        make_folder(log_dir, "give another -l")
        source, state, hparams, progress = checkpoint.find_start(
            folder, args.checkpoint, args.hparams, args.preset, args.resume, args.warm_start
        )
        resuming = args.resume and source is not None
        if progress.epoch >= progress.end:
            print(f"{source}: {counted(progress.epoch, 'epoch')} of {progress.end} done")
            return
        device = choose_device(hparams)
        if reason := why_no_gpu():
            print(f"note: no GPU is used: {reason}")

        # Model
        torch.manual_seed(hparams.seed)
        model = Tacotron2(hparams)
        if source:
            ignore_layers = hparams.ignore_layers if args.warm_start else None
            checkpoint.load_weights(model, state, source, ignore_layers)
            if ignore_layers:
                print(
                    f"note: --warm_start does not load {', '.join(ignore_layers)} (ignore_layers)"
                )

        # Data
        clips = data_utils.load_data(hparams)
        if resuming:
            data_utils.refuse_other_data(state["data"], clips, source)
            checkpoint.refuse_other_processes(state, progress, source)
        replica = distributed.RANK, distributed.WORLD_SIZE
        data = data_utils.open_data(*clips, hparams, *replica)

    # Checkpoint
    run = Run(hparams, data, model.to(device), folder, progress)
    if "optimizer" in state:
        if not resuming:  # with the learning rate of this call
            state["optimizer"]["param_groups"] = run.optimizer.state_dict()["param_groups"]
        run.optimizer.load_state_dict(state["optimizer"])
    run.check_decoder()
    if distributed.RANK == 0:
        run.open_logger(log_dir, source if resuming else None)
    checkpoint.start_random_state(state, hparams.seed)
    del state  # three times as large as the model

    # Loop
    with run.stop:
        try:
            if hparams.check_memory:
                run.try_out()
            run.start_clock()
            print_summary(data, model, progress, source)
            if not resuming:
                run.save()  # so that a run that is killed before its first step can be resumed
            run.log_start()
            data.sampler.start_at(progress.epoch, progress.batch)
            while run.progress.epoch < run.progress.end:
                run.train_epoch()
                run.end_epoch()
        except Stopped as stopped:
            path, done = run.save(), run.progress
            epochs, batches = counted(done.epoch, "epoch"), counted(done.batch, "batch", "es")
            print(f"{stopped}: saved {path} after {epochs} and {batches}; --resume continues there")
            sys.exit(stopped.status)
    run.logger.close()


class Run:
    """A training in this process: its data, its model, and how far it has come."""

    def __init__(
        self,
        hparams: HParams,
        data: Data,
        model: Tacotron2,
        folder: Path,
        progress: Progress,
    ) -> None:
        self.hparams, self.data, self.model = hparams, data, model
        self.folder, self.progress = folder, progress
        self.device = next(model.parameters()).device
        self.loss_function = Tacotron2Loss(
            hparams.guided_attention_weight, hparams.guided_attention_sigma, hparams.loss
        )
        self.optimizer = torch.optim.Adam(
            model.parameters(), lr=hparams.learning_rate, weight_decay=hparams.weight_decay
        )
        self.stop = StopSignals(distributed.largest if distributed.SEVERAL else None)
        self.logger: Any = NoLogger()
        self.saved_at = time.monotonic()
        self.start_clock()
        self.has_said_when = False

    # Before the first step

    def check_decoder(self) -> None:
        """Checks the fast decoder on a few frames, and connects the replicas of the model.

        Raises:
            UserError: decoder=scan was asked for, and the modules have been changed.
        """
        batch = data_utils.short_batch(self.data.train_set, self.device)
        with full_precision():
            with memory.explained("checking the decoder: out of memory", others_passed=True):
                notes = check_fast_path(self.model, batch)
            if notes and self.hparams.decoder == "scan":
                raise UserError(f"setting decoder=scan: {notes[0]}; use decoder=auto")
            self.replica = distributed.replicated(
                self.model, lambda model: self.loss_function(model(batch), batch).objective
            )
        for note in notes:
            print(f"note: {note}; training uses the modules, which is slower")

    def open_logger(self, log_dir: Path, resumed: Path | None) -> None:
        """Writes hparams.json, and opens the logs, cut back to the step that was saved."""
        vocoder = open_vocoder(self.hparams, device="cpu")  # a GPU's memory is for training
        if resumed:
            checkpoint.set_aside(self.folder, resumed)
        with replacing(self.folder / "hparams.json") as file:
            settings = dataclasses.asdict(self.hparams)
            file.write((json.dumps(settings, indent=2) + "\n").encode())
        done = self.progress.step, self.progress.metrics_size
        self.logger = RunLogger(self.folder, log_dir, vocoder, *done)
        self.logger.log_settings(self.hparams)

    def try_out(self) -> None:
        """Raises :class:`UserError` if a batch does not fit in memory."""
        first, end = self.progress.epoch, self.progress.end
        epochs = range(first, end if math.isfinite(end) else first + self.hparams.epochs)
        parts = self.model, self.loss_function, self.optimizer, self.data
        memory.try_run(*parts, epochs, self.stop.check)

    def log_start(self) -> None:
        """Logs what must be the same in runs whose times, or validation losses, are compared."""
        frames = sum(clip.n_frames for clip in self.data.val_set.clips)
        values = training_conditions(
            self.device, self.hparams, self.model.decoder.implementation
        ) | {"validation_frames": frames}
        self.logger.write("start", self.progress.epoch, self.progress.step, values)

    # An epoch

    def train_epoch(self) -> None:
        """Trains on the epoch's batches, or on what is left of them."""
        hparams, progress, sampler = self.hparams, self.progress, self.data.sampler
        sampler.set_epoch(progress.epoch)
        frames = data_utils.frames_of_steps(sampler, self.data.train_set.clips)
        shares = frames[:, distributed.RANK] / frames.mean(1)  # of this process
        title = f"epoch {progress.epoch + 1}"  # counted from 1 in what a person reads
        self.model.train()
        synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        n_threads = 1 if hparams.cache_mels else hparams.num_workers
        batches = load_ahead(self.data.train_set, sampler, self.device, n_threads)
        bar = cli.progress_bar(batches, title, len(frames), initial=progress.batch)
        asked, processor = time.perf_counter(), time.process_time()
        for batch in bar:
            began = time.perf_counter()
            self.set_learning_rate((progress.batch + 1) / len(frames))
            problem = f"{title}, batch {progress.batch + 1}: {memory.too_large(batch)}"
            with memory.explained(problem, hparams.check_memory):
                values = self.step(batch, shares[progress.batch])
            values["duration"] = time.perf_counter() - began  # seconds
            if progress.bad_steps:
                self.report_skipped(batch, values)
            else:
                self.logger.log("step", progress.epoch, progress.step, values)
            progress.add(waited=began - asked, seconds=time.perf_counter() - asked)
            progress.add(processor_seconds=time.process_time() - processor)
            progress.add(frames=int(frames[progress.batch, :, 1].sum()))
            progress.peak_memory_gib = max(progress.peak_memory_gib, peak_memory(self.device))
            progress.batch += 1
            speed = progress.sums["frames"] / progress.sums["seconds"]
            bar.set_postfix_str(f"loss {values['loss']:.3f}, {speed:,.0f} frames/s", False)
            self.stop.check()
            minutes = (time.monotonic() - self.saved_at) / 60
            due = 0 < hparams.checkpoint_minutes <= minutes and progress.batch < len(frames)
            if distributed.largest(due):
                self.save()
            asked, processor = time.perf_counter(), time.process_time()

    def set_learning_rate(self, share_of_epoch: float) -> None:
        """Sets that of the step with which ``share_of_epoch`` is done."""
        highest, progress = self.hparams.learning_rate, self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(highest, progress.fall, progress.epoch + share_of_epoch)

    def step(self, batch: Batch, share: tuple[float, float]) -> dict[str, float]:
        """Takes an optimizer step, or skips it if the loss or the gradient is not finite.

        Args:
            share: this process's frames, with padding and without, over the processes' mean.

        Returns:
            scalars to log, means over the processes
        """
        before = [buffer.clone() for buffer in self.model.buffers()]
        compute = partial(self.compute_gradients, batch.to(self.device), share)
        values = memory.without_graphs_if_full(compute, self.model, before)
        if math.isfinite(values["loss"] + values["grad_norm"]):
            self.optimizer.step()
            self.progress.step += 1
            self.progress.bad_steps = 0
            self.progress.add(loss=values["loss"])
        else:
            restore_buffers(self.model, before)
            self.progress.bad_steps += 1
            self.progress.add(skipped=1)
        return values | {"learning_rate": self.optimizer.param_groups[0]["lr"]}

    def compute_gradients(self, batch: Batch, share: tuple[float, float]) -> dict[str, float]:
        """Computes and clips the gradients; returns scalars, means over the processes."""
        self.optimizer.zero_grad()
        # The mean over the processes, of gradients too, is the mean over all frames.
        loss = self.loss_function(self.replica(batch), batch, share)
        loss.objective.backward()
        grad_norm = clip_grad_norm_(self.model.parameters(), self.hparams.grad_clip_thresh)
        values = {
            "loss": loss.total.item(),  # waits for the GPU
            "masked_loss": loss.masked.item(),
            "grad_norm": grad_norm.item(),
        }
        if self.hparams.guided_attention_weight:
            values["guided_attention_loss"] = loss.guided_attention.item()
        return distributed.mean(values)

    def report_skipped(self, batch: Batch, values: dict[str, float]) -> None:
        """Logs a skipped step and names its clips.

        Raises:
            UserError: ``max_bad_steps`` were skipped in a row.
        """
        progress, clips = self.progress, self.data.train_set.clips
        names = list(chain(*distributed.gathered([clips[i].location for i in batch.indices])))
        self.logger.log_skipped_step(progress.epoch, progress.step, progress.batch, values, names)
        problem = (
            f"epoch {progress.epoch + 1}, batch {progress.batch + 1}: loss {values['loss']}, "
            f"gradient {values['grad_norm']}, in {', '.join(names)}"
        )
        if progress.bad_steps >= self.hparams.max_bad_steps:
            raise UserError(
                f"{problem}; that is {progress.bad_steps} steps in a row; fix these clips, or "
                "start another run from a checkpoint by -c with a smaller learning_rate"
            )
        tqdm.write(f"warning: {problem}: step skipped")

    def end_epoch(self) -> None:
        """Validates and speaks when due, logs the epoch, and saves when due."""
        hparams, progress = self.hparams, self.progress
        epoch, step = progress.epoch, progress.step
        scalars = epoch_scalars(progress, self.data)
        tqdm.write(
            f"epoch {epoch + 1}: training loss {scalars['training_loss']:.4f}, "
            f"{scalars['minutes']:.2f} minutes"
        )
        validation, is_best = {}, False
        if (epoch + 1) % hparams.epochs_per_validation == 0 or epoch + 1 == progress.end:
            validation, samples, is_best = self.validate()
        is_planned = self.plan_end()
        is_last = epoch + 1 == progress.end
        if is_last and not validation:  # the end has just come
            validation, samples, is_best = self.validate()
        self.logger.log("epoch", epoch, step, scalars)
        if validation:
            self.logger.log("validation", epoch, step, validation)
            n_validations = (epoch + 1) // hparams.epochs_per_validation
            # TensorBoard shows ten pictures of a kind: after 1, 2, 4, ... validations.
            shown = is_last or n_validations.bit_count() == 1
            self.logger.log_samples(samples, step, hparams, shown)
            if self.data.texts and (is_last or n_validations % hparams.speak_every == 0):
                texts = self.data.texts if distributed.RANK == 0 else []
                for i, spoken in speak(self.model, texts):
                    self.logger.log_speech(i, spoken.mel, spoken.alignment, step, hparams)
        self.progress = progress.next_epoch()
        due = (epoch + 1) % hparams.epochs_per_checkpoint == 0
        if is_best or is_last or is_planned or due:
            self.save(is_best)

    def validate(self) -> tuple[dict[str, float], dict[str, Sample], bool]:
        """Returns the scalars and samples of a validation, and whether its loss is the lowest."""
        progress, epoch = self.progress, self.progress.epoch
        parts = self.model, self.data, self.loss_function, self.stop.check
        with memory.explained(f"epoch {epoch + 1}, validation: out of memory", True):
            validate = partial(validate_run, *parts)
            validation, samples = memory.without_graphs_if_full(validate, self.model)
        tqdm.write(
            f"epoch {epoch + 1}: validation loss {validation['loss']:.4f}, masked "
            f"{validation['masked_loss']:.4f}, alignment {validation['diagonality']:.2f}"
        )
        warn_of_collapse(validation["diagonality"], progress.best_alignment)
        is_best = validation["loss"] < progress.best_loss
        progress.best_loss = min(progress.best_loss, validation["loss"])
        progress.best_alignment = max(progress.best_alignment, validation["diagonality"])
        return validation, samples, is_best

    def plan_end(self) -> bool:
        """Decides after an epoch whether the learning rate of a run of so many hours falls from now
        on, and so when the run ends. Returns whether it was decided just now."""
        hparams, progress, n_epochs = self.hparams, self.progress, self.progress.epoch + 1
        clock = Clock([*progress.epoch_seconds, progress.sums["seconds"]], self.seconds)
        clock = distributed.gathered(clock)[0]  # all decide by the clock of the first
        limit, decided = 3600 * hparams.hours, None
        if math.isinf(progress.end):
            decided = fall_in_time(n_epochs, clock, limit, hparams.learning_rate_decay)
        if decided:
            progress.plan_fall(decided)
            record = {"hours": hparams.hours, "epochs": decided.end}
            self.logger.write("end", progress.epoch, progress.step, record)
            if hparams.learning_rate_decay and decided.start == decided.end:
                tqdm.write("note: no time was left for the learning rate to fall; set more hours")
        if decided or not self.has_said_when:
            self.has_said_when = True
            print_end(n_epochs, progress.fall, clock.epoch_seconds, limit - clock.total_seconds)
        return decided is not None

    def start_clock(self) -> None:
        self.started = time.monotonic() - self.progress.seconds

    @property
    def seconds(self) -> float:
        """Seconds of training so far, without breaks between a stop and a resume."""
        return time.monotonic() - self.started

    def save(self, is_best: bool = False) -> Path:
        """Saves all that is needed to continue exactly from here."""
        self.progress.seconds = self.seconds
        self.progress.metrics_size = self.logger.sync()
        state = {
            "version": checkpoint.VERSION,
            "state_dict": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": dataclasses.asdict(self.progress),
            "random_states": distributed.gathered(checkpoint.random_state()),
            "hparams": dataclasses.asdict(self.hparams),
            "data": self.data.fingerprint,
        }
        self.saved_at = time.monotonic()
        n_kept = self.hparams.keep_checkpoints
        return checkpoint.save(self.folder, self.progress.step, state, is_best, n_kept)


if __name__ == "__main__":
    cli.exit_on_user_error(main, distributed.first_to_fail, distributed.end)
