"""Constants of kernels that were measured on idle GPUs, in `kernels/tables.json`.

`tools/kernel_tables.py` distills them from public tables. A GPU without a table gets that of the nearest GPU: its shares of the
peaks.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from functools import cache, lru_cache
from math import log
from pathlib import Path
from typing import Any, Final, NamedTuple

from analyzer.specs.speed import SpeedSpec

FILE: Final = Path(__file__).with_name("tables.json")
NEAREST: Final = {
    "volta": "A100-80GB",
    "turing": "A100-80GB",
    "ampere": "A100-80GB",
    "ada": "L40S",
    "hopper": "H100-80GB",
    "blackwell": "B200-180GB",
    "cdna": "H100-80GB",
}
"""The GPU whose table is used for an architecture."""


class KernelTable(NamedTuple):
    """The constants of a GPU."""

    gpu: str
    """The GPU whose kernels were measured."""
    values: dict[str, float]
    """Fields of `Efficiencies`."""
    residuals: dict[str, tuple[float, ...]]
    """ln(measured / predicted) of GEMMs by precision: at each point of the grid of ln m, ln n and ln k."""


class _Axis(NamedTuple):
    """The points of one axis of the grid, in logarithms."""

    points: tuple[float, ...]

    def share(self, size: int) -> tuple[int, float]:
        """The point below a size, and the distance to it as a share of the distance to the next. Beyond the ends: the end."""
        at = log(size)
        low = min(max(bisect_right(self.points, at) - 1, 0), len(self.points) - 2)
        share = (at - self.points[low]) / (self.points[low + 1] - self.points[low])
        return low, min(1.0, max(0.0, share))


@cache
def shipped_tables() -> dict[str, Any]:
    """The document, read once."""
    document: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return document


@cache
def _axes() -> tuple[_Axis, _Axis, _Axis]:
    document = shipped_tables()
    rows, widths, depths = (_Axis(tuple(map(log, document[name]))) for name in ("rows", "widths", "depths"))
    return rows, widths, depths


@lru_cache(maxsize=64)
def table_of(gpu: str, architecture: str) -> KernelTable:
    """The table of a GPU, or of the nearest one."""
    known = shipped_tables()["gpus"]
    name = gpu if gpu in known else NEAREST.get(architecture, "H100-80GB")
    entry = known[name]
    return KernelTable(name, entry["values"], {bits: tuple(grid) for bits, grid in entry["residuals"].items()})


@lru_cache(maxsize=65536)
def residual(gpu: str, architecture: str, precision: str, m: int, n: int, k: int) -> float:
    """ln(measured / predicted) of the seconds of a GEMM, linear between the points of the grid.

    It is 0 for a precision without a table.
    """
    grid = table_of(gpu, architecture).residuals.get(precision)
    if grid is None:
        return 0.0
    (row, down), (column, across), (depth, deep) = (axis.share(size) for axis, size in zip(_axes(), (m, n, k), strict=True))
    columns, depths = len(_axes()[1].points), len(_axes()[2].points)
    found = 0.0
    for i, of_row in ((row, 1 - down), (row + 1, down)):
        for j, of_column in ((column, 1 - across), (column + 1, across)):
            at = (i * columns + j) * depths + depth
            found += of_row * of_column * ((1 - deep) * grid[at] + deep * grid[at + 1])
    return found


@lru_cache(maxsize=256)
def least_residual(gpu: str, architecture: str, precision: str) -> float:
    """The smallest residual of any shape, at most 0."""
    return min(0.0, *table_of(gpu, architecture).residuals.get(precision, (0.0, 0.0)))


def measured_gpu(speed: SpeedSpec) -> str:
    """The GPU whose kernels are used for a GPU."""
    return table_of(speed.name, speed.architecture).gpu
