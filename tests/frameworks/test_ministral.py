"""Ministral 3 in containers of Megatron-Bridge. Source: models/ministral3/ of Megatron-Bridge, August 2026."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import analyzer
from analyzer.passes.stages import full_model, stage_models
from analyzer.predict.parameter_counts import parameter_counts
from tests.frameworks.files import job, write

WORLD = ("--info-world-size", "8", "--info-gpu", "H100-80GB")
MODEL: dict[str, Any] = {
    "_target_": "megatron.bridge.models.ministral3.ministral3_provider.Ministral3ModelProvider", "num_layers": 26,
    "hidden_size": 3072, "ffn_hidden_size": 9216, "num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128,
    "vocab_size": 131072, "share_embeddings_and_output_weights": True, "normalization": "RMSNorm", "gated_linear_unit": True,
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False}, "add_bias_linear": False,
    "position_embedding_type": "yarn", "hidden_dropout": 0.0, "attention_dropout": 0.0, "seq_length": 4096,
    "image_token_id": 10, "hf_config": {
        "_target_": "transformers.models.mistral3.configuration_mistral3.Mistral3Config", "spatial_merge_size": 2,
        "multimodal_projector_bias": False, "vision_feature_layer": -1,
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16, "head_dim": 64, "patch_size": 14, "num_channels": 3, "image_size": 1540,
        },
    },
}  # fmt: skip
"""The fields of Ministral 3 3B."""
CONTAINER: dict[str, Any] = {
    "model": MODEL,
    "optimizer": {"optimizer": "adam", "use_distributed_optimizer": True},
    "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
    "train": {"micro_batch_size": 1, "global_batch_size": 8},
    "mixed_precision": "bf16_mixed",
}
ALL, VISION, PROJECTION = 3_849_090_048, 420_083_712, 16_778_240
"""Parameters of Mistral3ForConditionalGeneration of transformers 5.12.1, built with these fields."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {"config.yaml": yaml.safe_dump(CONTAINER)})
    return tmp_path


def test_parameters_are_those_of_the_class_of_transformers(folder: Path) -> None:
    found = job(folder, "config.yaml", *WORLD)
    assert parameter_counts(found.model, full_model(found)).total == ALL
    assert sum(each.numel for each in found.model.vision_weights) == VISION


def test_each_tensor_parallel_rank_has_the_modules_of_transformers(folder: Path) -> None:
    found = job(folder, "config.yaml", "model.tensor_model_parallel_size=2", *WORLD)
    held = [module for path, module in stage_models(found)[0].trees[0].walk() if "vision" in path]
    assert sum(each.numel for module in held for each in module.parameters) == VISION


@pytest.mark.parametrize(("part", "trained"), [("vision_model", PROJECTION), ("vision_projection", VISION - PROJECTION)])
def test_freezing_is_read(folder: Path, part: str, trained: int) -> None:
    found = job(folder, "config.yaml", f"model.freeze_{part}=true", *WORLD)
    assert sum(each.numel for each in found.model.vision_weights if not each.frozen) == trained


def test_it_fits_with_the_most_that_images_need(folder: Path) -> None:
    report = analyzer.analyze([f"{folder}/config.yaml", *WORLD, "--info-gpu", "H200"], environ={})
    assert report.verdict.state == "fits"
    assert report.verdict.images_bytes > 0
