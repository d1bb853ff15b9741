#!/usr/bin/env bash
# What a GPU can do with this recipe, in nine minutes: bash benchmarks/gpu_report.sh
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" benchmarks/gpu_report.py "$@"
