"""The result of a search: the fastest layouts that fit, the front of memory and time, and the place of the launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from analyzer.layout_search.evaluation import Evaluation
from analyzer.results import Exported

if TYPE_CHECKING:
    import pandas


LIMIT: Final = "limit"
"""A search that its limit of time has ended."""
INTERRUPTED: Final = "interrupted"
"""A search that a KeyboardInterrupt has ended."""
ERROR_OF_ORDER: Final = 0.03
"""Share of an iteration by which the times of two layouts must differ so that the faster one is called faster.

It is the median difference of repeated measurements (docs/time.md). Layouts of one model have a part of the error in common, so
that the range of a single prediction would be too wide.
"""
STEP: Final = 0.02
"""Memory that the layouts of a printed front differ by, as a share."""


@dataclass(frozen=True, kw_only=True)
class SearchResult(Exported):
    """The layouts that a search found. Iterating gives those of `best` and `front`, ordered by time."""

    candidates: int
    """Layouts of the space whose sizes divide the number of GPUs and the batch."""
    evaluated: int
    """Layouts that were looked at one by one: first a better bound of their memory, then their exact time, then their exact memory.
    For all others a bound shows that they are not in the result."""
    fitting: int
    """Of these, layouts that fit and are not much slower than the fastest."""
    seconds: float
    """Duration of the search."""
    best: tuple[Evaluation, ...]
    """The fastest layouts that fit, the fastest first. They differ in more than recomputation and overlaps: for each parallel
    layout only the fastest of these is listed."""
    front: tuple[Evaluation, ...]
    """The layouts for which no other one is faster and needs no more memory, up to `FRONT` times the time of the fastest."""
    given: Evaluation | None
    """The launch itself; None if it does not fit."""
    smallest_change: Evaluation | None
    """If the launch does not fit, the fastest layout that fits among those that change the fewest dimensions."""
    error: float = 0.0
    """Share of the time by which layouts must differ so that one is called faster (`ERROR_OF_ORDER`)."""
    commands: tuple[str, ...] = ()
    """Command lines of the first layouts; empty if they were not asked for."""
    aim: str = "table"
    """What was searched for (`search.Aim`): with "fastest" only the first layout is proven to be among the fastest."""
    least_seconds: float = 0.0
    """A lower bound of the time of all layouts that fit: that of the first one, unless the search ended early."""
    ended: str = ""
    """Why the search ended before it was complete: `INTERRUPTED`, `LIMIT` with its seconds, or what happened to its workers. Empty
    if it was not."""

    @property
    def complete(self) -> bool:
        """Whether no layout that fits is faster than the first one; with the aim "table" also than the others of the result."""
        return not self.ended

    @property
    def gap(self) -> float:
        """Share of the time of the first layout by which another could be faster: 0 if the search is complete."""
        return 1 - self.least_seconds / self.best[0].iteration_seconds if self.best else 0.0

    def __iter__(self) -> Iterator[Evaluation]:
        found = {each.layout: each for each in (*self.best, *self.front)}
        return iter(sorted(found.values(), key=order))

    def equals_first(self, evaluation: Evaluation) -> bool:
        """Whether the time model cannot tell if the first layout is faster than this one."""
        return bool(self.best) and evaluation.iteration_seconds <= (1 + self.error) * self.best[0].iteration_seconds

    @property
    def place(self) -> int | None:
        """The place of the launch, from 1: one more than the listed layouts that are faster. None if all of them are, or if the
        launch does not fit."""
        if self.given is None:
            return None
        faster = sum(each.iteration_seconds < self.given.iteration_seconds for each in self.best)
        return faster + 1 if faster < len(self.best) else None

    def to_pandas(self) -> pandas.DataFrame:
        """A table with a row for each layout of the result. Raises ImportError without pandas."""
        import pandas

        return pandas.DataFrame(rows(self))


def order(evaluation: Evaluation) -> tuple[Any, ...]:
    """The key by which layouts are ordered: time, memory, and for equal layouts the number of changed options."""
    layout = evaluation.layout
    return (evaluation.iteration_seconds, evaluation.device_bytes, len(evaluation.options), layout.setting, str(layout))


def rows(result: SearchResult) -> list[dict[str, object]]:
    """The layouts of a result as flat records: changed options, time, memory and parts of the time."""
    best, front = set(map(_key, result.best)), set(map(_key, result.front))
    return [
        {
            "options": _options(each.options),
            "iteration_seconds": each.iteration_seconds,
            "tokens_per_second_per_gpu": each.tokens_per_second_per_gpu,
            "model_flops_utilization": each.model_flops_utilization,
            "device_bytes": each.device_bytes,
            "tight": each.tight,
            "equals_first": result.equals_first(each),
            "best": _key(each) in best,
            "front": _key(each) in front,
            **{f"{part}_seconds": seconds for part, seconds in each.parts_seconds.items()},
        }
        for each in result
    ]


def _key(evaluation: Evaluation) -> str:
    return str(evaluation.layout)


def _options(options: dict[str, object]) -> str:
    from analyzer.layout_search.options import as_text

    return as_text(options)


def distinct_front(result: SearchResult) -> tuple[Evaluation, ...]:
    """The layouts of the front that need at least `STEP` less memory than the one before them."""
    found: list[Evaluation] = []
    for each in result.front:
        if not found or each.device_bytes <= (1 - STEP) * found[-1].device_bytes:
            found.append(each)
    return tuple(found)


def front_of(evaluations: Sequence[Evaluation], limit: float) -> tuple[Evaluation, ...]:
    """The layouts of up to `limit` seconds for which no other one is as fast or faster and needs as much memory or less."""
    found: list[Evaluation] = []
    for each in sorted(evaluations, key=order):
        if each.iteration_seconds <= limit and (not found or each.device_bytes < found[-1].device_bytes):
            found.append(each)
    return tuple(found)
