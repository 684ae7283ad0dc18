"""The time section of a report: an iteration, its parts, and the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.modules.stage import StageModel
from analyzer.passes.stages import stage_models
from analyzer.results import Report, StageTimeline, TimeEstimate
from analyzer.specs import TrainingJob
from analyzer.specs.run import RunSpec
from analyzer.specs.speed import SpeedSpec
from analyzer.time.advice import bottleneck
from analyzer.time.bucket_advice import bucket_advice
from analyzer.time.efficiencies import Efficiencies, efficiencies_of, shipped
from analyzer.time.iteration import IterationTime, iteration_time
from analyzer.time.kernels.tables import measured_gpu
from analyzer.time.pass_work import chunk_work
from analyzer.time.pipeline import schedule_of, spans
from analyzer.time.simple import simple_iteration
from analyzer.time.training import training_time
from analyzer.time.training_range import range_of
from analyzer.time.work.kernels import flops
from analyzer.time.work.model_flops import model_flops

TIMELINE_SPANS: Final = 128
"""Passes of a timeline. Further ones are left out."""
NO_RUN: Final = RunSpec()
"""A launch that does not say how long it runs."""


@dataclass(frozen=True, kw_only=True)
class TimeInputs:
    """What the time of a launch depends on, in addition to its job."""

    speed: SpeedSpec
    rates: Efficiencies | None = None
    """Measured efficiencies (`--info-calibration`); None for the shipped ones."""
    flops_share: float | None = None
    """Share of the peak in the simple model of `--info-efficiency`; None for the full model."""
    memory_share: float = 1.0
    """Share of the memory bandwidth in the simple model of inference."""
    calibration: str = ""
    """Where `rates` are from."""
    run: RunSpec = NO_RUN
    tokens: int | None = None
    """Tokens of the training (`--info-tokens`)."""
    price: float | None = None
    """Price of a GPU-hour (`--info-price`)."""


def time_estimate(report: Report, inputs: TimeInputs) -> TimeEstimate:
    """The time of the launch of a report."""
    job, speed = report.job, inputs.speed
    stages = stage_models(job)
    time = iteration_of(report, inputs, stages)
    world, peak = job.parallel.world_size, speed.peak_flops["16"]
    counted = model_flops(job)
    return TimeEstimate(
        iteration_seconds=time.seconds,
        range_seconds=None if inputs.calibration else range_of(job, time, speed),
        tokens_per_second_per_gpu=job.batch.global_batch_size * job.batch.seq_length / time.seconds / world,
        model_flops_per_iteration=counted,
        model_tflops_per_gpu=counted / time.seconds / world / 1e12,
        model_flops_utilization=counted / time.seconds / world / peak,
        hardware_flops_utilization=_executed_flops(job, stages) / time.seconds / world / peak,
        parts_seconds=time.parts,
        pipeline_rank=time.pipeline_rank,
        peak_flops=peak,
        training=training_time(job, inputs.run, time, tokens=inputs.tokens, parameters=report.parameters, price=inputs.price),
        calibration=inputs.calibration or _shipped(speed),
        bottleneck=bottleneck(job, time, lambda: bucket_advice(job, stages, time, speed, rates_of(inputs))),
        not_counted=_not_counted(job),
        timelines=_timelines(job, time),
    )


def iteration_of(report: Report, inputs: TimeInputs, stages: Sequence[StageModel] | None = None) -> IterationTime:
    """The time of an iteration of a report. `stages` are its pipeline stages, if they are known."""
    stages = stage_models(report.job) if stages is None else stages
    if inputs.flops_share is not None:
        return simple_iteration(report.job, stages, inputs.speed, share=inputs.flops_share)
    return iteration_time(report.job, stages, report.communication, inputs.speed, rates_of(inputs))


def rates_of(inputs: TimeInputs) -> Efficiencies:
    """The efficiencies that are used."""
    return inputs.rates or efficiencies_of(inputs.speed)


def _shipped(speed: SpeedSpec) -> str:
    """Where the shipped efficiencies for a GPU are from."""
    if speed.name in shipped()["errors"]["gpus"]:
        return f"built in, for {speed.name}"
    kernels = measured_gpu(speed)
    own = "its kernels were measured, its iterations were not" if kernels == speed.name else f"with the kernels of {kernels}"
    return f"built in, assumed for {speed.name}: {own}"


def _executed_flops(job: TrainingJob, stages: Sequence[StageModel]) -> float:
    """Operations of the GEMM and attention kernels of all ranks in an iteration, with recomputation."""
    total = 0.0
    for stage in stages:
        for tree in stage.trees:
            work = chunk_work(job, tree)
            total += sum(count * flops((kernel,)) for half in (work.forward, work.backward) for kernel, count in half.kernels)
    ranks = job.parallel.world_size // job.parallel.pipeline
    return total * job.batch.microbatches * ranks


def _timelines(job: TrainingJob, time: IterationTime) -> tuple[StageTimeline, ...]:
    found: list[list[tuple[float, float, str, int, int]]] = [[] for _ in time.ranks]
    for node, start, end in spans(schedule_of(job), time.pass_totals, time.message):
        line = found[node.rank]
        if len(line) < TIMELINE_SPANS:
            line.append((start, end, "backward" if node.direction else "forward", node.microbatch, node.chunk))
    return tuple(StageTimeline(pipeline_rank=rank, spans=tuple(line)) for rank, line in enumerate(found))


def _not_counted(job: TrainingJob) -> tuple[str, ...]:
    """Features whose time is not modelled."""
    found = ["data loading, logging and the first iterations (compilation, warm-up)"]
    if job.activation_offload is not None:
        found.append("copies of offloaded activations, which are assumed to be hidden")
    found.extend(job.optimizer.facts.not_timed)
    if job.optimizer.offload is not None:
        found.append("the optimizer step on the host; copies to it are counted")
    if job.model.moe is not None and job.model.moe.shared_overlap:
        found.append("the overlap of shared experts with the exchange of tokens")
    if job.model.moe is not None and job.model.moe.page_factor is not None:
        found.append("copies of expert tensors to pages and back, which are assumed to be hidden")
    if job.flags.delay_wgrad_compute or job.flags.overlap_expert_gradients:
        found.append("what delayed weight gradients hide")
    if job.precision.fp8 is not None and job.precision.fp8.attention:
        found.append("attention in FP8, which is timed as in 16 bit")
    if job.model.fp32_residual_connection:
        found.append("the fp32 residual stream")
    return tuple(found)
