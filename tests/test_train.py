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
from training.device import choose_device
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
    assert contents(output) == before
    assert "note" not in printed and "epoch 2: validation loss" in printed

    steps, epochs, validations = (records(output, e) for e in ("step", "epoch", "validation"))
    assert column(output, "epoch", "epoch") == column(output, "validation", "epoch") == [0, 1]
    assert sum(epoch["n_batches"] for epoch in epochs) == len(steps) == steps[-1]["step"]
    for record, names in (
        (steps[-1], "loss grad_norm learning_rate guided_attention_loss duration"),
        (epochs[-1], "minutes zpr abl total_length frames_per_second peak_memory_gib"),
        (validations[-1], "diagonality focus"),
    ):
        assert all(record[name] > 0 for name in names.split())
    parts = [validations[-1][f"{name}_loss"] for name in ("mel", "mel_postnet", "gate")]
    assert validations[-1]["loss"] == pytest.approx(sum(parts), rel=1e-6)

    for path in (output / "sample").glob("*.png"):
        assert len(np.unique(imread(path))) > 10  # colours
    curves = EventAccumulator(str(tmp_path / "logs")).Reload()
    tags = curves.Tags()
    assert [scalar.step for scalar in curves.Scalars("validation/loss")] == [1, 2]
    for clip in ("sample", "longest"):  # always the same two
        assert {f"{clip}/alignment", f"{clip}/mel", f"{clip}/gate"} <= set(tags["images"])
        predicted, target = (curves.Audio(f"{clip}/{kind}") for kind in ("predicted", "target"))
        assert [sound.step for sound in predicted] == [len(steps) // 2, len(steps)]
        assert [sound.step for sound in target] == [0]  # once in both starts
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
        seen.add((self.training, y.dtype, cudnn.allow_tf32))
        return y

    seen, real_convolve, cudnn = set(), torch.nn.Conv1d.forward, torch.backends.cudnn
    device = choose_device(create_hparams())
    monkeypatch.setattr(train, "choose_device", lambda _: device)
    cudnn.allow_tf32 = True  # as choose_device does for precision=tf32, which needs a GPU
    monkeypatch.setattr(torch.nn.Conv1d, "forward", convolve)
    monkeypatch.setattr(train, "check_fast_path", lambda *_: None)  # always in fp32
    settings = settings.replace("decoder=reference", "decoder=scan")  # reference convolves too
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        run(precision, settings + f"precision={precision},epochs=2,epochs_per_validation=1")
        assert seen == {(True, dtype, True), (False, torch.float32, False)}
        seen.clear()
        dtypes = {weight.dtype for weight in weights(tmp_path / precision).values()}
        assert dtypes == {torch.float32, torch.int64}
    choose_device(create_hparams())  # turns it off again
    fp32, bf16 = losses(tmp_path / "fp32"), losses(tmp_path / "bf16")
    assert bf16 != fp32 and bf16[0] == pytest.approx(fp32[0], rel=0.01)


def test_gradients_are_clipped(tmp_path, settings, run):
    """Adam's first step does not depend on the size of the gradient, but its moments do."""
    for clip in (1.0, 1e-3):
        run(f"{clip}", settings + f"epochs=1,dynamic_batch_size=False,grad_clip_thresh={clip}")
        assert records(tmp_path / f"{clip}", "step")[0]["grad_norm"] > 1  # before clipping
        moments = load_newest(tmp_path / f"{clip}")[1]["optimizer"]["state"]
        assert torch.cat([m["exp_avg"].flatten() for m in moments.values()]).norm() <= clip


def test_what_only_looks_on_changes_no_run(tmp_path, settings, run):
    """Validations, speech and the trial of memory leave weights, running means and random numbers
    as they were."""
    settings += "epochs=3,epochs_per_validation=3,max_decoder_steps=5,"
    run("run", settings)
    for change in (
        "epochs_per_validation=1",
        "epochs_per_validation=1,speak_every=1",
        "check_memory=True",
        "deterministic=True",
    ):
        run(change, settings + change)
        changed, whole = weights(tmp_path / change), weights(tmp_path / "run")
        torch.testing.assert_close(changed, whole, rtol=0, atol=0)
        assert losses(tmp_path / change) == losses(tmp_path / "run")


def test_speech_is_logged_by_step_and_the_variance_that_it_lacks_is_measured_at_the_end(
    tmp_path, settings, run, monkeypatch
):
    monkeypatch.setattr(train, "LEARNED", -1)  # diagonality from which it is measured
    settings += "epochs=6,epochs_per_validation=1,max_decoder_steps=5,checkpoint_minutes=0,"
    settings += "speak_every=2,speak_texts=['A tone, two tones.','Three!'],"
    output, mute = tmp_path / "speaks", tmp_path / "mute"
    run("speaks", settings)
    validated = column(output, "validation", "step")
    spoken = validated[1::2]  # every second validation, and the last
    names = [f"step_{step:08d}_{i}" for step in spoken for i in (1, 2)]
    for kind in ("wav", "png"):
        assert sorted(path.stem for path in output.glob(f"sample/step_*.{kind}")) == names
    logged = EventAccumulator(str(output)).Reload()
    for i in (1, 2):
        assert [image.step for image in logged.Images(f"speech/{i}/alignment")] == spoken
        assert [audio.step for audio in logged.Audio(f"speech/{i}/audio")] == spoken
    expected = [validated[n - 1] for n in (1, 2, 4, 6)]  # after 1, 2, 4, ..., and the last
    for clip in ("sample", "longest"):
        assert [image.step for image in logged.Images(f"{clip}/mel")] == expected

    states = [load_checkpoint(path)["state_dict"] for path in find_checkpoints(output)]
    assert [bool(state["variance_gain"].any()) for state in states] == [True, False]
    run("speaks", "epochs=8,epochs_per_checkpoint=1", "--resume")
    states = [load_checkpoint(path)["state_dict"] for path in find_checkpoints(output)]
    assert [bool(state["variance_gain"].any()) for state in states[:2]] == [True, False]

    assert run("mute", f"{settings}end_threshold=1e-6") == 0  # it stops at once
    wavs = mute.glob("sample/step_*_2.wav")
    assert [soundfile.info(wav).frames for wav in wavs] == [0] * len(spoken)


# Another run, which starts from a checkpoint


@pytest.fixture
def first(tmp_path, settings, run) -> str:
    """The checkpoint of a run of one epoch of three batches."""
    settings += "epochs=1,dynamic_batch_size=False,lrf=0.5,p_postnet_dropout=0.3"
    run("first", settings)
    return str(find_checkpoints(tmp_path / "first")[0])


def test_it_continues_with_the_checkpoints_settings(tmp_path, run, first, capsys):
    with pytest.raises(UserError, match=r"\.pt: has 1 epoch; set epochs=2 or more"):
        run("second", "", "-c", first)
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


def test_warm_start_takes_weights_but_not_the_ignored_ones(tmp_path, run, first, capsys):
    options = "-c", first, "--warm_start"
    settings = "seed=1,learning_rate=1e-12,weight_decay=0,"
    ignored = "prenet_dim=9,ignore_layers=[decoder.prenet,decoder.attention_rnn]"
    run("default", settings, *options)
    assert "note: --warm_start does not load embedding.weight (ign" in capsys.readouterr().out
    run("named", settings + ignored, *options)  # names may be beginnings
    assert column(tmp_path / "default", "epoch", "epoch") == [0]
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
    file = corpus / "symbols.txt"
    file.write_text(" -abcdefghijklmnopqrstuvwxyz")
    run("first", f"{settings}symbols=@{file},epochs=1")
    file.unlink()
    path = str(find_checkpoints(tmp_path / "first")[0])
    assert run("first", "epochs=2", "--resume") == 0
    run("second", "epochs=2", "-c", path)
    assert losses(tmp_path / "second") == losses(tmp_path / "first")[3:]
    file.write_text(" -zyxwvutsrqponmlkjihgfedcba")
    with pytest.raises(UserError, match="has an embedding for other ones"):
        run("third", f"epochs=3,symbols=@{file}", "-c", path)


# Other decoders


def test_a_changed_model_is_noted_and_trained(tmp_path, settings, run, monkeypatch, capsys):
    def forward(*args):
        context, weights = real_forward(*args)
        return 2 * context, weights

    real_forward = Attention.forward
    settings = settings.partition(",")[2] + "epochs=1,"  # without the decoder
    monkeypatch.setattr(Attention, "forward", forward)
    for decoder, n_notes in (("auto", 1), ("reference", 0)):
        run(decoder, f"{settings}decoder={decoder}")
        assert capsys.readouterr().out.count("note: scan differs from the decoder") == n_notes
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "reference"), rel=1e-5)
    with pytest.raises(UserError, match=r"^setting decoder=scan: .*; use decoder=auto$"):
        run("scan", f"{settings}decoder=scan")
