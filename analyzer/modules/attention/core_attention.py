"""The attention kernel between the qkv and the output projection: what it keeps, by implementation and backend.

Legend: s sequence, b micro-batch, a heads, g key/value groups, d head elements, t tensor-parallel size.

Sources (megatron-core 0.16.1, Transformer Engine 2.11): core/transformer/attention.py get_query_key_value_tensors;
core/transformer/dot_product_attention.py; transformer_engine/pytorch/attention/dot_product_attention/backends.py
(FlashAttention, FusedAttnFunc, UnfusedDotProductAttention) and utils.py get_qkv_layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from analyzer.modules.attention.context_parallel import Exchange, exchanging_kernel, gradient_scratch, output_is_new
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.norm import norm_parameters
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Parameter, Tensor

ATTENTION = "self_attention"
QKV = "self_attention.linear_qkv"


@dataclass(frozen=True)
class Heads:
    """Widths of one token's queries, keys and values on one tensor-parallel rank."""

    shapes: Shapes

    @property
    def query(self) -> int:
        """a·d/t."""
        return self.shapes.model.query_projection_size // self.shapes.t

    @property
    def key(self) -> int:
        """g·d/t; with fewer groups than tensor-parallel ranks each rank still works on one group."""
        return max(self.shapes.model.key_value_projection_size // self.shapes.t, self.shapes.model.kv_channels)

    @property
    def qkv(self) -> int:
        """(a + 2g)·d/t."""
        return self.query + 2 * self.key

    @property
    def count(self) -> int:
        """a/t."""
        return self.shapes.model.num_attention_heads // self.shapes.t

    @property
    def grouped(self) -> bool:
        """Fewer key/value heads than query heads."""
        return self.shapes.model.num_query_groups < self.shapes.model.num_attention_heads

    @property
    def regrouped(self) -> bool:
        """Whether the queries of the groups of a rank are copied to lie head by head: of one group they are a view."""
        return self.grouped and self.key > self.shapes.model.kv_channels

    def tensor(self, name: str, width: int, *, shares: str = "", made_in: str = "") -> Tensor:
        """[s, b, width] in the activations' element type."""
        symbol = "(a+2g)·d/t" if width == self.qkv else "a·d/t" if width == self.query else "g·d/t"
        return self.shapes.wide(name, width, symbol, shares=shares, made_in=made_in)


def query_key_norm(shapes: Shapes) -> Module:
    """q_layernorm and k_layernorm: each copies its strided slice of qkv, and keeps the copy with fp32 statistics.

    Grouped queries are copied before, by a reshape.
    """
    heads = Heads(shapes)
    rows = shapes.s * shapes.b
    key_heads = heads.key // shapes.model.kv_channels
    per_row = 2 if shapes.model.normalization == "LayerNorm" else 1

    def one(name: str, kind: ModuleKind, width: int, count: int, symbol: str, made_in: str = "") -> Module:
        return Module(
            name=name,
            kind=kind,
            parameters=norm_parameters(shapes, shapes.model.kv_channels, always_summed=True),
            saved=(
                heads.tensor("input", width, made_in=made_in),
                *(shapes.statistics(f"statistic {i}", rows * count, f"4·s·b·{symbol}/t") for i in range(per_row)),
            ),
            forward_workspace=(heads.tensor("qkv", heads.qkv), heads.tensor("output", width)),
            backward_workspace=(heads.tensor("output gradient", width), heads.tensor("input gradient", width)),
            source="transformer_engine.pytorch.ops.LayerNorm on a strided view",
        )

    queries = one("q_layernorm", ModuleKind.Q_NORM, heads.query, heads.count, "a", ATTENTION if heads.regrouped else "")
    keys = one("k_layernorm", ModuleKind.K_NORM, heads.key, key_heads, "g")
    return Module(name="qk_layernorm", kind=ModuleKind.QK_NORMS, function=True, children=(queries, keys))


def rotary_tables(shapes: Shapes) -> tuple[Tensor, ...]:
    """cos and sin in the activations' type, kept by the multiplications of the unfused rotation of q and of k.

    Source: core/models/common/embeddings/rope_utils.py _apply_rotary_pos_emb_bshd. The fused kernel keeps none.
    """
    if shapes.model.position_embedding != "rope" or shapes.model.rope_fusion:
        return ()
    width = int(shapes.model.kv_channels * shapes.model.rotary_percent)
    return tuple(
        Tensor(name=f"{which} of {what}", shape=(shapes.s, 1, 1, width), dtype=shapes.dtype, formula="2·s·d", made_in=ATTENTION)
        for what in ("q", "k")
        for which in ("cos", "sin")
    )


def _rotated_or_normed(shapes: Shapes) -> str:
    """The module that makes new tensors of q and of k, or nothing where they stay slices of qkv."""
    if shapes.model.position_embedding == "rope":
        return ATTENTION
    return f"{ATTENTION}.{{}}_layernorm" if shapes.model.qk_layernorm else ""


def inputs_saved(shapes: Shapes) -> tuple[Tensor, ...]:
    """q, k and v as a fused kernel keeps them: views of one qkv tensor, or three contiguous tensors of the same total.

    cuDNN takes q and k where they were made, and copies strided slices; FlashAttention copies all three into [b, s, a, d].
    """
    heads = Heads(shapes)
    maker = _rotated_or_normed(shapes)
    flash = shapes.model.attention_backend == "flash"
    if not (heads.grouped or maker or flash):
        return (heads.tensor("qkv", heads.qkv, made_in=QKV),)
    copied = flash and shapes.b > 1
    query_maker = "" if copied else maker.format("q") or (ATTENTION if heads.regrouped else "")
    return (
        heads.tensor("query", heads.query, made_in=query_maker),
        heads.tensor("key", heads.key, made_in="" if copied else maker.format("k")),
        heads.tensor("value", heads.key),
    )


def checkpoint_inputs(shapes: Shapes) -> tuple[Tensor, ...]:
    """q, k and v as a checkpoint around the attention keeps them: v is a view, so the whole qkv tensor stays.

    Rotation and norms make new tensors of q and k; without them, grouped queries are copied by a reshape.
    """
    heads = Heads(shapes)
    qkv = heads.tensor("qkv", heads.qkv, made_in=QKV)
    maker = _rotated_or_normed(shapes)
    if maker:
        query = heads.tensor("query", heads.query, made_in=maker.format("q"))
        return (qkv, query, heads.tensor("key", heads.key, made_in=maker.format("k")))
    return (qkv, heads.tensor("query", heads.query, made_in=ATTENTION)) if heads.regrouped else (qkv,)


def scores(shapes: Shapes, name: str, *, dtype: str | None = None) -> Tensor:
    """[b, a/t, s, s]: the attention matrix that unfused attention materialises."""
    heads = Heads(shapes)
    keys = shapes.inputs.sequence_length
    return Tensor(
        name=name, shape=(shapes.b, heads.count, shapes.s, keys), dtype=dtype or shapes.dtype, formula="b·a·s²/t elements"
    )


def exchange(shapes: Shapes) -> Exchange:
    """Sizes of the exchange among context-parallel ranks."""
    heads = Heads(shapes)
    made_by = _rotated_or_normed(shapes).format("q") or (ATTENTION if heads.regrouped else "")
    return Exchange(
        shapes, query=heads.query, key=heads.key, value=heads.key, output=heads.query, made_by=made_by, grouped=heads.grouped
    )


def sinks(shapes: Shapes) -> tuple[Parameter, ...]:
    """The learned sink of each head (`DotProductAttention.softmax_offset`); the fixed one is no parameter."""
    model = shapes.model
    if model.softmax_type != "learnable":
        return ()
    heads = model.num_attention_heads
    return (
        Parameter(name="softmax_offset", shape=(heads // shapes.t,), dtype=shapes.dtype, sharding="tensor", full_shape=(heads,)),
    )


def fused_kernel(shapes: Shapes) -> Module:
    """FlashAttention, or cuDNN's fused attention: keeps q, k, v, the output and fp32 statistics of the softmax.

    FlashAttention works in [b, s, a, d]: its output is copied once more into [s, b, a·d] for the projection,
    except where b = 1 makes the two layouts one. cuDNN reads the layout as it is.
    """
    if shapes.split.context > 1:
        return replace(exchanging_kernel(exchange(shapes), tables=rotary_tables(shapes)), parameters=sinks(shapes))
    heads = Heads(shapes)
    flash = shapes.model.attention_backend == "flash"
    output = heads.tensor("output", heads.query)
    transposed = flash and shapes.b > 1
    inputs = inputs_saved(shapes)
    made = () if len(inputs) == 1 else (heads.tensor("qkv", heads.qkv),)
    if heads.regrouped and _rotated_or_normed(shapes):  # frames also name the copy that was rotated
        made = (*made, heads.tensor("query before rotation", heads.query))
    if transposed and _rotated_or_normed(shapes):  # and what is copied into [b, s, a, d]
        made = (*made, heads.tensor("query, key and value in [s,b,a,d]", heads.qkv))
    return Module(
        name="core_attention",
        kind=ModuleKind.ATTENTION_KERNEL,
        saved=(
            *rotary_tables(shapes),
            *inputs,
            output,
            shapes.statistics("softmax statistics", shapes.b * heads.count * shapes.s, "4·b·a·s/t"),
            Tensor(name="random state", shape=(2,), dtype="int64"),
        ),
        forward_workspace=(*made, *((heads.tensor("output in [s,b,a,d]", heads.query),) if transposed else ())),
        backward_workspace=(
            heads.tensor("output gradient", heads.query),
            heads.tensor("query, key and value gradients", heads.qkv),
            *gradient_scratch(shapes, query=heads.query, grouped=heads.grouped),
        ),
        parameters=sinks(shapes),
        source="FlashAttention" if flash else "FusedAttnFunc",
    )


def softmax_is_fused(shapes: Shapes) -> bool:
    """`FusedScaleMaskSoftmax.is_kernel_available`: 16 bit, a row that fits the kernel, and heads of samples by fours."""
    model, keys = shapes.model, shapes.inputs.sequence_length
    if shapes.dtype == "fp32" or model.softmax_type != "vanilla":  # the kernel takes no sink
        return False
    by_fours = shapes.b * (model.num_attention_heads // shapes.t) % 4 == 0
    if model.implementation == "transformer_engine":  # which does not read --no-masked-softmax-fusion
        return by_fours and 16 < keys < 16384 and keys % 8 == 0
    return by_fours and model.masked_softmax_fusion and 16 < keys <= 4096 and keys % 4 == 0


def causal_mask(shapes: Shapes) -> Tensor:
    """[1, 1, s, s]: what Transformer Engine's softmax without a kernel fills in; `_get_default_causal_mask` keeps another."""
    keys = shapes.inputs.sequence_length
    return Tensor(name="causal mask", shape=(1, 1, keys, keys), dtype="bool", formula="s²")


def unfused_kernel(shapes: Shapes) -> Module:
    """Batched products with the matrix of scores in memory: softmax, its dropped-out copy and the mask are kept."""
    model = shapes.model
    heads = Heads(shapes)
    te = model.implementation == "transformer_engine"
    fused_softmax = softmax_is_fused(shapes)
    softmax = "fp32" if not fused_softmax and (te or model.attention_softmax_in_fp32) else shapes.dtype
    masked = te and not fused_softmax and model.softmax_type == "vanilla"
    mask = (causal_mask(shapes),) if masked else ()
    dropout = model.attention_dropout > 0
    inputs = checkpoint_inputs(shapes)
    if heads.grouped:  # keys and values are repeated for each query head, the originals dropped
        maker = _rotated_or_normed(shapes).format("q") or (ATTENTION if heads.regrouped else "")
        repeated = tuple(heads.tensor(f"repeated {name}", heads.query) for name in ("key", "value"))
        inputs = (heads.tensor("query", heads.query, made_in=maker), *repeated)
    elif model.implementation == "transformer_engine" and _rotated_or_normed(shapes):
        inputs = (*inputs[1:], heads.tensor("value", heads.key))  # get_qkv_layout: in one layout, so the slice of qkv is copied
    made: tuple[Tensor, ...] = (scores(shapes, "scores"), heads.tensor("context", heads.query))
    if masked:  # the worst instant is the cast to 16 bit, when dropout has yet to make what it keeps: three bytes of four
        rest = scores(shapes, "scores and softmax in 16 bit, less what dropout keeps", dtype="bool")
        made = (scores(shapes, "masked scores", dtype="fp32"), rest if dropout else scores(shapes, "scores"))
    probabilities = scores(shapes, "softmax", dtype=softmax)
    cast = (scores(shapes, "softmax in 16 bit"),) if softmax != shapes.dtype else ()
    return Module(
        name="core_attention",
        kind=ModuleKind.ATTENTION_KERNEL,
        saved=(
            *rotary_tables(shapes),
            *inputs,
            probabilities,
            *((scores(shapes, "dropped-out softmax"), scores(shapes, "dropout mask", dtype="bool")) if dropout else cast),
            *mask,
        ),
        forward_workspace=made,
        backward_workspace=(
            heads.tensor("output gradient", heads.query),
            scores(shapes, "softmax gradient"),
            *((scores(shapes, "softmax gradient in fp32", dtype=softmax),) if cast else ()),
            heads.tensor("qkv gradient", heads.qkv),
        ),
        parameters=sinks(shapes),
        source="UnfusedDotProductAttention" if model.implementation == "transformer_engine" else "DotProductAttention",
    )


def output_is_kept_apart(shapes: Shapes) -> bool:
    """Whether the projection keeps a copy of the kernel's output rather than the output itself."""
    model = shapes.model
    if shapes.recompute_core_attention or model.attention_backend == "unfused" or output_is_new(shapes):
        return True
    return model.attention_backend == "flash" and shapes.b > 1


def core_attention(shapes: Shapes) -> Module:
    """The kernel that the launch would use, under a checkpoint where `--recompute-modules core_attn` asks for it."""
    kernel = unfused_kernel(shapes) if shapes.model.attention_backend == "unfused" else fused_kernel(shapes)
    if not shapes.recompute_core_attention:
        return kernel
    return kernel_under_checkpoint(kernel, checkpoint_inputs(shapes))


def kernel_under_checkpoint(kernel: Module, inputs: tuple[Tensor, ...]) -> Module:
    """The kernel with `--recompute-modules core_attn`: its `inputs` stay, and what the unfused rotation before it keeps.

    In its second run it keeps the inputs themselves where it does so without a checkpoint, else copies.
    """
    tables = tuple(tensor for tensor in kernel.saved if tensor.name.startswith(("cos of", "sin of")))
    inside = tuple(
        replace(tensor, shares="checkpoint input") if tensor.made_in else tensor for tensor in kernel.saved if tensor not in tables
    )
    return Module(
        name="core_attention_checkpoint",
        kind=ModuleKind.ATTENTION_KERNEL_CHECKPOINT,
        function=True,
        saved=(*tables, *inputs),
        children=(replace(kernel, saved=inside),),
        recomputed=True,
        source="tensor_parallel.checkpoint",
    )
