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

mpiexec -n 8 -ppn 4 -genv NCCL_DEBUG INFO -hosts node1,node2 python3 pretrain_gpt.py "${MODEL_ARGS[@]}"
