"""One HTML file about runs of train.py, finished or not: to share, and to read without TensorBoard.

    python scripts/report.py runs/first                # writes runs/first/report.html
    python scripts/report.py runs/demo -o demo.html    # all runs in a folder, side by side

Pictures and audio are inside the file, thinned out so that it stays within a few megabytes. The
same runs give the same file.
"""

import io
import logging
import math
import re
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from files import make_folder, replacing
from hparams import HParams
from scripts.plot_batching import COLOURS, STYLE
from scripts.runs import Run, load_runs, names_of, unequal_conditions

LINES = {"-": "solid", "--": "dashed", ":": "dotted"}  # matplotlib's name: CSS's
PICTURES, SOUNDS = 3e6, 2e6  # bytes in the file that all pictures over time, and all sounds, get
MOST_PICTURES = 6  # of an alignment over time
CURVES = {  # title: (Run's records, scalar)
    "Validation loss": ("validations", "loss"),
    "Masked validation loss (without padding)": ("validations", "masked_loss"),
    "Training loss": ("epochs", "training_loss"),
    "Alignment in validation (1: on the diagonal)": ("validations", "diagonality"),
}
RESULTS = {  # heading: quantity and format
    "epochs": "{epochs}",
    "steps": "{step:,}",
    "validation loss": "{loss:.4f}",
    "masked": "{masked_loss:.4f}",
    "alignment": "{diagonality:.2f}",
    "lowest validation loss": "{lowest[loss]:.4f}",
    "training loss": "{training_loss:.4f}",
    "minutes": "{total_minutes:.1f}",
    "skipped steps": "{skipped}",
}
BATCHING = {
    "batches": "{n_batches:,.1f}",
    "ZPR (%)": "{zpr:.2f}",
    "ABL (frames)": "{abl:.1f}",
    "decoder steps": "{total_length:,.0f}",
    "minutes": "{minutes:.2f}",
    "frames per second": "{frames_per_second:,.0f}",
    "peak memory (GiB)": "{peak_memory_gib:.2f}",
}
CSS = """
:root { color-scheme: light dark; --text: #1b1b1b; --faint: #666; --line: #d5d5d5; --back: #fff; }
body { margin: 0 auto; max-width: 62rem; padding: 0 1rem 3rem; color: var(--text);
  background: var(--back); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .5rem; border-bottom: 1px solid var(--line); }
h3 { margin: 1.5rem 0 .25rem; font-size: 1rem; }
figcaption, caption, .note { color: var(--faint); font-size: .875rem; text-align: left; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .75rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: bottom; overflow-wrap: normal; }
th:first-child { position: sticky; left: 0; background: var(--back); white-space: nowrap; }
th:first-child, .text * { text-align: left; }
.text td { min-width: 5rem; overflow-wrap: anywhere; }
.grid { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 18rem), 1fr)); }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); }
figure { margin: 0; }
img { display: block; max-width: 100%; height: auto; }
audio { width: 100%; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.5rem; list-style: none; padding: 0; }
.line { display: inline-block; width: 1.8rem; margin-right: .4rem; vertical-align: middle; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e4e4; --faint: #a0a0a0; --line: #444; --back: #151515; }
  .chart, .line { filter: invert(1) hue-rotate(180deg); }
}
"""


class Shown(NamedTuple):
    """A run, how it is drawn, and the events in its TensorBoard files by tag."""

    run: Run
    name: str
    colour: str
    line: str  # one of LINES
    images: dict[str, list[Any]]
    sounds: dict[str, Any]  # the last ones
    histograms: dict[str, Any]  # the last ones
    texts: dict[str, str]  # the last ones

    @property
    def label(self) -> str:
        style = f"border-top: 3px {LINES[self.line]} {self.colour}"
        return f'<i class="line" style="{style}"></i>{escape(self.name)}'

    def when(self, step: int) -> str:
        epochs = {record.get("step"): record["epoch"] + 1 for record in self.run.validations}
        n, unit = (epochs[step], "epoch") if step in epochs else (step, "step")
        return f"after {n:,} {unit}{'s' * (n != 1)}"

    def curve(self, title: str) -> tuple[list[float], list[float], list[float]]:
        """Epochs done, minutes of training, and one of CURVES."""
        source, name = CURVES[title]
        minutes = accumulate(record["minutes"] for record in self.run.epochs)
        ends = {record["epoch"]: end for record, end in zip(self.run.epochs, minutes, strict=True)}
        records = [r for r in getattr(self.run, source) if name in r and r["epoch"] in ends]
        epochs = [record["epoch"] for record in records]
        return [e + 1 for e in epochs], [ends[e] for e in epochs], [r[name] for r in records]

    def values(self) -> dict[str, Any]:
        """What RESULTS and BATCHING show, as far as it is known."""
        run = self.run
        values = {"epochs": f"{run.start + len(run.epochs)}/{run.settings['epochs']}"}
        if run.validations:
            values |= run.validations[-1]
            known = [record for record in run.validations if math.isfinite(record["loss"])]
            values |= {"lowest": min(known, key=lambda record: record["loss"])} if known else {}
        if run.epochs:
            values |= run.epochs[-1] | run.averages()
            values["total_minutes"] = sum(record["minutes"] for record in run.epochs)
            values["skipped"] = sum(record.get("skipped_steps", 0) for record in run.epochs)
        return values


def read_events(folder: Path) -> tuple[dict[str, Any], ...]:
    """The last four fields of :class:`Shown`."""
    from tensorboard.backend.event_processing import event_accumulator as tensorboard

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # resumed runs repeat steps
    kept = dict.fromkeys(tensorboard.DEFAULT_SIZE_GUIDANCE, 1) | {tensorboard.IMAGES: 0}
    events = tensorboard.EventAccumulator(str(folder), kept).Reload()
    tags, text = events.Tags(), "/text_summary"
    texts = {tag: events.Tensors(tag)[-1] for tag in tags["tensors"] if tag.endswith(text)}
    return (
        {tag: events.Images(tag) for tag in tags["images"]},
        {tag: events.Audio(tag)[-1] for tag in tags["audio"]},
        {tag: events.Histograms(tag)[-1].histogram_value for tag in tags["histograms"]},
        {t.removesuffix(text): e.tensor_proto.string_val[0].decode() for t, e in texts.items()},
    )


# Pieces of HTML


def table(caption: str, heads: Iterable[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """``rows`` are HTML, each with its name first."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    body = "\n".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    return (
        f'<div class="wide" tabindex="0"><table class="{kind}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"


def grid(pieces: Iterable[str], kind: str = "") -> str:
    return f'<div class="grid {kind}">' + "\n".join(pieces) + "</div>"


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def section(title: str, pieces: Iterable[str]) -> str:
    content = "\n".join(pieces)
    return f"<section><h2>{title}</h2>\n{content}\n</section>\n" if content else ""


def chart(title: str, xlabel: str, summary: str, draw: Callable[[Any], None]) -> str:
    """What ``draw`` draws on matplotlib's axes, from 0 on, as an SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A fixed salt and no date, for the same file each time.
    with rc_context(STYLE | {"axes.grid": True, "grid.alpha": 0.25, "svg.hashsalt": "report"}):
        figure, svg = Figure(figsize=(4.8, 3), layout="constrained"), io.BytesIO()
        ax = figure.subplots()
        draw(ax)
        ax.set_title(title, loc="left", fontsize=9.5)
        ax.set(xlabel=xlabel, xlim=(0, None))
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    alt = escape(f"{title}, {xlabel}: {summary}")
    source = data("image/svg+xml", svg.getvalue())
    return f'<figure><img class="chart" src="{source}" alt="{alt}"></figure>'


# Parts of the report


def numbers(runs: Sequence[Shown], caption: str, columns: dict[str, str]) -> str:
    rows = []
    for shown in runs:
        values, cells = shown.values(), [shown.label]
        for form in columns.values():
            known = re.match(r"{(\w+)", form)[1] in values
            cells.append(form.format(**values) if known else "–")
        rows.append(cells)
    return table(caption, ["run", *columns], rows)


def results(runs: Sequence[Shown]) -> Iterable[str]:
    """The numbers at the end, and in what the runs differ."""
    yield numbers(runs, "After the last epoch, and in the last validation", RESULTS)
    if unequal := unequal_conditions(shown.run for shown in runs):
        yield note(f"Times do not compare: {unequal}.")
    elif conditions := {c for shown in runs for c in shown.run.conditions}:
        yield note(f"Trained with {', '.join(*conditions)}.")
    every = [shown.run.settings for shown in runs]
    names = [n for n in every[0] if any(settings[n] != every[0][n] for settings in every)]
    if names:
        rows = [(s.label, *(escape(str(s.run.settings[name])) for name in names)) for s in runs]
        yield table("Settings that differ", ["run", *names], rows, "text")


def curves(runs: Sequence[Shown]) -> Iterable[str]:
    """All runs in a chart, over epochs and over time."""
    for title in CURVES:
        known = [(shown, *shown.curve(title)) for shown in runs]
        known = [curve for curve in known if np.isfinite(curve[-1]).any()]
        hours = max((curve[2][-1] for curve in known), default=0) > 120
        summary = ", ".join(f"{shown.name} {y[-1]:.4f} at the end" for shown, *_, y in known)

        def draw(ax: Any, over_time: bool, title=title, known=known, hours=hours) -> None:
            for shown, epochs, minutes, y in known:
                x = np.array(minutes) / (60 if hours else 1) if over_time else epochs
                form = {"color": shown.colour, "marker": "o" if len(x) <= 30 else ""}
                ax.plot(x, y, shown.line, markersize=3, **form)
            if "loss" in title:
                from matplotlib.ticker import MaxNLocator, NullLocator

                ax.set_yscale("log")  # separates small losses
                ax.yaxis.set_major_locator(MaxNLocator(6))
                ax.yaxis.set(major_formatter="{x:g}", minor_locator=NullLocator())
            else:
                ax.set_ylim(0, 1)

        if known:
            time = f"training time ({'hours' if hours else 'minutes'})"
            yield chart(title, "epochs", summary, lambda ax: draw(ax, False))
            yield chart(title, time, summary, lambda ax: draw(ax, True))


def batching(runs: Sequence[Shown]) -> Iterable[str]:
    """The numbers of an epoch, and histograms of the last."""
    caption = "An epoch (mean; times: median). ZPR: zero-padding rate. ABL: average batch length. "
    caption += "Decoder steps: the sum of the batches' lengths"
    yield numbers(runs, caption, BATCHING)
    charts = []
    for name, unit in {"lengths": "frames", "sizes": "clips"}.items():
        tag = f"epoch/batch_{name}"
        known = [(shown, shown.histograms[tag]) for shown in runs if tag in shown.histograms]
        summary = ", ".join(f"{shown.name} {h.min:g} to {h.max:g}" for shown, h in known)

        def draw(ax: Any, known=known) -> None:
            for shown, h in known:  # the first limit is where the first bar begins
                form = {"color": shown.colour, "linestyle": shown.line, "linewidth": 1.5}
                ax.stairs(h.bucket[1:], h.bucket_limit, **form)
            ax.set_ylabel("batches")

        if known:
            charts.append(chart(f"Batch {name} in the last epoch", unit, summary, draw))
    yield grid(charts, "charts")


def alignments(runs: Sequence[Shown]) -> Iterable[str]:
    """Alignments over time: of a validation clip, and of speech without teacher forcing."""
    shape = re.compile(r"(sample|speech/\d+)/alignment")
    series = [(s, tag) for s in runs for tag in sorted(s.images) if shape.match(tag)]
    for shown, tag in series:
        events, clip = shown.images[tag], tag.removesuffix("/alignment")
        largest = max(len(event.encoded_image_string) for event in events)
        n = min(len(events), MOST_PICTURES, int(PICTURES / len(series) / (4 / 3 * largest)))
        chosen = [events[i] for i in np.linspace(len(events) - 1, 0, n).round().astype(int)[::-1]]
        kind = "validation clip" if clip == "sample" else "synthesised"
        text = shown.texts.get(f"{clip}/text", "")
        yield f"<h3>{shown.label}, {kind}</h3>\n<p>{escape(text)}</p>"
        if n < len(events):
            yield note(f"{n} of {len(events)} pictures, to keep this file small.")
        pictures = []
        for event in chosen:
            when = shown.when(event.step)
            alt = escape(f"{shown.name}, {kind}, {when}: attention weights, characters over time")
            picture = data("image/png", event.encoded_image_string)
            caption = f"<figcaption>{when}</figcaption>"
            pictures.append(f'<figure><img src="{picture}" alt="{alt}">{caption}</figure>')
        yield grid(pictures)


def players(runs: Sequence[Shown]) -> Iterable[str]:
    """The last sounds, as far as they fit."""
    kinds = {"sample/target": "target", "sample/predicted": "predicted from the true frames"}
    size = n_left_out = 0
    for shown in runs:
        speech = (tag for tag in shown.sounds if re.fullmatch(r"speech/\d+/audio", tag))
        sounds = []
        for tag in (*kinds, *sorted(speech)):
            if tag not in shown.sounds:
                continue
            event, kind = shown.sounds[tag], kinds.get(tag, "synthesised")
            source = data(*as_mp3(event.encoded_audio_string))
            size += len(source)
            if size > SOUNDS:
                n_left_out += 1
                continue
            when = "" if kind == "target" else f", {shown.when(event.step)}"
            text = shown.texts.get(f"{tag.rpartition('/')[0]}/text", "")
            caption, label = escape(f"{kind}{when}: {text}"), escape(f"{shown.name}, {kind}{when}")
            audio = f'<audio controls preload="none" src="{source}" aria-label="{label}"></audio>'
            sounds.append(f"<figure>{audio}<figcaption>{caption}</figcaption></figure>")
        if sounds:
            yield f"<h3>{shown.label}</h3>\n{grid(sounds)}"
    if n_left_out:
        yield note(f"Left out, to keep this file small: {n_left_out} sounds. Name fewer runs.")


def as_mp3(wav: bytes) -> tuple[str, bytes]:
    """Its type and content; that of the wav at a sampling rate that MP3 does not have."""
    samples, rate = soundfile.read(io.BytesIO(wav))
    mp3 = io.BytesIO()
    try:
        soundfile.write(mp3, samples, rate, format="MP3")
    except (ValueError, soundfile.LibsndfileError):
        return "audio/wav", wav
    return "audio/mpeg", mp3.getvalue()


def settings(runs: Sequence[Shown]) -> Iterable[str]:
    """What all runs have in common, other values than the defaults first."""
    first, default = runs[0].run.settings, vars(HParams())
    same = [name for name in default if all(s.run.settings[name] == first[name] for s in runs)]
    rows = []
    for name in sorted(same, key=lambda name: first[name] == default[name]):
        other = escape(str(default[name])) if first[name] != default[name] else ""
        rows.append((name, escape(str(first[name])), other))
    caption = "Of all runs" if len(runs) > 1 else "Those that are not the defaults first"
    yield table(caption, ["setting", "value", "default, if other"], rows, "text")


def page(runs: Sequence[Shown]) -> str:
    names = ", ".join(shown.name for shown in runs[:3])
    title = escape(f"Training of {names}" + f" and {len(runs) - 3} more" * (len(runs) > 3))
    legend = "".join(f"<li>{shown.label}</li>" for shown in runs)
    charts = list(curves(runs)) or [note("No epoch has ended yet.")]
    body = (
        section("Results", results(runs)),
        section("Curves", [f'<ul class="legend">{legend}</ul>', grid(charts, "charts")]),
        section("Batching", batching(runs)),
        section("Alignment over time", alignments(runs)),
        section("Listen", players(runs)),
        section("Settings", settings(runs)),
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{CSS}</style></head>\n<body><h1>{title}</h1>\n{''.join(body)}</body></html>\n"
    )


def main() -> None:
    parser = ArgumentParser(description="Write one HTML file about runs, to read in a browser.")
    parser.add_argument("runs", nargs="+", type=Path, help="outputs of train.py or run_all.sh")
    where = "file to write (default: report.html in the first folder)"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=where)
    where = "TensorBoard's files, if train.py had --log_dir; once for each run, in their order"
    parser.add_argument("-l", "--log_dir", action="append", type=Path, metavar="DIR", help=where)
    args = parser.parse_args()
    runs, problems = load_runs(args.runs)
    if problems:
        raise UserError("\n".join(problems))
    folders = args.log_dir or [run.path for run in runs]
    if len(folders) != len(runs):
        parser.error(f"--log_dir is given {len(folders)} times, for {len(runs)} runs")
    output = args.output or args.runs[0] / "report.html"
    if output.suffix != ".html" or output.is_dir():
        raise UserError(f"-o {output}: give the name of a file that ends in .html")
    make_folder(output.parent)

    shown = []
    for i, (run, name, folder) in enumerate(zip(runs, names_of(runs), folders, strict=True)):
        if not any(folder.glob("*tfevents*")):
            problem = f"{folder}: has no TensorBoard files"
            if args.log_dir:
                raise UserError(f"--log_dir {problem}; name the folder that train.py wrote them to")
            print(f"note: {problem}: no pictures and audio; name their folder by --log_dir")
        line = list(LINES)[i // len(COLOURS) % len(LINES)]
        shown.append(Shown(run, name, COLOURS[i % len(COLOURS)], line, *read_events(folder)))
    content = page(shown).encode(errors="backslashreplace")
    with replacing(output) as file:
        file.write(content)
    print(f"wrote {output} ({len(content) / 1e6:.1f} MB)")


if __name__ == "__main__":
    exit_on_user_error(main)
