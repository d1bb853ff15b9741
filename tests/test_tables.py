"""Tables, conclusions and figures from records with known answers."""

import argparse
import csv
import dataclasses
import json
import os
import subprocess
import sys

import pytest

from cli import UserError
from hparams import HParams
from scripts import figures, tables
from scripts.paper import EXPERIMENTS, PAPER, experiment_name, experiment_settings

CPU = {"device": "CPU: a fast one", "threads": 2, "decoder": "scan", "precision": "fp32"}
CPU |= {"torch": "2.13.0"}


def write_run(
    folder, experiment, seed, losses, minutes=1.0, steps=1000, frames=540, start=None, **settings
):
    """A run that was validated every two epochs, with these losses; ``start`` differs from CPU."""
    hparams = HParams(**{"seed": seed, **experiment_settings(experiment), **settings})
    path = folder / experiment / f"seed{seed}"
    path.mkdir(parents=True)
    (path / "hparams.json").write_text(json.dumps(dataclasses.asdict(hparams)))
    records = []
    if start is not None:
        records.append({"event": "start", "epoch": 0, "step": 0, **CPU, **start})
    for epoch in range(2 * len(losses)):
        values = {"minutes": minutes, "zpr": 0.1, "abl": 50.0, "n_batches": 4}
        values |= {
            "total_length": steps,
            "frames_per_second": frames / minutes / 60,
            "peak_memory_gib": 1.0,
        }
        records.append({"event": "epoch", "epoch": epoch, "step": epoch, **values})
        if epoch % 2:
            loss = losses[epoch // 2]
            values = {"loss": loss, "masked_loss": 2 * loss, "diagonality": 0.5}
            records.append({"event": "validation", "epoch": epoch, "step": epoch, **values})
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def write_paper(folder, scatter=0.0005, **changed):
    """Three seeds of every experiment that end at the paper's VL3, or at those ``changed``."""
    for name, row in PAPER.items():
        end = changed.get(name.replace("-", "_"), row["vl3"])
        for k in (-1, 0, 1):
            # 60 % above the end at first, then down in proportion to the epochs.
            losses = [end * (1 + k * scatter) * (1 + 0.6 * (1 - i / 22)) for i in range(21)]
            losses += [end * (1 + k * scatter)] * 2  # so that smoothing leaves the end
            losses = losses[1:]
            write_run(folder, name, 1000 * (k + 1), losses, row["minutes"], epochs=44)


def call(main, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    main()


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_names_of_experiments_and_their_settings_agree():
    for name in EXPERIMENTS:
        assert experiment_name(experiment_settings(name)) == name
    assert experiment_name(dataclasses.asdict(HParams())) == "SSB-DBS-BR"
    assert experiment_name(experiment_settings("RAND-BR")) == "RAND"


def test_stages_are_the_papers_fractions_of_the_epochs(tmp_path):
    for planned, expected in ((220, [100, 160, 220]), (44, [20, 32, 44]), (3, [2, 2, 3])):
        folder = tmp_path / str(planned)
        write_run(folder, "RAND", 0, [1.0], epochs=planned)
        series = tables.plan_series(tables.load_runs([folder]))
        assert [series.epochs[i] for i in series.stages] == expected
        assert series.epochs[-1] == planned


def test_losses_are_smoothed_with_their_neighbours_and_averaged(tmp_path, monkeypatch, capsys):
    losses = [100.0, 90.0, 80.0, 60.0, 50.0, 40.0, 30.0, 20.0, 10.0, 8.0, 6.0]  # of 22 epochs
    write_run(tmp_path, "RAND", 0, losses, epochs=22)
    call(tables.main, monkeypatch, tmp_path)
    (row, *_) = read_csv(tmp_path / "tables" / "table2.csv")
    assert float(row["vl1"]) == 50.0  # after 10 epochs: 60, 50, 40
    assert float(row["vl2"]) == 20.0  # after 16: 30, 20, 10
    assert float(row["vl3"]) == 7.0  # after 22: 8, 6 and no next
    assert float(row["vl_avg"]) == pytest.approx(164 / 7, rel=1e-5)
    assert float(row["masked3"]) == 14.0 and row["vl3_error"] == ""
    assert float(row["zpr"]) == 10 and float(row["zpr_paper"]) == 32.02
    assert "no run of SB-BR" in capsys.readouterr().out


def test_an_unfinished_run_gives_what_it_has(tmp_path, monkeypatch, capsys):
    write_run(tmp_path, "RAND", 0, [5.0, 4.0, 3.0, 2.0, 1.0], epochs=10)
    path = write_run(tmp_path, "SB", 0, [5.0, 4.0, 3.0], epochs=10)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"event": "epo')  # of a run that goes on
    begun = write_run(tmp_path, "SSB", 0, [], epochs=10)
    (begun / "metrics.jsonl").unlink()
    call(tables.main, monkeypatch, tmp_path)
    rows = {row["experiment"]: row for row in read_csv(tmp_path / "tables" / "table2.csv")}
    assert float(rows["SB"]["vl1"]) == 4.0 and rows["SB"]["vl2"] == rows["SB"]["vl3"] == ""
    assert float(rows["RAND"]["vl3"]) == 1.5 and rows["SSB"]["minutes"] == ""
    output = capsys.readouterr().out
    assert f"{path}: 6 of 10 epochs" in output and f"{begun}: 0 of 10 epochs" in output
    call(figures.main, monkeypatch, tmp_path)


def test_errors_are_standard_errors_over_seeds(tmp_path, monkeypatch):
    for seed, loss in ((0, 1.0), (1, 2.0), (2, 3.0)):
        write_run(tmp_path, "RAND", seed, [loss] * 5, minutes=loss, epochs=10)
        write_run(tmp_path, "SB", seed, [loss] * 5, minutes=loss * (0.5 + 0.1 * seed), epochs=10)
    call(tables.main, monkeypatch, tmp_path)
    row = read_csv(tmp_path / "tables" / "table2.csv")[0]
    assert float(row["vl3"]) == 2.0 and float(row["vl3_error"]) == pytest.approx(3**-0.5, rel=1e-5)
    rows = {row["experiment"]: row for row in read_csv(tmp_path / "tables" / "table3.csv")}
    # 0.5, 1.2 and 2.1 minutes against 1, 2 and 3: 36.7 % less, the relative errors added in square.
    error = 100 * 1.9 / 3 * ((0.8020806 / 3**0.5 / (3.8 / 3)) ** 2 + (1 / 3**0.5 / 2) ** 2) ** 0.5
    assert float(rows["SB"]["percent"]) == pytest.approx(100 * (1 - 1.9 / 3), rel=1e-4)
    assert float(rows["SB"]["percent_error"]) == pytest.approx(error, rel=1e-4)
    assert "2.000 ± 0.577" in (tmp_path / "tables" / "table2.md").read_text()


def test_the_papers_table_2_gives_its_tables_3_and_4_and_its_conclusions(
    tmp_path, monkeypatch, capsys
):
    write_paper(tmp_path)
    call(tables.main, monkeypatch, tmp_path)
    for row in read_csv(tmp_path / "tables" / "table3.csv"):
        assert float(row["percent"]) == pytest.approx(float(row["percent_paper"]), abs=0.02)
    reductions = []
    for row in read_csv(tmp_path / "tables" / "table4.csv"):
        reductions.append(float(row["reduction_percent"]))
        assert reductions[-1] == pytest.approx(float(row["reduction_percent_paper"]), abs=0.02)
        assert float(row["low"]) < reductions[-1] < float(row["high"])
    assert reductions == pytest.approx(
        [6.75, 2.15, 1.21, 15.58, 11.42, 5.21, 14.29, 9.19, 2.83], abs=0.02
    )
    report = (tmp_path / "tables" / "conclusions.md").read_text()
    assert report.count("**supported**") == 5
    assert report.count("| -1.2 |") == 1  # SSB-BR after BKT-BR, by the paper's VL3
    assert "Missing" not in capsys.readouterr().out


def verdicts(tmp_path, monkeypatch):
    call(tables.main, monkeypatch, tmp_path)
    report = (tmp_path / "tables" / "conclusions.md").read_text()
    return [line.split("**")[1] for line in report.splitlines() if line[:1].isdigit()]


def test_other_losses_contradict_a_conclusion(tmp_path, monkeypatch):
    write_paper(tmp_path, SSB_DBS_BR=0.32, ATS_BR=0.35)
    assert verdicts(tmp_path, monkeypatch) == [
        "contradicted", "supported", "contradicted", "supported", "contradicted",
    ]  # fmt: skip


def test_a_spread_as_large_as_the_differences_decides_nothing(tmp_path, monkeypatch):
    write_paper(tmp_path, scatter=0.3)
    assert verdicts(tmp_path, monkeypatch) == ["not decidable at this scale"] * 5


def test_one_seed_decides_nothing(tmp_path, monkeypatch):
    for name, row in PAPER.items():
        write_run(tmp_path, name, 0, [row["vl3"]] * 5, epochs=10)
    assert verdicts(tmp_path, monkeypatch) == ["not decidable at this scale"] * 5


def test_two_seeds_of_one_experiment_decide_nothing(tmp_path, monkeypatch):
    for name, row in PAPER.items():
        write_run(tmp_path, name, 0, [row["vl3"]] * 5, epochs=10)
    write_run(tmp_path, "RAND", 1, [PAPER["RAND"]["vl3"] * 1.001] * 5, epochs=10)
    assert verdicts(tmp_path, monkeypatch) == ["not decidable at this scale"] * 5


def test_conclusions_about_runs_that_are_not_there_name_them(tmp_path, monkeypatch):
    for name in ("RAND", "SSB-DBS-BR"):
        write_run(tmp_path, name, 0, [1.0] * 5, epochs=10)
    found = verdicts(tmp_path, monkeypatch)
    assert found == ["not run", "not run", "not decidable at this scale", "not run", "not run"]
    report = (tmp_path / "tables" / "conclusions.md").read_text()
    assert "(needs SSB-BR, BKT-BR, ATS-BR)" in report


def test_intervals_are_students(tmp_path):
    losses = {"A": [1.0, 1.1, 1.21], "B": [2.0]}
    figures = {e: dict(enumerate({"vl3": v} for v in values)) for e, values in losses.items()}
    evidence = tables.Evidence(figures, "vl3")
    middle, half = evidence.contrast(tables.change("A", "B"))
    # ln 1.1 apart: sd ln 1.1 with 2 degrees of freedom, whose 97.5 % quantile is 4.3027.
    assert middle == pytest.approx(0.5978370, abs=1e-6)  # ln(2 / 1.1)
    assert half == pytest.approx(4.3026527 * 0.0953102 * (1 / 3 + 1) ** 0.5, rel=1e-5)
    assert evidence.contrast({"C": 1.0}) is None
    wide = evidence.contrast(tables.change("A", "B"), checks=2)[1]
    assert wide / half == pytest.approx(6.2053468 / 4.3026527, rel=1e-6)  # 98.75 % quantile


def test_rand_in_anothers_time_is_its_loss_when_the_other_ends(tmp_path):
    losses = [10.0, 9.0, 8.0, 7.0, 6.0]  # after 2, 4, ... 10 epochs
    for name, minutes in (("RAND", 4.0), ("SB", 3.0), ("SSB", 5.0)):
        write_run(tmp_path, name, 0, losses, minutes, epochs=10)
    args = argparse.Namespace(runs=[tmp_path], timing=None, output=tmp_path / "out")
    runs, series, figures, _ = tables.read_series(args)
    found = tables.equal_time(figures, runs, series)
    # SB ends when RAND has done 7.5 epochs: the mean of its loss then and two epochs before.
    assert found["RAND in SB's time"] == [pytest.approx((7.25 + 8.25) / 2)]
    # RAND ends before SSB does, and stays where it is.
    assert found["RAND in SSB's time"] == found["RAND in RAND's time"] == [6.5]


def test_a_run_that_diverged_is_left_out_and_named(tmp_path, monkeypatch, capsys):
    write_paper(tmp_path)
    path = write_run(tmp_path, "SB", 5, [float("nan")] * 22, epochs=44)
    assert verdicts(tmp_path, monkeypatch) == ["supported"] * 5
    assert f"{path}: has diverged, and is left out" in capsys.readouterr().out


def test_runs_in_several_folders_are_one_series(tmp_path, monkeypatch):
    for seed in (0, 1):
        write_run(tmp_path / str(seed), "RAND", seed, [1.0, 1.0], epochs=4)
    call(tables.main, monkeypatch, tmp_path / "0", tmp_path / "1", "--output", tmp_path / "both")
    assert read_csv(tmp_path / "both" / "table2.csv")[0]["seeds"] == "2"


@pytest.mark.parametrize(
    ("starts", "reason"),
    [
        # The first two are RAND's, whose first seed is the first to be named.
        ([{}, {}, {"decoder": "reference"}], "{1} trained with decoder=scan; {2} trained with "),
        ([{}, {"device": "H100"}, {}], "{0}, {2} trained with device=CPU: a fast one; {1} train"),
        ([{}, {"threads": 1, "torch": "2.14"}, {}], "threads=1, torch=2.14"),
        ([{"precision": "tf32"}, {}, {}], "{0} trained with precision=tf32; {1}, {2} trained with"),
        ([{}, {}, None], "{2} trained with device=unknown, threads=unknown, torch=unknown"),
    ],
)
def test_times_of_unequal_conditions_are_not_compared(
    tmp_path, monkeypatch, capsys, starts, reason
):
    for case, of_case in (("equal", [{}, {}, {}]), ("unknown", [None] * 3), ("unequal", starts)):
        paths = []
        for (name, seed), start in zip((("RAND", 0), ("RAND", 1), ("SB", 0)), of_case, strict=True):
            folder = tmp_path / case
            paths.append(
                write_run(folder, name, seed, [1.0] * 5, 4.0 - seed, epochs=10, start=start)
            )
        call(tables.main, monkeypatch, folder)
        printed = capsys.readouterr().out
        call(figures.main, monkeypatch, folder)
        drawn = capsys.readouterr().out
        rows = {row["experiment"]: row for row in read_csv(folder / "tables/table2.csv")}
        saved = {row["experiment"]: row for row in read_csv(folder / "tables/table3.csv")}
        assert rows["SB"]["vl3"] == "1" and rows["SB"]["n_batches"] == "4"
        if case != "unequal":
            assert rows["SB"]["minutes"] == "4" and saved["SB"]["percent"] != ""
            assert "not compared" not in printed and drawn.count("wrote ") == 3
            continue
        for name in ("RAND", "SB"):
            assert rows[name]["minutes"] == rows[name]["speed"] == rows[name]["memory"] == ""
        assert saved["SB"]["minutes"] == saved["SB"]["percent"] == ""
        assert saved["SB"]["steps_percent"] == "0"
        line = next(s for s in printed.splitlines() if s.startswith("*Times are not compared: "))
        assert reason.format(*paths) in line
        for file in ("table2", "table3", "conclusions"):
            text = (folder / "tables" / f"{file}.md").read_text()
            assert "Times are not compared: " in text
        assert "| RAND in SSB-BR's time → SSB-BR | lower | – |" in text
        assert drawn.count("not drawn: ") == 2 and "wrote " in drawn
        assert "loss_over_time.png: Times are not compared: " in drawn


def test_a_run_resumed_elsewhere_has_times_of_two_machines(tmp_path, monkeypatch, capsys):
    for name in ("RAND", "SB"):
        path = write_run(tmp_path, name, 0, [1.0] * 5, epochs=10, start={})
    records = (path / "metrics.jsonl").read_text().splitlines()
    start = json.dumps({"event": "start", "epoch": 9, "step": 9, **CPU, "device": "H100"})
    (path / "metrics.jsonl").write_text("\n".join([*records, start, ""]))
    call(tables.main, monkeypatch, tmp_path)  # no epoch has followed yet
    assert "not compared" not in capsys.readouterr().out
    (path / "metrics.jsonl").write_text("\n".join([*records[:8], start, *records[8:], ""]))
    call(tables.main, monkeypatch, tmp_path)
    assert f"{path} trained with device=CPU: a fast one; {path} " in capsys.readouterr().out


def test_only_the_times_that_are_used_have_to_be_of_equal_conditions(tmp_path, monkeypatch, capsys):
    for name, decoder in (("RAND", "scan"), ("SB", "reference")):
        write_run(tmp_path / "a", name, 0, [1.0] * 5, epochs=10, start={"decoder": decoder})
        write_run(tmp_path / "b", name, 0, [1.0] * 5, epochs=10, start={})
    call(tables.main, monkeypatch, tmp_path / "a", "--timing", tmp_path / "b")
    printed = capsys.readouterr().out
    assert "Times are not" not in printed and "Peak memory is not compared: " in printed
    row = read_csv(tmp_path / "a/tables/table2.csv")[0]
    assert row["minutes"] == "1" and row["memory"] == ""
    call(tables.main, monkeypatch, tmp_path / "b", "--timing", tmp_path / "a")
    assert "Times are not compared: " in capsys.readouterr().out
    row = read_csv(tmp_path / "b/tables/table2.csv")[0]
    assert row["minutes"] == "" and row["memory"] == "1"


def test_the_decoder_of_older_records_is_that_of_the_settings(tmp_path, monkeypatch, capsys):
    write_run(tmp_path, "RAND", 0, [1.0] * 5, epochs=10)
    write_run(tmp_path, "SB", 0, [1.0] * 5, epochs=10, decoder="reference")
    call(tables.main, monkeypatch, tmp_path)
    assert "RAND/seed0 trained with decoder=scan; " in capsys.readouterr().out


def test_too_few_validations_are_not_smoothed(tmp_path, monkeypatch, capsys):
    drawn, plot = [], figures.Axes.plot

    def record(axes, x, y, *more, **options):
        drawn.append(list(y))
        return plot(axes, x, y, *more, **options)

    monkeypatch.setattr(figures.Axes, "plot", record)
    for n in (2, 3, 4):
        folder, losses = tmp_path / str(n), [8.0, 4.0, 2.0, 1.0][:n]
        for name in ("RAND", "SB-BR"):
            write_run(folder, name, 0, losses, epochs=2 * n)
        call(tables.main, monkeypatch, folder)
        printed = capsys.readouterr().out
        drawn.clear()
        call(figures.main, monkeypatch, folder)
        row = read_csv(folder / "tables/table2.csv")[0]
        names = ("vl1", "vl2", "vl3", "vl_avg", "masked3", "masked_avg")
        if n < 4:
            assert drawn[0] == losses
            assert {row[name] for name in names} == {""} and row["zpr"] == "10"
            assert f"VL3 and VLavg are left out: with 3 validations or fewer (here {n})" in printed
            for table in ("table2", "conclusions"):
                text = (folder / "tables" / f"{table}.md").read_text()
                assert "VL3 and VLavg are left out" in text
            assert "**not decidable at this scale**" in text or "**not run**" in text
        else:
            assert drawn[0] == pytest.approx([6, 14 / 3, 7 / 3, 1.5])
            assert [float(row[name]) for name in names[:3]] == pytest.approx(
                [14 / 3, 7 / 3, 1.5], 1e-4
            )


def test_a_closed_pipe_leaves_the_tables_written(tmp_path):
    write_run(tmp_path, "RAND", 0, [1.0] * 5, epochs=10)
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "scripts.tables", tmp_path], stdout=writer, stderr=subprocess.PIPE,
        text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert "output pipe closed" in process.stderr
    assert "None" not in process.stderr and "Traceback" not in process.stderr
    assert len(list((tmp_path / "tables").iterdir())) == 9


def test_times_can_come_from_other_runs(tmp_path, monkeypatch):
    for name, minutes in (("RAND", 4.0), ("SB", 3.0)):
        for seed in (0, 1):
            write_run(tmp_path / "shared", name, seed, [1.0] * 5, 9.0 + seed, epochs=10)
        write_run(tmp_path / "alone", name, 7, [2.0], minutes, epochs=2)
    both = (tmp_path / "shared", "--timing", tmp_path / "alone")
    call(tables.main, monkeypatch, *both)
    rows = {row["experiment"]: row for row in read_csv(tmp_path / "shared/tables/table2.csv")}
    assert rows["RAND"]["minutes"] == "4" and rows["SB"]["minutes"] == "3"
    assert rows["SB"]["vl3"] == "1" and rows["SB"]["seeds"] == "2"
    (row, *_) = read_csv(tmp_path / "shared/tables/table3.csv")
    assert row["experiment"] == "SB-BR"
    rows = {row["experiment"]: row for row in read_csv(tmp_path / "shared/tables/table3.csv")}
    assert rows["SB"]["percent"] == "25" and rows["SB"]["minutes"] == "1"
    call(figures.main, monkeypatch, *both)


@pytest.mark.parametrize("program", [tables, figures])
def test_runs_that_do_not_compare_are_refused(tmp_path, monkeypatch, program):
    with pytest.raises(UserError, match=r"nothing: holds no run; name the output of run_all"):
        call(program.main, monkeypatch, tmp_path / "nothing")
    write_run(tmp_path / "a", "RAND", 0, [1.0], epochs=2)
    write_run(tmp_path / "b", "RAND", 0, [1.0], epochs=2)
    with pytest.raises(UserError, match=r"seed0: are both RAND with seed 0; name folders"):
        call(program.main, monkeypatch, tmp_path / "a", tmp_path / "b")
    write_run(tmp_path / "c", "SB", 0, [1.0], epochs=2, batch_size=32)
    with pytest.raises(UserError, match=r"batch_size is 16 in the one and 32 in the other"):
        call(program.main, monkeypatch, tmp_path / "a", tmp_path / "c")
    write_run(tmp_path / "d", "BKT-BR", 0, [1.0], epochs=2, bucket_size=64)
    write_run(tmp_path / "d", "BKT-BR", 1, [1.0], epochs=2)
    write_run(tmp_path / "f", "SB", 0, [1.0], epochs=2, minutes=2.0, frames=541)
    with pytest.raises(UserError, match=r"has 540 frames of speech in the one and 541 in the oth"):
        call(program.main, monkeypatch, tmp_path / "a", tmp_path / "f")
    with pytest.raises(UserError, match=r"bucket_size is 64 in the one and 1024 in the other"):
        call(program.main, monkeypatch, tmp_path / "d")
    path = write_run(tmp_path / "g", "RAND", 0, [1.0], epochs=2)
    (path / "metrics.jsonl").write_text('{"event": "validation", "epoch": 1, "loss": 1}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl: a record has no masked_loss; train the"):
        call(program.main, monkeypatch, tmp_path / "g")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "hparams.json").write_text('{"gone": 1}')
    with pytest.raises(UserError, match=r"hparams\.json: not the settings of a run of this ver"):
        call(program.main, monkeypatch, tmp_path / "e")


def test_a_table_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    write_run(tmp_path, "RAND", 0, [1.0], epochs=2)
    (tmp_path / "tables" / "table2.csv").mkdir(parents=True)
    with pytest.raises(UserError, match=r"table2\.csv: cannot be written \(Is a directory\)"):
        call(tables.main, monkeypatch, tmp_path)


def test_figures_are_drawn(tmp_path, monkeypatch):
    write_paper(tmp_path)
    write_run(tmp_path, "BKT-DBS", 0, [0.4] * 22, 20.0, 700, epochs=44)  # one of the user's own
    call(figures.main, monkeypatch, tmp_path)
    drawn = {path.name: path.stat().st_size for path in (tmp_path / "figures").iterdir()}
    assert set(drawn) == {"figure4.png", "loss_over_time.png", "time_over_steps.png"}
    assert min(drawn.values()) > 10_000


def test_figures_need_a_validation(tmp_path, monkeypatch):
    write_run(tmp_path, "RAND", 0, [], epochs=2)
    with pytest.raises(UserError, match=r"figure4\.png: no run has been validated yet"):
        call(figures.main, monkeypatch, tmp_path)


def test_a_figure_that_cannot_be_drawn_yet_leaves_the_others(tmp_path, monkeypatch, capsys):
    write_run(tmp_path, "RAND", 0, [1.0], epochs=2)
    call(figures.main, monkeypatch, tmp_path)
    output = capsys.readouterr().out
    assert output.count("wrote ") == 2
    assert "not drawn: " in output and "needs an epoch of RAND and of another" in output
