"""Layers of overlapped microbatches (`--overlap-moe-expert-parallel-comm`): what stays allocated, and what is freed earlier.

A layer starts with a detached copy of its input. The dispatcher references the probabilities of the router until its next forward,
and their autograd graph references this copy, which has the gradient of the input. The flex dispatcher references probabilities
without a graph instead. A layer runs as nodes: the rows that a node has read are freed, and the output of the shared experts stays
until their backward.

Source: core/models/gpt/fine_grained_callables.py, core/pipeline_parallel/utils.py `ScheduleNode`,
core/transformer/moe/token_dispatcher.py `dispatch_preprocess` (0.16.1).
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.kinds import MOE_LATENT_PROJECTIONS, ModuleKind
from analyzer.modules.moe.routing import (
    ARRIVED_ROWS,
    EXPERT_INPUT,
    LATENT_ROWS,
    LOCAL_ROWS,
    PERMUTED_PROBABILITIES,
    RECEIVED_ROWS,
    SENT_ROWS,
    SHARED_OUTPUT,
    is_flex,
)
from analyzer.modules.tree import STREAM, Module, Tensor


def with_nodes(layer: Module, *, frees_unsaved: bool) -> Module:
    """The layer as overlapped microbatches run it.

    `frees_unsaved`: the expert node frees the rows that it has read unless the first linear layer saves them (releases after 0.16).
    Otherwise it frees them with all dispatchers but HybridEP (`should_free_input`).
    """
    dispatch = next((module for _, module in layer.walk() if module.kind is ModuleKind.DISPATCH), None)
    if dispatch is not None and is_flex(dispatch):
        changed = _with_rows_freed(_with_detached_inputs(layer, dispatch))
        rows = {tensor.name: tensor for tensor in dispatch.forward_workspace}
        return changed if ARRIVED_ROWS in rows or frees_unsaved else _with_expert_input_kept(changed, rows[LOCAL_ROWS])
    changed = _with_rows_freed(with_referenced_input(layer))
    named = {tensor.name: tensor for tensor in dispatch.forward_workspace} if dispatch is not None else {}
    if RECEIVED_ROWS not in named or LOCAL_ROWS in named or frees_unsaved:
        return changed
    return _with_expert_input_freed(changed, named[RECEIVED_ROWS])


def _with_detached_inputs(layer: Module, dispatch: Module) -> Module:
    """The layer with what the attention node and the graphs of the dispatcher's probabilities reference.

    These are the tokens of the latent size, the weights of arrived tokens, and those of the choices of each token. With HybridEP
    these are the permuted probabilities, and the probabilities of all experts. The router has saved tokens of the hidden size.
    Graphs begin at a detached copy of the weights, which has their gradient after the backward. The handle of the dispatch is not
    in these graphs.
    """
    choices = (each for each in dispatch.referenced if each.name == "choices of arrivals")
    weights = [replace(each, name="weights of arrivals", dtype="fp32", formula="4·A·k", lingers=True) for each in choices]
    projections = (module for _, module in layer.walk() if module.kind is ModuleKind.MOE_LATENT_DOWN)
    outputs = (each for module in projections for each in module.forward_workspace if each.name == "output")
    routers = [module for _, module in layer.walk() if module.kind is ModuleKind.ROUTER]
    referenced = [each for module in (*routers, dispatch) for each in module.referenced]
    of_experts = [each for each in referenced if each.name in ("probabilities", "weights of the choices")]
    [logits] = [each for module in routers for each in module.forward_workspace if each.name == "logits"]
    # the dispatcher expands the probabilities of divided experts, and references them in fp32
    maker, same = {logits.shape: "mlp.router"}, logits.dtype == "fp32"
    read = [replace(each, dtype=logits.dtype, lingers=True, made_in=maker.get(each.shape, "")) for each in of_experts]
    added = (
        *(replace(each, name=LATENT_ROWS, formula="T·latent", made_in="mlp.fc1_latent_proj") for each in outputs),
        *weights,
        *read,
    )
    permuted = (each for each in dispatch.saved if each.name == PERMUTED_PROBABILITIES and each.lingers)
    with_gradients = (*weights, *permuted, *read)
    gradients = tuple(replace(each, name=f"gradients of {each.name}", lingers=False, made_in="") for each in with_gradients)

    def changed(module: Module) -> Module:
        left = tuple(each for each in module.referenced if not (same and each in of_experts))
        if module is dispatch:
            saved = (*(replace(each, lingers=each.lingers and not each.in_graph) for each in module.saved), *added)
            return replace(module, saved=saved, referenced=left, outlives=gradients)
        if module in routers:
            return replace(module, referenced=left)
        children = tuple(changed(child) for child in module.children)
        return replace(module, children=children) if children != module.children else module

    return changed(layer)


def _with_expert_input_kept(module: Module, rows: Tensor) -> Module:
    """The layer with the rows that HybridEP has copied for its experts, kept until their backward.

    They are added if the first linear layer does not save them. Source: `should_free_input` (0.16.1).
    """
    children = tuple(_with_expert_input_kept(child, rows) for child in module.children)
    if module.kind is not ModuleKind.EXPERTS:
        return replace(module, children=children) if children != module.children else module
    first = module.children[0]
    if any((each.shape, each.dtype) == (rows.shape, rows.dtype) for each in first.saved):
        return module
    kept = replace(rows, name=EXPERT_INPUT, made_in="mlp")
    inside = (replace(first, saved=(*first.saved, kept)), *module.children[1:])
    return replace(module, children=tuple(_without(EXPERT_INPUT, child) for child in inside))


def _without(name: str, module: Module) -> Module:
    return replace(module, forward_workspace=tuple(tensor for tensor in module.forward_workspace if tensor.name != name))


def _with_expert_input_freed(module: Module, received: Tensor) -> Module:
    """The layer without the received rows after its experts have run. One expert needs no sorted copy and reads these rows.

    The node frees their storage, although the first linear layer has saved them for backward.
    """
    children = tuple(_with_expert_input_freed(child, received) for child in module.children)
    if module.kind is not ModuleKind.EXPERTS:
        return replace(module, children=children) if children != module.children else module
    first = module.children[0]
    freed = tuple(each for each in first.saved if (each.shape, each.dtype) == (received.shape, received.dtype))
    if not freed:
        return module
    kept = replace(first, saved=tuple(each for each in first.saved if each not in freed))
    rows = tuple(replace(each, name=RECEIVED_ROWS, made_in="") for each in freed)
    inside = (replace(child, forward_workspace=(*rows, *child.forward_workspace)) for child in (kept, *module.children[1:]))
    return replace(module, children=tuple(inside))


def with_referenced_states(depth: Module) -> Module:
    """An MTP layer whose transformer layer has been through `with_nodes`: its attention node starts with the states before it."""
    read = [tensor for child in depth.children for tensor in child.saved if tensor.made_in.endswith("final_layernorm")]
    if not read or not any(tensor.lingers for _, child in depth.walk() for tensor in child.saved if tensor.made_in == STREAM):
        return depth
    children = tuple(
        _with_lingering(child, read[0]) if child.kind is not ModuleKind.LAYER else _without_lingering_input(child)
        for child in depth.children
    )
    return replace(depth, children=children)


def without_skipped_norm(tree: Module) -> Module:
    """A chunk whose final norm does not run if the last layer is dense: only the combine node of a MoE layer calls it.

    Source: `submodule_combine_forward` and `mlp_wrapper`, 0.16 to 0.19. `PostProcessNode` calls it for a chunk without layers.
    """
    layers = [module for _, module in tree.walk() if module.kind is ModuleKind.LAYER]
    if not layers or any(module.kind is ModuleKind.EXPERTS for _, module in layers[-1].walk()):
        return tree

    def visit(module: Module) -> Module:
        if module.kind is ModuleKind.FINAL_NORM:
            return replace(module, saved=(), forward_workspace=(), backward_workspace=())
        if module.kind is ModuleKind.OUTPUT_LAYER:
            return replace(module, saved=tuple(replace(each, made_in=STREAM) for each in module.saved))
        if module.kind is ModuleKind.LAYER or not module.children:
            return module
        return replace(module, children=tuple(visit(child) for child in module.children))

    return visit(tree)


def _without_lingering_input(module: Module) -> Module:
    saved = tuple(replace(each, lingers=False) if each.made_in == STREAM else each for each in module.saved)
    return replace(module, saved=saved, children=tuple(_without_lingering_input(child) for child in module.children))


def _with_rows_freed(module: Module) -> Module:
    """The modules of a MoE layer without the rows that were sent, after the dispatch, and tokens that the attention node has."""
    children = tuple(_with_rows_freed(child) for child in module.children)
    if module.kind in (ModuleKind.EXPERTS, ModuleKind.COMBINE, *MOE_LATENT_PROJECTIONS):
        kept = tuple(tensor for tensor in module.forward_workspace if tensor.name not in (SENT_ROWS, SHARED_OUTPUT, LATENT_ROWS))
        return replace(module, forward_workspace=kept, children=children)
    if module.kind is ModuleKind.DISPATCH:
        kept = tuple(tensor for tensor in module.forward_workspace if tensor.name not in (SHARED_OUTPUT, LATENT_ROWS))
        return replace(module, forward_workspace=kept, children=children)
    if module.kind is ModuleKind.SHARED_EXPERTS and module.saved:
        maker = "mlp.shared_experts" if module.parameters else "mlp.shared_experts.linear_fc2"  # a gate multiplies the output
        output = replace(module.saved[0], name=SHARED_OUTPUT, shares="", made_in=maker)
        return replace(module, saved=(*module.saved, output), children=children)
    return replace(module, children=children) if children != module.children else module


def with_referenced_input(layer: Module) -> Module:
    """The layer, with its input and the gradient of its input allocated until its next forward if it has a router."""
    inputs = [tensor for _, module in layer.walk() for tensor in module.saved if tensor.made_in == STREAM and tensor.bytes]
    if not inputs or not any(module.kind is ModuleKind.ROUTER for _, module in layer.walk()):
        return layer
    gradient = replace(inputs[0], name="input gradient", made_in="")
    return replace(_with_lingering(layer, inputs[0]), outlives=(*layer.outlives, gradient))


def _with_lingering(module: Module, tensor: Tensor) -> Module:
    saved = tuple(replace(each, lingers=True) if each is tensor else each for each in module.saved)
    return replace(module, saved=saved, children=tuple(_with_lingering(child, tensor) for child in module.children))
