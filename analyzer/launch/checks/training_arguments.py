"""Checks of options that `validate_args` does (megatron/training/arguments.py, 0.16 to 0.19), by topic."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from analyzer.launch.checks.checkpoints import checkpoint_violations
from analyzer.launch.checks.data import data_violations
from analyzer.launch.checks.graphs import graph_violations
from analyzer.launch.checks.legacy_models import legacy_violations
from analyzer.launch.checks.schedule import schedule_violations
from analyzer.launch.checks.sharding import sharding_violations
from analyzer.launch.derive.reading import switched_on
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import TrainingJob


def argument_violations(launch: LaunchInput, job: TrainingJob) -> Iterator[Violation]:
    """The checks of `validate_args` that a launch breaks. None for forks: some have removed a part of them."""
    arguments = launch.arguments
    if arguments.fork is not None:
        return iter(())
    return chain(
        schedule_violations(arguments),
        data_violations(arguments),
        checkpoint_violations(arguments),
        legacy_violations(arguments),
        sharding_violations(launch),
        graph_violations(arguments, job),
        _layers(arguments, job),
    )


def _layers(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """Kernels and communication of a layer that need another option."""
    if switched_on(arguments, "mla_down_proj_fusion") and job.model.mla is None:
        yield Violation(("mla_down_proj_fusion",), "is for multi-latent attention", "leave it out")
    if switched_on(arguments, "fake_process_group") and arguments.get("moe_token_dispatcher_type") == "flex":
        yield Violation(("fake_process_group",), "does not support the flex dispatcher", "add --moe-token-dispatcher-type alltoall")
