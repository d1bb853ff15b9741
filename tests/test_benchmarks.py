"""The benchmarks run, print what they measured, and refuse what they cannot use."""

import json
import os
import re
import signal
import sys
from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch

import model
from benchmarks import bench_data, bench_step
from benchmarks.bench_step import Shape, Trainer, open_pool, take_step
from benchmarks.soak import MODEL
from cli import UserError
from scripts.lengths import LJSPEECH_LENGTHS, ljspeech_lengths

OPTIONS = Namespace(hparams=MODEL, threads=1, no_onednn=False, epoch=None)
SHAPE = Shape([4, 3], [2, 2])


def set_arguments(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])


@pytest.fixture
def bench(monkeypatch, capsys, tmp_path):
    """Call bench_step.py; returns what it prints and its JSON."""

    def call(*arguments) -> tuple[str, list[dict]]:
        path = tmp_path / "bench.json"
        set_arguments(monkeypatch, *arguments, "--hparams", MODEL, "--json", path)
        bench_step.main()
        return capsys.readouterr().out, json.loads(path.read_text())["rows"]

    return call


@pytest.fixture
def in_process(monkeypatch):
    """Steps are taken in this process, which is faster."""
    monkeypatch.setattr(bench_step, "open_pool", lambda *options: nullcontext(Trainer(*options)))
    monkeypatch.setattr(bench_step, "take_step", Trainer.step)


# Steps


def test_bench_step_times_each_implementation_in_its_process(bench):
    names = ("nvidia", "scan+bf16")
    options = ("--batch_sizes", 2, "--frames", 4, "--rounds", 1, "--implementations", *names)
    printed, (row,) = bench(*options)
    assert (row["batch_size"], row["frames"], tuple(row["results"])) == (2, 4, names)
    for name, result in row["results"].items():
        assert printed.count(f"| 2 | 4 | {name} |") == 1
        assert result["forward"] > 0 and result["backward"] > 0 and result["peak_gib"] >= 0
        assert result["step"] >= result["fastest"]


def test_a_step_that_fails_or_is_killed_leaves_the_others():
    """In one process, whose memory is limited to what is free."""
    with open_pool("nvidia", OPTIONS) as pool:
        assert take_step(pool, SHAPE).forward > 0
        assert take_step(pool, Shape([10**10], [2])) is None  # too large
        with pytest.raises(UserError, match="nvidia: "):
            take_step(pool, Shape([4], [0]))
        assert take_step(pool, SHAPE).forward > 0
        (process,) = pool._processes
        os.kill(process, signal.SIGKILL)
        assert take_step(pool, SHAPE) is None


def test_bench_step_goes_on_without_what_runs_out_of_memory(bench, in_process, monkeypatch):
    def step(trainer: Trainer, shape: Shape) -> bench_step.Step | None:
        return None if trainer.implementation == "scan" else trainer.step(shape)

    monkeypatch.setattr(bench_step, "take_step", step)
    monkeypatch.setattr(Trainer, "shutdown", lambda self: None, raising=False)
    names = ("scan", "reference", "nvidia+bf16")
    printed, rows = bench("--batch_sizes", 2, "--frames", 4, 8, "--implementations", *names)
    assert [row["frames"] for row in rows] == [4, 8]
    for row in rows:
        assert row["results"]["scan"] is None
        assert all(row["results"][name]["step"] > 0 for name in names[1:])
        assert f"| 2 | {row['frames']} | scan | out of memory |" in printed


def test_nvidias_loop_computes_the_same_and_drops(monkeypatch):
    names = ("encoder", "prenet", "attention", "decoder", "postnet")
    without = ",".join([MODEL, *(f"p_{name}_dropout=0" for name in names)])

    def loss(implementation: str, hparams: str) -> float:
        trainer = Trainer(implementation, Namespace(hparams=hparams, epoch=None))
        batch = bench_step.noise(SHAPE, trainer.hparams)
        return trainer.loss_function(trainer.model(batch), batch).objective.item()

    reference = loss("reference", without)
    for name in ("Decoder", "dropout", "_drop"):
        monkeypatch.setattr(model, name, getattr(model, name))  # restored after the test
    bench_step.use_nvidias_code()
    assert loss("nvidia", without) == pytest.approx(reference, rel=1e-5)
    assert loss("nvidia+bf16", without) == pytest.approx(reference, rel=0.05)
    for name in ("prenet", "attention", "decoder"):
        dropped = without.replace(f"p_{name}_dropout=0", f"p_{name}_dropout=0.9")
        assert loss("nvidia", dropped) != pytest.approx(reference, rel=1e-5)


# Epochs


def test_bench_step_walks_an_epoch(bench, in_process, tmp_path):
    lengths = tmp_path / "lengths.csv"
    clips = [f"{i},{5 + i % 30},{2 + i % 7}\n" for i in range(64)]
    lengths.write_text("".join(["id,frames,characters\n", *clips]))
    options = ("--epoch", lengths, "--frames_column", "frames", "--batches", 2)
    printed, rows = bench(*options, "--implementations", "scan")
    assert "RAND: 4 batches" in printed
    assert [row["batching"] for row in rows] == ["RAND", "SSB-DBS-BR"]
    for row in rows:
        assert row["seconds"] > 0 and row["batches_timed"] == 2
        assert 0 < row["share_of_padded_frames_timed"] < 1


def test_an_epoch_is_ljspeechs_unless_another_is_named(monkeypatch):
    def read(*arguments) -> list[list[int]]:
        set_arguments(monkeypatch, *arguments)
        return [lengths.tolist() for lengths in bench_step.read_clips(bench_step.parse_args())]

    frames, characters = read("--epoch")
    assert frames == ljspeech_lengths(276).tolist() and len(characters) == 13_100
    assert 5 < sum(frames) / sum(characters) < 6  # 15 characters a second
    path = os.path.relpath(LJSPEECH_LENGTHS)
    assert read("--epoch", path, "--hop_from", 256, "--hop_to", 276) == [frames, characters]
    assert read("--epoch", "--hop_to", 512)[0] == ljspeech_lengths(512).tolist()


# Data


def test_bench_data_times_every_part(monkeypatch, capsys):
    options = ("--clips", 16, "--repeats", 1, "--workers", 0, "--frames_per_second", 1_000_000)
    set_arguments(monkeypatch, *options)
    threads = torch.get_num_threads()
    bench_data.main()
    printed = capsys.readouterr().out
    assert printed.count("clips/s") == 2 and "collate: " in printed
    for mels in ("cached", "computed"):
        assert len(re.findall(rf"^\| {mels} \| 0 \|.* [\d.]+% \|$", printed, re.M)) == 1
    assert torch.get_num_threads() == threads


# Refusals


@pytest.mark.parametrize(
    ("benchmark", "options", "message"),
    [
        (bench_step, "--rounds 0", "--rounds: 0: use a whole number, 1 or more"),
        (bench_step, "--batch_sizes 2 0", "--batch_sizes: 0: use a whole number, 1 or more"),
        (bench_step, "--warmup -1", "--warmup -1: use 0 or more"),
        (bench_step, "--hparams n=1", "unknown setting 'n'"),
        (bench_step, "--hparams decoder=scan", "setting 'decoder' is given twice"),
        (bench_step, "--implementations scan scan", "one is named twice"),
        (bench_step, "--epoch nowhere.csv", "nowhere.csv: cannot be read"),
        (bench_step, "--implementations fast", "invalid choice: 'fast'"),
        (
            bench_step,
            "--implementations scan scan+bf16 --hparams precision=fp32",
            "'precision' is given twice",
        ),
        (bench_step, "--json nowhere/x.json", "nowhere: no such folder"),
        (bench_step, "--batches 3", "--batches 3: goes with --epoch"),
        (bench_data, "--corpus nowhere", "nowhere/metadata.csv: no such file"),
        (bench_data, "--clips 0", "--clips: 0: use a whole number, 1 or more"),
        (bench_data, "--clips 15", "--clips 15: use 16 or more"),
        (bench_data, "--workers -1", "--workers -1: use 0 or more"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_printed(
    monkeypatch, capsys, benchmark, options, message
):
    set_arguments(monkeypatch, *options.split())
    with pytest.raises(UserError, match=message):
        benchmark.main()
    assert not capsys.readouterr().out
