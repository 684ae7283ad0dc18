"""The report of generation with offloading: a policy that is given, or those that the search finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from analyzer.errors import DOES_NOT_FIT, InputError, UnsupportedError
from analyzer.inference.estimate import number_of_parameters
from analyzer.inference.offload.machine import MEASURED, NONE, Machine, machine_of
from analyzer.inference.offload.memory import actual, limits, tiers
from analyzer.inference.offload.policy import Lengths, Placement, Policy, Schedule, Shares
from analyzer.inference.offload.search import Found, Problem, block_sizes, front, search
from analyzer.inference.offload.steps import Seconds, block
from analyzer.inference.offload.tensors import sub_layers
from analyzer.inference.offload.work import Case
from analyzer.results import Exported, Verdict
from analyzer.specs import InferenceJob

if TYPE_CHECKING:
    from analyzer.inference.reading import InferenceLaunch
    from analyzer.launch.inference.offload_options import Offload

FITTED: Final = (
    "Rates of GPU, links and host were fitted to runs of OPT-6.7B and OPT-30B on a T4 with 208 GB of host memory; those of "
    "other GPUs follow from their peaks. docs/offloading.md has the errors."
)
"""Assumed unless the rates are those of a calibration."""
NAMES: Final = ("GPU", "host", "disk")
"""The tiers in words."""


class NoPolicyFitsError(InputError):
    """The search found nothing that fits. Exit status as for a launch that does not fit."""

    exit_code = DOES_NOT_FIT


class Tier(NamedTuple):
    """Bytes on one tier at the peak. The parts add up to `total`."""

    name: str
    weights: float
    cache: float
    activations: float
    buffers: float
    """Tensors that are being loaded, intermediate tensors and workspaces."""
    capacity: float

    @property
    def total(self) -> float:
        """All bytes on the tier."""
        return self.weights + self.cache + self.activations + self.buffers


class Sizes(NamedTuple):
    """Bytes on all tiers together."""

    weights: float
    cache: float
    activations: float


@dataclass(frozen=True, kw_only=True)
class OffloadReport(Exported):
    """A policy with its memory and times."""

    job: InferenceJob
    parameters: int
    parameters_unpadded: int
    """Without the rows that pad the vocabulary."""
    policy: Policy
    actual: Placement
    """The shares with weights in whole tensors and the cache in whole requests."""
    sizes: Sizes
    tiers: tuple[Tier, ...]
    seconds: Seconds
    other_seconds: Seconds
    """Without overlap if the policy overlaps; with it otherwise."""
    verdict: Verdict
    front: tuple[Found, ...]
    """Policies that no other beats in both latency and throughput, if they were searched."""
    assumptions: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    """What the launch does not say, with its effect."""
    price: float | None = None
    """Of a GPU-hour."""
    command: tuple[str, ...] = field(default=(), compare=False)
    """The words of the launch that was analyzed; empty if the job was not read from words. Equal results may differ in it."""

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Of generated tokens; None without a price."""
        return None if self.price is None else self.price / 3600 / self.tokens_per_second * 1e6

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of a block per second."""
        return self.policy.schedule.block_size * self.job.inference.generated_tokens / self.seconds.total


def report_of_launch(launch: InferenceLaunch, offload: Offload) -> OffloadReport:
    """The report of a launch that was read, for the value of `--info-offload`. Raises AnalyzerError."""
    options = launch.options
    for name in ("network", "hardware", "efficiency"):
        if getattr(options, name):
            raise InputError(f"--info-{name}", "has no effect on --info-offload, which has its own rates", "leave it out")
    if not options.calibration or launch.job.hardware.name is None:
        return replace(offload_report(launch.job, offload, price=options.price), command=launch.command)
    from analyzer.time.calibration import read_offload_rates

    measured = read_offload_rates(launch.folder / options.calibration[0], launch.job.hardware.name)
    report = offload_report(launch.job, offload, price=options.price, measured=measured)
    assumptions = [_source(options.calibration[0], measured) if each == FITTED else each for each in report.assumptions]
    return replace(report, assumptions=tuple(assumptions), command=launch.command)


def _source(file: str, measured: Mapping[str, float]) -> str:
    """Which rates are those of a calibration, and which are not."""
    kept = [rate.removesuffix("_gb_per_s") for rate, _ in MEASURED.values() if rate not in measured]
    others = f" It lacks {', '.join(kept)}, for which the shipped rates are used." if kept else ""
    return (
        f"Rates of links, host and disk were measured alone ({file}); while a model runs they can be lower.{others} Rates of the "
        "GPU follow from its peaks, and were fitted to runs on a T4."
    )


def offload_report(
    job: InferenceJob, offload: Offload, *, price: float | None = None, measured: Mapping[str, float] = NONE
) -> OffloadReport:
    """The report for `--info-offload`. `price`: of a GPU-hour. `measured`: rates of `--info-calibrate` by name, in GB/s.

    Raises InputError if launch or GPU cannot be modelled, or if nothing fits.
    """
    machine = _machine(job, offload.machine, measured)
    spec = job.inference
    problem = Problem(
        model=job.model,
        layers=sub_layers(job.model),
        lengths=Lengths(prompt=spec.prompt_tokens, generated=spec.generated_tokens),
        machine=machine,
        compress_weights="weights" in offload.compress,
        compress_cache="cache" in offload.compress,
        overlapped=offload.overlapped,
        pinned_weights=offload.pinned_weights,
    )
    if not offload.search:
        return _report(job, problem, _given(offload, spec.batch_size), (), price=price)
    found = search(problem, block_sizes(spec.batch_size))
    if not found:
        remedy = "give the memory and disk of the machine, host-memory=GB and disk=GB, if it has more"
        raise NoPolicyFitsError("--info-offload", "no policy fits GPU, host and disk", remedy)
    return _report(job, problem, found[0].policy, tuple(front(found)), price=price)


def _machine(job: InferenceJob, given: Mapping[str, float], measured: Mapping[str, float]) -> Machine:
    if job.parallel.world_size > 1:
        fault = f"is for one GPU, and the launch has {job.parallel.world_size}"
        raise UnsupportedError("--info-offload", fault, "write a launch of one GPU")
    if job.hardware.name is None:
        raise InputError("--info-offload", "needs a GPU", "add --info-gpu NAME, such as T4")
    if job.precision.parameters == "fp32":
        raise UnsupportedError("--info-offload", "weights of 16 bits are modelled", "add --bf16 or --fp16")
    quantized = job.inference.quantization
    if (quantized.weight_bits, quantized.activation_bits, quantized.cache_bits) != (16, 16, 16):
        remedy = "write compress=weights+cache in --info-offload"
        raise UnsupportedError("--info-quantize", "is not modelled with --info-offload", remedy)
    return machine_of(job.hardware.name, gpu_memory=job.hardware.capacity_bytes, given=given, measured=measured)


def _given(offload: Offload, requests: int) -> Policy:
    if requests % offload.batches:
        fault = f"{requests} requests cannot be divided into {offload.batches} batches"
        raise InputError("--info-offload", fault, "write a divisor of batch= in --info-inference")
    return Policy(
        placement=Placement(
            *(Shares(*(each / 100 for each in of)) for of in (offload.weights, offload.cache, offload.activations))
        ),
        schedule=Schedule(
            batch_size=requests // offload.batches,
            batches=offload.batches,
            compressed_weights="weights" in offload.compress,
            compressed_cache="cache" in offload.compress,
            attention_on_cpu=offload.attention_on_cpu,
            overlapped=offload.overlapped,
            pinned_weights=offload.pinned_weights,
        ),
    )


def _report(job: InferenceJob, problem: Problem, policy: Policy, found: tuple[Found, ...], *, price: float | None) -> OffloadReport:
    case = problem.case(policy.schedule)
    other = problem.case(replace(policy.schedule, overlapped=not policy.schedule.overlapped))
    where = actual(case, policy.placement)
    memory = _tiers(case, where)
    others, unknown = _with_other_vocabularies(job, problem, policy, memory)
    functions = tiers(case)
    parameters, unpadded = number_of_parameters(job)
    return OffloadReport(
        job=job,
        parameters=parameters,
        parameters_unpadded=unpadded,
        policy=policy,
        actual=where,
        sizes=Sizes(functions.disk.weights[2], functions.disk.cache[2], functions.disk.activations[2]),
        tiers=memory,
        seconds=block(case).actual_seconds(policy.placement),
        other_seconds=block(other).actual_seconds(policy.placement),
        verdict=_verdict(job, memory, others),
        front=found,
        assumptions=_assumptions(policy.schedule),
        unknown=(*job.unknown, *unknown),
        price=price,
    )


def _with_other_vocabularies(
    job: InferenceJob, problem: Problem, policy: Policy, memory: tuple[Tier, ...]
) -> tuple[list[tuple[Tier, ...]], tuple[str, ...]]:
    """The tiers with the same policy and other vocabulary sizes, and what that changes. Nothing if the size is known."""
    if job.assumed_vocabulary is None:
        return [], ()
    from analyzer.inference.vocabulary_range import with_other_sizes  # imported for such launches only
    from analyzer.predict.vocabulary_range import sentence

    others = []
    for changed in with_other_sizes(job, job.assumed_vocabulary):
        case = replace(problem, model=changed.model, layers=sub_layers(changed.model)).case(policy.schedule)
        others.append(_tiers(case, actual(case, policy.placement)))
    differences = [int(sum(tier.total for tier in each) - sum(tier.total for tier in memory)) for each in others]
    what = "GPU, host and disk together"
    return others, (sentence(job.assumed_vocabulary, job.model.vocab_size, differences, what=what),)


def _tiers(case: Case, where: Placement) -> tuple[Tier, ...]:
    """The memory of each tier. What a tensor needs on another tier than its own is a buffer."""
    found = []
    for index, (function, capacity) in enumerate(zip(tiers(case), limits(case.machine), strict=True)):
        weights = function.weights[index] * where.weights[index]
        cache = function.cache[index] * where.cache[index]
        activations = function.activations[index] * where.activations[index]
        buffers = function.at(where) - weights - cache - activations
        found.append(Tier(NAMES[index], weights, cache, activations, buffers, capacity))
    return tuple(found)


def _verdict(job: InferenceJob, memory: tuple[Tier, ...], others: list[tuple[Tier, ...]]) -> Verdict:
    """Whether each tier has room. The headroom is that of the GPU. `others`: the tiers with other sizes of the vocabulary.

    It is tight if the GPU has less than the margin, or if only some of the sizes fit.
    """
    gpu = memory[0]
    fits, *fit_too = (all(tier.total <= tier.capacity for tier in each) for each in (memory, *others))
    margin = job.hardware.margin_bytes
    tight = (gpu.capacity - gpu.total < margin) if fits and all(fit_too) else fits or any(fit_too)
    return Verdict(
        fits=fits,
        state="tight" if tight else "fits" if fits else "does not fit",
        gpu=job.hardware.name,
        capacity_bytes=int(gpu.capacity),
        tightest_rank=0,
        headroom_bytes=int(gpu.capacity - gpu.total),
        margin_bytes=margin,
    )


def _assumptions(schedule: Schedule) -> tuple[str, ...]:
    stated = [
        "Weights, cache and activations have 16 bits, and are placed and moved as by FlexLLMGen (commit 004ffef).",
        FITTED,
        "Weights are placed in whole tensors, the cache in whole requests.",
        "Decode steps take the time of the step with the mean number of tokens.",
        "FlexLLMGen's copy threads hold 8 GiB of pinned host memory.",
        "CUDA context and fragmentation of GPU memory are not counted.",
    ]
    if schedule.attention_on_cpu and schedule.compressed_cache:
        stated.append("Attention on the CPU over a compressed cache was not measured: it is taken to be half as fast.")
    return tuple(stated)
