"""Find the largest batch capacity (DBS) that fits a GPU's memory, or a CPU's.

    python scripts/find_batch_capacity.py --hparams data_dir=data/LJSpeech-1.1

takes train.py's settings. Each trial is a process of its own: forward and backward of the largest
batches that all epochs of a run would have.
"""

import argparse
import dataclasses
import multiprocessing
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data_utils import Clip, largest_batches, load_data, training_sampler
from device import choose_device, peak_memory
from hparams import ArgumentParser, HParams, UserError, create_hparams, exit_on_user_error
from loss_function import Tacotron2Loss
from model import Tacotron2
from trainer import Progress, Run


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="Find the largest batch capacity that fits the memory.")
    parser.add_argument("--hparams", default="", metavar="NAME=VALUE,...", help="train.py's")
    parser.add_argument("--preset", default="paper", help="of the settings (default %(default)s)")
    parser.add_argument(
        "--memory_gib", type=float, help="that a training may take (default: all of a GPU's; "
        "on a CPU what is free now, whatever a container's limit is)"
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, default=0.03, help="of the result (default %(default)s)"
    )
    args = parser.parse_args()
    if args.memory_gib is not None and not 0 < args.memory_gib < 1e6:
        raise UserError(f"--memory_gib {args.memory_gib}: use a number above 0")
    if not 0 < args.tolerance < 1:
        raise UserError(f"--tolerance {args.tolerance}: use a number between 0 and 1")
    return args


def free_memory() -> float:
    """GiB that a new process could take on this computer."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) / 2**20


def measure(
    hparams: HParams, shapes: list[list[tuple[int, int]]], memory_gib: float | None
) -> float | None:
    """Train once on batches of clips of (T_in, T_out); peak memory in GiB, None if too little."""
    device = choose_device(hparams)
    if device.type == "cuda":
        if memory_gib:
            total = torch.cuda.get_device_properties(device).total_memory / 2**30
            torch.cuda.set_per_process_memory_fraction(min(memory_gib / total, 1.0))
        torch.cuda.reset_peak_memory_stats()
    else:
        limit = int((memory_gib or free_memory()) * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        model = Tacotron2(hparams).to(device).train()
    except (RuntimeError, MemoryError):  # not even the weights fit
        return None
    loss_function = Tacotron2Loss(hparams.guided_attention_weight, hparams.guided_attention_sigma)
    optimizer = torch.optim.Adam(model.parameters())
    run = Run(Path(), hparams, "", model, optimizer, loss_function, None, Progress())
    for batch in shapes:
        clips = [
            (torch.ones(a, dtype=torch.long), torch.zeros(b, hparams.n_mel_channels))
            for a, b in batch
        ]
        if not run.fits(clips):
            return None
    return peak_memory(device)


def send(sender: Connection, *args: object) -> None:
    try:
        sender.send(measure(*args))
    except UserError as error:
        sender.send(error)


def try_capacity(
    capacity: int, clips: list[Clip], hparams: HParams, memory_gib: float | None
) -> float | None:
    """:func:`measure`, in a process of its own, for the largest batches of a capacity in frames."""
    settings = {"batch_capacity": capacity, "batch_capacity_seconds": 0.0}
    hparams = dataclasses.replace(hparams, **settings)
    sampler = training_sampler(clips, hparams)
    batches = largest_batches(clips, sampler, range(hparams.epochs))
    shapes = [[(len(clips[i].ids), clips[i].n_frames) for i in batch] for batch in batches]
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(sender, hparams, shapes, memory_gib), daemon=True)
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:  # killed, as Linux does where memory is short
        found = None
    finally:
        process.kill()
    if isinstance(found, UserError):
        raise found
    seconds = capacity * hparams.hop_length / hparams.sampling_rate
    print(
        f"{seconds:8.1f} s, largest batches of up to {max(map(len, batches)):>4} clips: "
        + ("too much" if found is None else f"{found:.2f} GiB"),
        flush=True,
    )
    return found


def main() -> None:
    args = parse_args()
    hparams = create_hparams(args.hparams, args.preset)
    if not hparams.dynamic_batch_size:
        raise UserError("setting dynamic_batch_size=False: batches have no capacity; leave it out")
    if not torch.cuda.is_available() and sys.platform != "linux":
        raise UserError("no GPU is here, and memory can be limited on Linux alone; use a GPU")
    clips, _ = load_data(hparams)
    lengths = [clip.n_frames for clip in clips]
    frame = hparams.hop_length / hparams.sampling_rate  # seconds
    fits, too_much = 0, 2 * sum(lengths)  # frames
    capacity = max(lengths)
    while too_much - fits > args.tolerance * max(fits, max(lengths)):
        if try_capacity(capacity, clips, hparams, args.memory_gib) is None:
            too_much = capacity
        else:
            fits = capacity
        if too_much == max(lengths):
            raise UserError(
                f"not even the longest clip, of {max(lengths)} frames, fits the memory; remove it, "
                "or reduce the model"
            )
        # Twice as much while all fits, then halve what is uncertain.
        capacity = 2 * fits if too_much > 2 * fits else (fits + too_much) // 2
        if fits >= sum(lengths):
            print(
                "all clips fit one batch: memory sets no limit here, so leave the default, "
                "batch_size x the longest clip"
            )
            return
    print(f"the most that fits; leave some room: batch_capacity_seconds={int(fits * frame)}")


if __name__ == "__main__":
    exit_on_user_error(main)
