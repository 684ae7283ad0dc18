"""Process groups, compared with those of Megatron 0.16.1 (tests/data/truth/groups.json), and their properties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from analyzer.layout.groups import (
    GROUP_KINDS,
    coordinates,
    group_count,
    group_of,
    group_size,
    groups,
    node_name,
    pipeline_rank_ranges,
)
from analyzer.specs import ParallelSpec
from analyzer.specs.rules.sizes import parallel_violations
from tests.data_files import truth
from tests.parallel_spec import DP_LAST, PP_LAST, spec, spec_of_argv


@cache
def recorded_groups() -> dict[str, Any]:
    return truth("groups.json")


@st.composite
def layouts(draw: st.DrawFn) -> ParallelSpec:
    """Layouts that Megatron accepts, with up to a few hundred ranks."""
    small = st.sampled_from([1, 2, 3, 4])
    expert_tensor, expert, pipeline, replicas = draw(small), draw(small), draw(small), draw(small)
    order = draw(st.sampled_from([PP_LAST, DP_LAST]))
    # if pp is not last, experts and other layers need the same number of replicas
    shared_ranks = expert_tensor * expert * (replicas if order == PP_LAST else 1)
    tensor = draw(st.sampled_from([n for n in range(1, shared_ranks + 1) if shared_ranks % n == 0]))
    rest = shared_ranks // tensor
    context = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])) if order == PP_LAST else rest
    parallel = spec(
        expert_tensor * expert * pipeline * replicas,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        order=order,
    )
    divisors = [n for n in range(1, parallel.expert_data + 1) if parallel.expert_data % n == parallel.data_with_context % n == 0]
    return replace(parallel, distributed_optimizer_instances=draw(st.sampled_from(divisors)))


def test_the_number_of_records() -> None:
    assert (len(recorded_groups()["records"]), len(recorded_groups()["refused"])) == (21, 5)


@pytest.mark.parametrize("index", range(21))
def test_groups_are_those_of_megatron(index: int) -> None:
    record = recorded_groups()["records"][index]
    parallel = spec_of_argv(record["argv"], record["world_size"])
    assert not list(parallel_violations(parallel, megatron="0.16.1"))
    assert not record["truncated"]
    untied = "--untie-embeddings-and-output-weights" in record["argv"]
    for kind, expected in record["groups"].items():
        ours, tied = ("embd", True) if kind == "embd_mcore_default" else (kind, not untied)
        assert [list(group) for group in groups(parallel, ours, tied=tied)] == expected, kind
        assert group_count(parallel, ours) == record["n_groups"][kind]
    assert set(record["groups"]) == {*GROUP_KINDS, "embd_mcore_default"}


@pytest.mark.parametrize("index", range(21))
def test_sizes_and_positions_are_those_of_megatron(index: int) -> None:
    record = recorded_groups()["records"][index]
    parallel = spec_of_argv(record["argv"], record["world_size"])
    sizes = record["sizes"]
    assert (parallel.data, parallel.expert_data) == (sizes["dp"], sizes["edp"])
    for rank, position in record["probe_positions"].items():
        at = coordinates(parallel, int(rank))
        assert {
            "tp": at.tensor,
            "pp": at.pipeline,
            "dp": at.data,
            "cp": at.context,
            "ep": at.expert,
            "etp": at.expert_tensor,
            "edp": at.expert_data,
        } == position


@given(layouts(), st.booleans())
def test_groups_partition_the_world(parallel: ParallelSpec, tied: bool) -> None:
    assert not list(parallel_violations(parallel, megatron="0.16.1"))
    for kind in GROUP_KINDS:
        made = list(groups(parallel, kind, tied=tied))
        assert len(made) == group_count(parallel, kind)
        assert {len(group) for group in made} == {group_size(parallel, kind, tied=tied)}
        members = [rank for group in made for rank in group]
        assert len(set(members)) == len(members)
        if kind not in ("embd", "pos_embd"):
            assert set(members) == set(range(parallel.world_size))


@given(layouts(), st.booleans())
def test_the_group_of_a_rank_is_one_of_the_groups(parallel: ParallelSpec, tied: bool) -> None:
    for kind in GROUP_KINDS:
        expected: dict[int, Sequence[int]] = {rank: group for group in groups(parallel, kind, tied=tied) for rank in group}
        for rank in range(parallel.world_size):
            assert group_of(parallel, kind, rank, tied=tied) == expected.get(rank, ())


@given(layouts(), st.data())
def test_position_in_a_group_is_the_coordinate(parallel: ParallelSpec, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, parallel.world_size - 1))
    at = coordinates(parallel, rank)
    for kind, index in {
        "tp": at.tensor, "cp": at.context, "dp": at.data, "pp": at.pipeline,
        "etp": at.expert_tensor, "ep": at.expert, "edp": at.expert_data,
        "dp_cp": at.context + parallel.context * at.data,
    }.items():  # fmt: skip
        assert group_of(parallel, kind, rank).index(rank) == index


@given(layouts())
def test_pipeline_ranges_cover_each_stage(parallel: ParallelSpec) -> None:
    for pipeline_rank in range(parallel.pipeline):
        ranges = pipeline_rank_ranges(parallel, pipeline_rank)
        listed = [rank for first, last in ranges for rank in range(first, last + 1)]
        assert listed == [r for r in range(parallel.world_size) if coordinates(parallel, r).pipeline == pipeline_rank]
        gaps = [after[0] - before[1] for before, after in pairwise(ranges)]
        assert all(gap > 1 for gap in gaps), "adjacent ranges are merged"


@given(layouts(), st.integers(0, 20))
def test_the_limit_shortens_the_list(parallel: ParallelSpec, limit: int) -> None:
    for kind in GROUP_KINDS:
        assert list(groups(parallel, kind, limit=limit)) == list(groups(parallel, kind))[:limit]


@given(layouts())
def test_experts_and_other_layers_have_the_same_pipeline_groups(parallel: ParallelSpec) -> None:
    assume(parallel.pipeline > 1)
    for stages in groups(parallel, "pp"):
        positions = [coordinates(parallel, rank) for rank in stages]
        assert len({(at.expert_tensor, at.expert, at.expert_data) for at in positions}) == 1
        assert [at.pipeline for at in positions] == list(range(parallel.pipeline))


def test_a_world_of_131072_ranks() -> None:
    """Llama 3 405B with TP8 and PP16; expected values computed by hand."""
    parallel = spec(131072, tensor=8, pipeline=16, expert_tensor=8)
    assert not list(parallel_violations(parallel, megatron="0.16.1"))
    assert group_of(parallel, "pp", 131071) == tuple(8191 + 8192 * stage for stage in range(16))
    assert list(groups(parallel, "tp", limit=2)) == [tuple(range(8)), tuple(range(8, 16))]
    assert (group_count(parallel, "tp"), group_size(parallel, "dp")) == (16384, 1024)
    assert pipeline_rank_ranges(parallel, 15) == ((122880, 131071),)


def test_node_names() -> None:
    assert [node_name(rank, 8) for rank in (0, 7, 8, 23)] == ["n0_g0", "n0_g7", "n1_g0", "n2_g7"]


def test_large_groups_are_ranges_and_equal_to_their_members() -> None:
    """A group of more than 4,096 ranks takes no memory for its members."""
    parallel = spec(1 << 23, tensor=8)
    first = next(groups(parallel, "dp"))
    assert isinstance(first, range)
    assert (len(first), first[0], first[1], first[-1]) == (1 << 20, 0, 8, (1 << 23) - 8)
    small = spec(1 << 14, tensor=2, context=2)
    for kind in ("dp", "dp_cp", "tp_dp_cp"):
        members = group_of(small, kind, 5)
        assert all(group_of(small, kind, rank) == members for rank in members[::257])
        assert group_of(small, kind, members[0] + 1) != members or members[1] == members[0] + 1
