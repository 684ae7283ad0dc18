"""The policies with the highest throughput: a linear program for the shares, in a search over sizes and methods.

For given sizes the program finds the shares, as if tensors could be divided. FlexLLMGen places whole tensors, so the shares of the
weights are then chosen among those that differ in whole tensors, and the cache is divided between whole requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import ceil, floor, isqrt
from typing import Final

from analyzer.inference.offload.machine import Machine
from analyzer.inference.offload.memory import actual, limits, tiers
from analyzer.inference.offload.policy import Lengths, Placement, Policy, Schedule, Shares
from analyzer.inference.offload.program import Allowed, optimum
from analyzer.inference.offload.steps import Block, Seconds, block
from analyzer.inference.offload.tensors import SubLayers
from analyzer.inference.offload.work import Case
from analyzer.specs.model import ModelSpec

TIERS: Final = ((True, False, False), (False, True, False), (False, False, True))
"""One tier each."""
SMALL: Final = 0.001
"""Share of a sub-layer below which a tensor is not worth a placement of its own: biases and norms."""
HOPELESS: Final = 1.1
"""Sizes are dropped if the time with divided tensors is this much above the best. Whole tensors can be a little faster, because
they differ between attention and MLP."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A policy and its times."""

    policy: Policy
    seconds: Seconds
    divided: float
    """Seconds of a block in the solution of the linear program, whose tensors are divided."""
    throughput: float
    """Generated tokens per second."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is searched."""

    model: ModelSpec
    layers: SubLayers
    lengths: Lengths
    machine: Machine
    compress_weights: bool = False
    """Also try compressed weights, which changes the results of the model."""
    compress_cache: bool = False
    overlapped: bool = True
    pinned_weights: bool = True

    def case(self, schedule: Schedule) -> Case:
        """The formulas' inputs for a schedule."""
        return Case(model=self.model, layers=self.layers, schedule=schedule, lengths=self.lengths, machine=self.machine)


def block_sizes(most: int) -> tuple[int, ...]:
    """Block sizes to try: powers of two, their triples, and the largest."""
    powers = [1 << bits for bits in range(most.bit_length())]
    return tuple(sorted({size for size in (*powers, *(3 * power for power in powers), most) if size <= most}))


def search(problem: Problem, blocks: Iterable[int]) -> list[Found]:
    """The best policy of each block size and method that fits, the highest throughput first. Sizes are in ascending order."""
    found: list[Found] = []
    for size in blocks:
        fitting = [
            best
            for methods in _methods(problem)
            if (best := _best_of(problem, [replace(methods, batch_size=size // k, batches=k) for k in _divisors(size)])) is not None
        ]
        if not fitting:
            break  # larger blocks need more memory
        found += fitting
    return sorted(found, key=lambda one: -one.throughput)


def front(found: Sequence[Found]) -> list[Found]:
    """The policies for which no other has as high a throughput at as low a latency, the lowest latency first."""
    kept: list[Found] = []
    for one in sorted(found, key=lambda one: (one.seconds.total, -one.throughput)):
        if not kept or one.throughput > kept[-1].throughput:
            kept.append(one)
    return kept


def _methods(problem: Problem) -> Iterator[Schedule]:
    """Yield the schedules to try, with any sizes."""
    for weights, cache, on_cpu in product(
        (False, True) if problem.compress_weights else (False,),
        (False, True) if problem.compress_cache else (False,),
        (False, True),
    ):
        yield Schedule(
            batch_size=1,
            compressed_weights=weights,
            compressed_cache=cache,
            attention_on_cpu=on_cpu,
            overlapped=problem.overlapped,
            pinned_weights=problem.pinned_weights,
        )


def _divisors(size: int) -> list[int]:
    small = [number for number in range(1, isqrt(size) + 1) if size % number == 0]
    return sorted({*small, *(size // number for number in small)})


def _best_of(problem: Problem, schedules: Sequence[Schedule]) -> Found | None:
    """The fastest policy of a block, among its divisions into batches."""
    best: Found | None = None
    for schedule in schedules:
        case = problem.case(schedule)
        if tiers(case).gpu.constant > case.machine.gpu_memory:
            continue
        for allowed in _allowed(schedule):
            solution = optimum(case, allowed)
            if solution is None or (best is not None and solution[1] >= HOPELESS * best.seconds.total):
                continue
            for one in _whole(block(case), *solution):
                if best is None or one.seconds.total < best.seconds.total:
                    best = one
    return best


def _allowed(schedule: Schedule) -> Iterator[Allowed]:
    """Yield the tiers that FlexLLMGen can use: activations on one, the cache on one if it is compressed."""
    for activations in TIERS[:2]:
        for cache in TIERS if schedule.compressed_cache else ((True, True, True),):
            yield Allowed(cache=cache, activations=activations)


def _whole(steps: Block, solution: Placement, divided: float) -> Iterator[Found]:
    """Yield the policies with whole percentages near the solution that fit."""
    case = steps.case
    functions, most = tiers(case), limits(case.machine)
    for weights, cache in product(_weights(case.layers, solution.weights), _cache(solution.cache)):
        placement = Placement(weights, cache, solution.activations)
        if case.schedule.attention_on_cpu and cache.gpu == 1:
            continue  # nothing is left for the CPU
        sizes = functions.at(actual(case, placement))
        if any(size > limit for size, limit in zip(sizes, most, strict=True)):
            continue
        seconds = steps.actual_seconds(placement)
        yield Found(
            policy=Policy(placement=placement, schedule=case.schedule),
            seconds=seconds,
            divided=divided,
            throughput=case.schedule.block_size * case.lengths.generated / seconds.total,
        )


def _weights(layers: SubLayers, solution: Shares) -> Iterator[Shares]:
    """Yield shares of the weights in whole percent that differ in whole tensors: next to the solution, and with none on the GPU."""
    middles: set[float] = set()
    for layer in (layers.attention, layers.mlp):
        end = 0
        for tensor in layer.tensors:
            end += tensor.elements
            if tensor.elements > SMALL * layer.elements:
                middles.add((end - tensor.elements / 2) / layer.elements)
    on_gpu = sorted({0, 100, *(min(100, floor(100 * (1 - middle)) + 1) for middle in middles)})
    on_disk = sorted({0, 100, *(min(100, floor(100 * middle) + 1) for middle in middles)})
    for gpu, disk in product(_next_to(on_gpu, 100 * solution.gpu), _next_to(on_disk, 100 * solution.disk)):
        if gpu + disk <= 100:
            yield Shares(gpu / 100, (100 - gpu - disk) / 100, disk / 100)


def _next_to(values: Sequence[int], value: float) -> list[int]:
    """The values around a value, and the lowest."""
    for low, high in pairwise(values):
        if low <= value <= high:
            return sorted({values[0], low, high})
    return [values[0]]


def _cache(solution: Shares) -> Iterator[Shares]:
    """Yield shares in whole percent around the solution."""
    for gpu, disk in product(_whole_percents(solution.gpu), _whole_percents(solution.disk)):
        if gpu + disk <= 100:
            yield Shares(gpu / 100, (100 - gpu - disk) / 100, disk / 100)


def _whole_percents(share: float) -> set[int]:
    return {floor(100 * share + 1e-6), ceil(100 * share - 1e-6)}
