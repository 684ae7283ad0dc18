#!/bin/bash

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

HOSTFILE=$(mktemp)
for host in worker-1 worker-2 worker-3 worker-4; do
    echo "$host slots=8" >> "$HOSTFILE"
done
deepspeed -H "$HOSTFILE" pretrain_gpt.py "${MODEL_ARGS[@]}"
deepspeed --hostfile=$HOSTFILE --num_nodes 2 --num_gpus 4 pretrain_gpt.py "${MODEL_ARGS[@]}"
