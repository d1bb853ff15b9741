"""How runs are averaged and compared; and that docs/results.md has what its records say."""

import itertools
import json
import math
import re
from collections.abc import Iterable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from scipy import stats

from batching import read_batching
from cli import UserError
from hparams import HParams
from scripts import results

NAN = float("nan")


def write_run(folder, name="RAND", seed=0, losses=(1.0,) * 4, first=0, **changed) -> Path:
    """A run from epoch ``first`` on that is validated every two epochs. ``changed``: settings, and
    what the run recorded of its start and its epochs."""
    settings = vars(HParams()) | {"seed": seed, "epochs": first + 2 * len(losses)}
    settings |= read_batching(name)._asdict()
    start = {"event": "start", "epoch": first, "device": "CPU", "threads": 2, "decoder": "scan"}
    start |= {"torch": "2.13", "training_frames": 540, "validation_frames": 60}
    epoch = {"zpr": 0.1, "abl": 50.0, "n_batches": 4, "total_length": 1000, "minutes": 1.0}
    for recorded in (start, settings, epoch):
        recorded |= {key: changed.pop(key) for key in set(recorded) & set(changed)}
    assert not changed
    records = [start]
    for i, loss in enumerate(losses):
        last = first + 2 * i + 1
        records += [{"event": "epoch", "epoch": e, **epoch} for e in (last - 1, last)]
        values = {"loss": loss, "masked_loss": 2 * loss, "diagonality": 0.5}
        values = {key: None if math.isnan(value) else value for key, value in values.items()}
        records.append({"event": "validation", "epoch": last, **values})
    path = folder / name / f"seed{seed}"
    path.mkdir(parents=True)
    (path / "hparams.json").write_text(json.dumps(settings))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.fixture
def printed(capsys):
    """Calls results.py and returns what it printed."""

    def printed(*arguments) -> str:
        results.main([*map(str, arguments)])
        return capsys.readouterr().out

    return printed


def tables(text: str) -> list[dict[str, dict[str, str]]]:
    """The tables in Markdown: first cell of a row: heading: cell."""
    found = []
    for part in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = [[c.strip() for c in line.split("|")[1:-1]] for line in part.splitlines()]
        found.append({row[0]: dict(zip(head, row, strict=True)) for row in rows})
    return found


def test_tables_2_to_4_have_the_means_over_seeds_beside_the_papers(tmp_path, printed):
    write_run(tmp_path, "SB", 0, [6.0] * 4, zpr=0.01, total_length=500)
    for seed, end in ((0, 1.0), (1, 3.0)):
        losses = [8.0, 5.0, 2.0, end]
        write_run(tmp_path, "RAND", seed, losses, minutes=2.0 + seed, zpr=0.3 + seed / 50)
    write_run(tmp_path, "SSB", 0, [4.0] * 4, minutes=2.0)
    runs, table2, table3, table4 = tables(printed(tmp_path, "--figure", tmp_path / "new/figure4"))
    assert list(runs) == list(table2) == ["RAND", "SB", "SSB"]
    # VL1 after 4 of 8 epochs: (8 + 5 + 2) / 3. VL2 after 6: (5 + 2 + end) / 3, 2.667 and 3.333.
    # VL3 after 8: (2 + end) / 2, 1.5 and 2.5. VLavg: (5 + 2 + end) / 3.
    expected = {
        "ZPR %": "31.00 ± 1.00 (32.02)",
        "ABL": "50.00 ± 0.00 (773.82)",
        "min/epoch": "2.500 ± 0.500 (32.820)",
        "VL1": "5.000 ± 0.000 (0.340)",
        "VL2": "3.000 ± 0.333 (0.323)",
        "VL3": "2.000 ± 0.500 (0.312)",
        "VLavg": "3.000 ± 0.333 (0.325)",
    }
    assert expected.items() <= table2["RAND"].items()
    assert runs["RAND"]["validation loss"] == "2.0000 ± 1.0000"
    assert table3["SB"]["time saved %"] == "60.00 (33.97)"
    assert table3["SB"]["fewer decoder steps %"] == "50.00"
    assert table4["SB → SSB"]["reduction %"] == "33.33 (6.75)"  # from 6 to 4
    assert (tmp_path / "new/figure4").stat().st_size > 10_000


def test_losses_are_smoothed_at_the_papers_stages_as_far_as_they_are_known(tmp_path):
    seeds = itertools.count()

    def stages(losses: Iterable[float], **changed: object) -> pd.Series:
        run = write_run(tmp_path, "RAND", next(seeds), losses, **changed)
        return results.pick_stages(results.read_run(run))

    for first in (0, 30):  # 30: from a checkpoint
        line = stages(range(2, 222, 2), first=first)  # so the mean of three is the middle one
        assert line.to_list()[:3] == [100, 160, 219]
    losses = [100.0, 90.0, 80.0, 60.0, 50.0, 40.0, 30.0, 20.0, 10.0, 8.0, 6.0]
    # After 10 epochs: 60, 50, 40; after 16: 30, 20, 10; after 22: 8, 6 and no next.
    assert stages(losses).to_list() == pytest.approx([50, 20, 7, 164 / 7])
    assert stages(losses[:8], epochs=22).isna().to_list() == [False, True, True, True]
    assert stages(losses[:3]).isna().all()  # smoothing would average all


def test_what_differs_is_a_column_and_so_are_rates_and_conditions(tmp_path, printed):
    write_run(tmp_path, "RAND", 0, batch_size=16)
    changes = {"batch_size": 4, "learning_rate": 2e-3}
    write_run(tmp_path, "SB", 0, **changes, torch="2.14")
    write_run(tmp_path, "SB", 1, **changes, max_decoder_steps=2000)  # which tells no runs apart
    text = printed(tmp_path)
    assert "The runs had different learning rates: 0.001, 0.002." in text
    row = tables(text)[0]["SB"]
    assert list(row)[1:6] == ["batch_size", "learning_rate", "seeds", "torch", "epochs"]
    assert list(row.values())[1:6] == ["4", "0.002", "2", "2.14, 2.13", "8/8"]
    write_run(tmp_path / "again", "SB", 1, **changes)
    with pytest.raises(UserError, match="has the settings and seed of another run; name one of"):
        printed(tmp_path)


@pytest.mark.parametrize("damaged", ['{"event": "st', "5", "\0\0", '{"epoch": 1}'])
def test_a_damaged_record_is_named_by_its_line(tmp_path, printed, damaged):
    metrics = write_run(tmp_path, "RAND", 0, [3.0]) / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([lines[0], damaged, *lines[1:], ""]))
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: cannot be read .*; mend it, or name"):
        printed(tmp_path)


def test_a_number_that_not_all_seeds_have_is_left_open(tmp_path, printed):
    """So is the end of a run of some hours, until it is decided."""
    write_run(tmp_path, "RAND", 0, [3.0, 2.0, 1.0, 0.5])
    unfinished = write_run(tmp_path, "RAND", 1, [3.0, 4.0], epochs=8)
    write_run(tmp_path, "SB", 0, [3.0, NAN, NAN, NAN])
    decided = write_run(tmp_path, "SSB", 0, [5.0] * 4, hours=8.0, epochs=220)
    write_run(tmp_path, "ATS", 0, [], hours=8.0, epochs=220)
    end = '{"event": "end", "epoch": 7, "hours": 8.0, "epochs": 8}\n'
    for run, line in ((unfinished, '{"event": "epo'), (decided, end)):
        with open(run / "metrics.jsonl", "a") as file:
            file.write(line)
    runs, table2, *_ = tables(printed(tmp_path, "--figure", tmp_path / "figure4"))
    assert [row["epochs"] for row in runs.values()] == ["8/8, 4/8", "8/8", "8/8", "0/?"]
    losses = [row["validation loss"] for row in runs.values()]
    assert losses == ["2.2500 ± 1.7500", "–", "5.0000", "–"]
    known = {"RAND": "– (0.312)", "SB": "– (0.385)", "SSB": "5.000 (0.359)", "ATS": "–"}
    assert {name: row["VL3"] for name, row in table2.items()} == known


# docs/results.md and the records beside it


@pytest.fixture(scope="module")
def comparisons() -> ModuleType:
    spec = spec_from_file_location("comparisons", ROOT / "docs/results/comparisons.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_change_from_a_shared_start_is_that_of_a_randomised_block_design(comparisons):
    losses = comparisons.final_losses("shortest_first", "loss")
    logs = np.log(losses.unstack("arm"))
    table = logs.to_numpy()  # seeds x experiments, complete
    residuals = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    df = (len(table) - 1) * (table.shape[1] - 1)
    sd = math.sqrt((residuals**2).sum() / df)
    difference = (logs["SSB-DBS-BR"] - logs["RAND"]).mean()
    for n_joint in (1, 3):
        half = stats.t(df).ppf(1 - 0.025 / n_joint) * sd * math.sqrt(2 / len(table))
        expected = 100 * np.expm1([difference, difference - half, difference + half])
        change = comparisons.change(losses, "RAND → SSB-DBS-BR", n_joint, shared_start=True)
        assert change == pytest.approx(expected)


def test_a_change_from_nothing_has_the_spread_pooled_over_all_arms(comparisons):
    runs = {"A": [3.0, 4.0, 5.0], "B": [1.0, 3.0], "C": [2.0, 2.0, 8.0], "D": [7.0]}
    keys = [(arm, seed) for arm, values in runs.items() for seed in range(len(values))]
    index = pd.MultiIndex.from_tuples(keys, names=["arm", "seed"])
    values = pd.Series(np.concatenate([*runs.values()]), index)
    variance = (2 + 2 + 24) / (2 + 1 + 2)  # squares and degrees of freedom of A, B and C
    half = stats.t(5).ppf(1 - 0.025 / 6) * math.sqrt(variance * (1 / 3 + 1 / 2))
    change = comparisons.change(values, "A → B", 6, ratio=False)
    assert change == pytest.approx([-2, -2 - half, -2 + half])


def test_a_verdict_follows_the_interval(comparisons):
    for words, *cases in (
        ("yes", (-1, -2.8, -0.04), (1, 1.0, 3.0), (0, -1.9, 1.9)),
        ("undecided", (-1, -2.8, 0.04), (1, -1.0, 3.0), (0, -1.9, 2.1)),
        ("no", (-1, 1.0, 2.0), (1, -2.0, -1.0), (0, 2.1, 3.0)),
    ):
        assert [comparisons.verdict(*case) for case in cases] == [words] * 3


def test_every_interval_of_the_report_is_printed(comparisons, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # plot_batching.py writes to runs/
    comparisons.main(tmp_path)
    printed = capsys.readouterr().out
    for page, at_least in (("docs/results.md", 20), ("docs/results/appendix.md", 60)):
        report = (ROOT / page).read_text(encoding="utf-8")
        intervals = set(re.findall(r"[-+][\d.]+ \([-+][\d.]+ to [-+][\d.]+\)", report))
        assert len(intervals) >= at_least and {x for x in intervals if x not in printed} == set()
