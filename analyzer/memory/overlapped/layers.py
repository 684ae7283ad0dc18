"""The parts of a layer that run as one node while microbatches overlap, and what is passed between them.

A MoE layer has four nodes: attention, with the norm, the router, the shared experts and the projection to the latent size after it;
dispatch; experts; combine, with the projection back, the residual add, and the final norm after the last layer. Attention and FFN
are the nodes of a dense layer. An MTP layer begins with its projections and ends with its norm.

Source: core/models/gpt/fine_grained_callables.py, core/pipeline_parallel/utils.py `ScheduleNode` (0.16.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from typing import Final, NamedTuple

from analyzer.memory.block_memory import Instant, block_memory, explained
from analyzer.modules.kinds import ATTENTION_BRANCH, ModuleKind
from analyzer.modules.moe.routing import (
    ARRIVED_ROWS,
    LATENT_ROWS,
    LOCAL_ROWS,
    RECEIVED_ROWS,
    ROW_GRADIENTS,
    ROW_ID_MAP,
    SENT_ROWS,
    SHARED_GRADIENT,
    SHARED_OUTPUT,
    is_flex,
)
from analyzer.modules.tree import LAYER, OUTPUT_GRADIENT, STREAM, Module, Tensor
from analyzer.passes.delayed_weight_gradients import operands_of_experts
from analyzer.program.chunks import chunk_program

_LAYER_KINDS = (ModuleKind.LAYER, ModuleKind.CHECKPOINT, ModuleKind.MTP)
"""Kinds of blocks that are overlapped with a block of the other microbatch."""


class Node(Enum):
    """A part of a layer that runs at once."""

    ATTENTION = auto()
    DISPATCH = auto()
    EXPERTS = auto()
    COMBINE = auto()
    WEIGHT_GRADIENTS = auto()
    """Delayed gradients of the routed experts. Those of attention and of shared experts are the end of the attention node."""


_NODES: Final = {
    ModuleKind.ROUTER: Node.ATTENTION,
    ModuleKind.SHARED_EXPERTS: Node.ATTENTION,
    ModuleKind.DISPATCH: Node.DISPATCH,
    ModuleKind.EXPERTS: Node.EXPERTS,
    ModuleKind.COMBINE: Node.COMBINE,
    ModuleKind.MOE_LATENT_UP: Node.COMBINE,
}
"""For each kind of module in a MoE layer, its node."""


class Placed(NamedTuple):
    """An instant of a unit."""

    block: Module
    parent: str
    instant: Instant
    saved: int
    """Bytes saved by the microbatch at that instant."""
    frame: tuple[Tensor, ...]
    """Tensors of earlier blocks that local variables reference in forward."""
    layer: int
    """Index of the layer in its chunk."""
    before_norm: bool = False
    """It is in the attention branch: in backward, the branch after it has run."""
    after_router: bool = False
    """It is not in the attention branch, and in backward the router has run."""
    gradient: tuple[int, ...] = ()
    """In a backward, shape of the gradient of the experts' output if it is allocated."""


@dataclass(frozen=True)
class Unit:
    """A layer, or all blocks before the layers, or all blocks after them."""

    modules: tuple[tuple[Module, str], ...]
    """Blocks, each with the path of its parent."""
    before: int
    """Bytes that earlier units save."""
    number: int = 0
    """Index of the layer in its chunk."""

    @cached_property
    def after(self) -> int:
        """Bytes that this unit and earlier units save."""
        return self.before + sum(module.retained_bytes for module, _ in self.modules)

    @property
    def frame(self) -> tuple[Tensor, ...]:
        """The tensors that it leaves in local variables; the state of a chunk references them until its backward ends."""
        return tuple(tensor for module, _ in self.modules for tensor in block_memory(module).frame)

    @cached_property
    def _inside(self) -> tuple[Module, ...]:
        return tuple(child for module, _ in self.modules for _, child in module.walk())

    @cached_property
    def _is_moe(self) -> bool:
        return any(child.kind is ModuleKind.EXPERTS for child in self._inside)

    @cached_property
    def input_gradient(self) -> tuple[Tensor, ...]:
        """The gradient of its input: [s, b, h]."""
        found = (tensor for child in self._inside for tensor in child.saved + child.offloaded if tensor.made_in == STREAM)
        for tensor in found:
            return (replace(tensor, name="gradient of the layer's input", made_in="", shares="", lingers=False),)
        return ()

    @property
    def gradient(self) -> tuple[Tensor, ...]:
        """The gradient of its output; empty if its backward counts it."""
        return () if any(child.kind is ModuleKind.MTP for child in self._inside) else self.input_gradient

    @property
    def left(self) -> tuple[Tensor, ...]:
        """What its dispatcher references after its backward: its input, and the gradient of its input."""
        large = (tensor for child in self._inside for tensor in child.saved if tensor.lingers and len(tensor.shape) > 2)
        lingering = (tensor for tensor in large if tensor.made_in)
        outlives = (tensor for child in self._inside if child.kind is ModuleKind.LAYER for tensor in child.outlives)
        return (*(replace(tensor, lingers=False) for tensor in lingering), *outlives)

    @property
    def residual_gradient(self) -> tuple[Tensor, ...]:
        """Gradients of what the last node reads from the attention node."""
        if not self._is_moe:
            return ()
        shared = sum(child.kind is ModuleKind.SHARED_EXPERTS for child in self._inside)
        # the output of an MTP layer is concatenated with its input, whose gradient then exists
        predicts = any(child.kind is ModuleKind.MTP for child in self._inside)
        return self.input_gradient * (1 + shared + predicts)

    @property
    def recomputed(self) -> tuple[Tensor, ...]:
        """The output of the norm if it is recomputed: from the backward of the last node until that of the attention node."""
        branches = (child for child in self._inside if child.kind is ModuleKind.FEED_FORWARD and self._is_moe)
        return tuple(tensor for child in branches for tensor in child.backward_workspace)

    @property
    def uncounted_gradients(self) -> tuple[Tensor, ...]:
        """The same without that of the residual stream and, if its modules count it, that of the output of the shared experts."""
        workspaces = (tensor for child in self._inside if child.kind is ModuleKind.EXPERTS for tensor in child.backward_workspace)
        counted = any(tensor.name == SHARED_GRADIENT and tensor.bytes for tensor in workspaces)
        return self.residual_gradient[2 if counted else 1 :]

    @property
    def read_gradients(self) -> tuple[Tensor, ...]:
        """Gradients of what the last node reads."""
        return self.residual_gradient or self.input_gradient

    @cached_property
    def residual(self) -> tuple[Tensor, ...]:
        """The residual stream after attention, if the GPU has it: the attention node references it until its backward ends."""
        after = (child for child in self._inside if child.kind in (ModuleKind.FEED_FORWARD_NORM, ModuleKind.FC1))
        return tuple(tensor for child in after for tensor in child.saved if tensor.bytes and tensor.made_in == LAYER)[:1]

    @property
    def attention_output(self) -> tuple[Tensor, ...]:
        """The output of the attention node of a dense layer, which this node references. In a MoE layer the norm saves it."""
        return () if self._is_moe else self.residual or self.input_gradient

    @cached_property
    def latent(self) -> tuple[Tensor, ...]:
        """The projected output of the norm that the flex dispatcher reads. The dispatch counts it as saved."""
        dispatches = (child for child in self._inside if child.kind is ModuleKind.DISPATCH)
        return tuple(tensor for child in dispatches for tensor in child.saved if tensor.name == LATENT_ROWS)

    @cached_property
    def dispatched(self) -> tuple[Tensor, ...]:
        """What the flex dispatcher reads: the output of the norm or its projection, which is not freed after the dispatch."""
        if not any(child.kind is ModuleKind.DISPATCH and is_flex(child) for child in self._inside):
            return ()
        return self.latent or tuple(replace(tensor, name="output of the norm") for tensor in self.input_gradient)

    @cached_property
    def handle(self) -> tuple[Tensor, ...]:
        """What the graph of the flex dispatcher references until the backward of the attention node ends.

        With HybridEP the gradients of all probabilities are as large as these.
        """
        saved = [tensor for child in self._inside if child.kind is ModuleKind.DISPATCH for tensor in child.saved]
        if not any(tensor.in_graph for tensor in saved):
            return ()
        return tuple(tensor for tensor in saved if tensor.in_graph or (tensor.lingers and tensor.name != ROW_ID_MAP))

    @property
    def sent_gradient(self) -> tuple[Tensor, ...]:
        """The gradient that the attention node reads: of what the layer sends, or of the output of attention."""
        return self.sent or self.dispatched or self.input_gradient

    @property
    def not_copied(self) -> tuple[Tensor, ...]:
        """Tensors that are copied to the host when the combine node ends."""
        norms = (child for child in self._inside if child.kind is ModuleKind.FEED_FORWARD_NORM and self._is_moe)
        return tuple(tensor for child in norms for tensor in child.offloaded if tensor not in child.saved)

    @property
    def shared_output(self) -> tuple[Tensor, ...]:
        """The output of the shared experts."""
        return tuple(tensor for child in self._inside for tensor in child.saved if tensor.name == SHARED_OUTPUT)

    @cached_property
    def _rows(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The rows that a rank sends, and those that it receives."""
        for child in self._inside:
            if child.kind is ModuleKind.DISPATCH:
                named = {tensor.name: (tensor,) for tensor in child.forward_workspace}
                rows = named.get(LOCAL_ROWS, ())
                if is_flex(child):  # the dispatch reads the output of the norm, which the router has saved
                    return (), named.get(ARRIVED_ROWS, rows)
                return named.get(SENT_ROWS, rows), named.get(RECEIVED_ROWS, rows)
        return (), ()

    @cached_property
    def delayed(self) -> tuple[Tensor, ...]:
        """Operands of delayed weight gradients of its routed experts, from their backward until that of the dispatch."""
        experts = (child for child in self._inside if child.kind is ModuleKind.EXPERTS)
        return tuple(tensor for child in experts for tensor in operands_of_experts(child))

    @property
    def sent(self) -> tuple[Tensor, ...]:
        """The rows that a layer sends to the experts."""
        return self._rows[0]

    @property
    def received(self) -> tuple[Tensor, ...]:
        """The rows that a layer receives for its experts."""
        return self._rows[1]

    def forward(self, frame: list[Tensor]) -> list[Placed]:
        """Instants of its forward. Appends to `frame` what local variables reference until the chunk's forward returns."""
        placed: list[Placed] = []
        here = self.before
        for module, parent in self.modules:
            memory = block_memory(module)
            placed += [
                Placed(module, parent, instant, here + instant.saved, tuple(frame), self.number) for instant in memory.forward
            ]
            frame += memory.frame
            here += memory.retained
        return placed

    def backward(self) -> list[Placed]:
        """Instants of its backward, in order."""
        placed: list[Placed] = []
        here = self.after
        for module, parent in reversed(self.modules):
            memory = block_memory(module)
            here -= memory.retained
            placed += [Placed(module, parent, instant, here + instant.saved, (), self.number) for instant in memory.backward]
        return placed

    def forward_nodes(self, frame: list[Tensor]) -> dict[Node, list[Placed]]:
        """Instants of the forward of each node. `frame`: as in `forward`."""
        return _by_node(self.forward(frame))

    def backward_nodes(self) -> dict[Node, list[Placed]]:
        """Instants of the backward of each node."""
        return _by_node(self.backward())


def _by_node(placed: Sequence[Placed]) -> dict[Node, list[Placed]]:
    found: dict[Node, list[Placed]] = {}
    for each in placed:
        node, before_norm, after_router, gradient = each.block.derived(_place_of, each.instant)
        found.setdefault(node, []).append(each._replace(before_norm=before_norm, after_router=after_router, gradient=gradient))
    return found


def _place_of(block: Module, instant: Instant) -> tuple[Node, bool, bool, tuple[int, ...]]:
    """The node of an instant, whether it is before the norm and after the router, and the shape of the gradient that it reads."""
    path, tensors = explained(block, instant)
    node, before_norm = _node_of(block, path)
    after_router = not before_norm and not path.endswith(".router")
    names = (ROW_GRADIENTS, OUTPUT_GRADIENT) if path.endswith(".linear_fc2") else (ROW_GRADIENTS,)
    gradient = next((tensor.shape for tensor in tensors if node is Node.EXPERTS and tensor.name in names), ())
    return node, before_norm, after_router, gradient


def _node_of(block: Module, path: str) -> tuple[Node, bool]:
    """The node that a path in a block belongs to, and whether it is in the attention branch."""
    if block.kind is ModuleKind.FINAL_NORM:
        return Node.COMBINE, False
    module = block
    layer: Module | None = None
    for name in path.split(".")[1:]:
        if layer is None and module.kind is ModuleKind.LAYER:
            layer = module
        module = next((child for child in module.children if child.name == name), module)
        if module.kind is ModuleKind.WEIGHT_GRADIENT:
            of_attention = layer is not None and module in layer.children
            return Node.ATTENTION if of_attention else Node.WEIGHT_GRADIENTS, of_attention
        if module.kind in _NODES:
            return _NODES[module.kind], False
        if layer is not None and module in layer.children:
            moe = any(child.kind is ModuleKind.EXPERTS for _, child in layer.walk())
            if module.kind in ATTENTION_BRANCH:
                return Node.ATTENTION, True
            if not moe:
                return Node.EXPERTS, False
            if module.kind is ModuleKind.FEED_FORWARD_NORM:
                return Node.ATTENTION, False
            if module.kind is ModuleKind.FEED_FORWARD_ADD:
                return Node.COMBINE, False
        elif layer is None and module.kind is ModuleKind.FINAL_NORM:
            return Node.COMBINE, False
    return Node.ATTENTION, False


def units(tree: Module) -> tuple[Unit, tuple[Unit, ...], Unit]:
    """All blocks before the layers, the layers, and all blocks after them. The final norm is part of the last decoder layer."""
    blocks = [(block.module, block.parent) for block in chunk_program(tree).blocks for _ in range(block.times)]
    places = [index for index, (module, _) in enumerate(blocks) if module.kind in _LAYER_KINDS]
    start = places[0] if places else next((index for index, each in enumerate(blocks) if _after_layers(each[0])), len(blocks))
    first = Unit(tuple(blocks[:start]), 0)
    layers: list[Unit] = []
    rest: list[tuple[Module, str]] = []
    kept = first.after
    for module in blocks[start:]:
        if module[0].kind in _LAYER_KINDS:
            layers.append(Unit((module,), kept, len(layers)))
            kept = layers[-1].after
        elif module[0].kind is ModuleKind.FINAL_NORM and layers and not rest:
            layers[-1] = Unit((*layers[-1].modules, module), layers[-1].before, layers[-1].number)
            kept = layers[-1].after
        else:
            rest.append(module)
    return first, tuple(layers), Unit(tuple(rest), kept)


def _after_layers(module: Module) -> bool:
    return module.kind in (ModuleKind.FINAL_NORM, ModuleKind.DECODER, ModuleKind.OUTPUT_LAYER)


def batch_of(tree: Module) -> tuple[Tensor, ...]:
    """The batch of a chunk, which the state of its schedule plan references until the backward of the microbatch ends."""
    return units(tree)[0].frame
