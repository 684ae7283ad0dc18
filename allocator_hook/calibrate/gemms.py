"""GEMMs as PyTorch runs them: in the layouts of forward, data gradient and weight gradient, dense, batched and grouped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch

from allocator_hook.calibrate.clock import Run
from allocator_hook.calibrate.measure import Unmeasurable
from analyzer.time.work.kernels import Gemm

STREAMS: Final = 4
"""Streams over which the GEMMs of experts are distributed, as in Transformer Engine (`multi_stream_cublas_gemm`, TE 2.11)."""


def gemm_run(gemm: Gemm, *, device: str, dtype: torch.dtype) -> Run:
    """A function that runs a GEMM on tensors of its own. `dtype` is that of 16-bit factors. Raises Unmeasurable."""
    if gemm.precision == "4":
        raise Unmeasurable("PyTorch has no stable function for GEMMs in 4 bit")
    if gemm.grouped:
        return _on_streams([_product(gemm, device, dtype) for _ in range(gemm.batch)], device)
    return _batched(gemm, device, dtype) if gemm.batch > 1 else _product(gemm, device, dtype)


def launches(gemm: Gemm) -> int:
    """Kernels that the GEMM launches, with those that distribute them over streams."""
    return gemm.batch + 2 * STREAMS if gemm.grouped else 2


def _product(gemm: Gemm, device: str, dtype: torch.dtype) -> Run:
    """A GEMM without batch."""
    if gemm.precision == "8":
        return _fp8(gemm, device, dtype)
    kind = dtype if gemm.precision == "16" else torch.float32
    left, right = _factors(gemm, device, kind)
    size = kind.itemsize
    out = torch.zeros(gemm.m, gemm.n, device=device, dtype=kind)
    moved = gemm.output_bytes
    if not gemm.depth_is_tokens or moved <= size:
        return lambda: torch.mm(left, right, out=out)
    if moved == 2 * size:
        return lambda: torch.addmm(out, left, right, out=out)
    buffer = torch.zeros(gemm.m, gemm.n, device=device, dtype=torch.float32)
    if moved == 8 and adds_into_fp32(device, dtype):
        return lambda: torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)
    if moved == 8:
        raise Unmeasurable(f"PyTorch {torch.__version__} has no GEMM that is added to an fp32 buffer")

    def separately() -> None:
        torch.mm(left, right, out=out)
        buffer.add_(out)

    return separately


@cache
def adds_into_fp32(device: str, dtype: torch.dtype) -> bool:
    """Whether PyTorch can add a product of 16-bit factors to an fp32 buffer in one kernel."""
    factor, buffer = torch.ones(16, 16, device=device, dtype=dtype), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(buffer, factor, factor, out_dtype=torch.float32, out=buffer)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


def _factors(gemm: Gemm, device: str, kind: torch.dtype) -> tuple[Any, Any]:
    """Factors [m, k] and [k, n] as the layer has them: weights are [n, k], and tokens are the rows of activations."""
    m, n, k = gemm.m, gemm.n, gemm.k

    def new(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=kind)

    if gemm.depth_is_tokens:
        return new(k, m).t(), new(k, n)
    return new(m, k), new(k, n) if gemm.name == "data gradient" else new(n, k).t()


def _fp8(gemm: Gemm, device: str, dtype: torch.dtype) -> Run:
    """Both factors have the depth as their last dimension, as FP8 kernels of Hopper need it."""
    if not hasattr(torch, "_scaled_mm"):
        raise Unmeasurable(f"PyTorch {torch.__version__} has no GEMM in 8 bit")
    if gemm.m % 16 or gemm.n % 16 or gemm.k % 16:
        raise Unmeasurable("sizes are no multiples of 16")
    kind = torch.float8_e4m3fn
    left = torch.randn(gemm.m, gemm.k, device=device, dtype=dtype).to(kind)
    right = torch.randn(gemm.n, gemm.k, device=device, dtype=dtype).to(kind).t()
    one = torch.ones((), device=device, dtype=torch.float32)
    result = torch.float32 if gemm.output_bytes == 4 else torch.bfloat16
    fast = gemm.name == "forward"
    return lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=result, use_fast_accum=fast)


def _batched(gemm: Gemm, device: str, dtype: torch.dtype) -> Run:
    kind = dtype if gemm.precision == "16" else torch.float32
    left = torch.randn(gemm.batch, gemm.m, gemm.k, device=device, dtype=kind)
    right = torch.randn(gemm.batch, gemm.k, gemm.n, device=device, dtype=kind)
    out = torch.empty(gemm.batch, gemm.m, gemm.n, device=device, dtype=kind)
    return lambda: torch.bmm(left, right, out=out)


def _on_streams(runs: Sequence[Run], device: str) -> Run:
    """The runs, distributed over several streams of a GPU; one after the other on a CPU."""
    if not device.startswith("cuda"):
        return lambda: [run() for run in runs]
    streams = [torch.cuda.Stream() for _ in range(min(STREAMS, len(runs)))]

    def together() -> None:
        current = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(current)
        for place, run in enumerate(runs):
            with torch.cuda.stream(streams[place % len(streams)]):
                run()
        for stream in streams:
            current.wait_stream(stream)

    return together
