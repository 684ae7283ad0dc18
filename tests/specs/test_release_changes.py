"""The tables of what releases change, compared with the sources of every release.

tests/data/truth/releases.json says in which releases a line of the sources occurs that decides a field
(`tools/release_truth.py`). Fields without such a line have cases here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from analyzer.specs.release_changes import (
    MTP_LAYERS,
    CoreBehavior,
    CoreFailures,
    EngineBehavior,
    TorchBehavior,
    changes_of,
    core_behavior,
    core_failures,
    engine_behavior,
    torch_behavior,
)
from analyzer.specs.software import version_number
from tests.data_files import data_file

TRUTH = json.loads(data_file("truth/releases.json").read_text())
TABLES: dict[type[Any], Callable[[str], Any]] = {
    CoreBehavior: core_behavior,
    CoreFailures: core_failures,
    EngineBehavior: engine_behavior,
    TorchBehavior: torch_behavior,
}
OTHER_CASES: dict[tuple[str, str], dict[str, object]] = {
    # transformer/mla_qk_norm_config.py; runs of 0.17.1, 0.18.2 and 0.19.0
    ("CoreBehavior", "norms_input_of_queries"): {"0.17": False, "0.18": False, "0.19": True},
    # `is_te_min_version("0.13.0", check_equality=False)` in `TEDotProductAttention.forward` (core 0.13.0)
    ("EngineBehavior", "attention_in_batches"): {"0.13": False, "0.14": True},
    # read in the sources of these releases; how far a failure of the newest release reaches is not known
    ("CoreFailures", "fsdp_of_stages"): {"0.13": False, "0.14": True, "0.19": True, "0.20": False},
    ("CoreFailures", "fsdp_in_fp16"): {"0.13": False, "0.14": True, "0.19": True, "0.20": False},
    ("CoreFailures", "fsdp_blockwise_weights"): {"0.15": False, "0.16": True, "0.17": False},
    ("CoreFailures", "fsdp_outer_shards"): {"0.14": True, "0.19": True, "0.20": False},
    ("CoreFailures", "graphs_of_stages"): {"0.15": False, "0.16": True, "0.19": True, "0.20": False},
    ("CoreFailures", "dense_mtp_overlapped"): {"0.13": False, "0.14": True, "0.18": True, "0.19": False},
    ("CoreFailures", "final_norm_unreduced"): {"0.15": False, "0.16": True, "0.19": True, "0.20": False},
    ("CoreFailures", "gates_of_few_groups"): {"0.16": True, "0.17": False},
    ("CoreFailures", "mtp_without_userbuffers"): {"0.16": True, "0.17": False},
    ("CoreFailures", "mtp_recompute"): {"0.17": False, "0.18": True, "0.19": False},
    ("CoreFailures", "latent_gradients_never"): {"0.16": True, "0.17": False},
    ("CoreFailures", "uniform_groups_complete"): {"0.9": False, "0.10": True, "0.16": True, "0.17": False},
    # pull request 175344 of PyTorch is in 2.12
    ("TorchBehavior", "large_workspace_on_blackwell"): {"2.11": False, "2.12": True},
}
"""The value of each field without a line, in the releases before and from each change on."""
FIELDS = [(table, name) for table in TABLES for name in changes_of(table)]


def true_values(table: type[Any], name: str) -> Iterator[tuple[str, object]]:
    """Each release in which the true value of a field is known, oldest first, with that value."""
    if (table.__name__, name) in OTHER_CASES:
        yield from OTHER_CASES[table.__name__, name].items()
        return
    releases, values = TRUTH[table.__name__]["releases"], TRUTH[table.__name__]["fields"][name]["values"]
    value = None
    for release in releases[releases.index(next(iter(values))) :]:
        value = values.get(release, value)
        yield release, value


@pytest.mark.parametrize(("table", "name"), FIELDS)
def test_a_field_has_the_value_that_the_sources_of_each_release_show(table: type[Any], name: str) -> None:
    for release, value in true_values(table, name):
        assert getattr(TABLES[table](release), name) == value, release


@pytest.mark.parametrize(("table", "name"), FIELDS)
def test_a_change_has_a_case_on_each_side(table: type[Any], name: str) -> None:
    """The true value changes between two known releases, and the change is at the later one."""
    known = list(true_values(table, name))
    changed = [version_number(later) for (_, before), (later, after) in pairwise(known) if before != after]
    expected = [first for first, _ in changes_of(table)[name] if first]
    assert [each[:2] for each in changed] == expected
    values = [value for _, value in changes_of(table)[name]]
    assert all(before != after for before, after in pairwise(values)), "a change that changes nothing"


def test_the_truth_has_no_other_fields() -> None:
    lines = {(table, name) for table, found in TRUTH.items() for name in found["fields"]}
    assert lines | set(OTHER_CASES) == {(table.__name__, name) for table, name in FIELDS}


@pytest.mark.parametrize(("release", "like"), [("2023", "0.2.0"), ("0.16.1", "0.16.0"), ("0.99", "0.20.0")])
def test_releases_between_changes_have_the_earlier_behavior(release: str, like: str) -> None:
    assert core_behavior(release) == core_behavior(like)


def test_without_an_engine_the_oldest_is_assumed() -> None:
    assert engine_behavior(None) == engine_behavior("0.1")


def test_development_versions_count_as_their_release() -> None:
    assert torch_behavior("2.12.0a0") == torch_behavior("2.12") != torch_behavior("2.11.1")
    assert engine_behavior("2.10.0a0+a36e1d39eb.nv26.01") == engine_behavior("2.10")


def test_the_layer_in_an_mtp_layer_has_one_of_the_listed_names() -> None:
    assert MTP_LAYERS == ("transformer_layer", "mtp_model_layer")
