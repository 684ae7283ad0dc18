"""The first forward under a checkpoint: nothing is saved for backward, but local variables reference tensors longer than needed.

With gradients modules save these tensors, so that the references make no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import ACTIVATION_OUTPUT, LAYER, OUTPUTS_OF_EXPERTS, STREAM, Module, Tensor
from analyzer.program.operations import Operation, OperationKind, Phase, Role, add_memory

WITH_VARIABLES: Final = (ModuleKind.LAYER, ModuleKind.ATTENTION, ModuleKind.FEED_FORWARD, ModuleKind.EXPERTS)
"""Kinds of modules that `LocalVariables` describes."""
FC1_OF_EXPERTS: Final = "mlp.experts.linear_fc1"
SEQUENTIAL: Final = "sequential experts"
"""Instead of a module whose output is referenced: experts run one after the other."""


class LocalVariables:
    """The operations that allocate and free what local variables of a module reference.

    - A layer: its input, the output of each separate norm until its branch has been added to the residual stream, and the residual
      stream after attention (`TransformerLayer.forward`, `_forward_attention`, `_forward_mlp`).
    - Attention: queries, keys and values, also during the output projection (`Attention.forward`), and the output gate; in latent
      attention the compressed queries. In a gated delta net also the gate and the output of the recurrence.
    - A MoE layer: the rows that its experts read (`MoELayer.forward`).
    - Grouped experts: the output of fc1 (`TEGroupedMLP.forward`).
    - Sequential experts: the outputs of the experts before the last one (`SequentialMLP.forward`).
    """

    def __init__(self, module: Module, phase: Phase, referenced: frozenset[str]) -> None:
        self._module = module
        self._phase: Phase = phase
        self._referenced = [*referenced]
        self._held: list[tuple[Tensor, ...]] = []
        self._last: Module | None = None

    def before(self, found: list[Operation], child: Module) -> frozenset[str]:
        """Adds the operations before a child of the module, and returns the modules whose outputs are referenced."""
        last, self._last = self._last, child
        kind = None if last is None else last.kind
        if self._module.kind is ModuleKind.LAYER:
            self._in_layer(found, last)
        elif child.kind is ModuleKind.KV_UP:
            self._hold(found, "", _compressed_queries(self._module))
        elif kind in _HELD_AFTER and last is not None:
            self._hold(found, "", _HELD_AFTER[kind](last))
        elif child.kind is ModuleKind.EXPERTS:
            self._hold(found, "mlp", _read(child, "mlp"))
        elif self._module.kind is ModuleKind.EXPERTS:
            self._in_experts(found, child, _outputs_of_sequential(self._module))
        return frozenset(self._referenced)

    def _in_experts(self, found: list[Operation], child: Module, outputs: tuple[Tensor, ...]) -> None:
        if outputs and child.kind is ModuleKind.FC1:
            count = child.parameters[0].pieces
            before = (replace(each, shape=(each.shape[0] * (count - 1) // count, *each.shape[1:])) for each in outputs)
            self._hold(found, SEQUENTIAL, tuple(before))
        elif outputs and child.kind is ModuleKind.FC2:
            self._release(found)
            self._referenced.append(SEQUENTIAL)
        elif not outputs and child.kind is ModuleKind.ACTIVATION:
            self._hold(found, FC1_OF_EXPERTS, _read(child, FC1_OF_EXPERTS))

    def _in_layer(self, found: list[Operation], last: Module | None) -> None:
        if last is None:
            self._hold(found, STREAM, _read(self._module, STREAM))
        elif last.kind in (ModuleKind.ATTENTION_NORM, ModuleKind.FEED_FORWARD_NORM):
            self._hold(found, last.name, last.forward_workspace[-1:])
        elif last.kind is ModuleKind.ATTENTION_ADD:
            while len(self._held) > 1:  # the output of the norm
                self._release(found)
            self._hold(found, LAYER, _read(self._module, LAYER))

    def end(self, found: list[Operation]) -> None:
        """Adds the operations after the last child."""
        while self._held:
            self._release(found)

    def _hold(self, found: list[Operation], maker: str, tensors: tuple[Tensor, ...]) -> None:
        self._referenced.append(maker or "(none)")
        self._held.append(tensors)
        add_memory(found, OperationKind.ALLOCATE, self._phase, self._module, Role.WORKSPACE, tensors)

    def _release(self, found: list[Operation]) -> None:
        self._referenced.pop()
        add_memory(found, OperationKind.FREE, self._phase, self._module, Role.WORKSPACE, self._held.pop())


def _read(module: Module, maker: str) -> tuple[Tensor, ...]:
    """The first tensor of this maker that a module or its children read; empty if there is none."""
    return next(((tensor,) for _, each in module.walk() for tensor in each.saved if tensor.made_in == maker), ())


def _compressed_queries(attention: Module) -> tuple[Tensor, ...]:
    """What the down projection of queries returns; empty if there is none."""
    down = (each for each in attention.children if each.kind is ModuleKind.Q_DOWN)
    return tuple(tensor for each in down for tensor in each.forward_workspace if tensor.name == "output")


def _outputs_of_sequential(experts: Module) -> tuple[Tensor, ...]:
    """The outputs of experts that run one after the other; empty for grouped experts."""
    return tuple(tensor for each in experts.children for tensor in each.forward_workspace if tensor.name == OUTPUTS_OF_EXPERTS)


def discarded(module: Module, referenced: frozenset[str]) -> tuple[Tensor, ...]:
    """What a module would save, without what is referenced outside. Sequential experts free it after each expert."""
    absent = module.absent_without_gradients
    kept = tuple(tensor for tensor in module.saved if tensor.made_in not in referenced and tensor.name not in absent)
    if SEQUENTIAL not in referenced:
        return kept
    if module.kind is ModuleKind.FC2:  # freed before the outputs are concatenated
        return ()
    return _of_one_expert(kept)


def _of_one_expert(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The part of one expert of tensors that each expert allocates for itself."""
    return tuple(replace(each, shape=(each.shape[0] // each.pieces, *each.shape[1:]), pieces=1) for each in tensors)


def workspace_without_gradients(module: Module, workspace: tuple[Tensor, ...], referenced: frozenset[str]) -> tuple[Tensor, ...]:
    """The workspace of a module in that forward. Sequential experts allocate the output of their activation one by one."""
    left = tuple(tensor for tensor in workspace if tensor.name not in module.absent_without_gradients)
    if SEQUENTIAL not in referenced:
        return left
    pieces = {tensor.shape[0]: tensor.pieces for tensor in module.saved}
    return _of_one_expert(
        tuple(replace(each, pieces=pieces.get(each.shape[0], 1)) if each.name == ACTIVATION_OUTPUT else each for each in left)
    )


def _read_by_kernel(kernel: Module) -> tuple[Tensor, ...]:
    """What an attention kernel reads."""
    return tuple(tensor for tensor in kernel.saved if tensor.made_in)


def _gate(product: Module) -> tuple[Tensor, ...]:
    """The gate of the output of attention."""
    return product.saved[-1:]


_HELD_AFTER: Final[dict[ModuleKind | None, Callable[[Module], tuple[Tensor, ...]]]] = {
    ModuleKind.ATTENTION_KERNEL: _read_by_kernel,
    ModuleKind.OUTPUT_GATE: _gate,
    ModuleKind.DELTA_RULE: _read_by_kernel,
    ModuleKind.GATED_NORM: _read_by_kernel,
}
"""By the kind of a part of attention: what local variables reference during the following parts."""
