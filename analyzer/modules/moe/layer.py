"""A mixture of experts in the place of the feed-forward block: router, routed experts, shared experts.

Source: core/transformer/moe/{moe_layer,router,experts,shared_experts}.py (0.16.1). Symbols as in dispatch.py; fm is the
width of one expert, fs of the shared experts together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from analyzer.modules.linear import weight_gradient
from analyzer.modules.mlp import kept_by_gate
from analyzer.modules.moe.alltoall import Routing, combine, dispatch, dispatched, shared_output
from analyzer.modules.moe.shared_experts import shared_experts
from analyzer.modules.quantized import Split, backward_input, forward_input, kept_input, output_gradient
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module, Parameter, Tensor


def moe_layer(shapes: Shapes) -> Module:
    """[s, b, h] → [s, b, h], after a norm of its own; under a checkpoint with `--recompute-modules moe`."""
    routing = Routing(shapes)
    shared = (shared_experts(shapes),) if routing.moe.shared_ffn_hidden_size else ()
    latent = _latent_projections(shapes)
    there, back = _dispatcher(shapes)
    inside = (*shared, router(shapes), *latent[:1], there, experts(shapes), back, *latent[1:])
    once, again = shapes.dropped_norm_output, shapes.norm_output_made_again
    if not shapes.recomputes("moe"):
        return Module(name="mlp", forward_workspace=once, backward_workspace=again, children=inside, source="MoELayer")
    kept = shapes.hidden("mixture input", made_in="pre_mlp_layernorm", shares=once[0].name if once else "")
    return Module(
        name="mlp",
        saved=(replace(kept, lingers=not once),),
        outlives=named_by_probabilities(shapes)[1 if not once else 0 :],
        forward_workspace=once,
        backward_workspace=(*again, *shapes.made_again),
        children=inside,
        recomputed=True,
        source="tensor_parallel.checkpoint around MoELayer",
    )


def named_by_probabilities(shapes: Shapes) -> tuple[Tensor, ...]:
    """What the probabilities that a dispatcher names lead back to under a checkpoint: its input, and the gradient of that."""
    return (shapes.hidden("input of the checkpoint"), shapes.hidden("gradient of the checkpoint's input"))


def _dispatcher(shapes: Shapes) -> tuple[Module, Module]:
    """The way to the experts, and the way back."""
    dispatcher = Routing(shapes).moe.dispatcher
    if dispatcher == "flex":
        from analyzer.modules.moe.flex import flex  # a millisecond that most launches need not spend

        return flex(shapes)
    if dispatcher == "allgather":
        from analyzer.modules.moe.allgather import allgather_combine, allgather_dispatch  # likewise

        return allgather_dispatch(shapes), allgather_combine(shapes)
    return dispatch(shapes), combine(shapes)


def router(shapes: Shapes) -> Module:
    """Token → its k experts and their weights. Keeps its input, and what top-k and softmax need for backward."""
    routing = Routing(shapes)
    moe = routing.moe
    model = shapes.model
    per_expert = (routing.tokens, moe.num_experts)
    weight = Parameter(name="weight", shape=(moe.num_experts, model.hidden_size), dtype=shapes.dtype, sequence_parallel=shapes.sp)
    bias = (Parameter(name="bias", shape=(moe.num_experts,), dtype=shapes.dtype, sequence_parallel=shapes.sp),)
    in_fp32 = _in_router_type(routing, "input in the router's type")
    whole_scores = moe.pre_softmax or moe.score_function == "sigmoid"
    scored, formula = (per_expert, "4·T·E") if whole_scores else ((routing.tokens, moe.topk), "4·T·k")
    # sigmoid scores are divided by the sum of those of the chosen experts
    divided = moe.score_function == "sigmoid" and moe.topk > 1
    chosen = (Tensor(name="chosen scores", shape=(routing.tokens, moe.topk), dtype="fp32", formula="4·T·k"),) if divided else ()
    choice: tuple[Tensor, ...] = (Tensor(name="chosen experts", shape=(routing.tokens, moe.topk), dtype="int64", formula="8·T·k"),)
    handed_on = (
        Tensor(name="probabilities", shape=per_expert, dtype=routing.probability_dtype, formula="T·E"),
        Tensor(name="routing map", shape=per_expert, dtype="bool", formula="T·E"),
    )
    kept: tuple[Tensor, ...] = (Tensor(name="scores", shape=scored, dtype="fp32", formula=formula), *chosen)
    if "sinkhorn" in moe.load_balancing:  # the map that scores are multiplied with, and of one expert scores in their own type
        one = moe.topk == 1
        kept = (
            Tensor(name="scores", shape=per_expert, dtype=routing.probability_dtype if one else "fp32", formula="T·E"),
            handed_on[1],
        )
        choice = ()
    logits = Tensor(name="logits", shape=per_expert, dtype=routing.probability_dtype, formula="T·E")
    balance = (Tensor(name="scores of the auxiliary loss", shape=per_expert, dtype="fp32", formula="4·T·E"),)
    first = "input of the shared experts" if moe.shared_ffn_hidden_size else shapes.keeper_of_mixture_input
    return Module(
        name="router",
        parameters=(weight, *(bias if model.bias_linear else ())),
        saved=(
            shapes.hidden("input", made_in="pre_mlp_layernorm", shares=first),
            *kept,
            *((logits,) if moe.z_loss_coeff else ()),  # of their logsumexp
            *(balance if moe.aux_loss_coeff else ()),
            *choice,
        ),
        named=() if moe.dispatcher == "allgather" else handed_on,  # by the dispatcher
        forward_workspace=(
            logits,
            *in_fp32,
            *shared_output(routing),
        ),
        backward_workspace=(
            shapes.hidden("token gradient"),  # of the dispatched tokens, to which that of the router is added
            Tensor(name="logits gradient", shape=per_expert, dtype=routing.probability_dtype, formula="T·E"),
            shapes.hidden("input gradient"),
            *in_fp32,
        ),
        collectives=tuple(_balance_messages(routing)),
        source="TopKRouter",
    )


def _in_router_type(routing: Routing, name: str) -> tuple[Tensor, ...]:
    """A copy of the input, or its gradient, where the router multiplies in another type than the parameters'.

    `RouterGatingLinearFunction` (moe_utils.py) would let Transformer Engine mix the types, but 2.11 has no `get_workspace`.
    """
    if routing.probability_dtype == routing.shapes.dtype:
        return ()
    return (routing.shapes.hidden(name, dtype=routing.probability_dtype),)


def _balance_messages(routing: Routing) -> Iterator[Collective]:
    """Tokens of each expert, summed for each auxiliary loss: over the sequence, or for the global loss over all replicas."""
    moe = routing.moe
    counts = {"aux_loss": moe.num_experts, "seq_aux_loss": routing.shapes.b * moe.num_experts, "global_aux_loss": moe.num_experts}
    for kind in moe.load_balancing:
        if moe.aux_loss_coeff and kind in counts:
            group = "tp_dp_cp" if kind == "global_aux_loss" else "tp_cp"
            yield routing.message("all_reduce", group, (counts[kind],), "int64", "forward")


def _expert_weight(routing: Routing, *, rows: int, columns: int, full: tuple[int, int]) -> Parameter:
    """Weights of all local experts of a layer: [E/ep, rows, columns]."""
    return Parameter(
        name="weight",
        shape=(routing.local_experts, rows, columns),
        dtype=routing.shapes.dtype,
        sharding="expert",
        full_shape=(routing.moe.num_experts, *full),
        quantized=routing.shapes.fp8 is not None,
        pieces=1 if routing.moe.legacy_grouped_gemm else routing.local_experts,
    )


def _weight_gradients(routing: Routing, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    """A grouped GEMM returns the gradients of all local experts at once; without it they come one by one."""
    [*one] = weight_gradient(routing.shapes, shape)
    if not one:
        return ()
    count = routing.local_experts if routing.moe.grouped_gemm else 1
    return (
        Tensor(name="weight gradients", shape=(count, *shape), dtype=routing.shapes.dtype, formula="weights of the local experts"),
    )


def experts(shapes: Shapes) -> Module:
    """Rows [R, hx] → [R, hx] through the local experts, their probabilities applied after the activation."""
    routing = Routing(shapes)
    moe, model = routing.moe, shapes.model
    width = moe.ffn_hidden_size // routing.etp
    gates = 2 if model.gated else 1
    rows = routing.multiplied_rows
    fc1 = (gates * width, routing.width)
    fc2 = (routing.width, width)
    read = _apart(routing, routing.row_tensor("fc1 output", rows, gates * width, made_in="mlp.experts.linear_fc1"))
    written = routing.row_tensor("activation output", rows, width)
    # unfused, the product with the probabilities keeps its factor, and a gated activation the activated gate
    unfused = (
        ()
        if model.bias_activation_fusion and model.gated
        else (_apart(routing, routing.row_tensor("unweighted activation", rows, width)),)
    )
    gate = kept_by_gate(model, lambda name, elements: _apart(routing, routing.row_tensor(name, rows, elements)), width)
    promoted = (
        (routing.row_tensor("weighted in fp32", rows, width, dtype="fp32"),) if unfused and moe.router_dtype == "fp32" else ()
    )
    dropped = shapes.recomputes("moe_act")
    received = routing.row_tensor("input", rows, made_in="mlp")
    product = _apart(routing, routing.row_tensor("input", rows, width, made_in="mlp.experts"))
    held = _held(routing)
    split = Split(experts=routing.local_experts, in_one_buffer=moe.grouped_gemm)
    unpadded = (routing.row_tensor("output without padding", routing.rows),) if routing.pads else ()
    biased = _bias_added(routing)
    # let go before the output is worked on
    quantized = forward_input(shapes, written, in_16_bit=False, original=dropped, split=split)
    in_turn = runs_in_turn(routing)
    turn = rows // routing.local_experts if in_turn else rows
    output_grad = routing.row_tensor("output gradient", rows)
    return Module(
        name="experts",
        forward_workspace=(*dispatched(routing), *shared_output(routing)),
        # of all experts, cut in views
        backward_workspace=(output_grad,) if in_turn else (),
        children=(
            Module(
                name="linear_fc1",
                parameters=(
                    _expert_weight(routing, rows=fc1[0], columns=fc1[1], full=(gates * moe.ffn_hidden_size, routing.width)),
                    *_expert_bias(routing, gates * moe.ffn_hidden_size),
                ),
                saved=kept_input(shapes, received, split=split),
                forward_workspace=(*held, *forward_input(shapes, received, in_16_bit=False, split=split), read),
                backward_workspace=(
                    *output_gradient(shapes, routing.row_tensor("output gradient", turn, gates * width), split=split),
                    routing.row_tensor("input gradient", rows),
                    *((routing.row_tensor("input gradients of all experts", rows),) if in_turn else ()),
                    *_weight_gradients(routing, fc1),
                ),
                source="TEGroupedLinear" if moe.grouped_gemm else "TEColumnParallelLinear for each expert",
            ),
            Module(
                name="activation_func",
                function=True,
                saved=(read,) if dropped else (read, *gate, *unfused),
                forward_workspace=(*held, *((*gate, *unfused) if dropped else ()), *promoted, written),
                backward_workspace=(
                    *((*gate, *unfused) if dropped else ()),
                    routing.row_tensor("output gradient", turn, width),
                    # in fp32 the gradients of the product, of its factor and of the probabilities before they are summed
                    *(promoted * 3 or (routing.row_tensor("gradients of both factors", turn, 2 * width),)),
                ),
                source="weighted_bias_swiglu_impl" if not unfused else "activation times probabilities",
            ),
            Module(
                name="linear_fc2",
                parameters=(
                    _expert_weight(routing, rows=fc2[0], columns=fc2[1], full=(routing.width, moe.ffn_hidden_size)),
                    *_expert_bias(routing, routing.width),
                ),
                saved=() if dropped else kept_input(shapes, product, split=split),
                forward_workspace=(
                    *held,
                    *((written,) if dropped or shapes.fp8 is not None else ()),
                    *((routing.row_tensor("outputs of the experts", rows),) if in_turn else ()),
                    routing.row_tensor("output", rows),
                    *max(quantized, (*biased, *unpadded), key=lambda tensors: sum(tensor.bytes for tensor in tensors)),
                ),
                backward_workspace=(
                    *((written,) if dropped else ()),
                    *output_gradient(
                        shapes, replace(output_grad, shares="gradients of all experts" if in_turn else ""), split=split
                    ),
                    *backward_input(shapes, written, original=dropped, split=split),
                    *biased[:1],
                    routing.row_tensor("input gradient", turn, width),
                    *_weight_gradients(routing, fc2),
                ),
                source="TEGroupedLinear" if moe.grouped_gemm else "TERowParallelLinear for each expert",
            ),
        ),
        source="TEGroupedMLP" if moe.grouped_gemm else "SequentialMLP",
    )


def runs_in_turn(routing: Routing) -> bool:
    """Whether several experts of a rank run one after the other (`SequentialMLP`), each on its part of the rows."""
    return not routing.moe.grouped_gemm and routing.local_experts > 1


def _apart(routing: Routing, tensor: Tensor) -> Tensor:
    """A tensor that each of such experts makes for itself."""
    if not runs_in_turn(routing):
        return tensor
    return replace(tensor, pieces=routing.local_experts, made_in="mlp.experts")


def _bias_added(routing: Routing) -> tuple[Tensor, ...]:
    """The output with the bias of each expert times the probabilities, in their type: piece by piece, and put together.

    `TEGroupedMLP._apply_bias`; experts that run one by one add it in place.
    """
    if not (routing.shapes.model.bias_linear and routing.moe.grouped_gemm):
        return ()
    names = ("output with bias", "output with bias, expert by expert")
    return tuple(routing.row_tensor(name, routing.multiplied_rows, dtype=routing.probability_dtype) for name in names)


def _held(routing: Routing) -> tuple[Tensor, ...]:
    """Rows as they came and as padded for FP8: frames name them until the experts return, and no layer keeps them then."""
    if routing.shapes.fp8 is None:
        return ()
    padded = (routing.row_tensor("padded rows", routing.multiplied_rows),) if routing.pads else ()
    return (routing.row_tensor("received rows", routing.rows), *padded)


def _expert_bias(routing: Routing, width: int) -> tuple[Parameter, ...]:
    if not routing.shapes.model.bias_linear:
        return ()
    return (
        Parameter(
            name="bias",
            shape=(routing.local_experts, width),
            dtype=routing.shapes.dtype,
            sharding="expert",
            full_shape=(routing.moe.num_experts, width),
            pieces=1 if routing.moe.legacy_grouped_gemm else routing.local_experts,
        ),
    )


def _latent_projections(shapes: Shapes) -> tuple[Module, ...]:
    """h → latent before dispatch and back after combine, whole on every rank."""
    routing = Routing(shapes)
    latent, h = routing.moe.latent_size, shapes.model.hidden_size
    if not latent:
        return ()

    def one(name: str, rows: int, columns: int, keeps: Tensor) -> Module:
        quantized = shapes.fp8 is not None
        weight = Parameter(
            name="weight", shape=(rows, columns), dtype=shapes.dtype, sequence_parallel=shapes.sp, quantized=quantized
        )
        output = Tensor(name="output", shape=(routing.tokens, rows), dtype=shapes.dtype, formula="T rows")
        output_grad, input_grad = (
            Tensor(name=name, shape=(routing.tokens, width), dtype=shapes.dtype, formula="T rows")
            for name, width in (("output gradient", rows), ("input gradient", columns))
        )
        return Module(
            name=name,
            parameters=(weight,),
            saved=kept_input(shapes, keeps),
            forward_workspace=(*forward_input(shapes, keeps), output),
            backward_workspace=(*output_gradient(shapes, output_grad), input_grad),
        )

    combined = Tensor(name="input", shape=(routing.tokens, latent), dtype=shapes.dtype, formula="T·latent", made_in="mlp")
    return (
        one("fc1_latent_proj", latent, h, shapes.hidden("input", shares="router input")),
        one("fc2_latent_proj", h, latent, combined),
    )
