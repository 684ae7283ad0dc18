"""Attention other than that of queries, keys and values of each token: the sizes of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

AttentionKind = Literal[
    "plain", "latent", "latent_without_indexer", "gated_delta_net", "plugin", "sliding", "compressed", "heavily_compressed"
]
"""The attention of a layer: with queries, keys and values of each token, multi-latent, linear, or to compressed keys."""


@dataclass(frozen=True, kw_only=True)
class MlaSpec:
    """Multi-latent attention: queries, keys and values through low-rank projections."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    yarn: bool = True
    """Positions by YaRN (`--rope-type`): each layer has tables of cosines and sines."""
    first_angles_stay: bool = False
    """The RoPE frequency cache stays allocated after the YaRN tables were computed (before core 0.16)."""

    @property
    def query_head_dim(self) -> int:
        """Elements of a query or key head: the part without and the part with position."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


@dataclass(frozen=True, kw_only=True)
class LinearAttentionSpec:
    """Gated delta net: attention whose cost is linear in the sequence length (`--experimental-attention-variant`)."""

    layers: tuple[bool, ...]
    """For each decoder layer, whether its attention is linear. The others, and MTP layers, have the attention of the model."""
    num_key_heads: int
    """Heads of queries, and of keys."""
    num_value_heads: int
    """Heads of values and of gates."""
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    """Tokens that the causal convolution of queries, keys and values reads."""
    frequency: int | None = None
    """Every N-th layer has full attention (`--linear-attention-freq N`); None if layers are listed."""

    @property
    def key_width(self) -> int:
        """Width of all queries, and of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of all values, and of all gates."""
        return self.num_value_heads * self.value_head_dim

    @property
    def convolved_width(self) -> int:
        """Width of queries, keys and values, which the convolution reads."""
        return 2 * self.key_width + self.value_width

    def multiplications(self, hidden: int) -> int:
        """Multiplications and additions of a token in forward, as Megatron counts them (`num_floating_point_operations`)."""
        projections = hidden * (self.projected_width + self.value_width)
        recurrence = 4 * self.num_value_heads * self.value_head_dim**2
        return projections + self.conv_kernel_dim * self.convolved_width + recurrence

    @property
    def projected_width(self) -> int:
        """Width of the input projection: queries, keys, values, gates, and two numbers for each value head."""
        return self.convolved_width + self.value_width + 2 * self.num_value_heads


@dataclass(frozen=True, kw_only=True)
class AbsorbedSpec:
    """Sparse attention of core 0.19: all heads read one compressed key of each token, which is the value too."""

    backend: Literal["none", "cudnn"] = "none"
    """`--dsa-kernel-backend`. none: operations of PyTorch, which store the scores of all pairs of tokens."""
    every: int = 1
    """Distance of the layers that choose keys (`--dsa-indexer-topk-freq`)."""
    after: int = 1
    """The first layers, each of which chooses keys (`--dsa-indexer-skip-topk-offset`)."""
    rotated: bool = True
    """Queries and keys of the indexer are rotated by a Hadamard transform (`--dsa-indexer-rotate-activation`)."""
    norm_in_fp32: bool = False
    """The keys of the indexer are normalized in fp32 (`--dsa-indexer-k-norm-fp32`)."""

    def chooses(self, layer: int) -> bool:
        """Whether a decoder layer, counted from 0, has an indexer."""
        return _has_indexer(layer, every=self.every, after=self.after)

    @property
    def shares(self) -> bool:
        """Whether layers use the keys that other layers chose."""
        return self.every > 1

    def computed_heads(self, heads: int, capability: tuple[int, int]) -> int | None:
        """The query heads that the kernels compute for `heads`: some more if there are few. None if they cannot.

        Source: `_flash_mla_head_padding` (core/transformer/experimental_attention_variant/dsa_cudnn_kernels.py, 0.19.0).
        """
        if self.backend == "none":
            return heads
        if capability < (9, 0):
            return None
        most = 64 if capability < (10, 0) else 128
        if most == 128 and heads <= 64 and 64 % heads == 0:
            return 64
        if heads % most == 0:
            return heads
        return most if most % heads == 0 else None


@dataclass(frozen=True, kw_only=True)
class SparseAttentionSpec:
    """DeepSeek sparse attention: an indexer chooses the keys of each query (`--experimental-attention-variant dsa`)."""

    heads: int
    """Heads of the indexer."""
    head_dim: int
    """Elements of a query or key of the indexer."""
    topk: int
    """Keys that are chosen for each query, or all if a sequence has fewer."""
    logged: bool = True
    """The loss of the indexer has a coefficient above 0, and is kept for the log."""
    sparse_loss: bool = False
    """The loss compares the chosen keys only (`--dsa-indexer-use-sparse-loss`)."""
    absorbed: AbsorbedSpec | None = None
    """Set if queries are multiplied by the weights of the keys, and attend to compressed keys (core 0.19)."""

    def has_indexer(self, layer: int) -> bool:
        """Whether a decoder layer, counted from 0, chooses keys. The others use those of the last layer before them that does."""
        return self.absorbed is None or self.absorbed.chooses(layer)


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionSpec:
    """Attention of DeepSeek-V4: one head of keys, which are values too, of the last tokens and of groups of earlier tokens."""

    ratios: tuple[int, ...]
    """Tokens of a compressed key in each decoder layer, and in each MTP layer after them: 4, 128, or 0 for a window only."""
    head_dim: int
    q_lora_rank: int
    output_groups: int
    """Groups of heads whose outputs are projected to `output_rank` elements each (`o_groups`)."""
    output_rank: int
    window: int
    """Tokens whose own keys a query reads."""
    index_heads: int
    """Heads of the indexer, which chooses keys of 4 tokens."""
    index_head_dim: int
    topk: int
    """Compressed keys of 4 tokens that are chosen for each query."""
    kernels: bool = False
    """Attention is that of cuDNN and FlashMLA (`dsa_kernel_backend`). Otherwise PyTorch copies the keys of each query."""
    logged: bool = False
    """The loss of the indexer has a coefficient above 0."""
    sparse_loss: bool = True
    """The loss compares the chosen keys only (`dsa_indexer_use_sparse_loss`)."""

    def kind_of(self, layer: int) -> AttentionKind:
        """The attention of a layer, counted from 0; MTP layers follow the decoder layers."""
        ratio = self.ratios[layer]
        return "sliding" if ratio == 0 else "compressed" if ratio == OVERLAPPING else "heavily_compressed"


OVERLAPPING: Final = 4
"""Tokens of a compressed key of which the indexer chooses some. Groups of tokens overlap: a key has those of two."""
STRONGEST: Final = 128
"""Tokens of a compressed key where a query reads all keys."""
COMPRESSION: Final[dict[AttentionKind, int]] = {"sliding": 0, "compressed": OVERLAPPING, "heavily_compressed": STRONGEST}
"""Tokens of a compressed key, by the kind of attention."""


@dataclass(frozen=True, kw_only=True)
class HyperConnectionSpec:
    """Manifold-constrained hyper-connections: the residual stream has several parts, which each branch reads and mixes."""

    streams: int
    """Parts of the residual stream (`num_residual_streams`)."""
    iterations: int = 20
    """Iterations of Sinkhorn-Knopp that make the mixing matrix doubly stochastic."""
    fused: bool = False
    """Kernels of Megatron-LM for each operation (`use_fused_mhc`); otherwise PyTorch compiles them."""
    recomputed: bool = False
    """Inputs and outputs of branches are computed again in backward (`mhc` of `recompute_modules`)."""

    @property
    def mappings(self) -> int:
        """Numbers that a token is mapped to: weights of reading, of writing and of mixing."""
        return self.streams * self.streams + 2 * self.streams


@dataclass(frozen=True, kw_only=True)
class GlobalHeads:
    """Heads of the layers without a window, if they differ from those with one: in Gemma 4."""

    head_dim: int
    groups: int
    """Heads of keys and values."""


@dataclass(frozen=True, kw_only=True)
class CompressedModel:
    """What the options of a release of Megatron-LM do not say of DeepSeek-V4."""

    attention: CompressedAttentionSpec
    hyper_connections: HyperConnectionSpec | None
    hash_layers: int
    """The first layers, in which a table of all tokens chooses the experts."""
    layers: int
    """Decoder layers that the ratios are for; those after them are for MTP layers."""
    not_compared: tuple[str, ...] = ()
    """What the configuration selects that was not compared with Megatron-LM, a noun each."""


def layers_with_indexers(count: int, *, every: int, after: int) -> tuple[bool, ...]:
    """For each of `count` layers, whether it has an indexer: each of the first ones until `after`, then every `every`-th one."""
    return tuple(_has_indexer(layer, every=every, after=after) for layer in range(count))


def _has_indexer(layer: int, *, every: int, after: int) -> bool:
    """Whether a layer, counted from 0, has an indexer. Source: `is_dsa_skip_topk_layer` of megatron-core 0.19.0."""
    return max(layer + 1 - after, 0) % every == 0


@dataclass(frozen=True, kw_only=True)
class PluginLayers:
    """Weights in the attention of some layers. Every tensor-parallel rank has each of them in full."""

    plugin: str
    """What has them: a module of a plugin, or a class of Megatron-LM."""
    described: str
    """What has these weights, for a sentence, such as `indexers`."""
    layers: tuple[bool, ...]
    """For each decoder layer, whether it has them."""
    weights: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each weight."""
    replaces: bool
    """They are all of the attention of these layers. Otherwise they are beside the attention of the model."""
    summed: bool
    """Under sequence parallelism their gradients are summed over tensor-parallel ranks: each rank computes those of its tokens."""
    counted_as: str = ""
    """Whose activations are counted in place of those of the attention, too high or too low; empty if `replaces`."""
    in_mtp: bool = False
    """MTP layers have them too."""
    shares_keys: bool = False
    """The other layers use the keys that the last layer with these weights chose, which must be in the same pipeline stage."""

    @property
    def reason(self) -> str:
        """What is not counted, a fragment of a sentence."""
        if self.counted_as:
            counted = f"the memory and the time of {self.plugin} are counted as {self.counted_as}"
            return f"{counted}, without those of its {self.described}"
        return f"the activations and the time of the {self.described} of {self.plugin} are not counted"
