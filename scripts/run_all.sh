#!/usr/bin/env bash
# The paper's Table 2: trains its ten experiments one after another, and prints its tables.
#
#     python scripts/prepare_ljspeech.py --data_dir data    # once
#     bash scripts/run_all.sh
#
# RAND shuffles the clips, SB sorts them by length, SSB by length plus noise, and BKT and ATS sort
# parts of them. DBS fills batches to a capacity, and BR shuffles their order. The settings are the
# paper's or, where it names none, NVIDIA's, such as a learning rate of 1e-3 for all.
#
# If it was stopped or has failed, the same command goes on: train.py resumes a run, and ends at
# once if it is finished. Arguments go to every train.py, and the variables below choose the runs.
# Paths start at the repository's root.
#
#     EXPERIMENTS="RAND SSB-DBS-BR" SEEDS="0 1000 2000" bash scripts/run_all.sh --hparams epochs=40
#     OUTPUT=runs/common START=runs/table2/RAND bash scripts/run_all.sh --hparams epochs=260
#     OUTPUT=runs/mine bash scripts/run_all.sh --preset nvidia --hparams \
#         "data_dir=data/mine,training_files=filelists/mine_train.txt,validation_files=..."
#
# On other clips, plot_batching.py shows which bucket_size and n_bins make BKT and ATS pad like SSB.
# A batch_capacity, which only DBS has, needs EXPERIMENTS="SB-DBS SSB-DBS SSB-DBS-BR".
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

EXPERIMENTS=${EXPERIMENTS:-RAND SB-BR SSB-BR BKT-BR ATS-BR SB SSB SB-DBS SSB-DBS SSB-DBS-BR}
SEEDS=${SEEDS:-0}              # epoch e is planned from seed + e, so keep them further apart
OUTPUT=${OUTPUT:-runs/table2}  # a run's folder is OUTPUT/EXPERIMENT/seedN
START=${START:-}               # if set, a run begins with the newest checkpoint in START/seedN

for seed in $SEEDS; do
    for experiment in $EXPERIMENTS; do
        run=$OUTPUT/$experiment/seed$seed
        if [ -z "$START" ]; then
            begin=(--resume --hparams data_dir=data/LJSpeech-1.1)
        elif compgen -G "$run/checkpoint_*.pt" > /dev/null; then
            begin=(--resume)
        else
            begin=(-c "$START/seed$seed")  # with its data, settings and optimiser
        fi
        echo "== $run"
        "$PYTHON" train.py -o "$run" "${begin[@]}" "$@" --hparams "batching=$experiment,seed=$seed"
    done
done
"$PYTHON" scripts/results.py "$OUTPUT" --figure "$OUTPUT/figure4.png" | tee "$OUTPUT/tables.md"
