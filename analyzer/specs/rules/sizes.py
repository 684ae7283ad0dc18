"""Rules for the sizes of parallelism.

Source: `validate_args` (megatron/training/arguments.py) and `initialize_model_parallel` (core/parallel_state.py), 0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from analyzer.specs.parallel import ParallelSpec
from analyzer.specs.release import is_before
from analyzer.specs.rules.violation import Violation


def parallel_violations(parallel: ParallelSpec, *, megatron: str) -> Iterator[Violation]:
    """Sizes that do not divide the world, or that contradict each other. `megatron` is the release."""
    sizes = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "num_distributed_optimizer_instances": parallel.distributed_optimizer_instances,
    }
    wrong = next((dest for dest, size in sizes.items() if size < 1), None)
    if wrong is not None:
        yield Violation((wrong,), f"{sizes[wrong]} is not above 0", "give 1 or more")
        return
    yield from _dense_grid(parallel, sizes)
    yield from _expert_grid(parallel)
    yield from _optimizer_instances(parallel)
    least = 2 if parallel.overlap_p2p and not is_before(megatron, "0.4") else 3
    if parallel.virtual_pipeline is not None and parallel.pipeline < least:
        how = "" if parallel.overlap_p2p else " without overlapped point-to-point communication"
        yield Violation(
            ("pipeline_model_parallel_size",),
            f"virtual stages{how} need {least} pipeline ranks or more, and there are {parallel.pipeline}",
            f"use --pipeline-model-parallel-size {least} or more, or leave the virtual stages out",
        )


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _dense_grid(parallel: ParallelSpec, sizes: dict[str, int]) -> Iterator[Violation]:
    model = parallel.tensor * parallel.pipeline * parallel.context
    if parallel.world_size % model:
        dests = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        yield Violation(
            (max(dests, key=lambda dest: sizes[dest]),),
            f"{_gpus(parallel.world_size)} cannot be split into groups of {model}: "
            f"tensor {parallel.tensor} × pipeline {parallel.pipeline} × context {parallel.context}",
            f"start a multiple of {model} GPUs, or make the product a divisor of {parallel.world_size}",
        )


def _expert_grid(parallel: ParallelSpec) -> Iterator[Violation]:
    """The expert grid of `initialize_model_parallel`: the same world with other sizes."""
    group = parallel.expert_tensor * parallel.expert * parallel.pipeline
    if parallel.world_size % group:
        follows = "the expert tensor-parallel size is --tensor-model-parallel-size unless it is given: "
        yield Violation(
            ("expert_model_parallel_size" if parallel.expert > 1 else "expert_tensor_parallel_size",),
            f"{_gpus(parallel.world_size)} cannot be split into groups of {group} "
            f"(expert tensor {parallel.expert_tensor} × expert {parallel.expert} × pipeline {parallel.pipeline})",
            f"{follows}add --expert-tensor-parallel-size 1, or start a multiple of {group} GPUs"
            if parallel.expert_tensor == parallel.tensor > 1
            else f"start a multiple of {group} GPUs, or make the product a divisor of {parallel.world_size}",
        )
    elif parallel.pipeline > 1 and not parallel.order.endswith("pp") and parallel.expert_data != parallel.data:
        yield Violation(
            ("use_tp_pp_dp_mapping",),
            "with this order of ranks, experts need as many data-parallel replicas as other layers, and there are "
            f"{parallel.expert_data} and {parallel.data}",
            f"add --expert-tensor-parallel-size {parallel.tensor * parallel.context // parallel.expert or 1}, or leave it out",
        )


def _optimizer_instances(parallel: ParallelSpec) -> Iterator[Violation]:
    instances = parallel.distributed_optimizer_instances
    for name, count in (("data-parallel", parallel.data_with_context), ("expert data-parallel", parallel.expert_data)):
        if count % instances:
            yield Violation(
                ("num_distributed_optimizer_instances",),
                f"{count} {name} ranks cannot be split into {instances} instances",
                f"use a divisor of {count}",
            )
