"""plot_batching.py: its table, its pictures, and the lengths that it reads."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import soundfile

from batching import STRATEGIES, batch_statistics, plan_batches, solve_randomness
from cli import UserError
from corpus import lengths
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
    options = [f"--{name}={value}" for name, value in settings.items()]
    out = plot("lengths.txt", *options, "--seeds=3", "--output_dir=new/here")
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


@pytest.mark.parametrize("batching", [*STRATEGIES, "SB-DBS", "SSB-DBS"])
def test_ljspeech_pads_as_in_the_paper(batching):
    clips = lengths.subset(lengths.ljspeech_lengths(276), 10_480, 0)
    strategy, _, dynamic = batching.partition("-")
    plan = plan_batches(clips, strategy, dynamic_batch_size=bool(dynamic))
    epoch = batch_statistics(clips, plan)
    n_batches, zpr, abl = map(float, plot_batching.PAPER[batching].split(", "))
    assert dynamic or epoch.n_batches == n_batches  # docs/results.md says why it differs with DBS
    assert 100 * epoch.zpr == pytest.approx(zpr, abs=0.3)
    assert epoch.abl == pytest.approx(abl, abs=4)


def test_a_wanted_padding_chooses_the_parameters(plot, monkeypatch):
    monkeypatch.setattr(plot_batching, "draw_all", lambda *_: None)
    out = plot("lengths.txt", "--seeds=2", "--batch_size=8", "--target_zpr=0.1")
    lrf = solve_randomness(LENGTHS, "SSB", 0.1, batch_size=8, dynamic_batch_size=True)
    assert f"| SSB | LRF {lrf:g} | " in out


@pytest.mark.parametrize(
    ("text", "column", "wanted"),
    [
        ("\ufeff5\r\n 7 \r\n\r\n6\r\n", None, [5, 7, 6]),
        ('id,frames,letters\n"a, 1",5,50\na-2,7,70\n', "letters", [50, 70]),
        ("5.284\n12\n.001\n", None, [528, 1200, 1]),  # seconds, as frames of 10 ms
    ],
)
def test_lengths_are_a_column_of_a_file(tmp_path, text, column, wanted):
    path = tmp_path / "lengths.csv"
    path.write_text(text, encoding="utf-8")
    assert lengths.read_lengths(path, column).tolist() == wanted


def test_lengths_of_a_folder_are_those_of_its_audio(tmp_path):
    (tmp_path / "in").mkdir()
    clips = {"b.wav": (8000, 1), "in/c.flac": (16000, 2.5), "a.ogg": (8000, 0.5)}
    for name, (rate, seconds) in clips.items():
        soundfile.write(tmp_path / name, np.zeros(int(rate * seconds)), rate)
    (tmp_path / "text.txt").write_text("5")
    assert lengths.read_lengths(tmp_path).tolist() == [50, 100, 250]


def test_a_bad_length_is_refused_with_its_line(plot):
    Path("bad.csv").write_text("5.1\n\nsix\n7\n")
    with pytest.raises(UserError, match=r"^bad\.csv:3: 'six': give a number above 0, .*$"):
        plot("bad.csv")
