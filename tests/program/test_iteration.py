"""The operations of an iteration: the schedule of a pipeline rank with the module trees of its chunks."""

from __future__ import annotations

from collections import Counter

import pytest

from analyzer.modules.kinds import ModuleKind
from analyzer.passes.stages import stage_models
from analyzer.program.chunks import chunk_program
from analyzer.program.operations import OperationKind, Role
from analyzer.program.schedule.pipeline import steps
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


def test_a_checkpoint_communicates_in_both_of_its_forwards() -> None:
    """Two all-reduces in the forward of a layer and two in its backward (Shoeybi et al. 2019, figure 4); a checkpoint runs the
    forward again."""
    line = "--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    [tree] = stage_models(job_of(line))[0].trees
    programs = chunk_program(tree)
    layers = [
        operation.phase
        for direction in ("forward", "backward")
        for path, operation in programs.expanded(direction)
        if operation.kind is OperationKind.COLLECTIVE and ".layers" in path
    ]
    assert Counter(layers) == {"forward": 2 * 8, "recompute": 2 * 8, "backward": 2 * 8}


def test_a_backward_computes_modules_in_the_reverse_order() -> None:
    """Autograd runs the functions of a chain in the reverse order of their forwards."""
    [tree] = stage_models(job_of("--untie-embeddings-and-output-weights"))[0].trees
    ran: list[list[str]] = []
    for direction in ("forward", "backward"):
        computed = (path for path, operation in chunk_program(tree).expanded(direction) if operation.kind is OperationKind.COMPUTE)
        ran.append(list(computed))
    assert ran[1] == ran[0][::-1]
    assert len(set(ran[0])) > 5


def test_sequential_experts_keep_the_outputs_of_earlier_experts() -> None:
    """`SequentialMLP.forward` appends the output of each expert to a list, which has those of seven experts before the last of
    eight. Then `torch.cat` copies all of them (core/transformer/moe/experts.py, 0.16.1).
    """
    line = (
        "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    [tree] = stage_models(job_of(line))[0].trees
    held = {
        operation.bytes
        for _, operation in chunk_program(tree).expanded("forward")
        if operation.module.kind is ModuleKind.EXPERTS and operation.kind is OperationKind.ALLOCATE
    }
    rows = 2 * (2 * 2048) * 1024  # two experts for each token
    assert held == {rows * 7 // 8, rows}
