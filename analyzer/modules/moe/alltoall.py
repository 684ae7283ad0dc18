"""The all-to-all dispatcher: each token is sent to the ranks of its experts and back. Legend as in routing.py.

Source: core/transformer/moe/token_dispatcher.py and moe_utils.py permute, unpermute, sort_chunks_by_idxs (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.routing import (
    LOCAL_ROWS,
    RECEIVED_ROWS,
    ROW_ID_MAP,
    SENT_ROWS,
    Routing,
    dispatched_rows,
    permuted_probabilities,
    selection,
    shared_output,
    summed_rows,
)
from analyzer.modules.moe.shared_experts import overlapped_adapter, overlapped_fc2, overlapped_output, unsaved_activation
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import Collective, Module, Tensor, largest, total_bytes


def alltoall_dispatch(shapes: ExpertShapes) -> Module:
    """Tokens [T, hx] → rows of the local experts, sorted by expert."""
    routing = Routing(shapes)
    moe = routing.moe
    row_map = (
        Tensor(name=ROW_ID_MAP, shape=(routing.tokens, 2 * moe.num_experts + 1), dtype="int32", formula="4·T·(2E+1)")
        if moe.permute_fusion
        else Tensor(name="sorted indices", shape=(routing.sent,), dtype="int64", formula="8·T·k")
    )
    permuted = routing.row_tensor(SENT_ROWS, routing.sent)
    received = routing.row_tensor(RECEIVED_ROWS, routing.received)
    local = routing.row_tensor(LOCAL_ROWS, routing.rows)
    sorts = _sorts(routing)
    return Module(
        name="dispatch",
        kind=ModuleKind.DISPATCH,
        function=True,
        saved=(
            replace(row_map, lingers=True),
            *permuted_probabilities(routing, routing.probability_dtype),
            *_received_probabilities(routing),
            *_selection(routing),
            *_sort_map(routing),
        ),
        forward_workspace=(
            permuted,
            *((received,) if routing.ep > 1 else ()),
            *((local,) if sorts else ()),
            *shared_output(routing),
        ),
        # each step reads one tensor and writes another
        backward_workspace=largest(
            (
                routing.row_tensor("row gradients", routing.rows),
                *((routing.row_tensor("sorted row gradients", routing.rows),) if sorts or routing.ep > 1 else ()),
            ),
            (routing.row_tensor("sent gradients", routing.sent), shapes.hidden("token gradient")),
        ),
        collectives=tuple(_dispatch_collectives(routing)),
        source="MoEAlltoAllTokenDispatcher",
    )


def _received_probabilities(routing: Routing) -> tuple[Tensor, ...]:
    """Probabilities before they are sorted by expert, which an overlapped layer references as an output of its dispatch node."""
    if not (routing.shapes.inputs.separate_graphs and _sorts(routing)):
        return ()
    return (Tensor(name="received probabilities", shape=(routing.received,), dtype=routing.probability_dtype),)


def _selection(routing: Routing) -> tuple[Tensor, ...]:
    """What an unfused permutation saves to select probabilities: with padding to a capacity, their indices (`permute`)."""
    if routing.moe.permute_fusion:
        return ()
    if routing.moe.pad_to_capacity:
        return (Tensor(name="indices of the probabilities", shape=(routing.sent,), dtype="int64", formula="8·E·C"),)
    return selection(routing, routing.moe.num_experts, routing.tokens)


def _sort_map(routing: Routing) -> tuple[Tensor, ...]:
    """The target row of each row, for a fused kernel that sorts rows by expert or restores their order."""
    if routing.local_experts == 1 or not routing.moe.permute_fusion or routing.moe.pad_to_capacity:
        return ()
    return (Tensor(name="sort map", shape=(routing.rows,), dtype="int32", formula="4·T·k"),)


def _sorts(routing: Routing) -> bool:
    """Whether sorting rows by expert, and restoring their order, allocates new tensors.

    Equal numbers of rows from a single rank are already sorted: the copy is a view.
    """
    return routing.local_experts > 1 and not (routing.moe.pad_to_capacity and routing.ep * routing.etp == 1)


def dispatched_tokens(routing: Routing) -> tuple[Tensor, ...]:
    """Tokens as sent and as received, which local variables of the layer reference until it returns.

    Without expert parallelism nothing is sent and they are one tensor. If rows are not sorted, the experts save the last one.
    """
    sorts = _sorts(routing) or routing.etp > 1
    sent = routing.row_tensor(SENT_ROWS, routing.sent)
    if routing.ep == 1:
        return (sent,) if sorts else ()
    return (sent, *((routing.row_tensor(RECEIVED_ROWS, routing.received),) if sorts else ()))


def returned_rows(routing: Routing) -> tuple[Tensor, ...]:
    """Rows that are summed for each token, which a local variable references until the layer ends. Empty if they are saved."""
    if summed_rows(routing, routing.sent):
        return ()
    return (routing.row_tensor("returned rows", routing.sent),)


def _dispatch_collectives(routing: Routing) -> Iterator[Collective]:
    """Collectives of the dispatch and of its backward."""
    moe, ep, etp = routing.moe, routing.ep, routing.etp
    dtype, probabilities = routing.shapes.dtype, routing.probability_dtype
    if ep * etp == 1:
        return
    if not moe.pad_to_capacity:
        yield routing.message("all_gather", "tp_ep", (moe.num_experts * ep * etp,), "int64", "forward")
    for phase, sent in (("forward", routing.sent), ("backward", routing.received)):
        if ep > 1:
            yield routing.message("all_to_all", "ep", (sent, routing.width), dtype, phase)
            yield routing.message("all_to_all", "ep", (sent,), probabilities, phase)
        if etp > 1:
            kind = "all_gather" if phase == "forward" else "reduce_scatter"
            yield routing.message(kind, "etp", (routing.received * etp, routing.width), dtype, phase)
            yield routing.message(kind, "etp", (routing.received * etp,), probabilities, phase)


def _combine_collectives(routing: Routing) -> Iterator[Collective]:
    """Collectives of the combine and of its backward. Sums use the dtype of the probabilities (`combine_preprocess`)."""
    ep, etp = routing.ep, routing.etp
    dtype, probabilities = routing.shapes.dtype, routing.probability_dtype
    if ep * etp == 1:
        return
    for phase, sent in (("forward", routing.received), ("backward", routing.sent)):
        if etp > 1:
            kind = "reduce_scatter" if phase == "forward" else "all_gather"
            yield routing.message(kind, "etp", (routing.received * etp, routing.width), probabilities, phase)
        if ep > 1:
            yield routing.message("all_to_all", "ep", (sent, routing.width), dtype, phase)


def _summed_over_parts(routing: Routing) -> tuple[Tensor, ...]:
    """Tensors of the reduce-scatter over expert-tensor-parallel ranks, in the dtype of the probabilities.

    `combine_preprocess`. PyTorch copies a list of inputs to a flat tensor (newLikeFlat in ProcessGroupNCCL).
    """
    if routing.etp == 1:
        return ()
    dtype = routing.probability_dtype
    cast = (routing.row_tensor("rows before the sum", routing.rows, dtype=dtype),) if dtype != routing.shapes.dtype else ()
    flat = () if routing.moe.pad_to_capacity else (routing.row_tensor("flat copy of the rows", routing.rows, dtype=dtype),)
    return (*cast, *flat, routing.row_tensor("sums", routing.received, dtype=dtype))


def _sums_expert_output(routing: Routing) -> bool:
    """Whether the summed rows are the output of the experts: nothing is sent or sorted."""
    return routing.ep * routing.etp == 1 and not _sorts(routing)


def _combined(routing: Routing, *, saved: bool) -> tuple[Tensor, ...]:
    """Tensors of the combine at its peak, in addition to the rows that are summed if these are saved."""
    sends = routing.ep > 1
    dispatched = dispatched_rows(routing)
    expert_output = routing.row_tensor("expert output", routing.rows)
    unsorted = (routing.row_tensor("unsorted rows", routing.rows),) if _sorts(routing) else ()
    latent = routing.moe.latent_size is not None  # then the output of the shared experts is added later
    before_fc2 = unsaved_activation(routing.shapes)
    computed, shared = overlapped_output(routing.shapes)
    returning: tuple[Tensor, ...] = ()
    if routing.ep > 1 and routing.shapes.inputs.core.holds_returning_rows:
        returning = (routing.row_tensor("rows that were sent back", routing.received),)
    scattered = (*returning, *computed) if computed else ()
    output = (
        routing.row_tensor("output", routing.tokens),
        *shared,
        *((routing.shapes.hidden("output with that of the shared experts"),) if shared_output(routing) and not latent else ()),
    )
    if not saved:
        last = returned_rows(routing)
        return largest(
            (*dispatched, expert_output, *unsorted, *_summed_over_parts(routing), *before_fc2),
            (*(unsorted or (expert_output,)), *(last if sends else ()), *before_fc2),
            (*last, *scattered),
            (*last, *output),
        )
    # deterministic PyTorch allocates the zeros twice, until the rows are summed
    sums = (routing.row_tensor("zeros", routing.tokens), routing.row_tensor("output", routing.tokens), *shared)
    output = largest(sums, output)
    if routing.ep * routing.etp == 1:  # the saved rows are the unsorted rows, or the output of the experts
        return largest(() if _sums_expert_output(routing) else (expert_output, *before_fc2), scattered, output)
    # the saved rows are received after the output of the experts is freed
    beyond = routing.row_tensor("expert output beyond the summed rows", max(0, routing.rows - routing.sent))
    returned = (*(unsorted or (expert_output,)), *before_fc2)
    return largest((*dispatched, beyond, *unsorted, *_summed_over_parts(routing), *before_fc2), returned, scattered, output)


def _gathered_gradients(routing: Routing) -> tuple[Tensor, ...]:
    """Gradients that are gathered over expert-tensor-parallel ranks in the dtype of the probabilities, if it is another one."""
    dtype = routing.probability_dtype
    if routing.etp == 1 or dtype == routing.shapes.dtype:
        return ()
    gathered = routing.row_tensor("gathered gradients", routing.rows, dtype=dtype)
    flat = () if routing.moe.pad_to_capacity else (replace(gathered, name="flat copy of the gradients"),)
    return (routing.row_tensor("gradients before they are gathered", routing.received, dtype=dtype), gathered, *flat)


def alltoall_combine(shapes: ExpertShapes) -> Module:
    """Rows of the local experts → [T, h], summed over the experts of each token."""
    routing = Routing(shapes)
    saved = summed_rows(routing, routing.sent, made_in=routing.makes_output if _sums_expert_output(routing) else "")
    shared = shared_output(routing)
    gradient = shapes.branch_gradient
    gathers = routing.etp > 1
    exchanged = (routing.row_tensor("exchanged gradients", routing.received),) if routing.ep > 1 or gathers else ()
    flat = (routing.row_tensor("flat copy of the gradients", routing.rows),) if gathers and not routing.moe.pad_to_capacity else ()
    sorts = (routing.row_tensor("sorted gradients", routing.rows),) if _sorts(routing) else ()
    received = routing.row_tensor("received gradients", routing.rows)
    of_shared, of_adapter = overlapped_fc2(routing.shapes)[1], overlapped_adapter(routing.shapes)
    if saved:
        beyond = max(0, received.bytes - total_bytes(saved))
        received = Tensor(name="received gradients beyond the summed rows", shape=(beyond,), dtype="uint8")
    return Module(
        name="combine",
        kind=ModuleKind.COMBINE,
        function=True,
        saved=(*_sort_map(routing), *saved),
        forward_workspace=(*dispatched_tokens(routing), *_combined(routing, saved=bool(saved)), *shared),
        backward_workspace=largest(
            (gradient, routing.row_tensor("sent gradients", routing.sent)),
            *(((*of_shared, received),) if of_shared else ()),
            # shared experts read the gradient of the sum later; otherwise it is freed, and so are the saved rows
            *(
                (*((gradient,) if shared else ()), *of_adapter, *each)
                for each in ((*exchanged, received, *flat), (received, *sorts), _gathered_gradients(routing))
            ),
        ),
        collectives=tuple(_combine_collectives(routing)),
        source="token_combine and unpermute",
    )
