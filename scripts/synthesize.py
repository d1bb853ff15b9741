"""Speak text with a trained model, by Griffin-Lim, or predict the mels of clips for a vocoder.

    python scripts/synthesize.py -c runs/first/checkpoint_best.pt "Good morning." "And you?"
    python scripts/synthesize.py -c runs/first/checkpoint_best.pt -i sentences.txt -o speech
    python scripts/synthesize.py -c runs/first/checkpoint_best.pt -o mels \\
        --teacher_forced filelists/ljspeech_train.txt

Into a new or empty folder it writes 1.wav, 1.npy (the log-mel, n_mels x frames, for a vocoder),
1.png (alignment and mel), 2.wav and so on, and texts.txt, which says what text each of them speaks.
A text file has a sentence a line, or id|text, which names the files ID.wav and so on; without
texts or -i, it is read from standard input. Long texts are split at the ends of sentences. The exit
status is 1 if a text never stopped.

--teacher_forced predicts each frame of a clip from the true ones before it: ID.npy for ID.wav, with
n_samples // hop_length frames, as HiFi-GAN's fine-tuning reads them.
"""

import argparse
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, positive, progress_bar, seed
from corpus.audio import griffin_lim
from corpus.clips import check_text, load_clips, report_unknown_characters
from corpus.mels import open_mels
from data_utils import MelDataset, collate
from files import make_new_folder, replacing, require_space
from hparams import AUDIO, HParams, create_hparams
from model import Tacotron2
from speech import Spoken, load_model, speak
from text import clean_text
from training.logger import draw_speech

BATCH_SIZE = 16  # clips, with --teacher_forced
AT_A_TIME = 256  # texts that are sorted by length, which memory holds
PAUSE = 0.25  # seconds between the pieces of a long text
SILENT = float(np.log(1e-5))  # the lowest value of a log-mel
FORMATS = "wav", "flac"
TEXTS = "texts.txt"  # in the output folder: a line name|text of each text


class Text(NamedTuple):
    """A text to speak."""

    name: str  # of its files, without a suffix
    text: str
    location: str  # for messages


def read_texts(args: argparse.Namespace) -> list[Text]:
    """The texts of the arguments, else of a file or standard input.

    Raises:
        UserError: there are none, or an ID cannot name files or is used twice.
    """
    if args.text:
        for i, text in enumerate(args.text, 1):
            if re.search("[\udc80-\udcff]", text):  # bytes that Python could not decode
                raise UserError(f"text {i}: {text[:60]!r} is not UTF-8; write it in a file, by -i")
        return [Text(str(i), text, f"text {i}") for i, text in enumerate(args.text, 1)]
    path = "standard input" if args.input in (None, "-") else args.input
    try:
        content = sys.stdin.buffer.read() if path != args.input else Path(path).read_bytes()
        lines = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"-i {path}: {error.strerror}; give a file of texts") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: is not UTF-8; save it as UTF-8") from None
    texts, used = [], {}
    for number, line in enumerate(lines, 1):
        name, bar, text = line.strip().partition("|")
        if not name and not bar:
            continue
        if not bar:
            name, text = str(len(texts) + 1), name
        location = f"{path}:{number}"
        if not re.fullmatch(r"[\w-][\w.-]{0,99}", name) or "|" in text:
            fix = "write id|text, the id with letters, digits, _, - and . (not first), up to 100"
            raise UserError(f"{location}: {line.strip()[:60]!r}: {fix}")
        # In lower case, since some disks do not tell A.wav from a.wav.
        if (other := used.setdefault(name.lower(), location)) != location:
            raise UserError(f"{location}: the id '{name}' is on {other} too; use each once")
        texts.append(Text(name, text.strip(), location))
    if not texts:
        raise UserError(f"{path}: has no text; give texts as arguments, or a sentence a line")
    return texts


def split_text(text: str, longest: int) -> list[str]:
    """A cleaned text; if it is longer than ``longest`` characters, its sentences; those that are
    still longer cut at commas, and at last between words."""
    pieces = [text]
    # Cleaned text has no abbreviations or decimals left, but initials.
    sentence = r"(?<!\b\w\.)(?<=[.?!…])\s+|(?<=[。！？])"
    for end in (sentence, r"(?<=[,;:，；])\s*|\s+[-–—]+\s+"):
        parts = (re.split(end, piece) if len(piece) > longest else [piece] for piece in pieces)
        pieces = [part for piece in parts for part in piece]
    words = rf"\S.{{0,{longest - 1}}}(?!\S)|\S{{1,{longest}}}"
    return [part for piece in pieces for part in re.findall(words, piece)]


def symbols_of(text: Text, hparams: HParams, longest: int) -> list[list[int]]:
    """Symbol ids of each piece of a text.

    Raises:
        UserError: the text has nothing to speak, or cannot be read.
    """
    pieces = []
    try:
        check_text(text.text, hparams)
        for piece in split_text(
            clean_text(text.text, hparams.text_cleaners, hparams.symbols), longest
        ):
            try:
                pieces.append(check_text(piece, hparams))
            except UserError:  # nothing but punctuation, or half of {phones}
                if re.search("[{}]", piece):
                    raise UserError(
                        f"text '{text.text[:60]}' would be split within {{phones}}; write a "
                        "full stop before them, or raise --split"
                    ) from None
    except UserError as error:
        raise UserError(f"{text.location}: {error}") from None
    return pieces


def synthesize(model: Tacotron2, args: argparse.Namespace) -> None:
    """Speak texts; exit with status 1 if one of them never stops."""
    hparams, texts = model.hparams, read_texts(args)
    ids = [symbols_of(text, hparams, args.split) for text in texts]
    report_unknown_characters(((text.location, text.text) for text in texts), hparams)
    make_new_folder(args.output_dir, "give another -o")
    with replacing(args.output_dir / TEXTS) as file:
        lines = (f"{text.name}|{' '.join(text.text.split())}\n" for text in texts)
        file.write("".join(lines).encode())
    cut_off = []
    with progress_bar(total=len(texts), desc="speaking", unit="text") as bar:
        for start in range(0, len(texts), AT_A_TIME):
            chosen = range(start, min(start + AT_A_TIME, len(texts)))
            where = [(i, j) for i in chosen for j in range(len(ids[i]))]
            spoken = {i: {} for i in chosen}  # the pieces of each text so far
            lines = {}
            for k, piece in speak(model, [ids[i][j] for i, j in where], args.seed):
                i, j = where[k]
                spoken[i][j] = piece
                if len(spoken[i]) < len(ids[i]):
                    continue
                pieces = [piece for _, piece in sorted(spoken.pop(i).items())]
                if not all(piece.stopped for piece in pieces):
                    cut_off.append(i)
                path = args.output_dir / texts[i].name
                lines[i] = write_speech(path, pieces, texts[i].text, args.format, hparams)
                bar.update()
            tqdm.write("\n".join(lines[i] for i in chosen))
    if cut_off:
        names = ", ".join(texts[i].name for i in sorted(cut_off))
        print(f"{len(cut_off)} of {len(texts)} never stopped: {names}")
        sys.exit(1)


def write_speech(
    stem: Path, pieces: Sequence[Spoken], text: str, kind: str, hparams: HParams
) -> str:
    """Write the audio, the mel and a picture of a text, whose pieces have pauses between them, to
    ``stem`` with their suffixes; returns a line about it."""
    hop_seconds = hparams.hop_length / hparams.sampling_rate
    pause = round(PAUSE / hop_seconds)  # frames
    mels, sounds = [], []
    for piece in pieces:
        if mels:
            mels.append(torch.full((len(piece.mel), pause), SILENT))
            sounds.append(np.zeros((pause + 1) * hparams.hop_length, np.float32))
        mels.append(piece.mel)
        sounds.append(griffin_lim(piece.mel, hparams))
    mel = torch.cat(mels, 1)
    figure = draw_speech([piece.alignment for piece in pieces], mel, text, hop_seconds, pause)
    files = {suffix: io.BytesIO() for suffix in (kind, "npy", "png")}
    soundfile.write(files[kind], np.concatenate(sounds), hparams.sampling_rate, format=kind)
    np.save(files["npy"], mel.numpy())
    figure.savefig(files["png"], format="png")
    for suffix, content in files.items():
        with replacing(Path(f"{stem}.{suffix}")) as file:
            file.write(content.getvalue())
    seconds = mel.size(1) * hop_seconds
    line = f"{stem}.{kind}: {seconds:.1f} s"
    if not all(piece.stopped for piece in pieces):
        line += ", cut off: it never stopped (train longer, or lower gate_threshold)"
    elif seconds < 0.05:
        line += ", nothing to hear: it stopped at once (train longer, or raise gate_threshold)"
    return line


@torch.inference_mode()
def predict_mels(model: Tacotron2, args: argparse.Namespace) -> None:
    """Write each clip's mel, predicted with teacher forcing."""
    hparams, folder = model.hparams, args.output_dir
    clips = sorted(load_clips(args.teacher_forced, hparams), key=lambda clip: clip.n_frames)
    locations = {}
    for clip in clips:
        name = Path(clip.path).stem
        if (other := locations.setdefault(name.lower(), clip.location)) != clip.location:
            fix = "export the lists into folders of their own"
            raise UserError(f"{clip.location}: {other} has a clip of the same name, {name}; {fix}")
    n_frames = sum(clip.n_frames for clip in clips)
    require_space(folder, 4 * hparams.n_mel_channels * n_frames, "give another -o")
    make_new_folder(folder, "give another -o")
    dataset = MelDataset(clips, open_mels(clips, hparams))
    starts = range(0, len(clips), BATCH_SIZE)
    for start in progress_bar(starts, "predicting mels", unit="batch"):
        torch.manual_seed(args.seed + start)
        items = [dataset[i] for i in range(start, min(start + BATCH_SIZE, len(clips)))]
        batch = collate(items).to(next(model.parameters()).device)
        mels = model(batch).mel_postnet.cpu().numpy()
        for i, mel in zip(batch.indices, mels, strict=True):
            with replacing(folder / f"{Path(clips[i].path).stem}.npy") as file:
                np.save(file, mel[:, : clips[i].n_frames - 1])  # the last has no whole hop after it
    print(f"{folder}: mels of {len(clips):,} clips")


def main(argv: list[str] | None = None) -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(description=__doc__, formatter_class=as_written)
    add = parser.add_argument
    add("text", nargs="*", help="a sentence, quoted; {HH AH0 L OW1} is ARPAbet")
    add("-i", "--input", metavar="FILE", help="a file of texts; -: standard input")
    add("-c", "--checkpoint", required=True, type=Path, help="of train.py, export.py or NVIDIA's")
    new = "new or empty (default %(default)s)"
    add("-o", "--output_dir", type=Path, default=Path("runs/speech"), help=new)
    add("--format", choices=FORMATS, default="wav", help="of the audio (default wav)")
    longest = (
        "split texts of more characters (default %(default)s; the longest of LJSpeech has 187)"
    )
    add("--split", type=positive, default=150, metavar="N", help=longest)
    mels = "instead: predict the mels of these clips, to fine-tune a vocoder on"
    add("--teacher_forced", metavar="LIST", help=mels)
    add("--hparams", default="", metavar="NAME=VALUE,...", help="such as gate_threshold=0.3")
    add("--seed", type=seed, default=0, help="seed of the prenet's dropout (default %(default)s)")
    args = parser.parse_args(argv)
    given = args.text or None, args.input, args.teacher_forced
    if sum(source is not None for source in given) > 1:
        raise UserError("give texts, or -i FILE, or --teacher_forced LIST, not two of them")

    model = load_model(args.checkpoint, args.hparams)
    nvidia = create_hparams(preset="nvidia")
    others = [f"{k}={v}" for k in AUDIO if (v := getattr(model.hparams, k)) != getattr(nvidia, k)]
    if others:
        print(
            f"note: the mels have {', '.join(others)}; published HiFi-GAN and WaveGlow models need "
            "those of --preset nvidia, given to train.py"
        )
    if args.teacher_forced is not None:
        predict_mels(model, args)
    else:
        synthesize(model, args)


if __name__ == "__main__":
    exit_on_user_error(main)
