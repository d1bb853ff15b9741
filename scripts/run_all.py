"""Train the paper's ten experiments one after another, then make its tables and figures.

    bash scripts/run_all.sh                                    # LJSpeech, or a demo corpus
    bash scripts/run_all.sh --only "RAND SSB-DBS-BR" --seeds "0 1000 2000" --epochs 40

Each run is a plain call of train.py, which is printed, in the folder OUTPUT/EXPERIMENT/seedN. Run
this again to continue: it skips finished runs and resumes the others. The conditions are the
paper's (Sec. 6). So are BKT's and ATS's parameters (Sec. 3): the largest that pad no more than SSB.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until main() runs, Ctrl-C ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import itertools
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import clips
import data_utils
from batching import BatchStatistics, batch_statistics
from checkpoint import load_newest
from cli import ArgumentParser, UserError, exit_on_user_error
from clips import Clip
from device import choose_device
from files import locked, require_space
from hparams import HParams, create_hparams, parse_overrides
from mel_cache import MelCache
from model import Tacotron2
from scripts.lengths import EXAMPLE_CLIPS
from scripts.paper import BATCHING, EXPERIMENTS, PARAMETERS, experiment_name, experiment_settings
from scripts.prepare_ljspeech import read_corpus, split, write_filelist
from scripts.runs import CHOICE, difference, load_settings, read_metrics


def from_here(path: Path) -> Path:
    """An absolute path, made relative if it is in the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


ROOT = Path(__file__).resolve().parent.parent
LJSPEECH = from_here(ROOT / "data/LJSpeech-1.1")
LJSPEECH_CLIPS = 13_100
# Settings that have an option here, and so may not be in --hparams.
OPTIONS = dict.fromkeys(BATCHING, "--only") | {
    "seed": "--seeds",
    "epochs": "--epochs",
    "training_files": "--train",
    "validation_files": "--val",
}


class Job(NamedTuple):
    """One run of the series."""

    experiment: str
    seed: int
    folder: Path
    overrides: str  # for --hparams
    hparams: HParams
    batches: BatchStatistics  # of the first epoch
    done: int  # epochs in its newest checkpoint


# Arguments


def names(text: str) -> list[str]:
    return text.replace(",", " ").split()


def whole_numbers(text: str) -> list[int]:
    return [int(name) for name in names(text)]


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(
        prog="run_all.sh",
        description="Train the paper's ten experiments one after another, then make its tables and "
        "figures. Run it again to continue: it skips finished runs and resumes the others.",
        epilog=f"Without --corpus or --train and --val it uses {LJSPEECH} if that exists, or makes "
        "a corpus with espeak-ng.",
    )
    add = parser.add_argument
    add("--corpus", type=Path, metavar="DIR", help="corpus in LJSpeech's layout, split 80:20")
    add("--train", metavar="LIST", help="instead of it, a filelist to train on")
    add("--val", metavar="LIST", help="and one to validate on")
    output = from_here(ROOT / "runs/table2")
    add("--output", type=Path, default=output, metavar="DIR", help="(default: %(default)s)")
    add("--epochs", type=int, default=HParams.epochs, help="of each run (default: %(default)s)")
    add(
        "--seeds", type=whole_numbers, default="0",
        help='one run per seed, as in "0 1000 2000"; epoch e is planned from seed + e, so keep '
        "seeds further apart than the number of epochs (default: %(default)s)",
    )  # fmt: skip
    everything = " ".join(EXPERIMENTS)
    add("--only", type=names, default=everything, metavar="NAMES", help="(default: %(default)s)")
    add("--limit", type=int, metavar="N", help="use N clips, chosen at random")
    add("--hparams", default="", metavar="NAME=VALUE,...", help="settings to change in all runs")
    add("--preset", default="paper", help="preset of the settings (default: %(default)s)")
    args = parser.parse_args()

    given = parse_overrides(args.hparams)
    create_hparams(args.hparams, args.preset)
    HParams(epochs=args.epochs)
    for name in args.only:
        if name not in EXPERIMENTS:
            raise UserError(f"--only {name}: no such experiment; use {', '.join(EXPERIMENTS)}")
    for seed in args.seeds:
        HParams(seed=seed)
    for option, values in (("only", args.only), ("seeds", args.seeds)):
        if not values or len(set(values)) < len(values):
            text = " ".join(map(str, values))
            raise UserError(f"--{option} '{text}': give at least one, and each only once")
    if (args.train is None) != (args.val is None):
        raise UserError("--train and --val: give both, or a --corpus to split")
    if args.train and args.corpus:
        raise UserError(f"--corpus {args.corpus}: give it or --train and --val, not both")
    if args.limit is not None and args.limit < 10:
        raise UserError(f"--limit {args.limit}: use 10 clips or more")
    for name, option in OPTIONS.items():
        if name in given:
            raise UserError(f"--hparams: {name} is set by run_all.sh; use {option}")
    if "data_dir" in given and not args.train:
        raise UserError("--hparams: data_dir goes with --train and --val; use --corpus")
    args.output = from_here(args.output.resolve())  # the same name, however it is given
    if set("+'\"") & set(str(args.output)):
        raise UserError(f"--output {args.output}: has a + or a quote in it; use another name")

    if "mel_cache_dir" not in given and Path.cwd() != ROOT:
        args.hparams += f",mel_cache_dir={quote(ROOT / HParams.mel_cache_dir)}"
    seeds = sorted(args.seeds)
    if any(b - a < args.epochs for a, b in itertools.pairwise(seeds)):
        print(
            f"note: --seeds {' '.join(map(str, seeds))} are closer than {args.epochs} epochs: "
            "epoch e is planned from seed + e, so these runs share plans; 0 1000 2000 do not"
        )
    return args


# What to train


def choose_data(args: argparse.Namespace, hparams: HParams) -> HParams:
    """``hparams`` with the names of the data. The filelists are written into the output folder, so
    that all runs there train on the same clips."""
    if args.train:
        data_dir = hparams.data_dir
        lists = {"train": read_lines(args.train), "val": read_lines(args.val)}
    else:
        data_dir = args.corpus or (LJSPEECH if LJSPEECH.exists() else make_corpus(args.limit))
        train, val = split(read_corpus(data_dir, hparams), 0.8, seed=0)
        lists = {"train": train, "val": val}
    total = sum(map(len, lists.values()))
    if args.limit is not None:
        if args.limit > total:
            raise UserError(f"--limit {args.limit}: there are {total} clips; use at most that")
        lists = {name: choose(lines, args.limit / total) for name, lines in lists.items()}
    started = any(args.output.glob("*/*/hparams.json"))
    paths = {name: args.output / "filelists" / f"{name}.txt" for name in lists}
    for name, path in paths.items():
        if not started:
            write_filelist(path, lists[name])
        elif not path.exists() or read_lines(str(path)) != lists[name]:
            raise UserError(f"{path}: lists other clips than these; give another --output")
    return dataclasses.replace(
        hparams,
        data_dir=str(data_dir),
        training_files=str(paths["train"]),
        validation_files=str(paths["val"]),
    )


def make_corpus(limit: int | None) -> Path:
    """Speech synthesised by espeak-ng, as many clips as asked for."""
    n_clips = LJSPEECH_CLIPS if limit is None else limit
    corpus = from_here(ROOT / f"data/demo{n_clips}")
    print(f"{LJSPEECH}: not there (prepare_ljspeech.py fetches it); using a demo corpus instead")
    if status := call("scripts/make_demo_corpus.py", corpus, "--clips", n_clips):
        sys.exit(status)  # it has said why
    return corpus


def read_lines(filelists: str) -> list[str]:
    """The lines of filelists joined with +."""
    lines = [line for path in filelists.split("+") for line in clips.read_lines(path.strip())]
    return [line.strip() for line in lines if line.strip()]


def choose(lines: list[str], fraction: float) -> list[str]:
    """A random part of the lines, always the same, in their order."""
    n = max(round(len(lines) * fraction), 1)
    return [lines[i] for i in sorted(np.random.default_rng(0).permutation(len(lines))[:n])]


def select_parameters(args: argparse.Namespace, base: HParams, lengths: list[int]) -> HParams:
    """``base`` with the bucket_size and n_bins that pad like SSB (Sec. 3), unless --hparams gives
    them."""
    given = parse_overrides(args.hparams)
    for strategy in ("BKT", "ATS"):
        name = PARAMETERS[strategy]
        if name in given or (strategy == "BKT" and base.bucket_edges != "size"):
            continue
        try:
            value = data_utils.like_ssb(lengths, base, strategy)
            base = dataclasses.replace(base, **{name: value})
        except ValueError as error:
            if any(experiment.startswith(strategy) for experiment in args.only):
                raise UserError(
                    f"{strategy} cannot pad like SSB with these {len(lengths)} clips ({error}); "
                    f"give {name} in --hparams, or leave {strategy}-BR out of --only"
                ) from None
    return base


def make_jobs(args: argparse.Namespace, base: HParams, train: list[Clip]) -> list[Job]:
    """Every run, seed by seed."""
    lengths = [clip.n_frames for clip in train]
    jobs = []
    for seed, name in itertools.product(args.seeds, args.only):
        batching = experiment_settings(name)
        settings = parse_overrides(args.hparams) | batching | {"epochs": args.epochs, "seed": seed}
        if not batching["dynamic_batch_size"]:  # only DBS has a capacity
            settings.pop("batch_capacity", None)
            settings.pop("batch_capacity_seconds", None)
        copied = ["data_dir", "training_files", "validation_files"]
        if batching["batching_strategy"] in PARAMETERS:
            copied.append(PARAMETERS[batching["batching_strategy"]])
        settings |= {setting: getattr(base, setting) for setting in copied}
        overrides = ",".join(f"{key}={quote(value)}" for key, value in settings.items())
        hparams = create_hparams(overrides, args.preset)
        batches = batch_statistics(lengths, data_utils.training_sampler(train, hparams).plan)
        folder = args.output / name / f"seed{seed}"
        jobs.append(Job(name, seed, folder, overrides, hparams, batches, epochs_done(folder)))
    return jobs


def epochs_done(folder: Path) -> int:
    """Epochs in a run's newest checkpoint; 0 without one."""
    try:
        return load_newest(folder)[1]["progress"]["epoch"]
    except (UserError, KeyError):
        return 0  # none, or all damaged: train.py will say so, and the other runs go on


def quote(value: object) -> str:
    """A value as --hparams reads it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(quote, value))}]"
    text = str(value)
    return repr(text) if any(character in text for character in ",'\"[]() ") else text


def refuse_other_settings(output: Path, jobs: list[Job]) -> None:
    """Raise :class:`UserError` if ``output`` holds runs that the tables could not compare."""
    for file in sorted(output.glob("*/*/hparams.json")):
        saved = load_settings(file.parent)
        for job in jobs:
            settings = dataclasses.asdict(job.hparams)
            may_differ = {"seed"}
            if job.experiment != experiment_name(saved):
                may_differ |= CHOICE
            if name := difference(saved, settings, may_differ):
                raise UserError(
                    f"{file.parent}: has {name}={saved[name]}, and this call "
                    f"{name}={settings[name]}; give the same settings, or another --output"
                )


# How much is left


def announce(jobs: list[Job], train: list[Clip], val: list[Clip]) -> None:
    """Print each run's batches, and the work, disk space and, if known, time that are left.

    Raises:
        UserError: the disk is too full, or a setting needs a GPU and there is none.
    """
    hparams, output = jobs[0].hparams, jobs[0].folder.parents[1]
    choose_device(hparams)
    with torch.device("meta"):  # shapes without values
        n_parameters = sum(p.numel() for p in Tacotron2(hparams).parameters())
    # Float32 weights and Adam's two moments. A new run will keep the newest checkpoints and the
    # best; one more is being written.
    n_new = sum(job.done == 0 for job in jobs)
    n_bytes = 12 * n_parameters * ((hparams.keep_checkpoints + 1) * n_new + 1)
    if hparams.cache_mels:
        missing = MelCache(hparams).missing([*train, *val])
        n_bytes += 4 * hparams.n_mel_channels * sum(clip.n_frames for clip in missing)
    steps_left = 0
    print("\nexperiment     seed    epochs  batches  ZPR %     ABL  decoder steps/epoch")
    for job in jobs:
        batches, epochs_left = job.batches, hparams.epochs - job.done
        steps_left += epochs_left * batches.total_length
        # Logs: about 500 bytes per batch, and 200 KB per validation.
        n_bytes += epochs_left * (500 * batches.n_batches + 2e5 / hparams.epochs_per_validation)
        print(
            f"{job.experiment:<12} {job.seed:>6} {job.done:>4}/{hparams.epochs:<4} "
            f"{batches.n_batches:>8,} {100 * batches.zpr:>6.2f} {batches.abl:>7.1f} "
            f"{batches.total_length:>20,}"
        )
    free = shutil.disk_usage(output).free
    print(
        f"\n{len(train):,} training and {len(val):,} validation clips\n"
        f"{n_parameters:,} parameters\n"
        f"{steps_left:,} decoder steps to go (each batch takes as many as its longest clip)\n"
        f"{n_bytes / 1e9:.1f} GB of disk needed, {free / 1e9:.0f} GB free\n"
        f"{time_left(jobs) or 'the time left will be known after the first epoch'}"
    )
    require_space(output, n_bytes, "give another --output, or train fewer runs with --only")


def time_left(jobs: list[Job]) -> str:
    """The training time left, if a decoder step takes as long as in the epochs finished so far; ""
    before the first one."""
    minutes, steps, steps_left = 0.0, 0, 0
    for job in jobs:
        epochs = []
        with suppress(UserError):  # it has not begun, or its records are damaged
            epochs = [
                record
                for record in read_metrics(job.folder / "metrics.jsonl")
                if record["event"] == "epoch" and "total_length" in record  # old versions lack it
            ]
        minutes += sum(epoch["minutes"] for epoch in epochs)
        steps += sum(epoch["total_length"] for epoch in epochs)
        steps_left += (job.hparams.epochs - len(epochs)) * job.batches.total_length
    if not steps:
        return ""
    left = timedelta(seconds=round(60 * minutes / steps * steps_left))
    return f"about {left} (h:mm:ss) of training left"


# The series


def call(program: str, *arguments: object, while_running: Callable = lambda: None) -> int:
    """Run a program of this repository, which ends when this one does; its exit status."""
    command = [str(from_here(ROOT / program)), *map(str, arguments)]
    print(f"\npython {shlex.join(command)}", flush=True)
    # In a session of its own, so that Ctrl-C reaches this program alone, which then ends it.
    process = subprocess.Popen([sys.executable, *command], start_new_session=True)
    try:
        while True:
            try:
                return process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                while_running()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def prepare(args: argparse.Namespace) -> tuple[list[Job], list[str]]:
    """The runs, and the arguments of plot_batching.py. Whatever can be refused is refused here."""
    for lock in sorted(args.output.glob("*/*/lock")):
        with locked(lock.parent, wait=True):  # by a train.py whose run_all.py was killed
            pass
    base = choose_data(args, create_hparams(args.hparams, args.preset))
    train, val = data_utils.load_data(base)
    base = select_parameters(args, base, [clip.n_frames for clip in train])
    jobs = make_jobs(args, base, train)
    refuse_other_settings(args.output, jobs)
    most = max(job.done for job in jobs)
    if most > args.epochs:
        raise UserError(
            f"--epochs {args.epochs}: {args.output} has a run of {most}; give at least that, or "
            "another --output"
        )
    if any(job.done < args.epochs for job in jobs):
        announce(jobs, train, val)
    options = {"output_dir": args.output / "figures", "filelist": base.training_files}
    for name in ("data_dir", "hop_length", "batch_size", "lrf", "bucket_size", "n_bins"):
        options[name] = getattr(base, name)
    plots = ["--paper", *(f"--{name}={value}" for name, value in options.items())]
    return jobs, plots if len(train) >= EXAMPLE_CLIPS else []


def train_all(jobs: list[Job], preset: str) -> list[str]:
    """Train every run that is not finished; returns what failed."""
    failed = []
    printed = time_left(jobs)

    def print_time_left() -> None:
        nonlocal printed
        if not printed and (printed := time_left(jobs)):
            print(f"\n{printed}", flush=True)

    for i, job in enumerate(jobs, start=1):
        title = f"[{i}/{len(jobs)}] {job.experiment}, seed {job.seed}"
        if job.done == job.hparams.epochs:
            print(f"{title}: finished, {job.done} epochs")
            continue
        options = ["-o", job.folder, "--resume", "--preset", preset, "--hparams", job.overrides]
        started = time.perf_counter()
        try:
            status = call("train.py", *options, while_running=print_time_left)
            if status in (130, 143):  # it was told to stop
                sys.exit(status)
        except (KeyboardInterrupt, SystemExit):
            print(f"{title}: stopped; run the same command again to continue", flush=True)
            raise
        if status:
            failed.append(f"{title}: FAILED with status {status}")
            print(f"{failed[-1]}; continuing with the others", flush=True)
        else:
            minutes = (time.perf_counter() - started) / 60
            print(f"{title}: done in {minutes:.1f} minutes; {time_left(jobs)}", flush=True)
    return failed


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that call() ends its process
    filelists = args.output / "filelists"
    with locked(args.output, "give another --output", wait=True):
        new = not filelists.exists()
        try:
            jobs, plots = prepare(args)
        except BaseException:
            if new:
                shutil.rmtree(filelists, ignore_errors=True)
            (args.output / "lock").unlink(missing_ok=True)
            raise
        failed = train_all(jobs, args.preset)
        programs = {"plot_batching": plots, "tables": [args.output], "figures": [args.output]}
        for name, arguments in programs.items():
            if arguments and (status := call(f"scripts/{name}.py", *arguments)):
                failed.append(f"{name}.py: FAILED with status {status}")
    for failure in failed:
        print(f"{failure}, see above", file=sys.stderr)
    if failed:
        print("run the same command again to retry", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    exit_on_user_error(main)
