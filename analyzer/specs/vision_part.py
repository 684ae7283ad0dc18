"""The parts for images and sound beside a language model that a framework trains: their weights, and what of them is trained.

Their activations depend on the images and sounds of the data. Those of images have an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from analyzer.specs.attention import CompressedModel, GlobalHeads, PluginLayers

VisionHolder = Literal["ms-swift", "Megatron-Bridge", "mbridge", "ROLL"]
"""The library that builds the vision part beside the language model."""
NEMOTRON: Final = ("NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3")
"""The model_type of models with RADIO and a hybrid language model; the last two can have a part for sound."""
VISION_TYPES: Final = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("glm4v", "glm4v_moe", "internvl", "internvl_chat", "qwen2_5_omni", "qwen3_omni_moe", "gemma3", "gemma4"),
    *NEMOTRON,
)
"""The model_type of the configurations whose parts for images and sound are read."""
ONE_POSITION: Final = frozenset({"internvl", "internvl_chat", "gemma3", "gemma4", "mistral3", "kimi_k25", *NEMOTRON})
"""Types whose language model has one position of a token; the others have three, for time, height and width."""
Part = Literal["vision", "sound"]
"""What a part reads. Its encoder and its projection are sections of their own, such as sound_model and sound_projection."""
SECTIONS: Final = ("vision_model", "vision_projection", "sound_model", "sound_projection")
"""The sections beside the language model."""


@dataclass(frozen=True, kw_only=True)
class VisionWeight:
    """Equal weights of a part for images or sound."""

    name: str
    """The name in the module of transformers, with `*` for the number of a layer."""
    shape: tuple[int, ...]
    """Without parallelism."""
    copies: int = 1
    """Layers that have it."""
    split: int | None = None
    """The dimension that tensor-parallel ranks share in a module of Megatron; None if each has all of it."""
    frozen: bool = False
    part: Part = "vision"
    linear: bool = False
    """Whether it is the weight of a linear layer, which can have an adapter."""
    adapter: bool = False
    """Whether it belongs to an adapter, and not to the model."""

    @property
    def numel(self) -> int:
        """Elements of all layers, without parallelism."""
        return self.copies * prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class VisionWeights:
    """All weights of the parts of a model for images and sound."""

    model: str
    """The model, for messages."""
    model_type: str
    """That of its configuration."""
    weights: tuple[VisionWeight, ...]
    """None if the part is not read."""
    projection: tuple[str, ...]
    """The beginnings of the names of the weights of the projections."""

    @property
    def numel(self) -> int:
        """Elements of all weights."""
        return sum(each.numel for each in self.weights)

    @property
    def described(self) -> str:
        """What is beside the language model, for messages."""
        return "vision and sound part" if self._hears else "vision part"

    @property
    def inputs(self) -> str:
        """What it reads."""
        return "images and sounds" if self._hears else "images"

    @property
    def _hears(self) -> bool:
        return any(each.part == "sound" for each in self.weights)

    def section(self, weight: VisionWeight) -> str:
        """The section of one of the weights."""
        return f"{weight.part}_{'projection' if weight.name.startswith(self.projection) else 'model'}"


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """The images of a launch, whose memory has an upper bound."""

    tokens: int
    """The most tokens of a sequence that are those of images."""
    patches_per_token: int
    """Patches that the encoder reads for each of them, at most."""
    masked: bool
    """Whether attention reads a mask of all pairs of patches."""
    projection: tuple[str, ...]
    """The beginnings of the names of the weights of the projection."""
    model: str
    """The model, for messages."""


Variant = Literal["GLM-4", "Gemma", "Gemma 2", "Gemma 3", "Gemma 3 with images", "Gemma 4", "EXAONE 4"]
"""Models with modules that Megatron-LM does not have, and libraries add to it."""


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """What the options of Megatron-LM do not say of a model that is given by its Hugging Face configuration."""

    vision: VisionWeights | None = None
    """The weights of its parts for images and sound; None if it has none, or its configuration is not read."""
    variant: Variant | None = None
    """The model whose modules it has; None for a model of Megatron-LM."""
    plugin: PluginLayers | None = None
    """The weights of a plugin in its attention, if they are known."""
    global_heads: GlobalHeads | None = None
    """The heads of layers without a window, if they differ from those with one."""
    compressed: CompressedModel | None = None
    """Attention and residual stream of DeepSeek-V4; None for other models."""
    builder: str = ""
    """The library or framework that builds the model; empty if a fork of Megatron-LM does, or none is named."""

    fp8_attention: bool = False
    """Whether core attention runs in FP8 (`fp8_dot_product_attention` of TransformerConfig)."""
    fp8_weights: bool = False
    """Whether weights are stored in FP8 without the distributed optimizer, which Megatron-LM's own script refuses (`fp8_param`)."""

    fp8_transposes_freed: bool = False
    """Whether transposed copies of weights in FP8 are not kept (`no_fp8_weight_transpose_cache` of Primus)."""

    def joined(self, other: ModelParts) -> ModelParts:
        """These, with what `other` has and these lack."""
        return ModelParts(
            vision=self.vision or other.vision,
            variant=self.variant or other.variant,
            plugin=self.plugin or other.plugin,
            global_heads=self.global_heads or other.global_heads,
            compressed=self.compressed or other.compressed,
            builder=self.builder or other.builder,
            fp8_attention=self.fp8_attention or other.fp8_attention,
            fp8_weights=self.fp8_weights or other.fp8_weights,
            fp8_transposes_freed=self.fp8_transposes_freed or other.fp8_transposes_freed,
        )


NO_PARTS: Final = ModelParts()


@dataclass(frozen=True, kw_only=True)
class VisionTraining:
    """How a launch holds and trains the parts of its model for images and sound, if it has some."""

    holder: VisionHolder
    frozen: tuple[tuple[str, bool, str], ...] = ()
    """What the launch says of `SECTIONS` and language_model: the name, whether it is frozen, and the setting. The defaults of the
    holder hold for the others."""
    adapted: tuple[str, ...] = ()
    """The sections in which all linear layers have adapters, if the launch asks for all linear layers."""
    trained_beside_adapters: bool = False
    """Whether adapters of the language model leave the weights of the other sections as trained as without them."""
    image_tokens: int | None = None
    """The most tokens of a sequence that are those of images; None if the launch does not tell."""
    uncounted: tuple[str, ...] = ()
    """Why more of it is trained than is counted, a fragment of a sentence each."""
