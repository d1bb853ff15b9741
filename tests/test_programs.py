"""What all programs do wherever they run: without docstrings, streams or a home; ~ in paths."""

import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, contents, write_tone

import cli
from batching import plan_batches
from cli import UserError
from hparams import HParams, create_hparams
from scripts import plot_batching, results
from training import checkpoint, figures

PROGRAMS = [
    path
    for folder in (".", "scripts", "benchmarks", "examples/speech_enhancement", "docs/results")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "parse_args(" in path.read_text()
]
HELP = """
import os, runpy, sys

class Notebook:
    def write(self, text): printed.append(text)
    def flush(self): pass

printed, sys.path[0] = [], os.getcwd()
for program in sys.argv[1:]:
    for stream in (None, Notebook()):
        sys.argv, sys.stdout = [program, "--help"], stream
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            print(program, type(stream).__name__, end.code, file=sys.stderr)
    if "usage:" in "".join(printed):
        print("printed", file=sys.stderr)
    printed.clear()
"""


def test_all_programs_run_without_docstrings_a_stream_or_a_home(tmp_path):
    assert {"train.py", "synthesize.py", "bench_step.py", "record.py"} < {p.name for p in PROGRAMS}
    environment = {**os.environ, "HOME": "/proc/none", "MPLCONFIGDIR": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-OO", "-c", HELP, *map(str, PROGRAMS)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    for program in PROGRAMS:
        assert f"{program} NoneType 0\n{program} Notebook 0\nprinted\n" in ended.stderr


def test_what_a_program_opens_never_gets_the_number_of_a_closed_stream(tmp_path):
    code = "import cli, os, sys; cli.exit_on_user_error(lambda: sys.exit(os.dup(os.open('/', 0))))"
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        ended = subprocess.run(["sh", "-c", f'"$0" -c "{code}" {closed}', sys.executable], cwd=ROOT)
        assert 3 < ended.returncode < 20, closed


@pytest.mark.parametrize(
    "variables",
    [
        {"HOME": "/proc/none"},
        {"HOME": ""},
        {"HOME": "/dev/null"},
        {"XDG_CACHE_HOME": "/proc/none"},
        {"NUMBA_CACHE_DIR": "/proc/none"},
        {"NUMBA_CACHE_DIR": "~nobody_of_this_name/cache"},
        {"NUMBA_CACHE_DIR": "new/folder"},
    ],
)
def test_numba_always_has_a_folder_that_can_be_written(variables, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cli.set_numba_cache()
    (Path(os.environ["NUMBA_CACHE_DIR"]) / "file").touch()
    assert not list(tmp_path.glob("~*"))


def test_a_locale_of_ascii_is_refused_by_its_name():
    ascii = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", "import cli; cli.exit_on_user_error(print)"]
    for variables, status in ((ascii, 2), (ascii | {"PYTHONUTF8": "1"}, 0), ({"LC_ALL": "C"}, 0)):
        environment = {**os.environ, **variables}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert ended.returncode == status
        assert ended.stderr.startswith("error: names and texts") == bool(status)


# Paths


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The home folder, with the corpus in it. The current folder is another, and empty."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_in_settings_and_lists_a_tilde_is_the_home_folder(corpus, home, settings, run):
    lines = (corpus / "train.txt").read_text().splitlines()
    (corpus / "more.txt").write_text(f"~/{lines.pop()}\n")
    (corpus / "train.txt").write_text("\n".join(lines))
    (corpus / "symbols").write_text("abcdefghijklmnopqrstuvwxyz .")
    paths = "data_dir=~/,training_files=~/train.txt+~/more.txt,validation_files=~/val.txt,"
    paths += "symbols=@~/symbols,mel_cache_dir=~/new,speak_every=0,epochs=1"
    assert run("run", f"{settings},{paths}") == 0
    assert len(list((home / "new").glob("*.npy"))) == 12
    assert not list((home / "here").iterdir())


def test_in_arguments_a_tilde_is_the_home_folder_and_no_path_is_empty(home):
    parser = cli.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("-c", nargs="+", type=checkpoint.find_checkpoint)
    args = parser.parse_args(["--output=~/new", "-c", "~/a.pt", "b~/~", "~none_of_this_name"])
    assert args.output == home / "new"
    assert args.c == [home / "a.pt", Path("b~/~"), Path("~none_of_this_name")]
    for empty in (["-o", ""], ["-c", ""]):
        with pytest.raises(UserError, match="is empty; name a file or a folder"):
            parser.parse_args(empty)
    with pytest.raises(UserError, match="mel_cache_dir=: name a folder"):
        create_hparams("mel_cache_dir=")


def test_every_argument_that_is_a_path_is_read_as_one():
    for program in PROGRAMS:
        calls = program.read_text().replace("\n        ", " ").splitlines()
        for call in calls:
            if any(f'metavar="{kind}"' in call for kind in ("DIR", "FILE", "PREFIX", "CHECKPOINT")):
                kinds = "type=Path", "type=find_checkpoint", "type=os.path.expanduser"
                by_setting = program.name == "evaluate.py" and '"--data_dir"' in call
                assert any(kind in call for kind in kinds) or by_setting, (program, call)


def test_a_checkout_has_unix_line_ends_whatever_git_is_set_to(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "core.autocrlf=true"]
    subprocess.run([*git, "init", "-q"], check=True)
    for name in (".gitattributes", "scripts/demo.sh", ".ci/run", "requirements.txt"):
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
        subprocess.run([*git, "add", name], check=True)
        copy.unlink()
    subprocess.run([*git, "checkout", "-q", "."], check=True)
    assert (tmp_path / ".ci/run").exists()
    files = {path: text for path, text in contents(tmp_path).items() if ".git/" not in str(path)}
    assert not any(b"\r" in text for text in files.values())


# Two runs


def test_two_runs_never_log_to_one_folder(settings, run, tmp_path):
    shared, log_dir = f"{settings},epochs=1", str(tmp_path / "logs")
    assert run("one", shared, "-l", log_dir) == 0
    logged = contents(tmp_path / "logs")
    assert run("two", shared) == 0
    for name, folder, *options in (
        ("three", log_dir),
        ("three", f"{log_dir}/../two"),
        ("two", log_dir, "--resume"),
        ("logs", log_dir),
    ):
        with pytest.raises(UserError, match="has another run's events"):
            run(name, f"{settings},epochs=2", "-l", folder, *options)
    assert {path: logged.get(path) for path in logged} == logged
    for name, folder in (("one", "logs"), ("two", "two")):  # a run goes on where it logged
        assert run(name, "epochs=2", "-l", str(tmp_path / folder), "--resume") == 0
    (tmp_path / "two").rename(tmp_path / "moved")
    assert run("moved", "epochs=3", "--resume") == 0


# Files with something wrong


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff \r\n"])
def test_a_file_without_lengths_is_named(content, tmp_path):
    (tmp_path / "lengths.txt").write_text(content)
    with pytest.raises(UserError, match=r"lengths\.txt: has no lengths"):
        plot_batching.read_lengths(tmp_path / "lengths.txt", HParams())


@pytest.mark.parametrize("damaged", [b'{"event": "ep', b"\0\0\0", b'{"event": "\xff"}', b"", b"5"])
def test_a_damaged_record_is_named_by_its_line(damaged, tmp_path):
    (tmp_path / "hparams.json").write_text(json.dumps(vars(HParams())))
    lines = [b'{"event": "step", "epoch": 0}'] * 2 + [damaged, b'{"event": "epoch", "epoch": 0}']
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    with pytest.raises(UserError, match=r"metrics\.jsonl:3: cannot be read .*; mend it, or"):
        results.read_run(tmp_path)


def test_a_capacity_that_is_no_number_is_refused():
    for capacity in (float("nan"), -1, 9):
        with pytest.raises(ValueError, match="capacity="):
            plan_batches([5, 10, 7], capacity=capacity)
    with pytest.raises(UserError, match="batch_capacity_seconds=nan"):
        create_hparams("batch_capacity_seconds=nan")


def test_a_clip_that_is_much_longer_than_the_others_is_named(corpus, settings, run, capsys):
    settings += ",epochs=1,batching=SSB-DBS,max_decoder_steps=50"
    assert run("usual", settings) == 0
    assert "note: " not in capsys.readouterr().out
    write_tone(corpus / "3.wav", 6)
    assert run("outlier", settings) == 0
    assert "train.txt:4: is 6 times as long as the mean clip, so" in capsys.readouterr().out
    assert run("limited", f"{settings},batch_capacity_seconds=7") == 0
    assert "times as long" not in capsys.readouterr().out


def test_characters_that_the_font_lacks_bring_no_warnings():
    text = "こんにちは"
    with warnings.catch_warnings(record=True) as caught:  # by filters of pytest's
        importlib.reload(figures)
        alignment = torch.rand(9, len(text))
        figure = figures.draw_speech([alignment], torch.rand(80, 9), text, text, 0.01)
        assert np.ptp(figures.render(figure)) > 0
    assert not caught
