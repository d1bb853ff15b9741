"""train.py as a user runs it, on tones."""

import json
import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from conftest import contents, records
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from cli import UserError
from corpus.clips import load_clips
from data_utils import MelDataset, open_mels
from hparams import create_hparams
from loss_function import Tacotron2Loss
from model import Attention, Tacotron2
from training import logger
from training.checkpoint import find_checkpoints, load_checkpoint, load_newest
from training.device import choose_device, device_name
from training.validation import validate


def column(output: Path, event: str, name: str) -> list[float]:
    """Returns a scalar of all records of an event."""
    return [record[name] for record in records(output, event)]


def losses(output: Path) -> list[float]:
    return column(output, "step", "loss")


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_newest(output)[1]["state_dict"]


def test_two_epochs_leave_all_that_a_user_expects(tmp_path, settings, run, monkeypatch, capsys):
    monkeypatch.undo()  # pictures and sound are real here
    settings += "epochs_per_validation=1,guided_attention_weight=1,"
    options = "--resume", "--log_directory", str(tmp_path / "logs")
    for epochs in (1, 2):
        assert run("run", settings + f"epochs={epochs}", *options) == 0
    output, printed = tmp_path / "run", capsys.readouterr().out
    before = contents(output)
    assert run("run", settings + "epochs=2", *options) == 0
    assert capsys.readouterr().out.endswith(".pt: 2 epochs of 2 done\n")
    assert contents(output) == before
    assert "note" not in printed and "8 training and 4 validation clips" in printed
    assert "epoch 2: training loss" in printed and "epoch 2: validation loss" in printed

    start, _ = records(output, "start")
    assert start["device"] == device_name(choose_device(create_hparams()))
    assert start["decoder"] == create_hparams(settings).decoder
    assert start["validation_frames"] == 98 < start["training_frames"]
    step = records(output, "step")[-1]
    (epoch, _), (_, validation) = (records(output, event) for event in ("epoch", "validation"))
    assert column(output, "epoch", "epoch") == column(output, "validation", "epoch") == [0, 1]
    n_steps = len(records(output, "step"))
    assert sum(column(output, "epoch", "n_batches")) == n_steps == step["step"]
    for record, names in (
        (step, "loss grad_norm learning_rate guided_attention_loss duration"),
        (epoch, "minutes zpr abl total_length frames_per_second peak_memory_gib"),
        (validation, "diagonality focus"),
    ):
        assert all(record[name] > 0 for name in names.split())
    parts = [validation[f"{name}_loss"] for name in ("mel", "mel_postnet", "gate")]
    assert validation["loss"] == pytest.approx(sum(parts), rel=1e-6)
    assert validation["diagonality"] <= 1 and validation["focus"] <= 1
    assert 0 <= epoch["data_wait"] < 1

    assert json.loads((output / "hparams.json").read_text())["batch_size"] == 3
    assert {f"checkpoint_{n_steps:08d}.pt", "checkpoint_best.pt"} <= {path.name for path in before}
    names = {path.stem for path in (output / "sample").iterdir()}
    assert names == {"alignment", "mel", "gate", "predicted", "target"}
    for path in (output / "sample").glob("*.png"):
        assert len(np.unique(imread(path))) > 10  # colours
    curves = EventAccumulator(str(tmp_path / "logs")).Reload()
    tags = curves.Tags()
    assert {"training/loss", "epoch/minutes", "validation/masked_loss"} <= set(tags["scalars"])
    assert [scalar.step for scalar in curves.Scalars("validation/loss")] == [1, 2]
    for clip in ("sample", "longest"):  # always the same two
        assert {f"{clip}/alignment", f"{clip}/mel", f"{clip}/gate"} <= set(tags["images"])
        predicted, target = (curves.Audio(f"{clip}/{kind}") for kind in ("predicted", "target"))
        assert [sound.step for sound in predicted] == [n_steps // 2, n_steps]
        assert [sound.step for sound in target] == [0]  # once in both starts
        assert len(curves.Tensors(f"{clip}/text/text_summary")) == 1
    for chart in chain(*(charts.values() for charts in logger.CHARTS.values())):
        assert all(any(re.match(tag, name) for name in tags["scalars"]) for tag in chart)


def test_validation_losses_are_means_over_what_each_averages(settings):
    """They are the same for one batch of all clips and for one batch per clip."""
    hparams = create_hparams(settings + "p_prenet_dropout=0")
    clips = load_clips(hparams.validation_files, hparams)
    torch.manual_seed(0)
    model, loss_function = Tacotron2(hparams).eval(), Tacotron2Loss()
    dataset = MelDataset(clips, open_mels(clips, hparams))
    means = {}
    for batches in ([[0, 1, 2, 3]], [[3, 1], [0, 2]], [[0], [1], [2], [3]]):
        means[len(batches)], samples = validate(model, dataset, batches, loss_function)
        sample = samples["sample"]
        (i,) = (i for i in batches[0] if clips[i].text == sample.text)
        assert sample.mel.shape == (10, clips[i].n_frames)
        assert sample.alignment.shape == (clips[i].n_frames, len(clips[i].ids))
        torch.testing.assert_close(sample.mel, dataset[i].mel.T)
    for few, many in ((1, 2), (2, 4)):
        for name in ("masked_loss", "diagonality", "focus"):
            # Nearly: convolutions see how far a text is padded, as in NVIDIA's code.
            assert means[few][name] == pytest.approx(means[many][name], rel=1e-3)
    # NVIDIA's loss equals the masked one without padding, and differs with it.
    assert means[4]["loss"] == pytest.approx(means[4]["masked_loss"], rel=1e-5)
    assert means[1]["loss"] != pytest.approx(means[1]["masked_loss"], rel=1e-2)


def test_a_precision_is_for_training_and_validation_is_in_fp32(
    tmp_path, settings, run, monkeypatch
):
    def convolve(self, x):
        y = real_convolve(self, x)
        seen.add((self.training, y.dtype, *(backend.allow_tf32 for backend in backends)))
        return y

    seen, real_convolve, device = set(), torch.nn.Conv1d.forward, choose_device(create_hparams())
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    monkeypatch.setattr(train, "choose_device", lambda _: device)
    for backend in backends:  # as choose_device does for precision=tf32, which needs a GPU
        backend.allow_tf32 = True
    monkeypatch.setattr(torch.nn.Conv1d, "forward", convolve)
    monkeypatch.setattr(train, "check_fast_path", lambda *_: None)  # always in fp32
    settings = settings.replace("decoder=reference", "decoder=scan")  # reference convolves too
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        run(precision, settings + f"precision={precision},epochs=1,learning_rate=1e-9")
        assert seen == {(True, dtype, True, True), (False, torch.float32, False, False)}
        seen.clear()
        dtypes = {weight.dtype for weight in weights(tmp_path / precision).values()}
        assert dtypes == {torch.float32, torch.int64}
    choose_device(create_hparams())  # turns it off again
    fp32, bf16 = losses(tmp_path / "fp32"), losses(tmp_path / "bf16")
    assert bf16 != fp32 and bf16 == pytest.approx(fp32, rel=0.01)


def test_gradients_are_clipped_and_validation_does_not_disturb_training(tmp_path, settings, run):
    """Adam's first step does not depend on the size of the gradient, but its moments do."""
    often, seldom = tmp_path / "often", tmp_path / "seldom"
    run("often", settings + "epochs=2,epochs_per_validation=1")
    run("seldom", settings + "epochs=2")
    run("clipped", settings + "epochs=1,grad_clip_thresh=1e-3")
    assert losses(often) == losses(seldom)
    assert records(seldom, "validation") == records(often, "validation")[1:]
    for name, clip in (("often", 1.0), ("clipped", 1e-3)):
        assert records(tmp_path / name, "step")[0]["grad_norm"] > 1  # before clipping
        moments = load_newest(tmp_path / name)[1]["optimizer"]["state"]
        assert torch.cat([m["exp_avg"].flatten() for m in moments.values()]).norm() <= clip


def test_speech_is_logged_by_step_and_does_not_disturb_training(tmp_path, settings, run):
    settings += "epochs=6,epochs_per_validation=1,max_decoder_steps=5,checkpoint_minutes=0,"
    run("silent", settings)
    speaks = "speak_every=2,speak_texts=['A tone, two tones.','Three!']"
    run("speaks", settings + speaks)
    assert losses(tmp_path / "silent") == losses(tmp_path / "speaks")
    sample = tmp_path / "speaks" / "sample"
    validated = [record["step"] for record in records(tmp_path / "speaks", "validation")]
    spoken = validated[1::2]  # every second validation, and the last
    names = [f"step_{step:08d}_{i}" for step in spoken for i in (1, 2)]
    assert sorted(path.stem for path in sample.glob("step_*.wav")) == names
    assert sorted(path.stem for path in sample.glob("step_*.png")) == names
    logged = EventAccumulator(str(tmp_path / "speaks")).Reload()
    for i in (1, 2):
        assert [image.step for image in logged.Images(f"speech/{i}/alignment")] == spoken
        assert [audio.step for audio in logged.Audio(f"speech/{i}/audio")] == spoken
    texts = logged.Tensors("speech/2/text/text_summary")
    assert texts[0].tensor_proto.string_val[0] == b"Three!"
    expected = [validated[n - 1] for n in (1, 2, 4, 6)]  # after 1, 2, 4, ..., and the last
    for clip in ("sample", "longest"):
        assert [image.step for image in logged.Images(f"{clip}/mel")] == expected
        assert [audio.step for audio in logged.Audio(f"{clip}/predicted")] == expected

    assert run("mute", f"{settings}{speaks},end_threshold=1e-6") == 0  # it stops at once
    logged = EventAccumulator(str(tmp_path / "mute")).Reload()
    assert logged.Images("speech/2/alignment") and "speech/2/audio" not in logged.Tags()["audio"]
    wavs = (tmp_path / "mute" / "sample").glob("step_*_2.wav")
    assert [soundfile.info(wav).frames for wav in wavs] == [0] * len(spoken)


@pytest.mark.parametrize("learned", [True, False])
def test_at_its_end_a_model_that_can_speak_measures_the_variance_that_it_lacks(
    tmp_path, settings, run, monkeypatch, learned
):
    monkeypatch.setattr(train, "LEARNED", -1 if learned else 1)
    settings += "epochs=2,epochs_per_checkpoint=1,max_decoder_steps=20,keep_checkpoints=9"
    run("run", settings)
    last, *before = (
        load_checkpoint(path)["state_dict"]["variance_gain"]
        for path in find_checkpoints(tmp_path / "run")
    )
    assert bool(last.any()) == learned and not any(gain.any() for gain in before)


# Another run, which starts from a checkpoint


@pytest.fixture
def first(tmp_path, settings, run) -> str:
    """The checkpoint of a run of one epoch of three batches."""
    settings += "epochs=1,dynamic_batch_size=False,lrf=0.5,p_postnet_dropout=0.3"
    run("first", settings)
    return str(find_checkpoints(tmp_path / "first")[0])


def test_it_continues_with_the_checkpoints_settings(tmp_path, run, first, capsys):
    capsys.readouterr()
    second = tmp_path / "second"
    options = "--checkpoint_path", first, "--output_directory", str(second)  # NVIDIA's names
    run("unused", "epochs=9,learning_rate=1e-4", *options, "--hparams", "epochs=2")
    assert capsys.readouterr().out.startswith(
        f"settings of {first}, but epochs=2 (was 1), learning_rate=0.0001 (was 0.001)\n"
    )
    assert column(second, "epoch", "epoch") == [1]
    assert records(second, "step")[0]["learning_rate"] == 1e-4
    saved = json.loads((second / "hparams.json").read_text())
    assert (saved["lrf"], saved["p_postnet_dropout"], saved["n_mel_channels"]) == (0.5, 0.3, 10)


def test_another_seed_drops_other_units(tmp_path, run, first):
    """The runs start from one checkpoint, and their batches depend on no seed."""
    first_losses = {}
    for seed in ("", "seed=0,", "seed=1,", "seed=2,"):
        name = f"with {seed}"
        sorted_batches = "batching_strategy=SB,batch_randomization=False,epochs=2"
        run(name, seed + sorted_batches, "-c", first)
        first_losses[seed] = losses(tmp_path / name)[0]
    assert first_losses[""] == first_losses["seed=0,"] and len({*first_losses.values()}) == 3


def test_warm_start_takes_weights_but_not_the_ignored_ones(tmp_path, run, first, capsys):
    options = "-c", first, "--warm_start"
    settings = "seed=1,learning_rate=1e-12,weight_decay=0,"
    ignored = "prenet_dim=9,ignore_layers=[decoder.prenet,decoder.attention_rnn]"
    run("default", settings, *options)
    assert "note: --warm_start does not load embedding.weight (ign" in capsys.readouterr().out
    run("named", settings + ignored, *options)  # names may be beginnings
    assert column(tmp_path / "default", "epoch", "epoch") == [0]
    assert json.loads((tmp_path / "default" / "hparams.json").read_text())["lrf"] == 0.5
    embedding, rnn = "embedding.weight", "decoder.attention_rnn.weight_hh"
    old = weights(tmp_path / "first")
    for name, taken, left in (("default", rnn, embedding), ("named", embedding, rnn)):
        new = weights(tmp_path / name)
        torch.testing.assert_close(old[taken], new[taken])
        assert not torch.allclose(old[left], new[left])


def test_the_alphabet_is_saved_with_the_run_and_stays_with_its_weights(
    tmp_path, settings, run, corpus
):
    """The file is read once. All runs that start from the checkpoint have its characters."""
    for path in (corpus / "train.txt", corpus / "val.txt"):
        text = path.read_text().replace("tone", "grüße").replace("wav|a", "wav|Ä")
        path.write_text(text, encoding="utf-8")
    file, other = corpus / "symbols.txt", corpus / "other.txt"
    file.write_text(" aefghlmnorstwßäü", encoding="utf-8")
    other.write_text(" aefghlmnorstwßäé", encoding="utf-8")
    run("first", f"{settings}text_cleaners=basic_cleaners,symbols=@{file},epochs=1")
    file.unlink()
    saved = json.loads((tmp_path / "first" / "hparams.json").read_text())
    assert (saved["symbols"], saved["n_symbols"]) == (" aefghlmnorstwßäü", 18)
    path = find_checkpoints(tmp_path / "first")[0]
    assert run("first", "epochs=2", "--resume") == 0
    run("second", "epochs=2", "-c", str(path))
    assert losses(tmp_path / "second") == losses(tmp_path / "first")[3:]
    for change, *options in (("",), ("ignore_layers=[decoder],", "--warm_start")):
        with pytest.raises(UserError, match="has an embedding for other ones"):
            run("third", f"{change}epochs=3,symbols=@{other}", "-c", str(path), *options)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, run, first):
    with pytest.raises(UserError, match=r"\.pt: has 1 epoch; set epochs=2 or more"):
        run("second", "", "-c", first)

    problem = (
        r"layers\.0\.linear_layer\.weight is \(8, 10\), here \(9, 10\); .* with ignore_layers$"
    )
    for name, *options in (("third",), ("fourth", "--warm_start")):
        with pytest.raises(UserError, match=problem):
            run(name, "prenet_dim=9,epochs=2", "-c", first, *options)


# Other decoders


def test_a_changed_model_is_noted_and_trained(tmp_path, settings, run, monkeypatch, capsys):
    def forward(*args):
        context, weights = real_forward(*args)
        return 2 * context, weights

    real_forward = Attention.forward
    settings = settings.partition(",")[2]  # without the decoder
    with monkeypatch.context() as changed:
        changed.setattr(Attention, "forward", forward)
        for decoder, n_notes in (("auto", 1), ("reference", 0)):
            run(decoder, f"decoder={decoder},{settings}epochs=1")
            assert capsys.readouterr().out.count("note: scan differs from the decoder") == n_notes
        with pytest.raises(UserError, match=r"^setting decoder=scan: .*; use decoder=auto$"):
            run("scan", f"decoder=scan,{settings}epochs=1")
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "reference"), rel=1e-5)
    run("auto", "epochs=2", "--resume")  # which chooses anew, and says so
    run("reference", "decoder=scan,epochs=2", "--resume")  # which may change
    assert capsys.readouterr().out.count(", decoder=scan\n") == 2
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "reference"), rel=1e-3)
