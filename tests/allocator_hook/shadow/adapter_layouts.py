"""Layouts of launches with adapters (`--info-lora`) for the comparison of the formulas with megatron-core."""

from __future__ import annotations

from typing import Any, Final

_LLAMA: Final = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention "
    "--num-query-groups 4 --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
)
_EXPERTS: Final = (
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --expert-model-parallel-size 4 "
    "--moe-ffn-hidden-size 512"
)
_SHARED: Final = "--moe-shared-expert-intermediate-size 512"
_TP2: Final = "--tensor-model-parallel-size 2"
_SP: Final = f"{_TP2} --sequence-parallel"

ADAPTERS: Final = {
    f"lora, {name}": f"--bf16 --vocab-size 120 {line}"
    for name, line in {
        "all layers": f"{_LLAMA} --info-lora 8",
        "attention only": f"{_LLAMA} --info-lora 16:linear_qkv",
        "output projection": f"{_LLAMA} --info-lora 16:linear_proj",
        "fc1": f"{_LLAMA} --info-lora 16:linear_fc1",
        "fc2": f"{_LLAMA} --info-lora 16:linear_fc2",
        "gpt": "--info-lora 8 --attention-dropout 0 --hidden-dropout 0",
        "gpt with dropout, large vocabulary": "--info-lora 8 --vocab-size 9999",
        "tp2": f"{_LLAMA} {_TP2} --info-lora 8",
        "tp2 sp": f"{_LLAMA} {_SP} --info-lora 8",
        "tp4 sp, attention": f"{_LLAMA} --tensor-model-parallel-size 4 --sequence-parallel --info-lora 8:linear_qkv,linear_proj",
        "pp2": f"{_LLAMA} --pipeline-model-parallel-size 2 --info-lora 8",
        "tp2 pp2 sp": f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2 --info-lora 32",
        "interleaved": f"{_LLAMA} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --info-lora 8",
        "cp2": f"{_LLAMA} --context-parallel-size 2 --info-lora 8",
        "full recompute": f"{_LLAMA} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--info-lora 8",
        "selective recompute": f"{_LLAMA} --recompute-granularity selective --recompute-modules core_attn mlp --info-lora 8",
        "without fused accumulation, tp2 sp": f"{_LLAMA} {_SP} --no-gradient-accumulation-fusion --info-lora 8",
        "experts": f"{_LLAMA} {_EXPERTS} --info-lora 8",
        "experts on one rank": f"{_LLAMA} {_EXPERTS} --expert-model-parallel-size 1 --info-lora 8",
        "shared experts": f"{_LLAMA} {_EXPERTS} {_SHARED} --info-lora 8",
        "shared experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 --info-lora 8",
        "dropout": f"{_LLAMA} --info-lora 8",
        "dropout, tp2 sp": f"{_LLAMA} {_SP} --info-lora 8",
        "dropout, experts": f"{_LLAMA} {_EXPERTS} --info-lora 8",
        "each expert": f"{_LLAMA} {_EXPERTS} --info-lora 8",
        "each expert on one rank": f"{_LLAMA} {_EXPERTS} --expert-model-parallel-size 1 --info-lora 8",
        "each expert, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 --info-lora 8",
        "frozen experts": f"{_LLAMA} {_EXPERTS} --info-lora 8:linear_qkv,linear_proj",
        "frozen shared experts": f"{_LLAMA} {_EXPERTS} {_SHARED} --info-lora 8:linear_qkv,linear_proj",
        "frozen experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SP} --expert-tensor-parallel-size 1 --info-lora 8:linear_qkv,linear_proj",
        "frozen experts, fused permutation": f"{_LLAMA} {_EXPERTS} --moe-permute-fusion --info-lora 8:linear_qkv",
    }.items()
}


def adapter_fields(name: str) -> dict[str, Any]:
    """Fields of `AdapterSpec` that no option sets: frameworks set them."""
    fields = {"lora, dropout": "dropout", "lora, each expert": "per_expert"}
    return {field: True for begin, field in fields.items() if name.startswith(begin)}
