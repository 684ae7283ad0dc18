"""What is assumed for releases before core 0.12.

Modelled differences are the fields of `specs/release_changes.py` that change before 0.12, the default of the layers (0.6 and 0.8)
and fused kernels (0.5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.launch.derive.reading import RELEASE_2023, integer, since, switched_on, text
from analyzer.specs.release import describe

if TYPE_CHECKING:
    from analyzer.launch.derive.launch_input import LaunchInput

_FEATURES: Final = (
    ("multi_latent_attention", "latent attention"),
    ("use_torch_fsdp2", "FSDP2"),
    ("use_precision_aware_optimizer", "the precision-aware optimizer"),
)


def assume_earlier_release(launch: LaunchInput) -> None:
    """Adds the assumption about parts of a release before core 0.12 that are computed as in a later release."""
    arguments = launch.arguments
    if arguments.release == RELEASE_2023 or since(arguments, "0.12"):
        return
    parts = ["Transformer Engine"] if text(arguments, "transformer_impl", "") == "transformer_engine" else []
    parts += [name for dest, name in _FEATURES if switched_on(arguments, dest)]
    parts += ["experts"] if integer(arguments, "num_experts") else []
    parts += ["FP8"] if arguments.get("fp8") is not None else []
    if not parts:
        return
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    launch.assume(
        f"{listed[0].upper()}{listed[1:]}: memory as of core 0.12 is assumed, which may be more or less than in "
        f"{describe(arguments.release)}."
    )
