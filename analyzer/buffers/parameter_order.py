"""The order in which Megatron creates the parameters of a chunk, as `named_parameters` lists them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Parameter


def creation_order(tree: Module) -> Iterator[Parameter]:
    """Parameters of a chunk in the order of their creation."""
    for module in modules_in_order(tree):
        yield from module.parameters


def modules_in_order(tree: Module) -> Iterator[Module]:
    """Modules of a chunk in the order in which their parameters are listed.

    That is the order of the tree except for attention, which creates its kernel (with its sinks) and its output projection
    before the projection of queries, keys and values (`Attention.__init__`, `SelfAttention.__init__` in
    megatron/core/transformer/attention.py).
    """
    yield tree
    children: Sequence[Module] = tree.children
    if tree.kind is ModuleKind.ATTENTION:
        children = sorted(children, key=_place_in_attention)
    for child in children:
        yield from modules_in_order(child)


def _place_in_attention(module: Module) -> int:
    if module.kind in (ModuleKind.ATTENTION_KERNEL, ModuleKind.ATTENTION_KERNEL_CHECKPOINT):
        return 0
    return 1 if module.kind is ModuleKind.ATTENTION_OUTPUT else 2
