"""Normalization: parameters, saved statistics, and standalone norms. Transformer Engine fuses the norms before qkv and fc1."""

from __future__ import annotations

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Parameter, Tensor


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


def standalone_norm(
    shapes: Shapes, name: str, kind: ModuleKind = ModuleKind.OTHER, *, input_made_in: str, input_shares: str = ""
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
        backward_workspace=(*(statistics if recomputed else ()), shapes.hidden("output gradient"), gradient),
        source="megatron.core.transformer.torch_norm / transformer_engine.pytorch.ops.LayerNorm",
    )
