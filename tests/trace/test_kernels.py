"""Kernels of a trace: which are compared, and their operations."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from allocator_hook.trace_writer import TraceWriter
from analyzer.trace.events import AttentionCall, GemmCall, Header, KernelCall, Phase
from analyzer.trace.kernels import KernelTotal, PredictedKernels, Traffic, attended_pairs, compare_kernels, recorded_kernels
from analyzer.trace.reader import read_trace
from analyzer.trace.summary import summarize

GEMM = GemmCall(64, 128, 32, 1, 16, False)
NOTHING = PredictedKernels(totals={}, traffic=Traffic(0, 0), attention_in_steps=False)


def attention(queries: int, keys: int, *, causal: bool = True, window: int = -1, heads: int = 4) -> AttentionCall:
    return AttentionCall("forward", 1, heads, queries, keys, 64, 64, causal, window)


def test_the_transposed_product_and_the_batch_have_the_same_key() -> None:
    found = recorded_kernels(
        Counter({GEMM: 1, GEMM._replace(m=128, n=64, accumulates=True): 2, GEMM._replace(products=5): 1}), attention_in_steps=False
    )
    assert list(found.values()) == [KernelTotal(1 + 2 + 5, 8 * 2 * 64 * 128 * 32)]


@pytest.mark.parametrize("other", [{"k": 33}, {"n": 129}, {"bits": 8}])
def test_other_sizes_and_precisions_are_compared_separately(other: dict[str, Any]) -> None:
    assert len(recorded_kernels(Counter({GEMM: 1, GEMM._replace(**other): 1}), attention_in_steps=False)) == 2


@pytest.mark.parametrize("queries", [16, 24, 48])
@pytest.mark.parametrize("window", [-1, 0, 3, 20, 100])
def test_the_pairs_of_a_causal_mask_are_those_of_the_mask(queries: int, window: int) -> None:
    """The last query and the last key have the same position. Of a pair of equal positions half is counted."""
    keys, offset = 48, 48 - queries
    mask = [(q, k) for q in range(queries) for k in range(keys) if k <= q + offset and (window < 0 or k >= q + offset - window)]
    assert 0 <= len(mask) - attended_pairs(attention(queries, keys, window=window)) <= queries / 2


def test_all_pairs_attend_without_a_mask() -> None:
    assert attended_pairs(attention(16, 48, causal=False)) == 16 * 48


def test_the_steps_of_a_ring_add_up_to_the_attention_of_the_rank() -> None:
    """Two ranks with 32 of 64 tokens: its own tokens with the mask, and all of one half of the others."""
    steps: Counter[KernelCall] = Counter({attention(32, 32): 1, attention(32, 16, causal=False): 1})
    [total] = recorded_kernels(steps, attention_in_steps=True).values()
    assert total.flops == 2 * 4 * 64 * 64 / 2 / 2 * (64 + 64)


def test_a_kernel_that_is_not_predicted_is_listed() -> None:
    found = compare_kernels(NOTHING, Counter({GEMM: 3}), tolerance=0.01)
    assert found is not None
    assert [(row.key.sizes, row.predicted.number, row.recorded.number) for row in found.rows] == [((64, 128, 32), 0, 3)]
    assert found.error == -1


def test_kernels_of_the_optimizer_are_not_counted(tmp_path: Path) -> None:
    phases: tuple[Phase, ...] = ("forward", "recompute", "backward", "optimizer")
    with TraceWriter(tmp_path / "trace", Header(recorder="shadow")) as writer:
        for iteration in range(2):
            for phase in phases:
                writer.enter("", phase, 0, iteration)
                writer.kernel(GEMM)
                writer.leave("", phase, 0, iteration)
    assert [each.kernels for each in summarize(read_trace(tmp_path / "trace")).iterations] == [Counter({GEMM: 3})] * 2
