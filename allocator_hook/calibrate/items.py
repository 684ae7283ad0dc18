"""What is measured: kernels, transfers between GPUs, and operations of the host, each with its seconds in the time model."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.kernels.seconds import kernel_seconds
from analyzer.time.links import Span
from analyzer.time.message_seconds import message_seconds
from analyzer.time.work.kernels import Attention, Gemm, MemoryBound

EXCHANGE: Final = "all_to_all"
"""The collective that exchanges the tokens of experts."""


class Transfer(NamedTuple):
    """A collective, or a message from one rank to another, in a group of ranks."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all or send."""
    payload: int
    """Bytes of the full tensor on one rank."""
    ranks: int
    near: int
    """Most ranks of the group in one NVLink domain."""

    @property
    def inside(self) -> bool:
        """Whether the group is in one NVLink domain."""
        return self.near >= self.ranks


class HostCalls(NamedTuple):
    """Operations that the host issues, for tensors so small that the GPU waits for the host."""

    name: str
    calls: float
    """Operations as the time model counts them."""


Item = Gemm | Attention | MemoryBound | Transfer | HostCalls


class Measured(NamedTuple):
    """An item with its measured time."""

    item: Item
    seconds: float
    of_launch: bool = False
    """A kernel of the given launch, in contrast to one of the standard set."""


def predicted_seconds(item: Item, speed: SpeedSpec, rates: Efficiencies) -> float:
    """Seconds of an item in the time model."""
    if isinstance(item, HostCalls):
        return item.calls * rates.host_call
    if isinstance(item, Transfer):
        exchange = "plain" if item.kind == EXCHANGE else ""
        return message_seconds(item.kind, item.payload, Span(item.ranks, item.near), speed, rates, exchange=exchange).total  # type: ignore[arg-type]
    return kernel_seconds(item, speed, rates)


def kind_of(item: Item) -> str:
    """The kind of an item in messages and in the file."""
    if isinstance(item, Gemm):
        grouped = "grouped " if item.grouped else "batched " if item.batch > 1 else ""
        return f"{grouped}GEMM in {item.precision} bit"
    if isinstance(item, Attention):
        return f"attention {item.name}"
    if isinstance(item, MemoryBound):
        return f"memory-bound kernel ({item.kind})"
    return f"{item.kind} between {item.ranks} GPUs" if isinstance(item, Transfer) else "host operation"


def as_json(measured: Measured, predicted: float, shipped: float) -> dict[str, Any]:
    """A row of the field `measured` of the file. Times are seconds."""
    item = measured.item
    return {
        "kernel": kind_of(item),
        "shape": dict(item._asdict()),
        "of_launch": measured.of_launch,
        "seconds": measured.seconds,
        "predicted": predicted,
        "predicted_as_shipped": shipped,
    }
