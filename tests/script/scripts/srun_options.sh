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

srun -N 2 --ntasks-per-node 4 --gpus-per-node=4 -p gpu -J gpt --mpi=pmix -l python pretrain_gpt.py "${MODEL_ARGS[@]}"
srun -n16 -N2 --gres=gpu:8 python pretrain_gpt.py "${MODEL_ARGS[@]}"
srun --nodes 3 --gpus-per-node 8 --exclusive python pretrain_gpt.py "${MODEL_ARGS[@]}" --global-batch-size 240
srun --ntasks=32 -A project python pretrain_gpt.py "${MODEL_ARGS[@]}"
srun -N 4 --gpus 32 python pretrain_gpt.py "${MODEL_ARGS[@]}" --lr 1e-4
