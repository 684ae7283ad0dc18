"""Layouts of launches with adapters (`--info-lora`) for the comparison of the formulas with megatron-core."""

from __future__ import annotations

from typing import Any, Final

_LLAMA: Final = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention "
    "--num-query-groups 4 --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
)
_TIED: Final = _LLAMA.replace(" --untie-embeddings-and-output-weights", "")
_EXPERTS: Final = (
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --expert-model-parallel-size 4 "
    "--moe-ffn-hidden-size 512"
)
_SHARED: Final = "--moe-shared-expert-intermediate-size 512"
_DELTA_NET: Final = (
    f"{_LLAMA} --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 64 --linear-value-head-dim 64"
)
_LATENT: Final = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--no-rope-fusion --attention-dropout 0 --hidden-dropout 0 --qk-layernorm --multi-latent-attention --kv-lora-rank 64 "
    "--qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"
)
_COMPRESSED: Final = f"{_LATENT} --q-lora-rank 192"
_PROJECTIONS: Final = "linear_kv_down_proj,linear_kv_up_proj,linear_proj"
_COMPRESSED_PROJECTIONS: Final = f"linear_q_down_proj,linear_q_up_proj,{_PROJECTIONS}"
_DEEPSEEK: Final = (
    f"{_COMPRESSED} {_EXPERTS} --moe-shared-expert-intermediate-size 256 --moe-layer-freq ([0]*1+[1]*3) "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-permute-fusion"
)
_E4M3: Final = "--fp8-format e4m3 --fp8-recipe"
_SELECTIVE: Final = "--recompute-granularity selective --recompute-modules"
_OFFLOAD: Final = "--global-batch-size 64 --min-offloaded-tensor-size 1024 --fine-grained-activation-offloading --offload-modules"
_TP2: Final = "--tensor-model-parallel-size 2"
_SP: Final = f"{_TP2} --sequence-parallel"
_GRAPHS: Final = "--vocab-size 500 --cuda-graph-impl transformer_engine --cuda-graph-scope"

_METHODS: Final = {
    "all layers": f"{_LLAMA} --info-lora 64",
    "attention only": f"{_LLAMA} --info-lora 64:linear_qkv",
    "fc1": f"{_LLAMA} --info-lora 64:linear_fc1",
    "fc2": f"{_LLAMA} --info-lora 64:linear_fc2",
    "gpt": "--info-lora 64 --attention-dropout 0 --hidden-dropout 0",
    "gpt with dropout": "--info-lora 64",
    "tp2": f"{_LLAMA} {_TP2} --info-lora 64",
    "tp2 sp": f"{_LLAMA} {_SP} --info-lora 64",
    "tp2 pp2 sp": f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2 --info-lora 64",
    "interleaved": f"{_LLAMA} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --info-lora 64",
    "full recompute, tp2 sp": f"{_LLAMA} {_SP} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--info-lora 64",
    "selective recompute": f"{_LLAMA} {_SELECTIVE} core_attn mlp --info-lora 64",
    "fp8, tensorwise, tp2 sp": f"{_LLAMA} {_SP} {_E4M3} tensorwise --info-lora 64",
    "mtp": f"{_LLAMA} --mtp-num-layers 1 --info-lora 64:linear_qkv,linear_proj",
}
"""Layouts of each method other than LoRA."""

ADAPTERS: Final = {
    f"lora, {name}": f"--bf16 --vocab-size 120 {line}"
    for name, line in {
        "all layers": f"{_LLAMA} --info-lora 8",
        "attention only": f"{_LLAMA} --info-lora 16:linear_qkv",
        "attention only, graphs of mlp": f"{_LLAMA} {_GRAPHS} mlp --info-lora 64:linear_qkv",
        "attention only, graphs of mlp, fp8, pp2": f"{_LLAMA} {_GRAPHS} mlp --fp8-format hybrid --fp8-recipe tensorwise "
        "--pipeline-model-parallel-size 2 --info-lora 64:linear_qkv,linear_proj",
        "ffn, graphs of attention": f"{_LLAMA} {_GRAPHS} attn --info-lora 64:linear_fc1,linear_fc2",
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
        "full recompute, tp2 sp": f"{_LLAMA} {_SP} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --info-lora 8",
        "selective recompute": f"{_LLAMA} --recompute-granularity selective --recompute-modules core_attn mlp --info-lora 8",
        "without fused accumulation, tp2 sp": f"{_LLAMA} {_SP} --no-gradient-accumulation-fusion --info-lora 8",
        "experts": f"{_LLAMA} {_EXPERTS} --info-lora 8",
        "experts only": f"{_LLAMA} {_EXPERTS} --info-lora 8:linear_fc1,linear_fc2",
        "experts on one rank": f"{_LLAMA} {_EXPERTS} --expert-model-parallel-size 1 --info-lora 8",
        "shared experts": f"{_LLAMA} {_EXPERTS} {_SHARED} --info-lora 8",
        "shared experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 --info-lora 8",
        "dropout": f"{_LLAMA} --info-lora 8",
        "dropout, tp2 sp": f"{_LLAMA} {_SP} --info-lora 8",
        "dropout, experts": f"{_LLAMA} {_EXPERTS} --info-lora 8",
        "each expert": f"{_LLAMA} {_EXPERTS} --info-lora 8",
        "each expert on one rank": f"{_LLAMA} {_EXPERTS} --expert-model-parallel-size 1 --info-lora 8",
        "each expert, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 --info-lora 8",
        "each expert, one on each rank": f"{_LLAMA} {_EXPERTS} --expert-model-parallel-size 8 --info-lora 8",
        "each expert, fc1": f"{_LLAMA} {_EXPERTS} --info-lora 16:linear_fc1",
        "each expert, fc2": f"{_LLAMA} {_EXPERTS} --expert-model-parallel-size 2 --info-lora 16:linear_fc2",
        "each expert, one on each rank, fc2": f"{_LLAMA} {_EXPERTS} --expert-model-parallel-size 8 --info-lora 16:linear_fc2",
        "each expert, dropout": f"{_LLAMA} {_EXPERTS} {_SHARED} --info-lora 8",
        "each expert, dropout, one on each rank": f"{_LLAMA} {_EXPERTS} --expert-model-parallel-size 8 --info-lora 8",
        "each expert, pp2": f"{_LLAMA} {_EXPERTS} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --info-lora 8",
        "each expert, full recompute": f"{_LLAMA} {_EXPERTS} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --info-lora 8",
        "each expert, recomputed experts": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SELECTIVE} moe --info-lora 8",
        "each expert, dropout, recomputed activation": f"{_LLAMA} {_EXPERTS} {_SELECTIVE} moe_act --info-lora 8",
        "each expert, fused permutation": f"{_LLAMA} {_EXPERTS} --moe-permute-fusion --moe-router-topk 4 --info-lora 32",
        "frozen experts": f"{_LLAMA} {_EXPERTS} --info-lora 8:linear_qkv,linear_proj",
        "frozen shared experts": f"{_LLAMA} {_EXPERTS} {_SHARED} --info-lora 8:linear_qkv,linear_proj",
        "frozen experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SP} --expert-tensor-parallel-size 1 --info-lora 8:linear_qkv,linear_proj",
        "recomputed norms, experts": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SELECTIVE} layernorm --info-lora 8",
        "recomputed experts": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SELECTIVE} moe --info-lora 8",
        "overlapped shared experts": f"{_LLAMA} {_EXPERTS} {_SHARED} --moe-shared-expert-gate --moe-shared-expert-overlap "
        "--info-lora 8",
        "overlapped shared experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 "
        "--moe-shared-expert-overlap --info-lora 8",
        "frozen overlapped shared experts": f"{_LLAMA} {_EXPERTS} {_SHARED} --moe-shared-expert-overlap --info-lora 8:linear_qkv",
        "linear attention": f"{_DELTA_NET} --info-lora 8",
        "linear attention, tp2 sp": f"{_DELTA_NET} {_SP} --info-lora 8",
        "projections of linear attention": f"{_DELTA_NET} --info-lora 64:in_proj,out_proj,linear_fc1,linear_fc2",
        "linear attention, experts": f"{_DELTA_NET} {_EXPERTS} {_SHARED} --moe-shared-expert-gate --attention-output-gate "
        "--info-lora 8",
        "latent attention, frozen projections": f"{_DEEPSEEK} --info-lora 8:linear_proj",
        "latent attention, experts": f"{_DEEPSEEK} --info-lora 8:{_COMPRESSED_PROJECTIONS},linear_fc1",
        "latent attention": f"{_LATENT} --info-lora 8:linear_q_proj,{_PROJECTIONS}",
        "latent attention, tp2": f"{_COMPRESSED} {_TP2} --info-lora 8:{_COMPRESSED_PROJECTIONS}",
        "latent attention, tp2 sp": f"{_COMPRESSED} {_SP} --info-lora 8:{_COMPRESSED_PROJECTIONS}",
        "latent attention, recomputed": f"{_COMPRESSED} --recompute-granularity full --recompute-method uniform "
        f"--recompute-num-layers 1 --info-lora 8:{_COMPRESSED_PROJECTIONS}",
        "mtp": f"{_LLAMA} --mtp-num-layers 1 --info-lora 16:linear_qkv,linear_proj",
        "two mtp layers": f"{_LLAMA} --mtp-num-layers 2 --info-lora 8:linear_qkv,eh_proj",
        "mtp, tp2 sp": f"{_LLAMA} {_SP} --mtp-num-layers 1 --info-lora 8:linear_qkv,eh_proj",
        "mtp, recomputed": f"{_LLAMA} --mtp-num-layers 1 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --info-lora 8:linear_qkv",
        "mtp, pp2": f"{_LLAMA} --pipeline-model-parallel-size 2 --mtp-num-layers 1 --info-lora 8:linear_qkv,linear_fc1",
        "frozen experts, fused permutation": f"{_LLAMA} {_EXPERTS} --moe-permute-fusion --info-lora 8:linear_qkv",
        "fp8, delayed": f"{_LLAMA} --fp8-format hybrid --fp8-recipe delayed --info-lora 16",
        "fp8, tensorwise": f"{_LLAMA} {_E4M3} tensorwise --info-lora 16",
        "fp8, mxfp8": f"{_LLAMA} {_E4M3} mxfp8 --info-gpu B200 --info-lora 16",
        "fp8, tensorwise, tp2 sp": f"{_LLAMA} {_SP} {_E4M3} tensorwise --info-lora 16",
        "fp8, blockwise, tp2 sp": f"{_LLAMA} {_SP} {_E4M3} blockwise --info-lora 16",
        "fp8, mxfp8, tp2 sp": f"{_LLAMA} {_SP} {_E4M3} mxfp8 --info-gpu B200 --info-lora 16",
        "fp8, tensorwise, tp2 pp2 sp": f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2 {_E4M3} tensorwise --info-lora 16",
        "fp8, experts": f"{_LLAMA} {_EXPERTS} {_SHARED} {_E4M3} blockwise --info-lora 16",
        "fp8, frozen experts": f"{_LLAMA} {_EXPERTS} {_SHARED} {_E4M3} blockwise --info-lora 16:linear_qkv,linear_proj",
        "fp8, first and last layers in 16 bit": f"{_LLAMA} {_E4M3} tensorwise --first-last-layers-bf16 --info-lora 16",
        **{f"{method}, {name}": line for method in ("canonical", "dora") for name, line in _METHODS.items()},
        "canonical, shared experts": f"{_LLAMA} {_EXPERTS} {_SHARED} --info-lora 8",
        "canonical, shared experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 --info-lora 8",
        "canonical, each expert": f"{_LLAMA} {_EXPERTS} {_SHARED} --info-lora 8",
        "canonical, dropout": f"{_LLAMA} --info-lora 8",
        "canonical, dropout, tp2 sp": f"{_LLAMA} {_SP} --info-lora 8",
        "canonical, one query group": f"{_LLAMA} --num-query-groups 1 --info-lora 8",
        "canonical, overlapped shared experts": f"{_LLAMA} {_EXPERTS} {_SHARED} --moe-shared-expert-overlap --info-lora 8",
        "dora, frozen experts": f"{_LLAMA} {_EXPERTS} --info-lora 8:linear_qkv,linear_proj",
        "dora, latent attention": f"{_LATENT} --info-lora 64:linear_proj,linear_fc1",
        "recomputed activation of experts": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SELECTIVE} moe_act --info-lora 8",
        "each expert, recomputed activation": f"{_LLAMA} {_EXPERTS} {_SELECTIVE} moe_act --info-lora 8",
        "dropout, recomputed activation of experts": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SELECTIVE} moe_act --info-lora 8",
        "recomputed activation of experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 "
        f"{_SELECTIVE} moe_act --info-lora 8",
        "recomputed shared experts": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SELECTIVE} shared_experts --info-lora 8",
        "optimizer states on the host": f"{_LLAMA} --optimizer-cpu-offload --use-precision-aware-optimizer --info-lora 8",
        "local layers": "--transformer-impl local --no-persist-layer-norm --info-lora 8 --attention-dropout 0 --hidden-dropout 0",
        "local layers, tp2": f"{_TP2} --transformer-impl local --no-persist-layer-norm --info-lora 8",
        "gathered again, tp2 sp": f"{_LLAMA} {_SP} --info-lora 8",
        "gathered again, tp4 sp": f"{_LLAMA} --tensor-model-parallel-size 4 --sequence-parallel --info-lora 8:linear_qkv",
        "gathered again, fc1, tp2 sp": f"{_LLAMA} {_SP} --info-lora 8:linear_fc1",
        "gathered again, tp2": f"{_LLAMA} {_TP2} --info-lora 8",
        "gathered again, tp2 pp2 sp": f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2 --info-lora 8",
        "gathered again, interleaved, tp2 sp": f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2 --info-lora 8:linear_qkv,linear_proj",
        "gathered again, dropout, tp2 sp": f"{_LLAMA} {_SP} --info-lora 8",
        "gathered again, experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SP} --expert-tensor-parallel-size 1 --info-lora 8",
        "gathered again, shared experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 "
        "--info-lora 8",
        "gathered again, recomputed shared experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 "
        f"{_SELECTIVE} shared_experts --info-lora 8",
        "gathered again, overlapped shared experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 "
        "--moe-shared-expert-overlap --info-lora 8",
        "gathered again, full recompute, tp2 sp": f"{_LLAMA} {_SP} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --info-lora 8",
        "gathered again, selective recompute, tp2 sp": f"{_LLAMA} {_SP} {_SELECTIVE} core_attn mlp --info-lora 8",
        "gathered again, recomputed norms, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 "
        f"{_SELECTIVE} layernorm --info-lora 8",
        "gathered again, recomputed moe layers, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 "
        f"{_SELECTIVE} moe --info-lora 8",
        "gathered again, latent attention, tp2 sp": f"{_COMPRESSED} {_SP} --info-lora 8:{_COMPRESSED_PROJECTIONS},linear_fc1",
        "gathered again, linear attention, tp2 sp": f"{_DELTA_NET} {_SP} --info-lora 16:in_proj,out_proj,linear_qkv,linear_fc1",
        "gathered again, mtp, tp2 sp": f"{_LLAMA} {_SP} --mtp-num-layers 1 --info-lora 8:linear_qkv,linear_fc1,eh_proj",
        "gathered again, fp8, tensorwise, tp2 sp": f"{_LLAMA} {_SP} {_E4M3} tensorwise --info-lora 16",
        "gathered again, fp8, blockwise, tp2 sp": f"{_LLAMA} {_SP} {_E4M3} blockwise --info-lora 16",
        "gathered again, fp8, mxfp8, tp2 sp": f"{_LLAMA} {_SP} {_E4M3} mxfp8 --info-gpu B200 --info-lora 16",
        "gathered again, fp8 weights, tp2 pp2 sp": f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2 {_E4M3} tensorwise "
        "--fp8-param-gather --info-lora 16",
        "gathered again, without fused accumulation, tp2 sp": f"{_LLAMA} {_SP} --no-gradient-accumulation-fusion --info-lora 8",
        "dropout, shared experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 --info-lora 8",
        "offloaded attention": f"{_LLAMA} {_OFFLOAD} core_attn --info-lora 8",
        "offloaded attention, tp2 pp2 sp": f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2 {_OFFLOAD} core_attn --info-lora 8",
        "offloaded norms": f"{_LLAMA} {_EXPERTS} {_OFFLOAD} attn_norm mlp_norm core_attn --info-lora 8",
        "fp8 weights, delayed": f"{_LLAMA} {_EXPERTS} {_SHARED} --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather "
        "--info-lora 16",
        "fp8 weights, tensorwise": f"{_LLAMA} {_E4M3} tensorwise --fp8-param-gather --info-lora 16",
        "fp8 weights, tensorwise, tp2 pp2 sp": f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2 {_E4M3} tensorwise "
        "--fp8-param-gather --info-lora 16",
        "fp8 weights, blockwise, experts": f"{_LLAMA} {_EXPERTS} {_SHARED} {_E4M3} blockwise --fp8-param-gather --info-lora 16",
        "fp8 weights, mxfp8": f"{_LLAMA} {_E4M3} mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag --info-gpu B200 "
        "--info-lora 16",
        "fp8 weights, mxfp8, frozen experts": f"{_LLAMA} {_EXPERTS} {_E4M3} mxfp8 --fp8-param-gather "
        "--reuse-grad-buf-for-mxfp8-param-ag --info-gpu B200 --info-lora 16:linear_qkv,linear_proj",
        "canonical, fp8 weights": f"{_LLAMA} {_SP} {_E4M3} blockwise --fp8-param-gather --info-lora 16",
        "engine": f"{_LLAMA} --info-lora 8",
        "engine, tp2": f"{_LLAMA} {_TP2} --info-lora 8",
        "engine, tp2 sp": f"{_LLAMA} {_SP} --info-lora 8",
        "engine, tp2 pp2 sp": f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2 --info-lora 8",
        "engine, experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 --info-lora 8",
        "engine, overlapped shared experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 "
        "--moe-shared-expert-overlap --info-lora 8",
        "engine, latent attention, tp2 sp": f"{_COMPRESSED} {_SP} --info-lora 8:{_COMPRESSED_PROJECTIONS}",
        "engine, linear attention, mtp": f"{_DELTA_NET} --info-lora 16:in_proj,out_proj,linear_qkv,linear_fc1,linear_fc2",
        "engine, full recompute, tp2 sp": f"{_LLAMA} {_SP} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --info-lora 8",
        "engine, dropout, tp2 sp": f"{_LLAMA} {_SP} --info-lora 8",
        "engine, output projection, interleaved": f"{_LLAMA} --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2 --info-lora 8:linear_proj",
        "engine, frozen experts, pp2": f"{_LLAMA} {_EXPERTS} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--info-lora 8:linear_qkv",
        "engine, trained ends": f"{_LLAMA} --info-lora 8",
        "engine, trained ends, tp2 sp": f"{_LLAMA} {_SP} --info-lora 8",
        "engine, trained ends, tp2 pp2 sp": f"{_LLAMA} {_SP} --pipeline-model-parallel-size 2 --info-lora 8",
        "engine, trained ends, full recompute": f"{_LLAMA} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --vocab-size 9999 --info-lora 8",
        "engine, trained ends, experts": f"{_LLAMA} {_EXPERTS} --vocab-size 9999 --info-lora 8",
        "engine, trained ends, one sample": f"{_LLAMA} --micro-batch-size 1 --vocab-size 9999 --info-lora 8",
        "engine, trained ends, native loss": f"{_LLAMA} --cross-entropy-loss-fusion --vocab-size 9999 --info-lora 8",
        "engine, trained embedding": f"{_LLAMA} --vocab-size 9999 --info-lora 8",
        "engine, trained embedding, tied": f"{_TIED} --vocab-size 9999 --info-lora 8",
        "engine, trained embedding, tied, tp2 sp": f"{_TIED} {_SP} --vocab-size 9999 --info-lora 8",
        "engine, trained output layer, pp2": f"{_LLAMA} --vocab-size 9999 --pipeline-model-parallel-size 2 --info-lora 8",
        "engine, experts after dense layers": f"{_LLAMA} {_EXPERTS} --moe-layer-freq ([0]*2+[1]*2) --info-lora 8:linear_proj",
        "rank of experts": f"{_LLAMA} {_EXPERTS} --info-lora 16",
        "rank of experts, tp2 sp": f"{_LLAMA} {_EXPERTS} {_SHARED} {_SP} --expert-tensor-parallel-size 1 --info-lora 16",
        "each expert, rank of experts": f"{_LLAMA} {_EXPERTS} {_SHARED} --info-lora 16",
        "canonical, rank of experts": f"{_LLAMA} {_EXPERTS} --info-lora 16",
    }.items()
}

_COPIES: Final = {
    "trained ends": ("word_embeddings", "output_layer"),
    "trained embedding": ("word_embeddings",),
    "trained output layer": ("output_layer",),
}
"""Modules that are trained beside adapters, by a part of the name of a layout."""


def _copies(name: str) -> tuple[str, ...]:
    return next((copies for words, copies in _COPIES.items() if words in name), ())


HELD_BY_GRAPH: Final = {
    name
    for name in ADAPTERS
    if ("full recompute" in name or name.startswith("lora, engine")) and "word_embeddings" not in _copies(name)
}
"""With several microbatches, the graph of a microbatch references the input of its first layer until the next forward, because this
is a leaf that gets a gradient: it is recorded as a tensor that stays."""


def adapter_fields(name: str) -> dict[str, Any]:
    """Fields of `AdapterSpec` that no option sets: frameworks set them."""
    return {**_fields(name), "expert_rank": 8} if "rank of experts" in name else _fields(name)


def _fields(name: str) -> dict[str, Any]:
    if name.startswith("lora, engine"):
        made = {"layers": "transformer_engine", "per_expert": True, "dropout": "dropout" in name}
        return {**made, "trained_copies": _copies(name)}
    method = name.split(", ")[1]
    if method in ("canonical", "dora"):
        return {"method": method, "dropout": "lora, canonical, dropout" in name, "per_expert": "each expert" in name}
    fields = {"lora, dropout": "dropout", "lora, each expert": "per_expert", "lora, gathered again": "regathers"}
    made = {field: True for begin, field in fields.items() if name.startswith(begin)}
    return {**made, "dropout": True} if ", dropout" in name else made
