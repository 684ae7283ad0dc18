"""Bytes of the cache of keys and values on one rank.

Sources (megatron-core 0.16.1): `Attention._allocate_memory` (core/transformer/attention.py) for the static engine, which has
[tokens, requests, groups, elements] for keys and for values of each layer; `DynamicInferenceContext`
(core/inference/contexts/dynamic_context.py) for blocks; Hugging Face transformers, `StaticSlidingWindowLayer` (cache_utils.py) for
layers with a sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

from analyzer.specs import InferenceJob, InferenceSpec, ModelSpec, QuantizationSpec
from analyzer.units import BLOCK, DTYPE_BYTES, ceil_div, round_up

SCALES_BYTES_4_BIT: Final = 4
"""Bytes of the 16-bit scale and the 16-bit minimum of a group of 4-bit elements."""
SCALE_BYTES_8_BIT: Final = 4
"""Bytes of the fp32 scale of the elements of a head and token in 8 bit."""

TOKEN_MULTIPLE: Final = 64
"""The dynamic engine pads the tokens of a step to a multiple of it."""
REQUEST_MULTIPLE: Final = 4
"""The dynamic engine has rows for a multiple of it, if their number is not given."""


def vectors_of_token(model: ModelSpec, *, tensor: int, latent: bool) -> tuple[tuple[int, int], ...]:
    """(number, elements) of the vectors that one rank caches for a token in one layer.

    Multi-head and grouped attention: keys and values of the groups of the rank, at least one group. Multi-latent attention: one
    compressed vector with the rotated part of the key, on every tensor-parallel rank, or with `latent` False the keys and values of
    the heads of the rank.
    """
    if model.mla is not None:
        if latent:
            return ((1, model.mla.kv_lora_rank + model.mla.qk_pos_emb_head_dim),)
        heads = model.num_attention_heads // tensor
        return (heads, model.mla.query_head_dim), (heads, model.mla.v_head_dim)
    groups = max(1, model.num_query_groups // tensor)
    return ((2 * groups, model.kv_channels),)


def token_bytes(job: InferenceJob) -> float:
    """Bytes of a token in the cache of one layer on one rank, with the scales of a quantized cache."""
    spec = job.inference
    vectors = vectors_of_token(job.model, tensor=job.parallel.tensor, latent=caches_latents(job))
    return sum(number * vector_bytes(elements, spec.quantization, job.precision.parameters) for number, elements in vectors)


def vector_bytes(elements: int, quantization: QuantizationSpec, dtype: str) -> float:
    """Bytes of a cached vector of one head and token."""
    bits = quantization.cache_bits
    if bits == 4:
        return elements / 2 + SCALES_BYTES_4_BIT * ceil_div(elements, quantization.group_size)
    if bits == 8:
        return elements + SCALE_BYTES_8_BIT
    return elements * DTYPE_BYTES[dtype]


def caches_latents(job: InferenceJob) -> bool:
    """Whether the cache has the latents of multi-latent attention."""
    return job.model.mla is not None and job.inference.latent_cache


def has_attention(model: ModelSpec, layer: int) -> bool:
    """Whether a layer, counted from 1, has attention. Its branch may be replaced by configuration."""
    return not model.blocks or model.blocks[layer - 1].attention == "full"


def visible_tokens(job: InferenceJob, layer: int, tokens: int) -> int:
    """Of `tokens` tokens those that the queries of a layer, counted from 1, attend to: the last ones with a sliding window."""
    model = job.model
    if model.window is None or not model.windowed or not model.windowed[layer - 1] or model.window[0] < 0:
        return tokens
    return min(tokens, model.window[0] + 1)


def cached_tokens(job: InferenceJob, layer: int, tokens: int) -> int:
    """Tokens of a request that a layer has memory for, of `tokens` in total."""
    return visible_tokens(job, layer, tokens) if job.inference.cache == "compact" else tokens


def cache_bytes(job: InferenceJob, stages: Sequence[Sequence[int]], rank: int) -> int:
    """Bytes of the cache on a pipeline rank. `stages` has the layers of each pipeline rank, counted from 1."""
    spec, layers = job.inference, stages[rank]
    if spec.cache == "dynamic":
        return block_count(job, stages) * block_bytes(job, layers)
    requests, tokens = allocated_requests(spec), allocated_tokens(spec)
    each = token_bytes(job)
    return sum(ceil(requests * cached_tokens(job, layer, tokens) * each) for layer in layers if has_attention(job.model, layer))


def allocated_requests(spec: InferenceSpec) -> int:
    """Requests that a static cache has memory for."""
    return spec.cache_requests or spec.batch_size


def allocated_tokens(spec: InferenceSpec) -> int:
    """Tokens of a request that a static cache has memory for."""
    return spec.cache_tokens or spec.sequence_length


def longest_request(spec: InferenceSpec) -> int:
    """Tokens of the longest request that the engine is allocated for."""
    return spec.cache_tokens or (spec.dynamic and spec.dynamic.request_tokens) or spec.sequence_length


def block_bytes(job: InferenceJob, layers: Sequence[int]) -> int:
    """Bytes of a block of the dynamic engine: its tokens in all layers of the rank."""
    dynamic = job.inference.dynamic
    assert dynamic is not None
    return ceil(dynamic.block_tokens * token_bytes(job)) * max(1, sum(has_attention(job.model, layer) for layer in layers))


def block_count(job: InferenceJob, stages: Sequence[Sequence[int]]) -> int:
    """Blocks of the dynamic engine, one of them a dummy: at least 2. All pipeline ranks have the same number."""
    dynamic = job.inference.dynamic
    assert dynamic is not None
    return max(2, min(dynamic.buffer_bytes // block_bytes(job, layers) for layers in stages))


def requests_of_blocks(job: InferenceJob, stages: Sequence[Sequence[int]], tokens: int) -> int:
    """Requests of `tokens` tokens that the blocks of the dynamic engine have room for at the same time."""
    dynamic = job.inference.dynamic
    assert dynamic is not None
    requests = min((block_count(job, stages) - 1) // ceil_div(tokens, dynamic.block_tokens), table_requests(job, stages))
    return requests if dynamic.max_requests is None else min(requests, dynamic.max_requests)


def table_requests(job: InferenceJob, stages: Sequence[Sequence[int]]) -> int:
    """Requests that the tables of the dynamic engine have rows for: one for each block but the dummy, unless their number is given.

    Source: `DynamicInferenceContext.__init__` (0.16.1), which rounds down to multiples of the tensor-parallel ranks and of 4.
    """
    dynamic, tensor = job.inference.dynamic, job.parallel.tensor
    assert dynamic is not None
    if dynamic.max_requests is not None and not dynamic.in_static_engine:
        return dynamic.max_requests
    return (block_count(job, stages) - 1) // tensor * tensor // REQUEST_MULTIPLE * REQUEST_MULTIPLE


def request_blocks(spec: InferenceSpec) -> int:
    """Blocks that a request of the dynamic engine can have."""
    assert spec.dynamic is not None
    return ceil_div(spec.dynamic.request_tokens or spec.sequence_length, spec.dynamic.block_tokens)


def table_bytes(job: InferenceJob, stages: Sequence[Sequence[int]]) -> int:
    """Bytes of the tables of the dynamic engine: of its blocks, its requests, and the tokens of a step.

    Sources (0.16.1): `BlockAllocator.__init__`; `MHAMetadata.__init__`, which exists twice, with and without CUDA graphs;
    `DynamicInferenceContext.allocate_all_tensors`; `DynamicInferenceRequest.get_metadata_types`;
    `TextGenerationController._init_dynamic_sampling_tensors`.
    """
    dynamic = job.inference.dynamic
    assert dynamic is not None
    requests = table_requests(job, stages)
    blocks = 4 * requests * request_blocks(job.inference)
    metadata = (4 * requests, 4 * (requests + 1), 4 * (requests + 1), 4 * requests, blocks)
    of_requests = (*[4 * requests] * 7, blocks, *(size * requests for size in (4, 4, 4, 8, 1, 1, 4)), 8 * requests)
    of_tokens = [8 * dynamic.max_tokens] * 6
    return sum(round_up(size, BLOCK) for size in (4 * block_count(job, stages), *metadata, *metadata, *of_requests, *of_tokens))


def padded_tokens(tokens: int) -> int:
    """Tokens of a step of the dynamic engine, which pads them (`DynamicInferenceContext.round_up_tokens`, 0.16.1)."""
    return round_up(tokens, TOKEN_MULTIPLE)


def decode_tokens(job: InferenceJob, stages: Sequence[Sequence[int]]) -> int:
    """Tokens of a decode step of all requests, with those that pad it (`initialize_attention_state`, 0.16.1)."""
    dynamic, requests = job.inference.dynamic, job.inference.batch_size
    if dynamic is None:
        return requests
    if dynamic.in_static_engine:  # it has one size of CUDA graphs, and pads to it
        return max(requests, table_requests(job, stages))
    return max(requests, min(dynamic.max_tokens, table_requests(job, stages), padded_tokens(requests)))
