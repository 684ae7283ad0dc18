"""The field `log` of the JSON report (`--info-log`)."""

from __future__ import annotations

from typing import Any

from analyzer.time.run_log.compare import Figure, LogComparison


def log_json(result: LogComparison) -> dict[str, Any]:
    """A log beside the prediction, as values for the `json` module."""
    found = result.measured
    return {
        "file": result.log.path,
        "iterations": {
            "first": found.used[0].number,
            "last": found.used[-1].number,
            "values": len(found.used),
            "left_out": found.left_out,
        },
        "iteration_seconds_percentiles": {"10": found.fast, "50": found.seconds, "90": found.slow},
        "figures": [_figure(each) for each in result.figures],
        "theoretical_bytes": result.log.theoretical_bytes,
        "causes": [{"kind": each.kind, "text": each.text, "factor": each.factor} for each in result.causes],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    percent = None if figure.percent is None else round(figure.percent, 2)
    return {
        "field": figure.field,
        "ranks": figure.where or None,
        "measured": figure.measured,
        "predicted": figure.predicted,
        "percent": percent,
    }
