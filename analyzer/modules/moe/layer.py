"""A MoE layer instead of the dense FFN: router, routed experts, shared experts.

Source: core/transformer/moe/{moe_layer,router,experts,shared_experts}.py (0.16.1). Symbols as in routing.py.
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.checkpoints import holding_gradient, moe_checkpoint_leftovers
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import weight_gradient
from analyzer.modules.moe.dispatchers import combined_tensors, dispatched_tensors, dispatcher, returned_gradients
from analyzer.modules.moe.experts import experts
from analyzer.modules.moe.router import router
from analyzer.modules.moe.routing import LATENT_ROWS, SHARED_GRADIENT, Routing, shared_output
from analyzer.modules.moe.shared_experts import overlapped_gate, shared_experts, unsaved_activation
from analyzer.modules.quantized import forward_input, output_gradient, saved_input
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import Module, Parameter, Tensor, for_weight


def moe_layer(shapes: ExpertShapes) -> Module:
    """[s, b, h] → [s, b, h], after a separate norm; under a checkpoint with `--recompute-modules moe`."""
    routing = Routing(shapes)
    shared = (shared_experts(shapes),) if routing.moe.shared_ffn_hidden_size else ()
    gates = routing.moe.shared_gate and routing.moe.shared_overlap
    gate = (overlapped_gate(shapes, beside=returned_gradients(routing)),) if gates else ()
    latent, projected = _latent_projections(shapes), _projected_tokens(routing)
    before_fc2 = unsaved_activation(shapes)
    dispatch, combine = dispatcher(shapes)
    overlapped = routing.moe.shared_overlap  # then the dispatcher calls them
    inside = (
        *(() if overlapped else shared),
        router(shapes),
        *latent[:1],
        *(shared if overlapped else ()),
        _referencing((*projected, *before_fc2), _keeping_gradient(routing, dispatch, before_fc2)),
        _keeping_gradient(routing, experts(shapes, dispatched=(*dispatched_tensors(routing), *projected, *before_fc2)), before_fc2),
        _referencing(projected, combine),
        *gate,
        *latent[1:],
    )
    dropped, recomputed = shapes.dropped_norm_output, shapes.recomputed_norm_output
    if not shapes.recomputes("moe"):
        return Module(
            name="mlp",
            kind=ModuleKind.FEED_FORWARD,
            forward_workspace=dropped,
            backward_workspace=recomputed,
            children=inside,
            source="MoELayer",
        )
    held, inside = holding_gradient(shapes, inside)
    saved = shapes.hidden("MoE layer input", made_in="pre_mlp_layernorm", shares=dropped[0].name if dropped else "")
    return Module(
        name="mlp",
        kind=ModuleKind.FEED_FORWARD,
        saved=(replace(saved, lingers=not dropped),),
        outlives=moe_checkpoint_leftovers(shapes.hidden)[1 if not dropped else 0 :],
        forward_workspace=dropped,
        backward_workspace=(*held, *recomputed),
        recomputed_last=shapes.recomputed_output,
        children=inside,
        recomputed=True,
        source="tensor_parallel.checkpoint around MoELayer",
    )


def _keeping_gradient(routing: Routing, module: Module, of_activation: tuple[Tensor, ...]) -> Module:
    """`module` with a gradient in its backward that the shared experts read later: of the layer's output.

    With `--moe-shared-expert-overlap` the backward of fc2 has run, and it is `of_activation`.
    """
    kept = of_activation
    if shared_output(routing) and not routing.shapes.recomputes("moe"):
        kept = (replace(routing.shapes.branch_gradient, name=SHARED_GRADIENT),)
    return replace(module, backward_workspace=(*module.backward_workspace, *kept)) if kept else module


def _projected_tokens(routing: Routing) -> tuple[Tensor, ...]:
    """[T, latent]: the output of the first latent projection, which `custom_forward` of `MoELayer` references until it returns.

    The all-to-all dispatcher returns permuted tokens instead (`dispatch_preprocess`).
    """
    if not routing.moe.latent_size or routing.moe.dispatcher == "alltoall":
        return ()
    return (routing.row_tensor(LATENT_ROWS, routing.tokens),)


def _referencing(tensors: tuple[Tensor, ...], module: Module) -> Module:
    """`module` with tensors that local variables reference in its forward."""
    return replace(module, forward_workspace=(*module.forward_workspace, *tensors)) if tensors else module


def _latent_projections(shapes: ExpertShapes) -> tuple[Module, ...]:
    """h → latent before dispatch, and latent → h after combine, unsharded on every rank."""
    routing = Routing(shapes)
    latent, h = routing.moe.latent_size, shapes.model.hidden_size
    if not latent:
        return ()

    def one(name: str, kind: ModuleKind, rows: int, columns: int, read: Tensor) -> Module:
        quantized = shapes.fp8 is not None
        weight = Parameter(
            name="weight", shape=(rows, columns), dtype=shapes.dtype, sequence_parallel=shapes.sp, quantized=quantized
        )
        bias = Parameter(name="bias", shape=(rows,), dtype=shapes.dtype, sequence_parallel=shapes.sp)
        output = Tensor(name="output", shape=(routing.tokens, rows), dtype=shapes.dtype, formula="T rows")
        output_grad, input_grad = (
            Tensor(name=name, shape=(routing.tokens, width), dtype=shapes.dtype, formula="T rows")
            for name, width in (("output gradient", rows), ("input gradient", columns))
        )
        if rows == h:  # the output of the MoE layer
            output_grad = replace(output_grad, shares=shapes.branch_gradient.shares)
        return Module(
            name=name,
            kind=kind,
            parameters=(weight, *((bias,) if shapes.model.bias_linear else ())),
            saved=for_weight(saved_input(shapes, read)),
            forward_workspace=(*forward_input(shapes, read), output),
            backward_workspace=(*output_gradient(shapes, output_grad), input_grad, *weight_gradient(shapes, (rows, columns))),
        )

    combined = Tensor(name="input", shape=(routing.tokens, latent), dtype=shapes.dtype, formula="T·latent", made_in="mlp")
    shared = shared_output(routing)
    total = (shapes.hidden("output with that of the shared experts"),) if shared else ()
    referenced = (*combined_tensors(routing), *_projected_tokens(routing), *shared, *total)
    return (
        _referencing(
            shared, one("fc1_latent_proj", ModuleKind.MOE_LATENT_DOWN, latent, h, shapes.hidden("input", shares="router input"))
        ),
        _referencing(referenced, one("fc2_latent_proj", ModuleKind.MOE_LATENT_UP, h, latent, combined)),
    )
