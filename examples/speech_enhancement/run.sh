#!/usr/bin/env bash
# Table 1 and Figure 4 of Gonzalez et al. (2023) on a small scale, in an hour on a CPU:
#   bash examples/speech_enhancement/run.sh
#   EPOCHS=39 SEEDS="0 1" OUTPUT=runs/longer bash examples/speech_enhancement/run.sh
# Run it again and it picks up where it was stopped.
set -euo pipefail
[ $# = 0 ] || { echo "error: $1: takes no arguments; set the variables below" >&2; exit 2; }
data=${DATA:-}                               # folder of wavs; default: a synthetic voice
output=${OUTPUT:-runs/enhancement}           # folder for results
seeds=${SEEDS:-0 1 2} epochs=${EPOCHS:-8}    # more of them make differences clearer
strategies=${STRATEGIES:-RAND SB BKT}
fixed=${FIXED-1 4 8}                         # clips in a batch
dynamic=${DYNAMIC-2 4 8 16}                  # seconds in a batch, with its padding

[[ -z $data || $data = /* ]] || data=$PWD/$data
[[ $output = /* ]] || output=$PWD/$output
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -n "$data" ] || NEEDS=espeakng-loader; source scripts/venv.sh
export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # one thread, so that times compare

if [ -z "$data" ]; then
    data=data/enhancement  # 7.7 minutes of speech
    "$PYTHON" scripts/make_demo_corpus.py $data --clips 200 --duration_scale 0.35
fi
mkdir -p "$output/runs"
settings="DATA=$data EPOCHS=$epochs"
[ -f "$output/settings" ] || echo "$settings" > "$output/settings"
if [ "$(cat "$output/settings")" != "$settings" ]; then
    echo "$output: made with $(cat "$output/settings"); use another OUTPUT" >&2; exit 2
fi
sizes=$(for n in $fixed; do echo size=$n; done; for n in $dynamic; do echo seconds=$n; done)
for seed in $seeds; do for strategy in $strategies; do for size in $sizes; do
    result=$output/runs/$strategy-$size-$seed.json
    [ -f "$result" ] || "$PYTHON" examples/speech_enhancement/train.py "$data" -o "$result" \
        --strategy "$strategy" "--batch_$size" --seed "$seed" --epochs "$epochs"
done; done; done
"$PYTHON" examples/speech_enhancement/tables.py "$output"
