"""The order in which a pipeline rank runs its microbatches, forward and backward, in one iteration.

Read in megatron/core/pipeline_parallel/schedules.py, 0.16.1: `forward_backward_no_pipelining`,
`forward_backward_pipelining_without_interleaving` (1F1B) and `forward_backward_pipelining_with_interleaving`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from analyzer.errors import InputError

GROUP_SIZE = "--microbatch-group-size-per-virtual-pipeline-stage"
BATCH = "--global-batch-size"


@dataclass(frozen=True, slots=True)
class Step:
    """A microbatch passes through a chunk of this rank, forward or backward."""

    kind: Literal["forward", "backward"]
    microbatch: int
    chunk: int
    paired: bool = False
    """A forward that runs side by side with the backward after it."""


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
    """Everything that `pipeline_rank` of `pipeline` runs in an iteration, in order.

    `chunks` are the model chunks of a rank: 1 without interleaving. `group_size` is how many microbatches an
    interleaved schedule runs through one chunk before the next; None is the pipeline size. `legacy` is the interleaved
    schedule of 2023: groups are of the pipeline size, and where there is only one of them all forwards come first.
    `combined` (`--overlap-moe-expert-parallel-comm`) runs one forward more before the first backward, and then each
    forward side by side with the backward after it.

    Raises InputError where Megatron refuses the number of microbatches.
    """
    if chunks > 1:
        _check_interleaved(pipeline=pipeline, microbatches=microbatches, group_size=group_size, legacy=legacy)
    group = pipeline if legacy or group_size is None else group_size
    if chunks == 1:  # microbatch after microbatch: a longer iteration begins with the same steps
        forwards, paired, backwards = (each[:microbatches] for each in _passes(1, 1 << (microbatches - 1).bit_length(), 1))
    else:
        forwards, paired, backwards = _passes(chunks, microbatches, group)
    if legacy and chunks > 1 and microbatches == pipeline:
        warmup = len(forwards)
    else:
        forwards_first = _warmup(pipeline=pipeline, pipeline_rank=pipeline_rank, chunks=chunks, group_size=group)
        warmup = min(forwards_first + combined, len(forwards))
    steady = len(forwards) - warmup
    alternating = zip((paired if combined else forwards)[warmup:], backwards[:steady], strict=True)
    return (*forwards[:warmup], *(step for pair in alternating for step in pair), *backwards[steady:])


@lru_cache(maxsize=64)
def _passes(chunks: int, microbatches: int, group_size: int) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[Step, ...]]:
    """All forwards, the same as overlapped ones, and all backwards, each in order; those of every pipeline rank."""
    table = _table(chunks=chunks, microbatches=microbatches, group_size=group_size)
    return (
        tuple(Step("forward", microbatch, chunk) for microbatch, chunk in table),
        tuple(Step("forward", microbatch, chunk, paired=True) for microbatch, chunk in table),
        tuple(Step("backward", microbatch, chunks - 1 - chunk) for microbatch, chunk in table),
    )


def equivalent_microbatches(
    *, pipeline: int, chunks: int, microbatches: int, group_size: int | None = None, legacy: bool = False, pipeline_rank: int = 0
) -> int:
    """A number of microbatches, at most `microbatches`, that gives the same memory on `pipeline_rank` and later ones.

    With it `steps` has the same set of situations: kind and chunk of the step, whether its microbatch is the first or
    the last of the iteration, and how many microbatches of each chunk are in flight. The steady state repeats, every
    microbatch in 1F1B and every group of them when interleaved; what is beyond one period of it is left out here.

    Raises InputError where Megatron refuses the number of microbatches.
    """
    if chunks == 1:
        return min(microbatches, pipeline - pipeline_rank + 2)
    _check_interleaved(pipeline=pipeline, microbatches=microbatches, group_size=group_size, legacy=legacy)
    group = pipeline if legacy or group_size is None else group_size
    return min(microbatches, 3 * group + microbatches % group)


def _warmup(*, pipeline: int, pipeline_rank: int, chunks: int, group_size: int) -> int:
    """Forwards before the first backward, were there no end of microbatches (`get_pp_rank_microbatches`)."""
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


def _check_interleaved(*, pipeline: int, microbatches: int, group_size: int | None, legacy: bool) -> None:
    if legacy:
        if microbatches % pipeline:
            raise InputError(
                BATCH,
                f"{microbatches} microbatches are not a multiple of {pipeline} pipeline ranks, which interleaving needs",
                "change the batch size, or use no virtual stages",
            )
        return
    group = pipeline if group_size is None else group_size
    if group < pipeline:
        raise InputError(GROUP_SIZE, f"{group} is less than {pipeline} pipeline ranks", f"use {pipeline} or more")
    if group > microbatches:
        raise InputError(
            BATCH if group_size is None else GROUP_SIZE,
            f"interleaving runs groups of {group} microbatches, and there are {microbatches}",
            f"raise --global-batch-size to {group} microbatches or more, or use no virtual stages",
        )
    if 0 < microbatches % group < pipeline:
        raise InputError(
            BATCH if group_size is None else GROUP_SIZE,
            f"the last group of {group} would have {microbatches % group} of {microbatches} microbatches, "
            f"fewer than {pipeline} pipeline ranks",
            f"make the microbatches a multiple of {group}" + (f", or leave {pipeline} or more over" if group > pipeline else ""),
        )
