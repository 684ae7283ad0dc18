"""Sizes of the decoder: what is missing filled in, what does not divide refused.

Megatron: `validate_args` and `TransformerConfig.__post_init__`, 0.16.1. Where `divide` refuses only when a layer is
built, the check is here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.launch.derive.reading import RELEASE_2023, multiple_near, option, positive, required, since, switched_on

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


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
    assumptions: tuple[str, ...] = ()


def ffn_hidden_size(arguments: Arguments, *, hidden_size: int) -> int:
    """Width of the feed-forward layer: 4 h, or with `--swiglu` the multiple of 64 that is at most 8 h / 3.

    The 2023 code takes the latter with `--swiglu` even where `--ffn-hidden-size` is given.
    """
    given = positive(arguments, "ffn_hidden_size")
    gated = switched_on(arguments, "swiglu")
    if given is not None and not (gated and arguments.release == RELEASE_2023):
        return given
    return int(hidden_size * 4 * 2 / 3 / 64) * 64 if gated else 4 * hidden_size


def check_shape(arguments: Arguments, *, tensor: int, context: int, sequence_parallel: bool) -> Shape:
    """Sizes with their defaults filled in. Raises InputError for a size that is missing or does not divide."""
    num_layers = _either(arguments, "num_layers", "encoder_num_layers", "32")
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
    kv_channels = positive(arguments, "kv_channels")
    if kv_channels is None:
        if hidden % heads:
            raise InputError(
                option(arguments, "num_attention_heads"),
                f"hidden size {hidden} cannot be split into {heads} heads",
                f"use a divisor of {hidden}, or set --kv-channels",
            )
        kv_channels = hidden // heads
    if heads % tensor:
        raise InputError(
            option(arguments, "num_attention_heads"),
            f"{heads} heads cannot be split over {tensor} tensor-parallel ranks",
            f"use a multiple of {tensor}, for example {multiple_near(heads, tensor)}",
        )
    groups, assumptions = _query_groups(arguments, heads=heads, tensor=tensor)
    ffn = ffn_hidden_size(arguments, hidden_size=hidden)
    if ffn % tensor:
        raise InputError(
            option(arguments, "ffn_hidden_size"),
            f"{ffn} cannot be split over {tensor} tensor-parallel ranks",
            f"use a multiple of {tensor}, for example --ffn-hidden-size {multiple_near(ffn, tensor)}",
        )
    _check_sequence(arguments, seq_length=seq_length, tensor=tensor, context=context, sequence_parallel=sequence_parallel)
    if ffn != (positive(arguments, "ffn_hidden_size") or ffn):
        assumptions += (f"The 2023 code overrides --ffn-hidden-size with {ffn} under --swiglu.",)
    return Shape(
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=kv_channels,
        max_position_embeddings=positions,
        seq_length=seq_length,
        assumptions=assumptions,
    )


def _either(arguments: Arguments, dest: str, twin: str, example: str) -> int:
    """One of two options with the same meaning."""
    if arguments.get(twin) is None:
        return required(arguments, dest, example)
    if arguments.get(dest) is not None:
        raise InputError(option(arguments, twin), f"says the same as {option(arguments, dest)}", "keep one of the two")
    return required(arguments, twin, example)


def _query_groups(arguments: Arguments, *, heads: int, tensor: int) -> tuple[int, tuple[str, ...]]:
    """Key and value heads. Without `--group-query-attention` their number is not looked at."""
    given = positive(arguments, "num_query_groups")
    named = option(arguments, "num_query_groups")
    if not switched_on(arguments, "group_query_attention"):
        idle = "num_query_groups" in arguments.given and given != heads
        return heads, (
            (f"{named} does nothing without --group-query-attention: every head has its own keys and values.",) if idle else ()
        )
    groups = given or 1
    if heads % groups:
        raise InputError(named, f"{heads} heads cannot share {groups} query groups", f"use a divisor of {heads}")
    if groups % tensor == 0:
        return groups, ()
    if tensor % groups or not since(arguments, "0.16"):
        raise InputError(
            named,
            f"{groups} query groups cannot be split over {tensor} tensor-parallel ranks",
            f"use a multiple of {tensor}" + (" or a divisor of it" if since(arguments, "0.16") else ""),
        )
    return groups, (
        f"{groups} query groups are fewer than {tensor} tensor-parallel ranks: gathering the projections before attention "
        "and the copies of keys and values are not counted, so the peak is too low.",
    )


def _check_sequence(arguments: Arguments, *, seq_length: int, tensor: int, context: int, sequence_parallel: bool) -> None:
    named = option(arguments, "seq_length")
    if context > 1 and seq_length % (2 * context):
        raise InputError(
            named,
            f"{seq_length} tokens cannot be cut into 2 × {context} chunks for context parallelism",
            f"use a multiple of {2 * context}, for example {multiple_near(seq_length, 2 * context)}",
        )
    if sequence_parallel and seq_length // context % tensor:
        raise InputError(
            named,
            f"{seq_length // context} tokens on a rank cannot be split over {tensor} ranks for --sequence-parallel",
            f"use a multiple of {tensor * context}, for example {multiple_near(seq_length, tensor * context)}",
        )
    decoder = positive(arguments, "decoder_seq_length")
    limit = positive(arguments, "max_position_embeddings")
    if decoder is not None and limit is not None and decoder > limit:
        raise InputError(
            option(arguments, "decoder_seq_length"), f"{decoder} is above --max-position-embeddings {limit}", f"use {limit} or less"
        )
