import contextlib
import re
from unittest.mock import Mock

import pytest
import torch
from conftest import NO_DROPOUT, build, noise_batch, set_gate
from torch.autograd import gradcheck
from torch.func import functional_call
from torch.testing import assert_close

import model as model_module
from decoder import check_fast_path
from hparams import HParams
from layers import draw_mask
from loss_function import Tacotron2Loss

DECODERS = ("reference", "scan", "auto")


# Teacher forcing


def test_outputs_have_the_batchs_shapes_and_padding_is_masked(batch):
    output, unmasked = build()(batch), build(mask_padding=False)(batch)
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


def test_a_frame_depends_on_earlier_frames_only_and_the_first_on_zeros():
    model = build(**NO_DROPOUT).eval()
    batch = noise_batch([7, 5], [9, 9])
    changed = batch._replace(mel=batch.mel.clone())
    changed.mel[:, :, 5] += 1
    before, after = model(batch).mel, model(changed).mel
    assert_close(before[:, :, :6], after[:, :, :6])
    assert (before[:, :, 6:] != after[:, :, 6:]).any()
    assert_close(before[0, :, 0], model.inference(batch.text[:1]).mel[0, :, 0])


def test_three_frames_a_step_are_one_frame_of_three_times_the_bands():
    """Such a decoder has the same weights. So has inference."""
    never = {"end_steps": 1, "end_threshold": 0.9999, "max_decoder_steps": 4}
    several = build(**NO_DROPOUT, **never, n_frames_per_step=3)
    single = build(**NO_DROPOUT, **never, n_mel_channels=30)
    single.decoder.load_state_dict(several.decoder.state_dict())  # with their shapes
    batch = noise_batch([7, 5, 3], [9, 12, 4], 3)
    memory, padding = torch.randn(3, 7, 8), torch.zeros(3, 7, dtype=torch.bool)

    def by_step(mel):  # (B, 10, 12) -> (B, 30, 4)
        return mel.unflatten(2, (4, 3)).permute(0, 3, 1, 2).flatten(1, 2)

    trained = several.decoder(memory, batch.mel, padding)
    spoken = several.decoder.generate(memory, padding, several.hparams)[:3]
    single_trained = single.decoder(memory, by_step(batch.mel), padding)
    single_spoken = single.decoder.generate(memory, padding, single.hparams)
    for ours, expected in ((trained, single_trained), (spoken, single_spoken)):
        mel, gate, alignment = ours
        assert_close((by_step(mel), gate), expected[:2])
        assert_close(alignment, expected[2].repeat_interleave(3, 1))

    output = several(batch)
    assert (output.gate == 1e3).tolist() == [[False] * 3 + [True], [False] * 4, [0, 0, 1, 1]]
    for i, n_frames in enumerate((9, 12, 4)):
        assert output.mel[i, :, :n_frames].all() and not output.mel_postnet[i, :, n_frames:].any()
    for logit, n_frames in ((-100, 12), (100, 3)):
        spoken = set_gate(several, logit).eval().inference(batch.text, batch.text_lengths)
        assert spoken.mel_lengths.tolist() == [n_frames] * 3
        assert spoken.mel.shape == (3, 10, n_frames)


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_decoders_dropout_is_of_the_carried_states(decoder):
    """Whole steps are dropped: with p near 1 nothing of the LSTMs is left but the context."""
    rates = {"p_attention_dropout": 0.999999, "p_decoder_dropout": 0.999999}
    decoder = build(**rates, decoder=decoder).decoder
    memory, padding = torch.randn(2, 4, 8), torch.zeros(2, 4, dtype=torch.bool)
    mel, gate, alignment = decoder(memory, torch.randn(2, 10, 6), padding)
    expected, expected_gate = decoder.project(torch.zeros(2, 6, 10), alignment @ memory)
    assert_close(mel, expected.transpose(1, 2))
    assert_close(gate, expected_gate)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999999])
def test_a_mask_drops_the_share_it_should(p):
    mask = draw_mask(p, (101, 1000), torch.device("cpu"))
    assert mask.shape == (101, 1000) and mask.dtype is torch.bool
    dropped = 1 - mask.double().mean().item()
    assert abs(dropped - p) <= 5 * (p * (1 - p) / mask.numel()) ** 0.5
    for step in (1, 2):  # units that share a random number, and those that do not
        same = (mask[:, :-1:step] == mask[:, 1::step]).double().mean().item()
        assert abs(same - p**2 - (1 - p) ** 2) < 0.01


def test_only_the_prenet_is_random_in_validation(batch):
    for changes, same in (({}, False), ({"p_prenet_dropout": 0.0}, True)):
        model = build(**changes).eval()
        assert torch.equal(model(batch).mel, model(batch).mel) == same


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    "name",
    ["postnet.convolutions.0.0.conv.weight", "decoder.attention_rnn.weight_hh", "embedding.weight"],
)
def test_gradients_on_a_padded_batch_are_finite_differences(batch, name, decoder):
    """The first postnet convolution is where a mask written in place makes them wrong."""
    model = build(**NO_DROPOUT, decoder=decoder).double()
    batch = batch._replace(mel=batch.mel.double(), gate=batch.gate.double())

    def loss(weight):
        return Tacotron2Loss()(functional_call(model, {name: weight}, (batch,)), batch).total

    weight = model.get_parameter(name).detach().requires_grad_()
    assert gradcheck(loss, weight, rtol=1e-5, atol=1e-8, fast_mode=True)


@pytest.mark.parametrize("decoder", ("reference", "scan"))
def test_every_tensor_is_on_the_models_device_and_none_comes_back(batch, decoder, monkeypatch):
    """As on a GPU, where a step would wait for it. No number can come back from the device
    "meta"."""
    monkeypatch.setattr(model_module, "_autocast", lambda *args: contextlib.nullcontext())
    model, batch = build(decoder=decoder).to("meta"), batch.to(torch.device("meta"))
    assert batch.text_lengths.is_meta and not batch.cpu_text_lengths.is_meta
    Tacotron2Loss(guided_attention_weight=1.0)(model(batch), batch).objective.backward()


# Inference


def test_inference_of_a_batch_is_that_of_each_clip():
    model = build(**NO_DROPOUT, max_decoder_steps=20).eval()
    batch = noise_batch([9, 6, 4], [5, 5, 5])
    with torch.no_grad():  # so that one gate opens after another, and the last never
        model.decoder.gate_layer.linear_layer.weight.mul_(-16)
        model.decoder.gate_layer.linear_layer.bias.fill_(-8)
    together = model.inference(batch.text, batch.text_lengths)
    assert together.mel_lengths.tolist() == [15, 19, 20]
    lengths = zip(batch.text_lengths.tolist(), together.mel_lengths.tolist(), strict=True)
    for i, (n_chars, n_frames) in enumerate(lengths):
        alone = model.inference(batch.text[i : i + 1, :n_chars])
        assert alone.mel_lengths.item() == n_frames
        assert alone.stopped.item() == together.stopped[i]
        for ours, mel in ((together.mel, alone.mel), (together.mel_postnet, alone.mel_postnet)):
            assert_close(ours[i, :, :n_frames], mel[0])
        assert_close(together.gate[i, :n_frames], alone.gate[0])
        assert_close(together.alignment[i, :n_frames, :n_chars], alone.alignment[0])
        assert not together.mel_postnet[i, :, n_frames:].any()


def test_speech_is_the_mean_of_several_readings(monkeypatch):
    model = set_gate(build(max_decoder_steps=8), -100).eval()
    text = noise_batch([7], [8]).text

    def deviation(n_readings):  # of the frames, from one draw of the prenet's dropout to another
        monkeypatch.setattr("model.N_READINGS", n_readings)
        return torch.stack([model.inference(text).mel for _ in range(20)]).std(0).mean()

    assert deviation(16) < deviation(1) / 2  # a quarter of it


def test_a_clip_has_ended_unless_it_goes_on_in_each_of_the_last_steps():
    """With one step, this is NVIDIA's rule. A little doubt in every step of a long clip ends none,
    and a clip that has ended does not go on."""
    late = [0.45, 0.0, 0.2, 0.9, 0.0, 0.0, 0.0, 0.0, 1.0]
    p = torch.tensor([[0.1] * 9, [0.3] * 9, late, [0.0] * 9])
    for n, expected in ((1, [9, 9, 3, 9]), (3, [9, 1, 2, 9]), (40, [6, 1, 2, 9])):
        ended = model_module.has_ended(torch.logit(p, eps=1e-7), HParams(end_steps=n))
        assert (~ended).sum(1).tolist() == expected
        doubt = torch.logit(torch.full((1, 2000), 0.01))
        doubt[0, 1000] = 5
        ended = model_module.has_ended(doubt, HParams(end_steps=n))
        assert ended[0].tolist() == [False] * 1000 + [True] * 1000


def test_a_clip_ends_once_attention_has_stayed_on_its_last_symbol():
    """For half a second without a break, that is 22 steps of two frames."""
    hparams = HParams(sampling_rate=22_050, hop_length=256, n_frames_per_step=2)
    weights = torch.full((3, 60, 3), 0.2)
    weights[0, 10:, 2] = weights[1, 10:30, 1] = weights[1, 31:, 1] = weights[2, :, 1] = 0.6
    lingered = model_module.has_lingered(weights, torch.tensor([2, 1, 2]), hparams)
    assert (~lingered).sum(1).tolist() == [10 + 21, 31 + 21, 60]


# A changed model


@pytest.mark.parametrize("decoder", DECODERS)
def test_an_unchanged_model_passes_the_check_and_stays_as_it_was(batch, decoder):
    model = build(decoder=decoder, precision="bf16").eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert check_fast_path(model, batch) is None
    assert torch.equal(torch.get_rng_state(), random)
    assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.decoder.implementation == decoder.replace("auto", "scan")
    assert not model.training and model.training_dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (lambda _module, _args, x: (x[0], x[1].detach()), "decoder's modules .*gradient of"),
        (Mock(side_effect=KeyError("nobody")), "modules raise KeyError: 'nobody'"),
    ],
)
def test_a_changed_module_is_noticed_and_used(batch, hook, expected):
    model = build(decoder="scan")
    model.decoder.attention_layer.register_forward_hook(hook)
    note = check_fast_path(model, batch)
    assert re.search(expected, note) and "\n" not in note
    assert model.decoder.implementation == "reference"
    if "raise" not in note:
        model(batch).mel.sum().backward()
