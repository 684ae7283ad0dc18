"""Memory of every rank in a training run: model states, workspaces, activations, temporary tensors, and the peak.

`states` and `workspaces` give the memory that stays allocated, and `iteration` walks the pipeline schedule. The peak is the maximum
over the creation of the model, the first iteration, later iterations and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from analyzer.errors import UnsupportedError
from analyzer.memory.allocator.caching_allocator import OutOfMemory
from analyzer.memory.allocator.iterations import Phase
from analyzer.memory.allocator.of_rank import phases_of, states_of
from analyzer.memory.allocator.replay import MAX_REQUESTS, MOST_BYTES, RARE_MAX_REQUESTS, fragmentation, with_fragmentation
from analyzer.memory.allocator.replicas import FIRST, Member, member_of, ranks_of_members, split
from analyzer.memory.allocator.settings import AllocatorSettings
from analyzer.memory.collector import collector_paused
from analyzer.memory.device_overhead import SEGMENT, device_range, outside_allocator_bytes, reserved_bytes
from analyzer.memory.features import (
    deferrals,
    graph_memory_of,
    has_rare_features,
    left_bytes,
    offloaded_points,
    overlapped_points,
    planned_bytes,
    schedule_tensors,
)
from analyzer.memory.iteration import PeakContext, peak_of_iteration
from analyzer.memory.peak import Peak, PeakPosition, Remainder
from analyzer.memory.stages import StageAnalysis, analysed_stages, distinct_stages
from analyzer.memory.verdict import highest
from analyzer.memory.workspaces import Workspace
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Tensor, total_bytes
from analyzer.passes.stages import last_layer_bytes_on_gpu
from analyzer.program.schedule.iteration import Iteration
from analyzer.results import MemoryPart, PeakEvent, RankClass, RankMemory
from analyzer.specs import TrainingJob
from analyzer.states.bytes_per_parameter import FP32
from analyzer.states.record import StartPeak, States
from analyzer.units import BLOCK, round_up

if TYPE_CHECKING:
    from analyzer.memory.graphs.peaks import GraphMemory

_START = {
    StartPeak.SHARDING: (PeakEvent.MODEL_SHARDING, Remainder.UNSHARDED),
    StartPeak.BUFFERS: (PeakEvent.BUFFER_CREATION, Remainder.BEFORE_OPTIMIZER),
    StartPeak.OPTIMIZER: (PeakEvent.OPTIMIZER_CREATION, Remainder.OPTIMIZER),
}
"""For each kind of peak before the first iteration, its event and the label of its remainder."""
STARTS = frozenset(event for event, _ in _START.values())


def rank_classes(job: TrainingJob) -> tuple[RankClass, ...]:
    """The rank classes of a job with their memory: one per pipeline rank, or several if its ranks own different parameters.

    Allocator blocks and segments are simulated if the order of the allocations is known.
    """
    return replayed_classes(job, analysed_stages(job), every_part=True, frees=True)


def rank_classes_unlimited(job: TrainingJob, *, enough_bytes: float = inf) -> tuple[RankClass, ...]:
    """The same if no unused segments are freed: memory that exceeds the capacity of the GPU is not reduced.

    If all of it is within the capacity, it is that of `rank_classes`. A search uses it. `enough_bytes`: the allocator of further
    rank classes is not simulated once one has more device memory.
    """
    with collector_paused():
        return replayed_classes(job, analysed_stages(job), every_part=True, enough_bytes=enough_bytes)


def rank_classes_of_tensors(job: TrainingJob) -> tuple[RankClass, ...]:
    """The same without the allocator simulation: each block has the size of its tensor. This is faster and slightly too low."""
    return tensor_classes(job, analysed_stages(job))


def highest_rank(job: TrainingJob) -> RankClass:
    """The rank class with the highest device memory. Its memory is that of the first rank of its stage.

    Of pipeline stages with equal trees only the first is computed, because it has the most microbatches in flight. In the report
    and in a search, other data-parallel ranks of the stage can reserve more (`allocator.replicas`). In the report, unused segments
    that would exceed the capacity are freed.
    """
    with collector_paused():
        return highest(replayed_classes(job, distinct_stages(job)))


def highest_peak_bytes(job: TrainingJob) -> int:
    """Allocated bytes at the highest peak of a rank, without rounding to the blocks of an allocator.

    Of pipeline stages with equal trees only the first is computed, because it has the most microbatches in flight.
    """
    return max(rank.memory.peak_allocated_bytes for rank in tensor_classes(job, distinct_stages(job)))


def tensor_classes(job: TrainingJob, stages: Sequence[StageAnalysis]) -> tuple[RankClass, ...]:
    """Rank classes of all stages, in order, without the allocator replay."""
    return tuple(each for stage in stages for each in _stage_classes(job, stage))


def replayed_classes(
    job: TrainingJob,
    stages: Sequence[StageAnalysis],
    *,
    every_part: bool = False,
    frees: bool = False,
    enough_bytes: float = inf,
) -> tuple[RankClass, ...]:
    """The same with a simulation of the allocator, for the highest rank classes first, up to `MAX_REQUESTS` in total, and
    `RARE_MAX_REQUESTS` of the first one.

    Without a simulation if the order of the requests is not known or the allocator settings are not supported. `every_part`:
    ranks with other parts of the optimizer states are simulated too, and are separate classes if their reserved memory differs.
    `frees`: reserved memory that would exceed the capacity of the GPU is freed where possible. `enough_bytes`: the simulation ends
    with the first class that has more device memory.
    """
    by_stage = [tuple(_stage_classes(job, stage)) for stage in stages]
    ranks = [(stage, each) for stage, classes in zip(stages, by_stage, strict=True) for each in classes]
    settings = _simulated(job)
    if settings is None:
        return tuple(each for _, each in ranks)
    found = [[each] for _, each in ranks]
    remaining = RARE_MAX_REQUESTS if has_rare_features(job) else MAX_REQUESTS
    by_memory = sorted(range(len(ranks)), key=lambda index: -ranks[index][1].memory.device_bytes)
    for number, index in enumerate(by_memory):
        stage, described = ranks[index]
        if described.memory.device_bytes > MOST_BYTES:
            continue
        phases = phases_of(job, stage)
        needed = sum(each.requests for each in phases if each is not None)
        if needed > (remaining if number else RARE_MAX_REQUESTS):
            break
        remaining -= needed
        limit = job.hardware.capacity_bytes if frees else None
        memory_of = partial(_memory_of_member, job, stage, described.memory, phases, settings, limit)
        members = ranks_of_members(job, stage.model.pipeline_rank) if every_part else {}
        if len(stage.states) > 1:  # their tensors differ
            replayed, members = memory_of(member_of(job, stage.model.pipeline_rank, described.ranks[0][0])), {}
        else:
            replayed = memory_of(FIRST)
        if replayed.device_bytes > enough_bytes:
            found[index] = [replace(described, memory=replayed)]
            break
        needed *= len(members) - 1
        if members and needed <= remaining:
            remaining -= needed
            found[index] = split(replace(described, memory=replayed), members, memory_of)
        else:
            found[index] = [replace(described, memory=replayed)]
    return tuple(each for classes in found for each in classes)


def _memory_of_member(
    job: TrainingJob,
    stage: StageAnalysis,
    memory: RankMemory,
    phases: tuple[Phase, ...],
    settings: AllocatorSettings,
    capacity: int | None,
    member: Member,
) -> RankMemory:
    """`memory` with the blocks and segments of a rank that has this part of the optimizer states.

    If reserved memory would exceed the capacity, PyTorch frees unused segments: the replay is repeated with that limit.
    """
    states = states_of(job, stage.model, stage.buffers, member)
    replay = partial(fragmentation, states, phases, stage.workspaces, settings=settings)
    found = replay()
    unlimited = with_fragmentation(job, memory, found)
    if capacity is None:
        return unlimited
    available = (capacity - outside_allocator_bytes(job)) // SEGMENT * SEGMENT
    if not unlimited.peak_allocated_bytes <= available < unlimited.peak_reserved_bytes:
        return unlimited
    not_replayed = unlimited.peak_reserved_bytes - found.reserved
    try:
        limited = with_fragmentation(job, memory, replay(capacity_bytes=available - not_replayed))
    except OutOfMemory:
        return unlimited
    released = unlimited.peak_reserved_bytes - limited.peak_reserved_bytes
    return unlimited if limited.peak_reserved_bytes > available else replace(limited, released_bytes=released)


def _simulated(job: TrainingJob) -> AllocatorSettings | None:
    """The allocator settings of a job; None if they are not supported."""
    try:
        return AllocatorSettings.of({"PYTORCH_ALLOC_CONF": job.flags.allocator_config or ""})
    except UnsupportedError:
        return None


def _stage_classes(job: TrainingJob, stage: StageAnalysis) -> Iterator[RankClass]:
    """The rank classes of one pipeline stage: one, unless its ranks have different model states."""
    iterations = _iterations(job, stage)
    for ranks, states in stage.states:
        yield RankClass(
            ranks=ranks,
            pipeline_rank=stage.model.pipeline_rank,
            parameters=stage.parameters,
            parameters_routed_experts=stage.parameters_routed_experts,
            chunks=stage.model.chunks,
            trees=stage.model.trees,
            memory=_rank_memory(job, states, _run_with_states(job, stage, states, iterations), iterations),
        )


@dataclass(frozen=True, kw_only=True)
class _Iterations:
    """The iterations of a stage, in bytes above the model states."""

    first: Peak
    later: Peak
    context: PeakContext
    referenced: int
    """Bytes that modules reference throughout an iteration."""
    kept: int
    """Bytes of pipeline inputs and of tensors referenced by modules, between iterations."""
    freed_in_first: int
    """Of these, bytes of inputs that activation offloading frees in the first iteration only."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The peaks of a rank's iterations, including the model states, and its workspaces."""

    first: Peak
    later: Peak
    workspaces: tuple[Workspace, ...]
    graphs: GraphMemory | None = None


def _iterations(job: TrainingJob, stage: StageAnalysis) -> _Iterations:
    model, trees = stage.model, stage.model.trees
    _, inputs = schedule_tensors(job, model)
    _, first_inputs = schedule_tensors(job, model, first_iteration=True) if job.activation_offload else (None, inputs)
    of_first, of_later = contexts(job, stage, stage.iterations[1])
    first = peak_of_iteration(stage.iterations[0], stage.first_chunks, workspaces=stage.workspaces, context=of_first)
    later = peak_of_iteration(stage.iterations[1], stage.chunks, workspaces=stage.workspaces, context=of_later, warm=True)
    kept, kept_after_first = (
        sum(total_bytes(each[_references_input(tree) :]) for each, tree in zip(of_chunks, trees, strict=True))
        for of_chunks in (inputs, first_inputs)
    )
    return _Iterations(
        first=first,
        later=later,
        context=of_later,
        referenced=sum(tree.lingering_once for tree in trees),
        kept=kept + sum(tree.lingering_bytes for tree in trees),
        freed_in_first=kept - kept_after_first,
    )


def _references_input(tree: Module) -> bool:
    """Whether the first layer references its input between iterations: `lingering_bytes` then includes it."""
    first = next((module for _, module in tree.walk() if module.kind is ModuleKind.LAYER), None)
    return first is not None and bool(first.outlives)


def contexts(job: TrainingJob, stage: StageAnalysis, messages: Iteration) -> tuple[PeakContext, PeakContext]:
    """What the first and a later iteration hold in addition to their microbatches. `messages` are the steps of the later one."""
    model = stage.model
    of_messages, inputs = schedule_tensors(job, model)
    of_first_messages, _ = schedule_tensors(job, model, first_iteration=True) if job.activation_offload else (of_messages, inputs)
    context = partial(
        PeakContext,
        overlapped=overlapped_points(job, model.trees, messages),
        planned=planned_bytes(job, model.trees),
        left=left_bytes(job, model.trees, inputs),
        sent=tuple(total_bytes(each[1:]) if job.parallel.overlap_p2p else 0 for each in inputs),
    )
    last = model.chunks[-1].post_process
    of_first, of_later = deferrals(job, model) if last else (None, None)
    offloaded = offloaded_points(job, model.trees, messages)
    extra = last_layer_bytes_on_gpu(job, model.trees[-1])
    # the operands of one call do not depend on the number of microbatches
    deferring = {} if of_later is None else overlapped_points(job, model.trees, messages, deferred=of_later.bytes_each)
    return (
        context(messages=of_first_messages, deferral=of_first, deferring=deferring),
        context(messages=of_messages, deferral=of_later, deferring=deferring, offloaded=offloaded, extra_of_first=extra),
    )


def _run_with_states(job: TrainingJob, stage: StageAnalysis, states: States, iterations: _Iterations) -> _Run:
    """The iterations of a rank with these model states, with CUDA graphs if the job uses them."""
    first, later, referenced = iterations.first, iterations.later, iterations.referenced
    run = _Run(
        first=replace(first, bytes=first.bytes + states.before_first_step + referenced),
        later=replace(later, bytes=later.bytes + states.steady + referenced),
        workspaces=stage.workspaces,
    )
    graphs = graph_memory_of(
        job,
        stage.model,
        states,
        stage.workspaces,
        iterations=stage.iterations,
        context=iterations.context,
        eager=(run.first, run.later),
    )
    if graphs is None:
        return run
    return _Run(first=graphs.first, later=graphs.later, workspaces=(*graphs.workspaces, *graphs.kept), graphs=graphs)


def _rank_memory(job: TrainingJob, states: States, run: _Run, iterations: _Iterations) -> RankMemory:
    """The memory of a rank. The peak can be in the optimizer step if forward and backward need less.

    While CUDA graphs are replayed, their pool is reserved in addition to all other memory.
    """
    first, later, graphs = run.first, run.later, run.graphs
    workspaces = sum(each.bytes for each in run.workspaces)
    kept = iterations.kept - (0 if graphs is None else graphs.static_input_gradients)
    staying = sum(each.bytes for each in run.workspaces if not each.freed)
    allocated = states.steady + staying + states.gradient_copies + states.gathered + kept
    peak = _highest(states, allocated=allocated, first=first, later=later)
    captured_later = 0 if graphs is None else sum(each.bytes for each in graphs.made_by_capture)
    pool = 0 if graphs is None else round_up(graphs.pool, SEGMENT)
    replayed = 0 if graphs is None else pool + graphs.replay.bytes
    reserved = max(_reserved(peak), 0 if graphs is None else pool + _reserved(graphs.replay))
    missing = _not_captured_yet(peak, graphs)
    not_created = sum(each.bytes for each in missing)
    existing = tuple(each for each in run.workspaces if each not in missing)
    transient = peak.bytes - states.steady - (workspaces - not_created) - peak.activations
    remainder = transient - total_bytes(peak.transient)
    copies = (
        (MemoryPart(name="fp32 gradients stored by the optimizer", bytes=states.permanent_gradient_copies),)
        if states.permanent_gradient_copies
        else ()
    )
    garbage = sum(each.bytes for each in run.workspaces if each.garbage)
    after_first = allocated + states.first_step_bytes - captured_later - iterations.freed_in_first
    return RankMemory(
        parameters_bytes=states.parameters,
        gradients_bytes=states.gradients,
        optimizer_bytes=states.master_weights + states.moments,
        runtime_bytes=workspaces - not_created + states.permanent_gradient_copies,
        allocated_bytes=allocated,
        activations_bytes=peak.activations,
        transient_bytes=transient,
        peak_allocated_first_iteration_bytes=max(first.bytes, after_first, states.at_start),
        peak_allocated_bytes=peak.bytes,
        peak_event=PeakEvent.CAPTURE if peak.position.capture else peak.position.event,
        peak_in_first_iteration=peak.position.first_iteration or peak.position.event in STARTS,
        peak_at=peak.position.text,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + outside_allocator_bytes(job),
        device_range_bytes=device_range(job, peak=max(peak.bytes, replayed), reserved=reserved, replayed=False, garbage=garbage),
        garbage_bytes=garbage,
        graph_pool_bytes=pool,
        runtime_parts=(*(MemoryPart(name=each.name, bytes=each.bytes) for each in existing), *copies),
        transient_parts=(
            *_parts(peak.transient),
            *((MemoryPart(name=peak.remainder.value, bytes=remainder),) if remainder else ()),
        ),
        microbatches_in_flight=peak.in_flight,
    )


def _not_captured_yet(peak: Peak, graphs: GraphMemory | None) -> tuple[Workspace, ...]:
    """The tensors of CUDA graphs that do not exist at the peak."""
    if graphs is None:
        return ()
    if peak.before_capture:
        return graphs.made_by_capture
    return graphs.after if peak.position.capture else ()


def _reserved(peak: Peak) -> int:
    tensors = () if peak.position.event in STARTS else peak.transient  # those before the first iteration are parameters
    return reserved_bytes(peak.bytes, max((tensor.bytes for tensor in tensors), default=0))


def _highest(states: States, *, allocated: int, first: Peak, later: Peak) -> Peak:
    """The peak of the training run; ties go to a later iteration."""
    whole_blocks = states.gradient_copies // BLOCK * BLOCK  # `allocated` has the sum of the copies, and a tensor is rounded up
    copies = (Tensor(name="fp32 gradients", shape=(whole_blocks // FP32,), dtype="fp32"),) if whole_blocks else ()
    optimizer_step = Peak(
        bytes=allocated + total_bytes(states.step_workspace),
        workspaces=0,
        activations=0,
        transient=(*copies, *states.step_workspace),
        in_flight=tuple(0 for _ in later.in_flight),
        position=PeakPosition(event=PeakEvent.OPTIMIZER_STEP),
        remainder=Remainder.KEPT,
    )
    event, remainder = _START[states.start_peak]
    moved = Tensor(name="parameters that move into buffers", shape=(states.moved_at_start,), dtype="uint8")
    creation = replace(
        optimizer_step,
        bytes=states.at_start,
        transient=(moved,) if states.moved_at_start else (),
        position=PeakPosition(event=event),
        remainder=remainder,
    )
    first_iteration_peak = replace(first, position=replace(first.position, first_iteration=True), remainder=Remainder.NOT_CREATED)
    return max(later, optimizer_step, first_iteration_peak, creation, key=lambda peak: peak.bytes)


def _parts(tensors: Sequence[Tensor]) -> tuple[MemoryPart, ...]:
    """Sums of temporary tensors by name, largest first. Tensors that share the storage of another tensor are omitted."""
    sums: dict[str, int] = {}
    for tensor in tensors:
        if tensor.bytes:
            sums[tensor.name] = sums.get(tensor.name, 0) + tensor.bytes
    return tuple(MemoryPart(name=name, bytes=total) for name, total in sorted(sums.items(), key=lambda part: -part[1]))
