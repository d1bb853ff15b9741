"""How many words a speech recogniser understands, in sounds of a filelist's sentences.

    pip install pocketsphinx    # with its English model
    python scripts/synthesize.py -c CHECKPOINT -i sentences.txt -o runs/speech
    python benchmarks/bench_intelligibility.py filelists/demo_val.txt data/demo/wavs runs/speech

A sentence's sound has the name of its clip. The recogniser knows the words of LIST and of --words,
and how often each occurs, but no order of words. The word error rate counts words left out, added
or taken for others. It is high for a voice that the recogniser was not made for, so compare
folders, such as the recordings and the synthesized speech. Sentences with words that its dictionary
lacks are left out.
"""

import collections
import math
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import soundfile
import soxr

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, progress_bar
from clips import numbered_lines

RATE = 16000  # Hz, the recogniser's


def read_sentences(filelist: str) -> dict[str, list[str]]:
    """The words of each clip's text, by the clip's name."""
    pairs = (line.split("|")[:2] for _, line in numbered_lines(filelist))
    return {Path(path).stem: re.findall("[a-z']+", text.lower()) for path, text in pairs}


def language_model(counts: collections.Counter, n_sentences: int) -> str:
    """Probabilities of single words, in the format of ARPA."""
    total = sum(counts.values()) + n_sentences
    words = {"</s>": n_sentences, **counts}
    lines = [f"{math.log10(n / total):.4f} {word} 0" for word, n in words.items()]
    head = f"\\data\\\nngram 1={len(lines) + 1}\n\n\\1-grams:\n-99 <s> 0\n"
    return head + "\n".join(lines) + "\n\n\\end\\\n"


def errors(wanted: list[str], heard: list[str]) -> int:
    """Words to leave out, add or replace to make one sentence the other."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(wanted, 1):
        above, row = row, [i]
        for j, other in enumerate(heard, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (word != other)))
    return row[-1]


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("list", metavar="LIST", help="filelist of the sentences")
    add("folders", nargs="+", type=Path, metavar="DIR", help="folders of their sounds")
    add("--words", nargs="*", default=[], metavar="LIST", help="filelists of more words to know")
    args = parser.parse_args()
    try:
        import pocketsphinx
    except ImportError as error:
        raise UserError(f"{error}; pip install pocketsphinx") from None

    sentences = read_sentences(args.list)
    others = [words for name in args.words for words in read_sentences(name).values()]
    everything = [*sentences.values(), *others]
    dictionary = Path(pocketsphinx.get_model_path("en-us/cmudict-en-us.dict")).read_text()
    known = {line.split()[0] for line in dictionary.splitlines() if line}
    counts = collections.Counter(word for words in everything for word in words if word in known)
    sentences = {name: words for name, words in sentences.items() if counts.keys() >= {*words}}
    with tempfile.NamedTemporaryFile("w", suffix=".arpa") as file:
        file.write(language_model(counts, len(everything)))
        file.flush()
        decoder = pocketsphinx.Decoder(lm=file.name, loglevel="FATAL")
    print(f"{len(sentences)} sentences, {len(counts)} words known")
    for folder in args.folders:
        n_errors = n_words = n_right = 0
        for name, words in progress_bar(sentences.items(), str(folder)):
            try:
                samples, rate = soundfile.read(folder / f"{name}.wav")
            except soundfile.LibsndfileError as error:
                raise UserError(f"{error}; give folders with a wav for each clip") from None
            samples = soxr.resample(samples, rate, RATE)
            samples = np.pad(samples, RATE // 5)  # silence at both ends
            samples += np.random.default_rng(0).normal(0, 1e-4, len(samples))
            pcm = (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
            decoder.start_utt()
            decoder.process_raw(pcm, full_utt=True)
            decoder.end_utt()
            heard = decoder.hyp().hypstr.split() if decoder.hyp() else []
            n_errors += errors(words, heard)
            n_words += len(words)
            n_right += heard == words
        rate = n_errors / n_words
        print(f"{folder}: word error rate {rate:.1%} of {n_words} words, {n_right} all right")


if __name__ == "__main__":
    exit_on_user_error(main)
