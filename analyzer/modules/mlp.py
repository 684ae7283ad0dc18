"""The feed-forward block: h → f → h. Source: core/transformer/mlp.py and core/fusions/fused_bias_*.py (0.16.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from analyzer.modules.checkpoints import holding_gradient
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import column_parallel, row_parallel
from analyzer.modules.norm import branch_norm
from analyzer.modules.reduction import sum_buffer
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import LAYER, Module, Tensor, largest
from analyzer.specs import ModelSpec


def saved_by_gate(model: ModelSpec, tensor: Callable[[str, int], Tensor], width: int) -> tuple[Tensor, ...]:
    """Tensors that a gated activation of `width` saves in addition to fc1's output. `tensor` maps name and width to a tensor.

    Fused kernels save only their input. That of the quick GeGLU of experts is a clamped copy if values are clamped; the others do
    not clamp. Unfused, the multiplication saves both factors: the activated gate, and the linear half if adding an offset allocates
    it.
    """
    if not model.gated:
        return ()
    if model.bias_activation_fusion:
        clamps = model.activation_clamped and model.activation == "quick_geglu"
        return (tensor("clamped fc1 output", 2 * width),) if clamps else ()
    clamped = (tensor("clamped gate", width),) if model.activation_clamped else ()
    linear = (tensor("linear half with its offset", width),) if model.glu_offset else ()
    return (*clamped, tensor("activated gate", width), *linear)


def saves_half(model: ModelSpec) -> bool:
    """Whether a gated activation saves its input as a view: half of each row. A fused kernel saves the whole tensor."""
    return model.gated and not model.bias_activation_fusion


def activates_sum(model: ModelSpec) -> bool:
    """Whether the bias is added before the activation, which saves the sum. fc1's output is freed then."""
    return model.bias_linear and not model.bias_activation_fusion


def activation(shapes: Shapes, *, width: int, wide: int) -> Module:
    """The nonlinearity. `wide` is the input width (2·f/t if gated), `width` the output width (f/t)."""
    model = shapes.model
    symbol = "2·f/t" if model.gated else "f/t"
    gate = saved_by_gate(model, lambda name, elements: shapes.wide(name, elements, "f/t"), width)
    biased = activates_sum(model)
    read = shapes.wide("biased fc1 output" if biased else "fc1 output", wide, symbol, made_in="" if biased else "mlp.linear_fc1")
    read = replace(read, strided=saves_half(model))
    freed = sum(each.bytes for each in (read, *gate)) if biased else 0
    return Module(
        name="activation_func",
        kind=ModuleKind.ACTIVATION,
        function=True,
        saved=(read, *gate),
        forward_workspace=(shapes.wide("output", width, "f/t"),),
        backward_workspace=_backward_of_activation(shapes, width=width, wide=wide, symbol=symbol, freed=freed),
        source=f"{model.activation}, {'fused' if model.bias_activation_fusion else 'unfused'}",
    )


def _backward_of_activation(shapes: Shapes, *, width: int, wide: int, symbol: str, freed: int) -> tuple[Tensor, ...]:
    """The gradients of its output and its input, or that of its input while autograd sums it over the tokens for the bias.

    `freed`: bytes of the saved tensors that are freed before that sum, if the bias is added in an operation of its own.
    """
    gradient = shapes.wide("fc1 output gradient", wide, symbol)
    both = (shapes.wide("output gradient", width, "f/t"), gradient)
    if not shapes.model.bias_linear:
        return both
    sums = sum_buffer(shapes, rows=shapes.s * shapes.b, columns=wide, freed=freed)
    return largest(both, (gradient, *sums))


def mlp(shapes: Shapes, *, fused_norm: bool, input_made_in: str = LAYER, input_shares: str = "") -> Module:
    """[s, b, h] → [s, b, h]; under a checkpoint with `--recompute-modules mlp`.

    `input_made_in` and `input_shares` describe the tensor that the fused norm reads.
    """
    model = shapes.model
    width = model.ffn_hidden_size // shapes.t
    gates = 2 if model.gated else 1
    reads_sum = fused_norm or model.norm_modules == "none"  # otherwise the output of a norm
    source = input_made_in if reads_sum else "pre_mlp_layernorm"
    shared = input_shares if reads_sum else ""
    children: tuple[Module, ...] = (
        column_parallel(
            shapes,
            "linear_fc1",
            ModuleKind.FC1,
            width=gates * width,
            full_width=gates * model.ffn_hidden_size,
            symbol="2·f/t" if model.gated else "f/t",
            bias=model.bias_linear,
            fused_norm=fused_norm,
            input_made_in=source,
            input_shares="mlp input" if shapes.recomputes("mlp") and reads_sum else shared,
        ),
        activation(shapes, width=width, wide=gates * width),
        row_parallel(
            shapes,
            "linear_fc2",
            ModuleKind.FC2,
            width=width,
            full_width=model.ffn_hidden_size,
            symbol="f/t",
            bias=model.bias_linear,
            input_made_in="mlp",
        ),
    )
    if model.branch_norms:
        name = "linear_fc2.post_layernorm" if model.norms_in_projections else "post_mlp_layernorm"
        children += (branch_norm(shapes, name, input_made_in="mlp.linear_fc2"),)
    if not shapes.recomputes("mlp"):
        return Module(name="mlp", kind=ModuleKind.FEED_FORWARD, children=children)
    held, inside = holding_gradient(shapes, children)
    return Module(
        name="mlp",
        kind=ModuleKind.FEED_FORWARD,
        saved=(shapes.hidden("mlp input", dtype=shapes.residual_dtype, made_in=source),),
        backward_workspace=held,
        recomputed_last=shapes.recomputed_output,
        children=inside,
        recomputed=True,
        source="tensor_parallel.checkpoint around MLP",
    )
