"""Layouts with frozen parameters (`FreezeSpec`) for the comparison of the formulas with megatron-core."""

from __future__ import annotations

from typing import Final

from analyzer.specs.freezing import FreezeSpec

_LLAMA: Final = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention "
    "--num-query-groups 4 --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
)
_EXPERTS: Final = (
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --expert-model-parallel-size 4 "
    "--moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512"
)
_LATENT: Final = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--no-rope-fusion --attention-dropout 0 --hidden-dropout 0 --qk-layernorm --multi-latent-attention --kv-lora-rank 64 "
    "--qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --q-lora-rank 192"
)
_MTP: Final = "--mtp-num-layers 1"
_NET: Final = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq [1,0,1,1] --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 32 --linear-value-head-dim 32"
)
_FULL: Final = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
_FP8: Final = "--fp8-format hybrid --fp8-recipe tensorwise"
_MXFP8: Final = (
    "--info-gpu B200 --fp8-recipe mxfp8 --fp8-format e4m3 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag "
    "--overlap-grad-reduce --overlap-param-gather"
)
_ON_HOST: Final = "--optimizer-cpu-offload --use-precision-aware-optimizer"
_HYBRIDEP: Final = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 512 --moe-token-dispatcher-type flex "
    "--moe-flex-dispatcher-backend hybridep --moe-permute-fusion --expert-model-parallel-size 2 --moe-router-dtype fp32"
)
_GRAPHS: Final = "--vocab-size 500 --cuda-graph-impl transformer_engine"
_FROM_START: Final = "--cuda-graph-warmup-steps 0"
_SP: Final = "--tensor-model-parallel-size 2 --sequence-parallel"
_EARLY: Final = FreezeSpec(prefixes=("embedding", "decoder.layers.0.", "decoder.layers.1."))
_ATTENTION: Final = FreezeSpec(pattern=r"self_attention")
_SPECS: Final = {
    "embedding": (f"{_LLAMA}", FreezeSpec(prefixes=("embedding",))),
    "embedding, tied": (f"{_LLAMA.replace('--untie-embeddings-and-output-weights', '')}", FreezeSpec(prefixes=("embedding",))),
    "output layer": (f"{_LLAMA}", FreezeSpec(prefixes=("output_layer",))),
    "early layers": (f"{_LLAMA}", _EARLY),
    "early layers, tp2 sp": (f"{_LLAMA} {_SP}", _EARLY),
    "early layers, full recompute": (f"{_LLAMA} {_FULL} 1", _EARLY),
    "early layers, two in a checkpoint": (f"{_LLAMA} {_FULL} 2", FreezeSpec(prefixes=("embedding", "decoder.layers.0."))),
    "first layer of each stage, pp2": (f"{_LLAMA} --pipeline-model-parallel-size 2", FreezeSpec(prefixes=("decoder.layers.0.",))),
    "attention": (f"{_LLAMA}", _ATTENTION),
    "attention, tp2 pp2 sp": (f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2", _ATTENTION),
    "attention, interleaved": (
        f"{_LLAMA} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        _ATTENTION,
    ),
    "attention, selective recompute": (
        f"{_LLAMA} --recompute-granularity selective --recompute-modules core_attn mlp",
        _ATTENTION,
    ),
    "all but attention": (f"{_LLAMA}", FreezeSpec(prefixes=("",), trained_pattern=r"self_attention")),
    "feed-forward": (f"{_LLAMA}", FreezeSpec(pattern=r"\.mlp\.")),
    "first projections": (f"{_LLAMA}", FreezeSpec(pattern=r"linear_(qkv|fc1)\.weight")),
    "norms": (f"{_LLAMA}", FreezeSpec(pattern=r"norm")),
    "ratio": (f"{_LLAMA}", FreezeSpec(ratio=0.6)),
    "ratio, but norms": (f"{_LLAMA} {_SP}", FreezeSpec(ratio=0.7, trained_pattern=r"norm")),
    "gpt with dropout": ("", _EARLY),
    "experts": (f"{_LLAMA} {_EXPERTS}", FreezeSpec(pattern=r"\.experts\.")),
    "experts, tp2 sp": (f"{_LLAMA} {_EXPERTS} {_SP} --expert-tensor-parallel-size 1", FreezeSpec(pattern=r"\.experts\.")),
    "all but experts": (f"{_LLAMA} {_EXPERTS}", FreezeSpec(prefixes=("",), trained_pattern=r"\.experts\.")),
    "all but the last layer, experts": (f"{_LLAMA} {_EXPERTS}", FreezeSpec(prefixes=("",), trained_prefixes=("decoder.layers.3",))),
    "experts of two layers": (f"{_LLAMA} {_EXPERTS}", FreezeSpec(pattern=r"layers\.[23].*\.experts\.")),
    "routers": (f"{_LLAMA} {_EXPERTS}", FreezeSpec(pattern=r"router")),
    "early layers, fp8": (f"{_LLAMA} {_FP8}", _EARLY),
    "early layers, fp8 blockwise": (f"{_LLAMA} --fp8-format e4m3 --fp8-recipe blockwise", _EARLY),
    "early layers, stored mxfp8": (f"{_LLAMA} {_MXFP8}", _EARLY),
    "all but attention, fp8": (f"{_LLAMA} {_FP8}", FreezeSpec(prefixes=("",), trained_pattern=r"self_attention")),
    "attention, stored fp8, tp2 sp": (f"{_LLAMA} {_SP} {_FP8} --fp8-param-gather", _ATTENTION),
    "attention, stored fp8 delayed": (f"{_LLAMA} --fp8-format hybrid --fp8-param-gather", _ATTENTION),
    "first projections, fp8, b200": (f"{_LLAMA} {_FP8} --info-gpu B200", FreezeSpec(pattern=r"linear_(qkv|fc1)\.weight")),
    "experts, fp8": (f"{_LLAMA} {_EXPERTS} {_FP8}", FreezeSpec(pattern=r"\.experts\.")),
    "attention, fp8 blockwise, pp2": (
        f"{_LLAMA} --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather --pipeline-model-parallel-size 2",
        _ATTENTION,
    ),
    "early layers, states on the host": (f"{_LLAMA} {_ON_HOST}", _EARLY),
    "attention, states on the host, tp2 sp": (f"{_LLAMA} {_SP} {_ON_HOST}", _ATTENTION),
    "experts, states on the host, full recompute": (
        f"{_LLAMA} {_EXPERTS} {_ON_HOST} {_FULL} 1",
        FreezeSpec(pattern=r"\.experts\."),
    ),
    "latent attention": (f"{_LATENT}", _ATTENTION),
    "early layers, graphs": (f"{_LLAMA} {_GRAPHS}", _EARLY),
    "attention, graphs of attention from the start": (f"{_LLAMA} {_GRAPHS} --cuda-graph-scope attn {_FROM_START}", _ATTENTION),
    "all but the output layer, graphs": (f"{_LLAMA} {_GRAPHS}", FreezeSpec(prefixes=("embedding", "decoder."))),
    "feed-forward, graphs of mlp, fp8": (f"{_LLAMA} {_FP8} {_GRAPHS} --cuda-graph-scope mlp", FreezeSpec(pattern=r"\.mlp\.")),
    "all layers, graphs of hybridep router": (
        f"{_LLAMA} {_HYBRIDEP} {_GRAPHS} --cuda-graph-scope moe_router moe_preprocess",
        FreezeSpec(prefixes=("decoder.",)),
    ),
    "all layers, graphs of hybridep router, fp8": (
        f"{_LLAMA} {_HYBRIDEP} {_FP8} {_GRAPHS} --cuda-graph-scope moe_router moe_preprocess",
        FreezeSpec(prefixes=("decoder.",)),
    ),
    "all layers, graphs of hybridep router, mxfp8": (
        f"{_LLAMA} {_HYBRIDEP} {_MXFP8} {_GRAPHS} --cuda-graph-scope moe_router moe_preprocess --seq-length 512",
        FreezeSpec(prefixes=("decoder.",)),
    ),
    "routers, graphs of attention and router": (
        f"{_LLAMA} {_EXPERTS} {_GRAPHS} --cuda-graph-scope attn moe_router",
        FreezeSpec(pattern=r"router"),
    ),
    "early layers, latent attention and experts": (f"{_LATENT} {_EXPERTS}", _EARLY),
    "early layers, mtp": (f"{_LLAMA} {_MTP}", _EARLY),
    "attention, mtp, tp2 sp": (f"{_LLAMA} {_MTP} {_SP}", _ATTENTION),
    "mtp": (f"{_LLAMA} {_MTP}", FreezeSpec(prefixes=("mtp",))),
    "all but mtp": (f"{_LLAMA} {_MTP}", FreezeSpec(prefixes=("embedding", "decoder", "output_layer"))),
    "decoder, mtp": (f"{_LLAMA} {_MTP}", FreezeSpec(prefixes=("decoder.",))),
    "embedding, mtp": (f"{_LLAMA} {_MTP}", FreezeSpec(prefixes=("embedding",))),
    "output layer, mtp": (f"{_LLAMA} {_MTP}", FreezeSpec(prefixes=("output_layer",))),
    "attention, mtp, pp2": (f"{_LLAMA} {_MTP} --pipeline-model-parallel-size 2", _ATTENTION),
    "early layers, mtp, full recompute": (f"{_LLAMA} {_MTP} {_FULL} 1", _EARLY),
    "experts, mtp": (f"{_LLAMA} {_EXPERTS} {_MTP}", FreezeSpec(pattern=r"\.experts\.")),
    "early layers, linear attention": (f"{_LLAMA} {_NET}", _EARLY),
    "attention, linear attention": (f"{_LLAMA} {_NET}", _ATTENTION),
    "attention, linear attention, tp2 sp": (f"{_LLAMA} {_NET} {_SP}", _ATTENTION),
    "feed-forward, linear attention": (f"{_LLAMA} {_NET}", FreezeSpec(pattern=r"\.mlp\.")),
    "all but attention, linear attention": (f"{_LLAMA} {_NET}", FreezeSpec(prefixes=("",), trained_pattern=r"self_attention")),
    "early layers, linear attention, full recompute": (f"{_LLAMA} {_NET} {_FULL} 1", _EARLY),
    "attention, mtp, fp8": (f"{_LLAMA} {_MTP} {_FP8}", _ATTENTION),
    "early layers, linear attention, fp8": (f"{_LLAMA} {_NET} {_FP8}", _EARLY),
    "experts, linear attention and mtp": (
        f"{_LLAMA} {_NET} --linear-attention-freq 2 {_EXPERTS} {_MTP}",
        FreezeSpec(pattern=r"\.experts\."),
    ),
    "all but the embedding, linear attention and mtp": (
        f"{_LLAMA} {_NET} --linear-attention-freq 2 {_EXPERTS} {_MTP}",
        FreezeSpec(pattern=r"(decoder|mtp|output)"),
    ),
    "all but the embedding, linear attention and mtp, full recompute": (
        f"{_LLAMA} {_NET} --linear-attention-freq 2 {_EXPERTS} {_MTP} {_FULL} 1",
        FreezeSpec(pattern=r"(decoder|mtp|output)"),
    ),
    "early layers, linear attention, graphs": (f"{_LLAMA} {_NET} {_GRAPHS} --cuda-graph-scope attn", _EARLY),
    "attention, mtp, graphs": (f"{_LLAMA} {_MTP} {_GRAPHS} --cuda-graph-scope attn", _ATTENTION),
}
FROZEN: Final = {f"frozen, {name}": f"--bf16 --vocab-size 120 {line}" for name, (line, _) in _SPECS.items()}
FROZEN_PARAMETERS: Final = {f"frozen, {name}": spec for name, (_, spec) in _SPECS.items()}
HELD_BY_LEAF: Final = {name for name, spec in FROZEN_PARAMETERS.items() if spec.prefixes or spec.ratio}
"""The graph of a microbatch references the output of the frozen embedding until the next forward (`HELD_BY_GRAPH`)."""
