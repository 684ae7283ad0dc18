"""The command line: selects the action that the arguments request, and runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from analyzer.errors import FITS, AnalyzerError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. `argv` are the arguments without the name of the program.

    Exit status 0: the launch fits, or the GPU memory is not known. 1: a rank does not fit, or the verdict is one of those in
    `--info-fail-on`. 2: invalid or unsupported input. 3: a comparison failed. The environment, the working directory and the
    garbage collector of the process do not change. `--info-launch` replaces the process by the training.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except AnalyzerError as error:
        print(f"get_training_info: {error}", file=sys.stderr)
        return error.exit_code


def _run(argv: list[str]) -> int:
    from analyzer.cli.information import print_information
    from analyzer.launch.info_options import value_of

    if print_information(argv):
        return FITS
    environ, folder = dict(os.environ), Path.cwd()
    if "--info-print-options" in argv:
        from analyzer.cli.print_options import print_options

        return print_options(argv, environ=environ, folder=folder)
    trace = value_of("--info-check", argv)
    if trace is not None:
        from analyzer.cli.check import check_trace

        return check_trace(trace, argv, environ=environ, folder=folder)
    from analyzer.cli.predict import predict_launch

    return predict_launch(argv, environ=environ, folder=folder)
