"""`--info-check`: compares the formulas with a recorded trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from analyzer.api import read_launch
from analyzer.cli.output import standard_output
from analyzer.errors import CHECK_FAILED, FITS, InputError
from analyzer.files import refuse_special_file
from analyzer.launch.parse import words_of_launch
from analyzer.predict import predict
from analyzer.report.console.comparison_section import print_comparison
from analyzer.report.json.check import write_comparison
from analyzer.report.json.document import encodable, write_text
from analyzer.time.predicted_kernels import predicted_kernels
from analyzer.trace.check import as_recorded, check
from analyzer.trace.reader import Trace, read_complete_trace

OPTION = "--info-check"
ALLOW_TRUNCATED = "--info-allow-truncated"


def check_trace(path: str, argv: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> int:
    """Compares the formulas with the trace at `path`, prints the result and returns the exit status.

    The launch of the trace is used if `argv` contains no launch. Raises AnalyzerError.
    """
    trace = _read(path, allow_truncated=ALLOW_TRUNCATED in argv)
    launch = read_launch(
        words_of_launch(argv, recorded=trace.header.argv),
        environ=environ,
        folder=folder,
        default_gpu=trace.header.gpu or None,
    )
    options = launch.options
    given = {
        "--info-record": options.record is not None,
        "--info-engine": options.engine != "formula",
        "--info-fail-on": bool(options.fail_on),
        "--info-against": bool(options.against),
        "--info-log": options.log is not None,
    }
    if others := [name for name in given if given[name]]:
        raise InputError(OPTION, f"cannot be combined with {others[0]}", "use only one of them")
    report = predict(as_recorded(launch.job, trace.header))
    found = check(report, trace, tolerance=options.tolerance, kernels=partial(predicted_kernels, report.job))
    with standard_output() as stream:
        if options.json == "-":
            stream.write(encodable(write_comparison(found, trace.header, launch.command), stream.encoding))
        else:
            print_comparison(found, trace.header, stream=stream)
    if options.json not in (None, "-"):
        write_text(write_comparison(found, trace.header, launch.command), str(options.json))
    return CHECK_FAILED if found.failures else FITS


def _read(path: str, *, allow_truncated: bool) -> Trace:
    refuse_special_file(path, OPTION, "give a trace written by --info-record")
    try:
        return read_complete_trace(path, allow_truncated=allow_truncated)
    except OSError as error:
        raise InputError(OPTION, f"cannot read '{path}' ({error.strerror})", "give a trace written by --info-record") from None
