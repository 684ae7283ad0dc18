"""Distill tables of the kernels of serving engines into `analyzer/inference/serving/tables.json.gz`, and print their errors.

    python tools/serving_tables.py WHEEL [--write]

`WHEEL` is the unpacked or packed wheel `aiconfigurator-core` 0.12.0 (Apache-2.0), whose `systems/data` has the latencies of kernels
of TensorRT-LLM, vLLM and SGLang on idle GPUs. Its measured serving rows are not read. Needs the extra `fit` (pandas, pyarrow).

Each table becomes a grid of ln(measured / floor), with the floors of `analyzer.inference.serving.floors`. Grids of GEMMs,
attention and all-reduces take the measured kernels at their points. Those of experts are fitted to all shapes of models: a grid
over tokens, width of an expert on the rank and experts of the rank, and for each shape of a model what this grid lacks at each
number of tokens. Values are integers of 8 bits in steps of 2 %.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import itertools
import json
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer.hardware.speeds import speed_of
from analyzer.inference.serving import floors
from analyzer.inference.serving.tables import AXES, FILE, STEP, Table
from analyzer.specs.speed import SpeedSpec

SYSTEMS: Final = {
    "A100-80GB": "a100_sxm", "H100-80GB": "h100_sxm", "H200-141GB": "h200_sxm", "B200-180GB": "b200_sxm", "B300-288GB": "b300_sxm",
    "GB200-186GB": "gb200", "GB300-288GB": "gb300", "L40S": "l40s",
}  # fmt: skip
"""GPUs of this program, and the folders of their tables."""
ENGINES: Final = ("trtllm", "vllm", "sglang")
GEMM_KINDS: Final = {"bfloat16": "16", "fp8": "8", "fp8_block": "8b", "nvfp4": "4"}
EXPERT_KINDS: Final = {**GEMM_KINDS, "int4_wo": "w4", "w4a16_mxfp4": "w4m", "w4a8_mxfp4_mxfp8": "w4a8"}
CACHE_BITS: Final = {"bfloat16": "16", "float16": "16", "fp8": "8"}
ELEMENT: Final = {"16": 2.0, "8": 1.0}
DISTRIBUTION: Final = "power_law_1.01"
"""How often each expert is chosen in the tables that are used: unequally, as with real prompts."""
FEWEST: Final = 300
"""Kernels of experts from which on a version of an engine is used."""
FEWEST_OF_SHAPE: Final = 40
"""The same of a shape of a model."""
LEAST: Final = 0.3
"""Least share of the time of a product with its casts that the product alone has."""
LIMIT: Final = 127
RIDGE: Final = 0.5
WHAT: Final = (
    "ln(measured / floor) of the kernels of serving engines, in steps of 2 %, as base64 of bytes with sign, by GPU, engine and "
    "kernel, at the points of the axes in tables.py. Written by tools/serving_tables.py from aiconfigurator-core 0.12.0, "
    "systems/data, Copyright (c) NVIDIA Corporation & Affiliates, Apache-2.0."
)


def version_of(path: Path) -> list[int]:
    """The numbers of the version of a table."""
    return [int("0" + "".join(filter(str.isdigit, part))) for part in path.parts[-2].split(".")]


def newest(folder: Path, name: str) -> Path | None:
    """The table of the newest version of an engine that has one."""

    found = sorted(folder.glob(f"*/{name}"), key=version_of)
    return found[-1] if found else None


def encode(values: Any) -> str:
    """Integers of 8 bits in base64."""
    return base64.b64encode(np.clip(np.round(values / STEP), -LIMIT, LIMIT).astype(np.int8).tobytes()).decode()


def at_points(table: Table, seconds: dict[tuple[float, ...], float], floor: Callable[..., float]) -> str | None:
    """The grid of the kernels at the points of the axes. A point without one takes the value of the nearest point."""
    points = list(itertools.product(*AXES[table]))
    known = {point: np.log(seconds[point] / floor(*point)) for point in points if point in seconds}
    if len(known) < len(points) / 8:
        return None
    places = np.array([np.log(point) for point in known])
    values = list(known.values())
    grid = [known[point] if point in known else values[_nearest(places, point)] for point in points]
    return encode(np.array(grid))


def _nearest(places: Any, point: Iterable[float]) -> int:
    return int(np.abs(places - np.log(list(point))).sum(axis=1).argmin())


def seconds_by(rows: pd.DataFrame, columns: Iterable[str]) -> dict[tuple[float, ...], float]:
    """Least seconds of the kernels by the values of the columns."""
    least = rows.groupby(list(columns)).latency.min()
    return {tuple(map(float, np.atleast_1d(key))): float(value) / 1e3 for key, value in least.items()}


def gemms(rows: pd.DataFrame, speed: SpeedSpec) -> dict[str, str]:
    """Grids of the products by their kind."""
    found: dict[str, str] = {}
    for name, kind in GEMM_KINDS.items():
        some = rows[rows.gemm_dtype == name]
        if len(some) and floors.PEAKS[kind] in speed.peak_flops:
            grid = at_points("gemm", seconds_by(some, "mnk"), lambda m, n, k, kind=kind: floors.gemm_floor(speed, kind, m, n, k))
            found |= {f"gemm {kind}": grid} if grid else {}
    return found


def without_scales(rows: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """The products of TensorRT-LLM without the kernels that find the scale of the inputs and cast them.

    Its table has them in fp8 and NVFP4. Engines use the scales of the checkpoint, and cast in the kernel before the product.
    """
    for name in ("computescale_perf", "scale_matrix_perf"):
        path = newest(folder / "quantize" / "trtllm", f"{name}.parquet")
        if path is None:
            continue
        casts = pd.read_parquet(path)
        casts = casts[casts.quant_dtype == "fp8"].groupby(["m", "k"], as_index=False).latency.min()
        rows = rows.merge(casts.rename(columns={"latency": "cast"}), on=["m", "k"], how="left")
        spent = rows.cast.fillna(0.0).where(rows.gemm_dtype.isin(["fp8", "nvfp4"]), 0.0)
        rows = rows.assign(latency=np.maximum(rows.latency - spent, LEAST * rows.latency)).drop(columns="cast")
    return rows


def attention(rows: pd.DataFrame, speed: SpeedSpec) -> dict[str, str]:
    """Grids of the attention of generation by the elements of a head and the bits of the cache."""
    rows = rows[rows.window_size.fillna(0) == 0] if "window_size" in rows else rows
    rows = rows.assign(length=rows.step + 1, bits=rows.kv_cache_dtype.map(CACHE_BITS))
    rows = rows.assign(heads=np.where(rows.num_key_value_heads == 0, rows.num_heads, rows.num_key_value_heads))
    rows = rows.assign(group=rows.num_heads / rows.heads)
    found: dict[str, str] = {}
    for (width, bits), some in rows.groupby(["head_dim", "bits"]):
        seconds = seconds_by(some, ["group", "heads", "batch_size", "length"])

        def floor(group: float, heads: float, batch: float, length: float, *, width: int = width, bits: str = bits) -> float:
            return floors.attention_floor(
                speed, element_bytes=ELEMENT[bits], width=width, group=group, heads=heads, batch=batch, length=length
            )

        grid = at_points("attention", seconds, floor)
        found |= {f"attention {width} {bits}": grid} if grid else {}
    return found


def latents(rows: pd.DataFrame, speed: SpeedSpec) -> dict[str, str]:
    """Grids of multi-latent attention of generation by the bits of the cache."""
    rows = rows.assign(length=rows.step + 1, bits=rows.kv_cache_dtype.map(CACHE_BITS))
    found: dict[str, str] = {}
    for bits, some in rows.groupby("bits"):
        seconds = seconds_by(some, ["num_heads", "batch_size", "length"])

        def floor(heads: float, batch: float, length: float, *, bits: str = bits) -> float:
            return floors.latent_floor(speed, element_bytes=ELEMENT[bits], heads=heads, batch=batch, length=length)

        grid = at_points("latent", seconds, floor)
        found |= {f"latent {bits}": grid} if grid else {}
    return found


def reduces(rows: pd.DataFrame, speed: SpeedSpec) -> dict[str, str]:
    """The grid of all-reduces in CUDA graphs: of the faster of the engine's kernels."""
    rows = rows[rows.allreduce_dtype.isin(["bfloat16", "half", "float16"])]
    if "backend" in rows and rows.backend.astype(str).str.contains("graph").any():
        rows = rows[rows.backend.astype(str).str.contains("graph")]
    rows = rows.assign(size=2 * rows.message_size)
    seconds = seconds_by(rows, ["num_gpus", "size"])
    grid = at_points("all_reduce", seconds, lambda ranks, size: floors.all_reduce_floor(speed, ranks=ranks, size=size))
    return {"all_reduce": grid} if grid else {}


def _shares(values: Any, points: tuple[float, ...]) -> Any:
    at = np.interp(np.log(values), np.log(points), np.arange(len(points)))
    low = np.minimum(at.astype(int), len(points) - 2)
    found = np.zeros((len(values), len(points)))
    index = np.arange(len(values))
    found[index, low] = 1 - (at - low)
    found[index, low + 1] = at - low
    return found


def of_shapes(rows: pd.DataFrame, lacks: Any) -> tuple[dict[str, str], Any]:
    """What the grid of experts lacks for each shape of a model, at the points of the tokens, and the same for each row."""
    points = AXES["experts"][0]
    found: dict[str, str] = {}
    of_rows = np.zeros(len(rows))
    for shape, places in rows.groupby(["hidden_size", "inter_size", "num_experts", "topk"]).indices.items():
        if len(places) < FEWEST_OF_SHAPE:
            continue
        shares = _shares(rows.num_tokens.to_numpy(float)[places], points)
        values = np.linalg.solve(shares.T @ shares + RIDGE * np.eye(len(points)), shares.T @ lacks[places])
        found[" ".join(map(str, shape))] = encode(values)
        of_rows[places] = shares @ values
    return found, of_rows


def experts(rows: pd.DataFrame, speed: SpeedSpec) -> tuple[dict[str, Any], dict[str, str]]:
    """Grids of the experts by their kind, and their errors. Of several kernels of an engine the fastest of each shape is used."""
    found: dict[str, Any] = {"shapes": {}}
    errors: dict[str, str] = {}
    shape = ["num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
    rows = rows[(rows.distribution == DISTRIBUTION) & ~rows.kernel_source.str.contains("nongated|situ")]
    for name, kind in EXPERT_KINDS.items():
        some = rows[rows.moe_dtype == name].groupby(shape, as_index=False).latency.min()
        base = floors.base_kind(kind)
        if len(some) < FEWEST or floors.PEAKS[base] not in speed.peak_flops:
            continue
        width, local = some.inter_size / some.moe_tp_size, some.num_experts / some.moe_ep_size
        least = [
            floors.experts_floor(speed, base, tokens=t, hidden=h, width=w, local=n, experts=e, topk=k)
            for t, h, w, n, e, k in zip(
                some.num_tokens, some.hidden_size, width, local, some.num_experts, some.topk, strict=True
            )
        ]  # fmt: skip
        target = np.log(some.latency.to_numpy(float) / 1e3 / np.array(least))
        axes = [_shares(v.to_numpy(float), p) for v, p in zip((some.num_tokens, width, local), AXES["experts"], strict=True)]
        shares = np.einsum("ia,ib,ic->iabc", *axes).reshape(len(some), -1)
        middle = float(np.median(target))
        grid = middle + np.linalg.solve(shares.T @ shares + RIDGE * np.eye(shares.shape[1]), shares.T @ (target - middle))
        found[f"experts {kind}"] = encode(grid)
        found["shapes"][f"experts {kind}"], more = of_shapes(some, target - shares @ grid)
        error = np.abs(np.exp(shares @ grid + more - target) - 1)
        errors[kind] = f"{100 * np.median(error):.0f}/{100 * np.quantile(error, 0.9):.0f} % of {len(some)}"
    return found, errors


def engine_tables(folder: Path, engine: str, speed: SpeedSpec) -> dict[str, Any]:
    """All grids of an engine on a GPU."""
    found: dict[str, Any] = {}
    for part, name, distill in (
        ("gemm", "gemm_perf", gemms), ("attention", "generation_attention_perf", attention),
        ("mla", "generation_mla_perf", latents), ("comm", "custom_allreduce_perf", reduces),
    ):  # fmt: skip
        path = newest(folder / part / engine, f"{name}.parquet")
        if path is not None:
            rows = pd.read_parquet(path)
            found |= distill(without_scales(rows, folder) if (part, engine) == ("gemm", "trtllm") else rows, speed)
    versions = sorted((folder / "moe" / engine).glob("*/moe_perf.parquet"), key=version_of)
    if versions:
        grids: dict[str, Any] = {}
        shapes: dict[str, dict[str, str]] = {}
        errors: dict[str, str] = {}
        for version in versions:  # later ones replace earlier ones
            some, of_some = experts(pd.read_parquet(version), speed)
            shapes |= some.pop("shapes")
            grids |= some
            errors |= of_some
        found |= grids | {"shapes": shapes}
        print(f"  {engine}: experts (median/p90 error) {errors}")
    return found


def main() -> None:
    """Distills, and prints errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    folder = args.wheel
    if folder.is_file():
        folder = Path(tempfile.mkdtemp())
        zipfile.ZipFile(args.wheel).extractall(folder)
    data = next(folder.glob("**/systems/data"))
    document: dict[str, Any] = {"what": WHAT, "gpus": {}}
    for gpu, system in SYSTEMS.items():
        speed = speed_of(gpu)
        assert speed is not None, gpu
        print(gpu)
        document["gpus"][gpu] = {engine: engine_tables(data / system, engine, speed) for engine in ENGINES}
        print("   ", {engine: sorted(grids) for engine, grids in document["gpus"][gpu].items()})
    packed = gzip.compress(json.dumps(document, sort_keys=True).encode(), 9, mtime=0)
    print(f"{len(packed):,} bytes")
    if args.write:
        FILE.write_bytes(packed)


if __name__ == "__main__":
    main()
