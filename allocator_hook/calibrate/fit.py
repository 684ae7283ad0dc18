"""Efficiencies from measured times: those for which the time model deviates least from what was measured.

One efficiency is searched at a time: on a grid, and then by golden section around the best value. The deviation of a time is
|ln(predicted / measured)|, and above `SOFT` counts in full, so that single kernels do not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import exp, log, sqrt
from typing import Final, NamedTuple

from allocator_hook.calibrate.choose import TINY
from allocator_hook.calibrate.items import EXCHANGE, HostCalls, Item, Measured, Transfer, predicted_seconds
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.work.kernels import Attention, Gemm, MemoryBound

SOFT: Final = 0.05
GRID: Final = 25
GOLDEN: Final = (sqrt(5) - 1) / 2
SWEEPS: Final = 30
PRECISE: Final = 1e-4
"""Relative change of an efficiency below which the search ends."""
VARIED: Final = 4.0
"""Ratio of the largest to the smallest size from which the dependence on that size is derived."""
SHARE: Final = (0.01, 1.2)
"""Bounds of shares of a peak. Above 1 if a GPU is faster than its data sheet."""


class Search(NamedTuple):
    """An efficiency, its bounds, and when the measured items determine it together with others."""

    name: str
    low: float
    high: float
    determined: Callable[[Sequence[Item]], bool] = lambda _: True


class Step(NamedTuple):
    """Efficiencies that are derived from the same items."""

    items: Callable[[Item], bool]
    searches: tuple[Search, ...]
    least: int = 1
    """Items without which nothing is derived."""


def _share(name: str) -> Search:
    return Search(name, *SHARE)


def _varies(size: Callable[[Item], float]) -> Callable[[Sequence[Item]], bool]:
    """Whether a size of the items covers a range."""

    def found(items: Sequence[Item]) -> bool:
        sizes = [size(item) for item in items]
        return len(sizes) > 2 and max(sizes) >= VARIED * min(sizes)

    return found


def _depth(item: Item) -> float:
    return item.k if isinstance(item, Gemm) else 0.0


def _rows(item: Item) -> float:
    return item.rows if isinstance(item, Gemm) else 0.0


def _keys(item: Item) -> float:
    return item.keys if isinstance(item, Attention) else 0.0


def _bytes(item: Item) -> float:
    return item.payload if isinstance(item, Transfer) else 0.0


def _dense(precision: str) -> Callable[[Item], bool]:
    return lambda item: isinstance(item, Gemm) and not item.grouped and item.precision == precision


def _attention(name: str, *, equal: bool) -> Callable[[Item], bool]:
    def belongs(item: Item) -> bool:
        return isinstance(item, Attention) and item.name == name and (item.head_dim == item.value_dim) is equal

    return belongs


def _moves(*kinds: str) -> Callable[[Item], bool]:
    return lambda item: isinstance(item, MemoryBound) and item.kind in kinds and item != TINY


def _transfers(*, inside: bool, exchange: bool) -> Callable[[Item], bool]:
    def belongs(item: Item) -> bool:
        return isinstance(item, Transfer) and item.inside is inside and (item.kind == EXCHANGE) is exchange

    return belongs


def _sizes_of_groups(items: Sequence[Item]) -> bool:
    return len({item.ranks for item in items if isinstance(item, Transfer)}) > 1


_LATENCIES: Final = (
    Search("latency", 1e-7, 1e-2, _varies(_bytes)),
    Search("latency_rank", 1e-8, 1e-2, lambda items: _varies(_bytes)(items) and _sizes_of_groups(items)),
)
STEPS: Final = (
    Step(lambda item: item == TINY, (Search("kernel_gap", 1e-7, 1e-4),)),
    Step(_moves("elementwise", "cast"), (_share("memory"),)),
    Step(_moves("permute"), (_share("memory_permute"),)),
    Step(
        _dense("16"),
        (
            _share("gemm_16"),
            Search("gemm_half_depth", 1.0, 2000.0, _varies(_depth)),
            Search("gemm_traffic", 0.01, 1.5, _varies(_depth)),
        ),
        least=2,
    ),
    Step(_dense("8"), (_share("gemm_8"),)),
    Step(_dense("32"), (_share("gemm_32"),)),
    Step(
        lambda item: isinstance(item, Gemm) and item.grouped and item.precision in ("16", "8"),
        (Search("gemm_half_rows", 1.0, 4000.0, _varies(_rows)),),
        least=3,
    ),
    Step(
        _attention("forward", equal=True),
        (Search("attention", 0.01, 4.0), Search("attention_half_sequence", 10.0, 10_000.0, _varies(_keys))),
    ),
    Step(_attention("backward", equal=True), (Search("attention_backward", 0.05, 2.0),)),
    Step(_attention("backward", equal=False), (Search("attention_unequal_heads", 0.05, 2.0),)),
    Step(lambda item: isinstance(item, HostCalls), (Search("host_call", 1e-7, 1e-2),)),
    Step(_transfers(inside=True, exchange=False), (_share("nvlink"), *_LATENCIES)),
    Step(_transfers(inside=True, exchange=True), (_share("expert_nvlink"),)),
    Step(_transfers(inside=False, exchange=False), (_share("network"),)),
    Step(_transfers(inside=False, exchange=True), (_share("expert_network"),)),
)
"""In an order in which a step needs only efficiencies of steps before it, and shipped ones."""
MEASURABLE: Final = tuple(search.name for step in STEPS for search in step.searches)


def fit(measured: Sequence[Measured], speed: SpeedSpec, shipped: Efficiencies) -> dict[str, float]:
    """The efficiencies that the measured times determine, by name. The others stay as they are in `shipped`."""
    rates = shipped
    found: dict[str, float] = {}
    for step in STEPS:
        rows = [each for each in measured if step.items(each.item)]
        if len(rows) < step.least:
            continue
        items = [each.item for each in rows]
        searches = [search for search in step.searches if search.determined(items)]
        rates = _descended(rows, searches, speed, rates)
        found |= {search.name: getattr(rates, search.name) for search in searches}
    return found


def _descended(rows: Sequence[Measured], searches: Sequence[Search], speed: SpeedSpec, rates: Efficiencies) -> Efficiencies:
    """`rates` with the efficiencies of `searches` replaced, each in turn until none changes."""

    def loss(others: Efficiencies, name: str, value: float) -> float:
        candidate, total = _with(others, name, value), 0.0
        for each in rows:
            error = log(predicted_seconds(each.item, speed, candidate) / each.seconds) / SOFT
            total += sqrt(1 + error * error)
        return total

    for _ in range(SWEEPS):
        change = 0.0
        for search in searches:
            value = _best(partial(loss, rates, search.name), search.low, search.high)
            change = max(change, abs(log(value / getattr(rates, search.name))))
            rates = _with(rates, search.name, value)
        if change < PRECISE or len(searches) == 1:
            break
    return rates


def _with(rates: Efficiencies, name: str, value: float) -> Efficiencies:
    return replace(rates, **{name: value})


def _best(loss: Callable[[float], float], low: float, high: float) -> float:
    """The value between `low` and `high` with the least loss; both are above 0, and the search is on a logarithmic scale."""
    step = log(high / low) / (GRID - 1)
    start = log(low)
    place = min(range(GRID), key=lambda each: loss(exp(start + each * step)))
    left, right = start + max(0, place - 1) * step, start + min(GRID - 1, place + 1) * step
    first, second = right - GOLDEN * (right - left), left + GOLDEN * (right - left)
    of_first, of_second = loss(exp(first)), loss(exp(second))
    while right - left > PRECISE / 10:  # the golden ratio makes one of the inner points that of the next round
        if of_first <= of_second:
            right, second, of_second = second, first, of_first
            first = right - GOLDEN * (right - left)
            of_first = loss(exp(first))
        else:
            left, first, of_first = first, second, of_second
            second = left + GOLDEN * (right - left)
            of_second = loss(exp(second))
    return exp((left + right) / 2)
