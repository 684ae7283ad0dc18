"""The modules and messages of one pass of a microbatch through a chunk, in the order of execution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module
from analyzer.program.chunks import chunk_program
from analyzer.program.operations import Operation, OperationKind
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.kernels.seconds import kernel_seconds
from analyzer.time.pass_seconds import message_time, shown_seconds
from analyzer.time.pass_work import message_of, settings_of
from analyzer.time.work.context import work_context
from analyzer.time.work.of_module import work_of

Direction = Literal["forward", "backward"]
Stream = Literal["compute", "tp", "cp", "ep", "pp", "dp"]


class PassEvent(NamedTuple):
    """A module that runs, or a message on the stream of its group."""

    name: str
    path: str
    """Dotted path of the module in the chunk. Equal layers have the path of the first of them."""
    stream: Stream
    start: float
    """Seconds from the start of the pass."""
    seconds: float
    phase: str


def pass_events(
    job: TrainingJob,
    tree: Module,
    layers: Sequence[int],
    direction: Direction,
    speed: SpeedSpec,
    rates: Efficiencies,
    *,
    total: float,
) -> tuple[PassEvent, ...]:
    """The events of a pass that takes `total` seconds. `layers`: the numbers of the layers of the chunk.

    The time for which the device waits for the host is spread over the modules in proportion to their time. A message starts with
    its module. The part that no kernel hides delays the modules; the rest runs beside them on its stream.
    """
    context, settings = work_context(job), settings_of(job)
    now = 0.0
    opened: list[tuple[str, str, float, str]] = []
    found: list[PassEvent] = []
    free: dict[Stream, float] = {}
    numbers = iter(layers if direction == "forward" else layers[::-1])
    for path, operation in chunk_program(tree).expanded(direction):
        if operation.kind is OperationKind.BEGIN:
            opened.append((_name(operation, direction, numbers), path, now, operation.phase))
        elif operation.kind is OperationKind.END:
            name, where, start, phase = opened.pop()
            found.append(PassEvent(name, where, "compute", start, now - start, phase))
        elif operation.kind is OperationKind.COMPUTE:
            work = work_of(operation.module, context)
            kernels = work.backward if operation.phase == "backward" else work.forward
            now += sum(kernel_seconds(kernel, speed, rates) for kernel in kernels)
        elif operation.kind is OperationKind.COLLECTIVE and operation.call is not None:
            message = message_of(operation.module, operation.call, operation.phase, context, settings)
            one = message_time(job, message, speed, rates)
            seconds = operation.call.count * one
            shown = operation.call.count * shown_seconds(message, one, job.parallel.tensor, speed, rates)
            start = max(now, free.get(message.part, 0.0))
            found.append(PassEvent(f"{message.kind} {message.group}", path, message.part, start, seconds, operation.phase))
            free[message.part] = start + seconds
            now += shown
    return tuple(_scaled(found, total / now if now else 0.0, total))


def _name(operation: Operation, direction: Direction, layers: Iterator[int]) -> str:
    """The name of a module; for a layer its number. The second forward of a checkpoint has no numbers."""
    module = operation.module
    if module.kind is ModuleKind.LAYER and operation.phase == direction and (number := next(layers, None)) is not None:
        return f"layer {number}"
    return module.name


def _scaled(events: list[PassEvent], factor: float, total: float) -> list[PassEvent]:
    """The events in a pass of `total` seconds, those of an outer module before those of its children. None ends after the pass."""
    scaled = []
    for event in events:
        start = min(total, event.start * factor)
        seconds = min(total - start, event.seconds * (factor if event.stream == "compute" else 1.0))
        scaled.append(event._replace(start=start, seconds=seconds))
    return sorted(scaled, key=lambda event: (event.start, -event.seconds))
