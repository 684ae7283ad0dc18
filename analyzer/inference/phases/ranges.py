"""How much less and how much more than its estimate a phase may need on the device.

An update has the range of its ranks. A pass has that of the CUDA context and of NCCL's buffers, and its temporary tensors may be
fragmented. An inference engine has memory beyond the share that it is given, and keeps some while it sleeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from analyzer.memory.device_overhead import CONTEXTS, RARE_FRAGMENTATION, outside_allocator_range
from analyzer.memory.verdict import phases_range
from analyzer.results import PhaseMemory, RankClass
from analyzer.specs import TrainingJob
from analyzer.specs.fine_tuning import Engine, ForwardPass
from analyzer.units import DTYPE_BYTES, GIB, MIB

Range = tuple[int, int]

ENGINES: Final = frozenset({"rollout", "reward"})
"""Phases in which an engine has its share of the GPU."""
ASLEEP: Final = 7 * GIB
"""Most bytes that an engine keeps while it sleeps: its CUDA context, buffers of NCCL, and CUDA graphs. vLLM kept 1.1 GB on RTX 3090
GPUs (issue 32714 of vllm-project/vllm), and 6.8 to 7.0 GiB with Kimi-K2.6 on 8 GB200 GPUs (issue 47654)."""
BEYOND_VLLM: Final = 6 * GIB
"""Most bytes of vLLM beyond `gpu_memory_utilization`: with 0.85 of a GB200 GPU it used 166,449 MiB, 5.3 GiB more (issue 47654)."""


def beyond_share(engine: Engine, capacity: int) -> int:
    """Most bytes that an engine uses beyond its share while it generates.

    The share of SGLang is that of its weights and its cache. For activations and CUDA graphs it leaves by default 512 MiB, 1.5 MiB
    for each token of a chunk of prompts, 2 MiB for each request of the largest graph, and 128 MiB for each tensor-parallel rank,
    and at least 10 GiB (`_handle_gpu_memory_settings` of python/sglang/srt/server_args.py).
    """
    if engine.name == "vllm":
        return BEYOND_VLLM
    chunk = 4096 if capacity < 60 * GIB else 8192 if capacity < 160 * GIB else 16384
    return max(10 * GIB, 512 * MIB + chunk * 3 * MIB // 2 + 512 * 2 * MIB + engine.tensor * 128 * MIB)


def engine_beside(job: TrainingJob) -> Range:
    """Bytes of an engine on the same GPUs while the training works, and the most that they may be.

    It sleeps, or keeps its memory.
    """
    engines = [each for each in job.tuning.phases if each.on_same_gpus and each.name in ENGINES]
    staying = next((each.work for each in engines if isinstance(each.work, Engine) and each.work.stays), None)
    if staying is None:
        return 0, ASLEEP if engines else 0
    capacity = job.hardware.capacity_bytes or 0
    share = int(staying.gpu_share * capacity)
    return share, share + beyond_share(staying, capacity)


def outside_range(job: TrainingJob, *, groups: bool) -> Range:
    """Bytes of the CUDA context, and with `groups` those of NCCL's buffers and of libraries."""
    return outside_allocator_range(job) if groups else CONTEXTS


def pass_range(states: int, forward: int, *, outside: Range, engine: Range) -> Range:
    """A pass with `forward` bytes of temporary tensors beside `engine`.

    At least half of them are there: logits in 16 bit and in fp32, of which copies may be made in chunks. At most they are
    fragmented: microbatches have different numbers of tokens, so that blocks of one do not suit the next.
    """
    return states + forward // 2 + outside[0] + engine[0], states + int(forward * (1 + RARE_FRAGMENTATION)) + outside[1] + engine[1]


def refit_range(job: TrainingJob, engine: Engine, *, weights: int) -> Range:
    """The engine while it gets its weights, `weights` bytes in the dtype of the training; they may be quantized to 4 bit.

    Weights are gathered and converted in buckets. At most a bucket and the largest tensor, the embeddings, are there twice.
    """
    model, width = job.model, DTYPE_BYTES[job.precision.parameters]
    bucket = max(engine.buffer_bytes, GIB) + int(model.padded_vocab_size * model.hidden_size * width)
    return weights if engine.stays else weights // 4, weights + 2 * bucket + ASLEEP


def update_range(job: TrainingJob, ranks: Sequence[RankClass], *, engine: int, most_engine: int) -> Range:
    """The update. `engine`: bytes of an engine whose memory stays; `most_engine`: the most that it has."""
    less, more = _loss_range(job)
    last = job.parallel.pipeline - 1
    least = max(rank.memory.device_range_bytes[0] - (less if rank.pipeline_rank == last else 0) for rank in ranks)
    most = max(rank.memory.device_range_bytes[1] + (more if rank.pipeline_rank == last else 0) for rank in ranks)
    return least + engine, most + most_engine


def _loss_range(job: TrainingJob) -> Range:
    """Bytes by which the loss of the update may need less or more than the cross entropy that is counted in its place.

    Fused kernels make no logits, of which at most 6 bytes each are counted. Other losses have log-probabilities, a copy of the
    logits, and the exponentials of the entropy in fp32 beside them.
    """
    passes = [each.work for each in job.tuning.phases if each.name == "log-probabilities" and isinstance(each.work, ForwardPass)]
    if not passes or job.model.log_probability_loss:
        return 0, 0
    tokens = job.batch.micro_batch_size * job.batch.seq_length // job.parallel.context
    logits = tokens * (job.model.padded_vocab_size // job.parallel.tensor)
    return (6 * logits, 0) if passes[0].logit_bytes == 0 else (0, 12 * logits)


def of_highest_rank(found: Sequence[PhaseMemory]) -> PhaseMemory:
    """The memory of a phase on the rank that needs the most, with the range over all of them. Ties go to the lowest rank."""
    peak = max(found, key=lambda each: (each.device_bytes, -each.rank))
    return replace(peak, device_range_bytes=phases_range(found))
