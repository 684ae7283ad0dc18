"""Lion: what Megatron demands of a launch with it.

Megatron: megatron/core/optimizer/__init__.py of 0.17, the first release that has it. From 0.18 on it is one of the emerging
optimizers, which by default leave embeddings and vectors to Adam (`_EMERGING_OPTIMIZERS`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import option, since, switched_on, text

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


def check_beside_lion(arguments: Arguments) -> None:
    """Raises InputError for what Megatron refuses beside Lion, and for what it would take and we have no model of."""
    if text(arguments, "optimizer", "adam") != "lion":
        return
    if since(arguments, "0.18"):
        raise UnsupportedError(
            "--optimizer lion", "how this release shares parameters out to it and Adam is not modelled", "use adam, sgd or muon"
        )
    if switched_on(arguments, "use_distributed_optimizer"):
        named = option(arguments, "use_distributed_optimizer")
        raise InputError(named, "shards adam, and --optimizer is lion", "leave it out")
    for dest in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if switched_on(arguments, dest):
            raise UnsupportedError(option(arguments, dest), "sharding under Lion is not modelled", "use --optimizer adam")
