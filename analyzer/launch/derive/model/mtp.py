"""Multi-token prediction (MTP).

Megatron: `validate_args`, 0.16.1. Their place in the pipeline is checked by `analyzer.specs.rules.stages`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.launch.derive.model.hybrid import read_pattern
from analyzer.launch.derive.reading import integer, option, since

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.specs import ModelSpec


def mtp_layers(arguments: Arguments) -> int:
    """The number of MTP layers, 0 without any. Raises InputError for a negative one."""
    layers = integer(arguments, "mtp_num_layers") or 0
    if layers < 0:
        raise InputError(option(arguments, "mtp_num_layers"), f"{layers} is below 0", "give 1 or more, or leave it out")
    pattern = read_pattern(arguments)
    if pattern is None:
        return layers
    if layers and not pattern.depths:
        raise InputError(
            option(arguments, "mtp_num_layers"),
            "needs the layers of an MTP depth in the pattern",
            "add / and the letters of each depth, which core 0.17 and later read",
        )
    return pattern.depths


def mtp_layers_of(arguments: Arguments, *, model: ModelSpec, context: int) -> int:
    """The number of MTP layers of `model`. Raises InputError if it cannot have any."""
    layers = mtp_layers(arguments)
    if not layers:
        return 0
    named = option(arguments, "mtp_num_layers")
    if model.implementation == "legacy":
        raise InputError(named, "legacy models do not have it", "leave out --use-legacy-models")
    if model.position_embedding not in ("rope", "none"):
        raise InputError(
            named,
            f"is not supported with {model.position_embedding} positions",
            "use --position-embedding-type rope or none",
        )
    if arguments.get("recompute_method") == "uniform" and integer(arguments, "recompute_num_layers") not in (None, 1):
        raise InputError(
            option(arguments, "recompute_num_layers"),
            "with MTP layers, full recomputation must cover one layer at a time",
            "use --recompute-num-layers 1",
        )
    if context > 1 and not since(arguments, "0.13"):
        raise InputError(named, "is not supported with context parallelism before core 0.13", "use --context-parallel-size 1")
    return layers
