"""Communication that differs in the code of 2023 (before megatron-core 0.3): the batch and the scalars of a step.

Source: pretrain_gpt.py, megatron/core/tensor_parallel/data.py (`broadcast_data`), megatron/training.py,
megatron/utils.py and megatron/optimizer/ of August 2023. Gradients and parameters are communicated as in later
releases, in buffers without buckets. Symbols: s sequence, b micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from analyzer.communication.calls import Call, Phase
from analyzer.layout.job_groups import gradient_statistics_group
from analyzer.modules.stage import StageModel
from analyzer.specs import TrainingJob

MAX_DATA_DIMENSIONS = 5
"""Sizes that `broadcast_data` sends before a tensor (`_MAX_DATA_DIM`)."""


def legacy_batch_calls(job: TrainingJob, stage: StageModel) -> Iterator[Call]:
    """`broadcast_data` of tokens [b, s + 1], on every stage and for each of its chunks; masks are built from them."""
    tokens = job.batch.micro_batch_size * (job.batch.seq_length + 1)
    for name, numel in (("sizes", MAX_DATA_DIMENSIONS), ("text", tokens)):
        yield Call(
            group="tp",
            kind="broadcast",
            phase="forward",
            module=f"batch.{name}",
            shape=(numel,),
            dtype="int64",
            per_microbatch=len(stage.chunks),
        )


def legacy_scalar_calls(job: TrainingJob, stage: StageModel) -> Iterator[Call]:
    """The loss is averaged for each microbatch; the norm is computed only for clipping."""
    if any(chunk.post_process for chunk in stage.chunks):
        yield Call(
            group="dp",
            kind="all_reduce",
            phase="forward",
            module="loss.average",
            shape=(1,),
            dtype="fp32",
            per_microbatch=1,
        )
    statistics = gradient_statistics_group(job)
    optimizer = job.optimizer
    scalars: tuple[tuple[bool, str, str, Phase], ...] = (
        (job.precision.parameters == "fp16", "optimizer.found_inf", statistics, "gradient"),
        (optimizer.clip_grad > 0, "optimizer.grad_norm", statistics, "gradient"),
        (optimizer.log_num_zeros_in_grad, "optimizer.num_zeros_in_grad", statistics, "gradient"),
        (optimizer.log_params_norm, "params_norm", "mp", "parameter"),
    )
    for sent, module, group, phase in scalars:
        if sent:
            yield Call(
                group=group,
                kind="all_reduce",
                phase=phase,
                module=module,
                shape=(1,),
                dtype="fp32",
                per_iteration=1,
            )
