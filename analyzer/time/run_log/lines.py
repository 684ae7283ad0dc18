"""How the lines of a log are written.

Sources: `training_log` in megatron/training/training.py, `report_memory` and `report_theoretical_memory` beside it, and
megatron/core/timers.py, of 2020 to core 0.16; Megatron-DeepSpeed (TFLOPs, seconds); the fork of AMD (two values with a slash);
Megatron-Bridge (Step Time, decimal gigabytes); NeMo 2 (train_step_timing).
"""

from __future__ import annotations

import re
from typing import Final

_NUMBER: Final = r"(\d{1,15}(?:\.\d{1,15})?(?:[eE][+-]?\d{1,2})?)"

ITERATION: Final = re.compile(r"\biteration:? {1,20}(\d{1,12}) {0,20}/ {0,20}(?:\d{1,12}|infinity)\b")
"""` iteration      10/     100 |`, and of NeMo `Training epoch 0, iteration 10/99 |`."""
ELAPSED: Final = re.compile(r"\belapsed time per iteration \((ms|s)\): {0,5}" + _NUMBER)
NEMO_SECONDS: Final = re.compile(r"\btrain_step_timing in s: {0,5}" + _NUMBER)
STEP_TIME: Final = re.compile(r"\bStep Time ?: {0,5}" + _NUMBER + r" ?s\b")
"""Of Megatron-Bridge, on a line of its own before that of the iteration."""
TFLOPS: Final = (
    re.compile(r"\bthroughput per GPU \(TFLOP/s/GPU\): {0,5}" + _NUMBER),
    re.compile(r"\bTFLOPs: {0,5}" + _NUMBER),
    re.compile(r"\bTFLOPS_per_GPU: {0,5}" + _NUMBER),
    re.compile(r"(?<![\d.])" + _NUMBER + r" ?MODEL_TFLOP/s/GPU"),
)
BATCH: Final = re.compile(r"\bglobal[ _]batch[ _]size: {0,12}(\d{1,9})\b")
MEMORY: Final = re.compile(
    r"(?:\[Rank (\d{1,7})\] {0,3})?\(?after (\d{1,12}) iterations\)? memory \(MB\) \| allocated: {0,5}"
    + _NUMBER + r" \| max allocated: {0,5}" + _NUMBER + r" \| reserved: {0,5}" + _NUMBER + r" \| max reserved: {0,5}" + _NUMBER
)  # fmt: skip
"""In units of 2^20 bytes. Without a rank it is that of rank 0."""
BRIDGE_MEMORY: Final = re.compile(r"\[Rank (\d{1,7})\] {0,3}\(after (\d{1,12}) iterations\) memory \(GB\) \|")
BRIDGE_GIGABYTES: Final = re.compile(r"\bmem-((?:max-)?(?:allocated|reserved))-gigabytes: {0,5}" + _NUMBER)
"""In units of 10^9 bytes."""
RETRIES: Final = re.compile(r"\bmem-alloc-ret(?:ri|ir)es: {0,5}(\d{1,9})\b")
RANK_PARAMETERS: Final = re.compile(
    r"number of parameters on \(tensor, pipeline[^)]{0,40}\) model parallel rank "
    r"\((\d{1,6}), (\d{1,6})[^)]{0,40}\): {0,5}(\d{1,15})\b"
)
OLD_PARAMETERS: Final = re.compile(r"number of parameters on model parallel rank (\d{1,6}): {0,5}(\d{1,15})\b")
TOTAL_PARAMETERS: Final = re.compile(r"Total number of parameters in billions: {0,5}" + _NUMBER)
THEORETICAL: Final = re.compile(r"Theoretical memory footprints: .{0,120}?\btotal={0,1} {0,5}" + _NUMBER + r" MB")
TIMER: Final = re.compile(
    r"(?<![\w/-])([a-z][a-z/-]{2,60}) \.{2,60}: {0,5}(?:\(" + _NUMBER + r", " + _NUMBER + r"\)|" + _NUMBER + r")"
)
"""`    forward-backward ......: (26094.39, 26095.09)` of all ranks, or the highest value only, in milliseconds."""
TIMER_NAME: Final = re.compile(r"(?<![\w/-])([a-z][a-z/-]{2,60}):\s{0,5}$")
TIMER_OF_RANK: Final = re.compile(r"\brank {1,3}(\d{1,7}): {0,3}" + _NUMBER + r"\s{0,5}$")
"""With `--timing-log-option all` the name stands on one line, and each rank on a further one."""
SIZES: Final = re.compile(
    r"\b(world|data-parallel|context-parallel|tensor-model-parallel|pipeline-model-parallel)[ -]size: (\d{1,9})\b"
)
"""`using world size: 16, data-parallel size: 4, ...`."""
ARGUMENT: Final = re.compile(
    r"(?<![\w.])(world_size|seq_length|micro_batch_size|global_batch_size|num_layers|hidden_size|num_experts|"
    r"tensor_model_parallel_size|pipeline_model_parallel_size|context_parallel_size|expert_model_parallel_size|data_parallel_size) "
    r"\.{2,60} (\d{1,12})\s{0,5}$"
)
"""A line of Megatron's list of its arguments."""
COLOURS: Final = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
"""Escape sequences of a terminal."""
