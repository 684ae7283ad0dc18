"""The report as JSON, for other programs: schema training-info/1.

Names keep their meaning within a schema; fields may be added. All sizes are bytes, all ranks global, and ranges of
ranks inclusive.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.files import NOT_WRITABLE, opened, replacing
from analyzer.modules.tree import Collective, Parameter, Tensor
from analyzer.report import tree_sums
from analyzer.report.visible import visible_json
from analyzer.results import CommunicationRow, MemoryPart, RankClass, RankMemory, Report, TimeEstimate

SCHEMA: Final = "training-info/1"
FLOPS_DEFINITION: Final = (
    "Model FLOPs are those of Megatron's num_floating_point_operations. Utilization is of the dense 16-bit peak of the GPU; of the "
    "hardware, with the operations of recomputed GEMMs and attention."
)
MAX_MEMBERS: Final = 131_072
"""Ranks of one group that are listed. `groups_truncated` is true for worlds in which groups can be larger."""


def to_json(report: Report) -> dict[str, Any]:
    """The report as values for the `json` module."""
    job = report.job
    parallel, batch = job.parallel, job.batch
    return {
        "schema": SCHEMA,
        "engine": report.engine,
        "megatron": job.megatron,
        "software": {"transformer_engine": job.software.te, "torch": job.software.torch},
        "world": {"size": parallel.world_size, "nodes": parallel.nodes, "gpus_per_node": parallel.gpus_per_node},
        "parallel": {
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "virtual_pipeline": parallel.virtual_pipeline,
            "context": parallel.context,
            "data": parallel.data,
            "expert": parallel.expert,
            "expert_tensor": parallel.expert_tensor,
            "expert_data": parallel.expert_data,
            "order": parallel.order,
            "sequence_parallel": parallel.sequence_parallel,
        },
        "batch": {
            "micro": batch.micro_batch_size,
            "global": batch.global_batch_size,
            "microbatches": batch.microbatches,
            "sequence_length": batch.seq_length,
        },
        "model": {
            "parameters": report.parameters,
            "parameters_unpadded": report.parameters_unpadded,
            "parameters_active": report.parameters_active,
            "parameters_routed_experts": report.parameters_routed_experts,
            "padded_vocab_size": job.model.padded_vocab_size,
            "tree": _tree(tree_sums.Run(report.full_model, 1, report.full_model.name)),
        },
        "groups": {kind: [list(group[:MAX_MEMBERS]) for group in groups] for kind, groups in report.groups.items()},
        "groups_truncated": report.groups_truncated,
        "group_counts": dict(report.group_counts),
        "ranks": [_rank(rank) for rank in report.ranks],
        "timelines": [
            {"pipeline_rank": rank.pipeline_rank, "kinds": list(line.kinds), "bytes": [list(point) for point in line.points]}
            for rank, line in zip(report.ranks, report.timelines, strict=False)
        ],
        "communication": [_message(message) for message in report.communication],
        "communication_totals": {kind: asdict(total) for kind, total in report.communication_totals.items()},
        "verdict": asdict(report.verdict),
        **({} if report.time is None else {"time": _time(report.time)}),
        "advice": [asdict(advice) for advice in report.advice],
        "assumptions": list(report.assumptions),
        "newest_release": None if report.newest is None else asdict(report.newest),
        "warnings": [*report.unknown, *report.warnings],
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


def _time(time: TimeEstimate) -> dict[str, Any]:
    return {
        "iteration_seconds": time.iteration_seconds,
        "range_seconds": None if time.range_seconds is None else list(time.range_seconds),
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "model_flops_per_iteration": time.model_flops_per_iteration,
        "model_tflops_per_gpu": time.model_tflops_per_gpu,
        "model_flops_utilization": time.model_flops_utilization,
        "hardware_flops_utilization": time.hardware_flops_utilization,
        "flops_definition": FLOPS_DEFINITION,
        "peak_flops": time.peak_flops,
        "pipeline_rank": time.pipeline_rank,
        "parts_seconds": dict(time.parts_seconds),
        "bottleneck": time.bottleneck,
        "training": None if time.training is None else asdict(time.training),
        "calibration": time.calibration,
        "not_counted": list(time.not_counted),
        "timelines": [
            {"pipeline_rank": line.pipeline_rank, "spans": [list(span) for span in line.spans]} for line in time.timelines
        ],
    }


def _rank(rank: RankClass) -> dict[str, Any]:
    chunks = [
        {
            "virtual_stage": chunk.virtual_stage,
            "layers": list(chunk.layers),
            "pre_process": chunk.pre_process,
            "post_process": chunk.post_process,
            "tree": _tree(tree_sums.Run(tree, 1, tree.name)),
        }
        for chunk, tree in zip(rank.chunks, rank.trees, strict=True)
    ]
    return {
        "ranks": [list(span) for span in rank.ranks],
        "pipeline_rank": rank.pipeline_rank,
        "parameters": rank.parameters,
        "parameters_routed_experts": rank.parameters_routed_experts,
        "chunks": chunks,
        "memory": _memory(rank.memory),
    }


def _memory(memory: RankMemory) -> dict[str, Any]:
    return {
        "parameters_bytes": memory.parameters_bytes,
        "gradients_bytes": memory.gradients_bytes,
        "optimizer_bytes": memory.optimizer_bytes,
        "runtime_bytes": memory.runtime_bytes,
        "allocated_bytes": memory.allocated_bytes,
        "activations_bytes": memory.activations_bytes,
        "transient_bytes": memory.transient_bytes,
        "peak_allocated_first_iteration_bytes": memory.peak_allocated_first_iteration_bytes,
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_at": memory.peak_at,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "device_bytes": memory.device_bytes,
        "device_range_bytes": list(memory.device_range_bytes),
        "released_bytes": memory.released_bytes,
        "graph_pool_bytes": memory.graph_pool_bytes,
        "runtime_parts": [_part(part) for part in memory.runtime_parts],
        "transient_parts": [_part(part) for part in memory.transient_parts],
        "microbatches_in_flight": list(memory.microbatches_in_flight),
    }


def _part(part: MemoryPart) -> dict[str, Any]:
    return {"name": part.name, "bytes": part.bytes}


def _message(message: CommunicationRow) -> dict[str, Any]:
    # asdict makes deep copies, which is slow for hundreds of rows
    return {
        "group": message.group,
        "kind": message.kind,
        "phase": message.phase,
        "module": message.module,
        "pipeline_rank": message.pipeline_rank,
        "shape": list(message.shape),
        "dtype": message.dtype,
        "message_bytes": message.message_bytes,
        "calls_per_microbatch": message.calls_per_microbatch,
        "calls_per_iteration": message.calls_per_iteration,
        "bytes_per_iteration": message.bytes_per_iteration,
        "peer": message.peer or None,
        "batched": message.batched,
    }


def _tree(run: tree_sums.Run) -> dict[str, Any]:
    """A module and its descendants. Consecutive equal modules are written once, with `repeat`."""
    module = run.module
    node: dict[str, Any] = {
        "name": run.name,
        "parameters": tree_sums.parameters(module),
        "saved_bytes": tree_sums.saved_bytes(module),
    }
    if run.length > 1:
        node["repeat"] = run.length
    if module.source:
        node["source"] = module.source
    if module.recomputed:
        node["recomputed"] = True
    lists = {
        "weights": [_weight(parameter) for parameter in module.parameters],
        "saved": [_tensor(tensor) for tensor in module.saved],
        "offloaded": [_tensor(tensor) for tensor in module.offloaded],
        "forward_workspace": [_tensor(tensor) for tensor in module.forward_workspace],
        "forward_held": [_tensor(tensor) for tensor in module.forward_held],
        "backward_workspace": [_tensor(tensor) for tensor in (*module.backward_workspace, *module.recomputed_last)],
        "collectives": [_collective(collective) for collective in module.collectives],
        "children": [_tree(child) for child in tree_sums.runs(module.children)],
    }
    return node | {name: values for name, values in lists.items() if values}


def _weight(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "shape": list(parameter.shape),
        "full_shape": list(parameter.full_shape or parameter.shape),
        "dtype": parameter.dtype,
        "sharding": parameter.sharding,
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    fields = {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": tensor.bytes}
    if tensor.formula:
        fields["formula"] = tensor.formula
    if tensor.shares:
        fields["shares"] = tensor.shares
    return fields


def _collective(collective: Collective) -> dict[str, Any]:
    return {
        "kind": collective.kind,
        "group": collective.group,
        "phase": collective.phase,
        "shape": list(collective.shape),
        "dtype": collective.dtype,
        "message_bytes": collective.message_bytes,
        "count": collective.count,
    }
