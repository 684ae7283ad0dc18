"""End-to-end comparison with the process groups of Megatron-LM core 0.16.1. All groups are equal."""

from __future__ import annotations

from typing import Any

import pytest

from tests.command import report, torchrun
from tests.data_files import truth_records

FILE = "groups.json"
SIZES = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "vpp": "virtual_pipeline",
    "dp": "data",
    "edp": "expert_data",
    "order": "order",
}


def name(record: dict[str, Any]) -> str:
    return f"{record['world_size']}-" + "-".join(f"{key}{record['sizes'][key]}" for key in ("tp", "pp", "cp", "ep", "etp", "vpp"))


def job(record: dict[str, Any]) -> list[str]:
    """The command line of a record, with the release that the groups are of."""
    return [*torchrun(record["world_size"]), *record["argv"], "--info-megatron", "0.16.1"]


def test_all_records_are_present() -> None:
    assert len(truth_records(FILE)) == 21
    assert sum("--num-experts" in record["argv"] for record in truth_records(FILE)) == 13


@pytest.mark.parametrize("record", truth_records(FILE), ids=name)
def test_groups_match_megatron(record: dict[str, Any]) -> None:
    output = report(*job(record))
    assert {key: output["parallel"][long] for key, long in SIZES.items()} == record["sizes"]
    assert output["groups_truncated"] is record["truncated"] is False
    reported = set(output["groups"])
    assert reported == {"tp", "pp", "dp", "dp_cp", "cp", "ep", "etp", "edp", "tp_ep", "embd", "pos_embd"}
    assert output["groups"] == {kind: record["groups"][kind] for kind in reported}
    assert output["group_counts"] == {kind: record["n_groups"][kind] for kind in reported}
