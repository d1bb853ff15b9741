"""The fast teacher-forced decoder: recurrences over all frames, with hand-written backward.

With teacher forcing, all input frames are known, so everything that does not depend on the
previous step is a matrix product over many frames. Two recurrences remain:

    lstm     an LSTM with dropout of the state that it carries on (``nn.LSTM`` cannot do this)
    attend   an LSTM and location-sensitive attention, each feeding the other

:func:`lstm` is the first alone, :func:`decode` the second and, on its outputs, the first. Both are
an ``autograd.Function`` without parameters of its own. Forward saves the activated gates,
cells, outputs and attention weights. Backward recomputes the attention energies, and turns the
gates into coefficients of their derivatives, a few steps at a time. Its loop then computes only the
gradients of the gates, in place. Each large weight gets its gradient from one product over all
frames at the end.

The loops are in the four functions that return ``run``, which does a few consecutive steps on
slices of the full tensors. decoder.triton has the same four for NVIDIA GPUs.

Products with LSTM weights, and their gradients, use ``dtype``; everything else keeps its input's.

Shapes: T steps (decoder frames or encoder characters), B clips, T_in characters, H LSTM units,
E encoder features, A attention features, W characters in a location filter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat, zip_longest
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from decoder.products import adder, multiplier

STEPS = 8  # steps per call of run()
# Steps whose inputs' part of the gates, or its gradient, is one product; and the steps between two
# loops that run beside each other
SEGMENT = 64


class Loops(NamedTuple):
    """Makes the ``run`` of each loop, from the tensors that all its steps read."""

    lstm_forward: Callable[..., Callable[..., None]]
    lstm_backward: Callable[..., Callable[..., None]]
    attend_forward: Callable[..., Callable[..., None]]
    attend_backward: Callable[..., Callable[..., None]]
    beside: Callable[..., Callable[..., None]] | None = None  # makes one ``run`` of two


class Constants(NamedTuple):
    """What all steps of ``attend`` read."""

    memory: Tensor  # (B, T_in, E)
    keys: Tensor  # (B, T_in, A)
    padding: Tensor  # (B, T_in) booleans
    recurrent: Tensor  # (4H, H + E)
    query: Tensor  # (A, H)
    location: Tensor  # (A, 2, W)
    v: Tensor  # (A,)


class Saved(NamedTuple):
    """What the forward of ``attend`` saves of n steps for backward, beside the gates."""

    cell: Tensor  # (n + 1, B, H), the first row from before the first step
    features: Tensor  # (n, B, H + E), hidden states and contexts after each step
    past: Tensor  # (n + 1, B, 2, T_in + W - 1), weights and their sums before and after each step
    mask: Tensor | None  # (n, B, H)


class Gradients(NamedTuple):
    """What the backward of ``attend`` writes, and the gradients of its outputs in n steps."""

    gates: Tensor  # (n, B, 4H), at first the activated gates
    query: Tensor  # (n, B, A), of the query's projection
    next_gates: Tensor  # (B, 4H), of the step after these, and then of the first of these
    cell: Tensor  # (B, H), from the steps after these, and then from these too
    past: Tensor  # (B, 2, T_in), of the last weights and of their sum, in the same way
    memory: Tensor  # this and the following: sums over all steps so far
    keys: Tensor
    location: Tensor
    v: Tensor
    features: Tensor | None  # (n, B, H + E), read; None: there is none
    contexts: Tensor | None  # (n, B, E), read
    weights: Tensor | None  # (n, B, T_in), read


class Recomputed(NamedTuple):
    """Attention of n steps that backward computes again, and its gradients on the way."""

    weights: Tensor  # (n, B, T_in)
    slopes: Tensor  # (n, B, T_in, A), of the scores by the energies
    spread: Tensor  # (n, B, T_in, 2W), of the scores by the windows
    d_features: Tensor  # (n, B, H + E), from the outputs; the steps add contexts'
    d_scores: Tensor  # (n, B, T_in), written


def lstm(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Runs an LSTM from a zero state, which carries on its dropped-out output.

    Args:
        x: (T, B, D)
        weight_ih, weight_hh, bias: (4H, D), (4H, H), (4H,), gates in PyTorch's order
        mask: (T, B, H) booleans, the hidden states to keep, which are multiplied by ``scale``
        dtype: for products with LSTM weights; None: the input's

    Returns:
        (T, B, H)
    """
    inputs = (x, weight_ih, weight_hh, bias)
    return _LSTM.apply(*inputs, mask, scale, dtype or x.dtype, _needs_grad(inputs))


def decode(
    x: Tensor,
    memory: Tensor,
    keys: Tensor,
    padding: Tensor,
    weight_ih: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    query: Tensor,
    location: Tensor,
    v: Tensor,
    *lstm_weights: Tensor,
    masks: Sequence[Tensor | None] = (None, None),
    scales: tuple[float, float] = (1.0, 1.0),
    dtype: torch.dtype | None = None,
    loops: Loops | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs an LSTM that reads the last context, attention with its output as the query, and an LSTM
    that reads both.

    Args:
        x: (T, B, D), the first LSTM's inputs without the context
        memory: (B, T_in, E)
        keys: (B, T_in, A)
        padding: (B, T_in), True beyond a text's end
        weight_ih: (4H, D)
        recurrent: (4H, H + E), weights of the hidden state and the context
        bias: (4H,)
        query: (A, H)
        location: (A, 2, W), filters over the last weights and over their sum so far
        v: (A,)
        lstm_weights: those of the second LSTM, as for :func:`lstm`, with D = H + E
        masks, scales: of the first and of the second LSTM, as for :func:`lstm`
        dtype: as for :func:`lstm`
        loops: None: those of this file

    Returns:
        the second LSTM's hidden state (T, B, H); the context (T, B, E); the attention weights
        (T, B, T_in)
    """
    inputs = (x, memory, keys, weight_ih, recurrent, bias, query, location, v, *lstm_weights)
    options = padding, *masks, scales, dtype or x.dtype, loops or LOOPS, _needs_grad(inputs)
    return _Decode.apply(*inputs, *options)


# The LSTM


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight_ih, weight_hh, bias, mask, scale, dtype, save) -> Tensor:
        weight_ih, weight_hh = weight_ih.to(dtype), weight_hh.to(dtype)
        hidden = _first_zero(x, weight_hh.size(1))
        gates, cell = _room(x, weight_hh.size(1), save)
        run = _lstm_forward(weight_hh, x.size(1), scale)
        for tensors in _chunks(x, weight_ih, bias, gates, cell, [hidden], mask):
            run(*tensors)
        if save:
            ctx.save_for_backward(x, weight_ih, weight_hh, mask, gates, cell, hidden)
            ctx.scale = scale
        return hidden[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_hidden: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_ih, weight_hh, mask, gates, cell, hidden = ctx.saved_tensors
        d_gates = gates.clone() if _may_run_again() else gates
        run = _lstm_backward(weight_hh, x.size(1), ctx.scale)
        for tensors in _lstm_backward_chunks(d_gates, cell, mask, d_hidden):
            run(*tensors)
        d_bias, d_gates = d_gates.sum((0, 1)), d_gates.to(weight_hh.dtype)
        d_x, d_weight_ih = _input_gradients(ctx, d_gates, x, weight_ih)
        d_weight_hh = _weight_gradient(d_gates, hidden[:-1])
        return d_x, d_weight_ih, d_weight_hh, d_bias, *[None] * 4


def _lstm_backward_chunks(
    d_gates: Tensor, cell: Tensor, mask: Tensor | None, d_hidden: Tensor
) -> Iterator[tuple[Tensor | None, ...]]:
    """Yields the arguments of ``run`` for STEPS steps at a time, from the last."""
    d_next, d_cell = torch.zeros_like(d_gates[0]), torch.zeros_like(cell[0])
    for t in reversed(range(0, len(d_gates), STEPS)):
        tensors = cell[t : t + STEPS + 1], _slice(mask, t), _slice(d_hidden, t)
        yield d_gates[t : t + STEPS], d_next, d_cell, *tensors


def _lstm_forward(weight_hh: Tensor, B: int, scale: float) -> Callable[..., None]:
    recur = multiplier(weight_hh, B)

    def run(gates: Tensor, cell: Tensor, hidden: Tensor, mask: Tensor | None) -> None:
        """Activates gates (n, B, 4H), which hold the inputs' part. The first row of cell and
        hidden (n + 1, B, H) is given; the others are written."""
        masks = _scaled(mask, scale, hidden)
        for t, gate in enumerate(gates):
            _cell(gate, recur(hidden[t]), cell[t], cell[t + 1], hidden[t + 1], masks[t])

    return run


def _lstm_backward(weight_hh: Tensor, B: int, scale: float) -> Callable[..., None]:
    add_recurrent = adder(weight_hh.t(), B)

    def run(
        d_gates: Tensor,
        d_next: Tensor,
        d_cell: Tensor,
        cell: Tensor,
        mask: Tensor | None,
        d_output: Tensor,
    ) -> None:
        """Turns activated gates (n, B, 4H) into their gradients. ``d_next`` (B, 4H) and ``d_cell``
        (B, H) hold the gradients from the steps after these, and then from these."""
        through, keep = _coefficients(d_gates, cell, mask, scale)
        after = d_next
        for t in reversed(range(len(d_gates))):
            d_hidden = add_recurrent(d_output[t], after, in_place=False)
            after = d_gates[t]
            _cell_backward(after, d_hidden, d_cell, through[t], keep[t])
        d_next.copy_(after)

    return run


# The decoder: an LSTM with attention, and another LSTM


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x, memory, keys, weight_ih, recurrent, bias, query, location, v, lstm_ih, lstm_hh,
        lstm_bias, padding, mask, lstm_mask, scales, dtype, loops, save,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        weight_ih, recurrent = weight_ih.to(dtype), recurrent.to(dtype)
        lstm_ih, lstm_hh = lstm_ih.to(dtype), lstm_hh.to(dtype)
        (T, B, _), T_in, H, margin = x.shape, memory.size(1), query.size(1), location.size(2) // 2
        features = _first_zero(x, recurrent.size(1))
        hidden = _first_zero(x, lstm_hh.size(1))
        # Attention weights and their sums so far, with a margin for the filters on both sides.
        past = x.new_zeros(T + 1, B, 2, T_in + 2 * margin)
        gates, cell = _room(x, H, save)
        lstm_gates, lstm_cell = _room(x, lstm_hh.size(1), save)
        constants = Constants(memory, keys, padding, recurrent, query, location, v)
        _run_both(
            loops,
            loops.attend_forward(constants, scales[0]),
            _chunks(x, weight_ih, bias, gates, cell, [features, past], mask),
            loops.lstm_forward(lstm_hh, B, scales[1]),
            _chunks(features[1:], lstm_ih, lstm_bias, lstm_gates, lstm_cell, [hidden], lstm_mask),
            T,
        )
        if save:
            of_lstm = lstm_ih, lstm_hh, lstm_mask, lstm_gates, lstm_cell, hidden
            ctx.save_for_backward(
                x, weight_ih, *constants, mask, gates, cell, features, past, *of_lstm
            )
            ctx.options = scales, loops
            ctx.set_materialize_grads(False)
        return hidden[1:], features[1:, :, H:], past[1:, :, 0, margin : margin + T_in]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        d_hidden: Tensor | None,
        d_contexts: Tensor | None,
        d_weights: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        x, weight_ih, *constants, mask, gates, cell, features, past = ctx.saved_tensors[:-6]
        lstm_ih, lstm_hh, lstm_mask, lstm_gates, lstm_cell, hidden = ctx.saved_tensors[-6:]
        constants, (scales, loops) = Constants(*constants), ctx.options
        (T, B, _), (A, H) = x.shape, constants.query.shape
        d_gates, d_lstm_gates = (
            tensor.clone() if _may_run_again() else tensor for tensor in (gates, lstm_gates)
        )
        d_query = x.new_empty(T, B, A)
        d_past = x.new_zeros(B, 2, constants.memory.size(1))
        carried = torch.zeros_like(gates[0]), torch.zeros_like(cell[0]), d_past
        sums = d_memory, d_keys, d_location, d_v = [
            torch.zeros_like(tensor)
            for tensor in (constants.memory, constants.keys, constants.location, constants.v)
        ]

        def chunks() -> Iterator[tuple[Tensor | None, ...]]:
            multiply = multiplier(lstm_ih.t(), SEGMENT * B)
            for start in reversed(range(0, T, SEGMENT)):
                d_features = multiply(d_lstm_gates[start : start + SEGMENT]).to(x.dtype)
                for i in reversed(range(0, len(d_features), STEPS)):
                    t = start + i
                    yield (
                        *(d_gates[t : t + STEPS], d_query[t : t + STEPS], *carried, *sums),
                        *(_slice(d_features, i), _slice(d_contexts, t), _slice(d_weights, t)),
                        *(cell[t : t + STEPS + 1], features[t + 1 : t + STEPS + 1]),
                        *(past[t : t + STEPS + 1], _slice(mask, t)),
                    )

        if d_hidden is None:
            d_hidden = torch.zeros_like(hidden[1:])
        _run_both(
            loops,
            loops.lstm_backward(lstm_hh, B, scales[1]),
            _lstm_backward_chunks(d_lstm_gates, lstm_cell, lstm_mask, d_hidden),
            loops.attend_backward(constants, scales[0]),
            chunks(),
            T,
        )
        d_bias, d_lstm_bias = d_gates.sum((0, 1)), d_lstm_gates.sum((0, 1))
        d_gates, d_lstm_gates = d_gates.to(lstm_hh.dtype), d_lstm_gates.to(lstm_hh.dtype)
        d_x, d_weight_ih = _input_gradients(ctx, d_gates, x, weight_ih)
        d_recurrent = _weight_gradient(d_gates, features[:-1])
        d_weight_query = _weight_gradient(d_query, features[1:, :, :H])
        d_lstm_ih = _weight_gradient(d_lstm_gates, features[1:])
        d_lstm_hh = _weight_gradient(d_lstm_gates, hidden[:-1])
        return (
            *(d_x, d_memory, d_keys, d_weight_ih, d_recurrent, d_bias, d_weight_query, d_location),
            *(d_v, d_lstm_ih, d_lstm_hh, d_lstm_bias, *[None] * 7),
        )


def _attend_forward(constants: Constants, scale: float) -> Callable[..., None]:
    memory, keys, padding, recurrent, query, location, v = constants
    (B, T_in, E), H, margin = memory.shape, query.size(1), location.size(2) // 2
    recur, project = multiplier(recurrent, B), multiplier(query, B)
    add_location, flat_keys = adder(location.flatten(1), B * T_in), keys.flatten(0, 1)
    excluded = torch.zeros_like(memory[..., 0]).masked_fill_(padding, -torch.inf).flatten()

    def run(
        gates: Tensor, cell: Tensor, features: Tensor, past: Tensor, mask: Tensor | None
    ) -> None:
        """Activates gates (n, B, 4H), which hold the inputs' part. The first row of the cell
        (n + 1, B, H), of hidden state and context (n + 1, B, H + E), and of the past (weights
        and their sum, n + 1, B, 2, T_in + W - 1) is given; the others are written."""
        weights, sums = past[..., margin : margin + T_in].unbind(2)  # (n + 1, B, T_in)
        masks = _scaled(mask, scale, features)
        for t, gate in enumerate(gates):
            hidden, context = features[t + 1].split([H, E], 1)
            _cell(gate, recur(features[t]), cell[t], cell[t + 1], hidden, masks[t])
            energies = add_location(flat_keys, _windows(past[t], T_in), in_place=False)
            energies.view(B, T_in, -1).add_(project(hidden)[:, None])
            scores = torch.addmv(excluded, _tanh_(energies), v).view(B, T_in)
            weights[t + 1] = torch.softmax(scores, 1)
            torch.add(sums[t], weights[t + 1], out=sums[t + 1])
            context.copy_(torch.bmm(weights[t + 1][:, None], memory)[:, 0])

    return run


def attend_backward(
    constants: Constants, scale: float, make_steps: Callable[..., Callable[..., None]] | None = None
) -> Callable[..., None]:
    """Makes the ``run`` of backward; ``make_steps`` makes what :func:`_attend_backward_steps`, the
    default, makes."""
    memory, keys, _, recurrent, query, location, v = constants
    (B, T_in, _), (A, H), margin = memory.shape, query.shape, location.size(2) // 2
    filters = location.flatten(1)  # (A, 2W)
    locate = multiplier(filters, STEPS * B * T_in)
    unlocate = multiplier(filters.t(), STEPS * B * T_in)
    steps = (make_steps or _attend_backward_steps)(memory, recurrent, query, margin)

    def run(*tensors: Tensor | None) -> None:
        """Adds n steps to gradients; the arguments are those of Gradients and then of Saved."""
        gradients, saved = Gradients(*tensors[:12]), Saved(*tensors[12:])
        # The energies, tanh(...) @ v, again; and their derivatives, without the softmax.
        n, features = len(saved.features), saved.features
        windows = _windows(saved.past[:n], T_in)  # (n * B * T_in, 2W)
        tanh = locate(windows).view(n, B, T_in, A).add_(keys)
        _tanh_(tanh.add_(F.linear(features[..., :H], query)[:, :, None]))
        slopes = torch.addcmul(v, tanh * v, tanh, value=-1)  # (n, B, T_in, A)
        # (n, B, T_in). PyTorch 2.4's softmax gradient is wrong for what is not contiguous.
        weights = saved.past[1:, :, 0, margin : margin + T_in].contiguous()
        # Gradients of hidden states and contexts, from everything that used them.
        d_features = gradients.features
        d_features = torch.zeros_like(features) if d_features is None else d_features.clone()
        if gradients.contexts is not None:
            d_features[..., H:] += gradients.contexts
        d_scores = weights.new_empty(weights.shape)
        recomputed = Recomputed(weights, slopes, unlocate(slopes), d_features, d_scores)
        steps(gradients, saved, recomputed, scale)
        d_contexts = d_features[..., H:].transpose(0, 1)  # (B, n, E)
        gradients.memory.baddbmm_(weights.permute(1, 2, 0), d_contexts)
        gradients.v.addmv_(tanh.view(-1, A).t(), d_scores.view(-1))
        d_energies = slopes.mul_(d_scores[..., None])
        gradients.keys.add_(d_energies.sum(0))
        gradients.location.add_((d_energies.view(-1, A).t() @ windows).view_as(location))

    return run


def _attend_backward_steps(
    memory: Tensor, recurrent: Tensor, query: Tensor, margin: int
) -> Callable[..., None]:
    B, H = len(memory), query.size(1)
    add_recurrent, add_query = adder(recurrent.t(), B), adder(query.t(), B)
    d_windows, diagonals = _overlaid_windows(memory, margin)
    # Of weights and their sum: gradients of a sum go on to the steps before.
    is_sum = torch.arange(2, dtype=memory.dtype, device=memory.device)[:, None]

    def steps(gradients: Gradients, saved: Saved, recomputed: Recomputed, scale: float) -> None:
        """Writes the gradients of gates and query, those that are carried on to earlier steps, and
        ``d_scores``; completes the contexts' part of ``d_features``."""
        d_gates, d_past = gradients.gates, gradients.past
        through, keep = _coefficients(d_gates, saved.cell, saved.mask, scale)
        after = gradients.next_gates
        for t in reversed(range(len(d_gates))):
            add_recurrent(recomputed.d_features[t], after)
            d_hidden, d_context = recomputed.d_features[t].tensor_split([H], 1)
            d_weight = d_past.sum(1, keepdim=True)
            d_weight = torch.baddbmm(d_weight, d_context[:, None], memory.transpose(1, 2))[:, 0]
            if gradients.weights is not None:
                d_weight += gradients.weights[t]
            d_score = recomputed.d_scores[t]
            torch.ops.aten._softmax_backward_data.out(
                d_weight, recomputed.weights[t], 1, d_weight.dtype, grad_input=d_score
            )
            torch.bmm(d_score[:, None], recomputed.slopes[t], out=gradients.query[t][:, None])
            add_query(d_hidden, gradients.query[t])
            torch.mul(recomputed.spread[t], d_score[:, :, None], out=d_windows)
            torch.addcmul(diagonals.sum(3), d_past, is_sum, out=d_past)
            after = d_gates[t]
            _cell_backward(after, d_hidden, gradients.cell, through[t], keep[t])
        gradients.next_gates.copy_(after)

    return steps


# The LSTM cell

_fused_cell = torch.ops.aten._thnn_fused_lstm_cell  # PyTorch's own, on a GPU


def _cell(
    gate: Tensor,
    recurrent: Tensor,
    before: Tensor,
    after: Tensor,
    hidden: Tensor,
    mask: Tensor | None,
) -> None:
    """Adds ``recurrent`` to ``gate`` (B, 4H) and activates it, in place; writes cell ``after`` and
    ``hidden`` (B, H)."""
    if gate.is_cuda:  # one kernel instead of nine
        new_hidden, new_cell, activated = _fused_cell(gate, recurrent.to(gate.dtype), before)
        after.copy_(new_cell)
        gate.copy_(activated)
        torch.mul(new_hidden, 1 if mask is None else mask, out=hidden)
        return
    gate += recurrent
    i, f, g, o = gate.chunk(4, 1)
    gate[:, : 2 * i.size(1)].sigmoid_()
    _tanh_(g)
    o.sigmoid_()
    torch.mul(f, before, out=after)
    after.addcmul_(i, g)
    hidden.copy_(after)
    _tanh_(hidden).mul_(o)
    if mask is not None:
        hidden.mul_(mask)


def _coefficients(
    gates: Tensor, cell: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Turns activated gates (n, B, 4H) into coefficients of their gradients, in place.

    Args:
        cell: (n + 1, B, H), the first row from before the first step

    Returns:
        two more coefficients (n, B, H): hidden state to cell, and cell to previous cell
    """
    i, f, g, o = gates.chunk(4, 2)
    tanh = _tanh_(cell[1:].clone())
    if mask is not None:
        tanh_out = tanh * mask * scale
        out = o * mask * scale
    else:
        tanh_out, out = tanh, o
    through = out.addcmul(out * tanh, tanh, value=-1)
    keep = f.clone()
    slope_i, slope_g = i * g, i.addcmul(i * g, g, value=-1)
    i.neg_().add_(1).mul_(slope_i)
    torch.mul(1 - f, f, out=f).mul_(cell[:-1])
    g.copy_(slope_g)
    torch.mul(1 - o, o, out=o).mul_(tanh_out)
    return through, keep


def _cell_backward(
    gate: Tensor, d_hidden: Tensor, d_cell: Tensor, through: Tensor, keep: Tensor
) -> None:
    """Turns a step's coefficients (B, 4H) into gradients; ``d_cell`` moves to the step before."""
    H = d_cell.size(1)
    d_cell.addcmul_(d_hidden, through)
    gate[:, : 3 * H].view(-1, 3, H).mul_(d_cell[:, None])
    gate[:, 3 * H :].mul_(d_hidden)
    d_cell.mul_(keep)


# The attention's windows


def _windows(past: Tensor, T_in: int) -> Tensor:
    """Returns the filters' windows (... * B * T_in, 2W) over ``past`` (..., B, 2, T_in + W - 1)."""
    past = past.contiguous()
    W = past.size(-1) - T_in + 1
    windows = past.unfold(-1, W, 1)  # (..., B, 2, T_in, W)
    return windows.transpose(-2, -3).reshape(-1, 2 * W)


def _overlaid_windows(memory: Tensor, margin: int) -> tuple[Tensor, Tensor]:
    """Allocates d_windows (B, T_in, 2W), with a view whose sums along the last axis are the adjoint
    of :func:`_windows`: (B, 2, T_in, W)."""
    B, T_in, _ = memory.shape
    W = 2 * margin + 1
    padded = memory.new_zeros(B, T_in + 2 * margin, 2 * W)
    # Window n + margin - w saw character n at position w: sum along diagonals.
    strides = (padded.stride(0), W, 2 * W, 2 * W - 1)
    d_windows = padded[:, margin : margin + T_in]
    return d_windows, padded.as_strided((B, 2, T_in, W), strides, W - 1)


# Products


def _input_gradients(
    ctx: Any, d_gates: Tensor, x: Tensor, weight_ih: Tensor
) -> tuple[Tensor | None, Tensor]:
    rows = d_gates.size(0) * d_gates.size(1)
    d_x = None
    if ctx.needs_input_grad[0]:
        d_x = multiplier(weight_ih.t(), rows)(d_gates).to(x.dtype)
    return d_x, _weight_gradient(d_gates, x)


def _weight_gradient(d_output: Tensor, x: Tensor) -> Tensor:
    """Returns (N, K) of (T, B, N) and (T, B, K), multiplied in the dtype of the first."""
    product = d_output.flatten(0, 1).t() @ x.flatten(0, 1).to(d_output.dtype)
    return product.to(x.dtype)


# Loops


def _first_zero(x: Tensor, size: int) -> Tensor:
    """Allocates (T + 1, B, size), whose row t + 1 is that after step t; the first is zero."""
    states = x.new_empty(len(x) + 1, x.size(1), size)
    states[0] = 0
    return states


def _room(x: Tensor, H: int, save: bool) -> tuple[Tensor, Tensor]:
    """Allocates gates (n, B, 4H) and cells (n + 1, B, H), the first row zero: n is T if backward
    needs them, otherwise at most SEGMENT."""
    gates = x.new_empty(len(x) if save else min(len(x), SEGMENT), x.size(1), 4 * H)
    return gates, _first_zero(gates, H)


def _chunks(
    x: Tensor,
    weight_ih: Tensor,
    bias: Tensor,
    gates: Tensor,
    cell: Tensor,
    states: Sequence[Tensor],
    mask: Tensor | None,
) -> Iterator[tuple[Tensor | None, ...]]:
    """Yields the arguments of ``run`` for STEPS steps at a time: gates, with the inputs' part, and
    cells; states, one row more than steps; the mask. Reads x (T, B, D) a SEGMENT at a time."""
    multiply = multiplier(weight_ih, SEGMENT * x.size(1))
    for start in range(0, len(x), SEGMENT):
        part = multiply(x[start : start + SEGMENT], bias)
        first = start if len(gates) == len(x) else 0
        if start and not first:
            cell[0] = cell[SEGMENT]
        gates[first : first + len(part)] = part
        for i in range(0, len(part), STEPS):
            n, here, t = min(STEPS, len(part) - i), first + i, start + i
            rows = (state[t : t + n + 1] for state in states)
            yield gates[here : here + n], cell[here : here + n + 1], *rows, _slice(mask, t)


def _run_both(
    loops: Loops,
    first: Callable[..., None],
    chunks: Iterable[tuple],
    second: Callable[..., None],
    later_chunks: Iterable[tuple],
    T: int,
) -> None:
    """Runs two loops, of which the second reads what the first wrote: if ``loops`` can, beside each
    other, the second a SEGMENT behind; otherwise one after the other. Each ``run`` is called in one
    go, the first's, that of both, the second's: their buffers may share memory."""
    both = loops.beside and loops.beside(first, second)
    later_chunks = chain(repeat(None, -(-(SEGMENT if both else T) // STEPS)), later_chunks)
    for here, later in zip_longest(chunks, later_chunks):
        if here and later:
            both(*here, *later)
        elif here:
            first(*here)
        elif later:
            second(*later)


def _slice(tensor: Tensor | None, t: int) -> Tensor | None:
    return None if tensor is None else tensor[t : t + STEPS]


def _scaled(mask: Tensor | None, scale: float, like: Tensor) -> Sequence[Tensor | None]:
    """Returns what each step's hidden state is multiplied by, (n, B, H)."""
    return [None] * STEPS if mask is None else mask.to(like.dtype).mul_(scale)


def _tanh_(x: Tensor) -> Tensor:
    """Applies tanh in place; on a CPU by sigmoid, whose kernel is several times as fast."""
    return x.tanh_() if x.is_cuda else x.mul_(2).sigmoid_().mul_(2).sub_(1)


def _needs_grad(inputs: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def _may_run_again() -> bool:
    """Says if backward may run again (``retain_graph``) and must not overwrite saved tensors."""
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps_graph is None or keeps_graph()


LOOPS = Loops(_lstm_forward, _lstm_backward, _attend_forward, attend_backward)
