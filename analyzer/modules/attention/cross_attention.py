"""Cross-attention of T5: queries from the decoder, keys and values from the output of the encoder.

Source: `CrossAttention` of core/transformer/attention.py (0.16.1). Symbols: s tokens of the decoder, e tokens of the encoder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.attention.core_attention import FUSED, QKV_GRADIENTS, Heads, kernel_under_checkpoint
from analyzer.modules.attention.cudnn import score_gradients, stores_score_gradients
from analyzer.modules.attention.unfused_attention import (
    backward_workspace,
    forward_workspace,
    reads_copied_gradient,
    saved_inputs,
    saved_matrices,
    with_absent_tensors,
)
from analyzer.modules.inputs import LayerInputs
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import column_parallel, row_parallel
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import MODEL_PATH, Module, Tensor, with_part

NAME: Final = "cross_attention"
NORM: Final = "pre_cross_attn_layernorm"
ENCODER_OUTPUT: Final = "output of the encoder"
ENCODED: Final = f"{MODEL_PATH}encoder.final_layernorm"


def cross_attention(inputs: LayerInputs, *, stores: bool) -> Module:
    """[s, b, h] and the encoder's [e, b, h] → [s, b, h]. `inputs` are those of the model.

    `stores`: it stores the output of the encoder for its backward; otherwise this is stored already.
    """
    decoder, encoder, cross = (Shapes(inputs.of_part(part)) for part in ("decoder", "encoder", "cross"))
    model, heads = decoder.model, Heads(decoder)
    query = column_parallel(
        decoder,
        "linear_q",
        ModuleKind.Q_PROJECTION,
        width=heads.query,
        full_width=model.query_projection_size,
        symbol="a·d/t",
        bias=model.bias_linear,
        fused_norm=False,
        input_made_in=NORM,
    )
    key_value = column_parallel(
        encoder,
        "linear_kv",
        ModuleKind.KV_PROJECTION,
        width=2 * heads.key,
        full_width=2 * model.key_value_projection_size,
        symbol="2·g·d/t",
        bias=model.bias_linear,
        fused_norm=False,
        input_made_in=ENCODED,
    )
    if not stores:
        key_value = replace(key_value, saved=tuple(replace(each, shares=ENCODER_OUTPUT) for each in key_value.saved))
    projection = row_parallel(
        decoder,
        "linear_proj",
        ModuleKind.ATTENTION_OUTPUT,
        width=heads.query,
        full_width=model.query_projection_size,
        symbol="a·d/t",
        bias=model.bias_linear,
        input_made_in=f"{NAME}.core_attention",
        input_shares="core_attention output" if _projection_reads_saved(cross) else "",
    )
    return Module(
        name=NAME,
        kind=ModuleKind.ATTENTION,
        children=(query, with_part(key_value, "encoder"), with_part(_kernel(cross, encoder), "cross"), projection),
    )


def _projection_reads_saved(cross: Shapes) -> bool:
    """Whether the kernel saves its output, which the projection reads: the fused kernel without a checkpoint."""
    return cross.model.attention_backend != "unfused" and not cross.recompute_core_attention


def _kernel(cross: Shapes, encoder: Shapes) -> Module:
    """The kernel, under a checkpoint with `--recompute-modules core_attn`."""
    heads, keys = Heads(cross), Heads(encoder)
    unfused = cross.model.attention_backend == "unfused"
    inputs = (
        heads.tensor("query", heads.query, made_in=f"{NAME}.linear_q"),
        encoder.wide("key and value", 2 * keys.key, "2·g·d/t", made_in=f"{NAME}.linear_kv"),
    )
    kernel = _unfused(cross, encoder, inputs) if unfused else _fused(cross, encoder, inputs)
    if not cross.recompute_core_attention:
        return kernel
    output = heads.tensor("output", heads.query) if unfused else None
    return kernel_under_checkpoint(kernel, inputs, output=output, copies_gradient=unfused and reads_copied_gradient(cross))


def _unfused(cross: Shapes, encoder: Shapes, inputs: tuple[Tensor, ...]) -> Module:
    heads = Heads(cross)
    return with_absent_tensors(
        Module(
            name="core_attention",
            kind=ModuleKind.ATTENTION_KERNEL,
            saved=(*saved_inputs(inputs), *saved_matrices(cross)),
            forward_workspace=forward_workspace(cross, heads.tensor("context", heads.query)),
            backward_workspace=backward_workspace(
                cross,
                output=heads.tensor("output gradient", heads.query),
                value=encoder.wide("value gradient", heads.key, "g·d/t"),
                frees_value=False,
            ),
            source="UnfusedDotProductAttention" if cross.model.implementation == "transformer_engine" else "DotProductAttention",
        )
    )


def _fused(cross: Shapes, encoder: Shapes, inputs: tuple[Tensor, ...]) -> Module:
    """cuDNN's fused attention. Its backward sums dO·O for each query and accumulates the gradient of the queries, both in fp32."""
    heads = Heads(cross)
    rows = cross.b * heads.count * cross.s
    scratch = replace(heads.tensor("query gradient", heads.query), dtype="fp32", formula="4·s·b·a·d/t")
    if stores_score_gradients(cross.inputs.compute_capability, deterministic=cross.inputs.deterministic):
        scratch = score_gradients(cross, heads.count, lengths=(cross.s, encoder.s))
    return Module(
        name="core_attention",
        kind=ModuleKind.ATTENTION_KERNEL,
        saved=(
            *inputs,
            heads.tensor("output", heads.query),
            cross.statistics("softmax statistics", rows, "4·b·a·s/t"),
            Tensor(name="random state", shape=(2,), dtype="int64"),
        ),
        backward_workspace=(
            heads.tensor("output gradient", heads.query),
            heads.tensor(QKV_GRADIENTS, heads.query),
            encoder.wide("key and value gradients", 2 * heads.key, "2·g·d/t"),
            cross.statistics("sum of dO·O", rows, "4·b·a·s/t"),
            scratch,
        ),
        source=FUSED,
    )
