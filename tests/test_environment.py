"""What must be installed, which environment the scripts use."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDED = "espeakng-loader hypothesis pytest pytest-xdist ruff"  # by test.sh


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


PYTHON = f"""#!/usr/bin/env bash
case "$*" in
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip "*) echo "$0 $*" >> pip.log ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def project(tmp_path) -> Path:
    """What venv.sh reads, with requirements that this interpreter meets, and ``python``, which is
    this interpreter, but `-m venv` copies itself, and `-m pip` logs its arguments."""
    for name in ("requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text(re.sub(r"(==|>=)[^;\s]+", "", (ROOT / name).read_text()))
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def choose(project: Path, ci: str = "", status: int = 0) -> tuple[str, str]:
    """What venv.sh prints, the interpreter that it chooses last, and its errors."""
    script = f'set -- --help; NEEDS="{NEEDED}"; '  # arguments are the caller's own
    script += f'source {ROOT}/scripts/venv.sh; echo "$PYTHON"'
    command = ["bash", "-euo", "pipefail", "-c", script]
    environment = {**os.environ, "PYTHON": f"{project}/python", "CI": ci}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def add_line(path: Path, line: str) -> None:
    path.write_text(f"{path.read_text()}{line}\n")


def test_an_environment_that_has_everything_is_kept_except_in_ci(project):
    add_line(project / "requirements-dev.txt", "torch==0.1")  # requirements.txt takes any torch
    assert choose(project) == (f"{project}/python\n", "")
    assert not (project / ".venv").exists()
    assert choose(project, ci="true")[0].endswith("\n.venv/bin/python\n")
    assert (project / "pip.log").exists()


@pytest.mark.parametrize("missing", ["torch>=99", "numpy<1", "no-such-package", "ruff==0.1"])
def test_an_environment_that_lacks_something_is_replaced(project, missing):
    name = "requirements-dev.txt" if "ruff" in missing else "requirements.txt"  # tests pin theirs
    add_line(project / name, f"{missing}  # new")
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


UNUSABLE = {  # message, and what the interpreter does
    " is 3.9.1; set PYTHON to Python 3.10 or newer": "[ $1 = --version ] && echo 3.9.1",
    " cannot make .venv; install its venv package (Debian: python3-venv)": "[ $1 = -c ]",
    ": no such program; set PYTHON to Python 3.10 or newer": None,
}


@pytest.mark.parametrize(("message", "code"), UNUSABLE.items())
def test_an_interpreter_that_cannot_be_used_is_named(project, message, code):
    python = project / "python"
    python.write_text(f"#!/usr/bin/env bash\n{code}\n") if code else python.unlink()
    assert choose(project, status=2)[1] == f"error: {python}{message}\n"
