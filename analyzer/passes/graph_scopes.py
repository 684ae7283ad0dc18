"""CUDA graphs as passes over the tree: the part of a chunk that graphs capture, and the part outside.

Sources: core/transformer/cuda_graphs.py `_layer_is_graphable`, core/transformer/transformer_layer.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from analyzer.modules.kinds import ATTENTION_BRANCH, FEED_FORWARD_BRANCH, ModuleKind
from analyzer.modules.tree import LAYER, STREAM, Module, Tensor, parameters
from analyzer.specs import GraphSpec, MoeSpec

FULL_ITERATION: Final = "full_iteration"
"""The scope of graphs that capture full iterations."""


class Scope(NamedTuple):
    """The part of one layer that graphs capture."""

    children: frozenset[ModuleKind]
    """Children of the layer that are captured, or partly captured."""
    parts: frozenset[ModuleKind]
    """Captured children of a MoE layer that is partly captured; empty if its children are fully captured."""

    @property
    def full(self) -> frozenset[ModuleKind]:
        """Children of the layer that are fully captured."""
        return self.children - {ModuleKind.FEED_FORWARD} if self.parts else self.children


WHOLE_LAYER: Final = Scope(ATTENTION_BRANCH | FEED_FORWARD_BRANCH, frozenset())


def layer_scope(graphs: GraphSpec, moe: MoeSpec | None, layer: Module) -> Scope:
    """The part of a layer that graphs capture; empty if there is none."""
    scope = graphs.scope
    if not scope:
        return WHOLE_LAYER
    has_experts = any(
        module.kind is ModuleKind.ROUTER
        for child in layer.children
        if child.kind is ModuleKind.FEED_FORWARD
        for module in child.children
    )
    if graphs.implementation == "local":  # `create_mcore_cudagraph_manager`: whole layers, also if one part of them is named
        return WHOLE_LAYER if "attn" in scope or ("mlp" in scope and not has_experts) else Scope(frozenset(), frozenset())
    children: frozenset[ModuleKind] = ATTENTION_BRANCH if "attn" in scope else frozenset()
    parts: frozenset[ModuleKind] = frozenset()
    if ("moe" if has_experts else "mlp") in scope:
        children |= FEED_FORWARD_BRANCH
    elif has_experts and "moe_router" in scope:
        children |= {ModuleKind.FEED_FORWARD_NORM, ModuleKind.FEED_FORWARD}
        overlapped = moe is None or moe.shared_overlap
        parts = frozenset({ModuleKind.ROUTER} if overlapped else {ModuleKind.ROUTER, ModuleKind.SHARED_EXPERTS})
    return Scope(children, parts)


def transformer_layers(tree: Module) -> list[Module]:
    """The transformer layers with attention in a tree."""
    if _is_layer(tree):
        return [tree]
    return [layer for child in tree.children for layer in transformer_layers(child)]


def captured_tree(graphs: GraphSpec, moe: MoeSpec | None, tree: Module, *, static_output: Tensor) -> Module:
    """The tree with only the tensors of captured modules.

    `static_output` is the output of a captured part that does not include the end of its layer. Otherwise the module that
    reads the layer's output saves it.
    """
    if FULL_ITERATION in graphs.scope:  # batches are static
        return replace(tree, children=tuple(child for child in tree.children if child.kind is not ModuleKind.BATCH))
    if _is_layer(tree):
        return tree.derived(_captured_layer, layer_scope(graphs, moe, tree), static_output)
    children = tuple(captured_tree(graphs, moe, child, static_output=static_output) for child in tree.children)
    return replace(without_tensors(tree), children=children)


def outside_tree(graphs: GraphSpec, moe: MoeSpec | None, tree: Module, *, hidden: Tensor, received: bool) -> Module:
    """The tree without the tensors of captured modules.

    `hidden` are the hidden states that enter the first layer, which an embedding computes or the rank has `received`.
    """
    if FULL_ITERATION in graphs.scope:
        return without_tensors(tree)
    layers = transformer_layers(tree)
    if not layers:
        return tree
    scopes = [layer_scope(graphs, moe, layer) for layer in (layers[0], layers[-1])]
    first = scopes[0].full
    ends_inside = ModuleKind.FEED_FORWARD_ADD in scopes[1].full
    # The passes below remove the input of a captured attention, and take the input of the first layer for the output of another.
    # The schedule references a received input until its backward, and the model the output of the embedding in its forward.
    removed = (hidden,) if first & {ModuleKind.ATTENTION, ModuleKind.FEED_FORWARD_ADD} else ()
    saved = removed if ModuleKind.ATTENTION not in first else ()
    if received:
        outside = _outside(graphs, moe, tree, held=(), saved=(), ends_inside=ends_inside)
        return replace(outside, saved=(*outside.saved, *(replace(tensor, made_in=STREAM) for tensor in removed)))
    return _outside(graphs, moe, tree, held=() if saved else removed, saved=saved, ends_inside=ends_inside)


def captured_modules(graphs: GraphSpec, moe: MoeSpec | None, tree: Module) -> list[Module]:
    """The captured modules of a tree, without their children."""
    if FULL_ITERATION in graphs.scope:
        return [tree]
    found: list[Module] = []
    for layer in transformer_layers(tree):
        scope = layer_scope(graphs, moe, layer)
        for child in layer.children:
            if child.kind in scope.full:
                found.append(child)
            elif child.kind in scope.children:
                found.extend(part for part in child.children if part.kind in scope.parts)
    return found


def _outside(
    graphs: GraphSpec,
    moe: MoeSpec | None,
    tree: Module,
    *,
    held: tuple[Tensor, ...],
    saved: tuple[Tensor, ...],
    ends_inside: bool,
) -> Module:
    """The part of a tree outside graphs. The output of the embedding is `held` in its forward, or `saved`."""
    if _is_layer(tree):
        scope = layer_scope(graphs, moe, tree)
        clones = graphs.implementation == "local" and bool(scope.children)
        return tree.derived(_outside_layer, scope, clones)
    children = tuple(_outside(graphs, moe, child, held=held, saved=saved, ends_inside=ends_inside) for child in tree.children)
    if tree.kind is ModuleKind.EMBEDDING:
        return replace(tree, children=children, forward_held=(*tree.forward_held, *held), saved=(*tree.saved, *saved))
    if tree.kind is ModuleKind.FINAL_NORM and ends_inside:
        return replace(tree, children=children, saved=tuple(tensor for tensor in tree.saved if tensor.made_in != STREAM))
    return replace(tree, children=children)


def without_tensors(module: Module) -> Module:
    """The module without activations. Its parameters are counted with the model states."""
    children = tuple(without_tensors(child) for child in module.children)
    cleared = replace(module, saved=(), forward_workspace=(), backward_workspace=(), recomputed_last=())
    return replace(cleared, forward_held=(), children=children)


def _is_layer(module: Module) -> bool:
    return any(child.kind is ModuleKind.ATTENTION for child in module.children)


def _captured_layer(layer: Module, scope: Scope, static_output: Tensor) -> Module:
    makers = _makers(layer)
    children = []
    for child in layer.children:
        if child.kind in scope.full:
            children.append(_without_saved(child, scope, makers, made_inside=False))
        elif child.kind in scope.children:
            parts = tuple(
                _without_saved(part, scope, makers, made_inside=False) if part.kind in scope.parts else without_tensors(part)
                for part in child.children
            )
            children.append(replace(without_tensors(child), children=parts))
        else:
            children.append(without_tensors(child))
    ends_inside = scope.children and ModuleKind.FEED_FORWARD_ADD not in scope.children
    return replace(layer, saved=(*layer.saved, static_output) if ends_inside else layer.saved, children=tuple(children))


def _outside_layer(layer: Module, scope: Scope, clones: bool) -> Module:
    """The layer outside graphs. With `clones` a replayed backward returns copies of all weight gradients."""
    makers = _makers(layer)
    children = []
    for child in layer.children:
        if child.kind in scope.full:
            children.append(without_tensors(child))
        elif child.kind in scope.children:
            parts = tuple(
                without_tensors(part) if part.kind in scope.parts else _without_saved(part, scope, makers, made_inside=True)
                for part in child.children
            )
            children.append(replace(child, children=parts))
        else:
            children.append(_without_saved(child, scope, makers, made_inside=True))
    if clones:
        gradients = tuple(
            Tensor(name=f"copy of the gradient of {each.name}", shape=each.shape, dtype=each.dtype) for each in parameters(layer)
        )
        return replace(layer, children=tuple(children), backward_workspace=(*layer.backward_workspace, *gradients))
    return replace(layer, children=tuple(children))


def _makers(layer: Module) -> dict[str, ModuleKind]:
    """The kind of the layer's child that allocates a tensor, by the tensor's `made_in`."""
    makers = {child.name: child.kind for child in layer.children if child.kind in ATTENTION_BRANCH | FEED_FORWARD_BRANCH}
    return {STREAM: ModuleKind.FEED_FORWARD_ADD, LAYER: ModuleKind.ATTENTION_ADD, **makers}


def _without_saved(module: Module, scope: Scope, makers: Mapping[str, ModuleKind], *, made_inside: bool) -> Module:
    """The module without the saved tensors that are allocated inside (`made_inside`) or outside the captured part.

    These are static tensors or in the memory pool of the graphs. Tensors of other modules are read where they are allocated.
    """

    def stays(tensor: Tensor) -> bool:
        maker = makers.get(tensor.made_in)
        return maker is None or (maker in scope.full) is not made_inside

    children = tuple(_without_saved(child, scope, makers, made_inside=made_inside) for child in module.children)
    return replace(module, saved=tuple(filter(stays, module.saved)), children=children)
