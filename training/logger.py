"""A run's logs: ``metrics.jsonl``, and TensorBoard's curves, pictures and audio."""

import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from matplotlib.image import imsave
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from batching import batch_statistics
from cli import UserError, pluralize, replace_file
from corpus.audio import encode_wav
from corpus.clips import Clip
from data_utils import Data, batch_capacity
from hparams import HParams
from model import Tacotron2
from training.device import training_conditions
from training.distributed import SEVERAL, gather
from training.figures import draw_alignment, draw_gate, draw_mels, draw_speech, render
from training.schedule import Fall, Progress
from training.validation import Sample
from vocoder import Vocoder

OUTLIER = 5  # times the mean: DBS makes few large batches if the longest clip exceeds this
# TensorBoard's tab Custom Scalars: what to look at first. Over epochs, so that strategies compare.
CHARTS = {
    "Learning": {
        "training and validation loss": ["epoch/training_loss", "validation/loss"],
        "masked validation loss": ["validation/masked_loss"],
        "alignment: on the diagonal, and focused": ["validation/diagonality", "validation/focus"],
        "gradient norm, over steps": ["training/grad_norm"],
    },
    "Batching": {
        "zero-padding rate (ZPR)": ["epoch/zpr"],
        "average batch length (ABL), in frames": ["epoch/abl"],
        "batches": ["epoch/n_batches"],
        "decoder steps": ["epoch/total_length"],
    },
    "Speed": {
        "frames per second": ["epoch/frames_per_second"],
        "minutes": ["epoch/minutes"],
        "share of the time spent waiting for data": ["epoch/data_wait"],
        "peak memory, in GiB": ["epoch/peak_(memory|reserved)_gib"],
    },
}


def epoch_scalars(progress: Progress, data: Data) -> dict[str, float]:
    """Returns the scalars of an epoch that has been trained: its loss, its padding, its times."""
    sampler, train_set = data.sampler, data.train_set
    sums, plan = progress.sums, batch_statistics(sampler.lengths, sampler.plan)
    skipped = int(sums.get("skipped", 0))
    n_trained = progress.batch - skipped
    scalars = {
        "minutes": sums["seconds"] / 60,
        "processor_minutes": sums["processor_seconds"] / 60,  # of all threads
        "training_loss": sums["loss"] / n_trained if n_trained else math.nan,
        "zpr": plan.zpr,
        "abl": plan.abl,
        "n_batches": plan.n_batches,
        "total_length": plan.total_length // train_set.n_frames_per_step,  # decoder steps
        "frames_per_second": sum(clip.n_frames for clip in train_set.clips) / sums["seconds"],
        "data_wait": sums["waited"] / sums["seconds"],
        "peak_memory_gib": progress.peak_memory_gib,
        "skipped_steps": skipped,
    }
    if SEVERAL:
        scalars["repeated_batches"] = sampler.n_repeated
    if torch.cuda.is_available():  # with what is cached, and what CUDA graphs keep
        scalars["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return scalars


def print_summary(data: Data, model: Tacotron2, progress: Progress, source: Path | None) -> None:
    """Prints what is trained, on which data and device, and from where it starts."""
    if n := data.sampler.n_repeated:
        batches = pluralize(n, "batch", "es")
        title = f"epoch {progress.epoch + 1}"
        print(f"note: {title} repeats {batches}, so that all processes have equally many")
    device = next(model.parameters()).device
    used = training_conditions(model)
    threads = f", {pluralize(used['threads'], 'thread')}" if device.type == "cpu" else ""
    print(f"training on {used['device']}{threads}, {used['precision']}, decoder={used['decoder']}")
    lengths, hparams = data.sampler.lengths, model.hparams
    ratio = lengths.max() / lengths.mean()
    if hparams.dynamic_batch_size and not batch_capacity(hparams) and ratio > OUTLIER:
        clip = data.train_set.clips[lengths.argmax()]
        batches = pluralize(len(data.sampler.plan), "batch", "es")
        problem = f"is {ratio:.0f} times as long as the mean clip, so an epoch has {batches}"
        print(f"note: {clip.location}: {problem}; split it, or leave it out")
    n_parameters = sum(p.numel() for p in model.parameters())
    done = pluralize(progress.epoch, "epoch")
    if math.isfinite(progress.end):
        done = f"{progress.epoch} of {pluralize(progress.end, 'epoch')}"
    if progress.batch:
        done += f" and {pluralize(progress.batch, 'batch', 'es')}"
    origin = f", from {source}" if source else ""
    limit = "" if math.isfinite(progress.end) else f", to end after {model.hparams.hours:g} h"
    print(
        f"{n_parameters:,} parameters; {len(data.train_set):,} training and "
        f"{len(data.val_set):,} validation clips; {done} done{limit}{origin}"
    )


def print_epoch(n_epochs: int, scalars: dict[str, float]) -> None:
    """Prints how the training of an epoch went."""
    tqdm.write(
        f"epoch {n_epochs}: training loss {scalars['training_loss']:.4f}, "
        f"{scalars['minutes']:.2f} minutes"
    )


def print_validation(n_epochs: int, scalars: dict[str, float]) -> None:
    """Prints the result of a validation."""
    tqdm.write(
        f"epoch {n_epochs}: validation loss {scalars['loss']:.4f}, masked "
        f"{scalars['masked_loss']:.4f}, alignment {scalars['diagonality']:.2f}"
    )


def print_end(n_epochs: int, fall: Fall, epoch_seconds: float, rest_seconds: float) -> None:
    """Prints after an epoch when the run will end: with ``fall``, or in ``rest_seconds`` if the
    fall of the learning rate is not planned yet."""
    about = "about " if math.isinf(fall.end) else ""
    n_left = round(rest_seconds / epoch_seconds) if about else fall.end - n_epochs
    if n_left <= 0:
        return
    falls = ", over which the learning rate falls to 0" if fall.start == n_epochs else ""
    when = datetime.now() + timedelta(seconds=n_left * epoch_seconds)
    tqdm.write(
        f"epoch {n_epochs}: {about}{pluralize(n_left, 'more epoch')}{falls}; training ends about "
        f"{when:%Y-%m-%d %H:%M}"
    )


def report_skipped_step(
    logger: "RunLogger | NoLogger",
    progress: Progress,
    values: dict[str, float],
    clips: Sequence[Clip],
    hparams: HParams,
) -> None:
    """Logs a skipped step, of several processes together, and prints which clips it had.

    Raises:
        UserError: ``max_bad_steps`` were skipped in a row.
    """
    names = list(chain(*gather([clip.location for clip in clips])))
    numbers = {name: str(value) for name, value in values.items()}  # nan or inf
    record = {"batch": progress.batch, **numbers, "clips": names}
    logger.write("bad_step", progress.epoch, progress.step, record)
    problem = (
        f"epoch {progress.epoch + 1}, batch {progress.batch + 1}: loss {values['loss']}, "
        f"gradient {values['grad_norm']}, in {', '.join(names)}"
    )
    if progress.bad_steps >= hparams.max_bad_steps:
        raise UserError(
            f"{problem}; that is {progress.bad_steps} steps in a row; fix these clips, or start "
            "another run from a checkpoint by -c with a smaller learning_rate"
        )
    tqdm.write(f"warning: {problem}: step skipped")


def check_log_dir(log_dir: Path, output_dir: Path) -> str:
    """Returns how the names of a run's TensorBoard files end. Raises :class:`UserError` if
    ``log_dir`` has another run's, whose curves TensorBoard would drop."""
    run = os.path.relpath(output_dir.resolve(), log_dir.resolve())  # both may be moved together
    suffix = f".{zlib.crc32(os.fsencode(run)):08x}"
    for file in log_dir.glob("*tfevents*"):
        if file.suffix != suffix:
            raise UserError(f"{log_dir}: has another run's {file.name}; give another -l")
    return suffix


class RunLogger:
    """Writes ``metrics.jsonl`` and ``sample/`` to ``output_dir``, TensorBoard files to ``log_dir``.

    Args:
        vocoder: makes the audio.
        progress: how far the run has come. What it logged later is dropped, since resuming logs it
            again. (In TensorBoard's curves over epochs it stays, and an epoch is there twice.)
    """

    def __init__(
        self,
        output_dir: Path,
        log_dir: Path,
        vocoder: Vocoder,
        progress: Progress,
        hparams: HParams,
    ) -> None:
        step, suffix = progress.step, check_log_dir(log_dir, output_dir)
        self.output_dir, self.vocoder, self.hparams = output_dir, vocoder, hparams
        self.sample_dir = output_dir / "sample"
        self.sample_dir.mkdir(parents=True, exist_ok=True)
        self.metrics = (output_dir / "metrics.jsonl").open("ab")
        self.metrics.truncate(progress.metrics_size)
        purge_step = step + 1 if step else 0
        self.tensorboard = SummaryWriter(log_dir, purge_step=purge_step, filename_suffix=suffix)
        layout = {
            group: {title: ["Multiline", tags] for title, tags in charts.items()}
            for group, charts in CHARTS.items()
        }
        self.tensorboard.add_custom_scalars(layout)
        self.next_step = step + 1
        self.has_targets = step > 0 and (self.sample_dir / "target.wav").exists()

    def log(self, event: str, epoch: int, step: int, values: dict[str, float]) -> None:
        """Logs the scalars of an ``event``: "step" (training), "epoch" or "validation".

        TensorBoard plots "step" over steps and the others over finished epochs, since the
        number of steps in an epoch depends on the strategy.
        """
        self.write(event, epoch, step, values)
        folder, x = ("training", step) if event == "step" else (event, epoch + 1)
        for name, value in values.items():
            self.tensorboard.add_scalar(f"{folder}/{name}", value, x)

    def log_settings(self) -> None:
        """Logs the settings of this start: to hparams.json, and to TensorBoard as a table, those
        that are not the defaults first."""
        with replace_file(self.output_dir / "hparams.json") as file:
            file.write((json.dumps(vars(self.hparams), indent=2) + "\n").encode())
        lines, default = ["| setting | value | default |", "|---|---|---|"], vars(HParams())
        settings = sorted(vars(self.hparams).items(), key=lambda pair: pair[1] == default[pair[0]])
        for name, value in settings:
            usual = "" if value == default[name] else f"`{default[name]}`"
            lines.append(f"| `{name}` | `{value}` | {usual} |")
        self.tensorboard.add_text("settings", "\n".join(lines), self.next_step)

    def log_conditions(self, progress: Progress, data: Data, model: Tacotron2) -> None:
        """Logs what must be the same in runs whose times, or validation losses, are compared."""
        values = training_conditions(model)
        for name, dataset in ("training", data.train_set), ("validation", data.val_set):
            values[f"{name}_frames"] = sum(clip.n_frames for clip in dataset.clips)
        self.write("start", progress.epoch, progress.step, values)

    def log_end(self, progress: Progress) -> None:
        """Logs the end that was planned for a run that is limited by ``hours``."""
        record = {"hours": self.hparams.hours, "epochs": progress.end}
        self.write("end", progress.epoch, progress.step, record)
        if self.hparams.learning_rate_decay and progress.falls_from == progress.end:
            tqdm.write("note: no time was left for the learning rate to fall; set more hours")

    def write(self, event: str, epoch: int, step: int, values: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl, where epochs and batches count from 0. JSON has no nan
        or infinity: both become null."""
        record = {"event": event, "epoch": epoch, "step": step, **values}
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[name] = None
        self.metrics.write(json.dumps(record).encode() + b"\n")
        self.metrics.flush()  # so that readers see whole lines

    def sync(self) -> int:
        """Flushes everything to disk; returns the size of metrics.jsonl in bytes."""
        os.fsync(self.metrics.fileno())
        self.tensorboard.flush()
        return self.metrics.tell()

    def log_samples(self, samples: dict[str, Sample], step: int, to_tensorboard: bool) -> None:
        """Logs pictures and audio of ``samples``: those of "sample" to files, and all of them to
        TensorBoard, the first time and if ``to_tensorboard``. They are the same clips each time:
        their texts and target audio are logged once, at step 0, which no resume drops.
        """
        first, self.has_targets = not self.has_targets, True
        if first or to_tensorboard:
            for name, sample in samples.items():
                self._log_sample(name, sample, step, first, self.tensorboard)
        else:
            self._log_sample("sample", samples["sample"], step, first, NoLogger())

    def _log_sample(
        self, name: str, sample: Sample, step: int, first: bool, tensorboard: Any
    ) -> None:
        hparams, rate = self.hparams, self.hparams.sampling_rate
        hop_seconds = hparams.hop_length / rate
        figures = {
            "alignment": draw_alignment(sample.alignment, sample.text, sample.symbols, hop_seconds),
            "mel": draw_mels(sample, hop_seconds),
            "gate": draw_gate(sample, hop_seconds * hparams.n_frames_per_step, hparams.end_steps),
        }
        for kind, figure in figures.items():
            pixels = render(figure)
            tensorboard.add_image(f"{name}/{kind}", pixels, step, dataformats="HWC")
            if name == "sample":
                imsave(self.sample_dir / f"{kind}.png", pixels)
        sounds = [("predicted", sample.mel_postnet, step)]
        if first:
            tensorboard.add_text(f"{name}/text", sample.text, 0)
            sounds.append(("target", sample.mel, 0))
        for kind, mel, x in sounds:
            sound = self.vocoder(mel)
            tensorboard.add_audio(f"{name}/{kind}", sound, x, rate)
            if name == "sample":
                (self.sample_dir / f"{kind}.wav").write_bytes(encode_wav(sound, rate))

    def log_speech(self, i: int, spoken: Any, step: int) -> None:
        """Logs the free-running speech of text ``i`` to TensorBoard and to ``sample/step_STEP_I``,
        counted from 1."""
        name, text = f"speech/{i + 1}", self.hparams.speak_texts[i]
        stem = f"step_{step:08d}_{i + 1}"
        rate = self.hparams.sampling_rate
        hop_seconds = self.hparams.hop_length / rate
        alignments, mel = [spoken.alignment], spoken.mel
        pixels = render(draw_speech(alignments, mel, text, spoken.symbols, hop_seconds))
        sound = self.vocoder(mel)
        imsave(self.sample_dir / f"{stem}.png", pixels)
        (self.sample_dir / f"{stem}.wav").write_bytes(encode_wav(sound, rate))
        self.tensorboard.add_image(f"{name}/alignment", pixels, step, dataformats="HWC")
        if len(sound):  # not if it stopped at once
            self.tensorboard.add_audio(f"{name}/audio", sound, step, rate)
        self.tensorboard.add_text(f"{name}/text", text, step)

    def close(self) -> None:
        self.metrics.close()
        self.tensorboard.close()


class NoLogger:
    """A logger whose methods do nothing, for processes other than the first."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values, **options: None
