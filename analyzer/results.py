"""What the analysis found: plain frozen records that reports print and nothing computes from.

All sizes are bytes and all ranks are global. `report/json_report.py` gives these records the names of the JSON contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from analyzer.layout.groups import RankRanges
from analyzer.layout.stages import Chunk
from analyzer.modules.tree import Module
from analyzer.specs import TrainingJob


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """A share of the peak with its name."""

    name: str
    bytes: int


class PeakEvent(Enum):
    """What runs at the peak of a training run. Values are for reports."""

    BETWEEN_ITERATIONS = "between iterations"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer step"
    MODEL_SHARDING = "sharding of the model"
    OPTIMIZER_CREATION = "creation of the optimizer"
    CAPTURE = "capture of CUDA graphs"
    RECORDED = "recorded"
    """Taken from a trace."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of a rank over a training run. `*_bytes` as in the JSON contract, docs/json.md."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    runtime_bytes: int
    """Workspaces and caches."""
    allocated_bytes: int
    """After an optimizer step."""
    activations_bytes: int
    """Saved for backward, at the peak."""
    transient_bytes: int
    """Everything else at the peak; negative where states do not exist yet."""
    peak_allocated_first_iteration_bytes: int
    peak_allocated_bytes: int
    peak_event: PeakEvent
    peak_in_first_iteration: bool = False
    peak_at: str
    """The peak in words: 'backward of microbatch 3, output_layer'."""
    peak_reserved_bytes: int
    device_bytes: int
    device_range_bytes: tuple[int, int]
    """Lower and upper bound of device_bytes."""
    graph_pool_bytes: int = 0
    """Memory pool of CUDA graphs: reserved, and no longer allocated after their capture."""
    unsplit_bytes: int = 0
    """Of runtime_bytes: what blocks are larger than their tensors."""
    unsplit_at_first_peak_bytes: int = 0
    """The same for activations, at the peak of the first iteration."""
    unsplit_at_peak_bytes: int = 0
    """The same at the peak, with activations."""
    replayed: bool = False
    """Blocks and segments come from the simulated allocator; otherwise they are an estimate."""
    runtime_parts: tuple[MemoryPart, ...] = ()
    """What runtime_bytes consists of."""
    transient_parts: tuple[MemoryPart, ...] = ()
    """What transient_bytes consists of."""
    microbatches_in_flight: tuple[int, ...] = ()
    """For each chunk, at the peak."""


@dataclass(frozen=True, kw_only=True)
class RankClass:
    """Ranks that are alike in memory: one pipeline rank, unless its replicas own or offload different parameters."""

    ranks: RankRanges
    pipeline_rank: int
    parameters: int
    """On one of these ranks."""
    parameters_routed_experts: int
    chunks: tuple[Chunk, ...]
    trees: tuple[Module, ...]
    """One for each chunk, in the same order."""
    memory: RankMemory


@dataclass(frozen=True, kw_only=True)
class CommunicationRow:
    """One row of the communication table: one collective of one module on one pipeline rank."""

    group: str
    kind: str
    phase: str
    module: str
    pipeline_rank: int
    shape: tuple[int, ...]
    dtype: str
    message_bytes: int
    """Payload of one call on one rank."""
    calls_per_microbatch: int
    """0 for what happens once per iteration."""
    calls_per_iteration: int
    bytes_per_iteration: int
    peer: str = ""
    """For point-to-point: 'next' or 'previous' pipeline rank."""
    batched: bool = False
    """For point-to-point: issued together with others by batch_isend_irecv, not asynchronously on its own."""


@dataclass(frozen=True, kw_only=True)
class CommunicationTotal:
    """Sums over one kind of group: for the busiest rank, and over all ranks of the world."""

    calls_per_iteration: int
    bytes_per_iteration: int
    cluster_calls_per_iteration: int
    cluster_bytes_per_iteration: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Does it fit. `fits` and `state` are None where no capacity is known."""

    fits: bool | None
    """Whether the estimate is within the capacity."""
    state: Literal["fits", "tight", "does not fit"] | None
    """Tight is where the capacity lies between the least and the most that the fullest rank may take."""
    gpu: str | None
    capacity_bytes: int | None
    tightest_rank: int
    headroom_bytes: int | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change of flags and the peak it would lead to on the fullest rank."""

    change: str
    device_bytes: int
    saves_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Bytes in use over an iteration, as so many equal stretches of events; each stretch at its fullest instant."""

    kinds: tuple[str, ...]
    """parameter, gradient, optimizer, workspace, activation, temporary."""
    points: tuple[tuple[int, ...], ...]
    """Bytes of each kind."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything there is to say about a launch."""

    engine: Literal["formula", "shadow", "both"]
    job: TrainingJob
    groups: dict[str, tuple[tuple[int, ...], ...]]
    groups_truncated: bool
    group_counts: dict[str, int]
    """Groups of each kind in the world, also where the list is cut."""
    full_model: Module
    """The model without parallelism (t = p = 1), for the tree and the parameter counts."""
    parameters: int
    parameters_unpadded: int
    parameters_active: int
    parameters_routed_experts: int
    ranks: tuple[RankClass, ...]
    communication: tuple[CommunicationRow, ...]
    communication_totals: dict[str, CommunicationTotal]
    verdict: Verdict
    advice: tuple[Advice, ...]
    assumptions: tuple[str, ...]
    timelines: tuple[Timeline, ...] = ()
    """Of each rank class, in the same order; only where a step was run."""
