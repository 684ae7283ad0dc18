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

HOSTS=(node1 node2 node3)
for i in "${!HOSTS[@]}"; do
    ssh -o StrictHostKeyChecking=no "${HOSTS[$i]}" "pkill -f pretrain_gpt; torchrun --nnodes ${#HOSTS[@]} --nproc_per_node 8 --node_rank $i \
        --master_addr ${HOSTS[0]} pretrain_gpt.py ${MODEL_ARGS[*]}" &
done
wait
