"""The layers, embedding and rotary positions of Gemma as Megatron-Bridge builds them.

Sources: models/gemma/gemma3_provider.py, models/gemma/modules.py and models/common/te_layers.py of Megatron-Bridge, August 2026.
Its windows are those of `--window-size` and `--window-attn-skip-freq`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from allocator_hook.step.families.ffn import submodules_of_ffn
from analyzer.specs import ModelSpec


def with_norms_in_projections(spec: Any) -> Any:
    """The spec of a layer whose output projections normalize their outputs (`TERowParallelLinearLayerNorm`)."""
    from megatron.core.extensions.transformer_engine import TENorm, TERowParallelLinear

    class TERowParallelLinearLayerNorm(TERowParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.post_layernorm = TENorm(config, output_size)

        def forward(self, x: Any) -> Any:
            output, bias = super().forward(x)
            return self.post_layernorm(output), bias

    spec.submodules.self_attention.submodules.linear_proj = TERowParallelLinearLayerNorm
    submodules_of_ffn(spec.submodules).linear_fc2 = TERowParallelLinearLayerNorm
    return spec


def without_input_norms(spec: Any) -> Any:
    """The spec of a layer without norms before attention and FFN (`exaone4_layer_spec`)."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    spec.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
    submodules_of_ffn(spec.submodules).linear_fc1 = TEColumnParallelLinear
    return spec


def with_local_positions(spec: Any, model: ModelSpec) -> Any:
    """The spec of a layer that takes the first of two tables of rotary positions if it has a window (`Gemma3SelfAttention`)."""
    from megatron.core.transformer.attention import SelfAttention

    class LocalAttention(SelfAttention):  # type: ignore[misc]
        def forward(self, *args: Any, rotary_pos_emb: Any = None, **options: Any) -> Any:
            local = model.windowed[self.layer_number - 1]
            return super().forward(*args, rotary_pos_emb=rotary_pos_emb[0 if local else 1], **options)

    spec.submodules.self_attention.module = LocalAttention
    return spec


def change_ends(model: ModelSpec, module: Any) -> None:
    """Scales the output of the embedding, and adds a second table of rotary positions."""
    if model.scaled_embedding and hasattr(module, "embedding"):
        module.embedding.__class__ = _scaled(type(module.embedding))
    if model.local_rope:
        module.rotary_pos_emb = _two_tables(module.rotary_pos_emb, model)


def _scaled(base: Any) -> Any:
    class Scaled(base):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            embeddings = super().forward(*args, **options)
            return embeddings * (self.config.hidden_size**0.5)

    return Scaled


def _two_tables(given: Any, model: ModelSpec) -> Any:
    base: Any = type(given)

    class TwoTables(base):  # type: ignore[misc]
        """`Gemma3RotaryEmbedding`."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.rope_local = base(**options)

        def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
            assert cp_group is None
            return self._cached(max_seq_len, offset, packed_seq)

        @lru_cache(maxsize=32)  # noqa: B019
        def _cached(self, max_seq_len: int, offset: int, packed_seq: bool) -> Any:
            wide = super().forward(max_seq_len, offset, packed_seq, None)
            local = self.rope_local.forward(max_seq_len, offset, packed_seq, None)
            return torch.stack([local, wide], dim=0)

    return TwoTables(kv_channels=model.kv_channels, rotary_percent=model.rotary_percent)
