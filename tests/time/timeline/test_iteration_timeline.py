"""The timeline of an iteration: it has all of the time, all layers, and the memory of the report."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from analyzer.communication.table import communication_rows
from analyzer.errors import InputError
from analyzer.memory.over_iteration import memory_over_iteration
from analyzer.memory.ranks import rank_classes_of_tensors
from analyzer.memory.stages import analysed_stages
from analyzer.passes.stages import stage_models
from analyzer.report.timeline import THREADS, trace_events
from analyzer.results import PeakEvent
from analyzer.specs import TrainingJob
from analyzer.time.efficiencies import efficiencies_of
from analyzer.time.iteration import IterationTime, iteration_time
from analyzer.time.timeline import iteration as timeline_module
from analyzer.time.timeline.iteration import Timeline, iteration_timeline
from analyzer.time.timeline.passes import pass_events
from tests.job_of import HOPPER, job_of
from tests.time.speeds import known

SPEED = known("H100-80GB")
RATES = efficiencies_of(SPEED)
BASE = "--num-layers 8 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
LINES = [
    f"{BASE} --global-batch-size 32",
    f"{BASE} --global-batch-size 64 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4",
    f"{BASE} --global-batch-size 64 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    f"{BASE} --global-batch-size 64 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 "
    "--decoder-last-pipeline-num-layers 3 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    f"{BASE} --global-batch-size 64 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --expert-model-parallel-size 4 "
    "--moe-token-dispatcher-type alltoall --context-parallel-size 2 --fp8-format hybrid --pipeline-model-parallel-size 2",
]


def job(line: str) -> TrainingJob:
    return job_of(f"--bf16 {line}", gpus=16, gpu=HOPPER, environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def timed(found: TrainingJob) -> IterationTime:
    stages = stage_models(found)
    return iteration_time(found, stages, communication_rows(found, stages), SPEED, RATES)


def timeline_of(found: TrainingJob) -> Timeline:
    return iteration_timeline(found, timed(found), SPEED, RATES)


@cache
def events_of(line: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = trace_events(timeline_of(job(line)), title="test")["traceEvents"]
    return events


def by_thread(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


@pytest.mark.parametrize("line", LINES)
def test_events_are_ordered_and_nest(line: str) -> None:
    """On each thread an event ends before the next one begins, or is inside it."""
    events = events_of(line)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    for thread in by_thread(events).values():
        open_until: list[float] = []
        for event in thread:
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            end = round(event["ts"] + event["dur"], 3)
            assert event["dur"] >= 0
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


@pytest.mark.parametrize("line", LINES)
def test_the_events_take_the_iteration(line: str) -> None:
    """The passes of each stage take its busy time, and the last event ends when the iteration does."""
    found = job(line)
    time, timeline = timed(found), timeline_of(found)
    for stage, rank in enumerate(time.ranks):
        passes = [each for each in timeline.passes if each.stage == stage]
        assert sum(each.end - each.start for each in passes) == pytest.approx(rank.busy)
        assert Counter((each.direction, each.chunk) for each in passes) == {
            (direction, chunk): found.batch.microbatches
            for direction in ("forward", "backward")
            for chunk in range(found.parallel.chunks)
        }
        assert all(before.end <= after.start * (1 + 1e-9) for before, after in pairwise(passes))
    events = trace_events(timeline, title="test")["traceEvents"]
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == pytest.approx(1e6 * time.seconds)


@pytest.mark.parametrize("line", LINES)
def test_every_flow_leads_from_a_pass_to_a_later_one(line: str) -> None:
    """Each microbatch passes from stage to stage: forward and backward over p·v - 1 borders between them."""
    found = job(line)
    flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    events = events_of(line)
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
    borders = found.parallel.pipeline * found.parallel.chunks - 1 if found.parallel.pipeline > 1 else 0
    assert len(flows) == 2 * borders * found.batch.microbatches
    starts = {(event["pid"], event["ts"]) for event in events if event["ph"] == "X" and event["tid"] == THREADS["compute"]}
    for pair in flows.values():
        assert pair["s"]["ts"] < pair["f"]["ts"]
        assert pair["s"]["pid"] != pair["f"]["pid"]
        assert {(pair[end]["pid"], pair[end]["ts"]) for end in "sf"} <= starts


@pytest.mark.parametrize("line", LINES)
def test_a_pass_has_every_layer_once_and_the_modules_fill_it(line: str) -> None:
    timeline = timeline_of(job(line))
    for stage in range(len(timeline.stages)):
        for direction in ("forward", "backward"):
            passes = [each for each in timeline.passes if (each.stage, each.direction, each.microbatch) == (stage, direction, 0)]
            names = [event.name for each in passes for event in each.events if event.name.startswith("layer ")]
            layers = [layer for chunk in stage_models(job(line))[stage].chunks for layer in chunk.layers]
            assert sorted(names) == sorted(f"layer {layer}" for layer in layers)
            for each in passes:
                outermost = 0.0
                end = 0.0
                for event in each.events:
                    if event.stream == "compute" and event.start >= end * (1 - 1e-9):
                        outermost += event.seconds
                        end = event.start + event.seconds
                assert outermost == pytest.approx(each.end - each.start)


def test_the_time_of_a_message_is_that_of_the_time_model() -> None:
    """Two all-gathers and two reduce-scatters of a layer with sequence parallelism in a forward."""
    found = job(LINES[1])
    stage = stage_models(found)[1]
    [total] = [forward for forward, _ in timed(found).pass_totals[1]]
    events = pass_events(found, stage.trees[0], stage.chunks[0].layers, "forward", SPEED, RATES, total=total)
    messages = Counter(event.name for event in events if event.stream == "tp")
    assert messages == {"all_gather tp": 2 * len(stage.chunks[0].layers), "reduce_scatter tp": 2 * len(stage.chunks[0].layers)}


@pytest.mark.parametrize("line", LINES)
def test_the_highest_memory_of_the_steps_is_the_peak_of_the_report(line: str) -> None:
    found = job(line)
    for stage, rank in zip(analysed_stages(found), rank_classes_of_tensors(found), strict=True):
        steps = memory_over_iteration(found, stage)
        memory = rank.memory
        if memory.peak_event in (PeakEvent.FORWARD, PeakEvent.BACKWARD) and not memory.peak_in_first_iteration:
            assert max(step.peak for step in steps) == memory.peak_allocated_bytes
        assert all(step.after <= step.peak for step in steps)
        assert steps[-1].after == min(step.after for step in steps)


def test_an_iteration_of_too_many_passes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "MOST_PASSES", 10)
    with pytest.raises(InputError, match=r"--info-timeline: the iteration has 64 passes.*use a smaller --global-batch-size"):
        timeline_of(job(f"{BASE} --global-batch-size 512"))


def test_the_modules_of_later_microbatches_are_left_out_of_long_timelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "MOST_EVENTS", 500)
    timeline = timeline_of(job(f"{BASE} --global-batch-size 512"))
    assert 0 < timeline.detailed_microbatches < 32
    for each in timeline.passes:
        assert bool(each.events) == (each.microbatch < timeline.detailed_microbatches)
