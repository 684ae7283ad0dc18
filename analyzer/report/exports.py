"""Results as plain values for other programs, and as small tables for notebooks: the methods of `analyzer.results.Exported`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any, Final

from analyzer.results import Exported, Report
from analyzer.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas as pd

    from analyzer.inference.offload.estimate import OffloadReport
    from analyzer.inference.results import InferenceReport
    from analyzer.layout_search.result import SearchResult

ROWS: Final = 10
"""Most layouts of a search in a notebook."""


def to_dict(result: Exported) -> dict[str, Any]:
    """The document of `--info-json`; of a search its field `search`."""
    from analyzer.inference.offload.estimate import OffloadReport
    from analyzer.inference.results import InferenceReport
    from analyzer.report.json.document import to_json
    from analyzer.report.json.inference import inference_json
    from analyzer.report.json.offload import offload_json
    from analyzer.report.json.search import search_json

    if isinstance(result, Report):
        return to_json(result)
    if isinstance(result, InferenceReport):
        return inference_json(result)
    if isinstance(result, OffloadReport):
        return offload_json(result)
    return search_json(_as_search(result))


def to_pandas(report: Report) -> pd.DataFrame:
    """A row for each rank class. Raises ImportError without pandas."""
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


def to_html(result: Exported) -> str:
    """A small HTML table with the most important figures, without styles and scripts."""
    from analyzer.inference.offload.estimate import OffloadReport
    from analyzer.inference.results import InferenceReport

    if isinstance(result, Report):
        return _of_training(result)
    if isinstance(result, InferenceReport):
        return _of_inference(result)
    if isinstance(result, OffloadReport):
        return _of_offload(result)
    return _of_search(_as_search(result))


def _as_search(result: Exported) -> SearchResult:
    from analyzer.layout_search.result import SearchResult

    if not isinstance(result, SearchResult):
        raise TypeError(f"a {type(result).__name__} is not a result of this package")
    return result


def _of_training(report: Report) -> str:
    from analyzer.report.console.summary_section import key_rows
    from analyzer.report.console.verdict_section import one_line

    return _table(one_line(report), key_rows(report))


def _of_inference(report: InferenceReport) -> str:
    rows = [("device memory", format_bytes(report.highest.device_bytes)), ("parameters", f"{report.parameters:,}")]
    if report.limits is not None and report.limits.batch_size is not None:
        rows.append(("largest batch", f"{report.limits.batch_size:,}"))
    if report.time is not None:
        given = report.time.given
        rows += [("first token", format_seconds(given.prefill.total)), ("output token", format_seconds(given.decode.total))]
    return _table(_verdict(report.verdict.state, report.verdict.gpu), rows)


def _of_offload(report: OffloadReport) -> str:
    rows = [(tier.name, f"{tier.total / 1e9:,.0f} of {tier.capacity / 1e9:,.0f} GB") for tier in report.tiers]
    rows.append(("generation", f"{report.tokens_per_second:,.2f} tokens/s"))
    return _table(_verdict(report.verdict.state, report.verdict.gpu), rows)


def _verdict(state: str | None, gpu: str | None) -> str:
    return f"Generation: {state or 'no verdict'}{f' on {gpu}' if gpu else ''}"


def _of_search(result: SearchResult) -> str:
    from analyzer.layout_search.options import as_short_text

    names = ("", "iteration", "MFU", "memory", "changed options")
    rows = [
        (
            str(place),
            format_seconds(each.iteration_seconds),
            f"{each.model_flops_utilization:.1%}",
            format_bytes(each.device_bytes),
            as_short_text(each.options) or "your launch",
        )
        for place, each in enumerate(result.best[:ROWS], 1)
    ]
    return _table(f"The fastest of {result.candidates:,} layouts" if rows else "No layout fits", rows, names)


def _table(caption: str, rows: Sequence[Sequence[str]], names: Sequence[str] = ()) -> str:
    head = f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr></thead>" if names else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption>{head}<tbody>{body}</tbody></table>"


Exported.exports.update({"to_dict": to_dict, "to_pandas": to_pandas, "_repr_html_": to_html})
