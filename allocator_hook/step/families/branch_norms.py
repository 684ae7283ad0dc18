"""Norms of the outputs of attention and FFN, as in GLM-4 of mcore-bridge (model/gpts/glm4.py)."""

from __future__ import annotations

from typing import Any


def with_branch_norms(spec: Any) -> Any:
    """The spec of a layer whose attention and FFN normalize their outputs."""
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.mlp import MLP

    def norm(config: Any) -> Any:
        return TENorm(hidden_size=config.hidden_size, config=config, eps=config.layernorm_epsilon)

    class NormalizedAttention(SelfAttention):  # type: ignore[misc]
        """Attention with a norm of its output."""

        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            self.post_self_attn_layernorm = norm(config)

        def forward(self, *args: Any, **options: Any) -> Any:
            output, bias = super().forward(*args, **options)
            output = self.post_self_attn_layernorm(output)
            return output, bias

    class NormalizedMLP(MLP):  # type: ignore[misc]
        """An FFN with a norm of its output."""

        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            self.post_mlp_layernorm = norm(config)

        def forward(self, *args: Any, **options: Any) -> Any:
            output, bias = super().forward(*args, **options)
            output = self.post_mlp_layernorm(output)
            return output, bias

    spec.submodules.self_attention.module = NormalizedAttention
    spec.submodules.mlp.module = NormalizedMLP
    return spec
