"""Memory of every rank over an iteration: states, activations in flight by the real schedule, temporaries, and the peak.

Modules say what one microbatch keeps and needs (`timeline`), the schedule says which microbatches wait
(`schedule`), `states` and `runtime` what stays. The peak is the fullest instant of all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from analyzer.device import outside_allocator_bytes, reserved_bytes
from analyzer.exchange import Lingering, Stages, kept_inputs, lingering
from analyzer.layout import pipeline_rank_ranges
from analyzer.modules.model import ChunkKind, build, kind_of, parameters
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Tensor
from analyzer.results import Chunk, MemoryPart, RankClass, RankMemory, StageModel
from analyzer.runtime import RuntimeItem, runtime_items
from analyzer.schedule import Step, equivalent_microbatches, steps
from analyzer.specs import Launch
from analyzer.stages import chunks
from analyzer.states import States, states
from analyzer.timeline import ChunkTimeline, Point, size, timeline


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The fullest instant of an iteration on one rank."""

    bytes: int
    runtime: int
    """Of workspaces and caches that were there by then."""
    activations: int
    """Kept for backward, of all microbatches in flight."""
    transient: tuple[Tensor, ...]
    in_flight: tuple[int, ...]
    """Microbatches of each chunk whose backward has not ended, the running one counted in."""
    where: str
    rest: str = "other"
    """Name of what is there beyond states, runtime, activations and `transient`; in the first iteration less than nothing."""


def rank_classes(launch: Launch) -> tuple[RankClass, ...]:
    """Memory of each pipeline rank: all ranks that share it are alike."""
    stages = stage_models(launch)
    cache: dict[int, ChunkTimeline] = {}
    for stage in stages:
        for tree in stage.trees:
            if id(tree) not in cache:
                cache[id(tree)] = _timeline(launch, tree)
    return tuple(_rank_class(launch, stage, tuple(cache[id(tree)] for tree in stage.trees)) for stage in stages)


def _timeline(launch: Launch, tree: Module) -> ChunkTimeline:
    """Both passes of a chunk, with what is unsharded for them."""
    if launch.fsdp is None:
        return timeline(tree)
    from analyzer.sharded import fsdp_timeline  # a millisecond that most launches need not spend

    return fsdp_timeline(launch, tree)


def stage_models(launch: Launch) -> tuple[StageModel, ...]:
    """Chunks and trees of each pipeline rank. Chunks that are alike share one tree."""
    shapes = Shapes(launch)
    trees: dict[ChunkKind, Module] = {}

    def tree(chunk: Chunk) -> Module:
        kind = kind_of(launch, chunk)
        if kind not in trees:
            trees[kind] = build(shapes, kind)
        return trees[kind]

    return tuple(
        StageModel(pipeline_rank=rank, chunks=held, trees=tuple(tree(chunk) for chunk in held))
        for rank, held in enumerate(chunks(launch.model.num_layers, launch.parallel, mtp_layers=launch.model.mtp_num_layers))
    )


def _rank_class(launch: Launch, stage: StageModel, timelines: Sequence[ChunkTimeline]) -> RankClass:
    held = states(launch, stage)
    stuck = sum(tree.lingering_once for tree in stage.trees)
    items = runtime_items(launch, stage.trees)
    inputs = kept_inputs(launch, stage.chunks)
    stages = Stages(stage.chunks)
    idle = inputs if launch.parallel.virtual_pipeline is not None else ((),) * len(inputs)
    kept = sum(size(each) for each in inputs) + sum(tree.lingering_bytes for tree in stage.trees)
    beside = lingering(launch, pipeline_rank=stage.pipeline_rank)
    first_order, order = (_order(launch, stage, count) for count in (launch.batch.first_microbatches, launch.batch.microbatches))
    first = _peak(first_order, timelines, base=held.before_first_step + stuck, items=items, beside=beside, idle=idle, stages=stages)
    later = _peak(order, timelines, base=held.steady + stuck, items=items, beside=beside, idle=idle, stages=stages, warm=True)
    held_parameters = [parameter for tree in stage.trees for parameter in parameters(tree)]
    return RankClass(
        ranks=pipeline_rank_ranges(launch.parallel, stage.pipeline_rank),
        pipeline_rank=stage.pipeline_rank,
        parameters=sum(parameter.numel for parameter in held_parameters),
        parameters_routed_experts=sum(parameter.numel for parameter in held_parameters if parameter.sharding == "expert"),
        chunks=stage.chunks,
        trees=stage.trees,
        memory=_memory(launch, held, items, first=first, later=later, kept=kept),
    )


def _order(launch: Launch, stage: StageModel, microbatches: int) -> tuple[Step, ...]:
    """The steps of an iteration that matter for memory."""
    parallel = launch.parallel
    legacy = launch.megatron == "2023"
    equivalent = equivalent_microbatches(
        pipeline=parallel.pipeline,
        chunks=parallel.chunks,
        microbatches=microbatches,
        group_size=parallel.microbatch_group_size,
        legacy=legacy,
    )
    return steps(
        pipeline=parallel.pipeline,
        pipeline_rank=stage.pipeline_rank,
        chunks=parallel.chunks,
        microbatches=equivalent,
        group_size=parallel.microbatch_group_size,
        legacy=legacy,
    )


def _peak(
    order: Sequence[Step],
    timelines: Sequence[ChunkTimeline],
    *,
    base: int,
    items: Sequence[RuntimeItem],
    beside: Lingering,
    idle: Sequence[tuple[Tensor, ...]],
    stages: Stages,
    warm: bool = False,
) -> Peak:
    """Walks an iteration. `warm`: workspaces and caches are all there from the start; else each appears with its first user.

    `idle` is what each chunk keeps while none of its microbatches is in flight, once it has run.
    """
    warmed_up = _end_of_warmup(order)
    ended: tuple[int, int] | None = None
    """Microbatch and chunk of the backward that ran last."""
    over = False
    """Whether the backward of the microbatch at the end of the warm-up has run."""
    runtime = sum(item.bytes for item in items) if warm else 0
    absent = [] if warm else list(items)
    seen: set[tuple[str, int]] = set()
    waiting = 0
    in_flight = [0] * len(timelines)
    last = [0 if warm else -1] * len(timelines)
    """The microbatch that each chunk ran last; -1 before the first."""
    best = Peak(
        bytes=base + runtime, runtime=runtime, activations=0, transient=(), in_flight=tuple(in_flight), where="between iterations"
    )
    # where all forwards come first, messages are not waited for beside a step
    neighbours = tuple(order) if warmed_up is not None else (None,) * len(order)
    for previous, step, following in zip((None, *neighbours), order, (*neighbours[1:], None), strict=False):
        line = timelines[step.chunk]
        if step.kind == "forward":
            in_flight[step.chunk] += 1
            last[step.chunk] = step.microbatch
        else:
            waiting -= line.retained
        points = line.forward if step.kind == "forward" else line.backward
        if step.kind == "forward" and line.first_forward and not warm and (step.kind, step.chunk) not in seen:
            points = line.first_forward
        elif (step.kind, step.chunk) in seen or not absent:
            points = (line.forward_peak if step.kind == "forward" else line.backward_peak,)
        seen.add((step.kind, step.chunk))
        around = beside.beside(step, previous=previous, following=following, after_backward=ended is not None, stages=stages)
        kept = {(last[chunk], chunk): each for chunk, each in enumerate(idle) if last[chunk] >= 0 and not in_flight[chunk]}
        if over and warmed_up is not None and not stages.is_first(warmed_up[1]):
            kept.setdefault(warmed_up, beside.of_warmup)
        # the gradient of the input that was last in backward is the one that was sent
        named = tuple(each for which, both in kept.items() for each in (both[:1] if which == ended and around else both))
        beside_it = (*around, *named)
        for point in points:
            runtime += _appear(absent, point)
            total = base + runtime + waiting + point.bytes + size(beside_it)
            if total > best.bytes:
                best = Peak(
                    bytes=total,
                    runtime=runtime,
                    activations=waiting + point.saved,
                    transient=(*point.transient, *beside_it),
                    in_flight=tuple(in_flight),
                    where=_where(step, point, chunks=len(timelines)),
                )
        if step.kind == "forward":
            waiting += line.retained
        else:
            in_flight[step.chunk] -= 1
            ended = (step.microbatch, step.chunk)
            over = over or ended == warmed_up
    return best


def _end_of_warmup(order: Sequence[Step]) -> tuple[int, int] | None:
    """Microbatch and chunk of the first forward after the warm-up, the last one before the first backward; None without any."""
    first = next((index for index, step in enumerate(order) if step.kind == "backward"), 0)
    if not any(step.kind == "forward" for step in order[first:]):
        return None
    return order[first - 1].microbatch, order[first - 1].chunk


def _appear(absent: list[RuntimeItem], point: Point) -> int:
    """Bytes of the items that the module of this point is the first to need; takes them off the list."""
    if not absent:
        return 0
    name = point.path.rpartition(".")[2]
    found = [item for item in absent if item.phase == point.phase and name in item.modules]
    for item in found:
        absent.remove(item)
    return sum(item.bytes for item in found)


def _where(step: Step, point: Point, *, chunks: int) -> str:
    """The instant in words: 'backward of microbatch 3, decoder.layers.mlp.linear_fc2'."""
    path = point.path.partition(".")[2]
    chunk = f" of chunk {step.chunk}" if chunks > 1 else ""
    return f"{step.kind} of microbatch {step.microbatch}{chunk}, {path}"


def _memory(launch: Launch, held: States, items: Sequence[RuntimeItem], *, first: Peak, later: Peak, kept: int) -> RankMemory:
    """The record of the JSON contract. The step itself may be fuller than the passes where these are short.

    `kept` bytes, of a stage's last inputs and of what modules still name, are there between iterations and gone or made
    anew when the next one runs.
    """
    runtime = sum(item.bytes for item in items)
    allocated = held.steady + runtime + held.gradient_copies + held.gathered + kept
    fullest = _fullest(held, allocated=allocated, first=first, later=later)
    largest = max((tensor.bytes for tensor in fullest.transient), default=0)
    reserved = reserved_bytes(fullest.bytes, largest)
    transient = fullest.bytes - held.steady - runtime - fullest.activations
    rest = transient - sum(tensor.bytes for tensor in fullest.transient)
    return RankMemory(
        parameters_bytes=held.parameters,
        gradients_bytes=held.gradients,
        optimizer_bytes=held.masters + held.moments,
        runtime_bytes=runtime,
        allocated_bytes=allocated,
        activations_bytes=fullest.activations,
        transient_bytes=transient,
        peak_allocated_first_iteration_bytes=max(first.bytes, allocated, held.at_start),
        peak_allocated_bytes=fullest.bytes,
        peak_at=fullest.where,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + outside_allocator_bytes(launch),
        runtime_parts=tuple(MemoryPart(name=item.name, bytes=item.bytes) for item in items),
        transient_parts=(*_parts(fullest.transient), *((MemoryPart(name=fullest.rest, bytes=rest),) if rest else ())),
        microbatches_in_flight=fullest.in_flight,
    )


def _fullest(held: States, *, allocated: int, first: Peak, later: Peak) -> Peak:
    """The fullest instant of the whole run: of a steady iteration where that is as full as any other."""
    copies = (Tensor(name="fp32 gradients", shape=(held.gradient_copies // 4,), dtype="fp32"),) if held.gradient_copies else ()
    stepping = Peak(
        bytes=allocated,
        runtime=0,
        activations=0,
        transient=copies,
        in_flight=tuple(0 for _ in later.in_flight),
        where="optimizer step",
        rest="kept between iterations",
    )
    sharding = replace(
        stepping, bytes=held.at_start, transient=(), where="sharding of the model", rest="model before it is sharded"
    )
    beginning = replace(first, where=f"first iteration, {first.where}", rest="not made yet in the first iteration")
    return max(later, stepping, beginning, sharding, key=lambda peak: peak.bytes)


def _parts(tensors: Sequence[Tensor]) -> tuple[MemoryPart, ...]:
    """Temporaries by name, largest first; what shares another's storage costs nothing and is left out."""
    sums: dict[str, int] = {}
    for tensor in tensors:
        if tensor.bytes:
            sums[tensor.name] = sums.get(tensor.name, 0) + tensor.bytes
    return tuple(MemoryPart(name=name, bytes=total) for name, total in sorted(sums.items(), key=lambda part: -part[1]))
