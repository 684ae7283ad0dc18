"""`--info-against`: what changed since an older JSON report. Both reports are compared by their JSON fields."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isclose
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.files import refuse_special_file
from analyzer.report.json.document import SCHEMA, to_json
from analyzer.results import Report

OPTION: Final = "--info-against"
REMEDY: Final = "give a report that --info-json wrote"

Value = bool | int | float | str | None
Figures = dict[str, dict[str, Value]]
"""The compared fields of each section, by their path in the JSON report; those of the highest-memory rank begin with `rank.`."""

VERDICT: Final = ("state", "headroom_bytes", "capacity_bytes", "margin_bytes", "tightest_rank")
PARTS: Final = (
    "parameters_bytes", "gradients_bytes", "optimizer_bytes", "runtime_bytes", "activations_bytes", "transient_bytes",
)  # fmt: skip
"""Fields of the memory of a rank that add up to the peak."""
TOTALS: Final = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
CALLS: Final = ("bytes_per_iteration", "calls_per_iteration", "cluster_bytes_per_iteration", "cluster_calls_per_iteration")
MODEL: Final = ("parameters", "parameters_unpadded", "parameters_active", "parameters_routed_experts", "padded_vocab_size")
WORLD: Final = ("size", "nodes", "gpus_per_node")
PARALLEL: Final = (
    "tensor", "pipeline", "virtual_pipeline", "context", "data", "expert", "expert_tensor", "expert_data", "order",
    "sequence_parallel",
)  # fmt: skip
BATCH: Final = ("micro", "global", "microbatches", "sequence_length")
TIME: Final = ("iteration_seconds", "tokens_per_second_per_gpu")
"""Totals of the time, after its parts."""
TRAINING: Final = ("days", "gpu_hours", "cost")
SAME: Final = 1e-9
"""Figures of the time whose relative difference is smaller are equal, as are seconds whose difference is smaller."""
LARGEST: Final = 2**80
"""No figure of a report is as large; larger ones cannot be printed."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A field whose value differs."""

    field: str
    """Path in the JSON report. `rank` is the highest-memory rank."""
    old: Value
    new: Value

    @property
    def difference(self) -> int | float | None:
        """New minus old; None if one of them is not an amount."""
        old, new = self.old, self.new
        if not isinstance(old, int | float) or not isinstance(new, int | float) or isinstance(old, bool) or isinstance(new, bool):
            return None
        return None if self.field == "verdict.tightest_rank" else new - old

    @property
    def percent(self) -> float | None:
        """The difference in per cent of the old value; None if that is 0 or there is no difference."""
        return None if self.difference is None or not self.old else 100 * self.difference / abs(float(self.old))


@dataclass(frozen=True, kw_only=True)
class Against:
    """All changes since an older report."""

    file: str
    sections: Mapping[str, Sequence[Change]]
    """`source` (engine, release, GPU), `verdict`, `memory`, `time`, `communication`, `model`, `layout`, `batch`; no empty ones.

    The parts of the memory and of the time, and the groups of the communication that changed most come first.
    """


@dataclass(frozen=True)
class OldReport:
    """The figures of an older report, and the file they are from."""

    file: str
    figures: Figures
    document: dict[str, Any]
    """The JSON report."""


_NAMES: Final[dict[str, str]] = {}
"""What is printed in the place of the path of a report, by the folder of the report."""


@contextmanager
def named_reports(folder: str, name: str) -> Iterator[None]:
    """Prints a name in the place of the paths of reports in a folder, such as the launch of which they were written."""
    _NAMES[folder] = name
    try:
        yield
    finally:
        del _NAMES[folder]


def read_old(file: str) -> OldReport:
    """Reads a JSON report. Raises InputError if it cannot be read, is not complete, or is not a report of this schema."""
    refuse_special_file(file, OPTION, REMEDY)
    try:
        with open(file, encoding="utf-8") as stream:
            document = json.load(stream)
    except OSError as error:
        raise InputError(OPTION, f"cannot read '{file}' ({error.strerror or error})", REMEDY) from None
    except (ValueError, RecursionError):
        raise InputError(OPTION, f"'{file}' is not JSON, or not complete", REMEDY) from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        found = f"has the schema {schema!r} instead of {SCHEMA!r}" if isinstance(schema, str) else "is not a JSON report"
        raise InputError(OPTION, f"'{file}' {found}", REMEDY)
    try:
        return OldReport(_NAMES.get(os.path.dirname(file), file), _figures(document), document)
    except _MalformedError as error:
        raise InputError(OPTION, f"'{file}' is not a complete report: {error}", REMEDY) from None


def compare(old: OldReport, report: Report) -> Against:
    """What changed from `old` to `report`. A field that only one of them has is not compared, except for groups."""
    new = _figures(to_json(report))
    sections = {name: _changes(name, old.figures[name], new[name]) for name in new}
    sections["memory"] = sorted(sections["memory"], key=_order_of_memory)
    sections["time"] = sorted(sections["time"], key=_order_of_time)
    sections["communication"] = _by_group(sections["communication"])
    return Against(file=old.file, sections={name: found for name, found in sections.items() if found})


def _changes(section: str, old: Mapping[str, Value], new: Mapping[str, Value]) -> list[Change]:
    if section == "communication":
        old, new = ({**dict.fromkeys((*old, *new), 0), **side} for side in (old, new))
    return [Change(field=name, old=old[name], new=new[name]) for name in new if name in old and _differ(old[name], new[name])]


def _differ(old: Value, new: Value) -> bool:
    if isinstance(old, float) and isinstance(new, int | float):
        return not isclose(old, new, rel_tol=SAME, abs_tol=SAME)
    return old != new


def _order_of_time(change: Change) -> tuple[bool, float]:
    """Parts before totals; parts with the largest difference first, totals in their order."""
    return (False, -abs(change.difference or 0)) if ".parts_seconds." in change.field else (True, 0)


def _order_of_memory(change: Change) -> tuple[bool, float]:
    """Parts before totals; parts with the largest difference first, totals as in TOTALS."""
    name = change.field.rpartition(".")[2]
    return (True, TOTALS.index(name)) if name in TOTALS else (False, -abs(change.difference or 0))


def _by_group(changes: Sequence[Change]) -> list[Change]:
    """The changes of the group with the largest difference in bytes first."""
    groups: dict[str, list[Change]] = {}
    for change in changes:
        groups.setdefault(change.field.rpartition(".")[0], []).append(change)
    return [change for group in sorted(groups.values(), key=_largest, reverse=True) for change in group]


def _largest(changes: Sequence[Change]) -> float:
    """The largest difference in bytes."""
    return max((abs(change.difference or 0) for change in changes if "bytes" in change.field), default=0)


class _MalformedError(Exception):
    """A document lacks a field of the schema, or a field has a value of another type."""


def _figures(document: Mapping[str, Any]) -> Figures:
    """The compared fields of a report. Raises _MalformedError."""
    ranks = document.get("ranks")
    if not isinstance(ranks, list) or not ranks:
        raise _MalformedError("'ranks' is missing")
    rank = min(ranks, key=lambda each: (-_number(_record(each, "memory"), "device_bytes"), _first(each)))
    totals = _record(document, "communication_totals")
    verdict, model = _record(document, "verdict"), _record(document, "model")
    if model.get("parameters_active") == model.get("parameters"):  # a dense model
        model = {name: value for name, value in model.items() if name != "parameters_active"}
    return {
        "source": {**_fields("", document, ("engine", "megatron")), **_fields("verdict.", verdict, ("gpu",))},
        "verdict": _fields("verdict.", verdict, VERDICT),
        "memory": _fields("rank.memory.", rank["memory"], (*PARTS, *TOTALS)),
        "time": _time(document) if "time" in document else {},
        "communication": {
            name: value
            for group in totals
            for name, value in _fields(f"communication_totals.{group}.", _record(totals, group), CALLS).items()
        },
        "model": {
            **_fields("model.", model, MODEL),
            **_fields("rank.", rank, ("parameters",)),
        },
        "layout": {
            **_fields("world.", _record(document, "world"), WORLD),
            **_fields("parallel.", _record(document, "parallel"), PARALLEL),
        },
        "batch": _fields("batch.", _record(document, "batch"), BATCH),
    }


def _time(document: Mapping[str, Any]) -> dict[str, Value]:
    """The figures of the time that a report has: its parts, its totals, and those of the training."""
    time = _record(document, "time")
    parts = _record(time, "parts_seconds")
    found = {f"parts_seconds.{name}": value for name, value in parts.items()} | {name: time.get(name) for name in TIME}
    if time.get("training") is not None:
        training = _record(time, "training")
        found |= {f"training.{name}": training.get(name) for name in TRAINING}
    for name, value in found.items():
        if value is not None and (type(value) not in (int, float) or not abs(value) < LARGEST):
            raise _MalformedError(f"'time.{name}' is not a number")
    return {f"time.{name}": float(value) for name, value in found.items() if value is not None}


def _record(value: Any, name: str) -> dict[str, Any]:
    """The field `name` of a JSON object, which is an object itself."""
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise _MalformedError(f"{name!r} is missing")
    return found


def _number(record: Mapping[str, Any], name: str) -> int:
    found = record.get(name)
    if type(found) is not int:
        raise _MalformedError(f"{name!r} is missing")
    return found


def _first(rank: Mapping[str, Any]) -> int:
    """The first rank of an entry of `ranks`."""
    try:
        return _number({"ranks": rank["ranks"][0][0]}, "ranks")
    except (LookupError, TypeError):
        raise _MalformedError("'ranks' is missing") from None


def _fields(prefix: str, record: Mapping[str, Any], names: Sequence[str]) -> dict[str, Value]:
    """The fields of a JSON object that it has, by their path."""
    found = {f"{prefix}{name}": record[name] for name in names if name in record}
    for path, value in found.items():
        if not (value is None or isinstance(value, str) or (isinstance(value, int) and abs(value) < LARGEST)):
            raise _MalformedError(f"{path!r} is neither an integer nor text")
    return found
