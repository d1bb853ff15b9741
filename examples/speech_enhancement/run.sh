#!/usr/bin/env bash
# Table 1 and Figure 4 of Gonzalez et al. (2023) on a small scale, in an hour on a CPU:
#   bash examples/speech_enhancement/run.sh                   # --help shows what can be changed
# Run it again and it picks up where it was stopped.
set -euo pipefail
data="" output="" seeds="0 1 2" epochs=8
strategies="RAND SB BKT" fixed="1 4 8" dynamic="2 4 8 16"  # clips and seconds in a batch
while [ $# -gt 0 ]; do
    case $1 in
        --data | --output | --seeds | --epochs | --strategies | --fixed | --dynamic)
            [ $# -gt 1 ] || { echo "$1: give a value" >&2; exit 2; }
            declare "${1#--}=$2" && shift 2 ;;
        --help)
            echo "run.sh [--data WAVS] [--output DIR] [--seeds '$seeds'] [--epochs $epochs]"
            echo " [--strategies '$strategies'] [--fixed '$fixed'] [--dynamic '$dynamic']"; exit ;;
        *) echo "unknown option $1; --help shows those that there are" >&2; exit 2 ;;
    esac
done
check() { [[ $2 =~ ^($3)(\ ($3))*$ ]] || { echo "$1 '$2': use $4" >&2; exit 2; }; }
check --seeds "$seeds" '[0-9]{1,6}' "whole numbers, as in '0 1 2'"
check --epochs "$epochs" '[1-9][0-9]{0,4}' "a whole number, 1 or more"
check --strategies "$strategies" 'RAND|SB|BKT' "some of 'RAND SB BKT'"
check "--fixed and --dynamic" "$(echo $fixed $dynamic)" '[1-9][0-9.]{0,5}' "numbers, 1 or more"
[[ -z $data || $data = /* ]] || data=$PWD/$data
[[ -z $output || $output = /* ]] || output=$PWD/$output
here=$(dirname "${BASH_SOURCE[0]}") && cd "$here/../.." && here=examples/speech_enhancement
[ -n "$data" ] || NEEDS=espeakng-loader; source scripts/venv.sh
export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # one thread, so that times compare

if [ -z "$data" ]; then
    data=data/enhancement  # 7.7 minutes of speech
    "$PYTHON" scripts/make_demo_corpus.py $data --clips 200 --duration_scale 0.35
fi
runs=${output:=runs/enhancement}/runs settings="--data $data --epochs $epochs"; mkdir -p "$runs"
[ -n "$(ls "$runs")" ] || echo "$settings" > "$output/settings"
if [ "$(cat "$output/settings")" != "$settings" ]; then
    echo "$output: made with $(cat "$output/settings"); use another --output" >&2; exit 2
fi
sizes=$(for n in $fixed; do echo size=$n; done; for n in $dynamic; do echo seconds=$n; done)
for seed in $seeds; do for strategy in $strategies; do for size in $sizes; do
    result=$runs/$strategy-$size-$seed.json
    [ -f "$result" ] || "$PYTHON" $here/train.py "$data" -o "$result" \
        --strategy "$strategy" "--batch_$size" --seed "$seed" --epochs "$epochs"
done; done; done
"$PYTHON" $here/tables.py "$output"
