"""Requirements of the Lion optimizer.

Megatron: megatron/core/optimizer/__init__.py of 0.17, the first release with Lion. From 0.18 on it is one of the emerging
optimizers, which by default update embeddings and vectors with Adam (`_EMERGING_OPTIMIZERS`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import option, since, switched_on, text

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


def check_lion(arguments: Arguments) -> None:
    """Raises InputError for options that Megatron refuses with Lion, UnsupportedError for options that are not modelled with it."""
    if text(arguments, "optimizer", "adam") != "lion":
        return
    if since(arguments, "0.18"):
        raise UnsupportedError(
            "--optimizer lion",
            "Lion together with Adam, as in this release, is not modelled",
            "use adam, sgd or muon",
        )
    if switched_on(arguments, "use_distributed_optimizer"):
        named = option(arguments, "use_distributed_optimizer")
        raise InputError(named, "needs adam, and --optimizer is lion", "leave it out")
    for dest in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if switched_on(arguments, dest):
            raise UnsupportedError(option(arguments, dest), "sharding with Lion is not modelled", "use --optimizer adam")
