"""plot_batching.py: its table, its pictures, and the lengths that it reads."""

import re
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import soundfile
from matplotlib.figure import Figure
from matplotlib.text import Text

from batching import STRATEGIES, batch_statistics, plan_batches, solve_randomness
from cli import UserError
from corpus import lengths
from scripts import plot_batching

LENGTHS = np.random.default_rng(7).integers(96, 870, 200)


@pytest.fixture
def plot(monkeypatch, capsys, tmp_path) -> Callable[..., str]:
    """``plot(*arguments)``: what the script prints, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["plot_batching.py", *arguments])
        plot_batching.main()
        return capsys.readouterr().out

    return call


def test_the_table_and_the_pictures_are_of_the_plans(plot, monkeypatch):
    texts = {}

    def savefig(figure: Figure, path: Path, **_: object) -> None:
        texts[path.stem] = {text.get_text() for text in figure.findobj(Text)}

    monkeypatch.setattr(Figure, "savefig", savefig)
    np.savetxt("lengths.txt", LENGTHS, "%d")
    settings = {"batch_size": 8, "lrf": 0.2, "bucket_size": 64, "n_bins": 5}
    options = [f"--{name}={value}" for name, value in settings.items()]
    out = plot("lengths.txt", *options, "--seeds=3")
    rows = [line for line in out.splitlines() if line.startswith("|")][2:]
    for line, (dynamic, strategy) in zip(rows, product((False, True), STRATEGIES), strict=True):
        plans = [
            plan_batches(LENGTHS, strategy, dynamic_batch_size=dynamic, seed=seed, **settings)
            for seed in range(3)
        ]
        epochs = [batch_statistics(LENGTHS, plan) for plan in plans]
        batches, zpr, of_data, abl, total, largest, _ = np.transpose(epochs)
        if not dynamic and strategy == "RAND":
            random = np.mean(total), np.mean(of_data) + 1
        saved = np.mean(total) / random[0], (np.mean(of_data) + 1) / random[1]
        saved = ", ".join(f"{100 * (1 - share):.1f} %" for share in saved)
        assert line.startswith(f"| {strategy}{'-DBS' * dynamic} | ")
        assert line.endswith(f" | {np.mean(largest):,.0f} | {saved} |")
        percent = (100 * zpr, 2), (100 * of_data, 2)
        for values, digits in ((batches, 1), *percent, (abl, 1), (total, 0)):
            mean, sd = np.mean(values), np.std(values, ddof=1)
            assert f" | {mean:,.{digits}f} ± {sd:,.{digits}f} |" in line

    few = lengths.subset(LENGTHS, 48, 0)
    for name in ("figure1", "figure3"):
        epoch = batch_statistics(few, plan_batches(few, "SSB", 8, name == "figure3", lrf=0.15))
        assert f"ZPR {epoch.zpr:.1%}, ABL {epoch.abl:.0f}, {epoch.n_batches} batches" in texts[name]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n", [1, 50])
def test_few_clips_and_clips_of_one_length_are_drawn_without_a_warning(plot, n):
    Path("a.txt").write_text("5\n" * n)
    plot("a.txt", "--seeds=2", "--lrf=0", "--batch_size=60", "--output_dir=new/here")
    pictures = [path.read_bytes()[:4] for path in Path("new/here").iterdir()]
    assert pictures == [b"\x89PNG"] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ljspeech_in_fixed_batches_pads_as_in_the_paper(strategy):
    clips = lengths.subset(lengths.ljspeech_lengths(276), 10_480, 0)
    epoch = batch_statistics(clips, plan_batches(clips, strategy, dynamic_batch_size=False))
    n_batches, zpr, abl = map(float, plot_batching.PAPER[strategy].split(", "))
    assert epoch.n_batches == n_batches
    assert 100 * epoch.zpr == pytest.approx(zpr, abs=0.3)
    assert epoch.abl == pytest.approx(abl, abs=4)


def test_a_wanted_padding_chooses_the_parameters(plot, monkeypatch):
    monkeypatch.setattr(plot_batching, "draw_all", lambda *_: None)
    np.savetxt("lengths.txt", LENGTHS, "%d")
    out = plot("lengths.txt", "--seeds=2", "--batch_size=8", "--target_zpr=0.1")
    for strategy, setting in (("SSB", "LRF {}"), ("BKT", "bucket size {}"), ("ATS", "{} bins")):
        value = solve_randomness(LENGTHS, strategy, 0.1, batch_size=8, dynamic_batch_size=True)
        assert f"| {strategy} | {setting.format(f'{value:g}')} | " in out


def test_frames_of_one_hop_become_frames_of_another(monkeypatch, tmp_path):
    n_samples = np.random.default_rng(3).integers(20_000, 220_000, 500)
    path = tmp_path / "lengths.csv"
    np.savetxt(path, n_samples // 256 + 1, "%d", header="frames_hop256", comments="")
    monkeypatch.setattr(lengths, "LJSPEECH_LENGTHS", path)
    assert (lengths.ljspeech_lengths(256) == n_samples // 256 + 1).all()
    error = lengths.ljspeech_lengths(276) - (n_samples // 276 + 1)
    assert np.abs(error).max() <= 1 and abs(error.mean()) < 0.1


@pytest.mark.parametrize(
    ("text", "column", "wanted"),
    [
        ("\ufeff5\r\n 7 \r\n\r\n6\r\n", None, [5, 7, 6]),
        ("frames\n5\n7\n", None, [5, 7]),
        ('id,frames,letters\n"a, 1",5,50\na-2,7,70\n', "letters", [50, 70]),
        ("path\tduration[ms]\na b.mp3\t750\nc.mp3\t471\n", "duration[ms]", [750, 471]),
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


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "5.1\n\nsix\n7\n0\n",
            "",
            "lengths.csv:3: 'six': give a number above 0, ",
        ),
        ("id,n\na,5\n", "--column=m", "lengths.csv: has no column m; give --column one of id, n"),
        ("5\n6\n", "--lrf=inf", "--lrf=inf: use 0 to 1e6"),
    ],
)
def test_bad_lengths_and_options_are_refused_in_one_line(plot, text, options, message):
    Path("lengths.csv").write_text(text)
    with pytest.raises(UserError, match=f"^{re.escape(message)}.*$"):
        plot("lengths.csv", *options.split())
