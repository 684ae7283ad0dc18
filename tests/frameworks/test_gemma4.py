"""Gemma 4 with experts in containers of Megatron-Bridge.

Sources: models/gemma and models/gemma_vl of Megatron-Bridge, August 2026.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from analyzer.predict import predict
from analyzer.specs import TrainingJob
from tests.frameworks.files import job, nemo_rl, write
from tests.frameworks.gemma_containers import gemma_container
from tests.launch.model_config.configurations import published

NAME = "google/gemma-4-26B-A4B"
WORLD = ("--info-world-size", "8", "--info-gpu", "H100-80GB")
WIDTH, HEADS, FFN = 2816, 16, 4304
VISION_WIDTH, VISION_LAYERS = 1152, 27
NOT_COUNTED = (
    "the memory and the time of Gemma 4 are counted without the norms around its experts, the scales of its router, "
    "the norms of values and the soft cap of the logits"
)
IMAGES = (
    "model._target_=x.gemma4_vl_provider.Gemma4VLModelProvider",
    "model.vision_config={model_type: gemma4_vision, hidden_size: 1152, intermediate_size: 4304, num_hidden_layers: 27, "
    "num_attention_heads: 16, num_key_value_heads: 16, head_dim: 72, patch_size: 16, position_embedding_size: 10240}",
)


def job_of(folder: Path, *words: str) -> TrainingJob:
    write(folder, {"config.yaml": gemma_container(published()[NAME]["config"])})
    return job(folder, "config.yaml", *words, *WORLD)


def shapes_in(found: TrainingJob, end: str) -> list[tuple[int, ...]]:
    """Of each layer in its order, the shape of the weight of the module whose path ends so."""
    modules: list[Module] = [
        each for tree in stage_models(found)[0].trees for path, each in tree.walk() if path.endswith(end) and "layers." in path
    ]
    return [next(weight.shape for weight in each.parameters if weight.name == "weight") for each in modules]


def test_layers_without_a_window_have_other_heads(tmp_path: Path) -> None:
    """`Gemma4SelfAttention`: 16 heads of 256 and 8 groups in five of six layers, 16 of 512 and 2 groups in the others."""
    windowed, of_all = (HEADS + 2 * 8) * 256, (HEADS + 2 * 2) * 512
    found = job_of(tmp_path)
    assert [rows for rows, _ in shapes_in(found, "linear_qkv")] == ([windowed] * 5 + [of_all]) * 5
    assert shapes_in(found, "linear_proj") == ([(WIDTH, HEADS * 256)] * 5 + [(WIDTH, HEADS * 512)]) * 5
    assert shapes_in(found, "q_layernorm") == ([(256,)] * 5 + [(512,)]) * 5


def test_it_has_no_verdict_and_names_what_is_not_counted(tmp_path: Path) -> None:
    found = job_of(tmp_path)
    assert found.withheld == (NOT_COUNTED,)
    assert predict(found).verdict.state is None


@pytest.mark.parametrize("trained", [True, False])
def test_the_vision_part_is_complete_on_each_rank(trained: bool, tmp_path: Path) -> None:
    """Four norms, two norms of heads, four projections of attention and a gated FFN in each layer, without biases."""
    layer = 4 * VISION_WIDTH + 2 * 72 + 4 * VISION_WIDTH**2 + 3 * VISION_WIDTH * FFN
    encoder = 2 * 10240 * VISION_WIDTH + 3 * 16**2 * VISION_WIDTH + VISION_LAYERS * layer
    words = (*IMAGES, f"model.freeze_vision_model={str(not trained).lower()}", "model.tensor_model_parallel_size=2")
    found = job_of(tmp_path, *words, "model.sequence_parallel=true", "model.expert_model_parallel_size=4")
    weights = found.model.vision_weights
    assert sum(each.numel for each in weights) == encoder + WIDTH * VISION_WIDTH
    assert sum(each.numel for each in weights if each.frozen) == (0 if trained else encoder)


def test_nemo_rl_reads_it_from_the_catalogue(tmp_path: Path) -> None:
    pytest.importorskip("omegaconf")
    write(tmp_path, {"sft.yaml": nemo_rl(NAME, experts=8)})
    found = job(tmp_path, "sft.yaml")
    assert found.model.global_heads == job_of(tmp_path).model.global_heads
    assert found.model.windowed == ((True,) * 5 + (False,)) * 5
    assert NOT_COUNTED in found.withheld


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.num_moe_experts=null",), "layers of Gemma 4 without experts"),
        (("model.moe_layer_freq=2",), "layers of Gemma 4 without experts"),
        (("model.global_head_dim=abc",), "model.global_head_dim: 'abc' is not a number of 1 or more"),
        ((IMAGES[0], "model.vision_config=null"), "model.vision_config: None has no sizes"),
    ],
)
def test_other_containers_are_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        job_of(tmp_path, *words)


def test_dense_models_are_refused(tmp_path: Path) -> None:
    """E2B, E4B and 31B have embeddings in each layer or layers that share keys and values (`Gemma4DenseProvider`)."""
    fields: dict[str, Any] = {**published()[NAME]["config"]["text_config"], "enable_moe_block": False}
    write(tmp_path, {"config.json": json.dumps(fields), "sft.yaml": nemo_rl(tmp_path, experts=8)})
    with pytest.raises(UnsupportedError, match="embeddings in each layer, and keys and values of other layers"):
        job(tmp_path, "sft.yaml")
