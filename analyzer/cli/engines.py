"""`--info-engine shadow|both`: the launch's step run without a GPU, one rank of each class."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from allocator_hook.shadow.engine import enough_microbatches, run
from analyzer.cli.shadow_report import Compared, comparisons, first_ranks, recorded_report
from analyzer.memory.allocator.caching_allocator import AllocatorSettings
from analyzer.predict import predict
from analyzer.results import Report


def run_engine(
    report: Report, *, engine: Literal["shadow", "both"], argv: Sequence[str], environ: Mapping[str, str], tolerance: float
) -> tuple[Report, tuple[Compared, ...]]:
    """The report with memory as the run showed it, and for `both` the formulas held against it. Raises AnalyzerError."""
    job = report.job
    traces = run(job, first_ranks(report), argv=argv, progress=_progress)
    ran = replace(report, engine=engine)
    recorded = replace(recorded_report(ran, traces, settings=AllocatorSettings.of(environ)), engine=engine)
    if engine == "shadow":
        return recorded, ()
    count = enough_microbatches(job)
    batch = replace(job.batch, microbatches=count, first_microbatches=count)
    return recorded, comparisons(predict(replace(job, batch=batch)), traces, tolerance=tolerance)


def _progress(done: int, total: int) -> None:
    """A line on the terminal that counts rank classes; nothing where standard error is no terminal."""
    if not sys.stderr.isatty():
        return
    width = 24
    bar = "█" * (width * done // max(1, total))
    end = "\r\x1b[K" if done == total else ""
    sys.stderr.write(f"\rrunning the step  {bar:░<{width}}  {done} of {total} rank classes{end}")
    sys.stderr.flush()
