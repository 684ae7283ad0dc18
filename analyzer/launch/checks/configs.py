"""Checks of the configs that Megatron builds from its options, 0.16 to 0.19.

Sources: `__post_init__` of `TransformerConfig`, `MLATransformerConfig`, `ModelParallelConfig`, `OptimizerConfig` and
`DistributedDataParallelConfig` (megatron/core).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import TrainingJob


def config_violations(launch: LaunchInput, job: TrainingJob) -> Iterator[Violation]:
    """The checks of the configs that a launch breaks."""
    yield from ()
