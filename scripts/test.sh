#!/usr/bin/env bash
# Run the checks and the tests: bash scripts/test.sh [pytest's options]
set -euo pipefail
cd "$(dirname "$0")/.."
NEEDS="espeakng-loader hypothesis pytest pytest-xdist ruff"
source scripts/venv.sh
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
export OMP_NUM_THREADS=1  # of each: three test files run at a time, which often wait
"$PYTHON" -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@"
