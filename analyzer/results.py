"""Results of an analysis as frozen records: memory, communication, verdict and advice.

All sizes are in bytes and all ranks are global. `docs/json.md` describes the fields that appear in the JSON report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from analyzer.layout.groups import RankRanges
from analyzer.layout.stages import Chunk
from analyzer.modules.tree import Module
from analyzer.specs import TrainingJob
from analyzer.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas

FLOPS_DEFINITION: Final = (
    "Model FLOPs are those of Megatron's num_floating_point_operations. Utilization is of the dense 16-bit peak of the GPU; of the "
    "hardware, with the operations of recomputed GEMMs and attention."
)


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """A named part of the memory of a rank."""

    name: str
    bytes: int


class PeakEvent(Enum):
    """The phase of a training run in which the peak occurs. Reports print the values."""

    BETWEEN_ITERATIONS = "between iterations"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer step"
    MODEL_SHARDING = "sharding of the model"
    BUFFER_CREATION = "creation of the parameter buffers"
    OPTIMIZER_CREATION = "creation of the optimizer"
    CAPTURE = "capture of CUDA graphs"
    RECORDED = "recorded"
    """The peak is from a trace, without its phase."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank during training. `docs/json.md` defines the fields ending in `_bytes`."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    runtime_bytes: int
    """Workspaces and caches."""
    allocated_bytes: int
    """Allocated after an optimizer step."""
    activations_bytes: int
    """Saved for backward, at the peak."""
    transient_bytes: int
    """The remainder of the peak. Negative if the peak is in the first iteration, before optimizer states exist."""
    peak_allocated_first_iteration_bytes: int
    peak_allocated_bytes: int
    peak_event: PeakEvent
    peak_in_first_iteration: bool = False
    """The peak is in the first iteration or before it."""
    peak_at: str
    """Description of the peak, such as 'backward of microbatch 3, output_layer'."""
    peak_reserved_bytes: int
    device_bytes: int
    device_range_bytes: tuple[int, int]
    """Lower and upper bound of device_bytes."""
    garbage_bytes: int = 0
    """Part of runtime_bytes that Python may free before the peak: the lower bound is without it."""
    released_bytes: int = 0
    """Reserved bytes that PyTorch returns to CUDA, because they would exceed the capacity of the GPU."""
    graph_pool_bytes: int = 0
    """Memory pool of CUDA graphs: part of reserved memory, and of allocated memory only during the capture."""
    unsplit_bytes: int = 0
    """Part of runtime_bytes: bytes of allocator blocks beyond the sizes of their tensors."""
    unsplit_at_first_peak_bytes: int = 0
    """The same at the peak of the first iteration."""
    unsplit_at_peak_bytes: int = 0
    """The same at the peak."""
    replayed: bool = False
    """Whether reserved memory is from a simulation of PyTorch's caching allocator. Otherwise it is an estimate."""
    runtime_parts: tuple[MemoryPart, ...] = ()
    """Parts of runtime_bytes."""
    transient_parts: tuple[MemoryPart, ...] = ()
    """Parts of transient_bytes."""
    microbatches_in_flight: tuple[int, ...] = ()
    """For each model chunk, at the peak."""


@dataclass(frozen=True, kw_only=True)
class RankClass:
    """Ranks with equal memory: those of one pipeline rank, unless its replicas own or offload different parameters."""

    ranks: RankRanges
    pipeline_rank: int
    parameters: int
    """Parameters on one of these ranks."""
    parameters_routed_experts: int
    chunks: tuple[Chunk, ...]
    trees: tuple[Module, ...]
    """The module tree of each chunk, in the same order."""
    memory: RankMemory


@dataclass(frozen=True, kw_only=True)
class CommunicationRow:
    """One row of the communication table: one collective or message of a module on a pipeline rank."""

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
    """0 for calls that are made once per iteration."""
    calls_per_iteration: int
    bytes_per_iteration: int
    peer: str | None = None
    """For point-to-point: 'next' or 'previous' pipeline rank."""
    batched: bool = False
    """For point-to-point: issued together with others by `batch_isend_irecv`."""


@dataclass(frozen=True, kw_only=True)
class CommunicationTotal:
    """Sums over one kind of group: of the rank with the most bytes, and of all ranks (`cluster_`)."""

    calls_per_iteration: int
    bytes_per_iteration: int
    cluster_calls_per_iteration: int
    cluster_bytes_per_iteration: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the launch fits. `fits` and `state` are None if no capacity is known, or if the verdict is withheld."""

    fits: bool | None
    """Whether the estimated device memory is within the capacity."""
    state: Literal["fits", "tight", "does not fit"] | None
    """Tight: the capacity is between the lower and the upper bound for the highest-memory rank, or less than the margin is free."""
    gpu: str | None
    capacity_bytes: int | None
    tightest_rank: int
    headroom_bytes: int | None
    margin_bytes: int | None = None
    """Headroom below which the launch is tight; 0 if no margin is required, None if no capacity is known."""
    note: str = ""
    phase: str = ""
    """The phase of reinforcement learning or distillation that needs the most, of which the figures are; empty without phases."""
    images_bytes: int = 0
    """The most memory that images need on the highest-memory rank, which the headroom is without; 0 if none are counted."""
    withheld: str = ""
    """Why there is no verdict although the memory was computed; empty if there is one, or if no capacity is known."""

    @property
    def other_phase(self) -> str:
        """`phase`, if it is another one than the update."""
        return "" if self.phase == "update" else self.phase


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The memory of a phase of an iteration of reinforcement learning, on the rank that needs the most in it."""

    name: str
    """update, or the name of a phase in `analyzer.specs.fine_tuning`."""
    rank: int
    device_bytes: int
    device_range_bytes: tuple[int, int]
    """The least and the most that a rank may need, over all ranks."""
    states_bytes: int
    """Of it: model states of the training that stay on the GPU, workspaces, and weights of other models."""
    forward_bytes: int
    """Of it: activations, logits and temporary tensors."""
    engine_bytes: int
    """Of it: the inference engine, and the buffers that send weights to it."""
    host_bytes: int
    """Bytes of this rank in host memory: states and weights that were moved there."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change of options, and the device memory of the highest-memory rank with it."""

    change: str
    device_bytes: int
    saves_bytes: int
    fits: bool
    iteration_seconds: float | None = None
    """Seconds of an iteration with the change; None if the change is not enough, or if the speeds of the GPU are not known."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Allocated bytes over an iteration, down-sampled into equal intervals. Each point is the maximum of its interval."""

    kinds: tuple[str, ...]
    """Kinds of memory: parameter, gradient, optimizer, workspace, activation, temporary."""
    points: tuple[tuple[int, ...], ...]
    """Bytes of each kind, for each point."""


@dataclass(frozen=True, kw_only=True)
class StageTimeline:
    """The passes of a pipeline rank in an iteration, in seconds from its start. Long iterations are shortened."""

    pipeline_rank: int
    spans: tuple[tuple[float, float, str, int, int], ...]
    """Start, end, forward or backward, microbatch and chunk of each pass."""


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """A whole training."""

    iterations: int
    tokens: int
    days: float
    gpu_hours: float
    training_days: float
    """Of `days`, those of iterations."""
    evaluation_days: float
    checkpoint_days: float
    checkpoint_bytes: int
    """Size of one checkpoint; 0 if none is saved."""
    cost: float | None
    """GPU-hours times `--info-price`; None without it."""


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """The time of an iteration, and of the training if its length is known."""

    iteration_seconds: float
    range_seconds: tuple[float, float] | None
    """Interval that nine of ten measured iterations of the same kind lie in, which took no part in the fit. None with measured
    efficiencies of the user."""
    tokens_per_second_per_gpu: float
    model_flops_per_iteration: float
    """As Megatron counts them, for the global batch."""
    model_tflops_per_gpu: float
    model_flops_utilization: float
    """Of the dense 16-bit peak of the GPU."""
    hardware_flops_utilization: float
    """The same with recomputed operations, of the operations that the kernels execute."""
    flops_definition: str = FLOPS_DEFINITION
    peak_flops: float
    """Dense 16-bit operations per second of the GPU."""
    pipeline_rank: int
    parts_seconds: dict[str, float]
    """Parts of an iteration on the ranks of `pipeline_rank`, which finish last. They add up to its time."""
    bottleneck: str
    """The largest part, and what makes it smaller."""
    training: TrainingTime | None
    calibration: str
    """Where the efficiencies are from."""
    not_counted: tuple[str, ...] = ()
    timelines: tuple[StageTimeline, ...] = ()


@dataclass(frozen=True)
class NewestRelease:
    """What the newest known release of Megatron-LM would need instead of the assumed one."""

    release: str
    peak_difference_bytes: int | None
    """Allocated bytes at the highest peak, more than with the assumed release; None if the newest one refuses the launch."""
    refused: str = ""
    """The option that it refuses."""


class Exported:
    """A result that other programs and notebooks can read."""

    exports: ClassVar[dict[str, Callable[[Any], Any]]] = {}
    """Functions of `analyzer.report.exports`, a higher layer, by the name of the method that calls them."""

    def to_dict(self) -> dict[str, Any]:
        """The document that `--info-json` writes, as dictionaries, lists, texts and numbers. docs/json.md explains its fields.

        Sizes are in bytes, times in seconds. Of a training `newest_release` is None: only the command compares releases.
        """
        found: dict[str, Any] = self.exports["to_dict"](self)
        return found

    def _repr_html_(self) -> str:
        """The most important figures as a small HTML table, which a notebook shows."""
        return str(self.exports["_repr_html_"](self))


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Exported):
    """The full result of an analysis."""

    engine: Literal["formula", "shadow", "both"]
    job: TrainingJob
    groups: dict[str, tuple[Sequence[int], ...]]
    groups_truncated: bool
    group_counts: dict[str, int]
    """Number of groups of each kind, also if the list is shortened."""
    full_model: Module
    """The unsharded model (tensor and pipeline size 1), for the tree and the parameter counts."""
    parameters: int
    parameters_unpadded: int
    parameters_active: int
    parameters_routed_experts: int
    parameters_adapters: int
    """Not among `parameters`."""
    ranks: tuple[RankClass, ...]
    communication: tuple[CommunicationRow, ...]
    communication_totals: dict[str, CommunicationTotal]
    verdict: Verdict
    advice: tuple[Advice, ...]
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """The assumptions about options that are given: they are not modelled in full, or have no effect."""
    unknown: tuple[str, ...] = ()
    """What the launch does not say or this program does not know, one sentence each. The report begins with them."""
    phases: tuple[PhaseMemory, ...] = ()
    """The update and the other phases of reinforcement learning; empty for other launches."""
    newest: NewestRelease | None = None
    """Set if the release is assumed."""
    timelines: tuple[Timeline, ...] = ()
    """The timeline of each rank class, in the same order; empty unless a step was run."""
    time: TimeEstimate | None = None
    """None if the speeds of the GPU are not known."""
    command: tuple[str, ...] = field(default=(), compare=False)
    """The words of the launch that was analyzed; empty if the job was not read from words. Equal results may differ in it."""

    def __repr__(self) -> str:
        """The verdict, the highest memory of a rank and the time of an iteration; the fields would fill pages."""
        size = max((rank.memory.device_bytes for rank in self.ranks), default=0)
        time = "" if self.time is None else f", {format_seconds(self.time.iteration_seconds)} for an iteration"
        gpu = f" on {self.verdict.gpu}" if self.verdict.gpu else ""
        return f"<Report: {self.verdict.state or 'no verdict'}{gpu}, {format_bytes(size)} of the highest-memory rank{time}>"

    def to_pandas(self) -> pandas.DataFrame:
        """The memory as a pandas DataFrame, one row for each rank class, which are ranks with equal memory.

        Columns: `ranks` (such as "0-3, 8-11"), `number_of_ranks`, `pipeline_rank`, `parameters`, and the sizes of `RankMemory` in
        bytes. Raises ImportError without pandas.
        """
        return self.exports["to_pandas"](self)
