"""The report of an inference launch as JSON: schema training-info/1 with the field `inference`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from analyzer.inference.results import BatchTime, InferenceReport, StageMemory, StepSeconds
from analyzer.report.json.document import SCHEMA


def inference_json(report: InferenceReport) -> dict[str, Any]:
    """The report as values for the `json` module."""
    job = report.job
    parallel = job.parallel
    return {
        "schema": SCHEMA,
        "engine": "formula",
        "megatron": job.megatron,
        "software": {"transformer_engine": job.software.te, "torch": job.software.torch},
        "world": {"size": parallel.world_size, "nodes": parallel.nodes, "gpus_per_node": parallel.gpus_per_node},
        "parallel": {
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "data": parallel.data,
            "expert": parallel.expert,
            "expert_tensor": parallel.expert_tensor,
            "order": parallel.order,
        },
        "model": {
            "parameters": report.parameters,
            "parameters_unpadded": report.parameters_unpadded,
            "padded_vocab_size": job.model.padded_vocab_size,
        },
        "ranks": [_stage(stage) for stage in report.stages],
        "verdict": asdict(report.verdict),
        "inference": _inference(report),
        "assumptions": list(report.assumptions),
        "warnings": [*report.unknown, *report.warnings],
    }


def _inference(report: InferenceReport) -> dict[str, Any]:
    spec, highest, time = report.job.inference, report.highest, report.time
    given = None if time is None else time.given
    limits = report.limits
    return {
        "batch_size": spec.batch_size,
        "prompt_tokens": spec.prompt_tokens,
        "generated_tokens": spec.generated_tokens,
        "quantization": asdict(spec.quantization),
        "cache": spec.cache,
        "cache_requests": report.cache_requests,
        "weights_bytes": highest.weights_bytes,
        "kv_cache_bytes": highest.kv_cache_bytes,
        "kv_cache_bytes_per_token": report.kv_cache_bytes_per_token,
        "max_batch": None if limits is None else limits.batch_size,
        "max_sequence_length": None if limits is None else limits.sequence_length,
        "prefill_seconds": None if given is None else given.prefill.total,
        "decode_seconds_per_token": None if given is None else given.decode.total,
        "tokens_per_second": None if given is None else given.tokens_per_second,
        "cost_per_million_tokens": None if given is None else given.cost_per_million_tokens,
        "prefill_parts_seconds": None if given is None else _parts(given.prefill),
        "decode_parts_seconds": None if given is None else _parts(given.decode),
        "batches": [] if time is None else [_batch(each) for each in time.others],
        "calibration": None if time is None else time.calibration,
        "policy": None,
    }


def _parts(step: StepSeconds) -> dict[str, float]:
    return asdict(step)


def _batch(batch: BatchTime) -> dict[str, Any]:
    return {
        "batch_size": batch.batch_size,
        "fits": batch.fits,
        "prefill_seconds": batch.prefill.total,
        "decode_seconds_per_token": batch.decode.total,
        "tokens_per_second": batch.tokens_per_second,
        "cost_per_million_tokens": batch.cost_per_million_tokens,
    }


def _stage(stage: StageMemory) -> dict[str, Any]:
    return {
        "ranks": [list(span) for span in stage.ranks],
        "pipeline_rank": stage.pipeline_rank,
        "layers": list(stage.layers),
        "parameters": stage.parameters,
        "memory": {
            "weights_bytes": stage.weights_bytes,
            "weights_by_type": dict(stage.weights_by_type),
            "kv_cache_bytes": stage.kv_cache_bytes,
            "runtime_bytes": sum(part.bytes for part in stage.workspaces),
            "runtime_parts": [{"name": part.name, "bytes": part.bytes} for part in stage.workspaces],
            "prefill_bytes": stage.prefill_bytes,
            "decode_bytes": stage.decode_bytes,
            "graph_pool_bytes": stage.graph_pool_bytes,
            "peak_allocated_bytes": stage.peak_bytes,
            "device_bytes": stage.device_bytes,
            "device_range_bytes": list(stage.device_range_bytes),
        },
    }
