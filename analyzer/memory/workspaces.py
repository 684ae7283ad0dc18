"""Workspaces and caches: memory that libraries keep in addition to the model, and when each of them is first allocated.

Sources: PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp (getChosenWorkspaceSize); transformer_engine/pytorch/
cpp_extensions/gemm.py get_cublas_workspace_size_bytes and module/base.py get_dummy_wgrad (TE 2.11);
megatron/core/utils.py GlobalMemoryBuffer (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Final, Literal

from analyzer.memory.other_models import other_weight_bytes, states_in_turns, weight_bytes
from analyzer.memory.rope_tables import latent_rope_tables, rope_tables
from analyzer.modules.attention.unfused_attention import attention_mask, combines_masks
from analyzer.modules.inputs import CachedDummies
from analyzer.modules.kinds import LATENT_PROJECTIONS, LINEAR, Gemms, ModuleKind, kinds_with
from analyzer.modules.moe.dispatchers import gathered_token_bytes
from analyzer.modules.moe.experts import beside_pages_bytes
from analyzer.modules.shapes import Shapes, shapes_of
from analyzer.modules.tree import Module
from analyzer.passes.deferred_output_gradients import deferral_of
from analyzer.specs import TrainingJob
from analyzer.specs.fine_tuning import ALL_STATES
from analyzer.specs.release_changes import core_behavior, torch_behavior
from analyzer.units import BLOCK, KIB, MIB, dtype_bytes, natural, round_up

GROUPED_GEMM_STREAMS: Final = 4
"""Streams over which Transformer Engine distributes a grouped GEMM, each with a workspace (nvte_get_num_compute_streams)."""
USERBUFFER_STREAMS: Final = 3
"""Streams of a GEMM that overlaps with communication, each with a workspace (`_NUM_MAX_UB_STREAMS`)."""
STREAM_POOL: Final = 32
"""Streams that PyTorch creates (`kStreamsPerPool`, c10/cuda/CUDAStream.cpp). Further ones are the same again."""
_THREADS: Final[tuple[tuple[str, Literal["forward", "backward"]], ...]] = (("main", "forward"), ("autograd", "backward"))
FROM_START: Final[frozenset[ModuleKind]] = frozenset()
"""`Workspace.kinds` of workspaces that are allocated before the first iteration."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that stay allocated after a module of one of `kinds` has run in `phase`; with `FROM_START`, from the start."""

    name: str
    bytes: int
    kinds: frozenset[ModuleKind]
    phase: Literal["forward", "backward", "optimizer"]
    """With "optimizer" they are allocated after the last backward of the first iteration."""
    recomputed: bool = False
    """With "backward": a forward that a checkpoint runs again in the backward allocates them too."""
    weight: tuple[int, ...] = ()
    """Only modules with a weight of this shape allocate them; empty if the shape does not matter."""
    blocks: int = 1
    """How many blocks allocate it, each an equal part."""
    freed: bool = False
    """It is made before each iteration, and freed by its forwards. It is counted in full throughout the iteration."""
    garbage: bool = False
    """Nothing uses it: it stays allocated until Python collects garbage, which may be before the peak."""


def capability(job: TrainingJob) -> tuple[int, int]:
    """Compute capability of the target GPU; (9, 0), that of Hopper, if no GPU is given."""
    return job.hardware.compute_capability or (9, 0)


def cublas_workspace_bytes(job: TrainingJob) -> int:
    """Bytes of the workspace of one cuBLAS handle on one stream: CUBLAS_WORKSPACE_CONFIG, or PyTorch's default.

    The variable contains pairs `:SIZE:COUNT` with sizes in KiB. The default is :4096:8 on Hopper and, in newer versions, on
    Blackwell (`TorchBehavior.large_workspace_on_blackwell`); :4096:2:16:8 on other GPUs. On AMD GPUs the GEMMs are those of
    hipBLASLt, with 76 MiB (aten/src/ATen/cuda/CUDABlas.cpp).
    """
    if job.hardware.is_amd:
        return 76 * MIB
    config = job.flags.cublas_workspace_config
    if config:
        numbers = [number for part in config.split(":") if (number := natural(part.strip())) is not None]
        return sum(kib * count for kib, count in zip(numbers[::2], numbers[1::2], strict=False)) * KIB
    first = capability(job)[0]
    large = first == 9 or (first > 9 and torch_behavior(job.software.torch).large_workspace_on_blackwell)
    return 4096 * 8 * KIB if large else (4096 * 2 + 16 * 8) * KIB


def te_workspace_bytes(job: TrainingJob) -> int:
    """Bytes of the workspace of Transformer Engine's GEMMs: 32 MiB + 1 KiB on Hopper and later GPUs, 4 MiB on earlier ones."""
    return 32 * MIB + KIB if capability(job)[0] >= 9 else 4 * MIB


def workspaces(job: TrainingJob, trees: Sequence[Module], *, stage: int | None = None) -> tuple[Workspace, ...]:
    """All workspaces and caches of a rank with these model chunks. `stage`: its pipeline stage."""
    context = _context(job, shapes_of(job), [(tree, 1) for tree in trees], trees=trees, chunks=len(trees))
    return _listed(replace(context, stage=stage))


def workspaces_of(job: TrainingJob, modules: Sequence[Module]) -> tuple[Workspace, ...]:
    """The workspaces and caches that some modules of a rank use. Only for jobs without FSDP and optimizer offloading."""
    context = _context(job, shapes_of(job), [(module, 1) for module in modules], trees=(), chunks=1)
    return _listed(context)


def workspace_bytes(job: TrainingJob, shapes: Shapes, modules: Sequence[tuple[Module, int]], *, chunks: int) -> int:
    """Bytes of all workspaces and caches of a rank with these (module, number of copies) in `chunks` model chunks.

    Only for jobs without FSDP and optimizer offloading: these need the module trees.
    """
    context = _context(job, shapes, modules, trees=(), chunks=chunks)
    return sum(each.bytes for each in _listed(context))


def _listed(context: _Context) -> tuple[Workspace, ...]:
    parts = (
        _gemm_workspaces(context),
        _global_buffer(context),
        _offloading_and_fsdp(context),
        _weights_beside(context),
        _teacher_logits(context),
        _received(context),
        _beside_pages(context),
        _dummy_weight_gradients(context),
        _fp8_copies(context),
        _rope_tables(context),
    )
    return tuple(each for part in parts for each in part if each.bytes)


@dataclass(frozen=True)
class _Context:
    """The rank whose workspaces are listed."""

    job: TrainingJob
    shapes: Shapes
    modules: Sequence[tuple[Module, int]]
    """All modules of the rank in order, with their number; equal modules may be listed once."""
    kinds: frozenset[ModuleKind]
    """Kinds of all these modules and their children."""
    trees: Sequence[Module]
    """The chunks of the rank; empty if no workspace depends on them."""
    chunks: int
    rotations: int
    """Modules with RoPE tables of their own: those of multi-latent attention, and their indexers."""
    stage: int | None = None
    """The pipeline stage of the rank; None if it is not known."""

    @property
    def te(self) -> bool:
        return self.job.model.implementation == "transformer_engine"

    @property
    def unfused(self) -> bool:
        model = self.job.model
        return "unfused" in (model.attention_backend, model.window_backend)


def _context(
    job: TrainingJob,
    shapes: Shapes,
    modules: Sequence[tuple[Module, int]],
    *,
    trees: Sequence[Module],
    chunks: int,
) -> _Context:
    kinds = frozenset().union(*(module.derived(_kinds) for module, _ in modules))
    rotations = sum(times * module.derived(_latent_rotations) for module, times in modules)
    return _Context(job, shapes, modules, kinds, trees, chunks, rotations)


def _kinds(tree: Module) -> frozenset[ModuleKind]:
    return frozenset({tree.kind}).union(*(child.derived(_kinds) for child in tree.children))


def _number(tree: Module, kind: ModuleKind) -> int:
    """The number of modules of a kind in a tree."""
    return (tree.kind is kind) + sum(child.derived(_number, kind) for child in tree.children)


_ROTATING: Final = (ModuleKind.KV_UP, ModuleKind.ABSORPTION, ModuleKind.INDEX_NORM, ModuleKind.COMPRESSED_ATTENTION)
"""Modules with tables of their own, in layers of latent and compressed attention."""


def _latent_rotations(tree: Module) -> int:
    """The modules of a tree that rotate queries and keys with tables of their own."""
    return sum(tree.derived(_number, kind) for kind in _ROTATING)


def _reads_fp4(tree: Module) -> bool:
    """Whether GEMMs of a tree read FP4: layers can stay in 16 bit (`--first-last-layers-bf16`)."""
    own = any(tensor.dtype == "fp4" for tensor in tree.backward_workspace)
    return own or any(child.derived(_reads_fp4) for child in tree.children)


def _combines_masks(tree: Module) -> bool:
    """Whether a kernel of unfused attention in a tree needs Transformer Engine's causal mask."""
    own = tree.kind is ModuleKind.ATTENTION_KERNEL and combines_masks(tree)
    return own or any(child.derived(_combines_masks) for child in tree.children)


@cache
def _multiplying(
    *, layers_in_te: bool, router_in_te: bool, linear_patches: bool, unfused: bool
) -> tuple[frozenset[ModuleKind], frozenset[ModuleKind]]:
    """Kinds whose GEMMs are those of Transformer Engine, and of PyTorch."""
    engine, torch = {Gemms.TRANSFORMER_ENGINE}, {Gemms.MEGATRON, Gemms.PYTORCH}
    (engine if layers_in_te else torch).add(Gemms.LAYER)
    (engine if router_in_te else torch).add(Gemms.ROUTER)
    torch |= {Gemms.PATCHES} if linear_patches else set()
    torch |= {Gemms.UNFUSED_ATTENTION} if unfused else set()
    return kinds_with(*engine), kinds_with(*torch)


def _gemm_workspaces(context: _Context) -> Iterator[Workspace]:
    """Workspaces of Transformer Engine and of PyTorch's cuBLAS handles. The main and the autograd thread have a handle each."""
    job, kinds = context.job, context.kinds
    te_bytes = round_up(te_workspace_bytes(job), BLOCK)
    vision = job.model.vision
    in_te, in_torch = _multiplying(
        layers_in_te=context.te,
        router_in_te=context.shapes.inputs.router_in_te,
        linear_patches=vision is not None and vision.is_radio,
        unfused=context.unfused,
    )
    if context.shapes.quantizes_output_layer:
        in_te, in_torch = in_te | {ModuleKind.OUTPUT_LAYER}, in_torch - {ModuleKind.OUTPUT_LAYER}
    phase: Literal["forward", "backward"] = "forward"
    if context.te and job.flags.tp_comm_overlap and kinds & LINEAR:
        size = round_up(USERBUFFER_STREAMS * te_workspace_bytes(job), BLOCK)
        yield Workspace("Transformer Engine GEMM workspace of userbuffers", size, LINEAR, "forward")
        # weight gradients are the only GEMMs of dense layers that do not overlap with communication
        alone = kinds & frozenset({*LATENT_PROJECTIONS, ModuleKind.MTP_PROJECTION, ModuleKind.EXPERTS})
        phase = "forward" if alone else "backward"
    if kinds & in_te:
        yield Workspace("Transformer Engine GEMM workspace", te_bytes, in_te, phase)
    moe = job.model.moe
    if context.te and moe is not None and moe.grouped_gemm and ModuleKind.EXPERTS in kinds:
        yield Workspace("grouped GEMM workspaces of 4 streams", GROUPED_GEMM_STREAMS * te_bytes, LINEAR, "forward")
    # `get_rht_matrix`: the matrix of the Hadamard transform is a product of two
    fp8 = job.precision.fp8
    in_fp4 = (
        context.te and fp8 is not None and fp8.recipe == "nvfp4" and any(each.derived(_reads_fp4) for each, _ in context.modules)
    )
    if moe is not None and moe.shared_overlap:  # `_workspaces_of_gates`
        in_torch -= {ModuleKind.SHARED_GATE}
    in_main = in_torch | LINEAR if in_fp4 else in_torch
    if kinds & in_main or job.optimizer.facts.orthogonalizes:  # with GEMMs on every stage
        size, of_layers = cublas_workspace_bytes(job), bool(kinds & in_main)
        yield Workspace("cuBLAS workspace of the main thread", size, in_main, "forward" if of_layers else "optimizer")
    if kinds & in_torch:
        yield Workspace("cuBLAS workspace of the autograd thread", cublas_workspace_bytes(job), in_torch, "backward", True)
    yield from _workspaces_of_gates(context)
    if any(module.derived(_combines_masks) for module, _ in context.modules):
        mask = attention_mask(Shapes(context.shapes.inputs.of_part("decoder")), "causal mask", batches=False).bytes
        yield Workspace("Transformer Engine's causal mask", mask, frozenset({ModuleKind.ATTENTION_KERNEL}), "forward")


def _workspaces_of_gates(context: _Context) -> Iterator[Workspace]:
    """Those of the gates of overlapped shared experts, whose products run on the streams of the shared experts."""
    moe, kind = context.job.model.moe, ModuleKind.SHARED_GATE
    if moe is None or not moe.shared_overlap or kind not in context.kinds:
        return
    layers = sum(count * module.derived(_number, kind) for module, count in context.modules)
    streams = shared_expert_streams(context.job, layers)
    for thread, phase in _THREADS:
        name, size = f"cuBLAS workspaces of the streams of shared experts, {thread} thread", cublas_workspace_bytes(context.job)
        # the product for the score runs beside the router (`pre_forward_comm`)
        users, again = frozenset({ModuleKind.ROUTER}), phase == "backward"
        yield Workspace(name, streams * size, users, phase, recomputed=again, blocks=streams)


def shared_expert_streams(job: TrainingJob, layers: int) -> int:
    """The number of streams that so many layers have for their shared experts."""
    return min(layers, STREAM_POOL) if core_behavior(job.megatron).stream_of_each_layer else 1


def _global_buffer(context: _Context) -> Iterator[Workspace]:
    """Megatron's scratch buffer "mpu", which grows to the largest request and is never freed."""
    job, shapes, kinds = context.job, context.shapes, context.kinds
    users: frozenset[ModuleKind] = FROM_START
    scratch = 0
    if shapes.sp:
        gathering = {ModuleKind.ADAPTER_REGATHERED_IN}
        gathering |= set() if shapes.quantizes_output_layer else {ModuleKind.OUTPUT_LAYER}
        gathering |= set() if context.te else {ModuleKind.QKV, ModuleKind.FC1}
        users = kinds & gathering - frozenset().union(*(module.derived(_frozen_kinds) for module, _ in context.modules))
        gathered_in = Shapes(shapes.inputs.of_part("decoder")) if users == {ModuleKind.OUTPUT_LAYER} else shapes
        scratch = gathered_in.hidden("gathered input", gathered=True).bytes if users else 0
    if not context.te and context.unfused and ModuleKind.ATTENTION_KERNEL in kinds:
        heads = job.model.num_attention_heads // shapes.t
        scores = round_up(dtype_bytes(shapes.dtype, shapes.b * heads * shapes.s * job.batch.seq_length), BLOCK)
        users, scratch = users | {ModuleKind.ATTENTION_KERNEL}, max(scratch, scores)
    moe = job.model.moe
    gathers = moe is not None and moe.dispatcher == "allgather" and job.parallel.expert * job.parallel.expert_tensor > 1
    if gathers and ModuleKind.DISPATCH in kinds:
        users, scratch = users | {ModuleKind.DISPATCH}, max(scratch, gathered_token_bytes(shapes_of(job)))
    if scratch:
        yield Workspace("Megatron's global memory buffer", scratch, users, "forward")
    if shapes.sp and job.flags.defer_embedding_wgrad and ModuleKind.OUTPUT_LAYER in kinds:
        # two buffers in turn; with a single call only one
        gathered = shapes.hidden("gathered input", gathered=True).bytes
        deferral = deferral_of(job, microbatches=job.batch.microbatches)
        times = 0 if deferral is None else min(2, deferral.calls)
        yield Workspace("gathered inputs of deferred weight gradients", times * gathered, users, "optimizer")


def _frozen_kinds(tree: Module) -> frozenset[ModuleKind]:
    """Kinds of modules with frozen weights: their GEMMs gather outside the buffer (`linear_with_frozen_weight`)."""
    own = frozenset({tree.kind}) if tree.frozen else frozenset()
    return own.union(*(child.derived(_frozen_kinds) for child in tree.children))


def _offloading_and_fsdp(context: _Context) -> Iterator[Workspace]:
    """Workspaces of optimizer offloading and FSDP. Their modules are imported on demand, to keep the start-up short."""
    job = context.job
    if job.optimizer.offload is not None and not job.optimizer.offload.collected:
        from analyzer.states.cpu_offload import unsharded_copy_bytes

        size = unsharded_copy_bytes(job, context.trees)
        yield Workspace("fp32 weights from the creation of the optimizer", size, FROM_START, "forward", garbage=True)
    if job.fsdp is not None and job.fsdp.double_buffer:
        from analyzer.states.buffers.fsdp_gathering import pool_bytes

        # two persistent buffers for the parameters of a layer, and two for its gradients (`FixedPoolAllocator`)
        gathered, reduced = map(max, zip(*(pool_bytes(job, tree) for tree in context.trees), strict=True))
        yield Workspace("double buffer of gathered parameters", gathered, LINEAR, "forward")
        yield Workspace("double buffer of unsharded gradients", reduced, LINEAR, "backward")


def _weights_beside(context: _Context) -> Iterator[Workspace]:
    """Weights of other models, each in an allocation of its own: they have no buffers, because nothing trains them.

    Sources: `prepare_model` in swift/megatron/trainers/rlhf_mixin.py and `_load_teacher_model` in rollout_mixin.py of ms-swift 4.6.
    Their forward runs before that of the trained model and keeps no tensors but logits, so that it needs no more.
    """
    for phase in context.job.tuning.beside:
        if phase.model is None:
            size = sum(times * module.derived(weight_bytes) for module, times in context.modules)
        else:
            size = other_weight_bytes(context.job, phase, stage=context.stage)
        yield Workspace(f"weights of the {phase.name} model", size, FROM_START, "forward")
    for phase, training, other in context.job.tuning.in_turns:
        size = states_in_turns(context.job, other, ALL_STATES - training.moved, stage=context.stage)
        if size:
            yield Workspace(f"model states of the {phase.name}", size, FROM_START, "forward")


def _teacher_logits(context: _Context) -> Iterator[Workspace]:
    """The logits that a teacher has computed for all microbatches. Each forward of the last stage frees those of its microbatch.

    In NeMo-RL all stages have those of the current microbatch. Sources: `_build_rollout_buffer` and `forward_step` in
    swift/megatron/trainers/gkd_trainer.py of ms-swift 4.6; `make_processed_microbatch_iterator` in nemo_rl/models/megatron/data.py.
    """
    job, shapes, spec = context.job, context.shapes, context.job.model.distillation
    if spec is not None and spec.framework == "NeMo-RL" and spec.topk is not None:
        kept = job.batch.seq_length * shapes.b * spec.topk
        size = sum(round_up(dtype_bytes(dtype, kept), BLOCK) for dtype in ("fp32", "int64"))
        yield Workspace("largest logits of the teacher for a microbatch", size, FROM_START, "forward", freed=True)
        return
    if spec is None or ModuleKind.LOSS not in context.kinds:
        return
    tokens = shapes.s * shapes.b
    if spec.topk is None:
        size = round_up(dtype_bytes(shapes.dtype, tokens * (job.model.padded_vocab_size // shapes.t)), BLOCK)
    else:
        kept = tokens * spec.topk
        dtype = "fp32" if spec.from_server else shapes.dtype
        size = round_up(dtype_bytes(dtype, kept), BLOCK) + round_up(dtype_bytes("int64", kept), BLOCK)
    microbatches = job.batch.microbatches * spec.iterations
    yield Workspace("logits of the teacher for all microbatches", microbatches * size, FROM_START, "forward", freed=True)


def _received(context: _Context) -> Iterator[Workspace]:
    """What a teacher sends to the last stage of its student for all microbatches, on all tensor- and context-parallel ranks.

    Source: `StudentWorker.train_step` in roll/pipeline/distill/distill_worker.py of ROLL.
    """
    batch = context.job.batch
    tokens = batch.microbatches * batch.micro_batch_size * batch.seq_length
    for phase in context.job.tuning.phases:
        if phase.sent and ModuleKind.LOSS in context.kinds:
            size = round_up(tokens * phase.sent, BLOCK)
            yield Workspace(f"probabilities of the {phase.name} for all microbatches", size, FROM_START, "forward", freed=True)


def _beside_pages(context: _Context) -> Iterator[Workspace]:
    """What the experts of one layer save, outside the pages of `--moe-paged-stash`."""
    if ModuleKind.EXPERTS in context.kinds:
        size = beside_pages_bytes(shapes_of(context.job))
        yield Workspace("saved tensors of experts beside their pages", size, frozenset({ModuleKind.EXPERTS}), "forward")


def _dummy_weight_gradients(context: _Context) -> Iterator[Workspace]:
    """Uninitialized weight gradients that fused accumulation returns to autograd: one for each distinct shape, if cached."""
    shapes = context.shapes
    cached = shapes.inputs.cached_dummies
    if not shapes.inputs.gradient_accumulation_fusion:
        return
    # with tied embeddings the weight of the output layer is that of the word embedding
    vocabulary = (shapes.model.padded_vocab_size // shapes.t, shapes.model.hidden_size)
    by_weight: dict[tuple[tuple[int, ...], str], Workspace] = {}
    for module, _ in context.modules:
        for key, workspace in module.derived(_dummy_gradients_of, vocabulary, shapes.dtype, cached):
            other = by_weight.setdefault(key, workspace)
            if not workspace.kinds <= other.kinds:
                by_weight[key] = replace(other, kinds=other.kinds | workspace.kinds, weight=other.weight and workspace.weight)
    yield from by_weight.values()


_Dummies = tuple[tuple[tuple[tuple[int, ...], str], Workspace], ...]
"""Dummy gradients by the shape and dtype of the weight."""


def _dummy_gradients_of(tree: Module, vocabulary: tuple[int, int], vocabulary_dtype: str, cached: CachedDummies) -> _Dummies:
    """The cached dummy gradients of a module and its children. `vocabulary` is the shape of an output layer's weight."""
    weights: dict[tuple[tuple[int, ...], str], set[ModuleKind]] = {}
    for module in tree.derived(_modules_with_fused_gradients):
        if module.frozen:
            continue
        if module.kind is ModuleKind.OUTPUT_LAYER:
            if cached.output_layer:
                weights.setdefault((vocabulary, vocabulary_dtype), set()).add(module.kind)
            continue
        for parameter in module.parameters:
            of_experts = len(parameter.shape) > 2  # experts have one gradient each: the last two dimensions
            if parameter.name == "weight" and (cached.experts if of_experts else cached.layers):
                weights.setdefault((parameter.shape[-2:], parameter.dtype), set()).add(module.kind)
    return tuple(
        (
            (shape, dtype),
            Workspace(
                f"dummy weight gradient {list(shape)}",
                round_up(dtype_bytes(dtype, prod(shape)), BLOCK),
                frozenset(kinds),
                "backward",
                weight=() if ModuleKind.OUTPUT_LAYER in kinds else shape,
            ),
        )
        for (shape, dtype), kinds in weights.items()
    )


def _modules_with_fused_gradients(tree: Module) -> tuple[Module, ...]:
    """The distinct modules whose GEMM can accumulate the weight gradient, in order."""
    found: dict[int, Module] = {}
    patches = tree.kind is ModuleKind.PATCHES and len(tree.parameters[0].shape) == len(("outputs", "inputs"))
    if patches or tree.kind.facts.gemms in (Gemms.LAYER, Gemms.TRANSFORMER_ENGINE, Gemms.MEGATRON):
        found[id(tree)] = tree
    for child in tree.children:
        found.update((id(module), module) for module in child.derived(_modules_with_fused_gradients))
    return tuple(found.values())


def _fp8_copies(context: _Context) -> Iterator[Workspace]:
    """Workspaces of FP8 and FP4. Their module is imported on demand, to keep the start-up short."""
    job = context.job
    if job.precision.fp8 is None:
        return
    from analyzer.states.fp8_weights import cast_bytes, kept_transposes_bytes, output_layer_bytes, scaling_bytes

    kind = "FP4" if job.precision.fp8.recipe == "nvfp4" else "FP8"
    yield Workspace(f"{kind} copies of weights", cast_bytes(job, context.modules), LINEAR, "forward")
    if ModuleKind.OUTPUT_LAYER in context.kinds:
        kinds = frozenset({ModuleKind.OUTPUT_LAYER})
        yield Workspace("FP8 copies of the output layer's weight", output_layer_bytes(context.shapes), kinds, "forward")
    yield Workspace("column-wise copies of stored FP8 weights", kept_transposes_bytes(job, context.modules), LINEAR, "forward")
    yield Workspace("FP8 scaling factors", scaling_bytes(job, context.modules), LINEAR, "forward")


def _rope_tables(context: _Context) -> Iterator[Workspace]:
    job, shapes = context.job, context.shapes
    tables = rope_tables(job, shapes, context.kinds, chunks=context.chunks) if job.model.mla is None else ()
    for name, size, users in (*tables, *latent_rope_tables(job, shapes, layers=context.rotations)):
        yield Workspace(name, size, users, "forward")
