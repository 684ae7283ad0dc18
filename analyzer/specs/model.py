"""The model: a GPT decoder as Megatron builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from analyzer.specs.moe import MoeSpec

Implementation = Literal["transformer_engine", "local", "legacy"]
AttentionBackend = Literal["flash", "fused", "unfused"]
CrossEntropy = Literal["unfused", "native", "te"]
Activation = Literal["gelu", "swiglu", "geglu", "quick_geglu", "squared_relu", "silu"]
Branch = Literal["full", "linear", "none"]
"""A branch of a layer: complete, replaced by one linear layer, or left out."""


@dataclass(frozen=True, kw_only=True)
class MlaSpec:
    """Multi-latent attention: queries, keys and values through low-rank projections."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    yarn: bool = True
    """Positions by YaRN (`--rope-type`), of which each layer keeps tables."""
    first_angles_stay: bool = False
    """The cache of angles is not emptied of what the tables were made from (before core 0.16)."""

    @property
    def query_head_dim(self) -> int:
        """Elements of a query or key head: without and with position."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One decoder layer of a model whose layers differ (`--heterogeneous-layers-config-path`)."""

    attention: Branch = "full"
    feed_forward: Branch = "full"
    ffn_hidden_size: int | None = None
    """Width of the feed-forward branch where it is a full one; None for that of the model."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A GPT decoder as Megatron would build it."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key and value heads; equal to num_attention_heads without grouped-query attention."""
    kv_channels: int
    """Elements of one head."""
    vocab_size: int
    """Tokens the tokenizer knows, before padding."""
    padded_vocab_size: int
    max_position_embeddings: int
    position_embedding: Literal["learned_absolute", "rope", "none"]
    yarn_positions: int | None = None
    """Positions that the tables of YaRN are made for (`--position-embedding-type yarn`); None for other rotations."""
    rotary_percent: float = 1.0
    rope_fusion: bool = False
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    activation: Activation = "gelu"
    bias_linear: bool = True
    """Biases on the projections, fc1 and fc2 (`--disable-bias-linear` turns them off)."""
    bias_qkv: bool = True
    """Bias on the query/key/value projection: `--add-qkv-bias`, or bias_linear."""
    qk_layernorm: bool = False
    tied_embeddings: bool = True
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    bias_activation_fusion: bool = True
    """`--no-bias-gelu-fusion` / `--no-bias-swiglu-fusion` turn it off."""
    bias_dropout_fusion: bool = True
    masked_softmax_fusion: bool = True
    attention_softmax_in_fp32: bool = False
    apply_query_key_layer_scaling: bool = False
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Whether attention has a sink, and whether it is learned: one parameter for each head."""
    window: tuple[int, int] | None = None
    """Tokens that attention sees before and after each (`--window-size`)."""
    windowed: tuple[bool, ...] = ()
    """For each decoder layer whether attention sees a window only; empty without `--window-size`."""
    window_backend: AttentionBackend | None = None
    """The kernel of those layers where it is not attention_backend."""
    activation_clamped: bool = False
    """`--activation-func-clamp-value`."""
    glu_offset: bool = False
    """The linear half of an unfused gated activation gets an offset, also where that is 0 (core 0.15 on)."""
    apply_residual_connection_post_layernorm: bool = False
    fp32_residual_connection: bool = False
    implementation: Implementation = "transformer_engine"
    """`legacy` is the 2023 code (Megatron-LM of August 2023, before core 0.3) with its own layers."""
    attention_backend: AttentionBackend = "flash"
    """What Transformer Engine (or the 2023 `--use-flash-attn`) picks; unfused keeps the score matrices."""
    cross_entropy: CrossEntropy = "unfused"
    fp16_lm_cross_entropy: bool = False
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    blocks: tuple[BlockSpec, ...] = ()
    """For each decoder layer what it is made of, where they differ by configuration; else empty."""
    mtp_num_layers: int = 0
    """Multi-token-prediction depths, after the last decoder layer."""

    @property
    def gated(self) -> bool:
        """Whether fc1 has a gate beside its up-projection, twice ffn_hidden_size wide."""
        return self.activation in ("swiglu", "geglu", "quick_geglu")

    @property
    def query_projection_size(self) -> int:
        """a·d, the width of all queries."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_value_projection_size(self) -> int:
        """g·d, the width of all keys (and of all values)."""
        return self.num_query_groups * self.kv_channels
