"""Column- and row-parallel linear layers: what they save, need and send.

Sources: transformer_engine/pytorch/module/{linear,layernorm_linear}.py (TE 2.11), and
megatron/core/tensor_parallel/layers.py (0.16.1) for the local implementation, which saves the same tensors.
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.norm import norm_parameters, norm_statistics
from analyzer.modules.quantized import (
    backward_input,
    forward_input,
    gathers,
    keeps_original,
    kept_input,
    norm_gradient,
    output_gradient,
)
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module, Parameter, Tensor


def weight_gradient(shapes: Shapes, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    """The gradient of a weight before it is added to main_grad; none where the GEMM accumulates into it.

    With `--no-gradient-accumulation-fusion` autograd makes a tensor of the weight's size, which the hook of
    DistributedDataParallel adds to main_grad and drops.
    """
    if shapes.inputs.gradient_accumulation_fusion:
        return ()
    return (Tensor(name="weight gradient", shape=shape, dtype=shapes.dtype, formula="one weight"),)


def split_weight(shapes: Shapes, shape: tuple[int, int], *, full: tuple[int, int]) -> Parameter:
    """The weight of a column- or row-parallel layer."""
    quantized = shapes.fp8 is not None
    return Parameter(name="weight", shape=shape, dtype=shapes.dtype, sharding="tensor", full_shape=full, quantized=quantized)


def column_collectives(shapes: Shapes, *, width: int | None = None) -> tuple[Collective, ...]:
    """Messages of a layer whose output is split over tensor-parallel ranks (facts: Korthikanti et al. 2022, figure 5).

    Under sequence parallelism the shard of the input is saved, so it is gathered again for the weight gradient.
    `width` is that of the input, h where it is not given.
    """
    if shapes.sp:
        return (
            *gathers(shapes, "forward", width=width, quantizes=True),
            *gathers(shapes, "backward", width=width),
            *shapes.tp("reduce_scatter", "backward", width=width),
        )
    return shapes.tp("all_reduce", "backward", width=width)


def row_collectives(shapes: Shapes) -> tuple[Collective, ...]:
    """Messages of a layer whose input is split over tensor-parallel ranks."""
    if shapes.sp:
        return (*shapes.tp("reduce_scatter", "forward"), *gathers(shapes, "backward", both=True, quantizes=True))
    return shapes.tp("all_reduce", "forward")


def column_parallel(
    shapes: Shapes,
    name: str,
    kind: ModuleKind,
    *,
    width: int,
    full_width: int,
    symbol: str,
    bias: bool,
    fused_norm: bool,
    input_made_in: str,
    input_shares: str = "",
) -> Module:
    """h → width, `width` already divided by t; with the norm in front of it fused in where `fused_norm`.

    Saves its input (and, with the norm, the norm's output and statistics). The output is the next module's to keep.
    """
    h = shapes.model.hidden_size
    rows = shapes.s_split * shapes.b
    output = shapes.wide("output", width, symbol)
    gathered = (shapes.hidden("gathered input", gathered=True),) if shapes.sp else ()
    recomputed = not fused_norm and shapes.recomputes("layernorm")
    read = shapes.hidden("normalized input" if fused_norm else "input", made_in="" if fused_norm else input_made_in)
    if fused_norm:
        saved: tuple[Tensor, ...] = (
            shapes.hidden("input", dtype=shapes.residual_dtype, shares=input_shares, made_in=input_made_in),
            *kept_input(shapes, read, gathered=shapes.sp),
            *norm_statistics(shapes, rows, "4·s·b/t" if shapes.sp else "4·s·b"),
        )
    elif recomputed:
        saved = (shapes.hidden("input", shares="recomputed norm output"),)
    else:
        saved = kept_input(shapes, read, gathered=shapes.sp)
    again = (shapes.hidden("recomputed norm output"),) if recomputed else ()
    norm = norm_parameters(shapes, h, prefix="layer_norm_") if fused_norm else ()
    weight = split_weight(shapes, (width, h), full=(full_width, h))
    row = Parameter(name="bias", shape=(width,), dtype=shapes.dtype, sharding="tensor", full_shape=(full_width,))
    return Module(
        name=name,
        kind=kind,
        parameters=(*norm, weight, *((row,) if bias else ())),
        saved=saved,
        forward_workspace=(
            *forward_input(shapes, read, gathered=gathered, in_16_bit=not fused_norm, original=recomputed),
            *again,
            output,
        ),
        backward_workspace=(
            *output_gradient(shapes, shapes.wide("output gradient", width, symbol)),
            *backward_input(shapes, read, gathered=gathered, original=recomputed),
            *again,
            shapes.hidden("input gradient", gathered=True),
            *((shapes.hidden("scattered input gradient"),) if shapes.sp else ()),
            *(norm_gradient(shapes, read) if fused_norm else ()),
            *weight_gradient(shapes, (width, h)),
        ),
        collectives=column_collectives(shapes),
        source="TELayerNormColumnParallelLinear" if fused_norm else "ColumnParallelLinear",
    )


def gathered_linear(shapes: Shapes, name: str, *, input_made_in: str, input_shares: str = "") -> Module:
    """h → h in the place of attention or of the feed-forward block, its norm fused in; the output is gathered.

    Under sequence parallelism Megatron fails with it, and `validate_layers` refuses it.
    Source: core/transformer/heterogeneous/linear_replacements.py (0.16.1).
    """
    h = shapes.model.hidden_size
    linear = column_parallel(
        shapes,
        name,
        ModuleKind.REPLACED_BRANCH,
        width=h // shapes.t,
        full_width=h,
        symbol="h/t",
        bias=shapes.model.bias_linear,
        fused_norm=True,
        input_made_in=input_made_in,
        input_shares=input_shares,
    )
    if shapes.t == 1:
        return linear
    gathered = (shapes.hidden("parts of all ranks"), shapes.hidden("gathered output"))
    return replace(
        linear,
        forward_workspace=(shapes.wide("output", h // shapes.t, "h/t"), *gathered),
        collectives=(*linear.collectives, *shapes.tp("all_gather", "forward")),
    )


def row_parallel(
    shapes: Shapes,
    name: str,
    kind: ModuleKind,
    *,
    width: int,
    full_width: int,
    symbol: str,
    bias: bool,
    input_made_in: str,
    input_shares: str = "",
    keeps_16_bit: bool = False,
) -> Module:
    """width → h, `width` already divided by t. Its bias is added later, with the dropout.

    `keeps_16_bit`: in FP8 too it keeps its input as it came, where the recipe can (`quantized.keeps_original`).
    """
    h = shapes.model.hidden_size
    weight = split_weight(shapes, (h, width), full=(h, full_width))
    read = shapes.wide("input", width, symbol, shares=input_shares, made_in=input_made_in)
    original = keeps_16_bit and keeps_original(shapes)
    gathered = (shapes.hidden("gathered output gradient", gathered=True),) if shapes.sp else ()
    gradient = shapes.branch_gradient
    biases = (Parameter(name="bias", shape=(h,), dtype=shapes.dtype, sequence_parallel=shapes.sp),) if bias else ()
    return Module(
        name=name,
        kind=kind,
        parameters=(weight, *biases),
        saved=(read,) if original else kept_input(shapes, read),
        forward_workspace=(
            *forward_input(shapes, read, original=original),
            shapes.hidden("output", gathered=True),
            *((shapes.hidden("scattered output"),) if shapes.sp else ()),
        ),
        backward_workspace=(
            *output_gradient(shapes, gradient, gathered=gathered),
            *backward_input(shapes, read, original=original),
            shapes.wide("input gradient", width, symbol),
            *weight_gradient(shapes, (h, width)),
        ),
        collectives=row_collectives(shapes),
        source="TERowParallelLinear / RowParallelLinear",
    )
