"""The contents of a trace as frozen dataclasses: its header and the events of a training step.

`time_ns` is the monotonic clock in nanoseconds. `sequence` is the index of the record in its file: it increases within a trace, and
has gaps where the file contains texts. allocator_hook/FORMAT.md describes the file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from analyzer.errors import AnalyzerError

Recorder = Literal["cuda", "shadow", "snapshot"]
Phase = Literal["build", "forward", "backward", "recompute", "optimizer"]
Role = Literal["parameter", "gradient", "optimizer", "activation", "temporary", "workspace"]

PHASES: Final[tuple[Phase, ...]] = ("build", "forward", "backward", "recompute", "optimizer")
ROLES: Final[tuple[Role, ...]] = ("parameter", "gradient", "optimizer", "activation", "temporary", "workspace")
FORMAT_VERSION: Final = (1, 2)


class TraceError(AnalyzerError):
    """A trace that cannot be read. The message names the file, the offset of the fault and the remedy."""

    def __init__(self, path: object, offset: int, fault: str, remedy: str = "record it again") -> None:
        super().__init__(f"{path}: byte {offset}: {fault}; {remedy}")
        self.offset = offset
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The origin of a trace."""

    recorder: Recorder
    argv: tuple[str, ...] = ()
    """The full launch command, the program first."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions by name: torch, cuda driver, megatron-core, transformer-engine. Packages that are not installed are missing."""
    gpu: str = ""
    """Name of the GPU, empty if there was none."""
    rank: int = 0
    world_size: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other data that can be represented in JSON."""
    version: tuple[int, int] = FORMAT_VERSION
    """Major and minor version of the format."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation. If it `failed`, `pointer` is 0."""

    sequence: int
    time_ns: int
    pointer: int
    bytes: int
    """As requested, before rounding by the allocator."""
    device: int
    stream: int
    failed: bool


@dataclass(frozen=True, slots=True)
class Free:
    """A free. It is recorded before the memory is freed, because the address may be reused immediately."""

    sequence: int
    time_ns: int
    pointer: int
    device: int
    stream: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A module is entered or left. The marks of one thread are nested."""

    sequence: int
    time_ns: int
    kind: Literal["enter", "leave"]
    name: str
    """Qualified name of the module, such as decoder.layers.0.mlp.linear_fc1; empty for a whole phase."""
    phase: Phase
    microbatch: int
    """From 0; -1 if there is none."""
    iteration: int
    """From 0; -1 if there is none."""


@dataclass(frozen=True, slots=True)
class CollectiveEvent:
    """One call of a collective, a send or a receive on this rank."""

    sequence: int
    time_ns: int
    kind: str
    group: str
    members: tuple[int, ...]
    """Global ranks of the group; empty if only `size` is known."""
    size: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Payload passed to the call on this rank."""
    phase: Phase | None = None
    peer: int | None = None
    """Global rank of the other side of a point-to-point call."""


@dataclass(frozen=True, slots=True)
class Label:
    """The tensor at `pointer`, an address inside a live allocation."""

    sequence: int
    time_ns: int
    pointer: int
    role: Role
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class GemmCall(NamedTuple):
    """Equal matrix products [m, k] · [k, n] in one call."""

    m: int
    n: int
    k: int
    products: int
    bits: int
    """Bits of an element of the factors."""
    accumulates: bool
    """The products are added to a tensor: to the gradient buffer."""


class AttentionCall(NamedTuple):
    """A fused attention kernel."""

    direction: Literal["forward", "backward"]
    batch: int
    heads: int
    """Query heads."""
    queries: int
    """Queries of a sample."""
    keys: int
    head_dim: int
    """Elements of a head of queries and keys."""
    value_dim: int
    causal: bool
    """No query attends to a later key. The last query and the last key have the same position."""
    window: int
    """Number of keys before its own that a query attends to; -1 without a limit."""


class MemoryCall(NamedTuple):
    """An operation whose time is that of the memory that it reads and writes."""

    direction: Literal["forward", "backward"]
    """`backward` includes what is recomputed there."""
    name: str
    """Of PyTorch's operation, of Transformer Engine's binding, or of a compiled function."""
    bytes: int


KernelCall = GemmCall | AttentionCall | MemoryCall


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """A GEMM, a fused attention kernel, or a memory-bound operation."""

    sequence: int
    time_ns: int
    call: KernelCall


Event = Allocation | Free | Mark | CollectiveEvent | Label | KernelEvent
