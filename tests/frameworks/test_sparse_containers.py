"""Containers of Megatron-Bridge with the sparse attention of core 0.19: GLM-5.2, as `GLM5Bridge` and its recipes set it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import analyzer
from analyzer.errors import InputError
from analyzer.modules.kinds import ModuleKind
from analyzer.passes.stages import stage_models
from analyzer.results import Report

COUNTS = json.loads((Path(__file__).parents[1] / "data" / "published_models.json").read_text(encoding="utf-8"))["parameters"]
INDEXER = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32
LATENT = 6144 * 2048 + 2048 + 2048 * 64 * 256 + 6144 * 576 + 512 + 512 * 64 * 448 + 64 * 256 * 6144
EXPERTS = 257 * 3 * 6144 * 2048 + 256 * 6144
MTP = 2 * 6144 * 6144 + 3 * 6144 + LATENT + INDEXER + EXPERTS + 2 * 6144
"""A projection of two hidden states, three norms, and a layer with two norms."""
MODEL: dict[str, Any] = {
    "_target_": "megatron.bridge.models.mla_provider.MLAModelProvider", "num_layers": 78, "hidden_size": 6144,
    "ffn_hidden_size": 12288, "num_attention_heads": 64, "num_query_groups": 64, "vocab_size": 154880, "should_pad_vocab": True,
    "make_vocab_size_divisible_by": 1280, "max_position_embeddings": 1048576, "normalization": "RMSNorm",
    "gated_linear_unit": True, "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    "add_bias_linear": False, "share_embeddings_and_output_weights": False, "qk_layernorm": True, "multi_latent_attention": True,
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_head_dim": 192, "qk_pos_emb_head_dim": 64, "v_head_dim": 256,
    "position_embedding_type": "rope", "rope_type": "rope", "apply_rope_fusion": False, "num_moe_experts": 256,
    "moe_router_topk": 8, "moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048,
    "moe_layer_freq": [0] * 3 + [1] * 75, "moe_grouped_gemm": True, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_token_dispatcher_type": "alltoall", "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "cp_comm_type": "allgather", "experimental_attention_variant": "dsa",
    "dsa_indexer_head_dim": 128, "dsa_indexer_n_heads": 32, "dsa_indexer_topk": 2048, "dsa_indexer_topk_freq": 4,
    "dsa_indexer_skip_topk_offset": 3, "dsa_indexer_loss_coeff": 0.001, "dsa_indexer_use_sparse_loss": True,
    "dsa_kernel_backend": "cudnn", "mtp_num_layers": 1, "recompute_granularity": "full", "recompute_method": "uniform",
    "recompute_num_layers": 1, "pipeline_model_parallel_size": 6, "num_layers_in_first_pipeline_stage": 14,
    "num_layers_in_last_pipeline_stage": 16, "context_parallel_size": 4, "expert_model_parallel_size": 32, "seq_length": 8192,
}  # fmt: skip


def container(**model: Any) -> dict[str, Any]:
    """The container with other fields of its model, for packed samples."""
    return {
        "model": {**MODEL, **model},
        "train": {"micro_batch_size": 1, "global_batch_size": 8},
        "optimizer": {"optimizer": "adam", "use_distributed_optimizer": True, "bf16": True},
        "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
        "mixed_precision": {"bf16": True, "grad_reduce_in_fp32": True},
        "dataset": {"offline_packing_specs": {"packed_sequence_size": 8192}},
    }


def report_of(**model: Any) -> Report:
    return analyzer.analyze_config(container(**model), gpus=192, gpu="H200-141GB", environ={})


def test_parameters_and_layout() -> None:
    """The model class of transformers has no MTP layer. That of Megatron-LM has an indexer."""
    report = report_of()
    assert report.parameters == COUNTS["zai-org/GLM-5.2"] + MTP
    assert report_of(mtp_num_layers=None).parameters == COUNTS["zai-org/GLM-5.2"]
    assert (report.job.parallel.context, report.job.megatron) == (4, "0.19.0")
    assert not report.unknown


def test_memory_is_counted() -> None:
    """Queries of 64 heads have 512 + 64 elements. The backward of FlashMLA's attention has two copies of them and a gradient."""
    report = report_of()
    tokens = 8192 // 4
    query = tokens * 64 * 576 * 2
    assert report.verdict.state is not None
    assert report.job.model.sparse_attention is not None
    (in_backward,) = {
        sum(tensor.bytes for tensor in module.backward_workspace if tensor.name.startswith("query"))
        for stage in stage_models(report.job)
        for tree in stage.trees
        for _, module in tree.walk()
        if module.kind is ModuleKind.CHOSEN_ATTENTION
    }
    assert in_backward == pytest.approx(3 * query, rel=0.002)


def test_kernels_of_tilelang_have_no_verdict() -> None:
    said = report_of(dsa_kernel_backend="tilelang").verdict.withheld
    assert "the memory and the time of DSAttention of Megatron-LM are counted as those of dense multi-latent attention" in said


def test_an_invalid_split_is_refused() -> None:
    with pytest.raises(InputError, match="a stage begins with layer 14, which uses the keys that layer 11 of another stage chose"):
        report_of(num_layers_in_first_pipeline_stage=None, num_layers_in_last_pipeline_stage=None)
