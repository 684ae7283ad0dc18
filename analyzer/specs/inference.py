"""An inference job: what is generated with a model, and how weights, activations and cache are quantized."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from analyzer.specs.hardware import HardwareSpec
from analyzer.specs.model import AssumedVocabulary, ModelSpec
from analyzer.specs.parallel import ParallelSpec
from analyzer.specs.precision import PrecisionSpec
from analyzer.specs.serving import ServingSpec
from analyzer.specs.software import SoftwareSpec

CacheLayout = Literal["compact", "static", "dynamic"]
"""compact: what the tokens of the requests need, and in layers with a sliding window only the last tokens, as Hugging Face's
`StaticCache` does. static: megatron-core's `StaticInferenceContext`, with all tokens in every layer. dynamic: blocks of
tokens in a buffer of fixed size, megatron-core's `DynamicInferenceContext`."""


@dataclass(frozen=True, kw_only=True)
class QuantizationSpec:
    """Bits of an element of weights, activations and KV cache (`--info-quantize w4a16kv8`): 4, 8 or 16 (32 for fp32)."""

    weight_bits: int = 16
    """Linear layers of attention, MLP and experts. Embeddings, output layer, norms, biases and routers keep their type."""
    activation_bits: int = 16
    """Inputs of the linear layers with quantized weights."""
    cache_bits: int = 16
    """Keys and values in the cache."""
    group_size: int = 64
    """Elements that share a scale and a minimum, of 16 bits each, in 4-bit tensors. 8-bit tensors have one fp32 scale for each
    row of a weight, and one for each head and token of the cache."""


@dataclass(frozen=True, kw_only=True)
class DynamicEngineSpec:
    """Buffers of megatron-core's dynamic inference engine (`--inference-dynamic-batching`)."""

    buffer_bytes: int
    """Memory of the paged cache on a GPU (`--inference-dynamic-batching-buffer-size-gb`)."""
    block_tokens: int = 256
    """Tokens in a block of the cache (`--inference-dynamic-batching-block-size`)."""
    max_requests: int | None = None
    max_tokens: int = 16384
    """Tokens of a step, of prefill and decode together (`--inference-dynamic-batching-max-tokens`)."""
    request_tokens: int | None = None
    """Most tokens of a request (`--inference-max-seq-length`); None for those of a finished request."""
    in_static_engine: bool = False
    """The static engine uses it: it computes the logits of all tokens, and its tables have rows for all blocks."""


@dataclass(frozen=True, kw_only=True)
class InferenceSpec:
    """A batch of requests that are generated together, all of one length."""

    batch_size: int
    """Requests on one replica of the model (one set of tensor- and pipeline-parallel ranks)."""
    prompt_tokens: int
    generated_tokens: int
    quantization: QuantizationSpec = field(default_factory=QuantizationSpec)
    cache: CacheLayout = "compact"
    latent_cache: bool = True
    """Multi-latent attention caches the latents of keys and values, not the keys and values of the heads
    (`--cache-mla-latents`). Megatron's static engine cannot do that."""
    cache_requests: int | None = None
    """Requests that a static cache is allocated for (`--inference-max-requests`); None for batch_size."""
    cache_tokens: int | None = None
    """Tokens of a request that a static cache is allocated for (`--inference-max-seq-length`); None for those of a finished
    request."""
    dynamic: DynamicEngineSpec | None = None
    """Set with the cache layout dynamic."""
    prefill_tokens: int | None = None
    """Most tokens of a step of prefill of a serving engine; None for all prompts."""
    serving: ServingSpec | None = None
    """Set if a serving engine runs the requests. `batch_size` is then the number that one group of ranks runs at the same time."""
    decode_graphs: bool = True
    """Decode steps are replayed as CUDA graphs, so that the host does not delay them."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a finished request: prompt and generated tokens."""
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True, kw_only=True)
class InferenceJob:
    """All inputs of the analysis of one inference launch. No optimizer, no gradients, no recomputation."""

    model: ModelSpec
    parallel: ParallelSpec
    precision: PrecisionSpec
    inference: InferenceSpec
    hardware: HardwareSpec
    megatron: str
    """The release whose behaviour is assumed, such as '0.16.1'."""
    software: SoftwareSpec
    assumptions: tuple[str, ...] = ()
    """Assumptions made while the arguments were read, one sentence each."""
    warnings: tuple[str, ...] = ()
    """The assumptions about options that are given: they are not modelled in full, or have no effect."""
    unknown: tuple[str, ...] = ()
    """What the launch does not say or this program does not know, one sentence each."""
    assumed_vocabulary: AssumedVocabulary | None = None
    """Set if the number of tokens is unknown."""
