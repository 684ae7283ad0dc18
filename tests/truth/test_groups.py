"""Process groups that Megatron-LM core 0.16.1 made, through the whole program: every group equal."""

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
    """The command line of a record."""
    return [*torchrun(record["world_size"]), *record["argv"]]


def test_the_records_are_at_hand() -> None:
    assert len(truth_records(FILE)) == 21
    assert sum("--num-experts" in record["argv"] for record in truth_records(FILE)) == 13


@pytest.mark.parametrize("record", truth_records(FILE), ids=name)
def test_every_group(record: dict[str, Any]) -> None:
    told = report(*job(record))
    assert {key: told["parallel"][long] for key, long in SIZES.items()} == record["sizes"]
    assert told["groups_truncated"] is record["truncated"] is False
    reported = set(told["groups"])
    assert reported == {"tp", "pp", "dp", "dp_cp", "cp", "ep", "etp", "edp", "tp_ep", "embd", "pos_embd"}
    assert told["groups"] == {kind: record["groups"][kind] for kind in reported}
    assert told["group_counts"] == {kind: record["n_groups"][kind] for kind in reported}
