"""Options that give the layers of each pipeline stage: MindSpeed, FlagScale and Yuan.

Sources: mindspeed_llm/features_manager/pipeline_parallel of MindSpeed-LLM, the scripts of examples/aquila/70B of FlagScale, and
megatron/arguments.py of Yuan 2.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from analyzer.launch.forks.launch_options import NOTHING, LaunchOptions, Reading
from analyzer.units import natural

MOST_LAYERS: Final = 10**6
"""Layers that are counted. `analyzer.launch.derive.reading` refuses such numbers afterwards."""


def stage_layers(launch: LaunchOptions, flag: str) -> Reading:
    """Number of layers of each stage, in words or separated by commas."""
    counts = _integers(launch.fork.get(flag, ()))
    if launch.pipeline == 1 or len(counts) != launch.pipeline:
        return NOTHING
    return Reading(words=_layout(counts))


def hetero_stages(launch: LaunchOptions, flag: str) -> Reading:
    """For each kind of device the number of its stages, and then the layers of each of them."""
    values = _integers(launch.fork.get(flag, ()))
    counts: list[int] = []
    while values:
        counts += values[1 : 1 + values[0]]
        values = values[1 + values[0] :]
    if launch.pipeline == 1 or len(counts) != launch.pipeline:
        return NOTHING
    return Reading(words=_layout(counts))


def noop_layers(launch: LaunchOptions, flag: str) -> Reading:
    """Layers without parameters and computation. They count when layers are split over stages."""
    layers, empty = launch.integer("--num-layers", 0), idle_layers(launch)
    size = launch.integer("--num-layers-per-virtual-pipeline-stage", 0) or layers // launch.pipeline
    if not 0 < layers <= MOST_LAYERS or not empty or size < 1:
        return NOTHING
    counts = [sum(index not in empty for index in range(first, first + size)) for first in range(0, layers, size)]
    left = ("--num-layers", str(sum(counts)))
    if len(counts) == 1:
        return Reading(words=left, dropped=("--num-layers",))
    if layers % size:
        return Reading(warnings=(f"{flag}: layers that do nothing are counted as layers, so the prediction is too high.",))
    words = (*left, *_layout(counts, mtp=launch.integer("--mtp-num-layers", 0)))
    return Reading(words=words, dropped=("--num-layers", "--num-layers-per-virtual-pipeline-stage"))


def padded_layers(launch: LaunchOptions, flag: str) -> Reading:  # noqa: ARG001
    """Layers that do not divide over the stages: the last chunk of layers has one less than the others, then the first ones.

    Source: `get_offset` in megatron/legacy/model/transformer.py of zero-bubble-pipeline-parallelism.
    """
    layers, stages = launch.integer("--num-layers", 0), launch.pipeline
    missing = -layers % stages
    if not 0 < layers <= MOST_LAYERS or not missing or stages > layers:
        return NOTHING
    stage = (layers + missing) // stages
    size = launch.integer("--num-layers-per-virtual-pipeline-stage", stage)
    if size < 1 or stage % size:
        return NOTHING
    counts = [size] * ((layers + missing) // size)
    for index in range(-1, missing - 1):
        counts[index] -= 1
    return Reading(words=_layout(counts), dropped=("--num-layers-per-virtual-pipeline-stage",))


def idle_layers(launch: LaunchOptions) -> set[int]:
    """Indices, from 0 on, of the layers of `--noop-layers`."""
    layers = launch.integer("--num-layers", 0)
    return {index for index in _integers(launch.fork.get("--noop-layers", ())) if 0 <= index < layers}


def _integers(values: Sequence[str]) -> list[int]:
    numbers = (natural(word.strip()) for value in values for word in value.split(","))
    return [number for number in numbers if number is not None]


def _layout(counts: Sequence[int], *, mtp: int = 0) -> tuple[str, str]:
    """Megatron's layout of stages with these numbers of layers, and MTP layers on the last one."""
    return ("--pipeline-model-parallel-layout", "E" + "|".join(f"t*{count}" if count else "" for count in counts) + "m" * mtp + "L")
