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

source /opt/venv/bin/activate
export PATH=/opt/conda/bin:/usr/local/cuda/bin:/usr/bin:/bin
torchrun --nproc_per_node 2 pretrain_gpt.py "${MODEL_ARGS[@]}"
PATH=/opt/other/bin:$PATH torchrun --nproc_per_node 4 pretrain_gpt.py "${MODEL_ARGS[@]}"
/opt/conda/bin/torchrun --nproc_per_node 8 pretrain_gpt.py "${MODEL_ARGS[@]}"
PYTHON=/opt/conda/bin/python3
"$PYTHON" -m torch.distributed.run --nproc_per_node 16 pretrain_gpt.py "${MODEL_ARGS[@]}"
