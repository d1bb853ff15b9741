"""report.py on runs of a tiny model: its page stands alone, and says what they recorded."""

import io
import re
import shutil
import sys
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import records
from torch.utils.tensorboard import SummaryWriter

from cli import UserError
from scripts import report

VOID = {"meta", "img"}


class Page(HTMLParser):
    """Its tables, as rows of cells; its pictures and sounds; its text outside tables."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tables, self.images, self.sounds, self.text = [], [], [], [], ""
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open  # every element is closed

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
        elif tag == "table":
            self.rows = []
            self.tables.append(self.rows)
        elif tag == "img":
            assert attributes["alt"]
            self.images.append(attributes)
        elif tag == "audio":
            assert attributes["aria-label"]
            self.sounds.append(attributes)
        assert tag not in ("link", "script", "iframe", "object", "embed", "a")
        assert all(attributes[k].startswith("data:") for k in ("src", "href") if k in attributes)
        assert "url(" not in attributes.get("style", "")
        self.open += [tag] if tag not in VOID else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            assert "url(" not in data and "@import" not in data
        elif set(self.open) & {"th", "td"}:
            self.rows[-1][-1] += data
        else:
            self.text += data

    def row(self, name):
        """The cells of a row by their headings, in each table that has it."""
        return [
            dict(zip(head, row, strict=True))
            for head, *rows in self.tables
            for row in rows
            if row[0] == name
        ]


def content(attributes):
    """The bytes of a picture or sound that is in the page."""
    return b64decode(attributes["src"].partition(";base64,")[2], validate=True)


@pytest.fixture
def write(monkeypatch, capsys):
    """Calls the program; returns what it printed."""

    def write(*arguments):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
        report.main()
        return capsys.readouterr().out

    return write


def add_events(folder, tag, text, steps, rate=16000):
    """What TensorBoard gets of a clip at each step: a picture and a second of noise."""
    with SummaryWriter(folder) as writer:
        for step in steps:
            picture = np.full((2, 3, 3), step, np.uint8)
            writer.add_image(f"{tag}/alignment", picture, step, dataformats="HWC")
            noise = np.random.default_rng(step).uniform(-0.5, 0.5, rate).astype(np.float32)
            writer.add_audio(f"{tag}/audio", noise, step, rate)
            writer.add_text(f"{tag}/text", text, step)


@pytest.fixture
def old(tmp_path):
    """A run of an earlier version, without TensorBoard files, after its first epoch."""
    folder = tmp_path / "old"
    folder.mkdir()
    shutil.copy(Path(__file__).parent / "old_run" / "metrics.jsonl", folder)
    (folder / "hparams.json").write_text('{"epochs": 2}')
    return folder


def test_a_page_alone_has_the_numbers_of_metrics_jsonl(tmp_path, settings, run, write, capsys):
    """Of a run that was resumed and has skipped a step; and of one that goes on, its second epoch
    done but for the validation."""
    runs = tmp_path / "runs"
    settings += "epochs_per_validation=1,check_memory=False,"
    for epochs in (1, 2):
        run("runs/<done> & resumed", f"{settings}epochs={epochs}", "--resume")
    run("runs/ongoing", settings + "epochs=2,batching_strategy=RAND,dynamic_batch_size=False")
    capsys.readouterr()
    logs = {folder.name: folder / "metrics.jsonl" for folder in sorted(runs.iterdir())}
    skipped, ongoing = (log.read_text() for log in logs.values())
    skipped = skipped.replace('"skipped_steps": 0', '"skipped_steps": 1', 1)
    ongoing = "".join(ongoing.splitlines(keepends=True)[:-1])
    for log, text in zip(logs.values(), (skipped, ongoing + '{"event": "val'), strict=True):
        log.write_text(text)
    path = runs / "report.html"
    assert re.fullmatch(rf"wrote {path} \(0\.\d MB\)\n", write(runs))
    first = path.read_bytes()
    write(runs, "-o", path)
    assert path.read_bytes() == first
    page = Page(path)
    logs["ongoing"].write_text(ongoing)
    for name, strategy in (("<done> & resumed", "SSB"), ("ongoing", "RAND")):
        epochs, validations = (records(runs / name, event) for event in ("epoch", "validation"))
        columns = {key: [record[key] for record in epochs] for key in epochs[0]}
        validation, minutes = validations[-1], columns["minutes"]
        results, differing, batching = page.row(name)
        assert results == {
            "run": name,
            "epochs": "2/2",
            "steps": f"{columns['step'][-1]}",
            "validation loss": f"{validation['loss']:.4f}",
            "masked": f"{validation['masked_loss']:.4f}",
            "alignment": f"{validation['diagonality']:.2f}",
            "lowest validation loss": f"{min(record['loss'] for record in validations):.4f}",
            "training loss": f"{columns['training_loss'][-1]:.4f}",
            "minutes": f"{sum(minutes):.1f}",
            "skipped steps": f"{sum(columns['skipped_steps'])}",
        }
        assert batching == {
            "run": name,
            "batches": f"{np.mean(columns['n_batches']):.1f}",
            "ZPR (%)": f"{100 * np.mean(columns['zpr']):.2f}",
            "ABL (frames)": f"{np.mean(columns['abl']):.1f}",
            "decoder steps": f"{np.mean(columns['total_length']):.0f}",
            "minutes": f"{np.median(minutes):.2f}",
            "frames per second": f"{np.median(columns['frames_per_second']):,.0f}",
            "peak memory (GiB)": f"{max(columns['peak_memory_gib']):.2f}",
        }
        dynamic = str(strategy == "SSB")
        expected = {"batching_strategy": strategy, "dynamic_batch_size": dynamic}
        assert differing == {"run": name, **expected}
        assert len(validations) == 1 + (strategy == "SSB")
    value = "default, if other"
    assert page.row("lrf") == [{"setting": "lrf", "value": "0.1", value: ""}]
    assert page.row("batch_size") == [{"setting": "batch_size", "value": "3", value: "16"}]
    charts = [content(image).decode() for image in page.images if "svg" in image["src"]]
    assert len(charts) == 2 * len(report.CURVES) + 2  # of lengths and of sizes
    for chart in charts:  # neither drawn from another file
        assert all(link.startswith("#") for link in re.findall(r'href="(.*?)"', chart))
    assert len(page.sounds) == 4  # target and predicted


def test_pictures_over_time_are_thinned_out_and_sounds_play(tmp_path, old, write, monkeypatch):
    logs, text = tmp_path / "logs", "<b>Tom & Jerry"
    add_events(logs, "speech/1", text, range(3, 203, 20))
    add_events(logs, "speech/2", "at a rate that MP3 does not have", [7], rate=17000)
    assert "note" not in write(old, "--log_dir", logs)
    page = Page(old / "report.html")
    assert f"synthesised, after 183 steps: {text}" in page.text
    assert "6 of 10 pictures, to keep this file small." in page.text
    pngs = [image for image in page.images if "png" in image["src"]]
    times = [re.search(r", (after .*):", image["alt"])[1] for image in pngs]
    steps = [f"after {step} steps" for step in (43, 83, 103, 143, 183, 7)]
    assert times == ["after 1 epoch", *steps]  # validated after 3 steps
    assert [sound["src"][:15] for sound in page.sounds] == ["data:audio/mpeg", "data:audio/wav;"]
    for sound, rate in zip(page.sounds, (16000, 17000), strict=True):
        samples, sound_rate = soundfile.read(io.BytesIO(content(sound)))
        assert sound_rate == rate and 1 <= len(samples) / rate < 1.2

    monkeypatch.setattr(report, "SOUNDS", len(page.sounds[0]["src"]))
    monkeypatch.setattr(report, "PICTURES", 0)
    write(old, "--log_dir", logs)
    page = Page(old / "report.html")
    assert len(page.sounds) == 1 and "Left out, to keep this file small: 1 sounds." in page.text
    assert "0 of 10 pictures" in page.text and not any("png" in i["src"] for i in page.images)


def test_runs_without_numbers_or_pictures(tmp_path, old, write):
    """One before its first epoch, and one whose losses are not finite."""
    new = tmp_path / "new"
    new.mkdir()
    shutil.copy(old / "hparams.json", new)
    path = old / "metrics.jsonl"
    path.write_text(re.sub(r'loss": [\d.]+', 'loss": NaN', path.read_text()))
    printed = write(new, old)
    for folder in (new, old):
        missing = "has no TensorBoard files: no pictures and audio; name their folder by --log_dir"
        assert f"note: {folder}: {missing}\n" in printed
    page = Page(new / "report.html")
    (results, batching), (unknown, _) = page.row("old"), page.row("new")
    assert results["validation loss"] == results["training loss"] == "nan"
    assert results["lowest validation loss"] == "–" and results["steps"] == "3"
    assert batching["batches"] == "3.0" and set(unknown.values()) == {"new", "0/2", "–"}
    assert len(page.images) == 2 and not page.sounds  # the alignment score, over epochs and time


def test_mistakes_are_one_line_and_write_nothing(tmp_path, old, write):
    file = tmp_path / "file"
    file.touch()
    for arguments, problem in (
        ([tmp_path / "missing"], f"{tmp_path}/missing: holds no run; name the output of "),
        ([old, "-o", file], f"-o {file}: give the name of a file that ends in .html"),
        ([old, "-o", file / "a.html"], f"{file}: cannot be written (File exists); give another"),
        ([old, "-l", tmp_path], f"--log_dir {tmp_path}: has no TensorBoard files; name the "),
        ([old, "-l", old, "-l", old], "--log_dir is given 2 times, for 1 runs; --help"),
    ):
        with pytest.raises(UserError) as error:
            write(*arguments)
        assert str(error.value).startswith(problem) and "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.html*")) and not file.read_bytes()
