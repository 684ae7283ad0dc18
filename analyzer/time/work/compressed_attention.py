"""Kernels of DeepSeek-V4: attention to compressed keys, projections of groups of heads, and hyper-connections.

Source: the statements of core/transformer/experimental_attention_variant/csa.py and core/transformer/hyper_connection.py of the
branch dev of Megatron-LM, August 2026. No measurements of the kernels are known: those of attention are counted as dense attention
with as many operations, and the others by the bytes of the tensors that they read and write.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Final, Literal

from analyzer.modules.attention.compressed_attention import Compressed
from analyzer.modules.kinds import Kernels
from analyzer.modules.residual.hyper_connections import connections_of
from analyzer.modules.tree import Module
from analyzer.specs.attention import COMPRESSION, OVERLAPPING
from analyzer.time.work.context import WorkContext
from analyzer.time.work.kernels import Attention, Gemm, Kernel, MemoryBound, Work
from analyzer.time.work.linear import weight_of


def attention(module: Module, context: WorkContext) -> Work:
    """The scores and the choice of compressed keys, and attention to the read keys."""
    shapes = context.shapes
    sizes = next(Compressed(shapes, kind) for kind in COMPRESSION if kind == module.name)
    pairs = _pairs(sizes)
    forward = _choice(sizes) if sizes.ratio == OVERLAPPING else ()
    backward: tuple[Kernel, ...] = ()
    if sizes.ratio == OVERLAPPING and sizes.spec.logged:
        scored = float(shapes.b * shapes.s * min(sizes.spec.topk, sizes.compressed_keys))
        heads = sizes.spec.index_heads * sizes.spec.index_head_dim
        forward += (MemoryBound("loss of the indexer", 4 * scored * sizes.spec.index_head_dim + 400 * scored, launches=70),)
        backward = (MemoryBound("gradients of the indexer", 4.0 * shapes.b * shapes.s * heads, launches=3),)
    if sizes.spec.kernels:
        return Work((*forward, _kernel(sizes, "forward", pairs)), (_kernel(sizes, "backward", pairs), *backward))
    copied, scores = _of_pytorch(sizes)
    return Work(
        (*forward, MemoryBound("keys of each query", 18 * copied, launches=6), MemoryBound("softmax", 36 * scores, launches=9)),
        (
            MemoryBound("softmax gradient", 60 * scores, launches=10),
            MemoryBound("key gradient", 40 * copied, launches=8),
            *backward,
        ),
    )


def _pairs(sizes: Compressed) -> float:
    """Pairs of a query and a key of one head on a rank. The first queries of a sample have fewer keys before them."""
    queries = min(sizes.shapes.model.sample_length or sizes.sequence, sizes.sequence)
    window = min(sizes.spec.window, queries)
    near = queries * window - window * (window - 1) / 2
    compressed = sizes.read_keys - min(sizes.spec.window, sizes.sequence)
    far = min(compressed, queries // sizes.ratio) if sizes.ratio else 0
    limit = far * sizes.ratio  # the first queries that have these keys before them
    return (near + far * max(queries - limit / 2, queries / 2)) * sizes.shapes.s / queries


def _choice(sizes: Compressed) -> tuple[Kernel, ...]:
    """The scores of the indexer for all compressed keys before a query, in fp32, and the highest ones."""
    shapes, spec = sizes.shapes, sizes.spec
    tokens, keys = shapes.s * shapes.b, sizes.compressed_keys
    return (
        Gemm("index scores", tokens * spec.index_heads, keys, spec.index_head_dim, output_bytes=4 / spec.index_heads),
        MemoryBound("choice of keys", 12.0 * tokens * keys, launches=6),
    )


def _kernel(sizes: Compressed, name: Literal["forward", "backward"], pairs: float) -> Attention:
    width = sizes.spec.head_dim
    return Attention(name, sizes.shapes.b, sizes.heads, sizes.shapes.s, sizes.read_keys, pairs, width, width)


def _of_pytorch(sizes: Compressed) -> tuple[float, float]:
    """Elements of the copied keys of all queries, and of all scores."""
    tokens = float(sizes.shapes.s * sizes.shapes.b)
    return tokens * sizes.read_keys * sizes.spec.head_dim, tokens * sizes.read_keys * sizes.heads


def grouped_output(module: Module, context: WorkContext) -> Work:
    """The rotation of the output, and a product for each group of heads with copies of both factors in its order."""
    shapes = context.shapes
    rows, groups = shapes.s * shapes.b, context.inputs.model.compressed_attention
    assert groups is not None, "the model has compressed attention"
    n, k = weight_of(module).shape[0] // groups.output_groups, weight_of(module).shape[1]
    count, each = groups.output_groups, context.element_bytes
    rotated = MemoryBound("rotation of the output", 2 * each * rows * k * count)
    copied = MemoryBound("copies in the order of the groups", 2 * each * rows * (n + k) * count, launches=2)

    def gemm(name: str, m: int, columns: int, depth: int, *, weights: bool = False) -> Gemm:
        return Gemm(name, m, columns, depth, context.precision, count, output_bytes=each, depth_is_tokens=weights)

    added = MemoryBound("weight gradient", 10.0 * prod(weight_of(module).shape))
    return Work(
        (rotated, copied, gemm("forward", rows, n, k)),
        (copied, gemm("data gradient", rows, k, n), gemm("weight gradient", n, k, rows, weights=True), added, rotated),
    )


def connection(_: Module, context: WorkContext) -> Work:
    """The weights of each token from all parts of its stream, and the sum that the branch reads. PyTorch computes them in fp32."""
    spec, shapes = connections_of(context.shapes), context.shapes
    hidden = 2.0 * shapes.s * shapes.b * context.inputs.model.hidden_size
    stream = hidden * spec.streams
    if spec.fused:
        mapped = (MemoryBound("weights of the stream", stream, launches=3),)
        gradients = MemoryBound("gradients of the weights of the stream", 9 * stream, launches=8)
    else:
        mapped = (MemoryBound("weights of the stream", 7 * stream, launches=8),)
        gradients = MemoryBound("gradients of the weights of the stream", 23 * stream, launches=14)
    read = MemoryBound("sum of the stream", stream + hidden)
    return Work((*mapped, read), (*((read,) if spec.recomputed else ()), gradients))


def mixing(_: Module, context: WorkContext) -> Work:
    """The stream is read and written, with the output of the branch added."""
    spec, shapes = connections_of(context.shapes), context.shapes
    hidden = 2.0 * shapes.s * shapes.b * context.inputs.model.hidden_size
    mixed = MemoryBound("mix of the stream", 2 * hidden * spec.streams + hidden)
    gradients = MemoryBound("gradients of the mix", 4 * hidden * spec.streams + 2 * hidden, launches=2)
    return Work((mixed,), (*((mixed,) if spec.recomputed else ()), gradients))


FORMULAS: Final[dict[Kernels, Callable[[Module, WorkContext], Work]]] = {
    Kernels.COMPRESSED_ATTENTION: attention,
    Kernels.GROUPED_OUTPUT: grouped_output,
    Kernels.HYPER_CONNECTION: connection,
    Kernels.HYPER_ADD: mixing,
}
