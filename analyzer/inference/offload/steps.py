"""The steps of the zig-zag block schedule, and their times.

Each pass, the prefill or a decode step, runs the sub-layers in order, and each sub-layer all batches of the block. A step is one
batch in one sub-layer. With overlap (`generation_loop_overlap_multi_batch` in flexllmgen/flex_opt.py) a step computes batch k of a
sub-layer while the cache of batch k + 1 is loaded and that of batch k - 1 is stored; the first step also loads all weights of the
next sub-layer. A step ends when all of this has ended. Without overlap each load and store precedes or follows its computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from analyzer.inference.offload.linear import Linear, total
from analyzer.inference.offload.policy import Placement
from analyzer.inference.offload.tensors import Name, SubLayer, placed, placed_cache
from analyzer.inference.offload.work import Case, Work, cache_load, cache_store, compute, weights_load


@dataclass(frozen=True)
class Step:
    """Equal steps of a pass."""

    count: float
    loads: SubLayer
    """Whose weights are loaded; their placement applies to this step."""
    activities: tuple[Linear, ...]
    """Seconds of what runs at the same time. The step takes as long as the longest."""

    def at(self, placement: Placement) -> float:
        """Seconds of one of the steps."""
        return max(activity.at(placement) for activity in self.activities)


class Seconds(NamedTuple):
    """Times of a block."""

    prefill: float
    decode: float
    """All decode steps together."""

    @property
    def total(self) -> float:
        """Until the last token of the block."""
        return self.prefill + self.decode


def steps(case: Case, *, prefill: bool) -> tuple[Step, ...]:
    """The steps of the prefill, or of one step of the decode with the mean number of tokens in the cache."""
    layers, found = case.layers, []
    followers = (
        (layers.embedding, layers.attention, 1),
        (layers.attention, layers.mlp, layers.attention.count),
        (layers.mlp, layers.attention, layers.mlp.count - 1),
        (layers.mlp, layers.head, 1),
        (layers.head, layers.embedding, 1),
    )
    for layer, following, count in followers:
        if count and not case.schedule.overlapped:
            found.append(_serial(case, layer, count, prefill=prefill))
        elif count:
            found += [
                Step(count * repeats, following, _activities(work))
                for repeats, work in _of_batches(case, layer, following, prefill=prefill)
            ]
    return tuple(found)


@dataclass(frozen=True)
class Block:
    """The steps of a block of requests, whatever the placement."""

    case: Case
    prefill: tuple[Step, ...]
    decode: tuple[Step, ...]
    """Of one step of the decode."""

    def seconds(self, placement: Placement) -> Seconds:
        """Times if every tensor is placed exactly as the shares say."""
        return self._seconds(dict.fromkeys((layer.name for layer in self.case.layers), placement))

    def actual_seconds(self, placement: Placement) -> Seconds:
        """Times if weights are placed in whole tensors, and the cache in whole requests."""
        schedule = self.case.schedule
        cache = placed_cache(placement.cache, schedule)
        return self._seconds(
            {
                layer.name: Placement(placed(layer, placement.weights, schedule), cache, placement.activations)
                for layer in self.case.layers
            }
        )

    def _seconds(self, of_layer: Mapping[Name, Placement]) -> Seconds:
        prefill, decode = (
            sum(step.count * step.at(of_layer[step.loads.name]) for step in found) for found in (self.prefill, self.decode)
        )
        return Seconds(prefill, (self.case.lengths.generated - 1) * decode)


def block(case: Case) -> Block:
    """The steps of a block of requests."""
    return Block(case, steps(case, prefill=True), steps(case, prefill=False))


def _of_batches(case: Case, layer: SubLayer, following: SubLayer, *, prefill: bool) -> Iterator[tuple[int, Work]]:
    """Yield the work of the batches of a sub-layer, and how many batches have it."""
    batches = case.schedule.batches
    kernels = compute(case, layer, prefill=prefill)
    load = Work() if prefill else cache_load(case)
    store = cache_store(case, prefill=prefill)
    attention = layer.name == "attention"
    for repeats, first, last in (
        ((1, True, True),) if batches == 1 else ((1, True, False), (batches - 2, False, False), (1, False, True))
    ):
        work = kernels
        if first:
            work += weights_load(case, following)
        if (attention and not last) or (last and following.name == "attention"):
            work += load
        if (attention and not first) or (first and layer.name == "mlp"):
            work += store
        if repeats:
            yield repeats, work


def _serial(case: Case, layer: SubLayer, count: int, *, prefill: bool) -> Step:
    """All batches of a sub-layer, without overlap."""
    work = weights_load(case, layer)
    of_batch = compute(case, layer, prefill=prefill)
    if layer.name == "attention":
        of_batch += cache_store(case, prefill=prefill)
        of_batch += Work() if prefill else cache_load(case)
    for _ in range(case.schedule.batches):
        work += of_batch
    return Step(count, layer, (total((work.gpu, work.host, work.to_gpu, work.from_gpu, work.read, work.write)),))


def _activities(work: Work) -> tuple[Linear, ...]:
    return (work.host + work.gpu, work.host + work.after_host, work.to_gpu, work.from_gpu, work.read, work.write)
