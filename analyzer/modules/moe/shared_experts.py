"""Shared experts of a mixture: a dense block beside the routed ones.

Source: core/transformer/moe/{shared_experts,moe_layer}.py (0.16.1). fs is the width of all of them together.
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import column_collectives, row_collectives, split_weight, weight_gradient
from analyzer.modules.mlp import kept_by_gate
from analyzer.modules.moe.routing import Routing
from analyzer.modules.quantized import backward_input, forward_input, keeps_original, kept_input, output_gradient
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Parameter, Tensor


def shared_experts(shapes: Shapes) -> Module:
    """A dense block beside the routed experts, on the same input, split like any other over tensor-parallel ranks."""
    routing = Routing(shapes)
    moe, model = routing.moe, shapes.model
    assert moe.shared_ffn_hidden_size is not None
    full = moe.shared_ffn_hidden_size
    width = full // shapes.t
    gates = 2 if model.gated else 1
    h = model.hidden_size
    gathered = (shapes.hidden("gathered input", gathered=True),) if shapes.sp else ()
    gate = (
        (Parameter(name="gate_weight", shape=(1, h), dtype=shapes.dtype, sequence_parallel=shapes.sp),) if moe.shared_gate else ()
    )
    read = shapes.wide("fc1 output", gates * width, "2·fs/t" if model.gated else "fs/t", made_in="mlp.shared_experts.linear_fc1")
    activated = kept_by_gate(model, lambda name, elements: shapes.wide(name, elements, "fs/t"), width)
    name = "input of the shared experts"
    read_first = shapes.hidden(name, made_in="pre_mlp_layernorm", shares=shapes.keeper_of_moe_input)
    kept = shapes.hidden("input", shares=name)
    original = keeps_original(shapes)
    apart = moe.shared_overlap  # then the dispatcher calls its parts, and its linear layers exchange nothing themselves
    caller = "mlp" if apart else "mlp.shared_experts"
    product = shapes.wide("input", width, "fs/t", made_in=caller)
    there, back = column_collectives(shapes), row_collectives(shapes)
    if apart and shapes.sp:  # the whole input is kept, and not gathered again
        kept, gathered = shapes.hidden("input", gathered=True, made_in=caller), ()
        there = (*shapes.tp("all_gather", "forward"), *shapes.tp("reduce_scatter", "backward"))
        back = (*shapes.tp("reduce_scatter", "forward"), *shapes.tp("all_gather", "backward"))
    inside: tuple[Module, ...] = (
        Module(
            name="linear_fc1",
            kind=ModuleKind.FC1,
            parameters=(split_weight(shapes, (gates * width, h), full=(gates * full, h)),),
            saved=(kept,) if original else kept_input(shapes, kept, gathered=shapes.sp and not apart),
            forward_workspace=(*forward_input(shapes, kept, gathered=gathered, original=original), read),
            backward_workspace=(
                *output_gradient(shapes, shapes.wide("output gradient", gates * width, "fs/t")),
                *backward_input(shapes, kept, gathered=gathered, original=original),
                shapes.hidden("input gradient", gathered=True),
                *weight_gradient(shapes, (gates * width, h)),
            ),
            collectives=there,
            source="TEColumnParallelLinear",
        ),
        Module(
            name="activation_func",
            kind=ModuleKind.ACTIVATION,
            function=True,
            saved=(read, *activated),
            forward_workspace=(shapes.wide("output", width, "fs/t"),),
            backward_workspace=(
                shapes.wide("output gradient", width, "fs/t"),
                shapes.wide("fc1 output gradient", gates * width, "fs/t"),
            ),
        ),
        Module(
            name="linear_fc2",
            kind=ModuleKind.FC2,
            parameters=(split_weight(shapes, (h, width), full=(h, full)),),
            saved=kept_input(shapes, product),
            forward_workspace=(*forward_input(shapes, product), shapes.hidden("output", gathered=True)),
            backward_workspace=(
                *_shared_output_gradient(shapes),
                shapes.wide("input gradient", width, "fs/t"),
            ),
            collectives=back,
            source="TERowParallelLinear",
        ),
    )
    if moe.shared_gate:
        inside = (*inside, _gate(shapes, made_in=caller))
    recomputed = shapes.recomputes("shared_experts")
    return Module(
        name="shared_experts",
        kind=ModuleKind.SHARED_EXPERTS,
        parameters=gate,
        saved=(read_first,),
        backward_workspace=(shapes.hidden("input gradient of the routed experts"), *(shapes.made_again if recomputed else ())),
        children=inside,
        recomputed=recomputed,
        source="SharedExpertMLP",
    )


def _gate(shapes: Shapes, *, made_in: str) -> Module:
    """The product of the output and a score of each token, [s, b, 1]: it keeps both."""
    score = Tensor(name="gate score", shape=(shapes.s, shapes.b, 1), dtype=shapes.dtype, formula="2·s·b", made_in=made_in)
    output = shapes.hidden("output", made_in=made_in)
    return Module(
        name="gate",
        function=True,
        saved=(output, score),
        forward_workspace=(shapes.hidden("weighted output"),),
        backward_workspace=(shapes.hidden("output gradient"), shapes.hidden("input gradient")),
        source="SharedExpertMLP with use_shared_expert_gate",
    )


def _shared_output_gradient(shapes: Shapes) -> tuple[Tensor, ...]:
    """The gradient of the shared experts' output, the whole of it. Its shard is the gradient of the layer's output."""
    whole = shapes.hidden("gathered output gradient", gathered=True)
    if not shapes.sp:
        return output_gradient(shapes, whole)
    return output_gradient(shapes, replace(whole, name="output gradient", shares="residual gradient"), gathered=(whole,))
