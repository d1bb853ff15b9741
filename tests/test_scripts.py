"""Scripts that work on what train.py left behind, and those that time the training."""

import json
import sys

import numpy as np
import pytest
import soundfile
import torch

import train
from checkpoint import load_checkpoint, save_checkpoint
from cli import UserError
from hparams import HParams
from model import Tacotron2
from scripts import bench_data, bench_step, compare_runs, synthesize
from tests.conftest import TINY


@pytest.fixture
def run(tmp_path, settings, monkeypatch):
    """A trained run of two epochs, its decoder cut off after 20 frames."""
    options = ["-o", str(tmp_path / "run"), "--hparams", settings + "epochs=2,max_decoder_steps=20"]
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    train.main()
    return tmp_path / "run"


def call(main, monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    main()


def test_compare_runs_reads_what_training_records(run, monkeypatch, capsys):
    capsys.readouterr()
    call(compare_runs.main, monkeypatch, run, run)
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first == second and "| run |" in first.replace("  ", "") and "+0.0 %" in first
    epochs, zpr, _, batches = (cell.strip() for cell in first.split("|")[2:6])
    assert epochs == "2/2" and 0 < float(zpr) < 100 and float(batches) <= 3


def test_synthesize_speaks_each_text(run, tmp_path, monkeypatch, capsys):
    checkpoint, speech = run / "checkpoint_best.pt", tmp_path / "speech"
    call(synthesize.main, monkeypatch, "One tone.", "2 tones!", "-c", checkpoint, "-o", speech)
    assert capsys.readouterr().out.count("cut off: it never stopped") == 2
    names = {f"{i}.{end}" for i in (1, 2) for end in ("wav", "png", "npy")}
    assert {path.name for path in speech.iterdir()} == names
    assert np.load(speech / "1.npy").shape == (10, 20)
    samples, rate = soundfile.read(speech / "1.wav")
    assert rate == 22050 and len(samples) == 19 * 276
    change = ("--hparams", "max_decoder_steps=10")
    call(synthesize.main, monkeypatch, "Tone.", "-c", checkpoint, "-o", speech, *change)
    assert np.load(speech / "1.npy").shape == (10, 10)


def test_synthesize_refuses_text_without_words(run, tmp_path, monkeypatch):
    options = ("-c", run / "checkpoint_best.pt", "-o", tmp_path / "out")
    with pytest.raises(UserError, match=r"text '\.\.\.' has nothing to speak"):
        call(synthesize.main, monkeypatch, "fine", "...", *options)
    with pytest.raises(UserError, match="another model"):
        call(synthesize.main, monkeypatch, "fine", *options, "--hparams", "prenet_dim=9")
    assert not (tmp_path / "out").exists()


def test_synthesize_takes_nvidias_checkpoint(tmp_path, monkeypatch, capsys):
    """It has weights of the full size, and no settings of ours."""
    model = Tacotron2(HParams())
    torch.nn.init.constant_(model.decoder.gate_layer.linear_layer.bias, 100)  # stops at once
    save_checkpoint(tmp_path / "theirs.pt", {"iteration": 1, "state_dict": model.state_dict()})
    call(synthesize.main, monkeypatch, "Hm.", "-c", tmp_path / "theirs.pt", "-o", tmp_path / "out")
    assert np.load(tmp_path / "out" / "1.npy").shape == (80, 1)
    assert "1.wav: 0.0 s, nothing to hear: it stopped at once" in capsys.readouterr().out


def test_settings_of_another_version_are_named(run, monkeypatch):
    state = load_checkpoint(run / "checkpoint_best.pt")
    save_checkpoint(run / "old.pt", {**state, "hparams": {"gone": 1}})
    with pytest.raises(
        UserError, match=r"old\.pt: has settings that this version does not know \(gone\)"
    ):
        call(synthesize.main, monkeypatch, "fine", "-c", run / "old.pt")


SMALL = TINY.partition(",")[2]  # bench_step.py chooses the decoder


def test_bench_step_times_each_implementation(tmp_path, monkeypatch, capsys):
    path = tmp_path / "bench.json"
    options = [
        "--batch_sizes",
        "2",
        "--frames",
        "8",
        "12",
        "--rounds",
        "1",
        "--implementations",
        "nvidia",
        "scan",
        "scan+bf16",
        "nvidia+bf16",
    ]
    call(bench_step.main, monkeypatch, *options, "--hparams", SMALL, "--json", path)
    printed = capsys.readouterr().out
    for name in ("nvidia", "scan", "scan+bf16", "nvidia+bf16"):
        assert printed.count(f"| {name} |") == 2
    rows = json.loads(path.read_text())["rows"]
    assert [row["frames"] for row in rows] == [8, 12]
    for row in rows:
        for result in row["results"].values():
            assert result["forward"] > 0 and result["backward"] > 0 and result["peak_gib"] >= 0
            assert result["step"] >= result["fastest"]


def test_bench_step_walks_an_epoch(tmp_path, monkeypatch, capsys):
    lengths = tmp_path / "lengths.csv"
    clips = [f"{i},{5 + i % 30},{2 + i % 7}\n" for i in range(64)]
    lengths.write_text("".join(["id,frames,characters\n", *clips]))
    options = ("--epoch", lengths, "--frames_column", "frames", "--batches", "2")
    options += ("--implementations", "scan", "--hparams", SMALL, "--json", tmp_path / "bench.json")
    call(bench_step.main, monkeypatch, *options)
    assert "RAND: 4 batches" in capsys.readouterr().out
    rand, efficient = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert (rand["batching"], efficient["batching"]) == ("RAND", "SSB-DBS-BR")
    for row in (rand, efficient):
        assert row["seconds"] > 0 and row["batches_timed"] == 2
        assert 0 < row["share_of_padded_frames_timed"] < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rounds 0", "--rounds 0: use 1 or more"),
        ("--batch_sizes 2 0", "--batch_sizes 0: use 1 or more"),
        ("--hparams n=1", "unknown setting 'n'"),
        ("--hparams decoder=scan", "setting 'decoder' is given twice"),
        ("--implementations scan scan", "one is named twice"),
        (f"--frames 4 --batch_sizes 2 --hparams {SMALL}n_symbols=1", "nvidia: .*'from'"),
        ("--epoch nowhere.csv", "nowhere.csv: cannot be read"),
        ("--implementations fast", "invalid choice: 'fast'"),
        (
            "--implementations scan scan+bf16 --hparams precision=fp32",
            "'precision' is given twice",
        ),
        ("--json nowhere/x.json", "nowhere: no such folder"),
        ("--batches 3", "--batches 3: goes with --epoch"),
    ],
)
def test_bench_step_names_what_is_wrong(monkeypatch, capsys, options, message):
    with pytest.raises(UserError, match=message):
        call(bench_step.main, monkeypatch, *options.split())
    if "--epoch" in options:
        assert not capsys.readouterr().out  # no table is begun


def test_bench_data_times_every_part(monkeypatch, capsys):
    options = [
        "--clips",
        "20",
        "--repeats",
        "1",
        "--workers",
        "0",
        "--frames_per_second",
        "1000000",
    ]
    call(bench_data.main, monkeypatch, *options)
    printed = capsys.readouterr().out
    assert "clips/s" in printed
    assert printed.count("| cached | 0 |") == printed.count("| computed | 0 |") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--corpus nowhere", "nowhere/metadata.csv: no such file"),
        ("--clips 0", "--clips 0: use 1 or more"),
        ("--clips 15", "--clips 15: use 16 or more"),
        ("--workers -1", "--workers -1: use 0 or more"),
    ],
)
def test_bench_data_names_what_is_wrong(monkeypatch, options, message):
    with pytest.raises(UserError, match=message):
        call(bench_data.main, monkeypatch, *options.split())
