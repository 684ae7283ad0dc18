"""Configurations of Primus. Merging and keys: primus/core/config/yaml_loader.py and primus/core/launcher/parser.py of Primus."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.memory.workspaces import workspaces
from analyzer.passes.stages import stage_models
from tests.frameworks.files import batch, job, layout, write

FILES = {
    "primus/configs/modules/megatron/base.yaml": "bf16: true\nuse_distributed_optimizer: true\nmicro_batch_size: 2\nlr: 1e-5\n",
    "primus/configs/modules/megatron/trainer.yaml": "extends: [base.yaml]\nglobal_batch_size: 16\ndisable_wandb: true\n",
    "primus/configs/models/megatron/small_base.yaml": "num_layers: 2\nhidden_size: 1024\nswiglu: true\nadd_bias_linear: false\n",
    "primus/configs/models/megatron/small.yaml": """
extends:
  - small_base.yaml
num_layers: 24
num_attention_heads: 16
ffn_hidden_size: 4096
untie_embeddings_and_output_weights: true
position_embedding_type: rope
normalization: RMSNorm
tokenizer_type: Llama3Tokenizer
tokenizer_model: meta-llama/Llama-3.1-8B
sequence_parallel: true
""",
    "examples/pretrain.yaml": """
work_group: ${PRIMUS_TEAM:amd}
modules:
  pre_trainer:
    framework: megatron
    config: trainer.yaml
    model: ${PRIMUS_MODEL:small}.yaml
    overrides:
      micro_batch_size: 4
      global_batch_size: 128
      seq_length: ${PRIMUS_SEQ_LENGTH:4096}
      max_position_embeddings: 4096
      tensor_model_parallel_size: ${PRIMUS_TP:1}
      pipeline_model_parallel_size: 2
      recompute_granularity: full
      recompute_method: block
      recompute_num_layers: 3
      enable_primus_turbo: false
      use_turbo_attention: true
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, FILES)
    return tmp_path


def test_files_are_merged_in_order(folder: Path) -> None:
    """The model file replaces what it extends, and overrides replace the module's micro-batch size."""
    found = job(folder, "examples/pretrain.yaml")
    assert layout(found) == (8, 1, 2, 1, 1, 1)
    assert batch(found) == (4, 128, 4096)
    assert (found.model.num_layers, found.model.hidden_size, found.model.ffn_hidden_size) == (24, 1024, 4096)
    assert not found.model.bias_linear
    assert (found.recompute.granularity, found.recompute.method, found.recompute.num_layers) == ("full", "block", 3)
    assert found.optimizer.distributed
    assert found.withheld == ()


def test_variables_and_overrides_of_the_command_line(folder: Path) -> None:
    environ = {"PRIMUS_TP": "2", "NNODES": "4", "GPUS_PER_NODE": "8", "PRIMUS_SEQ_LENGTH": "2048"}
    found = job(folder, "examples/pretrain.yaml", "--micro_batch_size", "1", "recompute_num_layers=2", environ=environ)
    assert layout(found)[:3] == (32, 2, 2)
    assert batch(found) == (1, 128, 2048)
    assert found.recompute.num_layers == 2


def test_the_fewest_nodes_are_assumed(folder: Path) -> None:
    """Experts over 8 ranks in each of 4 stages need 32 GPUs."""
    words = (
        "num_experts=16",
        "expert_model_parallel_size=8",
        "pipeline_model_parallel_size=4",
        "moe_token_dispatcher_type=alltoall",
    )
    found = job(folder, "examples/pretrain.yaml", *words)
    assert found.parallel.world_size == 32
    assert any("4 nodes of 8 GPUs are assumed" in each for each in found.assumptions)


def test_keys_of_primus_that_change_memory_are_named(folder: Path) -> None:
    cache = ("no_fp8_weight_transpose_cache=true", "fp8_recipe=blockwise", "own_cache=1")
    words = ("enable_primus_turbo=true", "use_turbo_gemm=true", "fp8=hybrid", *cache)
    found = job(folder, "examples/pretrain.yaml", *words)
    reasons = "; ".join(found.withheld)
    for key in ("no_fp8_weight_transpose_cache", "own_cache", "use_turbo_gemm"):
        assert key in reasons
    assert "use_turbo_attention" not in reasons


IN_FP8 = ("pipeline_model_parallel_size=1", "fp8=hybrid", "fp8_recipe=tensorwise", "--info-gpu", "MI300X")


def copies_of_weights(folder: Path, *words: str) -> int:
    """Bytes of the copies in FP8, of a launch with a verdict."""
    found = job(folder, "examples/pretrain.yaml", *IN_FP8, *words)
    assert not found.withheld
    listed = workspaces(found, stage_models(found)[0].trees)
    return next(each.bytes for each in listed if each.name == "FP8 copies of weights")


def test_transposed_weights_are_not_kept(folder: Path) -> None:
    """One copy of a weight is transposed for a data gradient, and freed after it (`_Linear.backward` of ROCm/TransformerEngine)."""
    layer = 1024 * (3 * 1024 + 1024 + 2 * 4096 + 4096)
    kept, freed = (copies_of_weights(folder, f"no_fp8_weight_transpose_cache={flag}") for flag in ("false", "true"))
    assert kept - freed == 24 * layer - 2 * 4096 * 1024


def test_copies_of_whole_weights_beside_sharded_ones_have_no_verdict(folder: Path) -> None:
    """Primus documents that Llama 70B in FP8 runs on 8 MI300X, where copies of all weights would not fit."""
    words = ("use_torch_fsdp2=true", "use_distributed_optimizer=false", "fp8=hybrid", "gradient_accumulation_fusion=false")
    found = job(folder, "examples/pretrain.yaml", *words, "pipeline_model_parallel_size=1", "--info-gpu", "MI300X")
    assert any("use_torch_fsdp2" in each for each in found.withheld)


def test_kernels_of_experts_have_no_effect_on_dense_models(folder: Path) -> None:
    """`PrimusTurboSpecProvider` has its grouped linear layers in MoE layers only."""
    accepted = ("moe_router_dtype=fp32", "enable_primus_turbo=true")
    words = ("use_turbo_grouped_gemm=true", "use_turbo_deepep=true", "turbo_sync_free_moe_stage=3", *accepted)
    experts = ("num_experts=16", "expert_model_parallel_size=8", "moe_token_dispatcher_type=alltoall")
    assert not job(folder, "examples/pretrain.yaml", *words).withheld
    reasons = "; ".join(job(folder, "examples/pretrain.yaml", *words, *experts).withheld)
    named = (*(word.partition("=")[0] for word in words if word not in accepted), "moe_use_fused_router_with_aux_score")
    assert all(word in reasons for word in named)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("turbo_sync_free_moe_stage=1", "needs enable_primus_turbo"),
        ("enable_primus_turbo=true turbo_sync_free_moe_stage=2", "needs use_turbo_grouped_gemm"),
        ("use_turbo_grouped_gemm=true moe_use_legacy_grouped_gemm=true", "cannot be used with moe_use_legacy_grouped_gemm"),
        ("use_turbo_deepep=true", "needs a router in fp32"),
        ("use_turbo_deepep=true moe_router_dtype=fp32 moe_shared_expert_overlap=true", "moe_shared_expert_overlap"),
        (
            "use_turbo_deepep=true moe_router_dtype=fp32 expert_model_parallel_size=16 num_experts=32 turbo_deepep_num_cu=64",
            "is more than 32",
        ),
    ],
)
def test_what_primus_refuses_of_its_kernels(folder: Path, words: str, fault: str) -> None:
    """`validate_args_on_rocm`, which does not look at the number of experts."""
    with pytest.raises(InputError, match=fault):
        job(folder, "examples/pretrain.yaml", *words.split())


def test_sequential_experts_keep_no_transposes(folder: Path) -> None:
    """They are linear layers of their own, and those of a grouped layer have no such option: 12 weights of 16 experts, less one."""
    experts = ("num_experts=16", "moe_ffn_hidden_size=1024", "moe_token_dispatcher_type=alltoall", "add_bias_linear=false")
    freed = {
        grouped: copies_of_weights(folder, *experts, f"moe_grouped_gemm={grouped}", "no_fp8_weight_transpose_cache=true")
        for grouped in ("true", "false")
    }
    layer, expert = 1024 * (3 * 1024 + 1024), 3 * 1024 * 1024
    kept = copies_of_weights(folder, *experts, "moe_grouped_gemm=false")
    assert kept - freed["false"] == 24 * (layer + 16 * expert) - 3 * 1024 * 1024
    assert kept - freed["true"] >= 24 * layer - 3 * 1024 * 1024 > kept - freed["true"] - 2**20


def test_another_framework_is_refused(folder: Path) -> None:
    write(folder, {"titan.yaml": "modules: {pre_trainer: {framework: torchtitan, config: a.yaml, model: b.yaml}}\n"})
    with pytest.raises(UnsupportedError, match="trains with torchtitan"):
        job(folder, "titan.yaml")


def test_a_missing_checkout_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"pretrain.yaml": FILES["examples/pretrain.yaml"]})
    with pytest.raises(InputError, match="PRIMUS_PATH"):
        job(tmp_path, "pretrain.yaml")


def test_a_variable_without_a_value_is_named(folder: Path) -> None:
    write(folder, {"a.yaml": "modules: {pre_trainer: {framework: megatron, overrides: {num_layers: '${OWN_SIZE}'}}}\n"})
    with pytest.raises(InputError, match="uses the environment variable OWN_SIZE"):
        job(folder, "a.yaml")


def test_layers_that_only_primus_has_are_refused(folder: Path) -> None:
    """The layer specifications of primus/backends/megatron/core/models/hybrid have gated delta nets beside latent attention."""
    spec = "spec=[primus.backends.megatron.core.models.hybrid.hybrid_mamba_mla_layer_specs, gdn_hybrid_stack_spec]"
    with pytest.raises(UnsupportedError, match="gdn_hybrid_stack_spec of Primus has layers of its own"):
        job(folder, "examples/pretrain.yaml", spec)


def test_an_fp4_recipe_of_primus_is_left_out(folder: Path) -> None:
    """Megatron-LM has no mxfp4: the launch is counted in bf16, without a verdict."""
    found = job(folder, "examples/pretrain.yaml", "fp4=e2m1", "fp4_recipe=mxfp4")
    assert found.precision.parameters == "bf16"
    assert found.precision.fp8 is None
    assert any("fp4_recipe" in reason for reason in found.withheld)
