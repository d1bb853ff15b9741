"""The fast teacher-forced decoder: recurrences over all frames, with hand-written backward.

With teacher forcing, all input frames are known, so everything that does not depend on the
previous step is a matrix product over many frames. Two recurrences remain, each an
``autograd.Function`` without parameters of its own:

    _LSTM     an LSTM with dropout of the state that it carries on (``nn.LSTM`` cannot do this)
    _Attend   an LSTM and location-sensitive attention, each feeding the other

:func:`decode` is the second and, on its outputs, the first. Each has a loop forward and a loop
backward, four classes whose ``run`` does a few consecutive steps on slices of the full tensors; on
a GPU decoder.graphs runs them.

Forward saves the activated gates, cells, outputs and attention weights. Backward recomputes the
attention energies, and turns the gates into coefficients of their derivatives, a few steps at a
time. Its loop then computes only the gradients of the gates, in place. Each large weight gets its
gradient from one product over all frames at the end.

Products with LSTM weights, and their gradients, use ``dtype``; everything else keeps its input's.

Shapes: T steps, n of them in a call of ``run``, B clips, T_in characters, H LSTM units, E encoder
features, A attention features, W characters in a location filter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from decoder import graphs, private
from decoder.graphs import STEPS
from decoder.products import Product, multiply, weight_gradient

# In graphs, clips and characters are rounded up to multiples of these, so that shapes are few.
B_MULTIPLE, T_IN_MULTIPLE = 8, 32


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
    lstm_ih: Tensor,
    lstm_hh: Tensor,
    lstm_bias: Tensor,
    masks: Sequence[Tensor | None] = (None, None),
    scales: tuple[float, float] = (1.0, 1.0),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs an LSTM that reads the last context, attention with its output as the query, and an LSTM
    that reads both. They start from zero states, and carry on their dropped-out outputs.

    Args:
        x: (T, B, D), the first LSTM's inputs without the context
        memory: (B, T_in, E)
        keys: (B, T_in, A)
        padding: (B, T_in), True beyond a text's end
        weight_ih: (4H, D), gates in PyTorch's order, as in all that have 4H
        recurrent: (4H, H + E), weights of the hidden state and the context
        bias: (4H,)
        query: (A, H)
        location: (A, 2, W), filters over the last weights and over their sum so far
        v: (A,)
        lstm_ih, lstm_hh, lstm_bias: (4H, H + E), (4H, H), (4H,), the second LSTM's
        masks: (T, B, H) booleans, the hidden states of the first and the second LSTM to keep
        scales: what the hidden states that are kept are multiplied by
        dtype: for products with LSTM weights; None: the input's

    Returns:
        the second LSTM's hidden state (T, B, H); the context (T, B, E); the attention weights
        (T, B, T_in)
    """
    (B, T_in, _), dtype = memory.shape, dtype or x.dtype
    if graphs.usable(x.device):
        x, memory, keys, padding, masks = _rounded_up(x, memory, keys, padding, masks)
    features, context, weights = _Attend.apply(
        x, memory, keys, padding, weight_ih, recurrent, bias, query, location, v,
        masks[0], scales[0], dtype,
    )  # fmt: skip
    hidden = _LSTM.apply(features, lstm_ih, lstm_hh, lstm_bias, masks[1], scales[1], dtype)
    return hidden[:, :B], context[:, :B], weights[:, :B, :T_in]


def _rounded_up(
    x: Tensor, memory: Tensor, keys: Tensor, padding: Tensor, masks: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Adds empty clips and padding, so that B and T_in are multiples."""
    B, T_in, _ = memory.shape
    n_clips, n_characters = -B % B_MULTIPLE, -T_in % T_IN_MULTIPLE
    # Contiguous as a graph's are, so that products are the same with graphs and without.
    added = (0, 0, 0, n_characters, 0, n_clips)
    memory, keys = (F.pad(m, added).contiguous() for m in (memory, keys))
    padding = F.pad(padding, (0, n_characters), value=True)
    # Attention must be able to look somewhere: the softmax of nothing is no number.
    padding = F.pad(padding, (0, 0, 0, n_clips), value=False)
    x, *masks = (y if y is None else F.pad(y, (0, 0, 0, n_clips)) for y in (x, *masks))
    return x, memory, keys, padding, masks


# The LSTM


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight_ih, weight_hh, bias, mask, scale, dtype) -> Tensor:
        (T, B, _), H = x.shape, weight_hh.size(1)
        weight_ih, weight_hh = weight_ih.to(dtype), weight_hh.to(dtype)
        gates = multiply(x, weight_ih, bias).to(x.dtype)  # (T, B, 4H), the inputs' part
        cell, hidden = _states(x, H), _states(x, H)  # (T + 1, B, H)
        loop = graphs.on_device(LSTMForward(weight_hh, B, scale), x.device)
        for t in range(0, T, STEPS):
            steps, after = slice(t, t + STEPS), slice(t, t + STEPS + 1)  # one from before step t
            loop.run(LSTMStates(gates[steps], cell[after], hidden[after]), _steps(mask, t))
        ctx.save_for_backward(x, weight_ih, weight_hh, mask, gates, cell, hidden)
        ctx.scale = scale
        return hidden[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_hidden: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_ih, weight_hh, mask, gates, cell, hidden = ctx.saved_tensors
        T, B, _ = x.shape
        d_gates = gates.clone() if _may_run_again() else gates
        d_next, d_cell = torch.zeros_like(gates[0]), torch.zeros_like(cell[0])
        loop = graphs.on_device(LSTMBackward(weight_hh, B, ctx.scale), x.device)
        for t in reversed(range(0, T, STEPS)):
            steps, after = slice(t, t + STEPS), slice(t, t + STEPS + 1)
            d = LSTMGradients(d_gates[steps], d_next, d_cell)
            loop.run(d, cell[after], d_hidden[steps], _steps(mask, t))
        d_bias, d_gates = d_gates.sum((0, 1)), d_gates.to(weight_hh.dtype)
        d_x = multiply(d_gates, weight_ih.t()).to(x.dtype)  # (T, B, D)
        d_weight_ih = weight_gradient(d_gates, x)  # (4H, D)
        d_weight_hh = weight_gradient(d_gates, hidden[:-1])  # (4H, H)
        return d_x, d_weight_ih, d_weight_hh, d_bias, None, None, None


class LSTMStates(NamedTuple):
    """What LSTMForward writes. The first row of cell and hidden is from before the first step."""

    gates: Tensor  # (n, B, 4H), at first the inputs' part; at the end activated
    cell: Tensor  # (n + 1, B, H)
    hidden: Tensor  # (n + 1, B, H)


class LSTMGradients(NamedTuple):
    """What LSTMBackward writes: gradients of what the fields are named for."""

    gates: Tensor  # (n, B, 4H), at first the activated gates
    next_gates: Tensor  # (B, 4H), of the step after these; at the end, of the first of these
    cell: Tensor  # (B, H), from the steps after these; at the end, from all


@dataclass(eq=False)
class Recurrence:
    """What all steps of an LSTM read."""

    weight_hh: Tensor  # (4H, H)
    B: int
    scale: float

    def __post_init__(self) -> None:
        self.recur = Product(self.weight_hh, self.B)


class LSTMForward(Recurrence):
    """Steps of an LSTM."""

    def run(self, states: LSTMStates, mask: Tensor | None) -> None:
        """Computes n steps, with a mask (n, B, H) or None."""
        gates, cell, hidden = states
        masks = _scaled(mask, self.scale, hidden)
        for t, gate in enumerate(gates):
            _cell(gate, self.recur(hidden[t]), cell[t], cell[t + 1], hidden[t + 1], masks[t])


class LSTMBackward(Recurrence):
    """The backward of LSTMForward, from the last step to the first."""

    def __post_init__(self) -> None:
        self.recur = Product(self.weight_hh.t(), self.B)

    def run(self, d: LSTMGradients, cell: Tensor, d_output: Tensor, mask: Tensor | None) -> None:
        """Turns activated gates into their gradients.

        Args:
            cell: (n + 1, B, H), as forward left it
            d_output: (n, B, H), gradients of the hidden states from all but the recurrence
            mask: (n, B, H)
        """
        through, keep = _coefficients(d.gates, cell, mask, self.scale)
        d_gate = d.next_gates
        for t in reversed(range(len(d.gates))):
            d_hidden = self.recur.plus(d_gate, d_output[t])  # (B, H)
            d_gate = d.gates[t]
            _cell_backward(d_gate, d_hidden, d.cell, through[t], keep[t])
        d.next_gates.copy_(d_gate)


# The LSTM with attention


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x, memory, keys, padding, weight_ih, recurrent, bias, query, location, v, mask,
        scale, dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        (T, B, _), (_, T_in, E), H = x.shape, memory.shape, query.size(1)
        weight_ih, recurrent = weight_ih.to(dtype), recurrent.to(dtype)
        gates = multiply(x, weight_ih, bias).to(x.dtype)  # (T, B, 4H), the inputs' part
        cell, features = _states(x, H), _states(x, H + E)  # (T + 1, B, H), (T + 1, B, H + E)
        loop = AttendForward(memory, keys, padding, recurrent, query, location, v, scale)
        margin = loop.margin
        # Attention weights and their sums so far, with a margin for the filters on both sides.
        past = x.new_zeros(T + 1, B, 2, T_in + 2 * margin)
        loop = graphs.on_device(loop, x.device)
        for t in range(0, T, STEPS):
            steps, after = slice(t, t + STEPS), slice(t, t + STEPS + 1)  # one from before step t
            states = AttendStates(gates[steps], cell[after], features[after], past[after])
            loop.run(states, _steps(mask, t))
        ctx.save_for_backward(
            x, memory, keys, padding, weight_ih, recurrent, query, location, v, mask, gates, cell,
            features, past,
        )  # fmt: skip
        ctx.scale = scale
        return features[1:], features[1:, :, H:], past[1:, :, 0, margin : margin + T_in]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_features: Tensor, d_context: Tensor, d_weights: Tensor
    ) -> tuple[Tensor | None, ...]:
        (
            x, memory, keys, padding, weight_ih, recurrent, query, location, v, mask, gates, cell,
            features, past,
        ) = ctx.saved_tensors  # fmt: skip
        (T, B, _), T_in, H = x.shape, memory.size(1), query.size(1)
        d_gates = gates.clone() if _may_run_again() else gates
        hidden = features[1:, :, :H]  # (T, B, H)
        projected = F.linear(hidden, query)  # (T, B, A)
        d_projected = torch.empty_like(projected)
        # The loop adds the recurrence's part and attention's to d_features.
        d_features, d_weights = d_features.clone(), d_weights.contiguous()
        d_features[..., H:] += d_context
        # From the steps after these: of gates, cell, and attention weights and their sum.
        d_next, d_cell = torch.zeros_like(gates[0]), torch.zeros_like(cell[0])
        d_past = x.new_zeros(B, 2, T_in)
        # Sums over steps
        d_keys, d_location, d_v = map(torch.zeros_like, (keys, location, v))
        loop = AttendBackward(memory, keys, padding, recurrent, query, location, v, ctx.scale)
        margin = loop.margin
        loop = graphs.on_device(loop, x.device)
        for t in reversed(range(0, T, STEPS)):
            steps, after = slice(t, t + STEPS), slice(t, t + STEPS + 1)
            d = AttendGradients(
                d_gates[steps], d_projected[steps], d_features[steps], d_next, d_cell, d_past,
                d_keys, d_location, d_v,
            )  # fmt: skip
            loop.run(
                d, cell[after], past[after], projected[steps], d_weights[steps], _steps(mask, t)
            )
        d_bias, d_gates = d_gates.sum((0, 1)), d_gates.to(recurrent.dtype)
        d_x = multiply(d_gates, weight_ih.t()).to(x.dtype)  # (T, B, D)
        d_weight_ih = weight_gradient(d_gates, x)  # (4H, D)
        d_recurrent = weight_gradient(d_gates, features[:-1])  # (4H, H + E)
        d_query = weight_gradient(d_projected, hidden)  # (A, H)
        weights = past[1:, :, 0, margin : margin + T_in]  # (T, B, T_in)
        d_memory = torch.bmm(weights.permute(1, 2, 0), d_features[..., H:].transpose(0, 1))
        return (
            d_x, d_memory, d_keys, None, d_weight_ih, d_recurrent, d_bias, d_query, d_location, d_v,
            None, None, None,
        )  # fmt: skip


class AttendStates(NamedTuple):
    """What AttendForward writes. The first row of all but the gates is from before the first
    step."""

    gates: Tensor  # (n, B, 4H), at first the inputs' part; at the end activated
    cell: Tensor  # (n + 1, B, H)
    features: Tensor  # (n + 1, B, H + E), hidden state and context
    past: Tensor  # (n + 1, B, 2, T_in + W - 1), attention weights and their sum so far


class AttendGradients(NamedTuple):
    """What AttendBackward writes: gradients of what the fields are named for."""

    gates: Tensor  # (n, B, 4H), at first the activated gates
    projected: Tensor  # (n, B, A), of the queries' projections
    features: Tensor  # (n, B, H + E), at first from all but the recurrence and attention
    next_gates: Tensor  # (B, 4H), of the step after these; at the end, of the first of these
    cell: Tensor  # (B, H), from the steps after these; at the end, from all
    past: Tensor  # (B, 2, T_in), of the weights and of their sum, in the same way
    keys: Tensor  # (B, T_in, A), to which those of these steps are added, as to the next two
    location: Tensor  # (A, 2, W)
    v: Tensor  # (A,)


@dataclass(eq=False)
class Attend:
    """What all steps of attention read."""

    memory: Tensor  # (B, T_in, E)
    keys: Tensor  # (B, T_in, A)
    padding: Tensor  # (B, T_in) booleans
    recurrent: Tensor  # (4H, H + E)
    query: Tensor  # (A, H)
    location: Tensor  # (A, 2, W)
    v: Tensor  # (A,)
    scale: float

    def __post_init__(self) -> None:
        self.margin = self.location.size(2) // 2  # what a filter sees on either side


class AttendForward(Attend):
    """Steps of an LSTM and of attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        B, T_in, _ = self.memory.shape
        self.recur, self.project = Product(self.recurrent, B), Product(self.query, B)
        self.locate = Product(self.location.flatten(1), B * T_in)

    def run(self, states: AttendStates, mask: Tensor | None) -> None:
        """Computes n steps, with a mask (n, B, H) or None."""
        gates, cell, features, past = states
        (B, T_in, E), H = self.memory.shape, self.query.size(1)
        weights, sums = past[..., self.margin : self.margin + T_in].unbind(2)  # (n + 1, B, T_in)
        keys = self.keys.flatten(0, 1)  # (B * T_in, A)
        # Here rather than once for all steps, so that a graph computes it again for each batch.
        excluded = torch.zeros_like(weights[0]).masked_fill_(self.padding, -torch.inf).flatten()
        masks = _scaled(mask, self.scale, features)
        for t, gate in enumerate(gates):
            hidden, context = features[t + 1].split([H, E], 1)
            _cell(gate, self.recur(features[t]), cell[t], cell[t + 1], hidden, masks[t])
            energies = self.locate.plus(_windows(past[t], T_in), keys)  # (B * T_in, A)
            energies.view(B, T_in, -1).add_(self.project(hidden)[:, None])
            scores = torch.addmv(excluded, _tanh_(energies), self.v).view(B, T_in)
            weights[t + 1] = torch.softmax(scores, 1)
            torch.add(sums[t], weights[t + 1], out=sums[t + 1])
            context.copy_(torch.bmm(weights[t + 1][:, None], self.memory)[:, 0])


class AttendBackward(Attend):
    """The backward of AttendForward, from the last step to the first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        B, T_in, _ = self.memory.shape
        self.recur, self.project = Product(self.recurrent.t(), B), Product(self.query.t(), B)
        filters = self.location.flatten(1)  # (A, 2W)
        self.locate = Product(filters, STEPS * B * T_in)
        self.spread = Product(filters.t(), STEPS * B * T_in)

    def run(
        self,
        d: AttendGradients,
        cell: Tensor,
        past: Tensor,
        projected: Tensor,
        d_weights: Tensor,
        mask: Tensor | None,
    ) -> None:
        """Turns activated gates into their gradients.

        Args:
            cell, past: as forward left them
            projected: (n, B, A), the queries' projections
            d_weights: (n, B, T_in), gradients of the attention weights that were returned
            mask: (n, B, H)
        """
        n, T_in, (A, H) = len(d.gates), self.keys.size(1), self.query.shape
        windows, tanh, slopes = self._energies(past[:n], projected)
        spread = self.spread(slopes)  # (n, B, T_in, 2W), of the scores by the windows
        # (n, B, T_in). PyTorch 2.4's softmax gradient is wrong for what is not contiguous.
        weights = past[1:, :, 0, self.margin : self.margin + T_in].contiguous()
        d_scores = torch.empty_like(weights)
        d_windows, diagonals = _overlaid_windows(self.memory, self.margin)

        through, keep = _coefficients(d.gates, cell, mask, self.scale)
        d_gate = d.next_gates
        for t in reversed(range(n)):
            self.recur.plus(d_gate, d.features[t], out=d.features[t])
            d_hidden, d_context = d.features[t].tensor_split([H], 1)  # (B, H), (B, E)
            # The weights gave the context, the next step's energies and all later sums.
            d.past[:, 0] += d_weights[t]
            d_weight = d.past.sum(1, keepdim=True)
            d_weight = torch.baddbmm(d_weight, d_context[:, None], self.memory.mT)[:, 0]
            d_score = d_scores[t]  # (B, T_in)
            _softmax_backward(d_weight, weights[t], d_score)
            torch.bmm(d_score[:, None], slopes[t], out=d.projected[t][:, None])
            self.project.plus(d.projected[t], d_hidden, out=d_hidden)
            # To the weights and the sum of the step before, through this step's windows.
            torch.mul(spread[t], d_score[:, :, None], out=d_windows)
            d.past[:, 0].zero_()
            d.past.add_(diagonals.sum(3))
            d_gate = d.gates[t]
            _cell_backward(d_gate, d_hidden, d.cell, through[t], keep[t])
        d.next_gates.copy_(d_gate)

        d.v.addmv_(tanh.view(-1, A).t(), d_scores.view(-1))
        d_energies = slopes.mul_(d_scores[..., None])  # (n, B, T_in, A)
        d.keys.add_(d_energies.sum(0))
        d.location.add_((d_energies.view(-1, A).t() @ windows).view_as(d.location))

    def _energies(self, past: Tensor, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes again what attention saw and made of it, of n steps.

        Returns:
            the filters' windows (n * B * T_in, 2W); tanh (n, B, T_in, A), whose product with v are
            the scores; the scores' derivatives by what tanh was applied to, (n, B, T_in, A)
        """
        n, B, A = projected.shape
        T_in = self.keys.size(1)
        windows = _windows(past, T_in)
        tanh = self.locate(windows).view(n, B, T_in, A).add_(self.keys)
        _tanh_(tanh.add_(projected[:, :, None]))
        return windows, tanh, torch.addcmul(self.v, tanh * self.v, tanh, value=-1)


# The LSTM cell


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
    if gate.is_cuda and private.LSTM_CELL:
        new_hidden, new_cell, activated = private.LSTM_CELL(gate, recurrent.to(gate.dtype), before)
        after.copy_(new_cell)
        gate.copy_(activated)
        torch.mul(new_hidden, 1 if mask is None else mask, out=hidden)
        return
    gate += recurrent
    i, f, g, o = gate.chunk(4, 1)
    g.mul_(2)  # its tanh by sigmoid, as in _tanh_
    gate.sigmoid_()
    g.mul_(2).sub_(1)
    torch.mul(f, before, out=after)
    after.addcmul_(i, g)
    torch.mul(after, 2, out=hidden).sigmoid_().mul_(2).sub_(1).mul_(o)
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
    kept = 1 if mask is None else mask.to(o.dtype).mul_(scale)
    tanh_out, out = tanh * kept, o * kept
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


def _windows(past: Tensor, T_in: int) -> Tensor:
    """Returns the filters' windows (... * B * T_in, 2W) over ``past`` (..., B, 2, T_in + W - 1)."""
    W = past.size(-1) - T_in + 1
    windows = past.contiguous().unfold(-1, W, 1)  # (..., B, 2, T_in, W)
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


# Slices, masks and functions


def _states(x: Tensor, size: int) -> Tensor:
    """Allocates states (T + 1, B, size): row t + 1 is the one after step t, and the first is 0."""
    states = x.new_empty(len(x) + 1, x.size(1), size)
    states[0] = 0
    return states


def _steps(tensor: Tensor | None, t: int) -> Tensor | None:
    """Returns the rows of STEPS steps, from step t on."""
    return None if tensor is None else tensor[t : t + STEPS]


def _scaled(mask: Tensor | None, scale: float, like: Tensor) -> Sequence[Tensor | None]:
    """Returns what each step's hidden state is multiplied by, (n, B, H)."""
    return [None] * STEPS if mask is None else mask.to(like.dtype).mul_(scale)


def _tanh_(x: Tensor) -> Tensor:
    """Applies tanh in place; on a CPU by sigmoid, whose kernel is several times as fast."""
    return x.tanh_() if x.is_cuda else x.mul_(2).sigmoid_().mul_(2).sub_(1)


def _softmax_backward(d_output: Tensor, output: Tensor, d_input: Tensor) -> None:
    """Writes the gradient of a softmax over the last axis to ``d_input``."""
    if private.SOFTMAX_BACKWARD:
        private.SOFTMAX_BACKWARD(d_output, output, 1, d_output.dtype, grad_input=d_input)
    else:
        product = d_output * output
        torch.addcmul(product, output, product.sum(1, keepdim=True), value=-1, out=d_input)


def _may_run_again() -> bool:
    """Returns whether backward may run again (``retain_graph``) and must keep saved tensors."""
    return private.KEEPS_GRAPH is None or private.KEEPS_GRAPH()
