"""What the backends of the flex dispatcher share: how many tokens arrive, and their messages.

Each token is sent once to each rank that has one of its experts, and copied there for each expert.
Legend as in routing.py; A is the number of tokens that arrive
on a rank, El = E/ep its experts, P the ranks that share experts. Expert choices are assumed to be
independent: a token has none of the El experts with probability ∏ (E - El - i)/(E - i) over its k choices.

Source: core/transformer/moe/token_dispatcher.py `MoEFlexTokenDispatcher` (0.16.1).
"""

from __future__ import annotations

from math import prod

from analyzer.modules.moe.routing import Routing
from analyzer.modules.tree import Collective


def arrivals(routing: Routing) -> int:
    """A: tokens of the group with one of their experts here."""
    experts, here = routing.moe.num_experts, routing.local_experts
    missed = prod(max(0, experts - here - choice) / (experts - choice) for choice in range(routing.moe.topk))
    group = routing.tokens * routing.ep * routing.etp
    return min(group, int(group * (1 - missed) * routing.moe.imbalance))


def collectives(routing: Routing, came: int, *, phase: str, weights: bool) -> tuple[Collective, ...]:
    """Tokens, and on the way out the weights of their choices with them."""
    tokens = routing.message("all_to_all", "tp_ep", (came, routing.width), routing.shapes.dtype, phase)
    if not weights:
        return (tokens,)
    return (tokens, routing.message("all_to_all", "tp_ep", (came, routing.moe.topk * routing.etp), "fp32", phase))
