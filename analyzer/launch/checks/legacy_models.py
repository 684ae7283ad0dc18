"""Checks of options that the legacy models do not have.

Megatron: `validate_args` (megatron/training/arguments.py), 0.16 and 0.17. Later releases have no legacy models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from analyzer.launch.derive.reading import option, since, switched_on, text
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

_WITHOUT: Final = ("overlap_param_gather", "rotary_interleaved", "decoupled_lr", "decoupled_min_lr", "moe_latent_size")
_REMEDY: Final = "leave out --use-legacy-models"


def legacy_violations(arguments: Arguments) -> Iterator[Violation]:
    """Options that need the models of Megatron core."""
    if not switched_on(arguments, "use_legacy_models") or not since(arguments, "0.16"):
        return
    for dest in _WITHOUT:
        if arguments.get(dest) not in (None, False):
            yield Violation((dest,), "legacy models do not have it", _REMEDY)
    context = arguments.get("context_parallel_size")
    if isinstance(context, int) and context > 1:
        yield Violation(("context_parallel_size",), "legacy models have no context parallelism", _REMEDY)
    written = text(arguments, "ckpt_format", "torch_dist")
    if written != "torch":
        yield Violation(
            ("use_legacy_models",), f"cannot be saved with {option(arguments, 'ckpt_format')} {written}", "add --ckpt-format torch"
        )
