#!/usr/bin/env bash
# The paper's Table 2: bash scripts/run_all.sh        (--help shows what can be changed)
# Trains its ten experiments one after another, then prints its tables.
# Run it again to continue where it was stopped.
set -euo pipefail
here=$PWD  # where given paths start
cd "$(dirname "$0")/.."
source scripts/venv.sh
root=$PWD
case $PYTHON in /*) ;; */*) PYTHON=$root/$PYTHON ;; esac
cd "$here"
exec "$PYTHON" "$root/scripts/run_all.py" "$@"
