"""Kernels of a gated delta net between its projections. The time of each is taken to be that of its bytes.

The forward of the delta rule and of the convolution were measured alone (tools/kernel_tables.py). Both reach a smaller share of the
memory bandwidth than other kernels, and their backward is taken to reach the same.

Sources: `GatedDeltaNet.forward` (core/ssm/gated_delta_net.py, 0.16.1), and the kernels of fla-core 0.6.0 and causal_conv1d 1.6 that
`analyzer.modules.attention.gated_delta_net` names. Legend: K, V widths of all keys and values of a token, R width of keys repeated
for each value head, a value heads, all on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from analyzer.modules.attention.gated_delta_net import CHUNK, DeltaNet
from analyzer.modules.kinds import Kernels
from analyzer.modules.tree import Module
from analyzer.time.work.context import WorkContext
from analyzer.time.work.elementwise import norm
from analyzer.time.work.kernels import MemoryBound, Work
from analyzer.time.work.linear import joined, linear, repeated

_SMALL: Final = (11, 14)
"""Kernels in forward and backward that compute decay and beta from one number for each value head: casts, bias, softplus, sigmoid,
products and copies."""
_RULE: Final = (5, 11)
"""Kernels of the delta rule in forward and backward, with cumulative sums and additions of gradients."""


def input_projection(module: Module, context: WorkContext) -> Work:
    """The linear layer. In backward its output gradient is concatenated, and copied to [s, b, …] for more than one sample."""
    net, tokens = _net(context)
    width = net.spec.projected_width // net.shapes.t
    copies = 1 if net.shapes.b == 1 else 2
    added = MemoryBound("concatenation of gradients", 4.0 * tokens * width * copies, launches=copies)
    return joined(linear(module, context), Work((), (added,)))


def convolution(_: Module, context: WorkContext) -> Work:
    """A copy to [b, channels, s] and the convolution of each channel."""
    net, tokens = _net(context)
    moved = tokens * (net.spec.convolved_width // net.shapes.t)
    return Work(
        (MemoryBound("copy of channels", 4.0 * moved), MemoryBound("convolution", 4.0 * moved, "convolution")),
        (MemoryBound("copy of channels", 4.0 * moved), MemoryBound("convolution gradient", 6.0 * moved, "convolution", 3)),
    )


def prepared(_: Module, context: WorkContext) -> Work:
    """Copies, norms of queries and keys, repetitions for the value heads, decay and beta."""
    net, tokens = _net(context)
    keys, values, repeated = net.key, net.value, net.repeated if net.repeats else 0
    repetition = 2 * 2.0 * (keys + repeated) if net.repeats else 0.0
    launches = 2 if net.repeats else 0
    small = 40.0 * net.heads
    forward = 2 * 8.0 * keys + repetition + 2 * 4.0 * values + small
    backward = repetition + 2 * 6.0 * keys + 4.0 * (2 * keys + values) + small
    return Work(
        (MemoryBound("norms of queries and keys, gates", tokens * forward, launches=6 + launches + _SMALL[0]),),
        (MemoryBound("gradients of queries, keys and gates", tokens * backward, launches=3 + launches + _SMALL[1]),),
    )


def delta_rule(_: Module, context: WorkContext) -> Work:
    """The bytes that each kernel of the chunked delta rule reads and writes."""
    net, tokens = _net(context)
    forward, backward = bytes_of_rule(net.repeated, net.value, net.heads, net.spec.key_head_dim * net.spec.value_head_dim)
    return Work(
        (MemoryBound("delta rule", tokens * forward, "scan", _RULE[0]),),
        (MemoryBound("delta rule gradient", tokens * backward, "scan", _RULE[1]),),
    )


def bytes_of_rule(r: float, v: float, heads: float, state_of_head: float) -> tuple[float, float]:
    """Bytes of the kernels of the chunked delta rule in forward and backward, for a token.

    Forward: the inverse of a chunk; w and u; the states; the output. Backward: w, u and the states again; the gradients of new
    values, of the states, of queries, keys and w, and of the inverse. `r`, `v`: widths of the repeated keys and of the values.
    `state_of_head`: elements of the state of a head.
    """
    inverse = 2.0 * CHUNK * heads
    state = 2.0 * heads * state_of_head / CHUNK
    chunk = 2.0 * r + inverse
    representation = 2.0 * (r + v) + inverse + 2.0 * (r + v)
    states = 2.0 * (2 * r + v) + state + 2.0 * v
    output = 2.0 * (2 * r + v) + state + 2.0 * v
    of_values = 2.0 * (2 * r + 2 * v)
    of_states = 2.0 * (3 * r + 2 * v) + state + 2.0 * v
    of_queries = 2.0 * (3 * r + 3 * v) + 2 * state + 2.0 * 3 * r
    of_inverse = 2.0 * (2 * r + 2 * v) + inverse + 2.0 * (r + v) + 6.0 * r
    forward = chunk + representation + states + output
    return forward, representation + states + of_values + of_states + of_queries + of_inverse


def gated_norm(module: Module, context: WorkContext) -> Work:
    """The norm of each head, the product with the gate as one compiled kernel, and a copy to [s, b, …] for several samples."""
    net, tokens = _net(context)
    elements = tokens * net.value
    copies = 0 if net.shapes.b == 1 else 1
    copied = (MemoryBound("copy to [s, b, …]", 4.0 * elements),) * copies
    gate = Work((MemoryBound("gate", 6.0 * elements), *copied), (*copied, MemoryBound("gate gradient", 10.0 * elements)))
    work = joined(norm(elements, recomputed=False, vectors=len(module.parameters)), gate)
    return repeated(work) if net.shapes.recomputes("gdn_norm_out") else work


def _net(context: WorkContext) -> tuple[DeltaNet, int]:
    """The sizes of a delta net, and the tokens of a microbatch."""
    shapes = context.shapes
    return DeltaNet(shapes), shapes.s * shapes.b


FORMULAS: Final[dict[Kernels, Callable[[Module, WorkContext], Work]]] = {
    Kernels.LINEAR_ATTENTION_INPUT: input_projection,
    Kernels.CONVOLUTION: convolution,
    Kernels.DELTA_RULE_INPUTS: prepared,
    Kernels.DELTA_RULE: delta_rule,
    Kernels.GATED_NORM: gated_norm,
}
