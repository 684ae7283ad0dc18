"""MoE layers: router, the gate of the shared experts, and the copies of tokens before and after the experts."""

from __future__ import annotations

from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.routing import Routing
from analyzer.modules.tree import Module
from analyzer.time.work.context import WorkContext
from analyzer.time.work.kernels import NO_WORK, Gemm, MemoryBound, Work
from analyzer.units import DTYPE_BYTES

_PASSES: Final = {"flex": 4.0, "alltoall": 4.0, "allgather": 6.0}
"""Bytes moved for each element of a row that is permuted, in 16 bit: each row is read and written once."""
_UNFUSED: Final = 1.5
"""Factor without `--moe-permute-fusion`."""


def router(context: WorkContext) -> Work:
    """Scores of all experts for each token, top-k, probabilities and the auxiliary loss."""
    routing = Routing(context.shapes)
    tokens, experts, hidden = routing.tokens, routing.moe.num_experts, context.inputs.model.hidden_size
    precision = "32" if routing.moe.router_dtype else context.precision
    # Transformer Engine multiplies operands in 16 bit to fp32
    forward = context.precision if context.inputs.router_in_te else precision

    def gemm(name: str, m: int, n: int, k: int, *, of_weight: bool = False) -> Gemm:
        return Gemm(name, m, n, k, precision, depth_is_tokens=of_weight)

    return Work(
        forward=(Gemm("forward", tokens, experts, hidden, forward), MemoryBound("routing", 40.0 * tokens * experts, "permute")),
        backward=(
            MemoryBound("routing gradient", 20.0 * tokens * experts, "permute"),
            gemm("data gradient", tokens, hidden, experts),
            gemm("weight gradient", experts, hidden, tokens, of_weight=True),
        ),
        forward_calls=35,
        backward_calls=25,
    )


def shared_gate(context: WorkContext) -> Work:
    """A score for each token, a sigmoid, and the product with the output of the shared experts (`SharedExpertMLP`, 0.16.1)."""
    tokens, hidden = Routing(context.shapes).tokens, context.inputs.model.hidden_size
    size = float(tokens * hidden)

    def gemm(name: str, m: int, n: int, k: int, *, of_weight: bool = False) -> Gemm:
        return Gemm(name, m, n, k, context.precision, depth_is_tokens=of_weight)

    return Work(
        forward=(gemm("forward", tokens, 1, hidden), MemoryBound("weighted output", 4 * size)),
        backward=(
            MemoryBound("weighted output gradient", 12 * size),
            gemm("data gradient", tokens, hidden, 1),
            gemm("weight gradient", 1, hidden, tokens, of_weight=True),
        ),
        forward_calls=3,
        backward_calls=6,
    )


def permutation(context: WorkContext, *, dispatch: bool) -> Work:
    """Rows sorted by expert before the exchange, and by local expert after it; the reverse in `combine`."""
    routing = Routing(context.shapes)
    moe = routing.moe
    several = routing.local_experts > 1 and moe.dispatcher == "alltoall"
    fused = 1.0 if moe.permute_fusion or moe.dispatcher == "flex" else _UNFUSED
    size = _PASSES[moe.dispatcher] * (2 if several else 1) * fused * routing.rows * routing.width
    calls = 25 if moe.dispatcher == "flex" else 40
    name = "permutation" if dispatch else "reverse permutation"
    return Work(
        forward=(MemoryBound(name, size, "permute"),),
        backward=(MemoryBound(f"{name} gradient", size, "permute"),),
        forward_calls=calls,
        backward_calls=15,
        synchronizes=dispatch and not moe.pad_to_capacity,
    )


def padding(module: Module, context: WorkContext) -> Work:
    """The copies of rows into buffers in which each expert has a multiple of rows, as quantized GEMMs need it, and back.

    Source: `quantization_padding` and `quantization_unpadding` of `TEGroupedMLP` (0.16.1).
    """
    routing = Routing(context.shapes)
    if not (routing.pads and routing.moe.grouped_gemm):
        return NO_WORK
    name = "padding" if module.kind is not ModuleKind.FC2 else "removal of padding"
    copy = MemoryBound(name, 4.0 * routing.multiplied_rows * routing.width)
    return Work((copy,), (copy._replace(name=f"{name} gradient"),), 2, 2)


def expert_biases(module: Module, context: WorkContext) -> Work:
    """What the biases of experts add to the linear layers of the local experts.

    The bias of fc1 is added in the GEMM, and its gradient sums the gradient of the output. That of fc2 is multiplied by the
    probability of each token and added outside, expert by expert; the outputs are concatenated. In backward the gradients of the
    bias and of the probabilities are products that are summed. Source: `TEGroupedMLP._apply_bias` of
    core/transformer/moe/experts.py (0.16.1).
    """
    if not any(each.name == "bias" for each in module.parameters):
        return NO_WORK
    routing = Routing(context.shapes)
    experts, rows = routing.local_experts, routing.multiplied_rows
    if module.kind is not ModuleKind.FC2:
        width = next(each.shape[-1] for each in module.parameters if each.name == "bias")
        return Work((), (MemoryBound("bias gradient", 2.0 * rows * width),), 0, experts)
    size = DTYPE_BYTES[routing.arriving_dtype]
    casts = size > context.element_bytes
    elements = float(rows * routing.width)
    product, total, joined = size, 2 * size + 2, 2 * size
    forward = product + total + joined + (size + 2 if casts else 0)
    gradients = 3 * size + 3 * size + 4  # of the bias, of the probabilities, and of the split
    backward = gradients + (2 * (size + 2) if casts else 0)
    return Work(
        forward=(MemoryBound("biases of experts", forward * elements),),
        backward=(MemoryBound("gradients of the biases of experts", backward * elements),),
        forward_calls=3 + 3 * experts,
        backward_calls=3 + 7 * experts,
    )
