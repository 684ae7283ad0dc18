"""Compare inference in the style of Megatron-LM with the static mode of AIConfigurator on the same settings.

    VENV/bin/python -m benchmarks.aiconfigurator_static [--csv FILE] [--model TEXT]

Runs in an environment with `aiconfigurator-core` 0.12.0 and this repository on PYTHONPATH. One batch of equal prompts is computed
and then generated, without further requests. Prints the median and the extremes of the ratio of the times, this program's to the
other one's, by the kind of the model, and with fewer and more than 1,024 tokens in all prompts.
"""

from __future__ import annotations

import argparse
import csv
import logging
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from analyzer.hardware.speeds import speed_of
from analyzer.inference.estimate import megatron_steps
from analyzer.inference.reading import read_inference
from benchmarks.aiconfigurator_rows import static
from tools.score_serving import Row

MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": ((1, 1), (2, 1)),
    "meta-llama/Llama-3.1-70B": ((4, 1), (8, 1)),
    "Qwen/Qwen3-30B-A3B": ((1, 1), (1, 4)),
    "Qwen/Qwen3-235B-A22B": ((1, 8),),
    "deepseek-ai/DeepSeek-V3": ((1, 8),),
}
"""Models, and tensor- and expert-parallel ranks. With both, Megatron-LM computes tokens more than once."""
GPUS = ("H100-80GB", "H200-141GB", "B200-180GB")
BITS = ("w16a16kv16", "w8a8kv8")
BATCHES = (1, 8, 64)
PROMPTS = (128, 1024, 4096)
FEW_TOKENS = 1024


class Setting(NamedTuple):
    """A batch of a model on a layout."""

    model: str
    gpu: str
    bits: str
    tensor: int
    expert: int
    batch: int
    """Requests of each rank."""
    prompt: int


def settings(model: str) -> Iterator[Setting]:
    """All settings of the models whose name has the text."""
    for name, sizes in MODELS.items():
        if model not in name:
            continue
        for gpu in GPUS:
            for bits in BITS:
                for tensor, expert in sizes:
                    for batch in BATCHES:
                        yield from (Setting(name, gpu, bits, tensor, expert, batch, prompt) for prompt in PROMPTS)


def mine(each: Setting) -> tuple[float, float]:
    """Milliseconds of this program: of all prompts, and of an output token."""
    words = ["--info-model", each.model, "--tensor-model-parallel-size", str(each.tensor), "--info-world-size"]
    words.append(str(each.tensor * each.expert))
    words += ["--expert-model-parallel-size", str(each.expert)] if each.expert > 1 else []
    words += ["--info-gpu", each.gpu, "--info-quantize", each.bits, "--info-megatron", "0.16.1"]
    words += ["--info-inference", f"batch={each.batch},prompt={each.prompt},generate=128"]
    speed = speed_of(each.gpu)
    assert speed is not None
    prefill, decode = megatron_steps(read_inference(words, environ={}, folder=Path.cwd()).job, speed)
    return 1e3 * prefill.total, 1e3 * decode.total


def other(each: Setting) -> tuple[float, float]:
    """Milliseconds of AIConfigurator with TensorRT-LLM's kernels."""
    layout = (each.tensor, each.expert, each.tensor, each.expert) if each.expert > 1 else (each.tensor, 1, each.tensor, 1)
    row = Row(
        id="", model=each.model, gpu=each.gpu, engine="trtllm", mode="agg", prompt=each.prompt, generate=128, bits=each.bits,
        clients=each.batch, layout=layout, prefill=None, first=0.0, token=0.0,
    )  # fmt: skip
    return static(row, layout, "static_ctx", each.batch), static(row, layout, "static_gen", each.batch)


def main() -> None:
    """Compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--model", default="")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    ratios: dict[str, list[float]] = defaultdict(list)
    faults: dict[str, int] = defaultdict(int)
    rows = []
    for each in settings(args.model):
        try:
            first, token = mine(each)
            their_first, their_token = other(each)
        except Exception as fault:  # of the other program: the setting is not compared
            faults[f"{type(fault).__name__}: {str(fault)[:100]}"] += 1
            continue
        kind = "dense" if "Llama" in each.model else "with experts"
        tokens = "few tokens" if each.batch * each.prompt <= FEW_TOKENS else "many tokens"
        ratios[f"output token, {kind}"].append(token / their_token)
        ratios[f"prompts, {tokens}, {kind}"].append(first / their_first)
        rows.append((*each, first, their_first, token, their_token))
    for name, values in sorted(ratios.items()):
        print(f"{name:<36} {len(values):4} {statistics.median(values):6.2f} {min(values):6.2f} to {max(values):.2f}")
    for name, number in faults.items():
        print(number, name)
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([(*Setting._fields, "first", "their_first", "token", "their_token"), *rows])


if __name__ == "__main__":
    main()
