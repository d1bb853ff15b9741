"""Train the paper's ten experiments one after another, and print its tables.

    bash scripts/run_all.sh                                    # LJSpeech, or a demo corpus
    bash scripts/run_all.sh --only "RAND SSB-DBS-BR" --seeds "0 1000 2000" --epochs 40
    bash scripts/run_all.sh --hparams "data_dir=A,training_files=B,validation_files=C"
    bash scripts/run_all.sh --start runs/table2/RAND --output runs/common --epochs 260

Each run is a plain call of train.py, which is printed, in the folder OUTPUT/EXPERIMENT/seedN. Run
this again to continue: it skips finished runs and resumes the others. The conditions are the
paper's (Sec. 6). So are BKT's and ATS's parameters (Sec. 3): the largest that pad no more than SSB.
With --start, all runs of a seed continue from one checkpoint, and only batching tells them apart.
To compare the values of a setting, call this once for each, with another --output, and then
results.py with all the folders.
"""

import argparse
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
from batching import STRATEGIES, batch_statistics, plan_batches
from cli import UserError
from corpus.clips import padded_frames
from corpus.sets import load_data
from hparams import MAY_CHANGE, PRESETS, HParams, create_hparams, format_overrides, parse_overrides
from model import Tacotron2
from training.checkpoint import REMOVED_SETTINGS
from training.start import locked

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = list(pd.read_csv(ROOT / "scripts" / "paper_table2.csv").batching)
BATCHING = ("batching_strategy", "dynamic_batch_size", "batch_randomization")
SET_BY = dict.fromkeys(BATCHING, "--only") | {"seed": "--seeds", "epochs": "--epochs"}
LISTS = ("training_files", "validation_files")
PADDING_SETTINGS = {"BKT": "bucket_size", "ATS": "n_bins"}  # chosen to pad like SSB
CAPACITIES = ("batch_capacity", "batch_capacity_seconds")  # which only DBS reads
LJSPEECH = Path("data/LJSpeech-1.1")
DEMO_CLIPS = 13_100  # as many as LJSpeech has


class Run(NamedTuple):
    title: str
    folder: Path
    options: list[object]  # of train.py


def experiments(text: str) -> list[str]:
    """Parses an argument: names such as RAND, SSB-BR, SB-DBS or ATS-DBS-BR."""
    names = text.split()
    for name in names or [""]:
        strategy, *operations = name.split("-")
        is_known = strategy in STRATEGIES and operations in ([], ["DBS"], ["BR"], ["DBS", "BR"])
        if not is_known or (strategy == "RAND" and "BR" in operations):  # which is random already
            problem = f"'{text}': use some of {' '.join(EXPERIMENTS)}, or the like"
            raise argparse.ArgumentTypeError(problem)
    return list(dict.fromkeys(names))


def seeds(text: str) -> list[int]:
    """Parses an argument: seeds, separated by spaces."""
    return sorted({cli.seed(word) for word in text.split()} or {cli.seed("")})


def parse_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(prog="run_all.sh", description=__doc__.partition("\n")[0])
    # fmt: off
    add = parser.add_argument
    add("--corpus", type=Path, metavar="DIR", help="corpus to prepare and use (default: the data "
        f"in --hparams, or {LJSPEECH}, or if that is missing a corpus made with espeak-ng)")
    add("--start", type=Path, metavar="DIR", help="start each run from the newest checkpoint in "
        "DIR/seedN, with its data, settings and optimiser; --epochs counts its epochs too")
    add("--output", type=Path, default=Path("runs/table2"), help="folder (default: %(default)s)")
    add("--epochs", type=cli.positive,
        help=f"per run (default: {HParams.epochs}, or as many as hours in --hparams allow)")
    add("--seeds", type=seeds, default="0",
        help='one run per seed, as in "0 1000 2000"; epoch e is planned from seed + e, so keep '
        "seeds further apart than the number of epochs (default: %(default)s)")
    add("--only", type=experiments, default=EXPERIMENTS, metavar="NAMES",
        help="experiments to train, others too, such as RAND-DBS "
        f"(default: {' '.join(EXPERIMENTS)})")
    add("--hparams", action="append", default=[], metavar="NAME=VALUE,...",
        help="settings to change in all runs, filelists too, as for train.py")
    add("--preset", choices=PRESETS, help="settings preset (default: paper)")
    # fmt: on
    args = parser.parse_args()
    args.hparams = ",".join(args.hparams)
    overrides = parse_overrides(args.hparams)
    for name in SET_BY.keys() & overrides.keys():
        raise UserError(f"--hparams: {name} is set by {SET_BY[name]}; leave it out")
    args.hours = overrides.get("hours", 0.0)
    if args.hours and args.epochs:
        raise UserError(f"--epochs {args.epochs}: hours={args.hours:g} sets the end; leave one out")
    args.epochs = args.epochs or HParams.epochs
    args.has_data = bool({"data_dir", *LISTS} & overrides.keys())
    if args.corpus and args.has_data:
        fix = "leave data_dir and the filelists out of --hparams"
        raise UserError(f"--corpus {args.corpus}: makes its own lists; {fix}")
    if args.start and (args.corpus or args.preset):
        fix = "leave out --corpus and --preset"
        raise UserError(f"--start {args.start}: has data and settings of its own; {fix}")
    return args


# Data and settings


def prepare_data(args: argparse.Namespace) -> str:
    """Returns the overrides that name the data, after the programs that make it have run."""
    if args.start or args.has_data:
        return ""
    corpus = args.corpus
    if not corpus and LJSPEECH.exists():
        if not all(Path(getattr(HParams, name)).exists() for name in LISTS):
            call("scripts/prepare_ljspeech.py", "--data_dir", LJSPEECH.parent, must=True)
        return f"data_dir={LJSPEECH},"
    if not corpus:
        corpus = Path(f"data/demo{DEMO_CLIPS}")
        print(f"{LJSPEECH}: missing; see prepare_ljspeech.py. Using a demo corpus instead")
        call("scripts/make_demo_corpus.py", corpus, "--clips", DEMO_CLIPS, must=True)
    name = re.sub(r"\W", "_", corpus.resolve().name)
    call("scripts/prepare_corpus.py", corpus, "--name", name, must=True)
    lists = f"training_files=filelists/{name}_train.txt,validation_files=filelists/{name}_val.txt"
    return f"{format_overrides({'data_dir': str(corpus)})},{lists},"


def base_settings(args: argparse.Namespace, seed: int) -> HParams:
    """Returns what --start, --preset and --hparams say, with DBS, whose capacity they may set."""
    base = recorded_hparams(args.start / f"seed{seed}") if args.start else None
    return create_hparams(f"dynamic_batch_size=True,{args.hparams}", args.preset, base)


def recorded_hparams(folder: Path) -> HParams:
    """Returns the settings in a run's hparams.json, or raises :class:`UserError`."""
    file = folder / "hparams.json"
    if not file.exists():
        raise UserError(f"{folder}: holds no run; name the output of run_all.sh or train.py")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        settings = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in settings.items()
            if name not in REMOVED_SETTINGS
        }
        return HParams(**settings)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        problem = f"not the settings of a run of this version ({error})"
        raise UserError(f"{file}: {problem}; name another folder") from None


def parameters_like_ssb(args: argparse.Namespace, hparams: HParams) -> dict[str, dict[str, int]]:
    """Returns the settings of BKT and ATS that pad like SSB (Sec. 3), by strategy. Only strategies
    in --only whose setting is not in --hparams are included. On LJSpeech it returns none: the
    defaults are the paper's.

    Raises:
        UserError: there is no such setting.
    """
    used = {name.split("-")[0] for name in args.only}
    overrides = parse_overrides(args.hparams)
    needed = {
        strategy: name
        for strategy, name in PADDING_SETTINGS.items()
        if strategy in used and name not in overrides
    }
    if not needed or hparams.training_files == HParams.training_files:
        return {}
    lengths = [padded_frames(clip, hparams) for clip in load_data(hparams)[0]]
    ssb_zpr = mean_zpr(lengths, "SSB", hparams.batch_size, lrf=hparams.lrf)
    return {
        strategy: {name: largest_within(ssb_zpr, lengths, strategy, hparams.batch_size)}
        for strategy, name in needed.items()
    }


def largest_within(target_zpr: float, lengths: list[int], strategy: str, batch_size: int) -> int:
    """Returns the largest bucket size of BKT, a multiple of the batch size, or number of bins of
    ATS with which batches have no more padding than ``target_zpr``."""
    name = PADDING_SETTINGS[strategy]
    unit = batch_size if strategy == "BKT" else 1

    def zpr(n: int) -> float:
        return mean_zpr(lengths, strategy, batch_size, **{name: n * unit})

    # Padding grows with the setting: one bucket, or one batch in each bin, is RAND.
    low, high = 1, max(len(lengths) // batch_size, 1)
    if strategy == "BKT":
        high = -(-len(lengths) // batch_size)  # one bucket has all clips
    if not zpr(low) <= target_zpr <= zpr(high):
        fix = f"give {name} in --hparams, or leave {strategy} out of --only"
        problem = f"its ZPR is {zpr(low):.4f} to {zpr(high):.4f}, and SSB's {target_zpr:.4f}"
        raise UserError(f"{strategy} cannot pad like SSB here: {problem}; {fix}")
    while high - low > 1:
        middle = (low + high) // 2
        if zpr(middle) <= target_zpr:
            low = middle
        else:
            high = middle
    return low * unit


def mean_zpr(lengths: list[int], strategy: str, batch_size: int, **settings: float) -> float:
    """Returns the ZPR of batches of a fixed size, averaged over eight epochs."""
    zprs = []
    for epoch in range(8):
        batches = plan_batches(lengths, strategy, batch_size, False, epoch=epoch, **settings)
        zprs.append(batch_statistics(lengths, batches).zpr)
    return sum(zprs) / len(zprs)


def plan(args: argparse.Namespace) -> list[Run]:
    """Returns all runs, seed by seed. Raises :class:`UserError` if one has no checkpoint to start
    from."""
    parameters = parameters_like_ssb(args, base_settings(args, args.seeds[0]))
    runs = []
    for seed, name in itertools.product(args.seeds, args.only):
        strategy, *operations = name.split("-")
        settings = {
            "batching_strategy": strategy,
            "dynamic_batch_size": "DBS" in operations,
            "batch_randomization": "BR" in operations,
            **parameters.get(strategy, {}),
            "seed": seed,
        }
        if not args.hours:
            settings["epochs"] = args.epochs
        if "DBS" not in operations:
            hparams = base_settings(args, seed)
            settings |= {capacity: 0 for capacity in CAPACITIES if getattr(hparams, capacity)}
        folder = args.output / name / f"seed{seed}"
        options = ["-o", folder]
        written = [*folder.glob("checkpoint_*.pt"), *folder.glob("metrics.jsonl")]
        if args.start and not any(file.stat().st_size for file in written):  # else it has begun
            start = args.start / f"seed{seed}"
            if not (checkpoints := sorted(start.glob("checkpoint_[0-9]*.pt"))):
                raise UserError(f"{start}: holds no checkpoint to start from; train it first")
            options += ["-c", checkpoints[-1]]
        else:
            options += ["--resume"]
        if args.preset:
            options += ["--preset", args.preset]
        options += ["--hparams", f"{args.hparams},{format_overrides(settings)}".lstrip(",")]
        runs.append(Run(f"{name}, seed {seed}", folder, options))
    return runs


# Refusals


def refuse_other_settings(args: argparse.Namespace) -> None:
    """Raises :class:`UserError` if a run in the output, or a start, has other settings than the
    first of this call."""
    expected = base_settings(args, args.seeds[0])
    folders = sorted(file.parent for file in args.output.glob("*/seed*/hparams.json"))
    found = {folder: recorded_hparams(folder) for folder in folders}
    if args.start:
        found |= {args.start / f"seed{seed}": base_settings(args, seed) for seed in args.seeds}
    for folder, hparams in found.items():
        exempt = {*BATCHING, "seed", *MAY_CHANGE} - {*LISTS}
        exempt |= {*PADDING_SETTINGS.values()} - parse_overrides(args.hparams).keys()
        if not hparams.dynamic_batch_size:
            exempt |= {*CAPACITIES}
        for name, value in vars(expected).items():
            if name not in exempt and getattr(hparams, name) != value:
                values = f"has {name}={getattr(hparams, name)}, and this call {name}={value}"
                raise UserError(f"{folder}: {values}; give the same, or another --output")


def require_space(args: argparse.Namespace, runs: list[Run]) -> None:
    """Raises :class:`UserError` if the checkpoints of the runs to come do not fit on the disk."""
    hparams = base_settings(args, args.seeds[0])
    with torch.device("meta"):  # only counted
        n_parameters = sum(weight.numel() for weight in Tacotron2(hparams).parameters())
    # Float32 weights and Adam's two moments, in the newest, the best, and one being written.
    n_new = sum(not (run.folder / "hparams.json").exists() for run in runs)
    n_bytes = 12 * n_parameters * ((hparams.keep_checkpoints + 1) * n_new + 1)
    folders = args.output, *args.output.absolute().parents
    free = shutil.disk_usage(next(folder for folder in folders if folder.exists())).free
    gigabytes = f"{n_bytes / 1e9:.1f} GB"
    print(f"{cli.pluralize(len(runs), 'run')}; their checkpoints will need {gigabytes} of disk")
    if n_bytes > free:
        fix = "free some, give another --output, or train fewer runs with --only"
        raise UserError(f"{args.output}: {free / 1e9:.1f} GB are free, which is not enough; {fix}")


# Running


def call(program: str, *arguments: object, must: bool = False) -> int:
    """Runs a program of this repository, which ends when this one does; returns its exit status. If
    it ``must`` succeed, a failure ends this program too."""
    command = [str(ROOT / program), *map(str, arguments)]
    print(f"\npython {shlex.join(command)}", flush=True)
    # In a session of its own, so that Ctrl-C reaches this program alone, which then ends it. If
    # this program is killed, the other goes on, and keeps the lock, which it inherits.
    process = subprocess.Popen([sys.executable, *command], start_new_session=True, close_fds=False)
    try:
        status = process.wait()
    finally:
        if process.poll() is None:
            print("stopping; run the same command again to continue", flush=True)
            process.terminate()
            process.wait()
    if status and must:
        sys.exit(status)  # it has printed the reason
    return status


def finished(folder: Path, epochs: int, hours: float) -> bool:
    """Returns whether a run is complete: its records and its newest checkpoint reach ``epochs``, or
    the end that ``hours`` gave it. If all checkpoints were deleted to free space, the records
    decide."""
    file, last = folder / "metrics.jsonl", {"epoch": -1}
    end = {"epochs": math.inf if hours else epochs}
    for line in file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else ():
        if line.startswith('{"event": "epoch"'):
            last = json.loads(line)
        elif line.startswith('{"event": "end"') and json.loads(line)["hours"] == hours:
            end = json.loads(line)
    newest = max(folder.glob("checkpoint_[0-9]*.pt"), default=None)
    saved = newest is None or newest.name == f"checkpoint_{last.get('step', 0):08d}.pt"
    return last["epoch"] + 1 >= end["epochs"] and saved


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that call() ends its process
    with locked(args.output) as lock:
        os.set_inheritable(lock.fileno(), True)
        run_all(args)


def run_all(args: argparse.Namespace) -> None:
    """Trains the runs that are not finished, and prints the tables."""
    args.hparams = prepare_data(args) + args.hparams
    refuse_other_settings(args)
    runs, failed = plan(args), []
    require_space(args, runs)
    for i, run in enumerate(runs, start=1):
        title = f"[{i}/{len(runs)}] {run.title}"
        if finished(run.folder, args.epochs, args.hours):
            print(f"{title}: finished")
        elif status := call("train.py", *run.options):
            if not (run.folder / "hparams.json").exists():
                sys.exit(status)  # it did not start, and neither would the others
            failed.append(run.title)
            print(f"{title}: FAILED with status {status}; continuing with the others", flush=True)
        else:
            print(f"{title}: done", flush=True)
    if call("scripts/results.py", args.output, "--output", args.output):
        failed.append("results.py")
    if failed:
        fix = "once that is mended, run the same command again"
        sys.exit(f"FAILED: {'; '.join(failed)}: see above; {fix}")


if __name__ == "__main__":
    cli.exit_on_user_error(main)
