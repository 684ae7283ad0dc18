"""Choose the attention and MoE implementations of a layer. Each implementation is imported on first use."""

from __future__ import annotations

from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module


def attention_branch(shapes: Shapes, *, fused_norm: bool, input_shares: str) -> Module:
    """Multi-latent attention if the model uses it, else self-attention. `fused_norm`: its norm is fused into the qkv projection."""
    if shapes.model.mla is not None:
        from analyzer.modules.attention.latent_attention import latent_attention

        return latent_attention(shapes)
    from analyzer.modules.attention.self_attention import self_attention

    return self_attention(shapes, fused_norm=fused_norm, input_shares=input_shares if fused_norm else "")


def mixer_branch(shapes: Shapes, *, input_shares: str) -> Module:
    """A Mamba mixer with its norm."""
    from analyzer.modules.mamba.mixer import mixer

    return mixer(shapes, input_shares=input_shares)


def moe_branch(shapes: Shapes) -> Module:
    """A MoE layer."""
    from analyzer.modules.moe.layer import moe_layer

    return moe_layer(shapes)
