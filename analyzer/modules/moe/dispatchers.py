"""Choose the token dispatcher of a MoE layer. Each dispatcher is imported on first use, and only here."""

from __future__ import annotations

from analyzer.modules.moe.routing import Routing
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import Module, Tensor


def dispatcher(shapes: ExpertShapes) -> tuple[Module, Module]:
    """The dispatch module, which sends tokens to the experts, and the combine module, which returns them."""
    routing = Routing(shapes)
    if routing.moe.dispatcher == "allgather":
        from analyzer.modules.moe.allgather import allgather_combine, allgather_dispatch

        return allgather_dispatch(shapes), allgather_combine(shapes)
    if routing.moe.dispatcher == "alltoall":
        from analyzer.modules.moe.alltoall import alltoall_combine, alltoall_dispatch

        return alltoall_dispatch(shapes), alltoall_combine(shapes)
    if routing.flex.backend == "hybridep":
        from analyzer.modules.moe.hybridep import hybridep_combine, hybridep_dispatch

        return hybridep_dispatch(shapes), hybridep_combine(shapes)
    from analyzer.modules.moe.deepep import deepep_combine, deepep_dispatch

    return deepep_dispatch(shapes), deepep_combine(shapes)


def dispatched_tensors(routing: Routing) -> tuple[Tensor, ...]:
    """Tensors of the dispatcher that local variables of the layer reference until it returns (`MoELayer.forward`)."""
    if routing.moe.dispatcher == "allgather":
        from analyzer.modules.moe.allgather import gathered_probabilities

        return gathered_probabilities(routing)
    if routing.moe.dispatcher == "alltoall":
        from analyzer.modules.moe.alltoall import dispatched_tokens

        return dispatched_tokens(routing)
    if routing.flex.backend == "hybridep":
        return ()  # its rows and probabilities are those that the experts save
    from analyzer.modules.moe.deepep import arrived_tensors

    return arrived_tensors(routing)


def combined_tensors(routing: Routing) -> tuple[Tensor, ...]:
    """Tensors that local variables of the layer reference after the combine, until the layer returns (`MoELayer.forward`)."""
    if routing.moe.dispatcher != "alltoall":
        return dispatched_tensors(routing)
    from analyzer.modules.moe.alltoall import returned_rows

    return (*dispatched_tensors(routing), *returned_rows(routing))


def returned_gradients(routing: Routing) -> tuple[Tensor, ...]:
    """The gradients that the flex dispatcher gets from other ranks before the backward of overlapped shared experts."""
    if routing.moe.dispatcher != "flex":
        return ()
    if routing.flex.backend == "hybridep":
        return (routing.row_tensor("row gradients", routing.rows),)
    from analyzer.modules.moe.flex import arrivals

    return (routing.row_tensor("gradients of arrivals", arrivals(routing)),)


def flex_buffer_bytes(shapes: ExpertShapes) -> int:
    """Bytes of the flex dispatcher's buffers on a rank, which the driver allocates outside PyTorch; 0 for other dispatchers."""
    if shapes.model.moe is None or shapes.model.moe.flex is None:
        return 0
    if shapes.model.moe.flex.backend == "hybridep":
        from analyzer.modules.moe.hybridep import hybridep_buffer_bytes

        return hybridep_buffer_bytes(shapes)
    from analyzer.modules.moe.deepep import deepep_buffer_bytes

    return deepep_buffer_bytes(shapes)


def gathered_token_bytes(shapes: ExpertShapes) -> int:
    """Bytes of the tokens that the all-gather dispatcher gathers in Megatron's global memory buffer."""
    from analyzer.modules.moe.allgather import gathered_tokens

    return gathered_tokens(shapes).bytes
