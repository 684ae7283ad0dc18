"""Kinds of modules and their facts. Formulas decide by kind. Module names are Megatron's, and only for comparison and output.

A kind cannot be added without its facts. Kernels, workspaces and the sets of kinds at the end of this file are derived from them.
"""

# ruff: noqa: PIE796 (kinds with equal facts are different: their values are numbers)
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final


class Kernels(Enum):
    """The kernels of a kind of module. `analyzer.time.work.of_module` has their formulas."""

    NONE = auto()
    """The module launches none, or those of its children, or its time is neglected."""
    OF_IMAGES = auto()
    """Those for images of which the launch does not tell the size. They are not counted."""
    OF_PLUGINS = auto()
    """Those of attention that a plugin builds. They are not counted."""
    LINEAR = auto()
    FEED_FORWARD = auto()
    """A linear layer, of each local expert in a MoE layer."""
    NORM = auto()
    HEAD_NORM = auto()
    """A norm of each head of queries or keys."""
    EMBEDDING = auto()
    COPIES = auto()
    """Tensors are read and written."""
    RESIDUAL_ADD = auto()
    ACTIVATION = auto()
    PATCHES = auto()
    ADAPTER_PROJECTION = auto()
    ADAPTER_SUM = auto()
    ADAPTER_JOIN = auto()
    ADAPTER_ADD = auto()
    ADAPTER_WEIGHT_NORM = auto()
    ROUTER = auto()
    SHARED_GATE = auto()
    DISPATCH = auto()
    COMBINE = auto()
    ATTENTION = auto()
    OUTPUT_GATE = auto()
    INDEX_PROJECTION = auto()
    INDEX_NORM = auto()
    INDEX_LOSS = auto()
    CHOSEN_ATTENTION = auto()
    ABSORPTION = auto()
    VALUE_PRODUCT = auto()
    COMPRESSED_ATTENTION = auto()
    GROUPED_OUTPUT = auto()
    HYPER_CONNECTION = auto()
    HYPER_ADD = auto()
    LINEAR_ATTENTION_INPUT = auto()
    CONVOLUTION = auto()
    DELTA_RULE_INPUTS = auto()
    DELTA_RULE = auto()
    GATED_NORM = auto()
    MIXER_SCAN = auto()
    MIXER_NORM = auto()
    OUTPUT_LAYER = auto()
    HEAD_PROJECTION = auto()
    FIRST_TOKENS = auto()
    """A linear layer on one token of each sample."""
    LOSS = auto()


class Gemms(Enum):
    """The library that runs the GEMMs of a kind of module, which decides its workspaces (`analyzer.memory.workspaces`)."""

    NONE = auto()
    LAYER = auto()
    """A linear layer of a transformer layer: Transformer Engine, or Megatron's own layers with `--transformer-impl local`."""
    TRANSFORMER_ENGINE = auto()
    """Transformer Engine in every model."""
    MEGATRON = auto()
    """A linear layer of Megatron itself in every model: PyTorch, and the gradient of the weight is added to its buffer."""
    PYTORCH = auto()
    """A product of PyTorch, whose gradient is a tensor of its own."""
    ROUTER = auto()
    """Transformer Engine or PyTorch (`ModuleInputs.router_in_te`)."""
    PATCHES = auto()
    """A linear layer of Megatron in a RADIO encoder, otherwise a convolution."""
    UNFUSED_ATTENTION = auto()
    """PyTorch in unfused attention. Fused kernels have no workspace."""


class Parallel(Enum):
    """How tensor-parallel ranks share the weight of a linear layer."""

    NONE = auto()
    """Each rank has all of it, or it is split in another way."""
    COLUMN = auto()
    """The output is split, and the input is gathered under sequence parallelism."""
    GATHERED = auto()
    """The output is split like that of `COLUMN`, and then gathered, in backward too."""
    ROW = auto()
    """The input is split, and outputs are summed."""


@dataclass(frozen=True, slots=True)
class KindFacts:
    """What every module of a kind has in common."""

    kernels: Kernels
    gemms: Gemms
    parallel: Parallel


def _without_gemms(kernels: Kernels) -> KindFacts:
    return KindFacts(kernels, Gemms.NONE, Parallel.NONE)


_CONTAINER: Final = _without_gemms(Kernels.NONE)
"""Modules that consist of their children."""


class ModuleKind(Enum):
    """The role of a module in a model, with its facts."""

    def __new__(cls, facts: KindFacts) -> ModuleKind:
        del facts
        member = object.__new__(cls)
        member._value_ = len(cls.__members__) + 1
        return member

    def __init__(self, facts: KindFacts) -> None:
        if not isinstance(facts, KindFacts):
            raise TypeError(f"the kind {self.name} has no facts, but {facts!r}")
        self.facts = facts

    __hash__ = object.__hash__  # that of Enum hashes the name at each look-up

    MODEL = _CONTAINER
    BATCH = _without_gemms(Kernels.NONE)
    EMBEDDING = _CONTAINER
    WORD_EMBEDDINGS = _without_gemms(Kernels.EMBEDDING)
    POSITION_EMBEDDINGS = _without_gemms(Kernels.EMBEDDING)
    TOKEN_TYPE_EMBEDDINGS = _without_gemms(Kernels.EMBEDDING)
    PATCHES = KindFacts(Kernels.PATCHES, Gemms.PATCHES, Parallel.NONE)
    """The convolution of a vision encoder, which makes a token of each patch."""
    VISION_POSITIONS = _without_gemms(Kernels.COPIES)
    """Positions of a vision encoder that are interpolated."""
    CLASS_TOKENS = _without_gemms(Kernels.COPIES)
    VISION_WEIGHTS = _without_gemms(Kernels.OF_IMAGES)
    """The weights of a vision part whose activations are not counted."""
    PLUGIN_WEIGHTS = _without_gemms(Kernels.OF_PLUGINS)
    """The weights of attention that a plugin builds, whose activations are not counted."""
    VISION_INPUT = _without_gemms(Kernels.COPIES)
    """The tokens of a vision encoder with positions, as its first layer reads them."""
    VISION_OUTPUT = _without_gemms(Kernels.COPIES)
    """The output of a vision encoder, as the projector reads it."""
    MERGED_INPUT = _without_gemms(Kernels.COPIES)
    """The embeddings of text and images in one sequence."""
    DECODER = _CONTAINER
    LAYER = _CONTAINER
    """A transformer layer, in the decoder, an encoder or multi-token prediction."""
    CHECKPOINT = _CONTAINER
    """Activation checkpointing around layers (full recompute)."""
    ATTENTION = _CONTAINER
    ATTENTION_NORM = _without_gemms(Kernels.NORM)
    QKV = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.COLUMN)
    QK_NORMS = _CONTAINER
    Q_NORM = _without_gemms(Kernels.HEAD_NORM)
    K_NORM = _without_gemms(Kernels.HEAD_NORM)
    Q_PROJECTION = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.COLUMN)
    """In multi-latent attention without query compression."""
    Q_DOWN = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.NONE)
    Q_UP = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.COLUMN)
    KV_DOWN = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.NONE)
    KV_UP = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.COLUMN)
    KV_PROJECTION = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.COLUMN)
    """In cross-attention."""
    ROTATION = _without_gemms(Kernels.NONE)
    """In multi-latent attention: queries, keys and values are rotated and assembled."""
    LINEAR_ATTENTION_INPUT = KindFacts(Kernels.LINEAR_ATTENTION_INPUT, Gemms.LAYER, Parallel.COLUMN)
    """In linear attention: the projection to queries, keys, values, gates and decay."""
    CONVOLUTION = _without_gemms(Kernels.CONVOLUTION)
    DELTA_RULE_INPUTS = _without_gemms(Kernels.DELTA_RULE_INPUTS)
    """In linear attention: queries and keys are normalized and repeated, and gates are computed."""
    DELTA_RULE = _without_gemms(Kernels.DELTA_RULE)
    GATED_NORM = _without_gemms(Kernels.GATED_NORM)
    """The norm of the heads of linear attention, and the product with their gate."""
    ATTENTION_KERNEL = KindFacts(Kernels.ATTENTION, Gemms.UNFUSED_ATTENTION, Parallel.NONE)
    ATTENTION_KERNEL_CHECKPOINT = _CONTAINER
    INDEX_PROJECTION = KindFacts(Kernels.INDEX_PROJECTION, Gemms.LAYER, Parallel.NONE)
    """In sparse attention: a linear layer of the indexer, whose products choose the keys of each query."""
    INDEX_NORM = _without_gemms(Kernels.INDEX_NORM)
    """In sparse attention: the norm of the keys of the indexer, and its rotation."""
    INDEX_LOSS = KindFacts(Kernels.INDEX_LOSS, Gemms.PYTORCH, Parallel.NONE)
    """In sparse attention: the choice of keys, and the loss of the indexer."""
    CHOSEN_ATTENTION = KindFacts(Kernels.CHOSEN_ATTENTION, Gemms.PYTORCH, Parallel.NONE)
    """In sparse attention: attention of each query to the chosen keys."""
    ABSORPTION = KindFacts(Kernels.ABSORPTION, Gemms.PYTORCH, Parallel.COLUMN)
    """In absorbed attention: the products of queries with the weights of keys, and their rotation."""
    VALUE_PRODUCT = KindFacts(Kernels.VALUE_PRODUCT, Gemms.PYTORCH, Parallel.NONE)
    """In absorbed attention: the products of the output with the weights of values."""
    COMPRESSED_ATTENTION = _without_gemms(Kernels.COMPRESSED_ATTENTION)
    """Attention of each query to the last tokens and to compressed keys, with the choice of these."""
    KEY_COPIES = _without_gemms(Kernels.COPIES)
    """In compressed attention: the norm and rotation of queries, or the sums of keys of a group of tokens."""
    GROUPED_OUTPUT = KindFacts(Kernels.GROUPED_OUTPUT, Gemms.PYTORCH, Parallel.NONE)
    """In compressed attention: the projection of the outputs of each group of heads."""
    HYPER_CONNECTION = _without_gemms(Kernels.HYPER_CONNECTION)
    """The weights of the parts of the residual stream, and the sum of these that a branch reads."""
    HYPER_ADD = _without_gemms(Kernels.HYPER_ADD)
    """The mix of the parts of the residual stream, with the output of a branch."""
    STREAM_COPIES = _without_gemms(Kernels.COPIES)
    """The parts of the residual stream are made from the embedding, or summed for the final norm."""
    OUTPUT_GATE = _without_gemms(Kernels.OUTPUT_GATE)
    """The product of the output of full attention with its gate."""
    ATTENTION_OUTPUT = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.ROW)
    ATTENTION_ADD = _without_gemms(Kernels.RESIDUAL_ADD)
    """Bias add, dropout and residual add after attention."""
    FEED_FORWARD = _CONTAINER
    """A dense FFN or a MoE layer."""
    FEED_FORWARD_NORM = _without_gemms(Kernels.NORM)
    FC1 = KindFacts(Kernels.FEED_FORWARD, Gemms.LAYER, Parallel.COLUMN)
    ACTIVATION = _without_gemms(Kernels.ACTIVATION)
    FC2 = KindFacts(Kernels.FEED_FORWARD, Gemms.LAYER, Parallel.ROW)
    FEED_FORWARD_ADD = _without_gemms(Kernels.RESIDUAL_ADD)
    MIXER = _CONTAINER
    """A Mamba mixer in place of attention."""
    MIXER_IN = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.COLUMN)
    MIXER_SCAN = _without_gemms(Kernels.MIXER_SCAN)
    """Convolution and scan of a Mamba mixer."""
    MIXER_NORM = _without_gemms(Kernels.MIXER_NORM)
    MIXER_OUT = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.ROW)
    ADAPTER = _CONTAINER
    """A low-rank adapter beside a frozen linear layer."""
    ADAPTER_DROPOUT = _without_gemms(Kernels.COPIES)
    ADAPTER_IN = KindFacts(Kernels.ADAPTER_PROJECTION, Gemms.MEGATRON, Parallel.NONE)
    """The projection of an adapter to its rank."""
    ADAPTER_REGATHERED_IN = KindFacts(Kernels.ADAPTER_PROJECTION, Gemms.MEGATRON, Parallel.NONE)
    """The same, which keeps the part of the sequence on its rank and gathers it in forward and backward."""
    ADAPTER_OUT = KindFacts(Kernels.ADAPTER_PROJECTION, Gemms.MEGATRON, Parallel.NONE)
    ADAPTER_ENGINE_IN = KindFacts(Kernels.ADAPTER_PROJECTION, Gemms.TRANSFORMER_ENGINE, Parallel.NONE)
    """The same with layers of Transformer Engine."""
    ADAPTER_ENGINE_OUT = KindFacts(Kernels.ADAPTER_PROJECTION, Gemms.TRANSFORMER_ENGINE, Parallel.NONE)
    ADAPTER_EXPERTS_IN = _without_gemms(Kernels.ADAPTER_PROJECTION)
    """The same of each expert, with the grouped GEMM of PyTorch, which has no workspace of a handle."""
    ADAPTER_EXPERTS_OUT = _without_gemms(Kernels.ADAPTER_PROJECTION)
    ADAPTER_ROWS = _without_gemms(Kernels.COPIES)
    """The rows of all experts are concatenated for it."""
    ADAPTER_SUM = _without_gemms(Kernels.ADAPTER_SUM)
    """The outputs of a linear layer and of its adapter are added."""
    ADAPTER_SCALE = _without_gemms(Kernels.COPIES)
    """The output of an adapter times a constant."""
    ADAPTER_JOIN = _without_gemms(Kernels.ADAPTER_JOIN)
    """Outputs of adapters of parts of a layer are concatenated."""
    ADAPTER_ADD = _without_gemms(Kernels.ADAPTER_ADD)
    """The same are added to the output of the layer."""
    ADAPTER_WEIGHT_NORM = KindFacts(Kernels.ADAPTER_WEIGHT_NORM, Gemms.PYTORCH, Parallel.NONE)
    """The norm of each row of a weight with its adapter."""
    ADAPTER_PRODUCT = _without_gemms(Kernels.COPIES)
    """Both outputs times the magnitude."""
    REPLACED_BRANCH = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.COLUMN)
    """One linear layer in place of attention or the FFN."""
    ROUTER = KindFacts(Kernels.ROUTER, Gemms.ROUTER, Parallel.NONE)
    MOE_LATENT_DOWN = KindFacts(Kernels.LINEAR, Gemms.TRANSFORMER_ENGINE, Parallel.NONE)
    """The projection of tokens to the latent size of a MoE layer."""
    MOE_LATENT_UP = KindFacts(Kernels.LINEAR, Gemms.TRANSFORMER_ENGINE, Parallel.NONE)
    DISPATCH = _without_gemms(Kernels.DISPATCH)
    COMBINE = _without_gemms(Kernels.COMBINE)
    EXPERTS = _CONTAINER
    SHARED_EXPERTS = _CONTAINER
    SHARED_GATE = KindFacts(Kernels.SHARED_GATE, Gemms.PYTORCH, Parallel.NONE)
    """The score of each token that the output of the shared experts is multiplied by."""
    WEIGHT_GRADIENT = _without_gemms(Kernels.NONE)
    """A delayed weight gradient, which the backward of a layer computes after that of the module of the weight."""
    FINAL_NORM = _without_gemms(Kernels.NORM)
    NORM = _without_gemms(Kernels.NORM)
    """Another norm of hidden states: in multi-token prediction, in the head of BERT, before and after a vision encoder."""
    OUTPUT_LAYER = KindFacts(Kernels.OUTPUT_LAYER, Gemms.MEGATRON, Parallel.COLUMN)
    SAMPLE_HEAD = KindFacts(Kernels.ADAPTER_PROJECTION, Gemms.TRANSFORMER_ENGINE, Parallel.NONE)
    """A linear layer with few outputs in place of the output layer."""
    VALUE_HEAD = KindFacts(Kernels.ADAPTER_PROJECTION, Gemms.PYTORCH, Parallel.NONE)
    """The same of PyTorch, for the values of a critic."""
    NORMALIZED_OUTPUT = _without_gemms(Kernels.COPIES)
    """Hidden states that are divided by their length, in place of the output layer."""
    TOKEN_SCORE = _without_gemms(Kernels.COPIES)
    """The difference of the logits of two tokens, in place of the loss."""
    HEAD_PROJECTION = KindFacts(Kernels.HEAD_PROJECTION, Gemms.PYTORCH, Parallel.NONE)
    """The linear layer of BERT before its output layer."""
    POOLER = KindFacts(Kernels.FIRST_TOKENS, Gemms.PYTORCH, Parallel.NONE)
    """BERT: a linear layer on the first token of each sample."""
    BINARY_HEAD = KindFacts(Kernels.FIRST_TOKENS, Gemms.PYTORCH, Parallel.NONE)
    """BERT: the classifier of the order of sentences, on the output of the pooler."""
    LOSS = _without_gemms(Kernels.LOSS)
    MTP = _CONTAINER
    MTP_DEPTH = _CONTAINER
    MTP_PROJECTION = KindFacts(Kernels.LINEAR, Gemms.LAYER, Parallel.GATHERED)
    OTHER = _without_gemms(Kernels.NONE)
    """A function or a group of modules. It has no parameters."""


def kinds_with(*gemms: Gemms) -> frozenset[ModuleKind]:
    """Kinds whose GEMMs are those of one of these libraries."""
    return frozenset(kind for kind in ModuleKind if kind.facts.gemms in gemms)


LINEAR: Final = kinds_with(Gemms.LAYER)
"""Linear layers of transformer layers."""
MOE_LATENT_PROJECTIONS: Final = frozenset({ModuleKind.MOE_LATENT_DOWN, ModuleKind.MOE_LATENT_UP})
"""Projections to and from the latent size of a MoE layer."""
LATENT_PROJECTIONS: Final = frozenset(
    {ModuleKind.Q_PROJECTION, ModuleKind.Q_DOWN, ModuleKind.Q_UP, ModuleKind.KV_DOWN, ModuleKind.KV_UP}
)
"""Projections of multi-latent attention."""
ADAPTER_INPUTS: Final = frozenset(
    {
        ModuleKind.ADAPTER_IN,
        ModuleKind.ADAPTER_REGATHERED_IN,
        ModuleKind.ADAPTER_ENGINE_IN,
        ModuleKind.ADAPTER_EXPERTS_IN,
    }
)
"""First projections of adapters, which have the input of a layer."""
ADAPTER_PROJECTIONS: Final = ADAPTER_INPUTS | {
    ModuleKind.ADAPTER_OUT,
    ModuleKind.ADAPTER_ENGINE_OUT,
    ModuleKind.ADAPTER_EXPERTS_OUT,
}
"""Linear layers of adapters."""
ATTENTION_BRANCH: Final = frozenset({ModuleKind.ATTENTION_NORM, ModuleKind.ATTENTION, ModuleKind.MIXER, ModuleKind.ATTENTION_ADD})
FEED_FORWARD_BRANCH: Final = frozenset({ModuleKind.FEED_FORWARD_NORM, ModuleKind.FEED_FORWARD, ModuleKind.FEED_FORWARD_ADD})
RESIDUAL_ADDS: Final = frozenset({ModuleKind.ATTENTION_ADD, ModuleKind.FEED_FORWARD_ADD})
BRANCH_ENDS: Final = RESIDUAL_ADDS | {ModuleKind.HYPER_ADD}
"""Modules that add the output of a branch to the residual stream, or to all parts of it."""
