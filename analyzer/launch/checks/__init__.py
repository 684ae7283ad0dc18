"""Combinations of options that Megatron refuses, and that the specs of a job do not show.

A launch that Megatron refuses has no memory, time or communication. `tests/data/megatron_checks` lists every check of Megatron-LM
0.16 to 0.19, with the function of this program that does the same, or the reason why there is none. Checks of a single spec are
in `analyzer.launch.derive`, those of the layout in `analyzer.specs.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from analyzer.launch.checks.configs import config_violations
from analyzer.launch.checks.training_arguments import argument_violations
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import TrainingJob

__all__ = ["option_violations"]


def option_violations(launch: LaunchInput, job: TrainingJob) -> Iterator[Violation]:
    """The checks of Megatron that a launch breaks. `job` has the sizes that are derived from its options."""
    return chain(argument_violations(launch, job), config_violations(launch, job))
