#!/bin/bash
# ms-swift: LoRA of Qwen3 8B on 8 H100, with packed sequences of 16,384 tokens.
#
#   get-training-info examples/frameworks/ms_swift_qwen3_8b_lora.sh --info-gpu H100-80GB
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

NPROC_PER_NODE=8 megatron sft \
    --model Qwen/Qwen3-8B \
    --dataset "${DATASET:-/data/instructions.jsonl}" \
    --tuner_type lora \
    --lora_rank 16 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --tensor_model_parallel_size 2 \
    --sequence_parallel true \
    --packing true \
    --max_length 16384 \
    --micro_batch_size 1 \
    --global_batch_size 32 \
    --num_train_epochs 1 \
    --lr 1e-4 \
    --min_lr 1e-5 \
    --lr_warmup_fraction 0.05 \
    --attention_backend flash \
    --no_save_optim true \
    --no_save_rng true \
    --output_dir output/qwen3-8b-lora "$@"
