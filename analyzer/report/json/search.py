"""The result of a search as JSON, and as a table for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from analyzer.layout_search.result import rows

if TYPE_CHECKING:
    from analyzer.layout_search.evaluation import Evaluation
    from analyzer.layout_search.related import Limit
    from analyzer.layout_search.result import SearchResult
    from analyzer.report.console.search_section import Question


def search_json(result: SearchResult, commands: Sequence[str] = ()) -> dict[str, Any]:
    """The field `search`. `commands`: command lines of the first layouts."""
    given = result.given

    def listed(each: Evaluation) -> dict[str, Any]:
        return {**_layout(each), "equals_first": result.equals_first(each)}

    return {
        "candidates": result.candidates,
        "evaluated": result.evaluated,
        "fitting": result.fitting,
        "seconds": result.seconds,
        "complete": result.complete,
        "error": result.error,
        "best": [listed(each) for each in result.best],
        "front": [listed(each) for each in result.front],
        "given": None if given is None else {"place": result.place, **_layout(given)},
        "smallest_change": None if result.smallest_change is None else _layout(result.smallest_change),
        "commands": list(commands),
    }


def _layout(each: Evaluation) -> dict[str, Any]:
    return {
        "options": each.options,
        "iteration_seconds": each.iteration_seconds,
        "device_bytes": each.device_bytes,
        "tight": each.tight,
        "tokens_per_second_per_gpu": each.tokens_per_second_per_gpu,
        "model_flops_utilization": each.model_flops_utilization,
        "parts_seconds": each.parts_seconds,
    }


def questions_json(questions: Sequence[Question]) -> list[dict[str, Any]]:
    """The field `searches`: one search for each GPU and number of GPUs."""
    return [
        {
            "gpu": each.gpu,
            "gpus": each.gpus,
            "training": None if each.training is None else asdict(each.training),
            **search_json(each.result),
        }
        for each in questions
    ]


def limit_json(limit: Limit) -> dict[str, Any]:
    """The field `largest`."""
    return limit._asdict()


def as_csv(result: SearchResult) -> str:
    """A line for each layout of a result, with a header."""
    found = rows(result)
    stream = io.StringIO()
    if found:
        writer = csv.DictWriter(stream, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    return stream.getvalue()
