#!/bin/bash
# A server that generates text with Llama-3 70B on four GPUs, with the dynamic engine of megatron-core.
#
# To predict its memory and its speed, run in the root of this repository:
#
#   get-training-info examples/generate_llama3_70b.sh --info-gpu H100-80GB --info-price 2.50

export CUDA_DEVICE_MAX_CONNECTIONS=1

DISTRIBUTED_ARGS=(
    --nproc_per_node 4
    --nnodes 1
    --master_addr ${MASTER_ADDR:-localhost}
    --master_port ${MASTER_PORT:-6000}
)

MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model meta-llama/Meta-Llama-3-70B
    --vocab-size 128256
    --bf16
)

INFERENCE_ARGS=(
    --tensor-model-parallel-size 4
    --micro-batch-size 1
    --load ${CHECKPOINT:-checkpoints/llama3-70b}
    --cuda-graph-impl local
    --inference-max-seq-length 2304
    --inference-dynamic-batching
    --inference-dynamic-batching-buffer-size-gb 30
    --inference-dynamic-batching-max-requests 128
    --num-tokens-to-generate 256
)

torchrun ${DISTRIBUTED_ARGS[@]} tools/run_dynamic_text_generation_server.py \
    ${MODEL_ARGS[@]} \
    ${INFERENCE_ARGS[@]} \
    "$@"
