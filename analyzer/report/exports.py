"""A report as plain values for other programs: a dictionary, and a table of its ranks for pandas."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from analyzer.inference.offload.estimate import OffloadReport
    from analyzer.inference.results import InferenceReport
    from analyzer.results import Report


def as_dict(report: Report | InferenceReport | OffloadReport) -> dict[str, Any]:
    """The document that `--info-json` writes, as dictionaries, lists, texts and numbers. docs/json.md explains its fields.

    `report` is the result of `analyze`, `analyze_config`, `analyze_inference` or `analyze_offload`. Sizes are in bytes, times in
    seconds. `newest_release` is None: only the command compares releases. Raises TypeError for another object.
    """
    from analyzer.inference.offload.estimate import OffloadReport
    from analyzer.inference.results import InferenceReport
    from analyzer.report.json.document import to_json
    from analyzer.report.json.inference import inference_json
    from analyzer.report.json.offload import offload_json
    from analyzer.results import Report

    if isinstance(report, Report):
        return to_json(report)
    if isinstance(report, InferenceReport):
        return inference_json(report)
    if isinstance(report, OffloadReport):
        return offload_json(report)
    raise TypeError(f"a {type(report).__name__} is not a report of this package")


def ranks_as_frame(report: Report) -> pd.DataFrame:
    """The memory of a training as a pandas DataFrame, one row for each rank class, which are ranks with equal memory.

    Columns: `ranks` (such as "0-3, 8-11"), `number_of_ranks`, `pipeline_rank`, `parameters`, and the sizes of `RankMemory` in
    bytes. Raises ImportError without pandas.
    """
    import pandas as pd

    rows = []
    for rank in report.ranks:
        sizes = {each.name: getattr(rank.memory, each.name) for each in fields(rank.memory)}
        spans = (f"{first}-{last}" if last > first else f"{first}" for first, last in rank.ranks)
        rows.append(
            {
                "ranks": ", ".join(spans),
                "number_of_ranks": sum(last - first + 1 for first, last in rank.ranks),
                "pipeline_rank": rank.pipeline_rank,
                "parameters": rank.parameters,
                **{name: size for name, size in sizes.items() if name.endswith("_bytes") and isinstance(size, int)},
            }
        )
    return pd.DataFrame(rows)
