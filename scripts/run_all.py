"""Train the paper's ten experiments one after another, then write its tables and figures.

    bash scripts/run_all.sh                                    # LJSpeech, or the demo corpus
    bash scripts/run_all.sh --only "RAND SSB-DBS-BR" --seeds "0 1000 2000" --epochs 40

Each experiment is a plain call of train.py, which is printed. OUTPUT/EXPERIMENT/seedN is its
folder. Called again, finished runs are skipped and a broken one goes on. The conditions are the
paper's (Sec. 6), and so is the way that BKT's and ATS's parameters are chosen (Sec. 3): the
largest whose padding does not exceed SSB's.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C while modules are imported ends it without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import fcntl
import itertools
import math
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import clips
import data_utils
from batching import batch_statistics
from checkpoint import load_newest
from cli import ArgumentParser, UserError, exit_on_user_error, uninterrupted
from data_utils import Clip, collate, load_data
from device import choose_device, is_out_of_memory, synchronize, use_large_pages
from files import making
from hparams import HParams, create_hparams, parse_overrides
from loss_function import Tacotron2Loss
from model import Tacotron2
from scripts.paper import EXPERIMENTS, PARAMETERS, experiment_name, experiment_settings
from scripts.plot_batching import EXAMPLE_CLIPS
from scripts.prepare_ljspeech import read_corpus, split, write_filelist
from scripts.runs import CHOICE, difference, load_settings


def from_here(path: Path) -> Path:
    """An absolute path, made relative if the current folder holds it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


ROOT = Path(__file__).resolve().parent.parent
LJSPEECH = from_here(ROOT / "data/LJSpeech-1.1")
LJSPEECH_CLIPS = 13_100
# What the series itself decides, and --hparams may not.
OPTIONS = {
    "batching_strategy": "--only", "dynamic_batch_size": "--only", "batch_randomization": "--only",
    "seed": "--seeds", "epochs": "--epochs", "training_files": "--train",
    "validation_files": "--val",
}  # fmt: skip


class Job(NamedTuple):
    """One training of the series."""

    experiment: str
    seed: int
    folder: Path
    overrides: str  # of --hparams
    hparams: HParams


# What to train


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(
        prog="run_all.sh",
        description="Train the paper's ten experiments one after another, then write its tables "
        "and figures. Called again, it skips finished runs and goes on with a broken one.",
        epilog=f"Without --corpus or lists: {LJSPEECH} if it is there, else a corpus that "
        "espeak-ng speaks.",
    )
    add = parser.add_argument
    add("--corpus", type=Path, metavar="DIR", help="a corpus in LJSpeech's layout, split 80:20")
    add("--train", metavar="LIST", help="in its place, a filelist to train on ...")
    add("--val", metavar="LIST", help="... and one to validate on")
    output = from_here(ROOT / "runs/table2")
    add("--output", type=Path, default=output, metavar="DIR", help="(%(default)s)")
    add("--epochs", type=int, default=HParams.epochs, help="of each run (%(default)s)")
    add(
        "--seeds",
        default="0",
        help='of the runs, such as "0 1000 2000": each plans its epochs from seed + epoch, so '
        "keep them further apart than there are epochs (%(default)s)",
    )
    add("--only", default=" ".join(EXPERIMENTS), metavar="NAMES", help="(%(default)s)")
    add("--limit", type=int, metavar="N", help="use N clips, chosen at random")
    add("--hparams", default="", metavar="NAME=VALUE,...", help="settings to change in all runs")
    add("--preset", default="paper", help="of the settings (%(default)s)")
    args = parser.parse_args()
    args.only = args.only.replace(",", " ").split()
    try:
        args.seeds = [int(seed) for seed in args.seeds.replace(",", " ").split()]
    except ValueError:
        raise UserError(f"--seeds {args.seeds}: use whole numbers with blanks between") from None
    HParams(epochs=args.epochs)
    for seed in args.seeds:
        HParams(seed=seed)
    for name in args.only:
        if name not in EXPERIMENTS:
            raise UserError(f"--only {name}: no such experiment; use {', '.join(EXPERIMENTS)}")
    for option, values in (("only", args.only), ("seeds", args.seeds)):
        if not values or len(set(values)) < len(values):
            given = " ".join(map(str, values))
            raise UserError(f"--{option} '{given}': name one or more, each once")
    spread = sorted(args.seeds)
    if any(b - a < args.epochs for a, b in itertools.pairwise(spread)):
        print(
            f"note: --seeds {' '.join(map(str, spread))} are closer than {args.epochs} epochs: "
            "epoch e is planned from "
            "seed + e, so that these runs share plans; 0 1000 2000 do not"
        )
    args.output = from_here(args.output.resolve())  # one name, however it is given
    if set("+'\"") & set(str(args.output)):
        raise UserError(f"--output {args.output}: has a + or a quote in it; use another name")
    if (args.train is None) != (args.val is None):
        raise UserError("--train and --val: give both, or a --corpus that is split")
    if args.train and args.corpus:
        raise UserError(f"--corpus {args.corpus}: give it or --train and --val, not both")
    if args.limit is not None and args.limit < 10:
        raise UserError(f"--limit {args.limit}: use 10 clips or more")
    create_hparams(args.hparams, args.preset)
    given = parse_overrides(args.hparams)
    for name, option in OPTIONS.items():
        if name in given:
            raise UserError(f"--hparams: {name} is for run_all.sh to set; use {option}")
    if "data_dir" in given and not args.train:
        raise UserError("--hparams: data_dir goes with --train and --val; use --corpus")
    if "mel_cache_dir" not in given and Path.cwd() != ROOT:
        args.hparams += f",mel_cache_dir={quote(ROOT / HParams.mel_cache_dir)}"
    return args


def choose_data(args: argparse.Namespace, hparams: HParams) -> dict[str, str]:
    """The settings that name the data. The lists are written into ``args.output``, so that it
    always trains on the same clips.
    """
    parts = {"train": args.train, "val": args.val}
    if args.train:
        data = {"data_dir": hparams.data_dir}
        lines = {part: read_lines(path) for part, path in parts.items()}
    else:
        corpus = args.corpus or (LJSPEECH if LJSPEECH.exists() else make_corpus(args.limit))
        clips = read_corpus(corpus, hparams)
        ids = split(list(clips), 0.8, seed=0)
        data = {"data_dir": str(corpus)}
        lines = {
            part: [f"wavs/{i}.wav|{clips[i]}" for i in of_part]
            for part, of_part in zip(parts, ids, strict=True)
        }
    there = sum(map(len, lines.values()))
    if args.limit is not None:
        if args.limit > there:
            raise UserError(f"--limit {args.limit}: there are {there} clips; use at most that")
        share = args.limit / there
        lines = {part: choose(of_part, share) for part, of_part in lines.items()}
    begun = any(args.output.glob("*/*/hparams.json"))
    for part, name in (("train", "training_files"), ("val", "validation_files")):
        path = args.output / "filelists" / f"{part}.txt"
        if begun and (not path.exists() or read_lines(str(path)) != lines[part]):
            raise UserError(f"{path}: lists other clips than these; give another --output")
        if not begun:
            write_filelist(path, lines[part])
        data[name] = str(path)
    return data


def make_corpus(limit: int | None) -> Path:
    """Speech by espeak-ng, as many clips as asked for; goes on where it was stopped."""
    n = LJSPEECH_CLIPS if limit is None else limit
    corpus = from_here(ROOT / f"data/demo{n}")
    print(f"{LJSPEECH}: not there (prepare_ljspeech.py fetches it); using a demo corpus instead")
    program = str(ROOT / "scripts/make_demo_corpus.py")
    command = [sys.executable, program, str(corpus), "--clips", str(n)]
    if status := subprocess.run(command, check=False).returncode:
        sys.exit(status)  # it has said why
    return corpus


def read_lines(filelists: str) -> list[str]:
    """The lines of filelists joined with +."""
    lines = [line for path in filelists.split("+") for line in clips.read_lines(path.strip())]
    return [line.strip() for line in lines if line.strip()]


def choose(lines: Sequence[str], share: float) -> list[str]:
    """A part of the lines, at random but always the same, in their order."""
    n = max(round(len(lines) * share), 1)
    return [lines[i] for i in sorted(np.random.default_rng(0).permutation(len(lines))[:n])]


def make_jobs(args: argparse.Namespace, data: dict[str, str], lengths: list[int]) -> list[Job]:
    """Every run, seed by seed."""
    given = parse_overrides(args.hparams)
    base = create_hparams(args.hparams, args.preset)
    parameters = select_parameters(lengths, base, args.only, given)
    jobs = []
    for seed in args.seeds:
        for name in args.only:
            batching = experiment_settings(name)
            strategy = batching["batching_strategy"]
            if strategy in parameters:
                batching[PARAMETERS[strategy]] = parameters[strategy]
            settings = {**given, **data, "epochs": args.epochs, "seed": seed, **batching}
            if not batching["dynamic_batch_size"]:  # whose batches have no capacity
                settings.pop("batch_capacity", None)
                settings.pop("batch_capacity_seconds", None)
            overrides = ",".join(f"{key}={quote(value)}" for key, value in settings.items())
            folder = args.output / name / f"seed{seed}"
            jobs.append(Job(name, seed, folder, overrides, create_hparams(overrides, args.preset)))
    return jobs


def quote(value: object) -> str:
    """A value as --hparams reads it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(quote, value))}]"
    text = str(value)
    return repr(text) if any(character in text for character in ",'\"[]() ") else text


def select_parameters(
    lengths: list[int], hparams: HParams, experiments: list[str], given: dict[str, object]
) -> dict[str, int]:
    """BKT's and ATS's parameter for SSB's ZPR (Sec. 3), unless ``given``."""
    strategies = {experiment_settings(name)["batching_strategy"] for name in experiments}
    wanted = [s for s in ("BKT", "ATS") if s in strategies and PARAMETERS[s] not in given]
    if hparams.bucket_edges != "size":
        wanted = [s for s in wanted if s != "BKT"]
    try:
        return {s: data_utils.like_ssb(lengths, hparams, s) for s in wanted}
    except ValueError as error:
        raise UserError(
            f"BKT and ATS cannot pad like SSB with these {len(lengths)} clips ({error}); give "
            "bucket_size and n_bins in --hparams, or leave BKT-BR and ATS-BR out of --only"
        ) from None


def refuse_other_settings(output: Path, jobs: list[Job]) -> None:
    """Raise :class:`UserError` if ``output`` holds runs that the tables could not compare."""
    for file in sorted(output.glob("*/*/hparams.json")):
        there = load_settings(file.parent)
        for job in jobs:
            same = job.experiment == experiment_name(there)
            here = dataclasses.asdict(job.hparams)
            if name := difference(there, here, {"seed"} if same else {"seed", *CHOICE}):
                raise UserError(
                    f"{file.parent}: has {name}={there[name]}, and this call {name}={here[name]}; "
                    "give the same settings, or another --output"
                )


def epochs_done(job: Job) -> int:
    """Epochs in the run's newest checkpoint; 0 without one."""
    try:
        return load_newest(job.folder)[1]["progress"]["epoch"]
    except (UserError, KeyError):
        return 0  # none, or all damaged: then train.py will say so, and the other runs go on


# How long it will take


NO_MEMORY = (
    "a batch of {} clips of {} frames does not fit the memory; set a smaller batch_size in "
    "--hparams"
)


class Cost(NamedTuple):
    """Seconds of a training step with B clips of T_out frames: a + b T_out + c B T_out."""

    coefficients: tuple[float, float, float]
    validation_share: float  # of a forward pass alone
    startup: float  # seconds until the first step: imports, and the model
    n_parameters: int
    device: str

    def of_batches(self, clips: Sequence[Clip], batches: Sequence[Sequence[int]]) -> float:
        shapes = [(len(batch), max(clips[i].n_frames for i in batch)) for batch in batches]
        terms = np.array([(1, T_out, B * T_out) for B, T_out in shapes]).sum(0)
        return float(terms @ self.coefficients)


def measure(hparams: HParams, B: int, T_in: int, T_out: int, begun: float) -> Cost:
    """Time a few training steps: the largest batch of the series, and two of half its length.

    ``begun`` is time.time() before the process that measures was started.
    """
    use_large_pages()
    device = choose_device(hparams)
    model = Tacotron2(hparams).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    loss_function = Tacotron2Loss(hparams.guided_attention_weight, hparams.guided_attention_sigma)

    def seconds(B: int, T_out: int, train: bool = True) -> float:
        clip = (torch.ones(T_in, dtype=torch.long), torch.zeros(T_out, hparams.n_mel_channels))
        batch = collate([clip] * B).to(device)
        model.train(train)
        times = []
        while len(times) < 3 and sum(times) < 10:  # the first warms up, unless it is long
            started = time.perf_counter()
            with torch.set_grad_enabled(train):
                loss = loss_function(model(batch), batch)
            if train:
                optimizer.zero_grad()
                loss.objective.backward()
                optimizer.step()
            synchronize(device)
            times.append(time.perf_counter() - started)
        return min(times)

    startup, half = time.time() - begun, max(T_out // 2, 1)
    try:
        shapes = [(B, T_out), (B, half), (2 * B, half)]
        times = [seconds(*shape) for shape in shapes]
        forward = seconds(B, T_out, train=False)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(NO_MEMORY.format(B, T_out)) from None
    terms = np.array([[1, T, B * T] for B, T in shapes], dtype=float)
    coefficients, _ = nnls(terms, np.array(times))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    n_parameters = sum(p.numel() for p in model.parameters())
    return Cost(tuple(coefficients), forward / times[0], startup, n_parameters, name)


def send_measure(sender: Connection, *args: Any) -> None:
    """:func:`measure`, in a process of its own: sends what it finds, or its UserError."""
    try:
        sender.send(measure(*args))
    except UserError as error:
        sender.send(error)


def announce(jobs: list[Job], done: list[int], train: list[Clip], val: list[Clip]) -> None:
    """Say what will run, how long it will take, and how much disk; refuse a full disk."""
    hparams, clips = jobs[0].hparams, [*train, *val]
    lengths = [clip.n_frames for clip in train]
    plans = [data_utils.training_sampler(train, job.hparams).plan for job in jobs]
    found = [batch_statistics(lengths, plan) for plan in plans]
    T_in, T_out = max(len(clip.ids) for clip in clips), max(clip.n_frames for clip in clips)
    B = max(hparams.batch_size, max(of_plan.max_padded_length for of_plan in found) // T_out)
    print(f"measuring: steps of {B} clips of {T_out} frames ...")
    # In another process, which gives back the GPU's memory, and leaves Ctrl-C to this one.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=send_measure, args=(sender, hparams, B, T_in, T_out, time.time()), daemon=True
    )
    with uninterrupted():  # it inherits this
        process.start()
    sender.close()
    try:
        cost = receiver.recv()
    except EOFError:  # it was killed, as Linux does where memory is short
        raise UserError(NO_MEMORY.format(B, T_out)) from None
    finally:
        process.kill()
    if isinstance(cost, UserError):
        raise cost

    val_batches = data_utils.validation_batches(val, hparams)
    of_validation = cost.validation_share * cost.of_batches(val, val_batches)
    print(f"\n{'experiment':<12} {'seed':>6} {'epochs':>9} {'batches':>8} {'steps':>9} "
          f"{'min/epoch':>10} {'hours':>7}")  # fmt: skip
    total = 0.0
    for job, n_done, plan, of_plan in zip(jobs, done, plans, found, strict=True):
        seconds, epochs = cost.of_batches(train, plan), job.hparams.epochs
        left = max(epochs - n_done, 0)
        hours = left * (seconds + of_validation / job.hparams.epochs_per_validation) / 3600
        hours += cost.startup / 3600 if left else 0
        total += hours
        print(
            f"{job.experiment:<12} {job.seed:>6} {n_done:>4}/{epochs:<4} {of_plan.n_batches:>8,} "
            f"{of_plan.total_length:>9,} {seconds / 60:>10.2f} {hours:>7.2f}"
        )
    frames = sum(clip.n_frames for clip in clips)
    checkpoint = 12 * cost.n_parameters  # bytes: weights, and Adam's two moments
    needed = ((hparams.keep_checkpoints + 1) * done.count(0) + 1) * checkpoint
    for n_done, of_plan in zip(done, found, strict=True):
        left = max(hparams.epochs - n_done, 0)
        needed += left * (500 * of_plan.n_batches + 2e5 / hparams.epochs_per_validation)  # logs
    if hparams.cache_mels:
        needed += 4 * frames * hparams.n_mel_channels
    free = shutil.disk_usage(jobs[0].folder.parents[1]).free
    print(
        f"\n{len(train):,} training and {len(val):,} validation clips, {cost.n_parameters:,} "
        f"parameters, {cost.device}, {hparams.precision}\n"
        f"about {duration(total)} to go, by the epochs' batches and the steps just timed; "
        f"{needed / 1e9:.1f} GB of disk ({free / 1e9:.0f} GB free)\n"
        "(steps: decoder steps an epoch, the sum of the batches' lengths)\n"
    )
    if free < needed:
        raise UserError(
            f"{jobs[0].folder.parents[1]}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed; "
            "free some, give another --output, or train fewer by --only"
        )


def duration(hours: float) -> str:
    if hours < 2:
        minutes = math.ceil(60 * hours)
        return f"{minutes} minute{'s' * (minutes != 1)}"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"


# The series


@contextmanager
def unless_refused(output: Path) -> Iterator[None]:
    """Make ``output``; a :class:`UserError` before any training leaves nothing new of it."""
    lists = output / "filelists"
    ours = lists / "train.txt", lists / "val.txt", lists, output / "lock"
    new = [path for path in ours if not path.exists()]
    with making(output):
        try:
            yield
        except UserError:
            if not any(output.glob("*/seed*")):
                for path in filter(Path.exists, new):
                    path.rmdir() if path.is_dir() else path.unlink()
            raise


@contextmanager
def locked(output: Path) -> Iterator[int]:
    """Hold ``output`` for this process and the train.py that it starts; wait while it is held.

    Yields the open file that holds it, for as long as one of them has it open.
    """
    lock = os.open(output / "lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 100, 0).decode()
            print(f"{output}: in use by process {holder}; waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.truncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield lock
    finally:
        os.close(lock)


def train(job: Job, preset: str, lock: int) -> int:
    """Call train.py, and see that it ends when this program does; its exit status."""
    command = [str(from_here(ROOT / "train.py")), "-o", str(job.folder), "--resume"]
    command += ["--preset", preset] * (preset != "paper") + ["--hparams", job.overrides]
    print(f"\npython {shlex.join(command)}", flush=True)
    # In a session of its own: Ctrl-C reaches this program alone, which then ends it.
    process = subprocess.Popen([sys.executable, *command], pass_fds=[lock], start_new_session=True)
    os.pwrite(lock, f"{os.getpid()} (run_all.sh) and {process.pid} (train.py)".encode(), 0)
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that train() ends its process
    with unless_refused(args.output), locked(args.output) as lock:
        failed = run_series(args, lock)
        for program in ("tables.py", "figures.py"):
            print(flush=True)
            command = [sys.executable, str(ROOT / "scripts" / program), str(args.output)]
            if status := subprocess.run(command, check=False).returncode:
                failed.append((program, status))
    for title, status in failed:
        print(f"{title}: FAILED with status {status}, see above", file=sys.stderr)
    if failed:
        print("the same command tries again", file=sys.stderr)
        sys.exit(1)


def run_series(args: argparse.Namespace, lock: int) -> list[tuple[str, int]]:
    """Train what is not finished yet; returns the runs that failed and their exit status."""
    base = create_hparams(args.hparams, args.preset)
    data = choose_data(args, base)
    clips = load_data(dataclasses.replace(base, **data))
    jobs = make_jobs(args, data, [clip.n_frames for clip in clips[0]])
    refuse_other_settings(args.output, jobs)
    done = [epochs_done(job) for job in jobs]
    if max(done) > args.epochs:
        raise UserError(
            f"--epochs {args.epochs}: {args.output} has a run of {max(done)}; give at least that, "
            "or another --output"
        )
    if any(n < job.hparams.epochs for n, job in zip(done, jobs, strict=True)):
        announce(jobs, done, *clips)
    failed = []
    for i, (job, n_done) in enumerate(zip(jobs, done, strict=True), start=1):
        title = f"[{i}/{len(jobs)}] {job.experiment}, seed {job.seed}"
        if n_done >= job.hparams.epochs:
            print(f"{title}: finished, {n_done} epochs")
            continue
        started = time.perf_counter()
        status = train(job, args.preset, lock)
        minutes = (time.perf_counter() - started) / 60
        if status in (130, 143):  # Ctrl-C here, or SIGTERM to train.py
            print(f"{title}: stopped; the same command goes on from here")
            sys.exit(status)
        if status:
            failed.append((title, status))
            print(f"{title}: FAILED with status {status}; going on with the others", flush=True)
        else:
            print(f"{title}: done in {minutes:.1f} minutes", flush=True)
    if len(clips[0]) >= EXAMPLE_CLIPS:
        print(flush=True)
        command = figures_1_to_3(args, jobs[0].hparams, [clip.n_frames for clip in clips[0]])
        status = subprocess.run(command, check=False).returncode
        failed += [("plot_batching.py", status)] if status else []
    return failed


def figures_1_to_3(args: argparse.Namespace, hparams: HParams, lengths: list[int]) -> list[str]:
    """The call of plot_batching.py that draws them for the training clips."""
    given = parse_overrides(args.hparams)
    selected = select_parameters(lengths, hparams, list(EXPERIMENTS), given)
    options = {name: getattr(hparams, name) for name in ("data_dir", "hop_length", "batch_size")}
    options |= {"lrf": hparams.lrf, "filelist": hparams.training_files}
    options |= {"bucket_size": selected.get("BKT", hparams.bucket_size)}
    options |= {"n_bins": selected.get("ATS", hparams.n_bins)}
    options |= {"output_dir": args.output / "figures"}
    command = [sys.executable, str(ROOT / "scripts/plot_batching.py"), "--paper"]
    return command + [f"--{name}={value}" for name, value in options.items()]


if __name__ == "__main__":
    exit_on_user_error(main)
