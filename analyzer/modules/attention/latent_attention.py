"""Multi-latent attention.

Source: core/transformer/multi_latent_attention.py (0.16.1). `latent_projections` has the legend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.attention.context_parallel import Exchange, exchanging_kernel, gradient_scratch
from analyzer.modules.attention.core_attention import ATTENTION, FUSED, kernel_under_checkpoint, returns_saved_output, sinks
from analyzer.modules.attention.fp8_attention import Operand, quantized_kernel
from analyzer.modules.attention.latent_projections import (
    compressed,
    down_projection,
    head_widths,
    key_value_width,
    maker_of_queries,
    mla_of,
    rotary_tables,
    rotation,
    up_projection,
)
from analyzer.modules.attention.unfused_attention import (
    backward_workspace,
    forward_workspace,
    reads_copied_gradient,
    saved_inputs,
    saved_matrices,
    with_absent_tensors,
)
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import row_parallel
from analyzer.modules.quantized import saved_input
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module, Tensor, total_bytes

_RECOMPUTED: Final = "recomputed "
"""How the names of the tensors of recomputed up projections begin."""


def latent_attention(shapes: Shapes) -> Module:
    """[s, b, h] → [s, b, h], after a separate norm."""
    mla = mla_of(shapes)
    kernel, projection = _kernel(shapes), output_projection(shapes)
    latent = compressed(shapes, "compressed keys and values", mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    variables = (latent, *_unsaved_queries(shapes), *_referenced_inputs(shapes))
    referencing = tuple(replace(each, forward_workspace=(*each.forward_workspace, *variables)) for each in (kernel, projection))
    return Module(
        name=ATTENTION,
        kind=ModuleKind.ATTENTION,
        forward_workspace=(*shapes.dropped_norm_output, *shapes.referenced_norm_output),
        backward_workspace=shapes.recomputed_norm_output,
        children=(*_projections(shapes), rotation(shapes), *referencing),
        source="MLASelfAttention",
    )


def _unsaved_queries(shapes: Shapes) -> tuple[Tensor, ...]:
    """The compressed queries, which a local variable references, if their projection saves them in FP8 only."""
    rank = mla_of(shapes).q_lora_rank
    if rank is None or shapes.fp8 is None or shapes.model.qk_layernorm:  # a norm saves its input in 16 bit
        return ()
    return (compressed(shapes, "compressed queries", rank),)


def _referenced_inputs(shapes: Shapes) -> tuple[Tensor, ...]:
    """16-bit queries, keys and values, which local variables reference, if a kernel saves them in FP8 only."""
    if not shapes.quantizes_attention or shapes.recomputes("mla_up_proj") or shapes.recompute_core_attention:
        return ()
    heads = shapes.model.num_attention_heads // shapes.t
    return tuple(shapes.wide(name, heads * width, "a·d/t") for name, width in head_widths(mla_of(shapes)))


def _projections(shapes: Shapes) -> tuple[Module, ...]:
    """Projections of queries, keys and values, in the order in which they run."""
    mla = mla_of(shapes)
    heads = shapes.model.num_attention_heads // shapes.t
    queries = heads * mla.query_head_dim
    normed = shapes.model.qk_layernorm
    position, first = mla.qk_pos_emb_head_dim, mla.q_lora_rank is None and not shapes.norms_queries
    kv_down = down_projection(shapes, "linear_kv_down_proj", width=mla.kv_lora_rank, position=position, first=first)
    kv_up = up_projection(
        shapes, "linear_kv_up_proj", width=heads * key_value_width(mla), source_width=mla.kv_lora_rank, normed=normed
    )
    if mla.q_lora_rank is None:
        hidden = shapes.model.hidden_size
        norm = shapes.norms_queries
        q = up_projection(shapes, "linear_q_proj", width=queries, source_width=hidden, normed=norm, shares=True)
        return (q, kv_down, kv_up)
    q_down = down_projection(shapes, "linear_q_down_proj", width=mla.q_lora_rank, position=0, first=True)
    q_up = up_projection(shapes, "linear_q_up_proj", width=queries, source_width=mla.q_lora_rank, normed=normed)
    return (q_down, kv_down, q_up, kv_up)


def output_projection(shapes: Shapes) -> Module:
    """[s, b, a·dv/t] → [s, b, h], after dense or sparse attention."""
    values = shapes.model.num_attention_heads * mla_of(shapes).v_head_dim
    return row_parallel(
        shapes,
        "linear_proj",
        ModuleKind.ATTENTION_OUTPUT,
        width=values // shapes.t,
        full_width=values,
        symbol="a·dv/t",
        bias=shapes.model.bias_linear,
        input_made_in=f"{ATTENTION}.core_attention",
        input_shares="core_attention output" if _saves_kernel_output(shapes) else "",
        saves_16_bit=True,
    )


def _kernel(shapes: Shapes) -> Module:
    """Core attention, with the tensors that recomputed up projections and a checkpoint add."""
    if shapes.model.sparse_attention is not None:
        from analyzer.modules.attention.sparse_attention import sparse_attention

        return sparse_attention(shapes)
    kernel = replace(_core(shapes), parameters=sinks(shapes))
    if shapes.recompute_core_attention:
        return _checkpointed(shapes, kernel)
    if shapes.recomputes("mla_up_proj"):  # after the output gradient is computed, before the kernel's backward
        recomputed, in_kernel = rotation(shapes).forward_workspace, kernel.backward_workspace
        values = shapes.model.num_attention_heads // shapes.t * mla_of(shapes).v_head_dim
        output = shapes.wide("output gradient", values, "a·dv/t")
        needed = max(((output, *recomputed), in_kernel), key=total_bytes)
        kernel = replace(kernel, forward_workspace=(*kernel.forward_workspace, *recomputed[-3:]), backward_workspace=needed)
    return kernel


def _checkpointed(shapes: Shapes, kernel: Module) -> Module:
    """The kernel in a checkpoint. Up projections are recomputed before it, so their tensors exist while it is recomputed."""
    values = shapes.model.num_attention_heads // shapes.t * mla_of(shapes).v_head_dim
    context = None if returns_saved_output(shapes) else shapes.wide("output", values, "a·dv/t")
    before = tuple(each for each in kernel.backward_workspace if each.name.startswith(_RECOMPUTED))
    kernel = replace(kernel, backward_workspace=tuple(each for each in kernel.backward_workspace if each not in before))
    copies = shapes.model.attention_backend == "unfused" and reads_copied_gradient(shapes)
    found = kernel_under_checkpoint(kernel, _checkpoint_inputs(shapes), output=context, copies_gradient=copies)
    if not shapes.recomputes("mla_up_proj"):
        return found
    originals = rotation(shapes).forward_workspace[-3:]
    return replace(
        found,
        forward_workspace=(*found.forward_workspace, *originals),
        backward_workspace=(*found.backward_workspace, *before),
    )


def _saves_kernel_output(shapes: Shapes) -> bool:
    """Whether the output projection saves the kernel's own output."""
    if shapes.recompute_core_attention or shapes.model.attention_backend == "unfused" or shapes.model.sparse_attention is not None:
        return False
    return shapes.model.attention_backend == "fused" or shapes.b == 1


def _core(shapes: Shapes) -> Module:
    """The kernel with head width dq for queries and keys and dv for values, each a separate tensor."""
    model, mla = shapes.model, mla_of(shapes)
    heads = model.num_attention_heads // shapes.t
    dropped = shapes.recomputes("mla_up_proj")

    def tensor(name: str, width: int, *, saved: bool = True, made_in: str = "") -> Tensor:
        share = "recomputed up projections" if saved and dropped else ""
        return shapes.wide(name, heads * width, "a·d/t", made_in=made_in, shares=share)

    copied = model.attention_backend == "flash" and shapes.b > 1
    maker = "" if copied else ATTENTION
    inputs = (
        tensor("query", mla.query_head_dim, made_in="" if copied else maker_of_queries(shapes)),
        tensor("key", mla.query_head_dim, made_in=maker),
        tensor("value", mla.v_head_dim, made_in=maker),
    )
    output = tensor("output", mla.v_head_dim, saved=False)
    recomputed: tuple[Tensor, ...] = ()
    if dropped:  # with the tensors for their own backward; the checkpoint may copy the recomputed tensors to its outputs
        tables = () if model.rope_fusion else rotary_tables(shapes)
        copies = inputs if shapes.inputs.core.copies_recomputed else ()
        originals = (*inputs, *copies, *tables, *_saved_by_projections(shapes))
        recomputed = tuple(Tensor(name=f"{_RECOMPUTED}{each.name}", shape=each.shape, dtype=each.dtype) for each in originals)
    gradients = (
        tensor("output gradient", mla.v_head_dim, saved=False),
        *(tensor(f"{name} gradient", width, saved=False) for name, width in head_widths(mla)),
    )
    if model.attention_backend == "unfused":
        kernel = Module(
            name="core_attention",
            kind=ModuleKind.ATTENTION_KERNEL,
            saved=(*saved_inputs(inputs), *saved_matrices(shapes)),
            forward_workspace=forward_workspace(shapes, replace(output, name="context")),
            backward_workspace=(
                *backward_workspace(
                    shapes, output=gradients[0], value=gradients[-1], frees_value=not shapes.recompute_core_attention
                ),
                *recomputed,
            ),
            source="UnfusedDotProductAttention",
        )
        return with_absent_tensors(kernel)
    if shapes.split.context > 1:
        return _over_context(shapes, made_by=maker_of_queries(shapes), recomputed=recomputed)
    statistics = shapes.statistics("softmax statistics", shapes.b * heads * shapes.s, "4·b·a·s/t")
    if shapes.quantizes_attention:
        recomputed = _unsaved(shapes, recomputed, tuple(name for name, _ in head_widths(mla)))
    kernel = Module(
        name="core_attention",
        kind=ModuleKind.ATTENTION_KERNEL,
        saved=(*inputs, output, statistics, Tensor(name="random state", shape=(2,), dtype="int64")),
        forward_workspace=(tensor("output in [s,b,a,d]", mla.v_head_dim, saved=False),) if copied else (),
        backward_workspace=(*gradients, *gradient_scratch(shapes, query=heads * mla.query_head_dim, grouped=False), *recomputed),
        source="FlashAttention" if model.attention_backend == "flash" else FUSED,
    )
    if not shapes.quantizes_attention:
        return kernel
    operands = tuple(Operand(name, heads, width) for name, width in head_widths(mla))
    return quantized_kernel(shapes, kernel, operands, inputs)


def _unsaved(shapes: Shapes, recomputed: tuple[Tensor, ...], names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The tensors of recomputed up projections during the backward of a kernel that does not save those with these names.

    A checkpoint that copies recomputed tensors to its outputs leaves the copies free at once if nothing saves them. Without copies
    (`copies_recomputed`) the tensors stay for the backward of the checkpoint. A checkpoint around the kernel saves its inputs.
    """
    if not recomputed or not shapes.inputs.core.copies_recomputed or shapes.recompute_core_attention:
        return recomputed
    remaining = list(recomputed)
    for name in names:
        remaining.remove(next(each for each in remaining if each.name == f"{_RECOMPUTED}{name}"))
    return tuple(remaining)


def _saved_by_projections(shapes: Shapes) -> tuple[Tensor, ...]:
    """What recomputed up projections save for their own backward."""
    mla, qk_layernorm = mla_of(shapes), shapes.model.qk_layernorm
    latent = compressed(shapes, "compressed keys and values", mla.kv_lora_rank)
    saved = saved_input(shapes, latent)
    if qk_layernorm:  # the input of the norm is a copy of a slice, in 16 bit
        saved = (latent, *saved)
    if mla.q_lora_rank is not None and (qk_layernorm or shapes.fp8 is not None):  # else it saves the checkpoint's input
        name = "normalized queries" if qk_layernorm else "compressed queries"
        saved = (*saved, *saved_input(shapes, compressed(shapes, name, mla.q_lora_rank)))
    if shapes.norms_queries and shapes.fp8 is None:
        saved = (*saved, shapes.hidden("normalized input of the queries"))
    if shapes.quantizes_norm_output:
        saved = (*saved, *saved_input(shapes, shapes.hidden("normalized input"), gathered=shapes.sp))
    return saved


def _checkpoint_inputs(shapes: Shapes) -> tuple[Tensor, ...]:
    """Queries, keys and values as a checkpoint around attention saves them."""
    heads = shapes.model.num_attention_heads // shapes.t
    share = "recomputed up projections" if shapes.recomputes("mla_up_proj") else ""
    makers = (maker_of_queries(shapes), ATTENTION, ATTENTION)
    return tuple(
        shapes.wide(name, heads * width, "a·d/t", made_in=maker, shares=share)
        for (name, width), maker in zip(head_widths(mla_of(shapes)), makers, strict=True)
    )


def _over_context(shapes: Shapes, *, made_by: str, recomputed: tuple[Tensor, ...]) -> Module:
    """The kernel under context parallelism. Of the `recomputed` tensors the p2p kernel saves only the query."""
    mla = mla_of(shapes)
    heads = shapes.model.num_attention_heads // shapes.t
    query, value = heads * mla.query_head_dim, heads * mla.v_head_dim
    kernel = exchanging_kernel(Exchange(shapes, query=query, key=query, value=value, output=value, made_by=made_by), tables=())
    if not recomputed:
        return kernel
    in_ring = shapes.split.cp_comm_type == "p2p"  # otherwise the kernel saves exchanged queries
    shared = {"query": "recomputed up projections"} if in_ring else {}
    saved = tuple(replace(each, shares=shared.get(each.name, each.shares)) for each in kernel.saved)
    remaining = _unsaved(shapes, recomputed, tuple(name for name, _ in head_widths(mla) if name not in shared))
    return replace(kernel, saved=saved, backward_workspace=(*kernel.backward_workspace, *remaining))
