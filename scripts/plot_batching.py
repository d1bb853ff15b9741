"""Print a table of what each batching strategy does with clips of any lengths, and draw the paper's
Figures 1 to 3 of them.

    python scripts/plot_batching.py                  # 10,480 of LJSpeech's clips, as in the paper
    python scripts/plot_batching.py lengths.txt --hparams batch_size=32,lrf=0.2
    python scripts/plot_batching.py filelists/mine_train.txt --hparams data_dir=data/mine

The paper is Ge et al., "Speed up training with variable length inputs by efficient batching
strategies", Interspeech 2021.
"""

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy import ndarray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import STRATEGIES, Batching, batch_statistics, plan_batches, read_batching
from cli import ArgumentParser, UserError, exit_on_user_error, make_folder, positive
from corpus.clips import load_clips, read_lines
from hparams import HParams, create_hparams

ROOT = Path(__file__).resolve().parent.parent
TRAIN_SIZE = 10_480  # clips in the paper's training set, of LJSpeech's 13,100
# Okabe and Ito's colours, which do not rely on telling red from green.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
PADDING_STYLE = {"facecolor": "#ececec", "edgecolor": "#a8a8a8", "hatch": "////", "linewidth": 0}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


# Lengths


def ljspeech_samples(n_samples: int) -> list[ndarray]:
    """Returns as many random training sets of LJSpeech's lengths, in frames of 12.5 ms."""
    lengths = pd.read_csv(ROOT / "filelists" / "ljspeech_lengths.csv").frames_hop276.to_numpy()
    return [subset(lengths, TRAIN_SIZE, seed) for seed in range(n_samples)]


def subset(lengths: ndarray, size: int, seed: int) -> ndarray:
    return np.random.default_rng([seed, 1]).choice(lengths, size, replace=False)


def read_lengths(path: Path, hparams: HParams) -> ndarray:
    """Reads lengths, int64, (n,): the frames of a filelist's clips, or numbers, one a line. If any
    number has decimals, all are seconds, which become frames of 10 ms.

    Raises:
        UserError: the file cannot be read, a clip has a problem, or a line has no length.
    """
    lines = read_lines(path)
    if not lines:
        raise UserError(f"{path}: has no lengths; write a number a line, or the lines path|text")
    if "|" in lines[0][1]:
        return np.array([clip.n_frames for clip in load_clips(str(path), hparams)])
    values = []
    for location, line in lines:
        try:
            values.append(float(line))
        except ValueError:
            values.append(0)
        if not 0 < values[-1] < 1e9:
            raise UserError(f"{location}: {line!r}: give a number above 0, or the lines path|text")
    if all(float(value).is_integer() for value in values):
        return np.array(values).astype(np.int64)
    print(f"{path}: lengths in seconds, as frames of 10 ms")
    return np.array([max(round(100 * value), 1) for value in values])


# The table


def mean_statistics(
    samples: list[ndarray], strategy: str, **settings: object
) -> tuple[pd.Series, pd.Series]:
    """Returns mean and standard deviation over plans of the samples, each with its own seed."""
    statistics = []
    for seed, lengths in enumerate(samples):
        plan = plan_batches(lengths, strategy, seed=seed, **settings)
        statistics.append(batch_statistics(lengths, plan))
    table = pd.DataFrame(statistics)
    return table.mean(), table.std()


def table(samples: list[ndarray], settings: dict[str, float]) -> list[str]:
    """Returns the lines of a Markdown table: means and standard deviations over the samples. The
    time saved is a prediction: if time follows the sum of the batches' lengths, as in a recurrent
    network on a GPU; and if it follows the padded size."""
    header = ["Batching", "Settings", "Batches", "ZPR %", "Padding % of data", "ABL (frames)"]
    header += ["Sum of batch lengths (frames)", "Largest batch (clips)"]
    header += ["Time saved: recurrent, parallel"]
    lines = [f"| {' | '.join(header)} |", "|---|---|" + "---:|" * (len(header) - 2)]
    random, _ = mean_statistics(samples, "RAND", dynamic_batch_size=False, **settings)
    for dynamic, strategy in product((False, True), STRATEGIES):
        mean, sd = mean_statistics(samples, strategy, dynamic_batch_size=dynamic, **settings)
        recurrent = 1 - mean.total_length / random.total_length
        parallel = 1 - (1 + mean.zpr_of_data) / (1 + random.zpr_of_data)
        cells = [
            str(Batching(strategy, dynamic)),
            ", ".join(f"{name}={settings[name]}" for name in STRATEGIES[strategy].settings),
            f"{mean.n_batches:,.1f} ± {sd.n_batches:,.1f}",
            f"{100 * mean.zpr:.2f} ± {100 * sd.zpr:.2f}",
            f"{100 * mean.zpr_of_data:.2f} ± {100 * sd.zpr_of_data:.2f}",
            f"{mean.abl:,.1f} ± {sd.abl:,.1f}",
            f"{mean.total_length:,.0f} ± {sd.total_length:,.0f}",
            f"{mean.max_batch_size:,.0f}",
            f"{100 * recurrent:.1f} %, {100 * parallel:.1f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# The figures


def draw_batches(
    lengths: ndarray, path: Path, methods: list[str], batch_size: int, settings: dict[str, float]
) -> None:
    """Draws clips as bars in training order, one colour per batch, padding hatched; a panel for
    each of ``methods``, such as SSB-DBS-BR, three in a row."""
    n, rows = len(lengths), -(-len(methods) // 3)
    figure = Figure(figsize=(9, 0.5 + 2.6 * rows), layout="constrained")
    content = [f"{n} clips at random", f"batch_size={batch_size}"]
    content += [f"{name}={value:g}" for name, value in settings.items()]
    figure.suptitle(", ".join(content), x=0.01, ha="left", fontsize=9)
    axes = figure.subplots(rows, 3, sharey=True, sharex=True, squeeze=False)
    x = np.arange(n) + 0.5
    for ax in axes.flat[len(methods) :]:
        ax.set_axis_off()
    for ax, method in zip(axes.flat, methods, strict=False):
        strategy, dynamic, shuffled = read_batching(method)
        plan = plan_batches(lengths, strategy, batch_size, dynamic, shuffled, **settings)
        heights = lengths[np.concatenate(plan)]
        longest = np.concatenate([[lengths[batch].max()] * len(batch) for batch in plan])
        colours = [COLOURS[j % len(COLOURS)] for j, batch in enumerate(plan) for _ in batch]
        ax.bar(x, heights, 0.86, color=colours)
        ax.bar(x, longest - heights, 1, bottom=heights, **PADDING_STYLE)
        epoch = batch_statistics(lengths, plan)
        text = f"ZPR {epoch.zpr:.1%}, ABL {epoch.abl:.0f}, {epoch.n_batches} batches"
        ax.annotate(text, (0, 1), (0, 5), "axes fraction", "offset points", fontsize=9)
        ax.set_title(method, loc="left", fontweight="bold", fontsize=10, pad=18)
        ax.set(xlim=(0, n), xticks=range(0, n + 1, 8))
    padding = Patch(**PADDING_STYLE, label="padding")
    axes[0, 0].legend(
        handles=[padding], loc="lower right", bbox_to_anchor=(1, 1.095), frameon=False, borderpad=0
    )
    for ax in axes[:, 0]:
        ax.set_ylabel("length (frames)")
    for ax in axes[-1]:
        ax.set_xlabel("clips, in the order of training")
    figure.savefig(path, dpi=200)


def draw_parameters(samples: list[ndarray], path: Path, settings: dict[str, float]) -> None:
    """Draws Figure 2: ZPR over each parameter, and an epoch's batch lengths with the value
    selected."""
    lengths, batch_size = samples[0], settings["batch_size"]
    n = len(lengths)
    bucket_sizes = np.geomspace(min(batch_size, n), n, 40).astype(int)
    numbers_of_bins = np.geomspace(1, max(n // batch_size, 2), 40).astype(int)
    curves = [  # strategy, the name of its parameter, label, values, colour
        ("SSB", "lrf", "local randomisation factor", np.linspace(0, 2, 41), COLOURS[0]),
        ("BKT", "bucket_size", "bucket size (clips)", np.unique(bucket_sizes), COLOURS[2]),
        ("ATS", "n_bins", "number of bins", np.unique(numbers_of_bins), COLOURS[3]),
    ]

    def zpr_percent(strategy: str, **parameter: float) -> float:
        changed = settings | parameter
        mean, _ = mean_statistics(samples[:5], strategy, dynamic_batch_size=False, **changed)
        return 100 * mean.zpr

    figure = Figure(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots(2, 3, sharey="row")
    random_zpr = zpr_percent("RAND")
    for panel, (above, below), curve in zip("abc", axes.T, curves, strict=True):
        strategy, name, label, values, colour = curve
        points = [zpr_percent(strategy, **{name: value}) for value in values.tolist()]
        above.plot(values, points, color=colour, linewidth=2)
        above.axhline(random_zpr, color="#777777", linestyle="--", linewidth=1, label="RAND")
        zpr = zpr_percent(strategy)
        selected = f"{settings[name]:g}: {zpr:.2f} %"
        above.plot(settings[name], zpr, "o", color="black", markersize=5, label=selected)
        above.legend(frameon=False)
        above.set_title(f"({panel}) {strategy}", loc="left", fontweight="bold", fontsize=10)
        above.set(xlabel=label, ylim=(0, 1.12 * random_zpr or 1))
        if strategy != "SSB":
            above.set_xscale("log", base=2)
            above.xaxis.set_major_formatter("{x:g}")

        plan = plan_batches(
            lengths, strategy, dynamic_batch_size=False, batch_randomization=False, **settings
        )
        abl = batch_statistics(lengths, plan).abl
        below.plot([lengths[batch].max() for batch in plan], color=colour, linewidth=0.8)
        below.axhline(abl, color="black", linewidth=1.2)
        below.set_title(f"black: ABL {abl:.0f} frames", loc="left", fontsize=9)
        below.set(xlabel="batch, before randomisation", ylim=(0, 1.05 * lengths.max()))
    axes[0, 0].set_ylabel("ZPR (%)")
    axes[1, 0].set_ylabel("batch length (frames)")
    figure.savefig(path, dpi=200)


def draw_all(samples: list[ndarray], folder: Path, settings: dict[str, float]) -> None:
    """Draws Figures 1 to 3, and every strategy on a few clips, in ``folder``."""
    few = subset(samples[0], min(48, len(samples[0])), 0)
    paper = {"lrf": 0.15}  # of its Figure 1
    draw_batches(few, folder / "figure1.png", ["RAND", "SB", "SSB"], 8, paper)
    draw_parameters(samples, folder / "figure2.png", settings)
    draw_batches(few, folder / "figure3.png", ["RAND-DBS", "SB-DBS", "SSB-DBS"], 8, paper)
    small = {"lrf": settings["lrf"], "bucket_size": 12, "n_bins": 4}
    draw_batches(few, folder / "strategies.png", [*STRATEGIES, "SSB-DBS-BR"], 4, small)
    print(f"wrote figure1.png to figure3.png and strategies.png in {folder}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    source = (
        "a file of numbers, one a line (frames, or seconds, which become frames of 10 ms), or a "
        f"filelist (default: {TRAIN_SIZE:,} of LJSpeech's clips, as in the paper)"
    )
    add("lengths", nargs="?", type=Path, metavar="LENGTHS", help=source)
    add("--hparams", default="", metavar="NAME=VALUE,...", help="settings of batching, and of data")
    seeds = "random draws to average over (%(default)s)"
    add("--seeds", type=positive, default=30, metavar="N", help=seeds)
    folder = "for figures (%(default)s)"
    add("--output_dir", type=Path, default="runs/batching", metavar="DIR", help=folder)
    args = parser.parse_args(argv)
    if args.seeds < 2:
        parser.error(f"--seeds {args.seeds}: use 2 or more, for their spread")
    hparams = create_hparams(args.hparams)
    if hparams.batch_capacity or hparams.batch_capacity_seconds:
        parser.error("argument --hparams: batches here have batch_size's capacity; set that")
    if args.lengths:
        samples = [read_lengths(args.lengths, hparams)] * args.seeds
    else:
        samples = ljspeech_samples(args.seeds)
    names = {name for strategy in STRATEGIES.values() for name in strategy.settings}
    settings = {name: getattr(hparams, name) for name in ("batch_size", *names)}
    make_folder(args.output_dir)
    print(f"{len(samples[0]):,} clips, base batch size {hparams.batch_size};", end=" ")
    print(f"mean ± sd over {args.seeds} seeds. BR changes none of these.\n")
    print(*table(samples, settings), "", sep="\n")
    with rc_context(STYLE):
        draw_all(samples, args.output_dir, settings)


if __name__ == "__main__":
    exit_on_user_error(main)
