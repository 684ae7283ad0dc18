"""Speeds of GPUs by name, from `speeds.json` or from a file of the user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.files import read_json_object, refuse_unknown_fields
from analyzer.hardware.gpus import find
from analyzer.specs.hardware import MULTIPROCESSORS
from analyzer.specs.speed import SpeedSpec

SPEEDS: Final = Path(__file__).with_name("speeds.json")
GIGA: Final = 1e9
TERA: Final = 1e12
BITS: Final = ("32", "16", "8", "4")
"""Fields of `peak_tflops`."""
FIELDS: Final = (
    "name", "architecture", "peak_tflops", "hbm_gb_per_s", "nvlink_gb_per_s", "nvlink_domain", "network_gb_per_s",
    "multiprocessors", "sources", "peak_integer_tops", "pod_gpus", "spine_gb_per_s",
)  # fmt: skip
"""Fields of a user's file. `sources` is a note, which entries of `speeds.json` have."""
SMALLEST: Final = 1e-6
LARGEST: Final = 1e9
"""Bounds of the numbers in a user's file, so that no time is zero or infinite."""


def speed_of(gpu: str, *, network: float | None = None) -> SpeedSpec | None:
    """The speeds of a GPU of the table; None if they are not known. `network`: bytes per second, in place of the table's."""
    try:
        row, _ = find(gpu)
    except InputError:
        return None
    entry = json.loads(SPEEDS.read_text(encoding="utf-8"))["gpus"].get(row.name)
    if entry is None:
        return None
    return _speed(row.name, entry, multiprocessors=row.multiprocessors, network=network)


def read_speeds(path: Path, *, network: float | None = None) -> SpeedSpec:
    """The speeds in a file of the user (`--info-hardware`): the fields of one GPU of `speeds.json`, and `name`.

    Raises InputError if it cannot be read, or if a field is unknown, missing or not a number above 0 (from 1e-6 to 1e9).
    """
    option = "--info-hardware"
    remedy = "give a JSON file with the fields of a GPU in analyzer/hardware/speeds.json"
    entry = read_json_object(path, option, remedy)
    refuse_unknown_fields(entry, FIELDS, path, option)
    if isinstance(peaks := entry.get("peak_tflops"), dict):
        refuse_unknown_fields((f"peak_tflops.{bits}" for bits in peaks), [f"peak_tflops.{bits}" for bits in BITS], path, option)
    multiprocessors = entry.get("multiprocessors", MULTIPROCESSORS)
    try:
        return _speed(
            _printable(entry.get("name", path.stem), "name"),
            entry,
            multiprocessors=_whole(multiprocessors, "multiprocessors"),
            network=network,
        )
    except ValueError as error:
        raise InputError(option, f"'{path}' has no valid {error}", remedy) from None


def _speed(name: str, entry: Mapping[str, Any], *, multiprocessors: int, network: float | None) -> SpeedSpec:
    peaks = entry.get("peak_tflops")
    if not isinstance(peaks, Mapping):
        raise ValueError("peak_tflops")
    integers = entry.get("peak_integer_tops", {})
    if not isinstance(integers, Mapping):
        raise ValueError("peak_integer_tops")
    pod = entry.get("pod_gpus")
    if (pod is None) != (entry.get("spine_gb_per_s") is None):
        raise ValueError("spine_gb_per_s" if pod is not None else "pod_gpus")
    return SpeedSpec(
        name=name,
        architecture=str(entry.get("architecture", "")),
        peak_flops={bits: TERA * _positive(peaks.get(bits), f"peak_tflops.{bits}") for bits in BITS},
        hbm_bytes=GIGA * _positive(entry.get("hbm_gb_per_s"), "hbm_gb_per_s"),
        nvlink_bytes=GIGA * _positive(entry.get("nvlink_gb_per_s"), "nvlink_gb_per_s"),
        nvlink_domain=_whole(entry.get("nvlink_domain"), "nvlink_domain"),
        network_bytes=network or GIGA * _positive(entry.get("network_gb_per_s"), "network_gb_per_s"),
        pod=0 if pod is None else _whole(pod, "pod_gpus"),
        spine_bytes=0.0 if pod is None else GIGA * _positive(entry.get("spine_gb_per_s"), "spine_gb_per_s"),
        multiprocessors=multiprocessors,
        integer_ops={bits: TERA * _positive(integers[bits], f"peak_integer_tops.{bits}") for bits in BITS if bits in integers},
    )


def _positive(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not SMALLEST <= value <= LARGEST:
        raise ValueError(field)
    return float(value)


def _whole(value: object, field: str) -> int:
    if _positive(value, field) % 1:
        raise ValueError(field)
    return int(_positive(value, field))


def _printable(value: object, field: str) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(field)
    return value
