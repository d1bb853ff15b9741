"""What each batching strategy does with clips of any lengths: a table, a recommendation, and
pictures, among them the paper's Figures 1-3.

    python scripts/plot_batching.py --train_size 10480 --paper     # LJSpeech's lengths
    python scripts/plot_batching.py lengths.csv --column n_frames
    python scripts/plot_batching.py data/utt2dur                   # or a manifest in JSON
    python scripts/plot_batching.py folder_of_audio --target_zpr 0.05

The paper is Ge et al., "Speed up training with variable length inputs by efficient batching
strategies", Interspeech 2021.
"""

import sys
from argparse import Namespace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy import ndarray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import (
    STRATEGIES,
    BatchStatistics,
    batch_statistics,
    plan_batches,
    solve_randomness,
)
from cli import ArgumentParser, UserError, exit_on_user_error, positive
from files import make_folder
from hparams import HParams
from scripts.lengths import EXAMPLE_CLIPS, ljspeech_lengths, read_lengths, subset
from scripts.paper import PAPER, PAPER_BATCHES, PARAMETERS

# Okabe and Ito's colours, which do not rely on telling red from green.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
PADDING = {"facecolor": "#ececec", "edgecolor": "#a8a8a8", "hatch": "////", "linewidth": 0}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
LEGEND = {"loc": "lower right", "bbox_to_anchor": (1, 1.095), "frameon": False, "borderpad": 0}
LEGEND |= {"borderaxespad": 0.2, "handlelength": 1.6}
FIGURE_LRF = 0.15  # of the paper's Figure 1, with which it compares its Figure 3


def statistics(
    lengths: ndarray, args: Namespace, seeds: int, strategy: str, **settings: object
) -> tuple[BatchStatistics, BatchStatistics]:
    """Mean and sd over the seeds; ``settings`` override those of the command line."""
    names = ("batch_size", *PARAMETERS.values())
    settings = {name: getattr(args, name) for name in names} | settings
    epochs = []
    for seed in range(seeds):
        clips = subset(lengths, args.train_size, seed)
        plan = plan_batches(clips, strategy, seed=seed, **settings)
        epochs.append(batch_statistics(clips, plan))
    return BatchStatistics(*np.mean(epochs, 0)), BatchStatistics(*np.std(epochs, 0, ddof=1))


def all_statistics(
    lengths: ndarray, args: Namespace
) -> dict[str, tuple[BatchStatistics, BatchStatistics]]:
    """Mean and sd over the seeds of every strategy, without and with DBS, by name."""
    return {
        strategy + "-DBS" * dynamic: statistics(
            lengths, args, args.seeds, strategy, dynamic_batch_size=dynamic
        )
        for dynamic, strategy in product((False, True), STRATEGIES)
    }


def table(epochs: dict[str, tuple[BatchStatistics, BatchStatistics]], args: Namespace) -> list[str]:
    """Lines of a Markdown table of :func:`all_statistics`, mean ± sd."""
    header = ["Batching", "Parameter", "Batches", "ZPR %", "Padding % of data"]
    header += [f"ABL ({args.unit})", f"Sum of batch lengths ({args.unit})", "Largest batch (clips)"]
    header += ["Time saved: recurrent, parallel"] + ["Paper: batches, ZPR %, ABL"] * args.paper
    lines = [f"| {' | '.join(header)} |", "|---|---|" + "---:|" * (len(header) - 2)]
    parameters = {"SSB": f"LRF {args.lrf:g}", "BKT": f"bucket size {args.bucket_size}"}
    parameters["ATS"] = f"{args.n_bins} bins"
    for name, (mean, sd) in epochs.items():
        cells = [
            name,
            parameters.get(name.removesuffix("-DBS"), ""),
            f"{mean.n_batches:,.1f} ± {sd.n_batches:,.1f}",
            f"{100 * mean.zpr:.2f} ± {100 * sd.zpr:.2f}",
            f"{100 * mean.zpr_of_data:.2f} ± {100 * sd.zpr_of_data:.2f}",
            f"{mean.abl:,.1f} ± {sd.abl:,.1f}",
            f"{mean.total_length:,.0f} ± {sd.total_length:,.0f}",
            f"{mean.max_batch_size:,.0f}",
            ", ".join(f"{100 * saved:.1f} %" for saved in time_saved(epochs, name)),
        ]
        lines.append(f"| {' | '.join(cells + [paper_cell(name)] * args.paper)} |")
    return lines


def time_saved(
    epochs: dict[str, tuple[BatchStatistics, BatchStatistics]], name: str
) -> tuple[float, float]:
    """Predicted share of RAND's time that ``name`` saves: if time follows the sum of the batches'
    lengths, as in a recurrent network on a GPU, and if it follows the padded size."""
    (random, _), (mean, _) = epochs["RAND"], epochs[name]
    return (
        1 - mean.total_length / random.total_length,
        1 - (1 + mean.zpr_of_data) / (1 + random.zpr_of_data),
    )


def recommendation(
    lengths: ndarray, epochs: dict[str, tuple[BatchStatistics, BatchStatistics]], args: Namespace
) -> str:
    """Which strategy to use for these lengths, and why."""
    random, mean = epochs["RAND"][0], epochs["SSB-DBS"][0]
    recurrent, parallel = time_saved(epochs, "SSB-DBS")
    if random.zpr < 0.02:
        return (
            f"Recommended: RAND, random batches. They are only {random.zpr:.1%} padding, since the "
            "clips are nearly equally long."
        )
    text = (
        f"Recommended: SSB with DBS and BR, lrf={args.lrf:g}. Its batches are {mean.zpr:.1%} "
        f"padding, random ones {random.zpr:.1%}; noise in the order (LRF) and BR keep those of "
        "every epoch new."
    )
    fewer = 1 - mean.n_batches / random.n_batches
    if fewer > 0.1:
        text += (
            f" An epoch has {fewer:.0%} fewer updates, {mean.n_batches:,.0f} instead of "
            f"{random.n_batches:,.0f}: train for more epochs, or lower the batch size."
        )
    common, longest = np.quantile(lengths, 0.99), lengths.max()
    if longest > 1.5 * common:
        text += (
            f" The longest clip, {longest:,}, is {longest / common:.1f} times as long as 99 % of "
            f"the clips, and decides the batch capacity: split_long() cuts such clips, or give "
            f"capacity={round(args.batch_size * common)} and oversize='alone'."
        )
    return (
        f"{text} It should save {recurrent:.0%} of an epoch's time in a recurrent network, "
        f"{parallel:.0%} if the padded size decides."
    )


def paper_cell(batching: str) -> str:
    """The paper's number of batches (Sec. 4), and its ZPR and ABL (Table 2), which BR leaves."""
    if batching not in PAPER_BATCHES:
        return "–"
    row = PAPER.get(batching) or PAPER.get(f"{batching}-BR")
    numbers = f"{row['zpr']:.2f}, {row['abl']:.2f}" if row else "–, –"
    return f"{PAPER_BATCHES[batching]}, {numbers}"


def draw_batches(
    lengths: ndarray,
    args: Namespace,
    name: str,
    batch_size: int,
    lrf: float,
    content: str,
    titles: dict,
) -> None:
    """Clips as bars in training order, one colour per batch, padding hatched; a panel for each
    method of ``titles``, such as SSB-DBS-BR, three in a row."""
    rows = len(titles) // 3
    figure = Figure(figsize=(9, 0.5 + 2.6 * rows), layout="constrained")
    content = f"{len(lengths)} clips at random; {content}, LRF {lrf:g}"
    figure.suptitle(content, x=0.01, ha="left", fontsize=9)
    axes = figure.subplots(rows, 3, sharey=True, sharex=True, squeeze=False)
    settings = {"lrf": lrf, "bucket_size": 12, "n_bins": 4}
    n = len(lengths)
    x = np.arange(n) + 0.5
    for ax, (method, title) in zip(axes.flat, titles.items(), strict=True):
        strategy, dynamic, shuffled = method.split("-")[0], "DBS" in method, "-BR" in method
        plan = plan_batches(lengths, strategy, batch_size, dynamic, shuffled, **settings)
        heights = lengths[plan.order]
        longest = np.repeat([lengths[batch].max() for batch in plan], plan.sizes)
        colours = [COLOURS[j % len(COLOURS)] for j, batch in enumerate(plan) for _ in batch]
        ax.bar(x, heights, 0.86, color=colours)
        ax.bar(x, longest - heights, 1, bottom=heights, **PADDING)
        epoch = batch_statistics(lengths, plan)
        text = f"ZPR {epoch.zpr:.1%}, ABL {epoch.abl:.0f}, {epoch.n_batches} batches"
        ax.annotate(text, (0, 1), (0, 5), "axes fraction", "offset points", fontsize=9)
        ax.set_title(title, loc="left", fontweight="bold", fontsize=10, pad=18)
        ax.set(xlim=(0, n), xticks=range(0, n + 1, 8 if rows == 1 else 12))
    axes[0, 0].legend([Patch(**PADDING)], ["padding"], **LEGEND)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"length ({args.unit})")
    for ax in axes[-1]:
        ax.set_xlabel("clips, in the order of training")
    save(figure, args, name, content)


def draw_histogram(lengths: ndarray, args: Namespace) -> None:
    """How many clips have which length."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.hist(lengths, bins=min(60, int(np.ptp(lengths)) + 1), color=COLOURS[0])
    for share, style in ((0.5, "-"), (0.99, "--")):
        length = np.quantile(lengths, share)
        label = f"{share:.0%} are up to {length:,.0f} long"
        axes.axvline(length, color="black", linestyle=style, linewidth=1, label=label)
    axes.set(xlabel=f"length ({args.unit})", ylabel="clips")
    axes.legend(frameon=False)
    save(figure, args, "lengths", f"{len(lengths):,} clips, the longest {lengths.max():,}")


def draw_parameters(lengths: ndarray, args: Namespace) -> None:
    """Figure 2: ZPR over each parameter, and an epoch's batch lengths with the value selected."""
    clips = subset(lengths, args.train_size, 0)
    n, batch_size = len(clips), args.batch_size
    bucket_sizes = np.geomspace(min(batch_size, n), n, 40).astype(int)
    numbers_of_bins = np.geomspace(1, max(n // batch_size, 2), 40).astype(int)
    curves = {  # strategy: (colour, label, values of its parameter)
        "SSB": (COLOURS[0], "local randomisation factor", np.linspace(0, max(2, args.lrf), 41)),
        "BKT": (COLOURS[2], "bucket size (clips)", np.unique(bucket_sizes)),
        "ATS": (COLOURS[3], "number of bins", np.unique(numbers_of_bins)),
    }

    def mean_zpr(strategy: str, **parameter: float) -> float:
        fixed = {"dynamic_batch_size": False, **parameter}
        return 100 * statistics(lengths, args, min(args.seeds, 5), strategy, **fixed)[0].zpr

    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots(2, 3, sharey="row")
    random_zpr = mean_zpr("RAND")
    for column, (strategy, (colour, label, values)) in enumerate(curves.items()):
        above, below = axes[:, column]
        name = PARAMETERS[strategy]
        points = [mean_zpr(strategy, **{name: value}) for value in values.tolist()]
        above.plot(values, points, color=colour, linewidth=2)
        above.axhline(random_zpr, color="#777777", linestyle="--", linewidth=1)
        where = (0, random_zpr), (4, 2), ("axes fraction", "data"), "offset points"
        above.annotate("RAND", *where, va="bottom", color="#555555")
        selected, zpr = getattr(args, name), mean_zpr(strategy)
        above.plot(selected, zpr, "o", color="black", markersize=5)
        where = (selected, zpr), (8, -6), "data", "offset points"
        above.annotate(f"{selected:g}: {zpr:.2f} %", *where, va="top", fontweight="bold")
        above.set_title(f"({'abc'[column]}) {strategy}", loc="left", fontweight="bold", fontsize=10)
        above.set(xlabel=label, ylim=(0, 1.12 * random_zpr or 1))
        if strategy != "SSB":
            above.set_xscale("log", base=2)
            above.xaxis.set_major_formatter("{x:g}")

        plan = plan_batches(clips, strategy, batch_size, False, False, **{name: selected})
        abl = batch_statistics(clips, plan).abl
        below.plot([clips[batch].max() for batch in plan], color=colour, linewidth=0.8)
        below.axhline(abl, color="black", linewidth=1.2)
        below.set_title(f"black: ABL {abl:.0f} {args.unit}", loc="left", fontsize=9)
        below.set(xlabel="batch, before randomisation", ylim=(0, 1.05 * clips.max()))
    axes[0, 0].set_ylabel("ZPR (%)")
    axes[1, 0].set_ylabel(f"batch length ({args.unit})")
    save(figure, args, "figure2", "the table's parameters, in fixed batches")


def save(figure: Figure, args: Namespace, name: str, content: str) -> None:
    path = args.output_dir / f"{name}.png"
    figure.savefig(path, dpi=200)
    print(f"wrote {path} ({content})")


def draw_all(lengths: ndarray, args: Namespace) -> None:
    """Figures 1 to 3, the picture of the strategies, and the histogram, in ``args.output_dir``."""
    draw_histogram(lengths, args)
    draw = partial(draw_batches, subset(lengths, EXAMPLE_CLIPS, 0), args)
    titles = {"RAND": "(a) RAND", "SB": "(b) SB", "SSB": "(c) SSB"}
    draw("figure1", 8, FIGURE_LRF, "batches of 8", titles)
    titles = {f"{method}-DBS": f"{title}-DBS" for method, title in titles.items()}
    draw("figure3", 8, FIGURE_LRF, "base batch size 8", titles)
    draw_parameters(lengths, args)
    titles = {
        "RAND": "RAND: random",
        "SB": "SB: sorted",
        "SSB": f"SSB: semi-sorted, LRF {args.lrf:g}",
        "BKT": "BKT: buckets of 12",
        "ATS": "ATS: alternated sorting, 4 bins",
        "SSB-DBS-BR": "SSB-DBS-BR: dynamic, shuffled",
    }
    draw("strategies", 4, args.lrf, "batches of 4, buckets of 12, 4 bins", titles)


def parse_args() -> Namespace:
    parser = ArgumentParser(
        description="Print what each strategy does with clips of any lengths, by default the "
        "13,100 of LJSpeech, recommend one, and draw the lengths, every strategy, and the paper's "
        "Figures 1-3."
    )
    source = "numbers, one a line; CSV; Kaldi's utt2dur or utt2num_frames; a manifest in JSON; or "
    source += "a folder of audio. Seconds become frames of 10 ms"
    add = parser.add_argument
    add("lengths", nargs="?", type=Path, metavar="LENGTHS", help=source)
    column = "column or JSON key (default: frames, length, samples, tokens, duration, or the only "
    add("--column", metavar="NAME", help=f"{column}one with numbers)")
    hop = f"samples per frame; not with LENGTHS (default: {HParams.hop_length})"
    add("--hop_length", type=positive, metavar="N", help=hop)
    add("--unit", default="frames", help="of the lengths, for labels (default: %(default)s)")
    add("--train_size", type=positive, metavar="N", help="N random clips per seed (default: all)")
    seeds = "random draws to average over (%(default)s)"
    add("--seeds", type=positive, default=30, metavar="N", help=seeds)
    for name, what in (
        ("batch_size", "clips per batch; the base size with DBS"),
        ("lrf", "SSB's local randomisation factor"),
        ("bucket_size", "BKT's clips per bucket"),
        ("n_bins", "ATS's number of bins"),
    ):
        default, kind = getattr(HParams, name), float if name == "lrf" else positive
        add(f"--{name}", type=kind, default=default, metavar="N", help=f"{what} ({default})")
    target = "choose lrf, bucket_size and n_bins for this ZPR, such as 0.05, with DBS"
    add("--target_zpr", type=float, metavar="ZPR", help=target)
    add("--paper", action="store_true", help="show the paper's values too")
    folder = Path("runs/batching")
    add("--output_dir", type=Path, default=folder, metavar="DIR", help="for figures (%(default)s)")
    args = parser.parse_args()
    if args.lengths is not None and args.hop_length is not None:
        parser.error(f"--hop_length {args.hop_length}: LENGTHS are in frames already; leave it out")
    if args.seeds < 2:
        parser.error(f"--seeds {args.seeds}: use 2 or more, for their spread")
    return args


def get_lengths(args: Namespace) -> ndarray:
    """The lengths from the source that was given."""
    if args.lengths is not None:
        return read_lengths(args.lengths, args.column)
    print("no lengths given; using LJSpeech's")
    return ljspeech_lengths(args.hop_length or HParams.hop_length)


def main() -> None:
    args = parse_args()
    lengths = get_lengths(args)
    n = len(lengths)
    if n < EXAMPLE_CLIPS:
        raise UserError(f"{n} clips: the figures need {EXAMPLE_CLIPS} or more")
    train_size = args.train_size or n
    if train_size > n:
        raise UserError(f"--train_size {train_size}: use 1 to {n}, all clips")
    try:
        if args.target_zpr is not None:
            clips = subset(lengths, args.train_size, 0)
            wanted = {"target_zpr": args.target_zpr, "batch_size": args.batch_size}
            wanted["dynamic_batch_size"] = True  # as recommended
            for strategy, name in PARAMETERS.items():
                setattr(args, name, solve_randomness(clips, strategy, **wanted))
        epochs = all_statistics(lengths, args)
    except ValueError as error:  # of lrf or target_zpr
        raise UserError(f"--{error}") from None
    print(f"{train_size:,} of {n:,} clips, batch size {args.batch_size};", end=" ")
    print(f"mean ± sd over {args.seeds} seeds. BR changes none of these.\n")
    print(*table(epochs, args), "", sep="\n")
    print(recommendation(lengths, epochs, args), end="\n\n")
    make_folder(args.output_dir)
    with rc_context(STYLE):
        draw_all(lengths, args)


if __name__ == "__main__":
    exit_on_user_error(main)
