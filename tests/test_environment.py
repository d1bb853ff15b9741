"""What must be installed, and which rooms import which."""

import ast
import importlib.metadata
import re
import sys
from itertools import chain
from pathlib import Path

import pytest
from conftest import ROOT

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
FILES = [*ROOT.glob("*.py"), *chain(*(ROOT.glob(f"{name}/*.py") for name in chain(*ROOMS)))]
STAND_ALONE = ("batching", "decoder", "loss_function", "text")  # but for a helper from layers


def imports(path: Path) -> set[str]:
    """Returns the modules that a file imports, anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules


def test_imports_go_one_way():
    rank = {name: place for place, names in enumerate(ROOMS) for name in names}
    for path in FILES:
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        ours = {name.partition(".")[0] for name in imports(path)} & rank.keys() - {room}
        assert all(rank[name] < rank[room] for name in ours), (path, ours)
        assert room not in STAND_ALONE or ours <= {"layers"}, path
    for path in ROOT.glob("scripts/*.py"):
        assert not any(name.startswith("scripts") for name in imports(path)), path


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows few packages' modules")
def test_requirements_list_what_is_imported_and_nothing_else():
    of_module = importlib.metadata.packages_distributions()
    modules = {name.partition(".")[0] for path in FILES for name in imports(path)}
    programs = {package for module in modules for package in of_module.get(module, ())}
    by_torch = {"tensorboard"}  # as torch.utils.tensorboard
    listed = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.M)
    assert programs - {"espeakng-loader"} | by_torch == set(listed)
