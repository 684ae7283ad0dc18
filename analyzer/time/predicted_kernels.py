"""The GEMMs and attention kernels of an iteration on a rank, in the form in which they are compared with a recording."""

from __future__ import annotations

from collections.abc import Iterator

from analyzer.results import RankClass
from analyzer.specs import TrainingJob
from analyzer.time.pass_work import chunk_work
from analyzer.time.work.kernels import Attention, Gemm, Kernel
from analyzer.trace.kernels import KernelKey, KernelTotal, PredictedKernels, add_up, attention_key, gemm_key


def predicted_kernels(job: TrainingJob, rank: RankClass) -> PredictedKernels:
    """The kernels of all microbatches of an iteration on a rank of the class."""
    in_steps = job.parallel.context > 1
    return PredictedKernels(totals=add_up(_of_chunks(job, rank, in_steps=in_steps)), attention_in_steps=in_steps)


def _of_chunks(job: TrainingJob, rank: RankClass, *, in_steps: bool) -> Iterator[tuple[KernelKey, KernelTotal]]:
    for tree in rank.trees:
        work = chunk_work(job, tree)
        for kernel, count in (*work.forward.kernels, *work.backward.kernels):
            times = count * job.batch.microbatches
            key = _key(kernel, in_steps=in_steps)
            if isinstance(kernel, Gemm) and key is not None:
                yield key, KernelTotal(times * kernel.batch, float(times * kernel.flops))
            elif isinstance(kernel, Attention) and key is not None:
                yield key, KernelTotal(times, times * kernel.flops)


def _key(kernel: Kernel, *, in_steps: bool) -> KernelKey | None:
    if isinstance(kernel, Gemm):
        return gemm_key(kernel.m, kernel.n, kernel.k, bits=int(kernel.precision))
    if isinstance(kernel, Attention):
        split = (kernel.batch, kernel.heads, kernel.queries, kernel.keys)
        return attention_key(kernel.name, split, (kernel.head_dim, kernel.value_dim), in_steps=in_steps)
    return None
