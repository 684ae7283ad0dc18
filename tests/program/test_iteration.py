"""The operations of an iteration: the schedule of a pipeline rank with the module trees of its chunks."""

from __future__ import annotations

import pytest

from analyzer.passes.stages import stage_models
from analyzer.program.chunks import chunk_program
from analyzer.program.operations import OperationKind, Role
from analyzer.schedule.pipeline import steps
from tests.job_of import job_of


@pytest.mark.parametrize("rank", range(4))
def test_saved_tensors_are_those_of_the_microbatches_in_flight(rank: int) -> None:
    """1F1B: stage r of p has p - r microbatches in flight at most, and none at the end (Narayanan et al. 2021)."""
    job = job_of("--pipeline-model-parallel-size 4 --global-batch-size 16")
    [tree] = stage_models(job)[rank].trees
    order = steps(pipeline=4, pipeline_rank=rank, chunks=1, microbatches=8)
    saved = highest = 0
    for step in order:
        for _, operation in chunk_program(tree).expanded(step.kind):
            if operation.role is Role.SAVED:
                saved += operation.bytes if operation.kind is OperationKind.ALLOCATE else -operation.bytes
                highest = max(highest, saved)
    assert saved == 0
    assert highest == (4 - rank) * tree.retained_bytes > 0
