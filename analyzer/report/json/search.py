"""The result of a search as JSON, and as a table for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from analyzer.layout_search.evaluation import Evaluation
from analyzer.layout_search.extremes import Extreme
from analyzer.layout_search.related import Limit, Question
from analyzer.layout_search.result import SearchResult, rows
from analyzer.report.json.encoder import SPREAD, Formats, encode, named, own_fields


class Listed(NamedTuple):
    """A layout of a list."""

    evaluation: Evaluation
    equals_first: bool


class OfGpu(NamedTuple):
    """The answer for a GPU."""

    gpu: str
    extreme: Extreme


class Given(NamedTuple):
    """The layout of the launch."""

    place: int | None
    evaluation: Evaluation


def search_json(result: SearchResult) -> dict[str, Any]:
    """The field `search`."""
    document: dict[str, Any] = encode(result, FORMATS)
    return document


def questions_json(questions: Sequence[Question]) -> list[dict[str, Any]]:
    """The field `searches`: one search for each GPU and number of GPUs."""
    found: list[dict[str, Any]] = encode(questions, FORMATS)
    return found


def extremes_json(extremes: Sequence[tuple[str, Extreme]]) -> list[dict[str, Any]]:
    """The field `extremes`: the answer for each GPU."""
    found: list[dict[str, Any]] = encode([OfGpu(gpu, extreme) for gpu, extreme in extremes], FORMATS)
    return found


def limit_json(limit: Limit) -> dict[str, Any]:
    """The field `largest`."""
    document: dict[str, Any] = encode(limit, FORMATS)
    return document


def _best(result: SearchResult) -> list[Listed]:
    return [Listed(each, result.equals_first(each)) for each in result.best]


def _front(result: SearchResult) -> list[Listed]:
    return [Listed(each, result.equals_first(each)) for each in result.front]


def _given(result: SearchResult) -> Given | None:
    return None if result.given is None else Given(result.place, result.given)


FORMATS: Final[Formats] = {
    SearchResult: {
        **named("candidates evaluated fitting seconds complete aim gap error"),
        "best": _best,
        "front": _front,
        "given": _given,
        **named("smallest_change commands"),
    },
    Evaluation: own_fields(Evaluation, without="layout"),
    Listed: {SPREAD: "evaluation", "equals_first": "equals_first"},
    Given: {"place": "place", SPREAD: "evaluation"},
    OfGpu: {"gpu": "gpu", SPREAD: "extreme"},
    Question: {**named("gpu gpus training"), SPREAD: "result"},
}


def as_csv(result: SearchResult) -> str:
    """A line for each layout of a result, with a header."""
    found = rows(result)
    stream = io.StringIO()
    if found:
        writer = csv.DictWriter(stream, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    return stream.getvalue()
