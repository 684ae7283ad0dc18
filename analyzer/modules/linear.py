"""Column- and row-parallel linear layers: what they save, need and send.

Sources: transformer_engine/pytorch/module/{linear,layernorm_linear}.py (TE 2.11), and
megatron/core/tensor_parallel/layers.py (0.16.1) for the local implementation, which saves the same tensors.
"""

from __future__ import annotations

from analyzer.modules.norm import norm_parameters, norm_statistics
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module, Parameter, Tensor


def weight_gradient(shapes: Shapes, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    """The gradient of a weight before it is added to main_grad; none where the GEMM accumulates into it.

    With `--no-gradient-accumulation-fusion` autograd makes a tensor of the weight's size, which the hook of
    DistributedDataParallel adds to main_grad and drops.
    """
    if shapes.launch.runtime.gradient_accumulation_fusion:
        return ()
    return (Tensor(name="weight gradient", shape=shape, dtype=shapes.dtype, formula="one weight"),)


def column_collectives(shapes: Shapes) -> tuple[Collective, ...]:
    """Messages of a layer whose output is split over tensor-parallel ranks (facts: Korthikanti et al. 2022, figure 5).

    Under sequence parallelism the shard of the input is saved, so it is gathered again for the weight gradient.
    """
    if shapes.sp:
        return (
            *shapes.tp("all_gather", "forward"),
            *shapes.tp("all_gather", "backward"),
            *shapes.tp("reduce_scatter", "backward"),
        )
    return shapes.tp("all_reduce", "backward")


def row_collectives(shapes: Shapes) -> tuple[Collective, ...]:
    """Messages of a layer whose input is split over tensor-parallel ranks."""
    if shapes.sp:
        return (*shapes.tp("reduce_scatter", "forward"), *shapes.tp("all_gather", "backward"))
    return shapes.tp("all_reduce", "forward")


def column_parallel(
    shapes: Shapes,
    name: str,
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
    if fused_norm:
        saved: tuple[Tensor, ...] = (
            shapes.hidden("input", dtype=shapes.residual_dtype, shares=input_shares, made_in=input_made_in),
            shapes.hidden("normalized input"),
            *norm_statistics(shapes, rows, "4·s·b/t" if shapes.sp else "4·s·b"),
        )
    elif shapes.recomputes("layernorm"):
        saved = (shapes.hidden("input", shares="recomputed norm output"),)
        gathered = (*gathered, shapes.hidden("recomputed norm output"))
    else:
        saved = (shapes.hidden("input", made_in=input_made_in),)
    norm = norm_parameters(shapes, h, prefix="layer_norm_") if fused_norm else ()
    weight = Parameter(name="weight", shape=(width, h), dtype=shapes.dtype, sharding="tensor", full_shape=(full_width, h))
    row = Parameter(name="bias", shape=(width,), dtype=shapes.dtype, sharding="tensor", full_shape=(full_width,))
    return Module(
        name=name,
        parameters=(*norm, weight, *((row,) if bias else ())),
        saved=saved,
        forward_workspace=(*gathered, output),
        backward_workspace=(
            shapes.wide("output gradient", width, symbol),
            *gathered,
            shapes.hidden("input gradient", gathered=True),
            *((shapes.hidden("scattered input gradient"),) if shapes.sp else ()),
            *weight_gradient(shapes, (width, h)),
        ),
        collectives=column_collectives(shapes),
        source="TELayerNormColumnParallelLinear" if fused_norm else "ColumnParallelLinear",
    )


def row_parallel(
    shapes: Shapes,
    name: str,
    *,
    width: int,
    full_width: int,
    symbol: str,
    bias: bool,
    input_made_in: str,
    input_shares: str = "",
) -> Module:
    """width → h, `width` already divided by t. Its bias is added later, with the dropout."""
    h = shapes.model.hidden_size
    weight = Parameter(name="weight", shape=(h, width), dtype=shapes.dtype, sharding="tensor", full_shape=(h, full_width))
    biases = (Parameter(name="bias", shape=(h,), dtype=shapes.dtype, sequence_parallel=shapes.sp),) if bias else ()
    return Module(
        name=name,
        parameters=(weight, *biases),
        saved=(shapes.wide("input", width, symbol, shares=input_shares, made_in=input_made_in),),
        forward_workspace=(
            shapes.hidden("output", gathered=True),
            *((shapes.hidden("scattered output"),) if shapes.sp else ()),
        ),
        backward_workspace=(
            shapes.hidden("output gradient", shares="" if shapes.model.hidden_dropout > 0 else "residual gradient"),
            *((shapes.hidden("gathered output gradient", gathered=True),) if shapes.sp else ()),
            shapes.wide("input gradient", width, symbol),
            *weight_gradient(shapes, (h, width)),
        ),
        collectives=row_collectives(shapes),
        source="TERowParallelLinear / RowParallelLinear",
    )
