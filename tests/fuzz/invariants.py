"""What holds for every JSON report and for every run of the program (docs/json.md, docs/architecture.md)."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any, NoReturn

from tests.command import Outcome

SIGNED = {"headroom_bytes", "peak_difference_bytes", "saves_bytes", "difference", "percent", "transient_bytes"}
"""Fields that may be negative. Parts of transient memory may be as well."""
SHARES_OF_RANKS = {"embd", "pos_embd"}
"""Kinds of groups that do not contain every rank."""


def check_outcome(outcome: Outcome, *, notes: bool = False) -> None:
    """The program ends with a report or with one line on standard error. `notes`: standard error has notes about a success."""
    assert outcome.status in (0, 1, 2, 3), (outcome.status, outcome.err)
    if outcome.status in (2, 3):
        assert outcome.err.endswith("\n"), outcome.err
        assert outcome.err[:-1].isprintable(), outcome.err
        assert len(outcome.err) < 4000, "a message should be short"
        assert outcome.status == 3 or (outcome.out == "" and "; " in outcome.err), (outcome.out[:200], outcome.err)
    else:
        assert notes or outcome.err == ""


def parsed(text: str) -> dict[str, Any]:
    """The JSON document `text`, which has no NaN and no infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} in the JSON report")

    document: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return document


def check_report(document: dict[str, Any]) -> None:
    """All statements about one report."""
    check_numbers(document)
    check_parallel(document)
    check_groups(document)
    check_model(document)
    for entry in document["ranks"]:
        check_memory(entry["memory"])
    check_verdict(document)
    check_communication(document)


def check_numbers(value: Any, path: tuple[str, ...] = ()) -> None:
    """No figure is negative, except for the documented ones, and each size in bytes is an integer."""
    if isinstance(value, dict):
        for name, inner in value.items():
            check_numbers(inner, (*path, name))
    elif isinstance(value, list):
        for inner in value:
            check_numbers(inner, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        assert value >= 0 or path[-1] in SIGNED or "transient_parts" in path, (path, value)
        assert isinstance(value, int) or "bytes" not in path[-1], (path, value)


def check_parallel(document: dict[str, Any]) -> None:
    """The sizes of the groups multiply to the world, and the microbatches to the batch."""
    parallel, batch, size = document["parallel"], document["batch"], document["world"]["size"]
    assert parallel["tensor"] * parallel["context"] * parallel["pipeline"] * parallel["data"] == size
    assert parallel["expert_tensor"] * parallel["expert"] * parallel["pipeline"] * parallel["expert_data"] == size
    assert batch["micro"] * parallel["data"] * batch["microbatches"] == batch["global"]


def check_groups(document: dict[str, Any]) -> None:
    """The groups of each kind, and the rank classes, partition the ranks."""
    world = set(range(document["world"]["size"]))
    for kind, groups in document["groups"].items():
        members = list(chain.from_iterable(groups))
        assert len(members) == len(set(members)), kind
        if not document["groups_truncated"]:
            assert len(groups) == document["group_counts"][kind]
            assert set(members) <= world if kind in SHARES_OF_RANKS else set(members) == world, kind
    classes = [rank for entry in document["ranks"] for first, last in entry["ranks"] for rank in range(first, last + 1)]
    assert sorted(classes) == sorted(world)


def check_model(document: dict[str, Any]) -> None:
    """Parameter counts are consistent, and the pipeline ranks have each layer once."""
    model = document["model"]
    assert model["tree"]["parameters"] == model["parameters"]
    assert model["parameters_unpadded"] <= model["parameters"]
    assert model["parameters_active"] <= model["parameters"]
    assert model["parameters_routed_experts"] < model["parameters"]
    layers: dict[int, list[int]] = {}
    for entry in document["ranks"]:
        layers[entry["pipeline_rank"]] = [layer for chunk in entry["chunks"] for layer in chunk["layers"]]
        # a stage with MTP layers has tied embeddings twice: for the tokens of these layers, and as its output layer
        copies = sum(_has_tokens(chunk["tree"]) for chunk in entry["chunks"] if layers[entry["pipeline_rank"]][:1] != [1])
        assert entry["parameters_routed_experts"] <= entry["parameters"] <= model["parameters"] * (1 + copies)
        assert entry["parameters"] == sum(chunk["tree"]["parameters"] for chunk in entry["chunks"])
    found = sorted(chain.from_iterable(layers.values()))
    assert found == list(range(1, len(found) + 1))
    assert sorted(layers) == list(range(document["parallel"]["pipeline"]))


def _has_tokens(tree: dict[str, Any]) -> bool:
    """Whether a chunk has an embedding."""
    return any(child["name"] == "embedding" for child in tree["children"])


def check_memory(memory: dict[str, Any]) -> None:
    """The parts of the memory of a rank add up, and its figures are in order."""
    states = memory["parameters_bytes"] + memory["gradients_bytes"] + memory["optimizer_bytes"]
    at_peak = states + memory["runtime_bytes"] + memory["activations_bytes"] + memory["transient_bytes"]
    assert at_peak == memory["peak_allocated_bytes"]
    for name in ("runtime", "transient"):
        assert sum(part["bytes"] for part in memory[f"{name}_parts"]) == memory[f"{name}_bytes"], name
    negative = [part["name"] for part in memory["transient_parts"] if part["bytes"] < 0]
    assert not negative or "first iteration" in memory["peak_at"] or "creation" in memory["peak_at"], (negative, memory["peak_at"])
    assert memory["peak_allocated_first_iteration_bytes"] <= memory["peak_allocated_bytes"]
    assert memory["allocated_bytes"] <= memory["peak_allocated_bytes"] <= memory["peak_reserved_bytes"]
    assert memory["graph_pool_bytes"] <= memory["peak_reserved_bytes"] <= memory["device_bytes"]
    lowest, highest = memory["device_range_bytes"]
    assert lowest <= memory["device_bytes"] <= highest


def check_verdict(document: dict[str, Any]) -> None:
    """The verdict and the advice follow from the highest rank."""
    verdict = document["verdict"]
    highest = max(entry["memory"]["device_bytes"] for entry in document["ranks"])
    tightest = verdict["tightest_rank"]
    [found] = [entry for entry in document["ranks"] if any(first <= tightest <= last for first, last in entry["ranks"])]
    assert found["memory"]["device_bytes"] == highest
    capacity = verdict["capacity_bytes"]
    if capacity is None:
        assert verdict["fits"] is verdict["headroom_bytes"] is None
        return
    if verdict["withheld"]:
        assert verdict["fits"] is verdict["headroom_bytes"] is None
        return
    assert verdict["headroom_bytes"] == capacity - highest
    assert verdict["fits"] == (highest <= capacity)
    assert verdict["state"] in ("tight", "fits" if verdict["fits"] else "does not fit")
    for advice in document["advice"]:
        assert advice["saves_bytes"] == highest - advice["device_bytes"] > 0
        assert advice["fits"] == (advice["device_bytes"] <= capacity)


def check_communication(document: dict[str, Any]) -> None:
    """Bytes are calls times the message, and totals of a rank are within those of the cluster."""
    for row in document["communication"]:
        assert row["bytes_per_iteration"] == row["calls_per_iteration"] * row["message_bytes"], row
    for kind, total in document["communication_totals"].items():
        assert 0 < total["bytes_per_iteration"] <= total["cluster_bytes_per_iteration"], kind
        assert 0 < total["calls_per_iteration"] <= total["cluster_calls_per_iteration"], kind
