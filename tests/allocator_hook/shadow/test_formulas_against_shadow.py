"""The formulas compared with runs of the real megatron-core and Transformer Engine.

Each launch is run on meta tensors for one rank of each pipeline stage, and its trace is compared with the formulas. The tensors
that each module saves for backward must be equal, collectives must be equal in kind, group, size and number, and peaks must agree
within 0.1 %. GEMMs and attention kernels must be equal in shape, precision and number.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from allocator_hook.sources import MEGATRON, source_of
from analyzer.errors import InputError
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.trace.compare import MODEL
from tests.allocator_hook.shadow.absorbed_layouts import ABSORBED, SHARES_OF_PAIRS
from tests.allocator_hook.shadow.adapter_layouts import ADAPTERS, HELD_BY_GRAPH, adapter_fields
from tests.allocator_hook.shadow.branch_norm_layouts import BRANCH_NORMS, EXAONE, EXAONE_FIELDS, GEMMA, GEMMA_FIELDS
from tests.allocator_hook.shadow.conftest import Record
from tests.allocator_hook.shadow.creation_layouts import CREATION, CREATION_BASE
from tests.allocator_hook.shadow.distillation_layouts import BATCHED, DISTILLATIONS, KNOWN_OF_STUDENTS, STUDENTS
from tests.allocator_hook.shadow.encoder_layouts import BASES, ENCODERS
from tests.allocator_hook.shadow.found_layouts import FOUND
from tests.allocator_hook.shadow.fp8_part_layouts import FP8_ATTENTION, FP8_OUTPUT, FP8_WEIGHTS
from tests.allocator_hook.shadow.frozen_layouts import FROZEN, FROZEN_PARAMETERS, HELD_BY_LEAF
from tests.allocator_hook.shadow.head_layouts import HEAD_OUTPUTS, HEADS, TOKEN_SCORES, VALUE_HEADS
from tests.allocator_hook.shadow.hybrid_layouts import HYBRID, HYBRID_SINCE, HYBRID_UNTIL, SCRIPT
from tests.allocator_hook.shadow.log_probability_layouts import (
    BATCHED_LOG_PROBABILITIES,
    HYBRID_LOG_PROBABILITIES,
    LOG_PROBABILITIES,
    LOSS_SEQUENCES,
)
from tests.allocator_hook.shadow.share import share_of
from tests.allocator_hook.shadow.vision_layouts import MULTIMODAL, MULTIMODAL_BASE, VISION, VISION_BASE
from tests.data_files import data_file

pytestmark = [
    pytest.mark.shadow,
    pytest.mark.skipif(
        any(find_spec(package) is None for package in ("torch", "megatron", "transformer_engine")),
        reason="the shadow extra (torch, megatron-core, transformer-engine) is not installed",
    ),
]

SOURCE = source_of(MEGATRON)
RELEASE = Version((SOURCE and SOURCE.release) or "0")
"""The release that runs: that of a checkout on PYTHONPATH, or the installed one."""
TE = Version(version("transformer-engine")) if find_spec("transformer_engine") else Version("0")
LAYERS = data_file("different_layers.json")
BASE = (
    "--nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 16 --train-iters 10 --lr 1e-4 "
    "--tokenizer-type NullTokenizer --vocab-size 9999 --info-gpu H100-80GB --use-distributed-optimizer "
)
SHARDED = "--use-distributed-optimizer "
"""Muon of these releases refuses it."""
LLAMA = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
    "--num-query-groups 4 --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
)
FSDP = (
    "--use-megatron-fsdp --no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor --global-batch-size 32 "
    "--data-parallel-sharding-strategy"
)
FSDP2 = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist --global-batch-size 32 --vocab-size 500"
ON_HOST = "--global-batch-size 64 --min-offloaded-tensor-size 1024 --fine-grained-activation-offloading --offload-modules"
OFFLOAD = "--optimizer-cpu-offload --use-precision-aware-optimizer"
MOE_FP8 = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall "
    "--micro-batch-size 1 --seq-length {tokens} --max-position-embeddings {tokens} "
)
"""Every expert gets a quarter of the tokens. FP8 pads to a multiple of 16 or 32, FP4 to 64; the formulas count half of it."""
STORED_MXFP8 = "--info-gpu B200 --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag"
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
MOE = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 "
    "--overlap-grad-reduce --overlap-param-gather "
)
MOE_UNSHARDED = MOE.removesuffix("--overlap-grad-reduce --overlap-param-gather ")
FLEX = "--num-experts 8 --moe-router-topk 4 --moe-grouped-gemm --moe-token-dispatcher-type flex --moe-router-dtype fp32"
OVERLAPPED_SHARED = "--moe-shared-expert-intermediate-size 512 --moe-shared-expert-overlap"
GRAPHS = "--cuda-graph-impl transformer_engine"
FROM_START = "--cuda-graph-warmup-steps 0"
FULL_ITERATION = "--cuda-graph-impl local --cuda-graph-scope full_iteration --no-check-for-nan-in-loss-and-grad"
SINKHORN = (
    "--num-experts 8 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn --expert-model-parallel-size 2 "
    "--disable-bias-linear "
)
GATHERED = "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 8"
SHARED = f"{LLAMA} {MOE} --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate"
QWEN = (
    f"{LLAMA} {MOE} --qk-layernorm --kv-channels 64 --moe-ffn-hidden-size 256 --moe-router-dtype fp32 --moe-permute-fusion "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3 "
)
GPT_OSS = (
    f"{MOE} --position-embedding-type rope --normalization RMSNorm --quick-geglu --glu-linear-offset 1.0 "
    "--activation-func-clamp-value 7.0 --add-qkv-bias --no-bias-dropout-fusion --group-query-attention --num-query-groups 4 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --softmax-type learnable --window-size 128,0 "
    "--window-attn-skip-freq 2 --moe-ffn-hidden-size 512 --moe-aux-loss-coeff 1e-2 "
)
DEEPSEEK = (
    f"{MOE} --position-embedding-type rope --no-rope-fusion --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --qk-layernorm --multi-latent-attention "
    "--q-lora-rank 192 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --moe-ffn-hidden-size 256 "
    "--moe-shared-expert-intermediate-size 256 --moe-layer-freq ([0]*1+[1]*3) --moe-router-score-function sigmoid "
    "--moe-router-pre-softmax --moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-permute-fusion "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --mtp-num-layers 1 "
)
SPARSE = (
    "--position-embedding-type rope --no-rope-fusion --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --qk-layernorm --multi-latent-attention "
    "--q-lora-rank 192 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 "
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 256 "
    "--dsa-indexer-loss-coeff 0.01 "
)
SPARSE_EXPERTS = (
    f"{SPARSE} --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-ffn-hidden-size 256 --moe-shared-expert-intermediate-size 256"
)
OVERLAPPED = "--overlap-moe-expert-parallel-comm --global-batch-size 64 --vocab-size 500"
"""A small vocabulary, so that the peak is in a layer."""
INTERLEAVED = "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
ALL_ON_HOST = f"{ON_HOST} attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act"
HETEROGENEOUS = (
    f"{LLAMA} --num-layers 8 --use-rotary-position-embeddings --use-rope-scaling --heterogeneous-layers-config-path {LAYERS} "
)
DELTA_NET = (
    f"{LLAMA} --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 64 --linear-value-head-dim 64 --vocab-size 500"
)
ALL_LINEAR = (
    f"{DELTA_NET} --linear-attention-freq [1,1,1,1] --linear-num-value-heads 16 --linear-value-head-dim 128 --ffn-hidden-size 512"
)
"""The peak is in linear attention."""
QWEN3_NEXT = (
    f"{DELTA_NET} {MOE} --moe-ffn-hidden-size 256 --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate "
    "--qk-layernorm --attention-output-gate --rotary-percent 0.25 --kv-channels 128 --apply-layernorm-1p"
)
GATED = "--vocab-size 500 --attention-output-gate"
GRID = {
    **FOUND,
    **HYBRID,
    **ENCODERS,
    **VISION,
    **MULTIMODAL,
    **ADAPTERS,
    **STUDENTS,
    **LOG_PROBABILITIES,
    **FROZEN,
    **HEADS,
    **BRANCH_NORMS,
    **GEMMA,
    **EXAONE,
    **CREATION,
    **ABSORBED,
    **FP8_ATTENTION,
    **FP8_OUTPUT,
    **FP8_WEIGHTS,
    "gpt": "--bf16",
    "gpt, tp2": "--bf16 --tensor-model-parallel-size 2",
    "gpt, tp2 sp": "--bf16 --tensor-model-parallel-size 2 --sequence-parallel --no-gradient-accumulation-fusion",
    "gpt, tp2 pp2": "--bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "gpt, pp4": "--bf16 --pipeline-model-parallel-size 4",
    "gpt, unfused attention": "--bf16 --attention-backend unfused",
    "gpt, flash attention": "--bf16 --attention-backend flash",
    "gpt, fp16": "--fp16 --tensor-model-parallel-size 2",
    "gpt, q/k norms": "--bf16 --qk-layernorm --tensor-model-parallel-size 2 --sequence-parallel",
    "gpt, full recompute": "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "gpt, selective recompute": "--bf16 --recompute-activations --tensor-model-parallel-size 2 --sequence-parallel",
    "llama": f"--bf16 {LLAMA}",
    "llama, tp2 sp pp2": f"--bf16 {LLAMA} --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    "llama, block recompute": f"--bf16 {LLAMA} --recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "gpt, interleaved pp4": "--bf16 --num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
    "gpt, half offloaded": f"--bf16 {OFFLOAD} --optimizer-offload-fraction 0.5 --manual-gc",
    "gpt, offloaded": f"--bf16 --tensor-model-parallel-size 2 {OFFLOAD} --grad-reduce-in-bf16 --manual-gc",
    "gpt, offload fraction 0": f"--bf16 {OFFLOAD} --optimizer-offload-fraction 0 --grad-reduce-in-bf16 --manual-gc",
    "heterogeneous layers": f"--bf16 {HETEROGENEOUS} --micro-batch-size 1",
    "heterogeneous layers, adapters": f"--bf16 {HETEROGENEOUS} --micro-batch-size 1 --info-lora 8",
    "heterogeneous layers, tp2": f"--bf16 {HETEROGENEOUS} --micro-batch-size 1 --tensor-model-parallel-size 2",
    "heterogeneous layers, recomputed": f"--bf16 {HETEROGENEOUS} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "llama, tp2, one sample": f"--bf16 {LLAMA} --micro-batch-size 1 --tensor-model-parallel-size 2",
    "llama, interleaved pp4": f"--bf16 {LLAMA} --num-layers 16 --pipeline-model-parallel-size 4 "
    "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 64",
    "gpt, unfused attention, two heads, dropout": "--bf16 --micro-batch-size 1 --tensor-model-parallel-size 4 "
    "--attention-backend unfused --pipeline-model-parallel-size 2",
    "llama, two mtp layers, tp2 sp": f"--bf16 {LLAMA} --mtp-num-layers 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "llama, mtp, cp2": f"--bf16 {LLAMA} --mtp-num-layers 1 --context-parallel-size 2",
    "llama, cp4": f"--bf16 {LLAMA} --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    "llama, recompute, tp2 sp pp2": f"--bf16 {LLAMA} {SPLIT} --recompute-granularity selective --recompute-modules mlp",
    "llama, deferred output layer, tp2 sp pp2": f"--bf16 {LLAMA} {SPLIT} --defer-embedding-wgrad-compute",
    "gpt, deferred output layer, limited, pp4": "--bf16 --pipeline-model-parallel-size 4 --global-batch-size 32 "
    "--defer-embedding-wgrad-compute --wgrad-deferral-limit 3",
    "llama, deferred output layer, interleaved": f"--bf16 {LLAMA} --num-layers 8 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 2 --defer-embedding-wgrad-compute",
    "llama, two mtp layers before the last stage": f"--bf16 {LLAMA} --mtp-num-layers 2 --tensor-model-parallel-size 2 "
    "--sequence-parallel --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettttmm|L",
    "mixtral, imbalanced, tp2 sp": f"--bf16 {LLAMA} {MOE} --tensor-model-parallel-size 2 --sequence-parallel "
    "--info-moe-imbalance 1.25",
    "deepep": f"--bf16 {LLAMA} {FLEX} --expert-model-parallel-size 4 --moe-enable-deepep --moe-permute-fusion",
    "deepep, fp8": f"--bf16 {LLAMA} {FLEX} --expert-model-parallel-size 4 --moe-enable-deepep --moe-permute-fusion "
    "--fp8-format hybrid --fp8-recipe tensorwise",
    "deepep, fp8 blockwise": f"--bf16 {LLAMA} {FLEX} --expert-model-parallel-size 4 --moe-enable-deepep --moe-permute-fusion "
    "--fp8-format e4m3 --fp8-recipe blockwise",
    "deepep, fp8, unfused permutation": f"--bf16 {LLAMA} {FLEX} --expert-model-parallel-size 4 --moe-enable-deepep "
    "--fp8-format hybrid --fp8-recipe tensorwise",
    "deepep, unfused permutation": f"--bf16 {LLAMA} {FLEX} --expert-model-parallel-size 4 --moe-enable-deepep",
    **{
        f"{backend}, overlapped shared experts{name}": f"--bf16 {LLAMA} {FLEX} --moe-ffn-hidden-size 512 {OVERLAPPED_SHARED} "
        f"--moe-flex-dispatcher-backend {backend} --expert-model-parallel-size 4 {line}"
        for backend in ("deepep", "hybridep")
        for name, line in {
            "": "--moe-permute-fusion",
            ", gate": "--moe-shared-expert-gate --vocab-size 120",
            ", tp2 sp": "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            ", fp8": "--fp8-format e4m3 --fp8-recipe blockwise --vocab-size 120",
            ", lora": "--info-lora 8 --vocab-size 120",
        }.items()
    },
    "hybridep, tp2 sp pp2": f"--bf16 {LLAMA} {FLEX} {SPLIT} --expert-model-parallel-size 2 --moe-flex-dispatcher-backend hybridep",
    "llama, userbuffers, tp2 sp pp2": f"--bf16 {LLAMA} {SPLIT} --tp-comm-overlap",
    "gpt, userbuffers, fp8, tp4 sp": "--bf16 --tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap "
    "--fp8-format e4m3 --fp8-recipe tensorwise",
    "gpt, muon": "--bf16 --optimizer muon",
    "llama, dist_muon": f"--bf16 {LLAMA} --optimizer dist_muon --muon-no-split-qkv --muon-use-nesterov",
    "gpt, dist_muon by matrices, overlapped": "--bf16 --optimizer dist_muon --info-megatron 0.18.2 --overlap-grad-reduce "
    "--overlap-param-gather --ddp-bucket-size 1000000",
    "llama, dist_muon by matrices, tp2 sp pp2": f"--bf16 {LLAMA} {SPLIT} --optimizer dist_muon --info-megatron 0.18.2",
    "mixtral, muon, tp2 sp": f"--bf16 {LLAMA} {MOE_UNSHARDED} --optimizer muon --muon-tp-mode distributed "
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "mixtral, etp2": f"--bf16 {LLAMA} {MOE} {SPLIT} --moe-aux-loss-coeff 1e-2",
    "sinkhorn, all-gather, tp2 sp": f"--bf16 {SINKHORN} --tensor-model-parallel-size 2 --sequence-parallel",
    "sinkhorn, all-gather, pp2 cp2": f"--bf16 {SINKHORN} --pipeline-model-parallel-size 2 --context-parallel-size 2",
    "sinkhorn, deterministic": f"--bf16 {SINKHORN} {SPLIT} --deterministic-mode",
    "all-gather, ep8, deterministic": f"--bf16 {LLAMA} {GATHERED} --deterministic-mode",
    "all-gather, fp32 router": f"--bf16 {LLAMA} {GATHERED} --moe-router-dtype fp32 --moe-permute-fusion",
    "mixtral, deterministic": f"--bf16 {LLAMA} {MOE} --moe-aux-loss-coeff 1e-2 --deterministic-mode",
    "mixtral, recomputed, pp2": f"--bf16 {LLAMA} {MOE} --moe-aux-loss-coeff 1e-2 --pipeline-model-parallel-size 2 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "mixtral, two layers per checkpoint, interleaved": f"--bf16 {LLAMA} {MOE} --num-layers 8 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "mixtral, plain gelu": f"--bf16 {LLAMA} {MOE}".replace("--swiglu ", "") + "--pipeline-model-parallel-size 2 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "mixtral, moe layers recomputed": f"--bf16 {LLAMA} {MOE} --recompute-granularity selective --recompute-modules moe layernorm",
    "mixtral, fp16, overlapped gathers": f"--fp16 {LLAMA} {MOE}",
    "shared experts, overlapped, tp2 sp": f"--bf16 {SHARED} --moe-shared-expert-overlap --tensor-model-parallel-size 2 "
    "--sequence-parallel",
    **{
        f"gradients of experts at the dispatch, {name}": f"--bf16 {LLAMA} {line} --overlap-dispatch-backward-with-experts-wgrad"
        for name, line in {
            "alltoall": f"{MOE} --moe-permute-fusion",
            "shared experts, tp2 sp": f"{MOE} --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate "
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            "etp2": f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2",
            "deepep": f"{FLEX} --expert-model-parallel-size 4 --moe-flex-dispatcher-backend deepep --moe-permute-fusion",
            "hybridep, pp2": f"{FLEX} --expert-model-parallel-size 4 --moe-flex-dispatcher-backend hybridep "
            "--pipeline-model-parallel-size 2",
            "hybridep, full recompute": f"{FLEX} --expert-model-parallel-size 4 --moe-flex-dispatcher-backend hybridep "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "recomputed activation": f"{MOE} --recompute-granularity selective --recompute-modules moe_act",
            "recomputed experts": f"{MOE} --recompute-granularity selective --recompute-modules moe",
            "fp8": f"{MOE} --fp8-format e4m3 --fp8-recipe blockwise --vocab-size 120",
        }.items()
    },
    "shared experts, z-loss": f"--bf16 {SHARED} --moe-z-loss-coeff 1e-3",
    "gpt, rope, unfused attention": "--bf16 --position-embedding-type rope --attention-backend unfused",
    "gpt, unfused attention, two heads": "--bf16 --micro-batch-size 1 --tensor-model-parallel-size 4 --attention-backend unfused "
    "--pipeline-model-parallel-size 2 --attention-dropout 0",
    "gpt, rope, unfused attention recomputed": "--bf16 --position-embedding-type rope --attention-backend unfused "
    "--recompute-activations",
    "gpt, interleaved, cp2": "--bf16 --num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
    "--context-parallel-size 2",
    "gpt, one query group per rank, pp2": "--bf16 --group-query-attention --num-query-groups 4 --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 2 --recompute-activations",
    "llama, one query group per rank": f"--bf16 {LLAMA} --tensor-model-parallel-size 4 --recompute-activations",
    "gpt, unfused swiglu, pp4": "--bf16 --swiglu --no-bias-swiglu-fusion --pipeline-model-parallel-size 4",
    "gpt, cp2, deterministic": "--bf16 --context-parallel-size 2 --pipeline-model-parallel-size 2 --deterministic-mode",
    "deepseek, attention recomputed": f"--bf16 {DEEPSEEK} --recompute-activations",
    "deepseek, unfused attention recomputed": f"--bf16 {DEEPSEEK} --attention-backend unfused --recompute-activations",
    "llama, flash attention, deterministic": f"--bf16 {LLAMA} --attention-backend flash --deterministic-mode",
    "llama, fused attention, deterministic": f"--bf16 {LLAMA} --attention-backend fused --deterministic-mode",
    "llama, fused attention, deterministic, a2a": f"--bf16 {LLAMA} --attention-backend fused --deterministic-mode "
    "--context-parallel-size 2 --cp-comm-type a2a",
    "llama, fused attention, deterministic, all-gather": f"--bf16 {LLAMA} --attention-backend fused --deterministic-mode "
    "--context-parallel-size 2 --cp-comm-type all_gather",
    "qwen3": f"--bf16 {QWEN} {SPLIT} --expert-tensor-parallel-size 1",
    "gpt-oss": f"--bf16 {GPT_OSS} --recompute-granularity selective --recompute-modules moe_act layernorm",
    "gpt-oss, yarn": f"--bf16 {GPT_OSS} --position-embedding-type yarn --moe-permute-fusion --info-megatron 0.19.0",
    "gpt-oss, split": f"--bf16 {GPT_OSS} {SPLIT} --expert-tensor-parallel-size 1",
    "deepseek, queries not compressed": f"--bf16 {DEEPSEEK}".replace("--q-lora-rank 192 ", ""),
    "deepseek, queries not compressed, fp8": f"--bf16 {DEEPSEEK} --fp8-format hybrid --fp8-recipe tensorwise".replace(
        "--q-lora-rank 192 ", ""
    ),
    "deepseek, gathers not overlapped": f"--bf16 {DEEPSEEK}".replace("--overlap-param-gather ", ""),
    "deepseek, split": f"--bf16 {DEEPSEEK} {SPLIT} --expert-tensor-parallel-size 1",
    "deepseek, recompute": f"--bf16 {DEEPSEEK} --recompute-granularity selective --recompute-modules mla_up_proj moe_act layernorm",
    "llama, interleaved": f"--bf16 {LLAMA} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "llama, graphs": f"--bf16 {LLAMA} {GRAPHS}",
    "llama, graphs, fp8": f"--bf16 {LLAMA} {GRAPHS} --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather "
    "--cuda-graph-warmup-steps 1",
    "llama, graphs from the start, tp2 sp pp2": f"--bf16 {LLAMA} {SPLIT} {GRAPHS} {FROM_START}",
    "llama, graphs, gradients not fused": f"--bf16 {LLAMA} {GRAPHS} {FROM_START} --no-gradient-accumulation-fusion",
    "llama, graphs of attention, interleaved": f"--bf16 {LLAMA} {GRAPHS} --cuda-graph-scope attn {FROM_START} --num-layers 8 "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    "gpt, graphs of mlp, small vocabulary": f"--bf16 {GRAPHS} --cuda-graph-scope mlp {FROM_START} --vocab-size 120",
    "gpt, graphs, small vocabulary": f"--bf16 {GRAPHS} --vocab-size 120",
    "llama, graphs of mlp": f"--bf16 {LLAMA} {GRAPHS} --cuda-graph-scope mlp {FROM_START}",
    "gated shared experts, graphs of attention and router": f"--bf16 {SHARED} {GRAPHS} --cuda-graph-scope attn moe_router",
    "mixtral, graphs of attention and router": f"--bf16 {LLAMA} {MOE} {GRAPHS} --cuda-graph-scope attn moe_router {FROM_START}",
    "hybridep, graphs of router": f"--bf16 {LLAMA} {FLEX} --moe-flex-dispatcher-backend hybridep --moe-permute-fusion "
    f"--expert-model-parallel-size 2 {GRAPHS} --cuda-graph-scope moe_router moe_preprocess",
    "llama, local graphs, tp2": f"--bf16 {LLAMA} --enable-cuda-graph --tensor-model-parallel-size 2",
    "gpt, local graphs": "--bf16 --cuda-graph-impl local",
    "llama, graph of an iteration": f"--bf16 {LLAMA} {FULL_ITERATION}",
    "llama, core attention on the host": f"--bf16 {LLAMA} {ON_HOST} core_attn",
    "llama, attention on the host, pp2": f"--bf16 {LLAMA} {ON_HOST} qkv_linear core_attn attn_proj "
    "--pipeline-model-parallel-size 2",
    "mixtral, experts on the host, interleaved": f"--bf16 {LLAMA} {MOE} {ON_HOST} core_attn attn_proj mlp_norm expert_fc1 moe_act "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "deepseek, attention on the host": f"--bf16 {DEEPSEEK} {ON_HOST} attn_norm qkv_linear core_attn attn_proj",
    "llama, two layers on the host": f"--bf16 {LLAMA} --cpu-offloading-num-layers 2 --vocab-size 120",
    "llama, megatron fsdp": f"--bf16 {LLAMA} {FSDP} optim_grads_params --vocab-size 500",
    "mixtral, megatron fsdp": f"--bf16 {LLAMA} {MOE} {FSDP} optim_grads_params",
    "llama, megatron fsdp of gradients": f"--bf16 {LLAMA} {FSDP} optim_grads",
    "gpt, megatron fsdp, tp2 sp": f"--bf16 {FSDP} optim_grads_params --tensor-model-parallel-size 2 --sequence-parallel",
    "mixtral, megatron fsdp, from the meta device": f"--bf16 {LLAMA} {MOE} {FSDP} optim_grads_params --init-model-with-meta-device",
    "llama, megatron fsdp of optimizer states": f"--bf16 {LLAMA} {FSDP} optim",
    "llama, fsdp2": f"--bf16 {LLAMA} {FSDP2}",
    "llama, fsdp2, not resharded, tp2 sp": f"--bf16 {LLAMA} {FSDP2} --torch-fsdp2-no-reshard-after-forward "
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "mixtral, overlapped microbatches": f"--bf16 {LLAMA} {MOE} --overlap-moe-expert-parallel-comm --global-batch-size 64",
    "shared experts, overlapped microbatches": f"--bf16 {SHARED} {OVERLAPPED}",
    "mixtral, overlapped microbatches, interleaved": f"--bf16 {LLAMA} {MOE} {OVERLAPPED} {INTERLEAVED}",
    "mixtral, overlapped microbatches, pp2, four chunks": f"--bf16 {LLAMA} {MOE} {OVERLAPPED} --num-layers 8 "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "shared experts, overlapped microbatches, tp2 sp, early release": f"--bf16 {SHARED} {OVERLAPPED} {INTERLEAVED} "
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 --ep-overlap-early-attn-memory-release",
    "mixtral, overlapped microbatches, mtp": f"--bf16 {LLAMA} {MOE} {OVERLAPPED} {INTERLEAVED} --mtp-num-layers 1 "
    "--vocab-size 9999",
    "mixtral, overlapped microbatches on the host": f"--bf16 {LLAMA} {MOE} {OVERLAPPED} {ALL_ON_HOST}",
    "mixtral, overlapped microbatches on the host, interleaved": f"--bf16 {LLAMA} {MOE} {OVERLAPPED} {INTERLEAVED} {ON_HOST} "
    "core_attn attn_proj mlp_norm expert_fc1 moe_act",
    "gpt, fp8 delayed, tp2": "--bf16 --fp8-format hybrid --fp8-amax-history-len 64 --tensor-model-parallel-size 2",
    "delta net": f"--bf16 {DELTA_NET}",
    "delta net in all layers": f"--bf16 {ALL_LINEAR}",
    "delta net in all layers, one sample": f"--bf16 {ALL_LINEAR} --micro-batch-size 1",
    "delta net in all layers, tp2 sp": f"--bf16 {ALL_LINEAR} --tensor-model-parallel-size 2 --sequence-parallel",
    "delta net in all layers, as many key heads": f"--bf16 {ALL_LINEAR} --linear-num-key-heads 16 --linear-key-head-dim 256",
    "delta net in all layers, recomputed": f"--bf16 {ALL_LINEAR} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "delta net in all layers, cp2": f"--bf16 {ALL_LINEAR} --context-parallel-size 2",
    "delta net in all layers, cp2, one sample": f"--bf16 {ALL_LINEAR} --context-parallel-size 2 --micro-batch-size 1",
    "delta net in all layers, tp2 sp cp2, recomputed": f"--bf16 {ALL_LINEAR} --tensor-model-parallel-size 2 --sequence-parallel "
    "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "delta net, cp4 pp2": f"--bf16 {DELTA_NET} --context-parallel-size 4 --pipeline-model-parallel-size 2",
    "qwen3-next, tp2 sp cp2": f"--bf16 {QWEN3_NEXT} {SPLIT} --expert-tensor-parallel-size 1 --context-parallel-size 2",
    "delta net, tp2": f"--bf16 {DELTA_NET} --tensor-model-parallel-size 2",
    "delta net, tp2 sp pp2": f"--bf16 {DELTA_NET} {SPLIT} --vocab-size 9999",
    "delta net, pp2 without full attention in the first stage": f"--bf16 {DELTA_NET} --pipeline-model-parallel-size 2",
    "delta net, pp2 without full attention in the first stage, attention recomputed": f"--bf16 {DELTA_NET} "
    "--pipeline-model-parallel-size 2 --recompute-activations",
    "delta net, interleaved": f"--bf16 {DELTA_NET} --num-layers 8 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 2",
    "delta net, muon": f"--bf16 {DELTA_NET} --optimizer muon",
    "delta net in all layers, dist_muon, tp2 sp": f"--bf16 {ALL_LINEAR} --tensor-model-parallel-size 2 --sequence-parallel "
    "--optimizer dist_muon",
    "delta net, odd sizes": f"--bf16 {DELTA_NET} --seq-length 1000 --linear-key-head-dim 128 --linear-value-head-dim 96",
    "delta net, recomputed modules": f"--bf16 {DELTA_NET} --recompute-granularity selective --recompute-modules core_attn mlp",
    "delta net, overlapped microbatches": f"--bf16 {QWEN3_NEXT} {OVERLAPPED}",
    "delta net, overlapped microbatches, tp2 sp": f"--bf16 {QWEN3_NEXT} {OVERLAPPED} --tensor-model-parallel-size 2 "
    "--sequence-parallel",
    "delta net, delayed weight gradients": f"--bf16 {QWEN3_NEXT} {OVERLAPPED} --delay-wgrad-compute",
    "delta net, delayed weight gradients, tp2 sp": f"--bf16 {QWEN3_NEXT} {OVERLAPPED} --delay-wgrad-compute "
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "delta net, delayed weight gradients, hybridep": f"--bf16 {QWEN3_NEXT} {OVERLAPPED} --delay-wgrad-compute "
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-router-dtype fp32",
    "delta net, delayed weight gradients, interleaved": f"--bf16 {QWEN3_NEXT} {OVERLAPPED} --delay-wgrad-compute --num-layers 8 "
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "delta net, delayed weight gradients, fp8": f"--bf16 {QWEN3_NEXT} {OVERLAPPED} --delay-wgrad-compute --fp8-format hybrid "
    "--fp8-recipe tensorwise --linear-num-value-heads 16",
    "delta net, graphs of attention": f"--bf16 {DELTA_NET} {GRAPHS} --cuda-graph-scope attn {FROM_START}",
    "delta net, graphs of attention, linear": f"--bf16 {ALL_LINEAR} {GRAPHS} --cuda-graph-scope attn",
    "delta net, graphs of layers": f"--bf16 {DELTA_NET} {GRAPHS}",
    "delta net, graphs of router": f"--bf16 {QWEN3_NEXT} {GRAPHS} --cuda-graph-scope moe_router {FROM_START} --vocab-size 9999",
    "delta net, graphs of attention and router, tp2 sp": f"--bf16 {QWEN3_NEXT} {GRAPHS} --cuda-graph-scope attn moe_router "
    "--tensor-model-parallel-size 2 --sequence-parallel --vocab-size 20000",
    "delta net, graphs of attention and router, hybridep": f"--bf16 {QWEN3_NEXT} {GRAPHS} --cuda-graph-scope attn moe_router "
    "moe_preprocess --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-router-dtype fp32 "
    "--vocab-size 9999",
    "delta net, graph of the iteration": f"--bf16 {DELTA_NET} {FULL_ITERATION} --vocab-size 9999",
    "delta net, recomputed norm, fp8 delayed": f"--bf16 {ALL_LINEAR} --recompute-granularity selective --recompute-modules "
    "gdn_norm_out --fp8-format hybrid --fp8-recipe delayed",
    "delta net, recomputed norm, cp2": f"--bf16 {ALL_LINEAR} --recompute-granularity selective --recompute-modules gdn_norm_out "
    "--context-parallel-size 2",
    "delta net, layer norms, biases, dropout": f"--bf16 {DELTA_NET} --normalization LayerNorm --hidden-dropout 0.1",
    "delta net, fp8 delayed": f"--bf16 {DELTA_NET} --fp8-format hybrid --fp8-param-gather",
    "delta net and latent attention": f"--bf16 {DEEPSEEK} --num-experts 8 --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 2 --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 64 "
    "--linear-value-head-dim 64 --vocab-size 500",
    "qwen3-next": f"--bf16 {QWEN3_NEXT}",
    "qwen3-next, mtp": f"--bf16 {QWEN3_NEXT} --mtp-num-layers 1 --vocab-size 9999",
    "qwen3-next, tp2 sp, recomputed, pp2": f"--bf16 {QWEN3_NEXT} {SPLIT} --expert-tensor-parallel-size 1 --num-layers 8 "
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    "sparse attention": f"--bf16 {SPARSE}",
    "sparse attention, rope": f"--bf16 {SPARSE} --rope-type rope --vocab-size 500",
    "sparse attention, one sample": f"--bf16 {SPARSE} --micro-batch-size 1",
    "sparse attention, tp2": f"--bf16 {SPARSE} --tensor-model-parallel-size 2",
    "sparse attention, tp4 sp": f"--bf16 {SPARSE} --tensor-model-parallel-size 4 --sequence-parallel",
    "sparse attention, tp2 sp pp2": f"--bf16 {SPARSE} {SPLIT} --vocab-size 500",
    "sparse attention, pp4": f"--bf16 {SPARSE} --pipeline-model-parallel-size 4 --vocab-size 500",
    "sparse attention, interleaved": f"--bf16 {SPARSE} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "sparse attention, no query compression": f"--bf16 {SPARSE.replace('--q-lora-rank 192 ', '')}",
    "sparse attention, no query compression, tp2 sp": f"--bf16 {SPARSE.replace('--q-lora-rank 192 ', '')} "
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "sparse attention, no norms of latents": f"--bf16 {SPARSE.replace('--qk-layernorm ', '')}",
    "sparse attention, sparse loss": f"--bf16 {SPARSE} --dsa-indexer-use-sparse-loss",
    "sparse attention, no loss, all keys": f"--bf16 {SPARSE} --dsa-indexer-loss-coeff 0 --dsa-indexer-topk 4096",
    "sparse attention, many index heads": f"--bf16 {SPARSE} --dsa-indexer-n-heads 16 --vocab-size 500",
    "sparse attention, few heads": f"--bf16 {SPARSE} --num-attention-heads 2 --dsa-indexer-n-heads 1 --vocab-size 500",
    "sparse attention, short": f"--bf16 {SPARSE} --seq-length 128 --dsa-indexer-topk 64 --vocab-size 500",
    "sparse attention, experts": f"--bf16 {SPARSE_EXPERTS} --expert-model-parallel-size 2",
    "sparse attention, experts, tp2 sp": f"--bf16 {SPARSE_EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-tensor-parallel-size 1",
    "sparse attention, recomputed mlp": f"--bf16 {SPARSE} --recompute-granularity selective --recompute-modules mlp",
    "sparse attention, recomputed": f"--bf16 {SPARSE} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "sparse attention, layer norms, dropout": f"--bf16 {SPARSE} --normalization LayerNorm --hidden-dropout 0.1",
    "llama, output gate": f"--bf16 {LLAMA} {GATED}",
    "llama, output gate, tp2 sp pp2, flash attention": f"--bf16 {LLAMA} {GATED} {SPLIT} --attention-backend flash",
    "llama, output gate, unfused attention": f"--bf16 {LLAMA} {GATED} --attention-backend unfused",
    "llama, output gate, cp2": f"--bf16 {LLAMA} {GATED} --context-parallel-size 2",
    "llama, output gate, recomputed": f"--bf16 {LLAMA} {GATED} --attention-backend flash --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "gpt, output gate": f"--bf16 {GATED} --swiglu",
    "gpt, output gate, attention recomputed": f"--bf16 {GATED} --recompute-activations",
    "gpt, output gate, unfused attention recomputed": f"--bf16 {GATED} --attention-backend unfused --recompute-activations",
    "llama, fp8 delayed, interleaved": (
        f"--bf16 {LLAMA} --fp8-format hybrid --fp8-param-gather --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1"
    ),
    "llama, fp8 delayed, recomputed": (
        f"--bf16 {LLAMA} --fp8-format hybrid --recompute-granularity full --recompute-method block --recompute-num-layers 2"
    ),
    "llama, recomputed, tp2 sp": (
        f"--bf16 {LLAMA} --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1"
    ),
    "llama, recomputed, pp2": (
        f"--bf16 {LLAMA} --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    ),
    "llama, one of two layers recomputed, pp2": (
        f"--bf16 {LLAMA} --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1"
    ),
    "llama, fp8 tensorwise, tp2 sp": (
        f"--bf16 {LLAMA} --fp8-format e4m3 --fp8-recipe tensorwise --tensor-model-parallel-size 2 --sequence-parallel"
    ),
    "llama, fp8 tensorwise, first and last layers in bf16, b200": (
        f"--bf16 {LLAMA} --info-gpu B200 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --first-last-layers-bf16"
    ),
    "llama, fp8 blockwise": f"--bf16 {LLAMA} --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather",
    "llama, fp8 blockwise, tp2 sp": (
        f"--bf16 {LLAMA} --fp8-format e4m3 --fp8-recipe blockwise --tensor-model-parallel-size 2 --sequence-parallel"
    ),
    "llama, mxfp8": f"--bf16 {LLAMA} {STORED_MXFP8} --fp8-format e4m3 --overlap-grad-reduce --overlap-param-gather",
    "llama, mxfp8, tp2 sp": (
        f"--bf16 {LLAMA} --info-gpu B200 --fp8-format e4m3 --fp8-recipe mxfp8 --tensor-model-parallel-size 2 --sequence-parallel"
    ),
    "moe, fp8 tensorwise": f"--bf16 {LLAMA} {MOE_FP8.format(tokens=544)} --fp8-format hybrid --fp8-recipe tensorwise",
    "moe, fp8 blockwise, ep2": (
        f"--bf16 {LLAMA} {MOE_FP8.format(tokens=544)} --fp8-format e4m3 --fp8-recipe blockwise --expert-model-parallel-size 2 "
        "--moe-router-padding-for-quantization"
    ),
    "llama, fp4": f"--bf16 {LLAMA} --info-gpu B200 --fp4-format e2m1",
    "llama, fp4 stored": f"--bf16 {LLAMA} --info-gpu B200 --fp4-format e2m1 --fp4-param-gather --vocab-size 500",
    "llama, fp4 stored, tp2 sp pp2": f"--bf16 {LLAMA} {SPLIT} --info-gpu B200 --fp4-format e2m1 --fp4-param-gather "
    "--overlap-grad-reduce --overlap-param-gather",
    "llama, fp4 stored, first and last layers in bf16": f"--bf16 {LLAMA} --info-gpu B200 --fp4-format e2m1 --fp4-param-gather "
    "--first-last-layers-bf16 --grad-reduce-in-bf16",
    "moe, fp4 stored, ep2": f"--bf16 {LLAMA} {MOE_FP8.format(tokens=640)} --info-gpu B200 --fp4-format e2m1 --fp4-param-gather "
    "--expert-model-parallel-size 2",
    "llama, fp4, tp2 sp pp2": f"--bf16 {LLAMA} {SPLIT} --info-gpu B200 --fp4-format e2m1",
    "gpt, fp4, first and last layers in bf16": "--bf16 --info-gpu B200 --fp4-format e2m1 --first-last-layers-bf16",
    "moe, fp4": f"--bf16 {LLAMA} {MOE_FP8.format(tokens=640)} --info-gpu B200 --info-te 2.11 --fp4-format e2m1",
    "moe, mxfp8": f"--bf16 {LLAMA} {MOE_FP8.format(tokens=576)} --info-gpu B200 --fp8-format e4m3 --fp8-recipe mxfp8",
}
SCALARS = 16384
"""Bytes. Smaller tensors are not compared: sums and counters of the loss, and token ids, which the formulas do not list."""
KNOWN: dict[str, tuple[int, str]] = {
    "llama, fp8 delayed, recomputed": (
        4 * 2**20,
        "checkpointed LayerNormLinear weights have no columnwise copy before their first recomputation",
    ),
    "lora, overlapped shared experts": (
        32 * 2**20,
        "one cuBLAS workspace of a gate is allocated before the peak, and by the formulas after it",
    ),
    **KNOWN_OF_STUDENTS,
}
"""Maximum difference of the peak of the first iteration in bytes, and its cause."""
HELD_BY_PLAN = [name for name in FOUND if name.startswith("overlapped microbatches")]
"""Layouts whose first layer does not keep its input after its backward. The schedule plan references the output of the embedding
until it is freed itself, between two microbatches, so that the trace does not list this output as saved."""
SINCE = dict.fromkeys(
    [
        *FOUND,
        *HYBRID,
        *ENCODERS,
        *VISION,
        *MULTIMODAL,
        *ADAPTERS,
        *FROZEN,
        *HEADS,
        *STUDENTS,
        *LOG_PROBABILITIES,
        *BRANCH_NORMS,
        *GEMMA,
        *EXAONE,
        *CREATION,
    ],
    "0.16",
) | {
    # the stand-ins for the streams of offloading, Megatron-FSDP and overlapped microbatches use names of 0.16
    "llama, core attention on the host": "0.16",
    **dict.fromkeys([*FP8_ATTENTION, *FP8_OUTPUT], "0.18"),  # the recipe of mxfp8 has no attention before
    "llama, attention on the host, pp2": "0.16",
    "mixtral, experts on the host, interleaved": "0.16",
    **{name: "0.16" for name in GRID if "megatron fsdp" in name},
    "mixtral, overlapped microbatches": "0.16",
    "shared experts, overlapped microbatches": "0.16",
    "mixtral, overlapped microbatches, interleaved": "0.16",
    "mixtral, overlapped microbatches, pp2, four chunks": "0.16",
    "shared experts, overlapped microbatches, tp2 sp, early release": "0.16",
    "mixtral, overlapped microbatches, mtp": "0.16",
    "heterogeneous layers, adapters": "0.16",
    "mixtral, overlapped microbatches on the host": "0.16",
    "mixtral, overlapped microbatches on the host, interleaved": "0.16",
    # earlier releases dropped the columnwise data of stored weights after each step and created it again in the next
    "llama, fp8 blockwise": "0.16",
    # earlier releases saved other router scores and referenced other tensors between iterations: 1 to 2 MiB in these models
    "qwen3": "0.16",
    "gpt-oss, yarn": "0.16",
    **{name: "0.16" for name in GRID if name.startswith("deepseek")},
    # earlier releases have no --moe-shared-expert-gate
    "shared experts, overlapped, tp2 sp": "0.16",
    "shared experts, z-loss": "0.16",
    # earlier releases summed the rows of experts without an index, and added no offset to the linear half of a gated activation
    "sinkhorn, deterministic": "0.15",
    "all-gather, ep8, deterministic": "0.15",
    "mixtral, deterministic": "0.15",
    "gpt, unfused swiglu, pp4": "0.15",
    # earlier releases copied query, key and value inside the checkpoint: 16 MiB at the peak of the first iteration
    "gpt, rope, unfused attention recomputed": "0.14",
    # earlier releases made the tensors of MTP layers in other modules
    "llama, two mtp layers, tp2 sp": "0.14",
    "llama, mtp, cp2": "0.14",
    # earlier releases have no --softmax-type
    "gpt-oss": "0.15",
    "gpt-oss, split": "0.15",
    # earlier releases have no MTP layers before the last stage
    "llama, two mtp layers before the last stage": "0.16",
    # the formulas describe the flex dispatcher of this release
    "deepep": "0.16",
    "deepep, unfused permutation": "0.16",
    "hybridep, tp2 sp pp2": "0.16",
    **{name: "0.18" for name in GRID if name.startswith("gradients of experts")},
    # the first release that overlaps shared experts with this dispatcher
    **{name: "0.18" for name in GRID if name.startswith(("deepep, overlapped", "hybridep, overlapped"))},
    # the stand-ins for CUDA graphs use names of 0.16
    **dict.fromkeys((name for name in GRID if "graph" in name), "0.16"),
    # earlier releases pad the rows of experts in FP4 to another multiple, or have no FP4
    **dict.fromkeys((name for name in GRID if "fp4" in name), "0.16"),
    # the first release with linear attention and output gates
    **dict.fromkeys((name for name in GRID if name.startswith(("delta net", "qwen3-next")) or "output gate" in name), "0.16"),
    # the first release that exchanges tokens of linear attention for heads
    **dict.fromkeys(
        (name for name in GRID if name.startswith(("delta net", "qwen3-next")) and "--context-parallel-size" in GRID[name]), "0.19"
    ),
    **dict.fromkeys((name for name in GRID if name.startswith("delta net, recomputed norm")), "0.19"),
    # the first release that multiplies queries by the weights of the keys
    **dict.fromkeys(ABSORBED, "0.19"),
    # the first release that builds layers with sparse attention
    **dict.fromkeys((name for name in GRID if name.startswith("sparse attention")), "0.18"),
    # the first release with buffers of weights in FP4
    **dict.fromkeys((name for name in GRID if "fp4 stored" in name), "0.18"),
    # the first release with Muon
    "gpt, muon": "0.16",
    "llama, dist_muon": "0.16",
    "mixtral, muon, tp2 sp": "0.16",
    **dict.fromkeys(FP8_WEIGHTS, "0.16"),
    # the first release with buffers of Muon that are laid out by matrices
    "gpt, dist_muon by matrices, overlapped": "0.18",
    "llama, dist_muon by matrices, tp2 sp pp2": "0.18",
    **HYBRID_SINCE,
    # gated delta nets have weight gradients of their own
    **{name: "0.18" for name in GRID if name.startswith(("delta net, overlapped", "delta net, delayed"))},
}
"""The oldest release that the formulas describe, if older releases differ."""

UNTIL = {
    **HYBRID_UNTIL,
    # random layouts that were found with 0.16: not compared with later releases
    **dict.fromkeys(FOUND, "0.17"),
    # the shadow engine lacks functions of PyTorch that these graphs use, and 0.18 keeps more tensors
    "llama, local graphs, tp2": "0.18",
    "gpt, local graphs": "0.18",
    # later releases have other kernels
    **dict.fromkeys((name for name in GRID if name.startswith("sparse attention")), "0.19"),
    # --muon-use-nesterov has another name
    "llama, dist_muon": "0.18",
    # megatron-core stops: "Chunk mismatch" in ChunkOffloadHandler
    "mixtral, experts on the host, interleaved": "0.19",
    # the input of the checkpoint is freed: 3 % of what is kept after a step
    "mixtral, moe layers recomputed": "0.20",
}
"""The first release that the formulas do not describe, if later ones differ."""

UNTIL_TE = {
    # later releases keep one more tensor of the ring inside all-to-all groups
    "llama, cp4": "2.12",
    # later releases pad the rows of experts in FP4 to 128
    "moe, fp4": "2.12",
    # with later releases matrices of experts are not orthogonalized over expert-tensor-parallel ranks
    "mixtral, muon, tp2 sp": "2.12",
    # the peak of the first iteration is 0.5 MiB lower with later releases
    "llama, two layers on the host": "2.12",
    # FusedAdam of later releases needs functions that the recorded shards of parameters do not have
    **{name: "2.12" for name in [*FOUND, *HYBRID] if "fsdp" in name},
    "llama, megatron fsdp": "2.12",
    "mixtral, megatron fsdp": "2.12",
    "llama, megatron fsdp of gradients": "2.12",
    "llama, megatron fsdp of optimizer states": "2.12",
    "llama, fsdp2": "2.12",
    "llama, fsdp2, not resharded, tp2 sp": "2.12",
}
"""The first Transformer Engine that the formulas do not describe, if later ones differ."""

SINCE_TE = {
    # the shadow engine has no FP8 kernels of Transformer Engine 1, and FusedAdam has no states for recorded shards
    **dict.fromkeys((name for name in GRID if {"--fp8-format", "--use-torch-fsdp2"} & set(GRID[name].split())), "2"),
    # no all-to-all groups in rings before 1.12; another set of buffers and of partial gradients in rings
    **dict.fromkeys(("llama, cp4", "gpt, interleaved, cp2", "gpt, cp2, deterministic"), "2"),
    "llama, userbuffers, tp2 sp pp2": "2",
    # the first release that casts master weights to weights in FP4
    **dict.fromkeys((name for name in GRID if "fp4 stored" in name), "2.14"),
    # the first release with attention in MXFP8
    **dict.fromkeys(FP8_ATTENTION, "2.15"),
}
"""The first Transformer Engine that the shadow engine or the formulas describe, if earlier ones differ."""


def own_release() -> tuple[str, ...]:
    """The options with which the formulas describe the release that runs.

    0.14 to 0.16 are compared with the formulas for the default release, as far as they are equal (`SINCE`). A release that is newer
    than the catalogue has the options of its own parser.
    """
    if Version("0.14") <= RELEASE < Version("0.17"):
        return ()
    minor = f"{RELEASE.major}.{RELEASE.minor}"
    known = any(release.startswith(f"{minor}.") for release in load_catalogue().releases)
    assert SOURCE is not None
    return ("--info-megatron", minor if known else str(SOURCE.folder.parents[1]))


def not_compared(name: str) -> str:
    """Why the formulas are not compared with the installed releases. Empty if they are."""
    if Version(SINCE.get(name, "0")) > RELEASE:
        return f"the formulas describe megatron-core {SINCE[name]} and later"
    if Version(UNTIL.get(name, "99")) <= RELEASE:
        return f"the formulas describe megatron-core before {UNTIL[name]}"
    if Version("0.12") > RELEASE and "--num-experts" in GRID[name].split():
        return "the formulas assume the memory of experts of megatron-core 0.12"
    if Version(SINCE_TE.get(name, "0")) > TE:
        return f"Transformer Engine {SINCE_TE[name]} and later are compared"
    if Version(UNTIL_TE.get(name, "99")) <= TE:
        return f"the formulas describe Transformer Engine before {UNTIL_TE[name]}"
    return ""


def words_of(name: str) -> list[str]:
    """The launch of a layout."""
    base = {**BASES, "vision": VISION_BASE, "multimodal": MULTIMODAL_BASE, "creation of buffers": CREATION_BASE}.get(
        name.partition(",")[0], BASE.removesuffix(SHARDED) if "--optimizer" in GRID[name].split() else BASE
    )
    if name in {*HYBRID, *HYBRID_LOG_PROBABILITIES}:
        base = base.replace("pretrain_gpt.py --num-layers 4", SCRIPT)
    words = (base + GRID[name]).split()
    return [word for word in words if word != SHARDED.strip() or "--use-torch-fsdp2" not in words]


@pytest.mark.parametrize("name", share_of([each for each in GRID if not not_compared(each)]))
def test_formulas_agree_with_a_run_of_megatron(name: str, record: Record, tmp_path: Path) -> None:
    from allocator_hook.shadow.engine import enough_microbatches
    from analyzer.cli.shadow_report import comparisons, recorded_ranks, recorded_report
    from analyzer.hardware.gpus import hardware
    from analyzer.launch.build import build
    from analyzer.launch.parse import parse
    from analyzer.memory.allocator.settings import AllocatorSettings
    from analyzer.predict import predict

    argv = [*words_of(name), "--info-te", str(TE), *own_release()]
    if name in FP8_WEIGHTS and Version("0.18") <= RELEASE:  # as Megatron-Bridge, which plans no buffers for the optimizer
        argv += ["--no-use-layer-wise-param-layout"]
    try:
        arguments, world, options = parse(argv, environ={}, folder=tmp_path)
        gpu, _ = hardware(options.gpu, None)
        job = build(arguments, world, environ={}, gpu=gpu, folder=tmp_path, moe_imbalance=options.moe_imbalance)
        if job.model.adapters is not None:
            adapters = replace(job.model.adapters, **adapter_fields(name))
            job = replace(job, model=replace(job.model, adapters=adapters))
        head, student = HEAD_OUTPUTS.get(name), DISTILLATIONS.get(name)
        model = replace(job.model, frozen_parameters=FROZEN_PARAMETERS.get(name), head_outputs=head, distillation=student)
        model = replace(model, log_probability_loss=name in LOG_PROBABILITIES, loss_sequences=LOSS_SEQUENCES.get(name, 0))
        model = replace(model, token_score=name in TOKEN_SCORES, branch_norms=name in BRANCH_NORMS, value_head=name in VALUE_HEADS)
        own = GEMMA_FIELDS if name in GEMMA else EXAONE_FIELDS if name in EXAONE else {}
        job = replace(job, model=replace(model, **own))
        if name in FP8_ATTENTION:
            assert job.precision.fp8 is not None
            job = replace(job, precision=replace(job.precision, fp8=replace(job.precision.fp8, attention=True)))
        if name in FP8_WEIGHTS:
            assert job.precision.fp8 is not None
            job = replace(job, precision=replace(job.precision, fp8=replace(job.precision.fp8, stored_parameters=True)))
        report = predict(job)
    except InputError as error:
        if Version("0.14") <= RELEASE < Version("0.17"):
            raise
        pytest.skip(f"megatron-core {RELEASE} refuses it: {error}")
    traces = record(job, recorded_ranks(report), tmp_path)
    shown = recorded_report(replace(report, engine="both"), traces, settings=AllocatorSettings.of({}))
    count = enough_microbatches(job)
    steps = predict(replace(job, batch=replace(job.batch, microbatches=count, first_microbatches=count)))
    compared = comparisons(steps, traces, tolerance=0.001)
    assert {each.rank.pipeline_rank for each in compared} == {each.pipeline_rank for each in report.ranks}
    for each in compared:
        for row in each.comparison.modules:
            if row.module == "embedding" and name in {*HELD_BY_PLAN, *HELD_BY_GRAPH, *HELD_BY_LEAF}:
                continue
            if row.module == MODEL and name in {*STUDENTS, *LOG_PROBABILITIES}:  # the loss function runs after the model
                continue
            assert not [tensor for tensor in row.only_predicted if tensor.bytes > SCALARS], row
            returned = name in HEADS and row.module == MODEL  # its output, which the loss function then frees
            assert returned or not [size for size in row.only_recorded if size > SCALARS], row
        assert each.comparison.collectives == ()
        assert each.comparison.kernels is not None
        if name not in SHARES_OF_PAIRS:
            assert name in {*BATCHED, *BATCHED_LOG_PROBABILITIES} or each.comparison.kernels.rows == ()
            assert each.comparison.kernels.error == 0
        for total in each.comparison.totals:
            known, _ = KNOWN.get(name, (0, "")) if total.name == "peak of the first iteration" else (0, "")
            assert abs(total.predicted - total.recorded) <= max(known, 0.001 * total.recorded), total
    for rank, line in zip(shown.ranks, shown.timelines, strict=True):
        allocated = [sum(point) for point in line.points]
        assert rank.memory.allocated_bytes < max(allocated) <= rank.memory.peak_allocated_bytes <= rank.memory.peak_reserved_bytes
