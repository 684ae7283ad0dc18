"""Projections of multi-latent attention: low-rank compressions of queries, keys and values, with norms in between.

Legend: rq, rkv ranks of the compressions; dq elements of a query head, including its position part; dv elements of a value head.
Source: core/transformer/multi_latent_attention.py (0.16.1). Down projections are not split over tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.attention.core_attention import ATTENTION
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import at_weight_gradient, column_collectives, split_weight, weight_gradient
from analyzer.modules.norm import fused_norm_backward, norm_parameters, norm_statistics
from analyzer.modules.quantized import backward_input, forward_input, output_gradient, saved_input
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module, Parameter, Tensor, for_weight
from analyzer.specs import MlaSpec

_KINDS: Final = {
    "linear_q_proj": ModuleKind.Q_PROJECTION,
    "linear_q_down_proj": ModuleKind.Q_DOWN,
    "linear_q_up_proj": ModuleKind.Q_UP,
    "linear_kv_down_proj": ModuleKind.KV_DOWN,
    "linear_kv_up_proj": ModuleKind.KV_UP,
}


def mla_of(shapes: Shapes) -> MlaSpec:
    """The specification of multi-latent attention; valid only if the model uses it."""
    assert shapes.model.mla is not None
    return shapes.model.mla


def compressed(shapes: Shapes, name: str, width: int, *, gathered: bool = False, made_in: str = "") -> Tensor:
    """[s, b, rank], or its shard under sequence parallelism."""
    rows = shapes.s if gathered else shapes.s_split
    return Tensor(name=name, shape=(rows, shapes.b, width), dtype=shapes.dtype, formula="2·s·b·r", made_in=made_in)


def down_projection(shapes: Shapes, name: str, *, width: int, position: int, first: bool) -> Module:
    """h → rank (and the rotary part of the key), not split. The first one saves the norm's output; in FP8 each saves a copy."""
    h = shapes.model.hidden_size
    rows = width + position
    output = compressed(shapes, "output", rows)
    queries = shapes.model.mla.q_lora_rank if shapes.model.mla is not None else None
    # keys are projected after queries; in backward their gradients are computed first
    concurrent = () if first or queries is None else (compressed(shapes, "compressed queries", queries),)
    later = (shapes.hidden("input gradient of keys and values"),) if first and queries is not None else ()
    dropped = shapes.recomputes("layernorm")
    owner = "recomputed norm output" if dropped else "" if first else "normalized input"
    read = shapes.hidden("normalized input" if first else "input", made_in="input_layernorm", shares=owner)
    weight = Parameter(
        name="weight", shape=(rows, h), dtype=shapes.dtype, sequence_parallel=shapes.sp, quantized=shapes.fp8 is not None
    )
    return Module(
        name=name,
        kind=_KINDS[name],
        parameters=(weight,),
        saved=for_weight((read,) if dropped else saved_input(shapes, read)),
        forward_workspace=(*forward_input(shapes, read, in_16_bit=False, original=dropped), output, *concurrent),
        backward_workspace=(
            *output_gradient(shapes, compressed(shapes, "output gradient", rows)),
            *(for_weight(backward_input(shapes, read, original=True)) if dropped else ()),
            shapes.hidden("input gradient"),
            *concurrent,
            *later,
            *weight_gradient(shapes, (rows, h)),
        ),
        source="TELinear, duplicated",
    )


def up_projection(shapes: Shapes, name: str, *, width: int, source_width: int, normed: bool, shares: bool = False) -> Module:
    """rank → heads, split over tensor-parallel ranks, with the norm of the compression fused in if there is one.

    The compressed keys and values are copied from a slice of the down projection's output.
    """
    dropped = shapes.recomputes("mla_up_proj")
    keys_and_values = name == "linear_kv_up_proj"
    read = _read_by_up(shapes, name, source_width, normed=normed, shares=shares)
    saved, recomputed = _saved_by_up(shapes, name, read, source_width, normed=normed, shares=shares)
    gathered = (compressed(shapes, "gathered input", source_width, gathered=True),) if shapes.sp else ()
    mla = mla_of(shapes)
    latent = compressed(shapes, "compressed keys and values", mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    queries = shapes.wide("queries", shapes.model.num_attention_heads // shapes.t * mla.query_head_dim, "a·dq/t")
    calls = column_collectives(shapes, width=source_width)
    return Module(
        name=name,
        kind=_KINDS[name],
        parameters=(
            *(norm_parameters(shapes, source_width, prefix="layer_norm_") if normed else ()),
            split_weight(shapes, (width, source_width), full=(width * shapes.t, source_width)),
        ),
        saved=saved,
        forward_workspace=(
            *forward_input(shapes, read, gathered=gathered, in_16_bit=not normed),
            shapes.wide("output", width, "a·d/t"),
            *((queries,) if keys_and_values else ()),
            *(() if shares or (dropped and keys_and_values) else (latent,)),
            *recomputed,
        ),
        backward_workspace=(
            queries if keys_and_values else latent,  # the gradients of these are computed first
            *recomputed,
            *(_recomputed_and_gradients(shapes) if dropped else ()),
            *output_gradient(shapes, shapes.wide("output gradient", width, "a·d/t"), fused=normed),
            compressed(shapes, "input gradient", source_width, gathered=True),
            *((compressed(shapes, "scattered input gradient", source_width),) if shapes.sp else ()),
            *at_weight_gradient(
                shapes,
                read,
                weight_gradient(shapes, (width, source_width)),
                gathered=gathered,
                after=fused_norm_backward(shapes, read, source_width) if normed else (),
            ),
        ),
        collectives=_with_recompute(calls) if dropped else calls,
        source="TELayerNormColumnParallelLinear" if normed else "TEColumnParallelLinear",
    )


def _maker_of_input(name: str) -> str:
    """Path of the module that allocates the input of an up projection; empty if the input is a copied slice."""
    return f"{ATTENTION}.{name.replace('_up_', '_down_')}" if name == "linear_q_up_proj" else ""


def _read_by_up(shapes: Shapes, name: str, source_width: int, *, normed: bool, shares: bool) -> Tensor:
    """The input of the GEMM."""
    if shares and normed:
        return shapes.hidden("normalized input of the queries")
    if shares:
        return shapes.hidden("input", shares="normalized input")
    if normed:
        return compressed(shapes, "normalized compressed input", source_width)
    return compressed(shapes, "input", source_width, made_in=_maker_of_input(name))


def _saved_by_up(
    shapes: Shapes, name: str, read: Tensor, source_width: int, *, normed: bool, shares: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Tensors that are saved, and tensors that are recomputed under `mla_up_proj` recomputation."""
    source = compressed(shapes, "input", source_width, made_in=_maker_of_input(name))
    if shares and normed:
        owner = "recomputed norm output" if shapes.recomputes("layernorm") else ""
        source = shapes.hidden("normalized input", made_in="input_layernorm", shares=owner)
    if normed:
        statistics = norm_statistics(shapes, shapes.s_split * shapes.b, "4·s·b")
        saved = (source, *for_weight(saved_input(shapes, read, gathered=shapes.sp, normed=True)), *statistics)
    elif shares and shapes.recomputes("layernorm") and shapes.recomputes("mla_up_proj"):
        saved = for_weight((read,))
    else:
        saved = for_weight(saved_input(shapes, read, gathered=shapes.sp))
    if not shapes.recomputes("mla_up_proj"):
        return saved, ()
    if name == "linear_kv_up_proj":  # the checkpoint saves the down projection's output
        width = source_width + mla_of(shapes).qk_pos_emb_head_dim
        maker = f"{ATTENTION}.linear_kv_down_proj"
        return (compressed(shapes, "compressed keys and values", width, made_in=maker),), saved
    if shares and shapes.saves_norm_output:
        return (shapes.hidden("input", made_in="input_layernorm"),), saved
    return (saved, ()) if shares and not normed else ((source,), tuple(each for each in saved if each != source))


def rotation(shapes: Shapes) -> Module:
    """Queries, keys and values assembled from their parts, while the outputs of the projections are still referenced."""
    mla = mla_of(shapes)
    heads = shapes.model.num_attention_heads // shapes.t
    position = Tensor(
        name="rotary part of keys", shape=(shapes.s, shapes.b, mla.qk_pos_emb_head_dim), dtype=shapes.dtype, formula="2·s·b·d"
    )
    # a checkpoint saves the gathered tensor; otherwise it is a slice of the compressed keys and values
    saved = rotary_tables(shapes)
    if shapes.recomputes("mla_up_proj"):
        saved = (position,) if shapes.sp else ()

    def one(name: str, width: int) -> Tensor:
        return shapes.wide(name, heads * width, "a·d/t")

    latent = compressed(shapes, "compressed keys and values", mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    outputs = tuple(one(name, width) for name, width in head_widths(mla))
    if shapes.model.rope_fusion:  # the kernel rotates queries in place
        return Module(
            name="rotation",
            kind=ModuleKind.ROTATION,
            function=True,
            saved=saved,
            forward_workspace=(one("keys and values", key_value_width(mla)), latent, *outputs),
            collectives=_position_collectives(shapes),
        )
    parts = (
        one("queries", mla.query_head_dim),
        one("keys and values", key_value_width(mla)),
        one("rotated parts of queries", mla.qk_pos_emb_head_dim),
    )
    return Module(
        name="rotation",
        kind=ModuleKind.ROTATION,
        function=True,
        saved=saved,
        forward_workspace=(*parts, latent, *outputs),
        collectives=_position_collectives(shapes),
    )


def _position_collectives(shapes: Shapes) -> tuple[Collective, ...]:
    """Under sequence parallelism the rotary part of the key is gathered for the heads of each rank."""
    if not shapes.sp:
        return ()
    width = mla_of(shapes).qk_pos_emb_head_dim
    return (*shapes.tp("all_gather", "forward", width=width), *shapes.tp("reduce_scatter", "backward", width=width))


def rotary_tables(shapes: Shapes) -> tuple[Tensor, ...]:
    """cos and sin that the rotation of the position parts saves. The fused kernels save the tables that the layer keeps.

    Source: core/fusions/fused_mla_yarn_rope_apply.py (0.16.1).
    """
    share = "tables of the layer" if shapes.model.rope_fusion else ""
    width = mla_of(shapes).qk_pos_emb_head_dim
    return tuple(
        Tensor(name=f"{which} of {what}", shape=(shapes.s, 1, 1, width), dtype=shapes.dtype, made_in=ATTENTION, shares=share)
        for what in ("q", "k")
        for which in ("cos", "sin")
    )


def maker_of_queries(shapes: Shapes) -> str:
    """Path of the module that allocates the queries: their projection, if the fused rotation works in place."""
    if not shapes.model.rope_fusion:
        return ATTENTION
    return f"{ATTENTION}.linear_q_proj" if mla_of(shapes).q_lora_rank is None else f"{ATTENTION}.linear_q_up_proj"


def _recomputed_and_gradients(shapes: Shapes) -> tuple[Tensor, ...]:
    """Recomputed outputs of a checkpoint, and their gradients. Local variables reference them during its backward."""
    heads = shapes.model.num_attention_heads // shapes.t
    return tuple(
        shapes.wide(text.format(name), heads * width, "a·d/t")
        for name, width in head_widths(mla_of(shapes))
        for text in ("recomputed {}", "{} gradient")
    )


def _with_recompute(calls: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """`calls`, with those of forward issued again when its outputs are recomputed."""
    return (*calls, *(replace(call, phase="recompute") for call in calls if call.phase == "forward"))


def key_value_width(mla: MlaSpec) -> int:
    """Elements of a head in the projection of keys and values."""
    return mla.qk_head_dim + mla.v_head_dim


def head_widths(mla: MlaSpec) -> tuple[tuple[str, int], ...]:
    """Elements of a head of queries, keys and values."""
    return (("query", mla.query_head_dim), ("key", mla.query_head_dim), ("value", mla.v_head_dim))
