"""Validation: scores of alignments, and batch norm's statistics as training left them and
re-estimated."""

import math

import pytest
import torch
from conftest import build, outcome, set_gate
from torch import nn

from corpus.mels import open_mels
from data_utils import MelDataset, load_data, training_sampler
from hparams import create_hparams
from loss_function import Tacotron2Loss
from training.validation import alignment_scores, precise_batch_norm, validate

ALWAYS = {"event", "epoch", "step"}  # in a record, beside its scalars


def test_alignment_scores_of_a_diagonal_and_of_none():
    diagonal, flat = torch.zeros(2, 40, 20), torch.zeros(2, 40, 20)
    for i, (T_out, T_in) in enumerate(((40, 20), (30, 10))):
        diagonal[i, :T_out, :T_in] = torch.eye(T_in).repeat_interleave(T_out // T_in, dim=0)
        flat[i, :T_out, :T_in] = 1 / T_in
    lengths = torch.tensor([20, 10]), torch.tensor([40, 30])
    assert torch.stack(alignment_scores(diagonal, *lengths)).tolist() == [[1, 1], [1, 1]]
    diagonality, focus = alignment_scores(flat, *lengths)
    assert diagonality.tolist() == pytest.approx([0.2, 0.2], abs=0.03)
    assert focus.tolist() == pytest.approx([1 / 20, 1 / 10])


@pytest.mark.parametrize("n_frames_per_step", [1, 3])
def test_the_stop_error_is_in_seconds(settings, n_frames_per_step):
    """From the first step to the last, if the model stops at once; a step, if it never does."""
    hparams = create_hparams(f"{settings}n_frames_per_step={n_frames_per_step}")
    _, clips = load_data(hparams)
    dataset = MelDataset(clips, open_mels(clips, hparams), n_frames_per_step)
    step = n_frames_per_step * hparams.hop_length / hparams.sampling_rate
    late = [step * (math.ceil(clip.n_frames / n_frames_per_step) - 1) for clip in clips]
    for logit, expected in ((100, sum(late) / len(late)), (-100, step)):
        model = set_gate(build(n_frames_per_step=n_frames_per_step), logit)
        means, _ = validate(model, dataset, [[0, 1], [2, 3]], Tacotron2Loss())
        assert means["stop_error"] == pytest.approx(expected)


def test_it_changes_no_training_and_no_other_scalar(tmp_path, settings, run):
    settings += "epochs=3,epochs_per_validation=1,"
    run("plain", settings)
    run("precise", settings + "precise_batch_norm=2")
    expected_state, expected = outcome(tmp_path / "plain")
    state, records = outcome(tmp_path / "precise")
    for record in records:
        precise = {name: record.pop(name) for name in list(record) if name.startswith("precise_")}
        if record["event"] == "validation":
            assert set(precise) == {f"precise_{name}" for name in set(record) - ALWAYS}
            assert 0 < abs(precise["precise_loss"] / record["loss"] - 1) < 0.5
    assert records == expected
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


def test_statistics_are_averages_over_batches_of_the_plan(settings):
    hparams = create_hparams(settings)
    clips, _ = load_data(hparams)
    dataset = MelDataset(clips, open_mels(clips, hparams))
    plan = training_sampler(clips, hparams).plan
    model, seen = build(), []
    before = [buffer.clone() for buffer in model.buffers()]
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    hook = norms[0].register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].mean((0, 2)).detach())
    )
    state = torch.get_rng_state()
    with precise_batch_norm(model, dataset, plan, len(plan)):
        hook.remove()
        assert len(seen) == len(plan)
        torch.testing.assert_close(norms[0].running_mean, torch.stack(seen).mean(0))
        assert all(norm.momentum == 0.1 and norm.num_batches_tracked == len(plan) for norm in norms)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.buffers(), before))
