"""The report of an inference launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analyzer.cli.output import standard_output, write_json
from analyzer.cli.predict import fails
from analyzer.errors import DOES_NOT_FIT, FITS
from analyzer.inference.estimate import inference_report
from analyzer.inference.reading import InferenceLaunch, read_inference

if TYPE_CHECKING:
    from analyzer.launch.inference.offload_options import Offload


def analyze_inference(argv: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> int:
    """Predicts an inference launch, prints the report and returns the exit status. Raises AnalyzerError."""
    launch = read_inference(argv, environ=environ, folder=folder)
    if launch.options.offload is not None:
        return _analyze_offload(launch, launch.options.offload, argv, environ)
    report = inference_report(
        launch.job, launch.time, note=launch.note, command=launch.command, target=launch.options.serving_search
    )
    if launch.options.html is not None:
        from analyzer.cli.html import write_inference_html

        write_inference_html(report, launch, launch.options.html, argv=argv, environ=environ)
    printed = False
    if launch.options.json is not None:
        from analyzer.report.json.inference import inference_json

        printed = write_json(inference_json(report), launch.options.json)
    if not printed:
        from analyzer.report.console.inference_section import inference_sections
        from analyzer.report.console.report import write

        with standard_output() as stream:
            write(lambda _: inference_sections(report), stream=stream)
    return DOES_NOT_FIT if fails(report.verdict, launch.options.fail_on) else FITS


def _analyze_offload(launch: InferenceLaunch, offload: Offload, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Predicts generation with offloading, prints the report and returns the exit status. Raises AnalyzerError."""
    from analyzer.inference.offload.estimate import report_of_launch

    report = report_of_launch(launch, offload)
    if launch.options.html is not None:
        from analyzer.cli.html import write_offload_html

        write_offload_html(report, launch, launch.options.html, argv=argv, environ=environ)
    printed = False
    if launch.options.json is not None:
        from analyzer.report.json.offload import offload_json

        printed = write_json(offload_json(report), launch.options.json)
    if not printed:
        from analyzer.report.console.offload_section import offload_sections
        from analyzer.report.console.report import write

        with standard_output() as stream:
            write(lambda _: offload_sections(report), stream=stream)
    return DOES_NOT_FIT if fails(report.verdict, launch.options.fail_on) else FITS
