"""Sparse attention of core 0.19: queries are multiplied by the weights of the keys, and attend to chosen compressed keys.

All heads read one key of r + d elements of each token, whose first r elements are also its value. The output is multiplied by the
weights of the values.

Legend: T = s·b tokens of this rank, S tokens of the whole sequence, a heads of this rank, r rank of the compressed keys, w = r + d
elements of a query, H heads of the indexer, di elements of one of its heads, K chosen keys.
Source: `AbsorbedMLASelfAttention` (core/transformer/experimental_attention_variant/absorbed_mla.py, 0.19.0) and `DSAttention`
(dsa.py beside it).
"""

from __future__ import annotations

from dataclasses import replace

from analyzer.modules.attention.core_attention import ATTENTION
from analyzer.modules.attention.latent_attention import output_projection
from analyzer.modules.attention.latent_projections import compressed, down_projection, mla_of, rotary_tables, up_projection
from analyzer.modules.attention.sparse_kernels import Absorbed, choice_of_keys, indexer, sparse_kernel
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import split_weight
from analyzer.modules.norm import norm_parameters, norm_statistics, partial_sums
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module, Phase, Tensor


def absorbed_attention(shapes: Shapes, *, chooses: bool) -> Module:
    """[s, b, h] → [s, b, h], after a separate norm. `chooses`: this layer has an indexer."""
    absorbed = Absorbed(shapes)
    latent = compressed(shapes, "compressed keys and values", absorbed.width)
    kernel = Module(
        name="core_attention",
        kind=ModuleKind.ATTENTION,
        forward_workspace=(latent,),
        children=(
            *((*indexer(absorbed), choice_of_keys(absorbed)) if chooses else ()),
            sparse_kernel(absorbed, chooses=chooses),
            _values(absorbed),
        ),
        source="DSAttention",
    )
    return Module(
        name=ATTENTION,
        kind=ModuleKind.ATTENTION,
        forward_workspace=(*shapes.dropped_norm_output, *shapes.referenced_norm_output),
        backward_workspace=shapes.recomputed_norm_output,
        children=(*_projections(absorbed), _absorption(absorbed), kernel, output_projection(shapes)),
        source="AbsorbedMLASelfAttention",
    )


def _projections(absorbed: Absorbed) -> tuple[Module, ...]:
    shapes, mla = absorbed.shapes, absorbed.mla
    first = mla.q_lora_rank is None
    normed = shapes.model.qk_layernorm
    kv_down = down_projection(shapes, "linear_kv_down_proj", width=mla.kv_lora_rank, position=mla.qk_pos_emb_head_dim, first=first)
    kv_norm = (_norm(shapes, "kv_layernorm", mla.kv_lora_rank, source=""),) if normed else ()
    queries = absorbed.heads * mla.query_head_dim
    if mla.q_lora_rank is None:
        hidden = shapes.model.hidden_size
        q = up_projection(shapes, "linear_q_proj", width=queries, source_width=hidden, normed=False, shares=True)
        return (kv_down, *kv_norm, q)
    q_down = down_projection(shapes, "linear_q_down_proj", width=mla.q_lora_rank, position=0, first=True)
    q_norm = (_norm(shapes, "q_layernorm", mla.q_lora_rank, source=f"{ATTENTION}.linear_q_down_proj"),) if normed else ()
    q_up = up_projection(shapes, "linear_q_up_proj", width=queries, source_width=mla.q_lora_rank, normed=False)
    if normed:
        q_up = replace(
            q_up, saved=tuple(replace(each, made_in=f"{ATTENTION}.q_layernorm" if each.made_in else "") for each in q_up.saved)
        )
    return (q_down, kv_down, *q_norm, *kv_norm, q_up)


def _norm(shapes: Shapes, name: str, width: int, *, source: str) -> Module:
    """A separate norm of compressed queries or keys. That of the keys copies its input, a slice of a larger tensor."""
    rows = shapes.s_split * shapes.b
    return Module(
        name=name,
        kind=ModuleKind.NORM,
        parameters=norm_parameters(shapes, width),
        saved=(compressed(shapes, "input", width, made_in=source), *norm_statistics(shapes, rows, "4·s·b")),
        forward_workspace=(compressed(shapes, "output", width),),
        backward_workspace=(
            compressed(shapes, "output gradient", width),
            compressed(shapes, "input gradient", width),
            *partial_sums(shapes, width),
        ),
        source="TENorm",
    )


def _absorption(absorbed: Absorbed) -> Module:
    """The product of queries with the weights of the keys, the rotation, and keys assembled from their parts."""
    shapes, mla = absorbed.shapes, absorbed.mla
    rows = absorbed.heads * (mla.qk_head_dim + mla.v_head_dim)
    product = shapes.wide("products of queries and weights", absorbed.heads * mla.kv_lora_rank, "a·r")
    projected = f"{ATTENTION}.linear_q_{'up_' if mla.q_lora_rank is not None else ''}proj"
    position = shapes.wide("rotated parts of queries", absorbed.heads * mla.qk_pos_emb_head_dim, "a·d")
    weight = split_weight(shapes, (rows, mla.kv_lora_rank), full=(rows * shapes.t, mla.kv_lora_rank))
    return Module(
        name="linear_kv_up_proj",
        kind=ModuleKind.ABSORPTION,
        function=True,
        parameters=(replace(weight, quantized=False),),
        saved=(shapes.wide("queries", absorbed.heads * mla.query_head_dim, "a·dq", made_in=projected), *rotary_tables(shapes)),
        forward_workspace=(
            product,
            replace(product, name="products in the order of the tokens"),
            position,
            absorbed.query("query"),
        ),
        collectives=_of_latents(shapes),
        backward_workspace=(
            absorbed.query("query gradient"),
            product,
            shapes.wide("gradient of queries", absorbed.heads * mla.query_head_dim, "a·dq"),
            Tensor(name="weight gradient", shape=weight.shape, dtype=shapes.dtype, formula="2·a·(dqk + dv)·r"),
        ),
        source="AbsorbedMLASelfAttention.get_query_key_value_tensors",
    )


def _of_latents(shapes: Shapes) -> tuple[Collective, ...]:
    """Under sequence parallelism the position part of the keys and the compressed keys are gathered."""
    if not shapes.sp:
        return ()
    mla = mla_of(shapes)
    widths = (mla.qk_pos_emb_head_dim, mla.kv_lora_rank)
    kinds: tuple[tuple[str, Phase], ...] = (("all_gather", "forward"), ("reduce_scatter", "backward"))
    return tuple(call for width in widths for kind, phase in kinds for call in shapes.tp(kind, phase, width=width))


def _values(absorbed: Absorbed) -> Module:
    """The product of the output with the weights of the values, of which a copy is saved."""
    shapes, mla = absorbed.shapes, absorbed.mla
    weights = absorbed.weights_of_values("weights of the values")
    output = shapes.wide("output", absorbed.heads * mla.v_head_dim, "a·dv")
    return Module(
        name="values",
        kind=ModuleKind.VALUE_PRODUCT,
        function=True,
        saved=(weights,) if absorbed.absorbed.backend == "cudnn" else (absorbed.latents("latent output"), weights),
        forward_workspace=(output, replace(output, name="output in the order of the tokens")),
        backward_workspace=(replace(output, name="output gradient"), absorbed.latents("gradient of the latent output")),
        source="_run_sparse_attention",
    )
