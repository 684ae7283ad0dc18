"""Layouts with another head than the output layer (`ModelSpec.head_outputs`), for the comparison with megatron-core."""

from __future__ import annotations

from typing import Final

_LLAMA: Final = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention "
    "--num-query-groups 4 --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
)
_EXPERTS: Final = (
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --expert-model-parallel-size 4 "
    "--moe-ffn-hidden-size 512"
)
_FULL: Final = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_SP: Final = "--tensor-model-parallel-size 2 --sequence-parallel"
_OF: Final = {
    "reward": (f"{_LLAMA}", 1),
    "reward, tp2 sp": (f"{_LLAMA} {_SP}", 1),
    "reward, pp2": (f"{_LLAMA} --pipeline-model-parallel-size 2", 1),
    "reward, full recompute": (f"{_LLAMA} {_FULL}", 1),
    "reward, adapters": (f"{_LLAMA} {_FULL} --info-lora 64", 1),
    "classes, experts": (f"{_LLAMA} {_EXPERTS}", 5),
    "classes, fp8": (f"{_LLAMA} --fp8-format hybrid --fp8-recipe tensorwise", 3),
    "value": (f"{_LLAMA}", 1),
    "value, tp2 sp": (f"{_LLAMA} {_SP}", 1),
    "value, tp2 pp2 sp, full recompute": (f"{_LLAMA} {_SP} {_FULL} --pipeline-model-parallel-size 2", 1),
    "value, experts": (f"{_LLAMA} {_EXPERTS}", 1),
    "embedding": (f"{_LLAMA}", 0),
    "embedding, tp2 sp, full recompute": (f"{_LLAMA} {_SP} {_FULL}", 0),
    "embedding, one sample": (f"{_LLAMA} --micro-batch-size 1", 0),
}
_SCORES: Final = {
    "reranker": _LLAMA,
    "reranker, one sample": f"{_LLAMA} --micro-batch-size 1",
    "reranker, tied embeddings": _LLAMA.replace("--untie-embeddings-and-output-weights ", ""),
    "reranker, tp2": f"{_LLAMA} --tensor-model-parallel-size 2",
    "reranker, tp2 sp": f"{_LLAMA} {_SP}",
    "reranker, tp2 pp2 sp": f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2",
    "reranker, full recompute, cp2": f"{_LLAMA} {_FULL} --context-parallel-size 2",
    "reranker, adapters": f"{_LLAMA} {_FULL} --info-lora 64",
    "reranker, adapters, tp2 sp": f"{_LLAMA} {_SP} {_FULL} --info-lora 64 --global-batch-size 8",
    "reranker, experts": f"{_LLAMA} {_EXPERTS}",
}
TOKEN_SCORES: Final = {f"head, {name}" for name in _SCORES}
HEADS: Final = {
    f"head, {name}": f"--bf16 {words}" for name, words in [*((name, words) for name, (words, _) in _OF.items()), *_SCORES.items()]
}
VALUE_HEADS: Final = {f"head, {name}" for name in _OF if name.startswith("value")}
HEAD_OUTPUTS: Final = {f"head, {name}": outputs for name, (_, outputs) in _OF.items()}
