"""CUDA graphs: the memory pool of the captured kernels, and the memory outside it.

The forward and the backward of every layer and microbatch are captured in the order of the schedule, in one memory pool. After the
capture, the allocator counts the captured activations as freed, and each replay overwrites them: their segments stay in the pool.
Inputs are copied into static tensors, one set for each layer in flight.

Sources: core/transformer/cuda_graphs.py `TECudaGraphHelper._get_sample_arguments`, core/transformer/transformer_layer.py
`get_layer_static_inputs` (0.16.1); transformer_engine/pytorch/graph.py `_make_graphed_callables` (TE 2.11).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from analyzer.memory.chunk_memory import chunk_memory
from analyzer.memory.graphs.kept import batch_bytes, captured_from_start, kept_tensors
from analyzer.memory.iteration import PeakContext, peak_of_iteration
from analyzer.memory.order import ends_of
from analyzer.memory.overlapped.microbatches import GradientRules, overlapped_peaks
from analyzer.memory.peak import Peak
from analyzer.memory.point import Point
from analyzer.memory.workspaces import Workspace, workspaces_of
from analyzer.modules.shapes import shapes_of
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module
from analyzer.passes.graph_scopes import (
    FULL_ITERATION,
    captured_modules,
    captured_tree,
    enters_inside,
    graphable_layers,
    layer_scope,
    outside_tree,
)
from analyzer.program.schedule.iteration import Iteration
from analyzer.program.schedule.pipeline import Pair, Step
from analyzer.specs import GraphSpec, MoeSpec, TrainingJob
from analyzer.states.record import States


@dataclass(frozen=True, kw_only=True)
class GraphMemory:
    """Memory of a rank's iterations with CUDA graphs."""

    first: Peak
    """The peak of the first iteration, including the capture if graphs are captured before it."""
    later: Peak
    """The peak of all later iterations: those before the capture, the capture itself, and those that replay graphs."""
    replay: Peak
    """The peak of an iteration that replays graphs, in the allocator's statistics: without the pool."""
    pool: int
    """Bytes of the pool: the peak of the captured modules."""
    from_start: bool
    """Graphs are captured before the first iteration."""
    workspaces: tuple[Workspace, ...]
    """Workspaces of the rank that do not belong to graphs."""
    kept: tuple[Workspace, ...]
    """Static tensors, and workspaces of the capture streams."""
    after: tuple[Workspace, ...]
    """Those of them that do not exist during the capture."""
    static_input_gradients: int
    """Bytes of gradients of received inputs that are static, so that they are not allocated between iterations."""

    @property
    def made_by_capture(self) -> tuple[Workspace, ...]:
        """Those of `kept` that do not exist in the first iteration, because graphs are captured after it."""
        return () if self.from_start else self.kept


def graph_memory(
    job: TrainingJob,
    graphs: GraphSpec,
    stage: StageModel,
    states: States,
    workspaces: Sequence[Workspace],
    *,
    iterations: tuple[Iteration, Iteration],
    context: PeakContext,
    eager: tuple[Peak, Peak],
) -> GraphMemory:
    """The memory of a pipeline stage with CUDA graphs.

    `iterations` are the steps of the first iteration and of a later one. `eager` are their peaks without graphs.
    """
    full_iteration = FULL_ITERATION in graphs.scope
    trees, moe = stage.trees, job.model.moe
    modules = [module for tree in trees for module in captured_modules(graphs, moe, tree)]
    kinds = frozenset(module.kind for captured in modules for _, module in captured.walk())
    from_start = graphs.implementation == "transformer_engine" and graphs.warmup_steps == 0
    if from_start:
        workspaces = tuple(captured_from_start(workspaces, kinds, workspaces_of(job, modules)))
    captured = captured_steps(job, stage, iterations[1], full_iteration=full_iteration)
    capture = _capture_peak(job, graphs, stage, captured, () if not full_iteration else workspaces)
    kept, after = kept_tensors(job, graphs, stage, captured, kinds, workspaces)
    hidden = shapes_of(job).hidden("input")
    outside_trees = [
        outside_tree(graphs, moe, tree, hidden=hidden, received=not chunk.pre_process)
        for tree, chunk in zip(trees, stage.chunks, strict=True)
    ]
    outside = [chunk_memory(tree) for tree in outside_trees]
    static = _static_input_gradients(graphs, moe, stage)
    context = _with_static_input_gradients(context, static)
    replaying = replace(context, overlapped=_overlapped(job, outside_trees, iterations[1]))
    every = (*workspaces, *kept, *after)
    first_replay = _plus(peak_of_iteration(iterations[0], outside, workspaces=every, context=replaying), states.before_first_step)
    later_replay = _plus(peak_of_iteration(iterations[1], outside, workspaces=every, context=replaying, warm=True), states.steady)
    created = sum(each.bytes for each in (*workspaces, *kept) if not from_start or not each.kinds)
    batches = batch_bytes(job, stage) - batch_bytes(job, stage) // job.batch.microbatches if full_iteration else 0
    first, later = (replace(_plus(peak, batches), before_capture=True) for peak in eager)
    early, late = (_plus(capture, base + created) for base in (states.before_first_step, states.steady))
    if from_start:
        first, later = _higher(first_replay, early), later_replay
    elif graphs.implementation == "local" and not full_iteration:  # `create_cudagraphs` at the end of the first iteration
        first, later = _higher(first, early), later_replay
    else:
        later = _higher(_higher(later_replay, late), later if graphs.warmup_steps > 1 else late)
    return GraphMemory(
        first=first,
        later=later,
        replay=later_replay,
        pool=capture.bytes,
        from_start=from_start,
        workspaces=tuple(workspaces),
        kept=(*kept, *after),
        after=tuple(after),
        static_input_gradients=sum(static) * shapes_of(job).hidden("input").bytes,
    )


def _static_input_gradients(graphs: GraphSpec, moe: MoeSpec | None, stage: StageModel) -> list[bool]:
    """For each chunk, whether it receives its input and the gradient of the input is static, so that it is not allocated."""
    firsts = [next(iter(graphable_layers(tree)), None) for tree in stage.trees]
    return [
        not chunk.pre_process and layer is not None and enters_inside(layer_scope(graphs, moe, layer), layer)
        for chunk, layer in zip(stage.chunks, firsts, strict=True)
    ]


def _with_static_input_gradients(context: PeakContext, static: Sequence[bool]) -> PeakContext:
    """The context without the gradients that are static."""
    if context.messages is None:
        return context
    return replace(context, messages=replace(context.messages, static_gradients=tuple(static)))


def captured_steps(job: TrainingJob, stage: StageModel, iteration: Iteration, *, full_iteration: bool) -> Iteration:
    """The captured steps. Without pipeline parallelism these are the steps of one microbatch, whose graphs are used for all."""
    if job.parallel.pipeline == 1 and not full_iteration:
        return Iteration((Step("forward", 0, 0), Step("backward", 0, 0)), ends_of(stage.chunks))
    return iteration


def _capture_peak(
    job: TrainingJob, graphs: GraphSpec, stage: StageModel, captured: Iteration, workspaces: Sequence[Workspace]
) -> Peak:
    """The peak of the captured modules alone. `workspaces` are those of a full iteration: cuBLAS allocates others in the graph."""
    output = shapes_of(job).hidden("static output")
    alone = job.parallel.pipeline == 1
    trees = [captured_tree(graphs, job.model.moe, tree, static_output=output, alone=alone) for tree in stage.trees]
    context = PeakContext(overlapped=_overlapped(job, trees, captured))
    of_graph = [each for each in workspaces if each.name.startswith("cuBLAS")]
    chunks = [chunk_memory(tree) for tree in trees]
    peak = peak_of_iteration(captured, chunks, context=context, workspaces=of_graph, warm=not of_graph)
    return replace(peak, position=replace(peak.position, capture=True))


def _overlapped(job: TrainingJob, trees: Sequence[Module], messages: Iteration) -> dict[Pair, Point]:
    """The peaks of overlapped microbatches in `trees`, which are parts of the chunks (`PeakContext.overlapped`)."""
    if not any(step.paired for step in messages.order):
        return {}
    return overlapped_peaks(trees, messages, GradientRules.of(job))


def _plus(peak: Peak, base: int) -> Peak:
    return replace(peak, bytes=peak.bytes + base)


def _higher(one: Peak, other: Peak) -> Peak:
    return max(one, other, key=lambda peak: peak.bytes)
