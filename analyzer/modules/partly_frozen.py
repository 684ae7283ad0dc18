"""The modules of a GPT of which some parameters are frozen.

A linear layer computes no weight gradient, and does not save its input, if its weight is frozen. A frozen weight of a norm changes
no tensor of a backward: its gradient is computed with that of the input, and dropped. The backward reaches the output of the
embedding in any case, for which ms-swift requests a gradient.

Source: transformer_engine/pytorch/module/{linear,layernorm_linear,grouped_linear}.py (2.11); `GPTModel._preprocess` of
mcore-bridge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from analyzer.modules.creation_order import children_in_order
from analyzer.modules.freezing import frozen, with_owners, without_own_weight_gradients
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.models.mtp import MTP_HEAD
from analyzer.modules.models.parts import Parts, Stack
from analyzer.modules.tree import Module, Parameter
from analyzer.specs import ModelSpec

EMBEDDING: Final = "embedding.word_embeddings.weight"
OUTPUT_WEIGHT: Final = "output_layer.weight"
_DECAY: Final = "A_log"
"""The parameter of a gated delta net whose gradient needs what its inputs save for weights."""
_EXPERTS: Final = ".mlp.experts.linear_fc1.weight0"


def with_frozen_parameters(parts: Parts, model: ModelSpec, *, of_frozen_experts: Parts) -> Parts:
    """The modules of a chunk. `of_frozen_experts`: the same modules, if no layer of experts saved the rows that it reads."""
    spec, tied = model.frozen_parameters, model.tied_embeddings
    assert spec is not None, "the model has frozen parameters"
    names = spec.frozen([*_parameters(parts)])
    if not names:
        return parts
    frozen_head = OUTPUT_WEIGHT in names or (tied and EMBEDDING in names)
    found: list[Module | Stack] = []
    for part, other in zip(parts, of_frozen_experts, strict=True):
        if isinstance(part, Stack):
            assert isinstance(other, Stack), "both have the same modules"
            found.append(part._replace(modules=tuple(_runs(part, other, names))))
        elif part.kind is ModuleKind.EMBEDDING and EMBEDDING in names:
            found.append(frozen(part, input_gradient=False))
        elif frozen_head and (part.kind is ModuleKind.OUTPUT_LAYER or part.name == MTP_HEAD):
            found.append(frozen(part))
        else:
            assert isinstance(other, Module), "both have the same modules"
            inside = _inside(names, part.name)
            found.append(_partly(_chosen(part, other, inside), inside))
    return tuple(found)


def _runs(stack: Stack, of_frozen_experts: Stack, names: frozenset[str]) -> Iterator[tuple[Module, int]]:
    """The modules of a block. Layers of which the same parameters are frozen stay one object."""
    layer = 0
    for (module, times), (other, _) in zip(stack.modules, of_frozen_experts.modules, strict=True):
        layers = _layers(module)
        for _ in range(times):
            if layers:
                of_layers = (_inside(names, f"{stack.name}.layers.{layer + each}", f"{each}.") for each in range(layers))
                inside = frozenset().union(*of_layers)
                yield _chosen(module, other, inside).derived(_partly, inside), 1
            else:
                yield _partly(module, _inside(names, f"{stack.name}.{module.name}")), 1
            layer += layers


def _chosen(module: Module, of_frozen_experts: Module, names: frozenset[str]) -> Module:
    """The module whose experts save the rows that they read only if their weights are trained."""
    return of_frozen_experts if any(name.endswith(_EXPERTS) for name in names) else module


def _layers(module: Module) -> int:
    """Layers in a module of a block: one, those of a checkpoint, or none."""
    if module.kind is ModuleKind.CHECKPOINT:
        return len(module.children)
    return int(module.kind is ModuleKind.LAYER)


def _inside(names: frozenset[str], path: str, number: str = "") -> frozenset[str]:
    """The names relative to a module; with `number` before them, that of a layer in its checkpoint."""
    return frozenset(f"{number}{name[len(path) + 1 :]}" for name in names if name.startswith(f"{path}."))


def _partly(module: Module, names: frozenset[str]) -> Module:
    """The module with frozen parameters. `names`: relative to it."""
    return with_owners(_frozen_in(module, names, ""), module) if names else module


def _frozen_in(module: Module, names: frozenset[str], path: str) -> Module:
    numbered = module.kind is ModuleKind.CHECKPOINT and not path  # of layers of a block; that of an MTP layer has its modules
    if module.kind is ModuleKind.LAYER and not path:
        path = "0."
    fixed = {each.name for each in module.parameters if names.issuperset(f"{path}{name}" for name, _ in _pieces(each))}
    children = tuple(
        _frozen_in(child, names, f"{number}." if numbered else path if child.function else f"{path}{child.name}.")
        for number, child in enumerate(module.children)
    )
    made = without_own_weight_gradients(module) if "weight" in fixed else module
    if _DECAY in fixed:
        children = tuple(
            without_own_weight_gradients(each) if each.kind is ModuleKind.DELTA_RULE_INPUTS else each for each in children
        )
    if module.kind is ModuleKind.EXPERTS and children[0].frozen:  # a local variable references the rows that fc1 reads
        children = (replace(children[0], forward_workspace=module.children[0].forward_workspace), *children[1:])
    own = tuple(replace(each, frozen=True) if each.name in fixed else each for each in module.parameters)
    return replace(made, parameters=own, children=children)


def _pieces(parameter: Parameter) -> tuple[tuple[str, int], ...]:
    """Names of a parameter, one for each expert, and their numbers of elements."""
    if parameter.sharding != "expert":
        return ((parameter.name, parameter.numel),)
    return tuple((f"{parameter.name}{each}", parameter.numel // parameter.pieces) for each in range(parameter.pieces))


def _parameters(parts: Parts) -> Iterator[tuple[str, int]]:
    """The parameters of a chunk in the order of their creation, by their names in Megatron, with their numbers of elements."""
    for part in parts:
        if not isinstance(part, Stack):
            yield from _named(part, f"{part.name}.")
            continue
        layer = 0
        for module, times in part.modules:
            for _ in range(times):
                if _layers(module):
                    for each in module.children if module.kind is ModuleKind.CHECKPOINT else (module,):
                        yield from _named(each, f"{part.name}.layers.{layer}.")
                        layer += 1
                else:
                    yield from _named(module, f"{part.name}.{module.name}.")


def _named(module: Module, path: str) -> Iterator[tuple[str, int]]:
    for each in module.parameters:
        yield from ((f"{path}{name}", numel) for name, numel in _pieces(each))
    for child in children_in_order(module):
        yield from _named(child, path if child.function else f"{path}{child.name}.")
