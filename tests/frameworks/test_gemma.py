"""Gemma in containers of Megatron-Bridge and in NeMo-RL. Sources: models/gemma/ of Megatron-Bridge, August 2026."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.passes.stages import full_model, stage_models
from analyzer.predict import predict
from analyzer.predict.parameter_counts import parameter_counts
from tests.data_files import data_file
from tests.frameworks.files import job, nemo_rl, write
from tests.frameworks.gemma_containers import gemma_container
from tests.launch.model_config.configurations import published

WORLD = ("--info-world-size", "8", "--info-gpu", "H100-80GB")
SOFT_CAPS = "the soft caps of logits and attention scores of Gemma 2, and its FlexAttention, are not counted"


def folder_of(name: str, folder: Path) -> Path:
    write(folder, {"config.yaml": gemma_container(published()[name]["config"])})
    return folder


def test_gemma_3_has_what_its_provider_adds(tmp_path: Path) -> None:
    """26 layers with norms after both branches; every sixth without a window of 512 tokens, the own one included."""
    found = job(folder_of("google/gemma-3-1b-pt", tmp_path), "config.yaml", *WORLD)
    model = found.model
    assert (model.branch_norms, model.norms_in_projections, model.scaled_embedding, model.local_rope) == (True,) * 4
    assert (model.window, model.windowed) == ((511, 0), ((True,) * 5 + (False,)) * 4 + (True,) * 2)
    assert (model.kv_channels, model.num_query_groups, model.qk_layernorm, model.tied_embeddings) == (256, 1, True, True)
    assert not model.bias_activation_fusion
    assert found.withheld == ()


def test_norms_of_gemma_are_parts_of_the_projections(tmp_path: Path) -> None:
    """`TERowParallelLinearLayerNorm`: 1152 weights at linear_proj and at linear_fc2 of each layer."""
    found = job(folder_of("google/gemma-3-1b-pt", tmp_path), "config.yaml", *WORLD)
    norms = [each for each in stage_models(found)[0].trees[0].walk() if each[0].endswith("post_layernorm")]
    parents = [path.split(".")[-3:-1] for path, _ in norms]
    assert parents == [["self_attention", "linear_proj"], ["mlp", "linear_fc2"]] * 26
    assert {each.shape for _, norm in norms for each in norm.parameters} == {(1152,)}


def test_both_tables_of_rotary_positions_stay_allocated(tmp_path: Path) -> None:
    """`Gemma3RotaryEmbedding` caches both tables and their stack: fp32, 4,096 tokens, heads of 256."""
    folder = folder_of("google/gemma-3-1b-pt", tmp_path)
    ranks = predict(job(folder, "config.yaml", *WORLD)).ranks
    parts = {each.name: each.bytes for each in ranks[0].memory.runtime_parts}
    assert parts["RoPE frequency table"] == 4 * 4 * 4096 * 256


@pytest.mark.parametrize(
    ("pattern", "windowed"),
    [
        ("[1,1]", (True, False) * 3),
        ("[1,2]", (True, False, False) * 2),
        ("[sliding_attention,full_attention,full_attention,full_attention,full_attention,sliding_attention]", (1, 0, 0, 0, 0, 1)),
    ],
)
def test_layers_with_windows_are_those_of_the_pattern(pattern: str, windowed: tuple[bool, ...], tmp_path: Path) -> None:
    words = ("model.num_layers=6", f"model.interleaved_attn_pattern={pattern}")
    assert job(folder_of("google/gemma-3-1b-pt", tmp_path), "config.yaml", *words, *WORLD).model.windowed == windowed


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("model.window_size=null", "is not the number of tokens of a window"),
        ("model.interleaved_attn_pattern=[0,0]", "is no pair of numbers of layers"),
        ("model.interleaved_attn_pattern=3", "is no pair of numbers of layers"),
    ],
)
def test_windows_of_another_form_are_refused(word: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=fault):
        job(folder_of("google/gemma-3-1b-pt", tmp_path), "config.yaml", word, *WORLD)


@pytest.mark.parametrize("name", ["google/gemma-2b", "google/gemma-2-2b", "google/gemma-2-9b", "google/gemma-2-27b"])
def test_parameters_are_those_of_the_model_classes(name: str, tmp_path: Path) -> None:
    found = job(folder_of(name, tmp_path), "config.yaml", *WORLD)
    counts = json.loads(data_file("published_models.json").read_text())["parameters"]
    assert parameter_counts(found.model, full_model(found)).unpadded == counts[name]
    assert found.model.scaled_embedding
    assert not found.model.local_rope


def test_gemma_2_has_no_verdict_that_it_fits(tmp_path: Path) -> None:
    """Every second layer has a window, the first one too (`Gemma2DotProductAttention`)."""
    found = job(folder_of("google/gemma-2-2b", tmp_path), "config.yaml", *WORLD)
    assert (found.model.window, found.model.windowed) == ((4095, 0), (True, False) * 13)
    assert found.withheld == (SOFT_CAPS,)
    assert predict(found).verdict.state is None


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("model.context_parallel_size=2", "refuses context parallelism with the attention of Gemma 2"),
        ("dataset.offline_packing_specs={packed_sequence_size: 4096}", "refuses packed sequences with the attention of Gemma 2"),
    ],
)
def test_what_the_attention_of_gemma_2_refuses(word: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=fault):
        job(folder_of("google/gemma-2-2b", tmp_path), "config.yaml", word, *WORLD)


def test_gemma_3_in_nemo_rl(tmp_path: Path) -> None:
    """NeMo-RL builds it with Megatron-Bridge."""
    pytest.importorskip("omegaconf")
    write(tmp_path, {"sft.yaml": nemo_rl("google/gemma-3-1b-it")})
    found = job(tmp_path, "sft.yaml")
    assert (found.model.norms_in_projections, found.model.local_rope, found.model.windowed[5]) == (True, True, False)
    counts = json.loads(data_file("published_models.json").read_text())["parameters"]
    assert parameter_counts(found.model, full_model(found)).unpadded == counts["google/gemma-3-1b-pt"]
    assert any("that NeMo-RL adds to modules of Megatron-LM" in each for each in found.assumptions)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("google/gemma-3-1b-it", "analyze a launch of Megatron-Bridge or NeMo-RL, which add them"),
        ("google/gemma-2-9b-it", "analyze a launch of Megatron-Bridge, which adds them"),
        ("google/gemma-3-27b-it", "analyze a launch of Megatron-Bridge or NeMo-RL, which add them"),
        ("google/gemma-4-26B-A4B-it", "analyze a launch of Megatron-Bridge or NeMo-RL, which add them"),
    ],
)
def test_launches_of_megatron_itself_are_refused(name: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=remedy):
        job(tmp_path, "--nproc-per-node", "8", "--info-model", name)


@pytest.mark.parametrize("name", ["Gemma4DenseProvider", "Gemma3nModelProvider", "Exaone4ModelProvider"])
def test_providers_with_other_layers_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} builds a model of another kind"):
        job(folder_of("google/gemma-3-1b-pt", tmp_path), "config.yaml", f"model._target_=x.{name}", *WORLD)


def test_the_scaling_of_the_embedding_makes_a_new_tensor(tmp_path: Path) -> None:
    """`Gemma3LanguageModelEmbedding` multiplies the output, which the first layer saves."""
    found = job(folder_of("google/gemma-3-1b-pt", tmp_path), "config.yaml", *WORLD)
    tree = stage_models(found)[0].trees[0]
    scaling = next(module for path, module in tree.walk() if path.endswith("embedding.scaling"))
    assert [each.bytes for each in scaling.forward_workspace] == [2 * 4096 * 1152] * 2
