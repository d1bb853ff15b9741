"""Time training steps: the recipe's decoders side by side with the loop of NVIDIA's code.

    python benchmarks/bench_step.py --batch_sizes 16 48 --frames 400
    python benchmarks/bench_step.py --epoch --train_size 10480      # on LJSpeech's lengths

Each implementation runs in its own process, which gives it its own peak memory. They take turns,
step by step, so that a busy moment of the machine hits all of them alike. Times are medians.

    nvidia     as NVIDIA's code trains: the loop, a projection and a gate at every step, F.dropout,
               PyTorch's default allocator; the base of the ratios
    reference  decoder=reference
    scan       decoder=scan
    graph      decoder=graph, on a GPU only
    scan+bf16  decoder=scan with precision=bf16; likewise graph+bf16, nvidia+bf16 (by autocast),
               and +tf32 for each of the three

The model is the paper's. It trains with dropout, in fp32 unless the name says otherwise. The clips
are noise, all of one length, with a character every four frames. With ``--epoch`` the batches have
the lengths and the order of a real epoch, and a step includes clipping and Adam.
"""

import argparse
import json
import multiprocessing
import platform
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import model as model_module
from batching import plan_batches
from cli import ArgumentParser, UserError, exit_on_user_error, positive
from data_utils import Batch, Item, collate
from device import choose_device, is_out_of_memory, peak_memory, synchronize, use_large_pages
from hparams import HParams, create_hparams
from loss_function import Tacotron2Loss
from memory import free_memory
from model import Decoder, Tacotron2
from scripts.lengths import LJSPEECH_HOP, LJSPEECH_LENGTHS, read_lengths, rescale

BATCHING = {"RAND": False, "SSB-DBS-BR": True}  # True: dynamic and randomised


class Shape(NamedTuple):
    """Lengths of a batch's clips."""

    frames: list[int]
    characters: list[int]

    @property
    def padded_frames(self) -> int:
        return len(self.frames) * max(self.frames)


class Step(NamedTuple):
    """What one training step took."""

    forward: float  # seconds
    backward: float  # seconds, with clipping and Adam if there is an optimizer
    peak_gib: float  # of the steps so far, beyond what the model took before them

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


# Implementations


class NvidiaDecoder(Decoder):
    """Projects at every step, as NVIDIA's code does, and runs in ``dtype`` by autocast."""

    def forward(
        self, memory: Tensor, mel: Tensor, padding: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        mels, gates, alignment = [], [], []
        with torch.autocast(memory.device.type, dtype, enabled=dtype is not None):
            frames = self.prenet(F.pad(mel, (1, -1)).permute(2, 0, 1))
            keys = self.attention_layer.memory_layer(memory)
            state = self.initial_state(memory)
            for frame in frames:
                state = self.step(frame, state, memory, keys, padding)
                features = torch.cat((state.decoder_hidden, state.context), 1)
                mels.append(self.linear_projection(features))
                gates.append(self.gate_layer(features).squeeze(1))
                alignment.append(state.weights)
        mel, gate = torch.stack(mels, 2), torch.stack(gates, 1)
        return mel.float(), gate.float(), torch.stack(alignment, 1).float()


def use_nvidias_code() -> None:
    """Make every model of this process train as NVIDIA's code does."""
    model_module.Decoder = NvidiaDecoder
    model_module.dropout = F.dropout
    model_module._drop = lambda hidden, mask, p: F.dropout(hidden, p)


def settings(implementation: str, overrides: str) -> HParams:
    decoder, _, precision = implementation.partition("+")
    values = [f"decoder={'reference' if decoder == 'nvidia' else decoder}", overrides]
    if precision:
        values.append(f"precision={precision}")
    return create_hparams(",".join(values))


class Trainer:
    """Takes training steps with one implementation, in a process of its own."""

    def __init__(self, implementation: str, args: argparse.Namespace) -> None:
        self.implementation = implementation
        self.hparams = settings(implementation, args.hparams)
        self.device = choose_device(self.hparams)
        torch.manual_seed(0)
        self.model = Tacotron2(self.hparams).to(self.device).train()
        self.loss_function = Tacotron2Loss()
        self.optimizer = None
        if args.epoch:
            self.optimizer = torch.optim.Adam(self.model.parameters())
        self.memory = peak_memory(self.device)

    def step(self, shape: Shape) -> Step:
        batch = noise(shape, self.hparams).to(self.device)
        self.model.zero_grad()
        synchronize(self.device)
        started = time.perf_counter()
        loss = self.loss_function(self.model(batch), batch).objective
        synchronize(self.device)
        middle = time.perf_counter()
        loss.backward()
        if self.optimizer:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.hparams.grad_clip_thresh)
            self.optimizer.step()
        synchronize(self.device)
        ended = time.perf_counter()
        return Step(middle - started, ended - middle, peak_memory(self.device) - self.memory)


def noise(shape: Shape, hparams: HParams) -> Batch:
    generator = torch.Generator().manual_seed(0)
    items = []
    for T_in, T_out in zip(shape.characters, shape.frames, strict=True):
        ids = torch.randint(1, hparams.n_symbols, (T_in,), generator=generator)
        mel = torch.randn(T_out, hparams.n_mel_channels, generator=generator)
        items.append(Item(0, ids, mel))
    return collate(items)


# Their processes


def open_pool(implementation: str, args: argparse.Namespace) -> ProcessPoolExecutor:
    """A process that takes steps with ``implementation``. The first step starts it."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _start, (implementation, args))


def take_step(pool: ProcessPoolExecutor, shape: Shape) -> Step | None:
    """One step in the pool's process; None if it does not fit the memory.

    Raises:
        UserError: the step fails for another reason.
    """
    try:
        return pool.submit(_step, shape).result()
    except BrokenProcessPool:  # killed, as Linux does when memory runs out
        return None


def _start(implementation: str, args: argparse.Namespace) -> None:
    global trainer
    if implementation.startswith("nvidia"):
        use_nvidias_code()
    else:
        use_large_pages()
    torch.set_num_threads(args.threads)
    torch.backends.mkldnn.enabled = not args.no_onednn
    if not torch.cuda.is_available() and sys.platform == "linux":
        # So that this process gets an error, rather than Linux killing some other one.
        limit = int(0.9 * free_memory() * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    trainer = Trainer(implementation, args)


def _step(shape: Shape) -> Step | None:
    try:
        return trainer.step(shape)
    except (RuntimeError, ValueError, MemoryError) as error:
        if is_out_of_memory(error):
            return None
        raise UserError(f"{trainer.implementation}: {error}".splitlines()[0]) from None


def take_turns(
    walks: dict[Any, tuple[str, list[Shape]]], args: argparse.Namespace
) -> dict[Any, list[Step] | None]:
    """Time several lists of batches, each with its implementation, one step of each at a time;
    None for a list that runs out of memory."""
    steps = {key: [] for key in walks}
    with ExitStack() as stack:
        pools = {key: stack.enter_context(open_pool(walk[0], args)) for key, walk in walks.items()}
        for i in range(max(len(shapes) for _, shapes in walks.values())):
            for key, (_, shapes) in walks.items():
                if steps[key] is None or i >= len(shapes):
                    continue
                if step := take_step(pools[key], shapes[i]):
                    steps[key].append(step)
                else:
                    steps[key] = None
                    pools[key].shutdown()
    return steps


# Steps


def bench_steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    base = args.implementations[0]
    print(f"ratios: {base}'s time over that of the others; their peak memory over {base}'s\n")
    print("| B | T_out | | forward s | backward s | step s | forward | backward | step | memory |")
    print("|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|")
    for B in args.batch_sizes:
        for T in args.frames:
            shapes = [Shape([T] * B, [max(T // 4, 1)] * B)] * (args.warmup + args.rounds)
            walks = {name: (name, shapes) for name in args.implementations}
            steps = take_turns(walks, args)
            results = {name: medians(taken, args.warmup) for name, taken in steps.items()}
            for name, result in results.items():
                print(f"| {B} | {T} | {name} |{cells(result, results[base])}")
            yield {"batch_size": B, "frames": T, "results": results}


def medians(steps: list[Step] | None, warmup: int) -> dict[str, float] | None:
    if steps is None:
        return None
    timed = steps[warmup:]
    return {
        "forward": median(step.forward for step in timed),
        "backward": median(step.backward for step in timed),
        "step": median(step.seconds for step in timed),
        "fastest": min(step.seconds for step in timed),
        "peak_gib": steps[-1].peak_gib,
    }


def cells(result: dict[str, float] | None, base: dict[str, float] | None) -> str:
    """The times of a row, and the ratios to the base."""
    if result is None:
        return " out of memory |"
    keys = ("forward", "backward", "step")
    times = "".join(f" {result[key]:.3f} |" for key in keys)
    if base is None or result is base:
        return f"{times} | | | {result['peak_gib']:.2f} GiB |"
    ratios = "".join(f" {base[key] / result[key]:.2f}x |" for key in keys)
    peak = base["peak_gib"]  # 0 if the base took no more than its imports did
    return times + ratios + (f" {result['peak_gib'] / peak:.2f}x |" if peak else " |")


# Epochs


def read_clips(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """The frames and the characters of an epoch's clips."""
    frames = read_lengths(args.epoch, args.frames_column, "--frames_column")
    characters = read_lengths(args.epoch, args.characters_column)
    frames = rescale(frames, args.hop_from, args.hop_to)
    if args.train_size:
        chosen = np.random.default_rng(0).permutation(len(frames))[: args.train_size]
        frames, characters = frames[chosen], characters[chosen]
    return frames, characters


def epoch_shapes(frames: np.ndarray, characters: np.ndarray, batching: str) -> list[Shape]:
    """The batches of the first epoch, in order, with the default settings."""
    strategy, dynamic = batching.partition("-")[0], BATCHING[batching]
    plan = plan_batches(frames, strategy, dynamic_batch_size=dynamic, batch_randomization=dynamic)
    return [Shape(frames[batch].tolist(), characters[batch].tolist()) for batch in plan]


def sample(shapes: list[Shape], n: int | None) -> list[Shape]:
    """``n`` batches, spread evenly from the smallest to the largest, in the epoch's order."""
    if n is None or n >= len(shapes):
        return shapes
    by_size = np.argsort([shape.padded_frames for shape in shapes], kind="stable")
    ranks = (np.arange(n) + 0.5) * len(shapes) / n
    return [shapes[i] for i in sorted(by_size[ranks.astype(int)])]


def bench_epochs(
    frames: np.ndarray, characters: np.ndarray, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    shares, walks = {}, {}
    for batching in BATCHING:
        shapes = epoch_shapes(frames, characters, batching)
        timed = sample(shapes, args.batches)
        for name in args.implementations:
            walks[name, batching] = name, [timed[0], *timed]  # the first one warms up
        total = sum(shape.padded_frames for shape in shapes)
        shares[batching] = sum(shape.padded_frames for shape in timed) / total
        print(
            f"{batching}: {len(shapes):,} batches, {total:,} padded frames, "
            f"{sum(max(shape.frames) for shape in shapes):,} decoder steps; at most "
            f"{max(len(s.characters) * max(s.characters) for s in shapes):,} padded characters and "
            f"{max(s.padded_frames * max(s.characters) for s in shapes) / 1e6:.2f} million cells "
            f"of an alignment in a batch; {len(timed):,} batches timed"
        )
    print("\n| | batching | seconds an epoch | | peak memory |")
    print("|---|---|--:|--:|--:|")
    base = None
    for (name, batching), steps in take_turns(walks, args).items():
        if steps is None:
            print(f"| {name} | {batching} | out of memory |")
            continue
        seconds = sum(step.seconds for step in steps[1:]) / shares[batching]
        peak = steps[-1].peak_gib
        base = base or seconds
        print(f"| {name} | {batching} | {seconds:,.0f} | {base / seconds:.2f}x | {peak:.2f} GiB |")
        yield {
            "implementation": name,
            "batching": batching,
            "seconds": seconds,
            "batches_timed": len(steps) - 1,
            "share_of_padded_frames_timed": shares[batching],
            "peak_gib": peak,
        }


def parse_args() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    precisions = ("tf32", "bf16") if cuda else ("bf16",)
    names = ["nvidia", "reference", "scan", *["graph"] * cuda]
    faster = [f"{n}+{precision}" for n in names if n != "reference" for precision in precisions]
    parser = ArgumentParser(
        description="Time training steps of the recipe's decoders and of NVIDIA's loop.",
        epilog="All shapes and implementations take an hour or more on a CPU: name fewer "
        "--batch_sizes, --frames and --implementations.",
    )
    add = parser.add_argument
    add("--batch_sizes", type=positive, nargs="+", default=[16, 32, 64, 98], metavar="B")
    add("--frames", type=positive, nargs="+", default=[200, 400, 800], metavar="T", help="T_out")
    add(
        "--implementations", nargs="+", choices=[*names, *faster], default=names, metavar="NAME",
        help="of %(choices)s; the first is the base of the ratios (default: %(default)s)",
    )  # fmt: skip
    add(
        "--rounds",
        type=positive,
        default=20 if cuda else 3,
        help="timed steps of each (%(default)s)",
    )
    add("--warmup", type=int, default=3 if cuda else 1, help="steps before them (%(default)s)")
    add("--threads", type=positive, default=torch.get_num_threads(), help="on a CPU (%(default)s)")
    add("--no_onednn", action="store_true", help="switch oneDNN off, for all of them")
    add("--hparams", default="", metavar="NAME=VALUE,...", help="of the model")
    add("--json", type=Path, metavar="FILE", help="write the numbers")
    add = parser.add_argument_group("epochs").add_argument
    add(
        "--epoch", type=Path, nargs="?", const=LJSPEECH_LENGTHS, metavar="LENGTHS",
        help="CSV file of every clip's lengths (default: LJSpeech's, whose frames are counted at "
        f"a hop of {LJSPEECH_HOP} samples and rescaled to {HParams.hop_length}: within one frame)",
    )  # fmt: skip
    add("--frames_column", metavar="NAME", help="(default: as plot_batching.py --column)")
    add("--characters_column", default="characters", metavar="NAME", help="(%(default)s)")
    add("--hop_from", type=int, metavar="N", help="the hop of these frames, in samples, ...")
    add("--hop_to", type=int, metavar="N", help="... and the hop to rescale them to")
    add("--train_size", type=positive, metavar="N", help="take N clips at random (default: all)")
    add("--batches", type=positive, metavar="N", help="time N batches of all sizes (default: all)")
    args = parser.parse_args()
    if args.warmup < 0:
        raise UserError(f"--warmup {args.warmup}: use 0 or more")
    if args.epoch == LJSPEECH_LENGTHS:
        args.hop_from = args.hop_from or LJSPEECH_HOP
        args.hop_to = args.hop_to or HParams.hop_length
    for name in ("frames_column", "hop_from", "hop_to", "train_size", "batches"):
        if not args.epoch and (value := getattr(args, name)) is not None:
            raise UserError(f"--{name} {value}: goes with --epoch; leave it out")
    if args.json and not args.json.parent.is_dir():
        raise UserError(f"--json {args.json}: {args.json.parent}: no such folder; make it first")
    if len(set(args.implementations)) < len(args.implementations):
        raise UserError("--implementations: one is named twice; keep one")
    for name in args.implementations:
        settings(name, args.hparams)
    return args


def main() -> None:
    args = parse_args()
    clips = read_clips(args) if args.epoch else None
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"CPU, {args.threads} threads"
    print(f"{device}; {platform.machine()}; PyTorch {torch.__version__}; {args.rounds} rounds")
    record = {"device": device, "torch": torch.__version__, "rounds": args.rounds, "rows": []}
    for result in bench_epochs(*clips, args) if clips else bench_steps(args):
        record["rows"].append(result)
        if args.json:
            args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    exit_on_user_error(main)
