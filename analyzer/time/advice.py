"""The largest part of an iteration, and which options make it smaller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from analyzer.specs import TrainingJob
from analyzer.time.iteration import IterationTime
from analyzer.time.work.context import work_context
from analyzer.time.work.packed_samples import loops_over_samples

NAMES: Final = {
    "gemm": "GEMMs",
    "attention": "attention",
    "memory_bound": "memory-bound kernels",
    "exposed_tp": "tensor-parallel communication",
    "exposed_cp": "context-parallel communication",
    "exposed_ep": "the exchange of tokens between experts",
    "exposed_pp": "messages between pipeline stages",
    "exposed_dp": "data-parallel communication",
    "bubble": "the pipeline bubble",
    "optimizer": "the optimizer step",
    "host": "the host, which issues kernels too slowly",
}
"""Names of the parts in reports."""
NOTABLE: Final = 0.05
"""Least share of an iteration of a part that advice is given about."""


def bottleneck(job: TrainingJob, time: IterationTime, buckets: Callable[[], str]) -> str:
    """The largest part that is not a GEMM, with its share, and what reduces it; or that GEMMs dominate.

    `buckets` gives the sentence of `bucket_advice`, which takes longer than the rest.
    """
    rest = {name: seconds for name, seconds in time.parts.items() if name not in ("gemm", "attention")}
    name = max(rest, key=lambda each: rest[each])
    share = rest[name] / time.seconds
    compute = (time.parts["gemm"] + time.parts["attention"]) / time.seconds
    sentence = f"GEMMs and attention take {compute:.0%} of an iteration. The largest other part is {NAMES[name]}: {share:.0%}."
    smaller = buckets() if rest["exposed_dp"] >= NOTABLE * time.seconds else ""
    if name == "exposed_dp" and smaller:
        return f"{sentence} {smaller}"
    remedy = _remedy(job, time, name) if share >= NOTABLE else ""
    return " ".join(part for part in (sentence, remedy, smaller) if part)


def _slow_stage(time: IterationTime) -> int | None:
    """The pipeline rank whose passes take longest, if they take much longer than those of the others."""
    each = [rank.busy for rank in time.ranks]
    slowest = max(each)
    return each.index(slowest) if slowest > 1.08 * sum(each) / len(each) else None


def _remedy(job: TrainingJob, time: IterationTime, part: str) -> str:
    """What makes a part smaller; empty if no option does."""
    parallel, flags = job.parallel, job.flags
    if part == "bubble" and (slow := _slow_stage(time)) is not None:
        return (
            f"Stage {slow} is the slowest: fewer layers on it reduce the wait of the others (--decoder-last-pipeline-num-layers)."
        )
    if part == "bubble":
        if parallel.virtual_pipeline is None:
            return "Virtual pipeline stages (--num-virtual-stages-per-pipeline-rank 2) or more microbatches reduce it."
        return "More microbatches or fewer pipeline stages reduce it."
    if part == "exposed_tp":
        overlapped = flags.tp_comm_overlap
        if overlapped:
            return "A smaller tensor-parallel size reduces it."
        return f"{'' if parallel.sequence_parallel else '--sequence-parallel with '}--tp-comm-overlap hides a part of it."
    if part == "exposed_ep":
        hidden = flags.overlap_moe_expert_parallel_comm
        return "" if hidden else "--overlap-moe-expert-parallel-comm hides a part of it."
    if part == "exposed_dp":
        return _overlap(job) or "More microbatches per iteration reduce its share."
    if part == "host":
        if loops := loops_over_samples(work_context(job)):
            return " ".join(loops)
        return "" if job.graphs is not None else "CUDA graphs (--cuda-graph-impl) or a larger micro-batch reduce it."
    return ""


def _overlap(job: TrainingJob) -> str:
    """The options that hide data-parallel communication and are not given."""
    optimizer = job.optimizer
    missing = [
        name
        for name, given in (
            ("--overlap-grad-reduce", optimizer.overlap_grad_reduce),
            ("--overlap-param-gather", optimizer.overlap_param_gather or not optimizer.distributed),
        )
        if not given
    ]
    return f"{' and '.join(missing)} {'hides' if len(missing) == 1 else 'hide'} a part of it." if missing else ""
