"""Bias add, dropout and residual add in one operation. Source: megatron/core/fusions/fused_bias_dropout.py (0.16.1)."""

from __future__ import annotations

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.reduction import sum_buffer
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Tensor


def dropout_mask(shapes: Shapes) -> tuple[Tensor, ...]:
    """Dropout mask of the residual stream, one byte per element. Empty with `--hidden-dropout 0`."""
    return (shapes.hidden("dropout mask", dtype="bool"),) if shapes.model.hidden_dropout > 0 else ()


def bias_dropout_add(shapes: Shapes, name: str, kind: ModuleKind, *, biased: bool) -> Module:
    """residual + dropout(x + bias). Saves the mask. The norm that follows saves the output.

    Without fusion the sum with the bias and the output of the dropout are separate tensors. The caller references x meanwhile.
    """
    x = shapes.hidden("x")
    unfused: tuple[Tensor, ...] = ()
    if not shapes.model.bias_dropout_fusion:
        unfused = (shapes.hidden("x with bias"),) if biased else ()
        unfused += (shapes.hidden("dropout output"),) if shapes.model.hidden_dropout > 0 else ()
    gradient = (shapes.hidden("x gradient"),) if shapes.model.hidden_dropout > 0 else ()
    summed = biased and not shapes.model.bias_dropout_fusion  # the fused kernel needs little to sum it
    rows, mask = shapes.s_split * shapes.b, sum(each.bytes for each in dropout_mask(shapes))
    sums = sum_buffer(shapes, rows=rows, columns=shapes.model.hidden_size, freed=mask) if summed else ()
    return Module(
        name=name,
        kind=kind,
        function=True,
        saved=dropout_mask(shapes),
        forward_workspace=(x, *unfused, shapes.hidden("output", dtype=shapes.residual_dtype)),
        backward_workspace=(*gradient, *sums),
        source="bias_dropout_add_fused_train" if shapes.model.bias_dropout_fusion else "bias_dropout_add_unfused",
    )
