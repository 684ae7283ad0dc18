"""Layouts whose branches have norms of their outputs (`ModelSpec.branch_norms`), for the comparison with megatron-core."""

from __future__ import annotations

from typing import Final

_GLM: Final = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups 4 --position-embedding-type rope --rotary-percent 0.5 --no-rope-fusion "
    "--attention-dropout 0 --hidden-dropout 0"
)
_FULL: Final = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_SP: Final = "--tensor-model-parallel-size 2 --sequence-parallel"
BRANCH_NORMS: Final = {
    f"branch norms, {name}": f"--bf16 {_GLM} {words}"
    for name, words in {
        "alone": "",
        "tp2": "--tensor-model-parallel-size 2",
        "tp2 sp": _SP,
        "tp2 pp2 sp": f"{_SP} --pipeline-model-parallel-size 2",
        "cp2": "--context-parallel-size 2",
        "full recompute": _FULL,
        "tp2 sp, full recompute": f"{_SP} {_FULL}",
        "dropout": "--hidden-dropout 0.1",
        "recomputed attention": "--recompute-granularity selective --recompute-modules core_attn",
        "adapters, tp2 sp": f"{_SP} --info-lora 64",
        "adapters, full recompute": f"{_FULL} --info-lora 64",
        "fp8": "--fp8-format hybrid --fp8-recipe tensorwise",
    }.items()
}
