"""World size, parallel sizes and the environment that they need.

Megatron: `validate_args` (megatron/training/arguments.py) and `initialize_model_parallel`
(megatron/core/parallel_state.py), 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.fsdp import sharding_flag
from analyzer.launch.derive.reading import RELEASE_2023, option, positive, since, size, switched_on, whole

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.specs import HardwareSpec


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of the two grids of ranks: the dense one and the one of experts."""

    world_size: int
    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    expert_tensor: int
    order: str
    distributed_optimizer_instances: int
    assumptions: tuple[str, ...] = ()


def _remedy(arguments: Arguments, *, group: int, world_size: int) -> str:
    """For experts that do not divide the world. Their tensor parallelism, where not given, is that of the rest."""
    if positive(arguments, "expert_tensor_parallel_size") or size(arguments, "tensor_model_parallel_size") == 1:
        return f"start a multiple of {group} GPUs, or make the product a divisor of {world_size}"
    follows = "expert tensor follows --tensor-model-parallel-size where it is not given"
    return f"{follows}: add --expert-tensor-parallel-size 1, or start a multiple of {group} GPUs"


def check_grid(arguments: Arguments, *, world_size: int) -> Grid:
    """The parallel sizes that divide the world. Raises InputError naming the size that does not."""
    tensor, pipeline, assumptions = _model_parallel(arguments, world_size=world_size)
    context = size(arguments, "context_parallel_size")
    model = tensor * pipeline * context
    if world_size % model:
        raise InputError(
            option(arguments, _largest({"tensor": tensor, "pipeline": pipeline, "context": context})),
            f"{_gpus(world_size)} cannot be split into groups of {model}: "
            f"tensor {tensor} × pipeline {pipeline} × context {context}",
            f"start a multiple of {model} GPUs, or make the product a divisor of {world_size}",
        )
    expert = size(arguments, "expert_model_parallel_size")
    expert_tensor = positive(arguments, "expert_tensor_parallel_size") or tensor
    grid = Grid(
        world_size=world_size,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        data=world_size // model,
        expert=expert,
        expert_tensor=expert_tensor,
        order="tp-cp-ep-pp-dp" if switched_on(arguments, "use_tp_pp_dp_mapping") else "tp-cp-ep-dp-pp",
        distributed_optimizer_instances=size(arguments, "num_distributed_optimizer_instances"),
        assumptions=assumptions,
    )
    _check_experts(arguments, grid)
    _check_optimizer_instances(arguments, grid)
    return grid


def _model_parallel(arguments: Arguments, *, world_size: int) -> tuple[int, int, tuple[str, ...]]:
    """Tensor and pipeline size; the 2023 code cuts them down to the world without a word."""
    tensor = size(arguments, "tensor_model_parallel_size")
    pipeline = size(arguments, "pipeline_model_parallel_size")
    if arguments.release != RELEASE_2023 or tensor * pipeline <= world_size:
        return tensor, pipeline, ()
    tensor_cut = min(tensor, world_size)
    pipeline_cut = min(pipeline, world_size // tensor_cut)
    return tensor_cut, pipeline_cut, (
        f"The 2023 code cuts tensor {tensor} × pipeline {pipeline} down to "
        f"{tensor_cut} × {pipeline_cut} for {world_size} GPUs.",
    )  # fmt: skip


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _largest(sizes: Mapping[str, int]) -> str:
    """The dest of the largest of the sizes, the one to look at first."""
    dests = {"tensor": "tensor_model_parallel_size", "pipeline": "pipeline_model_parallel_size", "context": "context_parallel_size"}
    return dests[max(sizes, key=lambda name: sizes[name])]


def _check_experts(arguments: Arguments, grid: Grid) -> None:
    """The expert grid of `initialize_model_parallel`: the same world, counted in other sizes."""
    if grid.expert > 1 and not arguments.get("num_experts"):
        raise InputError(
            option(arguments, "expert_model_parallel_size"),
            f"there are no experts to spread over {grid.expert} ranks",
            "add --num-experts, or leave the option out",
        )
    group = grid.expert_tensor * grid.expert * grid.pipeline
    if grid.world_size % group:
        raise InputError(
            option(arguments, "expert_model_parallel_size" if grid.expert > 1 else "expert_tensor_parallel_size"),
            f"{_gpus(grid.world_size)} cannot be split into groups of {group} "
            f"(expert tensor {grid.expert_tensor} × expert {grid.expert} × pipeline {grid.pipeline})",
            _remedy(arguments, group=group, world_size=grid.world_size),
        )
    expert_data = grid.world_size // group
    if grid.pipeline > 1 and not grid.order.endswith("pp") and expert_data != grid.data:
        raise InputError(
            option(arguments, "use_tp_pp_dp_mapping"),
            f"in this order experts need as many replicas as the rest, and there are {expert_data} and {grid.data}",
            f"add --expert-tensor-parallel-size {grid.tensor * grid.context // grid.expert or 1}, or leave the option out",
        )
    experts = whole(arguments, "num_experts")
    if experts and experts % grid.expert:
        raise InputError(
            option(arguments, "num_experts"),
            f"{experts} experts cannot be spread over {grid.expert} ranks",
            f"use a multiple of {grid.expert}",
        )


def _check_optimizer_instances(arguments: Arguments, grid: Grid) -> None:
    instances, replicas = grid.distributed_optimizer_instances, grid.data * grid.context
    expert_replicas = grid.world_size // (grid.expert_tensor * grid.expert * grid.pipeline)
    for name, count in (("data-parallel", replicas), ("expert data-parallel", expert_replicas)):
        if count % instances:
            raise InputError(
                option(arguments, "num_distributed_optimizer_instances"),
                f"{count} {name} ranks cannot be split into {instances} instances",
                f"use a divisor of {count}",
            )


def check_context(arguments: Arguments, *, context: int) -> tuple[str, int, tuple[str, ...]]:
    """How context-parallel ranks talk (`--cp-comm-type`), ranks of an inner group (1 without), and what is assumed.

    With one rank in the inner or the outer groups Transformer Engine does as if there were one group (`attn_forward_func_with_cp`).
    """
    value = arguments.get("cp_comm_type")
    types = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else ["p2p"]
    named = option(arguments, "cp_comm_type")
    known = ("p2p", "a2a", "all_gather", "a2a+p2p")
    for each in types:
        if each not in known:
            raise InputError(named, f"{each!r} is not a way to talk", f"use one of {', '.join(known)}")
    sizes = arguments.get("hierarchical_context_parallel_sizes")
    if "a2a+p2p" in types and not sizes:
        raise InputError(
            named, "a2a+p2p needs --hierarchical-context-parallel-sizes", "add two sizes whose product is the context size"
        )
    if isinstance(sizes, list | tuple) and sizes:
        product = 1
        for each in sizes:
            product *= int(each)
        if product != context:
            raise InputError(
                option(arguments, "hierarchical_context_parallel_sizes"),
                f"their product is {product} and the context size is {context}",
                f"use sizes whose product is {context}",
            )
    if context == 1:
        return types[0] if len(types) == 1 and types[0] != "a2a+p2p" else "p2p", 1, ()
    if len(set(types)) > 1:
        raise UnsupportedError(named, "a type for each layer is not modelled", "use one type for all layers")
    kind, inner = types[0], 1
    if kind == "a2a+p2p":
        inner, outer = _hierarchy(arguments, sizes)
        if inner == 1 or outer == 1:
            kind, inner = ("p2p" if inner == 1 else "a2a"), 1
    if "p2p" not in kind:
        return kind, 1, ()
    return (
        kind,
        inner,
        (
            "Of the ranks that share a sequence the last is counted: with a causal mask it attends to the most keys, and the "
            "others need less while attention runs.",
        ),
    )


def _hierarchy(arguments: Arguments, sizes: object) -> tuple[int, int]:
    """Sizes of inner and outer groups."""
    if not isinstance(sizes, list | tuple) or len(sizes) != 2:
        raise InputError(
            option(arguments, "hierarchical_context_parallel_sizes"),
            "a2a+p2p works with two sizes",
            "give the ranks of an inner group and the number of groups, as 4 2",
        )
    return int(sizes[0]), int(sizes[1])


def check_connections(
    arguments: Arguments, grid: Grid, *, environ: Mapping[str, str], gpu: HardwareSpec
) -> tuple[str | None, str | None]:
    """CUDA_DEVICE_MAX_CONNECTIONS of the run and, where it is not set here, the assumption that it is 1 there.

    Megatron asserts that it is 1 under tensor or context parallelism on GPUs before Blackwell, but for full sharding and
    `--overlap-moe-expert-parallel-comm`.
    """
    value = environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    by_context = grid.context > 1 and arguments.release != RELEASE_2023
    blackwell = gpu.compute_capability is not None and gpu.compute_capability >= (10, 0)
    side_by_side = switched_on(arguments, "overlap_moe_expert_parallel_comm")
    exempt = sharding_flag(arguments) is not None or side_by_side or (blackwell and (since(arguments, "0.13") or grid.tensor == 1))
    if exempt or not (grid.tensor > 1 or by_context):
        return value, None
    if value is None:
        return "1", "CUDA_DEVICE_MAX_CONNECTIONS=1 is set where the launch runs, as Megatron demands; it is not set here."
    if value != "1":
        why = f"tensor size {grid.tensor}" if grid.tensor > 1 else f"context size {grid.context}"
        raise InputError(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            f"is {value}, and with {why} Megatron starts on GPUs before Blackwell with 1 only",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1, or name a Blackwell GPU with --info-gpu",
        )
    return value, None
