"""A call of a rank."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv", "broadcast"]
Phase = Literal["forward", "backward", "recompute", "gradient", "parameter"]


class Call(NamedTuple):
    """A collective or a point-to-point message of one rank."""

    group: str
    kind: Kind
    phase: Phase
    module: str
    """Path of the module, or the name of what is communicated."""
    shape: tuple[int, ...]
    dtype: str
    per_microbatch: int = 0
    """Calls for each microbatch."""
    per_iteration: int = 0
    """Further calls for each iteration."""
    peer: str = ""
    """Of a point-to-point message: 'next' or 'previous' pipeline rank."""
    batched: bool = False
    """Of a point-to-point message: issued with others by batch_isend_irecv."""
