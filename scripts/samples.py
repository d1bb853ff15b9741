"""Write a page on which the speech of several models is heard side by side.

    python scripts/samples.py runs/RAND runs/SSB-DBS-BR -i sentences.txt -o samples.html

FILE has a text a line, or is a filelist, whose recordings are then played too.
"""

import base64
import sys
from html import escape
from io import BytesIO
from pathlib import Path

import numpy as np
import soundfile
import soxr
from matplotlib.image import imsave

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, make_folder, pluralize, replace_file
from corpus import clips
from model import Tacotron2
from speech import Spoken, load_model, speak
from training.checkpoint import find_checkpoint
from vocoder import open_vocoder, why_griffin_lim

HEAD = """<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Samples</title><p>Below each voice is its attention, symbols over time.</p><style>
:root { color-scheme: light dark; font: 16px/1.4 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 75rem; padding: 0 1rem; overflow-wrap: anywhere }
section { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)) }
audio, img { width: 100% } img { height: 5rem; image-rendering: pixelated }</style>"""


def play(caption: str, samples: np.ndarray, rate: int) -> str:
    """Returns a player of samples (n,), as MP3: it has few rates, and mels end at 8 kHz."""
    mp3 = BytesIO()
    soundfile.write(mp3, soxr.resample(samples, rate, 16_000), 16_000, format="MP3")
    data = base64.b64encode(mp3.getvalue()).decode()
    return f'<small>{caption}</small><audio controls src="data:audio/mpeg;base64,{data}"></audio>'


def draw(spoken: Spoken) -> str:
    """Returns a picture of the attention."""
    png, weights = BytesIO(), spoken.alignment.T.numpy()
    imsave(png, weights, vmin=0, vmax=1, cmap="magma", origin="lower")
    data = base64.b64encode(png.getvalue()).decode()
    return f'<img alt="attention" src="data:image/png;base64,{data}">'


def speak_texts(model: Tacotron2, texts: list[tuple[str, str]]) -> list[str]:
    """Returns players and a picture of the model's speech for each (location, text)."""
    hparams, ids, cells = model.hparams, [], [""] * len(texts)
    for location, text in texts:
        try:
            ids.append(clips.check_text(text, hparams))
        except UserError as error:
            raise UserError(f"{location}: {error}") from None
    clips.report_unknown_characters(texts, hparams)
    vocoders = {"Griffin-Lim": open_vocoder(hparams, "griffin-lim")}
    if not why_griffin_lim(hparams):
        vocoders = {"HiFi-GAN": open_vocoder(hparams, "universal"), **vocoders}
    for i, spoken in speak(model, ids):
        for name, vocoder in vocoders.items():
            cells[i] += play(name, vocoder(spoken.mel), hparams.sampling_rate)
        cells[i] += draw(spoken) + ("" if spoken.stopped else "cut off: it never stopped")
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
    if not (texts := clips.read_lines(args.input)):
        raise UserError(f"{args.input}: has no texts; write one a line")
    make_folder(args.output.resolve().parent)
    models, columns, page = {path: load_model(path) for path in args.models}, {}, HEAD
    if "|" in texts[0][1]:
        hparams = models[args.models[0]].hparams
        listed, rate = clips.load_clips(str(args.input), hparams), hparams.sampling_rate
        texts = [(clip.location, clip.text) for clip in listed]
        columns["recording"] = [play("", clips.read_samples(clip), rate) for clip in listed]
    columns |= {str(path): speak_texts(model, texts) for path, model in models.items()}
    for i, (_, text) in enumerate(texts):
        cells = [f"<div><h3>{escape(name)}</h3>{cell[i]}</div>" for name, cell in columns.items()]
        page += f"<h2>{escape(text)}</h2><section>{''.join(cells)}</section>"
    with replace_file(args.output) as file:
        file.write(page.encode())
    print(f"{args.output}: {pluralize(len(texts), 'text')}, {len(page) / 1e6:.1f} MB")


if __name__ == "__main__":
    exit_on_user_error(main)
