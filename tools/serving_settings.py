"""Settings of the servers of measured rows that the public benchmark InferenceX (formerly InferenceMAX) has published.

Its launch scripts are in https://github.com/SemiAnalysisAI/InferenceX (Apache-2.0), `benchmarks/`, read at commit 843c6254f, with
their history: the rows say when they were measured, and scripts have changed. Those of Llama-3.1-70B are at commit a267b4bd5. The
client sends ten requests for each of its connections, at no given rate: each connection sends the next request when the last one is
complete. Lengths are drawn from 80 % to 100 % of the given ones, and the times are means
(`utils/bench_serving/benchmark_serving.py`). Settings of other rows of AIConfigurator's file are not known; they get the
defaults of the engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

PUBLIC: Final = re.compile(r"db-dump|source_file=20\d\d-|kimi-k2\.5-gap-analysis")
MEASURED: Final = re.compile(r"measured=(20\d\d-\d\d-\d\d)")
LAST: Final = "2026-03-01"
"""The date of public rows without one: those of the gap analysis of Kimi-K2.5."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a script gets, and what its settings depend on."""

    model: str
    gpu: str
    engine: str
    layout: tuple[int, int, int, int]
    """Tensor-parallel ranks and groups of attention, tensor- and expert-parallel ranks of the experts."""
    prompt: int
    generate: int
    clients: int
    bits: str
    date: str
    """When it was measured, as year-month-day."""

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of prompts and of outputs."""
        return self.prompt, self.generate

    @property
    def blackwell(self) -> bool:
        """Whether the GPU is of that generation."""
        return self.gpu.startswith(("B", "GB"))

    @property
    def data_parallel(self) -> bool:
        """Whether attention is data-parallel."""
        return self.layout[1] > 1


def is_public(source: str) -> bool:
    """Whether the source of a row is the public benchmark."""
    return bool(PUBLIC.search(source))


def date_of(source: str) -> str:
    """When a row was measured."""
    found = MEASURED.search(source)
    return found[1] if found else LAST


def settings_of(run: Run) -> dict[str, Any]:
    """Fields of `ServingSpec` that the script of a row sets."""
    name = run.model.lower()
    for word, settings in _BY_MODEL.items():
        if word in name:
            return settings(run)
    return {}


def is_dense(model: str) -> bool:
    """Whether a model of the rows has no experts."""
    return "Llama" in model or "Qwen3-32B" in model


def other_settings(run: Run) -> dict[str, Any]:
    """The same of rows that are not of the public benchmark, as far as rows of Llama-3.1-8B-Instruct tell.

    With TensorRT-LLM their first tokens take longer by the time of all output tokens divided by the number of clients: one request
    always waits until another one is complete. Rows of Qwen3-235B-A22B do not show that.
    """
    return {"slots": max(1, run.clients - 1)} if run.engine == "trtllm" and is_dense(run.model) else {}


def _llama(run: Run) -> dict[str, Any]:
    if run.engine != "trtllm":  # 70b_fp8_b200_docker.sh, 70b_fp8_h200_slurm.sh
        return {"chunk_tokens": 8192}
    wait = {"wait_steps": 20, "wait_share": 0.9} if run.lengths == (1024, 1024) and run.layout[0] < 8 else {}
    return {"chunk_tokens": 16384, **wait}  # 70b_fp8_b200_trt_slurm.sh


def _minimax(run: Run) -> dict[str, Any]:
    # minimaxm2.5_fp8_b200.sh from commit bddbf4031 on, minimaxm2.5_fp4_b200.sh from its first commit on
    if run.blackwell and run.date >= ("2026-04-03" if run.bits.startswith("w8") else "2026-04-08"):
        return {"chunk_tokens": 2 * run.prompt, "captured_tokens": 2048}
    return {}


def _kimi(run: Run) -> dict[str, Any]:
    # kimik2.5_fp4_b200.sh from commit 6c3acebfa on
    if run.engine == "vllm" and run.bits.startswith("w4a4") and run.date >= "2026-04-20":
        return {"chunk_tokens": 2 * run.prompt, "captured_tokens": 2048}
    return {}


def _gpt_oss(run: Run) -> dict[str, Any]:
    if run.engine == "vllm":  # gptoss_fp4_b200.sh, gptoss_fp4_h100.sh
        return {"chunk_tokens": 8192, "captured_tokens": 2048, **({"slots": 512} if run.blackwell else {})}
    # gptoss_fp4_b200_trt.sh: attention_dp_config.enable_balance, with the default of 50 steps
    return {"chunk_tokens": 20000, **({"wait_steps": 50} if run.data_parallel else {})}


def _deepseek(run: Run) -> dict[str, Any]:
    return _deepseek_trtllm(run) if run.engine == "trtllm" else _deepseek_sglang(run)


def _deepseek_trtllm(run: Run) -> dict[str, Any]:
    """dsr1_fp4_b200_trt.sh, dsr1_fp8_b200_trt.sh, dsr1_fp8_h200_trt.sh. A step has room for one prompt until commit 64af5a771."""
    room = -(-(run.clients + run.prompt + 64) // 64) * 64
    found: dict[str, Any] = {"chunk_tokens": room if run.date <= "2026-01-21" else max(8192, room)}
    if _piecewise(run):
        found["captured_tokens"] = found["chunk_tokens"]
    if run.data_parallel:
        return found | {"wait_steps": 60}
    short = run.lengths == (1024, 1024) and run.clients >= 64
    if run.bits.startswith("w8") and run.blackwell and short and run.date >= "2026-01-29":
        found |= {"wait_steps": 40, "wait_share": 0.8}  # from commit ec7bafaae on
    return found


def _piecewise(run: Run) -> bool:
    """Whether TensorRT-LLM replays steps with prompts as graphs (`enable_piecewise_cuda_graph`): from January 2026 on."""
    if not run.blackwell or run.date < "2026-01-29":
        return False
    if not run.bits.startswith("w8"):
        return run.lengths == (1024, 1024) and run.layout[0] * run.layout[1] == 8 and run.layout[3] == 8
    fewest = {(1024, 1024): 64, (8192, 1024): 64, (1024, 8192): 128}.get(run.lengths, run.clients + 1)
    return run.clients >= fewest and not (run.generate == 8192 and run.clients >= 256)


def _deepseek_sglang(run: Run) -> dict[str, Any]:
    if not run.blackwell:  # dsr1_fp8_h200.sh
        return {"chunk_tokens": 32768, "slots": 512 if run.lengths == (1024, 1024) else 256}
    receive = 30 if run.clients >= 16 else 10
    if not run.bits.startswith("w8"):  # dsr1_fp4_b200.sh, dsr1_fp4_b300.sh
        return {"chunk_tokens": 16384, "receive_steps": receive, "slots": 256}
    if run.layout[0] == 8:  # dsr1_fp8_b200.sh, dsr1_fp8_b300.sh
        return {"chunk_tokens": 32768, "receive_steps": receive, "slots": 128}
    return {"chunk_tokens": 8192, "receive_steps": 10, "slots": 32}


_BY_MODEL: Final = {
    "llama-3.1-70b": _llama, "minimax": _minimax, "kimi": _kimi, "gpt-oss": _gpt_oss, "deepseek": _deepseek
}  # fmt: skip
