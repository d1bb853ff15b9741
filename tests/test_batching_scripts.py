"""plot_batching.py: its table, its pictures, and the lengths that it reads."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import soundfile

from batching import STRATEGIES, batch_statistics, plan_batches
from cli import UserError
from hparams import HParams, create_hparams, format_overrides
from scripts import plot_batching

LENGTHS = np.random.default_rng(7).integers(96, 870, 200)


@pytest.fixture
def plot(monkeypatch, capsys, tmp_path) -> Callable[..., str]:
    """``plot(*arguments)``: what the script prints, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    np.savetxt("lengths.txt", LENGTHS, "%d")

    def call(*arguments: str) -> str:
        plot_batching.main(arguments)
        return capsys.readouterr().out

    return call


def test_the_table_has_the_means_over_seeds_and_the_pictures_are_drawn(plot):
    settings = {"batch_size": 8, "lrf": 0.2, "bucket_size": 64, "n_bins": 5}
    options = ["--hparams", format_overrides(settings), "--seeds=3", "--output_dir=new/here"]
    out = plot("lengths.txt", *options)
    rows = [line for line in out.splitlines() if line.startswith("|")][2:]
    for line, (dynamic, strategy) in zip(rows, product((False, True), STRATEGIES), strict=True):
        settings["dynamic_batch_size"] = dynamic
        plans = [plan_batches(LENGTHS, strategy, seed=seed, **settings) for seed in range(3)]
        epochs = [batch_statistics(LENGTHS, plan) for plan in plans]
        n_batches, zpr, _, abl, *_ = np.mean(epochs, axis=0)
        assert line.startswith(f"| {strategy}{'-DBS' * dynamic} | ")
        for cell in (f"{n_batches:,.1f}", f"{100 * zpr:.2f}", f"{abl:,.1f}"):
            assert f" | {cell} ± " in line
    pictures = [path.read_bytes()[:4] for path in Path("new/here").iterdir()]
    assert pictures == [b"\x89PNG"] * 4


@pytest.mark.parametrize("batching", [*plot_batching.PAPER.index])
def test_ljspeech_pads_as_in_the_paper(batching):
    (clips,) = plot_batching.ljspeech_samples(1)
    strategy, *operations = batching.split("-")
    plan = plan_batches(clips, strategy, dynamic_batch_size="DBS" in operations)
    epoch, paper = batch_statistics(clips, plan), plot_batching.PAPER.loc[batching]
    if "DBS" not in operations:  # docs/results.md says why it differs with DBS
        assert epoch.n_batches == paper.n_batches
    assert 100 * epoch.zpr == pytest.approx(paper.zpr, abs=0.3)
    assert epoch.abl == pytest.approx(paper.abl, abs=4)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\ufeff5\r\n 7 \r\n\r\n6\r\n", [5, 7, 6]),
        ("5.284\n12\n.001\n", [528, 1200, 1]),  # seconds, as frames of 10 ms
    ],
)
def test_lengths_are_numbers_one_a_line(tmp_path, text, wanted):
    path = tmp_path / "lengths.txt"
    path.write_text(text, encoding="utf-8")
    assert plot_batching.read_lengths(path, HParams()).tolist() == wanted


def test_lengths_are_the_frames_of_a_filelists_clips(tmp_path):
    for name, n_samples in (("a.wav", 22050), ("b.wav", 44100)):
        soundfile.write(tmp_path / name, np.zeros(n_samples), 22050)
    (tmp_path / "list.txt").write_text("a.wav|one\nb.wav|two\n")
    hparams = create_hparams(f"data_dir={tmp_path}")
    lengths = plot_batching.read_lengths(tmp_path / "list.txt", hparams)
    assert lengths.tolist() == [22050 // 276 + 1, 44100 // 276 + 1]


def test_a_bad_length_is_refused_with_its_line(plot):
    Path("bad.txt").write_text("5.1\n\nsix\n7\n")
    with pytest.raises(UserError, match=r"^bad\.txt:3: 'six': give a number above 0, .*$"):
        plot("bad.txt")
