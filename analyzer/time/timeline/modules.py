"""Time and operations of single modules, for the tree of a report."""

from __future__ import annotations

from typing import NamedTuple

from analyzer.modules.tree import Module
from analyzer.program.lowering import operations
from analyzer.program.operations import Operation, OperationKind
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.kernels.seconds import kernel_seconds
from analyzer.time.pass_seconds import message_time, shown_seconds
from analyzer.time.pass_work import message_of, settings_of
from analyzer.time.work.context import work_context
from analyzer.time.work.kernels import flops
from analyzer.time.work.of_module import work_of


class ModuleTime(NamedTuple):
    """One microbatch in a module and its children, with recomputation."""

    forward_seconds: float
    backward_seconds: float
    flops: float
    """Operations of GEMMs and attention, forward and backward."""


def module_time(job: TrainingJob, module: Module, speed: SpeedSpec, rates: Efficiencies) -> ModuleTime:
    """Seconds of the kernels of a module, of its loops over packed samples, and of its messages that no kernel hides.

    Other waits for the host are not counted.
    """
    program = operations(module)
    forward, some = _sum(job, program.forward, speed, rates)
    backward, more = _sum(job, program.backward, speed, rates)
    return ModuleTime(forward, backward, some + more)


def _sum(job: TrainingJob, found: tuple[Operation, ...], speed: SpeedSpec, rates: Efficiencies) -> tuple[float, float]:
    """Seconds and operations."""
    context, settings = work_context(job), settings_of(job)
    seconds = executed = 0.0
    for operation in found:
        if operation.kind is OperationKind.COMPUTE:
            work = work_of(operation.module, context)
            kernels = work.backward if operation.phase == "backward" else work.forward
            seconds += sum(kernel_seconds(kernel, speed, rates) for kernel in kernels)
            executed += flops(kernels)
        elif operation.kind is OperationKind.COLLECTIVE and operation.call is not None:
            message = message_of(operation.module, operation.call, operation.phase, context, settings)
            one = message_time(job, message, speed, rates)
            shown = operation.call.count * shown_seconds(message, one, job.parallel.tensor, speed, rates)
            seconds += shown
    return seconds, executed
