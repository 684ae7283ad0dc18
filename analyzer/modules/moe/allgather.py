"""The all-gather dispatcher: every rank receives all tokens of the group and selects those of its experts.

Legend as in routing.py; W tokens of the group (T·P), El = E/ep experts of this rank.

Source: core/transformer/moe/token_dispatcher.py `MoEAllGatherTokenDispatcher`, moe_utils.py permute and unpermute (0.16.1).
The gathered tokens are stored in Megatron's global memory buffer, which `memory.workspaces` counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.routing import ROW_ID_MAP, Routing, dispatched_rows, permuted_probabilities, shared_output, summed_rows
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import Collective, Module, Tensor, largest


def gathered_tokens(shapes: ExpertShapes) -> Tensor:
    """[W, hx]: the tokens of all ranks that share experts."""
    routing = Routing(shapes)
    return routing.row_tensor("gathered tokens", routing.tokens * routing.ep * routing.etp)


def gathered_probabilities(routing: Routing) -> tuple[Tensor, ...]:
    """[W, E], referenced by a local variable of the layer until it returns. Empty if the group has one rank."""
    if routing.ep * routing.etp == 1:
        return ()
    shape = (routing.tokens * routing.ep * routing.etp, routing.moe.num_experts)
    return (Tensor(name="gathered probabilities", shape=shape, dtype=routing.probability_dtype, formula="W·E"),)


def allgather_dispatch(shapes: ExpertShapes) -> Module:
    """Tokens [T, hx] → rows of the local experts, sorted by expert."""
    routing = Routing(shapes)
    world, local = routing.tokens * routing.ep * routing.etp, routing.local_experts
    single = routing.ep * routing.etp == 1
    gathers = () if single else (Tensor(name="gathered routing map", shape=(world, routing.moe.num_experts), dtype="bool"),)
    # the columns of the local experts are copied; a slice of all columns is a view
    sliced = routing.ep > 1
    row_map = (
        Tensor(name=ROW_ID_MAP, shape=(world, 2 * local + 1), dtype="int32", formula="4·W·(2El+1)", lingers=True)
        if routing.moe.permute_fusion
        else Tensor(name="sorted indices", shape=(routing.rows,), dtype="int64", formula="8·T·k", lingers=True)
    )
    local_map = Tensor(name="routing map of the local experts", shape=(world, local), dtype="bool", formula="W·El")
    per_expert = Tensor(
        name="probabilities of the local experts", shape=(world, local), dtype=routing.probability_dtype, formula="W·El"
    )
    selected = (
        Tensor(name="transposed routing map", shape=(local, world), dtype="bool", formula="W·El"),
        Tensor(name="transposed probabilities", shape=(local, world), dtype=routing.probability_dtype, formula="W·El"),
    )
    rows = routing.row_tensor("rows of the local experts", routing.rows)
    return Module(
        name="dispatch",
        kind=ModuleKind.DISPATCH,
        function=True,
        saved=(
            row_map,
            *selected,
            *permuted_probabilities(routing, routing.probability_dtype, references=True),
        ),
        referenced=(local_map,),
        forward_workspace=(
            *gathered_probabilities(routing),
            *(gathers if sliced else ()),
            *((per_expert,) if sliced else ()),
            rows,
            *shared_output(routing),
        ),
        backward_workspace=(
            routing.row_tensor("row gradients", routing.rows),
            routing.row_tensor("gradients of the gathered tokens", world),
            *(() if single else (shapes.hidden("token gradient"),)),
        ),
        collectives=tuple(_dispatch_collectives(routing)),
        source="MoEAllGatherTokenDispatcher",
    )


def allgather_combine(shapes: ExpertShapes) -> Module:
    """Rows of the local experts → [T, h], summed over the experts of each token, then over the ranks."""
    routing = Routing(shapes)
    world = routing.tokens * routing.ep * routing.etp
    single = routing.ep * routing.etp == 1
    summed = routing.row_tensor("sums of the gathered tokens", world)
    promotes = not single and routing.probability_dtype != shapes.dtype
    promoted = (routing.row_tensor("sums in the dtype of the probabilities", world, dtype=routing.probability_dtype),)
    reduced = () if single else (routing.row_tensor("output", routing.tokens, dtype=routing.probability_dtype),)  # before its cast
    saved = summed_rows(routing, routing.rows, made_in=routing.makes_output)
    expert_output = () if saved else (routing.row_tensor("expert output", routing.rows),)
    forward = (
        # deterministic PyTorch allocates the zeros twice
        (*dispatched_rows(routing), *expert_output, summed, *((summed,) if saved else ())),
        (summed, *(promoted if promotes else ()), *reduced),
    )
    return Module(
        name="combine",
        kind=ModuleKind.COMBINE,
        function=True,
        saved=saved,
        forward_workspace=(
            *gathered_probabilities(routing),
            *largest(*forward),
            *shared_output(routing),
        ),
        backward_workspace=_combine_gradients(routing, promotes=promotes),
        collectives=tuple(_combine_collectives(routing)),
        source="MoEAllGatherTokenDispatcher",
    )


def _combine_gradients(routing: Routing, *, promotes: bool) -> tuple[Tensor, ...]:
    """Each step of the backward reads one tensor and writes another: casts, the all-gather and the copy of rows.

    The gradient of the output is freed after the first step, unless the shared experts need it too.
    """
    gradient = (routing.shapes.branch_gradient,)
    rows = (routing.row_tensor("row gradients", routing.rows),)
    world = routing.tokens * routing.ep * routing.etp
    if world == routing.tokens:
        return (*gradient, *rows)
    gathered = (routing.row_tensor("gathered gradients", world),)
    steps = [gradient, gathered, rows]
    if promotes:
        dtype = routing.probability_dtype
        cast = (routing.row_tensor("cast gradients", routing.tokens, dtype=dtype),)
        steps[1:1] = [cast, (routing.row_tensor("gathered gradients before the cast", world, dtype=dtype),)]
    kept = gradient if shared_output(routing) else ()
    first, *others = pairwise(steps)
    return largest((*first[0], *first[1]), *((*kept, *read, *written) for read, written in others))


def _dispatch_collectives(routing: Routing) -> Iterator[Collective]:
    """Collectives of the dispatch and of its backward."""
    world = routing.tokens * routing.ep * routing.etp
    if world == routing.tokens:
        return
    hidden, per_expert = (world, routing.width), (world, routing.moe.num_experts)
    dtype, probabilities = routing.shapes.dtype, routing.probability_dtype
    yield routing.message("all_gather", "tp_ep", per_expert, "bool", "forward")
    yield routing.message("all_gather", "tp_ep", per_expert, probabilities, "forward")
    yield routing.message("all_gather", "tp_ep", hidden, dtype, "forward")
    yield routing.message("reduce_scatter", "tp_ep", hidden, dtype, "backward")
    yield routing.message("reduce_scatter", "tp_ep", per_expert, probabilities, "backward")


def _combine_collectives(routing: Routing) -> Iterator[Collective]:
    """Collectives of the combine and of its backward. Sums use the dtype of the probabilities (`token_combine`)."""
    world = routing.tokens * routing.ep * routing.etp
    if world == routing.tokens:
        return
    hidden = (world, routing.width)
    yield routing.message("reduce_scatter", "tp_ep", hidden, routing.probability_dtype, "forward")
    yield routing.message("all_gather", "tp_ep", hidden, routing.probability_dtype, "backward")
