"""CUDA graphs: the memory pool of captured kernels, and what stays outside it.

Graphs are captured forward and backward for every layer and microbatch, in the order of the schedule, all in one pool.
After the capture, activations inside are freed in the allocator's statistics and overwritten by each replay: the pool keeps
their segments. Inputs are copied into static tensors, one set for each layer in flight.

Sources: core/transformer/cuda_graphs.py `TECudaGraphHelper._get_sample_arguments`, core/transformer/transformer_layer.py
`get_layer_static_inputs` (0.16.1); transformer_engine/pytorch/graph.py `_make_graphed_callables` (TE 2.11).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from analyzer.memory.chunk_memory import chunk_memory
from analyzer.memory.iteration import PeakContext, peak_of_iteration
from analyzer.memory.peak import Peak
from analyzer.memory.pipeline_tensors import MessageOrder
from analyzer.memory.workspaces import FROM_START, Workspace, cublas_workspace_bytes
from analyzer.modules.shapes import shapes_of
from analyzer.modules.stage import StageModel
from analyzer.passes.graph_scopes import FULL_ITERATION, captured_tree, layer_scope, outside_tree, transformer_layers
from analyzer.schedule.pipeline import Step
from analyzer.specs import GraphSpec, TrainingJob
from analyzer.states.record import States
from analyzer.units import BLOCK, round_up

STREAMS: Final = 2
"""The warm-up before a capture runs on one stream, and the capture on another."""


@dataclass(frozen=True, kw_only=True)
class GraphMemory:
    """A rank's iterations with CUDA graphs."""

    first: Peak
    """The peak of the first iteration, with the capture if that comes before it."""
    later: Peak
    """The peak of all others: those before the capture, the capture, and those that replay."""
    replay: Peak
    """The peak of an iteration that replays, as the allocator's statistics see it: without the pool."""
    pool: int
    """Bytes of the pool: the peak of everything that is captured."""
    from_start: bool
    """The capture comes before the first iteration."""
    kept: tuple[Workspace, ...]
    """Static inputs, and workspaces of the streams of the capture."""


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
    """The iterations of a pipeline stage.

    `iterations` are the steps of the first iteration and of a later one, `eager` their peaks without graphs.
    """
    whole = FULL_ITERATION in graphs.scope
    recorded = _recorded_steps(job, stage, iterations[1], whole=whole)
    capture = _capture_peak(job, graphs, stage, recorded)
    kept = _kept(job, graphs, _layers_in_flight(recorded.order, _captured_layers(job, graphs, stage, whole=whole)))
    fixed = sum(each.bytes for each in (*workspaces, *kept))
    outside = [chunk_memory(outside_tree(graphs, job.model.moe, tree)) for tree in stage.trees]
    before, after = (
        _above(peak_of_iteration(order, outside, workspaces=(*workspaces, *kept), context=context, warm=True), base)
        for order, base in zip(iterations, (states.before_first_step, states.steady), strict=True)
    )
    from_start = graphs.implementation == "transformer_engine" and graphs.warmup_steps == 0
    if from_start:
        first = _higher(before, _above(capture, states.before_first_step + fixed))
        later = after
    else:
        first, plain = (replace(peak, before_capture=True) for peak in eager)
        later = _higher(plain, _higher(after, _above(capture, states.steady + fixed)))
    return GraphMemory(first=first, later=later, replay=after, pool=capture.bytes, from_start=from_start, kept=kept)


def _recorded_steps(job: TrainingJob, stage: StageModel, iteration: MessageOrder, *, whole: bool) -> MessageOrder:
    """The steps that are captured: without a pipeline those of one microbatch, whose graphs serve all."""
    if job.parallel.pipeline == 1 and not whole:
        return MessageOrder((Step("forward", 0, 0), Step("backward", 0, 0)), stage.chunks)
    return iteration


def _capture_peak(job: TrainingJob, graphs: GraphSpec, stage: StageModel, recorded: MessageOrder) -> Peak:
    """The peak of the captured modules alone."""
    output = shapes_of(job).hidden("static output")
    inside = [chunk_memory(captured_tree(graphs, job.model.moe, tree, static_output=output)) for tree in stage.trees]
    peak = peak_of_iteration(recorded, inside, context=PeakContext(), warm=True)
    return replace(peak, position=replace(peak.position, capture=True))


def _captured_layers(job: TrainingJob, graphs: GraphSpec, stage: StageModel, *, whole: bool) -> list[int]:
    """Layers with a graph of their own, for each chunk."""
    if whole:
        return [0] * len(stage.trees)
    return [
        sum(bool(layer_scope(graphs, job.model.moe, layer).children) for layer in transformer_layers(tree)) for tree in stage.trees
    ]


def _above(peak: Peak, base: int) -> Peak:
    return replace(peak, bytes=peak.bytes + base)


def _higher(one: Peak, other: Peak) -> Peak:
    return max(one, other, key=lambda peak: peak.bytes)


def _kept(job: TrainingJob, graphs: GraphSpec, layers: int) -> tuple[Workspace, ...]:
    """What stays beside the pool for so many captured layers in flight."""
    kept = [Workspace("static inputs of CUDA graphs", layers * _static_bytes(job, graphs), FROM_START, "forward")]
    if job.model.attention_backend == "unfused" and ("attn" in graphs.scope or not graphs.scope):
        # a cuBLAS workspace belongs to a stream and a handle, and each of two threads has a handle
        capturing = STREAMS * 2 * cublas_workspace_bytes(job)
        kept.append(Workspace("cuBLAS workspaces of the capture's streams", capturing, FROM_START, "forward"))
    return tuple(each for each in kept if each.bytes)


def _layers_in_flight(order: Sequence[Step], layers: Sequence[int]) -> int:
    """The most captured layers whose backward has not run: each needs inputs of its own."""
    waiting = most = 0
    for step in order:
        waiting += layers[step.chunk] if step.kind == "forward" else -layers[step.chunk]
        most = max(most, waiting)
    return most


def _static_bytes(job: TrainingJob, graphs: GraphSpec) -> int:
    """Inputs of one captured layer: the hidden states, and for attention a mask, bool[b, 1, s/c, s], for every kernel."""
    hidden = shapes_of(job).hidden("input").bytes
    if graphs.implementation == "local" or (graphs.scope and "attn" not in graphs.scope):
        return hidden
    s = job.batch.seq_length
    return hidden + round_up(job.batch.micro_batch_size * (s // job.parallel.context) * s, BLOCK)
