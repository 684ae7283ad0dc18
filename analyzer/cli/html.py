"""`--info-html`: writes a report as a page for a browser."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from analyzer.cli.environment import Environment

if TYPE_CHECKING:
    from analyzer.api import Launch
    from analyzer.report.against import OldReport
    from analyzer.results import Report

OPTION: Final = "--info-html"
MORE: Final[Mapping[str, Any]] = MappingProxyType({})
"""No further fields."""


def write_html(
    report: Report, launch: Launch, path: str, *, argv: Sequence[str], old: Sequence[OldReport] = (), more: Mapping[str, Any] = MORE
) -> None:
    """Writes the page of a report, next to the older ones of `--info-against`. `more`: further fields of the JSON report.

    Raises InputError if Jinja2 is not installed, or if the file cannot be written.
    """
    from analyzer.report.html.page import extra_data, page
    from analyzer.report.json.document import to_json, write_text

    names = [_title(report), *(Path(each.file).name for each in old)]
    documents = [{**to_json(report), **more}, *(each.document for each in old)]
    inputs = None if launch.time is None or launch.time.flops_share is not None else launch.time
    text = page(documents, names, extra=extra_data(report, inputs), command=_command(argv, launch.environ))
    write_text(text, path, option=OPTION)


def _command(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """The command that writes the page again, after the environment variables that the analysis has read."""
    variables = environ.used if isinstance(environ, Environment) else {}
    return " ".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(["get-training-info", *argv])]
    )


def _title(report: Report) -> str:
    world = report.job.parallel.world_size
    gpu = report.job.hardware.name or "GPU"
    return f"{report.parameters / 1e9:,.1f} billion parameters on {world:,} × {gpu}"
