"""Lines of logs as Megatron-LM and others print them, written by hand."""

from __future__ import annotations

from collections.abc import Iterable


def line(number: int, seconds: float, *, batch: int = 64, tflops: float | None = 128.3) -> str:
    """The line about an iteration, as core 0.16 prints it."""
    rate = "" if tflops is None else f" throughput per GPU (TFLOP/s/GPU): {tflops:.1f} |"
    return (
        f" [2025-11-13 16:26:11.123456] iteration {number:8d}/     500 | consumed samples: {number * batch:12d} | elapsed time per "
        f"iteration (ms): {1000 * seconds:.1f} |{rate} learning rate: 3.000000E-05 | global batch size: {batch:5d} | "
        "lm loss: 8.114214E+00 | loss scale: 1.0 | grad norm: 0.042 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |"
    )


def memory(rank: int, iterations: int, *sizes: float) -> str:
    """The memory report of a rank: allocated, highest allocated, reserved, highest reserved, in units of 2^20 bytes."""
    names = ("allocated", "max allocated", "reserved", "max reserved")
    values = " | ".join(f"{name}: {size}" for name, size in zip(names, sizes, strict=True))
    return f"[Rank {rank}] (after {iterations} iterations) memory (MB) | {values}"


def timers(**seconds: float) -> list[str]:
    """A report of timers, each as long on all ranks; `_` stands for the hyphen of a name."""
    rows = [
        f"    {(name.replace('_', '-') + ' ').ljust(48, '.')}: ({1000 * value:.2f}, {1000 * value:.2f})"
        for name, value in seconds.items()
    ]
    return ["(min, max) time across ranks (ms):", *rows]


def steady(seconds: float, *, iterations: Iterable[int] = range(1, 41), batch: int = 64) -> list[str]:
    """Iterations of one time, after a first one that takes 20 times as long."""
    return [line(number, seconds * (20 if number == 1 else 1), batch=batch, tflops=None) for number in iterations]
