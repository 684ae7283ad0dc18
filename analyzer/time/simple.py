"""The time model of llm-analysis: the operations of the model at one share of the peak (`--info-efficiency`).

Source: llm-analysis 0.2.2, `LLMAnalysis.training`. An iteration takes the operations of all microbatches, with those that are
recomputed, over the GPUs and over the share of the peak. It has no communication, no pipeline bubble and no memory-bound kernels,
stages are equal, and attention computes the pairs that the causal mask excludes too.
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzer.modules.stage import StageModel
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.iteration import PARTS, IterationTime
from analyzer.time.pass_seconds import PassSeconds
from analyzer.time.pass_work import PassWork, chunk_work
from analyzer.time.pipeline import RankTime
from analyzer.time.work.kernels import Attention, Gemm


def simple_iteration(job: TrainingJob, stages: Sequence[StageModel], speed: SpeedSpec, *, share: float) -> IterationTime:
    """The time of an iteration if all operations take `share` of the 16-bit peak."""
    rate = share * speed.peak_flops["16"] * len(stages)
    forward = backward = PassSeconds()
    for stage in stages:
        for tree in stage.trees:
            work = chunk_work(job, tree)
            forward, backward = forward.plus(_seconds(work.forward, rate)), backward.plus(_seconds(work.backward, rate))
    microbatches = job.batch.microbatches
    total = PassSeconds().plus(forward, microbatches).plus(backward, microbatches)
    parts = dict.fromkeys(PARTS, 0.0) | {"gemm": total.gemm, "attention": total.attention}
    rank = RankTime(busy=total.total, end=total.total, passes=microbatches)
    return IterationTime(
        seconds=total.total,
        pipeline_rank=0,
        parts=parts,
        ranks=(rank,) * len(stages),
        passes=(((forward, backward),) * job.parallel.chunks,) * len(stages),
        message=0.0,
    )


def _seconds(work: PassWork, rate: float) -> PassSeconds:
    gemm = sum(count * kernel.flops for kernel, count in work.kernels if isinstance(kernel, Gemm))
    attention = sum(count * _all_pairs(kernel) for kernel, count in work.kernels if isinstance(kernel, Attention))
    return PassSeconds(gemm=gemm / rate, attention=attention / rate)


def _all_pairs(kernel: Attention) -> float:
    """Operations without the causal mask. The backward has two products for each of the forward: no scores are recomputed."""
    forward = 2 * kernel.batch * kernel.heads * kernel.queries * kernel.keys * (kernel.head_dim + kernel.value_dim)
    return forward if kernel.name == "forward" else 2.0 * forward
