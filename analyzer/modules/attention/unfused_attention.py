"""Unfused attention: batched GEMMs with the score matrix in memory. Legend as in core_attention.py.

Sources (megatron-core 0.16.1, Transformer Engine 2.11): core/transformer/dot_product_attention.py DotProductAttention;
transformer_engine/pytorch/attention/dot_product_attention/backends.py UnfusedDotProductAttention, softmax.py FusedScaleMaskSoftmax.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.attention.context_parallel import QKV_TENSOR
from analyzer.modules.attention.core_attention import (
    ATTENTION,
    Heads,
    before_rotation,
    checkpoint_inputs,
    rotary_tables,
    rotated_or_normed,
    sinks,
)
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Tensor, largest
from analyzer.units import dtype_bytes

_SAVED_MASK: Final = "attention mask"
_RECEIVED_MASK: Final = "mask of the scores"
_DROPOUT_MASK: Final = "dropout mask"
_CONTEXT: Final = "context"
_OUTPUT: Final = "output"


def combines_masks(kernel: Module) -> bool:
    """Whether a kernel saves a combination of its mask with Transformer Engine's causal mask, which is then never freed."""
    saves = any(tensor.name == _SAVED_MASK for tensor in (*kernel.saved, *kernel.offloaded))
    return saves and any(tensor.name == _RECEIVED_MASK for tensor in kernel.forward_workspace)


def scores(shapes: Shapes, name: str, *, dtype: str | None = None, sinks: bool = False) -> Tensor:
    """[b, a/t, s, s]: the attention matrix that unfused attention stores. `sinks`: with the column of sinks, if there are any."""
    model = shapes.model
    columns = shapes.inputs.keys + (sinks and _adds_column(shapes))
    shape = (shapes.b, model.num_attention_heads // shapes.t, shapes.s, columns)
    return Tensor(name=name, shape=shape, dtype=dtype or shapes.dtype, formula="b·a·s²/t elements")


def _adds_column(shapes: Shapes) -> bool:
    """Whether the sinks are a column of the scores, which the softmax saves (also `SoftmaxOne` of megatron-core)."""
    return shapes.model.softmax_type != "vanilla"


def softmax_is_fused(shapes: Shapes) -> bool:
    """`FusedScaleMaskSoftmax.is_kernel_available`: 16 bit, a supported row length, and b·a/t divisible by 4."""
    model, keys = shapes.model, shapes.inputs.keys
    if shapes.dtype == "fp32" or model.softmax_type != "vanilla":  # the kernel does not support sinks
        return False
    divisible = shapes.b * (model.num_attention_heads // shapes.t) % 4 == 0
    if model.implementation == "transformer_engine":  # it ignores --no-masked-softmax-fusion
        return divisible and 16 < keys < 16384 and keys % 8 == 0
    return divisible and model.masked_softmax_fusion and 16 < keys <= 4096 and keys % 4 == 0


def _window_of_all(shapes: Shapes) -> bool:
    """Whether every layer with these shapes has a sliding window."""
    return bool(shapes.model.windowed) and all(shapes.model.windowed)


def _keeps_mask(shapes: Shapes) -> bool:
    """Whether the mask that the softmax receives is saved, without combining it with Transformer Engine's causal mask.

    With a window or sinks the kind of the mask is "arbitrary" (`get_full_mask`, `FusedScaleMaskSoftmax.forward_torch_softmax`).
    A mask of padding is also applied to the result of the softmax (`UnfusedDotProductAttention.forward`).
    """
    return shapes.inputs.padding_mask or _adds_column(shapes) or (_window_of_all(shapes) and not softmax_is_fused(shapes))


def attention_mask(shapes: Shapes, name: str, *, batches: bool = True) -> Tensor:
    """[b, 1, s, s] bool, with a column for sinks; b is 1 if there is no batch or it has no mask, and without `batches`.

    `get_full_mask` combines the causal mask with that of the batch.
    """
    keys = shapes.inputs.keys
    column = _adds_column(shapes) and shapes.model.implementation == "transformer_engine"  # megatron-core adds it to masked scores
    padding = shapes.inputs.padding_mask
    count = shapes.b if padding or (batches and shapes.inputs.attention_mask_in_dataloader) else 1
    queries = shapes.s if padding else keys
    return Tensor(name=name, shape=(count, 1, queries, keys + column), dtype="bool", formula="s²")


def unfused_kernel(shapes: Shapes) -> Module:
    """The kernel after a projection to queries, keys and values in one tensor."""
    heads = Heads(shapes)
    inputs, local = _inputs(shapes)
    kernel = Module(
        name="core_attention",
        kind=ModuleKind.ATTENTION_KERNEL,
        saved=(
            *(replace(tensor, read_later=not softmax_is_fused(shapes)) for tensor in rotary_tables(shapes)),
            *saved_inputs(inputs),
            *saved_matrices(shapes),
        ),
        forward_workspace=(*local, *forward_workspace(shapes, heads.tensor(_CONTEXT, heads.query))),
        backward_workspace=backward_workspace(
            shapes,
            output=heads.tensor("output gradient", heads.query),
            value=heads.tensor("value gradient", heads.query),
            frees_value=all(tensor.name != QKV_TENSOR for tensor in inputs),
        ),
        parameters=sinks(shapes),
        source="UnfusedDotProductAttention" if shapes.model.implementation == "transformer_engine" else "DotProductAttention",
    )
    return with_absent_tensors(kernel)


def with_absent_tensors(kernel: Module) -> Module:
    """The kernel, with what its first forward under a checkpoint does not need at once.

    Dropout frees its mask before the product with the values allocates the context.
    """
    mask = {tensor.name: tensor.bytes for tensor in kernel.saved if tensor.name == _DROPOUT_MASK}
    product = {tensor.name: tensor.bytes for tensor in kernel.forward_workspace if tensor.name in (_CONTEXT, _OUTPUT)}
    if not mask or not product:
        return kernel
    absent = min(mask, product, key=lambda each: sum(each.values()))
    return replace(kernel, absent_without_gradients=frozenset(absent))


def _inputs(shapes: Shapes) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The saved queries, keys and values, and other tensors with them that local variables reference in the forward."""
    heads = Heads(shapes)
    te = shapes.model.implementation == "transformer_engine"
    maker = rotated_or_normed(shapes)
    qkv = heads.projected()
    before = before_rotation(shapes)
    if heads.grouped:  # keys and values are repeated for each query head, and the originals are freed after the forward
        query_maker = maker.format("q") or (ATTENTION if heads.regrouped else "")
        repeated = tuple(heads.tensor(f"repeated {name}", heads.query) for name in ("key", "value"))
        key = (heads.tensor("key", heads.key),)
        originals = key if maker else ()
        # get_qkv_layout: equal layouts, so slices are copied beside a contiguous query
        copied = (heads.tensor("value", heads.key), *(() if maker else key)) if te else ()
        # a checkpoint saves qkv and the originals, and what came before them is no longer referenced
        local = copied if shapes.recompute_core_attention else (qkv, *before, *originals, *copied)
        return (heads.tensor("query", heads.query, made_in=query_maker), *repeated), local
    inputs = checkpoint_inputs(shapes)
    if te and heads.gate and not maker:  # slices with a gate between them are copied
        inputs = tuple(heads.tensor(name, heads.query) for name in ("query", "key", "value"))
        return inputs, () if shapes.recompute_core_attention else (qkv,)
    if not (te and maker):
        return inputs, ()
    inputs = (*inputs[1:], heads.tensor("value", heads.key))  # get_qkv_layout: equal layouts, so the slice is copied
    if shapes.inputs.attention_in_batches and shapes.b > 1:
        inputs = tuple(replace(tensor, made_in="") for tensor in inputs)
    return inputs, () if shapes.recompute_core_attention else (qkv, *before)


def _softmax_dtype(shapes: Shapes) -> str:
    if softmax_is_fused(shapes):
        return shapes.dtype
    in_fp32 = shapes.model.implementation == "transformer_engine" or shapes.model.attention_softmax_in_fp32
    return "fp32" if in_fp32 else shapes.dtype


def _casts(shapes: Shapes) -> bool:
    """Whether the scores are converted to fp32 for the softmax, and the softmax back to 16 bit."""
    return _softmax_dtype(shapes) != shapes.dtype


def saved_inputs(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Queries, keys and values as the products save them: [b·a, s, d] views of [s, b, a, d].

    The backward reads queries and keys after that of the softmax. From one tensor with all three it copies back only the values
    before.
    """
    return tuple(replace(each, strided=True, read_later=each.name not in ("value", "repeated value")) for each in inputs)


def saved_matrices(shapes: Shapes) -> tuple[Tensor, ...]:
    """The softmax, its copy after dropout and the dropout mask. An unfused softmax also saves the attention mask.

    Without dropout, the product with the values saves the softmax in 16 bit: a second time if the softmax is in 16 bit, so that
    offloading copies it twice. A fused softmax reads its result after the backward of dropout, where memory is highest: this has
    freed the softmax after dropout, and allocates a gradient of the same size.
    """
    later = softmax_is_fused(shapes) and shapes.model.attention_dropout > 0
    saved = replace(scores(shapes, "softmax", dtype=_softmax_dtype(shapes), sinks=True), read_later=later)
    return (saved, *_read_by_product(shapes), *_saved_mask(shapes))


def _read_by_product(shapes: Shapes) -> tuple[Tensor, ...]:
    """What the product with the values and dropout save."""
    if shapes.model.attention_dropout > 0:
        return (scores(shapes, "softmax after dropout"), scores(shapes, _DROPOUT_MASK, dtype="bool"))
    if _casts(shapes):
        # the product reads a view without the column of sinks, and megatron-core converts such a view
        te = shapes.model.implementation == "transformer_engine"
        return (replace(scores(shapes, "softmax in 16 bit", sinks=te), strided=te and _adds_column(shapes)),)
    if _masks_result(shapes):
        return (scores(shapes, "softmax without padding"),)
    return (replace(scores(shapes, "probabilities"), shares="softmax"),)


def _masks_result(shapes: Shapes) -> bool:
    """Whether rows of padding are set to zero in a copy of the softmax (`UnfusedDotProductAttention.forward`)."""
    return shapes.inputs.padding_mask and shapes.model.implementation == "transformer_engine"


def saves_batch_mask(shapes: Shapes) -> bool:
    """Whether the softmax of megatron-core saves the mask of the batch itself, until the last backward of its microbatch."""
    if shapes.model.implementation == "transformer_engine" or shapes.model.attention_backend != "unfused":
        return False
    in_batch = shapes.inputs.attention_mask_in_dataloader or shapes.inputs.padding_mask
    return in_batch and not softmax_is_fused(shapes) and not _window_of_all(shapes)


def _saved_mask(shapes: Shapes) -> tuple[Tensor, ...]:
    """The mask that an unfused softmax saves, if it is a tensor of its own.

    Transformer Engine combines that of the batch with a causal one. megatron-core creates one in each forward if the batch has none
    or if there is a window (core/transformer/utils.py get_default_causal_mask).
    """
    if not shapes.inputs.masked or (softmax_is_fused(shapes) and not _masks_result(shapes)):
        return ()
    if shapes.model.implementation == "transformer_engine":
        # the backward of a softmax whose input is a view of the scores has its peak where it reads the mask
        return (replace(attention_mask(shapes, _SAVED_MASK), read_later=_casts(shapes) or _adds_column(shapes)),)
    return () if saves_batch_mask(shapes) else (attention_mask(shapes, _SAVED_MASK, batches=False),)


def forward_workspace(shapes: Shapes, context: Tensor) -> tuple[Tensor, ...]:
    """The scores, the mask and the context with its copy in [s, b, a·d], or the tensors at the cast of an fp32 softmax."""
    te = shapes.model.implementation == "transformer_engine"
    # with sinks the saved mask is a copy with another column, and replaces the first; with a window it is the first
    received = te and shapes.inputs.masked and not _keeps_mask(shapes)
    mask = (attention_mask(shapes, _RECEIVED_MASK),) if received else ()
    multiplies: tuple[Tensor, ...] = (scores(shapes, "scores", sinks=True), context, replace(context, name=_OUTPUT))
    if _masks_result(shapes):
        in_dropout = (multiplies[0], scores(shapes, "softmax without padding")) if shapes.model.attention_dropout > 0 else ()
        multiplies = largest(multiplies, in_dropout, _integer_masks(shapes))
    if not _casts(shapes):
        return (*mask, *multiplies)
    # scores and softmax have 4 bytes per element, and 3 saved by dropout do not exist yet
    rest = scores(shapes, "scores and softmax in 16 bit, minus the tensors of dropout", dtype="bool")
    at_cast = (
        scores(shapes, "masked scores", dtype="fp32", sinks=True),
        rest if shapes.model.attention_dropout > 0 else scores(shapes, "scores", sinks=True),
    )
    return (*mask, *largest(at_cast, multiplies))


def _integer_masks(shapes: Shapes) -> tuple[Tensor, ...]:
    """Temporary tensors of `get_full_mask` for a mask of padding, minus what the kernel allocates after them and saves.

    Two differences of positions in int64, the positions of one sample in int32, and five masks. Empty if they are not larger.
    """
    pairs = shapes.s * shapes.inputs.keys
    later = sum(tensor.bytes for tensor in saved_matrices(shapes)) - shapes.b * pairs
    more = (2 * 8 + 4) * shapes.b * pairs + 4 * pairs - later
    return (Tensor(name="integer masks, minus the tensors of the softmax", shape=(more,), dtype="bool"),) if more > 0 else ()


def reads_copied_gradient(shapes: Shapes) -> bool:
    """Whether the copy of the output gradient is allocated at the peak of the product's backward under a checkpoint.

    With dropout, the product frees its own copy of the softmax before it allocates the gradient of the values.
    """
    return not shapes.model.attention_dropout


def backward_workspace(shapes: Shapes, *, output: Tensor, value: Tensor, frees_value: bool) -> tuple[Tensor, ...]:
    """The gradients at the product with the values, or at a softmax that is not fused, when that of the output has been freed.

    `frees_value`: the kernel saves the values in a tensor of their own, which has been freed too and is as large as their gradient.

    Three matrices exist beside an unfused softmax. Its backward allocates its result and the product of the softmax and its
    gradient (aten/src/ATen/native/cuda/SoftMax.cu `softmax_backward_cuda_out`). The softmax is freed, and where the mask is written
    into a view of the scores, the backward of that (`CopySlices`) copies the gradient three times. What the product with the values
    and dropout saved has been freed. Gradients of queries and keys are allocated when one matrix is left.
    """
    at_product = (output, value, scores(shapes, "softmax gradient"))
    if softmax_is_fused(shapes):  # it overwrites the gradient
        return at_product
    dtype = _softmax_dtype(shapes)
    freed = sum(dtype_bytes(tensor.dtype, 1) for tensor in _read_by_product(shapes) if not tensor.shares)
    gradient = scores(shapes, "softmax gradient", dtype=dtype, sinks=True)
    more = 2 * dtype_bytes(dtype, 1) - freed
    rest = scores(shapes, "further gradients of the softmax, minus the freed tensors of dropout and of the product", dtype="bool")
    at_softmax = (
        *(() if frees_value else (value,)),
        gradient,
        replace(rest, shape=(more, *rest.shape), formula="b·a·s²/t elements"),
    )
    return largest(at_product, at_softmax)
