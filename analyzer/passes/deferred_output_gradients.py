"""Deferred weight gradients of the output layer (`--defer-embedding-wgrad-compute`).

They are computed after the last backward of an iteration. Until then each call of the output layer keeps the operands allocated:
its input, and the gradient of the logits. The input has its autograd graph, which references the received input of the microbatch,
the gradient of that input, and the handles of the flex dispatcher. With overlapped microbatches the input is detached and has its
gradient instead (`ScheduleNode`).
With `--wgrad-deferral-limit` only the first calls of an iteration are deferred.

Sources: core/tensor_parallel/layers.py `ColumnParallelLinear.forward`, `LinearWithGradAccumulationAndAsyncCommunication.backward`;
core/utils.py `drain_embedding_wgrad_compute`; core/pipeline_parallel/schedules.py `finish_embedding_wgrad_compute` (0.16.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from analyzer.modules.head import logits
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import shapes_of
from analyzer.modules.tree import Module, total_bytes
from analyzer.specs import TrainingJob


@dataclass(frozen=True)
class Deferral:
    """What the last stage keeps for the deferred weight gradients of an iteration."""

    bytes_each: int
    """Bytes of the operands of one call of the output layer."""
    input_bytes: int
    """Bytes of the input of a call. With MTP layers it is a view of the inputs of all calls of a microbatch."""
    calls: int
    """Number of deferred calls in an iteration."""
    graph_bytes: int
    """Bytes of the received input of a microbatch and of the gradient of this input."""
    operands: tuple[int, ...] = ()
    """Bytes of each of the operands of one call."""


def deferral_of(job: TrainingJob, *, microbatches: int, freed: bool = False) -> Deferral | None:
    """The deferral in an iteration with these microbatches; None if nothing is deferred.

    `freed`: the storage of the received input is freed, because activation offloading copied it to the host.
    """
    if not job.flags.defer_embedding_wgrad:
        return None
    shapes = shapes_of(job)
    calls = microbatches * (1 + job.model.mtp_num_layers)
    detached = job.flags.overlap_moe_expert_parallel_comm
    operands = (
        logits(shapes, "logits gradient", shapes.dtype),
        shapes.hidden("input"),
        *([shapes.hidden("input gradient")] if detached else []),
    )
    return Deferral(
        bytes_each=total_bytes(operands),
        input_bytes=0 if detached else shapes.hidden("input").bytes,
        calls=min(calls, job.flags.wgrad_deferral_limit or calls),
        graph_bytes=0 if detached else (1 if freed else 2) * shapes.hidden("received input").bytes,
        operands=tuple(each.bytes for each in operands),
    )


def deferring_microbatches(job: TrainingJob, microbatches: int) -> int:
    """The smallest number of microbatches that gives the same peak on the last stage as this many; 0 without deferral.

    Memory grows as long as calls are deferred. Two microbatches later the pipeline is in its steady state again.
    """
    deferral = deferral_of(job, microbatches=microbatches)
    if deferral is None:
        return 0
    if job.parallel.virtual_pipeline is not None:
        return microbatches
    return min(microbatches, -(-deferral.calls // (1 + job.model.mtp_num_layers)) + 2)


def output_layers(tree: Module) -> int:
    """The number of output layers in a module."""
    return sum(module.kind is ModuleKind.OUTPUT_LAYER for _, module in tree.walk())
