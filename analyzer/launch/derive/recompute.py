"""Activation recomputation.

Megatron: `validate_args` and `TransformerConfig.__post_init__`, 0.16.1; in the 2023 code `--recompute-num-layers` is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, cast

from analyzer.errors import InputError
from analyzer.launch.derive.reading import integer, option, since, switched_on
from analyzer.specs import ModelSpec, RecomputeSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

MODULES: Final = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts", "gdn_norm_out")
"""What `--recompute-modules` accepts."""


def recompute_spec(arguments: Arguments, *, model: ModelSpec) -> RecomputeSpec:
    """Which parts of `model` are recomputed. Raises InputError for what Megatron refuses."""
    granularity, method, num_layers = _granularity(arguments)
    if ignores_recompute(arguments, model):
        granularity = None
    distribute = switched_on(arguments, "distribute_saved_activations")
    if granularity is None:
        if distribute:
            raise InputError(
                option(arguments, "distribute_saved_activations"),
                "needs full recomputation",
                "add --recompute-granularity full, or leave it out",
            )
        return RecomputeSpec()
    modules = _modules(arguments, model) if granularity == "selective" else ()
    return RecomputeSpec(
        granularity=cast(Literal["selective", "full"], granularity),
        method=cast(Literal["uniform", "block"] | None, method),
        num_layers=num_layers,
        modules=modules,
        distribute_saved_activations=distribute,
    )


def ignores_recompute(arguments: Arguments, model: ModelSpec) -> bool:
    """Whether full recomputation has no effect: up to 0.17, `MambaStack.forward` has no checkpoints (core/ssm/mamba_block.py)."""
    return ignores_recompute_of_stack(arguments, model) and not recomputes_mtp_layers(arguments, model)


def ignores_recompute_of_stack(arguments: Arguments, model: ModelSpec) -> bool:
    """Whether full recomputation has no effect on the decoder."""
    full = arguments.get("recompute_granularity") == "full"
    return full and model.hybrid is not None and not since(arguments, "0.18")


def recomputes_mtp_layers(arguments: Arguments, model: ModelSpec) -> bool:
    """Whether the checkpoint around each MTP layer has an effect (`MultiTokenPredictionLayer._checkpointed_forward`)."""
    return model.mtp_num_layers > 0 and arguments.get("recompute_method") == "uniform"


def _granularity(arguments: Arguments) -> tuple[str | None, str | None, int | None]:
    """Granularity, method and number of layers. Raises InputError for values that contradict each other."""
    method_value = arguments.get("recompute_method")
    method = None if method_value is None else str(method_value)
    num_layers = integer(arguments, "recompute_num_layers")
    granularity = "selective" if switched_on(arguments, "recompute_activations") else arguments.get("recompute_granularity")
    if switched_on(arguments, "moe_layer_recompute"):
        if granularity == "full":
            raise InputError(
                option(arguments, "moe_layer_recompute"), "contradicts --recompute-granularity full", "keep one of the two"
            )
        granularity = "selective"
    named = option(arguments, "recompute_granularity")
    if granularity is None:
        return None, None, None
    if granularity == "selective":
        if method is not None:
            raise InputError(option(arguments, "recompute_method"), "selective recomputation has no method", "leave it out")
        if num_layers is not None and "recompute_num_layers" in arguments.given:  # its default in the 2023 code is 1
            raise InputError(
                option(arguments, "recompute_num_layers"), "selective recomputation applies to every layer", "leave it out"
            )
        return "selective", None, None
    if granularity != "full":
        raise InputError(named, f"{granularity!r} is not a granularity", "use full or selective")
    if method not in ("uniform", "block"):
        raise InputError(named, "full recomputation needs a method", "add --recompute-method uniform or --recompute-method block")
    if num_layers is None:
        raise InputError(named, "full recomputation needs a number of layers", "add --recompute-num-layers 1")
    least = 1 if method == "uniform" else 0
    if num_layers < least:
        raise InputError(option(arguments, "recompute_num_layers"), f"{num_layers} is below {least}", f"use {least} or more")
    return "full", method, num_layers


def _modules(arguments: Arguments, model: ModelSpec) -> tuple[str, ...]:
    """Modules of `model` that selective recomputation covers. Megatron ignores modules that the model does not have."""
    value = arguments.get("recompute_modules")
    named = option(arguments, "recompute_modules")
    asked = ["core_attn"] if value is None else [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]
    for module in asked:
        if module not in MODULES:
            raise InputError(named, f"{module!r} is not a module", f"use modules of {', '.join(MODULES)}")
    if "moe_act" in asked and not switched_on(arguments, "moe_grouped_gemm"):
        raise InputError(named, "moe_act needs --moe-grouped-gemm", "add it, or leave moe_act out")
    if "mlp" in asked and model.bias_linear and (model.moe is None or not all(model.moe.layers)):
        raise InputError(named, "with biases, the backward of a recomputed mlp does not end", "add --disable-bias-linear")
    if "mla_up_proj" in asked and model.mla is None:
        raise InputError(named, "mla_up_proj needs --multi-latent-attention", "add it, or leave mla_up_proj out")
    if "gdn_norm_out" in asked and not since(arguments, "0.19"):
        raise InputError(named, "gdn_norm_out exists since core 0.19", "add --info-megatron 0.19, or leave gdn_norm_out out")
    if "gdn_norm_out" in asked and arguments.get("experimental_attention_variant") != "gated_delta_net":
        fault = "gdn_norm_out needs --experimental-attention-variant gated_delta_net"
        raise InputError(named, fault, "add it, or leave gdn_norm_out out")
    if "shared_experts" in asked and model.moe and model.moe.shared_overlap:
        raise InputError(named, "shared_experts contradicts --moe-shared-expert-overlap", "keep one of the two")
    if switched_on(arguments, "moe_layer_recompute"):
        asked.append("moe")
    absent: tuple[str, ...] = () if model.moe else ("moe", "moe_act")
    if model.moe is None or model.moe.shared_ffn_hidden_size is None:
        absent += ("shared_experts",)
    return tuple(module for module in MODULES if module in asked and module not in absent)
