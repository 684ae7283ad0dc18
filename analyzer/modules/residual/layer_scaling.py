"""Layers whose branches are multiplied by a learned vector before the residual is added.

Source: examples/multimodal/layer_scaling.py (0.16.1).
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.kinds import FEED_FORWARD_BRANCH, RESIDUAL_ADDS
from analyzer.modules.reduction import sum_buffer
from analyzer.modules.residual.dropout import dropout_mask
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Parameter, Tensor, for_weight, largest


def scaled_layer(shapes: Shapes, layer: Module) -> Module:
    """The layer with the two vectors, which are parameters of its own (`LayerScalingTransformerLayer`).

    Unfused norms save a copy of their input. Then local variables alone reference the residual stream: the input of the layer until
    it returns, and the sum after attention until the FFN has been added.
    """
    width = (shapes.model.hidden_size,)
    vectors = tuple(Parameter(name=name, shape=width, dtype=shapes.dtype) for name in ("ls1", "ls2"))
    children = tuple(_scaled_add(shapes, each) if each.kind in RESIDUAL_ADDS else each for each in layer.children)
    held: tuple[Tensor, ...] = ()
    if shapes.model.norm_modules == "unfused" and shapes.dtype != "fp32":
        held = (shapes.hidden("input of the layer"),)
        stream = shapes.hidden("residual stream")
        children = tuple(
            replace(each, forward_workspace=(*each.forward_workspace, stream)) if each.kind in FEED_FORWARD_BRANCH else each
            for each in children
        )
    return replace(
        layer,
        parameters=vectors,
        children=children,
        forward_workspace=(*layer.forward_workspace, *held),
        recompute_workspace=layer.forward_workspace if held else None,
        source="examples.multimodal.layer_scaling.LayerScalingTransformerLayer",
    )


def _scaled_add(shapes: Shapes, module: Module) -> Module:
    """residual + dropout(x + bias) · scale. The gradient of the scale reads the factor.

    Each product of the backward has the size of the stream, also the one that is summed over the tokens.
    """
    drops = shapes.model.hidden_dropout > 0
    factor = shapes.hidden("scaled output")
    before = (shapes.hidden("x with bias"),) if drops else ()
    rows, width = shapes.s * shapes.b, shapes.model.hidden_size
    products = (shapes.hidden("gradient of the output"), *for_weight((shapes.hidden("gradients of the scale"),)))
    scale = (*products, *sum_buffer(shapes, rows=rows, columns=width))
    mask = sum(each.bytes for each in dropout_mask(shapes))
    dropped = (shapes.hidden("x gradient"),) if drops else ()
    bias = (shapes.hidden("x gradient"), *sum_buffer(shapes, rows=rows, columns=width, freed=factor.bytes + mask))
    return replace(
        module,
        saved=(*dropout_mask(shapes), *for_weight((factor,))),
        forward_workspace=(shapes.hidden("x"), *before, shapes.hidden("scaled"), shapes.hidden("output")),
        backward_workspace=largest(scale, (products[0], *dropped), bias),
        source="bias_dropout_add_unfused_layer_scaling",
    )


def is_scaled_add(module: Module) -> bool:
    """Whether a residual add multiplies the branch by a vector."""
    return module.source == "bias_dropout_add_unfused_layer_scaling"
