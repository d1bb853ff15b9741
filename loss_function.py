"""The training loss, and the padding-independent loss that compares across batches."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import length_mask


class Loss(NamedTuple):
    """Scalars. ``mel``, ``mel_postnet`` and ``gate`` average over the padded tensors."""

    objective: Tensor  # what training minimises: total + weight x guided_attention
    total: Tensor  # mel + mel_postnet + gate: NVIDIA's loss, which the paper's Table 2 reports
    mel: Tensor  # mean squared error before the postnet
    mel_postnet: Tensor  # and after it
    gate: Tensor  # binary cross-entropy of the stop decision
    masked: Tensor  # total over real frames only: padding a batch further does not change it
    guided_attention: Tensor  # 0 when its weight is 0


class Tacotron2Loss(nn.Module):
    """``Tacotron2Loss()(output, batch) -> Loss``.

    Args:
        guided_attention_weight: of the guided attention loss (Tachibana et al. 2018), which
            penalises attention away from the diagonal. The paper has none.
        guided_attention_sigma: their g, the width of the diagonal as a share of its length.
    """

    def __init__(
        self, guided_attention_weight: float = 0.0, guided_attention_sigma: float = 0.2
    ) -> None:
        super().__init__()
        self.guided_attention_weight = guided_attention_weight
        self.guided_attention_sigma = guided_attention_sigma

    def forward(self, output: Any, batch: Any) -> Loss:
        """Losses of one batch.

        Args:
            output: ``mel``, ``mel_postnet`` (B, n_mels, T_out), ``gate`` (B, T_out) logits,
                ``alignment`` (B, T_out, T_in).
            batch: targets ``mel`` and ``gate`` of the same shapes, ``mel_lengths`` and
                ``text_lengths`` (B,).
        """
        mel = (output.mel - batch.mel).square()  # (B, n_mels, T_out)
        mel_postnet = (output.mel_postnet - batch.mel).square()  # (B, n_mels, T_out)
        gate = F.binary_cross_entropy_with_logits(output.gate, batch.gate, reduction="none")
        total = mel.mean() + mel_postnet.mean() + gate.mean()

        real = length_mask(batch.mel_lengths, batch.mel.size(2))  # (B, T_out)
        per_frame = (mel + mel_postnet).mean(1) + gate  # (B, T_out)
        masked = per_frame.masked_fill(~real, 0).sum() / batch.mel_lengths.sum()

        guided = torch.zeros_like(total)
        if self.guided_attention_weight:
            guided = self._guided_attention(output.alignment, batch)
        return Loss(
            objective=total + self.guided_attention_weight * guided,
            total=total,
            mel=mel.mean(),
            mel_postnet=mel_postnet.mean(),
            gate=gate.mean(),
            masked=masked,
            guided_attention=guided,
        )

    def _guided_attention(self, alignment: Tensor, batch: Any) -> Tensor:
        """Sum over characters of A x (1 - exp(-(n/N - t/T)^2 / 2g^2)), mean over real frames.

        A frame's attention sums to 1, so this is in [0, 1] whatever the text's length; the
        mean over characters too, as Tachibana et al. have it, would shrink as texts grow.
        """
        n_frames, n_chars = batch.mel_lengths[:, None, None], batch.text_lengths[:, None, None]
        t = torch.arange(alignment.size(1), device=alignment.device)[None, :, None]
        n = torch.arange(alignment.size(2), device=alignment.device)[None, None, :]
        away = (n / n_chars - t / n_frames) / self.guided_attention_sigma
        penalty = 1 - torch.exp(-away.square() / 2)  # (B, T_out, T_in)
        real = (t < n_frames) & (n < n_chars)
        return (alignment * penalty).masked_fill(~real, 0).sum() / batch.mel_lengths.sum()


def alignment_scores(
    alignment: Tensor, text_lengths: Tensor, mel_lengths: Tensor, band: float = 0.1
) -> tuple[Tensor, Tensor]:
    """How much attention looks like reading aloud, per clip, each (B,) in [0, 1].

    Args:
        alignment: (B, T_out, T_in)
        text_lengths, mel_lengths: (B,)
        band: half width of the diagonal, as a share of the text

    Returns:
        diagonality: the share of attention within the band (1: on the diagonal; about
        2 x band: anywhere). focus: the mean over frames of the largest weight.
    """
    t = torch.arange(alignment.size(1), device=alignment.device)[None, :, None]
    n = torch.arange(alignment.size(2), device=alignment.device)[None, None, :]
    real = t < mel_lengths[:, None, None]
    near = (n / text_lengths[:, None, None] - t / mel_lengths[:, None, None]).abs() <= band
    diagonality = (alignment * (near & real)).sum((1, 2)) / mel_lengths
    focus = (alignment * real).amax(2).sum(1) / mel_lengths
    return diagonality, focus
