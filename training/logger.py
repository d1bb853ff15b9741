"""A run's logs: TensorBoard curves, pictures and audio, and ``metrics.jsonl``."""

import io
import json
import math
import os
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from batching import batch_statistics
from cli import UserError, counted
from data_utils import Data
from hparams import HParams
from model import Tacotron2, end_probability
from training.checkpoint import Progress
from training.device import training_conditions
from training.distributed import SEVERAL
from training.schedule import Fall
from vocoder import Vocoder

# TensorBoard's tab Custom Scalars: what to look at first. Over epochs, so that strategies compare.
CHARTS = {
    "Learning": {
        "training and validation loss": ["epoch/training_loss", "validation/(precise_)?loss"],
        "masked validation loss": ["validation/(precise_)?masked_loss"],
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


class Sample(NamedTuple):
    """A validation clip, without padding."""

    text: str
    mel: Tensor  # (n_mels, T_out) target
    mel_postnet: Tensor  # (n_mels, T_out) predicted with teacher forcing
    gate: Tensor  # (n_steps,) predicted logits
    gate_target: Tensor  # (n_steps,) 1 at the last step
    alignment: Tensor  # (T_out, T_in)


def epoch_scalars(progress: Progress, data: Data) -> dict[str, float]:
    """Returns the scalars of an epoch that was trained: its loss, its padding, its times."""
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
    """Prints what is trained on what, and from where."""
    if n := data.sampler.n_repeated:
        batches = counted(n, "batch", "es")
        print(f"note: epoch 1 repeats {batches}, so that all processes have equally many")
    device = next(model.parameters()).device
    used = training_conditions(device, model.hparams, model.decoder.implementation)
    threads = f", {counted(used['threads'], 'thread')}" if device.type == "cpu" else ""
    print(f"training on {used['device']}{threads}, {used['precision']}, decoder={used['decoder']}")
    n_parameters = sum(p.numel() for p in model.parameters())
    done = counted(progress.epoch, "epoch")
    if math.isfinite(progress.end):
        done = f"{progress.epoch} of {counted(progress.end, 'epoch')}"
    if progress.batch:
        done += f" and {counted(progress.batch, 'batch', 'es')}"
    limit = "" if math.isfinite(progress.end) else f", to end after {model.hparams.hours:g} h"
    print(
        f"{n_parameters:,} parameters; {len(data.train_set):,} training and "
        f"{len(data.val_set):,} validation clips; {done} done{limit}"
        f"{f', from {source}' if source else ''}"
    )


def print_end(n_epochs: int, fall: Fall, epoch_seconds: float, rest_seconds: float) -> None:
    """Prints after an epoch when the run will end: after ``fall``, or if that is not decided yet,
    in ``rest_seconds``."""
    about = "about " if math.isinf(fall.end) else ""
    n_left = round(rest_seconds / epoch_seconds) if about else fall.end - n_epochs
    if n_left <= 0:
        return
    falls = ", over which the learning rate falls to 0" if fall.start == n_epochs else ""
    when = datetime.now() + timedelta(seconds=n_left * epoch_seconds)
    tqdm.write(
        f"epoch {n_epochs}: {about}{counted(n_left, 'more epoch')}{falls}; training ends about "
        f"{when:%Y-%m-%d %H:%M}"
    )


class RunLogger:
    """Writes ``metrics.jsonl`` and ``sample/`` to ``output_dir``, TensorBoard files to ``log_dir``.

    Args:
        vocoder: makes the audio.
        step, size: the last step done, and the size of metrics.jsonl then, in bytes. Whatever an
            interrupted run logged after that is dropped, since resuming logs it again. (Not from
            TensorBoard's curves over epochs, which then have an epoch twice.)

    Raises:
        UserError: metrics.jsonl is shorter than ``size``.
    """

    def __init__(
        self, output_dir: Path, log_dir: Path, vocoder: Vocoder, step: int = 0, size: int = 0
    ) -> None:
        self.vocoder = vocoder
        self.sample_dir = output_dir / "sample"
        self.sample_dir.mkdir(parents=True, exist_ok=True)
        self.metrics = (output_dir / "metrics.jsonl").open("ab")
        if self.metrics.tell() < size:
            raise UserError(
                f"{self.metrics.name}: has {self.metrics.tell():,} bytes, but had {size:,} when "
                "the checkpoint was saved; restore the missing lines, or start another run from "
                "it by -c, with another -o"
            )
        self.metrics.truncate(size)
        self.tensorboard = SummaryWriter(log_dir, purge_step=step + 1 if step else 0)
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

    def log_settings(self, hparams: HParams) -> None:
        """Logs the settings of this start as a table, those that are not the defaults first."""
        lines, default = ["| setting | value | default |", "|---|---|---|"], vars(HParams())
        settings = sorted(vars(hparams).items(), key=lambda pair: pair[1] == default[pair[0]])
        for name, value in settings:
            usual = "" if value == default[name] else f"`{default[name]}`"
            lines.append(f"| `{name}` | `{value}` | {usual} |")
        self.tensorboard.add_text("settings", "\n".join(lines), self.next_step)

    def log_skipped_step(
        self, epoch: int, step: int, batch: int, values: dict[str, float], clips: list[str]
    ) -> None:
        """Logs a skipped batch and the locations of its clips."""
        values = {name: str(value) for name, value in values.items()}  # nan or inf
        self.write("bad_step", epoch, step, {"batch": batch, **values, "clips": clips})
        text = f"{values}: {', '.join(clips)}"
        self.tensorboard.add_text("training/bad_step", text, step)

    def write(self, event: str, epoch: int, step: int, values: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl, where epochs and batches count from 0. What JSON has
        not, nan and infinity, becomes null."""
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

    def log_samples(
        self, samples: dict[str, Sample], step: int, hparams: HParams, to_tensorboard: bool = True
    ) -> None:
        """Writes pictures and audio of "sample" to files, and logs those of all ``samples`` to
        TensorBoard, the first time and if ``to_tensorboard``. They are the same clips each time:
        their texts and target audio are logged once, at step 0, which no resume drops.
        """
        frame, rate = hparams.hop_length / hparams.sampling_rate, hparams.sampling_rate
        first, self.has_targets = not self.has_targets, True
        tensorboard = self.tensorboard if first or to_tensorboard else NoLogger()
        for name, sample in samples.items():
            if name != "sample" and isinstance(tensorboard, NoLogger):
                continue
            figures = {
                "alignment": draw_alignment(sample.alignment, sample.text, frame),
                "mel": draw_mels(sample, frame),
                "gate": draw_gate(sample, frame * hparams.n_frames_per_step),
            }
            for kind, figure in figures.items():
                pixels = render(figure)
                if name == "sample":
                    imsave(self.sample_dir / f"{kind}.png", pixels)
                tensorboard.add_image(f"{name}/{kind}", pixels, step, dataformats="HWC")
            sounds = {"predicted": (sample.mel_postnet, step)}
            if first:
                tensorboard.add_text(f"{name}/text", sample.text, 0)
                sounds["target"] = sample.mel, 0
            for kind, (mel, x) in sounds.items():
                sound = self.vocoder(mel)
                tensorboard.add_audio(f"{name}/{kind}", sound, x, rate)
                if name == "sample":
                    write_wav(self.sample_dir / f"{kind}.wav", sound, rate)

    def log_speech(
        self, i: int, mel: Tensor, alignment: Tensor, step: int, hparams: HParams
    ) -> None:
        """Logs the free-running speech of text ``i`` to TensorBoard and to ``sample/step_STEP_I``,
        counted from 1."""
        name, text = f"speech/{i + 1}", hparams.speak_texts[i]
        stem = f"step_{step:08d}_{i + 1}"
        frame, rate = hparams.hop_length / hparams.sampling_rate, hparams.sampling_rate
        pixels, sound = render(draw_speech([alignment], mel, text, frame)), self.vocoder(mel)
        imsave(self.sample_dir / f"{stem}.png", pixels)
        write_wav(self.sample_dir / f"{stem}.wav", sound, rate)
        self.tensorboard.add_image(f"{name}/alignment", pixels, step, dataformats="HWC")
        if len(sound):  # not if it stopped at once
            self.tensorboard.add_audio(f"{name}/audio", sound, step, rate)
        self.tensorboard.add_text(f"{name}/text", text, step)

    def close(self) -> None:
        self.metrics.close()
        self.tensorboard.close()


class NoLogger:
    """Has a logger's methods, which do nothing: for processes other than the first."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values, **options: None


def write_wav(path: Path, samples: np.ndarray, rate: int) -> None:
    """Writes samples (n,) to a wav file. Python writes it: its errors say what is wrong."""
    wav = io.BytesIO()
    soundfile.write(wav, samples, rate, format="WAV")
    path.write_bytes(wav.getvalue())


# Figures, by matplotlib's object interface: no global state, no display


def _figure(height: float, rows: int = 1) -> tuple[Figure, Any]:
    """Returns a figure and its axes. A tight layout would take longer than drawing."""
    figure = Figure(figsize=(8, height), dpi=100)
    figure.subplots_adjust(0.75 / 8, 0.5 / height, 1 - 0.2 / 8, 1 - 0.35 / height, hspace=0.25)
    return figure, figure.subplots(rows, squeeze=False, sharex=True)[:, 0]


def _show(axes: Any, values: Tensor, frame: float, **colours: Any) -> Any:
    """Shows an image of ``values`` (rows, T_out) over seconds."""
    extent = (0, values.size(1) * frame, 0, values.size(0))
    return axes.imshow(values.numpy(), aspect="auto", origin="lower", extent=extent, **colours)


def _set_title(axes: Any, text: str) -> None:
    title = text if len(text) <= 75 else f"{text[:74]}…"
    axes.set_title(title, loc="left", parse_math=False)  # $ is a dollar


def render(figure: Figure) -> np.ndarray:
    """Returns pixels (height, width, 4) uint8."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def draw_alignment(alignment: Tensor, text: str, frame: float) -> Figure:
    """Draws attention weights (T_out, T_in) over time; ``frame``: hop in seconds."""
    figure, (axes,) = _figure(4)
    image = _show(axes, alignment.T, frame)
    figure.colorbar(image, label="attention weight")
    _set_title(axes, text)
    axes.set(xlabel="time (s)", ylabel="character")
    return figure


def draw_speech(
    alignments: Sequence[Tensor], mel: Tensor, text: str, frame: float, pause: int = 0
) -> Figure:
    """Draws attention weights of the pieces of a text, one after the other with pauses of ``pause``
    frames, above the mel of them all; ``frame``: hop in seconds."""
    figure, (above, below) = _figure(6, 2)
    t = n = 0
    for alignment in alignments:
        T_out, T_in = alignment.shape
        image = above.imshow(
            alignment.T.numpy(), aspect="auto", origin="lower", vmin=0, vmax=1,
            extent=(t * frame, (t + T_out) * frame, n, n + T_in),
        )  # fmt: skip
        t, n = t + T_out + pause, n + T_in
    above.set(ylabel="character", xlim=(0, mel.size(1) * frame), ylim=(0, n))
    above.set_facecolor(image.cmap(0.0))
    _set_title(above, text)
    figure.colorbar(image, ax=above, label="attention weight")
    figure.colorbar(_show(below, mel, frame, cmap="magma"), ax=below, label="ln magnitude")
    below.set(xlabel="time (s)", ylabel="mel channel")
    return figure


def draw_mels(sample: Sample, frame: float) -> Figure:
    """Draws the target above the prediction, with the same range of colours."""
    figure, (above, below) = _figure(5, 2)
    image = _show(above, sample.mel, frame, cmap="magma")
    _show(below, sample.mel_postnet, frame, cmap="magma", norm=image.norm)
    above.set(ylabel="mel channel", title="target")
    below.set(ylabel="mel channel", title="predicted", xlabel="time (s)")
    figure.colorbar(image, ax=(above, below), label="ln magnitude")
    return figure


def draw_gate(sample: Sample, step: float) -> Figure:
    """Draws the probability that the clip has ended by each decoder step, and its target; ``step``:
    in seconds."""
    figure, (axes,) = _figure(2.5)
    seconds = np.arange(len(sample.gate)) * step
    axes.plot(seconds, sample.gate_target.numpy(), color="0.7", label="target")
    axes.plot(seconds, end_probability(sample.gate[None])[0].numpy(), label="predicted")
    axes.set(xlabel="time (s)", ylabel="has ended: probability", ylim=(-0.05, 1.05))
    axes.legend(loc="upper left", frameon=False)
    return figure
