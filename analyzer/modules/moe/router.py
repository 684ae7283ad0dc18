"""The router: token → its k experts and their weights.

Source: core/transformer/moe/router.py and moe_utils.py (0.16.1). Symbols as in routing.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.routing import Routing, shared_output
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import Collective, Module, Parameter, Tensor


def router(shapes: ExpertShapes) -> Module:
    """Token → its k experts and their weights. Saves its input, and what top-k and softmax need for backward."""
    routing = Routing(shapes)
    moe = routing.moe
    model = shapes.model
    per_expert = (routing.tokens, moe.num_experts)
    weight = Parameter(name="weight", shape=(moe.num_experts, model.hidden_size), dtype=shapes.dtype, sequence_parallel=shapes.sp)
    bias = (Parameter(name="bias", shape=(moe.num_experts,), dtype=shapes.dtype, sequence_parallel=shapes.sp),)
    in_fp32 = _in_router_dtype(routing, "input in the dtype of the router")
    all_scores = moe.pre_softmax or moe.score_function == "sigmoid"
    scored, formula = (per_expert, "4·T·E") if all_scores else ((routing.tokens, moe.topk), "4·T·k")
    # sigmoid scores are divided by the sum of those of the chosen experts
    divided = moe.score_function == "sigmoid" and moe.topk > 1
    kept = routing.probability_dtype  # of sigmoid scores; softmax is always computed in fp32
    chosen = (Tensor(name="chosen scores", shape=(routing.tokens, moe.topk), dtype=kept, formula="T·k"),) if divided else ()
    choice: tuple[Tensor, ...] = (Tensor(name="chosen experts", shape=(routing.tokens, moe.topk), dtype="int64", formula="8·T·k"),)
    saved: tuple[Tensor, ...] = (Tensor(name="scores", shape=scored, dtype="fp32", formula=formula), *chosen)
    if "sinkhorn" in moe.load_balancing:  # scores (cast to fp32 only if topk > 1) and the map that they are multiplied by
        one = moe.topk == 1
        saved = (
            Tensor(name="scores", shape=per_expert, dtype=routing.probability_dtype if one else "fp32", formula="T·E"),
            Tensor(name="routing map", shape=per_expert, dtype="bool", formula="T·E"),
        )
        choice = ()
    logits = Tensor(name="logits", shape=per_expert, dtype=routing.probability_dtype, formula="T·E")
    balanced = kept if moe.score_function == "sigmoid" else "fp32"
    balance = (Tensor(name="scores of the auxiliary loss", shape=per_expert, dtype=balanced, formula="T·E"),)
    first = "input of the shared experts" if moe.shared_ffn_hidden_size else shapes.owner_of_moe_input
    return Module(
        name="router",
        kind=ModuleKind.ROUTER,
        parameters=(weight, *(bias if model.bias_linear else ())),
        saved=(
            shapes.hidden("input", made_in="pre_mlp_layernorm", shares=first),
            *saved,
            *((logits,) if moe.z_loss_coeff else ()),  # saved by logsumexp
            *(balance if moe.aux_loss_coeff else ()),
            *choice,
            *_of_tokens(routing, chooses=bool(choice)),
        ),
        referenced=_outputs(routing),
        forward_workspace=(
            logits,
            *(() if shapes.inputs.router_in_te else in_fp32),
            *shared_output(routing),
        ),
        backward_workspace=(
            shapes.hidden("token gradient"),  # from the dispatch; the input gradient is added to it
            Tensor(name="logits gradient", shape=per_expert, dtype=routing.probability_dtype, formula="T·E"),
            shapes.hidden("input gradient"),
            *in_fp32,
        ),
        collectives=tuple(_balance_collectives(routing)),
        source="TopKRouter",
    )


def _of_tokens(routing: Routing, *, chooses: bool) -> Iterator[Tensor]:
    """What is saved once for each token: denominators, what the z-loss computes, and indices of deterministic PyTorch.

    `chooses`: the largest scores are chosen (`topk_routing_with_score_function`).
    """
    moe, dtype = routing.moe, routing.probability_dtype
    sigmoid = moe.score_function == "sigmoid"
    for name, kind, saves in (
        ("sums of the chosen scores", dtype, chooses and sigmoid and moe.topk > 1),
        ("rows of the probabilities", "int64", chooses and routing.shapes.inputs.deterministic),
        ("logarithms of the sums of exponentials", dtype, moe.z_loss_coeff),
        ("sums of the scores of the auxiliary loss", dtype, sigmoid and moe.aux_loss_coeff),
    ):
        if saves:
            yield Tensor(name=name, shape=(routing.tokens, 1), dtype=kind, formula="T")


def _outputs(routing: Routing) -> tuple[Tensor, ...]:
    """Probabilities and routing map as the dispatcher references them: not the all-gather dispatcher, and not DeepEP, which
    references the choices of each token instead (`_DeepepManager.setup_metadata`).

    HybridEP has a copy in fp32 (`_HybridEPManager`), and with experts split over ranks each expert is listed once for each of these
    (`MoEFlexTokenDispatcher._initialize_metadata`).
    """
    moe, dtype = routing.moe, routing.probability_dtype
    if moe.dispatcher == "allgather" or (moe.flex is not None and moe.flex.backend == "deepep"):
        return ()
    listed, formula = (routing.tokens, moe.num_experts), "T·E"
    if moe.flex is not None and moe.flex.backend == "hybridep":
        listed, formula, dtype = (routing.tokens, moe.num_experts * routing.etp), "T·E·etp", "fp32"
    return (
        Tensor(name="probabilities", shape=listed, dtype=dtype, formula=formula),
        Tensor(name="routing map", shape=listed, dtype="bool", formula=formula),
    )


def _in_router_dtype(routing: Routing, name: str) -> tuple[Tensor, ...]:
    """A copy of the input, or of its gradient, if the dtype of the router is not that of the parameters.

    The forward of `RouterGatingLinearFunction` (moe_utils.py) needs none with the mixed-dtype GEMMs of Transformer Engine.
    """
    if routing.probability_dtype == routing.shapes.dtype:
        return ()
    return (routing.shapes.hidden(name, dtype=routing.probability_dtype),)


def _balance_collectives(routing: Routing) -> Iterator[Collective]:
    """All-reduce of the tokens per expert for each auxiliary loss: over the sequence, and for the global loss over all replicas."""
    moe = routing.moe
    counts = {"aux_loss": moe.num_experts, "seq_aux_loss": routing.shapes.b * moe.num_experts, "global_aux_loss": moe.num_experts}
    for kind in moe.load_balancing:
        if moe.aux_loss_coeff and kind in counts:
            group = "tp_dp_cp" if kind == "global_aux_loss" else "tp_cp"
            yield routing.message("all_reduce", group, (counts[kind],), "int64", "forward")
