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
from tests.examples import examples

F, B = 1.0, 2.0


def schedule(
    pipeline: int, microbatches: int, *, chunks: int = 1, group_size: int | None = None, combined: bool = False
) -> Schedule:
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


def test_the_last_stage_as_the_slowest() -> None:
    """A stage of 3 + 6 after three of 1 + 2 works without a pause from the first forward to the last backward of the others."""
    found = schedule(4, 50)
    assert end(found, [[(F, B)], [(F, B)], [(F, B)], [(3.0, 6.0)]]) == pytest.approx(3 * F + 50 * 9 + 3 * B)


def test_the_first_stage_as_the_slowest() -> None:
    """It works without a pause: four forwards take 12 seconds, and the first gradient arrives after 3 + 3·(1 + 2)."""
    found = schedule(4, 50)
    assert end(found, [[(3.0, 6.0)], [(F, B)], [(F, B)], [(F, B)]]) == pytest.approx(50 * 9)


@pytest.mark.parametrize("microbatches", [8, 64, 301])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_messages_of_one_forward_one_backward(ranks: int, microbatches: int) -> None:
    """Each cycle of p microbatches has 2·(p - 1) messages one after the other.

    In the steady state the first rank starts the forward of microbatch n + p after the backward of n. This needs the forwards and
    the backwards of the p stages and 2·(p - 1) messages, so that p microbatches take p·(f + b) + 2·(p - 1)·message.
    """
    message, more = 0.05, 40 * ranks
    first, longer = (schedule(ranks, each) for each in (8 * ranks + microbatches, 8 * ranks + microbatches + more))
    found = end(longer, equal(longer), message) - end(first, equal(first), message)
    assert found == pytest.approx(more * (F + B) + 40 * 2 * (ranks - 1) * message)


Case = tuple[Schedule, list[list[tuple[float, float]]], float]
DURATIONS = st.floats(0, 10, allow_subnormal=False)


@st.composite
def cases(draw: st.DrawFn, *, durations: st.SearchStrategy[float] = DURATIONS, most: int = 5) -> Case:
    """A schedule of up to 2·`most` groups of microbatches, with durations and a message."""
    ranks, chunks = draw(st.integers(1, 5)), draw(st.sampled_from((1, 1, 2, 3)))
    if ranks == 1:
        chunks = 1
    group = draw(st.sampled_from((None, ranks, ranks + 1, 2 * ranks))) if chunks > 1 else None
    microbatches = (group or ranks) * draw(st.integers(1, most)) if chunks > 1 else draw(st.integers(1, 2 * most * ranks))
    found = schedule(ranks, microbatches, chunks=chunks, group_size=group, combined=chunks > 1 and draw(st.booleans()))
    seconds = [[(draw(durations), draw(durations)) for _ in range(chunks)] for _ in range(ranks)]
    return found, seconds, draw(st.sampled_from((0.0, 0.1, 0.3)))


QUICK = settings(max_examples=examples(100), deadline=None, derandomize=True)
PLAUSIBLE = st.floats(0.7, 1.4)


@QUICK
@given(cases())
def test_a_rank_works_or_waits(case: Case) -> None:
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
@given(cases(durations=PLAUSIBLE, most=30))
def test_simulating_a_part_of_the_microbatches_is_enough(case: Case) -> None:
    found, seconds, message = case
    with pytest.MonkeyPatch.context() as patch:
        full = simulate_all(found, seconds, message, patch)
    for short, exact in zip(simulate(found, seconds, message), full, strict=True):
        assert short.end == pytest.approx(exact.end, rel=0.02)
        assert short.busy == pytest.approx(exact.busy)
        assert short.busy + short.bubble + short.exposed_messages == pytest.approx(short.end)
        assert min(short.bubble, short.exposed_messages) >= -1e-9 * short.end


def test_messages_of_a_late_steady_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage is the slowest by 7 %, and the last stage the second: the steady state starts after six groups."""
    found = schedule(8, 128, chunks=4)
    slower = {0: 1.07, 7: 1.06}
    seconds = [[(F * slower.get(rank, 1.0), B * slower.get(rank, 1.0))] * 4 for rank in range(8)]
    exact = simulate_all(found, seconds, 0.005, monkeypatch)
    for short, full in zip(simulate(found, seconds, 0.005), exact, strict=True):
        assert short.exposed_messages == pytest.approx(full.exposed_messages, rel=1e-3)
        assert short.bubble == pytest.approx(full.bubble, rel=1e-3)


@QUICK
@given(cases(), st.data())
def test_a_longer_step_never_shortens_an_iteration(case: Case, data: st.DataObject) -> None:
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
def test_more_microbatches_never_take_less_time(case: Case) -> None:
    found, seconds, message = case
    step = (found.group_size or found.pipeline) if found.chunks > 1 else 1
    more = replace(found, microbatches=found.microbatches + step)
    assert end(more, seconds, message) >= end(found, seconds, message) - 1e-6


@QUICK
@given(cases())
def test_spans_follow_their_inputs(case: Case) -> None:
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
        before: Sequence[int] = (
            [stage - 1] if node.direction == 0 and stage else [stage + 1] if node.direction and stage + 1 < stages else []
        )
        for other in before:
            wait = message if other % found.pipeline != node.rank else 0.0
            assert start >= ends[node.direction, node.microbatch, other] + wait - 1e-9
        if node.direction:
            assert start >= ends[0, node.microbatch, stage] - 1e-9
        ends[node.direction, node.microbatch, stage] = stop
        assert stop - start == pytest.approx(seconds[node.rank][node.chunk][node.direction])


def test_very_large_schedules_by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal stages take as long as in the simulation, up to the messages of the steady state."""
    for chunks in (1, 4):
        found = schedule(8, 160, chunks=chunks)
        exact = end(found, equal(found))
        monkeypatch.setattr(pipeline, "MOST_STEPS", 10)
        assert pipeline.is_large(found)
        assert end(found, equal(found)) == pytest.approx(exact)
        assert spans(found, equal(found), 0.0) == []
        monkeypatch.undo()


@pytest.mark.parametrize("chunks", [1, 2])
def test_messages_of_very_large_schedules(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Four stages: the first microbatch passes three boundaries forward and three backward, and the bubble is (p - 1)/v passes."""
    monkeypatch.setattr(pipeline, "MOST_STEPS", 10)
    found = schedule(4, 160, chunks=chunks)
    assert end(found, equal(found), 0.5) == pytest.approx(160 * (F + B) + 3 * (F + B) / chunks + 6 * 0.5)
