import contextlib
import warnings

import pytest
import torch
from conftest import TINY, noise_batch

import model as model_module
from hparams import create_hparams
from loss_function import Tacotron2Loss
from model import Attention, Decoder, Tacotron2

NO_DROPOUT = ",".join(
    f"p_{part}_dropout=0" for part in ("encoder", "prenet", "attention", "decoder", "postnet")
)
DECODERS = ("reference", "scan", "graph")
# The state dict of NVIDIA's published checkpoint.
NVIDIA = {"embedding.weight": (148, 512)}
for room, n, dims in (("encoder", 3, [512] * 4), ("postnet", 5, [80, 512, 512, 512, 512, 80])):
    for i in range(n):
        conv, norm = f"{room}.convolutions.{i}.0.conv", f"{room}.convolutions.{i}.1"
        NVIDIA |= {f"{conv}.weight": (dims[i + 1], dims[i], 5), f"{conv}.bias": (dims[i + 1],)}
        for name in ("weight", "bias", "running_mean", "running_var"):
            NVIDIA[f"{norm}.{name}"] = (dims[i + 1],)
        NVIDIA[f"{norm}.num_batches_tracked"] = ()
for suffix in ("", "_reverse"):
    NVIDIA |= {
        f"encoder.lstm.weight_ih_l0{suffix}": (1024, 512),
        f"encoder.lstm.weight_hh_l0{suffix}": (1024, 256),
        f"encoder.lstm.bias_ih_l0{suffix}": (1024,),
        f"encoder.lstm.bias_hh_l0{suffix}": (1024,),
    }
for cell, size in (("attention_rnn", 768), ("decoder_rnn", 1536)):
    NVIDIA |= {
        f"decoder.{cell}.weight_ih": (4096, size),
        f"decoder.{cell}.weight_hh": (4096, 1024),
        f"decoder.{cell}.bias_ih": (4096,),
        f"decoder.{cell}.bias_hh": (4096,),
    }
NVIDIA |= {
    "decoder.prenet.layers.0.linear_layer.weight": (256, 80),
    "decoder.prenet.layers.1.linear_layer.weight": (256, 256),
    "decoder.attention_layer.query_layer.linear_layer.weight": (128, 1024),
    "decoder.attention_layer.memory_layer.linear_layer.weight": (128, 512),
    "decoder.attention_layer.v.linear_layer.weight": (1, 128),
    "decoder.attention_layer.location_layer.location_conv.conv.weight": (32, 2, 31),
    "decoder.attention_layer.location_layer.location_dense.linear_layer.weight": (128, 32),
    "decoder.linear_projection.linear_layer.weight": (80, 1536),
    "decoder.linear_projection.linear_layer.bias": (80,),
    "decoder.gate_layer.linear_layer.weight": (1, 1536),
    "decoder.gate_layer.linear_layer.bias": (1,),
}


def build(overrides: str = "") -> Tacotron2:
    torch.manual_seed(0)
    base = TINY.partition(",")[2] if "decoder=" in overrides else TINY
    return Tacotron2(create_hparams(base + overrides))


def test_names_shapes_and_size_are_nvidias():
    with torch.device("meta"):
        model = Tacotron2(create_hparams())
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == NVIDIA
    assert sum(parameter.numel() for parameter in model.parameters()) == 28_193_153


def test_output_shapes_and_masks(tiny):
    batch = noise_batch(tiny, [7, 5, 3], [9, 12, 4])
    output = build()(batch)
    assert output.mel.shape == output.mel_postnet.shape == batch.mel.shape == (3, 10, 12)
    assert output.gate.shape == (3, 12) and output.alignment.shape == (3, 12, 7)
    torch.testing.assert_close(output.alignment.sum(2), torch.ones(3, 12))
    for i, (n_chars, n_frames) in enumerate([(7, 9), (5, 12), (3, 4)]):
        assert not output.alignment[i, :, n_chars:].any()
        assert not output.mel[i, :, n_frames:].any()
        assert not output.mel_postnet[i, :, n_frames:].any()
        assert (output.gate[i, n_frames:] == 1e3).all()
        assert output.mel[i, :, :n_frames].all()


def test_without_mask_padding_outputs_beyond_the_end_stay(tiny):
    output = build("mask_padding=False")(noise_batch(tiny, [7, 5], [9, 4]))
    assert output.mel[1, :, 4:].any() and (output.gate[1, 4:] != 1e3).all()


def test_a_frame_depends_on_earlier_frames_only(tiny):
    model = build(NO_DROPOUT).eval()
    batch = noise_batch(tiny, [7, 5], [9, 9])
    changed = batch._replace(mel=batch.mel.clone())
    changed.mel[:, :, 5] += 1
    before, after = model(batch).mel, model(changed).mel
    torch.testing.assert_close(before[:, :, :6], after[:, :, :6])
    assert (before[:, :, 6:] != after[:, :, 6:]).any()


def test_the_first_frame_is_made_from_zeros(tiny):
    model = build(NO_DROPOUT).eval()
    batch = noise_batch(tiny, [7], [3])
    teacher = model(batch).mel[0, :, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        free = model.inference(batch.text).mel[0, :, 0]
    torch.testing.assert_close(teacher, free)


@pytest.mark.parametrize("decoder", DECODERS)
def test_dropout_of_the_carried_states(tiny, decoder):
    """Whole steps are dropped: with p near 1 nothing of the LSTMs is left but the context."""
    overrides = f",p_attention_dropout=0.999999,p_decoder_dropout=0.999999,decoder={decoder}"
    decoder = Tacotron2(create_hparams(TINY.partition(",")[2] + overrides)).decoder
    memory, padding = torch.randn(2, 4, 8), torch.zeros(2, 4, dtype=torch.bool)
    mel, gate, alignment = decoder(memory, torch.randn(2, 10, 6), padding)
    hidden = torch.zeros(2, 6, 10)
    expected, expected_gate = decoder.project(hidden, alignment @ memory)
    torch.testing.assert_close(mel, expected.transpose(1, 2))
    torch.testing.assert_close(gate, expected_gate)


def test_only_the_prenet_is_random_in_validation(tiny):
    batch = noise_batch(tiny, [7, 5], [9, 4])
    model = build().eval()
    assert not torch.equal(model(batch).mel, model(batch).mel)
    model = build("p_prenet_dropout=0").eval()
    assert torch.equal(model(batch).mel, model(batch).mel)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    "name",
    ["postnet.convolutions.0.0.conv.weight", "decoder.attention_rnn.weight_hh", "embedding.weight"],
)
def test_gradients_on_a_padded_batch_are_finite_differences(tiny, name, decoder):
    """The first postnet convolution is where a mask written in place makes them wrong."""
    model, loss_function = build(NO_DROPOUT).double(), Tacotron2Loss()
    model.encoder.implementation = model.decoder.implementation = decoder
    batch = noise_batch(tiny, [7, 5, 3], [9, 12, 4])
    batch = batch._replace(mel=batch.mel.double(), gate=batch.gate.double())
    weight = model.get_parameter(name)
    loss_function(model(batch), batch).total.backward()
    direction = torch.randn_like(weight)
    slope, step = (weight.grad * direction).sum(), 1e-6
    with torch.no_grad():
        losses = []
        for sign in (1, -2):
            weight += sign * step * direction
            losses.append(loss_function(model(batch), batch).total)
    torch.testing.assert_close(slope, (losses[0] - losses[1]) / (2 * step), rtol=1e-5, atol=1e-8)


def test_inference_of_a_batch_is_that_of_each_clip(tiny):
    model = build(NO_DROPOUT + ",max_decoder_steps=20,gate_threshold=0.52").eval()
    # Make the gate open at different times.
    batch = noise_batch(tiny, [9, 6, 4], [5, 5, 5])
    with torch.no_grad():
        model.decoder.gate_layer.linear_layer.weight.mul_(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together = model.inference(batch.text, batch.text_lengths)
        for i, (n_chars, n_frames) in enumerate(
            zip(batch.text_lengths.tolist(), together.mel_lengths.tolist(), strict=True)
        ):
            alone = model.inference(batch.text[i : i + 1, :n_chars])
            assert alone.mel_lengths.item() == n_frames
            assert alone.stopped.item() == together.stopped[i]
            for field in ("mel", "mel_postnet", "gate"):
                ours, theirs = getattr(together, field)[i], getattr(alone, field)[0]
                torch.testing.assert_close(ours[..., :n_frames], theirs)
            torch.testing.assert_close(
                together.alignment[i, :n_frames, :n_chars], alone.alignment[0]
            )
            assert not together.mel_postnet[i, :, n_frames:].any()


def test_a_clip_that_never_stops_is_reported(tiny):
    model = build("max_decoder_steps=7").eval()
    with torch.no_grad():
        model.decoder.gate_layer.linear_layer.bias.fill_(-100)
    with pytest.warns(UserWarning, match="2 of 2 clips did not stop.*=7 frames: 0, 1"):
        output = model.inference(noise_batch(tiny, [5, 3], [1, 1]).text)
    assert not output.stopped.any() and output.mel_lengths.tolist() == [7, 7]
    with torch.no_grad():
        model.decoder.gate_layer.linear_layer.bias.fill_(100)
    output = model.inference(torch.ones(2, 5, dtype=torch.int64))
    assert output.stopped.all() and output.mel_lengths.tolist() == [1, 1]


def test_inference_in_training_mode_is_refused():
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        build().inference(torch.ones(1, 3, dtype=torch.int64))


# A changed model


def doubled_energies(self, query, memory, keys, weights, padding):
    features = self.query_layer(query)[:, None] + self.location_layer(weights) + keys
    energies = 2 * self.v(torch.tanh(features)).squeeze(2)
    weights = torch.softmax(energies.masked_fill(padding, -torch.inf), 1)
    return torch.bmm(weights[:, None], memory).squeeze(1), weights


def without_location(self, query, memory, *others):
    return attention_forward(self, query, memory, others[0], 0 * others[1], others[2])


def without_gradient(self, query, *others):
    context, weights = attention_forward(self, query, *others)
    return context, weights.detach()


def raising(self, query, *others):
    raise KeyError("no such speaker")


def longer_memory(self, query, memory, keys, weights, padding):
    context, weights = attention_forward(self, query, memory, keys, weights, padding)
    return torch.cat((context, context), 1), weights


def other_step(self, frame, state, *others, **masks):
    return decoder_step(self, frame, state._replace(context=0 * state.context), *others, **masks)


attention_forward, decoder_step = Attention.forward, Decoder.step
CHANGES = {
    "energies": (Attention, "forward", doubled_energies, "mel differs by"),
    "location": (Attention, "forward", without_location, " differs by"),
    "gradient": (Attention, "forward", without_gradient, "gradient of"),
    "raises": (Attention, "forward", raising, "raise KeyError: 'no such speaker'"),
    "shapes": (Attention, "forward", longer_memory, "raise RuntimeError: "),
    "step": (Decoder, "step", other_step, "mel differs by"),
}


def few_frames(hparams):
    return noise_batch(hparams, [20, 15], [10, 10])


@pytest.mark.parametrize("decoder", DECODERS)
def test_of_an_unchanged_model_nothing_is_said_and_nothing_is_left(tiny, decoder):
    model = build(f",decoder={decoder},precision=bf16").eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert model.check_fast_path(few_frames(tiny)) == []
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.encoder.implementation == model.decoder.implementation == decoder
    assert not model.training and model.training_dtype is torch.bfloat16


@pytest.mark.parametrize("decoder", ("scan", "graph"))
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_decoder_is_noticed_and_trained(tiny, monkeypatch, decoder, change):
    of, name, function, what = CHANGES[change]
    monkeypatch.setattr(of, name, function)
    model = build(f",decoder={decoder}")
    (note,) = model.check_fast_path(few_frames(tiny))
    assert what in note and "training uses " in note and "\n" not in note
    assert model.decoder.implementation == "reference"
    if "raise" not in what:
        assert note.startswith("Decoder: decoder_scan does not compute what its modules do")
        assert model.encoder.implementation == decoder


@pytest.mark.parametrize("kind", ["GRU", "deeper", "no weights"])
def test_a_changed_encoder_is_noticed_and_trained(tiny, kind):
    class NoWeights(torch.nn.Module):
        def forward(self, packed):
            return packed, None

    model = build(",decoder=scan")
    model.encoder.lstm = {
        "GRU": lambda: torch.nn.GRU(8, 4, batch_first=True, bidirectional=True),
        "deeper": lambda: torch.nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True),
        "no weights": NoWeights,
    }[kind]()
    (note,) = model.check_fast_path(few_frames(tiny))
    assert note.startswith("Encoder: decoder_scan does not compute what its modules do")
    assert (model.encoder.implementation, model.decoder.implementation) == ("reference", "scan")
    output = model(few_frames(tiny))
    output.mel.sum().backward()


def test_inference_calls_the_encoders_lstm(tiny, monkeypatch):
    model = build(",decoder=scan,max_decoder_steps=2").eval()
    called = []
    model.encoder.lstm.register_forward_hook(lambda *args: called.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.inference(torch.ones(1, 5, dtype=torch.int64))
    assert called


@pytest.mark.parametrize("decoder", ("reference", "scan"))
def test_no_step_waits_for_a_length_to_come_from_the_device(tiny, decoder, monkeypatch):
    """On the device "meta" no number can come back; the fast encoder is of CPUs alone."""
    monkeypatch.setattr(model_module, "_autocast", lambda *args: contextlib.nullcontext())
    model = build(f",decoder={decoder}").to("meta")
    model.encoder.implementation = "reference"
    batch = noise_batch(tiny, [7, 5, 3], [9, 12, 4]).to(torch.device("meta"))
    assert batch.text_lengths.is_meta and not batch.cpu_text_lengths.is_meta
    Tacotron2Loss()(model(batch), batch).objective.backward()
