"""Find the largest batch capacity (DBS) that fits a GPU's memory, or a CPU's.

    python scripts/find_batch_capacity.py --hparams data_dir=data/LJSpeech-1.1

takes train.py's settings. Each trial is a process of its own, which tries the largest batches of
all epochs as train.py does before a run.
"""

import dataclasses
import multiprocessing
import resource
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch.optim import Adam

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from corpus.clips import Clip
from data_utils import (
    Data,
    MelDataset,
    load_data,
    padded_frames,
    short_batch,
    training_sampler,
    validation_batches,
)
from decoder import check_fast_path, graphs
from hparams import HParams, create_hparams
from loss_function import Tacotron2Loss
from model import Tacotron2
from training.device import (
    choose_device,
    free_memory,
    full_precision,
    is_out_of_memory,
    peak_memory,
)
from training.memory import try_run

TOLERANCE = 0.03  # largest relative error of the result


def find_capacity(
    clips: list[Clip], val_clips: list[Clip], hparams: HParams, memory_gib: float | None = None
) -> int | None:
    """Returns the largest batch capacity, in frames, with which all batches of a run fit in memory;
    None if all training clips fit in one batch. Prints each trial.

    Args:
        memory_gib: memory to use; None for all of a GPU's, or all that is free now on a CPU.

    Raises:
        UserError: not even the longest clip fits.
    """
    longest = max(padded_frames(clip, hparams) for clip in clips)
    one_batch = longest * len(clips)
    fitting, too_much, capacity = 0, 2 * one_batch, longest
    while fitting < one_batch and too_much - fitting > TOLERANCE * fitting:
        if capacity_fits(capacity, clips, val_clips, hparams, memory_gib):
            fitting = capacity
        else:
            too_much = capacity
        if not fitting:
            raise UserError(
                f"not even the longest clip, of {longest} frames, fits the memory; remove it, or "
                "reduce the model"
            )
        # Double the capacity while it fits, then bisect.
        capacity = min(2 * fitting, (fitting + too_much) // 2)
    return fitting if fitting < one_batch else None


def capacity_fits(
    capacity: int,
    clips: list[Clip],
    val_clips: list[Clip],
    hparams: HParams,
    memory_gib: float | None,
) -> bool:
    """Returns whether a run with this capacity fits, tried in a new process."""
    hparams = dataclasses.replace(hparams, batch_capacity=capacity, batch_capacity_seconds=0.0)
    peak = None
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        suppress(BrokenProcessPool),  # killed, as Linux does when memory runs out
    ):
        peak = pool.submit(measure, clips, val_clips, hparams, memory_gib).result()
    seconds = capacity * hparams.hop_length / hparams.sampling_rate
    print(f"{seconds:8.1f} s: {'too much' if peak is None else f'{peak:.2f} GiB'}")
    return peak is not None


def measure(
    clips: list[Clip], val_clips: list[Clip], hparams: HParams, memory_gib: float | None
) -> float | None:
    """Tries what train.py does before a run, with empty clips of the same lengths. Returns the peak
    memory in GiB; None if it runs out."""
    Adam([torch.zeros(1)])  # imports its modules before memory is limited
    device = choose_device(hparams)
    if device.type == "cpu":
        limit = int((memory_gib or free_memory()) * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    elif memory_gib:
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(memory_gib / total, 1.0))
    data = empty_data(clips, val_clips, hparams)
    loss_function = Tacotron2Loss(
        hparams.guided_attention_weight, hparams.guided_attention_sigma, hparams.loss
    )
    try:
        model = Tacotron2(hparams).to(device)
        with full_precision():
            for note in check_fast_path(model, short_batch(data.train_set, device)):
                print(f"note: {note}")
        optimizer, epochs = Adam(model.parameters()), range(hparams.epochs)
        try_run(model, loss_function, optimizer, data, epochs, check_stop=lambda: None)
    except UserError:  # a batch does not fit
        return None
    except (RuntimeError, MemoryError) as error:  # not even the weights do
        if is_out_of_memory(error):
            return None
        raise
    if device.type == "cuda" and not graphs.turn_off():
        return None  # what only fits without CUDA graphs is too much
    return (
        torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else peak_memory(device)
    )


def empty_data(clips: list[Clip], val_clips: list[Clip], hparams: HParams) -> Data:
    """Returns the data of a run on clips whose mels are all zeros."""

    def mels(clip: Clip) -> np.ndarray:
        return np.zeros((clip.n_frames, hparams.n_mel_channels), np.float32)

    train_set, val_set = (
        MelDataset(each, mels, hparams.n_frames_per_step) for each in (clips, val_clips)
    )
    batches = validation_batches(val_clips, hparams)
    return Data(train_set, val_set, training_sampler(clips, hparams), batches, [], [])


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--hparams", default="", metavar="NAME=VALUE,...", help="settings of the run")
    add("--preset", default="paper", help="settings preset (default %(default)s)")
    limit = "GiB to use (default: the GPU's, or the free memory; ignores a container's limit)"
    add("--memory_gib", type=float, help=limit)
    args = parser.parse_args(argv)
    if args.memory_gib is not None and not 0 < args.memory_gib < 1e6:
        raise UserError(f"--memory_gib {args.memory_gib}: use a number above 0")
    hparams = create_hparams(args.hparams, args.preset)
    if not hparams.dynamic_batch_size:
        raise UserError("setting dynamic_batch_size=False: batches have no capacity; leave it out")
    if not torch.cuda.is_available() and sys.platform != "linux":
        raise UserError("no GPU found, and without one this needs Linux; use a GPU")
    capacity = find_capacity(*load_data(hparams), hparams, args.memory_gib)
    if capacity is None:
        print("all clips fit in one batch: memory sets no limit here, so keep the default capacity")
    else:
        seconds = capacity * hparams.hop_length / hparams.sampling_rate
        print(f"the most that fits; leave some room: batch_capacity_seconds={int(seconds)}")


if __name__ == "__main__":
    exit_on_user_error(main)
