"""The simulated schedule: closed forms, conservation of time, and that simulating a part of the microbatches is enough.

Source of the closed forms: Narayanan et al. 2021 (arXiv 2104.04473), sections 2.2.1 and 2.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.time import pipeline
from analyzer.time.pipeline import RankTime, Schedule, Seconds, simulate, spans

F, B = 1.0, 2.0


def schedule(pipeline: int, microbatches: int, *, chunks: int = 1, group_size: int | None = None, combined: bool = False) -> Schedule:
    return Schedule(pipeline=pipeline, chunks=chunks, microbatches=microbatches, group_size=group_size, combined=combined)


def equal(found: Schedule, forward: float = F, backward: float = B) -> list[list[tuple[float, float]]]:
    """Equal chunks whose forwards of a rank take `forward` together."""
    return [[(forward / found.chunks, backward / found.chunks)] * found.chunks for _ in range(found.pipeline)]


def end(found: Schedule, seconds: Seconds, message: float = 0.0) -> float:
    return max(rank.end for rank in simulate(found, seconds, message))


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8, 24, 25, 100, 101])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_one_forward_one_backward(ranks: int, microbatches: int) -> None:
    """(m + p - 1)·(f + b): the bubble is p - 1 forwards and backwards."""
    found = schedule(ranks, microbatches)
    assert end(found, equal(found)) == pytest.approx((microbatches + ranks - 1) * (F + B))


@pytest.mark.parametrize("multiple", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_interleaving_divides_the_bubble(ranks: int, chunks: int, multiple: int) -> None:
    """The bubble is (p - 1)/v of a forward and a backward, a share of (p - 1)/(v·m) of the ideal time."""
    found = schedule(ranks, multiple * ranks, chunks=chunks)
    ideal = multiple * ranks * (F + B)
    assert end(found, equal(found)) == pytest.approx(ideal + (ranks - 1) * (F + B) / chunks)
    first = simulate(found, equal(found), 0.0)[0]
    assert first.bubble / ideal == pytest.approx((ranks - 1) / (chunks * multiple * ranks))


def test_messages_delay_the_first_and_the_last_microbatch() -> None:
    """With one microbatch, the forward passes 3 stages, and the backward 3: 6 messages for the first rank."""
    found = schedule(4, 1)
    ranks = simulate(found, equal(found), 0.5)
    assert [rank.end for rank in ranks] == [4 * (F + B) + 3, 4 * F + 3 * B + 2.5, 4 * F + 2 * B + 2, 4 * F + B + 1.5]
    assert ranks[0].exposed_messages == 0.5  # until the gradient of the second stage has arrived
    assert ranks[0].bubble == 3 * (F + B) + 2.5


def test_the_slowest_stage_sets_the_pace() -> None:
    """A stage of 3 + 6 among those of 1 + 2: m·9, and a forward and a backward of the other three stages."""
    for slow in range(4):
        found = schedule(4, 50)
        seconds = [[(3.0, 6.0) if rank == slow else (F, B)] for rank in range(4)]
        assert end(found, seconds) == pytest.approx(50 * 9 + 3 * (F + B))


DURATIONS = st.floats(0, 10, allow_subnormal=False)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, list[list[tuple[float, float]]], float]:
    """A schedule with any durations."""
    ranks, chunks = draw(st.integers(1, 5)), draw(st.sampled_from((1, 1, 2, 3)))
    if ranks == 1:
        chunks = 1
    group = draw(st.sampled_from((None, ranks, ranks + 1, 2 * ranks))) if chunks > 1 else None
    microbatches = draw(st.integers(1, 60)) if chunks == 1 else (group or ranks) * draw(st.integers(1, 12))
    found = schedule(ranks, microbatches, chunks=chunks, group_size=group, combined=chunks > 1 and draw(st.booleans()))
    seconds = [[(draw(DURATIONS), draw(DURATIONS)) for _ in range(chunks)] for _ in range(ranks)]
    return found, seconds, draw(st.sampled_from((0.0, 0.1, 2.0)))


QUICK = settings(max_examples=150, deadline=None, derandomize=True)


@QUICK
@given(cases())
def test_a_rank_works_or_waits(case: tuple[Schedule, list[list[tuple[float, float]]], float]) -> None:
    found, seconds, message = case
    for rank in simulate(found, seconds, message):
        assert rank.busy + rank.bubble + rank.exposed_messages == pytest.approx(rank.end, abs=1e-6)
        assert min(rank.busy, rank.bubble, rank.exposed_messages) >= -1e-9


def simulate_all(found: Schedule, seconds: Seconds, message: float, patch: pytest.MonkeyPatch) -> list[RankTime]:
    """The simulation of every microbatch."""
    with patch.context() as inner:
        inner.setattr(pipeline, "simulated_microbatches", lambda schedule: schedule.microbatches)
        return simulate(found, seconds, message)


@QUICK
@given(cases())
def test_simulating_a_part_of_the_microbatches_is_enough(case: tuple[Schedule, list[list[tuple[float, float]]], float]) -> None:
    found, seconds, message = case
    with pytest.MonkeyPatch.context() as patch:
        full = simulate_all(found, seconds, message, patch)
    for short, exact in zip(simulate(found, seconds, message), full, strict=True):
        assert short.end == pytest.approx(exact.end, rel=0.03, abs=1e-6)
        assert short.busy == pytest.approx(exact.busy)


@QUICK
@given(cases(), st.data())
def test_a_longer_step_never_shortens_an_iteration(
    case: tuple[Schedule, list[list[tuple[float, float]]], float], data: st.DataObject
) -> None:
    found, seconds, message = case
    rank, chunk = data.draw(st.integers(0, found.pipeline - 1)), data.draw(st.integers(0, found.chunks - 1))
    longer = [list(chunks) for chunks in seconds]
    forward, backward = longer[rank][chunk]
    more = data.draw(DURATIONS)
    longer[rank][chunk] = data.draw(st.sampled_from(((forward + more, backward), (forward, backward + more))))
    assert end(found, longer, message) >= end(found, seconds, message) - 1e-9
    assert end(found, seconds, message + more) >= end(found, seconds, message) - 1e-9


@QUICK
@given(cases())
def test_more_microbatches_take_longer(case: tuple[Schedule, list[list[tuple[float, float]]], float]) -> None:
    found, seconds, message = case
    step = (found.group_size or found.pipeline) if found.chunks > 1 else 1
    more = replace(found, microbatches=found.microbatches + step)
    slowest = max(sum(map(sum, chunks)) for chunks in seconds)
    assert end(more, seconds, message) >= end(found, seconds, message) + step * slowest - 1e-6 or found.chunks > 1
    assert end(more, seconds, message) >= end(found, seconds, message) - 1e-6


@QUICK
@given(cases())
def test_spans_follow_their_inputs(case: tuple[Schedule, list[list[tuple[float, float]]], float]) -> None:
    """On each rank one step runs at a time, and a forward or backward starts after that of the stage before or after it."""
    found, seconds, message = case
    shown = spans(found, seconds, message)
    last: dict[int, float] = {}
    ends: dict[tuple[int, int, int], float] = {}
    stages = found.pipeline * found.chunks
    for node, start, stop in shown:
        assert start >= last.get(node.rank, 0.0) - 1e-9
        last[node.rank] = stop
        stage = node.chunk * found.pipeline + node.rank
        before: Sequence[int] = [stage - 1] if node.direction == 0 and stage else [stage + 1] if node.direction and stage + 1 < stages else []
        for other in before:
            wait = message if other % found.pipeline != node.rank else 0.0
            assert start >= ends[node.direction, node.microbatch, other] + wait - 1e-9
        if node.direction:
            assert start >= ends[0, node.microbatch, stage] - 1e-9
        ends[node.direction, node.microbatch, stage] = stop
        assert stop - start == pytest.approx(seconds[node.rank][node.chunk][node.direction])
