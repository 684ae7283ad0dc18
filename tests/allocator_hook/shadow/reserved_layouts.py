"""Layouts with rare features whose reserved memory is compared with the shadow engine, as base and options. All have 8 GPUs."""

from __future__ import annotations

COMMON = (
    "--num-layers 6 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --bf16 --tokenizer-type NullTokenizer "
    "--vocab-size 32000 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)
DENSE = (
    f"{COMMON} --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--global-batch-size 32"
)
EXPERTS = (
    f"{COMMON} --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --num-experts 8 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 4096 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --expert-model-parallel-size 4 "
    "--global-batch-size 64"
)
DISTRIBUTED = "--use-distributed-optimizer"
OFFLOAD = f"{DISTRIBUTED} --fine-grained-activation-offloading --offload-modules"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FSDP = f"--use-megatron-fsdp --ckpt-format fsdp_dtensor {DISTRIBUTED} --no-gradient-accumulation-fusion"
FSDP2 = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist"
LAYOUTS = (
    (DENSE, "--optimizer muon --tensor-model-parallel-size 2"),
    (DENSE, "--optimizer muon --pipeline-model-parallel-size 2"),
    (DENSE, "--optimizer dist_muon"),
    (DENSE, f"--optimizer muon --tensor-model-parallel-size 2 {RECOMPUTE}"),
    (EXPERTS, "--optimizer muon"),
    (DENSE, f"{DISTRIBUTED} --use-precision-aware-optimizer --optimizer-cpu-offload"),
    (DENSE, f"{FSDP} --data-parallel-sharding-strategy optim_grads_params"),
    (DENSE, f"{FSDP} --data-parallel-sharding-strategy optim_grads_params {RECOMPUTE}"),
    (DENSE, f"{FSDP} --data-parallel-sharding-strategy optim_grads"),
    (EXPERTS, f"{FSDP} --data-parallel-sharding-strategy optim_grads_params"),
    (DENSE, FSDP2),
    (DENSE, f"{FSDP2} {RECOMPUTE}"),
    (DENSE, f"{OFFLOAD} core_attn attn_proj"),
    (DENSE, f"{OFFLOAD} core_attn qkv_linear --pipeline-model-parallel-size 2"),
    (EXPERTS, f"{OFFLOAD} core_attn expert_fc1 moe_act"),
    (DENSE, f"{DISTRIBUTED} --cpu-offloading-num-layers 3"),
    (DENSE, f"{DISTRIBUTED} --pipeline-model-parallel-size 2 --defer-embedding-wgrad-compute"),
    (EXPERTS, f"{DISTRIBUTED} --overlap-moe-expert-parallel-comm"),
    (
        EXPERTS,
        f"--num-layers 8 {DISTRIBUTED} --overlap-moe-expert-parallel-comm --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 2",
    ),
)
GRAPHS = f"{DISTRIBUTED} --te-rng-tracker --cuda-graph-impl"
WITH_GRAPHS = (
    (DENSE, f"{GRAPHS} transformer_engine --cuda-graph-scope attn"),
    (DENSE, f"{GRAPHS} local"),
)


def _dense(hidden: int, ffn: int, heads: int, layers: int, *, sequence: int = 2048, micro_batch: int = 2, batch: int = 64) -> str:
    common = COMMON.replace("--num-layers 6", f"--num-layers {layers}").replace("4096", str(sequence))
    common = common.replace("--micro-batch-size 1", f"--micro-batch-size {micro_batch}")
    return f"{common} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {heads} --global-batch-size {batch}"


def _experts(hidden: int, ffn: int, heads: int, layers: int, *, experts: int = 8) -> str:
    return (
        f"{_dense(hidden, 2 * ffn, heads, layers)} --num-experts {experts} --moe-router-topk 2 --moe-ffn-hidden-size {ffn} "
        "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --expert-model-parallel-size 2"
    )


_SHARED = f"{DISTRIBUTED} --moe-shared-expert-overlap --moe-shared-expert-intermediate-size"
SHARED_EXPERTS = (
    (EXPERTS, f"{_SHARED} 8192 {RECOMPUTE}"),
    (EXPERTS, f"{_SHARED} 4096 --moe-shared-expert-gate --tensor-model-parallel-size 2 --sequence-parallel {RECOMPUTE}"),
    (_experts(1536, 2048, 12, 8), f"{_SHARED} 2048 --pipeline-model-parallel-size 2"),
    (_experts(1536, 2048, 12, 8), f"{_SHARED} 4096 --num-layers 40 --moe-shared-expert-gate {RECOMPUTE}"),
)
"""Layers whose shared experts have streams of their own; the last one has more layers than PyTorch has streams."""
_A, _B = _dense(3072, 8192, 24, 10), _dense(5120, 13824, 40, 4, sequence=4096, micro_batch=1)
_C = _dense(2048, 5504, 16, 12, micro_batch=4, batch=128)
_D, _E = _experts(1536, 2048, 12, 8), _experts(3072, 1536, 24, 4, experts=16)
HELD_OUT = (
    (_A, "--optimizer muon"),
    (_B, "--optimizer dist_muon --tensor-model-parallel-size 2"),
    (_C, "--optimizer muon --pipeline-model-parallel-size 4"),
    (_D, "--optimizer dist_muon"),
    (_A, f"{FSDP} --data-parallel-sharding-strategy optim_grads_params"),
    (_B, f"{FSDP} --data-parallel-sharding-strategy optim_grads_params {RECOMPUTE}"),
    (_C, f"{FSDP} --data-parallel-sharding-strategy optim"),
    (_E, f"{FSDP} --data-parallel-sharding-strategy optim_grads_params"),
    (_A, FSDP2),
    (_B, FSDP2),
    (_C, f"{FSDP2} {RECOMPUTE}"),
    (_C, f"{OFFLOAD} qkv_linear core_attn attn_proj"),
    (_D, f"{OFFLOAD} expert_fc1 moe_act"),
    (_C, f"{DISTRIBUTED} --defer-embedding-wgrad-compute --pipeline-model-parallel-size 4"),
    (_A, f"{DISTRIBUTED} --use-precision-aware-optimizer --optimizer-cpu-offload"),
    (_D, f"{DISTRIBUTED} --overlap-moe-expert-parallel-comm"),
    (_E, f"{DISTRIBUTED} --overlap-moe-expert-parallel-comm"),
    (_A, f"{GRAPHS} transformer_engine --cuda-graph-scope attn"),
    (_C, f"{GRAPHS} local"),
    (_C, f"{GRAPHS} transformer_engine --cuda-graph-scope mlp --pipeline-model-parallel-size 2"),
)
"""Layouts that were run once the replay was complete. It was not changed after that; only its range was made wider."""
