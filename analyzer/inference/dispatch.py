"""What Megatron-LM pays for the same tokens on all tensor-parallel ranks of a model with experts.

Without sequence parallelism, which generation turns off, each tensor-parallel rank has all tokens of its requests, and sends them
to the experts: `MoEAlltoAllTokenDispatcher` exchanges them over the expert-parallel ranks
(core/transformer/moe/token_dispatcher.py,
0.16.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from analyzer.inference.memory import device_bytes
from analyzer.inference.results import StepSeconds
from analyzer.specs import InferenceJob
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
    other = replace(job, parallel=replace(parallel, tensor=1, expert_tensor=1))
    requests = max(1, job.inference.batch_size // parallel.tensor)
    other = replace(other, inference=replace(other.inference, batch_size=requests))
    if parallel.world_size % (parallel.expert * parallel.pipeline):
        return said
    capacity = job.hardware.capacity_bytes
    if capacity is not None and device_bytes(other) > capacity:
        return f"{said} With --tensor-model-parallel-size 1, which avoids it, the model does not fit."
    return (
        f"{said} --tensor-model-parallel-size 1 --expert-tensor-parallel-size 1 avoids it: each rank has requests of its own, and "
        f"a step with {requests} of them takes {format_seconds(decode(other).total)}."
    )


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
    other = replace(job, parallel=replace(parallel, tensor=1, expert=parallel.tensor, expert_tensor=1))
    requests = max(1, job.inference.batch_size // parallel.tensor)
    other = replace(other, inference=replace(other.inference, batch_size=requests))
    words = f"--tensor-model-parallel-size 1 --expert-model-parallel-size {parallel.tensor} --expert-tensor-parallel-size 1"
    capacity = job.hardware.capacity_bytes
    if capacity is not None and device_bytes(other) > capacity:
        return f"{said} With {words}, which avoids it, the model does not fit."
    return (
        f"{said} {words} avoids it: each rank has requests of its own, and a step with {requests} of them takes "
        f"{format_seconds(decode(other).total)}."
    )
