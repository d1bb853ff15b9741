"""Tacotron 2 (Shen et al. 2018), with the mathematics and parameter names of NVIDIA's code.

NVIDIA's published weights load with ``load_state_dict(..., strict=True)``. Decoder state is an
argument and result of each step, never kept on a module.
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from decoder import scan
from layers import ConvNorm, LinearNorm, draw_mask, dropout, length_mask, repeat_steps

CHECK_EVERY = 16  # steps of inference after which it is asked whether all clips have ended


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


class DecoderState(NamedTuple):
    """What a decoder step passes on to the next."""

    attention_hidden: Tensor  # (B, D_attention_rnn)
    attention_cell: Tensor  # (B, D_attention_rnn)
    decoder_hidden: Tensor  # (B, D_decoder_rnn)
    decoder_cell: Tensor  # (B, D_decoder_rnn)
    weights: Tensor  # (B, T_in) attention weights of the last step
    weights_sum: Tensor  # (B, T_in) their sum over all steps so far
    context: Tensor  # (B, D_encoder)


class Prenet(nn.Module):
    """Bottleneck for the frames of the last step. Its dropout stays on, in inference too."""

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        step_dim = hparams.n_mel_channels * hparams.n_frames_per_step
        dims = [step_dim, hparams.prenet_dim, hparams.prenet_dim]
        self.p_dropout = hparams.p_prenet_dropout
        self.layers = nn.ModuleList(LinearNorm(dims[i], dims[i + 1], bias=False) for i in range(2))

    def forward(self, frames: Tensor) -> Tensor:  # (..., D_step) -> (..., D_prenet)
        for linear in self.layers:
            frames = dropout(F.relu(linear(frames)), self.p_dropout, training=True)
        return frames


class LocationLayer(nn.Module):
    """Turns the last and the summed attention weights into features of each symbol."""

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        n_filters = hparams.attention_location_n_filters
        self.location_conv = ConvNorm(
            2, n_filters, hparams.attention_location_kernel_size, bias=False
        )
        self.location_dense = LinearNorm(n_filters, hparams.attention_dim, bias=False, gain="tanh")

    def forward(self, weights: Tensor) -> Tensor:  # (B, 2, T_in) -> (B, T_in, D_attention)
        return self.location_dense(self.location_conv(weights).transpose(1, 2))


class Attention(nn.Module):
    """Location-sensitive attention (Chorowski et al. 2015).

    Inference calls this module. Training passes its weights to decoder/, which computes the same
    faster. If you change the module, :func:`decoder.check_fast_path` notices, and training calls
    it as well (as with ``decoder=reference``).
    """

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        dim = hparams.attention_dim
        self.query_layer = LinearNorm(hparams.attention_rnn_dim, dim, bias=False, gain="tanh")
        self.memory_layer = LinearNorm(hparams.encoder_embedding_dim, dim, bias=False, gain="tanh")
        self.v = LinearNorm(dim, 1, bias=False)
        self.location_layer = LocationLayer(hparams)

    def forward(
        self, query: Tensor, memory: Tensor, keys: Tensor, weights: Tensor, padding: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attends once, in one decoder step.

        Args:
            query: (B, D_attention_rnn)
            memory: (B, T_in, D_encoder)
            keys: (B, T_in, D_attention), ``memory_layer(memory)``
            weights: (B, 2, T_in), those of the last step and their sum over all steps
            padding: (B, T_in), True beyond a text's end

        Returns:
            context (B, D_encoder), weights (B, T_in)
        """
        features = self.query_layer(query)[:, None] + self.location_layer(weights) + keys
        energies = self.v(torch.tanh(features)).squeeze(2)  # (B, T_in)
        weights = F.softmax(energies.masked_fill(padding, -math.inf), dim=1)
        return torch.bmm(weights[:, None], memory).squeeze(1), weights


class Encoder(nn.Module):
    """Convolutions and a bidirectional LSTM over the symbols.

    Inference calls ``lstm``. Training on a CPU passes its weights to decoder/scan.py, which is
    faster. If you change ``lstm``, :func:`decoder.check_fast_path` notices, and training calls it
    as well (as with ``decoder=reference``).
    """

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        dims = [hparams.symbols_embedding_dim]
        dims += [hparams.encoder_embedding_dim] * hparams.encoder_n_convolutions
        self.p_dropout = hparams.p_encoder_dropout
        self.convolutions = nn.ModuleList(
            _convolution(*pair, hparams.encoder_kernel_size, "relu") for pair in pairwise(dims)
        )
        self.lstm = nn.LSTM(dims[-1], dims[-1] // 2, batch_first=True, bidirectional=True)
        self.implementation = hparams.decoder

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
        if self.training and self.implementation != "reference" and not x.is_cuda:
            return self._scan(x, lengths)  # on a GPU, cuDNN's LSTM
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        memory, _ = pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=x.size(1)
        )
        return memory

    def _scan(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Runs the LSTM by scan: instead of packing, it reverses each text within its length."""
        x = x.transpose(0, 1)  # (T_in, B, D_encoder)
        n = torch.arange(len(x))[:, None]  # (T_in, 1)
        turned = torch.where(n < lengths, lengths - 1 - n, n)[..., None]  # (T_in, B, 1)
        weight = self.lstm.get_parameter
        outputs = []
        for suffix in ("", "_reverse"):
            reverse = suffix == "_reverse"
            hidden = scan.lstm(
                x.gather(0, turned.expand_as(x)) if reverse else x,
                weight(f"weight_ih_l0{suffix}"),
                weight(f"weight_hh_l0{suffix}"),
                weight(f"bias_ih_l0{suffix}") + weight(f"bias_hh_l0{suffix}"),
            )
            outputs.append(hidden.gather(0, turned.expand_as(hidden)) if reverse else hidden)
        memory = torch.cat(outputs, 2).masked_fill((n >= lengths)[..., None], 0)
        return memory.transpose(0, 1)


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
        memory: Tensor,
        keys: Tensor,
        padding: Tensor,
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
        attention_hidden = _drop(attention_hidden, attention_mask, self.p_attention_dropout)
        context, weights = self.attention_layer(
            attention_hidden,
            memory,
            keys,
            torch.stack((state.weights, state.weights_sum), 1),
            padding,
        )
        decoder_hidden, decoder_cell = self.decoder_rnn(
            torch.cat((attention_hidden, context), 1), (state.decoder_hidden, state.decoder_cell)
        )
        decoder_hidden = _drop(decoder_hidden, decoder_mask, self.p_decoder_dropout)
        return DecoderState(
            attention_hidden,
            attention_cell,
            decoder_hidden,
            decoder_cell,
            weights,
            state.weights_sum + weights,
            context,
        )

    def output_weights(self) -> tuple[Tensor, Tensor]:
        """Returns weight (D_step + 1, D_decoder_rnn + D_encoder) and bias of frames and gate."""
        layers = self.linear_projection.linear_layer, self.gate_layer.linear_layer
        weight, bias = zip(*((layer.weight, layer.bias) for layer in layers), strict=True)
        return torch.cat(weight), torch.cat(bias)

    @staticmethod
    def project(
        hidden: Tensor, context: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns frames (..., D_step) and gate logits (...), of hidden states (..., D_decoder_rnn)
        and contexts (..., D_encoder), as one product with :meth:`output_weights`."""
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
        keys = self.attention_layer.memory_layer(memory)  # (B, T_in, D_attention)
        # Drawn here, so that every implementation drops the same units.
        T, B, _ = frames.shape
        attention_mask, decoder_mask = (
            draw_mask(p, (T, B, size), frames.device) if self.training and p else None
            for p, size in (
                (self.p_attention_dropout, self.attention_rnn_dim),
                (self.p_decoder_dropout, self.decoder_rnn_dim),
            )
        )
        inputs = frames, memory, keys, padding, attention_mask, decoder_mask
        if self.implementation == "reference":
            *features, alignment = self._loop(*inputs)
        else:
            *features, alignment = self._scan(*inputs, dtype)
        # (n_steps, B, D_step), (n_steps, B)
        frames, gate = self.project(*features, *self.output_weights())
        return self.by_frame(frames.transpose(0, 1), gate.t(), alignment.transpose(0, 1))

    def by_frame(
        self, frames: Tensor, gate: Tensor, alignment: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what :meth:`forward` does, of the steps' frames (B, n_steps, D_step), gate logits
        (B, n_steps) and alignment (B, n_steps, T_in)."""
        mel = frames.unflatten(2, (-1, self.n_mels)).flatten(1, 2)  # (B, T_out, n_mels)
        return mel.mT, gate, repeat_steps(alignment, self.n_frames_per_step)

    def generate(
        self, memory: Tensor, padding: Tensor, gate_threshold: float, max_steps: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decodes freely: every step reads the frames that the last one made.

        It stops once every clip has ended, with a probability (:func:`end_probability`) above
        ``gate_threshold``, or after ``max_steps`` steps. Returns what :meth:`forward` does, and
        whether each clip has ended by each step, (B, n_steps).
        """
        keys = self.attention_layer.memory_layer(memory)  # (B, T_in, D_attention)
        state = self.initial_state(memory)
        frame = memory.new_zeros(len(memory), self.step_dim)
        frames, gates, weights, output_weights = [], [], [], self.output_weights()
        for n in range(1, max_steps + 1):
            state = self.step(self.prenet(frame), state, memory, keys, padding)
            frame, gate = self.project(state.decoder_hidden, state.context, *output_weights)
            frames.append(frame)
            gates.append(gate)
            weights.append(state.weights)
            # Only now and then, since asking makes a GPU finish first.
            if n % CHECK_EVERY == 0 or n == max_steps:
                ended = end_probability(torch.stack(gates, 1)) > gate_threshold  # (B, n_steps)
                if ended[:, -1].all():
                    break
        n_running = int((~ended).any(0).sum())  # steps after which a clip goes on
        frames, gates, weights = (x[: n_running + 1] for x in (frames, gates, weights))
        outputs = self.by_frame(*(torch.stack(x, 1) for x in (frames, gates, weights)))
        return *outputs, ended[:, : n_running + 1]

    def _loop(
        self,
        frames: Tensor,
        memory: Tensor,
        keys: Tensor,
        padding: Tensor,
        attention_mask: Tensor | None,
        decoder_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns hidden states (n_steps, B, D_decoder_rnn), contexts (n_steps, B, D_encoder) and
        alignment (n_steps, B, T_in), step by step."""
        state = self.initial_state(memory)
        states = []
        for t, frame in enumerate(frames):
            masks = (mask if mask is None else mask[t] for mask in (attention_mask, decoder_mask))
            state = self.step(frame, state, memory, keys, padding, *masks)
            states.append((state.decoder_hidden, state.context, state.weights))
        return tuple(torch.stack(each) for each in zip(*states, strict=True))

    def _scan(
        self,
        frames: Tensor,
        memory: Tensor,
        keys: Tensor,
        padding: Tensor,
        attention_mask: Tensor | None,
        decoder_mask: Tensor | None,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what :meth:`_loop` does, by decoder.scan."""
        rnn, layer = self.attention_rnn, self.attention_layer
        of_frame, of_context = rnn.weight_ih.split([frames.size(2), memory.size(2)], 1)
        conv = layer.location_layer.location_conv.conv.weight  # (n_filters, 2, kernel_size)
        dense = layer.location_layer.location_dense.linear_layer.weight  # (D_attention, n_filters)
        return scan.decode(
            frames,
            memory,
            keys,
            padding,
            of_frame,
            torch.cat((rnn.weight_hh, of_context), 1),
            rnn.bias_ih + rnn.bias_hh,
            layer.query_layer.linear_layer.weight,
            torch.einsum("af,fck->ack", dense, conv),  # two linear layers as one
            layer.v.linear_layer.weight[0],
            self.decoder_rnn.weight_ih,
            self.decoder_rnn.weight_hh,
            self.decoder_rnn.bias_ih + self.decoder_rnn.bias_hh,
            masks=(attention_mask, decoder_mask),
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
            _convolution(*pair, hparams.postnet_kernel_size, gain)
            for pair, gain in zip(pairwise(dims), gains, strict=True)
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
        self.gate_threshold = hparams.gate_threshold
        self.max_decoder_steps = hparams.max_decoder_steps
        self.embedding = nn.Embedding(hparams.n_symbols, hparams.symbols_embedding_dim)
        bound = math.sqrt(6 / (hparams.n_symbols + hparams.symbols_embedding_dim))
        nn.init.uniform_(self.embedding.weight, -bound, bound)
        self.encoder = Encoder(hparams)
        self.decoder = Decoder(hparams)
        self.postnet = Postnet(hparams)

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
        mel, gate, alignment, ended = self.decoder.generate(
            memory, padding, self.gate_threshold, self.max_decoder_steps
        )
        stopped = ended[:, -1]
        n_steps = (~ended).sum(1) + stopped  # with the one in which a clip ends
        mel_lengths = n_steps * self.decoder.n_frames_per_step
        mel_postnet = mel.clone()
        for i, n in enumerate(mel_lengths.tolist()):
            mel_postnet[i, :, :n] += self.postnet(mel[i : i + 1, :, :n])[0]
        mel, mel_postnet, gate = _mask(mel, mel_postnet, gate, mel_lengths)
        return InferenceOutput(mel, mel_postnet, gate, alignment, mel_lengths, stopped)


def end_probability(gate: Tensor) -> Tensor:
    """Returns the probability (B, n_steps) that a clip has ended by each step, of gate logits
    (B, n_steps).

    Trained with ``mask_padding``, the gate sees each clip end once. So its probability p at a step
    is that of ending there if the clip has not ended before, and it has ended by then with
    1 - prod(1 - p). A clip whose end is uncertain may never have a p above a half, but it ends.
    """
    return -torch.expm1(-F.softplus(gate).cumsum(1))


def _convolution(in_dim: int, out_dim: int, kernel_size: int, gain: str) -> nn.Sequential:
    """Makes a convolution with batch norm."""
    return nn.Sequential(ConvNorm(in_dim, out_dim, kernel_size, gain=gain), nn.BatchNorm1d(out_dim))


def _autocast(x: Tensor, dtype: torch.dtype | None) -> torch.autocast:
    """Makes convolutions within it run in ``dtype``; None: in their input's."""
    return torch.autocast(x.device.type, dtype, enabled=dtype is not None)


def _drop(hidden: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """Drops units of ``hidden`` out; the mask is True for those to keep."""
    return hidden if mask is None else hidden * mask * (1 / (1 - p))


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
