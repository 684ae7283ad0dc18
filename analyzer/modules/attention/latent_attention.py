"""Multi-latent attention: queries, keys and values through low-rank projections with norms between.

Legend: rq, rkv ranks of the compressions, dq elements of a query head (without and with position), dv of a value head.
Source: core/transformer/multi_latent_attention.py (0.16.1). Down projections are whole on every tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.attention.context_parallel import Exchange, exchanging_kernel, gradient_scratch
from analyzer.modules.attention.core_attention import ATTENTION, kernel_under_checkpoint, scores
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import column_collectives, row_parallel, split_weight, weight_gradient
from analyzer.modules.norm import norm_parameters, norm_statistics
from analyzer.modules.quantized import backward_input, forward_input, kept_input, norm_gradient, output_gradient
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Module, Parameter, Tensor
from analyzer.specs import MlaSpec

_KINDS: Final = {
    "linear_q_proj": ModuleKind.Q_PROJECTION,
    "linear_q_down_proj": ModuleKind.Q_DOWN,
    "linear_q_up_proj": ModuleKind.Q_UP,
    "linear_kv_down_proj": ModuleKind.KV_DOWN,
    "linear_kv_up_proj": ModuleKind.KV_UP,
}


def latent_attention(shapes: Shapes) -> Module:
    """[s, b, h] → [s, b, h], after a norm of its own."""
    mla = _spec(shapes)
    heads = shapes.model.num_attention_heads // shapes.t
    queries = heads * mla.query_head_dim
    children: list[Module] = []
    if mla.q_lora_rank is None:
        children.append(
            _up(shapes, "linear_q_proj", width=queries, source_width=shapes.model.hidden_size, normed=False, shares=True)
        )
    else:
        children.append(_down(shapes, "linear_q_down_proj", width=mla.q_lora_rank, position=0, first=True))
    children.append(
        _down(
            shapes, "linear_kv_down_proj", width=mla.kv_lora_rank, position=mla.qk_pos_emb_head_dim, first=mla.q_lora_rank is None
        )
    )
    if mla.q_lora_rank is not None:
        children.append(
            _up(shapes, "linear_q_up_proj", width=queries, source_width=mla.q_lora_rank, normed=shapes.model.qk_layernorm)
        )
    keys_and_values = heads * _pair(mla)
    children.append(
        _up(shapes, "linear_kv_up_proj", width=keys_and_values, source_width=mla.kv_lora_rank, normed=shapes.model.qk_layernorm)
    )
    children.append(_rotation(shapes))
    values = heads * mla.v_head_dim
    projection = row_parallel(
        shapes,
        "linear_proj",
        ModuleKind.ATTENTION_OUTPUT,
        width=values,
        full_width=shapes.model.num_attention_heads * mla.v_head_dim,
        symbol="a·dv/t",
        bias=shapes.model.bias_linear,
        input_made_in=f"{ATTENTION}.core_attention",
        input_shares="core_attention output" if _keeps_output(shapes) else "",
        keeps_16_bit=True,
    )
    kernel = _core(shapes)
    if shapes.recomputes("mla_up_proj"):  # when the gradient of the kernel's output comes, before the kernel reads them
        made_now, made_later = _rotation(shapes).forward_workspace, kernel.backward_workspace
        output = shapes.wide("output gradient", values, "a·dv/t")
        needed = max(((output, *made_now), made_later), key=lambda group: sum(tensor.bytes for tensor in group))
        kernel = replace(
            kernel,
            forward_workspace=(*kernel.forward_workspace, *made_now[-3:]),
            backward_workspace=needed,
        )
    if shapes.recompute_core_attention:
        kernel = kernel_under_checkpoint(kernel, _checkpoint_inputs(shapes))
    kept = _compressed(shapes, "compressed keys and values", mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    named = tuple(replace(each, forward_workspace=(*each.forward_workspace, kept)) for each in (kernel, projection))
    return Module(
        name=ATTENTION,
        kind=ModuleKind.ATTENTION,
        forward_workspace=shapes.dropped_norm_output,
        backward_workspace=shapes.norm_output_made_again,
        children=(*children, *named),
        source="MLASelfAttention",
    )


def _spec(shapes: Shapes) -> MlaSpec:
    assert shapes.model.mla is not None
    return shapes.model.mla


def _keeps_output(shapes: Shapes) -> bool:
    """Whether the projection keeps the kernel's own output."""
    if shapes.recompute_core_attention or shapes.model.attention_backend == "unfused":
        return False
    return shapes.model.attention_backend == "fused" or shapes.b == 1


def _compressed(shapes: Shapes, name: str, width: int, *, gathered: bool = False, made_in: str = "", shares: str = "") -> Tensor:
    """[s, b, rank], or its shard under sequence parallelism."""
    rows = shapes.s if gathered else shapes.s_split
    return Tensor(name=name, shape=(rows, shapes.b, width), dtype=shapes.dtype, formula="2·s·b·r", made_in=made_in, shares=shares)


def _down(shapes: Shapes, name: str, *, width: int, position: int, first: bool) -> Module:
    """h → rank (and the rotary part of the key), not split. The first to read the norm's output keeps it; in FP8 each a copy."""
    h = shapes.model.hidden_size
    rows = width + position
    output = _compressed(shapes, "output", rows)
    queries = shapes.model.mla.q_lora_rank if shapes.model.mla is not None else None
    # keys follow queries, and in backward their gradients come first
    beside = () if first or queries is None else (_compressed(shapes, "compressed queries", queries),)
    later = (shapes.hidden("input gradient of keys and values"),) if first and queries is not None else ()
    dropped = shapes.recomputes("layernorm")
    kept = "recomputed norm output" if dropped else "" if first else "normalized input"
    read = shapes.hidden("input", made_in="input_layernorm", shares=kept)
    weight = Parameter(
        name="weight", shape=(rows, h), dtype=shapes.dtype, sequence_parallel=shapes.sp, quantized=shapes.fp8 is not None
    )
    return Module(
        name=name,
        kind=_KINDS[name],
        parameters=(weight,),
        saved=(read,) if dropped else kept_input(shapes, read),
        forward_workspace=(*forward_input(shapes, read, original=dropped), output, *beside),
        backward_workspace=(
            *output_gradient(shapes, _compressed(shapes, "output gradient", rows)),
            *(backward_input(shapes, read, original=True) if dropped else ()),
            shapes.hidden("input gradient"),
            *beside,
            *later,
            *weight_gradient(shapes, (rows, h)),
        ),
        collectives=_position_messages(shapes, position),
        source="TELinear, duplicated",
    )


def _position_messages(shapes: Shapes, width: int) -> tuple[Collective, ...]:
    """Under sequence parallelism the rotary part of the key is gathered for the heads of each rank."""
    if not (shapes.sp and width):
        return ()
    return (*shapes.tp("all_gather", "forward", width=width), *shapes.tp("reduce_scatter", "backward", width=width))


def _up(shapes: Shapes, name: str, *, width: int, source_width: int, normed: bool, shares: bool = False) -> Module:
    """rank → heads, split over tensor-parallel ranks, with the norm of the compression fused in where there is one.

    The compressed keys and values are a slice of the down projection's output, which is copied.
    """
    full = width * shapes.t
    dropped = shapes.recomputes("mla_up_proj")
    maker = f"{ATTENTION}.{name.replace('_up_', '_down_')}" if name == "linear_q_up_proj" else ""
    read = _compressed(shapes, "normalized input" if normed else "input", source_width, made_in="" if normed else maker)
    kept: tuple[Tensor, ...]
    if shares:
        read = shapes.hidden("input", shares="normalized input")
    if normed:
        statistics = norm_statistics(shapes, shapes.s_split * shapes.b, "4·s·b")
        normal = kept_input(shapes, read, gathered=shapes.sp)
        kept = (_compressed(shapes, "input", source_width, made_in=maker), *normal, *statistics)
    elif shares and shapes.recomputes("layernorm"):
        kept = (read,)
    else:
        kept = kept_input(shapes, read, gathered=shapes.sp)
    again: tuple[Tensor, ...] = ()
    if dropped and name == "linear_kv_up_proj":  # the checkpoint keeps what the compressed keys and values are a slice of
        width_kept = source_width + _spec(shapes).qk_pos_emb_head_dim
        kept, again = (
            (_compressed(shapes, "compressed keys and values", width_kept, made_in=f"{ATTENTION}.linear_kv_down_proj"),),
            kept,
        )
    elif dropped and not shares:
        kept, again = (_compressed(shapes, "input", source_width, made_in=maker),), kept[1:]
    gathered = (_compressed(shapes, "gathered input", source_width, gathered=True),) if shapes.sp else ()
    mla = _spec(shapes)
    compressed = _compressed(shapes, "compressed keys and values", mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    queries = shapes.wide("queries", shapes.model.num_attention_heads // shapes.t * mla.query_head_dim, "a·dq/t")
    return Module(
        name=name,
        kind=_KINDS[name],
        parameters=(
            *(norm_parameters(shapes, source_width, prefix="layer_norm_") if normed else ()),
            split_weight(shapes, (width, source_width), full=(full, source_width)),
        ),
        saved=kept,
        forward_workspace=(
            *forward_input(shapes, read, gathered=gathered, in_16_bit=not normed),
            shapes.wide("output", width, "a·d/t"),
            *((queries,) if name == "linear_kv_up_proj" else ()),
            *(() if shares or (dropped and name == "linear_kv_up_proj") else (compressed,)),
            *again,
        ),
        backward_workspace=(
            queries if name == "linear_kv_up_proj" else compressed,  # whose gradients came before
            *again,
            *(_made_again_and_gradients(shapes) if dropped else ()),
            *output_gradient(shapes, shapes.wide("output gradient", width, "a·d/t")),
            *backward_input(shapes, read, gathered=gathered),
            _compressed(shapes, "input gradient", source_width, gathered=True),
            *(norm_gradient(shapes, read) if normed else ()),
            *weight_gradient(shapes, (width, source_width)),
        ),
        collectives=_twice(column_collectives(shapes, width=source_width))
        if dropped
        else column_collectives(shapes, width=source_width),
        source="TELayerNormColumnParallelLinear" if normed else "TEColumnParallelLinear",
    )


def _rotation(shapes: Shapes) -> Module:
    """Queries, keys and values put together from their parts, while the outputs of the projections are still named."""
    mla = _spec(shapes)
    heads = shapes.model.num_attention_heads // shapes.t
    position = Tensor(
        name="rotary part of keys", shape=(shapes.s, shapes.b, mla.qk_pos_emb_head_dim), dtype=shapes.dtype, formula="2·s·b·d"
    )
    # a checkpoint keeps what was gathered; else it is a part of the compressed keys and values
    kept = (position,) if shapes.sp and shapes.recomputes("mla_up_proj") else ()

    def one(name: str, width: int) -> Tensor:
        return shapes.wide(name, heads * width, "a·d/t")

    compressed = _compressed(shapes, "compressed keys and values", mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    made = tuple(one(name, width) for name, width in _widths(mla))
    if shapes.model.rope_fusion:  # the kernel turns queries where they are
        return Module(
            name="rotation", function=True, saved=kept, forward_workspace=(one("keys and values", _pair(mla)), compressed, *made)
        )
    parts = (
        one("queries", mla.query_head_dim),
        one("keys and values", _pair(mla)),
        one("rotated parts of queries", mla.qk_pos_emb_head_dim),
    )
    return Module(name="rotation", function=True, saved=kept, forward_workspace=(*parts, compressed, *made))


def _makes_queries(shapes: Shapes) -> str:
    """The module whose tensor the queries are: the fused rotation turns them where their projection put them."""
    if not shapes.model.rope_fusion:
        return ATTENTION
    return f"{ATTENTION}.linear_q_proj" if _spec(shapes).q_lora_rank is None else f"{ATTENTION}.linear_q_up_proj"


def _made_again_and_gradients(shapes: Shapes) -> tuple[Tensor, ...]:
    """Outputs of the second run of a checkpoint, and their gradients: its frame names them while it goes backward."""
    heads = shapes.model.num_attention_heads // shapes.t
    return tuple(
        shapes.wide(f"{name} {what}", heads * width, "a·d/t")
        for name, width in _widths(_spec(shapes))
        for what in ("made again", "gradient")
    )


def _pair(mla: MlaSpec) -> int:
    """Elements of a head in the projection of keys and values."""
    return mla.qk_head_dim + mla.v_head_dim


def _twice(calls: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """With the forward's calls made once more when its results are computed again."""
    return (*calls, *(replace(call, phase="recompute") for call in calls if call.phase == "forward"))


def _core(shapes: Shapes) -> Module:
    """The kernel on heads of dq for queries and keys, dv for values; each a tensor of its own."""
    model, mla = shapes.model, _spec(shapes)
    heads = model.num_attention_heads // shapes.t
    dropped = shapes.recomputes("mla_up_proj")

    def tensor(name: str, width: int, *, kept: bool = True, made_in: str = "") -> Tensor:
        share = "recomputed up projections" if kept and dropped else ""
        return shapes.wide(name, heads * width, "a·d/t", made_in=made_in, shares=share)

    copied = model.attention_backend == "flash" and shapes.b > 1
    maker = "" if copied else ATTENTION
    inputs = (
        tensor("query", mla.query_head_dim, made_in="" if copied else _makes_queries(shapes)),
        tensor("key", mla.query_head_dim, made_in=maker),
        tensor("value", mla.v_head_dim, made_in=maker),
    )
    tables = () if model.rope_fusion else _rotary(shapes, mla)
    output = tensor("output", mla.v_head_dim, kept=False)
    again: tuple[Tensor, ...] = ()
    if dropped:  # with what their own backward needs; the outputs of the checkpoint are filled from those of its second run
        kept = kept_input(shapes, _compressed(shapes, "compressed keys and values", mla.kv_lora_rank)) * (
            2 if model.qk_layernorm else 1
        )
        if mla.q_lora_rank is not None and model.qk_layernorm:
            kept = (*kept, *kept_input(shapes, _compressed(shapes, "normalized queries", mla.q_lora_rank)))
        made = (*inputs, *inputs, *tables, *kept)
        again = tuple(Tensor(name=f"{each.name} made again", shape=each.shape, dtype=each.dtype) for each in made)
        tables = ()
    gradients = (
        tensor("output gradient", mla.v_head_dim, kept=False),
        *(tensor(f"{name} gradient", width, kept=False) for name, width in _widths(mla)),
    )
    if model.attention_backend == "unfused":
        dropout = (scores(shapes, "dropped-out softmax"), scores(shapes, "dropout mask", dtype="bool"))
        return Module(
            name="core_attention",
            kind=ModuleKind.ATTENTION_KERNEL,
            saved=(*tables, *inputs, scores(shapes, "softmax"), *(dropout if model.attention_dropout > 0 else ())),
            forward_workspace=(scores(shapes, "scores"), output),
            backward_workspace=(*gradients, *again, scores(shapes, "softmax gradient")),
            source="UnfusedDotProductAttention",
        )
    if shapes.split.context > 1:
        return _over_context(shapes, made_by=_makes_queries(shapes), tables=tables, again=again)
    statistics = shapes.statistics("softmax statistics", shapes.b * heads * shapes.s, "4·b·a·s/t")
    return Module(
        name="core_attention",
        kind=ModuleKind.ATTENTION_KERNEL,
        saved=(*tables, *inputs, output, statistics, Tensor(name="random state", shape=(2,), dtype="int64")),
        forward_workspace=(tensor("output in [s,b,a,d]", mla.v_head_dim, kept=False),) if copied else (),
        backward_workspace=(*gradients, *gradient_scratch(shapes, query=heads * mla.query_head_dim, grouped=False), *again),
        source="FlashAttention" if model.attention_backend == "flash" else "FusedAttnFunc",
    )


def _checkpoint_inputs(shapes: Shapes) -> tuple[Tensor, ...]:
    """Queries, keys and values as a checkpoint around the attention keeps them."""
    heads = shapes.model.num_attention_heads // shapes.t
    share = "recomputed up projections" if shapes.recomputes("mla_up_proj") else ""
    makers = (_makes_queries(shapes), ATTENTION, ATTENTION)
    return tuple(
        shapes.wide(name, heads * width, "a·d/t", made_in=maker, shares=share)
        for (name, width), maker in zip(_widths(_spec(shapes)), makers, strict=True)
    )


def _over_context(shapes: Shapes, *, made_by: str, tables: tuple[Tensor, ...], again: tuple[Tensor, ...]) -> Module:
    """The same among context-parallel ranks. Of what `again` makes anew, the kernel of p2p keeps the query alone."""
    mla = _spec(shapes)
    heads = shapes.model.num_attention_heads // shapes.t
    query, value = heads * mla.query_head_dim, heads * mla.v_head_dim
    kernel = exchanging_kernel(
        Exchange(shapes, query=query, key=query, value=value, output=value, made_by=made_by, joint=False), tables=tables
    )
    if not again:
        return kernel
    saved = tuple(replace(each, shares="recomputed up projections") if each.name == "query" else each for each in kernel.saved)
    return replace(kernel, saved=saved, backward_workspace=(*kernel.backward_workspace, *again))


def _widths(mla: MlaSpec) -> tuple[tuple[str, int], ...]:
    return (("query", mla.query_head_dim), ("key", mla.query_head_dim), ("value", mla.v_head_dim))


def _rotary(shapes: Shapes, mla: MlaSpec) -> tuple[Tensor, ...]:
    """cos and sin that the unfused rotation of the position parts keeps."""
    return tuple(
        Tensor(name=f"{which} of {what}", shape=(shapes.s, 1, 1, mla.qk_pos_emb_head_dim), dtype=shapes.dtype, made_in=ATTENTION)
        for what in ("q", "k")
        for which in ("cos", "sin")
    )
