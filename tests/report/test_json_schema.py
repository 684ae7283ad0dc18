"""The JSON schema: it agrees with the records, with the documents, with docs/json.md, and with the other reports."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from analyzer import __version__
from analyzer.report.json.encoder import own_fields
from tests.command import run
from tests.time.run_log.logs import steady
from tests.trace.test_compare import recorded_step
from tools.json_schema import FILE, Field, builders, text
from tools.update_examples import ROOT, SCRIPTS, command_of
from tools.write_reports import example_commands

LAUNCH: Final = (
    "--nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 16 --bf16 --tokenizer-type NullTokenizer "
    "--vocab-size 9999 --info-gpu H100-80GB --train-iters 10 --lr 1e-4"
).split()
OFFLOAD: Final = (
    "--info-model facebook/opt-6.7b --info-world-size 1 --info-gpu T4 --info-inference batch=8,prompt=64,generate=8 "
    "--info-offload weights=50/50/0,cache=100/0/0,activations=100/0/0"
).split()

OF_PAGE: Final = ("report.js", "training.js", "inference.js", "page.html.j2")
"""What the page for a browser is made of."""
ONLY_IN_JSON: Final[Mapping[str, str]] = {
    "Against": "changed",
    "Cause": "factor",
    "Check": "schema trace passed",
    "CommunicationRow": "calls_per_microbatch batched",
    "InferenceReport": "software",
    "LogComparison": "iteration_seconds_percentiles",
    "Parameter": "full_shape sharding",
    "QuantizationSpec": "group_size",
    "RankMemory": "released_bytes",
    "Report": "software groups_truncated",
    "ServingReport": "acceptance",
    "Run": "source recomputed offloaded forward_workspace forward_held backward_workspace",
    "SearchResult": "fitting",
    "SoftwareSpec": "transformer_engine torch",
    "Tensor": "formula shares",
    "TimeEstimate": "model_flops_per_iteration flops_definition",
    "TrainingTime": "training_days",
}
"""Fields of the JSON documents, by record, that neither the console nor the page for a browser names. They print some of them in
other words, such as the versions of the software among the assumptions."""
NOT_BY_NAME: Final[Mapping[str, str]] = {
    "Evaluation": "layout",
    "InferenceReport": "warnings unknown command",
    "InferenceTime": "others",
    "OffloadReport": "sizes other_seconds assumptions unknown price command",
    "RankClass": "chunks trees",
    "RankMemory": (
        "peak_event peak_in_first_iteration garbage_bytes unsplit_bytes unsplit_at_first_peak_bytes unsplit_at_peak_bytes replayed"
    ),
    "Report": "groups full_model warnings unknown timelines command",
    "SearchResult": "best front given least_seconds ended",
    "Tier": "weights cache activations buffers capacity",
}
"""Fields of result records that no JSON field names: a function of the format converts them, or the JSON does not have them."""
RESULTS: Final = (
    "analyzer.results",
    "analyzer.inference.results",
    "analyzer.inference.offload.estimate",
    "analyzer.layout_search.evaluation",
    "analyzer.layout_search.extremes",
    "analyzer.layout_search.related",
    "analyzer.layout_search.result",
    "analyzer.report.against",
    "analyzer.time.run_log.compare",
    "analyzer.trace.compare",
)
"""Modules with records of results."""
SECTIONS: Final = {
    "training": ("search", "check"),
    "inference": ("inference",),
    "offloading": ("inference",),
    "searches": ("search",),
    "largest": ("search",),
    "extremes": ("search",),
    "check": ("check",),
}
"""The sections of docs/json.md that describe each document, after the part before the first section."""


@cache
def fields() -> tuple[Field, ...]:
    return tuple(field for builder, _ in builders() for field in builder.fields)


def test_the_file_is_that_of_the_records() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), "run tools/json_schema.py"


def test_every_field_of_a_result_is_written_or_named_here() -> None:
    names = {(field.record, field.attribute) for field in fields()}.union(*(builder.visited for builder, _ in builders()))
    found: dict[str, list[str]] = {}
    for record in {record for record, _ in names if record.__module__ in RESULTS}:
        if left := [name for name in own_fields(record) if (record, name) not in names]:
            found[record.__name__] = left
    assert found == {record: names.split() for record, names in NOT_BY_NAME.items()}


def _words(text: str) -> set[str]:
    """The names in backticks."""
    return {word for code in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", code)}


def test_every_field_is_documented() -> None:
    top, *sections = re.split(r"^## ", (ROOT / "docs" / "json.md").read_text(), flags=re.MULTILINE)
    texts = {section.partition("\n")[0]: section for section in sections}
    for builder, schema in builders():
        known = _words(top + "".join(texts[name] for name in SECTIONS[builder.name]))
        missing = {f"{field.owner}: {field.name}" for field in builder.fields if field.name not in known}
        assert not missing | (schema["properties"].keys() - known)


def test_every_field_is_in_another_report_or_named_here() -> None:
    """A field is in the console report if one of its modules reads an attribute of that name; in the page if its script does."""
    console = (ROOT / "analyzer" / "report" / "console").glob("*.py")
    shown = {node.attr for file in console for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
    assets = ROOT / "analyzer" / "report" / "html" / "assets"
    shown |= set(re.findall(r"\w+", "".join((assets / name).read_text() for name in OF_PAGE)))
    found: dict[str, set[str]] = {}
    for field in fields():
        if field.name not in shown and field.attribute not in shown:
            found.setdefault(field.record.__name__, set()).add(field.name)
    assert found == {record: set(names.split()) for record, names in ONLY_IN_JSON.items()}


def _closed(schema: Any) -> Any:
    """The schema without further fields."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(each) for name, each in schema.items()}
    if "properties" in closed and closed.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def check(document: Mapping[str, Any], kind: str) -> None:
    """Assert that a document has the schema of its kind and no other fields."""
    jsonschema = pytest.importorskip("jsonschema", reason="the extra test is not installed")
    schema = json.loads(FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    closed = {**_closed({"$defs": schema["$defs"]}), "$ref": f"#/$defs/{kind}"}
    jsonschema.Draft202012Validator(closed).validate(document)
    jsonschema.Draft202012Validator(schema).validate(document)
    assert list(document)[:3] == ["schema", "version", "command"]
    assert document["version"] == __version__


def written(path: Path, *argv: str) -> dict[str, Any]:
    """The document that a command writes."""
    outcome = run(*argv, "--info-json", str(path))
    assert outcome.status in (0, 1, 3), outcome.err
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert document["command"][-2:] == ["--info-json", str(path)]
    return document


def _examples() -> Iterator[tuple[str, tuple[str, ...]]]:
    options = {script.stem: shlex.split(command_of(script))[3:] for script in SCRIPTS}
    for command in example_commands(ROOT):
        yield command.name, (*command.words, *options[command.name])


EXAMPLES: Final = dict(_examples())


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, tmp_path: Path) -> None:
    kind = "offloading" if "opt" in name else "inference" if name.startswith("generate") else "training"
    check(written(tmp_path / "report.json", *EXAMPLES[name]), kind)


def test_documents_of_options(tmp_path: Path) -> None:
    first = written(tmp_path / "first.json", *LAUNCH)
    (tmp_path / "run.log").write_text("\n".join(steady(1.5 * first["time"]["iteration_seconds"])) + "\n")
    options = ("--info-against", str(tmp_path / "first.json"), "--info-log", str(tmp_path / "run.log"))
    report = written(tmp_path / "second.json", *LAUNCH, "--sequence-parallel", "--tensor-model-parallel-size", "2", *options)
    assert report["against"]["changed"]
    assert report["log"]["causes"]
    check(report, "training")


@pytest.mark.slow
def test_documents_of_searches(tmp_path: Path) -> None:
    asked = (*LAUNCH, "--info-search-over", "tp,recompute")
    report = written(tmp_path / "search.json", *asked, "--info-search")
    assert report["search"]["commands"]
    check(report, "training")
    check(written(tmp_path / "several.json", *asked, "--info-search", "--info-search-gpus", "4,8"), "searches")
    check(written(tmp_path / "largest.json", *LAUNCH, "--info-search-max", "micro-batch-size"), "largest")
    check(written(tmp_path / "extremes.json", *asked, "--info-search", "--info-search-max", "micro-batch-size"), "extremes")


def test_documents_of_offloading(tmp_path: Path) -> None:
    check(written(tmp_path / "offload.json", *OFFLOAD), "offloading")


def test_documents_of_checks(tmp_path: Path) -> None:
    recorded_step(tmp_path / "step.trace", extra=64 << 20)
    document = written(tmp_path / "check.json", "--info-check", str(tmp_path / "step.trace"))
    assert not document["passed"]
    check(document, "check")
