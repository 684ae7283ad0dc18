"""Activation recomputation.

Megatron: `validate_args` and `TransformerConfig.__post_init__`, 0.16.1; in the 2023 code `--recompute-num-layers` is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, cast

from analyzer.errors import InputError
from analyzer.launch.validate import option, switched_on, whole
from analyzer.specs import RecomputeSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

MODULES: Final = ("core_attn", "layernorm", "mlp")
"""What selective recomputation can drop of a dense layer."""
_OF_EXPERTS: Final = ("moe", "shared_experts")
"""Modules that a dense model does not have: Megatron takes them and drops nothing."""


def check_recompute(arguments: Arguments, *, tensor: int, sequence_parallel: bool) -> RecomputeSpec:
    """What is recomputed. Raises InputError for what Megatron refuses."""
    granularity, method, num_layers = _granularity(arguments)
    distribute = switched_on(arguments, "distribute_saved_activations")
    if granularity is None:
        if distribute:
            raise InputError(
                option(arguments, "distribute_saved_activations"),
                "needs full recomputation",
                "add --recompute-granularity full, or leave it out",
            )
        return RecomputeSpec()
    if distribute:
        _check_distribute(arguments, granularity=granularity, method=method, tensor=tensor, sequence_parallel=sequence_parallel)
    modules = _modules(arguments) if granularity == "selective" else ()
    return RecomputeSpec(
        granularity=cast(Literal["selective", "full"], granularity),
        method=cast(Literal["uniform", "block"] | None, method),
        num_layers=num_layers,
        modules=modules,
        distribute_saved_activations=distribute,
    )


def _granularity(arguments: Arguments) -> tuple[str | None, str | None, int | None]:
    """Granularity, method and layers, as they go together."""
    method_value = arguments.get("recompute_method")
    method = None if method_value is None else str(method_value)
    num_layers = whole(arguments, "recompute_num_layers")
    granularity = "selective" if switched_on(arguments, "recompute_activations") else arguments.get("recompute_granularity")
    named = option(arguments, "recompute_granularity")
    if granularity is None:
        return None, None, None
    if granularity == "selective":
        if method is not None:
            raise InputError(option(arguments, "recompute_method"), "selective recomputation has no method", "leave it out")
        if num_layers is not None:
            raise InputError(option(arguments, "recompute_num_layers"), "selective recomputation takes every layer", "leave it out")
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


def _check_distribute(arguments: Arguments, *, granularity: str, method: str | None, tensor: int, sequence_parallel: bool) -> None:
    named = option(arguments, "distribute_saved_activations")
    if tensor == 1:
        raise InputError(
            named, "there is one tensor-parallel rank to distribute over", "add --tensor-model-parallel-size 2, or leave it out"
        )
    if granularity != "full" or method is None:
        raise InputError(
            named, f"does not go with {granularity} recomputation", "use --recompute-granularity full, or leave it out"
        )
    if sequence_parallel:
        raise InputError(named, "contradicts --sequence-parallel, which distributes them already", "leave it out")


def _modules(arguments: Arguments) -> tuple[str, ...]:
    """What selective recomputation drops, of the modules that a dense model has."""
    value = arguments.get("recompute_modules")
    named = option(arguments, "recompute_modules")
    asked = ["core_attn"] if value is None else [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]
    if switched_on(arguments, "moe_layer_recompute"):
        asked.append("moe")
    for module in asked:
        if module in ("moe_act", "mla_up_proj"):
            needed = "--moe-grouped-gemm" if module == "moe_act" else "--multi-latent-attention"
            raise InputError(named, f"{module} needs {needed}", f"use modules of {', '.join(MODULES)}")
        if module not in MODULES + _OF_EXPERTS:
            raise InputError(named, f"{module!r} is not a module", f"use modules of {', '.join(MODULES)}")
    return tuple(module for module in MODULES if module in asked)
