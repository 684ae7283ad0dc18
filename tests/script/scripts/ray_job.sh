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

ray stop --force
ray start --head --num-gpus 8
WORLD_SIZE=8 ray job submit --address http://127.0.0.1:8265 --runtime-env-json '{"env_vars": {"A": "b"}}' -- \
    python3 pretrain_gpt.py "${MODEL_ARGS[@]}"
