"""The loss that is trained on, and a masked loss that does not depend on padding."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import length_mask, repeat_steps


class Loss(NamedTuple):
    """Scalars. ``mel``, ``mel_postnet`` and ``gate`` are means over padded tensors."""

    objective: Tensor  # what training minimises: total or masked, + weight x guided_attention
    total: Tensor  # mel + mel_postnet + gate: NVIDIA's loss of a batch
    mel: Tensor  # mean squared error before the postnet
    mel_postnet: Tensor  # mean squared error after it
    gate: Tensor  # binary cross-entropy of the stop decision
    masked: Tensor  # total over real frames only: does not depend on padding
    guided_attention: Tensor  # 0 when its weight is 0


class Tacotron2Loss(nn.Module):
    """``Tacotron2Loss()(output, batch) -> Loss``.

    Args:
        guided_attention_weight: weight of the guided attention loss (Tachibana et al. 2018),
            which penalises attention away from the diagonal. The paper does not use it.
        guided_attention_sigma: their g, the width of the unpenalised diagonal (0 to 1).
        loss: which of the two the objective has, "padded" (total) or "masked". With
            ``mask_padding`` the first is about the second times the share of real frames in the
            batch, so that a batch with much padding counts less.
    """

    def __init__(
        self,
        guided_attention_weight: float = 0.0,
        guided_attention_sigma: float = 0.2,
        loss: str = "padded",
    ) -> None:
        super().__init__()
        self.loss = loss
        self.guided_attention_weight = guided_attention_weight
        self.guided_attention_sigma = guided_attention_sigma

    def forward(self, output: Any, batch: Any, share: tuple[float, float] = (1.0, 1.0)) -> Loss:
        """Computes the losses of a batch.

        Args:
            output: ``mel``, ``mel_postnet`` (B, n_mels, T_out), ``gate`` (B, n_steps) logits,
                ``alignment`` (B, T_out, T_in). A step's gate loss counts once for each frame.
            batch: targets ``mel`` and ``gate`` of the same shapes, ``mel_lengths`` and
                ``text_lengths`` (B,).
            share: for one of several processes, how many frames it has, with padding and without,
                over the mean of the processes. The mean of their losses is then the mean over all
                frames.
        """
        mel = (output.mel - batch.mel).square()  # (B, n_mels, T_out)
        mel_postnet = (output.mel_postnet - batch.mel).square()  # (B, n_mels, T_out)
        gate = F.binary_cross_entropy_with_logits(output.gate, batch.gate, reduction="none")
        padded_share, real_share = share
        total = (mel.mean() + mel_postnet.mean() + gate.mean()) * padded_share

        real = length_mask(batch.mel_lengths, batch.mel.size(2))  # (B, T_out)
        n_frames_per_step = batch.mel.size(2) // gate.size(1)
        per_frame = (mel + mel_postnet).mean(1)  # (B, T_out)
        per_frame = per_frame + repeat_steps(gate, n_frames_per_step)
        masked = per_frame.masked_fill(~real, 0).sum() / batch.mel_lengths.sum() * real_share

        guided = torch.zeros_like(total)
        if self.guided_attention_weight:
            guided = self._guided_attention(output.alignment, batch) * real_share
        return Loss(
            objective=(masked if self.loss == "masked" else total)
            + self.guided_attention_weight * guided,
            total=total,
            mel=mel.mean(),
            mel_postnet=mel_postnet.mean(),
            gate=gate.mean(),
            masked=masked,
            guided_attention=guided,
        )

    def _guided_attention(self, alignment: Tensor, batch: Any) -> Tensor:
        """Sums A x (1 - exp(-(n/N - t/T)^2 / 2g^2)) over characters; the mean over real frames.

        A frame's attention sums to 1, so this is in [0, 1] for any text length. Tachibana et al.
        take the mean over characters, which would shrink for longer texts.
        """
        _, T_out, T_in = alignment.shape
        distance = distance_from_diagonal(alignment, batch.text_lengths, batch.mel_lengths)
        penalty = 1 - torch.exp(-(distance / self.guided_attention_sigma).square() / 2)
        real_frames = length_mask(batch.mel_lengths, T_out)[:, :, None]  # (B, T_out, 1)
        real = real_frames & length_mask(batch.text_lengths, T_in)[:, None]  # (B, T_out, T_in)
        return (alignment * penalty).masked_fill(~real, 0).sum() / batch.mel_lengths.sum()


def distance_from_diagonal(alignment: Tensor, text_lengths: Tensor, mel_lengths: Tensor) -> Tensor:
    """Returns n/N - t/T for each weight of an alignment (B, T_out, T_in)."""
    _, T_out, T_in = alignment.shape
    t = torch.arange(T_out, device=alignment.device)[:, None]
    n = torch.arange(T_in, device=alignment.device)
    return n / text_lengths[:, None, None] - t / mel_lengths[:, None, None]
