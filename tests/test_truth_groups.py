"""Process groups that Megatron-LM core 0.16.1 made, through the whole program: every group equal.

`test_layout.py` holds the layout of expert ranks against the same records; launches with experts are not modelled yet.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli import assert_refused, report, run, torchrun
from tests.shared_data import SHARED, shared

FILE = "truth/groups.json"
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


def records() -> list[dict[str, Any]]:
    if not (SHARED / FILE).exists():
        return []
    content: list[dict[str, Any]] = json.loads((SHARED / FILE).read_text())["records"]
    return content


def name(record: dict[str, Any]) -> str:
    return f"{record['world_size']}-" + "-".join(f"{key}{record['sizes'][key]}" for key in ("tp", "pp", "cp", "ep", "etp", "vpp"))


def launch(record: dict[str, Any]) -> list[str]:
    """The command line of a record."""
    return [*torchrun(record["world_size"]), *record["argv"]]


DENSE = [record for record in records() if "--num-experts" not in record["argv"]]
EXPERTS = [record for record in records() if "--num-experts" in record["argv"]]


def test_the_records_are_at_hand() -> None:
    shared(FILE)
    assert (len(DENSE), len(EXPERTS)) == (8, 13)


@pytest.mark.parametrize("record", DENSE, ids=name)
def test_dense(record: dict[str, Any]) -> None:
    told = report(*launch(record))
    assert {key: told["parallel"][long] for key, long in SIZES.items()} == record["sizes"]
    assert told["groups_truncated"] is record["truncated"] is False
    reported = set(told["groups"])
    assert reported == {"tp", "pp", "dp", "dp_cp", "cp", "ep", "etp", "edp", "tp_ep", "embd", "pos_embd"}
    assert told["groups"] == {kind: record["groups"][kind] for kind in reported}
    assert told["group_counts"] == {kind: record["n_groups"][kind] for kind in reported}


@pytest.mark.parametrize("record", EXPERTS, ids=name)
def test_experts_are_refused_by_name(record: dict[str, Any]) -> None:
    assert_refused(run(*launch(record)), "--num-experts")
