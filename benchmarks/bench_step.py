"""Time training steps: the recipe's decoders side by side with NVIDIA's code.

    git clone https://github.com/NVIDIA/tacotron2 nvidia
    python benchmarks/bench_step.py --nvidia nvidia --batch_sizes 16 48 --frames 400
    python benchmarks/bench_step.py --epoch --train_size 10480      # on LJSpeech's lengths

Implementations: nvidia is the model of NVIDIA's repository if --nvidia names a clone of it, else
our rewriting (a loop, with projection and gate at every step, and F.dropout); reference, scan and
triton (on a GPU) are the decoder setting. Add +bf16 for its precision, or +tf32 on a GPU.

Each has its own process, for its own peak memory. They take turns, step by step, so that a busy
moment of the machine slows them all. Ratios compare with the first. The model is the paper's, with
dropout. The clips are noise, B of T frames and a character every four; the times are medians. With
--epoch, lengths are LJSpeech's, a step includes clipping and Adam, and the times are sums.
"""

import importlib
import multiprocessing
import os
import resource
import sys
import time
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


import model as model_module
from batching import plan_batches
from cli import ArgumentParser, UserError, exit_on_user_error, positive
from corpus.lengths import LJSPEECH_LENGTHS, ljspeech_lengths, read_lengths
from data_utils import Batch, Item, collate
from hparams import HParams, create_hparams, parse_overrides
from layers import length_mask
from loss_function import Tacotron2Loss
from model import Decoder, Output, Tacotron2
from training.device import (
    choose_device,
    free_memory,
    is_out_of_memory,
    peak_memory,
    synchronize,
    use_large_pages,
)

Shape = tuple[list[int], list[int]]  # characters and frames of each clip of a batch
Step = tuple[float, float, float, float]  # see Trainer.step
Walk = tuple[str, list[Shape], float]  # implementation, batches to time, their share of the whole
HEADER = """
| batches | | forward s | backward s | together s | times as fast | peak memory | of the first's |
|---|---|--:|--:|--:|--:|--:|--:|"""


class NvidiaDecoder(Decoder):
    """Projects at every step, as NVIDIA's code does, and runs in ``dtype`` by autocast."""

    def forward(
        self, memory: Tensor, mel: Tensor, padding: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        outputs, state = [], self.initial_state(memory)
        with torch.autocast(memory.device.type, dtype, enabled=dtype is not None):
            keys = self.attention_layer.memory_layer(memory)
            for frame in self.prenet(F.pad(mel, (1, -1)).permute(2, 0, 1)):
                state = self.step(frame, state, memory, keys, padding)
                features = torch.cat((state.decoder_hidden, state.context), 1)
                gate = self.gate_layer(features).squeeze(1)
                outputs.append((self.linear_projection(features), gate, state.weights))
        mel, gate, alignment = (torch.stack(each).float() for each in zip(*outputs, strict=True))
        return mel.permute(1, 2, 0), gate.t(), alignment.transpose(0, 1)


def use_nvidias_code() -> None:
    """Make every model of this process train as NVIDIA's code does."""
    model_module.Decoder = NvidiaDecoder
    model_module.dropout = F.dropout
    model_module._drop = lambda hidden, mask, p: F.dropout(hidden, p)


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
        only_theirs = {"n_frames_per_step": 1, "fp16_run": False}
        self.model = theirs.Tacotron2(Namespace(**vars(hparams), **only_theirs))

    def forward(self, batch: Batch) -> Output:
        inputs = batch.text, batch.text_lengths, batch.mel, batch.text.size(1), batch.mel_lengths
        return Output(*self.model(inputs))


def settings(implementation: str, overrides: str) -> HParams:
    decoder, _, precision = implementation.replace("nvidia", "reference").partition("+")
    return create_hparams(f"decoder={decoder},precision={precision or 'fp32'},{overrides}")


def noise_batch(hparams: HParams, text_lengths: list[int], mel_lengths: list[int]) -> Batch:
    """Clips of random ids and mels of the given lengths."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for T_in, T_out in zip(text_lengths, mel_lengths, strict=True):
        ids = torch.randint(1, hparams.n_symbols, (T_in,), generator=generator)
        mel = torch.randn(T_out, hparams.n_mel_channels, generator=generator)
        items.append(Item(len(items), ids, mel))
    return collate(items)


class Trainer:
    """Takes training steps on noise, with clipping and Adam if ``update``."""

    def __init__(
        self, implementation: str, overrides: str = "", update: bool = False, nvidia: str = ""
    ) -> None:
        self.hparams = settings(implementation, overrides)
        self.device = choose_device(self.hparams)
        torch.manual_seed(0)
        if implementation == "nvidia" and nvidia:
            model = NvidiaModel(nvidia, self.hparams)
        else:
            model = Tacotron2(self.hparams)
        self.model = model.to(self.device).train()
        self.loss_function = Tacotron2Loss()
        self.optimizer = torch.optim.Adam(self.model.parameters()) if update else None
        self.memory = peak_memory(self.device)

    def step(self, shape: Shape) -> Step:
        """Seconds of forward, backward and both, and the peak in GiB of the steps so far, beyond
        what the model took before them."""
        batch = noise_batch(self.hparams, *shape).to(self.device)
        self.model.zero_grad()
        start = self._now()
        loss = self.loss_function(self.model(batch), batch).objective
        middle = self._now()
        loss.backward()
        if self.optimizer:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.hparams.grad_clip_thresh)
            self.optimizer.step()
        end = self._now()
        return middle - start, end - middle, end - start, peak_memory(self.device) - self.memory

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def open_pool(*options: str | bool) -> ProcessPoolExecutor:
    """A process with a :class:`Trainer`; the options are those of :func:`_start`."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start, options)


def _start(
    implementation: str, overrides: str, update: bool, onednn: bool = True, nvidia: str = ""
) -> None:
    global trainer
    prepare = use_nvidias_code if implementation.startswith("nvidia") else use_large_pages
    prepare()
    torch.backends.mkldnn.enabled = onednn
    if not torch.cuda.is_available() and sys.platform == "linux":
        # So that this process gets an error, rather than Linux killing some other one.
        limit = int(0.9 * free_memory() * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    trainer = Trainer(implementation, overrides, update, nvidia)


def _step(shape: Shape) -> Step:
    try:
        return trainer.step(shape)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            os._exit(1)  # frees the memory for the others, as if Linux had killed this process
        raise


def take_step(pool: ProcessPoolExecutor, shape: Shape) -> Step | None:
    """One step in the pool's process; None if it or an earlier one did not fit the memory."""
    try:
        return pool.submit(_step, shape).result()
    except BrokenProcessPool:
        return None


def bench(walks: dict[str, Walk], args: Namespace, summarise: Callable) -> None:
    """Time the batches of all walks in turns, and print a row for each."""
    steps, base = {label: [] for label in walks}, None
    with ExitStack() as stack:
        pools = {}
        for label, (name, shapes, _) in walks.items():
            pool = open_pool(name, args.hparams, args.epoch, not args.no_onednn, args.nvidia)
            pools[label] = stack.enter_context(pool)
            take_step(pools[label], shapes[0])  # warms up
        for i in range(max(len(shapes) for _, shapes, _ in walks.values())):
            for label, (_, shapes, _) in walks.items():
                if i < len(shapes):
                    steps[label].append(take_step(pools[label], shapes[i]))
    for label, taken in steps.items():
        if None in taken:
            print(f"| {label} | out of memory |")
            continue
        forward, backward, seconds, _ = summarise(taken, axis=0) / walks[label][2]
        peak = taken[-1][3]
        base = base or (seconds, peak)
        times = f"{forward:.3f} | {backward:.3f} | {seconds:.3f} | {base[0] / seconds:.2f}x"
        memory = f"{peak / base[1]:.2f}x" if base[1] else ""
        print(f"| {label} | {times} | {peak:.2f} GiB | {memory} |")


def bench_shapes(args: Namespace) -> None:
    print(HEADER)
    for B, T in product(args.batch_sizes, args.frames):
        shapes = [([max(T // 4, 1)] * B, [T] * B)] * args.rounds
        walks = {f"{B} x {T} | {name}": (name, shapes, 1) for name in args.implementations}
        bench(walks, args, np.median)


def epoch_shapes(
    strategy: str, dynamic: bool, n_clips: int | None = None, n_batches: int | None = None
) -> tuple[list[Shape], float, str]:
    """The first epoch's batches on LJSpeech's lengths, or ``n_batches`` of all sizes; their share
    of its padded frames; and a description."""
    frames = ljspeech_lengths(HParams.hop_length)
    characters = read_lengths(LJSPEECH_LENGTHS, "characters")
    clips = np.random.default_rng(0).permutation(len(frames))[:n_clips]
    frames, characters = frames[clips], characters[clips]
    plan = plan_batches(frames, strategy, HParams.batch_size, dynamic, dynamic)
    shapes = [(characters[batch].tolist(), frames[batch].tolist()) for batch in plan]
    B, T_in, T_out = np.array([(len(f), max(c), max(f)) for c, f in shapes]).T
    padded = B * T_out
    # Spread evenly from the smallest batch to the largest; walked in the epoch's order.
    n = min(n_batches or len(plan), len(plan))
    ranks = ((np.arange(n) + 0.5) * len(plan) / n).astype(int)
    timed = np.sort(np.argsort(padded, kind="stable")[ranks])
    note = (
        f"{len(plan):,} batches, {padded.sum():,} padded frames, {T_out.sum():,} decoder steps; at "
        f"most {(B * T_in).max():,} padded characters and {(padded * T_in).max() / 1e6:.2f} "
        f"million cells of an alignment in a batch; {n:,} batches timed"
    )
    return [shapes[i] for i in timed], padded[timed].sum() / padded.sum(), note


def bench_epoch(args: Namespace) -> None:
    """The first epoch on LJSpeech's lengths, by the default settings and with RAND."""
    walks = {}
    for batching, strategy, dynamic in (("RAND", "RAND", False), ("SSB-DBS-BR", "SSB", True)):
        shapes, share, note = epoch_shapes(strategy, dynamic, args.train_size, args.batches)
        print(f"{batching}: {note}")
        for name in args.implementations:
            walks[f"{batching} | {name}"] = name, shapes, share
    print(HEADER)
    bench(walks, args, np.sum)


def main() -> None:
    cuda = torch.cuda.is_available()
    names = ["nvidia", "reference", "scan", *["triton"] * cuda]
    choices = [name + precision for precision in ("", "+tf32", "+bf16") for name in names]
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--batch_sizes", type=positive, nargs="+", default=[16, 32, 64, 98], metavar="B")
    add("--frames", type=positive, nargs="+", default=[200, 400, 800], metavar="T")
    add("--implementations", nargs="+", choices=choices, default=names, metavar="NAME")
    add("--nvidia", default="", metavar="DIR", help="a clone of github.com/NVIDIA/tacotron2")
    add("--rounds", type=positive, default=20 if cuda else 3, help="timed steps (%(default)s)")
    add("--no_onednn", action="store_true", help="switch oneDNN off, for all of them")
    add("--hparams", default="", metavar="NAME=VALUE,...", help="settings of the model")
    add("--epoch", action="store_true", help="time an epoch of LJSpeech")
    add("--train_size", type=positive, metavar="N", help="number of clips (default: all)")
    add(
        "--batches",
        type=positive,
        metavar="N",
        help="time only N batches, of all sizes (default: all)",
    )
    args = parser.parse_args()
    if (args.train_size or args.batches) and not args.epoch:
        raise UserError("--train_size and --batches go with --epoch; add it, or leave them out")
    if args.nvidia and not Path(args.nvidia, "model.py").is_file():
        raise UserError(f"--nvidia {args.nvidia}: has no model.py; clone NVIDIA/tacotron2 there")
    if compared := {"decoder", "precision"} & parse_overrides(args.hparams).keys():
        raise UserError(f"--hparams: {min(compared)} follows --implementations; leave it out")
    for name in args.implementations:
        choose_device(settings(name, args.hparams))  # refuses what cannot run here
    device = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device}; PyTorch {torch.__version__}; {args.rounds} rounds")
    benchmark = bench_epoch if args.epoch else bench_shapes
    benchmark(args)


if __name__ == "__main__":
    exit_on_user_error(main)
