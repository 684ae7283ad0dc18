"""Checks of options that `validate_args` does (megatron/training/arguments.py, 0.16 to 0.19)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import TrainingJob


def argument_violations(launch: LaunchInput, job: TrainingJob) -> Iterator[Violation]:
    """The checks of `validate_args` that a launch breaks."""
    yield from _weight_decay(launch.arguments)


def _weight_decay(arguments: Arguments) -> Iterator[Violation]:
    """A weight decay that changes needs both ends; a constant one has none."""
    ends = ("start_weight_decay", "end_weight_decay")
    constant = arguments.get("weight_decay_incr_style", "constant") == "constant"
    for dest in ends:
        given = arguments.get(dest) is not None
        if constant and given:
            yield Violation((dest,), "has no effect while the weight decay is constant", "add --weight-decay-incr-style linear")
        if not constant and not given:
            yield Violation(("weight_decay_incr_style",), f"needs --{dest.replace('_', '-')}", "add it, for example 0.01")
