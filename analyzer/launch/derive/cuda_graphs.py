"""CUDA graphs: implementation, captured parts of a layer, and warm-up.

Megatron: `validate_args` and `TransformerConfig.__post_init__`, 0.16.1. Before 0.16 there are only the flags
`--enable-cuda-graph` and `--external-cuda-graph`; from 0.18 on `full_iteration` is a separate implementation, which the word
`full_iteration` of `--cuda-graph-modules` selects too (`normalize_cuda_graph_modules` in core/transformer/cuda_graph_config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal, cast

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import integer, option, since, switched_on
from analyzer.specs import GraphSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import HardwareSpec, ModelSpec

SCOPES: Final = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", "full_iteration")
INFERENCE: Final = "full_iteration_inference"


def graph_spec(launch: LaunchInput, *, model: ModelSpec) -> GraphSpec | None:
    """How graphs are captured; None without graphs. Raises InputError for what Megatron refuses."""
    arguments = launch.arguments
    implementation, named = _implementation(arguments)
    scope = _scope(arguments, implementation=implementation)
    if "full_iteration" in scope and implementation == "transformer_engine":
        raise InputError(named, "transformer_engine does not capture full iterations", "use --cuda-graph-impl local")
    if since(arguments, "0.18"):
        implementation = _full_iteration(arguments, implementation, scope)
    if implementation == "none":
        return None
    if implementation == "full_iteration":
        implementation, scope = "local", ("full_iteration",)
    if model.implementation != "transformer_engine" and implementation == "transformer_engine":
        raise InputError(named, "needs the layers of Transformer Engine", "use --transformer-impl transformer_engine")
    _check_segments(named, implementation, environ=launch.environ, gpu=launch.gpu)
    _check_experts(arguments, model, scope)
    if model.hybrid is not None and implementation == "local" and {"moe", "moe_router"} & set(scope):
        fault = "local captures the routers of a hybrid model by themselves, which is not modelled"
        raise UnsupportedError(named, fault, "use --cuda-graph-impl transformer_engine, or leave the parts of MoE layers out")
    warmup = integer(arguments, "cuda_graph_warmup_steps")
    return GraphSpec(
        implementation=cast(Literal["transformer_engine", "local"], implementation),
        scope=scope,
        warmup_steps=3 if warmup is None else warmup,
    )


def _implementation(arguments: Arguments) -> tuple[str, str]:
    """The implementation that captures, and the option that selects it."""
    named = option(arguments, "cuda_graph_impl")
    asked = str(arguments.get("cuda_graph_impl") or "none")
    old = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
    given = [dest for dest in old if switched_on(arguments, dest)]
    if len(given) > 1:
        raise InputError(option(arguments, given[0]), f"contradicts {option(arguments, given[1])}", "keep one of the two")
    if given:
        if asked != "none":
            raise InputError(option(arguments, given[0]), f"contradicts {named}", "keep one of the two")
        return old[given[0]], option(arguments, given[0])
    return asked, named


def _full_iteration(arguments: Arguments, implementation: str, scope: tuple[str, ...]) -> str:
    """The implementation after the word `full_iteration` was taken from the parts of a layer."""
    if "full_iteration" in scope:
        implementation, scope = "full_iteration", tuple(each for each in scope if each != "full_iteration")
    if implementation == "full_iteration" and scope:
        raise InputError(
            option(arguments, _scope_dest(arguments)), "full_iteration covers all parts of a layer", f"leave {scope[0]} out"
        )
    return implementation


def _scope_dest(arguments: Arguments) -> str:
    """The option that names parts of a layer."""
    return next((each for each in ("cuda_graph_modules", "cuda_graph_scope_deprecated") if arguments.get(each)), "cuda_graph_scope")


def _scope(arguments: Arguments, *, implementation: str) -> tuple[str, ...]:
    """Parts of a layer that are captured; empty for full layers. Unknown parts are refused without graphs too.

    Megatron's own graphs capture the router and the preprocessing of tokens together.
    """
    dest = _scope_dest(arguments)
    named = option(arguments, dest)
    value = arguments.get(dest)
    words = [] if value is None else [str(each) for each in value] if isinstance(value, list | tuple) else str(value).split(",")
    if "full" in words and len(words) > 1:
        raise InputError(named, "full covers all parts", "leave the others out")
    asked = [word for word in words if word != "full"]
    if INFERENCE in asked and since(arguments, "0.17"):
        if implementation != "none":
            raise UnsupportedError(f"{named} {INFERENCE}", "graphs of inference are not modelled", "leave it out")
        asked.remove(INFERENCE)
    for word in asked:
        if word not in SCOPES:
            raise InputError(named, f"{word!r} is not part of a layer", f"use some of {', '.join(SCOPES)}")
    if implementation == "local" and {"moe_router", "moe_preprocess"} & set(asked):
        asked += ["moe_router", "moe_preprocess"]
    return tuple(scope for scope in SCOPES if scope in asked)


def _check_segments(named: str, implementation: str, *, environ: Mapping[str, str], gpu: HardwareSpec) -> None:
    """With expandable segments, NCCL must not register them (core/transformer/cuda_graphs.py, 0.16.1).

    For Megatron's own graphs on GPUs before Blackwell only.
    """
    growing = "expandable_segments:True" in environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    blackwell = gpu.compute_capability is not None and gpu.compute_capability >= (10, 0)
    if growing and environ.get("NCCL_GRAPH_REGISTER") != "0" and not (implementation == "local" and blackwell):
        raise InputError(
            named, "cannot be used with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF", "export NCCL_GRAPH_REGISTER=0"
        )


def _check_experts(arguments: Arguments, model: ModelSpec, scope: tuple[str, ...]) -> None:
    """Parts of MoE layers that can be captured. Experts need an input of constant size."""
    named = option(arguments, _scope_dest(arguments))
    moe = model.moe
    if "moe" in scope and "moe_router" in scope:
        raise InputError(named, "moe covers moe_router", "keep one of the two")
    if "moe_preprocess" in scope and "moe_router" not in scope:
        raise InputError(named, "moe_preprocess needs moe_router", "add moe_router")
    if moe is None or moe.num_experts == 1:
        if "moe" in scope or "moe_router" in scope:
            raise InputError(named, "includes experts, and the model has none to choose from", "leave moe and moe_router out")
        return
    if "mlp" in scope and all(moe.layers):
        raise InputError(named, "includes dense FFN layers, and the model has none", "leave mlp out")
    padded = moe.capacity_factor is not None and moe.pad_to_capacity
    if "moe" in scope and not padded:
        raise InputError(
            named,
            "moe needs experts whose input has a constant size",
            "add --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity, or use moe_router",
        )
    for_fp8 = switched_on(arguments, "moe_router_padding_for_fp8")
    waits = not padded and moe.dispatcher == "alltoall" and (moe.capacity_factor is not None or for_fp8)
    if "moe_preprocess" in scope and waits and since(arguments, "0.16"):
        raise InputError(
            named,
            "moe_preprocess cannot be captured: with the alltoall dispatcher the host waits for the tokens of each expert",
            "leave out moe_preprocess, and use --cuda-graph-impl transformer_engine",
        )
    if moe.flex is not None and moe.flex.equalizes and (not scope or {"moe", "moe_preprocess", "full_iteration"} & set(scope)):
        raise InputError(
            option(arguments, "moe_hybridep_pad_uneven_dispatch_inputs"),
            "cannot be captured: the host waits for the largest number of tokens of a rank (`_HybridEPManager.setup_metadata`)",
            "leave it out, or capture no moe_preprocess, and use --cuda-graph-impl transformer_engine",
        )
