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

for NODES in 1 2 4; do
    sbatch --nodes=$NODES --ntasks-per-node=8 --gres=gpu:8 --job-name=gpt_$NODES \
        --wrap "srun python pretrain_gpt.py ${MODEL_ARGS[*]} --save /checkpoints/$NODES"
done
