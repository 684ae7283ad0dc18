"""The attention kernel, with the rotation of queries and keys before it."""

from __future__ import annotations

from analyzer.modules.attention.core_attention import Heads
from analyzer.specs import ModelSpec
from analyzer.time.work.context import WorkContext
from analyzer.time.work.kernels import Attention, Gemm, Kernel, MemoryBound, Work
from analyzer.time.work.linear import joined


def attention_kernel(context: WorkContext) -> Work:
    """Fused attention, or the batched GEMMs and the softmax of unfused attention."""
    unfused = context.inputs.model.attention_backend == "unfused"
    return joined(_rotation(context), _unfused(context) if unfused else _fused(context))


def attended_pairs(model: ModelSpec, *, queries: int, keys: int) -> float:
    """Pairs of a query and a key of a sample for one head, as an average over the layers: half of all under the causal mask.

    With a sliding window of w tokens before each token, a layer computes at most w + 1 keys for each query. `queries` are the
    tokens of this context-parallel rank, which has an equal share of the pairs.
    """
    causal = queries * keys / 2
    if model.window is None or not model.windowed:
        return causal
    before = model.window[0]
    if before < 0 or before >= keys:
        return causal
    windowed = queries * min(before + 1, keys) - queries / keys * (before + 1) * before / 2
    share = sum(model.windowed) / len(model.windowed)
    return share * min(windowed, causal) + (1 - share) * causal


def _head_dims(model: ModelSpec) -> tuple[int, int]:
    """Elements of a query head and of a value head."""
    if model.mla is not None:
        return model.mla.query_head_dim, model.mla.v_head_dim
    return model.kv_channels, model.kv_channels


def _heads(context: WorkContext) -> int:
    return context.inputs.model.num_attention_heads // context.shapes.t


def _fused(context: WorkContext) -> Work:
    shapes, model = context.shapes, context.inputs.model
    width, value = _head_dims(model)
    keys = context.inputs.sequence_length
    backend = "flash" if model.attention_backend == "flash" else "fused"

    def kernel(name: str) -> Attention:
        return Attention(
            name=name,  # type: ignore[arg-type]
            batch=shapes.b,
            heads=_heads(context),
            queries=shapes.s,
            keys=keys,
            pairs=attended_pairs(model, queries=shapes.s, keys=keys),
            head_dim=width,
            value_dim=value,
            backend=backend,  # type: ignore[arg-type]
        )

    return Work((kernel("forward"),), (kernel("backward"),), 10, 5)


def _unfused(context: WorkContext) -> Work:
    """Scores, softmax and context: every pair is computed, also those that the mask excludes."""
    shapes, model = context.shapes, context.inputs.model
    width, value = _head_dims(model)
    queries, keys, batch = shapes.s, context.inputs.sequence_length, shapes.b * _heads(context)
    scores = batch * queries * keys

    def gemm(name: str, m: int, n: int, k: int) -> Gemm:
        return Gemm(name, m, n, k, context.precision, batch, output_bytes=context.element_bytes)

    softmax = 10.0 if model.attention_dropout == 0 else 15.0
    forward: tuple[Kernel, ...] = (
        gemm("scores", queries, keys, width),
        MemoryBound("softmax", softmax * scores),
        gemm("context", queries, value, keys),
    )
    backward: tuple[Kernel, ...] = (
        gemm("value gradient", keys, value, queries),
        gemm("softmax gradient", queries, keys, value),
        MemoryBound("softmax gradient", (softmax + 2) * scores),
        gemm("query gradient", queries, width, keys),
        gemm("key gradient", keys, width, queries),
    )
    return Work(forward, backward, 8, 10)


def _rotation(context: WorkContext) -> Work:
    """Rotary position embedding of queries and keys. Unfused, it writes the product with cosines and with sines separately."""
    shapes, model = context.shapes, context.inputs.model
    if model.position_embedding != "rope":
        return Work()
    if model.mla is None:
        heads = Heads(shapes)
        width = heads.query + heads.key
    else:  # queries, keys and values are assembled from their parts
        width = 2 * _heads(context) * model.mla.query_head_dim
    size = float(shapes.s * shapes.b * width)
    factor = 4.0 if model.rope_fusion else 8.0
    calls = 2 if model.rope_fusion else 6
    return Work((MemoryBound("rotation", factor * size),), (MemoryBound("rotation gradient", factor * size),), calls, calls)
