"""The report of generation with offloading as JSON: schema training-info/1 with the field `inference`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from analyzer.inference.offload.estimate import OffloadReport, Tier
from analyzer.inference.offload.policy import Policy, Shares
from analyzer.inference.offload.search import Found
from analyzer.inference.offload.steps import Seconds
from analyzer.report.json.document import MODEL, WORLD, head
from analyzer.report.json.encoder import SPREAD, Formats, Part, attribute, encode, named


def offload_json(report: OffloadReport) -> dict[str, Any]:
    """The report as values for the `json` module."""
    return {**head(report.command), **encode(report, FORMATS)}


def whole(path: str) -> Callable[[object], int]:
    """A number of bytes without its fraction."""

    def bytes_of(record: object) -> int:
        return int(attribute(record, path))

    return bytes_of


def _engine(_: OffloadReport) -> Literal["formula"]:
    return "formula"


def _assumptions(report: OffloadReport) -> list[str]:
    return [*report.job.assumptions, *report.assumptions]


def _warnings(report: OffloadReport) -> list[str]:
    return [*report.unknown, *report.job.warnings]


def _decode_seconds(report: OffloadReport) -> float | None:
    steps = report.job.inference.generated_tokens - 1
    return report.seconds.decode / steps if steps else None


def _seconds(report: OffloadReport) -> dict[Literal["overlapped", "serial"], Seconds]:
    if report.policy.schedule.overlapped:
        return {"overlapped": report.seconds, "serial": report.other_seconds}
    return {"serial": report.seconds, "overlapped": report.other_seconds}


def _percent(shares: Shares) -> list[float]:
    return [100 * share for share in shares]


FIGURES: Final = {
    **named("batch_size=policy.schedule.block_size prompt_tokens=job.inference.prompt_tokens"),
    "generated_tokens": "job.inference.generated_tokens",
    "weights_bytes": whole("sizes.weights"),
    "kv_cache_bytes": whole("sizes.cache"),
    "activation_bytes": whole("sizes.activations"),
    "prefill_seconds": "seconds.prefill",
    "decode_seconds_per_token": _decode_seconds,
    **named("latency_seconds=seconds.total tokens_per_second cost_per_million_tokens"),
    "policy": Part({SPREAD: "policy", **named("actual_percent=actual tiers"), "seconds": _seconds}),
    "front": "front",
}
FORMATS: Final[Formats] = {
    OffloadReport: {
        "engine": _engine,
        "megatron": "job.megatron",
        "world": WORLD,
        "model": Part(MODEL),
        "verdict": "verdict",
        "inference": Part(FIGURES),
        "assumptions": _assumptions,
        "warnings": _warnings,
    },
    Policy: {"percent": "placement", SPREAD: "schedule"},
    Shares: _percent,
    Tier: {
        "name": "name",
        "weights_bytes": whole("weights"),
        "kv_cache_bytes": whole("cache"),
        "activation_bytes": whole("activations"),
        "buffer_bytes": whole("buffers"),
        "total_bytes": whole("total"),
        "capacity_bytes": whole("capacity"),
    },
    Seconds: named("prefill decode total"),
    Found: named("latency_seconds=seconds.total tokens_per_second=throughput policy"),
}
