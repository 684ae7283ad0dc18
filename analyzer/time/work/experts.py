"""MoE layers: router, the gate of the shared experts, and the copies of tokens before and after the experts."""

from __future__ import annotations

from typing import Final, NamedTuple

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.flex import arrivals
from analyzer.modules.moe.hybridep import weights_of_token
from analyzer.modules.moe.routing import Routing
from analyzer.modules.tree import Module
from analyzer.specs import MoeSpec
from analyzer.time.work.context import WorkContext
from analyzer.time.work.kernels import NO_WORK, Gemm, MemoryBound, Work
from analyzer.units import DTYPE_BYTES


def router(context: WorkContext) -> Work:
    """Scores of all experts for each token, top-k, probabilities and the auxiliary loss."""
    routing = context.routing
    tokens, experts, hidden = routing.tokens, routing.moe.num_experts, context.inputs.model.hidden_size
    precision = "32" if routing.moe.router_dtype else context.precision
    # Transformer Engine multiplies operands in 16 bit to fp32
    forward = context.precision if context.inputs.router_in_te else precision

    def gemm(name: str, m: int, n: int, k: int, *, of_weight: bool = False) -> Gemm:
        return Gemm(name, m, n, k, precision, depth_is_tokens=of_weight)

    size = float(tokens * hidden)
    # with `--moe-router-dtype` the input is cast, and in backward the input again and its gradient
    casts = size * 6 if routing.moe.router_dtype and not context.inputs.router_in_te else 0.0
    choice, choice_back = _choice(routing.moe)
    moved = choice.bytes * tokens * experts + casts
    # the gradients of the router's input and of the experts' are added
    returned = choice_back.bytes * tokens * experts + 2 * casts + size * 6
    return Work(
        forward=(
            Gemm("forward", tokens, experts, hidden, forward),
            MemoryBound("routing", moved, "permute", choice.launches),
        ),
        backward=(
            MemoryBound("routing gradient", returned, "permute", choice_back.launches),
            gemm("data gradient", tokens, hidden, experts),
            gemm("weight gradient", experts, hidden, tokens, of_weight=True),
        ),
    )


class _OfScore(NamedTuple):
    """What is done with the scores of all experts, in fp32."""

    bytes: float
    """Bytes moved for each score."""
    launches: int


_TOPK: Final = 4 * 16
"""Bytes that choosing the largest scores reads for each: the row once for every two of 32 bits.

Source: `radixSelect` of aten/src/ATen/native/cuda/SortingRadixSelect.cuh (PyTorch 2.10), RADIX_BITS.
"""
_MAP: Final = 25
"""The map of choices: zeros (4), integers (8), a copy with the choices (8), booleans (5)."""


def _choice(moe: MoeSpec) -> tuple[_OfScore, _OfScore]:
    """Top-k, probabilities and losses in forward and backward, as separate kernels of PyTorch.

    Sources: `topk_routing_with_score_function`, `compute_routing_scores_for_aux_loss`, `switch_load_balancing_loss_func` and
    `z_loss_func` of core/transformer/moe/moe_utils.py, `TopKRouter` of router.py (0.16.1). Kernels and bytes are those that the
    shadow engine records.
    """
    sigmoid = moe.score_function == "sigmoid"
    parts = [(_TOPK + 12.0 + _MAP, 10, 20.0, 8)]  # with the probabilities: zeros, and a copy with those of the choices
    if sigmoid:
        parts += [(8.0, 3, 12.0, 7)]
    elif moe.pre_softmax:
        parts += [(8.0, 0, 12.0, 0)]
    if moe.expert_bias:  # the sum, and the counts of the choices
        parts += [(8.0 + 1.0, 3, 0.0, 0)]
    if moe.aux_loss_coeff:  # scores of their own, the choices by them, and sums of both
        scores, gradients = ((20.0, 16), (72.0, 15)) if sigmoid else ((8.0, 12), (20.0, 7))
        parts += [(_TOPK + _MAP + 5.0 + scores[0], scores[1], *gradients)]
    if moe.z_loss_coeff:
        parts += [(4.0, 6, 36.0, 12)]
    forward, kernels, backward, kernels_back = (sum(column) for column in zip(*parts, strict=True))
    return _OfScore(forward, int(kernels)), _OfScore(backward, int(kernels_back))


def shared_gate(context: WorkContext) -> Work:
    """A score for each token, a sigmoid, and the product with the output of the shared experts (`SharedExpertMLP`, 0.16.1).

    The backward multiplies twice (10 bytes for each element), sums (2), and adds the gradient of the gate's input (6).
    """
    tokens, hidden = context.routing.tokens, context.inputs.model.hidden_size
    size = float(tokens * hidden)

    def gemm(name: str, m: int, n: int, k: int, *, of_weight: bool = False) -> Gemm:
        return Gemm(name, m, n, k, context.precision, depth_is_tokens=of_weight)

    return Work(
        forward=(gemm("forward", tokens, 1, hidden), MemoryBound("weighted output", 4 * size, launches=2)),
        backward=(
            MemoryBound("weighted output gradient", 18 * size, launches=5),
            gemm("data gradient", tokens, hidden, 1),
            gemm("weight gradient", 1, hidden, tokens, of_weight=True),
        ),
    )


def permutation(context: WorkContext, *, dispatch: bool) -> Work:
    """Rows sorted by expert before the exchange, and by local expert after it; the reverse in `combine`.

    The fused kernels read each token once and write it for each of its experts, or add these up. `alltoall` also sorts the rows
    that arrived if the rank has several experts. Unfused, rows are selected by index or concatenated, and added to a buffer of
    zeros. Shared experts add their output, and their gradient, to that of the experts. Sources: moe_utils.py and
    token_dispatcher.py of core/transformer/moe (0.16.1).
    """
    routing = context.routing
    moe = routing.moe
    arrives = moe.dispatcher != "alltoall"
    rows, tokens = (routing.rows, _arrived_tokens(routing)) if arrives else (routing.sent, routing.tokens)
    permuted, plain = 2.0 * rows * routing.width, 2.0 * tokens * routing.width
    if moe.permute_fusion or moe.dispatcher == "flex":
        selected, added = permuted + plain, permuted + plain
    else:
        selected, added = 2 * permuted, 3 * permuted + plain
    sort = 4.0 * routing.rows * routing.width if routing.local_experts > 1 and not arrives else 0.0
    forward, backward = (selected, added) if dispatch else (added, selected)
    # the output of the shared experts is added in forward, and their gradient in backward
    shared = 3.0 * routing.tokens * context.inputs.model.hidden_size if moe.shared_ffn_hidden_size else 0.0
    weights, found = _of_hybridep(routing) if dispatch and moe.flex is not None and moe.flex.backend == "hybridep" else (0.0, 0.0)
    launches = 6 if moe.dispatcher == "allgather" else 13
    name = "permutation" if dispatch else "reverse permutation"
    return Work(
        forward=(MemoryBound(name, forward + sort + shared + found, "permute", launches if dispatch else 4),),
        backward=(MemoryBound(f"{name} gradient", backward + sort + shared + weights, "permute", 3),),
        synchronizes=dispatch and (not moe.pad_to_capacity or (moe.flex is not None and moe.flex.equalizes)),
    )


def _of_hybridep(routing: Routing) -> tuple[float, float]:
    """Bytes of the gradients of all weights of tokens that arrived, and of finding where the tokens of the group go.

    Each rank reads the routing map of the group for the experts of its NVLink domain twice, and writes the map of its own experts
    and the row of each token for each of them. Sources: `unpermute_kernel` of csrc/hybrid_ep/extension/permute.cu, `scan` of
    csrc/hybrid_ep/backend/hybrid_ep_backend.cuh (deepseek-ai/DeepEP, branch hybrid-ep).
    """
    world = routing.tokens * routing.ep * routing.etp
    of_domain = weights_of_token(routing)
    return 4.0 * arrivals(routing) * of_domain, world * (2.0 * of_domain + 5.0 * routing.local_experts)


def _arrived_tokens(routing: Routing) -> float:
    """Tokens that reach this rank: those of all ranks with the all-gather dispatcher, and those for its experts with `flex`."""
    if routing.moe.dispatcher == "allgather":
        return routing.tokens * routing.ep * routing.etp
    return arrivals(routing)


def padding(module: Module, context: WorkContext) -> Work:
    """The copies of rows into buffers in which each expert has a multiple of rows, as quantized GEMMs need it, and back.

    Source: `quantization_padding` and `quantization_unpadding` of `TEGroupedMLP` (0.16.1).
    """
    routing = context.routing
    if not (routing.pads and routing.moe.grouped_gemm):
        return NO_WORK
    name = "padding" if module.kind is not ModuleKind.FC2 else "removal of padding"
    copy = MemoryBound(name, 4.0 * routing.multiplied_rows * routing.width)
    return Work((copy,), (copy._replace(name=f"{name} gradient"),))


def expert_biases(module: Module, context: WorkContext) -> Work:
    """What the biases of experts add to the linear layers of the local experts.

    The bias of fc1 is added in the GEMM, and its gradient sums the gradient of the output. That of fc2 is multiplied by the
    probability of each token and added outside, expert by expert; the outputs are concatenated. In backward the gradients of the
    bias and of the probabilities are products that are summed. Source: `TEGroupedMLP._apply_bias` of
    core/transformer/moe/experts.py (0.16.1).
    """
    if not any(each.name == "bias" for each in module.parameters):
        return NO_WORK
    routing = context.routing
    experts, rows = routing.local_experts, routing.multiplied_rows
    if module.kind is not ModuleKind.FC2:
        width = next(each.shape[-1] for each in module.parameters if each.name == "bias")
        return Work((), (MemoryBound("bias gradient", 2.0 * rows * width, launches=2 * experts),))
    size = DTYPE_BYTES[routing.arriving_dtype]
    casts = size > context.element_bytes
    elements = float(rows * routing.width)
    product, total, joined = size, 2 * size + 2, 2 * size
    forward = product + total + joined + (size + 2 if casts else 0)
    gradients = 3 * size + 3 * size + 4  # of the bias, of the probabilities, and of the split
    backward = gradients + (2 * (size + 2) if casts else 0)
    return Work(
        forward=(MemoryBound("biases of experts", forward * elements, launches=1 + 2 * experts),),
        backward=(MemoryBound("gradients of the biases of experts", backward * elements, launches=2 + 5 * experts),),
    )
