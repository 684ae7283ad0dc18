"""Whether it fits, by how much, and what would help."""

from __future__ import annotations

from analyzer.memory.verdict import highest
from analyzer.report.console.text import BAD, GOOD, INDENT, KEY, Line, heading, line, wrap
from analyzer.results import Report
from analyzer.units import format_bytes


def verdict(report: Report, *, width: int) -> list[Line]:
    """One sentence with the highest-memory rank, its need, the capacity and the headroom; then advice where there is any."""
    result = report.verdict
    tightest = highest(report.ranks)
    need = f"rank {result.tightest_rank} (stage {tightest.pipeline_rank}) takes {format_bytes(tightest.memory.device_bytes)}"
    if result.fits is None or result.capacity_bytes is None or result.headroom_bytes is None:
        text, style = f"No verdict: the GPU is not known. The highest-memory rank: {need}.", KEY
    else:
        of = f"of {format_bytes(result.capacity_bytes)}" + (f" ({result.gpu})" if result.gpu else "")
        share = abs(result.headroom_bytes) / result.capacity_bytes
        percent = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        free = f"{format_bytes(result.headroom_bytes)} ({percent}) stay free"
        missing = f"{format_bytes(-result.headroom_bytes)} ({percent}) are missing"
        if result.state == "tight":
            least, most = (format_bytes(end) for end in tightest.memory.device_range_bytes)
            likely = f"by the estimate {free if result.fits else missing}"
            text, style = f"It is tight: {need} {of}, give or take: between {least} and {most}; {likely}.", KEY
        elif result.fits:
            text, style = f"It fits: {need} {of}; {free}.", GOOD
        else:
            text, style = f"It does not fit: {need} {of}; {missing}.", BAD
    lines = [*heading("Does it fit", width=width), *wrap(text, width=width, first=INDENT, rest=INDENT, style=style)]
    if result.note:
        lines.extend(wrap(result.note, width=width, first=INDENT, rest=INDENT))
    return [*lines, *_advice(report, width=width)]


def _advice(report: Report, *, width: int) -> list[Line]:
    if not report.advice:
        return []
    fits = [advice for advice in report.advice if advice.fits]
    one = "This would make it fit:" if len(fits) == 1 else "Any one of these would make it fit:"
    title = one if fits else "No one or two changes of flags are enough; these save most:"
    lines: list[Line] = [(), line(INDENT + title)]
    for advice in report.advice:
        lines.extend(wrap(advice.change, width=width, first=INDENT * 2, rest=INDENT * 3, style=KEY))
        saving = f"saves {format_bytes(advice.saves_bytes)}, the highest-memory rank then takes {format_bytes(advice.device_bytes)}"
        lines.append(line(f"{INDENT * 3}{saving}"))
    return lines
