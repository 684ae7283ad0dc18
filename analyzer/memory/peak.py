"""The peak of an iteration, of a rank's whole run, and what is allocated then."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from analyzer.modules.tree import Tensor
from analyzer.results import PeakEvent
from analyzer.schedule.pipeline import Step


class Remainder(Enum):
    """What a peak contains beside states, workspaces, activations and temporary tensors. Values are labels for reports."""

    REFERENCED = "tensors that modules and stages reference"
    KEPT = "other tensors kept between iterations"
    NOT_CREATED = "not allocated yet in the first iteration"
    UNSHARDED = "model before it is sharded"
    OPTIMIZER = "fp32 weights of the unsharded model"


@dataclass(frozen=True, kw_only=True)
class PeakPosition:
    """Where in a training run the peak is."""

    event: PeakEvent
    step: Step | None = None
    """Of a forward or backward."""
    path: str = ""
    """The module that runs."""
    chunks: int = 1
    """Model chunks of the rank."""
    first_iteration: bool = False
    capture: bool = False
    """While CUDA graphs are captured."""

    @property
    def text(self) -> str:
        """'first iteration, backward of microbatch 3, decoder.layers.mlp.linear_fc2'."""
        where = self.event.value
        if self.step is not None:
            chunk = f" of chunk {self.step.chunk}" if self.chunks > 1 else ""
            beside = " beside a backward" if self.step.paired else ""
            where = f"{self.step.kind} of microbatch {self.step.microbatch}{chunk}{beside}, {self.path.partition('.')[2]}"
        capture = "capture of CUDA graphs, " if self.capture else ""
        return ("first iteration, " if self.first_iteration else "") + capture + where


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak on one rank. `bytes` is the sum of states, workspaces, activations, temporary tensors and the remainder."""

    bytes: int
    workspaces: int
    """Bytes of workspaces and caches that exist by then."""
    activations: int
    """Bytes saved for backward, of all microbatches in flight."""
    transient: tuple[Tensor, ...]
    in_flight: tuple[int, ...]
    """Microbatches of each chunk whose backward has not ended, the running one included."""
    position: PeakPosition
    before_capture: bool = False
    """In an iteration that runs before CUDA graphs are captured."""
    remainder: Remainder = Remainder.REFERENCED
