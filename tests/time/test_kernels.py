"""Seconds of kernels: those of a roofline by hand at efficiencies of 1, and never fewer for more work."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from analyzer.time.efficiencies import efficiencies_of
from analyzer.time.kernels.seconds import attention_seconds, fill, gemm_seconds, kernel_seconds, least_gemm_seconds
from analyzer.time.work.kernels import Attention, Gemm, MemoryBound
from analyzer.time.work.linear_attention import bytes_of_rule
from tests.examples import examples
from tests.time.speeds import ROUND, ideal, known

QUICK = settings(max_examples=examples(200), deadline=None, derandomize=True)
FULL = Gemm("forward", 2560, 2560, 8192)
"""A hundred tiles of 256·256: one for each multiprocessor."""


def attention(name: Literal["forward", "backward"], **changes: int) -> Attention:
    """128 heads of 4,096 tokens, so that every multiprocessor has tiles."""
    found = Attention(name=name, batch=1, heads=128, queries=4096, keys=4096, pairs=4096**2 / 2, head_dim=128, value_dim=128)
    return found._replace(**changes)  # type: ignore[arg-type]


def test_a_gemm_that_fills_the_gpu() -> None:
    """2·m·n·k operations at 1000 TFLOP/s; in 8 bit at 2000, in 32 at 500."""
    seconds = 2 * 2560 * 2560 * 8192 / 1000e12
    assert gemm_seconds(FULL, ROUND, ideal()) == pytest.approx(seconds)
    assert gemm_seconds(FULL._replace(precision="8"), ROUND, ideal()) == pytest.approx(seconds / 2)
    assert gemm_seconds(FULL._replace(precision="32"), ROUND, ideal()) == pytest.approx(seconds * 2)
    assert gemm_seconds(FULL, ROUND, ideal(gemm_16=0.8, gemm_8=0.1)) == pytest.approx(seconds / 0.8)


def test_traffic_limits_a_shallow_gemm() -> None:
    """Both factors and the output, in 16 bit, at 4 TB/s."""
    shallow = FULL._replace(k=64)
    moved = 2 * (2560 * 64 + 64 * 2560 + 2560 * 2560)
    assert gemm_seconds(shallow, ROUND, ideal()) == pytest.approx(moved / 4000e9)
    accumulated = shallow._replace(output_bytes=8)  # added to an fp32 buffer: four bytes are read and written
    assert gemm_seconds(accumulated, ROUND, ideal()) == pytest.approx((moved + 6 * 2560 * 2560) / 4000e9)


def test_one_tile_more_than_a_wave_needs_a_second_wave() -> None:
    """101 of 200 places have a tile of this size; smaller tiles fill more, with a lower efficiency of their own."""
    assert fill(2560, 2560, 1, 100) == 1
    assert fill(2560, 2561, 1, 100) < 0.95
    assert fill(64, 64, 1, 100) < 0.1


def test_fused_attention() -> None:
    """The tiles of 128 queries and keys on the diagonal are computed whole: half a tile more for each query."""
    forward = 128 * 2 * (4096**2 / 2 + 4096 * 64) * 256 / 1000e12
    assert attention_seconds(attention("forward"), ROUND, ideal()) == pytest.approx(forward)
    assert attention_seconds(attention("backward"), ROUND, ideal()) == pytest.approx(2.5 * forward)
    assert attention_seconds(attention("backward"), ROUND, ideal(attention_backward=0.5)) == pytest.approx(5 * forward)


def test_memory_bound_kernels() -> None:
    assert kernel_seconds(MemoryBound("norm", 8e9), ROUND, ideal()) == pytest.approx(2e-3)
    assert kernel_seconds(MemoryBound("norm", 8e9), ROUND, ideal(memory=0.5, memory_permute=0.1)) == pytest.approx(4e-3)
    assert kernel_seconds(MemoryBound("route", 8e9, "permute"), ROUND, ideal(memory_permute=0.1)) == pytest.approx(20e-3)
    assert kernel_seconds(MemoryBound("norm", 0.0), ROUND, ideal(kernel_gap=2e-6)) == pytest.approx(2e-6)


def test_kernels_that_multiprocessors_limit_depend_on_the_clock() -> None:
    """Of 8 GB at 4 TB/s; other kernels depend on the memory only."""
    scan, norm = MemoryBound("scan", 8e9, "scan"), MemoryBound("norm", 8e9)
    assert kernel_seconds(scan, ROUND, ideal(memory_scan=0.5, clock=0.8)) == pytest.approx(2e-3 / 0.4)
    assert kernel_seconds(norm, ROUND, ideal(memory_scan=0.5, clock=0.8)) == pytest.approx(2e-3)
    convolution = MemoryBound("convolution", 8e9, "convolution")
    assert kernel_seconds(convolution, ROUND, ideal(memory_convolution=0.5, memory_scan=0.1)) == pytest.approx(4e-3)


@pytest.mark.parametrize(("gpu", "convolution", "scan"), [
    ("H100-80GB", 0.5418, 1.105), ("H200-141GB", 0.4335, 0.9314), ("B200-180GB", 0.3562, 0.8709), ("GB200-186GB", 0.3482, 0.8580),
    ("GB300-288GB", 0.3296, 0.7486),
])  # fmt: skip
def test_measured_scans_and_convolutions(gpu: str, convolution: float, scan: float) -> None:
    """Milliseconds of aiconfigurator-core 0.12.0, on an idle GPU, for four samples of 8,192 tokens.

    `causal_conv1d_fn` of Nemotron 3 Super, whose 10,240 channels are read and written, and `chunk_gated_delta_rule` with 16 heads
    of 128 elements (the faster of two measurements).
    """
    tokens, width = 4 * 8192, 16 * 128
    rates = replace(efficiencies_of(known(gpu)), clock=1.0, kernel_gap=0.0)
    moved = MemoryBound("convolution", 4.0 * tokens * 10240, "convolution")
    assert 1e3 * kernel_seconds(moved, known(gpu), rates) == pytest.approx(convolution, rel=0.1)
    ruled = MemoryBound("delta rule", tokens * bytes_of_rule(width, width, 16, 128 * 128)[0], "scan")
    assert 1e3 * kernel_seconds(ruled, known(gpu), rates) == pytest.approx(scan, rel=0.12)


@example(Gemm("forward", 1, 1, 1, grouped=True), "m", 1)
@QUICK
@given(
    st.builds(
        Gemm,
        name=st.just("forward"),
        m=st.integers(1, 10_000),
        n=st.integers(1, 10_000),
        k=st.integers(1, 10_000),
        precision=st.sampled_from(("16", "8", "4")),
        batch=st.integers(1, 32),
        grouped=st.booleans(),
        output_bytes=st.sampled_from((2.0, 8.0)),
        depth_is_tokens=st.booleans(),
    ),
    st.sampled_from(("m", "n", "k", "batch", "output_bytes")),
    st.integers(1, 300),
)
def test_a_larger_gemm_is_never_faster(gemm: Gemm, size: str, more: int) -> None:
    """With the residuals of measured shapes, one that is four times as large: libraries choose other kernels for other sizes."""
    larger = gemm._replace(**{size: getattr(gemm, size) + more})
    much_larger = gemm._replace(**{size: 4 * getattr(gemm, size)})
    for gpu in ("H100-80GB", "B200"):
        speed = known(gpu)
        rates = efficiencies_of(speed)
        smooth = replace(rates, gemm_shapes=0.0)
        assert gemm_seconds(larger, speed, smooth) >= gemm_seconds(gemm, speed, smooth) * (1 - 1e-12)
        assert gemm_seconds(much_larger, speed, rates) >= gemm_seconds(gemm, speed, rates) * (1 - 1e-12)
        assert gemm_seconds(gemm, speed, rates) >= least_gemm_seconds(gemm, speed, rates)


@QUICK
@given(st.sampled_from(("batch", "heads", "head_dim", "value_dim", "pairs")), st.integers(1, 4096), st.booleans())
def test_more_attention_is_never_faster(size: str, more: int, forward: bool) -> None:
    small = attention("forward" if forward else "backward", heads=2)
    larger = small._replace(**{size: getattr(small, size) + more})
    speed = known("H100-80GB")
    rates = replace(efficiencies_of(speed), attention_unequal_heads=1.0)
    assert attention_seconds(larger, speed, rates) >= attention_seconds(small, speed, rates)
