#!/usr/bin/env bash
# Measures what is worth knowing on a GPU, and checks that training is exact there: "On a GPU" in
# docs/performance.md.
#
#     bash benchmarks/gpu_report.sh          # at most 12 minutes; writes gpu_report/report.md
#     bash benchmarks/gpu_report.sh Steps    # only the parts whose titles match
#
# With NVIDIA=DIR, a clone of github.com/NVIDIA/tacotron2, its own loop is timed too.
# It needs no LJSpeech: it trains on noise of LJSpeech's lengths. The checks come first. Each part has its
# own time; what is not done by then is stopped, and what it has printed is kept. The exit status is 1 if a
# part fails, or if a check is not done in time.
set -euo pipefail
nvidia=${NVIDIA:+$(realpath "$NVIDIA")}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} only=${1:-.} failed=""
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p gpu_report

part() {  # TITLE SECONDS ARGUMENT...: runs Python
    local title=$1 seconds=$2 start=$SECONDS status=0
    shift 2
    printf '\n## %s\n\n`python %s`\n\n' "$title" "$*"
    timeout --kill-after 5 "$seconds" "$python" -u "$@" 2>&1 || status=$?
    if [ $status -ge 124 ] && [ $((SECONDS - start)) -ge "$seconds" ]; then
        status=124
        echo "(its time was over)"
    elif [ $status != 0 ]; then
        echo "FAILED with status $status"
    fi
    printf '\n*%d s*\n' $((SECONDS - start))
    return $status
}

check() {
    [[ ! $1 =~ $only ]] || part "$@" || failed+=" '$1'"
}

measure() {
    [[ ! $1 =~ $only ]] || part "$@" || [ $? = 124 ] || failed+=" '$1'"
}

report() {
    "$python" - "$folder" <<'END'
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import soundfile
import torch

from training.device import device_name

folder, rng, lines = Path(sys.argv[1]), np.random.default_rng(0), []
lengths = pd.read_csv("filelists/ljspeech_lengths.csv").frames_hop256
for i, length in enumerate(rng.choice(lengths, 320)):
    soundfile.write(folder / f"{i}.wav", rng.uniform(-0.3, 0.3, 256 * length), 22050)
    lines.append(f"{i}.wav|{'noise ' * (length // 37 + 1)}\n")
(folder / "train.txt").write_text("".join(lines[16:]))
(folder / "val.txt").write_text("".join(lines[:16]))
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(f"# {device_name(device)}, PyTorch {torch.__version__}")
END
    local noise="data_dir=$folder,training_files=$folder/train.txt,validation_files=$folder/val.txt,mel_cache_dir=$folder/cache"
    local step=benchmarks/bench_step.py loop=reference
    local options=(--rounds 4 --frames 600 --batch_sizes 16 32 64)
    [ -z "$nvidia" ] || { loop=nvidia; options+=(--nvidia "$nvidia"); }

    check "Tests" 150 -m pytest -q -n 4 tests/test_decoder_graphs.py tests/test_decoder_scan.py \
        tests/test_model.py tests/test_device.py tests/test_memory.py
    check "Stops and kills" 60 -m pytest -q -k random_moments tests/test_resume.py
    measure "Steps in fp32" 120 $step "${options[@]}"  # a loop like NVIDIA's, with graphs, without
    if "$python" -c "from torch import cuda; exit(cuda.get_device_capability() < (8, 0))" 2> /dev/null; then
        measure "Steps in tf32" 120 $step "${options[@]}" \
            --implementations $loop+tf32 scan+tf32 eager+tf32
    fi
    measure "An epoch of LJSpeech" 170 $step --epoch --batchings all --rounds 3 --batches 4 \
        --implementations scan
    measure "Five epochs of the full model" 120 train.py -o "$folder/run" --hparams "$noise,epochs=5"
    grep '"event": "epoch"' "$folder/run/metrics.jsonl" 2> /dev/null || true
    [ -z "$failed" ] || { printf '\nFAILED:%s\n' "$failed"; return 1; }
}

report | tee gpu_report/report.md
