"""Which dispatcher a MoE layer uses. The one place that imports dispatchers; each is loaded when it is used."""

from __future__ import annotations

from analyzer.modules.moe.routing import Routing
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Tensor


def dispatcher(shapes: Shapes) -> tuple[Module, Module]:
    """The modules that send tokens to the experts, and back."""
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
    """Tensors of the dispatcher that the frame of the layer references until it returns (`MoELayer.forward`)."""
    if routing.moe.dispatcher == "allgather":
        from analyzer.modules.moe.allgather import gathered_probabilities

        return gathered_probabilities(routing)
    if routing.moe.dispatcher == "alltoall":
        from analyzer.modules.moe.alltoall import dispatched_tokens

        return dispatched_tokens(routing)
    return ()


def flex_buffer_bytes(shapes: Shapes) -> int:
    """Memory of the flex dispatcher's buffers on a rank, which the driver allocates outside PyTorch; 0 for other dispatchers."""
    if shapes.model.moe is None or shapes.model.moe.flex is None:
        return 0
    if shapes.model.moe.flex.backend == "hybridep":
        from analyzer.modules.moe.hybridep import hybridep_buffer_bytes

        return hybridep_buffer_bytes(shapes)
    from analyzer.modules.moe.deepep import deepep_buffer_bytes

    return deepep_buffer_bytes(shapes)


def gathered_token_bytes(shapes: Shapes) -> int:
    """Bytes of the tokens that the all-gather dispatcher gathers, which lie in Megatron's global memory buffer."""
    from analyzer.modules.moe.allgather import gathered_tokens

    return gathered_tokens(shapes).bytes
