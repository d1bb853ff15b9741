#!/usr/bin/env bash
# Run the checks and the tests: bash scripts/test.sh [pytest's options]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh espeakng-loader hypothesis pytest pytest-xdist ruff
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
export OMP_NUM_THREADS=1  # the models are tiny: a second thread only waits for the first
"$PYTHON" -m pytest --numprocesses 2 --dist loadgroup "$@"
