"""Configurations of Primus (AMD-AGI/Primus) for Megatron-LM: keys are destinations of Megatron's options.

Sources: primus/core/launcher/parser.py, primus/core/config/yaml_loader.py and primus/configs/modules/megatron of Primus, August
2026. The values of a module are those of its `config`, its `model` and its `overrides`, the last ones taking precedence. Each file
may extend others, and `${NAME:default}` is a variable of the environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import lcm
from pathlib import Path
from typing import Any, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.frameworks.options import Fields, Words, is_true
from analyzer.frameworks.prepare import Input, Output
from analyzer.frameworks.recognize import YAML
from analyzer.frameworks.yaml_files import Files, Tree, included, merge, normal, of_file, parse_value, set_key
from analyzer.launch.launchers.world import USUAL_GPUS_PER_NODE, World
from analyzer.launch.megatron_words import MegatronWords
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.written_files import as_written
from analyzer.specs.precision import ONE_SCALE
from analyzer.specs.vision_part import ModelParts
from analyzer.units import natural

_CONFIGS: Final = Path("primus/configs")
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")
_FRAMEWORK: Final = "megatron"
_REMEDY: Final = "give the file in its checkout of Primus, or set PRIMUS_PATH to the checkout"
_TOKENIZERS: Final = re.compile(r"(DeepSeekV[23]|Llama[34]|Mixtral|Qwen\w*|Grok\w*|Kimi\w*)Tokenizer")
"""Tokenizers that Primus adds, which are those of a Hugging Face model."""
_NO_EFFECT: Final = frozenset({
    "trainable", "add_position_embedding", "sink_level", "file_sink_level", "stderr_sink_level", "norm_epsilon", "name",
    "framework", "model", "bases", "stage", "log_avg_skip_iterations", "log_avg_reset_interval", "auto_continue_train",
    "disable_last_saving", "disable_tensorboard", "disable_wandb", "disable_mlflow", "disable_compile_dependencies",
    "enable_gloo_process_groups", "mock_dataset", "model_type", "moe_router_force_load_balancing_type",
    "original_max_position_embeddings", "pp_warmup", "disable_delayed_scaling_patches",
    "use_rocm_mem_info", "use_rocm_mem_info_iters", "conv_L_cache", "profile_memory_iter", "allow_padding_num_layers",
    "auto_offload_time", "communication_method", "enable_exactly_numeric_match", "enable_zb_runtime", "enable_zero_bubble",
    "num_seq_splits", "offload_ops", "offload_overlap_sr", "offload_time", "pp_algorithm", "sink_window_even_layers_only",
    "activation_func", "use_fla_data", "dump_pp_data", "data_parallel_replicate_degree", "fp8_wgrad", "cuda_graph_scope",
    "virtual_pipeline_model_parallel_size", "retro_add_retriever", "rope_type", "mscale", "mscale_all_dim", "tiktoken_pattern",
    "post_trainer", "dataloader_mp_context", "enable_primus_turbo", "turbo_deepep_num_cu", "turbo_deepep_use_comm_stream",
    "turbo_gemm_backend", "turbo_grouped_gemm_backend", "turbo_mega_moe_precision", "use_turbo_permute_padding",
})  # fmt: skip
"""Keys of Primus without an effect on memory, or that only matter with a feature of `_ONLY_WITH`. Megatron-LM sets
virtual_pipeline_model_parallel_size itself (`validate_args`)."""
_PREFIXES: Final = (
    "log_",
    "mlflow_",
    "wandb_",
    "torch_profiler_",
    "one_logger_",
    "straggler_",
    "weight_deosc_",
    "generate_tracelens",
)
_ONLY_WITH: Final = {
    "odc_": "enable_odc",
    "zero_bubble_": "patch_zero_bubble",
    "torch_compile": "",
}
"""Keys that begin so matter only if the other key is true."""
_KERNELS: Final = frozenset({
    "use_turbo_attention", "use_turbo_gemm", "use_turbo_grouped_gemm", "use_turbo_rms_norm", "use_turbo_fused_act_with_probs",
    "use_fla_fused_gated_norm", "use_fla_fused_norm_gated", "use_fla_fused_rmsnorm", "use_fla_fused_swiglu",
    "use_fla_kda_in_kernel_gate", "use_fla_short_conv", "use_fla_triton_kda", "fla_mla_attn", "fused_ce_mode",
    "use_turbo_grouped_mlp", "use_turbo_parallel_linear", "moe_use_fused_router_with_aux_score",
})  # fmt: skip
"""Keys that choose other kernels, whose tensors are counted as those of Transformer Engine."""
_OF_EXPERTS: Final = frozenset({
    "use_turbo_deepep", "use_turbo_fused_act_with_probs", "use_turbo_grouped_gemm", "turbo_sync_free_moe_stage",
    "moe_use_fused_router_with_aux_score",
})  # fmt: skip
"""Keys that have no effect without experts, if Primus accepts them (`_check_turbo`)."""
_WIDE_GROUP: Final = 16
_UNITS_OF_WIDE_GROUP: Final = 32
"""The most compute units of the dispatcher in groups of so many ranks that share experts, or more."""
_SAME_TENSORS: Final = frozenset({"use_turbo_attention", "fla_mla_attn"})
"""Those of them that save the tensors that flash attention saves."""
_OWN_LAYERS: Final = "primus.backends.megatron.core.models.hybrid"
"""Module with layer specifications of Primus that have layers of its own, such as gated delta nets beside latent attention."""
_FP4: Final = ("fp4", "fp4_recipe")
_RECIPES: Final = (None, "nvfp4", "custom")
"""Those of Megatron-LM."""
_MEMORY: Final = frozenset({"use_turbo_deepep", "use_sink_attention"})
"""Keys whose effect on memory is not known, and that the report names."""


def read(launch: Input) -> Output:
    """The training that a configuration describes. Raises UnsupportedError for another framework than Megatron-LM."""
    name, _, words = launch.configuration("--config", "--exp")
    files = Files()
    tree = _load(launch.folder / name, name, launch.environ, files)
    module = _module(tree, name)
    values = _values(module, launch, files)
    _override(values, words, name)
    return Output(_words(values, launch.environ))


def _load(path: Path, name: str, environ: Mapping[str, str], files: Files) -> Tree:
    """The keys of a file, after those that it extends, with variables of the environment."""
    tree = _with_variables(files.tree(path, name), environ, name)
    merged: Tree = {}
    for each in included(tree, "extends", name):
        merge(merged, _load(normal(path.parent / each), of_file(each, name), environ, files))
    return merge(merged, tree)


def _with_variables(value: Any, environ: Mapping[str, str], name: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_variables(each, environ, name) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_variables(each, environ, name) for each in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    def replaced(found: re.Match[str]) -> str:
        text = environ.get(found[1], found[2])
        if text is None:
            raise InputError(name, f"uses the environment variable {found[1]}, which is not set", f"set {found[1]}")
        return text

    return parse_value(_VARIABLE.sub(replaced, value))


def _module(tree: Tree, name: str) -> Tree:
    """The module that trains. Raises UnsupportedError for one of another framework."""
    modules = tree.get("modules")
    trainers = [each for each in modules.values() if isinstance(each, dict)] if isinstance(modules, dict) else []
    if not trainers:
        raise InputError(name, "has no module that trains", "give a configuration with modules.pre_trainer")
    module = next((each for each in trainers if each.get("framework") == _FRAMEWORK), trainers[0])
    framework = module.get("framework")
    if framework != _FRAMEWORK:
        fault = f"trains with {framework}, and only training by Megatron-LM is modelled"
        raise UnsupportedError(name, fault, "give a configuration whose framework is megatron")
    return module


def _values(module: Tree, launch: Input, files: Files) -> Tree:
    """The merged keys of a module."""
    merged: Tree = {}
    for kind, key in (("modules", "config"), ("models", "model")):
        preset = module.get(key)
        if not isinstance(preset, str) or "config" not in module:
            continue
        root = _configs(launch, files.read[0])
        file = preset if preset.endswith(YAML) else f"{preset}.yaml"
        merge(merged, _load(root / kind / _FRAMEWORK / file, of_file(file, launch.found.program), launch.environ, files))
    own = {key: value for key, value in module.items() if key not in ("config", "model", "framework", "overrides", "name")}
    return merge(merge(merged, own), module.get("overrides") or {})


def _configs(launch: Input, file: Path) -> Path:
    """The folder primus/configs of the checkout. Raises InputError if there is none."""
    given = launch.environ.get("PRIMUS_PATH")
    places = [Path(given)] if given else []
    places += [*normal(file.absolute()).parents, launch.folder]
    for place in places:
        if as_written(place / _CONFIGS).is_dir():
            return place / _CONFIGS
    raise InputError(str(launch.found.program), f"needs the folder {_CONFIGS}, which was not found", _REMEDY)


def _override(values: Tree, words: list[str], name: str) -> None:
    """Applies overrides: KEY=VALUE, --KEY VALUE, --KEY=VALUE. Raises InputError for other words."""
    position = 0
    while position < len(words):
        key, equals, value = words[position].lstrip("-").partition("=")
        dashed = words[position].startswith("--")
        following = words[position + 1] if position + 1 < len(words) else None
        if not equals and (not dashed or following is None or following.startswith("--")):
            raise InputError(words[position], f"is no override of {name}", "write KEY=VALUE, such as micro_batch_size=1")
        set_key(values, key.removeprefix("modules.pre_trainer.overrides."), parse_value(value if equals else str(following)))
        position += 1 if equals else 2


def _words(values: Tree, environ: Mapping[str, str]) -> MegatronWords:
    fields = Fields(load_catalogue().newest)
    tokenizer = values.get("tokenizer_type")
    if isinstance(tokenizer, str) and _TOKENIZERS.fullmatch(tokenizer):
        values = {**values, "tokenizer_type": "HuggingFaceTokenizer"}
    _refuse_own_layers(values)
    _check_turbo(values, environ)
    own_fp4 = bool(values.get("fp4")) and values.get("fp4_recipe") not in _RECIPES
    kept = {key: value for key, value in values.items() if not _has_no_effect(key, values) and not (own_fp4 and key in _FP4)}
    found = fields.words(kept, without_defaults=True)
    found.unknown += [*_unknown(values), *(["fp4_recipe"] if own_fp4 else [])]
    world, notes = _world(values, environ)
    return MegatronWords(
        words=tuple(found.words),
        world=world,
        notes=("The launch is one of Primus: its configuration is read as options of Megatron-LM.", *notes),
        statements=tuple(_statements(values, found)),
        unknown=tuple(found.unknown),
        withheld=tuple(_withheld(found, values)),
        parts=ModelParts(fp8_transposes_freed=_frees_transposes(values)),
    )


def _refuse_own_layers(values: Mapping[str, object]) -> None:
    """Raises UnsupportedError for layers that only Primus has."""
    spec = values.get("spec")
    if isinstance(spec, list) and spec and str(spec[0]).startswith(_OWN_LAYERS):
        fault = f"{spec[-1]} of Primus has layers of its own, which are not modelled"
        raise UnsupportedError("spec", fault, "give a configuration with layers of Megatron-LM")


def _check_turbo(values: Mapping[str, object], environ: Mapping[str, str]) -> None:
    """Raises InputError for what `validate_args_on_rocm` refuses, also of models without experts."""

    def on(key: str) -> bool:
        return is_true(values.get(key))

    stage = _stage(values)
    if stage and not on("enable_primus_turbo"):
        raise InputError("turbo_sync_free_moe_stage", "needs enable_primus_turbo", "add enable_primus_turbo=true, or leave it out")
    if stage > 1 and not on("use_turbo_grouped_gemm"):
        fault = "a stage of 2 or 3 needs use_turbo_grouped_gemm"
        raise InputError("turbo_sync_free_moe_stage", fault, "add use_turbo_grouped_gemm=true, or use stage 1")
    if on("use_turbo_grouped_gemm") and on("moe_use_legacy_grouped_gemm"):
        raise InputError("use_turbo_grouped_gemm", "cannot be used with moe_use_legacy_grouped_gemm", "leave one of them out")
    if not on("use_turbo_deepep") and stage <= 1:
        return
    if on("moe_shared_expert_overlap"):
        raise InputError("use_turbo_deepep", "cannot be used with moe_shared_expert_overlap", "leave one of them out")
    if values.get("moe_router_dtype") != "fp32":
        raise InputError("use_turbo_deepep", "needs a router in fp32", "add moe_router_dtype=fp32")
    wide = (natural(str(values.get("expert_model_parallel_size"))) or 1) >= _WIDE_GROUP
    own = environ.get("PRIMUS_TURBO_MOE_DISPATCH_COMBINE_BACKEND", "TURBO") == "TURBO"
    if wide and own and (natural(str(values.get("turbo_deepep_num_cu"))) or 0) > _UNITS_OF_WIDE_GROUP:
        fault = f"is more than {_UNITS_OF_WIDE_GROUP}, which groups of {_WIDE_GROUP} ranks or more that share experts cannot use"
        raise InputError("turbo_deepep_num_cu", fault, f"use {_UNITS_OF_WIDE_GROUP}")


def _stage(values: Mapping[str, object]) -> int:
    """How far the dispatch of experts avoids waiting for the GPU: 0 to 3."""
    return natural(str(values.get("turbo_sync_free_moe_stage"))) or 0


def _has_no_effect(key: str, values: Mapping[str, object]) -> bool:
    if key in _NO_EFFECT or key in _KERNELS or key in _MEMORY or key.startswith(_PREFIXES):
        return True
    if key in ("turbo_sync_free_moe_stage", "no_fp8_weight_transpose_cache", "recompute_layer_ids"):
        return True
    return any(key.startswith(prefix) and not is_true(values.get(switch)) for prefix, switch in _ONLY_WITH.items())


def _unknown(values: Mapping[str, object]) -> Iterator[str]:
    """Keys of Primus that are on and change memory in a way that is not known."""
    turbo = is_true(values.get("enable_primus_turbo"))
    values = _used(values)
    yield from (key for key in sorted(_MEMORY) if is_true(values.get(key)) and (turbo or key != "use_turbo_deepep"))
    if turbo and _stage(values) > 1:
        yield "turbo_sync_free_moe_stage"
    if _frees_transposes(values) and (
        (values.get("fp8_recipe") or "delayed") not in ONE_SCALE or is_true(values.get("fp8_param_gather"))
    ):
        yield "no_fp8_weight_transpose_cache"
    if values.get("recompute_layer_ids"):
        yield "recompute_layer_ids"
    compiled = values.get("torch_compile")
    if isinstance(compiled, dict) and is_true(compiled.get("enable")):
        yield "torch_compile.enable"


def _used(values: Mapping[str, object]) -> Mapping[str, object]:
    """The keys without those of experts, if the model has none."""
    return values if values.get("num_experts") else {key: each for key, each in values.items() if key not in _OF_EXPERTS}


def _frees_transposes(values: Mapping[str, object]) -> bool:
    return is_true(values.get("no_fp8_weight_transpose_cache")) and bool(values.get("fp8"))


def _withheld(found: Words, values: Mapping[str, object]) -> Iterator[str]:
    yield from found.withheld()
    if is_true(values.get("use_torch_fsdp2")) and values.get("fp8"):
        yield "whether Transformer Engine of AMD keeps the FP8 copies of whole weights with use_torch_fsdp2 is not known"
    kernels = [key for key in _kernels(values) if key not in _SAME_TENSORS]
    if kernels:
        yield f"{', '.join(kernels)}: the tensors of these kernels are counted as those of Transformer Engine"


def _kernels(values: Mapping[str, object]) -> list[str]:
    """The keys of other kernels that are on."""
    turbo, values = is_true(values.get("enable_primus_turbo")), _used(values)
    own = ("use_turbo", "moe_use_fused_router")
    found = {key for key in _KERNELS if is_true(values.get(key)) and (turbo or not key.startswith(own))}
    return sorted(found | ({"moe_use_fused_router_with_aux_score"} if turbo and _stage(values) else set()))


def _statements(values: Mapping[str, object], found: Words) -> Iterator[str]:
    yield from found.statements()
    kernels = _kernels(values)
    if kernels:
        yield f"{', '.join(kernels)}: the kernels are counted as those of Transformer Engine."


def _world(values: Mapping[str, object], environ: Mapping[str, str]) -> tuple[World, list[str]]:
    """The GPUs: NNODES and GPUS_PER_NODE, or the fewest nodes that the layout allows."""
    nodes = natural(environ.get("NNODES", ""))
    gpus = natural(environ.get("GPUS_PER_NODE", "")) or USUAL_GPUS_PER_NODE
    if nodes:
        return World(nodes, gpus), []

    def size(name: str) -> int:
        return natural(str(values.get(name))) or 1

    stages, tensor = size("pipeline_model_parallel_size"), size("tensor_model_parallel_size")
    dense = tensor * size("context_parallel_size") * stages
    experts = (natural(str(values.get("expert_tensor_parallel_size"))) or tensor) * size("expert_model_parallel_size") * stages
    nodes = lcm(dense, experts if values.get("num_experts") else 1, gpus) // gpus
    count = f"{nodes} node{'s' if nodes > 1 else ''} of {gpus} GPUs"
    note = f"NNODES is not set: {count} are assumed, the fewest that the layout allows."
    return World(nodes, gpus), [note]
