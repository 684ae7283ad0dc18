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
from typing import Final

from analyzer.memory.chunk_memory import Point, chunk_memory
from analyzer.memory.iteration import PeakContext, peak_of_iteration
from analyzer.memory.overlapped_microbatches import overlapped_peaks
from analyzer.memory.peak import Peak
from analyzer.memory.pipeline_tensors import MessageOrder
from analyzer.memory.workspaces import FROM_START, Workspace, cublas_workspace_bytes
from analyzer.modules.shapes import shapes_of
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module
from analyzer.passes.graph_scopes import FULL_ITERATION, captured_tree, layer_scope, outside_tree, transformer_layers
from analyzer.schedule.pipeline import Pair, Step
from analyzer.specs import GraphSpec, TrainingJob
from analyzer.states.record import States
from analyzer.units import BLOCK, round_up

STREAMS: Final = 2
"""The warm-up before a capture runs on one stream, and the capture runs on another."""


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
    kept: tuple[Workspace, ...]
    """Static inputs, and workspaces of the capture streams."""


def graph_memory(
    job: TrainingJob,
    graphs: GraphSpec,
    stage: StageModel,
    states: States,
    workspaces: Sequence[Workspace],
    *,
    iterations: tuple[MessageOrder, MessageOrder],
    context: PeakContext,
    eager: tuple[Peak, Peak],
) -> GraphMemory:
    """The memory of a pipeline stage with CUDA graphs.

    `iterations` are the steps of the first iteration and of a later one. `eager` are their peaks without graphs.
    """
    full_iteration = FULL_ITERATION in graphs.scope
    captured = _captured_steps(job, stage, iterations[1], full_iteration=full_iteration)
    capture = _capture_peak(job, graphs, stage, captured)
    kept = _kept(
        job, graphs, _layers_in_flight(captured.order, _captured_layers(job, graphs, stage, full_iteration=full_iteration))
    )
    fixed = sum(each.bytes for each in (*workspaces, *kept))
    trees = [outside_tree(graphs, job.model.moe, tree) for tree in stage.trees]
    outside = [chunk_memory(tree) for tree in trees]
    replaying = replace(context, overlapped=_overlapped(job, trees, iterations[1]))
    first_replay, later_replay = (
        _plus(peak_of_iteration(order, outside, workspaces=(*workspaces, *kept), context=replaying, warm=True), base)
        for order, base in zip(iterations, (states.before_first_step, states.steady), strict=True)
    )
    from_start = graphs.implementation == "transformer_engine" and graphs.warmup_steps == 0
    if from_start:
        first = _higher(first_replay, _plus(capture, states.before_first_step + fixed))
        later = later_replay
    else:
        first, eager_later = (replace(peak, before_capture=True) for peak in eager)
        later = _higher(eager_later, _higher(later_replay, _plus(capture, states.steady + fixed)))
    return GraphMemory(first=first, later=later, replay=later_replay, pool=capture.bytes, from_start=from_start, kept=kept)


def _captured_steps(job: TrainingJob, stage: StageModel, iteration: MessageOrder, *, full_iteration: bool) -> MessageOrder:
    """The captured steps. Without pipeline parallelism these are the steps of one microbatch, whose graphs are used for all."""
    if job.parallel.pipeline == 1 and not full_iteration:
        return MessageOrder((Step("forward", 0, 0), Step("backward", 0, 0)), stage.chunks)
    return iteration


def _capture_peak(job: TrainingJob, graphs: GraphSpec, stage: StageModel, captured: MessageOrder) -> Peak:
    """The peak of the captured modules alone."""
    output = shapes_of(job).hidden("static output")
    trees = [captured_tree(graphs, job.model.moe, tree, static_output=output) for tree in stage.trees]
    context = PeakContext(overlapped=_overlapped(job, trees, captured))
    peak = peak_of_iteration(captured, [chunk_memory(tree) for tree in trees], context=context, warm=True)
    return replace(peak, position=replace(peak.position, capture=True))


def _overlapped(job: TrainingJob, trees: Sequence[Module], messages: MessageOrder) -> dict[Pair, Point]:
    """The peaks of overlapped microbatches in `trees`, which are parts of the chunks (`PeakContext.overlapped`)."""
    if not any(step.paired for step in messages.order):
        return {}
    return overlapped_peaks(trees, messages, early=job.flags.early_attention_backward)


def _captured_layers(job: TrainingJob, graphs: GraphSpec, stage: StageModel, *, full_iteration: bool) -> list[int]:
    """Number of layers that are captured separately, for each chunk."""
    if full_iteration:
        return [0] * len(stage.trees)
    return [
        sum(bool(layer_scope(graphs, job.model.moe, layer).children) for layer in transformer_layers(tree)) for tree in stage.trees
    ]


def _plus(peak: Peak, base: int) -> Peak:
    return replace(peak, bytes=peak.bytes + base)


def _higher(one: Peak, other: Peak) -> Peak:
    return max(one, other, key=lambda peak: peak.bytes)


def _kept(job: TrainingJob, graphs: GraphSpec, layers: int) -> tuple[Workspace, ...]:
    """Workspaces that stay allocated outside the pool. `layers` is the maximum number of captured layers in flight."""
    kept = [Workspace("static inputs of CUDA graphs", layers * _static_bytes(job, graphs), FROM_START, "forward")]
    if job.model.attention_backend == "unfused" and ("attn" in graphs.scope or not graphs.scope):
        # each pair of a stream and a handle has a cuBLAS workspace; each of two threads has a handle
        capturing = STREAMS * 2 * cublas_workspace_bytes(job)
        kept.append(Workspace("cuBLAS workspaces of the capture streams", capturing, FROM_START, "forward"))
    return tuple(each for each in kept if each.bytes)


def _layers_in_flight(order: Sequence[Step], layers: Sequence[int]) -> int:
    """The maximum number of captured layers whose backward has not run. Each needs a set of static inputs."""
    in_flight = most = 0
    for step in order:
        in_flight += layers[step.chunk] if step.kind == "forward" else -layers[step.chunk]
        most = max(most, in_flight)
    return most


def _static_bytes(job: TrainingJob, graphs: GraphSpec) -> int:
    """Bytes of the inputs of one captured layer: hidden states and, with attention, a mask bool[b, 1, s/c, s], for every kernel."""
    hidden = shapes_of(job).hidden("input").bytes
    if graphs.implementation == "local" or (graphs.scope and "attn" not in graphs.scope):
        return hidden
    s = job.batch.seq_length
    return hidden + round_up(job.batch.micro_batch_size * (s // job.parallel.context) * s, BLOCK)
