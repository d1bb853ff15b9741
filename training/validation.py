"""Teacher-forced validation over fixed random batches, the same for every strategy (Sec. 6)."""

from collections import ChainMap, defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from cli import progress_bar
from data_utils import VALIDATION_SEED, Batch, MelDataset, load_ahead
from hparams import HParams
from layers import has_ended, length_mask
from loss_function import Loss, Tacotron2Loss, distance_from_diagonal
from model import Output, Tacotron2
from text import symbol_names
from training.device import use_full_precision
from training.distributed import RANK, WORLD_SIZE, broadcast_buffers, gather

LEARNED = 0.5  # diagonality from which attention has learned to follow texts


class Sample(NamedTuple):
    """A validation clip, without padding."""

    text: str
    symbols: list[str]  # names of the T_in symbols
    mel: Tensor  # (n_mels, T_out) target
    mel_postnet: Tensor  # (n_mels, T_out) predicted with teacher forcing
    gate: Tensor  # (n_steps,) predicted logits
    gate_target: Tensor  # (n_steps,) 1 at the last step
    alignment: Tensor  # (T_out, T_in)


@torch.no_grad()
@use_full_precision()
def validate(
    model: Tacotron2,
    dataset: MelDataset,
    batches: Sequence[Sequence[int]],
    loss_function: Tacotron2Loss,
    check_stop: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], dict[str, Sample]]:
    """Returns the means of scalars over a dataset, and two of its clips to log: "sample" and
    "longest", which are always the same ones.

    A loss is averaged over what it averages in a batch: frames with padding or without. (NVIDIA's
    validation loss is the plain mean over batches.) The prenet's dropout is seeded by the batch's
    number, so that it is the same in every validation, whichever process has the batch, and
    training continues as if there had been no validation.

    Args:
        batches: indices of clips. Of several processes, each takes every ``WORLD_SIZE``-th batch.
        check_stop: is called after each batch, by all processes together; may raise.
    """
    model.eval()
    broadcast_buffers(model)
    hparams, device, clips = model.hparams, next(model.parameters()).device, dataset.clips
    longest = max(range(len(clips)), key=lambda i: clips[i].n_frames)
    sums, counts, samples, problems = defaultdict(float), defaultdict(int), {}, []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        loaded = load_ahead(dataset, batches[RANK::WORLD_SIZE], device)
        for j in progress_bar(range(len(batches)), "validation"):
            if j % WORLD_SIZE == 0:
                check_stop()
            if j % WORLD_SIZE != RANK:  # another process has this batch
                continue
            torch.manual_seed(VALIDATION_SEED + j)
            batch = next(loaded).to(device)
            output = model(batch)
            loss = loss_function(output, batch)
            if not loss.total.isfinite():
                locations = ", ".join(clips[i].location for i in batch.indices)
                problems.append(f"warning: validation loss {loss.total.item()} in {locations}")
            for name, (total, count) in batch_sums(model, batch, output, loss).items():
                sums[name] += total
                counts[name] += count
            middle = batch.indices[len(batch.indices) // 2]
            for name, index in (("sample", middle), ("longest", longest)):
                if name not in samples and index in batch.indices:
                    row = batch.indices.index(index)
                    samples[name] = take_sample(clips[index].text, row, batch, output, hparams)
        loaded.close()
        check_stop()
    for problem in chain(*gather(problems)):
        tqdm.write(problem)
    all_sums, all_counts = gather(sums), gather(counts)
    means = {
        name: sum(part[name] for part in all_sums) / sum(part[name] for part in all_counts)
        for name in all_sums[0]
    }
    return means, dict(ChainMap(*gather(samples)))


def batch_sums(
    model: Tacotron2, batch: Batch, output: Output, loss: Loss
) -> dict[str, tuple[float, int]]:
    """Returns the sum of each scalar over the batch's clips or frames, and their number."""
    hparams = model.hparams
    n_clips, n_padded = len(batch.indices), batch.mel[:, 0].numel()
    n_real = int(batch.mel_lengths.sum())
    n_steps = (batch.gate == 0).sum(1) + 1  # (B,)
    diagonality, focus = alignment_scores(output.alignment, batch.text_lengths, batch.mel_lengths)
    stop_error = stop_errors(has_ended(output.gate, hparams), n_steps)
    step_seconds = hparams.n_frames_per_step * hparams.hop_length / hparams.sampling_rate
    return {
        "loss": (loss.total.item() * n_padded, n_padded),
        "mel_loss": (loss.mel.item() * n_padded, n_padded),
        "mel_postnet_loss": (loss.mel_postnet.item() * n_padded, n_padded),
        "gate_loss": (loss.gate.item() * n_padded, n_padded),
        "masked_loss": (loss.masked.item() * n_real, n_real),
        "diagonality": (diagonality.sum().item(), n_clips),
        "focus": (focus.sum().item(), n_clips),
        "stop_error": (stop_error.sum().item() * step_seconds, n_clips),
    }


def alignment_scores(
    alignment: Tensor, text_lengths: Tensor, mel_lengths: Tensor, band: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Scores how closely the attention of each clip follows its text.

    Args:
        alignment: (B, T_out, T_in)
        text_lengths, mel_lengths: (B,)
        band: half the width of the diagonal, as a share of the text

    Returns:
        diagonality (B,), the share of attention within the band: 1 if all of it is on the diagonal,
        about 2 x band if it is random; focus (B,), the mean over frames of the largest weight
    """
    _, T_out, _ = alignment.shape
    real = length_mask(mel_lengths, T_out)[:, :, None]  # (B, T_out, 1)
    distance = distance_from_diagonal(alignment, text_lengths, mel_lengths)  # (B, T_out, T_in)
    near = distance.abs() <= band
    diagonality = (alignment * (near & real)).sum((1, 2)) / mel_lengths
    focus = (alignment * real).amax(2).sum(1) / mel_lengths
    return diagonality, focus


def stop_errors(ended: Tensor, n_steps: Tensor) -> Tensor:
    """Returns how many steps (B,) lie between each clip's last step and the first by which the
    model says that it has ended; 1 if there is none.

    Args:
        ended: (B, n_steps) of :func:`has_ended`
        n_steps: (B,), the clips' lengths
    """
    running = ~ended & length_mask(n_steps, ended.size(1))
    return (running.sum(1) - (n_steps - 1)).abs()


def take_sample(text: str, row: int, batch: Batch, output: Output, hparams: HParams) -> Sample:
    """Returns the clip in ``row`` of a batch, without its padding."""
    T_out, T_in = int(batch.mel_lengths[row]), int(batch.text_lengths[row])
    n_steps = int((batch.gate[row] == 0).sum()) + 1
    return Sample(
        text,
        symbol_names(batch.text[row, :T_in].tolist(), hparams.symbols),
        batch.mel[row, :, :T_out].cpu(),
        output.mel_postnet[row, :, :T_out].cpu(),
        output.gate[row, :n_steps].cpu(),
        batch.gate[row, :n_steps].cpu(),
        output.alignment[row, :T_out, :T_in].cpu(),
    )


def warn_of_collapse(alignment: float, best: float) -> None:
    """Prints a warning if attention had learned the diagonal and has lost it."""
    if best > LEARNED and alignment < 0.7 * best:
        tqdm.write(
            f"warning: alignment {alignment:.2f} was {best:.2f}: attention collapsed; if it does "
            "not recover, start another run from checkpoint_best.pt by -c with a smaller "
            "learning_rate"
        )
