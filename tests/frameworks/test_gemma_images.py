"""Gemma 3 with images in containers of Megatron-Bridge. Source: models/gemma_vl/ of Megatron-Bridge, August 2026."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.passes.stages import full_model, stage_models
from analyzer.predict import predict
from analyzer.predict.parameter_counts import parameter_counts
from tests.frameworks.files import job, nemo_rl, write
from tests.frameworks.gemma_containers import gemma_container

WORLD = ("--info-world-size", "8", "--info-gpu", "H100-80GB")
FIELDS = {
    "model_type": "gemma3", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
}  # fmt: skip
"""The text_config of Gemma 3 4B."""
LANGUAGE, ENCODER, PROJECTION = 3_880_263_168, 416_866_032, 2_950_272
"""Parameters in Gemma3ForConditionalGeneration of transformers, built with these fields."""
BIASES = "the attention biases of all pairs of tokens in Gemma 3 with images are not counted"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {"config.yaml": gemma_container(FIELDS)})
    return tmp_path


def test_parameters_are_those_of_the_class_of_transformers(folder: Path) -> None:
    found = job(folder, "config.yaml", *WORLD)
    assert parameter_counts(found.model, full_model(found)).unpadded == LANGUAGE + ENCODER + PROJECTION
    assert sum(each.numel for each in found.model.vision_weights) == ENCODER + PROJECTION
    assert not any(each.frozen for each in found.model.vision_weights)


def test_language_model_is_that_of_gemma_3_without_windows(folder: Path) -> None:
    """The biases have the windows: `Gemma3TEDotProductAttention` sets none with images."""
    model = job(folder, "config.yaml", *WORLD).model
    assert (model.branch_norms, model.norms_in_projections, model.scaled_embedding, model.local_rope) == (True,) * 4
    assert (model.window, any(model.windowed)) == (None, False)


def test_tensor_parallel_ranks_share_the_projection_only(folder: Path) -> None:
    """`Gemma3VLMultimodalProjector` has a ColumnParallelLinear; the encoder is the module of transformers."""
    found = job(folder, "config.yaml", "model.tensor_model_parallel_size=2", *WORLD)
    held = {path: each for path, each in stage_models(found)[0].trees[0].walk() if "vision" in path}
    assert sum(each.numel for module in held.values() for each in module.parameters) == ENCODER + PROJECTION - 1152 * 2560 // 2
    assert any("but for the projection, which these ranks share" in each for each in found.assumptions)


def test_freezing_is_read(folder: Path) -> None:
    found = job(folder, "config.yaml", "model.freeze_vision_model=true", *WORLD)
    assert sum(each.numel for each in found.model.vision_weights if not each.frozen) == PROJECTION


def test_there_is_no_verdict_that_it_fits(folder: Path) -> None:
    found = job(folder, "config.yaml", *WORLD)
    assert found.withheld == (BIASES,)
    assert found.images is not None
    assert predict(found).verdict.state is None


def test_context_parallelism_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="refuses context parallelism with the attention of Gemma 3 with images"):
        job(folder, "config.yaml", "model.context_parallel_size=2", *WORLD)


def test_kernels_without_attention_biases_are_refused(folder: Path) -> None:
    """`Gemma3VLModelProvider.provide`."""
    with pytest.raises(InputError, match="refuses flash attention with the attention biases of Gemma 3 with images"):
        job(folder, "config.yaml", "model.attention_backend=flash", *WORLD)


def test_a_pooling_head_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="a pooling head of its vision encoder"):
        job(folder, "config.yaml", "model.vision_config.vision_use_head=true", *WORLD)


def test_adapters_leave_the_vision_part_frozen(folder: Path) -> None:
    """The peft of a container freezes all weights; its targets (linear_qkv, linear_proj) are no names of layers of this part."""
    word = "+peft={_target_: megatron.bridge.peft.lora.LoRA, dim: 16, alpha: 32}"
    found = job(folder, "config.yaml", word, *WORLD)
    assert all(each.frozen for each in found.model.vision_weights)


def test_nemo_rl_builds_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("omegaconf")
    write(tmp_path, {"sft.yaml": nemo_rl("google/gemma-3-4b-it")})
    found = job(tmp_path, "sft.yaml")
    assert parameter_counts(found.model, full_model(found)).unpadded == LANGUAGE + ENCODER + PROJECTION
    assert found.model.window is None
    assert BIASES in found.withheld
    with pytest.raises(InputError, match="refuses context parallelism with the attention of Gemma 3 with images"):
        job(tmp_path, "sft.yaml", "policy.megatron_cfg.context_parallel_size=2")
