"""The report of an inference launch as JSON: schema training-info/1 with the field `inference`."""

from __future__ import annotations

from typing import Any, Final, Literal

from analyzer.inference.results import BatchTime, InferenceReport, ServedTime, ServingChoice, ServingReport, StageMemory
from analyzer.report.json.document import MODEL, SOFTWARE, WORLD, head
from analyzer.report.json.encoder import Formats, Part, encode, named
from analyzer.specs import SoftwareSpec


def inference_json(report: InferenceReport) -> dict[str, Any]:
    """The report as values for the `json` module."""
    return {**head(report.command), **encode(report, FORMATS)}


def _engine(_: InferenceReport) -> Literal["formula"]:
    return "formula"


def _warnings(report: InferenceReport) -> list[str]:
    return [*report.unknown, *report.warnings]


def _batches(report: InferenceReport) -> tuple[BatchTime, ...]:
    return () if report.time is None else report.time.others


def _policy(_: InferenceReport) -> None:
    return None


FIGURES: Final = {
    **named("batch_size=job.inference.batch_size prompt_tokens=job.inference.prompt_tokens"),
    **named("generated_tokens=job.inference.generated_tokens quantization=job.inference.quantization cache=job.inference.cache"),
    **named("cache_requests weights_bytes=highest.weights_bytes kv_cache_bytes=highest.kv_cache_bytes kv_cache_bytes_per_token"),
    **named("max_batch=limits.batch_size max_sequence_length=limits.sequence_length"),
    **named("prefill_seconds=time.given.prefill.total decode_seconds_per_token=time.given.decode.total"),
    **named("tokens_per_second=time.given.tokens_per_second cost_per_million_tokens=time.given.cost_per_million_tokens"),
    **named("prefill_parts_seconds=time.given.prefill decode_parts_seconds=time.given.decode"),
    "batches": _batches,
    "calibration": "time.calibration",
    "policy": _policy,
    "serving": "serving",
}
SERVED: Final = named(
    "clients first_seconds first_later_seconds token_seconds tokens_per_second running prompt_share waits cost_per_million_tokens"
)
FORMATS: Final[Formats] = {
    InferenceReport: {
        "engine": _engine,
        **named("megatron=job.megatron software=job.software"),
        "world": WORLD,
        "parallel": Part(named("tensor pipeline data expert expert_tensor order"), "job.parallel"),
        "model": Part(MODEL),
        **named("ranks=stages verdict"),
        "inference": Part(FIGURES),
        "assumptions": "assumptions",
        "warnings": _warnings,
    },
    SoftwareSpec: SOFTWARE,
    StageMemory: {
        **named("ranks pipeline_rank layers parameters"),
        "memory": Part(
            {
                **named("weights_bytes weights_by_type kv_cache_bytes runtime_bytes runtime_parts=workspaces prefill_bytes"),
                **named("decode_bytes graph_pool_bytes peak_allocated_bytes=peak_bytes device_bytes device_range_bytes"),
            }
        ),
    },
    ServingReport: {
        **named("engine=spec.engine requests_of_client=spec.requests memory_share=spec.memory_share prefix=spec.prefix"),
        **named("draft_tokens=spec.draft_tokens acceptance=spec.acceptance prefill_replicas=spec.prefill_replicas"),
        **named("tables_gpu gpus attention_data cache_tokens cache_requests given clients=others decode_parts_seconds=decode"),
        **named("prompt_parts_seconds=prompt not_counted choices front"),
    },
    ServedTime: SERVED,
    ServingChoice: named("gpus tensor attention_data expert expert_tensor replicas time options"),
    BatchTime: {
        **named("batch_size fits prefill_seconds=prefill.total decode_seconds_per_token=decode.total"),
        **named("tokens_per_second cost_per_million_tokens"),
    },
}
