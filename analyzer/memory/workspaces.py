"""Workspaces and caches: memory that libraries keep beside the model, and when each is first allocated.

Sources: PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp (getChosenWorkspaceSize); transformer_engine/pytorch/
cpp_extensions/gemm.py get_cublas_workspace_size_bytes and module/base.py get_dummy_wgrad (TE 2.11);
megatron/core/utils.py GlobalMemoryBuffer (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from analyzer.modules.attention.core_attention import causal_mask, softmax_is_fused
from analyzer.modules.kinds import LATENT_PROJECTIONS, LINEAR, ModuleKind
from analyzer.modules.moe.dispatchers import gathered_token_bytes
from analyzer.modules.shapes import Shapes, shapes_of
from analyzer.modules.tree import Module
from analyzer.specs import TrainingJob
from analyzer.units import BLOCK, KIB, MIB, dtype_bytes, round_up

GROUPED_GEMM_STREAMS: Final = 4
"""Streams over which Transformer Engine distributes a grouped GEMM, each with a workspace (nvte_get_num_compute_streams)."""
ROTARY_TABLES: Final = 32
"""Entries of the cache of `YarnRotaryEmbedding.forward`; with multi-latent attention every layer has an entry of its own."""
YARN_POSITIONS: Final = 4096
"""`MLATransformerConfig.original_max_position_embeddings`, which no option of the training script changes."""
FROM_START: Final[frozenset[ModuleKind]] = frozenset()


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that stay allocated once a module of one of these kinds has run in this pass; without kinds, from the start."""

    name: str
    bytes: int
    kinds: frozenset[ModuleKind]
    phase: Literal["forward", "backward"]


def capability(job: TrainingJob) -> tuple[int, int]:
    """Compute capability of the target GPU; that of Hopper if no GPU is given."""
    return job.hardware.compute_capability or (9, 0)


def cublas_workspace_bytes(job: TrainingJob) -> int:
    """Workspace of one cuBLAS handle on one stream: CUBLAS_WORKSPACE_CONFIG, else PyTorch's default.

    The variable lists `:SIZE:COUNT` in KiB. The default is :4096:8 on Hopper and, since pull request 175344 of
    February 2026, on Blackwell; on others :4096:2:16:8.
    """
    config = job.flags.cublas_workspace_config
    if config:
        numbers = [int(part) for part in config.split(":") if part.strip().isdigit()]
        return sum(kib * count for kib, count in zip(numbers[::2], numbers[1::2], strict=False)) * KIB
    return 4096 * 8 * KIB if capability(job)[0] >= 9 else (4096 * 2 + 16 * 8) * KIB


def te_workspace_bytes(job: TrainingJob) -> int:
    """Workspace of Transformer Engine's GEMMs: 32 MiB and 1 KiB from Hopper on, 4 MiB before."""
    return 32 * MIB + KIB if capability(job)[0] >= 9 else 4 * MIB


def workspaces(job: TrainingJob, trees: Sequence[Module]) -> tuple[Workspace, ...]:
    """Every workspace and cache on a rank that holds these chunks."""
    layers = sum(tree.derived(_latent_layers) for tree in trees)
    context = _context(job, shapes_of(job), trees, trees=trees, chunks=len(trees), latent_layers=layers)
    return _listed(context)


def workspace_bytes(job: TrainingJob, shapes: Shapes, modules: Sequence[tuple[Module, int]], *, chunks: int) -> int:
    """Bytes of all workspaces of a rank with these modules, each with its number, in so many chunks.

    For jobs without FP8, FSDP and optimizer offloading, whose workspaces depend on the trees.
    """
    layers = sum(times * module.derived(_latent_layers) for module, times in modules)
    context = _context(job, shapes, [module for module, _ in modules], trees=(), chunks=chunks, latent_layers=layers)
    return sum(each.bytes for each in _listed(context))


def _listed(context: _Context) -> tuple[Workspace, ...]:
    parts = (
        _gemm_workspaces(context),
        _global_buffer(context),
        _offloading_and_fsdp(context),
        _dummy_weight_gradients(context),
        _fp8_copies(context),
        _rotary_tables(context),
        _tables_of_latent_attention(context),
    )
    return tuple(each for part in parts for each in part if each.bytes)


@dataclass(frozen=True)
class _Context:
    """A rank whose workspaces are listed."""

    job: TrainingJob
    shapes: Shapes
    modules: Sequence[Module]
    """Everything on the rank, in order; equal modules may be listed once."""
    kinds: frozenset[ModuleKind]
    """Kinds of all these modules and their children."""
    trees: Sequence[Module]
    """The chunks of the rank; none if no workspace depends on them."""
    chunks: int
    latent_layers: int
    """Layers with multi-latent attention."""

    @property
    def te(self) -> bool:
        return self.job.model.implementation == "transformer_engine"

    @property
    def unfused(self) -> bool:
        return self.job.model.attention_backend == "unfused"


def _context(
    job: TrainingJob, shapes: Shapes, modules: Sequence[Module], *, trees: Sequence[Module], chunks: int, latent_layers: int
) -> _Context:
    kinds = frozenset().union(*(module.derived(_kinds) for module in modules))
    return _Context(job, shapes, modules, kinds, trees, chunks, latent_layers)


def _kinds(tree: Module) -> frozenset[ModuleKind]:
    return frozenset({tree.kind}).union(*(child.derived(_kinds) for child in tree.children))


def _gemm_workspaces(context: _Context) -> Iterator[Workspace]:
    """Of Transformer Engine, and of PyTorch's cuBLAS handles: a handle belongs to a thread, and autograd has its own."""
    job, kinds = context.job, context.kinds
    te_bytes = round_up(te_workspace_bytes(job), BLOCK)
    if context.te and kinds & LINEAR:
        yield Workspace("Transformer Engine GEMM workspace", te_bytes, LINEAR, "forward")
    moe = job.model.moe
    if context.te and moe is not None and moe.grouped_gemm and ModuleKind.EXPERTS in kinds:
        yield Workspace("grouped GEMM workspaces of 4 streams", GROUPED_GEMM_STREAMS * te_bytes, LINEAR, "forward")
    # the router too: te_general_gemm of core's extensions finds no get_workspace in Transformer Engine 2.11
    in_torch = frozenset({ModuleKind.OUTPUT_LAYER, ModuleKind.ROUTER})
    in_torch |= FROM_START if context.te else LINEAR
    in_torch |= {ModuleKind.ATTENTION_KERNEL} if context.unfused else FROM_START
    if kinds & in_torch or job.optimizer.muon is not None:  # Muon multiplies matrices on every stage
        yield Workspace("cuBLAS workspace of the main thread", cublas_workspace_bytes(job), in_torch, "forward")
    if kinds & in_torch:
        yield Workspace("cuBLAS workspace of the autograd thread", cublas_workspace_bytes(job), in_torch, "backward")
    model = job.model
    plain = context.te and context.unfused and model.mla is None and model.softmax_type == "vanilla"
    if plain and not softmax_is_fused(context.shapes):
        mask = causal_mask(context.shapes).bytes
        yield Workspace("Transformer Engine's causal mask", mask, frozenset({ModuleKind.ATTENTION_KERNEL}), "forward")


def _global_buffer(context: _Context) -> Iterator[Workspace]:
    """Megatron's scratch buffer "mpu", which grows to the largest request and stays."""
    job, shapes, kinds = context.job, context.shapes, context.kinds
    users: frozenset[ModuleKind] = FROM_START
    scratch = 0
    if shapes.sp:
        gathering = {ModuleKind.OUTPUT_LAYER}
        gathering |= set() if context.te else {ModuleKind.QKV, ModuleKind.FC1}
        users = kinds & gathering
        scratch = shapes.hidden("gathered input", gathered=True).bytes if users else 0
    if job.model.implementation == "local" and context.unfused and ModuleKind.ATTENTION_KERNEL in kinds:
        heads = job.model.num_attention_heads // shapes.t
        scores = round_up(dtype_bytes(shapes.dtype, shapes.b * heads * shapes.s * job.batch.seq_length), BLOCK)
        users, scratch = users | {ModuleKind.ATTENTION_KERNEL}, max(scratch, scores)
    moe = job.model.moe
    gathers = moe is not None and moe.dispatcher == "allgather" and job.parallel.expert * job.parallel.expert_tensor > 1
    if gathers and ModuleKind.DISPATCH in kinds:
        users, scratch = users | {ModuleKind.DISPATCH}, max(scratch, gathered_token_bytes(shapes))
    if scratch:
        yield Workspace("Megatron's global memory buffer", scratch, users, "forward")


def _offloading_and_fsdp(context: _Context) -> Iterator[Workspace]:
    """Of optimizer offloading and FSDP, whose modules are imported here only, for a short start-up."""
    job = context.job
    if job.optimizer.offload is not None and not job.optimizer.offload.collected:
        from analyzer.states.cpu_offload import unsharded_copy_bytes

        held = unsharded_copy_bytes(job, context.trees)
        yield Workspace("fp32 weights that the optimizer was first created with", held, FROM_START, "forward")
    if job.fsdp is not None and job.fsdp.double_buffer:
        from analyzer.buffers.fsdp_gathering import pool_bytes

        # two persistent buffers each for the parameters and for the gradients of a layer (`FixedPoolAllocator`)
        gathered, reduced = map(max, zip(*(pool_bytes(job, tree) for tree in context.trees), strict=True))
        yield Workspace("double buffer of gathered parameters", gathered, LINEAR, "forward")
        yield Workspace("double buffer of unsharded gradients", reduced, LINEAR, "backward")


def _dummy_weight_gradients(context: _Context) -> Iterator[Workspace]:
    """Fused accumulation returns an empty gradient to autograd: one for each distinct shape, cached by Transformer Engine.

    Megatron's own layers use the same cache (core/tensor_parallel/layers.py, 0.16.1).
    """
    shapes = context.shapes
    if not shapes.inputs.gradient_accumulation_fusion or context.job.model.implementation == "legacy":
        return
    # the weight of an output layer may be that of the word embedding
    vocabulary = (shapes.model.padded_vocab_size // shapes.t, shapes.model.hidden_size)
    found: dict[tuple[tuple[int, ...], str], Workspace] = {}
    for module in context.modules:
        for key, workspace in module.derived(_dummy_gradients_of, vocabulary, shapes.dtype):
            found.setdefault(key, workspace)
    yield from found.values()


_Dummies = tuple[tuple[tuple[tuple[int, ...], str], Workspace], ...]
"""Dummy gradients by the shape and dtype of the weight."""


def _dummy_gradients_of(tree: Module, vocabulary: tuple[int, int], vocabulary_dtype: str) -> _Dummies:
    """Those of a module and its children. `vocabulary` is the shape of an output layer's weight."""
    weights: dict[tuple[tuple[int, ...], str], ModuleKind] = {}
    for module in tree.derived(_modules_with_fused_gradients):
        if module.kind is ModuleKind.OUTPUT_LAYER:
            weights.setdefault((vocabulary, vocabulary_dtype), module.kind)
            continue
        for parameter in module.parameters:
            if parameter.name == "weight":  # of experts, one each: the last two dimensions
                weights.setdefault((parameter.shape[-2:], parameter.dtype), module.kind)
    return tuple(
        (
            (shape, dtype),
            Workspace(
                f"dummy weight gradient {list(shape)}",
                round_up(dtype_bytes(dtype, prod(shape)), BLOCK),
                frozenset({kind}),
                "backward",
            ),
        )
        for (shape, dtype), kind in weights.items()
    )


def _modules_with_fused_gradients(tree: Module) -> tuple[Module, ...]:
    """The first module of each kind and weight shape whose weight gradient can be accumulated by the GEMM, in order."""
    found: dict[int, Module] = {}
    if tree.kind in LINEAR or tree.kind in (ModuleKind.OUTPUT_LAYER, ModuleKind.REPLACED_BRANCH):
        found[id(tree)] = tree
    for child in tree.children:
        found.update((id(module), module) for module in child.derived(_modules_with_fused_gradients))
    return tuple(found.values())


def _fp8_copies(context: _Context) -> Iterator[Workspace]:
    """Of FP8 and FP4, whose module is imported here only, for a short start-up."""
    job = context.job
    if job.precision.fp8 is None:
        return
    from analyzer.states.fp8_weights import cast_bytes, scaling_bytes

    kind = "FP4" if job.precision.fp8.recipe == "nvfp4" else "FP8"
    yield Workspace(f"{kind} copies of weights", cast_bytes(job, context.trees), LINEAR, "forward")
    yield Workspace("FP8 scaling factors", scaling_bytes(job, context.trees), LINEAR, "forward")


def _rotary_tables(context: _Context) -> Iterator[Workspace]:
    """Every chunk has its own."""
    job, shapes = context.job, context.shapes
    if ModuleKind.QKV not in context.kinds:
        return
    users = frozenset({ModuleKind.QKV})
    if job.model.position_embedding == "rope":
        width = int(job.model.kv_channels * job.model.rotary_percent)
        table = round_up(4 * shapes.s * width, BLOCK)  # the positions of this context-parallel rank
        yield Workspace("rotary position table", table * context.chunks, users, "forward")
    yarn = job.model.yarn_positions
    if yarn is not None and job.model.mla is None:  # buffers, cast with the weights
        each = round_up(dtype_bytes(shapes.dtype, yarn * job.model.kv_channels), BLOCK)
        yield Workspace("cosines and sines of YaRN", 2 * each * context.chunks, users, "forward")


def _tables_of_latent_attention(context: _Context) -> Iterator[Workspace]:
    """Each layer has its own positions: angles in a cache, and with YaRN cosines and sines as buffers of its module.

    The buffers are created for YARN_POSITIONS and cast with the weights; the fused rotation replaces them for its sequence.
    """
    job, shapes, mla = context.job, context.shapes, context.job.model.mla
    if mla is None:
        return
    layers = context.latent_layers
    width = mla.qk_pos_emb_head_dim
    table = round_up(4 * shapes.s * width, BLOCK)
    cached = min(layers, ROTARY_TABLES)
    yield Workspace("rotary position tables of the layers", cached * table, frozenset({ModuleKind.KV_UP}), "forward")
    if mla.yarn:
        positions = shapes.s if job.model.rope_fusion else YARN_POSITIONS // job.parallel.context
        each = round_up(dtype_bytes(shapes.dtype, positions * width), BLOCK)
        yield Workspace("cosines and sines of YaRN", layers * 2 * each, LATENT_PROJECTIONS, "forward")
    if mla.first_angles_stay:
        each = round_up(4 * (YARN_POSITIONS // job.parallel.context) * width, BLOCK)
        yield Workspace("RoPE frequency cache", cached * each, LATENT_PROJECTIONS, "forward")


def _latent_layers(tree: Module) -> int:
    """Layers with multi-latent attention."""
    return (tree.kind is ModuleKind.KV_UP) + sum(child.derived(_latent_layers) for child in tree.children)
