#!/usr/bin/env bash
# What a GPU can do with this recipe, in at most ten minutes: bash benchmarks/gpu_report.sh
set -euo pipefail
cd "$(dirname "$0")/.."
exec timeout 620 "${PYTHON:-python3}" benchmarks/gpu_report.py "$@"
