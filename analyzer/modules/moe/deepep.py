"""The flex dispatcher with DeepEP: a token arrives once per rank in PyTorch memory, and is copied there for each expert.

Legend as in flex.py.

Sources: core/transformer/moe/token_dispatcher.py `MoEFlexTokenDispatcher`, `_DeepepManager`, fused_a2a.py (0.16.1);
deepseek-ai/DeepEP deep_ep/buffer.py, csrc/config.hpp (buffers, which are outside PyTorch's allocator).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.flex import arrivals, collectives, experts_of_token
from analyzer.modules.moe.routing import (
    ARRIVED_ROWS,
    LOCAL_ROWS,
    ROW_ID_MAP,
    Routing,
    dispatched_rows,
    permuted_probabilities,
    selection,
    shared_output,
    summed_rows,
)
from analyzer.modules.moe.shared_experts import overlapped_fc2, overlapped_output
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import Module, Tensor, largest
from analyzer.units import MIB, round_up

PEERS: Final = 8
"""Ranks of a node that access each other's memory (NUM_MAX_NVL_PEERS)."""
NVLINK_ROWS: Final = {2: 256, 4: 256, 8: 256, 16: 288, 24: 288, 32: 288, 64: 288, 128: 560, 144: 720, 160: 720}
"""Ranks of the group → rows that a channel can receive from an NVLink peer, in dispatch and combine (`get_dispatch_config`)."""
NETWORK_ROWS: Final = {16: 140, 24: 140, 32: 140, 64: 140, 128: 132, 144: 132, 160: 132}
"""The same over the network: 128, rounded up to a multiple of the rows per send; the larger of dispatch and combine."""
ROW_EXTRA: Final = 8 + 128 * (8 + 4 + 4)
"""Bytes of a row in addition to its values: its origin, and space for 128 expert indices, weights and scales."""
NETWORK_GRANULARITY: Final = 512 * MIB
"""Allocation granularity in bytes (NVSHMEM_CUMEM_GRANULARITY), as set by DeepEP."""


def deepep_buffer_bytes(shapes: ExpertShapes) -> int:
    """Bytes of DeepEP's buffers on a rank, which the driver allocates outside PyTorch."""
    routing = Routing(shapes)
    ranks = routing.ep * routing.etp
    channels = routing.flex.sms // 2
    row = 2 * routing.width + ROW_EXTRA
    nodes, peers = max(1, ranks // PEERS), min(ranks, PEERS)
    near = channels * peers * ((2 * nodes + 3) * 4 + NVLINK_ROWS[ranks] * row)
    if nodes == 1:
        return round_up(near, 128)
    far = channels * nodes * ((PEERS * 2 + 2) * 2 * 4 + NETWORK_ROWS[ranks] * (row + 16) * 2) + MIB
    return round_up(near, 128) + round_up(far, NETWORK_GRANULARITY)


def deepep_dispatch(shapes: ExpertShapes) -> Module:
    """Tokens [T, hx] → rows of the local experts, sorted by expert."""
    routing = Routing(shapes)
    arrived, local = arrivals(routing), routing.local_experts
    choices = (routing.tokens, routing.moe.topk * routing.etp)
    choices_of_token = experts_of_token(routing) * routing.etp
    return Module(
        name="dispatch",
        kind=ModuleKind.DISPATCH,
        function=True,
        saved=_saved_by_dispatch(routing),
        referenced=(
            Tensor(name="chosen instances", shape=choices, dtype="int64", formula="8·T·k"),
            Tensor(name="weights of the choices", shape=choices, dtype="fp32", formula="4·T·k"),
            Tensor(name="routing map of arrivals", shape=(arrived, local), dtype="bool", formula="A·El"),
            *(() if shapes.inputs.core.frees_arrivals else _choices_of_arrivals(routing)),
        ),
        forward_workspace=(
            *arrived_tensors(routing),
            routing.row_tensor(LOCAL_ROWS, routing.rows),
            *shared_output(routing),
        ),
        backward_workspace=(
            routing.row_tensor("row gradients", routing.rows),
            routing.row_tensor("gradients of arrivals", arrived),
            shapes.hidden("token gradient"),
        ),
        collectives=tuple(
            each
            for phase in ("forward", "backward")
            for each in collectives(routing, arrived, phase=phase, weights=choices_of_token)
        ),
        source="MoEFlexTokenDispatcher with DeepEP",
    )


def arrived_tensors(routing: Routing) -> tuple[Tensor, ...]:
    """Tokens as they arrive and the weights of their choices, which local variables of `MoELayer.forward` reference.

    From 0.18 on the dispatcher references the choices only until it has combined the rows.
    """
    arrived = arrivals(routing)
    weights = (arrived, routing.moe.topk * routing.etp)
    return (
        routing.row_tensor(ARRIVED_ROWS, arrived),
        Tensor(name="weights of the choices of arrivals", shape=weights, dtype="fp32", formula="4·A·k"),
        *(_choices_of_arrivals(routing) if routing.shapes.inputs.core.frees_arrivals else ()),
    )


def _choices_of_arrivals(routing: Routing) -> tuple[Tensor, Tensor]:
    """The experts that arrived tokens have chosen, and their probabilities as a matrix, attributes of the dispatcher."""
    arrived, local = arrivals(routing), routing.local_experts
    chosen = (arrived, routing.moe.topk * routing.etp)
    return (
        Tensor(name="choices of arrivals", shape=chosen, dtype="int64", formula="8·A·k"),
        Tensor(name="probabilities of arrivals", shape=(arrived, local), dtype="fp32", formula="4·A·El"),
    )


def _saved_by_dispatch(routing: Routing) -> tuple[Tensor, ...]:
    """What the fused functions of the dispatcher, the dispatch and the permutation save."""
    arrived, local, ranks = arrivals(routing), routing.local_experts, routing.ep * routing.etp
    fused = routing.moe.permute_fusion
    row_map = (
        Tensor(name=ROW_ID_MAP, shape=(arrived, 2 * local + 1), dtype="int32", formula="4·A·(2·El+1)")
        if fused
        else Tensor(name="sorted indices", shape=(routing.rows,), dtype="int64", formula="8·T·k")
    )
    # the fused function that finds the choices of each token saves its input
    listed = (routing.tokens, routing.moe.num_experts)
    probabilities = Tensor(name="probabilities", shape=listed, dtype=routing.probability_dtype, formula="T·E", made_in="mlp.router")
    # the probabilities that the dispatcher references have an autograd graph, which keeps the handle of the dispatch
    handle = (
        Tensor(name="ranks of each token", shape=(routing.tokens, ranks), dtype="bool", formula="T·P"),
        Tensor(name="send heads", shape=(routing.tokens, ranks), dtype="int32", formula="4·T·P"),
        Tensor(name="origin of each token", shape=(arrived,), dtype="int32", formula="4·A"),
    )
    mask = (arrived, routing.moe.topk * routing.etp)
    return (
        probabilities,
        *(replace(each, lingers=True, in_graph=True) for each in handle),
        Tensor(name="arrivals of the choices", shape=(routing.choices,), dtype="int64", formula="8·T·k"),
        Tensor(name="experts of the choices", shape=(routing.choices,), dtype="int64", formula="8·T·k"),
        Tensor(name="mask of the choices of arrivals", shape=mask, dtype="bool", formula="A·k"),
        replace(row_map, lingers=True),
        *(() if fused else selection(routing, local, arrived, dtype="fp32")),
        *permuted_probabilities(routing, "fp32"),
    )


def deepep_combine(shapes: ExpertShapes) -> Module:
    """Rows of the local experts → [T, h], summed for each token."""
    routing = Routing(shapes)
    arrived = arrivals(routing)
    gradient, shared, output = shapes.branch_gradient, shared_output(routing), shapes.hidden("output")
    received = routing.row_tensor("gradients of arrivals", arrived)
    saved = summed_rows(routing, routing.rows, made_in=routing.makes_output)
    sums = routing.row_tensor("sums of arrivals", arrived)
    expert_output = () if saved else (routing.row_tensor("expert output", routing.rows),)
    forward = largest(
        # deterministic PyTorch allocates the zeros twice
        (*dispatched_rows(routing), *expert_output, sums, *((sums,) if saved else ())),
        (sums, output),
        *((output, *each) for each in overlapped_output(shapes)),
    )
    return Module(
        name="combine",
        kind=ModuleKind.COMBINE,
        function=True,
        saved=saved,
        forward_workspace=(*arrived_tensors(routing), *shared, *forward),
        backward_workspace=largest(
            (gradient, received),
            (*overlapped_fc2(shapes)[1], received),
            # shared experts read the gradient of the sum later
            (*((gradient,) if shared else ()), received, routing.row_tensor("row gradients", routing.rows)),
        ),
        collectives=tuple(each for phase in ("forward", "backward") for each in collectives(routing, arrived, phase=phase)),
        source="MoEFlexTokenDispatcher with DeepEP",
    )
