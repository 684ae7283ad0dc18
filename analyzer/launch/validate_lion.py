"""Lion: what Megatron demands of a launch with it.

Megatron: `validate_args` and megatron/core/optimizer/__init__.py, 0.18; 0.17 is the first release that has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.validate import option, since, switched_on, text

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


def check_lion(arguments: Arguments) -> None:
    """Raises InputError for what Megatron refuses beside Lion, and for what it would take and we have no model of."""
    if text(arguments, "optimizer", "adam") != "lion":
        return
    if switched_on(arguments, "use_distributed_optimizer"):
        named = option(arguments, "use_distributed_optimizer")
        if not since(arguments, "0.18"):
            raise InputError(named, "shards adam, and --optimizer is lion", "leave it out")
        raise UnsupportedError(named, "whole parameters shared out under Lion are not modelled", "leave it out")
    for dest in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if switched_on(arguments, dest):
            raise InputError(option(arguments, dest), "does not go with Lion", "leave it out, or use --optimizer adam")
    if switched_on(arguments, "fp16") and since(arguments, "0.18"):
        raise InputError("--fp16", "does not go with Lion", "use --bf16")
