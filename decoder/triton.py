"""The recurrences of scan as fused Triton kernels, for NVIDIA GPUs: eleven launches a frame.

scan computes the large products over many frames, between and after its loops. Here are the loops
alone: four kernels a frame for ``attend`` and one for ``lstm``, four and two in backward. Sums are
in float32, in an order that does not depend on the other clips of the batch.

A GPU is not filled by a product with few columns. So each program adds up a part of the terms, and
the kernel that needs the sums adds the parts in their order.

A kernel that writes where it reads has a barrier before its first store: several of its threads may
load one value.

In a kernel, b is a clip, n a character, u an LSTM unit, and k runs along a sum. Shapes are
scan's.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from decoder import scan
from decoder.graphs import Captured, beside, precision
from decoder.scan import STEPS, Constants, Gradients, Loops, Recomputed, Saved

UNITS, COLUMNS, WIDE, CHARACTERS = 8, 16, 64, 32  # of a program's block
DEPTH = 64  # terms of a sum that a program reads at a time
MAX_ROWS = 32  # clips of a program's block
PROGRAMS = 128  # at most, of a product, for each block of clips: about as many as processors
B_MULTIPLE, T_IN_MULTIPLE = 8, 32  # shapes are rounded up to these: fewer CUDA graphs


def decode(
    x: Tensor,
    memory: Tensor,
    keys: Tensor,
    padding: Tensor,
    *weights: Tensor,
    masks: Sequence[Tensor | None] = (None, None),
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Does what :func:`scan.decode` does."""
    (T, B, _), T_in = x.shape, memory.size(1)
    pad_B, pad_T_in = -B % B_MULTIPLE, -T_in % T_IN_MULTIPLE
    pad = (0, 0, 0, pad_B, 0, -T % STEPS)
    x, *masks = (tensor if tensor is None else F.pad(tensor, pad) for tensor in (x, *masks))
    pad_text = (0, 0, 0, pad_T_in, 0, pad_B)
    memory, keys = (F.pad(tensor, pad_text).contiguous() for tensor in (memory, keys))
    # Added clips are not marked as padding: softmax over nothing would be NaN.
    padding = F.pad(F.pad(padding, (0, pad_T_in), value=True), (0, 0, 0, pad_B), value=False)
    hidden, contexts, alignment = scan.decode(
        x, memory, keys, padding, *weights, masks=masks, loops=LOOPS, **options
    )
    return hidden[:T, :B], contexts[:T, :B], alignment[:T, :B, :T_in]


def graph_shapes(shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Rounds sizes of batches (B, T_in) up to those of graphs; the largest come first, so that
    buffers grow once."""
    rounded = {
        (triton.cdiv(B, B_MULTIPLE) * B_MULTIPLE, triton.cdiv(T_in, T_IN_MULTIPLE) * T_IN_MULTIPLE)
        for B, T_in in shapes
    }
    return sorted(rounded, key=lambda shape: (math.prod(shape), shape), reverse=True)


# The loops, as in scan


def lstm_forward(weight_hh: Tensor, B: int, scale: float) -> Callable[..., None]:
    return Captured(_lstm_forward, (_by_unit(weight_hh),), scale, 4, range(3))


def lstm_backward(weight_hh: Tensor, B: int, scale: float) -> Callable[..., None]:
    return Captured(_lstm_backward, (weight_hh,), scale, 6, range(3))


def attend_forward(constants: Constants, scale: float) -> Callable[..., None]:
    constants = constants._replace(
        recurrent=_by_unit(constants.recurrent), query=constants.query.t().contiguous()
    )
    return Captured(_attend_forward, constants, scale, 5, range(4))


def attend_backward(constants: Constants, scale: float) -> Callable[..., None]:
    n_tensors = len(Gradients._fields) + len(Saved._fields)
    written = range(Gradients._fields.index("features"))
    return Captured(_attend_backward, constants, scale, n_tensors, written)


def _lstm_forward(weight_hh: Tensor, scale: float) -> Callable[..., None]:
    """The weight is :func:`_by_unit`."""

    def run(gates: Tensor, cell: Tensor, hidden: Tensor, mask: Tensor | None) -> None:
        for t in range(len(gates)):
            _lstm_step(weight_hh, gates, cell, hidden, mask, scale, t)

    return run


def _lstm_backward(weight_hh: Tensor, scale: float) -> Callable[..., None]:
    def run(
        d_gates: Tensor,
        d_next: Tensor,
        d_cell: Tensor,
        cell: Tensor,
        mask: Tensor | None,
        d_output: Tensor,
    ) -> None:
        after, parts = d_next, _parts(d_next, weight_hh)
        for t in reversed(range(len(d_gates))):
            _product(after, weight_hh, d_output[t], parts)
            _cell_backward(d_gates, cell, mask, scale, t, parts, None, None, d_cell)
            after = d_gates[t]
        d_next.copy_(after)

    return run


def _attend_forward(*arguments: Any) -> Callable[..., None]:
    """The recurrent weights are :func:`_by_unit`, and the query's are transposed."""
    memory, keys, padding, recurrent, query, location, v, scale = arguments
    (B, T_in, E), (H, A), W = memory.shape, query.shape, location.size(2)
    scores = memory.new_empty(B, T_in)

    def run(
        gates: Tensor, cell: Tensor, features: Tensor, past: Tensor, mask: Tensor | None
    ) -> None:
        queries = _parts(memory, query)
        for t in range(len(gates)):
            _lstm_step(recurrent, gates, cell, features, mask, scale, t)
            _product(features[t + 1], query, None, queries)
            score[B, _blocks(T_in, CHARACTERS)](
                past[t], location, keys, queries, v, padding, scores, B, T_in, A, W,
                len(queries), CHARACTERS, _power(2 * W), COLUMNS, precision(),
            )  # fmt: skip
            attention[B, _blocks(E, COLUMNS)](
                scores, memory, past[t], past[t + 1], features[t + 1], T_in, E, H, W,
                features.stride(1), CHARACTERS, COLUMNS,
            )  # fmt: skip

    return run


def _attend_backward_steps(
    memory: Tensor, recurrent: Tensor, query: Tensor, margin: int
) -> Callable[..., None]:
    (B, T_in, E), (A, H), W = memory.shape, query.shape, 2 * margin + 1
    d_weight = memory.new_empty(B, T_in)

    def steps(gradients: Gradients, saved: Saved, recomputed: Recomputed, scale: float) -> None:
        d_gates, d_past, d_weights = gradients.gates, gradients.past, gradients.weights
        after, parts = gradients.next_gates, _parts(memory, recurrent)
        for t in reversed(range(len(d_gates))):
            d_features, d_query = recomputed.d_features[t], gradients.query[t]
            _product(after, recurrent, d_features, parts)
            attention_gradient[B, _blocks(T_in, CHARACTERS)](
                parts, memory, d_past, None if d_weights is None else d_weights[t], d_weight,
                d_features, B, T_in, E, H, d_weights is not None, len(parts), CHARACTERS, DEPTH,
            )  # fmt: skip
            weights = recomputed.weights[t]
            score_gradient[B, 1 + _blocks(T_in, CHARACTERS)](
                d_weight, weights, recomputed.slopes[t], recomputed.spread[t],
                recomputed.d_scores[t], d_query, d_past, T_in, A, W, weights.stride(0),
                CHARACTERS, _power(A), _power(W),
            )  # fmt: skip
            _cell_backward(
                d_gates, saved.cell, saved.mask, scale, t, parts, d_query, query, gradients.cell
            )
            after = d_gates[t]
        gradients.next_gates.copy_(after)

    return steps


def _attend_backward(*arguments: Any) -> Callable[..., None]:
    *constants, scale = arguments
    return scan.attend_backward(Constants(*constants), scale, _attend_backward_steps)


LOOPS = Loops(lstm_forward, lstm_backward, attend_forward, attend_backward, beside)


# Launches


def _lstm_step(
    weight: Tensor,
    gates: Tensor,
    cell: Tensor,
    states: Tensor,
    mask: Tensor | None,
    scale: float,
    t: int,
) -> None:
    (B, H), rows = cell[t].shape, _rows(cell.size(1))
    lstm_step[_blocks(H, UNITS), _blocks(B, rows)](
        gates[t], cell[t], cell[t + 1], states[t], states[t + 1], weight,
        None if mask is None else mask[t], scale, B, H, weight.size(1), states.stride(1),
        mask is not None, rows, UNITS, DEPTH, precision(),
    )  # fmt: skip


def _cell_backward(
    gates: Tensor,
    cell: Tensor,
    mask: Tensor | None,
    scale: float,
    t: int,
    parts: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    d_cell: Tensor,
) -> None:
    (B, H), rows = d_cell.shape, _rows(len(d_cell))
    cell_backward[_blocks(H, COLUMNS), _blocks(B, rows)](
        gates[t], cell[t], cell[t + 1], None if mask is None else mask[t], scale, parts, x, weight,
        d_cell, B, H, 0 if x is None else x.size(1), parts.size(2), mask is not None,
        x is not None, len(parts), rows, COLUMNS, DEPTH, precision(),
    )  # fmt: skip


def _product(x: Tensor, weight: Tensor, addend: Tensor | None, parts: Tensor) -> None:
    (S, B, N), K, rows = parts.shape, len(weight), _rows(parts.size(1))
    product[_blocks(N, WIDE), _blocks(B, rows), S](
        x, weight, addend, parts, B, N, K, _share(K, N), x.stride(0), addend is not None,
        rows, WIDE, DEPTH, precision(), num_warps=8,
    )  # fmt: skip


def _parts(x: Tensor, weight: Tensor) -> Tensor:
    """Returns room for the partial sums (S, B, N) of products with a weight (K, N), for as many
    clips as ``x`` (B, ...) has."""
    K, N = weight.shape
    return x.new_empty(_blocks(K, _share(K, N)), len(x), N)


def _share(K: int, N: int) -> int:
    """Returns how many of the K terms a program adds up, so that PROGRAMS do all of N columns: for
    any batch as many, since they decide how sums are rounded."""
    return DEPTH * _blocks(_blocks(K, DEPTH), max(1, PROGRAMS // _blocks(N, WIDE)))


def _by_unit(weight: Tensor) -> Tensor:
    """Sorts LSTM weights (4H, K) so that the four gates of a unit are in consecutive rows."""
    return weight.unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def _power(n: int) -> int:
    """Returns the size of a block that holds ``n``: a power of two, 16 or more."""
    return max(16, triton.next_power_of_2(n))


def _rows(B: int) -> int:
    return min(_power(B), MAX_ROWS)


_blocks = triton.cdiv


# Kernels


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def tanh(x):
    return 2 * sigmoid(2 * x) - 1


@triton.jit
def lstm_step(
    gates, cell, cell_out, state, state_out, weight, mask, scale, B, H, K, stride,
    HAS_MASK: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds state (B, K) @ weight (4H, K).T to gates (B, 4H) and activates them; writes the next
    cell and hidden state (B, H). The weight has the four gates of a unit in consecutive rows."""
    b = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * 4 * UNITS + tl.arange(0, 4 * UNITS)[None, :]
    sums = tl.zeros((ROWS, 4 * UNITS), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(state + b * stride + k[None, :], (b < B) & (k[None, :] < K), 0.0)
        w = tl.load(weight + column * K + k[:, None], (column < 4 * H) & (k[:, None] < K), 0.0)
        sums = tl.dot(x.to(w.dtype), w, sums, input_precision=PRECISION)
    even, odd = tl.split(tl.reshape(sums, (ROWS, UNITS, 2, 2)))
    i, g = tl.split(even)
    f, o = tl.split(odd)
    u = tl.program_id(0) * UNITS + tl.arange(0, UNITS)[None, :]
    here, gate = (b < B) & (u < H), gates + b * (4 * H) + u
    i = sigmoid(i + tl.load(gate, here, 0.0))
    f = sigmoid(f + tl.load(gate + H, here, 0.0))
    g = tanh(g + tl.load(gate + 2 * H, here, 0.0))
    o = sigmoid(o + tl.load(gate + 3 * H, here, 0.0))
    place = b * H + u
    c = f * tl.load(cell + place, here, 0.0) + i * g
    h = o * tanh(c)
    if HAS_MASK:
        h = tl.where(tl.load(mask + place, here, 0), h * scale, 0.0)
    tl.debug_barrier()
    tl.store(gate, i, here)
    tl.store(gate + H, f, here)
    tl.store(gate + 2 * H, g, here)
    tl.store(gate + 3 * H, o, here)
    tl.store(cell_out + place, c, here)
    tl.store(state_out + b * stride + u, h, here)


@triton.jit
def cell_backward(
    gates, cell, cell_out, mask, scale, parts, x, weight, d_cell, B, H, K, N,
    HAS_MASK: tl.constexpr, HAS_X: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Turns activated gates (B, 4H) into their gradients. The gradient of the hidden state is the
    sum of the parts (S, B, N), and of x (B, K) @ weight (K, H); that of the cell, d_cell (B, H),
    becomes the gradient of the cell before."""
    u = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    b = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    here, place = (b < B) & (u < H), b * H + u
    d_hidden = sum_of_parts(parts, b * N + u, here, B * N, PARTS)
    if HAS_X:
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            rows = tl.load(x + b * K + k[None, :], (b < B) & (k[None, :] < K), 0.0)
            w = tl.load(weight + k[:, None] * H + u, (k[:, None] < K) & (u < H), 0.0)
            d_hidden = tl.dot(rows, w, d_hidden, input_precision=PRECISION)
    if HAS_MASK:
        d_hidden = tl.where(tl.load(mask + place, here, 0), d_hidden * scale, 0.0)
    gate = gates + b * (4 * H) + u
    i, f = tl.load(gate, here, 0.0), tl.load(gate + H, here, 0.0)
    g, o = tl.load(gate + 2 * H, here, 0.0), tl.load(gate + 3 * H, here, 0.0)
    c = tanh(tl.load(cell_out + place, here, 0.0))
    d_c = tl.load(d_cell + place, here, 0.0) + d_hidden * o * (1 - c * c)
    before = tl.load(cell + place, here, 0.0)
    tl.debug_barrier()
    tl.store(gate, d_c * g * i * (1 - i), here)
    tl.store(gate + H, d_c * before * f * (1 - f), here)
    tl.store(gate + 2 * H, d_c * i * (1 - g * g), here)
    tl.store(gate + 3 * H, d_hidden * c * o * (1 - o), here)
    tl.store(d_cell + place, d_c * f, here)


@triton.jit
def product(
    x, weight, addend, parts, B, N, K, share, stride,
    HAS_ADDEND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes addend (B, N) + x (B, K) @ weight (K, N) as partial sums (S, B, N), of ``share`` terms
    each; rows of x lie ``stride`` apart."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    b = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    part, here = tl.program_id(2), (b < B) & (column < N)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, share, BLOCK_K):
        k = part * share + start + tl.arange(0, BLOCK_K)
        rows = tl.load(x + b * stride + k[None, :], (b < B) & (k[None, :] < K), 0.0)
        w = tl.load(weight + k[:, None] * N + column, (k[:, None] < K) & (column < N), 0.0)
        sums = tl.dot(rows.to(w.dtype), w, sums, input_precision=PRECISION)
    place = b * N + column
    if HAS_ADDEND:
        addend += place
        if part == 0:
            sums += tl.load(addend, here, 0.0)
    tl.store(parts + part * B * N + place, sums, here)


@triton.jit
def sum_of_parts(parts, place, here, size, PARTS: tl.constexpr):
    """Adds up PARTS tensors of ``size`` numbers, one after the other, at some places."""
    sums = tl.load(parts + place, here, 0.0)
    for part in tl.static_range(1, PARTS):
        sums += tl.load(parts + part * size + place, here, 0.0)
    return sums


@triton.jit
def score(
    past, location, keys, queries, v, padding, scores, B, T_in, A, W,
    PARTS: tl.constexpr, CHARACTERS: tl.constexpr, WINDOW: tl.constexpr, FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the scores (B, T_in) of a clip's characters, -inf for padding. The query is the sum of
    its parts (S, B, A)."""
    b = tl.program_id(0)
    n = tl.program_id(1) * CHARACTERS + tl.arange(0, CHARACTERS)
    j = tl.arange(0, WINDOW)  # of 2W: over the weights, then over their sum
    length, real, used = T_in + W - 1, n < T_in, j < 2 * W
    place = past + b * 2 * length + (j // W) * length + j % W
    windows = tl.load(place[None, :] + n[:, None], real[:, None] & used[None, :], 0.0)
    result = tl.zeros((CHARACTERS,), tl.float32)
    for start in range(0, A, FEATURES):
        a = start + tl.arange(0, FEATURES)
        energies = tl.load(
            keys + (b * T_in + n[:, None]) * A + a[None, :], real[:, None] & (a[None, :] < A), 0.0
        )
        energies += sum_of_parts(queries, b * A + a, a < A, B * A, PARTS)[None, :]
        filters = tl.load(
            location + a[None, :] * (2 * W) + j[:, None], (a[None, :] < A) & used[:, None], 0.0
        )
        energies = tl.dot(windows, filters, energies, input_precision=PRECISION)
        result += tl.sum(tanh(energies) * tl.load(v + a, a < A, 0.0)[None, :], 1)
    padded = tl.load(padding + b * T_in + n, real, 0)
    tl.store(scores + b * T_in + n, tl.where(padded, -float("inf"), result), real)


@triton.jit
def attention(
    scores, memory, past, past_out, state_out, T_in, E, H, W, stride,
    CHARACTERS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes a block of a clip's context, its attention weights (by softmax) and their new sum."""
    b, block = tl.program_id(0), tl.program_id(1)
    scores += b * T_in
    n = tl.arange(0, CHARACTERS)
    largest = tl.full((CHARACTERS,), -float("inf"), tl.float32)
    for start in range(0, T_in, CHARACTERS):
        largest = tl.maximum(largest, tl.load(scores + start + n, start + n < T_in, -float("inf")))
    largest = tl.max(largest, 0)
    e = block * COLUMNS + tl.arange(0, COLUMNS)
    total, context = tl.zeros((CHARACTERS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, T_in, CHARACTERS):
        m = start + n
        exps = tl.exp(tl.load(scores + m, m < T_in, -float("inf")) - largest)
        rows = tl.load(
            memory + (b * T_in + m[:, None]) * E + e[None, :],
            (m[:, None] < T_in) & (e[None, :] < E), 0.0,
        )  # fmt: skip
        total += exps
        context += tl.sum(exps[:, None] * rows, 0)
    total = tl.sum(total, 0)
    tl.store(state_out + b * stride + H + e, context / total, e < E)
    if block == 0:
        length = T_in + W - 1
        for start in range(0, T_in, CHARACTERS):
            m = start + n
            weights = tl.exp(tl.load(scores + m, m < T_in, -float("inf")) - largest) / total
            place = b * 2 * length + W // 2 + m
            before = tl.load(past + place + length, m < T_in, 0.0)
            tl.store(past_out + place, weights, m < T_in)
            tl.store(past_out + place + length, before + weights, m < T_in)


@triton.jit
def attention_gradient(
    parts, memory, d_past, d_weights, d_weight, d_features, B, T_in, E, H,
    HAS_WEIGHTS: tl.constexpr, PARTS: tl.constexpr, CHARACTERS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of a clip's context, which is the sum of the parts (S, B, H + E); and
    that of its attention weights, which their output, the context and later steps used."""
    b, block = tl.program_id(0), tl.program_id(1)
    n = block * CHARACTERS + tl.arange(0, CHARACTERS)
    real = n < T_in
    d = tl.load(d_past + b * 2 * T_in + n, real, 0.0)
    d += tl.load(d_past + (b * 2 + 1) * T_in + n, real, 0.0)
    if HAS_WEIGHTS:
        d += tl.load(d_weights + b * T_in + n, real, 0.0)
    for start in range(0, E, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        place = b * (H + E) + H + e
        context = sum_of_parts(parts, place, e < E, B * (H + E), PARTS)
        if block == 0:
            tl.store(d_features + place, context, e < E)
        rows = tl.load(
            memory + (b * T_in + n[:, None]) * E + e[None, :],
            real[:, None] & (e[None, :] < E), 0.0,
        )  # fmt: skip
        d += tl.sum(rows * context[None, :], 1)
    tl.store(d_weight + b * T_in + n, d, real)


@triton.jit
def score_gradient(
    d_weight, weights, slopes, spread, d_scores, d_query, d_past, T_in, A, W, stride,
    CHARACTERS: tl.constexpr, FEATURES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Runs softmax backward for a clip. The first program writes the gradients of scores and query.
    Each of the others writes those of the last weights and of their sum, for a block of
    characters."""
    b, block = tl.program_id(0), tl.program_id(1) - 1
    w, d = weights + b * stride, d_weight + b * T_in
    total = tl.zeros((CHARACTERS,), tl.float32)
    for start in range(0, T_in, CHARACTERS):
        n = start + tl.arange(0, CHARACTERS)
        total += tl.load(d + n, n < T_in, 0.0) * tl.load(w + n, n < T_in, 0.0)
    total = tl.sum(total, 0)
    if block < 0:
        a = tl.arange(0, FEATURES)
        sums = tl.zeros((FEATURES,), tl.float32)
        for start in range(0, T_in, CHARACTERS):
            m = start + tl.arange(0, CHARACTERS)
            real = m < T_in
            d_score = (tl.load(d + m, real, 0.0) - total) * tl.load(w + m, real, 0.0)
            tl.store(d_scores + b * T_in + m, d_score, real)
            rows = tl.load(
                slopes + (b * T_in + m[:, None]) * A + a[None, :],
                real[:, None] & (a[None, :] < A), 0.0,
            )  # fmt: skip
            sums += tl.sum(d_score[:, None] * rows, 0)
        tl.store(d_query + b * A + a, sums, a < A)
    else:
        m = block * CHARACTERS + tl.arange(0, CHARACTERS)
        j = tl.arange(0, WINDOW)
        # Window n saw character m at position j if n + j = m + W // 2.
        seen = m[:, None] + W // 2 - j[None, :]
        real = (seen >= 0) & (seen < T_in) & (j[None, :] < W)
        d_score = (tl.load(d + seen, real, 0.0) - total) * tl.load(w + seen, real, 0.0)
        place = spread + (b * T_in + seen) * (2 * W) + j[None, :]
        of_weights = tl.sum(d_score * tl.load(place, real, 0.0), 1)
        of_sums = tl.sum(d_score * tl.load(place + W, real, 0.0), 1)
        out = d_past + b * 2 * T_in + m
        of_sums += tl.load(out + T_in, m < T_in, 0.0)
        tl.debug_barrier()
        tl.store(out, of_weights, m < T_in)
        tl.store(out + T_in, of_sums, m < T_in)
