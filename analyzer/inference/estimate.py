"""The report of an inference launch: memory, what fits, and times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from analyzer.inference.forward_job import forward_job
from analyzer.inference.kernels import Machine
from analyzer.inference.kv_cache import allocated_requests, has_attention, requests_of_blocks, token_bytes
from analyzer.inference.memory import limits_of, stage_layers, stage_memories, verdict_of
from analyzer.inference.results import BatchTime, InferenceReport, InferenceTime, Limits, StepSeconds
from analyzer.inference.steps import decode_seconds, prefill_seconds
from analyzer.memory.device_overhead import outside_allocator_note
from analyzer.modules.tree import parameters
from analyzer.passes.stages import full_model, stage_models
from analyzer.specs import InferenceJob
from analyzer.specs.release import is_before
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import efficiencies_of, shipped

if TYPE_CHECKING:
    from analyzer.launch.inference.serving_options import ServingTarget
    from analyzer.time.estimate import TimeInputs

LARGEST_LISTED: Final = 1024
"""Largest batch size, beside the largest that fits, whose times are listed."""
Steps = Callable[[InferenceJob], tuple[StepSeconds, StepSeconds]]
"""Seconds of prefill and of a decode step of a job."""
KERNEL_GAP: Final = 2e-6
"""Seconds between two kernels of a generation: assumed to be shorter than in a training, whose large kernels take longer to end."""


def inference_report(
    job: InferenceJob,
    inputs: TimeInputs | None,
    *,
    note: str = "",
    command: tuple[str, ...] = (),
    target: ServingTarget | None = None,
) -> InferenceReport:
    """The report of a job; `note` is about the GPU. `inputs`: those of the time model, None if the speeds are not known.

    `command`: the words of the launch. `target`: times that a search of a serving engine is to meet.
    """
    stages, unknown = stage_memories(job), job.unknown
    if job.assumed_vocabulary is not None:
        from analyzer.inference.vocabulary_range import widen  # imported for such launches only

        stages, effect = widen(job, job.assumed_vocabulary, stages)
        unknown = (*unknown, effect)
    serving = None
    if job.inference.serving is not None and inputs is not None:
        from analyzer.inference.serving.report import serving_limits, serving_report

        limits, serving = serving_limits(job, inputs.speed), serving_report(job, inputs, target)
    else:
        limits = limits_of(job)
    full, unpadded = number_of_parameters(job)
    return InferenceReport(
        job=job,
        parameters=full,
        parameters_unpadded=unpadded,
        stages=stages,
        kv_cache_bytes_per_token=_bytes_of_token(job),
        cache_requests=_cache_requests(job),
        verdict=verdict_of(job, stages, note=note),
        limits=limits,
        assumptions=(*job.assumptions, *_assumptions(job), *_of_dispatch(job, inputs)),
        warnings=job.warnings,
        unknown=unknown,
        time=None if inputs is None or serving is not None else inference_time(job, inputs, limits),
        serving=serving,
        command=command,
    )


def _of_dispatch(job: InferenceJob, inputs: TimeInputs | None) -> tuple[str, ...]:
    """What Megatron pays for the same tokens on the tensor-parallel ranks of a model with experts."""
    if job.model.moe is None or job.inference.serving is not None or inputs is None or inputs.flops_share is not None:
        return ()
    from analyzer.inference.dispatch import same_tokens

    machine = _machine(inputs)
    text = same_tokens(job, lambda other: decode_seconds(other, machine))
    return (text,) if text else ()


def _machine(inputs: TimeInputs) -> Machine:
    if inputs.rates is not None:
        return Machine(inputs.speed, inputs.rates)
    return _shipped_machine(inputs.speed)


def _shipped_machine(speed: SpeedSpec) -> Machine:
    return Machine(speed, replace(efficiencies_of(speed), kernel_gap=KERNEL_GAP), tables=True)


def number_of_parameters(job: InferenceJob) -> tuple[int, int]:
    """Parameters of the model, and without the rows that pad the vocabulary."""
    model = job.model
    full = sum(parameter.full_numel for parameter in parameters(full_model(forward_job(job, requests=1, tokens=1))))
    padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size * (1 if model.tied_embeddings else 2)
    return full, full - padding


def _bytes_of_token(job: InferenceJob) -> float:
    """Bytes of a token in the cache of all layers, without tensor parallelism."""
    layers = sum(has_attention(job.model, layer) for layer in range(1, job.model.num_layers + 1))
    alone = replace(job, parallel=replace(job.parallel, tensor=1))
    return layers * token_bytes(alone)


def _cache_requests(job: InferenceJob) -> int:
    if job.inference.dynamic is None:
        return allocated_requests(job.inference)
    stages = stage_models(forward_job(job, requests=1, tokens=1))
    return requests_of_blocks(job, stage_layers(stages), job.inference.sequence_length)


def inference_time(job: InferenceJob, inputs: TimeInputs, limits: Limits | None) -> InferenceTime:
    """Times of the given batch, and of powers of two up to the largest batch that fits."""
    steps, calibration = _steps(inputs)

    def of_size(size: int) -> BatchTime:
        changed = replace(job, inference=replace(job.inference, batch_size=size))
        prefill, decode = steps(changed)
        return _batch_time(changed, prefill, decode, price=inputs.price)

    given = job.inference.batch_size
    most = given if limits is None else limits.batch_size
    sizes = {given} | ({most} if most else set())
    size = 1
    while size <= min(most, LARGEST_LISTED):
        sizes.add(size)
        size *= 2
    times = {size: of_size(size) for size in sorted(sizes)}
    listed = tuple(replace(time, fits=limits is None or size <= most) for size, time in times.items())
    return InferenceTime(given=next(each for each in listed if each.batch_size == given), others=listed, calibration=calibration)


def _steps(inputs: TimeInputs) -> tuple[Steps, str]:
    """The time model: that of the kernels, or the simple one of `--info-efficiency`."""
    if inputs.flops_share is not None:
        from analyzer.inference.simple import SimpleModel

        flops, memory = inputs.flops_share, inputs.memory_share

        def simple(job: InferenceJob) -> tuple[StepSeconds, StepSeconds]:
            model = SimpleModel(job, inputs.speed, flops=flops, memory=memory)
            return model.prefill(), model.decode()

        return simple, f"--info-efficiency: {flops:.0%} of the peak of computation, {memory:.0%} of that of memory"
    machine = _machine(inputs)
    known = inputs.speed.name in shipped()["errors"]["gpus"]
    source = inputs.calibration or (
        "those of training; not checked against measured generation"
        if known
        else "assumed, those of training on other GPUs; not checked against measured generation"
    )
    return lambda job: (prefill_seconds(job, machine), decode_seconds(job, machine)), source


def megatron_steps(job: InferenceJob, speed: SpeedSpec) -> tuple[StepSeconds, StepSeconds]:
    """Seconds of prefill and of a decode step of a job in Megatron-LM, on GPUs with the shipped efficiencies."""
    machine = _shipped_machine(speed)
    return prefill_seconds(job, machine), decode_seconds(job, machine)


def _batch_time(job: InferenceJob, prefill: StepSeconds, decode: StepSeconds, *, price: float | None) -> BatchTime:
    """Times of a batch whose prompts are processed together, and whose tokens are generated together."""
    spec, parallel = job.inference, job.parallel
    seconds = prefill.total + (spec.generated_tokens - 1) * decode.total
    rate = parallel.data * spec.batch_size * spec.generated_tokens / seconds
    cost = None if price is None else price * parallel.world_size / 3600 / rate * 1e6
    return BatchTime(
        batch_size=spec.batch_size, prefill=prefill, decode=decode, tokens_per_second=rate, cost_per_million_tokens=cost
    )


def _of_prompts(job: InferenceJob) -> str:
    spec = job.inference.serving
    assert spec is not None
    low = f"from {1 - spec.spread:.0%} of the given ones to these"
    lengths = f"Lengths are spread equally {low}" if spec.spread else "All requests have the given lengths"
    return (
        f"Each of the clients sends {spec.requests} requests, each when the last one is complete; all begin at the same time. "
        f"{lengths}. A step computes at most {job.inference.prefill_tokens:,} tokens of prompts."
        + (" The measured experts are chosen unequally (power law of 1.01)." if job.model.moe is not None else "")
    )


def _assumptions(job: InferenceJob) -> list[str]:
    spec, model, quantization = job.inference, job.model, job.inference.quantization
    stated = [
        {
            "compact": "The cache is allocated for the tokens of prompt and generation"
            + (", and in layers with a sliding window for its tokens alone." if any(model.windowed) else "."),
            "static": "The cache is that of megatron-core's static engine: all tokens in every layer, for --inference-max-requests "
            "requests of --inference-max-seq-length tokens.",
            "dynamic": "The cache is the buffer of megatron-core's dynamic engine.",
        }[spec.cache],
        "Temporary tensors are those of the layer that needs most, and of the logits of the last token of each request.",
        _of_prompts(job)
        if spec.serving is not None
        else "All prompts of a batch are processed together, and a batch passes through the pipeline stages one after the other."
        if job.parallel.pipeline > 1
        else "All prompts of a batch are processed together.",
    ]
    if model.mla is not None:
        cached = "its latents" if spec.latent_cache else "the keys and values of all heads"
        stated.append(f"Multi-latent attention caches {cached}.")
    if spec.dynamic is not None and is_before(job.megatron, "0.16"):
        stated.append("The tables of the dynamic engine and the tokens of its steps are those of core 0.16.")
    if spec.decode_graphs:
        stated.append("Decode steps are replayed as CUDA graphs, whose memory pool holds the tensors of one step.")
    if quantization.weight_bits < 16:
        stated.append("Embeddings, output layer, norms and routers are not quantized.")
    if quantization.weight_bits == 4 or quantization.cache_bits == 4:
        stated.append(f"{quantization.group_size} elements of a 4-bit tensor share a scale and a minimum of 16 bits each.")
    outside = outside_allocator_note(forward_job(job, requests=1, tokens=1), training=False)
    stated.append(f"{outside[0].upper()}{outside[1:]}.")
    return stated
