"""Layouts in which `tools/random_layouts.py` found an error of the formulas. Compared with megatron-core 0.16 and later."""

from __future__ import annotations

from typing import Final

_EXPERTS: Final = "--bf16 --disable-bias-linear --vocab-size 120 --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2"
_FLEX: Final = f"{_EXPERTS} --moe-token-dispatcher-type flex"
_UNFUSED_ON_HOST: Final = "--bf16 --vocab-size 120 --cpu-offloading-num-layers 2 --attention-backend unfused"
FOUND: Final = {
    "recomputed mlp with dropout": "--bf16 --swiglu --disable-bias-linear --vocab-size 120 --recompute-granularity selective "
    "--recompute-modules mlp --global-batch-size 32",
    "hybridep, router in bf16": f"{_FLEX} --swiglu --moe-grouped-gemm --moe-flex-dispatcher-backend hybridep",
    "hybridep, plain gelu, router in bf16": f"{_FLEX} --moe-grouped-gemm --moe-flex-dispatcher-backend hybridep",
    "deepep, sequential experts, plain gelu": f"{_FLEX} --moe-enable-deepep",
    "latent experts, sigmoid router in bf16": f"{_EXPERTS} --swiglu --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-latent-size 256 --moe-router-score-function sigmoid --moe-aux-loss-coeff 1e-2",
    "unfused attention with dropout, two layers on the host": _UNFUSED_ON_HOST,
    "unfused attention, two layers on the host": f"{_UNFUSED_ON_HOST} --attention-dropout 0 --hidden-dropout 0",
    "unfused attention, repeated keys, two layers on the host": f"{_UNFUSED_ON_HOST} --group-query-attention --num-query-groups 4",
    "unfused attention, softmax in fp32, two layers on the host": f"{_UNFUSED_ON_HOST} --micro-batch-size 1 "
    "--tensor-model-parallel-size 4",
    "unfused latent attention, two layers on the host": f"{_UNFUSED_ON_HOST} --position-embedding-type rope "
    "--multi-latent-attention --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64",
    "sequential experts, router in fp32": f"{_EXPERTS} --moe-token-dispatcher-type alltoall --moe-router-dtype fp32",
}
