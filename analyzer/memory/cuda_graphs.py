"""CUDA graphs: what captured kernels keep in a memory pool of their own, and what is left outside.

Graphs are captured forward and backward for every layer and microbatch, in the order of the schedule, all in one pool.
Once captured, activations inside are freed for the allocator's statistics and overwritten by each replay: the pool keeps
their segments. Inputs are copied into static tensors, one set for each layer in flight.

Sources: core/transformer/cuda_graphs.py `TECudaGraphHelper._get_sample_arguments`, core/transformer/transformer_layer.py
`get_layer_static_inputs` (0.16.1); transformer_engine/pytorch/graph.py `_make_graphed_callables` (TE 2.11).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from analyzer.memory.iteration import Peak, Surroundings, fullest_instant
from analyzer.memory.passes import timeline
from analyzer.memory.workspaces import FROM_START, Workspace, cublas_workspace_bytes
from analyzer.modules.attention.core_attention import ATTENTION
from analyzer.modules.shapes import shapes_of
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import LAYER, STREAM, Module, Tensor
from analyzer.schedule.pipeline import Step
from analyzer.specs import GraphSpec, TrainingJob
from analyzer.states.record import States
from analyzer.units import BLOCK, round_up

_ATTENTION = ("input_layernorm", ATTENTION, "self_attn_bda")
_FEED_FORWARD = ("pre_mlp_layernorm", "mlp", "mlp_bda")
_ROUTER = ("pre_mlp_layernorm", "mlp.router")
STREAMS = 2
"""The warm-up before a capture runs on a stream of its own, and the capture on another."""


@dataclass(frozen=True, kw_only=True)
class Graphed:
    """A rank's iterations with graphs."""

    first: Peak
    """The fullest instant of the first iteration, with the capture where that comes before it."""
    later: Peak
    """The fullest instant of all others: of those before the capture, of the capture, and of those that replay."""
    replay: Peak
    """The fullest instant of an iteration that replays, as the allocator's statistics see it: without the pool."""
    pool: int
    """Bytes of the pool: the fullest instant of all that is captured."""
    from_start: bool
    """The capture comes before the first iteration."""
    kept: tuple[Workspace, ...]
    """Static inputs, and workspaces of the streams of the capture."""


def graphed(
    job: TrainingJob,
    stage: StageModel,
    held: States,
    items: Sequence[Workspace],
    *,
    orders: tuple[Sequence[Step], Sequence[Step]],
    about: Surroundings,
    eager: tuple[Peak, Peak],
) -> Graphed:
    """The iterations of a pipeline stage, `launch.graphs` being set.

    `orders` are those of the first iteration and of a later one, `eager` their fullest instants without graphs.
    """
    graphs = job.graphs
    assert graphs is not None
    whole = "full_iteration" in graphs.scope
    inside = [_inside(job, tree, whole=whole) for tree in stage.trees]
    outside = [timeline(emptied(tree) if whole else _outside(job, tree)) for tree in stage.trees]
    # without a pipeline one microbatch is captured, and its graphs serve all
    one = job.parallel.pipeline == 1 and not whole
    recorded = (Step("forward", 0, 0), Step("backward", 0, 0)) if one else orders[1]
    captured = Surroundings(stages=about.stages)
    worst = fullest_instant(recorded, [timeline(tree) for tree in inside], about=captured, warm=True)
    worst = replace(worst, where=f"capture of CUDA graphs, {worst.where}")
    layers = [0 if whole else sum(_in_scope(job, each) != () for each in _layers(tree)) for tree in stage.trees]
    kept = _kept(job, graphs, _layers_in_flight(recorded, layers))
    runtime = sum(item.bytes for item in (*items, *kept))
    bases = (held.before_first_step, held.steady)
    walks = (fullest_instant(order, outside, items=(*items, *kept), about=about, warm=True) for order in orders)
    before, after = (replace(walk, bytes=walk.bytes + base) for walk, base in zip(walks, bases, strict=True))
    from_start = graphs.implementation == "transformer_engine" and graphs.warmup_steps == 0
    if from_start:
        first = _fuller(before, replace(worst, bytes=worst.bytes + held.before_first_step + runtime))
        later = after
    else:
        first, plain = (replace(peak, before_capture=True) for peak in eager)
        later = _fuller(plain, _fuller(after, replace(worst, bytes=worst.bytes + held.steady + runtime)))
    return Graphed(first=first, later=later, replay=after, pool=worst.bytes, from_start=from_start, kept=kept)


def _fuller(one: Peak, other: Peak) -> Peak:
    return max(one, other, key=lambda peak: peak.bytes)


def _kept(job: TrainingJob, graphs: GraphSpec, layers: int) -> tuple[Workspace, ...]:
    """What stays beside the pool for so many captured layers in flight."""
    kept = [Workspace("static inputs of CUDA graphs", layers * _static_bytes(job, graphs), FROM_START, "forward")]
    if job.model.attention_backend == "unfused" and ("attn" in graphs.scope or not graphs.scope):
        # a workspace of cuBLAS belongs to a stream and a handle, and each of two threads has a handle
        workspaces = STREAMS * 2 * cublas_workspace_bytes(job)
        kept.append(Workspace("cuBLAS workspaces of the capture's streams", workspaces, FROM_START, "forward"))
    return tuple(item for item in kept if item.bytes)


def _layers_in_flight(order: Sequence[Step], layers: Sequence[int]) -> int:
    """Captured layers whose backward has not run, when they are most: each needs inputs of its own."""
    waiting = most = 0
    for step in order:
        waiting += layers[step.chunk] if step.kind == "forward" else -layers[step.chunk]
        most = max(most, waiting)
    return most


def _static_bytes(job: TrainingJob, graphs: GraphSpec) -> int:
    """Inputs of one captured layer: the hidden states, and for attention a mask, bool[b, 1, s/c, s], whatever the kernel."""
    hidden = shapes_of(job).hidden("input").bytes
    if graphs.implementation == "local" or (graphs.scope and "attn" not in graphs.scope):
        return hidden
    s = job.batch.seq_length
    return hidden + round_up(job.batch.micro_batch_size * (s // job.parallel.context) * s, BLOCK)


def _in_scope(job: TrainingJob, layer: Module) -> tuple[str, ...]:
    """Paths in a transformer layer that are captured; empty where the layer is left alone (`_layer_is_graphable`)."""
    assert job.graphs is not None
    scope = job.graphs.scope
    if not scope:
        return (*_ATTENTION, *_FEED_FORWARD)
    mixture = any(module.name == "router" for child in layer.children if child.name == "mlp" for module in child.children)
    paths: tuple[str, ...] = _ATTENTION if "attn" in scope else ()
    if ("moe" if mixture else "mlp") in scope:
        paths += _FEED_FORWARD
    elif mixture and "moe_router" in scope:
        moe = job.model.moe
        paths += _ROUTER if moe is None or moe.shared_overlap else (*_ROUTER, "mlp.shared_experts")
    return paths


def _layers(tree: Module) -> list[Module]:
    """The transformer layers in a tree."""
    if any(child.name == ATTENTION for child in tree.children):
        return [tree]
    return [layer for child in tree.children for layer in _layers(child)]


def _inside(job: TrainingJob, tree: Module, *, whole: bool) -> Module:
    """The tree with captured modules alone; the others are there, and hold nothing."""
    if whole:
        return tree
    if any(child.name == ATTENTION for child in tree.children):
        paths = _in_scope(job, tree)
        part = _selected(tree, "", paths, inside=True)
        if not paths or "mlp_bda" in paths:  # the layer's output is saved by whatever reads it
            return part
        return replace(part, saved=(*part.saved, shapes_of(job).hidden("static output")))
    return replace(emptied(tree), children=tuple(_inside(job, child, whole=False) for child in tree.children))


def _outside(job: TrainingJob, tree: Module) -> Module:
    """The tree without what captured modules hold."""
    if any(child.name == ATTENTION for child in tree.children):
        return _selected(tree, "", _in_scope(job, tree), inside=False)
    return replace(tree, children=tuple(_outside(job, child) for child in tree.children))


def _selected(module: Module, path: str, paths: tuple[str, ...], *, inside: bool) -> Module:
    """The part of a layer on one side. Tensors that come from the other side are static, or lie in the pool."""
    if path in paths:
        return _without(module, paths, made_inside=False) if inside else emptied(module)
    if not path or any(each.startswith(f"{path}.") for each in paths):
        children = tuple(
            _selected(child, f"{path}.{child.name}" if path else child.name, paths, inside=inside) for child in module.children
        )
        return replace(module if not inside or not path else emptied(module), children=children)
    return emptied(module) if inside else _without(module, paths, made_inside=True)


def _without(module: Module, paths: tuple[str, ...], *, made_inside: bool) -> Module:
    """The module without the saved tensors that are made inside, or outside, the captured part."""
    saved = tuple(tensor for tensor in module.saved if _made_inside(tensor, paths) != made_inside or not _crosses(tensor))
    children = tuple(_without(child, paths, made_inside=made_inside) for child in module.children)
    return replace(module, saved=saved, children=children)


def _crosses(tensor: Tensor) -> bool:
    """Whether a module that reads the tensor may lie on the other side of the one that made it."""
    return tensor.made_in in (STREAM, LAYER, *_ATTENTION, *_FEED_FORWARD)


def _made_inside(tensor: Tensor, paths: tuple[str, ...]) -> bool:
    maker = {STREAM: "mlp_bda", LAYER: "self_attn_bda"}.get(tensor.made_in, tensor.made_in)
    return maker in paths


def emptied(module: Module) -> Module:
    """The module with nothing that takes memory: its parameters are counted with the states."""
    children = tuple(emptied(child) for child in module.children)
    return replace(module, saved=(), forward_workspace=(), backward_workspace=(), forward_held=(), children=children)
