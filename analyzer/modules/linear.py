"""Column- and row-parallel linear layers: saved tensors, workspaces and collectives.

Sources: transformer_engine/pytorch/module/{linear,layernorm_linear}.py (TE 2.11), and
megatron/core/tensor_parallel/layers.py (0.16.1) for the local implementation, which saves the same tensors.
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.norm import fused_norm_backward, norm_parameters, norm_statistics
from analyzer.modules.quantized import (
    backward_input,
    forward_input,
    gathers,
    output_gradient,
    saved_input,
    saves_original_input,
)
from analyzer.modules.reduction import bias_gradient
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module, Parameter, Tensor, for_weight, largest


def weight_gradient(shapes: Shapes, shape: tuple[int, int], *, cached: bool | None = None) -> tuple[Tensor, ...]:
    """The gradient of a weight that autograd gets, before the hook of DistributedDataParallel frees it.

    With `--no-gradient-accumulation-fusion` it is added to main_grad. Otherwise the GEMM accumulates into main_grad, and autograd
    gets a dummy of the same size; empty if that is `cached` (default: as for linear layers), which `memory.workspaces` counts.
    """
    if shapes.inputs.gradient_accumulation_fusion and (shapes.inputs.cached_dummies.layers if cached is None else cached):
        return ()
    return (Tensor(name="weight gradient", shape=shape, dtype=shapes.dtype, formula="size of the weight", for_weight=True),)


def at_weight_gradient(
    shapes: Shapes,
    read: Tensor,
    gradients: tuple[Tensor, ...],
    *,
    gathered: tuple[Tensor, ...] = (),
    original: bool = False,
    in_buffers: bool = False,
    after: tuple[Tensor, ...] = (),
) -> tuple[Tensor, ...]:
    """What a backward allocates for the weight gradient, at the largest of the instants around its GEMM.

    `gradients`: `weight_gradient`. `after`: what a fused norm allocates when the GEMM has freed its inputs. The other arguments are
    those of `backward_input`. Gathered rows of blocks are freed when they have been transposed, before the gradient is allocated.
    """
    inputs = for_weight(backward_input(shapes, read, gathered=gathered, original=original, in_buffers=in_buffers))
    if shapes.inputs.delays_weight_gradients:
        return (*inputs, *gradients, *after)
    blocks = shapes.fp8 is not None and shapes.fp8.recipe == "blockwise" and gathered and not in_buffers
    read_by_gemm = tuple(each for each in inputs if "column-wise" in each.name) if blocks else inputs
    return largest(inputs, (*read_by_gemm, *gradients), (*gradients, *after))


def split_weight(shapes: Shapes, shape: tuple[int, int], *, full: tuple[int, int]) -> Parameter:
    """The weight of a column- or row-parallel layer."""
    quantized = shapes.fp8 is not None
    return Parameter(name="weight", shape=shape, dtype=shapes.dtype, sharding="tensor", full_shape=full, quantized=quantized)


def column_collectives(
    shapes: Shapes, *, width: int | None = None, forward_dtype: str = "", backward_dtype: str = "", original: bool = False
) -> tuple[Collective, ...]:
    """Collectives of a layer whose output is split over tensor-parallel ranks (Korthikanti et al. 2022, figure 5).

    Under sequence parallelism the input shard is saved, so it is gathered again for the weight gradient.
    `width` is the width of the input, h by default. The element types in 16 bit are by default that of activations.
    `original`: the 16-bit shard is saved, and quantized again before it is gathered in backward.
    """
    if shapes.sp:
        return (
            *gathers(shapes, "forward", width=width, quantizes=True, dtype=forward_dtype),
            *(
                replace(each, for_weight=True)
                for each in gathers(shapes, "backward", width=width, quantizes=original, dtype=backward_dtype)
            ),
            *shapes.tp("reduce_scatter", "backward", width=width, dtype=backward_dtype or None),
        )
    return shapes.tp("all_reduce", "backward", width=width)


def _calls(shapes: Shapes, *, in_buffers: bool) -> tuple[Collective, ...]:
    """Collectives of `column_parallel`. `LayerNormLinear` gathers in userbuffers only with gradients (`ub_overlap_ag_fprop`)."""
    exchanged = shapes.exchanged_dtype
    in_16_bit = in_buffers and shapes.fp8 is None
    return tuple(
        replace(call, dtype_without_gradients=shapes.dtype) if in_16_bit and call.phase == "forward" else call
        for call in column_collectives(shapes, forward_dtype=exchanged, backward_dtype=exchanged if in_buffers else "")
    )


def row_collectives(shapes: Shapes) -> tuple[Collective, ...]:
    """Collectives of a layer whose input is split over tensor-parallel ranks."""
    if shapes.sp:
        dtype = shapes.exchanged_dtype
        return (
            *shapes.tp("reduce_scatter", "forward", dtype=dtype),
            *gathers(shapes, "backward", both=True, quantizes=True, dtype=dtype),
        )
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
    """h → width, where `width` is already divided by t. `fused_norm`: the preceding norm is fused in.

    Saves its input and, with a fused norm, the norm's output and statistics. The next module saves the output.
    """
    h, rows = shapes.model.hidden_size, shapes.s_split * shapes.b
    # in the backward, Transformer Engine uses userbuffers in `LayerNormLinear` only: Megatron requests none for `Linear`
    in_forward, in_buffers = shapes.userbuffers, shapes.userbuffers and fused_norm
    gathered = (shapes.hidden("gathered input", gathered=True),) if shapes.sp else ()
    recomputed = not fused_norm and shapes.recomputes("layernorm")
    read = shapes.hidden("normalized input") if fused_norm else shapes.hidden("input", made_in=input_made_in, shares=input_shares)
    if fused_norm:
        saved: tuple[Tensor, ...] = (
            shapes.hidden("input", dtype=shapes.residual_dtype, shares=input_shares, made_in=input_made_in),
            *for_weight(saved_input(shapes, read, gathered=shapes.sp, normed=True)),
            *norm_statistics(shapes, rows, "4·s·b/t" if shapes.sp else "4·s·b"),
        )
    elif recomputed:
        saved = (shapes.hidden("input", shares="recomputed norm output"),)
    else:
        saved = for_weight(saved_input(shapes, read, gathered=shapes.sp))
    norm_output = (shapes.hidden("recomputed norm output"),) if recomputed else ()
    own, after = weight_gradient(shapes, (width, h)), fused_norm_backward(shapes, read, h) if fused_norm else ()
    norm = norm_parameters(shapes, h, prefix="layer_norm_") if fused_norm else ()
    weight = split_weight(shapes, (width, h), full=(full_width, h))
    row = Parameter(name="bias", shape=(width,), dtype=shapes.dtype, sharding="tensor", full_shape=(full_width,))
    return Module(
        name=name,
        kind=kind,
        parameters=(*norm, weight, *((row,) if bias else ())),
        saved=saved,
        forward_workspace=(
            *forward_input(shapes, read, gathered=gathered, in_16_bit=not fused_norm, original=recomputed, in_buffers=in_forward),
            *norm_output,
            shapes.wide("output", width, symbol),
        ),
        backward_workspace=(
            *output_gradient(shapes, shapes.wide("output gradient", width, symbol), fused=fused_norm),
            *norm_output,
            *(() if in_buffers else (shapes.hidden("input gradient", gathered=True),)),
            *((shapes.hidden("scattered input gradient"),) if shapes.sp else ()),
            *at_weight_gradient(shapes, read, own, gathered=gathered, original=recomputed, in_buffers=in_buffers, after=after),
            *(_gradient_of_bias(shapes, kind, width) if bias else ()),
        ),
        collectives=_calls(shapes, in_buffers=in_buffers),
        overlaps_collectives=shapes.userbuffers,
        source="TELayerNormColumnParallelLinear" if fused_norm else "ColumnParallelLinear",
    )


def _gradient_of_bias(shapes: Shapes, kind: ModuleKind, width: int) -> tuple[Tensor, ...]:
    """What the local implementation allocates to sum the gradient of its output over the tokens.

    The GEMMs of Transformer Engine do it. The bias of fc1 is added with the activation, which sums its gradient.
    """
    if shapes.model.implementation != "local" or kind == ModuleKind.FC1:
        return ()
    return bias_gradient(shapes, rows=shapes.s * shapes.b, columns=width)


def gathered_linear(shapes: Shapes, name: str, *, input_made_in: str, input_shares: str = "") -> Module:
    """h → h in place of attention or the FFN, with its norm fused in. The output is gathered.

    Megatron does not support it under sequence parallelism.
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
    gathered = (shapes.hidden("outputs of all ranks"), shapes.hidden("gathered output"))
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
    saves_16_bit: bool = False,
) -> Module:
    """width → h, where `width` is already divided by t. The bias is added later, together with dropout.

    `saves_16_bit`: also in FP8 the 16-bit input is saved, if the recipe supports it (`quantized.saves_original_input`).
    """
    h = shapes.model.hidden_size
    weight = split_weight(shapes, (h, width), full=(h, full_width))
    read = shapes.wide("input", width, symbol, shares=input_shares, made_in=input_made_in)
    original = saves_16_bit and saves_original_input(shapes)
    gathered = (shapes.hidden("gathered output gradient", gathered=True),) if shapes.sp else ()
    gradient = shapes.branch_gradient
    biases = (Parameter(name="bias", shape=(h,), dtype=shapes.dtype, sequence_parallel=shapes.sp),) if bias else ()
    return Module(
        name=name,
        kind=kind,
        parameters=(weight, *biases),
        saved=for_weight((read,) if original else saved_input(shapes, read)),
        forward_workspace=(
            *forward_input(shapes, read, original=original),
            shapes.hidden("output", gathered=True),
            *((shapes.hidden("scattered output"),) if shapes.sp else ()),
        ),
        backward_workspace=(
            *output_gradient(shapes, gradient, gathered=gathered, in_buffers=shapes.userbuffers),
            *for_weight(backward_input(shapes, read, original=original)),
            shapes.wide("input gradient", width, symbol),
            *weight_gradient(shapes, (h, width)),
        ),
        collectives=row_collectives(shapes),
        overlaps_collectives=shapes.userbuffers,
        source="TERowParallelLinear / RowParallelLinear",
    )
