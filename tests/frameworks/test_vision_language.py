"""Vision-language models in frameworks: the weights of the vision part, who holds them, and what of them is trained.

Counts are those of the modules of transformers on the meta device (tests/data/published_models.json), or worked out by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest

from allocator_hook.step.supported import check_supported
from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.families import megatron_model
from analyzer.launch.model_config.published import read_configuration
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Parameter, parameters
from analyzer.passes.stages import full_model, stage_models
from analyzer.predict.formula import predict
from analyzer.specs import TrainingJob
from analyzer.specs.vision_part import VisionWeights
from tests.data_files import data_file
from tests.frameworks.files import job, write
from tests.modules.test_kinds import job_of_layout

VISION: dict[str, dict[str, int]] = json.loads(data_file("published_models.json").read_text())["vision"]
TOTAL = {name: sum(sections.values()) for name, sections in VISION.items()}
SWIFT = "megatron sft --model {} --micro_batch_size 1 --global_batch_size 4 --max_length 1024 --packing true --info-world-size {}"
NEMO = """
grpo: {{num_prompts_per_step: 32}}
policy:
  model_name: {}
  train_global_batch_size: 64
  train_micro_batch_size: 1
  max_total_sequence_length: 1024
  precision: bfloat16
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: {}
    optimizer: {{optimizer: adam, use_distributed_optimizer: true}}
    distributed_data_parallel_config: {{grad_reduce_in_fp32: false, overlap_grad_reduce: false, overlap_param_gather: true}}
    {}
cluster: {{gpus_per_node: 8, num_nodes: 1}}
"""
ROLL = """
pretrain: Qwen/Qwen3-VL-4B-Instruct
sequence_length: 1024
actor_train:
  model_args: {{dtype: bf16, {}}}
  training_args: {{per_device_train_batch_size: 1, gradient_accumulation_steps: 8}}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {{tensor_model_parallel_size: 2, use_distributed_optimizer: true}}
  device_mapping: list(range(0,8))
"""


def weights_of(name: str) -> VisionWeights:
    found = megatron_model(read_configuration(name, folder=Path("/nowhere"))).parts.vision
    assert found is not None
    return found


def held(found: TrainingJob, stage: int = 0) -> tuple[Parameter, ...]:
    """The parameters of the vision part on a rank of a pipeline stage."""
    modules = (module for tree in stage_models(found)[stage].trees for _, module in tree.walk())
    return tuple(each for module in modules if module.kind is ModuleKind.VISION_WEIGHTS for each in parameters(module))


def trained(found: TrainingJob) -> int:
    """Elements of all trained parameters of the model."""
    return sum(each.full_numel for each in parameters(full_model(found)) if not each.frozen)


def swift(folder: Path, model: str, *more: str, world: int = 1) -> TrainingJob:
    return job(folder, *SWIFT.format(model, world).split(), *more)


def nemo(folder: Path, model: str, more: str = "", tensor: int = 2) -> TrainingJob:
    pytest.importorskip("omegaconf")
    write(folder, {"vlm.yaml": NEMO.format(model, tensor, more)})
    return job(folder, "vlm.yaml")


def roll(folder: Path, more: str = "model_type: ~") -> TrainingJob:
    pytest.importorskip("omegaconf")
    write(folder, {"vlm.yaml": ROLL.format(more)})
    return job(folder, "vlm.yaml")


# the catalogue


@pytest.mark.parametrize("name", VISION)
def test_the_encoder_and_the_projection_have_as_many_parameters_as_the_real_modules(name: str) -> None:
    weights = weights_of(name)
    sizes = dict.fromkeys(VISION[name], 0)
    for each in weights.weights:
        sizes[weights.section(each)] += each.copies * prod(each.shape)
    assert sizes == VISION[name]


def _single_weights(weights: VisionWeights) -> Iterator[tuple[str, tuple[int, ...]]]:
    for each in weights.weights:
        yield from ((each.name.replace("*", str(layer)), each.shape) for layer in range(each.copies))


def test_weights_have_the_names_and_shapes_of_the_real_module() -> None:
    """Of `Qwen3VLVisionModel(Qwen3VLVisionConfig(out_hidden_size=4096))` of transformers 5.24.0."""
    found = dict(_single_weights(weights_of("Qwen/Qwen3-VL-8B-Instruct")))
    assert len(found) == 3 + 27 * 12 + 6 + 3 * 6
    assert found["patch_embed.proj.weight"] == (1152, 3, 2, 16, 16)
    assert found["blocks.26.attn.qkv.weight"] == (3456, 1152)
    assert found["blocks.0.mlp.linear_fc2.weight"] == (1152, 4304)
    assert found["deepstack_merger_list.2.linear_fc2.weight"] == (4096, 4608)
    assert found["deepstack_merger_list.2.norm.weight"] == (4608,)
    assert found["merger.norm.weight"] == (1152,)


def test_radio_has_the_parameters_of_the_encoder_that_megatron_builds() -> None:
    """`examples/multimodal` builds RADIO with 8 class tokens, in a layout that agrees with recorded runs of Megatron-LM."""
    tree = full_model(job_of_layout("multimodal, radio"))
    modules = (module for path, module in tree.walk() if path.startswith("llava_model.vision_model."))
    built = sum(each.full_numel for module in modules for each in module.parameters)
    weights = weights_of("nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16")
    assert sum(each.numel for each in weights.weights if each.name.startswith("vision_model.")) - 8 * 1280 == built


def test_nemo_rl_freezes_sections_by_fields_of_the_provider(tmp_path: Path) -> None:
    """`iter_vlm_config_overrides` of nemo_rl/models/megatron/community_import.py."""
    name = "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16"
    settings = "expert_model_parallel_size: 8\n    expert_tensor_parallel_size: 1\n    sequence_parallel: true"
    every = nemo(tmp_path, name, settings)
    fewer = nemo(tmp_path, name, f"{settings}\n    freeze_vision_model: true\n    freeze_sound_projection: true")
    assert trained(every) - trained(fewer) == VISION[name]["vision_model"] + VISION[name]["sound_projection"]


def test_parakeet_has_the_parameters_of_the_real_module() -> None:
    """`ParakeetEncoder` of transformers 5.12.1 with the sizes of Nemotron 3 Nano Omni."""
    found = dict(_single_weights(weights_of("nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16")))
    sound = {name.removeprefix("sound_model.encoder."): shape for name, shape in found.items() if name.startswith("sound_model.")}
    assert sum(prod(shape) for shape in sound.values()) == 608_879_616
    assert sound["subsampling.layers.6.weight"] == (256, 256, 1, 1)
    assert sound["subsampling.linear.weight"] == (1024, 4096)
    assert sound["layers.23.conv.depthwise_conv.weight"] == (1024, 1, 9)
    assert sound["layers.0.self_attn.bias_u"] == (8, 128)


@pytest.mark.parametrize("where", ["text_config", "flat"])
def test_a_folder_with_a_configuration_is_read_whatever_its_name(tmp_path: Path, where: str) -> None:
    """Configurations of Qwen2.5-VL have the fields of the language model in text_config from transformers 4.52 on."""
    values = dict(read_configuration("Qwen/Qwen2.5-VL-3B-Instruct", folder=tmp_path).values)
    vision, kind = values.pop("vision_config"), values.pop("model_type")
    if where == "text_config":
        values = {"text_config": {**values, "model_type": "qwen2_5_vl_text"}}
    write(tmp_path, {"My-Own-VL/config.json": json.dumps({**values, "model_type": kind, "vision_config": vision})})
    found = swift(tmp_path, str(tmp_path / "My-Own-VL"))
    assert trained(found) == 3085938688
    assert sum(each.numel for each in held(found)) == TOTAL["Qwen/Qwen2.5-VL-3B-Instruct"]


def test_patches_and_images_that_are_not_square_are_refused() -> None:
    values = dict(read_configuration("OpenGVLab/InternVL3-1B-hf", folder=Path("/nowhere")).values)
    values["vision_config"] = {**values["vision_config"], "image_size": [448, 224]}  # type: ignore[dict-item]
    with pytest.raises(UnsupportedError, match=r"a image_size of \[448, 224\]"):
        megatron_model(Configuration(values, "config.json"))


# ms-swift: the module of transformers on every rank of the first stage, frozen by default


def test_ms_swift_holds_the_whole_vision_part_on_each_rank_of_the_first_stage(tmp_path: Path) -> None:
    layout = ("--tensor_model_parallel_size", "2", "--pipeline_model_parallel_size", "2")
    found = swift(tmp_path, "Qwen/Qwen2.5-VL-7B-Instruct", *layout, world=4)
    assert sum(each.numel for each in held(found)) == 676_550_144
    assert all(each.frozen and each.sharding == "replicated" for each in held(found))
    assert held(found, stage=1) == ()
    assert trained(found) == 7_615_616_512


def test_frozen_weights_have_two_bytes_and_trained_ones_the_states_of_adam(tmp_path: Path) -> None:
    """bf16 weights, fp32 gradients, and 12 bytes of states on one GPU; the buffers of 390 weights are padded to 64 elements."""
    model, count = "Qwen/Qwen2.5-VL-3B-Instruct", TOTAL["Qwen/Qwen2.5-VL-3B-Instruct"]
    text, frozen, both = (
        predict(swift(tmp_path, model, *more)).ranks[0].memory
        for more in (("--language_model_only", "true"), (), ("--freeze_vit", "false", "--freeze_aligner", "false"))
    )
    assert frozen.parameters_bytes - text.parameters_bytes == pytest.approx(2 * count, abs=512 * 400)
    assert (frozen.gradients_bytes, frozen.optimizer_bytes) == (text.gradients_bytes, text.optimizer_bytes)
    padding = 391 * 64
    assert 0 <= both.gradients_bytes - text.gradients_bytes - 4 * count <= 4 * padding
    assert 0 <= both.optimizer_bytes - text.optimizer_bytes - 12 * count <= 12 * padding


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ("--freeze_vit true --freeze_aligner true", 8_190_735_360),
        ("--freeze_vit false --freeze_aligner true", 8_190_735_360 + 415_891_440),
        ("--freeze_vit true --freeze_aligner false", 8_190_735_360 + 160_496_896),
        ("--freeze_vit false --freeze_aligner false", 8_767_123_696),
        ("--freeze_llm true --freeze_aligner false", 160_496_896),
    ],
)
def test_flags_freeze_the_parts_of_qwen3_vl(tmp_path: Path, options: str, count: int) -> None:
    found = swift(tmp_path, "Qwen/Qwen3-VL-8B-Instruct", *options.split())
    assert trained(found) == count
    assert found.withheld == ()


def test_gradients_of_whole_weights_are_averaged_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    """`HuggingFaceModule.__setattr__` of megatron-core marks them (`average_gradients_across_tp_domain`)."""
    options = ("--tensor_model_parallel_size", "2", "--freeze_aligner", "false")
    found = swift(tmp_path, "Qwen/Qwen3-VL-8B-Instruct", *options, world=2)
    assert sum(each.numel for each in held(found) if each.sequence_parallel) == 160_496_896


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--trainable_parameters visual.visual.pos_embed", "--trainable_parameters visual.visual.pos_embed is not read"),
    ],
)
def test_what_more_of_the_vision_part_is_trained_is_said(tmp_path: Path, options: str, reason: str) -> None:
    found = swift(tmp_path, "Qwen/Qwen3-VL-8B-Instruct", *options.split())
    assert any(reason in each for each in found.not_counted)


# Megatron-Bridge in NeMo-RL and verl: modules of Megatron for Qwen3-VL, and of transformers for Qwen2.5-VL


def test_bridge_shares_the_vision_part_of_qwen3_vl_among_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Of 24 blocks 6,144 elements in norms and row biases are whole, and 12,590,080 are shared; patches and positions are whole."""
    blocks = 24 * (6_144 + 12_590_080 // 2)
    merger = 2_048 + 2_560 + (16_777_216 + 4_096 + 10_485_760) // 2
    deepstack = 3 * (8_192 + 2_560 + (16_777_216 + 4_096 + 10_485_760) // 2)
    found = nemo(tmp_path, "Qwen/Qwen3-VL-4B-Instruct")
    assert sum(each.numel for each in held(found)) == blocks + 1_573_888 + 2_359_296 + merger + deepstack
    assert sum(each.full_numel for each in held(found)) == 415_347_712
    assert trained(found) == 4_437_815_808


def test_bridge_holds_the_vision_part_of_qwen2_5_vl_whole(tmp_path: Path) -> None:
    found = nemo(tmp_path, "Qwen/Qwen2.5-VL-3B-Instruct")
    assert sum(each.numel for each in held(found)) == TOTAL["Qwen/Qwen2.5-VL-3B-Instruct"]
    assert trained(found) == 3_754_622_976


def test_a_freeze_config_is_read(tmp_path: Path) -> None:
    found = nemo(
        tmp_path, "Qwen/Qwen2.5-VL-3B-Instruct", "freeze_config: {freeze_vision_model: true, freeze_vision_projection: true}"
    )
    assert trained(found) == 3_085_938_688
    assert not any("freeze" in each for each in found.withheld)


def test_the_provider_of_qwen3_vl_with_experts_trains_the_projection_only(tmp_path: Path) -> None:
    """`Qwen3VLMoEModelProvider`: freeze_language_model and freeze_vision_model are true unless they are set."""
    found = nemo(tmp_path, "Qwen/Qwen3-VL-30B-A3B-Instruct", "sequence_parallel: true")
    assert trained(found) == 122_739_968
    assert "freeze_language_model" in " ".join(found.assumptions)


def test_settings_of_verl_replace_the_defaults_of_the_provider(tmp_path: Path) -> None:
    override = "+actor_rollout_ref.actor.megatron.override_transformer_config."
    settings = "-m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml actor_rollout_ref.actor.use_dynamic_bsz=True "
    settings += "actor_rollout_ref.model.path=Qwen/Qwen3-VL-30B-A3B-Instruct trainer.n_gpus_per_node=8 algorithm.adv_estimator=grpo"
    found = job(tmp_path, *settings.split(), f"{override}freeze_language_model=False", f"{override}freeze_vision_model=False")
    assert trained(found) == 31_070_754_032
    assert trained(job(tmp_path, *settings.split(), "actor_rollout_ref.actor.megatron.vanilla_mbridge=True")) == 31_070_754_032


def test_a_frozen_language_model_with_states_on_the_host_is_counted(tmp_path: Path) -> None:
    """examples/grpo_trainer/run_qwen3_vl_30b_a3b_megatron.sh of verl: the projection is trained, with its states in host memory."""
    offload = "+actor_rollout_ref.actor.optim.override_optimizer_config."
    settings = "-m verl.trainer.main_ppo model_engine=megatron trainer.n_gpus_per_node=8 algorithm.adv_estimator=grpo "
    settings += "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.model.path=Qwen/Qwen3-VL-30B-A3B-Instruct "
    settings += (
        f"{offload}optimizer_cpu_offload=True {offload}use_precision_aware_optimizer=True {offload}optimizer_offload_fraction="
    )
    found = job(tmp_path, *f"{settings}1".split())
    assert trained(found) == 122_739_968
    assert not any("frozen" in each for each in found.withheld)
    memory = predict(found).ranks[0].memory
    assert memory.optimizer_bytes == 0
    assert memory.gradients_bytes == pytest.approx(4 * 122_739_968, rel=0.001)
    part = job(tmp_path, *f"{settings}0.5".split())
    assert any("a part of the optimizer states in host memory" in each for each in part.withheld)


MBRIDGE = (
    "-m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml actor_rollout_ref.actor.use_dynamic_bsz=True "
    "trainer.n_gpus_per_node=8 algorithm.adv_estimator=grpo actor_rollout_ref.actor.megatron.vanilla_mbridge=True "
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.model.path="
)


@pytest.mark.parametrize(
    ("model", "on_rank", "whole"),
    [
        # 32 blocks: the two norms and row biases are whole; 7,673,600 + 4,920 of fused rows and columns are shared
        ("Qwen/Qwen2.5-VL-3B-Instruct", None, 668_684_288),
        ("Qwen/Qwen3-VL-4B-Instruct", 24 * (6_144 + 12_590_080 // 2) + 1_573_888 + 2_359_296 + 2_048 + 2_560
         + (16_777_216 + 4_096 + 10_485_760) // 2 + 3 * (8_192 + 2_560 + (16_777_216 + 4_096 + 10_485_760) // 2), 415_347_712),
    ],
)  # fmt: skip
def test_mbridge_shares_the_modules_of_megatron_among_tensor_parallel_ranks(
    tmp_path: Path, model: str, on_rank: int | None, whole: int
) -> None:
    """`Qwen2_5VisionModel` and `Qwen3VLVisionModel` of mbridge: layers of Transformer Engine, all trained."""
    weights = held(job(tmp_path, *f"{MBRIDGE}{model}".split()))
    assert sum(each.full_numel for each in weights) == whole
    assert on_rank is None or sum(each.numel for each in weights) == on_rank
    assert sum(each.numel for each in weights) < 0.55 * whole
    assert not any(each.frozen for each in weights)


def test_mbridge_holds_the_vision_part_of_qwen3_5_whole(tmp_path: Path) -> None:
    """`Qwen3_5VLModel`: the module of transformers, with `average_gradients_across_tp_domain`."""
    model = "Qwen/Qwen3.5-35B-A3B"
    weights = held(job(tmp_path, *f"{MBRIDGE}{model}".split()))
    assert sum(each.numel for each in weights) == TOTAL[model]
    assert all(each.sequence_parallel and not each.frozen for each in weights)


def test_a_model_that_mbridge_does_not_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"the vision part of OpenGVLab/InternVL3-8B.* in mbridge is not modelled"):
        job(tmp_path, *f"{MBRIDGE}OpenGVLab/InternVL3-8B".split())


def test_a_vision_part_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    """The FFN of 4304 columns has no 32 equal parts, nor have 16 heads."""
    write(
        tmp_path, {"vlm.yaml": NEMO.format("Qwen/Qwen3-VL-32B-Instruct", 32, "").replace("gpus_per_node: 8", "gpus_per_node: 32")}
    )
    pytest.importorskip("omegaconf")
    with pytest.raises(InputError):
        job(tmp_path, "vlm.yaml")


def test_a_model_that_bridge_does_not_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"the vision part of OpenGVLab/InternVL3-8B.* in Megatron-Bridge is not modelled"):
        nemo(tmp_path, "OpenGVLab/InternVL3-8B")


def test_models_with_sound_have_two_parts(tmp_path: Path) -> None:
    """`Qwen2_5Omni_Vit` of mcore-bridge, which builds neither the talker nor token2wav: everything else is frozen by default.

    Of `Qwen2_5OmniAudioEncoder` of transformers: 32 layers with a norm before attention and FFN, and k_proj without a bias.
    """
    name = "Qwen/Qwen2.5-Omni-7B"
    weights = dict(_single_weights(weights_of(name)))
    assert weights["audio_tower.conv2.weight"] == (1280, 1280, 3)
    assert weights["audio_tower.layers.31.fc1.weight"] == (5120, 1280)
    assert "audio_tower.layers.0.self_attn.k_proj.bias" not in weights
    assert weights["blocks.31.attn.k.bias"] == (1280,)
    found = swift(tmp_path, name, "--freeze_llm", "true", "--freeze_vit", "false", "--tensor_model_parallel_size", "2", world=2)
    assert sum(each.numel for each in held(found)) == TOTAL[name]
    assert trained(found) == VISION[name]["vision_model"] + VISION[name]["sound_model"] == 631_975_680 + 635_056_128
    assert "on the images and sounds of the data" in " ".join(found.not_counted)
    assert trained(swift(tmp_path, name)) == 7_615_616_512


def test_adapters_are_beside_the_language_model_of_a_model_with_sound(tmp_path: Path) -> None:
    """Rank 8 beside qkv (32 heads and 2 × 4 groups of 128 from 2048) and the output projection of 48 layers."""
    options = ("--tuner_type", "lora", "--target_modules", "linear_qkv", "linear_proj")
    found = swift(tmp_path, "Qwen/Qwen3-Omni-30B-A3B-Captioner", *options)
    assert trained(found) == 48 * 8 * (2048 + 5120 + 4096 + 2048)
    assert sum(each.numel for each in held(found) if each.name.startswith("audio_tower.proj")) == 4_263_168


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [("{}", 0), ("{freeze_audio_model: true}", 637_676_544), ("{freeze_vision_model: true}", 631_975_680 + 36_708_608)],
)
def test_bridge_freezes_the_encoder_of_sound_with_its_projection(tmp_path: Path, settings: str, frozen: int) -> None:
    """`Qwen25OmniThinkerModel.freeze`. The thinker has 4,703,464,448 parameters."""
    found = nemo(tmp_path, "Qwen/Qwen2.5-Omni-3B", f"freeze_config: {settings}")
    assert trained(found) == 4_703_464_448 - frozen
    assert not any("freeze" in each for each in found.withheld)


def test_roll_trains_the_vision_part_unless_its_prefix_is_frozen(tmp_path: Path) -> None:
    found = roll(tmp_path)
    assert sum(each.numel for each in held(found)) == 415_347_712
    assert trained(found) == 4_437_815_808
    found = roll(tmp_path, "freeze_module_prefix: vision_model")
    assert trained(found) == 4_022_468_096
    assert not any("freeze" in each for each in found.withheld)


@pytest.mark.parametrize("name", ["moonshotai/Kimi-K2.5", "mistralai/Ministral-3-3B-Base-2512"])
def test_a_vision_part_that_is_not_read_leaves_no_verdict(tmp_path: Path, name: str) -> None:
    found = swift(tmp_path, name, "--expert_model_parallel_size", "4" if "Kimi" in name else "1", world=4)
    assert found.not_counted[0].startswith(f"the vision part of {name} is not modelled")
    assert held(found) == ()


# the verdict


@pytest.mark.parametrize(("gpu", "state"), [("H200", "fits"), ("RTX-4090", "does not fit")])
def test_images_do_not_change_a_verdict_with_room_for_them(tmp_path: Path, gpu: str, state: str) -> None:
    verdict = predict(swift(tmp_path, "Qwen/Qwen2.5-VL-7B-Instruct", "--info-gpu", gpu, world=4)).verdict
    assert verdict.state == state
    assert (verdict.images_bytes > 0) is (state == "fits")


def test_sounds_leave_no_verdict(tmp_path: Path) -> None:
    found = swift(tmp_path, "Qwen/Qwen2.5-Omni-7B", "--info-gpu", "H200", world=4)
    assert found.images is None
    assert "the activations of the vision and sound part" in predict(found).verdict.withheld


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--freeze_parameters visual.visual.blocks", "what --freeze_parameters freezes in the vision part"),
        ("--freeze_parameters_ratio 0.5", "what --freeze_parameters_ratio freezes in the vision part"),
    ],
)
def test_parameters_that_are_frozen_by_name_get_no_verdict(tmp_path: Path, options: str, reason: str) -> None:
    assert any(reason in each for each in swift(tmp_path, "Qwen/Qwen3-VL-8B-Instruct", *options.split()).withheld)


def test_muon_gets_no_verdict_in_either_direction(tmp_path: Path) -> None:
    found = swift(tmp_path, "Qwen/Qwen2.5-VL-3B-Instruct", "--optimizer", "dist_muon")
    assert found.withheld == ("which weights of the vision part of Qwen/Qwen2.5-VL-3B-Instruct Muon updates is not known",)


def test_the_shadow_engine_refuses_a_vision_part(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="vision_weights"):
        check_supported(swift(tmp_path, "Qwen/Qwen2.5-VL-3B-Instruct"))


def test_a_launch_of_megatron_trains_the_language_model(tmp_path: Path) -> None:
    found = job(tmp_path, "--nproc-per-node", "8", "--info-model", "Qwen/Qwen3-VL-8B-Instruct")
    assert held(found) == ()
    assert "its vision part is left out" in " ".join(found.assumptions)


# containers of Megatron-Bridge


CONTAINER = """
model:
  _target_: megatron.bridge.models.qwen_vl.qwen3_vl_provider.Qwen3VLMoEModelProvider
  num_layers: 48
  hidden_size: 2048
  ffn_hidden_size: 6144
  num_attention_heads: 32
  num_query_groups: 4
  kv_channels: 128
  qk_layernorm: true
  num_moe_experts: 128
  moe_router_topk: 8
  moe_ffn_hidden_size: 768
  moe_grouped_gemm: true
  moe_token_dispatcher_type: alltoall
  vocab_size: 151936
  normalization: RMSNorm
  add_bias_linear: false
  share_embeddings_and_output_weights: false
  gated_linear_unit: true
  activation_func: {_name_: silu, _target_: torch.nn.functional.silu, _call_: false}
  position_embedding_type: mrope
  mrope_section: [24, 20, 20]
  image_token_id: 151655
  dist_train: {use_dist_train: false, vision_world_size: null}
  vision_cuda_graph_impl: none
  vision_dp_when_cp: false
  use_hf_vision_model: false
  hf_text_config: null
  tensor_model_parallel_size: 2
  sequence_parallel: true
  expert_model_parallel_size: 8
  freeze_language_model: false
  freeze_vision_model: true
  vision_config:
    _target_: transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe.Qwen3VLMoeVisionConfig.from_dict
    _call_: true
    config_dict: {hidden_size: 1152, depth: 27, intermediate_size: 4304, out_hidden_size: 2048}
optimizer: {_target_: x.OptimizerConfig, optimizer: adam, bf16: true, use_distributed_optimizer: true}
ddp: {_target_: x.DistributedDataParallelConfig, use_distributed_optimizer: true}
train: {_target_: x.TrainingConfig, micro_batch_size: 1, global_batch_size: 32}
dataset: {_target_: x.HFDatasetConversationProvider, seq_length: 4096}
tokenizer: {_target_: x.TokenizerConfig, tokenizer_type: NullTokenizer}
mixed_precision: bf16_mixed
"""


def container(folder: Path, *more: str) -> TrainingJob:
    pytest.importorskip("omegaconf")
    write(folder, {"container.yaml": CONTAINER})
    return job(folder, "container.yaml", *more, "--info-world-size", "8")


def test_qwen3_vl_with_experts_has_sequence_parallelism(tmp_path: Path) -> None:
    """`Qwen3VLMoEModelProvider.finalize` turns it on with tensor parallelism, whatever the container says."""
    assert container(tmp_path, "model.sequence_parallel=false").parallel.sequence_parallel


def test_a_container_has_the_vision_part_that_its_provider_builds(tmp_path: Path) -> None:
    """Qwen3-VL-30B-A3B: the language model and the projection are trained, and the encoder is frozen."""
    found = container(tmp_path)
    assert sum(each.full_numel for each in held(found)) == TOTAL["Qwen/Qwen3-VL-30B-A3B-Instruct"]
    assert trained(found) == 31_070_754_032 - VISION["Qwen/Qwen3-VL-30B-A3B-Instruct"]["vision_model"]
    assert found.withheld == ()
    assert found.not_counted == ()
    assert found.images is not None
    assert found.images.tokens == found.batch.seq_length
    assert found.unknown == ()


def test_an_option_bounds_the_tokens_of_images(tmp_path: Path) -> None:
    found = swift(tmp_path, "Qwen/Qwen2.5-VL-7B-Instruct", "--info-image-tokens", "256", world=4)
    assert found.images is not None
    assert found.images.tokens == 256


def test_tokens_of_images_of_a_text_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--info-image-tokens: the launch trains no vision-language model"):
        swift(tmp_path, "Qwen/Qwen3-8B", "--info-image-tokens", "256")


def test_a_mock_dataset_tells_the_tokens_of_its_images(tmp_path: Path) -> None:
    """Two images of 512 × 320 pixels: 16 × 10 tokens of 32 × 32 pixels each, and a row and a column for rounding."""
    mock = "megatron.bridge.data.builders.mock_vlm_sft.MockVLMSFTDatasetConfig"
    found = container(tmp_path, f"dataset._target_={mock}", "dataset.image_size=[512,320]", "dataset.num_images=2")
    assert found.images is not None
    assert 2 * 16 * 10 <= found.images.tokens == 2 * 17 * 11


def test_what_a_container_freezes_replaces_the_defaults_of_its_provider(tmp_path: Path) -> None:
    assert trained(container(tmp_path, "model.freeze_language_model=true")) == 122_739_968
    assert trained(container(tmp_path, "model.freeze_vision_model=false")) == 31_070_754_032
    assert trained(container(tmp_path, "~model.freeze_language_model", "~model.freeze_vision_model")) == 122_739_968


def test_a_vision_part_on_other_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="on other GPUs than the language model"):
        container(tmp_path, "model.dist_train.use_dist_train=true")
    with pytest.raises(UnsupportedError, match="a vision part of transformers"):
        container(tmp_path, "model.use_hf_vision_model=true")
