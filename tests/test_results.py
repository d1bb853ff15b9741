"""docs/results.md says what the records beside it say."""

import sys
from pathlib import Path

from scripts import tables

ROOT = Path(__file__).resolve().parent.parent
REPORT = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def test_tables_are_what_the_records_give(tmp_path, monkeypatch, capsys):
    records = ROOT / "docs" / "results"
    arguments = [records / "training", "--timing", records / "timing", "--output", tmp_path]
    monkeypatch.setattr(sys, "argv", ["tables.py", *map(str, arguments)])
    tables.main()
    assert "Missing" not in capsys.readouterr().out
    for name in ("table1", "table2", "table3", "table4", "table5", "conclusions"):
        assert (tmp_path / f"{name}.md").read_text(encoding="utf-8") in REPORT, name


def test_pictures_and_commands_are_there():
    for line in REPORT.splitlines():
        if line.startswith("!["):
            picture = line.split("(")[1].split(")")[0]
            assert (ROOT / "docs" / picture).is_file(), picture
    for word in REPORT.split():
        if word.startswith("scripts/"):
            assert (ROOT / word.rstrip("`.,:;)")).is_file(), word
