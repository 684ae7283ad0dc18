"""The number of GPUs that is analysed if the launch does not give it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.launch.build import build
from analyzer.specs import ParallelSpec
from tests.job_of import BASE, HOPPER, arguments_of

SIZES = st.sampled_from([1, 2, 4])


def parallel_of(line: str) -> tuple[ParallelSpec, tuple[str, ...]]:
    arguments = arguments_of(f"{BASE} {line}")
    job = build(arguments, None, environ={}, gpu=HOPPER, folder=Path("/nowhere"))
    return job.parallel, job.unknown


@pytest.mark.parametrize(
    ("line", "world", "nodes"),
    [
        ("", 1, 1),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4", 8, 1),
        ("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --context-parallel-size 2", 64, 8),
        ("--num-experts 8 --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --disable-bias-linear", 32, 4),
        (
            "--num-experts 8 --expert-model-parallel-size 4 --tensor-model-parallel-size 4 --expert-tensor-parallel-size 1 "
            "--disable-bias-linear --sequence-parallel",
            4,
            1,
        ),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 4", 4, 1),
    ],
)
def test_the_smallest_world_of_a_layout(line: str, world: int, nodes: int) -> None:
    parallel, unknown = parallel_of(line)
    assert (parallel.world_size, parallel.nodes) == (world, nodes)
    assert f"{world} {'is' if world == 1 else 'are'} analyzed" in unknown[0]
    assert "--info-world-size" in unknown[0]


@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_no_smaller_number_satisfies_both_grids(tensor: int, pipeline: int, context: int, expert: int, expert_tensor: int) -> None:
    """`initialize_model_parallel` splits the ranks into dense and into expert groups."""
    line = (
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} --context-parallel-size {context} "
        f"--num-experts 8 --expert-model-parallel-size {expert} --expert-tensor-parallel-size {expert_tensor} "
        "--disable-bias-linear --sequence-parallel"
    )
    parallel, _ = parallel_of(line)
    groups = (tensor * pipeline * context, expert * expert_tensor * pipeline)
    expected = next(count for count in range(1, 10_000) if all(count % group == 0 for group in groups))
    assert parallel.world_size == expected
