"""DeepSeek-V4: a GPT with multi-latent attention in its options, whose attention and residual stream are of other kinds.

Megatron: `TransformerConfig.__post_init__` and `DSv4HybridAttention` of the branch dev, August 2026 (b3b1e2d7).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.launch.info_options import MODEL
from analyzer.specs.release import is_before

if TYPE_CHECKING:
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import TrainingJob


def with_compressed_attention(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with the attention and the residual stream of DeepSeek-V4. Raises InputError for releases before core 0.19."""
    parts = launch.arguments.parts.compressed
    assert parts is not None
    if is_before(job.megatron, "0.19"):
        fault = "the layers of DeepSeek-V4 are in the branch dev of Megatron-LM, which follows core 0.19"
        raise InputError(MODEL, fault, "add --info-megatron 0.19.0")
    launch.assume(
        "The layers of DeepSeek-V4 are those of the branch dev of Megatron-LM: attention to the last tokens and to compressed keys"
        + (f", and a residual stream of {parts.hyper_connections.streams} parts." if parts.hyper_connections else "."),
        "Kernels of its attention are assumed to be as fast as those of dense attention with as many operations, and those of its "
        "residual stream to be limited by memory: no measurements are known, and the time is probably too low.",
    )
    moe = None if job.model.moe is None else replace(job.model.moe, hash_layers=parts.hash_layers)
    model = replace(job.model, moe=moe, compressed_attention=parts.attention, hyper_connections=parts.hyper_connections)
    reason = "the memory of the attention and of the residual stream of DeepSeek-V4 was not compared with recorded runs"
    return replace(job, model=model, withheld=(*job.withheld, reason))
