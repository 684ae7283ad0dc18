"""Conversion of a `TrainingJob` to JSON and back, for the worker and for cache keys."""

from __future__ import annotations

import json
import typing
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from analyzer.specs import TrainingJob


def to_json(job: TrainingJob) -> str:
    """Return the job as JSON. Keys are sorted, so equal jobs give equal text."""
    return json.dumps(asdict(job), sort_keys=True)


def from_json(text: str) -> TrainingJob:
    """Return the job that `to_json` converted."""
    job: TrainingJob = _build(TrainingJob, json.loads(text))
    return job


def _build(kind: Any, value: Any) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: _build(hints[field.name], value[field.name]) for field in fields(kind) if field.name in value})
    if isinstance(value, list):  # every sequence in a spec is a tuple
        return tuple(_build(_item(kind), item) for item in value)
    if isinstance(value, dict):
        return _build(_dataclass_in(kind), value)
    return value


def _item(kind: Any) -> Any:
    arguments = typing.get_args(kind)
    for argument in arguments:
        if typing.get_origin(argument) is tuple:
            return _item(argument)
    return arguments[0] if typing.get_origin(kind) is tuple else object


def _dataclass_in(kind: Any) -> Any:
    return next((argument for argument in typing.get_args(kind) if is_dataclass(argument)), kind)
