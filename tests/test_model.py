import contextlib
import re
import warnings
from itertools import pairwise

import pytest
import torch
from conftest import TINY, noise_batch
from torch import nn
from torch.testing import assert_close

import model as model_module
from hparams import create_hparams
from loss_function import Tacotron2Loss
from model import Tacotron2

NO_DROPOUT = ",".join(
    f"p_{part}_dropout=0" for part in ("encoder", "prenet", "attention", "decoder", "postnet")
)
DECODERS = ("reference", "scan", "graph")


def build(overrides: str = "") -> Tacotron2:
    torch.manual_seed(0)
    base = TINY.partition(",")[2] if "decoder=" in overrides else TINY
    return Tacotron2(create_hparams(base + overrides))


def infer(model: Tacotron2, *args):
    """``model.inference`` of a model that may not stop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.inference(*args)


def nvidias_state_dict() -> dict[str, tuple[int, ...]]:
    """Names and shapes in NVIDIA's published checkpoint."""
    shapes = {"embedding.weight": (148, 512)}
    for part, dims in (("encoder", [512] * 4), ("postnet", [80, 512, 512, 512, 512, 80])):
        for i, (inputs, outputs) in enumerate(pairwise(dims)):
            conv, norm = f"{part}.convolutions.{i}.0.conv", f"{part}.convolutions.{i}.1"
            shapes |= {f"{conv}.weight": (outputs, inputs, 5), f"{conv}.bias": (outputs,)}
            for name in ("weight", "bias", "running_mean", "running_var"):
                shapes[f"{norm}.{name}"] = (outputs,)
            shapes[f"{norm}.num_batches_tracked"] = ()
    for lstm, suffix, inputs, units in (
        ("encoder.lstm", "_l0", 512, 256),
        ("encoder.lstm", "_l0_reverse", 512, 256),
        ("decoder.attention_rnn", "", 768, 1024),
        ("decoder.decoder_rnn", "", 1536, 1024),
    ):
        shapes[f"{lstm}.weight_ih{suffix}"] = (4 * units, inputs)
        shapes[f"{lstm}.weight_hh{suffix}"] = (4 * units, units)
        shapes[f"{lstm}.bias_ih{suffix}"] = shapes[f"{lstm}.bias_hh{suffix}"] = (4 * units,)
    attention = "decoder.attention_layer"
    return shapes | {
        "decoder.prenet.layers.0.linear_layer.weight": (256, 80),
        "decoder.prenet.layers.1.linear_layer.weight": (256, 256),
        f"{attention}.query_layer.linear_layer.weight": (128, 1024),
        f"{attention}.memory_layer.linear_layer.weight": (128, 512),
        f"{attention}.v.linear_layer.weight": (1, 128),
        f"{attention}.location_layer.location_conv.conv.weight": (32, 2, 31),
        f"{attention}.location_layer.location_dense.linear_layer.weight": (128, 32),
        "decoder.linear_projection.linear_layer.weight": (80, 1536),
        "decoder.linear_projection.linear_layer.bias": (80,),
        "decoder.gate_layer.linear_layer.weight": (1, 1536),
        "decoder.gate_layer.linear_layer.bias": (1,),
    }


def test_names_shapes_and_size_are_nvidias():
    with torch.device("meta"):
        model = Tacotron2(create_hparams())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == nvidias_state_dict()
    assert sum(parameter.numel() for parameter in model.parameters()) == 28_193_153


# Teacher forcing


def test_output_shapes_and_masks(tiny):
    batch = noise_batch(tiny, [7, 5, 3], [9, 12, 4])
    output, unmasked = build()(batch), build("mask_padding=False")(batch)
    assert output.mel.shape == output.mel_postnet.shape == batch.mel.shape == (3, 10, 12)
    assert output.gate.shape == (3, 12) and output.alignment.shape == (3, 12, 7)
    assert_close(output.alignment.sum(2), torch.ones(3, 12))
    for i, (n_chars, n_frames) in enumerate([(7, 9), (5, 12), (3, 4)]):
        assert not output.alignment[i, :, n_chars:].any()
        assert not output.mel[i, :, n_frames:].any()
        assert not output.mel_postnet[i, :, n_frames:].any()
        assert (output.gate[i, n_frames:] == 1e3).all()
        assert output.mel[i, :, :n_frames].all()
        assert unmasked.mel[i].all() and (unmasked.gate[i] != 1e3).all()


def test_a_frame_depends_on_earlier_frames_only_and_the_first_on_zeros(tiny):
    model = build(NO_DROPOUT).eval()
    batch = noise_batch(tiny, [7, 5], [9, 9])
    changed = batch._replace(mel=batch.mel.clone())
    changed.mel[:, :, 5] += 1
    before, after = model(batch).mel, model(changed).mel
    assert_close(before[:, :, :6], after[:, :, :6])
    assert (before[:, :, 6:] != after[:, :, 6:]).any()
    assert_close(before[0, :, 0], infer(model, batch.text[:1]).mel[0, :, 0])


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_decoders_dropout_is_of_the_carried_states(decoder):
    """Whole steps are dropped: with p near 1 nothing of the LSTMs is left but the context."""
    rates = "p_attention_dropout=0.999999,p_decoder_dropout=0.999999"
    decoder = build(f"{rates},decoder={decoder}").decoder
    memory, padding = torch.randn(2, 4, 8), torch.zeros(2, 4, dtype=torch.bool)
    mel, gate, alignment = decoder(memory, torch.randn(2, 10, 6), padding)
    expected, expected_gate = decoder.project(torch.zeros(2, 6, 10), alignment @ memory)
    assert_close(mel, expected.transpose(1, 2))
    assert_close(gate, expected_gate)


def test_only_the_prenet_is_random_in_validation(tiny):
    batch = noise_batch(tiny, [7, 5], [9, 4])
    for overrides, same in (("", False), ("p_prenet_dropout=0", True)):
        model = build(overrides).eval()
        assert torch.equal(model(batch).mel, model(batch).mel) == same


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    "name",
    ["postnet.convolutions.0.0.conv.weight", "decoder.attention_rnn.weight_hh", "embedding.weight"],
)
def test_gradients_on_a_padded_batch_are_finite_differences(tiny, name, decoder):
    """The first postnet convolution is where a mask written in place makes them wrong."""
    model, loss_function = build(f"{NO_DROPOUT},decoder={decoder}").double(), Tacotron2Loss()
    batch = noise_batch(tiny, [7, 5, 3], [9, 12, 4])
    batch = batch._replace(mel=batch.mel.double(), gate=batch.gate.double())
    weight = model.get_parameter(name)
    loss_function(model(batch), batch).total.backward()
    direction = torch.randn_like(weight)
    slope, step = (weight.grad * direction).sum(), 1e-6
    losses = []
    with torch.no_grad():
        for sign in (1, -2):
            weight += sign * step * direction
            losses.append(loss_function(model(batch), batch).total)
    assert_close(slope, (losses[0] - losses[1]) / (2 * step), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("decoder", ("reference", "scan"))
def test_no_step_waits_for_a_length_to_come_from_the_device(tiny, decoder, monkeypatch):
    """No number can come back from the device "meta"."""
    monkeypatch.setattr(model_module, "_autocast", lambda *args: contextlib.nullcontext())
    model = build(f"decoder={decoder}").to("meta")
    model.encoder.implementation = "reference"  # the fast one is for CPUs
    batch = noise_batch(tiny, [7, 5, 3], [9, 12, 4]).to(torch.device("meta"))
    assert batch.text_lengths.is_meta and not batch.cpu_text_lengths.is_meta
    Tacotron2Loss()(model(batch), batch).objective.backward()


# Inference


def test_inference_of_a_batch_is_that_of_each_clip(tiny):
    model = build(NO_DROPOUT + ",max_decoder_steps=20,gate_threshold=0.52").eval()
    batch = noise_batch(tiny, [9, 6, 4], [5, 5, 5])
    with torch.no_grad():  # so that the gates open at different times
        model.decoder.gate_layer.linear_layer.weight.mul_(4)
    together = infer(model, batch.text, batch.text_lengths)
    lengths = zip(batch.text_lengths.tolist(), together.mel_lengths.tolist(), strict=True)
    for i, (n_chars, n_frames) in enumerate(lengths):
        alone = infer(model, batch.text[i : i + 1, :n_chars])
        assert alone.mel_lengths.item() == n_frames
        assert alone.stopped.item() == together.stopped[i]
        for field in ("mel", "mel_postnet", "gate"):
            ours, theirs = getattr(together, field)[i], getattr(alone, field)[0]
            assert_close(ours[..., :n_frames], theirs)
        assert_close(together.alignment[i, :n_frames, :n_chars], alone.alignment[0])
        assert not together.mel_postnet[i, :, n_frames:].any()


def test_a_clip_that_never_stops_is_reported():
    model, text = build("max_decoder_steps=7").eval(), torch.ones(2, 5, dtype=torch.int64)
    gate_bias = model.decoder.gate_layer.linear_layer.bias
    nn.init.constant_(gate_bias, -100)
    with pytest.warns(UserWarning, match="2 of 2 clips did not stop.*=7 frames: 0, 1"):
        output = model.inference(text)
    assert not output.stopped.any() and output.mel_lengths.tolist() == [7, 7]
    nn.init.constant_(gate_bias, 100)
    output = model.inference(text)
    assert output.stopped.all() and output.mel_lengths.tolist() == [1, 1]


def test_inference_calls_the_encoders_lstm_and_wants_eval_mode():
    model, text = build("decoder=scan,max_decoder_steps=2"), torch.ones(1, 5, dtype=torch.int64)
    calls = []
    model.encoder.lstm.register_forward_hook(lambda *args: calls.append(args))
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        model.inference(text)
    infer(model.eval(), text)
    assert calls


# A changed model


def hook(path: str, change):
    """Change what a module returns."""

    def change_model(model: Tacotron2) -> None:
        module = model.get_submodule(path)
        module.register_forward_hook(lambda module, args, output: change(output))

    return change_model


def replace_lstm(lstm: nn.Module):
    return lambda model: setattr(model.encoder, "lstm", lstm)


def change_step(model: Tacotron2) -> None:
    step = model.decoder.step
    model.decoder.step = lambda frame, state, *others: step(
        frame, state._replace(context=0 * state.context), *others
    )


class NoWeights(nn.Module):
    def forward(self, packed):
        return packed, None


ATTENTION, SPEAKERS = "decoder.attention_layer", {}
CHANGES = {  # what to do to a model, and the note expected
    "energies": (hook(f"{ATTENTION}.v", lambda x: 2 * x), "Decoder: .*mel differs by"),
    "location": (hook(f"{ATTENTION}.location_layer", lambda x: 0 * x), "Decoder: .* differs by"),
    "gradient": (hook(ATTENTION, lambda x: (x[0], x[1].detach())), "Decoder: .*gradient of"),
    "step": (change_step, "Decoder: .*mel differs by"),
    "raises": (hook(ATTENTION, lambda x: SPEAKERS["nobody"]), "modules raise KeyError: 'nobody'"),
    "shapes": (hook(ATTENTION, lambda x: (x[0].repeat(1, 2), x[1])), "modules raise RuntimeError"),
    "GRU": (replace_lstm(nn.GRU(8, 4, batch_first=True, bidirectional=True)), "Encoder: "),
    "deeper": (replace_lstm(nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True)), "Encoder: "),
    "no weights": (replace_lstm(NoWeights()), "Encoder: "),
}


@pytest.fixture
def few_frames(tiny):
    return noise_batch(tiny, [20, 15], [10, 10])


@pytest.mark.parametrize("decoder", DECODERS)
def test_an_unchanged_model_passes_the_check_and_stays_as_it_was(few_frames, decoder):
    model = build(f"decoder={decoder},precision=bf16").eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert model.check_fast_path(few_frames) == []
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.encoder.implementation == model.decoder.implementation == decoder
    assert not model.training and model.training_dtype is torch.bfloat16


@pytest.mark.parametrize("decoder", ("scan", "graph"))
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_is_noticed_and_used(few_frames, decoder, change):
    model = build(f"decoder={decoder}")
    change_model, expected = CHANGES[change]
    change_model(model)
    (note,) = model.check_fast_path(few_frames)
    assert re.search(expected, note) and "training uses " in note and "\n" not in note

    assert model.encoder.implementation == (decoder if "Decoder: " in note else "reference")
    assert model.decoder.implementation == (decoder if "Encoder: " in note else "reference")
    if "raise" not in note:
        model(few_frames).mel.sum().backward()
