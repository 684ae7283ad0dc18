"""The launch whose layouts are searched, and the jobs of changed launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analyzer.errors import AnalyzerError, InputError
from analyzer.launch.build import build
from analyzer.specs import TrainingJob
from analyzer.specs.option_names import flag_of
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.launchers.world import World
    from analyzer.specs import HardwareSpec

Changes = Mapping[str, object]
"""New values of Megatron's options by dest; None for an option that is left out."""
KEPT_JOBS: Final = 4096
"""Jobs that `Jobs` keeps, of about 10 kB each."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A launch and a target GPU. It can be sent to another process."""

    arguments: Arguments
    world: World
    environ: Mapping[str, str]
    folder: Path
    gpu: HardwareSpec
    speed: SpeedSpec
    rates: Efficiencies
    moe_imbalance: float
    given: TrainingJob
    """The job of the launch as it is; with another number of GPUs, for which it may not be legal, that of a changed launch."""
    runs: bool = True
    """Whether `given` is the job of the launch as it is."""
    with_any_change: Changes = field(default_factory=dict)
    """Options that a changed launch needs: the global batch size, if the launch leaves it to its layout."""

    def job(self, changes: Changes) -> TrainingJob:
        """The job of the launch with other values of some options.

        Raises AnalyzerError if Megatron refuses it, or if its release does not have one of the options.
        """
        for dest in changes:
            if dest not in self.arguments.values:
                fault = f"is not an option of Megatron-LM {self.arguments.release}"
                raise InputError(flag_of(dest), fault, "use a later release, or leave it out")
        return build(
            with_changes(self.arguments, changes),
            self.world,
            environ=self.environ,
            gpu=self.gpu,
            folder=self.folder,
            moe_imbalance=self.moe_imbalance,
        )

    @property
    def capacity(self) -> int:
        """Memory of the GPU in bytes."""
        if self.gpu.capacity_bytes is None:
            raise AnalyzerError("the memory of the GPU is not known")
        return self.gpu.capacity_bytes


class Jobs:
    """The jobs of a launch with changes. The latest are kept: a search needs the job of a layout at several steps.

    A job of which something is not modelled that is in the launch is none: of a launch with adapters, one without them.

    A copy in another process starts empty.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._withheld = frozenset(problem.given.withheld)
        self._known = lru_cache(maxsize=KEPT_JOBS)(self._derived)

    def of(self, changes: Changes) -> TrainingJob | None:
        """The job of the launch with other values of some options; None if Megatron refuses it."""
        return self._known(tuple(sorted(changes.items())))

    def _derived(self, changes: tuple[tuple[str, object], ...]) -> TrainingJob | None:
        try:
            job = self._problem.job(dict(changes))
        except AnalyzerError:
            return None
        return job if self._withheld.issuperset(job.withheld) else None

    def __reduce__(self) -> tuple[type[Jobs], tuple[Problem]]:
        return Jobs, (self._problem,)


def with_changes(arguments: Arguments, changes: Changes) -> Arguments:
    """The arguments with other values of some options."""
    removed = {dest for dest, value in changes.items() if value is None}
    return replace(arguments, values={**arguments.values, **changes}, given=(arguments.given | frozenset(changes)) - removed)
