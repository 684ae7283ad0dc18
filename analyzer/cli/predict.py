"""The report of a launch. On request the launch is also recorded, run by the shadow engine, or started."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analyzer.api import read_launch, report_of, with_faster
from analyzer.cli.newest_release import with_newest_release
from analyzer.cli.output import write_report
from analyzer.errors import CHECK_FAILED, DOES_NOT_FIT, FITS
from analyzer.results import Report, Verdict

if TYPE_CHECKING:
    from analyzer.cli.shadow_report import Compared
    from analyzer.report.against import Against, OldReport


def predict_launch(argv: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> int:
    """Predicts a launch, prints the report and returns the exit status. Raises AnalyzerError."""
    launch = read_launch(argv, environ=environ, folder=folder)
    options = launch.options
    old: list[OldReport] = []
    if options.against:
        from analyzer.report.against import read_old

        old = [read_old(file) for file in options.against]
    log = None
    if options.log is not None:
        from analyzer.time.run_log.read import read_log

        log = read_log(options.log)
    report = with_newest_release(report_of(launch), launch, argv, environ=environ, folder=folder)
    if options.faster:
        report = with_faster(report, launch)
    command = ("get_training_info.py", *argv)
    if options.record is not None:
        from analyzer.cli.record import record_rank

        record_rank(report, options, command)
    compared: tuple[Compared, ...] = ()
    if options.engine != "formula":
        from analyzer.cli.shadow import run_engine

        report, compared = run_engine(report, engine=options.engine, argv=command, environ=environ, tolerance=options.tolerance)
    if options.timeline is not None:
        from analyzer.cli.timeline import write_timeline

        write_timeline(report, launch, options.timeline)
    if options.html is not None:
        from analyzer.cli.html import write_html

        write_html(report, launch, options.html, argv=argv, old=old)
    measured = None
    if log is not None:
        from analyzer.time.run_log.compare import compare_log

        measured = compare_log(log, report, launch.time)
    write_report(report, options, compared, [changes_since(each, report) for each in old], measured)
    if any(each.comparison.failures for each in compared):
        return CHECK_FAILED
    if fails(report.verdict, options.fail_on):
        return DOES_NOT_FIT
    if options.launch:
        from analyzer.cli.start import start_training

        start_training(argv, folder=folder, has_verdict=report.verdict.fits is not None)
    return FITS


def changes_since(old: OldReport, report: Report) -> Against:
    """What changed since a report in `--info-against`."""
    from analyzer.report.against import compare

    return compare(old, report)


def fails(verdict: Verdict, fail_on: Collection[str]) -> bool:
    """Whether a launch ends with the exit status of one that does not fit. `fail_on` is the list in `--info-fail-on`."""
    if verdict.fits is None:
        return "unknown" in fail_on
    return not verdict.fits or (verdict.state == "tight" and "tight" in fail_on)
