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

accelerate launch --multi_gpu --num_processes 16 --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 --mixed_precision bf16 \
    --use_megatron_lm --megatron_lm_tp_degree 2 train.py "${MODEL_ARGS[@]}"
