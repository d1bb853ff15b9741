"""Loads a trained model, speaks with it, and measures how good the speech is.

Mel-cepstral distortion is computed from mels along dynamic time warping, as by Battenberg et al.
2020 (arXiv:1910.10288). An attention error is attention that is insufficient or dispersed
(Valentini-Botinhao and King, Interspeech 2021) or not monotonic (He et al., Interspeech 2019). The
limits are ours: docs/speech.md says how often they are wrong.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.fft
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cli import UserError
from data_utils import MelDataset
from hparams import HParams, create_hparams, parse_overrides
from model import Tacotron2
from text import symbol_names
from training.checkpoint import find_checkpoint, load_checkpoint, load_weights, rebuild

AROUND = 9  # frames, and mel bands, around a value of a mel, whose mean its detail leaves out
N_CEPSTRA = 13  # cepstral coefficients in the distortion, without the 0th, which is loudness
STOPS_EARLY = 0.75  # a shorter clip, as a share of the true length, has stopped early
SKIPPED = 0.25  # a skipped word gets less attention, as a share of what its letters would get
REPEAT_SYMBOLS, REPEAT_SECONDS = 5, 0.05  # how far, and how long, attention went back in a repeat
BREAK_WEIGHT, BREAK_SECONDS = 0.2, 0.2  # in a break no symbol got this weight, for this long


class Spoken(NamedTuple):
    """A text that a model has spoken."""

    mel: Tensor  # (n_mels, T_out) log-mel, on the CPU
    alignment: Tensor  # (T_out, T_in) attention weights, on the CPU
    stopped: bool  # False if max_decoder_steps cut it off
    symbols: list[str]  # names of the T_in symbols


def load_model(path: str | Path, overrides: str = "", **changes: Any) -> Tacotron2:
    """Loads a trained model in evaluation mode, with its settings in ``.hparams``, on the GPU if
    there is one:

        model = load_model("runs/first", max_decoder_steps=2000)

    Args:
        path: a checkpoint of train.py, export.py or NVIDIA's code, or the folder of a run, for its
            newest checkpoint. NVIDIA's have no settings: those of preset nvidia are used.
        overrides: settings to change, ``"name=value,..."``, as for ``--hparams``
        changes: the same as keyword arguments

    Raises:
        UserError: the file is no checkpoint, or holds code, another model's weights or values that
            are not finite; or a setting cannot be changed.
    """
    path = find_checkpoint(path)
    state = load_checkpoint(path)
    if "hparams" in state:
        hparams = rebuild(HParams, state["hparams"], path)
    else:
        hparams = create_hparams(preset="nvidia")
        print(f"note: {path}: has no settings in it; it is read with those of preset nvidia")
    changes = {"decoder": "auto", **changes, **parse_overrides(overrides)}
    if "hparams" in state and changes.get("symbols", hparams.symbols) != hparams.symbols:
        raise UserError(f"setting symbols: {path} was trained with others; leave it out")
    model = Tacotron2(dataclasses.replace(hparams, **changes))
    load_weights(model, state, path)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def speak(
    model: Tacotron2,
    texts: Sequence[Sequence[int]],
    seed: int = 0,
    batch_size: int = 16,
    as_predicted: bool = False,
) -> Iterator[tuple[int, Spoken]]:
    """Yields each text's index and speech, the longest texts first, in batches of similar lengths.

    The same texts, seed and batch size give the same speech: ``seed`` seeds the prenet's dropout.
    The random numbers of a training stay as they would be without it.

    Args:
        model: in training or evaluation mode, which it is in again at the end
        texts: symbol ids of each text, none of them empty
        as_predicted: leave out :func:`restore_variance`
    """
    device, training = next(model.parameters()).device, model.training
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids = [torch.tensor(texts[i]) for i in chosen]
        lengths = torch.tensor([len(text) for text in ids])
        text = pad_sequence(ids, batch_first=True).to(device)
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + start)
            model.eval()
            output = model.inference(text, lengths)
            model.train(training)
        for row, i in enumerate(chosen):
            n = int(output.mel_lengths[row])
            alignment = output.alignment[row, :n, : lengths[row]]
            stopped = bool(output.stopped[row])
            # Clones, since views would keep the whole batch in memory.
            mel, alignment = output.mel_postnet[row, :, :n].clone(), alignment.clone()
            if not as_predicted:
                mel = restore_variance(mel, model.variance_gain)
            symbols = symbol_names(texts[i], model.hparams.symbols)
            yield i, Spoken(mel.cpu(), alignment.cpu(), stopped, symbols)


# Variance that least squares takes away


def detail(mel: Tensor) -> Tensor:
    """Returns a log-mel (n_mels, T_out) less its mean over frames and bands around each value."""
    mean = F.avg_pool2d(mel[None], AROUND, 1, AROUND // 2, count_include_pad=False)[0]
    return mel - mean


def restore_variance(mel: Tensor, gain: Tensor) -> Tensor:
    """Returns a log-mel (n_mels, T_out) with more detail, by ``gain`` (n_mels,).

    The mean of all mels that a text may have is smoother than any of them, which vocoders make
    sound metallic. This scales the variance of details to that of true mels (as Silén et al. 2012
    do for utterances; Takamichi et al. 2016 for modulations).
    """
    return mel + gain[:, None] * detail(mel)


def measure_variance_gain(model: Tacotron2, dataset: MelDataset, n_clips: int = 40) -> Tensor:
    """Returns by how much details of the first ``n_clips`` clips deviate more than those of what
    the model says of their texts: (n_mels,), 0 for equal deviations."""
    items = [dataset[i] for i in range(min(n_clips, len(dataset)))]
    spoken = speak(model, [item.ids.tolist() for item in items], as_predicted=True)
    ours = torch.cat([detail(speech.mel) for _, speech in spoken], 1)
    true = torch.cat([detail(item.mel.T) for item in items], 1)
    return (true.std(1) / ours.std(1) - 1).nan_to_num(0, 0, 0)


# Measures


def mel_cepstral_distortion(mel: Tensor, target: Tensor) -> float:
    """Returns the distortion in dB between two log-mels (n_mels, T) of any two lengths: the mean
    distance of their cepstra along the path of dynamic time warping. It is 0 for equal ones.

    The distance of two cepstra is the root of the mean square of the difference between their
    spectra in dB, smoothed by keeping ``N_CEPSTRA`` coefficients, so that pitch and loudness do not
    count.
    """
    import librosa  # here: it takes seconds to import

    cepstra = []
    for x in (mel, target):
        c = scipy.fft.dct(x.double().numpy(), axis=0, norm="ortho")[1 : N_CEPSTRA + 1]
        # ln|S| = sum of c cos(...): the distortion is 10 / ln 10 sqrt(2 sum of squares).
        cepstra.append(c * math.sqrt(2 / len(x)) * 10 / math.log(10) * math.sqrt(2))
    difference = cepstra[0][:, :, None] - cepstra[1][:, None]  # (N_CEPSTRA, T, T of the target)
    distance = np.sqrt(np.square(difference).sum(0))
    _, path = librosa.sequence.dtw(C=distance)
    return float(distance[path[:, 0], path[:, 1]].mean())


class AttentionErrors(NamedTuple):
    """The errors in an alignment."""

    skipped: list[int]  # words that got too little attention, by their number
    repeats: int  # times that attention went back
    breaks: int  # times that attention was lost


def attention_errors(alignment: Tensor, text: str, hop_seconds: float) -> AttentionErrors:
    """Finds the errors that an alignment (T_out, T_in) shows.

    - A word is skipped if it gets less than ``SKIPPED`` of the attention that it would get if all
      letters of the text got the same.
    - In a repeat, the symbol with the largest weight lies ``REPEAT_SYMBOLS`` or more before the
      farthest one so far, for ``REPEAT_SECONDS`` or longer.
    - In a break, no symbol gets a weight of ``BREAK_WEIGHT``, for ``BREAK_SECONDS`` or longer.

    Args:
        text: a character for each of the ``T_in`` symbols, @ for a phone; spaces separate words.
    """
    attention = alignment.sum(0).numpy()  # (T_in,) frames
    letters = np.array([not c.isspace() and (c.isalnum() or c == "@") for c in text])
    words, start = [], 0
    for i, word in enumerate(text.split(" ")):
        span = slice(start, start + len(word))
        if letters[span].any():
            words.append((i, attention[span].sum(), letters[span].sum()))
        start += len(word) + 1
    rate = sum(frames for _, frames, _ in words) / max(letters.sum(), 1)
    skipped = [i for i, frames, n in words if frames < SKIPPED * rate * n]

    weight, symbol = (x.numpy() for x in alignment.max(1))
    back = np.maximum.accumulate(symbol) - symbol >= REPEAT_SYMBOLS
    return AttentionErrors(
        skipped,
        count_runs(back, REPEAT_SECONDS / hop_seconds),
        count_runs(weight < BREAK_WEIGHT, BREAK_SECONDS / hop_seconds),
    )


def count_runs(flags: np.ndarray, min_length: float) -> int:
    """Counts the runs of True that have ``min_length`` values or more."""
    edges = np.flatnonzero(np.diff(np.pad(flags.astype(int), 1)))
    return int((edges[1::2] - edges[::2] >= min_length).sum())
