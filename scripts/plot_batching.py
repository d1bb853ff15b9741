"""Draw the paper's Figures 1-3, print its Table 1 and picture every strategy, for any lengths.

    python scripts/plot_batching.py --train_size 10480 --paper     # LJSpeech's lengths
    python scripts/plot_batching.py lengths.csv --column n_frames
    python scripts/plot_batching.py --corpus data/LJSpeech-1.1 --train_size 10480 --paper

The paper is Ge et al., "Speed up training with variable length inputs by efficient batching
strategies", Interspeech 2021.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until main() runs, Ctrl-C ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import STRATEGIES, BatchPlan, BatchStatistics, batch_statistics, plan_batches
from cli import ArgumentParser, UserError, exit_on_user_error
from files import make_folder
from hparams import HParams
from scripts.lengths import (
    LJSPEECH_HOP,
    LJSPEECH_LENGTHS,
    corpus_lengths,
    filelist_lengths,
    ljspeech_lengths,
    read_lengths,
    rescale,
    subset,
)
from scripts.paper import PAPER, PAPER_BATCHES, PARAMETERS

EXAMPLE_CLIPS = 48  # in Figures 1 and 3, and in the picture of the strategies
CURVE_SEEDS = 5  # at most, for Figure 2's curves

# Okabe and Ito's colours, which do not rely on telling red from green.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
PADDING = {"facecolor": "#ececec", "edgecolor": "#a8a8a8", "hatch": "////", "linewidth": 0}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


# The table


def statistics(
    lengths: np.ndarray, args: argparse.Namespace, seeds: int, **settings: object
) -> list[BatchStatistics]:
    """One epoch's statistics per seed; ``settings`` override those of the command line."""
    names = ("batch_size", *PARAMETERS.values())
    settings = {name: getattr(args, name) for name in names} | settings
    epochs = []
    for seed in range(seeds):
        clips = subset(lengths, args.train_size, seed)
        epochs.append(batch_statistics(clips, plan_batches(clips, seed=seed, **settings)))
    return epochs


def table(lengths: np.ndarray, args: argparse.Namespace) -> list[dict]:
    """A row for every strategy, without and with DBS: mean and sd over the seeds."""
    parameters = {
        "SSB": f"LRF {args.lrf:g}",
        "BKT": f"bucket size {args.bucket_size}",
        "ATS": f"{args.n_bins} bins",
    }
    rows = []
    for dynamic, strategy in itertools.product((False, True), STRATEGIES):
        name, parameter = strategy + "-DBS" * dynamic, parameters.get(strategy, "")
        row = {"batching": name, "parameter": parameter}
        settings = {"strategy": strategy, "dynamic_batch_size": dynamic}
        epochs = statistics(lengths, args, args.seeds, **settings)
        for field in BatchStatistics._fields:
            values = [getattr(epoch, field) for epoch in epochs]
            sd = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            row[field] = {"mean": float(np.mean(values)), "sd": sd}
        rows.append(row)
    return rows


def markdown(rows: list[dict], args: argparse.Namespace) -> Iterator[str]:
    """The rows as lines of a Markdown table."""

    def cell(value: dict, digits: int, factor: float = 1) -> str:
        mean, sd = (f"{factor * value[part]:,.{digits}f}" for part in ("mean", "sd"))
        return f"{mean} ± {sd}" if args.seeds > 1 else mean

    header = ["Batching", "Parameter", "Batches", "ZPR %", f"ABL ({args.unit})"]
    header += [f"Sum of batch lengths ({args.unit})", "vs RAND"]
    if args.paper:
        header.append("Paper: batches, ZPR %, ABL")
    yield "| " + " | ".join(header) + " |"
    yield "|---|---|" + "---:|" * (len(header) - 2)
    for row in rows:
        ratio = row["total_length"]["mean"] / rows[0]["total_length"]["mean"]
        cells = [
            row["batching"],
            row["parameter"],
            cell(row["n_batches"], 1),
            cell(row["zpr"], 2, factor=100),
            cell(row["abl"], 1),
            cell(row["total_length"], 0),
            "–" if row is rows[0] else f"{100 * (ratio - 1):+.1f} %",
        ]
        if args.paper:
            cells.append(paper_cell(row["batching"]))
        yield "| " + " | ".join(cells) + " |"


def paper_cell(batching: str) -> str:
    """The paper's number of batches (Sec. 4), and its ZPR and ABL (Table 2), which BR leaves."""
    if batching not in PAPER_BATCHES:
        return "–"
    row = PAPER.get(batching) or PAPER.get(f"{batching}-BR")
    numbers = f"{row['zpr']:.2f}, {row['abl']:.2f}" if row else "–, –"
    return f"{PAPER_BATCHES[batching]}, {numbers}"


def notes(lengths: np.ndarray, args: argparse.Namespace) -> Iterator[str]:
    """Why some rows of the table are the same."""
    n = args.train_size or len(lengths)
    if lengths.min() == lengths.max():
        yield "all lengths are equal: nothing is padded, whatever the batching"
        return
    if args.bucket_size >= n:
        yield f"BKT with bucket_size={args.bucket_size}: one bucket has all {n:,} clips: RAND"
    if args.n_bins * args.batch_size >= n:
        yield f"ATS with n_bins={args.n_bins}: no bin is larger than a batch: RAND, or nearly so"


# The figures


def draw_batches(ax: Axes, lengths: np.ndarray, plan: BatchPlan) -> None:
    """Clips as bars in training order, one colour per batch, padding hatched."""
    heights = lengths[plan.order]
    longest = np.repeat([lengths[batch].max() for batch in plan], plan.sizes)
    colours = [COLOURS[j % len(COLOURS)] for j, batch in enumerate(plan) for _ in batch]
    x = np.arange(len(lengths)) + 0.5
    ax.bar(x, heights, 0.86, color=colours)
    ax.bar(x, longest - heights, 1, bottom=heights, **PADDING)
    epoch = batch_statistics(lengths, plan)
    text = f"ZPR {epoch.zpr:.1%}, ABL {epoch.abl:.0f}, {epoch.n_batches} batches"
    ax.annotate(text, (0, 1), (0, 5), "axes fraction", "offset points", fontsize=9)
    ax.set_xlim(0, len(lengths))


def draw_panels(path: Path, lengths: np.ndarray, panels: dict, content: str, unit: str) -> None:
    """:func:`draw_batches` for each of ``panels``, three in a row, below a line of ``content``.

    ``panels`` are {title: arguments of :func:`batching.plan_batches`}.
    """
    rows = len(panels) // 3
    figure = Figure(figsize=(9, 0.5 + 2.6 * rows), layout="constrained")
    figure.suptitle(content, x=0.01, ha="left", fontsize=9)
    axes = figure.subplots(rows, 3, sharey=True, sharex=True, squeeze=False)
    for ax, (title, settings) in zip(axes.flat, panels.items(), strict=True):
        draw_batches(ax, lengths, plan_batches(lengths, **settings))
        ax.set_title(title, loc="left", fontweight="bold", fontsize=10, pad=18)
    axes[0, 0].legend(
        [Patch(**PADDING)], ["padding"], loc="lower right", bbox_to_anchor=(1, 1.095),
        frameon=False, borderpad=0, borderaxespad=0.2, handlelength=1.6,
    )  # fmt: skip
    for ax in axes[:, 0]:
        ax.set_ylabel(f"length ({unit})")
    for ax in axes[-1]:
        ax.set_xlabel("clips, in the order of training")
        ax.set_xticks(range(0, len(lengths) + 1, 8 if rows == 1 else 12))
    save(figure, path, content)


def draw_parameters(path: Path, lengths: np.ndarray, args: argparse.Namespace) -> None:
    """Figure 2: ZPR over each parameter, and an epoch's batch lengths with the value selected."""
    clips = subset(lengths, args.train_size, 0)
    n, batch_size = len(clips), args.batch_size
    bucket_sizes = np.geomspace(min(batch_size, n), n, 40).astype(int)
    numbers_of_bins = np.geomspace(1, max(n // batch_size, 2), 40).astype(int)
    curves = {  # strategy: (colour, label, values of its parameter)
        "SSB": (COLOURS[0], "local randomisation factor", np.linspace(0, max(2, 2 * args.lrf), 41)),
        "BKT": (COLOURS[2], "bucket size (clips)", np.unique(bucket_sizes)),
        "ATS": (COLOURS[3], "number of bins", np.unique(numbers_of_bins)),
    }

    def mean_zpr(strategy: str, **parameter: float) -> float:
        seeds = min(args.seeds, CURVE_SEEDS)
        settings = {"strategy": strategy, "dynamic_batch_size": False} | parameter
        epochs = statistics(lengths, args, seeds, **settings)
        return 100 * float(np.mean([epoch.zpr for epoch in epochs]))

    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots(2, 3, sharey="row")
    random_zpr = mean_zpr("RAND")
    for column, (strategy, (colour, label, values)) in enumerate(curves.items()):
        name = PARAMETERS[strategy]
        selected = getattr(args, name)
        zpr = mean_zpr(strategy)
        points = [mean_zpr(strategy, **{name: value}) for value in values.tolist()]
        ax = axes[0, column]
        ax.plot(values, points, color=colour, linewidth=2)
        ax.axhline(random_zpr, color="#777777", linestyle="--", linewidth=1)
        ax.annotate(
            "RAND", (0, random_zpr), (4, 2), ("axes fraction", "data"), "offset points",
            va="bottom", color="#555555",
        )  # fmt: skip
        ax.plot(selected, zpr, "o", color="black", markersize=5)
        ax.annotate(
            f"{selected:g}: {zpr:.2f} %", (selected, zpr), (8, -6), textcoords="offset points",
            va="top", fontweight="bold",
        )  # fmt: skip
        ax.set_title(f"({'abc'[column]}) {strategy}", loc="left", fontweight="bold", fontsize=10)
        ax.set_xlabel(label)
        if strategy != "SSB":
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:g}")
        ax.set_ylim(*(0, 1.12 * random_zpr) if random_zpr else (-1, 1))

        plan = plan_batches(clips, strategy, batch_size, False, False, **{name: selected})
        abl = batch_statistics(clips, plan).abl
        ax = axes[1, column]
        ax.plot([clips[batch].max() for batch in plan], color=colour, linewidth=0.8)
        ax.axhline(abl, color="black", linewidth=1.2)
        ax.set_title(f"black: ABL {abl:.0f} {args.unit}", loc="left", fontsize=9)
        ax.set_xlabel("batch, before randomisation")
        ax.set_ylim(0, 1.05 * clips.max())
    axes[0, 0].set_ylabel("ZPR (%)")
    axes[1, 0].set_ylabel(f"batch length ({args.unit})")
    save(figure, path, "the table's parameters, in fixed batches")


def save(figure: Figure, path: Path, content: str) -> None:
    figure.savefig(path, dpi=200)
    print(f"wrote {path} ({content})")


def draw_all(lengths: np.ndarray, args: argparse.Namespace) -> None:
    """Figures 1 to 3, and the picture of the strategies, in ``args.output_dir``."""
    example, clips = subset(lengths, EXAMPLE_CLIPS, 0), f"{EXAMPLE_CLIPS} clips at random"
    settings = {"lrf": args.lrf, "bucket_size": 12, "n_bins": 4, "batch_randomization": False}
    for name, dynamic in (("figure1", False), ("figure3", True)):
        settings |= {"batch_size": 8, "dynamic_batch_size": dynamic}
        panels = {}
        for letter, strategy in zip("abc", ("RAND", "SB", "SSB"), strict=True):
            title = f"({letter}) {strategy}" + "-DBS" * dynamic
            panels[title] = settings | {"strategy": strategy}
        size = "base batch size" if dynamic else "batches of"
        content = f"{clips}; {size} 8, LRF {args.lrf:g}"
        draw_panels(args.output_dir / f"{name}.png", example, panels, content, args.unit)
    draw_parameters(args.output_dir / "figure2.png", lengths, args)

    settings |= {"batch_size": 4, "dynamic_batch_size": False}
    titles = {
        "RAND": "RAND: random",
        "SB": "SB: sorted",
        "SSB": f"SSB: semi-sorted, LRF {args.lrf:g}",
        "BKT": "BKT: buckets of 12",
        "ATS": "ATS: alternated sorting, 4 bins",
    }
    panels = {title: settings | {"strategy": strategy} for strategy, title in titles.items()}
    panels["SSB-DBS-BR: dynamic, shuffled"] = {"strategy": "SSB", "batch_size": 4, "lrf": args.lrf}
    content = f"{clips}; batches of 4, LRF {args.lrf:g}, buckets of 12, 4 bins"
    draw_panels(args.output_dir / "strategies.png", example, panels, content, args.unit)


# The program


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(
        description="Draw the paper's Figures 1-3 and a picture of every strategy, and print the "
        "paper's Table 1, for any lengths; by default for the 13,100 of LJSpeech.",
        epilog=f"LJSpeech's lengths, in filelists/{LJSPEECH_LENGTHS.name}, are frames of its wavs "
        f"at a hop of {LJSPEECH_HOP} samples: n_samples // {LJSPEECH_HOP} + 1. They are rescaled "
        "to --hop_length, as --hop_from and --hop_to rescale yours, with n_samples taken as "
        f"(frames - 0.5) * {LJSPEECH_HOP}: right to one frame.",
    )
    group = parser.add_argument_group("lengths")
    source = group.add_mutually_exclusive_group()
    add = source.add_argument
    add("lengths", nargs="?", type=Path, metavar="LENGTHS", help="text file, one a line, or CSV")
    add("--corpus", type=Path, metavar="DIR", help="from the headers of DIR/wavs/*.wav")
    add("--filelist", metavar="A+B", help="from the headers of the clips in lists of path|text")
    add = group.add_argument
    add("--column", metavar="NAME",
        help="of a CSV file (default: the one with frames, length, samples or tokens in its name, "
        "or the only one of whole numbers)")  # fmt: skip
    add("--hop_from", type=int, metavar="N", help="LENGTHS are frames of this hop, in samples ...")
    add("--hop_to", type=int, metavar="N", help="... and are rescaled to this one")
    add("--data_dir", metavar="DIR", help="where a filelist's relative paths start (default: here)")
    add("--hop_length", type=int, metavar="N",
        help=f"samples per frame, without LENGTHS (default: {HParams.hop_length})")  # fmt: skip
    add("--unit", default="frames", help="of the lengths, for labels (default: %(default)s)")

    add = parser.add_argument_group("batching").add_argument
    add("--train_size", type=int, metavar="N", help="N clips at random per seed (default: all)")
    add("--seeds", type=int, default=30, metavar="N", help="to average over (default: %(default)s)")
    for name, what in (
        ("batch_size", "clips per batch; the base size with DBS"),
        ("lrf", "SSB's local randomisation factor"),
        ("bucket_size", "BKT's clips per bucket"),
        ("n_bins", "ATS's number of bins"),
    ):
        default = getattr(HParams, name)
        what += f" (default: {default})"
        add(f"--{name}", type=type(default), default=default, metavar="N", help=what)

    add = parser.add_argument_group("output").add_argument
    add("--paper", action="store_true", help="show the paper's values too")
    folder = Path("runs/batching")
    add("--output_dir", type=Path, default=folder, metavar="DIR", help="for figures (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the table's numbers")
    return parser.parse_args()


def get_lengths(args: argparse.Namespace) -> np.ndarray:
    """The lengths from the source that was given, in the unit asked for."""
    unused = ["column", "hop_from", "hop_to"] if args.lengths is None else ["hop_length"]
    unused += ["data_dir"] if args.filelist is None else []
    for name in unused:
        if (value := getattr(args, name)) is not None:
            raise UserError(f"--{name} {value}: does not apply to these lengths; leave it out")
    hop_length = HParams.hop_length if args.hop_length is None else args.hop_length
    if hop_length < 1:
        raise UserError(f"--hop_length {hop_length}: use 1 sample or more")
    if args.lengths is not None:
        return rescale(read_lengths(args.lengths, args.column), args.hop_from, args.hop_to)
    if args.corpus is not None:
        return corpus_lengths(args.corpus, hop_length)
    if args.filelist is not None:
        return filelist_lengths(args.filelist, args.data_dir or "", hop_length)
    print("no lengths given: these are LJSpeech's")
    return ljspeech_lengths(hop_length)


def main() -> None:
    args = parse_args()
    lengths = get_lengths(args)
    n = len(lengths)
    if n < EXAMPLE_CLIPS:
        raise UserError(f"{n} clips: the figures need {EXAMPLE_CLIPS} or more")
    if args.train_size is not None and not 1 <= args.train_size <= n:
        raise UserError(f"--train_size {args.train_size}: use 1 to {n}, all clips")
    if args.seeds < 1:
        raise UserError(f"--seeds {args.seeds}: use 1 or more")
    if args.lrf > 1000:
        raise UserError(f"--lrf {args.lrf}: use 1000 or less; SSB is RAND long before")
    try:
        rows = table(lengths, args)
    except ValueError as error:  # batch_size, lrf, bucket_size or n_bins
        raise UserError(f"--{error}") from None

    numbers = {"clips": args.train_size or n, "clips_in_all": n, "seeds": args.seeds}
    numbers |= {"batch_size": args.batch_size, "unit": args.unit, "rows": rows}
    over = f"mean ± sd over {args.seeds} seeds" if args.seeds > 1 else "one seed"
    print(f"{numbers['clips']:,} of {n:,} clips, batch size {args.batch_size}; {over}.", end=" ")
    print("BR changes none of these.\n", *markdown(rows, args), "", sep="\n")
    for note in notes(lengths, args):
        print(f"note: {note}\n")
    make_folder(args.output_dir)
    if args.json:
        try:
            args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{args.json}: cannot be written ({error.strerror})") from None
    with rc_context(STYLE):
        draw_all(lengths, args)


if __name__ == "__main__":
    exit_on_user_error(main)
