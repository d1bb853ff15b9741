"""Speak text with a trained model, by Griffin-Lim.

    python scripts/synthesize.py -c runs/first/checkpoint_best.pt "Good morning." "And you?"

Writes 1.wav, 1.png (the alignment), 1.npy (the log-mel, n_mels x frames, for a vocoder), 2.wav, ...
"""

import sys
import warnings
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from clips import check_text, report_unknown_characters
from files import make_folder
from hparams import create_hparams, parse_overrides
from layers import griffin_lim
from logger import draw_alignment
from model import Tacotron2


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Speak text with a trained model.")
    add = parser.add_argument
    add("text", nargs="+", help="a sentence, quoted; {HH AH0 L OW1} is ARPAbet")
    add(
        "-c",
        "--checkpoint",
        required=True,
        type=Path,
        help="from train.py, or NVIDIA's, or torchaudio's",
    )
    add("-o", "--output_dir", type=Path, default=Path("runs/speech"), help="(default %(default)s)")
    add("--hparams", default="", metavar="NAME=VALUE,...", help="such as gate_threshold=0.3")
    add("--seed", type=int, default=0, help="seed of the prenet's dropout (default %(default)s)")
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    nvidia, changes = create_hparams(preset="nvidia"), parse_overrides(args.hparams)
    model = Tacotron2.from_checkpoint(args.checkpoint, device, nvidia, **changes)
    hparams, texts = model.hparams, []
    for text in args.text:
        try:
            texts.append(torch.tensor(check_text(text, hparams)))
        except UserError as error:
            raise UserError(f"argument {error}") from None
    report_unknown_characters((("argument", text) for text in args.text), hparams)
    make_folder(args.output_dir)

    torch.manual_seed(args.seed)
    lengths = torch.tensor([len(ids) for ids in texts])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # texts that never stop are reported below
        output = model.inference(pad_sequence(texts, batch_first=True).to(device), lengths)
    frame_seconds = hparams.hop_length / hparams.sampling_rate
    for i, text in enumerate(args.text):
        n, path = int(output.mel_lengths[i]), args.output_dir / str(i + 1)
        mel = output.mel_postnet[i, :, :n].cpu()
        alignment = output.alignment[i, :n, : lengths[i]].cpu()
        soundfile.write(f"{path}.wav", griffin_lim(mel, hparams), hparams.sampling_rate)
        np.save(f"{path}.npy", mel.numpy())
        draw_alignment(alignment, text, frame_seconds).savefig(f"{path}.png")
        note = ""
        if not output.stopped[i]:
            note = ", cut off: it never stopped (train longer, or lower gate_threshold)"
        elif n * frame_seconds < 0.05:
            note = ", nothing to hear: it stopped at once (train longer, or raise gate_threshold)"
        print(f"{path}.wav: {n * frame_seconds:.1f} s{note}")


if __name__ == "__main__":
    exit_on_user_error(main)
