"""The fast recurrences equal the step-by-step loop, or say that they cannot."""

import pytest
import torch
from conftest import TINY, noise_batch
from torch import Tensor
from torch.autograd import grad, gradcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import decoder_scan
from data_utils import Batch
from decoder_scan import B_MULTIPLE, SEGMENT, STEPS, T_IN_MULTIPLE
from hparams import create_hparams
from layers import draw_mask
from loss_function import Tacotron2Loss
from model import Output, Tacotron2

NO_DROPOUT = "".join(
    f"p_{part}_dropout=0," for part in ("encoder", "prenet", "attention", "decoder", "postnet")
)
FAST = ("scan", "graph")  # on a CPU, "graph" is the same code without capture
PADDED = ([17, 9, 5], [23, 41, 1])  # text and mel lengths
T_IN = 6


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch.manual_seed(0)
    decoder_scan._graph.cache_clear()


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def lstm_inputs(T: int, B: int = 3, D: int = 2, H: int = 4) -> tuple[Tensor, ...]:
    return leaf(T, B, D), leaf(4 * H, D), leaf(4 * H, H), leaf(4 * H)


def attend_inputs(T: int, B: int = 3, H: int = 4) -> tuple[Tensor, ...]:
    """The differentiable arguments of ``attend``, with location filters over 5 characters."""
    D, E, A = 2, 3, 2
    x, memory, keys = leaf(T, B, D), leaf(B, T_IN, E), leaf(B, T_IN, A)
    weights = leaf(4 * H, D), leaf(4 * H, H + E), leaf(4 * H), leaf(A, H), leaf(A, 2, 5), leaf(A)
    return x, memory, keys, *weights


def attend(inputs: tuple[Tensor, ...], *options) -> tuple[Tensor, ...]:
    """``decoder_scan.attend`` for texts of 6, 4, 2, 6, 4, 2, ... characters."""
    lengths = T_IN - 2 * (torch.arange(inputs[0].size(1)) % 3)
    padding = torch.arange(T_IN) >= lengths[:, None]
    return decoder_scan.attend(*inputs[:3], padding, *inputs[3:], *options)


# The recurrences alone


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("T", [1, STEPS + 3])
def test_gradients_are_finite_differences(T, masked, graph):
    options = torch.rand(T, 3, 4) > 0.3 if masked else None, 1.4, graph
    assert gradcheck(lambda *inputs: decoder_scan.lstm(*inputs, *options), lstm_inputs(T))
    assert gradcheck(lambda *inputs: attend(inputs, *options), attend_inputs(T))


def test_gradients_that_arrive_at_the_alignment_alone():
    inputs = attend_inputs(11)
    _, _, weights = attend(inputs)
    alone = grad(weights.square().sum(), inputs)
    features, contexts, weights = attend(inputs)
    loss = weights.square().sum() + 0 * features.sum() + 0 * contexts.sum()
    for ours, theirs in zip(alone, grad(loss, inputs), strict=True):
        assert ours.any()
        assert_close(ours, theirs)


def test_a_second_backward_is_right_or_refused():
    """Gradients overwrite the saved gates, and must never be computed from overwritten ones."""
    inputs = attend_inputs(11)
    features, contexts, weights = attend(inputs)
    hidden = decoder_scan.lstm(features, *lstm_inputs(1, D=7)[1:])
    value = hidden.square().sum() + contexts.sum() + weights.square().sum()
    first = grad(value, inputs, retain_graph=True)
    for ours, theirs in zip(first, grad(value, inputs), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match="second time"):
        grad(value, inputs)
    inputs = lstm_inputs(3)
    value = decoder_scan.lstm(*inputs).square().sum()
    (gradient,) = grad(value, inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of any operator's result."""

    n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.n = max(self.n, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@torch.no_grad()
@pytest.mark.parametrize("graph", [False, True])
def test_without_gradients_nothing_is_kept_for_backward(graph):
    T, H = 4 * SEGMENT, 6
    lstm, attention = lstm_inputs(T, H=H), attend_inputs(T, H=H)
    with LargestTensor() as largest:
        decoder_scan.lstm(*lstm, None, 1.0, graph)
        attend(attention, None, 1.0, graph)
    B, T_in = (B_MULTIPLE, T_IN_MULTIPLE) if graph else (3, T_IN)
    assert largest.n <= (T + 1) * B * 2 * (T_in + 4)  # the attention weights
    assert graph or largest.n < T * B * 4 * H  # the gates


@pytest.mark.parametrize("graph", [False, True])
def test_bf16_rounds_the_products_with_lstm_weights_and_nothing_else(graph, monkeypatch):
    products = []  # of each: whether it is an LSTM's, and its dtype

    def noted(product):
        def note_and_call(weight_or_gradient: Tensor, other):
            products.append((16 in weight_or_gradient.shape, weight_or_gradient.dtype))
            return product(weight_or_gradient, other)

        return note_and_call

    for name in ("multiplier", "_weight_gradient"):
        monkeypatch.setattr(decoder_scan, name, noted(getattr(decoder_scan, name)))
    lstm = [x.detach().float().requires_grad_() for x in lstm_inputs(40)]
    inputs = [x.detach().float().requires_grad_() for x in attend_inputs(40)]
    results = []
    for dtype in (None, torch.bfloat16):
        products.clear()
        decoder_scan._graph.cache_clear()
        options = None, 1.0, graph, dtype
        outputs = decoder_scan.lstm(*lstm, *options), *attend(inputs, *options)
        loss = sum(output.square().sum() for output in outputs)
        results.append((*outputs, *grad(loss, [*lstm, *inputs])))
        # Both LSTMs: input, recurrence, the backward of each, two weight gradients.
        assert [of_lstm for of_lstm, _ in products].count(True) == 6 + 6
        assert len(products) == 6 + 6 + 6  # and the attention's own
        for of_lstm, of_product in products:
            assert of_product is (dtype if of_lstm and dtype else torch.float32)
    for output in outputs:  # states and cells are not rounded
        assert (output.bfloat16() != output).any()
    for exact, rounded in zip(*results, strict=True):
        assert 0 < (rounded - exact).norm() / exact.norm() < 0.1


# The model


def build(overrides: str = "", dtype: torch.dtype = torch.float64) -> Tacotron2:
    torch.manual_seed(0)
    return Tacotron2(create_hparams(TINY + overrides)).to(dtype)


def batch_of(text_lengths: list[int], mel_lengths: list[int], dtype=torch.float64) -> Batch:
    batch = noise_batch(create_hparams(TINY), text_lengths, mel_lengths)
    return batch._replace(mel=batch.mel.to(dtype), gate=batch.gate.to(dtype))


def use(model: Tacotron2, implementation: str) -> None:
    model.encoder.implementation = model.decoder.implementation = implementation


def run(model: Tacotron2, batch: Batch, implementation: str) -> tuple[Output, dict[str, Tensor]]:
    """Outputs and every parameter's gradient, with the same dropout each time."""
    use(model, implementation)
    model.zero_grad()
    torch.manual_seed(1)
    output = model(batch)
    Tacotron2Loss(guided_attention_weight=1.0)(output, batch).objective.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(model: Tacotron2, batch: Batch, tolerance: float, implementations=FAST) -> None:
    """Relative error of each output and gradient against the loop's."""
    expected, gradients = run(model, batch, "reference")
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for implementation in implementations:
        output, ours = run(model, batch, implementation)
        for name, tensor in expected._asdict().items():
            error = (getattr(output, name) - tensor).norm() / tensor.norm()
            assert error < tolerance, f"{implementation}: {name}: {error}"
        for name, gradient in gradients.items():
            assert gradient.isfinite().all()
            # A bias before batch norm has no gradient but rounding.
            error = (ours[name] - gradient).norm() / max(gradient.norm(), 1e-3 * total)
            assert error < tolerance, f"{implementation}: {name}: {error}"


@pytest.mark.parametrize(
    ("overrides", "lengths", "dtype", "tolerance"),
    [
        ("", PADDED, torch.float64, 1e-11),
        ("", PADDED, torch.float32, 2e-4),
        (NO_DROPOUT, PADDED, torch.float64, 1e-11),
        (NO_DROPOUT, PADDED, torch.float32, 2e-4),
        ("", ([60, 33], [600, 471]), torch.float64, 1e-9),
    ],
)
def test_model_equals_the_reference(overrides, lengths, dtype, tolerance):
    assert_equal(build(overrides, dtype), batch_of(*lengths, dtype), tolerance)


def test_model_equals_the_reference_with_peaked_attention():
    """Weights after some training, when attention looks at one character at a time."""
    model, batch = build(), batch_of([9, 7], [30, 24])
    use(model, "scan")
    optimizer = torch.optim.Adam(model.decoder.attention_layer.parameters(), 0.05)
    loss_function = Tacotron2Loss(10.0, 0.1)
    for _ in range(90):
        optimizer.zero_grad()
        output = model(batch)
        loss_function(output, batch).objective.backward()
        optimizer.step()
    assert output.alignment.amax(2).mean() > 0.75
    assert_equal(model, batch, 1e-9)


def assert_equal_in_validation(model: Tacotron2, batch: Batch, **tolerances) -> None:
    outputs = []
    for implementation in ("reference", *FAST):
        use(model.eval(), implementation)
        with torch.no_grad():
            outputs.append(tuple(model(batch)))
    assert_close(outputs[1:], [outputs[0]] * len(FAST), **tolerances)


def test_validation_equals_the_reference_beyond_a_segment():
    batch = batch_of([17, 9], [2 * SEGMENT + 3, 50])
    assert_equal_in_validation(build(NO_DROPOUT), batch)


def test_bf16_gradients_are_as_close_as_its_8_bits():
    batch = batch_of([17, 9, 5], [23, 41, 30], torch.float32)
    expected, gradients = run(build("", torch.float32), batch, "scan")
    exact = torch.cat([gradient.flatten() for gradient in gradients.values()])
    for implementation in ("reference", *FAST):
        output, ours = run(build("precision=bf16", torch.float32), batch, implementation)
        for name in ("mel", "mel_postnet"):
            tensor, other = getattr(expected, name), getattr(output, name)
            assert 1e-4 < (other - tensor).norm() / tensor.norm() < 0.05
        rounded = torch.cat([gradient.flatten() for gradient in ours.values()])
        assert 1e-3 < (rounded - exact).norm() / exact.norm() < 0.1


def test_without_onednn_the_results_are_the_same(monkeypatch):
    assert decoder_scan._has_onednn(torch.float32) == torch.backends.mkldnn.is_available()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not decoder_scan._has_onednn(torch.float32)
    batch = batch_of([17, 9, 5], [23, 41, 30], torch.float32)
    assert_equal(build(dtype=torch.float32), batch, 2e-4, ["scan"])
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    for rows in (3, 10 * decoder_scan.FEW_ROWS):
        multiply = decoder_scan.multiplier(weight, rows)
        assert_close(multiply(x, bias), x @ weight.t() + bias)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_the_model_equals_the_reference():
    """With captured graphs of several shapes, and again when they are replayed."""
    model = build(NO_DROPOUT, torch.float32).cuda()
    for lengths in (PADDED, ([40, 33], [70, 19])) * 2:
        batch = batch_of(*lengths, torch.float32).to(torch.device("cuda"))
        assert_equal(model.train(), batch, 1e-3)
        assert_equal_in_validation(model, batch, rtol=1e-3, atol=1e-5)


# Graphs


def test_graphs_made_for_inference_serve_training():
    inputs = lstm_inputs(5)
    with torch.inference_mode():
        expected = decoder_scan.lstm(*inputs, None, 1.0, True)
    hidden = decoder_scan.lstm(*inputs, None, 1.0, True)
    assert_close(hidden, expected)
    hidden.sum().backward()


def test_similar_shapes_share_graphs_but_not_precisions():
    for T, B in ((5, 1), (9, 3), (30, 8)):
        decoder_scan.lstm(*lstm_inputs(T, B), None, 1.0, True).sum().backward()
    info = decoder_scan._graph.cache_info()
    assert info == (4, 2, decoder_scan.MAX_GRAPHS, 2)  # hits, misses, most, now
    decoder_scan.lstm(*lstm_inputs(5, 9), None, 1.0, True)
    assert decoder_scan._graph.cache_info()[:2] == (4, 3)
    for allowed, counts in ((True, (4, 4)), (False, (5, 4))):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        decoder_scan.lstm(*lstm_inputs(5, 9), None, 1.0, True)
        assert decoder_scan._graph.cache_info()[:2] == counts


def test_graphs_of_all_shapes_share_the_memory_of_the_largest(monkeypatch):
    decoder_scan._flat.clear()
    graphs, sizes = [], []
    monkeypatch.setattr(decoder_scan._Graph, "_capture", lambda graph: graphs.append(graph))
    for n in (3, 2, 1):
        B = n * B_MULTIPLE
        decoder_scan.lstm(*lstm_inputs(9, B), None, 1.0, True).sum().backward()
        features, contexts, _ = attend(attend_inputs(9, B), None, 1.0, True)
        (features.sum() + contexts.sum()).backward()
        buffers = [buffer for graph in graphs for buffer in (*graph.constants, *graph.tensors)]
        storages = [buffer.untyped_storage() for buffer in buffers if buffer is not None]
        sizes.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
    assert len(graphs) == 3 * 4  # two loops, forward and backward
    assert sizes[0] == sizes[1] == sizes[2] > 0


def fail_captures(monkeypatch, error: Exception) -> None:
    def capture(self):
        raise error

    monkeypatch.setattr(decoder_scan, "_cannot_capture", False)
    monkeypatch.setattr(decoder_scan._Graph, "_capture", capture)


def test_a_failed_capture_is_reported_once_and_the_scan_takes_over(monkeypatch, capsys):
    reason = "operation not permitted when stream is capturing"
    fail_captures(monkeypatch, RuntimeError(f"{reason}\nCompile with ..."))
    assert_equal(build(), batch_of(*PADDED), 1e-11, ["graph"])
    (warning,) = capsys.readouterr().out.splitlines()
    assert f"({reason})" in warning and "decoder=scan" in warning


def test_out_of_memory_in_a_capture_is_raised(monkeypatch):
    fail_captures(monkeypatch, torch.cuda.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        decoder_scan.lstm(*lstm_inputs(5), None, 1.0, True)
    assert not decoder_scan._cannot_capture


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999999])
def test_a_mask_drops_the_share_it_should(p):
    mask = draw_mask(p, (101, 1000), torch.device("cpu"))
    assert mask.shape == (101, 1000) and mask.dtype is torch.bool
    dropped = 1 - mask.double().mean().item()
    assert abs(dropped - p) <= 5 * (p * (1 - p) / mask.numel()) ** 0.5
    if p == 0.5:  # neither neighbours nor rows repeat each other
        for a, b in ((mask[:, :-1], mask[:, 1:]), (mask[:, ::2], mask[:, 1::2])):
            assert abs((a == b).double().mean().item() - 0.5) < 0.01
