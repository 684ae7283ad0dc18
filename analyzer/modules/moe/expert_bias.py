"""The biases of experts, which are multiplied by the probabilities of the tokens.

Sources: core/transformer/mlp.py `MLP.forward`, core/transformer/moe/experts.py `TEGroupedMLP._apply_bias` (0.16.1).
"""

from __future__ import annotations

from analyzer.modules.moe.routing import Routing
from analyzer.modules.reduction import sum_buffer
from analyzer.modules.tree import Parameter, Tensor


def expert_bias(routing: Routing, width: int) -> tuple[Parameter, ...]:
    """The biases [E/ep, width] of one of the layers of the local experts; empty with `--disable-bias-linear`."""
    if not routing.shapes.model.bias_linear:
        return ()
    return (
        Parameter(
            name="bias",
            shape=(routing.local_experts, width),
            dtype=routing.shapes.dtype,
            sharding="expert",
            full_shape=(routing.moe.num_experts, width),
            pieces=1 if routing.moe.legacy_grouped_gemm else routing.local_experts,
        ),
    )


def bias_added(routing: Routing) -> tuple[Tensor, ...]:
    """The biases times the probabilities, in the dtype of the probabilities, and the output with them.

    `TEGroupedMLP._apply_bias` concatenates the outputs of its experts. The MLP of an expert adds the product in place.
    """
    if not routing.shapes.model.bias_linear or routing.runs_sequentially:
        return ()
    grouped = ("output with bias", "output with bias of each expert")
    names = grouped if routing.moe.grouped_gemm else ("bias times probabilities",)
    return tuple(routing.row_tensor(name, routing.multiplied_rows, dtype=routing.arriving_dtype) for name in names)


def bias_gradients(routing: Routing, rows_at_once: int) -> tuple[Tensor, ...]:
    """Gradients of the bias times the probabilities that the MLP of an expert adds in place, before those of fc2."""
    if not routing.shapes.model.bias_linear or routing.moe.grouped_gemm:
        return ()
    dtype = routing.arriving_dtype
    converted = ("output gradient in fp32",) if dtype == "fp32" else ()
    names = (*converted, "gradient of the bias before its sum", "gradient of the probabilities before its sum")
    summed = sum_buffer(routing.shapes, rows=rows_at_once, columns=routing.shapes.model.hidden_size)
    return (*(routing.row_tensor(name, rows_at_once, dtype=dtype) for name in names), *summed)
