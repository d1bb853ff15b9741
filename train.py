"""Train Tacotron 2 with efficient batching.

    python train.py -o runs/first --hparams "data_dir=data/LJSpeech-1.1,batching_strategy=SSB"

``train`` reads from top to bottom: settings, data, model, checkpoint, and the loop. The output
folder gets the settings, metrics.jsonl, the newest and best checkpoints, and a validation sample.
With torchrun, several processes train one model, one on each GPU; rank 0 logs and saves.
"""

import argparse
import math
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# OpenMP's threads wait for each other after every operation. When another process takes a core,
# they should soon sleep instead of spinning. libgomp reads this when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from torch.nn.utils import clip_grad_norm_

import cli
import data_utils
from cli import UserError, pluralize
from data_utils import Batch, Data, load_ahead
from decoder import check_fast_path
from hparams import HParams
from layers import restore_buffers
from loss_function import Tacotron2Loss
from model import Tacotron2
from speech import measure_variance_gain, speak
from training import checkpoint, distributed, logger, memory, start
from training.arguments import parse_args
from training.device import (
    choose_device,
    keep_memory,
    peak_memory,
    synchronize,
    use_full_precision,
    why_no_gpu,
)
from training.schedule import Progress, learning_rate, plan_hours
from training.stop import Stopped, StopSignals
from training.validation import LEARNED, Sample, validate, warn_of_collapse
from vocoder import open_vocoder


def main() -> None:
    keep_memory()
    distributed.start()
    args = parse_args()
    lock = start.lock(args.output_dir, args.log_dir) if distributed.RANK == 0 else nullcontext()
    with lock, memory.explain_out_of_memory(), distributed.explain_lost_process():
        train(args)


def train(args: argparse.Namespace) -> None:
    """Trains a whole run, or what is left of it."""
    folder, log_dir = args.output_dir, args.log_dir or args.output_dir
    with distributed.rank_0_first():
        # Settings
        is_begun = start.holds_run(folder)
        if is_begun and not args.resume:
            raise UserError(f"{folder}: holds a run; --resume it, or give another -o")
        logger.check_log_dir(log_dir, folder)
        if is_begun:
            origin = start.resume(folder, args.hparams, args.preset)
        elif args.checkpoint:
            origin = start.start_from(args.checkpoint, args.warm_start, args.hparams, args.preset)
        elif args.resume and not (args.hparams or args.preset):
            problem = "holds no run to resume, or one stopped before its first checkpoint"
            raise UserError(f"{folder}: {problem}; give the command that starts it")
        else:
            if args.resume:
                print(f"{folder}: holds no run yet; starting one")
            origin = start.start_anew(args.hparams, args.preset)
        hparams, progress = origin.hparams, origin.progress
        if progress.epoch >= progress.end:
            print(f"{origin.source}: {pluralize(progress.epoch, 'epoch')} of {progress.end} done")
            return
        device = choose_device(hparams)
        if reason := why_no_gpu():
            print(f"note: no GPU is used: {reason}")

        # Model
        torch.manual_seed(hparams.seed)
        model = Tacotron2(hparams)
        if origin.source:
            checkpoint.load_weights(model, origin.state, origin.source, origin.ignore_layers)

        # Data
        clips = data_utils.load_data(hparams)
        if is_begun:
            data_utils.check_same_data(clips, origin.state["data"], origin.source)
        data = data_utils.open_data(clips, hparams, distributed.RANK, distributed.WORLD_SIZE)

    # Checkpoint
    run = Run(hparams, data, model.to(device), folder, progress)
    run.connect()
    origin.restore(run.optimizer)
    if hparams.check_memory:
        epochs = range(progress.epoch, min(progress.end, progress.epoch + hparams.epochs))
        memory.try_run(model, run.loss_function, run.optimizer, data, epochs)
    if distributed.RANK == 0:  # nothing more is refused, and only now do files change
        vocoder = open_vocoder(hparams, device="cpu")  # a GPU's memory is for training
        run.logger = logger.RunLogger(folder, log_dir, vocoder, progress, hparams)
        run.logger.log_settings()

    # Loop
    with run.stop:
        try:
            run.started_at = time.monotonic() - progress.seconds
            data.sampler.start_at(progress.epoch, progress.batch)
            logger.print_summary(data, model, progress, origin.source)
            if not is_begun:
                run.save()  # so that a run that is killed before its first step can be resumed
            run.logger.log_conditions(progress, data, model)
            while progress.epoch < progress.end:
                run.train_epoch()
                run.end_epoch()
        except Stopped as stopped:
            path = run.save()
            epochs = pluralize(progress.epoch, "epoch")
            batches = pluralize(progress.batch, "batch", "es")
            print(f"{stopped}: saved {path} after {epochs} and {batches}; --resume continues there")
            sys.exit(stopped.status)
    run.logger.close()


class Run:
    """A training in this process: its data, its model, and how far it has come."""

    def __init__(
        self, hparams: HParams, data: Data, model: Tacotron2, folder: Path, progress: Progress
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
        self.stop = StopSignals()
        self.logger: Any = logger.NoLogger()
        self.saved_at = time.monotonic()
        self.says_end = True  # after the first epoch of this process

    def connect(self) -> None:
        """Checks the fast decoder on a few frames, and connects the replicas of the model.

        Raises:
            UserError: decoder=scan was asked for, and the modules have been changed.
        """
        batch = data_utils.short_batch(self.data.train_set, self.device)
        with use_full_precision():
            note = check_fast_path(self.model, batch)
            if note and self.hparams.decoder == "scan":
                raise UserError(f"setting decoder=scan: {note}; use decoder=auto")
            self.replica = distributed.replicate(
                self.model, lambda model: self.loss_function(model(batch), batch).objective
            )
        if note:
            print(f"note: {note}; training uses the modules, which is slower")

    # An epoch

    def train_epoch(self) -> None:
        """Trains on the epoch's batches, or on what is left of them."""
        hparams, progress, sampler = self.hparams, self.progress, self.data.sampler
        sampler.set_epoch(progress.epoch)
        # Frames of each process's batch at each step, with padding and without. Weighted by its
        # share of them, each process's mean loss adds up to the mean over all frames.
        frames = data_utils.frames_of_steps(sampler, self.data.train_set.clips)
        shares = frames[:, distributed.RANK] / frames.mean(1)  # (n_steps, 2)
        self.model.train()
        self.model.variance_gain.zero_()  # if measured, then at the end of an earlier training
        if progress.epoch >= progress.falls_from and not hparams.dropout_in_fall:
            self.model.turn_off_dropout()
        synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        n_threads = 1 if hparams.cache_mels else hparams.num_workers
        batches = load_ahead(self.data.train_set, sampler, self.device, n_threads)
        title = f"epoch {progress.epoch + 1}"  # counted from 1 in what a person reads
        bar = cli.progress_bar(batches, title, len(frames), initial=progress.batch)
        asked_at, processor_at = time.perf_counter(), time.process_time()
        for batch in bar:
            began_at = time.perf_counter()
            position = progress.epoch + (progress.batch + 1) / len(frames)  # once it is done
            loss = self.train_step(batch, shares[progress.batch], position)
            progress.add(
                waited=began_at - asked_at,
                seconds=time.perf_counter() - asked_at,
                processor_seconds=time.process_time() - processor_at,
                frames=int(frames[progress.batch, :, 1].sum()),
            )
            progress.peak_memory_gib = max(progress.peak_memory_gib, peak_memory(self.device))
            progress.batch += 1
            speed = progress.sums["frames"] / progress.sums["seconds"]
            bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} frames/s", refresh=False)
            self.stop.check()
            minutes = (time.monotonic() - self.saved_at) / 60
            is_due = 0 < hparams.checkpoint_minutes <= minutes and progress.batch < len(frames)
            if distributed.largest(is_due):
                self.save()
            asked_at, processor_at = time.perf_counter(), time.process_time()

    def train_step(self, batch: Batch, share: tuple[float, float], position: float) -> float:
        """Takes an optimizer step, or skips it if the loss or the gradient is not finite. Logs its
        scalars, which are means over the processes, and returns the loss.

        Args:
            share: this process's frames, with padding and without, over the processes' mean.
            position: epochs done after the step, which decide its learning rate.
        """
        hparams, progress, optimizer = self.hparams, self.progress, self.optimizer
        began_at = time.perf_counter()
        rate = learning_rate(hparams.learning_rate, progress.fall, position)
        optimizer.param_groups[0]["lr"] = rate
        batch = batch.to(self.device)
        buffers = [buffer.clone() for buffer in self.model.buffers()]  # for a skipped step

        optimizer.zero_grad()
        output = self.replica(batch)
        loss = self.loss_function(output, batch, share)
        loss.objective.backward()
        grad_norm = clip_grad_norm_(self.model.parameters(), hparams.grad_clip_thresh)
        values = {
            "loss": loss.total.item(),  # waits for the GPU
            "masked_loss": loss.masked.item(),
            "grad_norm": grad_norm.item(),
        }
        if hparams.guided_attention_weight:
            values["guided_attention_loss"] = loss.guided_attention.item()
        values = distributed.mean(values)
        if math.isfinite(values["loss"] + values["grad_norm"]):
            optimizer.step()
            progress.step += 1
            progress.bad_steps = 0
            progress.add(loss=values["loss"])
        else:
            restore_buffers(self.model, buffers)
            progress.bad_steps += 1
            progress.add(skipped=1)

        values |= {"learning_rate": rate, "duration": time.perf_counter() - began_at}  # seconds
        if progress.bad_steps:
            clips = [self.data.train_set.clips[i] for i in batch.indices]
            logger.report_skipped_step(self.logger, progress, values, clips, hparams)
        else:
            self.logger.log("step", progress.epoch, progress.step, values)
        return values["loss"]

    def end_epoch(self) -> None:
        """Validates and speaks when due, logs the epoch, and saves when due."""
        hparams, progress, n_epochs = self.hparams, self.progress, self.progress.epoch + 1
        scalars = logger.epoch_scalars(progress, self.data)
        logger.print_epoch(n_epochs, scalars)
        best_loss, validation = progress.best_loss, {}
        if n_epochs % hparams.epochs_per_validation == 0 or n_epochs == progress.end:
            validation, samples = self.validate()
        is_planned = self.plan_end()
        is_last = n_epochs == progress.end
        if is_last and not validation:  # the end has just come
            validation, samples = self.validate()
        if is_last and validation["diagonality"] > LEARNED and distributed.RANK == 0:
            gain = measure_variance_gain(self.model, self.data.train_set)
            self.model.variance_gain.copy_(gain)
        self.logger.log("epoch", progress.epoch, progress.step, scalars)
        if validation:
            self.logger.log("validation", progress.epoch, progress.step, validation)
            self.log_samples(samples, is_last)
        progress.begin_epoch()  # first: a checkpoint counts this one as done
        is_best = progress.best_loss < best_loss
        is_due = n_epochs % hparams.epochs_per_checkpoint == 0
        if is_best or is_last or is_planned or is_due:
            self.save(is_best)

    def validate(self) -> tuple[dict[str, float], dict[str, Sample]]:
        """Returns the scalars and samples of a validation."""
        data, progress = self.data, self.progress
        validation, samples = validate(
            self.model, data.val_set, data.val_batches, self.loss_function, self.stop.check
        )
        logger.print_validation(progress.epoch + 1, validation)
        warn_of_collapse(validation["diagonality"], progress.best_alignment)
        progress.best_loss = min(progress.best_loss, validation["loss"])
        progress.best_alignment = max(progress.best_alignment, validation["diagonality"])
        return validation, samples

    def log_samples(self, samples: dict[str, Sample], is_last: bool) -> None:
        """Logs two validation clips, and speaks when due."""
        hparams, step = self.hparams, self.progress.step
        n_validations = (self.progress.epoch + 1) // hparams.epochs_per_validation
        # TensorBoard shows ten pictures of a kind: after 1, 2, 4, ... validations.
        is_shown = is_last or n_validations.bit_count() == 1
        self.logger.log_samples(samples, step, is_shown)
        if self.data.texts and (is_last or n_validations % hparams.speak_every == 0):
            texts = self.data.texts if distributed.RANK == 0 else []
            for i, spoken in speak(self.model, texts):
                self.logger.log_speech(i, spoken, step)

    def plan_end(self) -> bool:
        """Plans the end of a run that is limited by ``hours``, and says when training ends. Returns
        whether the end was decided just now."""
        hparams, progress, n_epochs = self.hparams, self.progress, self.progress.epoch + 1
        seconds = distributed.gather(self.seconds)[0]  # all decide by the clock of the first
        epoch_seconds = seconds / (n_epochs - progress.first_epoch)
        rest_seconds = 3600 * hparams.hours - seconds
        is_planned = False
        if math.isinf(progress.end):
            progress.plan_fall(plan_hours(n_epochs, rest_seconds, epoch_seconds, hparams))
            is_planned = math.isfinite(progress.end)
        if is_planned:
            self.logger.log_end(progress)
        if is_planned or self.says_end:
            logger.print_end(n_epochs, progress.fall, epoch_seconds, rest_seconds)
            self.says_end = False
        return is_planned

    # What a stop leaves

    @property
    def seconds(self) -> float:
        """Seconds of training so far, without breaks between a stop and a resume."""
        return time.monotonic() - self.started_at

    def save(self, is_best: bool = False) -> Path:
        """Saves all that is needed to continue exactly from here."""
        self.progress.seconds = self.seconds
        self.progress.metrics_size = self.logger.sync()
        state = start.state_to_save(self.model, self.optimizer, self.progress, self.data)
        self.saved_at = time.monotonic()
        return checkpoint.save(
            self.folder, self.progress.step, state, is_best, self.hparams.keep_checkpoints
        )


if __name__ == "__main__":
    cli.exit_on_user_error(main, distributed.first_to_fail, distributed.end)
