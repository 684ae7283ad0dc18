"""Data-parallel groups as the optimizer sees them."""

from __future__ import annotations

from typing import Literal

from analyzer.specs import ParallelSpec

ReductionGroup = Literal["dp_cp", "edp"]
"""Ranks that reduce a gradient: replicas of the dense model (with context parallelism), or of an expert."""


def reduction_size(parallel: ParallelSpec, group: ReductionGroup) -> int:
    """Ranks over which a bucket is reduced and sharded: those of one instance of the distributed optimizer."""
    ranks = parallel.data_with_context if group == "dp_cp" else parallel.expert_data
    return ranks // parallel.distributed_optimizer_instances
