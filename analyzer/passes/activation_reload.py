"""Which offloaded tensors are on the GPU before their backward: those that the backward of a later group has copied back.

At the end of the backward of each group, the group that was offloaded last is copied back (`ChunkOffloadHandler.bulk_reload`).
If none is left, groups of the microbatch whose backward is next are copied back, provided that its forward has finished. In the
first iteration the last layer is offloaded too. A group that is not on the GPU is copied back by its own backward. This has
always happened by then, except for norms: they are offloaded last, and their backward runs last.

Source: core/pipeline_parallel/fine_grained_activation_offload.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.experts import INPUT_GRADIENTS, SAVED_BY_LAST, SAVED_BY_OTHERS
from analyzer.modules.quantized import is_quantized_copy
from analyzer.modules.tree import OUTPUT_GRADIENT, Module, Tensor, total_bytes
from analyzer.passes.activation_offload import COMMITS, group_of, members
from analyzer.specs import ActivationOffloadSpec, TrainingJob

_EMBEDDING: Final = -1
"""In place of the index of a layer."""


@dataclass(eq=False)
class _Group:
    """One group of a layer. Its modules run one after the other."""

    layer: int
    name: str
    offloaded: list[Tensor] = field(default_factory=list)
    """As copied back from the host."""
    whole: list[Tensor] = field(default_factory=list)
    """The same if they have stayed on the GPU: a saved view keeps its whole tensor allocated."""
    reloads: tuple[Tensor, ...] = ()
    early: bool = False
    """Copied back before the backward of its layer."""
    within: bool = False
    """Copied back by the backward of another group of its layer."""


def with_early_reloads(offload: ActivationOffloadSpec, tree: Module, *, first_iteration: bool = False) -> Module:
    """The tree of a chunk with the groups that another group copies back."""
    layers = [module for _, module in tree.walk() if module.kind is ModuleKind.LAYER]
    groups = [group for index, layer in enumerate(layers) for group in _groups(offload, index, layer)]
    if not groups:
        return tree
    ahead = _follow_first(groups) if first_iteration else _follow(groups, len(layers), depths=_depths(tree))
    return _changed(tree, offload, groups, ahead)


def with_reloaded_layers(job: TrainingJob, tree: Module, *, offloaded_layers: int) -> Module:
    """The tree of a chunk with its first layers on the host (`DefaultOffloadSynchronizer` of Transformer Engine 2.11).

    The backward of layer j copies layer j - (L - 1 - N) back, so that L - N layers are on the GPU in each backward. A layer that
    was copied back stays until its backward ends.
    """
    layers = [module for _, module in tree.walk() if module.kind is ModuleKind.LAYER]
    number = job.model.num_layers  # without MTP layers, which are not in the block with the offloaded layers
    distance = number - 1 - offloaded_layers
    copies = [(*_all_copies(layer), *_rope_table(job)) if index < offloaded_layers else () for index, layer in enumerate(layers)]
    numbers = iter(range(len(layers)))
    done: dict[object, Module] = {}

    def changed(module: Module) -> Module:
        if module.kind is ModuleKind.LAYER:
            index = next(numbers)
            if index >= number:
                return module
            there = tuple(tensor for each in copies[max(0, index - distance) : index] for tensor in each)
            if index < offloaded_layers:
                there = (*there, *_all_copies(module, cleared=False), *_rope_table(job))
            key = (id(module), len(there), total_bytes(there))
            if key not in done:
                held = _on_host(module) if index < offloaded_layers else _held_until_end(module)
                done[key] = replace(held, backward_workspace=(*held.backward_workspace, *there))
            return done[key]
        return replace(module, children=tuple(changed(child) for child in module.children)) if module.children else module

    return changed(tree)


def _rope_table(job: TrainingJob) -> Iterator[Tensor]:
    """The frequencies that the fused RoPE kernel saves. All layers share the table, and each offloaded layer copies it."""
    model = job.model
    if model.position_embedding == "rope" and model.rope_fusion and model.mla is None:
        shape = (job.batch.seq_length // job.parallel.context, int(model.kv_channels * model.rotary_percent))
        yield Tensor(name="copy of the RoPE frequency table", shape=shape, dtype="fp32")


def _all_copies(module: Module, *, cleared: bool = True) -> Iterator[Tensor]:
    """What is copied back, without what the backwards of modules free unless `cleared`."""
    yield from (tensor for tensor in module.copied_back if cleared or not _clears(module, tensor))
    for child in module.children:
        yield from _all_copies(child, cleared=cleared)


def _held_until_end(module: Module) -> Module:
    """A layer on the GPU: the list of its saved tensors references them until its backward ends (`release_all_memory`)."""
    held = tuple(tensor for tensor in module.saved if not (tensor.strided or _clears(module, tensor)))
    changed = _with_workspace_beside_saved(module, module.saved)
    children = _beside_other_experts(module, tuple(_held_until_end(child) for child in module.children))
    return replace(changed, reloads=(*module.reloads, *held), children=children)


def _beside_other_experts(module: Module, children: tuple[Module, ...]) -> tuple[Module, ...]:
    """The children of a module whose saved tensors stay: an activation runs beside the input gradients of sequential experts.

    Its highest instant is that of the last expert but one: then the last one still has to read the gradient of all outputs.
    """
    if module.kind is not ModuleKind.EXPERTS:
        return children
    gradients = [tensor for tensor in children[0].backward_workspace if tensor.name == INPUT_GRADIENTS[1] and tensor.pieces > 1]
    earlier = tuple(
        replace(each, shape=(each.shape[0] // each.pieces * (each.pieces - 1), *each.shape[1:]), pieces=each.pieces - 1)
        for each in gradients
    )
    return tuple(
        replace(child, backward_workspace=(*child.backward_workspace, *earlier)) if child.kind is ModuleKind.ACTIVATION else child
        for child in children
    )


def _clears(module: Module, tensor: Tensor) -> bool:
    """Whether the backward of a module of Transformer Engine frees the data of a saved tensor (`clear_tensor_data`).

    These are what a fused norm saves, and quantized inputs of linear layers.
    """
    if module.source == "TELayerNormColumnParallelLinear" and tensor.name in ("normalized input", "mu", "rsigma"):
        return True
    return is_quantized_copy(tensor) and any(parameter.name == "weight" for parameter in module.parameters)


def _with_workspace_beside_saved(module: Module, saved: tuple[Tensor, ...]) -> Module:
    """A module whose saved tensors stay until the backward of the layer ends.

    In unfused attention the highest instant is then the backward of dropout, or of the softmax in fp32. It has the gradients of its
    input and output, but not yet those of query and key; that of the value replaces the value if this has a storage of its own.
    The backward of the softmax in fp32 also has a product of two matrices, and where the scores are in fp32 too the gradient is
    copied three times while the softmax is still saved (`unfused_attention.backward_workspace`).
    Without either it is the backward of the scores, with the gradients of query and key. What sequential experts have not freed is
    counted already.
    """
    if module.kind in (ModuleKind.ACTIVATION, ModuleKind.FC1):
        counted = (SAVED_BY_OTHERS, SAVED_BY_LAST)
        workspace = tuple(tensor for tensor in module.backward_workspace if tensor.name not in counted)
        return replace(module, backward_workspace=workspace)
    names = {tensor.name: tensor for tensor in saved}
    softmax = names.get("softmax")
    if module.kind is not ModuleKind.ATTENTION_KERNEL or softmax is None:
        return module
    if any(tensor.strided and tensor.dtype != softmax.dtype and tensor.shape == softmax.shape for tensor in saved):
        return module  # with sinks and without dropout the softmax in 16 bit is a view, and is freed as without offloading
    of_value = tuple(tensor for tensor in module.backward_workspace if tensor.name == "value gradient")
    freed = any(tensor.name in ("value", "repeated value") and tensor.bytes for tensor in saved)
    if "dropout mask" not in names and softmax.dtype != "fp32":  # the backward of the scores, beside their gradient
        gone = (OUTPUT_GRADIENT, *(tensor.name for tensor in of_value if freed))
        left = tuple(tensor for tensor in module.backward_workspace if tensor.name not in gone)
        products = ("query gradient", "key gradient", "key gradient before it is scaled")
        wide = [replace(tensor, shape=names.get("query", tensor).shape) for tensor in of_value]
        return replace(module, backward_workspace=(*left, *(replace(each, name=name) for each in wide for name in products)))
    ends = ["input", "output"]
    if softmax.dtype == "fp32":
        in_16_bit = any(tensor.dtype in ("bf16", "fp16") for tensor in saved)
        ends += ["input and output", *(() if in_16_bit else ("masked input",))]
    gradients = tuple(replace(softmax, name=f"gradient of the {end} of the softmax") for end in ends)
    return replace(module, backward_workspace=(*(() if freed else of_value), *gradients))


def _on_host(module: Module) -> Module:
    """The layer without tensors that its modules copy back: the layer has them, except those that a backward frees."""
    changed = _with_workspace_beside_saved(module, (*module.saved, *module.offloaded))
    freed = tuple(tensor for tensor in module.offloaded if _clears(module, tensor))
    children = _beside_other_experts(module, tuple(_on_host(child) for child in module.children))
    return replace(changed, offloaded=freed, reloaded_early=bool(freed), children=children)


def _groups(offload: ActivationOffloadSpec, index: int, layer: Module) -> list[_Group]:
    """The groups of a layer in the order of the forward."""
    found: dict[str, _Group] = {}
    for name, child in members(offload, layer):
        group = found.setdefault(name, _Group(index, name))
        group.offloaded += child.copied_back
        group.whole += (replace(tensor, shares="") for tensor in child.offloaded)
    return list(found.values())


def _depths(tree: Module) -> int:
    """The layers of all MTP depths, which are the last layers of a chunk, and run in one block."""
    kinds = (inside.kind for _, mtp in tree.walk() if mtp.kind is ModuleKind.MTP for _, inside in mtp.walk())
    return sum(kind is ModuleKind.LAYER for kind in kinds)


def _follow(groups: list[_Group], layers: int, *, depths: int = 0) -> dict[int, tuple[Tensor, ...]]:
    """Follow the backward of a microbatch, and of the one after it, which has the same groups.

    Returns for each layer what is on the GPU when its backward begins, without its own groups; at `_EMBEDDING` for the embedding.
    `layers`: how many the chunk has. Some have no groups. The last `depths` of them are one block: what the backward of one copies
    back for another stays until the other reads it, and what it copies back for earlier layers until the block ends.
    """
    together = layers - depths
    ordered = _in_order_of_offloading(groups)
    last_layer = {group.name: group.layer for group in groups}
    last = [group for group in ordered if group.layer == last_layer[group.name]]
    waiting = [group for group in ordered if group not in last]
    there = tuple(last)
    for group in last:
        group.early = True
    copied: list[_Group] = []
    of_next: list[_Group] = []
    ahead: dict[int, tuple[Tensor, ...]] = {}
    done: list[_Group] = []
    following = layers
    for group in reversed(groups):
        for layer in reversed(range(group.layer, following)):
            if together <= layer < layers - 1:
                ahead[layer] = ahead[layers - 1]
                continue
            stayed = (each for each in there if each.layer < min(layer, together))
            earlier = (each for each in copied if each.layer < min(layer, together))
            ahead[layer] = (
                *(tensor for each in stayed for tensor in each.whole),
                *(tensor for each in (*earlier, *of_next) for tensor in each.offloaded),
            )
        following = group.layer
        done.append(group)
        if waiting:
            found = waiting.pop()
            if found in done:
                continue
            copied.append(found)
            found.within = found.layer == group.layer or found.layer >= together
            found.early = not found.within
        elif last:
            found = last.pop()
            of_next.append(found)
        else:
            continue
        group.reloads = tuple(found.offloaded)
    ahead[_EMBEDDING] = tuple(tensor for each in of_next for tensor in each.offloaded)
    return ahead


def _follow_first(groups: list[_Group]) -> dict[int, tuple[Tensor, ...]]:
    """Follow the first backward. All groups were offloaded; those whose backward has run have nothing left to copy."""
    waiting = _in_order_of_offloading(groups)
    done: list[_Group] = []
    for group in reversed(groups):
        done.append(group)
        copied = waiting.pop()
        if copied not in done:
            group.reloads, copied.within = tuple(copied.offloaded), True
    return {}


def _in_order_of_offloading(groups: list[_Group]) -> list[_Group]:
    return sorted(groups, key=lambda group: (group.layer, COMMITS.index(group.name)))


def _changed(tree: Module, offload: ActivationOffloadSpec, groups: list[_Group], ahead: dict[int, tuple[Tensor, ...]]) -> Module:
    """The tree with groups that are copied back early. Equal layers stay one object."""
    numbers = count()
    done: dict[object, Module] = {}

    def changed(module: Module) -> Module:
        if module.kind is ModuleKind.EMBEDDING:
            return _beside(module, ahead.get(_EMBEDDING, ()))
        if module.kind is ModuleKind.LAYER:
            index = next(numbers)
            of_layer = {group.name: group for group in groups if group.layer == index}
            there = ahead.get(index, ())
            key = (id(module), there, *((group.early, group.within, group.reloads) for group in of_layer.values()))
            if key not in done:
                done[key] = _beside(_changed_layer(module, offload, of_layer), there)
            return done[key]
        return replace(module, children=tuple(changed(child) for child in module.children)) if module.children else module

    return changed(tree)


def _beside(module: Module, there: tuple[Tensor, ...]) -> Module:
    """A module with tensors that are on the GPU throughout its backward."""
    return replace(module, backward_workspace=(*module.backward_workspace, *there), reloaded_ahead=there) if there else module


def _changed_layer(module: Module, offload: ActivationOffloadSpec, groups: dict[str, _Group]) -> Module:
    children = []
    for child in module.children:
        changed = _changed_layer(child, offload, groups)
        name = group_of(offload, module, child)
        group = groups.get(name or "")
        if group is not None:
            # the first module of a group in forward ends its backward
            some = bool(child.offloaded)
            changed = replace(
                changed, reloaded_early=group.early and some, reloaded_within=group.within and some, reloads=group.reloads
            )
            group.reloads = ()
        children.append(changed)
    return replace(module, children=tuple(children))
