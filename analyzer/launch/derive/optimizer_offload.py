"""Offloading of the optimizer to the host, and its requirements.

Megatron: `validate_args`, `OptimizerConfig.__post_init__` and `_get_megatron_optimizer_based_on_param_groups`, 0.16.1; the
same from 0.12 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import number, option, switched_on
from analyzer.specs import OffloadSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


def offload_spec(arguments: Arguments) -> OffloadSpec | None:
    """The fraction of optimizer states on the host; None without offloading. Raises InputError for what Megatron refuses."""
    if not switched_on(arguments, "optimizer_cpu_offload"):
        return None
    named = option(arguments, "optimizer_cpu_offload")
    if not switched_on(arguments, "use_precision_aware_optimizer"):
        raise InputError(named, "needs the precision-aware optimizer", "add --use-precision-aware-optimizer")
    if switched_on(arguments, "fp8_param_gather"):
        if arguments.get("fp8_recipe", "delayed") != "delayed":
            raise InputError(named, "supports FP8 parameters only with the delayed recipe", "add --fp8-recipe delayed")
        raise UnsupportedError(named, "offloading with FP8 parameters is not modelled", "leave out --fp8-param-gather")
    fraction = number(arguments, "optimizer_offload_fraction", 1.0)
    if not 0 <= fraction <= 1:
        raise InputError(
            option(arguments, "optimizer_offload_fraction"), f"{fraction:g} is not between 0 and 1", "give a number between 0 and 1"
        )
    return OffloadSpec(
        fraction=fraction,
        pinned_gradients=bool(arguments.get("pin_cpu_grads", True)),
        collected=switched_on(arguments, "manual_gc"),
    )
