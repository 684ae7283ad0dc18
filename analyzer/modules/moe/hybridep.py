"""The flex dispatcher with HybridEP: tokens arrive in driver-allocated buffers, and one kernel copies them for each expert.

Legend as in flex.py; N ranks of a group in one NVLink domain, P/N domains.

Sources: core/transformer/moe/token_dispatcher.py `_HybridEPManager`, fused_a2a.py (0.16.1); deepseek-ai/DeepEP, branch
hybrid-ep: deep_ep/hybrid_ep_buffer.py, csrc/hybrid_ep/executor/executor.cu and extension/permute.cu (PyTorch memory),
buffer/intranode.cu and internode.cu (memory outside PyTorch).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.flex import arrivals, collectives
from analyzer.modules.moe.routing import LOCAL_ROWS, ROW_ID_MAP, Routing, permuted_probabilities, shared_output
from analyzer.modules.moe.shared_experts import overlapped_fc2, overlapped_output
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import Collective, Module, Tensor, largest
from analyzer.units import round_up

FEWEST_TOKENS: Final = 512
"""Minimum tokens per rank that buffers are sized for."""
SCALE_BLOCK: Final = 128
"""Values that share a scale. Buffers include space for scales even if nothing is sent in FP8."""
MAP_BLOCK: Final = 16
"""The row count of the map of tokens from other domains is a multiple of this."""


def hybridep_buffer_bytes(shapes: ExpertShapes) -> int:
    """Bytes of the buffers: for all tokens of the group, and between domains for the tokens of a rank, sent and received."""
    routing = Routing(shapes)
    ranks = routing.ep * routing.etp
    domains = ranks // routing.flex.nvlink_ranks
    tokens = max(routing.tokens, FEWEST_TOKENS)
    values, scales = 2 * routing.width, 4 * (routing.width // SCALE_BLOCK)
    weights = 4 * weights_of_token(routing)
    near = tokens * ranks * (values + scales + weights)
    if domains == 1:
        return near
    sent = tokens * (values + scales + weights * domains)
    to_experts = tokens * (domains - 1) * (values + scales + weights)
    back = 2 * tokens * (domains - 1) * (values + weights)  # sums of this domain and of the other domains
    return near + sent + to_experts + back


def weights_of_token(routing: Routing) -> int:
    """Weights that are sent with each token: those of all experts of the NVLink domain, chosen or not.

    Source: `S2G_warp_group_device_function` and `inter_node_G2S_warp_group_device_function` of
    csrc/hybrid_ep/backend/hybrid_ep_backend.cuh (NUM_OF_EXPERTS_PER_RANK * NUM_OF_RANKS_PER_NODE).
    """
    return routing.local_experts * routing.flex.nvlink_ranks


def hybridep_dispatch(shapes: ExpertShapes) -> Module:
    """Tokens [T, hx] → rows of the local experts, sorted by expert."""
    routing = Routing(shapes)
    tokens, local, arrived = routing.tokens, routing.local_experts, arrivals(routing)
    ranks = routing.ep * routing.etp
    world, domain = tokens * ranks, routing.flex.nvlink_ranks
    domains = ranks // domain
    per_expert = (tokens, local * ranks)
    full_map = Tensor(name="routing map of the group", shape=(world, local * ranks), dtype="bool", formula="T·P·E")
    between = (
        (Tensor(name="domains of each token", shape=(tokens, domains - 1), dtype="bool", formula="T·(P/N-1)"),)
        if domains > 1
        else ()
    )
    # the probabilities that the dispatcher references have an autograd graph, which keeps the handle of the dispatch
    handle = (
        Tensor(name="positions in the domain", shape=(tokens * domains, domain), dtype="int32", formula="4·T·P"),
        Tensor(name="tokens from domains", shape=(round_up(tokens, MAP_BLOCK), domains), dtype="bool", formula="T·P/N"),
        *between,
        Tensor(name="routing map of the local experts", shape=(world, local), dtype="bool", formula="T·P·El"),
        Tensor(name=ROW_ID_MAP, shape=(world, local), dtype="int32", formula="4·T·P·El"),
    )
    return Module(
        name="dispatch",
        kind=ModuleKind.DISPATCH,
        function=True,
        saved=(
            *(replace(each, lingers=True, in_graph=True) for each in handle),
            *permuted_probabilities(routing, "fp32", references=True),
        ),
        forward_workspace=(
            full_map,
            routing.row_tensor(LOCAL_ROWS, routing.rows),
            *shared_output(routing),
        ),
        backward_workspace=(
            routing.row_tensor("row gradients", routing.rows),
            shapes.hidden("token gradient"),
            Tensor(name="gradients of probabilities", shape=per_expert, dtype="fp32", formula="4·T·E"),
        ),
        collectives=(
            *((Collective(kind="all_reduce", group="tp_ep", shape=(1,), dtype="int64", phase="forward"),) * routing.flex.equalizes),
            Collective(kind="all_gather", group="tp_ep", shape=full_map.shape, dtype="bool", phase="forward"),
            *collectives(routing, arrived, phase="forward", weights=weights_of_token(routing)),
            *collectives(routing, arrived, phase="backward", weights=weights_of_token(routing)),
        ),
        source="MoEFlexTokenDispatcher with HybridEP",
    )


def hybridep_combine(shapes: ExpertShapes) -> Module:
    """Rows of the local experts → [T, h], summed for each token."""
    routing = Routing(shapes)
    arrived = arrivals(routing)
    gradient, output, rows = shapes.branch_gradient, shapes.hidden("output"), routing.row_tensor("row gradients", routing.rows)
    return Module(
        name="combine",
        kind=ModuleKind.COMBINE,
        function=True,
        forward_workspace=largest(
            (routing.row_tensor("expert output", routing.rows), output, *shared_output(routing)),
            *((output, *each) for each in overlapped_output(shapes)),
        ),
        backward_workspace=largest((gradient, rows), (*overlapped_fc2(shapes)[1], rows)),
        collectives=tuple(each for phase in ("forward", "backward") for each in collectives(routing, arrived, phase=phase)),
        source="MoEFlexTokenDispatcher with HybridEP",
    )
