import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import noise_batch
from torch.testing import assert_close

from data_utils import Batch
from loss_function import Tacotron2Loss
from model import Output


def random_output(batch: Batch) -> Output:
    torch.manual_seed(1)
    B, _, T_out = batch.mel.shape
    mel, mel_postnet = torch.randn(2, *batch.mel.shape)
    gate, alignment = torch.randn(batch.gate.shape), torch.rand(B, T_out, batch.text.size(1))
    return Output(mel, mel_postnet, gate, alignment)


def nvidias_loss(mel, mel_postnet, gate, target, gate_target):
    """The parts of NVIDIA's loss."""
    of_gate = F.binary_cross_entropy_with_logits(gate, gate_target)
    return F.mse_loss(mel, target), F.mse_loss(mel_postnet, target), of_gate


@pytest.mark.parametrize("n_frames_per_step", [1, 3])
def test_total_is_nvidias_loss_over_padded_tensors_and_masked_over_real_frames(n_frames_per_step):
    """A step's gate counts for each of its frames."""
    batch = noise_batch([7, 5, 3], [9, 12, 4], n_frames_per_step)
    output = random_output(batch)
    loss = Tacotron2Loss()(output, batch)
    gates = [x.repeat_interleave(n_frames_per_step, 1) for x in (output.gate, batch.gate)]
    expected = nvidias_loss(output.mel, output.mel_postnet, gates[0], batch.mel, gates[1])
    assert_close((loss.mel, loss.mel_postnet, loss.gate), expected)
    assert_close(loss.total, sum(expected))
    assert loss.objective == loss.total and loss.guided_attention == 0
    real = torch.arange(12) < batch.mel_lengths[:, None]
    mel, mel_postnet, target = (x.mT[real] for x in (*output[:2], batch.mel))  # (n_real, n_mels)
    expected = nvidias_loss(mel, mel_postnet, gates[0][real], target, gates[1][real])
    assert_close(loss.masked, sum(expected))
    masked = Tacotron2Loss(loss="masked")(output, batch)
    assert masked.objective == masked.masked == loss.masked and masked.total == loss.total


def test_padding_further_changes_total_but_not_masked_nor_guided(batch):
    output = random_output(batch)
    mel, gate = F.pad(batch.mel, (0, 6)), F.pad(batch.gate, (0, 6), value=1)
    padded = batch._replace(text=F.pad(batch.text, (0, 2)), mel=mel, gate=gate)
    alignment = F.pad(output.alignment, (0, 2, 0, 6), value=3)
    wider = Output(*(F.pad(x, (0, 6), value=3) for x in output[:3]), alignment)
    loss_function = Tacotron2Loss(guided_attention_weight=1)
    before, after = loss_function(output, batch), loss_function(wider, padded)
    assert_close(before.masked, after.masked)
    assert_close(before.guided_attention, after.guided_attention)
    assert not torch.isclose(before.total, after.total)


def test_guided_attention_follows_its_formula():
    batch = noise_batch([3, 2], [4, 2])
    output = random_output(batch)
    total = 0.0
    for i, (N, T) in enumerate([(3, 4), (2, 2)]):
        for n, t in itertools.product(range(N), range(T)):
            w = 1 - math.exp(-((n / N - t / T) ** 2) / (2 * 0.3**2))
            total += w * output.alignment[i, t, n].item()
    loss = Tacotron2Loss(guided_attention_weight=2, guided_attention_sigma=0.3)(output, batch)
    assert loss.guided_attention.item() == pytest.approx(total / 6, rel=1e-5)  # 6 frames
    assert_close(loss.objective, loss.total + 2 * loss.guided_attention)
