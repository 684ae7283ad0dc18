"""Layouts of a serving engine that meet times of the first and of an output token, the cheapest first.

Cheapest is the fewest GPU-hours for a token. All layouts of the GPUs of the launch and of fewer are tried: tensor parallelism,
groups with data-parallel attention, expert parallelism, replicas, and the number of clients of each replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Final, NamedTuple

from analyzer.errors import AnalyzerError, InputError
from analyzer.inference.results import ServedTime, ServingChoice
from analyzer.inference.serving.batching import MOST_STEPS
from analyzer.inference.serving.estimate import Replica, cache_requests, replica_of, served_time
from analyzer.launch.inference.serving_options import SERVING_SEARCH, ServingTarget
from analyzer.specs import InferenceJob
from analyzer.specs.serving import ServingSpec
from analyzer.specs.speed import SpeedSpec

MOST_CLIENTS: Final = 1024
"""Largest number of clients of a replica that is tried."""
SHOWN: Final = 10
GRAIN: Final = 8
"""Numbers of clients between powers of two are tried in so many steps."""


class Found(NamedTuple):
    """The result of a search."""

    choices: tuple[ServingChoice, ...]
    front: tuple[ServingChoice, ...]


def layouts(job: InferenceJob) -> Iterator[tuple[int, int, int, int]]:
    """(tensor, groups of attention, expert, expert-tensor) parallel sizes of a replica, on at most the GPUs of the launch."""
    model, most = job.model, job.parallel.world_size
    sizes = [2**power for power in range(most.bit_length()) if 2**power <= most]
    for gpus in sizes:
        for tensor in (size for size in sizes if size <= gpus):
            if model.num_attention_heads % tensor or (model.moe is None and tensor != gpus):
                continue
            if model.mla is None and model.num_query_groups % tensor and tensor % model.num_query_groups:
                continue
            if model.moe is None:
                yield tensor, 1, 1, 1
                continue
            for expert in (size for size in sizes if size <= gpus and model.moe.num_experts % size == 0):
                if model.moe.ffn_hidden_size % (gpus // expert) == 0:
                    yield tensor, gpus // tensor, expert, gpus // expert


def search(job: InferenceJob, speed: SpeedSpec, target: ServingTarget, *, price: float | None) -> Found:
    """The choices that meet the times, and the front of throughput of a GPU and time of an output token.

    Raises InputError if the capacity of the GPU is not known.
    """
    spec = job.inference.serving
    assert spec is not None
    if job.hardware.capacity_bytes is None:
        raise InputError(SERVING_SEARCH, "needs the memory of a GPU", "add --info-gpu NAME or --info-gpu-memory")
    met: list[ServingChoice] = []
    every: list[ServingChoice] = []
    for layout in layouts(job):
        unit = _replica(job, speed, spec, layout)
        if unit is None:
            continue
        best = None
        for choice in _choices(unit, job, spec, layout, price=price, target=target):
            every.append(choice)
            if choice.time.first_seconds <= target.first and choice.time.token_seconds <= target.token:
                best = choice if best is None or _cost(choice) < _cost(best) else best
        if best is not None:
            met.append(best)
    return Found(tuple(sorted(met, key=lambda each: (_cost(each), each.gpus))[:SHOWN]), _front(every))


def _replica(job: InferenceJob, speed: SpeedSpec, spec: ServingSpec, layout: tuple[int, int, int, int]) -> Replica | None:
    """The replica of a layout; None if not one request fits."""
    tensor, groups, expert, expert_tensor = layout
    parallel = replace(
        job.parallel,
        world_size=tensor * groups,
        nodes=max(1, tensor * groups // job.parallel.gpus_per_node),
        tensor=tensor,
        expert=expert,
        expert_tensor=expert_tensor,
    )
    inference = replace(job.inference, batch_size=1)
    try:
        unit = replica_of(replace(job, parallel=parallel, inference=inference), spec.engine, speed)
        return unit if cache_requests(unit, spec) else None
    except AnalyzerError:
        return None


def _choices(
    unit: Replica,
    job: InferenceJob,
    spec: ServingSpec,
    layout: tuple[int, int, int, int],
    *,
    price: float | None,
    target: ServingTarget,
) -> Iterator[ServingChoice]:
    """The layout with numbers of clients up to what the cache holds, until the times are missed."""
    steps = spec.requests * ceil(job.inference.prompt_tokens / (job.inference.prefill_tokens or 1))
    room = min(MOST_CLIENTS, cache_requests(unit, spec) or 0, max(1, MOST_STEPS // steps))
    clients, last = 1, 0
    known: dict[int, ServedTime] = {}

    def time(number: int) -> ServedTime:
        if number not in known:
            replicas = max(1, job.parallel.world_size // (unit.layout.ranks * (1 + spec.prefill_replicas)))
            known[number] = served_time(unit, replace(spec, clients=number), replicas=replicas, price=price)
        return known[number]

    while clients <= room:
        found = time(clients)
        yield _choice(unit, spec, layout, found, job)
        if found.first_seconds > target.first or found.token_seconds > target.token:
            for number in range(last + max(1, last // GRAIN), clients, max(1, last // GRAIN)):
                yield _choice(unit, spec, layout, time(number), job)
            return
        last, clients = clients, clients * 2
    if last and last < room:
        yield _choice(unit, spec, layout, time(room), job)


def _choice(
    unit: Replica, spec: ServingSpec, layout: tuple[int, int, int, int], time: ServedTime, job: InferenceJob
) -> ServingChoice:
    tensor, groups, expert, expert_tensor = layout
    of_replica = unit.layout.ranks * (1 + spec.prefill_replicas)
    replicas = max(1, job.parallel.world_size // of_replica)
    options = [f"--info-world-size {tensor * groups * replicas}", f"--tensor-model-parallel-size {tensor}"]
    if job.model.moe is not None:
        options += [f"--expert-model-parallel-size {expert}", f"--expert-tensor-parallel-size {expert_tensor}"]
    return ServingChoice(
        gpus=of_replica * replicas,
        tensor=tensor,
        attention_data=groups,
        expert=expert,
        expert_tensor=expert_tensor,
        replicas=replicas,
        time=time,
        options=tuple(options),
    )


def _cost(choice: ServingChoice) -> float:
    """GPU-seconds of a token."""
    return choice.gpus / choice.time.tokens_per_second


def _front(choices: list[ServingChoice]) -> tuple[ServingChoice, ...]:
    """The choices that no other one exceeds in both tokens of a GPU and the time of a token, the fastest token first."""
    found: list[ServingChoice] = []
    for choice in sorted(choices, key=lambda each: (each.time.token_seconds, _cost(each))):
        if not found or _cost(choice) < _cost(found[-1]):
            found.append(choice)
    return tuple(found)
