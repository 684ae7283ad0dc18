"""Offloading of activations: which saved tensors of transformer layers are on the host between forward and backward.

A group of operations is offloaded together: every large tensor that autograd saves inside it is copied to pinned host memory
after the group's forward, freed on the GPU, and copied back before the group's backward. Transformer Engine offloads the
first N of L layers completely, so that L - N layers are on the GPU at the same time.

Sources: core/pipeline_parallel/fine_grained_activation_offload.py and the modules that open its groups (0.16.1),
core/transformer/{transformer_layer,attention,multi_latent_attention}.py, core/transformer/moe/experts.py;
transformer_engine/pytorch/cpu_offload.py `DefaultOffloadSynchronizer` (TE 2.11).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Final, Literal

from analyzer.modules.attention.context_parallel import ONE_COPY, QKV_TENSOR
from analyzer.modules.attention.core_attention import is_rotary_table
from analyzer.modules.kinds import LATENT_PROJECTIONS, ModuleKind
from analyzer.modules.models.mtp import PROJECTED
from analyzer.modules.tree import ACTIVATION_OUTPUT, STREAM, Module, Tensor, half_of, largest, total_bytes
from analyzer.specs import ActivationOffloadSpec, ModelSpec, MoeSpec

Place = tuple[ModuleKind, ModuleKind]
"""The kinds of a parent and of its child."""
InputFrom = Literal["layer", "embedding", "stage"]

GROUPS: Final[dict[str, frozenset[Place]]] = {
    "attn_norm": frozenset({(ModuleKind.LAYER, ModuleKind.ATTENTION_NORM)}),
    "qkv_linear": frozenset(
        {
            (ModuleKind.ATTENTION, ModuleKind.QKV),
            (ModuleKind.QK_NORMS, ModuleKind.Q_NORM),
            (ModuleKind.QK_NORMS, ModuleKind.K_NORM),
            *((ModuleKind.ATTENTION, kind) for kind in (*LATENT_PROJECTIONS, ModuleKind.ROTATION)),
        }
    ),
    "core_attn": frozenset({(ModuleKind.ATTENTION, ModuleKind.ATTENTION_KERNEL)}),
    "attn_proj": frozenset({(ModuleKind.ATTENTION, ModuleKind.ATTENTION_OUTPUT)}),
    "mlp_norm": frozenset({(ModuleKind.LAYER, ModuleKind.FEED_FORWARD_NORM)}),
    "expert_fc1": frozenset({(ModuleKind.EXPERTS, ModuleKind.FC1)}),
    "moe_act": frozenset({(ModuleKind.EXPERTS, ModuleKind.ACTIVATION)}),
}
"""For each name of `--offload-modules`, the places of its modules in a layer."""
COMMITS: Final = ("qkv_linear", "core_attn", "attn_proj", "attn_norm", "expert_fc1", "moe_act", "mlp_norm")
"""Groups of a layer in the order in which they are copied to the host. Those of the norms are copied after the residual add."""

_READING_EARLY: Final = frozenset({"core_attn", "moe_act"})
"""Groups whose backward reads some of its tensors first, and then frees those that hooks reference."""
_BALANCED: Final = frozenset({"aux_loss", "seq_aux_loss", "global_aux_loss"})
"""Kinds of load balancing whose scores are sorted once more (`compute_routing_scores_for_aux_loss`)."""

_PROJECTIONS: Final = frozenset({ModuleKind.QKV, *LATENT_PROJECTIONS})
"""Modules of the group `qkv_linear` that save the input of the layer."""


def group_of(offload: ActivationOffloadSpec, module: Module, child: Module) -> str | None:
    """The group that offloads what a child of a module saves; None if none does.

    Of the experts only those that run in one grouped GEMM open groups (`TEGroupedMLP`).
    """
    if module.kind is ModuleKind.EXPERTS and module.source != "TEGroupedMLP":
        return None
    return next((name for name in offload.modules if (module.kind, child.kind) in GROUPS[name]), None)


def with_offloaded_groups(offload: ActivationOffloadSpec, layer: Module, *, input_from: InputFrom = "layer") -> Module:
    """The layer with the large saved tensors of the given groups on the host.

    `input_from`: what computes the input of the layer. The projections of attention save it. `GPTModel.forward` references the
    output of the embedding until it returns, and the schedule references a tensor from another stage until its backward.
    """
    if not offload.modules:
        return layer
    changed = _beside_queries(_beside_projections(_with_offloaded(layer, offload, input_stays=input_from == "stage")))
    if input_from == "embedding":
        return _holding_input(changed, _PROJECTIONS)
    return _beside_input(changed) if input_from == "layer" else changed


def _beside_projections(module: Module) -> Module:
    """Attention whose group `qkv_linear` is copied to the host after its last module, and is on the GPU until then."""
    if module.kind is not ModuleKind.ATTENTION:
        return replace(module, children=tuple(map(_beside_projections, module.children))) if module.children else module
    held: tuple[Tensor, ...] = ()

    def beside(parent: Module) -> Iterator[Module]:
        nonlocal held
        for child in parent.children:
            if child.kind is ModuleKind.QK_NORMS:
                yield replace(child, children=tuple(beside(child)))
            elif (parent.kind, child.kind) in GROUPS["qkv_linear"]:
                yield replace(child, forward_workspace=(*child.forward_workspace, *held)) if held else child
                held += tuple(tensor for tensor in child.offloaded if tensor not in child.saved and tensor.made_in != STREAM)
            else:
                yield child

    return replace(module, children=tuple(beside(module)))


def _beside_queries(module: Module) -> Module:
    """Multi-latent attention whose compressed queries are on the host: a local variable references them until it returns.

    `MLASelfAttention.get_query_key_value_tensors` (core/transformer/multi_latent_attention.py, 0.16.1).
    """
    if module.kind is not ModuleKind.ATTENTION:
        return replace(module, children=tuple(map(_beside_queries, module.children))) if module.children else module
    up = next((child for child in module.children if child.kind is ModuleKind.Q_UP), None)
    queries = tuple(tensor for tensor in up.offloaded if tensor.made_in and tensor not in up.saved) if up is not None else ()
    if not queries:
        return module
    after = (ModuleKind.ATTENTION_KERNEL, ModuleKind.ATTENTION_KERNEL_CHECKPOINT, ModuleKind.ATTENTION_OUTPUT)
    children = (
        replace(child, forward_workspace=(*child.forward_workspace, *queries)) if child.kind in after else child
        for child in module.children
    )
    return replace(module, children=tuple(children))


def _beside_input(layer: Module) -> Module:
    """A layer whose input, which the projections of attention save, stays on the GPU until the layer returns.

    The caller references it (`TransformerBlock.forward`).
    """
    projections = (module for _, module in layer.walk() if _offloads_input(module))
    tensors = tuple(tensor for tensor in next(projections, layer).offloaded if tensor.made_in == STREAM and tensor.bytes)
    if not tensors:
        return layer

    def after(children: tuple[Module, ...]) -> Iterator[Module]:
        found = False
        for child in children:
            within = not found and any(_offloads_input(module) for _, module in child.walk())
            if within:
                yield replace(child, children=tuple(after(child.children))) if child.children else child
            else:
                yield replace(child, forward_workspace=(*child.forward_workspace, *tensors)) if found else child
            found = found or within

    return replace(layer, children=tuple(after(layer.children)))


def _offloads_input(module: Module) -> bool:
    """Whether a projection of attention offloads the input of the layer."""
    return module.kind in _PROJECTIONS and any(
        tensor.made_in == STREAM and tensor not in module.saved for tensor in module.offloaded
    )


def with_hooks(offload: ActivationOffloadSpec, module: Module) -> Module:
    """A layer that is not offloaded, with groups whose tensors hooks reference (`tensor_push` and `tensor_pop`)."""
    if not module.children or not _READING_EARLY.intersection(offload.modules):
        return module
    children = (
        replace(child, saved_by_hooks=True) if group_of(offload, module, child) in _READING_EARLY else with_hooks(offload, child)
        for child in module.children
    )
    return replace(module, children=tuple(children))


def _holding_input(layer: Module, readers: frozenset[ModuleKind]) -> Module:
    """The first layer, whose input, which `readers` save, stays on the GPU until the forward of the chunk returns."""
    held = (tensor for _, module in layer.walk() if module.kind in readers for tensor in module.offloaded)
    return replace(layer, forward_held=(*layer.forward_held, *(tensor for tensor in held if tensor.made_in == STREAM)))


def with_offloaded_projection(depth: Module) -> Module:
    """An MTP layer whose transformer layer has been offloaded.

    Under sequence parallelism the input of the transformer layer is a view of the gathered output of the projection. If it is
    offloaded, that output is freed when the layer returns: `_proj_and_transformer_layer` references it until then.
    """
    layer = next((child for child in depth.children if child.kind is ModuleKind.LAYER), None)
    if layer is None:
        return depth
    tensors = [(tensor, module) for _, module in layer.walk() for tensor in (*module.saved, *module.offloaded)]
    views = [(tensor, module) for tensor, module in tensors if tensor.shares == PROJECTED]
    if not views or any(tensor in module.saved for tensor, module in views):
        return depth
    full = tuple(tensor for tensor in layer.saved if tensor.name == PROJECTED)
    left = tuple(tensor for tensor in layer.saved if tensor not in full)
    beside = replace(layer, saved=left, forward_workspace=(*layer.forward_workspace, *full))
    return replace(depth, children=tuple(beside if child is layer else child for child in depth.children))


def with_everything_offloaded(layer: Module, *, input_from: InputFrom = "layer") -> Module:
    """The layer with all its saved tensors on the host, except views that are not contiguous."""
    changed = _with_everything(layer)
    return _holding_input(changed, _PROJECTIONS | {ModuleKind.ATTENTION_NORM}) if input_from == "embedding" else changed


def with_unused_nodes(model: ModelSpec, layer: Module) -> Module:
    """The layer with what autograd saves in nodes that nothing references, such as those of indices.

    Transformer Engine sees each tensor when it is saved (`OffloadSynchronizer.push_tensor`), and lists it until the backward of the
    layer ends.
    """
    if model.moe is None:
        return layer
    moe = model.moe

    def changed(module: Module) -> Module:
        if module.kind is ModuleKind.ROUTER:
            tokens = next(tensor.shape[0] for tensor in module.saved if tensor.name == "scores")
            return replace(module, saved=(*module.saved, *_unused_choices(moe, tokens)))
        return replace(module, children=tuple(changed(child) for child in module.children)) if module.children else module

    return changed(layer)


def _unused_choices(moe: MoeSpec, tokens: int) -> Iterator[Tensor]:
    """Indices that `topk` returns and saves, with values that are not used.

    core/transformer/moe/moe_utils.py `apply_router_token_dropping` and `compute_routing_scores_for_aux_loss` (0.16.1).
    """
    if moe.capacity_factor is not None:
        capacity = moe.capacity(tokens)
        if capacity <= tokens:
            yield Tensor(name="tokens within the capacity", shape=(capacity, moe.num_experts), dtype="int64", formula="8·C·E")
    if moe.aux_loss_coeff and _BALANCED.intersection(moe.load_balancing):
        shape = (tokens, moe.topk)
        yield Tensor(name="chosen experts of the auxiliary loss", shape=shape, dtype="int64", formula="8·T·k")


def _with_everything(module: Module) -> Module:
    children = tuple(_with_everything(child) for child in module.children)
    offloaded = tuple(tensor for tensor in module.saved if tensor.bytes and not tensor.strided)
    return replace(
        module,
        saved=tuple(tensor for tensor in module.saved if tensor not in offloaded),
        offloaded=offloaded,
        # attributes reference them on the GPU
        referenced=(*module.referenced, *(replace(tensor, lingers=False) for tensor in offloaded if tensor.lingers)),
        children=children,
    )


def _with_offloaded(module: Module, offload: ActivationOffloadSpec, *, input_stays: bool) -> Module:
    children: list[Module] = []
    for child in module.children:
        changed = _with_offloaded(child, offload, input_stays=input_stays)
        group = group_of(offload, module, child)
        if group is not None:
            copied = tuple(
                tensor
                for tensor in child.saved
                if _saved_elements(tensor) >= offload.min_elements
                # the rotation runs before the group of core attention
                and not (child.kind is ModuleKind.ATTENTION_KERNEL and is_rotary_table(tensor))
            )
            stays = tuple(
                tensor
                for tensor in copied
                if (input_stays and tensor.made_in == STREAM and child.kind in _PROJECTIONS)
                or (tensor.name == "output" and _is_read_by_projection(module, offload))
            )
            left = tuple(tensor for tensor in child.saved if tensor not in copied or tensor in stays)
            offloaded = (*copied, *_cached_weights(child, offload))
            # smaller tensors stay on the GPU, where hooks reference them
            changed = replace(changed, saved=left, offloaded=offloaded, saved_by_hooks=group in _READING_EARLY)
        if child.kind is ModuleKind.FC2 and children:
            changed = _after_copy(changed, children[-1])
        children.append(changed)
    return replace(module, children=tuple(children))


def _saved_elements(tensor: Tensor) -> int:
    """Elements that are compared with the minimum: queries, keys and values are saved as three tensors.

    The size of the whole output of fc1 decides, although half of each row may be saved: the group frees it (`bulk_offload`).
    """
    return prod(tensor.shape) // (3 if tensor.name in (QKV_TENSOR, ONE_COPY) else 1)


def _cached_weights(module: Module, offload: ActivationOffloadSpec) -> Iterator[Tensor]:
    """Weights that are cached in FP8 or FP4, as their copies come back from the host. The cached weights stay on the GPU.

    A cached weight is a tensor that autograd saves. `copy_` to the host gives its values in 16 bit (`ChunkOffloadHandler.offload`).
    """
    for weight in module.parameters if offload.cached_weights else ():
        if weight.quantized and weight.numel // weight.pieces >= offload.min_elements:
            yield Tensor(name="weight", shape=weight.shape, dtype=weight.dtype, shares="cached weight", pieces=weight.pieces)


def _after_copy(projection: Module, activation: Module) -> Module:
    """The second projection of experts, after which the group of their activation is copied to the host.

    An unfused gated activation saves half of each row of the first projection's output. This view is copied to a contiguous tensor
    before it is copied to the host (`ChunkOffloadHandler.offload`). What the activation saves is freed before the experts add their
    bias and remove padding. The temporary tensors of the projection after its output are not allocated at the same time.
    """
    if activation.kind is not ModuleKind.ACTIVATION or not activation.offloaded:
        return projection
    workspace = projection.forward_workspace
    output = [tensor.name for tensor in workspace].index("output") + 1
    after = workspace[output:]
    if not any(tensor.name == ACTIVATION_OUTPUT for tensor in after):  # a recomputed activation exists with what is offloaded
        # the GEMM reads row-wise copies in FP8 of the size of the column-wise ones, and frees them
        copied = total_bytes(tensor for tensor in projection.saved if "column-wise" in tensor.name)
        rest = min(total_bytes(after), max(copied, total_bytes(after) - total_bytes(activation.offloaded)))
        after = (Tensor(name="quantized input, or padding beyond what is offloaded", shape=(rest,), dtype="uint8"),) if rest else ()
    halves = [tensor for tensor in activation.offloaded if tensor.strided]
    half = tuple(replace(half_of(tensor), name="contiguous copy of half of fc1's output") for tensor in halves[:1])
    return replace(projection, forward_workspace=(*workspace[:output], *largest(after, half)))


def _is_read_by_projection(attention: Module, offload: ActivationOffloadSpec) -> bool:
    """Whether the output projection saves the output of core attention, and keeps it on the GPU."""
    projection = next((child for child in attention.children if child.kind is ModuleKind.ATTENTION_OUTPUT), None)
    return "attn_proj" not in offload.modules and projection is not None and not total_bytes(projection.saved)


def frees_input(offload: ActivationOffloadSpec, tree: Module, *, first_iteration: bool) -> bool:
    """Whether the storage of a chunk's input is freed once it is on the host, whatever references it.

    `TransformerLayer.forward` lets the group `attn_norm` free the input of the layer (`forced_released_tensors`). `tree` is that of
    later iterations, where the layer before the loss is not offloaded.
    """
    layer = next((module for _, module in tree.walk() if module.kind is ModuleKind.LAYER), None)
    if layer is None or "attn_norm" not in offload.modules:
        return False
    norms = (module for _, module in layer.walk() if module.kind is ModuleKind.ATTENTION_NORM)
    return any(
        tensor.made_in == STREAM and prod(tensor.shape) >= offload.min_elements
        for norm in norms
        for tensor in (*norm.offloaded, *(norm.saved if first_iteration else ()))
        if first_iteration or tensor not in norm.saved
    )


def members(offload: ActivationOffloadSpec, module: Module) -> Iterator[tuple[str, Module]]:
    """The modules of the groups in a layer, each with the name of its group, in the order of the forward."""
    for child in module.children:
        name = group_of(offload, module, child)
        if name is not None:
            yield name, child
        yield from members(offload, child)


def last_groups(offload: ActivationOffloadSpec, tree: Module) -> tuple[frozenset[str], ...]:
    """For each layer of a chunk, its groups that no later layer has.

    They are not offloaded for the microbatch whose backward runs next (`ChunkOffloadHandler.should_bulk_offload`). The groups of
    experts are in an earlier layer than those of attention if the last layer is dense.
    """
    layers = (module for _, module in tree.walk() if module.kind is ModuleKind.LAYER)
    names = [frozenset(name for name, _ in members(offload, layer)) for layer in layers]
    return tuple(each.difference(*names[index + 1 :]) for index, each in enumerate(names))


def bytes_of_last_groups(offload: ActivationOffloadSpec, tree: Module) -> int:
    """Bytes of `last_groups`, for the microbatch whose backward runs first.

    This applies from the second iteration on, when the groups are known (`PipelineOffloadManager.post_warmup_callback`).
    """
    layers = (module for _, module in tree.walk() if module.kind is ModuleKind.LAYER)
    return sum(
        total_bytes(tensor for tensor in module.offloaded if tensor not in module.saved)
        for layer, last in zip(layers, last_groups(offload, tree), strict=True)
        for name, module in members(offload, layer)
        if name in last
    )
