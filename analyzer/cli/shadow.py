"""`--info-engine shadow|both`: runs megatron-core on tensors without data, for one rank of each rank class."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from allocator_hook.shadow.engine import enough_microbatches, run
from analyzer.cli.shadow_report import Compared, comparisons, recorded_ranks, recorded_report
from analyzer.memory.allocator.settings import AllocatorSettings
from analyzer.predict import predict
from analyzer.results import Report


def run_engine(
    report: Report, *, engine: Literal["shadow", "both"], argv: Sequence[str], environ: Mapping[str, str], tolerance: float
) -> tuple[Report, tuple[Compared, ...]]:
    """The report with the memory of the run and, for `both`, a comparison with the formulas. Raises AnalyzerError."""
    job = report.job
    with _progress() as progress:
        traces = run(job, recorded_ranks(report), argv=argv, progress=progress)
    ran = replace(report, engine=engine)
    recorded = replace(recorded_report(ran, traces, settings=AllocatorSettings.of(environ)), engine=engine)
    if engine == "shadow":
        return recorded, ()
    count = enough_microbatches(job)
    batch = replace(job.batch, microbatches=count, first_microbatches=count)
    return recorded, comparisons(predict(replace(job, batch=batch)), traces, tolerance=tolerance)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Shows the number of completed rank classes on standard error, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield _show_nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("running the step"), BarColumn(), MofNCompleteColumn(), TextColumn("rank classes"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show_nothing(_done: int, _total: int) -> None:
    """Used if standard error is not a terminal."""
