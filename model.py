"""Tacotron 2 (Shen et al. 2018), with the mathematics and parameter names of NVIDIA's code.

NVIDIA's published weights load with ``load_state_dict(..., strict=True)``. Decoder state is an
argument and result of each step, never kept on a module.

Inference calls all modules. In training, decoder/ computes what ``Decoder.step`` does, faster, from
the weights of its modules. If you change one of these, :func:`decoder.check_fast_path` notices, and
training calls the modules too (as with ``decoder=reference``).
"""

import copy
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from decoder import scan
from layers import (
    LinearNorm,
    LocationLayer,
    Prenet,
    conv_batch_norm,
    draw_mask,
    drop,
    dropout,
    has_ended,
    has_lingered,
    length_mask,
    repeat_steps,
)

CHECK_EVERY = 16  # steps of inference after which it is asked whether all clips have ended
Masks = tuple[Tensor | None, Tensor | None]  # of attention_rnn and decoder_rnn, for each step
N_READINGS = 8  # of each text in inference: docs/speech.md says what their mean is good for


class Output(NamedTuple):
    """The model's output with teacher forcing."""

    mel: Tensor  # (B, n_mels, T_out) log-mels before the postnet
    mel_postnet: Tensor  # (B, n_mels, T_out) log-mels after the postnet
    gate: Tensor  # (B, n_steps) logits of "this step has the last frame, or is later"
    alignment: Tensor  # (B, T_out, T_in) attention weights; each row sums to 1


class InferenceOutput(NamedTuple):
    """The model's output from text alone, masked beyond ``mel_lengths``."""

    mel: Tensor  # (B, n_mels, T_out)
    mel_postnet: Tensor  # (B, n_mels, T_out)
    gate: Tensor  # (B, n_steps)
    alignment: Tensor  # (B, T_out, T_in)
    mel_lengths: Tensor  # (B,)
    stopped: Tensor  # (B,) False if max_decoder_steps cut the clip off


class EncodedTexts(NamedTuple):
    """What every decoder step attends to."""

    memory: Tensor  # (B, T_in, D_encoder) the encoder's output
    keys: Tensor  # (B, T_in, D_attention) memory_layer(memory)
    padding: Tensor  # (B, T_in) True beyond a text's end


class DecoderState(NamedTuple):
    """What a decoder step passes on to the next."""

    attention_hidden: Tensor  # (B, D_attention_rnn)
    attention_cell: Tensor  # (B, D_attention_rnn)
    decoder_hidden: Tensor  # (B, D_decoder_rnn)
    decoder_cell: Tensor  # (B, D_decoder_rnn)
    weights: Tensor  # (B, T_in) attention weights of the last step
    weights_sum: Tensor  # (B, T_in) their sum over all steps so far
    context: Tensor  # (B, D_encoder)


class Attention(nn.Module):
    """Location-sensitive attention (Chorowski et al. 2015)."""

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        dim = hparams.attention_dim
        self.query_layer = LinearNorm(hparams.attention_rnn_dim, dim, bias=False, gain="tanh")
        self.memory_layer = LinearNorm(hparams.encoder_embedding_dim, dim, bias=False, gain="tanh")
        self.v = LinearNorm(dim, 1, bias=False)
        self.location_layer = LocationLayer(hparams)

    def forward(self, query: Tensor, texts: EncodedTexts, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Attends once, in one decoder step.

        Args:
            query: (B, D_attention_rnn)
            weights: (B, 2, T_in), those of the last step and their sum over all steps

        Returns:
            context (B, D_encoder), weights (B, T_in)
        """
        features = self.query_layer(query)[:, None] + self.location_layer(weights) + texts.keys
        energies = self.v(torch.tanh(features)).squeeze(2)  # (B, T_in)
        weights = F.softmax(energies.masked_fill(texts.padding, -math.inf), dim=1)
        return torch.bmm(weights[:, None], texts.memory).squeeze(1), weights


class Encoder(nn.Module):
    """Convolutions and a bidirectional LSTM over the symbols."""

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        dims = [hparams.symbols_embedding_dim]
        dims += [hparams.encoder_embedding_dim] * hparams.encoder_n_convolutions
        self.p_dropout = hparams.p_encoder_dropout
        self.convolutions = nn.ModuleList(
            conv_batch_norm(in_dim, out_dim, hparams.encoder_kernel_size, "relu")
            for in_dim, out_dim in pairwise(dims)
        )
        self.lstm = nn.LSTM(dims[-1], dims[-1] // 2, batch_first=True, bidirectional=True)

    def forward(
        self, embedded: Tensor, lengths: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Encodes symbols.

        Args:
            embedded: (B, D_symbols, T_in)
            lengths: (B,), descending, on the CPU
            dtype: for the convolutions, here and in the postnet; None: the input's

        Returns:
            (B, T_in, D_encoder)
        """
        x = embedded
        with _autocast(x, dtype):
            for convolution in self.convolutions:
                x = dropout(F.relu(convolution(x)), self.p_dropout, self.training)
        x = x.transpose(1, 2).to(embedded.dtype)  # (B, T_in, D_encoder)
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        packed, _ = self.lstm(packed)
        memory, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.size(1))
        return memory


class Decoder(nn.Module):
    """Two LSTMs around the attention. Each step makes ``n_frames_per_step`` frames of the mel: a
    row of D_step = n_frames_per_step x n_mels values, one frame after the other."""

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        self.n_mels, self.n_frames_per_step = hparams.n_mel_channels, hparams.n_frames_per_step
        self.step_dim = self.n_mels * self.n_frames_per_step
        self.attention_rnn_dim = hparams.attention_rnn_dim
        self.decoder_rnn_dim = hparams.decoder_rnn_dim
        self.p_attention_dropout = hparams.p_attention_dropout
        self.p_decoder_dropout = hparams.p_decoder_dropout
        self.implementation = hparams.decoder
        context_dim = hparams.encoder_embedding_dim
        self.prenet = Prenet(hparams)
        self.attention_rnn = nn.LSTMCell(hparams.prenet_dim + context_dim, self.attention_rnn_dim)
        self.attention_layer = Attention(hparams)
        self.decoder_rnn = nn.LSTMCell(self.attention_rnn_dim + context_dim, self.decoder_rnn_dim)
        self.linear_projection = LinearNorm(self.decoder_rnn_dim + context_dim, self.step_dim)
        self.gate_layer = LinearNorm(self.decoder_rnn_dim + context_dim, 1, gain="sigmoid")

    def initial_state(self, memory: Tensor) -> DecoderState:
        """Returns a state of zeros, for memory (B, T_in, D_encoder)."""
        B, T_in, context_dim = memory.shape
        attention, decoder = self.attention_rnn_dim, self.decoder_rnn_dim
        sizes = (attention, attention, decoder, decoder, T_in, T_in, context_dim)
        return DecoderState(*(memory.new_zeros(B, size) for size in sizes))

    def step(
        self,
        prenet_output: Tensor,
        state: DecoderState,
        texts: EncodedTexts,
        attention_mask: Tensor | None = None,
        decoder_mask: Tensor | None = None,
    ) -> DecoderState:
        """Returns the next state; ``prenet_output`` (B, D_prenet) is of the last step's frames.

        The masks (B, D_attention_rnn) and (B, D_decoder_rnn) are True for hidden units to keep.
        """
        attention_hidden, attention_cell = self.attention_rnn(
            torch.cat((prenet_output, state.context), 1),
            (state.attention_hidden, state.attention_cell),
        )
        # As in NVIDIA's code, the state that is carried on is the one after dropout.
        attention_hidden = drop(attention_hidden, attention_mask, self.p_attention_dropout)
        past = torch.stack((state.weights, state.weights_sum), 1)
        context, weights = self.attention_layer(attention_hidden, texts, past)
        decoder_hidden, decoder_cell = self.decoder_rnn(
            torch.cat((attention_hidden, context), 1), (state.decoder_hidden, state.decoder_cell)
        )
        decoder_hidden = drop(decoder_hidden, decoder_mask, self.p_decoder_dropout)
        return DecoderState(
            attention_hidden,
            attention_cell,
            decoder_hidden,
            decoder_cell,
            weights,
            state.weights_sum + weights,
            context,
        )

    def project(self, hidden: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Returns frames (..., D_step) and gate logits (...), of hidden states (..., D_decoder_rnn)
        and contexts (..., D_encoder), as one product."""
        layers = self.linear_projection.linear_layer, self.gate_layer.linear_layer
        weight = torch.cat([layer.weight for layer in layers])
        bias = torch.cat([layer.bias for layer in layers])
        of_hidden, of_context = weight.split([hidden.size(-1), context.size(-1)], 1)
        output = F.linear(hidden, of_hidden, bias) + F.linear(context, of_context)
        return output[..., :-1], output[..., -1]

    def forward(
        self, memory: Tensor, mel: Tensor, padding: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decodes with teacher forcing: every step reads the true frames before it.

        Args:
            memory: (B, T_in, D_encoder)
            mel: (B, n_mels, T_out), the targets; T_out is n_steps x n_frames_per_step
            padding: (B, T_in), True beyond a text's end
            dtype: for products with LSTM weights; None: the weights' own. The loop ignores it.

        Returns:
            mel (B, n_mels, T_out), gate logits (B, n_steps), alignment (B, T_out, T_in)
        """
        r = self.n_frames_per_step
        frames = F.pad(mel, (r, -r)).permute(2, 0, 1)  # (T_out, B, n_mels), the first r all zeros
        frames = frames.unflatten(0, (-1, r)).transpose(1, 2).flatten(2)  # (n_steps, B, D_step)
        frames = self.prenet(frames)  # (n_steps, B, D_prenet)
        texts = EncodedTexts(memory, self.attention_layer.memory_layer(memory), padding)
        # Both implementations drop these units.
        masks = (
            self._draw_mask(self.p_attention_dropout, frames, self.attention_rnn_dim),
            self._draw_mask(self.p_decoder_dropout, frames, self.decoder_rnn_dim),
        )
        if self.implementation == "reference":
            hidden, context, alignment = self._loop(frames, texts, masks)
        else:
            hidden, context, alignment = self._scan(frames, texts, masks, dtype)
        # (n_steps, B, D_step), (n_steps, B)
        frames, gate = self.project(hidden, context)
        return self.by_frame(frames.transpose(0, 1), gate.t(), alignment.transpose(0, 1))

    def _draw_mask(self, p: float, frames: Tensor, size: int) -> Tensor | None:
        """Draws which of ``size`` units to keep in each step of each clip; None: all of them."""
        if not self.training or p == 0:
            return None
        n_steps, B, _ = frames.shape
        return draw_mask(p, (n_steps, B, size), frames.device)

    def by_frame(
        self, frames: Tensor, gate: Tensor, alignment: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what :meth:`forward` does, of the steps' frames (B, n_steps, D_step), gate logits
        (B, n_steps) and alignment (B, n_steps, T_in)."""
        mel = frames.unflatten(2, (-1, self.n_mels)).flatten(1, 2)  # (B, T_out, n_mels)
        return mel.mT, gate, repeat_steps(alignment, self.n_frames_per_step)

    def generate(
        self, memory: Tensor, padding: Tensor, hparams: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decodes freely: every step reads the frames that the last one made. They are the mean of
        ``N_READINGS`` decoders' frames, which differ by the prenet's dropout and all read the mean.

        It stops once every clip has ended (:func:`has_ended`, or :func:`has_lingered`), or after
        ``max_decoder_steps``. Returns what :meth:`forward` does, and whether each clip has
        ended by each step, (B, n_steps).
        """
        last_symbol = (~padding).sum(1) - 1  # (B,)
        memory, padding = (x.repeat_interleave(N_READINGS, 0) for x in (memory, padding))
        texts = EncodedTexts(memory, self.attention_layer.memory_layer(memory), padding)
        state = self.initial_state(memory)
        frame = memory.new_zeros(len(memory) // N_READINGS, self.step_dim)
        frames, gates, weights = [], [], []
        for n in range(1, hparams.max_decoder_steps + 1):
            state = self.step(self.prenet(frame.repeat_interleave(N_READINGS, 0)), state, texts)
            readings = *self.project(state.decoder_hidden, state.context), state.weights
            frame, gate, weight = (x.unflatten(0, (-1, N_READINGS)).mean(1) for x in readings)
            frames.append(frame)
            gates.append(gate)
            weights.append(weight)
            # Only now and then, since asking makes a GPU finish first.
            if n % CHECK_EVERY == 0 or n == hparams.max_decoder_steps:
                ended = has_ended(torch.stack(gates, 1), hparams)  # (B, n_steps)
                ended |= has_lingered(torch.stack(weights, 1), last_symbol, hparams)
                if ended[:, -1].all():
                    break
        n = int((~ended).any(0).sum()) + 1  # up to the step by which the last clip has ended
        mel, gate, alignment = self.by_frame(
            torch.stack(frames[:n], 1), torch.stack(gates[:n], 1), torch.stack(weights[:n], 1)
        )
        return mel, gate, alignment, ended[:, :n]

    def _loop(
        self, frames: Tensor, texts: EncodedTexts, masks: Masks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns hidden states (n_steps, B, D_decoder_rnn), contexts (n_steps, B, D_encoder) and
        alignment (n_steps, B, T_in), step by step."""
        state = self.initial_state(texts.memory)
        states = []
        for t, frame in enumerate(frames):
            step_masks = (mask if mask is None else mask[t] for mask in masks)
            state = self.step(frame, state, texts, *step_masks)
            states.append(state)
        hidden = torch.stack([state.decoder_hidden for state in states])
        context = torch.stack([state.context for state in states])
        return hidden, context, torch.stack([state.weights for state in states])

    def _scan(
        self, frames: Tensor, texts: EncodedTexts, masks: Masks, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what :meth:`_loop` does, by decoder.scan."""
        rnn, layer = self.attention_rnn, self.attention_layer
        of_frame, of_context = rnn.weight_ih.split([frames.size(2), texts.memory.size(2)], 1)
        conv = layer.location_layer.location_conv.conv.weight  # (n_filters, 2, kernel_size)
        dense = layer.location_layer.location_dense.linear_layer.weight  # (D_attention, n_filters)
        return scan.decode(
            frames,
            texts.memory,
            texts.keys,
            texts.padding,
            of_frame,
            torch.cat((rnn.weight_hh, of_context), 1),
            rnn.bias_ih + rnn.bias_hh,
            layer.query_layer.linear_layer.weight,
            torch.einsum("af,fck->ack", dense, conv),  # two linear layers as one
            layer.v.linear_layer.weight[0],
            self.decoder_rnn.weight_ih,
            self.decoder_rnn.weight_hh,
            self.decoder_rnn.bias_ih + self.decoder_rnn.bias_hh,
            masks=masks,
            scales=(1 / (1 - self.p_attention_dropout), 1 / (1 - self.p_decoder_dropout)),
            dtype=dtype,
        )


class Postnet(nn.Module):
    """Convolutions whose output is added to the mel."""

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        n = hparams.postnet_n_convolutions
        dims = [hparams.n_mel_channels, *[hparams.postnet_embedding_dim] * (n - 1)]
        dims += [hparams.n_mel_channels]
        self.p_dropout = hparams.p_postnet_dropout
        gains = ["tanh"] * (n - 1) + ["linear"]
        self.convolutions = nn.ModuleList(
            conv_batch_norm(in_dim, out_dim, hparams.postnet_kernel_size, gain)
            for (in_dim, out_dim), gain in zip(pairwise(dims), gains, strict=True)
        )

    def forward(self, mel: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns what to add to the mel, (B, n_mels, T_out) of (B, n_mels, T_out)."""
        x = mel
        with _autocast(x, dtype):
            for convolution in self.convolutions[:-1]:
                x = dropout(torch.tanh(convolution(x)), self.p_dropout, self.training)
            x = dropout(self.convolutions[-1](x), self.p_dropout, self.training)
        return x.to(mel.dtype)


class Tacotron2(nn.Module):
    """From symbols to log-mels. ``hparams`` holds all sizes and dropout rates."""

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        self.hparams = hparams
        self.training_dtype = torch.bfloat16 if hparams.precision == "bf16" else None
        self.mask_padding = hparams.mask_padding
        self.embedding = nn.Embedding(hparams.n_symbols, hparams.symbols_embedding_dim)
        bound = math.sqrt(6 / (hparams.n_symbols + hparams.symbols_embedding_dim))
        nn.init.uniform_(self.embedding.weight, -bound, bound)
        self.encoder = Encoder(hparams)
        self.decoder = Decoder(hparams)
        self.postnet = Postnet(hparams)
        # What speech.measure_variance_gain measures at the end of a training. Other code lacks it.
        self.register_buffer("variance_gain", torch.zeros(hparams.n_mel_channels))

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *options: Any, **named: Any) -> Any:
        """Loads weights as every module does, and also those that lack ``variance_gain``."""
        weights = copy.copy(state_dict)  # with the versions of its layers
        weights.setdefault("variance_gain", self.variance_gain)
        return super().load_state_dict(weights, *options, **named)

    def turn_off_dropout(self) -> None:
        """Turns off all dropout but the prenet's, for the rest of a training."""
        self.encoder.p_dropout = self.postnet.p_dropout = 0.0
        self.decoder.p_attention_dropout = self.decoder.p_decoder_dropout = 0.0

    def forward(self, batch: Any) -> Output:
        """Predicts each frame from the true ones before it (teacher forcing).

        Args:
            batch: ``text`` (B, T_in) int64, ``text_lengths`` (B,) descending, ``mel``
                (B, n_mels, T_out), ``mel_lengths`` (B,); ``cpu_text_lengths`` (B,) on the CPU.
        """
        dtype = self.training_dtype if self.training else None  # comparable losses in validation
        embedded = self.embedding(batch.text).transpose(1, 2)  # (B, D_symbols, T_in)
        memory = self.encoder(embedded, batch.cpu_text_lengths, dtype)  # (B, T_in, D_encoder)
        padding = ~length_mask(batch.text_lengths, batch.text.size(1))  # (B, T_in)
        mel, gate, alignment = self.decoder(memory, batch.mel, padding, dtype)
        mel_postnet = mel + self.postnet(mel, dtype)  # (B, n_mels, T_out)
        if self.mask_padding:
            # Not in place: NVIDIA's code masks the tensor that the postnet's first convolution
            # saved for backward, which makes its gradient wrong.
            mel, mel_postnet, gate = _mask(mel, mel_postnet, gate, batch.mel_lengths)
        return Output(mel, mel_postnet, gate, alignment)

    @torch.inference_mode()
    def inference(self, text: Tensor, text_lengths: Tensor | None = None) -> InferenceOutput:
        """Generates frames until every clip has ended, or up to ``max_decoder_steps``.

        Apart from the prenet's dropout, a clip's result does not depend on the rest of the batch:
        since convolutions see beyond a clip's end, encoder and postnet run clip by clip.

        Args:
            text: (B, T_in) int64, on the model's device
            text_lengths: (B,), in any order; None: all T_in

        Raises:
            ValueError: the model is in training mode.
        """
        if self.training:
            raise ValueError("the model is in training mode; call model.eval() before inference")
        B, T_in = text.shape
        lengths = [T_in] * B if text_lengths is None else text_lengths.tolist()
        embedded = self.embedding(text).transpose(1, 2)  # (B, D_symbols, T_in)
        memories = [
            self.encoder(embedded[i : i + 1, :, :n], torch.tensor([n]))[0]
            for i, n in enumerate(lengths)
        ]
        memory = pad_sequence(memories, batch_first=True)  # (B, T_in, D_encoder)
        padding = ~length_mask(torch.tensor(lengths, device=text.device), memory.size(1))
        mel, gate, alignment, ended = self.decoder.generate(memory, padding, self.hparams)
        stopped = ended[:, -1]
        n_steps = (~ended).sum(1) + stopped  # with the one in which a clip ends
        mel_lengths = n_steps * self.decoder.n_frames_per_step
        mel_postnet = mel.clone()
        for i, n in enumerate(mel_lengths.tolist()):
            mel_postnet[i, :, :n] += self.postnet(mel[i : i + 1, :, :n])[0]
        mel, mel_postnet, gate = _mask(mel, mel_postnet, gate, mel_lengths)
        return InferenceOutput(mel, mel_postnet, gate, alignment, mel_lengths, stopped)


def _autocast(x: Tensor, dtype: torch.dtype | None) -> torch.autocast:
    """Makes convolutions within it run in ``dtype``; None: in their input's."""
    return torch.autocast(x.device.type, dtype, enabled=dtype is not None)


def _mask(
    mel: Tensor, mel_postnet: Tensor, gate: Tensor, mel_lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sets mels to 0 and gate logits to 1000 (stop) beyond the lengths (B,) of the mels."""
    padding = ~length_mask(mel_lengths, mel.size(2))  # (B, T_out)
    n_frames_per_step = mel.size(2) // gate.size(1)
    return (
        mel.masked_fill(padding[:, None], 0),
        mel_postnet.masked_fill(padding[:, None], 0),
        gate.masked_fill(padding[:, ::n_frames_per_step], 1e3),
    )
