"""Layouts of hybrid models for the comparison of the formulas with megatron-core. A vocabulary of 120 puts the peak in a layer."""

from __future__ import annotations

from typing import Final

SCRIPT: Final = "pretrain_mamba.py --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
"""Instead of pretrain_gpt.py."""
_NEMOTRON = (
    "--squared-relu --normalization RMSNorm --disable-bias-linear --position-embedding-type none "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --group-query-attention --num-query-groups 4"
)
_EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --expert-model-parallel-size 4 "
    "--moe-ffn-hidden-size 512"
)
_MAMBA = "--num-layers 3 --hybrid-override-pattern MMM"
_MIXED = f"--num-layers 4 --hybrid-override-pattern MEM* {_EXPERTS} --disable-bias-linear"
_OFFLOAD = "--optimizer-cpu-offload --use-precision-aware-optimizer --manual-gc"
_FSDP = (
    "--use-megatron-fsdp --no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor --global-batch-size 32 "
    "--data-parallel-sharding-strategy"
)
_FSDP2 = (
    "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist --global-batch-size 32 "
    "--untie-embeddings-and-output-weights"
)
_GRAPHS = "--cuda-graph-impl transformer_engine"
_SIX = "--num-layers 6 --hybrid-override-pattern MM-M*-"
_STAGES = "--hybrid-layer-pattern MM|-M|*M|-M --pipeline-model-parallel-size 2"
_DEPTHS = "--hybrid-layer-pattern MM-M*-/*-/*-"
_DELTA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --linear-num-key-heads 4 --linear-num-value-heads 8 "
    "--linear-key-head-dim 64 --linear-value-head-dim 64 --hybrid-layer-pattern"
)
_LATENT = (
    "--kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --disable-bias-linear --no-rope-fusion "
    "--attention-dropout 0 --hidden-dropout 0 --hybrid-layer-pattern"
)
_INDEXER = (
    "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 256 --dsa-indexer-loss-coeff 0.01 --q-lora-rank 192 "
    "--normalization RMSNorm"
)
_FULL = "--recompute-granularity full --recompute-method"
_REPEATED = "--hybrid-layer-pattern MEM*/*E/*E --mtp-use-repeated-layer"

HYBRID: Final = {
    f"hybrid, {name}": f"--bf16 --vocab-size 120 {line}"
    for name, line in {
        "mamba, ffn and attention": _SIX,
        "mamba only, one sample": "--num-layers 3 --hybrid-override-pattern MMM --micro-batch-size 1",
        "other sizes of mamba layers": "--num-layers 4 --hybrid-override-pattern M-M* --mamba-num-heads 40 --mamba-head-dim 16 "
        "--mamba-num-groups 4 --mamba-state-dim 64",
        "large vocabulary": f"{_SIX} --vocab-size 9999 --attention-backend unfused",
        "tp2": f"{_SIX} --tensor-model-parallel-size 2 {_NEMOTRON}",
        "tp2 sp": f"{_SIX} --tensor-model-parallel-size 2 --sequence-parallel --no-gradient-accumulation-fusion",
        "pp2, untied": f"{_SIX} --pipeline-model-parallel-size 2 {_NEMOTRON} --swiglu".replace("--squared-relu ", ""),
        "tp2 pp2 sp": f"{_SIX} --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
        "cp2 tp2": f"{_SIX} --context-parallel-size 2 --tensor-model-parallel-size 2",
        "cp4, shared groups": f"{_SIX} --context-parallel-size 4 --mamba-num-groups 2 --micro-batch-size 1",
        "experts": f"--num-layers 6 --hybrid-override-pattern MMEM*E {_EXPERTS} --disable-bias-linear",
        "experts, fused squared relu, shared experts": f"--num-layers 6 --hybrid-override-pattern MEM*ME {_EXPERTS} {_NEMOTRON} "
        "--use-fused-weighted-squared-relu --moe-shared-expert-intermediate-size 512 --moe-router-dtype fp32 --moe-permute-fusion",
        "experts, tp2 sp": f"--num-layers 6 --hybrid-override-pattern MEM*ME {_EXPERTS} {_NEMOTRON} --tensor-model-parallel-size 2 "
        "--sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
        "latent experts": f"--num-layers 4 --hybrid-override-pattern MEM* {_EXPERTS} {_NEMOTRON} --moe-latent-size 256",
        "fp8": f"{_SIX} --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16",
        "selective recompute": "--num-layers 6 --hybrid-override-pattern *M-M*- --recompute-granularity selective "
        "--recompute-modules core_attn mlp --disable-bias-linear",
        "selective recompute, no attention in the first stage": "--num-layers 6 --hybrid-override-pattern M-M*-* "
        "--pipeline-model-parallel-size 2 --recompute-granularity selective --recompute-modules core_attn",
        "unfused, no attention in the first stage": "--num-layers 6 --hybrid-override-pattern M-M*-* --attention-backend unfused "
        "--pipeline-model-parallel-size 2",
        "rotary positions, a stage without attention": "--num-layers 6 --hybrid-override-pattern MM-*-M "
        "--pipeline-model-parallel-size 2 --position-embedding-type rope --no-rope-fusion",
        "ignored full recompute": f"{_SIX} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "deterministic, groups of many states": f"{_MAMBA} --micro-batch-size 1 --deterministic-mode --mamba-state-dim 256",
        "deterministic, one group": f"{_MAMBA} --deterministic-mode --mamba-num-groups 1 --mamba-num-heads 32 --mamba-head-dim 16",
        "deterministic, experts": f"{_MIXED} --deterministic-mode",
        "deterministic, separate kernels, one sample": f"{_MAMBA} --micro-batch-size 1 --deterministic-mode "
        "--disable-mamba-mem-eff-path",
        "userbuffers, tp2 sp": f"{_SIX} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        "userbuffers, experts, tp2 sp pp2": f"{_MIXED} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 "
        "--sequence-parallel --pipeline-model-parallel-size 2 --tp-comm-overlap",
        "half offloaded": f"{_SIX} {_OFFLOAD} --optimizer-offload-fraction 0.5",
        "offloaded, tp2": f"{_SIX} {_OFFLOAD} --tensor-model-parallel-size 2",
        "offloaded, experts": f"{_MIXED} {_OFFLOAD}",
        "megatron fsdp": f"{_SIX} {_FSDP} optim_grads_params",
        "megatron fsdp of gradients": f"{_SIX} {_FSDP} optim_grads",
        "megatron fsdp, untied, tp2 sp": f"{_SIX} {_FSDP} optim_grads_params --untie-embeddings-and-output-weights "
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "megatron fsdp, experts": f"{_MIXED} {_FSDP} optim_grads_params",
        "fsdp2": f"{_SIX} {_FSDP2}",
        "fsdp2, mamba only": f"{_MAMBA} {_FSDP2}",
        "fsdp2, experts": f"{_MIXED} {_FSDP2} --expert-model-parallel-size 1",
        "fsdp2, not resharded, tp2 sp": f"--num-layers 6 --hybrid-override-pattern M*-M*- {_FSDP2} --tensor-model-parallel-size 2 "
        "--sequence-parallel --torch-fsdp2-no-reshard-after-forward",
        "graphs": f"{_SIX} {_GRAPHS}",
        "graphs of mamba": f"{_SIX} {_GRAPHS} --cuda-graph-scope mamba",
        "graphs of mamba from the start": f"{_SIX} {_GRAPHS} --cuda-graph-scope mamba --cuda-graph-warmup-steps 0",
        "graphs of mamba and attention": f"{_SIX} {_GRAPHS} --cuda-graph-scope mamba attn",
        "graphs of mamba, attention and mlp from the start": f"{_SIX} {_GRAPHS} --cuda-graph-scope mamba attn mlp "
        "--cuda-graph-warmup-steps 0",
        "graphs of mamba, tp2 sp pp2": f"--num-layers 6 --hybrid-override-pattern *M-M-M {_GRAPHS} --cuda-graph-scope mamba "
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "graphs of mamba, attention and router": f"{_MIXED} --num-layers 6 --hybrid-override-pattern MEM*ME "
        f"{_GRAPHS} --cuda-graph-scope mamba attn moe_router",
        "graphs of attention, experts": f"{_MIXED} {_GRAPHS} --cuda-graph-scope attn",
        "local graphs of mamba": f"{_SIX} --cuda-graph-impl local --cuda-graph-scope mamba",
        "local graphs of mamba and attention, experts": f"{_MIXED} --expert-model-parallel-size 1 --cuda-graph-impl local "
        "--cuda-graph-scope mamba attn",
        "graph of full iterations": f"{_SIX} --cuda-graph-impl local --cuda-graph-scope full_iteration "
        "--no-check-for-nan-in-loss-and-grad --no-create-attention-mask-in-dataloader",
        "separate kernels, one sample": f"{_MAMBA} --micro-batch-size 1 --disable-mamba-mem-eff-path",
        "separate kernels": f"{_SIX} --disable-mamba-mem-eff-path",
        "separate kernels, cp2": f"{_SIX} --disable-mamba-mem-eff-path --context-parallel-size 2 --micro-batch-size 1",
        "adapters": f"{_SIX} --info-lora 16",
        "adapters of all projections, tp2 sp": f"{_SIX} --tensor-model-parallel-size 2 --sequence-parallel "
        "--info-lora 16:in_proj,out_proj,linear_qkv,linear_proj,linear_fc1,linear_fc2",
        "adapters, experts": f"--num-layers 6 --hybrid-override-pattern MMEM*E {_EXPERTS} --disable-bias-linear --info-lora 16",
        "adapters, latent experts": f"--num-layers 4 --hybrid-override-pattern MEM* {_EXPERTS} {_NEMOTRON} --moe-latent-size 256 "
        "--info-lora 16",
        "adapters, mtp": f"{_DEPTHS} {_NEMOTRON} --info-lora 16",
        "adapters, repeated mtp": f"{_REPEATED} {_EXPERTS} {_NEMOTRON} --info-lora 16",
        "interleaved stages": _STAGES,
        "mtp": f"{_DEPTHS} {_NEMOTRON}",
        "mtp, repeated": f"{_REPEATED} {_EXPERTS} {_NEMOTRON}",
        "mtp, repeated, fp8": f"{_REPEATED} {_EXPERTS} {_NEMOTRON} --fp8-format hybrid --fp8-recipe tensorwise",
        "mtp, repeated, mxfp8": f"{_REPEATED} {_EXPERTS} {_NEMOTRON} --fp8-format e4m3 --fp8-recipe mxfp8 --info-gpu B200",
        "gated delta nets": f"{_DELTA} MG-G*",
        "gated delta nets only, one sample": f"{_DELTA} GG --micro-batch-size 1",
        "gated delta nets, tp2 sp": f"{_DELTA} MGG-* --tensor-model-parallel-size 2 --sequence-parallel",
        "gated delta nets, experts, pp2": f"{_DELTA} MGEG*E {_EXPERTS} --expert-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2",
        "gated delta nets, mtp": f"{_DELTA} MG-*/G-/G- --position-embedding-type rope",
        "latent attention": f"{_LATENT} M+-+",
        "latent attention, low-rank queries, tp2 sp": f"{_LATENT} M+-+ --q-lora-rank 192 --tensor-model-parallel-size 2 "
        "--sequence-parallel --normalization RMSNorm",
        "latent attention, experts, mtp": f"{_LATENT} M+E/+-/+- {_EXPERTS} --qk-layernorm --position-embedding-type rope",
        "sparse attention": f"{_LATENT} MD-D {_INDEXER}",
        "sparse attention, experts, tp2 sp": f"{_LATENT} MDED {_INDEXER} {_EXPERTS} --expert-model-parallel-size 2 "
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "fp4": f"{_SIX} {_NEMOTRON} --fp4-format e2m1 --fp4-recipe nvfp4 --info-gpu B200",
        "fp4, experts": f"--num-layers 6 --hybrid-override-pattern MEM*ME {_EXPERTS} {_NEMOTRON} --fp4-format e2m1 "
        "--fp4-recipe nvfp4 --info-gpu B200",
        "muon": f"{_SIX} {_NEMOTRON} --optimizer muon --no-use-distributed-optimizer",
        "muon, experts": f"--num-layers 6 --hybrid-override-pattern MEM*ME {_EXPERTS} {_NEMOTRON} --optimizer muon "
        "--no-use-distributed-optimizer --muon-momentum 0.9",
        "full recompute": "--hybrid-layer-pattern MM-M*- --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "full recompute, experts": f"--hybrid-layer-pattern MEM*E {_EXPERTS} {_NEMOTRON} {_FULL} uniform --recompute-num-layers 1",
        "full recompute of blocks, experts, pp2": f"--hybrid-layer-pattern MEM*ME {_EXPERTS} {_NEMOTRON} {_FULL} block "
        "--recompute-num-layers 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
        "mtp, full recompute": f"{_DEPTHS} {_NEMOTRON} {_FULL} uniform --recompute-num-layers 1",
        "mtp, full recompute, experts, tp2 sp": f"--hybrid-layer-pattern MEM*/*E {_EXPERTS} {_NEMOTRON} {_FULL} uniform "
        "--recompute-num-layers 1 --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "mtp, full recompute, repeated": f"{_REPEATED} {_EXPERTS} {_NEMOTRON} {_FULL} uniform --recompute-num-layers 1",
        "mtp, full recompute of blocks": f"{_DEPTHS} {_NEMOTRON} {_FULL} block --recompute-num-layers 1",
    }.items()
}
HYBRID_SINCE: Final = {
    "hybrid, interleaved stages": "0.17",
    "hybrid, adapters, mtp": "0.17",
    "hybrid, adapters, repeated mtp": "0.17",
    "hybrid, mtp": "0.17",
    "hybrid, mtp, repeated": "0.17",
    "hybrid, mtp, repeated, fp8": "0.17",
    "hybrid, mtp, repeated, mxfp8": "0.17",
    "hybrid, fp4": "0.17",
    "hybrid, fp4, experts": "0.17",
    "hybrid, full recompute": "0.18",
    "hybrid, full recompute, experts": "0.18",
    "hybrid, full recompute of blocks, experts, pp2": "0.18",
    # the checkpoint around MTP layers fails in 0.18, and 0.17 recomputes nothing else: docs/accuracy.md has the differences
    "hybrid, mtp, full recompute": "0.19",
    "hybrid, mtp, full recompute, experts, tp2 sp": "0.19",
    "hybrid, mtp, full recompute, repeated": "0.19",
    "hybrid, mtp, full recompute of blocks": "0.17",
    "hybrid, gated delta nets": "0.17",
    "hybrid, gated delta nets only, one sample": "0.17",
    "hybrid, gated delta nets, tp2 sp": "0.17",
    "hybrid, gated delta nets, experts, pp2": "0.17",
    "hybrid, gated delta nets, mtp": "0.17",
    "hybrid, latent attention": "0.19",
    "hybrid, latent attention, low-rank queries, tp2 sp": "0.19",
    "hybrid, latent attention, experts, mtp": "0.19",
    "hybrid, sparse attention": "0.18",
    "hybrid, sparse attention, experts, tp2 sp": "0.18",
}
HYBRID_UNTIL: Final = {
    # the shadow engine lacks functions of PyTorch that these graphs use
    "hybrid, local graphs of mamba": "0.18",
    "hybrid, local graphs of mamba and attention, experts": "0.18",
    "hybrid, ignored full recompute": "0.18",
    "hybrid, muon": "0.17",
    "hybrid, muon, experts": "0.17",
    "hybrid, sparse attention": "0.19",
    "hybrid, sparse attention, experts, tp2 sp": "0.19",
}
