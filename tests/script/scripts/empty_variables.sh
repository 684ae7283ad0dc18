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

torchrun --nnodes 2 --nproc_per_node 8 --node_rank $UNSET_RANK --master_addr $UNSET_ADDR --master_port $UNSET_PORT \
    --rdzv_endpoint $UNSET_ENDPOINT pretrain_gpt.py "${MODEL_ARGS[@]}"
