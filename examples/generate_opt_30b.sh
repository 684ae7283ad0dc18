#!/bin/bash
# Text generation with a model of the shape of OPT-30B on one T4, whose weights and cache are in host memory.
#
# To predict its memory and its speed with a policy of FlexLLMGen, run in the root of this repository:
#
#   get-training-info examples/generate_opt_30b.sh --info-gpu T4 --info-inference batch=144,prompt=512,generate=32 --info-offload weights=20/80/0,cache=0/100/0,activations=0/100/0,batches=3,attention=cpu

export CUDA_DEVICE_MAX_CONNECTIONS=1

DISTRIBUTED_ARGS=(
    --nproc_per_node 1
    --nnodes 1
    --master_addr ${MASTER_ADDR:-localhost}
    --master_port ${MASTER_PORT:-6000}
)

MODEL_ARGS=(
    --num-layers 48
    --hidden-size 7168
    --num-attention-heads 56
    --seq-length 2048
    --max-position-embeddings 2050
    --position-embedding-type learned_absolute
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model facebook/opt-30b
    --vocab-size 50272
    --fp16
)

INFERENCE_ARGS=(
    --tensor-model-parallel-size 1
    --micro-batch-size 1
    --load ${CHECKPOINT:-checkpoints/opt-30b}
    --use-legacy-static-engine
    --inference-max-requests 144
    --inference-max-seq-length 544
    --num-tokens-to-generate 32
)

torchrun ${DISTRIBUTED_ARGS[@]} tools/run_text_generation_server.py \
    ${MODEL_ARGS[@]} \
    ${INFERENCE_ARGS[@]} \
    "$@"
