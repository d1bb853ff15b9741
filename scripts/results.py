"""Compare runs of train.py, finished or not, and put the paper's experiments beside the paper.

    python scripts/results.py runs/demo
    python scripts/results.py runs/table2 --output runs/table2    # also figure4.png, and *.md

Takes all runs in the folders given. Those that differ in their seed alone are averaged: mean ±
standard error. Every other setting that differs is a column. If RAND is among the runs, and others
of the ten experiments of Ge et al. ("Speed up training with variable length inputs by efficient
batching strategies", Interspeech 2021), this prints the paper's Tables 2 to 4 too.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import STRATEGIES
from cli import ArgumentParser, UserError, exit_on_user_error, make_folder
from hparams import AUDIO, MAY_CHANGE, HParams

# The paper's Table 2. n_batches is from its Sec. 4. minutes: per epoch, on a GeForce GTX 1080. VL1,
# VL2, VL3: validation loss after 100, 160 and 220 epochs, smoothed; VLavg: its mean between the
# first and the last.
PAPER = pd.read_csv(Path(__file__).parent / "paper_table2.csv", index_col="batching")
STAGED = ["VL1", "VL2", "VL3", "VLavg"]
PAPER_EPOCHS, PAPER_STAGES = 220, (100, 160, 220)
# Quantities, our digits and the paper's.
TABLE2 = {"zpr": (2, 2), "abl": (1, 2), "minutes": (3, 2)} | dict.fromkeys(STAGED, (3, 3))
TABLE4 = [("SB", "SSB"), ("SB-BR", "SSB-BR"), ("SB-DBS", "SSB-DBS")]
TABLE4 += [("SB", "SB-BR"), ("SSB", "SSB-BR"), ("SSB-DBS", "SSB-DBS-BR")]
TABLE4 += [("SB", "SB-DBS"), ("SSB", "SSB-DBS"), ("SSB-BR", "SSB-DBS-BR")]

BATCHING = ["batching_strategy", "dynamic_batch_size", "batch_randomization"]
# Settings that are no column: those that name the batching, and those that a resume may change,
# but for the end of a run.
NO_COLUMN = {*BATCHING, "seed", *MAY_CHANGE} - {"epochs", "hours"}
CONDITIONS = ["device", "threads", "decoder", "precision", "torch"]  # that times depend on
CLIPS = ["training_frames", "validation_frames"]  # what it was trained and validated on
AVERAGED = ["zpr", "abl", "n_batches", "total_length"]  # over the epochs
VALIDATED = ["loss", "masked_loss", "diagonality"]
QUANTITIES = [*AVERAGED, "minutes", "seconds", *VALIDATED, *STAGED]
COLUMNS = {  # of the table of all runs: quantities and digits
    "ZPR %": ("zpr", 2),
    "ABL": ("abl", 1),
    "batches": ("n_batches", 1),
    "steps": ("total_length", 0),
    "validation loss": ("loss", 4),
    "masked": ("masked_loss", 4),
    "alignment": ("diagonality", 2),
    "s / epoch": ("seconds", 1),
}
MIN_VALIDATIONS = 4  # smoothing three or fewer would average all of them
TABLE2_NOTE = (
    "In parentheses the paper's. VL1, VL2 and VL3 are the validation losses after 100, 160 and 220 "
    "of its 220 epochs, here in proportion, averaged with their neighbours; VLavg is the mean from "
    f"the first to the last. They need {MIN_VALIDATIONS} validations or more."
)


class Run(NamedTuple):
    path: Path
    settings: dict[str, Any]
    epochs: pd.DataFrame  # by number, from 1: AVERAGED and minutes
    validations: pd.DataFrame  # by epoch: VALIDATED
    conditions: dict[str, str]  # CONDITIONS and CLIPS

    @property
    def name(self) -> str:
        """Returns the paper's name of its batching. RAND-BR is RAND, whose batches are random
        already."""
        strategy, dynamic, randomized = (self.settings[name] for name in BATCHING)
        name = strategy + "-DBS" * dynamic + "-BR" * randomized
        return "RAND" if name == "RAND-BR" else name

    def relevant_settings(self) -> dict[str, Any]:
        """Returns the settings that may be columns: those that its batching reads."""
        strategy, dynamic, _ = (self.settings[name] for name in BATCHING)
        unread = {name for other in STRATEGIES.values() for name in other.settings}
        unread -= {*STRATEGIES[strategy].settings}
        unread |= NO_COLUMN
        if not dynamic:
            unread |= {"batch_capacity", "batch_capacity_seconds"}
        if self.settings["hours"]:
            unread.add("epochs")
        return {name: value for name, value in self.settings.items() if name not in unread}


# Reading runs


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Reads all runs that are or lie in ``folders``."""
    files = []
    for folder in folders:
        files += (found := sorted(folder.rglob("hparams.json")))
        if not found:
            raise UserError(f"{folder}: holds no run; name the output of train.py or run_all.sh")
    return [read_run(file.parent) for file in dict.fromkeys(files)]


def read_run(folder: Path) -> Run:
    """Reads a run's settings and records, without a last line that is still being written."""
    file = folder / "hparams.json"
    start, starts, epochs, validations = {}, [], [], []
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if isinstance(value, list):
                settings[name] = str(value)
        required = {*BATCHING, *AUDIO, "seed", "epochs", "epochs_per_validation", "batch_size"}
        if missing := required - set(settings):
            raise ValueError(f"it has no {min(missing)}")
        defaults = vars(HParams()).items()
        later = {name: value for name, value in defaults if not isinstance(value, tuple)}
        settings = later | settings  # the defaults of settings that came after this run
        if settings["hours"]:
            settings["epochs"] = None  # until its end is recorded
        file = folder / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
        for record in map(json.loads, lines):
            if record["event"] == "start":
                start = record
            elif record["event"] == "end" and record["hours"] == settings["hours"]:
                settings["epochs"] = record["epochs"]
            elif record["event"] == "epoch":
                starts.append(start)  # a start counts if an epoch has ended since
                values = [record[name] for name in ("minutes", *AVERAGED)]
                epochs.append([record["epoch"] + 1, *values])
            elif record["event"] == "validation":
                validations.append([record["epoch"] + 1, *(record[name] for name in VALIDATED)])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fix = "name the output of a train.py of this version"
        raise UserError(f"{file}: cannot be read ({error!r}); {fix}") from None
    conditions = {
        name: " and ".join(dict.fromkeys(str(facts.get(name, "unknown")) for facts in starts))
        for name in (*CONDITIONS, *CLIPS)
    }
    epochs = pd.DataFrame(epochs, columns=["epoch", "minutes", *AVERAGED])
    validations = pd.DataFrame(validations, columns=["epoch", *VALIDATED])
    validations = validations.set_index("epoch").astype(float)
    return Run(folder, settings, epochs.set_index("epoch"), validations, conditions)


# The paper's validation losses


def stages(epochs: Sequence[int], start: int) -> list[int]:
    """Finds VL1, VL2 and VL3 in ``epochs``: the paper's are after 100, 160, 220 of 220."""
    targets = [start + (epochs[-1] - start) * stage / PAPER_EPOCHS for stage in PAPER_STAGES]
    return [min(range(len(epochs)), key=lambda i: abs(epochs[i] - target)) for target in targets]


def smoothed(losses: Sequence[float]) -> list[float]:
    """Averages each loss with the previous and the next, if they exist (Sec. 6)."""
    return [fmean(losses[max(i - 1, 0) : i + 2]) for i in range(len(losses))]


def staged(losses: Mapping[int, float], epochs: Sequence[int], start: int) -> dict[str, float]:
    """Returns VL1, VL2, VL3 and VLavg of the losses by epoch, which end with the first that is
    missing or not finite; nan where they do not reach. Returns {} for fewer epochs than
    MIN_VALIDATIONS."""
    if len(epochs) < MIN_VALIDATIONS:
        return {}
    known = list(takewhile(math.isfinite, (losses.get(epoch, math.nan) for epoch in epochs)))
    known += [math.nan] * (len(epochs) - len(known))
    indices = stages(epochs, start)
    values = [*(smoothed(known)[i] for i in indices), fmean(known[indices[0] :])]
    return dict(zip(STAGED, values, strict=True))


# The comparison


class Comparison(NamedTuple):
    labels: pd.DataFrame  # of each group of runs: batching, settings that differ, seeds, epochs
    mean: pd.DataFrame  # over a group's seeds
    error: pd.DataFrame  # standard error of the mean
    notes: list[str]  # what is left out, and why


def compare(runs: list[Run]) -> Comparison:
    """Averages over the seeds of all runs that have finished an epoch."""
    notes = [f"{run.path}: no epoch has ended yet" for run in runs if run.epochs.empty]
    runs = [run for run in runs if not run.epochs.empty]
    if not runs:
        raise UserError("\n".join(notes))
    keys = group_keys(runs)
    group = keys.groupby(list(keys), observed=True, dropna=False).ngroup()  # sorted
    rows = pd.DataFrame([averages(run) for run in runs]).reindex(columns=QUANTITIES)
    for members in group.groupby(group).groups.values():
        alike = [runs[i] for i in members]
        if len({run.settings["seed"] for run in alike}) < len(alike):
            paths = f"{alike[0].path} and {alike[1].path}"
            raise UserError(f"{paths}: have the same settings and seed; name one of them")
        rows.loc[members, VALIDATED] = last_validations(alike)
    notes += leave_out_incomparable(rows, runs, set(keys))

    labels = keys.groupby(group).first()
    labels["seeds"] = group.value_counts()
    done = pd.Series([f"{run.epochs.index[-1]}/{run.settings['epochs'] or '?'}" for run in runs])
    labels["epochs"] = done.groupby(group).agg(lambda of_seeds: ", ".join(of_seeds.unique()))
    return Comparison(labels, rows.groupby(group).mean(), rows.groupby(group).sem(), notes)


def group_keys(runs: list[Run]) -> pd.DataFrame:
    """Returns a row for each run: its batching, and the settings that differ between runs."""
    settings = pd.DataFrame([run.relevant_settings() for run in runs], dtype=object)
    settings["training frames"] = [run.conditions["training_frames"] for run in runs]
    settings = settings.loc[:, settings.nunique() > 1]
    names = [run.name for run in runs]
    order = list(dict.fromkeys([*PAPER.index, *sorted(names)]))
    batching = pd.Series(pd.Categorical(names, order, ordered=True), name="batching")
    return pd.concat([batching, settings], axis=1)


def last_validations(runs: list[Run]) -> np.ndarray:
    """Returns VALIDATED of each run at the last epoch after which all of them were validated. Runs
    that are limited by ``hours`` use their own last one. Without any, all is nan."""
    common = set.intersection(*(set(run.validations.index) for run in runs))
    rows = np.full((len(runs), len(VALIDATED)), math.nan)
    for row, run in zip(rows, runs, strict=True):
        if run.settings["hours"] and len(run.validations):
            row[:] = run.validations.iloc[-1]
        elif common:
            row[:] = run.validations.loc[max(common)]
    return rows


def leave_out_incomparable(rows: pd.DataFrame, runs: list[Run], differing: set[str]) -> list[str]:
    """Makes nan what does not compare between runs; returns notes that say why.

    Args:
        rows: of the runs, QUANTITIES.
        differing: settings that differ between runs.
    """
    notes = []
    for run in runs:
        if not np.isfinite(run.validations.loss).all():
            notes.append(f"{run.path}: a loss is not finite; the means leave it out")
    if "n_frames_per_step" in differing:  # a gate loss counts a decoder step once
        notes.append("losses are left out: runs have other numbers of frames a decoder step")
        rows[["loss", "masked_loss", *STAGED]] = math.nan
    if "batch_size" in differing:
        notes.append("padded losses are left out: of several batch sizes only masked ones compare")
        rows[["loss", *STAGED]] = math.nan
    facts = pd.DataFrame([run.settings | run.conditions for run in runs])
    paths = pd.Series([str(run.path) for run in runs])
    if reason := unequal(facts[[*AUDIO, "validation_frames"]], paths):
        notes.append(f"losses are left out: {reason}")
        rows[[*VALIDATED, *STAGED]] = math.nan
    reason = unequal(facts[CONDITIONS], paths)
    if "training frames" in differing:
        reason = "the runs were trained on other clips"
    if reason:
        notes.append(f"times are not compared: {reason}")
        rows["minutes"] = math.nan
    return notes


def averages(run: Run) -> dict[str, float]:
    """Returns QUANTITIES of a run, but for VALIDATED."""
    start, last = run.epochs.index[0] - 1, run.settings["epochs"] or run.epochs.index[-1]
    period = run.settings["epochs_per_validation"]
    validated = [epoch for epoch in range(period, last, period) if epoch > start] + [last]
    losses = staged(run.validations.loss, validated, start)
    means, minutes = run.epochs[AVERAGED].mean(), run.epochs.minutes.median()
    return {**means, "zpr": 100 * means.zpr, "minutes": minutes, "seconds": 60 * minutes, **losses}


def unequal(facts: pd.DataFrame, paths: pd.Series) -> str:
    """Says in which columns of ``facts`` which runs differ; "" if they agree in all."""
    parts = []
    for name in facts.columns[facts.nunique() > 1]:
        for value, alike in paths.groupby(facts[name]):
            more = f" and {len(alike) - 2} more" if len(alike) > 2 else ""
            parts.append(f"{name}={value} in {', '.join(alike[:2])}{more}")
    return "; ".join(parts)


# Tables and the figure


def cell(
    mean: float, error: float, digits: int, paper: float = math.nan, paper_digits: int = 2
) -> str:
    """Writes ``mean ± standard error (the paper's)``, as far as they are known."""
    text = "–" if math.isnan(mean) else f"{mean:,.{digits}f}"
    if not math.isnan(error):
        text += f" ± {error:,.{digits}f}"
    return text if math.isnan(paper) else f"{text} ({paper:.{paper_digits}f})"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Writes a Markdown table with aligned columns; the first row is its heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width for width in widths]
    lines = (" | ".join(map(str.rjust, row, widths)) for row in (rows[0], rule, *rows[1:]))
    return "\n".join(f"| {line} |" for line in lines)


def general_table(comparison: Comparison) -> str:
    labels, mean, error, _ = comparison
    rows = [[*labels, *COLUMNS, "time"]]
    for i in labels.index:
        row = ["" if pd.isna(value) else str(value) for value in labels.loc[i]]
        row += [cell(mean[name][i], error[name][i], digits) for name, digits in COLUMNS.values()]
        change = 100 * (mean.minutes[i] / mean.minutes.iloc[0] - 1)
        rows.append([*row, "–" if math.isnan(change) else f"{change:+.1f} %"])
    return markdown(rows)


def paper_tables(comparison: Comparison) -> dict[str, str]:
    """Returns the paper's Tables 2, 3 and 4 by their names; none unless the runs are RAND and
    others of its experiments, which differ in their batching alone, with validations enough."""
    names = list(comparison.labels.batching)
    settings = set(comparison.labels) - {"batching", "seeds", "epochs"}
    is_paper = "RAND" in names and len(names) > 1 and len(names) == len(set(names))
    if not is_paper or settings or comparison.mean.VL3.isna().all():
        return {}
    seeds = comparison.labels.seeds.set_axis(names)
    mean, error = comparison.mean.set_axis(names), comparison.error.set_axis(names)
    paper = PAPER.reindex(names)
    paper_saving = 100 * (1 - paper.minutes / paper.minutes["RAND"])

    def compared(name: str, quantity: str) -> str:
        digits, paper_digits = TABLE2[quantity]
        value, value_error = mean[quantity][name], error[quantity][name]
        return cell(value, value_error, digits, paper[quantity][name], paper_digits)

    def saved(name: str, quantity: str) -> tuple[float, float]:
        """Returns by how many percent it is below RAND's, and the standard error."""
        ratio = 100 * mean[quantity][name] / mean[quantity]["RAND"]
        errors = error[quantity] / mean[quantity]
        return 100 - ratio, ratio * math.hypot(errors[name], errors["RAND"])

    table2 = [["Batching", "Seeds", "ZPR %", "ABL", "min/epoch", *STAGED]]
    table3 = [["From RAND to", "time saved %", "fewer decoder steps %"]]
    table4 = [["From", "VL3", "To", "VL3", "reduction %"]]
    for name in names:
        table2.append([name, str(seeds[name]), *(compared(name, quantity) for quantity in TABLE2)])
    for name in names[1:]:
        time, time_error = saved(name, "minutes")
        steps, steps_error = saved(name, "total_length")
        time = cell(time, time_error, 2, paper_saving[name])
        table3.append([name, time, cell(steps, steps_error, 2)])
    for first, second in TABLE4:
        if first in names and second in names:
            row = [first, compared(first, "VL3"), second, compared(second, "VL3")]
            reduction = 100 * (1 - mean.VL3[second] / mean.VL3[first])
            paper_reduction = 100 * (1 - paper.VL3[second] / paper.VL3[first])
            table4.append([*row, cell(reduction, math.nan, 2, paper_reduction)])
    tables = {"table2": f"{markdown(table2)}\n\n{TABLE2_NOTE}", "table3": markdown(table3)}
    if len(table4) > 1:
        tables["table4"] = markdown(table4)
    return tables


def draw_figure4(runs: Sequence[Run], path: Path) -> None:
    """Draws the validation losses over epochs, smoothed: mean and range over the seeds."""
    from matplotlib.figure import Figure  # takes a second to import

    # Okabe and Ito's
    colours = {"RAND": "black", "SB": "#D55E00", "SSB": "#0072B2", "BKT": "#009E73"}
    colours["ATS"] = "#CC79A7"
    styles = {"": "o-", "BR": "s--", "DBS": "^-.", "DBS-BR": "D:"}
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    for name in PAPER.index:
        losses = [run.validations.loss for run in runs if run.name == name]
        losses = [curve for curve in losses if len(curve) and np.isfinite(curve).all()]
        curves = [pd.Series(smoothed(list(curve)), curve.index) for curve in losses]
        if not curves:
            continue
        seeds = pd.concat(curves, axis=1, join="inner")
        # The first fifth is so steep that it would hide the rest.
        seeds = seeds[seeds.index >= 0.8 * seeds.index.min() + 0.2 * seeds.index.max()]
        strategy, _, operations = name.partition("-")
        colour = colours[strategy]
        mean, low, high = seeds.mean(axis=1), seeds.min(axis=1), seeds.max(axis=1)
        axes.plot(seeds.index, mean, styles[operations], color=colour, label=name, markersize=4)
        axes.fill_between(seeds.index, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="epochs", ylabel="validation loss, smoothed")
    axes.grid(alpha=0.25)
    axes.legend(title="shaded: range over seeds", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=160)


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        description="Compare runs of train.py. Padding (ZPR), average batch length in frames "
        "(ABL), batches, and decoder steps (the sum of the batches' lengths) are means over the "
        "epochs; seconds per epoch are the median; time is its change from the first row. The "
        "losses (masked: over real frames only) and the alignment score (1: on the diagonal) are "
        "the last validation's."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of train.py or run_all.sh")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write the tables and figure4.png there"
    )
    args = parser.parse_args(argv)
    runs = read_runs(args.runs)
    comparison = compare(runs)
    tables = {"runs": general_table(comparison)}
    print(tables["runs"])
    for name, text in paper_tables(comparison).items():
        print(f"\n{name.replace('table', 'Table ')}\n\n{text}")
        tables[name] = text
    print(*comparison.notes, sep="\n")
    if args.output:
        make_folder(args.output)
        for name, text in tables.items():
            (args.output / f"{name}.md").write_text(text + "\n", encoding="utf-8")
        if "table2" in tables:
            draw_figure4(runs, args.output / "figure4.png")


if __name__ == "__main__":
    exit_on_user_error(main)
