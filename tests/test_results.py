"""docs/results.md says what the records beside it say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def test_tables_are_what_the_records_give(tmp_path):
    records = ROOT / "docs" / "results"
    command = [sys.executable, "scripts/tables.py", records / "training", "--output", tmp_path]
    command += ["--timing", records / "timing"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "Missing" not in printed
    for name in ("table1", "table2", "table3", "table4", "conclusions"):
        assert (tmp_path / f"{name}.md").read_text(encoding="utf-8") in REPORT, name


def test_pictures_and_commands_are_there():
    for line in REPORT.splitlines():
        if line.startswith("!["):
            picture = line.split("(")[1].split(")")[0]
            assert (ROOT / "docs" / picture).is_file(), picture
    for word in REPORT.split():
        if word.startswith("scripts/"):
            assert (ROOT / word.rstrip("`.,:;)")).is_file(), word
