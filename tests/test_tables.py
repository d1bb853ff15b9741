"""Tables, conclusions, figures and comparisons of runs, from records with known answers."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections import defaultdict
from unittest.mock import Mock

import numpy as np
import pytest
from matplotlib.figure import Figure

from cli import UserError
from hparams import HParams
from scripts import compare_runs, figures, runs, tables
from scripts.paper import EXPERIMENTS, PAPER, experiment_name, experiment_settings

CPU = {"device": "CPU", "threads": 2, "decoder": "scan", "precision": "fp32", "torch": "2.13"}
H100 = {"device": "H100"}
EPOCH = {"event": "epoch", "zpr": 0.1, "abl": 50.0, "n_batches": 4, "total_length": 1000}
EPOCH |= {"peak_memory_gib": 1.0}
FIVE = [1.0] * 5


def write_run(folder, experiment="RAND", seed=0, losses=FIVE, minutes=1.0, starts=(), **changed):
    """A run validated every two epochs. ``starts``: of the events "start" before each two epochs,
    how they differ from CPU. ``first``: it starts from a checkpoint after so many epochs, and
    validates with batch norm re-estimated too."""
    frames, first = changed.pop("frames", 540), changed.pop("first", 0)
    epoch = EPOCH | {name: changed.pop(name) for name in EPOCH if name in changed}
    settings = {"seed": seed, "epochs": first + 2 * max(len(losses), 1), "decoder": "scan"}
    settings |= experiment_settings(experiment)
    path = folder / experiment / f"seed{seed}"
    path.mkdir(parents=True)
    (path / "hparams.json").write_text(json.dumps({**settings, **changed}))
    records, started = [], [{"event": "start", **CPU, **start} for start in starts]
    epoch |= {"minutes": minutes, "frames_per_second": frames / minutes / 60}
    for i, loss in enumerate(losses):
        last = first + 2 * i + 1
        records += [*started[i : i + 1], {**epoch, "epoch": last - 1}, {**epoch, "epoch": last}]
        values = {"loss": loss, "masked_loss": 2 * loss, "diagonality": 0.5}
        if first:
            values["precise_loss"] = loss**2
        records.append({"event": "validation", "epoch": last, **values})
    records += started[len(losses) :]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def write_paper(folder, scatter=0.0005, **changed):
    """Three seeds of every experiment that end at the paper's VL3, or at those ``changed``."""
    # From 60 % above the end down to it. The last two are equal, so that smoothing leaves the end.
    curve = [1 + 0.6 * (1 - i / 22) for i in range(1, 21)] + [1.0, 1.0]
    noise = np.random.default_rng(0).standard_normal((len(PAPER), 3))
    noise -= noise.mean(1, keepdims=True)
    for (name, row), scales in zip(PAPER.items(), np.exp(scatter * noise), strict=True):
        end = changed.get(name.replace("-", "_"), row["vl3"])
        for k, scale in enumerate(scales):
            losses = [end * scale * height for height in curve]
            write_run(folder, name, 1000 * k, losses, row["minutes"])


@pytest.fixture
def output_of(monkeypatch, capsys):
    """Calls a program and returns what it printed."""

    def output(program, *arguments):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
        program.main()
        return capsys.readouterr().out

    return output


def rows_of(printed):
    """The cells of printed tables by the first cell of their row and their heading."""
    rows, head = defaultdict(dict), None
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = cells
        elif "---" not in line:
            rows[cells[0]] |= dict(zip(head, cells, strict=True))
    return rows


def verdicts(printed):
    return re.findall(r"^\d\. .*?\*\*(.*?)\*\*", printed, re.MULTILINE)


def test_experiments_and_stages_are_the_papers(tmp_path):
    for name in EXPERIMENTS:
        assert experiment_name(experiment_settings(name)) == name
    assert experiment_name(dataclasses.asdict(HParams())) == "SSB-DBS-BR"
    assert experiment_name(experiment_settings("RAND-BR")) == "RAND"
    for planned, expected in ((220, [100, 160, 220]), (44, [20, 32, 44]), (3, [2, 2, 3])):
        epochs = runs.read_results([write_run(tmp_path / str(planned), epochs=planned)]).epochs
        assert [epochs[i] for i in runs.stages(epochs, 0)] == expected and epochs[-1] == planned


def test_losses_are_smoothed_and_averaged_as_far_as_they_are_known(tmp_path, output_of):
    losses = [100.0, 90.0, 80.0, 60.0, 50.0, 40.0, 30.0, 20.0, 10.0, 8.0, 6.0]  # of 22 epochs
    write_run(tmp_path, "RAND", 0, losses)
    path = write_run(tmp_path, "SB", 0, losses[:8], epochs=22)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"event": "epo')  # of a run that goes on
    begun = write_run(tmp_path, "SSB", 0, [], epochs=22)
    (begun / "metrics.jsonl").unlink()
    printed = output_of(tables, tmp_path)
    rows = rows_of(printed)
    # VL1, after 10 epochs: 60, 50, 40; VL2, after 16: 30, 20, 10; VL3, after 22: 8, 6 and no next.
    names = ("VL1", "VL2", "VL3", "VLavg", "masked VL3", "ZPR %")
    means = [rows["RAND"][name].split()[0] for name in names]
    assert means == ["50.000", "20.000", "7.000", "23.429", "14.000", "10.00"]
    assert [rows["SB"][name][:2] for name in names] == ["50", "– ", "– ", "– ", "–", "10"]
    assert rows["SSB"]["min/epoch"] == "– (23.06)"
    for line in (f"{path}: 16 of 22 epochs", f"{begun}: 0 of 22 epochs", "no run of SB-BR, SSB-BR"):
        assert line in printed
    assert "wrote " in output_of(figures, tmp_path)


def test_times_can_come_from_other_runs_whose_conditions_then_count(tmp_path, output_of):
    a, b = tmp_path / "a", tmp_path / "b"
    for name, decoder, minutes in (("RAND", "scan", 4.0), ("SB", "reference", 3.0)):
        write_run(a, name, 0, minutes=9.0, starts=[{"decoder": decoder}])
        write_run(a, name, 1, minutes=10.0, starts=[{"decoder": decoder}])
        write_run(b, name, 7, [2.0], minutes, starts=[{}], epochs=2, learning_rate=1e-4)
    for trained, timed, expected in ((a, b, "2 – 4.000 25.00"), (b, a, "1 1.00 – –")):
        printed = output_of(tables, trained, "--timing", timed)
        rand, sb = (rows_of(printed)[name] for name in ("RAND", "SB"))
        cells = rand["Seeds"], rand["peak memory GiB"], rand["min/epoch"], sb["saved %"]
        assert " ".join(cell.split(" ")[0] for cell in cells) == expected
        assert ("Times are not compared: " in printed) == (timed is a)
        assert ("Peak memory is not compared: " in printed) == (trained is a)
    assert output_of(figures, a, "--timing", b).count("wrote ") == 4


def test_the_papers_table_2_gives_its_tables_3_and_4_and_its_conclusions(tmp_path, output_of):
    write_paper(tmp_path)
    path = write_run(tmp_path, "SB", 5, [float("nan")] * 22, PAPER["SB"]["minutes"])
    printed = output_of(tables, tmp_path)
    assert f"Missing:\n  {path}: has diverged, and is left out\n\n" in printed
    rows = rows_of(printed)
    for name in EXPERIMENTS[1:]:
        saved, _, _, theirs = rows[name]["saved %"].split()
        assert float(saved) == pytest.approx(float(theirs.strip("()")), abs=0.021)
    table4 = printed.partition("**Table 4")[2].partition("**Table 5")[0]
    table4 = re.findall(r"\| (\S+) \((\S+) to (\S+)\) \| (\S+) \|$", table4, re.MULTILINE)
    reductions, low, high, theirs = zip(*(map(float, row) for row in table4), strict=True)
    assert all(map(float.__lt__, low, reductions)) and all(map(float.__lt__, reductions, high))
    expected = [6.75, 2.15, 1.21, 15.58, 11.42, 5.21, 14.29, 9.19, 2.83]
    for values in (reductions, theirs):
        assert values == pytest.approx(expected, abs=0.02)
    assert verdicts(printed) == ["supported"] * 5
    # RAND's own falls from 1.327 to 1 times its end as the epochs grow 2.2 times.
    assert "10 % more epochs lower RAND's loss by 3.4 % (in the paper by 1.0 %)" in printed
    assert "The time that it saves is in Table 3." in printed
    assert printed.count("| -1.2 |") == 1  # SSB-BR after BKT-BR, by the paper's VL3


def test_other_losses_contradict_and_a_large_spread_leaves_open(tmp_path, output_of):
    write_paper(tmp_path / "other", SSB_DBS_BR=0.32, ATS_BR=0.35)
    write_paper(tmp_path / "spread", scatter=0.3)
    for name, row in PAPER.items():
        for folder in ("one", "few"):
            write_run(tmp_path / folder, name, 0, [row["vl3"]] * 5)
    write_run(tmp_path / "few", "RAND", 1, [0.313] * 5)
    for folder in ("one", "few", "spread"):
        assert verdicts(output_of(tables, tmp_path / folder)) == ["open"] * 5
    no, yes = "contradicted", "supported"
    assert verdicts(output_of(tables, tmp_path / "other")) == [no, yes, no, yes, no]


@pytest.mark.parametrize(
    ("low", "high", "wanted", "theirs", "outcome"),
    [
        (-3.0, -0.1, "lower", -15.0, "holds"),
        (-1.0, 1.0, "within ±2%", -15.0, "holds"),
        (0.1, 3.0, "lower", -15.0, "fails"),
        (-3.0, -0.1, "higher", 1.0, "fails"),
        (2.1, 3.0, "within ±2%", 0.0, "fails"),
        (-1.0, 1.0, "lower", -15.0, "fails"),  # nothing worth the name, where the paper has 15 %
        (-1.0, 1.0, "lower", -0.9, "open"),  # may be what the paper has
        (-1.0, 1.0, "lower", math.nan, "open"),
        (-1.0, 3.0, "lower", -15.0, "open"),
        (math.nan, math.nan, "within ±2%", -15.0, "open"),
    ],
)
def test_an_interval_decides_where_it_can(low, high, wanted, theirs, outcome):
    assert tables.judge(low, high, wanted, theirs) == outcome


def test_chance_is_what_experiment_and_seed_do_not_explain():
    logs = np.add.outer([0.0, 1.0, 2.0, 4.0], [0.0, 0.5, -0.5])  # by experiment and seed
    chance = 0.1 * np.array([[1, -1, 0], [-1, 1, 0], [0, 0, 0], [0, 0, 0]])
    values = {
        name: {"vl3": dict(enumerate(np.exp(row)))}
        for name, row in zip("ABCD", logs + chance, strict=True)
    }
    values["A"]["vl3"] |= {7: 100.0, 8: 1.0}  # seeds that no other has: nothing is known of them
    evidence = tables.Evidence(values, "vl3")
    assert evidence.df == (4 - 1) * (3 - 1) and evidence.sd == pytest.approx((0.04 / 6) ** 0.5)
    for n_checks, quantile in ((1, 2.4469119), (2, 2.9686867)):  # two: the 98.75 % quantile
        half = quantile * evidence.sd * (2 / 3) ** 0.5
        expected = [100 * math.expm1(1 + x) for x in (0, -half, half)]
        assert evidence.contrast("A → B", n_checks) == pytest.approx(expected, rel=1e-5)
    half = 2.4469119 * evidence.sd * (4 / 3) ** 0.5
    expected = [100 * math.expm1((1 - 0) - (4 - 2) + x) for x in (0, -half, half)]
    assert evidence.contrast("(A → B) against (C → D)") == pytest.approx(expected, rel=1e-5)


def test_after_a_common_start_the_mean_over_the_last_validations_counts(tmp_path, output_of):
    for name, loss in (("SB", 2.0), ("SSB", 1.0), ("RAND", 4.0)):
        for seed in range(4):
            losses = [9.0, 9.0, loss, loss, loss, loss]
            path = write_run(tmp_path, name, seed, losses, first=12)
    printed = output_of(tables, tmp_path)
    assert "Each rests on comparisons of VLavg, the mean over the last 4 validations." in printed
    assert "| SB → SSB | lower | -2.6 | -50.0 (-50.0 to -50.0) | holds | -75.0 (" in printed
    assert (
        "validation loss after 18, 20, 24 of 24 epochs" in printed and "24 epochs\n" not in printed
    )
    same = [rows_of(printed)["SB"][f"VLavg %, same {what}"] for what in ("epochs", "time")]
    assert same == ["-50.0 (-50.0 to -50.0)"] * 2
    assert "wrote " in output_of(figures, tmp_path)
    other = write_run(tmp_path / "other", "SB-BR", losses=[1.0] * 12)
    with pytest.raises(UserError, match="one starts after 12 epochs, the other after 0"):
        output_of(tables, path, other)


def test_rand_in_anothers_time_is_its_loss_when_the_other_ends(tmp_path, output_of):
    losses = [10.0, 9.0, 8.0, 7.0, 6.0]  # after 2, 4, ... 10 epochs
    for name, minutes in (("RAND", 4), ("SSB-BR", 3), ("BKT-BR", 5), ("ATS-BR", 4)):
        write_run(tmp_path, name, 0, losses, minutes, abl=12.5 * minutes)
    printed = output_of(tables, tmp_path)
    assert rows_of(printed)["SSB-BR"]["fewer padded frames %"] == "25.00"
    # After 6 and 7.5 epochs, 8 and 7.25; to 7 and 6. In BKT-BR's time, RAND has ended before.
    for name, change in (("SSB-BR", "-14.8"), ("BKT-BR", "+0.0"), ("ATS-BR", "+0.0")):
        assert f"| RAND in {name}'s time → {name} | lower | – | {change} | open |" in printed
        row = rows_of(printed)[name]
        same = [row[f"VL3 %, same {what}"] for what in ("epochs", "updates", "time")]
        assert same == ["+0.0", "+0.0", change]


@pytest.mark.parametrize(
    ("starts", "reason"),
    [
        ({}, None),
        ({2: [{"decoder": "reference"}]}, "{1} trained with decoder=scan; {2} trained with "),
        ({1: [H100]}, "{0}, {2} trained with device=CPU; {1} trained with device=H100"),
        ({1: [{"threads": 1, "torch": "2.14"}]}, "threads=1, torch=2.14"),
        ({0: [{"precision": "tf32"}]}, "{0} trained with precision=tf32; {1}, {2} trained with"),
        # Older records have no start: the decoder and the precision are those of the settings.
        ({2: []}, "{2} trained with device=unknown, threads=unknown, torch=unknown"),
        # A resumed run has the conditions of each part in which an epoch has ended.
        ({2: [{}, H100]}, "{0}, {1}, {2} trained with device=CPU; {2} trained with device=H100"),
        ({2: [{}] * 5 + [H100]}, None),
    ],
)
def test_times_of_unequal_conditions_are_not_compared(tmp_path, output_of, starts, reason):
    names = ("RAND", "RAND", "SSB-DBS-BR")
    paths = [
        write_run(tmp_path, name, i, starts=starts.get(i, [{}])) for i, name in enumerate(names)
    ]
    printed = output_of(tables, tmp_path)
    row = rows_of(printed)["SSB-DBS-BR"]
    assert row["VL3"] == "1.000 (0.309)" and row["batches"] == "4.0 (449)"
    assert row["fewer decoder steps %"] == "0.00" and "(needs SSB-BR, BKT-BR, ATS-BR)" in printed
    assert verdicts(printed) == ["not run", "not run", "open", "not run", "not run"]
    times = ("min/epoch", "real frames/s", "peak memory GiB", "saved, min/epoch", "saved %")
    assert {row[name].startswith("–") for name in times} == {bool(reason)}
    notes = [s for s in printed.splitlines() if "Times are not compared: " in s]
    assert len(notes) == (4 if reason else 0)  # Tables 2, 3 and 5, and the conclusions
    assert ("The time that it saves" in printed) == (not reason)
    assert all(reason.format(*paths) in note for note in notes)


def test_runs_that_do_not_compare_or_cannot_be_read_are_refused(tmp_path, output_of, capsys):
    path = write_run(tmp_path / "a")
    for folder, experiment, seed, changed, message in (
        ("b", "RAND", 0, {}, "seed0: are both RAND with seed 0; name folders"),
        ("c", "SB", 0, {"batch_size": 32}, "batch_size is 16 in the first and 32 in the second"),
        ("d", "RAND", 1, {"bucket_size": 64}, "bucket_size is 1024 in the first and 64 in the"),
        ("e", "SB", 0, {"frames": 541}, "has 540 frames in the first and 541 in the second"),
    ):
        write_run(tmp_path / folder, experiment, seed, **changed)
        for program in (figures, tables):
            with pytest.raises(UserError, match=message):
                output_of(program, tmp_path / "a", tmp_path / folder)
    for folder, seed, frames in (("f", 8, 60), ("g", 9, 61)):
        write_run(tmp_path / folder, seed=seed, starts=[{"validation_frames": frames}])
    with pytest.raises(UserError, match="validation has 60 frames in the first and 61 in the seco"):
        output_of(tables, tmp_path / "f", tmp_path / "g")
    with pytest.raises(UserError, match=f"--timing {tmp_path}/e/.*540 frames .* 541"):
        output_of(tables, tmp_path / "a", "--timing", tmp_path / "e")
    (tmp_path / "none").mkdir()
    for file, content, message in (
        ("metrics.jsonl", "not json\n", "metrics.jsonl: .*Expecting value"),
        ("metrics.jsonl", "[]\n", "list indices"),
        ("metrics.jsonl", '{"event": "epoch", "epoch": 0}\n', "a record has no abl"),
        ("metrics.jsonl", '{"event": "validation", "loss": 1}\n', "a record has no diagonality"),
        ("hparams.json", '{"gone": 1}', "hparams.json: not the settings of a run of this version"),
    ):
        (path / file).write_text(content)
        for program in (compare_runs, figures, tables):
            with pytest.raises(UserError, match=message):
                output_of(program, path)
            with pytest.raises(UserError, match="none: holds no run; name the output of run_all"):
                output_of(program, tmp_path / "none")
        with pytest.raises(UserError, match=f"{message}.*\n.*none: holds no run"):
            output_of(compare_runs, path, tmp_path / "b", tmp_path / "none")
        assert "10/10" in capsys.readouterr().out  # it shows what it can read


def test_a_closed_pipe_leaves_the_tables_written(tmp_path, monkeypatch, output_of):
    write_run(tmp_path)
    monkeypatch.setattr("builtins.print", Mock(side_effect=BrokenPipeError))
    with pytest.raises(BrokenPipeError):
        output_of(tables, tmp_path)
    assert len(list((tmp_path / "tables").iterdir())) == 6


def test_slow_libraries_load_only_where_ctrl_c_is_handled():
    code = "import sys; from scripts import compare_runs, figures, tables; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert not {b"torch", b"scipy", b"matplotlib"} & set(modules.split())


def test_too_few_validations_are_not_smoothed(tmp_path, output_of):
    for n, curve in ((2, [8, 4]), (3, [8, 4, 2]), (4, [6, 14 / 3, 7 / 3, 1.5])):
        folder, axes = tmp_path / str(n), Figure().subplots()
        write_run(folder, "RAND", 0, [8.0, 4.0, 2.0, 1.0][:n])
        figures.draw_losses(axes, runs.read_results([folder]))
        assert list(axes.lines[0].get_ydata()) == pytest.approx(curve)
        assert all(tick == int(tick) for tick in axes.get_xticks())
        printed = output_of(tables, folder)
        row = rows_of(printed)["RAND"]
        losses = [row[name] for name in ("VL1", "VL2", "VL3", "VLavg", "masked VL3")]
        assert {cell.startswith("–") for cell in losses} == {n < 4}
        reason = f"VL3 and VLavg are left out: with 3 validations or fewer (here {n})"
        assert printed.count(reason) == (2 if n < 4 else 0)  # Table 2 and the conclusions


def test_figures_are_drawn_from_what_there_is_and_old_ones_do_not_stay(tmp_path, output_of):
    write_run(tmp_path / "begun", "RAND", 0, [], epochs=4)
    with pytest.raises(UserError, match=r"figure4\.png: no run has a validation yet"):
        output_of(figures, tmp_path / "begun")
    write_run(tmp_path / "one", "RAND", 0, [1.0, float("nan")])  # diverged
    printed = output_of(figures, tmp_path / "one")
    assert printed.count("wrote ") == 2 and "png: needs an epoch of RAND and" in printed
    series = tmp_path / "series"
    write_paper(series)
    write_run(series, "BKT-DBS", 0, [0.4] * 22, 20.0)  # one of the user's own
    output_of(figures, series)
    pictures = list((series / "figures").iterdir())
    assert len(pictures) == 4 and all(path.stat().st_size > 10_000 for path in pictures)
    write_run(series, "SB", 7, [0.4] * 22, starts=[{}])  # on another machine
    printed = output_of(figures, series)
    assert printed.count("not drawn: ") == printed.count("png: Times are not compared: ") == 2
    left = sorted(path.name for path in (series / "figures").iterdir())
    assert left == ["comparisons.png", "figure4.png"]


def write_sweep(folder, **changed):
    """Batch sizes 2, 4, 8 and 16 over ten epochs, the last with dynamic batches only."""
    for experiment, size, n_batches, minutes, losses in (
        ("SSB-BR", 16, 2, 0.5, [20.0]),  # diverged: only its first loss is finite
        ("SSB-BR", 8, 4, 1.5, [9.0, 7.0, 6.0, 5.0, 4.0]),
        ("SSB-BR", 4, 8, 2.0, [8.0, 6.0, 5.0, 4.0, 3.0]),
        ("SSB-BR", 2, 16, 6.0, [7.0, 5.0, 4.0, 3.0, 2.0]),
        ("SSB-DBS-BR", 8, 3, 1.0, [10.0, 8.0, 7.0, 6.0, 5.0]),
    ):
        losses = losses + [math.nan] * (5 - len(losses))
        run = {"batch_size": size, "n_batches": n_batches, "minutes": minutes} | changed
        write_run(folder / f"batch_size={size}", experiment, 0, losses, **run)
    losses = [8.8, 6.6, 5.5, 4.4, 3.3]
    write_run(folder / "more", "SSB-BR", 1, losses, 2.0, n_batches=8, batch_size=4, **changed)


def test_a_sweep_compares_after_the_same_epochs_steps_and_time(tmp_path, output_of):
    write_sweep(tmp_path)
    printed = output_of(tables, tmp_path, "--sweep=batch_size")
    diverged = tmp_path / "batch_size=16/SSB-BR/seed0"
    assert f"Missing:\n  {diverged}: has diverged, and is left out\n\nwrote sweep.md" in printed
    assert " | loss after 10 epochs | loss after 30 steps | loss after 10.00 minutes |\n" in printed
    table = [line for line in printed.splitlines() if line.startswith("| SSB")]
    # Masked losses are twice the others. With 8 batches an epoch, 30 steps are 3.75 epochs: 7/8 of
    # the way from the validation after 2 epochs to that after 4. Ten minutes are 5 epochs.
    assert table == [
        "| SSB-BR | 2 | 1 | 16.0 | 160 | 10.00 | 4.000 | – | – |",  # before its first validation
        "| SSB-BR | 4 | 2 | 8.0 ± 0.0 | 80 | 10.00 ± 0.00 "
        "| 6.300 ± 0.300 | 13.125 ± 0.625 | 11.550 ± 0.550 |",
        "| SSB-BR | 8 | 1 | 4.0 | 40 | 10.00 | 8.000 | 10.500 | 11.333 |",
        "| SSB-BR | 16 | 1 | 2.0 | 20 | 10.00 | – | – | – |",
        "| SSB-DBS-BR | 8 | 1 | 3.0 | 30 | 10.00 | 10.000 | 10.000 | 10.000 |",
    ]
    for program in (tables, figures):
        for other in ([], ["--sweep=lrf"]):
            with pytest.raises(UserError, match=r"seed 0; name .* give its setting by --sweep"):
                output_of(program, tmp_path, *other)
        with pytest.raises(UserError, match="--sweep sizes: unknown setting; name the one that"):
            output_of(program, tmp_path, "--sweep=sizes")


def test_the_figure_of_a_sweep_has_its_losses_over_epochs_steps_and_time(tmp_path, output_of):
    write_sweep(tmp_path)
    axes = Figure().subplots(1, 3)
    figures.draw_sweep(axes, runs.read_results([tmp_path], sweep="batch_size"))
    for ax, x in zip(
        axes, ([2, 4, 6, 8, 10], [16, 32, 48, 64, 80], [4, 8, 12, 16, 20]), strict=True
    ):
        lines = {line.get_label(): line for line in ax.lines}
        assert " ".join(name[-2:] for name in lines) == "=2 =4 =8 16 =8"
        line, fixed = (lines[f"SSB-BR, batch_size={n}"] for n in (4, 8))
        dynamic = lines["SSB-DBS-BR, batch_size=8"]
        assert line.get_xdata() == pytest.approx(x)
        assert line.get_ydata() == pytest.approx([16.8, 12.6, 10.5, 8.4, 6.3])  # mean of two seeds
        assert fixed.get_color() == pytest.approx(dynamic.get_color()) != line.get_color()
        assert fixed.get_linestyle() == line.get_linestyle() == "-" != dynamic.get_linestyle()
    assert output_of(figures, tmp_path, "--sweep=batch_size").count("wrote ") == 1
    assert (tmp_path / "figures/sweep.png").stat().st_size > 10_000


def test_times_of_a_sweep_in_unequal_conditions_are_not_compared(tmp_path, output_of):
    write_sweep(tmp_path, starts=[{}])
    write_run(tmp_path / "other", "SSB-BR", 5, starts=[H100], batch_size=8)
    printed = output_of(tables, tmp_path, "--sweep=batch_size")
    assert "Times are not compared: " in printed and "| loss after – minutes |" in printed
    (dynamic,) = re.findall(r"\| SSB-DBS-BR .*", printed)
    assert dynamic.endswith("| 10.000 | 10.000 | – |")
    axes = Figure().subplots(1, 3)
    figures.draw_sweep(axes, runs.read_results([tmp_path], sweep="batch_size"))
    assert [len(ax.lines) for ax in axes] == [5, 5, 0]


def test_compare_runs_finds_the_runs_of_a_series(tmp_path, output_of):
    for name, minutes in (("SB", 1.5), ("RAND", 2.0)):
        for seed in (0, 1000):
            write_run(tmp_path / "series", name, seed, [1.0, 0.5], minutes)
    begun = write_run(tmp_path / "series", "SSB", 0, [1.0], epochs=4)  # stopped at 2 of 4
    rows = rows_of(output_of(compare_runs, tmp_path / "series"))
    assert list(rows) == ["RAND/seed0", "RAND/seed1000", "SB/seed0", "SB/seed1000", "SSB/seed0"]
    times = " ".join(row["time"] for row in rows.values())
    assert times == "+0.0 % +0.0 % -25.0 % -25.0 % -50.0 %"
    assert rows["SB/seed0"]["epochs"] == "4/4" and rows["SSB/seed0"]["epochs"] == "2/4"
    started = write_run(tmp_path / "started", "RAND", 0, first=4)  # from a checkpoint
    assert rows_of(output_of(compare_runs, started))["RAND/seed0"]["epochs"] == "14/14"
    (begun / "metrics.jsonl").write_text("")
    write_run(tmp_path / "other", "RAND", 0, [1.0, 0.5])
    folders = (begun, tmp_path / "series/RAND/seed0", tmp_path / "other/RAND")
    rows = rows_of(output_of(compare_runs, *folders))
    first, other = rows["series/SSB/seed0"], rows["series/RAND/seed0"]
    assert first["epochs"] == "0/4" and first["ABL"] == first["alignment"] == "–"
    assert other["time"] == "–" and "other/RAND/seed0" in rows


def test_compare_runs_compares_times_in_equal_conditions(tmp_path, output_of):
    first = write_run(tmp_path, "RAND", starts=[{}])
    same = {"starts": [{}], "lrf": 0.5, "epochs_per_validation": 1}
    write_run(tmp_path, "SSB", minutes=2.0, **same)
    for seed, changed, reason in (
        (0, {"frames": 541}, "RAND/seed0 and SB/seed0: times are not compared: an epoch has 540"),
        (1, {"precision": "bf16"}, "precision is fp32 in the first and bf16 in the second"),
        (2, {"starts": [{"threads": 16}]}, "SSB/seed0 trained with threads=2; {} with threads=16"),
    ):
        other = write_run(tmp_path, "SB", seed, minutes=2.0, **{"starts": [{}], **changed})
        printed = output_of(compare_runs, first, tmp_path / "SSB", other)
        times = [row["time"] for row in rows_of(printed).values()]
        assert times == ["+0.0 %", "+100.0 %", "–"]
        note = printed.splitlines()[-1]
        assert "times are not compared: " in note and reason.format(f"{other} trained") in note


def test_compare_runs_compares_losses_of_the_same_mels_clips_and_padding(tmp_path, output_of):
    start = {"validation_frames": 60}
    first = write_run(tmp_path / "a", starts=[start])
    for i, (changed, n_compared, reason) in enumerate((
        ({"validation_frames": 60}, 3, None),
        ({}, 3, None),  # unknown
        ({"lrf": 0.5, "epochs_per_validation": 1, "validation_frames": 60}, 3, None),
        ({"batch_size": 8, "validation_frames": 60}, 2, "of two batch sizes, only masked losses"),
        ({"validation_frames": 61}, 0, "validation has 60 frames in the first and 61 in the sec"),
        ({"mel_fmax": 7000.0}, 0, "mel_fmax is 8000.0 in the first and 7000.0 in the second"),
    )):  # fmt: skip
        starts = [{name: changed.pop(name) for name in start if name in changed}]
        other = write_run(tmp_path / str(i), "SSB", starts=starts, **changed)
        printed = output_of(compare_runs, first, other)
        rows = rows_of(printed)
        for row, n in ((rows["a/RAND/seed0"], 3), (rows[f"{i}/SSB/seed0"], n_compared)):
            losses = [row[name] for name in ("masked", "alignment", "validation loss")]
            assert [loss != "–" for loss in losses] == [True] * n + [False] * (3 - n)
        assert reason is None or reason in printed
