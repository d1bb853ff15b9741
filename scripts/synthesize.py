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

from checkpoint import load_checkpoint, load_weights, saved_hparams
from cli import ArgumentParser, UserError, exit_on_user_error
from clips import check_text, report_unknown_characters
from files import make_folder
from hparams import create_hparams
from layers import griffin_lim
from logger import draw_alignment
from model import Tacotron2


def main() -> None:
    parser = ArgumentParser(description="Speak text with a trained model.")
    parser.add_argument("text", nargs="+", help="a sentence, quoted; {HH AH0 L OW1} is ARPAbet")
    parser.add_argument("-c", "--checkpoint", required=True, type=Path, help="that train.py saved")
    parser.add_argument(
        "-o", "--output_dir", type=Path, default=Path("runs/speech"), help="(default %(default)s)"
    )
    parser.add_argument(
        "--hparams", default="", metavar="NAME=VALUE,...", help="such as gate_threshold=0.3"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prenet's dropout")
    args = parser.parse_args()

    state = load_checkpoint(args.checkpoint)
    # NVIDIA's checkpoints have no settings in them.
    base = saved_hparams(state, args.checkpoint) if "hparams" in state else None
    hparams = create_hparams(args.hparams, "nvidia" if base is None else None, base)
    ids = []
    for text in args.text:
        try:
            ids.append(torch.tensor(check_text(text, hparams)))
        except UserError as error:
            raise UserError(f"argument {error}") from None
    report_unknown_characters((("argument", text) for text in args.text), hparams)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Tacotron2(hparams)
    load_weights(model, state, args.checkpoint)
    model.to(device).eval()
    make_folder(args.output_dir)

    torch.manual_seed(args.seed)
    lengths = torch.tensor([len(one) for one in ids])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # clips that never stop are said below
        output = model.inference(pad_sequence(ids, batch_first=True).to(device), lengths)
    for i, text in enumerate(args.text):
        n = int(output.mel_lengths[i])
        mel = output.mel_postnet[i, :, :n].cpu()
        alignment = output.alignment[i, :n, : lengths[i]].cpu()
        path = args.output_dir / str(i + 1)
        soundfile.write(f"{path}.wav", griffin_lim(mel, hparams), hparams.sampling_rate)
        np.save(f"{path}.npy", mel.numpy())
        draw_alignment(alignment, text, hparams.hop_length / hparams.sampling_rate).savefig(
            f"{path}.png"
        )
        seconds = n * hparams.hop_length / hparams.sampling_rate
        end = ""
        if not output.stopped[i]:
            end = ", cut off: it never stopped (train longer, or lower gate_threshold)"
        elif seconds < 0.05:
            end = ", nothing to hear: it stopped at once (train longer, or raise gate_threshold)"
        print(f"{path}.wav: {seconds:.1f} s{end}")


if __name__ == "__main__":
    exit_on_user_error(main)
