"""compare_runs.py, on what train.py left behind."""

import sys

import pytest

import train
from cli import UserError
from scripts import compare_runs
from tests.test_tables import write_run


@pytest.fixture
def run(tmp_path, settings, monkeypatch):
    """A trained run of two epochs, its decoder cut off after 20 frames."""
    options = ["-o", str(tmp_path / "run"), "--hparams", settings + "epochs=2,max_decoder_steps=20"]
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    train.main()
    return tmp_path / "run"


def call(main, monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    main()


def rows_of(printed: str) -> list[dict[str, str]]:
    """The lines of a Markdown table, by the names of its columns."""
    head, _, *lines = ([c.strip() for c in s.split("|")[1:-1]] for s in printed.splitlines())
    return [dict(zip(head, cells, strict=True)) for cells in lines if cells]


def test_compare_runs_prints_a_row_a_run(run, monkeypatch, capsys):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"event": "st')  # a run that goes on
    capsys.readouterr()
    call(compare_runs.main, monkeypatch, run, run)
    one, other = rows_of(capsys.readouterr().out)
    assert one == other
    assert one["run"] == "run" and one["epochs"] == "2/2" and one["time"] == "+0.0 %"
    assert 0 < float(one["ZPR %"]) < 100 and float(one["batches"]) <= 3


def test_compare_runs_finds_the_runs_of_a_series(tmp_path, monkeypatch, capsys):
    for name, minutes in (("SB", 1.5), ("RAND", 2.0)):
        for seed in (0, 1000):
            write_run(tmp_path / "series", name, seed, [1.0, 0.5], minutes, epochs=4)
    begun = write_run(tmp_path / "series", "SSB", 0, [1.0], epochs=4)  # stopped at 2 of 4
    call(compare_runs.main, monkeypatch, tmp_path / "series")
    rows = rows_of(capsys.readouterr().out)
    names = ["RAND/seed0", "RAND/seed1000", "SB/seed0", "SB/seed1000", "SSB/seed0"]
    assert [row["run"] for row in rows] == names
    assert [row["epochs"] for row in rows] == ["4/4", "4/4", "4/4", "4/4", "2/4"]
    assert [row["time"] for row in rows[:4]] == ["+0.0 %", "+0.0 %", "-25.0 %", "-25.0 %"]
    (begun / "metrics.jsonl").write_text("")
    write_run(tmp_path / "other", "RAND", 0, [1.0, 0.5], epochs=4)
    folders = (begun, tmp_path / "series/RAND/seed0", tmp_path / "other/RAND")
    call(compare_runs.main, monkeypatch, *folders)
    begun, *others = rows_of(capsys.readouterr().out)
    assert begun["epochs"] == "0/4" and begun["ABL"] == begun["alignment"] == "–"
    names = ["series/RAND/seed0", "other/RAND/seed0"]
    assert [row["run"] for row in others] == names and others[0]["time"] == "–"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"frames": 541},
            "RAND/seed0 and SB/seed0: times are not compared: an epoch has 540 frames",
        ),
        ({"decoder_rnn_dim": 64}, "decoder_rnn_dim is 1024 in the one and 64 in the other"),
        ({"precision": "bf16"}, "precision is fp32 in the one and bf16 in the other"),
        ({"start": {"threads": 16}}, "SSB/seed0 trained with threads=2; {} with threads=16"),
        (
            {"start": {"device": "H100", "torch": "2.14"}},
            "torch=2.13.0; {} with device=H100, torch",
        ),
        ({"start": {"decoder": "reference"}}, "decoder=scan; {} with decoder=reference"),
    ],
)
def test_compare_runs_compares_times_in_equal_conditions(
    tmp_path, monkeypatch, capsys, changed, reason
):
    first = write_run(tmp_path, "RAND", 0, [1.0], epochs=2, start={})
    same = {"start": {}, "lrf": 0.5, "batch_size": 8, "epochs_per_validation": 1}
    write_run(tmp_path, "SSB", 0, [1.0], 2.0, epochs=2, **same)
    other = write_run(tmp_path, "SB", 0, [1.0], 2.0, **{"epochs": 2, "start": {}, **changed})
    call(compare_runs.main, monkeypatch, first, tmp_path / "SSB", other)
    *table, note = capsys.readouterr().out.splitlines()
    assert [row["time"] for row in rows_of("\n".join(table))] == ["+0.0 %", "+100.0 %", "–"]
    assert "times are not compared: " in note and reason.format(f"{other} trained") in note


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "bad: holds no run; name an output of train.py or run_all.sh"),
        ("not json\n", "metrics.jsonl: cannot be read"),
        ("{}\n[]\n", "metrics.jsonl: not what train.py writes"),
        ('{"event": "epoch", "epoch": 0}\n', "metrics.jsonl: a record has no "),
    ],
)
def test_compare_runs_names_what_it_cannot_read(tmp_path, monkeypatch, capsys, content, message):
    bad = tmp_path / "bad"
    bad.mkdir()
    if content is not None:
        bad = write_run(tmp_path, "SB", 0, [])
        (bad / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        call(compare_runs.main, monkeypatch, bad)
    assert not capsys.readouterr().out
    good = write_run(tmp_path, "RAND", 0, [1.0])
    with pytest.raises(UserError, match=message):
        call(compare_runs.main, monkeypatch, bad, good, tmp_path / "nowhere")
    (row,) = rows_of(capsys.readouterr().out)  # the others are shown
    assert row["run"] == "RAND/seed0"
