"""Layouts in which `tools/random_layouts.py` found an error of the formulas. Compared with megatron-core 0.16 and later."""

from __future__ import annotations

from typing import Final

_EXPERTS: Final = "--bf16 --disable-bias-linear --vocab-size 120 --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2"
_FLEX: Final = f"{_EXPERTS} --moe-token-dispatcher-type flex"
_OVERLAPPED: Final = (
    "--bf16 --swiglu --disable-bias-linear --vocab-size 120 --attention-dropout 0 --hidden-dropout 0 --global-batch-size 64 "
    "--moe-router-topk 2 --moe-grouped-gemm --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm"
)
_ALTERNATING: Final = f"{_OVERLAPPED} --num-experts 8 --moe-token-dispatcher-type alltoall --moe-layer-freq ([0,1]*2)"
FOUND: Final = {
    "overlapped microbatches, one expert per rank": f"{_OVERLAPPED} --num-experts 2 --moe-token-dispatcher-type alltoall",
    "overlapped microbatches, dense layers beside MoE layers": _ALTERNATING,
    "overlapped microbatches, dense layers with recompute": f"{_ALTERNATING} --recompute-granularity selective "
    "--recompute-modules mlp",
    "overlapped microbatches, deepep": f"{_OVERLAPPED} --num-experts 8 --moe-token-dispatcher-type flex "
    "--moe-flex-dispatcher-backend deepep --moe-router-dtype fp32",
    "recomputed mlp with dropout": "--bf16 --swiglu --disable-bias-linear --vocab-size 120 --recompute-granularity selective "
    "--recompute-modules mlp --global-batch-size 32",
    "hybridep, router in bf16": f"{_FLEX} --swiglu --moe-grouped-gemm --moe-flex-dispatcher-backend hybridep",
    "hybridep, plain gelu, router in bf16": f"{_FLEX} --moe-grouped-gemm --moe-flex-dispatcher-backend hybridep",
    "deepep, sequential experts, plain gelu": f"{_FLEX} --moe-enable-deepep",
    "latent experts, sigmoid router in bf16": f"{_EXPERTS} --swiglu --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-latent-size 256 --moe-router-score-function sigmoid --moe-aux-loss-coeff 1e-2",
    "sequential experts, router in fp32": f"{_EXPERTS} --moe-token-dispatcher-type alltoall --moe-router-dtype fp32",
}
