"""plot_batching.py: its table, its pictures, and the lengths that it reads."""

from itertools import product

import numpy as np
import pytest
import soundfile

from batching import STRATEGIES, Batching, batch_statistics, plan_batches, read_batching
from hparams import HParams, create_hparams, format_overrides
from scripts import plot_batching, results

LENGTHS = np.random.default_rng(7).integers(96, 870, 200)


def test_the_table_has_the_means_over_seeds_and_the_pictures_are_drawn(tmp_path, capsys):
    np.savetxt(tmp_path / "lengths.txt", LENGTHS, "%d")
    settings = {"batch_size": 8, "lrf": 0.2, "bucket_size": 64, "n_bins": 5}
    options = ["--hparams", format_overrides(settings), "--seeds=3", f"--output_dir={tmp_path}/new"]
    plot_batching.main([f"{tmp_path}/lengths.txt", *options])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    for line, (dynamic, strategy) in zip(rows, product((False, True), STRATEGIES), strict=True):
        settings["dynamic_batch_size"] = dynamic
        plans = [plan_batches(LENGTHS, strategy, seed=seed, **settings) for seed in range(3)]
        epochs = [batch_statistics(LENGTHS, plan) for plan in plans]
        n_batches, zpr, _, abl, *_ = np.mean(epochs, axis=0)
        assert line.startswith(f"| {strategy}{'-DBS' * dynamic} | ")
        for cell in (f"{n_batches:,.1f}", f"{100 * zpr:.2f}", f"{abl:,.1f}"):
            assert f" | {cell} ± " in line
    assert [path.read_bytes()[:4] for path in (tmp_path / "new").iterdir()] == [b"\x89PNG"] * 4


@pytest.mark.parametrize("name", results.PAPER.index)
def test_ljspeech_pads_as_in_the_paper(name):
    (clips,) = plot_batching.ljspeech_samples(1)
    strategy, dynamic, _ = read_batching(name)
    plan = plan_batches(clips, strategy, dynamic_batch_size=dynamic)
    epoch, paper = batch_statistics(clips, plan), results.PAPER.loc[name]
    if not dynamic:  # docs/results.md says why it differs with DBS
        assert epoch.n_batches == paper.n_batches
    assert 100 * epoch.zpr == pytest.approx(paper.zpr, abs=0.3)
    assert epoch.abl == pytest.approx(paper.abl, abs=4)


def test_lengths_are_numbers_one_a_line_or_the_frames_of_a_filelists_clips(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(22050), 22050)
    path, hparams = tmp_path / "lengths.txt", HParams(data_dir=str(tmp_path))
    for text, lengths in (
        ("\ufeff5\r\n 7 \r\n\r\n6\r\n", [5, 7, 6]),
        ("5.284\n12\n.001\n", [528, 1200, 1]),  # seconds, as frames of 10 ms
        ("a.wav|one\n", [22050 // 276 + 1]),
    ):
        path.write_text(text, encoding="utf-8")
        assert plot_batching.read_lengths(path, hparams).tolist() == lengths


def test_a_name_with_dbs_and_br_is_its_three_settings_also_with_a_hyphen(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "reverse-SB", STRATEGIES["SB"])
    for parts in product(("SSB", "reverse-SB"), (False, True), (False, True)):
        batching = Batching(*parts)
        hparams = create_hparams(f"batching={batching}")
        assert tuple(getattr(hparams, name) for name in Batching._fields) == batching
    names = {name for strategy in STRATEGIES.values() for name in strategy.settings}
    settings = {name: getattr(HParams, name) for name in names}
    rows = plot_batching.table([LENGTHS] * 2, settings)
    assert any(row.startswith("| reverse-SB-DBS |") for row in rows)


@pytest.mark.parametrize("name", ["", "SBB", "RAND-BR", "SB-BR-DBS", "SB-DBS-DBS", "-DBS", "SB-"])
def test_what_is_no_batching_is_refused(name):
    with pytest.raises(ValueError, match=f"^batching={name}: use one of RAND, SB, "):
        read_batching(name)
