"""The order in which the parts of a module are created.

Sources: `Attention.__init__`, `MultiLatentAttention.__init__`, `MLASelfAttention.__init__` and `MoELayer.__init__` in
megatron/core/transformer (0.16.1); `DSv4HybridSelfAttention.__init__`, `CompressedSparseAttention.__init__` and
`HyperConnectionTransformerLayer.__init__` of the branch dev, August 2026 (b3b1e2d7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from analyzer.modules.kinds import MOE_LATENT_PROJECTIONS, ModuleKind
from analyzer.modules.tree import Module


def children_in_order(module: Module) -> Sequence[Module]:
    """The parts of a module as `named_parameters` lists them: in the order of the tree, but for attention and MoE layers."""
    children = module.children
    if module.kind is ModuleKind.ATTENTION:
        linear = any(child.kind is ModuleKind.LINEAR_ATTENTION_INPUT for child in children)  # created in the order of execution
        return children if linear else _after_their_layers(children)
    if any(child.kind is ModuleKind.ROUTER for child in children):
        return sorted(children, key=_place_in_moe_layer)
    return sorted(children, key=lambda child: child.kind is ModuleKind.HYPER_CONNECTION)  # these are created last


def _after_their_layers(children: Sequence[Module]) -> list[Module]:
    """The parts of attention in the order of their creation. An adapter is part of the layer before it."""
    groups: list[list[Module]] = []
    for child in children:
        if child.kind is ModuleKind.ADAPTER:
            groups[-1].append(child)
        else:
            groups.append([child])
    return [each for group in sorted(groups, key=lambda group: _place_in_attention(group[0])) for each in group]


_ATTENTION: Final = {
    ModuleKind.GROUPED_OUTPUT: -1,  # a parameter of the attention itself
    ModuleKind.COMPRESSED_ATTENTION: -1,  # its sinks are parameters of the core attention itself
    ModuleKind.INDEX_PROJECTION: -1,
    ModuleKind.ATTENTION: 0,  # core attention, or a part of it
    ModuleKind.ATTENTION_KERNEL: 0,
    ModuleKind.ATTENTION_KERNEL_CHECKPOINT: 0,
    ModuleKind.ATTENTION_OUTPUT: 1,
    ModuleKind.QKV: 2,
    ModuleKind.Q_PROJECTION: 2,
    ModuleKind.Q_DOWN: 2,
    ModuleKind.Q_UP: 3,
    ModuleKind.KV_DOWN: 4,
    ModuleKind.KV_PROJECTION: 3,
    ModuleKind.KV_UP: 5,
}
"""The order of the parts of attention. Separate norms are last."""


def _place_in_attention(module: Module) -> int:
    return _ATTENTION.get(module.kind, len(_ATTENTION))


def _place_in_moe_layer(module: Module) -> int:
    if module.kind is ModuleKind.ROUTER:
        return 0
    if module.kind in MOE_LATENT_PROJECTIONS:
        return 1
    return 3 if module.kind is ModuleKind.SHARED_EXPERTS else 2
