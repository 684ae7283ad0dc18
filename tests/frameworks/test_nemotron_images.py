"""Nemotron Nano VL and Nemotron 3 Omni in containers of Megatron-Bridge.

Source: models/nemotron_vl and models/nemotron_omni of Megatron-Bridge, August 2026.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import analyzer
from analyzer.errors import InputError
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Parameter
from analyzer.passes.stages import stage_models
from analyzer.results import Report
from tests.data_files import data_file

PUBLISHED = json.loads(data_file("published_models.json").read_text(encoding="utf-8"))
OMNI = "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16"
SECTIONS: dict[str, int] = PUBLISHED["vision"][OMNI]
MODEL: dict[str, Any] = {
    "_target_": "megatron.bridge.models.nemotron_omni.nemotron_omni_provider.NemotronOmniModelProvider", "num_layers": None,
    "hybrid_layer_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "hidden_size": 2688, "ffn_hidden_size": 1856,
    "num_attention_heads": 32, "num_query_groups": 2, "kv_channels": 128, "vocab_size": 131072, "should_pad_vocab": False,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128, "normalization": "RMSNorm",
    "gated_linear_unit": False, "activation_func": {"_target_": "megatron.core.activations.squared_relu", "_call_": False},
    "add_bias_linear": False, "position_embedding_type": "none", "share_embeddings_and_output_weights": False,
    "num_moe_experts": 128, "moe_router_topk": 6, "moe_ffn_hidden_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "moe_grouped_gemm": True, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_token_dispatcher_type": "alltoall", "hidden_dropout": 0.0, "attention_dropout": 0.0, "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1, "seq_length": 4096, "is_hybrid_model": True,
    "vision_model_type": "radio", "vision_proj_ffn_hidden_size": 20480, "vision_class_token_len": 10, "radio_force_eval_mode": True,
    "has_sound": True, "sound_model_type": "parakeet", "sound_hidden_size": 1024, "sound_projection_hidden_size": 4096,
    "sound_config": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "intermediate_size": 4096, "num_mel_bins": 128,
        "subsampling_factor": 8, "conv_kernel_size": 9,
    },
    "separate_video_embedder": True, "temporal_patch_dim": 2, "dynamic_resolution": True, "language_model_type": "nemotron6-moe",
    "freeze_language_model": False, "freeze_vision_model": False, "freeze_sound_encoder": False, "img_start_token_id": 21,
}  # fmt: skip


def report_of(**model: Any) -> Report:
    container = {
        "model": {**MODEL, **model},
        "train": {"micro_batch_size": 1, "global_batch_size": 8},
        "optimizer": {"optimizer": "adam", "use_distributed_optimizer": True, "bf16": True},
        "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
        "mixed_precision": {"bf16": True, "grad_reduce_in_fp32": True},
        "dataset": {"seq_length": 4096},
    }
    return analyzer.analyze_config(container, gpus=8, gpu="H200-141GB", environ={})


def held(report: Report) -> list[Parameter]:
    """The parameters of both parts on a rank."""
    modules = (module for tree in stage_models(report.job)[0].trees for _, module in tree.walk())
    return [each for module in modules if module.kind is ModuleKind.VISION_WEIGHTS for each in module.parameters]


def test_parameters_are_those_of_all_parts() -> None:
    report = report_of()
    assert report.parameters == PUBLISHED["parameters"][OMNI] + sum(SECTIONS.values())
    assert not report.unknown
    assert report.verdict.state is None
    assert "images and sounds of the data" in str(report.verdict.withheld)


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ({"has_sound": False, "sound_config": None}, SECTIONS["sound_model"] + SECTIONS["sound_projection"]),
        ({"separate_video_embedder": False}, 1280 * 3 * 16 * 16 * 2),
        ({"vision_class_token_len": 8}, 2 * 1280),
    ],
)
def test_parts_that_a_container_leaves_out(model: dict[str, Any], missing: int) -> None:
    assert report_of().parameters - report_of(**model).parameters == missing


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"sound_config": None}, "model.sound_config: None has no sizes of the encoder of sound"),
        ({"sound_model_type": "whisper"}, "model.sound_model_type: an encoder of the type 'whisper' is not modelled"),
        ({"vision_model_type": "siglip"}, "model.vision_model_type: an encoder of the type 'siglip' is not modelled"),
    ],
)
def test_other_encoders_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        report_of(**model)


def test_frozen_sections() -> None:
    """`NemotronOmniModel.freeze` has a setting for each section."""
    frozen = [each for each in held(report_of(freeze_sound_encoder=True, freeze_vision_projection=True)) if each.frozen]
    assert sum(each.numel for each in frozen) == SECTIONS["sound_model"] + SECTIONS["vision_projection"]


def test_tensor_parallel_ranks_share_radio_and_have_all_of_parakeet() -> None:
    """RADIO and the projections are modules of Megatron, and Parakeet is one of transformers."""
    parameters = held(report_of(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=4))
    sound = sum(each.numel for each in parameters if each.name.startswith("sound_model."))
    assert sound == SECTIONS["sound_model"]
    halves = {each.name: each.shape for each in parameters}
    assert halves["vision_model.decoder.layers.0.self_attention.linear_qkv.weight"] == (3 * 1280 // 2, 1280)
    assert halves["vision_projection.encoder.linear_fc2.weight"] == (2688, 20480 // 2)
    assert halves["vision_model.position_embeddings"] == (1, 128 * 128, 1280)
