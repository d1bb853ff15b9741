"""What must be installed, which environment the scripts use."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDED = "espeakng-loader hypothesis pytest pytest-xdist ruff"  # by test.sh


def listed(name: str) -> set[str]:
    """The packages of a requirements file."""
    lines = (ROOT / name).read_text().splitlines()
    return {re.split(r"[<>=;\s]", line)[0] for line in lines if line and line[0] not in "#-"}


def imported(*patterns: str) -> set[str]:
    """The packages whose modules the matching files import."""
    modules = set()
    for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module.partition(".")[0])
    packages = importlib.metadata.packages_distributions()
    return {package for module in modules for package in packages.get(module, ())}


def test_requirements_list_what_is_imported_and_nothing_else():
    programs = imported("*.py", "text/*.py", "scripts/*.py", "benchmarks/*.py")
    by_torch = {"tensorboard"}  # as torch.utils.tensorboard
    assert programs - {"espeakng-loader"} | by_torch == listed("requirements.txt")
    everything = listed("requirements.txt") | listed("requirements-dev.txt")
    assert imported("tests/*.py") <= everything
    assert "torch>=2.4" in (ROOT / "requirements.txt").read_text()
    pins = (ROOT / "requirements-dev.txt").read_text().splitlines()
    # The ranges come last, or pip would download the newest PyTorch before the pinned one.
    assert "torch==2.13.0" in pins and pins[-1] == "-r requirements.txt"


@pytest.fixture
def project(tmp_path) -> Path:
    """What venv.sh reads, with requirements that this interpreter meets, and ``python``, which is
    this interpreter, but `-m venv` copies itself, and `-m pip` logs its arguments."""
    for name in ("requirements.txt", "requirements-dev.txt"):
        pins = re.compile(r"(==|>=)[^;\s]+")
        (tmp_path / name).write_text(pins.sub("", (ROOT / name).read_text()))
    python = tmp_path / "python"
    python.write_text(
        '#!/usr/bin/env bash\n'
        'case "$*" in\n'
        '"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;\n'
        '"-m pip "*) echo "$0 $*" >> pip.log ;;\n'
        f'*) exec {sys.executable} "$@" ;;\n'
        "esac\n"
    )  # fmt: skip
    python.chmod(0o755)
    return tmp_path


def choose(project: Path, ci: str = "", status: int = 0) -> tuple[str, str]:
    """What venv.sh prints, the interpreter that it chooses last, and its errors."""
    script = f'set -- --help; NEEDS="{NEEDED}"; '  # arguments are the caller's own
    script += f'source {ROOT}/scripts/venv.sh; echo "$PYTHON"'
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=project, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON": str(project / "python"), "CI": ci},
    )  # fmt: skip
    assert result.returncode == status, result.stderr
    return result.stdout, result.stderr


def add_line(path: Path, line: str) -> None:
    path.write_text(f"{path.read_text()}{line}\n")


def test_an_environment_that_has_everything_is_kept_except_in_ci(project):
    add_line(project / "requirements-dev.txt", "torch==0.1")  # requirements.txt takes any torch
    assert choose(project) == (f"{project}/python\n", "")
    assert not (project / ".venv").exists()
    assert choose(project, ci="true")[0].endswith("\n.venv/bin/python\n")
    assert (project / "pip.log").exists()


@pytest.mark.parametrize(
    ("file", "missing"),
    [
        *(("requirements.txt", line) for line in ("torch>=99", "numpy<1", "no-such-package")),
        ("requirements-dev.txt", "ruff==0.1"),  # only tests need it: as pinned
    ],
)
def test_an_environment_that_lacks_something_is_replaced(project, file, missing):
    add_line(project / file, f"{missing}  # new")
    output, errors = choose(project)
    assert "Installing into .venv" in output and output.endswith("\n.venv/bin/python\n")
    assert f"lacks {missing};" in errors
    log = project / "pip.log"
    install = r"\.venv/bin/python .* install .*-r requirements-dev.txt\n"
    assert re.fullmatch(install, log.read_text())
    assert choose(project) == (".venv/bin/python\n", errors)
    assert re.fullmatch(install, log.read_text()), "installed only once"
    add_line(project / "requirements-dev.txt", "tqdm")
    choose(project)
    assert re.fullmatch(install * 2, log.read_text()), "the requirements have changed"


def test_an_interpreter_that_is_too_old_is_named(project):
    python = project / "python"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n')
    _, errors = choose(project, status=2)
    assert errors == f"error: {python} is Python 3.9.1; set PYTHON to Python 3.10 or newer\n"
