"""The order in which a pipeline rank runs its microbatches, forward and backward, in one iteration.

Source: megatron/core/pipeline_parallel/schedules.py, 0.16.1: `forward_backward_no_pipelining`,
`forward_backward_pipelining_without_interleaving` (1F1B) and `forward_backward_pipelining_with_interleaving`. The number of
microbatches is assumed to follow `analyzer.specs.rules.features.schedule_violations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from analyzer.units import ceil_div, power_of_two


@dataclass(frozen=True, slots=True)
class Step:
    """The forward or backward of a microbatch through a model chunk of a rank."""

    kind: Literal["forward", "backward"]
    microbatch: int
    chunk: int
    paired: bool = False
    """A forward that overlaps with the backward after it."""


class Pair(NamedTuple):
    """The chunks of an overlapped step."""

    forward: int
    backward: int
    newest: bool
    """No later microbatch than that of the backward has run in its chunk before this step."""
    ahead: int
    """Number of messages that are received at its end, for the steps after it."""
    sent: bool = False
    """The gradient that the step before it has sent is referenced until its own backward has sent one."""
    idle: bool = False
    """The chunk of the forward has run before, and none of its microbatches is in flight before this step."""
    unused: bool = False
    """If `idle`: its last input is the last one of the warm-up, which the schedule references."""


def steps(
    *,
    pipeline: int,
    pipeline_rank: int,
    chunks: int,
    microbatches: int,
    group_size: int | None = None,
    legacy: bool = False,
    combined: bool = False,
) -> tuple[Step, ...]:
    """The steps of `pipeline_rank` of `pipeline` in an iteration, in order.

    `chunks`: model chunks of a rank, 1 without interleaving. `group_size`: microbatches that an interleaved schedule runs through
    one chunk before the next; None for the pipeline size. `legacy`: the interleaved schedule before core 0.10, with groups of the
    pipeline size, where all forwards come first if there is one group. `combined` (`--overlap-moe-expert-parallel-comm`): one more
    forward before the first backward, then each forward overlaps with the backward after it.
    """
    group = pipeline if legacy or group_size is None else group_size
    if chunks == 1:  # a longer iteration starts with the same steps
        forwards, paired, backwards = (each[:microbatches] for each in _passes(1, power_of_two(microbatches), 1))
    else:
        forwards, paired, backwards = _passes(chunks, microbatches, group)
    if legacy and chunks > 1 and microbatches == pipeline:
        warmup = len(forwards)
    else:
        forwards_first = warmup_forwards(pipeline=pipeline, pipeline_rank=pipeline_rank, chunks=chunks, group_size=group)
        warmup = min(forwards_first + combined, len(forwards))
    steady = len(forwards) - warmup
    alternating = zip((paired if combined else forwards)[warmup:], backwards[:steady], strict=True)
    return (*forwards[:warmup], *(step for pair in alternating for step in pair), *backwards[steady:])


@lru_cache(maxsize=64)
def _passes(chunks: int, microbatches: int, group_size: int) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[Step, ...]]:
    """All forwards, the same forwards as overlapped steps, and all backwards, each in order; equal for every pipeline rank."""
    table = _table(chunks=chunks, microbatches=microbatches, group_size=group_size)
    return (
        tuple(Step("forward", microbatch, chunk) for microbatch, chunk in table),
        tuple(Step("forward", microbatch, chunk, paired=True) for microbatch, chunk in table),
        tuple(Step("backward", microbatch, chunks - 1 - chunk) for microbatch, chunk in table),
    )


def equivalent_microbatches(
    *,
    pipeline: int,
    chunks: int,
    microbatches: int,
    group_size: int | None = None,
    legacy: bool = False,
    combined: bool = False,
    pipeline_rank: int = 0,
) -> int:
    """A small number of microbatches that gives the same peak on `pipeline_rank` and later ranks.

    `steps` then has the same set of situations: kind and chunk of the step, whether its microbatch is the first or the last of the
    iteration, how many microbatches of each chunk are in flight, and whether the backward of the last input of the interleaved
    warm-up has run. The steady state repeats with a period of one microbatch in 1F1B, and of one group when interleaved; further
    periods are left out. `combined` as in `steps`.
    """
    if chunks == 1:
        return min(microbatches, pipeline - pipeline_rank + 2)
    group = pipeline if legacy or group_size is None else group_size
    groups = _different_groups(pipeline, max(1, pipeline_rank), chunks, group, combined)
    return min(microbatches, groups * group + microbatches % group)


@lru_cache(maxsize=256)
def _different_groups(pipeline: int, first_rank: int, chunks: int, group: int, combined: bool) -> int:
    """The number of groups of an interleaved schedule that reaches every situation on `first_rank` and later ranks.

    A period of the steady state follows the backward of the microbatch whose input is the last of the warm-up. On the first stage
    this input is that of an earlier pass than on the second.
    """
    period, groups = chunks * group, 3
    for rank in range(first_rank, pipeline):
        warmup = warmup_forwards(pipeline=pipeline, pipeline_rank=rank, chunks=chunks, group_size=group) + combined
        chunk = warmup % period // group
        backward = warmup // period * period + (chunks - 1 - chunk) * group + warmup % group
        groups = max(groups, ceil_div(warmup + backward + 1 + period, period))
    return groups


def most_in_flight(order: Sequence[Step], weights: Sequence[int]) -> int:
    """The maximum of the weights of all passes between their forward and backward. `weights`: that of each chunk."""
    in_flight = most = 0
    for step in order:
        in_flight += weights[step.chunk] if step.kind == "forward" else -weights[step.chunk]
        most = max(most, in_flight)
    return most


def warmup_forwards(*, pipeline: int, pipeline_rank: int, chunks: int, group_size: int) -> int:
    """Forwards before the first backward if there are enough microbatches (`get_pp_rank_microbatches`)."""
    behind = pipeline - pipeline_rank - 1
    return behind if chunks == 1 else behind * 2 + (chunks - 1) * group_size


def _table(*, chunks: int, microbatches: int, group_size: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) of each forward: a group of microbatches through all chunks, then the next (`get_schedule_table`)."""
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group_size)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group_size, microbatches))
    ]
