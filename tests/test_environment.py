"""What has to be installed, which environment the scripts take, and which device."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import device

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("espeakng-loader", "hypothesis", "pytest", "pytest-xdist", "ruff")  # by test.sh


def listed(name: str) -> set[str]:
    """The packages of a requirements file."""
    lines = (ROOT / name).read_text().splitlines()
    return {re.split(r"[<>=;\s]", line)[0] for line in lines if line and line[0] not in "#-"}


def imported(paths) -> set[str]:
    """The packages whose modules these files import."""
    modules = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module.partition(".")[0])
    packages = importlib.metadata.packages_distributions()
    return {package for module in modules for package in packages.get(module, ())}


def test_what_is_imported_is_listed_and_nothing_else():
    tests = ROOT.glob("tests/*.py")
    programs = [*ROOT.glob("*.py"), *ROOT.glob("text/*.py"), *ROOT.glob("scripts/*.py")]
    by_torch = {"tensorboard"}  # as torch.utils.tensorboard
    assert imported(programs) - {"espeakng-loader"} | by_torch == listed("requirements.txt")
    everything = listed("requirements.txt") | listed("requirements-dev.txt")
    assert imported(tests) <= everything
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines and "torch>=2.4" in (ROOT / "requirements.txt").read_text()


# Which environment


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder with what venv.sh reads, where every requirement is met by this interpreter."""
    for name in ("requirements.txt", "requirements-dev.txt"):
        pins = re.compile(r"(==|>=)[^;\s]+")  # other versions are no concern of these tests
        (tmp_path / name).write_text(pins.sub("", (ROOT / name).read_text()))
    return tmp_path


def chosen(project: Path, python: str = sys.executable, ci: str = "", status: int = 0):
    """The interpreter that venv.sh chooses, its output before that, and its errors."""
    script = f'set -- --help; NEEDS="{" ".join(NEEDED)}"; '  # arguments are the caller's own
    script += f'source {ROOT}/scripts/venv.sh; echo "$PYTHON"'
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=project, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON": python, "CI": ci},
    )  # fmt: skip
    assert result.returncode == status, result.stderr
    *output, last = result.stdout.splitlines() or [""]
    return last, output, result.stderr


def make_python(folder: Path) -> Path:
    """This interpreter, but `-m venv` makes itself again, and `-m pip` notes its arguments."""
    folder.mkdir(parents=True)
    python = folder / "python"
    python.write_text(
        '#!/usr/bin/env bash\n'
        'case "$*" in\n'
        f'"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;\n'
        '"-m pip "*) echo "$0 $*" >> pip.log ;;\n'
        f'*) exec {sys.executable} "$@" ;;\n'
        "esac\n"
    )  # fmt: skip
    python.chmod(0o755)
    return python


def test_an_environment_that_has_what_is_needed_is_kept(project):
    assert chosen(project) == (sys.executable, [], "")
    assert not (project / ".venv").exists()


@pytest.mark.parametrize("lack", ["torch>=99", "numpy<1", "no-such-package"])
def test_what_lacks_something_leads_to_an_environment_made_here(project, lack):
    with open(project / "requirements.txt", "a") as file:
        file.write(f"{lack}  # new\n")
    python = make_python(project / "mine")
    found, output, errors = chosen(project, str(python))
    assert found == ".venv/bin/python" and "Installing into .venv" in output[0]
    assert f"lacks {lack}; install what it lacks to use it instead" in errors
    log = project / "pip.log"
    assert re.fullmatch(
        r"\.venv/bin/python .* install .*-r requirements-dev.txt\n", log.read_text()
    )
    assert chosen(project, str(python)) == (".venv/bin/python", [], errors)
    assert log.read_text().count("\n") == 1, "it is there already"
    with open(project / "requirements-dev.txt", "a") as file:
        file.write("tqdm\n")
    chosen(project, str(python))
    assert log.read_text().count("\n") == 2, "made again, as the requirements changed"


def test_a_package_for_tests_alone_has_to_be_the_pinned_one(project):
    dev = project / "requirements-dev.txt"
    dev.write_text(dev.read_text().replace("torch\n", "torch==0.1\n"))
    assert chosen(project)[0] == sys.executable, "of torch, requirements.txt says what will do"
    dev.write_text(dev.read_text().replace("ruff\n", "ruff==0.1\n"))
    found, _, errors = chosen(project, str(make_python(project / "mine")))
    assert found == ".venv/bin/python" and "lacks ruff==0.1;" in errors


def test_ci_always_has_the_pinned_versions(project):
    python = make_python(project / "mine")
    assert chosen(project, str(python), ci="true")[0] == ".venv/bin/python"
    assert (project / "pip.log").exists()


def test_an_interpreter_that_is_too_old_is_named(project):
    python = project / "python3.9"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n')
    python.chmod(0o755)
    errors = chosen(project, str(python), status=2)[2]
    assert errors == f"error: {python} is Python 3.9.1; set PYTHON to Python 3.10 or newer\n"


def test_the_pins_come_before_the_ranges():
    """Else pip fetches the newest PyTorch, half a gigabyte, before it takes the pinned one."""
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    assert lines[-1] == "-r requirements.txt"


# Which device


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine with an NVIDIA driver, and a PyTorch with CUDA that finds no GPU."""
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def refuse(message: str):
    def init():
        raise RuntimeError(message)

    return init


def test_without_a_driver_or_with_a_gpu_there_is_nothing_to_explain(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.why_no_gpu() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.why_no_gpu() != ""
    monkeypatch.setenv("PATH", "/nowhere")
    if not Path("/proc/driver/nvidia/version").exists():
        assert device.why_no_gpu() == ""


def test_a_torch_without_cuda_is_named(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    version = torch.__version__
    message = f"torch {version} has no CUDA; install one that has, see pytorch.org"
    assert device.why_no_gpu() == message


def test_a_driver_that_is_too_old_is_named(driver, monkeypatch):
    reason = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
    monkeypatch.setattr(torch.cuda, "init", refuse(reason))
    assert device.why_no_gpu() == f"torch {torch.__version__}: {' '.join(reason.split())}"


def test_a_gpu_that_is_hidden_is_named(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "init", refuse("No CUDA GPUs are available"))
    found = device.why_no_gpu()
    assert found.endswith(": No CUDA GPUs are available (CUDA_VISIBLE_DEVICES is '')")


def test_training_says_why_before_it_says_cpu(driver, monkeypatch, settings, tmp_path, capsys):
    import train

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(train, "load_data", lambda _: refuse("so far")())
    options = ["-o", str(tmp_path / "run"), "--hparams", settings]
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    with pytest.raises(RuntimeError, match="so far"):
        train.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("note: no GPU is used: torch ") and "has no CUDA" in printed[0]
    assert printed[1].startswith("training on CPU")
