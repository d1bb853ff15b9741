"""What all programs do wherever they run: without docstrings, streams or a home; ~ in paths."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, contents, write_tone

import cli
from cli import UserError
from training import checkpoint

PROGRAMS = [
    path
    for folder in (".", "scripts", "benchmarks", "examples/speech_enhancement", "docs/results")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "parse_args(" in path.read_text()
]
HELP = """
import io, os, runpy, sys

sys.path[0] = os.getcwd()
for program in sys.argv[1:]:
    for stream in (None, io.StringIO()):  # closed, and a notebook's
        sys.argv, sys.stdout = [program, "--help"], stream
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            print(end.code, file=sys.stderr)
    has_caches = os.access(os.environ["XDG_CACHE_HOME"], os.W_OK)
    print(program, "usage:" in stream.getvalue(), has_caches, file=sys.stderr)
"""


def test_all_programs_run_without_docstrings_a_stream_or_a_home(tmp_path):
    assert {"train.py", "synthesize.py", "bench_step.py", "record.py"} < {p.name for p in PROGRAMS}
    environment = {**os.environ, "HOME": "/proc/none", "MPLCONFIGDIR": str(tmp_path)}
    environment |= {"XDG_CACHE_HOME": "", "PYTHONOPTIMIZE": "2"}
    command = [sys.executable, "-c", HELP, *map(str, PROGRAMS)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    for program in PROGRAMS:
        assert f"0\n0\n{program} True True\n" in ended.stderr


def test_what_a_program_opens_never_gets_the_number_of_a_closed_stream():
    code = "import cli, os, sys; cli.exit_on_user_error(lambda: sys.exit(os.dup(os.open('/', 0))))"
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        ended = subprocess.run(["sh", "-c", f'"$0" -c "{code}" {closed}', sys.executable], cwd=ROOT)
        assert 3 < ended.returncode < 20, closed


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


# Runs


def test_two_runs_never_log_to_one_folder(settings, run, tmp_path):
    logs = tmp_path / "logs"
    assert run("one", f"{settings},epochs=1", "-l", str(logs)) == 0
    logged = contents(logs)
    for name, folder in (("two", "logs"), ("two", "one/../logs"), ("logs", "logs")):
        with pytest.raises(UserError, match="has another run's events"):
            run(name, f"{settings},epochs=2", "-l", str(tmp_path / folder))
    assert logged.items() <= contents(logs).items()
    assert run("one", "epochs=2", "-l", str(logs), "--resume") == 0
    assert run("two", f"{settings},epochs=1") == 0
    (tmp_path / "two").rename(tmp_path / "moved")
    assert run("moved", "epochs=2", "--resume") == 0


def test_a_clip_that_is_much_longer_than_the_others_is_named(corpus, settings, run, capsys):
    write_tone(corpus / "3.wav", 6)
    assert run("run", f"{settings},epochs=1,batching=SSB-DBS,max_decoder_steps=50") == 0
    assert "train.txt:4: is 6 times as long as the mean clip, so" in capsys.readouterr().out
