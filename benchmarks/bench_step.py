"""Time training steps: the recipe's decoders beside the loop as NVIDIA's code runs it.

    python benchmarks/bench_step.py --batch_sizes 16 48 --frames 400
    python benchmarks/bench_step.py --epoch --train_size 10480      # on LJSpeech's lengths

Each implementation runs in a process of its own, so that its peak memory is its own; they take
turns, step by step, so that a busy moment of the machine falls on all alike. Figures are medians.

    nvidia     the loop with a projection and a gate every step, dropout by F.dropout, and the
               allocator as it comes: what NVIDIA's code does, and the base of the ratios
    reference  decoder=reference
    scan       decoder=scan
    graph      decoder=graph, on a GPU only
    scan+bf16  decoder=scan with precision=bf16; likewise graph+bf16, nvidia+bf16 (as autocast
               does it), and with +tf32 for each

The model is that of the paper, training in fp32 where nothing else is said, with dropout on; the
clips are noise, all of one length, a character every four frames. With ``--epoch`` batches have
the lengths of a real epoch, in its order, and a step includes clipping and Adam.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import model as model_module
from batching import plan_batches
from cli import ArgumentParser, UserError, exit_on_user_error
from data_utils import Batch, Item, collate
from device import choose_device, peak_memory, synchronize, use_large_pages
from hparams import HParams, create_hparams
from loss_function import Tacotron2Loss
from model import Decoder, Tacotron2
from scripts.plot_batching import LJSPEECH_HOP, LJSPEECH_LENGTHS, read_lengths, rescale

IMPLEMENTATIONS = ("nvidia", "reference", "scan", "graph")
FASTER = tuple(
    f"{name}+{precision}" for name in ("nvidia", "scan", "graph") for precision in ("tf32", "bf16")
)
BATCHING = {"RAND": False, "SSB-DBS-BR": True}  # and whether it is dynamic and randomised


class Shape(NamedTuple):
    """Lengths of a batch's clips, in frames and in characters."""

    frames: list[int]
    characters: list[int]


class Times(NamedTuple):
    """Of one step, in seconds."""

    forward: float
    backward: float  # with the optimiser's step, where there is one

    @property
    def step(self) -> float:
        return self.forward + self.backward


# Implementations


class NvidiaDecoder(Decoder):
    """Projects every step, and drops with F.dropout, as NVIDIA's code does."""

    def forward(
        self, memory: Tensor, mel: Tensor, padding: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(memory.device.type, dtype, enabled=dtype is not None):
            output = self.loop(memory, mel, padding)
        return tuple(tensor.float() for tensor in output)

    def loop(self, memory: Tensor, mel: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        frames = self.prenet(F.pad(mel, (1, -1)).permute(2, 0, 1))
        keys = self.attention_layer.memory_layer(memory)
        state = self.initial_state(memory)
        mels, gates, alignment = [], [], []
        for frame in frames:
            hidden, cell = self.attention_rnn(
                torch.cat((frame, state.context), 1), (state.attention_hidden, state.attention_cell)
            )
            hidden = F.dropout(hidden, self.p_attention_dropout, self.training)
            past = torch.stack((state.weights, state.weights_sum), 1)
            context, weights = self.attention_layer(hidden, memory, keys, past, padding)
            decoder_hidden, decoder_cell = self.decoder_rnn(
                torch.cat((hidden, context), 1), (state.decoder_hidden, state.decoder_cell)
            )
            decoder_hidden = F.dropout(decoder_hidden, self.p_decoder_dropout, self.training)
            state = state._replace(
                attention_hidden=hidden,
                attention_cell=cell,
                decoder_hidden=decoder_hidden,
                decoder_cell=decoder_cell,
                weights=weights,
                weights_sum=state.weights_sum + weights,
                context=context,
            )
            features = torch.cat((decoder_hidden, context), 1)
            mels.append(self.linear_projection(features))
            gates.append(self.gate_layer(features).squeeze(1))
            alignment.append(weights)
        return torch.stack(mels, 2), torch.stack(gates, 1), torch.stack(alignment, 1)


def settings(implementation: str, args: argparse.Namespace) -> HParams:
    decoder, _, precision = implementation.partition("+")
    overrides = f"decoder={'reference' if decoder == 'nvidia' else decoder},{args.hparams}"
    return create_hparams(f"{overrides},precision={precision}" if precision else overrides)


def build(implementation: str, hparams: HParams, device: torch.device) -> Tacotron2:
    torch.manual_seed(0)
    if implementation.startswith("nvidia"):
        model_module.Decoder, model_module.dropout = NvidiaDecoder, F.dropout
    return Tacotron2(hparams).to(device).train()


def worker(
    connection: Connection, implementation: str, args: argparse.Namespace, memory: int
) -> None:
    """Does the steps it is asked for: a shape comes, its times and the peak memory go."""
    if not implementation.startswith("nvidia"):
        use_large_pages()
    torch.set_num_threads(args.threads)
    torch.backends.mkldnn.enabled = not args.no_onednn
    hparams = settings(implementation, args)
    device = choose_device(hparams)
    if device.type == "cpu" and memory:
        # Better an error of its own than the end of some other process.
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    model, loss_function = build(implementation, hparams, device), Tacotron2Loss()
    optimizer = torch.optim.Adam(model.parameters(), hparams.learning_rate)
    base = peak_memory(device)
    connection.send("ready")
    while True:
        shape, with_optimizer = connection.recv()
        try:
            batch = noise(shape, hparams).to(device)
            stepper = optimizer if with_optimizer else None
            times = step(model, loss_function, batch, stepper, hparams)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
                connection.send(f"{implementation}: {error}".splitlines()[0])
            else:
                connection.send(None)
            continue
        connection.send((times, peak_memory(device) - base))


def step(
    model: Tacotron2,
    loss_function: Tacotron2Loss,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None,
    hparams: HParams,
) -> Times:
    device = batch.mel.device
    model.zero_grad()
    synchronize(device)
    started = time.perf_counter()
    objective = loss_function(model(batch), batch).objective
    synchronize(device)
    middle = time.perf_counter()
    objective.backward()
    if optimizer is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), hparams.grad_clip_thresh)
        optimizer.step()
    synchronize(device)
    return Times(middle - started, time.perf_counter() - middle)


def noise(shape: Shape, hparams: HParams) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return collate(
        [
            Item(
                0,
                torch.randint(1, hparams.n_symbols, (n,), generator=generator),
                torch.randn(m, hparams.n_mel_channels, generator=generator),
            )
            for n, m in zip(shape.characters, shape.frames, strict=True)
        ]
    )


class Worker:
    """One implementation in its process."""

    def __init__(self, implementation: str, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        memory = 0
        if "SC_AVPHYS_PAGES" in os.sysconf_names:
            memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 9 // 10
        arguments = (theirs, implementation, args, memory)
        self.process = context.Process(target=worker, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.connection.recv()

    def step(self, shape: Shape, with_optimizer: bool = False) -> tuple[Times, float] | None:
        """Times and the peak memory so far in GiB; None if it does not fit."""
        try:
            self.connection.send((shape, with_optimizer))
            result = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            if self.process.exitcode != -signal.SIGKILL:  # what the system does for want of memory
                raise UserError(f"a worker ended with {self.process.exitcode}, see above") from None
            return None
        if isinstance(result, str):
            raise UserError(result)
        return result

    def close(self) -> None:
        self.process.terminate()
        self.process.join()


# Steps


def bench_shape(shape: Shape, args: argparse.Namespace) -> dict[str, dict[str, float] | None]:
    """Medians per implementation, in turns; None for one that runs out of memory."""
    workers = {name: Worker(name, args) for name in args.implementations}
    times = {name: [] for name in workers}
    peaks = dict.fromkeys(workers, 0.0)
    for round in range(-args.warmup, args.rounds):
        for name in workers:
            if times[name] is None:
                continue
            result = workers[name].step(shape)
            if result is None:
                times[name] = None
                continue
            if round >= 0:
                times[name].append(result[0])
            peaks[name] = result[1]
    for each in workers.values():
        each.close()
    return {
        name: done
        and {
            "forward": statistics.median(t.forward for t in done),
            "backward": statistics.median(t.backward for t in done),
            "step": statistics.median(t.step for t in done),
            "fastest": min(t.step for t in done),
            "peak_gib": peaks[name],
        }
        for name, done in times.items()
    }


def bench_steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    base = args.implementations[0]
    print(f"ratios: {base}'s time over that of the others; their peak memory over {base}'s\n")
    print("| B | T_out | | forward s | backward s | step s | forward | backward | step | memory |")
    print("|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|")
    for B in args.batch_sizes:
        for T in args.frames:
            results = bench_shape(Shape([T] * B, [max(T // 4, 1)] * B), args)
            for name, result in results.items():
                row = f"| {B} | {T} | {name} |"
                if result is None:
                    print(f"{row} out of memory |")
                    continue
                keys = ("forward", "backward", "step")
                row += "".join(f" {result[key]:.3f} |" for key in keys)
                if results[base] and name != base:
                    row += "".join(f" {results[base][key] / result[key]:.2f}x |" for key in keys)
                    peak = results[base]["peak_gib"]  # 0 if it took no more than importing
                    row += f" {result['peak_gib'] / peak:.2f}x |" if peak else " |"
                else:
                    row += f" | | | {result['peak_gib']:.2f} GiB |"
                print(row)
            yield {"batch_size": B, "frames": T, "results": results}


# Epochs


def epoch_shapes(frames: np.ndarray, characters: np.ndarray, batching: str) -> list[Shape]:
    """The batches of the first epoch, in their order."""
    hparams, dynamic = HParams(), BATCHING[batching]
    plan = plan_batches(
        frames,
        strategy=batching.partition("-")[0],
        batch_size=hparams.batch_size,
        dynamic_batch_size=dynamic,
        batch_randomization=dynamic,
        lrf=hparams.lrf,
        seed=hparams.seed,
    )
    return [Shape(frames[batch].tolist(), characters[batch].tolist()) for batch in plan]


def sample(shapes: list[Shape], n: int | None) -> list[Shape]:
    """``n`` batches, evenly from the smallest to the largest, in the epoch's order."""
    if n is None or n >= len(shapes):
        return shapes
    by_size = sorted(range(len(shapes)), key=lambda i: padded(shapes[i]))
    places = np.linspace(0, len(shapes), n, endpoint=False) + len(shapes) / (2 * n)
    return [shapes[i] for i in sorted(by_size[int(place)] for place in places)]


def padded(shape: Shape) -> int:
    return len(shape.frames) * max(shape.frames)


def read_clips(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """The frames and the characters of an epoch's clips."""
    frames = read_lengths(args.epoch, args.frames_column, "--frames_column")
    characters = read_lengths(args.epoch, args.characters_column)
    frames = rescale(frames, args.hop_from, args.hop_to)
    if args.train_size:
        chosen = np.random.default_rng(0).permutation(len(frames))[: args.train_size]
        frames, characters = frames[chosen], characters[chosen]
    return frames, characters


def bench_epochs(
    frames: np.ndarray, characters: np.ndarray, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    all_shapes = {name: epoch_shapes(frames, characters, name) for name in BATCHING}
    walks = [(name, batching) for batching in BATCHING for name in args.implementations]
    seconds = {walk: [] for walk in walks}
    workers = {walk: Worker(walk[0], args) for walk in walks}
    chosen = {name: sample(shapes, args.batches) for name, shapes in all_shapes.items()}
    for name, shapes in all_shapes.items():
        total = sum(map(padded, shapes))
        print(
            f"{name}: {len(shapes):,} batches, {total:,} padded frames, "
            f"{sum(max(shape.frames) for shape in shapes):,} decoder steps; at most "
            f"{max(len(s.frames) * max(s.characters) for s in shapes):,} padded characters and "
            f"{max(padded(s) * max(s.characters) for s in shapes) / 1e6:.2f} million cells of an "
            f"alignment in a batch; {len(chosen[name]):,} batches timed"
        )
    peaks = dict.fromkeys(walks, 0.0)
    for walk in walks:  # what is allocated or compiled once is not an epoch's
        workers[walk].step(chosen[walk[1]][0], with_optimizer=True)
    for i in range(max(map(len, chosen.values()))):
        for walk in walks:
            if i < len(chosen[walk[1]]):
                result = workers[walk].step(chosen[walk[1]][i], with_optimizer=True)
                if result is None:
                    raise UserError(f"{walk[0]} with {walk[1]}: out of memory; leave it out")
                seconds[walk].append(result[0].step)
                peaks[walk] = result[1]
    for each in workers.values():
        each.close()
    print("\n| | batching | seconds an epoch | | peak memory |")
    print("|---|---|--:|--:|--:|")
    base = None
    for walk in walks:
        name, batching = walk
        share = sum(map(padded, chosen[batching])) / sum(map(padded, all_shapes[batching]))
        epoch = sum(seconds[walk]) / share
        base = base or epoch
        print(
            f"| {name} | {batching} | {epoch:,.0f} | {base / epoch:.2f}x | {peaks[walk]:.2f} GiB |"
        )
        yield {
            "implementation": name,
            "batching": batching,
            "seconds": epoch,
            "batches_timed": len(chosen[batching]),
            "share_of_padded_frames_timed": share,
            "peak_gib": peaks[walk],
        }


def parse_args() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = ArgumentParser(
        description="Time training steps of the recipe's decoders beside NVIDIA's loop.",
        epilog="The whole grid takes an hour or more on a CPU: name fewer --batch_sizes, --frames "
        "and --implementations.",
    )
    add = parser.add_argument
    add("--batch_sizes", type=int, nargs="+", default=[16, 32, 64, 98], metavar="B")
    add("--frames", type=int, nargs="+", default=[200, 400, 800], metavar="T", help="T_out")
    usual = [name for name in IMPLEMENTATIONS if cuda or name != "graph"]
    add(
        "--implementations",
        nargs="+",
        choices=(
            *usual,
            *(name for name in FASTER if cuda or name in ("nvidia+bf16", "scan+bf16")),
        ),
        default=usual,
        metavar="NAME",
        help="of %(choices)s; the first is the base of the ratios (default: %(default)s)",
    )
    add("--rounds", type=int, default=20 if cuda else 3, help="steps of each (%(default)s)")
    add("--warmup", type=int, default=3 if cuda else 1, help="and before them (%(default)s)")
    add("--threads", type=int, default=torch.get_num_threads(), help="on a CPU (%(default)s)")
    add("--no_onednn", action="store_true", help="switch oneDNN off, for all of them")
    add("--hparams", default="", metavar="NAME=VALUE,...", help="of the model")
    add("--json", type=Path, metavar="FILE", help="write the numbers")
    epoch = parser.add_argument_group("epochs")
    add = epoch.add_argument
    add(
        "--epoch",
        type=Path,
        nargs="?",
        const=LJSPEECH_LENGTHS,
        metavar="LENGTHS",
        help="CSV file of every clip's lengths; without a name LJSpeech's, frames counted from "
        f"its wavs at a hop of {LJSPEECH_HOP} samples, n_samples // {LJSPEECH_HOP} + 1, and "
        f"rescaled to {HParams.hop_length}: right to one frame",
    )
    add("--frames_column", metavar="NAME", help="(default: as plot_batching.py --column)")
    add("--characters_column", default="characters", metavar="NAME", help="(%(default)s)")
    add("--hop_from", type=int, metavar="N", help="frames are of this hop, in samples ...")
    add("--hop_to", type=int, metavar="N", help="... and become frames of this one")
    add("--train_size", type=int, metavar="N", help="N clips at random (default: all)")
    add("--batches", type=int, metavar="N", help="N batches of all sizes (default: all of them)")
    args = parser.parse_args()
    for name in ("batch_sizes", "frames", "rounds", "threads", "train_size", "batches"):
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise UserError(f"--{name} {value}: use 1 or more")
    if args.warmup < 0:
        raise UserError(f"--warmup {args.warmup}: use 0 or more")
    if args.epoch == LJSPEECH_LENGTHS:
        args.hop_from = args.hop_from or LJSPEECH_HOP
        args.hop_to = args.hop_to or HParams.hop_length
    if not args.epoch:
        for name in ("frames_column", "hop_from", "hop_to", "train_size", "batches"):
            if (value := getattr(args, name)) is not None:
                raise UserError(f"--{name} {value}: goes with --epoch; leave it out")
    if args.json and not args.json.parent.is_dir():
        raise UserError(f"--json {args.json}: {args.json.parent}: no such folder; make it first")
    if len(set(args.implementations)) < len(args.implementations):
        raise UserError("--implementations: one is named twice; keep one")
    for name in args.implementations:
        settings(name, args)
    return args


def main() -> None:
    args = parse_args()
    clips = read_clips(args) if args.epoch else None
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"CPU, {args.threads} threads"
    print(f"{device}; {platform.machine()}; PyTorch {torch.__version__}; {args.rounds} rounds")
    rows: Iterable[dict[str, Any]] = bench_epochs(*clips, args) if clips else bench_steps(args)
    record = {"device": device, "torch": torch.__version__, "rounds": args.rounds, "rows": []}
    for row in rows:
        record["rows"].append(row)
        if args.json:
            args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    exit_on_user_error(main)
