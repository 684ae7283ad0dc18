"""Layouts in which `tools/random_layouts.py` found an error of the formulas. Compared with megatron-core 0.16 and later."""

from __future__ import annotations

from typing import Final

_EXPERTS: Final = "--bf16 --disable-bias-linear --vocab-size 120 --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2"
_FLEX: Final = f"{_EXPERTS} --moe-token-dispatcher-type flex"
FOUND: Final = {
    "recomputed mlp with dropout": "--bf16 --swiglu --disable-bias-linear --vocab-size 120 --recompute-granularity selective "
    "--recompute-modules mlp --global-batch-size 32",
    "hybridep, router in bf16": f"{_FLEX} --swiglu --moe-grouped-gemm --moe-flex-dispatcher-backend hybridep",
    "hybridep, plain gelu, router in bf16": f"{_FLEX} --moe-grouped-gemm --moe-flex-dispatcher-backend hybridep",
    "deepep, sequential experts, plain gelu": f"{_FLEX} --moe-enable-deepep",
    "latent experts, sigmoid router in bf16": f"{_EXPERTS} --swiglu --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-latent-size 256 --moe-router-score-function sigmoid --moe-aux-loss-coeff 1e-2",
    "sequential experts, router in fp32": f"{_EXPERTS} --moe-token-dispatcher-type alltoall --moe-router-dtype fp32",
}
