"""Layouts whose loss reads log-probabilities (`ModelSpec.log_probability_loss`), for the comparison with megatron-core."""

from __future__ import annotations

from typing import Final

_LLAMA: Final = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention "
    "--num-query-groups 4 --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
)
_TIED: Final = _LLAMA.replace("--untie-embeddings-and-output-weights ", "")
_FULL: Final = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_SP: Final = "--tensor-model-parallel-size 2 --sequence-parallel"
_ONE: Final = "--micro-batch-size 1 --global-batch-size 8"
_EXPERTS: Final = (
    "--num-experts 8 --expert-model-parallel-size 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-ffn-hidden-size 512"
)
_HYBRID: Final = f"{_LLAMA.replace('--swiglu', '--squared-relu')} --num-layers 6 --hybrid-override-pattern"


def _named(kind: str, layouts: dict[str, str]) -> dict[str, str]:
    common = "--bf16 --no-create-attention-mask-in-dataloader --vocab-size 40000"
    return {f"{kind}, {name}": f"{common} {words}" for name, words in layouts.items()}


HYBRID_LOG_PROBABILITIES: Final = _named(
    "log-probabilities, hybrid",
    {
        "mamba, ffn and attention": f"{_HYBRID} MM-M*- {_ONE}",
        "two samples, tp2 sp": f"{_HYBRID} MM-M*- {_SP} --global-batch-size 8",
        "cp2 pp2": f"{_HYBRID} MM-M*- --context-parallel-size 2 --pipeline-model-parallel-size 2 {_ONE} --global-batch-size 2",
        "experts": f"{_HYBRID} MEM*ME {_ONE} {_EXPERTS}",
        "two sequences": f"{_HYBRID} MM-M*- {_ONE}",
    },
)
LOG_PROBABILITIES: Final = HYBRID_LOG_PROBABILITIES | _named(
    "log-probabilities",
    {
        "one sample": f"{_LLAMA} {_ONE}",
        "two samples": f"{_LLAMA} --global-batch-size 16",
        "tied embeddings": f"{_TIED} {_ONE}",
        "tp2": f"{_LLAMA} --tensor-model-parallel-size 2 {_ONE} --global-batch-size 4",
        "tp2 sp, two samples": f"{_LLAMA} {_SP} --global-batch-size 8",
        "cp2": f"{_LLAMA} --context-parallel-size 2 {_ONE} --global-batch-size 4",
        "tp2 pp2 sp": f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2 {_ONE} --global-batch-size 2",
        "tied, pp2, two samples": f"{_TIED} --pipeline-model-parallel-size 2 --global-batch-size 8",
        "full recompute": f"{_LLAMA} {_FULL} {_ONE}",
        "adapters": f"{_LLAMA} {_FULL} {_ONE} --info-lora 64",
        "four microbatches": f"{_LLAMA} {_ONE} --global-batch-size 32",
        "experts": f"{_LLAMA} {_ONE} {_EXPERTS}",
        "packed": f"{_LLAMA} {_ONE}",
        "two sequences": f"{_LLAMA} {_ONE}",
        "four sequences": f"{_LLAMA} {_ONE}",
        "eight sequences, tp2 cp2": f"{_LLAMA} {_SP} --context-parallel-size 2 {_ONE} --global-batch-size 2",
        "four sequences, adapters": f"{_LLAMA} {_FULL} {_ONE} --info-lora 64",
        "fp8": f"{_LLAMA} {_ONE} --fp8-format hybrid --fp8-recipe tensorwise --info-gpu H100-80GB",
    },
)
BATCHED_LOG_PROBABILITIES: Final = {name for name in LOG_PROBABILITIES if "adapters" in name}
"""As `distillation_layouts.BATCHED`: the gradient of the input of a frozen output layer is a product for each token."""
_NUMBERS: Final = {"packed": 1, "two": 2, "four": 4, "eight": 8}
LOSS_SEQUENCES: Final = {
    name: number
    for name in LOG_PROBABILITIES
    for word, number in _NUMBERS.items()
    if name.replace("hybrid, ", "").startswith(f"log-probabilities, {word}") and ("sequences" in name or word == "packed")
}
"""The packed sequences of a microbatch, whose losses are computed one by one."""
