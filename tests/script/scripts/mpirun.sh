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

mpirun -np 16 -npernode 8 --hostfile hosts.txt -x NCCL_DEBUG=INFO -x PATH --allow-run-as-root --bind-to none -mca btl ^openib \
    python pretrain_gpt.py "${MODEL_ARGS[@]}"
mpirun --np 32 --map-by ppr:4:node --mca pml ob1 python pretrain_gpt.py "${MODEL_ARGS[@]}" --tensor-model-parallel-size 4
mpirun -N 8 -H node1:8,node2:8,node3:8 python pretrain_gpt.py "${MODEL_ARGS[@]}" --global-batch-size 240
