"""Measured peaks of adapters in Megatron-Bridge.

LoRA of GPT-OSS-120B on H100 with TP2, EP8 and sequence parallelism, in GB of 10**9 bytes, with and without
`sequence_parallel_input_regather`: skills/nemo-mbridge-perf-memory-tuning/SKILL.md of NVIDIA-NeMo/Megatron-Bridge at 067f987d.
"""

from __future__ import annotations

from pathlib import Path

from analyzer.api import analyze

LAUNCH = str(Path(__file__).parents[2] / "examples/frameworks/megatron_bridge_gpt_oss_120b_lora.yaml")
MEASURED = {"false": 52.185e9, "true": 51.371e9}
"""By the value of the option."""
BALANCED = 0.05
"""The routing is not known, and the prediction assumes a balanced one."""


def test_peaks_of_adapters_are_those_that_were_measured() -> None:
    predicted = {}
    for value, measured in MEASURED.items():
        words = (LAUNCH, f"peft.sequence_parallel_input_regather={value}", "--info-world-size", "8", "--info-gpu", "H100-80GB")
        report = analyze(words)
        assert report.job.withheld == ()
        predicted[value] = report.ranks[0].memory.peak_allocated_bytes
        assert abs(predicted[value] / measured - 1) < BALANCED
    saved = predicted["false"] - predicted["true"]
    assert abs(saved / (MEASURED["false"] - MEASURED["true"]) - 1) < 0.02
