"""The benchmarks run, print what they measured, and refuse what they cannot use."""

import collections
import os
import re
import signal
import sys
from contextlib import nullcontext

import pytest
import torch
from conftest import NO_DROPOUT, write_tone

import model
from benchmarks import (
    bench_data,
    bench_griffin_lim,
    bench_intelligibility,
    bench_step,
    gpu_report,
)
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
    with open_pool("nvidia", MODEL, False) as killed, open_pool("nvidia", MODEL, False) as full:
        with pytest.raises(RuntimeError, match="Kernel size"):
            take_step(killed, ([0], [4]))
        assert take_step(killed, SHAPE)[0] > 0
        os.kill(*killed._processes, signal.SIGKILL)
        assert take_step(killed, SHAPE) is None
        assert take_step(full, ([2], [10**10])) is None  # too large
        assert take_step(full, SHAPE) is None


def test_bench_step_goes_on_without_what_runs_out_of_memory(bench, in_process):
    options = f"--batch_sizes 2 --frames 4 8 --hparams {MODEL}"
    table = rows(bench(bench_step, f"{options} --implementations reference scan nvidia+bf16"))
    for frames in (4, 8):
        assert table[f"2 x {frames} | reference"] == []
        assert all(table[f"2 x {frames} | {name}"][2] > 0 for name in ("scan", "nvidia+bf16"))


def test_nvidias_loop_computes_the_same_and_drops(monkeypatch):
    def loss(implementation: str, **dropout: float) -> float:
        rates = ",".join(f"{name}={p}" for name, p in {**NO_DROPOUT, **dropout}.items())
        trainer = Trainer(implementation, f"{MODEL},{rates}")
        is_nvidias = isinstance(trainer.model.decoder, bench_step.NvidiaDecoder)
        assert is_nvidias == implementation.startswith("nvidia")
        batch = noise_batch(trainer.hparams, *SHAPE)
        return trainer.loss_function(trainer.model(batch), batch).objective.item()

    reference = loss("reference")
    for name in ("Decoder", "dropout", "_drop"):
        monkeypatch.setattr(model, name, getattr(model, name))  # restored after the test
    bench_step.use_nvidias_code()
    assert loss("nvidia") == pytest.approx(reference, rel=1e-5)
    assert loss("nvidia+bf16") == pytest.approx(reference, rel=0.05)
    for part in ("prenet", "attention", "decoder"):
        assert loss("nvidia", **{f"p_{part}_dropout": 0.9}) != pytest.approx(reference, rel=1e-5)


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


def test_bench_griffin_lim_measures_both_presets(bench, tmp_path, monkeypatch):
    """Phases of more iterations are closer; a tone is nearly recovered."""
    monkeypatch.setattr(bench_griffin_lim, "ITERATIONS", (1, 30))
    monkeypatch.setattr(bench_griffin_lim, "MOMENTA", (0,))
    write_tone(tmp_path / "tone.wav", 0.3)
    printed = bench(bench_griffin_lim, f"{tmp_path}/tone.wav")
    rows = [
        line.split("|") for line in printed.splitlines() if re.match(r"\| (paper|nvidia)", line)
    ]
    assert len(rows) == 2 * 8
    for preset in ("paper", "nvidia"):
        few, many = (float(row[7]) for row in rows if preset in row[1] and " 0 " in row[5])
        assert 0 < many < few < 1


def test_word_errors_are_words_left_out_added_or_replaced():
    sentence = ["the", "old", "judge", "slept"]
    for heard, n in (
        ("the old judge slept", 0),
        ("the judge slept", 1),
        ("the old old judge slept", 1),
        ("a old judge wept", 2),
        ("", 4),
    ):
        assert bench_intelligibility.errors(sentence, heard.split()) == n
        assert bench_intelligibility.errors(heard.split(), sentence) == n
    model = bench_intelligibility.language_model(collections.Counter("aab"), n_sentences=1)
    rows = re.findall(r"^(-[\d.]+) (\S+) 0$", model, re.M)
    chances = {word: 10 ** float(logarithm) for logarithm, word in rows if word != "<s>"}
    assert chances == pytest.approx({"</s>": 0.25, "a": 0.5, "b": 0.25}, rel=1e-3)


REFUSED = [
    (bench_griffin_lim, "none.wav", r"none\.wav: cannot be read \(.*\); name wav files"),
    (bench_step, "--rounds 0", "--rounds: 0: .* 1 or more"),
    (bench_step, "--batch_sizes 2 0", "--batch_sizes: 0: .* 1 or more"),
    (bench_step, "--hparams n=1", "unknown setting 'n'"),
    (bench_step, "--hparams decoder=scan", "decoder follows --implementations; leave it out"),
    (bench_step, "--hparams precision=fp32", "precision follows --implementations"),
    (bench_step, "--implementations fast", "invalid choice: 'fast'"),
    (bench_step, "--batches 3", "--batches .*--epoch"),
    (bench_intelligibility, "none.txt folder", r"pocketsphinx.*; pip install pocketsphinx"),
    (bench_data, "--corpus nowhere", "nowhere: no such folder"),
    (bench_data, "--clips 0", "--clips: 0: .* 1 or more"),
    (bench_data, "--clips 15", "--clips 15: use 16 or more"),
    (bench_data, "--workers -1", "num_workers=-1: use 0 or more"),
]


@pytest.mark.parametrize(("benchmark", "options", "message"), REFUSED)
def test_nothing_is_printed_before_a_refusal(
    bench, capsys, monkeypatch, benchmark, options, message
):
    monkeypatch.setitem(sys.modules, "pocketsphinx", None)  # as if it were missing
    with pytest.raises(UserError, match=message):
        bench(benchmark, options)
    assert not capsys.readouterr().out


def test_the_gpu_report_goes_on_after_a_part_that_fails(tmp_path, monkeypatch, capsys):
    def fail(smoke: bool) -> gpu_report.Rows:
        raise RuntimeError("no kernel image\nis available")

    parts = {"One": gpu_report.checks, "Two": fail, "Three": lambda _: [{"ms": 1234.5678}]}
    monkeypatch.setattr(gpu_report, "PARTS", parts)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # main() does; this puts it back
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--smoke", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^FAILED: Two; see above$"):
        gpu_report.main()
    report = (tmp_path / "report.md").read_text()
    assert "| RuntimeError: no kernel image is available |" in report and "| 1,234.57 |" in report
    assert re.search(r"\| second \| [\d.]+ \| (scan|triton) \|  \|", report)
    assert '"Three"' in (tmp_path / "report.json").read_text()


def test_an_epoch_with_a_batch_that_does_not_fit_has_no_time(monkeypatch):
    def timed(name: str, shapes: list, *_, **__) -> gpu_report.Rows:
        return [{"ms": "out of memory" if len(frames) > 16 else 60.0} for _, frames in shapes]

    monkeypatch.setattr(gpu_report, "timed", timed)
    times = {row["batching"]: row["min/epoch"] for row in gpu_report.epochs(smoke=True)}
    assert times["RAND"] > 0 and times["SSB-DBS-BR"] != times["SSB-DBS-BR"]
