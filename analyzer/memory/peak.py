"""The peak of an iteration or of a whole training run on one rank, and the memory allocated at the peak."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from analyzer.modules.tree import Tensor
from analyzer.program.schedule.pipeline import Step
from analyzer.results import PeakEvent


class Remainder(Enum):
    """The remainder of a peak: memory other than model states, workspaces, activations and temporary tensors.

    The values are labels in reports.
    """

    REFERENCED = "tensors referenced by modules and pipeline stages"
    KEPT = "other tensors kept between iterations"
    NOT_CREATED = "not allocated yet in the first iteration"
    BEFORE_OPTIMIZER = "optimizer states and workspaces that are not allocated yet"
    UNSHARDED = "unsharded model before FSDP shards it"
    OPTIMIZER = "fp32 weights of the unsharded model"


@dataclass(frozen=True, kw_only=True)
class PeakPosition:
    """The point of a training run at which the peak occurs."""

    event: PeakEvent
    step: Step | None = None
    """The step of the schedule; None outside forward and backward."""
    path: str = ""
    """Dotted path of the module that runs."""
    chunks: int = 1
    """Number of model chunks of the rank."""
    first_iteration: bool = False
    capture: bool = False
    """Whether the peak occurs while CUDA graphs are captured."""

    @property
    def text(self) -> str:
        """Description for reports, such as 'first iteration, backward of microbatch 3, decoder.layers.mlp.linear_fc2'."""
        where = self.event.value
        if self.step is not None:
            chunk = f" of chunk {self.step.chunk}" if self.chunks > 1 else ""
            overlapped = " overlapped with a backward" if self.step.paired else ""
            where = f"{self.step.kind} of microbatch {self.step.microbatch}{chunk}{overlapped}, {self.path.partition('.')[2]}"
        capture = "capture of CUDA graphs, " if self.capture else ""
        return ("first iteration, " if self.first_iteration else "") + capture + where


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak on one rank. `bytes` is the sum of model states, workspaces, activations, temporary tensors and the remainder."""

    bytes: int
    workspaces: int
    """Bytes of workspaces and caches at the peak."""
    activations: int
    """Bytes saved for backward by all microbatches in flight."""
    transient: tuple[Tensor, ...]
    in_flight: tuple[int, ...]
    """For each chunk, the number of microbatches whose backward has not finished, including the running one."""
    position: PeakPosition
    before_capture: bool = False
    """Whether the peak is in an iteration before CUDA graphs are captured."""
    remainder: Remainder = Remainder.REFERENCED
