"""Layers of overlapped microbatches (`--overlap-moe-expert-parallel-comm`): what stays allocated after their backward.

A layer starts with a detached copy of its input. The dispatcher references the probabilities of the router until its next forward,
and their autograd graph references this copy, which has the gradient of the input.

Source: core/pipeline_parallel/utils.py `ScheduleNode`, core/transformer/moe/token_dispatcher.py `dispatch_preprocess` (0.16.1).
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import STREAM, Module, Tensor


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
