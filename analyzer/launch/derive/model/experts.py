"""Whether a model has experts.

Megatron: `validate_args`, 0.16.1. The experts themselves are read by `moe`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.launch.derive.model.hybrid import layers_with_experts
from analyzer.launch.derive.reading import integer, option, since

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

IMBALANCE: Final = "--info-moe-imbalance"


def num_experts(arguments: Arguments) -> int | None:
    """None for a dense model; from 0.13 on, 0 means dense too. Raises InputError for other numbers below 1."""
    experts = integer(arguments, "num_experts")
    if not experts and any(layers_with_experts(arguments) or ()):
        raise InputError(option(arguments, "num_experts"), "is missing, and the pattern has layers with experts (E)", "add it")
    if experts is None or (experts == 0 and since(arguments, "0.13")):
        return None
    if experts <= 0:
        raise InputError(option(arguments, "num_experts"), f"{experts} is not above 0", "give 1 or more, or leave it out")
    return experts


def check_dense(arguments: Arguments, *, imbalance: float) -> None:
    """Raises InputError for options that need experts: from 0.13 on, `--moe-ffn-hidden-size` is one.

    From 0.18 on, Megatron ignores it if `--moe-layer-freq` leaves some layers dense.
    """
    ignored = since(arguments, "0.18") and _leaves_dense_layers(arguments.get("moe_layer_freq"))
    if arguments.get("moe_ffn_hidden_size") is not None and since(arguments, "0.13") and not ignored:
        raise InputError(
            option(arguments, "moe_ffn_hidden_size"), "there are no experts", "use --ffn-hidden-size, or add --num-experts"
        )
    if imbalance != 1:
        raise InputError(IMBALANCE, "there are no experts", "add --num-experts, or leave it out")


def _leaves_dense_layers(frequency: object) -> bool:
    """Whether `--moe-layer-freq` gives some layers no experts."""
    return 0 in frequency if isinstance(frequency, list | tuple) else isinstance(frequency, int) and frequency > 1
