"""The result of a check: formulas compared with a trace."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TextIO

from analyzer.report.console import names
from analyzer.report.console.elements import BAD, GOOD, heading, paragraph, table
from analyzer.trace.compare import Comparison, ModuleRow
from analyzer.trace.events import Header
from analyzer.trace.kernels import KernelComparison, KernelKey
from analyzer.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import RenderableType

_LAYER: Final = re.compile(r"layers\.(\d+)")


def comparison(result: Comparison, header: Header) -> list[RenderableType]:
    """Modules, totals and collectives of both sides, then the result of the check."""
    rows = _equal(result)
    modules = [[name, *_sizes(row)] for name, row in rows]
    totals = [[row.name, format_bytes(row.predicted), format_bytes(row.recorded), _percent(row.error)] for row in result.totals]
    columns = ("formula", "recorded", "difference")
    lines = [*heading("Formulas compared with the recording"), paragraph(_origin(header)), ""]
    lines.append(table(("saved by one microbatch in", *columns), modules, align="lrrr"))
    lines += [paragraph(f"{name}: {text}") for name, row in rows for text in _unmatched(row)]
    lines += [paragraph(f"{result.explained:.2%} of the recorded bytes have a formula of the same module and size"), ""]
    lines += [table(("total", *columns), totals, align="lrrr"), ""]
    for call in result.collectives:
        kind, group, elements, dtype = call.key
        text = f"{kind} over {group}, {format_count(elements)} × {dtype}: formula {call.predicted} calls, recorded {call.recorded}"
        lines.append(paragraph(text))
    if result.kernels is not None:
        lines += _kernels(result.kernels)
    if result.failures:
        failed = f"Differences above {result.tolerance:.2%}: " + "; ".join(result.failures)
        return [*lines, paragraph(failed, style=BAD)]
    return [*lines, paragraph(f"Everything agrees within {result.tolerance:.2%}.", style=GOOD)]


def print_comparison(result: Comparison, header: Header, *, stream: TextIO) -> None:
    """Writes the section to `stream` as the console report is written."""
    from analyzer.report.console.report import write

    write(lambda _width: comparison(result, header), stream=stream)


def _kernels(found: KernelComparison) -> list[RenderableType]:
    """Shapes of GEMMs and attention that differ, then the total."""
    lines = []
    for row in found.rows:
        counts = f"formula {row.predicted.number:,} ({row.predicted.flops:.4g} FLOPs), recorded {row.recorded.number:,}"
        lines.append(paragraph(f"{_kernel_name(row.key)}: {counts} ({row.recorded.flops:.4g} FLOPs)"))
    equal = f"{found.shapes - len(found.rows)} of {found.shapes} shapes agree"
    total = f"formula {found.predicted_flops:.4g} FLOPs, recorded {found.recorded_flops:.4g} ({_percent(found.error)})"
    lines.append(paragraph(f"GEMMs and attention of an iteration: {total}; {equal}"))
    if any(found.recorded_traffic):
        passes = zip(("forward", "backward"), found.predicted_traffic, found.recorded_traffic, strict=True)
        moved = ", ".join(
            f"{name} formula {format_bytes(round(guess))}, recorded {format_bytes(round(real))}" for name, guess, real in passes
        )
        lines.append(paragraph(f"Bytes of memory-bound operations of an iteration: {moved}"))
    return [*lines, ""]


def _kernel_name(key: KernelKey) -> str:
    sizes = " × ".join(map(str, key.sizes))
    return f"{key.bits}-bit GEMM {sizes}" if key.kind == "gemm" else f"{key.kind} {sizes}"


def _origin(header: Header) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    gpu = f" {'as on' if header.recorder == 'shadow' else 'on'} {header.gpu}" if header.gpu else ""
    return f"Recorded by the {header.recorder} recorder{gpu}, rank {header.rank} of {header.world_size}; {versions}."


def _equal(result: Comparison) -> list[tuple[str, ModuleRow]]:
    """Rows by name. Layers with equal figures share a row, whose name has the numbers of all of them."""
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


def _unmatched(row: ModuleRow) -> list[str]:
    found = [
        f"only the formula has {tensor.name} {list(tensor.shape)} {tensor.dtype}, {format_bytes(tensor.bytes)}"
        for tensor in row.only_predicted
    ]
    return found + [f"only the trace has a tensor of {format_bytes(size)}" for size in row.only_recorded]


def _percent(error: float) -> str:
    return "new" if error == float("inf") else f"{error:+.2%}"
