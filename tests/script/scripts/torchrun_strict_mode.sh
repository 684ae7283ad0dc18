#!/bin/bash

set -euo pipefail
cleanup() { local status=$?; echo "ended with $status"; }
trap cleanup EXIT
log() { echo "[$(date +%s)] $*"; }
NNODES=${NNODES:-4}
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --tokenizer-type NullTokenizer
    --vocab-size 32000
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 1000
    --lr 3e-4
    --bf16
    --use-distributed-optimizer
)

log "starting on $NNODES nodes"
torchrun --nnodes "$NNODES" --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "${HEAD:-node001}:29500" --rdzv-id "$RANDOM" \
    pretrain_gpt.py "${MODEL_ARGS[@]}" 2>&1 | tee /dev/null
log "done"
