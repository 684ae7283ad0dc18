"""Sizes of the decoder, with Megatron's defaults for those that are not given.

Megatron: `validate_args` and `TransformerConfig.__post_init__`, 0.16.1. Whether they can be split is checked by
`analyzer.specs.rules.model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.launch.derive.dropped_layers import layers_built
from analyzer.launch.derive.model.hybrid import read_pattern
from analyzer.launch.derive.reading import RELEASE_2023, option, positive, required, switched_on

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the decoder."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    max_position_embeddings: int
    seq_length: int


def ffn_hidden_size(arguments: Arguments, *, hidden_size: int) -> int:
    """Width of the FFN: 4·h, or with `--swiglu` the largest multiple of 64 that is at most 8·h/3.

    The 2023 code uses the latter with `--swiglu` even if `--ffn-hidden-size` is given. Its forks keep the given width.
    """
    given = positive(arguments, "ffn_hidden_size")
    gated = switched_on(arguments, "swiglu")
    if given is not None and not (gated and arguments.release == RELEASE_2023 and arguments.fork is None):
        return given
    return int(hidden_size * 4 * 2 / 3 / 64) * 64 if gated else 4 * hidden_size


def decoder_shape(launch: LaunchInput) -> Shape:
    """Sizes with their defaults filled in. Raises InputError for a size that is missing."""
    arguments = launch.arguments
    pattern = read_pattern(arguments)
    given = len(pattern.letters) if pattern is not None else _either(arguments, "num_layers", "encoder_num_layers", "32")
    num_layers = layers_built(launch, given)
    hidden = required(arguments, "hidden_size", "4096")
    heads = required(arguments, "num_attention_heads", "32")
    seq_length = _either(arguments, "seq_length", "encoder_seq_length", "4096")
    positions = required(arguments, "max_position_embeddings", str(seq_length))
    if positions < seq_length:
        raise InputError(
            option(arguments, "max_position_embeddings"),
            f"{positions} positions are fewer than the {seq_length} tokens of a sequence",
            f"use {seq_length} or more",
        )
    decoder = positive(arguments, "decoder_seq_length")
    if decoder is not None and decoder > positions:
        raise InputError(
            option(arguments, "decoder_seq_length"),
            f"{decoder} is above --max-position-embeddings {positions}",
            f"use {positions} or less",
        )
    kv_channels = positive(arguments, "kv_channels")
    if kv_channels is None:
        if hidden % heads:
            raise InputError(
                option(arguments, "num_attention_heads"),
                f"hidden size {hidden} cannot be split into {heads} heads",
                f"use a divisor of {hidden}, or set --kv-channels",
            )
        kv_channels = hidden // heads
    groups = _query_groups(launch, heads=heads)
    ffn = ffn_hidden_size(arguments, hidden_size=hidden)
    if ffn != (positive(arguments, "ffn_hidden_size") or ffn):
        launch.assume(f"The 2023 code overrides --ffn-hidden-size with {ffn} under --swiglu.")
    return Shape(
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=kv_channels,
        max_position_embeddings=positions,
        seq_length=seq_length,
    )


def _either(arguments: Arguments, dest: str, twin: str, example: str) -> int:
    """One of two options with the same meaning."""
    if arguments.get(twin) is None:
        return required(arguments, dest, example)
    if arguments.get(dest) is not None:
        raise InputError(option(arguments, twin), f"has the same meaning as {option(arguments, dest)}", "keep one of the two")
    return required(arguments, twin, example)


def _query_groups(launch: LaunchInput, *, heads: int) -> int:
    """Key and value heads. Without `--group-query-attention` their number has no effect."""
    arguments = launch.arguments
    given = positive(arguments, "num_query_groups")
    named = option(arguments, "num_query_groups")
    if not switched_on(arguments, "group_query_attention"):
        if "num_query_groups" in arguments.given and given != heads:
            launch.warn(f"{named} has no effect without --group-query-attention: every head has its own keys and values.")
        return heads
    groups = given or 1
    if heads % groups:
        raise InputError(named, f"{heads} heads cannot share {groups} query groups", f"use a divisor of {heads}")
    return groups
