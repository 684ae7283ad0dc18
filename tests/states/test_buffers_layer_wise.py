"""Buffers laid out by owner: matrices with `LayerWiseDistributedOptimizer` from 0.18 on, other parameters with Adam.

Expected values are from Megatron's tests and pull requests 4509, 4771 and 5415.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.communication.table import communication_rows
from analyzer.memory.ranks import rank_classes
from analyzer.passes.stages import stage_models
from analyzer.specs import TrainingJob
from analyzer.states.buffers.layer_wise import packed
from analyzer.states.buffers.matrices import OptimizerParameter
from analyzer.states.buffers.of_stage import stage_buffers
from tests.job_of import job_of

LINES = "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
H, LAYERS, VOCABULARY = 1024, 8, 32000
MATRICES = LAYERS * 12 * H * H
OTHERS = 2 * VOCABULARY * H + (2 * LAYERS + 1) * H
EXPERTS = "--num-experts 8 --moe-grouped-gemm --moe-ffn-hidden-size 512 --expert-model-parallel-size 4"


def matrices(*numels: int) -> list[OptimizerParameter]:
    return [OptimizerParameter(shape=(numel, 1), dtype="bf16", orthogonalized=True) for numel in numels]


def job(more: str = "", gpus: int = 8) -> TrainingJob:
    return job_of(f"{LINES} --optimizer dist_muon {more}", release="0.19.0", gpus=gpus)


def test_equal_matrices_fill_all_shards() -> None:
    """`test_uniform_params_exact_fit`: eight matrices of 256 elements over four ranks, two for each rank without padding."""
    shards = packed(matrices(*[256] * 8), ranks=4, divisor=64)
    assert [len(own) for own in shards.owned] == [2, 2, 2, 2]
    assert shards.bucket.numel == 8 * 256


def test_all_shards_have_the_size_of_the_largest() -> None:
    """Pull request 5415: 100 equal matrices over 32 shards take the space of 128."""
    assert packed(matrices(*[2688 * 1856] * 100), ranks=32, divisor=128).bucket.numel == 128 * 2688 * 1856


def test_large_matrices_are_assigned_first_to_the_smallest_shard() -> None:
    shards = packed(matrices(64, 640, 128, 320, 256), ranks=2, divisor=64)
    assert [[weight.numel for weight in own] for own in shards.owned] == [[640, 64], [320, 256, 128]]
    assert shards.numel == 704


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60), st.sampled_from([1, 2, 3, 8, 32]))
def test_every_matrix_has_one_owner_and_is_not_split(numels: list[int], ranks: int) -> None:
    shards = packed(matrices(*numels), ranks=ranks, divisor=128)
    assert sorted(weight.numel for own in shards.owned for weight in own) == sorted(numels)
    assert all(sum(weight.numel for weight in own) <= shards.numel for own in shards.owned)
    assert shards.numel % 128 == 0
    assert shards.bucket.numel == ranks * shards.numel
    mean, largest, gaps = sum(numels) / ranks, max(numels), 64 * len(numels)
    assert shards.numel <= mean + largest + gaps + 128  # greedy: a shard exceeds the mean by at most the largest matrix


def test_states_of_all_replicas_add_up_to_one_full_copy() -> None:
    """fp32 master weights and one momentum of matrices, fp32 master weights and two moments of other parameters."""
    classes = rank_classes(job())
    total = sum(each.memory.optimizer_bytes * sum(last - first + 1 for first, last in each.ranks) for each in classes)
    assert total == pytest.approx(8 * MATRICES + 12 * OTHERS, rel=1e-4)


def test_parameter_and_gradient_bytes_are_those_of_the_buffers() -> None:
    (buffers,) = stage_buffers(job(), stage_models(job())[0])
    rest, by_owner = buffers
    assert rest.numel == pytest.approx(OTHERS, rel=1e-4)
    assert by_owner.numel == 8 * 12 * H * H  # eight equal layers over eight replicas
    memory = rank_classes(job())[0].memory
    assert memory.gradients_bytes == 4 * (rest.numel + by_owner.numel)
    assert memory.parameters_bytes == 2 * (rest.numel + by_owner.numel)


def test_messages_have_the_size_of_the_buffers() -> None:
    line = job(f"{EXPERTS} --overlap-grad-reduce --overlap-param-gather")
    (buffers,) = stage_buffers(line, stage_models(line)[0])
    expected = sum(buffer.numel for buffer in buffers)
    rows = communication_rows(line, stage_models(line))
    for kind, phase in (("reduce_scatter", "gradient"), ("all_gather", "parameter")):
        sent = [row for row in rows if row.kind == kind and row.phase == phase]
        assert {row.group for row in sent} == {"dp_cp", "edp"}
        assert sum(row.shape[0] * row.calls_per_iteration for row in sent) == expected


def test_muon_and_the_distributed_optimizer_compute_a_norm_each() -> None:
    """`ChainedOptimizer.get_grad_norm` of 0.18.2: their groups differ."""
    line = job("--tensor-model-parallel-size 2")
    norms = [row for row in communication_rows(line, stage_models(line)) if row.module.startswith("optimizer.")]
    assert sorted(row.group for row in norms if row.phase == "gradient") == ["intra_dist_opt", "world"]


def test_few_matrices_leave_shards_empty() -> None:
    """Two layers over 64 replicas: the largest shard has one fc1 matrix, and all others are padded to its size."""
    few = job("--num-layers 2 --global-batch-size 64", gpus=64)
    (buffers,) = stage_buffers(few, stage_models(few)[0])
    assert buffers[-1].numel == 64 * 4 * H * H
