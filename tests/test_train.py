"""train.py as a user runs it, on tones."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import logger
import train
from checkpoint import checkpoints, load_checkpoint, load_newest, save_checkpoint
from cli import StopSignals, UserError
from clips import load_clips
from data_utils import MelDataset, make_loader, validation_batches
from device import choose_device, device_name
from hparams import MAY_CHANGE, create_hparams
from loss_function import Tacotron2Loss, alignment_scores
from mel_cache import open_mels
from model import Attention, Tacotron2
from validation import validate

ROOT = Path(__file__).resolve().parent.parent


def run(monkeypatch, output, settings: str, *options: str) -> list[dict]:
    """Train in this process; returns the records of metrics.jsonl."""
    arguments = ["train.py", "-o", str(output), "--hparams", settings, *options]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(logger, "render", lambda _: np.zeros((1, 1, 4), np.uint8))  # takes longest
    train.main()
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def events(records: list[dict], event: str) -> list[dict]:
    return [record for record in records if record["event"] == event]


def test_two_epochs_leave_all_that_a_user_expects(tmp_path, settings):
    output = tmp_path / "run"
    result = subprocess.run(
        [sys.executable, "train.py", "-o", output, "-l", tmp_path / "logs", "--hparams",
         settings + "epochs=2,epochs_per_validation=1,guided_attention_weight=1"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert ", 1 threads, fp32\n" in result.stdout
    assert "note" not in result.stdout and "8 training and 4 validation clips" in result.stdout
    assert "epoch 1: training loss" in result.stdout and "validation loss" in result.stdout
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps, epochs = events(records, "step"), events(records, "epoch")
    assert [r["epoch"] for r in epochs] == [r["epoch"] for r in events(records, "validation")]
    assert sum(r["n_batches"] for r in epochs) == len(steps) == steps[-1]["step"]
    for name in ("loss", "grad_norm", "learning_rate", "guided_attention_loss", "duration"):
        assert steps[0][name] > 0
    for name in ("minutes", "zpr", "abl", "total_length", "frames_per_second", "peak_memory_gib"):
        assert epochs[0][name] > 0
    assert 0 <= epochs[0]["data_wait"] < 1
    validation = events(records, "validation")[-1]
    parts = [validation[f"{name}_loss"] for name in ("mel", "mel_postnet", "gate")]
    assert validation["loss"] == pytest.approx(sum(parts), rel=1e-6)
    assert 0 < validation["diagonality"] <= 1 and 0 < validation["focus"] <= 1
    assert json.loads((output / "hparams.json").read_text())["batch_size"] == 3
    assert {p.name for p in output.iterdir()} >= {
        f"checkpoint_{steps[-1]['step']:08d}.pt", "checkpoint_best.pt"
    }  # fmt: skip
    names = {"alignment.png", "mel.png", "gate.png", "predicted.wav"}
    assert {p.name for p in (output / "sample").iterdir()} == names
    curves = EventAccumulator(str(tmp_path / "logs")).Reload()
    scalars = {
        "training/loss",
        "training/duration",
        "training/grad_norm",
        "epoch/minutes",
        "validation/masked_loss",
    }
    assert scalars <= set(curves.Tags()["scalars"])
    clips = ("sample", "other")  # a fixed one, and another each time
    pictures = {f"{clip}/{what}" for clip in clips for what in ("alignment", "mel", "gate")}
    assert set(curves.Tags()["images"]) == pictures
    assert set(curves.Tags()["audio"]) == {"sample/predicted", "other/predicted"}
    texts = [
        [event.tensor_proto.string_val[0] for event in curves.Tensors(f"{clip}/text/text_summary")]
        for clip in clips
    ]
    assert len(set(texts[0])) == 1 and len(set(texts[1])) == 2
    (start,) = events(records, "start")
    assert start == {
        "event": "start", "epoch": 0, "step": 0, "device": device_name(torch.device("cpu")),
        "threads": start["threads"], "decoder": create_hparams(settings).decoder,
        "precision": "fp32", "torch": torch.__version__,
    }  # fmt: skip
    assert start["threads"] >= 1


def test_resuming_a_finished_run_changes_nothing(tmp_path, settings, monkeypatch, capsys):
    first = run(monkeypatch, tmp_path / "run", settings + "epochs=1")
    files = {path: path.read_bytes() for path in tmp_path.glob("run/*.*")}
    assert run(monkeypatch, tmp_path / "run", settings + "epochs=1", "--resume") == first
    assert capsys.readouterr().out.endswith(".pt: has 1 epochs: nothing left to do\n")
    assert {path: path.read_bytes() for path in tmp_path.glob("run/*.*")} == files


def test_tensorboard_keeps_every_step_of_a_resumed_run(tmp_path, settings, monkeypatch):
    settings += "epochs_per_validation=1,epochs_per_checkpoint=1,"
    run(monkeypatch, tmp_path / "run", settings + "epochs=1")
    records = run(monkeypatch, tmp_path / "run", settings + "epochs=3", "--resume")
    curves = EventAccumulator(str(tmp_path / "run")).Reload()
    shown = [scalar.step for scalar in curves.Scalars("training/loss")]
    assert shown == [record["step"] for record in events(records, "step")]
    assert [scalar.step for scalar in curves.Scalars("validation/loss")] == [1, 2, 3]


def test_validation_losses_are_means_over_what_each_averages(tmp_path, settings, monkeypatch):
    """One batch of all clips and one batch a clip give the same masked loss."""
    settings = settings.replace("p_prenet_dropout", "") + "p_prenet_dropout=0,mask_padding=True,"
    hparams = create_hparams(settings)
    clips = load_clips(hparams.validation_files, hparams)
    torch.manual_seed(0)
    model, loss_function = Tacotron2(hparams).eval(), Tacotron2Loss()
    dataset = MelDataset(clips, open_mels(clips, hparams))
    found = {}
    for batches in ([[0, 1, 2, 3]], [[3, 1], [0, 2]], [[0], [1], [2], [3]]):
        loader = make_loader(dataset, batches, hparams)
        with StopSignals() as stop:
            found[len(batches)], samples = validate(model, loader, loss_function, stop, other=2)
        assert samples["other"].text == clips[2].text
        assert samples["other"].gate_target.tolist() == [0] * (clips[2].n_frames - 1) + [1]
        sample = samples["sample"]
        assert sample.text in {clips[i].text for i in batches[0]}
        (clip,) = (clip for clip in clips if clip.text == sample.text)
        assert sample.mel.shape == (10, clip.n_frames)
        assert sample.alignment.shape == (clip.n_frames, len(clip.ids))
        torch.testing.assert_close(sample.mel, dataset[clips.index(clip)].mel.T)
    for few, many in ((1, 2), (2, 4)):
        for name in ("masked_loss", "diagonality", "focus"):
            # Nearly: convolutions see how far a text is padded, as in NVIDIA's code.
            assert found[few][name] == pytest.approx(found[many][name], rel=1e-3)
    # Without padding NVIDIA's loss is the masked one; with it, it is another.
    assert found[4]["loss"] == pytest.approx(found[4]["masked_loss"], rel=1e-5)
    assert found[1]["loss"] != pytest.approx(found[1]["masked_loss"], rel=1e-2)


def test_alignment_scores_of_a_diagonal_and_of_none():
    lengths = torch.tensor([20, 10]), torch.tensor([40, 30])
    perfect, flat = torch.zeros(2, 40, 20), torch.zeros(2, 40, 20)
    for i, (N, T) in enumerate(zip(*(x.tolist() for x in lengths), strict=True)):
        for t in range(T):
            perfect[i, t, t * N // T] = 1
            flat[i, t, :N] = 1 / N
    diagonality, focus = alignment_scores(perfect, *lengths)
    assert diagonality.tolist() == pytest.approx([1, 1]) and focus.tolist() == pytest.approx([1, 1])
    diagonality, focus = alignment_scores(flat, *lengths)
    assert diagonality.tolist() == pytest.approx([0.2, 0.2], abs=0.03)
    assert focus.tolist() == pytest.approx([1 / 20, 1 / 10])


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", False), ("tf32", True)])
def test_tf32_is_of_training_alone(tmp_path, settings, monkeypatch, precision, allowed):
    def choose(hparams):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setenv("PYTORCH_ALLOC_CONF", "")
            choose_device(hparams)
        return torch.device("cpu")

    def forward(self, batch):
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        seen.add((self.training, matmul.allow_tf32, cudnn.allow_tf32))
        return real_forward(self, batch)

    seen, real_forward = set(), Tacotron2.forward
    monkeypatch.setattr(train, "choose_device", choose)
    monkeypatch.setattr(Tacotron2, "forward", forward)
    monkeypatch.setattr(Tacotron2, "check_fast_path", lambda *args: [])  # in fp32 too
    run(monkeypatch, tmp_path / "run", settings + f"epochs=1,precision={precision}")
    choose(create_hparams())
    assert seen == {(True, allowed, allowed), (False, False, False)}


def test_bf16_trains_nearly_as_fp32_and_validates_in_fp32(tmp_path, settings, monkeypatch):
    losses, dtypes = {}, set()

    def convolve(self, x):
        y = real_convolve(self, x)
        dtypes.add((self.training, y.dtype))
        return y

    monkeypatch.setattr(Tacotron2, "check_fast_path", lambda *args: [])  # in fp32
    real_convolve = torch.nn.Conv1d.forward
    monkeypatch.setattr(torch.nn.Conv1d, "forward", convolve)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        settings_ = settings.replace("decoder=reference", "decoder=scan")  # whose loop has some too
        settings_ += f"precision={precision},epochs=1,learning_rate=1e-9"
        records = run(monkeypatch, tmp_path / precision, settings_)
        losses[precision] = [event["loss"] for event in events(records, "step")]
        assert dtypes == {(True, dtype), (False, torch.float32)}
        dtypes.clear()
        weights = load_newest(tmp_path / precision)[1]["state_dict"].values()
        assert all(weight.dtype in (torch.float32, torch.int64) for weight in weights)
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)


def test_gradients_are_clipped(tmp_path, settings, monkeypatch):
    """Adam's first step does not depend on the gradient's size, its moments do."""
    for clip in (1.0, 1e-3):
        name = f"clip{clip}"
        settings_ = settings + f"epochs=1,batch_size=8,grad_clip_thresh={clip}".replace(
            "batch_size=8,", ""
        )
        records = run(monkeypatch, tmp_path / name, settings_)
        assert events(records, "step")[0]["grad_norm"] > 1  # as it was before clipping
        moments = load_newest(tmp_path / name)[1]["optimizer"]["state"]
        norm = torch.cat([m["exp_avg"].flatten() for m in moments.values()]).norm()
        assert norm <= clip


def test_validation_neither_disturbs_nor_depends_on_training(tmp_path, settings, monkeypatch):
    often = run(monkeypatch, tmp_path / "often", settings + "epochs=2,epochs_per_validation=1")
    seldom = run(monkeypatch, tmp_path / "seldom", settings + "epochs=2")
    losses = [[r["loss"] for r in events(records, "step")] for records in (often, seldom)]
    assert losses[0] == losses[1]
    assert events(often, "validation")[1] == events(seldom, "validation")[0]
    assert len(events(often, "validation")) == 2


def test_all_ten_configurations_train(tmp_path, settings, monkeypatch):
    """The rows of Table 2; their validation losses are of the same batches."""
    rows = ["RAND", "SB-BR", "SSB-BR", "BKT-BR", "ATS-BR", "SB", "SSB", "SB-DBS", "SSB-DBS"]
    plans = set()
    for row in [*rows, "SSB-DBS-BR"]:
        strategy, *options = row.split("-")
        batching = (
            f"batching_strategy={strategy},dynamic_batch_size={'DBS' in options},"
            f"batch_randomization={'BR' in options},bucket_size=6,n_bins=2,epochs=1"
        )
        records = run(monkeypatch, tmp_path / row, settings + batching)
        hparams = create_hparams(settings + batching)
        (epoch,) = events(records, "epoch")
        assert epoch["n_batches"] == 3 if "DBS" not in options else epoch["n_batches"] <= 3
        assert len(events(records, "validation")) == 1
        plans.add(str(validation_batches(load_clips(hparams.validation_files, hparams), hparams)))
    assert len(plans) == 1


def test_warm_start_takes_weights_but_not_the_ignored_ones(tmp_path, settings, monkeypatch):
    run(monkeypatch, tmp_path / "first", settings + "epochs=1")
    checkpoint = checkpoints(tmp_path / "first")[0]
    tiny_step = settings + "seed=1,epochs=1,learning_rate=1e-12,weight_decay=0"
    records = run(
        monkeypatch, tmp_path / "second", tiny_step, "-c", str(checkpoint), "--warm_start"
    )
    assert events(records, "epoch")[0]["epoch"] == 0
    old = load_checkpoint(checkpoint)["state_dict"]
    new = load_newest(tmp_path / "second")[1]["state_dict"]
    name = "decoder.attention_rnn.weight_ih"
    torch.testing.assert_close(old[name], new[name])
    assert not torch.allclose(old["embedding.weight"], new["embedding.weight"])


def test_a_checkpoint_of_weights_alone_starts_at_epoch_0(tmp_path, settings, monkeypatch):
    """As NVIDIA's published one does, which has no settings: its preset has to be named."""
    run(monkeypatch, tmp_path / "first", settings + "epochs=1")
    state = load_newest(tmp_path / "first")[1]["state_dict"]
    save_checkpoint(tmp_path / "theirs.pt", {"state_dict": state})
    options = "-c", str(tmp_path / "theirs.pt")
    with pytest.raises(
        UserError, match=r"theirs\.pt: has no settings in it; name .*--preset nvidia"
    ):
        run(monkeypatch, tmp_path / "second", settings + "epochs=1", *options)
    assert not (tmp_path / "second").exists()
    options += "--preset", "paper"
    records = run(monkeypatch, tmp_path / "second", settings + "epochs=1", *options)
    assert events(records, "epoch")[0]["epoch"] == 0


def test_a_training_checkpoint_of_nvidia_continues_with_its_moments(
    tmp_path, settings, monkeypatch
):
    """Theirs: no settings, the iteration, and weights that old versions of PyTorch numbered by
    their address. The next step equals ours."""
    settings += "dynamic_batch_size=False,epochs_per_validation=9,"
    run(monkeypatch, tmp_path / "first", settings + "epochs=1")
    ours = load_newest(tmp_path / "first")[1]
    optimizer = ours["optimizer"]
    optimizer["param_groups"][0]["params"] = [7_000_000 + i for i in range(len(optimizer["state"]))]
    optimizer["state"] = {
        7_000_000 + i: moments | {"step": int(moments["step"])}
        for i, moments in optimizer["state"].items()
    }
    theirs = {"iteration": 3, "learning_rate": 1.0, "optimizer": optimizer}
    torch.save(theirs | {"state_dict": ours["state_dict"]}, tmp_path / "theirs.pt")
    losses = []
    for name, path, preset in (
        ("ours", checkpoints(tmp_path / "first")[0], []),
        ("theirs", tmp_path / "theirs.pt", ["--preset", "paper"]),
    ):
        options = "-c", str(path), *preset
        records = run(
            monkeypatch, tmp_path / name, settings + "epochs=2,p_prenet_dropout=0", *options
        )
        assert [record["epoch"] for record in events(records, "epoch")] == [1]
        assert events(records, "step")[0]["step"] == 4
        state = load_newest(tmp_path / name)[1]["optimizer"]["state"]
        assert {int(moments["step"]) for moments in state.values()} == {6}
        losses.append([record["loss"] for record in events(records, "step")])
    assert losses[0][0] != pytest.approx(losses[0][2], rel=1e-6)
    optimizer["state"] = {}
    optimizer["param_groups"][0]["params"].pop()
    torch.save(theirs | {"state_dict": ours["state_dict"]}, tmp_path / "theirs.pt")
    with pytest.raises(UserError, match="its optimizer's state is not that of its weights"):
        run(monkeypatch, tmp_path / "third", settings + "epochs=2", *options)


def test_a_checkpoint_continues_in_another_folder_with_its_settings(
    tmp_path, settings, monkeypatch, capsys
):
    run(monkeypatch, tmp_path / "first", settings + "epochs=1,lrf=0.5,p_postnet_dropout=0.3")
    checkpoint = str(checkpoints(tmp_path / "first")[0])
    change = "epochs=2,learning_rate=1e-4"
    capsys.readouterr()
    records = run(monkeypatch, tmp_path / "second", change, "-c", checkpoint)
    assert [record["epoch"] for record in events(records, "epoch")] == [1]
    assert events(records, "step")[0]["learning_rate"] == 1e-4
    assert capsys.readouterr().out.startswith(
        f"settings of {checkpoint}, but epochs=2 (was 1), learning_rate=0.0001 (was 0.001)\n"
    )
    kept = json.loads((tmp_path / "second" / "hparams.json").read_text())
    assert (kept["lrf"], kept["p_postnet_dropout"], kept["n_mel_channels"]) == (0.5, 0.3, 10)
    options = "-c", checkpoint, "--warm_start"
    run(monkeypatch, tmp_path / "third", "", *options)
    assert json.loads((tmp_path / "third" / "hparams.json").read_text())["lrf"] == 0.5
    message = rf"--preset nvidia: {checkpoint} was trained with other mels \(filter_length=2048, "
    with pytest.raises(UserError, match=message):
        run(monkeypatch, tmp_path / "fourth", "epochs=2", *options, "--preset", "nvidia")
    named = "epochs=1,hop_length=256,win_length=1024,filter_length=1024"
    run(monkeypatch, tmp_path / "fourth", named, *options, "--preset", "nvidia")


# What goes wrong


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ("batchsize=4", [], "--hparams: unknown setting 'batchsize'; did you mean 'batch_size'?"),
        ("", ["-c", "LICENSE"], "LICENSE: not a checkpoint, or damaged"),
    ],
)
def test_errors_are_one_line_with_exit_status_2(tmp_path, settings, change, options, message):
    output = tmp_path / "run"
    result = subprocess.run(
        [sys.executable, "train.py", "-o", output, "--hparams", settings + change, *options],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1
    assert not (output / "metrics.jsonl").exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-c", "none.pt"], "none.pt: no such checkpoint; name one that train.py saved"),
        (["--preset", "google"], "--preset google: unknown; use one of paper, nvidia"),
    ],
)
def test_bad_options_are_named(tmp_path, settings, monkeypatch, options, message):
    with pytest.raises(UserError, match=message):
        run(monkeypatch, tmp_path / "run", settings, *options)


def test_a_changed_model_is_said_and_trained(tmp_path, settings, monkeypatch, capsys):
    def forward(self, query, *others):
        context, weights = real_forward(self, query, *others)
        return 2 * context, weights

    real_forward = Attention.forward
    monkeypatch.setattr(Attention, "forward", forward)
    losses, notes = [], []
    for decoder in ("scan", "reference"):
        settings_ = f"decoder={decoder},{settings.partition(',')[2]}epochs=1"
        records = run(monkeypatch, tmp_path / decoder, settings_)
        losses.append([record["loss"] for record in events(records, "step")])
        notes.append([line for line in capsys.readouterr().out.splitlines() if "note" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # the encoder's LSTM is still scanned
    assert len(notes[0]) == 1 and notes[0][0].startswith("note: Decoder: ")
    assert "; training uses the modules" in notes[0][0] and not notes[1]


@pytest.mark.parametrize(("user", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_are_told_to_sleep_soon_before_pytorch_is_loaded(user, expected):
    program = (
        "import builtins, os\n"
        "def note(name, *args, real=builtins.__import__, **options):\n"
        "    if name == 'torch':\n"
        "        print(os.environ.get('GOMP_SPINCOUNT')), os._exit(0)\n"
        "    return real(name, *args, **options)\n"
        "builtins.__import__ = note\n"
        "import train\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"} | user
    result = subprocess.run(
        [sys.executable, "-u", "-c", program],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.stdout == expected + "\n", result.stderr


def test_the_decoder_may_change_when_a_run_is_resumed(tmp_path, settings, monkeypatch):
    """And the losses are those of the other decoder, to rounding."""
    other = "reference" if settings.startswith("decoder=scan") else "scan"
    losses = []
    for name in ("same", "other"):
        run(monkeypatch, tmp_path / name, settings + "epochs=1")
        change = f"decoder={other}," if name == "other" else ""
        records = run(monkeypatch, tmp_path / name, change + "epochs=2", "--resume")
        losses.append([record["loss"] for record in events(records, "step")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path, settings, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/run: cannot be written .*; give another -o"):
        run(monkeypatch, tmp_path / "file" / "run", settings)


def test_a_checkpoint_of_another_model_is_refused(tmp_path, settings, monkeypatch):
    run(monkeypatch, tmp_path / "first", settings + "epochs=1")
    options = ["-c", str(checkpoints(tmp_path / "first")[0])]
    other = "prenet_dim=9,epochs=2"
    with pytest.raises(UserError, match=r"another model: .* is \(.*\) there and \(.*\) here"):
        run(monkeypatch, tmp_path / "second", other, *options)
    options.append("--warm_start")
    message = (
        r"another model: decoder\.prenet\.layers\.0\.linear_layer\.weight is \(8, 10\) there and "
        r"\(9, 10\) here; .*; leave these out with ignore_layers, as in ignore_layers=\[embedding,"
    )
    with pytest.raises(UserError, match=message):
        run(monkeypatch, tmp_path / "second", other, *options)
    with pytest.raises(UserError, match=r"ignore_layers: the model has no 'decoder\.pre'; name"):
        run(monkeypatch, tmp_path / "second", other + ",ignore_layers=[decoder.pre]", *options)
    ignored = ",learning_rate=1e-12,ignore_layers=[decoder.prenet,decoder.attention_rnn]"
    run(monkeypatch, tmp_path / "second", other + ignored, *options)  # the beginning of names
    old, new = (load_newest(tmp_path / name)[1]["state_dict"] for name in ("first", "second"))
    assert torch.allclose(old["embedding.weight"], new["embedding.weight"])
    name = "decoder.attention_rnn.weight_hh"
    assert not torch.allclose(old[name], new[name])


def test_more_workers_than_cores_are_said_in_one_line(tmp_path, settings, monkeypatch, capsys):
    monkeypatch.setattr(train, "n_cores", lambda: 1)
    with warnings.catch_warnings(record=True) as raw:
        warnings.simplefilter("always")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
        run(monkeypatch, tmp_path, settings.replace("workers=0", "workers=2") + "epochs=1")
    assert "note: num_workers=2 on 1 cores: more load no faster\n" in capsys.readouterr().out
    assert not [warning for warning in raw if "DataLoader" in str(warning.message)]


def test_a_refused_call_leaves_nothing(tmp_path, settings, monkeypatch):
    output, logs = tmp_path / "a" / "b", tmp_path / "logs" / "c"
    for change, *options in (
        ("learning_rate=0",),
        ("", "--preset", "google"),
        ("", "-c", "LICENSE"),
        (f"data_dir={tmp_path}/none",),
        ("batch_size=99",),
        ("", "--resume", "-c", "LICENSE"),
        ("n_bins",),
    ):
        with pytest.raises(UserError):
            run(monkeypatch, output, settings + change, "-l", str(logs), *options)
    with pytest.raises(UserError, match="a/b: holds no run to resume, or one that was stopped"):
        run(monkeypatch, output, "", "--resume")
    assert not (tmp_path / "a").exists() and not (tmp_path / "logs").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError):
        run(monkeypatch, tmp_path / "mine", settings + "batch_size=99")
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize(
    "option", [("--output_directory", "--log_directory", "--checkpoint_path"), ("-o", "-l", "-c")]
)
def test_the_options_may_have_nvidias_names(monkeypatch, option):
    monkeypatch.setattr(sys, "argv", ["train.py", option[0], "a", option[1], "b", option[2], "c"])
    args = train.parse_args()
    assert list(map(str, (args.output_dir, args.log_dir, args.checkpoint))) == ["a", "b", "c"]


def test_the_help_says_what_a_resumed_run_may_change(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit):
        train.parse_args()
    printed = " ".join(capsys.readouterr().out.split())
    assert "With --resume, --hparams may change " + ", ".join(sorted(MAY_CHANGE)) in printed


def test_a_resumed_run_keeps_its_settings(tmp_path, settings, monkeypatch):
    run(monkeypatch, tmp_path / "run", settings + "epochs=1")
    files = [tmp_path / "run" / name for name in ("metrics.jsonl", "hparams.json")]
    before = [file.read_text() for file in files]
    other = settings + "epochs=2,lrf=0.5,batching_strategy=SB"
    message = "batching_strategy=SSB there and SB here; lrf=0.1 there and 0.5 here; "
    with pytest.raises(UserError, match=message):
        run(monkeypatch, tmp_path / "run", other, "--resume")
    assert [file.read_text() for file in files] == before
    run(monkeypatch, tmp_path / "run", "epochs=2,checkpoint_minutes=3", "--resume")
    assert '"batch_size": 3' in files[1].read_text(), "what is not given is as it was"


def test_a_checkpoint_with_all_epochs_done_is_named(tmp_path, settings, monkeypatch):
    run(monkeypatch, tmp_path / "first", settings + "epochs=2")
    checkpoint = str(checkpoints(tmp_path / "first")[0])
    with pytest.raises(UserError, match=r"\.pt: has 2 epochs; set epochs=3 or more"):
        run(monkeypatch, tmp_path / "second", settings + "epochs=2", "-c", checkpoint)


def test_a_run_is_not_overwritten(tmp_path, settings, monkeypatch):
    run(monkeypatch, tmp_path / "first", settings + "epochs=1")
    with pytest.raises(UserError, match="first: holds a run; --resume it, or give another -o"):
        run(monkeypatch, tmp_path / "first", settings + "epochs=1")
