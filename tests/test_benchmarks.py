"""The benchmarks run, print what they measured, and refuse what they cannot use."""

import os
import re
import signal
import sys
from contextlib import nullcontext

import pytest
import torch

import model
from benchmarks import bench_data, bench_step
from benchmarks.bench_step import Trainer, noise_batch, open_pool, take_step
from benchmarks.soak import MODEL
from cli import UserError

SHAPE = [2, 2], [4, 3]


@pytest.fixture
def bench(monkeypatch, capsys):
    """Call a benchmark; returns what it prints."""

    def call(benchmark, options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["benchmark", *options.split()])
        benchmark.main()
        return capsys.readouterr().out

    return call


@pytest.fixture
def in_process(monkeypatch):
    """Steps are taken in this process, which is faster. There is no memory for "reference"."""

    def open_pool(name: str, *options) -> nullcontext:
        return nullcontext(None if name == "reference" else Trainer(name, *options[:2]))

    monkeypatch.setattr(bench_step, "open_pool", open_pool)
    monkeypatch.setattr(bench_step, "take_step", lambda pool, shape: pool and pool.step(shape))


def rows(printed: str) -> dict[str, list[float]]:
    """The numbers of each row: forward, backward and together, ratio, GiB and perhaps a ratio."""
    lines = re.findall(r"^\| ([\w -]+ \| [\w+]+) \|(.*)$", printed, re.M)
    return {label: [float(number) for number in re.findall(r"[\d.]+", row)] for label, row in lines}


def test_bench_step_times_each_implementation_in_its_process(bench):
    options = f"--batch_sizes 2 --frames 4 --rounds 1 --hparams {MODEL}"
    table = rows(bench(bench_step, f"{options} --implementations nvidia scan+bf16"))
    assert list(table) == ["2 x 4 | nvidia", "2 x 4 | scan+bf16"]
    for forward, backward, together, ratio, *_ in table.values():
        assert forward > 0 and backward > 0 and ratio > 0
        assert together == pytest.approx(forward + backward, abs=0.002)


def test_a_step_that_fails_or_is_killed_leaves_the_others():
    """In one process, whose memory is limited to what is free."""
    with open_pool("nvidia", MODEL, False) as pool:
        with pytest.raises(RuntimeError, match="Kernel size"):
            take_step(pool, ([0], [4]))
        assert take_step(pool, SHAPE)[0] > 0
        (process,) = pool._processes
        os.kill(process, signal.SIGKILL)
        assert take_step(pool, SHAPE) is None
    with open_pool("nvidia", MODEL, False) as pool:
        assert take_step(pool, ([2], [10**10])) is None  # too large
        assert take_step(pool, SHAPE) is None


def test_bench_step_goes_on_without_what_runs_out_of_memory(bench, in_process):
    options = f"--batch_sizes 2 --frames 4 8 --hparams {MODEL}"
    table = rows(bench(bench_step, f"{options} --implementations reference scan nvidia+bf16"))
    for frames in (4, 8):
        assert table[f"2 x {frames} | reference"] == []
        assert all(table[f"2 x {frames} | {name}"][2] > 0 for name in ("scan", "nvidia+bf16"))


def test_nvidias_loop_computes_the_same_and_drops(monkeypatch):
    names = ("encoder", "prenet", "attention", "decoder", "postnet")
    without = ",".join([MODEL, *(f"p_{name}_dropout=0" for name in names)])

    def loss(implementation: str, overrides: str) -> float:
        trainer = Trainer(implementation, overrides)
        batch = noise_batch(trainer.hparams, *SHAPE)
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


def test_bench_step_walks_an_epoch_of_ljspeech(bench, in_process):
    options = "--epoch --train_size 64 --batches 1 --implementations scan"
    printed = bench(bench_step, f"{options} --hparams {MODEL}")
    assert "RAND: 4 batches" in printed and printed.count("; 1 batches timed") == 2
    table = rows(printed)
    assert list(table) == ["RAND | scan", "SSB-DBS-BR | scan"]
    assert all(row[2] > 0 for row in table.values())


def test_bench_data_times_every_part(bench):
    threads = torch.get_num_threads()
    options = "--clips 16 --repeats 1 --workers 0 --frames_per_second 1000000"
    printed = bench(bench_data, options)
    assert printed.count("clips/s") == 2 and "collate: " in printed
    assert len(re.findall(r"^\| 0 \|.* [\d.]+% \|$", printed, re.M)) == 1
    assert torch.get_num_threads() == threads


REFUSED = [
    (bench_step, "--rounds 0", "--rounds: 0: .* 1 or more"),
    (bench_step, "--batch_sizes 2 0", "--batch_sizes: 0: .* 1 or more"),
    (bench_step, "--hparams n=1", "unknown setting 'n'"),
    (bench_step, "--hparams decoder=scan", "'decoder' is given twice"),
    (bench_step, "--hparams precision=fp32", "'precision' is given twice"),
    (bench_step, "--implementations fast", "invalid choice: 'fast'"),
    (bench_step, "--batches 3", "--batches .*--epoch"),
    (bench_data, "--corpus nowhere", "nowhere/metadata.csv: no such file"),
    (bench_data, "--clips 0", "--clips: 0: .* 1 or more"),
    (bench_data, "--clips 15", "--clips 15: use 16 or more"),
    (bench_data, "--workers -1", "num_workers=-1: use 0 or more"),
]


@pytest.mark.parametrize(("benchmark", "options", "message"), REFUSED)
def test_nothing_is_printed_before_a_refusal(bench, capsys, benchmark, options, message):
    with pytest.raises(UserError, match=message):
        bench(benchmark, options)
    assert not capsys.readouterr().out
