"""How tokens choose their experts: top-k, groups of experts, scores, balancing losses.

Megatron: `TransformerConfig.__post_init__`, `TopKRouter` (megatron/core/transformer/moe/router.py) and
`group_limited_topk` (moe/moe_utils.py), 0.16.1; single-item lists are unwrapped in `validate_args`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypedDict, cast

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import number, option, positive, since, switched_on, text
from analyzer.specs.moe import AUXILIARY_LOSSES

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

_BALANCING: Final = (*AUXILIARY_LOSSES, "sinkhorn", "none")


class Router(TypedDict):
    """The fields of `MoeSpec` about the router."""

    topk: int
    load_balancing: tuple[str, ...]
    aux_loss_coeff: float
    z_loss_coeff: float
    score_function: Literal["softmax", "sigmoid"]
    pre_softmax: bool
    expert_bias: bool
    router_dtype: Literal["fp32", "fp64"] | None
    pad_for_quantization: bool


def read_router(arguments: Arguments, *, num_experts: int) -> Router:
    """The router over `num_experts` experts. Raises InputError for options that contradict each other."""
    topk = positive(arguments, "moe_router_topk") or 2
    if topk > num_experts:
        raise InputError(
            option(arguments, "moe_router_topk"),
            f"a token cannot choose {topk} of {num_experts} experts",
            f"use {num_experts} or less",
        )
    balancing, coefficient = _balancing(arguments)
    score = _score_function(arguments)
    pre_softmax = switched_on(arguments, "moe_router_pre_softmax")
    checked = since(arguments, "0.8")  # before, `TopKRouter` accepts it
    if checked and topk == 1 and score == "softmax" and not pre_softmax and balancing != ("sinkhorn",):
        raise InputError(
            option(arguments, "moe_router_topk"),
            "1 leaves a softmax over one score, which has no gradient",
            "add --moe-router-pre-softmax, or use --moe-router-score-function sigmoid",
        )
    _check_groups(arguments, num_experts=num_experts, topk=topk)
    _check_bias(arguments, score=score)
    _check_flags(arguments, topk=topk)
    return Router(
        topk=topk,
        load_balancing=balancing,
        aux_loss_coeff=coefficient,
        z_loss_coeff=number(arguments, "moe_z_loss_coeff", 0.0),
        score_function=score,
        pre_softmax=pre_softmax,
        expert_bias=switched_on(arguments, "moe_router_enable_expert_bias"),
        router_dtype=cast(Literal["fp32", "fp64"] | None, arguments.get("moe_router_dtype")),
        pad_for_quantization=_pads_for_quantization(arguments),
    )


def _several(value: object, default: object) -> tuple[object, ...]:
    """The items of a list; any other value, or `default` for None, is a list of one item."""
    if isinstance(value, list | tuple):
        return tuple(value)
    return (default if value is None else value,)


def _balancing(arguments: Arguments) -> tuple[tuple[str, ...], float]:
    """Load-balancing types, and the sum of the coefficients of those that are losses."""
    named = option(arguments, "moe_router_load_balancing_type")
    types = tuple(str(each) for each in _several(arguments.get("moe_router_load_balancing_type"), "aux_loss"))
    coefficients = tuple(float(str(each)) for each in _several(arguments.get("moe_aux_loss_coeff"), 0.0))
    for each in types:
        if each == "quantile_balancing":
            raise UnsupportedError(named, "quantile balancing is not modelled", f"use one of {', '.join(_BALANCING)}")
        if each not in _BALANCING:
            raise InputError(named, f"{each!r} is not a load-balancing type", f"use one of {', '.join(_BALANCING)}")
    if len(types) != len(coefficients):
        raise InputError(
            option(arguments, "moe_aux_loss_coeff"),
            f"there are {len(coefficients)} coefficients for {len(types)} of {named}",
            "give one for each, in the same order",
        )
    if types == ("sinkhorn",) and coefficients[0]:
        raise InputError(option(arguments, "moe_aux_loss_coeff"), "sinkhorn has no loss", f"leave it out, or use {named} aux_loss")
    return types, sum(share for each, share in zip(types, coefficients, strict=True) if each in AUXILIARY_LOSSES)


def _score_function(arguments: Arguments) -> Literal["softmax", "sigmoid"]:
    written = text(arguments, "moe_router_score_function", "softmax")
    if written not in ("softmax", "sigmoid"):
        raise UnsupportedError(
            option(arguments, "moe_router_score_function"), f"{written} scores are not modelled", "use softmax or sigmoid"
        )
    return cast(Literal["softmax", "sigmoid"], written)


def _check_groups(arguments: Arguments, *, num_experts: int, topk: int) -> None:
    """Group-limited routing: `--moe-router-group-topk` of `--moe-router-num-groups` groups are chosen, then top-k in them."""
    best = positive(arguments, "moe_router_group_topk")
    groups = positive(arguments, "moe_router_num_groups")
    if best is None:
        return
    named = option(arguments, "moe_router_group_topk")
    if groups is None:
        raise InputError(named, "needs a number of groups", "add --moe-router-num-groups, or leave it out")
    if num_experts % groups:
        raise InputError(
            option(arguments, "moe_router_num_groups"),
            f"{num_experts} experts cannot be split into {groups} groups",
            f"use a divisor of {num_experts}",
        )
    if best > groups:
        raise InputError(named, f"there are {groups} groups to choose {best} from", f"use {groups} or less")
    if topk // best > num_experts // groups:
        raise InputError(
            named,
            f"a group is scored by its {topk // best} best experts and has {num_experts // groups}",
            "choose more groups, or use fewer --moe-router-num-groups",
        )


def _check_bias(arguments: Arguments, *, score: str) -> None:
    if switched_on(arguments, "moe_router_enable_expert_bias") and score != "sigmoid":
        raise InputError(
            option(arguments, "moe_router_enable_expert_bias"),
            f"is not supported with {score} scores",
            "add --moe-router-score-function sigmoid",
        )


def _pads_for_quantization(arguments: Arguments) -> bool:
    asked = [dest for dest in ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8") if switched_on(arguments, dest)]
    for dest in asked:
        if arguments.get("fp8") is None and (arguments.get("fp4") is None or not since(arguments, "0.16")):
            raise InputError(option(arguments, dest), "pads for fp8 or fp4, and neither is on", "leave it out")
        if text(arguments, "moe_token_dispatcher_type", "allgather") == "allgather":
            raise InputError(
                option(arguments, dest),
                "is not supported with the allgather dispatcher",
                "add --moe-token-dispatcher-type alltoall",
            )
    return bool(asked)


def _check_flags(arguments: Arguments, *, topk: int) -> None:
    if switched_on(arguments, "moe_apply_probs_on_input") and topk != 1:
        raise InputError(
            option(arguments, "moe_apply_probs_on_input"),
            f"needs one expert for each token, not {topk}",
            "use --moe-router-topk 1",
        )
