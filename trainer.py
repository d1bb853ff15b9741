"""One training: its steps, its validations, its checkpoints, and how far it is."""

import dataclasses
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import data_utils
from batching import batch_statistics
from checkpoint import (
    BEST,
    StopSignals,
    keep_newest,
    link,
    random_state,
    save_checkpoint,
    set_random_state,
)
from data_utils import Batch, MelDataset, collate, loaded, progress
from device import full_precision, is_out_of_memory, peak_memory, synchronize
from hparams import HParams, UserError
from logger import RunLogger, Sample, alignment_scores
from loss_function import Tacotron2Loss
from model import Output, Tacotron2


@dataclasses.dataclass
class Progress:
    """How far a run is, between two of its batches."""

    epoch: int = 0
    batch: int = 0  # batches of the epoch that are done
    step: int = 0  # of the optimiser
    bad_steps: int = 0  # skipped, up to now, one after the other
    best_loss: float = math.inf  # of all validations, as is best_alignment
    best_alignment: float = 0.0
    metrics_size: int = 0  # bytes of metrics.jsonl
    # Of the epoch so far:
    seconds: float = 0.0
    waited: float = 0.0  # of them, for data
    loss_sum: float = 0.0
    skipped: int = 0  # batches
    peak_memory_gib: float = 0.0


@dataclasses.dataclass
class Run:
    """A training: what it consists of, and how far it is."""

    folder: Path
    hparams: HParams
    data: str  # fingerprint
    model: Tacotron2
    optimizer: torch.optim.Optimizer
    loss_function: Tacotron2Loss
    logger: RunLogger
    at: Progress
    saved_at: float = dataclasses.field(default_factory=time.monotonic)

    def save(self, is_best: bool = False) -> Path:
        """Keep all that it takes to go on from here as if there had been no break."""
        self.at.metrics_size = self.logger.sync()
        path = self.folder / f"checkpoint_{self.at.step:08d}.pt"
        state = {
            "state_dict": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": dataclasses.asdict(self.at),
            "random_state": random_state(),
            "hparams": dataclasses.asdict(self.hparams),
            "data": self.data,
        }
        if is_best:  # this name first: killed in between, the same is validated and saved again
            save_checkpoint(self.folder / BEST, state)
            link(self.folder / BEST, path)
        else:
            save_checkpoint(path, state)
        keep_newest(self.folder, self.hparams.keep_checkpoints)
        self.saved_at = time.monotonic()
        return path

    def epoch(self, train_loader: DataLoader, val_loader: DataLoader, stop: StopSignals) -> None:
        """What is left of an epoch, and what follows it: validation and a checkpoint."""
        hparams, epoch = self.hparams, self.at.epoch
        figures = self.train_epoch(train_loader, stop)
        tqdm.write(
            f"epoch {epoch}: training loss {figures['training_loss']:.4f}, "
            f"{figures['minutes']:.2f} minutes"
        )
        is_last, is_best, validation = epoch == hparams.epochs - 1, False, None
        if is_last or (epoch + 1) % hparams.epochs_per_validation == 0:
            # A fixed clip to look at, and another one each time.
            other = epoch // hparams.epochs_per_validation % len(val_loader.dataset)
            validation, samples = validate(self.model, val_loader, self.loss_function, stop, other)
            tqdm.write(
                f"epoch {epoch}: validation loss {validation['loss']:.4f}, masked "
                f"{validation['masked_loss']:.4f}, alignment {validation['diagonality']:.2f}"
            )
            self.warn_of_collapse(validation["diagonality"])
            is_best = validation["loss"] < self.at.best_loss
            self.at.best_loss = min(self.at.best_loss, validation["loss"])
        self.logger.log("epoch", epoch, self.at.step, figures)
        if validation:
            self.logger.log("validation", epoch, self.at.step, validation)
        kept = ("step", "bad_steps", "best_loss", "best_alignment")
        kept = {name: getattr(self.at, name) for name in kept}
        self.at = Progress(epoch=epoch + 1, **kept)
        if is_best or is_last or (epoch + 1) % hparams.epochs_per_checkpoint == 0:
            self.save(is_best)
        if validation:
            stop.check()
            self.logger.log_samples(samples, self.at.step, hparams)

    def train_epoch(self, loader: DataLoader, stop: StopSignals) -> dict[str, float]:
        """What is left of one pass over the training set; returns the figures of all of it."""
        at, device = self.at, next(self.model.parameters()).device
        sampler, clips = loader.batch_sampler, loader.dataset.clips
        self.model.train()
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        asked = time.perf_counter()
        sampler.set_epoch(at.epoch)
        plan = sampler.plan
        real_frames = np.cumsum(sampler.lengths[plan.order], dtype=np.int64)[plan.ends - 1]
        options = {"total": len(plan), "initial": at.batch, "unit": "batch"}
        with progress(desc=f"epoch {at.epoch}", **options) as bar:
            for batch in loaded(loader, stop.while_waiting):
                waited = time.perf_counter() - asked
                loss = self.step(batch.to(device), [clips[i].place for i in plan[at.batch]])
                at.batch += 1
                at.loss_sum += loss
                at.waited += waited
                at.seconds += time.perf_counter() - asked
                at.peak_memory_gib = max(at.peak_memory_gib, peak_memory(device))
                speed = real_frames[at.batch - 1] / at.seconds
                bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} frames/s", refresh=False)
                bar.update()
                stop.check()
                minutes = (time.monotonic() - self.saved_at) / 60
                if 0 < self.hparams.checkpoint_minutes <= minutes and at.batch < len(plan):
                    self.save()
                asked = time.perf_counter()
        statistics = batch_statistics(sampler.lengths, plan)
        return {
            "minutes": at.seconds / 60,
            "training_loss": at.loss_sum / max(at.batch - at.skipped, 1),
            "zpr": statistics.zpr,
            "abl": statistics.abl,
            "n_batches": statistics.n_batches,
            "total_length": statistics.total_length,
            "frames_per_second": int(real_frames[-1]) / at.seconds,
            "data_wait": at.waited / at.seconds,
            "peak_memory_gib": at.peak_memory_gib,
            "skipped_steps": at.skipped,
        }

    def step(self, batch: Batch, places: list[str]) -> float:
        """Train on a batch; returns its loss, or 0 if that or the gradient is not finite. Then
        weights, moments and batch norm's means stay as they were.
        """
        at, hparams, began = self.at, self.hparams, time.perf_counter()
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        try:
            self.optimizer.zero_grad()
            loss = self.loss_function(self.model(batch), batch)
            loss.objective.backward()
            grad_norm = nn.utils.clip_grad_norm_(
                self.model.parameters(), hparams.grad_clip_thresh
            ).item()  # waits for the GPU
            values = {"loss": loss.total.item(), "masked_loss": loss.masked.item()}
            finite = math.isfinite(values["loss"]) and math.isfinite(grad_norm)
            if finite:
                self.optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"epoch {at.epoch}, batch {at.batch}: {too_large(batch)}; --resume with less else "
                "on the device, or start anew with a smaller batch_capacity_seconds or batch_size"
            ) from None
        if hparams.guided_attention_weight:
            values["guided_attention_loss"] = loss.guided_attention.item()
        values |= {"grad_norm": grad_norm, "learning_rate": hparams.learning_rate}
        values["duration"] = time.perf_counter() - began  # seconds
        if finite:
            at.step, at.bad_steps = at.step + 1, 0
            self.logger.log("step", at.epoch, at.step, values)
            return values["loss"]
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        at.skipped, at.bad_steps = at.skipped + 1, at.bad_steps + 1
        self.logger.log_bad_step(at.epoch, at.step, at.batch, values, places)
        what = (
            f"epoch {at.epoch}, batch {at.batch}: loss {values['loss']}, gradient {grad_norm}, in "
            f"{', '.join(places)}"
        )
        if at.bad_steps >= hparams.max_bad_steps:
            raise UserError(
                f"{what}; that is {at.bad_steps} steps in a row, and the checkpoints are as they "
                "were; mend these clips, or go on by -c from one with a smaller learning_rate"
            )
        tqdm.write(f"warning: {what}: step skipped")
        return 0.0

    def warn_of_collapse(self, alignment: float) -> None:
        """Say so if attention had found the diagonal and has lost it."""
        best = self.at.best_alignment
        if best > 0.5 and alignment < 0.7 * best:
            tqdm.write(
                f"warning: alignment {alignment:.2f} was {best:.2f}: attention collapsed; if it "
                "does not come back, go on by -c from checkpoint_best.pt with a smaller "
                "learning_rate"
            )
        self.at.best_alignment = max(best, alignment)

    def try_batches(self, batches: list[list[int]], dataset: MelDataset, stop: StopSignals) -> None:
        """Forward and backward of each, which leave nothing behind: is there memory enough?

        Raises:
            UserError: no; it suggests a setting.
        """
        before = random_state(), [buffer.clone() for buffer in self.model.buffers()]
        self.model.train()
        try:
            for indices in batches:
                clips = [dataset[i] for i in indices]
                if self.fits(clips):
                    stop.check()
                    continue
                least = max(len(clips) // 8, 1)
                sizes = (n for n in range(len(clips) * 7 // 8, 0, -least) if self.fits(clips[:n]))
                n = next(sizes, 0)
                raise UserError(
                    f"{too_large(collate(clips))}; {self.suggestion(len(clips), n, dataset)}"
                )
        finally:
            set_random_state(before[0])
            for buffer, old in zip(self.model.buffers(), before[1], strict=True):
                buffer.copy_(old)

    def fits(self, clips: list[tuple[Tensor, Tensor]]) -> bool:
        device = next(self.model.parameters()).device
        try:
            # Room for Adam's moments, which come with the first step.
            n = 0 if self.optimizer.state else 2
            kept = [torch.empty_like(p) for p in self.model.parameters() for _ in range(n)]
            batch = collate(clips).to(device)
            self.loss_function(self.model(batch), batch).objective.backward()
            synchronize(device)
            del kept
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            self.optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.empty_cache()  # what is left in pieces, for the next trial
        return True

    def suggestion(self, B: int, fitting: int, dataset: MelDataset) -> str:
        """What to set where a batch of ``B`` clips is too large and ``fitting`` of them are not."""
        hparams = self.hparams
        longest = max(clip.n_frames for clip in dataset.clips)
        capacity = data_utils.batch_capacity(hparams) or hparams.batch_size * longest
        seconds = capacity * hparams.hop_length / hparams.sampling_rate
        share = fitting / B
        if share * capacity < longest or share * hparams.batch_size < 1:
            return "not even one clip fits: remove the longest, or reduce the model"
        fix = f"batch_size={int(share * hparams.batch_size)} (now {hparams.batch_size})"
        if hparams.dynamic_batch_size:
            fix = f"batch_capacity_seconds={share * seconds:.0f} (now {seconds:.0f})"
        return f"set {fix}; scripts/find_batch_capacity.py finds the most that fits"


def too_large(batch: Batch) -> str:
    B, T_in = batch.text.shape
    return (
        f"a batch of {B} clips, up to {batch.mel.size(2)} frames and {T_in} symbols long, needs "
        "more memory than there is"
    )


@torch.no_grad()
@full_precision()
def validate(
    model: Tacotron2,
    loader: DataLoader,
    loss_function: Tacotron2Loss,
    stop: StopSignals,
    other: int = 0,
) -> tuple[dict[str, float], dict[str, Sample]]:
    """Teacher-forced losses over the validation set, and two of its clips: "sample", always the
    same, and clip ``other``.

    Each loss is the mean over what it averages in a batch: padded frames, or real ones. The
    prenet's noise has a seed of its own, so that it is the same in every validation and
    training goes on as if there had been none.
    """
    model.eval()
    device = next(model.parameters()).device
    names = ("total", "mel", "mel_postnet", "gate")
    sums = torch.zeros(len(names) + 3, dtype=torch.float64)
    padded_frames, real_frames, samples = 0, 0, {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(data_utils.VALIDATION_SEED)
        batches = progress(loaded(loader, stop.while_waiting), "validation", len(loader))
        for indices, batch in zip(loader.batch_sampler, batches, strict=True):
            batch = batch.to(device)
            output = model(batch)
            loss = loss_function(output, batch)
            if not loss.total.isfinite():
                places = ", ".join(loader.dataset.clips[i].place for i in indices)
                tqdm.write(f"warning: validation loss {loss.total.item()} in {places}")
            scores = alignment_scores(output.alignment, batch.text_lengths, batch.mel_lengths)
            n_padded, n_real = batch.gate.numel(), int(batch.mel_lengths.sum())
            sums += torch.tensor(
                [
                    *(getattr(loss, name).item() * n_padded for name in names),
                    loss.masked.item() * n_real,
                    *(score.sum().item() for score in scores),
                ],
                dtype=torch.float64,
            )
            padded_frames, real_frames = padded_frames + n_padded, real_frames + n_real
            # The batch is sorted by text length, stably.
            by_text = sorted(indices, key=lambda i: -len(loader.dataset.clips[i].ids))
            chosen = {"sample": by_text[len(indices) // 2], "other": other}
            for name, i in chosen.items():
                if name not in samples and i in indices:
                    clip = loader.dataset.clips[i]
                    samples[name] = take_sample(clip.text, by_text.index(i), batch, output)
            stop.check()
    n_clips = len(loader.dataset)
    total, mel, mel_postnet, gate, masked, diagonality, focus = sums.tolist()
    return {
        "loss": total / padded_frames,
        "mel_loss": mel / padded_frames,
        "mel_postnet_loss": mel_postnet / padded_frames,
        "gate_loss": gate / padded_frames,
        "masked_loss": masked / real_frames,
        "diagonality": diagonality / n_clips,
        "focus": focus / n_clips,
    }, samples


def take_sample(text: str, row: int, batch: Batch, output: Output) -> Sample:
    """One clip of a batch."""
    T_out, T_in = int(batch.mel_lengths[row]), int(batch.text_lengths[row])
    return Sample(
        text,
        batch.mel[row, :, :T_out].cpu(),
        output.mel_postnet[row, :, :T_out].cpu(),
        output.gate[row, :T_out].cpu(),
        batch.gate[row, :T_out].cpu(),
        output.alignment[row, :T_out, :T_in].cpu(),
    )
