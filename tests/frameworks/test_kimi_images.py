"""Kimi K2.5 with images in containers of Megatron-Bridge. Source: models/kimi_vl of Megatron-Bridge, August 2026."""

from __future__ import annotations

import json
from typing import Any

import analyzer
from analyzer.modules.kinds import ModuleKind
from analyzer.passes.stages import stage_models
from analyzer.results import Report
from tests.data_files import data_file

LANGUAGE: int = json.loads(data_file("published_models.json").read_text(encoding="utf-8"))["parameters"]["moonshotai/Kimi-K2.5"]
WIDTH, FFN, PATCH = 1152, 4304, 14
LAYER = 4 * WIDTH + 4 * WIDTH * WIDTH + 4 * WIDTH + 2 * WIDTH * FFN + FFN + WIDTH
"""Two norms, queries, keys, values and outputs, and two layers of a FFN, all with biases."""
ENCODER = 3 * PATCH * PATCH * WIDTH + WIDTH + 64 * 64 * WIDTH + 27 * LAYER + 2 * WIDTH
MERGED = 4 * WIDTH
PROJECTION = 2 * WIDTH + MERGED * MERGED + MERGED + 7168 * MERGED + 7168
MODEL: dict[str, Any] = {
    "_target_": "megatron.bridge.models.kimi_vl.kimi_k25_vl_provider.KimiK25VLModelProvider", "num_layers": 61, "hidden_size": 7168,
    "ffn_hidden_size": 18432, "num_attention_heads": 64, "num_query_groups": 64, "vocab_size": 163840, "should_pad_vocab": False,
    "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, "qk_layernorm": True,
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False}, "share_embeddings_and_output_weights": False,
    "multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128, "position_embedding_type": "rope", "rope_type": "yarn", "apply_rope_fusion": False,
    "num_moe_experts": 384, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048,
    "moe_layer_freq": [0] + [1] * 60, "moe_grouped_gemm": True, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_token_dispatcher_type": "alltoall", "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 16,
    "pipeline_model_parallel_layout": "Et*4|(tttt|)*14tL", "expert_model_parallel_size": 32, "expert_tensor_parallel_size": 1,
    "seq_length": 4096, "vision_config": {"_target_": "KimiK25VisionConfig", "vt_hidden_size": WIDTH, "patch_size": PATCH},
    "freeze_language_model": False, "freeze_vision_model": False, "freeze_vision_projection": False,
    "media_placeholder_token_id": 163605, "hf_model_path": "moonshotai/Kimi-K2.5", "ignore_index": -100, "pad_token_id": 163839,
}  # fmt: skip


def report_of(**model: Any) -> Report:
    container = {
        "model": {**MODEL, **model},
        "train": {"micro_batch_size": 1, "global_batch_size": 64},
        "optimizer": {"optimizer": "adam", "use_distributed_optimizer": True, "bf16": True},
        "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
        "mixed_precision": {"bf16": True, "grad_reduce_in_fp32": True},
        "dataset": {"seq_length": 4096},
    }
    return analyzer.analyze_config(container, gpus=512, gpu="H100-80GB", environ={})


def test_each_rank_of_the_first_stage_has_the_encoder_and_the_projection() -> None:
    report = report_of()
    assert report.parameters == LANGUAGE + ENCODER + PROJECTION
    assert not report.unknown
    first, *others = [
        sum(each.numel for _, module in tree.walk() if module.kind is ModuleKind.VISION_WEIGHTS for each in module.parameters)
        for stage in stage_models(report.job)
        for tree in stage.trees
    ]
    assert first == ENCODER + PROJECTION
    assert not any(others)


def test_a_frozen_encoder_leaves_the_projection_trained() -> None:
    weights = report_of(freeze_vision_model=True).job.model.vision_weights
    assert sum(each.numel for each in weights if each.frozen) == ENCODER
