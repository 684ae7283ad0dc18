"""Settings of the servers of measured rows that the public benchmark InferenceX (formerly InferenceMAX) has published.

Its launch scripts are in https://github.com/SemiAnalysisAI/InferenceX (Apache-2.0), `benchmarks/`, read at commit 843c6254f and,
for Llama-3.1-70B, a267b4bd5. Its client sends ten requests for each of its connections, at no given rate: each connection sends
the next request when the last one is complete. Lengths are drawn from 80 % to 100 % of the given ones, and the times are means
(`utils/bench_serving/benchmark_serving.py`). Settings of other rows of AIConfigurator's file are not known; they get the
defaults of the engine.
"""

from __future__ import annotations

import re
from typing import Any

PUBLIC = re.compile(r"db-dump|source_file=20\d\d-|kimi-k2\.5-gap-analysis")


def is_public(source: str) -> bool:
    """Whether the source of a row is the public benchmark."""
    return bool(PUBLIC.search(source))


def settings_of(
    model: str, gpu: str, engine: str, *, layout: tuple[int, int, int, int], prompt: int, generate: int, clients: int, bits: str
) -> dict[str, Any]:
    """Fields of `ServingSpec` that the script of a row sets."""
    name = model.lower()
    short = (prompt, generate) == (1024, 1024)
    blackwell = gpu.startswith(("B", "GB"))
    if "llama-3.1-70b" in name and engine == "trtllm":  # 70b_fp8_b200_trt_slurm.sh
        wait = {"wait_steps": 20, "wait_share": 0.9} if short and layout[0] < 8 else {}
        return {"chunk_tokens": 16384, **wait}
    if "minimax" in name and engine == "vllm" and blackwell:  # minimaxm2.5_fp8_b200.sh
        return {"chunk_tokens": 2 * prompt}
    if "gpt-oss" in name and engine == "trtllm":  # gptoss_fp4_b200_trt.sh: attention_dp_config.enable_balance
        return {"chunk_tokens": 20000, **({"wait_steps": 50} if layout[1] > 1 else {})}
    if "deepseek" in name and engine == "trtllm":  # dsr1_fp4_b200_trt.sh, dsr1_fp8_b200_trt.sh, dsr1_fp8_h200_trt.sh
        wait = {"wait_steps": 60} if layout[1] > 1 else {}
        if bits.startswith("w8") and blackwell and short and 64 <= clients < 256 and layout[1] == 1:
            wait = {"wait_steps": 40, "wait_share": 0.8}
        return {"chunk_tokens": max(8192, -(-(clients + prompt + 64) // 64) * 64), **wait}
    if "deepseek" in name and engine == "sglang":
        if not blackwell:  # dsr1_fp8_h200.sh
            return {"chunk_tokens": 32768}
        receive = 30 if clients >= 16 else 10  # dsr1_fp4_b200.sh, dsr1_fp8_b200.sh
        if bits.startswith("w8"):
            wide = layout[0] == 8
            return {"chunk_tokens": 32768 if wide else 8192, "receive_steps": receive if wide else 10}
        return {"chunk_tokens": 16384, "receive_steps": receive}
    return {}
