"""Writes docs/json.schema.json: the JSON schema of the documents that `--info-json` writes.

    python tools/json_schema.py

It is derived from the formats in `analyzer/report/json` and from the annotations of the records. docs/json.md describes the fields;
tests/report/test_json_schema.py compares both.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from analyzer.inference.offload.estimate import OffloadReport
from analyzer.inference.results import InferenceReport
from analyzer.layout_search.related import Limit, Question
from analyzer.layout_search.result import SearchResult
from analyzer.report.against import Against
from analyzer.report.json import against, check, document, inference, log, offload, search
from analyzer.report.json.check import Check
from analyzer.report.json.encoder import OPTIONAL, SPREAD, Fields, Formats, Part, own_fields
from analyzer.results import Report
from analyzer.time.run_log.compare import LogComparison

ROOT: Final = Path(__file__).resolve().parent.parent
FILE: Final = ROOT / "docs" / "json.schema.json"
PLAIN: Final[Mapping[object, str]] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class Value(NamedTuple):
    """A value in a document: its type, and the formats of the records in it."""

    type: Any
    formats: Formats


class Document(NamedTuple):
    """A kind of document: the record whose fields it has, and fields of options."""

    record: Value | None
    options: Mapping[str, Value]
    required: tuple[str, ...] = ()


DOCUMENTS: Final[Mapping[str, Document]] = {
    "training": Document(
        Value(Report, document.FORMATS),
        {
            "search": Value(SearchResult, search.FORMATS),
            "comparisons": Value(list[Check], check.FORMATS),
            "log": Value(LogComparison, log.FORMATS),
            "against": Value(Against, against.FORMATS),
        },
    ),
    "inference": Document(Value(InferenceReport, inference.FORMATS), {}),
    "offloading": Document(Value(OffloadReport, offload.FORMATS), {}),
    "searches": Document(None, {"searches": Value(list[Question], search.FORMATS)}, ("searches",)),
    "extremes": Document(None, {"extremes": Value(list[search.OfGpu], search.FORMATS)}, ("extremes",)),
    "largest": Document(None, {"largest": Value(Limit, search.FORMATS)}, ("largest",)),
    "check": Document(Value(Check, check.FORMATS), {}),
}
"""The documents. They begin with the same fields."""


class Field(NamedTuple):
    """A field of an object of the schema."""

    owner: str
    """The document, and in it the record: training.RankMemory."""
    name: str
    record: type
    attribute: str | None
    """The attribute of the record that it is; None if a function returns it."""


class Builder:
    """Builds the schema of one document. `fields` are the fields of its objects, `visited` the attributes of records in them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.definitions: dict[str, Any] = {}
        self.fields: list[Field] = []
        self.visited: set[tuple[type, str]] = set()

    def document(self, of: Document) -> dict[str, Any]:
        """The schema of the document."""
        schema = check.SCHEMA if of.record is not None and of.record.type is Check else document.SCHEMA
        head = {
            "schema": {"const": schema},
            "version": {"type": "string"},
            "command": {"type": "array", "items": {"type": "string"}},
        }
        found = {"properties": head, "required": list(head)}
        if of.record is not None:
            fields = of.record.formats[of.record.type]
            assert isinstance(fields, Mapping)
            own = self.object(of.record.type, fields, of.record.formats)
            found = _merged(found, own)
        options = {name: self.value(each.type, each.formats) for name, each in of.options.items()}
        return {"type": "object", **_merged(found, {"properties": options, "required": list(of.required)})}

    def value(self, kind: Any, formats: Formats) -> dict[str, Any]:
        """The schema of a value whose annotation is `kind`."""
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if kind in PLAIN:
            return {"type": PLAIN[kind]}
        if origin is Literal:
            return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
        if origin in (types.UnionType, typing.Union):
            return _either([self.value(each, formats) for each in arguments])
        if kind in (Any, object):
            return {}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.value(arguments[1], formats)}
        if origin is tuple and arguments[-1] is not Ellipsis:
            items = [self.value(each, formats) for each in arguments]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return {"type": "array", "items": self.value(arguments[0], formats)}
        return self.record(kind, formats)

    def record(self, kind: type, formats: Formats) -> dict[str, Any]:
        """The schema of a record, with a definition for each type."""
        fields = formats.get(kind) or own_fields(kind)
        if callable(fields):
            return self.value(_returned(fields), formats)
        if not fields:
            raise TypeError(f"{kind} is neither a record nor a JSON value")
        name = f"{self.name}.{kind.__name__}"
        if name not in self.definitions:
            self.definitions[name] = {}  # a tree refers to itself
            description = (kind.__doc__ or "").partition("\n")[0]
            self.definitions[name] = {"description": description, "type": "object", **self.object(kind, fields, formats)}
        return {"$ref": f"#/$defs/{name}"}

    def object(self, kind: type, fields: Fields, formats: Formats) -> dict[str, Any]:
        """Properties of an object with fields of a record."""
        found: dict[str, Any] = {"properties": {}, "required": []}
        for name, source in fields.items():
            if isinstance(source, Part):
                of = self.attribute(kind, source.path)
                value = {"type": "object", **self.object(of, source.fields, formats)}
            else:
                of = self.attribute(kind, source) if isinstance(source, str) else _returned(source)
                value = {} if name == SPREAD else self.value(of, formats)
            if name == SPREAD:
                found = _merged(found, self.spread(of, formats))
                continue
            plain = name.removesuffix(OPTIONAL)
            attribute = source.rpartition(".")[2] if isinstance(source, str) else None
            self.fields.append(Field(f"{self.name}.{kind.__name__}", plain, kind, attribute))
            required = [] if name.endswith(OPTIONAL) else [name]
            found = _merged(found, {"properties": {plain: _present(value) if not required else value}, "required": required})
        return found

    def spread(self, kind: Any, formats: Formats) -> dict[str, Any]:
        """Properties of a value whose fields are written among those of a record."""
        if typing.get_origin(kind) is not None:
            return self.value(kind, formats)
        fields = formats.get(kind) or own_fields(kind)
        assert isinstance(fields, Mapping)
        return self.object(kind, fields, formats)

    def attribute(self, kind: Any, path: str) -> Any:
        """The annotation of the value at a path of attributes."""
        optional = False
        for name in path.split(".") if path else ():
            options = [each for each in typing.get_args(kind) if each is not type(None)]
            if len(options) == 1 and type(None) in typing.get_args(kind):
                kind, optional = options[0], True
            self.visited.add((kind, name))
            kind = _annotation(kind, name)
        return kind | None if optional else kind


def _annotation(record: type, name: str) -> Any:
    hints = typing.get_type_hints(record)
    if name in hints:
        return hints[name]
    found = getattr(record, name)
    return _returned(found.func if isinstance(found, cached_property) else found.fget)


def _returned(function: Callable[..., object]) -> Any:
    return typing.get_type_hints(function)["return"]


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = {**one, **other, "properties": {**one["properties"], **other.get("properties", {})}}
    return merged | {"required": list(dict.fromkeys([*one["required"], *other.get("required", [])]))}


def _either(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    if all(list(each) == ["type"] for each in schemas):
        return {"type": [each["type"] for each in schemas]}
    return {"anyOf": schemas}


def _present(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that is left out instead of null."""
    left = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    return left[0] if len(left) == 1 else schema


def builders() -> Iterator[tuple[Builder, dict[str, Any]]]:
    """The builder and the schema of each document."""
    for name, of in DOCUMENTS.items():
        builder = Builder(name)
        yield builder, builder.document(of)


def schema() -> dict[str, Any]:
    """The schema of all documents."""
    definitions: dict[str, Any] = {}
    for builder, found in builders():
        definitions |= {builder.name: found, **builder.definitions}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Documents of get-training-info --info-json",
        "description": "docs/json.md describes the fields. Later versions may add fields.",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in DOCUMENTS],
        "$defs": definitions,
    }


def text() -> str:
    """The content of the file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    FILE.write_text(text(), encoding="utf-8")
    print(f"{FILE.relative_to(ROOT)}: {len(schema()['$defs'])} definitions")


if __name__ == "__main__":
    main()
