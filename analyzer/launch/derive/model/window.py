"""Sliding windows and sinks of attention.

Megatron: `is_layer_window_attention` (megatron/core/transformer/utils.py) and `TransformerConfig`, 0.16.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from analyzer.errors import InputError
from analyzer.launch.derive.reading import option, text

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.specs import Implementation

SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]


def read_window(
    arguments: Arguments, *, layers: int, implementation: Implementation
) -> tuple[tuple[int, int] | None, tuple[bool, ...]]:
    """The window (tokens before and after), and which decoder and MTP layers have it. Raises InputError for what is not a window.

    From core 0.16 on, the layer numbers of MTP layers follow those of the decoder (`MultiTokenPredictionLayer`). `layers`: the
    number of layers with such a number.
    """
    value = arguments.get("window_size")
    if value is None:
        return None, ()
    named = option(arguments, "window_size")
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise InputError(named, f"{value!r} is not a pair", "give tokens before and after, as 128,0")
    if implementation == "legacy":
        raise InputError(named, "legacy models do not have it", "leave out --use-legacy-models")
    before, after = (int(each) for each in value)
    if before < -1 or after not in (0, -1):
        raise InputError(named, f"{before},{after} is not a causal window", "give tokens before and 0, as 128,0")
    return (before, after), _layers(arguments, layers=layers)


def _layers(arguments: Arguments, *, layers: int) -> tuple[bool, ...]:
    frequency = arguments.get("window_attn_skip_freq")
    named = option(arguments, "window_attn_skip_freq")
    if frequency is None:
        return (True,) * layers
    if isinstance(frequency, int):
        if frequency < 1:
            raise InputError(named, f"{frequency} is below 1", "give N of 1 or more: every N-th layer has no window")
        return tuple(layer % frequency != 0 for layer in range(1, layers + 1))
    pattern = tuple(bool(each) for each in frequency) if isinstance(frequency, list | tuple) else ()
    if len(pattern) < layers:
        raise InputError(
            named, f"lists {len(pattern)} layers, and the model has {layers}, MTP layers included", f"give {layers} numbers"
        )
    return pattern[:layers]


def softmax_type(arguments: Arguments, *, implementation: Implementation) -> SoftmaxType:
    """Kind of softmax. Raises InputError for sinks in legacy models, which have none."""
    kind = text(arguments, "softmax_type", "vanilla")
    named = option(arguments, "softmax_type")
    if kind not in ("vanilla", "off-by-one", "learnable"):
        raise InputError(named, f"{kind!r} is not a kind of softmax", "use vanilla, off-by-one or learnable")
    if kind != "vanilla" and implementation == "legacy":
        raise InputError(named, "legacy models do not have it", "leave out --use-legacy-models")
    return cast(SoftmaxType, kind)
