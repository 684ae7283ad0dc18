"""Checks of offloaded activations (`TransformerConfig.__post_init__`, 0.19)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from analyzer.launch.checks.graph_options import recomputed_modules
from analyzer.launch.derive.reading import integer, number, since
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.specs import TrainingJob


def offload_violations(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """The checks of `--fine-grained-activation-offloading` that a launch breaks."""
    if job.activation_offload is None or not job.activation_offload.modules or not since(arguments, "0.19"):
        return
    if job.recompute.granularity == "selective" and "moe" in recomputed_modules(arguments):
        inside = [module for module in job.activation_offload.modules if module in ("moe_act", "expert_fc1")]
        if inside:
            fault = f"{inside[0]} is in the MoE layer, which is recomputed"
            yield Violation(("offload_modules",), fault, f"leave {inside[0]} out, or leave moe out of --recompute-modules")
    for dest in ("min_offloaded_tensor_size", "delta_offload_bytes_across_pp_ranks"):
        size = integer(arguments, dest)
        if size is not None and size < 0:
            yield Violation((dest,), f"{size} is below 0", "give 0 or more")
    fraction = number(arguments, "activation_offload_fraction", 1)
    if not 0 <= fraction <= 1:
        yield Violation(("activation_offload_fraction",), f"{fraction:g} is not between 0 and 1", "give a number between 0 and 1")
