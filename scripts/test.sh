#!/usr/bin/env bash
# Run the checks and the tests: bash scripts/test.sh [pytest's options]
set -euo pipefail
cd "$(dirname "$0")/.."
NEEDS="espeakng-loader hypothesis pytest pytest-xdist ruff"
source scripts/venv.sh
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
export OMP_NUM_THREADS=1  # of each: two tests run at a time
"$PYTHON" -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
