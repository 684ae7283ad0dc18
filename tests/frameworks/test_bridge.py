"""Containers of Megatron-Bridge. The YAML is written as `ConfigContainer.to_yaml` does: megatron/training/config/yaml_utils.py."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import analyzer
from allocator_hook.step.supported import check_supported
from analyzer.errors import InputError, UnsupportedError
from analyzer.frameworks.bridge.model_fields import flat
from analyzer.specs import AdapterSpec, TrainingJob
from tests.frameworks.files import batch, job, layout, write

MODEL = """
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  vocab_size: 128256
  should_pad_vocab: false
  make_vocab_size_divisible_by: 128
  share_embeddings_and_output_weights: false
  add_bias_linear: false
  gated_linear_unit: true
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
  attention_backend: {_target_: megatron.core.transformer.enums.AttnBackend, _call_: true, _args_: [1], _name_: flash}
  params_dtype: {_target_: torch.bfloat16, _call_: false}
  normalization: RMSNorm
  position_embedding_type: rope
  hidden_dropout: 0.0
  attention_dropout: 0.0
  seq_length: 4096
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 4
  context_parallel_size: 1
  sequence_parallel: true
  recompute_granularity: selective
  recompute_modules: [core_attn]
  bf16: false
  fp8: null
"""
CONFIG = f"""
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider{MODEL}
optimizer:
  _target_: megatron.bridge.training.config.OptimizerConfig
  optimizer: adam
  lr: 0.0003
  use_distributed_optimizer: true
  use_precision_aware_optimizer: true
  main_grads_dtype: {{_target_: torch.float32, _call_: false}}
  exp_avg_dtype: {{_target_: torch.bfloat16, _call_: false}}
  exp_avg_sq_dtype: {{_target_: torch.bfloat16, _call_: false}}
ddp: {{_target_: x.DistributedDataParallelConfig, grad_reduce_in_fp32: false, use_distributed_optimizer: true}}
train: {{_target_: x.TrainingConfig, micro_batch_size: 1, global_batch_size: 128, train_iters: 10}}
dataset: {{_target_: x.GPTDatasetConfig, seq_length: 4096}}
tokenizer: {{_target_: x.TokenizerConfig, tokenizer_type: NullTokenizer, vocab_size: 128256}}
mixed_precision: bf16_mixed
comm_overlap: {{_target_: x.CommOverlapConfig, tp_comm_overlap: true, overlap_param_gather: false}}
peft: null
"""
WORLD = ("--info-world-size", "16")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {"config.yaml": CONFIG})
    return tmp_path


def test_a_dumped_container_is_read(folder: Path) -> None:
    found = job(folder, "config.yaml", *WORLD)
    assert layout(found) == (16, 2, 2, 1, 1, 2)
    assert found.parallel.virtual_pipeline == 4
    assert batch(found) == (1, 128, 4096)
    assert (found.model.num_layers, found.model.hidden_size, found.model.num_query_groups) == (32, 4096, 8)
    assert found.model.padded_vocab_size == 128256
    assert found.model.attention_backend == "flash"
    assert not found.model.bias_linear
    assert found.withheld == ()


def test_mixed_precision_is_applied(folder: Path) -> None:
    """bf16_mixed sets bf16 in the model, and gradients in fp32 although the container has them in bf16."""
    found = job(folder, "config.yaml", *WORLD)
    assert (found.precision.parameters, found.precision.gradients) == ("bf16", "fp32")


def test_a_recipe_with_fp8_is_applied(folder: Path) -> None:
    """bf16_with_fp8_current_scaling_mixed: tensorwise scaling, FP8 parameters, and one layer in BF16 at both ends."""
    found = job(folder, "config.yaml", "mixed_precision=bf16-with-fp8-current-scaling-mixed", *WORLD, "--info-gpu", "H100-80GB")
    assert found.precision.fp8 is not None
    assert found.precision.fp8.recipe == "tensorwise"


def test_states_of_the_optimizer_have_their_dtypes(folder: Path) -> None:
    found = job(folder, "config.yaml", *WORLD)
    assert found.optimizer.precision_aware
    assert (found.optimizer.exp_avg_dtype, found.optimizer.exp_avg_sq_dtype) == ("bf16", "bf16")


def test_comm_overlap_is_applied(folder: Path) -> None:
    """Gradients overlap unless comm_overlap says otherwise; tensor-parallel overlap needs sequence parallelism."""
    found = job(folder, "config.yaml", *WORLD)
    assert found.optimizer.overlap_grad_reduce
    assert not found.optimizer.overlap_param_gather
    assert found.flags.tp_comm_overlap
    assert not job(folder, "config.yaml", "model.sequence_parallel=false", *WORLD).flags.tp_comm_overlap


def test_packed_sequences_have_their_size(folder: Path) -> None:
    found = job(folder, "config.yaml", "dataset.offline_packing_specs={packed_sequence_size: 8192}", *WORLD)
    assert found.batch.seq_length == 8192


def test_fields_that_are_left_out_have_the_defaults_of_the_provider(folder: Path) -> None:
    """`GPTModelProvider` (models/gpt_provider.py) and `TransformerConfig`, whose fusions are off; Megatron-LM's options are on."""
    left_out = job(folder, "config.yaml", *WORLD).model
    assert (left_out.rope_fusion, left_out.bias_activation_fusion, left_out.bias_dropout_fusion) == (False, False, False)
    assert left_out.cross_entropy == "native"
    fused = job(folder, "config.yaml", "model.apply_rope_fusion=true", "model.bias_activation_fusion=true", *WORLD).model
    assert (fused.rope_fusion, fused.bias_activation_fusion, fused.bias_dropout_fusion) == (True, True, False)


@pytest.mark.parametrize(
    ("field", "release"),
    [("", "0.16.1"), ("use_mup", "0.17.1"), ("moe_paged_stash", "0.18.2"), ("mtp_detach_heads", "0.19.0")],
)
def test_the_newest_field_shows_the_release_of_megatron_core(folder: Path, field: str, release: str) -> None:
    """Fields of `TransformerConfig` by release (core/transformer/transformer_config.py). A dump has all of them."""
    more = [f"model.{field}=false"] if field else []
    assert job(folder, "config.yaml", *more, *WORLD).megatron == release


def test_dora_with_dropout_after_its_projections_is_refused(folder: Path) -> None:
    """`DoRA.__post_init__` (peft/dora.py) asserts it, also without dropout."""
    peft = "peft={_target_: megatron.bridge.peft.dora.DoRA, dim: 16, dropout_position: post}"
    with pytest.raises(InputError, match=r"peft\.dropout_position: is post, which DoRA refuses"):
        job(folder, "config.yaml", peft, *WORLD)


def test_adapters_are_named(folder: Path) -> None:
    peft = "peft={_target_: megatron.bridge.peft.lora.VLMLoRA, dim: 16, alpha: 32, target_modules: [linear_qkv]}"
    found = job(folder, "config.yaml", peft, *WORLD)
    assert found.tuning.adapter is not None
    assert (found.tuning.adapter.kind, found.tuning.adapter.rank, found.tuning.adapter.targets) == ("vlm_lora", 16, ("linear_qkv",))
    assert found.withheld == ("peft.dim=16 trains adapters, which are not modelled as vlm lora",)


def adapters_of(folder: Path, kind: str, targets: str) -> AdapterSpec | None:
    """The adapters of a configuration that can have them."""
    peft = f"peft={{_target_: megatron.bridge.peft.{kind}, dim: 16, target_modules: [{targets}]}}"
    found = job(folder, "config.yaml", peft, "comm_overlap.tp_comm_overlap=false", *WORLD)
    assert found.withheld == ()
    return found.model.adapters


def test_magnitudes_are_modelled(folder: Path) -> None:
    spec = AdapterSpec(rank=16, targets=("linear_qkv", "linear_fc2"), method="dora")
    assert adapters_of(folder, "dora.DoRA", "linear_fc2, linear_qkv") == spec


def test_adapters_of_parts_of_layers_are_modelled(folder: Path) -> None:
    spec = AdapterSpec(rank=16, targets=("linear_qkv", "linear_proj", "linear_fc1"), method="canonical")
    targets = "linear_q, linear_k, linear_v, linear_fc1_up, linear_fc1_gate, linear_proj"
    assert adapters_of(folder, "canonical_lora.CanonicalLoRA", targets) == spec


@pytest.mark.parametrize(("targets", "fault"), [("linear_q, linear_k", "linear_v has none"), ("linear_qkv", "refuses linear_qkv")])
def test_adapters_of_some_parts_are_refused(folder: Path, targets: str, fault: str) -> None:
    """`LoRALinearSplitQKV.forward` calls the adapters of all three; `__post_init__` refuses the name of the layer."""
    with pytest.raises(InputError, match=fault):
        adapters_of(folder, "canonical_lora.CanonicalLoRA", targets)


def test_adapters_of_lora_are_modelled(folder: Path) -> None:
    peft = "peft={_target_: megatron.bridge.peft.lora.LoRA, dim: 16, alpha: 32, target_modules: [linear_qkv, linear_proj]}"
    found = job(folder, "config.yaml", peft, "comm_overlap.tp_comm_overlap=false", *WORLD)
    assert found.withheld == ()
    assert found.model.adapters == AdapterSpec(rank=16, targets=("linear_qkv", "linear_proj"))


def adapters_with(folder: Path, kind: str, settings: str, *words: str) -> TrainingJob:
    peft = f"peft={{_target_: megatron.bridge.peft.{kind}, dim: 16, {settings}}}"
    return job(folder, "config.yaml", peft, "comm_overlap.tp_comm_overlap=false", *words, *WORLD)


def test_inputs_of_adapters_can_be_gathered_again(folder: Path) -> None:
    """A field of `LoRA`, which `DoRA` and `CanonicalLoRA` do not have."""
    setting = "sequence_parallel_input_regather: true"
    found = adapters_with(folder, "lora.LoRA", setting)
    assert (found.withheld, found.model.adapters is not None and found.model.adapters.regathers) == ((), True)
    for kind in ("dora.DoRA", "canonical_lora.CanonicalLoRA"):
        other = adapters_with(folder, kind, setting)
        assert other.withheld == ("peft.sequence_parallel_input_regather: the effect on memory is not known",)
        assert other.tuning.adapter is not None
        assert not other.tuning.adapter.regathers


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("a2a_experimental: true", "a2a_experimental"),
        ("dropout: 0.1, dropout_position: post", "dropout_position=post"),
        ("dropout: 0.0, dropout_position: post", ""),
        ("normalize_moe_lora: true", ""),
        ("lora_A_init_method: kaiming", ""),
    ],
)
def test_settings_of_adapters_that_change_memory_are_named(settings: str, reason: str, folder: Path) -> None:
    """The model has no experts, of which normalize_moe_lora changes the rank."""
    withheld = adapters_with(folder, "lora.LoRA", settings).withheld
    assert withheld == ((f"peft.dim=16 trains adapters, which are not modelled with {reason}",) if reason else ())


EXPERTS = (
    "model.num_moe_experts=64", "model.moe_router_topk=4", "model.moe_ffn_hidden_size=512", "model.moe_grouped_gemm=true",
    "model.expert_model_parallel_size=4", "model.moe_token_dispatcher_type=alltoall",
)  # fmt: skip


def test_the_rank_of_experts_is_divided_by_those_of_a_token(folder: Path) -> None:
    """`get_effective_lora_dim` (peft/utils.py)."""
    found = adapters_with(folder, "lora.LoRA", "normalize_moe_lora: true", *EXPERTS)
    assert found.withheld == ()
    assert found.model.adapters is not None
    assert [found.model.adapters.rank_of(experts=each) for each in (False, True)] == [16, 4]
    with pytest.raises(InputError, match=r"a rank of 16 cannot be divided by the 3 experts of a token \(normalize_moe_lora\)"):
        adapters_with(folder, "lora.LoRA", "normalize_moe_lora: true", *EXPERTS, "model.moe_router_topk=3")


def test_the_rank_of_experts_that_tensor_parallel_ranks_split_is_not_modelled(folder: Path) -> None:
    """`align_expert_dim_for_tp` (peft/utils.py) rounds the rank of fc1 up, and not that of fc2."""
    found = adapters_with(folder, "lora.LoRA", "normalize_moe_lora: true", *EXPERTS, "model.expert_tensor_parallel_size=2")
    assert "normalize_moe_lora" in " ".join(found.withheld)


def test_packed_samples_are_recorded_as_one_sequence(folder: Path) -> None:
    """Their length changes the time only."""
    found = job(folder, "config.yaml", "dataset.offline_packing_specs={packed_sequence_size: 8192}", *WORLD)
    assert found.model.sample_length == 512
    check_supported(found)


def test_an_unknown_setting_of_adapters_is_named(folder: Path) -> None:
    assert adapters_with(folder, "lora.LoRA", "rank_pattern: {x: 8}").withheld == (
        "peft.rank_pattern: the effect on memory is not known",
    )


@pytest.mark.parametrize(
    ("precision", "named"),
    [
        ("bf16_mixed", False),
        ("{bf16: true, fp8: hybrid, fp8_recipe: tensorwise, fp8_param_gather: true}", False),
        ("{bf16: true, fp8: hybrid, fp8_recipe: tensorwise, fp8_param_gather: false}", True),
    ],
)
def test_copies_of_weights_are_kept_only_with_fp8_and_weights_in_16_bit(precision: str, named: bool, folder: Path) -> None:
    """Transformer Engine's layers read weights that are stored in FP8 themselves (`get_weight_workspace`)."""
    words = ("model.disable_parameter_transpose_cache=true", f"mixed_precision={precision}", "--info-gpu", "H100-80GB")
    withheld = job(folder, "config.yaml", *words, *WORLD).withheld
    assert withheld == (("model.disable_parameter_transpose_cache: the effect on memory is not known",) if named else ())


def test_the_former_name_of_captured_parts_replaces_their_default(folder: Path) -> None:
    """`TransformerConfig.__post_init__` takes cuda_graph_scope if cuda_graph_modules has its default, "full"."""
    graphs = ("model.cuda_graph_impl=transformer_engine", "model.cuda_graph_modules=full", "model.cuda_graph_scope=[attn]")
    found = job(folder, "config.yaml", *graphs, *WORLD).graphs
    assert found is not None
    assert found.scope == ("attn",)


def test_fields_of_features_that_are_off_have_no_effect(folder: Path) -> None:
    """A dumped container has all fields: defaults of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig."""
    words = (
        "model.cuda_graph_impl=none",
        "model.cuda_graph_modules=[full]",
        "model.num_moe_experts=null",
        "model.moe_router_topk=2",
        "model.moe_dispatch_fwd_dtype=bf16",
        "model.enable_mhc_connections=false",
        "model.mhc_num_residual_streams=4",
        "model.gdp_num_householder=3",
        "optimizer.muon_tp_mode=duplicated",
        "optimizer.soap_shampoo_beta=0.9",
        "optimizer.optimizer_cpu_offload=false",
        "optimizer.optimizer_offload_fraction=0.0",
        "ddp.use_megatron_fsdp=false",
        "ddp.megatron_fsdp_main_params_dtype={_target_: torch.float32, _call_: false}",
        "ddp.fsdp_double_buffer=false",
    )
    assert job(folder, "config.yaml", *words, *WORLD) == job(folder, "config.yaml", *WORLD)
    assert job(folder, "config.yaml", "model.enable_mhc_connections=true", *WORLD).withheld


def test_unknown_fields_get_no_verdict(folder: Path) -> None:
    found = job(folder, "config.yaml", "model.own_cache=3", *WORLD)
    assert found.withheld == ("model.own_cache: the effect on memory is not known",)


@pytest.mark.parametrize(
    ("word", "kind", "fault"),
    [
        ("model._target_=x.Gemma4DenseProvider", UnsupportedError, "builds a model of another kind"),
        ("mixed_precision=own", InputError, "'own' is not known"),
        ("model.activation_func=tanh", UnsupportedError, "tanh with a gate is no option of Megatron-LM"),
        ("train=null", InputError, "has no model or no train"),
    ],
)
def test_faults_are_named(folder: Path, word: str, kind: type[Exception], fault: str) -> None:
    with pytest.raises(kind, match=fault):
        job(folder, "config.yaml", word, *WORLD)


class Backend(enum.Enum):
    """An enum as AttnBackend."""

    flash = 1


def silu(value: float) -> float:
    """A function as torch.nn.functional.silu."""
    return value


@dataclass
class Provider:
    """A provider with the fields that the test needs."""

    num_layers: int = 24
    hidden_size: int = 1024
    ffn_hidden_size: int = 4096
    num_attention_heads: int = 16
    num_query_groups: int | None = None
    vocab_size: int = 32000
    should_pad_vocab: bool = True
    make_vocab_size_divisible_by: int = 128
    share_embeddings_and_output_weights: bool = False
    gated_linear_unit: bool = True
    activation_func: Any = silu
    attention_backend: Backend = Backend.flash
    normalization: str = "RMSNorm"
    position_embedding_type: str = "rope"
    add_bias_linear: bool = False
    seq_length: int = 2048
    tensor_model_parallel_size: int = 2
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = True
    bf16: bool = True
    _private: object = None


@dataclass
class Optimizer:
    """OptimizerConfig."""

    optimizer: str = "adam"
    use_distributed_optimizer: bool = True


@dataclass
class Gradients:
    """DistributedDataParallelConfig."""

    grad_reduce_in_fp32: bool = True
    use_distributed_optimizer: bool = True


@dataclass
class Train:
    """TrainingConfig."""

    micro_batch_size: int = 2
    global_batch_size: int = 16
    train_iters: int = 10


@dataclass
class Container:
    """A container as ConfigContainer."""

    model: Provider = field(default_factory=Provider)
    optimizer: Optimizer = field(default_factory=Optimizer)
    ddp: Gradients = field(default_factory=Gradients)
    train: Train = field(default_factory=Train)
    mixed_precision: str = "bf16_mixed"


def test_a_container_object_is_analyzed() -> None:
    """32000 tokens are padded to a multiple of 128 × 2. 24 layers of a SwiGLU model without biases, counted by hand."""
    report = analyzer.analyze_config(Container(), gpu="H100-80GB", gpus=8, environ={})
    found = report.job
    assert layout(found) == (8, 2, 1, 1, 1, 2)
    assert batch(found) == (2, 16, 2048)
    assert found.model.attention_backend == "flash"
    assert found.model.padded_vocab_size == 32000
    layer = 4 * 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024
    assert report.parameters == 24 * layer + 2 * 32000 * 1024 + 1024
    assert report.verdict.fits


def test_a_container_knows_its_replicas() -> None:
    config = Container()
    config.data_parallel_size = 2  # type: ignore[attr-defined]
    assert analyzer.analyze_config(config, environ={}).job.parallel.world_size == 4


def test_a_mapping_is_read_as_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    report = analyzer.analyze_config(yaml.safe_load(CONFIG), gpus=16, environ={})
    assert report.job.parallel.pipeline == 2


def test_anything_else_is_refused() -> None:
    with pytest.raises(InputError, match="is of type int"):
        analyzer.analyze_config(3)


def test_the_fields_of_a_model_may_be_those_of_its_transformer(tmp_path: Path) -> None:
    """`BridgeGPTModelConfig` has the TransformerConfig in `transformer`, and its own fields beside it."""
    own = ("vocab_size", "should_pad_vocab", "make_vocab_size_divisible_by", "share_embeddings_and_output_weights", "seq_length")
    lines = [line for line in MODEL.strip("\n").splitlines() if line]
    outside = [line for line in lines if line.strip().startswith((*own, "position_embedding_type"))]
    inside = [f"  {line}" for line in lines if line not in outside]
    nested = "\n".join(["", *outside, "  transformer:", "    _target_: x.BridgeTransformerConfig", *inside, ""])
    write(tmp_path, {"flat.yaml": CONFIG, "nested.yaml": CONFIG.replace(MODEL, nested)})
    flat, found = (job(tmp_path, name, *WORLD) for name in ("flat.yaml", "nested.yaml"))
    assert found.withheld == ()
    assert (found.model, found.parallel, found.batch) == (flat.model, flat.parallel, flat.batch)


def test_what_is_not_modelled_is_left_out_with_its_name(folder: Path) -> None:
    """A container lists all fields, so that one that is not modelled does not hide the answer. --info-strict refuses it."""
    words = ("config.yaml", "mixed_precision=bf16_with_nvfp4_mixed", *WORLD, "--info-gpu", "B200", "--info-megatron", "0.17.1")
    found = job(folder, *words)
    assert "--fp4-param-gather is not counted" in found.withheld
    assert any(each.startswith("--fp4-param-gather is left out: parameters stored in FP4") for each in found.unknown)
    assert found.precision.fp8 is not None
    assert (found.precision.fp8.recipe, found.precision.fp8.stored_parameters) == ("nvfp4", False)
    later = job(folder, *words[:-1], "0.19.0")
    assert later.withheld == ()
    assert later.precision.fp8 is not None
    assert later.precision.fp8.stored_parameters
    with pytest.raises(UnsupportedError, match="fp4-param-gather"):
        job(folder, *words, "--info-strict")


def test_what_megatron_refuses_is_not_left_out(folder: Path) -> None:
    with pytest.raises(InputError, match="cannot be split"):
        job(folder, "config.yaml", "model.num_layers=31", *WORLD)


def test_gathers_are_overlapped_only_with_reductions(folder: Path) -> None:
    """Megatron-LM's own script asserts overlap_grad_reduce for overlap_param_gather; Megatron-Bridge does not."""
    words = ("comm_overlap={overlap_grad_reduce: false, overlap_param_gather: true}", *WORLD)
    found = job(folder, "config.yaml", *words)
    assert not found.optimizer.overlap_grad_reduce
    assert not found.optimizer.overlap_param_gather


@pytest.mark.parametrize(("given", "read"), [([1, 1, 1, 0] * 2, 4), ([1, 0, 1, 1], [1, 0, 1, 1]), (3, 3)])
def test_a_periodic_list_of_linear_attention_is_a_number(given: object, read: object) -> None:
    assert flat({"linear_attention_freq": given})["linear_attention_freq"] == read


def test_mtp_layers_of_a_hybrid_follow_its_pattern() -> None:
    found = flat({"hybrid_layer_pattern": "M*ME", "mtp_hybrid_override_pattern": "*E", "mtp_num_layers": 2})
    assert (found["hybrid_layer_pattern"], found["mtp_hybrid_override_pattern"]) == ("M*ME/*E/*E", None)
    again = flat({**found, "mtp_hybrid_override_pattern": "*E"})  # `HybridModelProvider.finalize` leaves the pattern of MTP layers
    assert again["hybrid_layer_pattern"] == found["hybrid_layer_pattern"]


def test_experts_are_not_split_by_tensor_parallelism_unless_it_is_said(folder: Path) -> None:
    """`_set_moe_expert_tensor_parallel_default`: 1 with expert parallelism, where Megatron-LM takes the tensor-parallel size."""
    experts = ("+model.num_moe_experts=8", "+model.moe_router_topk=2", "+model.expert_model_parallel_size=4")
    assert layout(job(folder, "config.yaml", *experts, *WORLD))[4:] == (4, 1)
    assert layout(job(folder, "config.yaml", *experts, "+model.expert_tensor_parallel_size=2", *WORLD))[4:] == (4, 2)


def test_the_callback_of_the_documentation_prints_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code block runs with stand-ins for torch and Megatron-Bridge, whose callbacks get a context with state.cfg."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
    code = next(block for block in text.split("```python\n")[1:] if "class PrintVerdict" in block).partition("```")[0]
    gpu = SimpleNamespace(total_memory=80 * 2**30)
    torch = ModuleType("torch")
    torch.distributed = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 8)  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(get_device_properties=lambda _index: gpu)  # type: ignore[attr-defined]
    callbacks = ModuleType("megatron.bridge.training.callbacks")
    callbacks.Callback = object  # type: ignore[attr-defined]
    names = ("megatron", "megatron.bridge", "megatron.bridge.training")
    for module in (torch, callbacks, *map(ModuleType, names)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    started: list[Any] = []

    def pretrain(config: Container, _forward: object, callbacks: list[Any]) -> None:
        for each in callbacks:
            each.on_train_start(SimpleNamespace(state=SimpleNamespace(cfg=config)))
        started.append(config)

    config = Container()
    exec(code, {"pretrain": pretrain, "config": config, "forward_step": None})
    assert started == [config]
    report = analyzer.analyze_config(Container(), gpus=8, environ={}, options="--info-gpu-memory 81920MiB")
    assert capsys.readouterr().out == f"predicted: {report.ranks[0].memory.device_bytes / 2**30:.1f} GiB, fits\n"
