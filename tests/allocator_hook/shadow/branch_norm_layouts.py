"""Layouts whose branches have norms of their outputs (`ModelSpec.branch_norms`), for the comparison with megatron-core."""

from __future__ import annotations

from typing import Any, Final

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

_GEMMA: Final = (
    "--normalization RMSNorm --apply-layernorm-1p --quick-geglu --disable-bias-linear --group-query-attention --num-query-groups 4 "
    "--kv-channels 128 --qk-layernorm --position-embedding-type rope --window-size 127,0 --window-attn-skip-freq 3 "
    "--attention-dropout 0 --hidden-dropout 0"
)
GEMMA: Final = {
    f"gemma, {name}": f"--bf16 {_GEMMA} {words}"
    for name, words in {
        "alone": "",
        "small vocabulary": "--vocab-size 500",
        "micro-batch 1": "--micro-batch-size 1 --vocab-size 500",
        "unfused rotation": "--no-rope-fusion --vocab-size 500",
        "unfused rotation, tp2": "--no-rope-fusion --tensor-model-parallel-size 2 --vocab-size 500",
        "dropout": "--hidden-dropout 0.1 --vocab-size 500",
        "tp2": "--tensor-model-parallel-size 2",
        "tp2 sp": f"{_SP} --vocab-size 500",
        "tp2 pp2 sp": f"{_SP} --pipeline-model-parallel-size 2 --window-attn-skip-freq 2",
        "cp2": "--context-parallel-size 2 --cp-comm-type a2a",
        "full recompute": f"{_FULL} --vocab-size 500",
        "recomputed attention": "--recompute-granularity selective --recompute-modules core_attn",
        "adapters, tp2 sp": f"{_SP} --info-lora 64",
        "adapters": "--info-lora 64 --vocab-size 500",
        "fp8": "--fp8-format hybrid --fp8-recipe tensorwise",
        "adapters, tp2 sp, small vocabulary": f"{_SP} --info-lora 16 --vocab-size 500",
        "recomputed ffn": "--recompute-granularity selective --recompute-modules mlp --vocab-size 500",
        "recomputed ffn, dropout": "--recompute-granularity selective --recompute-modules mlp --vocab-size 99 --hidden-dropout 0.1",
        "distributed optimizer, overlap": "--overlap-grad-reduce --overlap-param-gather",
    }.items()
}
"""Layers of Gemma 3 in Megatron-Bridge, with its embedding and its tables of rotary positions."""
GEMMA_FIELDS: Final[dict[str, Any]] = {
    "branch_norms": True,
    "norms_in_projections": True,
    "local_rope": True,
    "scaled_embedding": True,
}
"""What options of Megatron-LM do not say of them: fields of `ModelSpec`."""

_EXAONE: Final = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --group-query-attention --num-query-groups 4 --qk-layernorm "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
)
EXAONE: Final = {
    f"exaone, {name}": f"--bf16 {_EXAONE} {words}"
    for name, words in {
        "alone": "",
        "small vocabulary": "--vocab-size 500",
        "micro-batch 1": "--micro-batch-size 1 --vocab-size 500",
        "dropout": "--hidden-dropout 0.1 --vocab-size 500",
        "tp2": "--tensor-model-parallel-size 2 --vocab-size 500",
        "tp2 sp": f"{_SP} --vocab-size 500",
        "tp2 pp2 sp": f"{_SP} --pipeline-model-parallel-size 2",
        "cp2": "--context-parallel-size 2",
        "full recompute": f"{_FULL} --vocab-size 500",
        "recomputed attention": "--recompute-granularity selective --recompute-modules core_attn",
        "adapters, tp2 sp": f"{_SP} --info-lora 64",
        "adapters, full recompute": f"{_FULL} --info-lora 64",
        "distributed optimizer, overlap": "--overlap-grad-reduce --overlap-param-gather",
    }.items()
}
"""Layers of EXAONE 4 in Megatron-Bridge, which have norms after attention and FFN in place of those before them."""
EXAONE_FIELDS: Final[dict[str, Any]] = {"branch_norms": True, "norms_in_projections": True, "norm_modules": "none"}
"""What options of Megatron-LM do not say of them."""
