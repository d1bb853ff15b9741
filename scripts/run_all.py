"""Train the paper's ten experiments one after another, then make its tables and figures.

    bash scripts/run_all.sh                                    # LJSpeech, or a demo corpus
    bash scripts/run_all.sh --only "RAND SSB-DBS-BR" --seeds "0 1000 2000" --epochs 40
    bash scripts/run_all.sh --hparams "data_dir=A,training_files=B,validation_files=C"
    bash scripts/run_all.sh --start runs/table2/RAND --output runs/common --epochs 60
    bash scripts/run_all.sh --sweep "batch_size=4,8,16,32" --seeds "0 1000" --epochs 40

Each run is a plain call of train.py, which is printed, in the folder OUTPUT/EXPERIMENT/seedN. Run
this again to continue: it skips finished runs and resumes the others. The conditions are the
paper's (Sec. 6). So are BKT's and ATS's parameters (Sec. 3): the largest that pad no more than SSB.
With --start, all runs of a seed continue from one checkpoint, and only batching tells them apart.
With --sweep, each experiment is trained with every value of one setting, in the folders
OUTPUT/EXPERIMENT,NAME=VALUE/seedN, and one table and one figure compare them.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until main() runs, Ctrl-C ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import itertools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data_utils
from batching import BatchStatistics, batch_statistics
from cli import ArgumentParser, UserError, exit_on_user_error, positive
from corpus.clips import Clip, data_folders, numbered_lines
from files import locked, making, require_space
from hparams import AUDIO, MAY_CHANGE, PRESETS, HParams, format_overrides, parse_overrides
from model import Tacotron2
from scripts import prepare_ljspeech
from scripts.paper import (
    BATCHING,
    EXPERIMENTS,
    MORE_EXPERIMENTS,
    PARAMETERS,
    experiment_name,
    experiment_settings,
)
from scripts.prepare_corpus import read_corpus, split, write_filelist
from scripts.runs import difference, label, load_run, load_settings
from training.checkpoint import load_newest
from training.device import choose_device

ROOT = Path(os.path.relpath(Path(__file__).resolve().parent.parent))
LJSPEECH = ROOT / "data/LJSpeech-1.1"
RESERVED = {*BATCHING, "seed", "epochs"}  # set by other options than --hparams
DATA = {"data_dir", "training_files", "validation_files"}
NOT_SWEPT = RESERVED | MAY_CHANGE | {*AUDIO, "text_cleaners", "symbols"}  # losses would not compare
CAPACITIES = ("batch_capacity", "batch_capacity_seconds")
# Measured with the default settings and LJSpeech's clips: TensorBoard's files and metrics.jsonl.
STEP_BYTES = 455
SAMPLES_BYTES = 2.5e6  # pictures and sounds of a validation, of those that TensorBoard shows


class Job(NamedTuple):
    """One run of the series."""

    title: str
    folder: Path
    overrides: str  # for --hparams
    hparams: HParams
    batches: BatchStatistics  # of the first epoch
    start: Path | None  # the checkpoint to start from; None to start afresh or to resume
    first_epoch: int  # the number of epochs in the checkpoint of --start
    done: int  # epochs in its newest checkpoint, or first_epoch


def experiments(text: str) -> list[str]:
    names, known = text.split(), (*EXPERIMENTS, *MORE_EXPERIMENTS)
    if not names or set(names) - set(known):
        raise argparse.ArgumentTypeError(f"'{text}': use some of {' '.join(known)}")
    return list(dict.fromkeys(names))


def seeds(text: str) -> list[int]:
    values = sorted({int(word) for word in text.split()})
    HParams(seed=min(values))  # ValueError if it is negative, or there is none
    return values


def uses(experiment: str, name: str, settings: dict[str, Any]) -> bool:
    """Whether a setting has an effect on an experiment's batches."""
    strategy, dynamic = (experiment_settings(experiment)[key] for key in BATCHING[:2])
    if name in PARAMETERS.values():
        return PARAMETERS.get(strategy) == name
    if name == "batch_size":  # a capacity replaces the one that follows from it
        return not dynamic or not any(settings.get(capacity) for capacity in CAPACITIES)
    return dynamic or name not in CAPACITIES


def choose_sweep(args: argparse.Namespace) -> None:
    """Check --sweep, and choose the experiments if --only does not."""
    text, name = args.sweep[0], args.sweep[0].partition("=")[0]
    try:
        pairs = [parse_overrides(f"{name}={value}") for value in text[len(name) + 1 :].split(",")]
        name, values = next(iter(pairs[0])), [value for pair in pairs for value in pair.values()]
        checked = [HParams(**args.settings | pair) for pair in pairs if name not in NOT_SWEPT]
    except UserError as error:
        problem = str(error).removeprefix("--hparams: ")
        raise UserError(f"--sweep {text}: {problem}") from None
    used = [e for e in (*EXPERIMENTS, *MORE_EXPERIMENTS) if uses(e, name, args.settings)]
    strategy = next((s for s, parameter in PARAMETERS.items() if parameter == name), "SSB")
    args.only = args.only or [e for e in (f"{strategy}-BR", f"{strategy}-DBS-BR") if e in used]
    unused = [experiment for experiment in args.only if experiment not in used]
    skips = name in CAPACITIES and args.settings.get("on_bad_clip") == "skip"
    for refused, problem in (
        (args.sweep[1:], "is not the only --sweep; give one at a time"),
        (not checked, f"runs with another {name} do not compare; sweep batch_size or the like"),
        (name in parse_overrides(args.hparams), f"leave {name} out of --hparams"),
        (len(values) == 1, "has one value; give two or more, or set it by --hparams"),
        (len({*values}) < len(values), f"has {max(values, key=values.count)} twice; keep one"),
        (unused, f"has no effect on {' '.join(unused)}; --only may have {' '.join(used)}"),
        (skips, "on_bad_clip=skip would skip other clips for each value; use error"),
    ):
        if refused:
            raise UserError(f"--sweep {text}: {problem}")
    args.sweep, args.values = name, [{name: value} for value in values]
    args.settings[name] = min(values)  # every clip must fit the smallest capacity


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(prog="run_all.sh", description=__doc__.partition("\n")[0])
    # fmt: off
    add = parser.add_argument
    add("--corpus", metavar="DIR", help="corpus of one speaker, split 80:20 (default: the data in "
        f"--hparams, or {LJSPEECH}, or if that is missing a corpus made with espeak-ng)")
    add("--start", type=Path, metavar="DIR", help="start each run from the newest checkpoint in "
        "DIR/seedN, with its data, settings and optimiser; --epochs counts its epochs too")
    add("--output", type=Path,
        help=f"folder (default: {ROOT / 'runs/table2'}, or runs/sweep_NAME there with --sweep)")
    add("--epochs", type=positive, default=HParams.epochs, help="per run (default: %(default)s)")
    add("--seeds", type=seeds, default="0",
        help='one run per seed, as in "0 1000 2000"; epoch e is planned from seed + e, so keep '
        "seeds further apart than the number of epochs (default: %(default)s)")
    add("--only", type=experiments,
        help=f"experiments to train, also {' '.join(MORE_EXPERIMENTS)} (default: "
        f"{' '.join(EXPERIMENTS)}; with --sweep, one of fixed and one of dynamic batches)")
    add("--sweep", action="append", metavar="NAME=VALUE,...",
        help='train with each value of one setting, as in "batch_size=4,8,16,32"')
    add("--limit", type=positive, metavar="N", help="use at most N clips, chosen at random")
    add("--hparams", action="append", default=[], metavar="NAME=VALUE,...",
        help="settings to change in all runs, filelists too, as for train.py")
    add("--preset", choices=PRESETS, help="settings preset (default: paper)")
    # fmt: on
    args = parser.parse_args()
    args.hparams = ",".join(args.hparams)
    args.base, overrides = HParams(), parse_overrides(args.hparams)
    args.settings = {"mel_cache_dir": str(ROOT / "mel_cache")} | PRESETS[args.preset or "paper"]
    if args.start:
        if args.corpus or args.limit or args.preset:
            fix = "leave out --corpus, --limit and --preset"
            raise UserError(f"--start {args.start}: has data and settings of its own; {fix}")
        args.settings = load_settings(args.start / f"seed{args.seeds[0]}")
        args.base = HParams(**args.settings)
    args.settings |= overrides | {"dynamic_batch_size": True}  # each run has its own; DBS reads all
    args.values = [{}]
    if args.sweep:
        choose_sweep(args)
    args.only = args.only or list(EXPERIMENTS)
    args.output = args.output or ROOT / f"runs/{f'sweep_{args.sweep}' if args.sweep else 'table2'}"
    if clash := RESERVED & set(overrides):
        option = {"seed": "--seeds", "epochs": "--epochs"}.get(min(clash), "--only")
        raise UserError(f"--hparams: {min(clash)} is set by {option}; leave it out")
    args.has_lists = bool(args.start or DATA & set(overrides))
    if args.has_lists and args.corpus:
        fix = f"leave {min(DATA & set(overrides))} out of --hparams"
        raise UserError(f"--corpus {args.corpus}: makes its own lists; {fix}")
    if "+" in str(args.output):
        raise UserError(f"--output {args.output}: + joins filelists; use another name")
    if any(b - a < args.epochs for a, b in itertools.pairwise(args.seeds)):
        print(f"note: seeds less than {args.epochs} epochs apart share plans, made by seed + epoch")
    return args


def choose_data(args: argparse.Namespace) -> dict[str, str]:
    """The settings that name the data, with filelists in the output folder for all its runs."""
    hparams = HParams(**args.settings)
    if args.has_lists:
        given = hparams.training_files, hparams.validation_files
        folders = [data_folders(names, hparams) for names in given]
        if len({*folders[0], *folders[1]}) == 1:
            data_dir, folders = folders[0][0], ([], [])
        else:  # a run has one list of each set, whose paths then start with their folders
            data_dir = ""
        lists = [read_lines(*pair) for pair in zip(given, folders, strict=True)]
    else:
        data_dir = args.corpus or LJSPEECH
        if not args.corpus and not LJSPEECH.exists():
            print(f"{LJSPEECH}: missing; see prepare_ljspeech.py. Making a demo corpus instead")
            n_clips = args.limit or 13_100  # as many as LJSpeech has
            data_dir = ROOT / f"data/demo{n_clips}"
            if status := call("scripts/make_demo_corpus.py", data_dir, "--clips", n_clips):
                sys.exit(status)  # it has printed the reason
        clips = read_corpus(Path(data_dir), hparams)
        if data_dir == LJSPEECH:
            lists = prepare_ljspeech.split(clips, data_dir)
        else:
            lists = split(clips, data_dir, 0.8, seed=0)
    total = sum(map(len, lists)) or 1
    content = {}
    for file, lines in zip(filelists(args), lists, strict=True):
        n = max(round(len(lines) * args.limit / total), 1) if args.limit else len(lines)
        chosen = np.random.default_rng(0).permutation(len(lines))[:n]
        content[file] = [lines[i] for i in sorted(chosen)]
        if file.exists() and read_lines(str(file)) != content[file]:
            raise UserError(f"{file}: lists other clips than these; give another --output")
    for file, lines in content.items():
        if not file.exists():
            write_filelist(file, lines)
    train, val = map(str, content)
    return {"data_dir": str(data_dir), "training_files": train, "validation_files": val}


def filelists(args: argparse.Namespace) -> list[Path]:
    """The training and the validation list of all runs."""
    return [args.output / "filelists" / name for name in ("train.txt", "val.txt")]


def read_lines(names: str, folders: Sequence[str] = ()) -> list[str]:
    """The lines of filelists joined with +, each after its list's folder, if there are any."""
    lines = []
    for name, folder in itertools.zip_longest(names.split("+"), folders, fillvalue=""):
        numbered = numbered_lines(name.strip())
        lines += [os.path.join(folder, line.strip()) for _, line in numbered]
    return lines


def select_parameters(args: argparse.Namespace, lengths: list[int]) -> None:
    """Set the bucket_size and n_bins that pad like SSB (Sec. 3), unless --hparams gives them."""
    for strategy in ("BKT", "ATS"):
        name, base = PARAMETERS[strategy], HParams(**args.settings)
        try:
            if name not in parse_overrides(args.hparams):
                args.settings[name] = data_utils.like_ssb(lengths, base, strategy)
        except ValueError as error:
            if any(experiment.startswith(strategy) for experiment in args.only):
                fix = f"give {name} in --hparams, or leave {strategy} out of --only"
                raise UserError(f"{strategy} cannot pad like SSB here ({error}); {fix}") from None


def find_start(args: argparse.Namespace, seed: int) -> tuple[Path | None, int]:
    """The checkpoint that --start names for ``seed``, and its number of epochs."""
    if not args.start:
        return None, 0
    folder = args.start / f"seed{seed}"
    if key := difference(load_settings(folder), vars(args.base), {"seed"}):
        raise UserError(f"{folder}: has another {key} than seed{args.seeds[0]}; use equal runs")
    start, state = load_newest(folder)
    if start is None:
        raise UserError(f"{folder}: holds no checkpoint to start from; train it first")
    first_epoch = state["progress"]["epoch"]
    if first_epoch >= args.epochs:
        raise UserError(f"--epochs {args.epochs}: {start} has {first_epoch} already; give more")
    return start, first_epoch


def epochs_done(folder: Path) -> int | None:
    """The epochs that a run has done; None if it has not begun."""
    try:
        if state := load_newest(folder)[1]:
            return state["progress"]["epoch"]
        return load_run(folder).done or None  # its checkpoints were deleted, to free space
    except (UserError, KeyError):  # no run, or damaged checkpoints, which train.py reports
        return None


def make_jobs(args: argparse.Namespace, train: list[Clip]) -> list[Job]:
    """Every run, seed by seed; :class:`UserError` if the output has runs that do not fit them."""
    lengths = [clip.n_frames for clip in train]
    saved = sorted(path.parent for path in args.output.glob("*/*/hparams.json"))
    starts = {seed: find_start(args, seed) for seed in args.seeds}
    jobs = []
    for seed, value, name in itertools.product(args.seeds, args.values, args.only):
        settings = args.settings | experiment_settings(name) | {"epochs": args.epochs, "seed": seed}
        settings |= value
        name = label(name, args.sweep, settings)
        if not settings["dynamic_batch_size"]:  # only DBS has a capacity
            settings = {k: v for k, v in settings.items() if not k.startswith("batch_capacity")}
        folder, hparams = args.output / name / f"seed{seed}", HParams(**settings)
        start, first_epoch = starts[seed]
        done = epochs_done(folder)
        if done is None:
            done = first_epoch
        else:
            start = None
        if done > args.epochs:
            raise UserError(f"--epochs {args.epochs}: {folder} has {done}; give at least that")
        for other in saved:
            old, new = load_settings(other), vars(hparams)
            if args.sweep and other.parent.name != label(experiment_name(old), args.sweep, old):
                raise UserError(f"{other}: is not of this sweep; give another --output")
            if key := difference(old, new, {"seed", args.sweep, *BATCHING}):
                values = f"has {key}={old[key]}, and this call {key}={new[key]}"
                raise UserError(f"{other}: {values}; give the same, or another --output")
        batches = batch_statistics(lengths, data_utils.training_sampler(train, hparams).plan)
        base = vars(args.base)
        named = RESERVED | DATA | ({"n_symbols"} if hparams.symbols else set())
        changes = {k: v for k, v in vars(hparams).items() if v != base[k] or k in named}
        overrides, title = format_overrides(changes), f"{name}, seed {seed}"
        jobs.append(Job(title, folder, overrides, hparams, batches, start, first_epoch, done))
    return jobs


def announce(jobs: list[Job], train: list[Clip], val: list[Clip]) -> None:
    """Print each run's batches, and the work, disk space and, if known, time that are left."""
    hparams = jobs[0].hparams
    choose_device(hparams)
    with torch.device("meta"):  # only counted
        models = [Tacotron2(job.hparams) for job in jobs]
    n_parameters = max(sum(p.numel() for p in model.parameters()) for model in models)
    # Float32 weights and Adam's two moments. A new run will keep the newest checkpoints and the
    # best; one more is being written. train.py asks for the mels' space.
    n_new = sum(job.done == job.first_epoch for job in jobs)
    checkpoint, n_checkpoints = 12 * n_parameters, hparams.keep_checkpoints + 1
    logs = [log_bytes(job) for job in jobs]
    n_bytes = checkpoint * (n_checkpoints * n_new + 1) + sum(logs)
    steps_left = sum((hparams.epochs - job.done) * job.batches.total_length for job in jobs)
    width = max(23, *(len(job.title) for job in jobs))
    print(f"\n{'run':<{width}}  epochs  batches  ZPR %     ABL  decoder steps/epoch")
    for job in jobs:
        n_batches, zpr, _, abl, steps, *_ = job.batches
        progress = f"{job.title:<{width}} {job.done:>3}/{hparams.epochs:<3} {n_batches:>8,}"
        print(f"{progress} {100 * zpr:>6.2f} {abl:>7.1f} {steps:>20,}")
    print(
        f"\n{len(train):,} training and {len(val):,} validation clips\n"
        f"{n_parameters:,} parameters; checkpoints and logs take {n_bytes / 1e9:.1f} GB of disk, "
        f"up to {(checkpoint * n_checkpoints + max(logs)) / 1e9:.2f} GB a run\n"
        f"{steps_left:,} decoder steps to go (each batch takes as many as its longest clip)\n"
        f"{time_left(jobs) or 'the time left will be known after the first epoch'}"
    )
    require_space(jobs[0].folder, n_bytes, "give another --output, or train fewer runs with --only")


def log_bytes(job: Job) -> float:
    """The size of the logs that a run has still to write. TensorBoard shows the validations 1, 2,
    4, 8, ... and the last."""
    epochs_left = job.hparams.epochs - job.done
    n_shown = (job.hparams.epochs // job.hparams.epochs_per_validation).bit_length() + 1
    steps = STEP_BYTES * epochs_left * job.batches.n_batches
    return steps + SAMPLES_BYTES * n_shown if epochs_left else 0


def time_left(jobs: list[Job]) -> str:
    """The training time left, judging by the epochs finished so far; "" before the first one."""
    minutes = steps = steps_left = 0
    for job in jobs:
        epochs = []
        with suppress(UserError):  # it has not begun, or its records are damaged
            epochs = load_run(job.folder).epochs
        minutes += sum(epoch["minutes"] for epoch in epochs)
        steps += sum(epoch["total_length"] for epoch in epochs)
        epochs_left = job.hparams.epochs - job.first_epoch - len(epochs)
        steps_left += epochs_left * job.batches.total_length
    minutes *= steps_left / max(steps, 1)
    left = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{minutes:.0f} minutes"
    return f"about {left} of training left" if steps else ""


def call(program: str, *arguments: object, jobs: list[Job] | None = None) -> int:
    """Run a program of this repository, which ends when this one does; its exit status. Meanwhile
    print the time left of ``jobs``, once it is known."""
    command = [str(ROOT / program), *map(str, arguments)]
    print(f"\npython {shlex.join(command)}", flush=True)
    # In a session of its own, so that Ctrl-C reaches this program alone, which then ends it.
    process = subprocess.Popen([sys.executable, *command], start_new_session=True)
    try:
        if jobs and not time_left(jobs):
            while process.poll() is None and not time_left(jobs):
                time.sleep(1)
            print(f"\n{time_left(jobs)}", flush=True)
        return process.wait()
    finally:
        if process.poll() is None:
            print("stopping; run the same command again to continue", flush=True)
            process.terminate()
            process.wait()


def train_all(jobs: list[Job]) -> list[str]:
    """Train every run that is not finished; returns what failed."""
    failed = []
    for i, job in enumerate(jobs, start=1):
        title = f"[{i}/{len(jobs)}] {job.title}"
        if job.done == job.hparams.epochs:
            print(f"{title}: finished, {job.done} epochs")
            continue
        source = ["-c", job.start] if job.start else ["--resume"]
        options = ["-o", job.folder, *source, "--hparams", job.overrides]
        if status := call("train.py", *options, jobs=jobs):
            failed.append(job.title)
            print(f"{title}: FAILED with status {status}; continuing with the others", flush=True)
        else:
            print(f"{title}: done; {time_left(jobs)}", flush=True)
    return failed


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that call() ends its process
    files = filelists(args)
    with (
        locked(args.output, "give another --output", wait=True),
        making(files[0].parent, "give another --output"),
        ExitStack() as after_an_error,
    ):
        for file in files:
            if not file.exists():
                after_an_error.callback(file.unlink, missing_ok=True)
        for lock in sorted(args.output.glob("*/*/lock")):
            with locked(lock.parent, wait=True):  # by a train.py whose run_all.py was killed
                pass
        args.settings |= choose_data(args)
        train, val = data_utils.load_data(HParams(**args.settings))
        select_parameters(args, [clip.n_frames for clip in train])
        jobs = make_jobs(args, train)
        if any(job.done < args.epochs for job in jobs):
            announce(jobs, train, val)
        after_an_error.pop_all()  # whatever can be refused has been
        failed = train_all(jobs)
        series = [args.output, *([f"--sweep={args.sweep}"] if args.sweep else [])]
        reports = {"tables.py": series, "figures.py": series}
        if not args.sweep:
            lengths = args.output / "figures/lengths.txt"
            write_filelist(lengths, [f"{clip.n_frames}" for clip in train])
            names = ("batch_size", *PARAMETERS.values())
            plots = [f"--{name}={getattr(jobs[0].hparams, name)}" for name in names]
            plots += [f"--output_dir={lengths.parent}"]
            reports = {"plot_batching.py": [lengths, *plots]} | reports
        failed += [name for name in reports if call(f"scripts/{name}", *reports[name])]
    if failed:
        sys.exit(f"FAILED: {'; '.join(failed)}; see above, and run the same command again to retry")


if __name__ == "__main__":
    exit_on_user_error(main)
