# Sourced from the project's root: NEEDS="PACKAGE ..." source scripts/venv.sh
# Sets PYTHON to an interpreter that has requirements.txt and the packages of
# requirements-dev.txt that NEEDS names: the caller's python3 (or PYTHON=python3.12) if it has them all, else
# .venv's. Makes .venv, and again when the requirements change. CI always uses .venv.
PYTHON=${PYTHON:-python3}
if [ -n "${CI:-}" ] || ! command -v "$PYTHON" > /dev/null || ! "$PYTHON" - ${NEEDS:-} <<'END'
import sys

try:
    from importlib import metadata

    from packaging.requirements import Requirement
except ImportError:
    sys.exit(1)


def read(path):
    lines = [line.partition("#")[0].strip() for line in open(path, encoding="utf-8")]
    listed = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return {one.name: one for one in listed if not one.marker or one.marker.evaluate()}


def is_met(requirement):
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


needed, dev = read("requirements.txt"), read("requirements-dev.txt")
needed.update({name: dev[name] for name in sys.argv[1:]})
missing = [str(requirement) for requirement in needed.values() if not is_met(requirement)]
if missing and is_met(Requirement("torch")):
    print(
        "note: using .venv: %s has PyTorch, but lacks %s; install what it lacks to use it instead"
        % (sys.executable, ", ".join(missing)),
        file=sys.stderr,
    )
sys.exit(bool(missing) or sys.version_info < (3, 10))
END
then
    if ! cat requirements.txt requirements-dev.txt | cmp -s - .venv/installed.txt; then
        command -v "$PYTHON" > /dev/null || {
            echo "error: $PYTHON: no such program; set PYTHON to Python 3.10 or newer" >&2
            exit 2
        }
        "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
            echo "error: $PYTHON is $("$PYTHON" --version 2>&1); set PYTHON to Python 3.10 or newer" >&2
            exit 2
        }
        echo "== Installing into .venv (PyTorch is large: minutes on the first run)"
        "$PYTHON" -m venv .venv || {
            echo "error: $PYTHON cannot make .venv; install its venv package (Debian: python3-venv)" >&2
            exit 2
        }
        .venv/bin/python -m pip install --disable-pip-version-check -r requirements-dev.txt
        cat requirements.txt requirements-dev.txt > .venv/installed.txt
    fi
    PYTHON=.venv/bin/python
fi
