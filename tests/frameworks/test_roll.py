"""Configurations of ROLL. Keys: roll/configs, megatron_strategy.py and mcore_adapter/training_args.py of ROLL."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.api import read_launch, report_of
from analyzer.errors import InputError, UnsupportedError
from analyzer.specs.adapters import DEFAULT_TARGETS
from tests.frameworks.files import batch, job, layout, write

pytest.importorskip("omegaconf")

CONFIG = """
defaults:
  - ../config/envs@_here_
pretrain: Qwen/Qwen2.5-7B
prompt_length: 2048
response_length: 4096
adv_estimator: reinforce
num_return_sequences_in_group: 8
actor_train:
  model_args: {dtype: bf16, model_type: ~}
  training_args: {per_device_train_batch_size: 2, gradient_accumulation_steps: 16, learning_rate: 1.0e-6}
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 2
      context_parallel_size: 1
      sequence_parallel: true
      use_distributed_optimizer: true
      recompute_granularity: full
  device_mapping: list(range(0,16))
actor_infer:
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}}
  device_mapping: list(range(0,12))
reference:
  strategy_args: {strategy_name: megatron_infer}
  device_mapping: list(range(0,16))
"""


@pytest.mark.parametrize(("mapping", "same"), [("list(range(12,20))", True), ("list(range(16,24))", False), ("[15]", True)])
def test_a_rollout_on_some_gpus_of_the_training_shares_them(folder: Path, mapping: str, same: bool) -> None:
    found = job(folder, "examples/rlvr/config.yaml", f"actor_infer.device_mapping={mapping!r}")
    assert {phase.on_same_gpus for phase in found.tuning.phases if phase.name in ("rollout", "refit")} == {same}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {"examples/config/envs.yaml": "max_steps: 5\n", "examples/rlvr/config.yaml": CONFIG})
    return tmp_path


def test_a_critic_of_megatron_is_refused_as_by_roll(folder: Path) -> None:
    """`default_value_model_provider`: "megatron value model not implemented". Without GAE there is no critic."""
    critic = "critic={strategy_args: {strategy_name: %s}}"
    with pytest.raises(InputError, match=r"^critic\.strategy_args\.strategy_name: megatron_train is refused by ROLL"):
        job(folder, "examples/rlvr/config.yaml", "adv_estimator=gae", f"+{critic % 'megatron_train'}")
    others = job(folder, "examples/rlvr/config.yaml", "adv_estimator=gae", f"+{critic % 'deepspeed_train'}")
    assert "critic" in " ".join(others.not_counted)
    assert "critic" not in " ".join(job(folder, "examples/rlvr/config.yaml", f"+{critic % 'deepspeed_train'}").not_counted)


def test_the_actor_is_read(folder: Path) -> None:
    """Two sequences in a microbatch, 16 microbatches, and 16 / (2 × 2) replicas: 128 samples of 2048 + 4096 tokens."""
    found = job(folder, "examples/rlvr/config.yaml")
    assert layout(found) == (16, 2, 2, 1, 1, 2)
    assert batch(found) == (2, 128, 6144)
    assert (found.model.num_layers, found.model.hidden_size) == (28, 3584)
    assert (found.recompute.granularity, found.recompute.method, found.recompute.num_layers) == ("full", "uniform", 1)
    assert found.precision.gradients == "bf16"
    assert found.optimizer.distributed


def test_the_phases_beside_the_update_are_read(folder: Path) -> None:
    found = job(folder, "examples/rlvr/config.yaml")
    assert found.tuning.method == "REINFORCE"
    phases = {phase.name: phase.on_same_gpus for phase in found.tuning.phases}
    assert phases == {"log-probabilities": True, "reference": True, "rollout": True, "refit": True}


@pytest.mark.parametrize(("sizes", "gpus"), [("tensor_model_parallel_size: 4", 4), ("expert_model_parallel_size: 1", 1)])
def test_a_reference_model_may_have_a_layout_of_its_own(folder: Path, sizes: str, gpus: int) -> None:
    """Its weights come from host memory: 7,615,616,512 of 16 bit. `infer_batch_size` is 1, and logits are in 16 bit and fp32."""
    words = (f"+reference.strategy_args.strategy_config={{{sizes}}}", "+reference.infer_batch_size=1", "--info-gpu", "H100-80GB")
    found = report_of(read_launch(["examples/rlvr/config.yaml", *words], environ={}, folder=folder))
    reference = next(each for each in found.phases if each.name == "reference")
    weights = reference.states_bytes - max(rank.memory.runtime_bytes for rank in found.ranks)
    assert weights == pytest.approx(7_615_616_512 * 2 / gpus, rel=1e-3)
    assert reference.forward_bytes == 6144 * (152064 // gpus) * 6
    assert found.verdict.state is not None


@pytest.mark.parametrize(
    "words",
    [
        "reference.strategy_args.strategy_name=hf_infer",
        "reference.device_mapping=list(range(0,8))",
        "+reference.strategy_args.strategy_config={pipeline_model_parallel_size: 2, num_layers_in_first_pipeline_stage: 12}",
    ],
)
def test_other_reference_models_are_not_counted(folder: Path, words: str) -> None:
    found = job(folder, "examples/rlvr/config.yaml", "+reference.infer_batch_size=1", words)
    assert any("not the reference model" in each for each in found.not_counted)


@pytest.mark.parametrize(
    ("mapping", "state"), [("list(range(12,16))", "counted"), ("list(range(0,4))", "missing"), ("[16]", "apart")]
)
def test_a_reward_model_is_an_engine_on_gpus_without_the_rollout(folder: Path, mapping: str, state: str) -> None:
    """The rollout is on GPUs 0 to 11: a judge cannot share them. A rule has no GPUs."""
    judge = f"strategy_args: {{strategy_name: vllm, strategy_config: {{gpu_memory_utilization: 0.5}}}}, device_mapping: '{mapping}'"
    words = (
        "+reference.infer_batch_size=1",
        "+actor_train.infer_batch_size=1",
        f"+rewards={{rule: {{world_size: 8}}, judge: {{{judge}}}}}",
    )
    arguments = ["examples/rlvr/config.yaml", *words, "--info-gpu", "H100-80GB"]
    found = report_of(read_launch(arguments, environ={}, folder=folder))
    counted = {each.name: each.engine_bytes for each in found.phases}
    assert counted.get("reward") == (int(0.5 * (found.verdict.capacity_bytes or 0)) if state == "counted" else None)
    assert ("reward model" in found.verdict.withheld) is (state == "missing")
    assert ("reward" in found.verdict.note) is (state == "apart")


def test_the_script_names_folder_and_file(folder: Path) -> None:
    words = (
        "examples/start_rlvr_pipeline.py",
        "--config_path",
        "rlvr",
        "--config_name",
        "config",
        "actor_train.device_mapping=[0,1,2,3]",
    )
    assert job(folder, *words).parallel.world_size == 4


@pytest.mark.parametrize(
    ("key", "tokens", "microbatches", "sample"),
    [
        ("actor_train.use_sequence_packing=true", 2 * 6144, 16, 6144),
        ("actor_train={use_dynamic_batching_in_train: true, max_tokens_per_microbatch_in_train: 8192}", 8192, 24, None),
    ],
)
def test_packed_microbatches_are_one_sequence(folder: Path, key: str, tokens: int, microbatches: int, sample: int | None) -> None:
    """128 samples of 6144 tokens fill the microbatches of 4 replicas."""
    found = job(folder, "examples/rlvr/config.yaml", key)
    assert batch(found) == (1, 4 * microbatches, tokens)
    assert found.model.sample_length == sample


def test_dpo_doubles_the_batch(folder: Path) -> None:
    """roll/pipeline/dpo/dpo_config.py: per_device_train_batch_size *= 2."""
    found = job(folder, "examples/rlvr/config.yaml", "+chosen_key=chosen")
    assert batch(found) == (4, 256, 6144)
    assert found.tuning.objective == "preference"


def test_adapters_are_named(folder: Path) -> None:
    found = job(
        folder, "examples/rlvr/config.yaml", "actor_train.model_args={lora_rank: 32, lora_alpha: 64, lora_target: all-linear}"
    )
    assert found.tuning.adapter is not None
    assert (found.tuning.adapter.rank, found.tuning.adapter.alpha, found.tuning.adapter.targets) == (32, 64, ("all-linear",))
    assert found.model.adapters is not None
    assert found.model.adapters.targets == DEFAULT_TARGETS


def test_other_engines_and_faults_are_named(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="trains with deepspeed_train"):
        job(folder, "examples/rlvr/config.yaml", "actor_train.strategy_args.strategy_name=deepspeed_train")
    with pytest.raises(InputError, match="is no list of GPUs"):
        job(folder, "examples/rlvr/config.yaml", "actor_train.device_mapping=some")


def test_supervised_fine_tuning_has_the_cross_entropy_of_megatron(folder: Path) -> None:
    """`op_compute_language_loss` sums the losses that the model returns; samples are padded to `sequence_length`."""
    lengths = "prompt_length: 2048\nresponse_length: 4096"
    sft = CONFIG.replace("actor_train:", "sft_train:").replace(lengths, "sequence_length: 2048")
    sft = sft[: sft.index("actor_infer:")].replace("adv_estimator: reinforce\nnum_return_sequences_in_group: 8\n", "")
    write(folder, {"examples/rlvr/sft.yaml": sft})
    found = job(folder, "examples/rlvr/sft.yaml")
    assert batch(found) == (2, 128, 2048)
    assert not found.withheld
    assert not found.tuning.longest_counted
