"""Linear attention: its sizes, and the layers that have it.

Megatron: `TransformerConfig.__post_init__`, `get_linear_attention_pattern` and `_get_backend_spec_provider`
(core/models/gpt/experimental_attention_variant_module_specs.py), 0.16.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.launch.derive.model.hybrid import pattern_dest, read_pattern
from analyzer.launch.derive.model.mtp import mtp_layers
from analyzer.launch.derive.reading import option, positive, switched_on, text
from analyzer.specs import LinearAttentionSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

_FREQUENCY = "linear_attention_freq"


def linear_attention_spec(arguments: Arguments, *, num_layers: int) -> LinearAttentionSpec | None:
    """Sizes of a gated delta net; None without it. Raises InputError for options that it excludes, and for a missing pattern."""
    pattern = read_pattern(arguments)
    if pattern is not None and "G" in pattern.written:
        named, layers = option(arguments, pattern_dest(arguments)), tuple(letter == "G" for letter in pattern.letters)
    elif pattern is None and arguments.get("experimental_attention_variant") == "gated_delta_net":
        named, layers = option(arguments, "experimental_attention_variant"), ()
    else:
        return None
    if text(arguments, "transformer_impl", "transformer_engine") == "local" or switched_on(arguments, "use_legacy_models"):
        raise InputError(
            named,
            "a gated delta net needs layers of Transformer Engine",
            "use --transformer-impl transformer_engine, and leave out --use-legacy-models",
        )
    if not switched_on(arguments, "swiglu"):
        raise InputError(named, "the convolution of a gated delta net needs the activation function SiLU", "add --swiglu")
    frequency = arguments.get(_FREQUENCY)
    spec = LinearAttentionSpec(
        layers=layers or _layers(arguments, num_layers=num_layers),
        frequency=frequency if isinstance(frequency, int) and not layers else None,
        num_key_heads=positive(arguments, "linear_num_key_heads") or 16,
        num_value_heads=positive(arguments, "linear_num_value_heads") or 32,
        key_head_dim=positive(arguments, "linear_key_head_dim") or 128,
        value_head_dim=positive(arguments, "linear_value_head_dim") or 128,
        conv_kernel_dim=positive(arguments, "linear_conv_kernel_dim") or 4,
    )
    _check_sizes(arguments, spec)
    return spec


def _check_sizes(arguments: Arguments, spec: LinearAttentionSpec) -> None:
    """Raises InputError for heads that Megatron refuses, and for sizes that the kernels do not have.

    `l2norm` of flash-linear-attention, and `causal_conv1d_fn` (causal_conv1d 1.6: csrc/causal_conv1d.cpp).
    """
    keys, values = spec.num_key_heads, spec.num_value_heads
    if values % keys:
        raise InputError(
            option(arguments, "linear_num_value_heads"),
            f"{values} is not a multiple of {keys}, the number of key heads",
            f"use a multiple of {keys}, or another {option(arguments, 'linear_num_key_heads')}",
        )
    if not 2 <= spec.conv_kernel_dim <= 4:
        raise InputError(
            option(arguments, "linear_conv_kernel_dim"),
            f"{spec.conv_kernel_dim}: the convolution has 2 to 4",
            "use 4",
        )


def _layers(arguments: Arguments, *, num_layers: int) -> tuple[bool, ...]:
    """For each decoder layer whether its attention is linear: all but every N-th, or by a list of 0 and 1."""
    value = arguments.get(_FREQUENCY)
    named = option(arguments, _FREQUENCY)
    if value is None:
        raise InputError(
            named,
            "is missing: it says which layers have linear attention",
            f"add it, for example {named} 4: every fourth layer has full attention",
        )
    if not isinstance(value, list | tuple):
        every = positive(arguments, _FREQUENCY) or 1
        return tuple(layer % every != 0 for layer in range(1, num_layers + 1))
    if mtp_layers(arguments):
        # `num_floating_point_operations` (training.py) needs MTP layers in the list, and `get_linear_attention_pattern` none
        raise InputError(named, "Megatron stops with a list and MTP layers", f"give a number, for example {named} 4")
    if len(value) != num_layers:
        raise InputError(named, f"lists {len(value)} layers and --num-layers is {num_layers}", f"write {num_layers} items")
    strange = next((each for each in value if each not in (0, 1)), None)
    if strange is not None:
        raise InputError(named, f"{strange!r} is neither 0 (full attention) nor 1 (linear)", "write a list of 0 and 1")
    return tuple(each == 1 for each in value)


def output_gate(arguments: Arguments) -> bool:
    """Whether attention has output gates. Raises InputError for multi-latent attention (`MLATransformerConfig.__post_init__`)."""
    gated = switched_on(arguments, "attention_output_gate")
    if gated and switched_on(arguments, "multi_latent_attention"):
        raise InputError(
            option(arguments, "attention_output_gate"), "is not supported with --multi-latent-attention", "keep one of the two"
        )
    return gated
