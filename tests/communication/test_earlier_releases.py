"""Communication of earlier releases that differs from 0.16."""

from __future__ import annotations

import pytest

from analyzer.communication.training_step import scalar_calls
from analyzer.passes.stages import stage_models
from tests.communication_job import make_job


@pytest.mark.parametrize(("release", "counted"), [("0.11.0", False), ("0.12.3", True), ("0.13.0", False)])
def test_core_0_12_always_counts_zeros(release: str, counted: bool) -> None:
    """`ChainedOptimizer.step` of 0.12.3 calls `count_zeros` without `log_num_zeros_in_grad`."""
    job = make_job(megatron=release, distributed=True)
    found = {call.module for call in scalar_calls(job, stage_models(job)[0])}
    assert ("optimizer.num_zeros_in_grad" in found) == counted
    assert "train_step.num_zeros_in_grad" not in found
