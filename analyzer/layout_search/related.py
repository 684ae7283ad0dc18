"""Questions beside the fastest layout: other numbers of GPUs, and the largest micro-batch or sequence that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm
from typing import Final, Literal, NamedTuple

from analyzer.errors import AnalyzerError, InputError
from analyzer.launch.launchers.world import World
from analyzer.layout_search.dimensions import space_of
from analyzer.layout_search.problem import Problem
from analyzer.layout_search.result import SearchResult
from analyzer.layout_search.split_jobs import job_of_split
from analyzer.memory.ranks import rank_classes_unlimited
from analyzer.memory.verdict import highest, is_tight
from analyzer.results import RankMemory, TrainingTime
from analyzer.specs import TrainingJob

Largest = Literal["micro-batch-size", "seq-length"]
LONGEST: Final = 2**24
"""Longest sequence that is tried, in tokens."""


class Limit(NamedTuple):
    """The largest value of an option with which a launch fits."""

    option: Largest
    value: int | None
    """None if the smallest one does not fit."""
    device_bytes: int | None
    tight: bool
    """The headroom is below the margin, or within the estimated range of the memory."""
    next_value: int | None
    """The next larger value, which does not fit; None if a larger one is not legal."""
    next_bytes: int | None
    step: int = 1
    """Values that were tried are multiples of this."""


class Question(NamedTuple):
    """The answer to a search for one GPU and one number of GPUs."""

    gpu: str
    gpus: int
    result: SearchResult
    training: TrainingTime | None
    """The whole training with the fastest layout; None if its length is not known."""


def with_world(problem: Problem, size: int, *, over: Sequence[str] = (), keep: Sequence[str] = ()) -> Problem:
    """The problem with another number of GPUs. Raises InputError if no layout is legal for it.

    `over`, `keep`: the dimensions that may differ from the launch and the options that must not, as in `space_of`.
    """
    parallel = problem.given.parallel
    per_node = min(parallel.gpus_per_node, size)
    if size % per_node:
        raise InputError("--info-search-gpus", f"{size} GPUs are not nodes of {per_node}", f"use multiples of {per_node}")
    world = World(nodes=size // per_node, gpus_per_node=per_node)
    sized = replace(parallel, world_size=size, nodes=world.nodes, gpus_per_node=per_node)
    changed = replace(problem, world=world, given=replace(problem.given, parallel=sized), runs=False)
    found = in_a_legal_layout(changed, over=over, keep=keep)
    if found is not None:
        return found
    raise InputError("--info-search-gpus", f"no layout of this launch is legal for {size} GPUs", "use another number of GPUs")


def in_a_legal_layout(problem: Problem, *, over: Sequence[str] = (), keep: Sequence[str] = ()) -> Problem | None:
    """A changed problem with the job of its launch, or else of the first layout that Megatron accepts; None if there is none.

    `runs` tells which of the two it is. `over`, `keep`: as in `space_of`.
    """
    try:
        return replace(problem, given=problem.job({}), runs=True)
    except AnalyzerError:
        pass
    space = space_of(problem, over=over, keep=keep)
    for split in space.splits():
        found = job_of_split(space, 0, split)
        if found is not None:
            return replace(problem, given=found.job)
    return None


def largest(problem: Problem, option: Largest) -> Limit:
    """The largest micro-batch size or sequence length with which the launch fits, with all other options as they are.

    Sequences are multiples of what context and tensor parallelism split, and of 1,024 tokens if the launch has as many.
    """
    found = Limit(option, None, None, False, None, None, 1 if option == "micro-batch-size" else _step(problem))
    for value, memory in _memories(problem, option):
        size = memory.device_bytes
        if size > problem.capacity:
            return found._replace(next_value=value, next_bytes=size)
        found = found._replace(value=value, device_bytes=size, tight=is_tight(size, memory.device_range_bytes[1], problem.gpu))
    return found


def _memories(problem: Problem, option: Largest) -> Iterator[tuple[int, RankMemory]]:
    """Values in rising order with their memory, up to the first that does not fit."""
    if option == "micro-batch-size":
        batch, replicas = problem.given.batch, problem.given.parallel.data
        for value in range(1, batch.global_batch_size // replicas + 1):
            job = _job(problem, {"micro_batch_size": value})
            if job is not None:
                memory = memory_of_job(job)
                yield value, memory
                if memory.device_bytes > problem.capacity:
                    return
        return
    yield from _sequences(problem)


def _sequences(problem: Problem) -> Iterator[tuple[int, RankMemory]]:
    step = _step(problem)

    def memory_of(steps: int) -> RankMemory | None:
        length = steps * step
        job = _job(problem, length_changes(problem, length))
        return None if job is None else memory_of_job(job)

    fits, first = 0, 1
    while (memory := memory_of(first)) is not None and memory.device_bytes <= problem.capacity and first * step <= LONGEST:
        fits, first = first, 2 * first
    above = first
    while above - fits > 1:  # fits is the largest that does, above the smallest that does not
        middle = (fits + above) // 2
        memory = memory_of(middle)
        if memory is not None and memory.device_bytes <= problem.capacity:
            fits = middle
        else:
            above = middle
    for steps in (fits, above):
        memory = memory_of(steps) if steps else None
        if memory is not None:
            yield steps * step, memory


def length_changes(problem: Problem, length: int) -> dict[str, object]:
    """The options that give the launch another sequence length, by dest: that of the encoder, where the launch gives that."""
    arguments = problem.arguments
    dest = "seq_length" if arguments.get("encoder_seq_length") is None else "encoder_seq_length"
    return {dest: length, "max_position_embeddings": max(length, int(str(arguments.get("max_position_embeddings") or 0)))}


def memory_of_job(job: TrainingJob) -> RankMemory:
    """The memory of the highest-memory rank, as in a report."""
    return highest(rank_classes_unlimited(job)).memory


def _step(problem: Problem) -> int:
    """Tokens by which sequences are made longer."""
    parallel, given = problem.given.parallel, problem.given.batch.seq_length
    return lcm(2 * parallel.context * parallel.tensor, 1024 if given >= 1024 else 1)


def _job(problem: Problem, changes: dict[str, object]) -> TrainingJob | None:
    try:
        return problem.job(changes)
    except AnalyzerError:
        return None
