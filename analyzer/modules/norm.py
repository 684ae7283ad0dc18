"""Normalization: parameters, saved statistics, and standalone norms. Transformer Engine fuses the norms before qkv and fc1."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.quantized import element
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import OUTPUT_GRADIENT, Module, Parameter, Tensor

PARTIAL_SUMS: Final = "partial sums of the norm's gradients"
"""Name of the workspace of the backward of a norm. Cached dummy gradients of a layer are allocated after it is freed."""
OPERATIONS: Final = "transformer_engine.pytorch.ops"
"""Package of the operation-based norms."""


def norm_parameters(shapes: Shapes, width: int, *, prefix: str = "", always_summed: bool = False) -> tuple[Parameter, ...]:
    """Weight, and bias for LayerNorm, of `width` elements each, replicated over tensor-parallel ranks.

    `always_summed`: q/k norms, whose gradients are summed over tensor-parallel ranks even without sequence
    parallelism (core/distributed/finalize_model_grads.py, 0.16.1).
    """
    names = ("weight", "bias") if shapes.model.normalization == "LayerNorm" else ("weight",)
    return tuple(
        Parameter(
            name=f"{prefix}{name}",
            shape=(width,),
            dtype=shapes.dtype,
            sequence_parallel=shapes.t > 1 and (shapes.sp or always_summed),
        )
        for name in names
    )


def norm_statistics(shapes: Shapes, rows: int, symbol: str) -> tuple[Tensor, ...]:
    """Saved fp32 statistics, [rows] each: mean and 1/σ for LayerNorm, 1/σ for RMSNorm.

    Source: transformer_engine/pytorch/module/_common.py apply_normalization (TE 2.11).
    """
    inverse = shapes.statistics("rsigma", rows, symbol)
    if shapes.model.normalization == "LayerNorm":
        return (shapes.statistics("mu", rows, symbol), inverse)
    return (inverse,)


def partial_sums(shapes: Shapes, width: int) -> tuple[Tensor, ...]:
    """Sums of the weight gradients of each thread block, in the backward of Transformer Engine's norms: one fp32 row per block.

    Source: `dgamma_part` and `dbeta_part` in transformer_engine/common/normalization/layernorm/ln_api.cpp.
    """
    if shapes.model.implementation != "transformer_engine" or shapes.model.norm_modules == "torch":
        return ()
    rows = (2 if shapes.model.normalization == "LayerNorm" else 1) * (shapes.inputs.multiprocessors)
    return (Tensor(name=PARTIAL_SUMS, shape=(rows, width), dtype="fp32", formula="4·SMs·h"),)


def fused_norm_backward(shapes: Shapes, normalized: Tensor, width: int) -> tuple[Tensor, ...]:
    """Memory of the backward of a fused norm beyond that of its layer's GEMMs: what it allocates, minus what the GEMMs free.

    The GEMMs free the saved copy of the `normalized` input. In 16 bit it is as large as the gradient of the norm's input, in FP8
    half as large. A delayed GEMM frees nothing.
    """
    sums = partial_sums(shapes, width)
    if shapes.inputs.delays_weight_gradients:
        return (replace(normalized, name="norm input gradient", made_in="", shares=""), *sums)
    if shapes.fp8 is None:
        return sums
    kind = element(shapes.fp8.recipe)
    return (Tensor(name="norm input gradient, beyond the freed copy", shape=normalized.shape, dtype=kind), *sums)


def branch_norm(shapes: Shapes, name: str, *, input_made_in: str) -> Module:
    """The norm of the output of attention or FFN, which it saves. The sum with the residual reads its output and saves nothing.

    Its output gradient is that of the residual stream, or with dropout one that the sum allocates.
    Source: Glm4SelfAttention and Glm4MLP of mcore-bridge 1.6 (model/gpts/glm4.py), and TERowParallelLinearLayerNorm of
    Megatron-Bridge (models/common/te_layers.py, August 2026).
    """
    rows = shapes.s_split * shapes.b
    gradient = shapes.hidden(OUTPUT_GRADIENT, shares="" if shapes.model.hidden_dropout > 0 else "residual gradient")
    return Module(
        name=name,
        kind=ModuleKind.NORM,
        parameters=norm_parameters(shapes, shapes.model.hidden_size),
        saved=(
            shapes.hidden("input", made_in=input_made_in),
            *norm_statistics(shapes, rows, "4·s·b/t" if shapes.sp else "4·s·b"),
        ),
        forward_workspace=(shapes.hidden("output"),),
        backward_workspace=(
            gradient,
            shapes.hidden("input gradient"),
            *partial_sums(shapes, shapes.model.hidden_size),
        ),
        source=f"{OPERATIONS}.RMSNorm",
    )


def standalone_norm(
    shapes: Shapes, name: str, kind: ModuleKind = ModuleKind.NORM, *, input_made_in: str, input_shares: str = ""
) -> Module:
    """A norm of the residual stream as a separate module. The linear layer that follows saves its output.

    Source: core/transformer/transformer_layer.py input_layernorm, transformer_engine/pytorch/ops/basic/layer_norm.py.
    """
    rows = shapes.s_split * shapes.b
    output = shapes.hidden("output")
    gradient = shapes.hidden("input gradient")
    statistics = norm_statistics(shapes, rows, "4·s·b/t" if shapes.sp else "4·s·b")
    recomputed = kind is not ModuleKind.FINAL_NORM and shapes.recomputes("layernorm")  # then its statistics are recomputed too
    return Module(
        name=name,
        kind=kind,
        parameters=norm_parameters(shapes, shapes.model.hidden_size),
        saved=(
            shapes.hidden("input", dtype=shapes.residual_dtype, shares=input_shares, made_in=input_made_in),
            *(() if recomputed else statistics),
        ),
        forward_workspace=(*(statistics if recomputed else ()), output),
        backward_workspace=(
            *(statistics if recomputed else ()),
            shapes.hidden(OUTPUT_GRADIENT),
            gradient,
            *partial_sums(shapes, shapes.model.hidden_size),
        ),
        source=f"megatron.core.transformer.torch_norm / {OPERATIONS}.LayerNorm",
    )
