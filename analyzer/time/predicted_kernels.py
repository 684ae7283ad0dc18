"""The kernels of an iteration on a rank, in the form in which they are compared with a recording."""

from __future__ import annotations

from collections.abc import Iterator

from analyzer.modules.moe.routing import Routing
from analyzer.modules.shapes import ExpertShapes, shapes_of
from analyzer.results import RankClass
from analyzer.specs import TrainingJob
from analyzer.time.pass_work import chunk_work
from analyzer.time.work.kernels import Attention, Gemm, MemoryBound
from analyzer.trace.kernels import KernelKey, KernelTotal, PredictedKernels, Traffic, add_up, attention_key, gemm_key


def predicted_kernels(job: TrainingJob, rank: RankClass) -> PredictedKernels:
    """The kernels of all microbatches of an iteration on a rank of the class."""
    in_steps = job.parallel.context > 1
    totals = add_up(_of_chunks(job, rank, in_steps=in_steps))
    return PredictedKernels(totals=totals, traffic=_traffic(job, rank), attention_in_steps=in_steps)


def _traffic(job: TrainingJob, rank: RankClass) -> Traffic:
    """Bytes of memory-bound kernels of all microbatches; weights are quantized in the forward of the first one."""
    works = [chunk_work(job, tree) for tree in rank.trees]
    forward, backward = (
        sum(kernel.bytes * count for work in passes for kernel, count in work.kernels if isinstance(kernel, MemoryBound))
        for passes in ([each.forward for each in works], [each.backward for each in works])
    )
    microbatches = job.batch.microbatches
    return Traffic(microbatches * forward + sum(each.cast_bytes for each in works), microbatches * backward)


def _of_chunks(job: TrainingJob, rank: RankClass, *, in_steps: bool) -> Iterator[tuple[KernelKey, KernelTotal]]:
    quantized, in_16_bit = (_padded_to(job, shapes) for shapes in (shapes_of(job), shapes_of(job).in_16_bit))
    for tree in rank.trees:
        work = chunk_work(job, tree)
        for kernel, count in (*work.forward.kernels, *work.backward.kernels):
            times = count * job.batch.microbatches
            if isinstance(kernel, Gemm):
                for each in _of_padded_experts(kernel, in_16_bit if kernel.precision == "16" else quantized):
                    key = gemm_key(each.m, each.n, each.k, bits=int(each.precision))
                    yield key, KernelTotal(times * each.batch, float(times * each.flops))
            elif isinstance(kernel, Attention):
                split = (kernel.batch, kernel.heads, kernel.queries, kernel.keys)
                key = attention_key(kernel.name, split, (kernel.head_dim, kernel.value_dim), in_steps=in_steps)
                yield key, KernelTotal(times, times * kernel.flops)


def _padded_to(job: TrainingJob, shapes: ExpertShapes) -> int:
    """The multiple to which the rows of each expert are padded for FP8; 1 if they are not, or by padding the routing map."""
    if job.model.moe is None or job.model.moe.pad_for_quantization:
        return 1
    routing = Routing(shapes)
    return routing.padded_to if routing.multiplied_rows > routing.choices else 1


def _of_padded_experts(gemm: Gemm, padded_to: int) -> tuple[Gemm, ...]:
    """The products of experts, whose mean number of rows includes half a multiple of padding, with whole multiples.

    Half of the experts have half a multiple less than the mean, the others half a multiple more.
    """
    half = padded_to // 2
    if not (gemm.grouped and half) or gemm.batch % 2 or (gemm.rows - half) % padded_to:
        return (gemm,)
    few, many = gemm.rows - half, gemm.rows + half
    gemm = gemm._replace(batch=gemm.batch // 2)
    if gemm.depth_is_tokens:
        return gemm._replace(k=few), gemm._replace(k=many)
    return gemm._replace(m=few), gemm._replace(m=many)
