# Sourced from the project's root: NEEDS="PACKAGE ..." source scripts/venv.sh
# Sets PYTHON to an interpreter that has requirements.txt, and those of requirements-dev.txt that
# NEEDS names: the caller's python3 (or PYTHON=python3.12) if it has them all, else .venv's. Makes
# .venv, and again when the requirements change. CI always uses .venv.
PYTHON=${PYTHON:-python3}
refuse() {
    echo "error: $1" >&2
    exit 2
}
if [ -n "${CI:-}" ] || ! command -v "$PYTHON" > /dev/null || ! "$PYTHON" - ${NEEDS:-} <<'END'
import re, sys

try:
    from importlib.metadata import PackageNotFoundError, version
    from packaging.requirements import Requirement
except ImportError:
    sys.exit(1)

def lacks(requirement):
    try:
        return not requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return True

lines, dev = (open("requirements%s.txt" % kind).readlines() for kind in ("", "-dev"))
lines += [line for line in dev if re.split(r"[^\w-]", line)[0] in sys.argv[1:]]
needed = [Requirement(line.partition("#")[0].strip()) for line in lines if line[0].isalpha()]
missing = [r.name + str(r.specifier) for r in needed if lacks(r) and (not r.marker or r.marker.evaluate())]
if missing and not lacks(Requirement("torch")):
    note = "note: using .venv: %s has PyTorch, but lacks %s; install what it lacks to use it instead"
    print(note % (sys.executable, ", ".join(missing)), file=sys.stderr)
sys.exit(bool(missing) or sys.version_info < (3, 10))
END
then
    if ! cat requirements.txt requirements-dev.txt | cmp -s - .venv/installed.txt; then
        fix="set PYTHON to Python 3.10 or newer"
        command -v "$PYTHON" > /dev/null || refuse "$PYTHON: no such program; $fix"
        "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            refuse "$PYTHON is $("$PYTHON" --version 2>&1); $fix"
        echo "== Installing into .venv (PyTorch is large: minutes on the first run)"
        "$PYTHON" -m venv .venv ||
            refuse "$PYTHON cannot make .venv; install its venv package (Debian: python3-venv)"
        .venv/bin/python -m pip install --disable-pip-version-check -r requirements-dev.txt
        cat requirements.txt requirements-dev.txt > .venv/installed.txt
    fi
    PYTHON=.venv/bin/python
fi
