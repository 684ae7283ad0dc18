"""CUDA graphs as passes over the tree: the part of a chunk that graphs capture, and the part outside.

The input of a layer is the output of the one before it. Without static inputs the passes take the input of the first layer for the
output of the last one.

Sources: core/transformer/cuda_graphs.py `_layer_is_graphable`, core/transformer/transformer_layer.py, core/ssm/mamba_layer.py
(0.16.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from analyzer.modules.kinds import ATTENTION_BRANCH, FEED_FORWARD_BRANCH, RESIDUAL_ADDS, ModuleKind
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


_BRANCHES: Final = frozenset({ModuleKind.ATTENTION, ModuleKind.MIXER, ModuleKind.FEED_FORWARD})
WHOLE_LAYER: Final = Scope(ATTENTION_BRANCH | FEED_FORWARD_BRANCH, frozenset())
NOTHING: Final = Scope(frozenset(), frozenset())


class Placed(NamedTuple):
    """The part of a layer that graphs capture, and what it exchanges with other layers."""

    scope: Scope
    entered: bool
    """Its input is made in a graph."""
    hands_on: bool
    """Its captured part makes an output that no captured module saves."""
    static_gradient: bool = False
    """Its part outside graphs gets the gradient of its output from a graph."""
    first_backward: bool = False
    """Its backward is captured first. The gradient of its output is a static tensor, as in all of them; while others are captured,
    the gradient that the one before has returned exists too."""
    follows: bool = False
    """Its backward is captured after another one, and the capture references the output of the last forward."""


def layer_scope(graphs: GraphSpec, moe: MoeSpec | None, layer: Module) -> Scope:
    """The part of a layer that graphs capture; empty if there is none."""
    scope = graphs.scope
    if not scope:
        return WHOLE_LAYER
    branches = {child.kind for child in layer.children}
    if ModuleKind.MIXER in branches:
        return WHOLE_LAYER if "mamba" in scope else NOTHING
    captures_attention = "attn" in scope and ModuleKind.ATTENTION in branches
    has_experts = any(
        module.kind is ModuleKind.ROUTER
        for child in layer.children
        if child.kind is ModuleKind.FEED_FORWARD
        for module in child.children
    )
    if graphs.implementation == "local":  # `create_mcore_cudagraph_manager`: whole layers, also if one part of them is named
        return WHOLE_LAYER if captures_attention or ("mlp" in scope and not has_experts) else NOTHING
    children: frozenset[ModuleKind] = ATTENTION_BRANCH if captures_attention else frozenset()
    parts: frozenset[ModuleKind] = frozenset()
    if ModuleKind.FEED_FORWARD not in branches:
        return Scope(children, parts)
    if ("moe" if has_experts else "mlp") in scope:
        children |= FEED_FORWARD_BRANCH
    elif has_experts and "moe_router" in scope:
        children |= {ModuleKind.FEED_FORWARD_NORM, ModuleKind.FEED_FORWARD}
        overlapped = moe is None or moe.shared_overlap
        parts = frozenset({ModuleKind.ROUTER} if overlapped else {ModuleKind.ROUTER, ModuleKind.SHARED_EXPERTS})
    return Scope(children, parts)


def graphable_layers(tree: Module) -> list[Module]:
    """The transformer and Mamba layers in a tree."""
    if _is_layer(tree):
        return [tree]
    return [layer for child in tree.children for layer in graphable_layers(child)]


def enters_inside(scope: Scope, layer: Module) -> bool:
    """Whether the first branch of a layer is captured."""
    return next(child.kind for child in layer.children if child.kind in _BRANCHES) in scope.full


def _ends_inside(scope: Scope, layer: Module) -> bool:
    """Whether the last sum of a layer is captured."""
    return next(child.kind for child in reversed(layer.children) if child.kind in RESIDUAL_ADDS) in scope.full


def _placed(graphs: GraphSpec, moe: MoeSpec | None, tree: Module) -> list[Placed]:
    """What is captured of each layer of a tree."""
    layers = graphable_layers(tree)
    scopes = [layer_scope(graphs, moe, layer) for layer in layers]
    ends = [_ends_inside(*each) for each in zip(scopes, layers, strict=True)]
    saved = [enters_inside(*each) for each in zip(scopes, layers, strict=True)]
    return [
        Placed(
            scope,
            entered=ends[index - 1],
            hands_on=bool(scope.children) and not (ends[index] and saved[(index + 1) % len(layers)]),
            static_gradient=ends[index] or saved[index + 1 : index + 2] == [True],
        )
        for index, scope in enumerate(scopes)
    ]


def captured_tree(graphs: GraphSpec, moe: MoeSpec | None, tree: Module, *, static_output: Tensor, alone: bool) -> Module:
    """The tree with only the tensors of captured modules.

    `static_output` is the output of a captured part. `alone`: the graphs are those of one microbatch.
    """
    if FULL_ITERATION in graphs.scope:  # batches are static
        return replace(tree, children=tuple(child for child in tree.children if child.kind is not ModuleKind.BATCH))
    placed = _placed(graphs, moe, tree)
    if graphs.implementation == "transformer_engine":
        placed = _with_static_inputs(placed, alone=alone)
    left = iter(placed)

    def captured(module: Module) -> Module:
        if _is_layer(module):
            return module.derived(_captured_layer, next(left), static_output)
        return replace(without_tensors(module), children=tuple(map(captured, module.children)))

    return captured(tree)


def _with_static_inputs(placed: list[Placed], *, alone: bool) -> list[Placed]:
    """The layers if each has a static input that is not in the pool, and all outputs are in it (`make_graphed_callables`).

    A captured router returns also the input of its norm, so that the backward adds two gradients. If that is the static input, no
    other hidden state is returned.
    """
    last = max((index for index, each in enumerate(placed) if each.scope.children), default=-1) if alone else -1
    return [
        each._replace(
            entered=False,
            hands_on=bool(each.scope.children) and (not each.scope.parts or ModuleKind.ATTENTION in each.scope.full),
            first_backward=index == last and not each.scope.parts,
            follows=bool(each.scope.children) and index < last,
        )
        for index, each in enumerate(placed)
    ]


def outside_tree(graphs: GraphSpec, moe: MoeSpec | None, tree: Module, *, hidden: Tensor, received: bool) -> Module:
    """The tree without the tensors of captured modules.

    `hidden` are the hidden states that enter the first layer, which an embedding computes or the rank has `received`.
    """
    if FULL_ITERATION in graphs.scope:
        return without_tensors(tree)
    placed = _placed(graphs, moe, tree)
    if not placed:
        return tree
    ends_inside = placed[0].entered
    placed[0] = placed[0]._replace(entered=False)
    # The first layer does not save an input that is copied. The schedule references a received one until its backward, and the
    # model the output of the embedding in its forward.
    copied = (hidden,) if enters_inside(placed[0].scope, graphable_layers(tree)[0]) else ()
    outside = _outside(graphs, tree, placed, hidden, held=() if received else copied, ends_inside=ends_inside)
    if received:
        return replace(outside, saved=(*outside.saved, *(replace(tensor, made_in=STREAM) for tensor in copied)))
    return outside


def captured_modules(graphs: GraphSpec, moe: MoeSpec | None, tree: Module) -> list[Module]:
    """The captured modules of a tree, without their children."""
    if FULL_ITERATION in graphs.scope:
        return [tree]
    found: list[Module] = []
    for layer in graphable_layers(tree):
        scope = layer_scope(graphs, moe, layer)
        for child in layer.children:
            if child.kind in scope.full:
                found.append(child)
            elif child.kind in scope.children:
                found.extend(part for part in child.children if part.kind in scope.parts)
    return found


def _outside(
    graphs: GraphSpec,
    tree: Module,
    placed: list[Placed],
    hidden: Tensor,
    *,
    held: tuple[Tensor, ...],
    ends_inside: bool,
) -> Module:
    """The part of a tree outside graphs. `hidden`: the input of a branch; `held`: what the forward of the embedding keeps."""
    left = iter(placed)

    def outside(module: Module) -> Module:
        if _is_layer(module):
            of_layer = next(left)
            clones = graphs.implementation == "local" and bool(of_layer.scope.children)
            return module.derived(_outside_layer, of_layer, clones, hidden)
        children = tuple(map(outside, module.children))
        if module.kind is ModuleKind.EMBEDDING:
            return replace(module, children=children, forward_held=(*module.forward_held, *held))
        if module.kind is ModuleKind.FINAL_NORM and ends_inside:
            return replace(module, children=children, saved=tuple(each for each in module.saved if each.made_in != STREAM))
        return replace(module, children=children)

    return outside(tree)


def without_tensors(module: Module) -> Module:
    """The module without activations. Its parameters are counted with the model states."""
    children = tuple(without_tensors(child) for child in module.children)
    cleared = replace(module, saved=(), forward_workspace=(), backward_workspace=(), recomputed_last=())
    return replace(cleared, forward_held=(), children=children)


def _is_layer(module: Module) -> bool:
    return any(child.kind in _BRANCHES for child in module.children)


def _captured_layer(layer: Module, placed: Placed, static_output: Tensor) -> Module:
    scope, inside = placed.scope, _made_inside(layer, placed)
    children = []
    for child in layer.children:
        if child.kind in scope.full:
            children.append(_without_saved(child, inside, made_inside=False))
        elif child.kind in scope.children:
            parts = tuple(
                _without_saved(part, inside, made_inside=False) if part.kind in scope.parts else without_tensors(part)
                for part in child.children
            )
            children.append(replace(without_tensors(child), children=parts))
        else:
            children.append(without_tensors(child))
    gradients = () if placed.first_backward else layer.backward_workspace
    return replace(
        layer,
        saved=(*layer.saved, static_output) if placed.hands_on else layer.saved,
        backward_workspace=(*gradients, static_output) if placed.follows else gradients,
        children=tuple(children),
    )


def _outside_layer(layer: Module, placed: Placed, clones: bool, hidden: Tensor) -> Module:
    """The layer outside graphs. With `clones` a replayed backward returns copies of all weight gradients.

    `hidden`: what attention outside graphs returns, which the forward of the layer references while its experts run. The captured
    router reads a copy (`TransformerLayer._te_cuda_graph_replay`).
    """
    scope, inside = placed.scope, _made_inside(layer, placed)
    children = []
    for child in layer.children:
        if child.kind in scope.full:
            children.append(without_tensors(child))
        elif child.kind in scope.children:
            parts = tuple(
                without_tensors(part) if part.kind in scope.parts else _without_saved(part, inside, made_inside=True)
                for part in child.children
            )
            held = () if ModuleKind.ATTENTION in scope.full else (hidden,)
            again = child.forward_workspace if child.recompute_workspace is None else child.recompute_workspace
            workspace = (*held, *child.forward_workspace)
            children.append(replace(child, children=parts, forward_workspace=workspace, recompute_workspace=again))
        else:
            children.append(_without_saved(child, inside, made_inside=True))
    kept = () if placed.static_gradient else layer.backward_workspace
    if clones:
        gradients = tuple(
            Tensor(name=f"copy of the gradient of {each.name}", shape=each.shape, dtype=each.dtype) for each in parameters(layer)
        )
        kept = (*kept, *gradients)
    return replace(layer, children=tuple(children), backward_workspace=kept)


def _made_inside(layer: Module, placed: Placed) -> dict[str, bool]:
    """For tensors with this `made_in` whether they are allocated in a captured part."""
    full = placed.scope.full
    branches = {child.name: child.kind in full for child in layer.children if child.kind in ATTENTION_BRANCH | FEED_FORWARD_BRANCH}
    return {STREAM: placed.entered, LAYER: ModuleKind.ATTENTION_ADD in full, **branches}


def _without_saved(module: Module, inside: Mapping[str, bool], *, made_inside: bool) -> Module:
    """The module without the saved tensors that are allocated inside (`made_inside`) or outside the captured part.

    These are static tensors or in the memory pool of the graphs. Tensors of other modules are read where they are allocated.
    """
    children = tuple(_without_saved(child, inside, made_inside=made_inside) for child in module.children)
    saved = tuple(each for each in module.saved if inside.get(each.made_in, not made_inside) is not made_inside)
    return replace(module, saved=saved, children=children)
