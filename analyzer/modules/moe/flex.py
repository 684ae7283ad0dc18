"""The flex dispatcher: each token travels once to each rank that has one of its experts, and is spread out there.

Legend as in dispatch.py; A are the tokens that arrive on a rank, El = E/ep its experts, P the ranks that share experts.
Choices of experts are taken to be independent: a token misses all of El experts with probability ∏ (E - El - i)/(E - i) over
its k choices.

Source: core/transformer/moe/token_dispatcher.py `MoEFlexTokenDispatcher` (0.16.1).
"""

from __future__ import annotations

from math import prod

from analyzer.modules.moe.alltoall import Routing
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module
from analyzer.specs import TrainingJob


def flex(shapes: Shapes) -> tuple[Module, Module]:
    """The way to the experts, and the way back, by the backend of the launch."""
    if Routing(shapes).flex.backend == "hybridep":
        from analyzer.modules.moe.hybridep import hybridep_combine, hybridep_dispatch

        return hybridep_dispatch(shapes), hybridep_combine(shapes)
    from analyzer.modules.moe.deepep import deepep_combine, deepep_dispatch

    return deepep_dispatch(shapes), deepep_combine(shapes)


def flex_buffer_bytes(job: TrainingJob) -> int:
    """Memory of the backend's buffers on a rank, which the driver hands out and PyTorch does not know of."""
    if job.model.moe is None or job.model.moe.flex is None:
        return 0
    if job.model.moe.flex.backend == "hybridep":
        from analyzer.modules.moe.hybridep import hybridep_buffer_bytes

        return hybridep_buffer_bytes(job)
    from analyzer.modules.moe.deepep import deepep_buffer_bytes

    return deepep_buffer_bytes(job)


def arrivals(routing: Routing) -> int:
    """A: tokens of the group with one of their experts here."""
    experts, here = routing.moe.num_experts, routing.local_experts
    missed = prod(max(0, experts - here - choice) / (experts - choice) for choice in range(routing.moe.topk))
    group = routing.tokens * routing.ep * routing.etp
    return min(group, int(group * (1 - missed) * routing.moe.imbalance))


def messages(routing: Routing, came: int, *, phase: str, weights: bool) -> tuple[Collective, ...]:
    """Tokens, and on the way out the weights of their choices with them."""
    tokens = routing.message("all_to_all", "tp_ep", (came, routing.width), routing.shapes.dtype, phase)
    if not weights:
        return (tokens,)
    return (tokens, routing.message("all_to_all", "tp_ep", (came, routing.moe.topk * routing.etp), "fp32", phase))
