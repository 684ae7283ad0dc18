#!/bin/bash
# slime: GRPO of Qwen3 8B on 8 H100. SGLang generates on the GPUs of the training (--colocate).
#
#   get-training-info examples/frameworks/slime_qwen3_8b_grpo.sh --info-gpu H100-80GB
set -e
export CUDA_DEVICE_MAX_CONNECTIONS=1

MODEL_ARGS=(
    --swiglu
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --vocab-size 151936
)
CHECKPOINT_ARGS=(
    --hf-checkpoint /checkpoints/Qwen3-8B
    --ref-load /checkpoints/Qwen3-8B_torch_dist
    --save /checkpoints/Qwen3-8B_slime
    --save-interval 20
)
ROLLOUT_ARGS=(
    --prompt-data /data/math/train.jsonl
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 1000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --global-batch-size 256
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)
GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.001
    --kl-loss-type low_var_kl
    --eps-clip 0.2
)
OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
)
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)
MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

ray job submit --address=http://127.0.0.1:8265 \
    -- python3 train.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 8 \
    --colocate \
    "${MODEL_ARGS[@]}" \
    "${CHECKPOINT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${GRPO_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" "$@"
