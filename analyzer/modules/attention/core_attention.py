"""The attention kernel between the qkv and the output projection: saved tensors and workspaces by implementation and backend.

Legend: s sequence, b microbatch, a heads, g key/value groups, d head elements, t tensor-parallel size.

Sources (megatron-core 0.16.1, Transformer Engine 2.11): core/transformer/attention.py get_query_key_value_tensors;
core/transformer/dot_product_attention.py; transformer_engine/pytorch/attention/dot_product_attention/backends.py
(FlashAttention, FusedAttnFunc) and utils.py get_qkv_layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from analyzer.modules.attention.context_parallel import (
    ONE_COPY,
    QKV_TENSOR,
    Exchange,
    exchanging_kernel,
    gradient_scratch,
    output_is_new,
    works_in_batches,
)
from analyzer.modules.attention.fp8_attention import Operand, quantized_kernel
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.norm import OPERATIONS, norm_parameters, partial_sums
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Parameter, Tensor, largest

_BEFORE_ROTATION: Final = (QKV_TENSOR, "query before rotation", "key before rotation")
_ROTATED: Final = "query and key in [s,b,a,d]"
"""With `_BEFORE_ROTATION`, what local variables of the caller reference in the forward of a kernel."""
RETURNED: Final = ("output", "output in [s,b,a,d]", "returned output")
"""Names of the output of a kernel that does not save it."""
ATTENTION = "self_attention"
QKV = "self_attention.linear_qkv"
FUSED: Final = "FusedAttnFunc"
QKV_GRADIENTS: Final = "query, key and value gradients"


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
        """g·d/t; with fewer groups than tensor-parallel ranks each rank still has one group."""
        return max(self.shapes.model.key_value_projection_size // self.shapes.t, self.shapes.model.kv_channels)

    @property
    def qkv(self) -> int:
        """(a + 2g)·d/t."""
        return self.query + 2 * self.key

    @property
    def gate(self) -> int:
        """a·d/t with output gates, otherwise 0."""
        return self.shapes.model.gate_projection_size // self.shapes.t

    @property
    def gathered(self) -> bool:
        """Fewer groups than tensor-parallel ranks: the outputs of the projection are gathered (`get_query_key_value_tensors`)."""
        return self.shapes.model.num_query_groups < self.shapes.t

    def projected(self) -> Tensor:
        """The tensor of which queries, keys and values are slices: the output of the projection, or of all ranks if gathered."""
        model = self.shapes.model
        symbol = "(2a+2g)·d" if model.output_gate else "(a+2g)·d"
        if not self.gathered:
            return self.shapes.wide(QKV_TENSOR, self.qkv + self.gate, f"{symbol}/t")
        full = model.query_projection_size + model.gate_projection_size + 2 * model.key_value_projection_size
        return self.shapes.wide(QKV_TENSOR, full, symbol)

    def saved_projected(self) -> Tensor:
        """The same as a tensor that a kernel or a checkpoint saves."""
        return replace(self.projected(), made_in=ATTENTION if self.gathered else QKV)

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
        """Whether reshaping grouped queries to [s, b, heads, d] copies them. With one group per rank the reshape is a view."""
        return self.grouped and self.key > self.shapes.model.kv_channels

    def tensor(self, name: str, width: int, *, shares: str = "", made_in: str = "") -> Tensor:
        """[s, b, width] in the dtype of the activations."""
        symbol = "(a+2g)·d/t" if width == self.qkv else "a·d/t" if width == self.query else "g·d/t"
        return self.shapes.wide(name, width, symbol, shares=shares, made_in=made_in)


def query_key_norm(shapes: Shapes) -> Module:
    """q_layernorm and k_layernorm. Each copies its strided slice of qkv, and saves the copy and fp32 statistics.

    A reshape copies grouped queries before the norm. Before Transformer Engine 1.13 the slices themselves are saved, and with them
    all of qkv (transformer_engine/pytorch/module/rmsnorm.py `_RMSNorm`, 1.12).
    """
    heads = Heads(shapes)
    views = norms_keep_qkv(shapes)
    whole = () if views else (heads.projected(),)
    rows = shapes.s * shapes.b
    key_heads = heads.key // shapes.model.kv_channels
    per_row = 2 if shapes.model.normalization == "LayerNorm" else 1

    def one(
        name: str, kind: ModuleKind, width: int, count: int, symbol: str, read: Tensor, *, beside: tuple[Tensor, ...] = ()
    ) -> Module:
        return Module(
            name=name,
            kind=kind,
            parameters=norm_parameters(shapes, shapes.model.kv_channels, always_summed=True),
            saved=(
                read,
                *(shapes.statistics(f"statistic {i}", rows * count, f"4·s·b·{symbol}/t") for i in range(per_row)),
            ),
            forward_workspace=(*whole, heads.tensor("output", width), *beside),
            backward_workspace=(
                heads.tensor("output gradient", width),
                heads.tensor("input gradient", width),
                *partial_sums(shapes, shapes.model.kv_channels),
            ),
            source=f"{OPERATIONS}.LayerNorm on a strided view",
        )

    query = heads.tensor("input", heads.query, made_in=ATTENTION if heads.regrouped else "")
    key = heads.tensor("input", heads.key)
    if views:
        # a checkpoint around the kernel lists qkv too
        shares = QKV_TENSOR if shapes.recompute_core_attention else ""
        key = replace(heads.projected(), made_in=QKV, shares=shares)
        query = query if heads.regrouped else replace(query, shares=QKV_TENSOR)
    queries = one("q_layernorm", ModuleKind.Q_NORM, heads.query, heads.count, "a", query)
    normalized = heads.tensor("normalized query", heads.query)
    keys = one("k_layernorm", ModuleKind.K_NORM, heads.key, key_heads, "g", key, beside=(normalized,))
    return Module(name="qk_layernorm", kind=ModuleKind.QK_NORMS, function=True, children=(queries, keys))


def norms_keep_qkv(shapes: Shapes) -> bool:
    """Whether q/k norms save views of the output of the qkv projection."""
    model = shapes.model
    return model.qk_layernorm and model.mla is None and model.norm_modules in ("engine", "none") and shapes.inputs.norms_save_views


def rotary_tables(shapes: Shapes) -> tuple[Tensor, ...]:
    """cos and sin [s, 1, 1, d] in the dtype of the activations, saved by the unfused rotation of q and of k.

    Source: core/models/common/embeddings/rope_utils.py _apply_rotary_pos_emb_bshd. The fused kernel saves none.
    """
    if shapes.model.position_embedding != "rope" or shapes.model.rope_fusion:
        return ()
    width = int(shapes.model.kv_channels * shapes.model.rotary_percent)
    return tuple(
        Tensor(name=f"{which} of {what}", shape=(shapes.s, 1, 1, width), dtype=shapes.dtype, formula="2·s·d", made_in=ATTENTION)
        for what in ("q", "k")
        for which in ("cos", "sin")
    )


def is_rotary_table(tensor: Tensor) -> bool:
    """Whether a saved tensor is one of the tables of the unfused rotation, which runs before core attention."""
    return tensor.name.startswith(("cos of", "sin of"))


def rotated_or_normed(shapes: Shapes) -> str:
    """Path of the module that allocates new tensors for q and k ({} stands for q or k); empty if they are slices of qkv."""
    if shapes.model.position_embedding == "rope":
        return ATTENTION
    return f"{ATTENTION}.{{}}_layernorm" if shapes.model.qk_layernorm else ""


def before_rotation(shapes: Shapes) -> tuple[Tensor, ...]:
    """The inputs of the rotation in tensors of their own, which a local variable of `Attention.forward` references (`qkv_output`).

    A norm allocates them for queries and keys, and a reshape for grouped queries. Without a rotation the kernel saves what a norm
    returns, and the norm saves the result of the reshape.
    """
    heads = Heads(shapes)
    query = heads.tensor("query before rotation", heads.query)
    if shapes.model.qk_layernorm:
        rotates = shapes.model.position_embedding == "rope"
        return (query, heads.tensor("key before rotation", heads.key)) if rotates else ()
    return (query,) if heads.regrouped and rotated_or_normed(shapes) else ()


def inputs_saved(shapes: Shapes) -> tuple[Tensor, ...]:
    """q, k and v as a fused kernel saves them: views of one qkv tensor, or three contiguous tensors of the same total size.

    cuDNN reads q and k in place and copies strided slices, also those with a gate between them.
    FlashAttention copies all three to [b, s, a, d] if b > 1, and before
    core 0.14 Megatron does so after the fused rotation. It copies slices with heads of 128 elements to one tensor.
    """
    heads = Heads(shapes)
    if exchange(shapes).in_one_copy:
        return (heads.tensor(ONE_COPY, heads.qkv),)
    maker = rotated_or_normed(shapes)
    flash = shapes.model.attention_backend == "flash"
    if not (heads.grouped or maker or flash or heads.gate):
        return (heads.saved_projected(),)
    copied = works_in_batches(shapes)
    query_maker = "" if copied else maker.format("q") or (ATTENTION if heads.regrouped else "")
    return (
        heads.tensor("query", heads.query, made_in=query_maker),
        heads.tensor("key", heads.key, made_in="" if copied else maker.format("k")),
        heads.tensor("value", heads.key),
    )


def checkpoint_inputs(shapes: Shapes) -> tuple[Tensor, ...]:
    """q, k and v as a checkpoint around attention saves them: v is a view, so the full qkv tensor is saved.

    Rotation and norms allocate new tensors for q and k. Without them, a reshape copies grouped queries.
    """
    heads = Heads(shapes)
    qkv = heads.saved_projected()
    maker = rotated_or_normed(shapes)
    if maker:
        query = heads.tensor("query", heads.query, made_in=maker.format("q"))
        return (qkv, query, heads.tensor("key", heads.key, made_in=maker.format("k")))
    return (qkv, heads.tensor("query", heads.query, made_in=ATTENTION)) if heads.regrouped else (qkv,)


def exchange(shapes: Shapes) -> Exchange:
    """Sizes of the kernel under context parallelism."""
    heads = Heads(shapes)
    changed_by = rotated_or_normed(shapes)
    return Exchange(
        shapes,
        query=heads.query,
        key=heads.key,
        value=heads.key,
        output=heads.query,
        projected=heads.projected(),
        made_by=changed_by or (ATTENTION if heads.regrouped else ""),
        grouped=heads.grouped,
        before_rotation=before_rotation(shapes),
        rotates=bool(changed_by),
    )


def sinks(shapes: Shapes) -> tuple[Parameter, ...]:
    """The learned sink of each head (`DotProductAttention.softmax_offset`). A fixed sink has no parameter."""
    model = shapes.model
    if model.softmax_type != "learnable":
        return ()
    heads = model.num_attention_heads
    return (
        Parameter(name="softmax_offset", shape=(heads // shapes.t,), dtype=shapes.dtype, sharding="tensor", full_shape=(heads,)),
    )


def fused_kernel(shapes: Shapes) -> Module:
    """FlashAttention, or cuDNN's fused attention. Saves q, k, v, the output and fp32 softmax statistics.

    FlashAttention works in [b, s, a, d]: its output is copied to [s, b, a·d] for the projection unless b = 1, where both
    layouts are equal. cuDNN supports both layouts.
    """
    if shapes.split.context > 1:
        return replace(exchanging_kernel(exchange(shapes), tables=rotary_tables(shapes)), parameters=sinks(shapes))
    heads = Heads(shapes)
    flash = shapes.model.attention_backend == "flash"
    output = heads.tensor("output", heads.query)
    transposed = works_in_batches(shapes)
    inputs = inputs_saved(shapes)
    quantized = shapes.quantizes_attention
    workspace = () if (inputs[0].made_in == QKV and not quantized) or norms_keep_qkv(shapes) else (heads.projected(),)
    workspace = (*workspace, *before_rotation(shapes))
    if quantized and rotated_or_normed(shapes):
        workspace = (*workspace, heads.tensor(_ROTATED, heads.query + heads.key))
    if transposed and rotated_or_normed(shapes):  # and the tensors that are copied to [b, s, a, d]: the values are in qkv
        workspace = (*workspace, heads.tensor(_ROTATED, heads.query + heads.key))
        if not shapes.inputs.attention_in_batches:  # `get_qkv_layout` copies a value with other strides than query and key
            workspace = (*workspace, heads.tensor("value in [s,b,a,d]", heads.key))
    kernel = Module(
        name="core_attention",
        kind=ModuleKind.ATTENTION_KERNEL,
        saved=(
            *rotary_tables(shapes),
            *inputs,
            output,
            shapes.statistics("softmax statistics", shapes.b * heads.count * shapes.s, "4·b·a·s/t"),
            Tensor(name="random state", shape=(2,), dtype="int64"),
        ),
        forward_workspace=(*workspace, *((heads.tensor("output in [s,b,a,d]", heads.query),) if transposed else ())),
        backward_workspace=(
            heads.tensor("output gradient", heads.query),
            heads.tensor(QKV_GRADIENTS, heads.qkv),
            *gradient_scratch(shapes, query=heads.query, grouped=heads.grouped),
        ),
        parameters=sinks(shapes),
        source="FlashAttention" if flash else FUSED,
    )
    return quantized_kernel(shapes, kernel, _operands(heads), inputs, copied=_copied_value(heads)) if quantized else kernel


def _operands(heads: Heads) -> tuple[Operand, ...]:
    """Queries, keys and values for a kernel that reads them in FP8."""
    width = heads.shapes.model.kv_channels
    of_keys = heads.key // width
    return Operand("query", heads.count, width), Operand("key", of_keys, width), Operand("value", of_keys, width)


def _copied_value(heads: Heads) -> tuple[Tensor, ...]:
    """The values, which are a slice of the qkv tensor, as a contiguous tensor beside contiguous queries and keys."""
    separate = heads.grouped or heads.gate or rotated_or_normed(heads.shapes)
    return (heads.tensor("contiguous value", heads.key),) if separate else ()


def projection_saves_copy(shapes: Shapes) -> bool:
    """Whether the output projection saves a copy of the kernel's output rather than the output itself."""
    model = shapes.model
    if shapes.recompute_core_attention or model.attention_backend == "unfused" or output_is_new(shapes):
        return True
    return works_in_batches(shapes)


def returns_saved_output(shapes: Shapes) -> bool:
    """Whether the kernel returns the output that it saves, or a view of it."""
    if shapes.model.attention_backend == "unfused" or output_is_new(shapes):
        return False
    return shapes.inputs.attention_in_batches or not works_in_batches(shapes)


def _with_copied_gradients(workspace: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The backward workspace of a kernel under a checkpoint whose inputs are views of one qkv tensor.

    The gradients are views of one tensor too. Autograd copies each to a contiguous tensor (`AccumulateGrad`) after the kernel.
    """
    names = [tensor.name for tensor in workspace]
    own = names.index(QKV_GRADIENTS) + 1
    copied = (replace(workspace[own - 1], name="copies of query, key and value gradients"),)
    return (*workspace[:own], *largest(workspace[own:], copied))


def held_by_caller(kernel: Module) -> tuple[Tensor, ...]:
    """What local variables of `Attention.forward` reference from the rotation until the output projection returns."""
    return tuple(each for each in kernel.forward_workspace if each.name in (*_BEFORE_ROTATION, _ROTATED))


def kernel_under_checkpoint(
    kernel: Module, inputs: tuple[Tensor, ...], *, output: Tensor | None = None, copies_gradient: bool = False
) -> Module:
    """The kernel under `--recompute-modules core_attn`. `inputs` and the tables of the unfused rotation before it stay saved.

    The recomputed kernel saves the inputs themselves if it does so without a checkpoint, and copies otherwise. `output`: that of a
    kernel that does not save it: unfused, or a copy in [s, b, a·d]. `CheckpointFunction.backward` references it, and its gradient.
    `copies_gradient`: the kernel reads a copy of this gradient.
    """
    tables = tuple(tensor for tensor in kernel.saved if is_rotary_table(tensor))
    inside = tuple(
        replace(tensor, shares="checkpoint input") if tensor.made_in else tensor for tensor in kernel.saved if tensor not in tables
    )
    of_caller = tuple(each for each in kernel.forward_workspace if each.name in _BEFORE_ROTATION)
    own = tuple(each for each in kernel.forward_workspace if each.name not in (*_BEFORE_ROTATION, _ROTATED))  # which is an input
    kernel = replace(kernel, forward_workspace=own)
    held: tuple[Tensor, ...] = ()
    if output is not None:
        held = (replace(output, name="output gradient"), replace(output, name="recomputed output"))
        forward = tuple(each for each in kernel.forward_workspace if each.name not in RETURNED)
        backward = tuple(each for each in kernel.backward_workspace if copies_gradient or each.name != "output gradient")
        kernel = replace(kernel, forward_workspace=forward, backward_workspace=backward)
    if kernel.source == FUSED and any(tensor.made_in == QKV for tensor in kernel.saved):
        kernel = replace(kernel, backward_workspace=_with_copied_gradients(kernel.backward_workspace))
    return Module(
        name="core_attention_checkpoint",
        kind=ModuleKind.ATTENTION_KERNEL_CHECKPOINT,
        function=True,
        saved=(*tables, *inputs),
        forward_workspace=of_caller,
        backward_workspace=held,
        children=(replace(kernel, saved=inside),),
        recomputed=True,
        source="tensor_parallel.checkpoint",
    )
