"""Modules whose weights are frozen: parameters without gradients, and only those tensors that the gradient of the input needs.

A weight without a gradient has no buffer and no optimizer states. A linear layer does not save its input, and does not gather it
again in backward. Formulas mark what is for the weights only (`Tensor.for_weight`, `Collective.for_weight`). A module whose input
needs no gradient either has no backward, and autograd saves nothing.

Sources: transformer_engine/pytorch/module/{linear,layernorm_linear}.py (2.11): `backward_needs_input` and
`backward_input_needs_gather`; `freeze` of core/models/multimodal/llava_model.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.quantized import is_of_columns
from analyzer.modules.tree import Module, Tensor


def frozen(module: Module, *, input_gradient: bool = True) -> Module:
    """The module with frozen weights, one object for each object. `input_gradient`: its input needs a gradient."""
    return module.derived(_frozen if input_gradient else _without_backward)


def without_input_gradient(module: Module) -> Module:
    """A linear layer that is trained, and whose input comes from a frozen part: it computes the gradients of its weights only.

    A layer with a fused norm also computes that of its input, because the weights of the norm need it.
    """
    return replace(
        module,
        backward_workspace=tuple(each for each in module.backward_workspace if not each.name.endswith("input gradient")),
        collectives=tuple(each for each in module.collectives if each.phase == "forward" or each.for_weight),
        input_gradient=False,
    )


def _frozen(module: Module) -> Module:
    return with_owners(without_weight_gradients(module), module)


def with_owners(kept: Module, trained: Module) -> Module:
    """`kept`, in which tensors that a dropped tensor of `trained` stored are stored in the first of them that is left."""
    dropped = {each.name for each in _saved(trained) if not each.shares}
    left = {each.name for each in _saved(kept)}
    for name in sorted(dropped - left):
        kept = _owning(kept, name, [False])
    return kept


def _saved(module: Module) -> Iterator[Tensor]:
    return chain(module.saved, *(_saved(child) for child in module.children))


def _owning(module: Module, name: str, done: list[bool]) -> Module:
    """The module, of whose saved tensors that share the storage of `name` the first one is the owner."""
    saved = []
    for each in module.saved:
        first = each.shares == name and not done[0]
        done[0] = done[0] or first
        saved.append(replace(each, shares="", name=name) if first else each)
    children = tuple(_owning(child, name, done) for child in module.children)
    return replace(module, saved=tuple(saved), children=children) if done[0] else module


def without_weight_gradients(module: Module) -> Module:
    """The module without what only gradients of its weights need, before `with_owners`.

    In forward, a saved tensor that backward does not need exists until the module has run.

    `GPTModel.forward` references the input of the output layer until it returns.
    """
    if module.kind is ModuleKind.EXPERTS:
        return _frozen_experts(module)
    return replace(
        without_own_weight_gradients(module),
        parameters=tuple(replace(each, frozen=True) for each in module.parameters),
        children=tuple(without_weight_gradients(child) for child in module.children),
    )


def without_own_weight_gradients(module: Module) -> Module:
    """The same without a change of its children and of its parameters."""
    read = _read_for_weights(module)
    held = module.kind is ModuleKind.OUTPUT_LAYER
    return replace(
        module,
        saved=_not_for_weight(module.saved),
        forward_workspace=module.forward_workspace if held else (*module.forward_workspace, *read),
        forward_held=(*module.forward_held, *read) if held else module.forward_held,
        backward_workspace=_not_for_weight(module.backward_workspace),
        waiting=(),
        frozen=True,
        collectives=tuple(each for each in module.collectives if not each.for_weight),
    )


def _frozen_experts(module: Module) -> Module:
    """A local variable of the layer references the rows that fc1 reads (`routing.dispatched_rows`)."""
    first, *others = module.children
    return replace(
        module,
        parameters=tuple(replace(each, frozen=True) for each in module.parameters),
        frozen=True,
        children=(
            replace(without_weight_gradients(first), forward_workspace=first.forward_workspace),
            *(without_weight_gradients(each) for each in others),
        ),
    )


def _read_for_weights(module: Module) -> tuple[Tensor, ...]:
    """What the forward reads. Column-wise quantized copies are not made."""
    return tuple(each for each in module.saved if each.for_weight and not each.shares and not is_of_columns(each))


def _not_for_weight(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each for each in tensors if not each.for_weight)


def _without_backward(module: Module) -> Module:
    """The forward is that under a checkpoint: what a backward would read is freed when nothing references it."""
    children = tuple(_without_backward(child) for child in module.children)
    leaf = not children
    return replace(
        module,
        parameters=tuple(replace(each, frozen=True) for each in module.parameters),
        saved=() if leaf or module.recomputed else module.saved,
        forward_workspace=(*module.forward_workspace, *module.saved) if leaf else module.forward_workspace,
        backward_workspace=(),
        waiting=(),
        outlives=(),
        recomputed_last=(),
        collectives=tuple(each for each in module.collectives if each.phase == "forward"),
        children=children,
        recomputed=bool(children),
        frozen=True,
        differentiable=False,
    )
