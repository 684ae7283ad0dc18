"""The attention kernel, with the rotation and the copies of queries, keys and values before it.

Bytes are those of the operations that megatron-core 0.16.1 and Transformer Engine 2.11 run. A test compares them with the
operations that the shadow engine records.
"""

from __future__ import annotations

from typing import Final

from analyzer.modules.attention.core_attention import Heads
from analyzer.specs import ModelSpec
from analyzer.time.work.context import WorkContext
from analyzer.time.work.kernels import Attention, Gemm, Kernel, MemoryBound, Work
from analyzer.time.work.linear import joined
from analyzer.time.work.packed_samples import ROTATION_LOOP, reordering, rotation_loop

ROTATION: Final = "rotation"
COPIES: Final = "copies of queries, keys and values"
OUTSIDE_CHECKPOINT: Final = frozenset({ROTATION, ROTATION_LOOP, COPIES})
"""Kernels that `--recompute-modules core_attn` does not repeat: they run before the checkpoint."""
INDEX_ATTENTION: Final = "attention scores of the indexer loss"
INDEX_SOFTMAX: Final = "softmax of these scores"
INDEX_LOSS: Final = "loss of the indexer"
INDEX_TARGETS: Final = "scores of the chosen keys"
INDEX_GRADIENTS: Final = "gradients of the loss of the indexer"
LOSS_OF_INDEXER: Final = frozenset({INDEX_ATTENTION, INDEX_SOFTMAX, INDEX_LOSS, INDEX_TARGETS, INDEX_GRADIENTS})
"""Kernels that the first forward under a checkpoint does not run: it has no gradients, and computes no loss of the indexer."""


def attention_kernel(context: WorkContext) -> Work:
    """Fused attention, or the batched GEMMs and the softmax of unfused attention."""
    unfused = context.inputs.model.attention_backend == "unfused"
    before = rotation_of_latents(context) if context.inputs.model.mla is not None else joined(_rotation(context), _copies(context))
    attention = _unfused(context) if unfused else joined(reordering(context), _fused(context))
    return joined(rotation_loop(context), before, attention)


def attended_pairs(model: ModelSpec, *, queries: int, keys: int, causal_mask: bool = True) -> float:
    """Pairs of a query and a key of a sample for one head, as an average over the layers: half of all under the causal mask.

    With a sliding window of w tokens before each token, a layer computes at most w + 1 keys for each query. `queries` are the
    tokens of this context-parallel rank, which has an equal share of the pairs. A mask of padding excludes no pair here. A packed
    sample has keys of its own.
    """
    keys = min(keys, model.sample_length or keys)
    if not causal_mask:
        return float(queries * keys)
    causal = queries * keys / 2
    if model.window is None or not model.windowed:
        return causal
    before = model.window[0]
    if before < 0 or before >= keys:
        return causal
    windowed = queries * min(before + 1, keys) - queries / keys * (before + 1) * before / 2
    share = sum(model.windowed) / len(model.windowed)
    return share * min(windowed, causal) + (1 - share) * causal


def _is_causal(context: WorkContext) -> bool:
    return context.inputs.masked and not context.inputs.padding_mask


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
    keys = context.inputs.keys
    backend = "flash" if model.attention_backend == "flash" else "fused"

    def kernel(name: str) -> Attention:
        return Attention(
            name=name,  # type: ignore[arg-type]
            batch=shapes.b,
            heads=_heads(context),
            queries=shapes.s,
            keys=keys,
            pairs=attended_pairs(model, queries=shapes.s, keys=keys, causal_mask=_is_causal(context)),
            head_dim=width,
            value_dim=value,
            backend=backend,  # type: ignore[arg-type]
        )

    return Work((kernel("forward"),), (kernel("backward"),))


def _unfused(context: WorkContext) -> Work:
    """Scores, softmax and context: every pair is computed, also those that the mask excludes.

    The softmax is one kernel. Transformer Engine makes the mask of a causal layer of [queries, keys] bytes with several operations.
    """
    shapes, model = context.shapes, context.inputs.model
    width, value = _head_dims(model)
    queries, keys, batch = shapes.s, context.inputs.keys, shapes.b * _heads(context)
    scores = batch * queries * keys
    made = model.implementation == "transformer_engine" and context.inputs.masked
    mask = 40.0 * queries * keys if made else 0.0
    dropout = 0.0 if model.attention_dropout == 0 else 5.0

    def gemm(name: str, m: int, n: int, k: int) -> Gemm:
        return Gemm(name, m, n, k, context.precision, batch, output_bytes=context.element_bytes)

    forward: tuple[Kernel, ...] = (
        gemm("scores", queries, keys, width),
        MemoryBound("softmax", (4.0 + dropout) * scores + mask, launches=15 if mask else 1),
        gemm("context", queries, value, keys),
    )
    backward: tuple[Kernel, ...] = (
        gemm("value gradient", keys, value, queries),
        gemm("softmax gradient", queries, keys, value),
        MemoryBound("softmax gradient", (6.0 + dropout) * scores, launches=5 if mask else 1),
        gemm("query gradient", queries, width, keys),
        gemm("key gradient", keys, width, queries),
    )
    return Work(forward, backward)


def _rotation(context: WorkContext) -> Work:
    """Rotary position embedding of queries and keys."""
    shapes, model = context.shapes, context.inputs.model
    if model.position_embedding != "rope":
        return Work()
    heads = Heads(shapes)
    forward, backward, launches = _rotated(context, width=heads.query + heads.key, head=model.kv_channels)
    return Work(
        (MemoryBound(ROTATION, forward, launches=launches[0]),),
        (MemoryBound("rotation gradient", backward, launches=launches[1]),),
    )


def _rotated(context: WorkContext, *, width: int, head: int) -> tuple[float, float, tuple[int, int]]:
    """Bytes of the rotation of queries and keys of `width` elements together for each token, and kernels, in forward and backward.

    The fused kernel reads and writes them, and reads angles of `head` elements in fp32. Unfused, the operations are: the sines and
    cosines of the angles, scaled and cast to 16 bit; the concatenation of the exchanged and negated halves; two products, their
    sum, and a concatenation with the elements that are not rotated (`_apply_rotary_pos_emb_bshd`).
    """
    shapes, model = context.shapes, context.inputs.model
    size, angles = float(shapes.s * shapes.b * width), 2.0 * shapes.s * head
    if model.rope_fusion:
        return 4 * size + 4 * angles, 4 * size + 4 * angles, (2, 2)
    return 24 * size + 48 * angles, 28 * size + 4 * angles, (24, 14)


def _copies(context: WorkContext) -> Work:
    """Copies of queries, keys and values to tensors of the same layout, and the concatenation of their gradients.

    The three are parts of the output of one projection. Those of grouped queries are copied by a reshape, and a norm or a rotation
    makes new tensors; the others are then copied, too (`get_qkv_layout` of Transformer Engine).
    """
    shapes, model = context.shapes, context.inputs.model
    heads, tokens = Heads(shapes), shapes.s * shapes.b
    rotated, normed = model.position_embedding == "rope", model.qk_layernorm
    grouped = model.num_query_groups < model.num_attention_heads
    queries = heads.query if grouped or normed else 0
    values = heads.key if grouped or normed or rotated else 0
    keys = heads.key if normed or (grouped and not rotated) else 0
    width = queries + keys + values
    copied = sum(map(bool, (queries, keys, values)))
    forward = (MemoryBound(COPIES, 4.0 * tokens * width, launches=copied),) if width else ()
    joined_gradients = MemoryBound("concatenation of gradients", 4.0 * tokens * (heads.qkv + heads.gate))
    return Work(forward, (joined_gradients,))


def rotation_of_latents(context: WorkContext) -> Work:
    """Multi-latent attention: the rotated parts of queries and keys, and the assembly of queries, keys and values.

    The fused kernels rotate queries in place, and write keys and values from the output of the projection
    (core/fusions/fused_mla_yarn_rope_apply.py). Unfused, the parts are rotated, interleaved and concatenated. The gradients of the
    inputs of the two down-projections are added in backward.
    """
    shapes, model = context.shapes, context.inputs.model
    mla = model.mla
    assert mla is not None
    tokens, heads = float(shapes.s * shapes.b), _heads(context)
    position, plain, value = mla.qk_pos_emb_head_dim, mla.qk_head_dim, mla.v_head_dim
    if model.position_embedding != "rope":
        forward = backward = 4.0 * tokens * heads * (plain + position)
        launches = (3, 3)
    elif model.rope_fusion:
        forward = backward = tokens * heads * (4 * position + 2 * (plain + value) + 2 * (plain + position + value))
        launches = (2, 2)
    else:
        forward, backward, (before, after) = _rotated(context, width=(heads + 1) * position, head=position)
        assembled = tokens * (8 * heads * (plain + position) + 4 * heads * value + 4 * (heads + 1) * position)
        forward, backward, launches = forward + assembled, backward + assembled, (before + 4, after + 9)
    added = 6.0 * shapes.s_split * shapes.b * model.hidden_size
    return Work(
        (MemoryBound(ROTATION, forward, launches=launches[0]),),
        (MemoryBound("rotation gradient", backward, launches=launches[1]), MemoryBound("sum of gradients", added)),
    )
