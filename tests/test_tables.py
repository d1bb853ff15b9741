"""Tables, conclusions, figures and comparisons of runs, from records with known answers."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections import defaultdict

import pytest

from cli import UserError
from hparams import HParams
from scripts import compare_runs, figures, runs, tables
from scripts.paper import EXPERIMENTS, PAPER, experiment_name, experiment_settings

CPU = {"device": "CPU: a fast one", "threads": 2, "decoder": "scan", "precision": "fp32"}
CPU |= {"torch": "2.13.0"}
OPEN = "not decidable at this scale"


def write_run(folder, experiment="RAND", seed=0, losses=(1.0,) * 5, minutes=1.0, **changed):
    """A run validated every two epochs, with these losses; ``changed``: settings, and below."""
    steps, frames = changed.pop("steps", 1000), changed.pop("frames", 540)
    start = changed.pop("start", None)  # how it differs from CPU, if it is recorded
    settings = {"seed": seed, "epochs": 2 * max(len(losses), 1), **experiment_settings(experiment)}
    path = folder / experiment / f"seed{seed}"
    path.mkdir(parents=True)
    hparams = dataclasses.asdict(HParams(**{**settings, **changed}))
    (path / "hparams.json").write_text(json.dumps(hparams))
    records = [] if start is None else [{"event": "start", "epoch": 0, **CPU, **start}]
    epoch = {"event": "epoch", "minutes": minutes, "zpr": 0.1, "abl": 50.0, "n_batches": 4}
    epoch |= {"total_length": steps, "frames_per_second": frames / minutes / 60}
    epoch |= {"peak_memory_gib": 1.0}
    for i, loss in enumerate(losses):
        records += [{**epoch, "epoch": 2 * i}, {**epoch, "epoch": 2 * i + 1}]
        values = {"loss": loss, "masked_loss": 2 * loss, "diagonality": 0.5}
        records.append({"event": "validation", "epoch": 2 * i + 1, **values})
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def write_paper(folder, scatter=0.0005, **changed):
    """Three seeds of every experiment that end at the paper's VL3, or at those ``changed``."""
    for name, row in PAPER.items():
        end = changed.get(name.replace("-", "_"), row["vl3"])
        # From 60 % above the end down to it, in proportion to the epochs. The last two are equal,
        # so that smoothing leaves the end.
        curve = [1 + 0.6 * (1 - i / 22) for i in range(1, 21)] + [1.0, 1.0]
        for k in (-1, 0, 1):
            losses = [end * (1 + k * scatter) * height for height in curve]
            write_run(folder, name, 1000 * (k + 1), losses, row["minutes"])


def call(program, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    program.main()


@pytest.fixture
def output_of(monkeypatch, capsys):
    """Calls a program and returns what it printed."""

    def output(program, *arguments):
        call(program, monkeypatch, *arguments)
        return capsys.readouterr().out

    return output


def table_rows(folder, number):
    """The cells of a table by the first cell of their row and their heading."""
    rows = defaultdict(dict)
    for line in (folder / "tables" / f"table{number}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0] in ("Batching", "From RAND to"):
            head = cells
        elif cells:
            rows[cells[0]] |= dict(zip(head, cells, strict=True))
    return rows


def verdicts(folder):
    lines = (folder / "tables" / "conclusions.md").read_text().splitlines()
    return [line.split("**")[1] for line in lines if line[:1].isdigit()]


def test_names_of_experiments_and_their_settings_agree():
    for name in EXPERIMENTS:
        assert experiment_name(experiment_settings(name)) == name
    assert experiment_name(dataclasses.asdict(HParams())) == "SSB-DBS-BR"
    assert experiment_name(experiment_settings("RAND-BR")) == "RAND"


@pytest.mark.parametrize(
    ("planned", "expected"), [(220, [100, 160, 220]), (44, [20, 32, 44]), (3, [2, 2, 3])]
)
def test_stages_are_the_papers_fractions_of_the_epochs(tmp_path, planned, expected):
    epochs = runs.validated_epochs([runs.load_run(write_run(tmp_path, epochs=planned))])
    assert [epochs[i] for i in runs.stages(epochs)] == expected and epochs[-1] == planned


def test_losses_are_smoothed_with_their_neighbours_and_averaged(tmp_path, output_of):
    losses = [100.0, 90.0, 80.0, 60.0, 50.0, 40.0, 30.0, 20.0, 10.0, 8.0, 6.0]  # of 22 epochs
    write_run(tmp_path, "RAND", 0, losses)
    assert "no run of SB-BR" in output_of(tables, tmp_path)
    row = table_rows(tmp_path, 2)["RAND"]
    assert row["VL1"] == "50.000 (0.340)"  # after 10 epochs: 60, 50, 40
    assert row["VL2"] == "20.000 (0.323)"  # after 16: 30, 20, 10
    assert row["VL3"] == "7.000 (0.312)"  # after 22: 8, 6 and no next
    assert row["VLavg"] == "23.429 (0.325)"  # 164 / 7
    assert row["masked VL3"] == "14.000" and row["ZPR %"] == "10.00 (32.02)"


def test_an_unfinished_run_gives_what_it_has(tmp_path, output_of):
    write_run(tmp_path, "RAND", 0, [5.0, 4.0, 3.0, 2.0, 1.0])
    path = write_run(tmp_path, "SB", 0, [5.0, 4.0, 3.0], epochs=10)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"event": "epo')  # of a run that goes on
    begun = write_run(tmp_path, "SSB", 0, [], epochs=10)
    (begun / "metrics.jsonl").unlink()
    printed = output_of(tables, tmp_path)
    assert f"{path}: 6 of 10 epochs" in printed and f"{begun}: 0 of 10 epochs" in printed
    rows = table_rows(tmp_path, 2)
    losses = [rows["SB"][name] for name in ("VL1", "VL2", "VL3")]
    assert losses == ["4.000 (0.401)", "– (0.391)", "– (0.385)"]
    assert rows["RAND"]["VL3"] == "1.500 (0.312)" and rows["SSB"]["min/epoch"] == "– (23.06)"
    assert "wrote " in output_of(figures, tmp_path)


def test_errors_are_standard_errors_over_seeds_of_all_folders(tmp_path, output_of):
    folders = [tmp_path / f"series{seed}" for seed in range(3)]
    for seed, folder in enumerate(folders):
        write_run(folder, "RAND", seed, [seed + 1.0] * 5, minutes=seed + 1.0)
        write_run(folder, "SB", seed, minutes=(seed + 1.0) * (0.5 + 0.1 * seed))
    output_of(tables, *folders, "--output", tmp_path / "tables")
    row = table_rows(tmp_path, 2)["RAND"]
    assert row["Seeds"] == "3" and row["VL3"] == "2.000 ± 0.577 (0.312)"
    # 0.5, 1.2 and 2.1 minutes against 1, 2 and 3: 36.7 % less, the relative errors added in square.
    error = 100 * 1.9 / 3 * ((0.8020806 / 3**0.5 / (3.8 / 3)) ** 2 + (1 / 3**0.5 / 2) ** 2) ** 0.5
    assert table_rows(tmp_path, 3)["SB"]["saved %"] == f"36.67 ± {error:.2f} (33.97)"


def test_times_can_come_from_other_runs(tmp_path, output_of):
    for name, minutes in (("RAND", 4.0), ("SB", 3.0)):
        write_run(tmp_path / "shared", name, 0, minutes=9.0)
        write_run(tmp_path / "shared", name, 1, minutes=10.0)
        write_run(tmp_path / "alone", name, 7, [2.0], minutes, epochs=2)
    both = (tmp_path / "shared", "--timing", tmp_path / "alone")
    output_of(tables, *both)
    rows, saved = table_rows(tmp_path / "shared", 2), table_rows(tmp_path / "shared", 3)["SB"]
    assert [rows[name]["min/epoch"] for name in ("RAND", "SB")] == [
        "4.000 (32.82)",
        "3.000 (21.67)",
    ]
    assert rows["SB"]["VL3"] == "1.000 ± 0.000 (0.385)" and rows["SB"]["Seeds"] == "2"
    assert saved["saved %"] == "25.00 (33.97)" and saved["saved, min/epoch"] == "1.000 (11.15)"
    assert output_of(figures, *both).count("wrote ") == 3


def test_the_papers_table_2_gives_its_tables_3_and_4_and_its_conclusions(tmp_path, output_of):
    write_paper(tmp_path)
    path = write_run(tmp_path, "SB", 5, [float("nan")] * 22, PAPER["SB"]["minutes"])
    printed = output_of(tables, tmp_path)
    assert printed.split("Missing:\n")[1].splitlines()[:2] == [
        f"  {path}: has diverged, and is left out",
        "",
    ]
    for name in EXPERIMENTS[1:]:
        saved, _, _, theirs = table_rows(tmp_path, 3)[name]["saved %"].split()
        assert float(saved) == pytest.approx(float(theirs.strip("()")), abs=0.021)
    table4 = re.findall(r"\| (\S+) \((\S+) to (\S+)\) \| (\S+) \|$", printed, re.MULTILINE)
    reductions, low, high, theirs = zip(*(map(float, row) for row in table4), strict=True)
    assert reductions == pytest.approx(theirs, abs=0.021)
    assert all(map(float.__lt__, low, reductions)) and all(map(float.__lt__, reductions, high))
    expected = [6.75, 2.15, 1.21, 15.58, 11.42, 5.21, 14.29, 9.19, 2.83]
    assert list(reductions) == pytest.approx(expected, abs=0.02)
    assert verdicts(tmp_path) == ["supported"] * 5
    assert printed.count("| -1.2 |") == 1  # SSB-BR after BKT-BR, by the paper's VL3


def test_other_losses_contradict_a_conclusion(tmp_path, output_of):
    write_paper(tmp_path, SSB_DBS_BR=0.32, ATS_BR=0.35)
    output_of(tables, tmp_path)
    no = "contradicted"
    assert verdicts(tmp_path) == [no, "supported", no, "supported", no]


def test_too_few_seeds_or_too_large_a_spread_decide_nothing(tmp_path, output_of):
    for name, row in PAPER.items():
        write_run(tmp_path / "few", name, 0, [row["vl3"]] * 5)
    write_paper(tmp_path / "spread", scatter=0.3)
    for folder in (tmp_path / "few", tmp_path / "few", tmp_path / "spread"):
        output_of(tables, folder)
        assert verdicts(folder) == [OPEN] * 5
        write_run(tmp_path / "few", "RAND", len(list(tmp_path.glob("few/RAND/*"))), [0.313] * 5)


def test_conclusions_about_runs_that_are_not_there_name_them(tmp_path, output_of):
    for name in ("RAND", "SSB-DBS-BR"):
        write_run(tmp_path, name)
    assert "(needs SSB-BR, BKT-BR, ATS-BR)" in output_of(tables, tmp_path)
    assert verdicts(tmp_path) == ["not run", "not run", OPEN, "not run", "not run"]


def test_intervals_are_students():
    # ln 1.1 apart: sd ln 1.1 with 2 degrees of freedom, whose 97.5 % quantile is 4.3027.
    evidence = tables.Evidence({"A": {"vl3": [1.0, 1.1, 1.21]}, "B": {"vl3": [2.0]}}, "vl3")
    for n_checks, quantile in ((1, 4.3026527), (2, 6.2053468)):  # two: the 98.75 % quantile
        half = quantile * 0.0953102 * (1 / 3 + 1) ** 0.5
        expected = [100 * (2 / 1.1 * math.exp(x) - 1) for x in (0, -half, half)]
        assert evidence.contrast("A → B", n_checks) == pytest.approx(expected, rel=1e-5)
    assert evidence.contrast("A → C") == pytest.approx([math.nan] * 3, nan_ok=True)
    evidence.logs = {name: [value] for name, value in zip("ABCD", (1, 2, 4, 8), strict=True)}
    change = evidence.contrast("(A → B) against (C → D)")[0]
    assert change == pytest.approx(100 * math.expm1((2 - 1) - (8 - 4)))


def test_rand_in_anothers_time_is_its_loss_when_the_other_ends(tmp_path, output_of):
    losses = [10.0, 9.0, 8.0, 7.0, 6.0]  # after 2, 4, ... 10 epochs
    for name, minutes in (("RAND", 4.0), ("SSB-BR", 3.0), ("BKT-BR", 5.0), ("ATS-BR", 4.0)):
        write_run(tmp_path, name, 0, losses, minutes)
    printed = output_of(tables, tmp_path)
    # After 7.5 epochs the mean of the loss then, 7.25, and two epochs before, 8.25; to 6.5.
    assert "| RAND in SSB-BR's time → SSB-BR | lower | -16.1 |" in printed
    assert "| RAND in BKT-BR's time → BKT-BR | lower | +0.0 |" in printed  # RAND has ended before
    assert "| RAND in ATS-BR's time → ATS-BR | lower | +0.0 |" in printed


@pytest.mark.parametrize(
    ("starts", "reason"),
    [
        ([{}, {}, {}], None),
        ([None, None, None], None),
        # The first two are RAND's, whose first seed is the first to be named.
        ([{}, {}, {"decoder": "reference"}], "{1} trained with decoder=scan; {2} trained with "),
        ([{}, {"device": "H100"}, {}], "{0}, {2} trained with device=CPU: a fast one; {1} train"),
        ([{}, {"threads": 1, "torch": "2.14"}, {}], "threads=1, torch=2.14"),
        ([{"precision": "tf32"}, {}, {}], "{0} trained with precision=tf32; {1}, {2} trained with"),
        ([{}, {}, None], "{2} trained with device=unknown, threads=unknown, torch=unknown"),
    ],
)
def test_times_of_unequal_conditions_are_not_compared(tmp_path, output_of, starts, reason):
    paths = [
        write_run(tmp_path, "RAND", 0, minutes=4.0, start=starts[0]),
        write_run(tmp_path, "RAND", 1, minutes=3.0, start=starts[1]),
        write_run(tmp_path, "SB", 0, minutes=4.0, start=starts[2]),
    ]
    printed = output_of(tables, tmp_path)
    row, saved = table_rows(tmp_path, 2)["SB"], table_rows(tmp_path, 3)["SB"]
    assert row["VL3"] == "1.000 (0.385)" and row["batches"] == "4.0 (655)"
    assert saved["fewer decoder steps %"] == "0.00"
    shown = [row[name] for name in ("min/epoch", "real frames/s", "peak memory GiB")]
    shown += [saved["saved, min/epoch"], saved["saved %"]]
    if not reason:
        assert not any(cell.startswith("–") for cell in shown) and "not compared" not in printed
        return
    assert all(cell.startswith("–") for cell in shown)
    line = next(s for s in printed.splitlines() if s.startswith("*Times are not compared: "))
    assert reason.format(*paths) in line
    assert printed.count("Times are not compared: ") == 3  # Tables 2 and 3, and the conclusions
    assert "| RAND in SSB-BR's time → SSB-BR | lower | – |" in printed


def test_the_decoder_of_older_records_is_that_of_the_settings(tmp_path, output_of):
    write_run(tmp_path, "RAND")
    write_run(tmp_path, "SB", decoder="reference")
    assert "RAND/seed0 trained with decoder=scan; " in output_of(tables, tmp_path)


def test_a_run_resumed_elsewhere_has_times_of_two_machines(tmp_path, output_of):
    for name in ("RAND", "SB"):
        path = write_run(tmp_path, name, start={})
    records = (path / "metrics.jsonl").read_text().splitlines()
    start = json.dumps({"event": "start", "epoch": 9, "step": 9, **CPU, "device": "H100"})
    (path / "metrics.jsonl").write_text("\n".join([*records, start, ""]))
    assert "not compared" not in output_of(tables, tmp_path)  # no epoch has followed yet
    (path / "metrics.jsonl").write_text("\n".join([*records[:8], start, *records[8:], ""]))
    assert f"{path} trained with device=CPU: a fast one; {path} " in output_of(tables, tmp_path)


def test_only_the_times_that_are_used_have_to_be_of_equal_conditions(tmp_path, output_of):
    a, b = tmp_path / "a", tmp_path / "b"
    for name, decoder in (("RAND", "scan"), ("SB", "reference")):
        write_run(a, name, start={"decoder": decoder})
        write_run(b, name, start={})
    for trained, timed, time, memory in ((a, b, "1.000", "–"), (b, a, "–", "1.00")):
        printed = output_of(tables, trained, "--timing", timed)
        row = table_rows(trained, 2)["RAND"]
        assert row["min/epoch"] == f"{time} (32.82)" and row["peak memory GiB"] == memory
        assert ("Times are not compared: " in printed) == (time == "–")
        assert ("Peak memory is not compared: " in printed) == (memory == "–")


def test_runs_that_do_not_compare_are_refused(tmp_path, monkeypatch, output_of):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", "SB", batch_size=32)
    write_run(tmp_path / "d", "BKT-BR", 0, bucket_size=64)
    write_run(tmp_path / "d", "BKT-BR", 1)
    write_run(tmp_path / "f", "SB", minutes=2.0, frames=541)
    unknown = write_run(tmp_path / "e")
    (unknown / "hparams.json").write_text('{"gone": 1}')
    for folders, message in (
        ("nothing", "nothing: holds no run; name the output of run_all"),
        ("a b", "seed0: are both RAND with seed 0; name folders"),
        ("a c", "batch_size is 16 in the first and 32 in the second"),
        ("d", "bucket_size is 64 in the first and 1024 in the second"),
        ("a f", "has 540 frames in the first and 541 in the second"),
        ("a --timing f", "has 540 frames in the first and 541 in the second"),
        ("a e", "hparams.json: not the settings of a run of this version"),
    ):
        for program in (tables, figures):
            with pytest.raises(UserError, match=message):
                output_of(program, *folders.split())


def test_a_closed_pipe_leaves_the_tables_written(tmp_path, monkeypatch, output_of):
    def closed(*_):
        raise BrokenPipeError

    write_run(tmp_path)
    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(BrokenPipeError):
        output_of(tables, tmp_path)
    assert len(list((tmp_path / "tables").iterdir())) == 5


def test_slow_libraries_load_only_where_ctrl_c_is_handled():
    code = "import sys; from scripts import compare_runs, figures, tables; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert not {b"torch", b"scipy", b"matplotlib"} & set(modules.split())


@pytest.mark.parametrize("n", [2, 3, 4])
def test_too_few_validations_are_not_smoothed(tmp_path, monkeypatch, output_of, n):
    from matplotlib.axes import Axes

    drawn, plot = [], Axes.plot

    def record(axes, x, y, *more, **options):
        drawn.append((axes, list(y)))
        return plot(axes, x, y, *more, **options)

    monkeypatch.setattr(Axes, "plot", record)
    losses = [8.0, 4.0, 2.0, 1.0][:n]
    for name in ("RAND", "SB-BR"):
        write_run(tmp_path, name, 0, losses)
    printed = output_of(tables, tmp_path)
    output_of(figures, tmp_path)
    axes, curve = drawn[0]
    assert all(tick == int(tick) for tick in axes.get_xticks())
    row = table_rows(tmp_path, 2)["RAND"]
    shown = [row[f"VL{name}"].split()[0] for name in (1, 2, 3, "avg")]
    shown += [row["masked VL3"], row["masked VLavg"]]
    reason = f"VL3 and VLavg are left out: with 3 validations or fewer (here {n})"
    if n < 4:
        assert curve == losses
        assert set(shown) == {"–"} and row["ZPR %"] == "10.00 (32.02)"
        assert printed.count(reason) == 2  # Table 2 and the conclusions
        assert {"not run", OPEN} >= set(verdicts(tmp_path))
    else:
        assert curve == pytest.approx([6, 14 / 3, 7 / 3, 1.5])
        assert shown[:3] == ["4.667", "2.333", "1.500"]


def test_figures_are_drawn_and_old_ones_do_not_stay(tmp_path, output_of):
    write_paper(tmp_path)
    write_run(tmp_path, "BKT-DBS", 0, [0.4] * 22, 20.0, steps=700)  # one of the user's own
    output_of(figures, tmp_path)
    drawn = {path.name: path.stat().st_size for path in (tmp_path / "figures").iterdir()}
    assert set(drawn) == {"figure4.png", "loss_over_time.png", "time_over_steps.png"}
    assert min(drawn.values()) > 10_000
    write_run(tmp_path, "SB", 7, [0.4] * 22, start={})  # on another machine
    printed = output_of(figures, tmp_path)
    assert printed.count("not drawn: ") == printed.count("png: Times are not compared: ") == 2
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["figure4.png"]


def test_a_figure_that_cannot_be_drawn_yet_leaves_the_others(tmp_path, output_of):
    write_run(tmp_path / "begun", "RAND", 0, [], epochs=4)
    with pytest.raises(UserError, match=r"figure4\.png: no run has been validated yet"):
        output_of(figures, tmp_path / "begun")
    write_run(tmp_path / "one", "RAND", 0, [1.0, float("nan")])  # diverged
    printed = output_of(figures, tmp_path / "one")
    assert printed.count("wrote ") == 2 and "png: needs an epoch of RAND and" in printed


def compared(printed):
    """The rows of a printed table by its column names, and the notes below it."""
    head, _, *rows = (re.split(r" *\| *", s)[1:-1] for s in printed.splitlines() if s[0] == "|")
    notes = [line for line in printed.splitlines() if line[0] != "|"]
    return [dict(zip(head, cells, strict=True)) for cells in rows], notes


def test_compare_runs_finds_the_runs_of_a_series(tmp_path, output_of):
    for name, minutes in (("SB", 1.5), ("RAND", 2.0)):
        for seed in (0, 1000):
            write_run(tmp_path / "series", name, seed, [1.0, 0.5], minutes)
    begun = write_run(tmp_path / "series", "SSB", 0, [1.0], epochs=4)  # stopped at 2 of 4
    rows, _ = compared(output_of(compare_runs, tmp_path / "series"))
    assert [(row["run"], row["epochs"], row["time"]) for row in rows] == [
        ("RAND/seed0", "4/4", "+0.0 %"),
        ("RAND/seed1000", "4/4", "+0.0 %"),
        ("SB/seed0", "4/4", "-25.0 %"),
        ("SB/seed1000", "4/4", "-25.0 %"),
        ("SSB/seed0", "2/4", "-50.0 %"),
    ]
    (begun / "metrics.jsonl").write_text("")
    write_run(tmp_path / "other", "RAND", 0, [1.0, 0.5])
    folders = (begun, tmp_path / "series/RAND/seed0", tmp_path / "other/RAND")
    (first, *others), _ = compared(output_of(compare_runs, *folders))
    assert first["epochs"] == "0/4" and first["ABL"] == first["alignment"] == "–"
    assert [row["run"] for row in others] == ["series/RAND/seed0", "other/RAND/seed0"]
    assert others[0]["time"] == "–"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"frames": 541}, "RAND/seed0 and SB/seed0: times are not compared: an epoch has 540"),
        ({"precision": "bf16"}, "precision is fp32 in the first and bf16 in the second"),
        ({"start": {"threads": 16}}, "SSB/seed0 trained with threads=2; {} with threads=16"),
    ],
)
def test_compare_runs_compares_times_in_equal_conditions(tmp_path, output_of, changed, reason):
    first = write_run(tmp_path, "RAND", start={})
    same = {"start": {}, "lrf": 0.5, "batch_size": 8, "epochs_per_validation": 1}
    write_run(tmp_path, "SSB", minutes=2.0, **same)
    other = write_run(tmp_path, "SB", minutes=2.0, **{"start": {}, **changed})
    rows, (note,) = compared(output_of(compare_runs, first, tmp_path / "SSB", other))
    assert [row["time"] for row in rows] == ["+0.0 %", "+100.0 %", "–"]
    assert "times are not compared: " in note and reason.format(f"{other} trained") in note


def test_records_that_cannot_be_read_are_named(tmp_path, output_of):
    bad = write_run(tmp_path, "SB", 0, [])
    for content, message in (
        ("not json\n", "Expecting value"),
        ("[]\n", "list indices"),
        ('{"event": "epoch", "epoch": 0}\n', "a record has no abl"),
        ('{"event": "validation", "epoch": 1, "loss": 1}\n', "a record has no diagonality"),
    ):
        (bad / "metrics.jsonl").write_text(content)
        for program in (compare_runs, tables):
            with pytest.raises(UserError, match=rf"metrics.jsonl: cannot be read \({message}"):
                output_of(program, bad)
    with pytest.raises(UserError, match=r"nowhere: holds no run; name the output of run_all\.sh"):
        output_of(compare_runs, tmp_path / "nowhere")


def test_compare_runs_reads_what_training_records(tmp_path, settings, run, output_of):
    run("run", settings + "epochs=2")
    *_, first, second = output_of(compare_runs, tmp_path / "run", tmp_path / "run").splitlines()
    assert first == second and "| run |" in first.replace("  ", "") and "+0.0 %" in first
    epochs, zpr, _, batches = (cell.strip() for cell in first.split("|")[2:6])
    assert epochs == "2/2" and 0 < float(zpr) < 100 and float(batches) <= 3
