# Sourced by demo.sh and test.sh, from the project's root: makes .venv and puts it first on the
# PATH. PYTHON=python3.12 picks the interpreter. Installs again when requirements.txt changes.
PYTHON=${PYTHON:-python3}
if ! cmp -s requirements.txt .venv/installed.txt; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "error: $PYTHON is $("$PYTHON" --version 2>&1); set PYTHON to Python 3.10 or newer" >&2
        exit 2
    }
    echo "== Installing into .venv (PyTorch is large: minutes on the first run)"
    "$PYTHON" -m venv .venv || {
        echo "error: $PYTHON cannot make .venv; install its venv package (Debian: python3-venv)" >&2
        exit 2
    }
    .venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt
    cp requirements.txt .venv/installed.txt
fi
export PATH="$PWD/.venv/bin:$PATH"
