"""The field `log` of the JSON report (`--info-log`)."""

from __future__ import annotations

from typing import Any, Final

from analyzer.report.json.encoder import Formats, Part, encode, named
from analyzer.time.run_log.compare import Figure, LogComparison


def log_json(result: LogComparison) -> dict[str, Any]:
    """A log beside the prediction, as values for the `json` module."""
    document: dict[str, Any] = encode(result, FORMATS)
    return document


def _percent(figure: Figure) -> float | None:
    return None if figure.percent is None else round(figure.percent, 2)


FORMATS: Final[Formats] = {
    LogComparison: {
        "file": "log.path",
        "iterations": Part(named("first last values left_out"), "measured"),
        "iteration_seconds_percentiles": Part(named("10=fast 50=seconds 90=slow"), "measured"),
        **named("figures theoretical_bytes=log.theoretical_bytes causes"),
    },
    Figure: {**named("field ranks=where measured predicted"), "percent": _percent},
}
