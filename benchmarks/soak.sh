#!/usr/bin/env bash
# Kill trainings at random moments and resume them: bash benchmarks/soak.sh [--kills N] [--seed S]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
exec "$PYTHON" benchmarks/soak.py "$@"
