"""How often the measures of scripts/evaluate.py are wrong, and how large distortions are.

    python benchmarks/bench_measures.py -c runs/first/checkpoint_best.pt

Of a trained model's validation set, with teacher forcing, where attention follows each clip: errors
found in its alignments are false alarms; a word whose frames are taken out of one must be found
skipped; frames that are played twice, from one word to the next but one, are a repeat. Distortions
are those of the predicted mels, and of the true mels of other sentences.
"""

import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, exit_on_user_error, progress_bar
from clips import load_clips
from data_utils import MelDataset, collate
from mel_cache import open_mels
from scripts.evaluate import letters
from speech import attention_errors, load_model, mel_cepstral_distortion


@torch.no_grad()
def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-c", "--checkpoint", required=True, type=Path)
    parser.add_argument("--hparams", default="", metavar="NAME=VALUE,...")
    args = parser.parse_args()
    model = load_model(args.checkpoint, args.hparams)
    hparams = model.hparams
    hop_seconds = hparams.hop_length / hparams.sampling_rate
    clips = load_clips(hparams.validation_files, hparams)
    dataset = MelDataset(clips, open_mels(clips, hparams))
    torch.manual_seed(0)
    false = {"skips": 0, "repeats": 0, "breaks": 0}
    n_words = found = n_doubled = repeated = 0
    predicted, others = [], []
    for i, clip in enumerate(progress_bar(clips, "clips")):
        item = dataset[i]
        output = model(collate([item]))
        alignment, text = output.alignment[0], letters(clip, hparams)
        errors = attention_errors(alignment, text, hop_seconds)
        false["skips"] += len(errors.skipped)
        false["repeats"] += errors.repeats > 0
        false["breaks"] += errors.breaks > 0

        symbol, start, ends = alignment.argmax(1), 0, []
        for word in text.split(" "):
            frames = torch.nonzero((symbol >= start) & (symbol < start + len(word))).flatten()
            start += len(word) + 1
            if any(map(str.isalnum, word)) and len(frames):
                n_words += 1
                kept = torch.ones(len(symbol), dtype=torch.bool)
                kept[frames] = False
                skipped = attention_errors(alignment[kept], text, hop_seconds).skipped
                found += word in skipped
                ends.append(int(frames[-1]) + 1)
        for a, b in zip(ends, ends[2:], strict=False):
            twice = torch.cat((alignment[:b], alignment[a:]))
            n_doubled += 1
            repeated += attention_errors(twice, text, hop_seconds).repeats > 0

        predicted.append(mel_cepstral_distortion(output.mel_postnet[0], item.mel.T))
        other = dataset[(i + 1) % len(clips)]
        others.append(mel_cepstral_distortion(other.mel.T, item.mel.T))
    print(f"{args.checkpoint}, {len(clips)} clips")
    print(
        f"false alarms: {false['skips']} of {n_words} words skipped; {false['repeats']} clips with "
        f"repeats, {false['breaks']} with breaks"
    )
    print(f"words taken out and found: {found} of {n_words} ({found / n_words:.1%})")
    print(
        f"two words played twice and found: {repeated} of {n_doubled} ({repeated / n_doubled:.1%})"
    )
    for name, values in {"predicted": predicted, "other sentences": others}.items():
        quartiles = statistics.quantiles(values, n=4)
        low, middle, high = (f"{value:.2f}" for value in quartiles)
        print(f"distortion, {name}: median {middle} dB, quartiles {low} and {high}")


if __name__ == "__main__":
    exit_on_user_error(main)
