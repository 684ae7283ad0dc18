"""Compares the kernels of the formulas with those of a recorded iteration: GEMMs and attention by shape, others by their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from analyzer.trace.events import AttentionCall, GemmCall, KernelCall, MemoryCall

KernelKind = Literal["gemm", "attention forward", "attention backward"]


class KernelKey(NamedTuple):
    """Kernels that are compared as equal."""

    kind: KernelKind
    bits: int
    """Bits of an element of the factors of a GEMM; 0 for attention."""
    sizes: tuple[int, ...]
    """GEMM: the smaller and the larger of m and n, then k: the transposed product has m and n exchanged.

    Attention: batch, heads, queries, keys, elements of a head of queries and of values; only the last two if context parallelism
    computes it in steps, whose number and sizes depend on the kind of exchange.
    """


class KernelTotal(NamedTuple):
    """The kernels of an iteration with one key."""

    number: int
    """Matrix products, or calls of attention."""
    flops: float


Kernels = Mapping[KernelKey, KernelTotal]

OUTSIDE_PASSES: Final = frozenset({"mul_", "zero_", "linalg_vector_norm"})
"""Memory-bound operations on whole gradient buffers, which run between the passes: scaling, clearing, and the search for NaN."""


class Traffic(NamedTuple):
    """Bytes that the memory-bound operations of the passes of an iteration read and write."""

    forward: float
    backward: float
    """With recomputation."""


@dataclass(frozen=True, kw_only=True)
class PredictedKernels:
    """Kernels of an iteration on a rank by the formulas."""

    totals: Kernels
    traffic: Traffic
    attention_in_steps: bool
    """Context parallelism splits the attention of a layer into several kernels."""


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """Kernels of one shape on both sides."""

    key: KernelKey
    predicted: KernelTotal
    recorded: KernelTotal


@dataclass(frozen=True, kw_only=True)
class KernelComparison:
    """The kernels of an iteration on both sides."""

    rows: tuple[KernelRow, ...]
    """Shapes whose number or FLOPs differ."""
    shapes: int
    """Number of different shapes of both sides together."""
    predicted_flops: float
    recorded_flops: float
    predicted_traffic: Traffic
    recorded_traffic: Traffic

    @property
    def error(self) -> float:
        """(predicted - recorded) / recorded FLOPs; 0 if both are 0."""
        if self.predicted_flops == self.recorded_flops:
            return 0.0
        return (self.predicted_flops - self.recorded_flops) / self.recorded_flops if self.recorded_flops else float("inf")


def gemm_key(m: int, n: int, k: int, *, bits: int) -> KernelKey:
    """The key of a GEMM."""
    return KernelKey("gemm", bits, (min(m, n), max(m, n), k))


def attention_key(
    direction: Literal["forward", "backward"],
    split: tuple[int, int, int, int],
    widths: tuple[int, int],
    *,
    in_steps: bool,
) -> KernelKey:
    """The key of an attention kernel. `split`: batch, heads, queries, keys. `widths`: elements of a head of queries and values."""
    return KernelKey(
        "attention forward" if direction == "forward" else "attention backward", 0, (*(() if in_steps else split), *widths)
    )


def add_up(kernels: Iterable[tuple[KernelKey, KernelTotal]]) -> Kernels:
    """Sums of kernels with the same key."""
    found: dict[KernelKey, KernelTotal] = {}
    for key, total in kernels:
        before = found.get(key, KernelTotal(0, 0))
        found[key] = KernelTotal(before.number + total.number, before.flops + total.flops)
    return found


def recorded_kernels(calls: Counter[KernelCall], *, attention_in_steps: bool) -> Kernels:
    """The kernels of a recorded iteration by shape."""
    found = []
    for call, times in calls.items():
        if isinstance(call, GemmCall):
            number = call.products * times
            total = KernelTotal(number, 2.0 * number * call.m * call.n * call.k)
            found.append((gemm_key(call.m, call.n, call.k, bits=call.bits), total))
        elif isinstance(call, AttentionCall):
            split = (call.batch, call.heads, call.queries, call.keys)
            key = attention_key(call.direction, split, (call.head_dim, call.value_dim), in_steps=attention_in_steps)
            found.append((key, KernelTotal(times, times * attention_flops(call))))
    return add_up(found)


def recorded_traffic(calls: Counter[KernelCall]) -> Traffic:
    """Bytes of the recorded memory-bound operations. Those between the passes are not counted."""
    sums = {"forward": 0.0, "backward": 0.0}
    for call, times in calls.items():
        if isinstance(call, MemoryCall) and not (call.direction == "forward" and call.name in OUTSIDE_PASSES):
            sums[call.direction] += call.bytes * times
    return Traffic(**sums)


def attention_flops(call: AttentionCall) -> float:
    """FLOPs of an attention kernel. The backward computes five products where the forward computes two."""
    forward = 2 * call.batch * call.heads * attended_pairs(call) * (call.head_dim + call.value_dim)
    return forward if call.direction == "forward" else 2.5 * forward


def attended_pairs(call: AttentionCall) -> float:
    """Pairs of a query and a key that attend to each other, for one head and sample. The diagonal counts half, as is usual."""
    queries, keys, window = call.queries, call.keys, call.window
    if not call.causal:
        return queries * keys
    causal = queries * keys - queries * min(queries, keys) / 2
    if window < 0 or window >= keys - 1:
        return causal
    missing = max(0, window - (keys - queries))  # keys before the first one, for the first query
    return min(causal, queries * (window + 1) - missing * (missing + 1) / 2)


def compare_kernels(predicted: PredictedKernels, calls: Counter[KernelCall], *, tolerance: float) -> KernelComparison | None:
    """Compares the kernels of an iteration. None if the trace has none: only the shadow recorder writes them.

    A shape is listed if the number of kernels differs, or their FLOPs by more than `tolerance`. Steps of attention are not counted.
    """
    if not calls:
        return None
    recorded = recorded_kernels(calls, attention_in_steps=predicted.attention_in_steps)
    nothing = KernelTotal(0, 0)
    keys = sorted(predicted.totals.keys() | recorded.keys())
    rows = [KernelRow(key=key, predicted=predicted.totals.get(key, nothing), recorded=recorded.get(key, nothing)) for key in keys]
    return KernelComparison(
        rows=tuple(row for row in rows if _differs(row, predicted.attention_in_steps, tolerance)),
        shapes=len(keys),
        predicted_flops=sum(total.flops for total in predicted.totals.values()),
        recorded_flops=sum(total.flops for total in recorded.values()),
        predicted_traffic=predicted.traffic,
        recorded_traffic=recorded_traffic(calls),
    )


def _differs(row: KernelRow, in_steps: bool, tolerance: float) -> bool:
    counted = row.key.kind == "gemm" or not in_steps
    if counted and row.predicted.number != row.recorded.number:
        return True
    return abs(row.predicted.flops - row.recorded.flops) > tolerance * row.recorded.flops
