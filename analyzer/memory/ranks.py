"""Memory of every rank over an iteration: states, activations in flight by the real schedule, temporaries, and the peak.

Modules say what one microbatch keeps and needs (`timeline`), the schedule says which microbatches wait
(`schedule`), `states` and `runtime` what stays. The peak is the fullest instant of all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from analyzer.buffers.of_stage import stage_buffers
from analyzer.memory.allocator.replay import is_replayed, refined
from analyzer.memory.device_overhead import SEGMENT, device_range, outside_allocator_bytes, reserved_bytes
from analyzer.memory.iteration import Peak, Surroundings, fullest_instant, order_of
from analyzer.memory.passes import ChunkTimeline, Point, timeline, with_received_gradient
from analyzer.memory.pipeline_tensors import Stages, kept_inputs, lingering, received_gradient
from analyzer.memory.workspaces import Workspace, workspaces
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, Tensor, parameters, total_bytes
from analyzer.passes.stages import stage_models
from analyzer.results import MemoryPart, RankClass, RankMemory
from analyzer.schedule.pipeline import Step
from analyzer.specs import TrainingJob
from analyzer.states.of_rank import states_by_ranks
from analyzer.states.record import StartPeak, States
from analyzer.units import round_up

if TYPE_CHECKING:
    from analyzer.memory.cuda_graphs import Graphed

_START_REST = {
    StartPeak.SHARDING: "model before it is sharded",
    StartPeak.OPTIMIZER: "fp32 weights of the whole model before they are sharded",
}
"""What the peak before the first iteration contains beside the states."""


def rank_classes(job: TrainingJob) -> tuple[RankClass, ...]:
    """Memory of each pipeline rank: all ranks that share it are alike, unless whole parameters are shared out among them.

    The allocator's blocks and segments are counted in, where its requests are known in their order.
    """
    stages = stage_models(job)
    ranks = _tensors(job, stages)
    return refined(job, stages, ranks) if is_replayed(job) else ranks


def rank_classes_of_tensors(job: TrainingJob) -> tuple[RankClass, ...]:
    """The same for tensors alone, each in a block of its own size: quicker, and a little too low."""
    return _tensors(job, stage_models(job))


def _tensors(job: TrainingJob, stages: Sequence[StageModel]) -> tuple[RankClass, ...]:
    cache: dict[int, ChunkTimeline] = {}
    for stage in stages:
        for chunk, tree in zip(stage.chunks, stage.trees, strict=True):
            if id(tree) not in cache:
                line = _timeline(job, tree)
                cache[id(tree)] = line if chunk.post_process else with_received_gradient(tree, line, received_gradient(job))
    return tuple(each for stage in stages for each in _stage_classes(job, stage, tuple(cache[id(tree)] for tree in stage.trees)))


def _timeline(job: TrainingJob, tree: Module) -> ChunkTimeline:
    """Both passes of a chunk, with what is unsharded for them."""
    if job.fsdp is None:
        return timeline(tree)
    from analyzer.passes.fsdp import fsdp_trees

    sharded, first = fsdp_trees(job, tree)
    return timeline(sharded, first=first)


def _stage_classes(job: TrainingJob, stage: StageModel, timelines: Sequence[ChunkTimeline]) -> Iterator[RankClass]:
    """The ranks of one pipeline stage: all of them alike, unless they hold unlike states."""
    stuck = sum(tree.lingering_once for tree in stage.trees)
    items = workspaces(job, stage.trees)
    inputs = kept_inputs(job, stage.chunks)
    stages = Stages(stage.chunks)
    idle = inputs if job.parallel.virtual_pipeline is not None else ((),) * len(inputs)
    kept = sum(total_bytes(each) for each in inputs) + sum(tree.lingering_bytes for tree in stage.trees)
    beside = lingering(job, pipeline_rank=stage.pipeline_rank)
    counts = (job.batch.first_microbatches, job.batch.microbatches)
    orders = (order_of(job, stage, counts[0]), order_of(job, stage, counts[1]))
    about = Surroundings(beside=beside, idle=idle, stages=stages, pairs=_pairs(job, stage, orders[1]))
    first = fullest_instant(orders[0], timelines, items=items, about=about)
    about = replace(about, first_keeps=_first_keeps(job, stage))
    later = fullest_instant(orders[1], timelines, items=items, about=about, warm=True)
    held_parameters = [parameter for tree in stage.trees for parameter in parameters(tree)]
    numel = sum(parameter.numel for parameter in held_parameters)
    routed = sum(parameter.numel for parameter in held_parameters if parameter.sharding == "expert")
    for ranks, held in states_by_ranks(job, stage, stage_buffers(job, stage)):
        run = _Run(
            first=replace(first, bytes=first.bytes + held.before_first_step + stuck),
            later=replace(later, bytes=later.bytes + held.steady + stuck),
            items=items,
        )
        if job.graphs is not None:
            from analyzer.memory.cuda_graphs import graphed  # a millisecond that most launches need not spend

            graphs = graphed(job, stage, held, items, orders=orders, about=about, eager=(run.first, run.later))
            run = _Run(first=graphs.first, later=graphs.later, items=(*items, *graphs.kept), graphs=graphs)
        yield RankClass(
            ranks=ranks,
            pipeline_rank=stage.pipeline_rank,
            parameters=numel,
            parameters_routed_experts=routed,
            chunks=stage.chunks,
            trees=stage.trees,
            memory=_memory(job, held, run, kept=kept),
        )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Fullest instants of a rank's iterations, and what stays beside its states."""

    first: Peak
    later: Peak
    items: tuple[Workspace, ...]
    graphs: Graphed | None = None


def _first_keeps(job: TrainingJob, stage: StageModel) -> int:
    """Bytes of the microbatch whose backward comes first that are not offloaded."""
    if job.activation_offload is None:
        return 0
    from analyzer.passes.activation_offload import offloaded_bytes_of_last_layer

    return offloaded_bytes_of_last_layer(stage.trees[-1])


def _pairs(job: TrainingJob, stage: StageModel, order: Sequence[Step]) -> dict[tuple[int, int], Point]:
    """The fullest instants of the chunks that run forward and backward side by side."""
    if not job.flags.overlap_moe_expert_parallel_comm:
        return {}
    from analyzer.memory.overlapped_microbatches import side_by_side  # a millisecond that most launches need not spend

    met = {(step.chunk, after.chunk) for step, after in pairwise(order) if step.paired}
    early = job.flags.early_attention_backward
    return {(one, other): side_by_side(stage.trees[one], stage.trees[other], early=early) for one, other in sorted(met)}


def _memory(job: TrainingJob, held: States, run: _Run, *, kept: int) -> RankMemory:
    """The record of the JSON contract. The step itself may be fuller than the passes where these are short.

    `kept` bytes, of a stage's last inputs and of what modules still name, are there between iterations and gone or made
    anew when the next one runs. While CUDA graphs are replayed, their pool is reserved beside everything else.
    """
    first, later, graphs = run.first, run.later, run.graphs
    runtime = sum(item.bytes for item in run.items)
    allocated = held.steady + runtime + held.gradient_copies + held.gathered + kept
    fullest = _fullest(held, allocated=allocated, first=first, later=later)
    captured_later = 0 if graphs is None or graphs.from_start else sum(item.bytes for item in graphs.kept)
    pool = 0 if graphs is None else round_up(graphs.pool, SEGMENT)
    replayed = 0 if graphs is None else pool + graphs.replay.bytes
    reserved = max(_reserved(fullest), 0 if graphs is None else pool + _reserved(graphs.replay))
    eager = captured_later if fullest.before_capture else 0  # static inputs are not there yet
    items = run.items if not eager else tuple(item for item in run.items if graphs is None or item not in graphs.kept)
    transient = fullest.bytes - held.steady - (runtime - eager) - fullest.activations
    rest = transient - sum(tensor.bytes for tensor in fullest.transient)
    kept_copies = (MemoryPart(name="fp32 gradients that the optimizer keeps", bytes=held.kept_copies),) if held.kept_copies else ()
    after_first = allocated + held.first_step_bytes - captured_later
    return RankMemory(
        parameters_bytes=held.parameters,
        gradients_bytes=held.gradients,
        optimizer_bytes=held.masters + held.moments,
        runtime_bytes=runtime - eager + held.kept_copies,
        allocated_bytes=allocated,
        activations_bytes=fullest.activations,
        transient_bytes=transient,
        peak_allocated_first_iteration_bytes=max(first.bytes, after_first, held.at_start),
        peak_allocated_bytes=fullest.bytes,
        peak_at=fullest.where,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + outside_allocator_bytes(job),
        device_range_bytes=device_range(job, peak=max(fullest.bytes, replayed), reserved=reserved),
        graph_pool_bytes=pool,
        runtime_parts=(*(MemoryPart(name=item.name, bytes=item.bytes) for item in items), *kept_copies),
        transient_parts=(*_parts(fullest.transient), *((MemoryPart(name=fullest.rest, bytes=rest),) if rest else ())),
        microbatches_in_flight=fullest.in_flight,
    )


def _reserved(peak: Peak) -> int:
    return reserved_bytes(peak.bytes, max((tensor.bytes for tensor in peak.transient), default=0))


def _fullest(held: States, *, allocated: int, first: Peak, later: Peak) -> Peak:
    """The fullest instant of the whole run: of a steady iteration where that is as full as any other."""
    copies = (Tensor(name="fp32 gradients", shape=(held.gradient_copies // 4,), dtype="fp32"),) if held.gradient_copies else ()
    stepping = Peak(
        bytes=allocated + total_bytes(held.step_workspace),
        runtime=0,
        activations=0,
        transient=(*copies, *held.step_workspace),
        in_flight=tuple(0 for _ in later.in_flight),
        where="optimizer step",
        rest="kept between iterations",
    )
    sharding = replace(stepping, bytes=held.at_start, transient=(), where=held.start_peak.value, rest=_START_REST[held.start_peak])
    beginning = replace(first, where=f"first iteration, {first.where}", rest="not made yet in the first iteration")
    return max(later, stepping, beginning, sharding, key=lambda peak: peak.bytes)


def _parts(tensors: Sequence[Tensor]) -> tuple[MemoryPart, ...]:
    """Temporaries by name, largest first; what shares another's storage costs nothing and is left out."""
    sums: dict[str, int] = {}
    for tensor in tensors:
        if tensor.bytes:
            sums[tensor.name] = sums.get(tensor.name, 0) + tensor.bytes
    return tuple(MemoryPart(name=name, bytes=total) for name, total in sorted(sums.items(), key=lambda part: -part[1]))
