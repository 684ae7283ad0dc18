"""The peak of `DistributedDataParallel`: parameters exist twice while they move into the buffers of the distributed optimizer.

`_ParamAndGradBuffer.__init__` (core/distributed/param_and_grad_buffer.py) allocates the buffers of parameters and of gradients,
and frees the parameters' first allocations afterwards. The expected bytes follow from its statements.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.memory.ranks import rank_classes
from analyzer.modules.tree import Module, parameters
from analyzer.passes.stages import stage_models
from analyzer.results import PeakEvent
from analyzer.states.record import StartPeak, States
from tests.job_of import job_of, states_of

DISTRIBUTED = "--bf16 --use-distributed-optimizer"
SMALL = "--seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --hidden-size 1024 --vocab-size 100"
"""Activations of a few MiB."""
EXPERTS = (
    "--num-experts 8 --moe-grouped-gemm --disable-bias-linear --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8"
)
WEIGHT, GRADIENT = 2, 4
"""Bytes of an element."""


def states_and_trees(line: str) -> tuple[States, tuple[Module, ...]]:
    stage = stage_models(job_of(line))[-1]
    return states_of(job_of(line), stage), stage.trees


def numel(tree: Module, *, experts: bool | None = None) -> int:
    """Elements of the parameters of a chunk; of those that are, or are not, in experts."""
    return sum(each.numel for each in parameters(tree) if experts is None or (each.sharding == "expert") is experts)


def test_dense_parameters_exist_twice_beside_their_gradients() -> None:
    found, (tree,) = states_and_trees(DISTRIBUTED)
    assert found.start_peak is StartPeak.BUFFERS
    assert found.at_start == pytest.approx((2 * WEIGHT + GRADIENT) * numel(tree), rel=1e-3)
    assert found.moved_at_start == pytest.approx(WEIGHT * numel(tree), rel=1e-3)


def test_experts_move_after_all_other_parameters() -> None:
    found, (tree,) = states_and_trees(f"{DISTRIBUTED} {EXPERTS}")
    dense, experts = numel(tree, experts=False), numel(tree, experts=True)
    first = WEIGHT * (dense + experts) + (WEIGHT + GRADIENT) * dense
    second = WEIGHT * experts + (WEIGHT + GRADIENT) * (dense + experts)
    assert found.at_start == pytest.approx(max(first, second), rel=1e-3)


def test_chunks_move_one_after_the_other() -> None:
    found, trees = states_and_trees(
        f"{DISTRIBUTED} --num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
    )
    counts = [numel(tree) for tree in trees]
    before = [WEIGHT * sum(counts[index:]) + (WEIGHT + GRADIENT) * sum(counts[: index + 1]) for index in range(len(counts))]
    assert len(counts) == 2
    assert found.at_start == pytest.approx(max(before), rel=1e-3)


@pytest.mark.parametrize(("line", "release"), [("--bf16", "0.16.1"), (DISTRIBUTED, "0.5.0")])
def test_parameters_stay_without_buffers(line: str, release: str) -> None:
    job = job_of(line, release=release)
    assert states_of(job, stage_models(job)[0]).at_start == 0


def test_the_peak_is_before_the_first_iteration_if_activations_are_small() -> None:
    job = job_of(f"{DISTRIBUTED} {SMALL} --no-gradient-accumulation-fusion", gpus=64)
    (rank,) = rank_classes(job)
    states = states_of(job, stage_models(job)[0])
    assert rank.memory.peak_event is PeakEvent.BUFFER_CREATION
    assert rank.memory.peak_at == "creation of the parameter buffers"
    assert rank.memory.peak_in_first_iteration
    assert rank.memory.peak_allocated_bytes == rank.memory.peak_allocated_first_iteration_bytes == states.at_start
    assert rank.memory.peak_reserved_bytes >= states.at_start > rank.memory.allocated_bytes
    parts = {part.name: part.bytes for part in rank.memory.transient_parts}
    assert parts["parameters that move into buffers"] == states.moved_at_start


@given(gpus=st.sampled_from([16, 64, 512]), experts=st.booleans(), chunks=st.booleans())
def test_the_peak_is_never_below_it(gpus: int, *, experts: bool, chunks: bool) -> None:
    interleaved = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1" if chunks else ""
    job = job_of(f"{DISTRIBUTED} {SMALL} {EXPERTS if experts else ''} {interleaved} --global-batch-size 4096", gpus=gpus)
    stages = {stage.pipeline_rank: states_of(job, stage) for stage in stage_models(job)}
    for rank in rank_classes(job):
        states = stages[rank.pipeline_rank]
        assert states.at_start > states.parameters + states.gradients
        assert rank.memory.peak_allocated_first_iteration_bytes >= states.at_start
        assert rank.memory.peak_allocated_bytes >= states.at_start
