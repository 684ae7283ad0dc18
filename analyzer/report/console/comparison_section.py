"""What a check found, for the console and as JSON: formulas beside a trace."""

from __future__ import annotations

import json
import re
from typing import Any, Final, TextIO

from analyzer.report.console import names
from analyzer.report.console.text import BAD, GOOD, INDENT, Line, heading, line, table, wrap
from analyzer.trace.compare import Comparison, ModuleRow
from analyzer.trace.events import Header
from analyzer.units import format_bytes, format_count

_LAYER: Final = re.compile(r"layers\.(\d+)")


def comparison(result: Comparison, header: Header, *, width: int) -> list[Line]:
    """Modules, totals and collectives of both sides, then the verdict of the check."""
    rows = _alike(result)
    modules = [[name, *_sizes(row)] for name, row in rows]
    totals = [[row.name, format_bytes(row.predicted), format_bytes(row.recorded), _percent(row.error)] for row in result.totals]
    lines = [
        *heading("Formulas against the recording", width=width),
        *wrap(_origin(header), width=width, first=INDENT, rest=INDENT),
        (),
    ]
    lines += table(["saved by a microbatch in", "formula", "recorded", "difference"], modules, align="lrrr", width=width)
    for name, row in rows:
        for text in _left_over(row):
            lines += wrap(f"{name}: {text}", width=width, first=INDENT, rest=INDENT * 2)
    lines += [line(f"{INDENT}{result.explained:.2%} of the recorded bytes have a formula of the same module and size"), ()]
    lines += [*table(["total", "formula", "recorded", "difference"], totals, align="lrrr", width=width), ()]
    for call in result.collectives:
        kind, group, elements, dtype = call.key
        text = f"{kind} over {group}, {format_count(elements)} × {dtype}: formula {call.predicted} calls, recorded {call.recorded}"
        lines += wrap(text, width=width, first=INDENT, rest=INDENT * 2)
    if result.failures:
        text, style = f"Beyond {result.tolerance:.2%}: " + "; ".join(result.failures), BAD
    else:
        text, style = f"Everything agrees within {result.tolerance:.2%}.", GOOD
    return [*lines, *wrap(text, width=width, first=INDENT, rest=INDENT, style=style)]


def print_comparison(result: Comparison, header: Header, *, stream: TextIO) -> None:
    """Writes the section to `stream` as the console's report is written."""
    from analyzer.report.console.report import print_lines

    print_lines(lambda width: comparison(result, header, width=width), stream=stream)


def write_comparison(result: Comparison, header: Header) -> str:
    """The JSON document as text."""
    return json.dumps(comparison_json(result, header), ensure_ascii=False, indent=1) + "\n"


def comparison_json(result: Comparison, header: Header) -> dict[str, Any]:
    """The same as plain data; sizes in bytes."""
    return {
        "schema": "training-info-check/1",
        "trace": {
            "recorder": header.recorder,
            "gpu": header.gpu,
            "rank": header.rank,
            "world_size": header.world_size,
            "versions": dict(header.versions),
        },
        "tolerance": result.tolerance,
        "passed": not result.failures,
        "failures": list(result.failures),
        "explained": result.explained,
        "modules": [
            {
                "module": row.module,
                "predicted_bytes": row.predicted,
                "recorded_bytes": row.recorded,
                "only_predicted": [
                    {
                        "name": tensor.name,
                        "shape": list(tensor.shape),
                        "dtype": tensor.dtype,
                        "bytes": tensor.bytes,
                        "formula": tensor.formula,
                    }
                    for tensor in row.only_predicted
                ],
                "only_recorded_bytes": list(row.only_recorded),
            }
            for row in result.modules
        ],
        "totals": [{"name": row.name, "predicted_bytes": row.predicted, "recorded_bytes": row.recorded} for row in result.totals],
        "collectives": [
            {
                **dict(zip(("kind", "group", "elements", "dtype"), row.key, strict=True)),
                "predicted": row.predicted,
                "recorded": row.recorded,
            }
            for row in result.collectives
        ],
    }


def _origin(header: Header) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    gpu = f" {'as on' if header.recorder == 'shadow' else 'on'} {header.gpu}" if header.gpu else ""
    return f"Recorded by the {header.recorder} recorder{gpu}, rank {header.rank} of {header.world_size}; {versions}."


def _alike(result: Comparison) -> list[tuple[str, ModuleRow]]:
    """Rows by name; layers whose figures are equal share one, named with the numbers of all of them."""
    merged: dict[object, tuple[list[int], ModuleRow]] = {}
    for row in result.modules:
        number = _LAYER.search(row.module)
        key = (_LAYER.sub("layers.*", row.module), row.predicted, row.recorded, row.only_recorded)
        numbers, _ = merged.setdefault(key, ([], row))
        if number:
            numbers.append(int(number[1]))
    return [
        (_LAYER.sub(f"layers.{names.numbers(numbers)}", row.module) if numbers else row.module, row)
        for numbers, row in merged.values()
    ]


def _sizes(row: ModuleRow) -> list[str]:
    return [format_bytes(row.predicted), format_bytes(row.recorded), format_bytes(row.difference) if row.difference else "0"]


def _left_over(row: ModuleRow) -> list[str]:
    found = [
        f"only the formula has {tensor.name} {list(tensor.shape)} {tensor.dtype}, {format_bytes(tensor.bytes)}"
        for tensor in row.only_predicted
    ]
    return found + [f"only the trace has a tensor of {format_bytes(size)}" for size in row.only_recorded]


def _percent(error: float) -> str:
    return "new" if error == float("inf") else f"{error:+.2%}"
