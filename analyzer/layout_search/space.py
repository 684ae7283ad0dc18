"""The layouts that a search considers: parallel sizes, distributions of layers, micro-batch sizes, recomputation and settings.

Only sizes that divide the world and the batch are listed here. Which of them Megatron accepts is decided by `analyzer.specs.rules`
and by building the job of the launch with the changed options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Final, NamedTuple

MOST_TENSOR: Final = 64
MOST_CONTEXT: Final = 64
MOST_VIRTUAL: Final = 16
MICRO_BATCHES: Final = (1, 2, 4, 8)
UNEVEN: Final = (-2, -1, 0, 1, 2)
"""Layers by which the first and the last pipeline rank may differ from the others."""


class Split(NamedTuple):
    """How the modules of a layer are sharded, and the size of a microbatch."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    micro_batch: int = 1
    sequence: bool = False
    """Sequence parallelism."""


class Stages(NamedTuple):
    """How layers are distributed over pipeline ranks."""

    pipeline: int = 1
    virtual: int = 1
    first: int | None = None
    """Layers of the first pipeline rank, if they are not those of the others."""
    last: int | None = None
    given: bool = False
    """The distribution of the launch, with its own options."""


class Recompute(NamedTuple):
    """Activation recomputation."""

    granularity: str | None = None
    method: str | None = None
    layers: int | None = None
    modules: tuple[str, ...] = ()
    given: bool = False
    """That of the launch, with its own options."""


class Layout(NamedTuple):
    """A candidate of a search. Layouts are ordered, so that the result does not depend on the order of evaluation."""

    setting: int
    """Index of the other options that are changed together."""
    split: Split
    stages: Stages
    recompute: Recompute


class Sizes(NamedTuple):
    """Values that each size may have."""

    tensor: Sequence[int]
    context: Sequence[int]
    expert: Sequence[int]
    expert_tensor: Sequence[int] | None
    """None: as the tensor-parallel size."""
    micro_batch: Sequence[int]
    pipeline: Sequence[int]
    virtual: Sequence[int]
    uneven: Sequence[int]


class Scale(NamedTuple):
    """What the sizes of a layout must divide."""

    world: int
    global_batch: int
    layers: int


def divisors(number: int, most: int) -> list[int]:
    """The divisors of a number up to `most`."""
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]


def splits(sizes: Sizes, scale: Scale) -> Iterator[Split]:
    """The splits for which at least one pipeline size divides the world and the batch."""
    for tensor, context, expert, micro in product(sizes.tensor, sizes.context, sizes.expert, sizes.micro_batch):
        for expert_tensor in (tensor,) if sizes.expert_tensor is None else sizes.expert_tensor:
            split = Split(tensor, context, expert, expert_tensor, micro)
            if any(divides(split, pipeline, scale) for pipeline in sizes.pipeline):
                yield split


def divides(split: Split, pipeline: int, scale: Scale) -> bool:
    """Whether the sizes of a split and a pipeline divide the world and the batch."""
    replicas, rest = divmod(scale.world, split.tensor * split.context * pipeline)
    return (
        not rest
        and scale.world % (split.expert * split.expert_tensor * pipeline) == 0
        and (scale.global_batch % (replicas * split.micro_batch) == 0)
    )


@lru_cache(maxsize=256)
def distributions(pipeline: int, layers: int, virtual: tuple[int, ...], uneven: tuple[int, ...]) -> tuple[Stages, ...]:
    """Equal stages, or other numbers of layers on the first and the last pipeline rank."""
    return tuple(_distributions(pipeline, layers, virtual, uneven))


def _distributions(pipeline: int, layers: int, virtual: Sequence[int], uneven: Sequence[int]) -> Iterator[Stages]:
    if pipeline == 1:
        yield Stages()
        return
    known = set()
    for more_first, more_last in sorted(product(uneven, uneven), key=lambda pair: sum(map(bool, pair))):
        each, rest = divmod(layers - more_first - more_last, pipeline)
        counts = (each + more_first, each if pipeline > 2 else each + more_last, each + more_last)
        if rest or min(counts) < 1 or counts in known:
            continue
        known.add(counts)
        first = each + more_first if more_first else None
        last = each + more_last if more_last else None
        for chunks in virtual:
            if all(count % chunks == 0 for count in counts):
                yield Stages(pipeline, chunks, first, last)
