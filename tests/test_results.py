"""docs/results.md says what the records beside it say."""

import re
import sys
from pathlib import Path

import pytest

from scripts import tables

ROOT = Path(__file__).resolve().parent.parent
REPORT = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


ALL = ("table1", "table2", "table3", "table4", "table5", "conclusions")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["training", "--timing", "docs/results/timing"], ALL),
        (["annealed"], ["table4"]),  # times were not measured
    ],
)
def test_tables_are_what_the_records_give(tmp_path, monkeypatch, capsys, arguments, names):
    monkeypatch.chdir(ROOT)
    folder, *options = arguments
    arguments = ["tables.py", f"docs/results/{folder}", *options, "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    tables.main()
    assert "Missing" not in capsys.readouterr().out
    for name in names:
        assert (tmp_path / f"{name}.md").read_text(encoding="utf-8") in REPORT, name


def test_every_interval_of_the_common_start_is_in_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for folder in ("common", "annealed"):
        arguments = ["tables.py", f"docs/results/{folder}", "--output", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", arguments)
        tables.main()
    given = re.findall(r"[-+][\d.]+ \([-+][\d.]+ to [-+][\d.]+\)", capsys.readouterr().out)
    part = REPORT[REPORT.index("## 3. ") :]
    said = re.findall(r"([-+][\d.]+) %? ?(\([-+][\d.]+ to [-+][\d.]+\))", part)
    said = [f"{change} {interval}" for change, interval in said]
    assert len(said) > 20 and set(said) <= set(given)


def test_pictures_and_commands_are_there():
    for line in REPORT.splitlines():
        if line.startswith("!["):
            picture = line.split("(")[1].split(")")[0]
            assert (ROOT / "docs" / picture).is_file(), picture
    for word in REPORT.split():
        if word.startswith("scripts/"):
            assert (ROOT / word.rstrip("`.,:;)")).is_file(), word
