"""Sizes of parallelism and how context-parallel ranks communicate.

Megatron: `validate_args` (megatron/training/arguments.py), 0.16.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.pipeline import with_stages
from analyzer.launch.derive.reading import option, positive, refuse, since, size, switched_on
from analyzer.specs import ParallelSpec
from analyzer.specs.release import describe
from analyzer.specs.rules.sizes import parallel_violations

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.launch.launchers.world import World

CP_COMM_TYPES: Final = ("p2p", "a2a", "all_gather", "a2a+p2p")


def parallel_spec(launch: LaunchInput, world: World, *, num_layers: int) -> ParallelSpec:
    """The sizes of every dimension, checked. Raises InputError for sizes that contradict each other or the world."""
    arguments = launch.arguments
    tensor, pipeline = _model_parallel(launch, world_size=world.size)
    context = size(arguments, "context_parallel_size")
    cp_comm_type, cp_inner_size = _context_communication(launch, context=context)
    sizes = ParallelSpec(
        world_size=world.size,
        nodes=world.nodes,
        gpus_per_node=world.gpus_per_node,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=size(arguments, "expert_model_parallel_size"),
        expert_tensor=positive(arguments, "expert_tensor_parallel_size") or tensor,
        order="tp-cp-ep-pp-dp" if switched_on(arguments, "use_tp_pp_dp_mapping") else "tp-cp-ep-dp-pp",
        # Megatron turns sequence parallelism off for one tensor-parallel rank
        sequence_parallel=tensor > 1 and switched_on(arguments, "sequence_parallel"),
        distributed_optimizer_instances=size(arguments, "num_distributed_optimizer_instances"),
        cp_comm_type=cp_comm_type,
        cp_inner_size=cp_inner_size,
    )
    refuse(arguments, parallel_violations(sizes, megatron=arguments.release))
    parallel = with_stages(arguments, sizes, num_layers=num_layers)
    refuse(arguments, parallel_violations(parallel, megatron=arguments.release))
    return parallel


def _model_parallel(launch: LaunchInput, *, world_size: int) -> tuple[int, int]:
    """Tensor and pipeline size. Releases before core 0.9 reduce them to the world size without a message (`validate_args`)."""
    tensor = size(launch.arguments, "tensor_model_parallel_size")
    pipeline = size(launch.arguments, "pipeline_model_parallel_size")
    if since(launch.arguments, "0.9") or tensor * pipeline <= world_size:
        return tensor, pipeline
    smaller_tensor = min(tensor, world_size)
    smaller_pipeline = min(pipeline, world_size // smaller_tensor)
    launch.assume(
        f"{describe(launch.arguments.release)} reduces tensor {tensor} × pipeline {pipeline} to {smaller_tensor} × "
        f"{smaller_pipeline} for {world_size} GPUs."
    )
    return smaller_tensor, smaller_pipeline


def _context_communication(launch: LaunchInput, *, context: int) -> tuple[str, int]:
    """How context-parallel ranks communicate (`--cp-comm-type`), and the ranks of an inner group (1 without).

    With one rank in the inner or the outer groups Transformer Engine works as with one group (`attn_forward_func_with_cp`).
    """
    arguments = launch.arguments
    value = arguments.get("cp_comm_type")
    types = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else ["p2p"]
    named = option(arguments, "cp_comm_type")
    if arguments.get("experimental_attention_variant") == "dsa":  # whose check ignores underscores (`TransformerConfig`, 0.19)
        types = ["all_gather" if each == "allgather" else each for each in types]
    if context == 1:  # Megatron reads it only for several context-parallel ranks
        types = [each for each in types if each in CP_COMM_TYPES] or ["p2p"]
    for each in types:
        if each not in CP_COMM_TYPES:
            raise InputError(
                named, f"{each!r} is not a context-parallel communication type", f"use one of {', '.join(CP_COMM_TYPES)}"
            )
    sizes = _hierarchical_sizes(arguments, types=types, context=context)
    if context == 1:
        return types[0] if len(types) == 1 and types[0] != "a2a+p2p" else "p2p", 1
    if len(set(types)) > 1:
        raise UnsupportedError(named, "a type for each layer is not modelled", "use one type for all layers")
    kind, inner = types[0], 1
    if kind == "a2a+p2p":
        inner, outer = _hierarchy(arguments, sizes)
        if inner == 1 or outer == 1:
            kind, inner = ("p2p" if inner == 1 else "a2a"), 1
    if "p2p" in kind:
        launch.assume(
            "The last context-parallel rank is counted: with a causal mask it attends to the most keys, and the other ranks need "
            "less memory during attention."
        )
    return kind, inner


def _hierarchical_sizes(arguments: Arguments, *, types: list[str], context: int) -> object:
    """`--hierarchical-context-parallel-sizes`, whose product is the context size."""
    sizes = arguments.get("hierarchical_context_parallel_sizes")
    if "a2a+p2p" in types and not sizes:
        raise InputError(
            option(arguments, "cp_comm_type"),
            "a2a+p2p needs --hierarchical-context-parallel-sizes",
            "add two sizes whose product is the context size",
        )
    if isinstance(sizes, list | tuple) and sizes:
        product = 1
        for each in sizes:
            product *= int(each)
        if product != context:
            raise InputError(
                option(arguments, "hierarchical_context_parallel_sizes"),
                f"their product is {product} and the context-parallel size is {context}",
                f"use sizes whose product is {context}",
            )
    return sizes


def _hierarchy(arguments: Arguments, sizes: object) -> tuple[int, int]:
    """Sizes of inner and outer groups."""
    if not isinstance(sizes, list | tuple) or len(sizes) != 2:
        raise InputError(
            option(arguments, "hierarchical_context_parallel_sizes"),
            "a2a+p2p needs two sizes",
            "give the ranks of an inner group and the number of groups, as 4 2",
        )
    return int(sizes[0]), int(sizes[1])
