"""Time training steps: the recipe's decoders side by side with NVIDIA's code. Makes the tables of
"Measured on a CPU" and "An epoch, by corpus and model" in docs/performance.md.

    git clone https://github.com/NVIDIA/tacotron2 nvidia
    python benchmarks/bench_step.py --nvidia nvidia --batch_sizes 16 48 --frames 400
    python benchmarks/bench_step.py --nvidia nvidia --epoch     # on LJSpeech's lengths
    python benchmarks/bench_step.py --implementations scan --epoch --batchings all --batches 5
    python benchmarks/bench_step.py --implementations scan scan+bf16 --profile \\
        --batch_sizes 16 --frames 400

Implementations: nvidia is the model of NVIDIA's repository, if --nvidia names a clone of it;
reference (a readable loop like NVIDIA's) and scan are the decoder setting; eager is scan without
CUDA graphs. Add +bf16 for its precision, or +tf32 on a GPU, and then +2 or +3 for as many frames a
decoder step.

Each has its own process, for its own peak memory. They take turns, step by step, so that a busy
moment of the machine slows them all. Ratios compare with the first. The model is the paper's, with
dropout. The clips are noise, B of T frames and a character every four; the times are medians.

With --profile, it says where the time goes, on a CPU: for each product, M x K x N for (M, K) by
(K, N), how near its speed comes to the fastest of that implementation. A number before that counts
products: a batch's, or two in the backward of a convolution or an LSTM. "Python" is all time
outside of operators. The profiler itself takes time too.

With --epoch, lengths are LJSpeech's, and a step includes clipping and Adam. Every round plans
another epoch, and the batchings take turns in an order that rotates. Times are means over the
rounds, and what they save is a mean of differences within a round, with its standard error.
"""

import importlib
import math
import multiprocessing
import os
import re
import resource
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import plan_batches, read_batching
from cli import ArgumentParser, UserError, exit_on_user_error, positive
from data_utils import Batch, Item, collate
from decoder import graphs
from hparams import HParams, create_hparams, format_overrides
from layers import length_mask
from loss_function import Tacotron2Loss
from model import Output, Tacotron2
from training.device import (
    choose_device,
    device_name,
    is_out_of_memory,
    keep_memory,
    peak_memory,
    synchronize,
)

Shape = tuple[list[int], list[int]]  # characters and frames of each clip of a batch
N_CLIPS = 10_480  # LJSpeech's training clips in the paper
ROOT = Path(__file__).resolve().parent.parent
BATCHINGS = list(pd.read_csv(ROOT / "scripts" / "paper_table2.csv").batching)
SHAPES_HEADER = """
| batches | | forward s | backward s | both s | times as fast | peak | of the first | reserved |
|---|---|--:|--:|--:|--:|--:|--:|--:|"""
EPOCH_HEADER = """
| batching | | minutes an epoch | times as fast | saved % | processor minutes | saved % |
|---|---|--:|--:|--:|--:|--:|"""

PROFILE_HEADER = """
| batches | | product, or other operator | calls | ms | % | Gflop/s | % of the fastest |
|---|---|---|--:|--:|--:|--:|--:|"""


class NvidiaModel(nn.Module):
    """The model of NVIDIA's repository, in ``folder``, with our model's batches and outputs."""

    def __init__(self, folder: str, hparams: HParams) -> None:
        super().__init__()
        # Its modules have the names of ours, which are set aside while it is imported.
        ours = {name: sys.modules.pop(name) for name in ("model", "layers") if name in sys.modules}
        sys.path.insert(0, folder)
        try:
            theirs = importlib.import_module("model")
        finally:
            sys.path.remove(folder)
            sys.modules.update(ours)
        # Theirs needs a GPU.
        theirs.get_mask_from_lengths = lambda n: length_mask(n, int(n.max()))
        settings = Namespace(**vars(hparams), fp16_run=False, gate_threshold=0.5)
        self.model = theirs.Tacotron2(settings)
        self.bf16 = hparams.precision == "bf16"

    def forward(self, batch: Batch) -> Output:
        inputs = batch.text, batch.text_lengths, batch.mel, batch.text.size(1), batch.mel_lengths
        with torch.autocast(batch.mel.device.type, torch.bfloat16, enabled=self.bf16):
            outputs = self.model(inputs)
        return Output(*(output.float() for output in outputs))


class StepCost(NamedTuple):
    """What a training step cost. Times are in seconds, memory is in GiB."""

    forward: float
    backward: float
    both: float
    processor: float  # its time for both
    peak: float  # of the steps so far, beyond what the model took before them
    reserved: float  # what a GPU has reserved at its peak: for CUDA graphs too


class OperatorCost(NamedTuple):
    """What all calls of an operator with some sizes cost in a training step."""

    name: str  # with a product's sizes
    calls: float
    seconds: float
    flop: float  # 0 if it is no product


class Trainer:
    """Takes training steps on noise, with clipping and Adam if ``update``."""

    def __init__(self, implementation: str, overrides: str, update: bool, nvidia: str) -> None:
        self.hparams = settings(implementation, overrides)
        self.device = choose_device(self.hparams)
        if implementation.startswith("eager"):
            graphs.turn_off()
        torch.manual_seed(0)
        if implementation.startswith("nvidia"):
            model = NvidiaModel(nvidia, self.hparams)
        else:
            keep_memory()
            model = Tacotron2(self.hparams)
        self.model = model.to(self.device).train()
        self.loss_function = Tacotron2Loss()
        self.optimizer = torch.optim.Adam(self.model.parameters()) if update else None
        self.memory = peak_memory(self.device)

    def step(self, shape: Shape) -> StepCost:
        batch = noise_batch(self.hparams, shape).to(self.device)
        self.model.zero_grad()
        start, processor = self._now(), time.process_time()
        loss = self.loss_function(self.model(batch), batch).objective
        middle = self._now()
        loss.backward()
        if self.optimizer:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.hparams.grad_clip_thresh)
            self.optimizer.step()
        end = self._now()
        processor = time.process_time() - processor
        peak = peak_memory(self.device) - self.memory
        reserved = torch.cuda.max_memory_reserved() / 2**30 if self.device.type == "cuda" else 0
        return StepCost(middle - start, end - middle, end - start, processor, peak, reserved)

    def profile(self, shape: Shape, n_steps: int) -> list[OperatorCost]:
        """Returns what takes the time of a step, a mean over ``n_steps``."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            start = self._now()
            for _ in range(n_steps):
                self.step(shape)
            seconds = self._now() - start
        costs = defaultdict(lambda: np.zeros(3))
        for event in profiler.key_averages(group_by_input_shape=True):
            is_operator = "::" in event.key  # or a function of autograd, in Python
            name = event.key.rpartition("::")[2] if is_operator else "Python"
            sizes, flop = product_sizes(name, event.input_shapes)
            cost = event.count, event.self_cpu_time_total / 1e6, flop * event.count
            costs[f"{name} {sizes}".rstrip()] += cost
        costs["Python"] += 0, seconds - sum(cost[1] for cost in costs.values()), 0
        return [OperatorCost(name, *(cost / n_steps)) for name, cost in costs.items()]

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def settings(implementation: str, overrides: str) -> HParams:
    decoder, *options = implementation.split("+")
    decoder = {"nvidia": "reference", "eager": "scan"}.get(decoder, decoder)
    changes = {"decoder": decoder}
    for option in options:
        changes["n_frames_per_step" if option.isdigit() else "precision"] = option
    return create_hparams(f"{overrides},{format_overrides(changes)}")


def noise_batch(hparams: HParams, shape: Shape) -> Batch:
    """Returns clips of random ids and mels of these lengths."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for T_in, T_out in zip(*shape, strict=True):
        ids = torch.randint(1, hparams.n_symbols, (T_in,), generator=generator)
        mel = torch.randn(T_out, hparams.n_mel_channels, generator=generator)
        items.append(Item(len(items), ids, mel))
    return collate(items, hparams.n_frames_per_step)


def product_sizes(name: str, shapes: list[list[int]]) -> tuple[str, int]:
    """Returns the sizes M x K x N of a PyTorch operator that is a product, and its floating-point
    operations; ("", 0) if it is none."""
    match name, *shapes:
        case "mm" | "bmm", [*batch, M, K], [*_, N], *_:
            pass
        case "addmm" | "baddbmm", _, [*batch, M, K], [*_, N], *_:
            pass
        case "_linear_pointwise", [*rows, K], [N, _], *_:
            batch, M = [], math.prod(rows)
        case "mkldnn_convolution", [B, C, *_, T], [N, _, *_, width], *_:
            batch, M, K = [], B * T, C * width
        case "convolution_backward", [B, N, T], [_, C, _], [*_, width], *_:
            batch, M, K = [2], B * T, C * width  # the gradients of inputs and weights
        case "mkldnn_rnn_layer" | "mkldnn_rnn_layer_backward", [T, B, D], [N, _], [_, H], *_:
            batch, M, K = [2] if name.endswith("backward") else [], T * B, D + H
        case _:
            return "", 0
    return " x ".join(map(str, [*batch, M, K, N])), 2 * math.prod(batch) * M * K * N


# Processes


def _start(implementation: str, overrides: str, update: bool, nvidia: str) -> None:
    global trainer
    if not torch.cuda.is_available() and sys.platform == "linux":
        # So that this process gets an error, rather than Linux killing some other one.
        meminfo = Path("/proc/meminfo").read_text()
        available = 1024 * int(re.search(r"MemAvailable: *(\d+) kB", meminfo)[1])  # bytes
        limit = int(0.9 * available)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    trainer = Trainer(implementation, overrides, update, nvidia)


def _step(shape: Shape, n_profiled: int) -> StepCost | list[OperatorCost]:
    try:
        return trainer.profile(shape, n_profiled) if n_profiled else trainer.step(shape)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            os._exit(1)  # frees the memory for the others, as if Linux had killed this process
        raise


@contextmanager
def processes(args: Namespace, first: Shape) -> Iterator[dict[str, ProcessPoolExecutor]]:
    """Starts a process for each implementation, and takes a first step with it."""
    with ExitStack() as stack:
        pools, context = {}, multiprocessing.get_context("spawn")
        for name in args.implementations:
            start = partial(_start, name, args.hparams, args.epoch, args.nvidia)
            pools[name] = stack.enter_context(ProcessPoolExecutor(1, context, start))
            take_step(pools[name], first)
        yield pools


def take_step(
    pool: ProcessPoolExecutor, shape: Shape, n_profiled: int = 0
) -> StepCost | list[OperatorCost] | None:
    """Takes a step, or profiles some. Returns None from the first that does not fit the memory."""
    try:
        return pool.submit(_step, shape, n_profiled).result()
    except BrokenProcessPool:
        return None


# Benchmarks


def sizes_and_shapes(args: Namespace) -> dict[tuple[int, int], Shape]:
    """Returns batches of B clips of T frames by (B, T), the smallest first."""
    sizes = sorted(product(args.batch_sizes, args.frames), key=lambda size: size[0] * size[1])
    return {(B, T): ([max(T // 4, 1)] * B, [T] * B) for B, T in sizes}


def bench_operators(args: Namespace) -> None:
    """Profiles steps."""
    shapes = sizes_and_shapes(args)
    print(PROFILE_HEADER)
    with processes(args, next(iter(shapes.values()))) as pools:
        for (B, T), shape in shapes.items():
            for name, pool in pools.items():
                label = f"| {B} x {T} | {name} |"
                costs = take_step(pool, shape, args.rounds)
                if costs is None:
                    print(f"{label} out of memory |")
                else:
                    print_operators(label, costs)


def print_operators(label: str, costs: list[OperatorCost]) -> None:
    """Prints a row for each operator, and a sum of those that take less than 1 % of the time."""
    step = sum(cost.seconds for cost in costs)
    fastest = max(cost.flop / cost.seconds for cost in costs if cost.flop)
    costs.sort(key=lambda cost: -cost.seconds)
    shown = [cost for cost in costs if cost.seconds > 0.01 * step]
    rest = [cost for cost in costs if cost not in shown]
    for name, is_product in (("other products", True), ("other operators", False)):
        small = [cost[1:] for cost in rest if (cost.flop > 0) == is_product]
        shown.append(OperatorCost(name, *np.sum([np.zeros(3), *small], axis=0)))
    for cost in shown:
        share, speed = cost.seconds / step, cost.flop / (cost.seconds or 1)
        row = f"{cost.calls:.0f} | {1e3 * cost.seconds:.0f} | {100 * share:.1f} | "
        row += f"{speed / 1e9:.0f} | {100 * speed / fastest:.0f}" if speed else "|"
        print(f"{label} {cost.name} | {row} |", flush=True)


def bench_shapes(args: Namespace) -> None:
    """Times batches of B clips of T frames. The smallest come first, so that the peak of a
    process's steps so far is that of its last."""
    shapes = sizes_and_shapes(args)
    print(SHAPES_HEADER)
    with processes(args, next(iter(shapes.values()))) as pools:
        for (B, T), shape in shapes.items():
            steps = {name: [] for name in pools}
            for _ in range(args.rounds + 1):  # one warms up
                for name, pool in pools.items():
                    steps[name].append(take_step(pool, shape))
            base = None
            for name, costs in steps.items():
                if None in costs:
                    print(f"| {B} x {T} | {name} | out of memory |")
                    continue
                cost = StepCost(*np.median(costs[1:], axis=0))
                base = base or cost
                times = f"{cost.forward:.3f} | {cost.backward:.3f} | {cost.both:.3f}"
                times += f" | {base.both / cost.both:.2f}x"
                memory = f"{cost.peak:.2f} GiB | "
                memory += f"{cost.peak / base.peak:.2f}x" if base.peak else ""
                memory += f" | {cost.reserved:.2f} GiB" if cost.reserved else " |"
                print(f"| {B} x {T} | {name} | {times} | {memory} |")


def epoch_shapes(
    characters: np.ndarray, frames: np.ndarray, batching: str, epoch: int, n_batches: int | None
) -> tuple[list[Shape], float]:
    """Returns the batches of an epoch of clips of these lengths, or ``n_batches`` of all sizes,
    and their share of its padded frames."""
    strategy, dynamic, shuffled = read_batching(batching)
    plan = plan_batches(frames, strategy, HParams.batch_size, dynamic, shuffled, epoch=epoch)
    shapes = [(characters[batch].tolist(), frames[batch].tolist()) for batch in plan]
    padded = np.array([len(frames) * max(frames) for _, frames in shapes])
    # Spread evenly from the smallest batch to the largest; walked in the epoch's order.
    n = min(n_batches or len(plan), len(plan))
    ranks = ((np.arange(n) + 0.5) * len(plan) / n).astype(int)
    timed = np.sort(np.argsort(padded, kind="stable")[ranks])
    return [shapes[i] for i in timed], padded[timed].sum() / padded.sum()


def bench_epoch(args: Namespace) -> None:
    """Times epochs on LJSpeech's lengths, by each batching: all batches, or some of all sizes,
    whose time is extrapolated by padded frames."""
    clips = pd.read_csv(ROOT / "filelists" / "ljspeech_lengths.csv")
    clips = clips.iloc[np.random.default_rng(0).permutation(len(clips))[:N_CLIPS]]
    frames, characters = clips.frames_hop276.to_numpy(), clips.characters.to_numpy()
    labels = [*product(args.batchings, args.implementations)]
    minutes = {label: [] for label in labels}  # by round: of the wall clock, of the processor
    with processes(args, ([99] * 16, [400] * 16)) as pools:
        for i in range(args.rounds):
            turn = i % len(labels)
            epochs = {}
            for batching in args.batchings:
                epochs[batching] = epoch_shapes(characters, frames, batching, i, args.batches)
            steps = {label: [] for label in labels}
            for j in range(max(len(shapes) for shapes, _ in epochs.values())):
                for batching, name in labels[turn:] + labels[:turn]:
                    shapes = epochs[batching][0]
                    if j < len(shapes):
                        if torch.cuda.is_available():  # graphs are captured, and libraries choose
                            take_step(pools[name], shapes[j])
                        steps[batching, name].append(take_step(pools[name], shapes[j]))
            for (batching, name), costs in steps.items():
                seconds = np.full(2, np.nan)
                if None not in costs:
                    seconds = np.sum([(cost.both, cost.processor) for cost in costs], axis=0)
                minutes[batching, name].append(seconds / epochs[batching][1] / 60)
            print(f"round {i + 1} of {args.rounds} is done", file=sys.stderr, flush=True)
    print(EPOCH_HEADER)
    for (batching, name), times in minutes.items():
        first = np.array(minutes[args.batchings[0], name])
        mean, base = np.mean(times, axis=0), np.mean(minutes[labels[0]], axis=0)
        saved = pd.DataFrame(100 * (1 - np.array(times) / first))
        wall, processor = (f"{saved[i].mean():.2f} ± {saved[i].sem():.2f}" for i in range(2))
        row = f"{mean[0]:.2f} | {base[0] / mean[0]:.2f}x | {wall} | {mean[1]:.2f} | {processor}"
        print(f"| {batching} | {name} | {row} |")


def processor() -> str:
    """Returns the name of the GPU; or that of the CPU, with its family and model."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = device_name(torch.device("cpu"))
    with suppress(OSError):
        info = Path("/proc/cpuinfo").read_text()
        found = re.findall(r"^(cpu family|model)\s*: (\d+)$", info, re.MULTILINE)
        name += "".join(f", {key} {value}" for key, value in found[:2])
    return f"{name}, {torch.get_num_threads()} threads"


def main() -> None:
    cuda = torch.cuda.is_available()
    names = ["nvidia", "reference", "scan", *["eager"] * cuda]
    options = map("".join, product(names, ("", "+tf32", "+bf16"), ("", "+2", "+3")))
    implementations = [name for name in options if not re.fullmatch(r"nvidia.*\+\d", name)]
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--batch_sizes", type=positive, nargs="+", default=[16, 32, 64, 98], metavar="B")
    add("--frames", type=positive, nargs="+", default=[200, 400, 800], metavar="T")
    default = "default: each without options"
    add("--implementations", nargs="+", choices=implementations, metavar="NAME", help=default)
    clone = "a clone of github.com/NVIDIA/tacotron2"
    add("--nvidia", type=os.path.expanduser, default="", metavar="DIR", help=clone)
    rounds = "timed steps, or epochs (%(default)s)"
    add("--rounds", type=positive, default=20 if cuda else 3, help=rounds)
    add("--hparams", default="", metavar="NAME=VALUE,...", help="settings of the model")
    add("--epoch", action="store_true", help="time an epoch of LJSpeech")
    add("--profile", action="store_true", help="say where the time goes, on a CPU")
    compared = ["RAND", "SSB-DBS-BR"]
    batchings = f"of --epoch: {', '.join(BATCHINGS)}, or the like; or all of these"
    add("--batchings", nargs="+", default=compared, metavar="NAME", help=batchings)
    add("--batches", type=positive, metavar="N", help="of --epoch: time only N, of all sizes")
    args = parser.parse_args()
    args.batchings = BATCHINGS if "all" in args.batchings else [*dict.fromkeys(args.batchings)]
    for name in args.batchings:
        create_hparams(f"batching={name}")  # refuses what is not one
    args.implementations = args.implementations or names[not args.nvidia :]
    if args.nvidia and not Path(args.nvidia, "model.py").is_file():
        raise UserError(f"--nvidia {args.nvidia}: has no model.py; clone NVIDIA/tacotron2 there")
    for name in args.implementations:
        if name.startswith("nvidia") and not args.nvidia:
            raise UserError(f"--implementations {name}: name a clone of its code by --nvidia")
        choose_device(settings(name, args.hparams))  # refuses what cannot run here
    if args.profile and (cuda or args.epoch):
        raise UserError(
            "--profile: it is of steps on a CPU; leave out --epoch, or hide the GPU "
            "with CUDA_VISIBLE_DEVICES=''"
        )
    print(f"{processor()}; PyTorch {torch.__version__}")
    benchmark = bench_operators if args.profile else bench_epoch if args.epoch else bench_shapes
    benchmark(args)


if __name__ == "__main__":
    exit_on_user_error(main)
