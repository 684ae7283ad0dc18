"""Kinds of modules. Formulas decide by kind. Module names are Megatron's and are used for comparison and output only."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class ModuleKind(Enum):
    """The role of a module in a model."""

    MODEL = auto()
    BATCH = auto()
    EMBEDDING = auto()
    WORD_EMBEDDINGS = auto()
    POSITION_EMBEDDINGS = auto()
    TOKEN_TYPE_EMBEDDINGS = auto()
    PATCHES = auto()
    """The convolution of a vision encoder, which makes a token of each patch."""
    VISION_POSITIONS = auto()
    """Positions of a vision encoder that are interpolated."""
    CLASS_TOKENS = auto()
    VISION_INPUT = auto()
    """The tokens of a vision encoder with positions, as its first layer reads them."""
    VISION_OUTPUT = auto()
    """The output of a vision encoder, as the projector reads it."""
    MERGED_INPUT = auto()
    """The embeddings of text and images in one sequence."""
    DECODER = auto()
    LAYER = auto()
    """A transformer layer, in the decoder, an encoder or multi-token prediction."""
    CHECKPOINT = auto()
    """Activation checkpointing around layers (full recompute)."""
    ATTENTION = auto()
    ATTENTION_NORM = auto()
    QKV = auto()
    QK_NORMS = auto()
    Q_NORM = auto()
    K_NORM = auto()
    Q_PROJECTION = auto()
    """In multi-latent attention without query compression."""
    Q_DOWN = auto()
    Q_UP = auto()
    KV_DOWN = auto()
    KV_UP = auto()
    KV_PROJECTION = auto()
    """In cross-attention."""
    ROTATION = auto()
    """In multi-latent attention: queries, keys and values are rotated and assembled."""
    LINEAR_ATTENTION_INPUT = auto()
    """In linear attention: the projection to queries, keys, values, gates and decay."""
    CONVOLUTION = auto()
    DELTA_RULE_INPUTS = auto()
    """In linear attention: queries and keys are normalized and repeated, and gates are computed."""
    DELTA_RULE = auto()
    GATED_NORM = auto()
    """The norm of the heads of linear attention, and the product with their gate."""
    ATTENTION_KERNEL = auto()
    ATTENTION_KERNEL_CHECKPOINT = auto()
    INDEX_PROJECTION = auto()
    """In sparse attention: a linear layer of the indexer, whose products choose the keys of each query."""
    INDEX_NORM = auto()
    """In sparse attention: the norm of the keys of the indexer, and its rotation."""
    INDEX_LOSS = auto()
    """In sparse attention: the choice of keys, and the loss of the indexer."""
    CHOSEN_ATTENTION = auto()
    """In sparse attention: attention of each query to the chosen keys."""
    OUTPUT_GATE = auto()
    """The product of the output of full attention with its gate."""
    ATTENTION_OUTPUT = auto()
    ATTENTION_ADD = auto()
    """Bias add, dropout and residual add after attention."""
    FEED_FORWARD = auto()
    """A dense FFN or a MoE layer."""
    FEED_FORWARD_NORM = auto()
    FC1 = auto()
    ACTIVATION = auto()
    FC2 = auto()
    FEED_FORWARD_ADD = auto()
    MIXER = auto()
    """A Mamba mixer in place of attention."""
    MIXER_IN = auto()
    MIXER_SCAN = auto()
    """Convolution and scan of a Mamba mixer."""
    MIXER_NORM = auto()
    MIXER_OUT = auto()
    ADAPTER = auto()
    """A low-rank adapter beside a frozen linear layer."""
    ADAPTER_DROPOUT = auto()
    ADAPTER_IN = auto()
    """The projection of an adapter to its rank."""
    ADAPTER_OUT = auto()
    ADAPTER_SUM = auto()
    """The outputs of a linear layer and of its adapter are added."""
    REPLACED_BRANCH = auto()
    """One linear layer in place of attention or the FFN."""
    ROUTER = auto()
    MOE_LATENT_DOWN = auto()
    """The projection of tokens to the latent size of a MoE layer."""
    MOE_LATENT_UP = auto()
    DISPATCH = auto()
    COMBINE = auto()
    EXPERTS = auto()
    SHARED_EXPERTS = auto()
    SHARED_GATE = auto()
    """The score of each token that the output of the shared experts is multiplied by."""
    WEIGHT_GRADIENT = auto()
    """A delayed weight gradient, which the backward of a layer computes after that of the module of the weight."""
    FINAL_NORM = auto()
    OUTPUT_LAYER = auto()
    HEAD_PROJECTION = auto()
    """The linear layer of BERT before its output layer."""
    POOLER = auto()
    """BERT: a linear layer on the first token of each sample."""
    BINARY_HEAD = auto()
    """BERT: the classifier of the order of sentences, on the output of the pooler."""
    LOSS = auto()
    MTP = auto()
    MTP_DEPTH = auto()
    MTP_PROJECTION = auto()
    OTHER = auto()


MOE_LATENT_PROJECTIONS: Final = frozenset({ModuleKind.MOE_LATENT_DOWN, ModuleKind.MOE_LATENT_UP})
"""Projections to and from the latent size of a MoE layer. They are linear layers of Transformer Engine in every model."""
LATENT_PROJECTIONS: Final = frozenset(
    {ModuleKind.Q_PROJECTION, ModuleKind.Q_DOWN, ModuleKind.Q_UP, ModuleKind.KV_DOWN, ModuleKind.KV_UP}
)
"""Projections of multi-latent attention."""
LINEAR: Final = frozenset(
    {
        ModuleKind.QKV,
        *LATENT_PROJECTIONS,
        ModuleKind.LINEAR_ATTENTION_INPUT,
        ModuleKind.INDEX_PROJECTION,
        ModuleKind.KV_PROJECTION,
        ModuleKind.ATTENTION_OUTPUT,
        ModuleKind.MIXER_IN,
        ModuleKind.MIXER_OUT,
        ModuleKind.FC1,
        ModuleKind.FC2,
        ModuleKind.MTP_PROJECTION,
    }
)
"""Linear layers of transformer layers."""
ADAPTER_PROJECTIONS: Final = frozenset({ModuleKind.ADAPTER_IN, ModuleKind.ADAPTER_OUT})
"""Linear layers of adapters, which are those of Megatron itself in every model."""
BERT_HEADS: Final = frozenset({ModuleKind.HEAD_PROJECTION, ModuleKind.POOLER, ModuleKind.BINARY_HEAD})
"""Linear layers of PyTorch in the head of BERT."""
ATTENTION_BRANCH: Final = frozenset({ModuleKind.ATTENTION_NORM, ModuleKind.ATTENTION, ModuleKind.MIXER, ModuleKind.ATTENTION_ADD})
FEED_FORWARD_BRANCH: Final = frozenset({ModuleKind.FEED_FORWARD_NORM, ModuleKind.FEED_FORWARD, ModuleKind.FEED_FORWARD_ADD})
RESIDUAL_ADDS: Final = frozenset({ModuleKind.ATTENTION_ADD, ModuleKind.FEED_FORWARD_ADD})
