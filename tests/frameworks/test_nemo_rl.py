"""Configurations of NeMo-RL. Keys and their meaning: nemo_rl/models/megatron/setup.py and examples/configs of NeMo-RL."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.modules.kinds import ModuleKind
from analyzer.passes.stages import stage_models
from tests.frameworks.files import batch, job, layout, write

pytest.importorskip("omegaconf")

BASE = """
grpo: {num_prompts_per_step: 32}
loss_fn: {reference_policy_kl_penalty: 0.01}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 512
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  precision: bfloat16
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  megatron_cfg:
    enabled: true
    activation_checkpointing: false
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    context_parallel_size: 1
    expert_model_parallel_size: 1
    expert_tensor_parallel_size: 1
    sequence_parallel: false
    bias_activation_fusion: true
    moe_token_dispatcher_type: alltoall
    optimizer: {optimizer: adam, lr: 5.0e-6, adam_eps: 1e-8, use_distributed_optimizer: true, use_precision_aware_optimizer: true}
    distributed_data_parallel_config: {grad_reduce_in_fp32: false, overlap_grad_reduce: true, overlap_param_gather: true}
    peft: {enabled: false, dim: 8}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""
RECIPE = """
defaults: ../base.yaml
policy:
  model_name: meta-llama/Llama-3.1-8B-Instruct
  max_total_sequence_length: 4096
  megatron_cfg:
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 2
    sequence_parallel: true
    activation_checkpointing: true
cluster: {gpus_per_node: 8, num_nodes: 2}
"""


def test_parameters_are_gathered_early_only_if_gradients_are_reduced_early(tmp_path: Path) -> None:
    """NeMo-RL allows both settings, of which Megatron-LM's arguments refuse the first without the second."""
    write(tmp_path, {"base.yaml": BASE.replace("overlap_grad_reduce: true", "overlap_grad_reduce: false")})
    optimizer = job(tmp_path, "base.yaml").optimizer
    assert not optimizer.overlap_grad_reduce
    assert not optimizer.overlap_param_gather


def test_a_freeze_config_is_no_frozen_part_itself(tmp_path: Path) -> None:
    frozen = "freeze_config: {freeze_vision_model: true}"
    write(tmp_path, {"base.yaml": BASE.replace("peft: {", f"{frozen}\n    peft: {{")})
    assert job(tmp_path, "base.yaml").tuning.frozen == ("policy.megatron_cfg.freeze_vision_model",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {"base.yaml": BASE, "recipes/llama.yaml": RECIPE})
    return tmp_path


def test_a_recipe_changes_the_file_that_it_names(folder: Path) -> None:
    """train_mb_tokens is 4096 × 4 tokens, in one packed sequence; full recomputation is uniform, one layer each.

    512 samples of 4096 tokens are 128 packed sequences, for 4 replicas.
    """
    found = job(folder, "recipes/llama.yaml")
    assert layout(found) == (16, 2, 2, 1, 1, 1)
    assert batch(found) == (1, 128, 16384)
    assert (found.model.num_layers, found.model.hidden_size) == (32, 4096)
    assert (found.recompute.granularity, found.recompute.method, found.recompute.num_layers) == ("full", "uniform", 1)
    assert found.precision.gradients == "bf16"
    assert found.optimizer.distributed
    assert found.parallel.sequence_parallel


def test_overrides_take_precedence(folder: Path) -> None:
    words = ("policy.sequence_packing.enabled=false", "++policy.train_micro_batch_size=1", "cluster.num_nodes=4")
    found = job(folder, "recipes/llama.yaml", *words)
    assert batch(found) == (1, 512, 4096)
    assert found.parallel.world_size == 32


def test_the_command_of_a_script_names_the_file(folder: Path) -> None:
    found = job(folder, "examples/run_grpo_math.py", "--config", "recipes/llama.yaml", "cluster.num_nodes=1")
    assert found.parallel.world_size == 8


def test_the_update_alone_gets_no_verdict(folder: Path) -> None:
    found = job(folder, "recipes/llama.yaml")
    assert found.withheld == ()
    assert len(found.not_counted) == 1
    for part in ("GRPO", "log-probabilities", "rollout"):
        assert part in found.not_counted[0]
    assert {phase.name: phase.weights for phase in found.tuning.phases}["reference"] == "swapped"
    assert found.tuning.objective == "reinforcement"


def test_gpus_of_a_separate_rollout_do_not_train(folder: Path) -> None:
    """`policy.generation.colocated.resources.num_nodes` nodes are for the inference engine."""
    words = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.num_nodes=1")
    found = job(folder, "recipes/llama.yaml", *words)
    assert found.parallel.world_size == 8
    assert not next(phase for phase in found.tuning.phases if phase.name == "rollout").on_same_gpus


def test_packed_samples_are_the_longest_that_their_number_is_counted_with(folder: Path) -> None:
    """The global batch fills microbatches with samples of 4,096 tokens, which attend to themselves."""
    packed = ("policy.sequence_packing.train_mb_tokens=16384",)
    assert job(folder, "recipes/llama.yaml", *packed).model.sample_length == 4096
    assert job(folder, "recipes/llama.yaml", *packed, "--info-sample-length", "512").model.sample_length == 512
    padded = ("policy.sequence_packing.enabled=false", "policy.dynamic_batching={enabled: true, train_mb_tokens: 16384}")
    assert job(folder, "recipes/llama.yaml", *padded).model.sample_length is None


def test_samples_of_dpo_are_two_sequences(folder: Path) -> None:
    write(folder, {"dpo.yaml": RECIPE.replace("../base.yaml", "base.yaml") + "dpo: {sft_loss_weight: 0}\n"})
    words = ("~grpo", "policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=1")
    found = job(folder, "dpo.yaml", *words)
    assert batch(found) == (2, 1024, 4096)
    assert found.model.log_probability_loss
    assert not found.withheld
    assert found.tuning.beside == ()


def test_adapters_are_read_and_unknown_keys_get_no_verdict(folder: Path) -> None:
    words = ("policy.megatron_cfg.peft.enabled=true", "policy.megatron_cfg.own_buffer=7")
    found = job(folder, "recipes/llama.yaml", *words)
    assert found.tuning.adapter is not None
    assert (found.tuning.adapter.rank, found.tuning.adapter.kind) == (8, "lora")
    assert found.model.adapters is not None
    assert found.model.adapters.rank == 8
    assert any("policy.megatron_cfg.own_buffer" in reason for reason in found.withheld)
    assert any("policy.megatron_cfg.own_buffer is not known" in each for each in found.unknown)


def test_fp8_and_variables_are_read(folder: Path) -> None:
    words = (
        "policy.megatron_cfg.fp8_cfg={enabled: true, fp8: e4m3, fp8_recipe: blockwise, fp8_param: false}",
        "policy.megatron_cfg.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1",
    )
    found = job(folder, "recipes/llama.yaml", *words, "--info-gpu", "H100-80GB")
    assert found.precision.fp8 is not None
    assert found.precision.fp8.recipe == "blockwise"


def test_another_engine_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="without Megatron-LM"):
        job(folder, "recipes/llama.yaml", "policy.megatron_cfg.enabled=false")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("cluster.num_nodes=0",), "cluster.num_nodes: 0 is not a number of 1 or more"),
        (("policy.train_micro_batch_size=null",), "policy.train_micro_batch_size: is missing"),
        (("--own",), "--own: is no override"),
        (("~policy.model_name",), "policy.model_name: is missing"),
        (("policy.model_name=Follow the guide",), "policy.model_name: 'Follow the guide' is a text in the place of a model; write"),
    ],
)
def test_faults_are_named(folder: Path, words: tuple[str, ...], fault: str) -> None:
    with pytest.raises(InputError) as raised:
        job(folder, "recipes/llama.yaml", *words)
    assert fault in str(raised.value)


def test_a_cycle_of_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.yaml": "defaults: b.yaml\npolicy: {}\n", "b.yaml": "defaults: a.yaml\n"})
    with pytest.raises(InputError, match="includes more than"):
        job(tmp_path, "a.yaml")


def test_unknown_keys_are_errors_with_strict(folder: Path) -> None:
    with pytest.raises(InputError, match="own_buffer: is not known"):
        job(folder, "recipes/llama.yaml", "policy.megatron_cfg.own_buffer=7", "--info-strict")


SUPER = "policy.model_name=nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"


def test_the_depths_of_a_hybrid_have_the_pattern_of_its_configuration(folder: Path) -> None:
    """*E in its config.json (`HybridModelProvider.finalize`). Core 0.18 recomputes hybrids, and 0.19 also those with MTP layers."""
    base = (SUPER, "+policy.megatron_cfg.mtp_num_layers=2", "+policy.megatron_cfg.moe_token_dispatcher_type=alltoall")
    found = job(folder, "recipes/llama.yaml", *base, "policy.megatron_cfg.activation_checkpointing=false")
    assert found.megatron == "0.18.2"
    assert found.model.hybrid is not None
    assert (found.model.mtp_num_layers, found.model.hybrid.mtp_pattern, found.model.hybrid.mtp_repeated) == (2, "*E", False)
    repeated = "+policy.megatron_cfg.mtp_use_repeated_layer=true"
    found = job(folder, "recipes/llama.yaml", *base, repeated, "policy.megatron_cfg.activation_checkpointing=true")
    assert found.model.hybrid is not None
    assert (found.megatron, found.recompute.granularity, found.model.hybrid.mtp_repeated) == ("0.19.0", "full", True)


def test_a_published_hybrid_is_read(folder: Path) -> None:
    """The name of a Mamba hybrid in the catalogue is that of its configuration."""
    found = job(folder, "recipes/llama.yaml", "policy.model_name=nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16")
    assert found.model.hybrid is not None
    assert found.model.num_layers == 52
    assert found.model.mtp_num_layers == 0


def test_adapters_get_some_of_the_keys(tmp_path: Path) -> None:
    """`LoRA` is built with some keys (nemo_rl/models/megatron/setup.py): the others have no effect."""
    peft = "peft: {enabled: true, dim: 8, sequence_parallel_input_regather: true, share_expert_adapters: false}"
    write(tmp_path, {"base.yaml": BASE.replace("peft: {enabled: false, dim: 8}", peft)})
    adapter = job(tmp_path, "base.yaml").tuning.adapter
    assert adapter is not None
    assert (adapter.rank, adapter.regathers, adapter.share_expert_adapters) == (8, False, None)


SFT = "policy: {sequence_packing: {enabled: false}, megatron_cfg: {PLACE}}\n"


@pytest.mark.parametrize(
    ("setting", "counted"),
    [
        ("", True),
        ("defer_fp32_logits: false", True),
        ("defer_fp32_logits: true", False),
        ("mtp_num_layers: 1", False),
    ],
)
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_the_loss_reads_log_probabilities(folder: Path, method: str, setting: str, counted: bool) -> None:
    """`DistributedLogprob` saves probabilities in fp32 of [2, 512, 151936], for the two sequences of DPO of [4, 512, 151936]."""
    text = f"defaults: base.yaml\n{method}: {{max_num_steps: 10}}\n" + SFT.replace("PLACE", setting)
    write(folder, {"one.yaml": text.replace("policy: {", "policy: {train_micro_batch_size: 2, ")})
    found = job(folder, "one.yaml", "~grpo")
    assert found.model.log_probability_loss is counted
    assert any("log-probabilities" in reason for reason in found.withheld) is not counted
    losses = [part for tree in stage_models(found)[-1].trees for _, part in tree.walk() if part.kind is ModuleKind.LOSS]
    saved = sum(each.bytes for part in losses for each in part.saved if each.dtype == "fp32" and len(each.shape) == 3)
    if counted:
        assert saved == 4 * (4 if method == "dpo" else 2) * 512 * 151936
        assert found.tuning.longest_counted


def test_the_loss_of_each_packed_sequence_is_computed_by_itself(folder: Path) -> None:
    """`SequencePackingLossWrapper`: four sequences of at most 512 tokens in a microbatch of 2048. `fuse_loss` computes one loss."""
    write(folder, {"one.yaml": "defaults: base.yaml\nsft: {max_num_steps: 10}\n"})
    found = job(folder, "one.yaml", "~grpo")
    assert (found.model.log_probability_loss, found.model.loss_sequences) == (True, 4)
    assert any("the number of packed samples" in reason for reason in found.withheld)
    assert not found.tuning.longest_counted
    fused = job(folder, "one.yaml", "~grpo", "++policy.sequence_packing.fuse_loss=true")
    assert (fused.model.log_probability_loss, fused.model.loss_sequences) == (True, 0)
    assert not fused.withheld
