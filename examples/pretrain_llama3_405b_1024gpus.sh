#!/bin/bash
# Llama-3.1 405B (Grattafiori et al. 2024, table 3) on 1,024 GPUs: tensor 8, context 2, pipeline 8 with eight virtual stages per
# rank. The embedding and the loss each count as one layer.
#
# To predict its memory, run in the root of this repository:
#
#   get-training-info examples/pretrain_llama3_405b_1024gpus.sh --info-gpu H100-80GB

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

MODEL_ARGS=(
    --num-layers 126
    --hidden-size 16384
    --ffn-hidden-size 53248
    --num-attention-heads 128
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --use-rope-scaling
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 500000
    --lr 8e-5
    --lr-warmup-iters 2000
    --lr-decay-style cosine
    --min-lr 8e-7
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --cross-entropy-loss-fusion
    --no-create-attention-mask-in-dataloader
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --context-parallel-size 2
    --pipeline-model-parallel-size 8
    --num-virtual-stages-per-pipeline-rank 8
    --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

DATA_ARGS=(
    --data-path ${DATA_PATH:-my-llama3_text_document}
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model ${TOKENIZER_MODEL:-meta-llama/Llama-3.1-405B}
    --split 99,1,0
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]} \
    "$@"
