"""The order in which Megatron creates the parameters of a chunk, as `named_parameters` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from analyzer.modules.creation_order import children_in_order
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Parameter


class ParameterRun(NamedTuple):
    """Parameters of one module, repeated `times` times, for example for consecutive equal layers."""

    parameters: tuple[Parameter, ...]
    times: int = 1


def has_weight_decay(parameter: Parameter, dimensions: int) -> bool:
    """Whether a parameter that the optimizer sees with this number of dimensions has weight decay.

    Biases and vectors have none, and are in a group after the others (`_get_param_groups`, core/optimizer/__init__.py).
    """
    return dimensions > 1 and parameter.name != "bias"


def parameter_runs(tree: Module) -> tuple[ParameterRun, ...]:
    """Parameters of a chunk in the order of their creation, consecutive equal layers as one run. Cached per tree."""
    return tree.derived(_runs)


def sum_of_parameters(tree: Module, value: Callable[[Parameter], int]) -> int:
    """The sum of `value` over all parameters of a chunk."""
    return sum(run.times * sum(value(parameter) for parameter in run.parameters) for run in parameter_runs(tree))


def numel_of(tree: Module) -> int:
    """Elements of all parameters of a chunk, cached per tree."""
    return tree.derived(_numel)


def trained_numel(tree: Module) -> int:
    """Elements of the parameters of a chunk that are trained, cached per tree."""
    return tree.derived(_trained_numel)


def trained_in_fp32(tree: Module) -> int:
    """Elements of trained parameters in fp32, cached per tree."""
    return tree.derived(_trained_in_fp32)


def _trained_in_fp32(tree: Module) -> int:
    return sum_of_parameters(tree, lambda each: each.numel if each.dtype == "fp32" and not each.frozen else 0)


def _trained_numel(tree: Module) -> int:
    return sum_of_parameters(tree, lambda parameter: 0 if parameter.frozen else parameter.numel)


def _numel(tree: Module) -> int:
    return sum_of_parameters(tree, lambda parameter: parameter.numel)


def _runs(tree: Module) -> tuple[ParameterRun, ...]:
    runs: list[ParameterRun] = []
    for module in _run_modules(tree):
        listed = module.derived(_creation_order) if module.kind not in _SPLIT else module.parameters
        if runs and runs[-1].parameters is listed:
            runs[-1] = runs[-1]._replace(times=runs[-1].times + 1)
        elif listed:
            runs.append(ParameterRun(listed))
    return tuple(runs)


_SPLIT = (ModuleKind.MODEL, ModuleKind.DECODER)


def _run_modules(module: Module) -> Iterator[Module]:
    """Modules with one run each. The model and the decoder are split into their children."""
    yield module
    if module.kind in _SPLIT:
        for child in sorted(module.children, key=_place_in_model):
            yield from _run_modules(child)


def _place_in_model(module: Module) -> int:
    """Parts that are created in another order than they run.

    The pooler of BERT runs before the other heads, and is created after them (`BertModel.__init__`). A vision-language model
    creates the language model, then the encoder and the projector (`LLaVAModel.__init__`, `CLIPViTModel.__init__`, and
    `MultimodalGPTModel.__init__` of mcore-bridge).
    """
    if module.kind is ModuleKind.VISION_WEIGHTS:
        return len(_IN_ENCODER) + 4
    if any(child.kind is ModuleKind.POOLER for child in module.children):
        return 1
    if module.part == "vision":
        return _IN_ENCODER.get(module.kind, 2)
    return len(_IN_ENCODER) + 3 if module.part == "projector" else 0


_IN_ENCODER: Final = {
    ModuleKind.CLASS_TOKENS: 1,
    ModuleKind.VISION_POSITIONS: 2,
    ModuleKind.PATCHES: 3,
    ModuleKind.POSITION_EMBEDDINGS: 4,
    ModuleKind.FINAL_NORM: 4,
    ModuleKind.DECODER: 5,
}
"""The order of the parts of a vision encoder. Norms are after the class tokens. That of RADIO is after its embedder."""


def _creation_order(module: Module) -> tuple[Parameter, ...]:
    return tuple(creation_order(module))


def creation_order(tree: Module) -> Iterator[Parameter]:
    """Parameters of a chunk in the order of their creation."""
    for module in modules_in_order(tree):
        yield from module.parameters


def modules_in_order(tree: Module) -> Iterator[Module]:
    """Modules of a chunk in the order in which their parameters are listed."""
    if tree.repeats:
        return
    yield tree
    for child in children_in_order(tree):
        yield from modules_in_order(child)
