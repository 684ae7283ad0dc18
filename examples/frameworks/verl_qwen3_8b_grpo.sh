#!/bin/bash
# verl: GRPO of Qwen3 8B on 8 H100. Megatron-LM trains the actor, vLLM generates on the same GPUs.
#
#   get-training-info examples/frameworks/verl_qwen3_8b_grpo.sh --info-gpu H100-80GB
set -e
export CUDA_DEVICE_MAX_CONNECTIONS=1

DATA=${DATA:-/data/math}
ACTOR=actor_rollout_ref.actor
ROLLOUT=actor_rollout_ref.rollout

python3 -m verl.trainer.main_ppo --config-path=config --config-name=ppo_megatron_trainer.yaml \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=3072 \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    $ACTOR.optim.lr=1e-6 \
    $ACTOR.ppo_mini_batch_size=64 \
    $ACTOR.ppo_micro_batch_size_per_gpu=2 \
    $ACTOR.use_kl_loss=True \
    $ACTOR.kl_loss_coef=0.001 \
    $ACTOR.megatron.tensor_model_parallel_size=4 \
    $ACTOR.megatron.pipeline_model_parallel_size=1 \
    $ACTOR.megatron.param_offload=True \
    $ACTOR.megatron.optimizer_offload=True \
    +$ACTOR.megatron.override_transformer_config.recompute_granularity=full \
    +$ACTOR.megatron.override_transformer_config.recompute_method=uniform \
    +$ACTOR.megatron.override_transformer_config.recompute_num_layers=1 \
    $ROLLOUT.name=vllm \
    $ROLLOUT.n=8 \
    $ROLLOUT.tensor_model_parallel_size=2 \
    $ROLLOUT.gpu_memory_utilization=0.5 \
    $ROLLOUT.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.total_epochs=2 "$@"
