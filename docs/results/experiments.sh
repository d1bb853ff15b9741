#!/usr/bin/env bash
# Trains what docs/results.md and docs/speech.md compare, with one thread; call it again to continue.
#
#     bash docs/results/experiments.sh corpus DIR  # prepares the human voice: DIR has it as published
#     bash docs/results/experiments.sh predicted   # what an epoch of same_time takes
#     bash docs/results/experiments.sh rates       # which learning rate suits which batching
#     bash docs/results/experiments.sh padding     # whether padding itself is what sorting changes
#     bash docs/results/experiments.sh same_time   # which batching gives the better voice in the same time
#     bash docs/results/experiments.sh table2      # the paper's ten experiments
#     bash docs/results/experiments.sh reader      # voices/kathleen.pt
#
# All train on the voice of corpus. Of an idle core of an AMD EPYC of family 26, rates takes 2.5 hours a seed, same_time
# 3.5, padding 1 and the others 2 to 4; one of family 25 takes twice as long. Of rates, padding, same_time and table2 a
# second argument names the seeds, so that two calls can use two cores: start the second once the first one trains. The
# runs are in runs/SERIES.
set -euo pipefail
here=$PWD  # where DIR starts
cd "$(dirname "$0")/../.."
source scripts/venv.sh
case $PYTHON in .venv/*) PYTHON=$PWD/$PYTHON ;; esac
export PYTHON OMP_NUM_THREADS=1
model="hop_length=551,symbols_embedding_dim=128,encoder_embedding_dim=128,prenet_dim=128,attention_rnn_dim=160,attention_dim=64,decoder_rnn_dim=160,postnet_embedding_dim=128,p_encoder_dropout=0.3,p_postnet_dropout=0.3"
table2="data_dir=data/kathleen,training_files=filelists/kathleen_train.txt,validation_files=filelists/kathleen_val.txt,$model,guided_attention_weight=1,batch_size=8,attention_location_n_filters=8,checkpoint_minutes=0,keep_checkpoints=1,bucket_size=192,n_bins=24"  # which pad like SSB
reader="data_dir=data/kathleen,training_files=filelists/kathleen_train.txt,validation_files=filelists/kathleen_val.txt,batch_size=8,symbols_embedding_dim=256,encoder_embedding_dim=256,prenet_dim=128,attention_rnn_dim=256,attention_dim=64,attention_location_n_filters=16,decoder_rnn_dim=256,postnet_embedding_dim=256,p_encoder_dropout=0.3,p_postnet_dropout=0.3,checkpoint_minutes=0,keep_checkpoints=1"

corpus() {  # DIR: validates on 100 sentences, and trains on all takes of the others
    local all=filelists/kathleen_all
    [ ! -e data/kathleen ] || return 0
    rm -rf data/kathleen.part ${all}_*.txt
    "$PYTHON" scripts/prepare_corpus.py "$(cd "$here" && realpath "$1")" --name kathleen_all \
        --convert_to data/kathleen.part
    LC_ALL=C sort ${all}_train.txt ${all}_val.txt > ${all}_clips.txt
    awk -F '|' 'NR == FNR {ids[$1]; next}
        {id = $1; sub(".*/", "", id); sub("[.][^.]*$", "", id)}
        id in ids' filelists/kathleen_val_ids.txt ${all}_clips.txt > filelists/kathleen_val.txt
    awk -F '|' 'NR == FNR {texts[$2]; next} !($2 in texts)' \
        filelists/kathleen_val.txt ${all}_clips.txt > filelists/kathleen_train.txt
    rm ${all}_*.txt
    mv data/kathleen.part data/kathleen
}

# run FOLDER EXPERIMENT OPTION...: trains one experiment of one seed into FOLDER/EXPERIMENT/seedN
run() {
    OUTPUT=$1 EXPERIMENTS=$2 SEEDS=$seed bash scripts/run_all.sh "${@:3}"
}

table2() {  # 4 epochs of RAND; then of each experiment 6, and 6 with a lower learning rate
    local experiment
    for seed in ${seeds:-0 1000 2000}; do
        run runs/table2/start RAND --hparams "$table2,epochs=4,learning_rate=2e-3"
        for experiment in RAND SSB-DBS-BR SB SSB SB-BR SSB-BR SB-DBS SSB-DBS BKT-BR ATS-BR; do
            START=runs/table2/start/RAND run runs/table2/common "$experiment" --hparams epochs=10,learning_rate=1e-3
            START=runs/table2/common/$experiment run runs/table2/annealed "$experiment" \
                --hparams epochs=16,learning_rate=3e-4
        done
    done
}

# From nothing, at a rate that falls to 0 over the second half
fair="$reader,guided_attention_weight=1,n_frames_per_step=2,learning_rate_decay=0.5,epochs_per_checkpoint=1"

rates() {  # SEEDS: equal epochs
    local rate experiment
    for seed in ${seeds:-0 1000 2000}; do
        for rate in 1e-3 2e-3 5e-4 4e-3; do
            for experiment in RAND SSB-BR SSB-DBS-BR; do
                run runs/rates/$rate $experiment --preset nvidia --hparams "$fair,epochs=12,learning_rate=$rate"
            done
        done
    done
}

padding() {  # SEEDS: as rates, at the rate of both arms, without what padding does, or with more of it
    local arm patch experiment loss folder
    mkdir -p runs/code mel_cache
    for arm in step,RAND,masked step,SSB-BR,masked batches,SSB-BR,padded; do
        IFS=, read -r patch experiment loss <<< "$arm"
        folder=runs/code/$patch  # this commit with the patch
        if [ ! -e $folder ]; then
            git worktree add -q --detach $folder
            git -C $folder apply "$PWD/docs/results/padding_$patch.patch"
            ln -s "$PWD"/data "$PWD"/runs "$PWD"/mel_cache $folder
            ln -s "$PWD"/filelists/kathleen_{train,val}.txt $folder/filelists
        fi
        for seed in ${seeds:-0 1000 2000}; do
            (cd $folder &&
                run runs/padding/$patch $experiment --preset nvidia --hparams "$fair,epochs=12,learning_rate=1e-3,loss=$loss")
        done
    done
}

predicted() {  # same_time's epochs, on an idle core: three rounds, in an order that rotates
    local seed=0 round experiment
    for round in 0 1 2; do
        for experiment in $(echo RAND SSB-BR SSB-DBS-BR RAND SSB-BR | cut -d ' ' -f $((round + 1))-$((round + 3))); do
            run runs/predicted/round$round "$experiment" --preset nvidia --hparams "$fair,epochs=1"
        done
    done
}

# Each arm at its rate of the series rates; later also SSB-DBS-BR at 1e-3. Their times are equal by predicted, on
# an AMD EPYC of family 26: 1.21 minutes an epoch of RAND, 0.96 of SSB-BR and 0.83 of SSB-DBS-BR, and 0.06 more for
# validating and saving. An arm's part, the middle field, begins with its epochs.
same_time() {  # SEEDS
    local arms=(RAND,40,1e-3 SSB-BR,50,1e-3 SSB-DBS-BR,57,2e-3 SSB-DBS-BR,57-1e-3,1e-3) i experiment part rate folder
    for seed in ${seeds:-0 1000 2000 3000 4000 5000}; do
        for i in 0 1 2 3; do
            IFS=, read -r experiment part rate <<< "${arms[(i + seed / 1000) % 4]}"
            run runs/same_time/epochs$part $experiment --preset nvidia --hparams \
                "$fair,epochs=${part%%-*},learning_rate=$rate"
            folder=runs/same_time/epochs$part/$experiment/seed$seed
            for speech in 0 1 2 3; do  # seeds of the prenet's dropout
                [ -e $folder/speech${speech}_clips.csv ] ||
                    "$PYTHON" scripts/evaluate.py -c $folder --seed $speech -o $folder/speech$speech
            done
        done
    done
}

reader() {
    local settings="$fair,learning_rate=2e-3,dynamic_batch_size=False,precision=bf16,p_encoder_dropout=0.1,p_postnet_dropout=0.1,p_attention_dropout=0.05,p_decoder_dropout=0.05,dropout_in_fall=False,hours=2.5,learning_rate_decay=0.56,text_cleaners=[english_phones],epochs_per_validation=5,epochs_per_checkpoint=10,keep_checkpoints=20"
    "$PYTHON" train.py -o runs/reader --resume --preset nvidia --hparams "$settings"
    [ -e runs/reader/kathleen.pt ] || "$PYTHON" scripts/export.py -c runs/reader -o runs/reader/kathleen.pt --half
}

seeds=${2:-}
"${1:?name a SERIES}" "${@:2}"
