"""Converts records to values for the `json` module: dataclasses and named tuples, and what is in their fields.

A record becomes an object with its fields, by their names and in their order, unless `Formats` has other fields for its type.
`tools/json_schema.py` derives the JSON schema from the same formats and the types of the fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

SPREAD: Final = "*"
"""In the place of a name: the fields of the value are written among those of the record."""
OPTIONAL: Final = "?"
"""At the end of a name: the field is left out if its value is empty, 0, false or None."""


class Part(NamedTuple):
    """An object with values of the record, or of the attribute `path` of the record."""

    fields: Fields
    path: str = ""


Source = str | Part | Callable[[Any], object]
"""Where a value is from: an attribute of the record or a path of attributes, which is None if an attribute on the way is None; an
object; or a function of the record, whose annotation has the type of the result."""
Fields = Mapping[str, Source]
"""The JSON fields of a record, in order."""
Formats = Mapping[type, Fields | Callable[[Any], object]]
"""The records that are not written with their own fields: other fields, or a function that converts the record."""


def named(words: str) -> dict[str, Source]:
    """Fields in words. `name` is the attribute of that name, `name=path` another one."""
    found: dict[str, Source] = {}
    for word in words.split():
        name, _, path = word.partition("=")
        found[name] = path or name.removesuffix(OPTIONAL)
    return found


@cache
def own_fields(record: type, without: str = "") -> Fields:
    """All fields of a dataclass or a named tuple, except those in `without`; empty for other types."""
    names: Iterable[str] = getattr(record, "_fields", ())
    if dataclasses.is_dataclass(record):
        names = [each.name for each in dataclasses.fields(record)]
    return {name: name for name in names if name not in without.split()}


def encode(value: object, formats: Formats) -> Any:
    """A value as dictionaries, lists, strings, numbers and None. Items of a sequence are all plain values, or none is."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {name: encode(each, formats) for name, each in value.items()}
    kind: type = type(value)
    fields = formats.get(kind) or own_fields(kind)
    if callable(fields):
        return encode(fields(value), formats)
    if fields:
        return _object(value, fields, formats)
    assert isinstance(value, Iterable)
    items = list(value)
    if not items or isinstance(items[0], str | int | float):
        return items
    return [encode(each, formats) for each in items]


def _object(record: object, fields: Fields, formats: Formats) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, source in fields.items():
        if isinstance(source, Part):
            value = _object(attribute(record, source.path), source.fields, formats)
        else:
            value = encode(attribute(record, source) if isinstance(source, str) else source(record), formats)
        if name == SPREAD:
            found |= value
        elif name[-1] != OPTIONAL:
            found[name] = value
        elif value:
            found[name[:-1]] = value
    return found


def attribute(record: Any, path: str) -> Any:
    """The value at a path of attributes; the record itself if it is empty. None if an attribute on the way is None."""
    for name in path.split(".") if path else ():
        if record is None:
            return None
        record = getattr(record, name)
    return record
