"""Write a page on which the speech of several models is heard side by side.

    python scripts/samples.py runs/RAND runs/SSB-DBS-BR -i sentences.txt -o samples.html

FILE has a text a line, or it is a filelist of lines path|text, whose recordings are then played too
(from the data_dir of the first model). The models speak through HiFi-GAN, if it has their mels, and
through Griffin-Lim. Below is their attention, symbols over time. Any browser opens the page.
"""

import base64
import sys
from html import escape
from io import BytesIO
from pathlib import Path

import numpy as np
import soundfile
from matplotlib.image import imsave
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, make_folder, replace_file
from corpus.clips import check_text, load_clips, read_lines, read_samples
from model import Tacotron2
from speech import load_model, speak
from training.checkpoint import find_checkpoint
from vocoder import open_vocoder, why_griffin_lim

HEAD = """<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Samples</title>
<style>
:root { color-scheme: light dark; font: 16px/1.4 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 75rem; padding: 0 1rem; overflow-wrap: anywhere }
section { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)) }
audio, img { display: block; width: 100% }
img { height: 5rem; image-rendering: pixelated }
</style>
<p>Below each voice is its attention, symbols over time.</p>
"""


def play(caption: str, samples: np.ndarray, rate: int) -> str:
    """Returns a player of samples (n,), which the page holds as MP3."""
    soundfile.write(mp3 := BytesIO(), samples, rate, format="MP3")
    data = base64.b64encode(mp3.getvalue()).decode()
    return f'<small>{caption}</small><audio controls src="data:audio/mpeg;base64,{data}"></audio>'


def draw(alignment: Tensor) -> str:
    """Returns a picture of attention weights (T_out, T_in)."""
    imsave(png := BytesIO(), alignment.mT.numpy(), vmin=0, vmax=1, cmap="magma", origin="lower")
    data = base64.b64encode(png.getvalue()).decode()
    return f'<img alt="attention" src="data:image/png;base64,{data}">'


def speak_texts(model: Tacotron2, texts: list[tuple[str, str]]) -> list[str]:
    """Returns players and a picture of the model's speech for each (location, text)."""
    ids, cells = [], [""] * len(texts)
    for location, text in texts:
        try:
            ids.append(check_text(text, model.hparams))
        except UserError as error:
            raise UserError(f"{location}: {error}") from None
    names = [] if why_griffin_lim(model.hparams) else [("HiFi-GAN", "universal")]
    names.append(("Griffin-Lim", "griffin-lim"))
    vocoders = {caption: open_vocoder(model.hparams, name) for caption, name in names}
    for i, spoken in speak(model, ids):
        end = "" if spoken.stopped else ", cut off: it never stopped"
        for caption, vocoder in vocoders.items():
            cells[i] += play(caption + end, vocoder(spoken.mel), model.hparams.sampling_rate)
        cells[i] += draw(spoken.alignment)
    return cells


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("models", nargs="+", type=find_checkpoint, metavar="RUN", help="folders, or checkpoints")
    add("-i", "--input", required=True, type=Path, metavar="FILE", help="texts, or a filelist")
    add("-o", "--output", required=True, type=Path, metavar="PAGE", help="a new .html file")
    args = parser.parse_args(argv)
    if args.output.exists():
        raise UserError(f"{args.output}: exists already; give another -o")
    if not (texts := read_lines(args.input)):
        raise UserError(f"{args.input}: has no texts; write one a line")
    make_folder(args.output.resolve().parent)
    models, columns = {path: load_model(path) for path in args.models}, {}
    if "|" in texts[0][1]:
        hparams = models[args.models[0]].hparams
        clips, rate = load_clips(str(args.input), hparams), hparams.sampling_rate
        texts = [(clip.location, clip.text) for clip in clips]
        columns["recording"] = [play("", read_samples(clip), rate) for clip in clips]
    columns |= {str(path): speak_texts(model, texts) for path, model in models.items()}
    page = HEAD
    for i, (_, text) in enumerate(texts):
        cells = [f"<div><h3>{escape(name)}</h3>{cell[i]}</div>" for name, cell in columns.items()]
        page += f"<h2>{escape(text)}</h2><section>{''.join(cells)}</section>"
    with replace_file(args.output) as file:
        file.write(page.encode())
    print(f"{args.output}: {len(texts)} texts, {len(page) / 1e6:.1f} MB")


if __name__ == "__main__":
    exit_on_user_error(main)
