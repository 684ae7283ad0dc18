"""Launches of verl: the settings of its actor as options of Megatron-LM.

The first launch is examples/grpo_trainer/run_qwen3moe-30b_megatron_lora.sh of volcengine/verl, without settings of data and
logging.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.api import read_launch
from analyzer.errors import InputError, UnsupportedError
from analyzer.modules.tree import parameters
from analyzer.passes.stages import full_model
from analyzer.specs import TrainingJob

ENGINE = "actor_rollout_ref.actor.megatron."
CONFIG = f"+{ENGINE}override_transformer_config."
SETTINGS = [
    "--config-path=config", "--config-name=ppo_megatron_trainer.yaml", "algorithm.adv_estimator=grpo",
    "data.max_prompt_length=1024", "data.max_response_length=1024", "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.rollout.n=4",
    f"{ENGINE}tensor_model_parallel_size=2", f"{ENGINE}pipeline_model_parallel_size=2", f"{ENGINE}context_parallel_size=2",
    f"{ENGINE}expert_model_parallel_size=4", f"{ENGINE}expert_tensor_parallel_size=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
    f"{CONFIG}recompute_method=uniform", f"{CONFIG}recompute_granularity=full", f"{CONFIG}recompute_num_layers=1",
    "trainer.n_gpus_per_node=8", "trainer.nnodes=2",
]  # fmt: skip


def job_of(*more: str, without: str = "-") -> TrainingJob:
    settings = [word for word in SETTINGS if without not in word] if without != "-" else SETTINGS
    return read_launch(["-m", "verl.trainer.main_ppo", *settings, *more], environ={}, folder=Path("/nowhere")).job


def test_settings_of_the_actor_are_options_of_megatron() -> None:
    job = job_of()
    parallel = job.parallel
    assert (parallel.world_size, parallel.nodes) == (16, 2)
    assert (parallel.tensor, parallel.pipeline, parallel.context, parallel.expert, parallel.expert_tensor) == (2, 2, 2, 4, 1)
    assert parallel.sequence_parallel
    assert job.optimizer.distributed
    assert (job.recompute.granularity, job.recompute.method, job.recompute.num_layers) == ("full", "uniform", 1)
    assert (job.batch.micro_batch_size, job.batch.global_batch_size, job.batch.seq_length) == (2, 64, 2048)
    assert job.model.moe is not None
    assert (job.model.num_layers, job.model.hidden_size, job.model.moe.num_experts) == (48, 2048, 128)
    assert job.model.attention_backend == "flash"


def test_a_dynamic_batch_is_one_sequence_of_all_its_tokens() -> None:
    """verl packs up to ppo_max_token_len_per_gpu tokens for each context-parallel rank."""
    job = job_of("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192")
    assert (job.batch.micro_batch_size, job.batch.seq_length) == (1, 16384)
    longest = ("data.max_prompt_length=1024", "data.max_response_length=3072")
    packed = job_of("actor_rollout_ref.actor.use_dynamic_bsz=True", *longest)
    assert packed.model.sample_length == 4096, "samples attend to themselves, and are counted with the longest length"


def test_what_is_not_counted_is_stated() -> None:
    assert "own_field" in " ".join(job_of(f"{CONFIG}own_field=7").unknown)
    assert "critic" not in " ".join(job_of().not_counted)
    assert "critic" in " ".join(job_of("algorithm.adv_estimator=gae").not_counted)
    assert "critic" in " ".join(job_of("critic.enable=True").not_counted)
    assert "critic" not in " ".join(job_of("algorithm.adv_estimator=gae", "critic.enable=False").not_counted)


def critic_of(*more: str) -> TrainingJob:
    """The critic of examples/ppo_trainer/run_qwen3_8b_megatron.sh."""
    settings = [
        "algorithm.adv_estimator=gae", "actor_rollout_ref.model.path=Qwen/Qwen3-8B", "critic.model.path=Qwen/Qwen3-8B",
        "actor_rollout_ref.actor.ppo_mini_batch_size=128", "critic.megatron.tensor_model_parallel_size=2",
        "critic.megatron.pipeline_model_parallel_size=2", "critic.ppo_max_token_len_per_gpu=24576", "model_engine=megatron",
        "data.max_prompt_length=1024", "data.max_response_length=3072", "trainer.n_gpus_per_node=8", *more,
    ]  # fmt: skip
    actor = read_launch(["-m", "verl.trainer.main_ppo", *settings], environ={}, folder=Path("/nowhere")).job
    (found,) = (job for _, _, job in actor.tuning.in_turns)
    return found


def test_a_critic_has_a_layout_of_its_own_and_a_value_for_each_token() -> None:
    """Without 151,936 × 4,096 logits: 7,568,409,600 parameters of Qwen3-8B, and a row of 4,096."""
    found = critic_of()
    assert (found.parallel.world_size, found.parallel.tensor, found.parallel.pipeline) == (8, 2, 2)
    assert sum(each.full_numel for each in parameters(full_model(found))) == 8_190_735_360 - 151_936 * 4_096 + 4_096
    assert found.model.value_head


def test_the_trainer_overwrites_the_tokens_of_a_critic() -> None:
    """trainer_base.py: `max_token_len_per_gpu = critic_cfg.ppo_infer_max_token_len_per_gpu`, 32768 by default; 128 samples of 4096
    tokens on two replicas are eight microbatches."""
    assert (critic_of().batch.seq_length, critic_of().batch.microbatches) == (32768, 8)
    assert critic_of("critic.ppo_infer_max_token_len_per_gpu=8192").batch.seq_length == 8192
    assert critic_of("trainer.use_v1=False").batch.seq_length == 24576


def test_a_critic_that_megatron_refuses_is_named() -> None:
    with pytest.raises(InputError, match=r"^the critic Qwen/Qwen3-8B: is refused \(--tensor-model-parallel-size"):
        critic_of("critic.megatron.tensor_model_parallel_size=3")


def test_other_engines_are_refused() -> None:
    words = ["-m", "verl.trainer.main_ppo", "actor_rollout_ref.model.path=Qwen/Qwen3-8B"]
    with pytest.raises(UnsupportedError, match=r"^verl: .*strategy=megatron"):
        read_launch(words, environ={}, folder=Path("/nowhere"))
    words = ["-m", "verl_mlite.launch", "verl.trainer.sft_trainer", "engine=mlite", "model.path=Qwen/Qwen3-8B", "engine.pp=4"]
    with pytest.raises(UnsupportedError, match=r"^verl: trains with Megatron Lite"):
        read_launch(words, environ={}, folder=Path("/nowhere"))


@pytest.mark.parametrize(
    ("more", "without", "named"),
    [
        ((), "model.path", "actor_rollout_ref.model.path"),
        (("trainer.nnodes=two",), "-", "trainer.nnodes"),
        (("actor_rollout_ref.model.path=nobody/nothing",), "-", "--info-model"),
    ],
)
def test_invalid_settings_name_the_setting(more: tuple[str, ...], without: str, named: str) -> None:
    with pytest.raises(InputError) as error:
        job_of(*more, without=without)
    assert error.value.option == named


def test_the_world_of_the_command_line_takes_precedence() -> None:
    assert job_of("--info-world-size", "32").parallel.world_size == 32


def test_the_phases_beside_the_update_are_read() -> None:
    job = job_of()
    assert job.tuning.objective == "reinforcement"
    assert {phase.name for phase in job.tuning.phases} == {"log-probabilities", "rollout", "reference", "refit"}
    assert job.withheld == job.not_counted == ()


def test_settings_of_the_optimizer_are_options() -> None:
    """`_resolve_override_ddp_config` of verl: gradients are reduced in the dtype of the main gradients."""
    optimizer = "actor_rollout_ref.actor.optim."
    job = job_of(f"{optimizer}use_precision_aware_optimizer=True", f"{optimizer}main_grads_dtype=bf16")
    assert job.optimizer.precision_aware
    assert job.precision.gradients == "bf16"
    assert job_of().precision.gradients == "fp32"
    assert not job_of(f"{ENGINE}use_distributed_optimizer=False").optimizer.distributed


def test_adapters_of_verl_are_recorded() -> None:
    model = "actor_rollout_ref.model.lora."
    adapter = job_of(f"{model}rank=32", f"{model}alpha=64", f"{model}target_modules=[linear_qkv,linear_proj]").tuning.adapter
    assert adapter is not None
    assert (adapter.rank, adapter.alpha, adapter.targets) == (32, 64, ("linear_qkv", "linear_proj"))


def test_settings_of_adapters_reach_bridge() -> None:
    """`create_peft` of Megatron-Bridge takes every field of the class of `lora.type` (peft/utils.py)."""
    model = "actor_rollout_ref.model.lora."
    words = (
        f"{model}rank=32",
        f"{model}dropout=0.1",
        f"+{model}sequence_parallel_input_regather=True",
        f"{model}exclude_modules=[]",
    )
    adapter = job_of(*words).tuning.adapter
    assert adapter is not None
    assert (adapter.dropout, adapter.regathers, adapter.excluded) == (0.1, True, ())
    other = job_of(*words, f"{model}type=dora").tuning.adapter
    assert other is not None
    assert not other.regathers


def test_a_file_with_all_settings_is_read(tmp_path: Path) -> None:
    pytest.importorskip("omegaconf")
    file = tmp_path / "config.yaml"
    file.write_text(
        "actor_rollout_ref:\n"
        "  model: {path: Qwen/Qwen3-8B}\n"
        "  actor:\n"
        "    strategy: megatron\n"
        "    ppo_mini_batch_size: 32\n"
        "    ppo_micro_batch_size_per_gpu: 1\n"
        "    megatron: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2, sequence_parallel: true}\n"
        "  rollout: {n: 8}\n"
        "data: {max_prompt_length: 1024, max_response_length: 3072}\n"
        "algorithm: {adv_estimator: grpo}\n"
        "trainer: {nnodes: 2, n_gpus_per_node: 8}\n"
    )
    job = read_launch([str(file), "trainer.nnodes=1"], environ={}, folder=tmp_path).job
    assert (job.parallel.world_size, job.parallel.tensor, job.parallel.pipeline) == (8, 4, 2)
    assert (job.batch.micro_batch_size, job.batch.global_batch_size, job.batch.seq_length) == (1, 256, 4096)


def test_settings_that_change_memory_are_named() -> None:
    job = job_of(f"{ENGINE}qat.enable=true", "actor_rollout_ref.model.mtp.enable=True", f"{ENGINE}router_replay.mode=R3")
    reason = next(each for each in job.withheld if "effect on memory" in each)
    assert f"{ENGINE}qat.enable" in reason
    assert "actor_rollout_ref.model.mtp.enable" in reason
    assert "router_replay" not in reason


def test_packed_microbatches_are_as_many_as_the_longest_sequences_fill() -> None:
    """16 × 4 samples of 2048 tokens in microbatches of 8192 × 2 (context) tokens: 8, for 16 / (2 × 2 × 2) replicas."""
    job = job_of("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192")
    assert job.batch.global_batch_size == 8


def test_full_sharding_has_the_defaults_of_megatron_bridge() -> None:
    """`create_ddp_config`: all states are sharded unless the launch says otherwise. CUDA_DEVICE_MAX_CONNECTIONS is not checked."""
    words = [
        "-m", "verl.trainer.sft_trainer", "engine=megatron", "model.path=Qwen/Qwen2.5-7B", "engine.use_megatron_fsdp=True",
        "+engine.override_transformer_config.gradient_accumulation_fusion=False",
    ]  # fmt: skip
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    found = read_launch(words, environ=environ, folder=Path("/nowhere")).job
    assert found.fsdp is not None
    assert found.fsdp.strategy == "optim_grads_params"
    given = [*words, "+engine.override_ddp_config.data_parallel_sharding_strategy=optim"]
    other = read_launch(given, environ=environ, folder=Path("/nowhere")).job
    assert other.fsdp is not None
    assert other.fsdp.strategy == "optim"


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        ("lokr", "", "'lokr' is no adapter of Megatron-Bridge; use one of lora, vlm_lora, canonical_lora, dora"),
        ("dora", "dropout_position=post", "is post, which DoRA refuses"),
    ],
)
def test_adapters_that_bridge_refuses(kind: str, more: str, says: str) -> None:
    """`create_peft` (peft/utils.py) and `DoRA.__post_init__` (peft/dora.py) of Megatron-Bridge."""
    model = "actor_rollout_ref.model.lora."
    words = (f"{model}rank=16", f"+{model}type={kind}", *([f"+{model}{more}"] if more else []))
    with pytest.raises(InputError) as refused:
        job_of(*words)
    assert says in str(refused.value)


def test_adapters_of_parts_for_images_get_no_verdict() -> None:
    model = "actor_rollout_ref.model.lora."
    assert "vlm lora" in " ".join(job_of(f"{model}rank=16", f"+{model}type=vlm_lora").withheld)
