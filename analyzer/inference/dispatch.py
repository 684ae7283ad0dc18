"""What Megatron-LM pays for the same tokens on all tensor-parallel ranks of a model with experts.

Without sequence parallelism, which generation turns off, each tensor-parallel rank has all tokens of its requests, and sends them
to the experts: `MoEAlltoAllTokenDispatcher` exchanges them over the expert-parallel ranks
(core/transformer/moe/token_dispatcher.py, 0.16.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from analyzer.inference.memory import device_bytes
from analyzer.inference.results import StepSeconds
from analyzer.specs import InferenceJob, ParallelSpec
from analyzer.units import format_seconds


def same_tokens(job: InferenceJob, decode: Callable[[InferenceJob], StepSeconds]) -> str:
    """A sentence with the cost of dispatching the same tokens, and the layout that avoids it; empty if no tokens are sent twice."""
    parallel, moe = job.parallel, job.model.moe
    if moe is None or parallel.tensor == 1 or parallel.expert * parallel.expert_tensor == 1:
        return ""
    mine = decode(job)
    if parallel.expert == 1:
        return _of_split_experts(job, mine, decode)
    said = (
        f"Without sequence parallelism, each of the {parallel.tensor} tensor-parallel ranks sends the same tokens to the experts: "
        f"communication is {format_seconds(mine.communication)} of the {format_seconds(mine.total)} of a step of decode."
    )
    if parallel.world_size % (parallel.expert * parallel.pipeline):
        return said
    first, others = "--tensor-model-parallel-size 1", "--expert-tensor-parallel-size 1"
    other = replace(parallel, tensor=1, expert_tensor=1)
    return f"{said} {_alternative(job, other, decode, words=f'{first} {others}', shortly=first)}"


def _of_split_experts(job: InferenceJob, mine: StepSeconds, decode: Callable[[InferenceJob], StepSeconds]) -> str:
    """The same with experts that are split over the tensor-parallel ranks, which gather the tokens of each other."""
    parallel, moe = job.parallel, job.model.moe
    assert moe is not None
    said = (
        f"Without sequence parallelism, the experts of a rank compute the same tokens {parallel.expert_tensor} times, once for "
        f"each of the expert-tensor-parallel ranks: a step of decode takes {format_seconds(mine.total)}."
    )
    if moe.num_experts % parallel.tensor or parallel.expert_tensor != parallel.tensor:
        return said
    other = replace(parallel, tensor=1, expert=parallel.tensor, expert_tensor=1)
    words = f"--tensor-model-parallel-size 1 --expert-model-parallel-size {parallel.tensor} --expert-tensor-parallel-size 1"
    return f"{said} {_alternative(job, other, decode, words=words, shortly=words)}"


def _alternative(
    job: InferenceJob, parallel: ParallelSpec, decode: Callable[[InferenceJob], StepSeconds], *, words: str, shortly: str
) -> str:
    """A sentence about a layout in which each rank has requests of its own.

    `words`: its options, of which those in `shortly` name it if the model does not fit.
    """
    requests = max(1, job.inference.batch_size // job.parallel.tensor)
    other = replace(job, parallel=parallel, inference=replace(job.inference, batch_size=requests))
    capacity = job.hardware.capacity_bytes
    if capacity is not None and device_bytes(other) > capacity:
        return f"With {shortly}, which avoids it, the model does not fit."
    return (
        f"{words} avoids it: each rank has requests of its own, and a step with {requests} of them takes "
        f"{format_seconds(decode(other).total)}."
    )
