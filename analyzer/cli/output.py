"""Writes reports to standard output and to files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from analyzer.errors import InputError

if TYPE_CHECKING:
    from analyzer.cli.shadow_report import Compared
    from analyzer.launch.info_options import InfoOptions
    from analyzer.report.against import Against
    from analyzer.results import Report


@contextmanager
def standard_output() -> Iterator[TextIO]:
    """Standard output, flushed at the end. Ignores a closed pipe. Raises InputError for other errors, such as a full disk."""
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        return
    except OSError as error:
        remedy = "free some space, or redirect the output to another place"
        raise InputError("standard output", f"cannot be written ({error.strerror})", remedy) from None


def write_report(report: Report, options: InfoOptions, compared: Sequence[Compared], against: Against | None = None) -> None:
    """Writes the JSON report if it was requested, and prints the console report unless the JSON report is printed.

    `against` are the changes since an older report. Raises InputError if a report cannot be written.
    """
    if options.json is not None:
        from analyzer.report.json.document import dumps, to_json, write_text

        document = dumps({**to_json(report), **_comparisons(compared), **_against(against)})
        if options.json == "-":
            with standard_output() as stream:
                stream.write(document)
            return
        write_text(document, options.json)
    from analyzer.report.console.report import print_report

    with standard_output() as stream:
        print_report(report, detail=options.detail, stream=stream)
        if compared:
            from analyzer.report.console.comparison_section import print_comparison

            for each in compared:
                print_comparison(each.comparison, each.header, stream=stream)
        if against is not None:
            from analyzer.report.console.against_section import print_against

            print_against(against, stream=stream)


def _comparisons(compared: Sequence[Compared]) -> dict[str, Any]:
    """The fields that `--info-engine both` adds to the JSON report."""
    if not compared:
        return {}
    from analyzer.report.console.comparison_section import comparison_json

    return {"comparisons": [comparison_json(each.comparison, each.header) for each in compared]}


def _against(against: Against | None) -> dict[str, Any]:
    """The field that `--info-against` adds to the JSON report."""
    if against is None:
        return {}
    from analyzer.report.against import against_json

    return {"against": against_json(against)}
