"""Predict the measured serving rows of AIConfigurator's wheel with AIConfigurator itself.

    VENV/bin/python -m benchmarks.aiconfigurator_rows WHEEL OUTPUT.csv [--held] [--every N]

Runs in an environment with `aiconfigurator-core` 0.12.0 and this repository on PYTHONPATH. `tools/score_serving.py --rival
OUTPUT.csv` prints its errors beside those of this program. Columns `first` and `token` are those of its continuous batching
(`run_agg`, with as many prompt tokens in a step as a prompt has), and for disaggregated rows those of its static mode, as
`static_first` and `static_token`.
Layouts, types and clients of the rows are read as `tools/score_serving.py` reads them.
"""

from __future__ import annotations

import argparse
import csv
import logging
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.score_serving import GPUS, Row, rows_of

NAMES = {
    "MiniMaxAI/MiniMax-M2": "MiniMaxAI/MiniMax-M2.5", "moonshotai/Kimi-K2-Instruct": "moonshotai/Kimi-K2-Instruct",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B", "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
}  # fmt: skip
MODES = {"w16a16kv16": "bfloat16", "w8a8kv8": "fp8", "w8a8kv8g128": "fp8_block", "w4a4kv8": "nvfp4", "w4a16kv16": "bfloat16"}
EXPERTS = {"w4a16kv16": "int4_wo"}


@cache
def database(gpu: str, engine: str) -> Any:
    """Its tables of an engine on a GPU."""
    get_database_view = import_module("aiconfigurator_core.sdk.perf_database").get_database_view

    system = {name: system for system, name in GPUS.items()}[gpu]
    return get_database_view(system, engine, "current", database_mode="HYBRID")


@cache
def model(name: str, engine: str, bits: str, layout: tuple[int, int, int, int]) -> Any:
    """Its model of a replica."""
    build_model_config = import_module("aiconfigurator_core.sdk.config_builders").build_model_config
    get_model = import_module("aiconfigurator_core.sdk.models").get_model

    tensor, groups, expert_tensor, expert = layout
    experts = EXPERTS.get(bits, MODES[bits])
    if "gpt-oss" in name:
        experts = "w4a16_mxfp4" if bits == "w4a16kv16" else "w4a8_mxfp4_mxfp8"
    config = build_model_config(
        tensor, 1, groups, expert_tensor, expert,
        gemm_quant_mode="bfloat16" if "gpt-oss" in name else MODES[bits],
        kvcache_quant_mode="fp8" if bits.endswith("kv8") or "kv8g" in bits else "bfloat16",
        fmha_quant_mode="bfloat16", moe_quant_mode=experts, comm_quant_mode="half",
    )  # fmt: skip
    return get_model(NAMES.get(name, name), config, engine)


def static(row: Row, layout: tuple[int, int, int, int], mode: str, batch: int) -> float:
    """Milliseconds of its static mode: of a prompt, or of an output token."""
    runtime = import_module("aiconfigurator_core.sdk.config").RuntimeConfig(batch_size=batch, isl=row.prompt, osl=row.generate)
    parts = (
        import_module("aiconfigurator_core.sdk.backends.factory")
        .get_backend(row.engine)
        .run_static_latency_only(model(row.model, row.engine, row.bits, layout), database(row.gpu, row.engine), runtime, mode)
    )
    return float(parts) / (row.generate - 1 if mode == "static_gen" else 1)


def agg(row: Row) -> tuple[float, float]:
    """Milliseconds of the first and of an output token with continuous batching."""
    batch = max(1, row.clients // row.layout[1])
    runtime = import_module("aiconfigurator_core.sdk.config").RuntimeConfig(batch_size=batch, isl=row.prompt, osl=row.generate)
    unit = model(row.model, row.engine, row.bits, row.layout)
    summary = (
        import_module("aiconfigurator_core.sdk.backends.factory")
        .get_backend(row.engine)
        .run_agg(unit, database(row.gpu, row.engine), runtime, ctx_tokens=row.prompt)
    )
    found = summary.get_summary_df().iloc[0]
    return float(found["ttft"]), float(found["tpot"])


def main() -> None:
    """Writes the predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    faults: dict[str, int] = {}
    with args.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "first", "token", "static_first", "static_token"))
        for row in list(rows_of(args.wheel, held=args.held))[:: args.every]:
            try:
                batch = max(1, row.clients // row.layout[1] // (row.prefill[2] if row.prefill else 1))
                token = static(row, row.layout, "static_gen", batch)
                first = static(row, row.prefill[0] if row.prefill else row.layout, "static_ctx", 1)
                both = (first, token) if row.prefill else agg(row)
            except Exception as fault:  # of the other program: the row is not compared
                name = f"{type(fault).__name__}: {str(fault)[:100]}"
                faults[name] = faults.get(name, 0) + 1
                continue
            writer.writerow((row.id, *both, first, token))
    for name, number in faults.items():
        print(number, name)


if __name__ == "__main__":
    main()
