"""Kernels of sparse attention in core 0.19 (`analyzer.modules.attention.absorbed_attention`).

Sources: `DSAttention.forward` (core/transformer/experimental_attention_variant/dsa.py, 0.19.0) and dsa_cudnn_kernels.py beside it.
Bytes of operations of PyTorch are those of the tensors that each reads and writes.
"""

from __future__ import annotations

from analyzer.modules.attention.sparse_kernels import Absorbed, rows_of_scores
from analyzer.modules.tree import Module
from analyzer.time.work.attention import INDEX_GRADIENTS, INDEX_LOSS, INDEX_TARGETS
from analyzer.time.work.context import WorkContext
from analyzer.time.work.kernels import Attention, Gemm, Kernel, MemoryBound, Work
from analyzer.time.work.linear import joined
from analyzer.time.work.packed_samples import rotation_loop
from analyzer.units import ceil_div


def has_kernels(context: WorkContext) -> bool:
    """Whether kernels of cuDNN and FlashMLA run, rather than operations of PyTorch for all pairs of tokens."""
    absorbed = context.inputs.model.absorbed_attention
    return absorbed is not None and absorbed.backend == "cudnn"


def computes_loss(context: WorkContext) -> bool:
    """Whether the indexer is trained. Releases before 0.19 compute its loss in any case."""
    model = context.inputs.model
    return model.sparse_attention is None or model.absorbed_attention is None or model.sparse_attention.logged


def _absorbed(context: WorkContext) -> Absorbed:
    return Absorbed(context.shapes)


def _of_heads(context: WorkContext, *, depth: int, width: int) -> Work:
    """A product of [T, depth] and [depth, width] of each head, with a copy of its result in the order of the tokens."""
    absorbed = _absorbed(context)
    tokens, heads, each = absorbed.tokens, absorbed.heads, context.element_bytes

    def gemm(name: str, m: int, n: int, k: int, *, depth_is_tokens: bool = False) -> Gemm:
        return Gemm(name, m, n, k, context.precision, heads, output_bytes=each, depth_is_tokens=depth_is_tokens)

    copied = 2 * each * tokens * heads
    return Work(
        (gemm("forward", tokens, width, depth), MemoryBound("copy in the order of the tokens", copied * width)),
        (
            MemoryBound("copies in the order of the heads", copied * (width + depth), launches=2),
            gemm("data gradient", tokens, depth, width),
            gemm("weight gradient", depth, width, tokens, depth_is_tokens=True),
        ),
    )


def absorption(_: Module, context: WorkContext) -> Work:
    """Queries times the weights of the keys, the rotation of both, and queries assembled from their parts."""
    absorbed = _absorbed(context)
    mla, tokens = absorbed.mla, absorbed.tokens
    work = _of_heads(context, depth=mla.qk_head_dim, width=mla.kv_lora_rank)
    rotated = float(tokens * (absorbed.heads + 1) * mla.qk_pos_emb_head_dim)
    whole = float(tokens * (absorbed.heads + 1) * absorbed.width)
    forward = MemoryBound("rotation and assembly of queries and keys", 24 * rotated + 4 * whole, launches=26)
    backward = MemoryBound("gradients of the rotation and the assembly", 28 * rotated + 4 * whole, launches=16)
    return joined(rotation_loop(context), Work((*work.forward, forward), (backward, *work.backward)))


def value_product(_: Module, context: WorkContext) -> Work:
    """The latent output times the weights of the values."""
    mla = _absorbed(context).mla
    return _of_heads(context, depth=mla.kv_lora_rank, width=mla.v_head_dim)


def choice(context: WorkContext) -> Work:
    """The scores of all pairs, the choice of keys, and the loss of the indexer with its gradients."""
    absorbed = _absorbed(context)
    chosen = float(absorbed.tokens * absorbed.chosen)
    forward: list[Kernel] = [
        *_scores(absorbed),
        MemoryBound("choice of keys", 12.0 * absorbed.tokens * _scored_keys(absorbed) + 8 * chosen, launches=2),
        MemoryBound("order of the chosen keys", 260 * chosen, launches=60),
    ]
    if not absorbed.spec.logged:
        return Work(tuple(forward))
    gradients = float(absorbed.tokens * (absorbed.spec.heads + 1) * absorbed.spec.head_dim)
    if absorbed.absorbed.shares:  # the same function runs attention for its statistics, and then again
        forward.append(_kernel(context, absorbed, "forward")._replace(of_loss=True))
    forward += [
        _targets(absorbed),
        MemoryBound(INDEX_LOSS, 390 * chosen, launches=70),
        *_gradients(absorbed),
    ]
    return Work(tuple(forward), (MemoryBound("gradients of the indexer", 4 * gradients, launches=3),))


def _scores(absorbed: Absorbed) -> tuple[Kernel, ...]:
    """The scores in fp32. Kernels of cuDNN compute those of whole sequences, and of packed samples under context parallelism.

    Otherwise (`_compute_indexer_scores_chunk_with_global_rows`) PyTorch multiplies the queries of each head of the indexer.
    """
    spec, rows, keys = absorbed.spec, rows_of_scores(absorbed), _scored_keys(absorbed)
    pairs = float(absorbed.tokens * keys)
    parts = ceil_div(absorbed.shapes.s, rows)
    plain = not absorbed.absorbed.shares and absorbed.shapes.split.context == 1 and absorbed.shapes.model.sample_length is None
    if (plain and parts == 1) or _in_segments(absorbed):
        queries = absorbed.shapes.s * spec.heads
        return (Gemm("index scores", queries, keys, spec.head_dim, batch=absorbed.shapes.b, output_bytes=4 / spec.heads),)
    loop = parts * spec.heads
    return (
        Gemm(
            "index scores",
            rows,
            keys,
            spec.head_dim,
            "32",
            absorbed.shapes.b * loop,
            output_bytes=4,
            launches=loop,
        ),
        MemoryBound("ReLU, weights and sum of index scores", 31.0 * pairs * spec.heads, launches=5 * loop),
        MemoryBound("masks of index scores", 22.0 * pairs, launches=10 * parts),
    )


def _in_segments(absorbed: Absorbed) -> bool:
    """Whether the samples of this rank are multiplied one by one, without the keys after their queries."""
    return absorbed.shapes.split.context > 1 and absorbed.shapes.model.sample_length is not None


def _scored_keys(absorbed: Absorbed) -> int:
    """The keys that are scored for each query, as an average over the context-parallel ranks.

    A rank has a part at the front and one at the back of each sample. Both parts of a single sample have the keys before them, half
    of all (`_indexer_topk_single_packed_cp_segments`). With several samples both have as many keys as the longer one, three
    quarters (`_indexer_topk_multi_packed_cp_thd`).
    """
    length = absorbed.shapes.model.sample_length
    if length is None or not _in_segments(absorbed):
        return absorbed.keys
    return absorbed.keys // 2 if length >= absorbed.keys else 3 * length // 4


def _targets(absorbed: Absorbed) -> Kernel:
    """The scores of the chosen keys over all heads, which attention does not return."""
    pairs = float(absorbed.tokens * absorbed.chosen)
    return MemoryBound(INDEX_TARGETS, 2 * pairs * absorbed.width + 4 * pairs)


def _gradients(absorbed: Absorbed) -> tuple[Kernel, ...]:
    """The gradients of the loss: of each query, of its weights, and of the chosen keys."""
    pairs = float(absorbed.tokens * absorbed.chosen)
    return (MemoryBound(INDEX_GRADIENTS, 4 * pairs * absorbed.spec.head_dim + 12 * pairs),)


def chosen(context: WorkContext) -> Work:
    """FlashMLA's attention. Its backward reads copies of queries, outputs and their gradients, and writes one of the gradient."""
    absorbed = _absorbed(context)
    size = 2.0 * absorbed.tokens * absorbed.padded_heads
    copied = MemoryBound("copies of rows with keys", size * (6 * absorbed.width + 8 * absorbed.mla.kv_lora_rank), launches=20)
    return Work((_kernel(context, absorbed, "forward"),), (copied, _kernel(context, absorbed, "backward")))


def _kernel(context: WorkContext, absorbed: Absorbed, name: str) -> Attention:
    queries, keys = absorbed.shapes.s, min(absorbed.keys, context.inputs.model.sample_length or absorbed.keys)
    chosen = min(absorbed.chosen, keys)
    pairs = min(queries * chosen - queries / keys * chosen * (chosen - 1) / 2, queries * keys / 2)
    return Attention(
        name=name,  # type: ignore[arg-type]
        batch=absorbed.shapes.b,
        heads=absorbed.padded_heads,
        queries=queries,
        keys=absorbed.keys,
        pairs=pairs,
        head_dim=absorbed.width,
        value_dim=absorbed.mla.kv_lora_rank,
        backend="fused",
    )
