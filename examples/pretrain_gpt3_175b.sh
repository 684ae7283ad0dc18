#!/bin/bash
# GPT-3 175B (Brown et al. 2020, table 2.1) on 1,024 GPUs: tensor 8, pipeline 16. The global batch size increases from 16 to 1,536.
#
# To predict its memory, run in the root of this repository:
#
#   get-training-info examples/pretrain_gpt3_175b.sh --info-gpu A100-80GB

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NNODES=128
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
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-samples 146484375
    --lr 6.0e-5
    --lr-decay-samples 126953125
    --lr-warmup-samples 183105
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
)

DATA_ARGS=(
    --data-path ${DATA_PATH:-my-gpt2_text_document}
    --vocab-file ${VOCAB_FILE:-gpt2-vocab.json}
    --merge-file ${MERGE_FILE:-gpt2-merges.txt}
    --split 98,2,0
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]} \
    "$@"
