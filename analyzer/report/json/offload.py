"""The report of generation with offloading as JSON: schema training-info/1 with the field `inference`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from analyzer.report.json.document import SCHEMA

if TYPE_CHECKING:
    from analyzer.inference.offload.estimate import OffloadReport
    from analyzer.inference.offload.policy import Placement, Policy
    from analyzer.inference.offload.steps import Seconds


def offload_json(report: OffloadReport) -> dict[str, Any]:
    """The report as values for the `json` module."""
    job = report.job
    return {
        "schema": SCHEMA,
        "engine": "formula",
        "megatron": job.megatron,
        "world": {"size": job.parallel.world_size, "nodes": job.parallel.nodes, "gpus_per_node": job.parallel.gpus_per_node},
        "model": {
            "parameters": report.parameters,
            "parameters_unpadded": report.parameters_unpadded,
            "padded_vocab_size": job.model.padded_vocab_size,
        },
        "verdict": asdict(report.verdict),
        "inference": _inference(report),
        "assumptions": [*job.assumptions, *report.assumptions],
        "warnings": [*report.unknown, *job.warnings],
    }


def _inference(report: OffloadReport) -> dict[str, Any]:
    spec = report.job.inference
    weights, cache, activations = report.sizes
    steps = spec.generated_tokens - 1
    return {
        "batch_size": report.policy.schedule.block_size,
        "prompt_tokens": spec.prompt_tokens,
        "generated_tokens": spec.generated_tokens,
        "weights_bytes": int(weights),
        "kv_cache_bytes": int(cache),
        "activation_bytes": int(activations),
        "prefill_seconds": report.seconds.prefill,
        "decode_seconds_per_token": report.seconds.decode / steps if steps else None,
        "latency_seconds": report.seconds.total,
        "tokens_per_second": report.tokens_per_second,
        "cost_per_million_tokens": report.cost_per_million_tokens,
        "policy": {
            **_policy(report.policy),
            "actual_percent": _percent(report.actual),
            "tiers": [
                {
                    "name": tier.name,
                    "weights_bytes": int(tier.weights),
                    "kv_cache_bytes": int(tier.cache),
                    "activation_bytes": int(tier.activations),
                    "buffer_bytes": int(tier.buffers),
                    "total_bytes": int(tier.total),
                    "capacity_bytes": int(tier.capacity),
                }
                for tier in report.tiers
            ],
            "seconds": {
                "overlapped" if report.policy.schedule.overlapped else "serial": _seconds(report.seconds),
                "serial" if report.policy.schedule.overlapped else "overlapped": _seconds(report.other_seconds),
            },
        },
        "front": [
            {"latency_seconds": each.seconds.total, "tokens_per_second": each.throughput, "policy": _policy(each.policy)}
            for each in report.front
        ],
    }


def _policy(policy: Policy) -> dict[str, Any]:
    return {"percent": _percent(policy.placement), **asdict(policy.schedule)}


def _percent(placement: Placement) -> dict[str, list[float]]:
    return {name: [100 * share for share in shares] for name, shares in placement._asdict().items()}


def _seconds(seconds: Seconds) -> dict[str, float]:
    return {"prefill": seconds.prefill, "decode": seconds.decode, "total": seconds.total}
