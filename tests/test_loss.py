import math

import pytest
import torch
from conftest import TINY, noise_batch

from data_utils import Batch
from hparams import create_hparams
from loss_function import Tacotron2Loss
from model import Output, Tacotron2


def random_output(batch: Batch) -> Output:
    generator = torch.Generator().manual_seed(1)
    B, _, T_out = batch.mel.shape
    mel, mel_postnet = torch.randn(2, *batch.mel.shape, generator=generator)
    alignment = torch.rand(B, T_out, batch.text.size(1), generator=generator)
    return Output(mel, mel_postnet, torch.randn(B, T_out, generator=generator), alignment)


def test_total_is_nvidias_loss_over_the_padded_tensors(tiny):
    batch = noise_batch(tiny, [7, 5, 3], [9, 12, 4])
    output = random_output(batch)
    loss = Tacotron2Loss()(output, batch)
    mse, bce = torch.nn.MSELoss(), torch.nn.BCEWithLogitsLoss()
    torch.testing.assert_close(loss.mel, mse(output.mel, batch.mel))
    torch.testing.assert_close(loss.mel_postnet, mse(output.mel_postnet, batch.mel))
    torch.testing.assert_close(loss.gate, bce(output.gate, batch.gate))
    torch.testing.assert_close(loss.total, loss.mel + loss.mel_postnet + loss.gate)
    assert loss.objective == loss.total and loss.guided_attention == 0


def test_masked_is_the_mean_over_real_frames(tiny):
    batch = noise_batch(tiny, [7, 5, 3], [9, 12, 4])
    output = random_output(batch)
    parts = []
    for i, n in enumerate(batch.mel_lengths):
        real = Output(*(x[i : i + 1, ..., :n] for x in output[:3]), output.alignment[i : i + 1])
        clip = batch._replace(
            mel=batch.mel[i : i + 1, :, :n],
            gate=batch.gate[i : i + 1, :n],
            mel_lengths=batch.mel_lengths[i : i + 1],
        )
        parts.append(Tacotron2Loss()(real, clip).total * n)
    expected = sum(parts) / batch.mel_lengths.sum()
    torch.testing.assert_close(Tacotron2Loss()(output, batch).masked, expected)


def test_padding_further_changes_total_but_not_masked_nor_guided(tiny):
    batch = noise_batch(tiny, [7, 5, 3], [9, 12, 4])
    output = random_output(batch)
    padded = batch._replace(
        text=torch.nn.functional.pad(batch.text, (0, 2)),
        mel=torch.nn.functional.pad(batch.mel, (0, 6)),
        gate=torch.nn.functional.pad(batch.gate, (0, 6), value=1),
    )
    wider = Output(
        *(torch.nn.functional.pad(x, (0, 6), value=3) for x in output[:3]),
        torch.nn.functional.pad(output.alignment, (0, 2, 0, 6), value=3),
    )
    loss_function = Tacotron2Loss(guided_attention_weight=1)
    before, after = loss_function(output, batch), loss_function(wider, padded)
    torch.testing.assert_close(before.masked, after.masked)
    torch.testing.assert_close(before.guided_attention, after.guided_attention)
    assert not torch.isclose(before.total, after.total)


def test_guided_attention_by_its_formula(tiny):
    batch = noise_batch(tiny, [3, 2], [4, 2])
    output = random_output(batch)
    total = 0.0
    for i in range(2):
        N, T = int(batch.text_lengths[i]), int(batch.mel_lengths[i])
        for n in range(N):
            for t in range(T):
                w = 1 - math.exp(-((n / N - t / T) ** 2) / (2 * 0.3**2))
                total += w * float(output.alignment[i, t, n])
    loss = Tacotron2Loss(guided_attention_weight=2, guided_attention_sigma=0.3)(output, batch)
    assert loss.guided_attention.item() == pytest.approx(total / 6, rel=1e-5)  # 6 frames
    torch.testing.assert_close(loss.objective, loss.total + 2 * loss.guided_attention)


def test_training_lowers_the_loss_of_one_batch(tiny):
    """Model, loss and optimiser together."""
    torch.manual_seed(0)
    model, loss_function = Tacotron2(create_hparams(TINY)), Tacotron2Loss()
    batch = noise_batch(tiny, [7, 5, 3], [9, 12, 4])
    batch = batch._replace(mel=batch.mel - 5)  # the level of log-mels
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = loss_function(model(batch), batch)
        optimizer.zero_grad()
        loss.objective.backward()
        optimizer.step()
        losses.append(loss.total.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
