"""The JSON report: names and meanings of its fields, which are a contract with other programs."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from analyzer.errors import InputError
from analyzer.report.json.document import dumps, to_json, write_text
from analyzer.results import Advice
from tests.fake_report import count, large_report, small_report

CONTRACT = {
    "": "schema engine world parallel batch model groups ranks communication communication_totals verdict assumptions",
    "world": "size nodes gpus_per_node",
    "parallel": "tensor pipeline virtual_pipeline context data expert expert_tensor expert_data order",
    "batch": "micro global microbatches",
    "model": "parameters parameters_unpadded parameters_active parameters_routed_experts parameters_adapters padded_vocab_size "
    "tree",
    "ranks.0": "ranks pipeline_rank parameters parameters_routed_experts chunks memory",
    "ranks.0.chunks.0": "virtual_stage layers",
    "ranks.0.memory": (
        "parameters_bytes gradients_bytes optimizer_bytes runtime_bytes allocated_bytes activations_bytes transient_bytes "
        "peak_allocated_first_iteration_bytes peak_allocated_bytes peak_at peak_reserved_bytes device_bytes"
    ),
    "communication.0": (
        "group kind phase module pipeline_rank shape dtype message_bytes "
        "calls_per_microbatch calls_per_iteration bytes_per_iteration"
    ),
    "communication_totals.tp": "calls_per_iteration bytes_per_iteration cluster_calls_per_iteration cluster_bytes_per_iteration",
    "verdict": "fits gpu capacity_bytes tightest_rank headroom_bytes",
}


@pytest.mark.parametrize("path", CONTRACT)
def test_all_fields_of_the_contract_exist(path: str) -> None:
    value = json.loads(dumps(to_json(small_report())))
    for step in path.split(".") if path else []:
        value = value[int(step) if step.isdecimal() else step]
    assert set(CONTRACT[path].split()) <= set(value)


def test_values_of_a_small_report() -> None:
    report = to_json(small_report())
    assert report["schema"] == "training-info/1"
    assert report["world"] == {"size": 16, "nodes": 2, "gpus_per_node": 8}
    assert {k: report["parallel"][k] for k in ("tensor", "pipeline", "virtual_pipeline", "data", "expert_data")} == {
        "tensor": 2,
        "pipeline": 2,
        "virtual_pipeline": None,
        "data": 4,
        "expert_data": 4,
    }
    assert {k: report["batch"][k] for k in ("micro", "global", "microbatches")} == {"micro": 4, "global": 512, "microbatches": 32}
    assert report["groups"]["tp"][0] == [0, 1]
    assert report["groups"]["pp"][0] == [0, 8]
    assert [entry["ranks"] for entry in report["ranks"]] == [[[0, 7]], [[8, 15]]]
    assert report["ranks"][1]["chunks"][0]["layers"] == list(range(13, 25))
    assert report["ranks"][0]["memory"]["peak_at"] == "backward of microbatch 1, output_layer"
    assert report["communication"][0]["shape"] == [2048, 4, 4096]
    assert report["communication"][0]["message_bytes"] == 64 * 2**20
    assert report["groups_truncated"] is False


def test_sizes_are_integers() -> None:
    def check(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                check(key, inner)
        elif isinstance(value, list):
            for inner in value:
                check(name, inner)
        elif "bytes" in name and value is not None:
            assert isinstance(value, int), name

    check("", to_json(small_report()))


def test_parts_of_the_memory_add_up() -> None:
    for entry in to_json(small_report())["ranks"]:
        memory = entry["memory"]
        assert memory["runtime_bytes"] == sum(part["bytes"] for part in memory["runtime_parts"])
        assert memory["transient_bytes"] == sum(part["bytes"] for part in memory["transient_parts"])


def test_parameters_of_the_tree_add_up_with_repeats() -> None:
    report = small_report()

    def total(node: dict[str, Any]) -> int:
        own: int = sum(prod(weight["shape"]) for weight in node.get("weights", []))
        below: int = sum(child.get("repeat", 1) * total(child) for child in node.get("children", []))
        return own + below

    tree = to_json(report)["model"]["tree"]
    assert total(tree) == tree["parameters"] == report.parameters == count(report.full_model)
    decoder = next(child for child in tree["children"] if child["name"] == "decoder")
    assert (decoder["children"][0]["name"], decoder["children"][0]["repeat"]) == ("layers.0–23", 24)
    linear = decoder["children"][0]["children"][0]["children"][0]
    assert linear["saved"][0] == {
        "name": "input",
        "shape": [2048, 4, 4096],
        "dtype": "bf16",
        "bytes": 64 * 2**20,
        "formula": "2·s·b·h",
    }


def test_group_lists_of_thousands_of_gpus_are_truncated_and_marked() -> None:
    text = dumps(to_json(large_report()))
    assert len(text) < 500_000
    assert json.loads(text)["groups_truncated"] is True


def test_advice_and_an_unknown_capacity() -> None:
    report = small_report(advice=(Advice(change="--sequence-parallel", device_bytes=1, saves_bytes=2, fits=True),))
    report = replace(report, verdict=replace(report.verdict, fits=None, gpu=None, capacity_bytes=None, headroom_bytes=None))
    document = to_json(report)
    assert document["advice"] == [
        {"change": "--sequence-parallel", "device_bytes": 1, "saves_bytes": 2, "fits": True, "iteration_seconds": None}
    ]
    assert document["verdict"]["fits"] is None


def test_the_document_is_written_to_a_file(tmp_path: Path) -> None:
    write_text(dumps(to_json(small_report())), str(tmp_path / "report.json"))
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    assert json.loads(text) == json.loads(json.dumps(to_json(small_report())))


@pytest.mark.parametrize("name", ["missing/report.json", "."])
def test_an_unwritable_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"^--info-json: cannot write .*; name a file") as caught:
        write_text(dumps(to_json(small_report())), str(tmp_path / name))
    assert "\n" not in str(caught.value)
