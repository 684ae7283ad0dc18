"""What a trace holds, as frozen dataclasses: its header and the events of a training step.

Units: bytes are bytes, `time_ns` is the monotonic clock in nanoseconds, `sequence` is the position of the record in its file, so
that it only ever grows within a trace but has gaps where the file holds text. allocator_hook/FORMAT.md says how they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from analyzer.errors import AnalyzerError

Recorder = Literal["cuda", "shadow", "snapshot"]
Phase = Literal["build", "forward", "backward", "recompute", "optimizer"]
Role = Literal["parameter", "gradient", "optimizer", "activation", "temporary", "workspace"]

PHASES: Final[tuple[Phase, ...]] = ("build", "forward", "backward", "recompute", "optimizer")
ROLES: Final[tuple[Role, ...]] = ("parameter", "gradient", "optimizer", "activation", "temporary", "workspace")
FORMAT_VERSION: Final = (1, 0)


class TraceError(AnalyzerError):
    """A trace that cannot be read. The message names the file, the offset of the fault and what to do about it."""

    def __init__(self, path: object, offset: int, fault: str, remedy: str = "record it again") -> None:
        super().__init__(f"{path}: byte {offset}: {fault}; {remedy}")
        self.offset = offset
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Where a trace comes from."""

    recorder: Recorder
    argv: tuple[str, ...] = ()
    """The whole launch command, the program first."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions by name: torch, cuda driver, megatron-core, transformer-engine. What is not installed is not named."""
    gpu: str = ""
    """Name of the GPU, empty where there was none."""
    rank: int = 0
    world_size: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that JSON can hold."""
    version: tuple[int, int] = FORMAT_VERSION
    """Major and minor version of the format."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory was asked for. Where `failed`, nothing was given and `pointer` is 0."""

    sequence: int
    time_ns: int
    pointer: int
    bytes: int
    """As requested, before any rounding of the allocator."""
    device: int
    stream: int
    failed: bool


@dataclass(frozen=True, slots=True)
class Free:
    """Memory is about to be given back: recorded before it happens, since the address may be handed out again at once."""

    sequence: int
    time_ns: int
    pointer: int
    device: int
    stream: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A module is entered or left. Marks of one thread nest."""

    sequence: int
    time_ns: int
    kind: Literal["enter", "leave"]
    name: str
    """Qualified name of the module, such as decoder.layers.0.mlp.linear_fc1; empty for the phase as a whole."""
    phase: Phase
    microbatch: int
    """From 0; -1 outside any."""
    iteration: int
    """From 0; -1 outside any."""


@dataclass(frozen=True, slots=True)
class CollectiveEvent:
    """One call of a collective on this rank, or one send or receive."""

    sequence: int
    time_ns: int
    kind: str
    group: str
    members: tuple[int, ...]
    """Global ranks of the group; empty where only `size` is known."""
    size: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Payload handed to the call on this rank."""
    phase: Phase | None = None
    peer: int | None = None
    """Global rank of the other side of a point-to-point call."""


@dataclass(frozen=True, slots=True)
class Label:
    """The tensor that lies at `pointer` now: the start of a live allocation, or a place inside one."""

    sequence: int
    time_ns: int
    pointer: int
    role: Role
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


Event = Allocation | Free | Mark | CollectiveEvent | Label
