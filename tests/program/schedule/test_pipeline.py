"""Pipeline schedules: examples from Megatron's source and from papers, and general properties."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.program.schedule.messages import Ring, last_input_of_warmup
from analyzer.program.schedule.pipeline import Step, equivalent_microbatches, steps


def text(order: tuple[Step, ...]) -> str:
    """The steps as text: 'F0 B0' is the forward and backward of microbatch 0; with several chunks, '.1' is chunk 1."""
    several = any(step.chunk for step in order)
    return " ".join(f"{step.kind[0].upper()}{step.microbatch}" + (f".{step.chunk}" if several else "") for step in order)


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `steps` for any number of microbatches that Megatron accepts, without the rank."""
    pipeline = draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 4)) if pipeline > 1 else 1
    if chunks == 1:
        return {"pipeline": pipeline, "chunks": 1, "microbatches": draw(st.integers(1, 30))}
    legacy = draw(st.booleans())
    group = pipeline if legacy else draw(st.integers(pipeline, 2 * pipeline + 1))
    remainder = draw(st.sampled_from([0, *range(pipeline, group)]))
    microbatches = group * draw(st.integers(1, 7)) + remainder
    return {"pipeline": pipeline, "chunks": chunks, "microbatches": microbatches, "group_size": group, "legacy": legacy}


def warmup_of_megatron(pipeline: int, rank: int, chunks: int, microbatches: int, group_size: int) -> int:
    """`get_pp_rank_microbatches`, 0.16.1."""
    warmup = (pipeline - rank - 1) * 2 + (chunks - 1) * group_size if chunks > 1 else pipeline - rank - 1
    return min(warmup, microbatches * chunks)


def test_without_a_pipeline_each_backward_follows_its_forward() -> None:
    assert text(steps(pipeline=1, pipeline_rank=0, chunks=1, microbatches=3)) == "F0 B0 F1 B1 F2 B2"


@pytest.mark.parametrize(
    ("rank", "order"),
    [
        (0, "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"),
        (1, "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"),
        (2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7"),
        (3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"),
    ],
)
def test_1f1b_of_the_paper(rank: int, order: str) -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), figure 4, top: 4 devices, 8 microbatches."""
    assert text(steps(pipeline=4, pipeline_rank=rank, chunks=1, microbatches=8)) == order


@pytest.mark.parametrize(
    ("rank", "forwards", "then"),
    [
        (0, "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0", "F6.0 B0.1"),
        (3, "F0.0 F1.0 F2.0 F3.0", "F0.1 B0.1 F1.1 B1.1"),
    ],
)
def test_interleaved_of_the_paper(rank: int, forwards: str, then: str) -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), figure 4, bottom: 4 devices with 2 chunks, 8 microbatches."""
    order = text(steps(pipeline=4, pipeline_rank=rank, chunks=2, microbatches=8))
    assert order.startswith(f"{forwards} {then}")


def test_table_of_the_megatron_comment() -> None:
    """PP2 N3 M5 with VP2, in `forward_backward_pipelining_with_interleaving`."""
    order = steps(pipeline=2, pipeline_rank=0, chunks=2, microbatches=5, group_size=3)
    forwards = [step for step in order if step.kind == "forward"]
    assert [step.microbatch for step in forwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [step.chunk for step in forwards] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_in_2023_all_forwards_of_a_single_group_come_first() -> None:
    last = partial(steps, pipeline=2, pipeline_rank=1, chunks=2, microbatches=2)
    assert text(last(legacy=True)) == "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0"
    assert text(last()) == "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0"


def test_in_2023_several_groups_have_the_current_schedule() -> None:
    second = partial(steps, pipeline=4, pipeline_rank=1, chunks=3, microbatches=8)
    assert second(legacy=True) == second()


@given(pipelines())
def test_each_microbatch_has_a_forward_then_a_backward_in_each_chunk(pipeline: dict[str, Any]) -> None:
    for rank in range(pipeline["pipeline"]):
        order = steps(pipeline_rank=rank, **pipeline)
        place = {(step.kind, step.microbatch, step.chunk): at for at, step in enumerate(order)}
        assert len(place) == len(order) == 2 * pipeline["microbatches"] * pipeline["chunks"]
        for microbatch in range(pipeline["microbatches"]):
            for chunk in range(pipeline["chunks"]):
                assert place["forward", microbatch, chunk] < place["backward", microbatch, chunk]


def in_flight_peak(order: tuple[Step, ...]) -> tuple[int, ...]:
    """Microbatches in flight of each chunk at the first step with the maximum over all chunks."""
    in_flight = [0] * (max(step.chunk for step in order) + 1)
    peak = tuple(in_flight)
    for step in order:
        in_flight[step.chunk] += 1 if step.kind == "forward" else -1
        if sum(in_flight) > sum(peak):
            peak = tuple(in_flight)
    return peak


@given(pipelines())
def test_microbatches_in_flight(pipeline: dict[str, Any]) -> None:
    """min(p - r, m) in 1F1B; interleaved warm-up + 1, or all microbatches if every forward is warm-up."""
    size, chunks, microbatches = pipeline["pipeline"], pipeline["chunks"], pipeline["microbatches"]
    for rank in range(size):
        peak = in_flight_peak(steps(pipeline_rank=rank, **pipeline))
        assert len(peak) == chunks
        if chunks == 1:
            assert peak == (min(size - rank, microbatches),)
        elif pipeline["legacy"] and microbatches == size:
            assert sum(peak) == microbatches * chunks
        else:
            warmup = warmup_of_megatron(size, rank, chunks, microbatches, pipeline["group_size"])
            assert sum(peak) == min(warmup + 1, microbatches * chunks)


def test_peak_of_each_chunk() -> None:
    """Rank 0 of 4 with two chunks: 10 warm-up forwards and one more are 4 + 3 of chunk 0 and 4 of chunk 1."""
    assert in_flight_peak(steps(pipeline=4, pipeline_rank=0, chunks=2, microbatches=16)) == (7, 4)


@given(pipelines())
def test_the_schedules_of_all_ranks_do_not_deadlock(pipeline: dict[str, Any]) -> None:
    """The forward of virtual stage s = chunk·p + r follows that of s - 1, its backward that of s + 1. Receives block."""
    size, last = pipeline["pipeline"], pipeline["pipeline"] * pipeline["chunks"] - 1
    queues = [list(reversed(steps(pipeline_rank=rank, **pipeline))) for rank in range(size)]
    done: set[tuple[str, int, int]] = set()

    def ready(step: Step, stage: int) -> bool:
        if step.kind == "forward":
            return stage == 0 or ("forward", step.microbatch, stage - 1) in done
        return stage == last or ("backward", step.microbatch, stage + 1) in done

    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while queue and ready(queue[-1], queue[-1].chunk * size + rank):
                step = queue.pop()
                done.add((step.kind, step.microbatch, step.chunk * size + rank))
                moved = True
    assert not any(queues)


def situations(order: tuple[Step, ...], microbatches: int, ring: Ring | None) -> set[tuple[Any, ...]]:
    """The properties of each step that memory depends on. The running microbatch counts as in flight.

    `ring`: of an interleaved schedule. The schedule references the last input of the warm-up, and after its backward the gradient.
    """
    in_flight: Counter[int] = Counter()
    kinds = [step.kind for step in order]
    steady = "forward" in kinds[kinds.index("backward") :]
    last = last_input_of_warmup(order, ring) if ring is not None and steady else None
    met, done = set(), False
    for step in order:
        in_flight[step.chunk] += step.kind == "forward"
        ends = (step.microbatch == 0, step.kind == "backward" and step.microbatch == microbatches - 1)
        met.add((step.kind, step.chunk, ends, frozenset((+in_flight).items()), done))
        in_flight[step.chunk] -= step.kind == "backward"
        done = done or (step.kind == "backward" and (step.microbatch, step.chunk) == last)
    return met


@given(pipelines(), st.booleans())
def test_the_equivalent_number_of_microbatches_has_the_same_situations(pipeline: dict[str, Any], combined: bool) -> None:
    pipeline["combined"] = combined
    size, group = pipeline["pipeline"], pipeline.get("group_size", 1)
    for rank in range(size):
        fewer = equivalent_microbatches(**pipeline, pipeline_rank=rank)
        assert fewer <= pipeline["microbatches"]
        ring = Ring(size, group, True, rank == 0, rank == size - 1) if pipeline["chunks"] > 1 else None
        short = situations(steps(pipeline_rank=rank, **{**pipeline, "microbatches": fewer}), fewer, ring)
        assert short == situations(steps(pipeline_rank=rank, **pipeline), pipeline["microbatches"], ring)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"pipeline": 1, "chunks": 1, "microbatches": 100_000}, 3),
        ({"pipeline": 8, "chunks": 1, "microbatches": 100_000}, 10),
        ({"pipeline": 8, "chunks": 4, "microbatches": 100_000}, 40),
        ({"pipeline": 4, "chunks": 4, "microbatches": 10**6 + 5, "group_size": 10}, 35),
    ],
)
def test_examples_of_the_equivalent_number_of_microbatches(arguments: dict[str, Any], expected: int) -> None:
    assert equivalent_microbatches(**arguments) == expected


def test_the_last_group_may_be_smaller_than_the_others() -> None:
    assert len(steps(pipeline=4, pipeline_rank=0, chunks=2, microbatches=14, group_size=5)) == 56
