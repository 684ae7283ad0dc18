"""Model states of a rank: parameters, gradients and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from analyzer.modules.tree import Tensor


class StartPeak(Enum):
    """The cause of the peak before the first iteration."""

    SHARDING = "sharding of the model"
    BUFFERS = "creation of the parameter buffers"
    OPTIMIZER = "creation of the optimizer"


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of model states on one rank, and when they are allocated."""

    parameters: int
    gradients: int
    master_weights: int
    """fp32 master weights, created with the optimizer."""
    moments: int
    """Optimizer moments, created in the first step."""
    gradient_copies: int
    """fp32 copies of 16-bit gradients: created in each step, freed before the next forward."""
    moments_from_start: bool = False
    """Moments exist before the first forward."""
    gathered: int = 0
    """Bytes of parameters that are unsharded between iterations."""
    at_start: int = 0
    """Peak while the states are created."""
    start_peak: StartPeak = StartPeak.SHARDING
    moved_at_start: int = 0
    """Bytes of parameters at that peak that are allocated separately, in addition to the buffers that they move into."""
    permanent_gradient_copies: int = 0
    """fp32 copies of 16-bit gradients that are created in the first step and never freed."""
    step_workspace: tuple[Tensor, ...] = ()
    """Temporary tensors at the peak of the optimizer step, in addition to `gradient_copies`."""
    first_step_bytes: int = 0
    """Bytes at the peak of the first step beyond those after it. Some moments may be created after the peak."""

    @property
    def before_first_step(self) -> int:
        """Bytes at the start of the first forward."""
        return self.parameters + self.gradients + self.master_weights + (self.moments if self.moments_from_start else 0)

    @property
    def steady(self) -> int:
        """Bytes at the start of any later forward."""
        return self.parameters + self.gradients + self.master_weights + self.moments + self.permanent_gradient_copies

    def with_start(self, size: int, cause: StartPeak, *, moved: int = 0) -> States:
        """These states if `size` bytes are allocated at another peak before the first iteration. `moved`: `moved_at_start`."""
        if size <= self.at_start:
            return self
        return replace(self, at_start=size, start_peak=cause, moved_at_start=moved)
