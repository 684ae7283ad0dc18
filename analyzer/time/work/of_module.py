"""The kernels of each module of a tree, by the kind of the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Final

from analyzer.modules.kinds import ADAPTER_INPUTS, Kernels, ModuleKind
from analyzer.modules.moe.routing import Routing
from analyzer.modules.tree import Module, Tensor, total_bytes
from analyzer.time.work import elementwise, experts
from analyzer.time.work.attention import attention_kernel
from analyzer.time.work.context import WorkContext
from analyzer.time.work.kernels import NO_WORK, Gemm, MemoryBound, Work
from analyzer.time.work.linear import gemms, grouped_linear, joined, linear, own_weight, weight_of

_OF_INPUTS: Final = frozenset({"data gradient", "sum of input gradients"})
_OF_WEIGHTS: Final = frozenset({"weight gradient", "bias gradient", "embedding gradient", "sum of embedding gradients"})
"""Names of kernels that compute gradients of weights only."""


def work_of(module: Module, context: WorkContext) -> Work:
    """The kernels of a module without children. Those of modules with children are those of the children."""
    return module.derived(_trained_work, context.of_part(module.part))


def _trained_work(module: Module, context: WorkContext) -> Work:
    """The kernels, without those of the gradients of frozen weights, or of an input that needs none.

    `RouterGatingLinearFunction` computes the weight gradient of a router in any case.
    """
    work = _work(module, context)
    dropped = frozenset() if module.input_gradient else _OF_INPUTS
    if module.frozen and module.kind is not ModuleKind.ROUTER:
        dropped |= _OF_WEIGHTS
    return work._replace(backward=tuple(each for each in work.backward if each.name not in dropped)) if dropped else work


def _work(module: Module, context: WorkContext) -> Work:
    kernels = module.kind.facts.kernels
    if kernels is Kernels.NONE and module.parameters and not module.children:
        raise ValueError(
            f"{module.name} has parameters, but its kind {module.kind.name} has no kernels (analyzer/modules/kinds.py)"
        )
    return formula(kernels)(module, context)


def formula(kernels: Kernels) -> Callable[[Module, WorkContext], Work]:
    """The formula of a kind of kernels. Those of families that few models have are imported on demand."""
    if kernels in FORMULAS:
        return FORMULAS[kernels]
    from analyzer.time.work import compressed_attention, linear_attention, mamba, sparse_attention

    for formulas in (linear_attention.FORMULAS, mamba.FORMULAS, sparse_attention.FORMULAS):
        if kernels in formulas:
            return formulas[kernels]
    return compressed_attention.FORMULAS[kernels]


def _none(module: Module, context: WorkContext) -> Work:
    del module, context
    return NO_WORK


def _feed_forward(module: Module, context: WorkContext) -> Work:
    """A linear layer, or that of each local expert with the copies around it."""
    weight = weight_of(module)
    if weight.sharding != "expert":
        return linear(module, context)
    routing = context.routing if weight.quantized else Routing(context.routing.shapes.in_16_bit)
    products = grouped_linear(module, context, rows=routing.multiplied_rows)
    return joined(products, experts.expert_biases(module, context), experts.padding(module, context))


def _output_layer(module: Module, context: WorkContext) -> Work:
    """Logits in 16 bit, also of quantized models, unless `--fp8-output-proj` quantizes the layer.

    Without a weight of its own it uses that of the embedding, whose two gradients are added: one of them is a tensor of zeros if
    the weight gradient is added to the gradient buffer. Otherwise only their sum is added to it, by the embedding.
    """
    shapes, model = context.shapes, context.inputs.model
    columns = model.padded_vocab_size // shapes.t
    precision = context.quantized if shapes.quantizes_output_layer else context.precision
    own = own_weight(module) is not None
    work = gemms(context, rows=shapes.s * shapes.b, n=columns, k=model.hidden_size, precision=precision, adds=own)
    if any(each.name == "bias" for each in module.parameters):  # it is added in a new tensor
        logits = 2.0 * shapes.s * shapes.b * columns
        biased = Work((MemoryBound("bias", 2 * logits),), (MemoryBound("bias gradient", logits, launches=2),))
        work = joined(work, biased)
    if own:
        return work
    fused = context.inputs.gradient_accumulation_fusion
    added = MemoryBound("sum of embedding gradients", (8.0 if fused else 6.0) * columns * model.hidden_size)
    return work._replace(backward=(*work.backward, added))


def _head_projection(module: Module, context: WorkContext) -> Work:
    """The linear layer of BERT on the tokens of this rank; without sequence parallelism every rank computes all of them."""
    return _linear_of_pytorch(module, context, rows=context.shapes.s_split * context.shapes.b)


def _of_first_tokens(module: Module, context: WorkContext) -> Work:
    """A linear layer of BERT on one token of each sample."""
    return _linear_of_pytorch(module, context, rows=context.shapes.b)


def _linear_of_pytorch(module: Module, context: WorkContext, *, rows: int) -> Work:
    """A layer whose bias is added in the GEMM. The gradients of both parameters are added to the buffer by kernels of their own."""
    n, k = weight_of(module).shape
    separate = WorkContext(replace(context.inputs, gradient_accumulation_fusion=False), context.gradients)
    work = gemms(separate, rows=rows, n=n, k=k, precision=context.precision)
    return joined(Work((), (MemoryBound("bias gradient", 2.0 * rows * n, launches=3),)), work)


def _activation(module: Module, context: WorkContext) -> Work:
    """Rows and width are those of the output, which is listed in the workspace. Allocated rows without a token are not read."""
    shape = next((each.shape for each in module.forward_workspace if each.name in ("output", "activation output")), None)
    if shape is None:
        return NO_WORK
    in_experts, moe = len(shape) == 2, context.inputs.model.moe
    limited = in_experts and moe is not None and moe.rank_capacity is not None
    rows = context.routing.multiplied_rows if limited else prod(shape[:-1])
    return elementwise.activation(context, rows=rows, width=shape[-1], in_experts=in_experts)


def _patches(module: Module, context: WorkContext) -> Work:
    """A linear layer on the pixels of each patch, or a convolution, which is taken to be bound by memory."""
    weight = next(each for each in module.parameters if each.name == "weight")
    if len(weight.shape) != len(("outputs", "inputs")):
        return _copies(module, context)
    n, k = weight.shape
    rows = prod(next(each.shape[:-1] for each in module.forward_workspace if each.name == "output"))
    return gemms(context, rows=rows, n=n, k=k, precision=context.precision)


def _copies(module: Module, context: WorkContext) -> Work:
    """Operations that read and write the tensors of their workspaces: patches, class tokens and merged sequences."""
    del context
    name = module.kind.name.lower()

    def moved(tensors: tuple[Tensor, ...]) -> tuple[MemoryBound, ...]:
        return (MemoryBound(name, float(total_bytes(tensors)), launches=len(tensors)),) if tensors else ()

    return Work(moved((*module.saved, *module.forward_workspace)), moved(module.backward_workspace))


def _adapter_projection(module: Module, context: WorkContext) -> Work:
    """A projection in 16 bit of all rows of its input, which is gathered or of which the output is reduced in some layers.

    The gradient of the input of the first projection is added to that of the layer.
    """
    weight = weight_of(module)
    output = (each for each in module.forward_workspace if each.name == "output")
    rows = max(prod(each.shape[:-1]) for each in (*module.saved[:1], *output))
    sums = Work((), _sum_of_input_gradients(module, context, rows) if module.kind in ADAPTER_INPUTS else ())
    if len(weight.shape) > len(("outputs", "inputs")):
        return joined(sums, grouped_linear(module, context, rows=rows))
    n, k = weight.shape
    return joined(sums, gemms(context, rows=rows, n=n, k=k, precision=context.precision), _gathered_columns(module, context))


def _sum_of_input_gradients(module: Module, context: WorkContext, rows: int) -> tuple[MemoryBound, ...]:
    """The gradient of the input of an adapter is added to that of its layer.

    Transformer Engine adds it in the data gradient's GEMM where a norm's output is gathered for both (TE 2.11). An adapter that
    gathers its input itself has the gradient of the part on this rank.
    """
    shapes = context.shapes
    if shapes.sp and module.source == "ColumnParallelLinear" and rows == shapes.s * shapes.b:
        if module.kind is not ModuleKind.ADAPTER_REGATHERED_IN:
            return ()
        rows = shapes.s_split * shapes.b
    return (MemoryBound("sum of input gradients", 3.0 * context.element_bytes * rows * weight_of(module).shape[-1]),)


def _gathered_columns(module: Module, context: WorkContext) -> Work:
    """The outputs of all ranks side by side, and in backward the gradient of those of this rank."""
    names = {each.name: each for each in module.forward_workspace}
    whole = names.get("gathered output") or ("part of the output" in names and names.get("output"))
    if not whole:
        return NO_WORK
    size = 2.0 * whole.bytes
    return Work((MemoryBound("outputs of all ranks", size),), (MemoryBound("part of the gradient", size / context.shapes.t),))


def _adapter_sum(module: Module, context: WorkContext) -> Work:
    """A product with a constant, which reads and writes a tensor, and a sum, which reads two and writes one."""
    del context
    size = float(total_bytes(module.backward_workspace))
    return Work((MemoryBound("adapter output", 5 * size, launches=2),), (MemoryBound("adapter output gradient", 2 * size),))


def _adapter_join(module: Module, context: WorkContext) -> Work:
    """The concatenation by query groups, or of two halves.

    The backward of each slice of a group fills a tensor of the size of its part with zeros, copies the gradient of the slice, and
    adds the tensor to those of earlier groups.
    """
    forward = MemoryBound("outputs of adapters", float(total_bytes(module.forward_workspace)))
    if not module.backward_workspace:
        return Work((forward,))
    groups = context.inputs.model.num_query_groups
    size = float(total_bytes(module.backward_workspace[:-1]))
    return Work((forward,), (MemoryBound("gradients of slices", (1 + 3) * groups * size, launches=3 * 3 * groups),))


def _adapter_add(module: Module, context: WorkContext) -> Work:
    del context
    return Work((MemoryBound("adapter output", 3.0 * module.forward_workspace[-1].bytes),))


def _weight_norm(module: Module, context: WorkContext) -> Work:
    """The product of both projections, its sum with the weight, and the norm of each row. It has no backward."""
    projection, copy, _ = module.forward_workspace
    (n, rank), k = projection.shape, copy.shape[1]
    product = Gemm("forward", n, k, rank, context.precision, output_bytes=context.element_bytes)
    scaled = MemoryBound("scaled projection", 2.0 * projection.bytes)
    return Work((scaled, product, MemoryBound("norm of the weight", 4.0 * copy.bytes, launches=2)))


FORMULAS: Final[dict[Kernels, Callable[[Module, WorkContext], Work]]] = {
    Kernels.NONE: _none,
    Kernels.OF_IMAGES: _none,
    Kernels.OF_PLUGINS: _none,
    Kernels.LINEAR: linear,
    Kernels.FEED_FORWARD: _feed_forward,
    Kernels.NORM: elementwise.standalone_norm,
    Kernels.HEAD_NORM: elementwise.head_norm,
    Kernels.EMBEDDING: elementwise.word_embedding,
    Kernels.COPIES: _copies,
    Kernels.RESIDUAL_ADD: lambda _, context: elementwise.residual_add(context),
    Kernels.ACTIVATION: _activation,
    Kernels.PATCHES: _patches,
    Kernels.ADAPTER_PROJECTION: _adapter_projection,
    Kernels.ADAPTER_SUM: _adapter_sum,
    Kernels.ADAPTER_JOIN: _adapter_join,
    Kernels.ADAPTER_ADD: _adapter_add,
    Kernels.ADAPTER_WEIGHT_NORM: _weight_norm,
    Kernels.ROUTER: lambda _, context: experts.router(context),
    Kernels.SHARED_GATE: lambda _, context: experts.shared_gate(context),
    Kernels.DISPATCH: lambda _, context: experts.permutation(context, dispatch=True),
    Kernels.COMBINE: lambda _, context: experts.permutation(context, dispatch=False),
    Kernels.ATTENTION: lambda _, context: attention_kernel(context),
    Kernels.OUTPUT_GATE: lambda _, context: elementwise.output_gate(context),
    Kernels.OUTPUT_LAYER: _output_layer,
    Kernels.HEAD_PROJECTION: _head_projection,
    Kernels.FIRST_TOKENS: _of_first_tokens,
    Kernels.LOSS: lambda _, context: elementwise.cross_entropy(context),
}
"""Formulas of kernels that most models have (`formula`). `analyzer.modules.kinds` says which modules have them."""
