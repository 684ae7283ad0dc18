"""Tables of rotary position embeddings, which stay allocated: the name, the bytes and the modules that allocate each of them.

Sources: core/models/common/embeddings/rotary_pos_embedding.py and yarn_rotary_pos_embedding.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from analyzer.modules.kinds import LATENT_PROJECTIONS, ModuleKind
from analyzer.modules.shapes import Shapes
from analyzer.specs import TrainingJob
from analyzer.units import BLOCK, dtype_bytes, round_up

MAX_ROPE_TABLES: Final = 32
"""Maximum entries in the cache of `YarnRotaryEmbedding.forward`. With multi-latent attention each layer has its own entry."""
YARN_POSITIONS: Final = 4096
"""Default of `MLATransformerConfig.original_max_position_embeddings`. The training script has no option for it."""
_BEGIN_LAYERS: Final = frozenset(
    {ModuleKind.QKV, ModuleKind.LINEAR_ATTENTION_INPUT, ModuleKind.MIXER_IN, ModuleKind.FC1, ModuleKind.FEED_FORWARD_NORM}
)
"""One of them is in each layer."""


class RopeTable(NamedTuple):
    """Tables of the same kind on a rank."""

    name: str
    bytes: int
    users: frozenset[ModuleKind]
    """Kinds of modules of which the first forward allocates them."""


def rope_tables(job: TrainingJob, shapes: Shapes, kinds: frozenset[ModuleKind], *, chunks: int) -> Iterator[RopeTable]:
    """Those of models without multi-latent attention. Each of the `chunks` has its own; `kinds` are those of its modules."""
    # a model chunk computes the table before its layers, also without attention, for as many positions as it receives:
    # `get_rotary_seq_len`
    layers = kinds & _BEGIN_LAYERS
    received = 1 if layers or ModuleKind.OUTPUT_LAYER not in kinds else 1 + job.model.mtp_num_layers
    users = layers or frozenset({ModuleKind.OUTPUT_LAYER})
    if job.model.position_embedding == "rope":
        width = int(job.model.kv_channels * job.model.rotary_percent)
        table = round_up(4 * shapes.s * received * width, BLOCK)  # the positions of this context-parallel rank, fp32
        # `Gemma3RotaryEmbedding` of Megatron-Bridge keeps both tables, and both in one tensor
        yield RopeTable("RoPE frequency table", (4 if job.model.local_rope else 1) * table * chunks, users)
    yarn = job.model.yarn_positions
    if yarn is not None:  # module buffers, converted to the dtype of the weights
        each = round_up(dtype_bytes(shapes.dtype, yarn * job.model.kv_channels), BLOCK)
        yield RopeTable("YaRN cosine and sine tables", 2 * each * chunks, users)


def latent_rope_tables(job: TrainingJob, shapes: Shapes, *, layers: int) -> Iterator[RopeTable]:
    """Those of multi-latent attention. Each of the `layers` has its own: cached frequencies and, with YaRN, cosines and sines.

    Cosines and sines are module buffers for YARN_POSITIONS positions in the dtype of the weights. The fused RoPE kernel replaces
    them by tables for the positions of the sequence.
    """
    mla = job.model.mla
    if mla is None:
        return
    width = mla.qk_pos_emb_head_dim
    table = round_up(4 * shapes.s * width, BLOCK)
    cached = min(layers, MAX_ROPE_TABLES)
    if job.model.compressed_attention is not None:
        yield from _of_compressed(job, shapes, table, layers=layers)
        return
    yield RopeTable("RoPE frequency tables of the layers", cached * table, frozenset({ModuleKind.KV_UP, ModuleKind.ABSORPTION}))
    if mla.yarn:
        positions = shapes.s if job.model.rope_fusion else YARN_POSITIONS // job.parallel.context
        each = round_up(dtype_bytes(shapes.dtype, positions * width), BLOCK)
        yield RopeTable("YaRN cosine and sine tables", layers * 2 * each, LATENT_PROJECTIONS)
    if mla.first_angles_stay:
        each = round_up(4 * (YARN_POSITIONS // job.parallel.context) * width, BLOCK)
        yield RopeTable("RoPE frequency cache", cached * each, LATENT_PROJECTIONS)


def _of_compressed(job: TrainingJob, shapes: Shapes, table: int, *, layers: int) -> Iterator[RopeTable]:
    """Those of DeepSeek-V4: frequencies of one `table` in each layer, and cosines and sines for fused rotations.

    All layers share the indices of the keys in windows (`_get_window_topk_idxs_cached`, csa.py).
    """
    spec = job.model.compressed_attention
    assert spec is not None, "the model has compressed attention"
    users = frozenset({ModuleKind.COMPRESSED_ATTENTION})
    yield RopeTable("RoPE frequency tables of the layers", min(layers, MAX_ROPE_TABLES) * table, users)
    if job.model.rope_fusion:
        yield RopeTable("RoPE cosine and sine tables of the layers", layers * 2 * (table // 2), users)
    yield RopeTable("indices of the keys in windows", 8 * shapes.s * spec.window, users)
