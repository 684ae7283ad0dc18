"""Offloading of activations: which saved tensors of transformer layers are on the host between forward and backward.

A group of operations is offloaded together: every large tensor that autograd saves inside it is copied to pinned host memory
after the group's forward, freed on the GPU, and copied back before the group's backward. Transformer Engine offloads the
first N of L layers completely, so that L - N layers are on the GPU at the same time.

Sources: core/pipeline_parallel/fine_grained_activation_offload.py and the modules that open its groups (0.16.1),
core/transformer/{transformer_layer,attention,multi_latent_attention}.py, core/transformer/moe/experts.py;
transformer_engine/pytorch/cpu_offload.py `DefaultOffloadSynchronizer` (TE 2.11).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Final

from analyzer.modules.kinds import LATENT_PROJECTIONS, ModuleKind
from analyzer.modules.tree import Module, total_bytes
from analyzer.specs import ActivationOffloadSpec

Place = tuple[ModuleKind, ModuleKind]
"""The kinds of a parent and of its child."""

GROUPS: Final[dict[str, frozenset[Place]]] = {
    "attn_norm": frozenset({(ModuleKind.LAYER, ModuleKind.ATTENTION_NORM)}),
    "qkv_linear": frozenset(
        {
            (ModuleKind.ATTENTION, ModuleKind.QKV),
            (ModuleKind.QK_NORMS, ModuleKind.Q_NORM),
            (ModuleKind.QK_NORMS, ModuleKind.K_NORM),
            *((ModuleKind.ATTENTION, kind) for kind in LATENT_PROJECTIONS),
        }
    ),
    "core_attn": frozenset({(ModuleKind.ATTENTION, ModuleKind.ATTENTION_KERNEL)}),
    "attn_proj": frozenset({(ModuleKind.ATTENTION, ModuleKind.ATTENTION_OUTPUT)}),
    "mlp_norm": frozenset({(ModuleKind.LAYER, ModuleKind.FEED_FORWARD_NORM)}),
    "expert_fc1": frozenset({(ModuleKind.EXPERTS, ModuleKind.FC1)}),
    "moe_act": frozenset({(ModuleKind.EXPERTS, ModuleKind.ACTIVATION)}),
}
"""For each name of `--offload-modules`, the places of its modules in a layer."""


def with_offloaded_groups(offload: ActivationOffloadSpec, layer: Module) -> Module:
    """The layer with the large saved tensors of the given groups on the host."""
    places = frozenset(place for name in offload.modules for place in GROUPS[name])
    return _with_offloaded(layer, places, offload.min_elements) if places else layer


def with_everything_offloaded(layer: Module) -> Module:
    """The layer with all its saved tensors on the host."""
    children = tuple(with_everything_offloaded(child) for child in layer.children)
    offloaded = tuple(tensor for tensor in layer.saved if tensor.bytes)
    return replace(layer, saved=tuple(tensor for tensor in layer.saved if not tensor.bytes), offloaded=offloaded, children=children)


def _with_offloaded(module: Module, places: frozenset[Place], min_elements: int) -> Module:
    children = []
    for child in module.children:
        changed = _with_offloaded(child, places, min_elements)
        if (module.kind, child.kind) in places:
            offloaded = tuple(tensor for tensor in child.saved if tensor.bytes and prod(tensor.shape) >= min_elements)
            changed = replace(
                changed, saved=tuple(tensor for tensor in child.saved if tensor not in offloaded), offloaded=offloaded
            )
        children.append(changed)
    return replace(module, children=tuple(children))


def offloaded_bytes_of_last_layer(tree: Module) -> int:
    """Bytes of the groups of a chunk's last layer. They are not offloaded for the microbatch whose backward runs first.

    This applies from the second iteration on, when the groups are known (`PipelineOffloadManager.post_warmup_callback`).
    """
    layers = [module for _, module in tree.walk() if module.kind is ModuleKind.LAYER]
    return _offloaded_bytes(layers[-1]) if layers else 0


def _offloaded_bytes(module: Module) -> int:
    return total_bytes(module.offloaded) + sum(_offloaded_bytes(child) for child in module.children)
