"""Tensors of CUDA graphs that stay allocated: static inputs and outputs, batches, and workspaces of the streams of a capture.

Sources: core/transformer/cuda_graphs.py `TECudaGraphHelper._get_sample_arguments` and `_CudaGraphRunner`,
core/transformer/transformer_layer.py `get_layer_static_inputs`, core/full_cuda_graph.py `StaticBufferLoader` (0.16.1);
transformer_engine/pytorch/graph.py `_make_graphed_callables` (TE 2.11).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from analyzer.memory.workspaces import FROM_START, Workspace, cublas_workspace_bytes
from analyzer.modules.inputs import module_inputs
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import shapes_of
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, parameters
from analyzer.passes.graph_scopes import FULL_ITERATION, Scope, captured_modules, graphable_layers, layer_scope
from analyzer.program.schedule.iteration import Iteration
from analyzer.program.schedule.pipeline import most_in_flight
from analyzer.specs import GraphSpec, TrainingJob
from analyzer.units import BLOCK, dtype_bytes, round_up

STREAMS: Final = 2
"""The warm-up before a capture runs on one stream, and the capture runs on another."""


def captured_from_start(
    workspaces: Sequence[Workspace], kinds: frozenset[ModuleKind], captured: Sequence[Workspace]
) -> Iterator[Workspace]:
    """The workspaces if graphs are captured before the first iteration.

    Those of captured modules exist from then on. PyTorch's cuBLAS has others on the streams of the capture.
    """
    of_graphs = {each.name: each.bytes for each in captured}
    for each in workspaces:
        if each.name.startswith("cuBLAS"):
            if each.kinds - kinds or not each.kinds:
                yield replace(each, kinds=each.kinds - kinds)
            continue
        if each.name.startswith("RoPE"):  # the model computes its table after the capture, which has one of its own
            yield replace(each, kinds=frozenset(ModuleKind) - kinds)
            continue
        first = min(each.bytes, of_graphs.get(each.name, 0)) if each.kinds else each.bytes
        if first:
            yield replace(each, bytes=first, kinds=FROM_START)
        if each.bytes > first:
            yield replace(each, bytes=each.bytes - first, kinds=(each.kinds - kinds) | {ModuleKind.EXPERTS})


def kept_tensors(
    job: TrainingJob,
    graphs: GraphSpec,
    stage: StageModel,
    captured: Iteration,
    kinds: frozenset[ModuleKind],
    workspaces: Sequence[Workspace],
) -> tuple[list[Workspace], list[Workspace]]:
    """Tensors of graphs that stay allocated, also those in the pool: those that exist during the capture, and the others."""
    moe = job.model.moe
    in_torch = (
        (job.model.attention_backend == "unfused" and ModuleKind.ATTENTION_KERNEL in kinds)
        or (moe is not None and ModuleKind.ROUTER in kinds and not module_inputs(job).router_in_te)
        or ModuleKind.SHARED_GATE in kinds
    )
    workspace = 2 * cublas_workspace_bytes(job)  # each of two threads has a handle
    if graphs.implementation == "transformer_engine":
        streams = Workspace("cuBLAS workspaces of the capture streams", STREAMS * workspace, FROM_START, "forward")
        before, after = _kept_te(job, graphs, stage, captured, kinds)
        return [*before, *([streams] if in_torch else [])], after
    stream = Workspace("cuBLAS workspaces of the capture stream", workspace, FROM_START, "forward")
    if FULL_ITERATION in graphs.scope:
        before = [Workspace("static batches of CUDA graphs", batch_bytes(job, stage), FROM_START, "forward")]
        return before, [stream] if in_torch or ModuleKind.OUTPUT_LAYER in kinds else []
    before = _kept_local(job, graphs, stage, captured)
    # replays run on the default stream, and everything before the capture on another one
    other = [
        replace(each, name=f"{each.name} on the default stream")
        for each in workspaces
        if each.name.startswith("cuBLAS") and each.kinds - kinds
    ]
    return [*before, *([stream] if in_torch else [])], other if before else []


def _kept_te(
    job: TrainingJob, graphs: GraphSpec, stage: StageModel, captured: Iteration, kinds: frozenset[ModuleKind]
) -> tuple[list[Workspace], list[Workspace]]:
    """Buffers of `make_graphed_callables` with `_reuse_graph_input_output_buffers`: before the capture, and after it."""
    moe, hidden = job.model.moe, shapes_of(job).hidden("input").bytes
    layers = [layer for tree in stage.trees for layer in graphable_layers(tree)]
    scopes = [scope for layer in layers if (scope := layer_scope(graphs, moe, layer)).children]
    if not scopes:
        return [], []
    static = sum(
        most_in_flight(captured.order, _captured_layers(job, graphs, stage, masked=masked)) * (hidden + masked * _mask_bytes(job))
        for masked in (False, True)
    )
    outputs = sum(_output_gradients(job, graphs, scope) for scope in {bool(scope.parts): scope for scope in scopes}.values())
    rope = _rope_bytes(job) if ModuleKind.ATTENTION in kinds else 0
    before = [
        Workspace("static inputs of CUDA graphs", static, FROM_START, "forward"),
        Workspace("static output gradients of CUDA graphs", outputs, FROM_START, "forward"),
        *([Workspace("rotation table of CUDA graphs", rope, FROM_START, "forward")] if rope else []),
    ]
    weights = 0 if job.flags.gradient_accumulation_fusion else _weight_gradients(job, graphs, layers)
    return before, [Workspace("gradients of the last captured backward", hidden + weights, FROM_START, "forward")]


def _weight_gradients(job: TrainingJob, graphs: GraphSpec, layers: Sequence[Module]) -> int:
    """Bytes of the weight gradients that the backward of the first captured layer returns."""
    first = next(found for layer in layers if (found := captured_modules(graphs, job.model.moe, layer)))
    trained = [each for module in first for each in parameters(module) if not each.frozen]
    return sum(round_up(dtype_bytes(each.dtype, each.numel), BLOCK) for each in trained)


def _output_gradients(job: TrainingJob, graphs: GraphSpec, scope: Scope) -> int:
    """Bytes of the gradients of a captured part's outputs: one hidden state, or all inputs of the experts."""
    moe, shapes = job.model.moe, shapes_of(job)
    hidden = shapes.hidden("gradient").bytes
    if not scope.parts or moe is None:
        return hidden
    tokens = hidden // dtype_bytes(shapes.dtype, job.model.hidden_size)
    shared = hidden if ModuleKind.SHARED_EXPERTS in scope.parts and moe.shared_ffn_hidden_size else 0
    permuted = "moe_preprocess" in graphs.scope and moe.dispatcher == "alltoall"
    rows, each = (moe.topk, 1) if permuted else (1, moe.num_experts)
    probabilities = round_up(dtype_bytes(moe.router_dtype or shapes.dtype, tokens * rows * each), BLOCK)
    return (rows + 1) * hidden + shared + probabilities


def _kept_local(job: TrainingJob, graphs: GraphSpec, stage: StageModel, captured: Iteration) -> list[Workspace]:
    """The input of the first layer, buffers that all layers read, and the outputs of all layers (`_CudaGraphRunner`, 0.16.1)."""
    hidden = shapes_of(job).hidden("input").bytes
    layers = _captured_layers(job, graphs, stage)
    if not sum(layers):
        return []
    runs = sum(layers[step.chunk] for step in captured.order if step.kind == "forward")
    mask = _mask_bytes(job) if job.flags.attention_mask_in_dataloader else 0
    return [
        Workspace("static inputs of CUDA graphs", hidden + mask + _rope_bytes(job), FROM_START, "forward"),
        Workspace("outputs of captured layers", runs * hidden, FROM_START, "forward"),
    ]


def batch_bytes(job: TrainingJob, stage: StageModel) -> int:
    """Bytes of the batches of all microbatches, which `StaticBufferLoader` copies to the GPU, for each chunk."""
    elements = job.batch.micro_batch_size * job.batch.seq_length
    fields = [round_up(elements * size, BLOCK) for size in (8, 8, 8, 4)]  # tokens, labels, positions and the loss mask
    mask = job.batch.micro_batch_size * job.batch.seq_length**2 if job.flags.attention_mask_in_dataloader else 0
    return len(stage.trees) * job.batch.microbatches * (sum(fields) + round_up(mask, BLOCK))


def _rope_bytes(job: TrainingJob) -> int:
    """Bytes of the RoPE table that is an input of graphs."""
    if job.model.position_embedding != "rope" or job.model.mla is not None:
        return 0
    positions = job.batch.seq_length // job.parallel.context
    return round_up(4 * positions * int(job.model.kv_channels * job.model.rotary_percent), BLOCK)


def _mask_bytes(job: TrainingJob) -> int:
    """Bytes of an attention mask bool[b, 1, s/c, s]."""
    s = job.batch.seq_length
    return round_up(job.batch.micro_batch_size * (s // job.parallel.context) * s, BLOCK)


def _captured_layers(job: TrainingJob, graphs: GraphSpec, stage: StageModel, *, masked: bool | None = None) -> list[int]:
    """Number of layers that are captured separately, for each chunk.

    `masked`: only those whose static inputs have an attention mask, which captured attention has with every kernel, or no mask.
    """
    return [sum(_is_captured(job, graphs, layer, masked) for layer in graphable_layers(tree)) for tree in stage.trees]


def _is_captured(job: TrainingJob, graphs: GraphSpec, layer: Module, masked: bool | None) -> bool:
    scope = layer_scope(graphs, job.model.moe, layer)
    has_mask = any(child.kind is ModuleKind.ATTENTION and child.kind in scope.full for child in layer.children)
    return bool(scope.children) and masked in (None, has_mask)
