#!/bin/bash

NNODES=2
NODE_RANK=${SLURM_NODEID:-0}
MODEL_ARGS="--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \
    --tokenizer-type NullTokenizer --vocab-size 32000 --micro-batch-size 1 --global-batch-size 256 --train-iters 1000 \
    --lr 3e-4 --bf16 --use-distributed-optimizer"

LAUNCHER="python -u -m torch.distributed.run --nproc_per_node 8 --nnodes $NNODES --node_rank $NODE_RANK"
CMD="$LAUNCHER pretrain_gpt.py $MODEL_ARGS --pipeline-model-parallel-size 2"
echo $CMD
$CMD
