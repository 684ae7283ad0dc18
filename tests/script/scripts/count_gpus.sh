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

GPUS=$(nvidia-smi -L | wc -l)
python -c 'print("python runs")'
python3 tools/preprocess_data.py --input data.jsonl --output-prefix data || true
torchrun --standalone --nproc_per_node "$GPUS" pretrain_gpt.py "${MODEL_ARGS[@]}"
