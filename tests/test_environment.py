"""What must be installed."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def listed(name: str) -> set[str]:
    """The packages of a requirements file."""
    return set(re.findall(r"^[\w-]+", (ROOT / name).read_text(), re.M)) - {"-r"}


def imported(*patterns: str) -> set[str]:
    """The packages whose modules the matching files import."""
    modules, packages = set(), importlib.metadata.packages_distributions()
    for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
        modules |= set(re.findall(r"^ *(?:import|from) (\w+)", path.read_text(), re.M))
    return {package for module in modules for package in packages.get(module, ())}


def test_a_file_imports_only_from_files_below_it():
    """In the order of CONTRIBUTING.md's table, which has every file that is not a test."""
    table = re.findall(r"^\| `([\w.]+)/?` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    rank = {name.removesuffix(".py"): place for place, name in enumerate(table)}
    for path in chain(ROOT.glob("*.py"), *(ROOT.glob(f"{name}/**/*.py") for name in table)):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                imported = name.partition(".")[0]
                assert imported not in rank or rank[room] <= rank[imported], f"{path} {name}"


def test_requirements_list_what_is_imported_and_nothing_else():
    programs = imported("*.py", "text/*.py", "scripts/*.py", "benchmarks/*.py")
    by_torch = {"tensorboard"}  # as torch.utils.tensorboard
    # triton comes with PyTorch's CUDA builds; bench_intelligibility.py asks for pocketsphinx.
    optional = {"espeakng-loader", "triton", "pocketsphinx"}
    assert programs - optional | by_torch == listed("requirements.txt")
    kinds = ("", "-dev", "-ci")
    everything = set().union(*(listed(f"requirements{kind}.txt") for kind in kinds))
    assert imported("tests/*.py") <= everything
    assert "torch>=2.4" in (ROOT / "requirements.txt").read_text()
    pins = (ROOT / "requirements-dev.txt").read_text().splitlines()
    # The ranges come last, or pip would download the newest PyTorch before the pinned one.
    assert "torch==2.13.0" in pins and pins[-1] == "-r requirements.txt"


def test_scripts_use_an_environment_that_has_all_and_name_an_interpreter_that_is_none(tmp_path):
    for name in ("requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["bash", "-c", f"source '{ROOT}/scripts/venv.sh'; echo $PYTHON"]
    fix = "set PYTHON to Python 3.10 or newer"
    for python, wanted in (
        (sys.executable, (0, f"{sys.executable}\n", "")),
        ("python0", (2, "", f"error: python0: no such program; {fix}\n")),
    ):
        environment = {**os.environ, "CI": "", "PYTHON": python}
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == wanted
    assert not (tmp_path / ".venv").exists()
