"""docs/results.md says what the records beside it say."""

import csv
import re
import sys
from pathlib import Path

import pytest

from scripts import tables

ROOT = Path(__file__).resolve().parent.parent
REPORT = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
SERIES = (  # arguments of tables.py
    "docs/results/annealed",
    "docs/results/common --timing docs/results/timing",
    "docs/results/ssb_annealed",
    "docs/results/scratch",
    "docs/results/long",
    "docs/results/sweep --sweep batch_size",
)


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> str:
    """What tables.py prints for all series, and the code of the report."""
    folder = tmp_path_factory.mktemp("tables")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for i, arguments in enumerate(SERIES):
            output = folder / str(i)
            patch.setattr(sys, "argv", ["tables.py", *arguments.split(), "--output", str(output)])
            tables.main()
    return "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*/*.md"))


@pytest.mark.parametrize("title", ["Table 3: ", "Sweep of batch_size: "])
def test_a_table_is_what_the_records_give(printed, title):
    (table,) = re.findall(rf"^\*\*{title}.*?\n\n.*?\n(?=\n)", REPORT, re.S | re.M)
    assert table.count("\n") > 8 and table.strip() in printed


def test_every_interval_is_in_a_table(printed, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(REPORT.split("```python")[2].split("```")[0], {})
    all_printed = printed + capsys.readouterr().out
    given = re.findall(r"[-+][\d.]+ \([-+][\d.]+ to [-+][\d.]+\)", all_printed)
    part = REPORT[REPORT.index("## 2. ") :]
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


def test_the_table_of_speech_is_its_record():
    with open(ROOT / "docs" / "results" / "speech.csv") as file:
        records = list(csv.DictReader(file))
    text = (ROOT / "docs" / "speech.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", text, re.M)
    assert len(rows) == len(records) == 8
    for (epoch, row), record in zip(rows, records, strict=True):
        counts = " | ".join(record[name] for name in ("never stops", "skips", "repeats"))
        loss, failed, distortion = (
            float(record[name]) for name in ("masked_loss", "failed", "distortion")
        )
        failures = "100" if failed == 100 else f"{failed:.1f}"
        assert (epoch, row) == (
            record["epoch"],
            f"{loss:.2f} | {counts} | {failures} % | {distortion:.1f} dB",
        )
