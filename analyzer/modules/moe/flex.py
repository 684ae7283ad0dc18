"""Common parts of the flex dispatcher's backends: the number of tokens that arrive on a rank, and their messages.

Each token is sent once to each rank that has one of its experts, and copied there for each expert.
Legend as in routing.py; A tokens that arrive on a rank, El = E/ep its experts, P ranks that share experts. Expert choices
are assumed to be independent: a token has none of the El experts with probability ∏ (E - El - i)/(E - i) over its k choices.

Source: core/transformer/moe/token_dispatcher.py `MoEFlexTokenDispatcher` (0.16.1).
"""

from __future__ import annotations

from math import prod

from analyzer.modules.moe.routing import Routing
from analyzer.modules.tree import Collective


def experts_of_token(routing: Routing) -> int:
    """k. Experts that are padded to their capacity get further tokens: k is then the mean number of experts of a token."""
    moe = routing.moe
    return min(moe.num_experts, round(routing.sent / routing.tokens)) if moe.pad_to_capacity else moe.topk


def arrivals(routing: Routing) -> int:
    """A: tokens of the group that have at least one of their experts on this rank."""
    moe, group = routing.moe, routing.tokens * routing.ep * routing.etp
    topk = experts_of_token(routing)
    return expected_arrivals(group, moe.num_experts, routing.local_experts, topk=topk, imbalance=moe.imbalance)


def expected_arrivals(tokens: int, experts: int, local: int, *, topk: int, imbalance: float = 1.0) -> int:
    """The expected number of `tokens` of a group that choose at least one of `local` experts of a rank."""
    missed = prod(max(0, experts - local - choice) / (experts - choice) for choice in range(topk))
    return min(tokens, int(tokens * (1 - missed) * imbalance))


def collectives(routing: Routing, arrived: int, *, phase: str, weights: int = 0) -> tuple[Collective, ...]:
    """The messages of one direction: tokens and, if `weights`, that number of weights with each token, in fp32."""
    tokens = routing.message("all_to_all", "tp_ep", (arrived, routing.width), routing.shapes.dtype, phase)
    if not weights:
        return (tokens,)
    return (tokens, routing.message("all_to_all", "tp_ep", (arrived, weights), "fp32", phase))
