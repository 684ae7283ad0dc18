"""A timeline in the trace event format of Chrome, for ui.perfetto.dev and chrome://tracing.

Each stage is a process. Its first thread has the passes with their modules, and each stream of messages is another thread. Flows
follow a microbatch from stage to stage, and a counter has the allocated memory. Times are in microseconds.

Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from analyzer.time.timeline.iteration import Pass, Timeline

Event = dict[str, Any]

MICROSECONDS: Final = 1e6
STREAMS: Final = {
    "compute": "passes",
    "tp": "tensor-parallel messages",
    "cp": "context-parallel messages",
    "ep": "expert-parallel messages",
    "send forward": "messages to the next stage",
    "send backward": "messages to the stage before",
    "data parallel: reduce gradients": "reduction of gradients",
    "data parallel: gather parameters": "gathering of parameters",
}
"""The name of each thread, in their order."""
THREADS: Final = {stream: number for number, stream in enumerate(STREAMS, 1)}


def trace_events(timeline: Timeline, *, title: str) -> dict[str, Any]:
    """The document of a timeline. Events are ordered by time; an outer event comes before those inside it."""
    events = [*_passes(timeline), *_spans(timeline), *_memory(timeline), *_flows(timeline)]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "title": title,
            "iteration_seconds": timeline.seconds,
            "microbatches_with_modules": timeline.detailed_microbatches,
        },
        "traceEvents": [*_names(timeline, {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}), *events],
    }


def text_of(timeline: Timeline, *, title: str) -> str:
    """The same as text."""
    return json.dumps(trace_events(timeline, title=title), separators=(",", ":"))


def _names(timeline: Timeline, used: set[tuple[int, int]]) -> Iterator[Event]:
    for stage, name in enumerate(timeline.stages):
        pid = _pid(stage)
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": stage}}
        for stream, tid in THREADS.items():
            if (pid, tid) in used:
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": STREAMS[stream]}}
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _pid(stage: int) -> int:
    return stage + 1


def _complete(stage: int, stream: str, name: str, start: float, seconds: float, **arguments: object) -> Event:
    begin = _time(start)
    duration = round(_time(start + seconds) - begin, 3)  # of rounded times, so that events stay inside each other
    found: Event = {"ph": "X", "pid": _pid(stage), "tid": THREADS[stream], "name": name, "ts": begin, "dur": duration}
    return {**found, "args": arguments} if arguments else found


def _time(seconds: float) -> float:
    """Microseconds, in steps of a nanosecond."""
    return round(seconds * MICROSECONDS, 3)


def _passes(timeline: Timeline) -> Iterator[Event]:
    for each in timeline.passes:
        name = f"{each.direction} {each.microbatch}"
        yield _complete(
            each.stage, "compute", name, each.start, each.end - each.start, microbatch=each.microbatch, chunk=each.chunk
        )
        for event in each.events:
            phase = {} if event.phase == each.direction else {"phase": event.phase}
            yield _complete(
                each.stage, event.stream, event.name, each.start + event.start, event.seconds, module=event.path, **phase
            )


def _spans(timeline: Timeline) -> Iterator[Event]:
    """Messages on one stream run after each other: the next one shortens those that it follows."""
    free: dict[tuple[int, str], float] = {}
    for span in sorted(timeline.spans, key=lambda span: span.start):
        key = (span.stage, span.stream)
        start = max(span.start, free.get(key, 0.0))
        free[key] = max(start, span.end)
        yield _complete(span.stage, span.stream, span.name, start, free[key] - start)


def _memory(timeline: Timeline) -> Iterator[Event]:
    """The allocated memory at the peak of each pass, and after it."""
    places = dict.fromkeys(range(len(timeline.stages)), 0)
    for each in timeline.passes:
        if not timeline.memory:
            return
        steps = timeline.memory[each.stage]
        memory = steps[places[each.stage]]
        places[each.stage] += 1
        yield _counter(each.stage, each.start, memory.peak)
        yield _counter(each.stage, each.end, memory.after)


def _counter(stage: int, seconds: float, size: int) -> Event:
    return {"ph": "C", "pid": _pid(stage), "tid": 0, "name": "allocated bytes", "ts": _time(seconds), "args": {"bytes": size}}


def _flows(timeline: Timeline) -> Iterator[Event]:
    """An arrow from each pass to the pass on another stage that needs its output."""
    for number, each in enumerate(timeline.passes):
        if each.source >= 0:
            yield from _flow(number, timeline.passes[each.source], each)


def _flow(number: int, source: Pass, target: Pass) -> Iterator[Event]:
    shared = {"cat": "microbatch", "name": f"microbatch {target.microbatch}", "id": number, "tid": THREADS["compute"]}
    yield {**shared, "ph": "s", "pid": _pid(source.stage), "ts": _time(source.start)}
    yield {**shared, "ph": "f", "bp": "e", "pid": _pid(target.stage), "ts": _time(target.start)}
