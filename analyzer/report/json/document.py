"""The report as JSON, for other programs: schema training-info/1.

Names keep their meaning within a schema; fields may be added. All sizes are bytes, all ranks global, and ranges of
ranks inclusive.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from analyzer.errors import InputError
from analyzer.files import NOT_WRITABLE, opened, replacing
from analyzer.layout.stages import Chunk
from analyzer.modules.tree import Collective, Parameter, Tensor
from analyzer.report import tree_sums
from analyzer.report.json.encoder import SPREAD, Formats, Part, encode, named, own_fields
from analyzer.report.visible import visible_json
from analyzer.results import RankClass, RankMemory, Report
from analyzer.specs import BatchSpec, SoftwareSpec
from analyzer.version import __version__

SCHEMA: Final = "training-info/1"
MAX_MEMBERS: Final = 131_072
"""Ranks of one group that are listed. `groups_truncated` is true for worlds in which groups can be larger."""


class ChunkTree(NamedTuple):
    """A model chunk with its modules."""

    chunk: Chunk
    tree: tree_sums.Run


class RankTimeline(NamedTuple):
    """Allocated bytes of a rank class over an iteration."""

    pipeline_rank: int
    kinds: tuple[str, ...]
    bytes: tuple[tuple[int, ...], ...]


def to_json(report: Report) -> dict[str, Any]:
    """The report as values for the `json` module."""
    return {**head(report.command), **encode(report, FORMATS)}


def head(command: Sequence[str], schema: str = SCHEMA) -> dict[str, Any]:
    """The fields with which every document begins. `command`: the words of the launch that was analyzed."""
    return {"schema": schema, "version": __version__, "command": list(command)}


def _tree(report: Report) -> tree_sums.Run:
    return tree_sums.Run(report.full_model, 1, report.full_model.name)


def _groups(report: Report) -> dict[str, list[list[int]]]:
    return {kind: [list(group[:MAX_MEMBERS]) for group in groups] for kind, groups in report.groups.items()}


def _timelines(report: Report) -> list[RankTimeline]:
    pairs = zip(report.ranks, report.timelines, strict=False)
    return [RankTimeline(rank.pipeline_rank, line.kinds, line.points) for rank, line in pairs]


def _warnings(report: Report) -> list[str]:
    return [*report.unknown, *report.warnings]


def _chunks(rank: RankClass) -> list[ChunkTree]:
    pairs = zip(rank.chunks, rank.trees, strict=True)
    return [ChunkTree(chunk, tree_sums.Run(tree, 1, tree.name)) for chunk, tree in pairs]


def _parameters(run: tree_sums.Run) -> int:
    return tree_sums.parameters(run.module)


def _saved_bytes(run: tree_sums.Run) -> int:
    return run.module.retained_bytes


def _repeat(run: tree_sums.Run) -> int:
    return run.length if run.length > 1 else 0


def _backward_workspace(run: tree_sums.Run) -> tuple[Tensor, ...]:
    return (*run.module.backward_workspace, *run.module.recomputed_last)


def _children(run: tree_sums.Run) -> list[tree_sums.Run]:
    return list(tree_sums.runs(run.module.children))


def _full_shape(parameter: Parameter) -> tuple[int, ...]:
    return parameter.full_shape or parameter.shape


WORLD: Final = Part(named("size=world_size nodes gpus_per_node"), "job.parallel")
SOFTWARE: Final = named("transformer_engine=te torch")
MODEL: Final = named("parameters parameters_unpadded padded_vocab_size=job.model.padded_vocab_size")
PARALLEL: Final = named("tensor pipeline virtual_pipeline context data expert expert_tensor expert_data order sequence_parallel")
NOT_IN_MEMORY: Final = (
    "peak_event peak_in_first_iteration garbage_bytes unsplit_bytes unsplit_at_first_peak_bytes unsplit_at_peak_bytes replayed"
)
"""Fields of `RankMemory` for the texts of the report."""
FORMATS: Final[Formats] = {
    Report: {
        **named("engine megatron=job.megatron software=job.software"),
        "world": WORLD,
        "parallel": Part(PARALLEL, "job.parallel"),
        "batch": "job.batch",
        "model": Part(
            {
                **named("parameters parameters_unpadded parameters_active parameters_routed_experts parameters_adapters"),
                "padded_vocab_size": "job.model.padded_vocab_size",
                "tree": _tree,
            }
        ),
        "groups": _groups,
        **named("groups_truncated group_counts ranks"),
        "timelines": _timelines,
        **named("communication communication_totals verdict phases? time? advice assumptions newest_release=newest"),
        "warnings": _warnings,
    },
    SoftwareSpec: SOFTWARE,
    BatchSpec: named("micro=micro_batch_size global=global_batch_size microbatches sequence_length=seq_length"),
    RankClass: {**own_fields(RankClass, without="trees"), "chunks": _chunks},
    RankMemory: own_fields(RankMemory, without=NOT_IN_MEMORY),
    Chunk: own_fields(Chunk, without="mtp_layers"),
    ChunkTree: {SPREAD: "chunk", "tree": "tree"},
    tree_sums.Run: {
        "name": "name",
        "parameters": _parameters,
        "saved_bytes": _saved_bytes,
        "repeat?": _repeat,
        **named("source?=module.source recomputed?=module.recomputed weights?=module.parameters saved?=module.saved"),
        **named("offloaded?=module.offloaded forward_workspace?=module.forward_workspace forward_held?=module.forward_held"),
        "backward_workspace?": _backward_workspace,
        "collectives?": "module.collectives",
        "children?": _children,
    },
    Parameter: {**named("name shape"), "full_shape": _full_shape, **named("dtype sharding")},
    Tensor: named("name shape dtype bytes formula? shares?"),
    Collective: named("kind group phase shape dtype message_bytes count"),
}


def write_text(text: str, path: str, *, option: str = "--info-json") -> None:
    """Writes a document to a file in one step. Raises InputError that names `option` if it cannot be written."""
    try:
        with replacing(Path(path)) as place, opened(place) as file:
            file.write(encodable(text, "utf-8"))
    except OSError as error:
        raise InputError(option, f"cannot write '{path}' ({error.strerror or error})", NOT_WRITABLE) from None


def encodable(document: str, encoding: str | None) -> str:
    """A JSON document without control characters, whose characters `encoding` has: JSON escapes replace the others.

    None is an encoding for all characters.
    """
    document = visible_json(document)
    if encoding is None:
        return document
    try:
        document.encode(encoding)
    except UnicodeEncodeError:
        return "".join(each if each.isascii() else json.dumps(each)[1:-1] for each in document)
    return document


def dumps(document: dict[str, Any]) -> str:
    """A JSON document with one line for each field and for each element of a list."""
    fields = []
    for name, value in document.items():
        if isinstance(value, list) and value:
            items = ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in value)
            fields.append(f"{json.dumps(name)}: [\n  {items}\n ]")
        else:
            fields.append(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n " + ",\n ".join(fields) + "\n}\n"
