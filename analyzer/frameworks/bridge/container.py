"""A ConfigContainer of Megatron-Bridge (NVIDIA-NeMo/Megatron-Bridge), dumped to YAML or in Python.

Sources: megatron/bridge/training/{config,setup,mixed_precision,comm_overlap}.py, models/gpt_provider.py and models/mla_provider.py,
August 2026. A container that was dumped before the training has not yet applied `mixed_precision` and `comm_overlap`; applying
them twice changes nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.frameworks.adapters import bridge_adapter, frozen_parts, kind_of, unknown_fields
from analyzer.frameworks.bridge.compressed import read_compressed
from analyzer.frameworks.bridge.defaults import release_of_fields, with_defaults
from analyzer.frameworks.bridge.model_fields import flat, layout_of_muon, quantized_with_muon
from analyzer.frameworks.bridge.variants import check_packing, read_variant
from analyzer.frameworks.bridge.vision import PROVIDERS, image_tokens, read_vision
from analyzer.frameworks.containers import TARGET, Tree, from_yaml
from analyzer.frameworks.options import Fields, Words, is_true
from analyzer.frameworks.prepare import Input, Output
from analyzer.frameworks.recognize import YAML
from analyzer.frameworks.yaml_files import keys_of, override, read_tree
from analyzer.launch.launchers.world import World
from analyzer.launch.megatron_words import LayoutSettings, MegatronWords
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.options.choose_release import LaterRelease
from analyzer.specs.fine_tuning import FineTuning
from analyzer.specs.release import release_number
from analyzer.specs.vision_part import ModelParts
from analyzer.units import natural, round_up

_OTHER: Final = re.compile(
    r"VL|Vl|Omni|Audio|ASR|T5|Llava|MIMO|Mimo|Diffusion|DiT|Flux|Wan|Distillation|Gemma3n|Gemma4Dense|Exaone"
)
"""Parts of the names of providers of models that are no GPT, or have layers that are not modelled."""
_OTHER_KEYS: Final = ("vision_config", "vision_transformer_config", "encoder_num_layers", "teacher")
_ACTIVATIONS: Final[Mapping[tuple[str, bool], tuple[str, ...]]] = {
    ("silu", True): ("--swiglu",),
    ("swish", True): ("--swiglu",),
    ("quick_gelu", True): ("--quick-geglu",),
    ("fast_gelu", True): ("--quick-geglu",),
    ("squared_relu", False): ("--squared-relu",),
    ("relu2", False): ("--squared-relu",),
    ("gelu", False): (),
    ("gelu_tanh", False): (),
    ("fast_gelu", False): (),
}
"""By activation_func and gated_linear_unit. No kernel fuses fast_gelu, and its gate has the tensors of an unfused quick GELU."""

_BF16: Final[Tree] = {"bf16": True, "fp16": False, "grad_reduce_in_fp32": True}
_FP16: Final[Tree] = {"fp16": True, "bf16": False, "grad_reduce_in_fp32": False}
_DELAYED: Final[Tree] = {
    "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max",
    "fp8_param_gather": True,
}  # fmt: skip
_MXFP8: Final[Tree] = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
_BLOCKS: Final[Tree] = {"fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_param_gather": False}
_NVFP4: Final[Tree] = {"fp8": None, "fp4": "e2m1", "fp4_recipe": "nvfp4", "fp8_param_gather": False, "fp4_param_gather": True}


def _edges(first: int, last: int) -> Tree:
    """Layers in BF16 at both ends."""
    return {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": first, "num_layers_at_end_in_bf16": last}


def _current(layers: int, recipe: str = "tensorwise") -> Tree:
    return {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param_gather": True, **_edges(layers, layers)}


MIXED_PRECISION: Final[Mapping[str, Tree]] = {
    "bf16_mixed": _BF16,
    "fp16_mixed": _FP16,
    "bf16_with_fp8_delayed_scaling_mixed": _BF16 | _DELAYED,
    "fp16_with_fp8_delayed_scaling_mixed": _FP16 | _DELAYED,
    "bf16_with_mxfp8_mixed": _BF16 | _MXFP8,
    "fp16_with_mxfp8_mixed": _FP16 | _MXFP8,
    "bf16_with_fp8_current_scaling_mixed": _BF16 | _current(1),
    "fp16_with_fp8_current_scaling_mixed": _FP16 | _current(1),
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": _BF16 | _current(2),
    "nanov2_bf16_with_fp8_current_scaling_mixed": _BF16 | _current(2, "blockwise"),
    "bf16_with_fp8_subchannel_scaling_mixed": _BF16 | _BLOCKS,
    "fp16_with_fp8_subchannel_scaling_mixed": _FP16 | _BLOCKS,
    "bf16_with_nvfp4_mixed": _BF16 | _NVFP4,
    "nemotron_3_super_bf16_with_nvfp4_mixed": _BF16 | _NVFP4 | _edges(0, 14),
}
"""What the named recipes of mixed_precision.py set, as far as memory depends on it."""
_PRECISION_OF_MODEL: Final = (
    "bf16", "fp16", "fp8", "fp8_recipe", "fp8_param", "fp8_param_gather", "fp4", "fp4_recipe", "fp4_param", "fp4_param_gather",
    "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_amax_history_len",
    "fp8_amax_compute_algo", "fp8_dot_product_attention", "fp8_multi_head_attention",
)  # fmt: skip
_PRECISION_OF_GRADIENTS: Final = ("grad_reduce_in_fp32", "reuse_grad_buf_for_mxfp8_param_ag")
_OVERLAP_OF_MODEL: Final = (
    "tp_comm_overlap", "defer_embedding_wgrad_compute", "wgrad_deferral_limit", "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
)  # fmt: skip
_BUCKET: Final = 128 * 1024 * 1024
"""Elements of a bucket that comm_overlap sets with data parallelism."""
_OVERLAP_OF_GRADIENTS: Final = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": _BUCKET}
"""What comm_overlap sets with replicas and the distributed optimizer, unless it is given (`_get_optimizer_overlap_cfgs`)."""
_MODEL_READ: Final = frozenset({
    TARGET, "activation_func", "gated_linear_unit", "vocab_size", "should_pad_vocab", "make_vocab_size_divisible_by", "seq_length",
    "num_query_groups", "bf16", "fp16", "fp32", "params_dtype", "virtual_pipeline_model_parallel_size", "fp8_param",
    "fp4_param", "padded_vocab_size", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "tp_comm_overlap_cfg", "attention_backend", "cuda_graph_scope", "cuda_graph_modules", "cpu_offloading",
    "fp8_dot_product_attention",
})  # fmt: skip
_COPIES: Final = "disable_parameter_transpose_cache"
_MODEL_NO_EFFECT: Final = frozenset({
    "hf_model_id", "hf_model_revision", "parallel_output", "scatter_embedding_sequence_parallel", "generation_config",
    "logit_dtype",
    "mtp_enabled", "transformer_layer_spec", "use_transformer_engine_full_layer_spec", "use_arbitrary_attention_mask",
    "mamba_stack_spec", "hybrid_stack_spec", "position_ids", "rotary_scaling_factor", "rope_scaling_factor", "rope_scaling",
    "rotary_base", "rotary_percent", "rotary_base_local", "rotary_interleaved", "seq_len_interpolation_factor", "mscale",
    "mscale_all_dim", "beta_fast", "beta_slow", "original_max_position_embeddings", "yarn_rotary_scaling_factor",
    "rope_type", "init_method",
    "output_layer_init_method", "embedding_init_method", "embedding_init_method_std", "init_method_std", "layernorm_epsilon",
    "tokenizer", "cache_dir", "trust_remote_code", "tp_comm_split_ag", "moe_router_bias_update_rate", "moe_aux_loss_coeff",
    "moe_router_topk_scaling_factor", "mtp_loss_scaling_factor",  "barrier_with_L1_time", "timers",
    "inference_rng_tracker", "inference_sampling_seed", "moe_per_layer_logging", "is_hybrid_model", "config_logger_dir",
     "async_tensor_model_parallel_allreduce", "moe_extended_tp",
    "moe_router_topk_limited_devices", "dist_train", "query_pre_attn_scalar", "use_cpu_initialization",
    "symmetric_ar_type", "log_max_attention_logit", "keep_mtp_spec_in_bf16", "mamba_chunk_size",
    "megatron_core_extras", "extra_checkpoint_metadata", "moe_token_dropping",   "tp_comm_bootstrap_backend",
    "calculate_per_token_loss", "kitchen_attention_backend", "flash_decode",
  "finalize",
})  # fmt: skip
"""Fields of a provider without an effect on the memory of a training step."""
_WORLD: Final = "--info-world-size"
_IN_STEP: Final = "overlap_param_gather_with_optimizer_step"
_OPTIMIZER_READ: Final = frozenset(
    {TARGET, "bf16", "fp16", "params_dtype", "use_distributed_optimizer", "overlap_param_gather", "lr", "min_lr"}
)
_OPTIMIZER_NO_EFFECT: Final = frozenset({
    "barrier_with_L1_time", "timers", "config_logger_dir", "loss_scale", "initial_loss_scale", "min_loss_scale",
    "loss_scale_window", "hysteresis", "log_num_zeros_in_grad", "store_param_remainders", "apply_wd_to_qk_layernorm",
    "pin_cpu_grads", "pin_cpu_params", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "clip_grad",
    "grad_norm_skip_threshold",
    "decoupled_lr", "decoupled_min_lr", "decoupled_weight_decay", "fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag",
    "optimizer_type",
})  # fmt: skip
_DDP_READ: Final = frozenset({
    TARGET, "grad_reduce_in_fp32", "use_distributed_optimizer", "data_parallel_sharding_strategy", "fp8_param_gather",
    "fp4_param_gather", "check_for_nan_in_grad", "check_for_large_grads", "preserve_fp32_weights", "average_in_collective",
    "align_param_gather", "param_name_patterns_for_fp32_local_accumulation", "suggested_communication_unit_size",
    "keep_fp8_transpose_cache", "fsdp_double_buffer", "outer_dp_sharding_strategy", "overlap_param_gather", "overlap_grad_reduce",
    "megatron_fsdp_version", "megatron_fsdp_use_decoupled_grad", "gradient_reduce_div_fusion", "pad_buckets_for_high_nccl_busbw",
    "fsdp_all_gather_in_start_param_sync", "disable_symmetric_registration", "num_distributed_optimizer_instances",
})  # fmt: skip
_FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "cuda_graph_impl": ("cuda_graph_",),
    "use_megatron_fsdp": ("megatron_fsdp_", "fsdp_"),
    "optimizer_cpu_offload": ("optimizer_offload_", "overlap_cpu_optimizer", "use_torch_optimizer_for_cpu"),
    "enable_mhc_connections": ("mhc_",),
    "num_moe_experts": ("moe_",),
    "cpu_offloading": ("cpu_offloading_",),
}
"""By field that turns a feature on: the beginnings of fields that only matter then."""
_OF_OPTIMIZERS: Final = ("muon_", "soap_", "adaptive_muon_", "lion_", "dion_")
"""Beginnings of fields of one optimizer, which its name contains."""
_TRAIN: Final = (
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "train_samples",
    "rampup_batch_size",
    "empty_unused_memory_level",
)


def read(launch: Input) -> Output:
    """The training of a dumped container. Raises InputError for a command that starts a recipe, with the remedy."""
    name = launch.found.program
    if not name.endswith(YAML):
        from analyzer.frameworks.bridge.recipes import refusal

        raise refusal(name, launch.found.words, launch.found.rest, folder=launch.folder)
    tree = read_tree(launch.folder / name, name)
    rest = override(tree, launch.found.words, name)
    if rest:
        raise InputError(rest[0], f"is no override of {name}", "write KEY=VALUE, such as train.micro_batch_size=1")
    plain = from_yaml(tree)
    variables = {key: str(value) for key, value in _table(plain, "env_vars").items() if key != TARGET}
    return Output(own_words(plain, gpus=given_gpus(launch.found.rest, launch.environ)), environ=variables)


def given_gpus(words: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """The number of GPUs that --info-world-size or the environment gives; None if neither does."""
    pairs = itertools.pairwise((*words, ""))
    values = [after if word == _WORLD else word.partition("=")[2] for word, after in pairs if word.partition("=")[0] == _WORLD]
    return natural(values[-1] if values else environ.get("WORLD_SIZE", ""))


def own_words(config: Tree, *, gpus: int | None = None) -> MegatronWords:
    """The options of Megatron-LM for a container. Raises UnsupportedError for a model that is no GPT or Mamba hybrid.

    `gpus`: the number of GPUs, if it is known; whether gradients are overlapped depends on it.
    """
    model, optimizer, ddp = (dict(_table(config, name)) for name in ("model", "optimizer", "ddp"))
    if not model or not _table(config, "train"):
        raise InputError("the configuration", "has no model or no train", "give the complete ConfigContainer of Megatron-Bridge")
    _refuse_other(model)
    vision = read_vision(model)
    frozen = frozen_parts(model, "model")
    variant = read_variant(vision.model)
    compressed = read_compressed(with_defaults(flat(variant.model)))
    model = compressed.model
    data_parallel = natural(str(config.get("data_parallel_size")))
    found = Words()
    precision = _mixed_precision(config)
    model |= {name: precision[name] for name in _PRECISION_OF_MODEL if name in precision}
    ddp |= {name: precision[name] for name in _PRECISION_OF_GRADIENTS if name in precision}
    replicas = _replicas(config, model, gpus)
    _overlap(_table(config, "comm_overlap"), model, ddp, replicas)
    fields, release = Fields(load_catalogue().newest), compressed.release or release_of_fields(model)
    fp8_weights, not_known = quantized_with_muon(model, ddp, str(optimizer.get("optimizer")))
    found.unknown += [*variant.unknown, *not_known]
    found.add(_model(model, fields))
    found.add(_optimizer(optimizer, ddp, fields))
    found.words += layout_of_muon(str(optimizer.get("optimizer")), release)
    found.add(_gradients(ddp, optimizer, fields))
    found.add(fields.words({name: _table(config, "train").get(name) for name in _TRAIN}))
    found.words += ["--use-torch-fsdp2"] if is_true(_table(config, "dist").get("use_torch_fsdp2")) else []
    length, notes = _sequence(config, model)
    check_packing(variant.parts, packed=bool(notes))
    found.words += length
    found.words += _vocabulary(model, _table(config, "tokenizer"), release)
    peft = _table(config, "peft")
    kind = kind_of(str(peft.get(TARGET)))
    adapter = bridge_adapter(peft, "peft", kind) if peft else None
    training = vision.training and replace(
        vision.training, image_tokens=image_tokens(_table(config, "model"), _table(config, "dataset"))
    )
    found.unknown += unknown_fields(peft, "peft", kind)
    tuning = FineTuning(adapter=adapter, frozen=frozen, packed=bool(notes), vision=training)
    return MegatronWords(
        words=tuple(found.words),
        world=_world(model, data_parallel),
        notes=("The launch is one of Megatron-Bridge: its ConfigContainer is read as options of Megatron-LM.", *notes),
        statements=tuple(_statements(found, config, replicas)),
        unknown=tuple(found.unknown),
        withheld=found.withheld(),
        tuning=tuning,
        parts=ModelParts(
            vision=vision.weights,
            compressed=compressed.parts,
            fp8_attention=is_true(model.get("fp8_dot_product_attention")),
            fp8_weights=fp8_weights,
        ).joined(variant.parts),
        release=release,
        validated=False,
        layout=LayoutSettings("model.", overlap="comm_overlap." if _table(config, "comm_overlap") else ""),
    )


def _table(tree: Mapping[str, Any], name: str) -> Tree:
    return keys_of(tree.get(name), name)


def _refuse_other(model: Tree) -> None:
    name = str(model.get(TARGET, "")).rpartition(".")[2]
    if name in PROVIDERS:
        return
    key = next((each for each in _OTHER_KEYS if model.get(each)), None)
    if _OTHER.search(name) or key:
        fault = f"{name or key} builds a model of another kind than GPTs and Mamba hybrids, which are read from a container"
        remedy = "give that of a text model, or of a vision-language model of Qwen, GLM-4.5V, Gemma 3 or Ministral 3"
        raise UnsupportedError("model", fault, remedy)


def _mixed_precision(config: Tree) -> Tree:
    """The fields of mixed_precision. Raises InputError for an unknown name."""
    given = config.get("mixed_precision")
    if given is None:
        return {}
    if isinstance(given, str):
        named = MIXED_PRECISION.get(given.replace("-", "_"))
        if named is None:
            raise InputError("mixed_precision", f"{given!r} is not known", f"use one of {', '.join(MIXED_PRECISION)}")
        return dict(named)
    return {key: value for key, value in given.items() if key != TARGET} if isinstance(given, dict) else {}


def _overlap(overlap: Tree, model: Tree, ddp: Tree, data_parallel: int | None) -> None:
    """Applies comm_overlap to the fields of the model and of the gradients, as `CommOverlapConfig.setup` does."""
    if not overlap:
        return
    for name in _OVERLAP_OF_MODEL:
        model[name] = overlap.get(name)
    if (natural(str(model.get("tensor_model_parallel_size"))) or 1) < 2 or not is_true(model.get("sequence_parallel")):
        model["tp_comm_overlap"] = False
    if not is_true(model.get("defer_embedding_wgrad_compute")):
        model["wgrad_deferral_limit"] = None
    if not is_true(ddp.get("use_distributed_optimizer")):
        return
    alone: Tree = dict.fromkeys(_OVERLAP_OF_GRADIENTS, False) | {"bucket_size": None}
    for name, default in (alone if data_parallel == 1 else _OVERLAP_OF_GRADIENTS).items():
        given = overlap.get(name)
        ddp[name] = default if given is None else given


def _replicas(config: Tree, model: Tree, gpus: int | None) -> int | None:
    """The data-parallel size that comm_overlap is applied with. `runtime_config_update` writes it into comm_overlap."""
    for table in (config, _table(config, "comm_overlap")):
        if given := natural(str(table.get("data_parallel_size"))):
            return given
    return None if gpus is None else max(1, gpus // _model_parallel(model))


def _model_parallel(model: Tree) -> int:
    """The GPUs of a replica."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return math.prod(natural(str(model.get(name))) or 1 for name in sizes)


def _in_use(section: Tree) -> Tree:
    """The fields of a section without those of features that are off."""
    off = tuple(beginnings for switch, beginnings in _FEATURES.items() if switch in section and not _is_on(section[switch]))
    prefixes = tuple(prefix for beginnings in off for prefix in beginnings)
    optimizer = str(section.get("optimizer", ""))
    prefixes += tuple(prefix for prefix in _OF_OPTIMIZERS if prefix.strip("_") not in optimizer)
    return {name: value for name, value in section.items() if not name.startswith(prefixes) or name in _FEATURES}


def _is_on(value: object) -> bool:
    return value not in (None, False, 0, "none", "")


def _model(model: Tree, fields: Fields) -> Words:
    """The options of the model and of its layout."""
    found = Words([*_activation(model)])
    model = _in_use(model)
    left_out = {*_MODEL_READ, *_MODEL_NO_EFFECT, *(() if _copies_weights(model) else (_COPIES,))}
    kept = {name: value for name, value in model.items() if name not in left_out}
    found.add(fields.words(kept, prefix="model.", without_defaults=True))
    found.words += ["--bf16"] if is_true(model.get("bf16")) else ["--fp16"] if is_true(model.get("fp16")) else []
    heads, groups = model.get("num_attention_heads"), model.get("num_query_groups")
    if groups and groups != heads and not is_true(model.get("multi_latent_attention")):
        found.words += ["--group-query-attention", "--num-query-groups", str(groups)]
    layout = model.get("pipeline_model_parallel_layout")
    if not layout:
        for name, flag in (
            ("virtual_pipeline_model_parallel_size", "--num-virtual-stages-per-pipeline-rank"),
            ("num_layers_in_first_pipeline_stage", "--decoder-first-pipeline-num-layers"),
            ("num_layers_in_last_pipeline_stage", "--decoder-last-pipeline-num-layers"),
        ):
            found.words += [flag, str(model[name])] if model.get(name) else []
    modules = model.get("cuda_graph_modules")
    found.words += ["--cuda-graph-modules", *map(str, modules if isinstance(modules, list) else [modules])] if modules else []
    backend = model.get("attention_backend")
    found.words += ["--attention-backend", str(backend)] if backend not in (None, "auto") else []
    for name in ("fp8", "fp4"):
        if model.get(name) and is_true(model.get(f"{name}_param")) and not is_true(model.get(f"{name}_param_gather")):
            found.words.append(f"--{name}-param-gather")
    return found


def _copies_weights(model: Tree) -> bool:
    """Whether layers make FP8 copies of weights in 16 bit, which they can keep for the other microbatches.

    The weight of an output layer in FP8 is in 16 bit always (`TELMHeadColumnParallelLinear`, core 0.18).
    Source: `TransformerEngineBaseModule.get_weight_workspace` of Transformer Engine 2.11.
    """
    if model.get("fp8") and is_true(model.get("fp8_output_proj")):
        return True
    quantized = [name for name in ("fp8", "fp4") if model.get(name)]
    return any(not is_true(model.get(f"{name}_param")) and not is_true(model.get(f"{name}_param_gather")) for name in quantized)


def _activation(model: Tree) -> tuple[str, ...]:
    """The words for activation_func and gated_linear_unit. Raises UnsupportedError for a function that Megatron-LM lacks."""
    gated = is_true(model.get("gated_linear_unit"))
    name = str(model.get("activation_func") or "gelu").rpartition(".")[2]
    words = _ACTIVATIONS.get((name, gated))
    if words is None:
        what = f"{name} with a gate" if gated else name
        raise UnsupportedError("model.activation_func", f"{what} is no option of Megatron-LM", "use silu with a gate, or gelu")
    return words


def _optimizer(optimizer: Tree, ddp: Tree, fields: Fields) -> Words:
    optimizer = _in_use(optimizer)
    left_out = {*_OPTIMIZER_READ, *_OPTIMIZER_NO_EFFECT, *(() if _overlaps_gathers(ddp, optimizer) else (_IN_STEP,))}
    kept = {name: value for name, value in optimizer.items() if name not in left_out}
    if not is_true(optimizer.get("use_precision_aware_optimizer")):
        kept = {name: value for name, value in kept.items() if not name.endswith("_dtype")}
    if kept.get("muon_fp32_matmul_prec") == "highest":  # of PyTorch; Megatron-LM's own script has no word for it
        kept["muon_fp32_matmul_prec"] = "high"
    found = fields.words(kept, prefix="optimizer.", without_defaults=True)
    found.words += ["--use-distributed-optimizer"] if _is_distributed(ddp, optimizer) else []
    return found


def _gradients(ddp: Tree, optimizer: Tree, fields: Fields) -> Words:
    ddp = _in_use(ddp)
    kept = {name: value for name, value in ddp.items() if name not in _DDP_READ}
    found = fields.words(kept, prefix="ddp.", without_defaults=True)
    found.words += ["--overlap-grad-reduce"] if is_true(ddp.get("overlap_grad_reduce")) else []
    found.words += ["--overlap-param-gather"] if _overlaps_gathers(ddp, optimizer) else []
    found.words += _checkpoint_format(ddp, optimizer)
    if is_true(ddp.get("use_megatron_fsdp")) and ddp.get("data_parallel_sharding_strategy"):
        found.words += ["--data-parallel-sharding-strategy", str(ddp["data_parallel_sharding_strategy"])]
    if is_true(ddp.get("fsdp_double_buffer")):
        found.words.append("--fsdp-double-buffer")
    instances = natural(str(ddp.get("num_distributed_optimizer_instances"))) or 1
    found.words += ["--num-distributed-optimizer-instances", str(instances)] if instances > 1 else []
    reduced = is_true(ddp.get("grad_reduce_in_fp32"))
    found.words.append("--accumulate-allreduce-grads-in-fp32" if reduced else "--grad-reduce-in-bf16")
    return found


def _overlaps_gathers(ddp: Tree, optimizer: Tree) -> bool:
    """Whether gathers of parameters are overlapped. Without overlapped reductions Megatron-LM's own script refuses them."""
    gathers = is_true(ddp.get("overlap_param_gather")) or is_true(optimizer.get("overlap_param_gather"))
    return gathers and is_true(ddp.get("overlap_grad_reduce")) and _is_distributed(ddp, optimizer)


def _is_distributed(ddp: Tree, optimizer: Tree) -> bool:
    return is_true(optimizer.get("use_distributed_optimizer")) or is_true(ddp.get("use_distributed_optimizer"))


def _checkpoint_format(ddp: Tree, optimizer: Tree) -> list[str]:
    """The format of checkpoints without which Megatron-LM's own script refuses an option. It has no effect on memory."""
    if is_true(ddp.get("use_megatron_fsdp")):
        return ["--ckpt-format", "fsdp_dtensor"]
    return ["--ckpt-format", "torch"] if is_true(optimizer.get(_IN_STEP)) else []


def _sequence(config: Tree, model: Tree) -> tuple[list[str], list[str]]:
    """The length of a sequence, and the assumption about it. Raises InputError without one."""
    dataset = _table(config, "dataset")
    packed = _table(dataset, "offline_packing_specs").get("packed_sequence_size")
    if packed is None:
        packed = _table(dataset, "packed_sequence_specs").get("packed_sequence_size")
    length = natural(str(packed)) or next(
        filter(
            None,
            (natural(str(each)) for each in (dataset.get("seq_length"), dataset.get("sequence_length"), model.get("seq_length"))),
        ),
        None,
    )
    if not length:
        raise InputError("dataset.seq_length", "is missing", "add it, or model.seq_length")
    notes = [f"A microbatch is one packed sequence of {length} tokens."] if natural(str(packed)) else []
    skipped = is_true(dataset.get("skip_getting_attention_mask_from_dataset", True))
    positions = max(length, natural(str(model.get("max_position_embeddings"))) or 0)
    words = ["--seq-length", str(length), "--max-position-embeddings", str(positions)]
    return [*words, *(["--no-create-attention-mask-in-dataloader"] if skipped else [])], notes


def _vocabulary(model: Tree, tokenizer: Tree, release: LaterRelease | None) -> list[str]:
    """The rows of the embedding: given, or those of the tokenizer (`_validate_and_set_vocab_size`).

    NullTokenizer of Megatron-LM adds a token up to core 0.17.
    """
    tensor = natural(str(model.get("tensor_model_parallel_size"))) or 1
    divisible_by = natural(str(model.get("make_vocab_size_divisible_by"))) or 128
    given = model.get("vocab_size")
    size = natural(str(given))
    if given is not None and not size:
        raise InputError(
            "model.vocab_size", f"{given!r} is not a number of 1 or more", "write model.vocab_size=128256, for example"
        )
    if size:
        rows = round_up(size, divisible_by * tensor) if is_true(model.get("should_pad_vocab")) else size
        added = release is None or release_number(release.release) < release_number("0.18")
        return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size - added), "--padded-vocab-size", str(rows)]
    words = ["--make-vocab-size-divisible-by", str(divisible_by)]
    for name in ("tokenizer_type", "tokenizer_model", "vocab_size"):
        value = tokenizer.get(name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value else []
    return words


def _world(model: Tree, data_parallel: int | None) -> World | None:
    """The GPUs, if the container says how many replicas there are."""
    if data_parallel is None:
        return None
    return World.of(data_parallel * _model_parallel(model))


def _statements(found: Words, config: Tree, replicas: int | None) -> Iterator[str]:
    yield from found.statements()
    if _table(config, "comm_overlap") and replicas is None:
        yield "comm_overlap: data parallelism is assumed, with overlapped gradients and parameters, unless it turns them off."
    if is_true(_table(config, "model").get("restore_modelopt_state")):
        yield "model.restore_modelopt_state: the model is counted without quantization."
