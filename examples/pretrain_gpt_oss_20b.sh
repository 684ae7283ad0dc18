#!/bin/bash
# gpt-oss-20b (OpenAI 2025, table 1) on one node with expert 8. Every second layer has a sliding window of 128 tokens, and
# every head has a learned sink.
#
# To predict its memory, run in the root of this repository:
#
#   get-training-info examples/pretrain_gpt_oss_20b.sh --info-gpu H200-141GB

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NNODES=1
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
    --num-layers 24
    --hidden-size 2880
    --ffn-hidden-size 2880
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --kv-channels 64
    --window-size 128,0
    --window-attn-skip-freq 2
    --softmax-type learnable
    --seq-length 4096
    --max-position-embeddings 131072
    --position-embedding-type rope
    --rotary-base 150000
    --use-rope-scaling
    --rope-scaling-factor 32
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --quick-geglu
    --glu-linear-offset 1.0
    --activation-func-clamp-value 7.0
    --add-qkv-bias
    --no-bias-dropout-fusion
    --untie-embeddings-and-output-weights
    --make-vocab-size-divisible-by 1571
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

MOE_ARGS=(
    --num-experts 32
    --moe-ffn-hidden-size 2880
    --moe-router-topk 4
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-permute-fusion
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 64
    --train-iters 500000
    --lr 1e-4
    --lr-warmup-iters 2000
    --lr-decay-style cosine
    --min-lr 1e-5
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --cross-entropy-loss-fusion
    --no-create-attention-mask-in-dataloader
    --recompute-granularity selective
    --recompute-modules moe_act
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

DATA_ARGS=(
    --data-path ${DATA_PATH:-my-gpt_oss_text_document}
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model ${TOKENIZER_MODEL:-openai/gpt-oss-20b}
    --split 99,1,0
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${MOE_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]} \
    "$@"
