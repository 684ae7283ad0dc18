#!/bin/bash
# Text generation with Mixtral 8x7B on two GPUs: experts divided between them, weights in 8 bits.
#
# To predict its memory and its speed, run in the root of this repository:
#
#   get-training-info examples/generate_mixtral_8x7b.sh --info-gpu A100-80GB --info-quantize w8a16kv16

export CUDA_DEVICE_MAX_CONNECTIONS=1

DISTRIBUTED_ARGS=(
    --nproc_per_node 2
    --nnodes 1
    --master_addr ${MASTER_ADDR:-localhost}
    --master_port ${MASTER_PORT:-6000}
)

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 32768
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --num-experts 8
    --moe-router-topk 2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model mistralai/Mixtral-8x7B-v0.1
    --vocab-size 32000
    --bf16
)

INFERENCE_ARGS=(
    --tensor-model-parallel-size 1
    --expert-model-parallel-size 2
    --micro-batch-size 1
    --load ${CHECKPOINT:-checkpoints/mixtral-8x7b}
    --inference-max-requests 32
    --inference-max-seq-length 4096
    --num-tokens-to-generate 512
)

torchrun ${DISTRIBUTED_ARGS[@]} examples/inference/gpt/gpt_static_inference.py \
    ${MODEL_ARGS[@]} \
    ${INFERENCE_ARGS[@]} \
    "$@"
