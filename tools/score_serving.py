"""Compare predictions of serving with the measured rows of a wheel of AIConfigurator, and print the errors of both.

    python tools/score_serving.py WHEEL [--held] [--rival FILE] [--csv FILE]

`WHEEL` is the unpacked or packed wheel `aiconfigurator-core` 0.12.0 (Apache-2.0): `systems/silicon_sample.csv` has the time to the
first token and of an output token of 5,221 measured runs. `--held` scores the rows of the models that no choice of this program
looked at: Qwen3-32B, DeepSeek-V3 and R1, gpt-oss. Otherwise all others are scored. `--rival`: predictions of another program, a CSV
file with the columns id, first and token in ms (`benchmarks/aiconfigurator_rows.py` writes it).
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analyzer.errors import AnalyzerError
from analyzer.hardware.speeds import speed_of
from analyzer.inference.reading import read_inference
from analyzer.inference.serving.estimate import Replica, replica_of
from analyzer.specs.serving import ServingSpec
from tools.serving_settings import Run, date_of, is_dense, is_public, other_settings, settings_of

HELD: Final = re.compile(r"qwen3-32b|deepseek-v3|deepseek-r1|gpt-oss", re.IGNORECASE)
"""Models that are kept out of every choice."""
GPUS: Final = {
    "h100_sxm": "H100-80GB", "h200_sxm": "H200-141GB", "b200_sxm": "B200-180GB", "b300_sxm": "B300-288GB", "gb200": "GB200-186GB",
    "gb300": "GB300-288GB",
}  # fmt: skip
MODELS: Final = {
    "MiniMaxAI/MiniMax-M2.5": "MiniMaxAI/MiniMax-M2", "moonshotai/Kimi-K2.5": "moonshotai/Kimi-K2-Instruct",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B", "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Llama-3.1-8B-Instruct",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B", "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-ai/DeepSeek-V3",
}  # fmt: skip
"""Names in the rows, and models of this program with the same layers."""
MODELS_IN_BLOCKS: Final = re.compile(r"MiniMax|DeepSeek|Qwen3-235B")
"""Models whose fp8 checkpoints have a scale for each block of 128 x 128; some rows do not tell the two kinds apart."""
UNMODELLED: Final = ("Qwen3.5", "GLM-5")
"""Models with linear or sparse attention, whose inference this program refuses."""
BITS: Final = {"": "w16a16kv16", "fp8": "w8a8kv8", "fp8_block": "w8a8kv8g128", "nvfp4": "w4a4kv8", "int4_wo": "w4a16kv16"}
SPREAD: Final = 0.2
"""The public benchmark of most rows draws lengths from 80 % to 100 % of the given ones."""


@dataclass(frozen=True)
class Row:
    """A measured run. Times in ms."""

    id: str
    model: str
    gpu: str
    engine: str
    mode: str
    prompt: int
    generate: int
    bits: str
    clients: int
    layout: tuple[int, int, int, int]
    """Tensor-parallel ranks and groups of attention, tensor- and expert-parallel ranks of the experts."""
    prefill: tuple[tuple[int, int, int, int], int, int] | None
    """Of disaggregated serving: the layout of the replicas for prompts, their number, and the number of those that generate."""
    first: float
    token: float
    public: bool = False
    """Whether the public benchmark has published it, whose launch scripts are known."""
    settings: tuple[tuple[str, Any], ...] = ()
    """What these set, as fields of `ServingSpec` (`tools/serving_settings.py`)."""

    @property
    def dense(self) -> bool:
        """Whether the model has no experts."""
        return is_dense(self.model)


def rows_of(wheel: Path, *, held: bool) -> Iterator[Row]:
    """The rows of the models that are held out, or of the others."""
    folder = wheel
    if wheel.is_file():
        folder = Path(tempfile.mkdtemp())
        zipfile.ZipFile(wheel).extractall(folder)
    with next(folder.glob("**/systems/silicon_sample.csv")).open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if bool(HELD.search(row["model_path"])) == held:
                yield row_of(row)


def row_of(row: dict[str, str]) -> Row:
    """A row of the file."""
    agg = row["mode"] == "agg"
    stated = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    layout = layout_of(row, "" if agg else "decode_")
    workers = int(row["decode_num_workers"] or 0)
    clients = int(stated[1]) if stated else int(row["batch_size"] or row["decode_batch_size"] or 0) * layout[1] * max(1, workers)
    quantization = row["moe_quant_mode"] if "gpt-oss" in row["model_path"] else row["gemm_quant_mode"]
    if quantization == "fp8" and (row["moe_quant_mode"] and MODELS_IN_BLOCKS.search(row["model_path"])):
        quantization = "fp8_block"
    mxfp4 = "w4a16kv16" if row["system"].startswith("h") else "w4a8kv8"
    bits = mxfp4 if "gpt-oss" in row["model_path"] else BITS[quantization]
    gpu = GPUS[row["system"]]
    public = is_public(row["silicon_data_source"])
    settings = (settings_of if public else other_settings)(
        Run(
            model=row["model_path"],
            gpu=gpu,
            engine=row["backend"],
            layout=layout,
            prompt=int(row["isl"]),
            generate=int(row["osl"]),
            clients=clients,
            bits=bits,
            date=date_of(row["silicon_data_source"]),
        )
    )
    return Row(
        id=row["id"],
        model=MODELS.get(row["model_path"], row["model_path"]),
        gpu=gpu,
        engine=row["backend"],
        mode=row["mode"],
        prompt=int(row["isl"]),
        generate=int(row["osl"]),
        bits=bits,
        clients=clients,
        layout=layout,
        prefill=None if agg else (layout_of(row, "prefill_"), int(row["prefill_num_workers"] or 1), workers),
        first=float(row["silicon_ttft_ms"] or "nan"),
        token=float(row["silicon_tpot_ms"] or "nan"),
        public=public,
        settings=tuple(settings.items()) if agg else (),
    )


def layout_of(row: dict[str, str], prefix: str) -> tuple[int, int, int, int]:
    """The layout of a row. Some name GPUs that the server does not have: then the experts tell the layout.

    Rows with as many tensor-parallel ranks as the product of both sizes of the experts, which are equal, are of engines with
    `--tp N --ep N`: N GPUs. So are those with N groups of N ranks and N x N experts: other rows of the same runs say so. Those with
    N x N groups of one rank have data-parallel attention on N GPUs.
    """
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tensor, groups, expert_tensor, expert = (int(row[prefix + name] or 0) for name in names)
    if expert_tensor == expert > 1 and tensor == expert * expert_tensor:
        return expert, 1, 1, expert
    tensor = tensor or 1
    if groups == tensor > 1 and expert == groups * tensor:
        return tensor, 1, 1, tensor
    if tensor == 1 and expert_tensor == expert > 1 and groups == expert * expert_tensor:
        return 1, expert, 1, expert
    if expert_tensor * expert <= 1:  # no experts
        return tensor, 1, tensor, 1
    return tensor, max(1, expert_tensor * expert // tensor), expert_tensor, expert


@cache
def replica(model: str, gpu: str, engine: str, bits: str, layout: tuple[int, int, int, int], lengths: tuple[int, int]) -> Replica:
    """The model of a replica. Raises AnalyzerError."""
    tensor, groups, expert_tensor, expert = layout
    words = ["--info-model", model, "--tensor-model-parallel-size", str(tensor), "--info-world-size", str(tensor * groups)]
    words += ["--info-gpu", gpu, "--info-quantize", bits, "--info-megatron", "0.16.1"]
    words += [
        "--info-inference",
        f"batch=1,prompt={lengths[0]},generate={lengths[1]}",
        "--info-gpus-per-node",
        str(min(8, tensor * groups)),
    ]
    if expert * expert_tensor > 1:
        words += ["--expert-model-parallel-size", str(expert), "--expert-tensor-parallel-size", str(expert_tensor)]
    if "gpt-oss" in model:  # Megatron does not split experts with biases over ranks; engines do
        words.append("--disable-bias-linear")
    launch = read_inference(words, environ={}, folder=Path.cwd())
    speed = speed_of(gpu)
    assert speed is not None
    return replica_of(launch.job, engine, speed)  # type: ignore[arg-type]


def predicted(row: Row) -> tuple[float, float]:
    """Times of the first and of an output token, in ms. Raises AnalyzerError."""
    spec = ServingSpec(clients=max(1, row.clients), spread=SPREAD, **dict(row.settings))
    unit = replica(row.model, row.gpu, row.engine, row.bits, row.layout, (row.prompt, row.generate))
    if row.prefill is None:
        served = unit.serve(spec)
    else:
        layout, number, workers = row.prefill
        other = replica(row.model, row.gpu, row.engine, row.bits, layout, (row.prompt, row.generate))
        each = replace(spec, clients=max(1, round(row.clients / workers)), prefill_replicas=max(1, round(number / workers)))
        each = replace(each, prefill_shared=max(1.0, workers / number), read_together=row.clients)
        served = unit.serve(each, prompts=other)
    return 1e3 * served.first, 1e3 * served.token


def error(value: float, truth: float) -> float:
    """Error relative to the measured value."""
    return abs(value / truth - 1)


def table(title: str, groups: dict[str, list[tuple[float, float, float]]]) -> None:
    """Median errors and the median ratio, by group. Values: (predicted, measured, of the rival or nan)."""
    print(f"\n{title:<44} rows  median  p90   ratio   rival")
    for name, values in sorted(groups.items()):
        errors = sorted(error(mine, truth) for mine, truth, _ in values)
        ratio = statistics.median(mine / truth for mine, truth, _ in values)
        theirs = [error(other, truth) for _, truth, other in values if other == other]
        rival = f"{statistics.median(theirs):6.1%} of {len(theirs)}" if theirs else ""
        p90 = errors[int(0.9 * (len(errors) - 1))]
        print(f"{name:<44} {len(values):4} {statistics.median(errors):6.1%} {p90:5.0%} {ratio:7.2f}  {rival}")


def score(rows: Iterable[Row], rival: dict[str, tuple[float, float]], csv_file: Path | None) -> None:
    """Prints the tables."""
    groups: dict[str, dict[str, list[tuple[float, float, float]]]] = {"first": defaultdict(list), "token": defaultdict(list)}
    refused: dict[str, int] = defaultdict(int)
    for row in rows:
        if any(word in row.model for word in UNMODELLED):
            refused["models with linear or sparse attention"] += 1
            continue
        if not row.clients or (row.prefill is not None and not row.prefill[2]):
            refused["rows without a number of clients or of replicas"] += 1
            continue
        try:
            first, token = predicted(row)
        except AnalyzerError as fault:
            refused[str(fault)[:150]] += 1
            continue
        if csv_file:
            with csv_file.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow((row.id, first, row.first, token, row.token))
        other = rival.get(row.id, (float("nan"), float("nan")))
        kind = "dense" if row.dense else "MoE"
        for name in (
            f"all {kind}",
            f"all {kind} {row.mode}",
            f"{row.model.split('/')[1][:20]} {row.gpu[:5]} {row.engine} {row.mode} {row.bits}",
        ):
            groups["token"][name].append((token, row.token, other[1]))
            if row.first == row.first and row.first > 0:
                groups["first"][name].append((first, row.first, other[0]))
    table("output token", groups["token"])
    table("first token", groups["first"])
    for reason, number in refused.items():
        print(f"not scored: {number} rows: {reason}")


def main() -> None:
    """Scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--rival", type=Path)
    parser.add_argument("--csv", type=Path, help="add a line for each row: id, and predicted and measured times")
    parser.add_argument("--every", type=int, default=1, help="use every N-th row")
    parser.add_argument("--only", default="", help="rows whose id has this text")
    args = parser.parse_args()
    rival: dict[str, tuple[float, float]] = {}
    if args.rival:
        with args.rival.open(encoding="utf-8") as file:
            rival = {row["id"]: (float(row["first"]), float(row["token"])) for row in csv.DictReader(file)}
    rows = [row for row in rows_of(args.wheel, held=args.held) if args.only in row.id]
    score(rows[:: args.every], rival, args.csv)


if __name__ == "__main__":
    main()
