"""Data-parallel groups as the optimizer sees them."""

from __future__ import annotations

from typing import Literal

from analyzer.layout.groups import coordinates, group_of
from analyzer.specs import ParallelSpec

ReductionGroup = Literal["dp_cp", "edp"]
"""Ranks that reduce a gradient: replicas of the dense model (with context parallelism), or of an expert."""


def reduction_size(parallel: ParallelSpec, group: ReductionGroup) -> int:
    """Ranks over which a bucket is reduced and sharded: those of one instance of the distributed optimizer."""
    ranks = parallel.data_with_context if group == "dp_cp" else parallel.expert_data
    return ranks // parallel.distributed_optimizer_instances


def described_rank(parallel: ParallelSpec, first: int) -> int:
    """The rank that the formulas describe of the ranks that begin with `first`: the last of its ring with ring attention.

    With a causal mask the last rank of a ring multiplies all its queries in each step, and the others fewer
    (`modules.attention.context_parallel`).
    """
    if parallel.context == 1 or "p2p" not in parallel.cp_comm_type:
        return first
    return group_of(parallel, "cp", first)[-1]


def described_replica(parallel: ParallelSpec, group: ReductionGroup) -> int:
    """Index of the described rank of the first stage among the ranks that reduce a gradient."""
    place = coordinates(parallel, described_rank(parallel, 0))
    # cp changes faster than dp in every `ParallelSpec.order`
    return place.data * parallel.context + place.context if group == "dp_cp" else place.expert_data
