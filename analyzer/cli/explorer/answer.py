"""Answers the questions of the explorer: a JSON object with a state to a JSON object with figures.

The page asks the same questions in a browser, where this package runs in Pyodide, and of the local server. The figures are those of
the JSON report of the command line for the words in `argv`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from analyzer.api import Launch, with_phases, with_time
from analyzer.cli.explorer.controls import controls_json, with_value
from analyzer.cli.explorer.starts import EXAMPLES, first_state
from analyzer.cli.explorer.state import Opened, Read, read, state_of, text_of, words_of
from analyzer.errors import AnalyzerError, InputError
from analyzer.launch.written_files import files_of_launch
from analyzer.layout_search.result import ERROR_OF_ORDER
from analyzer.report.json import document
from analyzer.report.json.encoder import Formats, Part, encode, named, own_fields
from analyzer.results import RankClass, Report, TimeEstimate
from analyzer.version import __version__

SHOWN: Final = (
    "engine",
    "megatron",
    "software",
    "world",
    "parallel",
    "batch",
    "ranks",
    "verdict",
    "time?",
    "warnings",
    "assumptions",
)
"""Fields of the JSON report that the page shows, beside `model`."""
FORMATS: Final[Formats] = {
    **document.FORMATS,
    Report: {
        **{name: source for name, source in document.FORMATS[Report].items() if name in SHOWN},  # type: ignore[union-attr]
        "model": Part(named("parameters parameters_active")),
    },
    RankClass: own_fields(RankClass, without="trees chunks"),
    TimeEstimate: own_fields(TimeEstimate, without="timelines"),
}
"""The JSON report without module trees and groups, which are most of it."""
MOST_PASSES: Final = 6000
"""Passes of all stages in the schedule."""
MOST_SECONDS: Final = 600
"""The longest search."""

Answer = dict[str, Any]


class _Shown(NamedTuple):
    """The launch whose figures were asked for last, with its report. Its controls and its schedule are asked for next."""

    read: Read
    report: Report
    opened: Opened | None


_shown: list[_Shown] = []
"""The latest one, if there is one. Figures are always calculated again: files of the launch may have changed."""


def answer(question: object, opened: Opened | None = None) -> Answer:
    """The answer to a question: {"ask": one of `QUESTIONS`, "state": ..., further fields}.

    `opened`: the launch of the command line. An error for the user is {"error": message}.
    """
    try:
        action = QUESTIONS.get(str(question.get("ask"))) if isinstance(question, dict) else None
        if action is None or not isinstance(question, dict):
            raise InputError("question", "is not one that the explorer answers", "load the page again")
        with files_of_launch(None if opened is None else opened.copies):
            return action(question, opened)
    except AnalyzerError as error:
        return {"error": str(error)}


def _start(_: Mapping[str, Any], opened: Opened | None) -> Answer:
    """What the page needs before the first launch: `version`, `examples` and the text of the launch that it was opened with."""
    from analyzer.launch.model_config.published import published_names

    return {
        "version": __version__,
        "opened": None if opened is None else opened.text,
        "examples": [{"name": name, "state": state.as_json()} for name, state in EXAMPLES.items()],
        "models": sorted(set(published_names().values())),
        "error_of_times": ERROR_OF_ORDER,
    }


def _open(question: Mapping[str, Any], opened: Opened | None) -> Answer:
    """The first state of a text that was pasted."""
    state = state_of(question.get("state"))
    return {"state": first_state(state, text_of(state.launch, opened)).as_json()}


def _figures(question: Mapping[str, Any], opened: Opened | None) -> Answer:
    """The figures of a state."""
    found = read(state_of(question.get("state")), opened)
    report = _report(found.launch)
    _shown[:] = [_Shown(found, report, opened)]
    return {
        "state": found.state.as_json(),
        "kind": found.text.kind,
        "notes": list(found.text.notes),
        "argv": list(found.argv),
        "report": encode(report, FORMATS),
        "gpu": _gpu(report),
        "paste": _paste(found),
    }


def _report(launch: Launch) -> Report:
    """The report of a launch without the advice, for which the page has a search."""
    from analyzer.predict import predict

    return with_time(replace(with_phases(predict(launch.job, note=launch.note)), command=launch.command), launch)


def _latest(question: Mapping[str, Any], opened: Opened | None) -> tuple[Read, Report]:
    """The launch of a state and its report: those that are shown, if it is their state."""
    state = state_of(question.get("state"))
    for shown in _shown:
        if shown.read.state == state and shown.opened is opened:
            return shown.read, shown.report
    found = read(state, opened)
    return found, _report(found.launch)


def _gpu(report: Report) -> Answer:
    hardware = report.job.hardware
    return {"name": hardware.name, "capacity_bytes": hardware.capacity_bytes}


def _paste(found: Read) -> Answer:
    """Texts to paste: the changed options, those to leave out, the complete launch, and the command line of this program."""
    from analyzer.layout_search.command_line import command_line

    launch = found.launch
    complete = None
    if launch.framework is None:
        complete = command_line(_launcher_words(found), launch.arguments, {})
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in found.text.environ.items())
        complete = f"{variables} {complete}".strip() if found.text.kind == "script" else complete
    return {
        "options": shlex.join(words_of(found.state.set)),
        "left_out": list(found.state.unset),
        "launch": complete,
        "command": shlex.join(["get-training-info", *found.argv]),
    }


def _launcher_words(found: Read) -> list[str]:
    """The words of the launch, with the nodes and GPUs of the state in the options of torchrun."""
    from analyzer.launch.launchers.launcher_options import TORCHRUN
    from analyzer.launch.options.catalogue import load_catalogue
    from analyzer.launch.split_argv import split_argv

    split = split_argv(found.argv, load_catalogue().newest)
    if split.launcher not in (None, TORCHRUN):
        return list(found.argv)
    parallel = found.launch.job.parallel
    sizes = ("--nnodes", str(parallel.nodes), "--nproc-per-node", str(parallel.gpus_per_node))
    others = [
        word
        for dest, value, flag in split.launcher_options
        if dest not in ("nnodes", "nproc_per_node")
        for word in (flag, *(() if value is None else (value,)))
    ]
    return ["torchrun", *sizes, *others, *((split.entry,) if split.entry else ())]


def _controls(question: Mapping[str, Any], opened: Opened | None) -> Answer:
    """The controls of a state with their choices."""
    return {"controls": controls_json(_latest(question, opened)[0])}


def _choose(question: Mapping[str, Any], opened: Opened | None) -> Answer:
    """The state with any number for a control."""
    found = read(state_of(question.get("state")), opened)
    return {"state": with_value(found, str(question.get("name")), question.get("value")).as_json()}


def _schedule(question: Mapping[str, Any], opened: Opened | None) -> Answer:
    """The passes of the stages in an iteration: for each stage start and end in seconds, direction, microbatch and chunk."""
    from analyzer.time.estimate import iteration_of
    from analyzer.time.pipeline import is_large, schedule_of, simulated_passes, spans

    found, report = _latest(question, opened)
    launch = found.launch
    schedule = schedule_of(launch.job)
    if launch.time is None or launch.time.flops_share is not None or is_large(schedule):
        return {"stages": [], "complete": False, "seconds": 0.0}
    time = iteration_of(report, launch.time)
    totals = time.pass_totals
    stages: list[list[list[float]]] = [[] for _ in time.ranks]
    complete = 2 * schedule.microbatches * schedule.chunks * schedule.pipeline <= MOST_PASSES
    if complete:
        for node, end in zip(*simulated_passes(schedule, totals, time.message), strict=True):
            start = end - totals[node.rank][node.chunk][node.direction]
            stages[node.rank].append([start, end, node.direction, node.microbatch, node.chunk])
    else:
        most = max(1, MOST_PASSES // len(stages))
        for node, start, end in spans(schedule, totals, time.message):
            if len(stages[node.rank]) < most:
                stages[node.rank].append([start, end, node.direction, node.microbatch, node.chunk])
    return {"stages": stages, "complete": complete, "seconds": time.seconds}


def _search(question: Mapping[str, Any], opened: Opened | None) -> Answer:
    """Other layouts of a state. `over`: one of `search.SPACES`; `seconds` limits the duration."""
    from analyzer.cli.explorer.search import SPACES, search_json

    seconds, over = question.get("seconds"), question.get("over")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= MOST_SECONDS:
        raise InputError("seconds", f"{seconds!r:.40} is not a time limit", f"write a number up to {MOST_SECONDS}")
    if not isinstance(over, str) or over not in SPACES:
        raise InputError("over", f"{over!r:.40} is not a search", f"use {' or '.join(SPACES)}")
    return search_json(read(state_of(question.get("state")), opened), over=SPACES[over], seconds=seconds)


QUESTIONS: Final[Mapping[str, Callable[[Mapping[str, Any], Opened | None], Answer]]] = {
    "start": _start,
    "open": _open,
    "figures": _figures,
    "controls": _controls,
    "choose": _choose,
    "schedule": _schedule,
    "search": _search,
}
"""What the page asks."""
