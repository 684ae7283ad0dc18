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

TORCHRUN=${TORCHRUN:-torchrun}
PREFIX=
$TORCHRUN --nproc_per_node 1 pretrain_gpt.py "${MODEL_ARGS[@]}"
COMMAND=("$TORCHRUN" --nproc_per_node 2 pretrain_gpt.py)
"${COMMAND[@]}" "${MODEL_ARGS[@]}"
${PREFIX} ${TORCHRUN} --nproc_per_node 4 pretrain_gpt.py ${MODEL_ARGS[*]}
$(which torchrun) --nproc_per_node 8 pretrain_gpt.py ${MODEL_ARGS[*]}
