"""A mixture of experts in the place of the feed-forward block: router, routed experts, shared experts.

Source: core/transformer/moe/{moe_layer,router,experts,shared_experts}.py (0.16.1). Symbols as in dispatch.py; fm is the
width of one expert, fs of the shared experts together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from analyzer.modules.dispatch import Routing, combine, dispatch
from analyzer.modules.linear import column_collectives, row_collectives, split_weight, weight_gradient
from analyzer.modules.mlp import kept_by_gate
from analyzer.modules.norm import recomputed_output
from analyzer.modules.quantized import Split, backward_input, forward_input, keeps_original, kept_input, output_gradient
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module, Parameter, Tensor


def moe_layer(shapes: Shapes) -> Module:
    """[s, b, h] → [s, b, h], after a norm of its own; under a checkpoint with `--recompute-modules moe`."""
    routing = Routing(shapes)
    shared = (shared_experts(shapes),) if routing.moe.shared_ffn_hidden_size else ()
    latent = _latent_projections(shapes)
    inside = (*shared, router(shapes), *latent[:1], dispatch(shapes), experts(shapes), combine(shapes), *latent[1:])
    normed = recomputed_output(shapes)
    if not shapes.recomputes("moe"):
        return Module(name="mlp", forward_workspace=normed, backward_workspace=normed, children=inside, source="MoELayer")
    kept = shapes.hidden("mixture input", made_in="pre_mlp_layernorm", shares="recomputed norm output" if normed else "")
    return Module(
        name="mlp",
        saved=(kept,),
        forward_workspace=normed,
        backward_workspace=normed,
        children=inside,
        recomputed=True,
        source="tensor_parallel.checkpoint around MoELayer",
    )


def router(shapes: Shapes) -> Module:
    """Token → its k experts and their weights. Keeps its input, and what top-k and softmax need for backward."""
    routing = Routing(shapes)
    moe = routing.moe
    model = shapes.model
    per_expert = (routing.tokens, moe.num_experts)
    weight = Parameter(name="weight", shape=(moe.num_experts, model.hidden_size), dtype=shapes.dtype, sequence_parallel=shapes.sp)
    bias = (Parameter(name="bias", shape=(moe.num_experts,), dtype=shapes.dtype, sequence_parallel=shapes.sp),)
    whole_scores = moe.pre_softmax or moe.score_function == "sigmoid" or "sinkhorn" in moe.load_balancing
    scores = (Tensor(name="scores", shape=per_expert, dtype="fp32", formula="4·T·E"),) if whole_scores else ()
    balance = (Tensor(name="scores of the auxiliary loss", shape=per_expert, dtype="fp32", formula="4·T·E"),)
    kept_by = "mixture input" if shapes.recomputes("moe") else "recomputed norm output" if shapes.recomputes("layernorm") else ""
    return Module(
        name="router",
        parameters=(weight, *(bias if model.bias_linear else ())),
        saved=(
            shapes.hidden("input", made_in="pre_mlp_layernorm", shares=kept_by),
            *scores,
            *(balance if moe.aux_loss_coeff else ()),
            Tensor(name="probabilities", shape=per_expert, dtype=routing.probability_dtype, formula="T·E"),
            Tensor(name="routing map", shape=per_expert, dtype="bool", formula="T·E"),
            Tensor(name="chosen experts", shape=(routing.tokens, moe.topk), dtype="int64", formula="8·T·k"),
        ),
        forward_workspace=(Tensor(name="logits", shape=per_expert, dtype=routing.probability_dtype, formula="T·E"),),
        backward_workspace=(
            Tensor(name="logits gradient", shape=per_expert, dtype=routing.probability_dtype, formula="T·E"),
            shapes.hidden("input gradient"),
        ),
        collectives=tuple(_balance_messages(routing)),
        source="TopKRouter",
    )


def _balance_messages(routing: Routing) -> Iterator[Collective]:
    """Tokens of each expert, summed where an auxiliary loss needs them."""
    moe = routing.moe
    parallel = routing.shapes.launch.parallel
    if moe.aux_loss_coeff and parallel.tensor * parallel.context > 1:
        count = routing.shapes.b * moe.num_experts if "seq_aux_loss" in moe.load_balancing else moe.num_experts
        yield routing.message("all_reduce", "tp_cp", (count,), "int64", "forward")


def _expert_weight(routing: Routing, *, rows: int, columns: int, full: tuple[int, int]) -> Parameter:
    """Weights of all local experts of a layer: [E/ep, rows, columns]."""
    return Parameter(
        name="weight",
        shape=(routing.local_experts, rows, columns),
        dtype=routing.shapes.dtype,
        sharding="expert",
        full_shape=(routing.moe.num_experts, *full),
        quantized=routing.shapes.fp8 is not None,
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
    read = routing.row_tensor("fc1 output", rows, gates * width, made_in="mlp.experts.linear_fc1")
    written = routing.row_tensor("activation output", rows, width)
    # unfused, the product with the probabilities keeps its factor, and a gated activation the activated gate
    unfused = () if model.bias_activation_fusion and model.gated else (routing.row_tensor("unweighted activation", rows, width),)
    gate = kept_by_gate(model, lambda name, elements: routing.row_tensor(name, rows, elements), width)
    promoted = (
        (routing.row_tensor("weighted in fp32", rows, width, dtype="fp32"),) if unfused and moe.router_dtype == "fp32" else ()
    )
    dropped = shapes.recomputes("moe_act")
    received = routing.row_tensor("input", rows, made_in="mlp")
    product = routing.row_tensor("input", rows, width, made_in="mlp.experts")
    held = _held(routing)
    split = Split(experts=routing.local_experts, in_one_buffer=moe.grouped_gemm)
    unpadded = (routing.row_tensor("output without padding", routing.rows),) if routing.pads else ()
    biased = _bias_added(routing)
    # let go before the output is worked on
    quantized = forward_input(shapes, written, in_16_bit=False, original=dropped, split=split)
    return Module(
        name="experts",
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
                    *output_gradient(shapes, routing.row_tensor("output gradient", rows, gates * width), split=split),
                    routing.row_tensor("input gradient", rows),
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
                    routing.row_tensor("output gradient", rows, width),
                    # in fp32 the gradients of the product, of its factor and of the probabilities before they are summed
                    *(promoted * 3 or (routing.row_tensor("fc1 output gradient", rows, gates * width),)),
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
                    routing.row_tensor("output", rows),
                    *max(quantized, (*biased, *unpadded), key=lambda tensors: sum(tensor.bytes for tensor in tensors)),
                ),
                backward_workspace=(
                    *((written,) if dropped else ()),
                    *output_gradient(shapes, routing.row_tensor("output gradient", rows), split=split),
                    *backward_input(shapes, written, original=dropped, split=split),
                    *biased[:1],
                    routing.row_tensor("input gradient", rows, width),
                    *_weight_gradients(routing, fc2),
                ),
                source="TEGroupedLinear" if moe.grouped_gemm else "TERowParallelLinear for each expert",
            ),
        ),
        source="TEGroupedMLP" if moe.grouped_gemm else "SequentialMLP",
    )


def _bias_added(routing: Routing) -> tuple[Tensor, ...]:
    """The output with the bias of each expert times the probabilities, in their type: piece by piece, and put together.

    `TEGroupedMLP._apply_bias`; experts that run one by one add it in place.
    """
    if not (routing.shapes.model.bias_linear and routing.moe.grouped_gemm):
        return ()
    names = ("output with bias", "output with bias, expert by expert")
    return tuple(routing.row_tensor(name, routing.multiplied_rows, dtype=routing.probability_dtype) for name in names)


def _held(routing: Routing) -> tuple[Tensor, ...]:
    """What frames name until the experts return, and no layer keeps: rows before they are sorted or padded, the shared output.

    `MoELayer.forward` names what it gives the dispatcher and what it gets back. Counted for products in FP8, whose experts make
    the fullest instant; in 16 bit a layer keeps the last of these rows, and the peak lies elsewhere.
    """
    moe, shapes = routing.moe, routing.shapes
    if shapes.fp8 is None:
        return ()
    held = [routing.row_tensor("received rows", routing.rows)]
    if routing.pads:
        held.append(routing.row_tensor("padded rows", routing.multiplied_rows))
    if moe.shared_ffn_hidden_size and not moe.shared_overlap:
        held.append(shapes.hidden("output of the shared experts"))
    if moe.dispatcher != "allgather":
        if routing.ep > 1:
            held.append(routing.row_tensor("permuted tokens", routing.sent))
        if routing.local_experts > 1:
            held.append(routing.row_tensor("dispatched rows", routing.rows))
    return tuple(held)


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
        ),
    )


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
    kept = shapes.hidden("input", shares="router input")
    original = keeps_original(shapes)
    product = shapes.wide("input", width, "fs/t", made_in="mlp.shared_experts")
    inside = (
        Module(
            name="linear_fc1",
            parameters=(split_weight(shapes, (gates * width, h), full=(gates * full, h)),),
            saved=(kept,) if original else kept_input(shapes, kept, gathered=shapes.sp),
            forward_workspace=(*forward_input(shapes, kept, gathered=gathered, original=original), read),
            backward_workspace=(
                *output_gradient(shapes, shapes.wide("output gradient", gates * width, "fs/t")),
                *backward_input(shapes, kept, gathered=gathered, original=original),
                shapes.hidden("input gradient", gathered=True),
                *weight_gradient(shapes, (gates * width, h)),
            ),
            collectives=column_collectives(shapes),
            source="TEColumnParallelLinear",
        ),
        Module(
            name="activation_func",
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
            parameters=(split_weight(shapes, (h, width), full=(h, full)),),
            saved=kept_input(shapes, product),
            forward_workspace=(*forward_input(shapes, product), shapes.hidden("output", gathered=True)),
            backward_workspace=(
                *_shared_output_gradient(shapes),
                shapes.wide("input gradient", width, "fs/t"),
            ),
            collectives=row_collectives(shapes),
            source="TERowParallelLinear",
        ),
    )
    recomputed = shapes.recomputes("shared_experts")
    return Module(name="shared_experts", parameters=gate, children=inside, recomputed=recomputed, source="SharedExpertMLP")


def _shared_output_gradient(shapes: Shapes) -> tuple[Tensor, ...]:
    """The gradient of the shared experts' output, the whole of it. Its shard is the gradient of the layer's output."""
    whole = shapes.hidden("gathered output gradient", gathered=True)
    if not shapes.sp:
        return output_gradient(shapes, whole)
    return output_gradient(shapes, replace(whole, name="output gradient", shares="residual gradient"), gathered=(whole,))


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
