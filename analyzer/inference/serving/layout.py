"""The layout of a model on the GPUs of an engine, and its quantization, as the kernels of a step see them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from analyzer.inference.kv_cache import visible_tokens
from analyzer.specs import InferenceJob, ModelSpec, QuantizationSpec

BLOCK_GROUP: Final = 128
"""`--info-quantize w8a8g128`: fp8 with a scale for each block of 128 elements."""


@dataclass(frozen=True, kw_only=True)
class ServingLayout:
    """One replica of the model: `tensor` ranks share the attention of a token; `attention_data` groups of them have other requests.

    All of them together have the experts: `expert` groups of `expert_tensor` ranks.
    """

    model: ModelSpec
    tensor: int
    attention_data: int
    expert: int
    expert_tensor: int
    linear_kind: str
    """The kind of the linear layers of dense MLPs and shared experts (`floors.WEIGHT_BYTES`)."""
    attention_kind: str
    """That of the projections of attention."""
    expert_kind: str
    cache_bits: str
    layers: tuple[tuple[bool, int | None, int], ...]
    """(has experts, tokens of its window or None, number) of the different layers."""

    @property
    def ranks(self) -> int:
        """GPUs of a replica."""
        return self.tensor * self.attention_data


def kind_of(quantization: QuantizationSpec) -> str:
    """The kind of the quantized linear layers."""
    weights, inputs = quantization.weight_bits, quantization.activation_bits
    if weights == 16:
        return "16"
    if weights == 4:
        return "4" if inputs == 4 else "w4"
    return "8b" if quantization.group_size == BLOCK_GROUP else "8"


def _expert_kind(job: InferenceJob, kind: str) -> str:
    """The kind of the experts. Those of gpt-oss are in MXFP4, which Blackwell GPUs multiply by activations in 8 bit."""
    if kind == "w4" and job.model.moe is not None and job.model.softmax_type == "learnable":
        return "w4a8" if job.inference.quantization.activation_bits == 8 else "w4m"
    return kind


def layout_of(job: InferenceJob) -> ServingLayout:
    """The layout of a job.

    4-bit checkpoints of models with experts keep the projections of attention in 16 bit, and those with 16-bit activations all
    linear layers but the experts: DeepSeek, Kimi and MiniMax in NVFP4, Kimi in int4, gpt-oss in MXFP4.
    """
    model, parallel = job.model, job.parallel
    kind = kind_of(job.inference.quantization)
    linear = attention = kind
    if model.moe is not None and job.inference.quantization.weight_bits == 4:
        attention = "16"
        linear = "16" if kind == "w4" else kind
    width = parallel.expert * parallel.expert_tensor if model.moe is not None else parallel.tensor
    layers: Counter[tuple[bool, int | None]] = Counter()
    far = 2**40
    for layer in range(1, model.num_layers + 1):
        seen = visible_tokens(job, layer, far)
        layers[model.moe is not None and model.moe.layers[layer - 1], None if seen == far else seen] += 1
    return ServingLayout(
        model=model,
        tensor=parallel.tensor,
        attention_data=max(1, width // parallel.tensor),
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor if model.moe is not None else parallel.tensor,
        linear_kind=linear,
        attention_kind=attention,
        expert_kind=_expert_kind(job, kind),
        cache_bits="8" if job.inference.quantization.cache_bits <= 8 else "16",
        layers=tuple((moe, window, number) for (moe, window), number in layers.items()),
    )
