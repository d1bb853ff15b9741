#!/usr/bin/env bash
# The whole recipe on a small scale: bash scripts/demo.sh
# Makes a corpus, trains a small model on it with random and with efficient batches, and compares
# the two. Run it again and it picks up where it left off. EPOCHS=1 trains for a fifth of the time.
set -euo pipefail
cd "$(dirname "$0")/.."
NEEDS=espeakng-loader
source scripts/venv.sh

echo "== 600 clips of 0.4 to 4 seconds, with LJSpeech's spread of lengths"
"$PYTHON" scripts/make_demo_corpus.py data/demo --clips 600 --duration_scale 0.4
[ -f filelists/demo_val.txt ] ||
    "$PYTHON" scripts/prepare_corpus.py data/demo --name demo > /dev/null

# Small, with frames of 25 ms, a high learning rate and guided attention: it learns in minutes.
settings="data_dir=data/demo,training_files=filelists/demo_train.txt,\
validation_files=filelists/demo_val.txt,epochs=${EPOCHS:-5},batch_size=8,hop_length=551,learning_rate=4e-3,\
guided_attention_weight=1,max_decoder_steps=300,p_encoder_dropout=0.1,p_postnet_dropout=0.1,\
symbols_embedding_dim=128,encoder_embedding_dim=128,prenet_dim=128,attention_rnn_dim=128,\
attention_dim=32,attention_location_n_filters=8,attention_location_kernel_size=15,\
decoder_rnn_dim=128,postnet_embedding_dim=128"

echo "(two runs of one to five minutes each; if stopped, run the same command again to resume)"
echo "== RAND: random batches of 8"
"$PYTHON" train.py -o runs/demo/RAND --resume --hparams "$settings,batching=RAND"
echo "== SSB-DBS-BR: semi-sorted batches of dynamic size, in random order"
"$PYTHON" train.py -o runs/demo/SSB-DBS-BR --resume --hparams "$settings,batching=SSB-DBS-BR"

echo
"$PYTHON" scripts/results.py runs/demo
cat <<END

(Steps are decoder steps per epoch: frames of all batches. On a CPU, padding counts too.
Times are wall-clock: other programs on this machine change them.)

Curves, pictures, audio:   $PYTHON -m tensorboard.main --logdir runs/demo
Alignment to look at:      runs/demo/SSB-DBS-BR/sample/alignment.png
Speech to hear:            runs/demo/SSB-DBS-BR/sample/predicted.wav
                           (each frame predicted from the true ones before it)
Synthesize speech:         $PYTHON scripts/synthesize.py \\
                             -c runs/demo/SSB-DBS-BR "Who went home?"
END
