"""Layouts with attention or the output layer in FP8, for the comparison of the formulas with megatron-core."""

from __future__ import annotations

from typing import Final

_LLAMA: Final = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention "
    "--num-query-groups 4 --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
)
_STORED: Final = "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag --overlap-grad-reduce --overlap-param-gather"
_MXFP8: Final = f"--bf16 --vocab-size 500 --info-gpu B200 --fp8-format e4m3 --fp8-recipe mxfp8 {_STORED}"
_LATENT: Final = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--no-rope-fusion --attention-dropout 0 --hidden-dropout 0 --qk-layernorm --multi-latent-attention --q-lora-rank 192 "
    "--kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"
)
_SELECTIVE: Final = "--recompute-granularity selective --recompute-modules"

FP8_ATTENTION: Final = {
    f"fp8 attention, {name}": f"{_MXFP8} {words}"
    for name, words in {
        "llama": _LLAMA,
        "llama, tp2 sp": f"{_LLAMA} --tensor-model-parallel-size 2 --sequence-parallel",
        "llama, q/k norms": f"{_LLAMA} --qk-layernorm",
        "llama, recomputed": f"{_LLAMA} {_SELECTIVE} core_attn",
        "llama, one layer in bf16": f"{_LLAMA} --first-last-layers-bf16 --num-layers-at-end-in-bf16 0",
        "sinks and windows": f"{_LLAMA} --softmax-type learnable --window-size 128,0 --window-attn-skip-freq 2",
        "latent": _LATENT,
        "latent, recomputed": f"{_LATENT} {_SELECTIVE} core_attn",
        "latent, recomputed up projections": f"{_LATENT} {_SELECTIVE} mla_up_proj",
    }.items()
}

_OUTPUT: Final = "--bf16 --info-gpu B200 --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-output-proj"

FP8_OUTPUT: Final = {
    f"fp8 output layer, {name}": f"{_OUTPUT} {words}"
    for name, words in {
        "llama": _LLAMA,
        "llama, stored": f"{_LLAMA} {_STORED}",
        "llama, tp2 sp": f"{_LLAMA} {_STORED} --tensor-model-parallel-size 2 --sequence-parallel --vocab-size 9983",
        "llama, tp2": f"{_LLAMA} {_STORED} --tensor-model-parallel-size 2 --vocab-size 9983",
        "llama, pp2": f"{_LLAMA} {_STORED} --pipeline-model-parallel-size 2",
    }.items()
}

_MUON: Final = f"--bf16 {_LLAMA} --optimizer dist_muon --fp8-format hybrid --fp8-recipe"
_EXPERTS: Final = (
    "--num-experts 8 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 512"
)

FP8_WEIGHTS: Final = {
    f"fp8 weights beside muon, {name}": words
    for name, words in {
        "replicated": f"--bf16 {_LLAMA} --optimizer muon --info-gpu H100-80GB --fp8-format hybrid --fp8-recipe tensorwise",
        "blackwell": f"{_MUON} tensorwise --info-gpu B200",
        "delayed": f"{_MUON} delayed --info-gpu H100-80GB",
        "experts, pp2": f"{_MUON} tensorwise --info-gpu B200 {_EXPERTS} --pipeline-model-parallel-size 2 --grad-reduce-in-bf16",
        "tp2 sp": f"{_MUON} tensorwise --info-gpu H100-80GB --tensor-model-parallel-size 2 --sequence-parallel",
        "two layers in bf16": f"{_MUON} tensorwise --info-gpu H100-80GB --first-last-layers-bf16",
    }.items()
}
"""Weights that are stored in FP8 without the distributed optimizer, as Megatron-Bridge does (`ModelParts.fp8_weights`)."""
