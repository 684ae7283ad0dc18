"""`--info-timeline`: writes an iteration as a timeline for a trace viewer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.errors import InputError

if TYPE_CHECKING:
    from analyzer.api import Launch
    from analyzer.results import Report

OPTION = "--info-timeline"


def write_timeline(report: Report, launch: Launch, path: str) -> None:
    """Writes the timeline of a launch. Raises InputError if its time is not known, or if the file cannot be written."""
    inputs = launch.time
    if inputs is None:
        name = report.job.hardware.name
        what = "none is named" if name is None else f"those of {name} are not known"
        remedy = "add --info-gpu NAME, such as H100-80GB, or --info-hardware FILE"
        raise InputError(OPTION, f"a timeline needs the speeds of a GPU, and {what}", remedy)
    if inputs.flops_share is not None:
        raise InputError(OPTION, "does not use the simple time model of --info-efficiency", "leave one of the two out")
    from analyzer.report.json.document import write_text
    from analyzer.report.timeline import text_of
    from analyzer.time.estimate import iteration_of, rates_of
    from analyzer.time.timeline.iteration import iteration_timeline

    timeline = iteration_timeline(report.job, iteration_of(report, inputs), inputs.speed, rates_of(inputs))
    title = f"{report.job.hardware.name or 'GPU'}, {report.job.parallel.world_size:,} ranks"
    write_text(text_of(timeline, title=title), path, option=OPTION)
