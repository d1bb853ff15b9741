#!/usr/bin/env bash
# Run the checks and the tests: bash scripts/test.sh [pytest's options]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
ruff check .
ruff format --check .
export OMP_NUM_THREADS=1  # of each: two test files run at a time
python -m pytest --numprocesses 2 --dist loadfile "$@"
