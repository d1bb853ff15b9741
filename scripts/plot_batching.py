"""Draw the paper's Figures 1-3, print its Table 1 and picture every strategy, for any lengths.

    python scripts/plot_batching.py --train_size 10480 --paper     # LJSpeech's lengths
    python scripts/plot_batching.py lengths.csv --column n_frames
    python scripts/plot_batching.py --corpus data/LJSpeech-1.1 --train_size 10480 --paper

The paper is Ge et al., "Speed up training with variable length inputs by efficient batching
strategies", Interspeech 2021.
"""

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import soundfile
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import STRATEGIES, BatchPlan, BatchStatistics, batch_statistics, plan_batches
from cli import ArgumentParser, UserError, exit_on_user_error
from hparams import HParams
from scripts.paper import PAPER, PAPER_BATCHES

LJSPEECH_LENGTHS = Path(__file__).resolve().parents[1] / "filelists" / "ljspeech_lengths.csv"
LJSPEECH_HOP = 256  # samples, of its frames
LENGTH_WORDS = {"length", "lengths", "frames", "samples", "tokens"}  # in a column's name
EXAMPLE_CLIPS = 48  # of Figures 1 and 3, and of the picture of the strategies
CURVE_SEEDS = 5  # of Figure 2's curves, at most
LONGEST = 10**12  # beyond any unit of time a clip is measured in

# Okabe and Ito's colours, which do not rely on telling red from green.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
PADDING = {"facecolor": "#ececec", "edgecolor": "#a8a8a8", "hatch": "////", "linewidth": 0}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}

# Lengths


def read_lengths(path: Path, column: str | None = None, option: str = "--column") -> np.ndarray:
    """Lengths from text, one a line, or from a CSV file; (n,), all above 0. Prints which column.

    The first line is a header if none of its cells starts with a number. ``column`` is a name in
    it. Without one it is the column whose name has one of LENGTH_WORDS, or else the only one that
    has whole numbers. ``option`` is how the user names the column, for messages.

    Raises:
        UserError: no such file or column, several columns to choose from, or wrong lines, each
            with its number.
    """
    rows, end = [], 0
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            for row in reader:
                if row:
                    rows.append((end + 1, [cell.strip() for cell in row]))
                end = reader.line_num
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read as text or CSV ({reason})") from None
    header = rows.pop(0)[1] if rows and not any(map(_starts_as_number, rows[0][1])) else []
    if not rows:
        raise UserError(f"{path}: has no lengths; give one whole number a line")
    width = len(header or rows[0][1])
    if column is None:
        named = [c for c in range(len(header)) if LENGTH_WORDS & set(_words(header[c]))]
        choice = named or list(range(width))
        if len(choice) > 1:
            choice = [c for c in choice if any(_whole(row[c]) for _, row in rows if c < len(row))]
    else:
        choice = [c for c in range(len(header)) if header[c] == column]
        if not choice:
            has = f"the header names {', '.join(header)}" if header else "it has no header"
            raise UserError(f"{path}: has no column '{column}'; {has}")
    if not choice:
        raise UserError(f"{path}: has no column of whole numbers; give one length a line")
    if len(choice) > 1:
        fix = f"give {option}" if header else f"put a line of names above, and give {option}"
        names = ", ".join(header[c] if header else str(c + 1) for c in choice)
        raise UserError(f"{path}: lengths may be in any of the columns {names}; {fix}")
    lengths, problems = [], []
    for line, row in rows:
        cell = row[choice[0]] if len(row) == width else ""
        if len(row) != width:
            problem = f"has {len(row)} columns, and the first line {width}; mend or quote it"
        elif not _whole(cell):
            problem = f"{cell!r} is not a whole number; give a length"
        elif not 1 <= int(cell) <= LONGEST:
            problem = f"length {cell}; use 1 to {LONGEST}, or leave it out"
        else:
            lengths.append(int(cell))
            continue
        problems.append(f"{path}:{line}: {problem}")
    if problems:
        total = [f"{path}: {len(problems):,} of {len(rows):,} lines are wrong"]
        raise UserError("\n".join(problems[:20] + total * (len(problems) > 20)))
    name = f"'{header[choice[0]]}'" if header else choice[0] + 1
    print(f"{path}: {len(lengths):,} lengths, from column {name}")
    return np.array(lengths)


def _words(name: str) -> list[str]:
    return re.findall("[a-z]+", name.lower())


def _starts_as_number(cell: str) -> bool:
    return re.match(r"[+-]?[.]?[0-9]", cell) is not None


def _whole(cell: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9]{1,100}", cell) is not None


def rescale(lengths: np.ndarray, hop_from: int | None, hop_to: int | None) -> np.ndarray:
    """Frames of one hop length, in samples, as frames of another; both None: as they are.

    Raises:
        UserError: one of them is missing, or below 1.
    """
    for name, value in (("hop_from", hop_from), ("hop_to", hop_to)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: use 1 sample or more")
    if (hop_from is None) != (hop_to is None):
        raise UserError("--hop_from and --hop_to: give both or neither")
    if hop_from is None:
        return lengths
    print(f"frames of {hop_from} samples become frames of {hop_to}: right to one frame")
    return (2 * lengths - 1) * hop_from // (2 * hop_to) + 1  # in whole half samples


def corpus_lengths(corpus: Path, hop_length: int) -> np.ndarray:
    """Frames of every clip of a corpus in LJSpeech's layout, from the headers of wavs/*.wav."""
    paths = sorted((corpus / "wavs").glob("*.wav"))
    if not paths:
        raise UserError(f"{corpus}: has no wavs/*.wav; give the folder that holds wavs/")
    lengths = []
    for path in paths:
        try:
            lengths.append(soundfile.info(path).frames // hop_length + 1)
        except soundfile.SoundFileError:
            raise UserError(f"{path}: not a readable sound file; replace or remove it") from None
    return np.array(lengths)


def filelist_lengths(filelists: str, data_dir: str, hop_length: int) -> np.ndarray:
    """Frames of every clip of filelists joined with +, as the training takes them."""
    from clips import load_clips  # here, since it takes PyTorch some seconds to import

    clips = load_clips(filelists, HParams(data_dir=data_dir, hop_length=hop_length))
    return np.array([clip.n_frames for clip in clips])


def ljspeech_lengths(hop_length: int) -> np.ndarray:
    """The 13,100 lengths of LJSpeech in frames of ``hop_length`` samples, right to one frame."""
    return rescale(read_lengths(LJSPEECH_LENGTHS), LJSPEECH_HOP, hop_length)


# Numbers


def subset(lengths: np.ndarray, size: int | None, seed: int) -> np.ndarray:
    """``size`` of the lengths at random, another set for every seed; None: all of them."""
    if size is None:
        return lengths
    return np.random.default_rng([seed, 1]).choice(lengths, size, replace=False)


def statistics(
    lengths: np.ndarray, args: argparse.Namespace, seeds: int, **settings: object
) -> list[BatchStatistics]:
    """One epoch's statistics per seed; ``settings`` go over those of the command line."""
    names = ("batch_size", "lrf", "bucket_size", "n_bins")
    settings = {name: getattr(args, name) for name in names} | settings
    found = []
    for seed in range(seeds):
        clips = subset(lengths, args.train_size, seed)
        found.append(batch_statistics(clips, plan_batches(clips, seed=seed, **settings)))
    return found


def table(lengths: np.ndarray, args: argparse.Namespace) -> list[dict]:
    """Rows: fixed batches of every strategy, then dynamic ones; mean and sd over the seeds."""
    parameters = {
        "SSB": f"LRF {args.lrf:g}",
        "BKT": f"bucket size {args.bucket_size}",
        "ATS": f"{args.n_bins} bins",
    }
    rows = []
    for dynamic in (False, True):
        for strategy in STRATEGIES:
            row = {
                "batching": strategy + "-DBS" * dynamic,
                "parameter": parameters.get(strategy, ""),
            }
            found = statistics(
                lengths, args, args.seeds, strategy=strategy, dynamic_batch_size=dynamic
            )
            for name, values in zip(BatchStatistics._fields, zip(*found, strict=True), strict=True):
                sd = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
                row[name] = {"mean": float(np.mean(values)), "sd": sd}
            rows.append(row)
    return rows


def markdown(rows: list[dict], args: argparse.Namespace) -> Iterable[str]:
    """The rows as a Markdown table."""

    def cell(value: dict, digits: int, factor: float = 1) -> str:
        mean, sd = (f"{factor * value[part]:,.{digits}f}" for part in ("mean", "sd"))
        return f"{mean} ± {sd}" if args.seeds > 1 else mean

    header = ["Batching", "Parameter", "Batches", "ZPR %", f"ABL ({args.unit})"]
    header += [f"Sum of batch lengths ({args.unit})", "vs RAND"]
    header += ["Paper: batches, ZPR %, ABL"] if args.paper else []
    yield "| " + " | ".join(header) + " |"
    yield "|---|---|" + "---:|" * (len(header) - 2)
    for row in rows:
        cells = [row["batching"], row["parameter"], cell(row["n_batches"], 1)]
        cells += [cell(row["zpr"], 2, 100), cell(row["abl"], 1), cell(row["total_length"], 0)]
        steps = [r["total_length"]["mean"] for r in (row, rows[0])]
        cells += [f"{100 * (steps[0] / steps[1] - 1):+.1f} %" if row is not rows[0] else "–"]
        cells += [paper_cell(row["batching"])] if args.paper else []
        yield "| " + " | ".join(cells) + " |"


def paper_cell(batching: str) -> str:
    """What the paper has of it: its batches (Sec. 4), ZPR and ABL (Table 2; same without BR)."""
    row = PAPER.get(batching) or PAPER.get(f"{batching}-BR")
    numbers = f"{row['zpr']:.2f}, {row['abl']:.2f}" if row else "–, –"
    return f"{PAPER_BATCHES[batching]}, {numbers}" if batching in PAPER_BATCHES else "–"


def capacity_rows(lengths: np.ndarray, args: argparse.Namespace) -> list[dict]:
    """Batches with DBS under two rules, against the paper's counts (Sec. 4).

    The paper's inequality, B_i L_i <= B_0 L_max < B_{i+1} L_{i+1}, ends a batch before the clip
    that would exceed the capacity; the other rule ends it after. Padded frames a batch, of the
    paper: clips x ABL / batches.
    """
    rows = []
    for strategy in ("RAND", "SSB", "SB"):
        of_seeds: dict[str, list[float]] = {"within": [], "over": [], "padded": [], "capacity": []}
        for seed in range(args.seeds):
            clips = subset(lengths, args.train_size, seed)
            settings = {"batch_size": args.batch_size, "lrf": args.lrf, "seed": seed}
            plan = plan_batches(clips, strategy, batch_randomization=False, **settings)
            found, capacity = batch_statistics(clips, plan), args.batch_size * int(clips.max())
            of_seeds["within"].append(found.n_batches)
            of_seeds["over"].append(count_overshooting(clips[plan.order].tolist(), capacity))
            of_seeds["padded"].append(found.abl * len(clips) / found.n_batches)
            of_seeds["capacity"].append(capacity)
        row = {name: float(np.mean(values)) for name, values in of_seeds.items()}
        theirs = PAPER_BATCHES[f"{strategy}-DBS"]
        row |= {"batching": f"{strategy}-DBS", "paper": theirs, "paper_padded": None}
        if f"{strategy}-DBS" in PAPER:
            row["paper_padded"] = 10_480 * PAPER[f"{strategy}-DBS"]["abl"] / theirs
        rows.append(row)
    return rows


def count_overshooting(lengths: list[int], capacity: int) -> int:
    """Batches of clips in this order when each ends with the one that exceeds the capacity."""
    n_batches = size = longest = 0
    for length in lengths:
        size, longest = size + 1, max(longest, length)
        if size * longest > capacity:
            n_batches, size, longest = n_batches + 1, 0, 0
    return n_batches + (size > 0)


def capacity_markdown(rows: list[dict]) -> Iterable[str]:
    """The rows as a Markdown table."""
    head = ["Batches with DBS", "within the capacity (ours)", "over it by one clip", "the paper's"]
    head += ["padded frames a batch (ours)", "the paper's", "capacity"]
    yield f"| {' | '.join(head)} |"
    yield "|---|" + "---:|" * 6
    for row in rows:
        paper_padded = f"{row['paper_padded']:,.0f}" if row["paper_padded"] else "–"
        yield (
            f"| {row['batching']} | {row['within']:.1f} | {row['over']:.1f} | {row['paper']} | "
            f"{row['padded']:,.0f} | {paper_padded} | {row['capacity']:,.0f} |"
        )


# Pictures


def draw_batches(ax: Axes, lengths: np.ndarray, plan: BatchPlan, title: str) -> None:
    """Clips as bars in the order of training, a colour a batch; padding hatched."""
    start = 0
    for j, batch in enumerate(plan):
        x, of_batch = start + np.arange(len(batch)) + 0.5, lengths[batch]
        padding = of_batch.max() - of_batch
        ax.bar(x, of_batch, 0.86, color=COLOURS[j % len(COLOURS)])
        ax.bar(x, padding, 1, bottom=of_batch, **PADDING)
        start += len(batch)
    found = batch_statistics(lengths, plan)
    ax.set_title(title, loc="left", fontweight="bold", fontsize=10, pad=18)
    ax.annotate(
        f"ZPR {found.zpr:.1%}, ABL {found.abl:.0f}, {found.n_batches} batches",
        (0, 1), (0, 5), "axes fraction", "offset points", fontsize=9,
    )  # fmt: skip
    ax.set_xlim(0, len(lengths))


def draw_panels(
    path: Path, lengths: np.ndarray, panels: list[tuple[str, dict]], rows: int, unit: str, what: str
) -> None:
    """Small multiples of :func:`draw_batches`, one for each (title, arguments of its plan).

    ``what`` they were drawn with stands above them.
    """
    columns = len(panels) // rows
    figure = Figure(figsize=(9, 0.5 + 2.6 * rows), layout="constrained")
    figure.suptitle(what, x=0.01, ha="left", fontsize=9)
    axes = figure.subplots(rows, columns, sharey=True, sharex=True, squeeze=False)
    for ax, (title, settings) in zip(axes.flat, panels, strict=True):
        plan = plan_batches(lengths, **settings)
        draw_batches(ax, lengths, plan, title)
    axes[0, 0].legend(
        [Patch(**PADDING)], ["padding"], loc="lower right", bbox_to_anchor=(1, 1.095),
        frameon=False, borderpad=0, borderaxespad=0.2, handlelength=1.6,
    )  # fmt: skip
    for ax in axes[:, 0]:
        ax.set_ylabel(f"length ({unit})")
    for ax in axes[-1]:
        ax.set_xlabel("clips, in the order of training")
        ax.set_xticks(range(0, len(lengths) + 1, 8 if rows == 1 else 12))
    figure.savefig(path, dpi=200)


def draw_parameters(path: Path, lengths: np.ndarray, args: argparse.Namespace) -> None:
    """Figure 2: ZPR against each parameter, and the batch lengths for the one selected."""
    n, seeds = args.train_size or len(lengths), min(args.seeds, CURVE_SEEDS)
    most = max(n // args.batch_size, 2)
    sizes = np.geomspace(min(args.batch_size, n), n, 40).astype(int)
    curves = {  # strategy: (parameter, its name on the axis, values)
        "SSB": ("lrf", "local randomisation factor", np.linspace(0, max(2, 2 * args.lrf), 41)),
        "BKT": ("bucket_size", "bucket size (clips)", np.unique(sizes)),
        "ATS": ("n_bins", "number of bins", np.unique(np.geomspace(1, most, 40).astype(int))),
    }
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots(2, 3, sharey="row")

    def mean_zpr(strategy: str, **parameter: float) -> float:
        found = statistics(
            lengths, args, seeds, strategy=strategy, dynamic_batch_size=False, **parameter
        )
        return 100 * float(np.mean([of_seed.zpr for of_seed in found]))

    random, clips = mean_zpr("RAND"), subset(lengths, args.train_size, 0)
    for k, (strategy, (name, label, values)) in enumerate(curves.items()):
        upper, lower, colour = axes[0, k], axes[1, k], COLOURS[k if k == 0 else k + 1]
        chosen = getattr(args, name)
        zpr = mean_zpr(strategy, **{name: chosen})
        points = [mean_zpr(strategy, **{name: value}) for value in values.tolist()]
        upper.plot(values, points, color=colour, linewidth=2)
        upper.axhline(random, color="#777777", linestyle="--", linewidth=1)
        upper.annotate(
            "RAND", (0, random), (4, 2), ("axes fraction", "data"), "offset points",
            va="bottom", color="#555555",
        )  # fmt: skip
        upper.plot(chosen, zpr, "o", color="black", markersize=5)
        upper.annotate(
            f"{chosen:g}: {zpr:.2f} %", (chosen, zpr), (8, -6), textcoords="offset points",
            va="top", fontweight="bold",
        )  # fmt: skip
        upper.set_title(f"({'abc'[k]}) {strategy}", loc="left", fontweight="bold", fontsize=10)
        upper.set_xlabel(label)
        if strategy != "SSB":
            upper.set_xscale("log", base=2)
            upper.xaxis.set_major_formatter("{x:g}")
        upper.set_ylim(*(0, 1.12 * random) if random else (-1, 1))

        plan = plan_batches(
            clips, strategy, args.batch_size, dynamic_batch_size=False, batch_randomization=False,
            **{name: chosen},
        )  # fmt: skip
        abl = batch_statistics(clips, plan).abl
        lower.plot([clips[batch].max() for batch in plan], color=colour, linewidth=0.8)
        lower.axhline(abl, color="black", linewidth=1.2)
        lower.set_title(f"black: ABL {abl:.0f} {args.unit}", loc="left", fontsize=9)
        lower.set_xlabel("batch, before randomisation")
        lower.set_ylim(0, 1.05 * clips.max())
    axes[0, 0].set_ylabel("ZPR (%)")
    axes[1, 0].set_ylabel(f"batch length ({args.unit})")
    figure.savefig(path, dpi=200)


def draw_all(lengths: np.ndarray, args: argparse.Namespace) -> dict[Path, str]:
    """The four pictures in ``args.output_dir``, and what each was drawn with."""
    example, lrf = subset(lengths, EXAMPLE_CLIPS, 0), {"lrf": args.lrf}
    drawn = {}
    for name, dynamic in (("figure1", False), ("figure3", True)):
        settings = {"batch_size": 8, "dynamic_batch_size": dynamic, "batch_randomization": False}
        panels = [
            (f"({letter}) {strategy}" + "-DBS" * dynamic, {"strategy": strategy, **settings, **lrf})
            for letter, strategy in zip("abc", ("RAND", "SB", "SSB"), strict=True)
        ]
        path = args.output_dir / f"{name}.png"
        base = "base batch size" if dynamic else "batches of"
        drawn[path] = f"{EXAMPLE_CLIPS} clips at random; {base} 8, LRF {args.lrf:g}"
        draw_panels(path, example, panels, 1, args.unit, drawn[path])
    path = args.output_dir / "figure2.png"
    draw_parameters(path, lengths, args)
    drawn[path] = "the table's parameters, in fixed batches"
    fixed = {"batch_size": 4, "dynamic_batch_size": False, "batch_randomization": False}
    panels = [
        ("RAND: random", {"strategy": "RAND", **fixed}),
        ("SB: sorted", {"strategy": "SB", **fixed}),
        (f"SSB: semi-sorted, LRF {args.lrf:g}", {"strategy": "SSB", **fixed, **lrf}),
        ("BKT: buckets of 12", {"strategy": "BKT", "bucket_size": 12, **fixed}),
        ("ATS: alternated sorting, 4 bins", {"strategy": "ATS", "n_bins": 4, **fixed}),
        ("SSB-DBS-BR: dynamic, shuffled", {"strategy": "SSB", "batch_size": 4, **lrf}),
    ]
    path = args.output_dir / "strategies.png"
    drawn[path] = (
        f"{EXAMPLE_CLIPS} clips at random; batches of 4, LRF {args.lrf:g}, buckets of 12, 4 bins"
    )
    draw_panels(path, example, panels, 2, args.unit, drawn[path])
    return drawn


# The program


def parse_args() -> argparse.Namespace:
    hparams = HParams()
    parser = ArgumentParser(
        description="Draw the paper's Figures 1-3 and a picture of every strategy, and print its "
        "Table 1, for any lengths. Without a source of lengths: the 13,100 of LJSpeech.",
        epilog="LJSpeech's lengths come with this repository, in filelists/ljspeech_lengths.csv: "
        "frames counted from its wavs at a hop of 256 samples, n_samples // 256 + 1, so that "
        "n_samples is known to within one hop. --hop_from 256 --hop_to 276 makes such frames "
        "n_samples // 276 + 1, with n_samples = (frames - 0.5) * 256: right to one frame. "
        "LJSpeech's are rescaled so to --hop_length.",
    )
    source = parser.add_argument_group("lengths (one source, or none)")
    add = source.add_argument
    add(
        "lengths",
        nargs="?",
        type=Path,
        metavar="LENGTHS",
        help="file of lengths: text, one a line, or CSV",
    )
    add(
        "--corpus",
        type=Path,
        metavar="DIR",
        help="LJSpeech's layout: from headers of DIR/wavs/*.wav",
    )
    add("--filelist", metavar="A+B", help="lines of path|text: from headers of those clips")
    words = ", ".join(sorted(LENGTH_WORDS))
    add(
        "--column",
        metavar="NAME",
        help=f"of the CSV (default: the one whose name has {words} in it, or the only one of "
        "whole numbers)",
    )
    add("--hop_from", type=int, metavar="N", help="LENGTHS are frames of this hop, in samples ...")
    add("--hop_to", type=int, metavar="N", help="... and become frames of this one")
    add("--data_dir", metavar="DIR", help="what a filelist's paths start from (default: here)")
    hop = f"samples per frame, where LENGTHS are not given (default: {hparams.hop_length})"
    add("--hop_length", type=int, metavar="N", help=hop)
    add("--unit", default="frames", help="of the lengths, for the labels (default: %(default)s)")
    batching = parser.add_argument_group("batching")
    add = batching.add_argument
    add("--train_size", type=int, metavar="N", help="N clips at random per seed (default: all)")
    add("--seeds", type=int, default=30, metavar="N", help="to average over (default: %(default)s)")
    for name, what in (
        ("batch_size", "clips per batch; the base with dynamic sizes"),
        ("lrf", "SSB's local randomisation factor"),
        ("bucket_size", "BKT's clips per bucket"),
        ("n_bins", "ATS's number of bins"),
    ):
        default = getattr(hparams, name)
        what += f" (default: {default})"
        add(f"--{name}", type=type(default), default=default, metavar="N", help=what)
    output = parser.add_argument_group("output")
    add = output.add_argument
    add("--paper", action="store_true", help="the paper's values beside, and its batch counts")
    folder = Path("runs/batching")
    add(
        "--output_dir",
        type=Path,
        default=folder,
        metavar="DIR",
        help="of the PNG files (%(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="write the table's numbers")
    return parser.parse_args()


def get_lengths(args: argparse.Namespace) -> np.ndarray:
    """The lengths of the one source given, in the unit asked for."""
    given = [name for name in ("lengths", "corpus", "filelist") if getattr(args, name) is not None]
    if len(given) > 1:
        raise UserError("give one of LENGTHS, --corpus and --filelist, not several")
    source = given[0] if given else ""
    for name, reader in (
        ("column", ("lengths",)),
        ("hop_from", ("lengths",)),
        ("hop_to", ("lengths",)),
        ("data_dir", ("filelist",)),
        ("hop_length", ("corpus", "filelist", "")),
    ):
        value = getattr(args, name)
        if value is not None and source not in reader:
            goes = " or ".join({"lengths": "LENGTHS"}.get(r, f"--{r}") for r in reader if r)
            raise UserError(f"--{name} {value}: goes with {goes} only; leave it out")
        if name == "hop_length" and value is not None and value < 1:
            raise UserError(f"--{name} {value}: use 1 sample or more")
    hop_length = args.hop_length or HParams().hop_length
    if source == "corpus":
        return corpus_lengths(args.corpus, hop_length)
    if source == "filelist":
        return filelist_lengths(args.filelist, args.data_dir or "", hop_length)
    if source == "lengths":
        return rescale(read_lengths(args.lengths, args.column), args.hop_from, args.hop_to)
    print("no lengths given: these are LJSpeech's")
    return ljspeech_lengths(hop_length)


def main() -> None:
    args = parse_args()
    lengths = get_lengths(args)
    if len(lengths) < EXAMPLE_CLIPS:
        raise UserError(f"{len(lengths)} clips: the figures need {EXAMPLE_CLIPS} or more")
    if args.train_size is not None and not 1 <= args.train_size <= len(lengths):
        raise UserError(f"--train_size {args.train_size}: use 1 to {len(lengths)}, all clips")
    if args.seeds < 1:
        raise UserError(f"--seeds {args.seeds}: use 1 or more")
    if args.lrf > 1000:
        raise UserError(f"--lrf {args.lrf}: use 1000 or less; SSB is RAND long before")
    try:
        rows = table(lengths, args)
        capacities = capacity_rows(lengths, args) if args.paper else []
    except ValueError as error:  # batch_size, lrf, bucket_size or n_bins
        raise UserError(f"--{error}") from None
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        if args.json:
            numbers = {
                "clips": args.train_size or len(lengths),
                "clips_in_all": len(lengths),
                "seeds": args.seeds,
                "batch_size": args.batch_size,
                "unit": args.unit,
                "rows": rows,
                "capacities": capacities,
            }
            args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror})") from None
    size = f"{args.train_size or len(lengths):,} of {len(lengths):,} clips"
    over = f"mean ± sd over {args.seeds} seeds" if args.seeds > 1 else "one seed"
    print(f"{size}, batch size {args.batch_size}; {over}. BR changes none of these.\n")
    print("\n".join(markdown(rows, args)) + "\n")
    if capacities:
        print("\n".join(capacity_markdown(capacities)) + "\n")
    if lengths.min() == lengths.max():
        print("note: all lengths are equal: nothing is padded, whatever the batching\n")
    with rc_context(STYLE):
        for path, what in draw_all(lengths, args).items():
            print(f"wrote {path} ({what})")


if __name__ == "__main__":
    exit_on_user_error(main)
