"""The model: a GPT decoder, a BERT encoder, a T5 or a vision-language model of Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from analyzer.specs.adapters import AdapterSpec
from analyzer.specs.attention import (
    AbsorbedSpec,
    AttentionKind,
    CompressedAttentionSpec,
    GlobalHeads,
    HyperConnectionSpec,
    LinearAttentionSpec,
    MlaSpec,
    PluginLayers,
    SparseAttentionSpec,
)
from analyzer.specs.distillation import DistillationSpec
from analyzer.specs.freezing import FreezeSpec
from analyzer.specs.moe import MoeSpec
from analyzer.specs.vision_part import VisionWeight

Family = Literal["gpt", "bert", "t5", "llava", "mimo"]
"""The model class: GPTModel, BertModel, T5Model, LLaVAModel or MimoModel of megatron-core."""
FAMILY_NAMES: Final[dict[Family, str]] = {"gpt": "GPT", "bert": "BERT", "t5": "T5", "llava": "LLaVA", "mimo": "MIMO"}
"""The name of each family in texts."""
NormModules = Literal["engine", "torch", "unfused", "none"]
"""Modules of the norms of layers. `engine`: those that the implementation has. `torch`: modules of PyTorch before the linear layers
of any implementation. `unfused`: an RMSNorm of separate operations, and norms of all queries and of all keys of a token, whose
statistics are gathered over tensor-parallel ranks (examples/multimodal/nvlm/internvit.py). `none`: those of the implementation, and
none before attention and FFN, as in EXAONE 4."""
VisionEncoder = Literal["clip", "siglip", "internvit", "internvit300M", "radio", "radio-g", "cradio-g", "hf_clip"]
"""CLIPViTModel (the first four) or RADIOViTModel of megatron-core, or CLIPVisionModel of transformers."""
FrozenPart = Literal["vision_model", "vision_projection", "language_model"]
FROZEN_PARTS: Final[tuple[FrozenPart, ...]] = ("vision_model", "vision_projection", "language_model")
"""The parts of a vision-language model that can be frozen, by the names of their modules."""
Implementation = Literal["transformer_engine", "local", "legacy"]
AttentionBackend = Literal["flash", "fused", "unfused"]
CrossEntropy = Literal["unfused", "native", "te"]
Activation = Literal["gelu", "swiglu", "geglu", "quick_geglu", "squared_relu", "silu"]
Branch = Literal["full", "linear", "none", "mamba"]
"""A branch of a layer: complete, replaced by one linear layer, omitted, or (instead of attention) a Mamba mixer."""


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One decoder layer of a model whose layers differ (`--heterogeneous-layers-config-path`)."""

    attention: Branch = "full"
    feed_forward: Branch = "full"
    ffn_hidden_size: int | None = None
    """FFN width of a full feed-forward branch; None for that of the model."""


@dataclass(frozen=True, kw_only=True)
class HybridSpec:
    """What a hybrid model has in addition to the layers in `ModelSpec.blocks`: the sizes of its Mamba layers."""

    pattern: str
    """A letter for each decoder layer (`analyzer.specs.hybrid.LETTERS`)."""
    state_dim: int = 128
    """Elements of the state of a channel (`--mamba-state-dim`)."""
    head_dim: int = 64
    groups: int = 8
    """Groups of heads that share B and C."""
    heads: int
    memory_efficient: bool = True
    """Convolution and scan are one function, which computes again in backward what it did not save."""
    mtp_pattern: str = ""
    """A letter for each layer of an MTP depth."""
    mtp_repeated: bool = False
    """All MTP depths have the same layers (`--mtp-use-repeated-layer`)."""

    @property
    def has_mamba(self) -> bool:
        """Whether any layer is a Mamba layer."""
        return "M" in self.pattern + self.mtp_pattern

    @property
    def width(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def state_width(self) -> int:
        """Elements of B, and of C, of all groups."""
        return self.groups * self.state_dim


@dataclass(frozen=True, kw_only=True)
class AssumedVocabulary:
    """Why the number of tokens is unknown, and other sizes that it may have."""

    reason: str
    others: tuple[tuple[int, int], ...]
    """(number of tokens, embedding rows) pairs."""


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """The vision encoder and the projector of a vision-language model, and the images of a sample.

    The sequence of the language model has the text, in which the embeddings of the images replace one token for each image.
    """

    kind: VisionEncoder
    encoder: ModelSpec
    """Sizes of the layers of the encoder."""
    projector: ModelSpec
    """Its `ffn_hidden_size` and `hidden_size` are the widths of the two layers of the projector."""
    projector_input: int
    """Width of what the projector reads: that of the encoder, or four times of it with `pixel_shuffle`."""
    normed_projector: bool = True
    """A norm is fused into the first layer of the projector."""
    affine_projector: bool = False
    """The projector is one linear layer."""
    image_height: int
    image_width: int
    patch: int
    """Height and width of a patch, in pixels."""
    class_tokens: int
    """Learned tokens before those of the patches."""
    drops_class_tokens: bool = False
    """The projector does not get them."""
    pixel_shuffle: bool = False
    """Four neighboring tokens become one of four times the width."""
    tag_tokens: int = 0
    """Tokens of the language model before each tile that say which one it is."""
    tiles: int = 1
    """Parts of the images of a sample, each of which the encoder reads as an image."""
    text_length: int
    """Tokens of a sample in the text, including one for each image."""
    causal_encoder: bool = False
    """Attention of the encoder has a causal mask."""
    recompute: Literal["same", "none", "all"] = "same"
    """Activation recompute of the encoder: as in the language model, none, or of all its layers."""
    separate_fields: bool = False
    """Each field of a batch is sent alone."""
    packed: bool = False
    """The samples of a microbatch are one sequence (`PackedSeqParams` with the format thd)."""

    @property
    def is_radio(self) -> bool:
        """Whether the encoder is RADIO: a linear layer on the pixels of each patch, and interpolated positions."""
        return self.kind in ("radio", "radio-g", "cradio-g")

    @property
    def patches(self) -> int:
        """Patches of a tile."""
        return (self.image_height // self.patch) * (self.image_width // self.patch)

    @property
    def tokens(self) -> int:
        """Tokens of a tile in the encoder."""
        return self.patches + self.class_tokens

    @property
    def projected_tokens(self) -> int:
        """Tokens of a tile that the projector reads."""
        kept = self.patches if self.drops_class_tokens else self.tokens
        return kept // 4 if self.pixel_shuffle else kept


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model of Megatron."""

    num_layers: int
    """Layers of the decoder or encoder; of T5 those of each of the two."""
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key and value heads; equal to num_attention_heads without grouped-query attention."""
    kv_channels: int
    """Elements of one head."""
    vocab_size: int
    """Tokens of the tokenizer, without padding."""
    padded_vocab_size: int
    max_position_embeddings: int
    position_embedding: Literal["learned_absolute", "rope", "none"]
    yarn_positions: int | None = None
    """Positions in the tables of YaRN (`--position-embedding-type yarn`); None for other position embeddings."""
    rotary_percent: float = 1.0
    local_rope: bool = False
    """Layers with a window have rotary positions of their own, with another base: in Gemma 3."""
    rope_fusion: bool = False
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    activation: Activation = "gelu"
    bias_linear: bool = True
    """Biases of the attention projections, fc1 and fc2 (`--disable-bias-linear` turns them off)."""
    bias_qkv: bool = True
    """Bias of the query/key/value projection: `--add-qkv-bias`, or bias_linear."""
    qk_layernorm: bool = False
    norm_modules: NormModules = "engine"
    """The norms before attention and FFN."""
    branch_norms: bool = False
    """The outputs of attention and FFN are normalized before the residual is added: in GLM-4 and Gemma."""
    norms_in_projections: bool = False
    """These norms are parts of the projections to the outputs, whose adapters are added after them: in Gemma."""
    layer_scaling: bool = False
    """The output of each branch is multiplied by a learned vector before the residual is added: in some vision encoders."""
    tied_embeddings: bool = True
    scaled_embedding: bool = False
    """The output of the embedding is multiplied by a number: in Gemma."""
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    bias_activation_fusion: bool = True
    """`--no-bias-gelu-fusion` / `--no-bias-swiglu-fusion` turn it off."""
    fused_squared_relu: bool = False
    """Grouped experts multiply the squared ReLU by the probabilities in one kernel (`--use-fused-weighted-squared-relu`)."""
    bias_dropout_fusion: bool = True
    masked_softmax_fusion: bool = True
    attention_softmax_in_fp32: bool = False
    apply_query_key_layer_scaling: bool = False
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """off-by-one: attention with a sink; learnable: with a learned sink, one parameter for each head."""
    window: tuple[int, int] | None = None
    """Tokens before and after each token that it attends to (`--window-size`)."""
    windowed: tuple[bool, ...] = ()
    """For each decoder layer, and from core 0.16 on each MTP layer after them, whether its attention uses the window.

    Empty without `--window-size`.
    """
    global_heads: GlobalHeads | None = None
    """Set if layers without a window have other heads."""
    window_backend: AttentionBackend | None = None
    """Attention backend of layers with a window, if it differs from attention_backend."""
    activation_clamped: bool = False
    """`--activation-func-clamp-value`."""
    glu_offset: bool = False
    """An offset is added to the linear half of an unfused gated activation, even if it is 0 (from core 0.15 on)."""
    apply_residual_connection_post_layernorm: bool = False
    fp32_residual_connection: bool = False
    implementation: Implementation = "transformer_engine"
    """`legacy`: the layers of the code before core, as in Megatron-LM of August 2023."""
    attention_backend: AttentionBackend = "flash"
    """The kernel that Transformer Engine (in 2023 code `--use-flash-attn`) selects; unfused saves the score matrices."""
    cross_entropy: CrossEntropy = "unfused"
    fp16_lm_cross_entropy: bool = False
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    linear_attention: LinearAttentionSpec | None = None
    sparse_attention: SparseAttentionSpec | None = None
    """Set if multi-latent attention is sparse in every layer."""
    compressed_attention: CompressedAttentionSpec | None = None
    """Set for DeepSeek-V4, whose layers attend to the last tokens and to compressed keys."""
    hyper_connections: HyperConnectionSpec | None = None
    """Set if the residual stream has several parts."""
    plugin: PluginLayers | None = None
    """Set if a plugin builds the attention of some layers, or adds modules to it."""
    output_gate: bool = False
    """The output of attention is multiplied by a gate that the query/key/value projection computes too
    (`--attention-output-gate`). Linear attention has a gate in any case."""
    blocks: tuple[BlockSpec, ...] = ()
    """The branches of each decoder layer, if layers differ by configuration; otherwise empty."""
    hybrid: HybridSpec | None = None
    """Set for a hybrid model, whose `blocks` follow from its pattern."""
    mtp_num_layers: int = 0
    """Number of multi-token prediction (MTP) layers, after the last decoder layer."""
    family: Family = "gpt"
    binary_head: bool = False
    """BERT with token types and a classifier of the order of sentences (`--bert-no-binary-head` turns them off)."""
    decoder_seq_length: int | None = None
    """Tokens of a sample in the decoder of T5. The sequence length of the batch is that of its encoder."""
    vision: VisionSpec | None = None
    """The vision encoder and the projector of a vision-language model. All other fields are those of its language model."""
    vision_weights: tuple[VisionWeight, ...] = ()
    """Weights of a vision part beside a GPT, on the first pipeline stage. Its activations are not counted."""
    frozen: tuple[FrozenPart, ...] = ()
    """Parts whose weights are not trained, in the order of `FROZEN_PARTS`."""
    adapters: AdapterSpec | None = None
    """Adapters, which are trained in place of all other weights."""
    sample_length: int | None = None
    """Tokens of each of the samples that are packed into a sequence, and attend to themselves only; None without packing. A packed
    sample can be as long as the sequence."""
    token_score: bool = False
    """The output is the difference of the logits of two tokens, with which a generative reranker scores samples."""
    distillation: DistillationSpec | None = None
    """The loss compares the logits with those of a teacher; None for a loss of the labels."""
    log_probability_loss: bool = False
    """The loss is computed from log-probabilities in fp32, as in NeMo-RL; otherwise it is a cross entropy of Megatron-LM."""
    loss_sequences: int = 0
    """Packed sequences of a microbatch, of which such a loss is computed one by one; 0 for all tokens at once."""
    head_outputs: int | None = None
    """Outputs of a linear layer in place of the output layer, such as 1 for a reward; 0 for a model that returns its normalized
    hidden states. None for logits of the vocabulary and their cross entropy."""
    value_head: bool = False
    """The linear layer in place of the output layer is one of PyTorch, whose output is converted to fp32: the head of a critic."""
    frozen_parameters: FreezeSpec | None = None
    """Parameters of a GPT that are not trained."""

    @property
    def final_norm(self) -> str:
        """The name of the final norm in the decoder: of `TransformerBlock`, or of the stack of a hybrid model."""
        return "final_layernorm" if self.hybrid is None else "final_norm"

    @property
    def absorbed_attention(self) -> AbsorbedSpec | None:
        """What the sparse attention of core 0.19 adds; None without sparse attention, and in earlier releases."""
        return None if self.sparse_attention is None else self.sparse_attention.absorbed

    @property
    def full_attention(self) -> AttentionKind:
        """The attention of MTP layers, and of decoder layers that are not linear."""
        return "plain" if self.mla is None else "latent"

    def attention_of(self, layer: int) -> AttentionKind:
        """The attention of a decoder layer, counted from 0."""
        if self.compressed_attention is not None:
            return self.compressed_attention.kind_of(layer)
        if self.plugin is not None and self.plugin.layers[layer]:
            return "plugin"
        if self.sparse_attention is not None and not self.sparse_attention.has_indexer(layer):
            return "latent_without_indexer"
        linear = self.linear_attention is not None and self.linear_attention.layers[layer]
        return "gated_delta_net" if linear else self.full_attention

    @property
    def stream_width(self) -> int:
        """Elements of a token in the residual stream."""
        return self.hidden_size * (1 if self.hyper_connections is None else self.hyper_connections.streams)

    @property
    def gated(self) -> bool:
        """Whether fc1 computes a gate and an up-projection, with a total width of 2 · ffn_hidden_size."""
        return self.activation in ("swiglu", "geglu", "quick_geglu")

    @property
    def logits(self) -> int:
        """Outputs of the output layer, or of the linear head in its place."""
        return self.padded_vocab_size if self.head_outputs is None else self.head_outputs

    @property
    def query_projection_size(self) -> int:
        """Width of all queries: num_attention_heads · kv_channels."""
        return self.num_attention_heads * self.kv_channels

    @property
    def gate_projection_size(self) -> int:
        """Width of all gates of attention outputs: that of the queries, or 0 without gates."""
        return self.query_projection_size if self.output_gate else 0

    @property
    def key_value_projection_size(self) -> int:
        """Width of all keys, and of all values: num_query_groups · kv_channels."""
        return self.num_query_groups * self.kv_channels
