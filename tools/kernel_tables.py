"""Distill tables of measured kernels into `analyzer/time/kernels/tables.json`, and print the errors of the distillation.

    python tools/kernel_tables.py WHEEL [--write]

`WHEEL` is the unpacked or packed wheel `aiconfigurator-core` 0.12.0 (Apache-2.0), whose `systems/data` has the latencies of kernels
on idle GPUs, measured with the frameworks of inference. Needs the extra `fit` (scipy, pandas, pyarrow).

A GEMM is described by five constants (ceiling, depth of half the efficiency, visible share of the memory traffic, latency, and the
bytes that its quantization moves) and by a grid of residuals in ln m, ln n and ln k. Only the first three enter the time model with
the residuals: Megatron's casts are kernels of their own. Tables of TensorRT-LLM are used: its inputs are random numbers, on which
the clock of a GPU depends.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer.hardware.speeds import speed_of
from analyzer.specs.speed import SpeedSpec
from analyzer.time.kernels.seconds import ATTENTION_TILE, TILES
from analyzer.time.kernels.tables import FILE
from analyzer.time.work.kernels import BYTES, Precision
from analyzer.time.work.linear_attention import bytes_of_rule

SYSTEMS: Final = {
    "A100-80GB": "a100_sxm", "H100-80GB": "h100_sxm", "H200-141GB": "h200_sxm", "B200-180GB": "b200_sxm", "B300-288GB": "b300_sxm",
    "GB200-186GB": "gb200", "GB300-288GB": "gb300", "L40S": "l40s",
}  # fmt: skip
"""GPUs of this program, and the folders of their tables."""
PRECISIONS: Final[dict[Precision, str]] = {"16": "bfloat16", "8": "fp8", "4": "nvfp4"}
ROWS: Final = (256, 1024, 4096, 16384)
WIDTHS: Final = (512, 2048, 8192, 32768)
DEPTHS: Final = (512, 2048, 8192, 32768)
"""Points of the grid of residuals: m, n and k."""
SMALLEST: Final = 128
"""Smallest m, n and k of the products that are used."""
FEWEST_TOKENS: Final = 16384
"""Tokens from which on scans and convolutions are used."""
MEMORY: Final = 0.85
"""Share of the memory bandwidth that the traffic of a kernel reaches."""
STEEPEST: Final = 0.6
"""Largest fall of the residual from a point to the next. With four times the tiles the time at least doubles: exp(0.69)."""
RIDGE: Final = 0.5
"""Holds residuals without products near them at zero."""
WHAT: Final = (
    "Constants of kernels from tables of measured kernels, by GPU. residuals: ln(measured / predicted) of a GEMM by ln m, ln n and "
    "ln k, at the points of rows, widths and depths, for each precision. Written by tools/kernel_tables.py."
)


def _newest(folder: Path, name: str) -> Path | None:
    found = sorted(
        folder.glob(f"*/{name}"), key=lambda path: [int("0" + "".join(filter(str.isdigit, p))) for p in path.parts[-2].split(".")]
    )
    return found[-1] if found else None


def _filled(m: Any, n: Any, multiprocessors: int) -> Any:
    """`analyzer.time.kernels.seconds.fill` of arrays."""
    best = np.zeros(len(m))
    for tile_m, tile_n, grade in TILES:
        rows, columns = np.ceil(m / tile_m), np.ceil(n / tile_n)
        waves = rows * columns / multiprocessors
        best = np.maximum(best, grade * m * n / (rows * tile_m * columns * tile_n) * np.sqrt(waves / np.ceil(waves)))
    return best


def _weights(values: Any, points: tuple[int, ...]) -> Any:
    """Shares of the grid points for each value, linear in the logarithm. [values, points]"""
    at = np.interp(np.log(values), np.log(points), np.arange(len(points)))
    low = np.minimum(at.astype(int), len(points) - 2)
    shares = np.zeros((len(values), len(points)))
    index = np.arange(len(values))
    shares[index, low] = 1 - (at - low)
    shares[index, low + 1] = at - low
    return shares


class Products:
    """The products of one precision in a table, with the times of their parts at the peaks of the GPU."""

    def __init__(self, rows: pd.DataFrame, precision: Precision, speed: SpeedSpec) -> None:
        rows = rows[(rows.m >= SMALLEST) & (rows.n >= SMALLEST) & (rows.k >= SMALLEST)]
        rows = rows.groupby(["m", "n", "k"], as_index=False).latency.min()
        self.m, self.n, self.k = (rows[name].to_numpy(float) for name in ("m", "n", "k"))
        self.measured = rows.latency.to_numpy(float) / 1e3
        self.quantized = precision != "16"
        self.ideal = 2 * self.m * self.n * self.k / (speed.peak_flops[precision] * _filled(self.m, self.n, speed.multiprocessors))
        traffic = BYTES[precision] * self.k * (self.m + self.n) + 2 * self.m * self.n
        self.traffic = traffic / (speed.hbm_bytes * MEMORY)
        self.cast = self.m * self.k / (speed.hbm_bytes * MEMORY)
        self.weight = np.clip(self.measured / 3e-5, 0.1, 1.0)

    def predicted(self, ceiling: float, half: float, shown: float, latency: float, moved: float) -> tuple[Any, Any]:
        """Seconds of the products, and of what the table adds to them."""
        math = self.ideal / ceiling * (1 + half / self.k)
        product = np.maximum(math, self.traffic) + shown * np.minimum(math, self.traffic)
        return product, latency + (moved * self.cast if self.quantized else 0.0)


def gemm_tables(rows: pd.DataFrame, speed: SpeedSpec) -> dict[str, Any]:
    """The constants and residuals of a table with m, n, k and latency in ms.

    The depth of half the efficiency and the visible share of the traffic are those of all precisions.
    """
    found = {
        precision: Products(rows[rows.gemm_dtype == name], precision, speed)
        for precision, name in PRECISIONS.items()
        if (rows.gemm_dtype == name).any()
    }

    def parts(x: Any) -> list[tuple[float, float, float, float, float]]:
        values = np.exp(x)
        return [(values[2 + 3 * i], values[0], values[1], values[3 + 3 * i], values[4 + 3 * i]) for i in range(len(found))]

    def residuals(x: Any) -> Any:
        return np.concatenate([
            each.weight * np.log(sum(each.predicted(*constants)) / each.measured)
            for each, constants in zip(found.values(), parts(x), strict=True)
        ])  # fmt: skip

    start = np.log([150, 0.3] + [0.7, 4e-6, 6] * len(found))
    low = np.log([20, 0.02] + [0.3, 1e-6, 2] * len(found))
    high = np.log([600, 1.0] + [1.0, 2e-5, 14] * len(found))
    fitted = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1).x
    values: dict[str, Any] = {"gemm_half_depth": _short(np.exp(fitted[0])), "gemm_traffic": _short(np.exp(fitted[1]))}
    grids, errors = {}, {}
    print(f"  GEMM: half depth {values['gemm_half_depth']}, traffic {values['gemm_traffic']}")
    for (precision, each), constants in zip(found.items(), parts(fitted), strict=True):
        product, rest = each.predicted(*constants)
        target = np.log(np.maximum(each.measured - rest, 0.2 * each.measured) / product)
        axes = (_weights(each.m, ROWS), _weights(each.n, WIDTHS), _weights(each.k, DEPTHS))
        shares = np.einsum("ia,ib,ic->iabc", *axes).reshape(len(each.m), -1)
        own = np.clip(1 - rest / each.measured, 0.0, 1.0)  # what the table adds says nothing of the product
        weighted = (each.weight * own**2)[:, None] * shares
        grid = _monotone(np.linalg.solve(weighted.T @ shares + RIDGE * np.eye(shares.shape[1]), weighted.T @ target))
        error = np.abs((product * np.exp(shares @ grid) + rest) / each.measured - 1)
        large = each.measured > 1e-4
        values[f"gemm_{precision}"] = _short(constants[0])
        grids[precision] = [round(float(value), 3) for value in grid]
        errors[f"gemm_{precision}"] = _errors(error)
        print(
            f"  {precision:2} bit: ceiling {constants[0]:.3f}, latency {constants[3] * 1e6:.1f} us, cast {constants[4]:.1f} bytes,"
            f" error {_percent(error)}, above 0.1 ms {_percent(error[large])} of {len(error)}"
        )
    return {"values": values, "residuals": grids, "errors": errors}


def _monotone(grid: Any) -> Any:
    """The residuals of small products lowered, so that a product four times as large is never faster."""
    cube = grid.reshape(len(ROWS), len(WIDTHS), len(DEPTHS))
    for _ in range(len(ROWS)):
        for axis in range(3):
            view = np.moveaxis(cube, axis, 0)
            for place in reversed(range(len(view) - 1)):
                view[place] = np.minimum(view[place], view[place + 1] + STEEPEST)
    return cube.reshape(-1)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _errors(error: Any) -> dict[str, float]:
    return {"median": round(float(np.median(error)), 3), "p90": round(float(np.quantile(error, 0.9)), 3), "kernels": len(error)}


def _percent(error: Any) -> str:
    return f"{100 * np.median(error):.1f} / {100 * np.quantile(error, 0.9):.1f} %"


LATENT_KERNELS: Final = ("hopper", "blackwell")
"""Architectures with fused kernels for latent attention."""
LATENT: Final = 160
"""Stands for latent attention: queries of 192 and values of 128 elements."""


def attention_table(folder: Path, speed: SpeedSpec) -> dict[str, Any]:
    """Constants of the forward of causal attention, from the median kernel of three frameworks for each shape.

    Seconds are those of the pairs, rounded up to tiles, plus a constant number of keys for each query, at a rate that depends on
    the size of a head and on the filled multiprocessors.
    """
    found = []
    for framework in ("trtllm", "sglang", "vllm"):
        path = _newest(folder / "attention" / framework, "context_attention_perf.parquet")
        if path is not None:
            rows = pd.read_parquet(path)
            found.append(rows[rows.attn_dtype.isin(["bfloat16", "float16"]) & rows.kv_cache_dtype.isin(["bfloat16", "float16"])])
        path = _newest(folder / "mla" / framework, "context_mla_perf.parquet") if speed.architecture in LATENT_KERNELS else None
        if path is not None:
            rows = pd.read_parquet(path)
            rows = rows[(rows.mla_dtype == "bfloat16") & (rows.kv_cache_dtype == "bfloat16")]
            found.append(rows.assign(head_dim=LATENT))
    rows = pd.concat(found)
    if "window_size" not in rows:
        rows["window_size"] = 0
    rows["window_size"] = rows.window_size.fillna(0)
    rows = rows[(rows.isl >= 1024) & (rows.num_heads >= 4) & rows.head_dim.isin([64, 128, LATENT]) & (rows.window_size < rows.isl)]
    rows = rows[(rows.window_size == 0) | (rows.head_dim == 64)]
    shape = ["batch_size", "num_heads", "isl", "head_dim", "window_size"]
    rows = rows.groupby([*shape, "framework"], as_index=False).latency.median()  # of the numbers of key-value heads
    latent = rows.head_dim == LATENT  # one framework has no kernel for it on Hopper
    rows = pd.concat(
        [
            rows[latent].groupby(shape, as_index=False).latency.min(),
            rows[~latent].groupby(shape, as_index=False).latency.median(),
        ]
    )
    batch, heads, length, size, window = (
        rows[name].to_numpy(float) for name in ("batch_size", "num_heads", "isl", "head_dim", "window_size")
    )
    measured = rows.latency.to_numpy(float) / 1e3
    seen = np.where(window > 0, window + 1, length / 2) + ATTENTION_TILE / 2
    width = np.where(size == LATENT, 320, 2 * size)
    work = 2 * batch * heads * length * width / speed.peak_flops["16"]
    tiles = batch * heads * length / ATTENTION_TILE
    weight = np.clip(measured / 1e-4, 0.2, 1.0)

    def predicted(x: Any) -> Any:
        rate, keys, narrow, waves = np.exp(x)
        filled = np.minimum(1.0, tiles / (waves * speed.multiprocessors)) ** 0.5
        return work * (seen + keys) * (1 + narrow / (width / 2)) / (rate * filled) + 4e-6

    start, bounds = np.log([0.7, 400, 40, 2]), np.log([[0.2, 20, 1, 0.5], [4.0, 3000, 1000, 16]])
    found_x = least_squares(lambda x: weight * np.log(predicted(x) / measured), start, bounds=bounds, loss="soft_l1", f_scale=0.1).x
    errors = np.abs(predicted(found_x) / measured - 1)
    signed = np.log(predicted(found_x) / measured)
    rate, keys, narrow, waves = (_short(value) for value in np.exp(found_x))
    kinds = " ".join(
        f"{label} {100 * np.median(signed[mask]):+.0f}%"
        for label, mask in (
            ("64", (size == 64) & (window == 0)),
            ("128", size == 128),
            ("latent", size == LATENT),
            ("window", window > 0),
        )
        if mask.any()
    )
    constants = f"rate {rate}, keys {2 * keys:.0f}, width {narrow}, waves {waves}"
    print(f"  attention: {constants}, error {_percent(errors)} of {len(errors)}: {kinds}")
    values = {"attention": rate, "attention_half_sequence": 2 * keys, "attention_half_width": narrow, "attention_waves": waves}
    return {"values": values, "errors": {"attention": _errors(errors)}}


def scan_table(folder: Path, speed: SpeedSpec) -> dict[str, Any]:
    """The shares of the memory bandwidth that the forward of a chunked scan and of a causal convolution reach.

    The scan is the delta rule of a gated delta net with as many heads of keys as of values, as Megatron-LM runs it; its bytes are
    those of `analyzer.time.work.linear_attention`. Of both, shapes are used whose time is not that of starting the kernels. A GPU
    without these tables gets no values.
    """
    found: dict[str, float] = {}
    errors: dict[str, Any] = {}
    for name, table, kernel, moved in (
        ("memory_scan", "gdn_perf.parquet", "chunk_gated_delta_rule", _bytes_of_delta_rule),
        ("memory_convolution", "mamba2_perf.parquet", "causal_conv1d_fn", _bytes_of_convolution),
    ):
        path = _newest(folder / "linear_attention" / "trtllm", table)
        if path is None:
            continue
        rows = pd.read_parquet(path)
        rows = rows[(rows.phase == "context") & (rows.kernel_source == kernel) & (rows.num_tokens >= FEWEST_TOKENS)]
        if kernel == "chunk_gated_delta_rule":
            rows = rows[rows.num_k_heads == rows.num_v_heads]
        shares = moved(rows).to_numpy(float) / (rows.latency.to_numpy(float) / 1e3) / speed.hbm_bytes
        found[name] = round(float(np.median(shares)), 3)
        errors[name] = _errors(np.abs(found[name] / shares - 1))
        print(f"  {name}: {found[name]}, error {_percent(np.abs(found[name] / shares - 1))} of {len(shares)}")
    return {"values": found, "errors": errors}


def _bytes_of_delta_rule(rows: Any) -> Any:
    """Bytes of the forward of `delta_rule`."""
    keys, values = rows.num_v_heads * rows.head_k_dim, rows.num_v_heads * rows.head_v_dim
    return rows.num_tokens * bytes_of_rule(keys, values, rows.num_v_heads, rows.head_k_dim * rows.head_v_dim)[0]


def _bytes_of_convolution(rows: Any) -> Any:
    """Each channel of each token is read and written in 16 bit."""
    return 4.0 * rows.num_tokens * (rows.nheads * rows.head_dim + 2 * rows.n_groups * rows.d_state)


def _text(document: dict[str, Any]) -> str:
    """JSON with one line for each grid."""
    text = json.dumps(document, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


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
    document: dict[str, Any] = {"what": WHAT, "rows": ROWS, "widths": WIDTHS, "depths": DEPTHS, "gpus": {}}
    for gpu, system in SYSTEMS.items():
        speed = speed_of(gpu)
        assert speed is not None, gpu
        print(gpu)
        table = _newest(data / system / "gemm" / "trtllm", "gemm_perf.parquet")
        assert table is not None
        rows = pd.read_parquet(table)
        products, attention = gemm_tables(rows, speed), attention_table(data / system, speed)
        scan = scan_table(data / system, speed)
        document["gpus"][gpu] = {
            "values": {**products["values"], **attention["values"], **scan["values"]},
            "residuals": products["residuals"],
            "errors": {**products["errors"], **attention["errors"], **scan["errors"]},
            "source": f"aiconfigurator-core 0.12.0, systems/data/{system}",
        }
    if args.write:
        FILE.write_text(_text(document))


if __name__ == "__main__":
    main()
