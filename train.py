"""Train Tacotron 2 with efficient batching.

    python train.py -o runs/first --hparams "data_dir=data/LJSpeech-1.1,batching_strategy=SSB"

Reads top to bottom: settings, data, model, resume, epochs. The output folder gets the settings,
metrics.jsonl, the last and the best checkpoint, and a validation sample to look at and hear.
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

import data_utils
from batching import batch_statistics
from checkpoint import (
    STATE,
    load_checkpoint,
    load_weights,
    make_folder,
    refuse_changes,
    save_checkpoint,
    saved_hparams,
)
from data_utils import Batch, MelDataset, load_clips, make_loader, open_mels, progress
from device import choose_device, keep_memory, peak_memory, synchronize
from hparams import (
    PRESETS,
    ArgumentParser,
    HParams,
    UserError,
    create_hparams,
    exit_on_user_error,
)
from logger import RunLogger, Sample, alignment_scores
from loss_function import Tacotron2Loss
from model import Output, Tacotron2


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
        "-c", "--checkpoint", type=Path, help="start from this checkpoint, at its epoch"
    )
    parser.add_argument(
        "--warm_start",
        action="store_true",
        help="take only the weights of -c, without ignore_layers, and start at epoch 0",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from OUTPUT_DIR's last checkpoint, with its settings but for what --hparams "
        "changes; start anew if there is none",
    )
    parser.add_argument("--preset", default="paper", help=f"{' or '.join(PRESETS)} (default paper)")
    parser.add_argument(
        "--hparams", default="", metavar="NAME=VALUE,...", help="settings to change"
    )
    args = parser.parse_args()
    if args.warm_start and not args.checkpoint:
        parser.error("--warm_start takes the weights of -c CHECKPOINT; name one")
    if args.resume and args.checkpoint:
        parser.error("--resume goes on from OUTPUT_DIR's own checkpoint; leave out -c")
    return args


def main() -> None:
    keep_memory()
    args = parse_args()
    last, best = args.output_dir / "checkpoint_last.pt", args.output_dir / "checkpoint_best.pt"
    if last.exists() and not args.resume:
        raise UserError(f"{args.output_dir}: holds a run; --resume it, or give another -o")
    resuming = args.resume and last.exists()
    source = last if resuming else args.checkpoint
    state = load_checkpoint(source) if source else {}
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
    settings = dataclasses.asdict(hparams)
    position, step, best_loss = {"epoch": 0, "batch": 0}, 0, math.inf
    if source:
        if resuming:
            refuse_changes(state, settings, source)
        load_weights(model, state, source, hparams.ignore_layers if args.warm_start else ())
        if all(name in state for name in STATE) and not args.warm_start:
            position, step, best_loss = state["sampler"], state["step"], state["best_loss"]
            optimizer.load_state_dict(state["optimizer"])
            optimizer.param_groups[0].update(
                lr=hparams.learning_rate, weight_decay=hparams.weight_decay
            )
            set_random_state(state["random_state"])
    if position["epoch"] >= hparams.epochs:
        done = f"{source}: has {position['epoch']} epochs"
        if not resuming:
            raise UserError(f"{done}; set epochs above that, or take its weights by --warm_start")
        print(f"{done}: nothing left to do")
        return

    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"training on {name}, {hparams.precision}", flush=True)

    # Data
    train_clips = load_clips(hparams.training_files, hparams)
    val_clips = load_clips(hparams.validation_files, hparams)
    sampler = data_utils.training_sampler(train_clips, hparams)
    sampler.load_state_dict(position)
    places = ((clip.place, clip.text) for clip in [*train_clips, *val_clips])
    data_utils.report_left_out(places, hparams)
    log_dir = args.log_dir or args.output_dir
    for folder in (args.output_dir, log_dir):
        make_folder(folder)
    mels = open_mels([*train_clips, *val_clips], hparams)
    train_loader = make_loader(MelDataset(train_clips, mels), sampler, hparams)
    val_batches = data_utils.validation_batches(val_clips, hparams)
    val_loader = make_loader(MelDataset(val_clips, mels), val_batches, hparams)

    (args.output_dir / "hparams.json").write_text(json.dumps(settings, indent=2) + "\n")
    logger = RunLogger(args.output_dir, log_dir, position["epoch"], step)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters; "
        f"{len(train_clips):,} training and {len(val_clips):,} validation clips; "
        f"{position['epoch']} of {hparams.epochs} epochs done{f', from {source}' if source else ''}"
    )

    # Epochs
    for epoch in range(position["epoch"], hparams.epochs):
        values, step = train_epoch(
            model, train_loader, loss_function, optimizer, hparams, epoch, step, logger
        )
        logger.log("epoch", epoch, step, values)
        tqdm.write(
            f"epoch {epoch}: training loss {values['training_loss']:.4f}, "
            f"{values['minutes']:.2f} minutes"
        )
        is_last, is_best, sample = epoch == hparams.epochs - 1, False, None
        if is_last or (epoch + 1) % hparams.epochs_per_validation == 0:
            values, sample = validate(model, val_loader, loss_function, device)
            logger.log("validation", epoch, step, values)
            tqdm.write(
                f"epoch {epoch}: validation loss {values['loss']:.4f}, masked "
                f"{values['masked_loss']:.4f}, alignment {values['diagonality']:.2f}"
            )
            is_best = values["loss"] < best_loss
            best_loss = min(best_loss, values["loss"])
        state = {
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "sampler": {"epoch": epoch + 1, "batch": 0},  # where to go on
            "step": step,
            "best_loss": best_loss,
            "random_state": random_state(),
            "hparams": settings,
        }
        if is_best:
            save_checkpoint(best, state)
        if is_best or is_last or (epoch + 1) % hparams.epochs_per_checkpoint == 0:
            save_checkpoint(last, state)
        if sample:
            logger.log_sample(sample, step, hparams)
    logger.close()


def train_epoch(
    model: Tacotron2,
    loader: DataLoader,
    loss_function: Tacotron2Loss,
    optimizer: torch.optim.Optimizer,
    hparams: HParams,
    epoch: int,
    step: int,
    logger: RunLogger,
) -> tuple[dict[str, float], int]:
    """One pass over the training set, rebuilt for it; returns its figures and the step."""
    device = next(model.parameters()).device
    sampler, clips = loader.batch_sampler, loader.dataset.clips
    model.train()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    sampler.set_epoch(epoch)
    statistics = batch_statistics(sampler.lengths, sampler.plan)
    losses, waited, real_frames = [], 0.0, 0
    with progress(total=len(sampler), desc=f"epoch {epoch}", unit="batch") as bar:
        asked = time.perf_counter()
        for batch in loader:
            waited += time.perf_counter() - asked
            real_frames += int(batch.mel_lengths.sum())  # before the batch leaves the CPU
            batch = batch.to(device)
            loss = loss_function(model(batch), batch)
            optimizer.zero_grad()
            loss.objective.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(
                model.parameters(), hparams.grad_clip_thresh
            ).item()  # waits for the GPU
            if not math.isfinite(grad_norm):
                raise UserError(
                    f"epoch {epoch}, batch {len(losses)}: the gradient is {grad_norm}; --resume "
                    "from the last checkpoint with a smaller learning_rate"
                )
            optimizer.step()
            step += 1
            losses.append(loss.total.item())
            values = {"loss": losses[-1], "masked_loss": loss.masked.item()}
            if hparams.guided_attention_weight:
                values["guided_attention_loss"] = loss.guided_attention.item()
            values |= {"grad_norm": grad_norm, "learning_rate": hparams.learning_rate}
            logger.log("step", epoch, step, values)
            frames_per_second = real_frames / (time.perf_counter() - started)
            bar.set_postfix_str(
                f"loss {losses[-1]:.3f}, {frames_per_second:,.0f} frames/s", refresh=False
            )
            bar.update()
            asked = time.perf_counter()
    synchronize(device)
    seconds = time.perf_counter() - started
    return {
        "minutes": seconds / 60,
        "training_loss": sum(losses) / len(losses),
        "zpr": statistics.zpr,
        "abl": statistics.abl,
        "n_batches": statistics.n_batches,
        "total_length": statistics.total_length,
        "frames_per_second": sum(clip.n_frames for clip in clips) / seconds,
        "data_wait": waited / seconds,
        "peak_memory_gib": peak_memory(device),
    }, step


@torch.no_grad()
def validate(
    model: Tacotron2, loader: DataLoader, loss_function: Tacotron2Loss, device: torch.device
) -> tuple[dict[str, float], Sample]:
    """Teacher-forced losses over the validation set, and one of its clips.

    Each loss is the mean over what it averages in a batch: padded frames, or real ones. The
    prenet's noise has a seed of its own, so that it is the same in every validation and
    training goes on as if there had been none.
    """
    model.eval()
    names = ("total", "mel", "mel_postnet", "gate")
    sums = torch.zeros(len(names) + 3, dtype=torch.float64)
    padded_frames, real_frames, sample = 0, 0, None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(data_utils.VALIDATION_SEED)
        batches = progress(loader, "validation")
        for indices, batch in zip(loader.batch_sampler, batches, strict=True):
            batch = batch.to(device)
            output = model(batch)
            loss = loss_function(output, batch)
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
            if sample is None:
                sample = take_sample(loader.dataset, indices, batch, output)
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
    }, sample


def take_sample(dataset: MelDataset, indices: list[int], batch: Batch, output: Output) -> Sample:
    """The middle clip, by text length, of a batch."""
    # The batch is sorted by text length, stably: find which clip its middle row is.
    by_text = sorted(indices, key=lambda i: -len(dataset.clips[i].ids))
    row = len(indices) // 2
    T_out, T_in = int(batch.mel_lengths[row]), int(batch.text_lengths[row])
    return Sample(
        dataset.clips[by_text[row]].text,
        batch.mel[row, :, :T_out].cpu(),
        output.mel_postnet[row, :, :T_out].cpu(),
        output.gate[row, :T_out].cpu(),
        output.alignment[row, :T_out, :T_in].cpu(),
    )


def random_state() -> dict[str, torch.Tensor]:
    """All that training draws from: torch's generators."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


if __name__ == "__main__":
    exit_on_user_error(main)
