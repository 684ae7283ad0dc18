"""Norms of the outputs of attention and FFN, as in GLM-4 of mcore-bridge (model/gpts/glm4.py)."""

from __future__ import annotations

from typing import Any

from allocator_hook.step.families.ffn import replace_ffn


def with_branch_norms(spec: Any) -> Any:
    """The spec of a layer whose attention and FFN normalize their outputs."""
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.mlp import MLP

    def normalized(base: Any, name: str) -> Any:
        """`base` with a norm of its output, which is its module `name`."""

        class Normalized(base):  # type: ignore[misc]
            def __init__(self, config: Any, *args: Any, **options: Any) -> None:
                super().__init__(config, *args, **options)
                setattr(self, name, TENorm(hidden_size=config.hidden_size, config=config, eps=config.layernorm_epsilon))

            def forward(self, *args: Any, **options: Any) -> Any:
                output, bias = super().forward(*args, **options)
                output = getattr(self, name)(output)
                return output, bias

        return Normalized

    spec.submodules.self_attention.module = normalized(SelfAttention, "post_self_attn_layernorm")
    replace_ffn(spec.submodules, normalized(MLP, "post_mlp_layernorm"))
    return spec
