#!/bin/bash
# The 7B GPT of the analysis tool proposed in 2023: learned positions, biases, tied embeddings; two nodes.
# The sample command of the proposal has 24 layers, and its output has 32. A 7B model has 32.
#
# To predict its memory, run in the root of this repository:
#
#   get-training-info examples/pretrain_gpt_7b_2nodes.sh --info-gpu A100-80GB

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NNODES=2
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)

GPT_MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 2048
    --max-position-embeddings 2048
    --swiglu
    --use-flash-attn
)

TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 512
    --train-iters 500000
    --lr 0.00015
    --lr-decay-iters 320000
    --lr-decay-style cosine
    --min-lr 1.0e-5
    --lr-warmup-fraction .01
    --weight-decay 1e-2
    --clip-grad 1.0
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --use-distributed-optimizer
)

DATA_ARGS=(
    --data-path ${DATA_PATH:-my-gpt2_text_document}
    --vocab-file ${VOCAB_FILE:-gpt2-vocab.json}
    --merge-file ${MERGE_FILE:-gpt2-merges.txt}
    --split 949,50,1
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]} \
    "$@"
