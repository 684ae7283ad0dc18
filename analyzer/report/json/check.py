"""The result of a check as JSON, `training-info-check/1`: formulas compared with a trace. Sizes are in bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from analyzer.modules.tree import Tensor
from analyzer.report.json.document import head
from analyzer.report.json.encoder import SPREAD, Formats, Part, encode, named
from analyzer.trace.compare import CollectiveRow, Comparison, ModuleRow, TotalRow
from analyzer.trace.events import Header
from analyzer.trace.kernels import KernelComparison, KernelRow

SCHEMA: Final = "training-info-check/1"


class Check(NamedTuple):
    """A comparison, and the origin of its trace."""

    comparison: Comparison
    header: Header


def comparison_json(result: Comparison, header: Header) -> dict[str, Any]:
    """An entry of the field `comparisons`."""
    document: dict[str, Any] = encode(Check(result, header), FORMATS)
    return document


def write_comparison(result: Comparison, header: Header, command: Sequence[str]) -> str:
    """The document of a check as text. `command`: the words of the launch."""
    document = {**head(command, SCHEMA), **comparison_json(result, header)}
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def _schema(_: Check) -> Literal["training-info-check/1"]:
    return SCHEMA


def _passed(check: Check) -> bool:
    return not check.comparison.failures


def _bits(row: KernelRow) -> int | None:
    return row.key.bits or None


FORMATS: Final[Formats] = {
    Check: {
        "schema": _schema,
        "trace": Part(named("recorder gpu rank world_size versions"), "header"),
        "tolerance": "comparison.tolerance",
        "passed": _passed,
        **named("failures=comparison.failures explained=comparison.explained modules=comparison.modules"),
        **named("totals=comparison.totals collectives=comparison.collectives kernels=comparison.kernels"),
    },
    ModuleRow: named("module predicted_bytes=predicted recorded_bytes=recorded only_predicted only_recorded_bytes=only_recorded"),
    Tensor: named("name shape dtype bytes formula"),
    TotalRow: named("name predicted_bytes=predicted recorded_bytes=recorded"),
    CollectiveRow: {SPREAD: "key", **named("predicted recorded")},
    KernelComparison: named("predicted_flops recorded_flops shapes differences=rows predicted_traffic recorded_traffic"),
    KernelRow: {
        "kind": "key.kind",
        "bits": _bits,
        **named("sizes=key.sizes predicted=predicted.number recorded=recorded.number"),
        **named("predicted_flops=predicted.flops recorded_flops=recorded.flops"),
    },
}
