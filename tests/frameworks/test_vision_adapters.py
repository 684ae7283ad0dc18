"""Adapters beside the vision part of a model.

Counts are those of the modules of transformers with the names that ms-swift and PEFT match (tests/data/published_models.json), or
worked out by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analyzer.modules.tree import Parameter
from analyzer.predict.formula import predict
from analyzer.specs import TrainingJob
from tests.data_files import data_file
from tests.frameworks.files import job
from tests.frameworks.test_vision_language import MBRIDGE, VISION, held, nemo, roll, swift, trained

ADAPTERS: dict[str, dict[str, int]] = json.loads(data_file("published_models.json").read_text())["vision_adapters"]
LORA = ("--tuner_type", "lora", "--lora_rank", "8")
NAMED = ("--target_modules", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def beside_images(found: TrainingJob, stage: int = 0) -> tuple[Parameter, ...]:
    """The adapters beside the vision part that a rank of a pipeline stage holds."""
    return tuple(each for each in held(found, stage) if ".lora_" in each.name)


def count(found: TrainingJob) -> int:
    """Elements of the adapters beside the vision part, without parallelism."""
    return sum(each.full_numel for each in beside_images(found))


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_not_frozen_in_ms_swift_has_the_adapters_that_peft_adds(tmp_path: Path, name: str) -> None:
    both = swift(tmp_path, name, *LORA, "--freeze_vit", "false", "--freeze_aligner", "false")
    encoder = swift(tmp_path, name, *LORA, "--freeze_vit", "false")
    projection = swift(tmp_path, name, *LORA, "--freeze_aligner", "false")
    expected = ADAPTERS[name]
    assert count(encoder) == expected["encoder"]
    assert count(projection) == expected["projection"]
    assert count(both) == expected["encoder"] + expected["projection"]
    assert len(both.not_counted) == (both.images is None)  # images and sounds together


@pytest.mark.parametrize("name", ["Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-Omni-30B-A3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"])
def test_names_of_layers_are_those_of_both_parts_whatever_is_frozen(tmp_path: Path, name: str) -> None:
    found = swift(tmp_path, name, *LORA, *NAMED)
    assert count(found) == count(swift(tmp_path, name, *LORA, *NAMED, "--freeze_vit", "false")) == ADAPTERS[name]["named"]


def test_internvl_of_its_own_code_has_one_matrix_for_queries_keys_and_values(tmp_path: Path) -> None:
    """`InternVisionModel` and `mlp1`: 24 layers of 1024 with an FFN of 4096, and 4096 to 4096 to 4096 in the projector."""
    found = swift(tmp_path, "OpenGVLab/InternVL3_5-8B", *LORA, "--freeze_vit", "false", "--freeze_aligner", "false")
    layer = (1024 + 3072) + (1024 + 1024) + 2 * (1024 + 4096)
    assert count(found) == 8 * (24 * layer + 2 * (4096 + 4096))


def test_adapters_and_their_states_have_the_bytes_of_other_adapters(tmp_path: Path) -> None:
    """2 bytes in bf16, 4 of an fp32 gradient and 12 of the states of Adam. Buffers pad each of 208 weights to 64 elements."""
    model, added = "Qwen/Qwen3-VL-2B-Instruct", ADAPTERS["Qwen/Qwen3-VL-2B-Instruct"]
    number = added["encoder"] + added["projection"]
    plain, more = (
        predict(swift(tmp_path, model, *LORA, *flags)) for flags in ((), ("--freeze_vit", "false", "--freeze_aligner", "false"))
    )
    padding = 209 * 64
    for field, size in (("parameters_bytes", 2), ("gradients_bytes", 4), ("optimizer_bytes", 12)):
        difference = getattr(more.ranks[0].memory, field) - getattr(plain.ranks[0].memory, field)
        assert 0 <= difference - size * number <= size * padding
    assert more.parameters_adapters - plain.parameters_adapters == number
    assert (more.parameters, more.parameters_unpadded) == (plain.parameters, plain.parameters_unpadded)


def test_each_tensor_parallel_rank_has_the_adapters_of_peft_whole(tmp_path: Path) -> None:
    """`_patch_lora_model` of mcore-bridge: their gradients are averaged over the ranks (`average_gradients_across_tp_domain`)."""
    layout = ("--tensor_model_parallel_size", "2", "--pipeline_model_parallel_size", "2")
    found = swift(tmp_path, "Qwen/Qwen3-VL-8B-Instruct", *LORA, "--freeze_vit", "false", *layout, world=4)
    adapters = beside_images(found)
    assert sum(each.numel for each in adapters) == ADAPTERS["Qwen/Qwen3-VL-8B-Instruct"]["encoder"]
    assert all(each.sequence_parallel and not each.frozen for each in adapters)
    assert all(each.frozen for each in held(found) if each not in adapters)
    assert beside_images(found, stage=1) == ()


def test_adapters_are_beside_the_language_model_only(tmp_path: Path) -> None:
    text = swift(tmp_path, "Qwen/Qwen3-8B", "--tuner_type", "lora")
    found = swift(tmp_path, "Qwen/Qwen3-VL-8B-Instruct", "--tuner_type", "lora")
    assert trained(found) == trained(text)
    assert all(each.frozen for each in held(found))
    assert found.not_counted == ()


def test_lora_of_the_language_model_trains_the_whole_vision_part(tmp_path: Path) -> None:
    """`_prepare_full_vit`: with `lora_llm` the vision part is trained itself."""
    name = "Qwen/Qwen3-VL-8B-Instruct"
    text = swift(tmp_path, "Qwen/Qwen3-8B", *LORA)
    found = swift(tmp_path, name, "--tuner_type", "lora_llm", "--lora_rank", "8")
    assert beside_images(found) == ()
    assert trained(found) == trained(text) + sum(VISION[name].values())


def test_a_frozen_language_model_without_adapters_has_no_verdict(tmp_path: Path) -> None:
    found = swift(tmp_path, "Qwen/Qwen3-VL-8B-Instruct", *LORA, "--freeze_llm", "true", "--freeze_vit", "false")
    assert "--freeze_llm adds no adapters to the language model, which are counted" in found.withheld


# Megatron-Bridge, mbridge and ROLL


def test_bridge_shares_adapters_beside_modules_of_megatron_among_tensor_parallel_ranks(tmp_path: Path) -> None:
    """`ParallelLinearAdapter` beside all linear layers of `Qwen3VLVisionModel`: each of its weights is split over the ranks."""
    found = nemo(tmp_path, "Qwen/Qwen3-VL-4B-Instruct", "peft: {enabled: true, dim: 8}")
    whole = sum(ADAPTERS["Qwen/Qwen3-VL-4B-Instruct"][part] for part in ("encoder", "projection"))
    assert count(found) == whole
    assert sum(each.numel for each in beside_images(found)) == whole // 2
    shapes = {each.name: each.shape for each in beside_images(found)}
    assert shapes["blocks.0.attn.qkv.lora_A.weight"] == (4, 1024)
    assert shapes["blocks.0.attn.qkv.lora_B.weight"] == (1536, 8)
    assert shapes["merger.linear_fc2.lora_A.weight"] == (8, 2048)
    assert shapes["merger.linear_fc2.lora_B.weight"] == (1280, 8)
    assert len(found.not_counted) == 2  # the images, in another phase, and phases whose sizes the file does not have


def test_names_in_bridge_are_those_of_megatron(tmp_path: Path) -> None:
    """24 blocks with queries, keys and values of 1024 each."""
    found = nemo(tmp_path, "Qwen/Qwen3-VL-4B-Instruct", "peft: {enabled: true, dim: 8, target_modules: [linear_qkv]}")
    assert count(found) == 24 * 8 * (1024 + 3072)


def test_bridge_has_no_adapters_beside_modules_of_transformers_of_other_names(tmp_path: Path) -> None:
    found = nemo(tmp_path, "Qwen/Qwen2.5-VL-3B-Instruct", "peft: {enabled: true, dim: 8}")
    assert (count(found), len(found.not_counted)) == (0, 2)


def test_adapters_that_are_not_counted_are_named(tmp_path: Path) -> None:
    lora = "actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.type=dora"
    settings = f"{MBRIDGE}Qwen/Qwen3-VL-4B-Instruct {lora}".replace("vanilla_mbridge=True", "vanilla_mbridge=False")
    found = job(tmp_path, *settings.split())
    named = "adapters beside linear_fc1, linear_fc2, linear_proj, linear_qkv of the vision part are not counted"
    assert named in found.not_counted
    of_roll = roll(tmp_path, "model_type: ~, lora_rank: 8, lora_target: all-linear")
    assert "adapters beside linear_fc1, linear_fc2 of the vision part are not counted" in of_roll.not_counted
