"""Buffers of PyTorch's sums, worked out by hand from `setReduceConfig` in ATen/native/cuda/Reduce.cuh.

A block of 128 threads sums 4 adjacent columns in each thread: 32 threads wide and 4 high. The buffer has 4 bytes for each column,
block of a column, thread of the width, and column of a thread.
"""

from __future__ import annotations

import pytest

from analyzer.modules.reduction import sum_buffer_bytes
from analyzer.specs.hardware import resident_threads

H100 = {"multiprocessors": 132, "threads": 2048}
A100 = {"multiprocessors": 108, "threads": 2048}


@pytest.mark.parametrize(
    ("gpu", "rows", "columns", "blocks"),
    [
        (H100, 2048, 15360, 18),  # 120 groups of columns, and 132 * 16 blocks at a time
        (A100, 2048, 15360, 15),
        (H100, 2048, 7680, 32),  # 512 rows of each thread, of which at least 16 are left
        (A100, 2048, 7680, 29),
        (H100, 65536, 262144, 64),  # 2048 groups and 2112 blocks at a time, but a thread sums at most 256 rows
    ],
)
def test_blocks_divide_the_rows(gpu: dict[str, int], rows: int, columns: int, blocks: int) -> None:
    assert sum_buffer_bytes(rows, columns, **gpu) == 4 * columns * blocks * 32 * 4


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (1020, 15360),  # less than 256 rows of each thread
        (1 << 20, 1 << 22),  # more groups of columns than blocks at a time
    ],
)
def test_a_sum_of_one_block_has_no_buffer(rows: int, columns: int) -> None:
    assert sum_buffer_bytes(rows, columns, **H100) == 0


def test_columns_that_no_vector_divides_are_summed_one_by_one() -> None:
    """512 threads, 32 wide and 16 high: 33 groups of columns, 4 blocks at a time on each of 132 multiprocessors."""
    assert sum_buffer_bytes(16384, 1055, **H100) == 4 * 1055 * 16 * 32


def test_a_small_multiprocessor_has_fewer_blocks() -> None:
    """T4: 40 multiprocessors with 1024 threads, so that 320 blocks of 128 threads run at a time."""
    assert resident_threads((7, 5)) == 1024
    assert sum_buffer_bytes(2048, 15360, multiprocessors=40, threads=1024) == 4 * 15360 * 3 * 32 * 4
