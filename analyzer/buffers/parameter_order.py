"""The order in which Megatron creates the parameters of a chunk, as `named_parameters` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module, Parameter


class ParameterRun(NamedTuple):
    """Parameters of one module, repeated `times` times, for example for consecutive equal layers."""

    parameters: tuple[Parameter, ...]
    times: int = 1


def parameter_runs(tree: Module) -> tuple[ParameterRun, ...]:
    """Parameters of a chunk in the order of their creation, consecutive equal layers as one run. Cached per tree."""
    return tree.derived(_runs)


def sum_of_parameters(tree: Module, value: Callable[[Parameter], int]) -> int:
    """The sum of `value` over all parameters of a chunk."""
    return sum(run.times * sum(value(parameter) for parameter in run.parameters) for run in parameter_runs(tree))


def numel_of(tree: Module) -> int:
    """Elements of all parameters of a chunk, cached per tree."""
    return tree.derived(_numel)


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
        for child in module.children:
            yield from _run_modules(child)


def _creation_order(module: Module) -> tuple[Parameter, ...]:
    return tuple(creation_order(module))


def creation_order(tree: Module) -> Iterator[Parameter]:
    """Parameters of a chunk in the order of their creation."""
    for module in modules_in_order(tree):
        yield from module.parameters


def modules_in_order(tree: Module) -> Iterator[Module]:
    """Modules of a chunk in the order in which their parameters are listed.

    This is the order of the tree, except for attention, which creates its kernel (with its sinks) and its output projection
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
