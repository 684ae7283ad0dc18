"""Memory of the ranks of an inference job, and what fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from analyzer.inference.activations import step_bytes, step_tokens
from analyzer.inference.forward_job import forward_job
from analyzer.inference.kv_cache import cache_bytes, decode_tokens, longest_request, requests_of_blocks, table_bytes
from analyzer.inference.results import Limits, StageMemory
from analyzer.inference.weights import largest_dequantized, weights_by_type
from analyzer.layout.groups import pipeline_rank_ranges
from analyzer.memory.device_overhead import outside_allocator_bytes, reserved_bytes
from analyzer.memory.workspaces import workspaces
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import parameters
from analyzer.passes.stages import stage_models
from analyzer.results import MemoryPart, Verdict
from analyzer.specs import InferenceJob, TrainingJob
from analyzer.units import BLOCK, round_up

MOST_REQUESTS: Final = 2**16
"""Largest batch that is looked for."""
MOST_TOKENS: Final = 2**24
"""Longest sequence that is looked for."""
TABLES: Final = "tables of the dynamic engine"


def stage_memories(job: InferenceJob) -> tuple[StageMemory, ...]:
    """The memory of every pipeline rank."""
    spec = job.inference
    requests, tokens = step_tokens(job, requests=spec.batch_size, tokens=spec.prompt_tokens)
    prefill = forward_job(job, requests=requests, tokens=tokens)
    stages = stage_models(prefill)
    layers = stage_layers(stages)
    decode = forward_job(job, requests=decode_tokens(job, layers), tokens=1)
    tables = 0 if spec.dynamic is None else table_bytes(job, layers)
    return tuple(
        _stage_memory(job, prefill, decode, (before, after), cache=cache_bytes(job, layers, before.pipeline_rank), tables=tables)
        for before, after in zip(stages, stage_models(decode), strict=True)
    )


def stage_layers(stages: Sequence[StageModel]) -> tuple[tuple[int, ...], ...]:
    """The decoder layers of each pipeline rank, counted from 1."""
    return tuple(tuple(layer for chunk in stage.chunks for layer in chunk.layers) for stage in stages)


def _stage_memory(
    job: InferenceJob, prefill: TrainingJob, decode: TrainingJob, trees: tuple[StageModel, StageModel], *, cache: int, tables: int
) -> StageMemory:
    """The memory of a stage with the `trees` of its prefill and its decode. `tables`: bytes of those of the dynamic engine."""
    spec, (before, after) = job.inference, trees
    quantization = spec.quantization
    weights: dict[str, int] = {}
    for tree in before.trees:
        for dtype, size in weights_by_type(tree, quantization).items():
            weights[dtype] = weights.get(dtype, 0) + size
    batch = prefill.batch
    dequantized = max(largest_dequantized(tree, quantization) for tree in before.trees)
    rows = batch.micro_batch_size * batch.seq_length
    prefill_bytes = step_bytes(job, before, rows=rows, decode=False, other=dequantized)
    decode_bytes = step_bytes(job, after, rows=decode.batch.micro_batch_size, decode=True)
    longest = forward_job(job, requests=1, tokens=longest_request(spec))  # tables of positions have all of them
    kept = tuple(
        MemoryPart(name=each.name, bytes=each.bytes) for each in workspaces(longest, before.trees) if each.phase == "forward"
    )
    if tables:
        kept = (*kept, MemoryPart(name=TABLES, bytes=tables))
    graphs = decode_bytes if spec.decode_graphs else 0
    temporary = max(prefill_bytes, 0 if graphs else decode_bytes)
    peak = sum(round_up(size, BLOCK) for size in (*weights.values(), cache, temporary, graphs)) + sum(each.bytes for each in kept)
    device = reserved_bytes(peak, 0) + outside_allocator_bytes(prefill, training=False)
    return StageMemory(
        pipeline_rank=before.pipeline_rank,
        ranks=pipeline_rank_ranges(job.parallel, before.pipeline_rank),
        layers=tuple(layer for chunk in before.chunks for layer in chunk.layers),
        parameters=sum(each.numel for tree in before.trees for each in parameters(tree)),
        weights_by_type=weights,
        kv_cache_bytes=cache,
        workspaces=kept,
        prefill_bytes=prefill_bytes,
        decode_bytes=decode_bytes,
        graph_pool_bytes=graphs,
        peak_bytes=peak,
        device_bytes=device,
        device_range_bytes=(device, device),
    )


def device_bytes(job: InferenceJob) -> int:
    """Device memory of the highest-memory rank."""
    return max(each.device_bytes for each in stage_memories(job))


def verdict_of(job: InferenceJob, stages: Sequence[StageMemory], *, note: str) -> Verdict:
    """Whether every rank fits.

    It is tight if less than the margin of the GPU remains free, or if the capacity is within the range of the highest-memory rank.
    """
    highest = max(stages, key=lambda each: (each.device_bytes, -each.pipeline_rank))
    capacity = job.hardware.capacity_bytes
    headroom = None if capacity is None else capacity - highest.device_bytes
    state = None if capacity is None else _state(stages, capacity, job.hardware.margin_bytes)
    return Verdict(
        fits=None if headroom is None else headroom >= 0,
        state=state,  # type: ignore[arg-type]
        gpu=job.hardware.name,
        capacity_bytes=capacity,
        tightest_rank=highest.ranks[0][0],
        headroom_bytes=headroom,
        margin_bytes=None if capacity is None else job.hardware.margin_bytes,
        note=note,
    )


def estimated_range(stages: Sequence[StageMemory]) -> tuple[int, int]:
    """The lowest and the highest device memory that the highest-memory rank may need, in bytes."""
    least, most = (max(stage.device_range_bytes[end] for stage in stages) for end in (0, 1))
    return least, most


def _state(stages: Sequence[StageMemory], capacity: int, margin: int) -> str:
    least, most = estimated_range(stages)
    if least > capacity:
        return "does not fit"
    needed = max(stage.device_bytes for stage in stages)
    return "tight" if most > capacity or capacity - needed < margin else "fits"


def limits_of(job: InferenceJob) -> Limits | None:
    """The largest batch and the longest sequence that fit. None if the capacity of the GPU is not known."""
    capacity = job.hardware.capacity_bytes
    if capacity is None:
        return None

    def length_fits(tokens: int) -> bool:
        changed = with_length(job, tokens)
        return device_bytes(changed) <= capacity and _has_blocks(changed)

    shortest = job.inference.generated_tokens + 1
    longest = job.model.max_position_embeddings if job.model.position_embedding == "learned_absolute" else MOST_TOKENS
    return Limits(
        batch_size=largest_batch(job),
        sequence_length=_largest(length_fits, start=shortest, most=longest),
    )


def largest_batch(job: InferenceJob) -> int:
    """The largest batch that fits the memory of the GPU, which is known; 0 if none fits."""
    capacity = job.hardware.capacity_bytes or 0

    def fits(size: int) -> bool:
        changed = with_batch(job, size)
        return device_bytes(changed) <= capacity and _has_blocks(changed)

    return _largest(fits, start=1, most=MOST_REQUESTS)


def with_batch(job: InferenceJob, size: int) -> InferenceJob:
    """The job with another batch size, and a static cache for it."""
    return replace(job, inference=replace(job.inference, batch_size=size, cache_requests=None))


def with_length(job: InferenceJob, tokens: int) -> InferenceJob:
    """The job with other prompts, so that finished requests have `tokens` tokens, and a static cache for them."""
    spec = job.inference
    return replace(job, inference=replace(spec, prompt_tokens=tokens - spec.generated_tokens, cache_tokens=None))


def _has_blocks(job: InferenceJob) -> bool:
    """Whether all requests fit into the blocks of the dynamic engine at the same time."""
    spec = job.inference
    if spec.dynamic is None:
        return True
    layers = stage_layers(stage_models(forward_job(job, requests=1, tokens=1)))
    return requests_of_blocks(job, layers, spec.sequence_length) >= spec.batch_size


def _largest(fits: Callable[[int], bool], *, start: int, most: int) -> int:
    """The largest number from `start` to `most` that fits, 0 if `start` does not. What fits is assumed to be an interval."""
    if not fits(start):
        return 0
    low, high = start, start
    while low == high and low < most:
        high = min(2 * low, most)
        if fits(high):
            low = high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
