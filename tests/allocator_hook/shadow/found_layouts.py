"""Layouts in which `tools/random_layouts.py` found an error of the formulas. Compared with megatron-core 0.16 and later."""

from __future__ import annotations

from typing import Final

_EXPERTS: Final = "--bf16 --disable-bias-linear --vocab-size 120 --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2"
_UNFUSED: Final = "--bf16 --swiglu --vocab-size 120 --attention-backend unfused"
_GROUPED: Final = "--normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 4"
_FULL: Final = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
_NARROW: Final = (
    "--bf16 --swiglu --disable-bias-linear --vocab-size 120 --num-layers 1 --num-experts 8 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64"
)
_FLEX: Final = f"{_EXPERTS} --moe-token-dispatcher-type flex"
_LOCAL: Final = (
    "--bf16 --vocab-size 120 --transformer-impl local --no-persist-layer-norm --attention-backend unfused "
    "--no-masked-softmax-fusion"
)
_UNFUSED_ON_HOST: Final = "--bf16 --vocab-size 120 --cpu-offloading-num-layers 2 --attention-backend unfused"
_LATENT: Final = (
    "--position-embedding-type rope --multi-latent-attention --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
    "--v-head-dim 64"
)
_OVERLAPPED: Final = (
    "--bf16 --swiglu --disable-bias-linear --vocab-size 120 --attention-dropout 0 --hidden-dropout 0 --global-batch-size 64 "
    "--moe-router-topk 2 --moe-grouped-gemm --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm"
)
_INTERLEAVED_FLEX: Final = (
    "--num-experts 8 --moe-ffn-hidden-size 64 --ffn-hidden-size 64 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend"
)
_WINDOW: Final = "--window-size 128,0 --micro-batch-size 1 --tensor-model-parallel-size 4"
_ALTERNATING: Final = f"{_OVERLAPPED} --num-experts 8 --moe-token-dispatcher-type alltoall --moe-layer-freq ([0,1]*2)"
_GROUPS: Final = (
    "--bf16 --vocab-size 120 --position-embedding-type rope --min-offloaded-tensor-size 1024 "
    "--fine-grained-activation-offloading --offload-modules"
)
_GATES: Final = (
    "--bf16 --vocab-size 120 --disable-bias-linear --no-bias-swiglu-fusion --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --min-offloaded-tensor-size 1024 --fine-grained-activation-offloading --offload-modules"
)
_MEGATRON_FSDP: Final = (
    "--bf16 --use-megatron-fsdp --no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor --global-batch-size 32 "
    "--data-parallel-sharding-strategy"
)
_TORCH_FSDP: Final = (
    "--bf16 --use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist --global-batch-size 32 "
    "--untie-embeddings-and-output-weights --vocab-size 120"
)
_TIED_MTP: Final = (
    "--bf16 --disable-bias-linear --vocab-size 2500 --position-embedding-type rope --micro-batch-size 1 --mtp-num-layers 1 "
    "--deterministic-mode --info-gpu B200"
)
_INSTANCES: Final = "--num-distributed-optimizer-instances 2 --overlap-grad-reduce --pipeline-model-parallel-size 2"
_FP4: Final = "--info-gpu B200 --fp4-format e2m1"
_PADDED: Final = "--micro-batch-size 1 --seq-length {tokens} --max-position-embeddings {tokens}"
"""The rows of every expert are half a multiple of the padding more than a multiple, as the formulas count."""
_SHORT_MLP: Final = (
    "--bf16 --vocab-size 120 --position-embedding-type rope --pipeline-model-parallel-size 2 --swiglu --disable-bias-linear "
    "--ffn-hidden-size 64 --tensor-model-parallel-size 4 --sequence-parallel --attention-dropout 0 --hidden-dropout 0"
)
"""The output projection of attention has the highest instant of the forward."""
_OVERLAPPED_SHARED: Final = (
    "--bf16 --vocab-size 9999 --num-layers 4 --micro-batch-size 2 --swiglu --disable-bias-linear --num-experts 8 "
    "--moe-router-topk 1 --moe-router-score-function sigmoid --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64 "
    "--moe-grouped-gemm --expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 2048 --moe-shared-expert-overlap "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --pipeline-model-parallel-size 2"
)
FOUND: Final = {
    "flash-attn after a rotation, output projection": f"{_SHORT_MLP} --info-gpu A100-80GB",
    "normed grouped queries, output projection": f"{_SHORT_MLP} --qk-layernorm --group-query-attention --num-query-groups 4",
    "offloaded groups, unfused rotation, flash-attn": f"{_GROUPS} core_attn --no-rope-fusion --info-gpu A100-80GB",
    "offloaded norm of latent attention, one layer in each of 4 stages": f"{_GROUPS} attn_norm {_LATENT} "
    "--pipeline-model-parallel-size 4",
    "offloaded unfused latent attention, interleaved": f"{_GROUPS} core_attn {_LATENT} --attention-backend unfused "
    "--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights --micro-batch-size 1 "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "offloaded groups beside sequential experts": f"{_GROUPS} mlp_norm expert_fc1 core_attn --swiglu --disable-bias-linear "
    "--pipeline-model-parallel-size 2 --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall",
    "offloaded latent attention, projection on the GPU, context parallelism": f"{_GROUPS} core_attn {_LATENT} "
    "--context-parallel-size 2",
    "offloaded groups of latent attention, context parallelism": f"{_GROUPS} core_attn attn_proj attn_norm {_LATENT} "
    "--context-parallel-size 2",
    "megatron fsdp, checkpoints of two layers, tied embedding, tp4 sp": f"{_MEGATRON_FSDP} optim_grads_params {_FULL} 2 --swiglu "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --grad-reduce-in-bf16 --tensor-model-parallel-size 4 "
    "--sequence-parallel",
    "megatron fsdp, checkpoints of two layers, biases, dropout, two instances of the optimizer": f"{_MEGATRON_FSDP} "
    f"optim_grads_params {_FULL} 2 --vocab-size 120 --num-distributed-optimizer-instances 2",
    "recomputed activation of experts, unfused gates": f"{_EXPERTS} --quick-geglu --no-bias-swiglu-fusion --moe-grouped-gemm "
    "--recompute-granularity selective --recompute-modules moe_act",
    "flash-attn, slices with heads of 128 elements": "--bf16 --vocab-size 120 --kv-channels 128 --info-gpu A100-80GB",
    "megatron fsdp of gradients, an output layer with an MTP head": f"{_MEGATRON_FSDP} optim_grads --context-parallel-size 2 "
    "--untie-embeddings-and-output-weights --mtp-num-layers 1 --position-embedding-type rope",
    "megatron fsdp of optimizer states, three buckets": f"{_MEGATRON_FSDP} optim --overlap-grad-reduce --ddp-num-buckets 3",
    "megatron fsdp of optimizer states, sequential experts, five buckets": f"{_EXPERTS} {_MEGATRON_FSDP} optim "
    "--overlap-grad-reduce --ddp-num-buckets 5 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 480",
    "megatron fsdp of gradients, latent attention with rings, experts in an MTP layer": f"{_EXPERTS} {_MEGATRON_FSDP} optim_grads "
    f"{_LATENT} --num-layers 1 --mtp-num-layers 1 --context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel "
    "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 256 --attention-dropout 0 "
    "--hidden-dropout 0",
    "recomputed up projections of latent attention, rings": f"--bf16 --vocab-size 120 {_LATENT} --context-parallel-size 2 "
    "--recompute-granularity selective --recompute-modules mla_up_proj",
    "megatron fsdp, overlapped shared experts": f"{_EXPERTS} {_MEGATRON_FSDP} optim_grads_params --moe-shared-expert-overlap "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 2048 --moe-ffn-hidden-size 512",
    "fsdp2 with an MTP layer": f"{_TORCH_FSDP} --mtp-num-layers 1 --position-embedding-type rope",
    "fsdp2, peak in the backward of the output layer": f"{_TORCH_FSDP} --vocab-size 9999 --micro-batch-size 1 "
    "--context-parallel-size 2",
    "fsdp2, a checkpoint of four layers": f"{_TORCH_FSDP} {_FULL} 4",
    "fsdp2, two experts on four replicas": f"{_TORCH_FSDP} --num-layers 1 --disable-bias-linear --num-experts 2 "
    "--moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 512 "
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "overlapped microbatches, one expert per rank": f"{_OVERLAPPED} --num-experts 2 --moe-token-dispatcher-type alltoall",
    "overlapped microbatches, dense layers beside MoE layers": _ALTERNATING,
    "overlapped microbatches, dense layers with recompute": f"{_ALTERNATING} --recompute-granularity selective "
    "--recompute-modules mlp",
    "overlapped microbatches, latent experts, interleaved": f"{_OVERLAPPED} --num-experts 8 --moe-token-dispatcher-type alltoall "
    "--moe-latent-size 256 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "groups of more microbatches than pipeline ranks": "--bf16 --swiglu --disable-bias-linear --vocab-size 120 "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 64 "
    "--microbatch-group-size-per-virtual-pipeline-stage 4",
    "overlapped microbatches, dense last layer": f"{_ALTERNATING.replace('[0,1]', '[1,0]')}",
    "overlapped microbatches, deepep": f"{_OVERLAPPED} --num-experts 8 --moe-token-dispatcher-type flex "
    "--moe-flex-dispatcher-backend deepep --moe-router-dtype fp32",
    "overlapped microbatches, deepep, deterministic flash attention": f"{_OVERLAPPED} --num-experts 8 --moe-enable-deepep "
    "--moe-token-dispatcher-type flex --deterministic-mode --attention-backend flash --info-gpu B200",
    "overlapped microbatches, delayed weight gradients that are not fused": f"{_OVERLAPPED} --num-experts 8 "
    "--moe-token-dispatcher-type alltoall --delay-wgrad-compute --no-gradient-accumulation-fusion "
    "--moe-shared-expert-intermediate-size 512",
    "overlapped microbatches, delayed weight gradients of sequential experts": f"{_OVERLAPPED} --num-experts 8 "
    "--moe-token-dispatcher-type alltoall --delay-wgrad-compute --no-gradient-accumulation-fusion".replace(
        "--moe-grouped-gemm ", ""
    ),
    "overlapped microbatches, deferred gradients of the output layer": f"{_ALTERNATING} --vocab-size 9999 "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --untie-embeddings-and-output-weights "
    "--defer-embedding-wgrad-compute",
    "sequential experts with the peak in their backward": "--bf16 --disable-bias-linear --vocab-size 120 --num-experts 8 "
    "--moe-router-topk 2 --swiglu --moe-ffn-hidden-size 256 --num-layers 2 --attention-backend flash "
    "--no-gradient-accumulation-fusion",
    "recomputed mlp with dropout": "--bf16 --swiglu --disable-bias-linear --vocab-size 120 --recompute-granularity selective "
    "--recompute-modules mlp --global-batch-size 32",
    "hybridep, router in bf16": f"{_FLEX} --swiglu --moe-grouped-gemm --moe-flex-dispatcher-backend hybridep",
    "hybridep, plain gelu, router in bf16": f"{_FLEX} --moe-grouped-gemm --moe-flex-dispatcher-backend hybridep",
    "deepep, sequential experts, plain gelu": f"{_FLEX} --moe-enable-deepep",
    "deepep, latent experts, deterministic": f"{_FLEX} --swiglu --moe-grouped-gemm --moe-enable-deepep --moe-latent-size 256 "
    "--deterministic-mode",
    "first layer dense, interleaved stages": f"{_EXPERTS} --moe-grouped-gemm --moe-permute-fusion "
    "--moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 512 --moe-layer-freq ([0]*1+[1]*3) "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --attention-dropout 0 --hidden-dropout 0",
    "deepep, microbatches in flight": f"{_FLEX} --swiglu --moe-grouped-gemm --moe-permute-fusion --moe-enable-deepep "
    "--pipeline-model-parallel-size 4",
    "deferred embedding gradients, norms on the host": "--bf16 --pipeline-model-parallel-size 2 --defer-embedding-wgrad-compute "
    "--global-batch-size 32 --multi-latent-attention --fine-grained-activation-offloading --offload-modules attn_norm",
    "fsdp, full recompute, mtp": "--bf16 --vocab-size 120 --num-layers 2 --mtp-num-layers 1 --position-embedding-type rope "
    f"{_FULL} 1 --global-batch-size 32 --use-megatron-fsdp --no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor "
    "--data-parallel-sharding-strategy optim_grads_params",
    "recomputed fused attention of mixed qkv": "--bf16 --vocab-size 120 --pipeline-model-parallel-size 2 --ffn-hidden-size 512 "
    "--recompute-granularity selective --global-batch-size 32 --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--kv-channels 128",
    "grouped experts in fp8, padded to capacity, tp2 sp": "--bf16 --swiglu --disable-bias-linear --vocab-size 120 --num-experts 8 "
    "--moe-router-topk 4 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-ffn-hidden-size 256 "
    "--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity --tensor-model-parallel-size 2 --sequence-parallel "
    "--fp8-format e4m3 --fp8-recipe tensorwise",
    "hybridep, sequential experts in fp8": f"{_FLEX} --swiglu --moe-flex-dispatcher-backend hybridep --fp8-format e4m3 "
    "--fp8-recipe tensorwise",
    "deepep, gated experts of all tokens, pp2": f"{_FLEX} --moe-router-topk 8 --swiglu --moe-permute-fusion --moe-enable-deepep "
    "--pipeline-model-parallel-size 2",
    "sequential experts in fp8, all-gather dispatcher": f"{_EXPERTS} --swiglu --moe-token-dispatcher-type allgather "
    "--fp8-format e4m3 --fp8-recipe tensorwise",
    "grouped experts in fp8, equal numbers of tokens": f"{_EXPERTS} --swiglu --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --fp8-format e4m3 --fp8-recipe tensorwise",
    "deepep, microbatches in flight, unfused permutation": f"{_FLEX} --swiglu --moe-grouped-gemm --moe-enable-deepep "
    "--pipeline-model-parallel-size 4",
    "hybridep, split experts, mtp, two instances of the optimizer": f"{_FLEX} --swiglu --moe-grouped-gemm --mtp-num-layers 1 "
    "--position-embedding-type rope --moe-flex-dispatcher-backend hybridep --tensor-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer --num-distributed-optimizer-instances 2",
    "userbuffers, fp16, shared experts": f"{_EXPERTS.replace('--bf16', '--fp16')} --swiglu --moe-token-dispatcher-type alltoall "
    "--moe-shared-expert-intermediate-size 512 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap "
    "--attention-dropout 0 --hidden-dropout 0 --global-batch-size 32",
    "userbuffers, fp16, full recompute": f"--fp16 --swiglu --vocab-size 120 --tensor-model-parallel-size 2 --sequence-parallel "
    f"--tp-comm-overlap {_FULL} 1",
    "offloaded ring attention without positions": f"{_GROUPS.replace('rope', 'none')} core_attn {_GROUPED} --num-layers 8 "
    "--attention-backend flash --context-parallel-size 2 --pipeline-model-parallel-size 4 --global-batch-size 32",
    "offloaded experts, dense last layer of each stage": f"{_GROUPS.replace('bf16', 'fp16')} expert_fc1 moe_act --squared-relu "
    "--disable-bias-linear --num-experts 8 --moe-router-topk 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex "
    "--moe-flex-dispatcher-backend hybridep --moe-ffn-hidden-size 256 --moe-router-score-function sigmoid --moe-grouped-gemm "
    "--moe-layer-freq 2 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
    "--micro-batch-size 1 --global-batch-size 32 --normalization RMSNorm --info-gpu A100-80GB",
    "offloaded experts, all-to-all, dense last layer of each stage": f"{_GROUPS} expert_fc1 moe_act --disable-bias-linear "
    "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-layer-freq 2 --pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 32",
    "offloaded unfused gates": f"{_GATES} moe_act --swiglu",
    "offloaded unfused gates and attention, small ffn, pp2": f"{_GATES} moe_act core_attn --swiglu --moe-ffn-hidden-size 256 "
    "--pipeline-model-parallel-size 2 --global-batch-size 32",
    "offloaded unfused gates, probabilities in fp32": f"{_GATES} moe_act --swiglu --moe-router-dtype fp32",
    "offloaded clamped gates": f"{_GATES} moe_act --quick-geglu --activation-func-clamp-value 7.0",
    "offloaded groups, two MTP depths": f"{_GROUPS.replace('rope', 'none')} core_attn qkv_linear --mtp-num-layers 2",
    "userbuffers, swiglu": "--bf16 --swiglu --vocab-size 120 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap "
    "--attention-dropout 0 --hidden-dropout 0",
    "latent experts, sigmoid router in bf16": f"{_EXPERTS} --swiglu --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-latent-size 256 --moe-router-score-function sigmoid --moe-aux-loss-coeff 1e-2",
    "unfused attention, swiglu": _UNFUSED,
    "unfused attention, stages without a batch": f"{_UNFUSED} --pipeline-model-parallel-size 4 --tensor-model-parallel-size 2",
    "unfused attention, full recompute, dropout": f"{_UNFUSED} {_FULL} 1",
    "unfused attention, checkpoints of two layers, pp2": f"{_UNFUSED} {_FULL} 2 --pipeline-model-parallel-size 2",
    "unfused attention in fp32": "--swiglu --vocab-size 120 --attention-backend unfused",
    "unfused attention in fp32, no dropout, two layers on the host": f"{_UNFUSED_ON_HOST.replace('--bf16', '')} "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1",
    "offloaded unfused attention in fp32": f"{_GROUPS.replace('--bf16', '')} core_attn attn_proj --attention-backend unfused "
    "--micro-batch-size 1",
    "offloaded unfused attention, softmax in fp32": f"{_GROUPS} core_attn attn_proj --attention-backend unfused "
    "--micro-batch-size 1 --tensor-model-parallel-size 4",
    "local softmax in 16 bit, pp2": f"{_LOCAL} --pipeline-model-parallel-size 2",
    "local softmax in fp32": f"{_LOCAL} --attention-softmax-in-fp32",
    "local softmax in 16 bit, batches without a mask": f"{_LOCAL} --attention-dropout 0 --no-create-attention-mask-in-dataloader",
    "fused cross entropy in fp32": "--swiglu --cross-entropy-loss-fusion --vocab-size 20000",
    "unfused attention, tp4, full recompute": f"{_UNFUSED} {_FULL} 1 --micro-batch-size 1 --tensor-model-parallel-size 4",
    "unfused grouped attention, full recompute": f"{_UNFUSED} {_GROUPED} --position-embedding-type rope {_FULL} 1",
    "unfused grouped attention, learned positions": f"{_UNFUSED} {_GROUPED}",
    "unfused grouped attention with norms, recomputed": f"{_UNFUSED} {_GROUPED} --position-embedding-type rope --qk-layernorm "
    "--recompute-activations",
    "unfused attention with sinks": f"{_UNFUSED} --softmax-type learnable",
    "unfused grouped attention with sinks, no dropout": f"{_UNFUSED} {_GROUPED} --position-embedding-type rope "
    "--softmax-type off-by-one --attention-dropout 0 --hidden-dropout 0",
    "unfused latent attention with sinks": f"{_UNFUSED} --multi-latent-attention --softmax-type learnable",
    "unfused latent attention, full recompute": f"{_UNFUSED} --multi-latent-attention {_FULL} 1",
    "unfused latent attention, sliding window, tp4": f"{_UNFUSED} {_LATENT} {_WINDOW}",
    "unfused attention, sliding window in every second layer, pp2": f"{_UNFUSED} {_WINDOW} --window-attn-skip-freq 2 "
    "--pipeline-model-parallel-size 2",
    "latent experts, tp2 sp": f"{_EXPERTS} --moe-token-dispatcher-type alltoall --moe-latent-size 256 "
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "latent experts beside gated shared experts, pp2": f"{_EXPERTS} --moe-token-dispatcher-type alltoall --moe-latent-size 256 "
    "--moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --pipeline-model-parallel-size 2",
    "overlapped shared experts at the sum of rows, tp2 sp": f"{_EXPERTS} --moe-token-dispatcher-type alltoall --num-layers 2 "
    "--moe-shared-expert-intermediate-size 512 --moe-shared-expert-overlap --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-tensor-parallel-size 1",
    "recomputed mlp with dropout, one microbatch": "--bf16 --swiglu --disable-bias-linear --vocab-size 120 "
    "--recompute-granularity selective --recompute-modules mlp",
    "all-gather, sequential experts, router in fp32": f"{_EXPERTS} --swiglu --moe-router-dtype fp32",
    "all-gather, one expert per rank, router in fp32": f"{_EXPERTS} --swiglu --moe-grouped-gemm --expert-model-parallel-size 8 "
    "--micro-batch-size 1 --global-batch-size 8 --moe-ffn-hidden-size 128 --moe-router-dtype fp32",
    "all-gather, shared experts, dropout": f"{_EXPERTS} --swiglu --moe-grouped-gemm --moe-shared-expert-intermediate-size 512",
    "unfused attention with dropout, two layers on the host": _UNFUSED_ON_HOST,
    "unfused attention, two layers on the host": f"{_UNFUSED_ON_HOST} --attention-dropout 0 --hidden-dropout 0",
    "unfused attention, repeated keys, two layers on the host": f"{_UNFUSED_ON_HOST} --group-query-attention --num-query-groups 4",
    "unfused attention, softmax in fp32, two layers on the host": f"{_UNFUSED_ON_HOST} --micro-batch-size 1 "
    "--tensor-model-parallel-size 4",
    "unfused latent attention, two layers on the host": f"{_UNFUSED_ON_HOST} {_LATENT}",
    "muon in four stages, bias without fused dropout": "--bf16 --vocab-size 120 --num-layers 4 --micro-batch-size 1 "
    "--pipeline-model-parallel-size 4 --no-bias-dropout-fusion --optimizer muon",
    "two layers on the host, unfused gates, capacity, router losses, mtp": f"{_EXPERTS} {_LATENT} --quick-geglu "
    "--cpu-offloading-num-layers 2 --mtp-num-layers 1 --moe-token-dispatcher-type alltoall --moe-permute-fusion "
    "--moe-shared-expert-intermediate-size 512 --moe-shared-expert-overlap --moe-aux-loss-coeff 1e-2 "
    "--moe-expert-capacity-factor 1",
    "one layer on the host, grouped experts": f"{_EXPERTS} --swiglu --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--cpu-offloading-num-layers 1",
    "two layers on the host, tp4 cp2": "--bf16 --vocab-size 120 --cpu-offloading-num-layers 2 --tensor-model-parallel-size 4 "
    "--context-parallel-size 2 --position-embedding-type rope --attention-backend flash --attention-dropout 0 --hidden-dropout 0",
    "unfused attention with sinks, no dropout, two layers on the host": f"{_UNFUSED_ON_HOST} --softmax-type learnable "
    "--attention-dropout 0 --hidden-dropout 0",
    "latent experts with biases, tp2 sp": "--bf16 --no-bias-gelu-fusion --vocab-size 120 --num-layers 2 --num-experts 8 "
    "--moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-latent-size 256 --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel",
    "sequential experts, narrow ffn": _NARROW,
    "grouped experts, narrow ffn, deterministic, ep2": f"{_NARROW} --moe-grouped-gemm --deterministic-mode "
    "--expert-model-parallel-size 2",
    "sequential experts, router in fp32": f"{_EXPERTS} --moe-token-dispatcher-type alltoall --moe-router-dtype fp32",
    "two mtp layers before the last stage, small ffn": "--bf16 --vocab-size 120 --position-embedding-type rope "
    "--ffn-hidden-size 1024 --global-batch-size 32 --pipeline-model-parallel-size 2 --mtp-num-layers 2 "
    "--pipeline-model-parallel-layout Ettttmm|L",
    "unfused latent attention in fp8": f"{_UNFUSED} {_LATENT} --fp8-format e4m3 --fp8-recipe blockwise",
    "unfused latent attention, recomputed with its up projections": f"{_UNFUSED} {_LATENT} --recompute-granularity selective "
    "--recompute-modules core_attn mla_up_proj",
    "muon, a last stage without matrices and layers, checkpoints of attention": "--bf16 --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --optimizer muon --pipeline-model-parallel-size 2 --mtp-num-layers 1 "
    "--pipeline-model-parallel-layout Ettttm|L --recompute-activations",
    "latent experts, all-gather, router in fp32": f"{_EXPERTS} --swiglu --moe-grouped-gemm --moe-token-dispatcher-type allgather "
    "--moe-ffn-hidden-size 256 --moe-latent-size 128 --moe-router-dtype fp32 --pipeline-model-parallel-size 4",
    "tied embedding of an MTP layer, peak in its attention": f"{_TIED_MTP}",
    "tied embedding of an MTP layer, peak in its attention, pp2": f"{_TIED_MTP} --pipeline-model-parallel-size 2",
    "tied embedding of an MTP layer, unfused gradients, pp2": f"{_TIED_MTP} --no-gradient-accumulation-fusion "
    "--pipeline-model-parallel-size 2",
    "stored fp8 weights, megatron fsdp of gradients": f"{_MEGATRON_FSDP} optim_grads --vocab-size 120 --fp8-format e4m3 "
    "--fp8-param-gather",
    "offloaded projections, mtp, tp2 sp": f"{_GROUPS} core_attn qkv_linear --attention-dropout 0 --hidden-dropout 0 "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --mtp-num-layers 1",
    "recomputed experts, narrow": f"{_NARROW} --recompute-granularity selective --recompute-modules moe --moe-router-topk 4 "
    "--attention-dropout 0 --hidden-dropout 0",
    "whole layers on the host, sequential experts": f"{_EXPERTS} --moe-token-dispatcher-type alltoall "
    "--cpu-offloading-num-layers 2",
    "deferred embedding gradients, hybridep": f"{_FLEX} --moe-flex-dispatcher-backend hybridep --moe-grouped-gemm "
    "--moe-permute-fusion --defer-embedding-wgrad-compute --pipeline-model-parallel-size 2 --global-batch-size 64 "
    "--moe-ffn-hidden-size 64",
    "recomputed flash-attn after a rotation, narrow": "--bf16 --vocab-size 120 --position-embedding-type rope --num-layers 2 "
    "--ffn-hidden-size 128 --info-gpu A100-80GB --recompute-granularity selective --recompute-modules core_attn",
    "delayed fp8, mtp": "--bf16 --vocab-size 120 --position-embedding-type rope --mtp-num-layers 2 --fp8-format hybrid",
    "latent attention in fp8, recomputed up projections": f"--bf16 --vocab-size 120 {_LATENT} --fp8-format hybrid "
    "--recompute-granularity selective --recompute-modules mla_up_proj",
    "stored fp8 weights, small batches": "--bf16 --vocab-size 120 --micro-batch-size 1 --tensor-model-parallel-size 4 "
    "--sequence-parallel --pipeline-model-parallel-size 2 --fp8-format e4m3 --fp8-recipe tensorwise --fp8-param-gather",
    "gated shared experts in fp8": f"{_EXPERTS} {_PADDED.format(tokens=528)} --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate "
    "--fp8-format e4m3 --fp8-recipe tensorwise",
    "sequential experts in fp4": f"{_EXPERTS} {_PADDED.format(tokens=640)} --moe-token-dispatcher-type alltoall {_FP4} "
    "--vocab-size 9999",
    "experts in 16 bit beside mxfp8": f"{_EXPERTS} {_PADDED.format(tokens=544)} --moe-grouped-gemm --info-gpu B200 "
    "--moe-token-dispatcher-type alltoall --first-last-layers-bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
    "userbuffers, latent attention in fp16, interleaved": f"--fp16 --vocab-size 120 {_LATENT} --num-layers 8 "
    "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 2",
    "userbuffers, latent attention in fp8": f"--bf16 --vocab-size 120 {_LATENT} --tensor-model-parallel-size 2 "
    "--sequence-parallel --tp-comm-overlap --fp8-format hybrid",
    "two instances of the optimizer, overlapped, pp2": f"--bf16 --vocab-size 120 {_INSTANCES}",
    "two instances of the optimizer, overlapped, experts, interleaved": f"{_EXPERTS} {_INSTANCES} --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --num-layers-per-virtual-pipeline-stage 1",
    "megatron fsdp of optimizer states, rings": f"{_MEGATRON_FSDP} optim {_GROUPED} --swiglu --kv-channels 128 "
    "--untie-embeddings-and-output-weights --context-parallel-size 2",
    "fp4, mtp in 16 bit": f"--bf16 --vocab-size 120 --position-embedding-type rope --mtp-num-layers 1 {_FP4}",
    "latent attention in fp8, recomputed norms and up projections": f"--bf16 --vocab-size 120 {_LATENT} --qk-layernorm "
    "--fp8-format hybrid --fp8-recipe tensorwise --recompute-granularity selective --recompute-modules layernorm mla_up_proj",
    "megatron fsdp, experts, two instances of the optimizer": f"{_EXPERTS} {_MEGATRON_FSDP} optim_grads_params "
    "--num-distributed-optimizer-instances 2 --overlap-grad-reduce",
    "megatron fsdp, sharded over two instances of the optimizer, rings": f"{_MEGATRON_FSDP} optim_grads_params --vocab-size 120 "
    "--num-distributed-optimizer-instances 2 --overlap-grad-reduce --outer-dp-sharding-strategy optim --context-parallel-size 2",
    "shared experts in fp8, tp2 sp": f"{_EXPERTS} {_PADDED.format(tokens=528)} --moe-grouped-gemm --tensor-model-parallel-size 2 "
    "--sequence-parallel --moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 512 --fp8-format e4m3 "
    "--fp8-recipe tensorwise",
    "recomputed flash-attn in rings, narrow": "--bf16 --vocab-size 120 --position-embedding-type rope --num-layers 2 "
    "--ffn-hidden-size 128 --info-gpu A100-80GB --context-parallel-size 2 --recompute-granularity selective "
    "--recompute-modules core_attn",
    "overlapped, hybridep, delayed weight gradients, interleaved": f"{_OVERLAPPED} {_INTERLEAVED_FLEX} hybridep "
    "--delay-wgrad-compute",
    "overlapped, hybridep, tp2 sp, interleaved": f"{_OVERLAPPED} {_INTERLEAVED_FLEX} hybridep --moe-router-dtype fp32 "
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "overlapped, deepep, recomputed norms, interleaved": f"{_OVERLAPPED} {_INTERLEAVED_FLEX} deepep --moe-router-dtype fp32 "
    "--recompute-granularity selective --recompute-modules layernorm",
    "overlapped, alltoall, idle chunks": f"{_OVERLAPPED} {_INTERLEAVED_FLEX} deepep --moe-token-dispatcher-type alltoall "
    "--num-layers 8 --pipeline-model-parallel-size 4 --attention-backend unfused",
    "tied embeddings, large vocabulary": "--bf16 --vocab-size 50000 --disable-bias-linear --position-embedding-type rope "
    "--micro-batch-size 1 --seq-length 256",
    "tied embeddings with two MTP layers, without fused accumulation": "--bf16 --vocab-size 30000 --position-embedding-type rope "
    "--disable-bias-linear --no-gradient-accumulation-fusion --micro-batch-size 1 --seq-length 256 --mtp-num-layers 2",
    "mtp in the first stage": "--bf16 --vocab-size 9999 --untie-embeddings-and-output-weights --disable-bias-linear --swiglu "
    f"--position-embedding-type none --micro-batch-size 1 {_FULL} 1 --pipeline-model-parallel-size 2 --mtp-num-layers 1 "
    "--pipeline-model-parallel-layout Ettttm|L",
    "fsdp2 with an MTP layer and a wide FFN": f"{_TORCH_FSDP} --position-embedding-type rope --mtp-num-layers 1 --vocab-size 4000 "
    "--disable-bias-linear --swiglu --ffn-hidden-size 8192",
    "latent attention in fp8, recomputed norms": f"--bf16 --vocab-size 120 {_LATENT} --fp8-format hybrid --fp8-recipe tensorwise "
    "--recompute-granularity selective --recompute-modules core_attn layernorm",
    "all-gather rings without rotation, recomputed": f"--bf16 --vocab-size 120 {_GROUPED} --position-embedding-type none "
    "--cp-comm-type all_gather --context-parallel-size 2 --recompute-granularity selective --recompute-modules core_attn",
    "megatron fsdp of gradients, experts, recomputed layers": f"{_EXPERTS} {_MEGATRON_FSDP} optim_grads {_FULL} 1 --swiglu "
    "--moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 512 --tensor-model-parallel-size 4 --sequence-parallel "
    "--expert-tensor-parallel-size 1 --expert-model-parallel-size 4",
    "fsdp2, latent attention, recomputed norms": f"{_TORCH_FSDP} {_LATENT} --swiglu --disable-bias-linear --ffn-hidden-size 4096 "
    "--recompute-granularity selective --recompute-modules layernorm",
    "fsdp2, latent experts, recomputed norms": f"{_TORCH_FSDP} --disable-bias-linear --num-experts 8 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 256 --moe-latent-size 256 --attention-dropout 0 "
    "--hidden-dropout 0 --recompute-granularity selective --recompute-modules layernorm",
    "latent attention in fp8, compressed queries, recomputed": f"--bf16 --vocab-size 120 {_LATENT} --q-lora-rank 192 "
    "--fp8-format hybrid --fp8-recipe tensorwise --recompute-granularity selective --recompute-modules mla_up_proj",
    "overlapped, deepep, four choices": f"{_OVERLAPPED} {_INTERLEAVED_FLEX} deepep --moe-router-dtype fp32 --moe-router-topk 4",
    "overlapped, hybridep, four choices": f"{_OVERLAPPED} {_INTERLEAVED_FLEX} hybridep --moe-router-topk 4",
    "overlapped, hybridep, shared experts, delayed weight gradients": f"{_OVERLAPPED} {_INTERLEAVED_FLEX} hybridep "
    "--moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --delay-wgrad-compute",
    "overlapped, hybridep, latent experts in fp8": f"{_OVERLAPPED} {_INTERLEAVED_FLEX} hybridep --moe-latent-size 256 "
    f"--fp8-format hybrid --moe-router-padding-for-quantization --moe-ffn-hidden-size 256 {_PADDED.format(tokens=528)}",
    "overlapped, hybridep in fp8, gated shared experts, tp4 sp": f"{_OVERLAPPED} --num-experts 8 --moe-ffn-hidden-size 512 "
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-shared-expert-intermediate-size 512 "
    "--moe-shared-expert-gate --tensor-model-parallel-size 4 --sequence-parallel --fp8-format hybrid --fp8-param-gather",
    "two MTP layers before the last stage, recomputed": "--bf16 --vocab-size 9999 --position-embedding-type rope "
    f"{_FULL} 1 --pipeline-model-parallel-size 2 --mtp-num-layers 2 --pipeline-model-parallel-layout Ettttmm|L",
    "mtp before the last stage, recomputed, tp4": "--bf16 --vocab-size 9999 --position-embedding-type rope "
    f"--grad-reduce-in-bf16 {_FULL} 1 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --mtp-num-layers 1 "
    "--pipeline-model-parallel-layout Ettttm|L",
    "overlapped shared experts with a gate": f"{_EXPERTS} --moe-token-dispatcher-type alltoall "
    "--moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --moe-shared-expert-overlap",
    "overlapped, tied embeddings, cp2": "--bf16 --vocab-size 9999 --disable-bias-linear --num-experts 8 --context-parallel-size 2 "
    "--micro-batch-size 1 --expert-model-parallel-size 2 --moe-ffn-hidden-size 256 --overlap-moe-expert-parallel-comm "
    "--moe-token-dispatcher-type alltoall --global-batch-size 32",
    "overlapped, sequential experts with delayed weight gradients": "--bf16 --disable-bias-linear --vocab-size 120 --num-experts 8 "
    "--moe-ffn-hidden-size 512 --squared-relu --micro-batch-size 1 --moe-token-dispatcher-type flex --moe-router-topk 8 "
    "--moe-flex-dispatcher-backend hybridep --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm "
    "--delay-wgrad-compute --global-batch-size 64",
    "megatron fsdp of gradients in three buckets, cp2": f"{_MEGATRON_FSDP} optim_grads --vocab-size 9999 --quick-geglu "
    "--disable-bias-linear --micro-batch-size 1 --context-parallel-size 2 --overlap-grad-reduce --ddp-num-buckets 3",
    "megatron fsdp of gradients, grouped experts": f"{_MEGATRON_FSDP} optim_grads --vocab-size 9999 --disable-bias-linear "
    "--num-experts 8 --moe-grouped-gemm --micro-batch-size 1 --context-parallel-size 2",
    "megatron fsdp of gradients, experts over tensor-parallel ranks": f"{_MEGATRON_FSDP} optim_grads --vocab-size 9999 "
    "--disable-bias-linear --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 512 --moe-router-dtype fp32 "
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion --tensor-model-parallel-size 4 "
    "--sequence-parallel --micro-batch-size 1",
    "recomputed experts with unfused attention, pp4": f"--bf16 --disable-bias-linear --vocab-size 120 {_FULL} 1 --num-layers 4 "
    "--global-batch-size 32 --attention-backend unfused --group-query-attention --num-query-groups 4 --num-experts 8 "
    "--moe-ffn-hidden-size 512 --pipeline-model-parallel-size 4",
    "megatron fsdp of gradients, dense and MoE layers in turn, recomputed": f"{_MEGATRON_FSDP} optim_grads {_FULL} 1 "
    "--vocab-size 9999 --disable-bias-linear --num-experts 8 --moe-layer-freq 2 --moe-token-dispatcher-type alltoall",
    "recomputed latent attention and experts, deterministic, pp4": f"--fp16 --disable-bias-linear --vocab-size 9999 {_FULL} 1 "
    "--position-embedding-type rope --multi-latent-attention --qk-pos-emb-head-dim 32 --deterministic-mode --attention-dropout 0 "
    "--num-experts 8 --moe-ffn-hidden-size 512 --pipeline-model-parallel-size 4 --global-batch-size 32",
    "muon, matrices gathered over tensor-parallel ranks, mtp in the last stage": "--bf16 --vocab-size 9999 --disable-bias-linear "
    "--micro-batch-size 1 --position-embedding-type rope --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
    "--sequence-parallel --mtp-num-layers 1 --optimizer muon --muon-tp-mode duplicated",
    "latent attention in fp4, tp2 sp": f"--bf16 --vocab-size 120 --num-layers 2 --disable-bias-linear {_LATENT} {_FP4} "
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "experts in fp4, mtp in 16 bit": f"--bf16 --vocab-size 120 --disable-bias-linear --position-embedding-type rope {_FP4} "
    "--num-experts 8 --moe-grouped-gemm --moe-ffn-hidden-size 256 --mtp-num-layers 1 --micro-batch-size 1",
    "unfused attention, core attention and norms on the host": "--bf16 --num-layers 8 --micro-batch-size 1 --vocab-size 9999 "
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --attention-backend unfused --global-batch-size 32 "
    "--fine-grained-activation-offloading --min-offloaded-tensor-size 1024 --offload-modules core_attn attn_norm mlp_norm",
    "activation of experts on the host in fp8": "--bf16 --info-gpu B200 --fp8-format e4m3 --fp8-recipe tensorwise "
    "--disable-bias-linear --vocab-size 120 "
    "--squared-relu --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 256 --moe-grouped-gemm "
    "--expert-model-parallel-size 2 "
    "--micro-batch-size 1 --pipeline-model-parallel-size 2 "
    "--fine-grained-activation-offloading --min-offloaded-tensor-size 1024 --offload-modules core_attn attn_norm mlp_norm moe_act",
    "activation of experts on the host in fp8, column-wise copies": "--bf16 --swiglu --disable-bias-linear --num-experts 8 "
    "--moe-grouped-gemm --moe-ffn-hidden-size 512 --pipeline-model-parallel-size 2 --fine-grained-activation-offloading "
    "--offload-modules moe_act --min-offloaded-tensor-size 1024 --vocab-size 120 --fp8-format hybrid --global-batch-size 32",
    "recomputed activation of experts on the host": "--bf16 --swiglu --disable-bias-linear --num-experts 8 --moe-grouped-gemm "
    "--moe-ffn-hidden-size 512 --pipeline-model-parallel-size 2 --recompute-granularity selective --recompute-modules moe_act "
    "--fine-grained-activation-offloading --offload-modules moe_act --min-offloaded-tensor-size 1024 --vocab-size 120 "
    "--global-batch-size 32",
    "megatron fsdp, experts padded to their capacity, tp2 sp": f"{_MEGATRON_FSDP} optim_grads --disable-bias-linear "
    "--vocab-size 9999 "
    "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 8 --moe-router-topk 4 --moe-token-dispatcher-type alltoall "
    "--moe-ffn-hidden-size 256 --moe-grouped-gemm --moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity",
    "precision-aware adam in fp16, tp4 pp2": "--fp16 --vocab-size 9999 --micro-batch-size 1 --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 2 --use-precision-aware-optimizer --accumulate-allreduce-grads-in-fp32 "
    f"{_FULL} 1 --position-embedding-type rope",
    "megatron fsdp, fp8 weights of sharded experts": f"{_MEGATRON_FSDP} optim_grads_params --disable-bias-linear --vocab-size 120 "
    "--num-layers 8 --num-experts 8 --fp8-format hybrid --fp8-param-gather",
    "megatron fsdp, fp8 weights of sharded dense layers": f"{_MEGATRON_FSDP} optim_grads_params --disable-bias-linear "
    "--vocab-size 120 "
    "--num-layers 8 --fp8-format hybrid --fp8-param-gather",
    "megatron fsdp, blockwise fp8 weights": f"{_MEGATRON_FSDP} optim_grads_params --vocab-size 120 --fp8-format e4m3 "
    "--fp8-recipe blockwise --fp8-param-gather",
    "recomputed latent experts, cp2 pp2": f"--bf16 {_FULL} 1 --disable-bias-linear --vocab-size 9999 --num-layers 8 "
    "--micro-batch-size 1 --context-parallel-size 2 --pipeline-model-parallel-size 2 --group-query-attention --num-query-groups 4 "
    "--num-experts 8 --moe-ffn-hidden-size 256 --moe-latent-size 256 --global-batch-size 32",
    "recomputed latent experts after a dense layer, pp2": f"--bf16 {_FULL} 1 --disable-bias-linear --vocab-size 120 --swiglu "
    "--micro-batch-size 1 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1 --moe-layer-freq ([0]*1+[1]*3) "
    "--num-experts 8 --moe-ffn-hidden-size 256 --moe-latent-size 256 --attention-dropout 0 --hidden-dropout 0 "
    "--global-batch-size 32",
    "recomputed unfused attention without dropout": "--bf16 --vocab-size 120 --kv-channels 128 --micro-batch-size 1 "
    "--attention-dropout 0 --attention-backend unfused --recompute-granularity selective --recompute-modules core_attn",
    "recomputed unfused latent attention without dropout": f"--bf16 --vocab-size 120 {_LATENT} --v-head-dim 256 "
    "--micro-batch-size 1 "
    "--attention-dropout 0 --attention-backend unfused --recompute-granularity selective --recompute-modules core_attn",
    "sequential experts in fp8, padded to their capacity": "--bf16 --fp8-format hybrid --disable-bias-linear --vocab-size 120 "
    "--micro-batch-size 1 --num-experts 8 --expert-model-parallel-size 4 --moe-ffn-hidden-size 256 --moe-expert-capacity-factor 2 "
    "--moe-pad-expert-input-to-capacity",
    "grouped experts in fp8, padded to an odd capacity": "--bf16 --fp8-format hybrid --disable-bias-linear --vocab-size 120 "
    "--micro-batch-size 1 --num-experts 8 --expert-model-parallel-size 4 --moe-ffn-hidden-size 256 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.01 --moe-pad-expert-input-to-capacity",
    "sum of learned positions, tp4 sp": "--bf16 --vocab-size 120 --num-layers 2 --tensor-model-parallel-size 4 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --hidden-dropout 0 --micro-batch-size 4 --ffn-hidden-size 64",
    "unfused attention with dropout on the host, first iteration": "--bf16 --disable-bias-linear --vocab-size 9999 --num-layers 8 "
    "--micro-batch-size 1 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --attention-backend unfused "
    "--global-batch-size 32 --num-experts 8 --moe-ffn-hidden-size 512 --min-offloaded-tensor-size 1024 "
    "--fine-grained-activation-offloading --offload-modules core_attn qkv_linear attn_proj",
    "norms on the host, interleaved, last step of the first iteration": "--bf16 --optimizer adam --swiglu --disable-bias-linear "
    "--multi-latent-attention --qk-head-dim 64 "
    "--vocab-size 9999 --num-layers 8 --micro-batch-size 1 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 "
    "--grad-reduce-in-bf16 --num-experts 8 --moe-ffn-hidden-size 256 --global-batch-size 32 --min-offloaded-tensor-size 1024 "
    "--fine-grained-activation-offloading --offload-modules attn_norm",
    "quick geglu experts on the host before a dense layer": "--bf16 --vocab-size 9999 --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 2 --sequence-parallel --quick-geglu --disable-bias-linear --num-experts 8 "
    "--global-batch-size 32 "
    "--moe-ffn-hidden-size 512 --moe-grouped-gemm --moe-layer-freq 2 --expert-tensor-parallel-size 1 "
    "--fine-grained-activation-offloading --offload-modules core_attn mlp_norm moe_act",
    "compressed queries on the host": f"{_GROUPS} core_attn qkv_linear attn_norm --multi-latent-attention --q-lora-rank 512 "
    "--attention-backend unfused --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    "compressed queries in fp8": "--bf16 --fp8-format hybrid --vocab-size 120 --multi-latent-attention --q-lora-rank 512 "
    "--position-embedding-type rope --attention-backend unfused",
    "alternating dense layers, overlapped microbatches, quick geglu": "--bf16 --quick-geglu --disable-bias-linear --vocab-size 120 "
    "--num-experts 8 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 512 "
    "--moe-layer-freq 2 --global-batch-size 32 --overlap-moe-expert-parallel-comm",
    "overlapped microbatches, delayed weight gradients, cp2 pp2": "--bf16 --disable-bias-linear --vocab-size 9999 --num-layers 8 "
    "--micro-batch-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--no-gradient-accumulation-fusion --num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--moe-grouped-gemm --overlap-moe-expert-parallel-comm --delay-wgrad-compute --global-batch-size 32",
    "overlapped microbatches, fp32 probabilities, pp2": "--bf16 --quick-geglu --disable-bias-linear --vocab-size 9999 "
    "--num-layers 8 "
    "--info-gpu A100-80GB --hidden-dropout 0 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--grad-reduce-in-bf16 --num-experts 8 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64 --moe-permute-fusion "
    "--moe-router-topk 8 --moe-router-dtype fp32 --overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 "
    "--global-batch-size 32",
    "fp8 input gathered in userbuffers": "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise --vocab-size 9999 --num-layers 4 "
    "--micro-batch-size 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel --tp-comm-overlap "
    "--swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --global-batch-size 32",
    "mxfp8 input of shared experts gathered in userbuffers": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --info-gpu B200 "
    "--vocab-size 120 --micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap "
    "--swiglu --normalization RMSNorm --num-experts 8 --moe-grouped-gemm --moe-ffn-hidden-size 256 "
    "--moe-shared-expert-intermediate-size 1024 --disable-bias-linear",
    "dense output of an overlapped chunk, delayed weight gradients": "--bf16 --disable-bias-linear --vocab-size 120 --num-layers 8 "
    "--micro-batch-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-experts 8 "
    "--moe-layer-freq 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm "
    "--delay-wgrad-compute --global-batch-size 32",
    "delayed weight gradient of the output projection, tp2 sp": "--bf16 --disable-bias-linear --vocab-size 120 --num-layers 8 "
    "--micro-batch-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-experts 8 "
    "--tensor-model-parallel-size 2 --sequence-parallel --attention-dropout 0 --hidden-dropout 0 "
    "--moe-layer-freq 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm "
    "--delay-wgrad-compute --global-batch-size 32",
    "gradient of the embedding without dropout, overlapped microbatches": "--bf16 --disable-bias-linear --vocab-size 9999 "
    "--num-layers 2 --micro-batch-size 2 --hidden-dropout 0 --attention-dropout 0 --num-experts 8 --expert-model-parallel-size 2 "
    "--moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm --context-parallel-size 4 "
    "--global-batch-size 32",
    "unfused latent attention without dropout in offloaded layers": "--bf16 --vocab-size 120 --num-layers 4 --micro-batch-size 2 "
    "--multi-latent-attention --kv-lora-rank 64 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --cpu-offloading-num-layers 2 "
    "--attention-backend unfused",
    "16-bit layers alone on a stage of an fp4 model": "--bf16 --info-gpu B200 --vocab-size 9999 --num-layers 4 "
    "--micro-batch-size 2 --pipeline-model-parallel-size 4 --first-last-layers-bf16 --fp4-format e2m1 --ffn-hidden-size 512",
    "flash attention on the host with heads of 128 elements": "--bf16 --info-gpu A100-80GB --vocab-size 9999 --kv-channels 128 "
    "--micro-batch-size 2 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--no-rope-fusion --min-offloaded-tensor-size 1024 --fine-grained-activation-offloading --offload-modules core_attn",
    "megatron fsdp, two moe layers in a checkpoint": "--bf16 --num-layers 4 --micro-batch-size 1 --swiglu --disable-bias-linear "
    "--vocab-size 9999 --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion --num-experts 8 --moe-router-topk 4 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 256 --moe-grouped-gemm "
    "--info-moe-imbalance 1.5 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
    "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor "
    "--data-parallel-sharding-strategy optim_grads_params",
    "cast of stored fp8 weights of experts in the first step": "--bf16 --num-layers 4 --micro-batch-size 1 --vocab-size 9999 "
    "--tensor-model-parallel-size 4 --sequence-parallel --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--use-distributed-optimizer --num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--moe-ffn-hidden-size 1024 --moe-grouped-gemm --expert-tensor-parallel-size 1 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
    "padded fp32 probabilities": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --vocab-size 9999 --num-layers 2 "
    "--micro-batch-size 2 --swiglu --disable-bias-linear --num-experts 8 --expert-model-parallel-size 2 --deterministic-mode "
    "--moe-token-dispatcher-type allgather --moe-ffn-hidden-size 64 --moe-grouped-gemm --moe-router-dtype fp32",
    "gathered keys with q/k norms": "--bf16 --vocab-size 9999 --num-layers 2 --micro-batch-size 1 --context-parallel-size 2 "
    "--cp-comm-type all_gather --qk-layernorm --position-embedding-type none --group-query-attention --num-query-groups 2",
    "distributed checkpoint inputs, unfused attention": "--bf16 --vocab-size 9999 --num-layers 4 --micro-batch-size 1 "
    "--tensor-model-parallel-size 4 --position-embedding-type rope --attention-backend unfused --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --distribute-saved-activations",
    "distributed checkpoint inputs of the first layers, tp2 pp2": "--bf16 --vocab-size 9999 --num-layers 4 --micro-batch-size 4 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --position-embedding-type rope --recompute-granularity full "
    "--recompute-method block --recompute-num-layers 1 --distribute-saved-activations",
    "gradient of a checkpointed moe layer's input, read by the embedding": "--bf16 --vocab-size 9999 --num-layers 4 "
    "--micro-batch-size 1 --hidden-dropout 0 --disable-bias-linear --num-experts 8 --moe-router-score-function sigmoid "
    "--moe-router-topk 1 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --pipeline-model-parallel-size 2 "
    "--context-parallel-size 4 --position-embedding-type rope",
    "fc2 of overlapped shared experts in fp8, tp2 sp": f"{_OVERLAPPED_SHARED} --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-tensor-parallel-size 1 --fp8-format hybrid --fp8-recipe tensorwise",
    "fc2 of overlapped shared experts in blockwise fp8": f"{_OVERLAPPED_SHARED} --fp8-format hybrid --fp8-recipe blockwise",
    "views of queries, keys and values below the smallest offloaded tensor": "--bf16 --vocab-size 9999 --num-layers 4 "
    "--micro-batch-size 1 --position-embedding-type none --fine-grained-activation-offloading --offload-modules core_attn "
    "--min-offloaded-tensor-size 600000 --global-batch-size 32",
    "sequential experts with offloaded modules": "--bf16 --vocab-size 120 --num-layers 4 --micro-batch-size 1 --swiglu "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --no-bias-swiglu-fusion --num-experts 8 "
    "--expert-model-parallel-size 4 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep "
    "--moe-ffn-hidden-size 512 --moe-permute-fusion --global-batch-size 32 --min-offloaded-tensor-size 1024 "
    "--fine-grained-activation-offloading --offload-modules core_attn moe_act",
    "backward of a fused norm with gathered mxfp8 inputs": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --info-gpu B200 "
    "--vocab-size 9999 --num-layers 4 --micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 4 --position-embedding-type rope --swiglu --seq-length 512 --ffn-hidden-size 1024 "
    "--untie-embeddings-and-output-weights",
    "transposed blockwise inputs": "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --vocab-size 9999 --micro-batch-size 1 "
    "--tensor-model-parallel-size 2 --sequence-parallel --position-embedding-type rope --swiglu --no-gradient-accumulation-fusion "
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tmL --mtp-num-layers 1 --num-layers 4",
    "biased quick geglu of sequential experts, fp32 probabilities": "--bf16 --vocab-size 9999 --num-layers 4 --micro-batch-size 1 "
    "--position-embedding-type none --quick-geglu --num-experts 8 --moe-router-topk 4 --expert-model-parallel-size 4 "
    "--moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 512 --moe-router-dtype fp32 --pipeline-model-parallel-size 2",
    "fp8 inputs of grouped experts with offloaded layers": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --info-gpu B200 "
    "--vocab-size 9999 --num-layers 4 --micro-batch-size 1 --tensor-model-parallel-size 4 --sequence-parallel --swiglu "
    "--disable-bias-linear --deterministic-mode --num-experts 8 --expert-model-parallel-size 2 --moe-ffn-hidden-size 512 "
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --cpu-offloading-num-layers 1",
    "qkv group on the host with q/k norms": "--bf16 --vocab-size 9999 --num-layers 4 --micro-batch-size 1 "
    "--pipeline-model-parallel-size 4 --position-embedding-type learned_absolute --qk-layernorm --disable-bias-linear "
    "--hidden-dropout 0 --num-experts 8 --moe-router-topk 1 --moe-router-score-function sigmoid --moe-token-dispatcher-type flex "
    "--expert-model-parallel-size 2 --moe-flex-dispatcher-backend hybridep --moe-router-dtype fp32 --moe-ffn-hidden-size 256 "
    "--min-offloaded-tensor-size 1024 --fine-grained-activation-offloading --offload-modules core_attn qkv_linear expert_fc1",
    "output of ring attention on the host, a2a+p2p": "--bf16 --vocab-size 9999 --num-layers 4 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --position-embedding-type learned_absolute --swiglu --disable-bias-linear "
    "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--moe-ffn-hidden-size 256 --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
    "--min-offloaded-tensor-size 1024 --fine-grained-activation-offloading --offload-modules core_attn",
    "ring attention below the smallest offloaded tensor, a2a+p2p": "--bf16 --vocab-size 9999 --num-layers 4 "
    "--pipeline-model-parallel-size 2 --position-embedding-type learned_absolute --swiglu --disable-bias-linear --num-experts 8 "
    "--moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 256 "
    "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
    "--fine-grained-activation-offloading --offload-modules core_attn expert_fc1",
    "fsdp2, layers of two sizes in a checkpoint": "--bf16 --vocab-size 9999 --num-layers 4 --micro-batch-size 1 "
    "--context-parallel-size 2 --position-embedding-type none --group-query-attention --num-query-groups 4 --swiglu "
    "--disable-bias-linear --num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax --moe-token-dispatcher-type allgather "
    "--moe-ffn-hidden-size 512 --moe-grouped-gemm --moe-layer-freq 2 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 2 --use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist "
    "--untie-embeddings-and-output-weights --global-batch-size 32",
    "fsdp2 kept unsharded, mtp layer in a checkpoint": "--bf16 --vocab-size 120 --num-layers 4 --micro-batch-size 1 "
    "--tensor-model-parallel-size 4 --sequence-parallel --position-embedding-type rope --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --mtp-num-layers 1 --num-experts 8 "
    "--moe-router-topk 4 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --expert-tensor-parallel-size 1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-torch-fsdp2 "
    "--torch-fsdp2-no-reshard-after-forward --no-gradient-accumulation-fusion --ckpt-format torch_dist --global-batch-size 32",
    "fsdp2 kept unsharded, small vocabulary": "--bf16 --vocab-size 120 --num-layers 4 --micro-batch-size 1 "
    "--tensor-model-parallel-size 2 --position-embedding-type none --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --no-bias-gelu-fusion --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward "
    "--no-gradient-accumulation-fusion --ckpt-format torch_dist --global-batch-size 32",
    "fsdp2, gradients copied in the optimizer step": "--bf16 --vocab-size 120 --num-layers 12 --micro-batch-size 1 "
    "--seq-length 128 --max-position-embeddings 128 --tensor-model-parallel-size 4 --position-embedding-type rope --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --use-torch-fsdp2 --no-gradient-accumulation-fusion "
    "--ckpt-format torch_dist --global-batch-size 32",
    "fewer query groups than tensor-parallel ranks, tp4 sp": "--bf16 --vocab-size 120 --ffn-hidden-size 128 --micro-batch-size "
    "1 --tensor-model-parallel-size 4 --sequence-parallel --position-embedding-type rope --swiglu --group-query-attention "
    "--num-query-groups 2 --attention-dropout 0 --hidden-dropout 0",
    "fewer query groups than tensor-parallel ranks, recomputed core attention": "--bf16 --vocab-size 120 --ffn-hidden-size 128 "
    "--micro-batch-size 1 --tensor-model-parallel-size 8 --position-embedding-type rope --swiglu --group-query-attention "
    "--num-query-groups 2 --attention-dropout 0 --hidden-dropout 0 --recompute-granularity selective --recompute-modules "
    "core_attn",
    "fewer query groups than tensor-parallel ranks, cp2": "--bf16 --vocab-size 120 --ffn-hidden-size 128 --micro-batch-size 1 "
    "--tensor-model-parallel-size 4 --context-parallel-size 2 --sequence-parallel --position-embedding-type rope --swiglu "
    "--group-query-attention --num-query-groups 2 --attention-dropout 0 --hidden-dropout 0",
    "overlapped latent attention, tp4 sp, delayed weight gradients": "--bf16 --vocab-size 9999 --num-layers 4 "
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--sequence-parallel --multi-latent-attention --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 "
    "--position-embedding-type rope --squared-relu --disable-bias-linear --normalization RMSNorm --num-experts 8 "
    "--moe-router-topk 1 --moe-router-pre-softmax --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--moe-ffn-hidden-size 256 --moe-grouped-gemm --moe-permute-fusion --moe-layer-freq 2 --expert-tensor-parallel-size 1 "
    "--overlap-moe-expert-parallel-comm --global-batch-size 64 --delay-wgrad-compute",
    "overlapped fp8 layers with delayed weight gradients, tp2 sp": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --info-gpu "
    "B200 --vocab-size 9999 --num-layers 4 --micro-batch-size 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --sequence-parallel --position-embedding-type rope --attention-backend flash "
    "--attention-dropout 0 --hidden-dropout 0 --deterministic-mode --disable-bias-linear --num-experts 8 --moe-router-topk 2 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 256 --moe-grouped-gemm "
    "--moe-permute-fusion --moe-shared-expert-intermediate-size 512 --expert-tensor-parallel-size 1 --moe-expert-capacity-factor "
    "2 --overlap-moe-expert-parallel-comm --global-batch-size 64 --delay-wgrad-compute",
    "overlapped blockwise layers, delayed weight gradients, tp2 sp": "--bf16 --fp8-format e4m3 --fp8-recipe blockwise "
    "--vocab-size 9999 --num-layers 4 --micro-batch-size 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --sequence-parallel --position-embedding-type rope --attention-backend flash "
    "--attention-dropout 0 --hidden-dropout 0 --deterministic-mode --disable-bias-linear --num-experts 8 --moe-router-topk 2 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 256 --moe-grouped-gemm "
    "--moe-permute-fusion --moe-shared-expert-intermediate-size 512 --expert-tensor-parallel-size 1 --moe-expert-capacity-factor "
    "2 --overlap-moe-expert-parallel-comm --global-batch-size 64 --delay-wgrad-compute",
    "deepep, sequential experts, recomputed norms": "--bf16 --vocab-size 120 --num-layers 4 --position-embedding-type "
    "learned_absolute --group-query-attention --num-query-groups 4 --qk-layernorm --disable-bias-linear --normalization RMSNorm "
    "--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax --expert-model-parallel-size 2 --moe-ffn-hidden-size 512 "
    "--moe-router-dtype fp32 --recompute-granularity selective --recompute-modules core_attn layernorm "
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
    "amax reductions of checkpointed moe layers": "--bf16 --fp8-format hybrid --fp8-recipe delayed --vocab-size 9999 "
    "--num-layers 4 --micro-batch-size 1 --position-embedding-type learned_absolute --swiglu --disable-bias-linear --num-experts "
    "8 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 512 "
    "--moe-grouped-gemm --moe-shared-expert-intermediate-size 512 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 2",
    "amax reductions of checkpointed latent attention": "--bf16 --fp8-format hybrid --fp8-recipe delayed --vocab-size 9999 "
    "--num-layers 4 --micro-batch-size 1 --multi-latent-attention --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
    "--v-head-dim 64 --position-embedding-type rope --recompute-granularity full --recompute-method block --recompute-num-layers "
    "2",
    "moments in bf16, optimizer step": "--bf16 --vocab-size 9999 --num-layers 4 --micro-batch-size 1 --seq-length 128 "
    "--max-position-embeddings 128 --tensor-model-parallel-size 4 --sequence-parallel --position-embedding-type rope --swiglu "
    "--disable-bias-linear --num-experts 8 --moe-grouped-gemm --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "master weights in fp16, first step": "--bf16 --vocab-size 9999 --num-layers 4 --micro-batch-size 1 --seq-length 128 "
    "--max-position-embeddings 128 --tensor-model-parallel-size 4 --sequence-parallel --position-embedding-type rope --swiglu "
    "--disable-bias-linear --num-experts 8 --moe-grouped-gemm --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--use-precision-aware-optimizer --main-params-dtype fp16",
    "clamped values with a fused swiglu": "--bf16 --vocab-size 9999 --num-layers 4 --micro-batch-size 1 "
    "--tensor-model-parallel-size 4 --position-embedding-type rope --swiglu --activation-func-clamp-value 7.0",
    "megatron fsdp, cast of stored fp8 weights in the first step": "--bf16 --fp8-format e4m3 --fp8-recipe delayed "
    "--fp8-param-gather --info-gpu B200 --vocab-size 120 --num-layers 4 --position-embedding-type none --swiglu "
    "--disable-bias-linear --num-experts 8 --moe-router-topk 1 --moe-router-score-function sigmoid --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 256 --moe-grouped-gemm "
    "--recompute-granularity full --recompute-method block --recompute-num-layers 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --use-megatron-fsdp --no-gradient-accumulation-fusion "
    "--ckpt-format fsdp_dtensor --global-batch-size 32 --data-parallel-sharding-strategy optim",
    "local layers with latent experts on blackwell": "--num-layers 2 --info-gpu B200 --transformer-impl local "
    "--position-embedding-type rope --no-rope-fusion --disable-bias-linear --num-experts 8 --moe-router-topk 4 "
    "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 256 --moe-latent-size 256",
    "biased sequential experts with fp32 probabilities": "--global-batch-size 32 "
    "--num-layers 4 --micro-batch-size 2 --info-gpu B200 --fp16 "
    "--pipeline-model-parallel-size 4 --position-embedding-type none --quick-geglu --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--normalization RMSNorm --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--no-create-attention-mask-in-dataloader --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--num-experts 8 --expert-model-parallel-size 2 --moe-ffn-hidden-size 256 --moe-router-topk 2 --moe-token-dispatcher-type "
    "flex --moe-flex-dispatcher-backend hybridep",
    "recomputed shared experts with a gate and dropout": "--num-layers 4 --micro-batch-size 2 --pipeline-model-parallel-size 2 "
    "--position-embedding-type rope --no-rope-fusion --group-query-attention --num-query-groups 4 --kv-channels 128 --quick-geglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size "
    "2 --moe-ffn-hidden-size 256 --moe-grouped-gemm --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate "
    "--recompute-granularity selective --recompute-modules core_attn shared_experts",
    "offloaded ring attention with norms of queries and keys": "--bf16 --pipeline-model-parallel-size 4 "
    "--context-parallel-size 2 --position-embedding-type none --group-query-attention --num-query-groups 4 --qk-layernorm "
    "--kv-channels 128 --swiglu --untie-embeddings-and-output-weights --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--global-batch-size 64 --min-offloaded-tensor-size 1024 --fine-grained-activation-offloading --offload-modules core_attn "
    "attn_norm qkv_linear mlp_norm expert_fc1 moe_act",
    "offloaded ring attention with rotated normed queries and keys": "--bf16 --pipeline-model-parallel-size 4 "
    "--context-parallel-size 2 --position-embedding-type rope --group-query-attention --num-query-groups 4 --qk-layernorm "
    "--kv-channels 128 --swiglu --untie-embeddings-and-output-weights --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--global-batch-size 64 --min-offloaded-tensor-size 1024 --fine-grained-activation-offloading --offload-modules core_attn "
    "attn_norm qkv_linear mlp_norm expert_fc1 moe_act",
    "fp16 master weights with ring attention": "--bf16 --num-layers 4 --micro-batch-size 1 --tensor-model-parallel-size 4 "
    "--context-parallel-size 2 --position-embedding-type rope --group-query-attention --num-query-groups 4 --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --use-precision-aware-optimizer --main-params-dtype fp16",
    "other attention backend in layers with a window": "--bf16 --num-layers 4 --tensor-model-parallel-size 4 "
    "--sequence-parallel --position-embedding-type none --disable-bias-linear --untie-embeddings-and-output-weights --window-size "
    "128,0 --window-attn-skip-freq 2",
    "mtp layer with a window": "--bf16 --num-layers 4 --tensor-model-parallel-size 2 --sequence-parallel "
    "--position-embedding-type rope --swiglu --disable-bias-linear --mtp-num-layers 1 --window-size 128,0 --window-attn-skip-freq "
    "2",
    "query key layer scaling": "--fp16 --num-layers 4 --tensor-model-parallel-size 2 --sequence-parallel "
    "--position-embedding-type rope --swiglu --disable-bias-linear --apply-query-key-layer-scaling --attention-backend unfused",
    "local layers with sinks": "--bf16 --group-query-attention --num-query-groups 4 --num-layers 4 --micro-batch-size 1 "
    "--tensor-model-parallel-size 2 --sequence-parallel "
    "--position-embedding-type rope --no-rope-fusion --attention-dropout 0 --hidden-dropout 0 --softmax-type learnable "
    "--attention-softmax-in-fp32 --transformer-impl local --attention-backend unfused",
    "torch fsdp2 of local layers": "--bf16 --num-layers 4 --micro-batch-size 1 --tensor-model-parallel-size 2 "
    "--position-embedding-type rope --no-rope-fusion --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--attention-backend unfused --use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist "
    "--untie-embeddings-and-output-weights --global-batch-size 32",
    "overlapped microbatches in groups of eight": "--bf16 --num-layers 4 --micro-batch-size 1 --global-batch-size 64 "
    "--position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm --num-experts 8 --moe-router-topk 2 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 256 --moe-grouped-gemm "
    "--overlap-moe-expert-parallel-comm --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--microbatch-group-size-per-virtual-pipeline-stage 8",
    "fp32 hidden states of latent attention and experts": "--bf16 --fp32-residual-connection --num-layers 4 --micro-batch-size "
    "2 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --multi-latent-attention "
    "--kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --position-embedding-type rope --swiglu "
    "--disable-bias-linear --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type "
    "alltoall --moe-ffn-hidden-size 256",
}
