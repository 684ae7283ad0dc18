"""Choose the attention and MoE implementations of a layer. Each implementation is imported on first use."""

from __future__ import annotations

from analyzer.modules.shapes import ExpertShapes, Shapes
from analyzer.modules.tree import Module
from analyzer.specs import AttentionKind
from analyzer.specs.attention import COMPRESSION


def fuses_norm(shapes: Shapes, kind: AttentionKind) -> bool:
    """Whether the norm before attention is part of its first projection: with Transformer Engine, except latent attention."""
    return fuses_norms(shapes) and not is_latent(shapes, kind)


def is_latent(shapes: Shapes, kind: AttentionKind) -> bool:
    """Whether the attention is multi-latent, with or without modules of a plugin, or compressed."""
    return (
        kind in COMPRESSION or kind in ("latent", "latent_without_indexer") or (kind == "plugin" and shapes.model.mla is not None)
    )


def fuses_norms(shapes: Shapes) -> bool:
    """Whether the norms of a layer are parts of the linear layers after them."""
    return shapes.model.implementation == "transformer_engine" and shapes.model.norm_modules == "engine"


def biased_output(shapes: Shapes, kind: AttentionKind) -> bool:
    """Whether the output projection of attention returns a bias, which is added with the residual. That of a delta net has none."""
    return shapes.model.bias_linear and kind != "gated_delta_net"


def attention_branch(shapes: Shapes, kind: AttentionKind, *, fused_norm: bool, input_shares: str) -> Module:
    """The attention of a kind. `fused_norm`: its norm is fused into its first projection.

    `input_shares`: the tensor of a checkpoint that already stores what that projection, or its norm, reads.
    """
    if kind in ("latent", "latent_without_indexer"):
        if shapes.model.absorbed_attention is not None:
            from analyzer.modules.attention.absorbed_attention import absorbed_attention

            return absorbed_attention(shapes, chooses=kind == "latent")
        from analyzer.modules.attention.latent_attention import latent_attention

        return latent_attention(shapes)
    if kind in COMPRESSION:
        from analyzer.modules.attention.compressed_attention import compressed_attention

        return compressed_attention(shapes, kind)
    if kind == "plugin":
        from analyzer.modules.attention.plugin_attention import with_plugin

        own = attention_branch(shapes, shapes.model.full_attention, fused_norm=fused_norm, input_shares=input_shares)
        return with_plugin(shapes, own)
    if kind == "gated_delta_net":
        from analyzer.modules.attention.gated_delta_net import gated_delta_net

        return gated_delta_net(shapes, fused_norm=fused_norm, input_shares=input_shares)
    from analyzer.modules.attention.self_attention import self_attention

    return self_attention(shapes, fused_norm=fused_norm, input_shares=input_shares)


def mixer_branch(shapes: Shapes, *, input_shares: str) -> Module:
    """A Mamba mixer with its norm."""
    from analyzer.modules.mamba.mixer import mixer

    return mixer(shapes, input_shares=input_shares)


def moe_branch(shapes: ExpertShapes) -> Module:
    """A MoE layer."""
    from analyzer.modules.moe.layer import moe_layer

    return moe_layer(shapes)
