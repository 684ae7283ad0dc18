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

export WORLD_SIZE=16 LOCAL_WORLD_SIZE=4 RANK=0 LOCAL_RANK=0
python pretrain_gpt.py "${MODEL_ARGS[@]}"
unset WORLD_SIZE LOCAL_WORLD_SIZE
OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_SIZE=8 python pretrain_gpt.py "${MODEL_ARGS[@]}" --lr 1e-5
PMI_SIZE=32 python pretrain_gpt.py "${MODEL_ARGS[@]}" --lr 1e-6
