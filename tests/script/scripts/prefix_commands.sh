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

env OMP_NUM_THREADS=1 torchrun --nproc_per_node 1 pretrain_gpt.py "${MODEL_ARGS[@]}"
timeout -k 10 1h torchrun --nproc_per_node 2 pretrain_gpt.py "${MODEL_ARGS[@]}"
WORLD_SIZE=4 numactl --cpunodebind=0 --membind=0 python pretrain_gpt.py "${MODEL_ARGS[@]}"
echo --nproc_per_node 8 pretrain_gpt.py "${MODEL_ARGS[@]}" | xargs torchrun
( exec torchrun --nproc_per_node 16 pretrain_gpt.py "${MODEL_ARGS[@]}" )
