"""A report as one HTML file without network requests: the JSON report, a charting library, and a script that draws it.

The head of the page is text (`head.py`). The page has the JSON report of `analyzer.report.json` as it is, so that every figure of
a chart is in it, and in addition the memory of each pass and the time of each module. Both and the library are compressed with
gzip, so that the page is smaller than 2 MB. The charts are drawn with Apache ECharts (assets/echarts.LICENSE,
assets/echarts.NOTICE). Needs Jinja2 (extra `html`).
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from analyzer.errors import InputError
from analyzer.memory.over_iteration import memory_over_iteration
from analyzer.memory.stages import analysed_stages
from analyzer.modules.tree import Module
from analyzer.report import tree_sums
from analyzer.report.visible import visible
from analyzer.results import Report
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.estimate import TimeInputs, iteration_of, rates_of
from analyzer.time.iteration import IterationTime
from analyzer.time.pipeline import Schedule, is_large, schedule_of, simulated_passes
from analyzer.time.timeline.modules import ModuleTime, module_time

if TYPE_CHECKING:
    from analyzer.report.html.head import Head

_ESCAPED: Final = re.compile(r"\\(?:[bfr]|u(?:00[0189]|007f|061c|200[ef]|202[89a-e]|206[6-9]))")
"""Whether JSON may have characters that `visible` replaces: their escapes, or a backslash before such a letter."""
ASSETS: Final = "analyzer.report.html.assets"
_OPTION: Final = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
MOST_PASSES: Final = 12_000
"""Passes of all stages that the page has, so that it stays below 2 MB."""


def page(head: Head, documents: Sequence[dict[str, Any]], names: Sequence[str], *, extra: dict[str, Any], command: str) -> str:
    """The page of one report, or of several side by side, the newest first.

    `head` is the head of the first report, `documents` are JSON reports with their `names`, `extra` is `extra_data` of the first
    one, and `command` prints it again. Raises InputError if Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment
    except ImportError:
        remedy = "install the extra: pip install 'get-training-info[html]'"
        raise InputError("--info-html", "needs Jinja2, which is not installed", remedy) from None
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_without_control)
    environment.filters["pieces"] = _pieces
    template = environment.from_string(_asset("page.html.j2"))
    kind = "inference.js" if "inference" in documents[0] else "training.js"
    return template.render(
        head=head,
        command=command,
        style=_asset("report.css"),
        start=_asset("start.js"),
        library=_compressed(_asset("echarts.min.js")),
        script=_compressed(_asset("report.js") + _asset(kind)),
        reports=_compressed(_as_json({"names": list(names), "documents": list(documents)})),
        extra=_compressed(_as_json(extra)),
    )


def extra_data(report: Report, inputs: TimeInputs | None) -> dict[str, Any]:
    """What the page shows and the JSON report does not have.

    `passes`: for each pipeline rank start and end in seconds, direction, microbatch and chunk of each pass. `memory`: for each
    pipeline rank the bytes at the peak of each of these passes and after it. `saved`: for each pipeline rank and chunk the tensors
    that one microbatch saves for backward. `schedule`: other seconds of the schedule. `modules`: `ModuleTime` of each node of each
    tree.
    """
    job = report.job
    stages = analysed_stages(job) if job.graphs is None else ()
    shown = max(1, MOST_PASSES // job.parallel.pipeline)
    return {
        "memory": [[[each.peak, each.after] for each in memory_over_iteration(job, stage)[:shown]] for stage in stages],
        "saved": [[saved_tensors(tree) for tree in stage.model.trees] for stage in stages],
        **({"passes": [], "schedule": {}} if inputs is None else _schedule(report, iteration_of(report, inputs), shown)),
        "modules": [] if inputs is None else _module_times(report, inputs),
    }


def saved_tensors(tree: Module) -> list[tuple[str, int]]:
    """The tensors that a microbatch saves for backward: path and name, with the bytes of those in all layers; the largest first.

    They add up to `Module.retained_bytes` of the tree.
    """
    found: Counter[str] = Counter()

    def visit(module: Module, path: str) -> None:
        for tensor in module.saved:
            found[f"{path}: {tensor.name}"] += tensor.bytes
        for tensor in module.discards:
            found[f"{path}: {tensor.name}"] -= tensor.bytes
        if not module.recomputed:
            for child in module.children:
                visit(child, f"{path}.{child.name}" if path else child.name)

    visit(tree, "")
    return [(name.lstrip(": "), size) for name, size in found.most_common() if size]


def _schedule(report: Report, time: IterationTime, shown: int) -> dict[str, Any]:
    """The first `shown` passes of each pipeline rank, and what else takes time on it; none if the iteration cannot be simulated.

    `stages`: for each rank `_sums` of the complete iteration. `message`: seconds of a message between stages. `exposed`: for each
    rank, chunk and direction the seconds of messages in a pass that no kernel hides. `data_parallel`: for each rank those after its
    passes. `optimizer` and `host`: seconds at the end of the iteration. The last three are left out if passes are left out.
    """
    schedule = schedule_of(report.job)
    if is_large(schedule):
        return {"passes": [], "schedule": {}}
    passes = _passes(schedule, time, shown)
    of_all: dict[str, Any] = {"stages": _sums(time)}
    if all(len(of_rank) == 2 * schedule.microbatches * schedule.chunks for of_rank in passes):
        of_all |= {
            "data_parallel": [each[-1] for each in of_all["stages"]],
            "optimizer": time.parts["optimizer"],
            "host": time.host_of_iteration,
        }
    exposed = [[[_digits(each.tp + each.cp + each.ep) for each in both] for both in chunks] for chunks in time.passes]
    return {"passes": passes, "schedule": {"message": time.message, "exposed": exposed, **of_all}}


def _sums(time: IterationTime) -> list[list[float]]:
    """For each pipeline rank seconds of its passes, of messages in them that no kernel hides, of the bubble, of messages between
    stages that delay it, and of data-parallel messages after its passes."""
    rest = time.parts["exposed_dp"] - time.exposed_dp[time.pipeline_rank]  # all-reduces of scalars on every rank
    found = []
    for rank, chunks, data_parallel in zip(time.ranks, time.passes, time.exposed_dp, strict=True):
        shown = rank.passes * sum(each.tp + each.cp + each.ep for both in chunks for each in both)
        found.append([_digits(each) for each in (rank.busy, shown, rank.bubble, rank.exposed_messages, data_parallel + rest)])
    return found


def _passes(schedule: Schedule, time: IterationTime, shown: int) -> list[list[list[object]]]:
    """The first `shown` passes of each pipeline rank."""
    totals = time.pass_totals
    nodes, ends = simulated_passes(schedule, totals, time.message)
    found: list[list[list[object]]] = [[] for _ in time.ranks]
    for node, end in zip(nodes, ends, strict=True):
        if len(found[node.rank]) < shown:
            start = end - totals[node.rank][node.chunk][node.direction]
            found[node.rank].append([_digits(start), _digits(end), node.direction, node.microbatch, node.chunk])
    return found


def _digits(value: float) -> float:
    return float(f"{value:.7g}")


def _module_times(report: Report, inputs: TimeInputs) -> list[list[list[ModuleTime]]]:
    """For each rank class and chunk the time of its modules. Equal trees are computed once."""
    rates, known = rates_of(inputs), dict[int, list[ModuleTime]]()
    for rank in report.ranks:
        for tree in rank.trees:
            if id(tree) not in known:
                known[id(tree)] = _times(report.job, tree, inputs.speed, rates)
    return [[known[id(tree)] for tree in rank.trees] for rank in report.ranks]


def _times(job: TrainingJob, tree: Module, speed: SpeedSpec, rates: Efficiencies) -> list[ModuleTime]:
    """The time of every node of the tree in the JSON report, outer modules first. That of a run is the sum of its modules."""
    found: list[ModuleTime] = []

    def visit(run: tree_sums.Run, times: int) -> None:
        one = module_time(job, run.module, speed, rates)
        times *= run.length
        found.append(ModuleTime(*(_digits(times * value) for value in one)))
        for child in tree_sums.runs(run.module.children):
            visit(child, times)

    visit(tree_sums.Run(tree, 1, tree.name), 1)
    return found


def _as_json(data: object) -> str:
    """JSON text. The page shows control characters in its strings as escapes."""
    document = json.dumps(data, separators=(",", ":"))
    return json.dumps(_visible_strings(data), separators=(",", ":")) if _ESCAPED.search(document) else document


def _compressed(text: str) -> str:
    """A text with gzip and base64, which has no markup."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _pieces(text: str) -> list[tuple[bool, str]]:
    """A text in pieces, each with whether it is the name of an option, which must not break at the end of a line."""
    found, end = [], 0
    for option in _OPTION.finditer(text):
        found += [(False, text[end : option.start()]), (True, option[0])]
        end = option.end()
    return [*found, (False, text[end:])]


def _visible_strings(data: object) -> object:
    """JSON values with escapes in the place of control characters, in keys as well."""
    if isinstance(data, str):
        return visible(data, lines=True)
    if isinstance(data, Mapping):
        return {visible(name, lines=True) if isinstance(name, str) else name: _visible_strings(each) for name, each in data.items()}
    if isinstance(data, list | tuple):
        return [_visible_strings(each) for each in data]
    return data


def _without_control(value: object) -> object:
    """A value of the template as it is printed."""
    return visible(value, lines=True) if type(value) is str else value


def _asset(name: str) -> str:
    return resources.files(ASSETS).joinpath(name).read_text(encoding="utf-8")
