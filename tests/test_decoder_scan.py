"""The scans equal the loop: outputs, gradients, masks, padding; or say so when they cannot."""

import gc

import pytest
import torch
from conftest import TINY, noise_batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import decoder_scan
from data_utils import Batch
from hparams import create_hparams
from layers import draw_mask
from loss_function import Tacotron2Loss
from model import Output, Tacotron2

NO_DROPOUT = "".join(
    f"p_{part}_dropout=0," for part in ("encoder", "prenet", "attention", "decoder", "postnet")
)
FAST = ("scan", "graph")  # graph: on a CPU the same code without capture


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def lstm_inputs(T: int, B: int, D: int = 4, H: int = 6) -> tuple[Tensor, ...]:
    return leaf(T, B, D), leaf(4 * H, D), leaf(4 * H, H), leaf(4 * H)


def attend_inputs(T: int, B: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """The differentiable ones, and the padding. Texts of 6, 4 and 2 characters, filters of 5."""
    D, H, E, A, T_in = 4, 6, 4, 3, 6
    padding = torch.arange(T_in) >= torch.tensor([6, 4, 2])[:B, None]
    x, memory, keys = leaf(T, B, D), leaf(B, T_in, E), leaf(B, T_in, A)
    weights = leaf(4 * H, D), leaf(4 * H, H + E), leaf(4 * H), leaf(A, H), leaf(A, 2, 5), leaf(A)
    return (x, memory, keys, *weights), padding


def attend(inputs: tuple[Tensor, ...], padding: Tensor, *options) -> tuple[Tensor, ...]:
    return decoder_scan.attend(*inputs[:3], padding, *inputs[3:], *options)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("T", [1, decoder_scan.STEPS + 3])
def test_gradients_are_finite_differences(T, masked, graph):
    torch.manual_seed(0)
    mask = torch.rand(T, 3, 6) > 0.3 if masked else None
    assert torch.autograd.gradcheck(
        lambda *inputs: decoder_scan.lstm(*inputs, mask, 1.4, graph), lstm_inputs(T, 3)
    )
    inputs, padding = attend_inputs(T, 3)
    assert torch.autograd.gradcheck(
        lambda *inputs: attend(inputs, padding, mask, 1.4, graph), inputs
    )


def test_without_a_mask_lstm_is_torchs():
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(4, 5).double()
    x = torch.randn(70, 3, 4, dtype=torch.float64)
    bias = theirs.bias_ih_l0 + theirs.bias_hh_l0
    with torch.no_grad():  # which takes more than one segment
        ours = decoder_scan.lstm(x, theirs.weight_ih_l0, theirs.weight_hh_l0, bias)
        torch.testing.assert_close(ours, theirs(x)[0])


def build(overrides: str = "", dtype: torch.dtype = torch.float64) -> Tacotron2:
    torch.manual_seed(0)
    return Tacotron2(create_hparams(TINY + overrides)).to(dtype)


def batch_of(text_lengths: list[int], mel_lengths: list[int], dtype: torch.dtype) -> Batch:
    batch = noise_batch(create_hparams(TINY), text_lengths, mel_lengths)
    return batch._replace(mel=batch.mel.to(dtype), gate=batch.gate.to(dtype))


def run(model: Tacotron2, batch: Batch, implementation: str) -> tuple[Output, dict[str, Tensor]]:
    """Outputs and every parameter's gradient, with the same dropout each time."""
    model.encoder.implementation = model.decoder.implementation = implementation
    model.zero_grad()
    torch.manual_seed(1)
    output = model(batch)
    Tacotron2Loss(guided_attention_weight=1.0)(output, batch).objective.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(model: Tacotron2, batch: Batch, implementation: str, tolerance: float) -> None:
    expected, gradients = run(model, batch, "reference")
    output, ours = run(model, batch, implementation)
    for name, tensor in expected._asdict().items():
        error = (getattr(output, name) - tensor).norm() / tensor.norm()
        assert error < tolerance, f"{name}: {error}"
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, gradient in gradients.items():
        assert gradient.isfinite().all()
        # A bias before batch norm has no gradient but rounding.
        error = (ours[name] - gradient).norm() / max(gradient.norm(), 1e-3 * total)
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("overrides", ["", NO_DROPOUT], ids=["dropout", "no dropout"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-4)], ids=["fp64", "fp32"]
)
def test_model_equals_the_reference_on_a_padded_batch(implementation, overrides, dtype, tolerance):
    batch = batch_of([17, 9, 5], [23, 41, 1], dtype)
    assert_equal(build(overrides, dtype), batch, implementation, tolerance)


@pytest.mark.parametrize("implementation", FAST)
def test_model_equals_the_reference_over_600_frames(implementation):
    batch = batch_of([60, 33], [600, 471], torch.float64)
    assert_equal(build(), batch, implementation, 1e-9)


@pytest.mark.parametrize("implementation", FAST)
def test_model_equals_the_reference_with_peaked_attention(implementation):
    """Weights after some training, with which attention looks at one character at a time."""
    model, batch = build("guided_attention_sigma=0.1"), batch_of([9, 7], [30, 24], torch.float64)
    model.encoder.implementation = model.decoder.implementation = "scan"
    optimizer = torch.optim.Adam(model.decoder.attention_layer.parameters(), 0.05)
    loss_function = Tacotron2Loss(10.0, 0.1)
    for _ in range(90):
        optimizer.zero_grad()
        output = model(batch)
        loss_function(output, batch).objective.backward()
        optimizer.step()
    assert output.alignment.amax(2).mean() > 0.75
    assert_equal(model, batch, implementation, 1e-9)


@pytest.mark.parametrize("implementation", ("reference", *FAST))
def test_in_bf16_gradients_are_as_near_as_its_8_bits(implementation):
    batch = batch_of([17, 9, 5], [23, 41, 30], torch.float32)
    expected, gradients = run(build("", torch.float32), batch, "scan")
    output, ours = run(build("precision=bf16", torch.float32), batch, implementation)
    for name in ("mel", "mel_postnet"):
        tensor, other = getattr(expected, name), getattr(output, name)
        assert 1e-4 < (other - tensor).norm() / tensor.norm() < 0.05
    both = [torch.cat([g.flatten() for g in each.values()]) for each in (gradients, ours)]
    assert 1e-3 < (both[1] - both[0]).norm() / both[0].norm() < 0.1


@pytest.mark.parametrize("graph", [False, True])
def test_in_bf16_the_products_of_lstms_are_rounded_and_nothing_else(graph, monkeypatch):
    torch.manual_seed(0)
    products = []  # (whether it is of an LSTM, the dtype)

    def multiplier(weight: Tensor, rows: int):
        products.append((24 in weight.shape, weight.dtype))
        return real_multiplier(weight, rows)

    def weight_gradient(d_output: Tensor, x: Tensor):
        products.append((d_output.size(2) == 24, d_output.dtype))
        return real_weight_gradient(d_output, x)

    real_multiplier, real_weight_gradient = decoder_scan.multiplier, decoder_scan._weight_gradient
    monkeypatch.setattr(decoder_scan, "multiplier", multiplier)
    monkeypatch.setattr(decoder_scan, "_weight_gradient", weight_gradient)
    lstm = [x.detach().float().requires_grad_() for x in lstm_inputs(40, 3)]
    inputs, padding = attend_inputs(40, 3)
    inputs = [x.detach().float().requires_grad_() for x in inputs]
    results = []
    for dtype in (None, torch.bfloat16):
        products.clear()
        decoder_scan._graph.cache_clear()
        hidden = decoder_scan.lstm(*lstm, None, 1.0, graph, dtype)
        outputs = hidden, *attend(inputs, padding, None, 1.0, graph, dtype)
        loss = sum(output.square().sum() for output in outputs)
        results.append((*outputs, *torch.autograd.grad(loss, [*lstm, *inputs])))
        # Of both scans input, recurrent, their backward and two gradients; the attention's own.
        assert [of_lstm for of_lstm, _ in products].count(True) == 6 + 6
        assert len(products) == 6 + 6 + 6
        for of_lstm, of_product in products:
            assert of_product is (dtype if of_lstm and dtype else torch.float32)
    for output in outputs:  # and so states and cells
        assert (output.bfloat16() != output).any()
    for exact, rounded in zip(*results, strict=True):
        assert 0 < (rounded - exact).norm() / exact.norm() < 0.1


def test_gradients_that_arrive_at_the_alignment_alone():
    inputs, padding = attend_inputs(11, 3)
    _, _, weights = attend(inputs, padding)
    alone = torch.autograd.grad(weights.square().sum(), inputs, retain_graph=True)
    features, contexts, weights = attend(inputs, padding)
    loss = weights.square().sum() + 0 * features.sum() + 0 * contexts.sum()
    for ours, theirs in zip(alone, torch.autograd.grad(loss, inputs), strict=True):
        assert ours.any()
        torch.testing.assert_close(ours, theirs)


def test_without_onednn_the_results_are_the_same(monkeypatch):
    batch = batch_of([17, 9, 5], [23, 41, 30], torch.float32)
    model = build(dtype=torch.float32)
    assert decoder_scan._has_onednn(torch.float32) == torch.backends.mkldnn.is_available()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not decoder_scan._has_onednn(torch.float32)
    assert_equal(model, batch, "scan", 2e-4)
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    for rows in (3, 10 * decoder_scan.FEW_ROWS):
        multiply = decoder_scan.multiplier(weight, rows)
        torch.testing.assert_close(multiply(x, bias), x @ weight.t() + bias)


def test_whole_states_are_dropped_as_they_are_carried_on():
    inputs = lstm_inputs(6, 2)
    mask = torch.ones(6, 2, 6, dtype=torch.bool)
    mask[2, 0] = False
    hidden = decoder_scan.lstm(*inputs, mask)
    assert not hidden[2, 0].any() and hidden[2, 1].any()
    undropped = decoder_scan.lstm(*inputs)
    torch.testing.assert_close(hidden[:, 1], undropped[:, 1])
    assert (hidden[3, 0] != undropped[3, 0]).all()


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operator's result has."""

    n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.n = max(self.n, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("graph", [False, True])
def test_without_gradients_nothing_is_kept_for_backward(graph):
    T = 4 * decoder_scan.SEGMENT
    with torch.no_grad():
        inputs, attention = lstm_inputs(T, 3), attend_inputs(T, 3)
        with LargestTensor() as largest:
            decoder_scan.lstm(*inputs, None, 1.0, graph)
            attend(*attention, None, 1.0, graph)
    B, T_in = (decoder_scan.B_MULTIPLE, decoder_scan.T_IN_MULTIPLE) if graph else (3, 6)
    assert largest.n <= (T + 1) * B * 2 * (T_in + 4)  # the attention weights
    assert graph or largest.n < T * B * 24  # the gates


@pytest.mark.parametrize("implementation", FAST)
def test_validation_equals_the_reference_beyond_a_segment(implementation):
    model = build(NO_DROPOUT).eval()
    frames = 2 * decoder_scan.SEGMENT + 3
    batch = batch_of([17, 9], [frames, 50], torch.float64)
    outputs = []
    for name in ("reference", implementation):
        model.encoder.implementation = model.decoder.implementation = name
        with torch.no_grad():
            outputs.append(model(batch))
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_graphs_made_for_inference_serve_training():
    decoder_scan._graph.cache_clear()
    inputs = lstm_inputs(5, 2)
    with torch.inference_mode():
        expected = decoder_scan.lstm(*inputs, None, 1.0, True)
    hidden = decoder_scan.lstm(*inputs, None, 1.0, True)
    torch.testing.assert_close(hidden, expected)
    hidden.sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("implementation", FAST)
def test_on_a_gpu_the_model_equals_the_reference(implementation):
    """Captured graphs too, of several shapes, and again when they are replayed."""
    model = build(NO_DROPOUT, torch.float32).cuda()
    for text_lengths, mel_lengths in (([17, 9, 5], [23, 41, 1]), ([40, 33], [70, 19])) * 2:
        batch = batch_of(text_lengths, mel_lengths, torch.float32).to(torch.device("cuda"))
        assert_equal(model, batch, implementation, 1e-3)
        with torch.no_grad():
            outputs = []
            for name in ("reference", implementation):
                model.encoder.implementation = model.decoder.implementation = name
                outputs.append(model(batch).alignment)
            torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-5)


def test_a_second_backward_is_right_or_refused():
    """The gradients are made over the saved gates: never silently from spoilt ones."""
    inputs, padding = attend_inputs(11, 3)

    def loss() -> Tensor:
        features, contexts, weights = attend(inputs, padding)
        hidden = decoder_scan.lstm(features, *lstm_weights)
        return hidden.square().sum() + contexts.sum() + weights.square().sum()

    lstm_weights = leaf(24, 10), leaf(24, 6), leaf(24)
    value = loss()
    first = torch.autograd.grad(value, inputs, retain_graph=True)
    second = torch.autograd.grad(value, inputs)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, inputs)


def test_second_derivatives_are_refused():
    inputs = lstm_inputs(3, 2)
    (gradient,) = torch.autograd.grad(
        decoder_scan.lstm(*inputs).square().sum(), inputs[0], create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_graphs_are_shared_by_like_shapes_and_bounded():
    decoder_scan._graph.cache_clear()
    for T, B in ((5, 1), (9, 3), (30, 8)):
        decoder_scan.lstm(*lstm_inputs(T, B), None, 1.0, True).sum().backward()
    info = decoder_scan._graph.cache_info()
    assert info.misses == 2 and info.hits == 4 and info.maxsize == decoder_scan.MAX_GRAPHS
    decoder_scan.lstm(*lstm_inputs(5, 9), None, 1.0, True)
    assert decoder_scan._graph.cache_info().misses == 3


def test_graphs_of_all_shapes_share_the_memory_of_the_largest():
    decoder_scan._graph.cache_clear()
    decoder_scan._flat.clear()

    def held() -> int:
        """Bytes that graphs hold, their constants and the tensors of their steps."""
        graphs = [x for x in gc.get_objects() if type(x) is decoder_scan._Graph]
        storages = {
            buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes()
            for graph in graphs
            for buffer in (*graph.constants, *graph.tensors)
            if buffer is not None
        }
        return sum(storages.values())

    gc.collect()
    sizes, of_shapes = [], []
    for B in (3, 2, 1):  # clips, rounded up to a multiple of 8 each
        B *= decoder_scan.B_MULTIPLE
        x, *weights = lstm_inputs(9, B)
        inputs, padding = attend_inputs(9, 3)
        memory, keys = (tensor[:1].expand(B, -1, -1) for tensor in inputs[1:3])
        inputs = (leaf(9, B, 4), memory, keys, *inputs[3:])
        padding = padding[:1].expand(B, -1)
        decoder_scan.lstm(x, *weights, None, 1.0, True).sum().backward()
        features, contexts, _ = attend(inputs, padding, None, 1.0, True)
        (features.sum() + contexts.sum()).backward()
        sizes.append(held())
        of_shapes.append(decoder_scan._graph.cache_info().currsize)
    assert of_shapes == [4, 8, 12]  # two loops, there and back
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_a_graph_that_cannot_be_captured_is_said_once_and_the_scan_goes_on(monkeypatch, capsys):
    def capture(self):
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")

    decoder_scan._graph.cache_clear()
    monkeypatch.setattr(decoder_scan._Graph, "_capture", capture)
    monkeypatch.setattr(decoder_scan, "_cannot_capture", False)
    assert_equal(build(), batch_of([17, 9, 5], [23, 41, 1], torch.float64), "graph", 1e-11)
    assert capsys.readouterr().out == (
        "warning: a CUDA graph cannot be captured (operation not permitted when stream is "
        "capturing); going on as decoder=scan\n"
    )
    decoder_scan._graph.cache_clear()


def test_out_of_memory_in_a_capture_is_no_reason_to_go_on(monkeypatch):
    def capture(self):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    decoder_scan._graph.cache_clear()
    monkeypatch.setattr(decoder_scan._Graph, "_capture", capture)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        decoder_scan.lstm(*lstm_inputs(5, 2), None, 1.0, True)
    assert not decoder_scan._cannot_capture


def test_a_graph_is_of_the_precision_that_it_was_captured_in():
    decoder_scan._graph.cache_clear()
    for allowed in (False, True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        decoder_scan.lstm(*lstm_inputs(5, 2), None, 1.0, True)
    assert decoder_scan._graph.cache_info()[:2] == (1, 2)  # hits, misses


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999999])
def test_a_mask_drops_the_share_it_should(p):
    torch.manual_seed(0)
    mask = draw_mask(p, (101, 1000), torch.device("cpu"))
    assert mask.shape == (101, 1000) and mask.dtype is torch.bool
    dropped = 1 - mask.double().mean().item()
    assert abs(dropped - p) <= 5 * (p * (1 - p) / mask.numel()) ** 0.5
    # Neither neighbours nor rows repeat each other.
    if p == 0.5:
        for a, b in ((mask[:, :-1], mask[:, 1:]), (mask[:, ::2], mask[:, 1::2])):
            assert abs((a == b).double().mean().item() - 0.5) < 0.01
