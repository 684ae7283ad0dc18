"""The formulas of DeepSeek-V4 compared with runs of its layers, which only the branch dev of Megatron-LM has.

They run with a checkout of that branch on PYTHONPATH: `PYTHONPATH=FOLDER make test TESTS=...`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

from analyzer.specs import TrainingJob
from tests.allocator_hook.shadow.conftest import Record
from tests.allocator_hook.shadow.share import share_of

_MODULE: Final = "megatron.core.transformer.experimental_attention_variant.deepseek_v4_hybrid_attention"


def _runs() -> bool:
    """Whether the installed packages, or those on PYTHONPATH, have the layers."""
    if any(find_spec(package) is None for package in ("torch", "megatron", "transformer_engine")):
        return False
    folders = [Path(each) for each in getattr(find_spec("megatron"), "submodule_search_locations", None) or ()]
    return any((folder / "/".join(_MODULE.split(".")[1:])).with_suffix(".py").exists() for folder in folders)


pytestmark = [pytest.mark.shadow, pytest.mark.skipif(not _runs(), reason="megatron-core has no layers of DeepSeek-V4")]
MODEL: Final[dict[str, Any]] = {
    "model_type": "deepseek_v4", "vocab_size": 9999, "hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 160,
    "o_lora_rank": 96, "o_groups": 8, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "hidden_act": "silu", "swiglu_limit": 10.0, "max_position_embeddings": 1048576, "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0, "compress_ratios": [0, 4, 128, 4], "sliding_window": 128, "num_hash_layers": 0, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "index_head_dim": 128, "index_n_heads": 4, "index_topk": 64, "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
"""A small DeepSeek-V4 with a layer of each kind. The kernels need heads of 512 elements, and 64 of them."""
BASE: Final = (
    "--num-layers 4 --seq-length 1024 --info-world-size 8 --micro-batch-size 2 --global-batch-size 32 --vocab-size 9999 --bf16 "
    "--info-gpu H100-80GB --moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4"
)
_SHARDED: Final = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_MXFP8: Final = f"{_SHARDED} --info-gpu B200 --fp8-format e4m3 --fp8-recipe mxfp8"
_FULL: Final = f"{_SHARDED} --recompute-granularity full --recompute-method"
_MODULES: Final = f"{_SHARDED} --recompute-granularity selective --recompute-modules"
_TORCH: Final = {"kernels": False}
_KERNELS: Final = {"kernels": True}
_LOGGED: Final = {"kernels": True, "logged": True}
LAYOUTS: Final[dict[str, tuple[str, dict[str, bool]]]] = {
    "replicated": ("", _TORCH),
    "torch": (_SHARDED, _TORCH),
    "torch, loss of the indexer": (_SHARDED, {"logged": True}),
    "kernels": (_SHARDED, _KERNELS),
    "kernels, loss of the indexer": (_SHARDED, _LOGGED),
    "without hyper-connections": (_SHARDED, {"connected": False}),
    "stages": (f"{_SHARDED} --pipeline-model-parallel-size 2", _LOGGED),
    "interleaved stages": (f"{_SHARDED} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", _LOGGED),
    "recomputed stream": (f"{_MODULES} moe_act", {"recomputed": True}),
    "recomputed stream, stages": (f"{_MODULES} moe_act --pipeline-model-parallel-size 2", {"recomputed": True, "kernels": True}),
    "recomputed projections": (f"{_MODULES} mla_up_proj", _LOGGED),
    "full recompute": (f"{_FULL} uniform --recompute-num-layers 1", _TORCH),
    "full recompute, stages": (f"{_FULL} uniform --recompute-num-layers 1 --pipeline-model-parallel-size 2", _TORCH),
    "full recompute of two layers together": (f"{_FULL} uniform --recompute-num-layers 2", _KERNELS),
    "full recompute of two layers": (f"{_FULL} block --recompute-num-layers 2", _KERNELS),
    "mxfp8": (_MXFP8, _LOGGED),
    "mxfp8, stored": (f"{_MXFP8} --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag", _LOGGED),
    "fp8, delayed": (f"{_SHARDED} --fp8-format hybrid --fp8-recipe delayed", _TORCH),
    "fused": (f"{_SHARDED} --info-gpu B200", {"fused": True}),
    "fused, recomputed stream, stages": (
        f"{_MODULES} moe_act mla_up_proj --pipeline-model-parallel-size 2 --info-gpu B200",
        {"fused": True, "recomputed": True, "kernels": True, "logged": True},
    ),
    "fused, full recompute": (f"{_FULL} uniform --recompute-num-layers 1 --info-gpu B200", {"fused": True}),
    "fused, mxfp8": (_MXFP8, {"fused": True, "kernels": True}),
    "fused, without the compiler of cuda.tile": (_SHARDED, {"fused": True}),
    "muon": ("--optimizer muon", _TORCH),
    "sgd": ("--optimizer sgd", _TORCH),
    "small optimizer states": (f"{_SHARDED} --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", _TORCH),
    "experts chosen by a table": (_SHARDED, {"hashed": True}),
    "graph of the iteration": (
        f"{_SHARDED} --cuda-graph-impl full_iteration --cuda-graph-scope full_iteration --te-rng-tracker "
        "--no-check-for-nan-in-loss-and-grad",
        _TORCH,
    ),
    "multi-token prediction": (f"{_SHARDED} --mtp-num-layers 1", _TORCH),
    "multi-token prediction, stages": (
        f"{_MODULES} moe_act --mtp-num-layers 1 --pipeline-model-parallel-size 2",
        {"recomputed": True},
    ),
}
"""Options, and fields of the model that no option of Megatron-LM sets."""
OTHER_LOG: Final = frozenset(name for name in LAYOUTS if name.startswith(("multi-token", "experts chosen")))
"""The branch sums the losses of these layers for the log in other groups than core 0.19."""


def job_of(name: str, folder: Path) -> TrainingJob:
    """The job of a layout, whose model is written to `folder`."""
    from analyzer.hardware.gpus import hardware
    from analyzer.launch.build import build
    from analyzer.launch.parse import parse

    options, fields = LAYOUTS[name]
    predicted = int("--mtp-num-layers" in options)
    hashed = 2 if fields.get("hashed") else 0
    model = {
        **MODEL,
        "num_hash_layers": hashed,
        "num_nextn_predict_layers": predicted,
        "compress_ratios": [*MODEL["compress_ratios"], *[0] * predicted],
    }
    (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
    words = f"--info-model {folder} {BASE} {options} --info-te {version('transformer-engine')} --info-megatron 0.19.0"
    arguments, world, chosen = parse(words.split(), environ={}, folder=folder)
    gpu, _ = hardware(chosen.gpu, None)
    job = build(arguments, world, environ={}, gpu=gpu, folder=folder, moe_imbalance=chosen.moe_imbalance)
    attention, connections = job.model.compressed_attention, job.model.hyper_connections
    assert attention is not None
    assert connections is not None
    attention = replace(attention, kernels=fields.get("kernels", False), logged=fields.get("logged", False))
    connections = replace(connections, recomputed=fields.get("recomputed", False), fused=fields.get("fused", False))
    return replace(
        job,
        model=replace(
            job.model, compressed_attention=attention, hyper_connections=connections if fields.get("connected", True) else None
        ),
    )


@pytest.mark.parametrize("name", share_of(LAYOUTS))
def test_formulas_agree_with_the_branch_dev(name: str, record: Record, tmp_path: Path) -> None:
    """Peaks agree within 0.1 %, their parts within 0.3 %, and collectives are equal."""
    from allocator_hook.shadow.engine import enough_microbatches
    from analyzer.cli.shadow_report import comparisons, recorded_ranks
    from analyzer.predict import predict

    job = job_of(name, tmp_path)
    traces = record(job, recorded_ranks(predict(job)), tmp_path)
    count = enough_microbatches(job)
    steps = predict(replace(job, batch=replace(job.batch, microbatches=count, first_microbatches=count)))
    compared = comparisons(steps, traces, tolerance=0.001)
    assert {each.rank.pipeline_rank for each in compared} == {each.pipeline_rank for each in steps.ranks}
    for each in compared:
        assert each.comparison.collectives == () or name in OTHER_LOG
        for total in each.comparison.totals:
            assert total.predicted == pytest.approx(total.recorded, rel=0.001 if "peak" in total.name else 0.003), total
