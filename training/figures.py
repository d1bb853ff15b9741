"""Figures of attention, mels and gates, in a run's logs and beside a model's speech.

They use matplotlib's object interface, which has no global state and needs no display.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from layers import end_probability
from training.validation import Sample

MAX_NAMED = 60  # symbols beside a picture of attention
# The font draws a box for each character that it lacks, and would warn of each in each picture.
warnings.filterwarnings("ignore", "Glyph .* missing from")


def draw_alignment(
    alignment: Tensor, text: str, symbols: Sequence[str], hop_seconds: float
) -> Figure:
    """Draws attention weights (T_out, T_in) over time, and names the ``T_in`` symbols."""
    figure, (axes,) = _figure(4)
    image = _show(axes, alignment.T, hop_seconds)
    figure.colorbar(image, label="attention weight")
    _set_title(axes, text)
    axes.set(xlabel="time (s)")
    _name_symbols(axes, symbols)
    return figure


def draw_speech(
    alignments: Sequence[Tensor],
    mel: Tensor,
    text: str,
    symbols: Sequence[str],
    hop_seconds: float,
    pause: int = 0,
) -> Figure:
    """Draws the attention weights of the pieces of a text, one after the other with pauses of
    ``pause`` frames, above the mel of the whole text, and names the ``symbols`` of all pieces."""
    figure, (above, below) = _figure(6, 2)
    first_frame = first_symbol = 0
    for alignment in alignments:
        corner = first_frame, first_symbol
        image = _show(above, alignment.T, hop_seconds, corner, vmin=0, vmax=1)
        first_frame += len(alignment) + pause
        first_symbol += alignment.size(1)
    above.set(xlim=(0, mel.size(1) * hop_seconds), ylim=(0, first_symbol))
    _name_symbols(above, symbols)
    above.set_facecolor(image.cmap(0.0))
    _set_title(above, text)
    figure.colorbar(image, ax=above, label="attention weight")
    image = _show(below, mel, hop_seconds, cmap="magma")
    figure.colorbar(image, ax=below, label="ln magnitude")
    below.set(xlabel="time (s)", ylabel="mel channel")
    return figure


def draw_mels(sample: Sample, hop_seconds: float) -> Figure:
    """Draws the target above the prediction, in the same range of colours."""
    figure, (above, below) = _figure(5, 2)
    image = _show(above, sample.mel, hop_seconds, cmap="magma")
    _show(below, sample.mel_postnet, hop_seconds, cmap="magma", norm=image.norm)
    above.set(ylabel="mel channel", title="target")
    below.set(ylabel="mel channel", title="predicted", xlabel="time (s)")
    figure.colorbar(image, ax=(above, below), label="ln magnitude")
    return figure


def draw_gate(sample: Sample, step_seconds: float, end_steps: int) -> Figure:
    """Draws the probability that the clip has ended in the last ``end_steps`` steps, and its
    target."""
    figure, (axes,) = _figure(2.5)
    seconds = np.arange(len(sample.gate)) * step_seconds
    axes.plot(seconds, sample.gate_target.numpy(), color="0.7", label="target")
    predicted = end_probability(sample.gate[None], end_steps)[0]
    axes.plot(seconds, predicted.numpy(), label="predicted")
    axes.set(xlabel="time (s)", ylabel="has ended: probability", ylim=(-0.05, 1.05))
    axes.legend(loc="upper left", frameon=False)
    return figure


def render(figure: Figure) -> np.ndarray:
    """Returns a figure's pixels (height, width, 4) uint8."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def _figure(height: float, rows: int = 1) -> tuple[Figure, Any]:
    """Returns a figure and its axes, one below the other."""
    figure = Figure(figsize=(8, height), dpi=100)
    # matplotlib's own tight layout would take longer than drawing.
    figure.subplots_adjust(0.75 / 8, 0.5 / height, 1 - 0.2 / 8, 1 - 0.35 / height, hspace=0.25)
    return figure, figure.subplots(rows, squeeze=False, sharex=True)[:, 0]


def _show(
    axes: Any,
    values: Tensor,
    hop_seconds: float,
    corner: tuple[int, int] = (0, 0),
    **colours: Any,
) -> Any:
    """Shows an image of ``values`` (n_rows, T_out) over seconds, from the frame and the row of its
    lower left ``corner`` on."""
    first_frame, first_row = corner
    n_rows, n_frames = values.shape
    left, right = first_frame * hop_seconds, (first_frame + n_frames) * hop_seconds
    extent = left, right, first_row, first_row + n_rows
    return axes.imshow(values.numpy(), aspect="auto", origin="lower", extent=extent, **colours)


def _name_symbols(axes: Any, symbols: Sequence[str]) -> None:
    """Names the rows of an image, all or as many as there is room for."""
    step = -(-len(symbols) // MAX_NAMED)
    rows = range(0, len(symbols), step)
    axes.set_yticks([i + 0.5 for i in rows], [symbols[i] for i in rows], size=5, parse_math=False)
    axes.set(ylabel="symbol")


def _set_title(axes: Any, text: str) -> None:
    title = text if len(text) <= 75 else f"{text[:74]}…"
    axes.set_title(title, loc="left", parse_math=False)  # a $ is a dollar
