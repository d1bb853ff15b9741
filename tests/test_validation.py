"""Validation: its scores of alignments and of stops."""

import math

import pytest
import torch
from conftest import build, set_gate

from data_utils import MelDataset, load_data, open_mels
from hparams import create_hparams
from loss_function import Tacotron2Loss
from training.validation import alignment_scores, validate


def test_a_diagonal_scores_1_and_even_attention_little():
    diagonal, flat = torch.zeros(2, 40, 20), torch.zeros(2, 40, 20)
    for i, (T_out, T_in) in enumerate(((40, 20), (30, 10))):
        diagonal[i, :T_out, :T_in] = torch.eye(T_in).repeat_interleave(T_out // T_in, dim=0)
        flat[i, :T_out, :T_in] = 1 / T_in
    lengths = torch.tensor([20, 10]), torch.tensor([40, 30])
    assert torch.stack(alignment_scores(diagonal, *lengths)).tolist() == [[1, 1], [1, 1]]
    diagonality, focus = alignment_scores(flat, *lengths)
    assert diagonality.tolist() == pytest.approx([0.2, 0.2], abs=0.03)
    assert focus.tolist() == pytest.approx([1 / 20, 1 / 10])


def test_the_stop_error_is_in_seconds(settings):
    """From the first step to the last, if the model stops at once; a step, if it never does."""
    hparams = create_hparams(f"{settings}n_frames_per_step=3")
    _, clips = load_data(hparams)
    dataset = MelDataset(clips, open_mels(clips, hparams), 3)
    step = 3 * hparams.hop_length / hparams.sampling_rate
    late = [step * (math.ceil(clip.n_frames / 3) - 1) for clip in clips]
    for logit, expected in ((100, sum(late) / len(late)), (-100, step)):
        model = set_gate(build(n_frames_per_step=3), logit)
        means, _ = validate(model, dataset, [[0, 1], [2, 3]], Tacotron2Loss())
        assert means["stop_error"] == pytest.approx(expected)
