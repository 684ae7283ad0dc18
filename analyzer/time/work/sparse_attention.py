"""Kernels of DeepSeek sparse attention: scores of all pairs of tokens, of the indexer and of attention, in fp32.

Source: the statements of `FusedDSAIndexerLoss` and `unfused_dsa_fn`
(core/transformer/experimental_attention_variant/dsa.py, 0.18.2), each an operation of PyTorch. Legend of the sizes: P pairs of all
heads of attention, I pairs of all heads of the indexer, U pairs of a sample, times samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from analyzer.modules.attention.sparse_attention import Indexed
from analyzer.modules.attention.sparse_kernels import Absorbed
from analyzer.modules.kinds import Kernels
from analyzer.modules.tree import Module
from analyzer.time.work import absorbed_attention
from analyzer.time.work.attention import INDEX_ATTENTION, INDEX_LOSS, INDEX_SOFTMAX, rotation_of_latents
from analyzer.time.work.context import WorkContext
from analyzer.time.work.kernels import Gemm, Kernel, MemoryBound, Work
from analyzer.time.work.linear import gemms, joined, weight_of
from analyzer.time.work.packed_samples import rotation_loop


def projection(module: Module, context: WorkContext) -> Work:
    """A linear layer on all tokens, also under sequence parallelism. Its input has no gradient."""
    weight = weight_of(module)
    shapes = context.shapes
    work = gemms(context, rows=shapes.s * shapes.b, n=weight.shape[0], k=weight.shape[1], precision=context.precision)
    return work._replace(backward=tuple(each for each in work.backward if not (isinstance(each, Gemm) and "data" in each.name)))


def prepared(_: Module, context: WorkContext) -> Work:
    """Rotations, copies and Hadamard transforms of queries and keys, and the norm of the keys."""
    indexed = _indexed(context)
    width = (indexed.spec.heads + 1) * indexed.spec.head_dim
    moved = 2.0 * context.shapes.s * context.shapes.b * width
    work = Work(
        (MemoryBound("rotation and transform of the indexer", 8 * moved, launches=24),),
        (MemoryBound("gradients of the rotation of the indexer", 8 * moved, launches=24),),
    )
    return joined(rotation_loop(context), work) if isinstance(indexed, Absorbed) else work


def _scores(indexed: Indexed, *, heads: int, depth: int, batch: int, name: str) -> Gemm:
    return Gemm(name, indexed.shapes.s * heads, indexed.keys, depth, "32", batch, output_bytes=4)


def index_loss(_: Module, context: WorkContext) -> Work:
    """The scores of the indexer and of attention in forward, and both again in backward, with two more products."""
    if absorbed_attention.has_kernels(context):
        return absorbed_attention.choice(context)
    indexed = _indexed(context)
    spec, shapes = indexed.spec, context.shapes
    pairs = float(shapes.b * shapes.s * indexed.keys)
    of_index, of_heads = pairs * spec.heads, pairs * indexed.heads
    chosen = float(shapes.b * shapes.s * indexed.chosen)
    index = _scores(indexed, heads=spec.heads, depth=spec.head_dim, batch=shapes.b, name="index scores")
    attention = _scores(indexed, heads=1, depth=indexed.width, batch=shapes.b * indexed.heads, name=INDEX_ATTENTION)
    with_loss = absorbed_attention.computes_loss(context)
    forward: tuple[Kernel, ...] = (
        index,
        MemoryBound("ReLU, weights and sum of index scores", 20 * of_index + 4 * pairs, launches=3),
        MemoryBound("choice of keys", 28 * pairs + 12 * chosen, launches=3),
        attention,
        MemoryBound(INDEX_SOFTMAX, 28 * of_heads + 4 * pairs, launches=4),
        MemoryBound(INDEX_LOSS, 100 * pairs, launches=22),
    )
    if not with_loss:
        return Work(forward[:3])
    width = spec.heads * shapes.s
    backward: tuple[Kernel, ...] = (
        index,
        MemoryBound("ReLU, weights and sum of index scores", 20 * of_index + 4 * pairs, launches=3),
        attention,
        MemoryBound(INDEX_SOFTMAX, 28 * of_heads + 4 * pairs, launches=4),
        MemoryBound("gradient of the loss of the indexer", 140 * pairs, launches=28),
        index,
        MemoryBound("gradients of the products of the indexer", 54 * of_index, launches=8),
        Gemm("index query gradient", width, spec.head_dim, indexed.keys, "32", shapes.b, output_bytes=4),
        Gemm("index key gradient", indexed.keys, spec.head_dim, width, "32", shapes.b, output_bytes=4),
    )
    return Work(forward, backward)


def chosen_attention(_: Module, context: WorkContext) -> Work:
    """The rotation before it, the products and the softmax of all pairs: scores in fp32, the product with the values in 16 bit."""
    if absorbed_attention.has_kernels(context):
        return absorbed_attention.chosen(context)
    indexed = _indexed(context)
    shapes = context.shapes
    tokens, keys, batch = shapes.s, indexed.keys, shapes.b * indexed.heads
    pairs = float(shapes.b * tokens * keys)
    of_heads = pairs * indexed.heads

    def gemm(name: str, m: int, n: int, k: int) -> Gemm:
        return Gemm(name, m, n, k, context.precision, batch, output_bytes=context.element_bytes)

    def gemm_32(name: str, m: int, n: int, k: int) -> Gemm:
        return Gemm(name, m, n, k, "32", batch, output_bytes=4)

    width, value = indexed.width, indexed.value_width
    forward: tuple[Kernel, ...] = (
        gemm_32("scores", tokens, keys, width),
        MemoryBound("masks and softmax of scores", 34 * of_heads + 24 * pairs, launches=10),
        gemm("context", tokens, value, keys),
    )
    backward: tuple[Kernel, ...] = (
        gemm("value gradient", keys, value, tokens),
        gemm("softmax gradient", tokens, keys, value),
        MemoryBound("softmax gradient", 50 * of_heads, launches=8),
        gemm_32("query gradient", tokens, width, keys),
        gemm_32("key gradient", keys, width, tokens),
    )
    work = Work(forward, backward)
    return work if isinstance(indexed, Absorbed) else joined(rotation_of_latents(context), work)


def _indexed(context: WorkContext) -> Indexed:
    """The sizes of sparse attention in the release of the job."""
    return Indexed(context.shapes) if context.inputs.model.absorbed_attention is None else Absorbed(context.shapes)


FORMULAS: Final[dict[Kernels, Callable[[Module, WorkContext], Work]]] = {
    Kernels.INDEX_PROJECTION: projection,
    Kernels.INDEX_NORM: prepared,
    Kernels.INDEX_LOSS: index_loss,
    Kernels.CHOSEN_ATTENTION: chosen_attention,
    Kernels.ABSORPTION: absorbed_attention.absorption,
    Kernels.VALUE_PRODUCT: absorbed_attention.value_product,
}
