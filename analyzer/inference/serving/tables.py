"""Measured kernels of serving engines, in `serving/tables.json.gz`: grids of ln(measured / floor), linear between their points.

`tools/serving_tables.py` writes them. A GPU without tables gets those of the nearest one, relative to its own peaks.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64decode
from bisect import bisect_right
from functools import cache, lru_cache
from math import exp, log
from pathlib import Path
from typing import Any, Final, Literal

from analyzer.specs.speed import SpeedSpec
from analyzer.time.kernels.tables import NEAREST

FILE: Final = Path(__file__).with_name("tables.json.gz")
Table = Literal["gemm", "attention", "latent", "experts", "all_reduce"]
STEP: Final = 0.02
"""Step of the values, in logarithms."""
AXES: Final[dict[Table, tuple[tuple[float, ...], ...]]] = {
    "gemm": (
        (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192, 32768),
        (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536),
        (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536),
    ),
    "attention": ((1, 4, 8, 16), (1, 2, 8), (1, 4, 16, 64, 256, 1024), (128, 512, 2048, 8192, 32768, 131072)),
    "latent": ((1, 4, 16, 64, 128), (1, 4, 16, 64, 256, 1024), (128, 512, 2048, 8192, 32768, 131072)),
    "experts": (
        (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384),
        (64, 128, 256, 512, 1024, 2048, 8192),
        (1, 4, 16, 64, 256),
    ),
    "all_reduce": ((2, 4, 8), tuple(float(2**power) for power in range(10, 30, 2))),
}  # fmt: skip
"""Points of the axes. gemm: rows, columns, depth. attention: query heads of each head of keys, heads of keys on the rank, requests,
length. latent: heads on the rank, requests, length. experts: tokens, width of an expert on the rank, experts on the rank.
all_reduce: ranks, bytes."""


@cache
def _document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return found


@cache
def _logarithms(table: Table) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(log, points)) for points in AXES[table])


@lru_cache(maxsize=256)
def grid_of(gpu: str, architecture: str, engine: str, kernel: str) -> tuple[int, ...] | None:
    """The values of a kernel in steps, or None if no table has it. `kernel`: the table and the kind, such as `gemm 8`."""
    known = _document()["gpus"]
    name = gpu if gpu in known else NEAREST.get(architecture, "H100-80GB")
    text = known[name][engine].get(kernel)
    return None if text is None else _values(text)


@lru_cache(maxsize=256)
def shape_of(gpu: str, architecture: str, engine: str, kernel: str, shape: str) -> tuple[int, ...] | None:
    """What the grid of experts lacks for a shape of a model, in steps at the points of the tokens, or None if it is not measured.

    `shape`: elements of a token and of an expert, experts, and experts of a token, as `4096 1536 128 8`.
    """
    known = _document()["gpus"]
    name = gpu if gpu in known else NEAREST.get(architecture, "H100-80GB")
    text = known[name][engine].get("shapes", {}).get(kernel, {}).get(shape)
    return None if text is None else _values(text)


def _values(text: str) -> tuple[int, ...]:
    return tuple(byte - 256 if byte > 127 else byte for byte in b64decode(text))


def table_gpu(speed: SpeedSpec) -> str:
    """The GPU whose tables are used."""
    return speed.name if speed.name in _document()["gpus"] else NEAREST.get(speed.architecture, "H100-80GB")


def ratio(speed: SpeedSpec, engine: str, kernel: str, table: Table, *point: float, shape: str = "") -> float | None:
    """Measured seconds relative to the floor, linear in logarithms between the points. Beyond the ends: the end. None: no table.

    `shape`: of the experts of a model, as in `shape_of`; if it is measured, what the grid of all shapes lacks for it is added.
    """
    grid = grid_of(speed.name, speed.architecture, engine, kernel)
    if grid is None:
        return None
    corners: list[tuple[int, float]] = [(0, 1.0)]
    axes = _logarithms(table)
    for points, value in zip(axes, point, strict=True):
        low, share = _between(points, value)
        corners = [
            (place * len(points) + low + offset, weight * part)
            for place, weight in corners
            for offset, part in ((0, 1 - share), (1, share))
            if part
        ]
    steps = sum(weight * grid[place] for place, weight in corners)
    own = shape_of(speed.name, speed.architecture, engine, kernel, shape) if shape else None
    if own is not None:
        low, share = _between(axes[0], point[0])
        steps += (1 - share) * own[low] + share * own[low + 1]
    return exp(STEP * steps)


def _between(points: tuple[float, ...], value: float) -> tuple[int, float]:
    """The point below a value, and the share of the way to the next one."""
    at = log(max(value, 1e-9))
    low = min(max(bisect_right(points, at) - 1, 0), len(points) - 2)
    return low, min(1.0, max(0.0, (at - points[low]) / (points[low + 1] - points[low])))
