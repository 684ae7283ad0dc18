"""The part of an inference report about a serving engine."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.inference.results import Limits, ServingReport
from analyzer.inference.serving.batching import MOST_STEPS
from analyzer.inference.serving.estimate import cache_requests, replica_of, served_time
from analyzer.inference.serving.search import Found, search
from analyzer.inference.serving.step import StepWork
from analyzer.inference.serving.tables import table_gpu
from analyzer.launch.inference.serving_options import SERVING, SERVING_ENGINE, SERVING_SEARCH, ServingTarget
from analyzer.specs import InferenceJob
from analyzer.specs.serving import ServingSpec
from analyzer.specs.speed import SpeedSpec

if TYPE_CHECKING:
    from analyzer.launch.info_options import InfoOptions
    from analyzer.time.estimate import TimeInputs

MOST_LISTED: Final = 1024
"""Largest number of clients, beside the given one, whose times are listed."""
EXAMPLE: Final = "--info-gpu H100-80GB"


def serving_job(job: InferenceJob, options: InfoOptions, speed: SpeedSpec | None) -> InferenceJob:
    """The job with its serving, as the options ask. Without a serving engine the job itself. Raises InputError."""
    engine = options.serving_engine or "megatron"
    if engine == "megatron":
        for option, value in ((SERVING, options.serving), (SERVING_SEARCH, options.serving_search)):
            if value is not None:
                raise InputError(option, "is about serving engines", f"add {SERVING_ENGINE} vllm, trtllm or sglang")
        return job
    _check(job, options, speed)
    assert options.inference is not None
    asked = options.inference.batch
    fields = {} if options.serving is None else options.serving.fields
    spec = ServingSpec(engine=engine, clients=asked or 1, **fields)
    replica = replica_of(job, engine, speed)  # type: ignore[arg-type]
    inference = replace(job.inference, prefill_tokens=spec.chunk_tokens or replica.engine.chunk_tokens)
    alone = replace(job, inference=replace(inference, batch_size=1, serving=spec))
    room = cache_requests(replace(replica, job=alone), spec)
    if asked is None and room is None:
        raise InputError("--info-inference batch=max", "needs the memory of a GPU", f"add {EXAMPLE}")
    clients = max(1, room or 1) if asked is None else asked
    _check_size(clients, spec, prompt=job.inference.prompt_tokens, chunk=inference.prefill_tokens or 1)
    resident = clients if room is None else max(1, min(clients, room))
    groups = replica.layout.attention_data
    return replace(job, inference=replace(inference, batch_size=max(1, resident // groups), serving=replace(spec, clients=clients)))


def _check_size(clients: int, spec: ServingSpec, *, prompt: int, chunk: int) -> None:
    """Raises InputError for more steps with prompts than are simulated in a short time."""
    steps = clients * spec.requests * ceil(prompt / chunk)
    if steps > MOST_STEPS:
        fault = f"{clients:,} clients with {spec.requests} requests each are more than {MOST_STEPS:,} steps with prompts"
        raise InputError(SERVING_ENGINE, fault, "write a smaller batch in --info-inference, or --info-serving requests=2")


def _check(job: InferenceJob, options: InfoOptions, speed: SpeedSpec | None) -> None:
    """Raises InputError for a launch that no serving engine is modelled for."""
    if options.offload is not None:
        raise UnsupportedError("--info-offload", "serving engines are modelled without it", "leave one of the two out")
    if options.efficiency:
        raise InputError("--info-efficiency", f"is not used with {SERVING_ENGINE}", "leave one of the two out")
    if options.calibration:
        raise UnsupportedError(
            "--info-calibration", f"is not used with {SERVING_ENGINE}: kernels are measured ones", "leave it out"
        )
    if options.inference is None or job.inference.cache != "compact":
        raise InputError(SERVING_ENGINE, "is not for Megatron's inference scripts", "give a model, and --info-inference")
    if speed is None:
        raise InputError(SERVING_ENGINE, "needs a GPU whose speeds are known", f"add {EXAMPLE}")


def serving_limits(job: InferenceJob, speed: SpeedSpec) -> Limits | None:
    """The largest batch and the longest request that the cache of an engine has room for."""
    spec = job.inference.serving
    assert spec is not None
    replica = replica_of(job, spec.engine, speed)
    room = cache_requests(replica, spec)
    if room is None:
        return None
    tokens = max(0, replica.cache_tokens(spec.memory_share) // replica.layout.attention_data)
    return Limits(batch_size=room, sequence_length=tokens if tokens > job.inference.generated_tokens else 0)


def serving_report(job: InferenceJob, inputs: TimeInputs, target: ServingTarget | None = None) -> ServingReport:
    """The report of serving. `target`: times that a search is to meet."""
    spec = job.inference.serving
    assert spec is not None
    replica = replica_of(job, spec.engine, inputs.speed)
    replicas = max(1, job.parallel.world_size // (replica.layout.ranks * (1 + spec.prefill_replicas)))
    room = cache_requests(replica, spec)
    sizes = {spec.clients}
    size = 1
    steps = spec.requests * ceil(job.inference.prompt_tokens / (job.inference.prefill_tokens or 1))
    while size <= min(MOST_LISTED, max(spec.clients, room or spec.clients), max(spec.clients, MOST_STEPS // steps)):
        sizes.add(size)
        size *= 2
    if room == 0:
        sizes = {spec.clients}
    times = {
        size: served_time(replica, replace(spec, clients=size), replicas=replicas, price=inputs.price) for size in sorted(sizes)
    }
    given = times[spec.clients]
    inference = job.inference
    running = max(1, round(given.running / replica.layout.attention_data))
    length = inference.prompt_tokens + inference.generated_tokens // 2
    decode = StepWork(requests=running, length=length, all_tokens=round(given.running), drafts=spec.draft_tokens)
    new = max(1, round(inference.prompt_tokens * (1 - spec.prefix)))
    pairs = new * (inference.prompt_tokens - new / 2)
    captured = replica.engine.captured_tokens if spec.captured_tokens is None else spec.captured_tokens
    prompt = StepWork(prompt_tokens=new, prompt_pairs=pairs, prompts=1, all_tokens=new, captured=new <= captured)
    found = search(job, inputs.speed, target, price=inputs.price) if target is not None else Found((), ())
    return ServingReport(
        spec=spec,
        tables_gpu=table_gpu(inputs.speed),
        gpus=replica.layout.ranks,
        attention_data=replica.layout.attention_data,
        cache_tokens=None if room is None else max(0, replica.cache_tokens(spec.memory_share)),
        cache_requests=room,
        given=given,
        others=tuple(times.values()),
        decode=replica.steps.seconds(decode),
        prompt=replica.steps.seconds(prompt),
        not_counted=_not_counted(job, spec),
        choices=found.choices,
        front=found.front,
    )


def _not_counted(job: InferenceJob, spec: ServingSpec) -> tuple[str, ...]:
    found = []
    if spec.draft_tokens:
        found.append(
            "The time of proposing tokens is not counted, neither by a draft model nor by layers of multi-token prediction."
        )
    if job.inference.quantization.cache_bits == 4:
        found.append("Kernels for a cache of 4 bits were not measured; those for 8 bits are used.")
    return tuple(found)
