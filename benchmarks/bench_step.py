"""Time training steps: the recipe's decoders side by side with NVIDIA's code. Makes the tables of
docs/performance.md that have its commands and, by gpu_report.sh, those of "On a GPU"; and the
columns of measured times in docs/results/appendix.md.

    git clone https://github.com/NVIDIA/tacotron2 nvidia
    python benchmarks/bench_step.py --nvidia nvidia --batch_sizes 16 48 --frames 400
    python benchmarks/bench_step.py --implementations scan --epoch --batchings all --batches 5
    python benchmarks/bench_step.py --implementations scan scan+bf16 --profile
    python benchmarks/bench_step.py --nvidia nvidia --gradients

Implementations: nvidia is the model of NVIDIA's repository, if --nvidia names a clone of it;
reference (a readable loop like NVIDIA's) and scan are the decoder setting; eager is scan without
CUDA graphs. Add +bf16 for its precision, or +tf32 on a GPU, and then +2 or +3 for as many frames a
decoder step.

Each has its own process, for its own peak memory. They take turns, step by step, so that a busy
moment of the machine slows them all. Ratios compare with the first. The clips are noise, B of T
frames and a character every four; the times are medians.

With --profile, it says where the time goes, on a CPU: for each product, M x K x N for (M, K) by
(K, N), how near its speed comes to the fastest of that implementation. A number before that counts
products: a batch's, or two in the backward of a convolution. "Python" is outside of operators.

With --gradients, it compares those of a batch with padding, without dropout and from the same
weights: the largest differences from the first implementation's, as parts of a gradient's largest
element.

With --epoch, lengths are LJSpeech's, and a step includes clipping and Adam. Every round plans
another epoch, and epochs take turns in an order that rotates. Times are means over the rounds; with
--batches they are extrapolated from some batches, by padded frames. What they save, of a GPU's time
or of the processor's, is a mean of differences within a round, with its standard error.
"""

import importlib
import math
import multiprocessing
import os
import sys
import time
from argparse import Namespace
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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
from training.device import choose_device, device_name, keep_memory, peak_memory, synchronize

Shape = tuple[list[int], list[int]]  # characters and frames of each clip of a batch
N_CLIPS = 10_480  # LJSpeech's training clips in the paper
ROOT = Path(__file__).resolve().parent.parent
BATCHINGS = list(pd.read_csv(ROOT / "scripts" / "paper_table2.csv").batching)


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
        self.optimizer = torch.optim.Adam(self.model.parameters()) if update else None
        self.memory = peak_memory(self.device)

    def step(self, shape: Shape) -> StepCost:
        batch = noise_batch(self.hparams, shape).to(self.device)
        self.model.zero_grad()
        start, processor = self._now(), time.process_time()
        loss = Tacotron2Loss()(self.model(batch), batch).objective
        middle = self._now()
        loss.backward()
        if self.optimizer:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.hparams.grad_clip_thresh)
            self.optimizer.step()
        end = self._now()
        processor = time.process_time() - processor
        peak = peak_memory(self.device) - self.memory
        return StepCost(middle - start, end - middle, end - start, processor, peak)

    def profile(self, shape: Shape, n_steps: int) -> pd.DataFrame:
        """Returns what all calls of an operator, with the sizes of a product, cost in a step: a
        mean over ``n_steps``."""
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
        return pd.DataFrame(costs, ["calls", "seconds", "flop"]).T / n_steps

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def settings(implementation: str, overrides: str) -> HParams:
    decoder, *options = implementation.split("+")
    changes = {"decoder": {"nvidia": "reference", "eager": "scan"}.get(decoder, decoder)}
    for option in options:
        changes["n_frames_per_step" if option.isdigit() else "precision"] = option
    return create_hparams(f"{overrides},{format_overrides(changes)}")


def noise_batch(hparams: HParams, shape: Shape) -> Batch:
    """Returns clips of random ids and mels of these lengths."""
    items = []
    for T_in, T_out in zip(*shape, strict=True):
        ids = torch.randint(1, hparams.n_symbols, (T_in,))
        items.append(Item(len(items), ids, torch.randn(T_out, hparams.n_mel_channels)))
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
        case _:
            return "", 0
    return " x ".join(map(str, [*batch, M, K, N])), 2 * math.prod(batch) * M * K * N


# Processes


def _start(*arguments: Any) -> None:
    global trainer
    trainer = Trainer(*arguments)


def _call(method: str, *arguments: Any) -> Any:
    return getattr(trainer, method)(*arguments)


def start_processes(args: Namespace, first: Shape) -> dict[str, ProcessPoolExecutor]:
    """Starts a process for each implementation, and takes a first step with it."""
    pools, context = {}, multiprocessing.get_context("spawn")
    for name in args.implementations:
        arguments = name, args.hparams, args.epoch, args.nvidia
        pools[name] = ProcessPoolExecutor(1, context, _start, arguments)
        take_step(pools[name], first)
    return pools


def take_step(pool: ProcessPoolExecutor, shape: Shape) -> StepCost:
    return pool.submit(_call, "step", shape).result()


# Benchmarks


def sizes_and_shapes(args: Namespace) -> dict[str, Shape]:
    """Returns batches of B clips of T frames by "B x T", the smallest first."""
    sizes = sorted(product(args.batch_sizes, args.frames), key=math.prod)
    return {f"{B} x {T}": ([max(T // 4, 1)] * B, [T] * B) for B, T in sizes}


def bench_operators(args: Namespace) -> None:
    """Profiles steps. Operators that take less than 1 % of the time are summed."""
    shapes = sizes_and_shapes(args)
    pools = start_processes(args, next(iter(shapes.values())))
    print("| batches | | product or operator | calls | ms | % | Gflop/s | % of the fastest |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for (size, shape), (name, pool) in product(shapes.items(), pools.items()):
        costs = pool.submit(_call, "profile", shape, args.rounds).result()
        seconds, fastest = costs.seconds.sum(), (costs.flop / costs.seconds).max()
        others = np.where(costs.flop > 0, "other products", "other operators")
        costs = costs.groupby(np.where(costs.seconds > 0.01 * seconds, costs.index, others)).sum()
        for operator, cost in costs.sort_values("seconds", ascending=False).iterrows():
            share, speed = cost.seconds / seconds, cost.flop / cost.seconds
            row = f"{cost.calls:.0f} | {1e3 * cost.seconds:.0f} | {100 * share:.1f} | "
            row += f"{speed / 1e9:.0f} | {100 * speed / fastest:.0f}" if speed else "|"
            print(f"| {size} | {name} | {operator} | {row} |", flush=True)


def bench_shapes(args: Namespace) -> None:
    """Times batches of B clips of T frames. The smallest come first, so that the peak of a
    process's steps so far is that of its last."""
    shapes = sizes_and_shapes(args)
    pools = start_processes(args, next(iter(shapes.values())))
    print("| batches | | forward s | backward s | both s | times as fast | peak GiB | times it |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for size, shape in shapes.items():
        steps = {name: [] for name in pools}
        for _ in range(args.rounds + 1):  # one warms up
            for name, pool in pools.items():
                steps[name].append(take_step(pool, shape))
        costs = {name: StepCost(*np.median(taken[1:], axis=0)) for name, taken in steps.items()}
        base = costs[args.implementations[0]]
        for name, cost in costs.items():
            times = f"{cost.forward:.3f} | {cost.backward:.3f} | {cost.both:.3f}"
            memory = f"{cost.peak:.2f} | {cost.peak / (base.peak or math.nan):.2f}"
            print(f"| {size} | {name} | {times} | {base.both / cost.both:.2f} | {memory} |")


def bench_gradients(args: Namespace) -> None:
    """Compares the gradients of a batch of clips of T to T / 2 frames."""
    nn.functional.dropout = lambda x, *_, **__: x  # NVIDIA's rates are no settings
    parts = "encoder", "attention", "decoder", "prenet", "postnet"
    overrides = ",".join([args.hparams, *(f"p_{part}_dropout=0" for part in parts)])
    frames = np.linspace(args.frames[0], args.frames[0] // 2, args.batch_sizes[0]).astype(int)
    expected = weights = None
    for name in args.implementations:
        trainer = Trainer(name, overrides, False, args.nvidia)
        model = getattr(trainer.model, "model", trainer.model)  # NVIDIA's is inside
        weights = weights or model.state_dict()
        model.load_state_dict(weights, strict=False)  # NVIDIA's has no variance_gain
        torch.manual_seed(0)
        trainer.step(((frames // 4).tolist(), frames.tolist()))
        # But of biases before batch norm, whose gradients are 0 but for rounding.
        ours = {key: p.grad for key, p in model.named_parameters() if ".conv.bias" not in key}
        expected = expected or ours
        errors = [(ours[k] - expected[k]).abs().max() / expected[k].abs().max() for k in ours]
        largest = sorted(zip(errors, ours, strict=True), reverse=True)[:3]
        print(f"{name}: " + ", ".join(f"{error:.1g} of {key}" for error, key in largest))


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
    on_gpu = torch.cuda.is_available()
    pools = start_processes(args, ([99] * 16, [400] * 16))
    for i in range(args.rounds):
        turn = i % len(labels)
        for batching, name in labels[turn:] + labels[:turn]:
            shapes, share = epoch_shapes(characters, frames, batching, i, args.batches)
            seconds = np.zeros(2)
            for shape in shapes:
                if on_gpu:  # graphs are captured, and libraries choose
                    take_step(pools[name], shape)
                cost = take_step(pools[name], shape)
                seconds += cost.both, cost.processor
            minutes[batching, name].append(seconds / share / 60)
    print("| batching | | minutes an epoch | times as fast | saved % |\n|---|---|--:|--:|--:|")
    base = np.mean(minutes[labels[0]], axis=0)[0]
    for (batching, name), times in minutes.items():
        first = np.array(minutes[args.batchings[0], name])
        saved = pd.Series(100 * (1 - np.array(times) / first)[:, 0 if on_gpu else 1])
        mean = np.mean(times, axis=0)[0]
        row = f"{mean:.2f} | {base / mean:.2f} | {saved.mean():.2f} ± {saved.sem():.2f}"
        print(f"| {batching} | {name} | {row} |")


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--batch_sizes", type=positive, nargs="+", default=[16], metavar="B")
    add("--frames", type=positive, nargs="+", default=[400], metavar="T")
    add("--implementations", nargs="+", default=[], metavar="NAME", help="default: all")
    add("--nvidia", type=os.path.expanduser, default="", metavar="DIR", help="NVIDIA's repository")
    add("--rounds", type=positive, default=20 if cuda else 3, help="timed steps, or epochs")
    add("--hparams", default="", metavar="NAME=VALUE,...", help="settings of the model")
    add("--epoch", action="store_true", help="time an epoch of LJSpeech")
    add("--gradients", action="store_true", help="compare gradients, not times")
    add("--profile", action="store_true", help="say where the time goes, on a CPU")
    add("--batchings", nargs="+", default=["RAND", "SSB-DBS-BR"], metavar="NAME", help="or all")
    add("--batches", type=positive, metavar="N", help="of --epoch: time only N, of all sizes")
    args = parser.parse_args()
    args.batchings = BATCHINGS if "all" in args.batchings else args.batchings
    for name in args.batchings:
        create_hparams(f"batching={name}")  # refuses what is not one
    if not args.implementations:
        args.implementations = ["nvidia"] * bool(args.nvidia) + ["reference", "scan"]
        args.implementations += ["eager"] * cuda
    for name in args.implementations:
        has_clone = args.nvidia and Path(args.nvidia, "model.py").is_file()
        if name.startswith("nvidia") and not has_clone:
            raise UserError(f"--nvidia {args.nvidia!r}: name a clone of NVIDIA/tacotron2")
        choose_device(settings(name, args.hparams))  # refuses what cannot run here
    if args.profile and cuda:
        raise UserError("--profile: it is of a CPU; hide the GPU with CUDA_VISIBLE_DEVICES=''")
    device = device_name(torch.device("cuda" if cuda else "cpu"))
    print(f"{device}; {torch.get_num_threads()} threads; PyTorch {torch.__version__}")
    if args.gradients:
        bench_gradients(args)
    elif args.profile:
        bench_operators(args)
    elif args.epoch:
        bench_epoch(args)
    else:
        bench_shapes(args)


if __name__ == "__main__":
    exit_on_user_error(main)
