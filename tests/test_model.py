import contextlib
import copy

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


def test_a_frame_depends_on_earlier_frames_only():
    model = build(**NO_DROPOUT).eval()
    batch = noise_batch([7, 5], [9, 9])
    changed = batch._replace(mel=batch.mel.clone())
    changed.mel[:, :, 5] += 1
    before, after = model(batch).mel, model(changed).mel
    assert_close(before[:, :, :6], after[:, :, :6])
    assert (before[:, :, 6:] != after[:, :, 6:]).any()


def test_three_frames_a_step_are_one_frame_of_three_times_the_bands():
    """Such a decoder has the same weights."""
    several = build(**NO_DROPOUT, n_frames_per_step=3).decoder
    single = build(**NO_DROPOUT, n_mel_channels=30).decoder
    single.load_state_dict(several.state_dict())  # with their shapes
    mel, memory = torch.randn(3, 10, 12), torch.randn(3, 7, 8)
    padding = torch.zeros(3, 7, dtype=torch.bool)

    def by_step(mel):  # (B, 10, 12) -> (B, 30, 4)
        return mel.unflatten(2, (4, 3)).permute(0, 3, 1, 2).flatten(1, 2)

    expected = single(memory, by_step(mel), padding)
    mel, gate, alignment = several(memory, mel, padding)
    assert_close((by_step(mel), gate), expected[:2])
    assert_close(alignment, expected[2].repeat_interleave(3, 1))


@pytest.mark.parametrize("decoder", ["reference", "scan"])
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
    dropped = 1 - mask.double().mean().item()
    assert abs(dropped - p) <= 5 * (p * (1 - p) / mask.numel()) ** 0.5
    for step in (1, 2):  # units that share a random number, and those that do not
        same = (mask[:, :-1:step] == mask[:, 1::step]).double().mean().item()
        assert abs(same - p**2 - (1 - p) ** 2) < 0.01


def test_only_the_prenet_is_random_in_validation(batch):
    for changes, same in (({}, False), ({"p_prenet_dropout": 0.0}, True)):
        model = build(**changes).eval()
        assert torch.equal(model(batch).mel, model(batch).mel) == same


@pytest.mark.parametrize("decoder", ["reference", "scan"])
def test_gradients_on_a_padded_batch_are_finite_differences(batch, decoder):
    """The first postnet convolution is where a mask written in place makes them wrong."""
    model = build(**NO_DROPOUT, decoder=decoder).double()
    batch = batch._replace(mel=batch.mel.double(), gate=batch.gate.double())
    name = "postnet.convolutions.0.0.conv.weight"

    def loss(weight):
        return Tacotron2Loss()(functional_call(model, {name: weight}, (batch,)), batch).total

    weight = model.get_parameter(name).detach().requires_grad_()
    assert gradcheck(loss, weight, rtol=1e-5, atol=1e-8, fast_mode=True)


@pytest.mark.parametrize("decoder", ["reference", "scan"])
def test_every_tensor_is_on_the_models_device_and_none_comes_back(batch, decoder, monkeypatch):
    """As on a GPU, where a step would wait for it. No number can come back from the device
    "meta"."""
    monkeypatch.setattr(model_module, "_autocast", lambda *args: contextlib.nullcontext())
    model, batch = build(decoder=decoder).to("meta"), batch.to(torch.device("meta"))
    assert batch.text_lengths.is_meta and not batch.cpu_text_lengths.is_meta
    Tacotron2Loss(guided_attention_weight=1.0)(model(batch), batch).objective.backward()


# Inference


@pytest.mark.parametrize("n_frames_per_step", [1, 3])
def test_speech_is_what_is_predicted_from_its_own_frames(n_frames_per_step):
    changes = {"n_frames_per_step": n_frames_per_step, "max_decoder_steps": 4}
    model = set_gate(build(**NO_DROPOUT, **changes), -100).eval()
    batch = noise_batch([7], [4 * n_frames_per_step], n_frames_per_step)
    spoken = model.inference(batch.text)
    predicted = model(batch._replace(mel=spoken.mel))
    assert_close(tuple(predicted), tuple(spoken)[:4])


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
        assert_close(together.mel_postnet[i, :, :n_frames], alone.mel_postnet[0])
        assert_close(together.alignment[i, :n_frames, :n_chars], alone.alignment[0])
        assert not together.mel_postnet[i, :, n_frames:].any()


def test_speech_is_the_mean_of_several_readings(monkeypatch):
    model, deviations = set_gate(build(max_decoder_steps=8), -100).eval(), []
    for n_readings in (1, 16):
        monkeypatch.setattr("model.N_READINGS", n_readings)
        mels = model.inference(noise_batch([7], [8]).text.repeat(20, 1)).mel
        deviations.append(mels.std(0).mean())
    assert deviations[1] < deviations[0] / 2  # a quarter of it


def test_a_clip_has_ended_unless_it_goes_on_in_each_of_the_last_steps():
    """With one step, this is NVIDIA's rule. A little doubt in every step of a long clip ends none,
    and a clip that has ended does not go on."""
    late = [0.45, 0.0, 0.2, 0.9, 0.0, 0.0, 0.0, 0.0, 1.0]
    p = torch.tensor([[0.1] * 9, [0.3] * 9, late, [0.0] * 9])
    for n, expected in ((1, [9, 9, 3, 9]), (3, [9, 1, 2, 9]), (40, [6, 1, 2, 9])):
        ended = model_module.has_ended(torch.logit(p, eps=1e-7), HParams(end_steps=n))
        assert (~ended).sum(1).tolist() == expected


def test_a_clip_ends_once_attention_has_stayed_on_its_last_symbol():
    """For half a second without a break, that is 22 steps of two frames."""
    hparams = HParams(sampling_rate=22_050, hop_length=256, n_frames_per_step=2)
    weights = torch.full((3, 60, 3), 0.2)
    weights[0, 10:, 2] = weights[1, 10:30, 1] = weights[1, 31:, 1] = weights[2, :, 1] = 0.6
    lingered = model_module.has_lingered(weights, torch.tensor([2, 1, 2]), hparams)
    assert (~lingered).sum(1).tolist() == [10 + 21, 31 + 21, 60]


# A changed model


@pytest.mark.parametrize("decoder", ["reference", "scan", "auto"])
def test_an_unchanged_model_passes_the_check_and_stays_as_it_was(batch, decoder):
    model = build(decoder=decoder, precision="bf16")
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    assert check_fast_path(model, batch) is None
    assert torch.equal(torch.get_rng_state(), random)
    assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    assert model.decoder.implementation == decoder.replace("auto", "scan")
    assert model.training and model.training_dtype is torch.bfloat16


def test_a_module_whose_gradient_is_changed_is_noticed_and_used(batch):
    model = build(decoder="scan")
    hook = lambda module, inputs, outputs: (outputs[0], outputs[1].detach())  # noqa: E731
    model.decoder.attention_layer.register_forward_hook(hook)
    assert "scan differs from the decoder's modules (gradient of" in check_fast_path(model, batch)
    assert model.decoder.implementation == "reference"
