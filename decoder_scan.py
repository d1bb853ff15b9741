"""The fast teacher-forced decoder: recurrences over all frames, with hand-written backward.

In teacher forcing all input frames are known, so whatever does not depend on the step before
is one matrix product over all of them. What remains are two recurrences:

    lstm     an LSTM whose output is dropped out as it is carried on (``nn.LSTM`` has no such)
    attend   an LSTM and location-sensitive attention, each of which feeds the other

Each is one ``autograd.Function`` without parameters of its own. Forward keeps the activated
gates, the cells, the outputs and the attention weights. Backward computes the attention's
energies again, turns the gates into the coefficients of their derivatives a few steps at a time,
lets its loop make the gates' gradients and nothing else, over the saved gates, and then gets the
gradient of every large weight from one product over all frames.

The loops are the four functions that return ``run``: it does a few consecutive steps, on slices
of the tensors of all steps. With ``graph=True`` it does them on buffers that all loops share, so
that on a GPU one CUDA graph, captured once for each shape, replaces hundreds of launches.

``dtype`` is what the factors and results of products are rounded to that have to do with a weight
of the LSTMs or its gradient. All else, and what goes in and out, is in the dtype of what is given.

T steps (frames of the decoder, characters of the encoder), B clips, T_in characters, H units,
E features of a character, A features compared, W characters in the location filters.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

STEPS = 8  # done together: whose derivatives are prepared at once, and in one CUDA graph
SEGMENT = 64  # steps whose gates exist together when nothing is kept for backward
FEW_ROWS = 256  # up to which a plain product on a CPU is faster transposed
B_MULTIPLE, T_IN_MULTIPLE = 8, 32  # what CUDA graphs round shapes up to, so that few are needed
MAX_GRAPHS = 128  # LJSpeech in batches of dynamic size needs some 65


def lstm(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    graph: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """An LSTM from a zero state; what it outputs is what it carries on.

    Args:
        x: (T, B, D)
        weight_ih, weight_hh, bias: (4H, D), (4H, H), (4H,), gates in PyTorch's order
        mask: (T, B, H) booleans, the hidden states to keep, which are multiplied by ``scale``

    Returns:
        (T, B, H)
    """
    T, B, _ = x.shape
    if graph:
        more = (0, 0, 0, -B % B_MULTIPLE, 0, -T % STEPS)
        x, mask = F.pad(x, more), mask if mask is None else F.pad(mask, more)
    inputs = (x, weight_ih, weight_hh, bias)
    options = mask, scale, graph, dtype or x.dtype, _needs_grad(inputs)
    return _LSTM.apply(*inputs, *options)[:T, :B]


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
    graph: bool = False,
    dtype: torch.dtype | None = None,
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
    T, B, T_in = x.size(0), x.size(1), memory.size(1)
    if graph:
        more_T, more_B, more_T_in = -T % STEPS, -B % B_MULTIPLE, -T_in % T_IN_MULTIPLE
        x = F.pad(x, (0, 0, 0, more_B, 0, more_T))
        memory, keys = (F.pad(tensor, (0, 0, 0, more_T_in, 0, more_B)) for tensor in (memory, keys))
        # An added clip is no padding: the softmax over nothing would not be a number.
        padding = F.pad(F.pad(padding, (0, more_T_in), value=True), (0, 0, 0, more_B), value=False)
        mask = mask if mask is None else F.pad(mask, (0, 0, 0, more_B, 0, more_T))
    inputs = (x, memory, keys, weight_ih, recurrent, bias, query, location, v)
    options = padding, mask, scale, graph, dtype or x.dtype, _needs_grad(inputs)
    features, contexts, weights = _Attend.apply(*inputs, *options)
    return features[:T, :B], contexts[:T, :B], weights[:T, :B, :T_in]


# The LSTM


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x, weight_ih, weight_hh, bias, mask, scale, graph, dtype, save
    ) -> Tensor:  # fmt: skip
        T, B, H = x.size(0), x.size(1), weight_hh.size(1)
        weight_ih, weight_hh = weight_ih.to(dtype), weight_hh.to(dtype)
        hidden = x.new_empty(T + 1, B, H)  # row t + 1 is the state after step t
        hidden[0] = 0
        run = _runner(_lstm_forward, (weight_hh,), (B, scale), 3, graph)
        for start, gates, cell in _segments(x, weight_ih, bias, H, save):
            for i in range(0, len(gates), STEPS):
                t = start + i
                run(
                    gates[i : i + STEPS],
                    cell[i : i + STEPS + 1],
                    hidden[t : t + STEPS + 1],
                    _at(mask, t),
                )
        if save:
            ctx.save_for_backward(x, weight_ih, weight_hh, mask, gates, cell, hidden)
            ctx.options = scale, graph
        return hidden[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_hidden: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_ih, weight_hh, mask, gates, cell, hidden = ctx.saved_tensors
        (T, B, _), (scale, graph) = x.shape, ctx.options
        d_gates = gates.clone() if _is_kept() else gates
        d_next, d_cell = torch.zeros_like(gates[0]), torch.zeros_like(cell[0])
        run = _runner(_lstm_backward, (weight_hh,), (B, scale), 3, graph)
        for t in reversed(range(0, T, STEPS)):
            run(
                d_gates[t : t + STEPS],
                d_next,
                d_cell,
                cell[t : t + STEPS + 1],
                _at(mask, t),
                d_hidden[t : t + STEPS],
            )
        d_bias, d_gates = d_gates.sum((0, 1)), d_gates.to(weight_hh.dtype)
        d_x, d_weight_ih = _input_gradients(ctx, d_gates, x, weight_ih)
        d_weight_hh = _weight_gradient(d_gates, hidden[:-1])
        return d_x, d_weight_ih, d_weight_hh, d_bias, *[None] * 5


def _lstm_forward(weight_hh: Tensor, B: int, scale: float) -> Callable[..., None]:
    recur = multiplier(weight_hh, B)

    def run(gates: Tensor, cell: Tensor, hidden: Tensor, mask: Tensor | None) -> None:
        """Gates (n, B, 4H) of the inputs become the activated ones; cell and hidden state
        (n + 1, B, H) are known in their first row."""
        for t, gate in enumerate(gates):
            gate += recur(hidden[t])
            _cell(gate, cell[t], cell[t + 1], hidden[t + 1], _one(mask, t), scale)

    return run


def _lstm_backward(weight_hh: Tensor, B: int, scale: float) -> Callable[..., None]:
    recur = multiplier(weight_hh.t(), B)

    def run(
        d_gates: Tensor,
        d_next: Tensor,
        d_cell: Tensor,
        cell: Tensor,
        mask: Tensor | None,
        d_output: Tensor,
    ) -> None:
        """Activated gates (n, B, 4H) become their gradients; ``d_next`` (B, 4H) and ``d_cell``
        (B, H), those of the step and the cell after these, become those before the next call."""
        through, keep = _to_coefficients(d_gates, cell, mask, scale)
        after = d_next
        for t in reversed(range(len(d_gates))):
            d_hidden = d_output[t] + recur(after)
            after = d_gates[t]
            _cell_backward(after, d_hidden, d_cell, through[t], keep[t])
        d_next.copy_(after)

    return run


# The LSTM with attention


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x, memory, keys, weight_ih, recurrent, bias, query, location, v, padding, mask,
        scale, graph, dtype, save,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        (T, B, _), T_in, H = x.shape, memory.size(1), query.size(1)
        weight_ih, recurrent = weight_ih.to(dtype), recurrent.to(dtype)
        margin = location.size(2) // 2
        features = x.new_empty(T + 1, B, recurrent.size(1))  # row t + 1 is that of step t
        features[0] = 0
        # Weights, and their sums over all steps so far, with room for the filters on each side.
        past = x.new_zeros(T + 1, B, 2, T_in + 2 * margin)
        constants = (memory, keys, padding, recurrent, query, location, v)
        run = _runner(_attend_forward, constants, (scale,), 4, graph)
        for start, gates, cell in _segments(x, weight_ih, bias, H, save):
            for i in range(0, len(gates), STEPS):
                t = start + i
                run(
                    gates[i : i + STEPS],
                    cell[i : i + STEPS + 1],
                    features[t : t + STEPS + 1],
                    past[t : t + STEPS + 1],
                    _at(mask, t),
                )
        if save:
            ctx.save_for_backward(x, weight_ih, *constants, mask, gates, cell, features, past)
            ctx.options = scale, graph
            ctx.set_materialize_grads(False)
        return features[1:], features[1:, :, H:], past[1:, :, 0, margin : margin + T_in]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        d_features: Tensor | None,
        d_contexts: Tensor | None,
        d_weights: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        x, weight_ih, *constants, mask, gates, cell, features, past = ctx.saved_tensors
        memory, keys, _, recurrent, query, location, v = constants
        (T, B, _), (A, H), (scale, graph) = x.shape, query.shape, ctx.options
        d_gates = gates.clone() if _is_kept() else gates
        d_asked = x.new_empty(T, B, A)
        # Of the gates and the cell after a step; of the weights before it and of their sum.
        d_next, d_cell = torch.zeros_like(gates[0]), torch.zeros_like(cell[0])
        d_past = x.new_zeros(B, 2, memory.size(1))
        sums = d_memory, d_keys, d_location, d_v = [
            torch.zeros_like(tensor) for tensor in (memory, keys, location, v)
        ]
        run = _runner(_attend_backward, constants, (scale,), 9, graph)
        for t in reversed(range(0, T, STEPS)):
            run(
                d_gates[t : t + STEPS],
                d_asked[t : t + STEPS],
                d_next,
                d_cell,
                d_past,
                *sums,
                cell[t : t + STEPS + 1],
                features[t + 1 : t + STEPS + 1],
                past[t : t + STEPS + 1],
                _at(mask, t),
                _at(d_features, t),
                _at(d_contexts, t),
                _at(d_weights, t),
            )
        d_bias, d_gates = d_gates.sum((0, 1)), d_gates.to(recurrent.dtype)
        d_x, d_weight_ih = _input_gradients(ctx, d_gates, x, weight_ih)
        d_recurrent = _weight_gradient(d_gates, features[:-1])
        d_query = _weight_gradient(d_asked, features[1:, :, :H])
        gradients = d_x, d_memory, d_keys, d_weight_ih, d_recurrent, d_bias, d_query
        return *gradients, d_location, d_v, *[None] * 6


def _attend_forward(
    memory: Tensor,
    keys: Tensor,
    padding: Tensor,
    recurrent: Tensor,
    query: Tensor,
    location: Tensor,
    v: Tensor,
    scale: float,
) -> Callable[..., None]:
    (B, T_in, E), H, margin = memory.shape, query.size(1), location.size(2) // 2
    recur, ask = multiplier(recurrent, B), multiplier(query, B)
    locate = multiplier(location.flatten(1), B * T_in)

    def run(
        gates: Tensor, cell: Tensor, features: Tensor, past: Tensor, mask: Tensor | None
    ) -> None:
        """Gates (n, B, 4H) of the inputs become the activated ones; cell (n + 1, B, H), hidden
        state and context (n + 1, B, H + E) and past (n + 1, B, 2, T_in + W - 1), which are the
        weights and their sum, are known in their first row."""
        weights, sums = past[..., margin : margin + T_in].unbind(2)  # (n + 1, B, T_in)
        for t, gate in enumerate(gates):
            hidden, context = features[t + 1].split([H, E], 1)
            gate += recur(features[t])
            _cell(gate, cell[t], cell[t + 1], hidden, _one(mask, t), scale)
            energies = locate(_windows(past[t], T_in)).view(B, T_in, -1)
            energies.add_(keys).add_(ask(hidden)[:, None])
            scores = (_tanh_(energies) @ v).masked_fill_(padding, -torch.inf)
            weights[t + 1] = torch.softmax(scores, 1)
            torch.add(sums[t], weights[t + 1], out=sums[t + 1])
            context.copy_(torch.bmm(weights[t + 1][:, None], memory)[:, 0])

    return run


def _attend_backward(
    memory: Tensor,
    keys: Tensor,
    padding: Tensor,
    recurrent: Tensor,
    query: Tensor,
    location: Tensor,
    v: Tensor,
    scale: float,
) -> Callable[..., None]:
    (B, T_in, E), (A, H), margin = memory.shape, query.shape, location.size(2) // 2
    filters = location.flatten(1)  # (A, 2W)
    recur, ask = multiplier(recurrent.t(), B), multiplier(query.t(), B)
    locate = multiplier(filters, STEPS * B * T_in)
    unlocate = multiplier(filters.t(), STEPS * B * T_in)

    def run(
        d_gates: Tensor,
        d_asked: Tensor,
        d_next: Tensor,
        d_cell: Tensor,
        d_past: Tensor,
        d_memory: Tensor,
        d_keys: Tensor,
        d_location: Tensor,
        d_v: Tensor,
        cell: Tensor,
        features: Tensor,
        past: Tensor,
        mask: Tensor | None,
        d_features: Tensor | None,
        d_contexts: Tensor | None,
        d_weights: Tensor | None,
    ) -> None:
        """Activated gates (n, B, 4H) become their gradients, ``d_asked`` (n, B, A) is written;
        ``d_next`` (B, 4H), ``d_cell`` (B, H) and ``d_past`` (B, 2, T_in) are carried on; the
        gradients of memory, keys, location and v are added to."""
        n = len(d_gates)
        through, keep = _to_coefficients(d_gates, cell, mask, scale)
        # The energies again, which are tanh(...) @ v, and their derivatives before softmax.
        windows = _windows(past[:n], T_in)  # (n * B * T_in, 2W)
        tanh = locate(windows).view(n, B, T_in, A).add_(keys)
        _tanh_(tanh.add_(F.linear(features[..., :H], query)[:, :, None]))
        slopes = torch.addcmul(v, tanh * v, tanh, value=-1)  # (n, B, T_in, A)
        spread = unlocate(slopes)  # (n, B, T_in, 2W)
        weights = past[1:, :, 0, margin : margin + T_in]  # (n, B, T_in)
        d_scores = torch.empty_like(weights)
        # Of hidden state and context, from all that used them.
        d_all = torch.zeros_like(features) if d_features is None else d_features.clone()
        if d_contexts is not None:
            d_all[..., H:] += d_contexts
        after = d_next
        for t in reversed(range(n)):
            d_all[t] += recur(after)
            d_hidden, d_context = d_all[t].split([H, E], 1)
            d_weight = torch.bmm(d_context[:, None], memory.transpose(1, 2))[:, 0]
            d_weight += d_past.sum(1)
            if d_weights is not None:
                d_weight += d_weights[t]
            d_weight -= (d_weight * weights[t]).sum(1, keepdim=True)
            d_score = torch.mul(d_weight, weights[t], out=d_scores[t])
            d_asked[t] = torch.bmm(d_score[:, None], slopes[t])[:, 0]
            d_hidden += ask(d_asked[t])
            d_window = _add_windows(spread[t] * d_score[:, :, None], margin)  # (B, 2, T_in)
            d_past[:, 0] = d_window[:, 0]
            d_past[:, 1] += d_window[:, 1]
            after = d_gates[t]
            _cell_backward(after, d_hidden, d_cell, through[t], keep[t])
        d_next.copy_(after)
        d_memory.baddbmm_(weights.permute(1, 2, 0), d_all[..., H:].transpose(0, 1))
        d_v.addmv_(tanh.view(-1, A).t(), d_scores.view(-1))
        slopes *= d_scores[..., None]  # now the gradient of what tanh was taken of
        d_keys += slopes.sum(0)
        d_location += (slopes.view(-1, A).t() @ windows).view_as(location)

    return run


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
    padded = F.pad(d_windows, (0, 0, margin, margin))
    # Character n was seen by window n + margin - w at place w: along a diagonal.
    strides = (padded.stride(0), W, 2 * W, 2 * W - 1)
    return padded.as_strided((B, 2, T_in, W), strides, W - 1).sum(3)


# Products


def multiplier(weight: Tensor, rows: int) -> Callable[..., Tensor]:
    """``multiply(x, bias=None)``: x (..., K) @ weight.T + bias, for about ``rows`` rows at a time.

    In the dtype of the weight, its result too.

    On a CPU oneDNN packs the weight (N, K) once for all calls, which makes products of few rows
    two to three times as fast. The operators are PyTorch's own for its compiler, so not public:
    without them, or with ``torch.backends.mkldnn`` switched off, it is a plain product.
    """
    dtype, product = weight.dtype, F.linear
    if weight.device.type == "cpu" and _has_onednn(dtype):
        ops = torch.ops.mkldnn
        weight = ops._reorder_linear_weight(weight.contiguous(), rows)

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return ops._linear_pointwise(x, weight, bias, "none", [], "")

    elif not weight.is_cuda and rows <= FEW_ROWS:
        weight = weight.contiguous()

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if bias is None and x.dim() == 2:
                return (weight @ x.t()).t()  # of few rows it takes less time so
            return F.linear(x, weight, bias)

    def multiply(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(x.to(dtype), weight, bias if bias is None else bias.to(dtype))

    return multiply


def _has_onednn(dtype: torch.dtype) -> bool:
    ops = torch.ops.mkldnn
    names = ["_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"]
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if not all(hasattr(ops, name) for name in names):
        return False
    # A CPU without AVX-512 cannot pack bfloat16.
    return dtype is torch.float32 or (dtype is torch.bfloat16 and ops._is_mkldnn_bf16_supported())


def _input_gradients(
    ctx: Any, d_gates: Tensor, x: Tensor, weight_ih: Tensor
) -> tuple[Tensor | None, Tensor]:
    rows = d_gates.size(0) * d_gates.size(1)
    d_x = None
    if ctx.needs_input_grad[0]:
        d_x = multiplier(weight_ih.t(), rows)(d_gates).to(x.dtype)
    return d_x, _weight_gradient(d_gates, x)


def _weight_gradient(d_output: Tensor, x: Tensor) -> Tensor:
    """(T, B, N) and (T, B, K) to (N, K); the product is in the dtype of the first."""
    product = d_output.flatten(0, 1).t() @ x.flatten(0, 1).to(d_output.dtype)
    return product.to(x.dtype)


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
        gates = multiply(x[start : start + n], bias).to(x.dtype)
        cell = x.new_empty(len(gates) + 1, B, H)
        cell[0] = last
        yield start, gates, cell
        last = cell[-1]


def _at(tensor: Tensor | None, t: int) -> Tensor | None:
    return None if tensor is None else tensor[t : t + STEPS]


def _one(mask: Tensor | None, t: int) -> Tensor | None:
    return None if mask is None else mask[t]


def _tanh_(x: Tensor) -> Tensor:
    """In place; on a CPU by way of sigmoid, whose vectorised kernel is several times as fast."""
    return x.tanh_() if x.is_cuda else x.mul_(2).sigmoid_().mul_(2).sub_(1)


def _needs_grad(inputs: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def _is_kept() -> bool:
    """Whether backward may be called again (``retain_graph``), so must not spoil what is saved."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or ask()


# Running the loops


def _runner(
    prepare: Callable[..., Callable[..., None]],
    constants: Sequence[Tensor],
    options: tuple,
    n_written: int,
    graph: bool,
) -> Callable[..., None]:
    """``prepare(*constants, *options)``, the ``run`` of one of the four loops.

    Args:
        n_written: how many of the tensors given to ``run`` it writes: the first ones
        graph: do it in buffers, on a GPU as a CUDA graph
    """
    if not graph or _cannot_capture:
        return prepare(*constants, *options)
    ready = None

    def run(*tensors: Tensor | None) -> None:
        nonlocal ready
        if ready is None:
            ready = _graphed(prepare, constants, options, n_written, tensors)
        ready(*tensors)

    return run


_cannot_capture = False  # one CUDA graph could not be captured, so no other is tried


def _graphed(
    prepare: Callable[..., Callable[..., None]],
    constants: Sequence[Tensor],
    options: tuple,
    n_written: int,
    tensors: Sequence[Tensor | None],
) -> Callable[..., None]:
    """The graph for these shapes with these constants; the loop itself if there can be none."""
    global _cannot_capture
    specs = [
        tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.device)
        for tensor in (*constants, *tensors)
    ]
    tf32 = torch.backends.cuda.matmul.allow_tf32  # which a captured product keeps
    try:
        graph = _graph(tf32, prepare, options, len(constants), n_written, *specs)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _cannot_capture = True
        reason = str(error).partition("\n")[0]
        print(f"warning: a CUDA graph cannot be captured ({reason}); going on as decoder=scan")
        return prepare(*constants, *options)
    graph.load(constants)
    return graph


class _Graph:
    """The ``run`` of a loop in buffers that all graphs share: copies in, runs, copies out."""

    def __init__(
        self,
        tf32: bool,
        prepare: Callable[..., Callable[..., None]],
        options: tuple,
        n_constants: int,
        n_written: int,
        *specs: tuple | None,
    ) -> None:
        buffers = [spec and _buffer(i, *spec) for i, spec in enumerate(specs)]
        self.prepare, self.options, self.n_written = prepare, options, n_written
        self.constants, self.tensors = buffers[:n_constants], buffers[n_constants:]
        self.graph = self._capture()

    def load(self, constants: Sequence[Tensor]) -> None:
        for buffer, tensor in zip(self.constants, constants, strict=True):
            buffer.copy_(tensor)
        if self.graph is None:
            self.run = self.prepare(*self.constants, *self.options)

    def __call__(self, *tensors: Tensor | None) -> None:
        pairs = list(zip(self.tensors, tensors, strict=True))
        for buffer, tensor in pairs:
            if tensor is not None:
                buffer.copy_(tensor)
        if self.graph is None:
            self.run(*self.tensors)
        else:
            self.graph.replay()
        for buffer, tensor in pairs[: self.n_written]:
            tensor.copy_(buffer)

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """None on a CPU."""
        if not self.constants[0].is_cuda:
            return None
        run = self.prepare(*self.constants, *self.options)
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(current):  # so that it is again if the capture fails
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # once before, as libraries allocate when first called
                run(*self.tensors)
            current.wait_stream(stream)
            # The loader's thread may pin memory meanwhile, which a stricter mode forbids.
            with torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local"):
                run(*self.tensors)
        return graph


_graph = lru_cache(maxsize=MAX_GRAPHS)(_Graph)
_flat: dict[tuple, Tensor] = {}


def _buffer(i: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The ``i``-th buffer of a graph, in memory that all have in common: no two run at the same
    time, and whatever one reads is copied in before. Only larger shapes need more."""
    flat, n = _flat.get((i, dtype, device)), shape.numel()
    if flat is None or len(flat) < n:
        with torch.inference_mode(False):  # or training could not write to it
            flat = _flat[i, dtype, device] = torch.zeros(n, dtype=dtype, device=device)
    return flat[:n].view(shape)


@lru_cache(maxsize=1)
def _pool() -> Any:
    """One pool for the temporaries of all graphs: no two of them run at the same time."""
    return torch.cuda.graph_pool_handle()
