"""The fast teacher-forced decoder: recurrences over all frames, with hand-written backward.

In teacher forcing all input frames are known, so whatever does not depend on the step before
is one matrix product over all of them. What remains are two recurrences:

    lstm     an LSTM whose output is dropped out as it is carried on (``nn.LSTM`` has no such)
    attend   an LSTM and location-sensitive attention, each of which feeds the other

Each is one ``autograd.Function`` without parameters of its own. Forward keeps the activated
gates, the cells, the outputs and the attention weights. Backward computes the attention's
energies again, turns the gates into the coefficients of their derivatives a few steps at a time,
lets its loop make the gates' gradients and nothing else, over the saved gates, and then gets the
gradient of every weight from products over all frames.

T steps (frames of the decoder, characters of the encoder), B clips, T_in characters, H units,
E features of a character, A features compared, W characters in the location filters.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

STEPS = 8  # steps whose derivatives are prepared together: few enough to stay in the cache
SEGMENT = 64  # steps whose gates exist together when nothing is kept for backward


def lstm(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """An LSTM from a zero state; what it outputs is what it carries on.

    Args:
        x: (T, B, D)
        weight_ih, weight_hh, bias: (4H, D), (4H, H), (4H,), gates in PyTorch's order
        mask: (T, B, H) booleans, the hidden states to keep, which are multiplied by ``scale``

    Returns:
        (T, B, H)
    """
    inputs = (x, weight_ih, weight_hh, bias)
    return _LSTM.apply(*inputs, mask, scale, _needs_grad(inputs))


def attend(
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
    mask: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """An LSTM that sees the last context, and attention that looks with its output.

    Args:
        x: (T, B, D), all inputs of the LSTM but the context
        memory: (B, T_in, E)
        keys: (B, T_in, A)
        padding: (B, T_in), True beyond a text's end
        weight_ih: (4H, D)
        recurrent: (4H, H + E), of the hidden state and of the context
        bias: (4H,)
        query: (A, H)
        location: (A, 2, W) filters over the last weights and the sum of all weights before
        v: (A,)
        mask: (T, B, H) booleans, the hidden states to keep, which are multiplied by ``scale``

    Returns:
        hidden state and context side by side (T, B, H + E), the context again (T, B, E), and the
        attention weights (T, B, T_in)
    """
    inputs = (x, memory, keys, weight_ih, recurrent, bias, query, location, v)
    return _Attend.apply(*inputs, padding, mask, scale, _needs_grad(inputs))


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight_ih, weight_hh, bias, mask, scale, save) -> Tensor:
        T, B, H = x.size(0), x.size(1), weight_hh.size(1)
        hidden = x.new_empty(T + 1, B, H)  # row t + 1 is the state after step t
        hidden[0] = 0
        recur = multiplier(weight_hh, B)
        for start, gates, cell in _segments(x, weight_ih, bias, H, save):
            for t, gate in enumerate(gates):
                gate += recur(hidden[start + t])
                _cell(
                    gate, cell[t], cell[t + 1], hidden[start + t + 1], _at(mask, start + t), scale
                )
        if save:
            ctx.save_for_backward(x, weight_ih, weight_hh, mask, gates, cell, hidden)
            ctx.scale = scale
        return hidden[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_ih, weight_hh, mask, gates, cell, hidden = ctx.saved_tensors
        d_gates = gates.clone() if _is_kept() else gates
        recur = multiplier(weight_hh.t(), x.size(1))
        d_cell = torch.zeros_like(cell[0])
        for start in _starts_backwards(len(x)):
            steps = slice(start, start + STEPS)
            through, keep = _to_coefficients(
                d_gates[steps], cell[start : start + STEPS + 1], _at(mask, steps), ctx.scale
            )
            for t in reversed(range(len(keep))):
                d_hidden = d_output[start + t].clone()
                if start + t + 1 < len(x):
                    d_hidden += recur(d_gates[start + t + 1])
                _cell_backward(d_gates[start + t], d_hidden, d_cell, through[t], keep[t])
        d_x, d_weight_ih, d_bias = _input_gradients(ctx, d_gates, x, weight_ih)
        d_weight_hh = _weight_gradient(d_gates, hidden[:-1])
        return d_x, d_weight_ih, d_weight_hh, d_bias, None, None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x, memory, keys, weight_ih, recurrent, bias, query, location, v, padding, mask,
        scale, save,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        (T, B, _), T_in, (A, H) = x.shape, memory.size(1), query.shape
        margin = location.size(2) // 2
        features = x.new_empty(T + 1, B, recurrent.size(1))  # row t + 1 is that of step t
        features[0] = 0
        # Weights, and their sums over all steps so far, with room for the filters on each side.
        past = x.new_zeros(T + 1, B, 2, T_in + 2 * margin)
        weights, sums = past[..., margin : margin + T_in].unbind(2)  # (T + 1, B, T_in)
        recur, ask = multiplier(recurrent, B), multiplier(query, B)
        locate = multiplier(location.flatten(1), B * T_in)
        for start, gates, cell in _segments(x, weight_ih, bias, H, save):
            for t, gate in enumerate(gates, start):
                hidden, context = features[t + 1].split([H, memory.size(2)], 1)
                gate += recur(features[t])
                _cell(gate, cell[t - start], cell[t - start + 1], hidden, _at(mask, t), scale)
                energies = locate(_windows(past[t], T_in)).view(B, T_in, A)
                energies.add_(keys).add_(ask(hidden)[:, None])
                scores = (_tanh_(energies) @ v).masked_fill_(padding, -torch.inf)
                weights[t + 1] = torch.softmax(scores, 1)
                torch.add(sums[t], weights[t + 1], out=sums[t + 1])
                context.copy_(torch.bmm(weights[t + 1][:, None], memory)[:, 0])
        if save:
            ctx.save_for_backward(
                x, memory, keys, weight_ih, recurrent, query, location, v, mask, gates, cell,
                features, past,
            )  # fmt: skip
            ctx.scale = scale
            ctx.set_materialize_grads(False)
        return features[1:], features[1:, :, H:], weights[1:]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_output: Tensor | None, d_contexts: Tensor | None, d_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (
            x, memory, keys, weight_ih, recurrent, query, location, v, mask, gates, cell, features,
            past,
        ) = ctx.saved_tensors  # fmt: skip
        (T, B, _), (_, T_in, E), (A, H) = x.shape, memory.shape, query.shape
        margin, filters = location.size(2) // 2, location.flatten(1)  # (A, 2W)
        weights = past[1:, :, 0, margin : margin + T_in]  # (T, B, T_in)
        d_gates = gates.clone() if _is_kept() else gates
        d_asked = x.new_empty(T, B, A)
        d_memory, d_keys, d_filters, d_v = (
            torch.zeros_like(tensor) for tensor in (memory, keys, filters, v)
        )
        d_cell = torch.zeros_like(cell[0])
        d_past = x.new_zeros(B, 2, T_in)  # of a step's weights and sums, from the steps after
        recur, ask = multiplier(recurrent.t(), B), multiplier(query.t(), B)
        locate = multiplier(filters, STEPS * B * T_in)
        spread_out = multiplier(filters.t(), STEPS * B * T_in)
        for start in _starts_backwards(T):
            steps = slice(start, min(start + STEPS, T))
            through, keep = _to_coefficients(
                d_gates[steps], cell[start : steps.stop + 1], _at(mask, steps), ctx.scale
            )
            # The energies again, tanh(...) @ v, and their derivatives, but for that of softmax.
            windows = _windows(past[steps], T_in)  # (steps * B * T_in, 2W)
            asked = features[start + 1 : steps.stop + 1, :, :H] @ query.t()  # (steps, B, A)
            tanh = locate(windows).view(-1, B, T_in, A).add_(keys)
            _tanh_(tanh.add_(asked[:, :, None]))
            slopes = torch.addcmul(v, tanh * v, tanh, value=-1)  # (steps, B, T_in, A)
            spread = spread_out(slopes)  # (steps, B, T_in, 2W)
            d_scores = x.new_empty(len(slopes), B, T_in)
            # Of hidden state and context, from all that used them.
            d_features = torch.zeros_like(features[steps])
            if d_output is not None:
                d_features += d_output[steps]
            if d_contexts is not None:
                d_features[..., H:] += d_contexts[steps]
            for t in reversed(range(len(slopes))):
                d_hidden, d_context = d_features[t].split([H, E], 1)
                if start + t + 1 < T:
                    d_features[t] += recur(d_gates[start + t + 1])
                d_weight = torch.bmm(d_context[:, None], memory.transpose(1, 2))[:, 0]
                d_weight += d_past.sum(1)
                if d_weights is not None:
                    d_weight += d_weights[start + t]
                weight = weights[start + t]
                d_weight -= (d_weight * weight).sum(1, keepdim=True)
                d_score = torch.mul(d_weight, weight, out=d_scores[t])
                torch.bmm(d_score[:, None], slopes[t], out=d_asked[start + t][:, None])
                d_hidden += ask(d_asked[start + t])
                d_window = _add_windows(spread[t] * d_score[:, :, None], margin)  # (B, 2, T_in)
                d_past[:, 0] = d_window[:, 0]
                d_past[:, 1] += d_window[:, 1]
                _cell_backward(d_gates[start + t], d_hidden, d_cell, through[t], keep[t])
            d_memory.baddbmm_(weights[steps].permute(1, 2, 0), d_features[..., H:].transpose(0, 1))
            d_v.addmv_(tanh.view(-1, A).t(), d_scores.view(-1))
            slopes *= d_scores[..., None]  # now the gradient of what tanh was taken of
            d_keys += slopes.sum(0)
            d_filters.addmm_(slopes.view(-1, A).t(), windows)
        d_x, d_weight_ih, d_bias = _input_gradients(ctx, d_gates, x, weight_ih)
        return (
            d_x,
            d_memory,
            d_keys,
            d_weight_ih,
            _weight_gradient(d_gates, features[:-1]),
            d_bias,
            _weight_gradient(d_asked, features[1:, :, :H]),
            d_filters.view_as(location),
            d_v,
            *[None] * 4,
        )


# The LSTM cell


def _cell(
    gate: Tensor, before: Tensor, after: Tensor, hidden: Tensor, mask: Tensor | None, scale: float
) -> None:
    """Activates ``gate`` (B, 4H) in place; writes the cell and the hidden state (B, H) after it."""
    i, f, g, o = gate.chunk(4, 1)
    gate[:, : 2 * i.size(1)].sigmoid_()
    _tanh_(g)
    o.sigmoid_()
    torch.mul(f, before, out=after)
    after.addcmul_(i, g)
    hidden.copy_(after)
    _tanh_(hidden).mul_(o)
    if mask is not None:
        hidden.mul_(mask).mul_(scale)


def _to_coefficients(
    gates: Tensor, cell: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Turns activated gates (n, B, 4H) in place into what the gradients are multiplied by.

    Args:
        cell: (n + 1, B, H), from before the first step on

    Returns:
        (n, B, H) each: from the hidden state to the cell, from a cell to the one before it
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
    """Turns a step's coefficients (B, 4H) into gradients, and ``d_cell`` into that before it."""
    H = d_cell.size(1)
    d_cell.addcmul_(d_hidden, through)
    gate[:, : 3 * H].view(-1, 3, H).mul_(d_cell[:, None])
    gate[:, 3 * H :].mul_(d_hidden)
    d_cell.mul_(keep)


# The attention's windows


def _windows(past: Tensor, T_in: int) -> Tensor:
    """(..., B, 2, T_in + W - 1) to what the filters see of it, (... * B * T_in, 2W)."""
    past = past.contiguous()
    W = past.size(-1) - T_in + 1
    windows = past.unfold(-1, W, 1)  # (..., B, 2, T_in, W)
    return windows.transpose(-2, -3).reshape(-1, 2 * W)


def _add_windows(d_windows: Tensor, margin: int) -> Tensor:
    """The adjoint of :func:`_windows`: (B, T_in, 2W) to (B, 2, T_in)."""
    B, T_in, _ = d_windows.shape
    W = 2 * margin + 1
    padded = torch.nn.functional.pad(d_windows, (0, 0, margin, margin))
    # Character n was seen by window n + margin - w at place w: along a diagonal.
    strides = (padded.stride(0), W, 2 * W, 2 * W - 1)
    return padded.as_strided((B, 2, T_in, W), strides, W - 1).sum(3)


# Products


def multiplier(weight: Tensor, rows: int) -> Callable[..., Tensor]:
    """``multiply(x, bias=None)``: x (..., K) @ weight.T + bias, for about ``rows`` rows at a time.

    On a CPU oneDNN packs the weight (N, K) once for all calls, which makes products of few rows
    two to three times as fast. The operators are PyTorch's own for its compiler, so not public:
    without them, or with ``torch.backends.mkldnn`` switched off, it is a plain product.
    """
    if _has_onednn() and weight.device.type == "cpu" and weight.dtype is torch.float32:
        ops = torch.ops.mkldnn
        packed = ops._reorder_linear_weight(weight.contiguous(), rows)
        return lambda x, bias=None: ops._linear_pointwise(x, packed, bias, "none", [], "")
    return lambda x, bias=None: torch.nn.functional.linear(x, weight, bias)


def _has_onednn() -> bool:
    ops = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
    )


def _input_gradients(
    ctx: Any, d_gates: Tensor, x: Tensor, weight_ih: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    rows = d_gates.size(0) * d_gates.size(1)
    d_x = multiplier(weight_ih.t(), rows)(d_gates) if ctx.needs_input_grad[0] else None
    return d_x, _weight_gradient(d_gates, x), d_gates.sum((0, 1))


def _weight_gradient(d_output: Tensor, x: Tensor) -> Tensor:
    """(T, B, N) and (T, B, K) to (N, K)."""
    return d_output.flatten(0, 1).t() @ x.flatten(0, 1)


# Loops


def _segments(
    x: Tensor, weight_ih: Tensor, bias: Tensor, H: int, save: bool
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first step, gates (n, B, 4H) of the inputs, cells (n + 1, B, H), the first one set).

    All steps at once if they are kept for backward, otherwise a few at a time.
    """
    T, B, _ = x.shape
    n = T if save else SEGMENT
    multiply = multiplier(weight_ih, n * B)
    last = x.new_zeros(B, H)
    for start in range(0, T, n):
        gates = multiply(x[start : start + n], bias)
        cell = x.new_empty(len(gates) + 1, B, H)
        cell[0] = last
        yield start, gates, cell
        last = cell[-1]


def _starts_backwards(T: int) -> range:
    return range((T - 1) // STEPS * STEPS, -1, -STEPS)


def _at(mask: Tensor | None, steps: int | slice) -> Tensor | None:
    return None if mask is None else mask[steps]


def _tanh_(x: Tensor) -> Tensor:
    """In place; on a CPU by way of sigmoid, whose vectorised kernel is several times as fast."""
    return x.tanh_() if x.is_cuda else x.mul_(2).sigmoid_().mul_(2).sub_(1)


def _needs_grad(inputs: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def _is_kept() -> bool:
    """Whether backward may be called again (``retain_graph``), so must not spoil what is saved."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or ask()
