"""The benchmarks go on after what fails, and NVIDIA's loop in them computes the same."""

import re
import sys
from contextlib import nullcontext

import pytest
from conftest import NO_DROPOUT

import model
from benchmarks import bench_step, gpu_report
from benchmarks.bench_step import Trainer, noise_batch
from benchmarks.soak import MODEL

SHAPE = [2, 2], [4, 3]


def rows(printed: str) -> dict[str, list[float]]:
    """The numbers of each row: forward, backward and together, ratio, GiB and perhaps a ratio."""
    lines = re.findall(r"^\| ([\w -]+ \| [\w+]+) \|(.*)$", printed, re.M)
    return {label: [float(number) for number in re.findall(r"[\d.]+", row)] for label, row in lines}


def test_bench_step_goes_on_without_what_runs_out_of_memory(monkeypatch, capsys):
    """Which "reference" does here. Steps are taken in this process, which is faster."""

    def open_pool(name: str, *options) -> nullcontext:
        return nullcontext(None if name == "reference" else Trainer(name, *options[:2]))

    monkeypatch.setattr(bench_step, "open_pool", open_pool)
    monkeypatch.setattr(bench_step, "take_step", lambda pool, shape: pool and pool.step(shape))
    options = f"--batch_sizes 2 --frames 4 8 --rounds 1 --hparams {MODEL}"
    options += " --implementations reference scan nvidia+bf16"
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *options.split()])
    bench_step.main()
    table = rows(capsys.readouterr().out)
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


STUB = """
import torch
from layers import get  # NVIDIA's module of that name, not ours
from utils import get_mask_from_lengths

class Tacotron2(torch.nn.Module):
    def __init__(self, hparams):
        super().__init__()
        assert get() == "theirs" and hparams.n_frames_per_step == 1
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, inputs):
        text, text_lengths, mel, max_len, mel_lengths = inputs
        mask = get_mask_from_lengths(mel_lengths)
        assert max_len == text.size(1) and mask.shape == mel[:, 0].shape
        return [mel + self.bias, mel, mask + self.bias, torch.ones(*mask.shape, max_len)]
"""


def test_nvidias_own_model_is_timed_beside_modules_of_the_same_names(tmp_path):
    (tmp_path / "model.py").write_text(STUB)
    (tmp_path / "layers.py").write_text("def get():\n    return 'theirs'\n")
    (tmp_path / "utils.py").write_text("def get_mask_from_lengths(lengths):\n    lengths.cuda()\n")
    trainer = Trainer("nvidia", MODEL, nvidia=str(tmp_path))
    assert trainer.step(([5, 3], [9, 6]))[2] > 0
    assert trainer.model.model.bias.grad != 0
    assert sys.modules["model"] is model


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
