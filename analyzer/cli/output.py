"""Writes reports to standard output and to files.

Everything that is printed passes `print_message` or `standard_output`, which show control characters as escapes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from analyzer.errors import InputError
from analyzer.report.visible import visible

if TYPE_CHECKING:
    from analyzer.cli.shadow_report import Compared
    from analyzer.launch.info_options import InfoOptions
    from analyzer.report.against import Against
    from analyzer.results import Report
    from analyzer.time.run_log.compare import LogComparison


LONGEST_WORD: Final = 400
"""Characters of a word in a message. Longer words, such as numbers of thousands of digits, are shortened."""


def print_message(text: str) -> None:
    """Prints a message on standard error, as one line without control characters. Nothing if standard error is closed."""
    if sys.stderr is None:
        return
    line = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda found: f"{found[0][:100]}…{found[0][-20:]}", text)
    if not line.isprintable():
        line = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)
    with suppress(OSError):
        print(f"get-training-info: {line}", file=sys.stderr)


class _VisibleOutput:
    """A stream that shows control characters as escapes. `drawn` is the stream itself, for text with the colours of rich."""

    def __init__(self, stream: TextIO) -> None:
        self.drawn = stream

    def write(self, text: str) -> int:
        return self.drawn.write(visible(text, lines=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drawn, name)


@contextmanager
def standard_output() -> Iterator[TextIO]:
    """Standard output without control characters, flushed at the end.

    Ignores a closed pipe. Raises InputError for other errors, such as a full disk.
    """
    if sys.stdout is None:
        raise InputError("standard output", "is closed", "redirect it to a file or to /dev/null")
    try:
        yield cast(TextIO, _VisibleOutput(sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:
        return
    except OSError as error:
        remedy = "free some space, or redirect the output to another place"
        raise InputError("standard output", f"cannot be written ({error.strerror})", remedy) from None


def write_report(
    report: Report,
    options: InfoOptions,
    compared: Sequence[Compared],
    against: Sequence[Against] = (),
    log: LogComparison | None = None,
) -> None:
    """Writes the JSON report if it was requested, and prints the console report unless the JSON report is printed.

    `against` are the changes since older reports; the JSON report has those since the first one. `log`: the log of a run beside
    the prediction. Raises InputError if a report cannot be written.
    """
    if options.json is not None:
        from analyzer.report.json.document import to_json

        if write_json({**to_json(report), **_comparisons(compared), **_log(log), **_against(against)}, options.json):
            return
    from analyzer.report.console.report import print_report

    with standard_output() as stream:
        print_report(report, detail=options.detail, stream=stream)
        if compared:
            from analyzer.report.console.comparison_section import print_comparison

            for each in compared:
                print_comparison(each.comparison, each.header, stream=stream)
        if log is not None:
            from analyzer.report.console.log_section import print_log

            print_log(log, stream=stream)
        for changes in against:
            from analyzer.report.console.against_section import print_against

            print_against(changes, stream=stream)


def write_json(document: dict[str, Any], path: str) -> bool:
    """Writes a JSON document to a file, or to standard output if `path` is '-'. Returns whether it went to standard output."""
    from analyzer.report.json.document import dumps, encodable, write_text

    text = dumps(document)
    if path != "-":
        write_text(text, path)
        return False
    with standard_output() as stream:
        stream.write(encodable(text, stream.encoding))
    return True


def _comparisons(compared: Sequence[Compared]) -> dict[str, Any]:
    """The fields that `--info-engine both` adds to the JSON report."""
    if not compared:
        return {}
    from analyzer.report.json.check import comparison_json

    return {"comparisons": [comparison_json(each.comparison, each.header) for each in compared]}


def _log(log: LogComparison | None) -> dict[str, Any]:
    """The field that `--info-log` adds to the JSON report."""
    if log is None:
        return {}
    from analyzer.report.json.log import log_json

    return {"log": log_json(log)}


def _against(against: Sequence[Against]) -> dict[str, Any]:
    """The field that `--info-against` adds to the JSON report."""
    if not against:
        return {}
    from analyzer.report.json.against import against_json

    return {"against": against_json(against[0])}
