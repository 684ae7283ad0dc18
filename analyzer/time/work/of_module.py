"""The kernels of each module of a tree, by the kind of the module."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Final

from analyzer.modules.kinds import LINEAR, ModuleKind
from analyzer.modules.moe.routing import Routing
from analyzer.modules.tree import Module
from analyzer.time.work import elementwise, experts, linear_attention, mamba
from analyzer.time.work.attention import attention_kernel
from analyzer.time.work.context import WorkContext
from analyzer.time.work.kernels import NO_WORK, MemoryBound, Work
from analyzer.time.work.linear import gemms, grouped_linear, joined, linear, weight_of

_NORMS: Final = frozenset({ModuleKind.ATTENTION_NORM, ModuleKind.FEED_FORWARD_NORM, ModuleKind.FINAL_NORM})


def work_of(module: Module, context: WorkContext) -> Work:
    """The kernels of a module without children. Those of modules with children are those of the children."""
    return module.derived(_work, context)


def _work(module: Module, context: WorkContext) -> Work:
    kind = module.kind
    if kind in _OTHERS:
        return _OTHERS[kind](module, context)
    if kind in _NORMS:
        return elementwise.standalone_norm(module, context)
    weight = weight_of(module)
    if weight is not None and weight.sharding == "expert":
        shapes = context.shapes if weight.quantized else context.shapes.in_16_bit
        products = grouped_linear(module, context, rows=Routing(shapes).multiplied_rows)
        return joined(products, experts.expert_biases(module, context), experts.padding(module, context))
    if kind in LINEAR or kind is ModuleKind.REPLACED_BRANCH or weight is not None:
        return linear(module, context)
    if module.parameters and len(module.parameters[0].shape) == 1 and module.saved:
        return elementwise.standalone_norm(module, context)  # norms of multi-token prediction
    return NO_WORK


def _output_layer(module: Module, context: WorkContext) -> Work:
    """Logits in 16 bit, also of quantized models.

    Without a weight of its own it uses that of the embedding, whose two gradients are added: one of them is a tensor of zeros if
    the weight gradient is added to the gradient buffer.
    """
    shapes, model = context.shapes, context.inputs.model
    columns = model.padded_vocab_size // shapes.t
    work = gemms(context, rows=shapes.s * shapes.b, n=columns, k=model.hidden_size, precision=context.precision)
    if module.parameters:
        return work
    added = MemoryBound("sum of embedding gradients", 8.0 * columns * model.hidden_size)
    return work._replace(backward=(*work.backward, added))


def _activation(module: Module, context: WorkContext) -> Work:
    """Rows and width are those of the output, which is listed in the workspace."""
    shape = next((each.shape for each in module.forward_workspace if each.name in ("output", "activation output")), None)
    if shape is None:
        return NO_WORK
    return elementwise.activation(context, rows=prod(shape[:-1]), width=shape[-1], in_experts=len(shape) == 2)


_OTHERS: Final[dict[ModuleKind, Callable[[Module, WorkContext], Work]]] = {
    ModuleKind.OUTPUT_LAYER: _output_layer,
    ModuleKind.ACTIVATION: _activation,
    ModuleKind.LOSS: lambda _, context: elementwise.cross_entropy(context),
    ModuleKind.WORD_EMBEDDINGS: elementwise.word_embedding,
    ModuleKind.POSITION_EMBEDDINGS: elementwise.word_embedding,
    ModuleKind.Q_NORM: elementwise.head_norm,
    ModuleKind.K_NORM: elementwise.head_norm,
    ModuleKind.ATTENTION_KERNEL: lambda _, context: attention_kernel(context),
    ModuleKind.OUTPUT_GATE: lambda _, context: elementwise.output_gate(context),
    ModuleKind.LINEAR_ATTENTION_INPUT: linear_attention.input_projection,
    ModuleKind.CONVOLUTION: linear_attention.convolution,
    ModuleKind.DELTA_RULE_INPUTS: linear_attention.prepared,
    ModuleKind.DELTA_RULE: linear_attention.delta_rule,
    ModuleKind.GATED_NORM: linear_attention.gated_norm,
    ModuleKind.ATTENTION_ADD: lambda _, context: elementwise.residual_add(context),
    ModuleKind.FEED_FORWARD_ADD: lambda _, context: elementwise.residual_add(context),
    ModuleKind.MIXER_SCAN: lambda _, context: mamba.scan(context),
    ModuleKind.MIXER_NORM: lambda _, context: mamba.gated_norm(context),
    ModuleKind.ROUTER: lambda _, context: experts.router(context),
    ModuleKind.SHARED_GATE: lambda _, context: experts.shared_gate(context),
    ModuleKind.DISPATCH: lambda _, context: experts.permutation(context, dispatch=True),
    ModuleKind.COMBINE: lambda _, context: experts.permutation(context, dispatch=False),
}
